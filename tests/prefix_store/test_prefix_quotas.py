"""Quotas of tenants in prefix stores: the store counts, whoever writes, and keeps the beginnings of prompts."""

from __future__ import annotations

import random
import time

import pytest
from kept_prefixes import WIDTH, CheckedCache, checked, tokens
from memory_stores import KeyedStore, Quotas, QuotaStore, tenant_of

from blockyard.errors import InvalidArgumentError, StoreError

MINE, OTHER = b"tenant a", b"tenant b"


def store_of(quotas: Quotas) -> QuotaStore:
    store = QuotaStore(quotas, bytes_per_block=WIDTH)
    store.num_slots = 1000
    return store


def stored(quotas: Quotas) -> int:
    """Blocks in the store, without the record of its epoch."""
    return sum(row.nbytes > 192 for row in quotas.blocks.values())


def use(cache: CheckedCache, prompt: list[int], salt: bytes | None = MINE) -> int:
    """Serve a prompt with what the store has, and give it the rest. Returns the blocks that were hit."""
    cache.fetch(prompt, salt)
    found = cache.serve(prompt, salt) // 4
    assert cache.prefixes.wait(60)
    return found


@pytest.fixture
def chance() -> random.Random:
    return random.Random(0)


def unlike(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1 << 20) for _ in range(count)]


@pytest.mark.parametrize("host", [40, 0])
def test_a_tenant_loses_its_own_blocks_beyond_its_quota_in_all_processes(host: int):
    quotas = Quotas({})
    with checked(store_of(quotas), device=40, host=host) as cache:
        assert cache.prefixes.quota(MINE) is None
        cache.prefixes.set_quota(MINE, 3 * WIDTH + 5)
        for stream, salt in ((9, OTHER), (1, MINE), (2, MINE)):
            use(cache, tokens(stream, 9), salt)
        assert cache.prefixes.quota(MINE) == (3 * WIDTH, 3 * WIDTH)
        assert (cache.prefixes.stats().written_blocks, cache.prefixes.stats().unwritten_blocks) == (6, 0)
    with checked(store_of(quotas), device=40, host=host) as cache:
        use(cache, tokens(3, 33))
        assert cache.prefixes.stats().unwritten_blocks == 5, "eight blocks are too many for a quota of three"
        assert not cache.prefixes.store.stats().errors
        assert cache.prefixes.quota(MINE) == (3 * WIDTH, 3 * WIDTH)
    with checked(store_of(quotas), device=40, host=host) as cache:
        found = [cache.fetch(tokens(stream, 33), MINE).tokens for stream in (1, 2, 3)]
        assert found == [0, 0, 12], "the end of a prompt goes before its beginning"
        cache.prefixes.set_quota(MINE, 2 * WIDTH)
        assert cache.prefixes.quota(MINE) == (2 * WIDTH, 2 * WIDTH)
        assert cache.fetch(tokens(9, 9), OTHER).tokens == 8


def test_a_quota_of_0_refuses_every_block_and_none_takes_them_again():
    quotas = Quotas({})
    with checked(store_of(quotas), device=40, host=0) as cache:
        cache.prefixes.set_quota(MINE, 0)
        use(cache, tokens(4, 9))
        assert (cache.prefixes.stats().written_blocks, stored(quotas)) == (0, 0)
        assert cache.prefixes.quota(MINE) == (0, 0)
        cache.prefixes.set_quota(MINE, None)
        assert cache.prefixes.quota(MINE) is None
        use(cache, tokens(9, 159), OTHER)
        assert use(cache, tokens(4, 9)) == 0
        assert cache.fetch(tokens(4, 9), MINE).done
        assert len(quotas.held(tenant_of(MINE))) == 2, "a block that was refused is written again"


def test_a_conversation_never_exceeds_its_quota_and_the_store_reports_its_blocks(chance: random.Random):
    quotas = Quotas({})
    with checked(store_of(quotas), device=16, host=0) as cache:
        cache.prefixes.set_quota(MINE, 3 * WIDTH)
        cache.prefixes.set_quota(None, 0)
        for _ in range(20):
            first = unlike(chance, 13)
            second = first[:12] + unlike(chance, 9)
            for prompt, salt in ((first, MINE), (second, MINE), (unlike(chance, 60), None), (second, MINE)):
                use(cache, prompt, salt)
                assert cache.prefixes.quota(MINE) == (stored(quotas) * WIDTH, 3 * WIDTH)
                assert stored(quotas) <= 3
        assert stored(quotas) == 3


