"""Many threads on one manager and on allocators: no deadlock, and the state is exact."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from blockyard import BlockManager
from blockyard.allocators import PrefixCachingAllocator
from blockyard.errors import OutOfBlocksError, SequenceStateError
from blockyard.integrations.vllm_v0 import BlockTable, CpuGpuBlockAllocator, Device

THREADS = 8
SECONDS = 1.0
PATIENCE = 60.0  # a deadlock, not a slow machine


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def hammer(*work: Callable[[], None]) -> None:
    """Repeats each of these in a thread of its own until the time is over."""
    end = time.monotonic() + SECONDS
    done: list[bool] = []

    def run(once: Callable[[], None]) -> None:
        while time.monotonic() < end:
            once()
        done.append(True)

    threads = [threading.Thread(target=run, args=(once,), daemon=True) for once in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread waits for ever"
    # What a thread raised, pytest reports as a warning, which fails the test.
    assert len(done) == len(work)


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
