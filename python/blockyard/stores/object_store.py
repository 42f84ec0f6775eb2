"""The object store: blocks as objects in S3, Google Cloud Storage or Azure, or as files of a shared directory.

    s3://bucket/prefix?size=1TiB&region=eu-west-1
    s3://bucket?size=1TiB&endpoint=http://127.0.0.1:9000&region=us-east-1
    gs://bucket/prefix?size=1TiB        az://container/prefix?size=1TiB&account_name=NAME
    local:///mnt/shared/cache?size=1TiB        memory://name?size=1GiB

| option | meaning | default |
|---|---|---|
| `size` | bytes of the blocks that a process keeps track of; of swap space, all its slots | what `num_slots` need |
| `connections` | requests under way at once, 4 to 256 | 16 |
| `memory` | most bytes in flight and in results not collected; what is beyond is a miss, `queue_full` | 1GiB |
| `deadline` | least seconds an operation is given; it grows by a second for every 16 MB under way | 5 |
| others | go to obstore: `endpoint`, `region`, `virtual_hosted_style_request`, `unsigned_payload`, ... | obstore's |

Credentials come from where obstore takes them: environment variables such as `AWS_ACCESS_KEY_ID` and
`AWS_SECRET_ACCESS_KEY`, or the machine's role. A URL that holds one is refused, and no message shows it. It needs
`pip install 'blockyard[s3]'`.

- Swap space: objects of this store alone, which are deleted when it is closed. What a killed process leaves stays.
- Prefix store: shared by every process with this namespace. A block is stored only if it is absent. A value is checked
  whole before it is a hit; a damaged one is deleted.
- Nothing is evicted: a bucket has no size. `size` bounds what one process remembers of it. Give the bucket a lifecycle
  rule that deletes objects under `blockyard/` some days after they were written; a deleted one is a miss.
- `forget` takes one request. The forgotten objects stay until the lifecycle rule deletes them.

Objects are named `PREFIX/blockyard/`, 16 digits of the namespace, `/` and 64 digits. Those of 16 MiB and more are sent
in parts and read in ranges of 8 MiB. `local` writes a file and renames it; `memory` lives in this process, for tests.
"""

import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from blockyard._core import checksum_rows
from blockyard.errors import StoreError, StoreFullError
from blockyard.stores.base import ExternalStore, StoreURL, Use
from blockyard.stores.remote import SIZE, RemoteStore, count, positive, seconds
from blockyard.stores.value import HEADER
from blockyard.workers import CallPool

__all__ = ["ObjectStore", "open_object_store"]

_LARGE: Final = 16 << 20  # objects from here on are sent in parts and read in ranges
_RANGE: Final = 8 << 20
_SUMMED_ALONE: Final = 256 << 10  # smaller blocks of a batch are still in the core's cache when it ends
_SLOWEST: Final = 16e6  # bytes a second that a request's time allows for
_BATCHES: Final = 4  # that work at once
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_SECRET: Final = re.compile(r"secret|token|password|credential|sas|signature$|access_key|account_key|private|^key$")
_SECRET_NAME: Final = re.compile(r"^(AWS|AZURE|GOOGLE)_.*(SECRET|TOKEN|PASSWORD|KEY)")
_in_memory: dict[str, Any] = {}  # obstore's stores of `memory` URLs


class ObjectURL(NamedTuple):
    """What a URL of the object store says."""

    parts: StoreURL
    scheme: str
    config: dict[str, str]
    size: int | None
    connections: int
    memory: int
    deadline: float


def read_url(url: str) -> ObjectURL:
    """Read a URL with the scheme `s3`, `gs`, `az`, `local` or `memory`; nothing is opened.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong, but no credential.
    """
    parts = StoreURL.parse(url)
    scheme, split = url.partition(":")[0], urlsplit(url)
    for name in parts.options:
        if _SECRET.search(name.lower()):
            parts.url = re.sub(r"\?.*", "?***", parts.url, flags=re.DOTALL)
            parts.reject(name, "is a credential, which must come from the environment")
    if "@" in url.partition("?")[0]:
        parts.reject("***@", "is a credential, which must come from the environment")
    if scheme == "local":
        if split.netloc or not parts.path.startswith("/"):
            parts.reject(split.netloc or parts.path, "must be the absolute path of a directory: local:///mnt/cache")
    elif not split.netloc:
        parts.reject(parts.host, f"must name a bucket: {scheme}://bucket/prefix")
    found = ObjectURL(
        parts,
        scheme,
        {},
        size=parts.take("size", positive, 0, SIZE) or None,
        connections=parts.take("connections", count(_BATCHES, 256), 16, f"{_BATCHES} to 256"),
        memory=parts.take("memory", positive, 1 << 30, SIZE),
        deadline=parts.take("deadline", seconds(0.05, 86_400), 5.0, "0.05 to 86400 seconds"),
    )
    if scheme in {"local", "memory"}:
        parts.finish("size, connections, memory, deadline")
    found.config.update(parts.options)
    return found


