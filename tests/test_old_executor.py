"""The executor of parts beside the one before it: the same decisions over the same seeds give the same bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from old_executor.executor import StepExecutor as OldExecutor

from blockyard import BlockManager, OutOfBlocksError
from blockyard.engine.engine import CacheEngine
from blockyard.executor.executor import StepExecutor
from blockyard.layout.kv import KVLayout
from blockyard.testing.device import SimulatedStore, SimulatedStreams

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=2, num_kv_heads=1, head_size=1, dtype="int64")
SIZE = LAYOUT.bytes_per_block
BLOCKS = {"device": 14, "host": 10, "external": 12}


class Rig:
    """An engine, a store and an executor; and what each pair that it lost was."""

    def __init__(self, kind: type, seed: int) -> None:
        self.engine = CacheEngine(
            LAYOUT,
            num_device_blocks=BLOCKS["device"],
            num_host_blocks=BLOCKS["host"],
            streams=SimulatedStreams(seed),
        )
        self.store = SimulatedStore(BLOCKS["external"], SIZE, seed=seed)
        self.executor = kind(self.engine, self.store, chunk_bytes=2 * SIZE)
        self.ended: dict[int, set[tuple[str, str, int, int]]] = {}

    def poll(self) -> None:
        for done in self.executor.poll():
            self.ended[done.ticket] = {(p.src, p.dst, *ids) for p in done.lost for ids in p.ids.tolist()}

    def tiers(self) -> dict[str, np.ndarray]:
        rows = {tier: self.engine.read(tier, np.arange(BLOCKS[tier])) for tier in ("device", "host")}
        return rows | {"external": self.store._memory.copy()}


@pytest.mark.parametrize("seed", range(120))
def test_the_same_decisions_give_the_same_bytes(seed: int):
    rng = random.Random(seed)
    books = BlockManager(
        block_size=2,
        device_blocks=BLOCKS["device"],
        host_blocks=BLOCKS["host"],
        external_blocks=BLOCKS["external"],
        watermark=0.0,
    )
    rigs = [Rig(StepExecutor, seed), Rig(OldExecutor, seed + 1)]
    live: list[int] = []
    resting: dict[int, list[int]] = {}
    open_tickets: list[int] = []
    content = np.random.default_rng(seed)
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            act(rng, books, live)
        if rng.random() < 0.4:
            books.defragment("dense", 0, max_moves=rng.randrange(1, 4))
        decision = books.take_decision()
        by_layer, prefetch = rng.random() < 0.5, rng.random() < 0.3
        fresh = [int(b) for h in live if books.tier(h) == "device" for b in books.block_table(h)[-1:]]
        for rig in rigs:
            rig.executor.submit(decision, by_layer=by_layer, prefetch=prefetch)
            if by_layer:
                rig.executor.wait_for_layer(decision.ticket, 1)
        open_tickets.append(decision.ticket)
        for _ in range(rng.randrange(12)):
            for rig in rigs:
                rig.poll()
        end(books, rigs, open_tickets, live)
        if not open_tickets and fresh:
            still = [int(b) for h in live if books.tier(h) == "device" for b in books.block_table(h)[-1:]]
            rows = content.integers(0, 256, (len(set(still)), SIZE), np.uint8)
            for rig in rigs:
                rig.engine.write("device", np.array(sorted(set(still)), np.int64), rows)
        books.check()
    for _ in range(20_000):
        if not open_tickets:
            break
        for rig in rigs:
            rig.poll()
        end(books, rigs, open_tickets, live)
    assert not open_tickets
    del resting
    one, other = (rig.tiers() for rig in rigs)
    for tier, rows in one.items():
        np.testing.assert_array_equal(rows, other[tier], err_msg=tier)


def act(rng: random.Random, books: BlockManager, live: list[int]) -> None:
    calls = {
        "device": [books.swap_out, books.spill, books.append],
        "host": [books.swap_in, books.spill],
        "external": [books.fetch],
    }
    try:
        if len(live) < 6 and rng.random() < 0.4:
            live.append(int(books.allocate([rng.randrange(1, 8)])[0]))
        elif live and rng.random() < 0.2:
            live.append(int(books.fork(rng.choice(live), 1)[0]))
        elif live and rng.random() < 0.15:
            books.free([live.pop(rng.randrange(len(live)))])
        elif live:
            chosen = rng.choice(live)
            rng.choice(calls[books.tier(chosen)])([chosen])
    except (OutOfBlocksError, Exception):  # what does not fit is left
        return


def end(books: BlockManager, rigs: list[Rig], open_tickets: list[int], live: list[int]) -> None:
    for ticket in list(open_tickets):
        if all(ticket in rig.ended for rig in rigs):
            first, second = (rig.ended[ticket] for rig in rigs)
            open_tickets.remove(ticket)
            spills = {pair for pair in first ^ second if pair[1] == "external"}
            assert first ^ second == spills, "only a spill without room may differ"
            assert not spills, "and here none does"
            if first:
                from blockyard import Pairs

                lost = [Pairs(src, dst, np.array([[a, b]], np.int64)) for src, dst, a, b in sorted(first)]
                for gone in books.fail(ticket, lost).tolist():
                    live.remove(gone)
                    books.free([gone])
            else:
                books.complete(ticket)
