"""What the ops refuse, with numbers, and that nothing has changed then: in Python and in the compiled library."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_calls import LISTS, arranged, caches_of, compiled, ids, model, pairs_of, way

from blockyard._core import Mapping
from blockyard.engine import ops
from blockyard.engine.engine import CacheEngine
from blockyard.engine.ops.library import op_library
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError
from blockyard.integrations.gaudi import CacheSwapUtils
from blockyard.integrations.gaudi.mover import cache_views
from blockyard.layout.grouped import GroupedLayout
from blockyard.layout.kv import KVLayout

CACHES = caches_of()
ROWS = torch.zeros((2, 72), dtype=torch.uint8)
TWO = ids(4, 1)
VIEWS_OF_ROWS = list(ROWS.split([24, 24, 24], dim=1))

OTHERS = caches_of(blocks=4)
GOOD = pairs_of([5, 0], [1, 3])

REFUSED = {
    ("swap", "a source out of range"): (
        CACHES,
        OTHERS,
        ids([1, 2], [6, 1]),
        MappingError,
        "entry 1: block 6 cannot be read",
    ),
    ("swap", "a negative source"): (CACHES, OTHERS, ids([-1, 2]), MappingError, "entry 0: block -1"),
    ("swap", "a target out of range"): (
        CACHES,
        OTHERS,
        ids([1, 4]),
        MappingError,
        "block 4 cannot be written, there are 4",
    ),
    ("swap", "a huge target"): (CACHES, OTHERS, ids([1, 1 << 40]), MappingError, "block 1099511627776"),
    ("swap", "a repeated target"): (CACHES, OTHERS, ids([1, 2], [3, 2]), MappingError, "block 2 is written twice"),
    ("swap", "narrow ids"): (CACHES, OTHERS, ids([1, 2], dtype=torch.int32), MappingError, r"wanted int64 \[n, 2\]"),
    ("swap", "triples"): (CACHES, OTHERS, ids([1, 2, 3]), MappingError, r"wanted int64 \[n, 2\]"),
    ("swap", "a flat mapping"): (CACHES, OTHERS, ids(1, 2), MappingError, r"wanted int64 \[n, 2\]"),
    ("swap", "fewer destinations"): (CACHES, OTHERS[:2], GOOD, LayoutError, "src holds 3 tensors, dst 2"),
    ("swap", "no tensors"): ([], [], GOOD, LayoutError, "src holds no tensors"),
    ("swap", "other widths"): (
        *(CACHES, [t[:, :23] for t in OTHERS], GOOD, LayoutError),
        r"src\[0\] has rows of 24 bytes, dst\[0\] of 23",
    ),
    ("swap", "another dtype"): (CACHES, [*OTHERS[:2], OTHERS[2].view(torch.int8)], GOOD, LayoutError, r"dst\[2\] "),
    ("swap", "more dimensions"): ([t.view(6, 4, 6) for t in CACHES], OTHERS, GOOD, LayoutError, r"src\[0\] "),
    ("swap", "columns"): (CACHES, [t.t() for t in caches_of(4, 24)], GOOD, LayoutError, r"dst\[0\] has strides"),
    ("swap", "rows that overlap"): (
        *(CACHES, [t.flatten().as_strided((4, 24), (12, 1)) for t in OTHERS], GOOD, LayoutError),
        "contiguous rows of 24 bytes",
    ),
    ("swap", "other numbers of blocks"): (
        CACHES,
        [*OTHERS[:2], OTHERS[2][:3]],
        GOOD,
        LayoutError,
        r"dst\[2\] has 3 blo",
    ),
    ("swap", "one destination twice"): (CACHES, [OTHERS[0], OTHERS[1], OTHERS[0]], GOOD, LayoutError, "share memory"),
    **{
        ("swap", name): (
            *(CACHES[:2], [OTHERS[0].as_strided((2, 24), (30, 1), start) for start in (0, second)]),
            *(ids([5, 0]), LayoutError, "share memory"),
        )
        for name, second in (("destinations that cross", 6), ("destinations that cross in their next row", 27))
    },
    ("swap", "one cache on both sides"): (
        *(CACHES, [CACHES[1][:4], *OTHERS[1:]], GOOD, LayoutError),
        "src and dst share memory: use copy_blocks",
    ),
    ("copy", "out of range"): (CACHES, ids([1, 6]), MappingError, "block 6 cannot be written, there are 6 blocks"),
    ("copy", "a repeated target"): (CACHES, ids([1, 2], [3, 2]), MappingError, "block 2 is written twice"),
    ("copy", "read and written"): (CACHES, ids([1, 2], [2, 3]), MappingError, "block 2 is both read"),
    ("copy", "onto itself"): (CACHES, ids([1, 1]), MappingError, "block 1 is both read"),
    ("copy", "one cache twice"): ([CACHES[0], CACHES[0]], GOOD, LayoutError, "share memory"),
    ("copy", "no tensors"): ([], GOOD, LayoutError, "caches holds no tensors"),
    ("move", "a source out of range"): (CACHES, ids([6, 1]), MappingError, "entry 0: block 6 cannot be read"),
    ("move", "a target out of range"): (CACHES, ids([1, 2], [1, -2]), MappingError, "entry 1: block -2 cannot be writ"),
    ("move", "a repeated target"): (CACHES, ids([1, 2], [3, 2]), MappingError, "block 2 is written twice"),
    ("move", "triples"): (CACHES, ids([1, 2, 3]), MappingError, r"wanted int64 \[n, 2\]"),
    ("move", "one cache twice"): ([CACHES[0], CACHES[0]], ids([1, 2]), LayoutError, "share memory"),
    ("exchange", "out of range"): (CACHES, ids([-1, -1], [6, 1]), MappingError, "entry 1: block 6 cannot be exchanged"),
    ("exchange", "half a padding"): (CACHES, ids([2, -1]), MappingError, "entry 0: block -1 cannot be exchanged"),
    ("exchange", "one source twice"): (CACHES, ids([1, 2], [1, 3]), MappingError, "block 1 is exchanged twice"),
    ("exchange", "a source and a target"): (CACHES, ids([1, 2], [2, 3]), MappingError, "block 2 is exchanged twice"),
    ("exchange", "with itself"): (CACHES, ids([3, 3]), MappingError, "block 3 is exchanged twice"),
    ("exchange", "narrow ids"): (CACHES, ids([1, 2], dtype=torch.int32), MappingError, r"wanted int64 \[n, 2\]"),
    ("exchange", "no caches"): ([], ids([1, 2]), LayoutError, "caches holds no tensors"),
    ("gather", "out of range"): (CACHES, ROWS, ids(1, 6), MappingError, "entry 1: block 6 cannot be read"),
    ("gather", "fewer blocks than rows"): (CACHES, ROWS, ids(1), MappingError, "1 blocks are named, there are 2 rows"),
    ("gather", "pairs"): (CACHES, ROWS, ids([1, 2]), MappingError, r"wanted int64 \[n\]"),
    ("gather", "narrow rows"): (CACHES, ROWS[:, :71], TWO, LayoutError, "rows have 71 bytes, a block of all caches ha"),
    ("gather", "floats"): (CACHES, ROWS.float(), TWO, LayoutError, r"rows\[0\] "),
    ("gather", "rows of the caches"): (VIEWS_OF_ROWS, ROWS, ids(0, 1), LayoutError, "caches and rows share memory"),
    ("scatter", "out of range"): (ROWS, CACHES, ids(6, 1), MappingError, "entry 0: block 6 cannot be written"),
    ("scatter", "a repeated block"): (ROWS, CACHES, ids(1, 1), MappingError, "block 1 is written twice"),
    ("scatter", "more blocks than rows"): (ROWS, CACHES, ids(1, 2, 3), MappingError, "3 blocks are named, there are"),
    ("scatter", "wide rows"): (ROWS, CACHES[:2], TWO, LayoutError, "rows have 72 bytes, a block of all caches has 48"),
    ("scatter", "one cache twice"): (ROWS, [*CACHES[:2], CACHES[0]], TWO, LayoutError, "share memory"),
    ("scatter", "rows of the caches"): (ROWS, VIEWS_OF_ROWS, ids(0, 1), LayoutError, "rows and caches share memory"),
}


def tensors_of(arguments: list[object]) -> list[torch.Tensor]:
    return [tensor for entry in arguments for tensor in (entry if isinstance(entry, list) else [entry])]


@pytest.mark.parametrize("through", ["op", "torch calls", "compiled"])
@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_a_refused_op_changes_nothing(case: tuple[str, str], through: str):
    *arguments, error, message = REFUSED[case]
    kept = [tensor.clone() for tensor in tensors_of(arguments)]
    with pytest.raises(error, match=message):
        way(case[0], through)(*arguments)
    assert all(torch.equal(now, before) for now, before in zip(tensors_of(arguments), kept, strict=True))


@pytest.mark.parametrize(
    "case", [case for case, row in REFUSED.items() if case[0] == "swap" and row[3] is LayoutError and row[0]]
)
def test_views_that_do_not_fit_are_not_bound(case: tuple[str, str]):
    src, dst, *_ = REFUSED[case]
    if case[1] == "other numbers of blocks":
        with pytest.raises(MappingError, match="up to block 3 does not fit caches of 3 blocks"):
            ops.bind(src, dst)(Mapping([[1, 3]], src_blocks=6, dst_blocks=4, rule="swap"))
    else:
        with pytest.raises((InvalidArgumentError, TypeError)):
            ops.bind(src, dst)


@pytest.mark.parametrize("name", LISTS)
def test_the_compiled_library_refuses_tensors_that_are_all_on_the_cpu(name: str):
    sides = {"swap": "src nor dst", "gather": "caches nor rows", "scatter": "rows nor caches"}
    message = f"neither {sides[name]} is on" if name in sides else "caches are not on"
    with pytest.raises(LayoutError, match=f"{message} a CUDA device"):
        compiled(name)(*good(name))


STEPS = {
    "out of range": ([[0, 6]], [0, 1], "entry 0: block 6 cannot be written, there are 6 blocks"),
    "a negative id": ([[0, 1], [-2, 1]], [0, 2], "entry 1: block -2 cannot be read"),
    "never put back": ([[0, -1], [1, 0]], [0, 2], "step 0 is not put back"),
    "put back in another group": ([[0, -1], [1, 0], [-1, 1]], [0, 2, 3], "step 0 is not put back"),
    "put back too late": ([[0, -1], *[[1, 2]] * 512, [-1, 1]], [0, 514], "step 0 is not put back"),
    "set aside twice": ([[0, -1], [1, -1], [-1, 2], [-1, 3]], [0, 4], "step 1 has nothing set aside"),
    "nothing set aside": ([[-1, 1]], [0, 1], "step 0 has nothing set aside"),
    "from aside to aside": ([[-1, -1]], [0, 1], "step 0 has nothing set aside"),
    "no starts": ([[0, 1]], [], "starts end at -1"),
    "a late first start": ([[0, 1]], [1], "start 0 is 1"),
    "starts that fall": ([[0, 1], [2, 3]], [0, 2, 1], "start 2 is 1"),
    "an empty group": ([[0, 1]], [0, 0, 1], "start 1 is 0"),
    "starts beyond the steps": ([[0, 1]], [0, 2], "start 1 is 2"),
    "starts that end early": ([[0, 1], [2, 3]], [0, 1], "starts end at 1, there are 2"),
    "triples": ([[0, 1, 2]], [0, 1], r"wanted int64 \[n, 2\]"),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_compiled_library_refuses_steps_that_would_leave_the_caches_or_a_launch(case: str):
    if not op_library().loaded:
        pytest.skip(op_library().explain())
    steps, starts, message = STEPS[case]
    with pytest.raises(RuntimeError, match=r"mapping: .*" + message):
        torch.ops.blockyard.run_steps(CACHES, torch.tensor(steps), torch.tensor(starts, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"mapping: steps have .* wanted int64"):
        torch.ops.blockyard.run_steps(CACHES, torch.tensor(steps, dtype=torch.int32), torch.tensor([0]))


@pytest.mark.parametrize("count", [0, 1, 2, 512, 513, 1025, 3000])
def test_the_compiled_library_takes_the_steps_of_every_mapping(count: int):
    ring = np.column_stack((np.arange(count), np.roll(np.arange(count), 1)))
    for rule, pairs in (("move", ring), ("exchange", ring[: count // 2 * 2 : 2]), ("copy", ring[:0])):
        with pytest.raises(LayoutError, match="caches are not on a CUDA device"):
            compiled(rule)(caches_of(1, count + 1, 1), torch.from_numpy(pairs))


def test_wrong_widths_are_refused_without_bytes():
    with torch.device("meta"), pytest.raises(LayoutError, match="rows have 7 bytes, a block of all caches has 9"):
        torch.ops.blockyard.gather_blocks(
            [torch.empty((4, 9), dtype=torch.uint8)], torch.empty((2, 7), dtype=torch.uint8), torch.empty(2)
        )


# ---- memory that is shared behind torch's back ----


@st.composite
def windows(draw: st.DrawFn, buffer: np.ndarray, widths: list[int], blocks: int) -> list[torch.Tensor]:
    """Views anywhere in one buffer, each a storage of its own."""
    views = []
    for width in widths:
        stride = width + draw(st.sampled_from([0, 0, 3, sum(widths)]))
        reach = (blocks - 1) * stride + width
        start = draw(st.integers(0, len(buffer) - reach))
        part = np.lib.stride_tricks.as_strided(buffer[start:], (blocks, width), (stride, 1))
        views.append(torch.from_numpy(part))
    return views


@pytest.mark.parametrize("through", ["op", "torch calls"])
@pytest.mark.parametrize("name", LISTS)
@given(st.data())
def test_storages_over_one_buffer_are_refused_or_every_byte_is_right(name: str, through: str, data: st.DataObject):
    widths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    blocks, size = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([240, 2000]))
    buffer = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    at = data.draw(st.permutations(range(blocks)))
    whole = list(zip(range(blocks), at, strict=True))
    apart = list(zip(at[::2], at[1::2], strict=False))
    caches = data.draw(windows(buffer, widths, blocks))
    more = data.draw(windows(buffer, widths if name == "swap" else [sum(widths)], blocks))
    arguments, read, written, pairs = arranged(name, caches, more, apart if name in {"copy", "exchange"} else whole)
    before, wanted = buffer.copy(), buffer.copy()

    def mirrored(view: torch.Tensor) -> np.ndarray:
        start = view.data_ptr() - buffer.ctypes.data
        return np.lib.stride_tricks.as_strided(wanted[start:], tuple(view.shape), tuple(view.stride()))

    model(name, [mirrored(view) for view in read], [mirrored(view) for view in written], pairs)
    try:
        way(name, through)(*arguments)
    except LayoutError:
        np.testing.assert_array_equal(buffer, before)
    else:
        np.testing.assert_array_equal(buffer, wanted)


def test_the_compiled_library_sees_two_storages_over_one_buffer():
    memory = np.zeros(4096, dtype=np.uint8)
    one, other = (torch.from_numpy(memory[start : start + 2048].reshape(8, 256)) for start in (0, 1024))
    with pytest.raises(LayoutError, match="src and dst share memory"):
        compiled("swap")([one], [other], ids([4, 1]))
    with pytest.raises(LayoutError, match="share memory"):
        compiled("copy")([one, other], ids([4, 1]))
    with pytest.raises(LayoutError, match="share memory"):
        compiled("gather")([one], other, torch.arange(8))


# ---- tensors without bytes ----


def good(name: str) -> list[object]:
    """Arguments that an op takes."""
    return {
        "swap": [caches_of(), caches_of(blocks=4), ids([5, 0], [1, 3])],
        "gather": [caches_of(), ROWS.clone(), TWO],
        "scatter": [ROWS.clone(), caches_of(), TWO],
    }.get(name, [caches_of(), ids([5, 0], [1, 3])])


@pytest.mark.parametrize(("name", "place"), [(name, place) for name in LISTS for place in range(LISTS[name] + 1)])
@pytest.mark.parametrize("all_but", [False, True], ids=["alone", "all others"])
def test_a_call_with_some_tensors_on_the_meta_device_is_refused(name: str, place: int, all_but: bool):
    arguments = good(name)
    for at, entry in enumerate(arguments):
        if (at == place) != all_but:
            arguments[at] = [view.to("meta") for view in entry] if isinstance(entry, list) else entry.to("meta")
    kept = [tensor.clone() for tensor in tensors_of(arguments)]
    for op in (getattr(ops, f"{name}_blocks"), getattr(torch.ops.blockyard, f"{name}_blocks")):
        with pytest.raises((LayoutError, MappingError), match="meta"):
            op(*arguments)
    real = [(now, before) for now, before in zip(tensors_of(arguments), kept, strict=True) if not now.is_meta]
    assert all(torch.equal(now, before) for now, before in real)


@pytest.mark.parametrize("name", LISTS)
def test_a_call_on_the_meta_device_alone_passes(name: str):
    arguments = good(name)
    for at, entry in enumerate(arguments):
        arguments[at] = [view.to("meta") for view in entry] if isinstance(entry, list) else entry.to("meta")
    getattr(ops, f"{name}_blocks")(*arguments)


# ---- autograd ----


@pytest.mark.parametrize("through", ["op", "torch.ops", "torch calls"])
@pytest.mark.parametrize("name", LISTS)
def test_a_backward_pass_that_saved_what_an_op_changed_fails(name: str, through: str):
    layout = KVLayout("kv_first", num_layers=2, block_size=1, num_kv_heads=1, head_size=2, dtype="float32")
    cache = [torch.rand(layout.tensor_shape(6)) for _ in range(2)]
    views, size = layout.views(cache), layout.bytes_per_block
    rows = torch.zeros((2, size), dtype=torch.uint8)
    arguments = {
        "swap": [layout.row_views(rows), views, ids([0, 3])],
        "gather": [views, rows, ids(2, 3)],
        "scatter": [rows, views, ids(2, 3)],
    }.get(name, [views, ids([0, 3])])
    saved = [rows.view(torch.float32)] if name == "gather" else cache
    weights = [torch.ones_like(tensor, requires_grad=True) for tensor in saved]
    results = [(weight * tensor).sum() for weight, tensor in zip(weights, saved, strict=True)]
    call = getattr(torch.ops.blockyard, f"{name}_blocks") if through == "torch.ops" else way(name, through)
    call(*arguments)
    for result in results:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


def test_what_an_op_only_reads_can_be_used_by_a_backward_pass():
    source, target = torch.rand(4, 8), torch.rand(4, 8)
    weight = torch.ones_like(source, requires_grad=True)
    result = (weight * source).sum()
    ops.swap_blocks([source.view(torch.uint8)], [target.view(torch.uint8)], ids([0, 1]))
    result.backward()
    assert torch.equal(weight.grad, source)


@pytest.mark.parametrize("name", LISTS)
def test_inference_tensors_have_no_version_and_are_changed(name: str):
    with torch.inference_mode():
        getattr(ops, f"{name}_blocks")(*good(name))


def test_tensors_that_require_grad_are_refused_as_caches():
    layout = KVLayout("kv_first", num_layers=1, block_size=1, num_kv_heads=1, head_size=2, dtype="float32")
    cache = torch.rand(layout.tensor_shape(6), requires_grad=True)
    with pytest.raises(LayoutError, match=r"tensor 0 requires grad.*detach"):
        CacheEngine(layout, device_blocks=6, host_blocks=1, tensors=[cache])
    with pytest.raises(LayoutError, match="requires grad"):
        cache_views([cache[0]], 1)
    layout.views([cache.detach()])


# ---- one tensor for two layers ----

TWICE = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


@pytest.mark.parametrize("shift", [0, 1], ids=["the same", "overlapping"])
def test_one_tensor_for_two_layers_is_refused_when_it_is_given(shift: int):
    elements = int(np.prod(TWICE.tensor_shape(6)))
    memory = np.zeros(elements + 1, dtype=np.float32)
    # Not one storage: torch alone could not tell.
    layers = [torch.from_numpy(memory[at : at + elements]).view(TWICE.tensor_shape(6)) for at in (0, shift)]
    keys = [layer[0].flatten(0, 1) for layer in layers]
    groups = GroupedLayout((("a", replace(TWICE, num_layers=1)), ("b", replace(TWICE, num_layers=1))))
    for refused in (
        lambda: TWICE.views(layers),
        lambda: TWICE.check(layers),
        lambda: KVLayout.from_tensors(layers),
        lambda: groups.views(layers),
        lambda: CacheEngine(TWICE, device_blocks=6, host_blocks=1, tensors=layers),
        lambda: CacheEngine(groups, device_blocks=6, host_blocks=1, tensors=layers),
        lambda: cache_views([(key, None) for key in keys], 4),
        lambda: CacheSwapUtils([(keys[0], None), (keys[1], None)], 4),
    ):
        with pytest.raises(LayoutError, match="share memory"):
            refused()
