"""A model of a Redis database: the commands that `RedisStore` sends, and its scripts, run by a real Lua interpreter."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

from blockyard.errors import StoreError
from blockyard.workers.extras import missing

try:
    from lupa.lua51 import LuaError, LuaRuntime
except ModuleNotFoundError as error:
    raise missing("blockyard.tools.sim", error) from None

__all__ = ["RedisData"]

_OK: Final = b"OK"
_FULL: Final = "OOM command not allowed when used memory > 'maxmemory'."
_GROWING: Final = {b"SET", b"HSET", b"HSETNX", b"HINCRBY", b"ZADD"}
_WRITING: Final = {*_GROWING, b"DEL", b"UNLINK", b"EXPIRE", b"HDEL", b"ZREM", b"ZPOPMIN"}


_Copy = tuple[dict[bytes, Any], dict[bytes, float], int]  # values, when they expire, and the number of writes


class RedisData:
    """The keys of one database, in the order of insertion.

    Values are bytes, hashes (`dict[bytes, bytes]`) and sorted sets (`dict[bytes, float]`).

    Args:
        clock: returns the server's time in seconds.
        watch: called with each string that is about to be stored.

    Attributes:
        values: values by key; the next command removes expired ones.
        expires: when keys with a time to live expire.
        is_full: whether commands that need memory are refused.
        server: number of the server that answers.
        num_failovers: number of its history; grows when a replica takes its place.
        has_replica: whether a replica is connected.
        needs_replica: whether it refuses writes without one, `min-replicas-to-write 1`.
        keys_per_scan: keys that each SCAN visits; a real server takes a hint.
    """

    def __init__(self, clock: Callable[[], float], watch: Callable[[bytes], None]) -> None:
        self.values: dict[bytes, Any] = {}
        self.expires: dict[bytes, float] = {}
        self.is_full = False
        self.server, self.num_failovers, self.keys_per_scan = 0, 0, 8
        self._clock, self._watch = clock, watch
        self.has_replica, self.needs_replica = True, False
        self._offset = 0  # number of writes so far
        self._behind: _Copy | None = None  # what the replica had when it stopped
        self._has_written = False  # a script that has written is not refused memory

    def run(self, command: list[bytes]) -> Any:
        """Run a command. Returns an int, bytes, None or a list.

        Raises:
            StoreError: the server refuses the command.
        """
        name, *words = command
        if self.is_full and name in _GROWING and not self._has_written:
            raise StoreError(_FULL)
        if self.needs_replica and not self.has_replica and (name in _WRITING or name == b"GETEX"):
            raise StoreError("NOREPLICAS Not enough good replicas to write.")
        self._has_written |= _scripts.data is self and name in _WRITING
        self._offset += name in _WRITING
        self._drop_expired()
        if name == b"EVAL":
            return self._eval(words[0], words[2 : 2 + int(words[1])], words[2 + int(words[1]) :])
        act: Callable[..., Any] = getattr(self, f"_{name.decode().lower()}")
        answer = act(*words)
        if not name.startswith(b"GET"):
            for key in words[:1]:
                if self.values.get(key) == {}:  # Redis removes empty hashes and sets
                    self.drop(key)
        return answer

    def stop_replica(self) -> None:
        """Let the replica fall behind from now on."""
        values = {name: dict(value) if isinstance(value, dict) else value for name, value in self.values.items()}
        self._behind = values, dict(self.expires), self._offset

    def go_on_with_replica(self) -> None:
        """Let the replica catch up."""
        self._behind = None

    def fail_over(self, server: int, to: RedisData | None = None) -> None:
        """Move what the replica has to `to`, or to this server. Another replica of that server then follows it."""
        to = to or self
        if self._behind is not None:
            to.values, to.expires, _ = self._behind
        to.server, to.num_failovers, self._behind = server, self.num_failovers + 1, None

    def drop(self, key: bytes) -> bool:
        """Delete a key. Returns whether it existed."""
        self.expires.pop(key, None)
        return self.values.pop(key, None) is not None

    # ---- scripts ----

    def _eval(self, script: bytes, keys: list[bytes], words: list[bytes]) -> Any:
        outer, _scripts.data, self._has_written = _scripts.data, self, False
        try:
            return _scripts.run(script, keys, words)
        finally:
            _scripts.data, self._has_written = outer, False

    # ---- strings and keys ----

    def _get(self, key: bytes, *_: bytes) -> Any:
        return self.values.get(key)

    _getex = _get

    def _set(self, key: bytes, value: bytes, *options: bytes) -> bytes | None:
        if b"NX" in options and key in self.values:
            return None
        self._watch(value)
        self.drop(key)
        self.values[key] = value
        for unit, seconds in ((b"EX", 1.0), (b"PX", 0.001)):
            if unit in options:
                self.expires[key] = self._clock() + seconds * int(options[options.index(unit) + 1])
        return _OK

    def _unlink(self, *keys: bytes) -> int:
        return sum(self.drop(key) for key in keys)

    _del = _unlink

    def _exists(self, *keys: bytes) -> int:
        return sum(key in self.values for key in keys)

    def _expire(self, key: bytes, seconds: bytes) -> int:
        if key in self.values:
            self.expires[key] = self._clock() + int(seconds)
        return int(key in self.values)

    def _info(self, section: bytes) -> bytes:
        if section == b"server":
            return b"run_id:%040x\r\n" % self.server
        found = b"master_replid:%040x\r\n" % self.num_failovers
        found += b"master_repl_offset:%d\r\n" % self._offset
        confirmed = self._offset if self._behind is None else self._behind[2]
        return found + (b"slave0:state=online,offset=%d\r\n" % confirmed if self.has_replica else b"")

    def _wait(self, *_: bytes) -> int:
        return 0

    def _scan(self, cursor: bytes, _match: bytes, pattern: bytes, _count: bytes, _num: bytes) -> list[Any]:
        """Return a few names. Each server has its own order."""
        salt, count = b"%d" % self.server, self.keys_per_scan
        order = {
            1 + int.from_bytes(blake2b(name, digest_size=6, salt=salt).digest(), "big"): name for name in self.values
        }
        later = sorted(place for place in order if place >= int(cursor))
        found = [order[place] for place in later[:count]]
        following = b"%d" % later[count] if len(later) > count else b"0"
        return [following, [name for name in found if name.startswith(pattern[:-1])]]

    # ---- hashes ----

    def _hget(self, key: bytes, field: bytes) -> bytes | None:
        return self._hash(key).get(field)

    def _hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        return [self._hash(key).get(field) for field in fields]

    def _hgetall(self, key: bytes) -> list[bytes]:
        return [word for pair in self._hash(key).items() for word in pair]

    def _hkeys(self, key: bytes) -> list[bytes]:
        return list(self._hash(key))

    def _hexists(self, key: bytes, field: bytes) -> int:
        return int(field in self._hash(key))

    def _hset(self, key: bytes, field: bytes, value: bytes) -> int:
        is_new = field not in self._hash(key)
        self.values.setdefault(key, {})[field] = value
        return int(is_new)

    def _hsetnx(self, key: bytes, field: bytes, value: bytes) -> int:
        return 0 if field in self._hash(key) else self._hset(key, field, value)

    def _hincrby(self, key: bytes, field: bytes, by: bytes) -> int:
        found = int(self._hash(key).get(field, b"0")) + int(by)
        self._hset(key, field, b"%d" % found)
        return found

    def _hdel(self, key: bytes, *fields: bytes) -> int:
        return sum(self._hash(key).pop(field, None) is not None for field in fields)

    # ---- sorted sets ----

    def _zadd(self, key: bytes, *words: bytes) -> int:
        only = words[0] if words[0] in {b"NX", b"XX"} else b""
        rest = words[1:] if only else words
        there, added = self._hash(key), 0
        for score, member in zip(rest[::2], rest[1::2], strict=True):
            if only and (member in there) != (only == b"XX"):
                continue
            added += member not in there
            there[member] = float(score)
        if there:
            self.values[key] = there
        return added

    def _zrem(self, key: bytes, *members: bytes) -> int:
        return self._hdel(key, *members)

    def _zcard(self, key: bytes) -> int:
        return len(self._hash(key))

    def _zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = self._hash(key).get(member)
        return None if score is None else _number(score)

    def _zpopmin(self, key: bytes, count: bytes = b"1") -> list[bytes]:
        there = self._hash(key)
        gone = sorted(there, key=lambda member: (there[member], member))[: int(count)]
        return [word for member in gone for word in (member, _number(there.pop(member)))]

    def _zrange(self, key: bytes, start: bytes, stop: bytes) -> list[bytes]:
        there = self._hash(key)
        return sorted(there, key=lambda member: (there[member], member))[int(start) : int(stop) + 1]

    def _zmscore(self, key: bytes, *members: bytes) -> list[bytes | None]:
        return [self._zscore(key, member) for member in members]

    def _zrevrangebyscore(self, key: bytes, most: bytes, *_: bytes) -> list[bytes]:
        """Return the last member, with its score, below a score or of all."""
        there, below = self._hash(key), float(most.lstrip(b"("))
        found = (member for member in there if there[member] < below)
        last = max(found, key=lambda member: (there[member], member), default=None)
        return [] if last is None else [last, _number(there[last])]

    # ---- helpers ----

    def _hash(self, key: bytes) -> dict[bytes, Any]:
        found: dict[bytes, Any] = self.values.get(key, {})
        return found

    def _drop_expired(self) -> None:
        if self.expires:
            now = self._clock()
            for key in [key for key, at in self.expires.items() if at <= now]:
                self.drop(key)


class _LuaScripts:
    """The Lua interpreter and its compiled scripts. One script runs at a time.

    Attributes:
        data: the database that `redis.call` acts on.
    """

    def __init__(self) -> None:
        self.data: RedisData | None = None
        self._lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._table = self._lua.eval("function(...) return {...} end")
        self._lua.globals()[b"redis"] = self._lua.table_from({b"call": self._call, b"pcall": self._try})
        self._compiled: dict[bytes, Any] = {}

    def run(self, script: bytes, keys: list[bytes], words: list[bytes]) -> Any:
        """Run a script as Redis does: an error of `redis.call` ends it, but its changes so far stay."""
        function = self._compiled.get(script)
        if function is None:
            function = self._compiled[script] = self._lua.eval(b"function(KEYS, ARGV) " + script + b" end")
        try:
            return self._answer(function(self._table(*keys), self._table(*words)))
        except LuaError as error:  # an error of `redis.call` is raised as it is
            raise StoreError(str(error)) from None

    def _call(self, *words: Any) -> Any:
        """Run `redis.call`, and convert the answer to Lua."""
        if self.data is None:
            raise StoreError("redis.call outside of a script")
        answer = self.data.run([word if isinstance(word, bytes) else _number(word) for word in words])
        if isinstance(answer, list):
            return self._list(answer)
        return False if answer is None else answer

    def _try(self, *words: Any) -> Any:
        """Run `redis.pcall`, which returns an error as a table."""
        try:
            return self._call(*words)
        except StoreError as error:
            return self._lua.table_from({b"err": str(error).encode()})

    def _list(self, words: list[Any]) -> Any:
        each = [self._list(word) if isinstance(word, list) else False if word is None else word for word in words]
        return self._table(*each)

    def _answer(self, found: Any) -> Any:
        """Convert a script's result to Redis's answer."""
        if found is None or found is False:
            return None
        if isinstance(found, bytes):
            return found
        if isinstance(found, bool | int | float):
            return int(found)
        return [self._answer(found[place]) for place in range(1, len(found) + 1)]


def _number(value: float) -> bytes:
    return b"%d" % value if value == int(value) else repr(float(value)).encode()


_scripts: Final = _LuaScripts()
