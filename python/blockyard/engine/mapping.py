"""Mappings between blocks and rows, and for host chunks that hold several blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Mapping, expand_span
from blockyard.errors import InvalidArgumentError, MappingError

__all__ = ["IdList", "IdPairs", "Ids", "unequal_pairs", "with_rows"]

Ids = NDArray[np.int64]
IdList = NDArray[np.integer[Any]] | Sequence[int]
IdPairs = NDArray[np.integer[Any]] | Sequence[Sequence[int]]


def unequal_pairs(
    small: NDArray[np.integer[Any]],
    large: NDArray[np.integer[Any]],
    *,
    per_block: int,
    first: int,
    last: int,
    to: Literal["small", "large"],
) -> Ids:
    """Pair device blocks with parts of larger host blocks (chunks), for a swap-out or a swap-in.

    A chunk has `per_block` parts, each as large as a device block. For `m` chunks a copy engine needs
    `host_blocks=per_block * m`. The transfer may begin within the first chunk and end within the last one. The content
    of parts is not checked: load only parts that were stored under the chunk's key.

    Args:
        small: device block ids in sequence order, int32 or int64 `[n]`.
        large: ids of the chunks that hold them, in the same order, int32 or int64 `[m]`.
        per_block: device blocks in a chunk, at least 1.
        first: index of the first part in the first chunk, 0 to `per_block - 1`.
        last: end index (exclusive) of the parts in the last chunk, 1 to `per_block`.
        to: which side is written: `"large"` stores, `"small"` loads.

    Returns:
        `(from, to)`, int64 `[n, 2]`, for `CacheEngine.submit`. Part `p` of chunk `c` is the host block
        `c * per_block + p`.

    Raises:
        InvalidArgumentError: `to` is neither `"small"` nor `"large"`.
        MappingError: the number of parts between `first` and `last` differs from the number of device blocks, an offset
            or id is out of range, or an array has the wrong shape or dtype.

    Source: vLLM 0.33 `vllm/v1/kv_offload`, which pads only the first chunk and infers the tail of the last.

    Example:
        Load the second half of chunk 7 and the first quarter of chunk 9:

        >>> import numpy as np
        >>> from blockyard.engine import unequal_pairs
        >>> pairs = unequal_pairs(np.array([5, 6, 3]), np.array([7, 9]), per_block=4, first=2, last=1, to="small")
        >>> pairs.tolist()
        [[30, 5], [31, 6], [36, 3]]
    """
    if to not in ("small", "large"):
        raise InvalidArgumentError(f"to is {to!r:.100}, must be 'small' or 'large'")
    small, large = _wide(small, "small"), _wide(large, "large")
    pairs = np.empty((len(small), 2), np.int64)
    side = 1 if to == "large" else 0
    expand_span(large, pairs[:, side], per_block=per_block, first=first, last=last)
    pairs[:, 1 - side] = small
    return pairs


def _wide(ids: NDArray[np.integer[Any]], name: str) -> Ids:
    if ids.dtype.kind != "i" or ids.ndim != 1:
        raise MappingError(f"{name} is {ids.dtype} {list(ids.shape)}, must be int32 or int64 [n]")
    return ids.astype(np.int64, copy=False)


def _ints(blocks: IdList) -> Ids:
    try:
        ids = np.asarray(blocks)
    except ValueError:  # rows of different lengths
        ids = np.asarray(None)
    if not ids.size and ids.ndim == 1:
        return np.zeros(0, np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(blocks, np.ndarray) else repr(blocks)[:80]
        raise MappingError(f"blocks are {found}, must be ints [n]: an array or a sequence")
    return ids.astype(np.int64, copy=False)


def with_rows(blocks: IdList, num_blocks: int, *, written: bool, first: int = 0) -> Mapping:
    """Pair blocks with consecutive rows.

    Args:
        blocks: ints `[n]`; no repeats if they are `written`.
        num_blocks: blocks in the tier; ids are 0-based.
        written: whether blocks are written and rows read, or the other way round.
        first: the first row.

    Raises:
        MappingError: they are not ints, have another shape, an id is out of range, or one repeats.
    """
    ids = _ints(blocks)
    end = first + len(ids)
    sides = [(np.arange(first, end), end), (ids, num_blocks)]
    (sources, src_blocks), (targets, dst_blocks) = sides if written else sides[::-1]
    pairs = np.column_stack((sources, targets))
    return Mapping(pairs, src_blocks=src_blocks, dst_blocks=dst_blocks, rule="swap")
