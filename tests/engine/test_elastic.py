"""Caches that grow and shrink at one address, over memory that really goes."""

import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from resident import resident_bytes
from simulated_device import SimulatedStreams

from blockyard.engine.elastic.cache import ElasticCache, plane_spans, reserve
from blockyard.engine.engine import CacheEngine
from blockyard.errors import BlockyardError, InvalidArgumentError, LayoutError, OutOfMemoryError
from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import KVLayout

PAGE = mmap.PAGESIZE
KINDS = ["kv_first", "blocks_first", "slots kv heads dim", "kv heads blocks tokens dim", "tokens blocks heads dim"]
KINDS += ["flat", "rocm", "blocks*tokens heads*dim", "heads*blocks tokens dim | tokens blocks heads dim"]
# A block has two whole pages in each of the four planes, and so no page belongs to two planes or two blocks.
LAYOUT = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=PAGE // 64, dtype="float32")
MANY_BLOCKS = (4 << 20) // PAGE


class FakeMemory:
    """Chunks that are garbage while they are not committed, and an account of each."""

    def __init__(self, sizes: Sequence[int], chunk: int, limit: int | None = None) -> None:
        self.chunk, self.limit = chunk, limit
        self.tensor = torch.full((sum(-(-size // chunk) * chunk for size in sizes),), 0xA5, dtype=torch.uint8)
        self.committed: set[int] = set()
        self.waits = 0

    def commit(self, first: int, last: int) -> None:
        assert first < last
        assert self.committed.isdisjoint(range(first, last))
        if self.limit is not None and len(self.committed) + last - first > self.limit:
            raise OutOfMemoryError("no more")
        self.committed.update(range(first, last))
        self.tensor[first * self.chunk : last * self.chunk] = 0

    def release(self, first: int, last: int) -> None:
        assert self.committed.issuperset(range(first, last))
        self.committed.difference_update(range(first, last))
        self.tensor[first * self.chunk : last * self.chunk] = 0xA5

    def synchronize(self) -> None:
        self.waits += 1


def groups_of(layout: KVLayout | GroupedLayout) -> list[KVLayout]:
    return [group for _, group in layout.groups] if isinstance(layout, GroupedLayout) else [layout]


def fake(layout: KVLayout | GroupedLayout, blocks: int, chunk: int, limit: int | None = None) -> FakeMemory:
    shapes = [(shape, group) for group in groups_of(layout) for shape, _ in group.tensor_shapes(blocks)]
    return FakeMemory([math.prod(shape) * group.itemsize for shape, group in shapes], chunk, limit)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    layout = KVLayout(
        kind=draw(st.sampled_from(KINDS)),
        num_layers=draw(st.integers(1, 3)),
        block_size=draw(st.sampled_from([1, 3, 4])),
        num_kv_heads=draw(st.integers(1, 3)),
        head_size=draw(st.integers(1, 9)) * 16,
        dtype=draw(st.sampled_from(["float32", "float16", "int8"])),
    )
    return replace(layout, tensors_per_layer=2) if draw(st.booleans()) and "kv" not in layout.names else layout


@st.composite
def grouped(draw: st.DrawFn) -> GroupedLayout:
    groups = draw(st.lists(layouts(), min_size=1, max_size=3))
    return GroupedLayout(tuple((f"group {at}", group) for at, group in enumerate(groups)))


@settings(max_examples=200, deadline=None)
@given(
    layouts() | grouped(), st.integers(1, 20), st.sampled_from([8, 64, 1024]), st.lists(st.integers(1, 20), max_size=8)
)
def test_blocks_keep_their_bytes_and_new_ones_are_zeros_whatever_the_sizes(layout, most, chunk, sizes):
    memory = fake(layout, most, chunk)
    cache = ElasticCache(layout, num_blocks=1, max_blocks=most, memory=memory)
    addresses = [tensor.data_ptr() for tensor in cache.tensors]
    rows, before = np.zeros((1, layout.bytes_per_block), dtype=np.uint8), 1
    for number, size in enumerate(size for size in sizes if size <= most):
        committed = len(memory.committed)
        result = cache.resize(size)
        kept = min(before, size)
        views = layout.views(cache.tensors)
        found = torch.cat([view[:size] for view in views], dim=1).numpy()
        assert np.array_equal(found[:kept], rows[:kept])
        assert not found[kept:].any()
        for view in views:
            view[:size] = number + 1
        rows, before = torch.cat([view[:size] for view in views], dim=1).numpy().copy(), size
        assert (len(memory.committed) - committed) * chunk == result.committed - result.returned
        assert result.kept == len(memory.committed) * chunk - size * layout.bytes_per_block
        assert cache.committed_bytes == len(memory.committed) * chunk
        planes = sum(group.planes(index) for group in groups_of(layout) for index in range(group.num_tensors))
        assert 0 <= result.kept < 2 * planes * chunk, "at most a chunk at either end of each plane"
    assert [tensor.data_ptr() for tensor in cache.tensors] == addresses
    cache.close()
    assert not memory.committed


@pytest.mark.parametrize("kind", ["kv_first", "blocks_first"])
def test_the_resident_set_rises_and_falls_by_the_blocks_bytes(kind: str):
    layout = replace(LAYOUT, kind=kind, num_layers=4)
    blocks, slack = MANY_BLOCKS, 2 << 20
    with ElasticCache(layout, num_blocks=blocks, max_blocks=4 * blocks) as cache:
        start = resident_bytes()
        for view in layout.views(cache.tensors):
            view[:blocks] = 1
        assert abs(resident_bytes() - start - blocks * layout.bytes_per_block) < slack
        result = cache.resize(blocks // 4)
        assert result == (blocks // 4, 0, 3 * blocks // 4 * layout.bytes_per_block, 0)
        assert abs(resident_bytes() - start - blocks // 4 * layout.bytes_per_block) < slack
        assert cache.resize(2 * blocks).committed == 7 * blocks // 4 * layout.bytes_per_block
        for view in layout.views(cache.tensors):
            view[: 2 * blocks] = 1
        assert abs(resident_bytes() - start - 2 * blocks * layout.bytes_per_block) < slack
    assert abs(resident_bytes() - start) < slack


def test_the_resident_set_falls_by_the_blocks_bytes_of_all_groups_and_others_stay():
    # Here, too, a block has whole pages: one in each tensor.
    shape = "blocks tokens dim"
    window = KVLayout(shape, num_layers=1, block_size=16, num_kv_heads=1, head_size=PAGE // 16, dtype="int8")
    state = KVLayout(shape, num_layers=2, block_size=1, num_kv_heads=1, head_size=PAGE // 4, dtype="float32")
    both = GroupedLayout((("full", LAYOUT), ("window", window), ("state", state)))
    blocks, slack = MANY_BLOCKS, 2 << 20
    with ElasticCache(both, num_blocks=blocks, max_blocks=2 * blocks) as cache:
        by_group = both.by_group(cache.tensors)
        assert [len(by_group[name]) for name in ("full", "window", "state")] == [2, 1, 2]
        start = resident_bytes()
        for number, view in enumerate(both.views(cache.tensors)):
            view[:blocks] = number + 1
        assert abs(resident_bytes() - start - blocks * both.bytes_per_block) < slack
        result = cache.resize(blocks // 4)
        assert result == (blocks // 4, 0, 3 * blocks // 4 * both.bytes_per_block, 0)
        assert abs(resident_bytes() - start - blocks // 4 * both.bytes_per_block) < slack
        cache.resize(blocks)
        for number, view in enumerate(both.views(cache.tensors)):
            assert view[: blocks // 4].eq(number + 1).all()
            assert not view[blocks // 4 : blocks].any()


def test_an_engine_takes_the_tensors_of_groups_and_moves_their_blocks():
    state = KVLayout("blocks tokens dim", num_layers=1, block_size=1, num_kv_heads=1, head_size=24, dtype="float16")
    both = GroupedLayout((("full", LAYOUT), ("state", state)))
    with ElasticCache(both, num_blocks=8, max_blocks=8) as cache:
        engine = CacheEngine(both, device_blocks=8, host_blocks=4, tensors=cache.tensors)
        for view in both.views(cache.tensors):
            view[:] = torch.randint(0, 256, view.shape, dtype=torch.uint8)
        rows = engine.read("device", np.array([6, 7]))
        engine.run("swap_out", np.array([[6, 0], [7, 1]]))
        cache.resize(3)
        engine.run("swap_in", np.array([[0, 2], [1, 0]]))
        assert np.array_equal(engine.read("device", np.array([2, 0])), rows)
        engine.close()


class Moved:
    """Tickets and resizes over caches whose memory is garbage once it has gone, beside two plain arrays."""

    SIZE, KINDS = 8, ("swap_out", "swap_in", "prefetch", "copy", "move", "exchange", "read", "write")

    def __init__(self, layout: KVLayout, chunk: int, seed: int) -> None:
        self.layout, memory = layout, fake(layout, self.SIZE, chunk)
        self.cache = ElasticCache(layout, num_blocks=self.SIZE, max_blocks=self.SIZE, memory=memory)
        self.engine = CacheEngine(
            layout,
            device_blocks=self.SIZE,
            host_blocks=self.SIZE,
            tensors=self.cache.tensors,
            streams=SimulatedStreams(seed),
        )
        self.device, self.host = np.random.default_rng(seed).integers(
            0, 256, (2, self.SIZE, layout.bytes_per_block), np.uint8
        )
        every = np.arange(self.SIZE)
        self.engine.write("device", every, self.device)
        self.engine.write("host", every, self.host)
        self.last: tuple[int, ...] = ()
        self.reads: list[tuple[int, np.ndarray]] = []

    def resize(self, blocks: int) -> None:
        before = self.cache.num_blocks
        self.cache.resize(blocks)
        self.device[before:blocks] = 0

    def transfer(self, kind: str, pairs: np.ndarray) -> None:
        """Launch a transfer behind the one before, of pairs (device, other) whose ids are all distinct."""
        one, other = pairs.T
        inside = bool((pairs < self.cache.num_blocks).all())
        if not (one < self.cache.num_blocks).all() or (kind in {"copy", "move", "exchange"} and not inside):
            return
        engine, after = self.engine, self.last
        rows = np.full((len(pairs), self.layout.bytes_per_block), len(self.reads) + 1, dtype=np.uint8)
        if kind == "swap_out":
            ticket = engine.submit("swap_out", pairs, after=after)
            self.host[other] = self.device[one]
        elif kind in {"swap_in", "prefetch"}:
            ticket = engine.submit("swap_in", pairs[:, ::-1], after=after, prefetch=kind == "prefetch")
            self.device[one] = self.host[other]
        elif kind == "read":
            ticket = engine.submit_read("device", one, after=after)
            self.reads.append((ticket, self.device[one].copy()))
        elif kind == "write":
            ticket = engine.submit_write("device", one, rows, after=after)
            self.device[one] = rows
        else:
            ticket = engine.submit(kind, pairs, after=after)
            values = self.device[one].copy()
            if kind == "exchange":
                self.device[one] = self.device[other]
            self.device[other] = values
        self.last = (ticket,)

    def check(self) -> None:
        for ticket, wanted in self.reads:
            np.testing.assert_array_equal(ticket.wait().rows, wanted)
        blocks = np.arange(self.cache.num_blocks)
        np.testing.assert_array_equal(self.engine.read("device", blocks), self.device[blocks])
        np.testing.assert_array_equal(self.engine.read("host", np.arange(self.SIZE)), self.host)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_tickets_under_way_keep_their_bytes_whatever_the_sizes(data: st.DataObject):
    kind = data.draw(st.sampled_from(["kv_first", "blocks_first"]))
    layout = KVLayout(kind, num_layers=1, block_size=1, num_kv_heads=1, head_size=2, dtype="int32")
    moved = Moved(layout, data.draw(st.sampled_from([8, 16, 64])), data.draw(st.integers(0, 1 << 20)))
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 2)) == 0:
            moved.resize(data.draw(st.integers(1, moved.SIZE)))
            continue
        ids = data.draw(st.permutations(range(moved.SIZE)))
        pairs = np.array(ids, np.int64).reshape(-1, 2)[: data.draw(st.integers(1, 3))]
        moved.transfer(data.draw(st.sampled_from(moved.KINDS)), pairs)
    moved.check()
    if data.draw(st.booleans()):
        moved.transfer("swap_out", np.array([[0, 1]]))
        moved.cache.close()
        assert moved.last[0].wait().error is None
        np.testing.assert_array_equal(moved.engine.read("host", np.arange(moved.SIZE)), moved.host)
    moved.engine.close()


def test_a_workers_tickets_end_before_their_blocks_go():
    layout = replace(LAYOUT, num_layers=4, num_kv_heads=8)
    with ElasticCache(layout, num_blocks=128, max_blocks=128) as cache:
        engine = CacheEngine(layout, device_blocks=128, host_blocks=128, tensors=cache.tensors)
        for tensor in cache.tensors:
            tensor.fill_(7)
        ticket = engine.submit("swap_out", np.column_stack((np.arange(128), np.arange(128))))
        cache.resize(1)
        assert ticket.wait().error is None
        assert engine.memory.host_rows.view(torch.float32).eq(7).all()
        engine.close()


def test_a_resize_waits_for_no_ticket_that_touches_blocks_which_stay():
    gate = threading.Event()
    with ElasticCache(LAYOUT, num_blocks=64, max_blocks=64) as cache:
        engine = CacheEngine(LAYOUT, device_blocks=64, host_blocks=64, tensors=cache.tensors)
        engine.transfers.streams.launch("out", gate.wait)
        ticket = engine.submit("swap_out", np.array([[3, 0]]))
        assert cache.resize(4).blocks == 4
        assert not ticket.done
        gate.set()
        assert ticket.wait().error is None
        engine.close()


def test_what_shares_a_page_with_blocks_that_stay_is_kept_and_told():
    size = PAGE // 512
    layout = KVLayout("kv_first", num_layers=1, block_size=1, num_kv_heads=1, head_size=size, dtype="int8")
    with ElasticCache(layout, num_blocks=1000, max_blocks=1000) as cache:  # K and V take 1000 / 512 pages each
        assert cache.resize(600) == (600, 0, 0, 4 * PAGE - 1200 * size)  # K: pages 0 and 1, V: pages 1 to 3
        assert cache.resize(500) == (500, 0, PAGE, 3 * PAGE - 1000 * size)  # K: page 0, V: pages 1 and 2
        assert cache.resize(24) == (24, 0, PAGE, 2 * PAGE - 48 * size)  # K: page 0, V: page 1


def test_memory_that_cannot_be_had_changes_nothing():
    memory = fake(LAYOUT, 64, PAGE, limit=200)
    cache = ElasticCache(LAYOUT, num_blocks=10, max_blocks=64, memory=memory)
    committed = set(memory.committed)
    with pytest.raises(OutOfMemoryError, match="no more"):
        cache.resize(30)
    assert (cache.num_blocks, memory.committed) == (10, committed)
    assert cache.resize(20).blocks == 20


def test_the_device_is_waited_for_before_memory_goes_and_not_when_none_does():
    memory = fake(LAYOUT, 64, 1 << 20)
    cache = ElasticCache(LAYOUT, num_blocks=64, max_blocks=64, memory=memory)
    waits = memory.waits
    cache.resize(63)
    assert memory.waits == waits
    cache = ElasticCache(LAYOUT, num_blocks=64, max_blocks=64, memory=fake(LAYOUT, 64, PAGE))
    waits = cache._memory.waits
    cache.resize(63)
    assert cache._memory.waits > waits


@pytest.mark.parametrize("blocks", [0, -1, 9])
def test_sizes_out_of_range_are_refused_with_the_numbers(blocks: int):
    with pytest.raises(InvalidArgumentError, match=f"num_blocks is {blocks}, must be 1 to max_blocks, 8"):
        ElasticCache(LAYOUT, num_blocks=blocks, max_blocks=8)
    with (
        ElasticCache(LAYOUT, num_blocks=8, max_blocks=8) as cache,
        pytest.raises(InvalidArgumentError, match=f"num_blocks is {blocks}, must be 1 to max_blocks, 8"),
    ):
        cache.resize(blocks)


def test_a_dtype_or_device_that_is_not_known_is_refused():
    with pytest.raises(LayoutError, match="no dtype 'float3'"):
        ElasticCache(replace(LAYOUT, dtype="float3", itemsize=3), num_blocks=1, max_blocks=2)
    with pytest.raises(InvalidArgumentError, match="device is 'meta', must be 'cpu'"):
        reserve([8], device="meta")


def test_a_closed_cache_takes_no_size_and_may_be_closed_again():
    cache = ElasticCache(LAYOUT, num_blocks=4, max_blocks=8)
    kept = cache.tensors[0]
    cache.close()
    cache.close()
    assert (cache.tensors, cache.num_blocks, cache.committed_bytes) == ([], 0, 0)
    assert not kept.any(), "its addresses are still its own"
    with pytest.raises(BlockyardError, match="closed"):
        cache.resize(4)


def test_one_tensor_of_all_layers_has_a_tail_in_every_layer():
    layout = KVLayout("layers kv blocks tokens heads dim", 4, 16, 2, PAGE // 64, "float32")
    assert list(plane_spans(layout, 10)) == [(plane * 20 * PAGE, 2 * PAGE) for plane in range(8)]
    with ElasticCache(layout, num_blocks=10, max_blocks=10) as cache:
        assert cache.resize(4).returned == 6 * layout.bytes_per_block
