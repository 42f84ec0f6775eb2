"""`ThreadedStore`: an external store from two functions that may block, `put` and `get`."""

import hashlib
import os
import threading
import time
import traceback
from abc import abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion, StoreStats
from blockyard.errors import InvalidArgumentError, MappingError, StoreError, UnknownTicketError
from blockyard.stores.base import ExternalStore
from blockyard.workers import Process, start_worker

__all__ = ["ThreadedStore"]

_SLOWEST: Final = 16e6  # bytes a second that a deadline allows for


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch that was submitted. Its answer is known once it has `ended`, even if its call is still `running`."""

    ticket: int
    slots: list[int]  # without those that had no room
    rows: NDArray[np.uint8] | None  # what a write writes or a read has read
    is_write: bool
    expected: list[dict[int, bytes]]  # of a read: what the last write of each slot has left
    reasons: list[str]
    num_bytes: int
    deadline: float
    digests: dict[int, bytes] = field(default_factory=dict)  # of a write: blocks that landed
    before: int = 0  # earlier batches of its slots that have not ended
    followers: list["_Batch"] = field(default_factory=list)
    running: bool = False
    ended: bool = False
    reported: bool = False


class ThreadedStore(ExternalStore):
    """A store over two functions that may block: `put` and `get`. They run in worker threads.

    The class makes tickets, deadlines and misses of them, keeps the order of operations on each slot, and checks every
    block that comes back. An exception, a wrong answer or a passed deadline is a miss. Memory that was lent to a call
    that hangs is not used again. A hanging call occupies its thread; it does not keep the interpreter from ending.

    A key is the SHA-256 of the namespace, 16 random bytes of this store and the slot (8 bytes, little-endian). So two
    stores never share keys, not even two processes over one server. A slot has one key: `put` overwrites. Blocks are
    of no use after `close`; where nothing else removes them, give them a time to live.

    Args:
        url: as given to `open_store`; `blockyard.stores.StoreURL.parse` reads options from it.
        bytes_per_block: bytes of one block.
        namespace: digest of all that decides the bytes.

    Attributes:
        num_slots: slots, numbered from 0; the subclass sets it.
        bytes_per_block: as given.
        threads: most calls that run at once.
        memory: most bytes in flight and in results that wait; blocks beyond are misses, `"queue_full"`.
        deadline: least seconds for a batch; it grows by a second for every 16 MB in flight.

    Example:
        >>> from blockyard.stores import ThreadedStore, open_store, register
        >>> @register("dict")
        ... class DictStore(ThreadedStore):
        ...     num_slots = 100
        ...
        ...     def __init__(self, url, **options):
        ...         super().__init__(url, **options)
        ...         self.blocks = {}
        ...
        ...     def put(self, keys, rows):
        ...         self.blocks.update((key.tobytes(), row.copy()) for key, row in zip(keys, rows))
        ...         return np.ones(len(keys), bool)
        ...
        ...     def get(self, keys, out):
        ...         for row, key in zip(out, keys):
        ...             row[:] = self.blocks[key.tobytes()]
        ...         return np.ones(len(keys), bool)
        >>> with open_store("dict://", bytes_per_block=4096) as store:
        ...     written = store.wait(store.submit_write(np.array([3, 5]), np.ones((2, 4096), np.uint8)))
        ...     read = store.wait(store.submit_read(np.array([5, 7])))
        >>> read.ok.tolist(), read.reasons
        ([True, False], ('', 'empty'))
    """

    num_slots: int = 0
    bytes_per_block: int = 0
    threads: int = 4
    memory: int = 1 << 30
    deadline: float = 10.0

    def __init__(self, url: str, *, bytes_per_block: int, namespace: bytes) -> None:
        if bytes_per_block < 1:
            raise InvalidArgumentError(f"bytes_per_block is {bytes_per_block}, must be at least 1")
        self.url = url
        self.bytes_per_block = bytes_per_block
        self._process = Process("a store")
        self._changed = threading.Condition()
        self._seed = namespace + os.urandom(16)
        self._open: dict[int, _Batch] = {}  # not collected
        self._ready: deque[_Batch] = deque()  # what a thread may take
        self._last: dict[int, _Batch] = {}  # batch of each slot, until it has ended
        self._digests: dict[int, dict[int, bytes]] = {}  # of the last write of each slot
        self._tickets = self._num_threads = self._pending = 0
        self._misses: Counter[str] = Counter()
        self._blocks = {True: 0, False: 0}  # written, read
        self._errors, self._last_error = 0, ""
        self._closed = False

    @abstractmethod
    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store blocks under their keys, in place of what is there. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`, no repeats. A call has its keys to itself unless an earlier one missed its deadline.
            rows: the blocks, uint8 `[n, bytes_per_block]`, this call's own.

        Returns:
            Whether each block was stored, bool `[n]`; False is a miss, `"refused"`.
        """

    @abstractmethod
    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read blocks by their keys. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`, keys of earlier `put`s; they may repeat.
            out: where to, uint8 `[n, bytes_per_block]`, zeros; not to be written after the call has returned.

        Returns:
            Whether each block was there, bool `[n]`; False is a miss, `"absent"`.
        """

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks; see `ExternalStore.submit_write`."""
        self._check(slots)
        if len(np.unique(slots)) < len(slots):
            raise MappingError(f"slots has {len(slots) - len(np.unique(slots))} repeats, must have none in a write")
        shape = (len(slots), self.bytes_per_block)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape:
            raise InvalidArgumentError(f"rows is {_of(rows)}, must be uint8 {list(shape)}")
        return self._submit(slots.tolist(), rows)

    def submit_read(self, slots: NDArray[np.int64]) -> int:
        """Start to read blocks; see `ExternalStore.submit_read`."""
        self._check(slots)
        return self._submit(slots.tolist(), None)

    def poll(self) -> list[int]:
        """Return the tickets that ended since the last call; see `ExternalStore.poll`."""
        self._process.check()
        with self._changed:
            now = time.monotonic()
            for batch in self._open.values():
                if not batch.ended and batch.deadline < now:
                    self._give_up(batch, "timeout")
            found = [batch for batch in self._open.values() if batch.ended and not batch.reported]
            for batch in found:
                batch.reported = True
            return [batch.ticket for batch in found]

    def wait(self, ticket: int, timeout: float | None = None, out: NDArray[np.uint8] | None = None) -> Completion:
        """Collect a ticket; see `ExternalStore.wait`. `out` has no effect: rows come as the plug-in wrote them."""
        del out
        self._process.check()
        with self._changed:
            batch = self._open.get(ticket)
            if batch is not None:
                now = time.monotonic()
                left = batch.deadline - now if timeout is None else min(timeout, batch.deadline - now)
                self._changed.wait_for(lambda: batch.ended, max(0.0, left))
            if batch is None or self._open.pop(ticket, None) is None:
                raise UnknownTicketError(f"ticket {ticket} was never issued, or has been collected")
            self._give_up(batch, "timeout")
            rows = batch.rows
            if batch.is_write or rows is None:
                rows = np.zeros((0 if batch.is_write else len(batch.reasons), self.bytes_per_block), np.uint8)
            if not batch.running:
                self._release(batch)
            ok = np.array([not reason for reason in batch.reasons], dtype=np.bool_)
            return Completion(ticket, ok, rows, batch.reasons)

    def stats(self) -> StoreStats:
        """Return the counters since the store was opened."""
        self._process.check()
        with self._changed:
            return StoreStats(
                written_blocks=self._blocks[True],
                written_bytes=self._blocks[True] * self.bytes_per_block,
                read_blocks=self._blocks[False],
                read_bytes=self._blocks[False] * self.bytes_per_block,
                misses=dict(self._misses),
                errors=self._errors,
                last_error=self._last_error,
                pending_bytes=self._pending,
            )

    def close(self, timeout: float = 5.0) -> bool:
        """Refuse new batches, give up those that wait, and let running calls end; see `ExternalStore.close`."""
        if not self._process.is_current:
            return True
        self._stop()
        with self._changed:
            in_time = self._changed.wait_for(lambda: not self._num_threads, max(0.0, timeout))
            for batch in self._open.values():
                self._give_up(batch, "closed")
            return in_time

    def _check(self, slots: NDArray[np.int64]) -> None:
        self._process.check()
        if not isinstance(slots, np.ndarray) or slots.dtype != np.int64 or slots.ndim != 1:
            raise InvalidArgumentError(f"slots is {_of(slots)}, must be int64 [n]")
        if len(slots) and (slots.min() < 0 or slots.max() >= self.num_slots):
            raise MappingError(f"slots has {slots.min()} to {slots.max()}, must be 0 to {self.num_slots - 1}")

    def _submit(self, slots: list[int], rows: NDArray[np.uint8] | None) -> int:
        rows = None if rows is None else rows.copy(order="C")
        with self._changed:
            if self._closed:
                raise StoreError("the store is closed")
            room = max(0, self.memory - self._pending) // self.bytes_per_block
            taken = slots[:room]
            num_bytes = len(taken) * self.bytes_per_block
            self._pending += num_bytes
            self._tickets += 1
            batch = _Batch(
                ticket=self._tickets,
                slots=taken,
                rows=None if rows is None else rows[:room],
                is_write=rows is not None,
                expected=[self._digests.get(slot, {}) for slot in taken] if rows is None else [],
                reasons=["queue_full"] * len(slots),
                num_bytes=num_bytes,
                deadline=time.monotonic() + self.deadline + self._pending / _SLOWEST,
            )
            self._open[batch.ticket] = batch
            self._misses.update(batch.reasons[room:])
            if rows is not None:
                self._digests.update(dict.fromkeys(slots, batch.digests))
            for earlier in {id(last): last for slot in taken if (last := self._last.get(slot))}.values():
                earlier.followers.append(batch)
                batch.before += 1
            self._last.update(dict.fromkeys(taken, batch))
            if not taken:
                self._end(batch, [])
            elif not batch.before:
                self._make_ready(batch)
            return batch.ticket

    def _make_ready(self, batch: _Batch) -> None:
        self._ready.append(batch)
        if self._num_threads < self.threads and not self._closed:
            self._num_threads += 1
            try:
                start_worker("blockyard-store", self._serve, self._stop)
            except RuntimeError as error:  # no thread can be started: another one takes it, or its deadline passes
                self._num_threads -= 1
                self._note(error)

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            for batch in self._open.values():
                if not batch.running:
                    self._give_up(batch, "closed")

    def _serve(self) -> None:
        """Carry out batches until none is ready."""
        while True:
            with self._changed:
                if not self._ready:
                    self._num_threads -= 1
                    self._changed.notify_all()
                    return
                batch = self._ready.popleft()
                batch.running = True
            rows, reasons, error = None, ["error"] * len(batch.slots), None
            try:
                rows, reasons = self._get(batch) if batch.rows is None else self._put(batch, batch.rows)
            except BaseException as caught:  # noqa: BLE001 (whatever a plug-in raises is a miss)
                error = caught
            with self._changed:
                batch.running = False
                if error is not None:
                    self._note(error)
                if batch.ended:
                    self._release(batch)
                else:
                    batch.rows = rows
                    self._end(batch, reasons)
            del batch, rows, error  # a thread that waits for the lock must not keep them

    def _put(self, batch: _Batch, rows: NDArray[np.uint8]) -> tuple[None, list[str]]:
        digests = [_digest(row) for row in rows]
        stored = _answer("put", self.put(self._keys(batch.slots), rows), len(rows))
        landed = {slot: digest for slot, digest, good in zip(batch.slots, digests, stored, strict=True) if good}
        with self._changed:
            if not batch.ended:
                batch.digests.update(landed)
        return None, ["" if good else "refused" for good in stored]

    def _get(self, batch: _Batch) -> tuple[NDArray[np.uint8], list[str]]:
        digests = [known.get(slot) for slot, known in zip(batch.slots, batch.expected, strict=True)]
        there = [index for index, digest in enumerate(digests) if digest is not None]
        reasons = ["empty"] * len(digests)
        out = np.zeros((len(batch.reasons), self.bytes_per_block), np.uint8)
        if not there:
            return out, reasons
        rows = out if len(there) == len(out) else np.zeros((len(there), self.bytes_per_block), np.uint8)
        found = _answer("get", self.get(self._keys([batch.slots[index] for index in there]), rows), len(there))
        for index, row, good in zip(there, rows, found, strict=True):
            reasons[index] = "absent" if not good else "" if _digest(row) == digests[index] else "payload_checksum"
            out[index] = 0 if reasons[index] else row
        return out, reasons

    def _keys(self, slots: list[int]) -> NDArray[np.uint8]:
        keys = b"".join(hashlib.sha256(self._seed + slot.to_bytes(8, "little")).digest() for slot in slots)
        return np.frombuffer(keys, np.uint8).reshape(-1, 32)

    # ---- with the lock held ----

    def _end(self, batch: _Batch, reasons: list[str]) -> None:
        """Take a batch's answer, and let those begin that waited for it."""
        batch.reasons[: len(reasons)] = reasons
        batch.ended = True
        self._misses.update(filter(None, reasons))
        self._blocks[batch.is_write] += reasons.count("")
        if batch.is_write and not batch.running:
            self._release(batch)
        self._changed.notify_all()
        ending = [batch]
        while ending:
            batch = ending.pop()
            if batch.before:
                continue
            for slot in batch.slots:
                if self._last.get(slot) is batch:
                    del self._last[slot]
            followers, batch.followers = batch.followers, []
            for follower in followers:
                follower.before -= 1
                if follower.ended:
                    ending.append(follower)
                elif not follower.before:
                    self._make_ready(follower)

    def _give_up(self, batch: _Batch, reason: str) -> None:
        if batch.ended:
            return
        if batch in self._ready:
            self._ready.remove(batch)
        if not batch.running:
            self._release(batch)
        self._end(batch, [reason] * len(batch.slots))

    def _release(self, batch: _Batch) -> None:
        self._pending -= batch.num_bytes
        batch.num_bytes, batch.rows = 0, None

    def _note(self, error: BaseException) -> None:
        self._errors += 1
        self._last_error = " ".join("".join(traceback.format_exception_only(error)).split())


def _answer(name: str, found: object, count: int) -> list[bool]:
    array = np.asarray(found)
    if array.dtype != np.bool_ or array.shape != (count,):
        raise TypeError(f"{name} returned {_of(array)}, must return bool [{count}]")
    return [bool(good) for good in array]


def _digest(row: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(row.data, digest_size=16).digest()


def _of(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
