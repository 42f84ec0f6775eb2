"""What the executor keeps of a step: columns of pairs, and the tiers that the copy engine holds."""

import numpy as np
import pytest

from blockyard import Pairs
from blockyard.engine.streams import WorkerStreams
from blockyard.errors import MappingError
from blockyard.executor.open_step import OpenStep, cached_tier, columns


def test_columns_are_contiguous_and_their_own():
    pairs = Pairs("device", "host", np.array([[1, 2], [3, 4]], np.int64))
    read, written = columns(pairs)
    assert (read.tolist(), written.tolist()) == ([1, 3], [2, 4])
    assert read.flags.c_contiguous
    assert written.flags.c_contiguous


def test_only_device_and_host_are_in_the_copy_engine():
    assert [cached_tier(tier) for tier in ("device", "host")] == ["device", "host"]
    with pytest.raises(MappingError, match="the external tier are not in the copy engine"):
        cached_tier("external")


def test_steps_share_nothing_and_have_one_part_the_submission():
    fence = WorkerStreams().fence()
    one, other = OpenStep(1, fence), OpenStep(2, fence)
    one.reads.append(7)
    one.awaited.add(("device", 3))
    assert (other.reads, other.awaited, other.parts) == ([], set(), 1)
