"""Quotas of tenants from a cache down to a real slab and a real server, as conversations use them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kept_prefixes import WIDTH, CheckedCache
from servers import serving

MINE = b"a tenant"


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/kv?size=4MiB"
        return
    with serving("valkey-server", tmp_path) as server:
        yield f"redis://127.0.0.1:{server.port}?size=4MiB"


def use(cache: CheckedCache, prompt: list[int], salt: bytes | None = MINE) -> int:
    """Serve a prompt with what the store has, and give it the rest. Returns the blocks that were hit."""
    cache.fetch(prompt, salt)
    found = cache.serve(prompt, salt) // 4
    assert cache.prefixes.wait(60)
    cache.check()
    return found


def unlike(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1 << 20) for _ in range(count)]


def test_a_prompt_longer_than_its_quota_hits_its_beginning_each_time_and_after_a_restart(url: str):
    chance = random.Random(0)
    system = unlike(chance, 4 * 18 + 1)
    hits = []
    for life in range(2):
        with closing(CheckedCache(url, device=32, host=0)) as cache:
            cache.prefixes.set_quota(MINE, 9 * WIDTH)
            for _ in range(4):
                hits.append(use(cache, system))
                assert cache.prefixes.quota(MINE) == (9 * WIDTH, 9 * WIDTH)
                use(cache, unlike(chance, 128), None)  # others take the device
        # Batches of a prompt land in any order: at first a later block may have the place of the beginning's last one.
        assert hits[1] in {8, 9}
        assert hits[2:] == [9] * (4 * life + 2)


def test_conversations_keep_within_their_quota_and_newer_ones_replace_older_ones(url: str):
    chance = random.Random(1)
    with closing(CheckedCache(url, device=16, host=0)) as cache:
        cache.prefixes.set_quota(MINE, 5 * WIDTH)
        for _ in range(8):
            first = unlike(chance, 13)
            second = first[:12] + unlike(chance, 9)
            use(cache, first)
            use(cache, second)
            held, most = cache.prefixes.quota(MINE) or (0, 0)
            assert held <= most == 5 * WIDTH
            use(cache, unlike(chance, 60), None)
            assert use(cache, second) == 5, "the last conversation is there"
