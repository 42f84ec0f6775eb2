"""The parts of a step: what they are in each state, and the legs that they go."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from memory_stores import MemoryStore
from numpy.typing import NDArray
from simulated_device import SimulatedStore

from blockyard import Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.engine.streams import Event, StreamName, WorkerStreams
from blockyard.errors import MappingError
from blockyard.executor.executor import StepExecutor
from blockyard.executor.parts import Part, Tiers, cut, engine_tier, written
from blockyard.layout.kv import KVLayout
from blockyard.stores.checked_store import Answer, CheckedStore, StoreSlots

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=1, dtype="int64")
SIZE = LAYOUT.bytes_per_block


def pairs(src: str, dst: str, *ids: tuple[int, int]) -> Pairs:
    return Pairs(src, dst, np.array(ids, np.int64).reshape(-1, 2))


def rig() -> tuple[CacheEngine, StoreSlots]:
    store = SimulatedStore(4, SIZE, seed=0)
    store._eagerness = 1.0 - 1e-9
    engine = CacheEngine(LAYOUT, device_blocks=4, host_blocks=4)
    return engine, StoreSlots(engine, CheckedStore(store, SIZE))


def test_only_device_and_host_are_in_the_copy_engine():
    assert [engine_tier(tier) for tier in ("device", "host")] == ["device", "host"]
    with pytest.raises(MappingError, match="the external tier are not in the copy engine"):
        engine_tier("external")


def test_an_exchange_writes_both_blocks_of_a_pair():
    assert written("exchange", pairs("host", "host", (1, 2), (3, 4))).ids.tolist() == [[1, 2], [3, 4], [2, 1], [4, 3]]
    assert written("move", pairs("host", "host", (1, 2))).ids.tolist() == [[1, 2]]


def test_a_decision_is_cut_with_device_reads_first_and_store_reads_last():
    engine, slots = rig()
    kinds = [
        ("swap_in", pairs("external", "device", (0, 0), (1, 1), (2, 2))),
        ("swap_in", pairs("host", "device", (0, 3))),
        ("copy", pairs("device", "device", (2, 4))),
        ("exchange", pairs("device", "device", (4, 5))),
        ("exchange", pairs("device", "device", (6, 7))),
        ("swap_out", pairs("device", "external", (8, 0))),
    ]
    behind, parts = cut(
        Tiers(engine, slots), StepDecision(1, kinds, after=(1,)), [], engine.fence(), 2 * SIZE, by_layer=True
    )
    assert [(part.kind, len(part.pairs)) for part in parts] == [
        ("swap_out", 1),
        ("swap_in", 1),
        ("exchange", 1),
        ("swap_in", 2),
        ("swap_in", 1),
        ("copy", 1),
        ("exchange", 1),
    ]
    away, load, free, one, two, copy, last = parts
    assert behind == (away,)
    assert [part.by_layer for part in parts] == [False, True, False, False, False, False, False]
    assert (free.must_have_started, copy.must_have_started, last.must_have_started) == (
        (load,),
        (load, one, two),
        (load, one, two, copy),
    )


@pytest.mark.parametrize(("kind", "column"), [("swap_in", 0), ("swap_out", 1)])
def test_a_store_gets_blocks_in_the_order_of_its_slots(kind: str, column: int):
    engine, slots = rig()
    ids = [(2, 1), (0, 3), (3, 0), (1, 2)]
    moved = pairs("external", "host", *ids) if kind == "swap_in" else pairs("host", "external", *ids)
    _, parts = cut(Tiers(engine, slots), StepDecision(1, [(kind, moved)]), [], engine.fence(), 3 * SIZE)
    cut_ids = np.concatenate([part.pairs.ids for part in parts])
    assert [len(part.pairs) for part in parts] == [3, 1]
    assert cut_ids[:, column].tolist() == [0, 1, 2, 3]
    assert sorted(map(tuple, cut_ids.tolist())) == sorted(ids)


class Lazy:
    """A stream's work that runs when somebody waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self.error: Exception | None = None

    def query(self) -> bool:
        return self.work is None

    def synchronize(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work()


class LazyStreams(WorkerStreams):
    def launch(self, stream: StreamName, work: Callable[[], None], waits: Sequence[Event] = ()) -> Event:
        return Lazy(work)


def test_the_store_gets_the_next_piece_while_it_writes_one():
    class Slow(MemoryStore):
        """Its writes end once it has two of them."""

        writing = threading.Barrier(2, timeout=10.0)

        def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
            self.writing.wait()
            return super().put(keys, rows)

    rows = np.random.default_rng(0).integers(0, 256, (4, SIZE), dtype=np.uint8)
    with (
        Slow(bytes_per_block=SIZE) as store,
        CacheEngine(LAYOUT, device_blocks=4, host_blocks=4, streams=LazyStreams()) as engine,
    ):
        executor = StepExecutor(engine, store, chunk_bytes=2 * SIZE)
        engine.memory.host_rows.copy_(torch.from_numpy(rows))
        moved = pairs("host", "external", (0, 0), (1, 1), (2, 2), (3, 3))
        assert executor.execute(StepDecision(1, [("swap_out", moved)])) == []


def test_device_writes_come_behind_the_device_reads_of_the_decisions_that_are_named():
    engine, _ = rig()
    reads = Part(Tiers(engine), "swap_out", pairs("device", "host", (0, 0)), engine.fence())
    writes = Part(Tiers(engine), "swap_in", pairs("host", "device", (1, 1)), engine.fence())
    decision = StepDecision(2, [("swap_in", pairs("host", "device", (0, 0)))], after=(1,))
    behind, (load,) = cut(Tiers(engine), decision, [reads, writes], engine.fence(), 2)
    assert behind == load.ordered_after == (reads,)


@pytest.mark.parametrize(
    ("kind", "moved"), [("swap_in", pairs("external", "host", (0, 0))), ("swap_out", pairs("host", "external", (0, 0)))]
)
@pytest.mark.parametrize(("reason", "is_used_again"), [("absent", True), ("timeout", False)])
def test_rows_that_a_store_may_still_use_are_not_used_again(kind: str, moved: Pairs, reason: str, is_used_again: bool):
    engine, side = rig()
    tiers = Tiers(engine, side)
    part = Part(tiers, kind, moved, engine.fence())
    part.begin()
    rows = part.rows
    assert rows is not None
    engine.transfers.synchronize()
    part.advance()
    assert part.batch is not None
    missed = np.zeros(1, np.bool_)
    part.batch.answer = Answer(missed, np.zeros((1, SIZE), np.uint8), reasons=(reason,))
    while not part.ended:
        part.advance()
        engine.transfers.synchronize()
    assert np.shares_memory(engine.memory.buffers.take(1, SIZE), rows) == is_used_again


def test_what_goes_to_the_store_is_read_then_stored_and_what_comes_back_the_other_way_round():
    engine, side = rig()
    tiers = Tiers(engine, side)
    rows = np.arange(2 * SIZE, dtype=np.uint8).reshape(2, SIZE)
    engine.write("device", np.array([2, 3]), rows)
    away = Part(tiers, "swap_out", pairs("device", "external", (2, 1), (3, 0)), engine.fence())
    assert (away.waiting, away.pending, away.staged, away.ended) == (True, True, False, False)
    away.begin()
    assert (away.waiting, away.pending, away.staged) == (False, False, True)
    assert away.num_bytes == 2 * SIZE
    engine.transfers.synchronize()
    away.advance()
    assert (away.batch is not None, away.staged) == (True, False), "the store has copied the rows"
    side.wait(away.batch)
    away.advance()
    assert (away.ended, away.lost) == (True, ())
    back = Part(tiers, "swap_in", pairs("external", "host", (0, 0), (1, 1), (2, 2)), engine.fence())
    back.begin()
    assert (back.waiting, back.pending, back.staged) == (False, True, True)
    side.wait(back.batch)
    back.advance()
    assert back.missed.ids.tolist() == [[2, 2]], "slot 2 was never written"
    engine.transfers.synchronize()
    back.advance()
    assert [gone.ids.tolist() for gone in back.lost] == [[[2, 2]]]
    assert not back.staged
    np.testing.assert_array_equal(engine.read("host", np.array([1, 0])), rows)


def test_a_part_that_is_refused_has_not_begun():
    engine, _ = rig()
    part = Part(Tiers(engine), "swap_in", pairs("host", "device", (0, 9)), engine.fence())
    with pytest.raises(MappingError):
        part.begin()
    assert part.waiting
    with pytest.raises(MappingError, match="there is none"):
        Part(Tiers(engine), "swap_in", pairs("external", "host", (0, 0)), engine.fence()).begin()


def test_a_part_beyond_the_limit_of_staging_runs_alone():
    engine, _ = rig()
    executor = StepExecutor(engine, SimulatedStore(4, SIZE, seed=0), max_staging=SIZE)
    part = Part(executor._tiers, "swap_in", pairs("external", "host", (0, 0), (1, 1)), engine.fence())
    assert executor._lacks_room(part) == ""
    executor.submit(StepDecision(1, [("swap_in", pairs("external", "host", (2, 2)))]))
    assert executor._lacks_room(part) == f"{SIZE} bytes are staged, the limit is {SIZE}"
