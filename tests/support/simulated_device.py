"""A simulated device: streams whose work runs in any order that stream order and events allow, chosen by a seed.

Orders that a real device shows once in a thousand runs are frequent here. Give it to the copy engine, and put compute
on it: work that the engine left unordered soon runs in a harmful order, reproducibly for the same seed.

    streams = SimulatedStreams(seed=7)
    engine = CacheEngine(layout, device_blocks=8, host_blocks=8, streams=streams)
    streams.compute(lambda: write_new_tokens(engine.tensors))
    engine.submit("swap_out", ids)
    streams.fence().synchronize()

`SimulatedStore` is an external tier that is equally late and unreliable.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion
from blockyard.engine.mapping import with_rows
from blockyard.engine.streams import STREAMS, Event, StreamName
from blockyard.errors import BlockyardError, InvalidArgumentError, MappingError, StoreError, UnknownTicketError
from blockyard.stores.base import ExternalStore
from blockyard.types import StoreStats

__all__ = ["SimulatedEvent", "SimulatedFaultError", "SimulatedStore", "SimulatedStreams"]

_COMPUTE = "compute"
# A stream is nearly stopped, as fast as others, or far ahead of them.
_SPEEDS = (0.01, 1.0, 1.0, 50.0)
# How much runs between two host calls: nothing, some, or everything.
_EAGERNESS = (0.0, 0.0, 0.3, 0.97)
_CHANGES = 0.03


class SimulatedFaultError(BlockyardError):
    """A transfer of the simulated device failed on purpose."""


class SimulatedEvent:
    """A point in a stream of the simulated device.

    Args:
        streams: of that device.
    """

    def __init__(self, streams: SimulatedStreams) -> None:
        self.error: Exception | None = None
        self.fired = False
        self._streams = streams

    def query(self) -> bool:
        """Return whether it has fired; some work may run first."""
        self._streams.progress()
        return self.fired

    def synchronize(self) -> None:
        """Run work, in any order, until it has fired."""
        self._streams.run_until(lambda: self.fired)


@dataclass(slots=True)
class _Item:
    work: Callable[[], None]
    waits: Sequence[SimulatedEvent]
    event: SimulatedEvent
    transfer: bool = False
    fails: bool = False

    def ready(self) -> bool:
        return all(event.fired for event in self.waits)


class SimulatedStreams:
    """Streams of a simulated device; `blockyard.engine.streams.Streams` describes the calls.

    Compute is a stream too; the test queues work there, like an engine.

    Args:
        seed: determines every order that the events leave open.
        fail: fraction of the transfers that fail. A failed transfer may or may not have moved its bytes.

    Attributes:
        launched: number of transfers so far.
        failed: number of failed transfers.
    """

    chunk_bytes: int | None = None

    def __init__(self, seed: int, *, fail: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._fail = fail
        self._queues: dict[str, deque[_Item]] = {name: deque() for name in (_COMPUTE, *STREAMS)}
        self._speeds = dict.fromkeys(self._queues, 1.0)
        self._eagerness = 0.0
        self._change()
        self.launched = self.failed = 0

    def launch(self, stream: StreamName, work: Callable[[], None], waits: Sequence[Event] = ()) -> Event:
        """Put a transfer at the end of a stream; some work may run meanwhile. One on a caller's stream never fails."""
        if stream not in STREAMS:
            return self._append(_COMPUTE, work, waits, transfer=True)
        self.launched += 1
        return self._append(stream, work, waits, transfer=True, fails=self._random.random() < self._fail)

    def compute(self, work: Callable[[], None]) -> Event:
        """Put work at the end of the compute stream; it never fails on purpose."""
        return self._append(_COMPUTE, work, ())

    def fence(self) -> Event:
        """Return an event at the current end of the compute stream."""
        return self._append(_COMPUTE, _nothing, ())

    def capturing(self) -> bool:
        """Return False: a simulated device has no graphs."""
        return False

    def order_compute(self, event: Event) -> None:
        """Make the compute stream wait for an event."""
        self._append(_COMPUTE, _nothing, (event,))

    def close(self) -> None:
        """Run everything that was launched."""
        self.run_until(lambda: not any(self._queues.values()))

    def progress(self) -> None:
        """Run some work, or none."""
        if self._random.random() < _CHANGES:
            self._change()
        while self._random.random() < self._eagerness and self._step(pauses=1.0):
            pass

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Run work, in any order, until a condition holds.

        Raises:
            AssertionError: nothing can run although the condition does not hold: streams wait for each other.
        """
        while not reached():
            if self._random.random() < _CHANGES:
                self._change()
            if not self._step():
                queued = {name: len(queue) for name, queue in self._queues.items() if queue}
                raise AssertionError(f"the streams are stuck with {queued} pieces of work queued")

    def _append(
        self,
        stream: str,
        work: Callable[[], None],
        waits: Sequence[Event],
        *,
        transfer: bool = False,
        fails: bool = False,
    ) -> Event:
        event = SimulatedEvent(self)
        own = [wait for wait in waits if isinstance(wait, SimulatedEvent)]
        if len(own) < len(waits):
            raise InvalidArgumentError(f"{len(waits) - len(own)} events of {len(waits)} are of another device")
        self._queues[stream].append(_Item(work, own, event, transfer, fails))
        self.progress()
        return event

    def _change(self) -> None:
        """Let some streams fall behind and others run ahead from now on."""
        self._speeds = {name: self._random.choice(_SPEEDS) for name in self._queues}
        self._eagerness = self._random.choice(_EAGERNESS)

    def _step(self, pauses: float = 0.0) -> bool:
        """Run the next work of a stream that can proceed; or pause, as if pausing were a stream of this speed."""
        names = [name for name, queue in self._queues.items() if queue and queue[0].ready()]
        if not names:
            return False
        (name,) = self._random.choices([*names, ""], [*(self._speeds[name] for name in names), pauses])
        if not name:
            return False
        item = self._queues[name].popleft()
        if item.fails:
            self.failed += 1
            item.event.error = SimulatedFaultError(f"transfer on stream {name!r} failed on purpose")
        if not item.fails or self._random.random() < 0.5:
            try:
                item.work()
            except Exception as error:
                if not item.transfer:
                    raise
                item.event.error = error
        item.event.fired = True
        return True


def _nothing() -> None:
    return


@dataclass(slots=True)
class _Batch:
    slots: NDArray[np.int64]
    rows: NDArray[np.uint8]
    writes: bool
    left: set[int] = field(default_factory=set)  # places in the batch
    ok: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    reported: bool = False


class SimulatedStore(ExternalStore):
    """An in-memory external tier whose operations run late, out of order and sometimes not at all.

    Operations on one slot keep their order, as `ExternalStore` promises.

    Args:
        num_slots: number of slots.
        bytes_per_block: bytes per slot.
        seed: seed of all random choices.
        fail: fraction of the blocks that are not written, or not read back.
    """

    def __init__(self, num_slots: int, bytes_per_block: int, *, seed: int, fail: float = 0.0) -> None:
        self._memory = np.zeros((num_slots, bytes_per_block), dtype=np.uint8)
        self._valid = np.zeros(num_slots, dtype=np.bool_)
        self._random = random.Random(seed)
        self._fail = fail
        self._batches: dict[int, _Batch] = {}
        self._order: dict[int, deque[tuple[int, int]]] = {}  # slot -> (ticket, place), the oldest first
        self._next_ticket = 1
        self._eagerness = self._random.choice(_EAGERNESS)
        self._closed = False

    @property
    def num_slots(self) -> int:
        """Slots, numbered from 0."""
        return len(self._memory)

    @property
    def bytes_per_block(self) -> int:
        """Bytes per slot."""
        return int(self._memory.shape[1])

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start writing blocks; see `ExternalStore`."""
        checked = self._check(slots, unique=True)
        wanted = (len(checked), self.bytes_per_block)
        if rows.dtype != np.uint8 or rows.shape != wanted:
            raise InvalidArgumentError(f"rows are {rows.dtype} {list(rows.shape)}, wanted uint8 {list(wanted)}")
        return self._submit(_Batch(checked, rows.copy(), writes=True))

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start reading blocks; see `ExternalStore`."""
        checked = self._check(slots)
        rows = np.zeros((len(checked), self.bytes_per_block), np.uint8) if rows is None else rows
        return self._submit(_Batch(checked, rows, writes=False))

    def poll(self) -> list[int]:
        """Run some operations, or none, and return what has finished."""
        if self._random.random() < _CHANGES:
            self._eagerness = self._random.choice(_EAGERNESS)
        while self._random.random() < self._eagerness and self._step():
            pass
        finished = [t for t, batch in self._batches.items() if not batch.left and not batch.reported]
        for ticket in finished:
            self._batches[ticket].reported = True
        return finished

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Run operations until a ticket is finished, and collect it."""
        batch = self._batches.get(ticket)
        if batch is None:
            raise UnknownTicketError(f"ticket {ticket} was never issued or has been collected")
        while batch.left:
            self._step()
        del self._batches[ticket]
        rows = batch.rows[:0] if batch.writes else batch.rows
        return Completion(ticket, batch.ok, rows, ["ok" if ok else "error" for ok in batch.ok])

    def stats(self) -> StoreStats:
        """Return empty counters."""
        return StoreStats()

    def close(self, timeout: float = 5.0) -> bool:
        """Give up everything in flight."""
        self._closed = True
        return True

    def _check(self, slots: NDArray[np.int64], *, unique: bool = False) -> NDArray[np.int64]:
        if self._closed:
            raise StoreError("the store is closed")
        if slots.dtype != np.int64 or slots.ndim != 1:
            raise InvalidArgumentError(f"slots are {slots.dtype} {list(slots.shape)}, wanted int64 [n]")
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_slots:
            raise MappingError(f"slots {slots.min()} to {slots.max()}, there are {self.num_slots}")
        with_rows(slots, self.num_slots, written=unique)
        checked: NDArray[np.int64] = slots.copy()
        return checked

    def _submit(self, batch: _Batch) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        batch.left = set(range(len(batch.slots)))
        batch.ok = np.zeros(len(batch.slots), dtype=np.bool_)
        self._batches[ticket] = batch
        for place, slot in enumerate(batch.slots.tolist()):
            self._order.setdefault(slot, deque()).append((ticket, place))
        return ticket

    def _step(self) -> bool:
        """Run the oldest operation of one of the slots."""
        if not self._order:
            return False
        slot = self._random.choice(list(self._order))
        ticket, place = self._order[slot].popleft()
        if not self._order[slot]:
            del self._order[slot]
        batch = self._batches[ticket]
        ok = self._random.random() >= self._fail
        if batch.writes:
            self._memory[slot] = batch.rows[place] if ok else 0
            self._valid[slot] = ok
        elif ok and self._valid[slot]:
            batch.rows[place] = self._memory[slot]
        batch.ok[place] = ok and bool(self._valid[slot])
        batch.left.discard(place)
        return True
