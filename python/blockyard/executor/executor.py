"""Carries out steps' decisions: joins the copy engine and the external tiers.

Transfers run beside compute, and storage beside both. A step of an engine whose scheduler leaves out of a step what is
still on its way (`overlap_io`):

    step = scheduler.schedule()
    executor.submit(step.decision)                      # compute is ordered behind what it needs, and only that
    sampled = model(step)
    for done in executor.poll():
        scheduler.finish(done.ticket, done.lost)
    finished = scheduler.update(step, sampled)

An engine that would rather wait calls `execute`, which returns when all bytes have landed or are known not to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.engine.tasks import Kind
from blockyard.engine.transfers import Transfer
from blockyard.errors import (
    BlockyardError,
    InvalidArgumentError,
    InvariantError,
    MappingError,
    StoreError,
    TransferCancelledError,
    UnknownTicketError,
)
from blockyard.executor.open_step import Executor, OpenStep, StepDone, cached_tier, columns, written
from blockyard.executor.store_side import Answer, StoreSide
from blockyard.stores.base import ExternalStore

__all__ = ["CHUNK_BYTES", "Executor", "StepDone", "StepExecutor"]

CHUNK_BYTES: Final = 64 << 20
"""Longer transfers with the external tier are cut into pieces of this size."""

_Handler: TypeAlias = Callable[[Transfer], None]


class StepExecutor:
    """Executes decisions beside compute. No call but `wait` and `execute` waits for storage.

    Device reads of a step run after all compute that was queued before `submit`, and its device writes after the
    device reads of the tickets that the decision names in `after`. Within a step the kinds keep their order where they
    touch the same blocks. Compute that is queued after `submit` waits for those reads, for the step's loads from the
    host, its copies and its exchanges. It does not wait for moves: until the ticket ends, what they write is in no
    table, and a block that is written meanwhile stays where it was. Nor does it wait for blocks that are fetched from
    the external tier: `order_compute` is for a scheduler that lets a step use what that step fetches.

    The executor polls engine and store; tickets that others have submitted there must be waited for.

    Whatever the store does, a step ends: what the store does not do as `ExternalStore` says is a lost pair, with its
    error in `StepDone.errors` and a line in the log `blockyard.executor`. An exception from outside, such as
    `KeyboardInterrupt`, may end any call: while it waits, nothing is lost and it can be made again; between two waits,
    the next call ends all steps under way as lost.

    Args:
        engine: owner of the device and host caches.
        store: the external tier, where there is one.
        max_staging: bytes of blocks on their way to or from the external tier that are staged. Fetches wait for room; a
            spill beyond it is lost, which costs a recompute and holds nobody up.
        chunk_bytes: longer transfers with the external tier are cut into pieces of this size.

    Raises:
        InvalidArgumentError: a number of bytes is not positive, or the store's blocks have another size than the
            engine's.
    """

    def __init__(
        self,
        engine: CacheEngine,
        store: ExternalStore | None = None,
        *,
        max_staging: int = 1 << 30,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if max_staging < 1 or chunk_bytes < 1:
            raise InvalidArgumentError(
                f"max_staging is {max_staging} bytes, chunk_bytes {chunk_bytes}, must be at least 1"
            )
        self.engine = engine
        self.store = store
        self._side = None if store is None else StoreSide(store, engine.layout.bytes_per_block)
        self._max_staging = max_staging
        self._chunk_blocks = max(1, min(chunk_bytes, max_staging) // engine.layout.bytes_per_block)
        self._staged = 0
        self._steps: dict[int, OpenStep] = {}
        self._engine_parts: dict[Transfer, tuple[OpenStep, _Handler]] = {}
        self._fetches: deque[tuple[OpenStep, Pairs]] = deque()
        self._done: dict[int, StepDone] = {}
        self._executing: StepDecision | None = None
        self._torn = False  # a call changes the fields above; if it is set when one begins, the last was interrupted

    def __repr__(self) -> str:
        return f"StepExecutor(under way: decisions {sorted(self._steps)}, not reported: {sorted(self._done)})"

    @property
    def num_in_flight(self) -> int:
        """Decisions that were submitted and have not been reported."""
        return len(self._steps) + len(self._done)

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
        self._mend()
        known = decision.ticket in self._steps or decision.ticket in self._done
        if not (known and self._executing is decision):
            self._executing = decision
            self.submit(decision)
        return list(self.wait(decision.ticket).lost)

    def submit(self, decision: StepDecision, *, by_layer: bool = False, prefetch: bool = False) -> None:
        """Start to carry out a decision, before the step's compute is queued.

        Args:
            decision: transfers, in the order in which they are safe to run.
            by_layer: loads arrive layer by layer; compute waits for each with `wait_for_layer`.
            prefetch: nothing that is computed before the ticket ends reads what it loads: these loads go when no other
                load is under way, and compute does not wait for them.

        Raises:
            MappingError: the decision names a transfer that this executor has no tier for, a slot that the store has
                not, or blocks that there are not. In the last case what was submitted before is under way, and all of
                it will be reported as lost.
            UnknownTicketError: its ticket is under way already.
        """
        self._mend()
        if decision.ticket in self._steps or decision.ticket in self._done:
            raise UnknownTicketError(f"decision {decision.ticket} is under way already")
        transfers = decision.transfers()
        self._refuse(transfers)
        step = OpenStep(decision.ticket, self.engine.fence(), transfers)
        self._torn = True
        self._steps[decision.ticket] = step
        refused = None
        try:
            self._read_device(step, transfers)
            self._write_device(step, decision, transfers, by_layer=by_layer, prefetch=prefetch)
        except BlockyardError as error:
            step.lost += step.lost_whole(error).lost
            refused = error
        step.parts -= 1
        self._end_if_done(step)
        self._torn = False
        if refused is not None:
            raise refused

    def cancel(self, ticket: int) -> bool:
        """Give up what has not begun of a decision: fetches that wait for room, and loads that nobody waits for yet.

        What has begun runs to its end. The ticket ends as others do: `poll` reports it, with what was given up among
        the lost pairs, so that the manager's `fail` ends the leases.

        Args:
            ticket: of a decision that was submitted.

        Returns:
            Whether anything was given up.
        """
        self._mend()
        step = self._steps.get(ticket)
        self._torn = True
        queued = [entry for entry in self._fetches if entry[0] is step]
        for entry in queued:
            self._fetches.remove(entry)
            pairs = entry[1]
            self._lose(entry[0], pairs, TransferCancelledError(f"{len(pairs)} blocks were not fetched any more"))
            self._fetched(entry[0])
        loads = [load for load, (owner, _) in tuple(self._engine_parts.items()) if owner is step]
        given_up = sum(load.cancel() for load in loads) + len(queued)
        self._torn = False
        return given_up > 0

    def order_compute(self, ticket: int) -> bool:
        """Let compute that is queued from now on wait for all that a step writes to the device.

        Args:
            ticket: of a decision that was submitted.

        Returns:
            Whether all is ordered; then `lost` names all that did not come from the external tier. False if blocks have
            not come yet: call again after `poll`.
        """
        self._mend()
        step = self._steps.get(ticket)
        if step is None:
            return True
        for write in (*step.loads, *step.within):
            write.order_compute()
        self._collect()  # on a CPU these have ended, and what failed is known
        return not step.fetching and not step.waiting

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Let compute that is queued from now on wait for one layer of a step's loads from the host.

        Args:
            ticket: of a decision that was submitted `by_layer`.
            layer: 0-based.
        """
        step = self._steps.get(ticket)
        for load in step.loads if step else ():
            load.order_compute(layer)

    def is_open(self, ticket: int) -> bool:
        """Whether a decision was submitted and has not ended."""
        return ticket in self._steps

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Give the pairs of a decision that are known not to land, so far; until it is reported."""
        self._mend()
        step = self._steps.get(ticket) or self._done.get(ticket)
        return tuple(step.lost) if step else ()

    def poll(self) -> list[StepDone]:
        """Go on with what can go on, and give the decisions that ended since the last call; never waits."""
        self._mend()
        self._go_on()
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
        self._mend()
        while ticket in self._steps:
            self._go_on()
            if ticket in self._steps:
                self._wait_for_part(self._steps[ticket])
        done = self._done.get(ticket)
        if done is None:
            raise UnknownTicketError(f"decision {ticket} is not under way")
        # No call comes after this, and so no interrupt between here and the caller.
        del self._done[ticket]
        return done

    # ---- going on ----

    def _go_on(self) -> None:
        self._collect()
        self._torn = True
        for batch, answer in self._side.poll() if self._side else ():
            batch.ended(answer)
        self._start_fetches()
        self._torn = False

    def _collect(self) -> None:
        """Take in what the engine has ended."""
        self._torn = True
        self.engine.poll()
        for transfer in [transfer for transfer in self._engine_parts if transfer.done]:
            _, handle = self._engine_parts.pop(transfer)
            handle(transfer)
        self._torn = False

    def _wait_for_part(self, step: OpenStep) -> None:
        """Wait for one thing that is under way, of this step if there is one; `_go_on` takes it in."""
        for owner in (step, None):
            for transfer, (other, _) in self._engine_parts.items():
                if owner in {None, other}:
                    self.engine.transfers.wait(transfer)
                    return
            batch = self._side.ticket_of(owner) if self._side else None
            if self._side and batch is not None:
                self._side.wait(batch)
                return
        raise InvariantError(f"decision {step.ticket} waits for {step.parts} parts, and nothing is under way")

    def _mend(self) -> None:
        """End all steps as lost if the last call was interrupted: what it had begun is not known."""
        if not self._torn:
            return
        # No copy may be under way when the leases end. The store orders what it does by slot.
        self.engine.transfers.synchronize()
        if self._side:
            self._side.give_up()
        error = BlockyardError("a call of the executor was interrupted, and whether the blocks landed is not known")
        for ticket, step in self._steps.items():
            self._done.setdefault(ticket, step.lost_whole(error))
        self._steps, self._engine_parts = {}, {}
        self._fetches.clear()
        self._staged = 0
        self._torn = False

    # ---- parts of a step ----

    def _refuse(self, transfers: Sequence[tuple[str, Pairs]]) -> None:
        for kind, pairs in transfers:
            for tier, ids in ((pairs.src, pairs.ids[:, 0]), (pairs.dst, pairs.ids[:, 1])):
                if tier != "external":
                    continue
                if self._side is None:
                    raise MappingError(f"{len(pairs)} pairs of kind {kind!r} name the external tier, and there is none")
                if len(ids) and not 0 <= ids.min() <= ids.max() < self._side.num_slots:
                    raise MappingError(
                        f"{len(pairs)} pairs of kind {kind!r} name slots {ids.min()} to {ids.max()}, the store has "
                        f"{self._side.num_slots}, and the manager's external_blocks may be no more"
                    )

    def _read_device(self, step: OpenStep, transfers: Sequence[tuple[str, Pairs]]) -> None:
        for kind, pairs in transfers:
            if kind == "spill":
                self._each_chunk(step, pairs, self._spill)
            elif kind == "swap_out":
                step.reads.append(self.engine.submit("swap_out", pairs.ids, after_compute=step.fence))
                self._expect(step, step.reads[-1], pairs)

    def _write_device(
        self,
        step: OpenStep,
        decision: StepDecision,
        transfers: Sequence[tuple[str, Pairs]],
        *,
        by_layer: bool,
        prefetch: bool = False,
    ) -> None:
        """Launch what writes to the device or within a tier, after the reads that it must not overtake."""
        named = [self._steps[ticket] for ticket in decision.after if ticket in self._steps]
        step.drains = [read for other in named for read in other.reads]
        for kind, pairs in transfers:
            if kind == "swap_in":
                self._load(step, pairs, by_layer=by_layer, prefetch=prefetch)
            elif kind == "fetch":
                step.awaited.update((pairs.dst, block) for block in pairs.ids[:, 1].tolist())
                self._each_chunk(step, pairs, self._queue_fetch)
            elif kind in {"copy", "move", "exchange"}:
                self._within(step, kind, pairs)
        for read in step.drains:
            read.order_compute()
        for load in () if by_layer or prefetch else step.loads:
            load.order_compute()
        self._start_fetches()

    def _load(self, step: OpenStep, pairs: Pairs, *, by_layer: bool, prefetch: bool) -> None:
        load = self.engine.submit(
            "swap_in", pairs.ids, after=step.drains, after_compute=step.fence, by_layer=by_layer, prefetch=prefetch
        )
        step.loads.append(load)
        self._expect(step, load, pairs)

    def _within(self, step: OpenStep, kind: Kind, pairs: Pairs) -> None:
        """Launch what a step does within a tier, or have it wait for blocks that are still to come."""
        touched = {(pairs.src, block) for block in pairs.ids.reshape(-1).tolist()} if step.awaited else set()
        if step.awaited.isdisjoint(touched):
            self._launch_within(step, kind, pairs)
            return
        step.awaited |= touched
        step.waiting.append((kind, pairs))
        step.parts += 1

    def _launch_within(self, step: OpenStep, kind: Kind, pairs: Pairs) -> None:
        tier = cached_tier(pairs.src)
        after = [*step.drains, *step.loads, *(step.reads if tier == "host" else ())]
        transfer = self.engine.submit(kind, pairs.ids, tier=tier, after=after, after_compute=step.fence)
        if tier == "device":
            step.within.append(transfer)
            step.reads.append(transfer)
            if kind != "move":
                transfer.order_compute()
        self._expect(step, transfer, written(kind, pairs))

    # ---- the external tier ----

    def _spill(self, step: OpenStep, pairs: Pairs) -> None:
        step.parts += 1
        blocks, _ = columns(pairs)
        num_bytes = len(pairs) * self.engine.layout.bytes_per_block
        if self._staged and self._staged + num_bytes > self._max_staging:
            staged = f"{self._staged} bytes are staged, at most {self._max_staging} may be"
            self._lose(step, pairs, StoreError(f"{len(pairs)} blocks from {pairs.src} to {pairs.dst}: {staged}"))
            return
        read = self.engine.submit_read(cached_tier(pairs.src), blocks, after_compute=step.fence)
        self._staged += num_bytes
        if pairs.src == "device":
            step.reads.append(read)
        self._engine_parts[read] = step, partial(self._store, step, pairs)

    def _store(self, step: OpenStep, pairs: Pairs, done: Transfer) -> None:
        """Blocks to be spilled have been read."""
        self._staged -= len(pairs) * self.engine.layout.bytes_per_block
        if done.rows is None or done.error is not None:
            self._moved(step, pairs, done)
            return
        try:
            # The store copies the rows: staging is free again.
            self._tier().write(step, columns(pairs)[1], done.rows, partial(self._stored, step, pairs))
        except StoreError as error:
            self._lose(step, pairs, error)

    def _stored(self, step: OpenStep, pairs: Pairs, answer: Answer) -> None:
        if answer.error is not None:
            step.errors.append(answer.error)
        self._part_done(step, pairs, answer.ok)

    def _queue_fetch(self, step: OpenStep, pairs: Pairs) -> None:
        step.parts += 1
        step.fetching += 1
        self._fetches.append((step, pairs))

    def _start_fetches(self) -> None:
        while self._fetches:
            step, pairs = self._fetches[0]
            num_bytes = len(pairs) * self.engine.layout.bytes_per_block
            if self._staged and self._staged + num_bytes > self._max_staging:
                return
            self._fetches.popleft()
            try:
                self._tier().read(step, columns(pairs)[0], partial(self._land, step, pairs))
            except StoreError as error:
                self._lose(step, pairs, error)
                self._fetched(step)
                continue
            self._staged += num_bytes

    def _land(self, step: OpenStep, pairs: Pairs, answer: Answer) -> None:
        """Blocks have come from the external tier, or not: which, is known from now on."""
        num_bytes = len(pairs) * self.engine.layout.bytes_per_block
        if answer.error is not None:
            step.errors.append(answer.error)
        rows = answer.rows
        if not answer.ok.all():
            step.lost.append(Pairs(pairs.src, pairs.dst, pairs.ids[~answer.ok]))
            pairs = Pairs(pairs.src, pairs.dst, pairs.ids[answer.ok])
            rows = rows[answer.ok] if len(pairs) else rows[:0]
        try:
            write = self.engine.submit_write(
                cached_tier(pairs.dst),
                columns(pairs)[1],
                rows,
                after=step.drains,
                after_compute=step.fence,
                prefetch=pairs.dst == "device",
            )
        except BlockyardError as error:
            self._staged -= num_bytes
            self._lose(step, pairs, error)
        else:
            if pairs.dst == "device":
                step.loads.append(write)
            self._engine_parts[write] = step, partial(self._landed, step, pairs, num_bytes)
        self._fetched(step)

    def _landed(self, step: OpenStep, pairs: Pairs, num_bytes: int, done: Transfer) -> None:
        self._staged -= num_bytes
        self._moved(step, pairs, done)

    def _fetched(self, step: OpenStep) -> None:
        """A piece has been launched, or is lost; after the last one, what waits for such blocks can run."""
        step.fetching -= 1
        if step.fetching:
            return
        waiting, step.waiting = step.waiting, []
        for kind, pairs in waiting:
            self._launch_waiting(step, kind, pairs)

    def _launch_waiting(self, step: OpenStep, kind: Kind, pairs: Pairs) -> None:
        try:
            self._launch_within(step, kind, pairs)
        except BlockyardError as error:
            self._lose(step, written(kind, pairs), error)
        else:
            step.parts -= 1  # it has a part of its own now

    # ---- ends ----

    def _expect(self, step: OpenStep, transfer: Transfer, pairs: Pairs) -> None:
        step.parts += 1
        self._engine_parts[transfer] = step, partial(self._moved, step, pairs)

    def _moved(self, step: OpenStep, pairs: Pairs, done: Transfer) -> None:
        if done.error is None:
            self._part_done(step, pairs, np.ones(len(pairs), dtype=np.bool_))
        else:
            self._lose(step, pairs, done.error)

    def _lose(self, step: OpenStep, pairs: Pairs, why: Exception) -> None:
        step.errors.append(why)
        self._part_done(step, pairs, np.zeros(len(pairs), dtype=np.bool_))

    def _part_done(self, step: OpenStep, pairs: Pairs, ok: NDArray[np.bool_]) -> None:
        if not ok.all():
            step.lost.append(Pairs(pairs.src, pairs.dst, pairs.ids[~ok]))
        step.parts -= 1
        self._end_if_done(step)

    def _end_if_done(self, step: OpenStep) -> None:
        if not step.parts and self._steps.get(step.ticket) is step:
            self._done[step.ticket] = StepDone(step.ticket, tuple(step.lost), tuple(step.errors))
            del self._steps[step.ticket]

    def _each_chunk(self, step: OpenStep, pairs: Pairs, start: Callable[[OpenStep, Pairs], None]) -> None:
        size = self._chunk_blocks
        for first in range(0, len(pairs), size):
            start(step, Pairs(pairs.src, pairs.dst, pairs.ids[first : first + size]))

    def _tier(self) -> StoreSide:
        if self._side is None:
            raise MappingError("a transfer names the external tier, and there is none")
        return self._side
