"""Helpers of the copy engine and the stores: threads, reusable buffers, results that survive interrupts, log limits.

Worker threads stop before the interpreter shuts down. Using them after a fork raises an error.

At shutdown, Python ends any thread that is still running when it next takes the interpreter lock. Inside torch's C++
code this aborts the process, which loses its exit code and traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import starmap
from types import FrameType
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import ForkedError, OutOfMemoryError

__all__ = [
    "Buffers",
    "Claims",
    "Condition",
    "Polls",
    "Process",
    "RateLimit",
    "as_error",
    "describe",
    "fresh_pages",
    "interrupts_blocked",
    "keep",
    "missing",
    "open_event",
    "start_worker",
]

_EXTRAS: Final = {
    "cuda": "elastic",
    "greenlet": "sim",
    "hypothesis": "testing",
    "lupa": "sim",
    "mooncake": "mooncake",
    "msgspec": "events",
    "obstore": "s3",
    "opentelemetry": "otel",
    "plotly": "html",
    "prometheus_client": "metrics",
    "rich": "cli",
    "shtab": "cli",
    "torch": "torch",
    "transformers": "demo",
    "zmq": "events",
}
"""Modules that Blockyard imports only where needed, with the extra of pyproject.toml that installs each."""

_RESTLESS_SECONDS: Final = 0.0005  # polls closer together than this come from a caller that does nothing else
_PARTING_SECONDS: Final = 10.0
_ATTEMPTS, _PAUSE_SECONDS = 10, 0.1  # of a thread that lacks memory
_KEPT_BYTES: Final = 256 << 20  # kept for reuse
_HUGE_PAGE: Final = 2 << 20
_LOGGED_SECONDS: Final = 60.0
T = TypeVar("T")
_log = logging.getLogger("blockyard.workers")
_running: dict[threading.Thread, Callable[[], None]] = {}  # threads and the calls that stop them


class Process:
    """The process that created an object. Only it can use the object's threads.

    Args:
        what: name of the object for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this is still the current process, not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise in a fork, where waiting for a thread, or for a lock that one of them held, would hang.

        Raises:
            ForkedError: this is a fork.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self._what} was created by process {self._pid}, this is its fork {os.getpid()}: create one here"
            )


class Polls:
    """Tracks the polls of an object, and lets other threads run while its caller does nothing but poll.

    Otherwise another thread would wait up to 5 ms every time it needs the interpreter's lock.
    """

    def __init__(self) -> None:
        self._at = 0.0

    def note(self) -> None:
        """Note a poll that found nothing; a second one within half a millisecond yields the lock."""
        before, self._at = self._at, time.monotonic()
        if self._at - before < _RESTLESS_SECONDS:
            time.sleep(0)


class Condition(threading.Condition):
    """A condition whose `wait` holds the lock again after an interrupt, wherever that comes.

    `threading.Condition` may leave its lock released, so that the caller's `with` block ends with a `RuntimeError`
    instead of the `KeyboardInterrupt`. Enter the lock itself, not the condition: an interrupt in
    `threading.Condition.__enter__` would leave it locked.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for a notification, and lock again; see `threading.Condition.wait`."""
        try:
            return super().wait(timeout)
        except BaseException:
            while not self._is_owned():  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    self.acquire()
            raise


def keep(into: list[T], call: Callable[..., T], *arguments: object) -> T:
    """Make a call and append its result to a list.

    Both happen in C, so if `call` is C code too, no `KeyboardInterrupt` can come between them.

    Returns:
        The result of the call.
    """
    into.extend(starmap(call, (arguments,)))
    return into[-1]


