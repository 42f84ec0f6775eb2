"""What the copy engine and stores share: threads, memory that is used again, and results that no interrupt loses.

Threads end before the interpreter does, and a fork gets an error.

The interpreter stops a thread that outlasts it wherever that thread next takes its lock. Within torch's C++ code this
aborts the process, and its exit code and traceback are lost.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import starmap
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import ForkedError, StoreError

__all__ = ["Buffers", "CallPool", "Process", "keep", "missing", "start_worker"]

_PARTING_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 0.5  # how long a thread waits for more to do
_KEPT_BYTES: Final = 256 << 20  # of memory that is used again
T = TypeVar("T")
_log = logging.getLogger("blockyard.workers")
_running: dict[threading.Thread, Callable[[], None]] = {}  # each with what makes it end


class Process:
    """The process that made an object, and the only one that can use its threads.

    Args:
        what: names the object, for the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this is the process, and not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse work in a fork: it would wait for ever, for threads or for a lock that one of them held.

        Raises:
            ForkedError: this is a fork.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self._what} was made by process {self._pid}, this is its fork {os.getpid()}: make one here"
            )


def keep(into: list[T], call: Callable[..., T], *arguments: object) -> T:
    """Call, and append what the call returns to a list.

    C code does both, so no `KeyboardInterrupt` comes between them if the call is C code, too.

    Returns:
        What the call has returned.
    """
    into.extend(starmap(call, (arguments,)))
    return into[-1]


def missing(what: str, error: ModuleNotFoundError) -> ImportError:
    """Say which extra brings a module that is not installed; of a module of another kind the error as it is."""
    module = (error.name or "").partition(".")[0]
    extra = {
        "torch": "torch",
        "transformers": "demo",
        "rich": "demo",
        "hypothesis": "testing",
        "prometheus_client": "metrics",
    }.get(module)
    if extra is None:
        return error
    return ImportError(f'{what} needs {module}: pip install "blockyard[{extra}]"', name=module)


def start_worker(name: str, run: Callable[[], None], stop: Callable[[], None]) -> threading.Thread:
    """Start a thread that ends before the interpreter does.

    Args:
        name: of the thread.
        run: what it does.
        stop: makes `run` return soon; called when the interpreter ends.

    Returns:
        The thread, which has started.
    """

    def work() -> None:
        try:
            run()
        except MemoryError:  # as the thread began: what needs one starts another
            _log.warning("thread %s ends for want of memory", name)
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=work, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except BaseException:
        _running.pop(thread, None)
        raise
    return thread


@dataclass(slots=True, eq=False)
class _Calls:
    """The calls of a batch, numbered from 0."""

    call: Callable[[int], None]
    total: int
    begun: int = 0
    running: int = 0
    errors: list[BaseException] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def is_taken(self) -> bool:
        """Whether no call is to begin any more."""
        return self.begun == self.total or bool(self.errors)


class CallPool:
    """Makes calls of several batches at once, those of a batch in their order.

    A thread a batch would be idle while the batch's last calls end, and starting threads costs as much as a request.
    The thread that waits for a batch makes calls of it too. So a batch goes on if the pool's threads all hang.

    Args:
        most: calls at once, as far as batches leave the pool any.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._batches: deque[_Calls] = deque()
        self._running = self._threads = self._idle = 0
        self._closed = False

    def each(self, total: int, call: Callable[[int], None]) -> None:
        """Call with 0 to `total - 1`, some at once; raises the first error, after which no call begins."""
        calls = _Calls(call, total)
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
                    self._work.notify()  # for the place that this thread leaves
        calls.ended.wait()
        if calls.errors:
            raise calls.errors[0]

    def close(self) -> None:
        """Let the threads end; of batches that have not ended no call begins any more."""
        with self._lock:
            self._closed = True
            for calls in self._batches:
                calls.errors.append(StoreError("the store is closed"))
            self._work.notify_all()

    def _serve(self) -> None:
        """Make calls of any batch until none has come for a while."""
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
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            calls.errors.append(error)

    # ---- with the lock held ----

    def _invite(self, count: int) -> None:
        """Wake threads, or start them, for `count` calls."""
        count = min(count, self._most - self._running)
        self._work.notify(count)
        for _ in range(min(count - self._idle, self._most - self._threads)):
            self._threads += 1
            try:
                start_worker("blockyard-store", self._serve, self.close)
            except RuntimeError:  # no thread can be started: fewer do the work
                self._threads -= 1
                return

    def _find(self) -> _Calls | None:
        """Wait for a batch with calls that the pool may begin; none after a while."""
        while not self._closed:
            while self._batches and self._batches[0].is_taken:
                self._batches.popleft()
            if self._batches and self._running < self._most:
                return self._batches[0]
            self._idle += 1
            is_called = self._work.wait(_IDLE_SECONDS)
            self._idle -= 1
            if not is_called and not self._batches:
                break
        return None

    def _begin(self, calls: _Calls) -> int | None:
        """Count a call as begun; none if no call is to begin any more."""
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


def _fresh(num_bytes: int) -> NDArray[np.uint8]:
    return np.empty(num_bytes, np.uint8)


class Buffers:
    """Memory that was given back, for whoever asks next. It holds whatever was in it.

    The first use of fresh memory costs as much as copying it, or far more if it is page-locked.

    Args:
        make: makes an array uint8 of at least the bytes that it is given.
        max_bytes: most bytes that are kept.
    """

    def __init__(self, make: Callable[[int], NDArray[np.uint8]] = _fresh, max_bytes: int = _KEPT_BYTES) -> None:
        self._make = make
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []

    def take(self, count: int, width: int) -> NDArray[np.uint8]:
        """Return an array uint8 `[count, width]` with any content."""
        size, array = count * width, None
        with self._lock:
            for index in range(len(self._free) - 1, -1, -1):  # what was used last is in the cache
                if size <= self._free[index].nbytes <= 2 * size:
                    array = self._free.pop(index)
                    break
        if array is None:
            array = self._make(size)
        return array[:size].reshape(count, width)

    def give(self, array: NDArray[np.uint8] | None) -> None:
        """Take back an array from `take`, or a view of it, that nobody uses any more."""
        while array is not None and isinstance(array.base, np.ndarray):
            array = array.base
        if array is None or not array.nbytes or array.nbytes > self._max_bytes:
            return
        with self._lock:
            self._free.append(array.reshape(-1))
            while sum(free.nbytes for free in self._free) > self._max_bytes:
                del self._free[0]

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._free.clear()


@atexit.register
def _end_workers() -> None:
    """End all threads; one that hangs in a system call or on a device is left behind."""
    until = time.monotonic() + _PARTING_SECONDS
    workers = list(_running.items())
    for _, stop in workers:
        stop()
    for thread, _ in workers:
        thread.join(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_running.clear)
