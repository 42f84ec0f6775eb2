"""`ValueFormat`: the stored form of a block: a header, then the block, which a codec may have encoded."""

from collections.abc import Callable, Sequence

import numpy as np

from blockyard._core import checksum_rows
from blockyard.stores.codec import Codec, MacKey, guarded_namespace, read_mac_key
from blockyard.stores.value import HEADER, Bytes, check_parts, check_values, seal_values, value_length

__all__ = ["ValueFormat"]


class ValueFormat:
    """Converts blocks to values and back.

    Args:
        namespace: the store's namespace, as the user passed it.
        bytes_per_block: bytes of one block.
        codec: encodes the blocks.
        mac_key: as for `open_store`.
        note: called with each exception of a codec; the block is a miss, `"codec"`.

    Attributes:
        namespace: the namespace, which also depends on the codec and on the presence of a MAC key.
        width: maximum bytes of a value.
        is_guarded: whether blocks in slots are stored as values, too.
    """

    def __init__(
        self,
        namespace: bytes,
        bytes_per_block: int,
        codec: Codec | None,
        mac_key: MacKey | None,
        note: Callable[[Exception], None],
    ) -> None:
        self.codec, self.bytes_per_block = codec, bytes_per_block
        self.mac_key = None if mac_key is None else read_mac_key(mac_key)
        self.is_guarded = codec is not None or mac_key is not None
        self.namespace = guarded_namespace(namespace, codec, self.mac_key) if self.is_guarded else namespace
        self.width = HEADER + (bytes_per_block if codec is None else codec.bound(bytes_per_block))
        self._note = note

    def seal(self, rows: Bytes, keys: Sequence[bytes], values: Bytes) -> list[str]:
        """Write the values of blocks. Returns a reason for each block that failed, `""` for the others.

        Args:
            rows: the blocks, uint8 `[n, bytes_per_block]`.
            keys: 32 bytes each.
            values: receive the values, uint8 `[n, width]`.
        """
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
        return reasons

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

    def decode(self, codec: Codec, values: Bytes, reasons: list[str], rows: Bytes) -> None:
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
