"""The copy kernels and their launches on a CPU, thread by thread: given plans, and random ones beside a plain model."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from host_kernels import BESIDE_HOST, MAX_STEPS, MISTAKES, WITHIN_DEVICE, build_kernels
from hypothesis import given
from hypothesis import strategies as st

from blockyard._core import Mapping

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
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernels(tmp_path_factory.mktemp("program"), program=True)


def launch(
    kernels: ctypes.CDLL,
    rule: str,
    pairs: np.ndarray,
    src: list,
    dst: list,
    *,
    route: int = 0,
    max_steps: int = MAX_STEPS,
) -> int:
    mapping = Mapping(pairs, src_blocks=len(src[0]), dst_blocks=len(dst[0]), rule=rule)
    steps, starts = (np.ascontiguousarray(array, np.int64).astype(np.uint32) for array in mapping.steps())
    views = [
        Tensor(a.ctypes.data, b.ctypes.data, a.strides[0], b.strides[0], a.shape[1])
        for a, b in zip(src, dst, strict=True)
    ]
    array, size, pointer = (Tensor * len(views))(*views), ctypes.c_size_t, ctypes.c_void_p
    plan = steps.ctypes.data_as(pointer), size(len(steps)), starts.ctypes.data_as(pointer), size(len(starts))
    return kernels.launch(route, *plan, array, size(len(views)), 6, size(max_steps), 1)


def random_copies(program: Path, seed: int, launches: int, mistake: int = 0) -> tuple[int, str]:
    """Run the program: its exit status, and what it and the sanitizers say."""
    # Those that were asked for; a sanitizer's report must not wait for a symbolizer.
    environ = {"ASAN_OPTIONS": "symbolize=0:detect_leaks=0", "UBSAN_OPTIONS": "symbolize=0"}
    command = [str(program), str(seed), str(launches), str(mistake)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_random_layouts_widths_and_mappings_are_copied_as_a_plain_model_does(program: Path):
    status, said = random_copies(program, 1, 2000)
    assert status == 0, said
    assert "all as the model" in said


# A million launches, in parts that each end long before pytest gives a test up.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_hundred_thousand_random_launches_are_copied_as_a_plain_model_does(program: Path, seed: int):
    status, said = random_copies(program, seed, 100_000)
    assert status == 0, said
    assert "all as the model" in said


@pytest.mark.parametrize("mistake", MISTAKES)
def test_random_copies_find_a_planted_mistake(program: Path, mistake: str):
    status, said = random_copies(program, 3, 5000, list(MISTAKES).index(mistake) + 1)
    assert status != 0
    assert "differs" in said or "Sanitizer" in said or "runtime error" in said, said


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
def test_moves_are_made_as_if_all_were_read_first(kernels: ctypes.CDLL, drawn: tuple[int, np.ndarray], unit: int):
    blocks, pairs = drawn
    caches = rows_of(blocks, [8, 1200 * unit, 15 + unit], blocks)
    wanted = caches[0].base.copy() if caches[0].base is not None else None
    expected = [cache.copy() for cache in caches]
    for rows in expected:
        rows[pairs[:, 1]] = rows[pairs[:, 0]].copy()
    assert launch(kernels, "move", pairs, caches, caches) >= 0
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


@pytest.mark.parametrize("max_steps", [SHORTEST, MAX_STEPS])
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_longer_than_a_launch_are_parted_where_they_may_be(kernels: ctypes.CDLL, shape: str, max_steps: int):
    pairs = SHAPES[shape](5000)
    caches = rows_of(5000, [3, 8], 3)
    expected = [cache.copy() for cache in caches]
    for rows in expected:
        rows[pairs[:, 1]] = rows[pairs[:, 0]].copy()
    launches = launch(kernels, "move", pairs, caches, caches, max_steps=max_steps)
    assert launches >= len(pairs) // max_steps
    for now, want in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(now, want)


def test_exchanges_leave_nothing_aside_between_launches(kernels: ctypes.CDLL):
    pairs = np.random.default_rng(0).permutation(4000).reshape(-1, 2)
    caches = rows_of(4000, [5], 1)
    expected = caches[0].copy()
    expected[pairs] = expected[pairs[:, ::-1]]
    assert launch(kernels, "exchange", pairs, caches, caches) == 3
    np.testing.assert_array_equal(caches[0], expected)


@pytest.mark.parametrize("route", [WITHIN_DEVICE, BESIDE_HOST])
@pytest.mark.parametrize("widths", [[8], [7, 4096, 8], [24, 24, 24, 24], [16384 + 8]])
def test_copies_between_memories_arrive_whole(kernels: ctypes.CDLL, route: int, widths: list[int]):
    random = np.random.default_rng(5)
    pairs = np.column_stack((random.integers(0, 30, 20), random.permutation(40)[:20]))
    src, dst = rows_of(30, widths, 1), rows_of(40, widths, 2)
    expected = [rows.copy() for rows in dst]
    for source, target in zip(src, expected, strict=True):
        target[pairs[:, 1]] = source[pairs[:, 0]]
    assert launch(kernels, "swap", pairs, src, dst, route=route) == 1
    for now, want in zip(dst, expected, strict=True):
        np.testing.assert_array_equal(now, want)
