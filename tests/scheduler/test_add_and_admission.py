"""What `add` accepts finishes, whatever the cache groups: `add` and admission count blocks alike."""

from itertools import product

import pytest

from blockyard import BlockManager, CacheGroup
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.scheduler import PREEMPTION_MODES, PreemptionMode, Request, Scheduler

SIZE = 3
FULL, WINDOW, STATE = CacheGroup.full_attention(), CacheGroup.sliding_window(5), CacheGroup.recurrent()
GROUPS = {
    "full": [FULL],
    "window of a token": [CacheGroup.sliding_window(1)],
    "window": [WINDOW],
    "recurrent": [STATE],
    "full + window": [FULL, WINDOW],
    "full + recurrent": [FULL, STATE],
    "recurrent + 2 windows + full": [STATE, CacheGroup.sliding_window(2), CacheGroup.sliding_window(9), FULL],
}
REQUESTS = [(1, 1), (1, 12), (4, 1), (6, 7), (7, 6), (13, 1), (14, 9)]
"""Prompt and generated tokens."""


def run(scheduler: Scheduler, limit: int) -> int:
    """Run until all requests have finished; return the number of steps."""
    for steps in range(limit):
        if not scheduler.num_unfinished:
            return steps
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [(draw.position * 5 + draw.sequence) % 11 for draw in step.draws()])
        scheduler.manager.check()
    raise AssertionError(f"{scheduler.num_unfinished} requests are left after {limit} steps")


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("kind", GROUPS)
def test_what_add_accepts_finishes_on_an_idle_scheduler(kind: str, prefix_caching: bool, mode: PreemptionMode):
    accepted = set()
    sizes = (2, 3, 4, 6, 9, 30) if len(GROUPS[kind]) == 1 else (4, 7, 11, 17, 23, 65)
    for blocks, chunk, n, (prompt, tokens) in product(sizes, (1, 4, 64), (1, 3), REQUESTS):
        manager = BlockManager(
            block_size=SIZE,
            device_blocks=blocks,
            host_blocks=6,
            watermark=0.1,
            prefix_caching=prefix_caching,
            groups=GROUPS[kind],
        )
        scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=chunk, preemption_mode=mode)
        try:
            scheduler.add(Request("a", list(range(prompt)), tokens, n=n))
        except OutOfBlocksError as error:
            assert error.wanted > error.free
            assert error.wanted <= n * -(-(prompt + tokens) // SIZE) * len(GROUPS[kind])
            continue
        accepted.add((prompt, tokens, n))
        run(scheduler, 40 * n)
        # Again, with what the first has left in the prefix cache.
        scheduler.add(Request("b", list(range(prompt)), tokens, n=n))
        run(scheduler, 40 * n)
    assert accepted == {(*request, n) for request in REQUESTS for n in (1, 3)}


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("recurrent", 2),
        ("window", 3),
        ("full + window", 100 + 3),
        ("full + recurrent", 100 + 2),
        ("recurrent + 2 windows + full", 2 + 2 + 4 + 100),
    ],
)
def test_a_long_request_needs_only_the_blocks_that_it_holds_at_once(kind: str, blocks: int, prefix_caching: bool):
    """A prompt whose chunks of 8 tokens would not fit is computed in shorter ones."""

    def scheduler(device_blocks: int) -> Scheduler:
        manager = BlockManager(
            block_size=SIZE,
            device_blocks=device_blocks,
            watermark=0,
            prefix_caching=prefix_caching,
            groups=GROUPS[kind],
        )
        return Scheduler(manager, max_num_batched_tokens=8)

    request = Request("a", list(range(200)), max_tokens=100)
    small = scheduler(blocks)  # and the null block
    with pytest.raises(
        OutOfBlocksError, match=f"needs up to {blocks} device blocks and 1 kept free, there are {blocks}"
    ):
        small.add(request)
    large = scheduler(blocks + 1)
    large.add(request)
    run(large, 300)
    assert large.stats().preempted_recompute == 0


def test_a_request_longer_than_any_sequence_can_be_is_refused():
    scheduler = Scheduler(BlockManager(block_size=4, device_blocks=8, groups=[CacheGroup.recurrent()]))
    with pytest.raises(InvalidArgumentError, match="1 prompt tokens and max_tokens 4294967295, must be at most"):
        scheduler.add(Request("a", [1], max_tokens=(1 << 32) - 1))
    assert scheduler.num_unfinished == 0
    scheduler.add(Request("a", [1], max_tokens=(1 << 32) - 2, stop_token_ids=frozenset({1})))
    run(scheduler, 10)
