"""The copy ops on a CUDA device: every direction against a plain model, whole memories, stream order, refusals."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from captures import capturing
from hypothesis import given
from hypothesis import strategies as st

from blockyard.engine import ops
from blockyard.engine.ops import fallback
from blockyard.engine.ops.library import op_library
from blockyard.errors import LayoutError, MappingError

Op = Callable[..., None]
HOST = ("pinned", "pageable")


@pytest.fixture(params=["library", "torch calls"])
def swap(request: pytest.FixtureRequest) -> Op:
    return _through(request.param, ops.swap_blocks, fallback.BY_TORCH.swap)


@pytest.fixture(params=["library", "torch calls"])
def copy(request: pytest.FixtureRequest) -> Op:
    return _through(request.param, ops.copy_blocks, fallback.BY_TORCH.copy)


def _through(name: str, op: Op, torch_calls: Op) -> Op:
    if name == "torch calls":
        return torch_calls
    assert op_library().loaded, op_library().explain()
    return op


def memory_of(size: int, seed: int, where: str) -> torch.Tensor:
    memory = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))
    if where == "cuda":
        return memory.cuda()
    return memory.pin_memory() if where == "pinned" else memory


def views_of(widths: list[int], blocks: int, *, side_by_side: bool, offset: int, seed: int, where: str) -> list:
    """Views with the memory that each lies in: rows side by side in one, or each cache in its own."""
    if side_by_side:
        stride = sum(widths)
        memory = memory_of(offset + blocks * stride, seed, where)
        starts = [offset + sum(widths[:index]) for index in range(len(widths))]
        places = [(memory, start, stride) for start in starts]
    else:
        places = [(memory_of(offset + blocks * w, seed + n, where), offset, w) for n, w in enumerate(widths)]
    return [
        (memory.as_strided((blocks, width), (stride, 1), start), memory)
        for (memory, start, stride), width in zip(places, widths, strict=True)
    ]


def as_arrays(views: list) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Copies of all memories, and the same views cut from them."""
    memories = {id(memory): memory.cpu().numpy().copy() for _, memory in views}
    cut = [
        np.lib.stride_tricks.as_strided(memories[id(memory)][view.storage_offset() :], view.shape, view.stride())
        for view, memory in views
    ]
    return [memories[id(memory)] for _, memory in views], cut


def check_swap(swap: Op, src: list, dst: list, pairs: np.ndarray) -> None:
    _, sources = as_arrays(src)
    wanted, targets = as_arrays(dst)
    for source, target in zip(sources, targets, strict=True):
        target[pairs[:, 1]] = source[pairs[:, 0]]
    swap([view for view, _ in src], [view for view, _ in dst], torch.from_numpy(pairs))
    torch.cuda.synchronize()
    for (_, memory), rows in zip(dst, wanted, strict=True):
        np.testing.assert_array_equal(memory.cpu().numpy(), rows)


def random_pairs(src_blocks: int, dst_blocks: int, count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.column_stack((random.integers(0, src_blocks, count), random.permutation(dst_blocks)[:count]))


DIRECTIONS = [("cuda", "cuda"), *((host, "cuda") for host in HOST), *(("cuda", host) for host in HOST)]


@pytest.mark.parametrize(("src_where", "dst_where"), DIRECTIONS)
@given(st.data())
def test_swap_changes_the_mapped_blocks_alone(src_where: str, dst_where: str, data: st.DataObject):
    unit = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    widths = [unit * width for width in data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))]
    blocks = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    shapes = [
        {"side_by_side": data.draw(st.booleans()), "offset": data.draw(st.integers(0, 3)) * unit, "seed": seed}
        for seed in (10, 20)
    ]
    src = views_of(widths, blocks[0], **shapes[0], where=src_where)
    dst = views_of(widths, blocks[1], **shapes[1], where=dst_where)
    pairs = random_pairs(*blocks, data.draw(st.integers(0, blocks[1])), data.draw(st.integers(0, 99)))
    if data.draw(st.booleans()):
        pairs.sort(axis=0)
    check_swap(data.draw(st.sampled_from([ops.swap_blocks, fallback.BY_TORCH.swap])), src, dst, pairs)


@pytest.mark.parametrize(("src_where", "dst_where"), DIRECTIONS)
def test_runs_and_many_blocks_arrive(swap: Op, src_where: str, dst_where: str):
    shape = {"side_by_side": False, "offset": 0}
    src = views_of([4096, 4096], 6000, **shape, seed=1, where=src_where)
    dst = views_of([4096, 4096], 5500, **shape, seed=5, where=dst_where)
    runs = np.column_stack((np.arange(3000) + 1000, np.arange(3000)))
    # More pairs than one launch takes.
    scattered = random_pairs(6000, 2500, 2500, 3) + np.array([0, 3000])
    check_swap(swap, src, dst, np.concatenate((runs, scattered)))


def test_more_tensors_than_one_launch_takes_arrive(swap: Op):
    widths = [16 + 8 * (n % 7) for n in range(600)]
    src, dst = (views_of(widths, 9, side_by_side=True, offset=0, seed=s, where="cuda") for s in (1, 2))
    check_swap(swap, src, dst, random_pairs(9, 9, 7, 1))


