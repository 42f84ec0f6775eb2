"""Tokens that an arena keeps cached, by model and length of the prompts, beside the exact optimum.

    python benches/bench_capacity.py [--check] [--gib 40]

Each model has its own prompts in a `BlockManager` over one arena: full attention, windows and states in page classes of
their own. Prompts of equal length that share nothing are computed in chunks of 2,048 tokens and freed, more of them
than the cache can hold. What counts are the tokens of prompts that a later request can continue at their last boundary
of 16 tokens. The optimum is the arena over the bytes that one such prompt needs at least: its full blocks, one window,
one state. The second figure is the share of that optimum, the third the share of the arena that cached blocks fill: the
rest are null blocks, padding and part-filled extents. Between the two lie the tails of earlier resume points, which
sessions need. `--check` stops with an error if a goal is missed. With BENCH_JSON=FILE it also adds its figures to the
flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import numpy as np
from figures import keep

from blockyard import Arena, BlockManager, CacheGroup, PrefixCaching

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
BLOCK, CHUNK = 16, 2048
CACHED = 1
"""The use of a cached block in `Pool.uses`."""
LENGTHS = (1024, 4096, 32768, 131072)
CHECKED, GOALS = 4096, {40: 0.98, 10: 0.95}
"""Share of the arena that cached blocks fill with prompts of this length, by GiB; others have no goal."""


class Model(NamedTuple):
    """Bytes of a model's cache: layers by kind, bf16 except the states that engines keep in fp32."""

    full_kib: float
    """KiB of a token in the layers that keep every token."""
    window: int = 0
    window_mib: float = 0
    """MiB of a whole window in the layers that have one."""
    state_mib: float = 0
    chunked: bool = False

    def groups(self) -> list[CacheGroup]:
        """Return the groups, each with blocks of 16 tokens and its own bytes."""
        groups = [CacheGroup.full_attention().with_blocks(bytes=round(self.full_kib * KIB) * BLOCK)]
        if self.window:
            kind = CacheGroup.chunked_attention if self.chunked else CacheGroup.sliding_window
            groups.append(kind(self.window).with_blocks(bytes=round(self.window_mib * MIB / self.window) * BLOCK))
        if self.state_mib:
            groups.append(CacheGroup.recurrent().with_blocks(bytes=round(self.state_mib * MIB)))
        return groups

    def least_bytes(self, length: int) -> int:
        """Return what a cached prompt needs at least, to be continued at its last boundary."""
        boundary = (length - 1) // BLOCK * BLOCK
        start = boundary - boundary % self.window if self.chunked else max(0, boundary + 1 - self.window)
        window = -(-(boundary - start) // BLOCK) * BLOCK if self.window else 0
        of_window = window * round(self.window_mib * MIB / self.window) if window else 0
        return boundary * round(self.full_kib * KIB) + of_window + round(self.state_mib * MIB)


MODELS = {
    "gpt-oss-20b": Model(24, 128, 3),
    "gpt-oss-120b": Model(36, 128, 4.5),
    "Gemma-3-27B": Model(80, 1024, 416),
    "Llama-4-Scout": Model(48, 8192, 1152, chunked=True),
    "Command-A": Model(64, 4096, 768),
    "MiMo-V2-Flash": Model(22.5, 128, 24.375),
    "Qwen3-Next-80B": Model(24, state_mib=73.7),
    "Qwen3.5-35B-A3B": Model(20, state_mib=61.4),
    "Qwen3.8-27B + DFlash": Model(64, 2048, 40, 146.8),
    "Kimi-Linear-48B": Model(7.875, state_mib=41.4),
    "Jamba-1.5-mini": Model(16, state_mib=15.3),
    "Falcon-H1-7B": Model(44, state_mib=66.9),
}


def compute(manager: BlockManager, tokens: np.ndarray) -> bool:
    """Admit a prompt, compute it in chunks and free it; return whether it fits."""
    if not manager.can_allocate(tokens, chunk_tokens=CHUNK):
        return False
    sequence = manager.allocate(tokens, chunk_tokens=CHUNK)
    while True:
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed([sequence])
        if not (chunk := manager.next_chunk(sequence, CHUNK)):
            break
        manager.append([sequence], chunk)
    manager.free([sequence])
    return True


def cached(model: Model, length: int, gib: int) -> tuple[int, float]:
    """Return how many prompts are cached once more were computed than there can be, and the share of bytes in use."""
    arena = Arena(device_bytes=gib * GIB)
    caching = PrefixCaching(eviction="lru")
    manager = BlockManager(block_size=BLOCK, groups=model.groups(), arena=arena, prefix_caching=caching, watermark=0)
    prompts = []
    for number in range(gib * GIB // model.least_bytes(length) + 4):
        prompt = np.full(length, 7, np.uint32)
        prompt[0] = 10 + number
        if not compute(manager, prompt):
            break
        prompts.append(prompt)
    pools = [manager.pool(page_class=at) for at in range(manager.num_page_classes)]
    filled = sum(int((pool.uses() == CACHED).sum()) * pool.block_bytes for pool in pools)
    boundary = (length - 1) // BLOCK * BLOCK
    return sum(manager.prefix.lookup(prompt).tokens >= boundary for prompt in prompts), filled / (gib * GIB)


def main() -> None:
    """Print one row a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--gib", type=int, default=40)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    missed = []
    print(f"{'model':24}" + "".join(f"{length:>10}{'':>16}" for length in LENGTHS))
    for name in options.models:
        row, figures = f"{name:24}", {}
        for length in LENGTHS:
            model, space = MODELS[name], options.gib * GIB
            best = space // model.least_bytes(length)
            if not best:
                row += f"{'-':>10}{'':>16}"
                continue
            found, filled = cached(model, length, options.gib)
            if found > best or filled > 1:
                raise AssertionError(f"{found} prompts of {best} are cached, {filled:.3f} of the arena")
            row += f"{found * length // options.gib:>10}{found / best:>8.3f}{filled:>8.3f}"
            figures[f"capacity_{options.gib}_{name}_{length}"] = found / best
            figures[f"capacity_{options.gib}_{name}_{length}_filled"] = filled
            # What is too little for one more prompt is not a loss of the layout.
            spare = model.least_bytes(length) / space
            if length == CHECKED and filled + spare < GOALS.get(options.gib, 0):
                missed.append(f"{name} at {length}: {filled:.3f} of the arena is in use")
        print(row, flush=True)
        keep(figures)
    if options.check and missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
