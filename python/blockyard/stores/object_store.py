"""The object store: blocks as objects in S3, Google Cloud Storage or Azure, or as files in a shared directory.

    s3://bucket/prefix?size=1TiB&region=eu-west-1
    s3://bucket?size=1TiB&endpoint=http://127.0.0.1:9000&region=us-east-1
    gs://bucket/prefix?size=1TiB        az://container/prefix?size=1TiB&account_name=NAME
    local:///mnt/shared/cache?size=1TiB        memory://name?size=1GiB

`docs/reference/store-urls.md` lists the options.

obstore finds credentials in environment variables such as `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or in the
machine's role. URLs with credentials are rejected, and no message shows them.
The store needs `pip install "blockyard[s3]"`.

- Swap space: objects of this store alone, deleted when it is closed. Objects of a killed process remain.
- Prefix store: shared by every process with this namespace. A block is stored only if it is absent. A value is fully
  checked before it is a hit; one that two reads find damaged is deleted.
- The store evicts nothing, since a bucket has no size. `size` limits what one process remembers of it. Give the bucket
  a lifecycle rule that deletes objects under `blockyard/` some days after they were written; a deleted one is a miss.
- `forget` takes one request. The forgotten objects stay until the lifecycle rule deletes them.

Objects are named `PREFIX/blockyard/`, 16 digits of the namespace, `/` and 64 digits. Objects of at least 16 MiB are
sent in parts and read in ranges of 8 MiB. `local` writes a file of mode 0600 and renames it; `memory` lives in this
process, for tests.
"""

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from blockyard._core import checksum_rows
from blockyard.errors import ForkedError, StoreError
from blockyard.stores.base import SLOWEST, ExternalStore, Owners, Use
from blockyard.stores.namespace import TEXT_NAME, text_of
from blockyard.stores.threaded.call_pool import CallPool
from blockyard.stores.threaded.epochs import EPOCH_BYTES, Record
from blockyard.stores.threaded.remote import SIZE, RemoteStore, count, count_slots, positive, public_text, seconds
from blockyard.stores.url import StoreURL, is_secret_name
from blockyard.stores.value import HEADER, Bytes
from blockyard.workers.extras import missing
from blockyard.workers.ownership import Process

__all__ = ["LocalFiles", "ObjectStore", "connect_client", "open_object_store"]

_LARGE: Final = 16 << 20  # objects of at least this size are sent in parts and read in ranges
_RANGE: Final = 8 << 20
_SUMMED_ALONE: Final = 256 << 10  # smaller blocks of a batch are still in the core's cache when it ends
_BATCHES: Final = 4  # number of batches that run at once
_ERRORS: Final = 4  # give a batch up once its failed calls exceed the successful ones by more than this
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_CONFIG: Final = {
    "s3": (
        *("endpoint", "region", "default_region", "virtual_hosted_style_request", "unsigned_payload"),
        *("checksum_algorithm", "conditional_put", "disable_tagging", "disable_bulk_delete", "request_payer"),
        *("s3_express", "server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled", "skip_signature"),
        *("role_arn", "role_session_name", "sts_endpoint", "metadata_endpoint", "imdsv1_fallback"),
    ),
    "gs": ("base_url", "skip_signature"),
    "az": (
        *("account_name", "endpoint", "skip_signature", "disable_tagging", "use_emulator", "use_fabric_endpoint"),
        *("client_id", "tenant_id", "authority_host", "msi_endpoint", "object_id", "msi_resource_id", "use_azure_cli"),
    ),
}
"""obstore's options that hold no secret. It panics at the options of its HTTP client, such as `allow_http`."""
_UNSIGNED: Final = "skip_signature"  # for a public bucket
_S3_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_S3_ROLES: Final = re.compile(r"^AWS_(WEB_IDENTITY_TOKEN_FILE|CONTAINER_CREDENTIALS_\w+|SKIP_SIGNATURE)$")
_CLOUD: Final = re.compile(r"^(AWS|AZURE|GOOGLE)_", re.IGNORECASE)
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_TOP: Final = "blockyard"
_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_in_memory: dict[str, Any] = {}  # obstore's stores of `memory` URLs
_process: Process | None = None  # the process that runs obstore's threads


