"""`BatchStore`: the batches of a store whose calls block: tickets, order, threads, deadlines, memory, and a breaker.

It owns all of that under one lock, and knows no storage: `_carry_out` does the work of a batch.
"""

import os
import threading
import time
import traceback
import weakref
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion, StoreStats
from blockyard.errors import InvalidArgumentError, MappingError, StoreError, UnknownTicketError
from blockyard.stores.base import ExternalStore, FailureLog, Keys, Owners
from blockyard.workers import Buffers, Process, start_worker

__all__ = ["Batch", "BatchStore", "Kind", "KnownKeys", "Name"]
__all__ += ["check_read_rows", "check_rows", "check_slots", "checked_keys", "owners_of_each"]

_SLOWEST: Final = 16e6  # bytes a second that a deadline allows for
_DEAR: Final = 0.25  # seconds; a call that fails faster may be repeated at once
_IDLE_SECONDS: Final = 0.5  # how long a thread waits for more to do: starting one costs as much as a small batch
_PAUSES: Final = (0.5, 8.0)  # least and most seconds between probes of storage that does not answer
ABSENT_SECONDS: Final = 1.0  # how long a key that was not there is not looked up again
FAILED_SECONDS: Final = 2.0  # how long a key is not read whose block did not come for a reason that passes
_THERE: Final = inf  # in place of the time until which a key is known to be absent

