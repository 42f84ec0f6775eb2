"""Moves blocks within one pool: the tensors of a copy engine's tier, or those of another engine."""

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
    """Copies, moves and exchanges blocks in all tensors of a pool at once.

    Args:
        views: uint8 `[blocks, bytes]`, as `cache_views` or a layout's `views` cut them.
        exchange: lets the two blocks of each pair change places; `(-1, -1)` is padding. By default the torch op.
        move: moves the first block of each pair over the second, as if all were read before one is written.
        graphed: always pass tensors that were passed before, of a length in `PAD_SIZES`, padded with -1; what could be
            moved one way is exchanged.
        wrap: turns `exchange` into what is called, once: `torch.compile`, or the capture of a graph.
    """

    def __init__(
        self,
        views: Sequence[Tensor],
        *,
        exchange: Move | None = None,
        move: Move | None = None,
        graphed: bool = False,
        wrap: Callable[[Move], Move] | None = None,
    ) -> None:
        self.views = list(views)
        self.num_blocks = len(self.views[0])
        self.bytes_per_block = sum(view.shape[1] for view in self.views)
        self.graphed = graphed
        chosen: Move = exchange if exchange is not None else ops.exchange_blocks
        self._exchange = wrap(chosen) if wrap is not None else chosen
        self._move: Move = move if move is not None else ops.move_blocks
        self._buffers: dict[int, Tensor] = {}

    def copy(self, pairs: Ids | Tensor) -> None:
        """Copy the first block of each pair over the second.

        Args:
            pairs: int64 `[n, 2]`, CPU; no block is both read and written, none is written twice.
        """
        ops.copy_blocks(self.views, _tensor(pairs))

    def move(self, pairs: Ids | Tensor) -> None:
        """Move the first block of each pair over the second, as if all were read before the first is written.

        Args:
            pairs: int64 `[n, 2]`, CPU; no destination repeats. When graphed no block is named twice, and both of a pair
                are lost to the caller.
        """
        if self.graphed:
            self.exchange(pairs)
        elif len(pairs):
            self._move(self.views, _tensor(pairs))

    def exchange(self, pairs: Ids | Tensor, *, size: int | None = None) -> None:
        """Let the two blocks of each pair change places.

        Args:
            pairs: int64 `[n, 2]`, CPU; no block is named twice. `(-1, -1)` is padding.
            size: make it one batch, padded to this length. By default the pairs as they are; when graphed batches of a
                length in `PAD_SIZES`.

        Raises:
            InvalidArgumentError: there are more pairs than `size`; nothing was exchanged.
        """
        chosen = _tensor(pairs)
        if size is not None:
            self._exchange(self.views, self._padded(chosen, size))
        elif not self.graphed:
            if len(chosen):
                self._exchange(self.views, chosen)
        else:
            for batch in chosen.split(PAD_SIZES[-1]) if len(chosen) else ():
                self._exchange(self.views, self._padded(batch, pad_size(len(batch))))

    def _padded(self, pairs: Tensor, size: int) -> Tensor:
        if len(pairs) > size:
            raise InvalidArgumentError(f"{len(pairs)} pairs do not fit a batch of {size}")
        if size not in self._buffers:
            self._buffers[size] = torch.empty((size, 2), dtype=torch.int64)
        buffer = self._buffers[size]
        buffer[: len(pairs)] = pairs
        buffer[len(pairs) :] = PADDING
        return buffer


def cache_views(kv_caches: Sequence[Tensor | Sequence[Tensor | None]], block_size: int) -> list[Tensor]:
    """See an engine's cache tensors as blocks.

    Args:
        kv_caches: one entry a layer: a tensor, or a tuple of tensors (keys, values, scales) of which any may be None.
            MLA's has keys only. The first dimension counts slots, or blocks.
        block_size: rows of the first dimension that make a block; 1 if it counts blocks.

    Returns:
        A uint8 view `[blocks, bytes]` of each tensor.

    Raises:
        InvalidArgumentError: the block size is not positive.
        LayoutError: there are no tensors, one cannot be seen as `[blocks, bytes]`, two share memory, or they have
            unequal numbers of blocks.
    """
    if block_size < 1:
        raise InvalidArgumentError(f"block_size is {block_size}, must be at least 1")
    layers = [(layer,) if isinstance(layer, Tensor) else layer for layer in kv_caches]
    views = [_block_view(tensor, block_size) for layer in layers for tensor in layer if tensor is not None]
    if not views:
        raise LayoutError("the engine has no cache tensors")
    sizes = {len(view) for view in views}
    if len(sizes) > 1:
        raise LayoutError(f"the cache tensors have unequal numbers of blocks: {sorted(sizes)}")
    check_views(views)
    return views


def pad_size(count: int) -> int:
    """Give the smallest length in `PAD_SIZES` that holds `count` pairs.

    Raises:
        InvalidArgumentError: there is none.
    """
    for size in PAD_SIZES:
        if count <= size:
            return size
    raise InvalidArgumentError(f"{count} pairs do not fit a batch of {PAD_SIZES[-1]}")


def _block_view(tensor: Tensor, block_size: int) -> Tensor:
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


def _tensor(pairs: Ids | Tensor) -> Tensor:
    return pairs if isinstance(pairs, Tensor) else torch.from_numpy(pairs)
