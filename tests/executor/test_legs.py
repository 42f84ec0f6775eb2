"""The parts of a step: what they are in each state, and the legs that they go."""

import numpy as np
import pytest
from simulated_device import SimulatedStore

from blockyard import Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.errors import BlockyardError, MappingError
from blockyard.executor.legs import Legs, engine_tier
from blockyard.executor.parts import Part, cut, written
from blockyard.layout.kv import KVLayout
from blockyard.stores.checked_store import Answer, CheckedStore

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=1, dtype="int64")
SIZE = LAYOUT.bytes_per_block


def pairs(src: str, dst: str, *ids: tuple[int, int]) -> Pairs:
    return Pairs(src, dst, np.array(ids, np.int64).reshape(-1, 2))


def rig() -> tuple[CacheEngine, CheckedStore]:
    store = SimulatedStore(4, SIZE, seed=0)
    store._eagerness = 1.0 - 1e-9
    return CacheEngine(LAYOUT, device_blocks=4, host_blocks=4), CheckedStore(store, SIZE)


def test_only_device_and_host_are_in_the_copy_engine():
    assert [engine_tier(tier) for tier in ("device", "host")] == ["device", "host"]
    with pytest.raises(MappingError, match="the external tier are not in the copy engine"):
        engine_tier("external")


def test_an_exchange_writes_both_blocks_of_a_pair():
    assert written("exchange", pairs("host", "host", (1, 2), (3, 4))).ids.tolist() == [[1, 2], [3, 4], [2, 1], [4, 3]]
    assert written("move", pairs("host", "host", (1, 2))).ids.tolist() == [[1, 2]]


def test_a_decision_is_cut_with_device_reads_first_and_store_reads_last():
    engine, _ = rig()
    kinds = [
        ("swap_in", pairs("external", "device", (0, 0), (1, 1), (2, 2))),
        ("swap_in", pairs("host", "device", (0, 3))),
        ("copy", pairs("device", "device", (2, 4))),
        ("exchange", pairs("device", "device", (4, 5))),
        ("exchange", pairs("device", "device", (6, 7))),
        ("swap_out", pairs("device", "external", (8, 0))),
    ]
    behind, parts = cut(StepDecision(1, kinds, after=(1,)), [], engine.fence(), 2, by_layer=True)
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


def test_device_writes_come_behind_the_device_reads_of_the_decisions_that_are_named():
    engine, _ = rig()
    reads = Part("swap_out", pairs("device", "host", (0, 0)), engine.fence())
    writes = Part("swap_in", pairs("host", "device", (1, 1)), engine.fence())
    decision = StepDecision(2, [("swap_in", pairs("host", "device", (0, 0)))], after=(1,))
    behind, (load,) = cut(decision, [reads, writes], engine.fence(), 2)
    assert behind == load.ordered_after == (reads,)


@pytest.mark.parametrize(
    ("kind", "moved"), [("swap_in", pairs("external", "host", (0, 0))), ("swap_out", pairs("host", "external", (0, 0)))]
)
@pytest.mark.parametrize(("reason", "is_used_again"), [("absent", True), ("timeout", False)])
def test_rows_that_a_store_may_still_use_are_not_used_again(kind: str, moved: Pairs, reason: str, is_used_again: bool):
    engine, side = rig()
    legs = Legs(engine, side, max_bytes=2 * SIZE)
    part = Part(kind, moved, engine.fence())
    legs.begin(part)
    rows = part.rows
    assert rows is not None
    engine.transfers.synchronize()
    legs.advance(part)
    assert part.batch is not None
    missed = np.zeros(1, np.bool_)
    part.batch.answer = Answer(missed, np.zeros((1, SIZE), np.uint8), reasons=(reason,))
    while not part.ended:
        legs.advance(part)
        engine.transfers.synchronize()
    assert np.shares_memory(engine.memory.buffers.take(1, SIZE), rows) == is_used_again


def test_what_goes_to_the_store_is_read_then_stored_and_what_comes_back_the_other_way_round():
    engine, side = rig()
    legs = Legs(engine, side, max_bytes=2 * SIZE)
    rows = np.arange(2 * SIZE, dtype=np.uint8).reshape(2, SIZE)
    engine.write("device", np.array([2, 3]), rows)
    away = Part("swap_out", pairs("device", "external", (2, 1), (3, 0)), engine.fence())
    assert (away.waiting, away.pending, away.staged, away.ended) == (True, True, False, False)
    legs.begin(away)
    assert (away.waiting, away.pending, away.staged) == (False, False, True)
    assert legs.num_bytes([away]) == 2 * SIZE
    engine.transfers.synchronize()
    legs.advance(away)
    assert (away.batch is not None, away.staged) == (True, False), "the store has copied the rows"
    side.wait(away.batch)
    legs.advance(away)
    assert (away.ended, away.lost) == (True, ())
    back = Part("swap_in", pairs("external", "host", (0, 0), (1, 1), (2, 2)), engine.fence())
    legs.begin(back)
    assert (back.waiting, back.pending, back.staged) == (False, True, True)
    side.wait(back.batch)
    legs.advance(back)
    assert back.missed.ids.tolist() == [[2, 2]], "slot 2 was never written"
    engine.transfers.synchronize()
    legs.advance(back)
    assert [gone.ids.tolist() for gone in back.lost] == [[[2, 2]]]
    assert not back.staged
    np.testing.assert_array_equal(engine.read("host", np.array([1, 0])), rows)


def test_what_is_refused_leaves_nothing_being_launched_and_an_end_comes_once():
    engine, side = rig()
    legs = Legs(engine, side, max_bytes=SIZE)
    part = Part("swap_in", pairs("host", "device", (0, 9)), engine.fence())
    with pytest.raises(MappingError):
        legs.begin(part)
    assert legs.launching is None
    legs.lose(part, BlockyardError("first"))
    legs.lose(part, BlockyardError("second"))
    assert str(part.error) == "first"
    other = Part("swap_in", pairs("external", "host", (0, 0), (1, 1)), engine.fence())
    assert legs.full(other, 0) == "", "a part that is larger than the limit goes alone"
    assert legs.full(other, 1) == f"1 bytes are staged, the limit is {SIZE}"
