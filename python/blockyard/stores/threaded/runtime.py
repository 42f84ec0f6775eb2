"""`Runtime`: the clock, locks, threads and chance of stores and what waits for them: the machine's, or a simulation's.

An object takes the runtime in use when it is made, and keeps it.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from blockyard.workers import start_worker

__all__ = ["MACHINE", "Runtime", "runtime", "use_runtime"]


class Runtime:
    """The machine's own. A simulation overrides every method."""

    def monotonic(self) -> float:
        """Return the time in seconds, from any start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let the thread wait."""
        time.sleep(seconds)

    def wait_readable(self, descriptor: int, seconds: float) -> None:
        """Wait until a file descriptor can be read, at most for a time."""
        events = select.poll()
        events.register(descriptor, select.POLLIN)
        events.poll(1e3 * seconds)

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody else draws."""
        return os.urandom(count)

    def lock(self) -> Any:
        """Return a lock, as `threading.Lock`."""
        return threading.Lock()

    def rlock(self) -> Any:
        """Return a lock that its holder may take again, as `threading.RLock`."""
        return threading.RLock()

    def condition(self, lock: Any) -> Any:
        """Return a condition over a lock of this runtime, as `threading.Condition`."""
        return threading.Condition(lock)

    def event(self) -> Any:
        """Return a flag to wait for, as `threading.Event`."""
        return threading.Event()

    def start_worker(self, name: str, run: Callable[[], None], stop: Callable[[], None]) -> Any:
        """Start a thread, as `blockyard.workers.start_worker`; returns what has `join` and `is_alive`."""
        return start_worker(name, run, stop)


MACHINE: Final = Runtime()
_in_use: list[Runtime] = [MACHINE]


def runtime() -> Runtime:
    """Return the runtime in use, for an object that is being made."""
    return _in_use[-1]


@contextmanager
def use_runtime(other: Runtime) -> Iterator[None]:
    """Let objects that are made in the `with` block use another runtime."""
    _in_use.append(other)
    try:
        yield
    finally:
        _in_use.pop()
