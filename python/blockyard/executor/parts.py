"""The parts of a decision: its transfers, split into pieces, their order, and their legs.

A swap-out to the external tier has two legs: the engine reads, then the store writes. So has a swap-in from there: the
store reads, then the engine writes. All other transfers have a single leg, with the engine. Between two legs the bytes
are in staging rows, whose size is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.engine.streams import Event
from blockyard.engine.transfers import Transfer
from blockyard.errors import BlockyardError, MappingError
from blockyard.stores.checked_store import Answer, Batch, StoreSlots
from blockyard.stores.log_lines import MissLog
from blockyard.tracing import Trace

if TYPE_CHECKING:
    from blockyard.engine.plans import Kind

__all__ = ["Part", "Tiers", "all_written", "cut", "engine_tier", "written"]

_WITHIN: Final = ("copy", "move", "exchange")


@dataclass(slots=True, eq=False)
class Tiers:
    """What carries out parts.

    Attributes:
        engine: owner of the device and host blocks.
        external: the slots of the external store, where there is one.
        log: logs the store's misses.
    """

    engine: CacheEngine
    external: StoreSlots | None = None
    log: MissLog | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def store(self) -> StoreSlots:
        """The slots of the external store. Raises MappingError."""
        if self.external is None:
            raise MappingError("a transfer names the external tier, but there is none")
        return self.external

    def next_number(self) -> int:
        """Return a number that is larger than all before."""
        return next(self._numbers)


@dataclass(slots=True, eq=False)
class Part:
    """A transfer of a decision, or a piece of one.

    It is waiting, then running, then ended: landed except for lost pairs.

    Attributes:
        tiers: carry it out.
        kind: kind of the transfer.
        pairs: its block ids.
        after_compute: the point in compute before which it does not start.
        must_have_started: parts of its step that must have an engine transfer or have ended before this one starts. It
            runs after them.
        ordered_after: parts, also of other steps, that it runs after if they are running when it starts.
        by_layer: whether it is a load that arrives layer by layer.
        prefetch: whether it is a load that compute does not wait for.
        transfer: its leg with the engine, once started.
        batch: its leg with the store, once started.
        rows: the buffer between a leg with the engine and one with the store.
        missed: pairs already known to be lost while others are still in flight.
        lost: the pairs that did not land; None until it has ended.
        error: the cause of the loss, if known.
        number: increases with each part that ends.
        trace: spans of the part, and of the running leg if it has two.
    """

    tiers: Tiers
    kind: str
    pairs: Pairs
    after_compute: Event
    must_have_started: tuple[Part, ...] = ()
    ordered_after: tuple[Part, ...] = ()
    by_layer: bool = False
    prefetch: bool = False
    transfer: Transfer | None = None
    batch: Batch | None = None
    rows: NDArray[np.uint8] | None = None
    missed: Pairs | None = None
    lost: tuple[Pairs, ...] | None = None
    error: Exception | None = None
    number: int = 0
    trace: Trace = field(default_factory=Trace)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.lost is not None

    @property
    def waiting(self) -> bool:
        """Whether it has not started."""
        return self.lost is None and self.transfer is None and self.batch is None

    @property
    def pending(self) -> bool:
        """Whether it has neither ended nor a transfer that others could be ordered after."""
        return self.lost is None and self.transfer is None

    @property
    def reads_device(self) -> bool:
        """Whether it reads blocks of the device."""
        return self.pairs.src == "device"

    @property
    def writes_device(self) -> bool:
        """Whether it writes blocks of the device."""
        return self.pairs.dst == "device"

    @property
    def loads_device(self) -> bool:
        """Whether it loads blocks from another tier to the device."""
        return self.writes_device and not self.reads_device

    @property
    def reads_store(self) -> bool:
        """Whether it reads slots of the external tier."""
        return self.pairs.src == "external"

    @property
    def writes_store(self) -> bool:
        """Whether it writes slots of the external tier."""
        return self.pairs.dst == "external"

    @property
    def staged(self) -> bool:
        """Whether it holds staging rows."""
        if self.lost is not None:
            return False
        if self.writes_store:  # the store accounts for rows it was given
            return self.transfer is not None and self.batch is None
        return self.batch is not None

    @property
    def must_wait(self) -> bool:
        """Whether parts that must have started have not."""
        return any(part.pending for part in self.must_have_started)

    @property
    def num_bytes(self) -> int:
        """Bytes of its staging rows."""
        return self.tiers.store.bytes_of(len(self.pairs), self.pairs.page_class)

    def begin(self) -> None:
        """Submit the first leg.

        Raises:
            BlockyardError: engine or store refuse it.
        """
        engine, pairs = self.tiers.engine, self.pairs
        if self.reads_store or self.writes_store:
            store, page_class = self.tiers.store, pairs.page_class
            self.rows = rows = store.take(len(pairs), page_class)
            if self.reads_store:
                self.batch = store.read(_column(pairs, 0), rows, page_class)
                self.trace.begin_leg("store_read")
                return
            self.transfer = engine.submit_read(
                engine_tier(pairs.src),
                _column(pairs, 0),
                rows,
                page_class=page_class,
                after_compute=self.after_compute,
            )
            self.trace.begin_leg("transfer")
            return
        self.transfer = engine.submit(
            cast("Kind", self.kind),
            pairs.ids,
            tier=engine_tier(pairs.src),
            page_class=pairs.page_class,
            after=self._take_after(),
            after_compute=self.after_compute,
            by_layer=self.by_layer,
            prefetch=self.prefetch,
        )
        if self.kind in {"copy", "exchange"} and self.writes_device:
            self.transfer.order_compute()

    def wait(self) -> None:
        """Wait for the running leg; `advance` processes it."""
        if self.batch is not None and (self.writes_store or self.transfer is None):
            self.tiers.store.wait(self.batch)
        elif self.transfer is not None:
            self.tiers.engine.transfers.wait(self.transfer)

    def advance(self) -> None:
        """Process an ended leg, and submit the next one; never waits."""
        transfer, batch = self.transfer, self.batch
        if self.reads_store and transfer is None:
            if batch is not None and batch.answer is not None:
                self._write_engine(batch.answer)
        elif self.writes_store and batch is not None:
            if batch.answer is not None:
                self.end([_some(self.pairs, ~batch.answer.ok)], batch.answer.error)
        elif transfer is not None and transfer.done:
            if transfer.error is not None:
                self.lose(transfer.error)
            elif self.writes_store:
                self._write_store(transfer)
            else:
                self.end([self.missed] if self.missed else [], None)
        if self.lost is not None and self.rows is not None:
            rows, self.rows = self.rows, None
            if batch is not None and batch.answer is not None and batch.answer.are_rows_free:
                self.tiers.store.give(rows, self.pairs.page_class)

    def lose(self, error: Exception) -> None:
        """End it as completely lost."""
        self.end([written(self.kind, self.pairs)], error)

    def end(self, lost: Iterable[Pairs], error: Exception | None) -> None:
        """End it."""
        gone = tuple(pairs for pairs in lost if len(pairs))
        self.trace.end(error, lost_blocks=sum(map(len, gone)))
        self.must_have_started = self.ordered_after = ()
        self.error, self.number, self.lost = error, self.tiers.next_number(), gone

    def _write_store(self, transfer: Transfer) -> None:
        """Hand the rows read by the engine over to the store."""
        rows, transfer.rows = transfer.rows, None
        self.trace.end_leg()
        try:
            made = cast("NDArray[np.uint8]", rows)
            self.batch = self.tiers.store.write(_column(self.pairs, 1), made, self.pairs.page_class)
            self.trace.begin_leg("store_write")
        except BlockyardError as error:
            self.lose(error)

    def _write_engine(self, answer: Answer) -> None:
        """Write the blocks that the store has read; the rest are lost."""
        rows, came = answer.rows, self.pairs
        self.trace.end_leg(answer.error)
        if self.tiers.log is not None and not answer.ok.all():
            self.tiers.log.note(answer.reasons)
        if not answer.ok.any():
            self.end([self.pairs], answer.error)
            return
        if not answer.ok.all():
            self.missed = _some(self.pairs, ~answer.ok)
            came = _some(self.pairs, answer.ok)
            rows = rows[answer.ok]
        try:
            self.transfer = self.tiers.engine.submit_write(
                engine_tier(self.pairs.dst),
                _column(came, 1),
                rows,
                page_class=self.pairs.page_class,
                after=self._take_after(),
                after_compute=self.after_compute,
                prefetch=self.writes_device,
            )
            self.trace.begin_leg("transfer")
        except BlockyardError as error:
            self.lose(error)

    def _take_after(self) -> list[Transfer]:
        """Return the transfers that it comes after, and drop the references, so that chains do not grow forever."""
        after = [part.transfer for part in (*self.must_have_started, *self.ordered_after) if part.transfer is not None]
        self.must_have_started = self.ordered_after = ()
        return after


def cut(
    tiers: Tiers,
    decision: StepDecision,
    named: Iterable[Part],
    after_compute: Event,
    chunk_bytes: int,
    *,
    by_layer: bool = False,
) -> tuple[tuple[Part, ...], list[Part]]:
    """Split a decision into parts, device reads first.

    Args:
        tiers: carry out the parts.
        decision: the decision to split.
        named: parts of the other running decisions that its `after` names.
        after_compute: the point in compute before which no part starts.
        chunk_bytes: maximum bytes of the rows of a part with the external tier, unless it is a single block.
        by_layer: whether its loads arrive layer by layer.

    Returns:
        The device reads that its device writes must follow, and its parts.
    """
    transfers = decision.transfers()

    def chunk(pairs: Pairs) -> int:
        return max(1, chunk_bytes // tiers.store.bytes_of(1, pairs.page_class))

    reads = [
        Part(tiers, kind, piece, after_compute)
        for kind, pairs in transfers
        if kind == "swap_out"
        for piece in (_pieces(_by_slot(pairs, 1), chunk(pairs)) if pairs.dst == "external" else [pairs])
    ]
    own = reads if decision.ticket in decision.after else ()
    earlier_reads = tuple(part for part in (*named, *own) if part.reads_device)
    loads: list[Part] = []
    store_reads: list[Part] = []  # with the parts that wait for them
    within: list[Part] = []
    awaited: set[tuple[str, int, int]] = set()  # blocks that `store_reads` will write
    for kind, pairs in transfers:
        if pairs.src == "external":
            awaited.update((pairs.dst, pairs.page_class, block) for block in pairs.ids[:, 1].tolist())
            store_reads += [
                Part(tiers, kind, piece, after_compute, ordered_after=earlier_reads)
                for piece in _pieces(_by_slot(pairs, 0), chunk(pairs))
            ]
        elif kind == "swap_in":
            part = Part(tiers, kind, pairs, after_compute, ordered_after=earlier_reads, by_layer=by_layer)
            part.prefetch = decision.prefetch
            loads.append(part)
        elif kind in _WITHIN:
            part = Part(
                tiers,
                kind,
                pairs,
                after_compute,
                must_have_started=(*loads, *(reads if pairs.src == "host" else ())),
                ordered_after=earlier_reads,
            )
            ids = pairs.ids.reshape(-1).tolist() if awaited else ()
            touched = {(pairs.src, pairs.page_class, block) for block in ids}
            if not awaited.isdisjoint(touched):
                awaited |= touched
                part.must_have_started += tuple(store_reads)
                store_reads.append(part)
            else:
                within.append(part)
    return earlier_reads, [*reads, *loads, *within, *store_reads]


def _by_slot(pairs: Pairs, column: int) -> Pairs:
    """Return pairs in the order of the store's slots: a file store reads and writes neighbours in one call."""
    slots = pairs.ids[:, column]
    if len(slots) < 2 or (slots[1:] > slots[:-1]).all():
        return pairs
    return _with(pairs, pairs.ids[np.argsort(slots, kind="stable")])


def _pieces(pairs: Pairs, size: int) -> Iterator[Pairs]:
    for first in range(0, len(pairs), size):
        yield _with(pairs, pairs.ids[first : first + size])


def written(kind: str, pairs: Pairs) -> Pairs:
    """Return pairs with every written block as a destination: for an exchange, both blocks of each pair."""
    if kind != "exchange":
        return pairs
    return _with(pairs, np.concatenate((pairs.ids, pairs.ids[:, ::-1])))


def all_written(decision: StepDecision) -> tuple[Pairs, ...]:
    """Return the pairs of a decision, each with every written block as a destination: what it can lose."""
    return tuple(written(kind, pairs) for kind, pairs in decision.transfers())


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
    return _with(pairs, pairs.ids[chosen])


def _with(pairs: Pairs, ids: NDArray[np.int64]) -> Pairs:
    return Pairs(pairs.src, pairs.dst, ids, pairs.page_class)
