"""`ThreadedStore`: an external store from functions that may block: `put`, `get` and, for keys, `delete`."""

import hashlib
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import checksum_rows
from blockyard.errors import InvalidArgumentError, MappingError, StoreError
from blockyard.stores.base import Keys, keyless
from blockyard.stores.batches import Batch, BatchStore, Name, of
from blockyard.stores.codec import Codec, MacKey, read_mac_key
from blockyard.stores.value import HEADER, check_values, seal_values, value_length

__all__ = ["ThreadedStore"]

_EPOCH_SECONDS: Final = 1.0  # how long another process's `forget` may go unnoticed
_ABSENT_SECONDS: Final = 1.0  # how long a key that was not there is not looked up again
_MOST_WANTED: Final = 1 << 16  # keys that wait to be looked up
_THERE: Final = inf  # of a key, in place of the time until which it is known to be absent
_FAILED: Final = -1.0  # absent until it is put again


class ThreadedStore(BatchStore):
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

    With a codec or a MAC key the blocks of slots have the header too.

    `contains` answers from what this process knows: False means "absent, or not known yet". It looks a key that is new
    to it up in the background: ask again. A plug-in evicts by itself when it is full.

    Args:
        url: as given to `open_store`; `blockyard.stores.StoreURL.parse` reads options from it.
        bytes_per_block: bytes of one block.
        namespace: digest of all that decides the bytes.
        codec: encodes the blocks.
        mac_key: 32 bytes; values are then authenticated, not only checksummed.

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

    _reuses_rows = False  # whether nothing refers to rows any more once `put` has returned

    def __init__(
        self,
        url: str,
        *,
        bytes_per_block: int,
        namespace: bytes,
        codec: Codec | None = None,
        mac_key: MacKey | None = None,
    ) -> None:
        if bytes_per_block < 1:
            raise InvalidArgumentError(f"bytes_per_block is {bytes_per_block}, must be at least 1")
        super().__init__()
        self.url = url
        self.bytes_per_block = bytes_per_block
        self._codec = codec
        self._mac_key = None if mac_key is None else read_mac_key(mac_key)
        self._is_guarded = codec is not None or mac_key is not None
        self.namespace = _guarded(namespace, codec, self._mac_key) if self._is_guarded else namespace
        self._width = HEADER + (bytes_per_block if codec is None else codec.bound(bytes_per_block))
        self._seed = self.namespace + os.urandom(16)
        self._digests: dict[Name, dict[Name, bytes]] = {}  # of the last write of each slot
        self._known: dict[bytes, float] = {}  # keys: `_THERE`, `_FAILED`, or until when they are absent
        self._wanted: dict[bytes, None] = {}  # keys to look up
        self._epoch, self._epoch_until = b"", 0.0
        self._one_sharer = threading.Lock()

    @abstractmethod
    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store blocks under their keys, in place of what is there. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`, no repeats. A call has its keys to itself unless an earlier one missed its deadline.
            rows: what to store, uint8 `[n, width]`, this call's own; `width` is `bytes_per_block` or, for a store with
                keys, a codec or a MAC key, another.

        Returns:
            Whether each block was stored, bool `[n]`; False is a miss, `"refused"`.
        """

    @abstractmethod
    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read blocks by their keys. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`; they may repeat. Those of slots were put earlier; others may be absent.
            out: where to, uint8 `[n, width]`, with any content; not to be written after the call has returned. If a
                stored row has another width, return True and leave the row as it is.

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
        row = np.zeros((1, self._width), np.uint8)
        return np.array([_answer("get", self.get(key[None], row), 1)[0] for key in keys], np.bool_)

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks; see `ExternalStore.submit_write`."""
        self._check(slots)
        if len(np.unique(slots)) < len(slots):
            raise MappingError(f"slots has {len(slots) - len(np.unique(slots))} repeats, must have none in a write")
        shape = (len(slots), self.bytes_per_block)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape:
            raise InvalidArgumentError(f"rows is {of(rows)}, must be uint8 {list(shape)}")
        header = HEADER if self._mac_key is not None and self._codec is None else 0
        blocks = self._buffers.take(len(slots), header + self.bytes_per_block)
        blocks[:, header:] = rows
        return self._submit("write", slots.tolist(), blocks)

    def submit_read(self, slots: NDArray[np.int64]) -> int:
        """Start to read blocks; see `ExternalStore.submit_read`."""
        self._check(slots)
        return self._submit("read", slots.tolist())

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8]) -> int:
        """Start to store blocks under their keys; see `ExternalStore.submit_put`."""
        names = self._keys_of(keys)
        shape = (len(names), self.bytes_per_block)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape:
            raise InvalidArgumentError(f"rows is {of(rows)}, must be uint8 {list(shape)}")
        single = {name: index for index, name in enumerate(dict.fromkeys(names))}
        spread = [single[name] for name in names] if len(single) < len(names) else None
        header = 0 if self._codec else HEADER
        values = self._buffers.take(len(single), header + self.bytes_per_block)
        if spread is None:
            values[:, header:] = rows
        else:
            for index, row in zip(spread, rows, strict=True):
                values[index, header:] = row
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

        False means "absent, or not known yet": this never waits for the storage. A key that is new to this process is
        looked up in the background, so asking again some milliseconds later tells. A key that was absent is looked up
        again after a second, if it is asked for.
        """
        names = self._keys_of(keys)
        with self._lock:
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
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            self._age += 1
            self._known.clear()
            self._epoch = _next_epoch(self._epoch)
        done = self.wait(self._submit("forget", [self._digest_of(b"BLKYEPOCH1")]))
        if not done.ok.all():
            why = f"{done.reasons[0]}; {self._last_error}" if done.reasons[0] == "error" else done.reasons[0]
            raise StoreError(f"the keys are forgotten here, but later processes may find them: {why}")

    def _check(self, slots: NDArray[np.int64]) -> None:
        self._process.check()
        if not isinstance(slots, np.ndarray) or slots.dtype != np.int64 or slots.ndim != 1:
            raise InvalidArgumentError(f"slots is {of(slots)}, must be int64 [n]")
        if len(slots) and (slots.min() < 0 or slots.max() >= self.num_slots):
            raise MappingError(f"slots has {slots.min()} to {slots.max()}, must be 0 to {self.num_slots - 1}")

    def _keys_of(self, keys: Keys) -> list[bytes]:
        self._process.check()
        if type(self).delete is ThreadedStore.delete:
            raise keyless()
        if isinstance(keys, np.ndarray):
            if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != 32:
                raise InvalidArgumentError(f"keys is {of(keys)}, must be uint8 [n, 32] or 32 bytes each")
            return [key.tobytes() for key in keys]
        names = list(keys)
        if not all(isinstance(name, bytes) and len(name) == 32 for name in names):
            raise InvalidArgumentError(f"keys is {keys!r:.100}, must be uint8 [n, 32] or 32 bytes each")
        return names

    def _carry_out(self, batch: Batch) -> tuple[NDArray[np.uint8] | None, list[str]]:
        if batch.kind in {"write", "read"}:
            return self._write(batch) if batch.kind == "write" else self._read(batch)
        if batch.kind == "has":
            return None, self._look_up()
        age, epoch = self._share_epoch(is_due=batch.kind == "forget")
        if batch.age < age:
            return None, ["lost"] * len(batch.names)
        keys = [name for name in batch.names if isinstance(name, bytes)]
        names = self._names_of(keys, epoch)
        if batch.kind == "put":
            return self._put(batch, keys, names)
        if batch.kind == "get":
            return self._get(batch, keys, names)
        late = self._delete(names) if batch.kind == "delete" else set()
        return None, ["lost" if key in late else "" for key in keys]

    def _write(self, batch: Batch) -> tuple[None, list[str]]:
        rows, slots = batch.rows, [name for name in batch.names if isinstance(name, int)]
        assert rows is not None  # noqa: S101 (for the type checker)
        names, reasons = self._slot_names(slots), [""] * len(slots)
        if self._is_guarded:
            rows, reasons = self._seal(rows, [name.tobytes() for name in names])
        digests = rows[:, :16].copy() if self._is_guarded else checksum_rows(rows)
        self._put_good(names, rows, reasons)
        landed: dict[Name, bytes] = {
            slot: digest.tobytes() for slot, digest, reason in zip(slots, digests, reasons, strict=True) if not reason
        }
        with self._lock:
            if not batch.ended:
                batch.digests.update(landed)
        return None, reasons

    def _read(self, batch: Batch) -> tuple[NDArray[np.uint8], list[str]]:
        slots = [name for name in batch.names if isinstance(name, int)]
        digests = [known.get(slot) for slot, known in zip(slots, batch.expected, strict=True)]
        there = [index for index, digest in enumerate(digests) if digest is not None]
        reasons = ["empty"] * len(digests)
        if not there:
            return np.zeros((0, self.bytes_per_block), np.uint8), reasons
        names = self._slot_names([slots[index] for index in there])
        if self._is_guarded:
            rows, found, sums = self._fetch(names, [name.tobytes() for name in names])
        else:
            rows = self._buffers.take(len(there), self.bytes_per_block)
            found = ["" if good else "absent" for good in _answer("get", self.get(names, rows), len(there))]
            sums = checksum_rows(rows)
        for index, reason, digest in zip(there, found, sums, strict=True):
            reasons[index] = reason or ("" if digest.tobytes() == digests[index] else "payload_checksum")
        return _spread_out(rows, there, len(slots)), reasons

    def _put(self, batch: Batch, keys: list[bytes], names: NDArray[np.uint8]) -> tuple[None, list[str]]:
        assert batch.rows is not None  # noqa: S101 (for the type checker)
        values, reasons = self._seal(batch.rows, keys)
        self._put_good(names, values, reasons)
        return None, reasons

    def _get(self, batch: Batch, keys: list[bytes], names: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], list[str]]:
        with self._lock:
            there = [index for index, key in enumerate(keys) if self._known.get(key) != _FAILED]
        reasons = ["absent"] * len(keys)
        if not there:
            return np.zeros((0, self.bytes_per_block), np.uint8), reasons
        out = batch.lent if len(there) == len(batch.reasons) else None
        names = names[there]
        rows, found, _ = self._fetch(names, [keys[index] for index in there], out)
        for index, reason in zip(there, found, strict=True):
            reasons[index] = reason
        bad = [index for index, reason in enumerate(found) if reason not in {"", "absent"}]
        if bad:
            try:
                self.delete(np.unique(names[bad], axis=0))
            except Exception as error:  # noqa: BLE001 (it is a miss either way)
                with self._lock:
                    self._note(error)
        return _spread_out(rows, there, len(keys)), reasons

    # ---- values: blocks with a header ----

    def _seal(self, rows: NDArray[np.uint8], keys: list[bytes]) -> tuple[NDArray[np.uint8], list[str]]:
        """Make values of blocks. Returns them, and why some are none."""
        values, reasons, lengths = rows, [""] * len(keys), None
        if self._codec is not None:
            values, lengths = self._buffers.take(len(keys), self._width), []
            for index, (row, value) in enumerate(zip(rows, values, strict=True)):
                try:
                    lengths.append(self._codec.encode_into(row, value[HEADER:]))
                except Exception as error:  # noqa: BLE001, PERF203 (whatever a codec raises)
                    reasons[index] = "codec"
                    lengths.append(0)
                    with self._lock:
                        self._note(error)
            self._buffers.give(rows)
        seal_values(values, self.namespace, keys, lengths=lengths, mac_key=self._mac_key)
        return values, reasons

    def _put_good(self, names: NDArray[np.uint8], rows: NDArray[np.uint8], reasons: list[str]) -> None:
        """Put the rows that have no reason yet not to be, and set the reasons of those that are refused."""
        good = [index for index, reason in enumerate(reasons) if not reason]
        if not good:
            return
        chosen = (names, rows) if len(good) == len(rows) else (names[good], rows[good])
        for index, stored in zip(good, _answer("put", self.put(*chosen), len(good)), strict=True):
            reasons[index] = "" if stored else "refused"
        if self._reuses_rows and not any(reasons):
            self._buffers.give(rows)

    def _fetch(
        self,
        names: NDArray[np.uint8],
        keys: list[bytes],
        out: NDArray[np.uint8] | None = None,  # noqa: ARG002 (for stores that can read straight into it)
    ) -> tuple[NDArray[np.uint8], list[str], NDArray[np.uint8]]:
        """Read values. Returns their blocks, each one's reason, and the checksums in their headers.

        A store that has read the blocks into rows of the caller, `out`, returns these.
        """
        values = self._buffers.take(len(keys), self._width)
        values[:, :HEADER] = 0
        found = _answer("get", self.get(names, values), len(keys))
        sums, varies = values[:, :16].copy(), self._codec is not None
        checked = check_values(values, self.namespace, keys, varies=varies, mac_key=self._mac_key)
        reasons = [reason if good else "absent" for reason, good in zip(checked, found, strict=True)]
        if self._codec is None:
            return values[:, HEADER:], reasons, sums
        rows = self._buffers.take(len(keys), self.bytes_per_block)
        for index, (value, row) in enumerate(zip(values, rows, strict=True)):
            if reasons[index]:
                continue
            try:
                self._codec.decode_into(value[HEADER : HEADER + value_length(value)], row)
            except Exception as error:  # noqa: BLE001 (whatever a codec raises)
                reasons[index] = "codec"
                with self._lock:
                    self._note(error)
        self._buffers.give(values)
        return rows, reasons, sums

    def _varies(self, rows: NDArray[np.uint8]) -> bool:
        """Return whether a row or rows hold what a codec returned, followed by zeros."""
        return self._codec is not None and rows.shape[-1] == self._width

    def _stored(self, row: NDArray[np.uint8]) -> memoryview:
        """Return the bytes of a row that count: those of a codec are followed by zeros."""
        return (row[: HEADER + value_length(row)] if self._varies(row) else row).data

    def _takes(self, row: NDArray[np.uint8], size: int) -> bool:
        """Return whether a stored row of `size` bytes fits `row`; what is left of it becomes zero."""
        if not self._varies(row):
            return size == len(row)
        row[min(size, len(row)) :] = 0
        return HEADER <= size <= len(row)

    def _delete(self, names: NDArray[np.uint8]) -> set[Name]:
        """Delete values. Returns the keys that a put may still bring back."""
        self.delete(names)
        with self._lock:
            return {name for other in self._late for name in other.names}

    def _look_up(self) -> list[str]:
        """Look up the keys that `contains` was asked for; or any name, to see whether the storage answers."""
        with self._lock:
            keys, self._wanted = list(self._wanted), {}
        if not keys:
            self.has(np.frombuffer(os.urandom(32), np.uint8)[None])
            return []
        age, epoch = self._share_epoch()
        found = _answer("has", self.has(self._names_of(keys, epoch)), len(keys))
        with self._lock:
            until = time.monotonic() + _ABSENT_SECONDS
            for key, good in zip(keys, found, strict=True):
                if age == self._age and key not in self._last and self._known.get(key) not in {_THERE, _FAILED}:
                    self._learn(key, _THERE if good else until)
        return []

    # ---- since when blocks count ----

    def _share_epoch(self, *, is_due: bool = False) -> tuple[int, bytes]:
        """Take the newest epoch, ours or the storage's, and see that it is the storage's.

        Args:
            is_due: ask the storage at once, not only if it was asked too long ago.

        Returns:
            How often `forget` was called, and the epoch.
        """
        with self._lock:
            if not is_due and time.monotonic() < self._epoch_until:
                return self._age, self._epoch
        with self._one_sharer:  # or an older epoch could be written over a newer one
            name = self._digest_of(b"BLKYEPOCH1")
            stored = self._read_epoch(name)
            with self._lock:
                if stored is None:  # nothing newer can be learnt, and nothing is guessed
                    if is_due or not self._epoch:
                        raise StoreError("the row that says since when blocks count cannot be read")
                    stored = self._epoch
                if stored > self._epoch:
                    if self._epoch:
                        self._known.clear()
                    self._epoch = stored
                self._epoch = self._epoch or _next_epoch(b"")
                age, epoch = self._age, self._epoch
            if epoch != stored:
                self._write_epoch(name, epoch)
            with self._lock:
                self._epoch_until = time.monotonic() + _EPOCH_SECONDS
            return age, epoch

    def _get_epoch(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_] | None:
        """Read the row as `get` does. A store whose parts fail alone returns None if the row's part does not answer."""
        return self.get(keys, out)

    def _read_epoch(self, name: bytes) -> bytes | None:
        row = np.zeros((1, HEADER + 16), np.uint8)
        found = self._get_epoch(np.frombuffer(name, np.uint8)[None], row)
        if found is None:
            return None
        good = _answer("get", found, 1)[0] and not check_values(row, self.namespace, [name], mac_key=self._mac_key)[0]
        return row[0, HEADER:].tobytes() if good else b""

    def _write_epoch(self, name: bytes, epoch: bytes) -> None:
        row = np.zeros((1, HEADER + 16), np.uint8)
        row[0, HEADER:] = np.frombuffer(epoch, np.uint8)
        seal_values(row, self.namespace, [name], mac_key=self._mac_key)
        if not _answer("put", self.put(np.frombuffer(name, np.uint8)[None], row), 1)[0]:
            raise StoreError("put refused the row that says since when blocks count")

    def _slot_names(self, slots: list[int]) -> NDArray[np.uint8]:
        names = b"".join(hashlib.sha256(self._seed + slot.to_bytes(8, "little")).digest() for slot in slots)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    def _names_of(self, keys: list[bytes], epoch: bytes) -> NDArray[np.uint8]:
        names = b"".join(self._digest_of(b"BLKYBLOCK1", epoch + key) for key in keys)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    def _digest_of(self, domain: bytes, rest: bytes = b"") -> bytes:
        return hashlib.sha256(domain + self.namespace + rest).digest()

    # ---- with the lock held ----

    def _prepare(self, batch: Batch, names: Sequence[Name]) -> None:
        if batch.kind == "read":
            batch.expected = [self._digests.get(slot, {}) for slot in batch.names]
        elif batch.kind == "write":
            self._digests.update(dict.fromkeys(names, batch.digests))
        elif batch.kind == "delete":
            self._known.update((name, _FAILED) for name in names if isinstance(name, bytes))

    def _conclude(self, batch: Batch) -> None:
        """Note which keys are there; a later batch of a key knows better."""
        if batch.kind not in {"put", "get"} or batch.age < self._age:
            return
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

    def _count_stored(self) -> int:
        return list(self._known.values()).count(_THERE)


