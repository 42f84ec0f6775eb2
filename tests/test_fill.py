"""`FillMap`: which parts of host blocks hold bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard import InvalidArgumentError, MappingError
from blockyard.plan import FillMap


def ids(*listed: int) -> np.ndarray:
    return np.array(listed, np.int64)


@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 999)), max_size=30))
def test_it_is_a_set_of_parts(per_block, calls):
    fill, model = FillMap(3, per_block), set()
    for marks, number in calls:
        if marks:
            fill.mark(ids(number % (3 * per_block)))
            model.add(number % (3 * per_block))
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
    for call in (lambda: fill.mark(ids(0, 15)), lambda: fill.clear(ids(3)), lambda: fill.require(ids(-1))):
        with pytest.raises(MappingError):
            call()
    with pytest.raises(MappingError, match="C-contiguous int64"):
        fill.mark(np.zeros(2, np.int32))
    assert (fill.count(ids(0)).tolist(), fill.num_blocks, fill.per_block) == ([0], 3, 5)
    for blocks, per_block in [(3, 0), (2**31, 2)]:
        with pytest.raises(InvalidArgumentError, match="device blocks per host block"):
            FillMap(blocks, per_block)