Kind: TypeAlias = Literal["write", "read", "put", "get", "delete", "forget", "has"]
Name: TypeAlias = int | bytes  # a slot or a key


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that was submitted. Its answer is known once it has `ended`, even if its call is still `running`."""

    ticket: int  # 0 for a lookup, which nobody collects
    kind: Kind
    names: list[Name]  # slots or keys, without those that had no room
    rows: NDArray[np.uint8] | None  # of the caller: what a write writes, or where the blocks of a read go
    reasons: list[str]
    num_bytes: int
    deadline: float
    age: int  # of the store when it was submitted
    expected: list[dict[Name, bytes]] = field(default_factory=list)  # of a read: what each slot's last write has left
    spread: list[int] | None = None  # of a put with repeats: entry of each key of the caller
    read: NDArray[np.uint8] | None = None  # what a read has read; the rows of the caller, or others
    owners: Owners | None = None  # of a put, an entry for each name
    digests: dict[Name, bytes] = field(default_factory=dict)  # of a write: blocks that landed
    before: int = 0  # earlier batches of its slots that have not ended
    followers: list["Batch"] = field(default_factory=list)
    running: bool = False
    ended: bool = False

    @property
    def is_read(self) -> bool:
        """Whether it brings rows."""
        return self.kind in {"read", "get"}


class BatchStore(ExternalStore):
    """Carries out batches in worker threads, those of one slot or key one after the other."""

    num_slots: int = 0
    bytes_per_block: int = 0
    threads: int = 4
    memory: int = 1 << 30
    timeout_base: float = 10.0

    def __init__(self) -> None:
        self._process = Process("a store")
        # It is entered itself: an interrupt within `Condition.__enter__` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)  # idle threads wait for it
        self._idle = 0
        self._buffers = Buffers()
        self._open: dict[int, Batch] = {}  # not collected
        self._news: dict[int, Batch] = {}  # of these, those that have ended since the last `poll`
        self._first_deadline = inf  # no batch that has not ended has an earlier one
        self._ready: deque[Batch] = deque()  # what a thread may take
        self._last: dict[Name, Batch] = {}  # batch of each slot and key, until it has ended
        self._late: set[Batch] = set()  # puts that were given up and still run
        self._tickets = self._num_threads = self._pending = 0
        self._misses: Counter[str] = Counter()
        self._blocks = {True: 0, False: 0}  # written, read
        self._errors, self._errors_in_a_row, self._last_error = 0, 0, ""
        self._failures = FailureLog()
        self._closed = False
        self._event: int | None = None
        self._looking = False  # a lookup is under way
        self._is_down, self._retry_at, self._pause = False, 0.0, _PAUSES[0]

    @property
    @abstractmethod
    def _age(self) -> int:
        """Grows when what was submitted before is void; the lock is held."""

    @abstractmethod
    def _carry_out(self, batch: Batch) -> tuple[NDArray[np.uint8] | None, list[str]]:
        """Do the work of a batch, in a thread of its own. Returns the rows of a read, and each block's reason."""

    @abstractmethod
    def _prepare(self, batch: Batch, names: Sequence[Name]) -> None:
        """Take note of a batch for these names that is being submitted; the lock is held."""

    @abstractmethod
    def _conclude(self, batch: Batch) -> None:
        """Take note of how a batch ended, before those that wait for it begin; the lock is held."""

    @abstractmethod
    def _count_stored(self) -> int:
        """Blocks that are known to be stored under keys; the lock is held."""

    def event_fd(self) -> int:
        """Return a file descriptor that is readable while tickets have ended; see `ExternalStore.event_fd`."""
        self._process.check()
        with self._lock:
            if self._event is None:
                self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                weakref.finalize(self, os.close, self._event)
                if self._news:
                    os.eventfd_write(self._event, 1)
            return self._event

    def poll(self) -> list[int]:
        """Return the tickets that ended since the last call; see `ExternalStore.poll`."""
        self._process.check()
        self._failures.flush(self)  # the workers may all hang
        with self._lock:
            now = time.monotonic()
            if self._first_deadline < now:
                for batch in self._open.values():
                    if not batch.ended and batch.deadline < now:
                        self._give_up(batch, "timeout")
                waiting = (batch.deadline for batch in self._open.values() if not batch.ended)
                self._first_deadline = min(waiting, default=inf)
            if self._event is not None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._event)
            news, self._news = self._news, {}
            # `forget` waits for its own.
            return [ticket for ticket, batch in news.items() if ticket in self._open and batch.kind != "forget"]

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket; see `ExternalStore.wait`."""
        self._process.check()
        self._failures.flush(self)
        with self._lock:
            batch = self._open.get(ticket)
            if batch is not None:
                shape = (len(batch.reasons) if batch.is_read else 0, self.bytes_per_block)
                result = batch.rows if batch.is_read and batch.rows is not None else np.zeros(shape, np.uint8)
                left = min(batch.deadline - time.monotonic(), float("inf") if timeout is None else timeout)
                self._changed.wait_for(lambda: batch.ended, max(0.0, left))
            if batch is None or ticket not in self._open:
                raise UnknownTicketError(f"ticket {ticket} was never issued, or has been collected")
            # The ticket goes last: a call that is interrupted can be made again, at worst for a miss.
            self._give_up(batch, "timeout")
            rows = batch.read
            reasons = batch.reasons if batch.spread is None else [batch.reasons[index] for index in batch.spread]
            if batch.is_read and rows is None:
                reasons = [reason or "error" for reason in reasons]
            if not batch.running:
                self._release(batch)
            self._news.pop(ticket, None)
            del self._open[ticket]
        ok = np.array([not reason for reason in reasons], dtype=np.bool_)
        if rows is not None and not _is_same(rows, result):
            if ok.all():
                np.copyto(result, rows)
            else:
                for index in np.flatnonzero(ok):
                    result[index] = rows[index]
            self._buffers.give(rows)
        return Completion(ticket, ok, result, reasons)

    def stats(self) -> StoreStats:
        """Return the counters since the store was opened."""
        self._process.check()
        with self._lock:
            return StoreStats(
                written_blocks=self._blocks[True],
                written_bytes=self._blocks[True] * self.bytes_per_block,
                read_blocks=self._blocks[False],
                read_bytes=self._blocks[False] * self.bytes_per_block,
                misses=dict(self._misses),
                errors=self._errors,
                errors_in_a_row=self._errors_in_a_row,
                last_error=self._last_error,
                pending_bytes=self._pending,
                cached_blocks=self._count_stored(),
            )

    def close(self, timeout: float = 5.0) -> bool:
        """Refuse new batches, give up those that wait, and let running calls end; see `ExternalStore.close`."""
        if not self._process.is_current:
            return True
        self._stop()
        with self._lock:
            in_time = self._changed.wait_for(lambda: self._num_threads <= 0, max(0.0, timeout))
            for batch in self._open.values():
                self._give_up(batch, "closed")
        self._buffers.clear()
        return in_time

    def _submit(
        self,
        kind: Kind,
        names: Sequence[Name],
        rows: NDArray[np.uint8] | None = None,
        spread: list[int] | None = None,
        owners: Owners | None = None,
    ) -> int:
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            now = time.monotonic()
            refused = "unavailable" if self._refuses(now) else "queue_full"
            moves_bytes = kind not in {"delete", "forget"}
            room = max(0, self.memory - self._pending) // self.bytes_per_block if moves_bytes else len(names)
            taken = list(names[: 0 if refused == "unavailable" else room])
            num_bytes = len(taken) * self.bytes_per_block if moves_bytes else 0
            self._tickets += 1
            batch = Batch(
                ticket=self._tickets,
                kind=kind,
                names=taken,
                rows=rows,
                reasons=[refused] * len(names),
                num_bytes=0,
                deadline=now + self.timeout_base + (self._pending + num_bytes) / _SLOWEST,
                age=self._age,
                spread=spread,
                owners=owners,
            )
            try:
                self._pending += num_bytes
                batch.num_bytes = num_bytes
                self._open[batch.ticket] = batch
                self._first_deadline = min(self._first_deadline, batch.deadline)
                self._misses.update(batch.reasons[len(taken) :])
                self._prepare(batch, names)
                self._put_behind(batch)
                if not taken:
                    self._end(batch, [])
                elif not batch.before:
                    self._make_ready(batch)
                return batch.ticket
            except BaseException as error:
                self._open.pop(batch.ticket, None)
                self._recover(batch, error)
                raise

    def _put_behind(self, batch: Batch) -> None:
        """Let a batch wait for the earlier ones of its slots and keys; the lock is held."""
        for earlier in {id(last): last for name in batch.names if (last := self._last.get(name))}.values():
            earlier.followers.append(batch)
            batch.before += 1
        self._last.update(dict.fromkeys(batch.names, batch))

    def _make_ready(self, batch: Batch) -> None:
        self._ready.append(batch)
        self._call_thread()

    def _call_thread(self) -> None:
        """See that a thread takes what is ready; the lock is held."""
        if len(self._ready) <= self._idle:
            self._work.notify()
            return
        # A probe must not wait for the calls that hang.
        if self._num_threads < self.threads + self._looking and not self._closed:
            self._num_threads += 1
            try:
                start_worker("blockyard-store", self._serve, self._stop)
            except BaseException as error:
                self._num_threads -= 1
                if not isinstance(error, RuntimeError):
                    raise
                self._note(error)  # no thread can be started: another one takes it, or its deadline passes

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._ready = deque(batch for batch in self._ready if batch.ticket)
            for batch in self._open.values():
                if not batch.running:
                    self._give_up(batch, "closed")

    def _serve(self) -> None:
        """Carry out batches until none has come for a while."""
        batch = None
        while True:
            try:
                batch = self._next()
                if batch is None:
                    return
                self._serve_one(batch)
                batch = None  # a thread that waits must not keep its rows
            except BaseException as error:  # noqa: BLE001, PERF203 (want of memory, say: the batch is a miss)
                with self._lock:
                    self._recover(batch, error)

    def _next(self) -> Batch | None:
        """Wait for a batch; none after a while: then the thread counts no more."""
        with self._lock:
            if not self._ready and not self._closed:
                self._idle += 1
                try:
                    self._work.wait_for(lambda: self._ready or self._closed, _IDLE_SECONDS)
                finally:
                    self._idle -= 1
            if not self._ready:
                self._changed.notify_all()
                self._num_threads -= 1
                return None
            batch = self._ready.popleft()
            batch.running = True
            return batch

    def _serve_one(self, batch: Batch) -> None:
        rows, reasons, error = None, ["error"] * len(batch.names), None
        began = time.monotonic()
        try:
            rows, reasons = self._carry_out(batch)
        except BaseException as caught:  # noqa: BLE001 (whatever a plug-in raises is a miss)
            error = caught
        with self._lock:
            batch.running = False
            self._late.discard(batch)
            if error is not None:
                self._note(error)
            else:
                self._errors_in_a_row = 0
                if not self._is_down:
                    self._failures.worked()
            if not batch.ticket:
                self._end_lookup(answered=time.monotonic() - began < _DEAR)
            elif batch.ended:
                self._release(batch)
            else:
                batch.read = rows
                self._end(batch, reasons)
            if error is not None and time.monotonic() - began >= _DEAR:
                self._go_down()
        self._failures.flush(self)

    # ---- with the lock held ----

    def _end(self, batch: Batch, reasons: list[str]) -> None:
        """Take a batch's answer."""
        batch.reasons[: len(reasons)] = reasons
        batch.ended = True
        self._news[batch.ticket] = batch
        self._misses.update(filter(None, reasons))
        if batch.kind in {"write", "put", "read", "get"}:
            self._blocks[not batch.is_read] += reasons.count("")
        self._conclude(batch)
        if not batch.is_read and not batch.running:
            self._release(batch)
        self._changed.notify_all()
        if self._event is not None:
            os.eventfd_write(self._event, 1)
        self._let_begin(batch)

    def _let_begin(self, batch: Batch) -> None:
        """Let batches begin that waited for this one."""
        ending = [batch]
        while ending:
            batch = ending.pop()
            if batch.before:
                continue
            for name in batch.names:
                if self._last.get(name) is batch:
                    del self._last[name]
            followers, batch.followers = batch.followers, []
            for follower in followers:
                follower.before -= 1
                if follower.ended:
                    ending.append(follower)
                elif not follower.before:
                    self._make_ready(follower)

    def _give_up(self, batch: Batch, reason: str) -> None:
        if batch.ended:
            return
        if batch in self._ready:
            self._ready.remove(batch)
        is_hung = batch.running and batch.deadline <= time.monotonic()
        if batch.running and batch.kind == "put":
            self._late.add(batch)
        if not batch.running:
            self._release(batch)
        self._end(batch, [reason] * len(batch.names))
        if is_hung:
            self._go_down()

    def _release(self, batch: Batch) -> None:
        self._pending -= batch.num_bytes
        batch.num_bytes = 0
        batch.read = None
        if not batch.is_read:
            batch.rows = None

    def _recover(self, batch: Batch | None, error: BaseException) -> None:
        """After an exception amid the changes for a batch: it is a miss, and the others are put in order again."""
        if batch is not None:
            batch.running = False
            self._late.discard(batch)
            if not batch.ticket:
                self._looking = False
            elif not batch.ended:
                batch.reasons = ["error"] * len(batch.reasons)
                batch.ended = True
                self._news[batch.ticket] = batch
            self._release(batch)
        self._note(error)
        self._last = {}
        self._ready = deque(batch for batch in self._ready if not batch.ticket)
        for other in self._open.values():
            other.before, other.followers = 0, []
        for other in self._open.values():
            if not other.ended:
                self._put_behind(other)
                if not other.before and not other.running:
                    self._make_ready(other)
        self._changed.notify_all()
        if self._event is not None:
            os.eventfd_write(self._event, 1)

    def _note(self, error: BaseException) -> None:
        self._errors += 1
        self._errors_in_a_row += 1
        self._last_error = " ".join("".join(traceback.format_exception_only(error)).split())
        self._failures.failed(self._last_error)

    # ---- storage that does not answer; with the lock held ----

    def _go_down(self) -> None:
        """Refuse batches, and give up those that wait, until a probe is answered."""
        if not self._is_down:
            self._is_down, self._pause = True, _PAUSES[0]
            self._failures.failed("it does not answer")
        self._retry_at = time.monotonic() + self._pause
        for batch in list(self._open.values()):
            if not batch.ended and not batch.running:
                self._give_up(batch, "unavailable")

    def _refuses(self, now: float) -> bool:
        if self._is_down and self._retry_at <= now:
            self._look()
        return self._is_down

    def _look(self) -> None:
        """Start a lookup, unless one is under way."""
        if not self._looking and not self._closed:
            self._looking = True
            self._make_ready(Batch(0, "has", [], None, [], 0, inf, self._age))

    def _end_lookup(self, *, answered: bool) -> None:
        self._looking = False
        if self._is_down:
            if answered:
                self._is_down = False
                self._failures.worked()
            else:
                self._pause = min(2 * self._pause, _PAUSES[1])
                self._retry_at = time.monotonic() + self._pause


