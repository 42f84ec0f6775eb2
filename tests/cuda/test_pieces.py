"""Pieces of a copy end where the memory of one registration or mapping ends, over a driver that refuses others."""

import ctypes
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stand_in import BLOCKS, WIDTH, Case, scattered, uncut

from blockyard.engine.ops import compiled
from blockyard.engine.ops.library import op_library
from blockyard.errors import LayoutError

BYTES = BLOCKS * WIDTH
DENSE = np.column_stack((np.arange(BLOCKS), np.arange(BLOCKS)))
THIRDS = [(0, 12 * WIDTH), (12 * WIDTH, 24 * WIDTH), (24 * WIDTH, BYTES)]


def declare(case: Case, memory: str, num_bytes: int, chunk: int) -> None:
    case.fake.fake_declare(getattr(case, memory).data_ptr(), num_bytes, chunk)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_run_of_blocks_is_cut_where_a_registration_ends(fake: ctypes.CDLL, direction: str):
    assert Case(fake, registered=THIRDS).go(direction, "batch", DENSE) == "B"
    assert Case(fake, registered=THIRDS).go(direction, "loop", DENSE) == "mmm"
    # Within a block, too.
    assert Case(fake, registered=[(0, 100), (100, BYTES)]).go(direction, "loop", DENSE) == "mm"
    assert Case(fake, registered=[(0, 100), (100, BYTES)]).go(direction, "batch", scattered()) == "B"


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_run_of_blocks_is_cut_where_a_mapping_of_the_device_ends(fake: ctypes.CDLL, direction: str):
    assert Case(fake, mapped=(700, 1500)).go(direction, "loop", DENSE) == "mmm"
    assert Case(fake, mapped=(700, 1500)).go(direction, "batch", DENSE) == "B"
    assert Case(fake, mapped=(700, 1500), registered=THIRDS).go(direction, "loop", DENSE) == "mmmmm"


@pytest.mark.parametrize("strategy", ["batch", "loop", "kernel"])
@pytest.mark.parametrize("ranges", [[(0, 1000)], [(1000, BYTES)], [(0, 640), (704, BYTES)]])
def test_a_run_that_is_page_locked_in_part_is_cut_there(
    fake: ctypes.CDLL, strategy: str, ranges: list[tuple[int, int]]
):
    calls = Case(fake, registered=ranges).go("h2d", strategy, DENSE)
    assert set(calls) == {"m"}
    assert len(calls) <= 3


def test_a_kernel_does_not_touch_pageable_memory_between_two_registrations(fake: ctypes.CDLL):
    ranges = [(0, 10 * WIDTH), (20 * WIDTH, BYTES)]
    assert Case(fake, registered=ranges).go("h2d", "kernel", scattered(40)) == "m" * 40


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_where_the_driver_knows_no_ranges_a_refused_batch_goes_piece_by_piece(fake: ctypes.CDLL, direction: str):
    case = Case(fake, registered=THIRDS, reports_ranges=False)
    # One piece is no batch, and single copies cross registrations.
    assert case.go(direction, "batch", DENSE) == "m"
    runs = np.r_[0:20, 21:40]
    assert case.go(direction, "batch", np.column_stack((runs, runs))) == "Bmm"
    assert case.go(direction, "batch", scattered()) == "B"
    fake.fake_batch_pieces(8)
    # The part that is refused, and no other.
    assert case.go(direction, "batch", np.concatenate((DENSE[:20:2], DENSE[21:31]))) == "BBmmm"
    assert case.go(direction, "kernel", scattered()) == "F"


def test_declared_memory_is_not_asked_about_chunk_by_chunk(fake: ctypes.CDLL):
    chunk = 2 * WIDTH
    ranges = [(first, first + chunk) for first in range(0, BYTES, chunk)]
    case = Case(fake, registered=ranges, mapped=tuple(end for _, end in ranges))
    assert case.go("h2d", "loop", DENSE) == "m" * len(ranges)
    assert fake.fake_questions() > len(ranges)
    case = Case(fake, registered=ranges, mapped=tuple(end for _, end in ranges))
    declare(case, "host", BYTES, chunk)
    declare(case, "device", BYTES, chunk)
    assert case.go("h2d", "loop", DENSE) == "m" * len(ranges)
    assert case.go("d2h", "batch", scattered()) == "B"
    # Both ends of the host's memory, for the addresses that the device has for them.
    assert fake.fake_questions() == 4


