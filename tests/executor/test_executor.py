"""The executor over real threads and a file, and over stores that are slow, dead or full: every byte, every order."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from prompts import allocate_prompts
from simulated_device import SimulatedStore, SimulatedStreams

from blockyard import BlockManager, Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.engine.streams import Event, StreamName
from blockyard.errors import InvalidArgumentError, MappingError, UnknownTicketError
from blockyard.executor.executor import StepDone, StepExecutor
from blockyard.layout.kv import KVLayout
from blockyard.scheduler import Request, Scheduler, Step
from blockyard.stores import ExternalStore, open_store
from blockyard.testing.faults import corrupt_slots
from blockyard.testing.machines.scheduler import draw_token, reference_tokens
from blockyard.testing.machines.values import Key, seen

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=1, dtype="int64")
BLOCKS = 8
PATIENCE = 120.0


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
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS) as made:
        for seed, tier in enumerate(("device", "host")):
            made.write(tier, np.arange(BLOCKS), content(seed))
        yield made


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, LAYOUT.bytes_per_block), dtype=np.uint8)


def pairs(src: str, dst: str, *ids: tuple[int, int]) -> Pairs:
    return Pairs(src, dst, np.array(ids, dtype=np.int64).reshape(-1, 2))


def read(engine: CacheEngine, tier: str) -> np.ndarray:
    return engine.read(tier, np.arange(BLOCKS))


def finish(executor: StepExecutor, count: int = 1) -> list[StepDone]:
    ended: list[StepDone] = []
    deadline = time.monotonic() + PATIENCE
    while len(ended) < count:
        assert time.monotonic() < deadline
        ended += executor.poll()
        time.sleep(0.0005)
    return ended


def test_each_kind_moves_its_blocks_and_no_others(engine: CacheEngine, store: ExternalStore):
    device, host = content(0), content(1)
    executor = StepExecutor(engine, store, chunk_bytes=LAYOUT.bytes_per_block)
    first = [
        ("swap_out", pairs("device", "external", (0, 3), (1, 0))),
        ("swap_out", pairs("host", "external", (7, 5))),
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
        ("swap_in", pairs("external", "device", (5, 0), (0, 7))),
        ("swap_in", pairs("external", "host", (3, 2))),
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
    executor = StepExecutor(engine, store)
    executor.submit(StepDecision(1, [("swap_out", pairs("device", "external", (0, 0)))]))
    executor.submit(StepDecision(2, [("swap_out", pairs("device", "host", (1, 1)))]))
    executor.submit(StepDecision(3, []))
    assert sorted(done.ticket for done in finish(executor, 2)) == [2, 3]
    assert executor.poll() == []  # the storage has the block of the first decision
    back = ("swap_in", pairs("external", "device", (0, 5)))
    copy = ("copy", pairs("device", "device", (5, 6)))
    executor.submit(StepDecision(4, [back, copy], prefetch=True))
    assert executor.poll() == []
    assert executor.num_in_flight == 2
    store.frozen = False
    assert sorted(done.ticket for done in finish(executor, 2)) == [1, 4]
    assert np.array_equal(read(engine, "device")[[5, 6]], content(0)[[0, 0]])


def test_a_damaged_block_is_reported_and_the_others_land(engine: CacheEngine, store: ExternalStore):
    executor = StepExecutor(engine, store)
    executor.submit(StepDecision(1, [("swap_out", pairs("device", "external", (0, 0), (1, 1), (2, 2)))]))
    finish(executor)
    corrupt_slots(store, [1])
    executor.submit(StepDecision(2, [("swap_in", pairs("external", "device", (0, 5), (1, 6), (2, 7)))]))
    ((ticket, (lost,), errors),) = finish(executor)
    assert (ticket, lost.src, lost.dst, lost.ids.tolist(), errors) == (2, "external", "device", [[1, 6]], ())
    expected = content(0)
    expected[5], expected[7] = expected[0], expected[2]
    assert np.array_equal(read(engine, "device"), expected)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_missing_blocks_are_lost_until_the_end_is_reported(engine: CacheEngine, store: ExternalStore, tier):
    executor = StepExecutor(engine, store, chunk_bytes=LAYOUT.bytes_per_block)
    executor.execute(StepDecision(1, [("swap_out", pairs("device", "external", (0, 0), (1, 1), (2, 2)))]))
    corrupt_slots(store, [1])
    executor.submit(StepDecision(2, [("swap_in", pairs("external", tier, (0, 5), (1, 6), (2, 7)))]))
    if tier == "device":  # `submit` has waited for it
        assert [lost.ids.tolist() for lost in executor.lost(2)] == [[[1, 6]]]
    deadline = time.monotonic() + PATIENCE
    while not executor.lost(2):
        assert time.monotonic() < deadline
        executor._progress()  # as `poll` does, which reports the end
    for _ in range(200):
        executor._progress()
        time.sleep(0.0002)
        assert [lost.ids.tolist() for lost in executor.lost(2)] == [[[1, 6]]]
    assert [lost.ids.tolist() for lost in executor.wait(2).lost] == [[[1, 6]]]


def test_a_load_that_the_engine_could_not_launch_is_lost():
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS) as engine:
        executor = StepExecutor(engine)
        launch = engine.transfers.streams.launch

        def fail(stream: StreamName, work: Callable[[], None], waits: Sequence[Event] = ()) -> Event:
            return launch(stream, partial(int, "no number"), waits)

        engine.transfers.streams.launch = fail  # type: ignore[method-assign]
        executor.submit(StepDecision(1, [("swap_in", pairs("host", "device", (0, 1)))]))
        done = executor.wait(1)
        assert [lost.ids.tolist() for lost in done.lost] == [[[0, 1]]]
        assert "no number" in str(done.errors[0])


def test_blocks_that_a_tier_refuses_are_lost(engine: CacheEngine):
    dead = SimulatedStore(BLOCKS, LAYOUT.bytes_per_block, seed=0)
    dead.close()
    executor = StepExecutor(engine, dead)
    executor.submit(StepDecision(1, [("swap_out", pairs("device", "external", (0, 0), (1, 1)))]))
    back = ("swap_in", pairs("external", "device", (4, 4)))
    executor.submit(StepDecision(2, [back, ("copy", pairs("device", "device", (4, 6)))]))
    for done in sorted(finish(executor, 2)):
        assert [p.ids.tolist() for p in done.lost] == {1: [[[0, 0], [1, 1]]], 2: [[[4, 4]]]}[done.ticket]
        assert "closed" in str(done.errors[0])


def test_staging_is_bounded_swap_outs_beyond_are_lost_and_swap_ins_wait(engine: CacheEngine):
    store = SimulatedStore(BLOCKS, LAYOUT.bytes_per_block, seed=0)
    executor = StepExecutor(engine, store, max_staging=2 * LAYOUT.bytes_per_block)
    executor.submit(StepDecision(1, [("swap_out", pairs("device", "external", *[(i, i) for i in range(5)]))]))
    (done,) = finish(executor)
    assert [p.ids.tolist() for p in done.lost] == [[[2, 2], [3, 3]], [[4, 4]]]
    assert "blocks from device to external" in str(done.errors[0])
    for block in range(5):
        executor.submit(StepDecision(2 + block, [("swap_out", pairs("device", "external", (block, block)))]))
        finish(executor)
    executor.submit(StepDecision(9, [("swap_in", pairs("external", "host", *[(i, 7 - i) for i in range(5)]))]))
    assert finish(executor) == [StepDone(9, (), ())]
    assert np.array_equal(read(engine, "host")[3:], content(0)[4::-1])


def test_a_read_of_the_store_that_has_room_does_not_pass_one_that_waits_for_room(engine: CacheEngine):
    store, size = FrozenStore(), LAYOUT.bytes_per_block
    executor = StepExecutor(engine, store, max_staging=2 * size)
    for ticket, blocks in ((1, [0]), (2, [1, 2]), (3, [3])):
        executor.submit(StepDecision(ticket, [("swap_in", pairs("external", "host", *[(b, b) for b in blocks]))]))
    assert executor.poll() == []
    assert executor.staged_bytes == size, "the second has no room, the third waits behind it"
    store.frozen = False
    assert sorted(done.ticket for done in finish(executor, 3)) == [1, 2, 3]


def test_what_the_device_fails_is_reported_with_its_error():
    streams = SimulatedStreams(0)
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS, streams=streams) as engine:
        executor = StepExecutor(engine)
        streams._fail = 1.0
        executor.submit(StepDecision(1, [("swap_out", pairs("device", "host", (0, 1)))]))
        engine.transfers.synchronize()
        while not executor.poll():
            assert executor.lost(1) == ()
        executor.submit(StepDecision(2, [("swap_in", pairs("host", "device", (0, 1)))]))
        (done,) = finish(executor)
        assert done.lost[0].ids.tolist() == [[0, 1]]
        assert "failed on purpose" in str(done.errors[0])


def test_a_decision_that_cannot_be_carried_out_is_refused(engine: CacheEngine):
    executor = StepExecutor(engine)
    with pytest.raises(MappingError, match="external tier, but there is none"):
        executor.submit(StepDecision(1, [("swap_out", pairs("device", "external", (0, 0)))]))
    with pytest.raises(MappingError, match="'swap_in' name the external tier, but there is none"):
        executor.submit(StepDecision(1, [("swap_in", pairs("external", "host", (0, 0)))]))
    assert executor.num_in_flight == 0
    executor.submit(StepDecision(1, [("swap_out", pairs("device", "host", (0, 1)))]))
    with pytest.raises(UnknownTicketError, match="decision 1 is already in flight"):
        executor.submit(StepDecision(1, []))
    with pytest.raises(InvalidArgumentError, match="max_staging is 0 bytes"):
        StepExecutor(engine, max_staging=0)


def test_execute_waits_for_all_pieces_and_names_what_did_not_land(engine: CacheEngine, store: ExternalStore):
    executor = StepExecutor(engine, store, chunk_bytes=3 * LAYOUT.bytes_per_block)
    ids = [(i, BLOCKS - 1 - i) for i in range(BLOCKS)]
    assert executor.execute(StepDecision(1, [("swap_out", pairs("device", "external", *ids))])) == []
    corrupt_slots(store, [0, 7])
    lost = executor.execute(StepDecision(2, [("swap_in", pairs("external", "host", *[(b, a) for a, b in ids]))]))
    assert sorted(pair for piece in lost for pair in piece.ids.tolist()) == [[0, 7], [7, 0]]
    expected = content(0)
    expected[[0, 7]] = content(1)[[0, 7]]
    assert np.array_equal(read(engine, "host"), expected)


def test_a_sequence_keeps_its_bytes_through_every_tier(engine: CacheEngine, store: ExternalStore):
    manager = BlockManager(block_size=4, device_blocks=BLOCKS, host_blocks=BLOCKS, external_blocks=BLOCKS)
    executor = StepExecutor(engine, store)

    def step() -> None:
        decision = manager.take_decision()
        assert executor.execute(decision) == []
        manager.complete(decision.ticket)

    a, b = manager.allocate(counts=[12, 8])
    step()
    rows = content(0)[manager.block_table(a).astype(np.int64)]
    away = partial(manager.swap_out, to="external")
    for move in (manager.swap_out, away, manager.swap_in, away, manager.swap_in):
        move([a])
        if move == manager.swap_out:
            manager.free([b])
        step()
    assert np.array_equal(engine.read("device", manager.block_table(a).astype(np.int64)), rows)


def test_blocks_that_there_are_not_lose_the_whole_decision(engine: CacheEngine):
    executor = StepExecutor(engine)
    swaps = [("swap_out", pairs("device", "host", (0, 3))), ("swap_in", pairs("host", "device", (0, BLOCKS)))]
    with pytest.raises(MappingError, match=f"block {BLOCKS} cannot be written"):
        executor.submit(StepDecision(1, swaps))
    done = executor.wait(1)
    assert {(p.src, p.dst) for p in done.lost} == {("device", "host"), ("host", "device")}
    with pytest.raises(UnknownTicketError, match="decision 1 is not in flight"):
        executor.wait(1)


# ---- moves and exchanges ----


def test_moves_come_after_copies_and_exchanges_after_moves(engine: CacheEngine, store: ExternalStore):
    device, host = content(0), content(1)
    executor = StepExecutor(engine, store)
    kinds = [
        ("exchange", pairs("host", "host", (6, 7))),
        ("exchange", pairs("device", "device", (7, 0))),
        ("move", pairs("device", "device", (5, 6), (6, 7), (4, 3))),
        ("move", pairs("host", "host", (3, 7), (0, 1))),
        ("copy", pairs("device", "device", (2, 5))),
        ("swap_in", pairs("host", "device", (1, 2))),
        ("swap_out", pairs("device", "host", (2, 3))),
    ]
    executor.submit(StepDecision(1, kinds, after=(1,)))
    assert finish(executor) == [StepDone(1, (), ())]
    host[3], device[2] = device[2], host[1].copy()
    device[5] = device[2]
    device[[6, 7, 3]] = device[[5, 6, 4]]
    host[[7, 1]] = host[[3, 0]]
    device[[7, 0]] = device[[0, 7]]
    host[[6, 7]] = host[[7, 6]]
    assert np.array_equal(read(engine, "device"), device)
    assert np.array_equal(read(engine, "host"), host)


def test_a_move_of_what_the_store_reads_waits_and_so_does_what_follows_it(engine: CacheEngine):
    store = FrozenStore()
    executor = StepExecutor(engine, store)
    store.frozen = False
    executor.execute(StepDecision(1, [("swap_out", pairs("device", "external", (7, 0)))]))
    store.frozen = True
    kinds = [
        ("swap_in", pairs("external", "device", (0, 1))),
        ("move", pairs("device", "device", (1, 2))),
        ("exchange", pairs("device", "device", (2, 3))),
        ("exchange", pairs("host", "host", (0, 1))),
    ]
    executor.submit(StepDecision(2, kinds, prefetch=True))
    assert executor.poll() == []
    assert np.array_equal(read(engine, "device"), content(0))
    store.frozen = False
    assert executor.wait(2) == StepDone(2, (), ())
    expected, host = content(0), content(1)
    expected[[1, 2, 3]] = expected[[7, 3, 7]]
    host[[0, 1]] = host[[1, 0]]
    assert np.array_equal(read(engine, "device"), expected)
    assert np.array_equal(read(engine, "host"), host)


@pytest.mark.parametrize("seed", range(20))
def test_compute_waits_for_exchanges_but_not_for_moves(seed: int):
    streams = SimulatedStreams(seed)
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0, streams=streams) as engine:
        engine.write("device", np.arange(BLOCKS), content(0))
        executor = StepExecutor(engine)
        cells = engine.tensors[0]
        first = cells[0].flatten(1)
        before, seen = first.clone(), []
        streams.compute(lambda: first[0].add_(1))  # of the step before; what it writes is moved
        moves = [("move", pairs("device", "device", (0, 4))), ("exchange", pairs("device", "device", (5, 6)))]
        executor.submit(StepDecision(1, moves))
        streams.compute(lambda: seen.append(first[[5, 6]].clone()))
        engine.fence().synchronize()
        assert np.array_equal(seen[0], before[[6, 5]])
        assert executor.wait(1) == StepDone(1, (), ())
        assert np.array_equal(first[4], before[0] + 1)


def test_moves_that_fail_name_their_destinations_and_exchanges_both_sides():
    streams = SimulatedStreams(0)
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS, streams=streams) as engine:
        executor = StepExecutor(engine)
        streams._fail = 1.0
        executor.submit(StepDecision(1, [("move", pairs("device", "device", (5, 1), (6, 2)))]))
        executor.submit(StepDecision(2, [("exchange", pairs("host", "host", (5, 1)))]))
        for ticket, lost in ((1, [[5, 1], [6, 2]]), (2, [[5, 1], [1, 5]])):
            done = executor.wait(ticket)
            assert [p.ids.tolist() for p in done.lost] == [lost]
            assert "failed on purpose" in str(done.errors[0])


# ---- priorities ----


def test_loads_that_nobody_waits_for_let_others_go_first():
    streams = SimulatedStreams(0)
    streams.progress = lambda: None  # nothing runs before it is waited for
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=BLOCKS, streams=streams) as engine:
        engine.write("host", np.arange(BLOCKS), content(1))
        executor = StepExecutor(engine)
        executor.submit(StepDecision(1, [("swap_in", pairs("host", "device", (0, 0)))]))
        executor.submit(StepDecision(2, [("swap_in", pairs("host", "device", (1, 1)))], prefetch=True))
        executor.submit(StepDecision(3, [("swap_in", pairs("host", "device", (2, 2)))], prefetch=True))
        executor.submit(StepDecision(4, [("swap_in", pairs("host", "device", (3, 3)))]))
        assert executor.wait(3) == StepDone(3, (), ())
        assert sorted(done.ticket for done in executor.poll()) == [1, 4]
        assert executor.wait(2) == StepDone(2, (), ())
        expected = np.zeros_like(content(1))
        expected[:4] = content(1)[:4]
        assert np.array_equal(read(engine, "device"), expected)


def test_collect_waits_for_a_step_whose_loads_were_read_or_that_has_lost_something_and_for_no_other(
    engine: CacheEngine,
):
    executor = StepExecutor(engine, FrozenStore(), max_staging=LAYOUT.bytes_per_block)
    executor.submit(StepDecision(1, [("swap_out", pairs("device", "external", (0, 0)))]))
    assert executor.collect(1) == [], "storage is not waited for"
    executor.submit(StepDecision(2, [("swap_in", pairs("host", "device", (0, 1)))]))
    assert executor.is_awaited(2)
    assert [done.ticket for done in executor.collect(2)] == [2]
    assert not executor.is_awaited(2)
    executor.submit(StepDecision(3, [("swap_in", pairs("host", "device", (0, 1)))], prefetch=True))
    assert not executor.is_awaited(3)
    assert executor.wait(3).ticket == 3
    swaps = ("swap_out", pairs("device", "host", (1, 2)))
    away = ("swap_out", pairs("device", "external", (1, 1), (2, 2)))
    executor.submit(StepDecision(4, [away, swaps]))
    assert executor.is_awaited(4) == executor.is_open(4), "a swap-out had no room"
    executor.store.frozen = False
    assert {done.ticket for done in executor.collect(4)} >= {4}


# ---- a whole engine ----


class Decoder:
    """Scheduler, manager and asynchronous executor on a worker thread and a file: tokens in int64 cells as KV."""

    def __init__(self, engine: CacheEngine, store: ExternalStore, scheduler: Scheduler) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.executor = StepExecutor(engine, store, chunk_bytes=2 * LAYOUT.bytes_per_block)

    def step(self) -> list[object]:
        step = self.scheduler.schedule()
        ticket = step.decision.ticket
        self.executor.submit(step.decision, by_layer=True)
        for layer in range(LAYOUT.num_layers):
            self.executor.wait_for_layer(ticket, layer)
            self.cells(layer)[step.slot_mapping] = step.token_ids.astype(np.int64) + layer
        sampled = [draw_token(seen(Key(), self.text(step, draw.row)), draw.sequence) for draw in step.draws()]
        loads = any(kind == "swap_in" for kind, _ in step.decision.transfers())
        while True:
            for done in self.executor.poll():
                self.scheduler.complete(done.ticket, done.lost)
            if not (loads and self.executor.is_open(ticket)):
                return self.scheduler.update(step, sampled)

    def cells(self, layer: int) -> np.ndarray:
        return self.engine.tensors[layer].numpy().reshape(2, -1)[0]

    def text(self, step: Step, row: int) -> list[int]:
        at, table = np.arange(step.start[row] + step.lengths[row]), step.block_tables[row].astype(np.int64)
        slots = table[at // LAYOUT.block_size] * LAYOUT.block_size + at % LAYOUT.block_size
        layers = [self.cells(layer)[slots] - layer for layer in range(LAYOUT.num_layers)]
        assert (layers[0] == layers[1]).all()
        return layers[0].tolist()


@pytest.mark.parametrize("host_blocks", [0, 5])
def test_tokens_are_those_of_endless_memory(tmp_path: Path, host_blocks: int):
    manager = BlockManager(block_size=4, device_blocks=12, host_blocks=host_blocks, external_blocks=40, watermark=0.0)
    scheduler = Scheduler(manager, preemption_mode="swap", overlap_io=True)
    random = np.random.default_rng(5)
    requests = [
        Request(f"r{i}", random.integers(0, 97, random.integers(2, 9)).tolist(), 16, n=1 + i % 2) for i in range(9)
    ]
    url = f"file://{tmp_path}"
    with (
        CacheEngine(LAYOUT, device_blocks=12, host_blocks=host_blocks) as engine,
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
                scheduler.complete(done.ticket, done.lost)
    assert outputs == {request.request_id: reference_tokens(request) for request in requests}
    assert scheduler.stats().resumed_swap_external > 0
    assert bool(scheduler.stats().resumed_swap_host) == bool(host_blocks)
    assert all(manager.pool(tier).num_free == manager.pool(tier).num_blocks for tier in ("device", "host", "external"))


@pytest.mark.parametrize("cached", ["move", "drop", "exchange"])
def test_prompts_find_their_bytes_while_sequences_are_made_contiguous_among_cached_blocks(cached: str):
    """Prompts of few families come and go in a pool full of cached blocks; the bytes of each block tell its tokens."""
    rng = np.random.default_rng(7)
    manager = BlockManager(block_size=4, device_blocks=24, prefix_caching=True)
    moved = hit = 0

    def bytes_of(family: int, blocks: int) -> np.ndarray:
        tag = np.random.default_rng(family).integers(0, 256, (8, LAYOUT.bytes_per_block), dtype=np.uint8)
        return tag[:blocks]

    with CacheEngine(LAYOUT, device_blocks=24, host_blocks=1) as engine:
        executor = StepExecutor(engine)
        live: dict[int, tuple[int, int]] = {}
        for _ in range(400):
            family, blocks = int(rng.integers(9)), int(rng.integers(1, 6))
            prompt, started = [family] * (4 * blocks + 1), None
            if len(live) > 3 or manager.can_allocate(prompt).blocks > manager.pool("device").num_free:
                ended = list(live)[int(rng.integers(len(live)))]
                del live[ended]
                manager.free([ended])
            else:
                (started,), (found,) = (each.tolist() for each in allocate_prompts(manager, [prompt]))
                hit += found
            manager.defrag.run("contiguous", 1, cached=cached, max_moves=6)
            decision = manager.take_decision()
            moved += sum(len(pairs.ids) for pairs in decision.move)
            assert executor.execute(decision) == []
            manager.complete(decision.ticket)
            if started is not None:
                table = manager.block_table(started).astype(np.int64)
                first = found // 4
                engine.write("device", table[first:blocks], bytes_of(family, blocks)[first:])
                manager.mark_computed([started])
                live[started] = (family, blocks)
            for handle, (owner, count) in live.items():
                table = manager.block_table(handle).astype(np.int64)[:count]
                assert np.array_equal(engine.read("device", table), bytes_of(owner, count))
            manager.check()
    assert moved > 0
    assert hit > 0