def test_blocks_beyond_four_gib_are_reached(swap: Op):
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("less than 12 GiB of device memory are free")
    width = 1 << 20
    src = torch.zeros((4500, width), dtype=torch.uint8, device="cuda")
    dst = torch.zeros((4500, width), dtype=torch.uint8, device="cuda")
    src[4499] = 7
    swap([src], [dst], torch.tensor([[4499, 4498], [0, 4499]]))
    assert int(dst[4498].min()) == 7
    assert int(dst.view(torch.int64).count_nonzero()) == width // 8


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_copy_changes_the_mapped_blocks_alone(copy: Op, unit: int):
    caches = views_of([unit * 37, unit * 256, unit], 40, side_by_side=True, offset=unit, seed=3, where="cuda")
    pairs = np.column_stack((np.arange(20), np.random.default_rng(0).permutation(20) + 20))
    wanted, arrays = as_arrays(caches)
    for rows in arrays:
        rows[pairs[:, 1]] = rows[pairs[:, 0]]
    copy([view for view, _ in caches], torch.from_numpy(pairs))
    torch.cuda.synchronize()
    np.testing.assert_array_equal(caches[0][1].cpu().numpy(), wanted[0])


@pytest.mark.parametrize("own_stream", [False, True])
def test_work_keeps_the_order_of_its_stream(swap: Op, own_stream: bool):
    """Out, overwrite, in again, with no wait of the host in between: each step sees the one before."""
    device = torch.full((64, 1 << 20), 1, dtype=torch.uint8, device="cuda")
    host = torch.zeros((64, 1 << 20), dtype=torch.uint8).pin_memory()
    there = torch.stack([torch.arange(64), torch.arange(64).flip(0)], dim=1)
    torch.cuda.synchronize()
    as_expected = []
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        for value in range(2, 8):
            swap([device], [host], there)
            device.fill_(0)
            swap([host], [device], there.flip(1))
            device.add_(1)
            as_expected.append(device.eq(value).all())
        torch.cuda.current_stream().synchronize()
    assert all(as_expected)
    assert int(host.min()) == int(host.max()) == 6


def test_copies_can_be_captured_in_a_graph():
    assert op_library().loaded, op_library().explain()
    device = torch.arange(8 * 512, dtype=torch.int32, device="cuda").view(torch.uint8).view(8, -1)
    host = torch.zeros_like(device, device="cpu").pin_memory()
    with capturing() as graph:
        ops.copy_blocks([device], torch.tensor([[0, 7], [1, 6]]))
        ops.swap_blocks([device], [host], torch.tensor([[7, 0], [6, 1]]))
    device[:2] = 9
    graph.replay()
    torch.cuda.synchronize()
    assert int(host[:2].min()) == int(host[:2].max()) == 9


REFUSED = {
    "out of range": (
        lambda s, d: (s, d, [[9, 0]]),
        MappingError,
        "entry 0: block 9 cannot be read, there are 4 blocks",
    ),
    "repeated": (lambda s, d: (s, d, [[0, 1], [2, 1]]), MappingError, "block 1 is written twice"),
    "shared": (lambda s, d: (s, s, [[0, 1]]), LayoutError, "src and dst share memory"),
    "widths": (lambda s, d: (s, [t[:, :8] for t in d], [[0, 1]]), LayoutError, "rows of 16 bytes"),
    "mixed": (lambda s, d: ([s[0], s[1].cpu()], d, [[0, 1]]), LayoutError, r"src\[1\] has 4 blocks on"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_swap_changes_nothing(swap: Op, case: str):
    make, error, message = REFUSED[case]
    src, dst = ([memory_of(64, n, "cuda").view(4, 16) for n in some] for some in ((1, 2), (3, 4)))
    arguments = make(src, dst)
    kept = [tensor.clone() for tensor in (*src, *dst)]
    with pytest.raises(error, match=message):
        swap(*arguments[:2], torch.tensor(arguments[2]))
    torch.cuda.synchronize()
    assert all(torch.equal(now, before) for now, before in zip((*src, *dst), kept, strict=True))


def test_a_mapping_on_the_device_is_refused(copy: Op):
    with pytest.raises(MappingError, match="pairs are "):
        copy([memory_of(64, 1, "cuda").view(4, 16)], torch.tensor([[0, 1]]).cuda())


def test_ops_pass_opcheck_on_the_device():
    src, dst = ([memory_of(64, n, "cuda").view(4, 16) for n in some] for some in ((1, 2), (3, 4)))
    pairs = torch.tensor([[0, 1], [3, 2]])
    torch.library.opcheck(torch.ops.blockyard.swap_blocks.default, (src, dst, pairs))
    torch.library.opcheck(torch.ops.blockyard.copy_blocks.default, (src, pairs))


@pytest.mark.parametrize("to_host", [False, True])
def test_a_backward_pass_that_saved_what_an_op_changed_fails(to_host: bool):
    on_device, on_host = torch.rand(4, 8, device="cuda"), torch.rand(4, 8).pin_memory()
    source, target = (on_device, on_host) if to_host else (on_host, on_device)
    result = (torch.ones_like(target, requires_grad=True) * target).sum()
    ops.swap_blocks([source.view(torch.uint8)], [target.view(torch.uint8)], torch.tensor([[0, 1]]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
