"""Sizing and ownership of caches and external tier."""

import pytest
import torch

from blockyard.errors import InvalidArgumentError, StoreFullError
from blockyard.integrations.transformers.worker import Worker, available_memory
from blockyard.sim.demo_model import demo_config, demo_model


@pytest.fixture(scope="module")
def model():
    return demo_model(demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2))


def test_caches_fill_the_space_they_are_given(model):
    with Worker(model, block_size=4) as worker:
        size = worker.model.layout.bytes_per_block
        blocks = worker.determine_num_available_blocks(kv_cache_space=10 * size + 1, swap_space=3 * size)
        assert blocks == (10, 3)
        engine = worker.initialize_cache(*blocks)
        assert (engine.num_blocks("device"), engine.num_blocks("host")) == blocks
        assert worker.model.layout.num_blocks(engine.tensors[0]) == 10


def test_device_and_host_together_stay_within_the_memory_there_is(model):
    with Worker(model) as worker:
        room = available_memory()
        device, host = worker.determine_num_available_blocks(
            memory_utilization=0.5, kv_cache_space=1 << 60, swap_space=1 << 60
        )
        assert 0 < (device + host) * worker.model.layout.bytes_per_block < 0.75 * room


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_a_share_of_memory_out_of_range_is_refused(model, share):
    with Worker(model) as worker, pytest.raises(InvalidArgumentError, match="memory_utilization"):
        worker.determine_num_available_blocks(memory_utilization=share)


def test_room_for_less_than_a_block_is_refused(model):
    with Worker(model) as worker, pytest.raises(InvalidArgumentError, match="one block takes 8192 bytes"):
        worker.determine_num_available_blocks(kv_cache_space=8191)


def test_the_external_tier_has_the_slots_that_fit_its_space(model, tmp_path):
    with Worker(model, external_swapper=f"file://{tmp_path}", external_swapper_space="1MiB") as worker:
        slots = worker.determine_num_external_available_blocks()
        assert 0 < slots <= (1 << 20) // worker.model.layout.bytes_per_block
        assert worker.determine_num_external_available_blocks() == slots
        assert worker.initialize_external_cache(slots).num_slots == slots
        with pytest.raises(InvalidArgumentError, match=f"{slots + 1} external blocks are wanted, the tier has {slots}"):
            worker.initialize_external_cache(slots + 1)


def test_no_tier_means_no_external_blocks(model):
    with Worker(model) as worker:
        assert worker.determine_num_external_available_blocks() == 0
        assert worker.initialize_external_cache(0) is None
        with pytest.raises(InvalidArgumentError, match="5 external blocks are wanted, the tier has 0"):
            worker.initialize_external_cache(5)
    with pytest.raises(InvalidArgumentError, match="no external_swapper is given"):
        Worker(model, external_swapper_space="1MiB")


def test_more_than_the_disk_holds_is_refused(model, tmp_path):
    with Worker(model, external_swapper=f"file://{tmp_path}?size=1000TiB") as worker, pytest.raises(StoreFullError):
        worker.determine_num_external_available_blocks()


def test_closing_twice_does_nothing_and_the_file_is_gone(model, tmp_path):
    worker = Worker(model, external_swapper=f"file://{tmp_path}/swap?size=1MiB")
    worker.initialize_cache(4, 2)
    assert worker.initialize_external_cache(2) is not None
    assert list((tmp_path / "swap").iterdir())
    worker.close()
    worker.close()
    assert not list((tmp_path / "swap").iterdir())
    assert worker.engine is None
    assert worker.store is None


def test_caches_are_allocated_once(model):
    with Worker(model) as worker:
        worker.initialize_cache(4, 0)
        with pytest.raises(InvalidArgumentError, match="4 device blocks"):
            worker.initialize_cache(4, 0)


@pytest.mark.gpu
def test_a_cuda_device_keeps_room_for_the_largest_step():
    model = demo_model(device="cuda")
    with Worker(model) as worker:
        device, host = worker.determine_num_available_blocks(memory_utilization=0.5, max_num_batched_tokens=4096)
        _, total = torch.cuda.mem_get_info()
        assert 0 < device * worker.model.layout.bytes_per_block < 0.5 * total
        assert host > 0
        assert worker.initialize_cache(device, 0).num_blocks("device") == device


def test_elastic_caches_are_the_engines_tensors_and_go_with_the_worker(model):
    with Worker(model, block_size=4) as worker:
        engine = worker.initialize_cache(6, 2, elastic=True)
        elastic = worker.elastic
        assert [tensor.data_ptr() for tensor in engine.tensors] == [t.data_ptr() for t in elastic.tensors]
        assert elastic.num_blocks == elastic.max_blocks == 6
    assert elastic.committed_bytes == 0
    assert worker.elastic is None
