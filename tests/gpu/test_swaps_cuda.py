"""The kernels on a CUDA device: swaps with page-locked memory and copies within, around what one launch and warp take.

The shapes are small enough to run under compute-sanitizer.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from blockyard.engine import ops
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import force_strategy

# Bytes of a row that one warp moves at a time.
CHUNK = 4096
BLOCKS = 200


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    assert op_library().loaded, op_library().explain()
    with force_strategy(torch.cuda.current_device(), "kernel"):
        yield


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def random_pairs(count: int, seed: int = 1) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(np.column_stack((random.integers(0, BLOCKS, count), random.permutation(BLOCKS)[:count])))


@pytest.mark.parametrize("width", [16, 48, CHUNK - 16, CHUNK, CHUNK + 16, 5 * CHUNK + 32])
@pytest.mark.parametrize("count", [1, 12, 13, 100, BLOCKS])
def test_pieces_come_from_page_locked_memory_and_go_back(width: int, count: int):
    host, back = random_bytes(BLOCKS, width).pin_memory(), torch.zeros((BLOCKS, width), dtype=torch.uint8).pin_memory()
    device = random_bytes(BLOCKS, width, seed=2).cuda()
    pairs = random_pairs(count)
    wanted = device.cpu()
    wanted[pairs[:, 1]] = host[pairs[:, 0]]
    ops.swap_blocks([host], [device], pairs)
    everything = torch.arange(BLOCKS).repeat(2, 1).T.contiguous()
    ops.swap_blocks([device], [back], everything)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), wanted)
    assert torch.equal(back, wanted)


@pytest.mark.parametrize("widths", [[16], [CHUNK], [48, CHUNK + 16, 0, 4096], [64 * 1024]])
def test_pieces_move_within_the_device(widths: list[int]):
    src, dst = (random_bytes(BLOCKS, sum(widths) + 32, seed=seed).cuda() for seed in (1, 2))
    pairs = random_pairs(150)
    wanted = dst.cpu()
    wanted[pairs[:, 1], : sum(widths)] = src.cpu()[pairs[:, 0], : sum(widths)]
    views = [list(memory.split([*widths, 32], dim=1)[:-1]) for memory in (src, dst)]
    ops.swap_blocks(*views, pairs)
    assert torch.equal(dst.cpu(), wanted)


SHAPES = {
    "into holes": np.column_stack((np.arange(90) + 110, np.arange(90))),
    "a shift": np.column_stack((np.arange(BLOCKS - 1) + 1, np.arange(BLOCKS - 1))),
    "a ring": np.column_stack((np.arange(BLOCKS), np.roll(np.arange(BLOCKS), -1))),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_moves_are_made_as_if_all_were_read_first(shape: str):
    cache, pairs = random_bytes(BLOCKS, CHUNK + 48).cuda(), torch.from_numpy(SHAPES[shape])
    wanted = cache.cpu()
    wanted[pairs[:, 1]] = wanted[pairs[:, 0]]
    ops.move_blocks([cache], pairs)
    assert torch.equal(cache.cpu(), wanted)


def test_copies_exchanges_gathers_and_scatters_move_the_same_bytes():
    cache, rows = random_bytes(BLOCKS, 4096).cuda(), torch.zeros((50, 4096), dtype=torch.uint8, device="cuda")
    wanted, blocks = cache.cpu(), torch.randperm(BLOCKS)[:50]
    ops.copy_blocks([cache], torch.stack((torch.arange(60), torch.arange(60) + 100), dim=1))
    wanted[100:160] = wanted[:60]
    ops.exchange_blocks([cache], torch.tensor([[0, 199], [-1, -1], [5, 6]]))
    wanted[[0, 199, 5, 6]] = wanted[[199, 0, 6, 5]]
    ops.gather_blocks([cache], rows, blocks)
    assert torch.equal(rows.cpu(), wanted[blocks])
    ops.scatter_blocks(rows, [cache], blocks.flip(0))
    wanted[blocks.flip(0)] = wanted[blocks]
    assert torch.equal(cache.cpu(), wanted)


@pytest.mark.parametrize(("offset", "width"), [(8, 64), (0, 72), (4, 100), (1, 33)])
def test_rows_that_are_not_aligned_arrive(offset: int, width: int):
    host, device = random_bytes(BLOCKS, 256).pin_memory(), random_bytes(BLOCKS, 256, seed=3).cuda()
    other = device.clone()
    pairs, wanted = random_pairs(100), device.cpu()
    wanted[pairs[:, 1], offset : offset + width] = host[pairs[:, 0], offset : offset + width]
    ops.swap_blocks([host[:, offset : offset + width]], [device[:, offset : offset + width]], pairs)
    assert torch.equal(device.cpu(), wanted)
    source = host.cuda()
    ops.swap_blocks([source[:, offset : offset + width]], [other[:, offset : offset + width]], pairs)
    assert torch.equal(other.cpu(), wanted)


def test_more_pieces_than_one_launch_takes_arrive():
    count = 5000
    host, device = random_bytes(count, 64).pin_memory(), torch.zeros((count, 64), dtype=torch.uint8, device="cuda")
    pairs = torch.stack((torch.randperm(count), torch.randperm(count)), dim=1)
    ops.swap_blocks([host], [device], pairs)
    assert torch.equal(device.cpu()[pairs[:, 1]], host[pairs[:, 0]])


def test_work_before_and_after_is_seen():
    """Written, copied, overwritten, copied back, with no wait of the host in between."""
    one, other = (torch.zeros((64, 1 << 16), dtype=torch.uint8, device="cuda") for _ in range(2))
    same = torch.arange(64).repeat(2, 1).T.contiguous()
    for value in range(1, 9):
        one.fill_(value)
        ops.swap_blocks([one], [other], same)
        one.fill_(0)
        ops.swap_blocks([other], [one], same.flip(0).contiguous())
        assert int(one.min()) == int(one.max()) == value
