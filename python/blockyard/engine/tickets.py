"""The tickets of the copy engine: what waits, what is under way, what has ended, and what must be kept until then.

A transfer starts when it is submitted, but for loads that nobody waits for yet: those stay in a queue while loads that
are waited for are under way, and no more than a window of them is handed to the device ahead. So a load that a request
waits for is overtaken by none of them, and one that has not started can be given up.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard.engine.mapping import Ids
from blockyard.engine.streams import CHUNK_BYTES, STREAMS, Event, StreamName, Streams
from blockyard.engine.workers import Process
from blockyard.errors import (
    BlockyardError,
    InvalidArgumentError,
    TransferCancelledError,
    TransferQueueFullError,
    UnknownTicketError,
)

__all__ = ["Callback", "Done", "Mapping", "MappingBuffers", "OnFull", "Transfers"]

OnFull: TypeAlias = Literal["wait", "refuse"]
Work: TypeAlias = Callable[[], None]

_SMALLEST_MAPPING = 256


class Done(NamedTuple):
    """A ticket that has ended.

    Attributes:
        ticket: which.
        error: what failed, `TransferCancelledError` if it never started; then no byte of its destinations can be
            relied on. None if all landed.
        rows: what was read, uint8 `[n, bytes_per_block]`; None for other transfers.
    """

    ticket: int
    error: Exception | None
    rows: NDArray[np.uint8] | None


Callback: TypeAlias = Callable[[Done], None]


class Mapping(NamedTuple):
    """A buffer with the pairs of one transfer at its front."""

    buffer: Tensor
    pairs: Tensor


class MappingBuffers:
    """Buffers for pairs of block ids, which a transfer reads when it runs and not when it is submitted.

    One that was taken is not given out again before it is given back: that is when the transfer's event has fired.

    Args:
        pinned: whether they are page-locked.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = {}

    def take(self, pairs: Ids) -> Mapping:
        """Copy pairs, int64 `[n, 2]`, into a buffer that no transfer reads."""
        capacity = max(_SMALLEST_MAPPING, 1 << (len(pairs) - 1).bit_length())
        free = self._free.get(capacity)
        buffer = free.pop() if free else torch.empty((capacity, 2), dtype=torch.int64, pin_memory=self._pinned)
        view = buffer[: len(pairs)]
        view.numpy()[:] = pairs
        return Mapping(buffer, view)

    def give_back(self, mapping: Mapping) -> None:
        """Let a buffer be used again."""
        self._free.setdefault(len(mapping.buffer), []).append(mapping.buffer)


@dataclass(slots=True, eq=False)
class _Job:
    """One transfer. Its pieces run on one stream, so the last of their events fires last."""

    ticket: int
    stream: StreamName
    num_bytes: int
    pieces: deque[Work]  # those that no stream has yet
    after: tuple[_Job, ...]
    behind: Event | None
    prefetch: bool
    layers: int
    mapping: Mapping
    kept: tuple[Tensor, ...]
    rows: Tensor | None
    on_landed: Work | None
    piece_bytes: int = 0
    events: list[Event] = field(default_factory=list)
    cancelled: bool = False
    callbacks: list[Callback] = field(default_factory=list)

    @property
    def end(self) -> Event:
        return self.events[-1]

    @property
    def ended(self) -> bool:
        return self.cancelled or (not self.pieces and self.end.query())

    @property
    def ready(self) -> bool:
        """Whether its next piece would run at once, and hold up nothing that is put behind it."""
        return all(job.ended for job in self.after) and (self.behind is None or self.behind.query())

    def waits(self) -> Iterator[Event]:
        yield from (job.end for job in self.after if not job.cancelled)
        if self.behind is not None:
            yield self.behind

    def touches_device(self, first: int) -> bool:
        """Whether it reads or writes a block of the device from this one on."""
        columns = {"out": [0], "in": [1], "copy": [0, 1], "host": []}[self.stream]
        return bool((self.mapping.pairs.numpy()[:, columns] >= first).any())

    def writes_what(self, other: _Job) -> bool:
        """Whether both write a block; for two loads, which read nothing that a load writes."""
        return bool(np.isin(self.mapping.pairs.numpy()[:, 1], other.mapping.pairs.numpy()[:, 1]).any())


