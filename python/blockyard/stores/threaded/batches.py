"""`BatchStore`: runs the batches of a store whose calls block. It owns tickets, deadlines, memory and threads.

One lock guards all of these, the order of batches and the breaker. It knows nothing of the storage: `_carry_out` does
the work of a batch.
"""

import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion
from blockyard.errors import StoreError, UnknownTicketError
from blockyard.stores.base import ExternalStore, Owners
from blockyard.stores.log_lines import FailureLog
from blockyard.stores.threaded.breaker import Breaker
from blockyard.stores.threaded.order import Batch, BatchKind, BatchOrder, Name
from blockyard.stores.threaded.runtime import runtime
from blockyard.stores.url import hide_secrets
from blockyard.types import StoreStats
from blockyard.workers import Buffers, Polls, Process, describe, open_event

__all__ = ["BatchStore"]

_SLOWEST: Final = 16e6  # bytes per second; deadlines assume at least this rate
_DEAR: Final = 0.25  # seconds; a call that fails faster may be repeated at once
_IDLE_SECONDS: Final = 0.5  # how long an idle thread waits for work: starting one costs as much as a small batch
_MEMORY_SECONDS: Final = 0.1  # how long a thread that lacks memory waits for it
_GIVEN_UP_AT_ONCE: Final = 32  # batches that one `poll` gives up: thousands may wait when storage stops answering


