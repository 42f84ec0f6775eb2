"""`CacheSwapUtils`, with the interface of vllm-gaudi's class: swaps blocks of an engine's caches, pair by pair.

The caches are pairs (keys, values), one per layer, each a flat tensor of slots `[blocks * block_size, ...]`; with MLA
there are only keys, and the values are None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockyard._core import Mapping
from blockyard.errors import MappingError
from blockyard.integrations.gaudi.mover import BlockMover, Move, cache_views
from blockyard.layout.sizes import as_int

Cache = tuple[Tensor, Tensor | None] | Sequence[Tensor | None]


class CacheSwapUtils(torch.nn.Module):
    """Swaps blocks in the caches of all layers: `BlockMover` under Gaudi's names.

    On a device without our kernels, such as `hpu`, it copies with `index_select` and `index_copy_`.

    Args:
        kv_caches: (keys, values) per layer, each `[blocks * block_size, ...]`, any dtype, all on one device and of the
            same number of slots; values may be None.
        block_size: slots in a block.
        exchange: a custom copy for the device; see `BlockMover`, also for `wrap` and `mark_step`.
        wrap: applied to the exchange, such as `habana_frameworks.torch.hpu.wrap_in_hpu_graph_func`.
        mark_step: called before and after each exchange, such as `habana_frameworks.torch.core.mark_step`.

    Raises:
        InvalidArgumentError: the block size is not positive.
        LayoutError: there are no caches, a block of one is not contiguous, or its slots do not make whole blocks.

    Source: vllm-hpu-extension `defragmentation.py`, CacheSwapUtils.
    """

    def __init__(
        self,
        kv_caches: Sequence[Cache],
        block_size: int,
        *,
        exchange: Move | None = None,
        wrap: Callable[[Move], Move] | None = None,
        mark_step: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        views = cache_views(kv_caches, block_size)
        self._mover = BlockMover(views, exchange=exchange, wrap=wrap, mark_step=mark_step)
        self.block_size = block_size
        self.kv_caches = tuple(kv_caches)
        self.is_mla = all(sum(tensor is not None for tensor in cache[:2]) == 1 for cache in kv_caches)

    def forward(self, srcs: Tensor, dsts: Tensor, caches: Sequence[Tensor]) -> None:
        """Swap block srcs[i] with block dsts[i] in some caches.

        Args:
            srcs: block ids, integers `[n]`, any device; a pair of -1 and -1 is padding.
            dsts: the same number of block ids.
            caches: tensors as in `kv_caches`.

        Raises:
            MappingError: the two are not `[n]`, an id is out of range or repeats; nothing was exchanged.
        """
        if srcs.dim() != 1 or srcs.shape != dsts.shape:
            raise MappingError(f"srcs are {list(srcs.shape)}, dsts {list(dsts.shape)}, must be [n] and [n]")
        pairs = torch.stack((srcs.cpu(), dsts.cpu()), dim=1).to(torch.int64)
        self._mover.exchange(pairs, views=cache_views(caches, self.block_size))

    def swap(self, to_swap: Sequence[tuple[int, int]], threshold: int) -> None:
        """Swap the blocks of each pair in the keys and values of all layers, in one call.

        Args:
            to_swap: pairs of block ids; no block is named twice.
            threshold: length that a batch is padded to, at least the number of pairs.

        Raises:
            InvalidArgumentError: there are more pairs than `threshold`; nothing was exchanged.
            MappingError: they are not pairs of ints, an id is out of range or repeats; nothing was exchanged.
        """
        blocks = self._mover.num_blocks
        pairs = Mapping(to_swap, src_blocks=blocks, dst_blocks=blocks, rule="exchange").pairs
        self._mover.exchange(pairs, size=as_int("threshold", threshold))
