"""The legs of a part's transfer: one with the copy engine, one with the external store.

A swap-out to the external tier is read by the engine, then written by the store. A swap-in from there is read by the
store, then written by the engine. All other transfers have a single leg, with the engine. Between two legs the bytes
are in staging rows, whose size is limited.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs
from blockyard.engine.engine import CacheEngine
from blockyard.engine.transfers import Transfer
from blockyard.errors import BlockyardError, MappingError
from blockyard.executor.parts import Part, written
from blockyard.stores.checked_store import Answer, CheckedStore
from blockyard.stores.log_lines import MissLog

if TYPE_CHECKING:
    from blockyard.engine.plans import Kind

__all__ = ["Legs", "engine_tier"]


class Legs:
    """Starts parts, and advances them from leg to leg.

    Args:
        engine: owner of the device and host blocks.
        external: the external store, where there is one.
        max_bytes: maximum bytes of staging rows; a larger part runs alone.
        log: logs the store's misses.

    Attributes:
        launching: the part whose leg is being submitted. If set when a call begins, the last call was interrupted, and
            it is unknown whether the engine or store has that leg.
    """

    def __init__(
        self, engine: CacheEngine, external: CheckedStore | None, max_bytes: int, log: MissLog | None = None
    ) -> None:
        self._engine = engine
        self._external = external
        self._max_bytes = max_bytes
        self._log = log
        self._buffers = engine.memory.buffers
        self._numbers = count(1)
        self.launching: Part | None = None

    def num_bytes(self, parts: Iterable[Part]) -> int:
        """Return the bytes of staging rows that parts hold."""
        return sum(len(part.pairs) for part in parts if part.staged) * self._engine.memory.bytes_per_block

    def full(self, part: Part, staged: int) -> str:
        """Return why a part must wait for staging room, or ''; `staged` bytes are in use."""
        num_bytes = len(part.pairs) * self._engine.memory.bytes_per_block
        full = staged and staged + num_bytes > self._max_bytes
        return f"{staged} bytes are staged, the limit is {self._max_bytes}" if full else ""

    def begin(self, part: Part) -> None:
        """Submit a part's first leg.

        Raises:
            BlockyardError: engine or store refuse it.
        """
        self.launching = part
        try:
            if part.reads_store or part.writes_store:
                part.rows = rows = self._buffers.take(len(part.pairs), self._engine.memory.bytes_per_block)
            if part.reads_store:
                part.batch = self._store().read(_column(part.pairs, 0), rows)
                part.trace.begin_leg("store_read")
            else:
                part.transfer = self._submit(part)
                if part.writes_store:
                    part.trace.begin_leg("transfer")
        except BlockyardError:
            self.launching = None
            raise
        self.launching = None

    def wait(self, part: Part) -> None:
        """Wait for the running leg; `advance` processes it."""
        if part.batch is not None and (part.writes_store or part.transfer is None):
            self._store().wait(part.batch)
        elif part.transfer is not None:
            self._engine.transfers.wait(part.transfer)

    def advance(self, part: Part) -> None:
        """Process an ended leg, and submit the next one; never waits."""
        transfer, batch = part.transfer, part.batch
        if part.reads_store and transfer is None:
            if batch is not None and batch.answer is not None:
                self._engine_write(part, batch.answer)
        elif part.writes_store and batch is not None:
            if batch.answer is not None:
                self.end(part, [_some(part.pairs, ~batch.answer.ok)], batch.answer.error)
        elif transfer is not None and transfer.done:
            if transfer.error is not None:
                self.lose(part, transfer.error)
            elif part.writes_store:
                self._store_write(part, transfer)
            else:
                self.end(part, [part.missed] if part.missed else [], None)
        if part.ended and part.rows is not None:
            rows, part.rows = part.rows, None
            if batch is not None and batch.answer is not None and batch.answer.are_rows_free:
                self._buffers.give(rows)

    def lose(self, part: Part, error: Exception) -> None:
        """End a part as completely lost."""
        self.end(part, [written(part.kind, part.pairs)], error)

    def end(self, part: Part, lost: Iterable[Pairs], error: Exception | None) -> None:
        """End a part. Idempotent."""
        gone, number = tuple(pairs for pairs in lost if len(pairs)), next(self._numbers)
        if part.lost is None:
            part.trace.end(error, lost_blocks=sum(map(len, gone)))
            # No call in between, so no interrupt either.
            part.must_have_started = part.ordered_after = ()
            part.error, part.number, part.lost = error, number, gone

    def _submit(self, part: Part) -> Transfer:
        tier = engine_tier(part.pairs.src)
        if part.writes_store:
            return self._engine.submit_read(tier, _column(part.pairs, 0), part.rows, after_compute=part.after_compute)
        return self._engine.submit(
            cast("Kind", part.kind),
            part.pairs.ids,
            tier=tier,
            after=self._take_after(part),
            after_compute=part.after_compute,
            by_layer=part.by_layer,
            prefetch=part.prefetch,
        )

    def _store_write(self, part: Part, transfer: Transfer) -> None:
        """Hand the rows read by the engine over to the store."""
        rows = transfer.rows
        if rows is None:  # already handed over by an interrupted call
            return
        try:
            self.launching = part
            part.batch = self._store().write(_column(part.pairs, 1), rows)
            transfer.rows = None
            part.trace.end_leg()
            part.trace.begin_leg("store_write")
        except BlockyardError as error:
            self.lose(part, error)
        self.launching = None

    def _engine_write(self, part: Part, answer: Answer) -> None:
        """Write the blocks that the store has read; the rest are lost."""
        rows, came = answer.rows, part.pairs
        part.trace.end_leg(answer.error)
        if self._log is not None and not answer.ok.all():
            self._log.note(answer.reasons)
        if not answer.ok.any():
            self.end(part, [part.pairs], answer.error)
            return
        if not answer.ok.all():
            part.missed = _some(part.pairs, ~answer.ok)
            came = _some(part.pairs, answer.ok)
            rows = rows[answer.ok]
        try:
            self.launching = part
            part.transfer = self._engine.submit_write(
                engine_tier(part.pairs.dst),
                _column(came, 1),
                rows,
                after=self._take_after(part),
                after_compute=part.after_compute,
                prefetch=part.writes_device,
            )
            part.trace.begin_leg("transfer")
        except BlockyardError as error:
            self.lose(part, error)
        self.launching = None

    @staticmethod
    def _take_after(part: Part) -> list[Transfer]:
        """Return the transfers that a part comes after, and drop the references, so that chains do not grow forever."""
        after = [
            other.transfer for other in (*part.must_have_started, *part.ordered_after) if other.transfer is not None
        ]
        part.must_have_started = part.ordered_after = ()
        return after

    def _store(self) -> CheckedStore:
        if self._external is None:
            raise MappingError("a transfer names the external tier, but there is none")
        return self._external


def engine_tier(tier: str) -> Literal["device", "host"]:
    """Return the tier, if the copy engine holds it. Raises MappingError."""
    if tier == "device":
        return "device"
    if tier == "host":
        return "host"
    raise MappingError(f"blocks of the {tier} tier are not in the copy engine")


def _column(pairs: Pairs, column: int) -> NDArray[np.int64]:
    return np.ascontiguousarray(pairs.ids[:, column])


def _some(pairs: Pairs, chosen: NDArray[np.bool_]) -> Pairs:
    return Pairs(pairs.src, pairs.dst, pairs.ids[chosen])
