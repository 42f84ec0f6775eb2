"""Layouts: views show exactly the bytes of the blocks, and tensors that do not fit are refused with numbers."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard.engine import ops
from blockyard.errors import LayoutError
from blockyard.layout.kv import KINDS, KVLayout, interleave, probe_kind

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


# Memory order of the dimensions, and whether K and V have tensors of their own.
ANY_KINDS = [
    ("kv blocks tokens heads dim", 1),
    ("blocks kv tokens heads dim", 1),
    ("blocks kv heads tokens dim", 1),
    ("kv heads blocks tokens dim", 1),
    ("blocks tokens dim", 1),
    ("blocks tokens dim", 2),
    ("blocks heads tokens dim", 2),
    ("slots heads dim", 2),
    ("slots dim", 1),
    ("kv slots heads dim", 1),
    ("layers kv blocks tokens heads dim", 1),
    ("blocks layers kv tokens heads dim", 1),
    ("kv layers slots heads dim", 1),
    ("layers blocks tokens dim", 2),
    ("rocm", 2),
    ("flat", 1),
    ("blocks heads dim/x tokens x", 2),
    ("blocks tokens heads*dim", 2),
    ("blocks tokens heads*kv dim", 1),
    ("blocks kv*tokens*heads*dim", 1),
    ("layers kv blocks*tokens heads*dim", 1),
    ("heads*blocks tokens dim | tokens blocks heads dim", 2),
]
WORDS = {
    "kv_first": "kv blocks tokens heads dim",
    "blocks_first": "blocks kv tokens heads dim",
    "rocm": "blocks heads dim/x tokens x | blocks heads dim tokens",
    "flat": "kv blocks tokens*heads*dim",
}


def words_of(kind: str) -> list[list[str]]:
    """The dimensions of keys and of values, or of all tensors."""
    spelled = WORDS.get(kind, kind).replace("slots", "blocks*tokens")
    return [part.split() for part in spelled.split("|")]


@st.composite
def any_layouts(draw):
    """A layout of any kind with tensors of random bytes, perhaps padded, and how many blocks they hold."""
    kind, tensors_per_layer = draw(st.sampled_from(ANY_KINDS))
    x = draw(st.integers(1, 4)) if "x" in words_of(kind)[0] else 0
    layout = KVLayout(
        kind,
        num_layers=draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 3)) if "heads" in WORDS.get(kind, kind) else 1,
        head_size=draw(st.integers(1, 5)) * max(x, 1),
        dtype=draw(st.sampled_from(DTYPES)),
        tensors_per_layer=tensors_per_layer,
        x=x,
    )
    num_blocks = draw(st.integers(1, 5))
    shapes = [shape for shape, _ in layout.tensor_shapes(num_blocks)]
    pads = [[draw(st.sampled_from([0, 0, 0, 1, 2])) for _ in shape] for shape in shapes[:2]]
    tensors = []
    for index, shape in enumerate(shapes):
        padded = [size + pad for size, pad in zip(shape, pads[index % len(words_of(kind))], strict=True)]
        memory = torch.randint(0, 256, (int(np.prod(padded)) * layout.itemsize,), dtype=torch.uint8)
        whole = memory.view(getattr(torch, layout.dtype)).view(padded)
        tensors.append(whole[tuple(slice(size) for size in shape)])
    return layout, tensors, num_blocks


def model_rows(layout: KVLayout, tensors: list[torch.Tensor], num_blocks: int) -> np.ndarray:
    """The plain model: the dimension of the blocks in front, all others as they are, tensor after tensor."""
    sizes = {
        "blocks": num_blocks,
        "tokens": layout.block_size,
        "heads": layout.num_kv_heads,
        "dim": layout.head_size,
        "layers": layout.num_layers,
        "kv": 2,
        "x": layout.x,
        "dim/x": layout.head_size // max(layout.x, 1),
    }
    parts, orders = [], words_of(layout.kind)
    for index, tensor in enumerate(tensors):
        names = [name for word in orders[index % len(orders)] for name in word.split("*")]
        as_bytes = tensor.contiguous().view(torch.uint8).numpy().reshape(*(sizes[name] for name in names), -1)
        parts.append(np.moveaxis(as_bytes, names.index("blocks"), 0).reshape(num_blocks, -1))
    return np.concatenate(parts, axis=1)


def read_back(layout: KVLayout, tensors: list[torch.Tensor]) -> KVLayout:
    """What is read off the tensors."""
    heads = (
        layout.num_kv_heads if any("*heads" in word or "heads*" in word for word in words_of(layout.kind)[0]) else None
    )
    return KVLayout.from_tensors(
        tensors,
        kind=layout.kind,
        block_size=layout.block_size,
        num_kv_heads=heads,
        tensors_per_layer=layout.tensors_per_layer,
    )


@given(any_layouts())
def test_views_of_any_layout_show_the_bytes_of_a_row_in_order(drawn):
    layout, tensors, num_blocks = drawn
    read = read_back(layout, tensors)
    assert read.fingerprint() == layout.fingerprint()
    views = read.views(tensors)
    assert [view.shape[1] for view in views] == read.piece_sizes
    assert len(read.view_layers) == len(views)
    assert read.view_layers == sorted(read.view_layers)
    joined = np.concatenate([view.numpy() for view in views], axis=1)
    np.testing.assert_array_equal(joined, model_rows(read, tensors, num_blocks))
    assert read.bytes_per_block == layout.bytes_per_block == joined.shape[1]
    if read.split == 0:
        assert read == layout
    else:
        with pytest.raises(LayoutError, match="inside a block they must be"):
            layout.views(tensors)


@given(any_layouts(), st.data())
def test_blocks_go_to_rows_and_into_tensors_of_any_layout_and_nothing_else_changes(drawn, data):
    layout, tensors, num_blocks = drawn
    layout = read_back(layout, tensors)
    order = data.draw(st.permutations(range(num_blocks)))[: data.draw(st.integers(0, num_blocks))]
    rows = torch.randint(0, 256, (num_blocks, layout.bytes_per_block), dtype=torch.uint8)
    wanted = model_rows(layout, tensors, num_blocks)
    storages = [torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()) for tensor in tensors]
    padding = [storage.clone() for storage in storages]
    pairs = np.array(list(enumerate(order)), np.int64).reshape(-1, 2)
    ops.swap_blocks(layout.row_views(rows), layout.views(tensors), torch.from_numpy(pairs))
    wanted[pairs[:, 1]] = rows.numpy()[pairs[:, 0]]
    np.testing.assert_array_equal(model_rows(layout, tensors, num_blocks), wanted)
    for view in layout.views(tensors):
        view.zero_()
    for storage, before, tensor in zip(storages, padding, tensors, strict=True):
        flat = before.view(tensor.dtype)
        flat.as_strided(tensor.shape, tensor.stride()).zero_()
        assert torch.equal(storage, before)


def test_kinds_say_where_keys_and_values_stand():
    assert make().kv_dim_before_num_blocks is True
    assert make(kind="blocks_first").kv_dim_before_num_blocks is False
    assert make(kind="blocks tokens heads dim").kv_dim_before_num_blocks is None
    assert make(kind="layers kv slots heads dim").kv_dim_before_num_blocks is True


def shapes(words: str):
    """A backend's shape function, its dimensions in these words; numbers stand for themselves."""

    def shape_of(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        sizes = {"blocks": num_blocks, "tokens": block_size, "heads": num_kv_heads, "dim": head_size, "kv": 2}
        sizes |= {"slots": num_blocks * block_size, "dim/2": head_size // 2, "dim+1": head_size + 1}
        factors = [[sizes.get(name) or int(name) for name in word.split("*")] for word in words.split()]
        return tuple(int(np.prod(sizes)) for sizes in factors)

    return shape_of


# Sizes of 2 everywhere: only what follows an argument tells the dimensions apart.
PROBE = {"block_size": 2, "num_kv_heads": 2, "head_size": 2}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("kv blocks tokens heads dim", "kv_first"),
        ("blocks kv tokens heads dim", "blocks_first"),
        ("blocks kv heads tokens dim", "blocks kv heads tokens dim"),
        ("blocks tokens dim", "blocks tokens dim"),
        ("kv slots heads dim", "kv slots heads dim"),
        ("kv blocks tokens heads*dim", "kv blocks tokens heads*dim"),
        ("kv blocks tokens*heads*dim", "flat"),
        ("blocks heads dim tokens", "blocks heads dim tokens"),
    ],
)
def test_a_backend_is_asked_for_its_layout(words: str, kind: str):
    assert probe_kind(shapes(words), **PROBE) == kind


