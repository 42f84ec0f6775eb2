"""Quotas: how many cached blocks a tenant may leave behind."""

from __future__ import annotations

import pytest
from managers import make_manager
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError

SIZE = 4
POLICIES = ("lru", "s3fifo", "arc", "lfu", "adaptive", "priority")
A, B = b"tenant a", b"tenant b"


def manager(device: int = 16, **options: str) -> BlockManager:
    return make_manager(block_size=SIZE, device_blocks=device, watermark=0.0, **options)


def prompt(first: int, blocks: int) -> list[int]:
    return [first * 1000 + i for i in range(blocks * SIZE + 1)]


def run(books: BlockManager, tokens: list[int], salt: bytes | None) -> int:
    handles, _ = allocate_prompts(books, [tokens], salt=salt)
    books.complete(books.take_decision().ticket)
    books.mark_computed(handles)
    books.check()
    return int(handles[0])


def leave(books: BlockManager, tokens: list[int], salt: bytes | None) -> None:
    books.free([run(books, tokens, salt)])
    books.check()


@pytest.mark.parametrize("eviction", POLICIES)
def test_beyond_its_quota_a_tenants_own_least_recently_used_blocks_go(eviction: str) -> None:
    books = manager(eviction=eviction)
    books.prefix.set_quota(A, 3)
    leave(books, prompt(9, 2), B)
    leave(books, prompt(1, 2), A)
    leave(books, prompt(2, 2), A)
    assert books.prefix.quota(A) == (3, 3)
    assert books.prefix.lookup(prompt(1, 2), salt=A).tokens == 4, "the end of the older chain went"
    assert books.prefix.lookup(prompt(2, 2), salt=A).tokens == 8
    assert books.prefix.lookup(prompt(9, 2), salt=B).tokens == 8
    assert books.stats().evicted_blocks["device"] == 1


def test_blocks_in_use_do_not_count() -> None:
    books = manager()
    books.prefix.set_quota(A, 1)
    handle = run(books, prompt(1, 4), A)
    assert books.prefix.quota(A) == (0, 1)
    other = run(books, prompt(1, 4), A)
    books.free([handle])
    assert books.prefix.lookup(prompt(1, 4), salt=A).tokens == 16
    books.free([other])
    assert books.prefix.quota(A) == (1, 1)
    assert books.prefix.lookup(prompt(1, 4), salt=A).tokens == 4


def test_a_lower_quota_holds_at_once_and_none_lets_everything_stay() -> None:
    books = manager()
    books.prefix.set_quota(A, None)
    leave(books, prompt(1, 6), A)
    assert books.prefix.quota(A) == (6, None)
    books.prefix.set_quota(A, 2)
    assert books.prefix.quota(A) == (2, 2)
    books.prefix.set_quota(A, 0)
    assert books.prefix.quota(A) == (0, 0)
    assert books.stats().cached_blocks["device"] == 0
    books.check()


def test_quotas_outlive_a_snapshot() -> None:
    books = manager()
    books.prefix.set_quota(A, 4)
    books.prefix.set_quota(None, 2)
    leave(books, prompt(1, 3), A)
    leave(books, prompt(2, 3), None)
    other = BlockManager.restore(books.snapshot())
    assert (other.prefix.quota(A), other.prefix.quota(None), other.prefix.quota(B)) == ((3, 4), (2, 2), None)
    leave(other, prompt(3, 3), A)
    assert other.prefix.quota(A) == (4, 4)


def test_a_quota_out_of_range_is_refused_with_the_numbers() -> None:
    books = manager(device=8)
    with pytest.raises(InvalidArgumentError, match="quota is 9, must be at most the device's 8 blocks"):
        books.prefix.set_quota(None, 9)
    with pytest.raises(InvalidArgumentError, match="blocks is -1, must be at least 0"):
        books.prefix.set_quota(None, -1)
    with pytest.raises(InvalidArgumentError, match="with prefix caching"):
        BlockManager(block_size=SIZE, device_blocks=8).prefix.set_quota(None, 1)
    assert books.prefix.quota(None) is None
