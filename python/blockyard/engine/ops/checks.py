"""The checks of every copy op before the first byte moves: of the views, and of the mapping against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from blockyard._core import Mapping
from blockyard.engine.mapping import Ids, with_rows
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError
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
        finds_shared: whether both refuse views that share memory. Then it is looked for here only to name the two.
    """

    copy_between: Callable[[Sequence[Tensor], Sequence[Tensor], Mapping], None]
    copy_within: Callable[[Sequence[Tensor], Mapping], None]
    finds_shared: bool = False

    def between(self, src: Sequence[Tensor], dst: Sequence[Tensor], mapping: Mapping) -> None:
        """Carry out a mapping from some views to others."""
        self._between(src, dst, mapping, ("src", "dst"))
        increment_version(dst)

    def within(self, caches: Sequence[Tensor], mapping: Mapping) -> None:
        """Carry out a mapping within views."""
        check = partial(check_apart, "caches", check_list("caches", caches))
        self._unless_shared(check, partial(self.copy_within, caches, mapping))
        increment_version(caches)

    def _between(self, src: Sequence[Tensor], dst: Sequence[Tensor], mapping: Mapping, names: tuple[str, str]) -> None:
        check = check_swap(src, dst, names)
        self._unless_shared(check, partial(self.copy_between, src, dst, mapping))

    def _unless_shared(self, check: Callable[[], None], copy: Callable[[], None]) -> None:
        """Copy, unless views share memory, which the check raises LayoutError for."""
        if not self.finds_shared:
            check()
        try:
            copy()
        except InvalidArgumentError:
            check()
            raise

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
        pieces, num_blocks = split_rows(rows, caches), caches[0].shape[0]
        mapping = mapping_of_rows(blocks, num_blocks, rows.shape[0], written=False)
        self._between(caches, pieces, mapping, ("caches", "rows"))
        increment_version(rows)

    def scatter(self, rows: Tensor, caches: list[Tensor], blocks: Tensor) -> None:
        """Implement `scatter_blocks`."""
        pieces, num_blocks = split_rows(rows, caches), caches[0].shape[0]
        mapping = mapping_of_rows(blocks, num_blocks, rows.shape[0], written=True)
        self._between(pieces, caches, mapping, ("rows", "caches"))
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


def check_swap(src: Sequence[Tensor], dst: Sequence[Tensor], names: tuple[str, str]) -> Callable[[], None]:
    """Check that corresponding views match.

    Args:
        src: views to read.
        dst: views to write.
        names: names of the two arguments, for the message.

    Returns:
        A check that no byte is written twice, or both read and written, which raises LayoutError, too.

    Raises:
        LayoutError: they do not match.
    """
    if len(src) != len(dst):
        raise LayoutError(f"{names[0]} holds {len(src)} tensors, {names[1]} {len(dst)}")
    read, written = check_list(names[0], src), check_list(names[1], dst)
    for index, (source, target) in enumerate(zip(read, written, strict=True)):
        if source[2] != target[2]:
            raise LayoutError(f"{names[0]}[{index}] has rows of {source[2]} bytes, {names[1]}[{index}] of {target[2]}")
    # Addresses of different devices cannot be compared.
    return partial(_check_shared, names, read if src[0].device == dst[0].device else [], written)


def _check_shared(names: tuple[str, str], read: Sequence[Extent], written: Sequence[Extent]) -> None:
    check_apart(names[1], written)
    if read and overlap(read, written):
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
