"""The tickets of the copy engine: what is under way, what has ended, and what must be kept until then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard.errors import InvalidArgumentError, TransferQueueFullError, UnknownTicketError
from blockyard.plan import Ids
from blockyard.transfer.streams import Event, StreamName, Streams

__all__ = ["Callback", "Done", "Mapping", "MappingBuffers", "OnFull", "Transfers"]

OnFull: TypeAlias = Literal["wait", "refuse"]
Work: TypeAlias = Callable[[], None]

_SMALLEST_MAPPING = 256


class Done(NamedTuple):
    """A ticket that has ended.

    Attributes:
        ticket: which.
        error: what failed; then no byte of its destinations can be relied on. None if all landed.
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

    stream: StreamName
    num_bytes: int
    events: list[Event]
    layers: int
    mapping: Mapping
    kept: tuple[Tensor, ...]
    rows: Tensor | None
    on_landed: Work | None
    callbacks: list[Callback] = field(default_factory=list)

    @property
    def end(self) -> Event:
        return self.events[-1]


class Transfers:
    """Submits transfers, and ends them when their events have fired. For one calling thread.

    Args:
        streams: of the device.
        max_outstanding: bytes that may be under way on one stream; a longer transfer goes alone.
        mappings: where the pairs of a transfer stay until its event has fired.
    """

    def __init__(self, streams: Streams, *, max_outstanding: int, mappings: MappingBuffers) -> None:
        if max_outstanding < 1:
            raise InvalidArgumentError(f"max_outstanding is {max_outstanding} bytes, must be at least 1")
        self.streams = streams
        self._max_outstanding = max_outstanding
        self._mappings = mappings
        self._jobs: dict[int, _Job] = {}
        self._done: deque[Done] = deque()
        self._outstanding: dict[StreamName, int] = {}
        self._next_ticket = 1

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
        self._reap()
        while self.outstanding(stream) and self.outstanding(stream) + num_bytes > self._max_outstanding:
            if on_full == "refuse":
                raise TransferQueueFullError(
                    f"{self.outstanding(stream)} bytes are under way on stream {stream!r}, {num_bytes} more would be "
                    f"over the limit of {self._max_outstanding}"
                )
            next(job for job in self._jobs.values() if job.stream == stream).end.synchronize()
            self._reap()

    def submit(
        self,
        stream: StreamName,
        cut: Callable[[Tensor], Sequence[Work]],
        pairs: Ids,
        *,
        num_bytes: int,
        after: Sequence[int] = (),
        behind: Event | None = None,
        layers: int = 0,
        kept: tuple[Tensor, ...] = (),
        rows: Tensor | None = None,
        on_landed: Work | None = None,
    ) -> int:
        """Launch a transfer; `make_room` comes first.

        Args:
            stream: where it runs.
            cut: makes the pieces of the work, at least one, from the pairs in their buffer.
            pairs: block ids (from, to), int64 `[n, 2]`; they are copied.
            num_bytes: that it moves.
            after: tickets that must have ended before it runs.
            behind: an event that must have fired before it runs.
            layers: how many there are if each has a piece of its own; else 0.
            kept: memory that must stay until it has ended.
            rows: what it fills for the caller.
            on_landed: called once it has ended without an error.

        Returns:
            A ticket.
        """
        waits = [job.end for ticket in after if (job := self._job(ticket))]
        waits += [behind] if behind is not None else []
        mapping = self._mappings.take(pairs)
        events = [self.streams.launch(stream, piece, waits) for piece in cut(mapping.pairs)]
        ticket = self._next_ticket
        self._next_ticket += 1
        self._jobs[ticket] = _Job(stream, num_bytes, events, layers, mapping, kept, rows, on_landed)
        self._outstanding[stream] = self.outstanding(stream) + num_bytes
        return ticket

    def poll(self) -> list[Done]:
        """Give the tickets that ended since the last call, and were not waited for; never waits."""
        self._reap()
        done = list(self._done)
        self._done.clear()
        return done

    def wait(self, ticket: int) -> Done:
        """Wait for a ticket; `poll` will not report it.

        Raises:
            UnknownTicketError: it was never issued, or has been reported.
        """
        job = self._job(ticket)
        if job is not None:
            job.end.synchronize()
            self._reap()
        for done in self._done:
            if done.ticket == ticket:
                self._done.remove(done)
                return done
        raise UnknownTicketError(f"ticket {ticket} has been reported")

    def on_done(self, ticket: int, callback: Callback) -> None:
        """Let a function be called when a call to this object sees that the ticket has ended; at once if one has."""
        job = self._job(ticket)
        if job is not None:
            job.callbacks.append(callback)
            return
        for done in self._done:
            if done.ticket == ticket:
                callback(done)
                return
        raise UnknownTicketError(f"ticket {ticket} has been reported")

    def order_compute(self, ticket: int) -> None:
        """Let the compute stream wait for a ticket."""
        job = self._job(ticket)
        if job is not None:
            self.streams.order_compute(job.end)

    def order_compute_layer(self, ticket: int, layer: int) -> None:
        """Let the compute stream wait for the first layers of a ticket, up to and with this one."""
        job = self._job(ticket)
        if job is None:
            return
        if job.layers and not 0 <= layer < job.layers:
            raise InvalidArgumentError(f"layer {layer} of ticket {ticket}, there are {job.layers}")
        self.streams.order_compute(job.events[layer] if job.layers else job.end)

    def order_compute_all(self) -> None:
        """Let the compute stream wait for all that is under way."""
        for job in self._jobs.values():
            self.streams.order_compute(job.end)

    def synchronize(self) -> None:
        """Wait for all that is under way."""
        for job in self._jobs.values():
            job.end.synchronize()
        self._reap()

    def _job(self, ticket: int) -> _Job | None:
        if not 0 < ticket < self._next_ticket:
            raise UnknownTicketError(f"ticket {ticket} was never issued, the last is {self._next_ticket - 1}")
        return self._jobs.get(ticket)

    def _reap(self) -> None:
        """End the tickets whose events have fired."""
        for ticket in [ticket for ticket, job in self._jobs.items() if job.end.query()]:
            job = self._jobs.pop(ticket)
            self._outstanding[job.stream] -= job.num_bytes
            self._mappings.give_back(job.mapping)
            error = next((event.error for event in job.events if event.error is not None), None)
            if error is None and job.on_landed is not None:
                job.on_landed()
            done = Done(ticket, error, None if job.rows is None else job.rows.numpy())
            self._done.append(done)
            for callback in job.callbacks:
                callback(done)
