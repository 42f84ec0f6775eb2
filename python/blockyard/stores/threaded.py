"""`ThreadedStore`: an external store from functions that may block: `put`, `get` and, for keys, `delete`."""

import hashlib
import os
import threading
import time
import traceback
import weakref
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion, StoreStats, checksum_rows
from blockyard.errors import InvalidArgumentError, MappingError, StoreError, UnknownTicketError
from blockyard.stores.base import ExternalStore, Keys, keyless
from blockyard.stores.value import HEADER, check_values, seal_values
from blockyard.workers import Process, start_worker

__all__ = ["ThreadedStore"]

_SLOWEST: Final = 16e6  # bytes a second that a deadline allows for
_DEAR: Final = 0.25  # seconds; a call that fails faster may be repeated at once
_PAUSES: Final = (0.5, 8.0)  # least and most seconds between probes of storage that does not answer
_EPOCH_SECONDS: Final = 1.0  # how long another process's `forget` may go unnoticed
_ABSENT_SECONDS: Final = 1.0  # how long a key that was not there is not looked up again
_MOST_WANTED: Final = 1 << 16  # keys that wait to be looked up
_THERE: Final = inf  # of a key, in place of the time until which it is known to be absent
_FAILED: Final = -1.0  # absent until it is put again

_Kind: TypeAlias = Literal["write", "read", "put", "get", "delete", "forget", "has"]
_Name: TypeAlias = int | bytes  # a slot or a key


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch that was submitted. Its answer is known once it has `ended`, even if its call is still `running`."""

    ticket: int  # 0 for a lookup, which nobody collects
    kind: _Kind
    names: list[_Name]  # slots or keys, without those that had no room
    rows: NDArray[np.uint8] | None  # what a write writes or a read has read
    reasons: list[str]
    num_bytes: int
    deadline: float
    age: int  # calls of `forget` before it
    expected: list[dict[_Name, bytes]] = field(default_factory=list)  # of a read: what each slot's last write has left
    spread: list[int] | None = None  # of a put with repeats: entry of each key of the caller
    digests: dict[_Name, bytes] = field(default_factory=dict)  # of a write: blocks that landed
    before: int = 0  # earlier batches of its slots that have not ended
    followers: list["_Batch"] = field(default_factory=list)
    running: bool = False
    ended: bool = False
    reported: bool = False

    @property
    def is_read(self) -> bool:
        """Whether it brings rows."""
        return self.kind in {"read", "get"}


class ThreadedStore(ExternalStore):
    """A store over functions that may block: `put` and `get`, and `delete` for one with keys. Worker threads call them.

    The class makes tickets, deadlines and misses of them, keeps the order of operations on each slot and key, and
    checks every block that comes back. An exception, a wrong answer or a passed deadline is a miss. Memory that was
    lent to a call that hangs is not used again. A hanging call occupies its thread; it does not keep the interpreter
    from ending.

    After a call that hung or failed late, batches are misses at once, `"unavailable"`, until a probe is answered.

    The functions see names of 32 bytes, never the caller's keys. A slot's name is the SHA-256 of the namespace, 16
    random bytes of this store and the slot. So two stores never share slots, not even two processes over one server;
    blocks in slots are of no use after `close`. The name of a key's block is the same in every process. What is stored
    for it has a header (`blockyard.stores.value`), so rows are wider then; one row more, of 144 bytes, says since when
    blocks count. `forget` replaces it; other processes notice within a second.

    `contains` answers from what this process knows. It says False for a key that is new to it, and looks it up in the
    background: ask again. A plug-in evicts by itself when it is full.

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
        self.namespace = namespace
        self._seed = namespace + os.urandom(16)
        self._open: dict[int, _Batch] = {}  # not collected
        self._ready: deque[_Batch] = deque()  # what a thread may take
        self._last: dict[_Name, _Batch] = {}  # batch of each slot and key, until it has ended
        self._digests: dict[_Name, dict[_Name, bytes]] = {}  # of the last write of each slot
        self._tickets = self._num_threads = self._pending = 0
        self._misses: Counter[str] = Counter()
        self._blocks = {True: 0, False: 0}  # written, read
        self._errors, self._errors_in_a_row, self._last_error = 0, 0, ""
        self._closed = False
        self._event: int | None = None
        self._known: dict[bytes, float] = {}  # keys: `_THERE`, `_FAILED`, or until when they are absent
        self._wanted: dict[bytes, None] = {}  # keys to look up
        self._looking = False
        self._late: set[_Batch] = set()  # puts that were given up and still run
        self._age, self._epoch, self._epoch_until = 0, b"", 0.0
        self._is_down, self._retry_at, self._pause = False, 0.0, _PAUSES[0]

    @abstractmethod
    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store blocks under their keys, in place of what is there. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`, no repeats. A call has its keys to itself unless an earlier one missed its deadline.
            rows: what to store, uint8 `[n, width]`, this call's own; `width` is `bytes_per_block` or, for a store with
                keys, another.

        Returns:
            Whether each block was stored, bool `[n]`; False is a miss, `"refused"`.
        """

    @abstractmethod
    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read blocks by their keys. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`; they may repeat. Those of slots were put earlier; others may be absent.
            out: where to, uint8 `[n, width]`, zeros; not to be written after the call has returned. The width is that of
                the `put`; leave a row as it is, and return True, if what is there has another width.

        Returns:
            Whether each block was there, bool `[n]`; False is a miss, `"absent"`.
        """

    def delete(self, keys: NDArray[np.uint8]) -> None:  # noqa: ARG002 (a store with keys has its own)
        """Delete blocks; absent ones are deleted already. A plug-in that has this method has keys.

        Args:
            keys: uint8 `[n, 32]`, no repeats.
        """
        raise keyless()

    def has(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return whether there is a block under each key, bool `[n]`. The default reads them one by one.

        Args:
            keys: uint8 `[n, 32]`.
        """
        row = np.zeros((1, HEADER + self.bytes_per_block), np.uint8)
        return np.array([_answer("get", self.get(key[None], row), 1)[0] for key in keys], np.bool_)

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks; see `ExternalStore.submit_write`."""
        self._check(slots)
        if len(np.unique(slots)) < len(slots):
            raise MappingError(f"slots has {len(slots) - len(np.unique(slots))} repeats, must have none in a write")
        shape = (len(slots), self.bytes_per_block)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape:
            raise InvalidArgumentError(f"rows is {_of(rows)}, must be uint8 {list(shape)}")
        return self._submit("write", slots.tolist(), rows.copy(order="C"))

    def submit_read(self, slots: NDArray[np.int64]) -> int:
        """Start to read blocks; see `ExternalStore.submit_read`."""
        self._check(slots)
        return self._submit("read", slots.tolist())

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8]) -> int:
        """Start to store blocks under their keys; see `ExternalStore.submit_put`."""
        names = self._keys_of(keys)
        shape = (len(names), self.bytes_per_block)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape:
            raise InvalidArgumentError(f"rows is {_of(rows)}, must be uint8 {list(shape)}")
        single = {name: index for index, name in enumerate(dict.fromkeys(names))}
        spread = [single[name] for name in names] if len(single) < len(names) else None
        values = np.empty((len(single), HEADER + self.bytes_per_block), np.uint8)
        for index, row in zip(range(len(names)) if spread is None else spread, rows, strict=True):
            values[index, HEADER:] = row
        return self._submit("put", list(single), values, spread)

    def submit_get(self, keys: Keys) -> int:
        """Start to read blocks by key; see `ExternalStore.submit_get`."""
        return self._submit("get", self._keys_of(keys))

    def submit_delete(self, keys: Keys) -> int:
        """Start to delete keys; see `ExternalStore.submit_delete`."""
        names = self._keys_of(keys)
        single = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return self._submit("delete", list(single), None, [single[name] for name in names])

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each key is known to have a block; see `ExternalStore.contains`.

        A key that is new to this process is looked up in the background, and False until then.
        """
        names = self._keys_of(keys)
        with self._changed:
            now = time.monotonic()
            if self._closed or self._refuses(now):
                return np.zeros(len(names), np.bool_)
            found = [self._known.get(name, 0.0) for name in names]
            wanted = [name for name, until in zip(names, found, strict=True) if 0 <= until < now]
            self._wanted.update(dict.fromkeys(wanted[: max(0, _MOST_WANTED - len(self._wanted))]))
            if self._wanted:
                self._look()
            return np.array([until == _THERE for until in found], np.bool_)

    def forget(self) -> None:
        """Forget every key at once; see `ExternalStore.forget`. Other processes that run notice within a second."""
        self._keys_of([])
        with self._changed:
            if self._closed:
                raise StoreError("the store is closed")
            self._age += 1
            self._known.clear()
            self._epoch = _next_epoch(self._epoch)
        done = self.wait(self._submit("forget", [self._digest_of(b"BLKYEPOCH1")]))
        if not done.ok.all():
            why = f"{done.reasons[0]}; {self._last_error}" if done.reasons[0] == "error" else done.reasons[0]
            raise StoreError(f"the keys are forgotten here, but later processes may find them: {why}")

    def event_fd(self) -> int:
        """Return a file descriptor that is readable while tickets have ended; see `ExternalStore.event_fd`."""
        self._process.check()
        with self._changed:
            if self._event is None:
                self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                weakref.finalize(self, os.close, self._event)
                if any(batch.ended and not batch.reported for batch in self._open.values()):
                    os.eventfd_write(self._event, 1)
            return self._event

    def poll(self) -> list[int]:
        """Return the tickets that ended since the last call; see `ExternalStore.poll`."""
        self._process.check()
        with self._changed:
            now = time.monotonic()
            for batch in self._open.values():
                if not batch.ended and batch.deadline < now:
                    self._give_up(batch, "timeout")
            if self._event is not None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._event)
            found = [batch for batch in self._open.values() if batch.ended and not batch.reported]
            for batch in found:
                batch.reported = True
            return [batch.ticket for batch in found]

    def wait(self, ticket: int, timeout: float | None = None, out: NDArray[np.uint8] | None = None) -> Completion:
        """Collect a ticket; see `ExternalStore.wait`. Blocks of a read are copied into `out`; misses leave it as it is."""
        self._process.check()
        with self._changed:
            batch = self._open.get(ticket)
            if batch is not None:
                _check_out(out, (len(batch.reasons) if batch.is_read else 0, self.bytes_per_block))
                now = time.monotonic()
                left = batch.deadline - now if timeout is None else min(timeout, batch.deadline - now)
                self._changed.wait_for(lambda: batch.ended, max(0.0, left))
            if batch is None or self._open.pop(ticket, None) is None:
                raise UnknownTicketError(f"ticket {ticket} was never issued, or has been collected")
            self._give_up(batch, "timeout")
            rows = batch.rows if batch.is_read else None
            reasons = batch.reasons if batch.spread is None else [batch.reasons[index] for index in batch.spread]
            if not batch.running:
                self._release(batch)
        ok = np.array([not reason for reason in reasons], dtype=np.bool_)
        if not batch.is_read or (rows is None and out is None):
            rows = np.zeros((len(reasons) if batch.is_read else 0, self.bytes_per_block), np.uint8)
        elif out is not None:
            if rows is not None:
                np.copyto(out, rows, where=ok[:, None])
            rows = out
        assert rows is not None  # noqa: S101 (for the type checker)
        return Completion(ticket, ok, rows, reasons)

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
                errors_in_a_row=self._errors_in_a_row,
                last_error=self._last_error,
                pending_bytes=self._pending,
                stored_blocks=list(self._known.values()).count(_THERE),
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

    def _keys_of(self, keys: Keys) -> list[bytes]:
        self._process.check()
        if type(self).delete is ThreadedStore.delete:
            raise keyless()
        if isinstance(keys, np.ndarray):
            if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != 32:
                raise InvalidArgumentError(f"keys is {_of(keys)}, must be uint8 [n, 32] or 32 bytes each")
            return [key.tobytes() for key in keys]
        names = list(keys)
        if not all(isinstance(name, bytes) and len(name) == 32 for name in names):
            raise InvalidArgumentError(f"keys is {keys!r:.100}, must be uint8 [n, 32] or 32 bytes each")
        return names

    def _submit(
        self,
        kind: _Kind,
        names: Sequence[_Name],
        rows: NDArray[np.uint8] | None = None,
        spread: list[int] | None = None,
    ) -> int:
        with self._changed:
            if self._closed:
                raise StoreError("the store is closed")
            now = time.monotonic()
            refused = "unavailable" if self._refuses(now) else "queue_full"
            moves_bytes = kind not in {"delete", "forget"}
            room = max(0, self.memory - self._pending) // self.bytes_per_block if moves_bytes else len(names)
            taken = list(names[: 0 if refused == "unavailable" else room])
            num_bytes = len(taken) * self.bytes_per_block if moves_bytes else 0
            self._pending += num_bytes
            self._tickets += 1
            batch = _Batch(
                ticket=self._tickets,
                kind=kind,
                names=taken,
                rows=None if rows is None else rows[: len(taken)],
                reasons=[refused] * len(names),
                num_bytes=num_bytes,
                deadline=now + self.deadline + self._pending / _SLOWEST,
                age=self._age,
                spread=spread,
            )
            self._open[batch.ticket] = batch
            self._misses.update(batch.reasons[len(taken) :])
            if kind == "read":
                batch.expected = [self._digests.get(slot, {}) for slot in taken]
            elif kind == "write":
                self._digests.update(dict.fromkeys(names, batch.digests))
            elif kind == "delete":
                self._known.update((name, _FAILED) for name in names if isinstance(name, bytes))
            for earlier in {id(last): last for name in taken if (last := self._last.get(name))}.values():
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
        # A probe must not wait for the calls that hang.
        if self._num_threads < self.threads + self._looking and not self._closed:
            self._num_threads += 1
            try:
                start_worker("blockyard-store", self._serve, self._stop)
            except RuntimeError as error:  # no thread can be started: another one takes it, or its deadline passes
                self._num_threads -= 1
                self._note(error)

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._ready = deque(batch for batch in self._ready if batch.ticket)
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
            rows, reasons, error = None, ["error"] * len(batch.names), None
            began = time.monotonic()
            try:
                rows, reasons = self._carry_out(batch)
            except BaseException as caught:  # noqa: BLE001 (whatever a plug-in raises is a miss)
                error = caught
            with self._changed:
                batch.running = False
                self._late.discard(batch)
                if error is not None:
                    self._note(error)
                else:
                    self._errors_in_a_row = 0
                if not batch.ticket:
                    self._end_lookup(answered=time.monotonic() - began < _DEAR)
                elif batch.ended:
                    self._release(batch)
                else:
                    batch.rows = rows
                    self._end(batch, reasons)
                if error is not None and time.monotonic() - began >= _DEAR:
                    self._go_down()
            del batch, rows, error  # a thread that waits for the lock must not keep them

    def _carry_out(self, batch: _Batch) -> tuple[NDArray[np.uint8] | None, list[str]]:
        if batch.kind == "write":
            return self._write(batch)
        if batch.kind == "read":
            return self._read(batch)
        with self._changed:
            is_old, epoch_until = batch.age < self._age, self._epoch_until
        if is_old:
            return None, ["lost"] * len(batch.names)
        if batch.kind == "forget" or epoch_until <= time.monotonic():
            self._share_epoch()
        keys = [name for name in batch.names if isinstance(name, bytes)]
        if batch.kind == "put":
            return self._put(batch, keys)
        if batch.kind == "get":
            return self._get(keys, len(batch.reasons))
        if batch.kind == "delete":
            self.delete(self._names_of(keys))
            with self._changed:
                late = {name for other in self._late for name in other.names}
            return None, ["lost" if key in late else "" for key in keys]
        if batch.kind == "has":
            return None, self._look_up()
        return None, [""]

    def _write(self, batch: _Batch) -> tuple[None, list[str]]:
        rows, slots = batch.rows, [name for name in batch.names if isinstance(name, int)]
        assert rows is not None  # noqa: S101 (for the type checker)
        digests = [digest.tobytes() for digest in checksum_rows(rows)]
        stored = _answer("put", self.put(self._slot_names(slots), rows), len(rows))
        landed: dict[_Name, bytes] = {slot: digest for slot, digest, good in zip(slots, digests, stored, strict=True) if good}
        with self._changed:
            if not batch.ended:
                batch.digests.update(landed)
        return None, ["" if good else "refused" for good in stored]

    def _read(self, batch: _Batch) -> tuple[NDArray[np.uint8], list[str]]:
        slots = [name for name in batch.names if isinstance(name, int)]
        digests = [known.get(slot) for slot, known in zip(slots, batch.expected, strict=True)]
        there = [index for index, digest in enumerate(digests) if digest is not None]
        reasons = ["empty"] * len(digests)
        out = np.zeros((len(batch.reasons), self.bytes_per_block), np.uint8)
        if not there:
            return out, reasons
        rows = out if len(there) == len(out) else np.zeros((len(there), self.bytes_per_block), np.uint8)
        found = _answer("get", self.get(self._slot_names([slots[index] for index in there]), rows), len(there))
        for index, row, good, digest in zip(there, rows, found, checksum_rows(rows), strict=True):
            reasons[index] = "absent" if not good else "" if digest.tobytes() == digests[index] else "payload_checksum"
            out[index] = 0 if reasons[index] else row
        return out, reasons

    def _put(self, batch: _Batch, keys: list[bytes]) -> tuple[None, list[str]]:
        values = batch.rows
        assert values is not None  # noqa: S101 (for the type checker)
        seal_values(values, self.namespace, keys)
        stored = _answer("put", self.put(self._names_of(keys), values), len(keys))
        return None, ["" if good else "refused" for good in stored]

    def _get(self, keys: list[bytes], count: int) -> tuple[NDArray[np.uint8], list[str]]:
        with self._changed:
            there = [index for index, key in enumerate(keys) if self._known.get(key) != _FAILED]
        reasons, rows = ["absent"] * len(keys), np.zeros((count, self.bytes_per_block), np.uint8)
        wanted = [keys[index] for index in there]
        if not wanted:
            return rows, reasons
        values = np.zeros((len(wanted), HEADER + self.bytes_per_block), np.uint8)
        names = self._names_of(wanted)
        found = _answer("get", self.get(names, values), len(wanted))
        checked = check_values(values, self.namespace, wanted)
        for index, value, good, reason in zip(there, values, found, checked, strict=True):
            reasons[index] = reason if good else "absent"
            if good and not reason:
                rows[index] = value[HEADER:]
        bad = {index for index, (good, reason) in enumerate(zip(found, checked, strict=True)) if good and reason}
        if bad:
            try:
                self.delete(np.unique(names[sorted(bad)], axis=0))
            except Exception as error:  # noqa: BLE001 (it is a miss either way)
                with self._changed:
                    self._note(error)
        return rows, reasons

    def _look_up(self) -> list[str]:
        """Look up the keys that `contains` was asked for; or any name, to see whether the storage answers."""
        with self._changed:
            keys, self._wanted = list(self._wanted), {}
            age = self._age
        if not keys:
            self.has(np.frombuffer(os.urandom(32), np.uint8)[None])
            return []
        found = _answer("has", self.has(self._names_of(keys)), len(keys))
        with self._changed:
            until = time.monotonic() + _ABSENT_SECONDS
            for key, good in zip(keys, found, strict=True):
                if age == self._age and key not in self._last and self._known.get(key) not in {_THERE, _FAILED}:
                    self._learn(key, _THERE if good else until)
        return []

    # ---- since when blocks count ----

    def _share_epoch(self) -> None:
        """Take the newest epoch, ours or the storage's, and see that it is the storage's."""
        name = self._digest_of(b"BLKYEPOCH1")
        stored = self._read_epoch(name)
        with self._changed:
            if stored > self._epoch:
                if self._epoch:
                    self._known.clear()
                self._epoch = stored
            self._epoch = epoch = self._epoch or _next_epoch(b"")
        if epoch != stored:
            self._write_epoch(name, epoch)
        with self._changed:
            self._epoch_until = time.monotonic() + _EPOCH_SECONDS

    def _read_epoch(self, name: bytes) -> bytes:
        row = np.zeros((1, HEADER + 16), np.uint8)
        found = self.get(np.frombuffer(name, np.uint8)[None], row)
        good = _answer("get", found, 1)[0] and not check_values(row, self.namespace, [name])[0]
        return row[0, HEADER:].tobytes() if good else b""

    def _write_epoch(self, name: bytes, epoch: bytes) -> None:
        row = np.zeros((1, HEADER + 16), np.uint8)
        row[0, HEADER:] = np.frombuffer(epoch, np.uint8)
        seal_values(row, self.namespace, [name])
        if not _answer("put", self.put(np.frombuffer(name, np.uint8)[None], row), 1)[0]:
            raise StoreError("put refused the row that says since when blocks count")

    def _slot_names(self, slots: list[int]) -> NDArray[np.uint8]:
        names = b"".join(hashlib.sha256(self._seed + slot.to_bytes(8, "little")).digest() for slot in slots)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    def _names_of(self, keys: list[bytes]) -> NDArray[np.uint8]:
        with self._changed:
            epoch = self._epoch
        names = b"".join(self._digest_of(b"BLKYBLOCK1", epoch + key) for key in keys)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    def _digest_of(self, domain: bytes, rest: bytes = b"") -> bytes:
        return hashlib.sha256(domain + self.namespace + rest).digest()

    # ---- with the lock held ----

    def _end(self, batch: _Batch, reasons: list[str]) -> None:
        """Take a batch's answer, and let those begin that waited for it."""
        batch.reasons[: len(reasons)] = reasons
        batch.ended = True
        self._misses.update(filter(None, reasons))
        if batch.kind in {"write", "put", "read", "get"}:
            self._blocks[not batch.is_read] += reasons.count("")
        if batch.kind in {"put", "get"} and batch.age == self._age:
            self._take_note(batch)
        if not batch.is_read and not batch.running:
            self._release(batch)
        self._changed.notify_all()
        if self._event is not None:
            os.eventfd_write(self._event, 1)
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

    def _take_note(self, batch: _Batch) -> None:
        """Note which keys of a batch are there; a later batch of a key knows better."""
        absent = time.monotonic() + _ABSENT_SECONDS
        for name, reason in zip(batch.names, batch.reasons, strict=False):
            if not isinstance(name, bytes) or self._last.get(name) is not batch or reason in {"closed", "unavailable"}:
                continue
            if reason == "absent" and self._known.get(name) != _FAILED:
                self._learn(name, absent)
            elif reason != "absent":
                self._learn(name, _FAILED if reason else _THERE)

    def _learn(self, key: bytes, what: float) -> None:
        self._known.pop(key, None)
        self._known[key] = what
        while len(self._known) > max(self.num_slots, 1024):
            del self._known[next(iter(self._known))]

    def _give_up(self, batch: _Batch, reason: str) -> None:
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

    def _release(self, batch: _Batch) -> None:
        self._pending -= batch.num_bytes
        batch.num_bytes, batch.rows = 0, None

    def _note(self, error: BaseException) -> None:
        self._errors += 1
        self._errors_in_a_row += 1
        self._last_error = " ".join("".join(traceback.format_exception_only(error)).split())

    # ---- storage that does not answer; with the lock held ----

    def _go_down(self) -> None:
        """Refuse batches, and give up those that wait, until a probe is answered."""
        if not self._is_down:
            self._is_down, self._pause = True, _PAUSES[0]
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
            self._make_ready(_Batch(0, "has", [], None, [], 0, inf, self._age))

    def _end_lookup(self, *, answered: bool) -> None:
        self._looking = False
        if self._is_down:
            if answered:
                self._is_down = False
            else:
                self._pause = min(2 * self._pause, _PAUSES[1])
                self._retry_at = time.monotonic() + self._pause
        if self._wanted and not self._is_down:
            self._look()


def _answer(name: str, found: object, count: int) -> list[bool]:
    array = np.asarray(found)
    if array.dtype != np.bool_ or array.shape != (count,):
        raise TypeError(f"{name} returned {_of(array)}, must return bool [{count}]")
    return [bool(good) for good in array]


def _of(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _check_out(out: object, shape: tuple[int, int]) -> None:
    if out is None or not shape[0]:
        return
    if not isinstance(out, np.ndarray) or out.dtype != np.uint8 or out.shape != shape or not out.flags.c_contiguous:
        raise InvalidArgumentError(f"out is {_of(out)}, must be uint8 {list(shape)}, C-contiguous")


def _next_epoch(epoch: bytes) -> bytes:
    """Return an epoch greater than `epoch`, and than those that other processes began before now."""
    return max(time.time_ns(), int.from_bytes(epoch[:8], "big") + 1).to_bytes(8, "big") + os.urandom(8)
