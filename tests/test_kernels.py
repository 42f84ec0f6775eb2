"""The kernels' bodies and the order of their steps, compiled for the CPU and run thread by thread."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard._core import Mapping

CUDA = Path(__file__).resolve().parent.parent / "cuda"

# A device of one thread at a time; blocks of threads run in a drawn order, as a device runs them in any.
DEVICE = """
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include "copy_kernel.h"
using namespace blockyard;
template <typename Access>
static void run(const CopyParams& p, size_t tensors, int64_t widest, bool with_host, bool aside, unsigned seed) {
    const int64_t chunk = with_host ? kHostChunk<Access> : kChunk<Access>;
    const size_t chunks = (widest + chunk - 1) / chunk;
    if (with_host) {
        for (uint32_t warp = 0; warp < 6; ++warp)
            for (int lane = 0; lane < kWarp; ++lane) walk_host_pieces<Access>(p, tensors, chunks, warp, 6, lane);
        return;
    }
    const auto walk = aside ? walk_group<Access, true> : walk_group<Access, false>;
    std::vector<size_t> order(chunks * tensors * p.num_groups);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (const size_t n : order)
        for (int t = 0; t < kThreads; ++t)
            walk(p, n % chunks, n / chunks % tensors, n / chunks / tensors, t);
}
extern "C" int launch(const CopyPair* steps, size_t num_steps, const uint32_t* starts, size_t num_starts,
                      CopyTensor* tensors, size_t num_tensors, bool from_host, int access, size_t most, unsigned seed) {
    const Steps plan{{steps, steps + num_steps}, {starts, starts + num_starts}};
    const bool aside = has_aside(plan);
    static CopyParams params;
    int launches = 0;
    for (const StepRange& part : split_steps(plan, most)) {
        if (part.num_steps > most || part.starts.back() != part.num_steps) return -1;
        std::memset(&params, 0xff, sizeof params);
        std::copy_n(part.steps, part.num_steps, params.steps);
        std::copy(part.starts.begin(), part.starts.end(), params.starts);
        params.num_groups = part.starts.size() - 1;
        std::copy_n(tensors, num_tensors, params.tensors);
        int64_t widest = 0;
        for (size_t t = 0; t < num_tensors; ++t) widest = std::max(widest, tensors[t].width);
        if (access == 1) run<uint8_t>(params, num_tensors, widest, from_host, aside, seed);
        else run<uint64_t>(params, num_tensors, widest, from_host, aside, seed);
        ++launches;
    }
    return launches;
}
"""
MOST = 2048
SHORTEST = 513


class Tensor(ctypes.Structure):
    _fields_ = (
        ("src", ctypes.c_void_p),
        ("dst", ctypes.c_void_p),
        ("src_stride", ctypes.c_int64),
        ("dst_stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("device")
    (folder / "device.cpp").write_text(DEVICE)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    # Unset registers are never stored, which the compiler cannot know.
    flags += ["-Wno-maybe-uninitialized", "-Wno-sign-compare", "-fsanitize=undefined", "-fno-sanitize-recover"]
    flags += ["-fno-sanitize=alignment,pointer-overflow"]
    sources = [str(folder / "device.cpp"), str(CUDA / "steps.cpp")]
    command = ["g++", *flags, f"-I{CUDA}", *sources, "-o", str(folder / "device.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "device.so"))


def launch(
    device: ctypes.CDLL,
    rule: str,
    pairs: np.ndarray,
    src: list,
    dst: list,
    *,
    from_host: bool = False,
    access: int = 1,
    most: int = MOST,
) -> int:
    mapping = Mapping(pairs, src_blocks=len(src[0]), dst_blocks=len(dst[0]), rule=rule)
    steps, starts = (np.ascontiguousarray(array, np.int64).astype(np.uint32) for array in mapping.steps())
    views = [
        Tensor(a.ctypes.data, b.ctypes.data, a.strides[0], b.strides[0], a.shape[1])
        for a, b in zip(src, dst, strict=True)
    ]
    array, size, pointer = (Tensor * len(views))(*views), ctypes.c_size_t, ctypes.c_void_p
    plan = steps.ctypes.data_as(pointer), size(len(steps)), starts.ctypes.data_as(pointer), size(len(starts))
    return device.launch(*plan, array, size(len(views)), from_host, access, size(most), 1)


def rows_of(blocks: int, widths: list[int], seed: int) -> list[np.ndarray]:
    memory = np.random.default_rng(seed).integers(0, 256, (blocks, sum(widths) + 8), np.uint8)
    return [np.split(memory, np.cumsum(widths), axis=1)[n] for n in range(len(widths))]


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    blocks = draw(st.integers(1, 14))
    targets = draw(st.lists(st.integers(0, blocks - 1), unique=True, max_size=blocks))
    rings = draw(st.booleans())
    sources = draw(st.permutations(targets)) if rings else [draw(st.integers(0, blocks - 1)) for _ in targets]
    return blocks, np.array(list(zip(sources, targets, strict=True)), np.int64).reshape(-1, 2)


@given(moves(), st.sampled_from([1, 8]))
def test_moves_are_made_as_if_all_were_read_first(device: ctypes.CDLL, drawn: tuple[int, np.ndarray], access: int):
    blocks, pairs = drawn
    caches = rows_of(blocks, [8, 1200 * access, 16], blocks)
    wanted = caches[0].base.copy() if caches[0].base is not None else None
    expected = [cache.copy() for cache in caches]
    for rows in expected:
        rows[pairs[:, 1]] = rows[pairs[:, 0]].copy()
    assert launch(device, "move", pairs, caches, caches, access=access) >= 0
    for now, want in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(now, want)
    assert wanted is None or caches[0].base[:, -8:].tolist() == wanted[:, -8:].tolist()


SHAPES = {
    "a long ring": lambda n: np.column_stack((np.arange(n), np.roll(np.arange(n), -1))),
    "a scattered ring": lambda n: np.column_stack(((p := np.random.default_rng(1).permutation(n)), np.roll(p, -1))),
    "a shift": lambda n: np.column_stack((np.arange(n - 1) + 1, np.arange(n - 1))),
    "a shift up": lambda n: np.column_stack((np.arange(n - 3), np.arange(n - 3) + 3)),
    "any": lambda n: np.column_stack((np.random.default_rng(2).integers(0, n, n), np.arange(n))),
    "pairs": lambda n: np.column_stack((np.arange(n), np.arange(n) ^ 1)),
    "nothing": lambda n: np.zeros((0, 2), np.int64),
}


@pytest.mark.parametrize("most", [SHORTEST, MOST])
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_longer_than_a_launch_are_parted_where_they_may_be(device: ctypes.CDLL, shape: str, most: int):
    pairs = SHAPES[shape](5000)
    caches = rows_of(5000, [3, 8], 3)
    expected = [cache.copy() for cache in caches]
    for rows in expected:
        rows[pairs[:, 1]] = rows[pairs[:, 0]].copy()
    launches = launch(device, "move", pairs, caches, caches, most=most)
    assert launches >= len(pairs) // most
    for now, want in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(now, want)


def test_exchanges_leave_nothing_aside_between_launches(device: ctypes.CDLL):
    pairs = np.random.default_rng(0).permutation(4000).reshape(-1, 2)
    caches = rows_of(4000, [5], 1)
    expected = caches[0].copy()
    expected[pairs] = expected[pairs[:, ::-1]]
    assert launch(device, "exchange", pairs, caches, caches) == 3
    np.testing.assert_array_equal(caches[0], expected)


@pytest.mark.parametrize("access", [1, 8])
@pytest.mark.parametrize("from_host", [False, True])
@pytest.mark.parametrize("widths", [[8], [16, 4096, 8], [24, 24, 24, 24], [16384 + 8]])
def test_copies_between_memories_arrive_whole(device: ctypes.CDLL, from_host: bool, widths: list[int], access: int):
    random = np.random.default_rng(5)
    pairs = np.column_stack((random.integers(0, 30, 20), random.permutation(40)[:20]))
    src, dst = rows_of(30, widths, 1), rows_of(40, widths, 2)
    expected = [rows.copy() for rows in dst]
    for source, target in zip(src, expected, strict=True):
        target[pairs[:, 1]] = source[pairs[:, 0]]
    assert launch(device, "swap", pairs, src, dst, from_host=from_host, access=access) == 1
    for now, want in zip(dst, expected, strict=True):
        np.testing.assert_array_equal(now, want)
