"""`Upkeep`: resizes, pins and block moves in the pool of a serving engine while it serves."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.scheduler import DefragPolicy, Goal
from blockyard.tools.sim.fleet.oracle import BrokenPromiseError
from blockyard.tools.sim.fleet.texts import BLOCK_SIZE, GARBAGE

__all__ = ["DEVICE_BLOCKS", "MAX_DEVICE_BLOCKS", "MAX_PINNED", "Upkeep", "draw_defragmentation"]

DEVICE_BLOCKS: Final = 12
MAX_DEVICE_BLOCKS: Final = 14
MAX_PINNED: Final = 0.2
_SIZES: Final = (10, DEVICE_BLOCKS, MAX_DEVICE_BLOCKS)
"""For each cache group. The longest request needs 8 blocks beside the two that may be pinned."""
_GOALS: Final[tuple[tuple[Goal, ...], ...]] = (
    (),
    (),
    (("free_tail", 0),),
    (("free_tail", 0), ("dense", 2)),
    (("contiguous", 1),),
)
_RESIZES: Final = 0.04
"""Share of steps that resize the pool."""
_PINS: Final = 0.1
"""Share of steps that pin a prompt; an equal share unpins one."""


def draw_defragmentation(chance: Random) -> DefragPolicy | None:
    """Draw a defragmentation policy for a scheduler, often None."""
    goals = chance.choice(_GOALS)
    if not goals:
        return None
    return DefragPolicy(goals, max_moves=chance.randint(1, 4), cached=chance.choice(("move", "drop", "exchange")))


class Upkeep:
    """Resizes the device pool, pins prompts, and overwrites the memory that a smaller pool no longer uses.

    Args:
        manager: manages the pool.
        cells: keys and values of the device's slots, int64 `[2, slots]`.
        chance: source of randomness.
        say: called with a log line for each change.
    """

    def __init__(
        self, manager: BlockManager, cells: NDArray[np.int64], chance: Random, say: Callable[[str], None]
    ) -> None:
        self._manager, self._cells, self._chance, self._say = manager, cells, chance, say
        self._pins: dict[int, list[int]] = {}  # the expected keys in the blocks of each pin

    def act(self, draw_prompt: Callable[[], tuple[list[int], bytes | None, Callable[[int], list[int]]]]) -> None:
        """Sometimes resize the pool, pin a prompt, or unpin one.

        Args:
            draw_prompt: returns a prompt to pin, its salt, and a function from the number of pinned tokens to the keys
                in the blocks of the pin.
        """
        draw = self._chance.random()
        if draw < _RESIZES:
            self._resize(self._chance.choice(_SIZES) * len(self._manager.groups))
        elif draw < _RESIZES + _PINS:
            self._pin(*draw_prompt())
        elif draw < _RESIZES + 2 * _PINS and self._pins:
            self._unpin(self._chance.choice(list(self._pins)))

    def give_back(self) -> None:
        """Overwrite the memory beyond the last block in use."""
        self._cells[:, self._manager.defrag.progress().extent * BLOCK_SIZE :] = GARBAGE

    def unpin_all(self) -> None:
        """Remove all pins."""
        for pin in list(self._pins):
            self._unpin(pin)

    def check_pins(self) -> None:
        """Check the keys in all pinned blocks, as a step would read them.

        Raises:
            BrokenPromiseError: a pinned block holds other keys.
        """
        for pin, keys in self._pins.items():
            blocks = np.asarray(self._manager.pins.blocks(pin), np.int64)
            found = self._cells[0].reshape(-1, BLOCK_SIZE)[blocks].ravel().tolist()
            if found != keys:
                raise BrokenPromiseError(f"blocks {blocks.tolist()} of pin {pin} do not hold the keys of its prompt")

    def _resize(self, blocks: int) -> None:
        try:
            progress = self._manager.defrag.resize(blocks)
        except InvalidArgumentError as error:  # pins are in the way
            self._say(f"resize to {blocks}: {error}")
        else:
            self._say(f"resize to {blocks}: {progress.live + progress.held} blocks are in use beyond")

    def _pin(self, prompt: list[int], salt: bytes | None, keys_in: Callable[[int], list[int]]) -> None:
        try:
            pin, num_tokens = self._manager.pins.pin_prompt(prompt, salt=salt)
        except OutOfBlocksError:
            return
        if num_tokens:
            self._pins[pin] = keys_in(num_tokens)
            self._say(f"pin {pin}: {prompt[:num_tokens]}")

    def _unpin(self, pin: int) -> None:
        del self._pins[pin]
        self._manager.pins.unpin(pin)
        self._say(f"unpin {pin}")
