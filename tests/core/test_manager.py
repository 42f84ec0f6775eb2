"""The manager's rules, one by one; `tests/property` drives it at random beside the reference model."""

import re
from functools import partial

import numpy as np
import pytest

from blockyard import AllocStatus, BlockManager, CacheGroup, Pairs
from blockyard.errors import (
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownSequenceError,
    UnknownTicketError,
)

BLOCK = 4


def new_manager(device: int = 16, host: int = 16, external: int = 16, watermark: float = 0.0) -> BlockManager:
    return BlockManager(
        block_size=BLOCK, device_blocks=device, host_blocks=host, external_blocks=external, watermark=watermark
    )


def settle(manager: BlockManager) -> dict[str, list[list[int]]]:
    """End the step at once; returns its pairs by kind."""
    decision = manager.take_decision()
    manager.complete(decision.ticket)
    return {kind: pairs.ids.tolist() for kind, pairs in decision.transfers()}


def open_one(manager: BlockManager, tokens: int) -> int:
    """A sequence whose tokens have been written."""
    handle = int(manager.allocate(counts=[tokens])[0])
    settle(manager)
    return handle


def seen(manager: BlockManager, *handles: int) -> tuple[object, ...]:
    """What a caller can see of a manager and of some sequences."""
    free = tuple(manager.pool(tier).free_ids().tolist() for tier in ("device", "host", "external"))
    rows = tuple((manager.num_tokens(h), manager.tier(h), manager.block_table(h).tolist()) for h in handles)
    return free, rows, manager.stats()


# ---- admission ----


def test_admission_keeps_the_watermark_free():
    manager = new_manager(device=10, watermark=0.2)
    assert manager.pool().reserved == 2
    assert manager.can_allocate(8 * BLOCK).status == AllocStatus.OK
    assert manager.can_allocate(8 * BLOCK + 1).status == AllocStatus.NEVER
    assert manager.can_allocate(7 * BLOCK, lookahead=BLOCK + 1).status == AllocStatus.NEVER
    manager.allocate(counts=[BLOCK])
    assert manager.can_allocate(7 * BLOCK).status == AllocStatus.OK
    assert manager.can_allocate(7 * BLOCK + 1).status == AllocStatus.LATER


def test_allocation_itself_may_use_the_watermark():
    manager = new_manager(device=10, watermark=0.2)
    assert len(manager.allocate(counts=[10 * BLOCK])) == 1
    assert manager.pool("device").num_free == 0


def test_a_batch_that_does_not_fit_is_refused_whole_with_the_numbers():
    manager = new_manager(device=8)
    first = open_one(manager, BLOCK)
    before = seen(manager, first)
    with pytest.raises(OutOfBlocksError, match="asked for 9 device blocks, 7 of 8 are free") as caught:
        manager.allocate(counts=[4 * BLOCK, 5 * BLOCK])
    error = caught.value
    assert (error.tier, error.wanted, error.free, error.total) == ("device", 9, 7, 8)
    assert seen(manager, first) == before
    manager.check()


def test_blocks_are_given_out_lowest_first():
    manager = new_manager(device=8)
    a, b, c = (int(handle) for handle in manager.allocate(counts=[2 * BLOCK, BLOCK, BLOCK]))
    manager.free([b])
    manager.free([a])
    assert manager.block_table(int(manager.allocate(counts=[3 * BLOCK])[0])).tolist() == [0, 1, 2]
    assert manager.block_table(c).tolist() == [3]


def test_an_empty_sequence_has_no_blocks_and_can_grow():
    manager = new_manager()
    handle = open_one(manager, 0)
    assert manager.block_table(handle).tolist() == []
    assert manager.append([handle], 2).tolist() == [0, 1]


