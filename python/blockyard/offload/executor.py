"""Carries out a step's decision: joins the copy engine and the external tier."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import MappingError, TierError
from blockyard.tiers.base import ExternalStore
from blockyard.transfer.engine import CacheEngine

CHUNK_BYTES: Final = 64 << 20
"""Most bytes of one external transfer that are staged at a time."""


class Executor(Protocol):
    """What carries out decisions; wrap one to watch or to disturb it."""

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision; returns the pairs that did not land."""


class StepExecutor:
    """Executes decisions one step at a time: `execute` returns when all bytes have landed or are known not to.

    Args:
        engine: owner of the device and host caches.
        store: the external tier, where there is one.
    """

    def __init__(self, engine: CacheEngine, store: ExternalStore | None = None) -> None:
        self.engine = engine
        self.store = store

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision.

        Args:
            decision: transfers, in the order in which they are safe to run.

        Returns:
            The pairs that did not land: a slot that could not be written, or read back as it was written.

        Raises:
            MappingError: the decision names a transfer that this executor has no tier for.
        """
        lost: list[Pairs] = []
        for kind, pairs in decision.transfers():
            if kind == "spill":
                lost += self._chunks(pairs, self._spill)
            elif kind == "fetch":
                lost += self._chunks(pairs, self._fetch)
            elif kind == "swap_out":
                self.engine.swap_out(pairs.ids)
            elif kind == "swap_in":
                self.engine.swap_in(pairs.ids)
            elif kind == "copy":
                self.engine.copy(pairs.ids)
            else:
                raise MappingError(f"{len(pairs)} pairs of kind {kind!r} cannot be carried out here")
        return lost

    def _spill(self, pairs: Pairs) -> NDArray[np.bool_]:
        blocks, slots = columns(pairs)
        rows = self.engine.read_blocks(cached_tier(pairs.src), blocks)
        store = self._tier()
        return store.wait(store.submit_write(slots, rows)).ok

    def _fetch(self, pairs: Pairs) -> NDArray[np.bool_]:
        slots, blocks = columns(pairs)
        store = self._tier()
        read = store.wait(store.submit_read(slots))
        self.engine.write_blocks(cached_tier(pairs.dst), blocks[read.ok], read.rows[read.ok])
        return read.ok

    def _chunks(self, pairs: Pairs, transfer: Callable[[Pairs], NDArray[np.bool_]]) -> list[Pairs]:
        """Run a transfer in pieces of bounded size; a tier that refuses a piece has lost it."""
        size = max(1, CHUNK_BYTES // self.engine.layout.bytes_per_block)
        lost = []
        for first in range(0, len(pairs), size):
            chunk = Pairs(pairs.src, pairs.dst, pairs.ids[first : first + size])
            try:
                ok = transfer(chunk)
            except TierError as error:
                warnings.warn(f"{len(chunk)} blocks from {pairs.src} to {pairs.dst}: {error}", stacklevel=4)
                ok = np.zeros(len(chunk), dtype=np.bool_)
            if not ok.all():
                lost.append(Pairs(pairs.src, pairs.dst, chunk.ids[~ok]))
        return lost

    def _tier(self) -> ExternalStore:
        if self.store is None:
            raise MappingError("the decision names the external tier, and there is none")
        return self.store


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
