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

from blockyard._core import Completion, Pairs, StepDecision
from blockyard.errors import (
    InvalidArgumentError,
    InvariantError,
    MappingError,
    TierError,
    TransferCancelledError,
    UnknownTicketError,
)
from blockyard.offload.open_step import Executor, OpenStep, StepDone, cached_tier, columns
from blockyard.tiers.base import ExternalStore
from blockyard.transfer.engine import CacheEngine
from blockyard.transfer.tickets import Done

__all__ = ["CHUNK_BYTES", "Executor", "StepDone", "StepExecutor"]

CHUNK_BYTES: Final = 64 << 20
"""Longer transfers with the external tier are cut into pieces of this size."""

_Handler: TypeAlias = Callable[[Done], None]
_Landed: TypeAlias = Callable[[Completion], None]


class StepExecutor:
    """Executes decisions beside compute. No call but `wait` and `execute` waits for storage.

    Device reads of a step run after all compute that was queued before `submit`, and its device writes after the
    device reads of the tickets that the decision names in `after`. Within a step the kinds keep their order where they
    touch the same blocks. Compute that is queued after `submit` waits for those reads, for the step's loads from the
    host, its copies and its exchanges. It does not wait for moves: until the ticket ends, what they write is in no
    table, and a block that is written meanwhile stays where it was. Nor does it wait for blocks that are fetched from
    the external tier: `order_compute` is for a scheduler that lets a step use what that step fetches.

    The executor polls engine and store; tickets that others have submitted there must be waited for.

    Args:
        engine: owner of the device and host caches.
        store: the external tier, where there is one.
        max_staging: bytes of blocks on their way to or from the external tier that are staged. Fetches wait for room; a
            spill beyond it is lost, which costs a recompute and holds nobody up.
        chunk_bytes: longer transfers with the external tier are cut into pieces of this size.

    Raises:
        InvalidArgumentError: a number of bytes is not positive.
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
        self._max_staging = max_staging
        self._chunk_blocks = max(1, min(chunk_bytes, max_staging) // engine.layout.bytes_per_block)
        self._staged = 0
        self._steps: dict[int, OpenStep] = {}
        self._engine_parts: dict[int, tuple[OpenStep, _Handler]] = {}
        self._store_parts: dict[int, tuple[OpenStep, _Landed]] = {}
        self._fetches: deque[tuple[OpenStep, Pairs]] = deque()
        self._done: list[StepDone] = []

    @property
    def num_in_flight(self) -> int:
        """Decisions that were submitted and have not been reported."""
        return len(self._steps) + len(self._done)

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision and wait until all its bytes have landed, or are known not to.

        Args:
            decision: transfers, in the order in which they are safe to run.

        Returns:
            The pairs that did not land: a slot that could not be written, or read back as it was written.

        Raises:
            MappingError, UnknownTicketError: as for `submit`.
        """
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
            MappingError: the decision names a transfer that this executor has no tier for, or blocks that there are
                not. In the second case what was submitted before is under way, and all of it will be reported as lost.
            UnknownTicketError: its ticket is under way already.
        """
        if decision.ticket in self._steps:
            raise UnknownTicketError(f"decision {decision.ticket} is under way already")
        transfers = decision.transfers()
        self._refuse(transfers)
        step = self._steps[decision.ticket] = OpenStep(decision.ticket, self.engine.fence())
        try:
            self._read_device(step, transfers)
            self._write_device(step, decision, transfers, by_layer=by_layer, prefetch=prefetch)
        except BaseException:
            step.lost += [pairs for _, pairs in transfers]
            raise
        finally:
            step.parts -= 1
            self._end_if_done(step)

    def cancel(self, ticket: int) -> bool:
        """Give up what has not begun of a decision: fetches that wait for room, and loads that nobody waits for yet.

        What has begun runs to its end. The ticket ends as others do: `poll` reports it, with what was given up among
        the lost pairs, so that the manager's `fail` ends the leases.

        Args:
            ticket: of a decision that was submitted.

        Returns:
            Whether anything was given up.
        """
        step = self._steps.get(ticket)
        queued = [entry for entry in self._fetches if entry[0] is step]
        for entry in queued:
            self._fetches.remove(entry)
            pairs = entry[1]
            self._lose(entry[0], pairs, TransferCancelledError(f"{len(pairs)} blocks were not fetched any more"))
            self._fetched(entry[0])
        loads = [load for load, (owner, _) in tuple(self._engine_parts.items()) if owner is step]
        return sum(self.engine.cancel(load) for load in loads) + len(queued) > 0

    def order_compute(self, ticket: int) -> bool:
        """Let compute that is queued from now on wait for all that a step writes to the device.

        Args:
            ticket: of a decision that was submitted.

        Returns:
            Whether all is ordered. False if blocks have not come from the external tier yet: call again after `poll`.
        """
        step = self._steps.get(ticket)
        if step is None:
            return True
        for write in (*step.loads, *step.within):
            self.engine.order_compute(write)
        return not step.fetching and not step.waiting

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Let compute that is queued from now on wait for one layer of a step's loads from the host.

        Args:
            ticket: of a decision that was submitted `by_layer`.
            layer: 0-based.
        """
        step = self._steps.get(ticket)
        for load in step.loads if step else ():
            self.engine.wait_for_layer(load, layer)

    def is_open(self, ticket: int) -> bool:
        """Whether a decision was submitted and has not ended."""
        return ticket in self._steps

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Give the pairs of a decision under way that are known not to land, so far."""
        step = self._steps.get(ticket)
        return tuple(step.lost) if step else ()

    def poll(self) -> list[StepDone]:
        """Go on with what can go on, and give the decisions that ended since the last call; never waits."""
        self._go_on()
        ended, self._done = self._done, []
        return ended

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end, for its storage too; `poll` will not report it.

        Args:
            ticket: of a decision that was submitted.

        Raises:
            UnknownTicketError: no such decision is under way, or it has been reported.
        """
        while ticket in self._steps:
            self._go_on()
            if ticket in self._steps:
                self._wait_for_part(self._steps[ticket])
        for done in self._done:
            if done.ticket == ticket:
                self._done.remove(done)
                return done
        raise UnknownTicketError(f"decision {ticket} is not under way")

    # ---- going on ----

    def _go_on(self) -> None:
        for done in self.engine.poll():
            self._engine_ended(done)
        for ticket in self.store.poll() if self.store else ():
            self._store_ended(ticket, 0.0)
        self._start_fetches()

    def _wait_for_part(self, step: OpenStep) -> None:
        """Wait for one thing that is under way, of this step if there is one."""
        for owners in ((step,), tuple(self._steps.values())):
            for ticket, (owner, _) in self._engine_parts.items():
                if owner in owners:
                    self._engine_ended(self.engine.wait(ticket))
                    return
            for ticket, (owner, _) in self._store_parts.items():
                if owner in owners:
                    self._store_ended(ticket, None)
                    return
        raise InvariantError(f"decision {step.ticket} waits for {step.parts} parts, and nothing is under way")

    def _engine_ended(self, done: Done) -> None:
        part = self._engine_parts.pop(done.ticket, None)
        if part:
            part[1](done)

    def _store_ended(self, ticket: int, timeout: float | None) -> None:
        part = self._store_parts.pop(ticket, None)
        if part:
            part[1](self._tier().wait(ticket, timeout))

    # ---- parts of a step ----

    def _refuse(self, transfers: Sequence[tuple[str, Pairs]]) -> None:
        for kind, pairs in transfers:
            if "external" in {pairs.src, pairs.dst} and self.store is None:
                raise MappingError(f"{len(pairs)} pairs of kind {kind!r} name the external tier, and there is none")

    def _read_device(self, step: OpenStep, transfers: Sequence[tuple[str, Pairs]]) -> None:
        for kind, pairs in transfers:
            if kind == "spill":
                self._each_chunk(step, pairs, self._spill)
            elif kind == "swap_out":
                step.reads.append(self.engine.submit_swap_out(pairs.ids, behind=step.fence))
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
            self.engine.order_compute(read)
        for load in () if by_layer or prefetch else step.loads:
            self.engine.order_compute(load)
        self._start_fetches()

    def _load(self, step: OpenStep, pairs: Pairs, *, by_layer: bool, prefetch: bool) -> None:
        load = self.engine.submit_swap_in(
            pairs.ids, after=step.drains, behind=step.fence, by_layer=by_layer, prefetch=prefetch
        )
        step.loads.append(load)
        self._expect(step, load, pairs)

    def _within(self, step: OpenStep, kind: str, pairs: Pairs) -> None:
        """Launch what a step does within a tier, or have it wait for blocks that are still to come."""
        touched = {(pairs.src, block) for block in pairs.ids.reshape(-1).tolist()} if step.awaited else set()
        if step.awaited.isdisjoint(touched):
            self._launch_within(step, kind, pairs)
            return
        step.awaited |= touched
        step.waiting.append((kind, pairs))
        step.parts += 1

    def _launch_within(self, step: OpenStep, kind: str, pairs: Pairs) -> None:
        tier = cached_tier(pairs.src)
        after = [*step.drains, *step.loads, *(step.reads if tier == "host" else ())]
        if kind == "copy":
            ticket = self.engine.submit_copy(pairs.ids, after=after, behind=step.fence)
        elif kind == "move":
            ticket = self.engine.submit_move(pairs.ids, tier=tier, after=after, behind=step.fence)
        else:
            ticket = self.engine.submit_exchange(pairs.ids, tier=tier, after=after, behind=step.fence)
            # Both blocks of a pair are written.
            pairs = Pairs(pairs.src, pairs.dst, np.concatenate((pairs.ids, pairs.ids[:, ::-1])))
        if tier == "device":
            step.within.append(ticket)
            step.reads.append(ticket)
            if kind != "move":
                self.engine.order_compute(ticket)
        self._expect(step, ticket, pairs)

    # ---- the external tier ----

    def _spill(self, step: OpenStep, pairs: Pairs) -> None:
        step.parts += 1
        blocks, _ = columns(pairs)
        num_bytes = len(pairs) * self.engine.layout.bytes_per_block
        if self._staged and self._staged + num_bytes > self._max_staging:
            staged = f"{self._staged} bytes are staged, at most {self._max_staging} may be"
            self._lose(step, pairs, TierError(f"{len(pairs)} blocks from {pairs.src} to {pairs.dst}: {staged}"))
            return
        read = self.engine.submit_read(cached_tier(pairs.src), blocks, behind=step.fence)
        self._staged += num_bytes
        if pairs.src == "device":
            step.reads.append(read)
        self._engine_parts[read] = step, partial(self._store, step, pairs)

    def _store(self, step: OpenStep, pairs: Pairs, done: Done) -> None:
        """Blocks to be spilled have been read."""
        self._staged -= len(pairs) * self.engine.layout.bytes_per_block
        if done.rows is None or done.error is not None:
            self._moved(step, pairs, done)
            return
        try:
            # The store copies the rows: staging is free again.
            ticket = self._tier().submit_write(columns(pairs)[1], done.rows)
        except TierError as error:
            self._lose(step, pairs, error)
            return
        self._store_parts[ticket] = step, partial(self._stored, step, pairs)

    def _stored(self, step: OpenStep, pairs: Pairs, write: Completion) -> None:
        self._part_done(step, pairs, write.ok)

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
                ticket = self._tier().submit_read(columns(pairs)[0])
            except TierError as error:
                self._lose(step, pairs, error)
                self._fetched(step)
                continue
            self._staged += num_bytes
            self._store_parts[ticket] = step, partial(self._land, step, pairs)

    def _land(self, step: OpenStep, pairs: Pairs, read: Completion) -> None:
        """Blocks have come from the external tier."""
        blocks, rows = columns(pairs)[1], read.rows
        if not read.ok.all():
            blocks, rows = blocks[read.ok], rows[read.ok]
        write = self.engine.submit_write(
            cached_tier(pairs.dst),
            blocks,
            rows,
            after=step.drains,
            behind=step.fence,
            prefetch=pairs.dst == "device",
        )
        if pairs.dst == "device":
            step.loads.append(write)
        self._engine_parts[write] = step, partial(self._landed, step, pairs, read.ok)
        self._fetched(step)

    def _landed(self, step: OpenStep, pairs: Pairs, ok: NDArray[np.bool_], done: Done) -> None:
        self._staged -= len(pairs) * self.engine.layout.bytes_per_block
        if done.error is None:
            self._part_done(step, pairs, ok)
        else:
            self._lose(step, pairs, done.error)

    def _fetched(self, step: OpenStep) -> None:
        """A piece has been launched, or is lost; after the last one, what waits for such blocks can run."""
        step.fetching -= 1
        if not step.fetching:
            waiting, step.waiting = step.waiting, []
            for kind, pairs in waiting:
                step.parts -= 1
                self._launch_within(step, kind, pairs)

    # ---- ends ----

    def _expect(self, step: OpenStep, ticket: int, pairs: Pairs) -> None:
        step.parts += 1
        self._engine_parts[ticket] = step, partial(self._moved, step, pairs)

    def _moved(self, step: OpenStep, pairs: Pairs, done: Done) -> None:
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
            del self._steps[step.ticket]
            self._done.append(StepDone(step.ticket, tuple(step.lost), tuple(step.errors)))

    def _each_chunk(self, step: OpenStep, pairs: Pairs, start: Callable[[OpenStep, Pairs], None]) -> None:
        size = self._chunk_blocks
        for first in range(0, len(pairs), size):
            start(step, Pairs(pairs.src, pairs.dst, pairs.ids[first : first + size]))

    def _tier(self) -> ExternalStore:
        if self.store is None:
            raise MappingError("a transfer names the external tier, and there is none")
        return self.store
