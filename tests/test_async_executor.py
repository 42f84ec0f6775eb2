"""The asynchronous executor over real threads and a file, and over stores that are slow, dead or full."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blockyard import BlockManager, InvalidArgumentError, MappingError, Pairs, StepDecision, UnknownTicketError
from blockyard.layout import KVLayout
from blockyard.offload.async_executor import AsyncExecutor, StepDone
from blockyard.scheduler import Request, Scheduler, Step
from blockyard.testing.device import SimulatedStore, SimulatedStreams
from blockyard.testing.faults import corrupt_slots
from blockyard.testing.scheduler_machine import draw_token, reference_tokens
from blockyard.tiers import ExternalStore, open_store
from blockyard.transfer.engine import CacheEngine

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=1, dtype="int64")
BLOCKS = 8
PATIENCE = 30.0


class FrozenStore(SimulatedStore):
    """Storage that answers when it is told to; waiting for it is an error."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, LAYOUT.bytes_per_block, seed=0)
        self.frozen = True

    def poll(self) -> list[int]:
        if self.frozen:
            return []
        while self._step():
            pass
        return super().poll()

    def wait(self, ticket: int, timeout: float | None = None) -> object:
        assert not self._batches[ticket].left, "a call waits for storage"
        return super().wait(ticket, timeout)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExternalStore]:
    with open_store(f"file://{tmp_path}", bytes_per_block=LAYOUT.bytes_per_block, num_slots=BLOCKS) as opened:
        yield opened


@pytest.fixture
def engine() -> Iterator[CacheEngine]:
    with CacheEngine(LAYOUT, num_device_blocks=BLOCKS, num_host_blocks=BLOCKS) as made:
        for seed, tier in enumerate(("device", "host")):
            made.write_blocks(tier, np.arange(BLOCKS), content(seed))
        yield made


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, LAYOUT.bytes_per_block), dtype=np.uint8)


def pairs(src: str, dst: str, *ids: tuple[int, int]) -> Pairs:
    return Pairs(src, dst, np.array(ids, dtype=np.int64).reshape(-1, 2))


def read(engine: CacheEngine, tier: str) -> np.ndarray:
    return engine.read_blocks(tier, np.arange(BLOCKS))


def finish(executor: AsyncExecutor, count: int = 1) -> list[StepDone]:
    ended: list[StepDone] = []
    deadline = time.monotonic() + PATIENCE
    while len(ended) < count:
        assert time.monotonic() < deadline
        ended += executor.poll()
        time.sleep(0.0005)
    return ended


def test_each_kind_moves_its_blocks_and_no_others(engine: CacheEngine, store: ExternalStore):
    device, host = content(0), content(1)
    executor = AsyncExecutor(engine, store, chunk_bytes=LAYOUT.bytes_per_block)
    first = [
        ("spill", pairs("device", "external", (0, 3), (1, 0))),
        ("spill", pairs("host", "external", (7, 5))),
        ("swap_out", pairs("device", "host", (2, 6))),
        ("swap_in", pairs("host", "device", (1, 2))),
        ("copy", pairs("device", "device", (2, 4), (3, 5))),
    ]
    executor.submit(StepDecision(1, first, after=(1,)))
    assert executor.is_open(1)
    assert executor.num_in_flight == 1
    assert finish(executor) == [StepDone(1, (), ())]
    assert not executor.is_open(1)
    host[6], device[2] = device[2], host[1]
    device[4], device[5] = device[2], device[3]
    assert np.array_equal(read(engine, "device"), device)
    assert np.array_equal(read(engine, "host"), host)
    second = [
        ("fetch", pairs("external", "device", (5, 0), (0, 7))),
        ("fetch", pairs("external", "host", (3, 2))),
        ("copy", pairs("device", "device", (0, 6), (3, 1))),
    ]
    executor.submit(StepDecision(2, second))
    assert finish(executor) == [StepDone(2, (), ())]
    host[2], device[7], device[0] = content(0)[0], content(0)[1], content(1)[7]
    device[6], device[1] = device[0], device[3]
    assert np.array_equal(read(engine, "device"), device)
    assert np.array_equal(read(engine, "host"), host)


