"""Tickets over a simulated device: when they end, what they hold until then, and what is refused meanwhile."""

import numpy as np
import pytest
from torch import Tensor

from blockyard.errors import InvalidArgumentError, TransferQueueFullError, UnknownTicketError
from blockyard.testing.device import SimulatedStreams
from blockyard.transfer.tickets import Done, MappingBuffers, Transfers


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
