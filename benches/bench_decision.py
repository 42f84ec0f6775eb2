"""The size of a decision of 4,096 pairs in bytes, and the time to write and read it, minimum of repeats.

    python benches/bench_decision.py

prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from figures import keep

from blockyard import Pairs, StepDecision

BLOCKS, DEVICE_BLOCKS = 4096, 65_536


def fastest_us(call: Callable[[], object], repeats: int = 300) -> float:
    """Return the microseconds of the fastest call."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def figures() -> dict[str, float]:
    """Return all figures by their names in BENCH_JSON."""
    scattered = np.random.default_rng(0).permutation(DEVICE_BLOCKS)[:BLOCKS].astype(np.int64)
    pairs = Pairs("device", "host", np.column_stack((scattered, np.arange(BLOCKS, dtype=np.int64))))
    decision = StepDecision(1, [("swap_out", pairs)])
    data = decision.to_bytes()
    assert StepDecision.from_bytes(data).to_bytes() == data
    return {
        "decision_4096_bytes": len(data),
        "decision_to_bytes_us": fastest_us(decision.to_bytes),
        "decision_from_bytes_us": fastest_us(lambda: StepDecision.from_bytes(data)),
    }


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    found = figures()
    for name, value in found.items():
        print(f"{name:26} {value:12.4f}")
    keep(found)


if __name__ == "__main__":
    main()
