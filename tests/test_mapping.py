"""Mappings: what is malformed, out of range or contradicts itself is refused; the rest passes unchanged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.engine.mapping import check_blocks, check_pairs, in_runs, unequal_pairs
from blockyard.errors import MappingError

ANY_PAIRS = st.lists(st.tuples(st.integers(-2, 8), st.integers(-2, 8)), max_size=8)


def pairs_of(listed: list[tuple[int, int]]) -> np.ndarray:
    return np.array(listed, np.int64).reshape(-1, 2)


def num_runs(pairs: np.ndarray) -> int:
    return len(pairs) and 1 + int((np.diff(pairs, axis=0) != 1).any(axis=1).sum())


def is_sound(listed: list[tuple[int, int]], src_blocks: int, dst_blocks: int, *, in_place: bool) -> bool:
    sources, targets = {a for a, _ in listed}, [b for _, b in listed]
    in_range = all(0 <= a < src_blocks for a in sources) and all(0 <= b < dst_blocks for b in targets)
    return in_range and len(set(targets)) == len(targets) and not (in_place and sources & set(targets))


@given(ANY_PAIRS, st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_a_mapping_passes_exactly_if_it_is_sound(listed, src_blocks, dst_blocks, in_place):
    pairs = pairs_of(listed)
    if is_sound(listed, src_blocks, dst_blocks, in_place=in_place):
        checked = check_pairs(pairs, src_blocks=src_blocks, dst_blocks=dst_blocks, in_place=in_place)
        np.testing.assert_array_equal(checked, pairs)
        assert checked.flags.c_contiguous
    else:
        with pytest.raises(MappingError):
            check_pairs(pairs, src_blocks=src_blocks, dst_blocks=dst_blocks, in_place=in_place)


@given(st.lists(st.integers(-2, 8), max_size=8), st.integers(0, 8), st.booleans())
def test_a_list_of_blocks_passes_exactly_if_it_is_sound(listed, num_blocks, unique):
    blocks = np.array(listed, np.int64)
    if all(0 <= b < num_blocks for b in listed) and not (unique and len(set(listed)) < len(listed)):
        np.testing.assert_array_equal(check_blocks(blocks, num_blocks, unique=unique), blocks)
    else:
        with pytest.raises(MappingError):
            check_blocks(blocks, num_blocks, unique=unique)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([(3, 1), (9, 2)], "entry 1: block 9 is to be read, there are 8 blocks"),
        ([(3, -1)], "entry 0: block -1 is to be written, there are 4 blocks"),
        ([(3, 1), (4, 0), (5, 1)], "block 1 is written twice, by entries 0 and 2"),
    ],
)
def test_errors_carry_the_numbers(listed, message):
    with pytest.raises(MappingError, match=message):
        check_pairs(pairs_of(listed), src_blocks=8, dst_blocks=4)


def test_reading_what_is_written_is_refused_in_place_alone():
    pairs = pairs_of([(0, 1), (1, 2)])
    check_pairs(pairs, src_blocks=4, dst_blocks=4)
    with pytest.raises(MappingError, match=r"block 1 is both read \(pair 1\) and written"):
        check_pairs(pairs, src_blocks=4, dst_blocks=4, in_place=True)


@pytest.mark.parametrize(
    "pairs",
    [
        np.zeros((2, 2), np.float64),
        np.zeros((2, 3), np.int32),
        np.zeros((2, 3), np.int64),
        np.zeros(2, np.int64),
        np.zeros((1, 2, 2), np.int64),
    ],
)
def test_other_dtypes_and_shapes_are_refused(pairs):
    with pytest.raises(MappingError, match=r"\[n, 2\]"):
        check_pairs(pairs, src_blocks=4, dst_blocks=4)
    with pytest.raises(MappingError, match=r"wanted int64 \[n\]"):
        check_blocks(pairs.reshape(-1, 1), 4)


def test_strided_mappings_become_contiguous():
    pairs = np.arange(12, dtype=np.int64).reshape(2, 6).T[::2]
    checked = check_pairs(pairs, src_blocks=12, dst_blocks=12)
    np.testing.assert_array_equal(checked, [[0, 6], [2, 8], [4, 10]])
    assert checked.flags.c_contiguous


def test_an_empty_mapping_is_allowed_even_of_no_blocks():
    assert len(in_runs(check_pairs(pairs_of([]), src_blocks=0, dst_blocks=0, in_place=True))) == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), st.integers(1, 7), st.data())
def test_a_stretch_of_host_blocks_is_loaded_from_its_first_part_to_its_last(large, per_block, data):
    whole = [block * per_block + offset for block in large for offset in range(per_block)]
    first = data.draw(st.integers(0, per_block - 1))
    last = data.draw(st.integers(first + 1 if len(large) == 1 else 1, per_block))
    parts = whole[first : len(whole) - per_block + last]
    small = np.arange(len(parts), dtype=np.int64)[::-1].copy()
    options = {"per_block": per_block, "first": first, "last": last}
    loads = unequal_pairs(small, np.array(large), to="small", **options)
    assert loads.tolist() == [list(pair) for pair in zip(parts, small.tolist(), strict=True)]
    np.testing.assert_array_equal(unequal_pairs(small, np.array(large), to="large", **options), loads[:, ::-1])
    for wrong in (small[:-1], np.append(small, 99)):
        with pytest.raises(MappingError, match=f"hold {len(parts)} small blocks, {len(wrong)} are named"):
            unequal_pairs(wrong, np.array(large), to="small", **options)


def test_a_load_that_ends_within_a_host_block_takes_its_head_not_its_tail():
    # Device blocks 5 and 6 hold parts 28 and 29, the first half of host block 7.
    pairs = unequal_pairs(np.array([5, 6]), np.array([7]), per_block=4, first=0, last=2, to="small")
    assert pairs.tolist() == [[28, 5], [29, 6]]
    with pytest.raises(MappingError, match="from offset 3 of the first to 2 of the last of 1 blocks of 4"):
        unequal_pairs(np.array([5, 6]), np.array([7]), per_block=4, first=3, last=2, to="small")
    with pytest.raises(MappingError, match=r"wanted int64 \[2, 2\]"):
        unequal_pairs(np.array([5, 6]), np.array([7]), per_block=4, first=0, last=2, to="small", out=np.zeros((2, 3)))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20, unique_by=lambda pair: pair[1]))
def test_no_order_of_pairs_has_fewer_runs_than_that_of_their_destinations(listed):
    pairs = np.array(listed, np.int64).reshape(-1, 2)
    ordered = in_runs(pairs)
    assert sorted(ordered.tolist()) == sorted(pairs.tolist())
    # A run goes on where both neighbours do: whatever the order, no run has more ends than these.
    begins = [pair for pair in listed if (pair[0] - 1, pair[1] - 1) not in listed]
    assert num_runs(ordered) == len(begins)
    assert in_runs(ordered) is ordered
