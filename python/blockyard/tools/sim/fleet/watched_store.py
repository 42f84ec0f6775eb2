"""`WatchedStore`: wraps a store and checks every block written to it or read from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.stores import Completion, Owners
from blockyard.stores.arguments import checked_keys
from blockyard.stores.base import Keys
from blockyard.stores.threaded.remote import RemoteStore
from blockyard.testing.wrapped_store import WrappedStore
from blockyard.tools.sim.fleet.log import FleetLog
from blockyard.tools.sim.fleet.oracle import BrokenPromiseError, Oracle
from blockyard.tools.sim.fleet.texts import Texts
from blockyard.tools.sim.loop import Loop

__all__ = ["WatchedStore"]


@dataclass(eq=False)
class _WatchedBatch:
    kind: str
    keys: list[bytes]
    weights: str
    at: float
    changed_at: float


class WatchedStore(WrappedStore):
    """Passes all calls on to a store.

    Args:
        store: holds the blocks.
        loop: provides the time.
        oracle: knows when the current weights became valid.
        texts: knows what each block must hold.
        log: counts the blocks of the fleet.

    Attributes:
        store: as given.
        weights: the engine's current weights.
        reasons: the reasons of all blocks read or written, "" for success.
        hits: number of blocks found.
        stored: number of blocks whose write was confirmed.
        reads: how often each key was read.
        broken: the first broken promise. Raised here, it would only count as another miss.
        is_forgotten: a read missed as `"forgotten"` since the caller last set this to False.
    """

    def __init__(
        self, store: RemoteStore, loop: Loop, oracle: Oracle, texts: Texts, weights: str, log: FleetLog
    ) -> None:
        super().__init__(store)
        self.store, self.weights = store, weights
        self.reasons: Counter[str] = Counter()
        self.hits = self.stored = 0
        self.reads: Counter[bytes] = Counter()
        self.broken: BrokenPromiseError | None = None
        self.is_forgotten = False
        self._loop, self._oracle, self._texts, self._log = loop, oracle, texts, log
        self._open: dict[int, _WatchedBatch] = {}

    def __repr__(self) -> str:
        return repr(self.store)

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Refuse: a prefix store has no slots."""
        return self.store.submit_write(slots, rows)

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Refuse: a prefix store has no slots."""
        return self.store.submit_read(slots, rows)

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None = None) -> int:
        """Check blocks, and store them."""
        names = [bytes(key) for key in checked_keys(keys)]
        for key, row in zip(names, rows, strict=True):
            self._check(row, key, self.weights)
        return self._note("put", names, self.store.submit_put(keys, rows, owners))

    def submit_get(self, keys: Keys, rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks."""
        names = [bytes(key) for key in checked_keys(keys)]
        self.reads.update(names)
        return self._note("get", names, self.store.submit_get(keys, rows))

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys are known to have a block."""
        return self.store.contains(keys)

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys are known to be absent."""
        return self.store.lacks(keys)

    def forget(self, revision: str | None = None) -> None:
        """Forget all blocks."""
        self.store.forget(revision)

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Limit a tenant."""
        self.store.set_quota(tenant, num_blocks)

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Return a tenant's block count and quota."""
        return self.store.quota(tenant)

    def event_fd(self) -> int:
        """Return a descriptor that is readable after a ticket has ended."""
        return self.store.event_fd()

    def poll(self) -> list[int]:
        """Return the tickets that ended."""
        return self.store.poll()

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket, and check what it found."""
        batch = self._open.pop(ticket, None)
        done = self.store.wait(ticket, timeout)
        if batch is None:
            return done
        self.reasons.update(done.reasons)
        self._log.count(batch.kind, [(batch.weights, key) for key in batch.keys], done.reasons)
        found = int(done.ok.sum())
        if batch.kind == "put":
            self.stored += found
            return done
        self.hits += found
        self.is_forgotten |= "forgotten" in done.reasons
        for index in np.flatnonzero(done.ok):
            self._check(done.rows[index], batch.keys[index], batch.weights, batch)
        return done

    def _check(self, row: NDArray[np.uint8], key: bytes, weights: str, found_by: _WatchedBatch | None = None) -> None:
        try:
            first = min(stamp.at for stamp in self._texts.check_block(row, key, weights))
            if found_by is not None:
                self._oracle.check_changed(first, found_by.at, found_by.changed_at)
        except BrokenPromiseError as error:
            self.broken = self.broken or error

    def _note(self, kind: str, keys: list[bytes], ticket: int) -> int:
        self._open[ticket] = _WatchedBatch(kind, keys, self.weights, self._loop.now, self._oracle.weights_changed_at)
        return ticket
