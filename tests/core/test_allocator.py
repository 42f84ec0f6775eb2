"""The standalone allocators, from Python."""

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from blockyard._core import BlockAllocator
from blockyard.allocators import NaiveAllocator, PrefixCachingAllocator, chain_keys
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.events import export_keys

KINDS = [NaiveAllocator, PrefixCachingAllocator]
each = pytest.mark.parametrize("kind", KINDS)


@each
def test_blocks_go_out_and_come_back(kind: Callable[[int], BlockAllocator]):
    allocator = kind(8)
    blocks = allocator.allocate(3)
    assert (blocks.dtype, blocks.tolist()) == (np.int32, [0, 1, 2])
    allocator.share(blocks)
    allocator.free([0, 1, 2])
    assert (allocator.refs(0), allocator.num_free) == (1, 5)
    allocator.free(blocks)
    assert (allocator.num_free, allocator.num_blocks) == (8, 8)
    allocator.check()


@each
def test_a_batch_that_does_not_fit_changes_nothing(kind: Callable[[int], BlockAllocator]):
    allocator = kind(4)
    allocator.allocate(2)
    with pytest.raises(OutOfBlocksError, match="asked for 3 device blocks, 2 of 4 are free") as raised:
        allocator.allocate(3)
    assert (raised.value.wanted, raised.value.free, raised.value.total) == (3, 2, 4)
    with pytest.raises(InvalidArgumentError, match="device block 1 has 1 references, the call names 2"):
        allocator.free([0, 1, 1])
    with pytest.raises(InvalidArgumentError, match="block is 4, must be below 4"):
        allocator.free(4)
    assert (allocator.num_free, allocator.refs(0)) == (2, 1)


