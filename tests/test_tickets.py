"""Tickets over a simulated device: when they end, what they hold until then, and what is refused meanwhile."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockyard.engine.tickets import Done, MappingBuffers, Transfers
from blockyard.errors import (
    InvalidArgumentError,
    TransferCancelledError,
    TransferQueueFullError,
    UnknownTicketError,
)
from blockyard.testing.device import SimulatedStreams


class StoppedStreams(SimulatedStreams):
    """Nothing runs before it is waited for."""

    def progress(self) -> None:
        return


def transfers(limit: int = 100, *, fail: float = 0.0) -> Transfers:
    streams = StoppedStreams(0, fail=fail)
    return Transfers(streams, max_outstanding=limit, mappings=MappingBuffers(pinned=False))


def pairs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 2)


def start(book: Transfers, stream: str = "out", num_bytes: int = 10, log: list[object] | None = None, **more: object):
    def cut(mapping: Tensor) -> list[object]:
        return [lambda: None if log is None else log.append(mapping.tolist())]

    return book.submit(stream, cut, more.pop("pairs", pairs((0, 1))), num_bytes=num_bytes, **more)


def test_a_ticket_is_reported_once_when_its_event_has_fired():
    book = transfers()
    first, second = start(book), start(book)
    assert book.poll() == []
    assert book.outstanding("out") == 20
    assert book.wait(first) == Done(first, None, None)
    book.synchronize()
    assert book.poll() == [Done(second, None, None)]
    assert book.poll() == []
    assert book.outstanding("out") == 0
    with pytest.raises(UnknownTicketError, match=f"ticket {first} has been reported"):
        book.wait(first)


def test_a_ticket_that_was_never_issued_is_refused_everywhere():
    book = transfers()
    for call in (
        book.wait,
        book.order_compute,
        lambda t: book.order_compute_layer(t, 0),
        lambda t: start(book, after=[t]),
    ):
        with pytest.raises(UnknownTicketError, match="ticket 1 was never issued, the last is 0"):
            call(1)
    with pytest.raises(UnknownTicketError):
        book.on_done(0, lambda done: None)


def test_pairs_are_copied_and_their_buffer_is_kept_until_the_event_has_fired():
    book = transfers()
    log: list[object] = []
    mapping = pairs((0, 1), (2, 3))
    first = start(book, log=log, pairs=mapping)
    mapping[:] = 9
    second = start(book, log=log, pairs=pairs((4, 5)))
    book.wait(second)
    assert log == [[[0, 1], [2, 3]], [[4, 5]]]
    assert first < second


def test_buffers_are_used_again_after_that_and_not_before():
    buffers = MappingBuffers(pinned=False)
    one, two = buffers.take(pairs((0, 1))), buffers.take(pairs((2, 3)))
    assert one.buffer.data_ptr() != two.buffer.data_ptr()
    buffers.give_back(one)
    assert buffers.take(pairs()).buffer.data_ptr() == one.buffer.data_ptr()
    long = buffers.take(np.zeros((300, 2), np.int64))
    assert (len(long.pairs), len(long.buffer)) == (300, 512)


def test_what_fails_is_reported_with_its_error_and_does_not_count_as_landed():
    book = transfers(fail=1.0)
    landed: list[int] = []
    ticket = start(book, on_landed=lambda: landed.append(1))
    assert "failed on purpose" in str(book.wait(ticket).error)
    assert landed == []
    book = transfers()
    book.wait(start(book, on_landed=lambda: landed.append(2)))
    assert landed == [2]


def test_callbacks_run_when_the_end_is_seen_or_at_once():
    book = transfers()
    seen: list[Done] = []
    ticket = start(book)
    book.on_done(ticket, seen.append)
    assert seen == []
    book.synchronize()
    assert [done.ticket for done in seen] == [ticket]
    book.on_done(ticket, seen.append)
    assert [done.ticket for done in seen] == [ticket, ticket]
    book.poll()
    with pytest.raises(UnknownTicketError):
        book.on_done(ticket, seen.append)


def test_a_full_stream_refuses_or_waits_as_the_caller_chooses():
    book = transfers(limit=25)
    start(book, num_bytes=20)
    with pytest.raises(TransferQueueFullError, match=r"20 bytes are under way on stream 'out', 10 more .* limit of 25"):
        book.make_room("out", 10, "refuse")
    book.make_room("in", 25, "refuse")
    book.make_room("out", 5, "refuse")
    assert book.poll() == []
    book.make_room("out", 10, "wait")
    assert book.outstanding("out") == 0
    assert len(book.poll()) == 1
    with pytest.raises(InvalidArgumentError, match="on_full is 'never'"):
        book.make_room("out", 1, "never")


def test_a_transfer_over_the_limit_goes_alone():
    book = transfers(limit=25)
    book.make_room("out", 1000, "refuse")
    start(book, num_bytes=1000)
    with pytest.raises(TransferQueueFullError):
        book.make_room("out", 1, "refuse")


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(InvalidArgumentError, match="max_outstanding is 0 bytes"):
        transfers(limit=0)


def test_a_layer_that_there_is_not_is_refused():
    book = transfers()
    ticket = book.submit("in", lambda _: [lambda: None] * 3, pairs(), num_bytes=3, layers=3)
    for layer in (-1, 3):
        with pytest.raises(InvalidArgumentError, match=f"layer {layer} of ticket 1, there are 3"):
            book.order_compute_layer(ticket, layer)
    book.synchronize()
    book.order_compute_layer(ticket, 3)


@pytest.mark.parametrize("seed", range(20))
def test_tickets_run_after_those_they_name_on_any_stream(seed: int):
    book = Transfers(SimulatedStreams(seed), max_outstanding=100, mappings=MappingBuffers(pinned=False))
    log: list[object] = []
    store = start(book, "out", log=log, pairs=pairs((1, 1)))
    load = start(book, "in", log=log, pairs=pairs((2, 2)), after=[store])
    start(book, "copy", log=log, pairs=pairs((3, 3)), after=[store, load])
    book.synchronize()
    assert log == [[[1, 1]], [[2, 2]], [[3, 3]]]


# ---- loads that nobody waits for ----


def test_a_prefetch_starts_when_no_load_is_awaited_and_the_first_submitted_is_first():
    book = transfers(limit=1000)
    log: list[object] = []
    awaited = start(book, "in", log=log, pairs=pairs((0, 0)))
    one = start(book, "in", log=log, pairs=pairs((0, 1)), prefetch=True)
    two = start(book, "in", log=log, pairs=pairs((0, 2)), prefetch=True)
    last = start(book, "in", log=log, pairs=pairs((0, 3)))
    assert book.poll() == []
    assert book.wait(two).error is None
    assert log == [[[0, 0]], [[0, 3]], [[0, 2]]], "a prefetch that is waited for goes at once"
    assert sorted(done.ticket for done in book.poll()) == [awaited, last]
    book.synchronize()
    assert log[3:] == [[[0, 1]]]
    assert book.poll() == [Done(one, None, None)]


def test_loads_of_one_block_keep_their_order_whoever_waits():
    book = transfers(limit=1000)
    log: list[object] = []
    start(book, "in", log=log, pairs=pairs((0, 0)))
    start(book, "in", log=log, pairs=pairs((0, 7), (1, 8)), prefetch=True)
    start(book, "in", log=log, pairs=pairs((0, 9)), prefetch=True)
    book.wait(start(book, "in", log=log, pairs=pairs((2, 8))))
    assert log == [[[0, 0]], [[0, 7], [1, 8]], [[2, 8]]]


def test_a_ticket_that_has_not_started_can_be_given_up_and_is_reported():
    book = transfers(limit=1000)
    log: list[object] = []
    seen: list[Done] = []
    awaited = start(book, "in", log=log)
    ticket = start(book, "in", log=log, prefetch=True, num_bytes=30)
    book.on_done(ticket, seen.append)
    assert book.outstanding("in") == 40
    assert book.cancel(ticket)
    assert not book.cancel(ticket)
    assert not book.cancel(awaited)
    assert book.outstanding("in") == 10
    (done,) = book.poll()
    assert (done.ticket, done.rows) == (ticket, None)
    assert isinstance(done.error, TransferCancelledError)
    assert seen == [done]
    book.wait(start(book, "out", log=log, after=[ticket], pairs=pairs((5, 5))))
    book.synchronize()
    assert log == [[[0, 1]], [[5, 5]]] or log == [[[5, 5]], [[0, 1]]]
    with pytest.raises(UnknownTicketError):
        book.cancel(99)


def test_what_others_need_starts_and_cannot_be_given_up():
    book = transfers(limit=1000)
    start(book, "in")
    ticket = start(book, "in", prefetch=True)
    start(book, "copy", after=[ticket])
    assert not book.cancel(ticket)


def test_no_more_than_a_window_goes_ahead():
    streams = StoppedStreams(0)
    book = Transfers(streams, max_outstanding=1000, mappings=MappingBuffers(pinned=False), max_ahead=25)
    for _ in range(4):
        start(book, "in", prefetch=True)
    assert streams.launched == 2
    assert [book.cancel(ticket) for ticket in (1, 2, 3, 4)] == [False, False, True, True]
    with pytest.raises(InvalidArgumentError, match="max_ahead 0, must be at least 1"):
        Transfers(streams, max_outstanding=1, mappings=MappingBuffers(pinned=False), max_ahead=0)


class Play:
    """Loads over a simulated device, each writing its number into blocks, and what must be true of any order."""

    def __init__(self, seed: int) -> None:
        self.streams = SimulatedStreams(seed)
        launch = self.streams.launch
        self.streams.launch = lambda stream, work, waits=(): self.launched(work.args[0]) or launch(stream, work, waits)
        buffers = MappingBuffers(pinned=False)
        self.book = Transfers(self.streams, max_outstanding=10**6, mappings=buffers, max_ahead=20)
        self.memory: dict[int, int] = {}
        self.writes: dict[int, list[int]] = {}  # ticket -> blocks
        self.pieces: dict[int, int] = {}  # ticket -> pieces that are to run
        self.prefetches: set[int] = set()
        self.started: list[int] = []
        self.cancelled: set[int] = set()
        self.done: list[Done] = []
        self.free_will = False  # whether what starts now was not asked for

    def launched(self, ticket: int) -> None:
        if self.free_will:
            awaited = [t for t, left in self.pieces.items() if left and t not in self.prefetches]
            assert not awaited, f"prefetch {ticket} goes before {awaited}"
            earlier = [t for t in self.prefetches - self.cancelled - set(self.started) if t < ticket]
            assert not earlier, f"prefetch {ticket} goes before {earlier}"
        self.started.append(ticket)

    def run(self, ticket: int, part: int) -> None:
        blocks = self.writes[ticket]
        half = len(blocks) // 2
        self.memory |= dict.fromkeys(blocks[:half] if part == 0 else blocks[half:], ticket)
        self.pieces[ticket] -= 1

    def load(self, blocks: list[int], *, prefetch: bool, after: list[int]) -> None:
        ticket = len(self.writes) + 1
        self.writes[ticket], self.pieces[ticket] = blocks, 2
        if prefetch:
            self.prefetches.add(ticket)
        made = self.book.submit(
            "in",
            lambda mapping: [partial(self.run, ticket, part) for part in range(2)],
            pairs(*[(0, block) for block in blocks]),
            num_bytes=len(blocks) * 10,
            after=after,
            prefetch=prefetch,
        )
        assert made == ticket

    def need(self, ticket: int) -> None:
        """Somebody waits for a ticket: it is awaited from now on."""
        if ticket in self.prefetches - self.cancelled:
            self.book.order_compute(ticket)

    def cancel(self, ticket: int) -> None:
        fresh = ticket not in self.started and ticket not in self.cancelled
        assert self.book.cancel(ticket) == fresh
        if fresh:
            self.cancelled.add(ticket)
            self.pieces[ticket] = 0

    def poll(self) -> None:
        self.free_will = True
        self.done += self.book.poll()
        self.free_will = False

    def finish(self) -> None:
        self.book.synchronize()
        self.done += self.book.poll()
        assert sorted(done.ticket for done in self.done) == sorted(self.writes)
        assert {d.ticket for d in self.done if isinstance(d.error, TransferCancelledError)} == self.cancelled
        wanted = {block: t for t, blocks in self.writes.items() if t not in self.cancelled for block in blocks}
        assert self.memory == wanted


@given(st.integers(0, 1 << 20), st.data())
def test_whatever_is_awaited_or_given_up_loads_of_a_block_keep_their_order(seed: int, data: st.DataObject):
    play = Play(seed)
    for _ in range(data.draw(st.integers(1, 25))):
        call = data.draw(st.sampled_from(["prefetch", "prefetch", "awaited", "need", "cancel", "poll"]))
        tickets = sorted(play.writes)
        if call in {"prefetch", "awaited"}:
            blocks = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
            after = data.draw(st.lists(st.sampled_from(tickets), max_size=1)) if tickets else []
            play.load(blocks, prefetch=call == "prefetch", after=after)
        elif call == "poll":
            play.poll()
        elif tickets:
            getattr(play, call)(data.draw(st.sampled_from(tickets)))
    play.finish()
