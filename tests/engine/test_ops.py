"""The copy ops against a plain numpy model: whole memories are compared, and an error leaves them as they were."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard._core import Mapping
from blockyard.engine import ops
from blockyard.engine.ops import fallback
from blockyard.engine.ops.compiled import named
from blockyard.engine.ops.library import op_library
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError
from blockyard.layout.kv import KINDS, KVLayout

Op = Callable[..., None]
SWAP = torch.ops.blockyard.swap_blocks.default
COPY = torch.ops.blockyard.copy_blocks.default


@dataclass
class Place:
    """Where one view lies in its memory, in bytes."""

    memory: torch.Tensor
    offset: int
    stride: int
    width: int
    blocks: int

    def view(self) -> torch.Tensor:
        return self.memory.as_strided((self.blocks, self.width), (self.stride, 1), self.offset)

    def row(self, memory: np.ndarray, block: int) -> np.ndarray:
        start = self.offset + block * self.stride
        return memory[start : start + self.width]


@st.composite
def places(draw: st.DrawFn, widths: list[int], blocks: int) -> list[Place]:
    """Views side by side in one memory, as rows hold them, or each in a memory of its own; gaps are between rows."""
    step = draw(st.sampled_from([1, 2, 4, 8, 16]))
    pad, offset = (draw(st.integers(0, 3)) * step for _ in range(2))
    if draw(st.booleans()):
        stride = sum(widths) + pad
        memory = _random_bytes(offset + blocks * stride)
        starts = [offset + sum(widths[:index]) for index in range(len(widths))]
        return [Place(memory, start, stride, width, blocks) for start, width in zip(starts, widths, strict=True)]
    return [Place(_random_bytes(offset + blocks * (w + pad)), offset, w + pad, w, blocks) for w in widths]


def _random_bytes(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, np.uint8))


UNITS = st.sampled_from([1, 2, 4, 8, 16])
_DRAWN = {
    "small": st.tuples(UNITS, st.lists(st.integers(1, 40), min_size=1, max_size=4)),
    # Plans of many bytes are shared among threads and go past the processor's caches.
    "large": st.tuples(UNITS, st.lists(st.integers(20_000, 30_000), min_size=1, max_size=2)),
}
WIDTHS = {size: drawn.map(lambda drawn: [drawn[0] * width for width in drawn[1]]) for size, drawn in _DRAWN.items()}


@st.composite
def mappings(draw: st.DrawFn, src_blocks: int, dst_blocks: int) -> np.ndarray:
    """Scattered pairs, runs, or both: some sorted destinations take sources that often follow one another."""
    targets = draw(st.lists(st.integers(0, dst_blocks - 1), unique=True, max_size=dst_blocks))
    if draw(st.booleans()):
        targets.sort()
    first = draw(st.integers(0, src_blocks - 1))
    runs = st.sampled_from([(first + target) % src_blocks for target in range(dst_blocks)])
    sources = [draw(st.integers(0, src_blocks - 1) | runs) for _ in targets]
    return np.array(list(zip(sources, targets, strict=True)), np.int64).reshape(-1, 2)


def expected_memories(src: list[Place], dst: list[Place], pairs: np.ndarray) -> list[np.ndarray]:
    # Views that share a memory change one array; it is listed once for each of them.
    before = {id(place.memory): place.memory.numpy().copy() for place in src}
    after = {id(place.memory): place.memory.numpy().copy() for place in dst}
    for source, target in zip(src, dst, strict=True):
        for a, b in pairs.tolist():
            target.row(after[id(target.memory)], b)[:] = source.row(before[id(source.memory)], a)
    return [after[id(place.memory)] for place in dst]


def assert_memories(dst: list[Place], expected: list[np.ndarray]) -> None:
    for place, wanted in zip(dst, expected, strict=True):
        np.testing.assert_array_equal(place.memory.numpy(), wanted)


SWAPS: dict[str, Op] = {"op": ops.swap_blocks, "torch calls": fallback.BY_TORCH.swap}
COPIES: dict[str, Op] = {"op": ops.copy_blocks, "torch calls": fallback.BY_TORCH.copy}


@pytest.mark.parametrize(("size", "through"), [("small", "op"), ("large", "op"), ("small", "torch calls")])
@given(st.data())
def test_swap_changes_the_mapped_blocks_alone(size: str, through: str, data: st.DataObject):
    src_blocks, dst_blocks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    widths = data.draw(WIDTHS[size])
    src, dst = data.draw(places(widths, src_blocks)), data.draw(places(widths, dst_blocks))
    pairs = data.draw(mappings(src_blocks, dst_blocks))
    wanted, kept = expected_memories(src, dst, pairs), [place.memory.clone() for place in src]
    SWAPS[through]([p.view() for p in src], [p.view() for p in dst], torch.from_numpy(pairs))
    assert_memories(dst, wanted)
    assert_memories(src, [memory.numpy() for memory in kept])


@pytest.mark.parametrize(("size", "through"), [("small", "op"), ("large", "op"), ("small", "torch calls")])
@given(st.data())
def test_copy_changes_the_mapped_blocks_alone(size: str, through: str, data: st.DataObject):
    blocks = data.draw(st.integers(2, 14))
    caches = data.draw(places(data.draw(WIDTHS[size]), blocks))
    drawn = data.draw(mappings(blocks, blocks))
    pairs = drawn[~np.isin(drawn[:, 0], drawn[:, 1])]
    wanted = expected_memories(caches, caches, pairs)
    COPIES[through]([p.view() for p in caches], torch.from_numpy(pairs))
    assert_memories(caches, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_caches_keep_their_bits_through_rows(kind, dtype):
    layout = KVLayout(kind=kind, num_layers=3, block_size=4, num_kv_heads=2, head_size=5, dtype=dtype)
    shape = layout.tensor_shape(7)
    random = [_random_bytes(int(np.prod(shape)) * layout.itemsize + layer) for layer in range(3)]
    caches = [memory[layer:].clone().view(getattr(torch, dtype)).view(shape) for layer, memory in enumerate(random)]
    before = [cache.view(torch.uint8).clone() for cache in caches]
    rows = torch.zeros((5, layout.bytes_per_block), dtype=torch.uint8)
    ops.swap_blocks(layout.views(caches), layout.row_views(rows), torch.tensor([[6, 0], [2, 4], [3, 2]]))
    ops.swap_blocks(layout.row_views(rows), layout.views(caches), torch.tensor([[0, 1], [4, 5], [2, 0]]))
    for cache, old in zip(caches, before, strict=True):
        by_block = [t.transpose(0, 1) if kind == "kv_first" else t for t in (cache.view(torch.uint8), old)]
        assert torch.equal(by_block[0], by_block[1][[3, 6, 2, 3, 4, 2, 6]])


# ---- errors ----


def caches_of(width: int = 24, blocks: int = 6, count: int = 3) -> list[torch.Tensor]:
    return [_random_bytes(width * blocks + n)[n:].view(blocks, width) for n in range(count)]


def one(pairs: list[list[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(pairs, dtype=dtype)


SRC, DST = caches_of(), caches_of(blocks=4)
GOOD = one([[5, 0], [1, 3]])

BAD_SWAPS = {
    "a source out of range": (SRC, DST, one([[1, 2], [6, 1]]), MappingError, "entry 1: block 6 is to be read"),
    "a negative source": (SRC, DST, one([[-1, 2]]), MappingError, "entry 0: block -1"),
    "a target out of range": (SRC, DST, one([[1, 4]]), MappingError, "block 4 is to be written, there are 4 blocks"),
    "a huge target": (SRC, DST, one([[1, 1 << 40]]), MappingError, "block 1099511627776"),
    "a repeated target": (SRC, DST, one([[1, 2], [3, 2]]), MappingError, "block 2 is written twice"),
    "narrow ids": (SRC, DST, one([[1, 2]], torch.int32), MappingError, r"wanted int64 \[n, 2\]"),
    "triples": (SRC, DST, one([[1, 2, 3]]), MappingError, r"wanted int64 \[n, 2\]"),
    "a flat mapping": (SRC, DST, torch.tensor([1, 2]), MappingError, r"wanted int64 \[n, 2\]"),
    "fewer destinations": (SRC, DST[:2], GOOD, LayoutError, "src holds 3 tensors, dst 2"),
    "no tensors": ([], [], GOOD, LayoutError, "src holds no tensors"),
    "other widths": (
        SRC,
        [t[:, :23] for t in DST],
        GOOD,
        LayoutError,
        r"src\[0\] has rows of 24 bytes, dst\[0\] of 23",
    ),
    "another dtype": (SRC, [*DST[:2], DST[2].view(torch.int8)], GOOD, LayoutError, r"dst\[2\] "),
    "more dimensions": ([t.view(6, 4, 6) for t in SRC], DST, GOOD, LayoutError, r"src\[0\] "),
    "columns": (SRC, [t.t() for t in caches_of(4, 24)], GOOD, LayoutError, r"dst\[0\] has strides"),
    "rows that overlap": (
        SRC,
        [t.flatten().as_strided((4, 24), (12, 1)) for t in DST],
        GOOD,
        LayoutError,
        "contiguous rows of 24 bytes",
    ),
    "other numbers of blocks": (SRC, [*DST[:2], DST[2][:3]], GOOD, LayoutError, r"dst\[2\] has 3 blocks"),
    "one destination twice": (SRC, [DST[0], DST[1], DST[0]], GOOD, LayoutError, "share memory"),
    "destinations that cross": (
        SRC[:2],
        [DST[0].as_strided((2, 24), (30, 1), start) for start in (0, 6)],
        one([[5, 0]]),
        LayoutError,
        "share memory",
    ),
    "destinations that cross in their next row": (
        SRC[:2],
        [DST[0].as_strided((2, 24), (30, 1), start) for start in (0, 27)],
        one([[5, 0]]),
        LayoutError,
        "share memory",
    ),
    "one cache on both sides": (SRC, [SRC[1][:4], *DST[1:]], GOOD, LayoutError, "src and dst share memory"),
    "the same caches": (SRC, SRC, GOOD, LayoutError, "src and dst share memory: use copy_blocks"),
}
BAD_COPIES = {
    "out of range": (SRC, one([[1, 6]]), MappingError, "block 6 is to be written, there are 6 blocks"),
    "a repeated target": (SRC, one([[1, 2], [3, 2]]), MappingError, "block 2 is written twice"),
    "read and written": (SRC, one([[1, 2], [2, 3]]), MappingError, "block 2 is both read"),
    "onto itself": (SRC, one([[1, 1]]), MappingError, "block 1 is both read"),
    "one cache twice": ([SRC[0], SRC[0]], GOOD, LayoutError, "share memory"),
    "no tensors": ([], GOOD, LayoutError, "caches holds no tensors"),
}


def compiled(op: torch._ops.OpOverload) -> Op:
    """Call the compiled library's implementation; what it refuses, it refuses before it looks for a device."""

    def call(*args: object) -> None:
        if not op_library().loaded:
            pytest.skip(op_library().explain())
        try:
            op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args)
        except RuntimeError as error:
            raise named(error) from error

    return call