def open_object_store(
    url: str,
    *,
    bytes_per_block: int,
    num_slots: int | None = None,
    namespace: bytes = bytes(32),
    use: Use = "swap",
    **options: Any,
) -> ExternalStore:
    """Open the object store; `blockyard.stores.open_store` does, for `s3://`, `gs://`, `az://`, `local://`, `memory://`.

    Args:
        url: `s3://bucket/prefix?size=1TiB`, options as the module describes them.
        bytes_per_block: bytes of one block.
        num_slots: blocks to keep track of; as many as fit into `size` if None.
        namespace: 32-byte digest of all that decides the bytes.
        use: `"swap"` or `"prefix"`.
        options: `codec` and `mac_key`, as for `open_store`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong, but no credential.
        StoreFullError: `size` holds too few blocks.
        StoreError: the server does not answer, refuses the credentials or has no such bucket, or obstore is missing.
    """
    found = read_url(url)
    fit = None if found.size is None else found.size // (HEADER + bytes_per_block)
    if fit is None and num_slots is None:
        found.parts.reject(found.parts.host or found.parts.path, "needs ?size=, for example ?size=1TiB")
    if fit is not None and fit < (num_slots or 1):
        raise StoreFullError(f"{found.parts.url!r}: size holds {fit} blocks, must hold at least {num_slots or 1}")
    store = ObjectStore(
        found, bytes_per_block=bytes_per_block, num_slots=num_slots or fit or 1, namespace=namespace, use=use, **options
    )
    store.ping()
    return store


