"""The copy ops against a plain numpy model of whole memories; as ops of torch; and over views that are bound."""

import os
import shutil
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import LISTS, arranged, caches_of, ids, model, pairs_of, random_bytes, way

from blockyard._core import Mapping
from blockyard.engine import ops
from blockyard.engine.ops.compiled import named
from blockyard.errors import InvalidArgumentError
from blockyard.layout.kv import KINDS, KVLayout

SWAP, COPY, MOVE, EXCHANGE, GATHER, SCATTER = (getattr(torch.ops.blockyard, f"{name}_blocks").default for name in LISTS)

# Bytes of a row in units. Plans of many bytes are shared among threads and go past the processor's caches.
SIZES = {
    "small": st.lists(st.integers(1, 40), min_size=1, max_size=4),
    "large": st.lists(st.integers(20_000, 30_000), min_size=1, max_size=2),
}


class Twins:
    """Copies of the whole memories that some views lie in."""

    def __init__(self, views: list[torch.Tensor]) -> None:
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}
        self.memories = {at: torch.empty(0, dtype=torch.uint8).set_(storage) for at, storage in storages.items()}
        self.copies = {at: memory.clone() for at, memory in self.memories.items()}

    def of(self, view: torch.Tensor) -> np.ndarray:
        copied = self.copies[view.untyped_storage().data_ptr()]
        return copied.as_strided(view.shape, view.stride(), view.storage_offset()).numpy()

    def check(self) -> None:
        for at, memory in self.memories.items():
            np.testing.assert_array_equal(memory.numpy(), self.copies[at].numpy())


@st.composite
def caches(draw: st.DrawFn, blocks: int, widths: list[int], unit: int) -> list[torch.Tensor]:
    """Views side by side in one memory, after one another, or each in a memory of its own, with gaps between rows."""
    pad, offset = (draw(st.integers(0, 3)) * unit for _ in range(2))
    kind = draw(st.sampled_from(["woven", "one memory", "memories"]))
    if kind == "memories":
        return [random_bytes(offset + blocks * (w + pad))[offset:].view(blocks, w + pad)[:, :w] for w in widths]
    strides = [sum(widths) + pad if kind == "woven" else width + pad for width in widths]
    lengths = widths if kind == "woven" else [blocks * stride for stride in strides]
    starts = [offset + sum(lengths[:index]) for index in range(len(widths))]
    memory = random_bytes(offset + blocks * (sum(widths) + pad * len(widths)))
    return [memory.as_strided((blocks, w), (s, 1), o) for w, s, o in zip(widths, strides, starts, strict=True)]


@st.composite
def mappings(draw: st.DrawFn, src_blocks: int, dst_blocks: int) -> list[tuple[int, int]]:
    """Pairs that are scattered, in runs, or both; rings within one cache."""
    targets = draw(st.lists(st.integers(0, dst_blocks - 1), unique=True, max_size=dst_blocks))
    if draw(st.booleans()):
        targets.sort()
    kind = draw(st.sampled_from(["scattered", "runs", "both", *["rings"] * (src_blocks == dst_blocks)]))
    if kind == "rings":
        return list(zip(draw(st.permutations(targets)), targets, strict=True))
    by = draw(st.integers(0, src_blocks - 1))
    scattered = st.integers(0, src_blocks - 1)
    return [
        (
            draw(scattered)
            if kind == "scattered" or (kind == "both" and draw(st.booleans()))
            else (b + by) % src_blocks,
            b,
        )
        for b in targets
    ]


@st.composite
def exchanges(draw: st.DrawFn, blocks: int) -> list[tuple[int, int]]:
    chosen = draw(st.permutations(range(blocks)) | st.just(list(range(blocks))))
    half = blocks // 2
    pairs = list(zip(chosen[:half], chosen[half:], strict=False))[: draw(st.integers(0, half))]
    for _ in range(draw(st.integers(0, 3))):
        pairs.insert(draw(st.integers(0, len(pairs))), (-1, -1))
    return pairs


