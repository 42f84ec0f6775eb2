"""An option that has no effect is refused, or said once with its remedy; and an object that loses something, too."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import BlockManager, KVCache, KVLayout, PrefixCaching, Request, Scheduler, open_store
from blockyard.errors import StoreError
from blockyard.scheduler import PreemptionCosts

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=2, dtype="float32")
BLOCK = 4096  # a page, so that the file store's slots are twice that
COSTS = PreemptionCosts(swap_block=1.0, prefill_token=1.0)
KEYS = [bytes([number]) * 32 for number in range(10)]


def own_scheduler(
    folder: Path, *, prompts: int = 40, mark: bool = True, prefetch: bool = True, same: bool = False, **options: Any
) -> None:
    """Serve prompts of eight blocks, one after the other."""
    with KVCache(LAYOUT, **{"device_blocks": 32, "prefix_caching": True} | options) as cache:
        for number in range(prompts):
            prompt = list(range(33)) if same else [number * 100 + token for token in range(33)]
            if prefetch and cache.prefix_store is not None:
                fetch = cache.prefix_store.prefetch(prompt)
                while not fetch.done:
                    cache.poll()
            sequence = cache.manager.allocate(prompt)
            with cache.step():
                pass
            if mark:
                cache.manager.mark_computed(sequence)
            cache.manager.free(sequence)


def served(folder: Path) -> None:
    """Serve the same with a `Scheduler`, which prefetches and marks."""
    with KVCache(LAYOUT, device_blocks=32, host_blocks=50, prefix_caching=True, **kept(folder)) as cache:
        serving = Scheduler(cache)
        for number in range(40):
            serving.add(Request(str(number), [number * 100 + token for token in range(33)], 2))
        while serving.num_unfinished:
            with serving.step() as step:
                sampled = [7] * step.num_draws
            serving.update(step, sampled)


def kept(folder: Path) -> dict[str, Any]:
    return {"prefix_store": f"file://{folder}/kept?size=1MiB", "namespace": b"n", "prefetch_timeout_base": 60}


def scheduler(mode: Any, **options: Any) -> Scheduler:
    return Scheduler(BlockManager(block_size=4, device_blocks=8, **options), preemption_mode=mode)


NO_TIER = "there is no tier to swap to, so victims are recomputed: give the cache host_blocks or a swap_store"
LEAVE_OUT = "give 'auto' or 'swap', or leave them out"
SECOND_LEVEL = "PrefixCaching(host=True) keeps blocks there"
SAID: list[tuple[str, Callable[[Path], object], str]] = [
    ("swap without a tier", lambda _: scheduler("swap"), f"preemption_mode is 'swap', but {NO_TIER}"),
    ("costs without a tier", lambda _: scheduler(COSTS), f"preemption_mode is {COSTS!r}, but {NO_TIER}"),
    (
        "recompute with a swap store",
        lambda _: scheduler("recompute", external_blocks=4),
        f"preemption_mode is 'recompute', but the 4 external blocks serve swaps only: {LEAVE_OUT}",
    ),
    (
        "recompute with host memory",
        lambda _: scheduler("recompute", host_blocks=5),
        f"preemption_mode is 'recompute', but the 5 host blocks serve swaps only: {LEAVE_OUT}",
    ),
    (
        "host memory that is no second level",
        lambda folder: own_scheduler(folder, host_blocks=50),
        f"225 cached blocks were evicted, 50 host blocks are unused: {SECOND_LEVEL}",
    ),
    (
        "a prefix store that is never read",
        lambda folder: own_scheduler(folder, prefetch=False, **kept(folder)),
        "the prefix store was read for none of 32 prompts: call its prefetch first",
    ),
    (
        "blocks that are never marked",
        lambda folder: own_scheduler(folder, mark=False, same=True),
        "no block of 40 prompts can be found again: call manager.mark_computed",
    ),
]
SILENT: list[tuple[str, Callable[[Path], object]]] = [
    ("swap to the host", lambda _: scheduler("swap", host_blocks=4)),
    ("swap to a store", lambda _: scheduler(COSTS, external_blocks=4)),
    ("recompute", lambda _: scheduler("recompute")),
    ("auto", lambda _: scheduler("auto", host_blocks=4, external_blocks=4)),
    ("recompute with host copies", lambda _: scheduler("recompute", host_blocks=4, prefix_caching=True)),
    ("a prefix cache", own_scheduler),
    ("a second level", lambda folder: own_scheduler(folder, host_blocks=50, prefix_caching=PrefixCaching(host=True))),
    ("a prefix store", lambda folder: own_scheduler(folder, host_blocks=50, **kept(folder))),
    ("few prompts", lambda folder: own_scheduler(folder, prompts=3, mark=False, prefetch=False, **kept(folder))),
    ("a scheduler", served),
]


@pytest.mark.parametrize(("run", "line"), [row[1:] for row in SAID], ids=[row[0] for row in SAID])
def test_an_option_without_effect_is_said_once(
    run: Callable[[Path], object], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run(tmp_path)
    assert caplog.messages == [line]


@pytest.mark.parametrize("run", [row[1] for row in SILENT], ids=[row[0] for row in SILENT])
def test_options_that_work_log_nothing(run: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run(tmp_path)
    assert caplog.messages == []


def open_kept(folder: Path, size: int = 16 * 2 * BLOCK, block: int = BLOCK, more: str = "") -> Any:
    return open_store(f"file://{folder}/kept?size={size + BLOCK}{more}", bytes_per_block=block, use="prefix")


def fill(folder: Path) -> None:
    with open_kept(folder) as store:
        assert store.wait(store.submit_put(KEYS, np.ones((len(KEYS), BLOCK), np.uint8))).ok.all()


def count(folder: Path, **options: Any) -> int:
    with open_kept(folder, **options) as store:
        return int(store.wait(store.submit_get(KEYS)).ok.sum())


@pytest.mark.parametrize(
    ("options", "dropped"),
    [({"block": 2 * BLOCK}, 10), ({"block": 100}, 10), ({"size": 7 * 2 * BLOCK}, 3)],
    ids=["larger blocks", "smaller blocks", "a smaller size"],
)
def test_a_file_store_drops_no_block_unless_its_url_says_so(tmp_path: Path, options: dict[str, int], dropped: int):
    fill(tmp_path)
    with pytest.raises(
        StoreError, match=f"would drop {dropped} blocks; name another directory, or drop them with drop"
    ):
        open_kept(tmp_path, **options)
    assert count(tmp_path) == 10, "the refused store changed nothing"
    with open_kept(tmp_path, **options, more="&drop=on"):
        pass
    assert count(tmp_path, more="&drop=on") == 10 - dropped


def test_a_file_store_that_loses_nothing_opens_with_any_size(tmp_path: Path):
    fill(tmp_path)
    assert count(tmp_path, size=40 * 2 * BLOCK) == 10
    assert count(tmp_path, size=10 * 2 * BLOCK) == 10, "all blocks lie in its first ten slots"
    with open_kept(tmp_path, size=10 * 2 * BLOCK) as store:
        store.forget()
    with open_kept(tmp_path, block=3 * BLOCK):
        pass


def test_a_directory_of_several_that_would_drop_blocks_is_refused(tmp_path: Path):
    url = f"file://{tmp_path}/a,{tmp_path}/b?size=1MiB"
    with open_store(url, bytes_per_block=BLOCK, use="prefix") as store:
        assert store.wait(store.submit_put(KEYS[:1], np.ones((1, BLOCK), np.uint8))).ok.all()
    with pytest.raises(StoreError, match="would drop 1 blocks"):
        open_store(url, bytes_per_block=2 * BLOCK, use="prefix")
    assert len(list(tmp_path.rglob("*.slab"))) == 2


def test_a_cache_that_is_collected_without_close_names_the_blocks_that_it_loses(tmp_path: Path):
    cache: Any = KVCache(LAYOUT, device_blocks=8, prefix_caching=True, **kept(tmp_path))
    sequence = cache.manager.allocate(list(range(9)))
    with cache.step():
        pass
    cache.manager.mark_computed(sequence)
    with pytest.warns(ResourceWarning, match="unclosed KVCache.* 2 blocks are not written, call its close") as caught:
        cache = None
    assert len(caught) == 1


def test_swap_space_on_a_server_that_is_collected_without_close_names_the_slots_that_it_leaves():
    store = open_store("memory://unclosed?size=1MiB", bytes_per_block=64)
    store.wait(store.submit_write(np.arange(3), np.ones((3, 64), np.uint8)))
    with pytest.warns(
        ResourceWarning, match="unclosed ObjectStore.* 3 slots are not deleted, call its close"
    ) as caught:
        store.__del__()
    assert len(caught) == 1
    store.close()


def test_what_is_closed_or_loses_nothing_warns_of_nothing(tmp_path: Path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for options in (kept(tmp_path), {"swap_store": f"file://{tmp_path}/swap?size=1MiB"}):
            with KVCache(LAYOUT, device_blocks=8, prefix_caching=True, **options):
                pass
        KVCache(LAYOUT, device_blocks=8, host_blocks=8, prefix_caching=True)
        KVCache(LAYOUT, device_blocks=8, swap_store=f"file://{tmp_path}/swap?size=1MiB")
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
