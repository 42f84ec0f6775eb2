"""The op library chooses a copy strategy and makes batches, over a stand-in for a device."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stand_in import build_stand_in

from blockyard._core import Mapping
from blockyard.engine.ops.strategy import ALLOWED, STRATEGIES
from blockyard.layout.kv import KVLayout
from blockyard_build.toolchain import MissingError

BLOCKS, WIDTH = 40, 64
TO_DEVICE, TO_HOST, WITHIN = range(3)
DIRECTIONS = {"h2d": TO_DEVICE, "d2h": TO_HOST, "d2d": WITHIN}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        return build_stand_in(tmp_path_factory.mktemp("fake"))
    except MissingError as missing:
        pytest.skip(f"no {missing}")


class Case:
    """A memory of the host and one that stands for the device's, with the first blocks of the host page-locked."""

    def __init__(self, fake: ctypes.CDLL, *, width: int = WIDTH, pinned: int = BLOCKS, **options: bool) -> None:
        random = np.random.default_rng(width)
        host, device, other = (torch.from_numpy(random.integers(0, 256, BLOCKS * width + 64, np.uint8)) for _ in "hdo")
        self.host, self.device, self.other = (rows_of(memory, width) for memory in (host, device, other))
        start = self.host.data_ptr()
        chosen = {"own_stream": True, "capturing": False, "mapped": True, "has_bulk": True, **options}
        fake.fake_reset(start, start + BLOCKS * width, start + pinned * width, *chosen.values())
        self.fake = fake

    def go(
        self,
        direction: str,
        strategy: str,
        pairs: np.ndarray,
        cut: Callable[[torch.Tensor], list[torch.Tensor]] = lambda rows: [rows],
        cut_device: Callable[[torch.Tensor], list[torch.Tensor]] | None = None,
        blocks: int = 12,
    ) -> str:
        """Copy, and compare the whole destination; gives the calls that were made."""
        self.fake.fake_strategy(DIRECTIONS[direction], STRATEGIES.get(strategy, 0), blocks)
        src = self.host if direction == "h2d" else self.device
        dst = {"h2d": self.device, "d2h": self.host, "d2d": self.other}[direction]
        wanted = dst.clone()
        sides = direction != "h2d", direction != "d2h"
        cut_src, cut_dst = ((cut_device or cut) if on_device else cut for on_device in sides)
        for source, target in zip(cut_src(src), cut_dst(wanted), strict=True):
            target[pairs[:, 1]] = source[pairs[:, 0]]
        torch.ops.blockyard_fake.swap(cut_src(src), cut_dst(dst), torch.from_numpy(pairs), *sides)
        assert torch.equal(dst, wanted)
        assert self.fake.fake_faults() == 0
        return str(self.fake.fake_calls(), "ascii")


def rows_of(memory: torch.Tensor, width: int) -> torch.Tensor:
    start = -memory.data_ptr() % 64
    return memory[start : start + BLOCKS * width].view(BLOCKS, width)


def scattered(count: int = 20, below: int = BLOCKS) -> np.ndarray:
    random = np.random.default_rng(count)
    return np.column_stack((random.permutation(below)[:count], random.permutation(below)[:count]))


CALLS = {"batch": "B", "loop": "m" * 20, "kernel": "F", "bulk": "U"}


@pytest.mark.parametrize("strategy", CALLS)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copies_use_the_strategy_of_the_table(fake: ctypes.CDLL, direction: str, strategy: str):
    assert Case(fake).go(direction, strategy, scattered()) == CALLS[strategy]


@pytest.mark.parametrize(("strategy", "calls"), [("kernel", "K"), ("bulk", "U")])
def test_copies_within_the_device_use_the_strategy_of_the_table(fake: ctypes.CDLL, strategy: str, calls: str):
    assert Case(fake).go("d2d", strategy, scattered()) == calls


