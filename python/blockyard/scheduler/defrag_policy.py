"""What a scheduler asks of defragmentation, once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockyard._core import BlockManager, DefragReport
from blockyard.errors import InvalidArgumentError

GoalName = Literal["max_id", "free_tail", "dense", "empty_pages", "contiguous"]
Goal = tuple[GoalName, int] | tuple[GoalName, int, int]
"""A goal's name and number, and how far it may be missed before anything moves; see `manager.defrag.run`."""


@dataclass(frozen=True)
class DefragPolicy:
    """What a scheduler wants of its device's pool: moves of blocks, decided once a step, with the step.

    Args:
        goals: the most important first. `("free_tail", 0)` keeps blocks off what a smaller pool gives back,
            `("dense", n)` all of them as low as can be; see `manager.defrag.run`.
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
        >>> scheduler = Scheduler(manager, defragment=DefragPolicy([("free_tail", 0), ("dense", 8)], max_moves=32))
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
