"""How many blocks device and host have room for beside a model."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import torch

from blockyard.engine.engine import CacheEngine
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.transformers.attention import StepInput
from blockyard.integrations.transformers.model import PagedModel

__all__ = ["MEMORY_UTILIZATION", "available_blocks", "available_memory"]

GIB = 1 << 30
MEMORY_UTILIZATION = 0.9


def available_blocks(
    model: PagedModel,
    *,
    memory_utilization: float = MEMORY_UTILIZATION,
    kv_cache_space: int = 4 * GIB,
    swap_space: int = 4 * GIB,
    max_num_batched_tokens: int = 8192,
) -> tuple[int, int]:
    """Return how many blocks the device and the host have room for.

    Args:
        model: the model that is to be served.
        memory_utilization: fraction of the device's memory that model, activations and cache may take together.
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
    size = model.layout.bytes_per_block
    host = int(memory_utilization * available_memory())
    if model.device.type == "cuda":
        free = _free_cuda_memory(model, memory_utilization, max_num_batched_tokens)
    else:
        free = min(kv_cache_space, host)
        host -= free
    if free < size:
        raise InvalidArgumentError(f"one block takes {size} bytes, the device has {max(free, 0)} to spare")
    return free // size, max(0, min(swap_space, host)) // size


def _free_cuda_memory(model: PagedModel, utilization: float, tokens: int) -> int:
    """Run the largest step over a throw-away cache, and see what memory is left beside it."""
    device, size = model.device, model.layout.block_size
    tokens = min(tokens, model.max_model_len or tokens)
    blocks = -(-tokens // size)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    engine = CacheEngine(model.layout, device_blocks=blocks, host_blocks=0, device=device)
    cache_bytes = blocks * model.layout.bytes_per_block
    model.bind(engine.tensors)
    where = StepInput(np.array([0]), np.array([tokens]), np.arange(blocks)[None], np.arange(tokens))
    model.forward(np.zeros(tokens, dtype=np.int64), where)
    peak = torch.cuda.max_memory_allocated(device) - cache_bytes
    model.close()
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
