"""The driver of the bulk engine against a model of it, and that the compiled kernel really uses that engine."""

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from host_kernels import CUDA
from hypothesis import given
from hypothesis import strategies as st

from blockyard_build.toolchain import find_cuda_home

STAGE = 8192
MODELS = ["as built", "reuses at once", "reuses one too early", "stores at once", "keeps parity", "leaves early"]
MISTAKES = MODELS[1:]


def aligned(blocks: int, width: int, seed: int) -> np.ndarray:
    """Random bytes `[blocks, width]` that start at a multiple of 16."""
    memory = np.random.default_rng(seed).integers(0, 256, blocks * width + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + blocks * width].reshape(blocks, width)


def cut(rows: np.ndarray, widths: list[int]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(widths), axis=1)[: len(widths)]


def tensors_of(src: list[np.ndarray], dst: list[np.ndarray]) -> np.ndarray:
    """Source, destination, strides and width of each pair of views, as `CopyTensor` lays them out."""
    views = zip(src, dst, strict=True)
    return np.array(
        [(a.ctypes.data, b.ctypes.data, a.strides[0], b.strides[0], a.shape[1]) for a, b in views], np.int64
    )


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def launch(
    kernels: ctypes.CDLL, model: str, pairs: np.ndarray, widths: list[int], *, blocks: int = 12, seed: int = 0
) -> tuple[int, bool]:
    """Copy rows through a model: the faults it saw, and whether all bytes of the destination are right."""
    gap = 32
    src = aligned(int(pairs[:, 0].max(initial=0)) + 1, sum(widths) + gap, 1)
    dst = aligned(int(pairs[:, 1].max(initial=0)) + 1, sum(widths) + gap, 2)
    wanted = dst.copy()
    for source, target in zip(cut(src, widths), cut(wanted, widths), strict=True):
        target[pairs[:, 1]] = source[pairs[:, 0]]
    ids, tensors = np.ascontiguousarray(pairs, np.uint32), tensors_of(cut(src, widths), cut(dst, widths))
    size = ctypes.c_size_t
    fault = kernels.launch_bulk(
        MODELS.index(model), pointer(ids), size(len(ids)), pointer(tensors), size(len(widths)), blocks, seed
    )
    return fault, bool((dst == wanted).all())


def scattered(count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.column_stack((random.integers(0, count + 3, count), random.permutation(count + 5)[:count]))


WIDTHS = st.integers(0, 5 * STAGE // 16).map(lambda units: 16 * units)


@given(
    st.lists(WIDTHS | st.sampled_from([0, 16, STAGE, STAGE + 16, 2 * STAGE]), min_size=1, max_size=4),
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(0, 1 << 20),
)
def test_all_pieces_arrive_whatever_the_engine_does_first(
    kernels: ctypes.CDLL, widths: list[int], count: int, blocks: int, seed: int
):
    if sum(widths):
        assert launch(kernels, "as built", scattered(count, seed), widths, blocks=blocks, seed=seed) == (0, True)


@pytest.mark.parametrize("pieces", [1, 7, 8, 9, 11, 12, 13, 24, 25, 100])
def test_every_length_of_the_ring_is_walked(kernels: ctypes.CDLL, pieces: int):
    for seed in range(20):
        assert launch(kernels, "as built", scattered(pieces), [STAGE], blocks=1, seed=seed) == (0, True)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(kernels: ctypes.CDLL, mistake: str):
    seen = [launch(kernels, mistake, scattered(60), [STAGE, 48], blocks=2, seed=seed) for seed in range(20)]
    # Not in every run: the engine may be fast enough to hide it.
    assert sum(fault != 0 for fault, _ in seen) >= 5
    # Nor by the model's own checks alone: other bytes arrive.
    assert not all(right for _, right in seen)


@pytest.mark.parametrize(("offset", "width", "stride"), [(8, 64, 128), (0, 40, 128), (0, 64, 120), (4, 60, 124)])
def test_rows_that_the_engine_cannot_take_are_left_to_the_kernel(
    kernels: ctypes.CDLL, offset: int, width: int, stride: int
):
    def fits(*tensor: int) -> bool:
        return kernels.fits(pointer(np.array(tensor, np.int64)), ctypes.c_size_t(1))

    assert fits(4096, 8192, 128, 128, 64)
    assert not fits(4096 + offset, 8192, stride, 128, width)
    assert not fits(4096, 8192 + offset, 128, stride, width)
    # More pieces than are counted.
    assert not fits(4096, 8192, 1 << 40, 1 << 40, 1 << 30)


WANTED = {
    "mbarrier.init": 12,
    "fence.proxy.async": 1,
    "mbarrier.arrive.expect_tx": 1,
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": 1,
    "mbarrier.try_wait.parity": 1,
    "cp.async.bulk.global.shared::cta.bulk_group": 1,
    "cp.async.bulk.commit_group": 1,
    "cp.async.bulk.wait_group.read": 1,
    "cp.async.bulk.wait_group ": 1,
}


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_the_kernel_is_compiled_to_bulk_copies_from_sm_90_on(tmp_path: Path, arch: int):
    home = find_cuda_home({})
    if home is None:
        pytest.skip("no nvcc")
    listing = tmp_path / "bulk.ptx"
    command = [str(home / "bin" / "nvcc"), "-std=c++17", f"-arch=compute_{arch}", "-ptx", str(CUDA / "bulk.cu")]
    subprocess.run([*command, "-o", str(listing)], check=True)
    text = listing.read_text()
    kernel = text[text.index(".entry") :]
    for instruction, count in WANTED.items():
        found = len(re.findall(re.escape(instruction), kernel))
        assert found >= count if arch >= 90 else not found, (instruction, found)
    # Elsewhere it stops rather than copy nothing.
    assert ("trap;" in kernel) is (arch < 90)