def test_a_backend_that_parts_the_elements_of_a_head_is_understood():
    asked = probe_kind(shapes("blocks heads dim/2 tokens 2"), block_size=16, num_kv_heads=4, head_size=64)
    assert asked == "blocks heads dim/x tokens x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("2 blocks kv tokens heads dim", r"dimensions \[0, 2\] .* must be one of size 2"),
        ("3 blocks tokens heads dim", r"dimensions \[0\] .* must be one of size 2"),
        ("kv blocks tokens heads dim+1", "dimension 4 .* depends on dim and more"),
        ("kv blocks heads dim", "needs dim, and blocks and tokens or slots"),
        ("blocks blocks tokens dim", "without repeats"),
    ],
)
def test_a_backend_whose_shapes_are_ambiguous_is_refused(words: str, message: str):
    with pytest.raises(LayoutError, match=message):
        probe_kind(shapes(words), **PROBE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "tokens heads dim blocks"}, "blocks must not be the innermost"),
        ({"kind": "blocks slots dim"}, "needs dim, and blocks and tokens or slots"),
        ({"kind": "blocks blocks tokens dim"}, "without repeats"),
        ({"kind": "blocks tokens dim"}, "num_kv_heads is 3, 'blocks tokens dim' has no heads"),
        ({"tensors_per_layer": 2}, "'kv_first' allows 1"),
        ({"kind": "blocks heads dim/x tokens"}, "needs dim"),
        ({"kind": "blocks heads dim/x dim tokens x"}, "needs dim"),
        ({"kind": "kv blocks tokens dim | kv blocks tokens dim"}, "layers and kv are not allowed"),
        ({"kind": "rocm", "head_size": 12}, "x is 8, must divide head_size, which is 12"),
        ({"kind": "rocm", "x": 3}, "x is 3, must divide head_size, which is 8"),
        ({"kind": "planes"}, "neither one of kv_first, blocks_first, rocm, flat nor made of the names layers"),
        ({"split": 3}, "split is 3, must be 0 to 2"),
    ],
)
def test_kinds_that_cannot_be_are_refused(changes: dict, message: str):
    with pytest.raises(LayoutError, match=message):
        make(**changes)