class ObjectStore(RemoteStore):
    """Blocks as objects; `open_object_store` makes it."""

    def __init__(self, found: ObjectURL, **options: Any) -> None:
        super().__init__(found.parts, secrets=[], **options)
        self.threads, self.memory, self.deadline = _BATCHES, found.memory, found.deadline
        self._calls = CallPool(found.connections)
        self._folder = f"blockyard/{self.namespace[:8].hex()}/"
        self._ob, self._client = _connect(found, found.deadline + self._width / _SLOWEST)
        self._can_create = True
        self._bulk_delete = found.scheme == "s3"
        self._reuses_rows = found.scheme in {"s3", "gs", "az"}  # the others may keep them
        environment = os.environ.items()
        self._secrets = [value for name, value in environment if _SECRET_NAME.search(name) and len(value) > 3]

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store values; blocks under keys only where there is none."""
        self._remember(keys)
        is_block = self._is_block(rows)
        stored = np.zeros(len(rows), np.bool_)

        def send(index: int) -> None:
            self._put_one(self._path(keys[index]), self._stored(rows[index]), is_block)
            stored[index] = True

        self._each_of(stored, len(rows), send)
        return stored

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read values; one of another length is left to the check of its header."""
        width = out.shape[1]
        step = _RANGE if width >= _LARGE and self._codec is None else width
        pieces = [(index, start) for start in range(0, width, step) for index in range(len(keys))]
        found = np.zeros((len(keys), -(-width // step)), np.bool_)

        def read(number: int) -> None:
            index, start = pieces[number]
            end = min(start + step, width)
            found[index, start // step] = self._read_piece(self._path(keys[index]), out[index], start, end)

        self._each_of(found, len(pieces), read)
        return np.asarray(found.all(axis=1))

    def _fetch(
        self, names: NDArray[np.uint8], keys: list[bytes], out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], list[str], NDArray[np.uint8]]:
        if out is None or self._codec is not None or self._width >= _LARGE:
            return super()._fetch(names, keys)
        headers, sums = np.zeros((len(keys), HEADER), np.uint8), np.zeros((len(keys), 16), np.uint8)
        found = np.zeros(len(keys), np.bool_)
        is_large = self._width >= _SUMMED_ALONE

        def read(index: int) -> None:
            value = self._read_whole(self._path(names[index]), self._width)
            found[index] = value is not None
            if value is not None and len(value) == self._width:
                header, row = value[:HEADER].copy(), out[index]
                headers[index], row[:], header[:16] = header, value[HEADER:], 0
                if is_large:
                    sums[index] = checksum_rows(row[None], self._mac_key, header[None])[0]

        self._each_of(found, len(keys), read)
        return self._checked(out, headers, found, keys, sums if is_large else None)

    def delete(self, keys: NDArray[np.uint8]) -> None:
        """Delete values."""
        paths = [self._path(key) for key in keys]

        def remove(index: int) -> None:
            try:
                self._ob.delete(self._client, paths[index])
            except FileNotFoundError:
                pass
            except Exception as error:  # noqa: BLE001 (whatever the client raises)
                raise self._public(error) from None

        if self._bulk_delete:
            try:
                self._ob.delete(self._client, paths)
            except Exception as error:  # noqa: BLE001
                raise self._public(error) from None
        else:
            self._calls.each(len(paths), remove)

    def has(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return whether each key has a value."""
        there = np.zeros(len(keys), np.bool_)

        def look(index: int) -> None:
            try:
                self._ob.head(self._client, self._path(keys[index]))
                there[index] = True
            except FileNotFoundError:
                pass
            except Exception as error:  # noqa: BLE001
                raise self._public(error) from None

        self._calls.each(len(keys), look)
        return there

    def _ask(self) -> None:
        try:
            self._ob.get(self._client, self._folder + "0" * 64)
        except FileNotFoundError as error:
            if any(text in str(error) for text in _NO_BUCKET):
                raise StoreError("the bucket does not exist") from None

    def _disconnect(self) -> None:
        self._calls.close()  # the client has no connection that must be closed

    def _path(self, key: NDArray[np.uint8]) -> str:
        return self._folder + key.tobytes().hex()

    def _put_one(self, path: str, value: memoryview, is_block: bool) -> None:  # noqa: FBT001
        try:
            if is_block and len(value) >= _LARGE:
                try:  # parts cannot be sent on a condition
                    self._ob.head(self._client, path)
                except FileNotFoundError:
                    self._ob.put(self._client, path, value, use_multipart=True, chunk_size=_RANGE, max_concurrency=4)
            elif is_block and self._can_create:
                self._create(path, value)
            else:
                self._ob.put(self._client, path, value, use_multipart=len(value) >= _LARGE, chunk_size=_RANGE)
        except Exception as error:  # noqa: BLE001 (whatever the client raises)
            raise self._public(error) from None

    def _create(self, path: str, value: memoryview) -> None:
        exceptions = import_module("obstore.exceptions")
        try:
            self._ob.put(self._client, path, value, mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            return
        except (NotImplementedError, exceptions.NotSupportedError):
            self._can_create = False  # a server without conditions: equal keys stand for equal bytes anyway
            self._ob.put(self._client, path, value, use_multipart=False)

    def _read_piece(self, path: str, row: NDArray[np.uint8], start: int, end: int) -> bool:
        """Read bytes of a value into their place. Returns whether the value is there."""
        if end - start == len(row):
            value = self._read_whole(path, len(row))
            if value is not None and self._takes(row, len(value)):
                row[: len(value)] = value
            return value is not None
        try:
            data = self._ob.get_range(self._client, path, start=start, end=end)
        except FileNotFoundError:
            return False
        except Exception as error:  # noqa: BLE001 (whatever the client raises)
            raise self._public(error) from None
        if len(data) == end - start:
            row[start:end] = np.frombuffer(data, np.uint8)
        return True

    def _read_whole(self, path: str, most: int) -> NDArray[np.uint8] | None:
        """Return a value, no byte of one that is longer than `most`, and None if there is none."""
        try:
            answer = self._ob.get(self._client, path)
            return np.frombuffer(answer.bytes() if answer.meta["size"] <= most else b"", np.uint8)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 (whatever the client raises)
            raise self._public(error) from None

    def _each_of(self, done: NDArray[np.bool_], total: int, call: Callable[[int], None]) -> None:
        """Do all calls; an error is only noted if some are done: a server that fails one object has others."""
        try:
            self._calls.each(total, call)
        except Exception as error:
            if not done.any():
                raise
            with self._lock:
                self._note(error)

    def _public(self, error: Exception) -> StoreError:
        text = str(super()._public(error)).partition("\n")[0]
        return StoreError(re.sub(r"\?\S*", "?***", text))  # signed URLs have their signature there


def _connect(found: ObjectURL, request_seconds: float) -> tuple[Any, Any]:
    """Return the module obstore and a store of its."""
    try:
        obstore, stores = import_module("obstore"), import_module("obstore.store")
    except ImportError as error:
        raise StoreError(f"{found.parts.url!r} needs obstore ({error}): pip install 'blockyard[s3]'") from None
    if found.scheme == "memory":
        name = f"{found.parts.host}{found.parts.path}"
        return obstore, _in_memory.setdefault(name, stores.MemoryStore())
    client: dict[str, Any] = {"timeout": f"{round(request_seconds * 1e3)}ms"}
    client["connect_timeout"] = f"{round(min(2.0, found.deadline) * 1e3)}ms"
    client["allow_http"] = found.config.get("endpoint", "").startswith("http://")
    waits = {"init_backoff": timedelta(seconds=0.05), "max_backoff": timedelta(seconds=1), "base": 2}
    retry = {"max_retries": 2, "retry_timeout": timedelta(seconds=found.deadline), "backoff": waits}
    try:
        if found.scheme == "local":
            return obstore, stores.LocalStore(found.parts.path, mkdir=True)
        more: Sequence[str] = (found.scheme, "://", found.parts.host, found.parts.path)
        return obstore, stores.from_url("".join(more), client_options=client, retry_config=retry, **found.config)
    except Exception as error:  # noqa: BLE001 (whatever the client raises)
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise StoreError(f"{found.parts.url!r}: {text}") from None
