"""The Redis store: blocks on a Redis or Valkey server, for one process or shared by machines.

    redis://[[user]:password@]host[:port]?size=2GiB&ttl=3600&db=0&threads=4&memory=1GiB&deadline=2
    rediss://host?size=2GiB&ca=/etc/ca.pem&cert=/etc/cert.pem&key=/etc/key.pem
    unix:///run/redis.sock?size=2GiB

| option | meaning | default |
|---|---|---|
| `size` | most bytes of blocks and headers under this namespace | what `num_slots` need |
| `ttl` | seconds after which the server drops a block that was not put again; 0 for never | 0; swap 86400 |
| `db` | number of the database | 0 |
| `threads` | connections that work at once, 1 to 64 | 4 |
| `memory` | most bytes in flight and in results not collected; what is beyond is a miss, `queue_full` | 1GiB |
| `deadline` | least seconds an operation is given; it grows by a second for every 16 MB under way | 2 |
| `ca`, `cert`, `key` | PEM files for `rediss`: authorities of the server's certificate; our own | the system's; none |

Percent signs decode user and password, which no message shows. It needs `pip install 'blockyard[redis]'`.

- Swap space: keys of this store alone, which are deleted when it is closed, or after `ttl`.
- Prefix store: shared by every process with this namespace. A full one drops what was not used for longest. The
  server's own `maxmemory` may drop more; give it a policy `allkeys-*`. A value is checked whole before it is a hit;
  a damaged one is deleted.

All keys begin with `blockyard:` and 16 digits of the namespace. Decision 0023 has the format and the choice of client.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import StoreError, StoreFullError
from blockyard.stores.base import ExternalStore, Keys, StoreURL, Use, keyless, parse_size
from blockyard.stores.threaded import ThreadedStore
from blockyard.stores.value import HEADER
from blockyard.workers import start_worker

if TYPE_CHECKING:
    from redis import Redis

__all__ = ["RedisStore", "open_redis"]

_PIPELINE_BYTES: Final = 1 << 20  # larger pipelines are slower: the client joins their commands
_PIPELINE_KEYS: Final = 512
_CONNECT_SECONDS: Final = 2.0
_SWAP_TTL: Final = 86_400.0
_SIZE: Final = "a size, for example 2GiB, 500MB or plain bytes"


class RedisURL(NamedTuple):
    """What a URL of the Redis store says."""

    parts: StoreURL
    client: dict[str, Any]
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
    client: dict[str, Any] = {
        "username": unquote(split.username) if split.username else None,
        "password": unquote(split.password) if split.password else None,
        "db": parts.take("db", _count(0, 1 << 31), 0, "0 or more"),
    }
    if split.scheme == "unix":
        if split.hostname or not parts.path.startswith("/"):
            parts.reject(split.hostname or parts.path, "must be the absolute path of a socket: unix:///run/redis.sock")
        client["unix_socket_path"] = parts.path
    else:
        if not split.hostname:
            parts.reject(parts.host, "must name a host: redis://host:6379")
        if parts.path not in {"", "/"}:
            parts.reject(parts.path, "is not part of the URL; write ?db=1 for a database")
        try:
            client |= {"host": split.hostname, "port": split.port or 6379}
        except ValueError:
            parts.reject(parts.host, "has a port that is none")
    if split.scheme == "rediss":
        client |= {"ssl": True, "ssl_ca_certs": parts.take("ca", str, None, "a path")}
        client["ssl_certfile"] = parts.take("cert", str, None, "a path")
        client["ssl_keyfile"] = parts.take("key", str, None, "a path")
    found = RedisURL(
        parts,
        client,
        size=parts.take("size", _positive, 0, _SIZE) or None,
        ttl=parts.take("ttl", _seconds(0, 1e9), None, "0 to 1e9 seconds"),
        threads=parts.take("threads", _count(1, 64), 4, "1 to 64"),
        memory=parts.take("memory", _positive, 1 << 30, _SIZE),
        deadline=parts.take("deadline", _seconds(0.05, 86_400), 2.0, "0.05 to 86400 seconds"),
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
) -> ExternalStore:
    """Open the Redis store; `blockyard.stores.open_store` does, for `redis://`, `rediss://` and `unix://`.

    Args:
        url: `redis://host:6379?size=2GiB`, options as the module describes them.
        bytes_per_block: bytes of one block.
        num_slots: blocks to hold; as many as fit into `size` if None.
        namespace: 32-byte digest of all that decides the bytes.
        use: `"swap"` or `"prefix"`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong, but no password.
        StoreFullError: `size` holds too few blocks.
        StoreError: the server does not answer or refuses the password, or the client is not installed.
    """
    found = read_url(url)
    fit = None if found.size is None else found.size // (HEADER + bytes_per_block)
    if fit is None and num_slots is None:
        found.parts.reject(found.parts.host or found.parts.path, "needs ?size=, for example ?size=2GiB")
    if fit is not None and fit < (num_slots or 1):
        raise StoreFullError(f"{found.parts.url!r}: size holds {fit} blocks, must hold at least {num_slots or 1}")
    store = RedisStore(
        found, bytes_per_block=bytes_per_block, num_slots=num_slots or fit or 1, namespace=namespace, use=use
    )
    store.ping()
    return store


class RedisStore(ThreadedStore):
    """Blocks on a Redis or Valkey server; `open_redis` makes it."""

    def __init__(self, found: RedisURL, *, bytes_per_block: int, num_slots: int, namespace: bytes, use: Use) -> None:
        super().__init__(found.parts.url, bytes_per_block=bytes_per_block, namespace=namespace)
        self.num_slots = num_slots
        self.threads, self.memory, self.deadline = found.threads, found.memory, found.deadline
        self._use = use
        ttl = found.ttl if found.ttl is not None else _SWAP_TTL if use == "swap" else 0.0
        self._ttl = round(ttl * 1000) or None
        self._prefix = f"blockyard:{namespace[:8].hex()}:".encode()
        self._order = self._prefix + b"order"  # sorted set: names of blocks by time of their last use
        self._names: set[bytes] = set()  # of slots
        self._secrets = [secret for secret in (found.client["password"], found.client["username"]) if secret]
        self._client = _connect(found)

    def __repr__(self) -> str:
        return f"RedisStore({self.url!r})"

    def ping(self) -> None:
        """Raise StoreError if the server does not answer."""
        try:
            self._client.ping()
        except Exception as error:  # noqa: BLE001 (whatever the client raises)
            raise StoreError(f"{self.url!r}: {self._public(error)}") from None

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store values. Of blocks under keys, drop those that are too many."""
        is_block, ttl = self._is_block(rows), self._ttl
        if self._use == "swap":
            self._names.update(key.tobytes() for key in keys)
        elif not is_block:
            ttl = None
        stored = []
        for part in _parts(rows):
            now, pipe = time.time(), self._pipeline()
            for key, row in zip(keys[part], rows[part], strict=True):
                if is_block:
                    pipe.zadd(self._order, {key.tobytes(): now})
                pipe.set(self._prefix + key.tobytes(), memoryview(row), px=ttl)
            answers = self._execute(pipe)
            stored += [answer is True for answer in answers[is_block :: 1 + is_block]]
        if is_block:
            self._trim()
        return np.array(stored, np.bool_)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read values; one of another length is left to the check of its header."""
        there = []
        for part in _parts(out):
            now, pipe = time.time(), self._pipeline()
            for key in keys[part]:
                pipe.get(self._prefix + key.tobytes())
            if self._is_block(out):
                pipe.zadd(self._order, {key.tobytes(): now for key in keys[part]}, xx=True)
            for row, value in zip(out[part], self._execute(pipe), strict=False):
                if isinstance(value, Exception):
                    raise self._public(value)
                there.append(value is not None)
                if value is not None and len(value) == len(row):
                    row[:] = np.frombuffer(value, np.uint8)
        return np.array(there, np.bool_)

    def delete(self, keys: NDArray[np.uint8]) -> None:
        """Delete values."""
        for part in _parts(keys):
            pipe = self._pipeline()
            names = [key.tobytes() for key in keys[part]]
            pipe.zrem(self._order, *names)
            pipe.unlink(*(self._prefix + name for name in names))
            for answer in self._execute(pipe):
                if isinstance(answer, Exception):
                    raise self._public(answer)

    def has(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return whether each key has a value."""
        found: list[bool] = []
        for part in _parts(keys):
            pipe = self._pipeline()
            for key in keys[part]:
                pipe.exists(self._prefix + key.tobytes())
            found += [answer == 1 for answer in self._execute(pipe)]
        return np.array(found, np.bool_)

    def close(self, timeout: float = 5.0) -> bool:
        """Give up what is under way, and delete the blocks of swap space; see `ExternalStore.close`."""
        until = time.monotonic() + timeout
        in_time = super().close(timeout)
        if self._process.is_current and self._names:
            cleaner = start_worker("blockyard-store", self._remove_slots, lambda: None)
            cleaner.join(max(0.0, until - time.monotonic()))
            in_time = in_time and not cleaner.is_alive()
        if in_time and self._process.is_current:
            self._client.close()
        return in_time

    def _remove_slots(self) -> None:
        names, self._names = list(self._names), set()
        try:
            for start in range(0, len(names), _PIPELINE_KEYS):
                self._client.unlink(*(self._prefix + name for name in names[start : start + _PIPELINE_KEYS]))
        except Exception as error:  # noqa: BLE001 (they have a time to live)
            with self._changed:
                self._note(self._public(error))

    def _check(self, slots: NDArray[np.int64]) -> None:
        if self._use == "prefix":
            raise StoreError("the store is a prefix store, which has no slots")
        super()._check(slots)

    def _keys_of(self, keys: Keys) -> list[bytes]:
        if self._use == "swap":
            raise keyless()
        return super()._keys_of(keys)

    def _is_block(self, rows: NDArray[np.uint8]) -> bool:
        return self._use == "prefix" and rows.shape[1] == HEADER + self.bytes_per_block

    def _trim(self) -> None:
        """Drop what was not used for longest, if there are more blocks than fit."""
        pipe = self._pipeline()
        pipe.zcard(self._order)
        count = self._execute(pipe)[0]
        while isinstance(count, int) and count > self.num_slots:
            pipe = self._pipeline()
            pipe.zpopmin(self._order, min(count - self.num_slots, _PIPELINE_KEYS))
            dropped = self._execute(pipe)[0]
            if isinstance(dropped, Exception) or not dropped:
                return
            pipe = self._pipeline()
            pipe.unlink(*(self._prefix + name for name, _ in dropped))
            self._execute(pipe)
            count -= len(dropped)

    def _pipeline(self) -> Any:
        return self._client.pipeline(transaction=False)

    def _execute(self, pipe: Any) -> list[Any]:
        try:
            answers: list[Any] = pipe.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001 (whatever the client raises)
            raise self._public(error) from None
        return answers

    def _public(self, error: Exception) -> StoreError:
        """Return an error without user name and password, which servers quote now and then."""
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return StoreError(text)


def _connect(found: RedisURL) -> "Redis":
    try:
        from redis import Redis  # noqa: PLC0415 (an extra)
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.retry import Retry  # noqa: PLC0415
    except ImportError as error:
        raise StoreError(f"{found.parts.url!r} needs redis-py ({error}): pip install 'blockyard[redis]'") from None
    return Redis(
        **found.client,
        protocol=2,
        socket_timeout=found.deadline,
        socket_connect_timeout=min(found.deadline, _CONNECT_SECONDS),
        retry=Retry(NoBackoff(), 0),
    )


def _parts(rows: NDArray[np.uint8]) -> Iterator[slice]:
    """Split a batch into pipelines."""
    count = min(_PIPELINE_KEYS, max(1, _PIPELINE_BYTES // max(1, rows.shape[1])))
    return (slice(start, start + count) for start in range(0, len(rows), count))


def _positive(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise ValueError(text)
    return size


def _count(least: int, most: int) -> Any:
    def read(text: str) -> int:
        if not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    return read


def _seconds(least: float, most: float) -> Any:
    def read(text: str) -> float:
        if not least <= float(text) <= most:
            raise ValueError(text)
        return float(text)

    return read