def test_the_end_of_declared_memory_is_one_of_page_locked_memory(fake: ctypes.CDLL):
    case = Case(fake, pinned=24)
    declare(case, "host", 24 * WIDTH, 12 * WIDTH)
    assert case.go("h2d", "batch", DENSE) == "mmm"
    assert case.go("h2d", "batch", DENSE[:24]) == "B"
    # Blocks that a chunk cuts in two.
    case = Case(fake, registered=[(0, 96), (96, 192)])
    declare(case, "host", 192, 96)
    assert case.go("d2h", "batch", DENSE[:3]) == "B"
    assert case.go("d2h", "loop", DENSE[1:2]) == "mm"


def test_a_thread_that_has_made_no_call_yet_copies_as_others_do(fake: ctypes.CDLL):
    case, calls = Case(fake, registered=THIRDS), []
    thread = threading.Thread(target=lambda: calls.append(case.go("h2d", "batch", DENSE)))
    thread.start()
    thread.join(300)
    assert calls == ["B"]


def test_a_driver_that_refuses_to_describe_memory_is_an_error(fake: ctypes.CDLL):
    case = Case(fake)
    fake.fake_answer(999)
    with pytest.raises(RuntimeError, match="cuda: querying the memory of src failed: driver error 999"):
        case.go("h2d", "batch", scattered())
    assert fake.fake_calls() == b""


def test_the_driver_is_asked_once_for_each_mapping_of_declared_memory(fake: ctypes.CDLL):
    case = Case(fake, mapped=(8 * WIDTH, 16 * WIDTH, 24 * WIDTH, 32 * WIDTH))
    start = case.device.data_ptr()

    def asked() -> int:
        before = fake.fake_questions()
        assert set(case.go("h2d", "batch", scattered())) == {"B"}
        return int(fake.fake_questions() - before)

    # About the registration and about five mappings, in each call.
    assert [asked(), asked()] == [6, 6]
    fake.fake_declare(start, BLOCKS * WIDTH, 0)
    assert [asked(), asked(), asked()] == [6, 1, 1]
    # Beyond what was declared, and once it is taken back, the driver is asked again.
    fake.fake_declare(start, 8 * WIDTH, 0)
    assert [asked(), asked()] == [6, 5]
    fake.fake_declare(start, 0, 0)
    assert [asked(), asked()] == [6, 6]


@pytest.mark.parametrize(("num_bytes", "chunk_bytes"), [(-1, 1), (8, -1)])
def test_a_region_of_no_size_is_refused(num_bytes: int, chunk_bytes: int):
    if not op_library().loaded:
        pytest.skip(op_library().explain())
    with pytest.raises(LayoutError, match=f"a region of {num_bytes} bytes in chunks of {chunk_bytes}, wanted at least"):
        compiled._run(torch.ops.blockyard.set_region, 4096, num_bytes, chunk_bytes)


def halves(rows: torch.Tensor) -> list[torch.Tensor]:
    return [rows[:, 8:], rows[:, :8]]


@given(
    st.sampled_from(["h2d", "d2h"]),
    st.sampled_from(["batch", "loop", "kernel"]),
    st.lists(st.integers(1, 400), max_size=12),
    st.integers(0, 12),
    st.lists(st.integers(1, BYTES - 1), max_size=8, unique=True).map(sorted),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_wherever_registrations_and_mappings_end_all_bytes_arrive(
    fake: ctypes.CDLL,
    direction: str,
    strategy: str,
    lengths: list[int],
    gap: int,
    mapped: list[int],
    step: int,
    whole: bool,
    seed: int,
):
    ends = [min(BYTES, end) for end in np.cumsum([0, *lengths]).tolist()]
    ranges = list(pairwise(ends))
    if whole:
        ranges.append((ends[-1], BYTES))
        # One of them is pageable.
        ranges = ranges[:gap] + ranges[gap + 1 :]
    case = Case(fake, registered=ranges, mapped=tuple(mapped), max_pieces=1024)
    runs, other = np.arange(0, 20, step), seed % (BLOCKS // 2)
    pairs = np.column_stack((runs, other + runs))
    if direction == "d2h":
        pairs = pairs[:, ::-1].copy()
    case.go(direction, strategy, pairs, halves if seed % 2 else uncut)
