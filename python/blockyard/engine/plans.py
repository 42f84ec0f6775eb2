"""Makes transfers: mappings of block ids, combined with the engine's memory and split into pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from blockyard._core import Mapping
from blockyard.engine.mapping import IdList, IdPairs, with_rows
from blockyard.engine.memory import EngineTier, Memory, Rows, Run, as_tensor
from blockyard.engine.ops.checks import MappingRule
from blockyard.engine.transfers import Transfer, Work
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError

__all__ = ["KINDS", "Kind", "moving", "reading", "writing"]

Kind: TypeAlias = Literal["swap_out", "swap_in", "copy", "move", "exchange"]

_BETWEEN: Final[dict[str, tuple[EngineTier, EngineTier]]] = {
    "swap_out": ("device", "host"),
    "swap_in": ("host", "device"),
}
KINDS: Final = (*_BETWEEN, "copy", "move", "exchange")


def moving(
    memory: Memory, kind: Kind, ids: IdPairs, tier: EngineTier, *, chunk: int | None, by_layer: bool = False
) -> Transfer:
    """Check a mapping of block ids, and combine it with the memory.

    Args:
        memory: the engine's memory.
        kind: see `CacheEngine.submit`.
        ids: see there.
        tier: see there.
        chunk: number of blocks per piece; None for all.
        by_layer: see there.

    Raises:
        InvalidArgumentError: there is no such kind or tier.
        MappingError: the mapping is malformed or out of range.
    """
    if kind not in KINDS:
        raise InvalidArgumentError(f"kind is {kind!r}, must be one of {', '.join(KINDS)}")
    memory.num_blocks(tier)  # also where the kind says both tiers
    src, dst = _BETWEEN.get(kind, (tier, tier))
    blocks = memory.num_blocks(src), memory.num_blocks(dst)
    rule: MappingRule = "swap" if kind in _BETWEEN else kind  # type: ignore[assignment]
    try:
        mapping = Mapping(ids, src_blocks=blocks[0], dst_blocks=blocks[1], rule=rule)
    except MappingError as error:
        raise _naming_tier(error, memory, (src, dst), ids) from None
    num_bytes = len(mapping) * memory.bytes_per_block * (2 if kind == "exchange" else 1)
    for end, side in zip(mapping.reach, (src, dst), strict=True):
        if side == "host":
            memory.wait_for_host(end)
    runs, layers = memory.run_by_layer(src, dst) if by_layer else ([], [])
    if runs:
        pieces: deque[Work] = deque(partial(run, mapping) for run in runs)
        return Transfer(kind, src, dst, mapping, num_bytes, pieces, layers=layers)
    # Within a tier use one piece, so that nothing comes between the steps of moves.
    return Transfer(
        kind, src, dst, mapping, num_bytes, _pieces(memory.run(src, dst), mapping, None if src == dst else chunk)
    )


def reading(
    memory: Memory, tier: EngineTier, blocks: IdList, *, chunk: int | None, into: Rows | None = None
) -> Transfer:
    """Check block ids, ints `[n]`, to copy into rows; None means fresh rows.

    Raises:
        MappingError: an id is out of range.
        LayoutError: the rows have another shape or dtype, or cannot be written by the device.
    """
    buffer, first = memory.buffer_of(into) if isinstance(into, np.ndarray) else (None, 0)
    try:
        mapping = with_rows(blocks, memory.num_blocks(tier), written=False, first=first)
    except MappingError as error:
        raise _naming_tier(error, memory, [tier], blocks) from None
    rows = memory.staging(len(mapping)) if into is None else _read_rows(memory, into, len(mapping))
    run = memory.run_with(tier, rows if buffer is into or buffer is None else torch.from_numpy(buffer), written=False)
    return Transfer("read", tier, "rows", mapping, rows.numel(), _pieces(run, mapping, chunk), memory=rows)


def writing(
    memory: Memory, tier: EngineTier, blocks: IdList, rows: Rows, *, chunk: int | None, copies: bool = False
) -> Transfer:
    """Check block ids, ints `[n]` without repeats, to write from rows; raises MappingError, LayoutError.

    Rows for a CUDA device are copied if they are not page-locked but staging memory is; with `copies` always.
    """
    try:
        mapping = with_rows(blocks, memory.num_blocks(tier), written=True)
    except MappingError as error:
        raise _naming_tier(error, memory, [tier], blocks) from None
    wanted = (len(mapping), memory.bytes_per_block)
    if rows.dtype != np.uint8 or rows.shape != wanted:
        raise LayoutError(f"rows are {rows.dtype} {list(rows.shape)}, wanted uint8 {list(wanted)}")
    buffer, first = memory.buffer_of(rows)
    source = as_tensor(buffer)
    # An asynchronous copy needs page-locked rows; and an empty array has no usable strides.
    staged = copies or (memory.pin_memory and not source.is_pinned())
    if (staged and tier == "device" and memory.device.type == "cuda") or not len(mapping):
        source, first = memory.staging(len(mapping)).copy_(as_tensor(rows)), 0
    if first:
        mapping = with_rows(blocks, memory.num_blocks(tier), written=True, first=first)
    pieces = _pieces(memory.run_with(tier, source, written=True), mapping, chunk)
    return Transfer("write", "rows", tier, mapping, rows.nbytes, pieces, memory=source)


def _read_rows(memory: Memory, rows: Rows, count: int) -> Tensor:
    """View rows as the destination of a read; raises LayoutError."""
    wanted = (count, memory.bytes_per_block)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != wanted or not _is_writable(rows):
        found = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, np.ndarray) else f"a {type(rows).__name__}"
        raise LayoutError(f"rows is {found}, must be uint8 {list(wanted)}, writable, and each row contiguous")
    tensor = torch.from_numpy(rows)
    if memory.pin_memory and count and not tensor.is_pinned():
        raise LayoutError("rows is pageable memory, must be page-locked as the engine's own staging rows are")
    return tensor


def _is_writable(rows: Rows) -> bool:
    """Return whether rows can be written; they may lie apart."""
    flags, (stride, step) = rows.flags, rows.strides
    return flags.carray or (flags.writeable and step == 1 and stride >= rows.shape[1])


def _naming_tier(
    error: MappingError, memory: Memory, tiers: Sequence[EngineTier], ids: IdPairs | IdList
) -> MappingError:
    """Add the tier of an id that is too large: its manager was created with another number of blocks."""
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        return error
    columns = array.T if array.ndim == 2 else [array]
    for column, tier in zip(columns, tiers, strict=False):
        num_blocks = memory.num_blocks(tier)
        if column.dtype.kind in "iu" and column.size and column.max() >= num_blocks:
            return MappingError(f"{error}; the engine has {tier}_blocks={num_blocks}, give its manager the same")
    return error


def _pieces(run: Run, mapping: Mapping, chunk: int | None) -> deque[Work]:
    """Split a transfer into pieces of whole blocks."""
    return deque(partial(run, part) for part in (mapping.split(chunk) if chunk else [mapping]))