def _guarded(namespace: bytes, codec: Codec | None, mac_key: bytes | None) -> bytes:
    """Return the namespace of blocks that a codec encodes or a key authenticates: others cannot read them."""
    name = b"" if codec is None else codec.name.encode()
    key = b"" if mac_key is None else hashlib.sha256(b"BLKYMACKEY1" + mac_key).digest()
    return hashlib.sha256(
        b"BLKYGUARD1" + namespace.ljust(32, b"\0") + len(name).to_bytes(8, "little") + name + key
    ).digest()


def _spread_out(rows: NDArray[np.uint8], where: list[int], count: int) -> NDArray[np.uint8]:
    """Return rows with each at its place among `count`."""
    if len(where) == count:
        return rows
    out = np.zeros((count, rows.shape[1]), np.uint8)
    for index, row in zip(where, rows, strict=True):
        out[index] = row
    return out


def _answer(name: str, found: object, count: int) -> list[bool]:
    array = np.asarray(found)
    if array.dtype != np.bool_ or array.shape != (count,):
        raise TypeError(f"{name} returned {of(array)}, must return bool [{count}]")
    return [bool(good) for good in array]


def _next_epoch(epoch: bytes) -> bytes:
    """Return an epoch greater than `epoch`, and than those that other processes began before now."""
    return max(time.time_ns(), int.from_bytes(epoch[:8], "big") + 1).to_bytes(8, "big") + os.urandom(8)
