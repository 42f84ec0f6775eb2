from __future__ import annotations

import numpy as np
import pytest
from managers import make_manager, step
from policies.evictor import Optimal, chains, replay
from policies.fixed import POLICIES as FIXED
from policies.traffic import traffic
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, UnknownSequenceError
from blockyard.traces import TraceRequest

SIZE = 4
POLICIES = ("lru", "adaptive", "priority")


def new_manager(device: int = 8, **policies: str) -> BlockManager:
    return make_manager(block_size=SIZE, device_blocks=device, watermark=0.0, **policies)


def prompt(first: int, blocks: int) -> list[int]:
    return [first + i // SIZE for i in range(blocks * SIZE)]


def run(manager: BlockManager, tokens: list[int], priority: int = 0, *, check: bool = True) -> int:
    """Admit a prompt, compute and free it; how many of its tokens were cached."""
    handles, cached = allocate_prompts(manager, [tokens])
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(handles)
    manager.prefix.set_priority(handles, priority)
    manager.free(handles)
    if check:
        manager.check()
    return int(cached[0])


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_chain_is_evicted_from_its_end(eviction: str) -> None:
    manager = new_manager(eviction=eviction)
    run(manager, prompt(0, 8))
    for lost in range(1, 8):
        manager.free(manager.allocate(counts=np.array([SIZE * lost], dtype=np.uint32)))
        step(manager)
        assert manager.prefix.lookup([*prompt(0, 8), 99]).tokens == (8 - lost) * SIZE
        assert len(manager.pool().free_ids()) == lost


@pytest.mark.parametrize("eviction", POLICIES)
def test_every_cached_block_can_be_had(eviction: str) -> None:
    manager = new_manager(device=16, eviction=eviction)
    for i in range(6):
        for _ in range(i):
            run(manager, prompt(100 * i, 2), priority=15)
    assert manager.pool().num_free == 16
    manager.free(manager.allocate(counts=[16 * SIZE]))
    step(manager)
    assert manager.stats().cached_blocks["device"] == 0


def test_the_least_recently_used_chain_goes_first() -> None:
    manager = new_manager(eviction="lru")
    for first in (0, 100, 200, 300, 0):
        run(manager, prompt(first, 2))
    run(manager, prompt(400, 2))
    assert [manager.prefix.lookup([*prompt(first, 2), 9]).tokens for first in (0, 100, 200)] == [8, 0, 8]


def test_what_was_hit_outlives_a_flood_of_what_is_not() -> None:
    manager = new_manager(device=32, eviction="adaptive")
    for _ in range(4):
        run(manager, prompt(0, 4))
    for i in range(1, 20):
        run(manager, prompt(100 * i, 4))
    assert manager.prefix.lookup([*prompt(0, 4), 9]).tokens == 16


def hits(eviction: str, requests: list[TraceRequest], blocks: int) -> list[int]:
    """Blocks that each request finds cached, one request after the other."""
    if eviction in FIXED:
        return replay(requests, blocks, FIXED[eviction](blocks))
    manager = new_manager(blocks, eviction=eviction)
    found = []
    for chain in chains(requests):
        tokens = [key for key in chain.keys for _ in range(SIZE)]
        found.append(run(manager, [*tokens, *[10**6] * (chain.needed - len(chain.keys))], check=False) // SIZE)
    return found


@pytest.mark.parametrize(("count", "percent"), [(1000, 60), (2000, 3)])
def test_adaptive_keeps_hitting_in_a_loop_that_is_longer_than_the_pool(count: int, percent: int) -> None:
    requests = traffic("loop", requests=count)
    blocks = len({key for chain in chains(requests) for key in chain.keys}) * percent // 100
    found = {eviction: sum(hits(eviction, requests, blocks)) for eviction in ("lru", "s3fifo:10:1", "adaptive")}
    assert found["lru"] == 0
    asked = sum(len(chain.keys) for chain in chains(requests))
    assert found["adaptive"] > max(1.1 * found["s3fifo:10:1"], asked / 200)


def test_adaptive_learns_a_new_loop_whose_length_has_many_divisors() -> None:
    manager = new_manager(256, eviction="adaptive")
    for first, rounds in ((0, 20), (10**6, 120)):
        for _ in range(rounds):
            found = sum(run(manager, prompt(first + 1000 * i, 16), check=False) // SIZE for i in range(24))
    assert found > 24 * 16 / 5


@pytest.mark.parametrize("workload", ["chat", "rag", "templates", "mixed"])
def test_adaptive_is_near_the_best_fixed_policy_and_no_policy_beats_the_optimum(workload: str) -> None:
    requests = traffic(workload, requests=1500)
    blocks = len({key for chain in chains(requests) for key in chain.keys}) * 8 // 100
    optimum = sum(replay(requests, blocks, Optimal(requests, blocks)))
    fixed = [sum(hits(eviction, requests, blocks)) for eviction in ("lru", "s3fifo:5:1", "s3fifo:30:4", "arc", "lfu")]
    adaptive = sum(hits("adaptive", requests, blocks))
    assert 0.95 * max(fixed) <= adaptive <= optimum
    assert max(fixed) <= optimum


def test_adaptive_follows_a_shift() -> None:
    requests = traffic("loop-chat", requests=3000)
    blocks = 1400
    found = {eviction: hits(eviction, requests, blocks) for eviction in ("lru", "s3fifo:5:1", "arc", "adaptive")}
    late = {eviction: sum(each[1800:]) for eviction, each in found.items()}
    assert late.pop("adaptive") > 0.95 * max(late.values())


def test_a_priority_delays_eviction_and_decays() -> None:
    manager = new_manager(eviction="priority")
    run(manager, prompt(0, 3), priority=3)
    turnovers = 0.0
    while manager.prefix.lookup([*prompt(0, 3), 9]).tokens == 12:
        run(manager, prompt(100 + round(turnovers * 100), 2))
        turnovers += 2 / 8
        assert turnovers < 6, "a retained block goes like any other in the end"
    assert turnovers >= 3


def test_a_priority_out_of_range_is_refused() -> None:
    manager = new_manager(eviction="priority")
    handles, _ = allocate_prompts(manager, [[1, 2]])
    for priority in (16, 256):
        with pytest.raises(InvalidArgumentError, match=f"priority is {priority}, must be 0 to 15"):
            manager.prefix.set_priority(handles, priority)
    with pytest.raises(UnknownSequenceError):
        manager.prefix.set_priority([7], 1)


def test_an_unknown_policy_is_refused_with_the_names_that_there_are() -> None:
    for name in ("fifo", "custom"):
        with pytest.raises(InvalidArgumentError, match=f'eviction is "{name}", must be one of lru, adaptive, priority'):
            new_manager(eviction=name)
    with pytest.raises(InvalidArgumentError, match='reuse_order is "", must be one of lowest, fifo, lru'):
        new_manager(reuse_order="")
