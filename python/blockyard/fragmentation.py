"""How scattered the blocks of a pool are, in figures, what is to be done about it, and what has been done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, BlockObserver, DefragReport
from blockyard.errors import InvalidArgumentError

PAGE_BLOCKS = 32

GoalName = Literal["max_id", "free_tail", "dense", "empty_pages", "contiguous"]
Goal = tuple[GoalName, int] | tuple[GoalName, int, int]
"""A goal's name and number, and how far it may be missed before anything moves; see `BlockManager.defragment`."""


@dataclass(frozen=True)
class Defragmentation:
    """What a scheduler wants of its device's pool: moves of blocks, decided once a step, with the step.

    Args:
        goals: the most important first. `("free_tail", 0)` keeps blocks off what a smaller pool gives back,
            `("dense", n)` all of them as low as can be; see `BlockManager.defragment`.
        max_moves: most blocks to move in a step, at least one.
        max_bytes: most bytes to write in a step; None for any number.
        block_bytes: bytes of a block, all layers; needed for `max_bytes`.
        cached: whether cached blocks in the way move, too, are dropped, or change places with those that move.

    Raises:
        InvalidArgumentError: there is no goal, one that is not known or malformed, or a number is out of range.

    Example:
        >>> from blockyard import BlockManager
        >>> from blockyard.scheduler import Scheduler
        >>> manager = BlockManager(block_size=16, device_blocks=64)
        >>> scheduler = Scheduler(manager, defragment=Defragmentation([("free_tail", 0), ("dense", 8)], max_moves=32))
    """

    goals: Sequence[Goal]
    max_moves: int = 64
    max_bytes: int | None = None
    block_bytes: int | None = None
    cached: Literal["move", "drop", "exchange"] = "move"

    def __post_init__(self) -> None:
        """Keep goals that nobody can change, and refuse what the manager would refuse in the middle of a step."""
        object.__setattr__(self, "goals", tuple(self.goals))
        if not self.goals:
            raise InvalidArgumentError("there are no goals, wanted at least one")
        for name in ("max_moves", "max_bytes", "block_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} is {value}, must be at least 1")
        self.plan(BlockManager(block_size=1, device_blocks=1))

    def plan(self, manager: BlockManager) -> DefragReport:
        """Decide this step's moves, as part of the decision that the manager gives next."""
        return manager.defrag.run(
            self.goals,
            max_moves=self.max_moves,
            max_bytes=self.max_bytes,
            block_bytes=self.block_bytes,
            cached=self.cached,
        )


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
        books: observes the pool.
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
