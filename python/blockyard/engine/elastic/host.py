"""Elastic caches on a CPU: anonymous memory that is returned to the system page by page."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from blockyard.engine.host_memory import MAP_NORESERVE
from blockyard.errors import InvalidArgumentError, OutOfMemoryError

__all__ = ["HostMemory"]


class HostMemory:
    """Addresses of one anonymous mapping; see `MemoryRange` in `elastic`.

    A page uses memory once it is touched, and none after it is released; it then reads as zeros again. The mapping
    lives as long as any tensor over it. Huge pages are disabled: touching the edge of one would bring back up to 2 MiB
    of released memory.

    Args:
        sizes: bytes of each tensor, which begins with a chunk.
        chunk_bytes: bytes of a chunk, a multiple of a page; a page if None.

    Raises:
        InvalidArgumentError: the chunk is not a multiple of a page, or the system cannot release pages.
        OutOfMemoryError: the process has too little address space.
    """

    def __init__(self, sizes: Sequence[int], *, chunk_bytes: int | None = None) -> None:
        if not hasattr(mmap.mmap, "madvise") or not hasattr(mmap, "MADV_DONTNEED"):
            raise InvalidArgumentError("this system cannot release pages of a mapping: madvise is missing")
        self.chunk = mmap.PAGESIZE if chunk_bytes is None else chunk_bytes
        if self.chunk < 1 or self.chunk % mmap.PAGESIZE:
            raise InvalidArgumentError(f"chunk_bytes is {self.chunk}, must be a multiple of {mmap.PAGESIZE}")
        total = sum(-(-size // self.chunk) * self.chunk for size in sizes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, total, flags=flags)
        except OSError as error:
            raise OutOfMemoryError(f"cannot reserve {total} bytes of addresses: {error.strerror}", total) from error
        with contextlib.suppress(OSError):  # a system without huge pages
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        # The array keeps the mapping alive, and the tensor the array.
        self.tensor = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))

    def commit(self, first: int, last: int) -> None:
        """Do nothing: pages are allocated, as zeros, on first touch."""

    def release(self, first: int, last: int) -> None:
        """Return the pages of chunks `first` to `last` (exclusive) to the system."""
        self._map.madvise(mmap.MADV_DONTNEED, first * self.chunk, (last - first) * self.chunk)

    def synchronize(self) -> None:
        """Do nothing: torch's CPU work is synchronous, and the engines' transfers have already ended."""
