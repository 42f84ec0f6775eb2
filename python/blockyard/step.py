"""One step of a scheduler: what it transfers, computes and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockyard._core import StepDecision
from blockyard.request import RequestGroup

__all__ = ["Batch", "ScheduledSequence", "SchedulerStats", "Step"]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step.

    `tokens` are to be computed at positions `start`, `start + 1`, ...; from the logits of the last one, one token is to
    be drawn for each sequence of the request that `sample_indices` names (several at the end of a shared prompt).
    `group` is the scheduler's own.
    """

    request_id: str
    index: int
    handle: int
    start: int
    tokens: Sequence[int]
    sample_indices: tuple[int, ...]
    group: RequestGroup = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step transfers, computes and samples.

    `slot_mapping` is int64 `[tokens]`, the slots of all tokens of `batch` in order; `block_tables` int32
    `[len(batch), max_blocks]`, padded with 0.
    """

    decision: StepDecision
    batch: tuple[ScheduledSequence, ...]
    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]

    def without(self, groups: Sequence[RequestGroup]) -> Step:
        """The step without the entries of some requests; its decision stays whole."""
        ends = np.cumsum([len(item.tokens) for item in self.batch])
        keep = [i for i, item in enumerate(self.batch) if not any(item.group is group for group in groups)]
        slots = [self.slot_mapping[ends[i] - len(self.batch[i].tokens) : ends[i]] for i in keep]
        return Step(
            self.decision,
            tuple(self.batch[i] for i in keep),
            np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64),
            self.block_tables[keep],
        )


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made; peaks are blocks in use."""

    steps: int = 0
    tokens: int = 0
    preempted_swap: int = 0
    preempted_spill: int = 0
    preempted_recompute: int = 0
    lost: int = 0
    refused: int = 0
    resumed_swap: int = 0
    resumed_fetch: int = 0
    peak_device_blocks: int = 0
    peak_host_blocks: int = 0
    peak_external_blocks: int = 0


class Batch:
    """The step being put together."""

    def __init__(self) -> None:
        self.items: list[ScheduledSequence] = []
        self.slots: list[NDArray[np.int64]] = []
        self.tokens = 0

    def add(self, item: ScheduledSequence) -> None:
        """Take one sequence's part in; its slots are added apart."""
        self.items.append(item)
        self.tokens += len(item.tokens)
