"""Retention: what an ended request leaves is evicted last until a time, and keeps no block from anything that runs."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest
from token_engine import Engine

from blockyard import PrefixCaching
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Request

LRU = PrefixCaching(eviction="lru")


def serve(engine: Engine, name: str, prompt: int, **fields: object) -> None:
    """Run a request to its end; compare its tokens."""
    engine.done.clear()
    engine.requests.clear()
    request = engine.add(name, prompt, 3, **fields)
    while engine.scheduler.num_unfinished:
        engine.step()
    assert list(engine.done) == [request.request_id]


def found(engine: Engine, name: str, prompt: int) -> int:
    """Return how many tokens of a prompt are cached."""
    return engine.manager.prefix.lookup([(ord(name[0]) + i) % 97 for i in range(prompt)]).tokens


def at(engine: Engine, seconds: float) -> None:
    engine.scheduler._clock = lambda: seconds


@pytest.mark.parametrize("n", [1, 2])
def test_retained_blocks_are_evicted_after_all_others_until_their_time(n: int):
    engine = Engine(20, prefix_caching=LRU)
    at(engine, 100.0)
    serve(engine, "A", 13, retain=30, n=n)
    serve(engine, "a", 13)
    at(engine, 129.0)
    for name in "0P":
        serve(engine, name, 37)
    assert (found(engine, "A", 13), found(engine, "a", 13)) == (12, 0)
    assert engine.scheduler.stats().retained == n
    at(engine, 130.0)
    for name in "5U0":
        serve(engine, name, 37)
    assert found(engine, "A", 13) == 0
    stats = engine.scheduler.stats()
    assert (stats.retain_given_up, stats.retain_refused) == (0, 0)
    assert engine.manager.prefix.store_jobs.num_leases == 0


def test_a_waiting_request_takes_retained_blocks_the_first_deadline_first():
    engine = Engine(16, prefix_caching=LRU)
    at(engine, 0.0)
    serve(engine, "A", 13, retain=60)
    serve(engine, "a", 13, retain=30)
    serve(engine, "0", 45)  # 12 blocks: it fits beside one of the two
    stats = engine.scheduler.stats()
    assert (stats.retained, stats.retain_given_up) == (2, 1)
    assert (found(engine, "A", 13), found(engine, "a", 13)) == (12, 4)
    serve(engine, "P", 61)
    assert engine.scheduler.stats().retain_given_up == 2
    assert engine.scheduler.stats().preempted_recompute == 0


def test_a_running_request_grows_into_retained_blocks_and_is_not_preempted():
    engine = Engine(8, prefix_caching=LRU)
    at(engine, 0.0)
    serve(engine, "A", 13, retain=60)
    request = engine.add("0", 5, 26)
    while engine.scheduler.num_unfinished:
        engine.step()
    assert len(engine.done[request.request_id][0]) == 26
    stats = engine.scheduler.stats()
    assert (stats.retain_given_up, stats.preempted_recompute) == (1, 0)


def test_a_request_that_cannot_start_anyway_takes_nothing():
    engine = Engine(16, prefix_caching=LRU, max_num_seqs=1)
    at(engine, 0.0)
    serve(engine, "A", 13, retain=60)
    engine.add("0", 5, 3)
    engine.add("P", 5, 3)
    engine.step()
    assert engine.scheduler.num_running == 1
    assert engine.scheduler.stats().retain_given_up == 0


def test_at_most_half_of_the_unused_blocks_are_retained():
    engine = Engine(16, prefix_caching=LRU)
    for name in "Aa0":
        serve(engine, name, 13, retain=60)
    stats = engine.scheduler.stats()
    assert (stats.retained, stats.retain_refused) == (2, 1)


def test_a_reset_ends_retention():
    engine = Engine(16, prefix_caching=LRU)
    serve(engine, "A", 13, retain=60)
    engine.manager.prefix.reset()
    serve(engine, "0", 61)
    assert engine.manager.pool().num_free == 16


@pytest.mark.parametrize("retain", [-1, nan, 86401, float("inf")])
def test_seconds_out_of_range_are_refused(retain: float):
    with pytest.raises(InvalidArgumentError, match=r"request 'a' has retain .*must be seconds from 0 to 86400"):
        Engine(8, prefix_caching=True).add("a", 5, 3, retain=retain)


def test_retention_that_makes_no_sense_is_refused():
    with pytest.raises(InvalidArgumentError, match="request 'a': retain is '5', must be a number"):
        Engine(8, prefix_caching=True).add("a", 5, 3, retain="5")
    with pytest.raises(InvalidArgumentError, match="hint 'over', must have one of them"):
        Engine(8, prefix_caching=True).add("a", 5, 3, retain=5, hint="over")
    engine = Engine(8)
    with pytest.raises(InvalidArgumentError, match="has retain 5, but there is no prefix caching"):
        engine.scheduler.add(Request("a", [1], 1, retain=5))
    assert engine.scheduler.num_unfinished == 0


def test_a_tenant_with_a_quota_retains_nothing():
    engine = Engine(20, prefix_caching=LRU)
    engine.manager.prefix.set_quota(None, 2)
    serve(engine, "A", 13, retain=60)
    assert engine.scheduler.stats().retain_refused == 1
    assert engine.manager.prefix.store_jobs.num_leases == 0


def test_seconds_of_numpys_types_are_those_of_python():
    assert Request("A", [1], 1, retain=np.float16(30)).retain == 30.0
    assert type(Request("A", [1], 1, retain=np.float32(30)).retain) is float
