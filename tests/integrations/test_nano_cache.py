"""A copy engine over a nano engine's KV tensor: a decision moves the blocks it names, and no other byte."""

import math

import numpy as np
import pytest
import torch

from blockyard import Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError
from blockyard.integrations.nano import KIND, BlockManager
from blockyard.layout.kv import KVLayout

SHAPE = (2, 3, 6, 4, 2, 5)


def tensor(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    return values.to(dtype)


def engine_of(kv_cache: torch.Tensor, host_blocks: int = 0) -> CacheEngine:
    layout = KVLayout.from_tensors([kv_cache], kind=KIND)
    return CacheEngine(layout, tensors=[kv_cache], host_blocks=host_blocks)


def decision(kind: str, src: str, dst: str, *pairs: tuple[int, int]) -> StepDecision:
    return StepDecision(0, [(kind, Pairs(src, dst, np.array(pairs, np.int64)))])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_blocks_come_back_from_the_host_as_they_went(dtype: torch.dtype):
    kv_cache = tensor(dtype)
    cache, before = engine_of(kv_cache, 3), kv_cache.clone().view(torch.uint8)
    assert cache.execute(decision("swap_out", "device", "host", (5, 0), (2, 2))) == []
    assert not cache.memory.host_rows[1].any()
    assert cache.execute(decision("swap_in", "host", "device", (0, 1), (2, 4))) == []
    after = kv_cache.view(torch.uint8)
    assert torch.equal(after[:, :, [0, 1, 2, 3, 4, 5]], before[:, :, [0, 5, 2, 3, 2, 5]])


@pytest.mark.parametrize(
    ("kind", "pairs", "order"),
    [
        ("copy", [(0, 3), (1, 2)], [0, 1, 1, 0, 4, 5]),
        ("move", [(3, 1), (5, 3)], [0, 3, 2, 5, 4, 5]),
        ("exchange", [(4, 0), (1, 2)], [4, 2, 1, 3, 0, 5]),
    ],
)
def test_blocks_move_within_the_tensor(kind: str, pairs: list[tuple[int, int]], order: list[int]):
    kv_cache = tensor()
    cache, before = engine_of(kv_cache), kv_cache.clone()
    cache.execute(decision(kind, "device", "device", *pairs))
    assert torch.equal(kv_cache, before[:, :, order])


def test_a_tensor_of_another_shape_is_refused():
    manager = BlockManager(SHAPE[2], SHAPE[3])
    with pytest.raises(LayoutError, match="5 dimensions, wanted 6"):
        manager.attach(tensor()[0])
    with pytest.raises(LayoutError):
        manager.attach(torch.zeros(3, *SHAPE[1:]))
    with pytest.raises(LayoutError, match="the innermost must be 1"):
        manager.attach(tensor().transpose(4, 5))
    with pytest.raises(InvalidArgumentError, match="host_blocks is -1"):
        manager.attach(tensor(), host_blocks=-1)


@pytest.mark.parametrize(
    "bad",
    [
        decision("swap_in", "host", "device", (2, 0)),
        decision("swap_out", "device", "host", (6, 0)),
        decision("swap_out", "device", "external", (0, 0)),
    ],
)
def test_transfers_that_cannot_be_carried_out_change_nothing(bad: StepDecision):
    kv_cache = tensor()
    cache, before = engine_of(kv_cache, 2), kv_cache.clone()
    with pytest.raises(MappingError):
        cache.execute(bad)
    assert torch.equal(kv_cache, before)
    assert not cache.memory.host_rows.any()


def test_a_row_of_the_host_has_all_layers_of_a_block():
    cache = engine_of(tensor(), 1)
    assert (cache.num_blocks("device"), cache.num_blocks("host")) == (SHAPE[2], 1)
    assert cache.memory.host_rows.shape == (1, 2 * math.prod(SHAPE) // SHAPE[2])
