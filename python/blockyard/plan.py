"""Mappings of block ids, checked and joined with memory: what a copy engine needs to know before it moves a byte.

`phases` puts a decision into an order that is safe to run; `route` joins the views of two tiers, once; `compile_pairs`
gives the pieces of a mapping: source, destination and bytes of each, as batched copies take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import (
    CopyRoute,
    FillMap,
    Pairs,
    StepDecision,
    expand_span,
    merge_runs,
    order_moves,
    transfer_orders,
)
from blockyard.errors import LayoutError, MappingError
from blockyard.layout.kv import BlockLayout

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CopyPlan",
    "CopyRoute",
    "FillMap",
    "Phase",
    "Pieces",
    "check_blocks",
    "check_pairs",
    "compile_pairs",
    "expand_span",
    "in_runs",
    "join",
    "merge_runs",
    "order_moves",
    "phases",
    "route",
    "transfer_orders",
    "unequal_pairs",
]

Ids = NDArray[np.int64]
IdPairs = NDArray[np.integer[Any]] | Sequence[Sequence[int]]
# Moves are ordered by their ids alone; those are bounded where the tensors are.
_ANY_BLOCK = 2**32 - 1


class Phase(NamedTuple):
    """One transfer of a step, and what must have finished before it begins.

    Attributes:
        kind: `"spill"`, `"swap_out"`, `"swap_in"`, `"fetch"`, `"copy"`, `"move"` or `"exchange"`.
        src: tier that is read.
        dst: tier that is written.
        pairs: block ids `(from, to)`, int64 `[n, 2]`; they may be copied in any order.
        after: places of the phases before which must have finished; it may run beside the others.
    """

    kind: str
    src: str
    dst: str
    pairs: Ids
    after: tuple[int, ...]


class Pieces(NamedTuple):
    """What a copy engine submits: `num_bytes[i]` bytes from `src[i]` to `dst[i]`.

    Attributes:
        src: addresses, uint64 `[n]`.
        dst: addresses, uint64 `[n]`; no byte is written twice.
        num_bytes: uint64 `[n]`.
        starts: where each part begins and the last ends, int64 `[parts + 1]`.
    """

    src: NDArray[np.uint64]
    dst: NDArray[np.uint64]
    num_bytes: NDArray[np.uint64]
    starts: Ids


def phases(decision: StepDecision) -> list[Phase]:
    """Put a step's transfers into an order in which they are safe to run one after another.

    Args:
        decision: what the scheduler got.

    Returns:
        The transfers; moves that follow one another become a phase for each wave of them.

    Raises:
        MappingError: moves follow one another in a circle, or write a block twice.
    """
    found: list[Phase] = []
    places: list[range] = []
    for (kind, pairs), before in zip(decision.transfers(), transfer_orders(decision), strict=True):
        first = len(found)
        after = tuple(place for index in before for place in places[index])
        ordered, starts = order_moves(pairs.ids, _ANY_BLOCK) if kind == "move" else (pairs.ids, [0, len(pairs)])
        for begin, end in pairwise(starts):
            found.append(Phase(kind, pairs.src, pairs.dst, ordered[begin:end], after))
            after = (*after, len(found) - 1)
        places.append(range(first, len(found)))
    return found


def route(
    src: Sequence[Tensor], dst: Sequence[Tensor], *, parts: Sequence[int] | None = None, in_place: bool = False
) -> CopyRoute:
    """Join the views of two sets of memory.

    Args:
        src: uint8 views to read, `[blocks, bytes]`, or `[rows, blocks per row, bytes]` where a block of this tier holds
            several of the other; bytes contiguous. The tensors must live as long as the route is used.
        dst: as many views to write; view i takes the bytes of view i of `src`.
        parts: for each view which part of a plan it belongs to, such as its layer, from 0 rising one by one; pieces are
            not merged across parts. None: all are one part.
        in_place: source and destination are the same blocks, so that none may be both read and written.

    Returns:
        A route; ids of rows that hold several blocks count blocks.

    Raises:
        LayoutError: the views do not fit one another.
        InvalidArgumentError: blocks of a view overlap, or parts do not rise one by one.
    """
    if len(src) != len(dst) or not src or (parts is not None and len(parts) != len(src)):
        raise LayoutError(f"{len(src)} views to read, {len(dst)} to write, {len(parts or src)} parts: wanted as many")
    (src_blocks, src_per_row), (dst_blocks, dst_per_row) = _blocks("src", src), _blocks("dst", dst)
    regions = np.empty((len(src), 8), np.uint64)
    for index, (source, target) in enumerate(zip(src, dst, strict=True)):
        if source.shape[-1] != target.shape[-1]:
            widths = f"{source.shape[-1]} bytes, dst[{index}] of {target.shape[-1]}"
            raise LayoutError(f"src[{index}] has blocks of {widths}")
        part = 0 if parts is None else parts[index]
        regions[index] = (*_side(source), *_side(target), source.shape[-1], part)
    return CopyRoute(
        regions,
        src_blocks=src_blocks,
        dst_blocks=dst_blocks,
        src_per_row=src_per_row,
        dst_per_row=dst_per_row,
        in_place=in_place,
    )


def _blocks(name: str, views: Sequence[Tensor]) -> tuple[int, int]:
    """Blocks of an end, and how many there are in one row."""
    shape = tuple(views[0].shape[:-1])
    for index, view in enumerate(views):
        found = f"{name}[{index}] is {view.dtype} {list(view.shape)} with strides {list(view.stride())}"
        if view.dim() not in {2, 3} or str(view.dtype) != "torch.uint8":
            raise LayoutError(f"{found}, wanted uint8 [blocks, bytes] or [rows, blocks, bytes]")
        if tuple(view.shape[:-1]) != shape or (view.shape[-1] > 1 and view.stride(-1) != 1):
            raise LayoutError(f"{found}, wanted {list(shape)} blocks of contiguous bytes")
    per_row = int(shape[1]) if len(shape) == 2 else 1
    return int(shape[0]) * per_row, per_row


def _side(view: Tensor) -> tuple[int, int, int]:
    return view.data_ptr(), view.stride(0), view.stride(1) if view.dim() == 3 else 0


def compile_pairs(joined: CopyRoute, pairs: Ids, *, out: NDArray[np.uint64] | None = None) -> Pieces:
    """Join a mapping with a route.

    Args:
        joined: what `route` gave.
        pairs: block ids `(from, to)`, int64 `[n, 2]`; no id of the second column repeats.
        out: uint64 `[3, pieces]` to be filled, which saves new memory for every plan; the pieces are views of it. It
            must not be used again before what was submitted has read it.

    Returns:
        The pieces, runs of ids merged where memory runs on, part by part.

    Raises:
        MappingError: the mapping is malformed or out of range, or `out` is too small; nothing was written.
    """
    memory = np.empty((3, joined.num_regions * len(pairs)), np.uint64) if out is None else out
    starts = joined.compile(pairs, memory)
    src, dst, num_bytes = memory[:, : starts[-1]]
    return Pieces(src, dst, num_bytes, starts)


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


@dataclass(frozen=True)
class CopyPlan:
    """One mapping joined with a layout.

    Attributes:
        pairs: checked block ids `(from, to)`, int64 `[n, 2]`, C-contiguous, in as few runs as there can be.
        num_bytes: bytes that the plan moves, over all layers.
    """

    pairs: Ids
    num_bytes: int

    def __len__(self) -> int:
        return len(self.pairs)


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


def join(pairs: Ids, layout: BlockLayout, *, src_blocks: int, dst_blocks: int, in_place: bool = False) -> CopyPlan:
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
    checked = in_runs(check_pairs(pairs, src_blocks=src_blocks, dst_blocks=dst_blocks, in_place=in_place))
    return CopyPlan(checked, len(checked) * layout.bytes_per_block)


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
