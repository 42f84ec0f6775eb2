"""The copy engine's memory: device tensors, host rows, staging rows, and the views that pair them."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard._core import Mapping
from blockyard.engine.cuda.streams import with_index
from blockyard.engine.host_pool import HostPool, OnFailure
from blockyard.engine.ops import bind
from blockyard.engine.ops.library import declare_region
from blockyard.errors import BlockyardError, InvalidArgumentError, LayoutError, OutOfMemoryError
from blockyard.layout.kv import BlockLayout, check_views
from blockyard.layout.sizes import as_int
from blockyard.workers.buffers import Buffers, fresh_pages

__all__ = ["EngineTier", "HostPage", "Memory", "Rows", "Run", "as_tensor", "page_view", "torch_dtype", "zeros"]

EngineTier: TypeAlias = Literal["device", "host"]
Rows: TypeAlias = NDArray[np.uint8]
Run: TypeAlias = Callable[[Mapping], None]

MAX_BLOCKS: Final = 2**31 - 1
"""Maximum number of blocks: ids are int32 in block tables."""

KEPT_BYTES: Final = 1 << 30
"""Bytes of staging rows kept for reuse."""

BOUND_BUFFERS, BOUND_BYTES = 64, 256 << 20
"""How many staging buffers' views stay checked, and their bytes: they keep a buffer that would else be freed."""

GROUP_BYTES: Final = 128 << 10
"""On CUDA, layers are loaded in groups of at least this many bytes per block: shorter rows are not worth staging."""


@dataclass(frozen=True)
class HostPage:
    """Where the blocks of a page class are in a host pool.

    Attributes:
        pool: the pool, whose rows are extents; or the blocks themselves if there is one class.
        per_row: number of blocks in a row.
    """

    pool: HostPool
    per_row: int = 1

    def rows(self, num_blocks: int, bytes_per_block: int) -> Tensor:
        """Return the blocks, uint8 `[num_blocks, bytes_per_block]`."""
        return page_view(self.pool.rows, num_blocks, bytes_per_block, self.per_row)


