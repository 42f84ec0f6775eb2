"""A layout of 160 views of 8 KiB a block, as one of four ranks of a 70B model has it: host time and rate of a swap.

python benches/gpu/survey/views.py

Each strategy, each way, for 16, 64 and 256 blocks. Without a CUDA device: two layers on the CPU.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from blockyard import CacheEngine, KVLayout
from blockyard.engine import ops
from blockyard.engine.ops.strategy import STRATEGIES, force_strategy

CUDA = torch.cuda.is_available()
BLOCKS = 600


def main() -> None:
    layout = KVLayout("kv_first", 80 if CUDA else 2, block_size=16, num_kv_heads=2, head_size=128, dtype="bfloat16")
    with CacheEngine(layout, device_blocks=BLOCKS, host_blocks=BLOCKS, device="cuda:0" if CUDA else "cpu") as engine:
        engine.memory.host_pool.wait(BLOCKS)
        device, host = engine.memory.views["device"], engine.memory.views["host"]
        print(f"{len(device)} views of {device[0].shape[1]} bytes, rows of {layout.bytes_per_block}")
        random = np.random.default_rng(0)
        for view in device:
            view.copy_(torch.from_numpy(random.integers(0, 256, view.shape, np.uint8)))
        stream = torch.cuda.stream(torch.cuda.Stream()) if CUDA else contextlib.nullcontext()
        with stream:
            for count in (16, 64, 256):
                pairs = np.column_stack((random.permutation(BLOCKS)[:count], random.permutation(BLOCKS)[:count]))
                out = torch.from_numpy(pairs)
                report("out", count, device, host, out, layout.bytes_per_block)
                report("in", count, host, device, out.flip(1).contiguous(), layout.bytes_per_block)


def report(
    name: str, count: int, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: torch.Tensor, block_bytes: int
) -> None:
    for strategy in strategies():
        best, host = measure(lambda: ops.swap_blocks(src, dst, pairs))
        pieces, rate = count * len(src), count * block_bytes / best / 1e9
        print(
            f"{count:4d} blocks, {pieces:6d} pieces, {name:3s} {strategy:7s} {rate:7.1f} GB/s, "
            f"host {1e6 * host:8.0f} us, {1e8 * host / pieces:7.2f} us per 100 pieces",
            flush=True,
        )


def strategies() -> Iterator[str]:
    """Give each strategy, forced while the caller is at it."""
    if not CUDA:
        yield "cpu"
        return
    yield "default"
    for strategy in STRATEGIES:
        with force_strategy(0, strategy):
            yield strategy


def measure(work: Callable[[], None], repeat: int = 6) -> tuple[float, float]:
    """Give the least seconds until the bytes are there, and until the call returns."""
    wait = torch.cuda.synchronize if CUDA else lambda: None
    best = host = float("inf")
    for _ in range(repeat):
        wait()
        start = time.perf_counter()
        work()
        returned = time.perf_counter()
        wait()
        best, host = min(best, time.perf_counter() - start), min(host, returned - start)
    return best, host


if __name__ == "__main__":
    main()
