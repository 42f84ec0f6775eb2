"""Many threads on one manager and on allocators: no deadlock, and the state is exact."""

import contextlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from many_threads import PATIENCE, hammer

from blockyard import BlockManager
from blockyard.allocators import BlockObserver, PrefixCachingAllocator, chain_keys
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError
from blockyard.integrations.vllm_v0 import (
    BlockTable,
    CpuGpuBlockAllocator,
    Device,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)
from blockyard.offload import OffloadManager

THREADS = 8


def engine(manager: BlockManager, *, swap: bool) -> Callable[[], None]:
    """One engine's life on a shared manager: admit, decode with tables of its own, fork, perhaps swap, free."""
    tables, slots = np.zeros((2, 16), np.int32), np.zeros(2, np.int64)

    def once() -> None:
        try:
            handles = manager.allocate(counts=[9, 5])
        except OutOfBlocksError:
            return
        manager.complete(manager.take_decision().ticket)
        for _ in range(5):
            try:
                manager.append(handles, block_tables=tables, out=slots)
            except OutOfBlocksError:
                break
            rows = [manager.block_table(int(handle)) for handle in handles]
            for i, row in enumerate(rows):
                assert tables[i, : len(row)].tolist() == row.tolist()
                assert slots[i] // 4 in row
        manager.complete(manager.take_decision().ticket)
        child = manager.fork(int(handles[0]), 1)
        assert manager.block_tables(child).shape[0] == 1
        group = np.concatenate([handles, child])
        if swap:
            # No room, or another thread's step is under way.
            with contextlib.suppress(OutOfBlocksError, SequenceStateError):
                manager.swap_out(group)
        manager.free(group)
        manager.complete(manager.take_decision().ticket)

    return once


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_engines_that_share_a_manager_leave_it_exact(prefix_caching: bool):
    manager = BlockManager(block_size=4, device_blocks=96, host_blocks=32, watermark=0.0, prefix_caching=prefix_caching)

    def watch() -> None:
        manager.check()
        manager.stats()
        list(iter(manager.pool()))

    hammer(*(engine(manager, swap=i % 2 == 0) for i in range(THREADS - 1)), watch)
    manager.complete(manager.take_decision().ticket)
    manager.check()
    assert (manager.stats().sequences, manager.pool().num_free, manager.pool("host").num_free) == (0, 96, 32)


