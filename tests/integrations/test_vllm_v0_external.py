"""External blocks below the CPU's in the drop-in for V0: where groups go, and that their bytes come back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_stores import MemoryStore
from v0_sequences import SIZE, Group, Sequence, Status, running

from blockyard.engine import CacheEngine
from blockyard.errors import InvalidArgumentError, MappingError, StoreError
from blockyard.executor import StepExecutor
from blockyard.integrations.vllm_v0 import AllocStatus, BlockAllocator, CacheSwapper, SelfAttnBlockSpaceManager
from blockyard.layout import KVLayout
from blockyard.stores import open_store

GPU, CPU, EXTERNAL = 8, 4, 16
both = pytest.mark.parametrize("caching", [False, True])


def new_manager(**options: Any) -> SelfAttnBlockSpaceManager:
    options = {"watermark": 0.0, "num_external_blocks": EXTERNAL, **options}
    return SelfAttnBlockSpaceManager(SIZE, GPU, CPU, **options)


def free(manager: SelfAttnBlockSpaceManager) -> tuple[int, int, int]:
    return (
        manager.get_num_free_gpu_blocks(),
        manager.get_num_free_cpu_blocks(),
        manager.get_num_free_external_blocks(),
    )


def group_of(manager: SelfAttnBlockSpaceManager, seq_id: int, num_blocks: int) -> Group:
    return running(manager, Sequence(seq_id, num_blocks * SIZE, first=1000 * seq_id))


def swap_out(manager: SelfAttnBlockSpaceManager, group: Group) -> list[tuple[int, int]]:
    assert manager.can_swap_out(group)
    mapping = manager.swap_out(group)
    group.become(Status.SWAPPED)
    return mapping


def swap_in(manager: SelfAttnBlockSpaceManager, group: Group) -> list[tuple[int, int]]:
    assert manager.can_swap_in(group, 0) is AllocStatus.OK
    mapping = manager.swap_in(group)
    group.become(Status.RUNNING)
    return mapping


# ---- where groups go ----


@both
def test_a_group_goes_whole_to_the_external_blocks_once_the_cpu_has_no_room_for_it(caching: bool):
    manager = new_manager(enable_caching=caching)
    first, second = group_of(manager, 1, 3), group_of(manager, 2, 3)
    assert {target for _, target in swap_out(manager, first)} == {0, 1, 2}
    assert {target for _, target in swap_out(manager, second)} == {CPU, CPU + 1, CPU + 2}
    assert manager.get_block_table(second.seqs[0]) == [GPU + CPU, GPU + CPU + 1, GPU + CPU + 2]
    assert free(manager) == (GPU, CPU - 3, EXTERNAL - 3)
    assert sorted(manager.block_allocator.all_block_ids) == list(range(GPU + CPU + EXTERNAL))
    back = swap_in(manager, second)
    assert [source for source, _ in back] == [CPU, CPU + 1, CPU + 2]
    assert [target for _, target in back] == manager.get_block_table(second.seqs[0])
    swap_in(manager, first)
    assert free(manager) == (GPU - 6, CPU, EXTERNAL)


def test_a_group_that_fits_nowhere_stays_where_it_is():
    manager = new_manager(num_external_blocks=5)
    group = group_of(manager, 1, 6)
    before = list(manager.get_block_table(group.seqs[0]))
    assert not manager.can_swap_out(group)
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        manager.swap_out(group)
    assert (manager.get_block_table(group.seqs[0]), free(manager)) == (before, (GPU - 6, CPU, 5))


def test_without_external_blocks_all_is_as_it_was():
    manager = new_manager(num_external_blocks=0)
    assert not manager.can_swap_out(group_of(manager, 1, 5))
    assert manager.get_num_free_external_blocks() == 0


@both
def test_what_sequences_of_a_group_share_stays_shared_on_the_external_blocks(caching: bool):
    manager = new_manager(enable_caching=caching)
    group = running(manager, Sequence(1, 5 * SIZE - 1), Sequence(2, 5 * SIZE - 1))
    assert len(swap_out(manager, group)) == 5
    assert free(manager) == (GPU, CPU, EXTERNAL - 5)
    swap_in(manager, group)
    first, second = (manager.get_block_table(seq) for seq in group.seqs)
    assert first == second


@both
def test_a_sequence_freed_on_the_external_blocks_returns_them(caching: bool):
    manager = new_manager(enable_caching=caching)
    group = group_of(manager, 1, 6)
    manager.access_all_blocks_in_seq(group.seqs[0], 1.0)
    swap_out(manager, group)
    manager.free(group.seqs[0])
    assert free(manager) == (GPU, CPU, EXTERNAL)
    assert manager.reset_prefix_cache() is True


def test_a_swap_in_from_the_external_blocks_keeps_the_watermark():
    manager = new_manager(watermark=0.25)
    group = group_of(manager, 1, 6)
    swap_out(manager, group)
    assert manager.can_swap_in(group, 0) is AllocStatus.OK
    group_of(manager, 2, 1)
    assert manager.can_swap_in(group, 0) is AllocStatus.LATER


# ---- bytes ----


@pytest.fixture
def gpu_cache() -> list[torch.Tensor]:
    return [torch.zeros(2, GPU, SIZE, 2, 4) for _ in range(3)]


@pytest.fixture
def swapper(gpu_cache: list[torch.Tensor], tmp_path: Path) -> Iterator[CacheSwapper]:
    layout = KVLayout.from_tensors(gpu_cache)
    size = layout.bytes_per_block
    with (
        CacheEngine(layout, tensors=gpu_cache, host_blocks=CPU) as engine,
        open_store(f"file://{tmp_path}?size=16MiB", bytes_per_block=size, num_slots=EXTERNAL) as store,
    ):
        yield CacheSwapper(StepExecutor(engine, store))


def write(manager: SelfAttnBlockSpaceManager, group: Group, gpu_cache: list[torch.Tensor]) -> None:
    for layer, tensor in enumerate(gpu_cache):
        tensor[:, manager.get_block_table(group.seqs[0])] = float(10 * group.seqs[0].seq_id + layer)


def holds(manager: SelfAttnBlockSpaceManager, group: Group, gpu_cache: list[torch.Tensor]) -> bool:
    table, seq_id = manager.get_block_table(group.seqs[0]), group.seqs[0].seq_id
    return all(bool((tensor[:, table] == 10 * seq_id + layer).all()) for layer, tensor in enumerate(gpu_cache))


def started(manager: SelfAttnBlockSpaceManager, seq_id: int, num_blocks: int) -> Group | None:
    group = Group(Sequence(seq_id, num_blocks * SIZE, first=1000 * seq_id))
    if manager.can_allocate(group) is not AllocStatus.OK:
        return None
    manager.allocate(group)
    manager.mark_blocks_as_computed(group, 0)
    return group.become(Status.RUNNING)


@both
def test_random_groups_find_their_bytes_again_after_swaps(
    caching: bool, swapper: CacheSwapper, gpu_cache: list[torch.Tensor]
):
    manager, random, came_from = new_manager(enable_caching=caching), np.random.default_rng(7), set()
    live: list[Group] = []
    for step in range(300):
        chosen = live[random.integers(len(live))] if len(live) > random.integers(6) else None
        if chosen is None:
            if new := started(manager, step, int(random.integers(1, 6))):
                write(manager, new, gpu_cache)
                live.append(new)
        elif chosen.seqs[0].status is Status.SWAPPED:
            if manager.can_swap_in(chosen, 0) is AllocStatus.OK:
                mapping = swap_in(manager, chosen)
                came_from.add("external" if mapping[0][0] >= CPU else "host")
                swapper.swap_in(torch.tensor(mapping))
                manager.mark_blocks_as_computed(chosen, 0)
                assert holds(manager, chosen, gpu_cache)
        elif random.random() < 0.25:
            live.remove(chosen)
            manager.free(chosen.seqs[0])
        elif manager.can_swap_out(chosen):
            swapper.swap_out(swap_out(manager, chosen))
    assert came_from == {"host", "external"}
    for group in live:
        manager.free(group.seqs[0])
    assert free(manager) == (GPU, CPU, EXTERNAL)


def test_a_destination_that_repeats_gets_what_was_written_last(swapper: CacheSwapper, gpu_cache: list[torch.Tensor]):
    for block in range(3):
        gpu_cache[0][:, block] = block
    swapper.swap_out([(0, CPU), (1, CPU), (2, 0)])
    swapper.swap_in([(CPU, 5), (0, 6), (CPU, 5)])
    assert (gpu_cache[0][:, 5] == 1).all()
    assert (gpu_cache[0][:, 6] == 2).all()
    swapper.swap_in([])


def test_mappings_that_cannot_be_carried_out_are_refused(swapper: CacheSwapper, gpu_cache: list[torch.Tensor]):
    with pytest.raises(InvalidArgumentError, match=r"src_to_dst has shape \[3\], must be \[n, 2\]"):
        swapper.swap_out([1, 2, 3])  # type: ignore[list-item]
    with pytest.raises(MappingError, match="16"):
        swapper.swap_out([(0, CPU + EXTERNAL)])
    with pytest.raises(MappingError, match="8"):
        swapper.swap_out([(GPU, 0)])
    gpu_cache[0][:, 3] = 3
    swapper.swap_out([(3, CPU)])
    swapper.swap_in([(CPU, 4)])
    assert (gpu_cache[0][:, 4] == 3).all()


@pytest.mark.parametrize("name", ["put", "get"])
def test_a_block_that_the_store_loses_is_an_error_before_compute(name: str, gpu_cache: list[torch.Tensor]):
    layout = KVLayout.from_tensors(gpu_cache)
    store = MemoryStore(bytes_per_block=layout.bytes_per_block)

    def fail(call: str) -> None:
        if call == name:
            raise OSError("gone")

    with CacheEngine(layout, tensors=gpu_cache, host_blocks=CPU) as engine, store:
        swapper = CacheSwapper(StepExecutor(engine, store))
        store.before = fail
        if name == "get":
            swapper.swap_out([(0, 0), (1, CPU)])
        swap, mapping = {
            "put": (swapper.swap_out, [(0, 0), (1, CPU)]),
            "get": (swapper.swap_in, [(0, 2), (CPU, 3)]),
        }[name]
        with pytest.raises(StoreError, match="1 of 2 blocks were not swapped"):
            swap(mapping)
        store.before = lambda call: None
        swapper.swap_out([(0, 0), (1, CPU)])
        swapper.swap_in([(0, 2), (CPU, 3)])
