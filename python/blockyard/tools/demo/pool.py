"""The device pool of a demo run: how densely it was used, and how it shrank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blockyard.scheduler import Goal

DENSE_ENOUGH: Final = 8
"""Number of misplaced blocks that a dense pool tolerates before it moves any."""
GOALS: Final[dict[str, Goal]] = {"max_id": ("free_tail", 0), "dense": ("dense", DENSE_ENOUGH)}
"""Goals of defragmentation: nothing beyond the pool's end, or everything as low as possible."""


@dataclass(frozen=True)
class Shrink:
    """One shrink of the device pool.

    Attributes:
        blocks_before: size of the pool before, in blocks.
        blocks_after: requested size, in blocks.
        step: number of steps before the shrink.
        steps: number of steps until no block beyond the new end was in use; None if that never happened.
        memory: what was measured: `resident set` of the process, or `device memory` in use.
        memory_before: measured bytes just before the shrink.
        memory_after: measured bytes after the last memory was released.
        returned: bytes that the cache released.
        fell: how many bytes the measurement fell during the calls that released memory.
        kept: bytes beyond the new end that could not be released because they share chunks with kept blocks.
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
    """The device pool during a run.

    Attributes:
        goal: defragmentation goal; None for no moves.
        mean_gap: number of unused blocks below the highest block in use, the mean over all steps.
        max_gap: the same, the maximum over all steps.
        shrink: the shrink; None if there was none.
    """

    goal: str | None
    mean_gap: float
    max_gap: int
    shrink: Shrink | None


def pool_rows(report: PoolReport) -> list[tuple[str, str]]:
    """Return the report as `(label, figure)` rows of the table."""
    figures = f"mean {report.mean_gap:.1f}, maximum {report.max_gap} blocks; goal {report.goal or 'none'}"
    table = [("device pool, gap below the highest block in use", figures)]
    return table + (_shrink_rows(report.shrink) if report.shrink is not None else [])


def _shrink_rows(shrink: Shrink) -> list[tuple[str, str]]:
    took = "not finished in this run" if shrink.steps is None else f"finished {shrink.steps} steps later"
    size = f"{shrink.blocks_before} to {shrink.blocks_after} blocks at step {shrink.step}, {took}"
    return [
        ("device pool shrunk", size),
        (f"{shrink.memory} before and after", f"{shrink.memory_before} and {shrink.memory_after} bytes"),
        ("memory released", f"{shrink.returned} bytes; {shrink.memory} fell by {shrink.fell} bytes immediately"),
        ("memory kept in shared chunks", f"{shrink.kept} bytes"),
    ]
