"""Host copies as the second level of the prefix cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
from managers import make_manager
from prompts import allocate_prompts

from blockyard import BlockManager, CacheGroup, Pairs, PrefixCaching, StepDecision
from blockyard.errors import InvalidArgumentError
from blockyard.events import export_keys

SIZE = 4
PROMPT = list(range(100, 113))


def new_manager(device: int = 4, host: int = 8, **options: Any) -> BlockManager:
    options = {"host_copies_per_step": 0, **options}
    return make_manager(block_size=SIZE, device_blocks=device, host_blocks=host, watermark=0.0, host=True, **options)


def step(manager: BlockManager) -> StepDecision:
    decision = manager.take_decision()
    manager.complete(decision.ticket)
    manager.check()
    return decision


def run(manager: BlockManager, tokens: list[int]) -> int:
    """Admit and compute a prompt; returns its handle."""
    handles, _ = allocate_prompts(manager, [tokens])
    step(manager)
    manager.mark_computed(handles)
    manager.check()
    return int(handles[0])


def swapped(manager: BlockManager, tokens: list[int] = PROMPT) -> int:
    """A computed prompt whose blocks are on the host and nowhere else."""
    handle = run(manager, tokens)
    manager.swap_out([handle])
    step(manager)
    manager.free([int(manager.allocate(counts=[manager.pool().num_blocks * SIZE])[0])])
    step(manager)
    return handle


def test_a_copy_outlives_its_sequence_and_comes_back_by_the_prompts_own_step() -> None:
    manager = new_manager()
    manager.free([swapped(manager)])
    assert manager.stats().cached_blocks == {"device": 0, "host": 3, "external": 0}
    assert manager.pool("host").num_free == manager.pool("host").num_blocks, "copies can be evicted"
    hit = manager.prefix.lookup(PROMPT)
    assert (bool(hit), hit.tokens, hit.host_blocks) == (True, 12, 3)
    handles, cached = allocate_prompts(manager, [PROMPT])
    decision = manager.take_decision()
    assert cached.tolist() == [12]
    assert decision.swap_in[0].ids[:, 1].tolist() == manager.block_table(int(handles[0]))[:3].tolist()
    assert manager.stats().cached_blocks["device"] == 0, "nothing has landed"
    manager.complete(decision.ticket)
    manager.check()
    assert manager.stats().cached_blocks["device"] == 3
    assert manager.stats().loaded_blocks == 3
    assert len(step(manager)) == 0
    hit = manager.prefix.lookup(PROMPT)
    assert (hit.tokens, hit.host_blocks) == (12, 0)
    assert not manager.prefix.lookup([7])


def test_a_copy_is_found_only_once_its_bytes_have_landed() -> None:
    manager = new_manager(device=8)
    handle = run(manager, PROMPT)
    manager.swap_out([handle])
    decision = manager.take_decision()
    assert manager.stats().cached_blocks["host"] == 0
    manager.complete(decision.ticket)
    assert manager.stats().cached_blocks["host"] == 3


def test_a_copy_that_did_not_land_is_never_found() -> None:
    manager = new_manager()
    handle = run(manager, PROMPT)
    manager.swap_out([handle])
    decision = manager.take_decision()
    (pairs,) = decision.swap_out
    assert manager.complete(decision.ticket, [Pairs("device", "host", pairs.ids[1:2])]).tolist() == [handle]
    manager.free([handle, int(manager.allocate(counts=[16])[0])])
    step(manager)
    assert manager.prefix.lookup(PROMPT).tokens == 4
    manager.check()


def test_a_load_that_failed_leaves_no_hit_in_either_tier() -> None:
    manager = new_manager()
    manager.free([swapped(manager)])
    handles, _ = allocate_prompts(manager, [PROMPT])
    decision = manager.take_decision()
    (pairs,) = decision.swap_in
    assert manager.complete(decision.ticket, [Pairs("host", "device", pairs.ids[:1])]).tolist() == handles.tolist()
    manager.free(handles)
    manager.check()
    assert manager.prefix.lookup(PROMPT).tokens == 0, "the copy that could not be read is not tried again"
    assert run(manager, PROMPT)
    assert manager.prefix.lookup(PROMPT).tokens == 12


def test_two_prompts_of_one_step_load_a_copy_once_and_the_batch_counts_it_once() -> None:
    manager = new_manager(device=5)
    manager.free([swapped(manager)])
    handles, cached = allocate_prompts(manager, [PROMPT, PROMPT])
    assert cached.tolist() == [12, 12]
    assert manager.pool().num_free == 0
    tables = [manager.block_table(int(handle)).tolist() for handle in handles]
    assert tables[0][:3] == tables[1][:3]
    assert len(step(manager)) == 3


def test_a_sequence_that_is_swapped_out_again_moves_nothing_that_has_a_copy() -> None:
    manager = new_manager(device=8)
    handle = run(manager, PROMPT)
    manager.swap_out([handle])
    step(manager)
    manager.swap_in([handle])
    assert len(step(manager)) == 1, "three blocks were still on the device"
    manager.swap_out([handle])
    assert len(step(manager)) == 1, "three copies were still on the host"


def test_copies_are_the_first_to_go_when_the_host_is_full() -> None:
    manager = new_manager(host=4)
    manager.free([swapped(manager)])
    other = run(manager, list(range(200, 213)))
    manager.swap_out([other])
    step(manager)
    assert manager.stats().evicted_blocks["host"] == 3
    assert manager.prefix.lookup(PROMPT).tokens == 0


def test_offloaded_blocks_leave_the_device_for_the_host() -> None:
    manager = new_manager()
    manager.free([run(manager, PROMPT)])
    assert manager.prefix.offload(2) == 2
    decision = manager.take_decision()
    assert len(decision.swap_out[0]) == 2
    assert manager.prefix.lookup(PROMPT).tokens == 12
    manager.complete(decision.ticket)
    manager.check()
    assert manager.stats().cached_blocks == {"device": 1, "host": 2, "external": 0}
    assert manager.prefix.lookup(PROMPT).tokens == 12
    assert manager.prefix.offload(0) == 0


def test_beyond_the_bound_the_ends_of_prompts_are_dropped_and_counted() -> None:
    manager = new_manager(device=16, host=64, host_copies_per_step=4)
    prompt = list(range(100, 100 + 16 * SIZE))
    manager.free([run(manager, prompt)])
    assert [len(pairs) for pairs in step(manager).swap_out] == [2], "the reserve, an eighth of the device"
    manager.allocate(counts=[8 * SIZE])
    assert [len(pairs) for pairs in step(manager).swap_out] == [4]
    assert manager.stats().uncopied_blocks == 2
    assert manager.prefix.lookup([*prompt, 7]).tokens == 12 * SIZE, "the end is gone, and the rest is found"


def test_a_step_that_takes_no_more_than_is_copied_ahead_loses_nothing() -> None:
    manager = new_manager(device=32, host=128, host_copies_per_step=4)
    prompts = [[at, *range(100, 111)] for at in range(40)]
    for prompt in prompts:
        manager.free([run(manager, prompt)])
    assert [manager.prefix.lookup([*prompt, 7]).tokens for prompt in prompts] == [12] * 40
    step(manager)
    assert len(step(manager)) == 0, "an idle manager copies once"


def test_blocks_that_are_being_copied_can_be_taken() -> None:
    manager = new_manager(device=16, host=32, host_copies_per_step=8)
    manager.free([run(manager, list(range(100, 100 + 16 * SIZE)))])
    decision = manager.take_decision()
    assert [len(pairs) for pairs in decision.swap_out] == [2], "an eighth of the device"
    assert manager.can_allocate(16 * SIZE)
    manager.allocate(counts=[16 * SIZE])
    later = manager.take_decision()
    assert list(later.after) == [decision.ticket, later.ticket], "it takes blocks that it copies itself, too"
    assert [len(pairs) for pairs in later.swap_out] == [8]
    for ticket in (decision.ticket, later.ticket):
        manager.complete(ticket)
        manager.check()
    assert manager.prefix.lookup(list(range(100, 100 + 16 * SIZE))).tokens == 8 * SIZE, "the end has no copy"
    assert manager.prefix.count_unfindable() == 2, "copied ahead, before the bound was reached"


def test_a_step_that_takes_expected_blocks_copies_none_of_them_itself() -> None:
    for expected in (0, 8):
        manager = new_manager(device=16, host=112, host_copies_per_step=16)
        manager.free([run(manager, list(range(100, 100 + 16 * SIZE)))])
        manager.prefix.expect(expected)
        assert sum(map(len, step(manager).swap_out)) == max(expected, 2), "at least an eighth of the device"
        manager.allocate(counts=[8 * SIZE])
        later = manager.take_decision()
        assert (later.ticket in later.after) == (expected == 0)
        manager.complete(later.ticket)
        assert manager.prefix.lookup(list(range(100, 101 + 16 * SIZE))).tokens == 16 * SIZE
        manager.check()


def test_the_bound_is_kept_and_shown() -> None:
    options = PrefixCaching(host=True, host_copies_per_step=3)
    assert "host_copies_per_step=3" in repr(options)
    manager = new_manager(device=32, host=32, host_copies_per_step=3)
    for at in range(12):
        manager.free([run(manager, [at, *range(100, 111)])])
    assert manager.stats().swapped_out_blocks["host"] > 0


def test_a_block_that_is_hit_while_it_is_offloaded_stays() -> None:
    manager = new_manager(device=8)
    manager.free([run(manager, PROMPT)])
    assert manager.prefix.offload(8) == 3
    handles, cached = allocate_prompts(manager, [PROMPT])
    step(manager)
    assert cached.tolist() == [12]
    assert manager.stats().cached_blocks["device"] == 3
    manager.free(handles)
    assert manager.prefix.offload(8) == 0, "all of them have copies"
    manager.check()


def test_reset_forgets_the_copies_too() -> None:
    manager = new_manager()
    handle = swapped(manager)
    assert not manager.prefix.reset(), "the host's blocks are in use"
    manager.free([handle])
    assert manager.prefix.reset()
    assert manager.prefix.lookup(PROMPT).tokens == 0
    manager.check()


def test_events_tell_of_copies_what_they_told_of_the_blocks() -> None:
    manager = new_manager(max_events=100)
    handle = run(manager, PROMPT)
    first = manager.prefix.take_events()
    manager.swap_out([handle])
    step(manager)
    copies = manager.prefix.take_events()
    kinds = [copies.KINDS[kind] for kind in copies.kinds]
    assert kinds == ["stored"] * 3
    assert {copies.TIERS[tier] for tier in copies.tiers} == {"host"}
    assert copies.keys.tolist() == first.keys.tolist()
    assert copies.parents.tolist() == first.parents.tolist()
    assert [bytes(key) for key in copies.keys] == export_keys(PROMPT, block_size=SIZE)
    manager.allocate(counts=[16])
    removed = manager.prefix.take_events()
    assert removed.remaining.tolist() == [1, 1, 1], "the host has them all"


@pytest.mark.parametrize(("host", "groups"), [(0, [CacheGroup.full_attention()]), (1, [CacheGroup.recurrent()])])
def test_copies_need_host_blocks(host: int, groups: list[CacheGroup]) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"host_blocks is {host}, must be at least {host + 1} with PrefixCaching.host=True"
    ):
        BlockManager(
            block_size=SIZE, device_blocks=4, host_blocks=host, groups=groups, prefix_caching=PrefixCaching(host=True)
        )


@pytest.mark.parametrize("caching", [False, True])
def test_offload_needs_copies_that_are_kept(caching: bool) -> None:
    manager = BlockManager(block_size=SIZE, device_blocks=4, host_blocks=4, prefix_caching=caching)
    for blocks in (0, 3):
        with pytest.raises(InvalidArgumentError, match=f"max_blocks is {blocks}, but .*PrefixCaching.host=True"):
            manager.prefix.offload(blocks)
        with pytest.raises(InvalidArgumentError, match=f"num_blocks is {blocks}, but .*PrefixCaching.host=True"):
            manager.prefix.expect(blocks)


@pytest.mark.parametrize("eviction", ["lru", "adaptive", "priority"])
@pytest.mark.parametrize("host", [1, 4])
def test_device_and_host_hit_as_one_pool_and_hold_nothing_that_cannot_be_found(eviction: str, host: int) -> None:
    rng = random.Random(host)
    prompts = [[at * 1000 + token for token in range(rng.randint(2, 8) * SIZE + 1)] for at in range(40)]
    order = [prompts[min(int(rng.expovariate(0.1)), 39)] for _ in range(400)]
    pools = [new_manager(device=30, host=30 * host, eviction=eviction, host_copies_per_step=99)]
    options = PrefixCaching(eviction=eviction)
    pools.append(BlockManager(block_size=SIZE, device_blocks=30 + 30 * host, watermark=0.0, prefix_caching=options))
    for prompt in order:
        for manager in pools:
            manager.free([run(manager, prompt)])
        assert pools[0].prefix.count_unfindable() == 0
    two, one = (manager.stats().hit_blocks for manager in pools)
    assert two >= 0.9 * one > 0


def test_a_loop_that_fits_both_tiers_is_found_whole_whatever_a_step_takes() -> None:
    prompts = [[at * 1000 + token for token in range(20 * SIZE + 1)] for at in range(7)]
    manager = new_manager(device=32, host=160, host_copies_per_step=999)
    for turn in range(3):
        for prompt in prompts:
            assert manager.prefix.lookup(prompt).tokens == (20 * SIZE if turn else 0)
            manager.free([run(manager, prompt)])


def test_what_a_failed_copy_leaves_behind_is_cut_off() -> None:
    manager = new_manager(device=8, host=32, host_copies_per_step=99)
    manager.free([run(manager, list(range(8 * SIZE)))])
    step(manager)
    manager.prefix.offload(2)  # after the reserve of one block, the end of the prompt
    step(manager)
    handles = manager.allocate(counts=[8 * SIZE])
    decision = manager.take_decision()
    assert [len(pairs) for pairs in decision.swap_out] == [5], "its beginning, evicted by what was allocated"
    manager.fail(decision.ticket)
    manager.check()
    manager.free(handles)
    assert manager.prefix.count_unfindable() == 3
    for at in range(1, 12):  # each eviction pays for a look at two blocks
        manager.free([run(manager, [at * 1000 + token for token in range(6 * SIZE)])])
    assert manager.prefix.count_unfindable() == 0
