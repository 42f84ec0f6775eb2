"""`FillMap` and `HostFill`: which parts of host blocks hold bytes, and which are on their way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard._core import FillMap
from blockyard.engine.fill import HostFill
from blockyard.errors import InvalidArgumentError, MappingError


def ids(*listed: int) -> np.ndarray:
    return np.array(listed, np.int64)


@given(
    st.integers(1, 70),
    st.lists(st.tuples(st.sampled_from(["mark", "unmark", "clear"]), st.integers(0, 999)), max_size=30),
)
def test_it_is_a_set_of_parts(per_block, calls):
    fill, model = FillMap(3, per_block), set()
    for call, number in calls:
        if call == "mark":
            fill.mark(ids(number % (3 * per_block)))
            model.add(number % (3 * per_block))
        elif call == "unmark":
            fill.unmark(ids(number % (3 * per_block)))
            model.discard(number % (3 * per_block))
        else:
            fill.clear(ids(number % 3))
            model -= set(range(number % 3 * per_block, (number % 3 + 1) * per_block))
    blocks = [sum(part // per_block == block for part in model) for block in range(3)]
    assert fill.count(ids(0, 1, 2)).tolist() == blocks
    fill.require(ids(*model))
    for part in set(range(3 * per_block)) - model:
        with pytest.raises(MappingError, match=rf"part {part % per_block} of host block {part // per_block} holds no"):
            fill.require(ids(part))


def test_what_is_out_of_range_changes_nothing():
    fill = FillMap(3, 5)
    for call in (
        lambda: fill.mark(ids(0, 15)),
        lambda: fill.unmark(ids(15)),
        lambda: fill.clear(ids(3)),
        lambda: fill.require(ids(-1)),
    ):
        with pytest.raises(MappingError):
            call()
    with pytest.raises(MappingError, match="must be an int64 array"):
        fill.mark(np.zeros(2, np.int32))
    assert (fill.count(ids(0)).tolist(), fill.num_blocks, fill.per_block) == ([0], 3, 5)
    for blocks, per_block in [(3, 0), (2**31, 2)]:
        with pytest.raises(InvalidArgumentError, match="device blocks per host block"):
            FillMap(blocks, per_block)


def test_parts_on_their_way_can_be_read_only_after_their_ticket():
    fill = HostFill(3, 5)
    fill.begin(7, ids(3, 4, 5))
    fill.require(ids(4, 3), after=[6, 7])
    with pytest.raises(MappingError, match=r"part 0 of host block 1 holds no bytes \(id 5\)"):
        fill.require(ids(5))
    fill.end(7, landed=True)
    fill.require(ids(3, 4, 5))
    assert fill.count(ids(0, 1, 2)).tolist() == [2, 1, 0]
    fill.clear(ids(0))
    assert fill.count(ids(0, 1, 2)).tolist() == [0, 1, 0]


def test_parts_that_are_written_again_are_there_when_the_last_has_landed():
    fill = HostFill(2, 2)
    fill.mark(ids(1))
    fill.begin(1, ids(0, 1))
    fill.begin(2, ids(1, 2))
    fill.end(1, landed=True)
    assert fill.count(ids(0, 1)).tolist() == [1, 0]
    fill.end(2, landed=False)
    assert fill.count(ids(0, 1)).tolist() == [1, 0], (
        "what failed to be written holds nothing, whatever was there before"
    )


def test_device_blocks_are_paired_with_the_parts_of_a_stretch():
    fill = HostFill(4, 3)
    out = fill.pairs(ids(7, 5, 6), ids(2, 0), first=2, last=2, to="host")
    assert out.tolist() == [[7, 8], [5, 0], [6, 1]]
    back = fill.pairs(ids(7, 5, 6), ids(2, 0), first=2, last=2, to="device")
    assert back.tolist() == [[8, 7], [0, 5], [1, 6]]
    with pytest.raises(MappingError, match="4"):
        fill.pairs(ids(7, 5, 6, 4), ids(2, 0), first=2, last=2, to="host")
