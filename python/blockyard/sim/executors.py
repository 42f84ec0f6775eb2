"""Wrappers around the step executor: one counts, one drops a transfer, one damages what was stored.

The library has no switch for any of this: an engine that runs undisturbed runs the same code.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError
from blockyard.offload.executor import Executor, StepExecutor
from blockyard.testing.faults import corrupt_slots
from blockyard.tiers.base import ExternalStore

SABOTAGE_KINDS = ("swap_in", "swap_out", "spill", "fetch", "copy")

# What is damaged in turn: bytes of the block more often than the header's claims about it.
_DAMAGED_PARTS = ("payload", "payload", "generation", "payload_checksum")
_SHARE_DAMAGED = 2


class CountingExecutor:
    """Counts the blocks of every kind of transfer between every two tiers.

    Args:
        inner: what carries the decisions out.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.blocks: Counter[tuple[str, str, str]] = Counter()

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision, and count what it names: `blocks[kind, src, dst]`.

        Args:
            decision: one step's transfers.

        Returns:
            The pairs that did not land.
        """
        for kind, pairs in decision.transfers():
            self.blocks[kind, pairs.src, pairs.dst] += len(pairs)
        return self._inner.execute(decision)


class SabotagedExecutor:
    """Drops one block's transfer of one kind, and says nothing.

    The decision is carried out, then one block is put back as it was before, so the drop hits bytes that matter: a
    block that the transfer did not change is passed over. A dropped spill is a whole, checksummed slot of zeros. A slot
    not written at all would be refused as a miss and cost a recompute; this is the drop that no tier can see.

    Args:
        inner: what carries the decisions out.
        kind: one of `SABOTAGE_KINDS`.

    Raises:
        InvalidArgumentError: there is no such kind.
    """

    def __init__(self, inner: StepExecutor, kind: str) -> None:
        if kind not in SABOTAGE_KINDS:
            raise InvalidArgumentError(f"sabotage is {kind!r}, must be one of {', '.join(SABOTAGE_KINDS)}")
        self._inner = inner
        self.kind = kind
        self.seen = 0
        self.dropped = ""

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision; one block of the first that has the kind is then put back.

        Args:
            decision: one step's transfers.

        Returns:
            The pairs that did not land; the one dropped is not among them.
        """
        targets = [pairs for kind, pairs in decision.transfers() if kind == self.kind]
        self.seen += sum(len(pairs) for pairs in targets)
        if self.dropped or not targets:
            return self._inner.execute(decision)
        before = [self._stale(pairs) for pairs in targets]
        landing = [self._arriving(pairs) for pairs in targets if pairs.dst == "external"]
        lost = self._inner.execute(decision)
        gone: set[tuple[str, int]] = {(pairs.dst, block) for pairs in lost for block in pairs.ids[:, 1].tolist()}
        after = landing or [self._held(pairs.dst, pairs.ids[:, 1]) for pairs in targets]
        for pairs, old, new in zip(targets, before, after, strict=True):
            self._put_one_back(pairs, old, (old != new).any(axis=1), gone)
        return lost

    def _stale(self, pairs: Pairs) -> NDArray[np.uint8]:
        """What the destination holds if the transfer never happens, uint8 `[n, bytes_per_block]`."""
        if pairs.dst == "external":
            return np.zeros((len(pairs), self._inner.engine.layout.bytes_per_block), dtype=np.uint8)
        return self._held(pairs.dst, pairs.ids[:, 1])

    def _arriving(self, pairs: Pairs) -> NDArray[np.uint8]:
        """What a spill brings; read at its source, so that the file tier's counters stay those of the run."""
        return self._held(pairs.src, pairs.ids[:, 0])

    def _held(self, tier: str, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self._inner.engine.read_blocks("host" if tier == "host" else "device", blocks)

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
        store = self._inner.store
        if tier == "external" and store is not None:
            store.wait(store.submit_write(blocks, rows))
        else:
            self._inner.engine.write_blocks("host" if tier == "host" else "device", blocks, rows)


class CorruptingExecutor:
    """Damages blocks in the slab's file after they were stored, and keeps count of which are read.

    Args:
        inner: what carries the decisions out.
        store: the file tier below it.
        count: blocks to damage; fewer if the run stores too few.
        seed: decides which, and where.
    """

    def __init__(self, inner: Executor, store: ExternalStore, count: int, *, seed: int = 0) -> None:
        self._inner = inner
        self._store = store
        self._count = count
        self._rng = np.random.default_rng([seed, count])
        self._damaged: set[int] = set()
        self.stored = 0
        self.read = 0

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision, then damage some of the blocks that it stored.

        Args:
            decision: one step's transfers.

        Returns:
            The pairs that did not land; every damaged block that was to be read must be among them.
        """
        transfers = decision.transfers()
        for kind, pairs in transfers:
            if kind == "fetch":
                self.read += len(self._damaged.intersection(pairs.ids[:, 0].tolist()))
        lost = self._inner.execute(decision)
        unwritten = {slot for pairs in lost if pairs.dst == "external" for slot in pairs.ids[:, 1].tolist()}
        for kind, pairs in transfers:
            if kind == "spill":
                self._damage([slot for slot in pairs.ids[:, 1].tolist() if slot not in unwritten])
        return lost

    def _damage(self, slots: list[int]) -> None:
        """Damage a share of freshly written slots, so that the damage spreads over several requests."""
        self._damaged.difference_update(slots)
        wanted = min(-(-len(slots) // _SHARE_DAMAGED), self._count - self.stored)
        if wanted <= 0:
            return
        for slot in self._rng.choice(slots, size=wanted, replace=False).tolist():
            part = _DAMAGED_PARTS[self.stored % len(_DAMAGED_PARTS)]
            corrupt_slots(self._store, [slot], part=part, seed=self.stored)
            self._damaged.add(slot)
            self.stored += 1