@each
def test_what_is_not_a_block_is_refused(kind: Callable[[int], BlockAllocator]):
    allocator = kind(4)
    for wrong in (-1, "0", np.array([-1], dtype=np.int32), [0.5], 1 << 40):
        with pytest.raises(InvalidArgumentError):
            allocator.free(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        allocator.refs(4)
    with pytest.raises(InvalidArgumentError):
        allocator.allocate(-1)


@pytest.mark.parametrize(
    ("reuse", "expected"), [("lowest", [1, 3]), ("fifo", [4, 5]), ("lru", [4, 5]), ("lifo", [1, 3])]
)
def test_upcoming_blocks_are_seen_without_being_taken(reuse: str, expected: list[int]):
    allocator = NaiveAllocator(6, reuse=reuse)  # type: ignore[arg-type]
    allocator.allocate(4)
    allocator.free([3, 1])
    assert allocator.upcoming(2).tolist() == expected
    assert allocator.allocate(2).tolist() == expected
    assert len(allocator.upcoming()) == allocator.num_free == 2


@pytest.mark.parametrize("reuse", ["lowest", "fifo", "lifo"])
@pytest.mark.parametrize("eviction", ["released", "accessed"])
def test_upcoming_shows_evictions_too(reuse: Literal["lowest", "fifo", "lifo"], eviction: Literal["released"]):
    allocator = PrefixCachingAllocator(6, reuse=reuse, eviction=eviction)
    keys = chain_keys(list(range(4)), block_size=1)
    blocks, _ = allocator.allocate_keyed(keys, range(1, 5), plain=1)
    allocator.mark_computed()
    allocator.free(blocks[[2, 4, 0, 3, 1]])
    expected = allocator.upcoming().tolist()
    assert (len(expected), len(set(expected))) == (6, 6)
    assert list(allocator.iter_upcoming()) == expected
    assert [int(allocator.allocate(1)[0]) for _ in expected] == expected


def test_a_lazy_iterator_reads_on_from_its_place():
    allocator = NaiveAllocator(300)
    free = allocator.iter_upcoming()
    assert iter(free) is free
    assert [next(free) for _ in range(3)] == [0, 1, 2]
    allocator.allocate(10)
    # The first 64 were read before; the next chunk begins at the 65th that is free by now.
    assert list(free) == [*range(3, 64), *range(74, 300)]
    assert next(free, None) is None
    allocator.allocate(290)
    assert list(allocator.iter_upcoming()) == []


def test_names_of_orders_are_checked():
    for options in ({"reuse": "random"}, {"tier": "tape"}):
        with pytest.raises(InvalidArgumentError):
            NaiveAllocator(4, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="released, accessed"):
        PrefixCachingAllocator(4, eviction="random")  # type: ignore[arg-type]


@each
def test_the_null_block_is_never_freed(kind: Callable[[int], BlockAllocator]):
    allocator = kind(4)
    null = allocator.null_block()
    assert allocator.null_block() == null
    with pytest.raises(InvalidArgumentError, match="null block"):
        allocator.free(null)
    assert allocator.num_free == 3


def test_a_shared_block_is_exchanged_before_it_is_written():
    allocator = NaiveAllocator(4)
    blocks = allocator.allocate(2)
    allocator.share(blocks[:1])
    assert allocator.make_writable(blocks).tolist() == [2, 1]
    assert [allocator.refs(block) for block in range(4)] == [1, 1, 1, 0]


def test_full_blocks_are_found_by_their_keys_once_computed():
    allocator = PrefixCachingAllocator(8)
    keys = chain_keys(list(range(8)), block_size=4)
    blocks, hits = allocator.allocate_keyed(keys, [4, 8], plain=1)
    assert (len(blocks), hits, allocator.find(keys).tolist()) == (3, 0, [])
    allocator.mark_computed(blocks)
    allocator.free(blocks)
    assert allocator.find(keys).tolist() == blocks[:2].tolist()
    assert (allocator.num_free, allocator.cost(keys), allocator.has_key(keys[0])) == (8, 2, True)
    again, hits = allocator.allocate_keyed(keys, [4, 8])
    assert (again.tolist(), hits, allocator.cost(keys)) == (blocks[:2].tolist(), 2, 0)
    assert allocator.lookups == (4, 2)
    assert not allocator.reset()
    allocator.free(again)
    assert allocator.reset()
    assert not allocator.has_key(keys[0])


def test_a_duplicate_takes_the_id_of_the_first():
    allocator = PrefixCachingAllocator(4)
    (key,) = chain_keys([1, 2], block_size=2)
    one, two = allocator.allocate(2).tolist()
    assert [allocator.publish(one, key), allocator.publish(two, key, 2)] == [one, one]
    assert (allocator.refs(one), allocator.num_free, allocator.is_computed(one)) == (2, 3, False)
    allocator.mark_computed()
    assert allocator.is_computed(one)


def test_eviction_by_access_takes_the_longest_prefix_of_the_oldest():
    allocator = PrefixCachingAllocator(4, reuse="lifo", eviction="accessed")
    keys = chain_keys(list(range(4)), block_size=1)
    blocks, _ = allocator.allocate_keyed(keys, range(1, 5))
    allocator.touch(blocks, 1.0)
    allocator.touch(blocks[3:], 2.0)
    allocator.free(blocks)
    assert allocator.upcoming().tolist() == [2, 1, 0, 3]
    assert allocator.allocate(2).tolist() == [2, 1]
    with pytest.raises(InvalidArgumentError):
        allocator.touch(0, float("nan"))


def test_keys_chain_and_depend_on_extra():
    tokens = np.arange(8, dtype=np.uint32)
    first, second = chain_keys(tokens, block_size=4)
    assert chain_keys(tokens[4:], block_size=4, parent=first) == [second]
    assert chain_keys(tokens, block_size=4, extra=b"image")[0] != first
    assert chain_keys(tokens[:3], block_size=4) == []
    assert first not in export_keys(tokens, block_size=4)
    for wrong in (b"short", b"x" * 33):
        with pytest.raises(InvalidArgumentError, match="must have 32"):
            chain_keys(tokens, block_size=4, parent=wrong)
    with pytest.raises(InvalidArgumentError):
        chain_keys(tokens, block_size=0)


def test_keys_and_depths_go_together():
    keys = chain_keys([1, 2], block_size=1)
    with pytest.raises(InvalidArgumentError, match="depths has 1 items, must have 2"):
        PrefixCachingAllocator(4).allocate_keyed(keys, [1])
