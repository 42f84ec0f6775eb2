"""Staged copies on a CUDA device: rows of the host through slots, on any stream, beside other copies.

The shapes are small enough to run under compute-sanitizer.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from blockyard.engine import ops
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import force_strategy

VIEWS, BLOCKS = 40, 70


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    monkeypatch.setenv("BLOCKYARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    assert op_library().loaded, op_library().explain()
    with force_strategy(torch.cuda.current_device(), "staged"):
        yield


class Cache:
    """Rows on the host and views on the device, apart from one another."""

    def __init__(self, width: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.rows = torch.from_numpy(random.integers(0, 256, (BLOCKS, VIEWS * width), np.uint8)).pin_memory()
        self.apart = torch.from_numpy(random.integers(0, 256, (VIEWS, BLOCKS, width), np.uint8)).cuda()
        self.host, self.device = list(self.rows.split(width, dim=1)), list(self.apart.unbind())
        count = BLOCKS - seed % 5
        self.pairs = torch.from_numpy(np.column_stack([random.permutation(BLOCKS)[:count] for _ in range(2)]))


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("width", [1640, 4096, 16 << 10])
def test_blocks_go_out_and_come_back(width: int, own_stream: bool):
    """Out, overwrite, in again, with no wait of the host in between."""
    cache = Cache(width, width)
    before, pairs = cache.apart.cpu(), cache.pairs
    wanted = cache.rows.clone().view(BLOCKS, VIEWS, width)
    wanted[pairs[:, 1]] = before.transpose(0, 1)[pairs[:, 0]]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        ops.swap_blocks(cache.device, cache.host, pairs)
        cache.apart[:, pairs[:, 0].cuda()] = 0
        ops.swap_blocks(cache.host, cache.device, pairs.flip(1))
        torch.cuda.current_stream().synchronize()
    assert torch.equal(cache.rows.view(BLOCKS, VIEWS, width), wanted)
    assert torch.equal(cache.apart.cpu(), before)


def test_streams_share_the_slots():
    caches, streams = [Cache(8192, seed) for seed in range(4)], [torch.cuda.Stream() for _ in range(4)]
    before = [cache.apart.cpu() for cache in caches]
    torch.cuda.synchronize()
    for _ in range(3):
        for cache, stream in zip(caches, streams, strict=True):
            with torch.cuda.stream(stream):
                ops.swap_blocks(cache.device, cache.host, cache.pairs)
                cache.apart[:, cache.pairs[:, 0].cuda(non_blocking=True)] = 0
                ops.swap_blocks(cache.host, cache.device, cache.pairs.flip(1))
    torch.cuda.synchronize()
    for cache, apart in zip(caches, before, strict=True):
        assert torch.equal(cache.apart.cpu(), apart)
