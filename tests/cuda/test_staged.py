"""Staged copies over a model of streams and events: whole destinations, any legal order, and planted mistakes."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard_build.toolchain import find_cuda_home

TESTS = Path(__file__).resolve().parents[1]
CUDA = TESTS.parent / "cuda"
# Small slots: a few blocks go around the ring.
SLOT, MIN_ROW_BYTES = 4096, 256
SMALL = {
    "kSlotBytes = 16 << 20": f"kSlotBytes = {SLOT}",
    "kMinPartBytes = 2 << 20": f"kMinPartBytes = {SLOT // 4}",
    "kMinRowBytes = 64 << 10": f"kMinRowBytes = {MIN_ROW_BYTES}",
}
HOST_BLOCKS, DEVICE_BLOCKS = 40, 50
TO_DEVICE, TO_HOST = False, True

MISTAKES = {
    "a slot is filled while it is still emptied": ("cudaStreamWaitEvent(fills, slot.used, 0)", "cudaSuccess"),
    "a slot counts as empty once it is filled": (
        "cudaEventRecord(slot.used, empties)",
        "cudaEventRecord(slot.used, fills)",
    ),
    "a slot is emptied before it is filled": ("order(slot.used, fills, empties)", "cudaSuccess"),
    "the event of the next slot": (
        "order(slot.used, fills, empties)",
        "order(ring.slots[ring.next % kSlots].used, fills, empties)",
    ),
    "a row too far": ("= static_cast<uint32_t>(n);", "= static_cast<uint32_t>(n ? n - 1 : 0);"),
    "views one over the other": ("start += piece.width;", ""),
    "rows read before earlier work": ("status = order(ring.fence, stream, ring.rows)", "status = cudaSuccess"),
    "later work before the rows": ("joined = order(ring.fence, ring.rows, stream)", "joined = cudaSuccess"),
    "the last part is left out": ("first < pairs.size() && status", "first + 1 < pairs.size() && status"),
    "the last view is left out": (
        "pieces = columns.tensors;",
        "pieces(columns.tensors.begin(), columns.tensors.end() - 1);",
    ),
}

# What all builds include, compiled once.
HEADERS = ("algorithm", "array", "cstring", "functional", "map", "mutex", "random", "vector", "cuda_runtime_api.h")

Build = Callable[[str, str], ctypes.CDLL]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    home = find_cuda_home({})
    if home is None:
        pytest.skip("no CUDA headers")

    flags = ["-std=c++17", "-O0", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    flags += ["-Wno-maybe-uninitialized", "-Wno-unused", "-isystem", str(home / "include")]
    common = tmp_path_factory.mktemp("headers") / "common.h"
    common.write_text("".join(f"#include <{header}>\n" for header in HEADERS))
    subprocess.run(["g++", *flags, "-x", "c++-header", str(common), "-o", f"{common}.gch"], check=True)

    def make(old: str = "", new: str = "") -> ctypes.CDLL:
        """Build the library's source with one part of its text replaced; its rings are those of a fresh process."""
        folder = tmp_path_factory.mktemp("staged")
        source, header = (CUDA / "staged.cpp").read_text(), (CUDA / "staged.h").read_text()
        for wanted, small in SMALL.items():
            assert header.count(wanted) == 1
            header = header.replace(wanted, small)
        assert not old or source.count(old) == 1
        (folder / "staged.h").write_text(header)
        (folder / "staged.cpp").write_text(source.replace(old, new) if old else source)
        library = folder / "staged.so"
        command = ["g++", *flags, "-shared", "-Wl,-Bsymbolic", "-Winvalid-pch", "-include", str(common)]
        command += [f"-I{folder}", f"-I{CUDA}", str(TESTS / "staged_ring.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.has_memory.argtypes = [ctypes.c_bool]
        return loaded

    return make


@pytest.fixture(scope="module")
def staged(build: Build) -> ctypes.CDLL:
    return build()


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


class Case:
    """Rows of the host and views of the device, apart from one another, in any order."""

    def __init__(self, widths: list[int], seed: int = 0, gap: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.widths = widths
        self.rows = random.integers(0, 256, (HOST_BLOCKS, sum(widths) + gap), np.uint8)
        self.views = [random.integers(0, 256, (DEVICE_BLOCKS, width), np.uint8) for width in widths]

    def host(self) -> list[np.ndarray]:
        return np.split(self.rows, np.cumsum(self.widths), axis=1)[: len(self.widths)]

    def pairs(self, to_host: bool, count: int, seed: int = 0) -> np.ndarray:
        random = np.random.default_rng(seed)
        host, device = random.permutation(HOST_BLOCKS)[:count], random.permutation(DEVICE_BLOCKS)[:count]
        return np.column_stack((device, host) if to_host else (host, device))

    def queue(self, staged: ctypes.CDLL, pairs: np.ndarray, to_host: bool, *, stream: int = 1, blocks: int = 5) -> int:
        sides = (self.views, self.host()) if to_host else (self.host(), self.views)
        views = [
            (a.ctypes.data, b.ctypes.data, a.strides[0], b.strides[0], a.shape[1]) for a, b in zip(*sides, strict=True)
        ]
        tensors, ids = np.array(views, np.int64), np.ascontiguousarray(pairs, np.uint32)
        size = ctypes.c_size_t
        return staged.queue_staged(
            stream, pointer(tensors), size(len(views)), pointer(ids), size(len(ids)), to_host, blocks
        )

    def wanted(self, pairs: np.ndarray, to_host: bool) -> list[np.ndarray]:
        """What all bytes of the destination are afterwards."""
        sides = (self.views, [self.rows]) if to_host else (self.host(), self.views)
        after = [memory.copy() for memory in sides[1]]
        cut = np.split(after[0], np.cumsum(self.widths), axis=1)[: len(self.widths)] if to_host else after
        for source, target in zip(sides[0], cut, strict=True):
            target[pairs[:, 1]] = source[pairs[:, 0]]
        return after

    def is_right(self, wanted: list[np.ndarray], to_host: bool) -> bool:
        found = [self.rows] if to_host else self.views
        return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


ORDERS = [(0, 0), (1, 0), *((2, seed) for seed in range(6))]


def copies_right(staged: ctypes.CDLL, order: tuple[int, int]) -> bool:
    """Whether copies each way, on two streams, with work before and behind them, deliver all bytes."""
    right = True
    for to_host in (TO_DEVICE, TO_HOST):
        cases = [Case([400, 112, 8, 1000], seed) for seed in range(2)]
        behind = []
        for number, case in enumerate(cases):
            pairs = case.pairs(to_host, 23, number)
            # What is read is written only by work that was queued before, on the same stream.
            source = case.views[0] if to_host else case.rows
            late = source.copy()
            before = case.wanted(pairs, to_host)
            source.fill(0)
            staged.queue_copy(number + 1, pointer(source), pointer(late), ctypes.c_size_t(late.nbytes))
            assert case.queue(staged, pairs, to_host, stream=number + 1) == 0
            # And what was written is read by work that is queued behind.
            found = [case.rows] if to_host else case.views
            seen = [np.zeros_like(memory) for memory in found]
            for copy, memory in zip(seen, found, strict=True):
                staged.queue_copy(number + 1, pointer(copy), pointer(memory), ctypes.c_size_t(memory.nbytes))
            behind.append((case, before, seen, late))
        staged.finish(*order)
        for case, before, seen, _ in behind:
            right &= case.is_right(before, to_host)
            right &= all(np.array_equal(a, b) for a, b in zip(seen, before, strict=True))
    return right


@pytest.mark.parametrize("order", ORDERS)
def test_all_bytes_arrive_in_any_order_that_streams_and_events_allow(staged: ctypes.CDLL, order: tuple[int, int]):
    assert copies_right(staged, order)
    assert staged.faults() == 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_delivers_other_bytes(build: Build, mistake: str):
    wrong = build(*MISTAKES[mistake])
    assert not all(copies_right(wrong, order) for order in ORDERS)


@given(
    st.lists(st.integers(1, SLOT), min_size=1, max_size=8),
    st.integers(0, HOST_BLOCKS),
    st.integers(0, 64),
    st.integers(1, 13),
    st.booleans(),
    st.tuples(st.integers(0, 2), st.integers(0, 1 << 16)),
)
def test_rows_of_any_widths_go_through_the_slots(
    staged: ctypes.CDLL, widths: list[int], count: int, gap: int, blocks: int, to_host: bool, order: tuple[int, int]
):
    case = Case(widths, count, gap)
    pairs = case.pairs(to_host, count, gap)
    wanted = case.wanted(pairs, to_host)
    assert case.queue(staged, pairs, to_host, blocks=blocks) == (0 if sum(widths) >= MIN_ROW_BYTES else -1)
    staged.finish(*order)
    if sum(widths) >= MIN_ROW_BYTES:
        assert case.is_right(wanted, to_host)
    assert staged.faults() == 0


def test_memory_is_taken_once_for_each_direction(build: Build):
    fresh = build()
    for _ in range(3):
        copies_right(fresh, (2, 0))
    # And only in a mode that leaves captures of other threads alone: else it is a fault.
    assert (fresh.allocations(), fresh.faults()) == (2, 0)


def test_without_memory_for_slots_there_is_no_staging(build: Build):
    fresh, case = build(), Case([512])
    fresh.has_memory(False)
    assert case.queue(fresh, case.pairs(TO_HOST, 3), TO_HOST) == -2
    fresh.has_memory(True)
    # Not asked for again: a call that fails costs as much as a copy.
    assert case.queue(fresh, case.pairs(TO_HOST, 3), TO_HOST) == -2
    assert fresh.allocations() == 1
    assert case.queue(fresh, case.pairs(TO_DEVICE, 3), TO_DEVICE) == 0
    fresh.finish(0, 0)


@pytest.mark.parametrize("to_host", [TO_DEVICE, TO_HOST])
def test_pieces_that_are_apart_on_the_host_are_not_staged(staged: ctypes.CDLL, to_host: bool):
    case = Case([300, 300])
    pairs = case.pairs(to_host, 3)
    assert case.queue(staged, pairs, to_host) == 0
    staged.finish(0, 0)
    whole = case.host()
    for host in (whole[::-1], [whole[0], whole[1][:, 8:]], [whole[0], whole[1].copy()], [whole[0][:, :200]]):
        case.host = lambda host=host: host
        case.views = [np.zeros((DEVICE_BLOCKS, rows.shape[1]), np.uint8) for rows in host]
        assert case.queue(staged, pairs, to_host) == -1
