"""The KV tensor of a nano engine, and the host's copies of its blocks."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from blockyard.engine.engine import CacheEngine
from blockyard.errors import InvalidArgumentError
from blockyard.layout.kv import KVLayout

KIND: Final = "kv layers blocks tokens heads dim"
"""Dimensions of the KV tensor, outermost first."""


class KVTensor:
    """Moves the blocks of an engine's KV tensor, within it and to the host and back: a `CacheEngine`, used at once.

    On a CUDA device work is queued on the current stream, which has to be the one that the model runs on. So nothing
    waits for it, which `StepExecutor` would: its tickets end on the CPU.

    Args:
        kv_cache: the engine's own, `[2, layers, blocks, block_size, heads, dim]`, any dtype and device.
        host_blocks: blocks that the host keeps, made ready in the background; page-locked with a CUDA device.

    Attributes:
        num_blocks: blocks of the tensor.
        host_rows: uint8 `[host_blocks, bytes_per_block]`, keys and values of all layers side by side.

    Raises:
        InvalidArgumentError: the number of host blocks is negative.
        LayoutError: the tensor has another shape, or its blocks are not whole.
        OpLibraryError: the op library has no code for this device.
        OutOfMemoryError: the system does not give so much memory.
        PageLockError: memory of the host cannot be page-locked.
    """

    def __init__(self, kv_cache: Tensor, *, host_blocks: int = 0) -> None:
        if host_blocks < 0:
            raise InvalidArgumentError(f"host_blocks is {host_blocks}, must be at least 0")
        self.layout = KVLayout.from_tensors([kv_cache], kind=KIND)
        self.num_blocks = self.layout.num_blocks(kv_cache)
        engine = CacheEngine(
            self.layout,
            num_device_blocks=self.num_blocks,
            num_host_blocks=host_blocks,
            device=kv_cache.device,
            tensors=[kv_cache],
        )
        self.host_rows = engine.memory.host_rows
        self.execute = engine.execute
