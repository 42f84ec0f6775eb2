"""Loads the beginnings of prompts from a prefix store.

A load reads its blocks from the store into staging rows, piece by piece: several reads are in flight, and while the
store reads one piece, the engine copies earlier ones into the manager's blocks. A round of reads takes the blocks that
the prompt lacks, as far as there is room. Rounds repeat until no block is missing, one does not arrive, or the deadline
passes. While other loads bring blocks of its prompt, a load waits for them before it ends.

With several groups, windows or states, a prompt continues only at resume points. So a load first asks which blocks the
store has, and brings those of the deepest point that they complete. If one does not arrive, it tries the next point.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager, HashedPrompt, StoreJob, StoreSearch
from blockyard.errors import BlockyardError, StoreError
from blockyard.prefix_store.stats import PrefixStoreStats
from blockyard.prefix_store.values import Values
from blockyard.stores.checked_store import Answer, Batch, CheckedStore
from blockyard.stores.log_lines import MissLog
from blockyard.stores.threaded.runtime import runtime
from blockyard.tracing import NO_SPAN, Trace, TraceSpan

if TYPE_CHECKING:
    from blockyard.engine.engine import CacheEngine
    from blockyard.engine.transfers import Transfer

__all__ = ["READ_AT_ONCE", "Load", "Loads", "Prefetch"]

PROBED: Final = 4
"""Number of blocks to read speculatively if the store does not know yet whether it has them."""
READ_AT_ONCE: Final = 8 << 20
"""Bytes of one read: smaller ones cost more calls, larger ones are copied later."""
_BYTES_PER_SECOND: Final = 200e6  # deadlines assume at least this rate
_ALL: Final = 2**31 - 1
_LOOKS_AT_ONCE: Final = 16  # how many of the loads that wait for staging rows `advance` looks at
_POINTS: Final = 4  # maximum number of resume points that one load tries
_NO_KEYS: Final = np.empty((0, 32), np.uint8)
_NO_CLASSES: Final = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Read:
    """A store read: the blocks of these keys, uint8 `[n, 32]`, into staging rows.

    The store owns the rows until the batch has an answer, and `num_copies` transfers read them. `num_placed` of the
    blocks have a job, or need none; all do once it is closed.
    """

    keys: NDArray[np.uint8]
    names: bytes  # the same keys
    batch: Batch
    rows: NDArray[np.uint8]
    page_class: int = 0
    leg: TraceSpan = NO_SPAN
    num_placed: int = 0
    num_copies: int = 0

    @property
    def is_closed(self) -> bool:
        """Whether no other block gets a job."""
        return self.num_placed == len(self.keys)


@dataclass(slots=True, eq=False)
class Copy:
    """A copy from the rows of a read to the blocks of a job. `landed` marks the blocks that it writes, bool `[n]`."""

    job: StoreJob
    transfer: Transfer
    landed: NDArray[np.bool_]
    read: Read
    leg: TraceSpan = NO_SPAN


@dataclass(slots=True, eq=False)
class Load:
    """The load of a prompt's beginning.

    Attributes:
        prompt: the prompt with its keys.
        began: start time, on the monotonic clock.
        keys: keys of the blocks that no tier has and no load is bringing, as last found, uint8 `[n, 32]`.
        page_classes: their page classes, int64 `[n]`.
        loading: page classes of the blocks of the prompt that loads were bringing then, int64 `[m]`.
        found_at: `_num_changes` of the loads then.
        until: deadline.
        allowed: number of bytes that the deadline allows for.
        found: number of tokens that device and host had before, in models with resume points.
        tokens: number of tokens loaded.
        landed: number of blocks loaded.
        landed_bytes: their bytes.
        search: what the store could complete; None unless its keys are being looked up.
        has: which of its keys the store has, bool `[n]`.
        lacks: which of its keys the store lacks, bool `[n]`.
        point: number of blocks up to the resume point to load; None for all blocks, 0 before one is found.
        points: number of points tried.
        brought: keys of the blocks that were loaded.
        waits_from: `_num_changes` when it began to wait for another load; None if it does not wait.
        ahead: keys of the blocks that this round has still to read.
        ahead_classes: their page classes.
        num_rows: number of values for whose rows the round waits.
        in_round: whether a round has begun and not ended.
        reads: reads with blocks that have no job yet, in the prompt's order.
        copies: copies in flight, in the same order.
        done: whether the load has ended.
        tier: the tier that blocks were loaded to; "" before the first.
        miss: why a block did not arrive; "" if all did so far.
        failure: why it ends as soon as no copy is in flight; "" if it does not.
        trace: spans of the load, and of its reads and copies in progress.
    """

    prompt: HashedPrompt
    began: float
    keys: NDArray[np.uint8] = field(default_factory=_NO_KEYS.copy)
    page_classes: NDArray[np.int64] = field(default_factory=_NO_CLASSES.copy)
    loading: NDArray[np.int64] = field(default_factory=_NO_CLASSES.copy)
    found_at: int = 0
    until: float = 0.0
    allowed: int = 0
    found: int = 0
    tokens: int = 0
    landed: int = 0
    landed_bytes: int = 0
    search: StoreSearch | None = None
    has: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    lacks: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    point: int | None = None
    points: int = 0
    brought: set[bytes] = field(default_factory=set)
    waits_from: int | None = None
    ahead: NDArray[np.uint8] = field(default_factory=_NO_KEYS.copy)
    ahead_classes: NDArray[np.int64] = field(default_factory=_NO_CLASSES.copy)
    num_rows: int = 0
    in_round: bool = False
    reads: deque[Read] = field(default_factory=deque)
    copies: deque[Copy] = field(default_factory=deque)
    done: bool = False
    tier: str = ""
    miss: str = ""
    failure: str = ""
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
        values: reads its blocks.
        stats: counters to update.
        log: logs the store's misses.

    Attributes:
        open: unfinished loads.
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
        self._manager, self._engine, self._store, self._stats, self._log = manager, engine, store, stats, log
        self._runtime = runtime()
        self._values = values
        self._sizes = values.block_bytes.tolist()
        self._store_jobs = manager.prefix.store_jobs
        self._has_points = [group.kind for group in manager.groups] != ["full_attention"]
        at_once = min(values.most // 4 * values.size, READ_AT_ONCE)
        self._blocks_at_once = [values.blocks_in(at_once, page_class) for page_class in range(len(self._sizes))]
        self._reads: dict[Read, None] = {}  # those whose rows are in use
        self._num_rows = 0  # of these, in values
        self._reading: Counter[bytes] = Counter()  # keys of their blocks that have no job yet; two may read one
        self._num_unplaced = [0] * len(self._sizes)  # of these blocks, by page class
        self._turn = 0  # which of the loads without rows `advance` looks at
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
        if not len(load.keys) and not len(load.loading):
            load.done = True
            return load
        if self._has_points:
            load.point, load.found = 0, self._manager.prefix.lookup(prompt).tokens
            load.keys, load.page_classes = _NO_KEYS, _NO_CLASSES
        self._stats.prefetches += 1
        load.until = load.began + timeout_base
        self._allow_all(load)
        self.open.append(load)
        load.trace.begin("prefetch", prompt_tokens=len(prompt), missing_blocks=len(load.keys))
        self._advance(load)
        return load

    def advance(self) -> None:
        """Advance all loads as far as possible; never waits."""
        for read in tuple(self._reads):
            self._give_back(read)
        now, count = self._runtime.monotonic(), len(self.open)
        for at, load in enumerate(tuple(self.open)):
            # What waits for rows can only learn that the store lacks its block, so these take turns.
            if (at - self._turn) % count < _LOOKS_AT_ONCE or not self._is_short(load, now):
                self._advance(load)
        self._turn = (self._turn + _LOOKS_AT_ONCE) % (count or 1)

    @property
    def are_copying(self) -> bool:
        """Whether the engine is copying pieces."""
        return any(load.copies for load in self.open)

    def wait_for_engine(self) -> None:
        """Wait until the engine has copied the pieces that have arrived."""
        for load in self.open:
            for copy in load.copies:  # to host or device, so on streams of their own
                self._engine.transfers.wait(copy.transfer)

    def close(self) -> None:
        """Stop loading."""
        self._is_closed = True

    def give_up_all(self, why: str) -> None:
        """Let prompts continue without the store; the manager has ended the jobs. May be called again."""
        self._reads = {read: None for read in self._reads if read.batch.answer is None}
        self._reading.clear()
        self._num_unplaced = [0] * len(self._sizes)
        self._num_rows = sum(self._rows_of(read) for read in self._reads)
        for read in self._reads:
            read.num_placed, read.num_copies = len(read.keys), 0
        for load in self.open:
            load.reads.clear()
            load.copies.clear()
            load.done = True
            self._end_spans(load, why)
            self._stats.misses[why] += 1
        self.open.clear()
        self._num_changes += 1

    # ---- one load ----

    def _find_missing(self, load: Load) -> None:
        missing = self._store_jobs.missing(load.prompt, _ALL, point=load.point)
        load.keys, load.page_classes, load.loading = missing
        load.found_at, load.waits_from = self._num_changes, None

    def _advance(self, load: Load) -> None:
        """Advance a load as far as possible."""
        while not load.done:
            if load.copies and self._take_copy(load):
                continue
            is_waiting = load.waits_from == self._num_changes
            if not is_waiting and (self._take_rows(load) or self._read_next(load) or self._end_round(load)):
                continue
            # A load with a copy in flight is not given up: nothing can free its blocks before the copy ends.
            if not load.copies and self._runtime.monotonic() >= load.until:
                self._give_up(load)
            return

    def _begin_round(self, load: Load) -> bool:
        """Find the blocks to read, if the store answers in time."""
        is_late = self._late_at is not None and (self._reading or self._late_at == self._store.num_answers)
        if self._is_closed or is_late:
            return self._finish(load, "closed" if self._is_closed else "unavailable")
        return self._find_point(load) if load.point == 0 else self._find_blocks(load)

    def _find_blocks(self, load: Load) -> bool:
        """Find the blocks to read, up to the first that the store lacks."""
        is_waiting = self._waits_for_read(load)
        if not is_waiting and load.waits_from is not None:
            self._find_missing(load)
            is_waiting = self._waits_for_read(load)
        if is_waiting:
            return False
        if load.miss or not len(load.keys):
            return self._end(load)
        # What the store lacks does not wait for room below.
        if self._values.lacks(load.keys[:1], load.page_classes[:1])[0]:
            return self._end(load, "absent")
        values, first = self._values.num_slices[load.page_classes], int(load.page_classes[0])
        load.num_rows = min(int(values.sum()), max(self._values.most // 4, int(values[0])))
        if self._staging_room() < load.num_rows:
            return False
        load.num_rows = 0
        count = 0
        if has_room := self._room(load, first) > 0:
            count = _leading(self._values.contains(load.keys, load.page_classes))
            count = count or _leading(~self._values.lacks(load.keys[:PROBED], load.page_classes[:PROBED]))
        load.ahead, load.ahead_classes, load.in_round = load.keys[:count], load.page_classes[:count], count > 0
        return load.in_round or self._end(load, "absent" if has_room else "no_room")

    def _find_point(self, load: Load) -> bool:
        """Choose the resume point to load, once the store has looked up what it does not know yet."""
        if load.search is None:
            load.search = self._store_jobs.search(load.prompt)
            load.has, load.lacks = np.zeros((2, len(load.search.keys)), np.bool_)
        # A store may forget what it has told, so answers are kept.
        if len(unknown := np.flatnonzero(~(load.has | load.lacks))):
            asked = load.search.keys[unknown], load.search.page_classes[unknown]
            load.has[unknown], load.lacks[unknown] = self._values.contains(*asked), self._values.lacks(*asked)
        if self._store.looks_up_later and not (load.has | load.lacks).all():
            return False
        search, load.search = load.search, None
        load.point = self._store_jobs.deepest(search, load.has, self._num_unplaced)
        if not load.point:
            return self._end(load, "no_room" if search.deepest(load.has, _ALL) else "absent")
        load.points += 1
        self._find_missing(load)
        self._allow_all(load)
        return True

    def _try_another_point(self, load: Load) -> bool:
        """After a block of a point did not arrive, let the next round find another point."""
        is_left = bool(load.miss and load.point) and load.points < _POINTS
        if is_left:
            load.point, load.miss = 0, ""
        return is_left

    def _read_next(self, load: Load) -> bool:
        """Have the store read the next piece of the round, if there is room for it."""
        # If the store was late, one piece at a time shows whether it still is.
        if not len(load.ahead) or (self._late_at is not None and load.reads):
            return False
        page_class = int(load.ahead_classes[0])
        slices, count = int(self._values.num_slices[page_class]), _leading(load.ahead_classes == page_class)
        count = min(count, self._blocks_at_once[page_class], self._staging_room() // slices)
        if count <= 0:
            return False
        if self._is_reading(load.ahead[0]):
            load.ahead, load.ahead_classes = _NO_KEYS, _NO_CLASSES  # another load is faster
            return False
        # What the store sends without a place to go would be read again.
        count = min(count, self._room(load, page_class))
        if count <= 0:
            return False
        keys, rows = np.ascontiguousarray(load.ahead[:count]), self._values.take(count, page_class)
        try:
            read = Read(keys, keys.tobytes(), self._values.get(keys, rows, page_class), rows, page_class)
        except StoreError:
            return self._fail(load, "error")
        self._reads[read] = None
        self._num_rows += self._rows_of(read)
        self._reading.update(_names(read, 0, count))
        self._num_unplaced[page_class] += count
        load.reads.append(read)
        load.ahead, load.ahead_classes = load.ahead[count:], load.ahead_classes[count:]
        read.leg = load.trace.begin_leg("store_read", blocks=count, bytes=rows.nbytes)
        return True

    def _take_rows(self, load: Load) -> bool:
        """Get manager blocks for the blocks of the next read that arrived, up to the first that did not."""
        if not load.reads or (answer := load.reads[0].batch.answer) is None:
            return False
        read = load.reads[0]
        self._late_at = None
        count = _leading(answer.ok)
        num_rows = count - read.num_placed
        if num_rows and not self._engine.transfers.has_room(num_rows * self._sizes[read.page_class], "in", "host"):
            return False  # the step's own transfers go first
        if count < len(answer.ok):
            self._stop_round(load, answer, count)
        load.trace.end_leg(answer.error, leg=read.leg, hit_blocks=count, miss_reason=load.miss)
        if not num_rows:
            self._close_read(load)
            return True
        job = self._store_jobs.begin_load(load.prompt, num_rows, point=load.point)
        if not len(job):
            return self._place_none(load, read, count)
        self._num_changes += 1
        return self._copy(load, read, job, slice(read.num_placed, count))

    def _stop_round(self, load: Load, answer: Answer, count: int) -> None:
        """Drop the reads after one of which only `count` blocks arrived: what follows is useless without the next."""
        load.ahead, load.ahead_classes = _NO_KEYS, _NO_CLASSES
        while len(load.reads) > 1:
            self._close(load.reads.pop())
        why = _reason(answer, count)
        # The store's queue is shared, so the next round includes these blocks.
        if not load.miss and not (count and why == "queue_full"):
            load.miss = why
            self._stats.misses[why] += 1
            self._log.note(answer.reasons)

    def _place_none(self, load: Load, read: Read, count: int) -> bool:
        """Handle arrived blocks that have no room, or that the prompt no longer misses."""
        if load.copies:
            return False
        self._find_missing(load)
        left = read.keys[read.num_placed : count]
        if len(load.keys) and (left == load.keys[0]).all(axis=1).any():
            return self._end(load, "no_room")  # with its rows, if it waits
        self._close_read(load)
        return True

    def _copy(self, load: Load, read: Read, job: StoreJob, arrived: slice) -> bool:
        """Copy rows into the blocks of a job."""
        # The job has later blocks of the prompt if another load already brought these.
        came = read.batch.answer.rows[arrived]  # type: ignore[union-attr]
        blocks, rows, landed, num_placed = _rows_of(job, read.keys[arrived], came)
        self._place(read, read.num_placed + num_placed)
        if not len(blocks) or read.num_placed == arrived.stop:
            self._place(load.reads.popleft(), len(read.keys))
        if not len(blocks):
            self._end_job(job, landed)
            self._give_back(read)
            return True
        try:
            transfer = self._engine.submit_write(
                job.tier,
                blocks,
                rows,
                page_class=job.page_class,
                after_compute=self._engine.fence(),
                on_full="refuse",
            )
        except BlockyardError:
            self._end_job(job, [False] * len(job))
            return self._fail(load, "copy_failed")
        load.tier = job.tier
        read.num_copies += 1
        load.copies.append(Copy(job, transfer, landed, read))
        load.copies[-1].leg = load.trace.begin_leg(
            "transfer", blocks=len(blocks), bytes=rows.nbytes, source="staging", target=job.tier
        )
        return True

    def _take_copy(self, load: Load) -> bool:
        """Publish the blocks of a copy that has ended."""
        if not load.copies[0].transfer.done:
            return False
        copy = load.copies.popleft()
        has_landed = copy.transfer.error is None
        load.trace.end_leg(copy.transfer.error, leg=copy.leg)
        found = self._end_job(copy.job, copy.landed & has_landed)
        copy.read.num_copies -= 1
        self._give_back(copy.read)
        if not has_landed:
            return self._fail(load, "copy_failed")
        self._stats.hit_blocks += found
        self._stats.hit_bytes += found * self._sizes[copy.job.page_class]
        load.landed += found
        load.landed_bytes += found * self._sizes[copy.job.page_class]
        if load.point is None:
            load.tokens += found * self._manager.block_size
        load.brought.update(key.tobytes() for key in copy.job.keys[copy.landed])
        left = sum((len(read.keys) - read.num_placed) * self._sizes[read.page_class] for read in load.reads)
        left += sum(len(copy.job) * self._sizes[copy.job.page_class] for copy in load.copies)
        self._allow(load, left + self._bytes_of(load.ahead_classes))
        return True

    def _end_round(self, load: Load) -> bool:
        """Begin the next round, or end the load, once nothing is in flight."""
        if load.reads or load.copies:
            return False
        if load.failure:
            return self._finish(load, load.failure)
        if not load.in_round:
            return self._begin_round(load)
        load.ahead, load.ahead_classes, load.in_round = _NO_KEYS, _NO_CLASSES, False
        self._find_missing(load)
        if load.miss or not len(load.keys):
            return self._try_another_point(load) or self._end(load)
        if load.keys[0].tobytes() in load.brought:  # evicted in the meantime, for this prompt or another
            return self._finish(load, "no_room")
        self._allow_all(load)
        return True

    def _end(self, load: Load, miss: str = "") -> bool:
        """End a load that brings no more blocks, once no other is bringing blocks that its prompt can use."""
        if self._has_points:
            is_waiting = self._others_complete_a_point(load)
        else:
            if load.found_at != self._num_changes:
                self._find_missing(load)
            is_waiting = len(load.loading) > 0
        if not is_waiting:
            return self._finish(load, miss)
        load.waits_from = self._num_changes
        if load.point and load.points < _POINTS and not load.reads:
            load.point, load.miss = 0, ""  # if the others fail, it looks for a point itself
        return False

    def _others_complete_a_point(self, load: Load) -> bool:
        """Whether other loads are bringing what a resume point of a prompt lacks."""
        # Two loads whose rows have no room must not wait for each other's.
        others = [other for other in self.open if other is not load and (other.copies or not load.reads)]
        coming = {key.tobytes() for other in others for copy in other.copies for key in copy.job.keys}
        if not load.reads:
            for other in others:
                coming.update(key.tobytes() for key in other.ahead)
                coming.update(*(_names(read, read.num_placed, len(read.keys)) for read in other.reads))
        if not coming:
            return False
        search = self._store_jobs.search(load.prompt)
        return search.deepest([key.tobytes() in coming for key in search.keys], _ALL) > 0

    def _allow_all(self, load: Load) -> None:
        """Extend the deadline by the time for all blocks that are not there yet."""
        self._allow(load, self._bytes_of(load.page_classes) + self._bytes_of(load.loading))

    def _allow(self, load: Load, num_left: int) -> None:
        """Extend the deadline by the time for bytes that it does not allow for yet: as many as can be in flight."""
        num_bytes = load.landed_bytes + min(num_left, self._values.most * self._values.size)
        load.until += max(0, num_bytes - load.allowed) / _BYTES_PER_SECOND
        load.allowed = max(num_bytes, load.allowed)

    def _bytes_of(self, page_classes: NDArray[np.int64]) -> int:
        """Return the bytes of a block of each of some page classes together."""
        if len(self._sizes) == 1:
            return len(page_classes) * int(self._sizes[0])
        return int(self._values.block_bytes[page_classes].sum())

    def _give_up(self, load: Load) -> None:
        """End a load whose deadline has passed: its prompt continues without the store.

        Other prompts do the same until the store answers anything. Then one prompt at a time tries the store again,
        until one succeeds in time.
        """
        if any(read.batch.answer is None for read in load.reads):
            self._late_at = self._store.num_answers
        self._finish(load, "timeout")

    def _fail(self, load: Load, why: str) -> bool:
        """Read no more: the load ends once its copies have. Returns True: it has made progress."""
        load.failure, load.ahead, load.ahead_classes = why, _NO_KEYS, _NO_CLASSES
        while load.reads:
            self._close_read(load)
        return True

    def _finish(self, load: Load, miss: str = "") -> bool:
        """End a load that has no copy in flight. Returns True: it has made progress."""
        if miss:
            self._stats.misses[miss] += 1
        if load.point is not None and load.landed:
            load.tokens = max(0, self._manager.prefix.lookup(load.prompt).tokens - load.found)
        self._end_spans(load, miss)
        while load.reads:
            self._close_read(load)
        load.done = True
        self.open.remove(load)
        self._num_changes += 1
        self._stats.load_seconds.observe(self._runtime.monotonic() - load.began)
        return True

    def _end_spans(self, load: Load, miss: str) -> None:
        """End a load's span, and that of its read or copy in progress."""
        load.trace.end_leg(miss_reason=miss)
        load.trace.end(
            hit_tokens=load.tokens,
            hit_blocks=load.landed,
            hit_bytes=load.landed_bytes,
            tier=load.tier,
            miss_reason=miss or load.miss,
        )

    def _end_job(self, job: StoreJob, landed: NDArray[np.bool_] | list[bool]) -> int:
        found = self._store_jobs.end_load(job.job, landed)
        self._num_changes += 1
        return found

    # ---- reads and their rows ----

    def _waits_for_read(self, load: Load) -> bool:
        """Whether another load is reading the first block that this one lacks."""
        is_reading = len(load.keys) > 0 and self._is_reading(load.keys[0])
        if is_reading:
            load.waits_from = self._num_changes
        return is_reading

    def _is_reading(self, key: NDArray[np.uint8]) -> bool:
        """Whether a load is reading the block of a key."""
        return key.tobytes() in self._reading

    def _is_short(self, load: Load, now: float) -> bool:
        """Whether a load has to wait for staging rows."""
        is_short = load.num_rows > self._staging_room() and now < load.until
        return is_short and self._late_at is None and not self._is_closed

    def _staging_room(self) -> int:
        """Return how many more values can have staging rows."""
        return self._values.most - self._num_rows

    def _room(self, load: Load, page_class: int) -> int:
        """Return how many more blocks of a prompt and of a page class have a place to go."""
        room = self._store_jobs.room(load.prompt, point=load.point, page_class=page_class)
        return room - self._num_unplaced[page_class]

    def _close_read(self, load: Load) -> None:
        """Drop the first read of a load."""
        self._close(load.reads.popleft())

    def _close(self, read: Read) -> None:
        """Give no more blocks of a read to the manager. The store keeps its rows until it has an answer."""
        self._place(read, len(read.keys))
        self._num_changes += 1
        self._give_back(read)

    def _place(self, read: Read, count: int) -> None:
        """Record that the first `count` blocks of a read have a job, or need none."""
        for name in _names(read, read.num_placed, count):
            self._reading[name] -= 1
            if not self._reading[name]:
                del self._reading[name]
        self._num_unplaced[read.page_class] -= count - read.num_placed
        read.num_placed = count

    def _give_back(self, read: Read) -> None:
        """Return the rows of a closed read to the buffers, once neither store nor engine uses them."""
        answer = read.batch.answer
        if read.is_closed and not read.num_copies and answer is not None and read in self._reads:
            del self._reads[read]
            self._num_rows -= self._rows_of(read)
            if answer.are_rows_free:
                self._values.give(read.rows, read.page_class)

    def _rows_of(self, read: Read) -> int:
        """Return the number of values that a read has rows for."""
        return len(read.keys) * int(self._values.num_slices[read.page_class])


