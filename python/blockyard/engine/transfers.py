"""The transfers of the copy engine: queued, in flight and ended, and the memory to keep until then.

A transfer starts when it is submitted, except for loads that are not needed yet (prefetches). Those are queued while
other loads are in flight, and at most a window of them is handed to the device ahead. So no prefetch delays a load that
a request waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard.engine.plans import TransferPlan, Work
from blockyard.engine.streams import PIECE_BYTES, Event, StreamName, Streams, refuse_capture
from blockyard.errors import (
    BlockyardError,
    CaptureError,
    InvalidArgumentError,
    TransferQueueFullError,
)
from blockyard.layout.sizes import as_int
from blockyard.workers import Process

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OnFull", "Transfer", "Transfers"]

OnFull: TypeAlias = Literal["wait", "refuse"]


class Transfer:
    """A transfer of the copy engine, in flight or ended. Every call raises `CaptureError` inside a graph capture.

    Attributes:
        error: the failure, after which no byte of its destinations is valid. None if all landed, and while in flight.
        rows: the result of a read, uint8 `[n, bytes_per_block]`; None before it has ended, and for other transfers.
    """

    __slots__ = ("_transfers", "error", "rows")

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self.error: Exception | None = None
        self.rows: NDArray[np.uint8] | None = None

    def __repr__(self) -> str:
        return f"Transfer({'in flight' if self in self._transfers else self.error or 'landed'})"

    @property
    def done(self) -> bool:
        """Whether it has ended; queries the device, never waits."""
        return self._transfers.has_ended(self)

    def wait(self) -> Self:
        """Wait for it to end, and raise its `error` if it failed.

        Returns:
            The transfer itself.
        """
        self._transfers.wait(self)
        if self.error is not None:
            raise self.error
        return self

    def order_compute(self, layer: int | None = None) -> None:
        """Make compute queued from now on wait for it; on a CPU, wait here.

        Args:
            layer: 0-based; wait only for this layer and earlier ones. A transfer not submitted `by_layer` is waited for
                as a whole.

        Raises:
            InvalidArgumentError: there is no such layer.
        """
        self._transfers.order_compute(self, layer)


@dataclass(slots=True, eq=False)
class _Job:
    """An open transfer. Its pieces run on one stream, so the event of the last one fires last."""

    transfer: Transfer
    number: int
    plan: TransferPlan
    stream: StreamName
    pieces: deque[Work]  # not launched yet
    after: tuple[_Job, ...]
    after_compute: Event | None
    prefetch: bool
    on_end: Callable[[Transfer], None] | None
    piece_bytes: int = field(init=False)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.piece_bytes = -(-self.plan.num_bytes // len(self.pieces))

    @property
    def end(self) -> Event:
        return self.events[-1]

    @property
    def ended(self) -> bool:
        return not self.pieces and self.end.query()

    @property
    def ready(self) -> bool:
        """Whether its next piece would run at once, without blocking work launched after it."""
        return all(job.ended for job in self.after) and (self.after_compute is None or self.after_compute.query())

    def waits(self) -> Iterator[Event]:
        yield from (job.end for job in self.after)
        if self.after_compute is not None:
            yield self.after_compute

    def touches_device(self, first: int) -> bool:
        """Whether it uses a device block with at least this id."""
        return any(self.plan.mapping.reach[column] > first for column in self.plan.device_columns)

    def writes_same_block(self, other: _Job) -> bool:
        """Whether two loads write a common block; loads conflict in no other way."""
        return bool(np.isin(self.plan.mapping.pairs[:, 1], other.plan.mapping.pairs[:, 1]).any())


class Transfers:
    """Submits transfers, and ends them when their events have fired. Use from one thread of one process.

    Args:
        streams: the device's streams.
        max_outstanding: maximum bytes in flight on one stream; a longer transfer runs alone.
        max_ahead: maximum bytes of prefetches on a stream; one piece is always allowed.
    """

    def __init__(self, streams: Streams, *, max_outstanding: int, max_ahead: int = 8 * PIECE_BYTES) -> None:
        max_outstanding, max_ahead = as_int("max_outstanding", max_outstanding), as_int("max_ahead", max_ahead)
        if max_outstanding < 1 or max_ahead < 1:
            raise InvalidArgumentError(
                f"max_outstanding is {max_outstanding} bytes, max_ahead {max_ahead}, must be at least 1"
            )
        self.process = Process("a copy engine")
        self.streams = streams
        self._max_outstanding = max_outstanding
        self._max_ahead = max_ahead
        self._open: dict[Transfer, _Job] = {}  # in submission order
        self._queue: deque[_Job] = deque()  # prefetches with unlaunched pieces, oldest first
        self._ahead: deque[tuple[Event, int]] = deque()  # their launched pieces, with their bytes
        self._outstanding: dict[StreamName, int] = {}
        self._submitted = 0
        # Set while a call changes the fields above; if set when a call begins, the last call was interrupted.
        self._in_critical_section = False

    def __contains__(self, transfer: Transfer) -> bool:
        return transfer in self._open

    def check(self) -> None:
        """Check that a call is allowed, before it touches a stream.

        Raises:
            ForkedError: this is a fork of the process that created the engine.
            CaptureError: a graph is being captured.
        """
        self.process.check()
        refuse_capture(self.streams)

    def open(self) -> tuple[Transfer, ...]:
        """Return the transfers not yet known to have ended, in submission order."""
        return tuple(self._open)

    def outstanding(self, stream: StreamName) -> int:
        """Return the bytes of a stream's transfers not yet known to have ended."""
        return self._outstanding.get(stream, 0)

    def has_room(self, num_bytes: int, *streams: StreamName) -> bool:
        """Whether `make_room` would neither wait nor refuse on any of these streams, as of the last progress."""
        limit = self._max_outstanding - num_bytes
        return all(not (taken := self.outstanding(stream)) or taken <= limit for stream in streams)

    def make_room(self, stream: StreamName, num_bytes: int, on_full: OnFull) -> None:
        """Wait until `num_bytes` more can be in flight on a stream.

        Raises:
            TransferQueueFullError: they cannot yet, and `on_full` is `"refuse"`.
            InvalidArgumentError: `on_full` is neither `"wait"` nor `"refuse"`.
        """
        if on_full not in {"wait", "refuse"}:
            raise InvalidArgumentError(f"on_full is {on_full!r}, must be 'wait' or 'refuse'")
        self.process.check()
        self._recover_from_interrupt()
        self._progress()
        while self.outstanding(stream) and self.outstanding(stream) + num_bytes > self._max_outstanding:
            if on_full == "refuse":
                raise TransferQueueFullError(
                    f"{self.outstanding(stream)} bytes are in flight on stream {stream!r}, {num_bytes} more would "
                    f"exceed the limit of {self._max_outstanding}"
                )
            oldest = next(job for job in self._open.values() if job.stream == stream)
            self._start(oldest)
            oldest.end.synchronize()
            self._progress()

    def submit(
        self,
        stream: StreamName,
        plan: TransferPlan,
        *,
        after: Sequence[Transfer] = (),
        after_compute: Event | None = None,
        prefetch: bool = False,
        on_end: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Submit a transfer; call `make_room` first.

        Args:
            stream: stream to run on.
            plan: the work.
            after: transfers that must end before it runs, including those queued by synchronous calls.
            after_compute: an event that must fire before it runs.
            prefetch: whether the load is not needed yet: it starts when no other load is in flight, when it is waited
                for, or when another transfer names it in `after`.
            on_end: called once, when it has ended.

        Raises:
            InvalidArgumentError: a transfer in `after` belongs to another engine; nothing was submitted.
        """
        self.process.check()
        self._recover_from_interrupt()
        named = [self._job(transfer) for transfer in after]
        queued = [job for job in self._open.values() if job.stream == "compute"]
        earlier = tuple(job for job in (*named, *queued) if job is not None)
        self._in_critical_section = True
        self._submitted += 1
        transfer = Transfer(self)
        pieces = deque(plan.pieces)
        job = _Job(transfer, self._submitted, plan, stream, pieces, earlier, after_compute, prefetch, on_end)
        self._open[transfer] = job
        self._outstanding[stream] = self.outstanding(stream) + plan.num_bytes
        if prefetch:
            self._queue.append(job)
            self._prefetch()
        else:
            self._start(job)
        self._in_critical_section = False
        return transfer

    def capture(self, plan: TransferPlan) -> Transfer:
        """Capture a transfer into the graph of the compute stream; it counts as ended.

        Raises:
            CaptureError: transfers are open, which a graph cannot wait for.
        """
        if self._open:
            raise CaptureError(f"{len(self._open)} transfers are open: wait for them before the capture begins")
        for piece in plan.pieces:
            plan.in_range(piece)()
        return Transfer(self)

    def poll(self) -> None:
        """Complete finished transfers, and start prefetches that are due; never waits."""
        self.check()
        self._recover_from_interrupt()
        self._progress()

    def has_ended(self, transfer: Transfer) -> bool:
        """Whether a transfer has ended; never waits."""
        self.check()
        self._recover_from_interrupt()
        job = self._job(transfer)
        if job is not None and (job.prefetch or job.ended):
            self._progress()
        return transfer not in self._open

    def failed_to_launch(self, transfer: Transfer) -> bool:
        """Whether launching a transfer's work raised; never waits."""
        job = self._job(transfer)
        return job is not None and any(event.error is not None for event in job.events)

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer to end."""
        self.check()
        self._recover_from_interrupt()
        job = self._job(transfer)
        if job is not None:
            self._start(job)
            job.end.synchronize()
            self._progress()

    def order_compute(self, transfer: Transfer, layer: int | None = None) -> None:
        """Make the compute stream wait for a transfer, or for its layers up to this one."""
        self.check()
        self._recover_from_interrupt()
        job = self._job(transfer)
        if job is None:
            return
        layers = job.plan.layers
        if layer is not None and layers and not 0 <= layer < len(layers):
            raise InvalidArgumentError(f"layer is {layer}, must be 0 to {len(layers) - 1}")
        self._start(job)
        self.streams.order_compute(job.end if layer is None or not layers else job.events[layers[layer]])

    def synchronize(self, first_device_block: int | None = None) -> None:
        """Wait for all transfers in flight, or those that touch device blocks with at least this id."""
        self.check()
        self._recover_from_interrupt()
        for job in tuple(self._open.values()):
            if first_device_block is None or job.touches_device(first_device_block):
                self._start(job)
                job.end.synchronize()
        self._progress()

    def _job(self, transfer: Transfer) -> _Job | None:
        """Return the job of a transfer; None if it has ended."""
        if transfer._transfers is not self:  # noqa: SLF001 (its own module)
            raise InvalidArgumentError("the transfer belongs to another engine")
        return self._open.get(transfer)

    def _recover_from_interrupt(self) -> None:
        """After an interrupt, fail the transfers that the interrupted call was launching: their progress is unknown."""
        if not self._in_critical_section:
            return
        for stream in {job.stream for job in self._open.values()}:
            self.streams.launch(stream, _nothing).synchronize()
        for job in tuple(self._open.values()):
            error = BlockyardError("the transfer was being launched when a call of the engine was interrupted")
            self._end(job, error if job.pieces or not job.events else None)
        self._open, self._outstanding = {}, {}
        self._queue.clear()
        self._ahead.clear()
        self._in_critical_section = False

    # ---- starting ----

    def _start(self, job: _Job) -> None:
        """Launch the rest of a transfer on its stream, after work that it must not overtake."""
        if not job.pieces:
            return
        before, self._in_critical_section = self._in_critical_section, True
        for other in job.after:
            self._start(other)
        if job.stream == "in":
            # Loads of one block keep their order, whether or not they are waited for.
            for other in [other for other in self._queue if other.number < job.number and other.writes_same_block(job)]:
                self._start(other)
        while job.pieces:
            self._launch_piece(job)
        if job.prefetch:
            self._queue.remove(job)
            job.prefetch = False
        self._in_critical_section = before

    def _launch_piece(self, job: _Job) -> None:
        event = self.streams.launch(job.stream, job.plan.in_range(job.pieces[0]), tuple(job.waits()))
        job.events.append(event)
        job.pieces.popleft()
        # Later work on the stream runs after these events anyway, and chains of transfers must not grow forever.
        job.after, job.after_compute = (), None

    def _prefetch(self) -> None:
        """Launch pieces of queued loads, in order, as long as they delay nothing."""
        while self._ahead and self._ahead[0][0].query():
            self._ahead.popleft()
        while self._queue:
            job = self._queue[0]
            ahead = sum(num_bytes for _, num_bytes in self._ahead)
            full = self._ahead and ahead + job.piece_bytes > self._max_ahead
            if full or self._is_awaited() or not job.ready:
                return
            self._launch_piece(job)
            self._ahead.append((job.end, job.piece_bytes))
            if not job.pieces:
                self._queue.popleft()

    def _is_awaited(self) -> bool:
        """Whether a load that is waited for is in flight."""
        return any(job.stream == "in" and not job.prefetch and not job.ended for job in self._open.values())

    # ---- ending ----

    def _progress(self) -> None:
        """End the transfers whose events have fired, and start what may start now."""
        ended = [job for job in self._open.values() if job.ended]
        self._in_critical_section = True
        for job in ended:
            self._end(job, None)
            self._outstanding[job.stream] -= job.plan.num_bytes
            del self._open[job.transfer]
        self._prefetch()
        self._in_critical_section = False

    @staticmethod
    def _end(job: _Job, error: Exception | None) -> None:
        """Record how a transfer ended. Idempotent."""
        transfer, on_end = job.transfer, job.on_end
        if error is None:
            error = next((event.error for event in job.events if event.error is not None), None)
        transfer.error = transfer.error or error
        if job.plan.rows is not None:
            transfer.rows = job.plan.rows.numpy()
        job.on_end = None
        if on_end is not None:
            on_end(transfer)


def _nothing() -> None:
    return
