"""`ThreadedStore`: an external store from functions that may block: `put`, `get` and, for a prefix store, `delete`."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import checksum_rows
from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.stores.arguments import check_read_rows, check_rows, check_slots, checked_keys, owners_of_each
from blockyard.stores.base import Keys, Owners, Use, no_keys_error
from blockyard.stores.codec import Codec, MacKey
from blockyard.stores.threaded.batches import BatchStore
from blockyard.stores.threaded.epochs import EPOCH_BYTES, Epoch, EpochRecord, ForgottenError, Record, SharedEpoch
from blockyard.stores.threaded.known_keys import KnownKeys
from blockyard.stores.threaded.order import Batch, Name
from blockyard.stores.threaded.value_format import ValueFormat
from blockyard.stores.url import public_url, secrets_of
from blockyard.stores.value import HEADER, answered, is_damage, is_whole, spread_out

__all__ = ["ThreadedStore"]

_EPOCH_SECONDS: Final = 1.0  # how long puts and lookups may use an epoch without checking the record


class ThreadedStore(BatchStore):
    """A store over functions that may block: `put`, `get` and, for a prefix store, `delete`. Worker threads call them.

    The class adds tickets, deadlines and misses, keeps the order of operations on each slot and key, and checks every
    block that is read. An exception, a wrong answer or a passed deadline is a miss. Memory lent to a hanging call is
    not used again. A hanging call occupies its thread, but the interpreter can still exit.

    After a call that hung or failed late, all batches are misses, `"unavailable"`, until a probe is answered. The
    logger `blockyard.stores` gets a line when a store fails (at most one per minute and cause) and when it works again.

    The functions receive names of 32 bytes, never the caller's keys. A slot's name is the SHA-256 of the namespace, 16
    random bytes of this store and the slot: two stores never share slots, and nobody can find them after `close`. A
    key's name is the same in every process. Its stored row starts with a header (`blockyard.stores.value`), so it is
    wider than the block; with a codec or a MAC key, so are the rows of slots. A prefix store has one more row, of 192
    bytes, that identifies the valid blocks: see `read_epoch`.

    `contains` answers from the memory of this process. A plug-in does its own eviction.

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
        threads: maximum number of concurrent calls.
        memory: maximum bytes in flight and in uncollected results; blocks beyond it are misses, `"queue_full"`.
        timeout_base: timeout of a batch in seconds, plus one for every 16 MB in flight.

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
        super().__init__()
        self.url = url
        self._secrets = secrets_of(url)
        self.bytes_per_block = bytes_per_block
        self._format = ValueFormat(namespace, bytes_per_block, codec, mac_key, self._note)
        self.namespace = self._format.namespace
        self._seed = self.namespace + self._runtime.random_bytes(16)
        self._digests: dict[Name, dict[Name, bytes]] = {}  # digests of each slot's last write
        self._known = KnownKeys(self._runtime.monotonic, self._there_seconds)
        self._token = b""  # of the epoch under which the keys are known
        self._record = EpochRecord(self, self._digest_of(b"BLKYEPOCH2"), self._format)
        self._epochs = SharedEpoch(self._record.read, self._record.replace, revision, self._keep_epoch)

    @property
    def uses(self) -> tuple[Use, ...]:
        """What the store can be used for: for prefixes only if the subclass has `delete`."""
        return ("swap",) if type(self).delete is ThreadedStore.delete else ("swap", "prefix")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({public_url(self.url)!r})"

    @abstractmethod
    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Store blocks under their keys, replacing existing ones. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`, no repeats. No other call uses these keys, unless it missed its deadline.
            rows: the rows to store, uint8 `[n, width]`; only this call uses them. `width` is `bytes_per_block`, except
                in a prefix store or with a codec or a MAC key.

        Returns:
            Whether each block was stored, bool `[n]`; False is a miss, `"refused"`.
        """

    @abstractmethod
    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read blocks by their keys. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`, repeats allowed. Names of slots were put before; other names may be absent.
            out: receives the rows, uint8 `[n, width]`, with arbitrary content; do not write to it after returning. If a
                stored row has another width, return True and leave the row unchanged.

        Returns:
            Whether each block was found, bool `[n]`; False is a miss, `"absent"`.
        """

    def delete(self, keys: NDArray[np.uint8]) -> None:  # noqa: ARG002 (a store with keys has its own)
        """Delete blocks; ignore absent ones. A plug-in that overrides this method can be a prefix store.

        Args:
            keys: uint8 `[n, 32]`, no repeats.
        """
        raise no_keys_error()

    def has(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return whether each key has a block, bool `[n]`. The default reads the blocks one by one.

        Args:
            keys: uint8 `[n, 32]`.
        """
        row = np.zeros((1, self._format.width), np.uint8)
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

        Never waits: unknown keys are looked up in the background, so retry some milliseconds later.
        """
        names = self._keys_of(keys)
        with self._lock:
            if self._closed or self._refuses(self._runtime.monotonic()):
                return np.zeros(len(names), np.bool_)
            there, is_wanting = self._known.look_up(names)
            if is_wanting:
                self._look()
            return np.array(there, np.bool_)

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether a read of each key would be a miss now; see `ExternalStore.lacks`."""
        names = self._keys_of(keys)
        with self._lock:
            is_down = self._closed or self._refuses(self._runtime.monotonic())
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
        done = self.wait(self._submit("forget", [self._record.key]))
        if not done.ok.all():
            why = f"{done.reasons[0]}; {self._last_error}" if done.reasons[0] == "error" else done.reasons[0]
            raise StoreError(f"forget was not confirmed, so nothing is found or stored until it is called again: {why}")

    def _check(self, slots: NDArray[np.int64], *, is_write: bool = False) -> None:
        self._process.check()
        check_slots(slots, self.num_slots, is_write=is_write)

    def _keys_of(self, keys: Keys) -> list[bytes]:
        self._process.check()
        if "prefix" not in self.uses:
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

    def _go_down(self) -> None:
        self._known.expire()  # the storage may be started again without its data
        super()._go_down()

    def _carry_out_under_epoch(self, batch: Batch) -> tuple[NDArray[np.uint8] | None, list[str]]:
        keys = [name for name in batch.names if isinstance(name, bytes)]
        if batch.kind == "get":
            return self._get(batch, keys)
        # A deleted block must not be found under another process's epoch either.
        epoch = self._confirm(seconds=0.0 if batch.kind == "delete" else _EPOCH_SECONDS)
        if batch.age < self._epochs.age:  # it was submitted under an earlier epoch
            return None, ["forgotten"] * len(keys)
        names = self._names_of(keys, epoch.token)
        if batch.kind == "put":
            return None, self._put(batch, keys, names, epoch)
        with self._lock:  # find puts that may still store a key again; while the call runs, one may end
            late = {name for other in self._late for name in other.names}
        self.delete(names)
        return None, ["lost" if key in late else "" for key in keys]

    def _confirm(self, *, seconds: float = 0.0) -> Epoch:
        """Return the epoch; under a new token nothing is known of any key."""
        epoch = self._epochs.confirm(seconds=seconds)
        with self._lock:
            if self._token not in {b"", epoch.token}:
                self._known.clear()
            self._token = epoch.token
        return epoch

    def _put(self, batch: Batch, keys: list[bytes], names: NDArray[np.uint8], epoch: Epoch) -> list[str]:
        values, reasons = self._sealed(self._rows_of(batch), keys)
        if batch.ended:  # the caller may have changed the rows since
            return reasons
        with self._lock:
            doubted = [index for index, key in enumerate(keys) if self._known.is_doubted(key)]
        if doubted:
            self._prepare_to_replace(names[doubted])
        self._put_good(names, values, reasons, batch.owners, epoch)
        self._give_values(values, reasons)
        return reasons

    def _write(self, batch: Batch) -> tuple[None, list[str]]:
        rows, slots = self._rows_of(batch), [name for name in batch.names if isinstance(name, int)]
        names, reasons = self._slot_names(slots), [""] * len(slots)
        if self._format.is_guarded:
            rows, reasons = self._sealed(rows, [name.tobytes() for name in names])
        elif not (self._reuses_rows and rows.flags.c_contiguous):
            rows = rows.copy()
        digests = rows[:, :16].copy() if self._format.is_guarded else checksum_rows(rows)
        self._put_good(names, rows, reasons)
        if self._format.is_guarded:
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
        if self._format.is_guarded:
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
        # Every read but the first fetches the record with it.
        epoch = self._epochs.known() or self._confirm()
        out = batch.rows if len(there) == len(batch.reasons) else None
        wanted = [keys[index] for index in there]
        stored, rows, found, seen = self._fetch_under(epoch, wanted, out)
        # If the record came damaged, a second look tells whether it still is the same one.
        if not self._epochs.counts(epoch, stored) and self._confirm().token != epoch.token:
            # The record was lost and replaced for the same weights.
            return None, ["absent"] * len(keys)
        for index, reason in zip(there, found, strict=True):
            reasons[index] = reason
        if any(found):
            self._judge_damage(epoch, wanted, found, seen)
        if batch.age < self._epochs.stopped_at:
            return None, ["forgotten"] * len(keys)
        return spread_out(rows, there, len(keys)), reasons

    def _judge_damage(self, epoch: Epoch, keys: list[bytes], reasons: list[str], seen: NDArray[np.uint8]) -> None:
        """Doubt the values that are damaged, and delete those that an earlier read has found damaged in the same way.

        A value that the codec refuses is only replaced by the next put: perhaps this process's codec is at fault.
        """
        damaged = {
            key: digest.tobytes() if is_damage(reason) and is_whole(reason) else b""
            for key, reason, digest in zip(keys, reasons, seen, strict=True)
            if is_damage(reason) or reason == "codec"
        }
        with self._lock:
            bad = [key for key, digest in damaged.items() if self._known.doubt(key, digest)]
        if bad:
            try:
                self.delete(self._names_of(bad, epoch.token))
            except Exception as error:  # noqa: BLE001 (the block is a miss either way)
                self._note(error)

    def _prepare_to_replace(self, names: NDArray[np.uint8]) -> None:
        """Make the next put of these names replace their values, as `put` does anyway in most stores."""

    # ---- values: blocks with a header ----

    def _rows_of(self, batch: Batch) -> NDArray[np.uint8]:
        """Return the caller's rows that a batch writes."""
        if batch.rows is None:  # the batch was given up
            raise StoreError("the batch has ended")
        return batch.rows[: len(batch.names)]

    def _sealed(self, rows: NDArray[np.uint8], keys: list[bytes]) -> tuple[NDArray[np.uint8], list[str]]:
        """Copy blocks into values in our own memory. Returns the values, and each block's reason if it has none."""
        values = self._buffers.take(len(keys), self._format.width)
        return values, self._format.seal(rows, keys, values)

    def _put_good(
        self,
        names: NDArray[np.uint8],
        rows: NDArray[np.uint8],
        reasons: list[str],
        owners: Owners | None = None,
        epoch: Epoch | None = None,
    ) -> None:
        """Put the rows without a reason, and set the reasons of refused ones."""
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
        """Return the memory of values to the pool, if nothing refers to it."""
        if self._reuses_rows and not any(reasons):
            self._buffers.give(values)

    def _put_owned(
        self,
        names: NDArray[np.uint8],
        rows: NDArray[np.uint8],
        owners: Owners,  # noqa: ARG002 (a store with quotas has its own)
        epoch: Epoch,  # noqa: ARG002
    ) -> NDArray[np.bool_]:
        """Put blocks that have tenants. A store without quotas ignores the tenants."""
        return self.put(names, rows)

    def _fetch(
        self,
        names: NDArray[np.uint8],
        keys: list[bytes],
        out: NDArray[np.uint8] | None = None,  # noqa: ARG002 (for stores that can read straight into it)
    ) -> tuple[NDArray[np.uint8], list[str], NDArray[np.uint8]]:
        """Read values. Returns their blocks, a reason for each, and what was read, see `ValueFormat.check`.

        A store that reads directly into the caller's rows, `out`, returns these.
        """
        values = self._buffers.take(len(keys), self._format.width)
        values[:, :HEADER] = 0
        missed = self._get_values(names, values)
        checked, sums = self._format.check(values, keys)
        reasons = [why or reason for why, reason in zip(missed, checked, strict=True)]
        if self._format.codec is None:
            return values[:, HEADER:], reasons, sums
        rows = self._buffers.take(len(keys), self.bytes_per_block)
        self._format.decode(self._format.codec, values, reasons, rows)
        self._buffers.give(values)
        return rows, reasons, sums

    def _get_values(self, names: NDArray[np.uint8], values: NDArray[np.uint8]) -> list[str]:
        """Read values with `get`. Returns a reason for each; stores that know more than `"absent"` override this."""
        return ["" if good else "absent" for good in answered("get", self.get(names, values), len(names))]

    def _look_up(self) -> list[str]:
        """Look up the keys that `contains` did not know; without such keys, look up any name, as a probe."""
        with self._lock:
            keys = self._known.take_wanted()
        if not keys:
            self.has(np.frombuffer(self._runtime.random_bytes(32), np.uint8)[None])
            return []
        try:
            epoch = self._confirm(seconds=_EPOCH_SECONDS)
        except ForgottenError:
            return []
        age = self._age
        found = answered("has", self.has(self._names_of(keys, epoch.token)), len(keys))
        with self._lock:
            is_valid = age == self._age and epoch == self._epochs.known()
            for key, good in zip(keys, found, strict=True):
                if is_valid and not self._order.is_busy(key) and self._known.is_due(key):
                    self._known.note(key, is_there=good)
            self._known.trim(self.num_slots)
        return []

    # ---- the epoch ----

    def read_epoch(self, key: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Return the row that identifies the valid blocks, uint8 `[192]`; None if it is absent.

        The default calls `get`, and treats `LookupError` and `FileNotFoundError` as absent. While it raises anything
        else, the store finds and stores nothing. Runs in a worker thread; may block or raise.

        Args:
            key: key of the row, uint8 `[32]`.
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
        """Replace that row if it equals `old`, atomically across processes. `forget` calls this.

        The default is safe only within one store object. Override it in a plug-in that several processes use at the
        same time. Runs in a worker thread; may block or raise.

        Args:
            key: key of the row, uint8 `[32]`.
            old: the expected row, uint8 `[192]`; None if it must be absent.
            new: the new row, uint8 `[192]`.

        Returns:
            The row that is stored afterwards.

        Raises:
            StoreError: the storage has no atomic replacement.
        """
        there = self.read_epoch(key)
        if (None if there is None else there.tobytes()) != (None if old is None else old.tobytes()):
            return there
        if not answered("put", self.put(key[None], new[None]), 1)[0]:
            raise StoreError("put refused the epoch's record")
        return new

    def _keep_epoch(self, epoch: Epoch) -> bool:  # noqa: ARG002 (a storage with replicas has its own)
        """Wait until the storage's replicas have the record of this epoch. Returns False if it may be lost."""
        return True

    def _fetch_under(
        self, epoch: Epoch, keys: list[bytes], out: NDArray[np.uint8] | None
    ) -> tuple[Record, NDArray[np.uint8], list[str], NDArray[np.uint8]]:
        """Read the record, and blocks under an epoch. Stores that can do both in one request override this."""
        stored = self._epochs.read()
        return stored, *self._fetch(self._names_of(keys, epoch.token), keys, out)

    def _slot_names(self, slots: list[int]) -> NDArray[np.uint8]:
        names = b"".join(hashlib.sha256(self._seed + slot.to_bytes(8, "little")).digest() for slot in slots)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    def _names_of(self, keys: list[bytes], epoch: bytes) -> NDArray[np.uint8]:
        names = b"".join(self._digest_of(b"BLKYBLOCK2", epoch + key) for key in keys)
        return np.frombuffer(names, np.uint8).reshape(-1, 32)

    def _digest_of(self, domain: bytes, rest: bytes = b"") -> bytes:
        return hashlib.sha256(domain + self.namespace + rest).digest()

    # ---- called with the lock held ----

    def _prepare(self, batch: Batch, names: Sequence[Name]) -> None:
        if batch.kind == "read":
            batch.expected = [self._digests.get(slot, {}) for slot in batch.names]
        elif batch.kind == "write":
            self._digests.update(dict.fromkeys(names, batch.digests))
        elif batch.kind == "delete":
            self._known.note_deleted(name for name in names if isinstance(name, bytes))

    def _conclude(self, batch: Batch) -> None:
        """Record which keys have a block, unless a later batch of the key exists."""
        if batch.kind not in {"put", "get", "delete"} or batch.age < self._age:
            return
        for name, reason in zip(batch.names, batch.reasons, strict=False):
            if not isinstance(name, bytes):
                continue
            if self._order.is_last(name, batch) or self._ends_hiding(name, batch, reason):
                self._known.note_ended(name, reason, is_delete=batch.kind == "delete")
        self._known.trim(self.num_slots)

    def _ends_hiding(self, name: bytes, batch: Batch, reason: str) -> bool:
        """Return whether a confirmed put or deletion ends the hiding of its key by an earlier deletion.

        Later reads of the key may already wait for this batch, and would stay misses.
        """
        is_confirmed = batch.kind != "get" and not reason
        return is_confirmed and self._known.is_hidden(name) and not self._order.is_deleted_behind(name, batch)

    def _count_stored(self) -> int:
        return self._known.count_there()
