"""The cache engine on a CUDA device: blocks survive every way around, also while work is still queued."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from blockyard.engine.engine import CacheEngine
from blockyard.layout.kv import KINDS, KVLayout

BLOCKS = 48


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[CacheEngine]:
    layout = KVLayout(kind=request.param, num_layers=4, block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    with CacheEngine(layout, device_blocks=BLOCKS, host_blocks=BLOCKS, device="cuda") as made:
        yield made


def some_rows(engine: CacheEngine, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, engine.layout.bytes_per_block), np.uint8)


def pairs(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.column_stack((sources, targets)).astype(np.int64)


def test_the_host_cache_is_page_locked(engine: CacheEngine):
    assert engine.memory.host_rows.is_pinned()
    assert {tensor.device.type for tensor in engine.tensors} == {"cuda"}


def test_blocks_come_back_from_the_host(engine: CacheEngine):
    everything, shuffled = np.arange(BLOCKS), np.random.default_rng(1).permutation(BLOCKS)
    rows = some_rows(engine, BLOCKS)
    engine.write("device", everything, rows)
    engine.run("swap_out", pairs(everything, shuffled))
    np.testing.assert_array_equal(engine.read("host", shuffled), rows)
    for tensor in engine.tensors:
        tensor.zero_()
    engine.run("swap_in", pairs(shuffled, everything[::-1]))
    np.testing.assert_array_equal(engine.read("device", everything[::-1].copy()), rows)


def test_rows_may_be_changed_as_soon_as_a_write_returns(engine: CacheEngine):
    rows = some_rows(engine, 8)
    wanted = rows.copy()
    for start in range(0, BLOCKS, 8):
        engine.write("device", np.arange(start, start + 8), rows)
        rows[:] += 1
    for start in range(0, BLOCKS, 8):
        np.testing.assert_array_equal(engine.read("device", np.arange(start, start + 8)), wanted)
        wanted += 1


def test_the_host_is_not_written_while_a_load_still_reads_it(engine: CacheEngine):
    everything, rows = np.arange(BLOCKS), some_rows(engine, BLOCKS)
    engine.write("host", everything, rows)
    torch.cuda._sleep(100_000_000)
    engine.run("swap_in", pairs(everything, everything))
    engine.write("host", everything, some_rows(engine, BLOCKS, seed=1))
    np.testing.assert_array_equal(engine.read("device", everything), rows)


def test_the_host_is_not_read_before_a_store_has_landed(engine: CacheEngine):
    everything, rows = np.arange(BLOCKS), some_rows(engine, BLOCKS)
    engine.write("device", everything, rows)
    torch.cuda._sleep(100_000_000)
    engine.run("swap_out", pairs(everything, everything))
    np.testing.assert_array_equal(engine.read("host", everything), rows)


def test_copies_leave_other_blocks_alone(engine: CacheEngine):
    rows = some_rows(engine, BLOCKS)
    engine.write("device", np.arange(BLOCKS), rows)
    engine.run("copy", pairs(np.array([0, 0, 7]), np.array([40, 41, 3])))
    rows[[40, 41, 3]] = rows[[0, 0, 7]]
    np.testing.assert_array_equal(engine.read("device", np.arange(BLOCKS)), rows)
    assert engine.counters == {("device", "device"): (3, 3 * engine.layout.bytes_per_block)}


def test_closing_waits_for_queued_work(engine: CacheEngine):
    torch.cuda._sleep(100_000_000)
    engine.run("swap_out", pairs(np.arange(4), np.arange(4)))
    engine.close()
    assert torch.cuda.current_stream().query()