@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
@pytest.mark.parametrize("kind", ["rocm", "flat"])
def test_blocks_of_engines_layouts_are_copied_whole(fake: ctypes.CDLL, direction: str, kind: str):
    layout = KVLayout(kind, num_layers=2, block_size=4, num_kv_heads=2, head_size=16, dtype="float16")

    def cut(rows: torch.Tensor) -> list[torch.Tensor]:
        parts = rows.flatten().view(torch.float16).chunk(layout.num_tensors)
        shapes = [shape for shape, _ in layout.tensor_shapes(BLOCKS)]
        return layout.views([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    Case(fake, width=layout.bytes_per_block).go(direction, "kernel", scattered(), cut)


def test_without_a_bulk_engine_it_is_the_kernel(fake: ctypes.CDLL):
    for direction, calls in (("h2d", "F"), ("d2h", "F"), ("d2d", "K")):
        assert Case(fake, has_bulk=False).go(direction, "bulk", scattered()) == calls


@pytest.mark.parametrize("strategy", ["kernel", "bulk"])
def test_rows_that_are_not_aligned_go_by_batch_or_kernel(fake: ctypes.CDLL, strategy: str):
    def inner(rows: torch.Tensor) -> list[torch.Tensor]:
        return [rows[:, 8:40]]

    assert Case(fake).go("h2d", strategy, scattered(), inner) == "B"
    assert Case(fake).go("d2d", strategy, scattered(), inner) == "K"
    assert Case(fake, width=24).go("d2h", strategy, scattered()) == "B"


@pytest.mark.parametrize("strategy", CALLS)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_memory_that_is_not_page_locked_goes_by_single_copies(fake: ctypes.CDLL, direction: str, strategy: str):
    assert Case(fake, pinned=0).go(direction, strategy, scattered()) == "m" * 20
    # All but the last block that is named.
    case = Case(fake, pinned=BLOCKS - 1)
    assert case.go(direction, strategy, np.array([[3, 5], [BLOCKS - 1, BLOCKS - 1]])) == "mm"


@pytest.mark.parametrize("strategy", CALLS)
def test_blocks_of_a_half_ready_pool_are_copied_by_every_strategy(fake: ctypes.CDLL, strategy: str):
    assert Case(fake, pinned=25).go("h2d", strategy, scattered(below=25)) == CALLS[strategy]


@pytest.mark.parametrize("strategy", ["kernel", "bulk"])
def test_memory_with_another_address_on_the_device_goes_by_batch(fake: ctypes.CDLL, strategy: str):
    assert Case(fake, mapped=False).go("h2d", strategy, scattered()) == "B"


def test_a_batch_for_the_default_stream_is_tied_to_it_on_both_sides(fake: ctypes.CDLL):
    assert Case(fake, own_stream=False).go("h2d", "batch", scattered()) == "r0w1Br1w0"


@pytest.mark.parametrize(("strategy", "calls"), [*CALLS.items()])
def test_a_graph_takes_every_strategy_but_single_copies_for_a_batch(fake: ctypes.CDLL, strategy: str, calls: str):
    expected = "m" * 20 if strategy == "batch" else calls
    assert Case(fake, capturing=True).go("h2d", strategy, scattered()) == expected


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_graph_does_not_take_pageable_memory(fake: ctypes.CDLL, direction: str):
    case = Case(fake, capturing=True, pinned=0)
    name = "src" if direction == "h2d" else "dst"
    with pytest.raises(RuntimeError, match=f"blockyard capture: {name} is not page-locked"):
        case.go(direction, "batch", scattered())
    assert fake.fake_calls() == b""


# 16 views of 8 KiB, contiguous in a row of the host and apart on the device.
VIEWS, STAGED_WIDTH = 16, 128 << 10


def of_rows(rows: torch.Tensor) -> list[torch.Tensor]:
    return list(rows.split(rows.shape[1] // VIEWS, dim=1))


def of_views(rows: torch.Tensor) -> list[torch.Tensor]:
    return list(rows.view(VIEWS, BLOCKS, -1))


def staged(case: Case, direction: str, strategy: str = "staged", pairs: np.ndarray | None = None) -> str:
    return case.go(direction, strategy, scattered() if pairs is None else pairs, of_rows, of_views)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_rows_of_the_host_are_staged_in_a_few_large_copies(fake: ctypes.CDLL, direction: str):
    calls = staged(Case(fake, width=STAGED_WIDTH), direction)
    # All 20 rows fit one slot: one batch of rows and one kernel, for 320 pieces.
    assert calls.replace("A", "").translate(str.maketrans("", "", "rw01")) == ("BF" if direction == "h2d" else "FB")
    neighbours = np.column_stack((np.arange(20), np.arange(20) + 3))
    assert staged(Case(fake, width=STAGED_WIDTH), direction, pairs=neighbours).count("m") == 1
    # 40 rows of 1.25 MiB, six to a slot: more parts than slots.
    assert staged(Case(fake, width=10 * STAGED_WIDTH), direction, pairs=scattered(40)).count("F") == 7


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_without_a_table_small_pieces_are_staged_and_others_batched(fake: ctypes.CDLL, direction: str):
    assert "F" in staged(Case(fake, width=STAGED_WIDTH), direction, "default")
    assert Case(fake, width=STAGED_WIDTH).go(direction, "default", scattered(), of_views) == "F"
    few = scattered(2)
    assert staged(Case(fake, width=STAGED_WIDTH), direction, "default", few[:1]) == "B"
    assert staged(Case(fake, width=4 * STAGED_WIDTH), direction, "default") == "B"


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_graph_takes_the_kernel_for_a_staged_copy(fake: ctypes.CDLL, direction: str):
    # It would keep slots that other copies use.
    assert staged(Case(fake, width=STAGED_WIDTH, capturing=True), direction) == "F"
    assert staged(Case(fake, width=STAGED_WIDTH, capturing=True, mapped=False), direction) == "m" * 20 * VIEWS


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_host_memory_that_kernels_do_not_reach_is_staged(fake: ctypes.CDLL, direction: str):
    assert "F" in staged(Case(fake, width=STAGED_WIDTH, mapped=False), direction)
    assert staged(Case(fake, width=STAGED_WIDTH, pinned=0), direction) == "m" * 20 * VIEWS
    assert "F" in staged(Case(fake, width=STAGED_WIDTH, own_stream=False), direction)


def test_pieces_that_are_apart_on_the_host_are_not_staged(fake: ctypes.CDLL):
    def turned(rows: torch.Tensor) -> list[torch.Tensor]:
        return of_rows(rows)[::-1]

    case = Case(fake, width=STAGED_WIDTH)
    assert case.go("h2d", "staged", scattered(), turned, lambda rows: of_views(rows)[::-1]) == "F"
    assert Case(fake, width=32 << 10).go("h2d", "staged", scattered(), of_rows, of_views) == "F"


@pytest.mark.parametrize(("strategy", "blocks"), [("kernel", 2), ("bulk", 3), ("staged", 4)])
def test_kernels_take_as_many_blocks_of_threads_as_the_table_says(fake: ctypes.CDLL, strategy: str, blocks: int):
    Case(fake, width=STAGED_WIDTH).go("h2d", strategy, scattered(), of_rows, of_views, blocks)
    assert fake.fake_blocks() == blocks


def test_neighbours_become_one_piece(fake: ctypes.CDLL):
    runs = np.column_stack((np.r_[4:9, 20:30], np.r_[0:5, 12:22]))
    assert Case(fake).go("h2d", "loop", runs) == "mm"
    halves = Case(fake).go("h2d", "loop", runs, lambda rows: [rows[:, :32], rows[:, 32:]])
    # Two views side by side on both sides are one.
    assert halves == "mm"
    assert Case(fake).go("h2d", "loop", runs, lambda rows: [rows[:, 32:], rows[:, :32]]) == "m" * 30


def test_no_pairs_and_no_bytes_make_no_call(fake: ctypes.CDLL):
    none = np.zeros((0, 2), np.int64)
    assert Case(fake).go("h2d", "bulk", none) == Case(fake).go("d2d", "bulk", none) == ""
    assert Case(fake).go("h2d", "batch", scattered(), lambda rows: [rows[:, :0]]) == ""


@pytest.mark.parametrize(
    ("pairs", "calls"), [([[3, 0], [4, 1]], "U"), ([[0, 1], [1, 2]], "K"), ([[0, 1], [1, 0]], "K"), ([[2, 2]], "")]
)
def test_moves_that_depend_on_one_another_go_by_kernel(fake: ctypes.CDLL, pairs: list[list[int]], calls: str):
    case = Case(fake)
    fake.fake_strategy(WITHIN, STRATEGIES["bulk"], 12)
    wanted, ids = case.device.clone(), torch.tensor(pairs)
    wanted[ids[:, 1]] = wanted[ids[:, 0]]
    mapping = Mapping(pairs, src_blocks=BLOCKS, dst_blocks=BLOCKS, rule="move")
    torch.ops.blockyard_fake.move([case.device], *map(torch.from_numpy, mapping.steps()))
    assert torch.equal(case.device, wanted)
    assert (fake.fake_calls().decode(), fake.fake_faults()) == (calls, 0)


def test_the_benchmarks_loop_makes_one_call_a_piece(fake: ctypes.CDLL):
    case, pairs = Case(fake), np.column_stack((np.arange(10), np.arange(10)))
    halves = [[rows[:, :32], rows[:, 32:]] for rows in (case.host, case.device)]
    torch.ops.blockyard_fake.loop(*halves, torch.from_numpy(pairs))
    assert torch.equal(case.device[:10], case.host[:10])
    assert fake.fake_calls() == b"m" * 20


@given(
    st.sampled_from([(d, strategy) for d, strategies in ALLOWED.items() for strategy in strategies]),
    st.integers(0, BLOCKS),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.integers(0, 30),
    st.sampled_from([8, 16, 48, 64, 1 << 16]),
    st.integers(0, 99),
)
def test_whatever_the_way_and_the_memory_all_bytes_arrive_and_no_kernel_goes_astray(
    fake: ctypes.CDLL, going: tuple[str, str], pinned: int, flags: list[bool], count: int, width: int, seed: int
):
    own_stream, mapped, has_bulk = flags
    case = Case(fake, width=width, pinned=pinned, own_stream=own_stream, mapped=mapped, has_bulk=has_bulk)
    random = np.random.default_rng(seed)
    pairs = np.column_stack((random.integers(0, BLOCKS, count), random.permutation(BLOCKS)[:count]))
    case.go(*going, pairs, lambda rows: [rows[:, :8], rows[:, 8:]] if seed % 2 else [rows])
