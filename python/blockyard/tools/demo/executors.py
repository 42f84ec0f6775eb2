"""Wrappers around the step executor: one fixes the timing, one counts, one drops a transfer, one damages stored blocks.

The library has no switch for any of this: an undisturbed engine runs the same code.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError
from blockyard.executor.executor import Executor, StepDone, StepExecutor
from blockyard.stores.base import ExternalStore
from blockyard.testing.faults import corrupt_slots
from blockyard.tools.demo.report import SABOTAGE_KINDS

# Parts of a slot to damage, in turn: the payload more often than the header.
_DAMAGED_PARTS = ("payload", "payload", "generation", "payload_checksum")
_SHARE_DAMAGED = 2


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
        ended = [self._inner.wait(ticket) for ticket in self._due]
        self._due, self._begun = self._begun, []
        return ended

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end; `poll` will not report it."""
        done = self._inner.wait(ticket)
        for listed in (self._due, self._begun):
            if ticket in listed:
                listed.remove(ticket)
        return done


class CountingExecutor(Wrapper):
    """Counts blocks by kind of transfer, source tier and destination tier.

    Args:
        inner: the executor to wrap.
    """

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.blocks: Counter[tuple[str, str, str]] = Counter()

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to execute a decision, and count its blocks: `blocks[kind, src, dst]`."""
        for kind, pairs in decision.transfers():
            self.blocks[kind, pairs.src, pairs.dst] += len(pairs)
        self._inner.submit(decision, by_layer=by_layer)


class SabotagedExecutor(Wrapper):
    """Silently drops the transfer of one block of one kind.

    It executes the decision, then restores the old bytes of one destination block; blocks that the transfer did not
    change are skipped. A dropped write to the store leaves a valid, checksummed slot of zeros: the store would report
    a missing write as a miss, but it cannot detect this drop.

    Args:
        inner: the executor to wrap.
        disturbed: the executor whose block is restored: `inner`, or one of its ranks.
        kind: one of `SABOTAGE_KINDS`.

    Raises:
        InvalidArgumentError: there is no such kind.
    """

    def __init__(self, inner: Executor, disturbed: StepExecutor, kind: str) -> None:
        if kind not in SABOTAGE_KINDS:
            raise InvalidArgumentError(f"sabotage is {kind!r}, must be one of {', '.join(SABOTAGE_KINDS)}")
        super().__init__(inner)
        self._executor = disturbed
        self._ended: dict[int, StepDone] = {}
        self.kind = kind
        self.seen = 0
        self.dropped = ""

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Execute a decision; for the first one of the kind, restore one block before returning."""
        targets = [pairs for kind, pairs in decision.transfers() if kind == self.kind]
        self.seen += sum(len(pairs) for pairs in targets)
        if self.dropped or not targets:
            self._inner.submit(decision, by_layer=by_layer)
            return
        before = [self._stale(pairs) for pairs in targets]
        sources = [self._held(pairs.src, pairs.ids[:, 0]) if pairs.dst == "external" else None for pairs in targets]
        self._inner.submit(decision)
        done = self._ended[decision.ticket] = self._inner.wait(decision.ticket)
        gone: set[tuple[str, int]] = {(pairs.dst, block) for pairs in done.lost for block in pairs.ids[:, 1].tolist()}
        for pairs, old, source in zip(targets, before, sources, strict=True):
            # Stored bytes are read from their source, so that the file store's counters do not change.
            new = self._held(pairs.dst, pairs.ids[:, 1]) if source is None else source
            self._put_one_back(pairs, old, (old != new).any(axis=1), gone)

    def poll(self) -> list[StepDone]:
        """Return the decisions that ended since the last call, synchronous ones included."""
        ended, self._ended = list(self._ended.values()), {}
        return ended + self._inner.poll()

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end, unless it was executed synchronously."""
        return self._ended.pop(ticket) if ticket in self._ended else self._inner.wait(ticket)

    def _stale(self, pairs: Pairs) -> NDArray[np.uint8]:
        """Return the destination's bytes before the transfer, uint8 `[n, bytes_per_block]`."""
        if pairs.dst == "external":
            return np.zeros((len(pairs), self._executor.engine.layout.bytes_per_block), dtype=np.uint8)
        return self._held(pairs.dst, pairs.ids[:, 1])

    def _held(self, tier: str, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self._executor.engine.read("host" if tier == "host" else "device", blocks)

    def _put_one_back(
        self, pairs: Pairs, old: NDArray[np.uint8], changed: NDArray[np.bool_], gone: set[tuple[str, int]]
    ) -> None:
        for row in np.flatnonzero(changed).tolist():
            src, dst = pairs.ids[row].tolist()
            if self.dropped or (pairs.dst, dst) in gone:
                continue
            self._write(pairs.dst, np.array([dst], dtype=np.int64), old[row : row + 1])
            self.dropped = f"{self.kind} of {pairs.src} block {src} to {pairs.dst} block {dst}"

    def _write(self, tier: str, blocks: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        store = self._executor.store
        if tier == "external" and store is not None:
            store.wait(store.submit_write(blocks, rows))
        else:
            self._executor.engine.write("host" if tier == "host" else "device", blocks, rows)


class CorruptingExecutor(Wrapper):
    """Damages stored blocks in the slab's file and counts how many of them are read.

    Args:
        inner: the executor to wrap.
        store: the executor's swap store.
        count: number of blocks to damage; fewer are damaged if the run stores too few.
        seed: seed of the choice of blocks and bytes.
    """

    def __init__(self, inner: Executor, store: ExternalStore, count: int, *, seed: int = 0) -> None:
        super().__init__(inner)
        self._store = store
        self._count = count
        self._rng = np.random.default_rng([seed, count])
        self._written: dict[int, list[int]] = {}
        self._damaged: set[int] = set()
        self.stored = 0
        self.read = 0

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to execute a decision; every damaged block that it reads must be reported lost."""
        for _, pairs in decision.transfers():
            if pairs.src == "external":
                self.read += len(self._damaged.intersection(pairs.ids[:, 0].tolist()))
            if pairs.dst == "external":
                self._written.setdefault(decision.ticket, []).extend(pairs.ids[:, 1].tolist())
        self._inner.submit(decision, by_layer=by_layer)

    def poll(self) -> list[StepDone]:
        """Return the decisions that ended, and damage some of the blocks that they stored."""
        return [self._passed(done) for done in self._inner.poll()]

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end, and damage some of the blocks that it stored."""
        return self._passed(self._inner.wait(ticket))

    def _passed(self, done: StepDone) -> StepDone:
        unwritten = {slot for pairs in done.lost if pairs.dst == "external" for slot in pairs.ids[:, 1].tolist()}
        self._damage([slot for slot in self._written.pop(done.ticket, []) if slot not in unwritten])
        return done

    def _damage(self, slots: list[int]) -> None:
        """Damage some of the newly written slots, so that several requests are affected."""
        self._damaged.difference_update(slots)
        wanted = min(-(-len(slots) // _SHARE_DAMAGED), self._count - self.stored)
        if wanted <= 0:
            return
        for slot in self._rng.choice(slots, size=wanted, replace=False).tolist():
            part = _DAMAGED_PARTS[self.stored % len(_DAMAGED_PARTS)]
            corrupt_slots(self._store, [slot], part=part, seed=self.stored)
            self._damaged.add(slot)
            self.stored += 1