def _names(read: Read, start: int, stop: int) -> list[bytes]:
    """Return the keys of some blocks of a read."""
    return [read.names[32 * at : 32 * at + 32] for at in range(start, stop)]


def _leading(found: NDArray[np.bool_]) -> int:
    """Return the number of leading true values."""
    return len(found) if found.all() else int(found.argmin())


def _reason(answer: Answer, index: int) -> str:
    """Return why a block did not arrive."""
    return (answer.reasons[index] if index < len(answer.reasons) else "") or "error"


def _rows_of(
    job: StoreJob, keys: NDArray[np.uint8], rows: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_], int]:
    """Find the blocks of a job that were read.

    Returns:
        Their ids, their rows, a mask over the job's blocks, bool `[n]`, and the number of leading rows that are used
        or no longer needed. `rows` holds the blocks of `keys`, all of which arrived.
    """
    count = len(job)
    if np.array_equal(job.keys, keys[:count]):
        return job.blocks, rows[:count], np.ones(count, np.bool_), count
    # Blocks may have been loaded or evicted since the keys were requested.
    index = {key.tobytes(): at for at, key in enumerate(keys)}
    at = np.array([index.get(key.tobytes(), -1) for key in job.keys])
    return job.blocks[at >= 0], np.ascontiguousarray(rows[at[at >= 0]]), at >= 0, int(at.max()) + 1
