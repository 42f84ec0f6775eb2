"""Storage that does not answer is probed less and less often; one answer brings it back."""

from blockyard.stores.threaded.batches import Batches


def seconds_until_probe(batches: Batches, now: float) -> float:
    return next(wait / 8 for wait in range(1 << 10) if batches.is_probe_due(now + wait / 8))


def test_probes_are_twice_as_far_apart_each_time_up_to_eight_seconds():
    batches, now = Batches(), 100.0
    assert not batches.is_probe_due(now)
    assert batches.trip(now)
    pauses = []
    for _ in range(6):
        pauses.append(seconds_until_probe(batches, now))
        now += pauses[-1]
        assert not batches.end_lookup(now, answered=False)
        assert batches.is_down
    assert pauses == [0.5, 1, 2, 4, 8, 8]


def test_an_answer_ends_it_and_the_next_time_begins_anew():
    batches, now = Batches(), 100.0
    batches.trip(now)
    for _ in range(4):
        batches.end_lookup(now, answered=False)
    assert batches.end_lookup(now, answered=True)
    assert not batches.is_down
    assert not batches.is_probe_due(now + 100)
    assert not batches.end_lookup(now, answered=True), "a lookup of storage that works is no news"
    assert batches.trip(now)
    assert seconds_until_probe(batches, now) == 0.5


def test_a_call_that_hangs_while_the_store_is_down_delays_the_probe_and_is_not_reported():
    batches = Batches()
    batches.trip(100.0)
    assert not batches.trip(100.25)
    assert seconds_until_probe(batches, 100.25) == 0.5
