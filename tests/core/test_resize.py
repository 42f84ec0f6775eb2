"""A device pool that grows and shrinks while sequences run."""

from __future__ import annotations

import numpy as np
import pytest
from managers import make_manager
from prompts import allocate_prompts

from blockyard import AllocStatus, BlockManager, CacheGroup
from blockyard.errors import InvalidArgumentError, OutOfBlocksError

SIZE = 4


def new_manager(device: int = 10, **options: object) -> BlockManager:
    options = {"watermark": 0.0, "prefix_caching": False} | options
    return make_manager(block_size=SIZE, device_blocks=device, host_blocks=8, **options)  # type: ignore[arg-type]


def land(manager: BlockManager) -> None:
    manager.complete(manager.take_decision().ticket)
    manager.check()


def test_growing_is_done_at_once():
    manager = new_manager(2)
    manager.allocate(counts=[2 * SIZE])
    progress = manager.defrag.resize(300)
    assert (progress.done, progress.blocks, progress.live, progress.extent) == (True, 300, 0, 300)
    assert (manager.pool().num_blocks, manager.pool().num_free) == (300, 298)
    handles = manager.allocate(counts=[298 * SIZE])
    assert manager.block_table(int(handles[0])).tolist() == list(range(2, 300))
    manager.check()


def test_shrinking_waits_for_what_sequences_use_and_gives_nothing_out_meanwhile():
    manager = new_manager(10, watermark=0.2)
    low, high = (int(handle) for handle in manager.allocate(counts=[3 * SIZE, 5 * SIZE]))
    progress = manager.defrag.resize(5)
    assert (progress.blocks, progress.live, progress.held, progress.extent, progress.done) == (5, 3, 0, 8, False)
    assert (manager.pool().num_blocks, manager.pool().num_free, manager.pool().reserved) == (5, 0, 1)
    assert manager.can_allocate(5 * SIZE).status == AllocStatus.NEVER
    assert manager.can_allocate(4 * SIZE).status == AllocStatus.LATER
    manager.free([low])
    assert manager.pool().num_free == 0, "three of low's places are for high's blocks beyond the end"
    with pytest.raises(OutOfBlocksError, match="0 of 5"):
        manager.allocate(counts=[1])
    manager.free([high])
    assert manager.defrag.progress().done
    assert manager.pool().num_free == 5
    manager.check()


def test_what_transfers_hold_beyond_the_end_is_waited_for():
    manager = new_manager(10)
    low, high = (int(handle) for handle in manager.allocate(counts=[5 * SIZE, 5 * SIZE]))
    land(manager)
    manager.swap_out([high])
    manager.defrag.resize(5)
    decision = manager.take_decision()
    progress = manager.defrag.progress()
    assert (progress.live, progress.held, progress.extent) == (0, 5, 10)
    manager.complete(decision.ticket)
    assert manager.defrag.progress().extent == 5
    manager.free([low])
    manager.swap_in([high])
    assert manager.block_table(high).tolist() == list(range(5))
    manager.check()


def test_pins_beyond_the_end_are_waited_for_and_their_keys_are_not_kept():
    manager = new_manager(10, prefix_caching=True, max_pinned=0.9)
    prompt = np.arange(4 * SIZE + 1, dtype=np.uint32)
    handles, _ = allocate_prompts(manager, [prompt])
    land(manager)
    manager.mark_computed(handles)
    pin = manager.pins.pin(int(handles[0]))
    manager.free(handles)
    assert manager.prefix.lookup(prompt).tokens == 4 * SIZE
    with pytest.raises(InvalidArgumentError, match="at least 5: 0 null, 4 pinned, 0 kept free by the watermark"):
        manager.defrag.resize(4)
    manager.defrag.resize(5)
    assert manager.defrag.progress().done
    other, _ = allocate_prompts(manager, [np.arange(100, 101, dtype=np.uint32)])
    manager.free(other)
    manager.pins.unpin(pin)
    manager.defrag.resize(2)
    assert manager.prefix.lookup(prompt).tokens == 2 * SIZE, "what is only cached beyond the end is dropped"
    manager.check()


def test_a_second_call_changes_what_the_first_has_not_ended():
    manager = new_manager(10)
    handles = manager.allocate(counts=[8 * SIZE])
    assert manager.defrag.resize(2).live == 6
    assert manager.defrag.resize(1).live == 7
    progress = manager.defrag.resize(6)
    assert (progress.live, progress.extent) == (2, 8)
    progress = manager.defrag.resize(12)
    assert progress.done
    assert manager.pool().num_free == 4
    manager.free(handles)
    assert manager.pool().num_free == 12
    manager.check()


