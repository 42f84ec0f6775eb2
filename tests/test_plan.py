"""Mappings: what is malformed, out of range or contradicts itself is refused; the rest passes unchanged."""

import ctypes
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError
from blockyard.layout.kv import KVLayout
from blockyard.plan import (
    CopyRoute,
    Pieces,
    check_blocks,
    check_pairs,
    compile_pairs,
    in_runs,
    join,
    merge_runs,
    phases,
    route,
    unequal_pairs,
)

LAYOUT = KVLayout(kind="kv_first", num_layers=2, block_size=4, num_kv_heads=3, head_size=8, dtype="float16")
ANY_PAIRS = st.lists(st.tuples(st.integers(-2, 8), st.integers(-2, 8)), max_size=8)


def pairs_of(listed: list[tuple[int, int]]) -> np.ndarray:
    return np.array(listed, np.int64).reshape(-1, 2)


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


def test_a_plan_counts_its_bytes():
    plan = join(pairs_of([(0, 1), (2, 0)]), LAYOUT, src_blocks=3, dst_blocks=2)
    assert (len(plan), plan.num_bytes) == (2, 2 * LAYOUT.bytes_per_block)


def test_an_empty_mapping_is_an_empty_plan():
    plan = join(pairs_of([]), LAYOUT, src_blocks=0, dst_blocks=0, in_place=True)
    assert (len(plan), plan.num_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_runs_expand_to_the_pairs(listed):
    runs = merge_runs(pairs_of(listed)).tolist()
    assert [(a + i, b + i) for a, b, length in runs for i in range(length)] == listed
    assert not any(a + n == c and b + n == d for (a, b, n), (c, d, _) in pairwise(runs))


def carry_out(pieces: Pieces) -> None:
    for source, target, size in zip(*(column.tolist() for column in pieces[:3]), strict=True):
        ctypes.memmove(target, source, size)


def end(draw, blocks: int, widths: list[int], per_row: int) -> list[torch.Tensor]:
    """Random views of blocks: side by side or one after another, padded or not."""
    rows, pad, interleaved = -(-blocks // per_row), draw(st.integers(0, 3)), draw(st.booleans())
    memory = torch.randint(0, 256, (rows, per_row * sum(widths) + pad), dtype=torch.uint8)
    views, first = [], 0
    for width in widths:
        stride, step = (sum(widths), width) if interleaved else (width, width * per_row)
        view = memory[:, first:].as_strided(
            (rows, per_row, width), (memory.stride(0), stride, 1), memory.storage_offset() + first
        )
        views.append(view if per_row > 1 or draw(st.booleans()) else view[:, 0])
        first += step
    if len({view.dim() for view in views}) > 1:
        views = [view if view.dim() == 2 else view[:, 0] for view in views]
    return views


@st.composite
def transfers(draw):
    """Two ends of views of 1 to 4 tensors, and a mapping between their blocks."""
    widths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    blocks, per_row = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    src, dst = end(draw, blocks, widths, 1), end(draw, blocks, widths, per_row)
    if draw(st.booleans()):
        src, dst = dst, src
    targets = draw(st.permutations(range(blocks)))[: draw(st.integers(0, blocks))]
    sources = draw(st.lists(st.integers(0, blocks - 1), min_size=len(targets), max_size=len(targets)))
    if draw(st.booleans()):
        sources, targets = sorted(sources), sorted(targets)
    return src, dst, pairs_of(list(zip(sources, targets, strict=True)))


@given(transfers(), st.booleans())
def test_the_pieces_of_a_plan_copy_whole_destinations_right(transfer, by_tensor):
    src, dst, pairs = transfer
    wanted = [view.clone().reshape(-1, view.shape[-1]) for view in dst]
    for view, source in zip(wanted, src, strict=True):
        view[pairs[:, 1]] = source.reshape(-1, source.shape[-1])[pairs[:, 0]]
    memory = torch.empty(0, dtype=torch.uint8).set_(dst[0].untyped_storage())
    padding = memory.clone()
    parts = list(range(len(src))) if by_tensor else None
    joined = route(src, dst, parts=parts)
    assert joined.num_parts == (len(src) if by_tensor else 1)
    pieces = compile_pairs(joined, pairs)
    carry_out(pieces)
    for view, right in zip(dst, wanted, strict=True):
        assert torch.equal(view.reshape(-1, view.shape[-1]), right)
        view.zero_()
    # What no view shows has not changed: with the views zeroed on both sides, all memory is equal.
    offset = memory.data_ptr()
    for view in dst:
        padding.as_strided(view.shape, view.stride(), view.data_ptr() - offset).zero_()
    assert torch.equal(memory, padding)
    assert int(pieces.num_bytes.sum()) == len(pairs) * sum(view.shape[-1] for view in src)
    assert (pieces.starts[0], pieces.starts[-1], len(pieces.starts)) == (0, len(pieces.src), joined.num_parts + 1)


def test_blocks_that_run_on_become_one_piece():
    src, dst = torch.zeros(8, 6, dtype=torch.uint8), torch.zeros(9, 6, dtype=torch.uint8)
    halves = route([src[:, :2], src[:, 2:]], [dst[:, :2], dst[:, 2:]])
    pieces = compile_pairs(halves, pairs_of([(1, 4), (2, 5), (3, 6), (7, 0)]))
    assert pieces.num_bytes.tolist() == [18, 6]
    assert (pieces.src - np.uint64(src.data_ptr())).tolist() == [6, 42]


def test_a_plan_fills_the_array_it_is_given_or_writes_nothing():
    view = torch.zeros(8, 6, dtype=torch.uint8)
    joined = route([view[:4]], [view[4:]])
    out = np.full((3, 2), 7, np.uint64)
    pieces = compile_pairs(joined, pairs_of([(1, 3)]), out=out)
    assert np.shares_memory(pieces.src, out)
    assert out[2].tolist() == [6, 7]
    for pairs, message in [
        ([(0, 0), (1, 2), (3, 1)], "the plan has 3 pieces, the arrays hold 2"),
        ([(0, 4)], "pair 0 copies block 0 of 4 to block 4 of 4"),
        ([(0, 1), (2, 1)], "block 1 is written twice"),
    ]:
        with pytest.raises(MappingError, match=message):
            compile_pairs(joined, pairs_of(pairs), out=out)
    assert out[2].tolist() == [6, 7]
    with pytest.raises(MappingError, match=r"block 1 is both read \(pair 1\)"):
        compile_pairs(route([view], [view], in_place=True), pairs_of([(0, 1), (1, 2)]))


def test_views_that_do_not_fit_one_another_make_no_route():
    view = torch.zeros(8, 6, dtype=torch.uint8)
    for src, dst, message in [
        ([], [], "0 views to read"),
        ([view], [view, view], "1 views to read, 2 to write"),
        ([view], [view[:, :3]], r"src\[0\] has blocks of 6 bytes, dst\[0\] of 3"),
        ([view, view[:4]], [view, view], r"src\[1\] is torch.uint8 \[4, 6\]"),
        ([view.float()], [view], r"src\[0\] is torch.float32"),
        ([view.t()], [view.t()], "contiguous bytes"),
    ]:
        with pytest.raises(LayoutError, match=message):
            route(src, dst)
    with pytest.raises(LayoutError, match="2 parts"):
        route([view], [view], parts=[0, 1])
    with pytest.raises(InvalidArgumentError, match="part is 1"):
        route([view], [view], parts=[1])
    with pytest.raises(InvalidArgumentError, match="bytes of a block is 6"):
        route([view], [view[:1].expand(8, 6)])


def test_regions_of_another_shape_are_refused():
    for regions in [np.zeros((1, 7), np.uint64), np.zeros((1, 8), np.int64), np.zeros(8, np.uint64)]:
        with pytest.raises(InvalidArgumentError, match=r"uint64 \[n, 8\]"):
            CopyRoute(regions, src_blocks=1, dst_blocks=1)


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


def test_phases_wait_only_for_those_that_touch_their_blocks():
    def moved(src: str, dst: str, *listed: tuple[int, int]) -> Pairs:
        return Pairs(src, dst, pairs_of(list(listed)))

    transfers = [
        ("swap_out", moved("device", "host", (1, 1))),
        ("swap_in", moved("host", "device", (5, 9))),
        ("copy", moved("device", "device", (9, 3))),
        ("move", moved("device", "device", (6, 5), (7, 6), (8, 1))),
        ("exchange", moved("device", "device", (6, 2))),
    ]
    found = phases(StepDecision(1, transfers))
    assert [(phase.kind, phase.after) for phase in found] == [
        ("swap_out", ()),
        ("swap_in", ()),
        ("copy", (1,)),
        ("move", (0,)),
        ("move", (0, 3)),
        ("exchange", (3, 4)),
    ]
    assert [phase.pairs.tolist() for phase in found[3:5]] == [[[6, 5], [8, 1]], [[7, 6]]]
    with pytest.raises(MappingError, match="in a circle"):
        phases(StepDecision(1, [("move", moved("device", "device", (1, 2), (2, 1)))]))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20, unique_by=lambda pair: pair[1]))
def test_no_order_of_pairs_has_fewer_runs_than_that_of_their_destinations(listed):
    pairs = np.array(listed, np.int64).reshape(-1, 2)
    ordered = in_runs(pairs)
    assert sorted(ordered.tolist()) == sorted(pairs.tolist())
    # A run goes on where both neighbours do: whatever the order, no run has more ends than these.
    begins = [pair for pair in listed if (pair[0] - 1, pair[1] - 1) not in listed]
    assert len(merge_runs(ordered)) == len(begins)
    assert in_runs(ordered) is ordered
