"""Memory for blocks that is used again: the first use of fresh memory costs as much as copying it."""

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Buffers"]

_MOST_BYTES: Final = 256 << 20


class Buffers:
    """Arrays that were given back, for whoever asks next. They hold whatever was in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []

    def take(self, count: int, width: int) -> NDArray[np.uint8]:
        """Return an array uint8 `[count, width]` with any content."""
        size = count * width
        with self._lock:
            for index in range(len(self._free) - 1, -1, -1):  # what was used last is in the cache
                array = self._free[index]
                if size <= array.nbytes <= 2 * size:
                    del self._free[index]
                    break
            else:
                array = np.empty(size, np.uint8)
        return array[:size].reshape(count, width)

    def give(self, array: NDArray[np.uint8] | None) -> None:
        """Take back an array from `take`, or a view of it, that nobody uses any more."""
        while array is not None and isinstance(array.base, np.ndarray):
            array = array.base
        if array is None or not array.nbytes or array.nbytes > _MOST_BYTES:
            return
        with self._lock:
            self._free.append(array.reshape(-1))
            while sum(free.nbytes for free in self._free) > _MOST_BYTES:
                del self._free[0]

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._free.clear()
