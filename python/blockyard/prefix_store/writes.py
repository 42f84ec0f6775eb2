"""Writes cached blocks to a prefix store: the engine reads them, then the store puts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, StoreJob
from blockyard.errors import BlockyardError, StoreError
from blockyard.prefix_store.pressure import HIGH_SECONDS, WritePressure
from blockyard.prefix_store.stats import PrefixStoreStats
from blockyard.prefix_store.values import Values
from blockyard.stores.checked_store import Answer, Batch, CheckedStore
from blockyard.stores.log_lines import MissLog
from blockyard.stores.threaded.runtime import runtime
from blockyard.tracing import Trace

if TYPE_CHECKING:
    from blockyard.engine.engine import CacheEngine
    from blockyard.engine.transfers import Transfer

__all__ = ["Writes"]

WRITTEN_AT_ONCE: Final = 16 << 20  # bytes of one batch


@dataclass(slots=True, eq=False)
class Write:
    """The blocks of a job: read by the engine, then put by the store as `batch`, those that `is_put` tells."""

    job: StoreJob
    num_blocks: int
    rows: NDArray[np.uint8] | None
    transfer: Transfer
    is_put: NDArray[np.bool_]
    batch: Batch | None = None
    trace: Trace = field(default_factory=Trace)


class Writes:
    """Writes the blocks that a manager has queued for writing.

    Args:
        manager: the manager of the blocks.
        engine: reads them.
        store: the store.
        values: writes blocks to it.
        stats: counters to update.
        log: logs the blocks that the store did not write.

    Attributes:
        num_blocks: number of blocks in flight.
    """

    def __init__(
        self,
        manager: BlockManager,
        engine: CacheEngine,
        store: CheckedStore,
        values: Values,
        stats: PrefixStoreStats,
        log: MissLog,
    ) -> None:
        self._engine, self._store, self._stats, self._log = engine, store, stats, log
        self._store_jobs = manager.prefix.store_jobs
        self._values = values
        self._sizes = values.block_bytes.tolist()
        self._widest = int(values.num_slices.max())
        self._blocks_at_once = max(1, min(values.most, WRITTEN_AT_ONCE // max(self._sizes)))
        self._bytes_at_once = self._blocks_at_once * max(self._sizes)
        self._is_closed = False
        self._reading: list[Write] = []  # being read by the engine
        self._putting: list[Write] = []  # being put by the store
        self._waits_for_engine = False
        self._has_gaps = False  # whether the store has ever lost what comes before a block
        self._num_answers = 0  # the store's answers processed so far
        self._clock, self._pressure = runtime().monotonic, WritePressure()
        self.num_blocks = 0
        self._num_values = 0  # of these blocks

    def __len__(self) -> int:
        """Return the number of writes in flight."""
        return len(self._reading) + len(self._putting)

    @property
    def have_ended(self) -> bool:
        """Whether no write is in flight, and none waits until the engine has room."""
        return not (self._reading or self._putting or self._waits_for_engine)

    @property
    def are_reading(self) -> bool:
        """Whether the engine is reading blocks of started writes."""
        return bool(self._reading)

    def advance(self) -> None:
        """Advance all writes as far as possible, and start others; never waits."""
        # In order: a store takes a block whose parent it lacks for useless.
        while self._reading and self._reading[0].transfer.done and self._hand_over(self._reading[0]):
            del self._reading[0]
        # A hanging store has thousands of batches and no answers.
        answers = self._store.num_answers
        if unseen := answers - self._num_answers:  # those of reads, too
            while self._putting and (batch := self._putting[0].batch) is not None and batch.answer is not None:
                self._take_answer(self._putting[0], batch.answer)
                del self._putting[0]
                unseen -= 1
            if unseen:  # some did not arrive in order
                self._putting = [
                    write
                    for write in self._putting
                    if write.batch is None
                    or (answer := write.batch.answer) is None
                    or not self._take_answer(write, answer)
                ]
            self._num_answers = answers
        self._waits_for_engine = False
        while not self._is_closed and self._store_jobs.num_waiting and (room := self._room()) > 0:
            # The step's own transfers go first.
            if not self._engine.transfers.has_room(self._bytes_at_once, "out", "host"):
                self._waits_for_engine = True
                return
            most = room if len(self._sizes) > 1 else min(room, self._blocks_at_once)
            max_bytes = min(room * self._values.size, self._bytes_at_once)
            job = self._store_jobs.begin_write(most, max_bytes=max_bytes)
            num_blocks = len(job)
            if not num_blocks:
                # The next one may be on its way to the host.
                self._waits_for_engine = bool(self._store_jobs.num_waiting and self._engine.transfers.open())
                return
            if self._has_gaps and self._values.has(job):  # queued with its whole chain
                self._store_jobs.end_write(job.job)
                self._count(job, num_blocks)
            elif not self._read(job, num_blocks):
                return

    def _read(self, job: StoreJob, num_blocks: int) -> bool:
        """Let the engine read the blocks of a job; False if it refuses."""
        try:
            rows, fence = self._values.take(num_blocks, job.page_class), self._engine.fence()
            transfer = self._engine.submit_read(
                job.tier, job.blocks, rows, page_class=job.page_class, after_compute=fence, on_full="refuse"
            )
        except BlockyardError as error:
            self._store_jobs.end_write(job.job)
            self._note_failed(job, num_blocks)
            self._begin_trace(Trace(), job, num_blocks).end(error, written_blocks=0)
            return False
        write = Write(job, num_blocks, rows, transfer, np.ones(num_blocks, np.bool_))
        self._reading.append(write)
        self._begin_trace(write.trace, job, num_blocks)
        self._note_in_flight(write, 1)
        if transfer.done and len(self._reading) == 1:
            self._hand_over(write)
            del self._reading[0]
        return True

    def _room(self) -> int:
        """Return how many more values may be in flight: while the store is slow, those of one write; 0 in a pause."""
        if self._pressure.paused_until > self._clock():
            return 0
        if self.num_blocks and (self._pressure.is_high or self._is_overdue()):
            return 0
        room = self._values.most - self._num_values
        return room if room >= self._widest else 0

    def _note_in_flight(self, write: Write, sign: int) -> None:
        self.num_blocks += sign * write.num_blocks
        self._num_values += sign * write.num_blocks * int(self._values.num_slices[write.job.page_class])

    def _is_overdue(self) -> bool:
        """Whether the oldest write in flight alone takes as long as a slow store's average."""
        batch = self._putting[0].batch if self._putting else None
        return batch is not None and self._clock() - batch.since >= HIGH_SECONDS

    def wait_for_engine(self) -> None:
        """Wait until the engine has read the blocks of all started writes."""
        for write in self._reading:
            self._engine.transfers.wait(write.transfer)

    def close(self) -> None:
        """Begin no more writes, and process no more answers."""
        self._is_closed = True
        for write in self._putting:
            write.trace.end(written_blocks=0, miss_reason="closed")

    def give_up_all(self, why: str) -> None:
        """Give up all writes that the store has not received; the manager has ended the jobs. May be called again."""
        for write in self._reading:
            self._stats.unwritten_blocks += write.num_blocks
            write.trace.end(written_blocks=0, miss_reason=why)
        self._reading = []
        self._num_answers = -1  # look at each write that the store has received
        self.num_blocks = self._num_values = 0
        for write in self._putting:
            self._note_in_flight(write, 1)

    def _hand_over(self, write: Write) -> bool:
        """Hand blocks that the engine has read over to the store. Returns True: the engine is done with them."""
        is_whole = self._store_jobs.end_write(write.job.job)
        rows, write.transfer.rows = write.transfer.rows, None
        if not is_whole or rows is None or write.transfer.error is not None or not self._put(write, rows):
            self._note_in_flight(write, -1)
            self._note_failed(write.job, write.num_blocks)
            why = "error" if is_whole else "taken"
            write.trace.end(write.transfer.error, written_blocks=0, miss_reason=why)
        elif write.batch is not None:
            self._putting.append(write)
        else:  # the store already has all of them
            self._note_in_flight(write, -1)
            self._count(write.job, write.num_blocks)
            write.trace.end(written_blocks=write.num_blocks)
            self._give_back(write)
        return True

    def _take_answer(self, write: Write, answer: Answer) -> bool:
        """Count the blocks that the store put. Returns True: the write has ended."""
        if write.batch is not None:
            self._pressure.note(self._clock() - write.batch.since)
            self._stats.write_pauses = self._pressure.times
        unwritten, why = len(answer.ok) - int(np.count_nonzero(answer.ok)), ""
        self._note_in_flight(write, -1)
        self._count(write.job, write.num_blocks - unwritten)
        if unwritten:
            self._stats.unwritten_blocks += unwritten
            self._log.note(answer.reasons)
            why = next(filter(None, answer.reasons), "")
        self._note_unwritten(write, answer)
        write.trace.end(answer.error, written_blocks=write.num_blocks - unwritten, miss_reason=why)
        if not unwritten or answer.are_rows_free:
            self._give_back(write)
        return True

    def _note_failed(self, job: StoreJob, num_blocks: int) -> None:
        """Count the blocks of a write that did not reach the store. Prompts that have them queue them again."""
        self._stats.unwritten_blocks += num_blocks
        self._store_jobs.note_unwritten(job, np.ones(num_blocks, np.bool_))

    def _note_unwritten(self, write: Write, answer: Answer) -> None:
        """Tell the manager which blocks the store did not keep, and which of those before them it has lost."""
        unwritten: dict[Literal["failed", "chain", "refused"], NDArray[np.bool_]] = {}
        if np.count_nonzero(answer.ok) < len(answer.ok):
            refused = np.array([reason == "refused" for reason in answer.reasons] or [False] * len(answer.ok))
            unwritten = {"failed": ~answer.ok & ~refused, "refused": refused}
        has_failed = bool(unwritten) and bool(unwritten["failed"].all())
        self._pressure.note_outcome(self._clock(), failed=has_failed)
        # A store that does not answer says of all blocks that it lacks them.
        if not has_failed and np.count_nonzero(orphans := self._values.lacks_parents(write.job.parents[write.is_put])):
            unwritten["refused"] = unwritten.get("refused", orphans) & ~orphans
            unwritten["chain"], self._has_gaps = orphans, True
        for why, blocks in unwritten.items():
            if np.count_nonzero(blocks):
                of_job = np.zeros(write.num_blocks, np.bool_)
                of_job[write.is_put] = blocks
                self._store_jobs.note_unwritten(write.job, of_job, why)

    def resume(self) -> None:
        """End the pause after a write that failed."""
        self._pressure.paused_until = 0.0

    def _begin_trace(self, trace: Trace, job: StoreJob, num_blocks: int) -> Trace:
        trace.begin("store", tier=job.tier, blocks=num_blocks, bytes=num_blocks * self._sizes[job.page_class])
        return trace

    def _give_back(self, write: Write) -> None:
        """Return the rows of a write to the buffers: neither engine nor store uses them."""
        rows, write.rows = write.rows, None
        self._values.give(rows, write.job.page_class)

    def _put(self, write: Write, rows: NDArray[np.uint8]) -> bool:
        """Put the blocks that the store lacks; False if it refuses them."""
        try:
            write.batch, write.is_put = self._values.put(write.job, rows)
        except StoreError:
            return False
        return True

    def _count(self, job: StoreJob, num_blocks: int) -> None:
        self._stats.written_blocks += num_blocks
        self._stats.written_bytes += num_blocks * self._sizes[job.page_class]
