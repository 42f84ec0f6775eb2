"""The models of `benches/policies/points.py` hit what a cache with their rules hits, block by block."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from policies.evictor import Lru, replay
from policies.points import Bound, Prompts, ResumePoints, VllmRule

from blockyard.traces import TraceRequest

SIZE = 4


def branching(seed: int, count: int = 60) -> Iterator[TraceRequest]:
    """Prompts of a few sessions; each continues an earlier one of its session from anywhere, or is a new one."""
    rng, known = random.Random(seed), dict[int, list[list[int]]]()
    fresh = iter(range(10**6))
    for _ in range(count):
        session = rng.randrange(3)
        earlier = rng.choice(known.get(session, [[]]))
        ids = earlier[: rng.randint(0, len(earlier))] + [next(fresh) for _ in range(rng.randint(1, 5))]
        known.setdefault(session, []).append(ids)
        yield TraceRequest(0.0, len(ids) * SIZE + 1, 1, tuple(ids), float(SIZE), session)


@given(seed=st.integers(0, 1000), blocks=st.integers(5, 80))
def test_the_bound_is_what_lru_finds_block_by_block(seed: int, blocks: int):
    served = [request for request in branching(seed) if len(request.hash_ids) < blocks]
    found = sum(replay(served, blocks, Lru()))
    tokens = sum(request.input_tokens for request in served)
    # The last prompt token needs a block of its own in `replay`, which is free in between: the pool is one smaller.
    assert round(Bound(Prompts(served), blocks - 1).hit_rate() * tokens) == found * SIZE


@given(seed=st.integers(0, 1000), blocks=st.integers(20, 80), interval=st.integers(0, 4))
def test_tails_that_take_no_room_cost_no_hits_if_every_boundary_is_a_point(seed: int, blocks: int, interval: int):
    prompts = Prompts(list(branching(seed)))
    bound = Bound(prompts, blocks).hit_rate()
    assert ResumePoints(prompts, blocks, 0, 1, "none").hit_rate() == bound
    assert ResumePoints(prompts, blocks, 0, interval).hit_rate() <= bound
    assert VllmRule(prompts, blocks, 0, leaves=True).hit_rate() <= bound


@given(seed=st.integers(0, 1000), blocks=st.integers(10, 80), tail=st.integers(1, 9), interval=st.integers(0, 9))
def test_a_pool_never_holds_more_blocks_than_it_has(seed: int, blocks: int, tail: int, interval: int):
    prompts = Prompts(list(branching(seed)))
    for cache in (
        ResumePoints(prompts, blocks, tail, interval),
        VllmRule(prompts, blocks, tail, leaves=bool(interval % 2)),
    ):
        assert 0 <= cache.hit_rate() < 1
        held = sum(owned.high - owned.low + cache.tail * len(owned.points) for owned in cache.owners.values())
        if isinstance(cache, VllmRule):
            held += sum(left for (kind, _), left in cache.order.items() if kind == "tail")
        assert held == cache.used <= blocks


def test_points_stay_at_square_distances_and_where_prompts_part():
    cache = ResumePoints(Prompts([]), 100, 1, interval=2)
    points = {position: position == 31 for position in range(1, 51)}
    assert [point for point, _ in cache.kept(50, 0, points)] == [50, 48, 44, 37, 31, 18, 2]
    assert [point for point, _ in cache.kept(50, 33, points)] == [50, 48, 44, 37, 33, 31, 18, 2]
