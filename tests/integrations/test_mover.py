"""The mover: any cache tensors, byte for byte, padded or not, MLA, and what it refuses."""

import numpy as np
import pytest
import torch
from torch import Tensor

from blockyard.engine.ops import exchange_blocks
from blockyard.errors import InvalidArgumentError, LayoutError
from blockyard.integrations.gaudi.mover import PAD_SIZES, BlockMover, cache_views, pad_size

BLOCKS, BLOCK_SIZE = 12, 4


def flat(dtype: torch.dtype = torch.float32) -> Tensor:
    size = (BLOCKS * BLOCK_SIZE, 2, 8)
    return torch.randint(0, 100, size).to(dtype)


def pairs_of(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


def blocks_of(tensor: Tensor) -> list[bytes]:
    rows = tensor.contiguous().view(torch.uint8).reshape(BLOCKS, -1)
    return [bytes(row.numpy()) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("graphed", [False, True])
def test_blocks_change_places_in_all_tensors(dtype: torch.dtype, graphed: bool):
    layers = [(flat(dtype), flat(dtype)) for _ in range(3)]
    expected = [[blocks_of(tensor) for tensor in layer] for layer in layers]
    mover = BlockMover(cache_views(layers, BLOCK_SIZE), graphed=graphed)
    mover.exchange(pairs_of((11, 1), (3, 2)))
    for layer, before in zip(layers, expected, strict=True):
        for tensor, rows in zip(layer, before, strict=True):
            rows[11], rows[1], rows[3], rows[2] = rows[1], rows[11], rows[2], rows[3]
            assert blocks_of(tensor) == rows


@pytest.mark.parametrize("graphed", [False, True])
def test_a_move_writes_the_destination_and_nothing_else(graphed: bool):
    cache = flat()
    before = blocks_of(cache)
    BlockMover(cache_views([cache], BLOCK_SIZE), graphed=graphed).move(pairs_of((9, 1)))
    after = blocks_of(cache)
    assert after[1] == before[9]
    assert [after[b] for b in range(BLOCKS) if b not in {1, 9}] == [before[b] for b in range(BLOCKS) if b not in {1, 9}]


def test_mla_has_keys_only():
    assert len(cache_views([(flat(), None), (flat(), None)], BLOCK_SIZE)) == 2


def test_tensors_of_blocks_and_strided_halves_are_seen_as_blocks():
    cache = torch.randint(0, 100, (BLOCKS, 2, BLOCK_SIZE, 2, 8))
    mover = BlockMover(cache_views([(cache[:, 0], cache[:, 1])], 1))
    assert (mover.num_blocks, mover.bytes_per_block) == (BLOCKS, 2 * BLOCK_SIZE * 16 * 8)
    before = blocks_of(cache)
    mover.exchange(pairs_of((5, 6)))
    before[5], before[6] = before[6], before[5]
    assert blocks_of(cache) == before


def test_graphed_calls_get_the_same_padded_tensors_again():
    seen: list[tuple[int, int, int]] = []

    def record(views, pairs):
        seen.append((pairs.data_ptr(), len(pairs), int((pairs[:, 0] >= 0).sum())))

    cache = torch.zeros(4096, 1, 2)
    mover = BlockMover(cache_views([cache], 1), graphed=True, exchange=record)
    for n in (1, 8, 9, 512, 7, 1030):
        mover.exchange(np.arange(2 * n, dtype=np.int64).reshape(n, 2))
    assert [length for _, length, _ in seen] == [8, 8, 16, 512, 8, 512, 512, 8]
    assert [used for _, _, used in seen] == [1, 8, 9, 512, 7, 512, 512, 6]
    assert len({(pointer, length) for pointer, length, _ in seen}) == len({length for _, length, _ in seen})
    assert {length for _, length, _ in seen} <= set(PAD_SIZES)


def test_wrap_is_called_once():
    wrapped = []

    def wrap(function):
        wrapped.append(function)
        return function

    mover = BlockMover(cache_views([flat()], BLOCK_SIZE), exchange=exchange_blocks, wrap=wrap)
    mover.exchange(pairs_of((1, 2)))
    mover.exchange(pairs_of((1, 2)))
    assert wrapped == [exchange_blocks]


def test_tensors_that_hold_no_blocks_are_refused():
    with pytest.raises(LayoutError, match=r"\[48, 2, 8\], wanted \[n \* 5, ...\]"):
        cache_views([flat()], 5)
    with pytest.raises(LayoutError, match="not contiguous"):
        cache_views([flat().transpose(0, 1).contiguous().transpose(0, 1)], BLOCK_SIZE)
    with pytest.raises(LayoutError, match=r"unequal numbers of blocks: \[6, 12\]"):
        cache_views([flat(), flat()[:24]], BLOCK_SIZE)
    with pytest.raises(LayoutError, match="no cache tensors"):
        cache_views([(None, None)], BLOCK_SIZE)
    with pytest.raises(InvalidArgumentError, match="block_size is 0"):
        cache_views([flat()], 0)


@pytest.mark.parametrize(("count", "size"), [(0, 8), (8, 8), (9, 16), (512, 512)])
def test_batches_are_padded_to_few_lengths(count: int, size: int):
    assert pad_size(count) == size


def test_too_many_pairs_have_no_pad_size():
    with pytest.raises(InvalidArgumentError, match="513 pairs"):
        pad_size(513)
