"""The cache engine's synchronous calls, against plain numpy rows: every byte of both tiers, after every call."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import SimulatedStreams

from blockyard import Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.engine.ops import cpu
from blockyard.errors import BlockyardError, CaptureError, LayoutError, MappingError
from blockyard.layout.kv import KINDS, KVLayout

LAYOUT = KVLayout(kind="kv_first", num_layers=2, block_size=2, num_kv_heads=3, head_size=4, dtype="bfloat16")
TIERS = ("device", "host")
SWAPS = {"swap_out": ("device", "host"), "swap_in": ("host", "device"), "copy": ("device", "device")}


@pytest.fixture
def engine() -> Iterator[CacheEngine]:
    with CacheEngine(LAYOUT, device_blocks=6, host_blocks=4) as made:
        fill(made, np.random.default_rng(1))
        yield made


def fill(engine: CacheEngine, random: np.random.Generator) -> None:
    for tensor in (*engine.tensors, engine.memory.host_rows):
        tensor.view(torch.uint8).copy_(torch.from_numpy(random.integers(0, 256, tensor.view(torch.uint8).shape, "u1")))


def device_rows(engine: CacheEngine) -> np.ndarray:
    """The plain model of a row: for each layer K, then V."""
    parts = []
    for tensor in engine.tensors:
        by_block = tensor.transpose(0, 1) if engine.layout.kind == "kv_first" else tensor
        parts.append(by_block.contiguous().view(torch.uint8).numpy().reshape(engine.num_blocks("device"), -1))
    return np.concatenate(parts, axis=1)


def state(engine: CacheEngine) -> dict[str, np.ndarray]:
    return {"device": device_rows(engine), "host": engine.memory.host_rows.numpy().copy()}


def assert_state(engine: CacheEngine, wanted: dict[str, np.ndarray]) -> None:
    for tier, rows in state(engine).items():
        np.testing.assert_array_equal(rows, wanted[tier], err_msg=tier)


def ids(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


def draw_pairs(data: st.DataObject, src: int, dst: int, *, in_place: bool) -> np.ndarray:
    targets = data.draw(st.lists(st.integers(0, dst - 1), unique=True, max_size=dst)) if dst else []
    sources = [data.draw(st.integers(0, src - 1)) for _ in targets] if src else []
    pairs = ids(*zip(sources, targets, strict=False))
    return pairs[~np.isin(pairs[:, 0], pairs[:, 1])] if in_place else pairs


def do_swap(engine: CacheEngine, model: dict[str, np.ndarray], call: str, data: st.DataObject) -> None:
    src, dst = SWAPS[call]
    pairs = draw_pairs(data, len(model[src]), len(model[dst]), in_place=src == dst)
    engine.run(call, pairs)
    model[dst][pairs[:, 1]] = model[src][pairs[:, 0]]


def do_move(engine: CacheEngine, model: dict[str, np.ndarray], data: st.DataObject) -> None:
    total = len(model["device"])
    targets = data.draw(st.lists(st.integers(0, total - 1), unique=True, max_size=total))
    pairs = ids(*((data.draw(st.integers(0, total - 1)), target) for target in targets))
    engine.run("move", pairs)
    model["device"][pairs[:, 1]] = model["device"][pairs[:, 0]]


def do_exchange(engine: CacheEngine, model: dict[str, np.ndarray], data: st.DataObject) -> None:
    chosen = data.draw(st.permutations(range(len(model["device"]))))
    pairs = ids(*zip(chosen[::2], chosen[1::2], strict=False), (-1, -1))
    engine.run("exchange", pairs)
    real = pairs[:-1]
    model["device"][real] = model["device"][real[:, ::-1]]


def do_read(engine: CacheEngine, model: dict[str, np.ndarray], tier: str, data: st.DataObject) -> None:
    total = len(model[tier])
    blocks = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=6)) if total else [], np.int64)
    np.testing.assert_array_equal(engine.read(tier, blocks), model[tier][blocks])


def do_write(engine: CacheEngine, model: dict[str, np.ndarray], tier: str, data: st.DataObject) -> None:
    total = len(model[tier])
    chosen = data.draw(st.lists(st.integers(0, total - 1), unique=True, max_size=6)) if total else []
    blocks = np.array(chosen, np.int64)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = random.integers(0, 256, (len(blocks), engine.layout.bytes_per_block), np.uint8)
    rows.flags.writeable = data.draw(st.booleans())
    engine.write(tier, blocks, rows)
    model[tier][blocks] = rows


@given(st.data())
def test_any_sequence_of_calls_moves_exactly_the_mapped_bytes(data: st.DataObject):
    layout = KVLayout(
        kind=data.draw(st.sampled_from(KINDS)),
        num_layers=data.draw(st.integers(1, 3)),
        block_size=data.draw(st.integers(1, 3)),
        num_kv_heads=data.draw(st.integers(1, 2)),
        head_size=data.draw(st.integers(1, 5)),
        dtype=data.draw(st.sampled_from(["float32", "float16", "int8", "float8_e4m3fn"])),
    )
    numbers = {"device_blocks": data.draw(st.integers(1, 8)), "host_blocks": data.draw(st.integers(0, 8))}
    with CacheEngine(layout, **numbers) as engine:
        fill(engine, np.random.default_rng(7))
        model = state(engine)
        for _ in range(data.draw(st.integers(1, 6))):
            call = data.draw(st.sampled_from([*SWAPS, "move", "exchange", "read", "write"]))
            if call in SWAPS:
                do_swap(engine, model, call, data)
            elif call in {"move", "exchange"}:
                {"move": do_move, "exchange": do_exchange}[call](engine, model, data)
            else:
                {"read": do_read, "write": do_write}[call](engine, model, data.draw(st.sampled_from(TIERS)), data)
            assert_state(engine, model)


def test_caches_have_the_layouts_shape_and_start_as_zeros():
    with CacheEngine(LAYOUT, device_blocks=5, host_blocks=3) as engine:
        assert [tuple(tensor.shape) for tensor in engine.tensors] == [(2, 5, 2, 3, 4)] * 2
        assert {tensor.dtype for tensor in engine.tensors} == {torch.bfloat16}
        assert tuple(engine.memory.host_rows.shape) == (3, LAYOUT.bytes_per_block)
        assert not any(rows.any() for rows in state(engine).values())


def test_counters_grow_by_tier_pair(engine: CacheEngine):
    engine.run("swap_out", ids((0, 1), (5, 2)))
    engine.run("swap_out", ids((1, 0)))
    engine.run("swap_in", ids((2, 3)))
    engine.run("copy", ids((0, 4), (0, 5)))
    engine.run("copy", ids())
    engine.run("move", ids((1, 2)))
    engine.run("exchange", ids((3, 4), (-1, -1)))
    size = LAYOUT.bytes_per_block
    assert engine.counters == {
        ("device", "host"): (3, 3 * size),
        ("host", "device"): (1, size),
        ("device", "device"): (5, 5 * size),
    }


def test_reads_and_writes_do_not_count(engine: CacheEngine):
    rows = engine.read("device", np.array([1, 2]))
    engine.write("host", np.array([0, 3]), rows)
    assert engine.counters == {}


def test_read_rows_are_a_copy(engine: CacheEngine):
    for tier in TIERS:
        wanted = state(engine)
        engine.read(tier, np.array([1]))[:] = 0
        assert_state(engine, wanted)


BAD_CALLS = {
    "swap_out beyond the host": lambda engine: engine.run("swap_out", ids((0, 4))),
    "swap_out beyond the device": lambda engine: engine.run("swap_out", ids((6, 0))),
    "swap_in of a negative block": lambda engine: engine.run("swap_in", ids((-1, 0))),
    "swap_in twice onto one block": lambda engine: engine.run("swap_in", ids((0, 2), (1, 2))),
    "copy of what is written": lambda engine: engine.run("copy", ids((0, 2), (2, 3))),
    "a flat mapping": lambda engine: engine.run("swap_in", np.array([0, 1])),
    "read beyond the end": lambda engine: engine.read("host", np.array([4])),
    "read of a table": lambda engine: engine.read("host", ids((0, 1))),
    "write beyond the end": lambda engine: engine.write("device", np.array([6]), rows_of_ones(1)),
    "write twice onto one block": lambda engine: engine.write("host", np.array([1, 1]), rows_of_ones(2)),
}
BAD_ROWS = {
    "fewer rows": np.ones((1, LAYOUT.bytes_per_block), np.uint8),
    "narrow rows": np.ones((2, LAYOUT.bytes_per_block - 1), np.uint8),
    "other bytes": np.ones((2, LAYOUT.bytes_per_block), np.int8),
    "flat rows": np.ones(2 * LAYOUT.bytes_per_block, np.uint8),
}


def rows_of_ones(count: int) -> np.ndarray:
    return np.ones((count, LAYOUT.bytes_per_block), np.uint8)


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_refused_call_changes_nothing(engine: CacheEngine, case: str):
    wanted = state(engine)
    with pytest.raises(MappingError):
        BAD_CALLS[case](engine)
    assert_state(engine, wanted)
    assert engine.counters == {}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_of_another_shape_are_refused(engine: CacheEngine, case: str, tier: str):
    wanted = state(engine)
    with pytest.raises(LayoutError, match=rf"wanted uint8 \[2, {LAYOUT.bytes_per_block}\]"):
        engine.write(tier, np.array([0, 1]), BAD_ROWS[case])
    assert_state(engine, wanted)


def test_a_dtype_that_torch_lacks_is_refused():
    layout = KVLayout(kind="kv_first", num_layers=1, block_size=1, num_kv_heads=1, head_size=1, dtype="f7", itemsize=1)
    with pytest.raises(LayoutError, match="this torch has no dtype 'f7'"):
        CacheEngine(layout, device_blocks=1, host_blocks=0)


def test_a_closed_engine_refuses_every_call(engine: CacheEngine):
    engine.close()
    engine.close()
    for kind in ("swap_out", "swap_in", "copy", "move", "exchange"):
        with pytest.raises(BlockyardError, match="the cache engine is closed"):
            engine.run(kind, ids())
    with pytest.raises(BlockyardError, match="the cache engine is closed"):
        engine.read("device", np.array([0]))


# ---- where synchronous work runs ----


def test_synchronous_calls_on_a_cpu_start_no_worker_thread(engine: CacheEngine):
    before = threading.active_count()
    for kind in ("swap_out", "swap_in", "copy", "move", "exchange"):
        engine.run(kind, ids((0, 1)))
    engine.execute(StepDecision(1, [("swap_out", Pairs("device", "host", ids((0, 1))))]))
    for tier in TIERS:
        engine.write(tier, np.array([1]), engine.read(tier, np.array([0])))
    assert engine.streams._thread is None
    assert threading.active_count() == before
    engine.submit("swap_out", ids((0, 1))).wait()
    assert threading.active_count() == before + 1


def queued_engine(seed: int) -> CacheEngine:
    engine = CacheEngine(LAYOUT, device_blocks=6, host_blocks=4, streams=SimulatedStreams(seed))
    fill(engine, np.random.default_rng(seed))
    size = LAYOUT.bytes_per_block
    engine._on_cuda, engine.memory.device = True, torch.device("cuda")
    engine.memory.staging = lambda rows: torch.empty((rows, size), dtype=torch.uint8)
    return engine


@pytest.mark.parametrize("seed", range(40))
def test_queued_synchronous_calls_come_after_all_earlier_calls_and_before_all_later_ones(seed: int):
    random = np.random.default_rng(seed)
    engine = queued_engine(seed)
    model = state(engine)
    reads = []
    for _ in range(30):
        call = str(random.choice(["swap_out", "swap_in", "copy", "read", "write"]))
        fence = engine.fence()
        if call in SWAPS:
            src, dst = SWAPS[call]
            pairs = ids((int(random.integers(len(model[src]))), int(random.integers(len(model[dst])))))
            if src == dst and pairs[0, 0] == pairs[0, 1]:
                continue
            if random.integers(2):
                engine.run(call, pairs)
            else:
                engine.submit(call, pairs, after=engine.transfers.open(), after_compute=fence)
            model[dst][pairs[:, 1]] = model[src][pairs[:, 0]]
            continue
        tier = TIERS[random.integers(2)]
        blocks = random.permutation(len(model[tier]))[:2]
        if call == "read":
            if random.integers(2):
                np.testing.assert_array_equal(engine.read(tier, blocks), model[tier][blocks])
            else:
                late = engine.submit_read(tier, blocks, after=engine.transfers.open())
                reads.append((late, model[tier][blocks]))
        else:
            rows = random.integers(0, 256, (2, LAYOUT.bytes_per_block), np.uint8)
            engine.write(tier, blocks, rows)
            model[tier][blocks] = rows
            rows[:] = 0  # they are the caller's again
    for late, wanted in reads:
        np.testing.assert_array_equal(late.wait().rows, wanted)
    for tier in TIERS:
        np.testing.assert_array_equal(engine.read(tier, np.arange(len(model[tier]))), model[tier])
    engine.close()


def test_a_host_transfer_comes_after_a_queued_synchronous_call():
    engine = queued_engine(0)
    engine.streams.progress = lambda: None  # nothing runs by itself
    model = state(engine)
    engine.run("swap_out", ids((5, 2)))
    assert len(engine.transfers.open()) == 1
    read = engine.submit_read("host", np.array([2]))
    np.testing.assert_array_equal(read.wait().rows, model["device"][[5]])
    engine.close()


def test_queued_calls_that_have_run_are_forgotten():
    engine = queued_engine(0)
    for _ in range(50):
        engine.run("copy", ids((0, 3)))
        engine.fence().synchronize()
        assert len(engine.transfers.open()) == 1
    engine.close()
    assert engine.counters == {("device", "device"): (50, 50 * LAYOUT.bytes_per_block)}


def test_a_queued_call_that_raises_says_so_at_once_and_nothing_is_counted(monkeypatch: pytest.MonkeyPatch):
    engine = queued_engine(0)
    engine.streams.progress = lambda: engine.streams.run_until(lambda: not any(engine.streams._queues.values()))
    monkeypatch.setattr(cpu.Bound, "__call__", lambda _self, _mapping: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        engine.run("swap_out", ids((5, 2)))
    assert engine.counters == {}


def test_while_a_graph_is_recorded_work_goes_into_it_and_counts_as_done():
    engine = queued_engine(0)
    model = state(engine)
    engine.streams.capturing = lambda: True
    engine.run("copy", ids((0, 3)))
    assert engine.transfers.open() == ()
    assert not any(engine.streams._queues.values()), "no event is recorded"
    model["device"][3] = model["device"][0]
    assert_state(engine, model)
    engine.streams.capturing = lambda: False
    engine.submit("swap_out", ids((0, 1)))
    engine.streams.capturing = lambda: True
    with pytest.raises(CaptureError, match="1 transfers are open"):
        engine.run("swap_in", ids((1, 2)))


@pytest.mark.parametrize(("kind", "src", "dst"), [("swap_out", "device", "external"), ("swap_in", "external", "host")])
def test_a_decision_of_the_external_tier_is_refused_before_anything_moves(engine: CacheEngine, kind, src, dst):
    wanted = state(engine)
    copy = ("copy", Pairs("device", "device", ids((0, 1))))
    with pytest.raises(MappingError, match=f"1 pairs of kind '{kind}' name the external tier, but there is none"):
        engine.execute(StepDecision(1, [copy, (kind, Pairs(src, dst, ids((0, 1))))]))
    assert_state(engine, wanted)
