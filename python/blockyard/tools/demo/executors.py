"""Wrappers around the step executor: one fixes the timing, the other also damages stored blocks.

The library has no switch for any of this: an undisturbed engine runs the same code.
"""

from __future__ import annotations

from blockyard._core import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError
from blockyard.executor import Executor, ParallelExecutor, StepDone, StepExecutor
from blockyard.testing.faults import corrupt_slots

__all__ = ["CorruptingExecutor", "SteadyExecutor", "Wrapper"]

# Parts of a slot to damage, in turn: the payload more often than the header.
_DAMAGED_PARTS = ("payload", "payload", "generation", "payload_checksum")


class Wrapper(Executor):
    """Forwards every call; subclasses override the calls that they watch or disturb.

    Args:
        inner: the executor to wrap.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to execute a decision."""
        self._inner.submit(decision, by_layer=by_layer)

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Make compute wait for one layer of a step's loads."""
        self._inner.wait_for_layer(ticket, layer)

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Return the pairs that are known to be lost so far."""
        return self._inner.lost(ticket)

    def is_awaited(self, ticket: int) -> bool:
        """Whether a decision is in flight, and compute has read what it loads or has lost."""
        return self._inner.is_awaited(ticket)

    def poll(self) -> list[StepDone]:
        """Return the decisions that ended since the last call."""
        return self._inner.poll()

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end."""
        return self._inner.wait(ticket)

    def give_up_all(self) -> None:
        """Count all decisions in flight as lost."""
        self._inner.give_up_all()


class SteadyExecutor(Wrapper):
    """Ends each decision exactly one step after it was submitted.

    Storage latency differs between runs; with this wrapper, equal options give equal runs.
    """

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self._due: list[int] = []
        self._begun: list[int] = []

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to execute a decision; see `StepExecutor.submit`."""
        self._inner.submit(decision, by_layer=by_layer)
        self._begun.append(decision.ticket)

    def poll(self) -> list[StepDone]:
        """End the decisions that were submitted before the last call."""
        ended = [self._end(ticket) for ticket in self._due]
        self._due, self._begun = self._begun, []
        return ended

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end; `poll` will not report it."""
        done = self._end(ticket)
        for listed in (self._due, self._begun):
            if ticket in listed:
                listed.remove(ticket)
        return done

    def _end(self, ticket: int) -> StepDone:
        return self._inner.wait(ticket)


class CorruptingExecutor(SteadyExecutor):
    """Also damages half of the blocks that each decision stores, in the slab's file, and counts those that are read.

    Args:
        inner: the executor to wrap: a `StepExecutor`, or several of which the first is disturbed.
        count: number of blocks to damage; fewer are damaged if the run stores too few.

    Attributes:
        stored: number of blocks damaged.
        read: number of damaged blocks that were read.

    Raises:
        InvalidArgumentError: the executor has no external tier.
    """

    def __init__(self, inner: Executor, count: int) -> None:
        super().__init__(inner)
        own = inner.executors[0] if isinstance(inner, ParallelExecutor) else inner
        if not isinstance(own, StepExecutor) or own.store is None:
            raise InvalidArgumentError(f"cannot damage {count} blocks: there is no external tier")
        self._store, self._count = own.store, count
        self._written: dict[int, list[int]] = {}
        self._damaged: set[int] = set()
        self.stored = self.read = 0

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to execute a decision; every damaged block that it reads must be reported lost."""
        for _, pairs in decision.transfers():
            if pairs.src == "external":
                self.read += len(self._damaged.intersection(pairs.ids[:, 0].tolist()))
            if pairs.dst == "external":
                self._written.setdefault(decision.ticket, []).extend(pairs.ids[:, 1].tolist())
        super().submit(decision, by_layer=by_layer)

    def _end(self, ticket: int) -> StepDone:
        done = super()._end(ticket)
        unwritten = {slot for pairs in done.lost if pairs.dst == "external" for slot in pairs.ids[:, 1].tolist()}
        slots = [slot for slot in self._written.pop(ticket, []) if slot not in unwritten]
        self._damaged.difference_update(slots)
        for slot in slots[: min(-(-len(slots) // 2), self._count - self.stored)]:
            part = _DAMAGED_PARTS[self.stored % len(_DAMAGED_PARTS)]
            corrupt_slots(self._store, [slot], part=part, seed=self.stored)
            self._damaged.add(slot)
            self.stored += 1
        return done
