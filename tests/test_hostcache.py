"""Host copies as the second level of the prefix cache."""

from __future__ import annotations

import pytest
from managers import make_manager
from prompts import allocate_prompts

from blockyard import BlockManager, Pairs, PrefixCaching, StepDecision
from blockyard.errors import InvalidArgumentError
from blockyard.events import export_keys

SIZE = 4
PROMPT = list(range(100, 113))


def manager(device: int = 4, host: int = 8, **options: int) -> BlockManager:
    return make_manager(block_size=SIZE, device_blocks=device, host_blocks=host, watermark=0.0, host=True, **options)


def step(books: BlockManager) -> StepDecision:
    decision = books.take_decision()
    books.complete(decision.ticket)
    books.check()
    return decision


def run(books: BlockManager, tokens: list[int]) -> int:
    """Admit and compute a prompt; returns its handle."""
    handles, _ = allocate_prompts(books, [tokens])
    step(books)
    books.mark_computed(handles)
    books.check()
    return int(handles[0])


def swapped(books: BlockManager, tokens: list[int] = PROMPT) -> int:
    """A computed prompt whose blocks are on the host and nowhere else."""
    handle = run(books, tokens)
    books.swap_out([handle])
    step(books)
    books.free([int(books.allocate(counts=[books.pool().num_blocks * SIZE])[0])])
    step(books)
    return handle


def test_a_copy_outlives_its_sequence_and_comes_back_by_the_prompts_own_step() -> None:
    books = manager()
    books.free([swapped(books)])
    assert books.stats().cached_blocks == {"device": 0, "host": 3, "external": 0}
    assert books.pool("host").num_free == books.pool("host").num_blocks, "copies can be evicted"
    hit = books.prefix.lookup(PROMPT)
    assert (bool(hit), hit.tokens, hit.host_blocks) == (True, 12, 3)
    handles, cached = allocate_prompts(books, [PROMPT])
    decision = books.take_decision()
    assert cached.tolist() == [12]
    assert decision.swap_in[0].ids[:, 1].tolist() == books.block_table(int(handles[0]))[:3].tolist()
    assert books.stats().cached_blocks["device"] == 0, "nothing has landed"
    books.complete(decision.ticket)
    books.check()
    assert books.stats().cached_blocks["device"] == 3
    assert books.stats().loaded_blocks == 3
    assert len(step(books)) == 0
    hit = books.prefix.lookup(PROMPT)
    assert (hit.tokens, hit.host_blocks) == (12, 0)
    assert not books.prefix.lookup([7])


def test_a_copy_is_found_only_once_its_bytes_have_landed() -> None:
    books = manager(device=8)
    handle = run(books, PROMPT)
    books.swap_out([handle])
    decision = books.take_decision()
    assert books.stats().cached_blocks["host"] == 0
    books.complete(decision.ticket)
    assert books.stats().cached_blocks["host"] == 3


def test_a_copy_that_did_not_land_is_never_found() -> None:
    books = manager()
    handle = run(books, PROMPT)
    books.swap_out([handle])
    decision = books.take_decision()
    (pairs,) = decision.swap_out
    assert books.fail(decision.ticket, [Pairs("device", "host", pairs.ids[1:2])]).tolist() == [handle]
    books.free([handle, int(books.allocate(counts=[16])[0])])
    step(books)
    assert books.prefix.lookup(PROMPT).tokens == 4
    books.check()


def test_a_load_that_failed_leaves_no_hit_in_either_tier() -> None:
    books = manager()
    books.free([swapped(books)])
    handles, _ = allocate_prompts(books, [PROMPT])
    decision = books.take_decision()
    (pairs,) = decision.swap_in
    assert books.fail(decision.ticket, [Pairs("host", "device", pairs.ids[:1])]).tolist() == handles.tolist()
    books.free(handles)
    books.check()
    assert books.prefix.lookup(PROMPT).tokens == 0, "the copy that could not be read is not tried again"
    assert run(books, PROMPT)
    assert books.prefix.lookup(PROMPT).tokens == 12