def test_no_call_waits_for_storage_and_other_steps_go_on(engine: CacheEngine):
    store = FrozenStore()
    executor = AsyncExecutor(engine, store)
    executor.submit(StepDecision(1, [("spill", pairs("device", "external", (0, 0)))]))
    executor.submit(StepDecision(2, [("swap_out", pairs("device", "host", (1, 1)))]))
    executor.submit(StepDecision(3, []))
    assert sorted(done.ticket for done in finish(executor, 2)) == [2, 3]
    fetch = ("fetch", pairs("external", "device", (0, 5)))
    executor.submit(StepDecision(4, [fetch, ("copy", pairs("device", "device", (5, 6)))]))
    assert not executor.order_compute(4)
    assert executor.poll() == []
    assert executor.num_in_flight == 2
    store.frozen = False
    assert sorted(done.ticket for done in finish(executor, 2)) == [1, 4]
    assert executor.order_compute(4)
    assert np.array_equal(read(engine, "device")[[5, 6]], content(0)[[0, 0]])


def test_a_damaged_block_is_reported_and_the_others_land(engine: CacheEngine, store: ExternalStore):
    executor = AsyncExecutor(engine, store)
    executor.submit(StepDecision(1, [("spill", pairs("device", "external", (0, 0), (1, 1), (2, 2)))]))
    finish(executor)
    corrupt_slots(store, [1])
    executor.submit(StepDecision(2, [("fetch", pairs("external", "device", (0, 5), (1, 6), (2, 7)))]))
    ((ticket, (lost,), errors),) = finish(executor)
    assert (ticket, lost.src, lost.dst, lost.ids.tolist(), errors) == (2, "external", "device", [[1, 6]], ())
    expected = content(0)
    expected[5], expected[7] = expected[0], expected[2]
    assert np.array_equal(read(engine, "device"), expected)


def test_a_tier_that_refuses_has_lost_what_it_refused(engine: CacheEngine):
    dead = SimulatedStore(BLOCKS, LAYOUT.bytes_per_block, seed=0)
    dead.close()
    executor = AsyncExecutor(engine, dead)
    executor.submit(StepDecision(1, [("spill", pairs("device", "external", (0, 0), (1, 1)))]))
    fetch = ("fetch", pairs("external", "device", (4, 4)))
    executor.submit(StepDecision(2, [fetch, ("copy", pairs("device", "device", (4, 6)))]))
    for done in sorted(finish(executor, 2)):
        assert [p.ids.tolist() for p in done.lost] == {1: [[[0, 0], [1, 1]]], 2: [[[4, 4]]]}[done.ticket]
        assert "closed" in str(done.errors[0])


def test_staging_is_bounded_spills_beyond_are_lost_and_fetches_wait(engine: CacheEngine):
    store = SimulatedStore(BLOCKS, LAYOUT.bytes_per_block, seed=0)
    executor = AsyncExecutor(engine, store, max_staging=2 * LAYOUT.bytes_per_block)
    executor.submit(StepDecision(1, [("spill", pairs("device", "external", *[(i, i) for i in range(5)]))]))
    (done,) = finish(executor)
    assert [p.ids.tolist() for p in done.lost] == [[[2, 2], [3, 3]], [[4, 4]]]
    assert "blocks from device to external" in str(done.errors[0])
    for block in range(5):
        executor.submit(StepDecision(2 + block, [("spill", pairs("device", "external", (block, block)))]))
        finish(executor)
    executor.submit(StepDecision(9, [("fetch", pairs("external", "host", *[(i, 7 - i) for i in range(5)]))]))
    assert finish(executor) == [StepDone(9, (), ())]
    assert np.array_equal(read(engine, "host")[3:], content(0)[4::-1])


def test_what_the_device_fails_is_reported_with_its_error():
    streams = SimulatedStreams(0)
    with CacheEngine(LAYOUT, num_device_blocks=BLOCKS, num_host_blocks=BLOCKS, streams=streams) as engine:
        executor = AsyncExecutor(engine)
        streams._fail = 1.0
        executor.submit(StepDecision(1, [("swap_out", pairs("device", "host", (0, 1)))]))
        engine._transfers.synchronize()
        while not executor.poll():
            assert executor.lost(1) == ()
        executor.submit(StepDecision(2, [("swap_in", pairs("host", "device", (0, 1)))]))
        (done,) = finish(executor)
        assert done.lost[0].ids.tolist() == [[0, 1]]
        assert "failed on purpose" in str(done.errors[0])


