"""Memory that batches use again."""

import mmap

import numpy as np
import pytest

from blockyard.workers.buffers import Buffers, fresh_pages


def test_returned_memory_is_reused_for_requests_that_fit():
    buffers = Buffers()
    first = buffers.take(4, 1000)
    buffers.give(first[:, 8:])  # a view stands for all of it
    assert not np.shares_memory(buffers.take(4, 400), first), "far too large"
    second = buffers.take(3, 900)
    assert second.shape == (3, 900)
    assert second.flags.c_contiguous
    assert np.shares_memory(second, first)
    assert not np.shares_memory(buffers.take(3, 900), first), "it is in use"


def test_memory_of_any_shape_can_be_given_back():
    buffers = Buffers()
    for array in (np.zeros((2, 50), np.uint8), np.zeros((0, 50), np.uint8), None):
        buffers.give(array)
    assert buffers.take(1, 100).shape == (1, 100)
    assert buffers.take(0, 100).shape == (0, 100)
    buffers.clear()


def test_little_is_kept():
    buffers = Buffers()
    rows = [buffers.take(1, 100 << 20) for _ in range(4)]
    for row in rows:
        buffers.give(row)
    again = [buffers.take(1, 100 << 20) for _ in range(4)]
    assert sum(np.shares_memory(one, row) for one in again for row in rows) == 2


@pytest.mark.parametrize("num_bytes", [0, 1, mmap.PAGESIZE, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_fresh_memory_is_zeroed_and_starts_at_a_page_or_at_a_huge_one(num_bytes: int):
    memory = fresh_pages(num_bytes)
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    memory[:] = 1
    assert memory.ctypes.data % (2 << 20 if num_bytes >= 2 << 20 else mmap.PAGESIZE) == 0


def test_rows_that_were_given_back_still_start_at_a_page():
    buffers = Buffers()
    buffers.give(buffers.take(3, 1 << 20)[1:])
    assert buffers.take(3, 1 << 20).ctypes.data % (2 << 20) == 0


def test_too_much_memory_is_a_memory_error():
    with pytest.raises(MemoryError, match=f"cannot allocate {1 << 60} bytes"):
        fresh_pages(1 << 60)
