"""Quotas: how many cached blocks a tenant may leave behind."""

from __future__ import annotations

import pytest
from managers import make_manager
from prompts import allocate_prompts

from blockyard import BlockManager, CacheGroup
from blockyard.errors import InvalidArgumentError

SIZE = 4
POLICIES = ("lru", "adaptive", "priority")
A, B = b"tenant a", b"tenant b"


def new_manager(device: int = 16, **options: str) -> BlockManager:
    return make_manager(block_size=SIZE, device_blocks=device, watermark=0.0, **options)


def prompt(first: int, blocks: int) -> list[int]:
    return [first * 1000 + i for i in range(blocks * SIZE + 1)]


def run(manager: BlockManager, tokens: list[int], salt: bytes | None) -> int:
    handles, _ = allocate_prompts(manager, [tokens], salt=salt)
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(handles)
    manager.check()
    return int(handles[0])


def leave(manager: BlockManager, tokens: list[int], salt: bytes | None) -> None:
    manager.free([run(manager, tokens, salt)])
    manager.check()


@pytest.mark.parametrize("eviction", POLICIES)
def test_beyond_its_quota_a_tenants_own_least_recently_used_blocks_go(eviction: str) -> None:
    manager = new_manager(eviction=eviction)
    manager.prefix.set_quota(A, 3)
    leave(manager, prompt(9, 2), B)
    leave(manager, prompt(1, 2), A)
    leave(manager, prompt(2, 2), A)
    assert manager.prefix.quota(A) == (3, 3)
    assert manager.prefix.lookup(prompt(1, 2), salt=A).tokens == 4, "the end of the older chain went"
    assert manager.prefix.lookup(prompt(2, 2), salt=A).tokens == 8
    assert manager.prefix.lookup(prompt(9, 2), salt=B).tokens == 8
    assert manager.stats().evicted_blocks["device"] == 1


def test_blocks_in_use_do_not_count() -> None:
    manager = new_manager()
    manager.prefix.set_quota(A, 1)
    handle = run(manager, prompt(1, 4), A)
    assert manager.prefix.quota(A) == (0, 1)
    other = run(manager, prompt(1, 4), A)
    manager.free([handle])
    assert manager.prefix.lookup(prompt(1, 4), salt=A).tokens == 16
    manager.free([other])
    assert manager.prefix.quota(A) == (1, 1)
    assert manager.prefix.lookup(prompt(1, 4), salt=A).tokens == 4


def test_a_lower_quota_holds_at_once_and_none_lets_everything_stay() -> None:
    manager = new_manager()
    manager.prefix.set_quota(A, None)
    leave(manager, prompt(1, 6), A)
    assert manager.prefix.quota(A) == (6, None)
    manager.prefix.set_quota(A, 2)
    assert manager.prefix.quota(A) == (2, 2)
    manager.prefix.set_quota(A, 0)
    assert manager.prefix.quota(A) == (0, 0)
    assert manager.stats().cached_blocks["device"] == 0
    manager.check()


def test_a_quota_out_of_range_is_refused_with_the_numbers() -> None:
    manager = new_manager(device=8)
    with pytest.raises(InvalidArgumentError, match="blocks is 9, must be at most the device's 8 blocks"):
        manager.prefix.set_quota(None, 9)
    with pytest.raises(InvalidArgumentError, match="blocks is -1, must be at least 0"):
        manager.prefix.set_quota(None, -1)
    with pytest.raises(InvalidArgumentError, match="prefix_caching is 0, must be 1 for quotas"):
        BlockManager(block_size=SIZE, device_blocks=8).prefix.set_quota(None, 1)
    assert manager.prefix.quota(None) is None


@pytest.mark.parametrize("eviction", POLICIES)
def test_windows_and_states_count_like_blocks_with_keys_and_go_with_them(eviction: str) -> None:
    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(16), CacheGroup.full_attention()]
    manager = new_manager(80, eviction=eviction, groups=groups)
    manager.prefix.set_quota(A, 21)
    leave(manager, prompt(9, 8), B)
    leave(manager, prompt(1, 8), A)
    assert manager.prefix.quota(A) == (20, 21), "eight blocks in two groups, and the last window"
    leave(manager, prompt(2, 8), A)
    assert manager.prefix.quota(A) == (20, 21)
    found = [manager.prefix.lookup(prompt(first, 8), salt=salt).tokens for first, salt in ((1, A), (2, A), (9, B))]
    assert found == [0, 32, 32]
    manager.prefix.set_quota(A, 0)
    assert manager.prefix.quota(A) == (0, 0)
    assert manager.prefix.lookup(prompt(2, 8), salt=A).tokens == 0
    manager.check()


def test_moved_windows_still_count() -> None:
    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(16)]
    manager = new_manager(80, groups=groups)
    manager.prefix.set_quota(A, 20)
    first = run(manager, prompt(9, 8), B)
    leave(manager, prompt(1, 8), A)
    manager.free([first])
    manager.prefix.set_quota(B, 0)
    assert manager.prefix.quota(A) == (12, 20)
    moved = manager.defrag.run("max_id", 16).planned
    manager.complete(manager.take_decision().ticket)
    manager.check()
    assert moved > 0
    assert manager.prefix.quota(A) == (12, 20)
    manager.prefix.set_quota(A, 0)
    assert manager.prefix.quota(A) == (0, 0)
