"""The executor joins copy engine and file tier: what simulated memory does to tokens, it does to every byte."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard import BlockManager, MappingError, Pairs, StepDecision
from blockyard.layout import KVLayout
from blockyard.offload import executor as executor_module
from blockyard.offload.executor import StepExecutor
from blockyard.testing.faults import corrupt_slots
from blockyard.tiers import ExternalStore, open_store
from blockyard.transfer.engine import CacheEngine

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
BLOCKS = 8


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


def content(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, LAYOUT.bytes_per_block), dtype=np.uint8)


def pairs(src: str, dst: str, *ids: tuple[int, int]) -> Pairs:
    return Pairs(src, dst, np.array(ids, dtype=np.int64))


def read(engine: CacheEngine, tier: str) -> NDArray[np.uint8]:
    return engine.read_blocks(tier, np.arange(BLOCKS))


def test_each_kind_moves_its_blocks_and_no_others(engine: CacheEngine, store: ExternalStore):
    device, host = content(0), content(1)
    executor = StepExecutor(engine, store)
    first = [
        ("spill", pairs("device", "external", (0, 3), (1, 0))),
        ("spill", pairs("host", "external", (7, 5))),
        ("swap_out", pairs("device", "host", (2, 6))),
        ("swap_in", pairs("host", "device", (1, 2))),
        ("copy", pairs("device", "device", (2, 4), (3, 5))),
    ]
    assert executor.execute(StepDecision(1, first)) == []
    host[6], device[2] = device[2], host[1]
    device[4], device[5] = device[2], device[3]
    assert np.array_equal(read(engine, "device"), device)
    assert np.array_equal(read(engine, "host"), host)
    second = [
        ("fetch", pairs("external", "device", (5, 0), (0, 7))),
        ("fetch", pairs("external", "host", (3, 2))),
    ]
    assert executor.execute(StepDecision(2, second)) == []
    host[2], device[7], device[0] = content(0)[0], content(0)[1], content(1)[7]
    assert np.array_equal(read(engine, "device"), device)
    assert np.array_equal(read(engine, "host"), host)


def test_a_damaged_block_is_reported_and_the_others_land(engine: CacheEngine, store: ExternalStore):
    executor = StepExecutor(engine, store)
    executor.execute(StepDecision(1, [("spill", pairs("device", "external", (0, 0), (1, 1), (2, 2)))]))
    corrupt_slots(store, [1])
    fetch = pairs("external", "device", (0, 5), (1, 6), (2, 7))
    (lost,) = executor.execute(StepDecision(2, [("fetch", fetch)]))
    assert (lost.src, lost.dst, lost.ids.tolist()) == ("external", "device", [[1, 6]])
    expected = content(0)
    expected[5], expected[7] = expected[0], expected[2]
    assert np.array_equal(read(engine, "device"), expected)
    assert store.stats().checksum_failures == 1


def test_transfers_longer_than_a_chunk_are_cut(
    engine: CacheEngine, store: ExternalStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(executor_module, "CHUNK_BYTES", 3 * LAYOUT.bytes_per_block)
    executor = StepExecutor(engine, store)
    ids = [(i, BLOCKS - 1 - i) for i in range(BLOCKS)]
    assert executor.execute(StepDecision(1, [("spill", pairs("device", "external", *ids))])) == []
    corrupt_slots(store, [0, 7])
    lost = executor.execute(StepDecision(2, [("fetch", pairs("external", "host", *[(b, a) for a, b in ids]))]))
    assert sorted(pair for piece in lost for pair in piece.ids.tolist()) == [[0, 7], [7, 0]]
    expected = content(0)
    expected[[0, 7]] = content(1)[[0, 7]]
    assert np.array_equal(read(engine, "host"), expected)


def test_a_tier_that_refuses_has_lost_what_it_refused(engine: CacheEngine, store: ExternalStore):
    store.close()
    with pytest.warns(UserWarning, match="2 blocks from device to external"):
        (lost,) = StepExecutor(engine, store).execute(
            StepDecision(1, [("spill", pairs("device", "external", (0, 0), (1, 1)))])
        )
    assert lost.ids.tolist() == [[0, 0], [1, 1]]


def test_a_transfer_without_a_tier_for_it_is_refused(engine: CacheEngine):
    executor = StepExecutor(engine)
    for kind, ids in (("spill", pairs("device", "external", (0, 0))), ("fetch", pairs("external", "device", (0, 0)))):
        with pytest.raises(MappingError, match="external tier, and there is none"):
            executor.execute(StepDecision(1, [(kind, ids)]))
    with pytest.raises(MappingError, match="'move' cannot be carried out"):
        executor.execute(StepDecision(1, [("move", pairs("device", "device", (0, 1)))]))
    with pytest.raises(MappingError):
        executor.execute(StepDecision(1, [("swap_in", pairs("host", "device", (0, BLOCKS)))]))
    assert np.array_equal(read(engine, "device"), content(0))


def test_a_sequence_keeps_its_bytes_through_every_tier(engine: CacheEngine, store: ExternalStore):
    books = BlockManager(block_size=4, device_blocks=BLOCKS, host_blocks=BLOCKS, external_blocks=BLOCKS)
    executor = StepExecutor(engine, store)

    def step() -> None:
        decision = books.take_decision()
        assert executor.execute(decision) == []
        books.complete(decision.ticket)

    a, b = books.allocate([12, 8])
    step()
    rows = content(0)[books.block_table(a).astype(np.int64)]
    for move in (books.swap_out, books.spill, books.fetch, books.spill, books.fetch):
        move([a])
        if move == books.swap_out:
            books.free([b])
        step()
    assert np.array_equal(engine.read_blocks("device", books.block_table(a).astype(np.int64)), rows)
