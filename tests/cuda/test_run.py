"""The op library chooses a copy strategy and makes batches, over a stand-in for a device."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stand_in import BLOCKS, DIRECTIONS, WIDTH, Case, scattered

from blockyard._core import Mapping
from blockyard.engine.ops.strategy import STRATEGIES, default_thread_blocks
from blockyard.layout.kv import KVLayout

CALLS = {"batch": "B", "loop": "m" * 20, "kernel": "F"}


@pytest.mark.parametrize("strategy", CALLS)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copies_use_the_strategy_of_the_table(fake: ctypes.CDLL, direction: str, strategy: str):
    assert Case(fake).go(direction, strategy, scattered()) == CALLS[strategy]


def test_copies_within_the_device_take_one_kernel(fake: ctypes.CDLL):
    assert Case(fake).go("d2d", "", scattered()) == "K"


@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
@pytest.mark.parametrize("kind", ["rocm", "flat"])
def test_blocks_of_engines_layouts_are_copied_whole(fake: ctypes.CDLL, direction: str, kind: str):
    layout = KVLayout(kind, num_layers=2, block_size=4, num_kv_heads=2, head_size=16, dtype="float16")

    def cut(rows: torch.Tensor) -> list[torch.Tensor]:
        parts = rows.flatten().view(torch.float16).chunk(layout.num_tensors)
        shapes = [shape for shape, _ in layout.tensor_shapes(BLOCKS)]
        return layout.views([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    Case(fake, width=layout.bytes_per_block).go(direction, "kernel", scattered(), cut)


def test_rows_that_are_not_aligned_go_by_batch_or_within_the_device_by_kernel(fake: ctypes.CDLL):
    def inner(rows: torch.Tensor) -> list[torch.Tensor]:
        return [rows[:, 8:40]]

    assert Case(fake).go("h2d", "kernel", scattered(), inner) == "B"
    assert Case(fake).go("d2d", "", scattered(), inner) == "K"
    assert Case(fake, width=24).go("d2h", "kernel", scattered()) == "B"


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


SHIFT = 1 << 44


def test_a_kernel_uses_the_devices_address_of_registered_memory(fake: ctypes.CDLL):
    assert Case(fake, shift=SHIFT).go("h2d", "kernel", scattered()) == "F"
    assert Case(fake, shift=SHIFT).go("d2h", "kernel", scattered(), lambda rows: [rows[:, 32:], rows[:, :32]]) == "F"


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_memory_with_another_address_on_the_device_goes_by_no_batch(fake: ctypes.CDLL, direction: str):
    assert Case(fake, shift=SHIFT).go(direction, "batch", scattered()) == "m" * 20


@pytest.mark.parametrize("strategy", CALLS)
def test_neighbours_with_unrelated_addresses_on_the_device_go_by_single_copies(fake: ctypes.CDLL, strategy: str):
    # What is 64 bytes further on the host is elsewhere on the device: no kernel can go from one to the other.
    ranges = [(0, 20 * WIDTH), (20 * WIDTH, BLOCKS * WIDTH)]
    assert Case(fake, registered=ranges, shift=SHIFT).go("h2d", strategy, scattered()) == "m" * 20
    within_one = scattered(below=20)
    calls = "m" * 20 if strategy in {"batch", "loop"} else CALLS[strategy]
    assert Case(fake, registered=ranges, shift=SHIFT).go("h2d", strategy, within_one) == calls


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


def unreached(fake: ctypes.CDLL, **flags: bool) -> Case:
    """Neighbours on the host that are strangers on the device: no kernel reaches both."""
    size = BLOCKS * STAGED_WIDTH
    return Case(fake, width=STAGED_WIDTH, registered=[(0, size // 2), (size // 2, size)], shift=SHIFT, **flags)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_rows_of_the_host_are_staged_in_a_few_large_copies(fake: ctypes.CDLL, direction: str):
    calls = staged(Case(fake, width=STAGED_WIDTH), direction, pairs=scattered(16))
    # All 16 rows are one part: one batch of rows and one kernel, for 256 pieces.
    assert calls.replace("A", "").translate(str.maketrans("", "", "rw01")) == ("BF" if direction == "h2d" else "FB")
    neighbours = np.column_stack((np.arange(16), np.arange(16) + 3))
    assert staged(Case(fake, width=STAGED_WIDTH), direction, pairs=neighbours).count("m") == 1
    # Parts of 1, 3, 6, 12, 9, 4, 2, 1, 1 and 1 rows of 1.25 MiB: they grow to half of what is left, and shrink.
    assert staged(Case(fake, width=10 * STAGED_WIDTH), direction, pairs=scattered(40)).count("F") == 10


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_without_a_table_pieces_below_half_a_mib_are_staged_and_others_batched(fake: ctypes.CDLL, direction: str):
    assert "F" in staged(Case(fake, width=STAGED_WIDTH), direction, "default")
    assert Case(fake, width=STAGED_WIDTH).go(direction, "default", scattered(), of_views) == "F"
    few = scattered(2)
    assert staged(Case(fake, width=STAGED_WIDTH), direction, "default", few[:1]) == "B"

    def halves(rows: torch.Tensor) -> list[torch.Tensor]:
        return list(rows.split(rows.shape[1] // 2, dim=1))

    for width, letter in ((1 << 20, "B"), ((1 << 20) - 32, "F")):
        case = Case(fake, width=width)
        assert letter in case.go(direction, "default", scattered(), halves, lambda rows: list(rows.view(2, BLOCKS, -1)))
        assert (letter == "F") == ("F" in fake.fake_calls().decode())
    # A row of one piece is a large copy already.
    assert Case(fake, width=STAGED_WIDTH).go(direction, "default", scattered(32)) == "B"


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_graph_takes_the_kernel_for_a_staged_copy(fake: ctypes.CDLL, direction: str):
    # It would keep slots that other copies use.
    assert staged(Case(fake, width=STAGED_WIDTH, capturing=True), direction) == "F"
    assert staged(unreached(fake, capturing=True), direction) == "m" * 20 * VIEWS


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_host_memory_that_kernels_do_not_reach_is_staged(fake: ctypes.CDLL, direction: str):
    assert "F" in staged(unreached(fake), direction)
    assert "B" not in fake.fake_calls().decode()
    assert staged(Case(fake, width=STAGED_WIDTH, pinned=0), direction) == "m" * 20 * VIEWS
    assert "F" in staged(Case(fake, width=STAGED_WIDTH, own_stream=False), direction)


def test_pieces_that_are_apart_on_the_host_are_not_staged(fake: ctypes.CDLL):
    def turned(rows: torch.Tensor) -> list[torch.Tensor]:
        return of_rows(rows)[::-1]

    case = Case(fake, width=STAGED_WIDTH)
    assert case.go("h2d", "staged", scattered(), turned, lambda rows: of_views(rows)[::-1]) == "F"
    assert Case(fake, width=32 << 10).go("h2d", "staged", scattered(), of_rows, of_views) == "F"


@pytest.mark.parametrize(("strategy", "blocks"), [("kernel", 2), ("staged", 4)])
def test_kernels_take_as_many_blocks_of_threads_as_the_table_says(fake: ctypes.CDLL, strategy: str, blocks: int):
    Case(fake, width=STAGED_WIDTH).go("h2d", strategy, scattered(), of_rows, of_views, blocks)
    assert fake.fake_blocks() == blocks


def test_without_a_table_the_kernel_with_the_host_takes_fewer_blocks_than_that_of_staging(fake: ctypes.CDLL):
    Case(fake, width=STAGED_WIDTH).go("h2d", "default", scattered(), of_rows, of_views)
    assert fake.fake_blocks() == default_thread_blocks("staged") == 12
    Case(fake, width=STAGED_WIDTH).go("h2d", "default", scattered(), of_views)
    assert fake.fake_blocks() == default_thread_blocks("kernel") == 3


def test_neighbours_become_one_piece(fake: ctypes.CDLL):
    runs = np.column_stack((np.r_[4:9, 20:30], np.r_[0:5, 12:22]))
    assert Case(fake).go("h2d", "loop", runs) == "mm"
    halves = Case(fake).go("h2d", "loop", runs, lambda rows: [rows[:, :32], rows[:, 32:]])
    # Two views side by side on both sides are one.
    assert halves == "mm"
    assert Case(fake).go("h2d", "loop", runs, lambda rows: [rows[:, 32:], rows[:, :32]]) == "m" * 30


def test_no_pairs_and_no_bytes_make_no_call(fake: ctypes.CDLL):
    none = np.zeros((0, 2), np.int64)
    assert Case(fake).go("h2d", "kernel", none) == Case(fake).go("d2d", "", none) == ""
    assert Case(fake).go("h2d", "batch", scattered(), lambda rows: [rows[:, :0]]) == ""


@pytest.mark.parametrize(
    ("pairs", "calls"), [([[3, 0], [4, 1]], "K"), ([[0, 1], [1, 2]], "K"), ([[0, 1], [1, 0]], "K"), ([[2, 2]], "")]
)
def test_moves_are_made_as_if_all_were_read_first(fake: ctypes.CDLL, pairs: list[list[int]], calls: str):
    case = Case(fake)
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


@pytest.mark.parametrize("own_stream", [True, False])
def test_a_batch_of_many_pieces_goes_in_parts(fake: ctypes.CDLL, own_stream: bool):
    case, pairs = Case(fake, max_pieces=1024, own_stream=own_stream), scattered(BLOCKS)
    parts = "BBB" if own_stream else "r0w1BBBr1w0"
    assert case.go("h2d", "batch", pairs, lambda rows: [rows[:, at : at + 1] for at in reversed(range(64))]) == parts
    # What calibration found holds instead.
    case = Case(fake, max_pieces=7)
    fake.fake_batch_pieces(7)
    assert case.go("d2h", "batch", scattered()) == "B" * 3
    assert case.go("d2h", "batch", scattered(7)) == "B"


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_device_whose_driver_may_crash_in_a_batch_has_none_until_it_is_calibrated(fake: ctypes.CDLL, direction: str):
    case = Case(fake, max_pieces=0)
    fake.fake_capability(10)
    assert case.go(direction, "batch", scattered()) == "m" * 20
    assert Case(fake).go(direction, "batch", scattered()) == "B"
    case = Case(fake)
    fake.fake_capability(10)
    fake.fake_batch_pieces(512)
    assert case.go(direction, "batch", scattered()) == "B"
    # Calibration found that a batch ends the process.
    fake.fake_capability(9)
    fake.fake_batch_pieces(0)
    assert case.go(direction, "batch", scattered()) == "m" * 20


OLD_DRIVER = """
import sys
from pathlib import Path
from stand_in import Case, load_stand_in, scattered
fake = load_stand_in(Path(sys.argv[1]))
fake.fake_driver(6050)
for direction in ("h2d", "d2h"):
    assert Case(fake).go(direction, "kernel", scattered()) == "m" * 20
