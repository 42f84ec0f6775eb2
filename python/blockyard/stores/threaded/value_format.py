"""`ValueFormat`: what a storage keeps for a block. A value with a header, whose block a codec may have encoded."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from blockyard.stores.codec import Codec, MacKey, guarded_namespace, read_mac_key
from blockyard.stores.value import HEADER, check_values, seal_values, value_length

__all__ = ["ValueFormat"]


class ValueFormat:
    """Makes values of the blocks of a store, and blocks of its values.

    Args:
        namespace: of the store, as its user gave it.
        bytes_per_block: bytes of one block.
        codec: encodes the blocks.
        mac_key: as for `open_store`.
        note: told what a codec raises; the block is a miss, `"codec"`.

    Attributes:
        namespace: also depends on the codec, and on whether there is a MAC key.
        width: most bytes of a value.
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
        self.codec = codec
        self.mac_key = None if mac_key is None else read_mac_key(mac_key)
        self.is_guarded = codec is not None or mac_key is not None
        self.namespace = guarded_namespace(namespace, codec, self.mac_key) if self.is_guarded else namespace
        self.width = HEADER + (bytes_per_block if codec is None else codec.bound(bytes_per_block))
        self._note = note

    def seal(self, rows: NDArray[np.uint8], keys: Sequence[bytes], values: NDArray[np.uint8]) -> list[str]:
        """Write the values of blocks. Returns why some have none, `""` for the others.

        Args:
            rows: the blocks, uint8 `[n, bytes_per_block]`.
            keys: 32 bytes each.
            values: where to, uint8 `[n, width]`.
        """
        reasons, lengths = [""] * len(keys), None
        if self.codec is None:
            values[:, HEADER:] = rows
        else:
            lengths = [0] * len(keys)
            for index, (row, value) in enumerate(zip(rows, values, strict=True)):
                try:
                    lengths[index] = self.codec.encode_into(row, value[HEADER:])
                except Exception as error:  # noqa: BLE001, PERF203 (whatever a codec raises)
                    reasons[index] = "codec"
                    self._note(error)
        seal_values(values, self.namespace, keys, lengths=lengths, mac_key=self.mac_key)
        return reasons

    def check(self, values: NDArray[np.uint8], keys: Sequence[bytes]) -> list[str]:
        """Return why each value is a miss, `""` for those that are whole; see `check_values`."""
        return check_values(values, self.namespace, keys, varies=self.codec is not None, mac_key=self.mac_key)

    def decode(self, codec: Codec, values: NDArray[np.uint8], reasons: list[str], rows: NDArray[np.uint8]) -> None:
        """Decode the values that have no reason yet to be misses into rows, and set the reasons of those that fail."""
        for index, (value, row) in enumerate(zip(values, rows, strict=True)):
            if reasons[index]:
                continue
            try:
                codec.decode_into(value[HEADER : HEADER + value_length(value)], row)
            except Exception as error:  # noqa: BLE001 (whatever a codec raises)
                reasons[index] = "codec"
                self._note(error)

    def is_encoded(self, rows: NDArray[np.uint8]) -> bool:
        """Return whether a row or rows hold what a codec returned, followed by zeros."""
        return self.codec is not None and rows.shape[-1] == self.width

    def stored(self, row: NDArray[np.uint8]) -> memoryview:
        """Return the bytes of a row that count: those of a codec are followed by zeros."""
        return (row[: HEADER + value_length(row)] if self.is_encoded(row) else row).data

    def accepts_size(self, row: NDArray[np.uint8], size: int) -> bool:
        """Return whether `size` stored bytes fit a row; the rest of it becomes zero."""
        if not self.is_encoded(row):
            return size == len(row)
        row[min(size, len(row)) :] = 0
        return HEADER <= size <= len(row)
