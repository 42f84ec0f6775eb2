"""The manager's rules, one by one; `tests/property` drives it at random beside the reference model."""

from functools import partial

import numpy as np
import pytest

from blockyard import AllocStatus, BlockManager, Pairs
from blockyard.errors import (
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownSequenceError,
    UnknownTicketError,
)

BLOCK = 4


def manager(device: int = 16, host: int = 16, external: int = 16, watermark: float = 0.0) -> BlockManager:
    return BlockManager(
        block_size=BLOCK, device_blocks=device, host_blocks=host, external_blocks=external, watermark=watermark
    )


def settle(books: BlockManager) -> dict[str, list[list[int]]]:
    """End the step at once; returns its pairs by kind."""
    decision = books.take_decision()
    books.complete(decision.ticket)
    return {kind: pairs.ids.tolist() for kind, pairs in decision.transfers()}


def open_one(books: BlockManager, tokens: int) -> int:
    """A sequence whose tokens have been written."""
    handle = int(books.allocate(counts=[tokens])[0])
    settle(books)
    return handle


def snapshot(books: BlockManager, *handles: int) -> tuple[object, ...]:
    free = tuple(books.pool(tier).num_free for tier in ("device", "host", "external"))
    rows = tuple((books.num_tokens(h), books.tier(h), books.block_table(h).tolist()) for h in handles)
    return free, rows, books.stats().sequences


# ---- admission ----


def test_admission_keeps_the_watermark_free():
    books = manager(device=10, watermark=0.2)
    assert books.pool().reserved == 2
    assert books.can_allocate(8 * BLOCK).status == AllocStatus.OK
    assert books.can_allocate(8 * BLOCK + 1).status == AllocStatus.NEVER
    assert books.can_allocate(7 * BLOCK, lookahead=BLOCK + 1).status == AllocStatus.NEVER
    books.allocate(counts=[BLOCK])
    assert books.can_allocate(7 * BLOCK).status == AllocStatus.OK
    assert books.can_allocate(7 * BLOCK + 1).status == AllocStatus.LATER


def test_allocation_itself_may_use_the_watermark():
    books = manager(device=10, watermark=0.2)
    assert len(books.allocate(counts=[10 * BLOCK])) == 1
    assert books.pool("device").num_free == 0


def test_a_batch_that_does_not_fit_is_refused_whole_with_the_numbers():
    books = manager(device=8)
    first = open_one(books, BLOCK)
    before = snapshot(books, first)
    with pytest.raises(OutOfBlocksError, match="asked for 9 device blocks, 7 of 8 are free") as caught:
        books.allocate(counts=[4 * BLOCK, 5 * BLOCK])
    error = caught.value
    assert (error.tier, error.wanted, error.free, error.total) == ("device", 9, 7, 8)
    assert snapshot(books, first) == before
    books.check()


def test_blocks_are_given_out_lowest_first():
    books = manager(device=8)
    a, b, c = (int(handle) for handle in books.allocate(counts=[2 * BLOCK, BLOCK, BLOCK]))
    books.free([b])
    books.free([a])
    assert books.block_table(int(books.allocate(counts=[3 * BLOCK])[0])).tolist() == [0, 1, 2]
    assert books.block_table(c).tolist() == [3]


def test_an_empty_sequence_has_no_blocks_and_can_grow():
    books = manager()
    handle = open_one(books, 0)
    assert books.block_table(handle).tolist() == []
    assert books.append([handle], 2).tolist() == [0, 1]


