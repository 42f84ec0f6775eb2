"""Worker threads, which stop before the interpreter shuts down, and what their callers wait with.

At shutdown, Python ends any thread that is still running when it next takes the interpreter lock. Inside torch's C++
code this aborts the process, which loses its exit code and traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from blockyard.errors import OutOfMemoryError

__all__ = ["IDLE_SECONDS", "Condition", "Polls", "start_worker"]

IDLE_SECONDS: Final = 0.5
"""How long an idle thread waits for work before it ends: starting one costs as much as a small batch."""

_RESTLESS_SECONDS: Final = 0.0005  # polls closer together than this come from a caller that does nothing else
_PARTING_SECONDS: Final = 10.0
_ATTEMPTS, _PAUSE_SECONDS = 10, 0.1  # of a thread that lacks memory
_log = logging.getLogger("blockyard.workers")
_running: dict[threading.Thread, Callable[[], None]] = {}  # threads and the calls that stop them


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
