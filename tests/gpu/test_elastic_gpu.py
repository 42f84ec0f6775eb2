"""Elastic caches on a CUDA device: its free memory rises and falls, addresses and bytes stay."""

import pytest
import torch

from blockyard.engine.elastic.cache import ElasticCache
from blockyard.errors import OutOfMemoryError
from blockyard.layout.kv import KVLayout

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout("kv_first", num_layers=4, block_size=16, num_kv_heads=8, head_size=128, dtype="float16")


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_memory_goes_back_to_the_device_and_blocks_keep_their_bytes():
    pytest.importorskip("cuda.bindings.driver", reason="CUDA's bindings are not installed")
    start = free_bytes()
    with ElasticCache(LAYOUT, num_blocks=4096, max_blocks=8192, device="cuda") as cache:
        addresses = [tensor.data_ptr() for tensor in cache.tensors]
        assert start - free_bytes() >= 4096 * LAYOUT.bytes_per_block
        views = LAYOUT.views(cache.tensors)
        for number, view in enumerate(views):
            assert not view[:4096].any()
            view[:4096] = number + 1
        before = free_bytes()
        result = cache.resize(1024)
        assert result.returned > 2900 * LAYOUT.bytes_per_block
        assert free_bytes() - before >= result.returned
        cache.resize(8192)
        for number, view in enumerate(views):
            assert view[:1024].eq(number + 1).all()
            assert not view[1024:].any()
        assert [tensor.data_ptr() for tensor in cache.tensors] == addresses
        del views
    assert start - free_bytes() < 64 << 20


def test_more_than_the_device_has_is_refused_and_changes_nothing():
    pytest.importorskip("cuda.bindings.driver", reason="CUDA's bindings are not installed")
    most = 2 * torch.cuda.mem_get_info()[1] // LAYOUT.bytes_per_block
    with ElasticCache(LAYOUT, num_blocks=64, max_blocks=most, device="cuda", chunk_bytes=64 << 20) as cache:
        before = cache.committed_bytes
        with pytest.raises(OutOfMemoryError):
            cache.resize(most)
        assert (cache.num_blocks, cache.committed_bytes) == (64, before)


def test_kernels_work_on_blocks_that_came_later():
    pytest.importorskip("cuda.bindings.driver", reason="CUDA's bindings are not installed")
    with ElasticCache(LAYOUT, num_blocks=8, max_blocks=4096, device="cuda") as cache:
        cache.resize(4096)
        plane = cache.tensors[0][0]
        plane[4000:] = 2.0
        plane[:96].copy_(plane[4000:])
        assert plane[:96].eq(2.0).all()
