"""Objects of any length in a prefix store, for engines that use text keys.

An object is split into blocks of one width, so that objects of different lengths share one store and its size limit.
The width is chosen so that one object of each kind takes few bytes, in few blocks.
Each block starts with the object's length and the XXH3-128 of its bytes. An object is a hit only if all its blocks come
back intact with the same header, and its length is as requested. If a block belongs to another object, the first one is
deleted. After any other failure all stay, and the store hides the missing block for a while. A store never overwrites a
key, so a put first deletes blocks with other bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion, checksum_rows
from blockyard.errors import InvalidArgumentError
from blockyard.stores import ExternalStore, StoreStats, open_store, parse_size
from blockyard.stores.adapters.jobs import Steps, StoreJobs, run
from blockyard.stores.adapters.options import read_size
from blockyard.stores.checked_store import are_rows_free
from blockyard.stores.namespace import Namespace
from blockyard.stores.opening import check_url
from blockyard.stores.url import public_repr, public_url
from blockyard.stores.value import is_damage
from blockyard.workers.buffers import Buffers

__all__ = [
    "BATCH_BYTES",
    "PrefixObjects",
    "about_store",
    "bytes_taken",
    "check_place",
    "folder_of",
    "place_url",
    "share_of",
    "store_url",
]

_LOG = logging.getLogger(__name__)
_DOMAIN: Final = b"blockyard objects 2"
_LENGTH_BYTES: Final = 8
_HEADER: Final = _LENGTH_BYTES + 16
BATCH_BYTES: Final = 64 << 20
"""Bytes of one job in the store at a time, so that the store's memory for blocks in flight is never exhausted."""
_BLOCK_COST: Final = 36 << 10
"""Bytes that a block costs in addition to its own: a file's header of 4 KiB, and a call in the time of 32 KiB."""
_VALUE_HEADER: Final = 128
"""Bytes of a block's header in stores other than files."""
_MOST_PARTS: Final = 64
"""Maximum number of blocks of an object whose length decides how long blocks are."""
_ASK_SECONDS: Final = 0.05
"""How long `contains` waits at most for a server's answer about keys that are new to this process."""


def check_place(root_dir: object, url: object, size: object) -> None:
    """Check the options that say where a store is. Creates nothing.

    Raises:
        InvalidArgumentError: not exactly one of `root_dir` and `url` is given, `root_dir` is a URL, or `size` is given
            beside `url`, or is not a size.
        StoreURLError: `url` is malformed.
    """
    if (root_dir is None) == (url is None):
        both = f"root_dir is {root_dir!r} and url is {public_repr(url)}"
        raise InvalidArgumentError(f"{both}, must give exactly one of them")
    if url is not None:
        if not isinstance(url, str) or not url:
            raise InvalidArgumentError(
                f"url is {public_repr(url)}, must be the URL of a store: redis://host?size=500GiB"
            )
        check_url(url)
        if size is not None:
            raise InvalidArgumentError(f"size is {size!r:.100}, but url has its own: write {_with_size(url, size)!r}")
        return
    if not isinstance(root_dir, str) or not root_dir or root_dir.startswith("~"):
        shown = public_repr(root_dir)
        raise InvalidArgumentError(f"root_dir is {shown}, must be a folder, such as /var/cache/blockyard")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", root_dir):
        raise InvalidArgumentError(
            f"root_dir is {public_url(root_dir)!r}, must be a folder: give a URL as url, {_with_size(root_dir, size)!r}"
        )
    if size is not None:
        read_size("size", size)


def _with_size(url: str, size: object) -> str:
    shown = public_url(url)
    return shown if "size=" in shown else f"{shown}{'&' if '?' in shown else '?'}size={size or '500GiB'}"


def share_of(url: str, share: float) -> str:
    """Return the URL of a store with a share of its size; the same if it has none."""

    def shared(size: re.Match[str]) -> str:
        return f"{size[1]}{int(parse_size(size[2]) * share)}"

    return re.sub(r"([?&]size=)([^&]*)", shared, url)


def folder_of(url: str, name: str) -> str:
    """Return the URL of the same store in folders of this name; the same if its store is not in folders."""
    if not url.startswith("file:"):
        return url
    folders, mark, options = url.partition("?")
    return ",".join(f"{folder.rstrip('/')}/{name}" for folder in folders.split(",")) + mark + options


def place_url(root_dir: str | None, url: str | None, size: int | str | None, part: str = "") -> str:
    """Return the URL of a store: `url`, or a file store in `root_dir` or its folder `part`. Creates nothing.

    Args:
        root_dir: a folder; None for `url`.
        url: a URL; None for `root_dir`.
        size: size limit of the file store; None for 1 GiB.
        part: folder of this store in `root_dir`.

    Raises:
        InvalidArgumentError: as for `check_place`.
    """
    check_place(root_dir, url, size)
    if url is not None:
        return url
    folder = Path(str(root_dir)).absolute() / part
    if size is None:
        size = "1GiB"
    return f"file://{quote(str(folder))}?size={size if isinstance(size, str) else read_size('size', size)}"


