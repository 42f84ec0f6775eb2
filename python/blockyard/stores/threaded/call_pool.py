"""`CallPool`: runs the calls of several batches concurrently, for storage that serves one block per call."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blockyard.errors import StoreError
from blockyard.stores.threaded.runtime import runtime
from blockyard.workers.threads import IDLE_SECONDS

__all__ = ["CallPool"]


@dataclass(slots=True, eq=False)
class _Calls:
    """The calls of a batch, numbered from 0."""

    call: Callable[[int], None]
    total: int
    ended: Any  # an event
    begun: int = 0
    running: int = 0
    errors: list[BaseException] = field(default_factory=list)

    @property
    def is_taken(self) -> bool:
        """Whether no further call will start."""
        return self.begun == self.total or bool(self.errors)


class CallPool:
    """Runs the calls of several batches concurrently; each batch's calls start in order.

    The batches share threads: with one thread per batch, threads would idle while a batch's last calls finish, and
    starting a thread costs as much as a request. The thread that waits for a batch runs its calls too, so the batch
    progresses even if all pool threads hang.

    Args:
        max_running: pool threads start a call only while fewer than this many run.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._runtime = runtime()
        self._lock = self._runtime.lock()
        self._work = self._runtime.condition(self._lock)
        self._batches: deque[_Calls] = deque()
        self._running = self._threads = self._idle = 0
        self._closed = False

    def each(self, total: int, call: Callable[[int], None]) -> None:
        """Call with 0 to `total - 1`, concurrently. After an error no further call starts; raises the first."""
        calls = _Calls(call, total, self._runtime.event())
        with self._lock:
            if total > 1:
                self._batches.append(calls)
                self._invite(total - 1)
            number = self._begin(calls)
        while number is not None:
            self._call(calls, number)
            with self._lock:
                self._end(calls)
                number = self._begin(calls)
                if number is None and self._idle and self._batches:
                    self._work.notify()  # this thread's slot is free
        calls.ended.wait()
        if calls.errors:
            raise calls.errors[0]

    def close(self) -> None:
        """Stop the threads; unfinished batches start no further calls."""
        with self._lock:
            self._closed = True
            for calls in self._batches:
                calls.errors.append(StoreError("the store is closed"))
            self._work.notify_all()

    def _serve(self) -> None:
        """Run calls of any batch; return after a while without work."""
        calls = None
        while True:
            with self._lock:
                if calls is not None:
                    self._end(calls)
                calls = self._find()
                number = None if calls is None else self._begin(calls)
                if calls is None or number is None:
                    self._threads -= 1
                    return
            self._call(calls, number)

    @staticmethod
    def _call(calls: _Calls, number: int) -> None:
        try:
            calls.call(number)
        except BaseException as error:  # noqa: BLE001 (raised in the waiting thread)
            calls.errors.append(error)

    # ---- with the lock held ----

    def _invite(self, count: int) -> None:
        """Wake or start threads for `count` calls."""
        count = min(count, self._max_running - self._running)
        self._work.notify(count)
        for _ in range(min(count - self._idle, self._max_running - self._threads)):
            self._threads += 1
            try:
                self._runtime.start_worker("blockyard-store", self._serve, self.close)
            except RuntimeError:  # cannot start a thread: go on with fewer
                self._threads -= 1
                return

    def _find(self) -> _Calls | None:
        """Wait for a batch that the pool can work on; None on timeout."""
        while not self._closed:
            while self._batches and self._batches[0].is_taken:
                self._batches.popleft()
            if self._batches and self._running < self._max_running:
                return self._batches[0]
            self._idle += 1
            is_called = self._work.wait(IDLE_SECONDS)
            self._idle -= 1
            if not is_called and not self._batches:
                break
        return None

    def _begin(self, calls: _Calls) -> int | None:
        """Count a call as started and return its number; None if no further call will start."""
        if calls.is_taken:
            if not calls.running:
                calls.ended.set()
            return None
        calls.begun += 1
        calls.running += 1
        self._running += 1
        return calls.begun - 1

    def _end(self, calls: _Calls) -> None:
        self._running -= 1
        calls.running -= 1
        if calls.is_taken and not calls.running:
            calls.ended.set()
