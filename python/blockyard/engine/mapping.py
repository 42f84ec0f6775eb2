"""Mappings of block ids: checked, sorted into runs, and paired where host blocks hold several device blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, expand_span
from blockyard.errors import MappingError

__all__ = ["IdPairs", "Ids", "check_blocks", "check_pairs", "in_runs", "unequal_pairs"]

Ids = NDArray[np.int64]
IdPairs = NDArray[np.integer[Any]] | Sequence[Sequence[int]]


def unequal_pairs(
    small: Ids,
    large: Ids,
    *,
    per_block: int,
    first: int,
    last: int,
    to: Literal["small", "large"],
    out: Ids | None = None,
) -> Ids:
    """Pair device blocks with parts of host blocks that each hold several of them.

    Args:
        small: device blocks in the order of the sequence, int64 `[n]`.
        large: host blocks that hold them, int64 `[m]`.
        per_block: device blocks in a host block, at least 1.
        first: offset in the first host block where the transfer begins, 0 to `per_block - 1`.
        last: offset in the last host block before which it ends, 1 to `per_block`.
        to: which side is written: `"large"` stores, `"small"` loads.
        out: int64 `[n, 2]` to be filled and returned.

    Returns:
        `(from, to)`, int64 `[n, 2]`; a part of a host block has the id `block * per_block + offset`.

    Raises:
        MappingError: the stretch of host blocks holds another number of parts than there are device blocks, or an
            offset or id is out of range; nothing was written.

    Source: vLLM 0.33 `vllm/v1/kv_offload` pads the first host block alone and takes the tail of the last for granted.
    """
    pairs = np.empty((len(small), 2), np.int64) if out is None else out
    if pairs.dtype != np.int64 or pairs.shape != (len(small), 2):
        raise MappingError(f"out is {pairs.dtype} {list(pairs.shape)}, wanted int64 {[len(small), 2]}")
    side = 1 if to == "large" else 0
    expand_span(large, pairs[:, side], per_block=per_block, first=first, last=last)
    pairs[:, 1 - side] = small
    return pairs


def in_runs(pairs: Ids) -> Ids:
    """Put pairs whose destinations do not repeat into the order of those: no other order merges into fewer runs.

    The copy ops merge neighbours into one piece each, over every tensor whose blocks lie side by side.

    Args:
        pairs: block ids `(from, to)`, int64 `[n, 2]`.

    Returns:
        The pairs; the argument itself where they are in that order.
    """
    targets = pairs[:, 1]
    if (targets[1:] > targets[:-1]).all():
        return pairs
    return np.ascontiguousarray(pairs[np.argsort(targets)])


def check_pairs(pairs: IdPairs, *, src_blocks: int, dst_blocks: int, in_place: bool = False) -> Ids:
    """Check a mapping of block ids.

    Args:
        pairs: block ids `(from, to)`: int64 `[n, 2]`, another array of ints, or a sequence of pairs; no `to` repeats.
        src_blocks: blocks that can be read; ids are 0-based.
        dst_blocks: blocks that can be written.
        in_place: source and destination are the same blocks, so none may be both read and written.

    Returns:
        The pairs, C-contiguous (the argument itself where it is).

    Raises:
        MappingError: dtype or shape is wrong, an id is out of range, a destination repeats, or with `in_place` a
            block is both read and written.
    """
    is_wide = isinstance(pairs, np.ndarray) and pairs.dtype == np.int64
    ids = cast(Ids, pairs) if is_wide else Pairs("device", "device", pairs).ids
    if ids.ndim != 2 or ids.shape[1] != 2:
        raise MappingError(f"pairs are {ids.dtype} {list(ids.shape)}, wanted int64 [n, 2]")
    if len(ids) == 0:
        return np.ascontiguousarray(ids)
    sources, targets = ids[:, 0], ids[:, 1]
    _check_range(sources, src_blocks, "read")
    _check_range(targets, dst_blocks, "written")
    ordered = _check_unique(targets)
    if in_place:
        places = np.searchsorted(ordered, sources).clip(max=len(ordered) - 1)
        both = np.flatnonzero(ordered[places] == sources)
        if len(both):
            raise MappingError(f"block {sources[both[0]]} is both read (pair {both[0]}) and written in one copy")
    return np.ascontiguousarray(ids)


def check_blocks(blocks: Ids, num_blocks: int, *, unique: bool = False) -> Ids:
    """Check a list of block ids.

    Args:
        blocks: int64 `[n]`.
        num_blocks: blocks in the tier; ids are 0-based.
        unique: no id may repeat (they are written).

    Returns:
        The ids, C-contiguous.

    Raises:
        MappingError: dtype or shape is wrong, an id is out of range, or one repeats.
    """
    if blocks.dtype != np.int64 or blocks.ndim != 1:
        raise MappingError(f"blocks are {blocks.dtype} {list(blocks.shape)}, wanted int64 [n]")
    if len(blocks):
        _check_range(blocks, num_blocks, "written" if unique else "read")
        if unique:
            _check_unique(blocks)
    return np.ascontiguousarray(blocks)


def _check_range(ids: Ids, num_blocks: int, verb: str) -> None:
    # As unsigned numbers, negative ids are too large ones: one comparison finds both.
    outside = ids.view(np.uint64) >= np.uint64(num_blocks)
    if outside.any():
        index = int(outside.argmax())
        raise MappingError(f"entry {index}: block {ids[index]} is to be {verb}, there are {num_blocks} blocks")


def _check_unique(ids: Ids) -> Ids:
    ordered = np.sort(ids)
    repeats = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(repeats):
        value = ordered[repeats[0]]
        first, second = np.flatnonzero(ids == value)[:2]
        raise MappingError(f"block {value} is written twice, by entries {first} and {second}")
    return ordered
