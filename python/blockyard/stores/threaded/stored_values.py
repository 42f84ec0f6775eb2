"""`StoredValues`: the stored form of blocks, a header and then the block, perhaps encoded; and their storage."""

from collections.abc import Callable, Sequence

import numpy as np

from blockyard._core import checksum_rows
from blockyard.stores.base import Owners
from blockyard.stores.codec import Codec, MacKey, guarded_namespace, read_mac_key
from blockyard.stores.threaded.storage import Storage
from blockyard.stores.value import (
    HEADER,
    Bytes,
    answered,
    check_parts,
    check_values,
    reasons_of,
    seal_values,
    value_length,
)
from blockyard.workers.buffers import Buffers

__all__ = ["StoredValues"]


class StoredValues:
    """Converts blocks to values, puts and gets these, and converts them back. Thread-safe; may block.

    Args:
        storage: holds the values.
        namespace: the store's namespace, as the user passed it.
        bytes_per_block: bytes of one block.
        codec: encodes the blocks.
        mac_key: as for `open_store`.
        note: called with each exception of a codec; the block is a miss, `"codec"`.
        reuses_rows: whether rows are free for reuse once `put` has returned.

    Attributes:
        namespace: the namespace, which also depends on the codec and on the presence of a MAC key.
        width: maximum bytes of a value.
        is_guarded: whether blocks in slots are stored as values, too.
        buffers: the memory of values and blocks.
    """

    def __init__(
        self,
        storage: Storage,
        namespace: bytes,
        bytes_per_block: int,
        codec: Codec | None,
        mac_key: MacKey | None,
        *,
        note: Callable[[Exception], None],
        reuses_rows: bool,
    ) -> None:
        self.codec, self.bytes_per_block, self.reuses_rows = codec, bytes_per_block, reuses_rows
        self.mac_key = None if mac_key is None else read_mac_key(mac_key)
        self.is_guarded = codec is not None or mac_key is not None
        self.namespace = guarded_namespace(namespace, codec, self.mac_key) if self.is_guarded else namespace
        self.width = HEADER + (bytes_per_block if codec is None else codec.bound(bytes_per_block))
        self.buffers = Buffers()
        self._storage, self._note = storage, note

    def seal(self, rows: Bytes, keys: Sequence[bytes]) -> tuple[Bytes, list[str]]:
        """Copy blocks into values in our own memory. Returns the values, and each block's reason if it has none."""
        shape = len(keys), self.width
        # A buffer that is never given back is fresh pages each time, which takes longer than the rest of a put.
        values = self.buffers.take(*shape) if self.reuses_rows else np.empty(shape, np.uint8)
        reasons, lengths = [""] * len(keys), None
        if self.codec is None:
            values[:, HEADER:] = rows
        else:
            lengths = [0] * len(keys)
            for index, (row, value) in enumerate(zip(rows, values, strict=True)):
                try:
                    lengths[index] = self.codec.encode_into(row, value[HEADER:])
                except Exception as error:  # noqa: BLE001, PERF203 (any exception of a codec)
                    reasons[index] = "codec"
                    self._note(error)
        seal_values(values, self.namespace, keys, lengths=lengths, mac_key=self.mac_key)
        return values, reasons

    def put(
        self,
        names: Bytes,
        rows: Bytes,
        reasons: list[str],
        owners: Owners | None = None,
        damaged: set[bytes] | None = None,
    ) -> None:
        """Put the rows without a reason, and set the reasons of refused ones. Rows of slots have no `damaged`."""
        good = [index for index, reason in enumerate(reasons) if not reason]
        if not good:
            return
        if len(good) < len(rows):
            names, rows = names[good], rows[good]
            owners = None if owners is None else Owners(owners.tenants[good], owners.parents[good])
        storage = self._storage
        found = storage.put(names, rows) if damaged is None else storage.put_blocks(names, rows, owners, damaged)
        for index, stored in zip(good, answered("put", found, len(good)), strict=True):
            reasons[index] = "" if stored else "refused"

    def give(self, values: Bytes, reasons: list[str]) -> None:
        """Return the memory of values to the pool, if nothing refers to it."""
        if self.reuses_rows and not any(reasons):
            self.buffers.give(values)

    def fetch(self, names: Bytes, keys: list[bytes]) -> tuple[Bytes, list[str], Bytes]:
        """Read values. Returns their blocks, a reason for each, and what was read, see `check`."""
        values = self.buffers.take(len(keys), self.width)
        values[:, :HEADER] = 0
        missed = reasons_of(self._storage.get(names, values), len(names))
        checked, sums = self.check(values, keys)
        reasons = [why or reason for why, reason in zip(missed, checked, strict=True)]
        if self.codec is None:
            return values[:, HEADER:], reasons, sums
        rows = self.buffers.take(len(keys), self.bytes_per_block)
        self._decode(self.codec, values, reasons, rows)
        self.buffers.give(values)
        return rows, reasons, sums

    def check(self, values: Bytes, keys: Sequence[bytes]) -> tuple[list[str], Bytes]:
        """Return why each value is a miss, `""` for intact ones, and what was read; see `check_values`.

        The latter is the checksum of an intact value, and a digest of any other, uint8 `[n, 16]`.
        """
        sums = values[:, :16].copy()
        reasons = check_values(values, self.namespace, keys, varies=self.codec is not None, mac_key=self.mac_key)
        bad = [index for index, reason in enumerate(reasons) if reason]
        if bad:
            sums[bad] ^= checksum_rows(values[bad], self.mac_key)
        return reasons, sums

    def check_apart(
        self, rows: Bytes, headers: Bytes, missed: list[str], keys: Sequence[bytes], sums: Bytes | None = None
    ) -> tuple[Bytes, list[str], Bytes]:
        """Check values without a codec, whose headers are apart. Returns the rows, and the same as `check`.

        `missed` has the reason for each value that was not read, `""` for the others. Pass `sums` if already computed.
        """
        if sums is None:
            zeroed = headers.copy()
            zeroed[:, :16] = 0
            sums = checksum_rows(rows, self.mac_key, zeroed)
        seen = headers[:, :16].copy()
        if seen.tobytes() != sums.tobytes():
            seen = np.where((seen == sums).all(axis=1)[:, None], seen, seen ^ sums)
        checked = check_parts(headers, sums, self.namespace, keys, rows.shape[1])
        return rows, [why or reason for why, reason in zip(missed, checked, strict=True)], seen

    def _decode(self, codec: Codec, values: Bytes, reasons: list[str], rows: Bytes) -> None:
        """Decode the values without a reason into rows, and set the reasons of those that fail."""
        for index, (value, row) in enumerate(zip(values, rows, strict=True)):
            if reasons[index]:
                continue
            try:
                codec.decode_into(value[HEADER : HEADER + value_length(value)], row)
            except Exception as error:  # noqa: BLE001 (any exception of a codec)
                reasons[index] = "codec"
                self._note(error)

    def is_encoded(self, rows: Bytes) -> bool:
        """Return whether rows have the width of values that hold a codec's output, padded with zeros."""
        return self.codec is not None and rows.shape[-1] == self.width

    def stored(self, row: Bytes) -> memoryview:
        """Return the bytes of a row to store: without the zeros that pad a codec's output."""
        return (row[: HEADER + value_length(row)] if self.is_encoded(row) else row).data

    def can_be(self, size: int) -> bool:
        """Return whether a block's value can have this many bytes."""
        return size == self.width if self.codec is None else HEADER <= size <= self.width

    def accepts_size(self, row: Bytes, value: Bytes) -> bool:
        """Return whether stored bytes have a valid length for a row. Zeroes the rest of the row."""
        size = len(value)
        if not self.is_encoded(row):
            return size == len(row)
        row[min(size, len(row)) :] = 0
        return HEADER <= size <= len(row) and size == HEADER + value_length(value)
