"""The worker thread: what streams and events order is ordered, and what compute waits for soonest goes first."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from interrupts import CountedInterrupt

from blockyard.engine import streams as streams_module
from blockyard.engine.streams import STREAMS, WorkerStreams
from blockyard.errors import BlockyardError

PATIENCE = 120.0


@pytest.fixture
def streams() -> Iterator[WorkerStreams]:
    made = WorkerStreams()
    yield made
    made.close()


class Gate:
    """Work that holds the worker up until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._begun = threading.Event()

    def __call__(self) -> None:
        self._begun.set()
        assert self._open.wait(PATIENCE)

    def wait_until_begun(self) -> None:
        assert self._begun.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


def note(log: list[str], name: str) -> Callable[[], None]:
    return lambda: log.append(name)


def test_work_of_one_stream_runs_in_its_order(streams: WorkerStreams):
    log: list[str] = []
    for name in "abc":
        event = streams.launch("out", note(log, name))
    event.synchronize()
    assert log == ["a", "b", "c"]
    assert event.query()
    assert event.error is None


def test_loads_overtake_stores_that_have_not_begun(streams: WorkerStreams):
    log: list[str] = []
    gate = Gate()
    streams.launch("out", gate)
    gate.wait_until_begun()
    for stream in reversed(STREAMS):
        event = streams.launch(stream, note(log, stream))
    last = streams.launch("out", note(log, "end"))
    assert not event.query()
    gate.open()
    last.synchronize()
    assert log == ["copy", "in", "host", "out", "end"]


def test_work_waits_for_events_of_other_streams_and_holds_up_its_own(streams: WorkerStreams):
    log: list[str] = []
    gate = Gate()
    streams.launch("out", gate)
    gate.wait_until_begun()
    store = streams.launch("out", note(log, "store"))
    streams.launch("in", note(log, "load after store"), [store])
    streams.launch("in", note(log, "load behind it"))
    last = streams.launch("copy", note(log, "copy"))
    gate.open()
    streams.close()
    assert log == ["copy", "store", "load after store", "load behind it"]
    assert last.query()


def test_what_work_raises_is_the_events_error_and_later_work_runs(streams: WorkerStreams):
    def fail() -> None:
        raise ValueError("no such block")

    failed = streams.launch("in", fail)
    good = streams.launch("in", lambda: None, [failed])
    good.synchronize()
    assert str(failed.error) == "no such block"
    assert good.error is None


class Unfit:
    """An event of another device that cannot be waited for."""

    error = None

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError("no such device")


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_whatever_ends_work_ends_its_event_and_later_work_runs(streams: WorkerStreams, error: BaseException):
    def fail() -> None:
        raise error

    first, second = streams.launch("in", fail), streams.launch("in", lambda: None)
    for event in (first, second):
        event.synchronize()
    assert isinstance(first.error, Exception)
    assert error in {first.error, first.error.__cause__}
    assert second.error is None


def test_an_event_that_cannot_be_waited_for_is_the_works_error(streams: WorkerStreams):
    ran: list[int] = []
    event = streams.launch("in", lambda: ran.append(1), [Unfit()])
    event.synchronize()
    assert "no such device" in str(event.error)
    assert ran == []


def test_a_worker_that_dies_between_two_pieces_of_work_ends_all_that_is_queued(
    streams: WorkerStreams, monkeypatch: pytest.MonkeyPatch
):
    def die() -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(streams, "_next", die)
        event = streams.launch("in", lambda: None)
        event.synchronize()
        assert isinstance(event.error, MemoryError)
    again = streams.launch("in", lambda: None)
    again.synchronize()
    assert again.error is None


def test_a_worker_that_lacks_memory_before_its_first_line_begins_a_little_later(
    streams: WorkerStreams, monkeypatch: pytest.MonkeyPatch
):
    serve, fails = streams._serve, [MemoryError] * 3

    def begin() -> None:
        if fails:
            raise fails.pop()
        serve()

    monkeypatch.setattr(streams, "_serve", begin)
    event = streams.launch("in", lambda: None)
    event.synchronize()
    assert event.error is None
    assert not fails


def test_compute_is_the_calling_thread(streams: WorkerStreams):
    gate = Gate()
    event = streams.launch("in", gate)
    fence = streams.fence()
    fence.synchronize()
    assert fence.query()
    assert fence.error is None
    gate.wait_until_begun()
    gate.open()
    streams.order_compute(event)
    assert event.query()


def test_events_of_other_streams_objects_are_waited_for(streams: WorkerStreams):
    others = WorkerStreams()
    gate = Gate()
    theirs = others.launch("in", gate)
    ours = streams.launch("in", lambda: None, [theirs, streams.fence()])
    gate.wait_until_begun()
    assert not ours.query()
    gate.open()
    ours.synchronize()
    assert theirs.query()
    others.close()


def test_the_thread_ends_when_there_is_no_work_and_starts_again(
    streams: WorkerStreams, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streams_module, "_IDLE_SECONDS", 0.01)
    for _ in range(2):
        streams.launch("in", lambda: None).synchronize()
        thread = streams._thread
        if thread is not None:
            thread.join(PATIENCE)
        assert streams._thread is None


def test_closing_runs_what_was_launched_and_refuses_more(streams: WorkerStreams):
    log: list[str] = []
    for _ in range(100):
        streams.launch("out", note(log, "store"))
    streams.close()
    streams.close()
    assert len(log) == 100
    with pytest.raises(BlockyardError, match="closed: nothing can be launched on 'in'"):
        streams.launch("in", lambda: None)


def test_an_interrupt_at_any_place_of_a_launch_leaves_nothing_locked():
    for place in itertools.count():
        streams, done = WorkerStreams(), threading.Event()
        interrupt = CountedInterrupt(place, (streams_module.__file__, threading.__file__))
        streams.launch("out", lambda: None).synchronize()  # the thread runs
        with suppress(KeyboardInterrupt), interrupt.armed():
            streams.launch("out", lambda: None)
        other = threading.Thread(target=streams.launch, args=("out", done.set), daemon=True)
        other.start()
        assert done.wait(10.0), f"nothing runs after an interrupt at {interrupt.where}"
        streams.close()
        if not interrupt.where:
            break
    assert place > 15