@pytest.mark.parametrize("order", ["lowest", "fifo", "lru"])
@pytest.mark.parametrize("eviction", ["lru", "adaptive", "priority"])
def test_every_order_and_policy_goes_on_over_a_pool_that_changes(order: str, eviction: str):
    manager = new_manager(12, prefix_caching=True, reuse_order=order, eviction=eviction)
    rng = np.random.default_rng(3)
    for size in [12, 40, 9, 30, 6, 200, 12]:
        assert manager.defrag.resize(size).done
        for _ in range(12):
            prompt = np.arange(rng.integers(1, 5 * SIZE), dtype=np.uint32) + 100 * rng.integers(0, 9, dtype=np.uint32)
            handles, _ = allocate_prompts(manager, [prompt])
            land(manager)
            manager.mark_computed(handles)
            manager.free(handles)
            manager.check()
        assert manager.pool().num_free == size


@pytest.mark.parametrize(
    ("options", "blocks", "message"),
    [
        ({}, 0, "device_blocks is 0, must be at least 1"),
        ({"groups": [CacheGroup.sliding_window(8)]}, 1, "device_blocks is 1, must be at least 2: 1 null"),
        ({}, 1 << 30, "device_blocks is 1073741824, must be at most 1073741822"),
        ({}, -1, "blocks is -1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(options: dict[str, object], blocks: int, message: str):
    manager = new_manager(10, **options)
    with pytest.raises(InvalidArgumentError, match=message):
        manager.defrag.resize(blocks)
    assert manager.pool().num_blocks == 10


def test_a_shrink_that_is_under_way_ends_once_what_was_in_its_way_is_freed():
    manager = new_manager(10, watermark=0.3, max_pinned=0.4)
    handles = manager.allocate(counts=[2 * SIZE, 6 * SIZE])
    land(manager)
    manager.defrag.resize(5)
    manager.check()
    assert (manager.pool().num_blocks, manager.pool().reserved, manager.defrag.progress().extent) == (5, 1, 8)
    manager.free(handles)
    assert manager.defrag.resize(10).done
    assert (manager.pool().reserved, manager.pool().num_free) == (3, 10)
    manager.check()


def test_events_tell_of_what_is_dropped():
    manager = new_manager(8, prefix_caching=True, max_events=64)
    prompt = np.arange(6 * SIZE + 1, dtype=np.uint32)
    handles, _ = allocate_prompts(manager, [prompt])
    land(manager)
    manager.mark_computed(handles)
    manager.defrag.resize(4)
    manager.prefix.take_events()
    manager.free(handles)
    events = manager.prefix.take_events()
    assert sorted(events.blocks.tolist()) == [4, 5]
    manager.check()


def test_progress_shows_its_numbers():
    assert repr(new_manager(4).defrag.progress()) == "ResizeProgress(blocks=4, live=0, held=0, extent=4)"


def test_what_every_block_is_used_for_is_told_by_id():
    manager = new_manager(6, prefix_caching=True)
    prompt = np.arange(2 * SIZE + 1, dtype=np.uint32)
    handles, _ = allocate_prompts(manager, [prompt])
    land(manager)
    manager.mark_computed(handles)
    other = manager.allocate(counts=[2 * SIZE])
    manager.free(handles)
    manager.defrag.resize(4)
    assert manager.pool().uses().tolist() == [1, 1, 0, 3, 3]
    assert manager.pool().uses().dtype == np.uint8
    land(manager)
    manager.swap_out(other)
    assert manager.pool().uses().tolist() == [1, 1, 0, 2, 2]


def test_a_free_tail_without_a_number_is_all_that_is_free():
    manager = new_manager(12)
    handles = manager.allocate(counts=[SIZE] * 12)
    manager.free(handles[::2])
    land(manager)
    planned = 0
    while report := manager.defrag.run("free_tail", max_moves=2):
        planned += len(report)
        land(manager)
    tables = [manager.block_table(int(handle)).tolist() for handle in handles[1::2]]
    assert (planned, sorted(tables)) == (3, [[block] for block in range(6)])
    with pytest.raises(InvalidArgumentError, match='must be an int for the goal "max_id"'):
        manager.defrag.run("max_id")
