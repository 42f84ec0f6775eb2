"""`CacheSwapUtils`, with the surface of Gaudi's: blocks of an engine's caches change places, pair by pair.

The caches are pairs (keys, values), one per layer, each a flat tensor of slots `[blocks * block_size, ...]`; with MLA
there are keys alone, and the values are None.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockyard.errors import InvalidArgumentError, LayoutError
from blockyard.transfer.mover import PAD_SIZES
from blockyard.transfer.ops import exchange_blocks

Cache = tuple[Tensor, Tensor | None] | Sequence[Tensor | None]


class CacheSwapUtils(torch.nn.Module):
    """Exchanges blocks in the caches of all layers.

    Args:
        kv_caches: (keys, values) per layer, each contiguous `[blocks * block_size, ...]`, any dtype, all on one device
            and of the same number of slots; values may be None.
        block_size: slots in a block.

    Raises:
        InvalidArgumentError: there are no caches, or the block size is not positive.
        LayoutError: a cache is not contiguous, or its slots do not make whole blocks.

    Source: vllm-hpu-extension `defragmentation.py`, CacheSwapUtils.
    """

    def __init__(self, kv_caches: Sequence[Cache], block_size: int) -> None:
        super().__init__()
        if not kv_caches or block_size < 1:
            raise InvalidArgumentError(f"{len(kv_caches)} caches and a block size of {block_size}: wanted at least 1")
        self.block_size = block_size
        self.kv_caches = tuple(kv_caches)
        self.is_mla = all(len(cache) < 2 or cache[1] is None for cache in kv_caches)
        tensors = [tensor for cache in kv_caches for tensor in cache if tensor is not None]
        self._views = [self._view(index, tensor) for index, tensor in enumerate(tensors)]

    def _view(self, index: int, cache: Tensor) -> Tensor:
        slots = int(cache.shape[0])
        if not cache.is_contiguous() or slots % self.block_size:
            raise LayoutError(
                f"cache {index} has shape {list(cache.shape)} and strides {list(cache.stride())}, wanted contiguous "
                f"slots, a multiple of {self.block_size}"
            )
        return cache.view(torch.uint8).view(slots // self.block_size, -1)

    def forward(self, srcs: Tensor, dsts: Tensor, caches: Sequence[Tensor]) -> None:
        """Exchange block srcs[i] with block dsts[i] in some caches.

        Args:
            srcs: block ids, integers `[n]`, any device; -1 beside -1 is padding.
            dsts: as many.
            caches: tensors as `kv_caches` holds them.

        Raises:
            MappingError: an id is out of range or repeats; nothing was exchanged.
        """
        views = [self._view(index, cache) for index, cache in enumerate(caches)]
        exchange_blocks(views, torch.stack((srcs, dsts), dim=1).to(device="cpu", dtype=torch.int64))

    def swap(self, to_swap: Sequence[tuple[int, int]], threshold: int) -> None:
        """Exchange the blocks of each pair in the keys and values of all layers, in one call.

        Args:
            to_swap: pairs of block ids; no block is named twice.
            threshold: length that a batch is padded to, at least the number of pairs.

        Raises:
            InvalidArgumentError: there are more pairs than `threshold`; nothing was exchanged.
            MappingError: an id is out of range or repeats; nothing was exchanged.
        """
        if len(to_swap) > threshold:
            raise InvalidArgumentError(f"{len(to_swap)} pairs do not fit a batch of {threshold}")
        pairs = np.full((threshold, 2), -1, np.int64)
        if len(to_swap):
            pairs[: len(to_swap)] = to_swap
        exchange_blocks(self._views, torch.from_numpy(pairs))


def pad_size(count: int) -> int:
    """Give the smallest length in `PAD_SIZES` that holds `count` pairs.

    Raises:
        InvalidArgumentError: there is none.
    """
    for size in PAD_SIZES:
        if count <= size:
            return size
    raise InvalidArgumentError(f"{count} pairs do not fit a batch of {PAD_SIZES[-1]}")
