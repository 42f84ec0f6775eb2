"""`ThreadedStore`: an external store from functions that may block: `put`, `get` and, for keys, `delete`."""

import hashlib
import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import checksum_rows
from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.stores.base import Keys, Owners, no_keys_error
from blockyard.stores.batches import (
    Batch,
    BatchStore,
    KnownKeys,
    Name,
    check_read_rows,
    check_rows,
    check_slots,
    checked_keys,
    owners_of_each,
)
from blockyard.stores.codec import Codec, MacKey, guarded_namespace, read_mac_key
from blockyard.stores.epochs import EPOCH_BYTES, Epoch, ForgottenError, Record, SharedEpoch
from blockyard.stores.url import public_url
from blockyard.stores.value import HEADER, answered, check_values, is_damage, seal_values, spread_out, value_length

__all__ = ["ThreadedStore"]

_EPOCH_SECONDS: Final = 1.0  # how long puts and lookups go on under an epoch that another process may have ended
_MOST_WANTED: Final = 1 << 16  # keys that wait to be looked up
_LEAST_KNOWN: Final = 1024  # keys that are remembered however few slots there are


class ThreadedStore(BatchStore):
    """A store over functions that may block: `put` and `get`, and `delete` for one with keys. Worker threads call them.

    The class makes tickets, deadlines and misses of them, keeps the order of operations on each slot and key, and
    checks every block that comes back. An exception, a wrong answer or a passed deadline is a miss. Memory that was
    lent to a call that hangs is not used again. A hanging call occupies its thread, and the interpreter can still end.

    After a call that hung or failed late, batches are misses at once, `"unavailable"`, until a probe is answered. The
    logger `blockyard.stores` has a line when a store fails, at most one a minute and cause, and when it works again.

    The functions see names of 32 bytes, never the caller's keys. A slot's name is the SHA-256 of the namespace, 16
    random bytes of this store and the slot: two stores never share slots, and blocks in slots are of no use after
    `close`. The name of a key's block is the same in every process. What is stored
    for it has a header (`blockyard.stores.value`), so rows are wider then; with a codec or a MAC key those of slots are
    too. A store with keys has one row more, of 192 bytes, which says which blocks count: see `read_epoch`.

    `contains` answers from what this process knows. A plug-in evicts by itself when it is full.

    Args:
        url: as given to `open_store`; `blockyard.stores.StoreURL.parse` reads options from it.
        bytes_per_block: bytes of one block.
        namespace: digest of all that decides the bytes.
        codec: encodes the blocks.
        mac_key: 32 bytes; values are then authenticated, not only checksummed.
        revision: as for `open_store`.

    Attributes:
        num_slots: slots, numbered from 0; the subclass sets it.
        bytes_per_block: as given.
        threads: most calls that run at once.
        memory: most bytes in flight and in results that wait; blocks beyond are misses, `"queue_full"`.
        timeout_base: seconds that a batch is given, plus one for every 16 MB in flight.

    Example:
        >>> import numpy as np
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
        revision: str = "",
    ) -> None:
        if bytes_per_block < 1:
            raise InvalidArgumentError(f"bytes_per_block is {bytes_per_block}, must be at least 1")
        super().__init__()
        self.url = url
        self.bytes_per_block = bytes_per_block
        self._codec = codec
        self._mac_key = None if mac_key is None else read_mac_key(mac_key)
        self._is_guarded = codec is not None or mac_key is not None
        self.namespace = guarded_namespace(namespace, codec, self._mac_key) if self._is_guarded else namespace
        self._width = HEADER + (bytes_per_block if codec is None else codec.bound(bytes_per_block))
        self._seed = self.namespace + os.urandom(16)
        self._digests: dict[Name, dict[Name, bytes]] = {}  # of the last write of each slot
        self._known = KnownKeys()
        self._wanted: dict[bytes, None] = {}  # keys to look up
        self._record_key = np.frombuffer(self._digest_of(b"BLKYEPOCH2"), np.uint8)
        self._epochs = SharedEpoch(self._read_record, self._replace_record, revision)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({public_url(self.url)!r})"

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
        raise no_keys_error()

    def has(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return whether there is a block under each key, bool `[n]`. The default reads them one by one.

        Args:
            keys: uint8 `[n, 32]`.
        """
        row = np.zeros((1, self._width), np.uint8)
        return np.array([answered("get", self.get(key[None], row), 1)[0] for key in keys], np.bool_)

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks; see `ExternalStore.submit_write`."""
        self._check(slots, is_write=True)
        check_rows(rows, (len(slots), self.bytes_per_block))
        return self._submit("write", slots.tolist(), rows)

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks; see `ExternalStore.submit_read`."""
        self._check(slots)
        check_read_rows(rows, (len(slots), self.bytes_per_block))
        return self._submit("read", slots.tolist(), rows)

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None = None) -> int:
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

    def submit_get(self, keys: Keys, rows: NDArray[np.uint8] | None = None) -> int:
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

        Never waits: unknown keys are looked up in the background, so ask again some milliseconds later.
        """
        names = self._keys_of(keys)
        with self._lock:
            if self._closed or self._refuses(time.monotonic()):
                return np.zeros(len(names), np.bool_)
            there, wanted = self._known.look_up(names)
            self._wanted.update(dict.fromkeys(wanted[: max(0, _MOST_WANTED - len(self._wanted))]))
            if self._wanted:
                self._look()
            return np.array(there, np.bool_)

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether a read of each key is known to be a miss now; see `ExternalStore.lacks`."""
        names = self._keys_of(keys)
        with self._lock:
            is_down = self._closed or self._refuses(time.monotonic())
            return np.array([is_down or self._known.is_lacked(name) for name in names], np.bool_)

    @property
    def _age(self) -> int:
        return self._epochs.age

    def forget(self, revision: str | None = None) -> None:
        """Forget every key at once; see `ExternalStore.forget`."""
        self._keys_of([])
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            self._known.clear()
            self._epochs.stop(revision)
        done = self.wait(self._submit("forget", [self._record_key.tobytes()]))
        if not done.ok.all():
            why = f"{done.reasons[0]}; {self._last_error}" if done.reasons[0] == "error" else done.reasons[0]
            raise StoreError(f"forget was not confirmed, nothing is found or stored until it is called again: {why}")

    def _check(self, slots: NDArray[np.int64], *, is_write: bool = False) -> None:
        self._process.check()
        check_slots(slots, self.num_slots, is_write=is_write)

    def _keys_of(self, keys: Keys) -> list[bytes]:
        self._process.check()
        if type(self).delete is ThreadedStore.delete:
            raise no_keys_error()
        return [bytes(name) for name in checked_keys(keys)]

    def _carry_out(self, batch: Batch) -> tuple[NDArray[np.uint8] | None, list[str]]:
        if batch.kind in {"write", "read"}:
            return self._write(batch) if batch.kind == "write" else self._read(batch)
        if batch.kind == "has":
            return None, self._look_up()
        if batch.kind == "forget":
            self._epochs.begin()
            return None, [""]
        try:
            return self._carry_out_under_epoch(batch)
        except ForgottenError:
            return None, ["forgotten"] * len(batch.names)

    def _carry_out_under_epoch(self, batch: Batch) -> tuple[NDArray[np.uint8] | None, list[str]]:
        keys = [name for name in batch.names if isinstance(name, bytes)]
        if batch.kind == "get":
            return self._get(batch, keys)
        epoch = self._epochs.confirm(seconds=_EPOCH_SECONDS)
        if batch.age < self._epochs.age:  # it has the epoch of its submission
            return None, ["forgotten"] * len(keys)
        names = self._names_of(keys, epoch.token)
        if batch.kind == "put":
            values, reasons = self._seal(self._rows_of(batch), keys)
            if batch.ended:  # the rows may have changed since
                return None, reasons
            self._put_good(names, values, reasons, batch.owners, epoch)
            self._give_values(values, reasons)
            return None, reasons
        self.delete(names)
        with self._lock:  # puts that may still bring a key back
            late = {name for other in self._late for name in other.names}
        return None, ["lost" if key in late else "" for key in keys]

    def _write(self, batch: Batch) -> tuple[None, list[str]]:
        rows, slots = self._rows_of(batch), [name for name in batch.names if isinstance(name, int)]
        names, reasons = self._slot_names(slots), [""] * len(slots)
        if self._is_guarded:
            rows, reasons = self._seal(rows, [name.tobytes() for name in names])
        elif not (self._reuses_rows and rows.flags.c_contiguous):
            rows = rows.copy()
        digests = rows[:, :16].copy() if self._is_guarded else checksum_rows(rows)
        self._put_good(names, rows, reasons)
        if self._is_guarded:
            self._give_values(rows, reasons)
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
            found = self._get_values(names, rows)
            sums = checksum_rows(rows)
        for index, reason, digest in zip(there, found, sums, strict=True):
            reasons[index] = reason or ("" if digest.tobytes() == digests[index] else "payload_checksum")
        return spread_out(rows, there, len(slots)), reasons

    def _get(self, batch: Batch, keys: list[bytes]) -> tuple[NDArray[np.uint8] | None, list[str]]:
        with self._lock:
            there = [index for index, key in enumerate(keys) if not self._known.is_hidden(key)]
        reasons = ["absent"] * len(keys)
        if not there:
            return np.zeros((0, self.bytes_per_block), np.uint8), reasons
        # A read brings the record with it, unless it is the first.
        epoch = self._epochs.known() or self._epochs.confirm()
        out = batch.rows if len(there) == len(batch.reasons) else None
        wanted = [keys[index] for index in there]
        stored, rows, found = self._fetch_under(epoch, wanted, out)
        if not self._epochs.counts(epoch, stored):
            # Lost and replaced for the same weights, or forgotten.
            self._epochs.confirm()
            return None, ["absent"] * len(keys)
        for index, reason in zip(there, found, strict=True):
            reasons[index] = reason
        bad = [key for key, reason in zip(wanted, found, strict=True) if is_damage(reason)]
        if bad:
            try:
                self.delete(np.unique(self._names_of(bad, epoch.token), axis=0))
            except Exception as error:  # noqa: BLE001 (it is a miss either way)
                with self._lock:
                    self._note(error)
        if batch.age < self._epochs.stopped_at:
            return None, ["forgotten"] * len(keys)
        return spread_out(rows, there, len(keys)), reasons

    # ---- values: blocks with a header ----

    def _rows_of(self, batch: Batch) -> NDArray[np.uint8]:
        """Return the blocks that a batch writes, those of the caller."""
        if batch.rows is None:  # it was given up
            raise StoreError("the batch has ended")
        return batch.rows[: len(batch.names)]

    def _seal(self, rows: NDArray[np.uint8], keys: list[bytes]) -> tuple[NDArray[np.uint8], list[str]]:
        """Make values of blocks, in memory of our own. Returns them, and why some are none."""
        values, reasons, lengths = self._buffers.take(len(keys), self._width), [""] * len(keys), None
        if self._codec is None:
            values[:, HEADER:] = rows
        else:
            lengths = []
            for index, (row, value) in enumerate(zip(rows, values, strict=True)):
                try:
                    lengths.append(self._codec.encode_into(row, value[HEADER:]))
                except Exception as error:  # noqa: BLE001, PERF203 (whatever a codec raises)
                    reasons[index] = "codec"
                    lengths.append(0)
                    with self._lock:
                        self._note(error)
        seal_values(values, self.namespace, keys, lengths=lengths, mac_key=self._mac_key)
        return values, reasons

    def _put_good(
        self,
        names: NDArray[np.uint8],
        rows: NDArray[np.uint8],
        reasons: list[str],
        owners: Owners | None = None,
        epoch: Epoch | None = None,
    ) -> None:
        """Put the rows that have no reason yet not to be, and set the reasons of those that are refused."""
        good = [index for index, reason in enumerate(reasons) if not reason]
        if not good:
            return
        chosen = (names, rows) if len(good) == len(rows) else (names[good], rows[good])
        if owners is None or epoch is None:
            found = self.put(*chosen)
        else:
            found = self._put_owned(*chosen, Owners(owners.tenants[good], owners.parents[good]), epoch)
        for index, stored in zip(good, answered("put", found, len(good)), strict=True):
            reasons[index] = "" if stored else "refused"

    def _give_values(self, values: NDArray[np.uint8], reasons: list[str]) -> None:
        """Let values be used again, once nothing refers to them."""
        if self._reuses_rows and not any(reasons):
            self._buffers.give(values)

    def _put_owned(
        self,
        names: NDArray[np.uint8],
        rows: NDArray[np.uint8],
        owners: Owners,  # noqa: ARG002 (a store with quotas has its own)
        epoch: Epoch,  # noqa: ARG002
    ) -> NDArray[np.bool_]:
        """Put blocks that have tenants; `put` for a store without quotas."""
        return self.put(names, rows)

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
        missed = self._get_values(names, values)
        sums, varies = values[:, :16].copy(), self._codec is not None
        checked = check_values(values, self.namespace, keys, varies=varies, mac_key=self._mac_key)
        reasons = [why or reason for why, reason in zip(missed, checked, strict=True)]
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

    def _get_values(self, names: NDArray[np.uint8], values: NDArray[np.uint8]) -> list[str]:
        """Read values by `get`. Returns why each did not come; a store that knows more than "absent" overrides it."""
        return ["" if good else "absent" for good in answered("get", self.get(names, values), len(names))]

    def _is_encoded(self, rows: NDArray[np.uint8]) -> bool:
        """Return whether a row or rows hold what a codec returned, followed by zeros."""
        return self._codec is not None and rows.shape[-1] == self._width

    def _stored(self, row: NDArray[np.uint8]) -> memoryview:
        """Return the bytes of a row that count: those of a codec are followed by zeros."""
        return (row[: HEADER + value_length(row)] if self._is_encoded(row) else row).data

    def _accept_size(self, row: NDArray[np.uint8], size: int) -> bool:
        """Return whether a stored row of `size` bytes fits `row`; what is left of it becomes zero."""
        if not self._is_encoded(row):
            return size == len(row)
        row[min(size, len(row)) :] = 0
        return HEADER <= size <= len(row)

    def _look_up(self) -> list[str]:
        """Look up the keys that `contains` was asked for; or any name, to see whether the storage answers."""
        with self._lock:
            keys, self._wanted = list(self._wanted), {}
        if not keys:
            self.has(np.frombuffer(os.urandom(32), np.uint8)[None])
            return []
        try:
            epoch = self._epochs.confirm(seconds=_EPOCH_SECONDS)
        except ForgottenError:
            return []
        age = self._age
        found = answered("has", self.has(self._names_of(keys, epoch.token)), len(keys))
        with self._lock:
            for key, good in zip(keys, found, strict=True):
                if age == self._age and key not in self._last and self._known.is_due(key):
                    self._known.note(key, is_there=good)
            self._known.trim(max(self.num_slots, _LEAST_KNOWN))
        return []

    # ---- the epoch ----

    def read_epoch(self, key: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Return the row that says which blocks count, uint8 `[192]`; None if there is none.

        The default is a call of `get`; its `LookupError` or `FileNotFoundError` counts as "none". While it raises
        anything else, nothing is found or stored. Runs in a worker thread; may block or raise.

        Args:
            key: of the row, uint8 `[32]`.
        """
        row = np.zeros((1, HEADER + EPOCH_BYTES), np.uint8)
        try:
            is_there = answered("get", self.get(key[None], row), 1)[0]
        except (LookupError, FileNotFoundError):
            return None
        return row[0] if is_there else None

    def replace_epoch(
        self, key: NDArray[np.uint8], old: NDArray[np.uint8] | None, new: NDArray[np.uint8]
    ) -> NDArray[np.uint8] | None:
        """Store that row if what is there is `old`, in one step that no other process comes between.

        `forget` calls it. The default keeps the threads of this store apart and nothing else: a plug-in whose blocks
        several processes share at the same time overrides it. Runs in a worker thread; may block or raise.

        Args:
            key: uint8 `[32]`.
            old: what must be there, uint8 `[192]`; None if there is none.
            new: uint8 `[192]`.

        Returns:
            What is there then.

        Raises:
            StoreError: the storage cannot do it in one step.
        """
        there = self.read_epoch(key)
        if (None if there is None else there.tobytes()) != (None if old is None else old.tobytes()):
            return there
        if not answered("put", self.put(key[None], new[None]), 1)[0]:
            raise StoreError("put refused the epoch's record")
        return new

    def _read_record(self) -> Record:
        return self._record(self.read_epoch(self._record_key))

    def _record(self, row: NDArray[np.uint8] | None) -> Record:
        """Check a row that should be the epoch's record."""
        if row is None:
            return Record(None, None)
        name = self._record_key.tobytes()
        is_whole = (
            row.shape == (HEADER + EPOCH_BYTES,)
            and not check_values(row[None].copy(), self.namespace, [name], mac_key=self._mac_key)[0]
        )
        return Record(row.tobytes(), Epoch.read(row[HEADER:].tobytes()) if is_whole else None)

    def _replace_record(self, stored: Record, epoch: Epoch) -> Record:
        row = np.frombuffer(bytes(HEADER) + epoch.record(), np.uint8)[None].copy()
        seal_values(row, self.namespace, [self._record_key.tobytes()], mac_key=self._mac_key)
        old = None if stored.raw is None else np.frombuffer(stored.raw, np.uint8)
        return self._record(self.replace_epoch(self._record_key, old, row[0]))

    def _fetch_under(
        self, epoch: Epoch, keys: list[bytes], out: NDArray[np.uint8] | None
    ) -> tuple[Record, NDArray[np.uint8], list[str]]:
        """Read the record, and blocks under an epoch. A store that can do both at once overrides it."""
        stored = self._read_record()
        rows, reasons, _ = self._fetch(self._names_of(keys, epoch.token), keys, out)
        return stored, rows, reasons

    def _slot_names(self, slots: list[int]) -> NDArray[np.uint8]:
        names = b"".join(hashlib.sha256(self._seed + slot.to_bytes(8, "little")).digest() for slot in slots)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    def _names_of(self, keys: list[bytes], epoch: bytes) -> NDArray[np.uint8]:
        names = b"".join(self._digest_of(b"BLKYBLOCK2", epoch + key) for key in keys)
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
            self._known.note_deleted(name for name in names if isinstance(name, bytes))

    def _conclude(self, batch: Batch) -> None:
        """Note which keys are there; a later batch of a key knows better."""
        if batch.kind not in {"put", "get", "delete"} or batch.age < self._age:
            return
        for name, reason in zip(batch.names, batch.reasons, strict=False):
            if not isinstance(name, bytes) or self._last.get(name) is not batch or reason in {"closed", "unavailable"}:
                continue
            if not reason:
                self._known.note(name, is_there=batch.kind != "delete")
            elif batch.kind != "delete":
                if reason != "absent" and not is_damage(reason):
                    self._known.note_failed(name)
                elif not self._known.is_hidden(name):  # what is damaged has been deleted
                    self._known.note(name, is_there=False)
        self._known.trim(max(self.num_slots, _LEAST_KNOWN))

    def _count_stored(self) -> int:
        return self._known.count_there()
