"""Blocks of their own size over one arena: layouts of real models, and the bytes that the engine moves."""

from typing import Any

import numpy as np
import pytest
import torch
from model_configs import LONG, TABLE, V4
from simulated_device import SimulatedStreams

from blockyard import Arena, BlockManager, CacheEngine, CacheGroup, KVCache, KVLayout, StepExecutor
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError
from blockyard.executor import ParallelExecutor
from blockyard.layout import ArenaLayout, LayerField
from blockyard.layout.model import LayerCache, ModelMemory

KEYS = LayerField(0, "keys", (2, 8), "float16")
STATE = LayerField(1, "state", (3, 5), "float32", is_state=True)
LAYOUT = ArenaLayout(((CacheGroup.full_attention(), (KEYS,)), (CacheGroup.recurrent(), (STATE,))), block_size=4)


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's configuration with small heads, so that its blocks fit in memory."""
    small = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "ssm_state_size": 8, "mamba_d_head": 8}
    small |= {"head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "mamba_d_state": 4}
    return {key: min(value, small[key]) if key in small else value for key, value in config.items()}


def block_size_of(name: str) -> int:
    """Return tokens of a block that is a whole number of compressed entries."""
    return 128 if "V4" in name else 32


@pytest.mark.parametrize("name", TABLE)
def test_the_groups_of_a_model_have_exactly_its_bytes_and_fit_a_manager(name: str):
    memory, size = ModelMemory.from_config(TABLE[name][0]), block_size_of(name)
    layout, tokens = ArenaLayout.from_config(memory, block_size=size), {"full_attention": LONG, "recurrent": size}
    groups = layout.cache_groups
    tokens["cross_attention"] = sum(layer.entries or 0 for layer in memory.layers if layer.kind == "cross") // 32
    held = [
        (group.block_bytes or 0) * (group.window or tokens[group.kind]) // layout.tokens(number)
        for number, group in enumerate(groups)
    ]
    assert sum(held) == memory.bytes(LONG)
    arena = Arena(device_bytes=8 * sum(group.block_bytes or 0 for group in groups))
    manager = BlockManager(block_size=size, groups=groups, arena=arena)
    assert manager.groups == groups
    assert [manager.pool(page_class=at).block_bytes for at in range(manager.num_page_classes)] == [
        page.bytes_per_block for page in layout.pages
    ]


@pytest.mark.parametrize("name", TABLE)
def test_what_a_model_writes_through_its_tensors_is_apart_and_moves_with_its_block(name: str):
    layout = ArenaLayout.from_config(shrunk(TABLE[name][0]), block_size=block_size_of(name))
    largest = max(page.bytes_per_block for page in layout.pages)
    arena = Arena(device_bytes=20 * largest, host_bytes=4 * largest)
    manager = BlockManager(block_size=layout.block_size, groups=layout.cache_groups, arena=arena)
    engine = CacheEngine(layout, manager=manager)
    fields = list(zip(layout.fields, engine.tensors, strict=True))
    assert len({(field.layer, field.name) for field, _ in fields}) == len(fields)
    for page_class in range(manager.num_page_classes):
        memory, own = (
            engine.of_class(page_class),
            [
                tensor
                for number, tensors in enumerate(layout.by_group(engine.tensors))
                if layout.page_class(number) == page_class
                for tensor in tensors
            ],
        )
        block, target = (memory.num_blocks("device") // 2 + step for step in (0, 1))
        for number, tensor in enumerate(own):
            tensor[block].view(torch.uint8).fill_(number % 250 + 1)
            assert tensor[block].view(torch.uint8).eq(number % 250 + 1).all()
        written = engine.read("device", [block], page_class=page_class)
        engine.run("swap_out", [(block, 1)], page_class=page_class)
        engine.run("swap_in", [(1, target)], page_class=page_class)
        assert np.array_equal(engine.read("device", [target], page_class=page_class), written)
        others = engine.read("device", [target + 1, block - 1], page_class=page_class)
        assert not others.any(), "a field or a copy reaches into another block"
        engine.write("device", [block, target], np.zeros_like(others), page_class=page_class)
    engine.close()


def test_compressed_entries_lie_in_blocks_of_whole_entries():
    """Of DeepSeek-V4: each layer has a window; some have entries of 4 or 128 tokens and what is not compressed yet."""
    layout = ArenaLayout.from_config(V4, block_size=256, dtype="fp8_ds_mla")
    assert [group for group, _ in layout.groups] == [
        CacheGroup.full_attention(),
        CacheGroup.sliding_window(8).with_blocks(tokens=4),
        CacheGroup.sliding_window(128).with_blocks(tokens=64),
        CacheGroup.chunked_attention(128).with_blocks(tokens=8),
    ]
    shapes = {
        (field.layer, field.name): field.shape_in_block(layout.tokens(number))
        for number, (_, fields) in enumerate(layout.groups)
        for field in fields
    }
    assert [shapes[1, "window"], len(shapes)] == [(64, 584), 43 + 21 * 3 + 20 * 2]
    assert [shapes[2, name] for name in ("latent", "index", "open")] == [(64, 584), (64, 132), (4, 2560)]
    assert [shapes[3, name] for name in ("latent", "open")] == [(2, 584), (8, 1024)]
    with pytest.raises(
        LayoutError, match="block_size is 64, must be a multiple of 128, the tokens of a compressed ent"
    ):
        ArenaLayout.from_config(V4, block_size=64)
    entry = LayerField(0, "entry", (8,), "uint8", ratio=4)
    with pytest.raises(LayoutError, match="block_tokens is 6, must be a multiple of 4, the tokens of a compressed ent"):
        ArenaLayout(((CacheGroup.sliding_window(12).with_blocks(tokens=6), (entry,)),), 12)
    with pytest.raises(LayoutError, match="block_tokens is 6, must be a multiple of 4, an entry's tokens"):
        entry.num_bytes(6)
    for options, message in (({"ratio": 0}, "at least 1"), ({"ratio": 2, "is_state": True}, "1 for a state")):
        with pytest.raises(LayoutError, match=rf"ratio is \d, must be {message}"):
            LayerField(0, "entry", (8,), "uint8", **options)


def test_sizes_that_cannot_be_are_refused_by_name():
    with pytest.raises(LayoutError, match="block_size is 0, must be at least 1"):
        ArenaLayout.from_config(ModelMemory((LayerCache("full", 64),), "bfloat16"), block_size=0)
    with pytest.raises(LayoutError, match=r"groups are \(\), must be at least one"):
        ArenaLayout.from_config(ModelMemory((), "bfloat16"))


def test_layouts_that_cannot_be_are_refused_by_name():
    own = CacheGroup.full_attention().with_blocks(bytes=64)
    with pytest.raises(LayoutError, match="has 1 fields, must have at least one, and no bytes of its own"):
        ArenaLayout(((own, (KEYS,)),), 4)
    with pytest.raises(LayoutError, match="has 0 fields, must have at least one"):
        ArenaLayout(((CacheGroup.full_attention(), ()),), 4)
    with pytest.raises(LayoutError, match="dtype is 'float7', must be one of"):
        ArenaLayout(((CacheGroup.full_attention(), (LayerField(0, "keys", (1,), "float7"),)),), 4)
    with pytest.raises(LayoutError, match=r"blocks of the groups have \[128, 64\] bytes, must be equal"):
        _ = LAYOUT.bytes_per_block


def test_layouts_differ_in_their_fingerprints_if_a_byte_lies_elsewhere():
    (full, _), state = LAYOUT.groups
    others = [
        ArenaLayout(LAYOUT.groups, 8),
        ArenaLayout(LAYOUT.groups, 4, equal_blocks=True),
        ArenaLayout(((full, (LayerField(0, "keys", (8, 2), "float16"),)), state), 4),
        ArenaLayout(((full, (LayerField(0, "keys", (2, 8), "bfloat16"),)), state), 4),
        ArenaLayout(((CacheGroup.sliding_window(8), (KEYS,)), state), 4),
    ]
    assert len({layout.fingerprint() for layout in (LAYOUT, *others)}) == 1 + len(others)


def manager_of(layout: ArenaLayout, device: int = 4096, host: int = 4096) -> BlockManager:
    arena = Arena(device_bytes=device, host_bytes=host)
    return BlockManager(block_size=layout.block_size, groups=layout.cache_groups, arena=arena)


def test_pipeline_stages_of_several_page_classes_are_refused():
    """Their blocks have other bytes, so one id would lie in different extents."""
    more = [LayerField(layer, "state", (3, 5), "float32", is_state=True) for layer in (2, 3)]
    stage = ArenaLayout((LAYOUT.groups[0], (CacheGroup.recurrent(), (STATE, *more))), block_size=4)
    first, second, other = (
        StepExecutor(CacheEngine(layout, manager=manager_of(layout))) for layout in (LAYOUT, LAYOUT, stage)
    )
    assert len(ParallelExecutor([first, second]).executors) == 2
    with pytest.raises(InvalidArgumentError, match=r"32 and 32 of 128 bytes; 64 and 64 of 64 bytes on rank 0, "):
        ParallelExecutor([first, other])


def test_an_engine_takes_only_the_blocks_of_a_manager_that_fit_its_layout():
    full = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=3, head_size=8, dtype="float16")
    with pytest.raises(InvalidArgumentError, match="give its manager instead of numbers of blocks"):
        CacheEngine(LAYOUT, device_blocks=8)
    with pytest.raises(InvalidArgumentError, match="manager is given, must be None unless layout is an ArenaLayout"):
        CacheEngine(full, manager=manager_of(LAYOUT), device_blocks=8)
    with pytest.raises(LayoutError, match=r"blocks of \[1\] bytes, the layout of \[128, 64\]: give it the layout's"):
        CacheEngine(LAYOUT, manager=BlockManager(block_size=4, device_blocks=8))
    split = Arena.split(device_blocks=[4, 4])
    with pytest.raises(LayoutError, match="a fixed number of blocks of each class, must have an arena of extents"):
        CacheEngine(LAYOUT, manager=BlockManager(block_size=4, groups=LAYOUT.cache_groups, arena=split))
    odd = Arena(device_bytes=4096, extent_bytes=130)
    with pytest.raises(LayoutError, match="must be multiples of 16: set other extent_bytes"):
        CacheEngine(LAYOUT, manager=BlockManager(block_size=4, groups=LAYOUT.cache_groups, arena=odd))
    for given in (
        [torch.zeros(64, dtype=torch.uint8)],
        [torch.zeros(4096)],
        [torch.zeros(4096, dtype=torch.uint8)] * 2,
    ):
        with pytest.raises(LayoutError, match=r"the arena has 64 bytes|must be one arena"):
            CacheEngine(LAYOUT, manager=manager_of(LAYOUT), tensors=given)


def test_an_unknown_page_class_is_refused():
    engine = CacheEngine(LAYOUT, manager=manager_of(LAYOUT))
    for call in (
        lambda: engine.submit("copy", [(1, 2)], page_class=2),
        lambda: engine.read("device", [0], page_class=-1),
        lambda: engine.num_blocks("device", 7),
    ):
        with pytest.raises(MappingError, match=r"page_class is (2|-1|7), the engine has 2"):
            call()
    engine.close()


def test_a_cache_says_which_of_its_arguments_needs_equal_blocks():
    for name, value in {"device_blocks": 8, "host_blocks": 8, "max_device_blocks": 8}.items():
        given = {"device_bytes": 4096} if name != "device_blocks" else {}
        with pytest.raises(InvalidArgumentError, match=rf"{name} is .*, must be None for blocks of \[128, 64\] bytes"):
            KVCache(LAYOUT, **given, **{name: value})
    with pytest.raises(InvalidArgumentError, match="groups is given, must be None with an ArenaLayout"):
        KVCache(LAYOUT, device_bytes=4096, groups=LAYOUT.cache_groups)


def test_equal_blocks_have_numbers_and_stores_as_those_of_any_layout():
    layout = ArenaLayout(LAYOUT.groups, LAYOUT.block_size, equal_blocks=True)
    assert (layout.bytes_per_block, len(layout.pages)) == (128, 1)
    with KVCache(layout, device_blocks=8, host_bytes=1024) as cache:
        assert (cache.engine.num_blocks("device"), cache.engine.num_blocks("host")) == (8, 8)
        assert [tuple(tensor.shape) for tensor in cache.engine.tensors] == [(8, 4, 2, 8), (8, 3, 5)]


def test_equal_blocks_shrink_and_grow_with_their_memory():
    layout = ArenaLayout(LAYOUT.groups, LAYOUT.block_size, equal_blocks=True)
    size = layout.bytes_per_block
    with KVCache(layout, device_blocks=40, max_device_bytes=80 * size, watermark=0.0) as cache:
        assert (cache.elastic.num_blocks, cache.engine.num_blocks("device")) == (40, 80)
        sequence = cache.manager.allocate(4 * 30)
        cache.step().finish()
        table, keys = cache.manager.block_table(sequence), cache.engine.tensors[0]
        assert len(keys) == 80
        keys[table] = 3.0
        extent = cache.resize(8).extent
        assert 40 > extent > max(table)
        cache.step().finish()
        assert cache.elastic.num_blocks == extent
        assert (keys[table] == 3.0).all()
        cache.manager.free(sequence)
        cache.step().finish()
        assert cache.manager.defrag.progress().done
        assert cache.elastic.num_blocks == 8
        assert cache.resize(device_bytes=80 * size).blocks == cache.elastic.num_blocks == 80
        large = cache.manager.allocate(4 * 70)
        cache.step().finish()
        keys[cache.manager.block_table(large)] = 2.0
        with pytest.raises(InvalidArgumentError, match="blocks is 81, must be 1 to 80, the blocks of the tensors"):
            cache.resize(81)
        cache.manager.check()


def test_an_arena_of_the_callers_has_all_of_its_equal_blocks_for_a_resize():
    layout = ArenaLayout(LAYOUT.groups, LAYOUT.block_size, equal_blocks=True)
    arena = torch.zeros(10 * layout.bytes_per_block + 64, dtype=torch.uint8)
    with KVCache(layout, tensors=[arena], device_blocks=8) as cache:
        assert cache.engine.num_blocks("device") == 10
        assert cache.resize(10).blocks == 10
        cache.manager.check()


def test_an_arena_of_the_callers_is_used_as_it_is():
    arena = torch.zeros(8192, dtype=torch.uint8)
    with KVCache(LAYOUT, tensors=[arena]) as cache:
        cache.engine.tensors[0][1].fill_(1.0)
        assert arena.any()
        with pytest.raises(InvalidArgumentError, match="tensors share blocks with another open cache"):
            KVCache(LAYOUT, tensors=[arena])


def test_losses_of_each_class_are_named_with_it():
    """A copy of one class fails: the manager hears of pairs of that class, and only its sequence is lost."""
    streams = SimulatedStreams(0)
    manager = manager_of(LAYOUT)
    engine = CacheEngine(LAYOUT, manager=manager, streams=streams)
    executor = StepExecutor(engine)
    sequence = manager.allocate(10)
    executor.submit(decision := manager.take_decision())
    manager.complete(executor.wait(decision.ticket).ticket)
    manager.swap_out(sequence)
    decision = manager.take_decision()
    assert sorted(pairs.page_class for _, pairs in decision.transfers()) == [0, 1]
    streams._fail = 1.0
    executor.submit(decision)
    done = executor.wait(decision.ticket)
    assert sorted(pairs.page_class for pairs in done.lost) == [0, 1]
    lost = manager.complete(done.ticket, done.lost)
    assert lost.tolist() == [int(sequence)]
    manager.check()
    engine.close()


def test_an_arena_shrinks_and_grows_with_its_memory():
    with KVCache(LAYOUT, device_bytes=1 << 16, max_device_bytes=1 << 17, watermark=0.0) as cache:
        pool = cache.manager.pool()
        size = pool.block_stride * pool.per_extent
        assert cache.elastic.num_blocks == (1 << 16) // size
        sequence = cache.manager.allocate(4 * (pool.num_free - 2 * pool.per_extent))
        cache.step().finish()
        table, keys = cache.manager.block_table(sequence), cache.engine.tensors[0]
        keys[table] = 3.0
        progress = cache.resize(device_bytes=4 * size)
        assert progress.blocks == 4 < progress.extent
        cache.step().finish()
        assert cache.elastic.num_blocks == progress.extent
        assert (keys[table] == 3.0).all()
        cache.manager.free(sequence)
        cache.step().finish()
        assert cache.manager.defrag.progress().done
        assert cache.elastic.num_blocks == 4
        assert cache.resize(device_bytes=1 << 17).blocks == cache.elastic.num_blocks == (1 << 17) // size
        assert cache.manager.allocate(4 * (pool.num_free - 2 * pool.per_extent))
        for given, message in (
            (
                {"device_bytes": (1 << 17) + size},
                r"device_bytes is \d+, must be at most \d+, \d+ extents: see max_device",
            ),
            ({"blocks": 9}, "blocks is 9, must be None with several page classes: give device_bytes"),
            ({}, "blocks is None and device_bytes None, give one of them"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                cache.resize(**given)
        cache.manager.check()
