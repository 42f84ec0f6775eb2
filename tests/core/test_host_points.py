"""Resume points on the host: what windows, states and several groups need of a prompt moves, and moves as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from blockyard import Arena, BlockManager, CacheGroup, Pairs, PrefixCaching, StepDecision

SIZE, CHUNK = 4, 16
FULL, WINDOW, STATE = CacheGroup.full_attention(), CacheGroup.sliding_window(3 * SIZE), CacheGroup.recurrent()
GROUPS = {
    "full and window": [FULL, WINDOW],
    "full and five windows": [FULL, *[WINDOW] * 5],
    "three states and full": [STATE, STATE, STATE, FULL],
    "two full": [FULL, FULL],
    "full and drafter": [FULL, CacheGroup.drafter()],
    "full, drafter and window": [FULL, CacheGroup.drafter(), WINDOW],
    "window": [WINDOW],
    "state": [STATE],
    "full and state of its own bytes": [FULL.with_blocks(bytes=64), STATE.with_blocks(bytes=960)],
    "window and full of its own bytes": [WINDOW.with_blocks(bytes=96), FULL.with_blocks(bytes=64)],
    "four classes": [
        WINDOW.with_blocks(tokens=2, bytes=96),
        FULL.with_blocks(tokens=2, bytes=64),
        STATE.with_blocks(bytes=960),
        FULL.with_blocks(tokens=1, bytes=40),
    ],
}
EXTENT = 960


class Host:
    """A manager of so many blocks, or of so many extents for blocks of their own bytes."""

    def __init__(self, groups: Sequence[CacheGroup], device: int, host: int, **options: Any) -> None:
        caching = PrefixCaching(host=host > 0, eviction="lru", **options)
        sizes: dict[str, Any] = {"device_blocks": device, "host_blocks": host}
        if groups[0].block_bytes:
            arena = {"device_bytes": device * EXTENT, "host_bytes": host * EXTENT}
            sizes = {"arena": Arena(extent_bytes=EXTENT, **arena)}
        self.manager = BlockManager(block_size=SIZE, **sizes, watermark=0.0, groups=groups, prefix_caching=caching)
        self.groups = groups

    def step(self) -> StepDecision:
        decision = self.manager.take_decision()
        self.manager.complete(decision.ticket)
        self.manager.check()
        return decision

    def serve(self, prompt: Sequence[int]) -> int:
        """Compute a prompt; returns how many of its tokens were cached."""
        sequence = self.manager.allocate(prompt, chunk_tokens=CHUNK)
        while True:
            self.step()
            self.manager.mark_computed(sequence)
            chunk = self.manager.next_chunk(sequence, CHUNK)
            if not chunk:
                break
            self.manager.append([sequence], chunk)
        self.manager.free(sequence)
        self.step()
        return sequence.cached_tokens


def prompts(count: int, blocks: int = 12) -> list[list[int]]:
    return [[number * 1000 + token for token in range(blocks * SIZE + 1)] for number in range(count)]


def at_rest(groups: Sequence[CacheGroup]) -> int:
    """Blocks that one prompt has while nothing computes it, or extents that its classes have."""
    host = Host(groups, 200, 0)
    (prompt,) = prompts(1)
    host.serve(prompt)
    if groups[0].block_bytes:
        return sum(host.manager.pool(page_class=at).num_extents for at in range(host.manager.num_page_classes))
    return host.manager.stats().cached_blocks["device"]


@pytest.mark.parametrize("name", GROUPS)
def test_a_loop_over_prompts_that_device_and_host_hold_together_hits_as_on_one_device(name: str) -> None:
    groups = GROUPS[name]
    rest, work = at_rest(groups), prompts(24)
    more = 2 if groups[0].block_bytes else 12  # for what is computed, in extents or blocks
    host = Host(groups, 5 * rest + more * len(groups), 24 * rest)
    first = [host.serve(prompt) for prompt in work]
    assert first == [0] * len(work)
    assert host.manager.stats().cached_blocks["host"] > 0
    limit = (len(work[0]) - 1) // SIZE * SIZE
    for _ in range(3):
        assert [host.serve(prompt) for prompt in work] == [limit] * len(work)
    assert host.manager.prefix.count_unfindable() == 0


@pytest.mark.parametrize("name", ["full and window", "three states and full"])
def test_a_point_is_found_while_it_is_on_its_way_to_the_host(name: str) -> None:
    host = Host(GROUPS[name], 200, 100)
    (prompt,) = prompts(1)
    host.serve(prompt)
    for _ in range(10):
        host.manager.prefix.offload(3)
        assert host.manager.prefix.lookup(prompt).tokens == len(prompt) - 1
        decision = host.manager.take_decision()
        assert host.manager.prefix.lookup(prompt).tokens == len(prompt) - 1
        host.manager.complete(decision.ticket)
        host.manager.check()
        assert host.manager.prefix.lookup(prompt).tokens == len(prompt) - 1
    assert host.manager.stats().cached_blocks["device"] == 0
    assert host.serve(prompt) == len(prompt) - 1
    assert host.manager.stats().cached_blocks["device"] == at_rest(GROUPS[name]), "the device has the point again"


def test_a_window_moves_what_a_point_needs_and_nothing_else() -> None:
    host = Host(GROUPS["full and five windows"], 400, 400)
    (prompt,) = prompts(1, blocks=40)
    host.serve(prompt)
    assert host.manager.prefix.offload(1000) == 40 + 5 * 3
    host.step()
    host.manager.allocate(prompt, chunk_tokens=CHUNK)
    assert sum(len(pairs) for pairs in host.manager.take_decision().swap_in) == 40 + 5 * 3


def test_a_lost_part_of_a_point_makes_the_point_a_miss_and_not_the_request() -> None:
    host = Host(GROUPS["full and window"], 200, 100)
    (prompt,) = prompts(1)
    host.serve(prompt)
    host.manager.prefix.offload(1000)
    host.step()
    sequence = host.manager.allocate(prompt, chunk_tokens=CHUNK)
    decision = host.manager.take_decision()
    (pairs,) = decision.swap_in
    one = Pairs(pairs.src, pairs.dst, pairs.ids[-1:])
    assert host.manager.lose(decision.ticket, [one]).tolist() == [int(sequence)]
    host.manager.complete(decision.ticket, [one])
    host.manager.free(sequence)
    host.step()
    assert host.manager.prefix.lookup(prompt).tokens == 0
    assert host.serve(prompt) == 0
    assert host.serve(prompt) == len(prompt) - 1


def test_what_the_host_has_no_room_for_is_dropped_as_a_whole() -> None:
    groups = GROUPS["full and five windows"]
    rest, work = at_rest(groups), prompts(6)
    host = Host(groups, 3 * rest + 100, rest + rest // 2)
    for _ in range(3):
        for prompt in work:
            host.serve(prompt)
    found = [host.manager.prefix.lookup(prompt).tokens for prompt in work]
    assert set(found) <= {0, len(work[0]) - 1}, "a prompt of one point is found whole or not"
    assert sum(token > 0 for token in found) >= 3


def test_points_that_share_a_part_keep_it_until_the_last_of_them_goes() -> None:
    groups = [FULL, CacheGroup.sliding_window(8 * SIZE)]
    start = list(range(2 * SIZE))
    work = [[*start, *(1000 * number + token for token in range(3 * SIZE + 1))] for number in range(1, 40)]
    host = Host(groups, 40, 130)  # a chat has six blocks of its own, and four with all others
    for _ in range(3):
        for at, prompt in enumerate(work):
            host.serve(prompt)
            recent = work[max(0, at - 15) : at + 1]
            assert {host.manager.prefix.lookup(one).tokens for one in recent} == {5 * SIZE}
