"""The device pool of a demo run: how dense it stayed, and how it shrank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blockyard.scheduler import Goal

DENSE_ENOUGH: Final = 8
"""Blocks that may lie too high before a dense pool is worth a move."""
GOALS: Final[dict[str, Goal]] = {"max_id": ("free_tail", 0), "dense": ("dense", DENSE_ENOUGH)}
"""Goals of defragmentation: nothing beyond the pool's end, or everything as low as possible."""


@dataclass(frozen=True)
class Shrink:
    """A shrink of the device pool, in blocks, steps and bytes.

    Attributes:
        blocks_before: blocks of the pool.
        blocks_after: requested blocks.
        step: steps before the shrink.
        steps: steps until nothing was in use beyond the end; None if that never happened.
        memory: what is measured: `resident set` of the process, or `device memory` in use.
        memory_before: the measure, just before the shrink.
        memory_after: the measure, after the last memory was released.
        returned: memory that the cache released.
        fell: how much the measure fell during the calls that released memory.
        kept: memory beyond the end that stays because it shares chunks with blocks.
    """

    blocks_before: int
    blocks_after: int
    step: int
    steps: int | None
    memory: str
    memory_before: int
    memory_after: int
    returned: int
    fell: int
    kept: int


@dataclass(frozen=True)
class PoolReport:
    """The device pool over a run.

    Attributes:
        goal: defragmentation goal; None for no moves.
        mean_gap: blocks not in use below the highest one in use, the mean of all steps.
        most_gap: the same, the most in any step.
        shrink: the shrink; None if there was none.
    """

    goal: str | None
    mean_gap: float
    most_gap: int
    shrink: Shrink | None


def pool_rows(report: PoolReport) -> list[tuple[str, str]]:
    """Return the report as `(what, figure)` rows of the table."""
    figures = f"mean {report.mean_gap:.1f}, most {report.most_gap} blocks; goal {report.goal or 'none'}"
    table = [("device pool, gap below the highest block in use", figures)]
    return table + (_shrink_rows(report.shrink) if report.shrink is not None else [])


def _shrink_rows(shrink: Shrink) -> list[tuple[str, str]]:
    took = "not ended in this run" if shrink.steps is None else f"ended {shrink.steps} steps later"
    size = f"{shrink.blocks_before} to {shrink.blocks_after} blocks at step {shrink.step}, {took}"
    return [
        ("device pool shrunk", size),
        (f"{shrink.memory} before and after", f"{shrink.memory_before} and {shrink.memory_after} bytes"),
        ("memory given back", f"{shrink.returned} bytes; {shrink.memory} fell by {shrink.fell} bytes at once"),
        ("kept for its chunks' size", f"{shrink.kept} bytes"),
    ]