def test_slots_need_their_block_size():
    tensors = [torch.zeros(12, 3, 8)]
    with pytest.raises(LayoutError, match="pass block_size"):
        KVLayout.from_tensors(tensors, kind="slots heads dim")
    with pytest.raises(LayoutError, match=r"shape \[12, 3, 8\], slots heads dim wants \[10, 3, 8\]"):
        KVLayout.from_tensors(tensors, kind="slots heads dim", block_size=5)
    with pytest.raises(LayoutError, match="block_size is 5, tensor 0 has 4 tokens"):
        KVLayout.from_tensors([torch.zeros(2, 3, 4, 3, 8)], block_size=5)


def test_flat_blocks_need_their_block_size_and_have_one_head_unless_told():
    tensors = [torch.zeros(2, 5, 4 * 3 * 8)]
    with pytest.raises(LayoutError, match="pass block_size"):
        KVLayout.from_tensors(tensors, kind="flat")
    assert KVLayout.from_tensors(tensors, kind="flat", block_size=4) == make(
        kind="flat", num_layers=1, num_kv_heads=1, head_size=24, dtype="float32"
    )
    told = KVLayout.from_tensors(tensors, kind="flat", block_size=4, num_kv_heads=3)
    assert told == make(kind="flat", num_layers=1, dtype="float32")
    with pytest.raises(LayoutError, match=r"shape \[2, 5, 96\], flat wants \[2, 5, 95\]"):
        KVLayout.from_tensors(tensors, kind="flat", block_size=5)


