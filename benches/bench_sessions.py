"""Hits of models with windows or states: sessions that take turns, and recorded agent sessions.

    python benches/bench_sessions.py [--part 0] [--rules] [--no-goals]

Sessions in turn: K sessions send a prompt each, in a fixed order, and each next prompt continues the last one. The pool
holds K prompts at rest, that is their full blocks and the one tail that a hit needs, and one prompt's peak with its
points. The hits are compared with those of full attention alone, in a pool that holds K prompts and one prompt.

Agent sessions: `claude_code.jsonl.gz` in the folder that BLOCKYARD_TRACES names (../shared/traces), 24 sessions at a
time, the first ones 90 s apart, for gpt-oss-120b and Gemma-3-27B. Groups have equal pages, as in vLLM's planner. The
bound and vLLM's rule are models (`policies/points.py`). Ours is a `BlockManager`. A block of two tokens stands for
64 tokens of the trace, and windows shrink likewise. Prompts run in chunks, and answers of the recorded length are
decoded; no later prompt repeats them.

Each kind of sessions has a goal, which is checked. `--rules` compares other rules for points, by the model.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from figures import keep
from numpy.typing import NDArray
from policies.points import Bound, Prompts, ResumePoints, VllmRule
from policies.sessions import at_a_time

from blockyard import BlockManager, CacheGroup, PrefixCaching
from blockyard.traces import read_trace

BLOCK_SIZE = 16
SESSIONS = 12
TURNS = 8
FIRST, ANSWER, NEXT, CHUNK = 4_096, 32, 224, 1_024
LEAST = 0.98
"""Hits of sessions in turn, as a share of full attention's."""

SHARE, TURNOVERS = 0.2, 64
"""Tokens of a tail, in tokens of full attention, as a share of the interval between two points; and for how many
turnovers of the cache points at intervals are made, once one was of use."""

Tokens = NDArray[np.uint32]
FULL = CacheGroup.full_attention()
SHAPES = {
    "full + window 128": (FULL, CacheGroup.sliding_window(128)),
    "full + 5 windows of 1,024": (FULL, *[CacheGroup.sliding_window(1_024)] * 5),
    "full + 3 recurrent": (FULL, *[CacheGroup.recurrent()] * 3),
}