def test_a_sequence_of_a_hundred_thousand_tokens_is_as_good_as_any():
    manager = BlockManager(block_size=16, device_blocks=7000, host_blocks=7000)
    handle = int(manager.allocate(counts=[100_000])[0])
    settle(manager)
    assert manager.append([handle], 1000).tolist() == list(range(100_000, 101_000))
    settle(manager)
    manager.swap_out([handle])
    assert len(settle(manager)["swap_out"]) == -(-101_000 // 16)
    manager.check()


# ---- growth, forks, copy-on-write ----


def test_a_shared_lookahead_block_without_tokens_is_not_copied():
    manager = BlockManager(block_size=4, device_blocks=8, watermark=0.0)
    (parent,) = manager.allocate(counts=[4])
    manager.append([parent], 0, lookahead=2)
    manager.complete(manager.take_decision().ticket)
    child = manager.fork(parent)
    both = [parent, child]
    assert manager.block_table(child).tolist() == [0, 1]
    assert manager.can_append(both, 1).blocks == 1
    assert manager.append(both, 1).tolist() == [8, 4]
    assert len(manager.take_decision()) == 0
    assert [manager.block_table(sequence).tolist() for sequence in both] == [[0, 2], [0, 1]]
    manager.check()
    other = manager.fork(parent)
    manager.append([other], 1)
    assert manager.take_decision().blocks_to_copy.tolist() == [[2, 3]]


def test_append_gives_slots_sequence_by_sequence():
    manager = new_manager()
    a, b = (int(handle) for handle in manager.allocate(counts=[3, 4]))
    settle(manager)
    slots = manager.append([a, b], [2, 1])
    assert slots.tolist() == [3, 2 * BLOCK, 3 * BLOCK]
    assert slots.dtype == np.int64
    assert manager.block_tables([b, a]).tolist() == [[1, 3], [0, 2]]


def test_append_is_all_or_nothing():
    manager = new_manager(device=3)
    a, b = (int(handle) for handle in manager.allocate(counts=[BLOCK, BLOCK]))
    settle(manager)
    before = seen(manager, a, b)
    assert not manager.can_append([a, b])
    with pytest.raises(OutOfBlocksError) as caught:
        manager.append([a, b])
    assert (caught.value.wanted, caught.value.free, caught.value.total) == (2, 1, 3)
    assert seen(manager, a, b) == before
    manager.check()


def test_lookahead_takes_blocks_and_no_tokens():
    manager = new_manager()
    handle = open_one(manager, 3)
    assert manager.can_append([handle], lookahead=2).blocks == 1
    assert manager.append([handle], lookahead=2).tolist() == [3]
    assert (manager.num_tokens(handle), manager.block_table(handle).tolist()) == (4, [0, 1])
    assert manager.can_append([handle], 4).blocks == 0
    assert manager.append([handle]).tolist() == [4]


def test_lookahead_blocks_stay_behind_when_a_sequence_leaves():
    manager = new_manager()
    handle = open_one(manager, 3)
    manager.append([handle], lookahead=9)
    settle(manager)
    assert len(manager.block_table(handle)) == 4
    manager.swap_out([handle])
    assert settle(manager) == {"swap_out": [[0, 0]]}
    assert manager.pool("device").num_free == 16
    manager.check()


def test_a_fork_shares_every_block_until_it_writes():
    manager = new_manager()
    parent = open_one(manager, 6)
    child = int(manager.fork(parent, 1)[0])
    assert manager.block_table(child).tolist() == manager.block_table(parent).tolist() == [0, 1]
    assert manager.pool("device").num_free == 14
    assert manager.can_append([child]).blocks == 1
    assert manager.append([child]).tolist() == [2 * BLOCK + 2]
    assert settle(manager) == {"copy": [[1, 2]]}
    assert manager.block_table(parent).tolist() == [0, 1]


def test_the_last_owner_writes_in_place():
    manager = new_manager()
    parent = open_one(manager, 6)
    children = [int(handle) for handle in manager.fork(parent, 2)]
    assert manager.can_append([parent, *children]).blocks == 2
    slots = manager.append([parent, *children])
    assert settle(manager) == {"copy": [[1, 2], [1, 3]]}
    assert slots.tolist() == [2 * BLOCK + 2, 3 * BLOCK + 2, BLOCK + 2]
    manager.check()


def test_a_fork_at_a_block_boundary_copies_nothing():
    manager = new_manager()
    parent = open_one(manager, 2 * BLOCK)
    manager.append([parent, int(manager.fork(parent, 1)[0])])
    assert settle(manager) == {}


def test_a_fork_of_a_thousand_blocks_and_of_a_fork_needs_no_recursion():
    manager = BlockManager(block_size=1, device_blocks=1000)
    handle = open_one(manager, 1000)
    for _ in range(2000):
        child = int(manager.fork(handle, 1)[0])
        manager.free([handle])
        handle = child
    assert manager.stats().sequences == 1
    manager.free([handle])
    assert manager.pool("device").num_free == 1000
    manager.check()


def test_a_block_that_this_step_writes_is_not_copied_in_it():
    manager = new_manager()
    parent = int(manager.allocate(counts=[6])[0])
    child = int(manager.fork(parent, 1)[0])
    with pytest.raises(SequenceStateError, match="this step is yet to write"):
        manager.append([child])
    settle(manager)
    manager.append([child])
    manager.check()


def test_a_prefix_is_shared_in_whole_blocks():
    manager = new_manager()
    parent = open_one(manager, 11)
    child = manager.fork(parent, shared_tokens=8, num_tokens=13)
    assert manager.block_table(child).tolist() == [0, 1, 3, 4]
    for shared, tokens in ((3, 13), (12, 13), (8, 7)):
        with pytest.raises(InvalidArgumentError, match="shared_tokens"):
            manager.fork(parent, shared_tokens=shared, num_tokens=tokens)
    with pytest.raises(OutOfBlocksError):
        manager.fork(parent, shared_tokens=4, num_tokens=16 * BLOCK)
    manager.check()


# ---- handles ----


def test_free_twice_raises_and_changes_nothing():
    manager = new_manager()
    a, b = open_one(manager, 3), open_one(manager, 3)
    manager.free([a])
    before = seen(manager, b)
    for handles in ([a], [b, a]):
        with pytest.raises(UnknownSequenceError):
            manager.free(handles)
    assert seen(manager, b) == before
    manager.check()


def test_a_stale_handle_stays_stale_when_its_row_is_used_again():
    manager = new_manager()
    old = open_one(manager, 3)
    manager.free([old])
    new = open_one(manager, 3)
    assert old != new
    with pytest.raises(UnknownSequenceError):
        manager.num_tokens(old)


def test_a_handle_that_is_named_twice_is_refused_by_every_batch_call():
    manager = new_manager()
    handle = open_one(manager, 3)
    before = seen(manager, handle)
    store = partial(manager.swap_out, to="external")
    for call in (manager.append, manager.can_append, manager.free, manager.can_swap_out, manager.swap_out, store):
        with pytest.raises(InvalidArgumentError, match="named twice"):
            call([handle, handle])
    assert seen(manager, handle) == before


def test_abort_and_resubmit_in_one_step_leaves_the_manager_exact():
    manager = new_manager(device=2)
    old = open_one(manager, 2 * BLOCK)
    manager.free([old])
    new = int(manager.allocate(counts=[2 * BLOCK])[0])
    with pytest.raises(UnknownSequenceError):
        manager.free([old])
    settle(manager)
    manager.free([new])
    assert manager.pool("device").num_free == 2
    manager.check()


def test_an_empty_sequence_is_refused_where_any_other_is():
    manager = new_manager()
    handle = open_one(manager, 0)
    manager.swap_out([handle])
    settle(manager)
    for call in (manager.append, manager.can_append):
        with pytest.raises(SequenceStateError, match="is in the host tier, the call needs it in device"):
            call([handle], 0)


# ---- what calls return ----


def test_a_sequence_is_taken_wherever_a_handle_is():
    manager = new_manager(host=4)
    one, other = manager.allocate(3, 5)
    assert repr(one) == str(int(one))
    assert (one == int(one), one != other, one < other, {one: 1}[int(one)]) == (True, True, True, 1)
    assert np.array([one, other], np.uint64).tolist() == [int(one), int(other)] == sorted([other, int(one)])
    for handles in (one, [one], (one,), int(one), np.array([one], np.uint64)):
        manager.append(handles)
    assert manager.num_tokens(one) == 8
    child = manager.fork(one)
    assert manager.block_table(child).tolist() == manager.block_table(one).tolist()
    settle(manager)
    manager.swap_out([one, child])
    assert (manager.tier(one), manager.tier(other)) == ("host", "device")
    manager.free([one, other, child])
    with pytest.raises(UnknownSequenceError):
        manager.num_tokens(one)


@pytest.mark.parametrize("groups", [None, [CacheGroup.full_attention(), CacheGroup.sliding_window(8)]])
def test_a_foreign_a_freed_and_a_forged_handle_are_refused_each_with_its_own_message(groups: list[CacheGroup] | None):
    mine, other = (BlockManager(block_size=BLOCK, device_blocks=16, groups=groups) for _ in range(2))
    sequence, foreign, freed = mine.allocate(3), other.allocate(3), mine.allocate(3)
    mine.free(freed)
    forged = int(sequence) + 12
    number, others = (int(re.match(r"BlockManager\(number=(\d+)", repr(one))[1]) for one in (mine, other))  # type: ignore[index]
    assert number != others
    before = seen(mine, sequence)
    for handle, message in (
        (foreign, f"sequence {foreign!r} belongs to manager {others}, this is manager {number}"),
        (freed, f"sequence {freed!r} has been freed"),
        (forged, f"sequence {forged} is unknown: this manager never returned that handle"),
        (7, f"sequence 7 belongs to manager 0, this is manager {number}"),
    ):
        truncate = partial(mine.truncate, num_tokens=1)
        for call in (mine.free, mine.append, mine.fork, mine.num_tokens, mine.block_table, mine.swap_out, truncate):
            with pytest.raises(UnknownSequenceError, match=f"^{re.escape(message)}$"):
                call(handle)  # type: ignore[operator]
    assert seen(mine, sequence) == before
    assert mine.num_tokens(sequence) == 3


def test_a_fit_has_the_numbers_that_decide_it():
    manager = new_manager(device=10, watermark=0.2)
    fits = [manager.can_allocate(tokens) for tokens in (8 * BLOCK, 8 * BLOCK + 1)]
    assert [(bool(fit), fit.status, fit.blocks, fit.free) for fit in fits] == [
        (True, AllocStatus.OK, 8, 8),
        (False, AllocStatus.NEVER, 9, 8),
    ]
    assert repr(fits[1]) == "Fit(NEVER, blocks=9, free=8)"
    handle = manager.allocate(8 * BLOCK)
    never = manager.can_append(handle, 3 * BLOCK)
    assert (bool(never), never.status, never.blocks, never.free) == (False, AllocStatus.NEVER, 3, 2)
    assert manager.can_append(handle, 2 * BLOCK)
    other = manager.allocate(BLOCK)
    later = manager.can_append(handle, 2 * BLOCK)
    assert (bool(later), later.status, later.blocks, later.free) == (False, AllocStatus.LATER, 2, 1)
    manager.free(other)


def test_a_ticket_of_which_nothing_landed_fails_without_pairs():
    manager = new_manager()
    one, other = manager.allocate(5, 3)
    settle(manager)
    for handle, end, hit in ((one, manager.fail, [one]), (other, manager.complete, [])):
        manager.swap_out(handle)
        ticket = manager.take_decision().ticket
        assert end(ticket).tolist() == hit
        with pytest.raises(UnknownTicketError):
            manager.fail(ticket)
    manager.free([one, other])
    manager.check()


def test_a_pool_shows_its_tier():
    manager = BlockManager(block_size=BLOCK, device_blocks=10, host_blocks=4, watermark=0.2)
    manager.allocate(2 * BLOCK)
    pools = [manager.pool(), manager.pool("host"), manager.pool("external")]
    assert [(pool.tier, pool.num_blocks, pool.num_free, pool.reserved) for pool in pools] == [
        ("device", 10, 8, 2),
        ("host", 4, 4, 0),
        ("external", 0, 0, 0),
    ]
    assert list(manager.pool()) == manager.pool().free_ids().tolist() == list(range(2, 10))
    assert manager.pool().free_ids(3).tolist() == [2, 3, 4]


# ---- bad arguments ----

BAD_CONFIGS = [
    {"block_size": 0},
    {"block_size": -1},
    {"block_size": 1 << 40},
    {"device_blocks": 0},
    {"device_blocks": -3},
    {"host_blocks": -1},
    {"device_blocks": 1 << 40},
    {"external_blocks": 1 << 70},
    {"watermark": 1.0},
    {"watermark": -0.5},
    {"watermark": float("nan")},
]


@pytest.mark.parametrize("bad", BAD_CONFIGS, ids=str)
def test_sizes_out_of_range_are_refused(bad: dict[str, float]):
    with pytest.raises(InvalidArgumentError):
        BlockManager(**{"block_size": 4, "device_blocks": 8, **bad})


@pytest.mark.parametrize("bad", [[-1], [1.5], ["x"], None, np.array([0.0]), np.array([[0]]), [1 << 70]], ids=str)
def test_handles_of_a_wrong_kind_are_refused(bad: object):
    manager = new_manager()
    open_one(manager, 3)
    to_host = partial(manager.swap_in, to="host")
    for call in (manager.append, manager.free, manager.swap_out, manager.can_swap_in, to_host, manager.block_tables):
        with pytest.raises((InvalidArgumentError, UnknownSequenceError)):
            call(bad)
    manager.check()


@pytest.mark.parametrize("bad", [[-1], -1, [1, 2], 1 << 40, [1.5], np.array([[1]], dtype=np.uint32)], ids=str)
def test_token_counts_of_a_wrong_kind_are_refused(bad: object):
    manager = new_manager()
    handle = open_one(manager, 3)
    before = seen(manager, handle)
    with pytest.raises(InvalidArgumentError):
        manager.append([handle], bad)
    assert seen(manager, handle) == before
    manager.check()


def test_an_unknown_tier_is_refused_by_name():
    manager = new_manager()
    handle = open_one(manager, 3)
    with pytest.raises(InvalidArgumentError, match="gpu"):
        manager.pool("gpu")
    with pytest.raises(InvalidArgumentError, match="disk"):
        manager.swap_in([handle], to="disk")
    with pytest.raises(InvalidArgumentError, match="disk"):
        Pairs("device", "disk", np.zeros((0, 2), dtype=np.int64))


def test_slots_of_tokens_that_there_are_not_are_refused():
    manager = new_manager()
    handle = open_one(manager, 3)
    for first, last in ((2, 1), (0, 4), (-1, 2)):
        with pytest.raises(InvalidArgumentError):
            manager.slot_mapping(handle, first, last)
    assert manager.slot_mapping(handle, 1, 3).tolist() == [1, 2]


def test_slots_of_many_sequences_follow_one_another():
    manager = new_manager()
    handles = np.array([open_one(manager, tokens) for tokens in (3, 9, 6)], np.uint64)
    ranges = list(zip(handles.tolist(), (0, 2, 6), (3, 9, 6), strict=True))
    each = [manager.slot_mapping(handle, first, last) for handle, first, last in ranges]
    assert np.array_equal(manager.slot_mapping(handles, [0, 2, 6], [3, 9, 6]), np.concatenate(each))
    two = [*manager.slot_mapping(handles[1], 1, 3), *manager.slot_mapping(handles[2], 1, 3)]
    assert manager.slot_mapping(handles[1:], 1, 3).tolist() == two
    assert len(manager.slot_mapping(handles[:0], 0, 3)) == 0
    out = np.full(10, -1, np.int64)
    for first, last in (([0, 2, 6], [3, 9, 7]), ([0, 2], [3, 9, 6]), (0, 6), ([4, 2, 6], [3, 9, 6])):
        with pytest.raises(InvalidArgumentError, match=r"first|last"):
            manager.slot_mapping(handles, first, last, out)
    assert set(out.tolist()) == {-1}
    assert manager.slot_mapping(handles, [0, 2, 6], [3, 9, 6], out) is out
    assert np.array_equal(out, np.concatenate(each))


def test_an_output_array_of_the_wrong_size_is_refused():
    manager = new_manager()
    handle = open_one(manager, 9)
    before = seen(manager, handle)
    for call in (
        lambda: manager.append([handle], out=np.zeros(2, dtype=np.int64)),
        lambda: manager.append([handle], out=np.zeros(1, dtype=np.int32)),
        lambda: manager.block_tables([handle], np.zeros((1, 2), dtype=np.int32)),
        lambda: manager.block_tables([handle], np.zeros((2, 3), dtype=np.int32)),
        lambda: manager.slot_mapping(handle, 0, 3, np.zeros(4, dtype=np.int64)),
    ):
        with pytest.raises((InvalidArgumentError, TypeError)):
            call()
    assert seen(manager, handle) == before


def test_an_output_array_is_filled_and_returned():
    manager = new_manager()
    handle = open_one(manager, 9)
    slots, tables = np.full(2, -1), np.full((1, 5), -1, dtype=np.int32)
    assert manager.append([handle], 2, out=slots) is slots
    assert slots.tolist() == [2 * BLOCK + 1, 2 * BLOCK + 2]
    assert manager.block_tables([handle], tables) is tables
    assert tables.tolist() == [[0, 1, 2, 0, 0]]
