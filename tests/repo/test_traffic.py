from __future__ import annotations

import pytest
from policies.sessions import at_a_time, coarser
from policies.traffic import WORKLOADS, traffic

from blockyard.errors import InvalidArgumentError
from blockyard.traces import TraceRequest


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time_and_comes_in_the_order_of_arrival(name: str) -> None:
    first = traffic(name, requests=200)
    assert first == traffic(name, requests=200)
    assert first != traffic(name, requests=200, seed=1)
    arrivals = [request.arrival for request in first]
    assert len(first) == 200
    assert arrivals == sorted(arrivals)


def test_an_unknown_workload_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match="name is 'talk', must be one of chat, busy, agents"):
        traffic("talk")
    with pytest.raises(InvalidArgumentError, match="requests is 1, must be 2 or more"):
        traffic("chat", requests=1)


def recorded_sessions() -> list[TraceRequest]:
    """Six sessions of three requests, 10 seconds apart, that all begin at 0, as an agent trace has them."""
    return sorted(
        (
            TraceRequest(10.0 * turn, 64 * (turn + 1), 1, range(turn + 1), 64.0, session=session, after=(0,))
            for session in range(6)
            for turn in range(3)
        ),
        key=lambda request: request.arrival,
    )


def test_only_so_many_sessions_run_at_a_time_and_keep_their_own_times() -> None:
    requests = at_a_time(recorded_sessions(), 2)
    times = {session: [request.arrival for request in requests if request.session == session] for session in range(6)}
    assert sorted(times.values()) == [[start, start + 10, start + 20] for start in (0, 10, 20, 30, 40, 50)]
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    assert not any(request.after for request in requests)


def test_the_two_parts_of_the_sessions_have_each_of_them_once() -> None:
    parts = [{request.session for request in at_a_time(recorded_sessions(), 2, part)} for part in (0, 1)]
    assert [len(part) for part in parts] == [3, 3]
    assert parts[0] | parts[1] == set(range(6))


def test_coarser_blocks_are_the_same_where_all_that_they_stand_for_is() -> None:
    requests = [TraceRequest(0.0, 64 * len(ids), 1, ids, 64.0) for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 5], [3, 4, 7])]
    found = coarser(requests, 2)
    assert [tuple(request.hash_ids) for request in found] == [(0, 1), (0, 2), (1,)]
    assert {request.hash_tokens for request in found} == {128.0}