def store_url(root_dir: str | None, url: str | None, size: int | str | None, part: str = "") -> str:
    """Return what `place_url` does, once the parents of the folder are there.

    Raises:
        InvalidArgumentError: as for `check_place`.
        OSError: a folder cannot be created.
    """
    found = place_url(root_dir, url, size, part)
    if url is None:
        (Path(str(root_dir)).absolute() / part).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found


def about_store(store: ExternalStore, url: str, namespace: bytes) -> str:
    """Describe an open store for the log: its URL, the namespace in short, and its blocks if it knows them already."""
    found = f", {store.stats().cached_blocks} blocks found" if url.startswith("file:") else ""
    return f"store {public_url(url)}, namespace {namespace.hex()[:8]}{found}"


class PrefixObjects:
    """Objects by key, in a prefix store. Only the constructor raises: other failures are misses.

    `put`, `get`, `contains` and `delete` block. The variants with `_steps` are jobs for the thread that `jobs` returns.

    Args:
        url: URL of the store, see `blockyard.open_store`.
        sizes: the lengths of the objects, one for each kind, or as often as a kind occurs. If there is one kind, an
            object fills one block.
        fields: everything that determines an object's bytes besides its key, JSON-serializable.

    Raises:
        StoreError: the store cannot be opened, or has no keys.
    """

    def __init__(self, url: str, *, sizes: Sequence[int], fields: Mapping[str, Any]) -> None:
        grain = _grain(url)
        self._part_bytes = _part_bytes(sizes, grain)
        self._width = _width(self._part_bytes, grain)
        self._buffers = Buffers()  # fresh rows take several times as long as the disk
        # A file store knows its keys without asking.
        self._is_shared = not url.startswith("file:")
        self._patience = _ASK_SECONDS if self._is_shared else 0.0
        self._part_of = ""  # of every name; another one after `clear`
        text = json.dumps(fields, sort_keys=True, default=str)
        namespace = Namespace(hashlib.sha256(_DOMAIN + text.encode(errors="surrogatepass")).digest(), fields)
        self._store: ExternalStore = open_store(url, bytes_per_block=self._width, namespace=namespace, use="prefix")
        self.about = about_store(self._store, url, namespace)

    def jobs(self, name: str, lanes: Mapping[str, int]) -> StoreJobs:
        """Return a thread for jobs over this store; see `StoreJobs`."""
        return StoreJobs(self._store, name, lanes)

    def put(self, keys: Sequence[str], sizes: Sequence[int], read: Callable[[int], NDArray[np.uint8]]) -> list[bool]:
        """Store objects, replacing others under their keys; return which were stored. See `put_steps`."""
        return run(self._store, self.put_steps(keys, sizes, read))

    def put_steps(
        self, keys: Sequence[str], sizes: Sequence[int], read: Callable[[int], NDArray[np.uint8]]
    ) -> Steps[list[bool]]:
        """Store objects, replacing others under their keys; return which were stored.

        If an object is not stored, its key may be left empty or with the old bytes, but never with parts of both.

        Args:
            keys: keys of the objects.
            sizes: lengths of the objects.
            read: returns the bytes of an object by index, when they are needed.
        """
        stored = [False] * len(keys)
        for first, last, parts in self._batches(sizes):
            try:
                rows = self._buffers.take(parts, self._width)
                row = 0
                for index in range(first, last):
                    count = self._parts(sizes[index])
                    _fill(rows[row : row + count], read(index), sizes[index], self._part_bytes)
                    row += count
                done = yield from self._replace(keys[first:last], sizes[first:last], rows)
            except Exception:  # noqa: BLE001 (the engine continues without it)
                _LOG.exception("%d objects were not stored", last - first)
                continue
            stored[first:last] = done
        return stored

    def _give(self, rows: NDArray[np.uint8], done: Completion) -> None:
        """Use the rows of an ended batch again, unless the store may still use them."""
        if are_rows_free(done.ok, done.reasons):
            self._buffers.give(rows)

    def _replace(self, keys: Sequence[str], sizes: Sequence[int], rows: NDArray[np.uint8]) -> Steps[list[bool]]:
        """Store the blocks of objects except those already present, after deleting other bytes under their keys."""
        names, counts = self._names(keys, sizes), [self._parts(size) for size in sizes]
        firsts = np.cumsum([0, *counts[:-1]])
        there = self._buffers.take(len(firsts), self._width)
        found = yield self._store.submit_get, [names[first] for first in firsts], there
        stored = found.ok & (found.rows[:, :_HEADER] == rows[firsts, :_HEADER]).all(axis=1)
        self._give(there, found)
        if len(names) > len(keys) and stored.any():
            has = self._store.contains(names)
            has[firsts] = True
            stored &= [bool(part.all()) for part in self._split(has, sizes)]
        # The content of a block that did not come back is unknown: leave it.
        is_known = [not reason or reason == "absent" or is_damage(reason) for reason in found.reasons]
        left = np.flatnonzero(np.repeat(~stored & is_known, counts))
        if len(left):
            ok = np.ones(len(names), np.bool_)
            deleted = yield self._store.submit_delete, [names[place] for place in left]
            ok[left] = deleted.ok
            # If a key could not be deleted, its old block would remain.
            gone = np.repeat([bool(part.all()) for part in self._split(ok, sizes)], counts)
            left = left[gone[left]]
        if len(left):
            chosen = rows if len(left) == len(rows) else self._chosen(rows, left)
            put = yield self._store.submit_put, [names[place] for place in left], chosen
            ok[left] = put.ok
            self._give(chosen, put)
            stored = np.array([bool(part.all()) for part in self._split(ok, sizes)]) & is_known
        else:
            self._buffers.give(rows)
        return [bool(one) for one in stored]

    def _chosen(self, rows: NDArray[np.uint8], places: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Return some of the rows as rows of their own; the others are used again."""
        chosen = self._buffers.take(len(places), self._width)
        np.take(rows, places, axis=0, out=chosen)
        self._buffers.give(rows)
        return chosen

    def get(
        self, keys: Sequence[str], sizes: Sequence[int], take: Callable[[int, NDArray[np.uint8]], None]
    ) -> list[bool]:
        """Load objects; return which came back intact. See `get_steps`."""
        return run(self._store, self.get_steps(keys, sizes, take))

    def get_steps(
        self, keys: Sequence[str], sizes: Sequence[int], take: Callable[[int, NDArray[np.uint8]], None]
    ) -> Steps[list[bool]]:
        """Load objects; return which came back intact.

        `take(i, data)` is called only for these, with their bytes, which it must copy.
        """
        loaded = [False] * len(keys)
        for first, last, count in self._batches(sizes):
            names = self._names(keys[first:last], sizes[first:last])
            try:
                target = self._buffers.take(count, self._width)
                found = yield self._store.submit_get, names, target
                parts = self._split(found.ok, sizes[first:last])
                rows = self._split(found.rows, sizes[first:last])
                bad: list[bytes] = []
                for index, (ok, data) in enumerate(zip(parts, rows, strict=True), first):
                    if ok.all() and _is_one(data, sizes[index]):
                        take(index, data[:, _HEADER : _HEADER + self._part_bytes].reshape(-1)[: sizes[index]])
                        loaded[index] = True
                    elif ok.all() and _length(data) == sizes[index]:
                        bad.append(self._name(keys[index]))  # an intact part belongs to another object
                self._give(target, found)
                if bad:
                    yield self._store.submit_delete, bad
            except Exception:  # noqa: BLE001 (a load that failed is a miss)
                _LOG.exception("%d objects could not be loaded", last - first)
        return loaded

    def contains(self, keys: Sequence[str], sizes: Sequence[int] | None = None, until: float = math.inf) -> list[bool]:
        """Return which objects can probably be loaded. Without `sizes`, only their first blocks are looked up.

        Waits for a server's answer at most until `until`, a time on the monotonic clock.
        """
        return run(self._store, self.contains_steps(keys, sizes, until))

    def contains_steps(
        self, keys: Sequence[str], sizes: Sequence[int] | None = None, until: float = math.inf
    ) -> Steps[list[bool]]:
        """Return which objects can probably be loaded; see `contains`."""
        names = [self._name(key) for key in keys] if sizes is None else self._names(keys, sizes)
        patience = min(until, time.monotonic() + self._patience)
        try:
            found = self._store.contains(names)
            while not (found | self._store.lacks(names)).all() and time.monotonic() < patience:
                yield 0.001
                found = self._store.contains(names)
        except Exception:  # noqa: BLE001 (a failed lookup is a miss)
            _LOG.exception("a lookup of %d objects failed", len(keys))
            return [False] * len(keys)
        whole = found if sizes is None else [part.all() for part in self._split(found, sizes)]
        return [bool(there) for there in whole]

    def delete(self, keys: Sequence[str]) -> list[bool]:
        """Delete the first blocks of objects; return which are deleted. Their other blocks are evicted in time."""
        return run(self._store, self.delete_steps(keys))

    def delete_steps(self, keys: Sequence[str]) -> Steps[list[bool]]:
        """Delete objects; see `delete`."""
        try:
            done = yield self._store.submit_delete, [self._name(key) for key in keys]
            return [bool(ok) for ok in done.ok]
        except Exception:  # noqa: BLE001 (the caller counts it)
            _LOG.exception("%d objects were not deleted", len(keys))
            return [False] * len(keys)

    def clear(self) -> bool:
        """Find nothing stored before from now on; return whether this also holds for later processes.

        A file store is this process's alone, and forgets. Elsewhere other engines have the same objects in use: they
        keep them, and this process shares none with them until it is opened again. What it stored ages.
        """
        if self._is_shared:
            self._part_of = os.urandom(16).hex()
            return False
        try:
            self._store.forget()
        except Exception:  # noqa: BLE001 (the caller counts it)
            _LOG.exception("the store was not cleared")
            return False
        return True

    def stats(self) -> StoreStats:
        """Return the counters of the store."""
        return self._store.stats()

    def close(self) -> None:
        """Close the store; later lookups are misses."""
        self._store.close()

    def _parts(self, size: int) -> int:
        return max(1, -(-size // self._part_bytes))

    def _names(self, keys: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        return [
            self._name(key, part) for key, size in zip(keys, sizes, strict=True) for part in range(self._parts(size))
        ]

    def _name(self, key: str, part: int = 0) -> bytes:
        """Return the name of one block of an object in the store."""
        text = f"{self._part_of}{part} {key}"
        return hashlib.sha256(text.encode(errors="surrogatepass")).digest()

    def _split(self, rows: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
        ends = np.cumsum([self._parts(size) for size in sizes])
        if len(rows) != ends[-1]:
            raise InvalidArgumentError(f"the store answered {len(rows)} blocks of {ends[-1]}")
        return np.split(rows, ends[:-1])

    def _batches(self, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (first, last, blocks) of runs of objects that are read or written together."""
        first, parts = 0, 0
        for index, size in enumerate(sizes):
            count = self._parts(size)
            if parts and (parts + count) * self._width > BATCH_BYTES:
                yield first, index, parts
                first, parts = index, 0
            parts += count
        if parts:
            yield first, len(sizes), parts


def _width(part_bytes: int, grain: int) -> int:
    return -(-(_HEADER + part_bytes) // grain) * grain


def _part_bytes(sizes: Sequence[int], grain: int) -> int:
    """Return the bytes of an object in a block with which one object of each size costs least."""

    def cost(part: int) -> int:
        blocks = sum(max(1, -(-size // part)) for size in sizes)
        return blocks * (_width(part, grain) + _BLOCK_COST)

    parts = {-(-max(1, size) // count) for size in sizes for count in range(1, _MOST_PARTS + 1)}
    return min(parts, key=lambda part: (cost(part), -part))


def bytes_taken(url: str, sizes: Sequence[int]) -> int:
    """Return how many bytes of its store one object of each of these lengths takes, headers included."""
    grain = _grain(url)
    part = _part_bytes(sizes, grain)
    blocks = sum(max(1, -(-size // part)) for size in sizes)
    return blocks * (_width(part, grain) + max(grain, _VALUE_HEADER))


def _grain(url: str) -> int:
    """A file store reads and writes whole pages in place, and keeps blocks in whole pages anyway."""
    return mmap.PAGESIZE if url.startswith("file:") else 1


def _fill(rows: NDArray[np.uint8], data: NDArray[np.uint8], size: int, part_bytes: int) -> None:
    """Write an object into blocks, uint8 `[blocks, width]`, with `part_bytes` of it in each."""
    if data.nbytes != size:
        raise InvalidArgumentError(f"an object has {data.nbytes} bytes, must have {size}")
    end, flat = _HEADER + part_bytes, np.ascontiguousarray(data).reshape(-1)
    rows[:, :_LENGTH_BYTES] = np.frombuffer(size.to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    rows[:, _LENGTH_BYTES:_HEADER] = checksum_rows(flat[None])
    whole = size // part_bytes
    rows[:, end:] = 0
    rows[:whole, _HEADER:end] = flat[: whole * part_bytes].reshape(whole, part_bytes)
    if whole < len(rows):
        rest = size - whole * part_bytes
        rows[whole, _HEADER : _HEADER + rest] = flat[whole * part_bytes :]
        rows[whole, _HEADER + rest : end] = 0


def _is_one(rows: NDArray[np.uint8], size: int) -> bool:
    """Return whether blocks form one object of this length."""
    return _length(rows) == size and bool((rows[1:, :_HEADER] == rows[0, :_HEADER]).all())


def _length(rows: NDArray[np.uint8]) -> int:
    """Return the length of an object, from its first block."""
    return int.from_bytes(rows[0, :_LENGTH_BYTES].tobytes(), "little")
