"""Layouts: views show exactly the bytes of the blocks, and tensors that do not fit are refused with numbers."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard.errors import LayoutError
from blockyard.layout import KINDS, KVLayout

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"]

LAYOUTS = st.builds(
    KVLayout,
    kind=st.sampled_from(KINDS),
    num_layers=st.integers(1, 3),
    block_size=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    head_size=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)


def make(**changes) -> KVLayout:
    fields = {"kind": "kv_first", "num_layers": 2, "block_size": 4, "num_kv_heads": 3, "head_size": 8}
    return KVLayout(**{**fields, "dtype": "float16", **changes})


def caches(layout: KVLayout, num_blocks: int, *, pad: int = 0) -> list[torch.Tensor]:
    """Random caches; with `pad`, blocks stand that many elements further apart than they need to."""
    shape = layout.tensor_shape(num_blocks)
    piece = layout.block_size * layout.num_kv_heads * layout.head_size
    inner = (layout.num_kv_heads * layout.head_size, layout.head_size, 1)
    outer = (num_blocks * (piece + pad), piece + pad) if layout.kind == "kv_first" else (2 * piece + pad, piece)
    tensors = []
    for _ in range(layout.num_layers):
        memory = torch.randint(0, 256, (2 * num_blocks * (piece + pad) * layout.itemsize,), dtype=torch.uint8)
        typed = memory.view(getattr(torch, layout.dtype))
        tensors.append(typed.as_strided(shape, (*outer, *inner)))
    return tensors


def rows_of(layout: KVLayout, tensors: list[torch.Tensor], num_blocks: int) -> np.ndarray:
    """The plain model: for each layer K, then V, each as numpy lays out its elements."""
    parts = []
    for tensor in tensors:
        as_bytes = tensor.contiguous().view(torch.uint8).numpy()
        for half in range(2):
            chosen = as_bytes[half] if layout.kind == "kv_first" else as_bytes[:, half]
            parts.append(chosen.reshape(num_blocks, -1))
    return np.concatenate(parts, axis=1)


@given(LAYOUTS, st.integers(1, 5), st.integers(0, 3))
def test_views_show_the_bytes_of_a_row_in_order(layout: KVLayout, num_blocks: int, pad: int):
    tensors = caches(layout, num_blocks, pad=pad)
    views = layout.views(tensors)
    assert [view.shape[1] for view in views] == layout.piece_sizes
    joined = np.concatenate([view.numpy() for view in views], axis=1)
    assert joined.shape == (num_blocks, layout.bytes_per_block)
    np.testing.assert_array_equal(joined, rows_of(layout, tensors, num_blocks))


@given(LAYOUTS)
def test_views_share_memory_with_the_tensors(layout: KVLayout):
    tensors = caches(layout, 3)
    for view in layout.views(tensors):
        view.zero_()
    assert all(int(tensor.contiguous().view(torch.uint8).max()) == 0 for tensor in tensors)


@given(LAYOUTS)
def test_row_views_are_the_same_pieces_side_by_side(layout: KVLayout):
    rows = torch.randint(0, 256, (4, layout.bytes_per_block), dtype=torch.uint8)
    pieces = layout.row_views(rows)
    assert [piece.shape[1] for piece in pieces] == layout.piece_sizes
    assert torch.equal(torch.cat(pieces, dim=1), rows)
    assert pieces[0].data_ptr() == rows.data_ptr()


@given(LAYOUTS, st.integers(3, 6))
def test_a_layout_is_read_off_its_own_tensors(layout: KVLayout, num_blocks: int):
    assert KVLayout.from_tensors(caches(layout, num_blocks)) == layout
    assert KVLayout.from_tensors(caches(layout, 2), kind=layout.kind) == layout


@given(LAYOUTS)
def test_bytes_per_block_counts_all_layers(layout: KVLayout):
    tensors = caches(layout, 5)
    assert layout.bytes_per_block == sum(tensor.numel() * tensor.element_size() for tensor in tensors) // 5
    assert layout.num_blocks(tensors[0]) == 5


def test_two_blocks_are_ambiguous():
    with pytest.raises(LayoutError, match=r"\[2, 2, 4, 3, 8\] fits more than one layout"):
        KVLayout.from_tensors([torch.zeros(2, 2, 4, 3, 8)])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "0 were given"),
        ([torch.zeros(2, 5, 4, 8)], "tensor 0 has 4 dimensions"),
        ([torch.zeros(3, 5, 4, 3, 8)], r"\[3, 5, 4, 3, 8\] fits no layout"),
        ([torch.zeros(2, 5, 4, 3, 8), torch.zeros(2, 6, 4, 3, 8)], r"tensor 1 has shape \[2, 6, 4, 3, 8\]"),
        ([torch.zeros(2, 5, 4, 3, 8), torch.zeros(2, 5, 4, 3, 8, dtype=torch.int32)], "tensor 1 is int32"),
        ([torch.zeros(2, 5, 4, 3, 16)[..., :8]], "inside a block they must be"),
        ([torch.zeros(2, 5, 3, 4, 8).transpose(2, 3)], "inside a block they must be"),
        ([torch.zeros(1, 5, 4, 3, 8).expand(2, 5, 4, 3, 8)], "its blocks overlap"),
        ([torch.zeros(2, 1, 4, 3, 8).expand(2, 5, 4, 3, 8)], "its blocks overlap"),
        ([torch.zeros(5, 4, 4, 3, 8)[:, ::2]], "must lie side by side"),
        ([torch.zeros(2, 5, 4, 0, 8)], "num_kv_heads is 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: list[torch.Tensor], message: str):
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_tensors(tensors)


def test_keys_and_values_may_alternate_in_memory():
    memory = torch.arange(5 * 2 * 4 * 3 * 8, dtype=torch.float32).view(5, 2, 4, 3, 8)
    tensors = [memory.transpose(0, 1)]
    layout = KVLayout.from_tensors(tensors)
    assert layout.kind == "kv_first"
    keys, values = layout.views(tensors)
    assert torch.equal(torch.cat([keys, values], 1), memory.view(torch.uint8).view(5, -1))


def test_views_refuse_another_number_of_layers():
    with pytest.raises(LayoutError, match="1 tensors were given, the layout has 2 layers"):
        make().views(caches(make(num_layers=1), 3))


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(3, 7, dtype=torch.uint8),
        torch.zeros(3, make().bytes_per_block, dtype=torch.int8),
        torch.zeros(make().bytes_per_block, dtype=torch.uint8),
        torch.zeros(make().bytes_per_block, 3, dtype=torch.uint8).t(),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: torch.Tensor):
    with pytest.raises(LayoutError, match=rf"wanted uint8 \[blocks, {make().bytes_per_block}\]"):
        make().row_views(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "heads_first"}, "'heads_first' is not one of kv_first, blocks_first"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"head_size": -3}, "head_size is -3"),
        ({"dtype": "float7"}, "'float7' is not known"),
        ({"dtype": "float16", "itemsize": 4}, "itemsize is 4 bytes, float16 has 2"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict, message: str):
    with pytest.raises(LayoutError, match=message):
        make(**changes)


def test_an_unknown_dtype_works_with_its_itemsize():
    assert make(dtype="float7", itemsize=3).bytes_per_block == 2 * 2 * 4 * 3 * 8 * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "blocks_first"},
        {"num_layers": 3},
        {"block_size": 5},
        {"num_kv_heads": 4},
        {"head_size": 9},
        {"dtype": "bfloat16"},
    ],
)
def test_fingerprints_of_different_layouts_differ(changes: dict):
    assert make().fingerprint() != make(**changes).fingerprint()


def test_fingerprint_is_the_same_in_every_process():
    code = (
        "from blockyard.layout import KVLayout; print(KVLayout(kind='kv_first', num_layers=2, block_size=4, "
        "num_kv_heads=3, head_size=8, dtype='float16').fingerprint())"
    )
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert finished.stdout.strip() == make().fingerprint()
    assert make(itemsize=2).fingerprint() == make().fingerprint()
    # Stored blocks outlive the process: the value itself must not change by accident.
    assert make().fingerprint() == "7bd9ad59c7b07076317d99cced7fb03ab978883aaeb45e04f99aa2bbf8334910"