class BatchStore(ExternalStore):
    """Runs batches in worker threads; batches of the same slot or key run one after the other."""

    num_slots: int = 0
    bytes_per_block: int = 0
    threads: int = 4
    memory: int = 1 << 30
    timeout_base: float = 10.0

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def max_blocks_in_flight(self) -> int:
        """Maximum number of blocks in flight and in uncollected results."""
        return self.memory // self.bytes_per_block

    def __init__(self) -> None:
        self._process = Process("a store")
        # Enter the lock itself, not a condition: an interrupt within `Condition.__enter__` would leave it locked.
        self._runtime = runtime()
        self._lock = self._runtime.rlock()
        self._changed = self._runtime.condition(self._lock)
        self._work = self._runtime.condition(self._lock)  # idle threads wait on it
        self._idle = 0
        self._buffers = Buffers()
        self._open: dict[int, Batch] = {}  # uncollected batches
        self._news: dict[int, Batch] = {}  # uncollected batches that ended since the last `poll`
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, ticket); ended batches are removed later
        self._order = BatchOrder()
        self._breaker = Breaker(self._runtime.monotonic)
        self._late: set[Batch] = set()  # puts that were given up but are still running
        self._tickets = self._num_threads = self._pending = 0
        self._misses: Counter[str] = Counter()
        self._blocks = {True: 0, False: 0}  # written, read
        self._polls = Polls()
        self._errors, self._errors_in_a_row, self._last_error = 0, 0, ""
        self._secrets: list[str] = []  # hidden in messages
        self._failures = FailureLog(self._runtime.monotonic)
        self._closed = False
        self._event: int | None = None
        self._refused: Iterator[int] = iter(())  # tickets open when storage stopped answering; `poll` goes through them
        self._lookup: Batch | None = None  # the lookup that is ready or running

    @property
    @abstractmethod
    def _age(self) -> int:
        """Grows when earlier batches become void; called with the lock held."""

    @abstractmethod
    def _carry_out(self, batch: Batch) -> tuple[NDArray[np.uint8] | None, list[str]]:
        """Do the work of a batch, in a worker thread. Returns the rows of a read, and a reason for each block."""

    @abstractmethod
    def _prepare(self, batch: Batch, names: Sequence[Name]) -> None:
        """Record that a batch with these names is being submitted; called with the lock held."""

    @abstractmethod
    def _conclude(self, batch: Batch) -> None:
        """Record how a batch ended, before the batches that wait for it start; called with the lock held."""

    @abstractmethod
    def _count_stored(self) -> int:
        """Return how many keys are known to have a block; called with the lock held."""

    def event_fd(self) -> int:
        """Return a file descriptor that is readable after a ticket has ended; see `ExternalStore.event_fd`."""
        self._process.check()
        with self._lock:
            if self._event is None:
                event = open_event(self)
                if self._news or self._breaker.is_down:
                    os.eventfd_write(event, 1)
                self._event = event
            return self._event

    def poll(self) -> list[int]:
        """Return the tickets that ended since the last call; see `ExternalStore.poll`."""
        self._process.check()
        self._failures.flush(self)  # here, since all workers may be hanging
        if self._open:
            self._polls.note()
        with self._lock, self._order_kept():
            are_left = self._give_up_some()
            if self._event is not None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._event)
                if are_left:
                    os.eventfd_write(self._event, 1)
            news, self._news = self._news, {}
            # `forget` collects its own ticket.
            return [ticket for ticket, batch in news.items() if ticket in self._open and batch.kind != "forget"]

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket; see `ExternalStore.wait`."""
        self._process.check()
        self._failures.flush(self)
        with self._lock, self._order_kept():
            batch = self._open.get(ticket)
            if batch is not None:
                shape = (len(batch.reasons) if batch.is_read else 0, self.bytes_per_block)
                result = batch.rows if batch.is_read and batch.rows is not None else np.zeros(shape, np.uint8)
                left = min(batch.deadline - self._runtime.monotonic(), inf if timeout is None else timeout)
                self._changed.wait_for(lambda: batch.ended or self._is_refused(batch), max(0.0, left))
            if batch is None or ticket not in self._open:
                raise UnknownTicketError(f"ticket {ticket} was never issued, or has been collected")
            # Remove the ticket last, so that an interrupted call can be repeated, at worst for a miss.
            self._give_up(batch, "unavailable" if self._is_refused(batch) else "timeout")
            rows = batch.read
            reasons = batch.reasons if batch.spread is None else [batch.reasons[index] for index in batch.spread]
            if batch.is_read and rows is None:
                reasons = [reason or "error" for reason in reasons]
            if not batch.running:
                self._release(batch)
            self._news.pop(ticket, None)
            del self._open[ticket]
        ok = np.array([not reason for reason in reasons], dtype=np.bool_)
        if rows is not None and not _is_same(rows, result):
            if ok.all():
                np.copyto(result, rows)
            else:
                for index in np.flatnonzero(ok):
                    result[index] = rows[index]
            self._buffers.give(rows)
        return Completion(ticket, ok, result, reasons)

    def stats(self) -> StoreStats:
        """Return the counters since the store was opened."""
        self._process.check()
        with self._lock:
            return StoreStats(
                written_blocks=self._blocks[True],
                written_bytes=self._blocks[True] * self.bytes_per_block,
                read_blocks=self._blocks[False],
                read_bytes=self._blocks[False] * self.bytes_per_block,
                misses=dict(self._misses),
                errors=self._errors,
                errors_in_a_row=self._errors_in_a_row,
                is_down=self._breaker.is_down,
                last_error=self._last_error,
                pending_bytes=self._pending,
                cached_blocks=self._count_stored(),
            )

    def close(self, timeout: float = 5.0) -> bool:
        """Refuse new batches, give up waiting ones, and let running calls finish; see `ExternalStore.close`."""
        if not self._process.is_current:
            return True
        self._stop()
        with self._lock:
            in_time: bool = self._changed.wait_for(lambda: self._num_threads <= 0, max(0.0, timeout))
            for batch in self._open.values():
                self._give_up(batch, "closed")
        self._buffers.clear()
        return in_time

    def _submit(
        self,
        kind: BatchKind,
        names: Sequence[Name],
        rows: NDArray[np.uint8] | None = None,
        spread: list[int] | None = None,
        owners: Owners | None = None,
    ) -> int:
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            now = self._runtime.monotonic()
            refused = "unavailable" if self._refuses(now) else "queue_full"
            moves_bytes = kind not in {"delete", "forget"}
            room = max(0, self.memory - self._pending) // self.bytes_per_block if moves_bytes else len(names)
            taken = list(names[: 0 if refused == "unavailable" else room])
            num_bytes = len(taken) * self.bytes_per_block if moves_bytes else 0
            self._tickets += 1
            batch = Batch(
                ticket=self._tickets,
                kind=kind,
                names=taken,
                rows=rows,
                reasons=[refused] * len(names),
                num_bytes=0,
                deadline=now + self.timeout_base + (self._pending + num_bytes) / _SLOWEST,
                age=self._age,
                spread=spread,
                owners=owners,
            )
            try:
                self._pending += num_bytes
                batch.num_bytes = num_bytes
                self._open[batch.ticket] = batch
                for _ in range(2):  # without calls of `poll`, nothing else removes batches that have ended
                    self._drop_ended_deadline()
                heappush(self._deadlines, (batch.deadline, batch.ticket))
                self._count_misses(batch, batch.reasons[len(taken) :])
                self._prepare(batch, names)
                self._order.add(batch)
                if not taken:
                    self._end(batch, [])
                elif not batch.before:
                    self._make_ready(batch)
                return batch.ticket
            except BaseException as error:
                self._open.pop(batch.ticket, None)
                self._recover(batch, error)
                raise

    def _make_ready(self, batch: Batch) -> None:
        self._order.ready[batch] = None
        if not self._is_refused(batch):
            self._call_thread()

    def _call_thread(self) -> None:
        """Make sure that a thread takes the ready batches; called with the lock held."""
        if (1 if self._breaker.is_down else len(self._order.ready)) <= self._idle:
            self._work.notify()
            return
        # A probe must not wait for hanging calls, so it may have an additional thread.
        if self._num_threads < self.threads + (self._lookup is not None) and not self._closed:
            self._num_threads += 1
            try:
                self._runtime.start_worker("blockyard-store", self._serve, self._stop, self._abandon)
            except BaseException as error:
                self._num_threads -= 1
                if not isinstance(error, RuntimeError):
                    raise
                self._note(error)  # cannot start a thread: another one takes the batch, or its deadline passes

    @contextmanager
    def _order_kept(self) -> Iterator[None]:
        """Restore the order of batches if an interrupt comes while some of them end, so that no other waits for them.

        It may also have come as a thread was called: call one again for a batch that is still ready.
        """
        if self._order.ready and self._first_ready() is not None:
            self._call_thread()
        try:
            yield
        except BaseException:
            self._restore_order()
            raise

    def _restore_order(self) -> None:
        for free in self._order.rebuild(self._open.values()):
            self._make_ready(free)

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._order.drop_lookups()
            for batch in self._open.values():
                if not batch.running:
                    self._give_up(batch, "closed")

    def _serve(self) -> None:
        """Run batches; return after a while without any."""
        taken: list[Batch] = []
        while True:
            try:
                if not self._next(taken):
                    return
                self._serve_one(taken[0])
            except BaseException as error:  # noqa: BLE001 (such as MemoryError: the batch is a miss)
                self._recover_surely(taken[0] if taken else None, error)
            taken.clear()  # a waiting thread must not keep the rows alive

    def _recover_surely(self, batch: Batch | None, error: BaseException) -> None:
        """Recover however long it takes to get the memory: without it, the store would lose a thread for good."""
        while True:
            try:
                with self._lock:
                    self._recover(batch, error)
                    return
            except MemoryError:  # noqa: PERF203 (rarely more than once)
                self._runtime.sleep(_MEMORY_SECONDS)

    def _abandon(self, error: BaseException) -> None:
        """Count a thread as ended that never got the memory to begin: another one may start."""
        with self._lock:
            self._num_threads -= 1
            self._note(error)
            self._changed.notify_all()

    def _next(self, taken: list[Batch]) -> bool:
        """Wait for a batch, and append it to `taken`. After a while without any, count the thread as ended.

        An exception as this returns leaves the batch in `taken`, so that its thread can end it.

        Returns:
            Whether there is a batch.
        """
        with self._lock:
            if self._first_ready() is None and not self._closed:
                self._idle += 1
                try:
                    self._work.wait_for(lambda: self._first_ready() or self._closed, _IDLE_SECONDS)
                finally:
                    self._idle -= 1
            batch = self._first_ready()
            if batch is None:
                self._changed.notify_all()
                self._num_threads -= 1
                return False
            taken.append(batch)
            self._order.withdraw(batch)
            batch.running = True
            return True

    def _first_ready(self) -> Batch | None:
        """Return the batch to run next; while the storage does not answer, only a lookup runs, as a probe."""
        if self._breaker.is_down:
            return self._lookup if self._lookup in self._order.ready else None
        return next(iter(self._order.ready), None)

    def _serve_one(self, batch: Batch) -> None:
        rows, reasons, error = None, ["error"] * len(batch.names), None
        began = self._runtime.monotonic()
        try:
            rows, reasons = self._carry_out(batch)
        except BaseException as caught:  # noqa: BLE001 (any exception of a plug-in is a miss)
            error = caught
        with self._lock:
            batch.running = False
            self._late.discard(batch)
            if error is not None:
                self._note(error)
            else:
                self._errors_in_a_row = 0
                if not self._breaker.is_down:
                    self._failures.worked()
            if not batch.ticket:
                self._end_lookup(answered=self._runtime.monotonic() - began < _DEAR)
            elif batch.ended:
                self._release(batch)
            else:
                batch.read = rows
                self._end(batch, reasons)
            if error is not None and self._runtime.monotonic() - began >= _DEAR:
                self._go_down()
        self._failures.flush(self)

    # ---- with the lock held ----

    def _end(self, batch: Batch, reasons: list[str]) -> None:
        """End a batch with these reasons."""
        batch.reasons[: len(reasons)] = reasons
        self._news[batch.ticket] = batch  # first, since `_recover` does not report a batch that has ended
        batch.ended = True
        self._count_misses(batch, reasons)
        if batch.kind in {"write", "put", "read", "get"}:
            self._blocks[not batch.is_read] += reasons.count("")
        self._conclude(batch)
        if not batch.is_read and not batch.running:
            self._release(batch)
        self._changed.notify_all()
        if self._event is not None:
            os.eventfd_write(self._event, 1)
        for follower in self._order.end(batch):
            self._make_ready(follower)

    def _count_misses(self, batch: Batch, reasons: list[str]) -> None:
        if batch.kind != "forget":  # it moves no blocks
            self._misses.update(filter(None, reasons))

    def _give_up(self, batch: Batch, reason: str) -> None:
        if batch.ended:
            return
        self._order.withdraw(batch)
        is_hung = batch.running and batch.deadline <= self._runtime.monotonic()
        if batch.running and batch.kind == "put":
            self._late.add(batch)
        if not batch.running:
            self._release(batch)
        self._end(batch, [reason] * len(batch.names))
        if is_hung:
            self._go_down()

    def _release(self, batch: Batch) -> None:
        self._pending -= batch.num_bytes
        batch.num_bytes = 0
        batch.read = None
        if not batch.is_read:
            batch.rows = None

    def _recover(self, batch: Batch | None, error: BaseException) -> None:
        """Recover from an exception that interrupted changes for a batch: make it a miss, and reorder the others."""
        if batch is not None:
            batch.running = False
            self._late.discard(batch)
            if not batch.ticket:
                self._lookup = None
            elif not batch.ended:
                batch.reasons = ["error"] * len(batch.reasons)
                batch.ended = True
                self._news[batch.ticket] = batch
            self._release(batch)
        self._note(error)
        self._restore_order()
        self._changed.notify_all()
        if self._event is not None:
            os.eventfd_write(self._event, 1)

    def _note(self, error: BaseException) -> None:
        """Count an error. Thread-safe."""
        cause = hide_secrets(describe(error), self._secrets)
        with self._lock:
            self._errors += 1
            self._errors_in_a_row += 1
            self._last_error = cause
            self._failures.failed(cause)

    # ---- storage that does not answer; called with the lock held ----

    def _go_down(self) -> None:
        """Refuse batches until a probe is answered. Those that wait end as they are polled or collected."""
        if self._breaker.trip():
            self._failures.failed("it does not answer")
            self._refused = iter(list(self._open))
            self._changed.notify_all()
            if self._event is not None:
                os.eventfd_write(self._event, 1)

    def _is_refused(self, batch: Batch) -> bool:
        """Return whether a batch waits for storage that does not answer."""
        return self._breaker.is_down and not batch.running and batch.ticket > 0

    def _give_up_some(self) -> bool:
        """Give up overdue batches and refused ones. Returns whether some may be left.

        At most `_GIVEN_UP_AT_ONCE`, since the caller may be an engine's thread; the next calls give up the others.
        """
        now = self._runtime.monotonic()
        for _ in range(_GIVEN_UP_AT_ONCE):
            if self._drop_ended_deadline():
                continue
            if not self._deadlines or self._deadlines[0][0] >= now:
                break
            self._give_up(self._open[self._deadlines[0][1]], "timeout")
        tickets = list(islice(self._refused, _GIVEN_UP_AT_ONCE)) if self._breaker.is_down else []
        for ticket in tickets:
            batch = self._open.get(ticket)
            if batch is not None and self._is_refused(batch):
                self._give_up(batch, "unavailable")
        return len(tickets) == _GIVEN_UP_AT_ONCE or (bool(self._deadlines) and self._deadlines[0][0] < now)

    def _drop_ended_deadline(self) -> bool:
        """Remove the first deadline if its batch has ended. Returns whether it had."""
        if not self._deadlines:
            return False
        batch = self._open.get(self._deadlines[0][1])
        is_ended = batch is None or batch.ended
        if is_ended:
            heappop(self._deadlines)
        return is_ended

    def _refuses(self, now: float) -> bool:
        if self._breaker.is_probe_due(now):
            self._look()
        return self._breaker.is_down

    def _look(self) -> None:
        """Start a lookup, unless one is running. Goes on after an interrupted call."""
        if self._closed:
            return
        if self._lookup is None:
            self._lookup = Batch(0, "has", [], None, [], 0, inf, self._age)
        if not self._lookup.running and not (self._lookup in self._order.ready and self._num_threads):
            self._make_ready(self._lookup)

    def _end_lookup(self, *, answered: bool) -> None:
        self._lookup = None
        if self._breaker.end_probe(answered=answered):
            self._failures.worked()
            for _ in range(min(len(self._order.ready), self.threads)):
                self._call_thread()


def _is_same(rows: NDArray[np.uint8], others: NDArray[np.uint8]) -> bool:
    """Return whether two arrays share the same memory."""
    return rows.shape == others.shape and rows.ctypes.data == others.ctypes.data
