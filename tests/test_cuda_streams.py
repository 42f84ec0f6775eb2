"""CUDA streams without a device: what is queued where, in front of a stand-in for torch's streams and events."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from blockyard.engine.cuda import capture
from blockyard.engine.cuda.streams import CudaEvent, CudaStreams
from blockyard.engine.streams import WorkerStreams
from blockyard.errors import BlockyardError

LOG: list[tuple[str, str]] = []


class Stream:
    made = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        Stream.made += 1
        self.name = f"stream {Stream.made}"
        LOG.append((self.name, f"priority {priority}"))

    def wait_event(self, event: "Event") -> None:
        LOG.append((self.name, f"waits for {event.place}"))

    def synchronize(self) -> None:
        LOG.append((self.name, "synchronized"))


class Event:
    def record(self, stream: Stream) -> None:
        self.place = stream.name
        LOG.append((stream.name, "recorded"))

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        LOG.append((self.place, "event synchronized"))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaStreams]:
    LOG.clear()
    Stream.made = 0
    compute = Stream()
    compute.name = "compute"

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        LOG.append((stream.name, "current"))
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    made = CudaStreams(torch.device("cuda"))
    LOG.clear()
    yield made
    made.close()


def name_of(streams: CudaStreams, stream: str) -> str:
    return streams._streams[stream].name


def test_host_copies_wait_for_the_device_while_another_thread_captures(
    fake: ctypes.CDLL, streams: CudaStreams, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capture, "load_driver", lambda: fake)
    forbidden: list[bool] = []
    monkeypatch.setattr(Event, "synchronize", lambda _: forbidden.append(fake.fake_is_forbidden()))
    fence = streams.fence()
    fake.fake_begin_capture(0)
    event = streams.launch("host", lambda: None, [fence])
    event.synchronize()
    assert (event.error, forbidden) == (None, [False])
    assert fake.fake_end_capture() == 0


def test_work_is_queued_on_its_stream_after_the_events_it_waits_for(streams: CudaStreams):
    fence = streams.fence()
    store = streams.launch("out", lambda: LOG.append(("work", "store")), [fence])
    load = streams.launch("in", lambda: LOG.append(("work", "load")), [fence, store])
    streams.order_compute(load)
    out, into = name_of(streams, "out"), name_of(streams, "in")
    assert out != into
    assert [
        ("compute", "recorded"),
        (out, "waits for compute"),
        (out, "current"),
        ("work", "store"),
        (out, "recorded"),
        (into, "waits for compute"),
        (into, f"waits for {out}"),
        (into, "current"),
        ("work", "load"),
        (into, "recorded"),
        ("compute", f"waits for {into}"),
    ] == LOG
    assert not load.query()


def test_a_call_that_fails_is_the_events_error_and_the_rest_of_it_is_waited_for(streams: CudaStreams):
    def fail() -> None:
        raise RuntimeError("launch failed")

    event = streams.launch("in", fail)
    assert str(event.error) == "launch failed"
    assert LOG[-1] == (name_of(streams, "in"), "recorded")


def test_work_between_memory_of_the_host_runs_in_a_thread(streams: CudaStreams):
    before = streams.launch("out", lambda: None)
    event = streams.launch("host", lambda: LOG.append(("work", "host")), [before])
    assert not isinstance(event, CudaEvent)
    streams.order_compute(event)
    assert LOG[-2:] == [(name_of(streams, "out"), "event synchronized"), ("work", "host")]
    streams.launch("in", lambda: None, [event])
    assert event.query()


def test_the_callers_streams_are_the_current_one_and_this_thread(streams: CudaStreams):
    store = streams.launch("out", lambda: None)
    LOG.clear()
    event = streams.launch("compute", lambda: LOG.append(("work", "compute")), [store])
    assert isinstance(event, CudaEvent)
    streams.launch("caller", lambda: LOG.append(("work", "caller")), [event])
    assert [
        ("compute", f"waits for {name_of(streams, 'out')}"),
        ("compute", "current"),
        ("work", "compute"),
        ("compute", "recorded"),
        ("compute", "event synchronized"),
        ("work", "caller"),
    ] == LOG
    assert streams._host._thread is None


def test_streams_do_not_delay_one_another_so_nothing_is_cut(streams: CudaStreams):
    assert streams.chunk_bytes is None
    assert WorkerStreams.chunk_bytes


def test_closing_waits_for_every_stream_once(streams: CudaStreams):
    streams.close()
    streams.close()
    assert sorted(LOG) == sorted((stream.name, "synchronized") for stream in streams._streams.values())
    with pytest.raises(BlockyardError, match="closed"):
        streams.launch("in", lambda: None)
