"""`Epoch`: identifies the weights whose blocks are valid in a shared prefix store, and the protocol of its processes.

A store has one *record* for all its processes: the current epoch. It changes only by an atomic operation at the store:
"replace the record if it is still the one that I read". The protocol uses no clock.

- A process reads and writes under the epoch that it opened with, began, or joined by name. `forget` begins a new epoch,
  or joins the current one if that has the revision's name.
- Block names are derived from the epoch's token, so blocks put under another epoch are never found.
- Each batch of reads checks a record that was read after the batch began; concurrent batches share one read of it. Once
  the record has other weights, the process finds and stores nothing until it calls `forget`.
- A storage with replicas confirms a `forget` only once they have the record, so a failover does not undo it.
- If the record is lost, a process replaces it with a new token for the same weights, and processes with these weights
  continue under it. A process that has learned that its weights were forgotten does not replace it.

The steps `opened`, `begun` and `continued` match the model in `rust/store/tests/epochs.rs`.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from blockyard.errors import StoreError
from blockyard.stores.threaded.runtime import runtime
from blockyard.stores.threaded.storage import EPOCH_BYTES, Storage
from blockyard.stores.threaded.stored_values import StoredValues
from blockyard.stores.value import HEADER, Bytes, check_values, seal_values

__all__ = ["EPOCH_BYTES", "Epoch", "EpochRecord", "ForgottenError", "Record", "RecordCheck", "SharedEpoch", "name_of"]

_OF_NAMESPACE: Final = bytes(32)  # the name of the weights that the namespace names
_FIRST: Final = bytes(16)  # the weights before the first `forget`
_TRIES: Final = 100  # attempts to replace the record while other processes replace it first

_log = logging.getLogger("blockyard.stores")


class Epoch(NamedTuple):
    """An epoch of a store.

    Attributes:
        token: 16 random bytes, from which block names are derived.
        weights: 16 random bytes, new for each `forget`; zeros before the first.
        name: SHA-256 of the weights' revision; zeros for the revision that the namespace names.
    """

    token: bytes
    weights: bytes
    name: bytes

    @classmethod
    def read(cls, record: bytes) -> "Epoch":
        """Parse an epoch from its record of `EPOCH_BYTES` bytes."""
        return cls(record[:16], record[16:32], record[32:])

    def record(self) -> bytes:
        """Return the epoch's record."""
        return b"".join(self)

    @classmethod
    def opened(cls, name: bytes, stored: "Epoch | None") -> "Epoch | None":
        """Return the epoch of a process that opens a store with weights of this name.

        Returns:
            The stored epoch; None if its weights have another name; a first epoch if nothing is stored.
        """
        if stored is None:
            return cls(runtime().random_bytes(16), _FIRST, name)
        return stored if stored.name == name else None

    @classmethod
    def begun(cls, name: bytes, stored: "Epoch | None", *, joins: bool) -> "Epoch":
        """Return the epoch of a process that calls `forget`.

        Args:
            name: name of the process's new weights.
            stored: the current epoch.
            joins: whether the process may join an epoch of this name that another process began.
        """
        if joins and stored is not None and stored.name == name:
            return stored
        return cls(runtime().random_bytes(16), runtime().random_bytes(16), name)

    def continued(self, stored: "Epoch | None") -> "Epoch | None":
        """Return the epoch under which a process with this epoch continues.

        Returns:
            The stored epoch if its weights are the same; None if they differ; a new token for the same weights if the
            record is lost.
        """
        if stored is None:
            return Epoch(runtime().random_bytes(16), self.weights, self.name)
        return stored if stored[1:] == self[1:] else None


class Record(NamedTuple):
    """The record as read from the storage.

    Attributes:
        raw: its bytes; None if it is absent.
        epoch: its epoch; None if the record is absent or damaged.
    """

    raw: bytes | None
    epoch: Epoch | None


@dataclass(slots=True, eq=False)
class RecordCheck:
    """One batch's check of the record.

    Attributes:
        is_due: whether no read of the record has begun since the batch did.
        record: the result of the first such read; None before it.
    """

    is_due: bool = True
    record: Record | None = None


