"""Pins, deadlines of tickets, and what is quarantined."""

from __future__ import annotations

import pytest
from managers import make_manager
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import (
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    SnapshotError,
    UnknownTicketError,
)

SIZE = 4
PROMPT = list(range(100, 113))


def manager(device: int = 8, **options: float) -> BlockManager:
    return make_manager(block_size=SIZE, device_blocks=device, host_blocks=8, watermark=0.0, **options)


def step(books: BlockManager) -> None:
    books.complete(books.take_decision().ticket)
    books.check()


def run(books: BlockManager, tokens: list[int] = PROMPT) -> int:
    handles, _ = allocate_prompts(books, [tokens])
    step(books)
    books.mark_computed(handles)
    return int(handles[0])


def test_pinned_blocks_are_not_evicted_until_they_are_unpinned() -> None:
    books = manager(device=8)
    handle = run(books)
    pin = books.pins.pin(handle, 10)
    assert books.pins.blocks(pin).tolist() == books.block_table(handle)[:3].tolist()
    books.free([handle])
    assert books.pool().num_free == 5
    assert books.stats().pinned_blocks["device"] == 3
    with pytest.raises(OutOfBlocksError):
        books.allocate(counts=[6 * SIZE])
    books.free(books.allocate(counts=[5 * SIZE]))
    step(books)
    assert books.prefix.lookup(PROMPT).tokens == 12
    books.pins.unpin(pin)
    books.check()
    assert books.pool().num_free == 8
    with pytest.raises(UnknownTicketError, match=f"pin {pin} is not held"):
        books.pins.unpin(pin)


def test_a_prompts_cached_blocks_can_be_pinned_without_a_sequence() -> None:
    books = manager()
    books.free([run(books)])
    pin, cached = books.pins.pin_prompt(PROMPT, 10)
    assert cached == 12
    assert len(books.pins.blocks(pin)) == 3
    assert books.pins.pin_prompt([1, 2, 3, 4, 5], 10)[1] == 0
    books.check()


def test_a_dead_readers_pin_ends_at_its_deadline_and_one_that_reads_does_not() -> None:
    books = manager()
    handle = run(books)
    dead, reading = books.pins.pin(handle, 10), books.pins.pin(handle, 10)
    books.free([handle])
    books.pins.submit(reading)
    assert books.expire(9).pins == []
    assert books.expire(10).pins == [dead]
    assert len(books.pool("device").quarantined_ids()) == 3 == books.stats().quarantined_blocks["device"]
    with pytest.raises(UnknownTicketError):
        books.pins.submit(dead)
    assert books.pool().num_free == 5
    books.pins.unpin(reading)
    assert books.pool().num_free == 8
    assert len(books.pool("device").quarantined_ids()) == 0
    books.check()


def test_pins_never_hold_more_than_their_fraction() -> None:
    books = manager(device=8, max_pinned=0.4)
    one, other = run(books), run(books, list(range(200, 209)))
    books.pins.pin(one, 10)
    books.pins.pin(one, 10)
    with pytest.raises(OutOfBlocksError, match="asked to pin 2 more device blocks, 3 are pinned, pins may hold 3"):
        books.pins.pin(other, 10)
    with pytest.raises(InvalidArgumentError, match="max_pinned is 1, must be"):
        manager(max_pinned=1.0)


def test_a_ticket_that_is_not_submitted_ends_at_its_deadline_as_if_it_had_failed() -> None:
    books = manager()
    handle = run(books)
    books.swap_out([handle])
    ticket = books.take_decision(deadline=10).ticket
    assert books.expire(9).tickets == []
    expired = books.expire(10)
    assert (expired.tickets, expired.overdue, expired.sequences.tolist()) == ([ticket], [], [handle])
    for call in (books.submit, books.complete):
        with pytest.raises(UnknownTicketError):
            call(ticket)
    with pytest.raises(SequenceStateError, match="lost bytes"):
        books.swap_in([handle])
    books.free([handle])
    books.check()
    assert (books.pool().num_free, books.pool("host").num_free) == (8, 8)


def test_blocks_of_a_late_transfer_are_quarantined_until_its_event() -> None:
    books = manager()
    handle = run(books)
    books.swap_out([handle])
    ticket = books.take_decision(deadline=10).ticket
    books.submit(ticket)
    expired = books.expire(10)
    assert (expired.tickets, expired.overdue, expired.sequences.tolist()) == ([], [ticket], [handle])
    assert books.expire(11).overdue == [], "once is enough"
    books.free([handle])
    assert books.stats().quarantined_blocks == {"device": 4, "host": 4, "external": 0}
    assert books.pool("host").num_free == 4, "no other request gets them"
    with pytest.raises(SnapshotError):
        books.snapshot()
    books.complete(ticket)
    books.check()
    assert books.pool("host").num_free == 8
    assert set(books.stats().quarantined_blocks.values()) == {0}


def test_a_snapshot_is_refused_while_a_pin_is_held_and_keeps_the_limit() -> None:
    books = manager(max_pinned=0.0)
    other = manager()
    pin = other.pins.pin(run(other), 10)
    with pytest.raises(SnapshotError, match="1 tickets are in flight"):
        other.snapshot()
    other.pins.unpin(pin)
    handle = run(other)
    step(other)
    assert BlockManager.restore(other.snapshot()).pins.pin(handle, 10) == pin + 1
    handle = run(books)
    with pytest.raises(OutOfBlocksError):
        BlockManager.restore(books.snapshot()).pins.pin(handle, 10)
