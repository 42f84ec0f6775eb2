"""The cache engine's asynchronous calls, on a worker thread and a simulated device, against plain numpy rows."""

import sys
import threading
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import SimulatedFaultError, SimulatedStreams

from blockyard.engine import engine as engine_module
from blockyard.engine.engine import CacheEngine
from blockyard.engine.mapping import unequal_pairs
from blockyard.engine.ops import cpu
from blockyard.engine.streams import WorkerStreams
from blockyard.engine.transfers import Transfer
from blockyard.errors import (
    BlockyardError,
    InvalidArgumentError,
    LayoutError,
    MappingError,
    TransferQueueFullError,
)
from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import KINDS, KVLayout

BLOCKS = 8
LAYERS = 3


def layout(kind: str = "kv_first") -> KVLayout:
    return KVLayout(kind, num_layers=LAYERS, block_size=2, num_kv_heads=1, head_size=4, dtype="float32")


def make(streams: object = None, kind: str = "kv_first", **more: int) -> CacheEngine:
    return CacheEngine(layout(kind), device_blocks=BLOCKS, host_blocks=BLOCKS, streams=streams, **more)


def content(seed: int, count: int = BLOCKS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, layout().bytes_per_block), np.uint8)


def filled(engine: CacheEngine) -> dict[str, np.ndarray]:
    rows = {"device": content(0), "host": content(1)}
    for tier, values in rows.items():
        engine.write(tier, np.arange(BLOCKS), values)
    return rows


def pairs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 2)


def assert_rows(engine: CacheEngine, wanted: dict[str, np.ndarray]) -> None:
    for tier, rows in wanted.items():
        np.testing.assert_array_equal(engine.read(tier, np.arange(BLOCKS)), rows, err_msg=tier)


@pytest.fixture(params=["worker", "simulated"])
def engine(request: pytest.FixtureRequest) -> Iterator[CacheEngine]:
    streams = SimulatedStreams(3) if request.param == "simulated" else None
    with make(streams) as made:
        yield made


