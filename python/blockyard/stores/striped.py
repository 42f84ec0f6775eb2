"""One store over several disks. Each disk has its own store and threads, so a failing disk does not affect the others.

With `n` disks, slot `s` is slot `s // n` of disk `s % n`. A key's own bytes choose its disk. A disk that fails or hangs
loses only its own blocks. Rows are copied once more, because a batch is split by disk.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat, starmap
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion
from blockyard.errors import InvalidArgumentError, MappingError, OutOfMemoryError, StoreError, UnknownTicketError
from blockyard.stores.arguments import check_read_rows, check_rows, check_slots, checked_keys
from blockyard.stores.base import ExternalStore, Keys, Owners, Use, no_keys_error
from blockyard.stores.checked_store import check_store
from blockyard.types import StoreStats
from blockyard.workers.interrupts import keep, open_event
from blockyard.workers.ownership import Process

__all__ = ["StripedStore"]

Rows = NDArray[np.uint8]
Ids = NDArray[np.int64]
_Report: TypeAlias = tuple[ExternalStore, int]  # a disk's store, and one of its tickets


@dataclass(slots=True)
class _Share:
    """One disk's share of a batch: `tickets` and `done` each have one entry once it is submitted and collected."""

    store: ExternalStore
    places: Ids
    tickets: list[int] = field(default_factory=list)
    done: list[Completion] = field(default_factory=list)


@dataclass(slots=True)
class _StripedBatch:
    count: int
    is_read: bool
    rows: Rows | None = None  # the caller's rows, for a read
    shares: list[_Share] = field(default_factory=list)
    open: set[_Report] = field(default_factory=set)  # the disks have not reported these
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while the caller's rows are written


