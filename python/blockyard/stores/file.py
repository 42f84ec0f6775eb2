"""The file store: blocks in one preallocated file, read and written by threads.

    file:///dir?size=2GiB

`docs/reference/store-urls.md` lists the options.

`file:///a,/b,/c` spreads blocks over several disks. Each has its own slab, threads and share of the size. A disk that
fails or hangs loses only its own blocks. A prefix store works without a disk that cannot be opened, and logs a warning.
Keys are found again if the URL names the same directories in the same order.

If the last component of a directory is missing, the store creates it; it must not be a symbolic link. The file has mode
0600 and is locked.

- Swap space: one file for each store, deleted when the store is closed. If a process is killed, the next one to open
  the directory deletes its file.
- Prefix store: one persistent file, `blockyard-prefix.slab`, which only one store can have open. Opening reads the
  header of each slot, or the checkpoint that the last store wrote on closing. Blocks of other namespaces stay until
  their slots are needed. With another block size no block stays, and with a smaller `size` none beyond it: opening
  raises StoreURLError with their number, unless the URL has `drop=on`.

With a codec or a MAC key, a slot holds a value (`blockyard.stores.value`) instead of the plain block; Python threads
encode and authenticate it. Each slot has room for the codec's longest block, so compression saves no space.

`docs/decisions/0002-slab-header.md` and `0022-prefix-store-in-a-slab.md` define the formats.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError, StoreError, StoreFullError, StoreURLError
from blockyard.stores.adapters.jobs import collect
from blockyard.stores.base import Completion, ExternalStore, Owners, Use
from blockyard.stores.codec import Codec, MacKey
from blockyard.stores.namespace import TEXT_NAME, text_of
from blockyard.stores.striped import StripedStore
from blockyard.stores.threaded import ThreadedStore
from blockyard.stores.threaded.epochs import EPOCH_BYTES, Epoch, Record, SharedEpoch
from blockyard.stores.threaded.remote import SIZE, count, positive, seconds
from blockyard.stores.url import StoreURL
from blockyard.stores.value import Bytes

__all__ = ["SlabStore", "open_file"]

_log = logging.getLogger("blockyard.stores")
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

ExternalStore.register(SlabStore)


class FileURL(NamedTuple):
    """A parsed URL of the file store."""

    parts: StoreURL
    directories: tuple[str, ...]
    size: int | None
    threads: int
    direct: str
    memory: int
    timeout_base: float
    drop: bool


def read_url(url: str) -> FileURL:
    """Parse a URL with the scheme `file`; opens nothing.

    Raises:
        StoreURLError: the URL is malformed; the message shows the wrong part.
    """
    parts = StoreURL.parse(url)
    if parts.host not in {"", "localhost"}:
        parts.reject(parts.host, "is a host; a file's URL has none: file:///dir")
    if not parts.path.startswith("/"):
        parts.reject(parts.path, "must be the absolute path of a directory")
    first, *others = parts.path.split(",/")
    directories = (first, *(f"/{other}" for other in others))
    # As `PurePosixPath` compares: `//` and `/./` are `/`. A slab that is open twice would miss half of its blocks.
    if len({PurePosixPath("/", directory.lstrip("/")) for directory in directories}) != len(directories):
        parts.reject(parts.path, "names a directory twice")
    found = FileURL(
        parts,
        directories,
        size=parts.take("size", positive, 0, SIZE) or None,
        threads=parts.take("threads", count(2, 16), 4, "2 to 16"),
        direct=parts.take("direct", _one_of("auto", "on", "off"), "auto", "auto, on or off"),
        memory=parts.take("memory", positive, 1 << 30, SIZE),
        timeout_base=parts.take("timeout_base", seconds(1, 86_400), 10.0, "1 to 86400 seconds"),
        drop=parts.take("drop", _one_of("on", "off"), "off", "on or off") == "on",
    )
    parts.finish("size, threads, direct, memory, timeout_base, drop")
    return found


def open_file(
    url: str,
    *,
    bytes_per_block: int,
    num_slots: int | None = None,
    namespace: bytes = bytes(32),
    use: Use = "swap",
    codec: Codec | None = None,
    mac_key: MacKey | None = None,
    revision: str = "",
) -> ExternalStore:
    """Open the file store. `blockyard.stores.open_store` calls this for URLs with the scheme `file`.

    Args:
        url: `file:///dir?size=2GiB`; `docs/reference/store-urls.md` lists the options.
        bytes_per_block: bytes of one block.
        num_slots: number of blocks to hold; None for as many as fit into `size`.
        namespace: 32-byte digest of everything that determines the bytes.
        use: `"swap"` or `"prefix"`.
        codec: encodes the blocks.
        mac_key: 32 bytes, or the path of a file that holds them, to authenticate the blocks.
        revision: names the weights that compute the blocks, see `open_store`. If it differs from the file's, all blocks
            are forgotten.

    Raises:
        StoreURLError: the URL is malformed, or blocks of a prefix store would be dropped without `drop=on`; the message
            shows the wrong part.
        StoreFullError: `size` holds too few slots, or the disk has less room than `size`.
        StoreError: the directory or file cannot be opened, another store has it open, or the file system does not
            support `direct=on`.
    """
    found = read_url(url)
    parts = found.parts
    if found.size is None and num_slots is None:
        parts.reject(parts.path, "needs ?size=, for example ?size=2GiB")
    options: dict[str, Any] = {
        "bytes_per_block": bytes_per_block,
        "num_slots": num_slots,
        "namespace": namespace,
        "use": use,
        "revision": revision,
    }
    if codec is None and mac_key is None:
        store = _open_slabs(found, **options)
    else:
        guarded = GuardedSlab if len(found.directories) == 1 else GuardedSlabs
        store = guarded(found, **options, codec=codec, mac_key=mac_key)
        namespace = store.namespace
    if use == "prefix" and (text := text_of(namespace)):
        for directory in found.directories:
            with suppress(OSError):
                _write_text(Path(directory, text_name(namespace.hex())), text)
    return store


def text_name(digits: str) -> str:
    """Return the name of the file with the text of a namespace, in hexadecimal digits, beside a slab."""
    return f"blockyard-{digits[:16]}-{TEXT_NAME}"


def _write_text(path: Path, text: bytes) -> None:
    """Write a file of mode 0600 whole or not at all; links are not followed."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(part, _NEW, 0o600), "wb") as out:  # noqa: PTH123 (a descriptor)
            out.write(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _open_slabs(
    found: FileURL, *, bytes_per_block: int, num_slots: int | None, namespace: bytes, use: Use, revision: str
) -> ExternalStore:
    num_disks = len(found.directories)

    def open_one(directory: str) -> ExternalStore:
        try:
            store = SlabStore(
                directory,
                bytes_per_block=bytes_per_block,
                size=None if found.size is None else found.size // num_disks,
                num_slots=None if num_slots is None else -(-num_slots // num_disks),
                threads=found.threads,
                direct=found.direct,
                memory=max(1, found.memory // num_disks),
                timeout_base=found.timeout_base,
                namespace=namespace,
                use=use,
                revision=revision,
                drop=found.drop,
            )
        except InvalidArgumentError as error:
            found.parts.reject(directory, f"cannot be opened: {error}")
        if store.lost_blocks:
            _log.warning(
                "the first page of %s is damaged: its %d blocks are gone",
                store.path,
                store.lost_blocks,
                extra={"store": str(store.path), "blocks": store.lost_blocks},
            )
        return cast("ExternalStore", store)

    if num_disks == 1:
        return open_one(found.directories[0])
    return _striped(found.directories, open_one, is_keyed=use == "prefix")


class GuardedSlab(ThreadedStore):
    """Blocks in a slab, encoded by a codec or authenticated with a MAC key; created by `open_file`.

    The slab checks blocks and handles hung disks; its results are then checked like a server's answers.
    """

    keeps_quotas = True
    _reuses_rows = True
    _there_seconds = 3.0  # the slab evicts blocks, and a lookup costs nothing

    def __init__(self, found: FileURL, *, num_slots: int | None, use: Use, revision: str, **options: Any) -> None:
        super().__init__(found.parts.url, **options)
        self._use = use
        # Always valid: no other process has the slabs open, and they track what was forgotten.
        self._keyed_blocks.epochs = SharedEpoch(
            lambda: Record(b"", Epoch.read(bytes(EPOCH_BYTES))), self._keyed_blocks.record.replace
        )
        self.threads, self.memory, self.timeout_base = found.threads, found.memory, found.timeout_base
        self._slab = _open_slabs(
            found,
            bytes_per_block=self._stored_values.width,
            num_slots=num_slots,
            namespace=self.namespace,
            use=use,
            revision=revision,
        )
        self.num_slots = self._slab.num_slots

    def put(self, keys: Bytes, rows: Bytes) -> NDArray[np.bool_]:
        """Store values in slots."""
        return self._ended(collect(self._slab, self._slab.submit_write, self._slab_names(keys), rows))

    def put_blocks(self, keys: Bytes, rows: Bytes, owners: Owners | None, damaged: set[bytes]) -> NDArray[np.bool_]:
        """Store values under keys. The slab keeps a value that it finds intact, so those to replace are deleted."""
        if damaged:
            self.delete(np.frombuffer(b"".join(damaged), np.uint8).reshape(-1, 32))
        return self._ended(collect(self._slab, self._slab.submit_put, keys, rows, owners))

    def get(self, keys: Bytes, out: Bytes) -> NDArray[np.bool_]:
        """Read values."""
        submit = self._slab.submit_get if self._use == "prefix" else self._slab.submit_read
        done = collect(self._slab, submit, self._slab_names(keys))
        ok = self._ended(done)
        out[ok] = done.rows[ok]
        return ok

    def delete(self, keys: Bytes) -> None:
        """Delete values."""
        if self._use == "prefix":
            collect(self._slab, self._slab.submit_delete, keys)

    def has(self, keys: Bytes) -> NDArray[np.bool_]:
        """Return whether each key has a value."""
        return self._slab.contains(keys)

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Limit the blocks of one tenant; see `ExternalStore.set_quota`."""
        self._keys_of([])
        self._slab.set_quota(tenant, num_blocks)

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Return how many blocks count towards a tenant's quota, and the quota; see `ExternalStore.quota`."""
        self._keys_of([])
        return self._slab.quota(tenant)

    def close(self, timeout: float = 5.0) -> bool:
        """Give up batches in flight and close the slabs; see `ExternalStore.close`."""
        until = time.monotonic() + timeout
        in_time = super().close(timeout)
        return self._slab.close(max(0.0, until - time.monotonic())) and in_time

    def forget(self, revision: str | None = None) -> None:
        """Forget every key at once; see `ExternalStore.forget`."""
        self._keys_of([])
        with self._lock:
            self._keyed_blocks.stop("")
            while any(batch.age < self._keyed_blocks.epochs.age for batch in self._batches.running):
                self._changed.wait(0.01)  # otherwise an earlier put could land after the slab has forgotten
        self._slab.forget(revision)
        self._keyed_blocks.epochs.begin()

    def _slab_names(self, keys: Bytes) -> NDArray[Any]:
        """Return the slabs' names for rows: keys, or the slots at the beginning of their names."""
        return keys if self._use == "prefix" else keys[:, :8].copy().view(np.int64)[:, 0]

    def _ended(self, done: Completion) -> NDArray[np.bool_]:
        broken = sorted({"io", "timeout"} & set(done.reasons))
        if broken and not done.ok.any():
            raise StoreError(f"the slab's blocks are misses: {', '.join(broken)}; {self._slab.stats().last_error}")
        return done.ok


class GuardedSlabs(GuardedSlab):
    """A `GuardedSlab` over slabs in several directories, which keep no quotas."""

    keeps_quotas = False


def _striped(
    directories: tuple[str, ...], open_one: Callable[[str], ExternalStore], *, is_keyed: bool
) -> ExternalStore:
    """Open a slab in each directory. Raises the error of the first slab that the store cannot do without."""
    stores: list[ExternalStore | None] = []
    last: StoreError | None = None
    try:
        for directory in directories:
            try:
                stores.append(open_one(directory))
            except (StoreFullError, StoreURLError):  # noqa: PERF203 (opening takes far longer)
                raise
            except StoreError as error:
                if not is_keyed:
                    raise
                _log.warning("blocks on %s are misses: %s", directory, error)
                stores.append(None)
                last = error
        if last is not None and not any(stores):
            raise last
    except StoreError:
        for store in stores:
            if store is not None:
                store.close()
        raise
    return StripedStore(stores, is_keyed=is_keyed)


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ValueError(text)
        return text

    return read
