"""`EngineRuntime`: the loop's runtime with one engine's own clock, which may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockyard.stores.threaded.runtime import Runtime
from blockyard.tools.sim.loop import Loop

__all__ = ["EngineRuntime"]


class EngineRuntime(Runtime):
    """The runtime of one engine. Its clock starts at a random time, and can jump.

    Args:
        loop: does everything else.

    Attributes:
        ahead: seconds by which the clock has jumped ahead.
    """

    def __init__(self, loop: Loop) -> None:
        self.ahead = 0.0
        self._loop = loop
        self._start = loop.random.uniform(1e3, 1e6)

    def monotonic(self) -> float:
        """Return the engine's time."""
        return self._start + self._loop.now + self.ahead

    def sleep(self, seconds: float) -> None:
        """Let the task sleep."""
        self._loop.sleep(seconds)

    def wait_readable(self, descriptor: int, seconds: float) -> None:  # noqa: ARG002 (no task waits on descriptors)
        """Let the task sleep; descriptors are real, and time is not."""
        self._loop.sleep(seconds)

    def random_bytes(self, count: int) -> bytes:
        """Return random bytes of the loop's seed."""
        return self._loop.random_bytes(count)

    def lock(self) -> Any:
        """Return a lock of the loop."""
        return self._loop.lock()

    def rlock(self) -> Any:
        """Return a lock of the loop."""
        return self._loop.rlock()

    def condition(self, lock: Any) -> Any:
        """Return a condition of the loop."""
        return self._loop.condition(lock)

    def event(self) -> Any:
        """Return a flag of the loop."""
        return self._loop.event()

    def start_worker(self, name: str, run: Callable[[], None], *_: object) -> Any:
        """Start a task of the loop in place of a thread."""
        return self._loop.start(name, run)
