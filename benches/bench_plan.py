"""The cost of plans from Python: expanding unequal blocks and compiling pieces, wall time, minimum of repeats.

    python benches/bench_plan.py

prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE. One plan is 4096 device
blocks in 64 tensors, 262,144 pieces before merging, to host blocks of 4 device blocks each.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from figures import keep
from numpy.typing import NDArray

from blockyard import Pairs, StepDecision
from blockyard.plan import CopyRoute, compile_pairs, phases, unequal_pairs

BLOCKS, TENSORS, PER_BLOCK = 4096, 64, 4
DEVICE_BLOCKS, BYTES = 65_536, 16_384
PIECES = BLOCKS * TENSORS


def joined(*, dense: bool) -> CopyRoute:
    """Device tensors to host blocks: `dense` keeps the device blocks of one tensor side by side in a host block."""
    sub = BYTES if dense else BYTES * TENSORS
    regions = np.zeros((TENSORS, 8), np.uint64)
    for tensor in range(TENSORS):
        place = tensor * (BYTES * PER_BLOCK if dense else BYTES)
        device = (tensor * DEVICE_BLOCKS * BYTES, BYTES, 0)
        regions[tensor] = (*device, (1 << 44) + place, BYTES * TENSORS * PER_BLOCK, sub, BYTES, tensor)
    return CopyRoute(regions, src_blocks=DEVICE_BLOCKS, dst_blocks=BLOCKS, dst_per_row=PER_BLOCK)


def fastest(call: Callable[[], object], repeats: int = 300) -> float:
    """Seconds of the fastest call."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def plan(route: CopyRoute, device: NDArray[np.int64]) -> tuple[float, int]:
    """Milliseconds to expand and compile one plan into arrays that are there, and its pieces."""
    host = np.random.default_rng(1).permutation(BLOCKS // PER_BLOCK).astype(np.int64)
    pairs, out = np.empty((BLOCKS, 2), np.int64), np.empty((3, PIECES), np.uint64)

    def once() -> int:
        unequal_pairs(device, host, per_block=PER_BLOCK, first=0, last=PER_BLOCK, to="large", out=pairs)
        return len(compile_pairs(route, pairs, out=out).src)

    return fastest(once) * 1e3, once()


def pointer_table(device: NDArray[np.int64]) -> float:
    """Milliseconds of the same table by numpy, pieces not merged: what engines do that have no compiler."""
    bases = np.arange(TENSORS, dtype=np.int64) * DEVICE_BLOCKS * BYTES
    host = np.arange(BLOCKS, dtype=np.int64)
    out = np.empty((3, TENSORS, BLOCKS), np.int64)

    def once() -> None:
        np.add(bases[:, None], device * BYTES, out=out[0])
        np.add(bases[:, None], host * BYTES, out=out[1])
        out[2] = BYTES

    return fastest(once) * 1e3


def figures() -> dict[str, float]:
    """All figures, by their names in BENCH_JSON."""
    scattered = np.random.default_rng(0).permutation(DEVICE_BLOCKS)[:BLOCKS].astype(np.int64)
    running = np.arange(BLOCKS, dtype=np.int64)
    split_ms, pieces = plan(joined(dense=False), scattered)
    merged_ms, merged = plan(joined(dense=True), running)
    decision = StepDecision(1, [("swap_out", Pairs("device", "host", np.column_stack((scattered, running))))])
    data = decision.to_bytes()
    return {
        "plan_262144_ms": split_ms,
        "plan_ns_per_piece": split_ms * 1e6 / pieces,
        "plan_merged_ms": merged_ms,
        "plan_merged_pieces": merged,
        "plan_numpy_table_ms": pointer_table(scattered),
        "plan_phases_4096_us": fastest(lambda: phases(decision)) * 1e6,
        "decision_4096_bytes": len(data),
        "decision_to_bytes_us": fastest(decision.to_bytes) * 1e6,
        "decision_from_bytes_us": fastest(lambda: StepDecision.from_bytes(data)) * 1e6,
    }


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    found = figures()
    for name, value in found.items():
        print(f"{name:26} {value:12.4f}")
    keep(found)


if __name__ == "__main__":
    main()
