"""The transfers of the copy engine: queued, in flight and ended, and the memory to keep until then.

A transfer starts when it is submitted, except for loads that are not needed yet (prefetches). Those are queued while
other loads are in flight, and at most a window of them is handed to the device ahead. So no prefetch delays a load that
a request waits for.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import profiler

from blockyard._core import Mapping
from blockyard.engine.streams import PIECE_BYTES, Event, StreamName, Streams, refuse_capture
from blockyard.errors import BlockyardError, CaptureError, InvalidArgumentError, TransferQueueFullError
from blockyard.layout.sizes import as_int
from blockyard.workers.ownership import Process

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OnFull", "Transfer", "Transfers", "Work"]

OnFull: TypeAlias = Literal["wait", "refuse"]
Work: TypeAlias = Callable[[], None]

_STREAMS: Final[dict[tuple[str, str], StreamName]] = {
    ("device", "host"): "out",
    ("device", "rows"): "out",
    ("host", "device"): "in",
    ("rows", "device"): "in",
    ("device", "device"): "copy",
}
_NVTX: Final = "NVTX_INJECTION64_PATH" in os.environ
"""Whether a tool that shows NVTX ranges has started this process, as Nsight Systems does."""


@dataclass(slots=True, eq=False, repr=False)
class Transfer:
    """A transfer of the copy engine, in flight or ended. Every call raises `CaptureError` inside a graph capture.

    `CacheEngine.submit` and its siblings make it: the arguments are theirs.

    Args:
        kind: one of `KINDS`, or `"read"` or `"write"`.
        src: `"device"`, `"host"`, or `"rows"` for the caller's rows.
        dst: the same.
        mapping: mapping of block ids; for a read or write one side is row numbers.
        num_bytes: bytes moved.
        pieces: pieces of work that are not launched yet, at least one; all run on one stream.
        layers: for each layer its piece, if pieces are in layer order; else empty.
        memory: the rows that a read fills or a write reads, to keep alive until the transfer has ended.

    Attributes:
        error: the failure, after which no byte of its destinations is valid. None if all landed, and while in flight.
        rows: the result of a read, uint8 `[n, bytes_per_block]`; None before it has ended, and for other transfers.
        stream: the stream that it runs on.
        piece_bytes: bytes of a piece.
        events: of the launched pieces; the last one fires last.
        owner: where it was submitted; None before.
        number: increases with each transfer submitted there.
        after: transfers that must end before its first piece runs.
        after_compute: an event that must fire before.
        prefetch: whether it is a load that nothing waits for yet.
        began: when it was submitted, on the monotonic clock.
    """

    kind: str
    src: str
    dst: str
    mapping: Mapping
    num_bytes: int
    pieces: deque[Work]
    layers: Sequence[int] = ()
    memory: Tensor | None = None
    error: Exception | None = field(default=None, init=False)
    rows: NDArray[np.uint8] | None = field(default=None, init=False)
    stream: StreamName = field(init=False)
    piece_bytes: int = field(init=False)
    events: list[Event] = field(default_factory=list, init=False)
    owner: Transfers | None = field(default=None, init=False)
    number: int = field(default=0, init=False)
    after: tuple[Transfer, ...] = field(default=(), init=False)
    after_compute: Event | None = field(default=None, init=False)
    prefetch: bool = field(default=False, init=False)
    began: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.stream = _STREAMS.get((self.src, self.dst), "host")
        self.piece_bytes = -(-self.num_bytes // len(self.pieces))

    def __repr__(self) -> str:
        return f"Transfer({'in flight' if self._owner.has_open(self) else self.error or 'landed'})"

    @property
    def done(self) -> bool:
        """Whether it has ended; queries the device, never waits."""
        return self._owner.has_ended(self)

    def wait(self) -> Self:
        """Wait for it to end, and raise its `error` if it failed.

        Returns:
            The transfer itself.
        """
        self._owner.wait(self)
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
        self._owner.order_compute(self, layer)

    @property
    def _owner(self) -> Transfers:
        if self.owner is None:
            raise InvalidArgumentError("the transfer was never submitted")
        return self.owner

    # ---- for `Transfers` ----

    @property
    def device_columns(self) -> list[int]:
        """Columns of the pairs that contain device blocks."""
        return [column for column, side in enumerate((self.src, self.dst)) if side == "device"]

    @property
    def end(self) -> Event:
        """The event of its last launched piece."""
        return self.events[-1]

    @property
    def has_fired(self) -> bool:
        """Whether all its work has run."""
        return not self.pieces and self.events[-1].query()

    @property
    def may_run(self) -> bool:
        """Whether its next piece would run at once, without blocking work launched after it."""
        return all(other.has_fired for other in self.after) and (
            self.after_compute is None or self.after_compute.query()
        )

    def next_piece(self) -> tuple[StreamName, Work, Sequence[Event]]:
        """Return what to launch next: the stream, the work, and the events that it waits for."""
        waits = [other.end for other in self.after]
        if self.after_compute is not None:
            waits.append(self.after_compute)
        return self.stream, self.in_range(self.pieces[0]), waits

    def note_launch(self, event: Event) -> None:
        """Record the launch of that piece."""
        self.events.append(event)
        self.pieces.popleft()
        # Later work on the stream runs after these events anyway, and chains of transfers must not grow forever.
        self.after, self.after_compute = (), None

    def in_range(self, piece: Work) -> Work:
        """Return a piece of the work, inside a range named after the transfer while a profiler runs."""
        make: Callable[[str], AbstractContextManager[object]]
        if profiler._is_profiler_enabled:  # noqa: SLF001 (torch's own modules ask it; a call would cost more)
            make = profiler.record_function
        elif _NVTX:
            make = torch.cuda.nvtx.range
        else:
            return piece
        name = f"blockyard {self.kind} {self.src}->{self.dst} {len(self.mapping)} blocks {self.num_bytes} bytes"
        return partial(_in_range, make(name), piece)

    def touches_device(self, first: int) -> bool:
        """Whether it uses a device block with at least this id."""
        return any(self.mapping.reach[column] > first for column in self.device_columns)

    def writes_same_block(self, other: Transfer) -> bool:
        """Whether two loads write a common block; loads conflict in no other way."""
        return bool(np.isin(self.mapping.pairs[:, 1], other.mapping.pairs[:, 1]).any())


class Transfers:
    """Submits transfers, and ends them when their events have fired. Use from one thread of one process.

    If an exception ends a call while it launches or ends transfers, it is unknown what the device runs. The next call
    then gives up everything in flight, see `give_up_all`.

    Args:
        streams: the device's streams.
        max_outstanding: maximum bytes in flight on one stream; a longer transfer runs alone.
        max_ahead: maximum bytes of prefetches on a stream; one piece is always allowed.
        on_end: called with each transfer that has ended.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        max_outstanding: int,
        max_ahead: int = 8 * PIECE_BYTES,
        on_end: Callable[[Transfer], None] | None = None,
    ) -> None:
        max_outstanding, max_ahead = as_int("max_outstanding", max_outstanding), as_int("max_ahead", max_ahead)
        if max_outstanding < 1 or max_ahead < 1:
            raise InvalidArgumentError(
                f"max_outstanding is {max_outstanding} bytes, max_ahead {max_ahead}, must be at least 1"
            )
        self.process = Process("a copy engine")
        self.streams = streams
        self._max_outstanding = max_outstanding
        self._max_ahead = max_ahead
        self._on_end = on_end
        self._open: dict[Transfer, None] = {}  # in submission order
        self._queue: deque[Transfer] = deque()  # prefetches with unlaunched pieces, oldest first
        self._ahead: deque[tuple[Event, int]] = deque()  # their launched pieces, with their bytes
        self._outstanding: dict[StreamName, int] = {}
        self._submitted = 0
        self._is_changing = False  # if set when a call begins, an exception ended the last one

    def has_open(self, transfer: Transfer) -> bool:
        """Whether a transfer is not yet known to have ended."""
        return transfer in self._open

    def check(self) -> None:
        """Check that a call is allowed, before it touches a stream.

        Raises:
            ForkedError: this is a fork of the process that created the engine.
            CaptureError: a graph is being captured.
        """
        self.process.check()
        refuse_capture(self.streams)
        if self._is_changing:
            self.give_up_all()

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
        if self._is_changing:
            self.give_up_all()
        self._progress()
        while self.outstanding(stream) and self.outstanding(stream) + num_bytes > self._max_outstanding:
            if on_full == "refuse":
                raise TransferQueueFullError(
                    f"{self.outstanding(stream)} bytes are in flight on stream {stream!r}, {num_bytes} more would "
                    f"exceed the limit of {self._max_outstanding}"
                )
            oldest = next(transfer for transfer in self._open if transfer.stream == stream)
            self._start(oldest)
            oldest.end.synchronize()
            self._progress()

    def submit(
        self,
        transfer: Transfer,
        stream: StreamName | None = None,
        *,
        after: Sequence[Transfer] = (),
        after_compute: Event | None = None,
        prefetch: bool = False,
    ) -> Transfer:
        """Submit a transfer; call `make_room` first.

        Args:
            transfer: the transfer.
            stream: stream to run on; None means its own.
            after: transfers that must end before it runs, including those queued by synchronous calls.
            after_compute: an event that must fire before it runs.
            prefetch: whether the load is not needed yet: it starts when no other load is in flight, when it is waited
                for, or when another transfer names it in `after`.

        Returns:
            The transfer itself.

        Raises:
            InvalidArgumentError: a transfer in `after` belongs to another engine; nothing was submitted.
        """
        self.process.check()
        if self._is_changing:
            self.give_up_all()
        earlier = [other for other in after if self._is_open(other)]
        earlier += [other for other in self._open if other.stream == "compute"]
        self._is_changing = True
        self._submitted += 1
        transfer.owner, transfer.number, transfer.began = self, self._submitted, time.monotonic()
        transfer.after, transfer.after_compute, transfer.prefetch = tuple(earlier), after_compute, prefetch
        if stream is not None:
            transfer.stream = stream
        self._open[transfer] = None
        self._outstanding[transfer.stream] = self.outstanding(transfer.stream) + transfer.num_bytes
        if prefetch:
            self._queue.append(transfer)
            self._prefetch()
        else:
            self._start(transfer)
        self._is_changing = False
        return transfer

    def run(self, transfer: Transfer, stream: StreamName) -> Transfer:
        """Run a transfer on the caller's own stream, once all open transfers have ended; raises its error."""
        self.synchronize()
        transfer.owner, transfer.began = self, time.monotonic()
        transfer.events = [self.streams.launch(stream, transfer.in_range(piece)) for piece in transfer.pieces]
        transfer.pieces.clear()
        for event in transfer.events:
            event.synchronize()
        self._end(transfer, None)
        if transfer.error is not None:
            raise transfer.error
        return transfer

    def capture(self, transfer: Transfer) -> Transfer:
        """Capture a transfer into the graph of the compute stream; it counts as ended.

        Raises:
            CaptureError: transfers are open, which a graph cannot wait for.
        """
        if self._open:
            raise CaptureError(f"{len(self._open)} transfers are open: wait for them before the capture begins")
        transfer.owner = self
        for piece in transfer.pieces:
            transfer.in_range(piece)()
        return transfer

    def poll(self) -> None:
        """Complete finished transfers, and start prefetches that are due; never waits."""
        self.check()
        self._progress()

    def has_ended(self, transfer: Transfer) -> bool:
        """Whether a transfer has ended; never waits."""
        self.check()
        if self._is_open(transfer) and (transfer.prefetch or transfer.has_fired):
            self._progress()
        return transfer not in self._open

    def failed_to_launch(self, transfer: Transfer) -> bool:
        """Whether launching a transfer's work raised; never waits."""
        return transfer in self._open and any(event.error is not None for event in transfer.events)

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer to end."""
        self.check()
        if self._is_open(transfer):
            self._start(transfer)
            transfer.end.synchronize()
            self._progress()

    def order_compute(self, transfer: Transfer, layer: int | None = None) -> None:
        """Make the compute stream wait for a transfer, or for its layers up to this one."""
        self.check()
        if not self._is_open(transfer):
            return
        layers = transfer.layers
        if layer is not None and layers and not 0 <= layer < len(layers):
            raise InvalidArgumentError(f"layer is {layer}, must be 0 to {len(layers) - 1}")
        self._start(transfer)
        self.streams.order_compute(transfer.end if layer is None or not layers else transfer.events[layers[layer]])

    def synchronize(self, first_device_block: int | None = None) -> None:
        """Wait for all transfers in flight, or those that touch device blocks with at least this id."""
        self.check()
        for transfer in tuple(self._open):
            if first_device_block is None or transfer.touches_device(first_device_block):
                self._start(transfer)
                transfer.end.synchronize()
        self._progress()

    def give_up_all(self) -> None:
        """Wait for everything that was launched, and end all open transfers as failed. May be called again."""
        self.process.check()
        self._is_changing = True
        for stream in {transfer.stream for transfer in self._open}:
            self.streams.launch(stream, _nothing).synchronize()
        error = BlockyardError("a call of the engine was interrupted, so everything in flight counts as lost")
        for transfer in self._open:
            self._end(transfer, error)
        self._open, self._outstanding = {}, {}
        self._queue.clear()
        self._ahead.clear()
        self._is_changing = False

    def _is_open(self, transfer: Transfer) -> bool:
        if transfer.owner is not self:
            raise InvalidArgumentError("the transfer belongs to another engine")
        return transfer in self._open

    # ---- starting ----

    def _start(self, transfer: Transfer) -> None:
        """Launch the rest of a transfer on its stream, after work that it must not overtake."""
        if not transfer.pieces:
            return
        before, self._is_changing = self._is_changing, True
        for other in transfer.after:
            self._start(other)
        if transfer.stream == "in" and self._queue:
            # Loads of one block keep their order, whether or not they are waited for.
            for other in [other for other in self._queue if other.number < transfer.number]:
                if other.writes_same_block(transfer):
                    self._start(other)
        while transfer.pieces:
            transfer.note_launch(self.streams.launch(*transfer.next_piece()))
        if transfer.prefetch:
            self._queue.remove(transfer)
            transfer.prefetch = False
        self._is_changing = before

    def _prefetch(self) -> None:
        """Launch pieces of queued loads, in order, as long as they delay nothing."""
        while self._ahead and self._ahead[0][0].query():
            self._ahead.popleft()
        while self._queue:
            transfer = self._queue[0]
            ahead = sum(num_bytes for _, num_bytes in self._ahead)
            full = self._ahead and ahead + transfer.piece_bytes > self._max_ahead
            if full or self._is_awaited() or not transfer.may_run:
                return
            transfer.note_launch(self.streams.launch(*transfer.next_piece()))
            self._ahead.append((transfer.end, transfer.piece_bytes))
            if not transfer.pieces:
                self._queue.popleft()

    def _is_awaited(self) -> bool:
        """Whether a load that is waited for is in flight."""
        return any(
            transfer.stream == "in" and not transfer.prefetch and not transfer.has_fired for transfer in self._open
        )

    # ---- ending ----

    def _progress(self) -> None:
        """End the transfers whose events have fired, and start what may start now."""
        if not self._open:
            return
        self._is_changing = True
        for transfer in [transfer for transfer in self._open if transfer.has_fired]:
            self._end(transfer, None)
            self._outstanding[transfer.stream] -= transfer.num_bytes
            del self._open[transfer]
        self._prefetch()
        self._is_changing = False

    def _end(self, transfer: Transfer, error: Exception | None) -> None:
        """Record how a transfer ended."""
        found = (event.error for event in transfer.events if event.error is not None)
        transfer.error = error or next(found, None)
        if transfer.kind == "read" and transfer.memory is not None:
            transfer.rows = transfer.memory.numpy()
        transfer.memory, transfer.after, transfer.after_compute = None, (), None
        if self._on_end is not None:
            self._on_end(transfer)


def _nothing() -> None:
    return


def _in_range(named: AbstractContextManager[object], work: Work) -> None:
    with named:
        work()