class Transfers:
    """Submits transfers, and ends them when their events have fired. For one calling thread of one process.

    Args:
        streams: of the device.
        max_outstanding: bytes that may be under way on one stream; a longer transfer goes alone.
        mappings: where the pairs of a transfer stay until its event has fired.
        max_ahead: bytes of loads that nobody waits for which a stream may have; one piece may always go.
    """

    def __init__(
        self, streams: Streams, *, max_outstanding: int, mappings: MappingBuffers, max_ahead: int = 8 * CHUNK_BYTES
    ) -> None:
        if max_outstanding < 1 or max_ahead < 1:
            raise InvalidArgumentError(
                f"max_outstanding is {max_outstanding} bytes, max_ahead {max_ahead}, must be at least 1"
            )
        self.process = Process("a copy engine")
        self.streams = streams
        self._max_outstanding = max_outstanding
        self._max_ahead = max_ahead
        self._mappings = mappings
        self._jobs: dict[int, _Job] = {}
        self._queue: deque[_Job] = deque()  # loads with pieces that no stream has, the oldest first
        self._ahead: deque[tuple[Event, int]] = deque()  # their pieces that a stream has, with their bytes
        self._done: dict[int, Done] = {}
        self._callbacks: deque[tuple[Callback, Done]] = deque()  # to be called
        self._outstanding: dict[StreamName, int] = {}
        self._next_ticket = 1
        self._torn = False  # a call changes the fields above; if it is set when one begins, the last was interrupted

    def outstanding(self, stream: StreamName) -> int:
        """Bytes of tickets of a stream that have not been seen to end."""
        return self._outstanding.get(stream, 0)

    def make_room(self, stream: StreamName, num_bytes: int, on_full: OnFull) -> None:
        """See to it that so many bytes more may be under way on a stream.

        Raises:
            TransferQueueFullError: they may not yet, and the caller would not wait.
            InvalidArgumentError: `on_full` is neither `"wait"` nor `"refuse"`.
        """
        if on_full not in {"wait", "refuse"}:
            raise InvalidArgumentError(f"on_full is {on_full!r}, must be 'wait' or 'refuse'")
        self._mend()
        self._go_on()
        while self.outstanding(stream) and self.outstanding(stream) + num_bytes > self._max_outstanding:
            if on_full == "refuse":
                raise TransferQueueFullError(
                    f"{self.outstanding(stream)} bytes are under way on stream {stream!r}, {num_bytes} more would be "
                    f"over the limit of {self._max_outstanding}"
                )
            oldest = next(job for job in self._jobs.values() if job.stream == stream)
            self._start(oldest)
            oldest.end.synchronize()
            self._go_on()

    def submit(
        self,
        stream: StreamName,
        cut: Callable[[Tensor], Sequence[Work]],
        pairs: Ids,
        *,
        num_bytes: int,
        after: Sequence[int] = (),
        behind: Event | None = None,
        prefetch: bool = False,
        layers: int = 0,
        kept: tuple[Tensor, ...] = (),
        rows: Tensor | None = None,
        on_landed: Work | None = None,
    ) -> int:
        """Take a transfer in; `make_room` comes first.

        Args:
            stream: where it runs.
            cut: makes the pieces of the work, at least one, from the pairs in their buffer.
            pairs: block ids (from, to), int64 `[n, 2]`; they are copied.
            num_bytes: that it moves.
            after: tickets that must have ended before it runs.
            behind: an event that must have fired before it runs.
            prefetch: a load that nobody waits for yet: it starts when no other load is under way, or when somebody
                waits for it, or when another transfer names it in `after`.
            layers: how many there are if each has a piece of its own; else 0.
            kept: memory that must stay until it has ended.
            rows: what it fills for the caller.
            on_landed: called once it has ended without an error.

        Returns:
            A ticket.
        """
        self._mend()
        earlier = tuple(job for ticket in after if (job := self._job(ticket)))
        mapping = self._mappings.take(pairs)
        pieces = deque(cut(mapping.pairs))
        self._torn = True
        ticket = self._next_ticket
        self._next_ticket += 1
        job = _Job(ticket, stream, num_bytes, pieces, earlier, behind, prefetch, layers, mapping, kept, rows, on_landed)
        job.piece_bytes = -(-num_bytes // len(pieces))
        self._jobs[ticket] = job
        self._outstanding[stream] = self.outstanding(stream) + num_bytes
        if prefetch:
            self._queue.append(job)
            self._prefetch()
        else:
            self._start(job)
        self._torn = False
        return ticket

    def cancel(self, ticket: int) -> bool:
        """Give a transfer up that has not started; `poll` and `wait` then report it with `TransferCancelledError`.

        Returns:
            Whether it was given up; one that has started runs to its end.

        Raises:
            UnknownTicketError: it was never issued.
        """
        self._mend()
        job = self._job(ticket)
        if job is None or job.events:
            return False
        self._torn = True
        job.cancelled = True
        job.pieces.clear()
        self._queue.remove(job)
        self._go_on()
        return True

    def poll(self) -> list[Done]:
        """Give the tickets that ended since the last call, and were not waited for; never waits."""
        self.process.check()
        self._mend()
        self._go_on()
        done = list(self._done.values())
        self._done = {}
        return done

    def wait(self, ticket: int) -> Done:
        """Wait for a ticket; `poll` will not report it.

        Raises:
            UnknownTicketError: it was never issued, or has been reported.
        """
        self._mend()
        job = self._job(ticket)
        if job is not None:
            self._start(job)
            job.end.synchronize()
            self._go_on()
        done = self._reported(ticket)
        # No call comes after this, and so no interrupt between here and the caller.
        del self._done[ticket]
        return done

    def on_done(self, ticket: int, callback: Callback) -> None:
        """Let a function be called when a call to this object sees that the ticket has ended; at once if one has."""
        self._mend()
        job = self._job(ticket)
        if job is not None:
            job.callbacks.append(callback)
        else:
            callback(self._reported(ticket))

    def order_compute(self, ticket: int) -> None:
        """Let the compute stream wait for a ticket."""
        self._mend()
        job = self._job(ticket)
        if job is not None:
            self._start(job)
            self.streams.order_compute(job.end)

    def order_compute_layer(self, ticket: int, layer: int) -> None:
        """Let the compute stream wait for the first layers of a ticket, up to and with this one."""
        self._mend()
        job = self._job(ticket)
        if job is None:
            return
        if job.layers and not 0 <= layer < job.layers:
            raise InvalidArgumentError(f"layer {layer} of ticket {ticket}, there are {job.layers}")
        self._start(job)
        self.streams.order_compute(job.events[layer] if job.layers else job.end)

    def order_compute_all(self) -> None:
        """Let the compute stream wait for all that is under way."""
        self._mend()
        for job in tuple(self._jobs.values()):
            self._start(job)
            self.streams.order_compute(job.end)

    def synchronize(self, first_device_block: int | None = None) -> None:
        """Wait for all that is under way, or for what touches blocks of the device from one on."""
        self._mend()
        for job in tuple(self._jobs.values()):
            if first_device_block is None or job.touches_device(first_device_block):
                self._start(job)
                job.end.synchronize()
        self._go_on()

    def _job(self, ticket: int) -> _Job | None:
        self.process.check()
        if not 0 < ticket < self._next_ticket:
            raise UnknownTicketError(f"ticket {ticket} was never issued, the last is {self._next_ticket - 1}")
        return self._jobs.get(ticket)

    def _reported(self, ticket: int) -> Done:
        done = self._done.get(ticket)
        if done is None:
            raise UnknownTicketError(f"ticket {ticket} has been reported")
        return done

    def _mend(self) -> None:
        """Fail all that is under way if the last call was interrupted: what it had begun is not known."""
        if not self._torn:
            return
        for stream in STREAMS:
            with contextlib.suppress(BlockyardError):  # closed, so that nothing is under way
                self.streams.launch(stream, _nothing).synchronize()
        for job in self._jobs.values():
            error = BlockyardError(f"ticket {job.ticket} was under way when a call of the engine was interrupted")
            done = self._done[job.ticket] = Done(job.ticket, error, None)
            self._callbacks.extend((callback, done) for callback in job.callbacks)
        self._jobs, self._outstanding = {}, {}
        self._queue.clear()
        self._ahead.clear()
        self._torn = False
        self._call_back()

    # ---- starting ----

    def _start(self, job: _Job) -> None:
        """Hand all that is left of a transfer to its stream, after what it must not overtake."""
        if not job.pieces:
            return
        before, self._torn = self._torn, True
        for other in job.after:
            self._start(other)
        if job.stream == "in":
            # Loads of one block keep their order, whoever waits for them.
            for other in [other for other in self._queue if other.ticket < job.ticket and other.writes_what(job)]:
                self._start(other)
        while job.pieces:
            self._launch_piece(job)
        if job.prefetch:
            self._queue.remove(job)
            job.prefetch = False
        self._torn = before

    def _launch_piece(self, job: _Job) -> None:
        event = self.streams.launch(job.stream, job.pieces[0], tuple(job.waits()))
        job.events.append(event)
        job.pieces.popleft()
        # What is behind it on the stream comes after the same; and a chain of tickets is not kept for ever.
        job.after, job.behind = (), None

    def _prefetch(self) -> None:
        """Hand pieces of queued loads to the stream, in order, as far as they hold nobody up."""
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
        """Whether a load is under way that somebody waits for."""
        return any(job.stream == "in" and not job.prefetch and not job.ended for job in self._jobs.values())

    # ---- ending ----

    def _go_on(self) -> None:
        """End the tickets whose events have fired, and start what may start then."""
        ended = [job for job in self._jobs.values() if job.ended]
        self._torn = True
        for job in ended:
            del self._jobs[job.ticket]
            self._end(job)
        self._torn = False
        self._call_back()
        self._torn = True
        self._prefetch()
        self._torn = False

    def _end(self, job: _Job) -> None:
        self._outstanding[job.stream] -= job.num_bytes
        self._mappings.give_back(job.mapping)
        error = next((event.error for event in job.events if event.error is not None), None)
        if job.cancelled:
            error = TransferCancelledError(f"ticket {job.ticket} was given up before it started")
        elif error is None and job.on_landed is not None:
            job.on_landed()
        done = Done(job.ticket, error, None if job.rows is None or job.cancelled else job.rows.numpy())
        self._done[job.ticket] = done
        self._callbacks.extend((callback, done) for callback in job.callbacks)

    def _call_back(self) -> None:
        """Make the calls that are due; they may call this object."""
        while self._callbacks:
            callback, done = self._callbacks.popleft()
            callback(done)


def _nothing() -> None:
    return
