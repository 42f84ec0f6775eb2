"""Extents of views, against the sets of bytes that they cover."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard.errors import LayoutError
from blockyard.layout.extents import Extent, check_apart, extent_of, overlap


@st.composite
def lists_of_extents(draw: st.DrawFn) -> list[tuple[Extent, int]]:
    """Extents with their numbers of blocks, near one another."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        width, blocks = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        stride, start = width + draw(st.integers(0, 6)), draw(st.integers(0, 40))
        end = start + (blocks - 1) * stride + width if blocks and width else start
        found.append(((start, end, width, stride), blocks))
    return found


def bytes_of(extent: Extent, blocks: int) -> set[int]:
    start, _, width, stride = extent
    return {start + block * stride + at for block in range(blocks) for at in range(width)}


@given(lists_of_extents())
def test_views_that_pass_share_no_byte(drawn: list[tuple[Extent, int]]):
    try:
        check_apart("caches", [extent for extent, _ in drawn])
    except LayoutError:
        return
    covered = [byte for extent, blocks in drawn for byte in bytes_of(extent, blocks)]
    assert len(covered) == len(set(covered))


@given(lists_of_extents(), lists_of_extents())
def test_extents_overlap_exactly_if_two_of_them_meet(one: list, other: list):
    one, other = ([extent for extent, _ in extents] for extents in (one, other))
    wanted = any(a < b and c < d and a < d and c < b for a, b, _, _ in one for c, d, _, _ in other)
    assert overlap(one, other) == overlap(other, one) == wanted


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 3))
def test_an_extent_goes_from_the_first_byte_to_the_last(blocks: int, width: int, pad: int):
    memory = torch.from_numpy(np.zeros(blocks * (width + pad) + 8, dtype=np.uint8))
    view = memory.as_strided((blocks, width), (width + pad, 1), 3)
    last = view[-1:, -1:]
    assert extent_of(view) == (view.data_ptr(), last.data_ptr() + 1, width, width + pad)


def test_views_that_alternate_within_rows_are_apart_and_others_are_named():
    check_apart("caches", [(0, 36, 4, 8), (4, 40, 4, 8), (40, 48, 8, 8)])
    with pytest.raises(LayoutError, match=r"caches\[0\] and caches\[1\] share memory"):
        check_apart("caches", [(0, 36, 4, 8), (4, 42, 6, 8)])
