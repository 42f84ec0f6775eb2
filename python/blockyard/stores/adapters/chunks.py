"""Chunks of an engine's host memory on their way to and from a store, in rows that are used again.

Rows are page-aligned and in huge pages, so a file store reads into them in place; fresh rows take several times as
long. All chunks of a batch are copied in one call: while another thread of the engine computes, each call that gives
the interpreter's lock away may wait 5 ms until it has it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BoundViews, Completion, Mapping
from blockyard.errors import InvalidArgumentError
from blockyard.stores.checked_store import are_rows_free
from blockyard.workers.buffers import Buffers

__all__ = ["ChunkRows", "HeadShards"]


class HeadShards(NamedTuple):
    """How the workers of a tensor-parallel engine share the heads, to put their bytes in an order without workers.

    Each worker's chunk is a sequence of pieces, each with the worker's heads of one layer, or of one token of a layer.
    In the order without workers, the i-th pieces of all shards lie side by side, so that the heads are in order.

    Args:
        piece_bytes: bytes of a piece, which divide a worker's bytes per chunk.
        of_workers: which shard of the heads each worker has; several workers may have the same heads.
    """

    piece_bytes: int
    of_workers: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return max(self.of_workers) + 1


class ChunkRows:
    """Rows for the chunks of an engine's host memory.

    Args:
        parts: the host memory, uint8 `[chunks, bytes]`, equal for each worker.
        shards: the heads of each worker: a row then has the heads in order, each once, whatever the number of workers.
            None: a row has a chunk's bytes of all workers, one after the other.

    Raises:
        InvalidArgumentError: the parts are not equal, or cannot be cut into these pieces.
    """

    def __init__(self, parts: Sequence[NDArray[np.uint8]], shards: HeadShards | None = None) -> None:
        self._parts, width = list(parts), parts[0].shape[1]
        if any(part.shape != parts[0].shape for part in parts):
            raise InvalidArgumentError(f"parts are {[part.shape for part in parts]}, must be equal")
        self._shards = HeadShards(width, tuple(range(len(parts)))) if shards is None else shards
        size, workers = self._shards.piece_bytes, self._shards.of_workers
        if width % size or len(workers) != len(parts) or set(workers) != set(range(self._shards.num_shards)):
            raise InvalidArgumentError(
                f"shards are {workers} with pieces of {size} bytes, must be from 0 on for {len(parts)} workers with "
                f"pieces of {width} bytes"
            )
        self._width, self._num_pieces = width * self._shards.num_shards, width // self._shards.piece_bytes
        self._buffers = Buffers()

    def take(self, count: int) -> NDArray[np.uint8]:
        """Return rows with arbitrary contents, uint8 `[count, bytes]`."""
        return self._buffers.take(count, self._width)

    def give(self, rows: NDArray[np.uint8], done: Completion) -> None:
        """Return the rows of an ended batch, unless the store may still use them."""
        if are_rows_free(done.ok, done.reasons):
            self._buffers.give(rows)

    def read(self, chunks: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Copy chunks into rows."""
        rows, of = self.take(len(chunks)), self._shards.of_workers
        workers = [of.index(shard) for shard in range(self._shards.num_shards)]
        self._copy(self._host(workers), self._heads(rows, workers), chunks, np.arange(len(chunks)))
        return rows

    def write(self, chunks: NDArray[np.integer], rows: NDArray[np.uint8], places: NDArray[np.integer]) -> None:
        """Copy the rows at these places into chunks, which do not repeat."""
        workers = range(len(self._parts))
        self._copy(self._heads(rows, workers), self._host(workers), places, chunks)

    def _host(self, workers: Iterable[int]) -> list[NDArray[np.uint8]]:
        """View the host memory of some workers as pieces."""
        return [self._parts[worker].reshape(-1, self._shards.piece_bytes) for worker in workers]

    def _heads(self, rows: NDArray[np.uint8], workers: Iterable[int]) -> list[NDArray[np.uint8]]:
        """View the bytes of rows that some workers have as pieces."""
        size, of = self._shards.piece_bytes, self._shards.of_workers
        pieces = rows.reshape(-1, size * self._shards.num_shards)
        return [pieces[:, size * of[worker] : size * (of[worker] + 1)] for worker in workers]

    def _copy(
        self,
        src: list[NDArray[np.uint8]],
        dst: list[NDArray[np.uint8]],
        sources: NDArray[np.integer],
        targets: NDArray[np.integer],
    ) -> None:
        if not len(sources):
            return
        pairs = np.column_stack((sources, targets)).astype(np.int64)
        if self._num_pieces > 1:
            pairs = pairs[:, None] * self._num_pieces + np.arange(self._num_pieces)[:, None]
        mapping = Mapping(pairs.reshape(-1, 2), src_blocks=len(src[0]), dst_blocks=len(dst[0]), rule="swap")
        BoundViews(src, dst).run(mapping, num_threads=1)