def test_a_decision_that_cannot_be_carried_out_is_refused(engine: CacheEngine):
    executor = AsyncExecutor(engine)
    with pytest.raises(MappingError, match="external tier, and there is none"):
        executor.submit(StepDecision(1, [("spill", pairs("device", "external", (0, 0)))]))
    with pytest.raises(MappingError, match="'move' cannot be carried out"):
        executor.submit(StepDecision(1, [("move", pairs("device", "device", (0, 1)))]))
    assert executor.num_in_flight == 0
    executor.submit(StepDecision(1, [("swap_out", pairs("device", "host", (0, 1)))]))
    with pytest.raises(UnknownTicketError, match="decision 1 is under way already"):
        executor.submit(StepDecision(1, []))
    with pytest.raises(InvalidArgumentError, match="max_staging is 0 bytes"):
        AsyncExecutor(engine, max_staging=0)


# ---- a whole engine ----


class Decoder:
    """Scheduler, manager and asynchronous executor on a worker thread and a file: tokens in int64 cells as KV."""

    def __init__(self, engine: CacheEngine, store: ExternalStore, scheduler: Scheduler) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.executor = AsyncExecutor(engine, store, chunk_bytes=2 * LAYOUT.bytes_per_block)

    def step(self) -> list[object]:
        step = self.scheduler.schedule()
        ticket = step.decision.ticket
        self.executor.submit(step.decision, by_layer=True)
        for layer in range(LAYOUT.num_layers):
            self.executor.wait_for_layer(ticket, layer)
            self.cells(layer)[step.slot_mapping] = [t + layer for item in step.batch for t in item.tokens]
        sampled = [self.sample(step, row) for row in range(len(step.batch))]
        loads = any(kind == "swap_in" for kind, _ in step.decision.transfers())
        while True:
            for done in self.executor.poll():
                self.scheduler.finish(done.ticket, done.lost)
            if not (loads and self.executor.is_open(ticket)):
                return self.scheduler.update(step, sampled)

    def cells(self, layer: int) -> np.ndarray:
        return self.engine.device_caches[layer].numpy().reshape(2, -1)[0]

    def sample(self, step: Step, row: int) -> list[int]:
        item, table = step.batch[row], step.block_tables[row].astype(np.int64)
        at = np.arange(item.start + len(item.tokens))
        slots = table[at // LAYOUT.block_size] * LAYOUT.block_size + at % LAYOUT.block_size
        layers = [self.cells(layer)[slots] - layer for layer in range(LAYOUT.num_layers)]
        assert (layers[0] == layers[1]).all()
        return [draw_token(layers[0].tolist(), index) for index in item.sample_indices]


@pytest.mark.parametrize("host_blocks", [0, 5])
def test_tokens_are_those_of_endless_memory(tmp_path: Path, host_blocks: int):
    books = BlockManager(block_size=4, device_blocks=12, host_blocks=host_blocks, external_blocks=40, watermark=0.0)
    scheduler = Scheduler(books, preemption_mode="swap", overlap_io=True)
    random = np.random.default_rng(5)
    requests = [
        Request(f"r{i}", random.integers(0, 97, random.integers(2, 9)).tolist(), 16, n=1 + i % 2) for i in range(9)
    ]
    url = f"file://{tmp_path}"
    with (
        CacheEngine(LAYOUT, num_device_blocks=12, num_host_blocks=host_blocks) as engine,
        open_store(url, bytes_per_block=LAYOUT.bytes_per_block, num_slots=40) as store,
    ):
        decoder = Decoder(engine, store, scheduler)
        for request in requests:
            scheduler.add(request)
        outputs: dict[str, object] = {}
        deadline = time.monotonic() + 2 * PATIENCE
        while scheduler.num_unfinished:
            assert time.monotonic() < deadline
            for finished in decoder.step():
                outputs[finished.request.request_id] = finished.outputs
        while decoder.executor.num_in_flight:
            for done in decoder.executor.poll():
                scheduler.finish(done.ticket, done.lost)
    assert outputs == {request.request_id: reference_tokens(request) for request in requests}
    assert scheduler.stats.resumed_fetch > 0
    assert bool(scheduler.stats.resumed_swap) == bool(host_blocks)
    assert all(books.num_free(tier) == books.num_blocks(tier) for tier in ("device", "host", "external"))
