"""Moves, exchanges, gathers and scatters on a CUDA device, and every strategy between host and device.

The shapes are small enough to run under compute-sanitizer.
"""

import numpy as np
import pytest
import torch
from captures import capturing

from blockyard.engine import ops
from blockyard.engine.cuda.calibrate import calibrate_device
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import STRATEGIES, force_strategy, table_path, use_cached

BLOCKS = 3000
UNITS = [1, 4, 8, 16]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    assert op_library().loaded, op_library().explain()


def caches_of(unit: int, blocks: int = BLOCKS, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One memory with the views of three caches side by side and a gap that must not change."""
    widths = [3 * unit, 40 * unit, unit]
    random = np.random.default_rng(seed)
    memory = torch.from_numpy(random.integers(0, 256, (blocks, sum(widths) + unit), np.uint8)).cuda()
    return memory, list(memory.split([*widths, unit], dim=1)[:3])


SHAPES = {
    "a long ring": lambda n: np.column_stack((np.arange(n), np.roll(np.arange(n), -1))),
    "a shift": lambda n: np.column_stack((np.arange(n - 1) + 1, np.arange(n - 1))),
    "a shift up": lambda n: np.column_stack((np.arange(n - 3), np.arange(n - 3) + 3)),
    "any": lambda n: np.column_stack((np.random.default_rng(2).integers(0, n, n), np.arange(n))),
    "into holes": lambda n: np.column_stack((np.arange(n // 2) + n // 2, np.arange(n // 2))),
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_moves_are_made_as_if_all_were_read_first(shape: str, unit: int):
    memory, views = caches_of(unit)
    pairs = torch.from_numpy(SHAPES[shape](BLOCKS))
    expected = memory.cpu()
    expected[pairs[:, 1], : 44 * unit] = expected[pairs[:, 0], : 44 * unit]
    ops.move_blocks(views, pairs)
    assert torch.equal(memory.cpu(), expected)


@pytest.mark.parametrize("unit", UNITS)
def test_exchanged_blocks_change_places_and_padding_is_skipped(unit: int):
    memory, views = caches_of(unit)
    pairs = torch.from_numpy(np.random.default_rng(1).permutation(BLOCKS).reshape(-1, 2)[:1400])
    expected = memory.cpu()
    expected[pairs, : 44 * unit] = expected[pairs.flip(1), : 44 * unit]
    ops.exchange_blocks(views, torch.cat((pairs, torch.full((100, 2), -1))))
    assert torch.equal(memory.cpu(), expected)


@pytest.mark.parametrize("where", ["cuda", "pinned", "pageable"])
@pytest.mark.parametrize("unit", UNITS)
def test_blocks_are_gathered_and_scattered(unit: int, where: str):
    memory, views = caches_of(unit)
    blocks = torch.from_numpy(np.random.default_rng(3).permutation(BLOCKS)[:700])
    rows = torch.zeros((700, 44 * unit), dtype=torch.uint8, pin_memory=where == "pinned")
    rows = rows.cuda() if where == "cuda" else rows
    ops.gather_blocks(views, rows, blocks)
    torch.cuda.synchronize()
    assert torch.equal(rows.cpu(), memory.cpu()[blocks, : 44 * unit])
    expected, back = memory.cpu(), blocks.flip(0)
    expected[back, : 44 * unit] = rows.cpu()
    ops.scatter_blocks(rows, views, back)
    assert torch.equal(memory.cpu(), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [16, 48, 4096, 8208, 24])
def test_every_strategy_delivers_the_same_bytes(strategy: str, width: int):
    random = np.random.default_rng(width)
    host = torch.from_numpy(random.integers(0, 256, (900, width), np.uint8)).pin_memory()
    device = torch.zeros((1000, width), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(host).pin_memory()
    pairs = torch.from_numpy(np.column_stack((random.permutation(900), random.permutation(1000)[:900])))
    with force_strategy(torch.cuda.current_device(), strategy):
        ops.swap_blocks([host], [device], pairs)
        ops.swap_blocks([device], [back], pairs.flip(1))
    torch.cuda.synchronize()
    assert torch.equal(back, host)
    assert torch.equal(device.cpu()[pairs[:, 1]], host[pairs[:, 0]])
    assert int(device.cpu().sum(dtype=torch.int64)) == int(host.sum(dtype=torch.int64))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_the_order_of_its_stream(strategy: str):
    """Out, overwrite, in again, with no wait of the host in between."""
    device = torch.full((64, 1 << 18), 1, dtype=torch.uint8, device="cuda")
    host = torch.zeros((64, 1 << 18), dtype=torch.uint8).pin_memory()
    pairs = torch.arange(64).repeat(2, 1).T.flip(0).contiguous()
    with force_strategy(torch.cuda.current_device(), strategy), torch.cuda.stream(torch.cuda.Stream()):
        device.fill_(3)
        ops.swap_blocks([device], [host], pairs)
        device.fill_(9)
        ops.swap_blocks([host], [device], pairs)
        result = device.sum(dtype=torch.int64)
        torch.cuda.current_stream().synchronize()
    assert int(host.min()) == int(host.max()) == 3
    assert int(result) == 3 * device.numel()


def test_new_ops_can_be_captured_in_a_graph():
    memory, views = caches_of(16, 64)
    rows = torch.zeros((4, 44 * 16), dtype=torch.uint8, device="cuda")
    before = memory.clone()
    with capturing() as graph:
        ops.exchange_blocks(views, torch.tensor([[0, 5], [-1, -1]]))
        ops.move_blocks(views, torch.tensor([[0, 1], [1, 2], [2, 0]]))
        ops.gather_blocks(views, rows, torch.tensor([0, 1, 2, 5]))
    memory.copy_(before)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(rows, before[[2, 5, 1, 0], : 44 * 16])


def test_calibration_leaves_a_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("blockyard.engine.cuda.calibrate.PIECE_BYTES", (4096, 65536))
    monkeypatch.setattr("blockyard.engine.cuda.calibrate.COUNTS", (16, 512))
    table = calibrate_device(torch.cuda.current_device(), print)
    assert table_path(table.device).is_file()
    assert use_cached(torch.cuda.current_device()) == table
    use_cached.cache_clear()
