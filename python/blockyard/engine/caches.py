"""The memory of the copy engine: the caches of the device and of the host, their views, and what fits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard.engine.fill import HostFill
from blockyard.engine.host_pool import HostPool, OnFailure
from blockyard.engine.mapping import CopyPlan, Ids, check_blocks, in_runs, join
from blockyard.errors import BlockyardError, InvalidArgumentError, LayoutError
from blockyard.layout.kv import BlockLayout

__all__ = ["Caches", "EngineTier", "Rows", "Traffic", "as_tensor", "torch_dtype"]

EngineTier: TypeAlias = Literal["device", "host"]
Rows: TypeAlias = NDArray[np.uint8]


class Traffic(NamedTuple):
    """What went from one tier to another."""

    blocks: int
    num_bytes: int


class Caches:
    """The caches of the device (the engine's own tensors) and of the host (rows), all zeros at first.

    Args:
        layout: of the device's tensors.
        num_device_blocks: at least 1.
        num_host_blocks: 0 means no host tier; page-locked memory with a CUDA device, made ready in the background:
            transfers wait for the blocks they name.
        device: where the device's caches live.
        device_caches: tensors that there are already, as `layout.views` takes them; made here if None.
        blocks_per_host_block: device blocks that one host block holds, any number from 1. Host ids then count device
            blocks: part `p` of host block `b` is `b * blocks_per_host_block + p`, and the engine knows which parts
            hold bytes. None: a host block is a device block, and what it holds is for the books to know.
        on_host_failure: what follows where the host's memory cannot be page-locked: an error (`"raise"`), or ordinary
            memory from there on (`"unpinned"`), which copies slowly; `host_pool.problem` says why.

    Raises:
        InvalidArgumentError: a number of blocks is too small, or `on_host_failure` is another word.
        LayoutError: the tensors given do not have the layout, or another number of blocks.
        OutOfMemoryError: the host's memory cannot be had; later, from transfers.
        PageLockError: it cannot be page-locked; later, from transfers.
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        device: str | torch.device = "cpu",
        device_caches: Sequence[Tensor] | None = None,
        blocks_per_host_block: int | None = None,
        on_host_failure: OnFailure = "raise",
    ) -> None:
        parts = 1 if blocks_per_host_block is None else blocks_per_host_block
        if num_device_blocks < 1 or num_host_blocks < 0 or parts < 1:
            raise InvalidArgumentError(
                f"{num_device_blocks} device and {num_host_blocks} host blocks of {parts}: wanted at least 1, 0 and 1"
            )
        self.layout = layout
        self.device = torch.device(device)
        self._parts = parts
        self.device_caches: list[Tensor] = (
            [
                torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)
                for shape, dtype in layout.tensor_shapes(num_device_blocks)
            ]
            if device_caches is None
            else list(device_caches)
        )
        self.host_pool = HostPool.for_device(
            num_host_blocks, parts * layout.bytes_per_block, self.device, on_failure=on_host_failure
        )
        self.host_cache = self.host_pool.rows
        self._host_rows = self.host_cache.view(-1, layout.bytes_per_block)
        self._views: dict[EngineTier, list[Tensor]] = {
            "device": layout.views(self.device_caches),
            "host": layout.row_views(self._host_rows),
        }
        found = self._views["device"][0]
        if len(found) != num_device_blocks or found.device.type != self.device.type:
            raise LayoutError(f"the tensors hold {len(found)} blocks on {found.device}, wanted {num_device_blocks}")
        self._num_blocks: dict[EngineTier, int] = {"device": num_device_blocks, "host": num_host_blocks * parts}
        self._fill = None if blocks_per_host_block is None else HostFill(num_host_blocks, blocks_per_host_block)
        self._traffic: dict[tuple[EngineTier, EngineTier], Traffic] = {}
        self._closed = False

    @property
    def counters(self) -> dict[tuple[EngineTier, EngineTier], Traffic]:
        """What was moved so far, by (source, destination) tier; `read_blocks` and `write_blocks` do not count."""
        return dict(self._traffic)

    @property
    def bytes_moved(self) -> int:
        """Bytes moved so far, over all tier pairs."""
        return sum(traffic.num_bytes for traffic in self._traffic.values())

    def num_blocks(self, tier: EngineTier) -> int:
        """Give the number of device blocks that a tier, `"device"` or `"host"`, has room for: its ids are below it."""
        self._check_tier(tier)
        return self._num_blocks[tier]

    @property
    def fill(self) -> HostFill:
        """Which parts of the host's blocks hold bytes.

        Raises:
            InvalidArgumentError: the engine was made without `blocks_per_host_block`.
        """
        if self._fill is None:
            raise InvalidArgumentError("a host block is a device block here: give blocks_per_host_block")
        return self._fill

    def _join(self, src: EngineTier, dst: EngineTier, ids: Ids, *, moves: bool = False) -> CopyPlan:
        self._check_tier(src)
        self._check_tier(dst)
        plan = join(
            ids,
            self.layout,
            src_blocks=self._num_blocks[src],
            dst_blocks=self._num_blocks[dst],
            in_place=src == dst and not moves,
        )
        if len(plan) and "host" in {src, dst}:
            last = int(plan.pairs[:, [at for at, tier in enumerate((src, dst)) if tier == "host"]].max())
            self.host_pool.wait(last // self._parts + 1)
        return plan

    def _count(self, src: EngineTier, dst: EngineTier, plan: CopyPlan) -> None:
        before = self._traffic.get((src, dst), Traffic(0, 0))
        blocks = plan.num_bytes // self.layout.bytes_per_block  # an exchange moves two of a pair
        self._traffic[src, dst] = Traffic(before.blocks + blocks, before.num_bytes + plan.num_bytes)

    def _check_tier(self, tier: EngineTier) -> None:
        if self._closed:
            raise BlockyardError("the cache engine is closed")
        if tier not in self._num_blocks:
            raise InvalidArgumentError(f"tier {tier!r} is not one of device, host")

    def _between(self, tier: EngineTier, rows: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Give a tier's views and those of rows that go with them; rows of the host need no cutting."""
        if tier == "host":
            return [self._host_rows], [rows]
        return self._views["device"], self.layout.row_views(rows)

    def _within(self, tier: EngineTier) -> list[Tensor]:
        """Give a tier's views for work within it."""
        return [self._host_rows] if tier == "host" else self._views["device"]

    def _places_by_layer(self) -> list[list[int]]:
        """Give the places of each layer's views; none where views do not follow the layers."""
        layers = self.layout.view_layers
        if not any(layers):
            return []
        return [[at for at, owner in enumerate(layers) if owner == layer] for layer in range(self.layout.num_layers)]

    def _release(self) -> None:
        self._closed = True
        self._views.clear()
        self.device_caches = []
        self.host_pool.close()
        self.host_cache = self.host_pool.rows
        self._host_rows = self.host_cache

    def _plan(self, sources: Ids, targets: Ids) -> CopyPlan:
        return CopyPlan(in_runs(np.column_stack((sources, targets))), len(sources) * self.layout.bytes_per_block)

    def _check_rows(self, tier: EngineTier, blocks: Ids, rows: Rows) -> Ids:
        checked = check_blocks(blocks, self.num_blocks(tier), unique=True)
        wanted = (len(checked), self.layout.bytes_per_block)
        if rows.dtype != np.uint8 or rows.shape != wanted:
            raise LayoutError(f"rows are {rows.dtype} {list(rows.shape)}, wanted uint8 {list(wanted)}")
        return checked

    def _staging(self, num_rows: int) -> Tensor:
        shape = (num_rows, self.layout.bytes_per_block)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


def torch_dtype(name: str) -> torch.dtype:
    """Give torch's dtype of a layout's name for it. Raises LayoutError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"this torch has no dtype {name!r}")
    return dtype


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """See an array as a tensor; torch takes only writable ones without a warning."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
