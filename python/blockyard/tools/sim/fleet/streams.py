"""`SimulatedStreams`: one engine's copy streams in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from blockyard.engine.streams import STREAMS, Event, StreamName
from blockyard.errors import BlockyardError
from blockyard.tools.sim.loop import Loop

__all__ = ["SimulatedStreams"]

_USUAL_SECONDS: Final = 0.001
_SLOW: Final = 200.0  # one copy in ten is slower by this factor


class CopyError(BlockyardError):
    """A copy failed."""


class _Fires:
    """An event of a loop."""

    def __init__(self, loop: Loop) -> None:
        self.error: Exception | None = None
        self._fired = loop.event()

    def query(self) -> bool:
        return self._fired.is_set()

    def synchronize(self) -> None:
        self._fired.wait()

    def run(self, work: Callable[[], None]) -> _Fires:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (the event's, as in other streams)
            self.error = error
        self._fired.set()
        return self


class SimulatedStreams:
    """Streams whose copies take a random time; see `blockyard.engine.streams.Streams`. Compute is the calling task.

    Args:
        loop: provides time and randomness.

    Attributes:
        loss: share of copies that fail.
    """

    chunk_bytes: int | None = None

    def __init__(self, loop: Loop) -> None:
        self.loss = 0.0
        self._loop = loop
        self._last: dict[str, _Fires] = {}

    def launch(self, stream: StreamName, work: Callable[[], None], waits: Sequence[Event] = ()) -> Event:
        """Append work to a stream."""
        loop, event = self._loop, _Fires(self._loop)
        if stream not in STREAMS:
            for wait in waits:
                wait.synchronize()
            return event.run(work)
        before, self._last[stream] = self._last.get(stream), event

        def carry() -> None:
            for wait in (*waits, *([] if before is None else [before])):
                wait.synchronize()
            slow = _SLOW if loop.random.random() < 0.1 else 1.0
            loop.sleep(loop.random.expovariate(1 / _USUAL_SECONDS) * slow)
            event.run(_fail if loop.random.random() < self.loss else work)

        loop.start("copy", carry)
        return event

    def fence(self) -> Event:
        """Return an event that has fired: compute runs in the calling task."""
        return _Fires(self._loop).run(lambda: None)

    def capturing(self) -> bool:
        """Return False: there are no CUDA graphs."""
        return False

    def order_compute(self, event: Event) -> None:
        """Wait for an event."""
        event.synchronize()

    def close(self) -> None:
        """Wait for all copies."""
        for event in self._last.values():
            event.synchronize()


def _fail() -> None:
    raise CopyError("the copy failed")
