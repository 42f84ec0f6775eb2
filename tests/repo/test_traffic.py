from __future__ import annotations

import pytest
from policies.traffic import WORKLOADS, traffic

from blockyard.errors import InvalidArgumentError


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