def test_a_sequence_of_a_hundred_thousand_tokens_is_as_good_as_any():
    books = BlockManager(block_size=16, device_blocks=7000, host_blocks=7000)
    handle = int(books.allocate(counts=[100_000])[0])
    settle(books)
    assert books.append([handle], 1000).tolist() == list(range(100_000, 101_000))
    settle(books)
    books.swap_out([handle])
    assert len(settle(books)["swap_out"]) == -(-101_000 // 16)
    books.check()


# ---- growth, forks, copy-on-write ----


def test_a_shared_lookahead_block_without_tokens_is_not_copied():
    books = BlockManager(block_size=4, device_blocks=8, watermark=0.0)
    (parent,) = books.allocate(counts=[4])
    books.append([parent], 0, lookahead=2)
    books.complete(books.take_decision().ticket)
    child = books.fork(parent)
    both = [parent, child]
    assert books.block_table(child).tolist() == [0, 1]
    assert books.can_append(both, 1).blocks == 1
    assert books.append(both, 1).tolist() == [8, 4]
    assert len(books.take_decision()) == 0
    assert [books.block_table(sequence).tolist() for sequence in both] == [[0, 2], [0, 1]]
    books.check()
    other = books.fork(parent)
    books.append([other], 1)
    assert books.take_decision().blocks_to_copy.tolist() == [[2, 3]]


def test_append_gives_slots_sequence_by_sequence():
    books = manager()
    a, b = (int(handle) for handle in books.allocate(counts=[3, 4]))
    settle(books)
    slots = books.append([a, b], [2, 1])
    assert slots.tolist() == [3, 2 * BLOCK, 3 * BLOCK]
    assert slots.dtype == np.int64
    assert books.block_tables([b, a]).tolist() == [[1, 3], [0, 2]]


def test_append_is_all_or_nothing():
    books = manager(device=3)
    a, b = (int(handle) for handle in books.allocate(counts=[BLOCK, BLOCK]))
    settle(books)
    before = snapshot(books, a, b)
    assert not books.can_append([a, b])
    with pytest.raises(OutOfBlocksError) as caught:
        books.append([a, b])
    assert (caught.value.wanted, caught.value.free, caught.value.total) == (2, 1, 3)
    assert snapshot(books, a, b) == before
    books.check()


def test_lookahead_takes_blocks_and_no_tokens():
    books = manager()
    handle = open_one(books, 3)
    assert books.can_append([handle], lookahead=2).blocks == 1
    assert books.append([handle], lookahead=2).tolist() == [3]
    assert (books.num_tokens(handle), books.block_table(handle).tolist()) == (4, [0, 1])
    assert books.can_append([handle], 4).blocks == 0
    assert books.append([handle]).tolist() == [4]


def test_lookahead_blocks_stay_behind_when_a_sequence_leaves():
    books = manager()
    handle = open_one(books, 3)
    books.append([handle], lookahead=9)
    settle(books)
    assert len(books.block_table(handle)) == 4
    books.swap_out([handle])
    assert settle(books) == {"swap_out": [[0, 0]]}
    assert books.pool("device").num_free == 16
    books.check()


def test_a_fork_shares_every_block_until_it_writes():
    books = manager()
    parent = open_one(books, 6)
    child = int(books.fork(parent, 1)[0])
    assert books.block_table(child).tolist() == books.block_table(parent).tolist() == [0, 1]
    assert books.pool("device").num_free == 14
    assert books.can_append([child]).blocks == 1
    assert books.append([child]).tolist() == [2 * BLOCK + 2]
    assert settle(books) == {"copy": [[1, 2]]}
    assert books.block_table(parent).tolist() == [0, 1]


def test_the_last_owner_writes_in_place():
    books = manager()
    parent = open_one(books, 6)
    children = [int(handle) for handle in books.fork(parent, 2)]
    assert books.can_append([parent, *children]).blocks == 2
    slots = books.append([parent, *children])
    assert settle(books) == {"copy": [[1, 2], [1, 3]]}
    assert slots.tolist() == [2 * BLOCK + 2, 3 * BLOCK + 2, BLOCK + 2]
    books.check()


def test_a_fork_at_a_block_boundary_copies_nothing():
    books = manager()
    parent = open_one(books, 2 * BLOCK)
    books.append([parent, int(books.fork(parent, 1)[0])])
    assert settle(books) == {}


def test_a_fork_of_a_thousand_blocks_and_of_a_fork_needs_no_recursion():
    books = BlockManager(block_size=1, device_blocks=1000)
    handle = open_one(books, 1000)
    for _ in range(2000):
        child = int(books.fork(handle, 1)[0])
        books.free([handle])
        handle = child
    assert books.stats().sequences == 1
    books.free([handle])
    assert books.pool("device").num_free == 1000
    books.check()


def test_a_block_that_this_step_writes_is_not_copied_in_it():
    books = manager()
    parent = int(books.allocate(counts=[6])[0])
    child = int(books.fork(parent, 1)[0])
    with pytest.raises(SequenceStateError, match="this step is yet to write"):
        books.append([child])
    settle(books)
    books.append([child])
    books.check()


def test_a_prefix_is_shared_in_whole_blocks():
    books = manager()
    parent = open_one(books, 11)
    child = books.fork(parent, shared_tokens=8, num_tokens=13)
    assert books.block_table(child).tolist() == [0, 1, 3, 4]
    for shared, tokens in ((3, 13), (12, 13), (8, 7)):
        with pytest.raises(InvalidArgumentError, match="shared_tokens"):
            books.fork(parent, shared_tokens=shared, num_tokens=tokens)
    with pytest.raises(OutOfBlocksError):
        books.fork(parent, shared_tokens=4, num_tokens=16 * BLOCK)
    books.check()


# ---- handles ----


def test_free_twice_raises_and_changes_nothing():
    books = manager()
    a, b = open_one(books, 3), open_one(books, 3)
    books.free([a])
    before = snapshot(books, b)
    for handles in ([a], [b, a]):
        with pytest.raises(UnknownSequenceError):
            books.free(handles)
    assert snapshot(books, b) == before
    books.check()


def test_a_stale_handle_stays_stale_when_its_row_is_used_again():
    books = manager()
    old = open_one(books, 3)
    books.free([old])
    new = open_one(books, 3)
    assert old != new
    with pytest.raises(UnknownSequenceError):
        books.num_tokens(old)


def test_a_handle_that_is_named_twice_is_refused_by_every_batch_call():
    books = manager()
    handle = open_one(books, 3)
    before = snapshot(books, handle)
    spill = partial(books.swap_out, to="external")
    for call in (books.append, books.can_append, books.free, books.can_swap_out, books.swap_out, spill):
        with pytest.raises(InvalidArgumentError, match="named twice"):
            call([handle, handle])
    assert snapshot(books, handle) == before


def test_abort_and_resubmit_in_one_step_leaves_the_manager_exact():
    books = manager(device=2)
    old = open_one(books, 2 * BLOCK)
    books.free([old])
    new = int(books.allocate(counts=[2 * BLOCK])[0])
    with pytest.raises(UnknownSequenceError):
        books.free([old])
    settle(books)
    books.free([new])
    assert books.pool("device").num_free == 2
    books.check()


def test_an_empty_sequence_is_refused_where_any_other_is():
    books = manager()
    handle = open_one(books, 0)
    books.swap_out([handle])
    settle(books)
    for call in (books.append, books.can_append):
        with pytest.raises(SequenceStateError, match="is in the host tier, the call needs it in device"):
            call([handle], 0)


# ---- what calls return ----


def test_a_sequence_is_taken_wherever_a_handle_is():
    books = manager(host=4)
    one, other = books.allocate(3, 5)
    assert repr(one) == str(int(one))
    assert (one == int(one), one != other, one < other, {one: 1}[int(one)]) == (True, True, True, 1)
    assert np.array([one, other], np.uint64).tolist() == [int(one), int(other)] == sorted([other, int(one)])
    for handles in (one, [one], (one,), int(one), np.array([one], np.uint64)):
        books.append(handles)
    assert books.num_tokens(one) == 8
    child = books.fork(one)
    assert books.block_table(child).tolist() == books.block_table(one).tolist()
    settle(books)
    books.swap_out([one, child])
    assert (books.tier(one), books.tier(other)) == ("host", "device")
    books.free([one, other, child])
    with pytest.raises(UnknownSequenceError):
        books.num_tokens(one)


def test_a_fit_has_the_numbers_that_decide_it():
    books = manager(device=10, watermark=0.2)
    fits = [books.can_allocate(tokens) for tokens in (8 * BLOCK, 8 * BLOCK + 1)]
    assert [(bool(fit), fit.status, fit.blocks, fit.free) for fit in fits] == [
        (True, AllocStatus.OK, 8, 8),
        (False, AllocStatus.NEVER, 9, 8),
    ]
    assert repr(fits[1]) == "Fit(NEVER, blocks=9, free=8)"
    handle = books.allocate(8 * BLOCK)
    later = books.can_append(handle, 3 * BLOCK)
    assert (bool(later), later.status, later.blocks, later.free) == (False, AllocStatus.LATER, 3, 2)
    assert books.can_append(handle, 2 * BLOCK)


def test_a_ticket_of_which_nothing_landed_fails_without_pairs():
    books = manager()
    one, other = books.allocate(5, 3)
    settle(books)
    for handle, lost, hit in ((one, None, [one]), (other, [], [])):
        books.swap_out(handle)
        ticket = books.take_decision().ticket
        assert books.fail(ticket, lost).tolist() == hit
        with pytest.raises(UnknownTicketError):
            books.fail(ticket)
    books.free([one, other])
    books.check()


def test_a_pool_shows_its_tier():
    books = BlockManager(block_size=BLOCK, device_blocks=10, host_blocks=4, watermark=0.2)
    books.allocate(2 * BLOCK)
    pools = [books.pool(), books.pool("host"), books.pool("external")]
    assert [(pool.tier, pool.num_blocks, pool.num_free, pool.reserved) for pool in pools] == [
        ("device", 10, 8, 2),
        ("host", 4, 4, 0),
        ("external", 0, 0, 0),
    ]
    assert list(books.pool()) == books.pool().free_ids().tolist() == list(range(2, 10))
    assert books.pool().free_ids(3).tolist() == [2, 3, 4]


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
    books = manager()
    open_one(books, 3)
    fetch = partial(books.swap_in, to="host")
    for call in (books.append, books.free, books.swap_out, books.can_swap_in, fetch, books.block_tables):
        with pytest.raises((InvalidArgumentError, UnknownSequenceError)):
            call(bad)
    books.check()


@pytest.mark.parametrize("bad", [[-1], -1, [1, 2], 1 << 40, [1.5], np.array([[1]], dtype=np.uint32)], ids=str)
def test_token_counts_of_a_wrong_kind_are_refused(bad: object):
    books = manager()
    handle = open_one(books, 3)
    before = snapshot(books, handle)
    with pytest.raises(InvalidArgumentError):
        books.append([handle], bad)
    assert snapshot(books, handle) == before
    books.check()


def test_an_unknown_tier_is_refused_by_name():
    books = manager()
    handle = open_one(books, 3)
    with pytest.raises(InvalidArgumentError, match="gpu"):
        books.pool("gpu")
    with pytest.raises(InvalidArgumentError, match="disk"):
        books.swap_in([handle], to="disk")
    with pytest.raises(InvalidArgumentError, match="disk"):
        Pairs("device", "disk", np.zeros((0, 2), dtype=np.int64))


def test_slots_of_tokens_that_there_are_not_are_refused():
    books = manager()
    handle = open_one(books, 3)
    for first, last in ((2, 1), (0, 4), (-1, 2)):
        with pytest.raises(InvalidArgumentError):
            books.slot_mapping(handle, first, last)
    assert books.slot_mapping(handle, 1, 3).tolist() == [1, 2]


def test_an_output_array_of_the_wrong_size_is_refused():
    books = manager()
    handle = open_one(books, 9)
    before = snapshot(books, handle)
    for call in (
        lambda: books.append([handle], out=np.zeros(2, dtype=np.int64)),
        lambda: books.append([handle], out=np.zeros(1, dtype=np.int32)),
        lambda: books.block_tables([handle], np.zeros((1, 2), dtype=np.int32)),
        lambda: books.block_tables([handle], np.zeros((2, 3), dtype=np.int32)),
        lambda: books.slot_mapping(handle, 0, 3, np.zeros(4, dtype=np.int64)),
    ):
        with pytest.raises((InvalidArgumentError, TypeError)):
            call()
    assert snapshot(books, handle) == before


def test_an_output_array_is_filled_and_returned():
    books = manager()
    handle = open_one(books, 9)
    slots, tables = np.full(2, -1), np.full((1, 5), -1, dtype=np.int32)
    assert books.append([handle], 2, out=slots) is slots
    assert slots.tolist() == [2 * BLOCK + 1, 2 * BLOCK + 2]
    assert books.block_tables([handle], tables) is tables
    assert tables.tolist() == [[0, 1, 2, 0, 0]]
