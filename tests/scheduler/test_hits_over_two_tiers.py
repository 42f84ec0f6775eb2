"""What prompts find where running sequences fill the device and the host has room: as much as in one pool of both."""

from __future__ import annotations

from random import Random

import pytest

from blockyard import BlockManager, CacheGroup, PrefixCaching, Request, Scheduler

SIZE, DEVICE, HOST = 4, 200, 6000
FULL = CacheGroup.full_attention()
GROUPS = {
    "full": [FULL],
    "window": [FULL, CacheGroup.sliding_window(32)],
    "two windows": [FULL, CacheGroup.sliding_window(16), CacheGroup.sliding_window(64)],
    "chunks": [FULL, CacheGroup.chunked_attention(64)],
    "states": [FULL, CacheGroup.recurrent()],
    "drafter": [FULL, CacheGroup.drafter()],
}


def prompts(seed: int) -> list[list[int]]:
    """Prompts that begin alike and part at different places."""
    rng = Random(seed)
    shared = [rng.randrange(5000) for _ in range(250)]
    own = [[rng.randrange(5000) for _ in range(rng.randrange(1, 75))] for _ in range(60)]
    return [shared[: rng.randrange(62, 250)] + tokens for tokens in own]


def hits(seed: int, device: int, host: int, groups: list[CacheGroup], max_num_seqs: int) -> int:
    caching = PrefixCaching(host=host > 0)
    manager = BlockManager(
        block_size=SIZE, device_blocks=device, host_blocks=host, groups=groups, prefix_caching=caching
    )
    scheduler = Scheduler(manager, max_num_batched_tokens=128, max_num_seqs=max_num_seqs, preemption_mode="recompute")
    for number, prompt in enumerate(prompts(seed)):
        scheduler.add(Request(number, prompt, max_tokens=5))
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [7] * step.num_draws)
    manager.check()
    return scheduler.stats().cached_tokens


@pytest.mark.parametrize("max_num_seqs", [4, 16])
@pytest.mark.parametrize("name", GROUPS)
def test_device_and_host_find_what_one_pool_finds(name: str, max_num_seqs: int):
    found = [
        sum(hits(seed, device, host, GROUPS[name], max_num_seqs) for seed in range(2))
        for device, host in ((DEVICE, 0), (DEVICE, HOST), (DEVICE + HOST, 0))
    ]
    alone, both, pool = found
    assert both >= alone, found
    assert both >= 0.96 * pool, found