@pytest.mark.parametrize("through", [*SWAPS, "compiled"])
@pytest.mark.parametrize("case", BAD_SWAPS)
def test_a_refused_swap_changes_nothing(case: str, through: str):
    src, dst, pairs, error, message = BAD_SWAPS[case]
    kept = [tensor.clone() for tensor in (*src, *dst)]
    with pytest.raises(error, match=message):
        {**SWAPS, "compiled": compiled(SWAP)}[through](src, dst, pairs)
    assert all(torch.equal(now, before) for now, before in zip((*src, *dst), kept, strict=True))


@pytest.mark.parametrize("through", [*COPIES, "compiled"])
@pytest.mark.parametrize("case", BAD_COPIES)
def test_a_refused_copy_changes_nothing(case: str, through: str):
    caches, pairs, error, message = BAD_COPIES[case]
    kept = [tensor.clone() for tensor in caches]
    with pytest.raises(error, match=message):
        {**COPIES, "compiled": compiled(COPY)}[through](caches, pairs)
    assert all(torch.equal(now, before) for now, before in zip(caches, kept, strict=True))


def test_the_compiled_library_refuses_tensors_that_are_all_on_the_cpu():
    with pytest.raises(LayoutError, match="neither src nor dst is on a CUDA device"):
        compiled(SWAP)(SRC, DST, GOOD)
    with pytest.raises(LayoutError, match="caches are not on a CUDA device"):
        compiled(COPY)(SRC, GOOD)