"""


def test_a_driver_without_a_call_costs_speed_and_no_copy(fake: ctypes.CDLL):
    # Calls are looked up once in a process.
    seen = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", OLD_DRIVER, fake._name], check=True, env=seen)


def test_memory_for_staging_is_taken_before_the_first_copy_and_its_want_is_told_once(
    fake: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
):
    Case(fake)
    fake.fake_begin_capture(0)
    fake.fake_prepare(2)
    assert fake.fake_end_capture() == 0
    assert fake.fake_calls() == b"AA"
    assert not capfd.readouterr().err
    fake.fake_full(True)
    fake.fake_prepare(1)
    said = capfd.readouterr().err
    for way in ("to", "from"):
        assert said.count(f"CUDA device 1 has no 48 MiB left to stage copies {way} the host") == 1
    fake.fake_prepare(1)
    assert not capfd.readouterr().err


INVALID, ILLEGAL_ADDRESS = 1, 700


@pytest.mark.parametrize("strategy", CALLS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_error_of_an_earlier_call_is_reported_before_the_copy_and_not_blamed_on_it(
    fake: ctypes.CDLL, capfd: pytest.CaptureFixture[str], direction: str, strategy: str
):
    case = Case(fake)
    fake.fake_fail(INVALID, False)
    place = "within the device" if direction == "d2d" else "between host and device"
    case.go(direction, strategy, scattered())
    # By the log of torch's C++ code.
    said = capfd.readouterr().err
    assert f"a CUDA error from before copying blocks {place} was cleared: as the test wants it (1)" in said
    case.go(direction, strategy, scattered())
    assert not capfd.readouterr().err


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_after_an_error_that_stays_nothing_is_copied(fake: ctypes.CDLL, direction: str):
    case = Case(fake)
    fake.fake_fail(ILLEGAL_ADDRESS, True)
    place = "within the device" if direction == "d2d" else "between host and device"
    message = rf"blockyard cuda: before copying blocks {place}, nothing was copied: an earlier call failed: .* \(700\)"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            case.go(direction, "kernel", scattered())
    assert fake.fake_calls() == b""


def test_a_failed_copy_leaves_no_error_for_the_next_launch(fake: ctypes.CDLL, capfd: pytest.CaptureFixture[str]):
    # A row that is page-locked by half is more than a copy takes, and the driver does not say where it ends.
    case = Case(fake, registered=[(0, WIDTH // 2), (WIDTH, BLOCKS * WIDTH)], reports_ranges=False)
    with pytest.raises(
        RuntimeError, match=r"copying blocks between host and device failed: as the test wants it \(1\)"
    ):
        case.go("h2d", "loop", np.array([[0, 0]]))
    assert case.go("d2d", "", scattered()) == "K"
    assert not capfd.readouterr().err


@given(
    st.sampled_from([(d, strategy) for d in DIRECTIONS for strategy in STRATEGIES]),
    st.integers(0, BLOCKS),
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.sampled_from([0, SHIFT]),
    st.integers(0, 30),
    st.sampled_from([8, 16, 48, 64, 1 << 16]),
    st.integers(0, 99),
)
def test_whatever_the_way_and_the_memory_all_bytes_arrive_and_no_kernel_goes_astray(
    fake: ctypes.CDLL,
    going: tuple[str, str],
    pinned: int,
    flags: list[bool],
    shift: int,
    count: int,
    width: int,
    seed: int,
):
    own_stream, reports_ranges = flags
    case = Case(
        fake,
        width=width,
        pinned=pinned,
        own_stream=own_stream,
        reports_ranges=reports_ranges,
        shift=shift,
    )
    random = np.random.default_rng(seed)
    pairs = np.column_stack((random.integers(0, BLOCKS, count), random.permutation(BLOCKS)[:count]))
    case.go(*going, pairs, lambda rows: [rows[:, :8], rows[:, 8:]] if seed % 2 else [rows])