class Model(NamedTuple):
    """A model's groups on equal pages."""

    page_kib: int
    """Bytes of 16 tokens in one group."""
    window: int
    window_groups: int
    pools_gib: tuple[int, int]
    margin: float
    """How much more than vLLM's rule finds is the goal."""

    def blocks(self, gib: float) -> int:
        """Return a pool's size, in blocks of the trace."""
        return int(gib * (1 << 20) / self.page_kib) * 16 // TRACE_BLOCK

    @property
    def small_window(self) -> CacheGroup:
        """The window, in tokens that stand for blocks."""
        return CacheGroup.sliding_window(self.window * STANDS // TRACE_BLOCK)

    @property
    def tail(self) -> int:
        """Blocks of all windows that a hit needs."""
        return self.window_groups * tail_blocks(self.small_window, STANDS)

    @property
    def working(self) -> int:
        """Blocks that windows take beyond their tails while a prompt runs."""
        chunk = AGENT_CHUNK * STANDS // TRACE_BLOCK
        peak = self.small_window.peak_blocks(1 << 20, block_size=STANDS, chunk_tokens=chunk)
        return self.window_groups * peak - self.tail


TRACE_BLOCK = 64
STANDS = 2
"""Tokens that stand for a block of the trace."""
AGENT_CHUNK = 2_048
STATE_PAGE_KIB, STATE_TAIL = 320, 49
"""Qwen3.5-35B-A3B, for the models only: full attention's bytes of 16 tokens; and its states, in blocks of the trace."""

MODELS = {
    "gpt-oss-120b": Model(576, 128, 1, (10, 20), 0.03),
    "Gemma-3-27B": Model(1_280, 1_024, 6, (20, 40), 0.015),
}


def run(manager: BlockManager, prompt: Tokens, answer: Tokens, chunk: int) -> int:
    """Run a prompt in chunks, decode its answer, free it. Returns the tokens that it found."""
    sequence = manager.allocate(prompt, chunk_tokens=chunk)
    found = sequence.cached_tokens
    step(manager, sequence)
    while length := manager.next_chunk(sequence, chunk):
        manager.append([sequence], length)
        step(manager, sequence)
    for first in range(0, len(answer), chunk):
        manager.append([sequence], len(answer[first : first + chunk]), token_ids=answer[first : first + chunk])
        step(manager, sequence)
    manager.free([sequence])
    return found


def step(manager: BlockManager, sequence: int) -> None:
    """Carry out one step."""
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed([sequence])


def tail_blocks(group: CacheGroup, block_size: int) -> int:
    """Return the blocks that a hit needs of a group that is not full attention."""
    return 1 if group.window is None else -(-(group.window - 1) // block_size)


def points(tail: int, tokens: int) -> int:
    """Return how many points a prompt keeps, at square distances."""
    interval = tail * BLOCK_SIZE / SHARE
    return 2 + int((tokens / interval) ** 0.5)


def pool(groups: tuple[CacheGroup, ...]) -> int:
    """Return the blocks of all sessions at rest, and of one prompt's peak and its points."""
    longest = FIRST + (TURNS - 1) * (ANSWER + NEXT) + ANSWER
    tail = sum(tail_blocks(group, BLOCK_SIZE) for group in groups if group.kind != "full_attention")
    peak = sum(group.peak_blocks(longest, block_size=BLOCK_SIZE, chunk_tokens=CHUNK) for group in groups)
    resting = -(-longest // BLOCK_SIZE) + tail
    return SESSIONS * resting + peak + (points(tail, longest) * tail if tail else 0)


def in_turn(groups: tuple[CacheGroup, ...]) -> float:
    """Return the share of tokens that later turns of all sessions find."""
    manager = BlockManager(
        block_size=BLOCK_SIZE, device_blocks=pool(groups), watermark=0.0, groups=groups, prefix_caching=True
    )
    rng = np.random.default_rng(0)
    length = FIRST + TURNS * (ANSWER + NEXT)
    tokens = rng.integers(0, 1 << 30, (SESSIONS, length)).astype(np.uint32)
    found = total = 0
    for turn in range(TURNS):
        end = FIRST + turn * (ANSWER + NEXT)
        for session in tokens:
            hit = run(manager, session[:end], session[end : end + ANSWER], CHUNK)
            if turn:
                found, total = found + hit, total + end
    manager.check()
    return found / total


def agent_requests(path: Path, part: int | None) -> Prompts:
    """Return the requests of agent sessions, 24 at a time."""
    return Prompts(at_a_time(read_trace(path), 24, part, apart=90.0))


def tokens_of(prompts: Prompts, number: int) -> Tokens:
    """Return the tokens that stand for a prompt's blocks, and one more for a part of a block."""
    request, keys = prompts.requests[number], prompts.keys[number]
    part = request.input_tokens > len(keys) * TRACE_BLOCK
    return np.append(np.stack([keys >> 16, keys & 0xFFFF], axis=1), [0] * part).astype(np.uint32)


def agents(prompts: Prompts, model: Model, blocks: int, eviction: str) -> float:
    """Return the share of tokens that a manager's prompts find."""
    manager = BlockManager(
        block_size=STANDS,
        device_blocks=blocks,
        watermark=0.0,
        groups=[FULL, *[model.small_window] * model.window_groups],
        prefix_caching=PrefixCaching(eviction=eviction),
    )
    found = total = 0
    for number, request in enumerate(prompts.requests):
        total += request.input_tokens
        if prompts.answered(number) + model.tail + model.working > blocks:
            continue  # the models leave it out too
        prompt = tokens_of(prompts, number)
        end = STANDS * prompts.answered(number)
        answer = np.full(max(end - len(prompt), 0), 1 << 31 | number, np.uint32)
        found += run(manager, prompt, answer, AGENT_CHUNK * STANDS // TRACE_BLOCK) // STANDS * TRACE_BLOCK
    manager.check()
    return found / total


def compare_rules(prompts: Prompts) -> None:
    """Print what each rule for points finds, by the model."""
    caches = [
        (f"{name} {gib} GiB", model.blocks(gib) - model.working, model.tail)
        for name, model in MODELS.items()
        for gib in model.pools_gib
    ]
    caches += [(f"Qwen3.5-35B-A3B {gib} GiB", gib * (1 << 20) // STATE_PAGE_KIB // 4, STATE_TAIL) for gib in (5, 10)]
    for name, blocks, tail in caches:
        bound, vllm = Bound(prompts, blocks).hit_rate(), vllm_rule(prompts, blocks, tail)
        print(f"{name}: bound {bound:.3f}, vLLM's rule {vllm:.3f}")
        shares = itertools.product((0.025, 0.05, 0.1, 0.2, 0.4), ("none", "doubling", "halves", "squares"))
        rules = {f"interval {share:.1%}, {thin}": (round(tail / share), thin) for share, thin in shares}
        for rule, (interval, thin) in (rules | {"no interval": (0, "none")}).items():
            rate = ResumePoints(prompts, blocks, tail, interval, thin).hit_rate()
            print(f"    {rule:26} {rate:.3f} {rate - vllm:+.3f}", flush=True)


def vllm_rule(prompts: Prompts, blocks: int, tail: int) -> float:
    """Return what vLLM's rule finds, with tails released before the full blocks or after them: the larger share."""
    return max(VllmRule(prompts, blocks, tail, leaves=leaves).hit_rate() for leaves in (True, False))


def compare_agents(prompts: Prompts, eviction: str) -> tuple[dict[str, float], list[str]]:
    """Print what each cache finds, of agent sessions. Returns the figures, and the goals missed."""
    figures, missed = {}, []
    for name, model in MODELS.items():
        for gib in model.pools_gib:
            blocks = model.blocks(gib)
            at_rest = blocks - model.working
            bound, vllm = Bound(prompts, blocks).hit_rate(), vllm_rule(prompts, at_rest, model.tail)
            print(f"{name} {gib} GiB: bound {bound:.3f}, vLLM's rule {vllm:.3f}", end="", flush=True)
            rule = ResumePoints(prompts, at_rest, model.tail, round(model.tail / SHARE), turnovers=TURNOVERS)
            best = rule.hit_rate()
            start = time.thread_time()
            ours = agents(prompts, model, blocks, eviction)
            spent = (time.thread_time() - start) * 1e6 / len(prompts.requests)
            print(f", points by the model {best:.3f}, ours {ours:.3f} ({spent:.0f} us a request)", flush=True)
            short = f"sessions_{name.split('-')[0].lower()}_{gib}g"
            figures |= {f"{short}_bound": bound, f"{short}_vllm": vllm, f"{short}_hit": ours}
            if ours < vllm + model.margin:
                missed.append(f"{name} {gib} GiB finds {ours:.3f}, must be {vllm:.3f} of vLLM's rule + {model.margin}")
    return figures, missed


def compare_in_turn() -> tuple[dict[str, float], list[str]]:
    """Print what sessions in turn find. Returns the figures, and the goals missed."""
    alone = in_turn((FULL,))
    print(f"{SESSIONS} sessions in turn, full attention alone: {pool((FULL,))} blocks, {alone:.3f} found")
    figures, missed = {"sessions_full_hit": alone}, []
    for name, groups in SHAPES.items():
        found = in_turn(groups)
        print(f"    {name:28} {pool(groups):6} blocks, {found:.3f} found, {found / alone:.3f} of full attention's")
        figures[f"sessions_{name.replace(',', '').replace(' + ', '_').replace(' ', '_')}_hit"] = found
        if found < LEAST * alone:
            missed.append(f"{name} finds {found / alone:.3f} of full attention alone, must be {LEAST} or more")
    return figures, missed


def main() -> None:
    """Compare, and check the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(0, 1), help="only this half of the agent sessions")
    parser.add_argument("--eviction", default="adaptive", help="the manager's eviction policy")
    parser.add_argument("--rules", action="store_true", help="only compare rules for points, by the model")
    parser.add_argument("--no-goals", action="store_true", help="do not stop with an error if a goal is missed")
    chosen = parser.parse_args()
    trace = Path(os.environ.get("BLOCKYARD_TRACES", "../shared/traces")) / "claude_code.jsonl.gz"
    prompts = agent_requests(trace, chosen.part) if trace.exists() else None
    if prompts is None:
        print(f"bench_sessions: no agent sessions: {trace} is not there", file=sys.stderr)
    elif chosen.rules:
        compare_rules(prompts)
    if chosen.rules:
        return
    figures, missed = compare_in_turn()
    if prompts is not None:
        found, missed_too = compare_agents(prompts, chosen.eviction)
        figures, missed = figures | found, missed + missed_too
    keep(figures)
    if missed and not chosen.no_goals:
        sys.exit(f"bench_sessions: {len(missed)} goals are missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
