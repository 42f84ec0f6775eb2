"""Streams and events of a CUDA device, for the copy engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import torch

from blockyard.engine.cuda.capture import relax_thread, relaxed_capture
from blockyard.engine.streams import Event, StreamName, WorkerStreams
from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.workers.ownership import Process

__all__ = ["CudaEvent", "CudaStreams", "with_index"]

# Lower goes first; torch clamps to the device's range.
_PRIORITIES: dict[StreamName, int] = {"copy": -1, "in": -1, "out": 0}


def with_index(device: str | torch.device) -> torch.device:
    """Return a device with its index: `cuda` is the current device.

    Another one may be current later, and in every new thread it is device 0.

    Raises:
        InvalidArgumentError: there is no such device, or none that the copies support.
    """
    found = None
    with suppress(RuntimeError, TypeError):  # of a type unknown to torch
        found = torch.device(device)
    if found is None or found.type not in {"cpu", "cuda"}:
        raise InvalidArgumentError(f"device is {str(device)!r:.100}, must be 'cpu', 'cuda' or 'cuda:' and an index")
    if found.type != "cuda" or cast("int | None", found.index) is not None:
        return found
    try:
        return torch.device("cuda", torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:  # without a driver, in a build without CUDA
        raise InvalidArgumentError(f"device is 'cuda', but torch finds no CUDA device: {error}") from error


class CudaEvent:
    """An event on a CUDA stream.

    Args:
        stream: the stream to record it on.
        error: exception from launching the preceding work.
    """

    def __init__(self, stream: torch.cuda.Stream, error: Exception | None = None) -> None:
        self.error = error
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def query(self) -> bool:
        """Whether it has fired; never waits."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait until it has fired."""
        self.event.synchronize()


class CudaStreams:
    """One stream each for loads, stores and copies within the device; a thread for copies within host memory.

    Loads and stores use separate copy engines, so neither delays the other. Compute is the current stream of this
    device at the time of a call, whichever device is current.

    Args:
        device: a CUDA device; `cuda` is the current one.
    """

    chunk_bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = with_index(device)
        self._streams = {
            name: torch.cuda.Stream(device=self._device, priority=priority) for name, priority in _PRIORITIES.items()
        }
        # Its thread waits for device events, which a capture would forbid.
        self._host = WorkerStreams(prepare=relax_thread)
        self._computed: dict[torch.cuda.Stream, CudaEvent] = {}  # the last work on each compute stream
        self._process = Process("CUDA streams")
        self._closed = False

    def launch(self, stream: StreamName, work: Callable[[], None], waits: Sequence[Event] = ()) -> Event:
        """Queue work at the end of a stream; see `Streams.launch`.

        The work runs immediately with that stream current, so what it queues runs in the stream's order. On the
        `"host"` stream it runs later, in the thread. The call waits for events of that stream, because a device cannot.
        """
        if self._closed:
            raise BlockyardError(f"the streams are closed: nothing can be launched on {stream!r}")
        if stream in {"host", "caller"}:
            return self._host.launch(stream, work, waits)
        target = torch.cuda.current_stream(self._device) if stream == "compute" else self._streams[stream]
        for event in waits:
            if isinstance(event, CudaEvent):
                target.wait_event(event.event)
            else:
                event.synchronize()
        failed = None
        with torch.cuda.stream(target):
            try:
                work()
            except Exception as error:  # noqa: BLE001 (the transfer reports it)
                failed = error
        try:
            # A call that fails halfway has queued its first half.
            event = CudaEvent(target, failed)
        except torch.AcceleratorError as error:
            raise error from failed
        if stream == "compute":
            self._computed[target] = event
        return event

    def fence(self) -> Event:
        """Mark the current end of the current stream."""
        return CudaEvent(torch.cuda.current_stream(self._device))

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        with torch.cuda.device(self._device):  # torch checks only the current device
            return bool(torch.cuda.is_current_stream_capturing())

    def order_compute(self, event: Event) -> None:
        """Make the current stream wait for an event; for an event of the `"host"` stream, the call itself waits."""
        if isinstance(event, CudaEvent):
            torch.cuda.current_stream(self._device).wait_event(event.event)
        else:
            event.synchronize()

    def close(self) -> None:
        """Wait for all launched work. Idempotent; does nothing in a forked child."""
        if self._closed or not self._process.is_current:
            return
        self._closed = True
        self._host.close()
        # An engine may be garbage-collected during a capture.
        with relaxed_capture():
            for stream in self._streams.values():
                stream.synchronize()
            for event in self._computed.values():
                event.synchronize()
