"""Moves, exchanges, gathers and scatters against a plain numpy model: whole memories are compared."""

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard.engine import ops
from blockyard.engine.ops.fallback import BY_TORCH
from blockyard.layout.kv import KINDS, KVLayout

Op = Callable[..., None]
# Bytes of a row in units: plans of many bytes are shared among threads and go past the processor's caches.
SIZES = {"small": st.integers(1, 9), "large": st.integers(20_000, 30_000)}
CASES = ["op-small", "op-large", "torch calls"]


@st.composite
def memories(draw: st.DrawFn, blocks: int, size: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Views cut from one memory: rows side by side or caches after one another, with gaps that must not change."""
    unit = draw(st.sampled_from([1, 2, 8, 16]))
    widths = [unit * width for width in draw(st.lists(SIZES[size], min_size=1, max_size=3))]
    pad = unit * draw(st.integers(0, 3))
    if draw(st.booleans()):
        stride = sum(widths) + pad
        places = [(pad + sum(widths[:index]), stride) for index in range(len(widths))]
    else:
        reach = [blocks * (width + pad) for width in widths]
        places = [(pad + sum(reach[:index]), width + pad) for index, width in enumerate(widths)]
    num_bytes = pad + blocks * (sum(widths) + pad * len(widths))
    memory = torch.from_numpy(np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8))
    return memory, [memory.as_strided((blocks, w), (s, 1), o) for w, (o, s) in zip(widths, places, strict=True)]


def same_views(memory: torch.Tensor, views: list[torch.Tensor]) -> tuple[np.ndarray, list[np.ndarray]]:
    copied = memory.clone()
    return copied.numpy(), [copied.as_strided(v.shape, v.stride(), v.storage_offset()).numpy() for v in views]


@st.composite
def move_cases(draw: st.DrawFn, size: str) -> tuple[torch.Tensor, list[torch.Tensor], np.ndarray]:
    blocks = draw(st.integers(1, 14))
    targets = draw(st.lists(st.integers(0, blocks - 1), unique=True, max_size=blocks))
    kind = draw(st.sampled_from(["any", "rings", "shift"]))
    if kind == "rings":
        sources = draw(st.permutations(targets))
    elif kind == "shift":
        by = draw(st.integers(-3, 3))
        sources = [(target + by) % blocks for target in sorted(targets)]
        targets.sort()
    else:
        sources = [draw(st.integers(0, blocks - 1)) for _ in targets]
    memory, views = draw(memories(blocks, size))
    return memory, views, np.array(list(zip(sources, targets, strict=True)), np.int64).reshape(-1, 2)


@pytest.mark.parametrize(
    ("size", "through"),
    [("small", ops.move_blocks), ("large", ops.move_blocks), ("small", BY_TORCH.move)],
    ids=CASES,
)
@given(st.data())
def test_moves_are_made_as_if_all_were_read_first(size: str, through: Op, data: st.DataObject):
    memory, views, pairs = data.draw(move_cases(size))
    wanted, arrays = same_views(memory, views)
    for rows in arrays:
        rows[pairs[:, 1]] = rows[pairs[:, 0]].copy()
    through(views, torch.from_numpy(pairs))
    np.testing.assert_array_equal(memory.numpy(), wanted)


@pytest.mark.parametrize(
    ("size", "through"),
    [("small", ops.exchange_blocks), ("large", ops.exchange_blocks), ("small", BY_TORCH.exchange)],
    ids=CASES,
)
@given(st.data())
def test_exchanged_blocks_change_places_and_padding_is_skipped(size: str, through: Op, data: st.DataObject):
    blocks = data.draw(st.integers(1, 14))
    chosen = data.draw(st.permutations(range(blocks)))
    if data.draw(st.booleans()):
        chosen = sorted(chosen)[: blocks // 2] + sorted(chosen)[blocks // 2 :]
    count = data.draw(st.integers(0, blocks // 2))
    pairs = [[chosen[n], chosen[blocks // 2 + n]] for n in range(count)]
    for _ in range(data.draw(st.integers(0, 3))):
        pairs.insert(data.draw(st.integers(0, len(pairs))), [-1, -1])
    memory, views = data.draw(memories(blocks, size))
    wanted, arrays = same_views(memory, views)
    for rows in arrays:
        for one, other in pairs:
            if one >= 0:
                rows[[one, other]] = rows[[other, one]]
    through(views, torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
    np.testing.assert_array_equal(memory.numpy(), wanted)


@pytest.mark.parametrize(("size", "module"), [("small", ops), ("large", ops), ("small", BY_TORCH)], ids=CASES)
@given(st.data())
def test_blocks_are_gathered_into_rows_and_scattered_out_of_them(size: str, module: object, data: st.DataObject):
    through = (ops.gather_blocks, ops.scatter_blocks) if module is ops else (BY_TORCH.gather, BY_TORCH.scatter)
    blocks = data.draw(st.integers(1, 12))
    memory, views = data.draw(memories(blocks, size))
    width = sum(view.shape[1] for view in views)
    read = data.draw(st.lists(st.integers(0, blocks - 1), max_size=16))
    rows = torch.full((len(read), width), 7, dtype=torch.uint8)
    wanted, arrays = same_views(memory, views)
    through[0](views, rows, torch.tensor(read, dtype=torch.int64))
    np.testing.assert_array_equal(rows.numpy(), np.concatenate([array[read] for array in arrays], axis=1))
    np.testing.assert_array_equal(memory.numpy(), wanted)

    written = data.draw(st.lists(st.integers(0, blocks - 1), unique=True, max_size=blocks))
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (len(written), width), np.uint8))
    start = 0
    for array in arrays:
        array[written] = rows.numpy()[:, start : start + array.shape[1]]
        start += array.shape[1]
    through[1](rows, views, torch.tensor(written, dtype=torch.int64))
    np.testing.assert_array_equal(memory.numpy(), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_caches_keep_their_bits(kind, dtype):
    layout = KVLayout(kind=kind, num_layers=2, block_size=4, num_kv_heads=2, head_size=3, dtype=dtype)
    shape = layout.tensor_shape(6)
    size = int(np.prod(shape)) * layout.itemsize
    random = [torch.from_numpy(np.random.default_rng(n).integers(0, 256, size, np.uint8)) for n in range(2)]
    caches = [memory.view(getattr(torch, dtype)).view(shape) for memory in random]
    rows = torch.zeros((6, layout.bytes_per_block), dtype=torch.uint8)
    ops.gather_blocks(layout.views(caches), rows, torch.arange(6))
    ops.move_blocks(layout.views(caches), torch.tensor([[5, 0], [0, 1], [1, 2], [3, 3]]))
    ops.exchange_blocks(layout.views(caches), torch.tensor([[-1, -1], [4, 3]]))
    after = torch.zeros_like(rows)
    ops.gather_blocks(layout.views(caches), after, torch.arange(6))
    assert torch.equal(after, rows[[5, 0, 1, 4, 3, 5]])


def test_large_plans_are_shared_among_threads():
    src = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (512, 64 << 10), np.uint8))
    dst = torch.zeros_like(src)
    pairs = torch.from_numpy(np.column_stack([np.random.default_rng(n).permutation(512) for n in (1, 2)]))
    with mock.patch.object(torch, "get_num_threads", return_value=3):
        ops.swap_blocks([src], [dst], pairs)
    assert torch.equal(dst[pairs[:, 1]], src[pairs[:, 0]])
