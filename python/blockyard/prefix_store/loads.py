"""Loads the beginnings of prompts from a prefix store.

A load waits for room, then the store reads its blocks into staging rows, then the engine copies the rows into the
manager's blocks. It repeats this with the blocks still missing, until none are, one does not arrive, or its deadline
passes. While other loads bring blocks of its prompt, it waits for them before it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, HashedPrompt, StoreJob
from blockyard.errors import BlockyardError, StoreError
from blockyard.prefix_store.stats import PrefixStoreStats
from blockyard.stores.checked_store import Answer, CheckedStore, PendingBatch
from blockyard.stores.log_lines import MissLog
from blockyard.stores.threaded.runtime import runtime
from blockyard.tracing import Trace

if TYPE_CHECKING:
    from blockyard.engine.engine import CacheEngine
    from blockyard.engine.transfers import Transfer

__all__ = ["Load", "Loads", "Prefetch"]

PROBED: Final = 4
"""Number of blocks to read speculatively if the store does not know yet whether it has them."""
_BYTES_PER_SECOND: Final = 200e6  # deadlines assume at least this rate


@dataclass(slots=True, eq=False)
class Read:
    """A store read: the blocks of these keys, uint8 `[n, 32]`, into staging rows.

    The store owns the rows until the batch has an answer. `num_placed` of them have been copied to blocks.
    """

    keys: NDArray[np.uint8]
    batch: PendingBatch
    rows: NDArray[np.uint8] | None
    num_placed: int = 0


@dataclass(slots=True, eq=False)
class Copy:
    """A copy from rows to the blocks of a job. `landed` marks the blocks that it writes, bool `[n]`.

    If `is_last`, the next block of the prompt did not arrive.
    """

    job: StoreJob
    transfer: Transfer
    landed: NDArray[np.bool_]
    is_last: bool


@dataclass(slots=True, eq=False)
class Load:
    """The load of a prompt's beginning.

    Attributes:
        prompt: the prompt with its keys.
        began: start time, on the monotonic clock.
        keys: keys of the blocks that no tier has and no load is bringing, uint8 `[n, 32]`.
        num_loading: number of blocks of the prompt that other loads are bringing.
        until: deadline.
        allowed: number of blocks that the deadline allows for.
        tokens: number of tokens loaded.
        brought: keys of the blocks that were loaded.
        found_at: `_num_changes` of the loads when `keys` and `num_loading` were found.
        waits_from: `_num_changes` when it began to wait for another load; None if it does not wait.
        read: the store read in progress, or the one being copied; None if there is none.
        copy: the copy in progress; None if there is none.
        done: whether the load has ended.
        tier: the tier that blocks were loaded to; "" before the first.
        miss: why a block did not arrive; "" if all did so far.
        trace: spans of the load, and of the read or copy in progress.
    """

    prompt: HashedPrompt
    began: float
    keys: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 32), np.uint8))
    num_loading: int = 0
    found_at: int = 0
    until: float = 0.0
    allowed: int = 0
    tokens: int = 0
    brought: set[bytes] = field(default_factory=set)
    waits_from: int | None = None
    read: Read | None = None
    copy: Copy | None = None
    done: bool = False
    tier: str = ""
    miss: str = ""
    trace: Trace = field(default_factory=Trace)


class Prefetch:
    """A prompt whose beginning is loaded from the store; created by `PrefixStore.prefetch`.

    Attributes:
        prompt: the prompt with its keys; pass it to `allocate` instead of the token ids.
        tokens: number of tokens loaded for it.
    """

    def __init__(self, load: Load, poll: Callable[[], None]) -> None:
        self._load = load
        self._poll = poll

    @property
    def prompt(self) -> HashedPrompt:
        """The prompt with its keys."""
        return self._load.prompt

    @property
    def tokens(self) -> int:
        """Number of tokens loaded."""
        return self._load.tokens

    @property
    def done(self) -> bool:
        """Whether the prompt can be admitted: its blocks are loaded, or the deadline has passed. Never waits."""
        if not self._load.done:
            self._poll()
        return self._load.done

    def __repr__(self) -> str:
        state = "done" if self._load.done else "in progress"
        return f"Prefetch({len(self.prompt)} tokens, {self.tokens} loaded, {state})"


class Loads:
    """Executes loads.

    Args:
        manager: the manager of the blocks.
        engine: copies them.
        store: the store.
        stats: counters to update.
        log: logs the store's misses.
        max_blocks: maximum number of blocks in flight.

    Attributes:
        open: unfinished loads.
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
        self._manager, self._engine, self._store, self._stats, self._log = manager, engine, store, stats, log
        self._runtime = runtime()
        self._size = engine.layout.bytes_per_block
        self._max_blocks = max_blocks
        self._buffers = engine.memory.buffers
        self._store_jobs = manager.prefix.store_jobs
        self._abandoned: list[Read] = []  # reads past their deadline; the store owns their rows until they end
        self._late_at: int | None = None  # number of the store's answers when a read passed its deadline
        self._num_changes = 0  # number of jobs that have begun, and of jobs, reads and loads that have ended
        self._is_closed = False
        self.open: list[Load] = []

    def begin(self, prompt: HashedPrompt, timeout_base: float) -> Load:
        """Start loading the blocks of a prompt that no tier has; never waits.

        Args:
            prompt: the prompt with its keys.
            timeout_base: timeout in seconds, plus one second for every 200 MB.
        """
        load = Load(prompt, self._runtime.monotonic())
        self._find_missing(load)
        if not len(load.keys) and not load.num_loading:
            load.done = True
            return load
        self._stats.prefetches += 1
        load.until = load.began + timeout_base
        self._allow(load, len(load.keys) + load.num_loading)
        self.open.append(load)
        load.trace.begin("prefetch", prompt_tokens=len(prompt), missing_blocks=len(load.keys))
        self._advance(load)
        return load

    def advance(self) -> None:
        """Advance all loads as far as possible; never waits."""
        if self._abandoned:
            for read in self._abandoned:
                self._give_back(read)
            self._abandoned = [read for read in self._abandoned if read.batch.answer is None]
        for load in tuple(self.open):
            self._advance(load)

    def close(self) -> None:
        """Stop loading."""
        self._is_closed = True

    def give_up_all(self, why: str) -> None:
        """Let prompts continue without the store; the manager has ended the jobs. May be called again."""
        for load in self.open:
            if load.read is not None and load.read.batch.answer is None:
                self._abandoned.append(load.read)
            load.read = load.copy = None
            load.done = True
            self._end_spans(load, why)
            self._stats.misses[why] += 1
        self.open.clear()
        self._num_changes += 1

    # ---- one load ----

    def _find_missing(self, load: Load) -> None:
        load.keys, load.num_loading = self._store_jobs.missing(load.prompt, self._max_blocks)
        load.found_at, load.waits_from = self._num_changes, None

    def _advance(self, load: Load) -> None:
        """Advance a load as far as possible."""
        while not load.done:
            if load.copy is not None:
                goes_on = self._take_copies(load, load.copy)
            elif load.waits_from == self._num_changes:
                goes_on = False
            elif load.read is not None:
                goes_on = self._take_rows(load, load.read)
            else:
                goes_on = self._begin_read(load)
            if not goes_on:
                # A load with a copy in flight is not given up: nothing can free its blocks before the copy ends.
                if load.copy is None and self._runtime.monotonic() >= load.until:
                    self._give_up(load)
                return

    def _begin_read(self, load: Load) -> bool:
        reads = [other.read for other in self.open if other.read is not None]
        is_late = self._late_at is not None and (reads or self._late_at == self._store.num_answers)
        why = "closed" if self._is_closed else "unavailable" if is_late else ""
        if why:
            return self._finish(load, why)
        first = load.keys[:1].tobytes()
        if any(read.keys[0].tobytes() == first for read in reads):
            load.waits_from = self._num_changes
            return False
        if load.waits_from is not None:
            self._find_missing(load)
        if load.miss or not len(load.keys):
            return self._end(load)
        if self._store.lacks(load.keys[:1])[0]:  # what the store lacks does not wait for room below
            return self._end(load, "absent")
        staging = self._max_blocks - sum(len(read.keys) for read in reads + self._abandoned)
        if staging < min(len(load.keys), self._max_blocks // 4 or 1):
            return False
        # What the store sends without a place to go would be read again.
        room = self._store_jobs.room(load.prompt) - sum(len(read.keys) for read in reads)
        return self._read(load, load.keys[: min(staging, room)]) if room > 0 else self._end(load, "no_room")

    def _read(self, load: Load, keys: NDArray[np.uint8]) -> bool:
        """Let the store read blocks, up to the first that it lacks."""
        count = _leading(self._store.contains(keys)) or _leading(~self._store.lacks(keys[:PROBED]))
        if not count:
            return self._end(load, "absent")
        keys, rows = np.ascontiguousarray(keys[:count]), self._buffers.take(count, self._size)
        with suppress(StoreError):
            batch = self._store.get(keys, rows)
            load.read = Read(keys, batch, rows)
            load.trace.begin_leg("store_read", blocks=count, bytes=rows.nbytes)
        return load.read is not None or self._finish(load, "error")

    def _take_rows(self, load: Load, read: Read) -> bool:
        """Get manager blocks for the blocks that arrived, up to the first that did not."""
        answer = read.batch.answer
        if answer is None:
            return False
        self._late_at = None
        ok = answer.ok
        count = _leading(ok)
        if count and not self._engine.transfers.has_room(count * self._size, "in", "host"):
            return False  # the step's own transfers go first
        is_last = count < len(ok)
        if is_last and count and _reason(answer, count) == "queue_full":
            is_last = False  # the store's queue is shared; the next read includes these blocks
        if is_last and not load.miss:
            load.miss = _reason(answer, count)
            self._stats.misses[load.miss] += 1
            self._log.note(answer.reasons)
        load.trace.end_leg(answer.error, hit_blocks=count, miss_reason=load.miss)
        if not count:
            self._drop_read(load)
            return self._end(load)
        job = self._store_jobs.begin_load(load.prompt, count - read.num_placed)
        if not len(job):
            self._find_missing(load)
            return self._end(load, "no_room" if len(load.keys) else "")  # with its rows, if it waits
        self._num_changes += 1
        # The job has later blocks of the prompt if another load already brought these.
        blocks, rows, landed = _rows_of(job, read.keys[:count], answer.rows[:count])
        try:
            transfer = self._engine.submit_write(
                job.tier, blocks, rows, after_compute=self._engine.fence(), on_full="refuse"
            )
        except BlockyardError:
            self._end_job(job, [False] * len(job))
            return self._finish(load, "copy_failed")
        load.tier = job.tier
        load.copy = Copy(job, transfer, landed, is_last)
        load.trace.begin_leg("transfer", blocks=len(blocks), bytes=rows.nbytes, source="staging", target=job.tier)
        return True

    def _take_copies(self, load: Load, copy: Copy) -> bool:
        if not copy.transfer.done:
            return False
        has_landed = copy.transfer.error is None
        load.trace.end_leg(copy.transfer.error)
        found = self._end_job(copy.job, copy.landed & has_landed)
        load.copy = None
        if not has_landed:
            return self._finish(load, "copy_failed")
        self._stats.hit_blocks += found
        self._stats.hit_bytes += found * self._size
        load.tokens += found * self._manager.block_size
        load.brought.update(key.tobytes() for key in copy.job.keys[copy.landed])
        self._find_missing(load)
        if self._has_more(load, int(copy.landed.sum())):
            return True
        self._drop_read(load)
        if copy.is_last or not len(load.keys):
            return self._end(load)
        if load.keys[0].tobytes() in load.brought:  # evicted in the meantime, for this prompt or another
            return self._finish(load, "no_room")
        self._allow(load, load.tokens // self._manager.block_size + len(load.keys) + load.num_loading)
        return True

    def _has_more(self, load: Load, num_placed: int) -> bool:
        """Whether the read has rows left that the prompt still misses: those had no room in the first tier."""
        read = load.read
        if read is None or read.batch.answer is None:
            return False
        read.num_placed += num_placed
        arrived = read.keys[: _leading(read.batch.answer.ok)]
        if read.num_placed >= len(arrived) or not len(load.keys) or load.keys[0].tobytes() in load.brought:
            return False
        return bool((arrived == load.keys[0]).all(axis=1).any())

    def _end(self, load: Load, miss: str = "") -> bool:
        """End a load that brings no more blocks, once no other is bringing blocks of its prompt."""
        if load.found_at != self._num_changes:
            self._find_missing(load)
        if not load.num_loading:
            return self._finish(load, miss)
        load.waits_from = self._num_changes
        return False

    def _allow(self, load: Load, num_blocks: int) -> None:
        """Extend the deadline by the time for the blocks that it does not allow for yet."""
        load.until += max(0, num_blocks - load.allowed) * self._size / _BYTES_PER_SECOND
        load.allowed = max(num_blocks, load.allowed)

    def _give_up(self, load: Load) -> None:
        """End a load whose deadline has passed: its prompt continues without the store.

        Other prompts do the same until the store answers anything. Then one prompt at a time tries the store again,
        until one succeeds in time.
        """
        if load.read is not None and load.read.batch.answer is None:
            self._abandoned.append(load.read)
            self._late_at = self._store.num_answers
        self._finish(load, "timeout")

    def _finish(self, load: Load, miss: str = "") -> bool:
        """End a load that has no copy in flight. Returns True: it has made progress."""
        if miss:
            self._stats.misses[miss] += 1
        self._end_spans(load, miss)
        self._drop_read(load)
        load.done = True
        self.open.remove(load)
        self._stats.load_seconds.observe(self._runtime.monotonic() - load.began)
        return True

    def _end_spans(self, load: Load, miss: str) -> None:
        """End a load's span, and that of its read or copy in progress."""
        load.trace.end_leg(miss_reason=miss)
        found = load.tokens // self._manager.block_size
        load.trace.end(
            hit_tokens=load.tokens,
            hit_blocks=found,
            hit_bytes=found * self._size,
            tier=load.tier,
            miss_reason=miss or load.miss,
        )

    def _end_job(self, job: StoreJob, landed: NDArray[np.bool_] | list[bool]) -> int:
        found = self._store_jobs.end_load(job.job, landed)
        self._num_changes += 1
        return found

    def _drop_read(self, load: Load) -> None:
        self._give_back(load.read)
        load.read = None
        self._num_changes += 1

    def _give_back(self, read: Read | None) -> None:
        """Return the rows of a read to the buffers, once neither store nor engine uses them."""
        if read is not None and read.batch.answer is not None and read.rows is not None:
            rows, read.rows = read.rows, None
            if read.batch.answer.are_rows_free:
                self._buffers.give(rows)


def _leading(found: NDArray[np.bool_]) -> int:
    """Return the number of leading true values."""
    return len(found) if found.all() else int(found.argmin())


def _reason(answer: Answer, index: int) -> str:
    """Return why a block did not arrive."""
    return (answer.reasons[index] if index < len(answer.reasons) else "") or "error"


def _rows_of(
    job: StoreJob, keys: NDArray[np.uint8], rows: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
    """Find the blocks of a job that were read: their ids, their rows, and a mask over the job's blocks, bool `[n]`.

    `rows` holds the blocks of `keys`; all of them arrived.
    """
    count = len(job)
    if np.array_equal(job.keys, keys[:count]):
        return job.blocks, rows[:count], np.ones(count, np.bool_)
    # Blocks may have been loaded or evicted since the keys were requested.
    index = {key.tobytes(): at for at, key in enumerate(keys)}
    at = np.array([index.get(key.tobytes(), -1) for key in job.keys])
    return job.blocks[at >= 0], np.ascontiguousarray(rows[at[at >= 0]]), at >= 0
