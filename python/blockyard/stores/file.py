"""The file store: blocks in one preallocated file, read and written by a pool of threads.

    file:///dir?size=2GiB&threads=4&direct=auto&memory=1GiB&deadline=10

| option | meaning | default |
|---|---|---|
| `size` | hard cap of the file, headers included | what `num_slots` need |
| `threads` | threads that read and write, 2 to 16 | 4 |
| `io` | how blocks are read and written: `threads`, `uring` for io_uring, or `auto`: what `calibrate` found | `auto` |
| `direct` | bypass the page cache: `on`, `off`, or `auto`: where the file system allows it | `auto` |
| `memory` | most bytes in flight and in results not collected; what is beyond is a miss, `queue_full` | 1GiB |
| `deadline` | least seconds an operation is given; it grows by a second for every 16 MB under way | 10 |

`file:///a,/b,/c` keeps blocks on several disks, each with a slab, threads and a share of the size of its own. A disk
that fails or hangs loses its own blocks only. If one cannot be opened, a prefix store goes on without it and logs that.
Keys are found again as long as the URL names the same directories in the same order.

The last component of a directory is made if it is missing, and must not be a symbolic link. The file has mode 0600
and is locked.

- Swap space: a file for each store. It goes when the store is closed; what a killed process left is removed by the next
  one to open the directory.
- Prefix store: one file in the directory, `blockyard-prefix.slab`, which stays and which one store at a time has open.
  Opening it reads the header of each slot, or the checkpoint that the last store wrote when it was closed. Blocks of
  other namespaces stay until their slots are needed; those of another size are dropped at once.

The formats are `docs/decisions/0002-slab-header.md` and `0022-prefix-store-in-a-slab.md`.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from blockyard._core import SlabStore
from blockyard.errors import InvalidArgumentError, StoreError, StoreFullError
from blockyard.stores.base import ExternalStore, StoreURL, Use, parse_size
from blockyard.stores.striped import StripedStore

__all__ = ["SlabStore", "open_file"]

KINDS_OF_IO: Final = ("threads", "uring")
_SIZE = "a size, for example 2GiB, 500MB or plain bytes"

_log = logging.getLogger("blockyard.stores")

ExternalStore.register(SlabStore)


class FileURL(NamedTuple):
    """What a URL of the file tier says."""

    parts: StoreURL
    directories: tuple[str, ...]
    size: int | None
    threads: int
    io: str
    direct: str
    memory: int
    deadline: float


def read_url(url: str) -> FileURL:
    """Read a URL with the scheme `file`; nothing is opened.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong.
    """
    parts = StoreURL.parse(url)
    if parts.host not in {"", "localhost"}:
        parts.reject(parts.host, "is a host; a file's URL has none: file:///dir")
    if not parts.path.startswith("/"):
        parts.reject(parts.path, "must be the absolute path of a directory")
    first, *others = parts.path.split(",/")
    directories = (first, *(f"/{other}" for other in others))
    if len(set(directories)) != len(directories):
        parts.reject(parts.path, "names a directory twice")
    found = FileURL(
        parts,
        directories,
        size=parts.take("size", _positive, 0, _SIZE) or None,
        threads=parts.take("threads", _thread_count, 4, "2 to 16"),
        io=parts.take("io", _one_of("auto", *KINDS_OF_IO), "auto", "auto, threads or uring"),
        direct=parts.take("direct", _one_of("auto", "on", "off"), "auto", "auto, on or off"),
        memory=parts.take("memory", _positive, 1 << 30, _SIZE),
        deadline=parts.take("deadline", _deadline, 10.0, "1 to 86400 seconds"),
    )
    parts.finish("size, threads, io, direct, memory, deadline")
    return found


def open_file(
    url: str,
    *,
    bytes_per_block: int,
    num_slots: int | None = None,
    namespace: bytes = bytes(32),
    use: Use = "swap",
) -> ExternalStore:
    """Open the file store; `blockyard.stores.open_store` does, for URLs with the scheme `file`.

    Args:
        url: `file:///dir?size=2GiB`, options as the module describes them.
        bytes_per_block: bytes of one block.
        num_slots: blocks to hold; as many as fit into `size` if None.
        namespace: 32-byte digest of all that decides the bytes.
        use: `"swap"` or `"prefix"`.

    Raises:
        StoreURLError: the URL is malformed; the message shows the part that is wrong.
        StoreFullError: `size` holds too few slots, or the disk has less room than `size`.
        StoreError: the directory or the file cannot be opened, another store has it open, or `direct=on` is refused.
    """
    found = read_url(url)
    parts = found.parts
    if found.size is None and num_slots is None:
        parts.reject(parts.path, "needs ?size=, for example ?size=2GiB")
    count = len(found.directories)

    def open_one(directory: str) -> ExternalStore:
        try:
            store = SlabStore(
                directory,
                bytes_per_block=bytes_per_block,
                size=None if found.size is None else found.size // count,
                num_slots=None if num_slots is None else -(-num_slots // count),
                threads=found.threads,
                io=calibrated_io(directory) if found.io == "auto" else found.io,
                direct=found.direct,
                memory=max(1, found.memory // count),
                deadline=found.deadline,
                namespace=namespace,
                use=use,
            )
        except InvalidArgumentError as error:
            parts.reject(directory, f"cannot be opened so: {error}")
        return cast("ExternalStore", store)

    if count == 1:
        return open_one(found.directories[0])
    return _striped(found.directories, open_one, is_keyed=use == "prefix")


def calibrated_io(directory: str) -> str:
    return "threads"


def _striped(
    directories: tuple[str, ...], open_one: Callable[[str], ExternalStore], *, is_keyed: bool
) -> ExternalStore:
    """Open a slab in each directory. Raises what the first raises that cannot be left out."""
    stores: list[ExternalStore | None] = []
    last: StoreError | None = None
    try:
        for directory in directories:
            try:
                stores.append(open_one(directory))
            except StoreFullError:  # noqa: PERF203 (opening takes longer by far)
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


def _positive(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise ValueError(text)
    return size


def _thread_count(text: str) -> int:
    count = int(text)
    if not 2 <= count <= 16:
        raise ValueError(text)
    return count


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise ValueError(text)
        return text

    return read


def _deadline(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 86_400:
        raise ValueError(text)
    return seconds
