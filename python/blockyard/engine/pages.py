"""The memory of page classes: each class sees the extents of one arena as its own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from blockyard._core import BlockManager
from blockyard.engine.host_pool import HostPool, OnFailure
from blockyard.engine.memory import HostPage, Memory, page_view, torch_dtype, zeros
from blockyard.errors import InvalidArgumentError, LayoutError
from blockyard.layout.arena import ALIGNMENT, ArenaLayout

__all__ = ["field_tensors", "page_memories"]


class _Page(NamedTuple):
    """A page class of a manager: its maximum number of blocks on device and host, and in an extent."""

    device_blocks: int
    host_blocks: int
    per_extent: int


def page_memories(
    layout: ArenaLayout,
    manager: BlockManager,
    *,
    tensors: Sequence[Tensor] | None,
    device: torch.device,
    pin_memory: bool | None,
    on_host_failure: OnFailure,
) -> list[Memory]:
    """Make the memory of each page class over one arena on the device, and one on the host.

    Args:
        layout: the blocks.
        manager: has the numbers of blocks and extents.
        tensors: the arena on the device, one tensor uint8 `[bytes]`; None means to allocate it.
        device: see `Memory` for this and the other arguments.
        pin_memory: see there.
        on_host_failure: see there.

    Raises:
        LayoutError: the manager has other blocks, or the tensor is not such an arena.
        InvalidArgumentError, OutOfMemoryError, PageLockError: as for `Memory`.
    """
    extent_bytes, pages = _pages(layout, manager)
    first = pages[0]
    count, host_count = first.device_blocks // first.per_extent, first.host_blocks // first.per_extent
    if tensors is None:
        tensors = zeros([((count * extent_bytes,), "uint8")], device, f"the arena has {count} extents")
    arena = _given(tensors)
    if arena.numel() < count * extent_bytes:
        raise LayoutError(f"the arena has {arena.numel()} bytes, the manager {count} extents of {extent_bytes}")
    if len(pages) == 1:  # without extents, for a resize: all blocks that the arena holds
        count = arena.numel() // extent_bytes
        pages = [first._replace(device_blocks=count)]
    extents = arena[: count * extent_bytes].view(count, extent_bytes)
    pins = device.type == "cuda" if pin_memory is None else bool(pin_memory)
    pool = HostPool.for_device(host_count, extent_bytes, device, pin_memory=pins, on_failure=on_host_failure)
    make = partial(Memory, device=device, pin_memory=pin_memory)
    return [
        make(
            of_class,
            device_blocks=page.device_blocks,
            host_blocks=page.host_blocks,
            tensors=[page_view(extents, page.device_blocks, of_class.bytes_per_block, page.per_extent)],
            page=HostPage(pool, page.per_extent),
        )
        for of_class, page in zip(layout.pages, pages, strict=True)
    ]


def field_tensors(layout: ArenaLayout, blocks: Sequence[Tensor]) -> list[Tensor]:
    """Cut blocks into the fields of all groups.

    Args:
        layout: says where they are.
        blocks: the blocks of each page class, uint8 `[blocks, bytes]`; rows may lie apart.

    Returns:
        For each of the layout's `fields` a tensor `[blocks, tokens, ...]`, or `[blocks, ...]` for states, that shares
        memory with the blocks.
    """
    found = []
    for number, (_, fields) in enumerate(layout.groups):
        rows, tokens = blocks[layout.page_class(number)], layout.tokens(number)
        for start, field in zip(layout.offsets(number), fields, strict=False):
            part = rows[:, start : start + field.num_bytes(tokens)].view(torch_dtype(field.dtype))
            found.append(part.unflatten(1, field.shape_in_block(tokens)))
    return found


def _pages(layout: ArenaLayout, manager: BlockManager) -> tuple[int, list[_Page]]:
    """Return the bytes of an extent and the manager's page classes. An only class has no extents, only blocks."""
    if not isinstance(manager, BlockManager):
        raise InvalidArgumentError(f"manager is {manager!r:.100}, must be the BlockManager of an ArenaLayout's blocks")
    pools = [manager.pool("device", number) for number in range(manager.num_page_classes)]
    sizes, wanted = [pool.block_bytes for pool in pools], [page.bytes_per_block for page in layout.pages]
    if sizes != wanted:
        problem = f"the manager has page classes with blocks of {sizes} bytes, the layout of {wanted}"
        raise LayoutError(f"{problem}: give it the layout's cache_groups")
    if len(pools) > 1 and any(pool.block_stride is None for pool in pools):
        raise LayoutError("the manager has a fixed number of blocks of each class, must have an arena of extents")
    strides = [pool.block_stride or pool.block_bytes for pool in pools]
    if any(stride % ALIGNMENT for stride in strides):
        raise LayoutError(f"blocks lie {strides} bytes apart, must be multiples of {ALIGNMENT}: set other extent_bytes")
    pages = [
        _Page(pool.max_blocks, manager.pool("host", number).num_blocks, pool.per_extent or 1)
        for number, pool in enumerate(pools)
    ]
    return strides[0] * pages[0].per_extent, pages


def _given(tensors: Sequence[Tensor]) -> Tensor:
    """Check an arena that was given. Raises LayoutError."""
    (arena, *others) = tensors
    if others or arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        found = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors]
        raise LayoutError(f"tensors are {found}, must be one arena, torch.uint8 [bytes]")
    if arena.data_ptr() % ALIGNMENT:
        raise LayoutError(f"the arena begins at {arena.data_ptr():#x}, must be a multiple of {ALIGNMENT}")
    return arena
