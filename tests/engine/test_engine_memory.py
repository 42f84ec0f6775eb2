"""The copy engine's memory: shapes, views that belong together, and what does not fit."""

import gc
import weakref

import numpy as np
import pytest
import torch

from blockyard._core import Mapping
from blockyard.engine.engine import CacheEngine
from blockyard.engine.memory import EngineTier, Memory, Rows, Run, as_tensor
from blockyard.errors import BlockyardError, InvalidArgumentError, LayoutError, OutOfMemoryError
from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import KINDS, KVLayout
from blockyard.workers.buffers import Buffers


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest) -> Memory:
    layout = KVLayout(request.param, num_layers=2, block_size=2, num_kv_heads=1, head_size=3, dtype="float16")
    return Memory(layout, device_blocks=5, host_blocks=3)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_rows_go_to_blocks_of_both_tiers_and_back(memory: Memory, tier: EngineTier):
    width = memory.bytes_per_block
    given, found = torch.randint(1, 256, (2, width), dtype=torch.uint8), torch.ones((3, width), dtype=torch.uint8)
    there = Mapping([[1, 0], [0, 2]], src_blocks=2, dst_blocks=3, rule="swap")
    back = Mapping([[0, 0], [1, 1], [2, 2]], src_blocks=3, dst_blocks=3, rule="swap")
    memory.run_with(tier, given, written=True)(there)
    memory.run_with(tier, found, written=False)(back)
    assert torch.equal(found, torch.stack([given[1], torch.zeros_like(given[0]), given[0]]))


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("written", [False, True])
def test_views_of_a_staging_buffer_are_checked_once_and_those_of_other_rows_each_time(
    memory: Memory, tier: EngineTier, written: bool
):
    def run(rows: Rows) -> Run:
        return memory.run_with(tier, as_tensor(memory.buffer_of(rows)[0]), written=written)

    staged = memory.buffers.take(3, memory.bytes_per_block)
    first = run(staged)
    assert memory.buffer_of(staged[1:])[1] == 1
    memory.buffers.give(staged)
    again = memory.buffers.take(2, memory.bytes_per_block)
    assert np.shares_memory(again, staged)
    assert run(again[1:]) is run(again) is first
    own = np.zeros((3, memory.bytes_per_block), np.uint8)
    assert memory.buffer_of(own)[0] is own
    assert run(own) is not run(own)
    strided = staged[::2]
    assert memory.buffer_of(strided)[0] is strided


def test_only_a_number_of_staging_buffers_is_kept_for_their_views(memory: Memory):
    taken = [memory.buffers.take(1, memory.bytes_per_block) for _ in range(70)]
    runs = [memory.run_with("host", as_tensor(memory.buffer_of(rows)[0]), written=True) for rows in taken]
    kept = [memory.run_with("host", as_tensor(memory.buffer_of(rows)[0]), written=True) for rows in taken[-60:]]
    assert kept == runs[-60:]
    assert memory.run_with("host", as_tensor(memory.buffer_of(taken[0])[0]), written=True) is not runs[0]


def test_staging_buffers_of_some_bytes_are_kept_for_their_views(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("blockyard.engine.memory.BOUND_BYTES", 5 * memory.bytes_per_block)
    memory.buffers = Buffers(memory._staging_of, 0)  # keeps none itself
    made: list[weakref.ref[Rows]] = []
    for count in (1, 2, 2, 8, 1, 4, 4):
        rows = memory.buffer_of(memory.buffers.take(count, memory.bytes_per_block))[0]
        memory.run_with("host", as_tensor(rows), written=True)
        made.append(weakref.ref(rows.base))
        del rows
    gc.collect()
    assert [one() is not None for one in made] == [False] * 6 + [True]


def test_an_unknown_tier_is_refused(memory: Memory):
    with pytest.raises(InvalidArgumentError, match="'disk' is not one of device, host"):
        memory.num_blocks("disk")


def test_views_are_known_by_their_layer_where_they_follow_the_layers(memory: Memory):
    count = len(memory.views["device"])
    assert memory.by_layer() == [list(range(count // 2)), list(range(count // 2, count))]


@pytest.mark.parametrize(
    ("kind", "places"), [("layers blocks tokens dim", [[0], [1]]), ("blocks layers tokens dim", [])]
)
def test_layers_in_one_tensor_have_places_if_they_stand_outside(kind: str, places: list[list[int]]):
    layout = KVLayout(kind, num_layers=2, block_size=2, num_kv_heads=1, head_size=3, dtype="float16")
    assert Memory(layout, device_blocks=5, host_blocks=3).by_layer() == places


def test_groups_have_tensors_of_their_own_shapes_and_layers_that_count_on():
    full = KVLayout("kv_first", num_layers=2, block_size=2, num_kv_heads=1, head_size=3, dtype="float16")
    state = KVLayout("blocks layers tokens dim", num_layers=2, block_size=2, num_kv_heads=1, head_size=5, dtype="int8")
    memory = Memory(GroupedLayout((("full", full), ("state", state))), device_blocks=4, host_blocks=2)
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in memory.tensors]
    wanted = (2, 4, 2, 1, 3), torch.float16
    assert shapes == [wanted, wanted, ((4, 2, 2, 5), torch.int8)]
    assert memory.by_layer() == [[0, 1], [2, 3], [4], []]
    assert memory.host_rows.shape == (2, full.bytes_per_block + state.bytes_per_block)


def test_tensors_that_there_are_already_are_used_and_checked(memory: Memory):
    layout = memory.layout
    mine = [torch.zeros_like(tensor) for tensor in memory.tensors]
    given = Memory(layout, device_blocks=5, host_blocks=3, tensors=mine)
    given.views["device"][0][1, 0] = 7
    assert mine[0].view(torch.uint8).sum() == 7
    with pytest.raises(LayoutError, match="device_blocks is 6, must be 5, the blocks of the tensors"):
        Memory(layout, device_blocks=6, host_blocks=3, tensors=mine)
    with pytest.raises(LayoutError, match="got 1 tensors"):
        Memory(layout, device_blocks=5, host_blocks=3, tensors=mine[:1])


def test_blocks_are_counted_in_the_tensors_if_no_number_is_given(memory: Memory):
    assert CacheEngine(memory.layout, tensors=memory.tensors).num_blocks("device") == 5
    with pytest.raises(InvalidArgumentError, match="device_blocks is None"):
        CacheEngine(memory.layout)


def test_memory_that_was_let_go_is_used_no_more(memory: Memory):
    memory.release()
    assert memory.tensors == []
    assert memory.host_rows.numel() == 0
    with pytest.raises(BlockyardError, match="closed"):
        memory.num_blocks("host")


def test_read_only_arrays_become_tensors_by_a_copy():
    array = np.arange(3)
    assert as_tensor(array).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert as_tensor(array).data_ptr() != array.ctypes.data


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"device_blocks": 10**12}, "device_blocks is 1000000000000, must be 1 to 2147483647"),
        ({"device_blocks": 0}, "device_blocks is 0, must be 1 to"),
        ({"host_blocks": 10**30}, r"host_blocks is 10+, must be 0 to"),
        ({"host_blocks": -1}, "host_blocks is -1, must be 0 to"),
    ],
)
def test_numbers_of_blocks_that_cannot_be_are_refused(sizes: dict[str, int], message: str):
    layout = KVLayout("kv_first", 1, 16, 1, 4, "float16")
    with pytest.raises(InvalidArgumentError, match=message):
        Memory(layout, **{"device_blocks": 5, "host_blocks": 3} | sizes)  # type: ignore[arg-type]


