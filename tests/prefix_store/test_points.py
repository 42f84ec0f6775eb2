"""Prefix stores of models with windows, states and several groups: a point is loaded whole, or another one is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from memory_stores import KeyedStore
from numpy.typing import NDArray

from blockyard import CacheGroup, KVCache, KVLayout, Request, Scheduler
from blockyard.errors import InvalidArgumentError
from blockyard.stores import ExternalStore, open_store
from blockyard.testing.faults import FailingStore

FULL, WINDOW, STATE = CacheGroup.full_attention(), CacheGroup.sliding_window(20), CacheGroup.recurrent()
DRAFTER = CacheGroup.drafter()
SIZE = 4
MODELS = {
    "window": [WINDOW],
    "chunks": [FULL, CacheGroup.chunked_attention(16)],
    "full window": [FULL, WINDOW],
    "window full": [WINDOW, FULL],
    "state": [STATE],
    "full state": [FULL, STATE],
    "two full and all": [FULL, WINDOW, STATE, FULL],
    "full drafter": [FULL, DRAFTER],
    "drafter": [DRAFTER],
    "drafter, state, full": [DRAFTER, STATE, FULL],
    "full windowed drafter": [FULL, CacheGroup.windowed_drafter(20)],
    "window, windowed drafter": [WINDOW, CacheGroup.windowed_drafter(9)],
}
PROMPTS = [[100 * number + at for at in range(58)] for number in range(1, 5)]


def new_cache(folder: Path, groups: Sequence[CacheGroup], **options: object) -> KVCache:
    layout = KVLayout("kv_first", num_layers=1, block_size=SIZE, num_kv_heads=1, head_size=2, dtype="float32")
    given = {
        "device_blocks": 300,
        "host_blocks": 300,
        "prefix_store": f"file://{folder}?size=16MiB",
        "namespace": b"m",
        "prefix_caching": True,
    }
    return KVCache(layout, groups=groups, **(given | options))


def serve(cache: KVCache, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Compute prompts one after the other; return how many tokens of each were cached."""
    scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=16)
    cached = []
    for number, prompt in enumerate(prompts):
        before = scheduler.stats().cached_tokens
        scheduler.add(Request(f"{number}", list(prompt), max_tokens=2))
        while scheduler.num_unfinished:
            with scheduler.step() as step:
                sampled = np.full(step.num_draws, 7)
            scheduler.update(step, sampled)
        cached.append(scheduler.stats().cached_tokens - before)
    cache.manager.check()
    return cached


@pytest.mark.parametrize("model", MODELS)
def test_a_new_process_continues_each_prompt_at_its_last_boundary(model: str, tmp_path: Path) -> None:
    with_more = [[*prompt, 1, 2, 3] for prompt in PROMPTS]
    with new_cache(tmp_path, MODELS[model]) as cache:
        assert serve(cache, PROMPTS) == [0] * 4
    with new_cache(tmp_path, MODELS[model]) as cache:
        assert serve(cache, with_more) == [56] * 4
        assert cache.prefix_store is not None
        assert cache.prefix_store.stats().hit_blocks == cache.manager.stats().loaded_blocks


@pytest.mark.parametrize("model", MODELS)
def test_a_point_of_which_a_block_is_gone_is_a_miss_and_another_one_is_loaded(model: str, tmp_path: Path) -> None:
    prompt, points = PROMPTS[0], set()
    with new_cache(tmp_path, MODELS[model]) as cache:
        serve(cache, [prompt[:30], prompt])
    with new_cache(tmp_path, MODELS[model]) as cache:
        assert cache.prefix_store is not None
        jobs, has_all = cache.manager.prefix.store_jobs, cache.prefix_store.store.contains

        def needed(point: int) -> set[bytes]:
            return {key.tobytes() for key in jobs.missing(prompt, 1000, point=point)[0]}

        search = jobs.search(prompt)
        has = has_all(search.keys)
        assert search.deepest(has, 1000) == 14
        assert [search.deepest(has, most) for most in (len(needed(14)), 0)] == [14, 0]
        for lost in needed(14):
            left = np.array([key.tobytes() != lost for key in search.keys])
            point = search.deepest(has & left, 1000)
            assert point < 14
            assert lost not in needed(point) <= {key.tobytes() for key in search.keys[has & left]}
            points.add(point)
        assert points - {0}


DRAFTING = [name for name, groups in MODELS.items() if DRAFTER in groups]


@pytest.mark.parametrize("model", DRAFTING)
def test_with_a_drafter_a_block_is_in_the_store_before_its_next_token_only(model: str, tmp_path: Path) -> None:
    prompt = PROMPTS[0]
    other = [*prompt[:52], 1, *prompt[53:]]
    with new_cache(tmp_path, MODELS[model]) as cache:
        assert serve(cache, [prompt]) == [0]
    with new_cache(tmp_path, MODELS[model]) as cache:
        assert serve(cache, [other])[0] <= 48
    with new_cache(tmp_path, MODELS[model]) as cache:
        assert serve(cache, [prompt, other]) == [56, 56]


@pytest.mark.parametrize("model", DRAFTING)
def test_an_image_after_a_block_is_part_of_its_keys_with_a_drafter(model: str, tmp_path: Path) -> None:
    prompt = PROMPTS[0][:57]
    with new_cache(tmp_path, MODELS[model]) as cache:
        prefix = cache.manager.prefix
        texts = [prompt, [*prompt[:56], 1], prompt, prompt]
        extras = [(), (), [(56, 1, b"cat")], [(56, 1, b"dog")]]
        hashed = [prefix.hash(text, extras=of) for text, of in zip(texts, extras, strict=True)]
        keys = [{key.tobytes() for key in prefix.store_jobs.search(one).keys} for one in hashed]
    in_common = set.intersection(*keys)
    assert len(in_common) == 13 * len(MODELS[model])
    own = [some - in_common for some in keys]
    assert len(set.union(*own)) == sum(map(len, own)) == 4 * len(MODELS[model])


class ForgetfulStore(KeyedStore):
    """It knows of few keys at once."""

    num_slots = 1

    def evict(self) -> None:
        """Keep all blocks."""


class PlainStore(FailingStore):
    """It does not say what it lacks."""

    lacks = ExternalStore.lacks


@pytest.mark.parametrize("kind", ["forgetful", "plain"])
def test_a_store_that_does_not_know_all_absent_keys_at_once_is_searched(kind: str, tmp_path: Path) -> None:
    medium: dict[bytes, NDArray[np.uint8]] = {}
    prompt, groups = list(range(3000)), MODELS["full window"]

    def store() -> ExternalStore:
        if kind == "forgetful":
            return ForgetfulStore(medium, bytes_per_block=64)
        return PlainStore(open_store(f"file://{tmp_path}?size=8MiB", bytes_per_block=64, use="prefix"))

    for cached in (0, 2996):
        options = {"device_blocks": 2000, "host_blocks": 2000, "prefix_store": store(), "prefetch_timeout_base": 60}
        with new_cache(tmp_path, groups, **options) as cache:
            assert serve(cache, [prompt]) == [cached]


@pytest.mark.parametrize("beside", [WINDOW, DRAFTER], ids=["window", "drafter"])
def test_a_model_with_points_loads_by_way_of_the_host(beside: CacheGroup, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"host blocks of the prefix cache is 0, must be at least 1 for a prefix store"
    ):
        new_cache(tmp_path, [FULL, beside], host_blocks=0)
