"""CUDA graphs: what may be captured gives the same bytes at every replay, what may not says so."""

from functools import partial

import numpy as np
import pytest
import torch
from captures import capturing

from blockyard.engine import ops
from blockyard.engine.engine import CacheEngine
from blockyard.engine.ops import fallback
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import STRATEGIES, force_strategy
from blockyard.errors import CaptureError
from blockyard.layout.kv import KVLayout

WIDTH = 4096


@pytest.fixture(autouse=True)
def library() -> None:
    assert op_library().loaded, op_library().explain()


def rows_of(blocks: int, value: int = 0, *, pinned: bool = True) -> torch.Tensor:
    rows = torch.full((blocks, WIDTH), value, dtype=torch.uint8)
    return rows.pin_memory() if pinned else rows


def captured(work: object) -> torch.cuda.CUDAGraph:
    with capturing() as graph:
        work()
    return graph


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_to_and_from_page_locked_memory_are_replayed(strategy: str):
    host, back = rows_of(8), rows_of(8)
    device = torch.zeros((8, WIDTH), dtype=torch.uint8, device="cuda")
    mapping = torch.tensor([[0, 7], [1, 6]])

    def work() -> None:
        ops.swap_blocks([host], [device], mapping)
        ops.swap_blocks([device], [back], mapping.flip(1))

    with force_strategy(torch.cuda.current_device(), strategy):
        graph = captured(work)
    # Its numbers went into the graph.
    mapping.zero_()
    for value in (3, 4):
        host.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert int(device[6:].min()) == int(device[6:].max()) == value
        assert int(back[:2].min()) == value
        assert not device[:6].any()


def test_ops_within_the_device_are_replayed():
    cache = torch.arange(16, dtype=torch.uint8, device="cuda").repeat_interleave(WIDTH).view(16, WIDTH)
    rows = torch.zeros((3, WIDTH), dtype=torch.uint8, device="cuda")

    def work() -> None:
        ops.copy_blocks([cache], torch.tensor([[0, 1]]))
        ops.move_blocks([cache], torch.tensor([[2, 3], [3, 4]]))
        ops.exchange_blocks([cache], torch.tensor([[5, 6], [-1, -1]]))
        ops.gather_blocks([cache], rows, torch.tensor([1, 4, 6]))
        ops.scatter_blocks(rows, [cache], torch.tensor([8, 9, 10]))

    before = cache.clone()
    graph = captured(work)
    cache.copy_(before)
    graph.replay()
    torch.cuda.synchronize()
    assert cache[:, 0].tolist() == [0, 0, 2, 2, 3, 6, 5, 7, 0, 3, 5, 11, 12, 13, 14, 15]


def test_synchronous_calls_of_an_engine_are_replayed_and_open_transfers_are_refused():
    layout = KVLayout("kv_first", 2, block_size=16, num_kv_heads=2, head_size=64, dtype="float16")
    rows = np.random.default_rng(0).integers(0, 256, (4, layout.bytes_per_block), np.uint8)
    with CacheEngine(layout, device_blocks=4, host_blocks=4, device="cuda") as engine:
        engine.write("host", np.arange(4), rows)
        engine.memory.host_pool.wait(4)
        engine.transfers.synchronize()
        graph = captured(lambda: engine.run("swap_in", np.array([[0, 3], [1, 2]])))
        assert engine.transfers.open() == ()
        for tensor in engine.tensors:
            tensor.zero_()
        graph.replay()
        np.testing.assert_array_equal(engine.read("device", np.array([3, 2])), rows[:2])
        engine.submit("swap_out", np.array([[0, 0]]))
        with capturing(), pytest.raises(CaptureError, match="1 transfers are open"):
            engine.run("swap_in", np.array([[0, 3]]))


def test_asynchronous_calls_are_refused_and_neither_graph_nor_engine_is_the_worse_for_it():
    layout = KVLayout("kv_first", 2, block_size=16, num_kv_heads=2, head_size=64, dtype="float16")
    rows = np.random.default_rng(0).integers(0, 256, (1, layout.bytes_per_block), np.uint8)
    ids, pairs = np.array([0]), np.array([[0, 1]])
    with CacheEngine(layout, device_blocks=4, host_blocks=4, device="cuda") as engine:
        engine.write("device", ids, rows)
        transfer = engine.submit("swap_out", pairs)
        with capturing() as graph:
            for call in (
                partial(engine.submit, "swap_in", pairs),
                partial(engine.submit_read, "device", ids),
                partial(engine.submit_write, "device", ids, rows),
                partial(engine.read, "device", ids),
                partial(engine.write, "device", ids, rows),
                engine.poll,
                engine.fence,
                engine.close,
                transfer.wait,
                transfer.order_compute,
                lambda: transfer.done,
            ):
                with pytest.raises(CaptureError, match="before or after the capture"):
                    call()
        graph.replay()
        torch.cuda.synchronize()
        transfer.wait()
        np.testing.assert_array_equal(engine.read("host", np.array([1])), rows)


@pytest.mark.parametrize("to_host", [False, True])
def test_pageable_memory_is_refused(to_host: bool):
    host, device = rows_of(4, pinned=False), torch.zeros((4, WIDTH), dtype=torch.uint8, device="cuda")
    sides = ([device], [host]) if to_host else ([host], [device])
    with capturing(), pytest.raises(CaptureError, match="is not page-locked"):
        ops.swap_blocks(*sides, torch.tensor([[0, 1]]))
    # Neither the stream nor the device is the worse for it.
    ops.swap_blocks(*sides, torch.tensor([[0, 1]]))
    torch.cuda.synchronize()


def test_torch_calls_are_refused():
    cache = torch.zeros((4, WIDTH), dtype=torch.uint8, device="cuda")
    with capturing():
        for op in (fallback.BY_TORCH.copy, fallback.BY_TORCH.move, fallback.BY_TORCH.exchange):
            with pytest.raises(CaptureError, match="without the op library"):
                op([cache], torch.tensor([[0, 1]]))


def test_a_mapping_on_the_device_is_refused_under_capture_too():
    cache = torch.zeros((4, WIDTH), dtype=torch.uint8, device="cuda")
    pairs = torch.tensor([[0, 1]]).cuda()
    with capturing(), pytest.raises(ValueError, match="pairs are"):
        ops.copy_blocks([cache], pairs)
