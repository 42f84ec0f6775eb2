"""Transfers over a simulated device: when they end, what they hold until then, and what is refused meanwhile."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import SimulatedFaultError, SimulatedStreams

from blockyard._core import Mapping
from blockyard.engine.streams import WorkerStreams
from blockyard.engine.transfers import Transfer, Transfers
from blockyard.errors import CaptureError, InvalidArgumentError, TransferQueueFullError


class StoppedStreams(SimulatedStreams):
    """Nothing runs before it is waited for."""

    def progress(self) -> None:
        return


def transfers(limit: int = 100, *, fail: float = 0.0, **more: object) -> Transfers:
    return Transfers(StoppedStreams(0, fail=fail), max_outstanding=limit, **more)


def pairs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 2)


SIDES = {"out": ("device", "host"), "in": ("host", "device"), "copy": ("device", "device"), "host": ("host", "host")}


def plan(
    stream: str, chosen: np.ndarray, num_bytes: int, pieces: list[Callable[[], object]], **more: object
) -> Transfer:
    mapping = Mapping(chosen, src_blocks=10, dst_blocks=10, rule="swap")
    return Transfer("copy", *SIDES.get(stream, SIDES["copy"]), mapping, num_bytes, deque(pieces), **more)


def start(
    book: Transfers, stream: str = "out", num_bytes: int = 10, log: list[object] | None = None, **more: object
) -> Transfer:
    piece = lambda: None if log is None else log.append(made.mapping.pairs.tolist())  # noqa: E731
    made = plan(stream, more.pop("pairs", pairs((0, 1))), num_bytes, [piece])
    return book.submit(made, stream, **more)


def test_a_transfer_is_done_when_its_event_has_fired():
    book = transfers()
    first, second = start(book), start(book)
    assert not first.done
    assert repr(first) == "Transfer(in flight)"
    assert book.outstanding("out") == 20
    assert first.wait() is first
    assert (first.done, first.error, first.rows, repr(first)) == (True, None, None, "Transfer(landed)")
    book.synchronize()
    assert second.done
    assert book.outstanding("out") == 0
    assert first.wait().error is None, "a transfer can be asked again"
    first.order_compute()


def test_pairs_are_copied_when_they_are_submitted():
    book = transfers()
    log: list[object] = []
    mapping = pairs((0, 1), (2, 3))
    first = start(book, log=log, pairs=mapping)
    mapping[:] = 9
    second = start(book, log=log, pairs=pairs((4, 5)))
    second.wait()
    assert log == [[[0, 1], [2, 3]], [[4, 5]]]
    assert first.done


def test_a_failed_transfer_raises_in_wait_and_ends_once():
    seen: list[Transfer] = []
    book = transfers(fail=1.0, on_end=seen.append)
    failed = start(book)
    with pytest.raises(SimulatedFaultError, match="failed on purpose"):
        failed.wait()
    book = transfers(on_end=seen.append)
    landed = start(book)
    assert seen == [failed]
    book.synchronize()
    book.poll()
    assert seen == [failed, landed]


def test_a_full_stream_refuses_or_waits_as_the_caller_chooses():
    book = transfers(limit=25)
    start(book, num_bytes=20)
    with pytest.raises(TransferQueueFullError, match=r"20 bytes are in flight on stream 'out', 10 more .* limit of 25"):
        book.make_room("out", 10, "refuse")
    book.make_room("in", 25, "refuse")
    book.make_room("out", 5, "refuse")
    assert len(book.open()) == 1
    book.make_room("out", 10, "wait")
    assert book.outstanding("out") == 0
    assert book.open() == ()
    with pytest.raises(InvalidArgumentError, match="on_full is 'never'"):
        book.make_room("out", 1, "never")


def test_a_transfer_over_the_limit_goes_alone():
    book = transfers(limit=25)
    book.make_room("out", 1000, "refuse")
    start(book, num_bytes=1000)
    with pytest.raises(TransferQueueFullError):
        book.make_room("out", 1, "refuse")


def test_a_layer_that_there_is_not_is_refused():
    book = transfers()
    load = book.submit(plan("in", pairs(), 3, [lambda: None] * 3, layers=(0, 1, 2)))
    for layer in (-1, 3):
        with pytest.raises(InvalidArgumentError, match=f"layer is {layer}, must be 0 to 2"):
            load.order_compute(layer)
    book.synchronize()
    load.order_compute(3)


def test_a_layer_waits_for_the_piece_that_it_comes_with():
    book, log = transfers(), []
    pieces = [partial(log.append, number) for number in range(2)]
    load = book.submit(plan("in", pairs(), 3, pieces, layers=(0, 0, 0, 1)))
    for layer, arrived in ((2, [0]), (3, [0, 1])):
        load.order_compute(layer)
        book.streams.fence().synchronize()
        assert log == arrived


@pytest.mark.parametrize("seed", range(20))
def test_transfers_run_after_those_they_name_on_any_stream(seed: int):
    book = Transfers(SimulatedStreams(seed), max_outstanding=100)
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
    assert not one.done
    assert two.wait().error is None
    assert log == [[[0, 0]], [[0, 3]], [[0, 2]]], "a prefetch that is waited for goes at once"
    assert (awaited.done, last.done, one.done) == (True, True, False)
    book.synchronize()
    assert log[3:] == [[[0, 1]]]
    assert one.done


def test_loads_of_one_block_keep_their_order_whoever_waits():
    book = transfers(limit=1000)
    log: list[object] = []
    start(book, "in", log=log, pairs=pairs((0, 0)))
    start(book, "in", log=log, pairs=pairs((0, 7), (1, 8)), prefetch=True)
    start(book, "in", log=log, pairs=pairs((0, 9)), prefetch=True)
    start(book, "in", log=log, pairs=pairs((2, 8))).wait()
    assert log == [[[0, 0]], [[0, 7], [1, 8]], [[2, 8]]]


def test_what_others_need_starts():
    streams = StoppedStreams(0)
    book = Transfers(streams, max_outstanding=1000)
    start(book, "in")
    needed = start(book, "in", prefetch=True)
    assert streams.launched == 1
    start(book, "copy", after=[needed])
    assert streams.launched == 3


def test_no_more_than_a_window_goes_ahead():
    streams = StoppedStreams(0)
    book = Transfers(streams, max_outstanding=1000, max_ahead=25)
    for _ in range(4):
        start(book, "in", prefetch=True)
    assert streams.launched == 2
    with pytest.raises(InvalidArgumentError, match="max_ahead 0, must be at least 1"):
        Transfers(streams, max_outstanding=1, max_ahead=0)


class Play:
    """Loads over a simulated device, each writing its number into blocks, and what must be true of any order."""

    def __init__(self, seed: int) -> None:
        self.streams = SimulatedStreams(seed)
        launch = self.streams.launch
        self.streams.launch = lambda stream, work, waits=(): self.launched(work.args[0]) or launch(stream, work, waits)
        self.book = Transfers(self.streams, max_outstanding=10**6, max_ahead=20)
        self.memory: dict[int, int] = {}
        self.writes: dict[int, list[int]] = {}  # ticket -> blocks
        self.pieces: dict[int, int] = {}  # ticket -> pieces that are to run
        self.prefetches: set[int] = set()
        self.started: list[int] = []
        self.made: dict[int, Transfer] = {}
        self.free_will = False  # whether what starts now was not asked for

    def launched(self, ticket: int) -> None:
        if self.free_will:
            awaited = [t for t, left in self.pieces.items() if left and t not in self.prefetches]
            assert not awaited, f"prefetch {ticket} goes before {awaited}"
            earlier = [t for t in self.prefetches - set(self.started) if t < ticket]
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
        chosen = pairs(*[(0, block) for block in blocks])
        pieces = [partial(self.run, ticket, part) for part in range(2)]
        self.made[ticket] = self.book.submit(
            plan("in", chosen, len(blocks) * 10, pieces),
            after=[self.made[earlier] for earlier in after],
            prefetch=prefetch,
        )

    def need(self, ticket: int) -> None:
        """Somebody waits for a ticket: it is awaited from now on."""
        if ticket in self.prefetches:
            self.made[ticket].order_compute()

    def poll(self) -> None:
        self.free_will = True
        self.book.poll()
        self.free_will = False

    def finish(self) -> None:
        self.book.synchronize()
        assert self.book.open() == ()
        assert not [made.error for made in self.made.values() if made.error is not None]
        assert self.memory == {block: t for t, blocks in self.writes.items() for block in blocks}


@given(st.integers(0, 1 << 20), st.data())
def test_whatever_is_awaited_loads_of_a_block_keep_their_order(seed: int, data: st.DataObject):
    play = Play(seed)
    for _ in range(data.draw(st.integers(1, 25))):
        call = data.draw(st.sampled_from(["prefetch", "prefetch", "awaited", "need", "poll"]))
        tickets = sorted(play.writes)
        if call in {"prefetch", "awaited"}:
            blocks = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
            after = data.draw(st.lists(st.sampled_from(tickets), max_size=1)) if tickets else []
            play.load(blocks, prefetch=call == "prefetch", after=after)
        elif call == "poll":
            play.poll()
        elif tickets:
            play.need(data.draw(st.sampled_from(tickets)))
    play.finish()


# ---- the caller's own streams ----


@pytest.mark.parametrize("stream", ["compute", "caller"])
def test_work_on_the_callers_stream_runs_here_and_what_it_raises_is_the_transfers_error(stream: str):
    book = Transfers(WorkerStreams(), max_outstanding=100)
    log: list[object] = []
    assert start(book, stream, log=log).wait().error is None
    assert log == [[[0, 1]]]
    failed = book.submit(plan(stream, pairs(), 0, [lambda: int("no number")]), stream)
    assert book.failed_to_launch(failed)
    with pytest.raises(ValueError, match="no number"):
        failed.wait()
    assert book.streams._thread is None


def test_after_an_interrupted_call_everything_in_flight_has_failed_once_it_has_run():
    book, log = Transfers(WorkerStreams(), max_outstanding=100), []
    gate = threading.Event()

    def interrupt() -> None:
        raise KeyboardInterrupt

    running = book.submit(plan("out", pairs(), 5, [lambda: gate.wait(30), lambda: log.append("ran")]))
    queued = start(book, "in", log=log, prefetch=True)
    with pytest.raises(KeyboardInterrupt):
        book.submit(plan("compute", pairs(), 0, [interrupt]), "compute")
    torn = book.open()[-1]
    threading.Timer(0.01, gate.set).start()
    assert torn.done
    assert "ran" in log
    assert all("interrupted" in str(each.error) for each in (running, queued, torn))
    assert (book.open(), book.outstanding("out"), book.outstanding("in")) == ((), 0, 0)
    assert start(book).wait().error is None
    book.streams.close()


def test_a_graph_takes_work_alone_and_only_if_nothing_is_open():
    book = transfers()
    log: list[object] = []
    work = plan("copy", pairs((1, 2)), 10, [partial(log.append, 1)])
    assert book.capture(work).done
    assert log == [1]
    start(book)
    with pytest.raises(CaptureError, match="1 transfers are open"):
        book.capture(work)
    assert len(log) == 1
