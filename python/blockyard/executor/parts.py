"""The parts of a decision: its transfers, split into pieces, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.engine.streams import Event
from blockyard.engine.transfers import Transfer
from blockyard.stores.checked_store import PendingBatch
from blockyard.tracing import Trace

__all__ = ["Part", "all_written", "cut", "written"]

_WITHIN: Final = ("copy", "move", "exchange")


@dataclass(slots=True, eq=False)
class Part:
    """A transfer of a decision, or a piece of one.

    It is waiting, then running, then ended: landed except for lost pairs.

    Attributes:
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

    kind: str
    pairs: Pairs
    after_compute: Event
    must_have_started: tuple[Part, ...] = ()
    ordered_after: tuple[Part, ...] = ()
    by_layer: bool = False
    prefetch: bool = False
    transfer: Transfer | None = None
    batch: PendingBatch | None = None
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


def cut(
    decision: StepDecision,
    named: Iterable[Part],
    after_compute: Event,
    chunk_blocks: int,
    *,
    by_layer: bool = False,
) -> tuple[tuple[Part, ...], list[Part]]:
    """Split a decision into parts, device reads first.

    Args:
        decision: the decision to split.
        named: parts of the other running decisions that its `after` names.
        after_compute: the point in compute before which no part starts.
        chunk_blocks: maximum number of blocks in a part with the external tier.
        by_layer: whether its loads arrive layer by layer.

    Returns:
        The device reads that its device writes must follow, and its parts.
    """
    transfers = decision.transfers()
    reads = [
        Part(kind, piece, after_compute)
        for kind, pairs in transfers
        if kind == "swap_out"
        for piece in _pieces(pairs, chunk_blocks if pairs.dst == "external" else None)
    ]
    own = reads if decision.ticket in decision.after else ()
    earlier_reads = tuple(part for part in (*named, *own) if part.reads_device)
    loads: list[Part] = []
    store_reads: list[Part] = []  # with the parts that wait for them
    within: list[Part] = []
    awaited: set[tuple[str, int]] = set()  # blocks that `store_reads` will write
    for kind, pairs in transfers:
        if pairs.src == "external":
            awaited.update((pairs.dst, block) for block in pairs.ids[:, 1].tolist())
            store_reads += [
                Part(kind, piece, after_compute, ordered_after=earlier_reads) for piece in _pieces(pairs, chunk_blocks)
            ]
        elif kind == "swap_in":
            loads.append(
                Part(
                    kind,
                    pairs,
                    after_compute,
                    ordered_after=earlier_reads,
                    by_layer=by_layer,
                    prefetch=decision.prefetch,
                )
            )
        elif kind in _WITHIN:
            part = Part(
                kind,
                pairs,
                after_compute,
                must_have_started=(*loads, *(reads if pairs.src == "host" else ())),
                ordered_after=earlier_reads,
            )
            touched = {(pairs.src, block) for block in pairs.ids.reshape(-1).tolist()} if awaited else set()
            if not awaited.isdisjoint(touched):
                awaited |= touched
                part.must_have_started += tuple(store_reads)
                store_reads.append(part)
            else:
                within.append(part)
    return earlier_reads, [*reads, *loads, *within, *store_reads]


def _pieces(pairs: Pairs, size: int | None) -> Iterator[Pairs]:
    step = size or max(1, len(pairs))
    for first in range(0, len(pairs), step):
        yield Pairs(pairs.src, pairs.dst, pairs.ids[first : first + step])


def written(kind: str, pairs: Pairs) -> Pairs:
    """Return pairs with every written block as a destination: for an exchange, both blocks of each pair."""
    if kind != "exchange":
        return pairs
    return Pairs(pairs.src, pairs.dst, np.concatenate((pairs.ids, pairs.ids[:, ::-1])))


def all_written(decision: StepDecision) -> tuple[Pairs, ...]:
    """Return the pairs of a decision, each with every written block as a destination: what it can lose."""
    return tuple(written(kind, pairs) for kind, pairs in decision.transfers())
