"""A device pool that grows and shrinks while sequences run."""

from __future__ import annotations

import numpy as np
import pytest

from blockyard import AllocStatus, BlockManager, InvalidArgumentError, OutOfBlocksError

SIZE = 4


def manager(device: int = 10, **options: object) -> BlockManager:
    return BlockManager(block_size=SIZE, device_blocks=device, host_blocks=8, **({"watermark": 0.0} | options))  # type: ignore[arg-type]


def land(books: BlockManager) -> None:
    books.complete(books.take_decision().ticket)
    books.check()


def test_growing_is_done_at_once():
    books = manager(2)
    books.allocate([2 * SIZE])
    progress = books.resize_device(300)
    assert (progress.done, progress.blocks, progress.live, progress.extent) == (True, 300, 0, 300)
    assert (books.num_blocks(), books.num_free()) == (300, 298)
    handles = books.allocate([298 * SIZE])
    assert books.block_table(int(handles[0])).tolist() == list(range(2, 300))
    books.check()


def test_shrinking_waits_for_what_sequences_use_and_gives_nothing_out_meanwhile():
    books = manager(10, watermark=0.2)
    low, high = (int(handle) for handle in books.allocate([3 * SIZE, 5 * SIZE]))
    progress = books.resize_device(5)
    assert (progress.blocks, progress.live, progress.held, progress.extent, progress.done) == (5, 3, 0, 8, False)
    assert (books.num_blocks(), books.num_free(), books.watermark_blocks) == (5, 0, 1)
    assert books.can_allocate(5 * SIZE) == AllocStatus.NEVER
    assert books.can_allocate(4 * SIZE) == AllocStatus.LATER
    books.free([low])
    assert books.num_free() == 0, "three of low's places are for high's blocks beyond the end"
    with pytest.raises(OutOfBlocksError, match="0 of 5"):
        books.allocate([1])
    books.free([high])
    assert books.resize_progress().done
    assert books.num_free() == 5
    books.check()


def test_what_transfers_hold_beyond_the_end_is_waited_for():
    books = manager(10)
    low, high = (int(handle) for handle in books.allocate([5 * SIZE, 5 * SIZE]))
    land(books)
    books.swap_out([high])
    books.resize_device(5)
    decision = books.take_decision()
    progress = books.resize_progress()
    assert (progress.live, progress.held, progress.extent) == (0, 5, 10)
    books.complete(decision.ticket)
    assert books.resize_progress().extent == 5
    books.free([low])
    books.swap_in([high])
    assert books.block_table(high).tolist() == list(range(5))
    books.check()


def test_pins_beyond_the_end_are_waited_for_and_their_keys_are_not_kept():
    books = manager(10, prefix_caching=True, max_pinned=0.9)
    prompt = np.arange(4 * SIZE + 1, dtype=np.uint32)
    handles, _ = books.allocate_prompts([prompt])
    land(books)
    books.mark_computed(handles)
    pin = books.pin(int(handles[0]), deadline=5)
    books.free(handles)
    assert books.cached_tokens(prompt) == 4 * SIZE
    with pytest.raises(InvalidArgumentError, match="at least 5: 0 null, 4 pinned, 0 kept free by the watermark"):
        books.resize_device(4)
    books.resize_device(5)
    assert books.resize_progress().done
    other, _ = books.allocate_prompts([np.arange(100, 101, dtype=np.uint32)])
    books.free(other)
    books.unpin(pin)
    books.resize_device(2)
    assert books.cached_tokens(prompt) == 2 * SIZE, "what is only cached beyond the end is dropped"
    books.check()


def test_a_second_call_changes_what_the_first_has_not_ended():
    books = manager(10)
    handles = books.allocate([8 * SIZE])
    assert books.resize_device(2).live == 6
    assert books.resize_device(1).live == 7
    progress = books.resize_device(6)
    assert (progress.live, progress.extent) == (2, 8)
    progress = books.resize_device(12)
    assert progress.done
    assert books.num_free() == 4
    books.free(handles)
    assert books.num_free() == 12
    books.check()


@pytest.mark.parametrize("order", ["lowest", "fifo", "lru"])
@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "adaptive", "priority"])
def test_every_order_and_policy_goes_on_over_a_pool_that_changes(order: str, eviction: str):
    books = manager(12, prefix_caching=True, reuse_order=order, eviction=eviction)
    rng = np.random.default_rng(3)
    for size in [12, 40, 9, 30, 6, 200, 12]:
        assert books.resize_device(size).done
        for _ in range(12):
            prompt = np.arange(rng.integers(1, 5 * SIZE), dtype=np.uint32) + 100 * rng.integers(0, 9, dtype=np.uint32)
            handles, _ = books.allocate_prompts([prompt])
            land(books)
            books.mark_computed(handles)
            books.free(handles)
            books.check()
        assert books.num_free() == size


@pytest.mark.parametrize(
    ("options", "blocks", "message"),
    [
        ({}, 0, "device_blocks is 0, must be at least 1"),
        ({"sliding_window": 8}, 1, "device_blocks is 1, must be at least 2: 1 null"),
        ({}, 1 << 30, "device_blocks is 1073741824, must be at most 1073741822"),
        ({}, -1, "-1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(options: dict[str, object], blocks: int, message: str):
    books = manager(10, **options)
    with pytest.raises((InvalidArgumentError, OverflowError), match=message):
        books.resize_device(blocks)
    assert books.num_blocks() == 10


def test_a_shrink_that_is_under_way_survives_a_restart():
    books = manager(10, watermark=0.3, max_pinned=0.4)
    handles = books.allocate([2 * SIZE, 6 * SIZE])
    land(books)
    books.resize_device(5)
    again = BlockManager.restore(books.snapshot())
    again.check()
    assert again.resize_progress() == books.resize_progress()
    assert (again.num_blocks(), again.watermark_blocks, again.resize_progress().extent) == (5, 1, 8)
    again.free(handles)
    assert again.resize_device(10).done
    assert (again.watermark_blocks, again.num_free()) == (3, 10)
    again.check()


def test_events_tell_of_what_is_dropped():
    books = manager(8, prefix_caching=True, events=64)
    prompt = np.arange(6 * SIZE + 1, dtype=np.uint32)
    handles, _ = books.allocate_prompts([prompt])
    land(books)
    books.mark_computed(handles)
    books.resize_device(4)
    books.take_events()
    books.free(handles)
    events = books.take_events()
    assert sorted(events.blocks.tolist()) == [4, 5]
    books.check()


def test_progress_shows_its_numbers():
    assert repr(manager(4).resize_progress()) == "ResizeProgress(blocks=4, live=0, held=0, extent=4)"


def test_what_every_block_is_used_for_is_told_by_id():
    books = manager(6, prefix_caching=True)
    prompt = np.arange(2 * SIZE + 1, dtype=np.uint32)
    handles, _ = books.allocate_prompts([prompt])
    land(books)
    books.mark_computed(handles)
    other = books.allocate([2 * SIZE])
    books.free(handles)
    books.resize_device(4)
    assert books.device_uses().tolist() == [1, 1, 0, 3, 3]
    assert books.device_uses().dtype == np.uint8
    land(books)
    books.swap_out(other)
    assert books.device_uses().tolist() == [1, 1, 0, 2, 2]
