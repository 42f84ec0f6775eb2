"""Carries out steps' decisions without waiting for them: transfers run beside compute, and storage beside both.

A step of an engine whose scheduler leaves out of a step what is still on its way (`overlap_io`):

    step = scheduler.schedule()
    executor.submit(step.decision)                      # compute is ordered behind what it needs, and only that
    sampled = model(step.batch, step.block_tables, step.slot_mapping)
    for done in executor.poll():
        scheduler.finish(done.ticket, done.lost)
    finished = scheduler.update(step, sampled)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError, MappingError, TierError, UnknownTicketError
from blockyard.offload.executor import CHUNK_BYTES, cached_tier, columns
from blockyard.tiers.base import ExternalStore
from blockyard.transfer.engine import CacheEngine
from blockyard.transfer.streams import Event
from blockyard.transfer.tickets import Done

__all__ = ["AsyncExecutor", "StepDone"]

_Handler: TypeAlias = Callable[[Done], None]


class StepDone(NamedTuple):
    """A step's decision that has been carried out.

    Attributes:
        ticket: of the decision; the manager's `complete`, or `fail` if something was lost, is next.
        lost: pairs that did not land.
        errors: why, where more is known than that a block did not come back.
    """

    ticket: int
    lost: tuple[Pairs, ...]
    errors: tuple[Exception, ...]


@dataclass(slots=True, eq=False)
class _Step:
    """A decision under way; `reads`, `loads` and `drains` are tickets of the copy engine."""

    ticket: int
    fence: Event
    reads: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    drains: list[int] = field(default_factory=list)
    waiting_copies: list[Pairs] = field(default_factory=list)
    fetching: int = 0  # pieces for the device that are not launched yet
    parts: int = 1  # the submission is one
    lost: list[Pairs] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)


class AsyncExecutor:
    """Executes decisions beside compute. No call waits for storage.

    Device reads of a step run after all compute that was queued before `submit`, and its device writes after the
    device reads of the tickets that the decision names in `after`. Compute that is queued after `submit` waits for
    those reads, for the step's loads from the host and for its copies. For blocks that are fetched from the external
    tier it does not wait: `order_compute` is for a scheduler that lets a step use what that step fetches.

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
        self._steps: dict[int, _Step] = {}
        self._engine_parts: dict[int, _Handler] = {}
        self._store_parts: dict[int, Callable[[ExternalStore, int], None]] = {}
        self._fetches: deque[tuple[_Step, Pairs]] = deque()
        self._done: list[StepDone] = []

    @property
    def num_in_flight(self) -> int:
        """Decisions that were submitted and have not ended."""
        return len(self._steps)

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start to carry out a decision, before the step's compute is queued.

        Args:
            decision: transfers, in the order in which they are safe to run.
            by_layer: loads arrive layer by layer; compute waits for each with `wait_for_layer`.

        Raises:
            MappingError: the decision names a transfer that this executor has no tier for, or blocks that there are
                not; nothing was submitted of that transfer and those after it.
            UnknownTicketError: its ticket is under way already.
        """
        if decision.ticket in self._steps:
            raise UnknownTicketError(f"decision {decision.ticket} is under way already")
        transfers = decision.transfers()
        self._refuse(transfers)
        step = self._steps[decision.ticket] = _Step(decision.ticket, self.engine.fence())
        for kind, pairs in transfers:
            if kind == "spill":
                self._each_chunk(step, pairs, self._spill)
            elif kind == "swap_out":
                step.reads.append(self.engine.submit_swap_out(pairs.ids, behind=step.fence))
                self._expect(step, step.reads[-1], pairs)
        self._write_device(step, decision, transfers, by_layer=by_layer)
        step.parts -= 1
        self._end_if_done(step)

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
        for load in step.loads:
            self.engine.order_compute(load)
        return not step.fetching and not step.waiting_copies

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
        for done in self.engine.poll():
            handler = self._engine_parts.pop(done.ticket, None)
            if handler:
                handler(done)
        store = self.store
        for ticket in store.poll() if store else ():
            part = self._store_parts.pop(ticket, None)
            if store and part:
                part(store, ticket)
        self._start_fetches()
        ended, self._done = self._done, []
        return ended

    # ---- parts of a step ----

    def _refuse(self, transfers: Sequence[tuple[str, Pairs]]) -> None:
        for kind, pairs in transfers:
            if kind not in {"spill", "swap_out", "swap_in", "fetch", "copy"}:
                raise MappingError(f"{len(pairs)} pairs of kind {kind!r} cannot be carried out here")
            if kind in {"spill", "fetch"} and self.store is None:
                raise MappingError("the decision names the external tier, and there is none")

    def _write_device(
        self, step: _Step, decision: StepDecision, transfers: Sequence[tuple[str, Pairs]], *, by_layer: bool
    ) -> None:
        """Launch what writes to the device, after the reads that it must not overtake."""
        named = [self._steps[ticket] for ticket in decision.after if ticket in self._steps]
        step.drains = [read for other in named for read in other.reads]
        fetched: set[int] = set()
        for kind, pairs in transfers:
            if kind == "swap_in":
                load = self.engine.submit_swap_in(pairs.ids, after=step.drains, behind=step.fence, by_layer=by_layer)
                step.loads.append(load)
                self._expect(step, load, pairs)
            elif kind == "fetch":
                fetched.update(pairs.ids[:, 1].tolist() if pairs.dst == "device" else ())
                self._each_chunk(step, pairs, self._queue_fetch)
            elif kind == "copy" and not fetched.isdisjoint(pairs.ids[:, 0].tolist()):
                step.waiting_copies.append(pairs)
                step.parts += 1
            elif kind == "copy":
                self._copy(step, pairs)
        for read in step.drains:
            self.engine.order_compute(read)
        for load in () if by_layer else step.loads:
            self.engine.order_compute(load)
        self._start_fetches()

    def _copy(self, step: _Step, pairs: Pairs) -> None:
        copy = self.engine.submit_copy(pairs.ids, after=[*step.drains, *step.loads], behind=step.fence)
        self.engine.order_compute(copy)
        self._expect(step, copy, pairs)

    def _spill(self, step: _Step, pairs: Pairs) -> None:
        step.parts += 1
        blocks, _ = columns(pairs)
        num_bytes = len(pairs) * self.engine.layout.bytes_per_block
        if self._staged and self._staged + num_bytes > self._max_staging:
            staged = f"{self._staged} bytes are staged, at most {self._max_staging} may be"
            self._lose(step, pairs, TierError(f"{len(pairs)} blocks from {pairs.src} to {pairs.dst}: {staged}"))
            return
        self._staged += num_bytes
        read = self.engine.submit_read(cached_tier(pairs.src), blocks, behind=step.fence)
        if pairs.src == "device":
            step.reads.append(read)
        self._engine_parts[read] = partial(self._store, step, pairs)

    def _store(self, step: _Step, pairs: Pairs, done: Done) -> None:
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
        self._store_parts[ticket] = partial(self._stored, step, pairs)

    def _stored(self, step: _Step, pairs: Pairs, store: ExternalStore, ticket: int) -> None:
        self._part_done(step, pairs, store.wait(ticket, 0.0).ok)

    def _queue_fetch(self, step: _Step, pairs: Pairs) -> None:
        step.parts += 1
        step.fetching += pairs.dst == "device"
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
                self._fetched(step, pairs)
                continue
            self._staged += num_bytes
            self._store_parts[ticket] = partial(self._land, step, pairs)

    def _land(self, step: _Step, pairs: Pairs, store: ExternalStore, ticket: int) -> None:
        """Blocks have come from the external tier."""
        read = store.wait(ticket, 0.0)
        blocks, rows = columns(pairs)[1], read.rows
        if not read.ok.all():
            blocks, rows = blocks[read.ok], rows[read.ok]
        write = self.engine.submit_write(cached_tier(pairs.dst), blocks, rows, after=step.drains, behind=step.fence)
        if pairs.dst == "device":
            step.loads.append(write)
        self._engine_parts[write] = partial(self._landed, step, pairs, read.ok)
        self._fetched(step, pairs)

    def _landed(self, step: _Step, pairs: Pairs, ok: NDArray[np.bool_], done: Done) -> None:
        self._staged -= len(pairs) * self.engine.layout.bytes_per_block
        if done.error is None:
            self._part_done(step, pairs, ok)
        else:
            self._lose(step, pairs, done.error)

    def _fetched(self, step: _Step, pairs: Pairs) -> None:
        """A piece for the device has been launched, or is lost; after the last one, copies of such blocks can run."""
        step.fetching -= pairs.dst == "device"
        if not step.fetching:
            waiting, step.waiting_copies = step.waiting_copies, []
            for copies in waiting:
                step.parts -= 1
                self._copy(step, copies)

    def _expect(self, step: _Step, ticket: int, pairs: Pairs) -> None:
        step.parts += 1
        self._engine_parts[ticket] = partial(self._moved, step, pairs)

    def _moved(self, step: _Step, pairs: Pairs, done: Done) -> None:
        if done.error is None:
            self._part_done(step, pairs, np.ones(len(pairs), dtype=np.bool_))
        else:
            self._lose(step, pairs, done.error)

    def _lose(self, step: _Step, pairs: Pairs, why: Exception) -> None:
        step.errors.append(why)
        self._part_done(step, pairs, np.zeros(len(pairs), dtype=np.bool_))

    def _part_done(self, step: _Step, pairs: Pairs, ok: NDArray[np.bool_]) -> None:
        if not ok.all():
            step.lost.append(Pairs(pairs.src, pairs.dst, pairs.ids[~ok]))
        step.parts -= 1
        self._end_if_done(step)

    def _end_if_done(self, step: _Step) -> None:
        if not step.parts and self._steps.get(step.ticket) is step:
            del self._steps[step.ticket]
            self._done.append(StepDone(step.ticket, tuple(step.lost), tuple(step.errors)))

    def _each_chunk(self, step: _Step, pairs: Pairs, start: Callable[[_Step, Pairs], None]) -> None:
        size = self._chunk_blocks
        for first in range(0, len(pairs), size):
            start(step, Pairs(pairs.src, pairs.dst, pairs.ids[first : first + size]))

    def _tier(self) -> ExternalStore:
        if self.store is None:
            raise MappingError("the decision names the external tier, and there is none")
        return self.store