class EpochRecord:
    """Reads and replaces the record of a store's epoch: a value like those of blocks, but never encoded.

    Args:
        storage: holds the row.
        key: key of the row, 32 bytes.
        values: the store's values.
    """

    def __init__(self, storage: Storage, key: bytes, values: StoredValues) -> None:
        self.key = key
        self._storage, self._values = storage, values
        self._row_key = np.frombuffer(key, np.uint8)
        self._last = Record(None, None)  # the last record checked

    def read(self) -> Record:
        """Read the record."""
        return self.parse(self._storage.read_epoch(self._row_key))

    def parse(self, row: Bytes | None) -> Record:
        """Check and parse the record's row."""
        if row is None:
            return Record(None, None)
        raw, last = row.tobytes(), self._last
        if raw == last.raw:  # true for nearly every batch
            return last
        is_whole = row.shape == (HEADER + EPOCH_BYTES,) and not self._check(row)
        self._last = found = Record(raw, Epoch.read(raw[HEADER:]) if is_whole else None)
        return found

    def replace(self, stored: Record, epoch: Epoch) -> Record:
        """Replace `stored` with the record of `epoch`, if it is unchanged. Returns the record stored afterwards."""
        row = np.frombuffer(bytes(HEADER) + epoch.record(), np.uint8)[None].copy()
        seal_values(row, self._values.namespace, [self.key], mac_key=self._values.mac_key)
        old = None if stored.raw is None else np.frombuffer(stored.raw, np.uint8)
        there = self._storage.replace_epoch(self._row_key, old, row[0])
        if not isinstance(there, np.ndarray | None):
            raise StoreError(
                f"replace_epoch returned {there!r}, must return the row that is stored afterwards, or None"
            )
        return self.parse(there)

    def _check(self, row: Bytes) -> str:
        return check_values(row[None].copy(), self._values.namespace, [self.key], mac_key=self._values.mac_key)[0]


class ForgottenError(StoreError):
    """The blocks of this process's epoch were forgotten, or it has no epoch."""


