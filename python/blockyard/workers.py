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
from collections.abc import Callable
from itertools import starmap
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import ForkedError

__all__ = ["Buffers", "Process", "keep", "missing", "start_worker"]

_EXTRAS: Final = {
    "cuda": "elastic",
    "greenlet": "sim",
    "hypothesis": "testing",
    "msgspec": "events",
    "obstore": "s3",
    "opentelemetry": "otel",
    "prometheus_client": "metrics",
    "rich": "cli",
    "shtab": "cli",
    "torch": "torch",
    "transformers": "demo",
    "zmq": "events",
}
"""Modules that Blockyard imports only where they are used, each with the extra of pyproject.toml that installs it."""

_PARTING_SECONDS: Final = 10.0
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


def missing(what: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Say which extra installs a missing module; the error itself if no extra does.

    Args:
        what: what needs the module, in the user's words.
        error: the failed import.
    """
    module = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(module)
    if extra is None:
        return error
    return ModuleNotFoundError(f'{what} needs {module}: pip install "blockyard[{extra}]"', name=module)


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
