"""The host pool on a CUDA device: page-locked chunk by chunk, copied by every strategy, and let go of."""

import numpy as np
import pytest
import torch

from blockyard.engine import ops
from blockyard.engine.elastic.cache import ElasticCache
from blockyard.engine.engine import CacheEngine
from blockyard.engine.host_memory import HostMapping
from blockyard.engine.host_pool import CudaLocker, HostPool
from blockyard.engine.ops.strategy import STRATEGIES, force_strategy
from blockyard.errors import PageLockError
from blockyard.layout.kv import KVLayout

BLOCK = 64 << 10
CHUNK = 1 << 20
PER_CHUNK = CHUNK // BLOCK
CHUNKS = 4
DEVICE = torch.device("cuda:0")


class FailingLocker(CudaLocker):
    """Asks CUDA to lock one chunk a second time."""

    def __init__(self, at: int) -> None:
        super().__init__(DEVICE)
        self.at, self.calls = at, 0

    def lock(self, address: int, num_bytes: int) -> str:
        self.calls += 1
        if self.calls - 1 != self.at:
            return super().lock(address, num_bytes)
        assert not super().lock(address, num_bytes)
        reason = super().lock(address, num_bytes)
        assert not super().unlock(address)
        return reason


def pool_of(locker: CudaLocker | None = None, **options: object) -> HostPool:
    locker = locker or CudaLocker(DEVICE)
    return HostPool(CHUNKS * PER_CHUNK, BLOCK, locker=locker, chunk_bytes=CHUNK, **options)


def filled(pool: HostPool) -> torch.Tensor:
    random = np.random.default_rng(0).integers(0, 256, tuple(pool.rows.shape), np.uint8)
    pool.rows.copy_(torch.from_numpy(random))
    return torch.from_numpy(random)


def test_every_block_is_page_locked_and_closing_lets_go():
    pool = pool_of()
    pool.wait(pool.num_blocks)
    rows = pool.rows
    assert all(row.is_pinned() for row in rows)
    assert rows[-1, -1:].is_pinned()
    pool.close()
    assert not any(row.is_pinned() for row in rows)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_copies_across_chunks(strategy: str, scattered: bool):
    with pool_of() as pool:
        pool.wait(pool.num_blocks)
        wanted = filled(pool)
        order = np.random.default_rng(1).permutation(pool.num_blocks) if scattered else np.arange(pool.num_blocks)
        pairs = torch.from_numpy(np.column_stack((order, np.arange(pool.num_blocks))))
        device = torch.zeros_like(pool.rows, device="cuda")
        with force_strategy(torch.cuda.current_device(), strategy):
            # In order on both sides: pieces are merged, over the bounds of chunks too.
            ops.swap_blocks([pool.rows], [device], pairs)
            torch.cuda.synchronize()
            assert torch.equal(device.cpu(), wanted[pairs[:, 0]])
            pool.rows.zero_()
            ops.swap_blocks([device], [pool.rows], pairs.flip(1).contiguous())
            torch.cuda.synchronize()
        assert torch.equal(pool.rows, wanted)


