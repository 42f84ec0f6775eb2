"""The value that a shared store holds under a key: a header of 128 bytes, then the block.

| bytes | field |
|---|---|
| 0..16 | XXH3-128 of the whole value with zeros here; with a MAC key its keyed BLAKE3, the first 16 bytes |
| 16..24 | `BLKYVALU` |
| 24..28 | version, 1 |
| 32..64 | namespace digest |
| 64..96 | key of the block |
| 96..104 | length of the block in bytes, as the codec returned it |

Numbers are little-endian; the rest of the header is zero. A value is a hit only if all of it is as expected. For the
checksum, a codec's output is padded with zeros to the codec's maximum length; stores need not keep the padding.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import checksum_rows

__all__ = [
    "HEADER",
    "Bytes",
    "answered",
    "check_parts",
    "check_values",
    "copy_rows",
    "is_damage",
    "is_whole",
    "reasons_of",
    "seal_values",
    "spread_out",
    "value_length",
]

Bytes: TypeAlias = NDArray[np.uint8]
HEADER: Final = 128
_START: Final = b"BLKYVALU" + (1).to_bytes(4, "little") + bytes(4)
# Fields in the order in which a reader checks them, each with the reason of a miss.
_FIELDS: Final = (
    (slice(16, 24), "magic"),
    (slice(24, 32), "version"),
    (slice(32, 64), "namespace"),
    (slice(64, 96), "key"),
    (slice(96, 104), "length"),
    (slice(104, 128), "header_checksum"),
)
_DAMAGE: Final = {"payload_checksum", "slot", "generation", "truncated"} | {reason for _, reason in _FIELDS}
_OF_ANOTHER: Final = {"magic", "length", "truncated"}  # what an error page or a cut answer looks like


def is_damage(reason: str) -> bool:
    """Return whether a miss means that a damaged value was read. It is deleted only if a second read confirms it.

    All other reasons are transient: the storage did not answer in time, refused, or was full. The block may be intact.
    """
    return reason in _DAMAGE


def is_whole(reason: str) -> bool:
    """Return whether a damaged value starts and ends as values do. If not, perhaps the storage did not send it."""
    return reason not in _OF_ANOTHER


def seal_values(
    values: Bytes,
    namespace: bytes,
    keys: Sequence[bytes],
    *,
    lengths: Sequence[int] | None = None,
    mac_key: bytes | None,
) -> None:
    """Write the headers of values, uint8 `[n, HEADER + width]`, whose blocks are in place.

    Args:
        values: receive the headers; a shorter block is padded with zeros.
        namespace: 32 bytes.
        keys: 32 bytes each.
        lengths: lengths of the blocks, if they differ.
        mac_key: 32 bytes for a keyed checksum; None for one without key.
    """
    values[:, :HEADER] = _headers(
        namespace, keys, [values.shape[1] - HEADER] * len(keys) if lengths is None else lengths
    )
    values[:, :16] = checksum_rows(values, mac_key)


def check_values(
    values: Bytes, namespace: bytes, keys: Sequence[bytes], *, varies: bool = False, mac_key: bytes | None
) -> list[str]:
    """Return the reason why each value is a miss, `""` for intact ones. Zeroes the values' checksums.

    Args:
        values: as for `seal_values`.
        namespace: 32 bytes.
        keys: 32 bytes each.
        varies: whether blocks may be shorter than their place.
        mac_key: 32 bytes for a keyed checksum; None for one without key.
    """
    claimed = values[:, :16].copy()
    values[:, :16] = 0
    width = values.shape[1] - HEADER
    lengths = [min(value_length(value), width) for value in values] if varies else [width] * len(keys)
    return _reasons(values[:, :HEADER], _headers(namespace, keys, lengths), claimed, checksum_rows(values, mac_key))


def check_parts(headers: Bytes, sums: Bytes, namespace: bytes, keys: Sequence[bytes], length: int) -> list[str]:
    """Check values like `check_values`, with separate headers and blocks. Zeroes the headers' checksums.

    Args:
        headers: uint8 `[n, HEADER]`.
        sums: checksum of each value, computed with zeros in its field, uint8 `[n, 16]`.
        namespace: 32 bytes.
        keys: 32 bytes each.
        length: length of every block.
    """
    claimed = headers[:, :16].copy()
    headers[:, :16] = 0
    return _reasons(headers, _headers(namespace, keys, [length] * len(keys)), claimed, sums)


def value_length(value: Bytes) -> int:
    """Return the block length from a value's header, unchecked."""
    return int.from_bytes(value[96:104].tobytes(), "little")


def _reasons(found: Bytes, expected: Bytes, claimed: Bytes, sums: Bytes) -> list[str]:
    if claimed.tobytes() == sums.tobytes() and found.tobytes() == expected.tobytes():  # faster for a few blocks
        return [""] * len(found)
    reasons = ["" if good else "payload_checksum" for good in (claimed == sums).all(axis=1)]
    for index in np.flatnonzero((found != expected).any(axis=1)):
        reasons[index] = next(
            reason for part, reason in _FIELDS if not np.array_equal(found[index, part], expected[index, part])
        )
    return reasons


def _headers(namespace: bytes, keys: Sequence[bytes], lengths: Sequence[int]) -> Bytes:
    start, end = bytes(16) + _START + namespace.ljust(32, b"\0"), bytes(24)
    headers = b"".join(start + key + size.to_bytes(8, "little") + end for key, size in zip(keys, lengths, strict=True))
    return np.frombuffer(headers, np.uint8).reshape(-1, HEADER)


def copy_rows(rows: Bytes, ok: NDArray[np.bool_], out: Bytes) -> bool:
    """Copy the good rows to `out`. Returns False if they already are there."""
    if rows is out:
        return False
    if ok.all():
        np.copyto(out, rows)
    else:
        for index in np.flatnonzero(ok):
            out[index] = rows[index]
    return True


def spread_out(rows: Bytes, where: list[int], count: int) -> Bytes:
    """Return `count` rows: row `i` of `rows` at index `where[i]`, zeros elsewhere."""
    if len(where) == count:
        return rows
    out = np.zeros((count, rows.shape[1]), np.uint8)
    for index, row in zip(where, rows, strict=True):
        out[index] = row
    return out


def answered(name: str, found: object, count: int) -> list[bool]:
    """Check the result of a store's function: for each block, whether it was stored or found.

    Raises:
        TypeError: the result is not bool `[count]`.
    """
    array = np.asarray(found)
    if array.dtype != np.bool_ or array.shape != (count,):
        raise TypeError(f"{name} returned {array.dtype} {list(array.shape)}, must return bool [{count}]")
    good: list[bool] = array.tolist()
    return good


def reasons_of(found: object, count: int) -> list[str]:
    """Check the result of a store's `get`. Returns a reason for each block, `""` for those that were found.

    Raises:
        TypeError: the result is neither bool `[count]` nor a list of as many reasons.
    """
    if isinstance(found, list) and len(found) == count and all(isinstance(reason, str) for reason in found):
        return found
    return ["" if good else "absent" for good in answered("get", found, count)]
