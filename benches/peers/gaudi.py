"""vllm-gaudi's OnlineDefragmenter on W-defrag, a pool of 256k blocks; no copy runs, only its tracking of blocks.

Each step: update_state, defragment, and resolve_all over the block tables of all sequences. Its configuration is its
default, threshold 32, on a device without graphs.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from bench_defrag import RUNNING, STARTS, AllocatorStep, Churn
from common import Figures, laps, report
from stand_ins import bare, stand_in

BLOCKS = 262_144
STEPS = 100

CONFIG = SimpleNamespace(
    defrag=True,
    prefix_caching=False,
    bridge_mode="none",
    VLLM_DEBUG=None,
    VLLM_DEFRAG_THRESHOLD=None,
    VLLM_DEFRAG_WITH_GRAPHS=None,
)

bare("vllm_gaudi")
stand_in("habana_frameworks", "vllm")
runtime: Any = ModuleType("vllm_gaudi.extension.runtime")
runtime.get_config = lambda: CONFIG
sys.modules[runtime.__name__] = runtime

import torch  # noqa: E402
from vllm_gaudi.extension.defragmentation import OnlineDefragmenter  # noqa: E402


def measure() -> Figures:
    defragmenter = OnlineDefragmenter(((torch.zeros(16), torch.zeros(16)),), 16)
    moves: list[float] = []
    defragmenter._swap = lambda pairs, _: moves.append(len(pairs))  # noqa: SLF001
    churn = Churn(BLOCKS)

    def step(made: AllocatorStep) -> None:
        defragmenter.update_state(made.grown, made.ended)
        defragmenter.defragment()
        defragmenter.resolve_all(made.tables)

    for _ in range(2 * RUNNING // STARTS):
        step(churn.step(tables=True))
    moves.clear()
    costs = laps((churn.step(tables=True) for _ in range(STEPS)), step, 1000)
    moved = [sum(moves) / STEPS]
    # It has one rule for ids; ours has two, and each is compared with it.
    return {f"defrag_256k{ids}_{unit}": of for ids in ("", "_kept") for unit, of in (("us", costs), ("moves", moved))}


if __name__ == "__main__":
    report(measure)
