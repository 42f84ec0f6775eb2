"""The demo's wrappers around the step executor: they hold back, damage and count exactly what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard import BlockManager, Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.errors import InvalidArgumentError
from blockyard.executor.executor import Executor, StepExecutor
from blockyard.layout.kv import KVLayout
from blockyard.stores import open_store
from blockyard.tools.demo.executors import CorruptingExecutor, SteadyExecutor, Wrapper

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=2, num_kv_heads=1, head_size=2, dtype="float32")
DEVICE, HOST, EXTERNAL = 8, 4, 4


class Bench:
    """A manager, caches and a file, with three device blocks filled by hand."""

    def __init__(self, folder: Path) -> None:
        self.engine = CacheEngine(LAYOUT, device_blocks=DEVICE, host_blocks=HOST)
        size = LAYOUT.bytes_per_block
        self.store = open_store(f"file://{folder}", bytes_per_block=size, num_slots=EXTERNAL)
        self.manager = BlockManager(
            block_size=2, device_blocks=DEVICE, host_blocks=HOST, external_blocks=EXTERNAL, watermark=0.0
        )
        self.executor = StepExecutor(self.engine, self.store)
        self.sequence = self.manager.allocate(counts=[5])
        self.manager.complete(self.manager.take_decision().ticket)
        rows = np.random.default_rng(0).integers(1, 256, (3, size), dtype=np.uint8)
        self.engine.write("device", self.blocks(), rows)
        self.rows = rows

    def blocks(self) -> NDArray[np.int64]:
        return self.manager.block_table(int(self.sequence[0])).astype(np.int64)

    def carry_out(self, executor: Executor) -> list[Pairs]:
        decision = self.manager.take_decision()
        executor.submit(decision)
        lost = executor.wait(decision.ticket).lost
        self.manager.complete(decision.ticket, lost)
        return list(lost)

    def move(self, executor: Executor, *tiers: str) -> list[Pairs]:
        """Swap the sequence from tier to tier."""
        for tier in tiers:
            if tier == "device":
                self.manager.swap_in(self.sequence)
            else:
                self.manager.swap_out(self.sequence, to=tier)
            lost = self.carry_out(executor)
        return lost

    def differing(self) -> list[bool]:
        """Which of the sequence's device blocks hold other bytes than at the start."""
        held = self.engine.read("device", self.blocks())
        return [bool(row.any()) for row in held != self.rows]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.manager.check()
    bench.store.close()
    bench.engine.close()


def overwrite_device(bench: Bench) -> None:
    """Fill all device blocks, as other sequences would while this one is away."""
    bench.engine.write("device", np.arange(DEVICE), np.full((DEVICE, LAYOUT.bytes_per_block), 9, np.uint8))


def test_undisturbed_round_trips_bring_every_byte_back(bench: Bench) -> None:
    for tier in ("host", "external"):
        bench.move(bench.executor, tier)
        overwrite_device(bench)
        bench.move(bench.executor, "device")
        assert bench.differing() == [False, False, False]


def test_steady_ends_each_decision_in_the_step_after_its_own(bench: Bench) -> None:
    steady = SteadyExecutor(bench.executor)
    for ticket, wanted in enumerate([[], [1], [2], [], [4]], 1):
        if ticket < 5:
            steady.submit(StepDecision(ticket, []))
        if ticket == 3:
            assert steady.wait(3).ticket == 3
        assert [done.ticket for done in steady.poll()] == wanted


def test_calls_that_are_not_watched_reach_the_executor(bench: Bench) -> None:
    wrapped = Wrapper(bench.executor)
    bench.move(bench.executor, "host")
    bench.manager.swap_in(bench.sequence)
    decision = bench.manager.take_decision()
    wrapped.submit(decision, by_layer=True)
    wrapped.wait_for_layer(decision.ticket, 0)
    assert wrapped.lost(decision.ticket) == ()
    assert bench.differing() == [False, False, False]
    assert wrapped.wait(decision.ticket).lost == ()
    assert wrapped.poll() == []


def test_damaged_blocks_are_those_that_do_not_come_back(bench: Bench) -> None:
    corrupting = CorruptingExecutor(bench.executor, count=20)
    assert bench.move(corrupting, "external") == []
    (lost,) = bench.move(corrupting, "device")
    assert len(lost) == corrupting.stored == corrupting.read == 2
    assert bench.store.stats().checksum_failures == 2


def test_damage_stops_at_the_number_asked_for(bench: Bench) -> None:
    corrupting = CorruptingExecutor(bench.executor, count=1)
    bench.move(corrupting, "external", "device")
    assert corrupting.stored == 1


def test_slot_written_again_is_not_damaged_any_more(bench: Bench) -> None:
    corrupting = CorruptingExecutor(bench.executor, count=2)
    bench.move(corrupting, "external")
    bench.manager.free(bench.sequence)
    bench.sequence = bench.manager.allocate(counts=[5])
    bench.carry_out(corrupting)
    bench.engine.write("device", bench.blocks(), bench.rows)
    assert bench.move(corrupting, "external", "device") == []
    assert (corrupting.stored, corrupting.read) == (2, 0)
    assert bench.differing() == [False, False, False]


def test_damage_without_an_external_tier_raises(bench: Bench) -> None:
    with pytest.raises(InvalidArgumentError, match="2 blocks: there is no external tier"):
        CorruptingExecutor(StepExecutor(bench.engine), count=2)
