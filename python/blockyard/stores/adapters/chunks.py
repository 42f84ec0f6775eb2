"""Chunks of an engine's host memory on their way to and from a store, in rows that are used again.

Rows are page-aligned and in huge pages, so a file store reads into them in place; fresh rows take several times as
long. All chunks of a batch are copied in one call: while another thread of the engine computes, each call that gives
the interpreter's lock away may wait 5 ms until it has it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BoundViews, Completion, Mapping
from blockyard.errors import InvalidArgumentError
from blockyard.stores.checked_store import are_rows_free
from blockyard.workers.buffers import Buffers

__all__ = ["ChunkRows", "HeadShards", "TokenOrder"]


class TokenOrder(NamedTuple):
    """Where the bytes of each group of tokens lie in a worker's block, to put them in an order without block sizes.

    A page, a block in one layer, repeats parts side by side. A part holds some runs of each group of tokens, and these
    alternate: a run of the first group, of the second, and so on, and again the first. In the order without block
    sizes, each group has its runs of all layers side by side, as if it were a block.

    Args:
        groups: groups in a block.
        layers: pages of a block.
        repeats: how often a page repeats the parts.
        parts: for each part, the number of runs of a group, and the bytes of a run.
    """

    groups: int
    layers: int
    repeats: int
    parts: tuple[tuple[int, int], ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of a worker's block."""
        return self.groups * self.layers * self.repeats * sum(runs * size for runs, size in self.parts)

    def units(self, unit_bytes: int) -> NDArray[np.int64]:
        """Return the places of a block's units, which divide all runs, in the order without block sizes."""
        found, first = [], 0
        for runs, size in self.parts * self.repeats:
            part = np.arange(runs * self.groups * size // unit_bytes).reshape(runs, self.groups, -1)
            found.append(first + part.transpose(1, 0, 2).reshape(self.groups, -1))
            first += part.size
        pages = np.arange(self.layers)[None, :, None] * first
        units: NDArray[np.int64] = (pages + np.concatenate(found, axis=1)[:, None]).reshape(-1)
        return units


class HeadShards(NamedTuple):
    """How the workers of a tensor-parallel engine share the heads, to put their bytes in an order without workers.

    Each worker's chunk is a sequence of pieces, each with the worker's heads of one layer, or of one token of a layer.
    In the order without workers, the i-th pieces of all shards lie side by side, so that the heads are in order.

    Args:
        piece_bytes: bytes of a piece, which divide a worker's bytes per chunk.
        of_workers: which shard of the heads each worker has; several workers may have the same heads.
        tokens: which bytes to put in the order without block sizes first, so that pieces are of a group of tokens;
            None if blocks keep their order.
    """

    piece_bytes: int
    of_workers: tuple[int, ...]
    tokens: TokenOrder | None = None

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
        self._width, self._unit_bytes = width * self._shards.num_shards, size
        self._units = np.arange(width // size)  # of a chunk, in the order of rows; a piece has one or more
        if (tokens := self._shards.tokens) is not None and tokens.groups > 1:
            if width % tokens.block_bytes:
                raise InvalidArgumentError(f"parts have {width} bytes, must be blocks of {tokens.block_bytes} bytes")
            unit = self._unit_bytes = math.gcd(size, *(run for _, run in tokens.parts))
            blocks = np.arange(0, width, tokens.block_bytes) // unit
            self._units = (blocks[:, None] + tokens.units(unit)).reshape(-1)
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
        self._copy(rows, workers, chunks, np.arange(len(chunks)), into_rows=True)
        return rows

    def write(self, chunks: NDArray[np.integer], rows: NDArray[np.uint8], places: NDArray[np.integer]) -> None:
        """Copy the rows at these places into chunks, which do not repeat."""
        self._copy(rows, range(len(self._parts)), chunks, places, into_rows=False)

    def _copy(
        self,
        rows: NDArray[np.uint8],
        workers: Iterable[int],
        chunks: NDArray[np.integer],
        places: NDArray[np.integer],
        *,
        into_rows: bool,
    ) -> None:
        if not len(chunks):
            return
        count = len(self._units)
        host = np.asarray(chunks, np.int64)[:, None] * count + self._units
        if self._unit_bytes == self._shards.piece_bytes:
            at = np.asarray(places, np.int64)[:, None] * count + np.arange(count)
            _run(self._host(workers), self._heads(rows, workers), host, at, into_rows=into_rows)
            return
        shards, per_piece = self._shards.num_shards, self._shards.piece_bytes // self._unit_bytes
        numbers = np.arange(count)
        for worker in workers:  # its pieces alternate with those of the other shards
            in_row = (numbers // per_piece * shards + self._shards.of_workers[worker]) * per_piece + numbers % per_piece
            at = np.asarray(places, np.int64)[:, None] * (count * shards) + in_row
            _run(self._host([worker]), [rows.reshape(-1, self._unit_bytes)], host, at, into_rows=into_rows)

    def _host(self, workers: Iterable[int]) -> list[NDArray[np.uint8]]:
        """View the host memory of some workers as units."""
        return [self._parts[worker].reshape(-1, self._unit_bytes) for worker in workers]

    def _heads(self, rows: NDArray[np.uint8], workers: Iterable[int]) -> list[NDArray[np.uint8]]:
        """View the bytes of rows that some workers have as pieces."""
        size, of = self._shards.piece_bytes, self._shards.of_workers
        pieces = rows.reshape(-1, size * self._shards.num_shards)
        return [pieces[:, size * of[worker] : size * (of[worker] + 1)] for worker in workers]


def _run(
    host: list[NDArray[np.uint8]],
    rows: list[NDArray[np.uint8]],
    in_host: NDArray[np.int64],
    in_rows: NDArray[np.int64],
    *,
    into_rows: bool,
) -> None:
    """Copy between places of the host and of the rows."""
    src, dst, pairs = (host, rows, (in_host, in_rows)) if into_rows else (rows, host, (in_rows, in_host))
    mapping = Mapping(
        np.stack(pairs, axis=-1).reshape(-1, 2), src_blocks=len(src[0]), dst_blocks=len(dst[0]), rule="swap"
    )
    BoundViews(src, dst).run(mapping, num_threads=1)
