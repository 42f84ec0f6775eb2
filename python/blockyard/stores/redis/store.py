"""`RedisStore`: blocks on a Redis or Valkey server or cluster; `blockyard.stores.redis` describes it."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import RedisClient
from blockyard.errors import StoreError, StoreFullError
from blockyard.stores.base import ExternalStore, Owners, Use, check_quota, quotaless
from blockyard.stores.namespace import TEXT_NAME, text_of
from blockyard.stores.redis.lists import SEGMENTS, Lists
from blockyard.stores.redis.url import RedisURL, read_url
from blockyard.stores.threaded.epochs import Epoch, Record
from blockyard.stores.threaded.remote import RemoteStore, batched, count_slots
from blockyard.stores.value import HEADER, Bytes

__all__ = ["RedisStore", "open_redis"]

_log = logging.getLogger("blockyard.stores")

_KEYS: Final = 512  # keys per round trip
_BYTES: Final = (1 << 20) + 64 * HEADER  # a mebibyte of blocks of 16 KiB or more, with their headers
_CONNECT_SECONDS: Final = 2.0
_TENANT: Final = 16  # bytes of a tenant, the SHA-256 of its salt, that name it on the server
_SWAP_TTL: Final = 86_400.0
# Returns the record, the id of the server's history, its offset there, and the offset that each replica has confirmed.
# `GETEX` counts as a write, so a server that may not write refuses this.
_READ: Final = b"""
local info = redis.pcall('INFO', 'replication')
if type(info) ~= 'string' then info = '' end
local answer = {redis.call('GETEX', KEYS[1], 'PERSIST') or '', string.match(info, 'master_replid:(%x+)') or ''}
answer[3] = string.match(info, 'master_repl_offset:(%d+)') or '0'
for offset in string.gmatch(info, 'state=online,offset=(%d+)') do answer[#answer + 1] = offset end
return answer
"""
# Runs the commands of `lists` without effect. Returns the first one that fails, and why.
_PROBE: Final = b"""
local key = KEYS[1]
for _, command in ipairs({
  {'EXISTS', key}, {'GET', key}, {'SET', key, '', 'PX', 1}, {'DEL', key}, {'UNLINK', key}, {'ZADD', key, 'XX', 0, '-'},
  {'ZREM', key, '-'}, {'ZCARD', key}, {'ZRANGE', key, 0, 0}, {'ZREVRANGEBYSCORE', key, 0, 0}, {'ZSCORE', key, '-'},
  {'ZMSCORE', key, '-'}, {'ZPOPMIN', key}, {'HGET', key, '-'}, {'HMGET', key, '-'}, {'HDEL', key, '-'},
  {'HEXISTS', key, '-'}, {'HKEYS', key}, {'HGETALL', key}, {'EXPIRE', key, 1},
}) do
  local found = redis.pcall(unpack(command))
  if type(found) == 'table' and found.err then return {command[1], found.err} end
end
"""
_NOT_ALLOWED: Final = ("unknown command", "Unknown Redis command", "NOPERM", "can't run", "ACL", "permission")
_SET: Final = b"if (redis.call('GET', KEYS[1]) or '') == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) end"
_WAIT: Final = [b"WAIT", b"1000", b"10"]  # asks replicas to confirm now, not once a second, and waits 10 ms
_KEEP_SHARE: Final = 0.75  # share of `timeout_base` for which `forget` waits for replicas
_NODES_LOST: Final = 3  # how many lost nodes a batch can detect, one after the other, before its deadline


def open_redis(
    url: str,
    *,
    bytes_per_block: int,
    num_slots: int | None = None,
    namespace: bytes = bytes(32),
    use: Use = "swap",
    **options: Any,
) -> ExternalStore:
    """Open the Redis store. `blockyard.stores.open_store` calls this for the schemes in the module's docstring.

    Args:
        url: `redis://host:6379?size=2GiB`; `docs/reference/store-urls.md` lists the options.
        bytes_per_block: bytes of one block.
        num_slots: number of blocks to hold; None for as many as fit into `size`.
        namespace: 32-byte digest of everything that determines the bytes.
        use: `"swap"` or `"prefix"`.
        options: `codec` and `mac_key`, as for `open_store`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the wrong part, but no password.
        StoreFullError: `size` holds too few blocks.
        StoreError: the server does not answer or refuses the password, or a PEM file cannot be read.
    """
    found = read_url(url)
    blocks = count_slots(found.parts, found.size, bytes_per_block, num_slots, example="2GiB")
    if found.client["cluster"] and use == "prefix" and blocks < SEGMENTS:
        raise StoreFullError(f"{found.parts.url!r}: there is room for {blocks} blocks, a cluster needs {SEGMENTS}")
    store = RedisStore(
        found, bytes_per_block=bytes_per_block, num_slots=blocks, namespace=namespace, use=use, **options
    )
    store.ping()
    store.describe()
    store.compare_size()
    return store


class RedisStore(RemoteStore):
    """Blocks on a Redis or Valkey server or cluster; created by `open_redis`.

    `connect` creates the client, in place of `RedisClient`. `segments` is a cluster's number of segments.
    """

    _reuses_rows = True
    _there_seconds = 3.0  # other processes and the server evict blocks, and a lookup is one short round trip

    def __init__(
        self,
        found: RedisURL,
        *,
        use: Use,
        connect: Callable[..., Any] = RedisClient,
        segments: int = SEGMENTS,
        **options: Any,
    ) -> None:
        super().__init__(found.parts, use=use, **options)
        self.threads, self.memory, self.timeout_base = found.threads, found.memory, found.timeout_base
        ttl = found.ttl if found.ttl is not None else _SWAP_TTL if use == "swap" else 0.0
        self._ttl = round(ttl * 1000) or None
        digits = self.namespace[:8].hex().encode()
        self._prefix = b"blockyard:%b%b:" % (b"swap:" if use == "swap" else b"", digits)
        self._lists = self._new_lists(digits, segments if found.client["cluster"] else 0) if use == "prefix" else []
        self.keeps_quotas = len(self._lists) == 1
        self._quotas: dict[bytes, int] = {}  # by name, as set by this process
        self._setting = self._runtime.lock()  # held while quotas are set: the last call wins
        self._are_quotas_lost = False
        self._history = b""  # id of the history in which this process last replaced the record
        self._to_sweep: set[int] = set()  # segments that may have unlisted blocks
        self._is_sweeping = False
        timeout = self.timeout_base / _NODES_LOST if found.client["cluster"] else self.timeout_base
        timeouts: dict[str, Any] = {"timeout": timeout, "connect_timeout": min(timeout, _CONNECT_SECONDS)}
        failure = None
        try:
            self._client = connect(**found.client, **timeouts)
        except StoreError as error:
            failure = self._public(error)
        if failure is not None:  # without the client's error as its context, which may quote a secret
            raise failure

    def _new_lists(self, digits: bytes, segments: int) -> list[Lists]:
        if not segments:
            return [Lists(self._prefix, self.num_slots, has_quotas=True)]
        each, more = divmod(self.num_slots, segments)
        names = [b"blockyard:{%b.%02x}:" % (digits, number) for number in range(segments)]
        return [Lists(name, each + (number < more), has_quotas=False) for number, name in enumerate(names)]

    def put(self, keys: Bytes, rows: Bytes) -> NDArray[np.bool_]:
        """Store values in slots."""
        stored = np.zeros(len(keys), np.bool_)
        for part in batched(rows, _KEYS, _BYTES):
            names = [self._prefix + key.tobytes() for key in keys[part]]
            stored[part], _, why = self._call(
                self._client.put, names, rows[part], ttl_ms=self._ttl, lengths=self._lengths(rows[part])
            )
            self._note_lost(why)
        return stored

    def put_blocks(self, keys: Bytes, rows: Bytes, owners: Owners | None, damaged: set[bytes]) -> NDArray[np.bool_]:  # noqa: ARG002 (every put replaces)
        """Store values; the same transaction lists the blocks and drops excess ones."""
        whose = (
            None
            if owners is None
            else [
                tenant.tobytes()[:_TENANT] + (parent.tobytes() if parent.any() else b"")
                for tenant, parent in zip(*owners, strict=True)
            ]
        )
        names, stored = [key.tobytes() for key in keys], np.zeros(len(keys), np.bool_)
        segment = [name[0] % len(self._lists) for name in names].__getitem__
        places = sorted(range(len(names)), key=segment)  # the blocks of a segment keep their order
        for part in batched(rows, _KEYS, _BYTES):
            chosen = places[part]
            groups = [(number, list(group)) for number, group in groupby(chosen, segment)]
            values = rows[part] if len(self._lists) == 1 else rows[chosen]
            stored[chosen], answers, why = self._call(
                self._client.put,
                [self._full_name(names[place]) for place in chosen],
                values,
                ttl_ms=self._ttl,
                lengths=self._lengths(values),
                sizes=[len(group) for _, group in groups],
                last=[self._settle(number, group, names, whose) for number, group in groups],
            )
            for (number, group), answer in zip(groups, answers, strict=True):
                if isinstance(answer, StoreError):
                    self._note_lost(str(answer))
                elif answer is not None:
                    stored[[group[index] for index in answer[2:]]] = False
                    self._repair(number, is_swept=not answer[0], has_quotas=bool(answer[1]))
            self._note_lost(why)
        return stored

    def _settle(self, number: int, group: list[int], names: list[bytes], owners: list[bytes] | None) -> list[bytes]:
        whose = None if owners is None else [owners[place] for place in group]
        return self._lists[number].settle([names[place] for place in group], whose)

    def _lengths(self, rows: Bytes) -> list[int] | None:
        return [len(self._stored_values.stored(row)) for row in rows] if self._stored_values.is_encoded(rows) else None

    def _full_name(self, name: bytes) -> bytes:
        """Return the server's key for a value."""
        return (self._lists[name[0] % len(self._lists)].prefix if self._lists else self._prefix) + name

    def _by_segment(self, names: list[bytes], make: Callable[[Lists, list[bytes]], list[bytes]]) -> list[list[bytes]]:
        """Return a command for the blocks of each segment."""
        if len(self._lists) < 2:
            return [make(lists, names) for lists in self._lists]
        segment = lambda name: name[0] % len(self._lists)  # noqa: E731
        groups = groupby(sorted(names, key=segment), segment)
        return [make(self._lists[number], list(group)) for number, group in groups]

    def get(self, keys: Bytes, out: Bytes) -> list[str]:
        """Read values. The header check rejects those of another length."""
        found, _, is_lost, _ = self._get_parts(keys, out)
        return _missed(found, is_lost=is_lost)

    def replace_epoch(self, key: Bytes, old: Bytes | None, new: Bytes) -> Bytes | None:
        """Replace a row if it equals `old`; see `ThreadedStore.replace_epoch`."""
        name, before = self._prefix + key.tobytes(), b"" if old is None else old.tobytes()
        row, self._history, *_ = self._last_answer([[b"EVAL", _SET + _READ, b"1", name, before, new.tobytes()]])
        if old is None:  # a new namespace, or a server that has lost it
            self.describe()
        return np.frombuffer(row, np.uint8) if row else None

    def _keep_epoch(self, epoch: Epoch) -> bool:
        """Wait until every connected replica has the record. The server knows its replicas and what they have."""
        until = self._runtime.monotonic() + _KEEP_SHARE * self.timeout_base
        history, self._history, due = self._history, b"", 0
        commands = [[b"EVAL", _READ, b"1", self._prefix + self._keyed_blocks.record.key]]
        while True:
            row, found, offset, *confirmed = self._last_answer(commands)
            if not history and self._keyed_blocks.record.parse(np.frombuffer(row, np.uint8)).epoch == epoch:
                history = found  # another process has begun this epoch
            if found != history:
                return False  # a replica has taken over, perhaps without the record
            due = due or int(offset)
            if all(int(each) >= due for each in confirmed):
                return True
            if self._runtime.monotonic() > until:
                raise StoreError("a replica has not confirmed the epoch's record, so a failover may undo it")
            commands = [_WAIT, commands[-1]]

    def read_epoch(self, key: Bytes) -> Bytes | None:
        """Return the row that identifies the valid blocks."""
        (answer,), why = self._run([self._reading(key.tobytes())])
        return self._row_of(answer, why)

    def _reading(self, key: bytes) -> list[bytes]:
        """Return a command that reads the record, and counts as a write: a server that may not write refuses it."""
        return [b"GETEX", self._prefix + key, b"PERSIST"]

    def _row_of(self, answer: object, why: str | None) -> Bytes | None:
        """Return the epoch's record from an answer. It counts as absent only if its node has answered."""
        if isinstance(answer, bytes):
            return np.frombuffer(answer, np.uint8)
        if isinstance(answer, StoreError):
            raise self._public(answer)
        if why is not None:
            self._note_lost(why)
            raise self._public(StoreError(f"cannot read the store's epoch record: {why}"))
        return None

    def _get_parts(
        self, keys: Bytes, out: Bytes, *, head_bytes: int = 0, more: Sequence[list[bytes]] = ()
    ) -> tuple[NDArray[np.bool_], Bytes, bool, list[tuple[Any, str | None]]]:
        """Read values, and run more commands in the first round trip.

        Returns:
            Whether each value was found, the first bytes of each, whether a node did not answer, and for each other
            command the answer, and the reason if its node did not answer.
        """
        is_lost, answered = False, list[tuple[Any, str | None]]()
        found, heads = np.zeros(len(keys), np.bool_), np.zeros((len(keys), head_bytes), np.uint8)
        for part in batched(out, _KEYS, _BYTES):
            names = [key.tobytes() for key in keys[part]]
            first = self._by_segment(names, Lists.touch)  # a full server refuses this
            asked = [*more, *first] if part.start == 0 else first
            found[part], heads[part], answers, why = self._call(
                self._client.get,
                [self._full_name(name) for name in names],
                out[part],
                varies=self._stored_values.is_encoded(out),
                head_bytes=head_bytes,
                first=asked,
            )
            answered += [(answer, why) for answer in answers[: len(asked) - len(first)]]
            self._note_lost(why)
            is_lost = is_lost or why is not None
        return found, heads, is_lost, answered

    def _fetch_with_record(
        self, names: Bytes, keys: list[bytes], out: Bytes | None
    ) -> tuple[Record, Bytes, list[str], Bytes]:
        if out is None or self._stored_values.codec is not None:
            return super()._fetch_with_record(names, keys, out)
        asked = self._reading(self._keyed_blocks.record.key)
        found, heads, is_lost, ((answer, why),) = self._get_parts(names, out, head_bytes=HEADER, more=[asked])
        checked = self._stored_values.check_apart(out, heads, _missed(found, is_lost=is_lost), keys)
        return self._keyed_blocks.record.parse(self._row_of(answer, why)), *checked

    def delete(self, keys: Bytes) -> None:
        """Delete values."""
        is_lost = False
        for part in batched(keys, _KEYS, _BYTES):
            names = [key.tobytes() for key in keys[part]]
            commands = self._by_segment(names, Lists.drop) or [[b"UNLINK", self._prefix + name] for name in names]
            answers, why = self._run(commands)
            self._refuse_errors(answers)
            is_lost = is_lost or why is not None
        if is_lost:
            raise StoreError("a node of the cluster does not answer, so its values may remain")

    def has(self, keys: Bytes) -> NDArray[np.bool_]:
        """Return whether each key has a value."""
        found: list[bool] = []
        for part in batched(keys, _KEYS, _BYTES):
            names = [self._full_name(key.tobytes()) for key in keys[part]]
            found += [answer == 1 for answer in self._accepted([[b"EXISTS", name] for name in names])]
        return np.array(found, np.bool_)

    # ---- quotas ----

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Limit the blocks of one tenant, in all processes; see `ExternalStore.set_quota`."""
        check_quota(tenant, num_blocks)
        self._require_quotas()
        name = tenant[:_TENANT]
        with self._setting:
            self._enforce(name, num_blocks)
            self._quotas.pop(name, None)
            if num_blocks is not None:  # after a loss, no tenant has a quota anyway
                self._quotas[name] = num_blocks

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Return how many blocks a tenant has, of all processes, and its quota; see `ExternalStore.quota`."""
        check_quota(tenant)
        self._require_quotas()
        held, most = self._accepted(self._lists[0].quota(tenant[:_TENANT]))
        return None if most is None else (int(held or 0), int(most))

    def _require_quotas(self) -> None:
        self._keys_of([])
        if not self.keeps_quotas:
            raise quotaless()
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")

    def _enforce(self, name: bytes, num_blocks: int | None) -> None:
        while self._accepted([self._lists[0].set_quota(name, num_blocks)])[0]:
            pass

    # ---- repairing what the server has lost ----

    def _repair(self, number: int, *, is_swept: bool, has_quotas: bool) -> None:
        """Start a thread that searches for unlisted blocks, and set lost quotas again."""
        is_lost = not has_quotas and bool(self._quotas)
        if is_swept and not is_lost and not self._are_quotas_lost:
            return
        with self._lock:
            self._are_quotas_lost |= is_lost
            if not is_swept:
                self._to_sweep.add(number)
            if self._is_sweeping or self._closed:
                return
            self._is_sweeping = True
        try:
            self._runtime.start_worker("blockyard-sweep", self._sweep, lambda: None, self._end_sweep)
        except RuntimeError as error:  # the interpreter is ending, or there are too many threads
            self._end_sweep(error)

    def _end_sweep(self, error: BaseException) -> None:
        """Count the thread as ended by an error; a later put starts another."""
        with self._lock:
            self._note(error)
            self._is_sweeping = False

    def _sweep(self) -> None:
        try:
            while self._sweep_one():
                pass
        except Exception as error:  # noqa: BLE001 (any exception of the client)
            self._end_sweep(error)

    def _sweep_one(self) -> bool:
        """Set lost quotas again, or sweep a segment. If neither is due, return False and count the thread as ended."""
        with self._lock:
            # Cleared first: the server may lose the quotas again while they are set.
            are_lost, self._are_quotas_lost = self._are_quotas_lost, False
            self._is_sweeping = (are_lost or bool(self._to_sweep)) and not self._closed
            if not self._is_sweeping:
                return False
            number = None if are_lost else self._to_sweep.pop()
        if number is None:
            self._set_lost_quotas()
        else:
            self._sweep_segment(self._lists[number])
        return True

    def _set_lost_quotas(self) -> None:
        try:
            with self._setting:
                for name, quota in self._quotas.items():
                    self._enforce(name, quota)
        except BaseException:
            with self._lock:
                self._are_quotas_lost = True
            raise

    def _sweep_segment(self, lists: Lists) -> None:
        """List the blocks of a segment that no list has."""
        sweep = lists.sweep(self._runtime.random_bytes(16), self._prefix + self._keyed_blocks.record.key)
        with suppress(StopIteration):
            command = next(sweep)
            while not self._closed:
                command = sweep.send(self._accepted([command])[0])

    def _ask(self) -> None:
        self._accepted([[b"EXISTS", self._prefix]])
        if self._lists:
            self.require_commands()

    def require_commands(self) -> None:
        """Raise if the server does not know a command, or the user may not run it; a full server may refuse others."""
        key = self._prefix + b"probe"
        answers, _ = self._run([[b"GETEX", key, b"PERSIST"], [b"EVAL", _PROBE, b"1", key]])
        name, why = b"", ""
        for command, answer in zip((b"GETEX", b"EVAL"), answers, strict=True):
            if isinstance(answer, list):
                name, why = answer[0], answer[1].decode(errors="replace")
            elif isinstance(answer, StoreError):
                name, why = command, str(answer)
            if any(text in why for text in _NOT_ALLOWED):
                needs = "a prefix store needs Redis 6.2 or newer, and a user with this right"
                raise StoreError(f"the server refuses {name.decode()}: {needs}: {why}")

    def describe(self) -> None:
        """Keep the text of the namespace beside its blocks, if it has one and the server takes it."""
        if self._lists and (text := text_of(self.namespace)):
            with suppress(StoreError):
                self._accepted([[b"SET", self._lists[0].prefix + TEXT_NAME.encode(), text]])

    def compare_size(self) -> None:
        """Log a warning if the server lists more blocks than this store may hold: its first puts will drop them."""
        with suppress(StoreError):
            counts = self._accepted([[b"ZCARD", lists.prefix + b"order"] for lists in self._lists])
            listed = sum(count or 0 for count in counts)  # a lost node of a cluster tells none
            if listed > self.num_slots:
                fields = {"store": str(self), "blocks": listed}
                _log.warning(
                    "%s holds %d blocks, its size only %d: puts drop the rest for every process of the namespace",
                    self,
                    listed,
                    self.num_slots,
                    extra=fields,
                )

    def _disconnect(self) -> None:
        self._client.close()

    def _note_lost(self, why: str | None) -> None:
        """Record why nodes of a cluster do not answer, or why blocks were refused."""
        if why is not None:
            self._note(self._public(StoreError(why)))
            self._keyed_blocks.expire()

    def _run(self, commands: list[list[bytes]]) -> tuple[list[Any], str | None]:
        """Run commands. Returns the answers, which may be errors, and why nodes of a cluster did not answer."""
        ran: tuple[list[Any], str | None] = self._call(self._client.run, commands)
        return ran

    def _accepted(self, commands: list[list[bytes]]) -> list[Any]:
        """Run commands; raise if the server refuses one."""
        answers, _ = self._run(commands)
        self._refuse_errors(answers)
        return answers

    def _last_answer(self, commands: list[list[bytes]]) -> Any:
        """Run commands, and return the answer to the last one; raise if it is refused, or a server does not answer."""
        answers, why = self._run(commands)
        self._refuse_errors(answers[-1:])
        if why is not None:
            raise self._public(StoreError(why))
        return answers[-1]

    def _refuse_errors(self, answers: list[Any]) -> None:
        for answer in answers:
            if isinstance(answer, StoreError):
                raise self._public(answer)

    def _call(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except StoreError as error:
            self._keyed_blocks.expire()
            raise self._public(error) from None


def _missed(found: NDArray[np.bool_], *, is_lost: bool) -> list[str]:
    """Return a reason for each value that was not found; unknown if a node did not answer."""
    return ["" if good else "error" if is_lost else "absent" for good in found]
