"""What the executor of steps keeps of one, what it says of it in the end, and what a wrapper of it has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.engine.streams import Event
from blockyard.engine.tasks import Kind
from blockyard.engine.transfers import Transfer
from blockyard.errors import MappingError

__all__ = ["Executor", "OpenStep", "StepDone", "cached_tier", "columns", "written"]


class StepDone(NamedTuple):
    """A step's decision that has been carried out.

    Attributes:
        ticket: of the decision; the manager's `complete`, or `fail` if something was lost, is next.
        lost: pairs that did not land.
        errors: why, where more is known than that a block did not come back.
    """

    ticket: int
    lost: tuple[Pairs, ...]
    errors: tuple[Exception, ...]


class Executor(Protocol):
    """What carries out decisions; wrap one to watch or to disturb it. See `StepExecutor` for the calls."""

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to carry out a decision, before the step's compute is queued."""

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Let compute that is queued from now on wait for one layer of a step's loads."""

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Give the pairs of a decision under way that are known not to land, so far."""

    def poll(self) -> list[StepDone]:
        """Give the decisions that ended since the last call and were not waited for; never waits."""

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end; `poll` will not report it."""


@dataclass(slots=True, eq=False)
class OpenStep:
    """A decision under way; `reads`, `loads`, `within` and `drains` are transfers of the copy engine."""

    ticket: int
    fence: Event
    transfers: Sequence[tuple[str, Pairs]] = ()
    reads: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    within: list[Transfer] = field(default_factory=list)
    drains: list[Transfer] = field(default_factory=list)
    awaited: set[tuple[str, int]] = field(default_factory=set)  # what fetches, and those that wait for them, will write
    waiting: list[tuple[Kind, Pairs]] = field(default_factory=list)  # copies, moves and exchanges of such blocks
    fetching: int = 0  # pieces that are not launched yet
    parts: int = 1  # the submission is one
    lost: list[Pairs] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def lost_whole(self, error: Exception) -> StepDone:
        """How it ends if nothing of it counts as landed."""
        return StepDone(self.ticket, tuple(written(kind, pairs) for kind, pairs in self.transfers), (error,))


def written(kind: str, pairs: Pairs) -> Pairs:
    """The pairs with every block that a transfer writes as a destination: of an exchange, both blocks of a pair."""
    if kind != "exchange":
        return pairs
    return Pairs(pairs.src, pairs.dst, np.concatenate((pairs.ids, pairs.ids[:, ::-1])))


def columns(pairs: Pairs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids read and the ids written, contiguous."""
    return np.ascontiguousarray(pairs.ids[:, 0]), np.ascontiguousarray(pairs.ids[:, 1])


def cached_tier(tier: str) -> Literal["device", "host"]:
    """The tier, if the copy engine holds it."""
    if tier == "device":
        return "device"
    if tier == "host":
        return "host"
    raise MappingError(f"blocks of the {tier} tier are not in the copy engine")
