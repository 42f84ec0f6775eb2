"""SGLang's HiCache backend over the pools of hybrid models and many ranks; over stand-ins or SGLang itself."""

import dataclasses
import importlib
import math
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_drivers
import pytest
import torch
from engine_drivers import HostPool, SGLang, indices

from blockyard.errors import InvalidArgumentError
from blockyard.stores.adapters import objects

KEYS = [f"{n:064x}" for n in range(6)]


@pytest.fixture
def storage() -> Iterator[Any]:
    with engine_drivers.sglang():
        yield importlib.import_module("sglang.srt.mem_cache.hicache_storage")


def hybrid(path: Path) -> tuple[Any, HostPool]:
    """A backend with a second pool, whose pages are five times as long and lie elsewhere."""
    states = HostPool(width=500)
    engine = SGLang({"root_dir": str(path), "size": "1MiB"}, pools={"mamba": states})
    engine.pool.data[:] = torch.randn(engine.pool.data.shape).half()
    states.data[:] = torch.randn(states.data.shape).half()
    return engine, states


def transfer(storage: Any, pages: list[int], keys: list[str], policy: str = "all_pages", name: str = "mamba") -> Any:
    return storage.PoolTransfer(
        name=storage.PoolName(name),
        keys=keys,
        host_indices=indices(pages),
        hit_policy=storage.PoolHitPolicy(policy),
    )


def test_pages_of_two_pools_travel_by_one_key_and_come_back_whole(storage: Any, tmp_path: Path):
    engine, states = hybrid(tmp_path)
    backend = engine.backend
    before = engine.pool.data.clone(), states.data.clone()
    pools = [transfer(storage, [3, 1], KEYS[:2]), transfer(storage, [0, 2], KEYS[:2], name="kv")]
    assert backend.batch_set_v2(pools) == {"mamba": [True, True], "kv": [True, True]}
    engine.pool.data.zero_()
    states.data.zero_()
    wanted = [transfer(storage, [5, 4, 6], KEYS[:3]), transfer(storage, [1, 0], KEYS[:2], name="kv")]
    assert backend.batch_get_v2(wanted) == {"mamba": [True, True, False], "kv": [True, True]}
    assert torch.equal(states.data[[5, 4]], before[1][[3, 1]])
    assert torch.equal(engine.pool.data[[1, 0]], before[0][[0, 2]])
    assert not states.data[[0, 1, 2, 3, 6]].any()
    engine.close()


@pytest.mark.parametrize(("place", "pages"), [("root_dir", 31), ("file", 31), ("memory", 33)])
def test_a_small_pages_pool_takes_about_its_own_bytes(storage: Any, tmp_path: Path, place: str, pages: int):
    """Pages of 256 KiB with an index of 8,640 bytes each, as of sparse attention: 280 KiB in files, 265 elsewhere."""
    index = HostPool(pages=40, width=4320)
    options: dict[str, str] = {
        "root_dir": {"root_dir": str(tmp_path), "size": "9MiB"},
        "file": {"url": f"file://{tmp_path}/store?size=9MiB"},
        "memory": {"url": "memory://small?size=9MiB"},
    }[place]
    engine = SGLang(options, main_width=128 << 10, pools={"indexer": index})
    engine.pool.data[:] = torch.randn(engine.pool.data.shape).half()
    index.data[:] = torch.randn(index.data.shape).half()
    keys = [f"{n:064x}" for n in range(pages)]
    for first in range(0, pages, 8):
        places = range(first, min(first + 8, pages))
        both = [
            transfer(storage, [place % 16 for place in places], keys[first : first + 8], name="kv"),
            transfer(storage, list(places), keys[first : first + 8], name="indexer"),
        ]
        engine.backend.batch_set_v2(both)
    wanted = transfer(storage, list(range(pages)), keys, name="indexer")
    assert engine.backend.batch_exists_v2(keys, [wanted]).kv_hit_pages == pages  # 24 with blocks of one length
    before = index.data.clone()
    index.data.zero_()
    assert engine.backend.batch_get_v2([wanted]) == {"indexer": [True] * pages}
    assert torch.equal(index.data[:pages], before[:pages])
    engine.backend.clear()
    assert engine.backend.batch_exists_v2(keys, [wanted]).kv_hit_pages == 0
    engine.close()


@pytest.mark.parametrize(
    ("main", "other", "before", "now"),
    [
        (1310720, 7602176, 1.145, 1.003),  # Gemma 3 4B: 5 layers, and 29 with windows
        (1474560, 12779520, 1.073, 1.005),  # MiMo-V2-Flash: 9 and 39
        (786432, 81920, 1.032, 1.014),  # LFM2 1.2B: 6 and 10 short convolutions
        (1572864, 77266944, 1.001, 1.001),  # Qwen3-Next 80B: 12 and 36 recurrent
        (1048576, 102137856, 1.353, 1.008),  # Nemotron-H 8B: 4 and 24
        (516096, 43417600, 1.721, 1.015),  # Kimi-Linear: 7 and 20
    ],
)
def test_a_turns_pages_take_about_their_own_bytes(storage: Any, main: int, other: int, before: float, now: float):
    """Files of 62 pages of 64 tokens, and one window or state, beside files with blocks for each kind alone."""
    pages = importlib.import_module("blockyard.integrations.sglang.pages")
    url = "file:///none"
    own = 62 * objects.bytes_taken(url, [main]) + objects.bytes_taken(url, [other])
    for sizes, ratio in (([main, other], before), (pages.sizes_of_store({"kv": main, "mamba": other}), now)):
        part = objects._part_bytes(sizes, mmap.PAGESIZE)
        blocks = 62 * math.ceil(main / part) + math.ceil(other / part)
        taken = blocks * (objects._width(part, mmap.PAGESIZE) + mmap.PAGESIZE)
        assert taken / own == pytest.approx(ratio, abs=0.0006)