def test_other_runtime_errors_keep_their_class():
    assert type(named(RuntimeError("blockyard cuda: copying failed: out of memory (2)"))) is RuntimeError
    assert type(named(RuntimeError("something else"))) is RuntimeError


def test_an_empty_mapping_does_nothing():
    kept = [tensor.clone() for tensor in DST]
    ops.swap_blocks(SRC, DST, torch.empty((0, 2), dtype=torch.int64))
    ops.copy_blocks(DST, torch.empty((0, 2), dtype=torch.int64))
    assert all(torch.equal(now, before) for now, before in zip(DST, kept, strict=True))


def test_halves_of_one_memory_can_be_swapped():
    memory = _random_bytes(8 * 16).view(8, 16)
    before = memory.clone()
    ops.swap_blocks([memory[:4]], [memory[4:]], one([[0, 3], [2, 1]]))
    assert torch.equal(memory, before[[0, 1, 2, 3, 4, 2, 6, 0]])


# ---- views that are bound ----


def swap_of(*pairs: list[int]) -> Mapping:
    return Mapping(list(pairs), src_blocks=6, dst_blocks=4, rule="swap")


@pytest.mark.parametrize("moved", ["src", "dst"])
def test_bound_views_follow_memory_that_torch_moves(moved: str):
    memory = torch.arange(2 * 6 * 24, dtype=torch.uint8).view(6, 48)
    src, dst = (
        list(memory.clone().split([24, 24], dim=1)),
        list(torch.zeros((4, 48), dtype=torch.uint8).split([24, 24], dim=1)),
    )
    run = ops.bind(src, dst)
    run(swap_of([1, 0]))
    {"src": src, "dst": dst}[moved][1].share_memory_()
    src[1].fill_(9)
    run(swap_of([5, 3]))
    assert torch.equal(dst[0][[0, 3]], memory[[1, 5], :24])
    assert torch.equal(dst[1][0], memory[1, 24:])
    assert dst[1][3].tolist() == [9] * 24


