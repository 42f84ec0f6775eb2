"""Memory of a CUDA device that comes and goes, against a driver that is as strict as the real one."""

# ruff: noqa: N802 - the names are the driver's

import ctypes
import gc
import sys
from collections.abc import Sequence
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from forks import in_child
from hypothesis import given
from hypothesis import strategies as st

from blockyard.engine.elastic import cuda
from blockyard.engine.elastic.cache import ElasticCache, plane_spans
from blockyard.engine.elastic.cuda import DeviceMemory, choose_chunk, load_driver
from blockyard.errors import BlockyardError, InvalidArgumentError, OutOfMemoryError
from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import KVLayout

UNIT = 1 << 16
LAYOUT = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=32, dtype="float32")
CPU = torch.device("cpu")


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


OK, BAD = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_INVALID_VALUE


class FakeDriver:
    """Reservations, allocations and mappings of a device whose addresses are this process's.

    It refuses what the driver's documentation refuses: sizes and addresses off the granularity, mapping outside of a
    reservation or over another mapping, access to what is not mapped whole, unmapping a part of a mapping, freeing
    addresses that still have memory. Memory holds garbage until something writes it, and again once it is unmapped.
    """

    CUresult = CUresult
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, total: int = 1 << 30) -> None:
        self.total = total
        self.reserved: dict[int, np.ndarray] = {}
        self.handles: dict[int, int] = {}  # size by handle that is not released
        self.sizes: dict[int, int] = {}  # size by handle that has memory
        self.mapped: dict[int, int] = {}  # handle by address
        self.access: set[int] = set()
        self.busy = False  # whether work was queued since the last wait
        self.streams: dict[int, bool] = {}  # whether each that was made has work
        self.log: list[str] = []

    @property
    def used(self) -> int:
        return sum(self.sizes.values())

    def _drop(self) -> None:
        alive = set(self.handles) | set(self.mapped.values())
        self.sizes = {handle: size for handle, size in self.sizes.items() if handle in alive}

    def _bytes(self, address: int, size: int) -> np.ndarray | None:
        for start, memory in self.reserved.items():
            if start <= address and address + size <= start + memory.size:
                return memory[address - start : address - start + size]
        return None

    def _whole(self, address: int, size: int) -> list[int] | None:
        """Addresses of the mappings that make up a range, if they do."""
        at, found = address, []
        while at < address + size and at in self.mapped:
            found.append(at)
            at += self.sizes[self.mapped[at]]
        return found if at == address + size else None

    def cuCtxSynchronize(self) -> tuple[CUresult]:
        self.log.append("wait")
        self.busy = False
        self.streams = dict.fromkeys(self.streams, False)
        return (OK,)

    def cuStreamCreate(self, flags) -> tuple[CUresult, int]:
        assert flags == 1, "the legacy stream's work would be waited for"
        stream = len(self.streams) + 1
        self.streams[stream] = False
        return OK, stream

    def cuStreamSynchronize(self, stream) -> tuple[CUresult]:
        if stream not in self.streams:
            return (BAD,)
        self.streams[stream] = False
        return (OK,)

    def cuStreamDestroy(self, stream) -> tuple[CUresult]:
        return (BAD,) if self.streams.pop(stream, None) is None else (OK,)

    def cuMemGetAllocationGranularity(self, prop, option) -> tuple[CUresult, int]:
        assert (prop.type, prop.location.type, prop.location.id, option) == (1, 1, 0, 0)
        return OK, UNIT

    def cuMemAddressReserve(self, size, alignment, addr, flags) -> tuple[CUresult, int]:
        if size <= 0 or size % UNIT or alignment or flags:
            return BAD, 0
        room = np.full(size + UNIT, 0xA5, dtype=np.uint8)
        first = -room.ctypes.data % UNIT
        memory = room[first : first + size]
        self.reserved[memory.ctypes.data] = memory
        return OK, memory.ctypes.data

    def cuMemAddressFree(self, ptr, size) -> tuple[CUresult]:
        memory = self.reserved.get(ptr)
        if memory is None or memory.size != size or any(ptr <= at < ptr + size for at in self.mapped):
            return (BAD,)
        del self.reserved[ptr]
        return (OK,)

    def cuMemCreate(self, size, prop, flags) -> tuple[CUresult, int]:
        if size <= 0 or size % UNIT or flags or prop.type != 1:
            return BAD, 0
        if self.used + size > self.total:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        handle = max(self.sizes, default=0) + 1
        self.handles[handle] = self.sizes[handle] = size
        return OK, handle

    def cuMemRelease(self, handle) -> tuple[CUresult]:
        if self.handles.pop(handle, None) is None:
            return (BAD,)
        self._drop()
        return (OK,)

    def cuMemMap(self, ptr, size, offset, handle, flags) -> tuple[CUresult]:
        free = all(at + self.sizes[held] <= ptr or ptr + size <= at for at, held in self.mapped.items())
        fits = self.handles.get(handle) == size and not offset and not flags and ptr % UNIT == 0
        if not (free and fits) or self._bytes(ptr, size) is None:
            return (BAD,)
        self.mapped[ptr] = handle
        return (OK,)

    def cuMemSetAccess(self, ptr, size, desc, count) -> tuple[CUresult]:
        found = self._whole(ptr, size)
        if not found or len(desc) != count or desc[0].flags != 3 or desc[0].location.id != 0:
            return (BAD,)
        self.access.update(found)
        return (OK,)

    def cuMemUnmap(self, ptr, size) -> tuple[CUresult]:
        found, memory = self._whole(ptr, size), self._bytes(ptr, size)
        assert True not in {self.busy, *self.streams.values()}, "the device may still be using what is unmapped"
        if not found or memory is None:
            return (BAD,)
        memory[:] = 0xA5
        for at in found:
            del self.mapped[at]
        self.access.difference_update(found)
        self._drop()
        return (OK,)

    def cuMemsetD8Async(self, dst, value, count, stream) -> tuple[CUresult]:
        found, memory = self._whole(dst, count), self._bytes(dst, count)
        if not found or memory is None or not self.access.issuperset(found):
            return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        if stream not in self.streams:
            return (BAD,)
        memory[:] = value
        self.streams[stream] = True
        return (OK,)