def test_two_prompts_of_one_step_load_a_copy_once_and_the_batch_counts_it_once() -> None:
    books = manager(device=5)
    books.free([swapped(books)])
    handles, cached = allocate_prompts(books, [PROMPT, PROMPT])
    assert cached.tolist() == [12, 12]
    assert books.pool().num_free == 0
    tables = [books.block_table(int(handle)).tolist() for handle in handles]
    assert tables[0][:3] == tables[1][:3]
    assert len(step(books)) == 3


def test_a_sequence_that_is_swapped_out_again_moves_nothing_that_has_a_copy() -> None:
    books = manager(device=8)
    handle = run(books, PROMPT)
    books.swap_out([handle])
    step(books)
    books.swap_in([handle])
    assert len(step(books)) == 1, "three blocks were still on the device"
    books.swap_out([handle])
    assert len(step(books)) == 1, "three copies were still on the host"


def test_copies_are_the_first_to_go_when_the_host_is_full() -> None:
    books = manager(host=4)
    books.free([swapped(books)])
    other = run(books, list(range(200, 213)))
    books.swap_out([other])
    step(books)
    assert books.stats().evicted_blocks["host"] == 3
    assert books.prefix.lookup(PROMPT).tokens == 0


def test_offloaded_blocks_leave_the_device_for_the_host() -> None:
    books = manager()
    books.free([run(books, PROMPT)])
    assert books.prefix.offload(2) == 2
    decision = books.take_decision()
    assert len(decision.swap_out[0]) == 2
    assert books.prefix.lookup(PROMPT).tokens == 12
    books.complete(decision.ticket)
    books.check()
    assert books.stats().cached_blocks == {"device": 1, "host": 2, "external": 0}
    assert books.prefix.lookup(PROMPT).tokens == 12
    assert books.prefix.offload(0) == 0


def test_a_block_that_is_hit_while_it_is_offloaded_stays() -> None:
    books = manager(device=8)
    books.free([run(books, PROMPT)])
    assert books.prefix.offload(8) == 3
    handles, cached = allocate_prompts(books, [PROMPT])
    step(books)
    assert cached.tolist() == [12]
    assert books.stats().cached_blocks["device"] == 3
    books.free(handles)
    assert books.prefix.offload(8) == 0, "all of them have copies"
    books.check()


def test_reset_forgets_the_copies_too() -> None:
    books = manager()
    handle = swapped(books)
    assert not books.prefix.reset(), "the host's blocks are in use"
    books.free([handle])
    assert books.prefix.reset()
    assert books.prefix.lookup(PROMPT).tokens == 0
    books.check()


def test_events_tell_of_copies_what_they_told_of_the_blocks() -> None:
    books = manager(max_events=100)
    handle = run(books, PROMPT)
    first = books.prefix.take_events()
    books.swap_out([handle])
    step(books)
    copies = books.prefix.take_events()
    kinds = [copies.KINDS[kind] for kind in copies.kinds]
    assert kinds == ["stored"] * 3
    assert {copies.TIERS[tier] for tier in copies.tiers} == {"host"}
    assert copies.keys.tolist() == first.keys.tolist()
    assert copies.parents.tolist() == first.parents.tolist()
    assert [bytes(key) for key in copies.keys] == export_keys(PROMPT, block_size=SIZE)
    books.allocate(counts=[16])
    removed = books.prefix.take_events()
    assert removed.remaining.tolist() == [1, 1, 1], "the host has them all"


def test_a_snapshot_keeps_the_copies() -> None:
    books = manager()
    books.free([swapped(books)])
    other = BlockManager.restore(books.snapshot())
    assert other.prefix.lookup(PROMPT).tokens == 12
    handles, _ = allocate_prompts(other, [PROMPT])
    assert len(step(other)) == 3
    books.free([])
    assert len(handles) == 1


def test_copies_need_host_blocks() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"host_blocks is 0, must be at least 1 with PrefixCaching.host=True"
    ):
        BlockManager(block_size=SIZE, device_blocks=4, prefix_caching=PrefixCaching(host=True))


@pytest.mark.parametrize("caching", [False, True])
def test_offload_needs_copies_that_are_kept(caching: bool) -> None:
    books = BlockManager(block_size=SIZE, device_blocks=4, host_blocks=4, prefix_caching=caching)
    for blocks in (0, 3):
        with pytest.raises(InvalidArgumentError, match=f"max_blocks is {blocks}, but .*PrefixCaching.host=True"):
            books.prefix.offload(blocks)