def test_arrays_that_are_made_under_the_lock_are_no_deadlock():
    """numpy gives up the interpreter's lock for a large array; another thread takes it and wants the manager.

    In a process of its own: no thread could end the test otherwise.
    """
    code = """
import sys, threading, time
from blockyard import BlockManager

sys.setswitchinterval(1e-6)
manager = BlockManager(block_size=4, device_blocks=4096, watermark=0.0)
sequences = manager.allocate(counts=[4000, 4000])
end = time.monotonic() + 1.0

def run(call):
    while time.monotonic() < end:
        call()

calls = [lambda: manager.block_tables(sequences), lambda: manager.slot_mapping(sequences, 0, 4000)] * 2
threads = [threading.Thread(target=run, args=(call,)) for call in calls]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=5 * PATIENCE)


def test_tables_that_threads_keep_together_stay_whole():
    manager = BlockManager(block_size=4, device_blocks=4096, watermark=0.0)
    tables = np.zeros((4, 1024), np.int32)
    handles = manager.allocate(counts=[1, 1, 1, 1])
    appended: list[None] = []

    def append() -> None:
        if len(appended) < 1000:
            manager.append(handles, block_tables=tables)
            appended.append(None)

    def look() -> None:
        shown = manager.block_tables(handles)
        assert len(np.unique(shown[shown > 0])) == np.count_nonzero(shown)

    hammer(append, append, append, look)
    manager.check()
    assert [manager.num_tokens(int(handle)) for handle in handles] == [1 + len(appended)] * 4
    for row, handle in zip(tables, handles, strict=True):
        table = manager.block_table(int(handle))
        assert row[: len(table)].tolist() == table.tolist()


def test_threads_on_one_allocator_leave_it_empty():
    allocator = PrefixCachingAllocator(64)

    def shares() -> None:
        blocks = allocator.allocate(2)
        allocator.share(blocks)
        allocator.free(blocks)
        allocator.free(blocks)
        list(allocator.iter_upcoming())

    hammer(*[shares] * (THREADS - 1), allocator.check)
    allocator.check()
    assert allocator.num_free == 64


@pytest.mark.parametrize("kind", ["naive", "prefix_caching"])
def test_tables_of_threads_over_one_v0_allocator_give_all_back(kind: str):
    allocator = CpuGpuBlockAllocator.create(kind, 256, 64, 4)

    def life() -> None:
        table = BlockTable(4, allocator)
        table.allocate(list(range(10)))
        table.append_token_ids([10, 11, 12])
        child = table.fork()
        child.append_token_ids([13])
        table.free()
        child.free()

    hammer(*[life] * THREADS)
    assert allocator.get_num_free_blocks(Device.GPU) == 256


def test_chains_of_v0_blocks_that_threads_share_are_let_go_by_each_of_them():
    """The last thread drops a chain that is longer than the stack; nobody drops a block that another still uses."""
    allocator = PrefixCachingBlockAllocator(8, 1)

    def grow() -> PrefixCachingBlock:
        last = None
        for token in range(20_000):
            last = PrefixCachingBlock(last, [token], 1, allocator)
        return last

    shared = [grow()]
    expected = shared[0].content_hash

    def share() -> None:
        end = PrefixCachingBlock(shared[0], [7], 1, allocator)
        assert end.content_hash is not None
        assert shared[0].content_hash == expected

    def replace() -> None:
        shared[0] = grow()

    hammer(share, share, replace, replace)
    assert shared[0].prev_block.prev_block.content_hash is not None


def test_threads_on_one_offload_manager_leave_no_key_pending():
    manager = OffloadManager(32)

    def cycle(name: int) -> Callable[[], None]:
        keys = [b"%d" % (number % 40) for number in range(name, name + 6)]

        def once() -> None:
            store = manager.prepare_store(keys)
            if store is not None:
                assert len(store.keys) == len(store.chunks)
                manager.complete_store(store.keys)
            with contextlib.suppress(InvalidArgumentError):  # evicted meanwhile
                manager.prepare_load(keys)
                manager.complete_load(keys)
            manager.touch(keys)
            manager.lookup(keys)
            manager.evict(1)
            manager.forget(keys[:1])

        return once

    hammer(*(cycle(5 * number) for number in range(THREADS - 1)), manager.check)
    assert (manager.num_storing, manager.num_free) == (0, 32)


def test_threads_share_one_iterator_over_free_blocks():
    upcoming = iter(BlockManager(block_size=4, device_blocks=5000).pool())
    seen: list[int] = []

    def take() -> None:
        seen.extend(block for _ in range(10) if (block := next(upcoming, None)) is not None)

    hammer(*[take] * 4)
    assert sorted(seen) == list(range(5000))


def test_a_list_that_another_thread_changes_is_read_at_one_moment():
    """Every list that another thread ever shows is all ones or all twos."""
    tokens = [1] * 256
    keys = {tuple(chain_keys([token] * size, block_size=64)) for token in (1, 2) for size in (128, 256)}

    def change() -> None:
        tokens[:] = [2] * 128
        tokens[:] = [1] * 256

    def read() -> None:
        assert tuple(chain_keys(tokens, block_size=64)) in keys

    hammer(change, read, read)


def test_two_managers_that_write_to_one_array_refuse_or_take_turns():
    tables = np.zeros((4, 16), np.int32)

    def engine() -> Callable[[], None]:
        manager = BlockManager(block_size=4, device_blocks=64)
        handles = manager.allocate(counts=[60] * 4)

        def once() -> None:
            # Without the interpreter's lock, the second of two calls is refused.
            with contextlib.suppress(InvalidArgumentError):
                manager.block_tables(handles, out=tables)

        return once

    hammer(engine(), engine(), engine())


def test_threads_on_one_observer_plan_and_commit_only_what_fits():
    observer = BlockObserver(64)

    def use(first: int) -> Callable[[], None]:
        ids = np.arange(first, first + 8)

        def once() -> None:
            observer.use_ids(ids)
            plan = observer.plan("dense", 0)
            with contextlib.suppress(InvalidArgumentError):  # another thread has moved blocks meanwhile
                observer.commit(plan)
            assert len(set(observer.resolve(ids).tolist())) == 8
            observer.release_ids(ids)

        return once

    hammer(use(8), use(24), use(40), observer.check)
    observer.check()
