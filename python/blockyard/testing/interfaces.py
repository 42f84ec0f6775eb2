"""The interfaces of managers and schedulers that the test kit can drive: yours or Blockyard's."""

# ruff: noqa: D102 (the calls are those of `BlockManager` and `Scheduler`, which document them)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from blockyard._core import AllocStatus, EventBatch, HashedPrompt, Pairs, StepDecision
from blockyard.layout.sizes import set_ints
from blockyard.scheduler import Finished, Request, Step
from blockyard.types import DefragReport, ManagerStats

__all__ = [
    "Arguments",
    "Config",
    "Counts",
    "FitLike",
    "Handles",
    "ManagerLike",
    "PrefixManagerLike",
    "SchedulerLike",
    "TierName",
]

TierName: TypeAlias = Literal["device", "host", "external"]
Handles: TypeAlias = NDArray[np.uint64] | Sequence[int] | int
Counts: TypeAlias = NDArray[np.uint32] | Sequence[int] | int


class Arguments(TypedDict):
    """Keyword arguments of a manager."""

    block_size: int
    device_blocks: int
    host_blocks: int
    external_blocks: int
    watermark: float


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a manager.

    Args:
        block_size: number of token slots in a block.
        device_blocks: number of device blocks.
        host_blocks: number of host blocks.
        external_blocks: number of slots of the external tier.
        watermark: fraction of the device blocks that admission keeps free.
    """

    block_size: int
    device_blocks: int
    host_blocks: int = 0
    external_blocks: int = 0
    watermark: float = 0.0

    def __post_init__(self) -> None:
        """Turn NumPy's integers into ints."""
        set_ints(self, "block_size", "device_blocks", "host_blocks", "external_blocks")

    def arguments(self) -> Arguments:
        """Return the keyword arguments for a manager of these sizes."""
        return Arguments(
            block_size=self.block_size,
            device_blocks=self.device_blocks,
            host_blocks=self.host_blocks,
            external_blocks=self.external_blocks,
            watermark=self.watermark,
        )

    def blocks(self) -> dict[TierName, int]:
        """Return the number of blocks in each tier."""
        return {"device": self.device_blocks, "host": self.host_blocks, "external": self.external_blocks}


class FitLike(Protocol):
    """The result of `can_allocate` and similar calls: true if the request fits now."""

    @property
    def status(self) -> AllocStatus: ...
    @property
    def blocks(self) -> int: ...


class PoolLike(Protocol):
    """The blocks of one tier."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...


class StatsLike(Protocol):
    """The counters of a manager that the machines read."""

    @property
    def sequences(self) -> int: ...
    @property
    def open_tickets(self) -> Sequence[int]: ...


class ManagerLike(Protocol):
    """The calls of `blockyard.BlockManager` that the machines make."""

    @property
    def block_size(self) -> int: ...
    def pool(self, tier: TierName = ..., /) -> PoolLike: ...
    def stats(self) -> StatsLike: ...
    def can_allocate(self, prompt: int, /, *, lookahead: int = ...) -> FitLike: ...
    def allocate(self, *, counts: Counts) -> NDArray[np.uint64]: ...
    @property
    def fork(self) -> Callable[..., Any]: ...
    def can_append(self, sequences: Handles, num_tokens: Counts | None = ..., *, lookahead: int = ...) -> FitLike: ...
    def append(
        self, sequences: Handles, num_tokens: Counts | None = ..., *, lookahead: int = ...
    ) -> NDArray[np.int64]: ...
    def truncate(self, sequence: int, num_tokens: int) -> None: ...
    def num_tokens(self, sequence: int) -> int: ...
    def tier(self, sequence: int) -> TierName: ...
    def block_table(self, sequence: int) -> NDArray[np.int32]: ...
    def block_tables(self, sequences: Handles) -> NDArray[np.int32]: ...
    def slot_mapping(self, sequence: int, first: int, last: int, /) -> NDArray[np.int64]: ...
    def can_swap_out(self, sequences: Handles, to: Literal["host", "external"] = ...) -> FitLike: ...
    def swap_out(self, sequences: Handles, to: Literal["host", "external"] = ...) -> None: ...
    def can_swap_in(
        self, sequences: Handles, to: Literal["device", "host"] = ..., *, lookahead: int = ...
    ) -> FitLike: ...
    def swap_in(self, sequences: Handles, to: Literal["device", "host"] = ...) -> None: ...
    def free(self, sequences: Handles) -> None: ...
    def take_decision(self) -> StepDecision: ...
    def complete(self, ticket: int, lost: Sequence[Pairs] = ...) -> NDArray[np.uint64]: ...
    def check(self) -> None: ...


class PrefixLike(Protocol):
    """The calls of `manager.prefix` that the machines make; `note_tokens` and `hash` are optional."""

    @property
    def lookup(self) -> Callable[..., Any]: ...
    def common_blocks(self, sequences: Handles) -> NDArray[np.int32]: ...
    @property
    def hash(self) -> Callable[..., HashedPrompt]: ...
    @property
    def note_tokens(self) -> Callable[..., None]: ...
    def reset(self) -> bool: ...
    def take_events(self) -> EventBatch: ...


class DefragLike(Protocol):
    """The calls of `manager.defrag` that the machines make."""

    def run(
        self,
        goal: Literal["max_id", "free_tail", "dense", "contiguous"],
        number: int,
        *,
        max_moves: int = ...,
        cached: Literal["move", "drop", "exchange"] = ...,
    ) -> DefragReport: ...


class PrefixManagerLike(Protocol):
    """The calls of a `blockyard.BlockManager` with a prefix cache that the machines make."""

    @property
    def block_size(self) -> int: ...
    @property
    def prefix(self) -> PrefixLike: ...
    @property
    def defrag(self) -> DefragLike: ...
    def pool(self, tier: TierName = ..., /) -> PoolLike: ...
    def stats(self) -> ManagerStats: ...
    @property
    def allocate(self) -> Callable[..., Any]: ...
    @property
    def fork(self) -> Callable[..., Any]: ...
    @property
    def append(self) -> Callable[..., NDArray[np.int64]]: ...
    def truncate(self, sequence: int, num_tokens: int) -> None: ...
    def mark_computed(self, sequences: Handles) -> None: ...
    def num_tokens(self, sequence: int) -> int: ...
    def tier(self, sequence: int) -> TierName: ...
    def block_table(self, sequence: int) -> NDArray[np.int32]: ...
    def slot_mapping(self, sequence: int, first: int, last: int, /) -> NDArray[np.int64]: ...
    def swap_out(self, sequences: Handles, to: Literal["host", "external"] = ...) -> None: ...
    def swap_in(self, sequences: Handles, to: Literal["device", "host"] = ...) -> None: ...
    def free(self, sequences: Handles) -> None: ...
    def take_decision(self) -> StepDecision: ...
    def complete(self, ticket: int, lost: Sequence[Pairs] = ...) -> NDArray[np.uint64]: ...
    def check(self) -> None: ...


class SchedulerLike(Protocol):
    """The calls of `blockyard.scheduler.Scheduler` that the machine makes."""

    @property
    def num_unfinished(self) -> int: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def schedule(self) -> Step: ...
    def complete(self, ticket: int, lost: Sequence[Pairs] = ...) -> object: ...
    def update(self, step: Step, sampled: Sequence[int]) -> list[Finished]: ...
