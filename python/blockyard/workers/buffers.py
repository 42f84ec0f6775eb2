"""Memory that is reused: large arrays, which are slow to use for the first time."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Buffers", "fresh_pages"]

_KEPT_BYTES: Final = 256 << 20  # kept for reuse
_HUGE_PAGE: Final = 2 << 20


def fresh_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory that starts at a page, in huge pages where it is large enough, uint8 `[num_bytes]`.

    A file store reads into it in place. The kernel then pins one page instead of 512, which halves the time of a read.

    Raises:
        MemoryError: the system has too little memory.
    """
    is_large = num_bytes >= _HUGE_PAGE
    try:
        memory = mmap.mmap(-1, max(1, num_bytes + (_HUGE_PAGE if is_large else 0)), mmap.MAP_PRIVATE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes: {error}") from error
    start = 0
    if is_large:
        start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE
        with contextlib.suppress(OSError):  # kernels without them refuse, which only affects speed
            memory.madvise(mmap.MADV_HUGEPAGE)
    # Not a slice: its base would be the whole mapping, which `Buffers.give` would keep.
    return np.frombuffer(memory, np.uint8, num_bytes, start)


class Buffers:
    """A pool of reusable arrays. Their contents are arbitrary.

    The first use of fresh memory costs as much as copying it, or far more if it is page-locked.

    Args:
        make: function that returns a uint8 array of at least the given number of bytes.
        max_bytes: maximum number of bytes to keep.
    """

    def __init__(self, make: Callable[[int], NDArray[np.uint8]] = fresh_pages, max_bytes: int = _KEPT_BYTES) -> None:
        self._make = make
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []

    def take(self, count: int, width: int) -> NDArray[np.uint8]:
        """Return a uint8 array `[count, width]` with arbitrary contents."""
        size, array = count * width, None
        with self._lock:
            for index in range(len(self._free) - 1, -1, -1):  # the most recently used one is in the CPU cache
                if size <= self._free[index].nbytes <= 2 * size:
                    array = self._free.pop(index)
                    break
        if array is None:
            array = self._make(size)
        return array[:size].reshape(count, width)

    def give(self, array: NDArray[np.uint8] | None) -> None:
        """Return an array from `take`, or a view of it, to the pool; the caller must no longer use it."""
        while array is not None and isinstance(array.base, np.ndarray):
            array = array.base
        if array is None or not array.nbytes or array.nbytes > self._max_bytes:
            return
        with self._lock:
            self._free.append(array.reshape(-1))
            while sum(free.nbytes for free in self._free) > self._max_bytes:
                del self._free[0]

    def clear(self) -> None:
        """Free all kept arrays."""
        with self._lock:
            self._free.clear()
