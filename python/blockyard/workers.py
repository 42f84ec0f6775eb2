"""What the copy engine and stores share: threads, and the folder of what `blockyard calibrate` found.

Threads end before the interpreter does, and a fork gets an error.

The interpreter stops a thread that outlasts it wherever that thread next takes its lock. Within torch's C++ code this
aborts the process, and its exit code and traceback are lost.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from blockyard.errors import ForkedError

__all__ = ["Process", "cache_folder", "start_worker"]

_PARTING_SECONDS: Final = 10.0
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
        if not self.is_current:
            raise ForkedError(
                f"{self._what} was made by process {self._pid}, this is its fork {os.getpid()}: make one here"
            )


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


def cache_folder() -> Path:
    """Return the folder of what was calibrated: BLOCKYARD_CACHE, or `blockyard/` in the user's cache folder."""
    folder = os.environ.get("BLOCKYARD_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) if folder else Path(base) / "blockyard"
