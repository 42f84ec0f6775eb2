"""Moves blocks within an engine's own cache tensors, as a defragmentation plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockyard.engine import ops
from blockyard.engine.mapping import Ids
from blockyard.engine.ops.checks import PADDING
from blockyard.errors import InvalidArgumentError, LayoutError
from blockyard.layout.kv import check_views

# Batches are padded to one of these lengths, so that a captured graph fits many of them.
PAD_SIZES = (8, 16, 32, 64, 128, 256, 512)

Move = Callable[[Sequence[Tensor], Tensor], None]
"""Takes uint8 views `[blocks, bytes]` and pairs of block ids, int64 `[n, 2]` on the CPU."""


class BlockMover:
    """Moves and exchanges blocks in all cache tensors of an engine.

    Args:
        kv_caches: one entry a layer: a tensor, or a tuple of tensors (keys, values, scales) of which any may be None.
            MLA's has keys only. The first dimension counts slots, or blocks.
        block_size: rows of the first dimension that make a block; 1 if it counts blocks.
        exchange: lets the two blocks of each pair change places; `(-1, -1)` is padding. By default the torch op.
        move: copies the first block of each pair over the second; no block is named twice.
        graphed: always pass tensors that were passed before, of a length in `PAD_SIZES`, padded with -1; what could be
            moved one way is exchanged.
        wrap: turns `exchange` into what is called, once: `torch.compile`, or the capture of a graph.

    Raises:
        LayoutError: a tensor cannot be seen as `[blocks, bytes]`, two share memory, or they have unequal numbers of
            blocks.
    """

    def __init__(
        self,
        kv_caches: Sequence[Tensor | Sequence[Tensor | None]],
        block_size: int,
        *,
        exchange: Move | None = None,
        move: Move | None = None,
        graphed: bool = False,
        wrap: Callable[[Move], Move] | None = None,
    ) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}, must be at least 1")
        layers = [(layer,) if isinstance(layer, Tensor) else tuple(layer) for layer in kv_caches]
        self.is_mla = all(sum(tensor is not None for tensor in layer[:2]) == 1 for layer in layers)
        self.views = [block_view(tensor, block_size) for layer in layers for tensor in layer if tensor is not None]
        if not self.views:
            raise LayoutError("the engine has no cache tensors")
        sizes = {view.shape[0] for view in self.views}
        if len(sizes) > 1:
            raise LayoutError(f"the cache tensors have unequal numbers of blocks: {sorted(sizes)}")
        check_views(self.views)
        self.num_blocks = sizes.pop()
        self.bytes_per_block = sum(view.shape[1] for view in self.views)
        self.graphed = graphed
        chosen: Move = exchange if exchange is not None else ops.exchange_blocks
        self._exchange = wrap(chosen) if wrap is not None else chosen
        self._move: Move = move if move is not None else ops.copy_blocks
        self._buffers: dict[int, Tensor] = {}

    def exchange(self, pairs: Ids, *, size: int | None = None) -> None:
        """Let the two blocks of each pair change places.

        Args:
            pairs: int64 `[n, 2]`, CPU; no block is named twice.
            size: make it one batch, padded to this length. By default batches of at most the last of `PAD_SIZES`,
                padded if graphed.

        Raises:
            InvalidArgumentError: there are more pairs than `size`; nothing was exchanged.
        """
        if size is not None:
            self._exchange(self.views, self._padded(pairs, size))
            return
        for first in range(0, len(pairs), PAD_SIZES[-1]):
            batch = pairs[first : first + PAD_SIZES[-1]]
            chosen = self._padded(batch, pad_size(len(batch))) if self.graphed else torch.from_numpy(batch)
            self._exchange(self.views, chosen)

    def move(self, pairs: Ids) -> None:
        """Copy the first block of each pair over the second, whose bytes are lost; the first's are lost when graphed.

        Args:
            pairs: int64 `[n, 2]`, CPU; no block is named twice.
        """
        if self.graphed:
            self.exchange(pairs)
        elif len(pairs):
            self._move(self.views, torch.from_numpy(pairs))

    def _padded(self, pairs: Ids, size: int) -> Tensor:
        if len(pairs) > size:
            raise InvalidArgumentError(f"{len(pairs)} pairs do not fit a batch of {size}")
        if size not in self._buffers:
            self._buffers[size] = torch.empty((size, 2), dtype=torch.int64)
        buffer = self._buffers[size]
        buffer[: len(pairs)] = torch.from_numpy(pairs)
        buffer[len(pairs) :] = PADDING
        return buffer


def pad_size(count: int) -> int:
    """Give the smallest length in `PAD_SIZES` that holds `count` pairs.

    Raises:
        InvalidArgumentError: there is none.
    """
    for size in PAD_SIZES:
        if count <= size:
            return size
    raise InvalidArgumentError(f"{count} pairs do not fit a batch of {PAD_SIZES[-1]}")


def block_view(tensor: Tensor, block_size: int) -> Tensor:
    """See a cache tensor as blocks.

    Args:
        tensor: `[blocks * block_size, ...]`, any dtype; the rows of a block side by side.
        block_size: rows in a block.

    Returns:
        uint8 `[blocks, bytes]`.

    Raises:
        LayoutError: it cannot be seen so.
    """
    if tensor.dim() < 2 or tensor.shape[0] % block_size:
        raise LayoutError(f"a cache tensor has shape {list(tensor.shape)}, wanted [n * {block_size}, ...]")
    if tensor.requires_grad:
        raise LayoutError("a cache tensor requires grad, and its blocks change behind autograd: give its detach()")
    try:
        return tensor.view(torch.uint8).view(tensor.shape[0] // block_size, -1)
    except RuntimeError as error:
        shape, strides = list(tensor.shape), list(tensor.stride())
        raise LayoutError(
            f"a cache tensor of shape {shape} has strides {strides}: a block is not contiguous"
        ) from error