class StripedStore(ExternalStore):
    """Blocks on several stores of equal size.

    Args:
        parts: the stores; None for a store that could not be opened: its blocks are misses, `"io"`.
        is_keyed: whether they are prefix stores.

    Raises:
        InvalidArgumentError: no store is open, one is given twice, or one does not fit the others or the use.
    """

    def __init__(self, parts: Sequence[ExternalStore | None], *, is_keyed: bool) -> None:
        self._parts = list(parts)
        self._is_keyed = is_keyed
        self._open = [part for part in parts if part is not None]
        if not self._open or len(set(map(id, self._open))) < len(self._open):
            raise InvalidArgumentError(f"parts is {self._parts!r:.100}, must have an open store, and each only once")
        for part in self._open:
            check_store("a part", part, self.bytes_per_block, self.uses[0])
        self._process = Process("a store")
        self._lock = threading.Lock()
        self._batches: dict[int, _StripedBatch] = {}
        self._owner: dict[_Report, int] = {}  # our tickets
        self._reports: list[_Report] = []  # not processed yet
        self._ended: dict[int, None] = {}  # not returned by `poll` yet
        self._polling: dict[int, None] = {}  # threads in `poll`, or whose last call was interrupted
        self._next = 1
        self._failed = 0  # blocks of disks that could not be opened
        self._events: select.epoll | None = None
        self._at_once = open_event(self)  # readable after a batch has ended as it was submitted

    @property
    def num_slots(self) -> int:
        """Number of blocks that all disks together can hold."""
        return len(self._parts) * min(part.num_slots for part in self._open)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, as the caller sees it."""
        return self._open[0].bytes_per_block

    @property
    def uses(self) -> tuple[Use, ...]:
        """The use for which the disks' stores were opened."""
        return ("prefix",) if self._is_keyed else ("swap",)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return all(part.is_closed for part in self._open)

    @property
    def max_blocks_in_flight(self) -> int | None:
        """Half of what all disks together can have in flight, since blocks are spread unevenly."""
        bounds = [limit for part in self._open if (limit := part.max_blocks_in_flight) is not None]
        return len(self._parts) * min(bounds) // 2 if bounds else None

    def submit_write(self, slots: Ids, rows: Rows) -> int:
        """Start to write blocks, each to its disk. See `ExternalStore`."""
        self._check_slots(slots, is_write=True)
        check_rows(rows, (len(slots), self.bytes_per_block))
        return self._submit(
            slots % len(self._parts),
            lambda part, places: (part.submit_write, slots[places] // len(self._parts), rows[places]),
        )

    def submit_read(self, slots: Ids, rows: Rows | None = None) -> int:
        """Start to read blocks, each from its disk. See `ExternalStore`."""
        self._check_slots(slots)
        check_read_rows(rows, (len(slots), self.bytes_per_block))
        return self._submit(
            slots % len(self._parts),
            lambda part, places: (part.submit_read, slots[places] // len(self._parts)),
            is_read=True,
            rows=rows,
        )

    def submit_put(
        self,
        keys: Keys,
        rows: Rows,
        owners: Owners | None = None,  # noqa: ARG002 (no quota spans the disks)
    ) -> int:
        """Start to store blocks under their keys. See `ExternalStore`."""
        found = self._check_keys(keys)
        check_rows(rows, (len(found), self.bytes_per_block))
        return self._submit(self._disks(found), lambda part, places: (part.submit_put, found[places], rows[places]))

    def submit_get(self, keys: Keys, rows: Rows | None = None) -> int:
        """Start to read blocks by key. See `ExternalStore`."""
        found = self._check_keys(keys)
        check_read_rows(rows, (len(found), self.bytes_per_block))
        return self._submit(
            self._disks(found), lambda part, places: (part.submit_get, found[places]), is_read=True, rows=rows
        )

    def submit_delete(self, keys: Keys) -> int:
        """Start to delete keys. See `ExternalStore`."""
        found = self._check_keys(keys)
        return self._submit(self._disks(found), lambda part, places: (part.submit_delete, found[places]))

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each key has a block on its disk. See `ExternalStore`."""
        return self._ask(keys, lambda part, asked: part.contains(asked), unopened=False)

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether a read of each key is known to be a miss. See `ExternalStore`."""
        return self._ask(keys, lambda part, asked: part.lacks(asked), unopened=True)

    def forget(self, revision: str | None = None) -> None:
        """Forget every key, on all disks that answer. See `ExternalStore`."""
        self._check_keys([])
        errors = [] if None not in self._parts else ["a disk could not be opened"]
        for part in self._open:
            try:
                part.forget(revision)
            except StoreError as error:  # noqa: PERF203 (continue with the others)
                errors.append(str(error))
        if errors:
            raise StoreError(f"later processes may find keys again: {'; '.join(errors)}")

    def event_fd(self) -> int:
        """Return a descriptor that is readable while any disk's descriptor is. See `ExternalStore`."""
        self._process.check()
        with self._lock:
            if self._events is None:
                events = select.epoll()
                events.register(self._at_once, select.EPOLLIN)
                for part in self._open:
                    events.register(part.event_fd(), select.EPOLLIN)
                self._events = events
            return self._events.fileno()

    def poll(self) -> list[int]:
        """Return tickets that have ended on every disk; again those that an interrupted call may have returned."""
        self._process.check()
        thread = threading.get_ident()
        is_again = thread in self._polling
        self._polling[thread] = None
        with self._lock:
            with suppress(BlockingIOError):
                os.eventfd_read(self._at_once)
            for part in self._open:
                # Runs in C, like `keep`: no interrupt can come between a disk's answer and the list.
                self._reports.extend(zip(repeat(part), chain.from_iterable(starmap(part.poll, ((),)))))
            while self._reports:
                self._take_in(self._reports[-1])
                del self._reports[-1]
            if is_again:
                self._ended.update((ticket, None) for ticket, batch in self._batches.items() if not batch.open)
            ended = [ticket for ticket in self._ended if ticket in self._batches]
            self._ended.clear()
        del self._polling[thread]  # only now: no interrupt can come before the return
        return ended

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket from every disk. See `ExternalStore`."""
        self._process.check()
        with self._lock:
            batch = self._batches.get(ticket)
        if batch is None:
            raise UnknownTicketError(f"ticket {ticket} is not open")
        shape = (batch.count if batch.is_read else 0, self.bytes_per_block)
        try:
            rows = np.zeros(shape, dtype=np.uint8) if batch.rows is None else batch.rows
        except MemoryError:
            raise OutOfMemoryError(
                f"no memory for {shape[0]} blocks of {shape[1]} bytes", shape[0] * shape[1]
            ) from None
        until = None if timeout is None else time.monotonic() + timeout
        ok = np.zeros(batch.count, dtype=np.bool_)
        reasons = ["io"] * batch.count
        for share in batch.shares:
            if not share.done:
                left = None if until is None else max(0.0, until - time.monotonic())
                keep(share.done, share.store.wait, share.tickets[0], left)
            done = share.done[0]
            ok[share.places] = done.ok
            for place, reason in zip(share.places.tolist(), done.reasons, strict=True):
                reasons[place] = reason
        with batch.lock:
            # The rows may be the caller's, who may reuse them once a thread has collected the ticket.
            if ticket not in self._batches:
                raise UnknownTicketError(f"ticket {ticket} is not open")
            for share in batch.shares if batch.is_read else ():
                came = share.done[0].ok
                rows[share.places[came]] = share.done[0].rows[came]
            with self._lock:
                self._disown(batch)
                del self._batches[ticket]  # last, so that an interrupted call can be repeated
        return Completion(ticket, ok, rows, reasons)

    def stats(self) -> StoreStats:
        """Return the sums over the disks. See `ExternalStore`."""
        parts = [part.stats() for part in self._open]
        misses: dict[str, int] = {"io": self._failed} if self._failed else {}
        for part in parts:
            for reason, count in part.misses.items():
                misses[reason] = misses.get(reason, 0) + count
        sums = {
            name: sum(getattr(part, name) for part in parts)
            for name in (
                *("written_blocks", "written_bytes", "read_blocks", "read_bytes", "errors", "errors_in_a_row"),
                *("pending_bytes", "cached_blocks", "evicted_blocks"),
            )
        }
        failing = [part for part in parts if part.errors_in_a_row] or parts
        last_error = "; ".join(filter(None, (part.last_error for part in failing)))
        is_down = None in self._parts or any(part.is_down for part in parts)
        return StoreStats(misses=misses, last_error=last_error, is_down=is_down, **sums)

    def close(self, timeout: float = 5.0) -> bool:
        """Close every disk's store. See `ExternalStore`."""
        until = time.monotonic() + timeout
        closed = [part.close(max(0.0, until - time.monotonic())) for part in self._open]
        if not self._process.is_current:
            return True
        with self._lock:
            if self._events is not None:
                self._events.close()
                self._events = None
        return all(closed)

    def __repr__(self) -> str:
        return f"StripedStore({self._parts})"

    def _submit(
        self,
        disks: Ids,
        call: Callable[[ExternalStore, Ids], tuple[Any, ...]],
        *,
        is_read: bool = False,
        rows: Rows | None = None,
    ) -> int:
        """Submit a batch; `call` returns the method and arguments that submit a disk's share."""
        self._process.check()
        batch = _StripedBatch(len(disks), is_read, rows)
        # Hold the lock while submitting, so that `poll` knows the owner of each ticket.
        with self._lock:
            ticket, self._next = self._next, self._next + 1
            try:
                for part, places in self._shares(disks):
                    if part is not None:
                        batch.shares.append(_Share(part, places))
                        report = part, keep(batch.shares[-1].tickets, *call(part, places))
                        batch.open.add(report)
                        self._owner[report] = ticket
                self._batches[ticket] = batch
                if not batch.open:
                    self._ended[ticket] = None
                    os.eventfd_write(self._at_once, 1)
                self._failed += len(disks) - sum(len(share.places) for share in batch.shares)
            except BaseException:
                self._batches.pop(ticket, None)
                self._disown(batch)
                for share in batch.shares:
                    _let_go(share.store, share.tickets)
                raise
        return ticket

    def _take_in(self, report: _Report) -> None:
        """Process a disk's report; called with the lock held. May be repeated."""
        ticket = self._owner.get(report, 0)
        batch = self._batches.get(ticket)
        if batch is None:  # of an interrupted submission, or collected already
            _let_go(report[0], report[1:])
            return
        batch.open.discard(report)
        if not batch.open:
            self._ended[ticket] = None

    def _disown(self, batch: _StripedBatch) -> None:
        for share in batch.shares:
            for ticket in share.tickets:
                self._owner.pop((share.store, ticket), None)

    def _ask(
        self, keys: Keys, ask: Callable[[ExternalStore, Rows], NDArray[np.bool_]], *, unopened: bool
    ) -> NDArray[np.bool_]:
        """Ask each disk about its keys; `unopened` is the answer for a disk that could not be opened."""
        found = self._check_keys(keys)
        answer = np.full(len(found), unopened)
        for part, places in self._shares(self._disks(found)):
            if part is not None:
                answer[places] = ask(part, found[places])
        return answer

    def _shares(self, disks: Ids) -> list[tuple[ExternalStore | None, Ids]]:
        """Return each store with a share of a batch, and the indexes of that share; the first store if it is empty."""
        shares = [(part, np.flatnonzero(disks == at)) for at, part in enumerate(self._parts)]
        return [share for share in shares if len(share[1])] or [(self._open[0], np.empty(0, np.int64))]

    def _disks(self, keys: Rows) -> Ids:
        # Keys are digests: any of their bytes will do.
        disks: Ids = keys[:, -4:].copy().view("<u4")[:, 0].astype(np.int64) % len(self._parts)
        return disks

    def _check_slots(self, slots: Ids, *, is_write: bool = False) -> None:
        if self._is_keyed:
            raise MappingError("the store is a prefix store, which has no slots")
        check_slots(slots, self.num_slots, is_write=is_write)

    def _check_keys(self, keys: Keys) -> Rows:
        if not self._is_keyed:
            raise no_keys_error()
        found = checked_keys(keys)
        return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32) if isinstance(found, list) else found


def _let_go(store: ExternalStore, tickets: Sequence[int]) -> None:
    """Make a store release answers that nobody will collect."""
    for ticket in tickets:
        with suppress(Exception):  # already collected
            store.wait(ticket, 0.0)
