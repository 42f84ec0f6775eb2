"""Host memory of `BlockyardKVConnector` in units: a key takes as many as a block of its group has bytes for."""

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blockyard.errors import BlockyardError
from blockyard.offload import OffloadManager

COUNTS = {0: 3, 1: 1, 4: 2}


def units_module(vllm: SimpleNamespace) -> Any:
    return sys.modules[f"{vllm.ours.__name__}.units"]


def key(number: int, group: int) -> bytes:
    return bytes([number]) * 32 + group.to_bytes(4, "big")


# ---- how many units ----


def caches(groups: list[list[int]], *, packed: bool, blocks: int = 8, row: int = 0) -> Any:
    """What vLLM says of groups whose layers have pages of these bytes."""
    row = row or max(map(sum, groups))
    names = [[f"{group}.{layer}" for layer in range(len(pages))] for group, pages in enumerate(groups)]
    tensors = [
        SimpleNamespace(layers=[name], **_strides(page, row, blocks, packed=packed))
        for pages, layers in zip(groups, names, strict=True)
        for page, name in zip(pages, layers, strict=True)
    ]
    specs = [SimpleNamespace(layer_names=layers) for layers in names]
    return SimpleNamespace(kv_cache_groups=specs, kv_cache_tensors=tensors, num_blocks=blocks)


def _strides(page: int, row: int, blocks: int, *, packed: bool) -> dict[str, int]:
    return {"layer_stride": page if packed else page * blocks, "block_stride": row if packed else page}


@pytest.mark.parametrize(
    ("groups", "packed", "wanted"),
    [
        ([[1024] * 12, [1024] * 12], False, None),  # gpt-oss
        ([[4096] * 10, [4096] * 9, [4096] * 8], False, (4096, [10, 9, 8])),  # Gemma-3
        ([[4096] * 12, [4096] * 8], False, (4096, [12, 8])),  # a unit is not longer than a page
        ([[4096] * 12, [4096] * 8], True, (16384, [3, 2])),  # but may hold pages that lie side by side
        ([[1002240], [823680], [786240], [870912], [656640]], True, (41760, [24, 20, 19, 21, 16])),  # DeepSeek-V4
        ([[4096] * 3], False, None),
        ([[4096] * 3, []], False, None),
    ],
)
def test_units_have_the_bytes_of_the_groups_blocks(
    vllm: SimpleNamespace, groups: list[list[int]], packed: bool, wanted: Any
):
    config = caches(groups, packed=packed)
    found = units_module(vllm).units_of(config, range(len(groups)), max(map(sum, groups)))
    if wanted is None:
        assert found is None
        return
    assert (found.unit_bytes, list(found.counts.values())) == wanted
    for pages, count in zip(groups, found.counts.values(), strict=True):
        assert sum(pages) <= count * found.unit_bytes < sum(pages) * 1.05


def test_without_strides_rows_are_whole(vllm: SimpleNamespace):
    config = caches([[64] * 3, [64] * 2], packed=False)
    for tensor in config.kv_cache_tensors:
        del tensor.block_stride
    assert units_module(vllm).units_of(config, [0, 1], 192) is None


# ---- keys of several units ----


class Model:
    """A plain model of `UnitOffload`: each key with its chunks."""

    def __init__(self, ours: Any) -> None:
        self.ours = ours
        self.stored: dict[bytes, list[int]] = {}
        self.storing: dict[bytes, list[int]] = {}
        self.loads: list[bytes] = []

    def store(self, keys: list[bytes]) -> None:
        new = [one for one in dict.fromkeys(keys) if one not in self.stored and one not in self.storing]
        made = self.ours.prepare_store(keys)
        if made is None:
            idle = sum(len(chunks) for one, chunks in self.stored.items() if one not in self.loads + keys)
            assert sum(self.count(one) for one in new) > self.num_empty + idle
            return
        assert made.keys == new
        for one in made.evicted:
            assert one not in self.loads
            del self.stored[one]
        chunks = made.chunks.tolist()
        for one in new:
            self.storing[one], chunks = chunks[: self.count(one)], chunks[self.count(one) :]
        assert not chunks

    def end_store(self, *, success: bool) -> None:
        ended, self.storing = self.storing, {}
        assert self.ours.complete_store(list(ended), success) == (list(ended) if success else [])
        self.stored |= ended if success else {}

    def load(self, keys: list[bytes]) -> None:
        found = [one for one in dict.fromkeys(keys) if one in self.stored]
        assert self.ours.prepare_load(found).tolist() == [chunk for one in found for chunk in self.stored[one]]
        self.loads += found

    def end_loads(self) -> None:
        ended, self.loads = self.loads, []
        self.ours.complete_load(ended)

    def forget(self, keys: list[bytes]) -> None:
        gone = [one for one in dict.fromkeys(keys) if one in self.stored and one not in self.loads]
        assert self.ours.forget(gone) == gone
        for one in gone:
            del self.stored[one]

    @staticmethod
    def count(one: bytes) -> int:
        return COUNTS[int.from_bytes(one[-4:], "big")]

    @property
    def num_empty(self) -> int:
        held = [*self.stored.values(), *self.storing.values()]
        return int(self.ours.num_chunks) - sum(map(len, held))

    def check(self) -> None:
        self.ours.check()
        held = [chunk for chunks in (*self.stored.values(), *self.storing.values()) for chunk in chunks]
        assert len(held) == len(set(held))
        assert self.ours.num_stored == sum(map(len, self.stored.values()))
        assert self.ours.num_storing == sum(map(len, self.storing.values()))
        keys = [key(number, group) for number in range(9) for group in COUNTS]
        kinds = ["hit" if one in self.stored else "pending" if one in self.storing else "miss" for one in keys]
        assert self.ours.lookup(keys) == kinds


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_the_units_of_a_key_come_and_go_together(vllm: SimpleNamespace, policy: str):
    chance = random.Random(3)
    model = Model(units_module(vllm).UnitOffload(OffloadManager(17, eviction=policy), COUNTS))
    evicted = 0
    for _ in range(1500):
        keys = [key(chance.randrange(9), chance.choice(list(COUNTS))) for _ in range(chance.randint(1, 4))]
        before = len(model.stored)
        match chance.randrange(6):
            case 0 | 1:
                model.store(keys)
                evicted += before - len(model.stored)
            case 2:
                model.end_store(success=chance.random() < 0.8)
            case 3:
                model.load(keys)
            case 4:
                model.end_loads()
            case 5:
                model.forget(keys)
                model.ours.touch(keys, keys[:1])
        model.check()
    assert evicted > 50


