"""The value that a shared store keeps under a key: a header of 128 bytes, then the block.

| bytes | field |
|---|---|
| 0..16 | XXH3-128 of the whole value with zeros here |
| 16..24 | `BLKYVALU` |
| 24..28 | version, 1 |
| 32..64 | namespace digest |
| 64..96 | key of the block |
| 96..104 | length of the block in bytes |

Numbers are little-endian; the rest is zero. A value counts only if all of it is as expected.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import checksum_rows

__all__ = ["HEADER", "check_values", "seal_values"]

HEADER: Final = 128
_START: Final = b"BLKYVALU" + (1).to_bytes(4, "little") + bytes(4)
# Fields in the order in which a reader looks at them, and the reason of a miss.
_FIELDS: Final = (
    (slice(16, 24), "magic"),
    (slice(24, 32), "version"),
    (slice(32, 64), "namespace"),
    (slice(64, 96), "key"),
    (slice(96, 104), "length"),
    (slice(104, 128), "header_checksum"),
)


def seal_values(values: NDArray[np.uint8], namespace: bytes, keys: list[bytes]) -> None:
    """Write the headers of values, uint8 `[n, HEADER + length]`, whose blocks are in place."""
    values[:, :HEADER] = _headers(values, namespace, keys)
    values[:, :16] = checksum_rows(values)


def check_values(values: NDArray[np.uint8], namespace: bytes, keys: list[bytes]) -> list[str]:
    """Return the reason why each value is a miss, `""` for those that are whole. Zeroes the values' checksums."""
    sums = values[:, :16].copy()
    values[:, :16] = 0
    whole = (sums == checksum_rows(values)).all(axis=1)
    expected = _headers(values, namespace, keys)
    same = (values[:, :HEADER] == expected).all(axis=1)
    reasons = ["" if good else "payload_checksum" for good in whole]
    for index in np.flatnonzero(~same):
        reasons[index] = next(
            reason for part, reason in _FIELDS if not np.array_equal(values[index, part], expected[index, part])
        )
    return reasons


def _headers(values: NDArray[np.uint8], namespace: bytes, keys: list[bytes]) -> NDArray[np.uint8]:
    length = (values.shape[1] - HEADER).to_bytes(8, "little")
    headers = b"".join(bytes(16) + _START + namespace.ljust(32, b"\0") + key + length + bytes(24) for key in keys)
    return np.frombuffer(headers, np.uint8).reshape(-1, HEADER)
