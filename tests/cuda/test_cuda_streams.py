"""CUDA streams without a device: what is queued where, in front of a stand-in for torch's streams and events."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from forks import in_child

from blockyard.engine import engine
from blockyard.engine.cuda import capture
from blockyard.engine.cuda.streams import CudaEvent, CudaStreams, with_index
from blockyard.engine.host_pool import CudaLocker
from blockyard.engine.ops import fallback
from blockyard.engine.streams import WorkerStreams
from blockyard.errors import BlockyardError, CaptureError
from blockyard.layout.kv import KVLayout

LOG: list[tuple[str, str]] = []
LAYOUT = KVLayout("flat", 1, block_size=1, num_kv_heads=1, head_size=8, dtype="uint8")
GUARDS: list[int] = []  # devices that were current for a while, innermost last


class Stream:
    made = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        Stream.made += 1
        self.device = device
        self.name = f"stream {Stream.made}"
        LOG.append((self.name, f"priority {priority}"))

    def wait_event(self, event: "Event") -> None:
        if event.in_graph:
            Graph.streams.add(self.name)
        elif self.name in Graph.streams:
            Graph.lose(905)
        LOG.append((self.name, f"waits for {event.place}"))

    def synchronize(self) -> None:
        LOG.append((self.name, "synchronized"))


class Graph:
    """A capture in torch's mode: what the runtime refuses meanwhile raises its code, and the graph is lost."""

    streams: ClassVar[set[str]] = set()  # those whose work goes into the graph
    lost: ClassVar[list[int]] = []

    @classmethod
    def lose(cls, code: int) -> None:
        cls.lost.append(code)
        raise torch.AcceleratorError(f"CUDA error {code}")

    @classmethod
    @contextmanager
    def captured(cls) -> Iterator[None]:
        cls.streams, cls.lost = {"compute"}, []
        yield
        if cls.streams != {"compute"}:
            cls.lost.append(904)  # a stream was not joined
        cls.streams = set()


class Event:
    fires = False  # whether all has run that was queued before a question

    def record(self, stream: Stream) -> None:
        self.place, self.in_graph = stream.name, stream.name in Graph.streams
        LOG.append((stream.name, "recorded"))

    def query(self) -> bool:
        self._ask()
        return Event.fires

    def synchronize(self) -> None:
        self._ask()
        LOG.append((self.place, "event synchronized"))

    def _ask(self) -> None:
        if self.in_graph:
            Graph.lose(907)
        if Graph.streams:
            Graph.lose(900)


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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: {2: compute}[device.index])
    # Device 2 is current while the streams are made, and device 0 afterwards, as in a new thread.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    made = CudaStreams(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GUARDS[-1] if GUARDS else 0)
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


def test_the_device_that_was_current_at_first_is_kept(streams: CudaStreams, monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        GUARDS.append(device.index)
        yield
        GUARDS.pop()

    monkeypatch.setattr(torch.cuda, "device", guard)
    # torch has one answer for each device, and gives that of the current one.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: torch.cuda.current_device() == 2)
    assert {stream.device for stream in streams._streams.values()} == {torch.device("cuda", 2)}
    streams.order_compute(streams.fence())
    streams.launch("compute", lambda: None)
    assert streams.capturing()
    assert not GUARDS


def test_an_engine_keeps_to_the_device_that_was_current_at_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert with_index("cuda") == torch.device("cuda", 3)
    assert with_index("cuda:1") == torch.device("cuda", 1)
    assert with_index("cpu") == torch.device("cpu")
    assert CudaLocker(torch.device("cuda")).device == torch.device("cuda", 3)
    asked: list[torch.device] = []
    monkeypatch.setattr(engine, "prepare_device", asked.append)
    monkeypatch.setattr(engine, "CudaStreams", lambda device: asked.append(device) or WorkerStreams())
    monkeypatch.setattr(engine, "Memory", lambda *_, device, **__: asked.append(device))
    engine.CacheEngine(LAYOUT, device="cuda")
    assert asked == [torch.device("cuda", 3)] * 3
    asked.clear()
    for device in (None, "cuda", torch.device("cuda"), "cuda:1"):
        engine.CacheEngine(LAYOUT, device=device, tensors=[SimpleNamespace(device=torch.device("cuda", 1))])
    assert asked == [torch.device("cuda", 1)] * 12


def test_torch_calls_ask_the_tensors_device_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch):
    entered: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    with pytest.raises(CaptureError, match="a graph cannot capture this copy"):
        fallback._refuse_capture(SimpleNamespace(is_cuda=False), tensor)
    assert entered == [tensor.device]