def page_view(extents: Tensor, num_blocks: int, bytes_per_block: int, per_extent: int) -> Tensor:
    """Return the blocks of a page class as a view of extents, uint8 `[extents, bytes]`."""
    return extents.as_strided((num_blocks, bytes_per_block), (extents.shape[1] // per_extent, 1))


class Memory:
    """The blocks of device (the engine's tensors) and host (rows), initially zeros.

    Args:
        layout: layout of the device's tensors.
        device_blocks: at least 1; None means as many as the tensors hold.
        host_blocks: 0 means no host tier. With a CUDA device the memory is page-locked and prepared in the background:
            transfers wait for the blocks they name.
        device: device of the tensors.
        tensors: existing tensors, as accepted by `layout.views`; None means to allocate them.
        pin_memory: whether to page-lock host and staging memory, which requires a CUDA device; by default if there is
            one.
        on_host_failure: what to do if host memory cannot be page-locked: raise an error (`"raise"`), or use pageable
            memory from there on (`"unpinned"`), which copies slowly; `host_pool.problem` says why.
        page: the host memory of a page class, which shares it with others; None for memory of its own.

    Attributes:
        tensors: the device's tensors.
        pin_memory: whether host and staging memory is page-locked.
        per_extent: number of blocks in an extent of an arena; 1 if there is one page class.
        host_pool: owns the host's memory.
        host_rows: uint8 `[host_blocks, bytes_per_block]`.
        views: views of both tiers; view i of one corresponds to view i of the other.
        buffers: reusable staging rows, as fresh ones cost ten times as much as a copy.

    Raises:
        InvalidArgumentError: a number of blocks is out of range, `on_host_failure` is invalid, or `pin_memory` is true
            and the device is not a CUDA device.
        LayoutError: the tensors given do not have the layout, or another number of blocks.
        OutOfMemoryError: device or host memory is not available; for the host, transfers may raise it later.
        PageLockError: it cannot be page-locked; transfers may raise it later.
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        device_blocks: int | None,
        host_blocks: int,
        device: str | torch.device = "cpu",
        tensors: Sequence[Tensor] | None = None,
        pin_memory: bool | None = None,
        on_host_failure: OnFailure = "raise",
        page: HostPage | None = None,
    ) -> None:
        if device_blocks is None:
            if tensors is None:
                raise InvalidArgumentError("device_blocks is None, and there are no tensors to count blocks in")
            device_blocks = len(layout.views(tensors)[0])
        device_blocks, host_blocks = as_int("device_blocks", device_blocks), as_int("host_blocks", host_blocks)
        for name, value, minimum in (("device_blocks", device_blocks, 1), ("host_blocks", host_blocks, 0)):
            if not minimum <= value <= MAX_BLOCKS:
                raise InvalidArgumentError(f"{name} is {value}, must be {minimum} to {MAX_BLOCKS}")
        self.layout = layout
        self.bytes_per_block = layout.bytes_per_block  # the layout computes it at each call
        self.device = with_index(device)
        on_cuda = self.device.type == "cuda"
        if pin_memory and not on_cuda:
            raise InvalidArgumentError(f"pin_memory is True, device is {self.device}: page-locking needs a CUDA device")
        self.pin_memory = on_cuda if pin_memory is None else bool(pin_memory)
        if tensors is None:
            tensors = zeros(layout.tensor_shapes(device_blocks), self.device, f"device_blocks is {device_blocks}")
        self.tensors = list(tensors)
        self._page = page or HostPage(
            HostPool.for_device(
                host_blocks,
                layout.bytes_per_block,
                self.device,
                pin_memory=self.pin_memory,
                on_failure=on_host_failure,
            )
        )
        self.per_extent = self._page.per_row
        self.host_pool = self._page.pool
        self.host_rows = self._page.rows(host_blocks, layout.bytes_per_block)
        self.views: dict[EngineTier, list[Tensor]] = {
            "device": layout.views(self.tensors),
            "host": layout.row_views(self.host_rows),
        }
        self.buffers = Buffers(self._staging_of, KEPT_BYTES)
        self._bound: dict[object, Run] = {}
        self._made: dict[int, weakref.ref[Rows]] = {}  # the staging buffers, by their addresses
        self._bound_rows: dict[tuple[EngineTier, bool, int], tuple[Run, int]] = {}  # with the bytes of its buffer
        found = self.views["device"][0]
        wrong_device = found.device.type != self.device.type or (found.device.index or 0) != (self.device.index or 0)
        if wrong_device:
            raise LayoutError(f"the tensors are on {found.device}, device is {self.device}")
        if len(found) != device_blocks:
            raise LayoutError(f"device_blocks is {device_blocks}, must be {len(found)}, the blocks of the tensors")
        self._num_blocks: dict[EngineTier, int] = {"device": device_blocks, "host": host_blocks}
        self._closed = False
        storages = {tensor.untyped_storage() for tensor in self.tensors if tensor.is_cuda}
        regions = {storage.data_ptr(): storage.nbytes() for storage in storages}
        for address, num_bytes in regions.items():
            declare_region(address, num_bytes, 0)
        self._take_back = weakref.finalize(self, _take_back, tuple(regions))
        self._take_back.atexit = False

    def num_blocks(self, tier: EngineTier) -> int:
        """Return the number of blocks in a tier.

        Raises:
            BlockyardError: the memory was released.
            InvalidArgumentError: the tier is neither `"device"` nor `"host"`.
        """
        if self._closed:
            raise BlockyardError("the cache engine is closed")
        found = self._num_blocks.get(tier)
        if found is None:
            raise InvalidArgumentError(f"tier {tier!r} is not one of {', '.join(self._num_blocks)}")
        return found

    def wait_for_host(self, num_blocks: int) -> None:
        """Wait until the first host blocks are ready, see `HostPool.wait`."""
        self.host_pool.wait(-(-num_blocks // self._page.per_row))

    def shares_device(self, other: Memory) -> bool:
        """Whether a byte of this memory's device blocks is in the other's, too."""
        if self.device != other.device:
            return False
        try:
            check_views([*self.views["device"], *other.views["device"]])
        except LayoutError:
            return True
        return False

    def run(self, src: EngineTier, dst: EngineTier) -> Run:
        """Return a call that carries out mappings between two tiers or within one; it checks the views once."""
        if (src, dst) not in self._bound:
            within = self.views["device"] if src == "device" else [self.host_rows]
            self._bound[src, dst] = bind(within) if src == dst else bind(self.views[src], self.views[dst])
        return self._bound[src, dst]

    def run_by_layer(self, src: EngineTier, dst: EngineTier) -> tuple[list[Run], list[int]]:
        """Return calls that carry out mappings for groups of layers, and the group of each layer.

        Both are empty if views are not in layer order.
        """
        groups = self.layer_groups(GROUP_BYTES if self.device.type == "cuda" else 0)
        for number, layers in enumerate(groups):
            if (src, dst, number) not in self._bound:
                chosen = [at for layer in layers for at in self.by_layer()[layer]]
                views = [[self.views[tier][at] for at in chosen] for tier in (src, dst)]
                # A group whose layers all share the views of earlier groups has no views.
                self._bound[src, dst, number] = bind(*views) if chosen else _nothing
        runs = [self._bound[src, dst, number] for number in range(len(groups))]
        return runs, [number for number, layers in enumerate(groups) for _ in layers]

    def layer_groups(self, min_bytes: int) -> list[list[int]]:
        """Group adjacent layers: as few as have `min_bytes` per block together. The last group may have more."""
        groups: list[list[int]] = []
        held = min_bytes
        for layer, places in enumerate(self.by_layer()):
            if held >= min_bytes:
                groups.append([])
                held = 0
            groups[-1].append(layer)
            held += sum(self.views["device"][at].shape[1] for at in places)
        # The last group is too small: merge it into the one before.
        if held < min_bytes and len(groups) > 1:
            rest = groups.pop()
            groups[-1] += rest
        return groups

    def run_with(self, tier: EngineTier, rows: Tensor, *, written: bool) -> Run:
        """Return a call that carries out mappings between a tier and rows.

        Args:
            tier: the tier.
            rows: uint8 `[n, bytes_per_block]`. If they are a whole staging buffer, the views are checked once for all
                calls, as that takes longer than a small copy.
            written: whether the tier is written and rows read, or the other way round.
        """
        made = self._made.get(rows.data_ptr())
        key = (tier, written, rows.data_ptr())
        is_ours = made is not None and (buffer := made()) is not None and buffer.nbytes == rows.nbytes
        if is_ours and key in self._bound_rows:
            return self._bound_rows[key][0]
        views = [rows] if tier == "host" else self.layout.row_views(rows)
        cache = [self.host_rows] if tier == "host" else self.views["device"]
        run = bind(views, cache) if written else bind(cache, views)
        if is_ours:
            self._bound_rows[key] = run, rows.numel()
            while (
                len(self._bound_rows) > BOUND_BUFFERS
                or sum(num_bytes for _, num_bytes in self._bound_rows.values()) > BOUND_BYTES
            ):
                del self._bound_rows[next(iter(self._bound_rows))]
        return run

    def buffer_of(self, rows: Rows) -> tuple[Rows, int]:
        """Return the rows of the staging buffer that rows are part of, and the first; for other rows these and 0."""
        base = rows
        while isinstance(base.base, np.ndarray):
            base = base.base
        address = base.ctypes.data
        made = self._made.get(address)
        first, rest = divmod(rows.ctypes.data - address, self.bytes_per_block)
        if made is None or made() is not base or rest or not rows.flags.c_contiguous:
            return rows, 0
        return base.reshape(-1, self.bytes_per_block), first

    def by_layer(self) -> list[list[int]]:
        """Return the indices of each layer's views; empty if views are not in layer order."""
        layers = self.layout.view_layers
        if not any(layers):
            return []
        return [[at for at, owner in enumerate(layers) if owner == layer] for layer in range(self.layout.num_layers)]

    def staging(self, num_rows: int) -> Tensor:
        """Make rows, uint8 `[n, bytes_per_block]`, for copies to and from the device; asynchronous if `pin_memory`.

        They are page-aligned, so that the file store reads and writes them in place.
        """
        num_bytes = num_rows * self.bytes_per_block
        if not self.pin_memory:
            return torch.from_numpy(fresh_pages(num_bytes)).view(num_rows, self.bytes_per_block)
        whole = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
        start = -whole.data_ptr() % mmap.PAGESIZE
        return whole[start : start + num_bytes].view(num_rows, self.bytes_per_block)

    def _staging_of(self, num_bytes: int) -> Rows:
        """Make staging rows in few sizes, so that most can be reused."""
        num_rows = 1 << (-(-num_bytes // self.bytes_per_block) - 1).bit_length()
        rows: Rows = self.staging(num_rows).numpy()
        self._made = {address: made for address, made in self._made.items() if made() is not None}
        self._made[rows.ctypes.data] = weakref.ref(rows)
        return rows.reshape(-1)

    def release(self) -> None:
        """Release all memory."""
        self._closed = True
        self._take_back()
        self.views.clear()
        self._bound.clear()
        self._bound_rows.clear()
        self.buffers.clear()
        self.tensors = []
        self.host_pool.close()
        self.host_rows = self._page.rows(0, self.bytes_per_block)


def _take_back(addresses: Sequence[int]) -> None:
    for address in addresses:
        declare_region(address, 0, 0)


def _nothing(mapping: Mapping) -> None:
    del mapping


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a layout's dtype name. Raises LayoutError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"this torch has no dtype {name!r}")
    return dtype


def zeros(shapes: Sequence[tuple[tuple[int, ...], str]], device: torch.device, asked: str) -> list[Tensor]:
    """Allocate tensors of these shapes and dtypes. Raises OutOfMemoryError, which says what was `asked` for."""
    try:
        return [torch.zeros(shape, dtype=torch_dtype(dtype), device=device) for shape, dtype in shapes]
    except RuntimeError as error:
        size = sum(prod(shape) * torch_dtype(dtype).itemsize for shape, dtype in shapes)
        raise OutOfMemoryError(f"{asked}: cannot allocate {size} bytes on {device}: {error}") from error


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """View an array as a tensor; torch accepts only writable ones without a warning."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