@pytest.mark.parametrize(("size", "through"), [("small", "op"), ("large", "op"), ("small", "torch calls")])
@pytest.mark.parametrize("name", LISTS)
@settings(max_examples=settings().max_examples // 2)
@given(st.data())
def test_an_op_changes_the_mapped_blocks_alone_as_if_all_were_read_first(
    name: str, size: str, through: str, data: st.DataObject
):
    unit, blocks = data.draw(st.sampled_from([1, 2, 4, 8, 16])), data.draw(st.integers(1, 14))
    widths = [unit * width for width in data.draw(SIZES[size])]
    # The other side of a swap, or rows.
    others = data.draw(st.integers(1, 12)) if name == "swap" else 16
    sides = {"swap": (blocks, others), "gather": (blocks, others), "scatter": (others, blocks)}
    pairs = data.draw(exchanges(blocks) if name == "exchange" else mappings(*sides.get(name, (blocks, blocks))))
    if name == "copy":
        written = {b for _, b in pairs}
        pairs = [pair for pair in pairs if pair[0] not in written]
    views = data.draw(caches(blocks, widths, unit))
    more = data.draw(caches(others, widths, unit)) if name == "swap" else [random_bytes(len(pairs), sum(widths))]
    arguments, read, written, plain = arranged(name, views, more, pairs)
    twins = Twins([*views, *more])
    model(name, [twins.of(view) for view in read], [twins.of(view) for view in written], plain)
    way(name, through)(*arguments)
    twins.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_caches_keep_their_bits(kind, dtype):
    layout = KVLayout(kind=kind, num_layers=3, block_size=4, num_kv_heads=2, head_size=5, dtype=dtype)
    shape = layout.tensor_shape(7)
    tensors = [random_bytes(int(np.prod(shape)) * layout.itemsize + layer)[layer:].clone() for layer in range(3)]
    tensors = [memory.view(getattr(torch, dtype)).view(shape) for memory in tensors]
    before, views = [tensor.view(torch.uint8).clone() for tensor in tensors], layout.views(tensors)
    rows, first, last = (torch.zeros((count, layout.bytes_per_block), dtype=torch.uint8) for count in (5, 7, 7))
    ops.gather_blocks(views, first, torch.arange(7))
    ops.swap_blocks(views, layout.row_views(rows), pairs_of([6, 0], [2, 4], [3, 2]))
    ops.swap_blocks(layout.row_views(rows), views, pairs_of([0, 1], [4, 5], [2, 0]))
    ops.move_blocks(views, pairs_of([5, 0], [0, 1], [1, 2], [3, 3]))
    ops.exchange_blocks(views, pairs_of([-1, -1], [4, 3]))
    places = [2, 3, 6, 4, 3, 2, 6]
    for tensor, old in zip(tensors, before, strict=True):
        by_block = [t.transpose(0, 1) if kind == "kv_first" else t for t in (tensor.view(torch.uint8), old)]
        assert torch.equal(by_block[0], by_block[1][places])
    ops.gather_blocks(views, last, torch.arange(7))
    assert torch.equal(last, first[places])


def test_large_plans_are_shared_among_threads():
    src = random_bytes(512, 64 << 10)
    dst = torch.zeros_like(src)
    pairs = torch.from_numpy(np.column_stack([np.random.default_rng(n).permutation(512) for n in (1, 2)]))
    with mock.patch.object(torch, "get_num_threads", return_value=3):
        ops.swap_blocks([src], [dst], pairs)
    assert torch.equal(dst[pairs[:, 1]], src[pairs[:, 0]])


def test_halves_of_one_memory_can_be_swapped():
    memory = random_bytes(8, 16)
    before = memory.clone()
    ops.swap_blocks([memory[:4]], [memory[4:]], pairs_of([0, 3], [2, 1]))
    assert torch.equal(memory, before[[0, 1, 2, 3, 4, 2, 6, 0]])


def test_other_runtime_errors_keep_their_class():
    assert type(named(RuntimeError("blockyard cuda: copying failed: out of memory (2)"))) is RuntimeError
    assert type(named(RuntimeError("something else"))) is RuntimeError


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


def test_memory_of_bound_views_outlives_the_tensors():
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


# ---- torch.library ----


SCATTERED, RUN, RING = pairs_of([5, 0], [1, 3]), pairs_of([0, 3], [1, 4], [2, 5]), pairs_of([0, 1], [1, 2], [2, 0])
ROWS = torch.zeros((3, 72), dtype=torch.uint8)
OPCHECKS = {
    SWAP: [(caches_of(), caches_of(blocks=6), pairs) for pairs in (SCATTERED, RUN, pairs_of())],
    COPY: [(caches_of(), pairs) for pairs in (SCATTERED, RUN, pairs_of())],
    MOVE: [(caches_of(), pairs) for pairs in (SCATTERED, RING, pairs_of())],
    EXCHANGE: [(caches_of(), pairs) for pairs in (pairs_of([0, 1], [-1, -1], [5, 2]), pairs_of())],
    GATHER: [(caches_of(), ROWS, ids(3, 1, 3)), (caches_of(), ROWS[:0], ids())],
    SCATTER: [(ROWS, caches_of(), ids(3, 1, 0)), (ROWS[:0], caches_of(), ids())],
}


@pytest.mark.parametrize("op", OPCHECKS, ids=str)
def test_an_op_passes_opcheck(op: torch._ops.OpOverload):
    for arguments in OPCHECKS[op]:
        torch.library.opcheck(op, arguments)


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
        COPY(host, pairs_of([0, 1]))
        MOVE(host, pairs_of([0, 1], [1, 2], [2, 0]))
        EXCHANGE(host, pairs_of([3, 2], [-1, -1]))
        GATHER(host, rows, torch.arange(4))
        SCATTER(rows, caches, torch.arange(4) + 2)
        return host[0] + 1

    src, dst = ([view.clone() for view in caches_of(blocks=blocks)] for blocks in (6, 4))
    wanted_src, wanted_dst = [t.clone() for t in src], [t.clone() for t in dst]
    rows, wanted_rows = (torch.zeros((4, 72), dtype=torch.uint8) for _ in range(2))
    step(wanted_src, wanted_dst, wanted_rows, SCATTERED)
    result = torch.compile(step, backend=backend, fullgraph=True)(src, dst, rows, SCATTERED)
    made, wanted = (*src, *dst, rows), (*wanted_src, *wanted_dst, wanted_rows)
    assert all(torch.equal(now, want) for now, want in zip(made, wanted, strict=True))
    assert torch.equal(result, dst[0] + 1)
    assert torch.equal(rows, torch.cat(dst, dim=1))


# Inductor's own imports.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_compiled_code_writes_views_that_it_cuts_and_refuses_those_that_come_from_outside(backend: str):
    def inside(cache: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        ops.move_blocks([cache[0], cache[1], cache[2]], pairs)
        return cache + 1

    def outside(views: list[torch.Tensor], pairs: torch.Tensor) -> torch.Tensor:
        ops.move_blocks(views, pairs)
        return views[0] + 1

    cache = random_bytes(3, 6, 24)
    wanted = cache.clone()
    inside(wanted, SCATTERED)
    compiled = torch.compile(inside, backend=backend, fullgraph=True)
    assert torch.equal(compiled(cache, SCATTERED), wanted + 1)
    assert torch.equal(cache, wanted)
    for views in (list(cache), [cache[0], cache[1].detach()], [cache[0].clone(), cache[2]]):
        with pytest.raises(Exception, match=r"caches\[1\] begins \d+ bytes into its storage, where torch.compile"):
            torch.compile(outside, backend=backend, fullgraph=True)(views, SCATTERED)
    assert torch.equal(cache, wanted)


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
        pairs = pairs_of([first, second])
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
