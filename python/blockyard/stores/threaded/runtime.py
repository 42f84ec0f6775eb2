"""`Runtime`: the clock, locks, threads and randomness of stores and their callers: the system's, or a simulation's.

An object uses the runtime that was current when the object was created.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from blockyard.workers.threads import Condition, start_worker

__all__ = ["MACHINE", "Runtime", "runtime", "use_runtime"]


class Runtime:
    """The system's runtime. A simulation overrides every method."""

    def monotonic(self) -> float:
        """Return the time in seconds since an arbitrary point."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        time.sleep(seconds)

    def wait_readable(self, descriptor: int, seconds: float) -> None:
        """Wait until a file descriptor is readable, for at most `seconds`."""
        events = select.poll()
        events.register(descriptor, select.POLLIN)
        events.poll(1e3 * seconds)

    def random_bytes(self, count: int) -> bytes:
        """Return unpredictable random bytes."""
        return os.urandom(count)

    def lock(self) -> Any:
        """Return a lock, like `threading.Lock`."""
        return threading.Lock()

    def rlock(self) -> Any:
        """Return a reentrant lock, like `threading.RLock`."""
        return threading.RLock()

    def condition(self, lock: Any) -> Any:
        """Return a condition over a lock of this runtime, like `threading.Condition`."""
        return Condition(lock)

    def event(self) -> Any:
        """Return an event, like `threading.Event`."""
        return threading.Event()

    def start_worker(
        self,
        name: str,
        run: Callable[[], None],
        stop: Callable[[], None],
        abandon: Callable[[BaseException], None] | None = None,
    ) -> Any:
        """Start a thread, like `blockyard.workers.threads.start_worker`. The result has `join` and `is_alive`."""
        return start_worker(name, run, stop, abandon)


MACHINE: Final = Runtime()
_in_use: list[Runtime] = [MACHINE]


def runtime() -> Runtime:
    """Return the current runtime, for an object that is being created."""
    return _in_use[-1]


@contextmanager
def use_runtime(other: Runtime) -> Iterator[None]:
    """Use another runtime for objects created in the `with` block."""
    _in_use.append(other)
    try:
        yield
    finally:
        _in_use.pop()