PAIRS = np.array([[0, 1]])
CALLS: dict[str, Callable[[engine.CacheEngine, Any], object]] = {
    "submit": lambda made, _: made.submit("swap_out", PAIRS),
    "submit a load by layer": lambda made, _: made.submit("swap_in", PAIRS, by_layer=True),
    "submit_read": lambda made, _: made.submit_read("device", PAIRS[0]),
    "submit_write": lambda made, _: made.submit_write("device", PAIRS[0], np.zeros((2, 16), np.uint8)),
    "read": lambda made, _: made.read("device", PAIRS[0]),
    "write": lambda made, _: made.write("device", PAIRS[0], np.zeros((2, 16), np.uint8)),
    "run within the host": lambda made, _: made.run("copy", PAIRS, tier="host"),
    "poll": lambda made, _: made.poll(),
    "fence": lambda made, _: made.fence(),
    "close": lambda made, _: made.close(),
    "done": lambda _, transfer: transfer.done,
    "wait": lambda _, transfer: transfer.wait(),
    "order_compute": lambda _, transfer: transfer.order_compute(),
    "elastic memory shrinks": lambda made, _: engine.wait_for_engines(made.tensors[0].view(-1), 0),
}


@pytest.fixture
def captured(streams: CudaStreams, monkeypatch: pytest.MonkeyPatch) -> Iterator[engine.CacheEngine]:
    """An engine over these streams, with one transfer under way; its memory is the CPU's."""

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(Graph.streams))
    made = engine.CacheEngine(LAYOUT, device_blocks=4, host_blocks=4, streams=streams)
    made._on_cuda = True
    staging = made.memory.staging

    def page_locked(num_rows: int) -> torch.Tensor:
        if Graph.streams:
            Graph.lose(900)
        return staging(num_rows)

    made.memory.staging = page_locked
    monkeypatch.setattr(Event, "fires", False)
    yield made
    Event.fires = True
    made.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_inside_a_graph_capture_is_refused_and_both_go_on(captured: engine.CacheEngine, name: str):
    for tensor in captured.tensors:
        tensor.fill_(7)
    transfer = captured.submit("swap_out", PAIRS)
    LOG.clear()
    with Graph.captured(), pytest.raises(CaptureError, match="before or after the capture"):
        CALLS[name](captured, transfer)
    assert (Graph.lost, LOG) == ([], [])
    assert captured.transfers.open() == (transfer,)
    assert all(bool(tensor.eq(7).all()) for tensor in captured.tensors)
    Event.fires = True
    assert transfer.wait().done
    np.testing.assert_array_equal(captured.read("host", PAIRS[:, 1]), 7)
    CALLS[name](captured, captured.submit("swap_out", PAIRS))


def test_the_calls_that_are_refused_would_lose_the_graph(captured: engine.CacheEngine, monkeypatch: pytest.MonkeyPatch):
    transfer = captured.submit("swap_out", PAIRS)
    monkeypatch.setattr(captured.streams, "capturing", lambda: False)
    for name in ("submit", "submit_read", "read", "poll", "done", "wait", "order_compute"):
        with Graph.captured(), suppress(torch.AcceleratorError):
            CALLS[name](captured, transfer)
        assert Graph.lost, name
    captured.transfers._open.clear()


def test_streams_do_not_delay_one_another_so_nothing_is_cut(streams: CudaStreams):
    assert streams.chunk_bytes is None
    assert WorkerStreams.chunk_bytes


def test_closing_waits_for_every_stream_once(streams: CudaStreams):
    streams.close()
    streams.close()
    assert sorted(LOG) == sorted((stream.name, "synchronized") for stream in streams._streams.values())
    with pytest.raises(BlockyardError, match="closed"):
        streams.launch("in", lambda: None)


def test_closing_waits_for_synchronous_copies_on_the_streams_of_compute(streams: CudaStreams):
    streams.launch("compute", lambda: None)
    LOG.clear()
    streams.close()
    assert LOG[-1] == ("compute", "event synchronized")


def test_streams_are_not_touched_in_a_forked_child(streams: CudaStreams):
    def check() -> None:
        streams.close()
        assert not LOG

    in_child(check)


def test_an_engine_that_is_collected_during_a_capture_loses_no_graph(
    fake: ctypes.CDLL, streams: CudaStreams, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capture, "load_driver", lambda: fake)
    forbidden: list[bool] = []
    monkeypatch.setattr(Stream, "synchronize", lambda _: forbidden.append(fake.fake_is_forbidden()))
    fake.fake_begin_capture(0)
    streams.close()
    assert (set(forbidden), fake.fake_end_capture()) == ({False}, 0)


def test_a_device_that_fails_is_named_with_the_work_that_failed_and_the_memory_is_released(
    captured: engine.CacheEngine, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error 700")

    def launch(_: object) -> None:
        raise RuntimeError("copying blocks failed")

    captured.memory.run = lambda *_: launch
    with monkeypatch.context() as lost:
        for owner, name in ((Event, "record"), (Event, "synchronize"), (Stream, "synchronize")):
            lost.setattr(owner, name, fail)
        with pytest.raises(torch.AcceleratorError, match="700") as raised:
            captured.streams.launch("out", lambda: launch(None))
        assert str(raised.value.__cause__) == "copying blocks failed"
        with pytest.raises(torch.AcceleratorError, match="700"):
            captured.submit("swap_out", PAIRS, after_compute=captured.streams._host.fence())
        with pytest.raises(torch.AcceleratorError, match="700"):
            captured.close()
    assert (captured.tensors, captured.memory.host_pool.num_blocks) == ([], 0)
    monkeypatch.setattr(captured, "close", lambda: None)  # the fixture's