def test_a_prompt_longer_than_its_quota_is_stored_again_once_the_store_has_lost_it(chance: random.Random):
    quotas, prompt = Quotas({}), tokens(1, 21)
    with checked(store_of(quotas), device=16, host=0) as cache:
        cache.prefixes.set_quota(MINE, 3 * WIDTH)
        cache.prefixes.set_quota(None, 0)
        use(cache, prompt)
        assert stored(quotas) == 3
        use(cache, unlike(chance, 60), None)
        for name in [name for name, row in quotas.blocks.items() if row.nbytes > 192]:
            del quotas.blocks[name]
        assert cache.prefixes.quota(MINE) == (0, 3 * WIDTH)
        assert use(cache, prompt) == 0
        assert cache.prefixes.quota(MINE) == (3 * WIDTH, 3 * WIDTH)
        use(cache, unlike(chance, 60), None)
        assert use(cache, prompt) == 3


def test_the_beginning_of_a_prompt_longer_than_its_quota_is_hit_at_every_use(chance: random.Random):
    quotas, prompt = Quotas({}), tokens(1, 73)
    with checked(store_of(quotas), device=40, host=0) as cache:
        cache.prefixes.set_quota(MINE, 9 * WIDTH)
        cache.prefixes.set_quota(None, 0)
        hits = []
        for _ in range(6):
            hits.append(use(cache, prompt))
            use(cache, unlike(chance, 159), None)
        assert hits == [0, 9, 9, 9, 9, 9]
        assert cache.prefixes.stats().written_blocks == 9


def test_a_put_that_lands_after_its_deadline_counts(chance: random.Random):
    quotas = Quotas({})
    with checked(store_of(quotas), device=16, host=0) as cache:
        cache.prefixes.set_quota(MINE, 3 * WIDTH)
        use(cache, tokens(1, 5))
        store = cache.prefixes.store
        assert isinstance(store, QuotaStore)
        late: list[float] = []

        def sleep(name: str) -> None:
            if name == "put":
                late.append(time.monotonic())
                time.sleep(0.1)

        store.timeout_base, store.before = 0.01, sleep
        until = time.monotonic() + 60
        while len(late) < 3:  # after one the store is left alone for a moment
            use(cache, unlike(chance, 13))
            while store.stats().pending_bytes:
                assert time.monotonic() < until
                time.sleep(0.01)
            assert cache.prefixes.quota(MINE) == (stored(quotas) * WIDTH, 3 * WIDTH)
            assert stored(quotas) <= 3
        assert cache.prefixes.stats().written_blocks == 1
        assert stored(quotas) == 3, "late blocks have landed"


@pytest.mark.parametrize("writes", ["through", "second_use", "back"])
def test_two_caches_share_one_quota(chance: random.Random, writes: str):
    quotas = Quotas({})
    with (
        checked(store_of(quotas), prefix_writes=writes) as one,
        checked(store_of(quotas), host=0, prefix_writes=writes) as other,
    ):
        one.prefixes.set_quota(MINE, 5 * WIDTH)
        for _ in range(5):
            for cache in (one, other):
                prompt = unlike(chance, 9)
                use(cache, prompt)
                use(cache, prompt)
                assert stored(quotas) * WIDTH == cache.prefixes.quota(MINE)[0] <= 5 * WIDTH
        assert stored(quotas)
        other.prefixes.set_quota(MINE, f"{WIDTH}B")
        assert one.prefixes.quota(MINE) == (WIDTH, WIDTH)


@pytest.mark.parametrize("url", ["memory://a?size=1MiB", "plug-in"])
def test_a_store_without_quotas_refuses_them(url: str):
    with checked(KeyedStore(bytes_per_block=WIDTH) if url == "plug-in" else url) as cache:
        for num_bytes, why in (
            (-1, r"must be 0 to 2\*\*62 bytes"),
            (40, f'40 bytes hold no block of {WIDTH} bytes; did you mean "40GiB"'),
            ("40", "did you mean"),
            ("40 G", "'40 G' is not a size"),
        ):
            with pytest.raises(InvalidArgumentError, match=f"^num_bytes(:| is {num_bytes}).*{why}"):
                cache.prefixes.set_quota(MINE, num_bytes)
        for num_bytes in (0, WIDTH, "1MiB", None):
            with pytest.raises(StoreError, match="this store cannot keep quotas"):
                cache.prefixes.set_quota(MINE, num_bytes)
        with pytest.raises(StoreError, match="this store cannot keep quotas"):
            cache.prefixes.quota(MINE)
        use(cache, tokens(1, 9))
        assert cache.prefixes.stats().written_blocks == 2
