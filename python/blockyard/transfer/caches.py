"""The memory of the copy engine: the caches of the device and of the host, their views, and what fits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard.errors import BlockyardError, InvalidArgumentError, LayoutError
from blockyard.layout import KVLayout
from blockyard.plan import CopyPlan, Ids, check_blocks, join
from blockyard.transfer.hostpool import HostPool

__all__ = ["Caches", "EngineTier", "Rows", "Traffic", "as_tensor"]

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

    Raises:
        InvalidArgumentError: a number of blocks is too small.
        HostMemoryError: the host's memory cannot be had or page-locked; later, from transfers.
    """

    def __init__(
        self, layout: KVLayout, *, num_device_blocks: int, num_host_blocks: int, device: str | torch.device = "cpu"
    ) -> None:
        if num_device_blocks < 1 or num_host_blocks < 0:
            raise InvalidArgumentError(
                f"{num_device_blocks} device and {num_host_blocks} host blocks: wanted at least 1 and 0"
            )
        self.layout = layout
        self.device = torch.device(device)
        shape, dtype = layout.tensor_shape(num_device_blocks), _torch_dtype(layout.dtype)
        self.device_caches: list[Tensor] = [
            torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(layout.num_tensors)
        ]
        self.host_pool = HostPool.for_device(num_host_blocks, layout.bytes_per_block, self.device)
        self.host_cache = self.host_pool.rows
        self._views: dict[EngineTier, list[Tensor]] = {
            "device": layout.views(self.device_caches),
            "host": layout.row_views(self.host_cache),
        }
        self._num_blocks: dict[EngineTier, int] = {"device": num_device_blocks, "host": num_host_blocks}
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
        """Give the number of blocks of a tier, `"device"` or `"host"`."""
        self._check_tier(tier)
        return self._num_blocks[tier]

    def _join(self, src: EngineTier, dst: EngineTier, ids: Ids) -> CopyPlan:
        self._check_tier(src)
        plan = join(
            ids,
            self.layout,
            src_blocks=self._num_blocks[src],
            dst_blocks=self._num_blocks[dst],
            in_place=src == dst,
        )
        if len(plan) and "host" in {src, dst}:
            self.host_pool.wait(int(plan.pairs[:, 0 if src == "host" else 1].max()) + 1)
        return plan

    def _count(self, src: EngineTier, dst: EngineTier, plan: CopyPlan) -> None:
        before = self._traffic.get((src, dst), Traffic(0, 0))
        self._traffic[src, dst] = Traffic(before.blocks + len(plan), before.num_bytes + plan.num_bytes)

    def _check_tier(self, tier: EngineTier) -> None:
        if self._closed:
            raise BlockyardError("the cache engine is closed")
        if tier not in self._num_blocks:
            raise InvalidArgumentError(f"tier {tier!r} is not one of device, host")

    def _between(self, tier: EngineTier, rows: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Give a tier's views and those of rows that go with them; rows of the host need no cutting."""
        if tier == "host":
            return [self.host_cache], [rows]
        return self._views["device"], self.layout.row_views(rows)

    def _places_by_layer(self) -> list[list[int]]:
        """Give the places of each layer's views; none where tensors do not follow the layers."""
        tensors_per_layer, rest = divmod(len(self.device_caches), self.layout.num_layers)
        owners = {tensor.untyped_storage().data_ptr(): index for index, tensor in enumerate(self.device_caches)}
        if rest or len(owners) < len(self.device_caches):
            return []
        places: list[list[int]] = [[] for _ in range(self.layout.num_layers)]
        for place, view in enumerate(self._views["device"]):
            places[owners[view.untyped_storage().data_ptr()] // tensors_per_layer].append(place)
        return places

    def _release(self) -> None:
        self._closed = True
        self._views.clear()
        self.device_caches = []
        self.host_pool.close()
        self.host_cache = self.host_pool.rows

    def _plan(self, sources: Ids, targets: Ids) -> CopyPlan:
        return CopyPlan(np.column_stack((sources, targets)), len(sources) * self.layout.bytes_per_block)

    def _check_rows(self, tier: EngineTier, blocks: Ids, rows: Rows) -> Ids:
        checked = check_blocks(blocks, self.num_blocks(tier), unique=True)
        wanted = (len(checked), self.layout.bytes_per_block)
        if rows.dtype != np.uint8 or rows.shape != wanted:
            raise LayoutError(f"rows are {rows.dtype} {list(rows.shape)}, wanted uint8 {list(wanted)}")
        return checked

    def _staging(self, num_rows: int) -> Tensor:
        shape = (num_rows, self.layout.bytes_per_block)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"this torch has no dtype {name!r}")
    return dtype


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """See an array as a tensor; torch takes only writable ones without a warning."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
