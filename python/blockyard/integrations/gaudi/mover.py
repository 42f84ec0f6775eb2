"""Moves blocks within a pool, in all cache tensors of an engine at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from blockyard.engine import ops
from blockyard.engine.mapping import Ids
from blockyard.engine.ops.checks import PADDING, MappingRule, mapping_of
from blockyard.errors import InvalidArgumentError, LayoutError, MappingError
from blockyard.layout.kv import check_views

# Batches are padded to one of these lengths, so that a captured graph fits many batches.
PAD_SIZES = (8, 16, 32, 64, 128, 256, 512)

Move = Callable[[Sequence[Tensor], Tensor], None]
"""Takes views of the caches and pairs of block ids, int64 `[n, 2]`.

On a CPU and on CUDA the views are uint8 `[blocks, bytes]`, the pairs are on the CPU, and `(-1, -1)` is padding. On any
other device the views are `[blocks, elements]` of the caches' dtype, and the pairs are checked and on that device;
padding repeats the first pair, so a function that reads all rows before writing any needs no mask.
"""


class BlockMover:
    """Moves and exchanges blocks in all tensors of a pool at once.

    Args:
        views: `[blocks, bytes]`, from `cache_views` or a layout's `views`, all on one device.
        exchange: swaps the two blocks of each pair. Defaults to the torch op; on devices without its kernel, to
            `index_select` and `index_copy_`.
        move: copies the first block of each pair over the second, as if all were read before any is written. Its
            default is chosen in the same way.
        graphed: always pad pairs to a length in `PAD_SIZES`, and on CPU or CUDA reuse the same tensors; one-way moves
            become exchanges.
        wrap: applied once to `exchange`, for example `torch.compile` or graph capture.
        mark_step: called before and after each `exchange` and `move`, for devices that queue work until asked to:
            `habana_frameworks.torch.core.mark_step`.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from blockyard.integrations.gaudi import BlockMover
        >>> view = torch.arange(4, dtype=torch.uint8)[:, None].repeat(1, 64)
        >>> BlockMover([view]).exchange(np.array([[0, 3]]))
        >>> view[:, 0].tolist()
        [3, 1, 2, 0]
    """

    def __init__(
        self,
        views: Sequence[Tensor],
        *,
        exchange: Move | None = None,
        move: Move | None = None,
        graphed: bool = False,
        wrap: Callable[[Move], Move] | None = None,
        mark_step: Callable[[], object] | None = None,
    ) -> None:
        self.views = list(views)
        self.num_blocks = len(self.views[0])
        self.bytes_per_block = sum(view.shape[1] * view.itemsize for view in self.views)
        self.graphed = graphed
        self._has_kernels = ops.has_kernels(self.views[0].device)
        chosen: Move = exchange or (ops.exchange_blocks if self._has_kernels else _exchange_rows)
        self._exchange = wrap(chosen) if wrap is not None else chosen
        self._move: Move = move or (ops.move_blocks if self._has_kernels else _move_rows)
        self._mark_step = mark_step
        self._buffers: dict[int, Tensor] = {}

    def move(self, pairs: Ids | Tensor) -> None:
        """Copy the first block of each pair over the second, as if all were read before any is written.

        Args:
            pairs: int64 `[n, 2]`, CPU; no destination repeats. When graphed, no block may repeat, and both blocks of a
                pair are overwritten.

        Raises:
            MappingError: they have another shape or dtype, an id is out of range or repeats; nothing was moved.
        """
        chosen = _tensor(pairs)
        if self.graphed:
            self.exchange(chosen)
        elif len(chosen):
            self._run("move", self._move, chosen, self.views)

    def exchange(self, pairs: Ids | Tensor, *, size: int | None = None, views: Sequence[Tensor] | None = None) -> None:
        """Swap the two blocks of each pair.

        Args:
            pairs: int64 `[n, 2]`, CPU; no block is named twice. `(-1, -1)` is padding.
            size: use one batch padded to this length. By default pairs are not padded, or when graphed, padded to a
                length in `PAD_SIZES`.
            views: swap only in these, on the mover's device; by default in all of the mover's views.

        Raises:
            InvalidArgumentError: there are more pairs than `size`; nothing was exchanged.
            MappingError: they have another shape or dtype, an id is out of range or repeats; nothing was exchanged.
        """
        chosen, views = _tensor(pairs), self.views if views is None else views
        if not self._has_kernels:
            self._check("exchange", chosen, views)
        for batch in self._batches(chosen, size):
            self._run("exchange", self._exchange, batch, views)

    def _batches(self, pairs: Tensor, size: int | None) -> Iterator[Tensor]:
        if size is not None:
            yield self._padded(pairs, size)
        elif len(pairs):
            # The ops bound their memory use themselves.
            is_split = self.graphed or not self._has_kernels
            for part in pairs.split(PAD_SIZES[-1]) if is_split else (pairs,):
                yield self._padded(part, pad_size(len(part))) if self.graphed else part

    @staticmethod
    def _check(rule: MappingRule, pairs: Tensor, views: Sequence[Tensor]) -> Tensor:
        """Check pairs as the ops do. Returns them without padding."""
        return torch.from_numpy(mapping_of(rule, pairs, len(views[0]), len(views[0])).pairs)

    def _run(self, rule: MappingRule, move: Move, pairs: Tensor, views: Sequence[Tensor]) -> None:
        if not self._has_kernels:
            named = self._check(rule, pairs, views)
            if not len(named):
                return
            pairs = torch.cat((named, named[:1].expand(len(pairs) - len(named), 2))).to(views[0].device)
        if self._mark_step is not None:
            self._mark_step()
        move(views, pairs)
        if self._mark_step is not None:
            self._mark_step()

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
    """View an engine's cache tensors as blocks.

    Args:
        kv_caches: one entry per layer: a tensor, or a tuple of tensors (keys, values, scales) of which any may be None.
            MLA has keys only. The first dimension counts slots or blocks.
        block_size: rows of the first dimension that make a block; 1 if it counts blocks.

    Returns:
        A uint8 view `[blocks, bytes]` of each tensor; on a device without kernels, a view `[blocks, elements]` of the
        tensor's dtype.

    Raises:
        InvalidArgumentError: the block size is not positive.
        LayoutError: there are no tensors, one cannot be viewed as `[blocks, bytes]`, two share memory (not checked on a
            device without kernels), or their numbers of blocks or devices differ.
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
    devices = {str(view.device) for view in views}
    if len(devices) > 1:
        raise LayoutError(f"the cache tensors are on several devices: {sorted(devices)}")
    if ops.has_kernels(views[0].device):  # on other devices addresses may be meaningless
        check_views(views)
    return views


