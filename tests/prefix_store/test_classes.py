"""Prefix stores of models whose groups have blocks of their own bytes: a block is stored as equal slices."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from memory_stores import KeyedStore, Quotas, QuotaStore
from model_configs import TABLE
from paged_cache import FULL, MODELS, PROMPT, STATE, layout_of, new_cache, serve

from blockyard import CacheGroup, KVCache
from blockyard.errors import InvalidArgumentError
from blockyard.layout import ArenaLayout
from blockyard.layout.arena import _stored
from blockyard.layout.model import ModelMemory
from blockyard.stores import open_store


@pytest.mark.parametrize("url", ["file://{}?size=4MiB", "local://{}?size=4MiB", "memory://bucket{}?size=4MiB"])
@pytest.mark.parametrize("model", MODELS)
def test_another_process_continues_a_prompt_with_the_bytes_of_all_groups(model: str, url: str, tmp_path: Path) -> None:
    store = url.format(tmp_path)
    with new_cache(store, model) as cache:
        cached, _, computed = serve(cache, PROMPT)
        assert cached == 0
        stats, kept = cache.prefix_store.stats(), cache.prefix_store.store
        assert kept.bytes_per_block == cache.layout.bytes_per_value
        assert kept.stats().written_bytes < 1.2 * stats.written_bytes + 64 * kept.stats().written_blocks
    with new_cache(store, model) as cache:
        cached, began, _ = serve(cache, PROMPT)
        assert cached == 56
        assert {group for group, _ in began} == set(range(len(MODELS[model])))
        assert all(row == computed[place] for place, row in began.items())
        stats = cache.prefix_store.stats()
        assert stats.hit_blocks == len(began) == cache.manager.stats().loaded_blocks
        assert stats.hit_bytes == sum(map(len, began.values()))


@pytest.mark.parametrize("name", TABLE)
def test_slices_waste_little_of_what_a_real_models_blocks_take(name: str) -> None:
    size = 128 if "V4" in name else 16
    layout = ArenaLayout.from_config(ModelMemory.from_config(TABLE[name][0]), block_size=size)
    sizes = sorted({page.bytes_per_block for page in layout.pages})
    cut = layout.bytes_per_value
    waste = max(-(-size // cut) * cut / size for size in sizes)
    assert waste < 1.12, f"{sizes} in slices of {cut}"
    assert _stored(sizes, cut) < 1.2 * len(sizes)
    assert cut <= sizes[0] + 4096
    assert max(sizes) // cut < 4000


def medium_store(layout: ArenaLayout, medium: Quotas) -> QuotaStore:
    store = QuotaStore(medium, bytes_per_block=layout.bytes_per_value)
    store.num_slots = 4096
    return store


def test_a_block_of_which_a_slice_is_gone_is_a_miss_and_is_stored_again() -> None:
    medium, layout = Quotas({}), layout_of(MODELS["state"])
    slices = -(-1200 // layout.bytes_per_value)
    assert slices > 4
    with new_cache(medium_store(layout, medium)) as cache:
        serve(cache, PROMPT)
    stored = dict(medium.blocks)
    with new_cache(medium_store(layout, medium)) as cache:
        assert cache.prefix_store is not None
        jobs = cache.manager.prefix.store_jobs
        keys, classes, loading = jobs.missing(PROMPT, 1000, point=14)
        assert (len(keys), classes.tolist(), len(loading)) == (15, [0] * 14 + [1], 0)
    hits = []
    for name in (name for name, row in stored.items() if row.nbytes > 192):
        medium.blocks.clear()
        medium.blocks.update({other: row for other, row in stored.items() if other != name})
        with new_cache(medium_store(layout, medium)) as cache:
            hits.append(serve(cache, PROMPT)[0])
        with new_cache(medium_store(layout, medium)) as cache:
            assert serve(cache, PROMPT)[0] == 56, "the block was not stored again"
    assert sum(hit < 56 for hit in hits) == 14 + slices, f"each slice of the 15 blocks counts: {hits}"


def test_an_earlier_point_is_loaded_if_a_slice_of_the_deepest_is_gone() -> None:
    medium, layout = Quotas({}), layout_of(MODELS["state"])
    with new_cache(medium_store(layout, medium)) as cache:
        serve(cache, PROMPT[:30])
        before = set(medium.blocks)
        serve(cache, PROMPT)
    states = [name for name in medium.blocks if name not in before and medium.blocks[name].nbytes > 192][-4:]
    stored = dict(medium.blocks)
    for name in states:
        medium.blocks.clear()
        medium.blocks.update({other: row for other, row in stored.items() if other != name})
        with new_cache(medium_store(layout, medium)) as cache:
            assert serve(cache, PROMPT)[0] == 28


@pytest.mark.parametrize("model", ["window", "state", "window first"])
def test_nothing_but_the_last_slices_of_tails_ends_a_chain(model: str) -> None:
    medium, layout = Quotas({}), layout_of(MODELS[model])
    with new_cache(medium_store(layout, medium), model) as cache:
        serve(cache, PROMPT)
        tails = cache.prefix_store.stats().written_blocks - 14
    parents = medium.held(bytes(32))
    assert len(parents.keys() - set(parents.values())) == tails > 0
    roots = [name for name, parent in parents.items() if not any(parent)]
    assert len(roots) == 1, "each slice but the prompt's first names the one before it"


@pytest.mark.parametrize("writes", ["through", "back", "second_use", "never"])
def test_each_write_mode_writes_what_it_says(writes: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}?size=4MiB"
    with new_cache(url, prefix_writes=writes) as cache:
        serve(cache, PROMPT)
        written = cache.prefix_store.stats().written_blocks
        assert (written > 0) == (writes == "through")
        if writes == "second_use":
            serve(cache, PROMPT)
            assert cache.prefix_store.stats().written_blocks > 0
    with new_cache(url) as cache:
        assert (serve(cache, PROMPT)[0] == 56) == (writes != "never")


def test_writing_back_starts_when_unwritten_blocks_outweigh_the_free_ones(tmp_path: Path) -> None:
    with new_cache(
        f"file://{tmp_path}?size=4MiB", prefix_writes="back", device_bytes=30_000, host_bytes=12_000
    ) as cache:
        for number in range(1, 12):
            serve(cache, [1000 * number + token for token in PROMPT])
            if cache.prefix_store.stats().written_blocks:
                break
        assert 1 < number < 11


def test_a_quota_and_forget_count_bytes_of_all_classes(tmp_path: Path) -> None:
    url, value = f"file://{tmp_path}?size=4MiB", layout_of(MODELS["state"]).bytes_per_value
    with new_cache(url) as cache:
        prefixes = cache.prefix_store
        prefixes.set_quota(b"a", 20 * value)
        for number in range(1, 5):
            serve(cache, [1000 * number + token for token in PROMPT], b"a")
        held, quota = prefixes.quota(b"a")
        assert (0 < held <= quota, quota) == (True, 20 * value)
        serve(cache, PROMPT)
        assert prefixes.forget("second")
        assert not cache.manager.prefix.lookup(PROMPT)
        assert serve(cache, PROMPT)[0] == 0


def test_a_store_that_is_given_open_must_have_the_size_of_the_values(tmp_path: Path) -> None:
    layout = layout_of(MODELS["state"])
    options = {"use": "prefix", "num_slots": 512}
    with (
        open_store(f"file://{tmp_path}", bytes_per_block=1200, **options) as store,
        pytest.raises(InvalidArgumentError, match=rf"has blocks of 1200 bytes, must have {layout.bytes_per_value}"),
    ):
        new_cache(store)
    store = open_store(f"file://{tmp_path}/own", bytes_per_block=layout.bytes_per_value, **options)
    with new_cache(store) as cache:
        serve(cache, PROMPT)
        assert cache.prefix_store.stats().written_blocks


def refused(groups: list[CacheGroup], **options: object) -> Callable[[], KVCache]:
    given = {"device_bytes": 100_000, "host_bytes": 100_000, "prefix_caching": True, "namespace": b"m"}
    return lambda: KVCache(layout_of(groups), prefix_store="memory://x?size=1MiB", **(given | options))


def test_what_does_not_work_with_a_prefix_store_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="host blocks of the prefix cache is 0, must be at least 1"):
        refused([FULL, STATE], host_bytes=None)()
    with pytest.raises(InvalidArgumentError, match=r"max_staging is 400, .* must be at least \d+, those of a block"):
        refused([FULL, STATE], max_staging=400)()


class OneAtATime(KeyedStore):
    """It takes as many values at once as a state has slices."""

    num_slots = 512

    @property
    def max_blocks_in_flight(self) -> int:
        """Twice the slices of a state."""
        return 2 * -(-1200 // self.bytes_per_block)


def test_a_store_with_room_for_the_slices_of_one_block_is_enough() -> None:
    medium: dict[bytes, np.ndarray] = {}
    value = layout_of(MODELS["state"]).bytes_per_value
    for cached in (0, 56):
        with new_cache(OneAtATime(medium, bytes_per_block=value)) as cache:
            assert serve(cache, PROMPT)[0] == cached