def describe_array(value: object) -> str:
    """Say what an argument is, for a message."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _is_same(rows: NDArray[np.uint8], others: NDArray[np.uint8]) -> bool:
    """Return whether two arrays are the same memory."""
    return rows.shape == others.shape and rows.ctypes.data == others.ctypes.data


def check_read_rows(rows: object, shape: tuple[int, int]) -> None:
    """Refuse what is no place for the blocks of a read; None asks for new rows."""
    if rows is None or not shape[0]:
        return
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape or not rows.flags.carray:
        wanted = f"uint8 {list(shape)}, C-contiguous and writable"
        raise InvalidArgumentError(f"rows is {describe_array(rows)}, must be {wanted}")


def check_rows(rows: object, shape: tuple[int, int], name: str = "rows") -> None:
    """Refuse what is no block for each slot or key of a batch."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape:
        raise InvalidArgumentError(f"{name} is {describe_array(rows)}, must be uint8 {list(shape)}")


def check_slots(slots: NDArray[np.int64], num_slots: int, *, is_write: bool = False) -> None:
    """Refuse what names no slots of a store, and repeats in a write."""
    if not isinstance(slots, np.ndarray) or slots.dtype != np.int64 or slots.ndim != 1:
        raise InvalidArgumentError(f"slots is {describe_array(slots)}, must be int64 [n]")
    if len(slots) and (slots.min() < 0 or slots.max() >= num_slots):
        raise MappingError(f"slots has {slots.min()} to {slots.max()}, must be 0 to {num_slots - 1}")
    if is_write and len(np.unique(slots)) < len(slots):
        raise MappingError(f"slots has {len(slots) - len(np.unique(slots))} repeats, must have none in a write")


