"""`KeyedBlocks`: the blocks of a store that have keys: their names under an epoch, and puts, reads and deletions."""

import hashlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from blockyard.stores.threaded.batches import Batch, Batches
from blockyard.stores.threaded.epochs import Epoch, EpochRecord, ForgottenError, Record, SharedEpoch
from blockyard.stores.threaded.known_keys import KnownKeys
from blockyard.stores.threaded.runtime import runtime
from blockyard.stores.threaded.storage import Storage
from blockyard.stores.threaded.stored_values import StoredValues
from blockyard.stores.value import Bytes, answered, spread_out

__all__ = ["KeyedBlocks"]

_EPOCH_SECONDS: Final = 1.0  # how long puts and lookups may use an epoch without checking the record


class KeyedBlocks:
    """The blocks that have keys. A batch of them runs in a worker thread, under the epoch of this process.

    Args:
        storage: holds the blocks and the epoch's record.
        values: the same storage's values.
        batches: the store's batches.
        lock: the store's lock, which guards `batches` and `known`.
        fetch: reads blocks with the record.
        keep: as for `SharedEpoch`.
        note: counts an error that makes no block a miss.
        revision: as for `open_store`.
        there_seconds: as for `KnownKeys`.

    Attributes:
        known: what this process knows about keys.
        record: the record of the epoch.
        epochs: the epoch of this process.
    """

    def __init__(
        self,
        storage: Storage,
        values: StoredValues,
        batches: Batches,
        lock: Any,
        *,
        fetch: Callable[[Bytes, list[bytes], Bytes | None], tuple[Record, Bytes, list[str], Bytes]],
        keep: Callable[[Epoch], bool],
        note: Callable[[BaseException], None],
        revision: str,
        there_seconds: float,
    ) -> None:
        self._storage, self._values, self._batches, self._lock = storage, values, batches, lock
        self._fetch, self._note = fetch, note
        self._runtime = runtime()
        self._domain = b"BLKYBLOCK2" + values.namespace
        self._token = b""  # of the epoch under which the keys are known
        self.known = KnownKeys(self._runtime.monotonic, there_seconds)
        self.record = EpochRecord(storage, hashlib.sha256(b"BLKYEPOCH2" + values.namespace).digest(), values)
        self.epochs = SharedEpoch(self.record.read, self.record.replace, revision, keep)

    def names_of(self, keys: list[bytes], token: bytes) -> Bytes:
        """Return the names of keys under the epoch of a token, uint8 `[n, 32]`."""
        names = b"".join(hashlib.sha256(self._domain + token + key).digest() for key in keys)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    def expire(self) -> None:
        """Know no block and no epoch: the storage may have been started again without its data."""
        self.epochs.expire()
        with self._lock:
            self.known.expire()

    def stop(self, revision: str | None) -> None:
        """Find nothing until a batch `"forget"` succeeds; called with the lock held."""
        self.known.clear()
        self.epochs.stop(revision)

    def carry_out(self, batch: Batch) -> tuple[Bytes | None, list[str]]:
        """Run a batch of keys. Returns the blocks that it read, and a reason for each miss."""
        if batch.kind == "has":
            self._look_up()
            return None, []
        if batch.kind == "forget":
            self.epochs.begin()
            return None, [""]
        keys = [name for name in batch.names if isinstance(name, bytes)]
        try:
            return self._get(batch, keys) if batch.kind == "get" else (None, self._put_or_delete(batch, keys))
        except ForgottenError:
            return None, ["forgotten"] * len(keys)

    def confirm(self, *, seconds: float = 0.0) -> Epoch:
        """Return the epoch, as `SharedEpoch.confirm`; under a new token nothing is known of any key."""
        epoch = self.epochs.confirm(seconds=seconds)
        with self._lock:
            if self._token not in {b"", epoch.token}:
                self.known.clear()
            self._token = epoch.token
        return epoch

    def _put_or_delete(self, batch: Batch, keys: list[bytes]) -> list[str]:
        # A deleted block must not be found under another process's epoch either.
        epoch = self.confirm(seconds=0.0 if batch.kind == "delete" else _EPOCH_SECONDS)
        if batch.age < self.epochs.age:  # it was submitted under an earlier epoch
            return ["forgotten"] * len(keys)
        names = self.names_of(keys, epoch.token)
        if batch.kind == "put":
            return self._put(batch, keys, names, epoch)
        with self._lock:  # find puts that may still store a key again; while the call runs, one may end
            late = self._batches.late_puts()
        self._storage.delete(names)
        return ["lost" if key in late else "" for key in keys]

    def _put(self, batch: Batch, keys: list[bytes], names: Bytes, epoch: Epoch) -> list[str]:
        values, reasons = self._values.seal(batch.source(), keys)
        if batch.ended:  # the caller may have changed the rows since
            return reasons
        if (owners := batch.owners) is not None:
            parents = self.names_of([parent.tobytes() for parent in owners.parents], epoch.token)
            owners = owners._replace(parents=parents * owners.parents.any(axis=1, keepdims=True))
        with self._lock:
            damaged = {name.tobytes() for name, key in zip(names, keys, strict=True) if self.known.is_doubted(key)}
        self._values.put(names, values, reasons, owners, damaged)
        self._values.give(values, reasons)
        refused = [place for place, reason in enumerate(reasons) if reason == "refused"]
        if refused and owners is not None and batch.owners is not None:
            self._look_up_parents(batch.owners.parents[refused], owners.parents[refused])
        return reasons

    def _look_up_parents(self, keys: Bytes, names: Bytes) -> None:
        """Note whether the storage has the blocks before refused ones: callers put again what it has dropped.

        If it has not, it may have dropped more of what it had.
        """
        there = keys.any(axis=1)
        keys, names = keys[there], names[there]
        found = answered("has", self._storage.has(names), len(names)) if len(names) else []
        with self._lock:
            if not all(found):
                self.known.expire()
            for key, good in zip(map(bytes, keys), found, strict=True):
                if not self._batches.is_busy(key):
                    self.known.note(key, is_there=bool(good))

    def _get(self, batch: Batch, keys: list[bytes]) -> tuple[Bytes | None, list[str]]:
        with self._lock:
            there = [index for index, key in enumerate(keys) if not self.known.is_hidden(key)]
        reasons = ["absent"] * len(keys)
        if not there:
            batch.is_asked = False
            return np.zeros((0, self._values.bytes_per_block), np.uint8), reasons
        # Every read but the first fetches the record with it.
        epoch = self.epochs.known() or self.confirm()
        out = batch.rows if len(there) == len(batch.reasons) else None
        wanted = [keys[index] for index in there]
        stored, rows, found, seen = self._fetch(self.names_of(wanted, epoch.token), wanted, out)
        # If the record came damaged, a second look tells whether it still is the same one.
        if not self.epochs.counts(epoch, stored) and self.confirm().token != epoch.token:
            # The record was lost and replaced for the same weights.
            return None, ["absent"] * len(keys)
        for index, reason in zip(there, found, strict=True):
            reasons[index] = reason
        if any(found):
            self._judge_damage(epoch, wanted, found, seen)
        if batch.age < self.epochs.stopped_at:
            return None, ["forgotten"] * len(keys)
        return spread_out(rows, there, len(keys)), reasons

    def _judge_damage(self, epoch: Epoch, keys: list[bytes], reasons: list[str], seen: Bytes) -> None:
        """Doubt damaged values, and delete those that an earlier read has found damaged in the same way."""
        with self._lock:
            bad = self.known.doubt_damaged(keys, reasons, seen)
        if bad:
            try:
                self._storage.delete(self.names_of(bad, epoch.token))
            except Exception as error:  # noqa: BLE001 (the block is a miss either way)
                self._note(error)

    def _look_up(self) -> None:
        """Look up the keys that `contains` did not know; without such keys, look up any name, as a probe."""
        with self._lock:
            keys = self.known.take_wanted()
        if not keys:
            self._storage.has(np.frombuffer(self._runtime.random_bytes(32), np.uint8)[None])
            return
        try:
            epoch = self.confirm(seconds=_EPOCH_SECONDS)
            age = self.epochs.age
            found = answered("has", self._storage.has(self.names_of(keys, epoch.token)), len(keys))
        except BaseException as error:
            with self._lock:  # callers who wait for the answer must not ask again and again
                self.known.hide([key for key in keys if not self._batches.is_busy(key)])
            if isinstance(error, ForgottenError):
                return
            raise
        with self._lock:
            is_valid = age == self.epochs.age and epoch == self.epochs.known()
            for key, good in zip(keys, found, strict=True):
                if is_valid and not self._batches.is_busy(key) and self.known.is_due(key):
                    self.known.note(key, is_there=good)
            self.known.trim(self._storage.num_slots)
