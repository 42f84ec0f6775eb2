"""`CacheSwapUtils` against index_select and index_copy_ on slots, as the engine itself would do it."""

import numpy as np
import pytest
import torch

from blockyard.errors import InvalidArgumentError, MappingError
from blockyard.integrations.gaudi import CacheSwapUtils

SIZE, BLOCKS = 4, 10


def caches(dtype: torch.dtype = torch.bfloat16, *, mla: bool = False) -> list[tuple]:
    random = torch.Generator().manual_seed(0)
    make = lambda: torch.randn(BLOCKS * SIZE, 2, 3, generator=random).to(dtype)  # noqa: E731
    return [(make(), None if mla else make()) for _ in range(3)]


def by_slots(cache: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    expected = cache.clone().view(torch.uint8)
    slots = [torch.tensor([b * SIZE + s for b in column for s in range(SIZE)]) for column in zip(*pairs, strict=True)]
    before = [expected.index_select(0, chosen) for chosen in slots]
    expected.index_copy_(0, slots[1], before[0])
    expected.index_copy_(0, slots[0], before[1])
    return expected


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_swap_exchanges_blocks_of_keys_and_values_in_all_layers(dtype: torch.dtype, mla: bool):
    kv_caches, pairs = caches(dtype, mla=mla), [(9, 1), (7, 2), (3, 5)]
    wanted = [by_slots(tensor, pairs) for cache in kv_caches for tensor in cache if tensor is not None]
    utils = CacheSwapUtils(tuple(kv_caches), SIZE)
    assert utils.is_mla is mla
    utils.swap(pairs, 8)
    now = [tensor.view(torch.uint8) for cache in kv_caches for tensor in cache if tensor is not None]
    assert all(torch.equal(one, other) for one, other in zip(now, wanted, strict=True))


def test_calling_it_exchanges_in_the_caches_given_alone():
    kv_caches, pairs = caches(), [(9, 1), (0, 4)]
    wanted, values = by_slots(kv_caches[1][0], pairs), kv_caches[1][1].clone()
    srcs, dsts = (torch.tensor([*column, -1]) for column in np.array(pairs).T)
    CacheSwapUtils(kv_caches, SIZE)(srcs, dsts, [kv_caches[1][0]])
    assert torch.equal(kv_caches[1][0].view(torch.uint8), wanted)
    assert torch.equal(kv_caches[1][1], values)


def test_no_pairs_change_nothing():
    kv_caches = caches()
    before = kv_caches[0][0].clone()
    CacheSwapUtils(kv_caches, SIZE).swap([], 8)
    assert torch.equal(kv_caches[0][0], before)


def test_bad_pairs_are_refused_and_nothing_changes():
    kv_caches = caches()
    before, utils = kv_caches[2][1].clone(), CacheSwapUtils(kv_caches, SIZE)
    with pytest.raises(MappingError, match="block 1 is exchanged twice"):
        utils.swap([(9, 1), (1, 4)], 8)
    with pytest.raises(MappingError, match="block 10 cannot be exchanged, there are 10 blocks"):
        utils.swap([(10, 1)], 8)
    for wrong in ([(1, 2, 3), (4, 5, 6)], [(1, 2, 3)], [(1,), (2,)], [[(1, 2)]], np.arange(6).reshape(2, 3)):
        with pytest.raises(MappingError, match=r"pairs .*, must be (ints )?\[n, 2\]"):
            utils.swap(wrong, 8)
    with pytest.raises(InvalidArgumentError, match=r"threshold is 8.5, must be an int"):
        utils.swap([(1, 2)], 8.5)
    for srcs, dsts in (([1], [2, 3]), ([[1]], [[2]])):
        with pytest.raises(MappingError, match=r"must be \[n\] and \[n\]"):
            utils(torch.tensor(srcs), torch.tensor(dsts), [tensor for pair in utils.kv_caches for tensor in pair])
    with pytest.raises(InvalidArgumentError, match="2 pairs do not fit a batch of 1"):
        utils.swap([(9, 1), (8, 2)], 1)
    assert torch.equal(kv_caches[2][1], before)
