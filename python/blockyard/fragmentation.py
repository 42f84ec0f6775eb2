"""How scattered the blocks of a pool are, in figures, and what has been done about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockObserver

PAGE_BLOCKS = 32


class DefragStats(NamedTuple):
    """What a defragmenter has done.

    Attributes:
        steps: calls of `defragment` that moved something.
        moves: blocks that were moved one way.
        exchanges: pairs of blocks that changed places.
        num_bytes: bytes written, all layers.
        gap: ids between the highest block in use and the highest there need be, now.
        seconds: spent in `defragment`, until its copies were handed over: on a GPU they may still run then.
    """

    steps: int
    moves: int
    exchanges: int
    num_bytes: int
    gap: int
    seconds: float


class Fragmentation(NamedTuple):
    """How scattered blocks are.

    Attributes:
        blocks: blocks in use.
        highest: the highest of them that can be moved, 0 if there is none.
        gap: ids between that and the highest there need be.
        sequences: sequences counted.
        runs: runs of neighbours in which their blocks lie, shared ones counted once.
        most_runs: runs of the sequence that has most.
        used_pages: pages that hold a block in use, one that is held in place, or the null block.
        empty_pages: the other pages, whose memory could be given back.
    """

    blocks: int
    highest: int
    gap: int
    sequences: int
    runs: int
    most_runs: int
    used_pages: int
    empty_pages: int

    @property
    def runs_per_sequence(self) -> float:
        """Runs for each sequence, 0 without sequences."""
        return self.runs / self.sequences if self.sequences else 0.0


def measure(
    books: BlockObserver,
    sequences: Sequence[Sequence[int] | NDArray[np.int64] | NDArray[np.int32]] = (),
    *,
    page_blocks: int = PAGE_BLOCKS,
) -> Fragmentation:
    """Measure a pool; looks at all blocks.

    Args:
        books: the books of the pool.
        sequences: ids of each sequence, in order.
        page_blocks: blocks of a page.

    Raises:
        InvalidArgumentError: an id is out of range, or a page has no blocks.
    """
    runs, most = books.runs(sequences)
    pages = books.used_pages(page_blocks)
    return Fragmentation(
        blocks=len(books.used()),
        highest=books.highest or 0,
        gap=books.gap,
        sequences=len(sequences),
        runs=runs,
        most_runs=most,
        used_pages=pages,
        empty_pages=-(-len(books) // page_blocks) - pages,
    )
