"""Room ahead: device blocks for prompts that start soon are emptied while the steps before compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from blockyard._core import BlockManager, HashedPrompt
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler.ranked_queue import RankedQueue
from blockyard.scheduler.request import IdleSequences
from blockyard.scheduler.rows import LENGTH, LIMIT, SequenceRows

__all__ = ["RoomAhead"]

_SOON: Final = 2
"""A prompt starts soon if a sequence reaches its limit within as many tokens. Steps that only decode are short."""


class RoomAhead:
    """Announces the blocks of waiting prompts that start once sequences reach their limit.

    Args:
        manager: the scheduler's manager.
        rows: rows of the running sequences.
        waiting: the queue.
        hashed: returns a prompt with its keys.
        max_tokens: maximum number of tokens in a step.
    """

    def __init__(
        self,
        manager: BlockManager,
        rows: SequenceRows,
        waiting: RankedQueue,
        hashed: Callable[[IdleSequences], HashedPrompt],
        max_tokens: int,
    ) -> None:
        self._manager, self._rows, self._waiting, self._hashed = manager, rows, waiting, hashed
        self._max_tokens = max_tokens
        self._is_on = _keeps_copies(manager)

    def expect(self) -> None:
        """Announce the blocks that prompts will take in the next steps."""
        rows = self._rows
        if not (self._is_on and self._waiting):
            return
        left = rows.fields[LIMIT, : rows.count] - rows.fields[LENGTH, : rows.count]
        seats = rows.seats_left + int(np.count_nonzero(left <= _SOON))
        blocks, tokens = 0, self._max_tokens
        for idle in self._waiting.first(seats) if seats else ():
            tokens -= len(idle.tokens[0])
            if blocks and tokens < 0:
                break
            blocks += self._blocks_of(idle)
        if blocks:
            self._manager.prefix.expect(blocks)

    def _blocks_of(self, idle: IdleSequences) -> int:
        """Return how many blocks a prompt takes, as of when it was first looked at: a lookup takes time."""
        if idle.blocks is None:
            idle.blocks = self._manager.can_allocate(self._hashed(idle)).blocks
        return idle.blocks


def _keeps_copies(manager: BlockManager) -> bool:
    """Whether prompts find copies on the host."""
    try:
        manager.prefix.expect(0)
    except InvalidArgumentError:
        return False
    return True
