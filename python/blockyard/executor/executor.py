"""Carries out the decisions of steps with the copy engine and the external store.

Transfers overlap compute, and storage I/O overlaps both. One step of an engine, whose scheduler leaves sequences out of
steps while they load from storage (`overlap_io`):

    step = scheduler.schedule()
    executor.submit(step.decision)                      # compute waits only for what it needs
    sampled = model(step)
    for done in executor.collect(step.decision.ticket):
        scheduler.complete(done.ticket, done.lost)
    finished = scheduler.update(step, sampled)

To wait instead, call `execute`, which returns when all bytes have landed or are known to be lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from blockyard._core import Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.engine.streams import Event
from blockyard.errors import (
    BlockyardError,
    InvalidArgumentError,
    InvariantError,
    MappingError,
    StoreError,
    UnknownTicketError,
)
from blockyard.executor.parts import Part, Tiers, all_written, cut
from blockyard.layout.sizes import as_int
from blockyard.stores.base import ExternalStore
from blockyard.stores.checked_store import CheckedStore, StoreSlots, bytes_per_value
from blockyard.stores.log_lines import MissLog
from blockyard.types import Histogram

__all__ = ["PART_BYTES", "Executor", "StepDone", "StepExecutor"]

PART_BYTES: Final = 4 << 20
"""Longer transfers with the external tier are split into pieces of this size: the engine copies one while the store
reads or writes others."""


class StepDone(NamedTuple):
    """A decision that has been carried out.

    Attributes:
        ticket: the decision's ticket; call `manager.complete(ticket, lost)` next.
        lost: pairs that did not land.
        errors: the causes, where they are known.
    """

    ticket: int
    lost: tuple[Pairs, ...]
    errors: tuple[Exception, ...]


def all_lost(decision: StepDecision, error: BaseException) -> StepDone:
    """Return the report of a decision that is completely lost. Only an `Exception` is passed on as its cause."""
    return StepDone(decision.ticket, all_written(decision), (error,) if isinstance(error, Exception) else ())


class Executor(ABC):
    """The interface of executors; wrap one to observe or disturb it. See `StepExecutor` for the calls."""

    @abstractmethod
    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to carry out a decision, before the step's compute is queued."""

    @abstractmethod
    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Make compute queued from now on wait for one layer of a step's loads."""

    @abstractmethod
    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Return the pairs of a running decision known so far to be lost."""

    @abstractmethod
    def is_awaited(self, ticket: int) -> bool:
        """Whether a running decision must end before its step's results are valid."""

    @abstractmethod
    def poll(self) -> list[StepDone]:
        """Return the decisions that ended since the last call and were not waited for; never waits."""

    @abstractmethod
    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end; `poll` will not report it."""

    @abstractmethod
    def give_up_all(self) -> None:
        """Wait until transfers no longer touch any block, and count all running decisions as lost.

        Call it after an exception, such as `KeyboardInterrupt`, has ended another call. May be called again.
        """

    def collect(self, ticket: int) -> list[StepDone]:
        """Return the decisions that ended since the last call. If this one is awaited, wait for it and include it."""
        ended = self.poll()
        if self.is_awaited(ticket):
            ended.append(self.wait(ticket))
        return ended


@dataclass(slots=True, eq=False)
class _OpenDecision:
    """A running decision.

    Attributes:
        decision: what is carried out.
        parts: its transfers, split into pieces; device reads come first.
        read: whether compute reads blocks that it loads before it ends.
        failed: the error that makes all of it count as lost.
    """

    decision: StepDecision
    parts: list[Part]
    read: bool = False
    failed: Exception | None = None

    def lost(self) -> tuple[Pairs, ...]:
        """Return the pairs known so far to be lost, in order of discovery."""
        if self.failed is not None:
            return all_written(self.decision)
        known = sorted((part for part in self.parts if part.lost), key=lambda part: part.number)
        missed = [part.missed for part in self.parts if part.lost is None and part.missed is not None]
        return (*chain.from_iterable(part.lost or () for part in known), *missed)

    def done(self) -> StepDone:
        """Return the report of this decision."""
        if self.failed is not None:
            return all_lost(self.decision, self.failed)
        ended = sorted(self.parts, key=lambda part: part.number)
        return StepDone(self.decision.ticket, self.lost(), tuple(part.error for part in ended if part.error))


class StepExecutor(Executor):
    """Executes decisions concurrently with compute.

    `wait`, `collect` and `execute` wait for storage, and `submit` waits for blocks that a step swaps in from the
    external tier and computes with. No other call does.

    Device reads of a step run after all compute queued before `submit`, and its device writes after the device reads of
    the tickets in the decision's `after`. Within a step, kinds that touch the same blocks keep their order. Compute
    queued after `submit` waits for those reads, and for the step's loads from the host, copies and exchanges. It does
    not wait for moves: until the ticket ends, their targets are in no table, and a source block that is written in the
    meantime stays in place. Nor does it wait for the loads of a `prefetch` decision: the manager refuses to compute
    with these before the ticket has ended.

    The executor polls engine and store; nothing else may use the store's tickets.

    Whatever the store does, a step ends: if the store breaks its contract, the pair counts as lost, with its error in
    `StepDone.errors` and a line in the log `blockyard.executor`.

    If an exception from outside, such as `KeyboardInterrupt`, ends a call, the next call first gives up everything in
    flight: it waits for the engine, and for the store at most until its deadline. All running decisions are then
    reported as completely lost.

    Args:
        engine: owner of the device and host blocks.
        store: the external store, where there is one; no other executor, cache or prefix store may use it.
        max_staging: maximum bytes of staging rows for blocks moving to or from the external tier, at most what the
            store can have in flight (`ExternalStore.max_blocks_in_flight`). Beyond it, a swap-in waits for room; a
            swap-out is lost, which costs a recompute but blocks nothing.
        chunk_bytes: longer transfers with the external tier are split into pieces of this size.

    Attributes:
        engine: as given.
        store: as given, or None.

    Raises:
        InvalidArgumentError: a number of bytes is not positive, or the store has another block size than the engine, is
            closed, is no swap space, or is in use by another executor or prefix store.
        BlockyardError: the engine is closed.

    Example:
        >>> from blockyard import BlockManager, CacheEngine, KVLayout, StepExecutor
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
        >>> engine = CacheEngine(layout, device_blocks=8, host_blocks=8)
        >>> manager, executor = BlockManager(block_size=16, device_blocks=8, host_blocks=8), StepExecutor(engine)
        >>> sequence = manager.allocate(40)
        >>> decision = manager.take_decision()
        >>> executor.submit(decision)
        >>> # the model computes
        >>> for done in executor.collect(decision.ticket):
        ...     _ = manager.complete(done.ticket, done.lost)
        >>> engine.close()
    """

    def __init__(
        self,
        engine: CacheEngine,
        store: ExternalStore | None = None,
        *,
        max_staging: int = 1 << 30,
        chunk_bytes: int = PART_BYTES,
    ) -> None:
        max_staging, chunk_bytes = as_int("max_staging", max_staging), as_int("chunk_bytes", chunk_bytes)
        if max_staging < 1 or chunk_bytes < 1:
            raise InvalidArgumentError(
                f"max_staging is {max_staging} bytes, chunk_bytes {chunk_bytes}, must be at least 1"
            )
        if not isinstance(engine, CacheEngine):
            raise InvalidArgumentError(f"engine is {engine!r:.100}, must be a CacheEngine")
        engine.num_blocks("device")  # raises if the engine is closed
        self.engine = engine
        self.store = store
        size = bytes_per_value(engine)
        self._checked = None if store is None else CheckedStore(store, size)
        if self._checked is not None and self._checked.max_blocks_in_flight is not None:
            max_staging = min(max_staging, self._checked.max_blocks_in_flight * size)
        self._slots = None if self._checked is None else _slots(engine, self._checked)
        self._tiers = Tiers(engine, self._slots, None if store is None else MissLog(store))
        self._max_staging = max_staging
        self._chunk_bytes = min(chunk_bytes, max_staging)
        self._steps: dict[int, _OpenDecision] = {}
        self._done: dict[int, StepDone] = {}
        self._executing: StepDecision | None = None
        self._is_changing = False  # if set when a call begins, an exception ended the last one
        self._unfinished = 0  # submissions that raised since the last one that succeeded

    def __repr__(self) -> str:
        return f"StepExecutor(decisions in flight: {sorted(self._steps)}, not reported: {sorted(self._done)})"

    @property
    def num_in_flight(self) -> int:
        """Number of decisions submitted but not reported yet."""
        return len(self._steps) + len(self._done)

    @property
    def is_failing(self) -> bool:
        """Whether at least the last two submissions raised, so that the device may be lost."""
        return self._unfinished > 1

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging rows in use for transfers with the external tier."""
        return sum(part.num_bytes for part in self._parts() if part.staged)

    @property
    def store_seconds(self) -> dict[str, Histogram] | None:
        """How long the store's reads and writes took, see `CheckedStore.seconds`; None without a store."""
        return None if self._checked is None else self._checked.seconds

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision and wait until all its bytes have landed or are known to be lost.

        Args:
            decision: transfers, in the order in which they are safe to run. If an interrupted call has started this
                decision, the call only waits for it.

        Returns:
            The pairs that did not land, because a block could not be written or did not come back intact.

        Raises:
            MappingError, UnknownTicketError: as for `submit`.
        """
        if self._is_changing:
            self.give_up_all()
        if self._executing is not decision or not self.is_open(decision.ticket):
            self._executing = decision
            self.submit(decision)
        return list(self.wait(decision.ticket).lost)

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to carry out a decision, before the step's compute is queued.

        Unless the decision is a `prefetch`, this waits until the store has answered for each block that the decision
        swaps in to the device, at most until the store's deadline. `lost` then returns the blocks that did not arrive.
        The loads of a prefetch run when no other load is in flight.

        Args:
            decision: transfers, in the order in which they are safe to run.
            by_layer: loads from the host arrive layer by layer; compute waits for each layer with `wait_for_layer`.

        Raises:
            MappingError: the decision names a tier that this executor does not have, a slot beyond the store's, or
                blocks that do not exist. In the last case, earlier transfers may be running, and all of the decision
                will be reported as lost.
            UnknownTicketError: its ticket is already in use.
        """
        if self._is_changing:
            self.give_up_all()
        ticket = decision.ticket
        if ticket in self._steps or ticket in self._done:
            raise UnknownTicketError(f"decision {ticket} is already in flight")
        if not self._steps and not len(decision):  # as in most steps
            self._done[ticket] = StepDone(ticket, (), ())
            return
        self._unfinished += 1
        step, earlier_reads = self._prepare(decision, by_layer=by_layer)
        self._is_changing = True
        self._steps[ticket] = step
        for part in step.parts:
            self._begin_trace(part, ticket)
        refused = None
        try:
            for part in step.parts:
                if not part.reads_store and not part.must_wait and self._has_room(part):
                    part.begin()
            self._order_compute(step, earlier_reads, by_layer=by_layer)
        except BlockyardError as error:
            refused = error
            self._fail(step, error)
        self._begin_waiting()
        if refused is None:
            self._await_store_reads(step)
        self._end_steps()
        self._is_changing = False
        if refused is not None:
            raise refused
        self._unfinished = 0

    def give_up_all(self) -> None:
        """Wait until nothing moves, and count all running decisions as completely lost; `poll` reports them.

        Waits for the store at most until its deadline. May be called again after an exception.
        """
        self._is_changing = True
        self._unfinished += 1  # so that a lost device is noticed here, too
        self.engine.transfers.give_up_all()
        if self._checked is not None:
            self._checked.give_up_all(waits=True)
        error = BlockyardError("a call was interrupted: it is unknown whether the blocks landed")
        for ticket, step in self._steps.items():
            for part in step.parts:
                part.trace.end(error)
            self._done[ticket] = all_lost(step.decision, error)
        self._steps.clear()
        self._unfinished -= 1
        self._is_changing = False

    def close(self) -> None:
        """Let another executor use the store, once nothing is in flight. Idempotent.

        What is in flight will not be collected: its spans end. A fork leaves them alone.
        """
        if self._checked is not None:
            self._checked.disconnect()
        if not self.engine.transfers.process.is_current:
            return
        for part in self._parts():
            part.trace.end(miss_reason="closed")

    def _prepare(self, decision: StepDecision, *, by_layer: bool) -> tuple[_OpenDecision, tuple[Part, ...]]:
        """Check a decision and split it. Returns the device reads that compute must follow, too; changes nothing."""
        self._refuse(decision.transfers())
        self._order_layers()
        earlier_reads, parts = self._cut(decision, self.engine.fence(), by_layer=by_layer)
        is_read = not decision.prefetch and any(part.loads_device for part in parts)
        return _OpenDecision(decision, parts, read=is_read), earlier_reads

    def _order_compute(self, step: _OpenDecision, earlier_reads: tuple[Part, ...], *, by_layer: bool) -> None:
        """Make compute wait for earlier device reads, and for the step's loads from the host if it reads them."""
        loads = [part for part in step.parts if part.loads_device and not part.reads_store]
        for part in (*earlier_reads, *(loads if step.read and not by_layer else ())):
            if part.transfer is not None:
                part.transfer.order_compute()

    def _begin_trace(self, part: Part, ticket: int) -> None:
        pairs = part.pairs
        blocks = len(pairs) * (2 if part.kind == "exchange" else 1)
        part.trace.begin(
            part.kind,
            source=pairs.src,
            target=pairs.dst,
            blocks=blocks,
            bytes=blocks * self.engine.of_class(pairs.page_class).bytes_per_block,
            ticket=ticket,
        )

    def _order_layers(self) -> None:
        """Make compute wait for loads by layer of an earlier step, whose body raised before it waited for them."""
        for part in self._parts():
            if part.by_layer and part.transfer is not None:
                part.transfer.order_compute()

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Make compute queued from now on wait for one layer of a step's loads.

        Args:
            ticket: the ticket of a decision submitted `by_layer`.
            layer: 0-based.
        """
        step = self._steps.get(ticket)
        for part in step.parts if step else ():
            if part.transfer is not None and part.loads_device:
                part.transfer.order_compute(layer)

    def is_open(self, ticket: int) -> bool:
        """Whether a decision was submitted but not reported yet."""
        return ticket in self._steps or ticket in self._done

    def is_awaited(self, ticket: int) -> bool:
        """Whether a running decision must end before its step's results are valid.

        That is so if compute reads blocks that it loads, or if a loss is already known.
        """
        step = self._steps.get(ticket)
        return step is not None and (step.read or bool(step.lost()))

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Return the pairs of a decision known so far to be lost; valid until it is reported."""
        if self._is_changing:
            self.give_up_all()
        step, done = self._steps.get(ticket), self._done.get(ticket)
        return step.lost() if step else done.lost if done else ()

    def poll(self) -> list[StepDone]:
        """Make progress without waiting, and return the decisions that ended since the last call."""
        return self._report(None)

    def collect(self, ticket: int) -> list[StepDone]:
        """As `Executor.collect`."""
        if self._steps or self._is_changing:
            return self._report(ticket)
        ended, self._done = list(self._done.values()), {}
        return ended

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end, including its storage I/O; `poll` will not report it.

        Args:
            ticket: the ticket of a submitted decision.

        Raises:
            UnknownTicketError: no such decision is open, or it was already reported.
        """
        if self._is_changing:
            self.give_up_all()
        if ticket not in self._done:
            self._is_changing = True
            self._finish(ticket)
            self._is_changing = False
        done = self._done.get(ticket)
        if done is None:
            raise UnknownTicketError(f"decision {ticket} is not in flight")
        del self._done[ticket]
        return done

    # ---- progress ----

    def _report(self, awaited: int | None) -> list[StepDone]:
        """Make progress, and return the decisions that ended. Wait for this one if its results depend on it."""
        if self._is_changing:
            self.give_up_all()
        if self._steps or (self._checked is not None and self._checked.is_busy):
            self._is_changing = True
            self._progress()
            if awaited is not None and self.is_awaited(awaited):
                self._finish(awaited)
            self._is_changing = False
        ended, self._done = list(self._done.values()), {}
        return ended

    def _finish(self, ticket: int) -> None:
        """Wait for a decision to end."""
        while ticket in self._steps:
            self._progress()
            if ticket in self._steps:
                self._wait_for_leg(self._steps[ticket].parts)

    def _progress(self) -> None:
        if self._checked is not None:
            self._checked.poll()
        self._take_in()
        self._begin_waiting()
        self._end_steps()

    def _take_in(self) -> None:
        """Process ended legs, and start those that follow them."""
        self.engine.poll()
        for part in tuple(self._parts()):
            if not (part.ended or part.waiting):
                part.advance()

    def _begin_waiting(self) -> None:
        """Start parts that need not wait and whose rows have room; store reads in submission order."""
        room = True
        for part in tuple(self._parts()):
            if not part.waiting or part.must_wait:
                continue
            if part.reads_store:
                room = room and not self._lacks_room(part)
                if not room:
                    continue
            try:
                if self._has_room(part):
                    part.begin()
            except BlockyardError as error:
                part.lose(error)

    def _has_room(self, part: Part) -> bool:
        """Whether a part may begin; a write to the store that has no room for its rows is lost."""
        lack = self._lacks_room(part) if part.writes_store else ""
        if lack:
            pairs = part.pairs
            part.lose(StoreError(f"{len(pairs)} blocks from {pairs.src} to {pairs.dst}: {lack}"))
        return not lack

    def _lacks_room(self, part: Part) -> str:
        """Return why a part must wait for staging room, or ''; a part beyond the limit runs alone."""
        staged = self.staged_bytes
        is_full = staged and staged + part.num_bytes > self._max_staging
        return f"{staged} bytes are staged, the limit is {self._max_staging}" if is_full else ""

    def _end_steps(self) -> None:
        for ticket, step in tuple(self._steps.items()):
            if all(part.ended for part in step.parts):
                self._done[ticket] = step.done()
                del self._steps[ticket]

    def _await_store_reads(self, step: _OpenDecision) -> None:
        """Wait for the storage reads that the step's compute needs, then order compute after the engine's copies."""
        if not (step.read and any(part.loads_device and part.reads_store for part in step.parts)):
            return
        waited = [part for part in step.parts if part.reads_store or part.kind in {"copy", "exchange"}]
        parts = [part for part in waited if part.writes_device]
        while awaited := [part for part in parts if part.pending]:
            self._wait_for_leg(awaited)
            if self._checked is not None:
                self._checked.poll()
            self._take_in()
            self._begin_waiting()
        for part in parts:
            if part.transfer is not None:
                part.transfer.order_compute()
        self._take_in()  # on a CPU these copies have ended, so their failures are known

    def _wait_for_leg(self, parts: Iterable[Part]) -> None:
        """Wait for one running leg, preferably of these parts; `_progress` processes it."""
        running = [part for part in chain(parts, self._parts()) if not (part.ended or part.waiting)]
        if not running:
            raise InvariantError("parts of a decision wait, but nothing is in flight")
        # The store gets the next piece while it writes one.
        next((part for part in running if part.writes_store and part.batch is None), running[0]).wait()

    def _parts(self) -> Iterator[Part]:
        """Yield the parts of all running decisions, in submission order."""
        for step in self._steps.values():
            yield from step.parts

    def _fail(self, step: _OpenDecision, error: Exception) -> None:
        """Count all of a step as lost; it ends when its started parts have ended."""
        step.failed = error
        for part in step.parts:
            if part.waiting:
                part.lose(error)

    # ---- parts ----

    def _refuse(self, transfers: Sequence[tuple[str, Pairs]]) -> None:
        for kind, pairs in transfers:
            if "external" not in {pairs.src, pairs.dst}:
                continue  # the engine checks them on submission
            if self._slots is None:
                raise MappingError(f"{len(pairs)} pairs of kind {kind!r} name the external tier, but there is none")
            for tier, ids in ((pairs.src, pairs.ids[:, 0]), (pairs.dst, pairs.ids[:, 1])):
                blocks_of = self._slots.num_blocks if tier == "external" else partial(self.engine.num_blocks, tier)
                num_slots = blocks_of(pairs.page_class)
                if len(ids) and ids.max() >= num_slots:
                    owner = "the store" if tier == "external" else "the engine"
                    raise MappingError(
                        f"{len(pairs)} pairs of kind {kind!r} name {tier} block {ids.max()}, {owner} has "
                        f"{tier}_blocks={num_slots}, give its manager the same"
                    )

    def _cut(self, decision: StepDecision, fence: Event, *, by_layer: bool) -> tuple[tuple[Part, ...], list[Part]]:
        """Split a decision into parts; see `cut`."""
        named = [part for ticket in decision.after if ticket in self._steps for part in self._steps[ticket].parts]
        return cut(self._tiers, decision, named, fence, self._chunk_bytes, by_layer=by_layer)


def engine_sizes(executor: Executor) -> str:
    """Describe what must be equal on all ranks; empty for an executor of another kind.

    With several page classes, the bytes of their blocks determine where an id lies.
    """
    if not isinstance(executor, StepExecutor):
        return ""
    memories = executor.engine.memories
    sizes = [f" of {memory.bytes_per_block} bytes" * (len(memories) > 1) for memory in memories]
    counts = [f"{memory.num_blocks('device')} and {memory.num_blocks('host')}" for memory in memories]
    return "; ".join(count + size for count, size in zip(counts, sizes, strict=True))


def _slots(engine: CacheEngine, store: CheckedStore) -> StoreSlots:
    try:
        return StoreSlots(engine, store)
    except BaseException:
        store.disconnect()
        raise