def _exchange_rows(views: Sequence[Tensor], pairs: Tensor) -> None:
    _move_rows(views, torch.cat((pairs, pairs.flip(1))))


def _move_rows(views: Sequence[Tensor], pairs: Tensor) -> None:
    for view in views:
        view.index_copy_(0, pairs[:, 1], view.index_select(0, pairs[:, 0]))


def pad_size(count: int) -> int:
    """Return the smallest length in `PAD_SIZES` that holds `count` pairs.

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
        flat = tensor.view(torch.uint8) if ops.has_kernels(tensor.device) else tensor
        return flat.view(tensor.shape[0] // block_size, -1)
    except RuntimeError as error:
        shape, strides = list(tensor.shape), list(tensor.stride())
        raise LayoutError(
            f"a cache tensor of shape {shape} has strides {strides}: a block is not contiguous"
        ) from error


def _tensor(pairs: Ids | Tensor) -> Tensor:
    """Return pairs as a tensor. The copies check its values; padding would broadcast other shapes."""
    found = pairs if isinstance(pairs, Tensor) else torch.from_numpy(pairs)
    if found.dtype != torch.int64 or found.dim() != 2 or found.shape[1] != 2:
        raise MappingError(f"pairs are {str(found.dtype)[6:]} {list(found.shape)}, must be int64 [n, 2]")
    return found