def open_event(owner: object) -> int:
    """Open an event descriptor that is closed when its owner is collected, even if an exception ends this call."""
    opened: list[int] = []
    # Not at exit: threads still use it then, and its number could already belong to another file.
    weakref.finalize(owner, _close, opened).atexit = False
    return keep(opened, os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def describe(error: BaseException) -> str:
    """Return an error's class and message on one line, even if its `str` raises."""
    # Without a limit it would read the frames of all errors that led to this one.
    described = traceback.TracebackException(type(error), error, None, limit=0)
    return " ".join("".join(described.format_exception_only()).split())


def as_error(error: BaseException) -> Exception:
    """Return an exception of a call into another package; its panic in Rust, a BaseException, as a RuntimeError.

    Raises:
        BaseException: anything else, such as KeyboardInterrupt, is raised again.
    """
    if isinstance(error, Exception):
        return error
    if type(error).__name__ == "PanicException":
        return RuntimeError(f"panic: {error}")
    raise error


def missing(what: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Name the extra that installs a missing module; return the error itself if none does.

    Args:
        what: what needs the module, in words that the user knows.
        error: error of the failed import.
    """
    module = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(module)
    if extra is None:
        return error
    return ModuleNotFoundError(f'{what} needs {module}: pip install "blockyard[{extra}]"', name=module)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C while processes start: they inherit this, and their parent alone acts on it.

    In this process, one that comes meanwhile is handled at the end of the context.
    """
    from multiprocessing import resource_tracker  # noqa: PLC0415 (only who starts processes needs it)

    resource_tracker.ensure_running()  # its start unblocks the signal
    handler = signal.getsignal(signal.SIGINT)
    is_handled = callable(handler) and threading.current_thread() is threading.main_thread()
    caught: list[tuple[int, FrameType | None]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if is_handled:  # another thread may still receive the signal, which Python then handles in this one
            signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_handled:
            signal.signal(signal.SIGINT, handler)
    if caught and callable(handler):
        handler(*caught[0])


class Claims:
    """Which object uses each shared thing: at most one uses it. A user that is collected no longer does."""

    def __init__(self) -> None:
        # By the thing's id: its user refers to it, so the id stays its own for as long as the entry.
        self._users: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # reentrant: collecting garbage may run other objects' code

    def user(self, thing: object) -> object | None:
        """Return the object that uses a thing, or None."""
        return self._users.get(id(thing))

    def take(self, thing: object, user: object) -> bool:
        """Return whether nothing else used the thing; from now on `user` does, which must refer to it."""
        with self._lock:
            return self._users.setdefault(id(thing), user) is user

    def hand_over(self, thing: object, user: object) -> None:
        """Let `user` use the thing instead of its present user."""
        with self._lock:
            self._users[id(thing)] = user

    def drop(self, thing: object, user: object) -> None:
        """End `user`'s use of the thing. Idempotent."""
        with self._lock:
            if self._users.get(id(thing)) is user:
                del self._users[id(thing)]


class RateLimit:
    """Allows one log line of each kind per minute.

    Args:
        clock: function that returns the time in seconds; the machine's clock if None.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or (lambda: time.monotonic())  # noqa: PLW0108 (tests replace the clock)
        self._passed: dict[str, float] = {}  # kinds logged in the last minute

    def passes(self, kind: str) -> bool:
        """Return whether to log a line of this kind now."""
        now = self._clock()
        self._passed = {known: at for known, at in self._passed.items() if now < at + _LOGGED_SECONDS}
        if kind in self._passed:
            return False
        self._passed[kind] = now
        return True


def start_worker(
    name: str,
    run: Callable[[], None],
    stop: Callable[[], None],
    abandon: Callable[[BaseException], None] | None = None,
) -> threading.Thread:
    """Start a thread that ends before the interpreter shuts down.

    Args:
        name: name of the thread.
        run: the thread's work. After a `MemoryError`, which may come before its first line, it is called again.
        stop: makes `run` return soon; called when the interpreter ends.
        abandon: fails everything that callers wait for; called in the thread if `run` never gets
            enough memory.

    Returns:
        The started thread.

    Raises:
        RuntimeError: no thread can be started.
    """
    if sys.is_finalizing():  # before Python 3.12, `Thread.start` would wait forever
        raise RuntimeError(f"thread {name} cannot be started: the interpreter is ending")

    def work() -> None:
        try:
            run()
        except MemoryError:
            _try_again(name, run, abandon)
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


def _try_again(name: str, run: Callable[[], None], abandon: Callable[[BaseException], None] | None) -> None:
    """Run a thread's work again after a `MemoryError`: a caller may be waiting for it without a timeout."""
    for _ in range(_ATTEMPTS):
        time.sleep(_PAUSE_SECONDS)
        with contextlib.suppress(MemoryError):
            run()
            return
    error = OutOfMemoryError(f"thread {name} ended: out of memory")
    while abandon is not None:  # this needs memory too
        with contextlib.suppress(MemoryError):
            abandon(error)
            break
        time.sleep(_PAUSE_SECONDS)
    _log.warning("thread %s ended: out of memory", name)


def fresh_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory that starts at a page, in huge pages where it is large enough, uint8 `[num_bytes]`.

    A file store reads into it in place. The kernel then pins one page instead of 512, which halves the time of a read.

    Raises:
        MemoryError: the system has too little memory.
    """
    is_large = num_bytes >= _HUGE_PAGE
    try:
        memory = mmap.mmap(-1, max(1, num_bytes + (_HUGE_PAGE if is_large else 0)), mmap.MAP_PRIVATE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes: {error}") from error
    start = 0
    if is_large:
        start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE
        with contextlib.suppress(OSError):  # kernels without them refuse, which only affects speed
            memory.madvise(mmap.MADV_HUGEPAGE)
    # Not a slice: its base would be the whole mapping, which `Buffers.give` would keep.
    return np.frombuffer(memory, np.uint8, num_bytes, start)


class Buffers:
    """A pool of reusable arrays. Their contents are arbitrary.

    The first use of fresh memory costs as much as copying it, or far more if it is page-locked.

    Args:
        make: function that returns a uint8 array of at least the given number of bytes.
        max_bytes: maximum number of bytes to keep.
    """

    def __init__(self, make: Callable[[int], NDArray[np.uint8]] = fresh_pages, max_bytes: int = _KEPT_BYTES) -> None:
        self._make = make
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []

    def take(self, count: int, width: int) -> NDArray[np.uint8]:
        """Return a uint8 array `[count, width]` with arbitrary contents."""
        size, array = count * width, None
        with self._lock:
            for index in range(len(self._free) - 1, -1, -1):  # the most recently used one is in the CPU cache
                if size <= self._free[index].nbytes <= 2 * size:
                    array = self._free.pop(index)
                    break
        if array is None:
            array = self._make(size)
        return array[:size].reshape(count, width)

    def give(self, array: NDArray[np.uint8] | None) -> None:
        """Return an array from `take`, or a view of it, to the pool; the caller must no longer use it."""
        while array is not None and isinstance(array.base, np.ndarray):
            array = array.base
        if array is None or not array.nbytes or array.nbytes > self._max_bytes:
            return
        with self._lock:
            self._free.append(array.reshape(-1))
            while sum(free.nbytes for free in self._free) > self._max_bytes:
                del self._free[0]

    def clear(self) -> None:
        """Free all kept arrays."""
        with self._lock:
            self._free.clear()


@atexit.register
def _end_workers() -> None:
    """Stop all threads; abandon any that hang in a system call or on a device."""
    until = time.monotonic() + _PARTING_SECONDS
    workers = list(_running.items())
    for _, stop in workers:
        stop()
    for thread, _ in workers:
        thread.join(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_running.clear)
