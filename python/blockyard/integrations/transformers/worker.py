"""The resources of one device: model, caches, external tier; sized at the start as engines size them.

The calls go in this order: `determine_num_available_blocks` and `determine_num_external_available_blocks` say what
there is room for, `initialize_cache` and `initialize_external_cache` take it, `close` gives it all back.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from blockyard.engine.elastic.cache import ElasticCache
from blockyard.engine.engine import CacheEngine
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.transformers.attention import StepInput
from blockyard.integrations.transformers.model import PagedModel
from blockyard.layout.kv import LayoutKind
from blockyard.stores.base import ExternalStore, open_store, sized_url

if TYPE_CHECKING:
    from typing_extensions import Self

GIB = 1 << 30


class Worker:
    """Owns a paged model, its caches and the external tier.

    Args:
        model: a Hugging Face model; its device is where the device cache goes.
        block_size: tokens in a block.
        kind: how the device's caches are laid out.
        external_swapper: URL of the external tier, as `file:///dir?size=2GiB`; none if None.
        external_swapper_space: size of the external tier, bytes or text as `2GiB`, where the URL names none.

    Raises:
        UnsupportedModelError: the model cannot be served.
        InvalidArgumentError: a space is given, but no tier.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_size: int = 16,
        kind: LayoutKind = "kv_first",
        external_swapper: str | None = None,
        external_swapper_space: int | str | None = None,
    ) -> None:
        if external_swapper is None and external_swapper_space is not None:
            raise InvalidArgumentError(
                f"external_swapper_space is {external_swapper_space}, but no external_swapper is given"
            )
        self.model = PagedModel(model, block_size=block_size, kind=kind)
        self.engine: CacheEngine | None = None
        self.store: ExternalStore | None = None
        self.elastic: ElasticCache | None = None
        self._url = None if external_swapper is None else sized_url(external_swapper, external_swapper_space)

    def determine_num_available_blocks(
        self,
        *,
        memory_utilization: float = 0.9,
        kv_cache_space: int = 4 * GIB,
        swap_space: int = 4 * GIB,
        max_num_batched_tokens: int = 8192,
    ) -> tuple[int, int]:
        """Say how many blocks the device and the host have room for.

        Args:
            memory_utilization: share of the device's memory that model, activations and cache may take together.
            kv_cache_space: most bytes of the device cache where the device is the CPU, whose memory others want too.
            swap_space: most bytes of the host cache.
            max_num_batched_tokens: tokens of the largest step; a CUDA device runs one to see what it takes.

        Returns:
            Blocks of the device and of the host.

        Raises:
            InvalidArgumentError: the utilisation is not in (0, 1], or there is not room for one block.
        """
        if not 0 < memory_utilization <= 1:
            raise InvalidArgumentError(f"memory_utilization is {memory_utilization}, it must be above 0 and at most 1")
        size = self.model.layout.bytes_per_block
        host = int(memory_utilization * available_memory())
        if self.model.device.type == "cuda":
            free = self._free_cuda_memory(memory_utilization, max_num_batched_tokens)
        else:
            free = min(kv_cache_space, host)
            host -= free
        if free < size:
            raise InvalidArgumentError(f"one block takes {size} bytes, the device has {max(free, 0)} to spare")
        return free // size, max(0, min(swap_space, host)) // size

    def determine_num_external_available_blocks(self) -> int:
        """Open the external tier, and say how many blocks it holds.

        Returns:
            Its slots; 0 without a tier.

        Raises:
            StoreError: it cannot be opened so; see `open_store`.
        """
        if self._url is None:
            return 0
        if self.store is None:
            namespace = bytes.fromhex(self.model.layout.fingerprint())
            size = self.model.layout.bytes_per_block
            self.store = open_store(self._url, bytes_per_block=size, namespace=namespace)
        return self.store.num_slots

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int, *, elastic: bool = False) -> CacheEngine:
        """Allocate the caches of device and host, and bind the model to them.

        Args:
            num_device_blocks: at least 1.
            num_host_blocks: 0 for no host tier.
            elastic: lay the device's caches over memory that can be given back: `elastic` is then their owner.

        Returns:
            The engine that owns them; `close` closes it.

        Raises:
            InvalidArgumentError: a number is too small, or the caches are there already.
            OutOfMemoryError: an elastic cache gets too little memory.
        """
        if self.engine is not None:
            raise InvalidArgumentError(f"the caches are there: {self.engine.num_blocks('device')} device blocks")
        layout, device = self.model.layout, self.model.device
        if elastic:
            self.elastic = ElasticCache(
                layout, num_blocks=num_device_blocks, max_blocks=num_device_blocks, device=device
            )
        self.engine = CacheEngine(
            layout,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            device=device,
            tensors=None if self.elastic is None else self.elastic.tensors,
        )
        self.model.bind(self.engine.tensors)
        return self.engine

    def initialize_external_cache(self, num_external_blocks: int) -> ExternalStore | None:
        """Take the external tier into use.

        Args:
            num_external_blocks: slots that will be used; 0 closes the tier.

        Returns:
            The tier; None if 0 slots are wanted.

        Raises:
            InvalidArgumentError: the tier has fewer slots.
        """
        available = self.determine_num_external_available_blocks() if num_external_blocks else 0
        if num_external_blocks > available:
            raise InvalidArgumentError(f"{num_external_blocks} external blocks are wanted, the tier has {available}")
        if not num_external_blocks and self.store is not None:
            self.store.close()
            self.store = None
        return self.store

    def close(self) -> None:
        """Give back caches and tier, all of them even if one fails; twice does nothing."""
        with contextlib.ExitStack() as stack:
            if self.elastic is not None:
                stack.callback(self.elastic.close)
            if self.store is not None:
                stack.callback(self.store.close)
            if self.engine is not None:
                stack.callback(self.engine.close)
            stack.callback(self.model.close)
            self.store, self.engine, self.elastic = None, None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _free_cuda_memory(self, utilization: float, tokens: int) -> int:
        """Run the largest step over a throw-away cache, and see what memory is left beside it."""
        device, size = self.model.device, self.model.layout.block_size
        tokens = min(tokens, self.model.max_model_len or tokens)
        blocks = -(-tokens // size)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        engine = CacheEngine(self.model.layout, num_device_blocks=blocks, num_host_blocks=0, device=device)
        cache_bytes = blocks * self.model.layout.bytes_per_block
        self.model.bind(engine.tensors)
        where = StepInput(np.array([0]), np.array([tokens]), np.arange(blocks)[None], np.arange(tokens))
        self.model.forward(np.zeros(tokens, dtype=np.int64), where, samples=1)
        peak = torch.cuda.max_memory_allocated(device) - cache_bytes
        self.model.close()
        engine.close()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_allocated(device)
        return int(total * utilization) - others - peak


def available_memory() -> int:
    """Say how many bytes of main memory this process may still take: the machine's, or its control group's if less."""
    text = Path("/proc/meminfo").read_text(encoding="ascii") if Path("/proc/meminfo").exists() else ""
    found = [int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable:")]
    available = found[0] if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, max(0, limit - used))
    return available