def memory(driver: FakeDriver, sizes: Sequence[int] = (8 * UNIT,), **options: int) -> DeviceMemory:
    return DeviceMemory(sizes, device=CPU, driver=cast("ModuleType", driver), **options)


def cache(driver: FakeDriver, blocks: int, max_blocks: int) -> ElasticCache:
    sizes = [max_blocks * LAYOUT.bytes_per_block // LAYOUT.num_tensors] * LAYOUT.num_tensors
    return ElasticCache(LAYOUT, num_blocks=blocks, max_blocks=max_blocks, memory=memory(driver, sizes))


def test_chunks_come_as_zeros_and_go_back_to_the_device():
    driver = FakeDriver()
    chunks = memory(driver)
    assert (chunks.chunk, driver.used, len(driver.reserved)) == (UNIT, 0, 1)
    chunks.commit(2, 5)
    assert driver.used == 3 * UNIT
    assert not driver.handles, "mappings alone keep the memory"
    assert not chunks.tensor[2 * UNIT : 5 * UNIT].any()
    chunks.tensor[2 * UNIT : 5 * UNIT] = 7
    chunks.release(3, 4)
    assert driver.used == 2 * UNIT
    chunks.commit(3, 4)
    assert chunks.tensor[2 * UNIT :: UNIT][:3].tolist() == [7, 0, 7]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_makes_no_call_of_the_driver():
    driver = FakeDriver()
    chunks = [memory(driver)]
    chunks[0].commit(0, 2)

    def check() -> None:
        calls = list(driver.log)
        chunks.clear()
        gc.collect()
        assert (driver.log, len(driver.mapped), len(driver.reserved)) == (calls, 2, 1)

    in_child(check)
    chunks.clear()
    gc.collect()
    assert not driver.reserved


def test_what_cannot_be_had_is_given_back_again():
    driver = FakeDriver(total=4 * UNIT)
    chunks = memory(driver)
    chunks.commit(0, 2)
    with pytest.raises(OutOfMemoryError, match=r"cuMemCreate.*CUDA_ERROR_OUT_OF_MEMORY"):
        chunks.commit(3, 8)
    assert (driver.used, len(driver.mapped), len(driver.handles)) == (2 * UNIT, 2, 0)
    chunks.commit(3, 5)


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", "cuStreamSynchronize"])
def test_a_call_that_fails_leaves_no_memory_behind(call: str, monkeypatch: pytest.MonkeyPatch):
    driver = FakeDriver()
    chunks = memory(driver)
    monkeypatch.setattr(driver, call, lambda *arguments: (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,))
    with pytest.raises(BlockyardError, match=rf"{call}\(.*CUDA_ERROR_ILLEGAL_ADDRESS"):
        chunks.commit(1, 4)
    assert (driver.used, driver.mapped) == (0, {})


def test_misuse_is_told_by_the_driver():
    driver = FakeDriver()
    chunks = memory(driver, chunk_bytes=2 * UNIT)
    chunks.commit(0, 2)
    with pytest.raises(BlockyardError, match=r"cuMemMap.*INVALID_VALUE"):
        chunks.commit(1, 3)
    with pytest.raises(BlockyardError, match=r"cuMemUnmap.*INVALID_VALUE"):
        chunks.release(2, 3)


@pytest.mark.parametrize("chunk", [0, UNIT // 2, UNIT + 4096])
def test_a_chunk_off_the_granularity_is_refused(chunk: int):
    with pytest.raises(InvalidArgumentError, match=f"chunk_bytes is {chunk}, must be a multiple of {UNIT}"):
        memory(FakeDriver(), chunk_bytes=chunk)


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 300), st.integers(0, 300))
def test_a_chosen_chunk_keeps_a_small_part_of_the_whole(blocks: int, layers: int, max_blocks: int, kib: int):
    layout = KVLayout("kv_first", layers, block_size=16, num_kv_heads=1, head_size=16 * (kib + 1), dtype="float32")
    sizes = [max_blocks * layout.bytes_per_block // layers] * layers
    unit = 4096
    chunk = choose_chunk(sizes, 2 * layers, unit)
    assert chunk % unit == 0
    assert (chunk // unit).bit_count() == 1
    room = SimpleNamespace(chunk=chunk, tensor=torch.empty(0))
    cache = SimpleNamespace(_memory=room, _planes=[])
    starts = np.cumsum([0] + [-(-size // chunk) * chunk for size in sizes])
    for index, start in enumerate(starts[:-1]):
        cache._planes += [(int(start) + first, width) for first, width in plane_spans(layout, max_blocks, index)]
    blocks = min(blocks, max_blocks)
    spans = ElasticCache._chunks(cache, blocks)
    kept = sum(last - first for first, last in spans) * chunk - blocks * layout.bytes_per_block
    assert kept <= max(sum(sizes) / 32, 4 * layers * unit)
    # Twice as much would not be within the bound.
    assert 2 * chunk * 2 * 2 * layers > sum(sizes) / 32


def test_large_pools_have_larger_chunks_by_default():
    sizes, mib = [100 * 10**9 // 80] * 80, 1 << 20
    assert choose_chunk(sizes, 160, 2 * mib) == 8 * mib
    assert choose_chunk(sizes, 80, 2 * mib) == 16 * mib
    assert choose_chunk([10**9], 160, 2 * mib) == 2 * mib
    assert memory(FakeDriver(), [64 * UNIT * 64]).chunk == 64 * UNIT
    assert memory(FakeDriver(), [64 * UNIT * 64], planes=4).chunk == 16 * UNIT


def test_the_range_goes_with_its_last_tensor_and_its_memory_too():
    driver = FakeDriver()
    chunks = memory(driver)
    chunks.commit(0, 3)
    view = chunks.tensor[UNIT : 2 * UNIT]
    del chunks
    gc.collect()
    assert (driver.used, len(driver.reserved)) == (3 * UNIT, 1)
    del view
    gc.collect()
    assert (driver.used, driver.reserved, driver.mapped, driver.streams) == (0, {}, {}, {})


def test_growth_waits_for_no_work_of_the_device():
    driver = FakeDriver()
    blocks = cache(driver, 16, 96)  # planes of 6 chunks, 16 blocks each
    driver.busy, driver.log = True, []
    blocks.resize(48)
    assert (driver.busy, driver.log) == (True, [])
    assert not any(driver.streams.values()), "what comes is zeros for work that is queued from now on"
    # Blocks that share a chunk with others wait: what had their ids before may still be written.
    blocks.resize(50)
    assert driver.busy
    blocks.resize(51)
    assert not driver.busy
    blocks.close()


def test_memory_that_torch_keeps_for_later_is_asked_for_before_growth_fails(monkeypatch: pytest.MonkeyPatch):
    driver, emptied = FakeDriver(total=2 * UNIT), []

    def empty_cache() -> None:
        emptied.append(driver.total)
        driver.total = 6 * UNIT

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    chunks = memory(driver)
    chunks.commit(0, 6)
    assert emptied == [2 * UNIT]
    with pytest.raises(OutOfMemoryError, match="cuMemCreate"):
        chunks.commit(6, 8)
    assert (driver.used, emptied) == (6 * UNIT, [2 * UNIT, 6 * UNIT])


def test_a_cache_over_it_keeps_its_blocks_while_it_shrinks_and_grows():
    driver = FakeDriver()
    blocks = cache(driver, 100, 100)  # a plane of a block is 4 KiB, 16 blocks a chunk
    everything = driver.used
    assert everything == 2 * 13 * UNIT, "planes of one tensor share a chunk where they meet"
    for number, view in enumerate(LAYOUT.views(blocks.tensors)):
        view[:] = number + 1
    result = blocks.resize(30)
    assert (result.returned, driver.used) == (everything - driver.used, blocks.committed_bytes)
    # K is in chunks 0 and 1; V begins within chunk 6 and ends within chunk 8.
    assert driver.used == 2 * (2 + 3) * UNIT
    assert result.kept == driver.used - 30 * LAYOUT.bytes_per_block
    blocks.resize(60)
    for number, view in enumerate(LAYOUT.views(blocks.tensors)):
        assert view[:30].eq(number + 1).all()
        assert not view[30:60].any()
    blocks.close()
    assert driver.used == 0


def test_groups_of_other_shapes_come_and_go_with_their_blocks():
    # A block is 8 KiB in each of two tensors of one group, 4 KiB and 3 * 64 bytes in the others.
    window = KVLayout("blocks tokens dim", num_layers=1, block_size=16, num_kv_heads=1, head_size=256, dtype="int8")
    state = KVLayout("blocks tokens dim", num_layers=1, block_size=3, num_kv_heads=1, head_size=16, dtype="float32")
    both = GroupedLayout((("full", LAYOUT), ("window", window), ("state", state)))
    driver = FakeDriver()
    memory_of_all = memory(driver, [100 * 8192] * 2 + [100 * 4096, 100 * 192])
    with ElasticCache(both, num_blocks=100, max_blocks=100, memory=memory_of_all) as blocks:
        assert driver.used == (2 * 13 + 7 + 1) * UNIT
        assert [tensor.dtype for tensor in blocks.tensors] == [torch.float32] * 2 + [torch.int8, torch.float32]
        for number, view in enumerate(both.views(blocks.tensors)):
            view[:] = number + 1
        result = blocks.resize(30)
        assert driver.used == (2 * (2 + 3) + 2 + 1) * UNIT
        assert (result.returned, result.kept) == (21 * UNIT, driver.used - 30 * both.bytes_per_block)
        blocks.resize(60)
        for number, view in enumerate(both.views(blocks.tensors)):
            assert view[:30].eq(number + 1).all()
            assert not view[30:60].any()
    assert driver.used == 0


def test_copies_of_an_elastic_cache_end_with_its_chunks(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "declare_region", fake.fake_declare)
    fake.fake_reset(0, 0, *[True, False, True], 1024)
    driver = FakeDriver()
    chunks = memory(driver)
    chunks.commit(0, 8)
    start, size = chunks.tensor.data_ptr(), 8 * UNIT
    host = torch.arange(size // 8).view(torch.uint8)
    fake.fake_host(host.data_ptr(), host.data_ptr() + size)
    fake.fake_register(host.data_ptr(), host.data_ptr() + size, 0)
    for address in driver.mapped:
        fake.fake_map(address, address + UNIT)
    # Blocks of three quarters of a chunk.
    width = 3 * UNIT // 4
    views = [tensor[: 10 * width].view(10, width) for tensor in (host, chunks.tensor)]
    pairs = torch.arange(10).repeat(2, 1).T.contiguous()
    for strategy, calls in ((1, b"B"), (2, b"Bmmmmmmmm")):
        fake.fake_strategy(0, strategy, 12)
        chunks.tensor.zero_()
        torch.ops.blockyard_fake.swap([views[0]], [views[1]], pairs, False, True)
        assert torch.equal(*views)
        assert fake.fake_calls() == calls
    assert (fake.fake_faults(), fake.fake_questions()) == (0, 2)
    del chunks, views
    gc.collect()
    assert not fake.fake_is_declared(start)


def test_the_device_has_done_its_work_before_memory_goes():
    driver = FakeDriver()
    blocks = cache(driver, 100, 100)
    driver.busy = True
    blocks.resize(10)
    driver.busy = True
    blocks.close()
    # A cache that is forgotten gives its memory back as well.
    driver = FakeDriver()
    blocks = cache(driver, 100, 100)
    driver.busy = True
    del blocks
    gc.collect()
    assert not driver.mapped


def test_the_bindings_have_every_call_and_constant_that_is_used():
    pytest.importorskip("cuda.bindings.driver", reason="CUDA's bindings are not installed")
    driver = load_driver()
    used = [name for name in vars(FakeDriver) if not name.startswith("_") and name != "used"]
    assert [name for name in used if not hasattr(driver, name)] == []
    for code in CUresult:
        assert getattr(driver.CUresult, code.name) == code
    location, kind, access = driver.CUmemLocation(), driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 1
    kind.type, kind.location = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, location
    access.location, access.flags = location, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    assert (int(kind.location.id), int(access.location.id), int(access.flags)) == (1, 1, 3)
    assert hasattr(driver.CUmemAllocationGranularity_flags, "CU_MEM_ALLOC_GRANULARITY_MINIMUM")


def test_without_the_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(InvalidArgumentError, match=r'a GPU needs cuda: pip install "blockyard\[elastic\]"$'):
        load_driver()