@pytest.mark.parametrize("registered", [CHUNKS, CHUNKS - 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_that_others_registered_in_parts_is_copied_across_them(strategy: str, registered: int):
    memory, locker = HostMapping(CHUNKS * CHUNK), CudaLocker(DEVICE)
    rows = memory.tensor.view(-1, BLOCK)
    wanted = torch.from_numpy(np.random.default_rng(0).integers(0, 256, tuple(rows.shape), np.uint8))
    rows.copy_(wanted)
    # The library asks the driver where each registration ends: nobody has told it.
    assert [locker.lock(memory.address + n * CHUNK, CHUNK) for n in range(registered)] == [""] * registered
    try:
        device, same = torch.zeros_like(rows, device="cuda"), torch.arange(len(rows)).repeat(2, 1).T.contiguous()
        with force_strategy(torch.cuda.current_device(), strategy):
            ops.swap_blocks([rows], [device], same)
            torch.cuda.synchronize()
            assert torch.equal(device.cpu(), wanted)
            rows.zero_()
            ops.swap_blocks([device], [rows], same)
            torch.cuda.synchronize()
        assert torch.equal(rows, wanted)
    finally:
        assert [locker.unlock(memory.address + n * CHUNK) for n in range(registered)] == [""] * registered


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_elastic_memory_is_copied_across_its_chunks(strategy: str):
    pytest.importorskip("cuda.bindings.driver", reason="CUDA's bindings are not installed")
    layout = KVLayout("kv_first", 2, block_size=16, num_kv_heads=8, head_size=120, dtype="float16")
    blocks = 512
    with ElasticCache(layout, num_blocks=blocks, max_blocks=blocks, device="cuda") as cache:
        views = layout.views(cache.tensors)
        for number, view in enumerate(views):
            view.copy_((torch.arange(view.numel(), device="cuda") * (number + 1) % 251).view_as(view))
        host = [torch.empty(view.shape, dtype=torch.uint8, pin_memory=True) for view in views]
        same = torch.arange(blocks).repeat(2, 1).T.contiguous()
        with force_strategy(torch.cuda.current_device(), strategy):
            ops.swap_blocks(views, host, same)
            torch.cuda.synchronize()
            before = [view.cpu() for view in views]
            assert all(map(torch.equal, host, before))
            for view in views:
                view.zero_()
            ops.swap_blocks(host, views, same)
            torch.cuda.synchronize()
        assert all(torch.equal(view.cpu(), wanted) for view, wanted in zip(views, before, strict=True))
        del view, views


@pytest.mark.parametrize("at", [0, 2])
def test_a_chunk_that_cuda_refuses_is_an_error_that_leaves_no_trace(at: int):
    message = rf"chunk {at} of {CHUNKS} .*cudaHostRegister says .* \(712\); {at * CHUNK} of {CHUNKS * CHUNK} bytes are"
    with pytest.raises(PageLockError, match=message):
        pool_of(FailingLocker(at)).wait(CHUNKS * PER_CHUNK)
    # No later launch finds the error.
    assert int(torch.ones(10, device="cuda").sum()) == 10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pool_that_goes_on_unpinned_is_copied_from_all_the_same(strategy: str):
    with pool_of(FailingLocker(2), on_failure="unpinned") as pool:
        pool.wait(pool.num_blocks)
        assert pool.pinned_blocks == 2 * PER_CHUNK
        wanted = filled(pool)
        device = torch.zeros_like(pool.rows, device="cuda")
        same = torch.arange(pool.num_blocks).repeat(2, 1).T.contiguous()
        with force_strategy(torch.cuda.current_device(), strategy):
            ops.swap_blocks([pool.rows], [device], same.flip(0).contiguous())
        torch.cuda.synchronize()
        assert torch.equal(device.cpu(), wanted)


def test_an_engine_swaps_through_pageable_memory_if_it_is_asked_to():
    layout = KVLayout("kv_first", 4, block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    everything = np.arange(8)
    rows = np.random.default_rng(0).integers(0, 256, (8, layout.bytes_per_block), np.uint8)
    for pin_memory in (True, False):
        with CacheEngine(layout, device_blocks=8, host_blocks=8, device="cuda", pin_memory=pin_memory) as engine:
            engine.write("device", everything, rows)
            engine.submit("swap_out", np.column_stack((everything, everything))).wait()
            assert engine.memory.host_rows.is_pinned() == engine.memory.staging(1).is_pinned() == pin_memory
            for tensor in engine.tensors:
                tensor.zero_()
            engine.submit("swap_in", np.column_stack((everything, everything))).wait()
            np.testing.assert_array_equal(engine.read("device", everything), rows)
            engine.submit_write("device", everything[::-1].copy(), rows).wait()
            np.testing.assert_array_equal(engine.read("device", everything), rows[::-1])


def test_an_engine_works_while_its_host_blocks_are_made_ready():
    layout = KVLayout("kv_first", 4, block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    blocks = (3 << 30) // layout.bytes_per_block
    with CacheEngine(layout, device_blocks=8, host_blocks=blocks, device="cuda") as engine:
        rows = np.random.default_rng(0).integers(0, 256, (8, layout.bytes_per_block), np.uint8)
        everything = np.arange(8)
        engine.write("device", everything, rows)
        last = np.column_stack((everything, blocks - 1 - everything))
        engine.run("swap_out", np.column_stack((everything, everything)))
        engine.run("swap_out", last)
        assert engine.memory.host_pool.pinned_blocks == blocks
        for tensor in engine.tensors:
            tensor.zero_()
        engine.run("swap_in", last[:, ::-1].copy())
        np.testing.assert_array_equal(engine.read("device", everything), rows)
        np.testing.assert_array_equal(engine.read("host", everything), rows)
