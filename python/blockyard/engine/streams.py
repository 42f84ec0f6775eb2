"""Streams and events of the copy engine: the interface, and its implementation by a worker thread on a CPU.

Work on one stream runs in launch order; only events order streams relative to each other. Two streams belong to the
caller. `"compute"` is where compute runs: on a CPU the calling thread, on CUDA the current stream. `"caller"` is the
calling thread on any device, for work between memory of the host.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, TypeAlias

from blockyard.errors import BlockyardError, CaptureError
from blockyard.workers.ownership import Process
from blockyard.workers.threads import Condition, Polls, start_worker

__all__ = ["PIECE_BYTES", "STREAMS", "Event", "StreamName", "Streams", "WorkerStreams", "refuse_capture"]

StreamName: TypeAlias = Literal["copy", "in", "host", "out", "compute", "caller"]

STREAMS: Final[tuple[StreamName, ...]] = ("copy", "in", "host", "out")
"""The streams besides the caller's two. If they share a worker, earlier ones are served first."""

PIECE_BYTES: Final = 8 << 20
"""Maximum bytes per piece of work if streams share a worker, so that a load waits for at most one piece of a store."""

_IDLE_SECONDS = 1.0


class Event(Protocol):
    """A point in a stream; it fires when all earlier work has run."""

    @property
    def error(self) -> Exception | None:
        """The exception raised by the work before it; None while it runs, and if none was raised."""

    def query(self) -> bool:
        """Whether it has fired; never waits."""

    def synchronize(self) -> None:
        """Wait until it has fired."""


class Streams(Protocol):
    """Streams of one device.

    Attributes:
        chunk_bytes: longer transfers are launched in pieces of this size; None if streams do not delay one another.
    """

    chunk_bytes: int | None

    def launch(self, stream: StreamName, work: Callable[[], None], waits: Sequence[Event] = ()) -> Event:
        """Append work to a stream; never waits, except on the calling thread's stream.

        Args:
            stream: the stream. On the calling thread's, the work has run when this returns.
            work: runs once, in the stream's order; an exception becomes the event's error.
            waits: events that must fire before it, and before anything after it on the stream, runs.

        Returns:
            An event that fires when the work is done.

        Raises:
            BlockyardError: the streams are closed.
        """

    def fence(self) -> Event:
        """Mark the current end of the compute stream."""

    def capturing(self) -> bool:
        """Whether work on the compute stream goes into a graph instead of running."""

    def order_compute(self, event: Event) -> None:
        """Make the compute stream wait for an event; if that is the calling thread, wait."""

    def close(self) -> None:
        """Wait for all launched work. Idempotent."""


def refuse_capture(streams: Streams) -> None:
    """Refuse a call that waits for, queries or records events, which would break a graph capture.

    Raises:
        CaptureError: a graph is being captured on the compute stream.
    """
    if streams.capturing():
        raise CaptureError("a graph is being captured and cannot hold this call: make it before or after the capture")