@pytest.mark.parametrize("kind", [*KINDS, "rocm", "flat"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_every_kind_of_transfer_moves_its_bytes_and_no_others(kind: str, by_layer: bool):
    with make(kind=kind) as engine:
        rows = filled(engine)
        out = engine.submit("swap_out", pairs((0, 5), (1, 2)))
        back = engine.submit("swap_in", pairs((5, 7)), after=[out], by_layer=by_layer)
        copied = engine.submit("copy", pairs((7, 6)), after=[back])
        into = content(7, 2) if by_layer else None
        read = engine.submit_read("device", np.array([6, 3]), into, after=[copied])
        written = engine.submit_write("host", np.array([4, 0]), content(9, 2))
        wrote = engine.submit_write("device", np.array([2]), content(8, 1), after=[read])
        np.testing.assert_array_equal(read.wait().rows, rows["device"][[0, 3]])
        assert into is None or np.shares_memory(read.rows, into)
        for transfer in (out, back, copied, written, wrote):
            assert transfer.wait().done
        rows["host"][[5, 2]] = rows["device"][[0, 1]]
        rows["device"][[7, 6]] = rows["device"][0]
        rows["host"][[4, 0]] = content(9, 2)
        rows["device"][2] = content(8, 1)[0]
        assert_rows(engine, rows)
        size = engine.layout.bytes_per_block
        assert engine.counters == {
            ("device", "host"): (2, 2 * size),
            ("host", "device"): (1, size),
            ("device", "device"): (1, size),
        }


def test_synchronous_calls_come_after_all_open_transfers(engine: CacheEngine):
    rows = filled(engine)
    engine.submit("swap_out", pairs(*[(i, BLOCKS - 1 - i) for i in range(BLOCKS)]))
    engine.run("swap_in", pairs((7, 3)))
    rows["host"] = rows["device"][::-1].copy()
    rows["device"][3] = rows["device"][0]
    assert_rows(engine, rows)


def test_a_mapping_may_be_changed_as_soon_as_the_call_returns(engine: CacheEngine):
    rows = filled(engine)
    mapping = pairs((0, 1))
    tickets = []
    for block in range(BLOCKS):
        mapping[:] = block, BLOCKS - 1 - block
        tickets.append(engine.submit("swap_out", mapping))
    for ticket in tickets:
        ticket.wait()
    rows["host"] = rows["device"][::-1].copy()
    assert_rows(engine, rows)


@pytest.mark.parametrize("seed", range(30))
def test_stores_and_loads_come_after_compute_and_compute_after_what_it_waits_for(seed: int):
    streams = SimulatedStreams(seed)
    engine = make(streams)
    rows = filled(engine)
    first, read = engine.tensors[0], []
    before = first.clone()
    streams.compute(lambda: first.fill_(7))
    engine.submit("swap_out", pairs((0, 0)))
    streams.compute(lambda: read.append(first[:, 4].clone()))
    load = engine.submit("swap_in", pairs((3, 4)))
    load.order_compute()
    streams.compute(lambda: read.append(first[:, 4].clone()))
    engine.fence().synchronize()
    load.wait()
    assert bool((read[0] == 7).all())
    piece = layout().piece_sizes[0] * 2
    np.testing.assert_array_equal(read[1].view(torch.uint8).numpy().reshape(-1), rows["host"][3][:piece])
    stored = engine.read("host", np.array([0]))[0]
    np.testing.assert_array_equal(stored[:piece].view(np.float32), 7)
    np.testing.assert_array_equal(stored[piece:], rows["device"][0][piece:])
    assert before.shape == first.shape
    engine.close()


@pytest.mark.parametrize("seed", range(10))
def test_behind_an_earlier_fence_a_transfer_overtakes_later_compute(seed: int):
    class ComputeStops(SimulatedStreams):
        """Compute does not go on by itself."""

        def progress(self) -> None:
            return

    streams = ComputeStops(seed)
    engine = make(streams)
    fence = engine.fence()
    log: list[str] = []
    streams.compute(lambda: log.append("compute"))
    store = engine.submit("swap_out", pairs((0, 0)), after_compute=fence)
    streams._speeds = dict.fromkeys(streams._speeds, 1.0) | {"compute": 1e-9}
    fence.synchronize()
    store.wait()
    assert log == []
    engine.close()
    assert log == ["compute"]


def test_a_layer_can_be_computed_while_the_next_one_is_loaded():
    class OneAtATime(WorkerStreams):
        """Work of the load stream runs when the test says so."""

        def __init__(self) -> None:
            super().__init__()
            self.permits = threading.Semaphore(0)

        def launch(self, stream: str, work: object, waits: object = ()) -> object:
            def permitted() -> None:
                if stream == "in":
                    assert self.permits.acquire(timeout=30)
                work()

            return super().launch(stream, permitted, waits)

    streams = OneAtATime()
    with make(streams) as engine:
        rows = filled(engine)
        ticket = engine.submit("swap_in", pairs((2, 5)), by_layer=True)
        piece = layout().piece_sizes[0] * 2
        for layer in range(LAYERS):
            streams.permits.release()
            ticket.order_compute(layer)
            loaded = engine.tensors[layer][:, 5].contiguous().view(torch.uint8).numpy().reshape(-1)
            np.testing.assert_array_equal(loaded, rows["host"][2][layer * piece : (layer + 1) * piece])
            assert ticket.done or layer + 1 < LAYERS
            if layer + 1 < LAYERS:
                assert not ticket.done
        assert ticket.wait().error is None


def test_a_load_waits_for_one_piece_of_a_long_store_at_most():
    class Small(WorkerStreams):
        chunk_bytes = layout().bytes_per_block

        def __init__(self) -> None:
            super().__init__()
            self.log: list[str] = []
            self.gate = threading.Event()

        def launch(self, stream: str, work: object, waits: object = ()) -> object:
            def logged() -> None:
                assert self.gate.wait(30)
                self.log.append(stream)
                work()

            return super().launch(stream, logged, waits)

    streams = Small()
    with make(streams) as engine:
        store = engine.submit("swap_out", pairs(*[(i, i) for i in range(BLOCKS)]))
        load = engine.submit("swap_in", pairs((0, 0)), after_compute=None)
        streams.gate.set()
        load.wait()
        store.wait()
        assert streams.log.index("in") <= 1
        assert len(streams.log) == BLOCKS + 1


def test_a_full_queue_refuses_and_leaves_all_as_it_was():
    streams = SimulatedStreams(0)
    streams.progress = lambda: None
    with make(streams, max_outstanding=2 * layout().bytes_per_block) as engine:
        engine.submit("swap_out", pairs((0, 0), (1, 1)))
        with pytest.raises(TransferQueueFullError):
            engine.submit("swap_out", pairs((2, 2)), on_full="refuse")
        engine.submit("swap_in", pairs((5, 5)), on_full="refuse")
        assert engine.submit("swap_out", pairs((2, 2))).wait().done


BAD_CALLS = {
    "swap_out beyond the host": lambda engine: engine.submit("swap_out", pairs((0, BLOCKS))),
    "swap_in twice onto one block": lambda engine: engine.submit("swap_in", pairs((0, 2), (1, 2))),
    "copy of what is written": lambda engine: engine.submit("copy", pairs((0, 2), (2, 3))),
    "read beyond the end": lambda engine: engine.submit_read("host", np.array([BLOCKS])),
    "write twice onto one block": lambda engine: engine.submit_write("host", np.array([1, 1]), content(0, 2)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_refused_call_submits_nothing(engine: CacheEngine, case: str):
    rows = filled(engine)
    with pytest.raises(MappingError):
        BAD_CALLS[case](engine)
    with pytest.raises(LayoutError, match="wanted uint8"):
        engine.submit_write("device", np.array([1]), content(0, 2))
    fixed = content(0, 1)
    fixed.flags.writeable = False
    for into in ([0], content(0, 2), content(0, 1).repeat(2, axis=1)[:, ::2], fixed, content(0, 1).view(np.int8)):
        with pytest.raises(
            LayoutError, match=r"rows is .*, must be uint8 \[1, \d+\], writable, and each row contiguous"
        ):
            engine.submit_read("host", np.array([1]), into)
    assert engine.transfers.open() == ()
    assert_rows(engine, rows)


def test_a_caller_that_polls_without_a_pause_lets_the_worker_run():
    interval = sys.getswitchinterval()
    with make() as engine:
        rows = filled(engine)
        sys.setswitchinterval(600)  # until then no thread takes the interpreter's lock from another
        try:
            read = engine.submit_read("device", np.arange(BLOCKS))
            while not read.done:
                pass
        finally:
            sys.setswitchinterval(interval)
        assert np.array_equal(read.rows, rows["device"])


def test_blocks_are_any_ints(engine: CacheEngine):
    rows = filled(engine)
    for blocks in ([5, 2], (5, 2), np.array([5, 2], np.int32), np.array([5, 2], np.uint64)):
        assert np.array_equal(engine.read("device", blocks), rows["device"][[5, 2]])
        engine.write("device", blocks, rows["device"][[5, 2]])
    assert engine.read("device", []).shape[0] == 0
    for blocks in ([1.5], "ab", None, 3, [[1, 2]], [[1], [1, 2]], [2**70], np.array([True])):
        with pytest.raises(MappingError, match=r"blocks are .*, must be ints \[n\]: an array or a sequence"):
            engine.submit_read("device", blocks)
        with pytest.raises(MappingError, match="blocks are "):
            engine.submit_write("device", blocks, content(0, 1))
    assert_rows(engine, rows)


def test_empty_transfers_end_too(engine: CacheEngine):
    none = np.zeros(0, np.int64)
    empty = content(0)[np.zeros(BLOCKS, np.bool_)]
    tickets = [
        engine.submit("swap_out", pairs()),
        engine.submit("swap_in", pairs(), by_layer=True),
        engine.submit("copy", pairs()),
        *(engine.submit_read(tier, none) for tier in ("device", "host")),
        *(engine.submit_write(tier, none, empty) for tier in ("device", "host")),
    ]
    assert [ticket.wait().error for ticket in tickets] == [None] * len(tickets)


def test_a_failed_transfer_is_reported_and_not_counted():
    with make(SimulatedStreams(0, fail=1.0)) as engine:
        store = engine.submit("swap_out", pairs((0, 0)))
        with pytest.raises(SimulatedFaultError, match="failed on purpose"):
            store.wait()
        assert store.done
        assert "failed on purpose" in repr(store)
        assert engine.counters == {}


def test_arguments_out_of_range_are_refused(engine: CacheEngine):
    with make() as other, pytest.raises(InvalidArgumentError, match="belongs to another engine"):
        engine.submit("swap_out", pairs((0, 0)), after=[other.submit("swap_out", pairs((0, 0)))])
    with pytest.raises(InvalidArgumentError, match="kind is 'store', must be one of swap_out, swap_in, copy"):
        engine.submit("store", pairs((0, 0)))
    with pytest.raises(InvalidArgumentError, match="kind is 'copy': by_layer and prefetch are for 'swap_in'"):
        engine.submit("copy", pairs((0, 1)), prefetch=True)
    assert engine.transfers.open() == ()
    load = engine.submit("swap_in", pairs((0, 0)))
    load.order_compute(99)  # it is waited for as a whole
    with pytest.raises(InvalidArgumentError, match="max_outstanding"):
        make(max_outstanding=0)


def test_closing_waits_for_transfers(engine: CacheEngine):
    host = engine.memory.host_rows
    engine.write("device", np.array([1]), content(4, 1))
    engine.submit("swap_out", pairs((1, 6)))
    engine.close()
    np.testing.assert_array_equal(host[6].numpy(), content(4, 1)[0])
    with pytest.raises(BlockyardError, match="closed"):
        engine.submit("swap_out", pairs((0, 0)))


# ---- within a tier ----


def test_moves_and_exchanges_change_whole_blocks_in_either_tier(engine: CacheEngine):
    rows = filled(engine)
    ring = engine.submit("move", pairs((0, 1), (1, 2), (2, 0), (3, 7)))
    swapped = engine.submit("exchange", pairs((4, 5), (-1, -1), (7, 6)), after=[ring])
    host = engine.submit("move", pairs((6, 5), (5, 4)), tier="host")
    both = engine.submit("exchange", pairs((0, 7)), tier="host", after=[host])
    assert [ticket.wait().error for ticket in (ring, swapped, host, both)] == [None] * 4
    rows["device"][[1, 2, 0, 7]] = rows["device"][[0, 1, 2, 3]]
    rows["device"][[4, 5, 7, 6]] = rows["device"][[5, 4, 6, 7]]
    rows["host"][[5, 4]] = rows["host"][[6, 5]]
    rows["host"][[0, 7]] = rows["host"][[7, 0]]
    assert_rows(engine, rows)
    size = engine.layout.bytes_per_block
    assert engine.counters == {("device", "device"): (8, 8 * size), ("host", "host"): (4, 4 * size)}
    with pytest.raises(MappingError, match="exchanged twice"):
        engine.submit("exchange", pairs((4, 5), (5, 6)))
    with pytest.raises(MappingError, match="written twice"):
        engine.submit("move", pairs((4, 5), (6, 5)), tier="host")


# ---- loads that nobody waits for ----


def test_prefetches_wait_for_awaited_loads():
    streams = SimulatedStreams(5)
    with make(streams) as engine:
        rows = filled(engine)
        streams.progress = lambda: None  # nothing runs by itself
        awaited = engine.submit("swap_in", pairs((0, 0)))
        idle = engine.submit("swap_in", pairs((1, 1)), prefetch=True)
        later = engine.submit_write("device", np.array([2]), content(7, 1), prefetch=True)
        layered = engine.submit("swap_in", pairs((3, 3)), prefetch=True, by_layer=True)
        assert not idle.done
        assert awaited.wait().error is None
        layered.order_compute(0)
        assert layered.wait().error is None
        assert later.wait().error is None
        rows["device"][[0, 3]] = rows["host"][[0, 3]]
        rows["device"][2] = content(7, 1)[0]
        rows["device"][1] = rows["host"][1]
        assert idle.wait().error is None
        assert_rows(engine, rows)


def test_a_long_prefetch_goes_in_pieces_on_any_device():
    class Few(SimulatedStreams):
        """One stream for each direction: nothing needs cutting but what gives way."""

        chunk_bytes = None

    streams = Few(1)
    with make(streams, max_ahead=1) as engine:
        rows = filled(engine)
        size = layout().bytes_per_block
        engine_module.PIECE_BYTES, kept = 2 * size, engine_module.PIECE_BYTES
        try:
            load = engine.submit("swap_in", pairs(*[(i, i) for i in range(BLOCKS)]), prefetch=True)
        finally:
            engine_module.PIECE_BYTES = kept
        while not load.done:
            assert streams.launched <= 12
        assert load.wait().error is None
        rows["device"] = rows["host"].copy()
        assert_rows(engine, rows)


# ---- chunks of several host blocks ----

CHUNKS = 4


def draw_span(data: st.DataObject, parts: int, most: int) -> tuple[list[int], int, int]:
    """Chunks of a span, and its first and last offset; it holds between 1 and `most` parts."""
    first = data.draw(st.integers(0, parts - 1))
    count = data.draw(st.integers(1, most))
    chunks = -(-(first + count) // parts)
    last = (first + count - 1) % parts + 1
    return data.draw(st.permutations(range(CHUNKS)))[:chunks], first, last


@given(st.integers(1, 4), st.sampled_from([None, *range(40)]), st.data())
def test_spans_of_chunks_move_only_their_parts(parts: int, seed: int | None, data: st.DataObject):
    streams = None if seed is None else SimulatedStreams(seed)
    engine = CacheEngine(layout(), device_blocks=BLOCKS, host_blocks=CHUNKS * parts, streams=streams)
    device, host = content(0), np.zeros_like(content(0, CHUNKS * parts))
    engine.write("device", np.arange(BLOCKS), device)
    tickets: list[Transfer] = []
    for _ in range(data.draw(st.integers(1, 8))):
        large, first, last = draw_span(data, parts, min(BLOCKS, (CHUNKS - 1) * parts))
        count = (len(large) - 1) * parts + last - first
        small = np.array(data.draw(st.permutations(range(BLOCKS)))[:count], np.int64)
        to: Literal["small", "large"] = data.draw(st.sampled_from(["small", "large"]))
        ids = unequal_pairs(small, np.array(large), per_block=parts, first=first, last=last, to=to)
        if to == "large":
            tickets.append(engine.submit("swap_out", ids, after=tickets))
            host[ids[:, 1]] = device[ids[:, 0]]
        else:
            tickets.append(engine.submit("swap_in", ids, after=tickets))
            device[ids[:, 1]] = host[ids[:, 0]]
    engine.transfers.synchronize()
    assert all(ticket.wait().error is None for ticket in tickets)
    np.testing.assert_array_equal(engine.read("device", np.arange(BLOCKS)), device)
    np.testing.assert_array_equal(engine.read("host", np.arange(len(host))), host)
    engine.close()


# Keys and values as vLLM's ROCm kernels have them, and the flat tensor that they are cut from.
ENGINE_LAYOUTS = {
    "rocm": KVLayout("rocm", num_layers=2, block_size=4, num_kv_heads=3, head_size=16, dtype="float16"),
    "flat": KVLayout("flat", num_layers=2, block_size=4, num_kv_heads=3, head_size=16, dtype="float16"),
}
ENGINE_LAYOUTS["both"] = GroupedLayout((("a", ENGINE_LAYOUTS["rocm"]), ("b", ENGINE_LAYOUTS["flat"])))


def rows_of_tensors(name: str, tensors: list[torch.Tensor]) -> np.ndarray:
    """The plain model of the layouts above: all bytes of each block, tensor after tensor."""
    flat = [] if name == "rocm" else [half.reshape(BLOCKS, -1) for layer in tensors[-2:] for half in layer]
    parted = [] if name == "flat" else [tensor.reshape(BLOCKS, -1) for tensor in tensors[:4]]
    return torch.cat([part.contiguous().view(torch.uint8) for part in (*parted, *flat)], dim=1).numpy()


@pytest.mark.parametrize("name", ENGINE_LAYOUTS)
def test_blocks_of_parted_and_of_flat_tensors_move_byte_for_byte(name: str):
    chosen = ENGINE_LAYOUTS[name]
    tensors = [torch.rand(shape).half() for shape, _ in chosen.tensor_shapes(BLOCKS)]
    device, host = rows_of_tensors(name, tensors), np.zeros((6, chosen.bytes_per_block), np.uint8)
    with CacheEngine(chosen, device_blocks=BLOCKS, host_blocks=6, tensors=tensors) as engine:
        out = engine.submit("swap_out", pairs((0, 4), (5, 1), (2, 2)))
        host[[4, 1, 2]] = device[[0, 5, 2]]
        last = engine.submit("swap_in", pairs((4, 7), (1, 6)), after=[out], by_layer=name != "flat")
        device[[7, 6]] = host[[4, 1]]
        for kind, ids in (
            ("copy", [(7, 0), (3, 1)]),
            ("move", [(0, 1), (1, 2), (2, 0)]),
            ("exchange", [(4, 5)]),
        ):
            last = engine.submit(kind, pairs(*ids), after=[last])
            before = device.copy()
            for source, target in ids:
                device[target] = before[source]
                if kind == "exchange":
                    device[source] = before[target]
        assert last.wait().error is None
        np.testing.assert_array_equal(rows_of_tensors(name, tensors), device)
        np.testing.assert_array_equal(engine.read("host", np.array([4, 1, 2])), host[[4, 1, 2]])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_synchronous_transfer_that_failed_is_not_counted_and_leaves_nothing_open(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    engine = CacheEngine(layout(), device_blocks=BLOCKS, host_blocks=6)
    engine.run("swap_out", pairs((0, 1), (1, 2)))

    def fails(*_: object) -> None:
        raise kind("planted")

    with monkeypatch.context() as patch:
        patch.setattr(cpu.Bound, "__call__", fails)
        with pytest.raises(kind, match="planted"):
            engine.run("swap_out", pairs((0, 2), (1, 3)))
    assert engine.counters == {("device", "host"): (2, 2 * engine.memory.bytes_per_block)}
    assert engine.transfers.open() == ()
    engine.run("swap_out", pairs((0, 2), (1, 3)))
    np.testing.assert_array_equal(engine.read("host", np.array([2, 3])), engine.read("device", np.array([0, 1])))
