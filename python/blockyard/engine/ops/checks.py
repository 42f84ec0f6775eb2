"""The checks of every copy op before the first byte moves: of the views, and of the mapping against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from blockyard._core import Mapping
from blockyard.engine.mapping import Ids, with_rows
from blockyard.errors import LayoutError, MappingError
from blockyard.layout.extents import Extent, check_apart, overlap

MappingRule: TypeAlias = Literal["swap", "copy", "move", "exchange"]

# A pair of these is padding: graphs need mappings of a fixed length.
PADDING = -1


@dataclass(frozen=True)
class CopyOps:
    """The copy ops over a way to move rows: they check arguments, pass them on, and tell autograd what changed.

    Attributes:
        copy_between: takes views to read, views to write and a mapping.
        copy_within: takes views to change in place and a mapping.
    """

    copy_between: Callable[[Sequence[Tensor], Sequence[Tensor], Mapping], None]
    copy_within: Callable[[Sequence[Tensor], Mapping], None]

    def between(self, src: Sequence[Tensor], dst: Sequence[Tensor], mapping: Mapping) -> None:
        """Carry out a mapping from some views to others."""
        check_swap(src, dst)
        self.copy_between(src, dst, mapping)
        increment_version(dst)

    def within(self, caches: Sequence[Tensor], mapping: Mapping) -> None:
        """Carry out a mapping within views."""
        check_caches(caches)
        self.copy_within(caches, mapping)
        increment_version(caches)

    def swap(self, src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
        """Implement `swap_blocks`."""
        self.between(src, dst, mapping_of("swap", pairs, count_blocks("src", src), count_blocks("dst", dst)))

    def copy(self, caches: list[Tensor], pairs: Tensor) -> None:
        """Implement `copy_blocks`."""
        self._change("copy", caches, pairs)

    def move(self, caches: list[Tensor], pairs: Tensor) -> None:
        """Implement `move_blocks`."""
        self._change("move", caches, pairs)

    def exchange(self, caches: list[Tensor], pairs: Tensor) -> None:
        """Implement `exchange_blocks`."""
        self._change("exchange", caches, pairs)

    def _change(self, rule: MappingRule, caches: list[Tensor], pairs: Tensor) -> None:
        blocks = count_blocks("caches", caches)
        self.within(caches, mapping_of(rule, pairs, blocks, blocks))

    def gather(self, caches: list[Tensor], rows: Tensor, blocks: Tensor) -> None:
        """Implement `gather_blocks`."""
        pieces = split_rows(rows, caches)
        check_swap(caches, pieces, ("caches", "rows"))
        self.copy_between(caches, pieces, mapping_of_rows(blocks, caches[0].shape[0], rows.shape[0], written=False))
        increment_version(rows)

    def scatter(self, rows: Tensor, caches: list[Tensor], blocks: Tensor) -> None:
        """Implement `scatter_blocks`."""
        pieces = split_rows(rows, caches)
        check_swap(pieces, caches, ("rows", "caches"))
        self.copy_between(pieces, caches, mapping_of_rows(blocks, caches[0].shape[0], rows.shape[0], written=True))
        increment_version(caches)


def check_list(name: str, views: Sequence[Tensor]) -> list[Extent]:
    """Check that tensors are canonical views with equal numbers of blocks on one device.

    Args:
        name: the argument's, for the message.
        views: uint8 `[blocks, bytes]`, rows contiguous.

    Returns:
        Their extents in memory.

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
        LayoutError: they are not canonical views, or share memory.
    """
    check_apart("caches", check_list("caches", caches))


def check_swap(src: Sequence[Tensor], dst: Sequence[Tensor], names: tuple[str, str] = ("src", "dst")) -> None:
    """Check that corresponding views match and that no byte is both read and written.

    Args:
        src: views to read.
        dst: views to write.
        names: names of the two arguments, for the message.

    Raises:
        LayoutError: they do not match.
    """
    if len(src) != len(dst):
        raise LayoutError(f"{names[0]} holds {len(src)} tensors, {names[1]} {len(dst)}")
    read, written = check_list(names[0], src), check_list(names[1], dst)
    for index, (source, target) in enumerate(zip(read, written, strict=True)):
        if source[2] != target[2]:
            raise LayoutError(f"{names[0]}[{index}] has rows of {source[2]} bytes, {names[1]}[{index}] of {target[2]}")
    check_apart(names[1], written)
    # Addresses of different devices cannot be compared.
    if src[0].device == dst[0].device and overlap(read, written):
        raise LayoutError(f"{names[0]} and {names[1]} share memory: use copy_blocks within one cache")


def split_rows(rows: Tensor, caches: Sequence[Tensor]) -> list[Tensor]:
    """Split rows into one view per cache view.

    Args:
        rows: uint8 `[n, bytes_per_block]`, rows contiguous; `bytes_per_block` is the sum of the caches' widths.
        caches: canonical views.

    Returns:
        uint8 views `[n, bytes]` of the same widths, in the same order.

    Raises:
        LayoutError: the rows are not a canonical view, or have another width.
    """
    check_list("rows", [rows])
    widths = [width for _, _, width, _ in check_list("caches", caches)]
    if rows.shape[1] != sum(widths):
        raise LayoutError(f"rows have {rows.shape[1]} bytes, a block of all caches has {sum(widths)}")
    return list(rows.split(widths, dim=1))


def count_blocks(name: str, views: Sequence[Tensor]) -> int:
    """Return the number of blocks of the first view, before the views are checked; raises LayoutError."""
    if not views:
        raise LayoutError(f"{name} holds no tensors")
    return views[0].shape[0] if views[0].dim() else 0


def mapping_of(rule: MappingRule, pairs: Tensor, src_blocks: int, dst_blocks: int) -> Mapping:
    """Check the pairs of an op, int64 `[n, 2]` on the CPU.

    Raises:
        MappingError: they are on a device, of another dtype or shape, or break the rule.
    """
    # An op receives the tensor unconverted, as its other implementations do.
    ids = _on_cpu("pairs", pairs)
    if ids.dtype != np.int64 or ids.ndim != 2 or ids.shape[1] != 2:
        raise MappingError(f"pairs are {ids.dtype} {list(ids.shape)}, wanted int64 [n, 2]")
    return Mapping(ids, src_blocks=src_blocks, dst_blocks=dst_blocks, rule=rule)


def mapping_of_rows(blocks: Tensor, num_blocks: int, num_rows: int, *, written: bool) -> Mapping:
    """Check the blocks that go with rows, int64 `[n]` on the CPU; raises MappingError."""
    ids = _on_cpu("blocks", blocks)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise MappingError(f"blocks are {ids.dtype} {list(ids.shape)}, wanted int64 [n]")
    mapping = with_rows(ids, num_blocks, written=written)
    if len(mapping) != num_rows:
        raise MappingError(f"{len(mapping)} blocks are named, there are {num_rows} rows")
    return mapping


def _on_cpu(name: str, ids: Tensor) -> Ids:
    if ids.device.type != "cpu":
        raise MappingError(f"{name} are on {ids.device}, wanted the CPU")
    array: Ids = ids.numpy()
    return array
