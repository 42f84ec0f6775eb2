"""How many blocks fit on device and host next to a model."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import torch

from blockyard.engine.engine import CacheEngine
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.transformers.attention import StepInput
from blockyard.integrations.transformers.model import ServedModel

__all__ = ["MEMORY_UTILIZATION", "available_blocks", "available_memory"]

GIB = 1 << 30
MEMORY_UTILIZATION = 0.9


def available_blocks(
    model: ServedModel,
    *,
    memory_utilization: float = MEMORY_UTILIZATION,
    kv_cache_space: int = 4 * GIB,
    swap_space: int = 4 * GIB,
    max_num_batched_tokens: int = 8192,
) -> tuple[int, int]:
    """Return how many blocks fit on the device and the host.

    Args:
        model: the model to serve.
        memory_utilization: fraction of the device's memory that model, activations and cache may take together.
        kv_cache_space: limit of the device cache in bytes if the device is the CPU, whose memory is shared with others.
        swap_space: limit of the host cache in bytes.
        max_num_batched_tokens: tokens of the largest step; on a CUDA device one is run to measure its memory.

    Returns:
        Number of device blocks and of host blocks.

    Raises:
        InvalidArgumentError: the utilization is not in (0, 1], or not even one block fits.
    """
    if not 0 < memory_utilization <= 1:
        raise InvalidArgumentError(f"memory_utilization is {memory_utilization}, must be above 0 and at most 1")
    size = model.layout.bytes_per_block
    host = int(memory_utilization * available_memory())
    if model.device.type == "cuda":
        free = _free_cuda_memory(model, memory_utilization, max_num_batched_tokens)
    else:
        free = min(kv_cache_space, host)
        host -= free
    if free < size:
        raise InvalidArgumentError(f"a block has {size} bytes, only {max(free, 0)} are free on the device")
    return free // size, max(0, min(swap_space, host)) // size


def _free_cuda_memory(model: ServedModel, utilization: float, tokens: int) -> int:
    """Run the largest step over a temporary cache, and measure the memory left."""
    device, size = model.device, model.layout.block_size
    tokens = min(tokens, model.max_model_len or tokens)
    blocks = -(-tokens // size)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with CacheEngine(model.layout, device_blocks=blocks, host_blocks=0, device=device) as engine, closing(model):
        model.bind(engine.tensors)
        groups = (len(model.groups),) if len(model.groups) > 1 else ()
        tables = np.broadcast_to(np.arange(blocks), (*groups, 1, blocks))
        slots = np.broadcast_to(np.arange(tokens), (*groups, tokens))
        where = StepInput(np.array([0]), np.array([tokens]), tables, slots)
        model.forward(np.zeros(tokens, dtype=np.int64), where)
        peak = torch.cuda.max_memory_allocated(device) - blocks * model.layout.bytes_per_block
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_allocated(device)
    return int(total * utilization) - others - peak


def available_memory() -> int:
    """Return how many bytes of main memory this process can still use, within the limits of machine and cgroup."""
    text = Path("/proc/meminfo").read_text(encoding="ascii") if Path("/proc/meminfo").exists() else ""
    found = [int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable:")]
    available = found[0] if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, max(0, limit - used))
    return available
