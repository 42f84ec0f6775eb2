"""Jobs of engine adapters over a store, written as generators that yield the calls they wait for.

A job yields `(submit, *arguments)`, a call that returns a ticket, and is sent the ticket's `Completion`; if the call
raises, the exception is raised in the job. Or it yields a float, to sleep for that many seconds.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Final, TypeAlias, TypeVar

from blockyard.errors import StoreError
from blockyard.stores import Completion, ExternalStore
from blockyard.workers.interrupts import keep, open_event
from blockyard.workers.ownership import Process
from blockyard.workers.threads import IDLE_SECONDS, start_worker

__all__ = ["Steps", "StoreJobs", "collect", "run"]

T = TypeVar("T")
Steps: TypeAlias = Generator[Any, Any, T]
_LOG = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.05  # how often it checks deadlines, which no descriptor signals
_POLL_SECONDS: Final = 0.001  # how often it polls a store without a descriptor


def collect(store: ExternalStore, submit: Callable[..., int], *arguments: object) -> Completion:
    """Submit a batch to a store and wait for its answer. If either raises, the batch is given up."""
    tickets: list[int] = []
    try:
        return store.wait(keep(tickets, submit, *arguments))
    except BaseException:
        for ticket in tickets:
            with suppress(Exception):  # already collected
                store.wait(ticket, 0.0)
        raise


def run(store: ExternalStore, steps: Steps[T]) -> T:
    """Run a job in this thread and return its result."""
    go_on: Callable[[], Any] = partial(next, steps)
    while True:
        try:
            call = go_on()
        except StopIteration as end:
            found: T = end.value
            return found
        if isinstance(call, float):
            time.sleep(call)
            go_on = partial(next, steps)
            continue
        try:
            go_on = partial(steps.send, collect(store, *call))
        except Exception as error:  # noqa: BLE001 (the job decides)
            go_on = partial(steps.throw, error)


@dataclass(slots=True, eq=False)
class _Job:
    """A job: `tickets` holds the ticket that it waits for, `outcome` the answer or exception."""

    lane: str
    steps: Steps[Any]
    future: Future[Any] = field(default_factory=Future)
    tickets: list[int] = field(default_factory=list)
    resume_at: float = 0.0
    outcome: tuple[Any, BaseException | None] | None = None


class StoreJobs:
    """Runs jobs over a store in one thread, which waits for all of them at once and copies for each in turn.

    Args:
        store: only this object may poll it; others may wait for their own tickets.
        name: name of the thread.
        lanes: for each kind of job, how many run at once. The others wait in order of submission.
    """

    def __init__(self, store: ExternalStore, name: str, lanes: Mapping[str, int]) -> None:
        self._store, self._name, self._lanes = store, name, lanes
        self._process = Process("a thread for a store")
        self._lock = threading.Lock()  # guards the queue, and whether there is a thread
        self._waiting: dict[str, deque[_Job]] = {lane: deque() for lane in lanes}
        self._has_thread = self._closed = False
        # An interrupt during thread start may leave two threads: they take turns, and each ends when idle.
        self._turns = threading.Lock()  # guards all below
        self._running: list[_Job] = []
        self._ended: set[int] = set()  # ended tickets, not processed yet
        self._wake = open_event(self)

    def submit(self, lane: str, steps: Steps[T]) -> Future[T]:
        """Start a job; never waits. Its future can be cancelled until the job starts.

        Raises:
            StoreError: this object is closed, or no thread can be started.
        """
        self._process.check()
        job = _Job(lane, steps)
        try:
            with self._lock:
                if self._closed:
                    raise StoreError("jobs over a store are closed")
                if not self._has_thread:
                    self._start()
                self._waiting[lane].append(job)
                os.eventfd_write(self._wake, 1)
        except BaseException:
            job.future.cancel()  # the caller of an interrupted call submits it again
            raise
        return job.future

    def close(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """Accept no more jobs, and wait for the existing ones. Idempotent; does nothing in a fork.

        Args:
            cancel: whether to drop jobs that have not started.
            timeout: seconds to wait; None waits forever.
        """
        if not self._process.is_current:
            return
        with self._lock:
            self._closed = True
            os.eventfd_write(self._wake, 1)
            waiting = [job for jobs in self._waiting.values() for job in jobs]
        for job in waiting if cancel else ():
            job.future.cancel()
        wait([job.future for job in (*waiting, *self._running) if not job.future.cancelled()], timeout)

    def _start(self) -> None:
        self._has_thread = True
        try:
            start_worker(self._name, self._serve, self._stop, self._abandon)
        except BaseException as error:
            self._has_thread = False
            if isinstance(error, RuntimeError):
                raise StoreError(f"no thread for a store: {error}") from error
            raise

    def _stop(self) -> None:
        self.close(cancel=True, timeout=0.0)

    # ---- in the thread ----

    def _serve(self) -> None:
        while True:
            try:
                self._wait_for_news()
                with self._turns:
                    self._turn()
                if not self._running and self._is_idle():
                    return
            except BaseException:  # noqa: BLE001, PERF203 (such as MemoryError: the next turn goes on)
                _LOG.exception("a turn of %s failed", self._name)
                time.sleep(_LOOK_SECONDS)

    def _abandon(self, error: BaseException) -> None:
        """End all jobs with an error: the thread is ending."""
        with self._lock:
            self._has_thread = False
            for jobs in self._waiting.values():
                self._running += jobs
                jobs.clear()
        with self._turns:
            while self._running:
                self._running[-1].outcome = self._running[-1].outcome or (None, error)
                self._end(self._running[-1])

    def _wait_for_news(self) -> None:
        """Wait until the store may have answers, a job is submitted, or a sleeping job is due."""
        if not self._running:
            return
        now, seconds, events = time.monotonic(), _POLL_SECONDS, select.poll()
        events.register(self._wake, select.POLLIN)
        with suppress(Exception):  # a store may have no descriptor
            events.register(self._store.event_fd(), select.POLLIN)
            pauses = [job.resume_at - now for job in self._running if not job.tickets]
            seconds = max(0.0, min([_LOOK_SECONDS, *pauses]))
        events.poll(1e3 * seconds)

    def _turn(self) -> None:
        """Advance all jobs as far as possible."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        try:
            self._ended.update(self._store.poll() if self._running else ())
        except Exception as error:  # noqa: BLE001 (if the store raises, its jobs end)
            _LOG.warning("%r cannot be polled: %r", self._store, error)
            self._ended.update(ticket for job in self._running for ticket in job.tickets)
        now = time.monotonic()
        for job in list(self._running):
            if job.outcome is not None or (self._ended.issuperset(job.tickets) and job.resume_at <= now):
                self._advance(job)
        self._ended.clear()
        while (begun := self._next()) is not None:
            self._advance(begun)

    def _is_idle(self) -> bool:
        """Wait for a job. Return true if the thread should end: no job for a while, or closed."""
        events = select.poll()
        events.register(self._wake, select.POLLIN)
        if events.poll(0.0 if self._closed else 1e3 * IDLE_SECONDS):
            return False
        with self._lock:
            if any(self._waiting.values()):
                return False
            self._has_thread = False
            return True

    def _next(self) -> _Job | None:
        """Start a job whose lane has room."""
        busy = Counter(job.lane for job in self._running)
        with self._lock:
            for lane, waiting in self._waiting.items():
                while waiting and busy[lane] < self._lanes[lane]:
                    if waiting[0].future.cancelled():
                        # Otherwise whoever waits for it, such as `close`, would wait forever.
                        waiting.popleft().future.set_running_or_notify_cancel()
                        continue
                    # In this order, a turn that fails in between loses no job: it may leave it in both.
                    job = waiting[0]
                    begins = job not in self._running
                    if begins:
                        self._running.append(job)
                    waiting.popleft()
                    if begins:
                        return job
        return None

    def _advance(self, job: _Job) -> None:
        """Advance a job to its next call, or to its end."""
        try:
            # A job may be cancelled until here: then it must not run, as its caller has its memory back.
            has_begun = job.future.running() or (job.future.done() and not job.future.cancelled())
            if job.outcome is None and (has_begun or job.future.set_running_or_notify_cancel()):
                self._go_on(job)
        except StopIteration as end:
            job.outcome = (end.value, None)
        except BaseException as error:  # noqa: BLE001 (reported by the job's future)
            job.outcome = (None, error)
        if job.outcome is not None or job.future.cancelled():
            self._end(job)

    def _go_on(self, job: _Job) -> None:
        if getgeneratorstate(job.steps) == GEN_CLOSED:
            raise StoreError("the end of a job was interrupted")
        go_on: Callable[[], Any] = partial(job.steps.send, None)
        if job.tickets:
            try:
                go_on = partial(job.steps.send, self._store.wait(job.tickets[-1], 0.0))
                job.tickets.clear()
            except Exception as error:  # noqa: BLE001 (the job decides)
                self._let_go(job)
                go_on = partial(job.steps.throw, error)
        while True:
            call = go_on()
            if isinstance(call, float):
                job.resume_at = time.monotonic() + call
                return
            try:
                keep(job.tickets, *call)
                return
            except Exception as error:  # noqa: BLE001 (the job decides)
                go_on = partial(job.steps.throw, error)

    def _end(self, job: _Job) -> None:
        self._let_go(job)
        with suppress(Exception):
            job.steps.close()
        value, error = job.outcome or (None, None)
        if not job.future.done():
            if error is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(error)
        self._running.remove(job)

    def _let_go(self, job: _Job) -> None:
        """Make the store drop an answer that is no longer needed."""
        for ticket in job.tickets:
            with suppress(Exception):
                self._store.wait(ticket, 0.0)
        job.tickets.clear()
