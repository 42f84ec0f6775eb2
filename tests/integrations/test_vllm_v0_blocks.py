"""Blocks and allocators of the drop-in for V0 engines, without sequences."""

import sys
import time

import pytest

from blockyard.integrations.vllm_v0 import (
    Block,
    BlockAllocator,
    BlockSpaceManager,
    CpuGpuBlockAllocator,
    Device,
    DeviceAwareBlockAllocator,
    NaiveBlock,
    NaiveBlockAllocator,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
    SelfAttnBlockSpaceManager,
)

SIZE = 4


def test_a_physical_id_costs_the_same_in_a_large_pool():
    times = []
    for blocks in (1_000, 1_000_000):
        allocator = NaiveBlockAllocator(NaiveBlock, blocks, SIZE, range(blocks, 2 * blocks))
        began = time.thread_time()
        for _ in range(2_000):
            assert allocator.get_physical_block_id(2 * blocks - 1) == blocks - 1
        times.append(time.thread_time() - began)
    assert times[1] < 20 * times[0]


def test_a_cached_block_whose_access_time_changed_is_still_evicted():
    allocator = PrefixCachingBlockAllocator(2, SIZE)
    blocks = allocator.allocate_immutable_blocks(None, [[1] * SIZE, [2] * SIZE])
    ids = [block.block_id for block in blocks]
    allocator.mark_blocks_as_computed([])
    for block in blocks:
        allocator.free(block)
    allocator.mark_blocks_as_accessed([ids[1]], 7.0)
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(2)] == ids


def test_a_block_that_gets_full_takes_the_id_of_its_like():
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 8, 0, SIZE)
    first = allocator.allocate_immutable_block(None, [1, 2, 3, 4], Device.GPU)
    block = allocator.allocate_mutable_block(None, Device.GPU)
    block.append_token_ids([1, 2, 3])
    assert block.block_id != first.block_id
    block.append_token_ids([4])
    assert (block.block_id, block.content_hash) == (first.block_id, first.content_hash)
    assert allocator.get_num_free_blocks(Device.GPU) == 7


def test_keys_depend_on_what_is_before_and_on_the_extra_hash():
    key = PrefixCachingBlock.hash_block_tokens
    first = key(True, None, [1, 2, 3, 4])
    keys = {first, key(False, first, [1, 2, 3, 4]), key(True, None, [1, 2, 3, 5]), key(True, None, [1, 2, 3, 4], 7)}
    assert len(keys) == 4
    assert key(True, None, [1, 2, 3, 4]) == first


def test_a_token_that_is_not_known_yet_is_a_token_of_its_own():
    key = PrefixCachingBlock.hash_block_tokens
    assert len({key(True, None, [1, token]) for token in (-2, -1, 0, 1)}) == 4


def test_a_block_is_freed_once():
    allocator = CpuGpuBlockAllocator.create("naive", 4, 4, SIZE)
    block = allocator.allocate_mutable_block(None, Device.CPU)
    alias = NaiveBlock(None, [], SIZE, allocator.of(Device.CPU), block.block_id)
    assert block.block_id == 4
    allocator.free(block)
    for freed in (block, alias):
        with pytest.raises(AssertionError):
            allocator.free(freed)
    assert allocator.get_num_free_blocks(Device.CPU) == 4


def test_errors_are_v0s():
    allocator = PrefixCachingBlockAllocator(1, SIZE)
    with pytest.raises(ValueError, match="not belonged to GPU"):
        allocator.mark_blocks_as_accessed([0], 1.0)
    with pytest.raises(ValueError, match="'magic'"):
        CpuGpuBlockAllocator.create("magic", 1, 1, SIZE)
    with pytest.raises(ValueError, match="'v3'"):
        BlockSpaceManager.get_block_space_manager_class("v3")
    assert BlockSpaceManager.get_block_space_manager_class("SelfAttn") is SelfAttnBlockSpaceManager
    with pytest.raises(AssertionError):
        allocator.allocate_immutable_block(None, [1])
    with pytest.raises(ValueError, match="must be LRU"):
        PrefixCachingBlockAllocator(1, SIZE, None, Device.GPU)
    null = CpuGpuBlockAllocator.create("naive", 1, 0, SIZE).allocate_or_get_null_block()
    with pytest.raises(ValueError, match="null block"):
        null.append_token_ids([1])
    with pytest.raises(TypeError):
        BlockAllocator()  # type: ignore[abstract]


def test_hashless_free_blocks_are_taken_before_cached_ones():
    allocator = PrefixCachingBlockAllocator(3, SIZE)
    cached = allocator.allocate_immutable_block(None, [1] * SIZE)
    plain = [allocator.allocate_mutable_block(None) for _ in range(2)]
    allocator.mark_blocks_as_computed([])
    for block in (cached, *plain):
        allocator.free(block)
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(3)] == [2, 1, 0]


def test_the_objects_are_what_the_interfaces_say():
    allocator = CpuGpuBlockAllocator.create("naive", 2, 2, SIZE)
    assert isinstance(allocator, DeviceAwareBlockAllocator)
    assert isinstance(allocator.of(Device.CPU), BlockAllocator)
    null = allocator.allocate_or_get_null_block()
    assert isinstance(null, Block)
    assert isinstance(allocator.allocate_mutable_block(None, Device.GPU), Block)
    assert issubclass(PrefixCachingBlock, Block)
    assert issubclass(BlockAllocator.NoFreeBlocksError, ValueError)


def test_a_chain_longer_than_the_stack_is_forked_hashed_and_let_go():
    allocator = PrefixCachingBlockAllocator(200_000, 1)
    last = None
    for token in range(200_000):
        last = PrefixCachingBlock(last, [token], 1, allocator)
    assert last is not None
    assert last.content_hash is not None
    del last
    naive = NaiveBlockAllocator(NaiveBlock, 100_000, 1)
    blocks = naive.allocate_immutable_blocks(None, [[token] for token in range(100_000)])
    assert len(naive.fork(blocks[-1])) == len(blocks) > sys.getrecursionlimit()


@pytest.mark.parametrize("kind", ["naive", "prefix_caching"])
def test_what_cannot_be_built_takes_no_block(kind: str):
    allocator = CpuGpuBlockAllocator.create(kind, 4, 0, SIZE)
    with pytest.raises(AssertionError):
        allocator.allocate_immutable_blocks(None, [[1] * SIZE, [2] * (SIZE + 1)], Device.GPU)
    assert allocator.get_num_free_blocks(Device.GPU) == 4


def test_a_factory_makes_the_blocks_and_what_it_refuses_takes_none():
    made: list[int] = []

    class Own(NaiveBlock):
        pass

    def factory(**parts: object) -> Own:
        made.append(1)
        if len(made) > 1:
            raise RuntimeError("no more")
        return Own(**parts)  # type: ignore[arg-type]

    allocator = NaiveBlockAllocator(factory, 4, SIZE, [7, 3, 11, 5])
    block = allocator.allocate_immutable_block(None, [1, 2])
    assert (type(block), block.block_id, block.token_ids) == (Own, 3, [1, 2])
    with pytest.raises(RuntimeError):
        allocator.allocate_mutable_block(block)
    assert allocator.get_num_free_blocks() == 3
    assert [allocator.get_physical_block_id(name) for name in (3, 5, 7, 11)] == [0, 1, 2, 3]
    assert allocator.all_block_ids == {3, 5, 7, 11}
