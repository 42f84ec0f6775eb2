"""Jobs of engine adapters over a store, written as generators: each yields the calls whose answers it needs.

A job yields `(submit, *arguments)`, a call that returns a ticket, and is sent the ticket's `Completion`; what the call
raises is raised in the job. Or it yields seconds, as a float, after which it goes on.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
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
from blockyard.workers import Process, keep, start_worker

__all__ = ["Steps", "StoreJobs", "run"]

T = TypeVar("T")
Steps: TypeAlias = Generator[Any, Any, T]
_LOG = logging.getLogger(__name__)
_IDLE_SECONDS: Final = 0.5  # how long the thread waits for another job
_LOOK_SECONDS: Final = 0.05  # how often it looks for deadlines, which no descriptor tells
_POLL_SECONDS: Final = 0.001  # how often it looks for the answers of a store without a descriptor


def collect(store: ExternalStore, submit: Callable[..., int], *arguments: object) -> Completion:
    """Submit a batch to a store and wait for its answer. If either raises, the store gives the batch up."""
    tickets: list[int] = []
    try:
        return store.wait(keep(tickets, submit, *arguments))
    except BaseException:
        for ticket in tickets:
            with suppress(Exception):  # it has been collected
                store.wait(ticket, 0.0)
        raise


def run(store: ExternalStore, steps: Steps[T]) -> T:
    """Carry out a job in this thread, and return what it returns."""
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
    """A job: `tickets` has that of the call whose answer it waits for, and `outcome` what it returned or raised."""

    lane: str
    steps: Steps[Any]
    future: Future[Any] = field(default_factory=Future)
    tickets: list[int] = field(default_factory=list)
    resume_at: float = 0.0
    outcome: tuple[Any, BaseException | None] | None = None


class StoreJobs:
    """Carries out jobs over a store in one thread, which waits for all of them at once and copies for each in turn.

    Args:
        store: it alone may be polled by this object; others may wait for tickets of their own.
        name: of the thread.
        lanes: kinds of jobs, and how many of each are under way at once. The others wait in order of submission.
    """

    def __init__(self, store: ExternalStore, name: str, lanes: Mapping[str, int]) -> None:
        self._store, self._name, self._lanes = store, name, lanes
        self._process = Process("a thread for a store")
        self._lock = threading.Lock()  # over what waits, and whether there is a thread
        self._waiting: dict[str, deque[_Job]] = {lane: deque() for lane in lanes}
        self._has_thread = self._closed = False
        # An interrupt as a thread starts may bring a second one: they take turns, and each ends when it is idle.
        self._turns = threading.Lock()  # over all below
        self._running: list[_Job] = []
        self._ended: set[int] = set()  # tickets that have ended, and were not looked at
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)

    def submit(self, lane: str, steps: Steps[T]) -> Future[T]:
        """Start a job; never waits. Its future can be cancelled until the job begins.

        Raises:
            StoreError: this is closed, or there can be no thread.
        """
        self._process.check()
        job = _Job(lane, steps)
        with self._lock:
            if self._closed:
                raise StoreError("jobs over a store are closed")
            if not self._has_thread:
                self._start()
            self._waiting[lane].append(job)
            os.eventfd_write(self._wake, 1)
        return job.future

    def close(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """Take no more jobs, and wait for those that there are; twice does nothing.

        Args:
            cancel: drops the jobs that have not begun.
            timeout: seconds to wait; for ever if None.
        """
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
            start_worker(self._name, self._serve, self._stop)
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
            except BaseException:  # noqa: BLE001, PERF203 (want of memory, say: the next turn goes on)
                _LOG.exception("a turn of %s failed", self._name)
                time.sleep(_LOOK_SECONDS)

    def _wait_for_news(self) -> None:
        """Wait until the store may have answers, a job is submitted, or one that pauses goes on."""
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
        """Take all jobs as far as they go."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        try:
            self._ended.update(self._store.poll() if self._running else ())
        except Exception as error:  # noqa: BLE001 (whatever a store raises, its jobs end)
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
        """Wait for a job. If none comes for a while, or this is closed, the thread is to end."""
        events = select.poll()
        events.register(self._wake, select.POLLIN)
        if events.poll(0.0 if self._closed else 1e3 * _IDLE_SECONDS):
            return False
        with self._lock:
            if any(self._waiting.values()):
                return False
            self._has_thread = False
            return True

    def _next(self) -> _Job | None:
        """Begin a job whose lane has room."""
        busy = Counter(job.lane for job in self._running)
        with self._lock:
            for lane, waiting in self._waiting.items():
                while waiting and busy[lane] < self._lanes[lane]:
                    if waiting[0].future.cancelled():
                        waiting.popleft()
                        continue
                    self._running.append(waiting.popleft())
                    return self._running[-1]
        return None

    def _advance(self, job: _Job) -> None:
        """Take a job to its next call, or to its end."""
        try:
            has_begun = job.future.running() or job.future.done()
            if job.outcome is None and (has_begun or job.future.set_running_or_notify_cancel()):
                self._go_on(job)
        except StopIteration as end:
            job.outcome = (end.value, None)
        except BaseException as error:  # noqa: BLE001 (the job's future has it)
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
        """Have the store let go of an answer that nobody takes."""
        for ticket in job.tickets:
            with suppress(Exception):
                self._store.wait(ticket, 0.0)
        job.tickets.clear()
