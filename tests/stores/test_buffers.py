"""Memory that batches use again."""

import numpy as np

from blockyard.workers import Buffers


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