# ---- copies ----


def kv_caches(vllm: SimpleNamespace, *, packed: bool) -> tuple[Any, torch.Tensor]:
    """Groups of three layers and of two, over the same 12 blocks; returns also their bytes, [blocks, layers, page]."""
    base, blocks, page = vllm.base, 12, 32
    flat = torch.arange(blocks * 3 * page, dtype=torch.int64).remainder(251).to(torch.int8)
    if packed:
        tensors, pages, memory = [flat.view(blocks, 3 * page)], [3 * page], flat.view(blocks, 3, page)
        refs = [[base.CanonicalKVCacheRef(0, 3 * page)]] * 2
    else:
        memory = flat.view(3, blocks, page).transpose(0, 1)
        tensors, pages = list(memory.unbind(1)), [page] * 3
        refs = [[base.CanonicalKVCacheRef(layer, page) for layer in range(count)] for count in (3, 2)]
    canonical = [base.CanonicalKVCacheTensor(tensor, size) for tensor, size in zip(tensors, pages, strict=True)]
    return base.CanonicalKVCaches(canonical, refs), memory


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_come_back_from_scattered_units(vllm: SimpleNamespace, packed: bool):
    caches, memory = kv_caches(vllm, packed=packed)
    units = units_module(vllm).Units(32, {0: 3, 1: 2})
    worker = vllm.ours.BlockyardWorker(caches, blocks_per_chunk=1, num_chunks=20, units=units)
    chunks, ids = vllm.common.CPULoadStoreSpec, vllm.base.GPULoadStoreSpec
    places = [19, 0, 7, 3, 4, 12, 9, 1]
    worker.submit_store(1, ids([2, 5, 8], group_sizes=[2, 1], block_indices=[0, 0]), chunks(places))
    worker.wait({1})
    (result,) = worker.get_finished()
    assert result.transfer_size == 8 * 32
    before = memory.clone()
    memory[[2, 5, 8]] = 0
    wanted = memory.clone()
    wanted[[10, 3]], wanted[11, :2] = before[[2, 5]], before[8, :2]
    worker.submit_load(2, chunks(places), ids([10, 3, 11], [2, 1], [0, 0]))
    worker.wait({2})
    assert torch.equal(memory, wanted)
    worker.shutdown()


@pytest.mark.parametrize(
    ("blocks", "sizes", "chunks", "message"),
    [
        ([1, 2], [1, 1], [0, 1, 2, 3], "4 host units are given for \\[1, 1\\] blocks of \\[3, 2\\] units, must be 5"),
        ([1, 2], [2], [0, 1, 2], "group_sizes is \\[2\\] for 2 device blocks, must have 2 groups"),
        ([1, 2], [1, 2], [0, 1, 2], "group_sizes is \\[1, 2\\] for 2 device blocks"),
        ([1, 12], [0, 2], [0, 1, 2, 3], "device blocks are 1 to 12, must be 0 to 11"),
        ([-1], [0, 1], [0, 1], "device blocks are -1 to -1"),
        ([1], [0, 1], [0, 20], "20"),
        ([1], [0, 1], [0, 0], "twice|repeat"),
    ],
)
def test_what_does_not_fit_is_refused(
    vllm: SimpleNamespace, blocks: list[int], sizes: list[int], chunks: list[int], message: str
):
    caches, _ = kv_caches(vllm, packed=False)
    units = units_module(vllm).Units(32, {0: 3, 1: 2})
    worker = vllm.ours.BlockyardWorker(caches, blocks_per_chunk=1, num_chunks=20, units=units)
    device = vllm.base.GPULoadStoreSpec.__new__(vllm.base.GPULoadStoreSpec)
    device.block_ids, device.group_sizes, device.block_indices = np.array(blocks), sizes, [0] * len(sizes)
    with pytest.raises(BlockyardError, match=message):
        worker.submit_store(1, device, vllm.common.CPULoadStoreSpec(chunks))
    assert not worker.get_finished()
    worker.shutdown()


def test_tensors_that_units_do_not_fit_are_refused(vllm: SimpleNamespace):
    caches, _ = kv_caches(vllm, packed=True)
    with pytest.raises(BlockyardError, match="must be multiples of 36 bytes"):
        vllm.ours.BlockyardWorker(
            caches, blocks_per_chunk=1, num_chunks=20, units=units_module(vllm).Units(36, {0: 3, 1: 2})
        )