class ObjectURL(NamedTuple):
    """A parsed URL of the object store."""

    parts: StoreURL
    scheme: str
    config: dict[str, str]
    size: int | None
    connections: int
    memory: int
    timeout_base: float

    def __repr__(self) -> str:
        return f"ObjectURL({self.parts.url!r})"

    @property
    def secrets(self) -> list[str]:
        """What messages must not show: credentials in the URL and in the environment."""
        named = [value for name, value in os.environ.items() if _CLOUD.search(name) and is_secret_name(name)]
        return [*self.parts.secrets, *(value for value in named if len(value) > 3)]


def read_url(url: str) -> ObjectURL:
    """Parse a URL with the scheme `s3`, `gs`, `az`, `local` or `memory`; opens nothing.

    Raises:
        StoreURLError: the URL is malformed; the message shows the wrong part, but no credential.
    """
    parts = StoreURL.parse(url)
    scheme, split = url.partition(":")[0], urlsplit(url)
    known = _CONFIG.get(scheme, ())
    for name in parts.options:
        if name not in known and is_secret_name(name):
            parts.reject(name, "is a credential, which must come from the environment")
    if "@" in split.netloc:
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
        timeout_base=parts.take("timeout_base", seconds(0.05, 86_400), 5.0, "0.05 to 86400 seconds"),
    )
    for name in known:
        if (value := parts.take(name, str, None, "text")) is not None:
            if "@" in value:
                parts.reject(f"{name}={value}", "has a credential, which must come from the environment")
            found.config[name] = value
    parts.finish(", ".join(("size, connections, memory, timeout_base", *known)))
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
    """Open the object store. `open_store` calls this for `s3://`, `gs://`, `az://`, `local://` and `memory://`.

    Args:
        url: `s3://bucket/prefix?size=1TiB`; `docs/reference/store-urls.md` lists the options.
        bytes_per_block: bytes of one block.
        num_slots: number of blocks to track; None for as many as fit into `size`.
        namespace: 32-byte digest of everything that determines the bytes.
        use: `"swap"` or `"prefix"`.
        options: `codec` and `mac_key`, as for `open_store`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the wrong part, but no credential.
        StoreFullError: `size` holds too few blocks.
        StoreError: the server does not answer, refuses the credentials or has no such bucket, or obstore is missing.
        ForkedError: this process is a fork of one that has used an object store.
    """
    found = read_url(url)
    blocks = count_slots(found.parts, found.size, bytes_per_block, num_slots, example="1TiB")
    store = ObjectStore(
        found, bytes_per_block=bytes_per_block, num_slots=blocks, namespace=namespace, use=use, **options
    )
    try:
        store.ping()
    except StoreError as error:
        raise StoreError(f"{error}{_missing_credentials(found)}") from None
    store.describe()
    return store


