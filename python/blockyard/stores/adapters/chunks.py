"""Chunks of an engine's host memory on their way to and from a store, in rows that are used again.

Rows are page-aligned and in huge pages, so a file store reads into them in place; fresh rows take several times as
long. All chunks of a batch are copied in one call: while another thread of the engine computes, each call that gives
the interpreter's lock away may wait 5 ms until it has it back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BoundViews, Completion, Mapping
from blockyard.stores.checked_store import are_rows_free
from blockyard.workers import Buffers

__all__ = ["ChunkRows"]


class ChunkRows:
    """Rows for the chunks of an engine's host memory.

    Args:
        parts: the host memory, uint8 `[chunks, bytes]` for each worker; a row has a chunk's bytes of all workers.
    """

    def __init__(self, parts: Sequence[NDArray[np.uint8]]) -> None:
        self._parts = list(parts)
        self._starts = np.cumsum([0, *(part.shape[1] for part in parts)]).tolist()
        self._buffers = Buffers()

    def take(self, count: int) -> NDArray[np.uint8]:
        """Return rows with arbitrary contents, uint8 `[count, bytes]`."""
        return self._buffers.take(count, self._starts[-1])

    def give(self, rows: NDArray[np.uint8], done: Completion) -> None:
        """Return the rows of an ended batch, unless the store may still use them."""
        if are_rows_free(done.ok, done.reasons):
            self._buffers.give(rows)

    def read(self, chunks: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Copy chunks into rows."""
        rows = self.take(len(chunks))
        self._copy(self._parts, self._columns(rows), chunks, np.arange(len(chunks)))
        return rows

    def write(self, chunks: NDArray[np.integer], rows: NDArray[np.uint8], places: NDArray[np.integer]) -> None:
        """Copy the rows at these places into chunks, which do not repeat."""
        self._copy(self._columns(rows), self._parts, places, chunks)

    def _columns(self, rows: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        return [rows[:, start:end] for start, end in zip(self._starts, self._starts[1:], strict=False)]

    @staticmethod
    def _copy(
        src: list[NDArray[np.uint8]],
        dst: list[NDArray[np.uint8]],
        sources: NDArray[np.integer],
        targets: NDArray[np.integer],
    ) -> None:
        if not len(sources):
            return
        pairs = np.column_stack((sources, targets)).astype(np.int64)
        mapping = Mapping(pairs, src_blocks=len(src[0]), dst_blocks=len(dst[0]), rule="swap")
        BoundViews(src, dst).run(mapping, num_threads=1)
