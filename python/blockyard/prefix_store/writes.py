"""Writes cached blocks to a prefix store: the engine reads them, then the store puts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, StoreJob
from blockyard.errors import BlockyardError, StoreError
from blockyard.prefix_store.pressure import HIGH_SECONDS, WritePressure
from blockyard.prefix_store.stats import PrefixStoreStats
from blockyard.stores.base import Owners
from blockyard.stores.checked_store import Answer, CheckedStore, PendingBatch
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
    """The blocks of a job: read by the engine, then put by the store as `batch`, except those it already has."""

    job: StoreJob
    num_blocks: int
    rows: NDArray[np.uint8] | None
    transfer: Transfer
    batch: PendingBatch | None = None
    trace: Trace = field(default_factory=Trace)


class Writes:
    """Writes the blocks that a manager has queued for writing.

    Args:
        manager: the manager of the blocks.
        engine: reads them.
        store: the store.
        stats: counters to update.
        log: logs the blocks that the store did not write.
        max_blocks: maximum number of blocks in flight.

    Attributes:
        num_blocks: number of blocks in flight.
    """

    def __init__(
        self,
        manager: BlockManager,
        engine: CacheEngine,
        store: CheckedStore,
        stats: PrefixStoreStats,
        log: MissLog,
        max_blocks: int,
    ) -> None:
        self._engine, self._store, self._stats, self._log = engine, store, stats, log
        self._store_jobs = manager.prefix.store_jobs
        self._size = engine.layout.bytes_per_block
        self._buffers = engine.memory.buffers
        self._max_blocks = max_blocks
        self._blocks_at_once = max(1, min(self._max_blocks, WRITTEN_AT_ONCE // self._size))
        self._is_closed = False
        self._reading: list[Write] = []  # being read by the engine
        self._putting: list[Write] = []  # being put by the store
        self._waits_for_engine = False
        self._num_answers = 0  # the store's answers processed so far
        self._clock, self._pressure = runtime().monotonic, WritePressure()
        self.num_blocks = 0

    def __len__(self) -> int:
        """Return the number of writes in flight."""
        return len(self._reading) + len(self._putting)

    @property
    def have_ended(self) -> bool:
        """Whether no write is in flight, and none waits until the engine has room."""
        return not (self._reading or self._putting or self._waits_for_engine)

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
        while not self._is_closed and (room := self._room()) > 0:
            # The step's own transfers go first.
            if not self._engine.transfers.has_room(self._blocks_at_once * self._size, "out", "host"):
                self._waits_for_engine = True
                return
            job = self._store_jobs.begin_write(min(room, self._blocks_at_once))
            num_blocks = len(job)
            if not num_blocks:
                # The next one may be on its way to the host.
                self._waits_for_engine = bool(self._store_jobs.num_waiting and self._engine.transfers.open())
                return
            try:
                rows, fence = self._buffers.take(num_blocks, self._size), self._engine.fence()
                transfer = self._engine.submit_read(job.tier, job.blocks, rows, after_compute=fence, on_full="refuse")
            except BlockyardError as error:
                self._store_jobs.end_write(job.job)
                self._stats.unwritten_blocks += num_blocks
                self._begin_trace(Trace(), job, num_blocks).end(error, written_blocks=0)
                return
            write = Write(job, num_blocks, rows, transfer)
            self._reading.append(write)
            self._begin_trace(write.trace, job, num_blocks)
            self.num_blocks += num_blocks
            if transfer.done and len(self._reading) == 1:
                self._hand_over(write)
                del self._reading[0]

    def _room(self) -> int:
        """Return how many more blocks may be in flight: while the store is slow, those of one write."""
        if self.num_blocks and (self._pressure.is_high or self._is_overdue()):
            return 0
        return self._max_blocks - self.num_blocks

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
        self.num_blocks = sum(write.num_blocks for write in self._putting)

    def _hand_over(self, write: Write) -> bool:
        """Hand blocks that the engine has read over to the store. Returns True: the engine is done with them."""
        is_whole = self._store_jobs.end_write(write.job.job)
        rows, write.transfer.rows = write.transfer.rows, None
        if not is_whole or rows is None or write.transfer.error is not None or not self._put(write, rows):
            self.num_blocks -= write.num_blocks
            self._stats.unwritten_blocks += write.num_blocks
            why = "error" if is_whole else "taken"
            write.trace.end(write.transfer.error, written_blocks=0, miss_reason=why)
        elif write.batch is not None:
            self._putting.append(write)
        else:  # the store already has all of them
            self.num_blocks -= write.num_blocks
            self._count(write.num_blocks)
            write.trace.end(written_blocks=write.num_blocks)
            self._give_back(write)
        return True

    def _take_answer(self, write: Write, answer: Answer) -> bool:
        """Count the blocks that the store put. Returns True: the write has ended."""
        if write.batch is not None:
            self._pressure.note(self._clock() - write.batch.since)
            self._stats.write_pauses = self._pressure.times
        unwritten, why = len(answer.ok) - int(np.count_nonzero(answer.ok)), ""
        self.num_blocks -= write.num_blocks
        self._count(write.num_blocks - unwritten)
        if unwritten:
            self._stats.unwritten_blocks += unwritten
            self._log.note(answer.reasons)
            why = next(filter(None, answer.reasons), "")
        write.trace.end(answer.error, written_blocks=write.num_blocks - unwritten, miss_reason=why)
        if not unwritten or answer.are_rows_free:
            self._give_back(write)
        return True

    def _begin_trace(self, trace: Trace, job: StoreJob, num_blocks: int) -> Trace:
        trace.begin("store", tier=job.tier, blocks=num_blocks, bytes=num_blocks * self._size)
        return trace

    def _give_back(self, write: Write) -> None:
        """Return the rows of a write to the buffers: neither engine nor store uses them."""
        rows, write.rows = write.rows, None
        self._buffers.give(rows)

    def _put(self, write: Write, rows: NDArray[np.uint8]) -> bool:
        """Put the blocks that the store lacks; False if it refuses them."""
        job = write.job
        keys, owners = job.keys, Owners(job.tenants, job.parents)
        is_new = ~self._store.contains(keys)
        num_new = np.count_nonzero(is_new)
        if not num_new:
            return True
        if num_new < write.num_blocks:
            keys, rows, owners = keys[is_new], rows[is_new], Owners(*(of[is_new] for of in owners))
        try:
            write.batch = self._store.put(keys, rows, owners)
        except StoreError:
            return False
        return True

    def _count(self, num_blocks: int) -> None:
        self._stats.written_blocks += num_blocks
        self._stats.written_bytes += num_blocks * self._size
