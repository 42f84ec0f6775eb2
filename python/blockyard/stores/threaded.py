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
from blockyard.stores.value import HEADER, check_values, seal_values

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

    def __init__(self, url: str, *, bytes_per_block: int, namespace: bytes) -> None:
        if bytes_per_block < 1:
            raise InvalidArgumentError(f"bytes_per_block is {bytes_per_block}, must be at least 1")
        super().__init__()
        self.url = url
        self.bytes_per_block = bytes_per_block
        self.namespace = namespace
        self._seed = namespace + os.urandom(16)
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
                keys, another.

        Returns:
            Whether each block was stored, bool `[n]`; False is a miss, `"refused"`.
        """

    @abstractmethod
    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read blocks by their keys. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`; they may repeat. Those of slots were put earlier; others may be absent.
            out: where to, uint8 `[n, width]`, zeros; not to be written after the call has returned. If a stored row has
                another width, return True and leave the row as it is.

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
            raise InvalidArgumentError(f"rows is {of(rows)}, must be uint8 {list(shape)}")
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
            raise InvalidArgumentError(f"rows is {of(rows)}, must be uint8 {list(shape)}")
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
            return self._get(keys, names, len(batch.reasons))
        late = self._delete(names) if batch.kind == "delete" else set()
        return None, ["lost" if key in late else "" for key in keys]

    def _write(self, batch: Batch) -> tuple[None, list[str]]:
        rows, slots = batch.rows, [name for name in batch.names if isinstance(name, int)]
        assert rows is not None  # noqa: S101 (for the type checker)
        digests = [digest.tobytes() for digest in checksum_rows(rows)]
        stored = _answer("put", self.put(self._slot_names(slots), rows), len(rows))
        landed: dict[Name, bytes] = {
            slot: digest for slot, digest, good in zip(slots, digests, stored, strict=True) if good
        }
        with self._changed:
            if not batch.ended:
                batch.digests.update(landed)
        return None, ["" if good else "refused" for good in stored]

    def _read(self, batch: Batch) -> tuple[NDArray[np.uint8], list[str]]:
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

    def _put(self, batch: Batch, keys: list[bytes], names: NDArray[np.uint8]) -> tuple[None, list[str]]:
        values = batch.rows
        assert values is not None  # noqa: S101 (for the type checker)
        seal_values(values, self.namespace, keys)
        stored = _answer("put", self.put(names, values), len(keys))
        return None, ["" if good else "refused" for good in stored]

    def _get(self, keys: list[bytes], names: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint8], list[str]]:
        with self._changed:
            there = [index for index, key in enumerate(keys) if self._known.get(key) != _FAILED]
        reasons, rows = ["absent"] * len(keys), np.zeros((count, self.bytes_per_block), np.uint8)
        wanted = [keys[index] for index in there]
        if not wanted:
            return rows, reasons
        values = np.zeros((len(wanted), HEADER + self.bytes_per_block), np.uint8)
        names = names[there]
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

    def _delete(self, names: NDArray[np.uint8]) -> set[Name]:
        """Delete values. Returns the keys that a put may still bring back."""
        self.delete(names)
        with self._changed:
            return {name for other in self._late for name in other.names}

    def _look_up(self) -> list[str]:
        """Look up the keys that `contains` was asked for; or any name, to see whether the storage answers."""
        with self._changed:
            keys, self._wanted = list(self._wanted), {}
        if not keys:
            self.has(np.frombuffer(os.urandom(32), np.uint8)[None])
            return []
        age, epoch = self._share_epoch()
        found = _answer("has", self.has(self._names_of(keys, epoch)), len(keys))
        with self._changed:
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
        with self._changed:
            if not is_due and time.monotonic() < self._epoch_until:
                return self._age, self._epoch
        with self._one_sharer:  # or an older epoch could be written over a newer one
            name = self._digest_of(b"BLKYEPOCH1")
            stored = self._read_epoch(name)
            with self._changed:
                if stored > self._epoch:
                    if self._epoch:
                        self._known.clear()
                    self._epoch = stored
                self._epoch = self._epoch or _next_epoch(b"")
                age, epoch = self._age, self._epoch
            if epoch != stored:
                self._write_epoch(name, epoch)
            with self._changed:
                self._epoch_until = time.monotonic() + _EPOCH_SECONDS
            return age, epoch

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


def _answer(name: str, found: object, count: int) -> list[bool]:
    array = np.asarray(found)
    if array.dtype != np.bool_ or array.shape != (count,):
        raise TypeError(f"{name} returned {of(array)}, must return bool [{count}]")
    return [bool(good) for good in array]


def _next_epoch(epoch: bytes) -> bytes:
    """Return an epoch greater than `epoch`, and than those that other processes began before now."""
    return max(time.time_ns(), int.from_bytes(epoch[:8], "big") + 1).to_bytes(8, "big") + os.urandom(8)
