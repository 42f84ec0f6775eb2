"""Storage that does not answer is probed less and less often; one answer brings it back."""

from blockyard.stores.threaded.breaker import Breaker
from blockyard.tools.virtual_time import VirtualTime


def until_due(breaker: Breaker, clock: VirtualTime) -> float:
    began = clock.now
    while not breaker.is_probe_due(clock.now):
        clock.now += 0.125
    return clock.now - began


def test_probes_are_twice_as_far_apart_each_time_up_to_eight_seconds():
    clock = VirtualTime(100.0)
    breaker = Breaker(clock.monotonic)
    assert not breaker.is_probe_due(clock.now)
    assert breaker.trip()
    pauses = []
    for _ in range(6):
        pauses.append(until_due(breaker, clock))
        assert not breaker.end_probe(answered=False)
        assert breaker.is_down
    assert pauses == [0.5, 1, 2, 4, 8, 8]


def test_an_answer_ends_it_and_the_next_time_begins_anew():
    clock = VirtualTime(100.0)
    breaker = Breaker(clock.monotonic)
    breaker.trip()
    for _ in range(4):
        until_due(breaker, clock)
        breaker.end_probe(answered=False)
    until_due(breaker, clock)
    assert breaker.end_probe(answered=True)
    assert not breaker.is_down
    assert not breaker.is_probe_due(clock.now + 100)
    assert not breaker.end_probe(answered=True), "a lookup of storage that works is no news"
    assert breaker.trip()
    assert until_due(breaker, clock) == 0.5


def test_a_call_that_hangs_while_the_store_is_down_delays_the_probe_and_is_not_reported():
    clock = VirtualTime(100.0)
    breaker = Breaker(clock.monotonic)
    breaker.trip()
    clock.now += 0.25
    assert not breaker.trip()
    assert until_due(breaker, clock) == 0.5
