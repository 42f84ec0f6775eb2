"""Memory extents of views, by address: different storages over the same buffer are found to overlap, too."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from blockyard.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Extent", "check_apart", "extent_of", "overlap"]

Extent: TypeAlias = tuple[int, int, int, int]
"""A view's start address, end address (exclusive), row width in bytes, and row stride in bytes."""

_END: Final = itemgetter(1)


def extent_of(view: Tensor) -> Extent:
    """Return the extent of a view, uint8 `[blocks, bytes]` with contiguous rows."""
    (blocks, width), stride, start = view.shape, view.stride(0), view.data_ptr()
    return start, start + (blocks - 1) * stride + width if blocks and width else start, width, stride


def check_apart(name: str, extents: Sequence[Extent]) -> None:
    """Check that views share no memory: they follow one another, or their rows interleave at the same stride.

    Args:
        name: the argument's name, for the message.
        extents: extents of the views, all on one device.

    Raises:
        LayoutError: two views share memory.
    """
    base = period = row_end = reach = last = 0
    for (start, end, width, stride), index in sorted(zip(extents, range(len(extents)), strict=True)):
        if start >= reach:
            base, period, reach = start, stride, end
        elif stride != period or start < row_end or start + width > base + period:
            raise LayoutError(f"{name}[{last}] and {name}[{index}] share memory")
        row_end, reach, last = start + width, max(reach, end), index


def overlap(one: Sequence[Extent], other: Sequence[Extent]) -> bool:
    """Return whether the address ranges of any two views, one from each list, overlap."""
    if max(one, key=_END)[1] <= min(other)[0] or max(other, key=_END)[1] <= min(one)[0]:
        return False
    sides = [*((start, end, 0) for start, end, _, _ in one), *((start, end, 1) for start, end, _, _ in other)]
    reach = [0, 0]
    for start, end, side in sorted(sides):
        if start < end:
            if start < reach[1 - side]:
                return True
            reach[side] = max(reach[side], end)
    return False
