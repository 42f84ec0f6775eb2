from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policies.evictor import Chain, Evictor, Lru, Optimal, chains, replay
from policies.fixed import POLICIES
from policies.traffic import traffic

from blockyard import BlockManager, PrefixCaching
from blockyard.errors import InvalidArgumentError
from blockyard.traces import TraceRequest

SIZE = 4


def requests(*prompts: list[int], tail: int = 1) -> list[TraceRequest]:
    return [TraceRequest(0.0, len(ids) * SIZE + tail, 1, tuple(ids), float(SIZE)) for ids in prompts]


@pytest.mark.parametrize("workload", ["chat", "rag"])
def test_lru_in_python_hits_what_it_hits_in_the_block_manager(workload: str) -> None:
    served = traffic(workload, requests=400)
    manager = BlockManager(
        block_size=SIZE, device_blocks=500, watermark=0.0, prefix_caching=PrefixCaching(eviction="lru")
    )
    hits = []
    for chain in chains(served):
        prompt = [key for key in chain.keys for _ in range(SIZE)] + [10**6] * (chain.needed - len(chain.keys))
        sequence = manager.allocate(prompt)
        hits.append(sequence.cached_tokens // SIZE)
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(sequence)
        manager.free(sequence)
    assert replay(served, 500, Lru()) == hits
    assert sum(hits) > 0


@pytest.mark.parametrize("name", ["arc", "lfu", "s3fifo:10:1"])
def test_a_fixed_policy_takes_a_prompt_from_its_end_and_keeps_what_was_hit(name: str) -> None:
    policy = POLICIES[name]
    assert replay(requests([1, 2, 3, 4, 5], [6, 7, 8, 9], [1, 2, 3, 4, 5]), 8, policy(8)) == [0, 0, 3]
    flood = [[100 + number] for number in range(60)]
    assert replay(requests(*[[1, 2, 3]] * 4, *flood, [1, 2, 3]), 32, policy(32))[-1] == 3


def test_a_prompt_of_whole_blocks_never_finds_its_last_one() -> None:
    assert chains(requests([1, 2], tail=0)) == [Chain((0, 1), 1, 2)]
    assert chains(requests([1, 2], [1, 3], [2])) == [Chain((0, 1), 2, 3), Chain((0, 2), 2, 3), Chain((3,), 1, 2)]
    assert replay(requests([1, 2], [1, 2], tail=0), 4, Lru()) == [0, 1]


def test_a_request_longer_than_the_pool_is_left_out() -> None:
    assert replay(requests([1, 2, 3], [4], [4]), 3, Lru()) == [0, 1]


class Scripted(Evictor):
    """Evicts the blocks at these places of its list."""

    def __init__(self, places: tuple[int, ...]) -> None:
        self.blocks: list[int] = []
        self.places = list(places)

    def insert(self, block: int) -> None:
        self.blocks.append(block)

    def remove(self, block: int) -> None:
        self.blocks.remove(block)

    def pop(self) -> int:
        return self.blocks.pop((self.places.pop() if self.places else 0) % len(self.blocks))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), min_size=2, max_size=6))
def test_no_order_of_evictions_hits_more_than_the_optimum(prompts: list[list[int]]) -> None:
    served = requests(*prompts)
    best = max(sum(replay(served, 4, Scripted(places))) for places in product(range(3), repeat=5))
    assert sum(replay(served, 4, Optimal(served, 4))) >= best


def test_what_the_policy_gives_out_must_be_evictable() -> None:
    class Broken(Lru):
        def pop(self) -> int:
            return 99

    with pytest.raises(InvalidArgumentError, match="the policy pops 99, must be an evictable block"):
        replay(requests([1, 2], [3, 4]), 3, Broken())
    with pytest.raises(InvalidArgumentError, match="blocks is 0, must be 1 or more"):
        replay(requests([1]), 0, Lru())
