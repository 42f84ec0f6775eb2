"""The KV tensor of a nano engine, and the host's copies of its blocks."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from blockyard._core import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError, MappingError
from blockyard.layout import KVLayout
from blockyard.transfer import ops
from blockyard.transfer.caches import as_tensor
from blockyard.transfer.cuda import check_device, op_library
from blockyard.transfer.hostpool import HostPool

KIND: Final = "kv layers blocks tokens heads dim"
"""Dimensions of the KV tensor, outermost first."""


class KVTensor:
    """Moves the blocks of an engine's KV tensor, within it and to the host and back.

    On a CUDA device work is queued on the current stream, which has to be the one that the model runs on.

    Args:
        kv_cache: the engine's own, `[2, layers, blocks, block_size, heads, dim]`, any dtype and device.
        host_blocks: blocks that the host keeps, made ready in the background; page-locked with a CUDA device.

    Attributes:
        num_blocks: blocks of the tensor.
        host_rows: uint8 `[host_blocks, bytes_per_block]`, keys and values of all layers side by side.

    Raises:
        HostMemoryError: the system does not give so much memory.
        InvalidArgumentError: the number of host blocks is negative.
        LayoutError: the tensor has another shape, or its blocks are not whole.
        OpLibraryError: the op library has no code for this device.
    """

    def __init__(self, kv_cache: Tensor, *, host_blocks: int = 0) -> None:
        if host_blocks < 0:
            raise InvalidArgumentError(f"host_blocks is {host_blocks}, must be at least 0")
        if kv_cache.is_cuda:
            check_device(kv_cache.device, op_library())
        self.layout = KVLayout.from_tensors([kv_cache], kind=KIND)
        self.num_blocks = self.layout.num_blocks(kv_cache)
        self._pool = HostPool.for_device(host_blocks, self.layout.bytes_per_block, kv_cache.device)
        self.host_rows = self._pool.rows
        self._device, self._host = self.layout.views([kv_cache]), self.layout.row_views(self.host_rows)

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision.

        Args:
            decision: transfers within the device and between device and host.

        Returns:
            The pairs that did not land: none.

        Raises:
            HostMemoryError: memory of the host cannot be made ready.
            MappingError: an id is out of range, or a transfer is of the external tier.
        """
        for kind, pairs in decision.transfers():
            self._await_host(pairs)
            self._transfer(kind, as_tensor(pairs.ids))
        return []

    def _await_host(self, pairs: Pairs) -> None:
        """Wait until the blocks of the host that are named are ready; those out of range are refused later."""
        for column, tier in enumerate((pairs.src, pairs.dst)):
            if tier == "host" and len(pairs):
                self._pool.wait(min(int(pairs.ids[:, column].max()) + 1, self._pool.num_blocks))

    def _transfer(self, kind: str, pairs: Tensor) -> None:
        if kind == "swap_out":
            ops.swap_blocks(self._device, self._host, pairs)
        elif kind == "swap_in":
            ops.swap_blocks(self._host, self._device, pairs)
        elif kind == "copy":
            ops.copy_blocks(self._device, pairs)
        elif kind == "move":
            ops.move_blocks(self._device, pairs)
        elif kind == "exchange":
            ops.exchange_blocks(self._device, pairs)
        else:
            raise MappingError(f"{len(pairs)} pairs of kind {kind!r} cannot be carried out here")