class _Fired:
    """The end of a stream that is the calling thread: all earlier work has run."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class _WorkerEvent:
    """A piece of work of a `WorkerStreams`, and the event that it has run."""

    __slots__ = ("error", "fired", "foreign", "own", "streams", "work")

    def __init__(self, streams: WorkerStreams, work: Callable[[], None], waits: Sequence[Event]) -> None:
        self.streams = streams
        self.work = work
        self.own = [wait for wait in waits if isinstance(wait, _WorkerEvent) and wait.streams is streams]
        self.foreign = [wait for wait in waits if not isinstance(wait, _Fired) and wait not in self.own]
        self.error: Exception | None = None
        self.fired = False

    def query(self) -> bool:
        if not self.fired:
            self.streams.polls.note()
        return self.fired

    def synchronize(self) -> None:
        if not self.fired:
            self.streams.wait_for(lambda: self.fired)

    def is_ready(self) -> bool:
        return all(event.fired for event in self.own)


class WorkerStreams:
    """All streams except the caller's, served by one thread that starts with the first work and ends when idle.

    Among streams whose next work may run, the first in `STREAMS` is served. Work that waits for another device's event
    blocks all streams until the event fires. At interpreter shutdown, running work finishes and the rest is dropped. A
    fork has no such thread: there, `launch` and unfired events raise `ForkedError`.

    Args:
        prepare: called in the thread before its first work.
    """

    chunk_bytes: int | None = PIECE_BYTES

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._process = Process("a worker stream")
        self.polls = Polls()
        self._prepare = prepare
        # Enter the lock itself, not the condition: an interrupt within `Condition.__enter__` would leave it locked.
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._queues: dict[StreamName, deque[_WorkerEvent]] = {name: deque() for name in STREAMS}
        self._running: _WorkerEvent | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def launch(self, stream: StreamName, work: Callable[[], None], waits: Sequence[Event] = ()) -> Event:
        """Append work to a stream; see `Streams.launch`."""
        self._process.check()
        if stream not in self._queues:
            return self._run_here(stream, work, waits)
        event = _WorkerEvent(self, work, waits)
        with self._lock:
            if self._closed:
                raise BlockyardError(f"the streams are closed: nothing can be launched on {stream!r}")
            self._queues[stream].append(event)
            if self._thread is None:
                self._thread = start_worker("blockyard-copy", self._serve, self._give_up, self._abandon)
            self._changed.notify_all()
        return event

    def fence(self) -> Event:
        """Return a fired event: compute runs in the calling thread."""
        return _Fired()

    def capturing(self) -> bool:
        """Return False: a CPU has no graphs."""
        return False

    def order_compute(self, event: Event) -> None:
        """Wait for an event: compute runs in the calling thread."""
        event.synchronize()

    def close(self) -> None:
        """Wait for all launched work. Idempotent; does nothing in a fork."""
        if not self._process.is_current:
            return
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self.wait_for(lambda: self._thread is None)

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Wait until the worker has reached a point. Raises ForkedError."""
        self._process.check()
        with self._lock:
            self._changed.wait_for(reached)

    def _run_here(self, stream: StreamName, work: Callable[[], None], waits: Sequence[Event]) -> Event:
        if self._closed:
            raise BlockyardError(f"the streams are closed: nothing can be launched on {stream!r}")
        for event in waits:
            event.synchronize()
        try:
            work()
        except Exception as error:  # noqa: BLE001 (whatever it is, the transfer reports it)
            return _Fired(error)
        return _Fired()

    def _give_up(self) -> None:
        """Let running work finish, and start nothing else."""
        with self._lock:
            self._closed = True
            for event in [event for queue in self._queues.values() for event in queue]:
                event.error = BlockyardError("the interpreter ended before this work began")
                event.fired = True
            for queue in self._queues.values():
                queue.clear()
            self._changed.notify_all()

    def _serve(self) -> None:
        with self._lock:
            # If an interrupt came right after the thread's start, `launch` may start another one: only one may serve.
            self._thread = self._thread or threading.current_thread()
            if self._thread is not threading.current_thread():
                return
        try:
            if self._prepare is not None:
                self._prepare()
            while (event := self._next()) is not None:
                try:
                    for foreign in event.foreign:
                        foreign.synchronize()
                    event.work()
                except BaseException as error:  # noqa: BLE001 (whatever it is, the transfer reports it)
                    event.error = _reported(error)
                with self._lock:
                    event.fired = True
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (nothing may wait for an ended thread)
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        """End running and queued work with an error: the thread is ending, so it cannot run."""
        with self._lock:
            if self._running is not None and not self._running.fired:
                self._running.error, self._running.fired = _reported(error), True
            for queue in self._queues.values():
                for event in queue:
                    event.error, event.fired = _reported(error), True
                queue.clear()
            self._running = self._thread = None
            self._changed.notify_all()

    def _next(self) -> _WorkerEvent | None:
        """Take the next work that may run; None ends the thread."""
        with self._lock:
            self._changed.wait_for(lambda: self._closed or any(self._queues.values()), _IDLE_SECONDS)
            # Events fire only in this thread, so the oldest queued work never waits for an unfired one.
            for queue in self._queues.values():
                if queue and queue[0].is_ready():
                    self._running = queue[0]
                    return queue.popleft()
            self._running = self._thread = None
            self._changed.notify_all()
            return None


def _reported(error: BaseException) -> Exception:
    """Convert an error for a transfer's report; exceptions that would end the program are wrapped."""
    if isinstance(error, Exception):
        return error
    wrapped = BlockyardError(f"the work was ended by {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