class ObjectStore(RemoteStore):
    """Blocks as objects; created by `open_object_store`.

    `connect` returns a module to use instead of obstore, and its client.
    """

    def __init__(
        self, found: ObjectURL, *, connect: Callable[[ObjectURL, float], tuple[Any, Any]] | None = None, **options: Any
    ) -> None:
        super().__init__(found.parts, **options)
        self._secrets = found.secrets
        self.threads, self.memory, self.timeout_base = _BATCHES, found.memory, found.timeout_base
        self._calls = CallPool(found.connections)
        self._folder = f"blockyard/{self.namespace[:8].hex()}/"
        self._ob, self._client = (connect or connect_client)(
            found, found.timeout_base + self._stored_values.width / SLOWEST
        )
        self._can_create = True
        self._bulk_delete = found.scheme == "s3"
        self._stored_values.reuses_rows = found.scheme in {"s3", "gs", "az"}  # the others may keep references to rows

    def put(self, keys: Bytes, rows: Bytes) -> NDArray[np.bool_]:
        """Store values, replacing existing ones."""
        return self.put_blocks(keys, rows, None, {key.tobytes() for key in keys})

    def put_blocks(self, keys: Bytes, rows: Bytes, owners: Owners | None, damaged: set[bytes]) -> NDArray[np.bool_]:  # noqa: ARG002 (there are no quotas)
        """Store values, keeping existing ones that are not damaged."""

        def put(index: int) -> None:
            keeps = keys[index].tobytes() not in damaged
            self._put_one(self._path(keys[index]), self._stored_values.stored(rows[index]), keeps)

        failed = self._each_of(len(rows), put)
        return np.array([index not in failed for index in range(len(rows))], np.bool_)

    def get(self, keys: Bytes, out: Bytes) -> list[str]:
        """Read values. The header check rejects those of another length."""
        width, count = out.shape[1], len(keys)
        step = _RANGE if width >= _LARGE and self._stored_values.codec is None else width
        missed = [[""] * -(-width // step) for _ in range(count)]

        def read(number: int) -> None:
            piece, index = divmod(number, count)
            start = piece * step
            end = min(start + step, width)
            missed[index][piece] = self._read_piece(self._path(keys[index]), out[index], start, end)

        failed = {number % count for number in self._each_of(count * -(-width // step), read)}
        return ["error" if index in failed else max(pieces) for index, pieces in enumerate(missed)]

    def _fetch_into(
        self, out: Bytes, names: Bytes, keys: list[bytes], last: Callable[[], None] | None = None
    ) -> tuple[Bytes, list[str], Bytes]:
        """Like `StoredValues.fetch`, but each value by one call, straight into `out`. `last` follows the last call."""
        headers, sums = np.zeros((len(keys), HEADER), np.uint8), np.zeros((len(keys), 16), np.uint8)
        paths, missed = [self._path(name) for name in names], ["error"] * len(keys)
        is_large = self._stored_values.width >= _SUMMED_ALONE

        def read(index: int) -> None:
            value = self._read_whole(paths[index], self._stored_values.width)
            missed[index] = "absent" if value is None else ""
            if value is not None and len(value) == self._stored_values.width:
                headers[index], out[index] = value[:HEADER], value[HEADER:]
                if is_large:
                    header = headers[index : index + 1].copy()
                    header[:, :16] = 0
                    sums[index] = checksum_rows(out[index : index + 1], self._stored_values.mac_key, header)[0]

        self._each_of(len(keys), read, last)
        return self._stored_values.check_apart(out, headers, missed, keys, sums if is_large else None)

    def delete(self, keys: Bytes) -> None:
        """Delete values."""
        paths = [self._path(key) for key in keys]

        def remove(index: int) -> None:
            try:
                self._ob.delete(self._client, paths[index])
            except FileNotFoundError:
                pass
            except Exception as error:  # noqa: BLE001 (any exception of the client)
                raise self._public(error) from None

        if self._bulk_delete:
            try:
                self._ob.delete(self._client, paths)
            except Exception as error:  # noqa: BLE001
                raise self._public(error) from None
        else:
            self._calls.each(len(paths), remove)

    def has(self, keys: Bytes) -> NDArray[np.bool_]:
        """Return whether each key has a value."""
        there = np.zeros(len(keys), np.bool_)

        def look(index: int) -> None:
            try:
                size = self._ob.head(self._client, self._path(keys[index]))["size"]
                there[index] = self._stored_values.can_be(size)  # a gateway's page has another size
            except FileNotFoundError:
                pass
            except Exception as error:  # noqa: BLE001
                raise self._public(error) from None

        self._calls.each(len(keys), look)
        return there

    def read_epoch(self, key: Bytes) -> Bytes | None:
        """Return the row that identifies the valid blocks, even a torn one: it must be replaced, too."""
        return self._read_whole(self._path(key), HEADER + EPOCH_BYTES)

    def replace_epoch(self, key: Bytes, old: Bytes | None, new: Bytes) -> Bytes | None:
        """Replace a row by a conditional write; see `ThreadedStore.replace_epoch`."""
        path = self._path(key)
        with self._ob.alone() if isinstance(self._ob, LocalFiles) else nullcontext():
            try:
                answer = self._ob.get(self._client, path)
                there, meta = _bytes_of(answer, HEADER + EPOCH_BYTES), answer.meta
            except FileNotFoundError:
                there, meta = None, {}
            except Exception as error:  # noqa: BLE001 (any exception of the client)
                raise self._public(error) from None
            if (None if there is None else bytes(there)) == (None if old is None else old.tobytes()):
                self._put_on_condition(path, new.data, meta)
        return self.read_epoch(key)

    def _put_on_condition(self, path: str, value: memoryview, meta: Mapping[str, Any]) -> None:
        """Replace the object that `meta` describes, or create it; do nothing if it has changed."""
        exceptions = self._ob.exceptions
        mode: Any = {name: meta[name] for name in ("e_tag", "version") if meta.get(name)} or "create"
        if isinstance(self._ob, LocalFiles):
            mode = "overwrite"
        try:
            self._ob.put(self._client, path, value, mode=mode, use_multipart=False)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return
        except (NotImplementedError, exceptions.NotSupportedError):
            if meta:
                raise StoreError("the server has no conditional writes (If-Match), which forget needs") from None
            self._ob.put(self._client, path, value, use_multipart=False)
        except Exception as error:  # noqa: BLE001 (any exception of the client)
            raise self._public(error) from None

    def _fetch_with_record(
        self, names: Bytes, keys: list[bytes], out: Bytes | None
    ) -> tuple[Record, Bytes, list[str], Bytes]:
        epochs, fetch, found = self._keyed_blocks.epochs, self._stored_values.fetch, list[Any]()
        check = epochs.begin_check()

        def check_early() -> None:
            if check.is_due:
                with suppress(Exception):  # read again below
                    epochs.read_for(check)

        if out is None or self._stored_values.codec is not None or self._stored_values.width >= _LARGE:
            self._calls.each(2, lambda part: check_early() if part else found.extend(fetch(names, keys)))
        else:  # the check comes last, so that one read of the record serves all batches that have begun by then
            found.extend(self._fetch_into(out, names, keys, last=check_early))
        rows, reasons, seen = found
        return epochs.read_for(check), rows, reasons, seen

    def _ask(self) -> None:
        try:
            self._ob.get(self._client, self._folder + "0" * 64)
        except FileNotFoundError as error:
            if any(text in str(error) for text in _NO_BUCKET):
                raise StoreError("the bucket does not exist") from None

    def describe(self) -> None:
        """Keep the text of the namespace beside its blocks, if it has one and the storage takes it."""
        if self._use == "prefix" and (text := text_of(self.namespace)):
            with suppress(StoreError):
                self._put_one(self._folder + TEXT_NAME, memoryview(text), keeps=False)

    def _disconnect(self) -> None:
        self._calls.close()  # the client holds no connection to close

    def _path(self, key: Bytes) -> str:
        return self._folder + key.tobytes().hex()

    def _put_one(self, path: str, value: memoryview, keeps: bool) -> None:  # noqa: FBT001
        """Store a value; `keeps` leaves an existing one."""
        try:
            if keeps and len(value) >= _LARGE:
                if self._size_of(path) != len(value):  # multipart uploads cannot be conditional
                    self._ob.put(self._client, path, value, use_multipart=True, chunk_size=_RANGE, max_concurrency=4)
            elif keeps and self._can_create:
                self._create(path, value)
            else:
                self._ob.put(self._client, path, value, use_multipart=len(value) >= _LARGE, chunk_size=_RANGE)
        except Exception as error:  # noqa: BLE001 (any exception of the client)
            raise self._public(error) from None

    def _create(self, path: str, value: memoryview) -> None:
        exceptions = self._ob.exceptions
        try:
            self._ob.put(self._client, path, value, mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            return
        except (NotImplementedError, exceptions.NotSupportedError):
            self._can_create = False  # a server without conditional writes; equal keys mean equal bytes anyway
            self._ob.put(self._client, path, value, use_multipart=False)

    def _read_piece(self, path: str, row: Bytes, start: int, end: int) -> str:
        """Read part of a value into its row. Returns the reason for a miss, or `""`."""
        if end - start == len(row):
            value = self._read_whole(path, len(row))
            if value is not None and self._stored_values.accepts_size(row, value):
                row[: len(value)] = value
            return "absent" if value is None else ""
        try:
            data = self._ob.get_range(self._client, path, start=start, end=end)
        except FileNotFoundError:
            return "absent"
        except Exception as error:  # noqa: BLE001 (any exception of the client)
            return self._why_refused(path, len(row), error)
        if len(data) < end - start:
            return "length"
        row[start:end] = np.frombuffer(data, np.uint8)
        return ""

    def _read_whole(self, path: str, max_bytes: int) -> Bytes | None:
        """Return a value, empty if it is longer than `max_bytes`; None if it is absent."""
        try:
            return np.frombuffer(_bytes_of(self._ob.get(self._client, path), max_bytes), np.uint8)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 (any exception of the client)
            raise self._public(error) from None

    def _size_of(self, path: str) -> int | None:
        """Return the size of a value, None if it is absent; raises the client's exceptions."""
        try:
            return int(self._ob.head(self._client, path)["size"])
        except FileNotFoundError:
            return None

    def _why_refused(self, path: str, width: int, error: Exception) -> str:
        """Return why a range was refused: the value is truncated, or absent.

        Raises:
            StoreError: the value has its full size.
        """
        try:
            size = self._size_of(path)
        except Exception:  # noqa: BLE001 (any exception of the client)
            size = width
        if size == width:
            raise self._public(error) from None
        return "absent" if size is None else "length"

    def _each_of(self, total: int, call: Callable[[int], None], last: Callable[[], None] | None = None) -> set[int]:
        """Make all calls, and return which failed: one failed object does not fail the others.

        Once most calls fail, no further ones are made. `last` is an additional call whose failure does not count.

        Raises:
            StoreError: every call failed.
        """
        failed = set(range(total))
        errors: list[Exception] = []
        done: list[int] = []

        def try_one(index: int) -> None:
            if index == total and last is not None:
                last()
                return
            if len(errors) > len(done) + _ERRORS:
                return
            try:
                call(index)
            except Exception as error:  # noqa: BLE001 (noted below)
                errors.append(error)
            else:
                done.append(index)

        self._calls.each(total + (last is not None), try_one)
        if errors and not done:
            raise errors[0]
        if errors:
            self._note(errors[0])
        return failed.difference(done)


class LocalFiles:
    """obstore's functions over a directory. Only the user can read what they write.

    obstore itself would create files with whatever mode the umask leaves, and write through symbolic links that others
    have planted. So `put` and the lock are our own: files are 0600 in folders 0700, and no name in a path may be a
    link. Others cannot plant a link in such a folder, so obstore reads and deletes.

    Args:
        obstore: the module.
        root: the directory of the URL, created if missing.

    Raises:
        StoreError: a folder is a link, belongs to another user, or others can write to it.
        OSError: the directory cannot be created or opened.
    """

    def __init__(self, obstore: Any, root: Path) -> None:
        self.exceptions = obstore.exceptions
        self.get, self.get_range, self.head = obstore.get, obstore.get_range, obstore.head
        self.delete, self.list = obstore.delete, obstore.list
        self._root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened([_TOP]):
            pass

    def put(self, _client: object, path: str, value: memoryview, *, mode: str = "overwrite", **_: Any) -> None:
        """Write a file whole, or not at all.

        Raises:
            AlreadyExistsError: `mode` is `"create"`, and the file exists.
            NotImplementedError: `mode` is `"create"`, and the file system has no hard links.
            StoreError: as for the class.
        """
        *folders, name = path.split("/")
        scratch = f"{name}#{secrets.token_hex(8)}"
        with self._opened(folders) as folder:
            file = os.open(scratch, os.O_WRONLY | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
            try:
                with open(file, "wb", buffering=0) as out:  # noqa: PTH123 (a descriptor)
                    left = memoryview(value).cast("B")
                    while left:
                        left = left[out.write(left) :]
                if mode == "create":
                    self._link(scratch, name, folder)
                else:
                    os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):  # it was renamed
                    os.unlink(scratch, dir_fd=folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the directory against other processes, since it has no conditional writes."""
        with self._opened([_TOP]) as folder:
            file = os.open("lock", os.O_RDWR | _FILE, 0o600, dir_fd=folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _link(self, scratch: str, name: str, folder: int) -> None:
        try:
            os.link(scratch, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            raise self.exceptions.AlreadyExistsError(name) from None
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise NotImplementedError("the file system has no hard links") from None
            raise

    @contextmanager
    def _opened(self, folders: list[str]) -> Iterator[int]:
        """Open a folder below the root, and create what is missing of it."""
        path = self._root
        folder = _open_folder(path, None)
        try:
            for name in folders:
                path /= name
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=folder)
                inner = _open_folder(path, folder)
                os.close(folder)
                folder = inner
                found = os.fstat(folder)
                if found.st_uid != os.geteuid():
                    raise StoreError(f"{str(path)!r} belongs to user {found.st_uid}, must belong to {os.geteuid()}")
                if found.st_mode & 0o022:
                    raise StoreError(f"others can write to {str(path)!r}: chmod 700")
            yield folder
        finally:
            os.close(folder)


def _open_folder(path: Path, parent: int | None) -> int:
    try:
        return os.open(path if parent is None else path.name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.ENOTDIR}:
            raise
    what = "a symbolic link" if path.is_symlink() else "no directory"
    raise StoreError(f"{str(path)!r} is {what}, must be a directory")


def _bytes_of(answer: Any, max_bytes: int) -> Any:
    """Return an object's bytes; none if it is longer than `max_bytes`, so that a forged one takes no memory."""
    return answer.bytes() if answer.range[1] <= max_bytes else b""


def _missing_credentials(found: ObjectURL) -> str:
    """Return a note on missing S3 credentials. obstore reads the environment, but not the AWS CLI's files."""
    names = {name.upper() for name in os.environ}
    if found.scheme != "s3" or _UNSIGNED in found.config or any(map(_S3_ROLES.match, names)):
        return ""
    missing = [name for name in _S3_KEYS if name not in names]
    if not missing:
        return ""
    return (
        f"; {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: set both, give the machine a role, "
        f"or add {_UNSIGNED}=true to the URL for a public bucket"
    )


def connect_client(found: ObjectURL, request_seconds: float) -> tuple[Any, Any]:
    """Return the module obstore and one of its stores."""
    global _process  # noqa: PLW0603 (obstore's threads belong to the whole process)
    _process = _process or Process("the first object store")
    if not _process.is_current:
        raise ForkedError(
            f"{found.parts.url!r}: this process is a fork without obstore's threads, and calls would hang: "
            "open object stores in spawned processes, or only after the fork"
        )
    try:
        obstore, stores = import_module("obstore"), import_module("obstore.store")
    except ModuleNotFoundError as error:
        raise StoreError(str(missing(repr(found.parts.url), error))) from None
    if found.scheme == "memory":
        name = f"{found.parts.host}{found.parts.path}"
        return obstore, _in_memory.setdefault(name, stores.MemoryStore())
    client: dict[str, Any] = {"timeout": f"{round(request_seconds * 1e3)}ms"}
    client["connect_timeout"] = f"{round(min(2.0, found.timeout_base) * 1e3)}ms"
    client["allow_http"] = found.config.get("endpoint", "").startswith("http://")
    waits = {"init_backoff": timedelta(seconds=0.05), "max_backoff": timedelta(seconds=1), "base": 2}
    retry = {"max_retries": 2, "retry_timeout": timedelta(seconds=found.timeout_base), "backoff": waits}
    try:
        if found.scheme == "local":
            files = LocalFiles(obstore, Path(found.parts.path))
            return files, stores.LocalStore(found.parts.path)
        more: Sequence[str] = (found.scheme, "://", found.parts.host, found.parts.path)
        return obstore, stores.from_url("".join(more), client_options=client, retry_config=retry, **found.config)
    except BaseException as error:  # noqa: BLE001 (any exception of the client)
        text = public_text(error, found.secrets)
    # Not in the block above, so that the client's exception, which may quote a secret, is not the context.
    raise StoreError(f"{found.parts.url!r}: {text}{_missing_credentials(found)}")
