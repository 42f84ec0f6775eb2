"""The Redis store: blocks on a Redis or Valkey server, for one process or shared by machines.

    redis://[[user]:password@]host[:port]?size=2GiB&ttl=3600&db=0&threads=4&memory=1GiB&deadline=2
    rediss://host?size=2GiB&ca=/etc/ca.pem&cert=/etc/cert.pem&key=/etc/key.pem
    unix:///run/redis.sock?size=2GiB
    redis+cluster://host:6379?size=2GiB        rediss+cluster://host?size=2GiB&ca=/etc/ca.pem

| option | meaning | default |
|---|---|---|
| `size` | most bytes of blocks and headers under this namespace | what `num_slots` need |
| `ttl` | seconds after which the server drops a block that was not put again; 0 for never | 0; swap 86400 |
| `db` | number of the database; a cluster has one | 0 |
| `threads` | connections that work at once, 1 to 64 | 4 |
| `memory` | most bytes in flight and in results not collected; what is beyond is a miss, `queue_full` | 1GiB |
| `deadline` | least seconds an operation is given; it grows by a second for every 16 MB under way | 2 |
| `ca`, `cert`, `key` | PEM files for `rediss`: authorities of the server's certificate; our own | the system's; none |

Percent signs decode user and password, which no message shows. The client is the crate `redis`, in `blockyard._core`.

- Swap space: keys of this store alone, which are deleted when it is closed, or after `ttl`.
- Prefix store: shared by every process with this namespace. A full one drops what was not used for longest. The
  server's own `maxmemory` may drop more; give it a policy `allkeys-*`. A value is checked whole before it is a hit;
  a damaged one is deleted.
- Cluster: name any of its nodes. Blocks are spread over all of them; a batch is a round trip to each. Blocks of a node
  that fails are misses, and are not stored, until it or another serves their slots. The first batch to notice waits
  for a third of `deadline`. Give the servers `cluster-require-full-coverage no`: else all refuse once one is lost.
  - The list of blocks by last use is one key, on one node. While that one is lost, nothing is evicted, and `size` may
    be exceeded. If the list is lost for good, blocks that it had go by `ttl` or by the servers' policy.
  - While the node is lost that says whether another process called `forget`, that goes unnoticed. A process that opens
    the store then has only misses.

All keys begin with `blockyard:` and 16 digits of the namespace. Decision 0023 has the format and the choice of client.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from blockyard._core import RedisClient
from blockyard.errors import StoreError, StoreFullError
from blockyard.stores.base import ExternalStore, StoreURL, Use
from blockyard.stores.epochs import Epoch, Record
from blockyard.stores.remote import SIZE, RemoteStore, batched, count, positive, seconds
from blockyard.stores.value import HEADER

__all__ = ["RedisStore", "open_redis"]

_KEYS: Final = 512  # of one round trip
_BYTES: Final = 1 << 20
_CONNECT_SECONDS: Final = 2.0
_SWAP_TTL: Final = 86_400.0
_REPLACE: Final = b"""
local there = redis.call('GET', KEYS[1])
if (there or '') ~= ARGV[1] then return there end
redis.call('SET', KEYS[1], ARGV[2])
return ARGV[2]
"""
_USE: Final = b"""
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
local use = (tonumber(last) or 0) + 1
for i = 2, #ARGV do
  if ARGV[1] == 'XX' then redis.call('ZADD', KEYS[1], 'XX', use, ARGV[i])
  else redis.call('ZADD', KEYS[1], use, ARGV[i]) end