class SharedEpoch:
    """The epoch of this process in one store. Thread-safe.

    Args:
        read: reads the record.
        replace: atomically replaces the given record, if it is unchanged, and returns the record stored afterwards.
        revision: names the process's weights, see `open_store`.
        keep: waits until the storage's replicas have the record of this epoch. Returns False if it may be lost.

    Attributes:
        read: as given.
    """

    def __init__(
        self,
        read: Callable[[], Record],
        replace: Callable[[Record, Epoch], Record],
        revision: str = "",
        keep: Callable[[Epoch], bool] = lambda _: True,
    ) -> None:
        self.read, self._replace, self._keep = read, replace, keep
        machine = runtime()
        self._clock = machine.monotonic
        self._one_at_a_time = machine.lock()  # serializes calls to the storage
        self._lock = machine.lock()  # guards the fields below; never held during a call
        self._name = name_of(revision)
        self._mine: Epoch | None = None
        self._joins = False  # whether to join an epoch that another process began
        self._is_due = False  # whether `begin` must begin an epoch
        self._is_behind = False
        self._age = 0
        self._stopped_at = 0  # the age after the last `stop`
        self._confirmed_at = 0.0
        self._due: list[RecordCheck] = []

    @property
    def age(self) -> int:
        """Grows whenever puts submitted before must no longer land."""
        return self._age

    @property
    def stopped_at(self) -> int:
        """The age from which on reads are valid."""
        return self._stopped_at

    def stop(self, revision: str | None) -> None:
        """Find nothing until `begin` succeeds; see `ExternalStore.forget`."""
        with self._lock:
            self._age += 1
            self._stopped_at = self._age
            self._mine, self._is_due, self._is_behind = None, True, False
            self._joins = revision is not None
            if revision is not None:
                self._name = name_of(revision)

    def begin(self) -> None:
        """Begin the epoch that the last `stop` requested, unless already done.

        Raises:
            StoreError: the storage did not confirm it.
        """
        with self._one_at_a_time:
            for _ in range(_TRIES):
                with self._lock:
                    if not self._is_due:
                        return
                    age, name, joins = self._age, self._name, self._joins
                stored = self.read()
                epoch = Epoch.begun(name, stored.epoch, joins=joins)
                if epoch != stored.epoch and self._replace(stored, epoch).epoch != epoch:
                    continue
                if not self._keep(epoch):
                    continue
                with self._lock:
                    if self._age == age:
                        self._age += 1  # puts submitted in the meantime are void
                        self._mine, self._is_due, self._confirmed_at = epoch, False, 0.0
        raise StoreError(f"other processes replaced the epoch's record {_TRIES} times")

    def known(self) -> Epoch | None:
        """Return the epoch if it was valid at the last check; None without a check so far."""
        with self._lock:
            return None if self._is_behind else self._mine

    def confirm(self, *, seconds: float = 0.0) -> Epoch:
        """Return the epoch under which this process reads and writes.

        Args:
            seconds: maximum age of the last check of the record.

        Raises:
            ForgottenError: this process has no valid epoch.
            StoreError: the record cannot be read.
        """
        with self._lock:
            if self._mine is not None and not self._is_behind and self._clock() < self._confirmed_at + seconds:
                return self._mine
        with self._one_at_a_time:
            for _ in range(_TRIES):
                with self._lock:
                    if self._is_due:
                        raise ForgottenError("forget has not been confirmed by the store")
                    age, mine, name, is_behind = self._age, self._mine, self._name, self._is_behind
                asked_at = self._clock()
                stored = self.read()
                if is_behind and stored.epoch is None:  # only processes with the current weights replace a lost record
                    raise ForgottenError("another process has forgotten these blocks")
                epoch = Epoch.opened(name, stored.epoch) if mine is None else mine.continued(stored.epoch)
                if epoch is not None and epoch != stored.epoch and self._replace(stored, epoch).epoch != epoch:
                    continue
                self._take(age, epoch, asked_at)
                if epoch is None:
                    raise ForgottenError("another process has forgotten these blocks")
                return epoch
        raise StoreError(f"other processes replaced the epoch's record {_TRIES} times")

    def expire(self) -> None:
        """Check the record before the next use: the storage may have lost it."""
        self._confirmed_at = 0.0  # one store, no lock needed

    def begin_check(self) -> RecordCheck:
        """Return the check of a batch of reads that begins now, for `read_for`."""
        check = RecordCheck()
        with self._lock:
            self._due.append(check)
        return check

    def read_for(self, check: RecordCheck) -> Record:
        """Return the record as it was at some time since `begin_check`, and read it if no other batch has since."""
        if check.record is not None:
            return check.record
        due = self.take_due()  # before the read: a batch that begins meanwhile must not share it
        return self.answer(due, self.read())

    def take_due(self) -> list[RecordCheck]:
        """Return the checks that a read of the record beginning now will answer."""
        with self._lock:
            due, self._due = self._due, []
        for check in due:
            check.is_due = False
        return due

    @staticmethod
    def answer(due: list[RecordCheck], record: Record) -> Record:
        """Give checks the record that was read for them, and return it."""
        for check in due:
            check.record = record
        return record

    def counts(self, epoch: Epoch, stored: Record) -> bool:
        """Return whether blocks read under an epoch are valid, given the record that was read with them."""
        if stored.epoch is None:
            return False  # the next call of `confirm` replaces it
        if stored.epoch.token == epoch.token:
            return True
        with self._lock:
            self._confirmed_at = 0.0
        return False

    def _take(self, age: int, epoch: Epoch | None, asked_at: float) -> None:
        with self._lock:
            if age != self._age:
                return
            if epoch is None:
                if not self._is_behind:
                    _log.warning(
                        "another process has forgotten the blocks of this store: nothing is found or stored until "
                        "forget is called here too"
                    )
                self._is_behind = True
                return
            # A put submitted before the first check of the record may be older than the last `forget`.
            self._age += self._mine is None and epoch.weights != _FIRST
            self._mine, self._is_behind, self._confirmed_at = epoch, False, asked_at


def name_of(revision: str) -> bytes:
    """Return the name of a revision's weights; `""` is the revision that the namespace names."""
    return hashlib.sha256(b"BLKYWEIGHTS1" + revision.encode()).digest() if revision else _OF_NAMESPACE
