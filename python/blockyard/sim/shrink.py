"""Samples the device pool of a run and shrinks it half-way."""

from __future__ import annotations

from typing import Final

import torch

from blockyard.engine.elastic.host import resident_bytes
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.transformers.generator import Generator
from blockyard.scheduler import DefragPolicy, Goal
from blockyard.sim.pool import PoolReport, PoolSample, Shrink, sample_pool
from blockyard.sim.serve import Faults

MOVES_A_STEP: Final = 64
# Blocks that may lie too high before a dense pool is worth a move.
DENSE_ENOUGH: Final = 8
GOALS: Final[dict[str, Goal]] = {"max_id": ("free_tail", 0), "dense": ("dense", DENSE_ENOUGH)}


def defragmentation(goal: str | None) -> DefragPolicy | None:
    """Give the scheduler's policy for a goal.

    Args:
        goal: `max_id` (nothing beyond the pool's end) or `dense` (as low as possible); None for no moves.

    Raises:
        InvalidArgumentError: there is no such goal.
    """
    if goal is None:
        return None
    if goal not in GOALS:
        raise InvalidArgumentError(f"goal is {goal!r}, must be one of {', '.join(GOALS)}")
    return DefragPolicy([GOALS[goal]], max_moves=MOVES_A_STEP)


class PoolWatch:
    """Samples the device pool after every step, and shrinks it when half of the requests are done.

    Args:
        generator: its caches must be elastic if the pool shrinks.
        faults: its counter counts the moves.
        goal: name of the defragmentation goal, for the report; None for no moves.
        shrink_to: blocks of the device from the middle of the run on; None for no change.

    Raises:
        InvalidArgumentError: the pool is not larger than `shrink_to`.
    """

    def __init__(
        self, generator: Generator, faults: Faults, *, goal: str | None = None, shrink_to: int | None = None
    ) -> None:
        self._generator, self._faults, self._goal, self._wanted = generator, faults, goal, shrink_to
        self._capacity = generator.manager.pool("device").num_blocks
        if shrink_to is not None and shrink_to >= self._capacity:
            raise InvalidArgumentError(f"the device is to shrink to {shrink_to} blocks, it has {self._capacity}")
        self._samples: list[PoolSample] = []
        self._step = 0
        self._began: int | None = None
        self._ended: int | None = None
        self._before = self._after = self._returned = self._fell = self._kept = 0

    def after_step(self, done: int, total: int) -> None:
        """Take a sample; half-way, shrink.

        Args:
            done: requests that are finished.
            total: all requests.
        """
        self._step += 1
        if self._wanted is not None and self._began is None and 2 * done >= total:
            self._sample()
            self._began, self._before = self._step, self._measure()
            self._generator.resize_device(self._wanted)
        before = self._measure() if self._shrinking else 0
        given = self._generator.cache.give_back()
        if given is not None:
            self._after, self._kept = self._measure(), given.kept
            self._returned += given.returned
            self._fell += before - self._after
        if self._shrinking and self._generator.manager.defrag.progress().done:
            self._ended = self._step
        self._sample()

    def report(self) -> PoolReport:
        """Give the samples and the shrink."""
        shrink = None
        if self._began is not None and self._wanted is not None:
            shrink = Shrink(
                blocks_before=self._capacity,
                blocks_after=self._wanted,
                step=self._began,
                steps=None if self._ended is None else self._ended - self._began,
                memory="resident set" if self._on_cpu else "device memory",
                memory_before=self._before,
                memory_after=self._after or self._before,
                returned=self._returned,
                fell=self._fell,
                kept=self._kept,
            )
        return PoolReport(self._goal, shrink, self._samples)

    @property
    def _shrinking(self) -> bool:
        return self._began is not None and self._ended is None

    @property
    def _on_cpu(self) -> bool:
        return self._generator.engine.device.type == "cpu"

    def _measure(self) -> int:
        if self._on_cpu:
            return resident_bytes()
        free, total = torch.cuda.mem_get_info(self._generator.engine.device)
        return total - free

    def _sample(self) -> None:
        manager, layout = self._generator.manager, self._generator.engine.layout
        elastic, counting = self._generator.cache.elastic, self._faults.counting
        kinds = ("move", "exchange")
        moves = sum(count for (kind, _, _), count in counting.blocks.items() if kind in kinds) if counting else 0
        self._samples.append(
            sample_pool(
                self._step,
                manager.pool().uses(),
                blocks=manager.pool("device").num_blocks,
                capacity=self._capacity,
                moves=moves,
                block_bytes=layout.bytes_per_block,
                memory_bytes=self._capacity * layout.bytes_per_block if elastic is None else elastic.committed_bytes,
            )
        )
