"""`ThreadedStore`: an external store from functions that may block: `put`, `get` and, for a prefix store, `delete`."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion, checksum_rows
from blockyard.errors import InvalidArgumentError, StoreError, UnknownTicketError
from blockyard.stores.arguments import check_read_rows, check_rows, check_slots, checked_keys, owners_of_each
from blockyard.stores.base import SLOWEST, ExternalStore, Keys, Owners, Use, no_keys_error
from blockyard.stores.codec import Codec, MacKey
from blockyard.stores.log_lines import FailureLog
from blockyard.stores.threaded.batches import Batch, Batches, BatchKind, Name, Recovery
from blockyard.stores.threaded.epochs import Epoch, Record
from blockyard.stores.threaded.keyed_blocks import KeyedBlocks
from blockyard.stores.threaded.runtime import runtime
from blockyard.stores.threaded.storage import Storage
from blockyard.stores.threaded.stored_values import StoredValues
from blockyard.stores.url import hide_secrets, public_url, secrets_of
from blockyard.stores.value import Bytes, copy_rows, reasons_of, spread_out
from blockyard.types import StoreStats
from blockyard.workers.interrupts import open_event
from blockyard.workers.logs import describe
from blockyard.workers.ownership import Process
from blockyard.workers.threads import IDLE_SECONDS, Polls

__all__ = ["ThreadedStore"]

_DEAR: Final = 0.25  # seconds; a call that fails faster may be repeated at once
_MEMORY_SECONDS: Final = 0.1  # how long a thread that lacks memory waits for it


class ThreadedStore(Storage, ExternalStore):
    """A store over functions that may block: `put`, `get` and, for a prefix store, `delete`. Worker threads call them.

    The class adds tickets, deadlines and misses, keeps the order of operations on each slot and key, and checks every
    block that is read. An exception, a wrong answer or a passed deadline is a miss. A hanging call keeps its thread and
    the memory lent to it, but the interpreter can still exit.

    After a call that hung or failed late, all batches are misses, `"unavailable"`, until a probe is answered. The
    logger `blockyard.stores` gets a line when a store fails (at most one per minute and cause) and when it works again.

    The functions receive names of 32 bytes, never the caller's keys. A slot's name is the slot and 24 random bytes of
    this store: two stores share no slots, and nobody finds them after `close`. A key's name is the same in every
    process. Its stored row starts with a header (`blockyard.stores.value`), so it is wider than the block; with a codec
    or a MAC key, so are the rows of slots. A prefix store has one more row, of 192 bytes: see `read_epoch`. `contains`
    answers from the memory of this process. A plug-in does its own eviction.

    Args:
        url: as given to `open_store`; `blockyard.stores.StoreURL.parse` parses its options.
        bytes_per_block: bytes of one block.
        namespace: digest of everything that determines the bytes.
        codec: encodes the blocks.
        mac_key: 32 bytes, to authenticate values as well as checksum them.
        revision: as for `open_store`.

    Attributes:
        num_slots: number of slots; the subclass sets it.
        bytes_per_block: as given.
        threads: maximum number of concurrent calls; one more while some hang.
        memory: maximum bytes in flight and in uncollected results; blocks beyond it are misses, `"queue_full"`.
        timeout_base: timeout of a batch in seconds, plus one for every 16 MB in flight.

    Example:
        >>> import numpy as np
        >>> from blockyard.stores import ThreadedStore, open_store, register
        >>> @register("dict")
        ... class DictStore(ThreadedStore):
        ...     num_slots = 100
        ...     def __init__(self, url, **options):
        ...         super().__init__(url, **options)
        ...         self.blocks = {}
        ...     def put(self, keys, rows):
        ...         self.blocks.update((key.tobytes(), row) for key, row in zip(keys, rows))
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
    timeout_base: float = 10.0

    _use: Use | None = None  # of a store that is opened for one
    _reuses_rows = False  # whether rows are free for reuse once `put` has returned
    _there_seconds = 60.0  # how long a key is known to have a block; less if lookups are cheap

    def __init__(
        self,
        url: str,
        *,
        bytes_per_block: int,
        namespace: bytes,
        codec: Codec | None = None,
        mac_key: MacKey | None = None,
        revision: str = "",
    ) -> None:
        if bytes_per_block < 1:
            raise InvalidArgumentError(f"bytes_per_block is {bytes_per_block}, must be at least 1")
        self.url = url
        self.bytes_per_block = bytes_per_block
        self._secrets = secrets_of(url)  # hidden in messages
        self._process = Process("a store")
        self._runtime = runtime()
        # Enter the lock itself, not a condition: an interrupt within `Condition.__enter__` would leave it locked.
        self._lock = self._runtime.rlock()
        self._changed = self._runtime.condition(self._lock)
        self._work = self._runtime.condition(self._lock)  # idle threads wait on it
        self._batches = Batches()
        self._recovery = Recovery(self._recover)
        self._tickets = self._num_threads = self._idle = 0
        self._closed = False
        self._event: int | None = None
        self._is_rung = False  # whether the event is readable
        self._polls = Polls()
        self._failures = FailureLog(self._runtime.monotonic)
        self._misses: Counter[str] = Counter()
        self._blocks = {True: 0, False: 0}  # written, read
        self._errors, self._errors_in_a_row, self._last_error = 0, 0, ""
        self._stored_values = StoredValues(
            self, namespace, bytes_per_block, codec, mac_key, note=self._note, reuses_rows=self._reuses_rows
        )
        self.namespace, self._value_bytes = self._stored_values.namespace, self._stored_values.width
        salted = b"BLKYSLOTS1" + self.namespace + self._runtime.random_bytes(16)
        self._salt = hashlib.sha256(salted).digest()[:24]  # of the slots' names
        self._digests: dict[int, dict[Name, bytes]] = {}  # digests of each slot's last write
        self._keyed_blocks = KeyedBlocks(
            self,
            self._stored_values,
            self._batches,
            self._lock,
            fetch=self._fetch_with_record,
            keep=self._keep_epoch,
            note=self._note,
            revision=revision,
            there_seconds=self._there_seconds,
        )

    @property
    def uses(self) -> tuple[Use, ...]:
        """What the store can be used for: for prefixes only if the subclass has `delete`."""
        if self._use is not None:
            return (self._use,)
        return ("swap",) if type(self).delete is ThreadedStore.delete else ("swap", "prefix")

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def max_blocks_in_flight(self) -> int:
        """Maximum number of blocks in flight and in uncollected results."""
        return self.memory // self.bytes_per_block

    def __repr__(self) -> str:
        return f"{type(self).__name__}({public_url(self.url)!r})"

    def submit_write(self, slots: NDArray[np.int64], rows: Bytes) -> int:
        """Start to write blocks; see `ExternalStore.submit_write`."""
        self._check(slots, is_write=True)
        check_rows(rows, (len(slots), self.bytes_per_block))
        return self._submit("write", slots.tolist(), rows)

    def submit_read(self, slots: NDArray[np.int64], rows: Bytes | None = None) -> int:
        """Start to read blocks; see `ExternalStore.submit_read`."""
        self._check(slots)
        check_read_rows(rows, (len(slots), self.bytes_per_block))
        return self._submit("read", slots.tolist(), rows)

    def submit_put(self, keys: Keys, rows: Bytes, owners: Owners | None = None) -> int:
        """Start to store blocks under their keys; see `ExternalStore.submit_put`."""
        names = self._keys_of(keys)
        check_rows(rows, (len(names), self.bytes_per_block))
        single = {name: index for index, name in enumerate(dict.fromkeys(names))}
        owners = None if owners is None or not self.keeps_quotas else owners_of_each(owners, names, single)
        if len(single) == len(names):
            return self._submit("put", names, rows, owners=owners)
        spread = [single[name] for name in names]
        chosen = np.empty((len(single), self.bytes_per_block), np.uint8)
        for index, row in zip(spread, rows, strict=True):
            chosen[index] = row
        return self._submit("put", list(single), chosen, spread, owners=owners)

    def submit_get(self, keys: Keys, rows: Bytes | None = None) -> int:
        """Start to read blocks by key; see `ExternalStore.submit_get`."""
        names = self._keys_of(keys)
        check_read_rows(rows, (len(names), self.bytes_per_block))
        return self._submit("get", names, rows)

    def submit_delete(self, keys: Keys) -> int:
        """Start to delete keys; see `ExternalStore.submit_delete`."""
        names = self._keys_of(keys)
        single = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return self._submit("delete", list(single), spread=[single[name] for name in names])

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each key is known to have a block; see `ExternalStore.contains`.

        Never waits: unknown keys are looked up in the background, so retry some milliseconds later.
        """
        names = self._keys_of(keys)
        with self._lock:
            if self._closed or self._refuses(self._runtime.monotonic()):
                return np.zeros(len(names), np.bool_)
            there, is_wanting = self._keyed_blocks.known.look_up(names)
            if is_wanting:
                self._look()
            return np.array(there, np.bool_)

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether a read of each key would be a miss now; see `ExternalStore.lacks`."""
        names = self._keys_of(keys)
        with self._lock:
            is_down = self._closed or self._refuses(self._runtime.monotonic())
            return np.array([is_down or self._keyed_blocks.known.is_lacked(name) for name in names], np.bool_)

    def forget(self, revision: str | None = None) -> None:
        """Forget every key at once; see `ExternalStore.forget`."""
        self._keys_of([])
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            self._keyed_blocks.stop(revision)
        done = self.wait(self._submit("forget", [self._keyed_blocks.record.key]))
        if not done.ok.all():
            why = f"{done.reasons[0]}; {self._last_error}" if done.reasons[0] == "error" else done.reasons[0]
            raise StoreError(f"forget was not confirmed, so nothing is found or stored until it is called again: {why}")

    def event_fd(self) -> int:
        """Return a file descriptor that is readable after a ticket has ended; see `ExternalStore.event_fd`."""
        self._process.check()
        with self._lock:
            if self._event is None:
                event = open_event(self)
                self._is_rung = bool(self._batches.news) or self._batches.is_down
                if self._is_rung:
                    os.eventfd_write(event, 1)
                self._event = event
            return self._event

    def poll(self) -> list[int]:
        """Return the tickets that ended since the last call; see `ExternalStore.poll`."""
        self._process.check()
        self._failures.flush(self)  # here, since all workers may be hanging
        if self._batches.open:
            self._polls.note()
        with self._lock, self._recovery:
            self._call_thread()  # an earlier call may not have got one
            now = self._runtime.monotonic()
            is_late = self._batches.has_overdue(now)
            for batch, reason in self._batches.overdue(now) if is_late else ():
                self._give_up(batch, reason)
            if self._event is not None and self._is_rung:
                self._is_rung = False
                try:  # noqa: SIM105 (which makes three calls)
                    os.eventfd_read(self._event)
                except BlockingIOError:  # the caller has read it
                    pass
            if is_late and self._batches.has_overdue(now):
                self._tell()
            news, self._batches.news = self._batches.news, {}
            return [ticket for ticket, batch in news.items() if batch.kind != "forget"]  # which collects its own

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket; see `ExternalStore.wait`."""
        self._process.check()
        self._failures.flush(self)
        batches = self._batches
        with self._lock:
            batch = batches.open.get(ticket)
            if batch is not None:
                shape = (len(batch.reasons) if batch.is_read else 0, self.bytes_per_block)
                result = batch.rows if batch.is_read and batch.rows is not None else np.zeros(shape, np.uint8)
                if not batch.ended:
                    with self._recovery:
                        self._call_thread()
                    left = min(batch.deadline - self._runtime.monotonic(), inf if timeout is None else timeout)
                    self._changed.wait_for(lambda: batch.ended or batches.is_refused(batch), max(0.0, left))
            if batch is None or ticket not in batches.open:
                raise UnknownTicketError(f"ticket {ticket} was never issued, or has been collected")
            with self._recovery:
                if not batch.ended:
                    self._give_up(batch, "unavailable" if batches.is_refused(batch) else "timeout")
                rows = batch.read
                reasons = batch.reasons if batch.spread is None else [batch.reasons[index] for index in batch.spread]
                if batch.is_read and rows is None:
                    reasons = [reason or "error" for reason in reasons]
                batches.collect(batch)
        ok = np.array([not reason for reason in reasons], dtype=np.bool_)
        if rows is not None and copy_rows(rows, ok, result):
            self._stored_values.buffers.give(rows)
        return Completion(ticket, ok, result, reasons)

    def stats(self) -> StoreStats:
        """Return the counters since the store was opened. Never waits; starts a probe if the storage failed last."""
        self._process.check()
        with self._lock:
            # An idle cache submits nothing that would show that the storage works again.
            if not self._refuses(self._runtime.monotonic()) and self._errors_in_a_row:
                self._look()
            return StoreStats(
                written_blocks=self._blocks[True],
                written_bytes=self._blocks[True] * self.bytes_per_block,
                read_blocks=self._blocks[False],
                read_bytes=self._blocks[False] * self.bytes_per_block,
                misses=dict(self._misses),
                errors=self._errors,
                errors_in_a_row=self._errors_in_a_row,
                is_down=self._batches.is_down,
                last_error=self._last_error,
                pending_bytes=self._batches.pending,
                cached_blocks=self._keyed_blocks.known.count_there(),
            )

    def close(self, timeout: float = 5.0) -> bool:
        """Refuse new batches, give up waiting ones, and let running calls finish; see `ExternalStore.close`."""
        if not self._process.is_current:
            return True
        self._stop()
        with self._lock:
            in_time: bool = self._changed.wait_for(lambda: self._num_threads <= 0, max(0.0, timeout))
            with self._recovery:
                for batch in self._batches.open.values():
                    self._give_up(batch, "closed")
        self._stored_values.buffers.clear()
        return in_time

    def _stop(self) -> None:
        with self._lock, self._recovery:
            self._closed = True
            self._work.notify_all()
            self._batches.drop_lookup()
            for batch in self._batches.open.values():
                if batch not in self._batches.running:
                    self._give_up(batch, "closed")

    def _check(self, slots: NDArray[np.int64], *, is_write: bool = False) -> None:
        self._process.check()
        if "swap" not in self.uses:
            raise StoreError("the store is a prefix store, which has no slots")
        check_slots(slots, self.num_slots, is_write=is_write)

    def _keys_of(self, keys: Keys) -> list[bytes]:
        self._process.check()
        if "prefix" not in self.uses:
            raise no_keys_error()
        return [bytes(name) for name in checked_keys(keys)]

    # ---- batches and their threads ----

    def _submit(
        self,
        kind: BatchKind,
        names: Sequence[Name],
        rows: Bytes | None = None,
        spread: list[int] | None = None,
        owners: Owners | None = None,
    ) -> int:
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            with self._recovery:
                now, pending = self._runtime.monotonic(), self._batches.pending
                is_refused, moves_bytes = self._refuses(now), kind not in {"delete", "forget"}
                room = max(0, self.memory - pending) // self.bytes_per_block if moves_bytes else len(names)
                taken = [] if is_refused else list(names[:room])
                num_bytes = len(taken) * self.bytes_per_block if moves_bytes else 0
                self._tickets += 1
                batch = Batch(
                    ticket=self._tickets,
                    kind=kind,
                    names=taken,
                    rows=rows,
                    reasons=["unavailable" if is_refused else "queue_full"] * len(names),
                    num_bytes=num_bytes,
                    deadline=now + self.timeout_base + (pending + num_bytes) / SLOWEST,
                    age=self._keyed_blocks.epochs.age,
                    spread=spread,
                    owners=owners,
                )
                self._count_misses(batch, batch.reasons[len(taken) :])
                self._prepare(batch, names)
                is_first = self._batches.add(batch)
                if not taken:
                    self._end(batch, [])
                elif is_first:
                    self._make_ready(batch)
                # Last, so that an interrupted call leaves no ticket.
                return self._batches.open.setdefault(batch.ticket, batch).ticket

    def _make_ready(self, batch: Batch) -> None:
        self._batches.ready[batch] = None
        self._call_thread()

    def _call_thread(self) -> None:
        """Make sure that a thread takes the ready batches; called with the lock held."""
        if self._batches.first() is None:
            return
        if (1 if self._batches.is_down else len(self._batches.ready)) <= self._idle:
            self._work.notify()
            return
        # A probe must not wait for hanging calls, so it may have an additional thread.
        if self._num_threads < self.threads + (self._batches.lookup is not None) and not self._closed:
            self._num_threads += 1
            try:
                self._runtime.start_worker("blockyard-store", self._serve, self._stop, self._abandon)
            except BaseException as error:
                self._num_threads -= 1
                if not isinstance(error, RuntimeError):
                    raise
                self._note(error)  # cannot start a thread: another one takes the batch, or its deadline passes

    def _serve(self) -> None:
        """Run batches; return after a while without any."""
        taken: list[Batch] = []
        while True:
            try:
                self._take(taken)
                if not taken:
                    return
                self._serve_one(taken[0])
            except BaseException as error:  # noqa: BLE001 (such as MemoryError: the batch is a miss)
                self._recover_surely(taken, error)
            taken.clear()  # a waiting thread must not keep the rows alive

    def _take(self, taken: list[Batch]) -> None:
        """Wait for a batch, and append it to `taken`. After a while without any, count the thread as ended."""
        with self._lock:
            if self._batches.first() is None and not self._closed:
                self._idle += 1
                try:
                    self._work.wait_for(lambda: self._batches.first() or self._closed, IDLE_SECONDS)
                finally:
                    self._idle -= 1
            self._batches.take(taken)
            if not taken:
                self._changed.notify_all()
                self._num_threads -= 1

    def _serve_one(self, batch: Batch) -> None:
        rows, reasons, error = None, ["error"] * len(batch.names), None
        began = self._runtime.monotonic()
        try:
            rows, reasons = self._carry_out(batch)
        except BaseException as caught:  # noqa: BLE001 (any exception of a plug-in is a miss)
            error = caught
        with self._lock:
            del self._batches.running[batch]
            if error is not None:
                self._note(error)
            elif batch.is_asked:
                self._errors_in_a_row = 0
                if not self._batches.is_down:
                    self._failures.worked()
            now = self._runtime.monotonic()
            if not batch.ticket:
                if self._batches.end_lookup(now, answered=now - began < _DEAR):
                    self._go_up(works=error is None)
            elif batch.ended:
                self._batches.release(batch)
            else:
                batch.read = rows
                self._end(batch, reasons)
            if error is not None and now - began >= _DEAR:
                self._go_down()
        self._failures.flush(self)

    def _abandon(self, error: BaseException) -> None:
        """Count a thread as ended that never got the memory to begin: another one may start."""
        with self._lock:
            self._num_threads -= 1
            self._note(error)
            self._changed.notify_all()

    # ---- with the lock held ----

    def _end(self, batch: Batch, reasons: list[str]) -> None:
        """End a batch with these reasons."""
        batch.reasons[: len(reasons)] = reasons
        self._count_misses(batch, reasons)
        if batch.kind in {"write", "put", "read", "get"}:
            self._blocks[not batch.is_read] += reasons.count("")
        if batch.kind in {"put", "get", "delete"} and batch.age >= self._keyed_blocks.epochs.age:
            self._keyed_blocks.known.note_batch(batch, self._batches)
            self._keyed_blocks.known.trim(self.num_slots)
        if not batch.is_read:
            self._batches.release(batch)
        free = self._batches.end(batch)
        self._tell()
        for follower in free:
            self._make_ready(follower)

    def _tell(self) -> None:
        """Wake those who wait for a batch or for the event."""
        self._changed.notify_all()
        if self._event is not None and not self._is_rung:
            os.eventfd_write(self._event, 1)
            self._is_rung = True

    def _count_misses(self, batch: Batch, reasons: list[str]) -> None:
        if batch.kind != "forget" and any(reasons):  # it moves no blocks
            self._misses.update(filter(None, reasons))

    def _give_up(self, batch: Batch, reason: str) -> None:
        if batch.ended:
            return
        is_hung = batch in self._batches.running and batch.deadline <= self._runtime.monotonic()
        batch.digests.clear()  # its call may have returned already, but the caller gets a miss
        self._batches.release(batch)
        self._end(batch, [reason] * len(batch.names))
        if is_hung:
            self._go_down()

    def _recover(self, taken: list[Batch], error: BaseException) -> None:
        """Give up all batches; `taken` has the one whose thread the exception met."""
        for batch in taken:
            self._batches.running.pop(batch, None)
            self._batches.release(batch)
        self._batches.give_up_all()
        self._note(error)
        self._tell()

    def _recover_surely(self, taken: list[Batch], error: BaseException) -> None:
        """Recover however long it takes to get the memory: without it, the store would lose a thread for good."""
        while True:
            try:
                with self._lock:
                    self._recover(taken, error)
                    return
            except MemoryError:  # noqa: PERF203 (rarely more than once)
                self._runtime.sleep(_MEMORY_SECONDS)

    def _note(self, error: BaseException) -> None:
        """Count an error. Thread-safe."""
        cause = hide_secrets(describe(error), self._secrets)
        with self._lock:
            self._errors += 1
            self._errors_in_a_row += 1
            self._last_error = cause
            self._failures.failed(cause)

    def _go_down(self) -> None:
        """Refuse batches until a probe is answered. Those that wait end as they are polled or collected."""
        self._keyed_blocks.expire()
        if self._batches.trip(self._runtime.monotonic()):
            self._failures.failed("it does not answer")
            self._tell()

    def _go_up(self, *, works: bool) -> None:
        """Run batches again: a probe was answered, perhaps only with an error."""
        if works:
            self._failures.worked()
        for _ in range(min(len(self._batches.ready), self.threads)):
            self._call_thread()

    def _refuses(self, now: float) -> bool:
        if self._batches.is_probe_due(now):
            self._look()
        return self._batches.is_down

    def _look(self) -> None:
        """Start a lookup, unless one is running. Goes on after an interrupted call."""
        batches = self._batches
        if self._closed:
            return
        if batches.lookup is None:
            batches.lookup = Batch(0, "has", [], None, [], 0, inf, self._keyed_blocks.epochs.age)
        if batches.lookup not in batches.running and not (batches.lookup in batches.ready and self._num_threads):
            self._make_ready(batches.lookup)

    # ---- what a batch does, in a thread ----

    def _carry_out(self, batch: Batch) -> tuple[Bytes | None, list[str]]:
        if batch.kind == "write":
            return self._write(batch)
        return self._read(batch) if batch.kind == "read" else self._keyed_blocks.carry_out(batch)

    def _write(self, batch: Batch) -> tuple[None, list[str]]:
        rows, slots = batch.source(), [name for name in batch.names if isinstance(name, int)]
        names, reasons = self._slot_names(slots), [""] * len(slots)
        if self._stored_values.is_guarded:
            rows, reasons = self._stored_values.seal(rows, [name.tobytes() for name in names])
        elif not (self._stored_values.reuses_rows and rows.flags.c_contiguous):
            rows = rows.copy()
        digests = rows[:, :16].copy() if self._stored_values.is_guarded else checksum_rows(rows)
        self._stored_values.put(names, rows, reasons)
        if self._stored_values.is_guarded:
            self._stored_values.give(rows, reasons)
        landed: dict[Name, bytes] = {
            slot: digest.tobytes() for slot, digest, reason in zip(slots, digests, reasons, strict=True) if not reason
        }
        with self._lock:
            if not batch.ended:
                batch.digests.update(landed)
        return None, reasons

    def _read(self, batch: Batch) -> tuple[Bytes, list[str]]:
        slots = [name for name in batch.names if isinstance(name, int)]
        digests = [known.get(slot) for slot, known in zip(slots, batch.expected, strict=True)]
        there = [index for index, digest in enumerate(digests) if digest is not None]
        reasons = ["empty"] * len(digests)
        if not there:
            batch.is_asked = False
            return np.zeros((0, self.bytes_per_block), np.uint8), reasons
        names = self._slot_names([slots[index] for index in there])
        if self._stored_values.is_guarded:
            rows, found, sums = self._stored_values.fetch(names, [name.tobytes() for name in names])
        else:
            rows = self._stored_values.buffers.take(len(there), self.bytes_per_block)
            found = reasons_of(self.get(names, rows), len(names))
            sums = checksum_rows(rows)
        for index, reason, digest in zip(there, found, sums, strict=True):
            reasons[index] = reason or ("" if digest.tobytes() == digests[index] else "payload_checksum")
        return spread_out(rows, there, len(slots)), reasons

    # ---- the epoch ----

    def _keep_epoch(self, epoch: Epoch) -> bool:  # noqa: ARG002 (a storage with replicas has its own)
        """Wait until the storage's replicas have the record of this epoch. Returns False if it may be lost."""
        return True

    def _fetch_with_record(
        self, names: Bytes, keys: list[bytes], _out: Bytes | None
    ) -> tuple[Record, Bytes, list[str], Bytes]:
        """Read the record, and blocks. Stores that do it in one request, into `_out`, override this."""
        return self._keyed_blocks.epochs.read(), *self._stored_values.fetch(names, keys)

    def _slot_names(self, slots: list[int]) -> Bytes:
        names = b"".join(slot.to_bytes(8, "little") + self._salt for slot in slots)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    # ---- what is known of the names of a batch; called with the lock held ----

    def _prepare(self, batch: Batch, names: Sequence[Name]) -> None:
        if batch.kind == "read":
            batch.expected = [self._digests.get(slot, {}) for slot in batch.names if isinstance(slot, int)]
        elif batch.kind == "write":
            self._digests.update((slot, batch.digests) for slot in names if isinstance(slot, int))
        elif batch.kind == "delete":
            self._keyed_blocks.known.note_deleted(name for name in names if isinstance(name, bytes))