def test_a_prefix_is_restorable_where_all_pools_have_what_their_policy_wants(storage: Any, tmp_path: Path):
    engine, _ = hybrid(tmp_path)
    backend = engine.backend
    assert all(backend.batch_set_v1(KEYS[:5], indices(range(5))))
    backend.batch_set_v2([transfer(storage, [0, 1, 2], [KEYS[0], KEYS[1], KEYS[3]])])

    def restorable(policy: str, window: int = 1) -> tuple[int, Any, Any]:
        found = backend.batch_exists_v2(KEYS, [transfer(storage, [0] * window, KEYS[:window], policy)])
        return found.kv_hit_pages, found.restorable_prefix_pages, found.extra_pool_hit_pages.get("mamba")

    assert restorable("all_pages") == (2, [1, 2], 2)
    assert restorable("trailing_pages") == (4, [1, 2, 4], 4)
    assert restorable("trailing_pages", 2) == (2, [1, 2], 2)
    # Never a condition, and nothing is said of it.
    assert restorable("block_groups") == (5, [1, 2, 3, 4, 5], None)
    absent = transfer(storage, [0], KEYS[:1], name="swa")
    assert backend.batch_exists_v2(KEYS, [absent]).kv_hit_pages == 0
    assert backend.batch_exists_v2(["none"], []).kv_hit_pages == 0
    engine.close()


def test_indices_that_do_not_fit_the_keys_and_unknown_pools_are_misses(storage: Any, tmp_path: Path):
    engine, states = hybrid(tmp_path)
    before = states.data.clone()
    for bad in (transfer(storage, [0], KEYS[:2]), transfer(storage, [0, 1], KEYS[:2], name="swa")):
        for call in (engine.backend.batch_set_v2, engine.backend.batch_get_v2):
            assert call([bad]) == {bad.name: [False, False]}
    assert torch.equal(states.data, before)
    assert engine.backend.batch_get_v1(KEYS[:2], indices([0])) == [False, False]
    engine.close()


def backend_of(engine: SGLang, **change: Any) -> Any:
    made = type(engine.backend)(dataclasses.replace(engine.config, **change), {})
    made.register_mem_pool_host(engine.pool)
    made.on_host_pools_registered()
    return made


def test_ranks_share_pages_only_where_they_are_the_same(storage: Any):
    from blockyard.stores import register

    register("faulty")(engine_drivers.FaultyStore)
    engine_drivers.FaultyStore.media.clear()
    engine_drivers.FaultyStore.fault = ""
    engine = SGLang({"url": "faulty://ranks"})
    assert engine.store(KEYS[:2], engine.pool.rows()[:2].copy())
    again = backend_of(engine)
    # A store that must ask a server knows in the background.
    while again.batch_exists(KEYS) < 2:
        pass
    again.close()
    for change in (
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"model_name": "other"},
        {"attn_cp_size": 2},
    ):
        other = backend_of(engine, **change)
        assert other.batch_exists(KEYS) == 0
        other.close()
    # One rank writes what all have: multi-head latent attention.
    one = backend_of(engine, is_mla_model=True, tp_size=2)
    two = backend_of(engine, is_mla_model=True, tp_size=2, tp_rank=1)
    assert all(one.batch_set_v1(KEYS[:2], indices([0, 1])))
    while two.batch_exists(KEYS) < 2:
        pass
    for made in (one, two, engine):
        made.close()


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"sise": 3}, {}, "extra_config has 'sise' .did you mean 'size'"),
        ({"root_dir": "/nowhere"}, {"is_mla_model": True, "tp_size": 2}, "url must name a store"),
    ],
)
def test_options_that_cannot_work_are_refused(
    storage: Any, tmp_path: Path, options: dict[str, Any], change: dict[str, Any], message: str
):
    engine = SGLang({"root_dir": str(tmp_path), "size": "1MiB"})
    config = {**engine.config.extra_config, **options}
    with pytest.raises(InvalidArgumentError, match=message):
        backend_of(engine, extra_config=config, **change)
    engine.close()


def test_a_float8_cache_must_be_named(storage: Any, tmp_path: Path):
    engine = SGLang({"root_dir": str(tmp_path), "size": "1MiB"})
    engine.close()
    engine.pool = HostPool(dtype=torch.uint8)
    with pytest.raises(InvalidArgumentError, match="kv_dtype"):
        backend_of(engine)
    backend_of(engine, extra_config={**engine.config.extra_config, "kv_dtype": "fp8_e4m3"}).close()


def test_clear_forgets_all_pages(storage: Any, tmp_path: Path):
    engine, _ = hybrid(tmp_path)
    assert all(engine.backend.batch_set_v1(KEYS, indices(range(6))))
    assert engine.leading(KEYS) == 6
    assert engine.backend.clear() is True
    assert engine.leading(KEYS) == 0
    engine.close()


def test_a_missing_interface_is_an_import_error(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("blockyard.integrations.sglang")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", None)
    with pytest.raises(ImportError, match=r"blockyard.integrations.sglang needs SGLang 0.5.23"):
        importlib.import_module("blockyard.integrations.sglang")
