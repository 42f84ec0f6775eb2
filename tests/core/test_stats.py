"""Counters of the manager, read in one call."""

import pytest
from prompts import allocate_prompts

from blockyard import BlockManager, Pairs
from blockyard.errors import InvalidArgumentError, OutOfBlocksError


def step(manager: BlockManager) -> None:
    manager.complete(manager.take_decision().ticket)


def new_manager() -> BlockManager:
    return BlockManager(
        block_size=4, device_blocks=8, host_blocks=8, external_blocks=8, watermark=0.0, prefix_caching=True
    )


def test_a_new_manager_has_counted_nothing() -> None:
    assert set(new_manager().stats().as_dict().values()) == {0}
    assert new_manager().stats() == new_manager().stats()


def test_hits_misses_merges_and_evictions_are_counted() -> None:
    manager = new_manager()
    for _ in range(2):
        handles, _ = allocate_prompts(manager, [list(range(9))])
        step(manager)
        manager.mark_computed(handles)
        manager.free(handles)
    handles, _ = allocate_prompts(manager, [list(range(50, 82))])
    stats = manager.stats()
    assert (stats.prompts, stats.hit_blocks, stats.missed_blocks) == (3, 2, 10)
    assert (stats.hit_tokens, stats.missed_tokens, stats.merged_blocks) == (8, 42, 0)
    assert stats.evicted_blocks == {"device": 2, "host": 0, "external": 0}
    assert (stats.cached_blocks["device"], stats.used_blocks["device"]) == (0, 8)
    assert stats.hit_rate == 2 / 12


def test_a_preempted_prompt_that_finds_its_own_blocks_is_no_hit_and_neither_is_a_failed_attempt() -> None:
    manager, prompt = new_manager(), list(range(9))
    handles, _ = allocate_prompts(manager, [prompt])
    step(manager)
    manager.mark_computed(handles)
    manager.free(handles)
    before = manager.stats()
    assert (before.prompts, before.hit_tokens, before.missed_tokens) == (1, 0, 9)
    with pytest.raises(OutOfBlocksError):
        manager.allocate(prompt + [1] * 40)
    again = manager.allocate(prompt, preempted=True)
    assert again.cached_tokens == 8
    stats = manager.stats()
    counted = ("prompts", "hit_blocks", "missed_blocks", "hit_tokens", "missed_tokens", "loaded_blocks", "hit_rate")
    assert [getattr(stats, name) for name in counted] == [getattr(before, name) for name in counted]
    manager.check()
    with pytest.raises(InvalidArgumentError, match="preempted need token ids"):
        manager.allocate(5, preempted=True)


def test_transfers_are_counted_by_kind_when_they_are_decided() -> None:
    manager = new_manager()
    (handle,) = manager.allocate(counts=[6])
    step(manager)
    fork = manager.fork(handle)
    manager.append([fork])
    assert manager.stats().copied_blocks == 0
    step(manager)
    assert manager.stats().copied_blocks == 1
    for tier in ("host", "external"):
        manager.swap_out([handle], to=tier)
        step(manager)
        manager.swap_in([handle])
        step(manager)
    stats = manager.stats()
    assert stats.swapped_out_blocks == {"host": 2, "external": 2}
    assert stats.swapped_in_blocks == {"host": 1, "external": 1}, "the shared block stayed on the device"
    assert stats.steps == 6
    named = stats.as_dict()
    assert [named[f"swapped_{way}_blocks_host_total"] for way in ("out", "in")] == [2, 1]
    assert [named[f"swapped_{way}_blocks_external_total"] for way in ("out", "in")] == [2, 1]


def test_the_usage_of_a_tier_is_the_part_that_is_used() -> None:
    manager = BlockManager(block_size=4, device_blocks=8, host_blocks=5, watermark=0.0)
    handles = manager.allocate(counts=[8, 12])
    step(manager)
    manager.swap_out(handles[:1])
    step(manager)
    stats, named = manager.stats(), manager.stats().as_dict()
    assert stats.num_blocks == {"device": 8, "host": 5, "external": 0}
    usage = {tier: named[f"{tier}_cache_usage_sys"] for tier in stats.num_blocks}
    assert usage == {"device": 3 / 8, "host": 2 / 5, "external": 0.0}


def test_open_tickets_hold_blocks_until_they_end() -> None:
    manager = new_manager()
    handles = manager.allocate(counts=[8])
    step(manager)
    manager.swap_out(handles)
    decision = manager.take_decision()
    stats = manager.stats()
    assert (stats.open_tickets, stats.leased_blocks) == ([decision.ticket], {"device": 2, "host": 2, "external": 0})
    assert stats.used_blocks == {"device": 2, "host": 2, "external": 0}
    manager.complete(decision.ticket, [Pairs("device", "host", decision.swap_out[0].ids)])
    stats = manager.stats()
    assert (stats.open_tickets, sum(stats.leased_blocks.values())) == ([], 0)
    assert stats.used_blocks == {"device": 0, "host": 2, "external": 0}


def test_the_peak_stays_when_the_blocks_have_gone() -> None:
    manager = new_manager()
    handles = manager.allocate(counts=[20, 4])
    manager.free(handles)
    manager.allocate(counts=[4])
    stats = manager.stats()
    assert (stats.used_blocks["device"], stats.peak_blocks["device"], stats.sequences) == (1, 6, 1)
    assert stats.as_dict()["peak_blocks_device"] == 6
    assert repr(stats).startswith("ManagerStats(sequences=1, ")
