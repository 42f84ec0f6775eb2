"""Quotas of tenants from a cache down to a real slab and a real server, as conversations use them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from kept_prefixes import WIDTH, CheckedCache
from servers import serving

from blockyard.stores import Owners, open_store

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


def test_a_stored_block_keeps_its_tenant_if_it_is_put_again_without_one(url: str):
    tenant = hashlib.sha256(MINE).digest()
    keys, rows = np.arange(96, dtype=np.uint8).reshape(3, 32), np.ones((3, 4096), np.uint8)
    owners = Owners(
        np.tile(np.frombuffer(tenant, np.uint8), (3, 1)), np.vstack([np.zeros((1, 32), np.uint8), keys[:2]])
    )
    with open_store(url, bytes_per_block=4096, namespace=bytes(32), use="prefix") as store:
        store.set_quota(tenant, 3)
        for whose in (owners, None, owners):
            assert store.wait(store.submit_put(keys, rows, whose)).ok.all()
            assert store.quota(tenant) == (3, 3)
        store.wait(store.submit_delete(keys))
        assert store.wait(store.submit_put(keys, rows)).ok.all()
        assert store.quota(tenant) == (0, 3)
