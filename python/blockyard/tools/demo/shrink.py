"""Watches the device pool of a run and shrinks it half-way."""

from __future__ import annotations

from typing import Final

import torch

from blockyard.engine.elastic.host import resident_bytes
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.transformers.generator import Generator
from blockyard.scheduler import DefragPolicy
from blockyard.tools.demo.pool import GOALS, PoolReport, Shrink

MOVES_A_STEP: Final = 64


def defragmentation(goal: str | None) -> DefragPolicy | None:
    """Return the scheduler's defragmentation policy for a goal.

    Args:
        goal: one of `GOALS`; None for no moves.

    Raises:
        InvalidArgumentError: there is no such goal.
    """
    if goal is None:
        return None
    if goal not in GOALS:
        raise InvalidArgumentError(f"goal is {goal!r}, must be one of {', '.join(GOALS)}")
    return DefragPolicy([GOALS[goal]], max_moves=MOVES_A_STEP)


class PoolWatch:
    """Watches the device pool after every step, and shrinks it when half of the requests are done.

    Args:
        generator: its caches must be elastic if the pool shrinks.
        goal: name of the defragmentation goal, for the report; None for no moves.
        shrink_to: number of device blocks in the second half of the run; None for no change.

    Raises:
        InvalidArgumentError: the pool is not larger than `shrink_to`.
    """

    def __init__(self, generator: Generator, *, goal: str | None = None, shrink_to: int | None = None) -> None:
        self._generator, self._goal, self._wanted = generator, goal, shrink_to
        self._capacity = generator.manager.pool("device").num_blocks
        if shrink_to is not None and shrink_to >= self._capacity:
            raise InvalidArgumentError(f"the device cannot shrink to {shrink_to} blocks, it has {self._capacity}")
        self._gaps: list[int] = []
        self._step = 0
        self._began: int | None = None
        self._ended: int | None = None
        self._before = self._after = self._returned = self._fell = self._kept = 0

    def after_step(self, done: int, total: int) -> None:
        """Record the state of the pool; half-way, shrink it.

        Args:
            done: number of finished requests.
            total: number of requests.
        """
        self._step += 1
        if self._wanted is not None and self._began is None and 2 * done >= total:
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
        self._gaps.append(self._generator.manager.defrag.fragmentation().gap)

    def report(self) -> PoolReport:
        """Return the gaps and the shrink."""
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
        gaps = self._gaps or [0]
        return PoolReport(self._goal, sum(gaps) / len(gaps), max(gaps), shrink)

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