end
return #ARGV
"""
_NODES_LOST: Final = 3  # of a cluster, that a batch may notice one after the other before its deadline


class RedisURL(NamedTuple):
    """What a URL of the Redis store says."""

    parts: StoreURL
    client: dict[str, Any]  # options of `RedisClient`
    size: int | None
    ttl: float | None
    threads: int
    memory: int
    deadline: float

    def __repr__(self) -> str:
        return f"RedisURL({self.parts.url!r})"


def read_url(url: str) -> RedisURL:
    """Read a URL with the scheme `redis`, `rediss` or `unix`; nothing is opened.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong, but no password.
    """
    parts = StoreURL.parse(url)
    split = urlsplit(url)
    transport, _, cluster = split.scheme.partition("+")
    client: dict[str, Any] = {
        "cluster": bool(cluster),
        "username": unquote(split.username) if split.username else None,
        "password": unquote(split.password) if split.password else None,
        "db": 0 if cluster else parts.take("db", count(0, 1 << 31), 0, "0 or more"),
    }
    if transport == "unix":
        if split.hostname or not parts.path.startswith("/"):
            parts.reject(split.hostname or parts.path, "must be the absolute path of a socket: unix:///run/redis.sock")
        client |= {"transport": "unix", "host": parts.path}
    else:
        if not split.hostname:
            parts.reject(parts.host, "must name a host: redis://host:6379")
        if parts.path not in {"", "/"}:
            parts.reject(parts.path, "is not part of the URL; write ?db=1 for a database")
        try:
            client |= {"host": split.hostname, "port": split.port or 6379}
        except ValueError:
            parts.reject(parts.host, "has a port that is none")
    if transport == "rediss":
        files = {name: parts.take(name, str, None, "a path") for name in ("ca", "cert", "key")}
        client |= {"transport": "tls", **files}
    found = RedisURL(
        parts,
        client,
        size=parts.take("size", positive, 0, SIZE) or None,
        ttl=parts.take("ttl", seconds(0, 1e9), None, "0 to 1e9 seconds"),
        threads=parts.take("threads", count(1, 64), 4, "1 to 64"),
        memory=parts.take("memory", positive, 1 << 30, SIZE),
        deadline=parts.take("deadline", seconds(0.05, 86_400), 2.0, "0.05 to 86400 seconds"),
    )
    parts.finish("size, ttl, db, threads, memory, deadline and, for rediss, ca, cert, key")
    return found


def open_redis(
    url: str,
    *,
    bytes_per_block: int,
    num_slots: int | None = None,
    namespace: bytes = bytes(32),
    use: Use = "swap",
    **options: Any,
) -> ExternalStore:
    """Open the Redis store; `blockyard.stores.open_store` does, for `redis://`, `rediss://` and `unix://`.

    Args:
        url: `redis://host:6379?size=2GiB`, options as the module describes them.
        bytes_per_block: bytes of one block.
        num_slots: blocks to hold; as many as fit into `size` if None.
        namespace: 32-byte digest of all that decides the bytes.
        use: `"swap"` or `"prefix"`.
        options: `codec` and `mac_key`, as for `open_store`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong, but no password.
        StoreFullError: `size` holds too few blocks.
        StoreError: the server does not answer or refuses the password, or a PEM file cannot be read.
    """
    found = read_url(url)
    fit = None if found.size is None else found.size // (HEADER + bytes_per_block)
    if fit is None and num_slots is None:
        found.parts.reject(found.parts.host or found.parts.path, "needs ?size=, for example ?size=2GiB")
    if fit is not None and fit < (num_slots or 1):
        raise StoreFullError(f"{found.parts.url!r}: size holds {fit} blocks, must hold at least {num_slots or 1}")
    store = RedisStore(
        found, bytes_per_block=bytes_per_block, num_slots=num_slots or fit or 1, namespace=namespace, use=use, **options
    )
    store.ping()
    return store


class RedisStore(RemoteStore):
    """Blocks on a Redis or Valkey server or cluster; `open_redis` makes it."""

    _reuses_rows = True

    def __init__(self, found: RedisURL, *, use: Use, **options: Any) -> None:
        secrets = [secret for secret in (found.client["password"], found.client["username"]) if secret]
        super().__init__(found.parts, use=use, secrets=secrets, **options)
        self.threads, self.memory, self.deadline = found.threads, found.memory, found.deadline
        ttl = found.ttl if found.ttl is not None else _SWAP_TTL if use == "swap" else 0.0
        self._ttl = round(ttl * 1000) or None
        self._prefix = f"blockyard:{self.namespace[:8].hex()}:".encode()
        self._order = self._prefix + b"order"  # sorted set: names of blocks by the number of their last use
        self._unlisted: list[bytes] = []  # names to be put into the list when its node is back
        timeout = self.deadline / _NODES_LOST if found.client["cluster"] else self.deadline
        timeouts: dict[str, Any] = {"timeout": timeout, "connect_timeout": min(timeout, _CONNECT_SECONDS)}
        try:
            self._client = RedisClient(prefix=self._prefix, **found.client, **timeouts)
        except StoreError as error:
            raise self._public(error) from None

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store values. Of blocks under keys, drop those that are too many."""
        self._remember(keys)
        is_block = self._is_block(rows)
        ttl = self._ttl if is_block or self._use == "swap" else None
        stored, kept = np.zeros(len(keys), np.bool_), 0
        for part in batched(rows, _KEYS, _BYTES):
            lengths = [len(self._stored(row)) for row in rows[part]] if self._varies(rows) else None
            # Before the values: else those of a process that is killed in between would stay for ever.
            unlisted = self._take_unlisted() if is_block else []
            names = [*unlisted, *(key.tobytes() for key in keys[part])] if is_block else []
            first = [self._used(names), [b"ZCARD", self._order]] if is_block else []
            try:
                stored[part], answers, why = self._call(
                    self._client.put, keys[part], rows[part], ttl_ms=ttl, lengths=lengths, first=first
                )
            except StoreError:
                self._note_lost(None, unlisted)
                raise
            kept = answers[1] if is_block else 0
            self._note_lost(why, names if is_block and answers[0] is None else [])
        if isinstance(kept, int) and kept > self.num_slots:
            self._trim(kept)
        return stored

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read values; one of another length is left to the check of its header."""
        return self._get_parts(keys, out, is_block=self._is_block(out))[0]

    def replace(
        self, key: NDArray[np.uint8], old: NDArray[np.uint8] | None, new: NDArray[np.uint8]
    ) -> NDArray[np.uint8] | None:
        """Store a row if what is there is `old`; see `ThreadedStore.replace`."""
        name, before = self._prefix + key.tobytes(), b"" if old is None else old.tobytes()
        (answer,) = self._accepted([[b"EVAL", _REPLACE, b"1", name, before, new.tobytes()]])
        if answer is None:
            return None
        return np.frombuffer(answer, np.uint8)

    def _read_row(self, key: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        _, _, answers, why = self._call(
            self._client.get, key[None][:0], np.zeros((0, 1), np.uint8), first=[[b"GET", self._prefix + key.tobytes()]]
        )
        return self._row_of(answers[0], why)

    def _row_of(self, answer: object, why: str | None) -> NDArray[np.uint8] | None:
        """Return the epoch's record as it was read; its absence counts only if its node has answered."""
        if isinstance(answer, bytes):
            return np.frombuffer(answer, np.uint8)
        if isinstance(answer, StoreError):
            raise self._public(answer)
        if why is not None:
            self._note_lost(why)
            raise self._public(StoreError(f"the record of the epoch cannot be read: {why}"))
        return None

    def _get_parts(
        self,
        keys: NDArray[np.uint8],
        out: NDArray[np.uint8],
        *,
        is_block: bool,
        head_bytes: int = 0,
        more: Sequence[list[bytes]] = (),
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint8], bool, list[tuple[Any, str | None]]]:
        """Read values, and run more commands in the first trip.

        Returns:
            Whether there is each value, the first bytes of each, whether a node did not answer, and the answer to
            each of the other commands, with the reason if a node gave none.
        """
        is_lost, answered = False, list[tuple[Any, str | None]]()
        found, heads = np.zeros(len(keys), np.bool_), np.zeros((len(keys), head_bytes), np.uint8)
        for part in batched(out, _KEYS, _BYTES):
            names = [key.tobytes() for key in keys[part]] if is_block else []
            first = [self._used(names, b"XX")] if is_block else []  # a full server refuses it
            asked = [*more, *first] if part.start == 0 else first
            found[part], heads[part], answers, why = self._call(
                self._client.get, keys[part], out[part], varies=self._varies(out), head_bytes=head_bytes, first=asked
            )
            answered += [(answer, why) for answer in answers[: len(asked) - len(first)]]
            self._note_lost(why)
            is_lost = is_lost or why is not None
        return found, heads, is_lost, answered

    def _fetch_under(
        self, epoch: Epoch, keys: list[bytes], out: NDArray[np.uint8] | None
    ) -> tuple[Record, NDArray[np.uint8], list[str]]:
        if out is None or self._codec is not None:
            return super()._fetch_under(epoch, keys, out)
        asked = [b"GET", self._prefix + self._record_key.tobytes()]
        names = self._names_of(keys, epoch.token)
        found, heads, is_lost, ((answer, why),) = self._get_parts(
            names, out, is_block=True, head_bytes=HEADER, more=[asked]
        )
        rows, reasons, _ = self._checked(out, heads, _missed(found, is_lost=is_lost), keys)
        return self._record(self._row_of(answer, why)), rows, reasons

    def _fetch(
        self, names: NDArray[np.uint8], keys: list[bytes], out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], list[str], NDArray[np.uint8]]:
        if out is None or self._codec is not None:
            return super()._fetch(names, keys)
        found, heads, is_lost, _ = self._get_parts(names, out, is_block=True, head_bytes=HEADER)
        return self._checked(out, heads, _missed(found, is_lost=is_lost), keys)

    def _get_values(self, names: NDArray[np.uint8], values: NDArray[np.uint8]) -> list[str]:
        found, _, is_lost, _ = self._get_parts(names, values, is_block=self._is_block(values))
        return _missed(found, is_lost=is_lost)

    def delete(self, keys: NDArray[np.uint8]) -> None:
        """Delete values."""
        is_lost = False
        for part in batched(keys, _KEYS, _BYTES):
            names = [key.tobytes() for key in keys[part]]
            order = [[b"ZREM", self._order, *names]] if self._use == "prefix" else []
            answers = self._accepted([*order, *([b"UNLINK", self._prefix + name] for name in names)])
            is_lost = is_lost or None in answers[len(order) :]
        if is_lost:
            raise StoreError("a node of the cluster does not answer, its values may stay")

    def has(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return whether each key has a value."""
        found: list[bool] = []
        for part in batched(keys, _KEYS, _BYTES):
            answers = self._accepted([[b"EXISTS", self._prefix + key.tobytes()] for key in keys[part]])
            found += [answer == 1 for answer in answers]
        return np.array(found, np.bool_)

    def _ask(self) -> None:
        self._accepted([[b"EXISTS", self._prefix]])

    def _disconnect(self) -> None:
        self._client.close()

    def _trim(self, count: int) -> None:
        """Drop what was not used for longest of so many blocks, until they fit."""
        while count > self.num_slots:
            most = b"%d" % min(count - self.num_slots, _KEYS)
            (dropped,) = self._run([[b"ZPOPMIN", self._order, most]])
            if not isinstance(dropped, list) or not dropped:
                return
            names = dropped[::2]  # each is followed by its time
            answers = self._run([[b"UNLINK", self._prefix + name] for name in names])
            self._note_lost(None, [name for name, answer in zip(names, answers, strict=True) if answer is None])
            count -= len(names)

    def _take_unlisted(self) -> list[bytes]:
        """Return the names that could not be put into the list so far."""
        if not self._unlisted:
            return []
        with self._lock:
            names, self._unlisted = self._unlisted, []
        return names

    def _note_lost(self, why: str | None, unlisted: Sequence[bytes] = ()) -> None:
        """Note that nodes of a cluster do not answer, and names to be put into the list later."""
        if why is None and not unlisted:
            return
        with self._lock:
            if why is not None:
                self._note(self._public(StoreError(why)))
            self._unlisted = [*self._unlisted, *unlisted][-self.num_slots :]

    def _used(self, names: list[bytes], option: bytes = b"") -> list[bytes]:
        """Return the command that notes a use of blocks: the server counts, as clocks of processes differ."""
        return [b"EVAL", _USE, b"1", self._order, option, *names]

    def _run(self, commands: list[list[bytes]]) -> list[Any]:
        """Run commands. Returns an answer each, or the error with which the server refused."""
        answers: list[Any] = self._call(self._client.run, commands)
        return answers

    def _accepted(self, commands: list[list[bytes]]) -> list[Any]:
        """Run commands, none of which may be refused."""
        answers = self._run(commands)
        for answer in answers:
            if isinstance(answer, StoreError):
                raise self._public(answer)
        return answers

    def _call(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except StoreError as error:
            raise self._public(error) from None


def _missed(found: NDArray[np.bool_], *, is_lost: bool) -> list[str]:
    """Return why each value did not come; if a node did not answer, nobody knows which are absent."""
    return ["" if good else "error" if is_lost else "absent" for good in found]