def checked_keys(keys: Keys) -> NDArray[np.uint8] | list[bytes]:
    """Return keys as they are, or as a list. Refuse what is none."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != 32:
            raise InvalidArgumentError(f"keys is {describe_array(keys)}, must be uint8 [n, 32] or 32 bytes each")
        return keys
    names = list(keys)
    if not all(isinstance(name, bytes) and len(name) == 32 for name in names):
        raise InvalidArgumentError(f"keys is {keys!r:.100}, must be uint8 [n, 32] or 32 bytes each")
    return names


def owners_of_each(owners: Owners, names: list[bytes], single: dict[bytes, int]) -> Owners:
    """Return the owners of each different name."""
    for name, found in zip(("tenants", "parents"), owners, strict=True):
        check_rows(found, (len(names), 32), f"owners.{name}")
    if len(single) == len(names):
        return Owners(owners.tenants.copy(), owners.parents.copy())
    places = {name: index for index, name in reversed(list(enumerate(names)))}
    first = [places[name] for name in single]
    return Owners(owners.tenants[first], owners.parents[first])


class KnownKeys:
    """Which keys have a block, as far as this process knows, and which not to ask for now. The caller holds a lock.

    It is the only memory of absent keys over a store: what has a store asks its `lacks`.

    A read that failed hides its key for two seconds, so that one key cannot keep a thread busy; then it is read again.
    A deletion that was not confirmed hides its key until it is put again.
    """

    def __init__(self) -> None:
        # `_THERE`, or until when a key is absent. It is negative for those that are not even read until then.
        self._until: dict[bytes, float] = {}

    def clear(self) -> None:
        """Know nothing."""
        self._until.clear()

    def look_up(self, keys: Sequence[bytes]) -> tuple[list[bool], list[bytes]]:
        """Return whether each key is known to have a block, and the keys that the storage is to be asked for."""
        now, known = time.monotonic(), [self._until.get(key, 0.0) for key in keys]
        there = [until == _THERE for until in known]
        if all(there):
            return there, []
        return there, [key for key, until in zip(keys, known, strict=True) if abs(until) < now]

    def is_hidden(self, key: bytes) -> bool:
        """Return whether a key is not to be read now."""
        return self._until.get(key, 0.0) < -time.monotonic()

    def is_due(self, key: bytes) -> bool:
        """Return whether the storage is to be asked for a key."""
        return abs(self._until.get(key, 0.0)) < time.monotonic()

    def is_lacked(self, key: bytes) -> bool:
        """Return whether a read of a key is known to be a miss now."""
        until = self._until.get(key, 0.0)
        return until != _THERE and abs(until) >= time.monotonic()

    def note(self, key: bytes, *, is_there: bool) -> None:
        """Take note of what the storage said."""
        self._set(key, _THERE if is_there else time.monotonic() + ABSENT_SECONDS)

    def note_failed(self, key: bytes) -> None:
        """Take note that a key's block did not come or go for a reason that passes."""
        self._set(key, -(time.monotonic() + FAILED_SECONDS))

    def note_deleted(self, keys: Iterable[bytes]) -> None:
        """Take note that keys are being deleted."""
        self._until.update(dict.fromkeys(keys, -_THERE))

    def trim(self, most: int) -> None:
        """Forget what was learned first, down to `most` keys."""
        while len(self._until) > most:
            del self._until[next(iter(self._until))]

    def count_there(self) -> int:
        """Return how many keys are known to have a block."""
        return list(self._until.values()).count(_THERE)

    def _set(self, key: bytes, until: float) -> None:
        self._until.pop(key, None)
        self._until[key] = until
