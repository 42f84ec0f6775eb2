"""Mappings of block ids, checked and joined with a layout: what a copy engine needs to know before it moves a byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard._core import merge_runs
from blockyard.errors import MappingError
from blockyard.layout import KVLayout

__all__ = ["CopyPlan", "check_blocks", "check_pairs", "join", "merge_runs"]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class CopyPlan:
    """One mapping joined with a layout.

    Attributes:
        pairs: checked block ids `(from, to)`, int64 `[n, 2]`, C-contiguous.
        num_bytes: bytes that the plan moves, over all layers.
    """

    pairs: Ids
    num_bytes: int

    def __len__(self) -> int:
        return len(self.pairs)


def join(pairs: Ids, layout: KVLayout, *, src_blocks: int, dst_blocks: int, in_place: bool = False) -> CopyPlan:
    """Join a mapping with a layout.

    Args:
        pairs: block ids `(from, to)`, int64 `[n, 2]`.
        layout: describes both sides.
        src_blocks: blocks in the tier that is read.
        dst_blocks: blocks in the tier that is written.
        in_place: both tiers are one.

    Returns:
        The plan.

    Raises:
        MappingError: the mapping is malformed, see `check_pairs`.
    """
    checked = check_pairs(pairs, src_blocks=src_blocks, dst_blocks=dst_blocks, in_place=in_place)
    return CopyPlan(checked, len(checked) * layout.bytes_per_block)


def check_pairs(pairs: Ids, *, src_blocks: int, dst_blocks: int, in_place: bool = False) -> Ids:
    """Check a mapping of block ids.

    Args:
        pairs: block ids `(from, to)`, int64 `[n, 2]`; no id of the second column repeats.
        src_blocks: blocks that can be read; ids are 0-based.
        dst_blocks: blocks that can be written.
        in_place: source and destination are the same blocks, so none may be both read and written.

    Returns:
        The pairs, C-contiguous (the argument itself where it is).

    Raises:
        MappingError: dtype or shape is wrong, an id is out of range, a destination repeats, or with `in_place` a
            block is both read and written.
    """
    if pairs.dtype != np.int64 or pairs.ndim != 2 or pairs.shape[1] != 2:
        raise MappingError(f"pairs are {pairs.dtype} {list(pairs.shape)}, wanted int64 [n, 2]")
    if len(pairs) == 0:
        return np.ascontiguousarray(pairs)
    sources, targets = pairs[:, 0], pairs[:, 1]
    _check_range(sources, src_blocks, "read")
    _check_range(targets, dst_blocks, "written")
    ordered = _check_unique(targets)
    if in_place:
        places = np.searchsorted(ordered, sources).clip(max=len(ordered) - 1)
        both = np.flatnonzero(ordered[places] == sources)
        if len(both):
            raise MappingError(f"block {sources[both[0]]} is both read (pair {both[0]}) and written in one copy")
    return np.ascontiguousarray(pairs)


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
