"""Mappings: what is malformed, out of range or contradicts itself is refused; the rest passes, in runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard._core import Mapping
from blockyard.engine.mapping import unequal_pairs, with_rows
from blockyard.errors import InvalidArgumentError, MappingError

ANY_PAIRS = st.lists(st.tuples(st.integers(-2, 8), st.integers(-2, 8)), max_size=8)


def pairs_of(listed: list[tuple[int, int]]) -> np.ndarray:
    return np.array(listed, np.int64).reshape(-1, 2)


def num_runs(pairs: np.ndarray) -> int:
    return len(pairs) and 1 + int((np.diff(pairs, axis=0) != 1).any(axis=1).sum())


RULES = ["swap", "copy", "move", "exchange"]


def is_sound(listed: list[tuple[int, int]], src_blocks: int, dst_blocks: int, rule: str) -> bool:
    kept = [pair for pair in listed if rule != "exchange" or pair != (-1, -1)]
    sources, targets = {a for a, _ in kept}, [b for _, b in kept]
    in_range = all(0 <= a < src_blocks for a in sources) and all(0 <= b < dst_blocks for b in targets)
    named = [*targets, *(a for a, _ in kept)] if rule == "exchange" else targets
    return in_range and len(set(named)) == len(named) and not (rule == "copy" and sources & set(targets))


def mapping(pairs: object, src_blocks: int = 8, dst_blocks: int = 4, rule: str = "swap") -> Mapping:
    return Mapping(pairs, src_blocks=src_blocks, dst_blocks=dst_blocks, rule=rule)


@given(ANY_PAIRS, st.integers(0, 8), st.integers(0, 8), st.sampled_from(RULES))
def test_a_mapping_passes_exactly_if_it_is_sound(listed, src_blocks, dst_blocks, rule):
    pairs = pairs_of(listed)
    if is_sound(listed, src_blocks, dst_blocks, rule):
        made = mapping(pairs, src_blocks, dst_blocks, rule)
        wanted = [p for p in listed if not (rule == "move" and p[0] == p[1]) and p != (-1, -1)]
        in_order = wanted if rule == "exchange" else sorted(wanted, key=lambda pair: pair[1])
        assert made.pairs.tolist() == [list(pair) for pair in in_order]
        assert (len(made), made.rule) == (len(wanted), rule)
    else:
        with pytest.raises(MappingError):
            mapping(pairs, src_blocks, dst_blocks, rule)


@given(ANY_PAIRS, st.sampled_from(RULES[1:]))
def test_steps_have_the_effect_of_reading_all_blocks_first(listed, rule):
    if not is_sound(listed, 8, 8, rule):
        return
    steps, starts = mapping(pairs_of(listed), 8, 8, rule).steps()
    assert (starts[0], starts[-1]) == (0, len(steps))
    blocks, aside = list(range(9)), 8
    for a, b in steps.tolist():
        blocks[b if b >= 0 else aside] = blocks[a if a >= 0 else aside]
    wanted = list(range(8))
    for a, b in listed:
        if a >= 0:
            wanted[b] = a
            if rule == "exchange":
                wanted[a] = b
    assert blocks[:8] == wanted


@given(st.lists(st.integers(-2, 8), max_size=8), st.integers(0, 8), st.booleans())
def test_a_list_of_blocks_passes_exactly_if_it_is_sound(listed, num_blocks, written):
    blocks = np.array(listed, np.int64)
    if all(0 <= b < num_blocks for b in listed) and not (written and len(set(listed)) < len(listed)):
        pairs = with_rows(blocks, num_blocks, written=written).pairs[:, :: -1 if written else 1]
        assert sorted(pairs.tolist()) == sorted([block, row] for row, block in enumerate(listed))
    else:
        with pytest.raises(MappingError):
            with_rows(blocks, num_blocks, written=written)


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
        mapping(pairs)
    with pytest.raises(MappingError, match=r"must be ints \[n\]"):
        with_rows(pairs.reshape(-1, 1), 4, written=False)


def test_an_empty_mapping_is_allowed_even_of_no_blocks():
    for rule in RULES:
        assert (len(made := mapping([], 0, 0, rule)), made.reach) == (0, (0, 0))


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
        with pytest.raises(MappingError, match=f"hold {len(parts)} small blocks, {len(wrong)} are given"):
            unequal_pairs(wrong, np.array(large), to="small", **options)


def test_a_load_that_ends_within_a_host_block_takes_its_head_not_its_tail():
    # Device blocks 5 and 6 hold parts 28 and 29, the first half of host block 7.
    pairs = unequal_pairs(np.array([5, 6]), np.array([7]), per_block=4, first=0, last=2, to="small")
    assert pairs.tolist() == [[28, 5], [29, 6]]
    with pytest.raises(MappingError, match="from offset 3 of the first to 2 of the last of 1 blocks of 4"):
        unequal_pairs(np.array([5, 6]), np.array([7]), per_block=4, first=3, last=2, to="small")


def test_ids_of_an_offload_manager_are_taken_and_what_are_no_ids_is_refused():
    options = {"per_block": 2, "first": 0, "last": 2, "to": "large"}
    chunks = np.array([3], np.int32)
    assert unequal_pairs(np.array([5, 6], np.int32), chunks, **options).tolist() == [[5, 6], [6, 7]]
    for wrong, words in ((np.array([5.5, 6.0]), r"float64 \[2\]"), (np.array([[5, 6]]), r"int64 \[1, 2\]")):
        with pytest.raises(MappingError, match=f"small is {words}, must be int32 or int64"):
            unequal_pairs(wrong, chunks, **options)
        with pytest.raises(MappingError, match=f"large is {words}, must be int32 or int64"):
            unequal_pairs(np.array([5, 6]), wrong, **options)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20, unique_by=lambda pair: pair[1]))
def test_no_order_of_pairs_has_fewer_runs_than_that_of_their_destinations(listed):
    pairs = np.array(listed, np.int64).reshape(-1, 2)
    ordered = mapping(pairs, 31, 31).pairs
    assert sorted(ordered.tolist()) == sorted(pairs.tolist())
    # A run goes on where both neighbours do: whatever the order, no run has more ends than these.
    begins = [pair for pair in listed if (pair[0] - 1, pair[1] - 1) not in listed]
    assert num_runs(ordered) == len(begins)


@given(st.permutations(range(12)), st.integers(1, 15))
def test_parts_follow_one_another(targets, most):
    whole = mapping(np.column_stack((np.arange(12), targets)), 12, 12)
    parts = whole.split(most)
    assert max(len(part) for part in parts) <= most
    assert np.concatenate([part.pairs for part in parts]).tolist() == whole.pairs.tolist()
    assert [part.reach for part in parts] == [tuple((part.pairs.max(axis=0) + 1).tolist()) for part in parts]


def test_a_side_that_is_neither_is_refused_since_the_transfer_would_write_other_blocks():
    for word in ("host", "Large", "", None, 1):
        with pytest.raises(InvalidArgumentError, match="must be 'small' or 'large'"):
            unequal_pairs(np.array([5, 6]), np.array([7]), per_block=4, first=0, last=2, to=word)
