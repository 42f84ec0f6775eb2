"""How many blocks device and host have room for beside a model."""

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from tiny_models import tiny_model

from blockyard import KVCache
from blockyard.engine import CacheEngine
from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.integrations.transformers import PagedModel, sizing
from blockyard.integrations.transformers.hybrid import HybridModel
from blockyard.integrations.transformers.sizing import available_blocks, available_memory
from blockyard.tools.demo.demo_model import demo_config, demo_model


@pytest.fixture(scope="module")
def model() -> Iterator[PagedModel]:
    config = demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)
    paged = PagedModel(demo_model(config), block_size=16)
    yield paged
    paged.close()


def test_caches_fill_the_space_they_are_given(model: PagedModel):
    size = model.layout.bytes_per_block
    assert available_blocks(model, kv_cache_space=10 * size + 1, swap_space=3 * size) == (10, 3)


def test_device_and_host_together_stay_within_the_memory_there_is(model: PagedModel):
    room = available_memory()
    blocks = available_blocks(model, memory_utilization=0.5, kv_cache_space=1 << 60, swap_space=1 << 60)
    assert 0 < sum(blocks) * model.layout.bytes_per_block < 0.75 * room


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_a_share_of_memory_out_of_range_is_refused(model: PagedModel, share: float):
    with pytest.raises(InvalidArgumentError, match="memory_utilization"):
        available_blocks(model, memory_utilization=share)


def test_room_for_less_than_a_block_is_refused(model: PagedModel):
    with pytest.raises(InvalidArgumentError, match="a block has 8192 bytes"):
        available_blocks(model, kv_cache_space=8191)


def test_a_largest_step_that_fails_leaves_no_cache_behind(model: PagedModel, monkeypatch: pytest.MonkeyPatch):
    engines: list[CacheEngine] = []

    def make(*args: Any, **options: Any) -> CacheEngine:
        engines.append(CacheEngine(*args, **options))
        return engines[0]

    def fail(*_args: object, **_options: object) -> NoReturn:
        raise torch.OutOfMemoryError("as the test wants it")

    monkeypatch.setattr(sizing, "CacheEngine", make)
    monkeypatch.setattr(model, "forward", fail)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    with pytest.raises(torch.OutOfMemoryError):
        sizing._free_cuda_memory(model, 0.5, 32)
    assert model._caches == []
    with pytest.raises(BlockyardError, match="the cache engine is closed"):
        engines[0].read("device", [0])


def test_the_largest_step_has_tables_of_all_cache_groups(monkeypatch: pytest.MonkeyPatch):
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 1 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
    model = HybridModel(tiny_model("LFM2"), block_size=4)
    assert len(model.groups) == 2
    cache = 8 * model.layout.bytes_per_block  # whose 32 tokens the step computes; it is not part of the model's peak
    assert sizing._free_cuda_memory(model, 0.5, 32) == (1 << 29) + cache


@pytest.mark.gpu
def test_a_cuda_device_keeps_room_for_the_largest_step():
    model = PagedModel(demo_model(device="cuda"), block_size=16)
    device, host = available_blocks(model, memory_utilization=0.5, max_num_batched_tokens=4096)
    _, total = torch.cuda.mem_get_info()
    assert 0 < device * model.layout.bytes_per_block < 0.5 * total
    assert host > 0
    with KVCache(model.layout, device="cuda", device_blocks=device) as cache:
        assert cache.engine.num_blocks("device") == device
    model.close()
