"""Tokens that an arena keeps cached, by model and length of the prompts, beside the exact optimum.

    python benches/bench_capacity.py [--check] [--gib 40]

Each model has its own prompts in a `BlockManager` over one arena: full attention, windows and states in page classes of
their own. Prompts of equal length that share nothing are computed in chunks of 2,048 tokens and freed, more of them
than the cache can hold. What counts are the tokens of prompts that a later request can continue at their last boundary
of 16 tokens (128 for DeepSeek-V4, whose blocks hold whole compressed entries). The optimum is the arena over the bytes
that one such prompt needs at least: its full blocks, one window, one state. To compute a prompt, its last chunk needs
more than that: the window's blocks of the whole chunk, and the state before it. The arena has room for that once, too.
The second figure is the share of the optimum in whole prompts, the third the share of the arena that cached blocks
fill: the rest is that room, null blocks, padding and part-filled extents. The fourth is what vLLM's layout would hold
of the optimum, see `Plan`.

The last rows are the reach: the share of a prompt of 1,000 tokens that is found when the same prompt comes again, in a
`BlockManager` and after whole blocks of vLLM's layout.

`--check` stops with an error if a goal is missed: whole prompts as a share of the optimum, that vLLM's layout holds
more, by a prompt or more, or the reach. With BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import os
import sys
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from blockyard import Arena, BlockManager, CacheGroup, PrefixCaching
from blockyard.layout import ArenaLayout
from blockyard.layout.arena import num_state_groups

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
BLOCK, CHUNK = 16, 2048
CACHED = 1
"""The use of a cached block in `Pool.uses`."""
LENGTHS = (1024, 4096, 32768, 131072)
CHECKED, GOALS = 4096, {40: 0.98, 10: 0.95}
"""Share of the optimum for prompts of this length and more, by GiB; the optimum is not rounded to whole prompts."""


ASKED = 1000
"""Tokens of the prompt whose reach counts."""
REACH, REACH_OF_COMPRESSORS = 0.95, 0.89
"""Goals for the reach; compressors of 128 tokens make no entry of less."""


class Plan(NamedTuple):
    """The layout of vLLM 0.33 for a model, by the rules of its `kv_cache_utils.py`.

    All groups have blocks of equal bytes. Each kind of layers is split into groups of as many layers as the smallest
    kind has, or as the largest if that has less than half more; missing layers are padding. Where the layers differ in
    bytes a token, those with fewer get more tokens a block; with states, attention gets so many that a layer's block is
    as large as a state, and states are padded to it. A prompt can be continued after whole blocks of all groups.
    """

    tokens: int
    """Tokens after whose multiples a prompt can be continued."""
    block_bytes: int
    full: tuple[int, int]
    """Groups of full attention, and tokens in a block of one."""
    window: tuple[int, int]
    states: int

    def blocks(self, reach: int, model: Model) -> int:
        """Return the blocks of a cached prompt that can be continued after `reach` tokens."""
        start = model.window_start(reach)
        window = -(-reach // self.window[1]) - start // self.window[1] if self.window[0] else 0
        return self.full[0] * (reach // self.full[1]) + self.window[0] * window + self.states

    def tokens_held(self, model: Model, length: int, space: int) -> int:
        """Return the tokens that an arena holds, next to the null block and what computing the last chunk takes."""
        reach = (length - 1) // self.tokens * self.tokens
        if not reach:
            return 0
        chunk = model.chunk_tokens(length)
        working = self.window[0] * (chunk // self.window[1]) + self.states
        return (space // self.block_bytes - 1 - working) // self.blocks(reach, model) * reach


class Model(NamedTuple):
    """Bytes of a model's cache: layers by kind, bf16 except the states that engines keep in fp32."""

    layers: tuple[int, int, int]
    """Layers with full attention, with a window, and with a state."""
    full_kib: float
    """KiB of a token in the layers that keep every token."""
    window: int = 0
    window_mib: float = 0
    """MiB of a whole window in the layers that have one."""
    state_mib: float = 0
    chunked: bool = False
    align: int = BLOCK
    """What the tokens of vLLM's blocks are a multiple of, for the attention kernels."""

    @property
    def block(self) -> int:
        """Tokens of a block with full attention."""
        return BLOCK

    def theirs(self, length: int, space: int) -> int:
        """Return the tokens that vLLM's layout holds."""
        return self.plan().tokens_held(self, length, space)

    def their_step(self) -> int:
        """Return the tokens after whose multiples a prompt can be continued in vLLM's layout."""
        return self.plan().tokens

    def groups(self) -> list[CacheGroup]:
        """Return the groups of `ArenaLayout.from_config`, each with blocks of 16 tokens and its own bytes."""
        groups = [CacheGroup.full_attention().with_blocks(bytes=round(self.full_kib * KIB) * BLOCK)]
        if self.window:
            kind = CacheGroup.chunked_attention if self.chunked else CacheGroup.sliding_window
            groups.append(kind(self.window).with_blocks(bytes=round(self.window_mib * MIB / self.window) * BLOCK))
        if self.state_mib:
            count = num_state_groups(self.layers[2], round(self.state_mib * MIB))
            groups += [CacheGroup.recurrent().with_blocks(bytes=-(-round(self.state_mib * MIB) // count))] * count
        return groups

    def window_start(self, length: int) -> int:
        """Return the first of `length` tokens that the window needs."""
        return length - length % self.window if self.chunked else max(0, length + 1 - self.window)

    def plan(self) -> Plan:
        """Return the layout of vLLM."""
        full, window, states = self.layers
        least, most = min(filter(None, self.layers)), max(self.layers)
        size = most if most < 1.5 * least else least
        groups = [-(-count // size) for count in self.layers]
        # Bytes of a token in one layer.
        of_full = self.full_kib * KIB / full
        of_window = self.window_mib * MIB / self.window / window if window else of_full
        tokens = [BLOCK, BLOCK]
        if states:
            wanted = self.state_mib * MIB / states / of_full
            tokens = [-(-int(-(-wanted // 1)) // self.align) * self.align] * 2
        elif of_window != of_full:
            page = BLOCK * max(of_full, of_window)
            tokens = [round(page / of_full), round(page / of_window)]
        step = lcm(*tokens) if window else tokens[0]
        return Plan(step, round(size * of_full * tokens[0]), (groups[0], tokens[0]), (groups[1], tokens[1]), groups[2])

    def least_bytes(self, length: int) -> int:
        """Return what a cached prompt needs at least, to be continued at its last boundary."""
        boundary = (length - 1) // BLOCK * BLOCK
        of_window = self.resting(length) * round(self.window_mib * MIB / self.window) if self.window else 0
        return boundary * round(self.full_kib * KIB) + of_window + round(self.state_mib * MIB)

    def resting(self, length: int) -> int:
        """Return the tokens of a cached prompt in the blocks of its window."""
        boundary = (length - 1) // BLOCK * BLOCK
        return -(-(boundary - self.window_start(boundary)) // BLOCK) * BLOCK if self.window else 0

    def chunk_tokens(self, length: int) -> int:
        """Return the tokens that the last chunk of a prompt has in the window's blocks, and that leave with it."""
        return 0 if self.chunked or not self.window else min(CHUNK, length - self.resting(length))

    def working_bytes(self, length: int) -> int:
        """Return what computing the last chunk of a prompt takes beside what the prompt needs once it is cached."""
        of_window = round(self.window_mib * MIB / self.window) if self.window else 0
        return self.chunk_tokens(length) * of_window + round(self.state_mib * MIB)


MODELS = {
    "gpt-oss-20b": Model((12, 12, 0), 24, 128, 3),
    "gpt-oss-120b": Model((18, 18, 0), 36, 128, 4.5),
    "Gemma-3-27B": Model((10, 52, 0), 80, 1024, 416),
    "Llama-4-Scout": Model((12, 36, 0), 48, 8192, 1152, chunked=True),
    "Command-A": Model((16, 48, 0), 64, 4096, 768),
    "MiMo-V2-Flash": Model((9, 39, 0), 22.5, 128, 24.375),
    "Qwen3-Next-80B": Model((12, 0, 36), 24, state_mib=73.7),
    "Qwen3.5-35B-A3B": Model((10, 0, 30), 20, state_mib=61.4),
    "Qwen3.8-27B + DFlash": Model((16, 5, 48), 64, 2048, 40, 146.8),
    "Kimi-Linear-48B": Model((7, 0, 20), 7.875, state_mib=41.4, align=64),
    "Jamba-1.5-mini": Model((4, 0, 28), 16, state_mib=15.3),
    "Falcon-H1-7B": Model((44, 0, 44), 44, state_mib=66.9),
}


class Compressors:
    """DeepSeek-V4-Flash in packed FP8: entries of 4 and 128 tokens, windows, and what is not compressed yet.

    Attributes:
        block: tokens of a block of entries.
    """

    block = 128
    # vLLM's groups with a window, of 22 and 21 layers with one, of the open entries of CSA and of HCA: tokens of their
    # blocks, and blocks of a cached prompt. Full blocks have 256 tokens.
    _THEIRS = ((64, 2), (64, 2), (4, 2), (8, 16))
    _BYTES, _TOKENS = 1_002_240, 256

    def groups(self) -> list[CacheGroup]:
        """Return the groups of `ArenaLayout.from_config`."""
        csa, hca = "compressed_sparse_attention", "heavily_compressed_attention"
        config: dict[str, Any] = {
            "model_type": "deepseek_v4",
            "layer_types": ["sliding_attention"] * 2 + [csa, hca] * 20 + [csa],
        }
        config |= {"compress_rates": {csa: 4, hca: 128}, "head_dim": 512, "qk_rope_head_dim": 64}
        config |= {"index_head_dim": 128, "sliding_window": 128}
        return list(ArenaLayout.from_config(config, block_size=self.block, dtype="fp8_ds_mla").cache_groups)

    def least_bytes(self, length: int) -> int:
        """Return what a cached prompt needs at least: at its last boundary HCA has nothing open."""
        full, csa, window, _ = (group.block_bytes or 0 for group in self.groups())
        return (length - 1) // self.block * full + 2 * (window + csa)

    def working_bytes(self, length: int) -> int:
        """Return what computing the last chunk of a prompt takes beside what the prompt needs once it is cached."""
        chunk = min(CHUNK, length)
        windows = [group for group in self.groups() if group.window]
        return sum((group.block_bytes or 0) * (chunk // (group.block_tokens or 1)) for group in windows)

    def theirs(self, length: int, space: int) -> int:
        """Return the tokens that vLLM's layout holds; see `Plan.tokens_held`."""
        full = (length - 1) // self._TOKENS
        working = sum(min(CHUNK, length) // tokens for tokens, _ in self._THEIRS)
        resting = sum(blocks for _, blocks in self._THEIRS)
        return (space // self._BYTES - 1 - working) // (full + resting) * full * self._TOKENS

    def their_step(self) -> int:
        """Return the tokens after whose multiples a prompt can be continued in vLLM's layout."""
        return self._TOKENS


V4 = "DeepSeek-V4-Flash"
ALL: dict[str, Model | Compressors] = {**MODELS, V4: Compressors()}


def reach(model: Model | Compressors) -> float:
    """Return the share of a prompt that is found when it comes again."""
    arena = Arena(device_bytes=4 * GIB)
    manager = BlockManager(block_size=model.block, groups=model.groups(), arena=arena, prefix_caching=True, watermark=0)
    prompt = np.arange(ASKED, dtype=np.uint32)
    if not compute(manager, prompt):
        raise AssertionError(f"a prompt of {ASKED} tokens does not fit")
    return float(manager.prefix.lookup(prompt).tokens / ASKED)


def print_reach(names: list[str]) -> list[str]:
    """Print the reach of each model; return the goals that are missed, in words."""
    rows = {
        name: (reach(ALL[name]), ALL[name].their_step(), REACH_OF_COMPRESSORS if name == V4 else REACH)
        for name in names
    }
    print(f"\nreach of a prompt of {ASKED} tokens: ours, vLLM's")
    missed = []
    for name, (ours, step, goal) in rows.items():
        theirs = (ASKED - 1) // step * step / ASKED
        print(f"{name:24}{ours:>10.3f}{theirs:>10.3f}")
        record({f"reach_{name}": ours, f"reach_{name}_vllm": theirs})
        if ours < max(goal, theirs):
            missed.append(f"{name}: the reach is {ours:.3f}, must be at least {goal} and vLLM's, {theirs:.3f}")
    return missed


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


def cached(model: Model | Compressors, length: int, gib: int) -> tuple[int, float]:
    """Return how many prompts are cached once more were computed than there can be, and the share of bytes in use."""
    arena = Arena(device_bytes=gib * GIB)
    caching = PrefixCaching(eviction="lru")
    manager = BlockManager(
        block_size=model.block, groups=model.groups(), arena=arena, prefix_caching=caching, watermark=0
    )
    prompts = []
    for number in range(gib * GIB // model.least_bytes(length) + 4):
        prompt = np.full(length, 7, np.uint32)
        prompt[0] = 10 + number
        if not compute(manager, prompt):
            break
        prompts.append(prompt)
    pools = [manager.pool(page_class=at) for at in range(manager.num_page_classes)]
    filled = sum(int((pool.uses() == CACHED).sum()) * pool.block_bytes for pool in pools)
    boundary = (length - 1) // model.block * model.block
    return sum(manager.prefix.lookup(prompt).tokens >= boundary for prompt in prompts), filled / (gib * GIB)


def record(figures: dict[str, float]) -> None:
    """Add figures to the file of BENCH_JSON, if there is one."""
    if "BENCH_JSON" in os.environ:
        from figures import keep  # noqa: PLC0415 (it refuses debug builds, whose counts are the same)

        keep(figures)


def main() -> None:
    """Print one row a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--gib", type=int, default=40)
    parser.add_argument("--models", nargs="*", default=list(ALL), choices=list(ALL))
    options = parser.parse_args()
    missed = []
    print(f"{'model':24}" + "".join(f"{length:>10}{'':>24}" for length in LENGTHS))
    for name in options.models:
        row, figures = f"{name:24}", {}
        for length in LENGTHS:
            model, space = ALL[name], options.gib * GIB
            exact = (space - model.working_bytes(length)) / model.least_bytes(length)
            if not (best := int(exact)):
                row += f"{'-':>10}{'':>24}"
                continue
            found, filled = cached(model, length, options.gib)
            if found > best or filled > 1:
                raise AssertionError(f"{found} prompts of {best} are cached, {filled:.3f} of the arena")
            reach = (length - 1) // model.block * model.block
            theirs = model.theirs(length, space) / (best * reach)
            row += f"{found * length // options.gib:>10}{found / best:>8.3f}{filled:>8.3f}{theirs:>8.3f}"
            figures[f"capacity_{options.gib}_{name}_{length}_vllm"] = theirs
            figures[f"capacity_{options.gib}_{name}_{length}"] = found / best
            figures[f"capacity_{options.gib}_{name}_{length}_filled"] = filled
            if length >= CHECKED and found < int(exact * GOALS.get(options.gib, 0)):
                missed.append(f"{name} at {length}: {found} prompts are cached, {exact:.2f} fit")
            if (found + 1) / best <= theirs:
                missed.append(f"{name} at {length}: {found} of {best} prompts, vLLM's would hold {theirs:.3f}")
        print(row, flush=True)
        record(figures)
    missed += print_reach(options.models)
    if options.check and missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