def test_missing_device_memory_raises_with_its_bytes():
    layout = KVLayout("kv_first", 8, 1024, 64, 256, "float32")
    blocks = 10**9  # beyond the address space: a system that overcommits memory would grant less, and fail on use
    wanted = blocks * layout.bytes_per_block
    with pytest.raises(OutOfMemoryError, match=f"device_blocks is {blocks}: cannot allocate {wanted} bytes on cpu"):
        Memory(layout, device_blocks=blocks, host_blocks=0)


@pytest.mark.parametrize(
    ("least", "groups"),
    [
        (0, [[0], [1], [2], [3], [4], [5], [6]]),
        (1, [[0], [1], [2], [3], [4], [5], [6]]),
        (2, [[0, 1], [2, 3], [4, 5, 6]]),
        (3, [[0, 1, 2], [3, 4, 5, 6]]),
        (99, [[0, 1, 2, 3, 4, 5, 6]]),
    ],
)
def test_neighbouring_layers_are_grouped_until_they_have_enough_bytes(least: int, groups: list[list[int]]):
    layout = KVLayout("kv_first", num_layers=7, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    memory = Memory(layout, device_blocks=5, host_blocks=3)
    assert memory.layer_groups(least * layout.bytes_per_block // 7) == groups


def test_each_layer_comes_with_its_group(monkeypatch: pytest.MonkeyPatch):
    layout = KVLayout("kv_first", num_layers=7, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    memory = Memory(layout, device_blocks=5, host_blocks=3)
    monkeypatch.setattr(memory, "layer_groups", lambda _: [[0, 1], [2, 3, 4, 5, 6]])
    memory.host_rows.copy_(torch.arange(memory.host_rows.numel()).view_as(memory.host_rows) % 251)
    runs, groups = memory.run_by_layer("host", "device")
    assert groups == [0, 0, 1, 1, 1, 1, 1]
    runs[0](Mapping(np.array([[2, 4]]), src_blocks=3, dst_blocks=5, rule="swap"))
    arrived = [bool(tensor.any()) for tensor in memory.tensors]
    assert arrived == [True, True, False, False, False, False, False]
    runs[1](Mapping(np.array([[2, 4]]), src_blocks=3, dst_blocks=5, rule="swap"))
    row = torch.cat([view[4] for view in memory.views["device"]])
    assert torch.equal(row, memory.host_rows[2])


@pytest.mark.parametrize("device", ["hpu", "mps", "meta", "privateuseone:0", "gpu", "", torch.device("xpu")])
def test_a_device_that_the_copies_do_not_support_is_named_with_those_that_they_do(device: object):
    layout = KVLayout("kv_first", num_layers=2, block_size=2, num_kv_heads=1, head_size=3, dtype="float16")
    with pytest.raises(InvalidArgumentError, match=r"device is .*, must be 'cpu', 'cuda' or 'cuda:' and an index"):
        CacheEngine(layout, device_blocks=4, device=device)


def test_tensors_on_such_a_device_are_refused_too():
    layout = KVLayout("kv_first", num_layers=1, block_size=2, num_kv_heads=1, head_size=3, dtype="float16")
    tensors = [torch.zeros(shape, dtype=torch.float16, device="meta") for shape, _ in layout.tensor_shapes(4)]
    with pytest.raises(InvalidArgumentError, match="device is 'meta'"):
        CacheEngine(layout, tensors=tensors)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_cuda_device_says_so():
    layout = KVLayout("kv_first", num_layers=1, block_size=2, num_kv_heads=1, head_size=3, dtype="float16")
    with pytest.raises(InvalidArgumentError, match="device is 'cuda', but torch finds no CUDA device"):
        CacheEngine(layout, device_blocks=4, device="cuda")