def test_keys_and_values_of_rocm_are_read_off_their_tensors():
    # As vLLM's PagedAttention.split_kv_cache cuts `[2, blocks, tokens * heads * dim]`.
    flat = [torch.rand(2, 6, 16 * 2 * 32).half() for _ in range(3)]
    keys = [layer[0].view(6, 2, 32 // 8, -1, 8) for layer in flat]
    values = [layer[1].view(6, 2, 32, -1) for layer in flat]
    layout = KVLayout.from_tensors(interleave(keys, values), kind="rocm")
    assert layout == KVLayout("rocm", 3, 16, 2, 32, "float16")
    assert (layout.x, layout.tensors_per_layer, layout.view_layers) == (8, 2, [0, 0, 1, 1, 2, 2])
    whole = KVLayout.from_tensors(flat, kind="flat", block_size=16, num_kv_heads=2)
    # One memory, seen in two ways: the same bytes of a block, in the same order, under other fingerprints.
    ours, theirs = (
        torch.cat(one.views(many), dim=1) for one, many in ((layout, interleave(keys, values)), (whole, flat))
    )
    assert torch.equal(ours, theirs)
    assert layout.fingerprint() != whole.fingerprint() != replace(layout, x=4).fingerprint()
    with pytest.raises(LayoutError, match=r"tensor 1 has shape \[6, 2, 4, 16, 8\], rocm wants \[6, 2, 32, 16\]"):
        KVLayout.from_tensors([keys[0], keys[1]], kind="rocm")


def test_separate_keys_and_values_are_interleaved():
    keys, values = [torch.zeros(3, 4, 8), torch.ones(3, 4, 8)], [torch.full((3, 4, 8), 2.0), torch.full((3, 4, 8), 3.0)]
    tensors = interleave(keys, values)
    assert [float(tensor[0, 0, 0]) for tensor in tensors] == [0, 2, 1, 3]
    layout = KVLayout.from_tensors(tensors, kind="blocks tokens dim", tensors_per_layer=2)
    assert (layout.num_layers, layout.view_layers) == (2, [0, 0, 1, 1])
    with pytest.raises(LayoutError, match="2 tensors of keys and 1 of values"):
        interleave(keys, values[:1])


def test_two_blocks_are_ambiguous():
    with pytest.raises(LayoutError, match=r"\[2, 2, 4, 3, 8\] matches more than one layout"):
        KVLayout.from_tensors([torch.zeros(2, 2, 4, 3, 8)])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "got 0 tensors"),
        ([torch.zeros(2, 5, 4, 8)], "tensor 0 has 4 dimensions"),
        ([torch.zeros(3, 5, 4, 3, 8)], r"\[3, 5, 4, 3, 8\] matches no layout"),
        ([torch.zeros(2, 5, 4, 3, 8), torch.zeros(2, 6, 4, 3, 8)], r"tensor 1 has shape \[2, 6, 4, 3, 8\]"),
        ([torch.zeros(2, 5, 4, 3, 8), torch.zeros(2, 5, 4, 3, 8, dtype=torch.int32)], "tensor 1 is int32"),
        ([torch.zeros(1, 5, 4, 3, 8).expand(2, 5, 4, 3, 8)], "its blocks overlap"),
        ([torch.zeros(2, 1, 4, 3, 8).expand(2, 5, 4, 3, 8)], "its blocks overlap"),
        ([torch.zeros(2, 5, 4, 8, 3).transpose(3, 4)], "the innermost must be 1"),
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
    with pytest.raises(LayoutError, match="got 1 tensors, the layout has 2 layers in 2"):
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
        ({"kind": "heads_first"}, "'heads_first' is neither one of kv_first, blocks_first"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"head_size": -3}, "head_size is -3"),
        ({"dtype": "float7"}, "dtype is 'float7', must be one of"),
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
        {"kind": "blocks tokens heads dim"},
        {"kind": "kv slots heads dim"},
    ],
)
def test_fingerprints_of_different_layouts_differ(changes: dict):
    assert make().fingerprint() != make(**changes).fingerprint()


def test_fingerprint_is_the_same_in_every_process():
    code = (
        "from blockyard.layout.kv import KVLayout; print(KVLayout(kind='kv_first', num_layers=2, block_size=4, "
        "num_kv_heads=3, head_size=8, dtype='float16').fingerprint())"
    )
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert finished.stdout.strip() == make().fingerprint()
    assert make(itemsize=2).fingerprint() == make().fingerprint()
    # Stored blocks outlive the process: the value itself must not change by accident.
    assert make().fingerprint() == "7bd9ad59c7b07076317d99cced7fb03ab978883aaeb45e04f99aa2bbf8334910"


def test_fingerprints_tell_separate_tensors_from_one_but_not_padding():
    joint = make(kind="blocks tokens heads dim")
    assert joint.fingerprint() != make(kind="blocks tokens heads dim", tensors_per_layer=2).fingerprint()
    assert joint.fingerprint() == make(kind="blocks tokens heads dim", split=1).fingerprint()


SIZES = ["num_layers", "block_size", "num_kv_heads", "head_size", "itemsize", "tensors_per_layer"]


@pytest.mark.parametrize("name", SIZES)
def test_a_layout_of_numpy_integers_has_the_fingerprint_of_its_equal(name: str):
    plain = make()
    layout = make(**{name: np.int64(getattr(plain, name))})
    assert layout == plain
    assert (layout.fingerprint(), repr(layout)) == (plain.fingerprint(), repr(plain))


@pytest.mark.parametrize("value", [4096 / 32, "128", None])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_no_int_is_refused_by_name(name: str, value: object):
    with pytest.raises(LayoutError, match=f"^{name} is {value!r}, must be an int$"):
        make(**{name: value})
