"""`CacheSwapUtils` and `OnlineDefragmenter` on a device that our ops have no kernel for, as Gaudi's is.

The device is a stand-in of PyTorch's PrivateUse1: its tensors have no address, and its dispatcher refuses our ops.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from own_device import NAME, OwnTensor, own_process, register
from torch import Tensor

from blockyard.engine.ops import exchange_blocks
from blockyard.errors import LayoutError, MappingError
from blockyard.integrations.gaudi import CacheSwapUtils, OnlineDefragmenter
from blockyard.integrations.gaudi.mover import BlockMover, cache_views

SIZE, BLOCKS = 4, 64


@pytest.fixture(scope="module")
def there() -> Iterator[Callable[..., None]]:
    """Runs a check in a process that has the device."""
    with own_process() as run:
        yield run


def caches(*, mla: bool = False) -> list[tuple[Tensor, Tensor | None]]:
    random = torch.Generator().manual_seed(0)
    make = lambda: torch.randn(BLOCKS * SIZE, 2, 3, generator=random).to(NAME)  # noqa: E731
    return [(make(), None if mla else make()) for _ in range(3)]


def blocks(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, OwnTensor)
    return tensor.memory.reshape(BLOCKS, -1)


def exchanged(tensor: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    order = list(range(BLOCKS))
    for a, b in pairs:
        order[a], order[b] = b, a
    return blocks(tensor)[order]


def check_a_swap(mla: bool, threshold: int) -> None:
    ran = register()
    ran.clear()
    kv_caches, pairs = caches(mla=mla), [(9, 1), (63, 0), (3, 5)]
    assert kv_caches[0][0].device.type == NAME
    tensors = [tensor for cache in kv_caches for tensor in cache if tensor is not None]
    wanted = [exchanged(tensor, pairs) for tensor in tensors]
    utils = CacheSwapUtils(kv_caches, SIZE)
    utils.swap(pairs, threshold)
    assert all(torch.equal(blocks(tensor), rows) for tensor, rows in zip(tensors, wanted, strict=True))
    assert {"index_select", "index_copy_"} <= set(ran)
    srcs, dsts = (torch.tensor([*column, -1]).to(NAME) for column in zip(*pairs, strict=True))
    utils(srcs, dsts, tensors[:1])  # and back, in one cache alone
    assert torch.equal(exchanged(tensors[0], pairs), wanted[0])
    assert all(torch.equal(blocks(tensor), rows) for tensor, rows in zip(tensors[1:], wanted[1:], strict=True))
    utils.swap([], threshold)


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("threshold", [3, 8, 512])
def test_blocks_change_places_where_the_dispatcher_knows_none_of_our_ops(
    mla: bool, threshold: int, there: Callable[..., None]
):
    there(check_a_swap, mla, threshold)


def check_the_ops_are_refused() -> None:
    register()
    views = [cache[0].view(BLOCKS, -1) for cache in caches()]
    with pytest.raises(NotImplementedError, match=r"blockyard::exchange_blocks.*own_device"):
        exchange_blocks(views, [(1, 2)])


def test_the_stand_in_refuses_our_ops(there: Callable[..., None]):
    there(check_the_ops_are_refused)


def check_bad_pairs() -> None:
    register()
    kv_caches = caches()
    before, utils = [blocks(cache[0]).clone() for cache in kv_caches], CacheSwapUtils(kv_caches, SIZE)
    with pytest.raises(MappingError, match="block 1 is exchanged twice"):
        utils.swap([(9, 1), (1, 4)], 8)
    with pytest.raises(MappingError, match="block 64 cannot be exchanged, there are 64 blocks"):
        utils.swap([(64, 1)], 8)
    assert all(torch.equal(blocks(cache[0]), rows) for cache, rows in zip(kv_caches, before, strict=True))
    with pytest.raises(LayoutError, match=r"several devices: \['cpu', 'own_device:0'\]"):
        CacheSwapUtils([(kv_caches[0][0], torch.zeros(BLOCKS * SIZE, 2, 3))], SIZE)


def test_bad_pairs_and_mixed_devices_are_refused_there_too(there: Callable[..., None]):
    there(check_bad_pairs)


def check_the_parameters() -> None:
    register()
    events: list[str] = []
    seen: list[tuple[str, tuple[int, ...]]] = []

    def exchange(views: Sequence[Tensor], pairs: Tensor) -> None:
        events.append("exchange")
        seen.append((pairs.device.type, tuple(pairs.shape)))
        assert pairs.cpu().tolist() == [[9, 1], [3, 5]] + 6 * [[9, 1]]
        assert all(view.shape == (BLOCKS, SIZE * 6) and view.dtype == torch.float32 for view in views)

    def wrap(function):
        events.append("wrap")
        return function

    options = {"exchange": exchange, "wrap": wrap, "mark_step": lambda: events.append("mark")}
    utils = CacheSwapUtils(caches(), SIZE, **options)
    for _ in range(2):
        utils.swap([(9, 1), (3, 5)], 8)
    assert events == ["wrap", *2 * ["mark", "exchange", "mark"]]
    assert seen == 2 * [(NAME, (8, 2))]


def test_a_copy_of_ones_own_gets_padded_pairs_on_the_device_between_two_step_marks(there: Callable[..., None]):
    there(check_the_parameters)


def check_a_defragmenter(graphed: bool) -> None:
    register()
    (cache,) = caches(mla=True)[:1]
    marks: list[int] = []
    defragmenter = OnlineDefragmenter(threshold=4, graphed=graphed, mark_step=lambda: marks.append(1))
    defragmenter.initialize([cache], SIZE)
    random, before, free, live = np.random.default_rng(0), blocks(cache[0]).clone(), list(range(1, BLOCKS)), {}
    for step in range(40):
        ended = [name for name in live if random.random() < 0.3]
        free += [block for name in ended for block in live.pop(name)]
        random.shuffle(free)
        live[str(step)], free = free[:6], free[6:]
        defragmenter.update_state({str(step): live[str(step)]}, ended)
        defragmenter.defragment()
        defragmenter.check()
        for block in range(BLOCKS):
            assert torch.equal(blocks(cache[0])[defragmenter.resolve(block)], before[block])
        assert defragmenter.stats().gap <= 4
    assert defragmenter.stats().exchanges > 20
    assert len(marks) >= 2 * defragmenter.stats().steps


@pytest.mark.parametrize("graphed", [False, True])
def test_a_defragmenter_keeps_every_byte_there(graphed: bool, there: Callable[..., None]):
    there(check_a_defragmenter, graphed)


def check_moves() -> None:
    register()
    rows = torch.arange(2200 * 3, dtype=torch.float32).view(2200, 3)
    own = rows.to(NAME)
    mover = BlockMover(cache_views([own], 1))
    mover.move(np.array([(1, 2), (2, 3), (3, 1), (4, 5), (5, 6)]))
    wanted = rows.clone()
    wanted[[2, 3, 1, 5, 6]] = rows[[1, 2, 3, 4, 5]]
    assert torch.equal(own.memory, wanted)
    many = np.arange(2 * 1030).reshape(1030, 2)
    with pytest.raises(MappingError, match="block 5000 cannot be exchanged"):
        mover.exchange(np.concatenate((many, [(2100, 5000)])))
    assert torch.equal(own.memory, wanted)
    for graphed in (False, True):
        BlockMover(cache_views([own], 1), graphed=graphed).exchange(many)
        wanted[many] = wanted[many[:, ::-1].copy()]
        assert torch.equal(own.memory, wanted)


def test_moves_and_more_pairs_than_a_batch_holds_work_there(there: Callable[..., None]):
    there(check_moves)
