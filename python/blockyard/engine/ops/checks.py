"""What every copy op checks before the first byte moves: the views, and the mapping against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from blockyard.engine.mapping import Ids, check_blocks, check_pairs
from blockyard.errors import LayoutError, MappingError
from blockyard.layout.extents import Extent, check_apart, overlap

# A pair of these is padding: graphs want mappings of a fixed length.
PADDING = -1


@dataclass(frozen=True)
class CopyOps:
    """The copy ops over some way of moving rows: they check, hand on what is right, and tell autograd what has changed.

    Attributes:
        copy_rows: takes views to read, views to write and pairs (from, to); no row is both read and written.
        move_rows: takes views and pairs (from, to), to be made as if all rows were read before one is written.
        exchange_rows: takes views and pairs of rows that change places; no row is named twice.
    """

    copy_rows: Callable[[Sequence[Tensor], Sequence[Tensor], Ids], None]
    move_rows: Callable[[Sequence[Tensor], Ids], None]
    exchange_rows: Callable[[Sequence[Tensor], Ids], None]

    def swap(self, src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
        """Implement `swap_blocks`."""
        check_swap(src, dst)
        self.copy_rows(src, dst, check_ids(pairs, src[0].shape[0], dst[0].shape[0], in_place=False))
        increment_version(dst)

    def copy(self, caches: list[Tensor], pairs: Tensor) -> None:
        """Implement `copy_blocks`."""
        check_caches(caches)
        blocks = caches[0].shape[0]
        self.copy_rows(caches, caches, check_ids(pairs, blocks, blocks, in_place=True))
        increment_version(caches)

    def move(self, caches: list[Tensor], pairs: Tensor) -> None:
        """Implement `move_blocks`."""
        check_caches(caches)
        blocks = caches[0].shape[0]
        self.move_rows(caches, check_ids(pairs, blocks, blocks, in_place=False))
        increment_version(caches)

    def exchange(self, caches: list[Tensor], pairs: Tensor) -> None:
        """Implement `exchange_blocks`."""
        check_caches(caches)
        self.exchange_rows(caches, check_exchange(pairs, caches[0].shape[0]))
        increment_version(caches)

    def gather(self, caches: list[Tensor], rows: Tensor, blocks: Tensor) -> None:
        """Implement `gather_blocks`."""
        pieces = split_rows(rows, caches)
        check_swap(caches, pieces, ("caches", "rows"))
        ids = check_list_of_blocks(blocks, caches[0].shape[0], rows.shape[0], unique=False)
        self.copy_rows(caches, pieces, np.column_stack((ids, np.arange(len(ids)))))
        increment_version(rows)

    def scatter(self, rows: Tensor, caches: list[Tensor], blocks: Tensor) -> None:
        """Implement `scatter_blocks`."""
        pieces = split_rows(rows, caches)
        check_swap(pieces, caches, ("rows", "caches"))
        ids = check_list_of_blocks(blocks, caches[0].shape[0], rows.shape[0], unique=True)
        self.copy_rows(pieces, caches, np.column_stack((np.arange(len(ids)), ids)))
        increment_version(caches)


def check_list(name: str, views: Sequence[Tensor]) -> list[Extent]:
    """Check that tensors are canonical views of one number of blocks on one device.

    Args:
        name: the argument's, for the message.
        views: uint8 `[blocks, bytes]`, rows contiguous.

    Returns:
        Where they lie.

    Raises:
        LayoutError: one is not.
    """
    if not views:
        raise LayoutError(f"{name} holds no tensors")
    extents = []
    for index, view in enumerate(views):
        if view.dtype != torch.uint8 or view.dim() != 2:
            raise LayoutError(f"{name}[{index}] is {view.dtype} {list(view.shape)}, wanted torch.uint8 [blocks, bytes]")
        blocks, width = view.shape
        row, column = view.stride()
        if (blocks and width > 1 and column != 1) or (blocks > 1 and row < width):
            raise LayoutError(f"{name}[{index}] has strides {[row, column]}, wanted contiguous rows of {width} bytes")
        if not index:
            count, device = blocks, view.device
        elif blocks != count or view.device != device:
            raise LayoutError(f"{name}[{index}] has {blocks} blocks on {view.device}, {name}[0] {count} on {device}")
        start = view.data_ptr()
        extents.append((start, start + (blocks - 1) * row + width if blocks and width else start, width, row))
    return extents


def check_caches(caches: Sequence[Tensor]) -> None:
    """Check views that are changed in place.

    Raises:
        LayoutError: they are no canonical views, or share memory.
    """
    check_apart("caches", check_list("caches", caches))


def check_swap(src: Sequence[Tensor], dst: Sequence[Tensor], names: tuple[str, str] = ("src", "dst")) -> None:
    """Check that views of one index fit one another and that no byte is both read and written.

    Args:
        src: views to read.
        dst: views to write.
        names: of the two arguments, for the message.

    Raises:
        LayoutError: they do not fit.
    """
    if len(src) != len(dst):
        raise LayoutError(f"{names[0]} holds {len(src)} tensors, {names[1]} {len(dst)}")
    read, written = check_list(names[0], src), check_list(names[1], dst)
    for index, (source, target) in enumerate(zip(read, written, strict=True)):
        if source[2] != target[2]:
            raise LayoutError(f"{names[0]}[{index}] has rows of {source[2]} bytes, {names[1]}[{index}] of {target[2]}")
    check_apart(names[1], written)
    # Addresses of one device say nothing of another's.
    if src[0].device == dst[0].device and overlap(read, written):
        raise LayoutError(f"{names[0]} and {names[1]} share memory: use copy_blocks within one cache")


def split_rows(rows: Tensor, caches: Sequence[Tensor]) -> list[Tensor]:
    """Cut rows into one view for each cache view.

    Args:
        rows: uint8 `[n, bytes_per_block]`, rows contiguous; `bytes_per_block` is the sum of the caches' widths.
        caches: canonical views.

    Returns:
        uint8 views `[n, bytes]` of the same widths, in the same order.

    Raises:
        LayoutError: the rows are no canonical view, or of another width.
    """
    check_list("rows", [rows])
    widths = [width for _, _, width, _ in check_list("caches", caches)]
    if rows.shape[1] != sum(widths):
        raise LayoutError(f"rows have {rows.shape[1]} bytes, a block of all caches has {sum(widths)}")
    return list(rows.split(widths, dim=1))


def check_ids(pairs: Tensor, src_blocks: int, dst_blocks: int, *, in_place: bool) -> Ids:
    """Check a mapping, as `blockyard.engine.mapping.check_pairs` does.

    Returns:
        The pairs, int64 `[n, 2]`, C-contiguous.

    Raises:
        MappingError: it is on a device, or malformed.
    """
    # An op takes the tensor that its other implementations read as it is.
    ids = _on_cpu("pairs", pairs)
    if ids.dtype != np.int64:
        raise MappingError(f"pairs are {ids.dtype} {list(ids.shape)}, wanted int64 [n, 2]")
    return check_pairs(ids, src_blocks=src_blocks, dst_blocks=dst_blocks, in_place=in_place)


def check_exchange(pairs: Tensor, num_blocks: int) -> Ids:
    """Check the pairs of an exchange and take the padding out.

    Args:
        pairs: int64 `[n, 2]`, CPU; `(-1, -1)` is padding.
        num_blocks: blocks there are.

    Returns:
        The pairs without padding, int64 `[m, 2]`, C-contiguous.

    Raises:
        MappingError: dtype or shape is wrong, an id is out of range (one -1 in a pair is), or a block is named twice.
    """
    ids = _on_cpu("pairs", pairs)
    if ids.dtype != np.int64 or ids.ndim != 2 or ids.shape[1] != 2:
        raise MappingError(f"pairs are {ids.dtype} {list(ids.shape)}, wanted int64 [n, 2]")
    entries = np.flatnonzero((ids != PADDING).any(axis=1))
    kept = np.ascontiguousarray(ids[entries])
    outside = kept.view(np.uint64) >= np.uint64(num_blocks)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise MappingError(
            f"entry {entries[row]}: block {kept[row, column]} is to be exchanged, there are {num_blocks} blocks"
        )
    ordered = np.sort(kept, axis=None)
    repeats = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(repeats):
        value = ordered[repeats[0]]
        first, second = entries[np.nonzero(kept == value)[0][:2]]
        raise MappingError(f"block {value} is exchanged twice, by entries {first} and {second}")
    return kept


def check_list_of_blocks(blocks: Tensor, num_blocks: int, num_rows: int, *, unique: bool) -> Ids:
    """Check the blocks that go with rows.

    Args:
        blocks: int64 `[n]`, CPU.
        num_blocks: blocks there are.
        num_rows: rows there are, which has to be n.
        unique: no id may repeat (they are written).

    Returns:
        The ids, C-contiguous.

    Raises:
        MappingError: dtype, shape or number is wrong, an id is out of range, or one repeats.
    """
    checked = check_blocks(_on_cpu("blocks", blocks), num_blocks, unique=unique)
    if len(checked) != num_rows:
        raise MappingError(f"{len(checked)} blocks are named, there are {num_rows} rows")
    return checked


def _on_cpu(name: str, ids: Tensor) -> Ids:
    if ids.device.type != "cpu":
        raise MappingError(f"{name} are on {ids.device}, wanted the CPU")
    array: Ids = ids.numpy()
    return array
