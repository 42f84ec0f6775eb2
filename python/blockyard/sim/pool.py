"""The device pool of a demo run over time: the use of its blocks, and how it shrank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

# The numbers of `BlockManager.device_uses`.
FREE, CACHED, HELD, LIVE = range(4)

COLUMNS: Final = 64
ROWS: Final = 20
LEGEND: Final = "lowest ids left; '#' all in use, '+' half or more, '-' less, 'o' cached, '.' free, ' ' given back"


@dataclass(frozen=True)
class PoolSample:
    """The device pool after one step.

    Attributes:
        step: steps so far, this one included.
        blocks: blocks of the pool.
        extent: one past the highest block in use, at least `blocks`.
        live: blocks that sequences use.
        held: blocks that only transfers or pins hold.
        cached: blocks that are cached and unused.
        free: all others.
        max_id: highest block in use; -1 if there is none.
        gap: blocks not in use below that one.
        moves: blocks moved within the device so far.
        moved_bytes: their bytes.
        memory_bytes: memory behind the device's tensors.
        bar: use of neighbouring ids, a character a group; see `LEGEND`.
    """

    step: int
    blocks: int
    extent: int
    live: int
    held: int
    cached: int
    free: int
    max_id: int
    gap: int
    moves: int
    moved_bytes: int
    memory_bytes: int
    bar: str


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
        shrink: the shrink; None if there was none.
        samples: one after every step.
    """

    goal: str | None
    shrink: Shrink | None
    samples: list[PoolSample]


def draw_bar(uses: NDArray[np.uint8], capacity: int, columns: int = COLUMNS) -> str:
    """Draw a pool in one line.

    Args:
        uses: use of each block, uint8 `[extent]`, as `BlockManager.device_uses` gives it.
        capacity: blocks of the line; those from `len(uses)` on have been released.
        columns: most characters.

    Returns:
        The line; see `LEGEND`.
    """
    edges = np.linspace(0, capacity, min(columns, capacity) + 1).round().astype(int).tolist()
    return "".join(_symbol(uses[first:last]) for first, last in pairwise(edges))


def _symbol(uses: NDArray[np.uint8]) -> str:
    if not len(uses):
        return " "
    share = np.count_nonzero(uses >= HELD) / len(uses)
    if share:
        return "#" if share == 1 else "+" if share >= 0.5 else "-"
    return "o" if np.count_nonzero(uses == CACHED) else "."


def draw_pool(report: PoolReport, rows: int = ROWS) -> list[str]:
    """Draw the pool over time, one line a sample. The start and end of a shrink are among them.

    Args:
        report: of the run.
        rows: most other lines.

    Returns:
        Lines of text: step, pool and figures.
    """
    samples = report.samples
    chosen = {int(at) for at in np.linspace(0, len(samples) - 1, min(rows, len(samples))).round()} if samples else set()
    notes: dict[int, str] = {}
    if report.shrink is not None:
        shrink, steps = report.shrink, [sample.step for sample in samples]
        notes[steps.index(shrink.step)] = f"before: {shrink.blocks_before} blocks"
        if shrink.steps is not None:
            ended = len(steps) - 1 - steps[::-1].index(shrink.step + shrink.steps)
            notes[ended] = f"after: {shrink.blocks_after} blocks"
    lines = []
    for at in sorted(chosen | set(notes)):
        sample = samples[at]
        figures = f"max id {sample.max_id:>4} gap {sample.gap:>4} moves {sample.moves:>4}"
        lines.append(f"{sample.step:>5} |{sample.bar}| {figures}  {notes.get(at, '')}".rstrip())
    return lines


def pool_rows(report: PoolReport) -> list[tuple[str, str]]:
    """Give the report as `(what, figure)` rows of the table."""
    table = []
    if report.samples:
        gaps = [sample.gap for sample in report.samples]
        last = report.samples[-1]
        mean = sum(gaps) / len(gaps)
        table.append(("device pool, gap below the highest block in use", f"mean {mean:.1f}, most {max(gaps)} blocks"))
        goal = f"{last.moves} blocks, {last.moved_bytes} bytes"
        table.append((f"moved within the device, goal {report.goal or 'none'}", goal))
    if report.shrink is not None:
        table += _shrink_rows(report.shrink)
    return table


def _shrink_rows(shrink: Shrink) -> list[tuple[str, str]]:
    took = "not ended in this run" if shrink.steps is None else f"ended {shrink.steps} steps later"
    size = f"{shrink.blocks_before} to {shrink.blocks_after} blocks at step {shrink.step}, {took}"
    return [
        ("device pool shrunk", size),
        (f"{shrink.memory} before and after", f"{shrink.memory_before} and {shrink.memory_after} bytes"),
        ("memory given back", f"{shrink.returned} bytes; {shrink.memory} fell by {shrink.fell} bytes at once"),
        ("kept for its chunks' size", f"{shrink.kept} bytes"),
    ]


def sample_pool(
    step: int, uses: NDArray[np.uint8], *, blocks: int, capacity: int, moves: int, block_bytes: int, memory_bytes: int
) -> PoolSample:
    """Sample the pool.

    Args:
        step: steps so far.
        uses: use of each block, uint8 `[extent]`.
        blocks: blocks of the pool.
        capacity: blocks at the start.
        moves: blocks moved within the device so far.
        block_bytes: bytes of a block.
        memory_bytes: memory behind the device's tensors.

    Returns:
        The sample.
    """
    counts: Sequence[int] = np.bincount(uses, minlength=4).tolist()
    used = np.flatnonzero(uses >= HELD)
    max_id = int(used[-1]) if len(used) else -1
    return PoolSample(
        step=step,
        blocks=blocks,
        extent=len(uses),
        live=counts[LIVE],
        held=counts[HELD],
        cached=counts[CACHED],
        free=counts[FREE],
        max_id=max_id,
        gap=max_id + 1 - len(used),
        moves=moves,
        moved_bytes=moves * block_bytes,
        memory_bytes=memory_bytes,
        bar=draw_bar(uses, capacity),
    )