def test_memory_of_bound_views_stays_whatever_becomes_of_the_tensors():
    src, dst = torch.full((6, 24), 7, dtype=torch.uint8), torch.zeros((4, 24), dtype=torch.uint8)
    run, other = ops.bind([src[:]], [dst[:]]), torch.full((6, 24), 5, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="not resizable"):
        src.untyped_storage().resize_(0)
    src.set_(other)
    run(swap_of([1, 0]))
    assert dst.unique().tolist() == [0, 7]


def test_what_bound_views_have_changed_cannot_be_used_by_a_backward_pass():
    source, cache = torch.rand(6, 8), torch.rand(2, 4, 8)
    weight = torch.ones_like(cache, requires_grad=True)
    result = (weight * cache).sum()
    ops.bind([source.view(torch.uint8)], [cache[1].view(torch.uint8)])(swap_of([5, 3]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize("case", [case for case, row in BAD_SWAPS.items() if row[3] is LayoutError and row[0]])
def test_views_that_do_not_fit_are_not_bound(case: str):
    src, dst, *_ = BAD_SWAPS[case]
    if case == "other numbers of blocks":
        with pytest.raises(MappingError, match="up to block 3 is to be run over caches of 3 blocks"):
            ops.bind(src, dst)(swap_of([1, 3]))
    else:
        with pytest.raises((InvalidArgumentError, TypeError)):
            ops.bind(src, dst)


# ---- torch.library ----


@pytest.mark.parametrize("pairs", [GOOD, GOOD[:0], one([[0, 0], [1, 1], [2, 2]])], ids=["scattered", "none", "a run"])
def test_swap_passes_opcheck(pairs: torch.Tensor):
    torch.library.opcheck(SWAP, (caches_of(), caches_of(blocks=4), pairs))


@pytest.mark.parametrize("pairs", [GOOD[:, [0, 1]], GOOD[:0], one([[0, 3], [1, 4], [2, 5]])])
def test_copy_passes_opcheck(pairs: torch.Tensor):
    torch.library.opcheck(COPY, (caches_of(), pairs))


MOVE, EXCHANGE = torch.ops.blockyard.move_blocks.default, torch.ops.blockyard.exchange_blocks.default
GATHER, SCATTER = torch.ops.blockyard.gather_blocks.default, torch.ops.blockyard.scatter_blocks.default


@pytest.mark.parametrize("pairs", [one([[0, 1], [1, 2], [2, 0]]), one([[5, 0], [4, 1]]), GOOD[:0]])
def test_move_passes_opcheck(pairs: torch.Tensor):
    torch.library.opcheck(MOVE, (caches_of(), pairs))


@pytest.mark.parametrize("pairs", [one([[0, 1], [-1, -1], [5, 2]]), GOOD[:0]])
def test_exchange_passes_opcheck(pairs: torch.Tensor):
    torch.library.opcheck(EXCHANGE, (caches_of(), pairs))


@pytest.mark.parametrize("blocks", [[3, 1, 3], []])
def test_gather_and_scatter_pass_opcheck(blocks: list[int]):
    rows = torch.zeros((len(blocks), 72), dtype=torch.uint8)
    torch.library.opcheck(GATHER, (caches_of(), rows, torch.tensor(blocks, dtype=torch.int64)))
    unique = torch.tensor(sorted(set(blocks)), dtype=torch.int64)
    torch.library.opcheck(SCATTER, (rows[: len(unique)], caches_of(), unique))


def test_schemas_are_as_decided():
    arguments = {
        SWAP: "Tensor[] src, Tensor(a!)[] dst, Tensor pairs",
        COPY: "Tensor(a!)[] caches, Tensor pairs",
        MOVE: "Tensor(a!)[] caches, Tensor pairs",
        EXCHANGE: "Tensor(a!)[] caches, Tensor pairs",
        GATHER: "Tensor[] caches, Tensor(a!) rows, Tensor blocks",
        SCATTER: "Tensor rows, Tensor(a!)[] caches, Tensor blocks",
    }
    for op, expected in arguments.items():
        assert str(op._schema) == f"{op._schema.name}({expected}) -> ()"
    assert {op._schema.name for op in arguments} == {f"blockyard::{name}" for name in ops.OPS}


# Inductor builds C++ for a minute before its first graph runs.
@pytest.fixture(scope="module", params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}):
        yield request.param
    torch._dynamo.reset()


# Inductor's own imports.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_ops_compile_as_one_graph(backend: str):
    def step(
        caches: list[torch.Tensor], host: list[torch.Tensor], rows: torch.Tensor, pairs: torch.Tensor
    ) -> torch.Tensor:
        SWAP(caches, host, pairs)
        COPY(host, one([[0, 1]]))
        MOVE(host, one([[0, 1], [1, 2], [2, 0]]))
        EXCHANGE(host, one([[3, 2], [-1, -1]]))
        GATHER(host, rows, torch.arange(4))
        SCATTER(rows, caches, torch.arange(4) + 2)
        return host[0] + 1

    src, dst = caches_of(), caches_of(blocks=4)
    wanted_src, wanted_dst = [t.clone() for t in src], [t.clone() for t in dst]
    rows, wanted_rows = (torch.zeros((4, 72), dtype=torch.uint8) for _ in range(2))
    step(wanted_src, wanted_dst, wanted_rows, GOOD)
    result = torch.compile(step, backend=backend, fullgraph=True)(src, dst, rows, GOOD)
    made, wanted = (*src, *dst, rows), (*wanted_src, *wanted_dst, wanted_rows)
    assert all(torch.equal(now, want) for now, want in zip(made, wanted, strict=True))
    assert torch.equal(result, dst[0] + 1)
    assert torch.equal(rows, torch.cat(dst, dim=1))


# Inductor's own imports.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_compiled_code_sees_what_an_op_has_changed_and_the_op_what_the_code_has(backend: str):
    def step(cache: torch.Tensor, update: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        before = cache.float().sum()
        cache[0] = update * 2
        ops.copy_blocks([cache], pairs)
        cache[1] += 1
        ops.exchange_blocks([cache], pairs)
        return cache.float().sum() - before

    cache = caches_of()[0].clone()
    update = torch.arange(cache.shape[1], dtype=torch.uint8)
    wanted = cache.clone()
    compiled_step = torch.compile(step, backend=backend, fullgraph=True)
    for first, second in ((0, 3), (0, 4)):
        pairs = one([[first, second]])
        assert torch.equal(compiled_step(cache, update, pairs), step(wanted, update, pairs))
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("pairs", [[[0, 1]], np.array([[0, 1]], np.int32)], ids=["list", "int32"])
def test_pairs_may_be_any_ints(pairs: object) -> None:
    cache = torch.arange(8, dtype=torch.uint8).reshape(4, 2)
    ops.copy_blocks([cache], pairs)
    assert cache[1].tolist() == [0, 1]
    for wrong in ([[0, 9.5]], [[0]], "x", None, np.zeros((1, 2))):
        with pytest.raises(InvalidArgumentError, match="pair"):
            ops.copy_blocks([cache], wrong)
