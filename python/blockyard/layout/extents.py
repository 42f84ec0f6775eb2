"""Where views lie in memory, by address: two storages over one buffer share memory as two views of one storage do."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from blockyard.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Extent", "check_apart", "extent_of", "overlap"]

Extent: TypeAlias = tuple[int, int, int, int]
"""First address of a view, first that it does not reach, bytes of a row, bytes from row to row."""

_END: Final = itemgetter(1)


def extent_of(view: Tensor) -> Extent:
    """Give the extent of a view, uint8 `[blocks, bytes]`, rows contiguous."""
    (blocks, width), stride, start = view.shape, view.stride(0), view.data_ptr()
    return start, start + (blocks - 1) * stride + width if blocks and width else start, width, stride


def check_apart(name: str, extents: Sequence[Extent]) -> None:
    """Refuse views that share memory: they follow one another, or alternate within one distance of rows.

    Args:
        name: the argument's, for the message.
        extents: of the views, all on one device.

    Raises:
        LayoutError: two share memory.
    """
    base = period = row_end = reach = last = 0
    for (start, end, width, stride), index in sorted(zip(extents, range(len(extents)), strict=True)):
        if start >= reach:
            base, period, reach = start, stride, end
        elif stride != period or start < row_end or start + width > base + period:
            raise LayoutError(f"{name}[{last}] and {name}[{index}] share memory")
        row_end, reach, last = start + width, max(reach, end), index


def overlap(one: Sequence[Extent], other: Sequence[Extent]) -> bool:
    """Say whether any view of one list begins before one of the other ends, and the other way round."""
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
