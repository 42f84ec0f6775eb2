"""A device and a host allocator behind one space of ids."""

import pytest

from blockyard._core import AllocatorPair
from blockyard.allocators import NaiveAllocator, PrefixCachingAllocator, chain_keys
from blockyard.errors import InvalidArgumentError, OutOfBlocksError

kinds = pytest.mark.parametrize("prefix_caching", [False, True])


@kinds
def test_ids_are_the_devices_first_then_the_hosts(prefix_caching: bool):
    pair = AllocatorPair(3, 5, prefix_caching=prefix_caching)
    assert [pair.locate(i) for i in (0, 2, 3, 7)] == [("device", 0), ("device", 2), ("host", 0), ("host", 4)]
    assert all(pair.absolute(*pair.locate(i)) == i for i in range(8))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="block is 8, must be below 8"):
        pair.locate(8)
    for tier, block in (("device", 3), ("host", 5), ("external", 0), ("tape", 0)):
        with pytest.raises(InvalidArgumentError):
            pair.absolute(tier, block)  # type: ignore[arg-type]


@kinds
def test_sharing_is_kept_over_a_swap_and_back(prefix_caching: bool):
    pair = AllocatorPair(4, 4, prefix_caching=prefix_caching)
    shared, own = pair.device.allocate(2).tolist()
    pair.device.share(shared)
    blocks, copies = pair.swap_out([shared, own, shared])
    assert (copies.src, copies.dst, copies.ids.tolist()) == ("device", "host", [[shared, 0], [own, 1]])
    assert blocks.tolist() == [0, 1, 0]
    assert (pair.device.num_free, pair.host.num_free, pair.host.refs(0)) == (4, 2, 2)
    back, copies = pair.swap_in(blocks)
    assert (copies.src, copies.dst, len(copies)) == ("host", "device", 2)
    assert back[0] == back[2] != back[1]
    pair.device.free(back)
    assert (pair.device.num_free, pair.host.num_free) == (4, 4)
    pair.check()


@kinds
def test_a_swap_that_does_not_fit_changes_nothing(prefix_caching: bool):
    pair = AllocatorPair(4, 1, prefix_caching=prefix_caching)
    blocks = pair.device.allocate(2)
    with pytest.raises(OutOfBlocksError, match="asked for 2 host blocks, 1 of 1 are free"):
        pair.swap_out(blocks)
    with pytest.raises(InvalidArgumentError):
        pair.swap_out([0, 0])
    with pytest.raises(InvalidArgumentError):
        pair.swap_out([pair.device.null_block()])
    assert (pair.device.num_free, pair.host.num_free) == (1, 1)
    assert [pair.device.refs(block) for block in range(3)] == [1, 1, 1]
    pair.check()


def test_each_side_is_an_allocator_of_its_kind():
    naive, caching = AllocatorPair(4, 4, reuse="lifo"), AllocatorPair(4, 4, prefix_caching=True, eviction="accessed")
    assert isinstance(naive.device, NaiveAllocator)
    assert isinstance(caching.host, PrefixCachingAllocator)
    host, keys = caching.host, chain_keys([1, 2], block_size=1)
    blocks, _ = host.allocate_keyed(keys, [1, 2])
    host.mark_computed()
    host.free(blocks)
    assert caching.host.find(keys).tolist() == blocks.tolist()
    assert len(caching.device.find(keys)) == 0
    naive.device.free(naive.device.allocate(3)[[0, 1, 2]])
    assert naive.device.upcoming().tolist() == list(naive.device.iter_upcoming()) == [2, 1, 0, 3]
    with pytest.raises(InvalidArgumentError):
        AllocatorPair(4, 4, eviction="random")  # type: ignore[arg-type]


def test_a_side_outlives_its_pair():
    host = AllocatorPair(1, 2).host
    assert host.allocate(2).tolist() == [0, 1]
