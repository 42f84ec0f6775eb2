"""Carries out steps' decisions: joins the copy engine and the external store.

Transfers run beside compute, and storage beside both. A step of an engine whose scheduler leaves out of a step what is
still on its way (`overlap_io`):

    step = scheduler.schedule()
    executor.submit(step.decision)                      # compute waits for what it needs, and only that
    sampled = model(step)
    for done in executor.collect(step.decision.ticket):
        scheduler.finish(done.ticket, done.lost)
    finished = scheduler.update(step, sampled)

An engine that would rather wait calls `execute`, which returns when all bytes have landed or are known not to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, Protocol

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
from blockyard.executor.checked_store import CheckedStore
from blockyard.executor.legs import Legs
from blockyard.executor.parts import Part, cut, written
from blockyard.stores.base import ExternalStore, MissLog
from blockyard.tracing import Span, begin
from blockyard.types import Histogram

__all__ = ["PART_BYTES", "Executor", "StepDone", "StepExecutor"]

PART_BYTES: Final = 64 << 20
"""Longer transfers with the external tier are cut into pieces of this size."""


class StepDone(NamedTuple):
    """A step's decision that has been carried out.

    Attributes:
        ticket: of the decision; `manager.complete(ticket, lost)` is next.
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

    def is_awaited(self, ticket: int) -> bool:
        """Whether a decision is under way, and compute has read what it loads or has lost."""

    def poll(self) -> list[StepDone]:
        """Give the decisions that ended since the last call and were not waited for; never waits."""

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end; `poll` will not report it."""

    def collect(self, ticket: int) -> list[StepDone]:
        """Give the decisions that ended since the last call, and this one too if it is awaited: then it waits."""
        ended = self.poll()
        if self.is_awaited(ticket):
            ended.append(self.wait(ticket))
        return ended


@dataclass(slots=True, eq=False)
class _OpenDecision:
    """A decision under way.

    Attributes:
        decision: what is carried out.
        parts: its transfers, cut into pieces; device reads come first.
        read: whether compute reads what it loads before it ends.
        failed: the error with which all of it counts as lost.
    """

    decision: StepDecision
    parts: list[Part]
    read: bool = False
    failed: Exception | None = None

    def lost(self) -> tuple[Pairs, ...]:
        """The pairs that are known not to land, so far, in the order in which that was found out."""
        if self.failed is not None:
            return tuple(written(kind, pairs) for kind, pairs in self.decision.transfers())
        known = sorted((part for part in self.parts if part.lost), key=lambda part: part.number)
        missed = [part.missed for part in self.parts if part.lost is None and part.missed is not None]
        return (*chain.from_iterable(part.lost or () for part in known), *missed)

    def done(self) -> StepDone:
        """What is reported of it."""
        if self.failed is not None:
            return StepDone(self.decision.ticket, self.lost(), (self.failed,))
        ended = sorted(self.parts, key=lambda part: part.number)
        return StepDone(self.decision.ticket, self.lost(), tuple(part.error for part in ended if part.error))


class StepExecutor(Executor):
    """Executes decisions beside compute.

    `wait`, `collect` and `execute` wait for storage, and `submit` for blocks that a step swaps in from the external
    tier and computes with. No other call does.

    Device reads of a step run after all compute that was queued before `submit`, and its device writes after the
    device reads of the tickets that the decision names in `after`. Within a step the kinds keep their order where they
    touch the same blocks. Compute that is queued after `submit` waits for those reads, for the step's loads from the
    host, its copies and its exchanges. It does not wait for moves: until the ticket ends, what they write is in no
    table, and a block that is written meanwhile stays where it was. Nor does it wait for the loads of a decision that
    is a `prefetch`: the manager refuses to compute with these before the ticket has ended.

    The executor polls engine and store; the store's tickets must not be shared with others.

    Whatever the store does, a step ends: if the store breaks its contract, the pair counts as lost, with its
    error in `StepDone.errors` and a line in the log `blockyard.executor`. An exception from outside, such as
    `KeyboardInterrupt`, may end any call. If it ends `submit`, the decision stays under way, and all of it is reported
    as lost. If it ends another call, that call can be made again, and what was about to be handed to the engine or the
    store just then is lost.

    Args:
        engine: owner of the device and host blocks.
        store: the external store, where there is one.
        max_staging: bytes of blocks on their way to or from the external tier that are staged. Beyond it, a swap-in
            waits for room; a swap-out is lost, which costs a recompute and holds nobody up.
        chunk_bytes: longer transfers with the external tier are cut into pieces of this size.

    Attributes:
        engine: as given.
        store: as given, or None.

    Raises:
        InvalidArgumentError: a number of bytes is not positive, or the store's blocks have another size than the
            engine's.

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
        if max_staging < 1 or chunk_bytes < 1:
            raise InvalidArgumentError(
                f"max_staging is {max_staging} bytes, chunk_bytes {chunk_bytes}, must be at least 1"
            )
        self.engine = engine
        self.store = store
        self._checked = None if store is None else CheckedStore(store, engine.layout.bytes_per_block)
        self._legs = Legs(engine, self._checked, max_staging, None if store is None else MissLog(store))
        self._chunk_blocks = max(1, min(chunk_bytes, max_staging) // engine.layout.bytes_per_block)
        self._steps: dict[int, _OpenDecision] = {}
        self._done: dict[int, StepDone] = {}
        # If it is set when a call begins, that submission was interrupted.
        self._submitting: _OpenDecision | None = None
        self._executing: StepDecision | None = None
        self._unfinished = 0  # submissions that did not reach their end, since the last that did

    def __repr__(self) -> str:
        return f"StepExecutor(under way: decisions {sorted(self._steps)}, not reported: {sorted(self._done)})"

    @property
    def num_in_flight(self) -> int:
        """Decisions that were submitted and have not been reported."""
        return len(self._steps) + len(self._done)

    @property
    def is_failing(self) -> bool:
        """Whether the last two submissions, or more, ended by an exception: the device may be lost."""
        return self._unfinished > 1

    @property
    def staged_bytes(self) -> int:
        """Bytes of blocks on their way to or from the external tier that are staged."""
        return self._legs.num_bytes(self._parts())

    @property
    def store_seconds(self) -> dict[str, Histogram] | None:
        """How long the store's reads and writes took, see `CheckedStore.seconds`; None without a store."""
        return None if self._checked is None else self._checked.seconds

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision and wait until all its bytes have landed, or are known not to.

        Args:
            decision: transfers, in the order in which they are safe to run. One that an interrupted call has begun is
                waited for.

        Returns:
            The pairs that did not land: a slot that could not be written, or read back as it was written.

        Raises:
            MappingError, UnknownTicketError: as for `submit`.
        """
        self._recover_from_interrupt()
        known = decision.ticket in self._steps or decision.ticket in self._done
        if not (known and self._executing is decision):
            self._executing = decision
            self.submit(decision)
        return list(self.wait(decision.ticket).lost)

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to carry out a decision, before the step's compute is queued.

        Unless the decision is a `prefetch`, this waits until the store has answered for each block that it swaps in to
        the device, for as long as the store's deadline allows. `lost` then names the blocks that did not come. The
        loads of a prefetch go when no other load is under way.

        Args:
            decision: transfers, in the order in which they are safe to run.
            by_layer: loads from the host arrive layer by layer; compute waits for each with `wait_for_layer`.

        Raises:
            MappingError: the decision names a transfer that this executor has no tier for, a slot that the store has
                not, or blocks that there are not. In the last case what was submitted before is under way, and all of
                it will be reported as lost.
            UnknownTicketError: its ticket is under way already.
        """
        self._unfinished += 1
        self._recover_from_interrupt()
        ticket = decision.ticket
        if ticket in self._steps or ticket in self._done:
            raise UnknownTicketError(f"decision {ticket} is under way already")
        self._refuse(decision.transfers())
        self._order_layers()
        earlier_reads, parts = self._cut(decision, self.engine.fence(), by_layer=by_layer)
        awaited = [part for part in parts if part.loads_device and not decision.prefetch]
        loads = [part for part in awaited if not part.reads_store]
        step = _OpenDecision(decision, parts, read=bool(awaited))
        self._submitting = self._steps[ticket] = step
        for part in parts:
            part.span = self._begin_span(part, ticket)
        refused = None
        try:
            for part in parts:
                if not part.reads_store and not any(other.pending for other in part.must_have_started):
                    self._begin(part)
            for part in (*earlier_reads, *(() if by_layer else loads)):
                if part.transfer is not None:
                    part.transfer.order_compute()
        except BlockyardError as error:
            refused = error
            self._fail(step, error)
        self._begin_waiting()
        if len(awaited) > len(loads) and refused is None:
            self._await_store_reads(step)
        self._end_steps()
        self._submitting = None
        if refused is not None:
            raise refused
        self._unfinished = 0

    def end_spans(self) -> None:
        """End the spans of what is under way, because nobody will take its end."""
        for part in self._parts():
            self._legs.end_spans(part, miss_reason="closed")

    def _begin_span(self, part: Part, ticket: int) -> Span:
        pairs = part.pairs
        blocks = len(pairs) * (2 if part.kind == "exchange" else 1)
        return begin(
            part.kind,
            source=pairs.src,
            target=pairs.dst,
            blocks=blocks,
            bytes=blocks * self.engine.memory.bytes_per_block,
            ticket=ticket,
        )

    def _order_layers(self) -> None:
        """Let compute wait for loads whose layers nobody waits for any more, as the body of their step raised."""
        for part in self._parts():
            if part.by_layer and part.transfer is not None:
                part.transfer.order_compute()

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Let compute that is queued from now on wait for one layer of a step's loads.

        Args:
            ticket: of a decision that was submitted `by_layer`.
            layer: 0-based.
        """
        step = self._steps.get(ticket)
        for part in step.parts if step else ():
            if part.transfer is not None and part.loads_device:
                part.transfer.order_compute(layer)

    def is_open(self, ticket: int) -> bool:
        """Whether a decision was submitted and has not been reported."""
        return ticket in self._steps or ticket in self._done

    def is_awaited(self, ticket: int) -> bool:
        """Whether a decision has not ended, and compute has read what it loads, or a loss is known.

        What was computed is known to be right only when such a decision has ended.
        """
        step = self._steps.get(ticket)
        return step is not None and (step.read or bool(step.lost()))

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Give the pairs of a decision that are known not to land, so far; until it is reported."""
        self._recover_from_interrupt()
        step, done = self._steps.get(ticket), self._done.get(ticket)
        return step.lost() if step else done.lost if done else ()

    def poll(self) -> list[StepDone]:
        """Make progress without waiting, and give the decisions that ended since the last call."""
        self._recover_from_interrupt()
        self._progress()
        ended = list(self._done.values())
        self._done = {}
        return ended

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end, for its storage too; `poll` will not report it.

        Args:
            ticket: of a decision that was submitted.

        Raises:
            UnknownTicketError: no such decision is under way, or it has been reported.
        """
        self._recover_from_interrupt()
        while ticket in self._steps:
            self._progress()
            if ticket in self._steps:
                self._wait_for_leg(self._steps[ticket].parts)
        done = self._done.get(ticket)
        if done is None:
            raise UnknownTicketError(f"decision {ticket} is not under way")
        # No call comes after this, and so no interrupt between here and the caller.
        del self._done[ticket]
        return done

    # ---- going on ----

    def _progress(self) -> None:
        if self._checked is not None:
            self._checked.poll()
        self._take_in()
        self._begin_waiting()
        self._end_steps()

    def _take_in(self) -> None:
        """Take note of the legs that have ended, and begin those that follow them."""
        self.engine.poll()
        for part in tuple(self._parts()):
            if not (part.ended or part.waiting):
                self._legs.advance(part)

    def _begin_waiting(self) -> None:
        """Begin parts that need not wait and whose rows have room; store reads in the order of submission."""
        room = True
        for part in tuple(self._parts()):
            if not part.waiting or any(other.pending for other in part.must_have_started):
                continue
            if part.reads_store:
                room = room and not self._legs.full(part, self.staged_bytes)
                if not room:
                    continue
            try:
                self._begin(part)
            except BlockyardError as error:
                self._legs.lose(part, error)

    def _begin(self, part: Part) -> None:
        full = self._legs.full(part, self.staged_bytes) if part.writes_store else ""
        if full:
            pairs = part.pairs
            error = StoreError(f"{len(pairs)} blocks from {pairs.src} to {pairs.dst}: {full}")
            self._legs.lose(part, error)
            return
        self._legs.begin(part)
        if part.transfer is not None and part.kind in {"copy", "exchange"} and part.writes_device:
            part.transfer.order_compute()

    def _end_steps(self) -> None:
        for ticket, step in tuple(self._steps.items()):
            if all(part.ended for part in step.parts):
                self._done[ticket] = step.done()
                del self._steps[ticket]

    def _await_store_reads(self, step: _OpenDecision) -> None:
        """Wait for the storage that the step's compute depends on; let compute wait for what follows."""
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
        self._take_in()  # on a CPU these have ended, and what failed is known

    def _wait_for_leg(self, parts: Iterable[Part]) -> None:
        """Wait for one leg that is under way, of these parts if there is one; `_progress` takes note of it."""
        for part in chain(parts, self._parts()):
            if part.ended or part.waiting:
                continue
            self._legs.wait(part)
            return
        raise InvariantError("parts of a decision wait, and nothing is under way")

    def _parts(self) -> Iterator[Part]:
        """Give the parts of all decisions under way, in the order of submission."""
        for step in self._steps.values():
            yield from step.parts

    def _recover_from_interrupt(self) -> None:
        """After an interrupt, end as lost what was being handed to engine or store; of a submission, all of it."""
        part, step = self._legs.launching, self._submitting
        if part is None and step is None:
            return
        # No copy may be under way when the leases end. The store orders what it does by slot.
        self.engine.transfers.synchronize()
        error = BlockyardError("a call of the executor was interrupted, and whether the blocks landed is not known")
        if part is not None:
            self._legs.lose(part, error)
        if step is not None:
            self._fail(step, error)
            self._end_steps()
        self._legs.launching = self._submitting = None

    def _fail(self, step: _OpenDecision, error: Exception) -> None:
        """Have all of a step count as lost; it ends when what has begun of it has ended."""
        step.failed = error
        for part in step.parts:
            if part.waiting:
                self._legs.lose(part, error)

    # ---- parts ----

    def _refuse(self, transfers: Sequence[tuple[str, Pairs]]) -> None:
        for kind, pairs in transfers:
            if "external" not in {pairs.src, pairs.dst}:
                continue  # the engine checks them at once
            if self._checked is None:
                raise MappingError(f"{len(pairs)} pairs of kind {kind!r} name the external tier, and there is none")
            for tier, ids in ((pairs.src, pairs.ids[:, 0]), (pairs.dst, pairs.ids[:, 1])):
                num_slots = self._checked.num_slots if tier == "external" else self.engine.num_blocks(tier)
                if len(ids) and ids.max() >= num_slots:
                    owner = "the store" if tier == "external" else "the engine"
                    raise MappingError(
                        f"{len(pairs)} pairs of kind {kind!r} name {tier} block {ids.max()}, {owner} has "
                        f"{tier}_blocks={num_slots}, give its manager the same"
                    )

    def _cut(self, decision: StepDecision, fence: Event, *, by_layer: bool) -> tuple[tuple[Part, ...], list[Part]]:
        """Cut a decision into parts; see `cut`."""
        named = [part for ticket in decision.after if ticket in self._steps for part in self._steps[ticket].parts]
        return cut(decision, named, fence, self._chunk_blocks, by_layer=by_layer)
