"""Mixed traffic over one arena: short chats, then long documents, then chats again, with and without emptied extents.

    python benches/bench_extents.py [--check] [--gib 10] [--seeds 1 2]

Qwen3.8-27B with its drafter has three page classes: full attention, a window, and states. The next request comes once
the one before has started, so that the scheduler is always short of memory; what it lacks moves from class to class.
Each is a `Scheduler` over a `BlockManager`, with the prefix cache on and prompts that share nothing:

- *whole extents*: an extent goes to another class once no block of it is in use.
- *emptied*: `DefragPolicy([("extents", 0)])` with at most 256 MiB a step.
- *best split*: the `Arena.split` of a grid that needs the fewest steps.

A step is *short* if the first waiting prompt does not fit although there are enough bytes; *longest* is the longest
run of such steps in which the same prompt waited. `--check` stops with an error if a goal is missed. With
BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from random import Random

import numpy as np
from bench_capacity import GIB, MIB, MODELS, record

from blockyard import AllocStatus, Arena, BlockManager, PrefixCaching, Request, Scheduler
from blockyard.errors import OutOfBlocksError
from blockyard.scheduler import DefragPolicy

MODEL = MODELS["Qwen3.8-27B + DFlash"]
CHATS, DOCUMENTS, CHUNK = 100, 20, 2048
BUDGET = 256 * MIB
LONGEST_GOAL = 8
SPLITS = [(full / 10, window / 20) for full in range(3, 9) for window in (1, 2, 3) if full / 10 + window / 20 < 1]


@dataclass
class Run:
    """What one run did."""

    steps: int = 0
    short: int = 0
    longest: int = 0
    never: int = 0
    moved_blocks: int = 0
    moving_steps: int = 0
    moved_bytes: int = 0
    most_bytes: int = 0


def traffic(seed: int) -> list[tuple[int, int]]:
    """Return the lengths of prompts and answers."""
    random = Random(seed)
    chats = [(random.randint(200, 2000), random.randint(50, 800)) for _ in range(2 * CHATS)]
    documents = [(random.randint(20_000, 60_000), random.randint(50, 300)) for _ in range(DOCUMENTS)]
    return [*chats[:CHATS], *documents, *chats[CHATS:]]


def run(arena: Arena, seed: int, policy: DefragPolicy | None = None) -> Run:
    """Run the traffic to its end."""
    caching = PrefixCaching(eviction="lru")
    manager = BlockManager(block_size=16, groups=MODEL.groups(), arena=arena, prefix_caching=caching, watermark=0)
    scheduler = Scheduler(manager, max_num_seqs=512, max_num_batched_tokens=CHUNK, defragment=policy)
    strides = [manager.pool(page_class=at).block_stride or 0 for at in range(manager.num_page_classes)]
    found, decided, spell, queue, waiting = Run(), 0, 0, enumerate(traffic(seed)), np.empty(0, np.uint32)
    while True:
        if scheduler.num_unfinished == scheduler.num_running:
            number, lengths = next(queue, (0, None))
            if lengths is not None:
                waiting, spell = np.random.default_rng([seed, number]).integers(0, 1 << 20, lengths[0]), 0
                waiting = waiting.astype(np.uint32)
                scheduler.add(Request(str(number), waiting, max_tokens=lengths[1]))
            elif not scheduler.num_unfinished:
                break
        step = scheduler.schedule()
        moved = sum(len(pairs) * strides[pairs.page_class] for pairs in step.decision.move)
        decided += sum(len(pairs) for pairs in step.decision.move)
        manager.complete(step.decision.ticket)
        scheduler.update(step, [7] * step.num_draws)
        found.steps += 1
        found.moving_steps += moved > 0
        found.moved_bytes += moved
        found.most_bytes = max(found.most_bytes, moved)
        if scheduler.num_unfinished > scheduler.num_running:
            fit = manager.can_allocate(waiting, chunk_tokens=CHUNK)
            found.never += fit.status is AllocStatus.NEVER
            spell = spell + 1 if fit.status is AllocStatus.LATER and fit.bytes <= fit.free_bytes else 0
            found.short += spell > 0
            found.longest = max(found.longest, spell)
    found.moved_blocks, cancelled = manager.stats().moved_blocks, manager.stats().cancelled_moves
    if not found.moved_blocks <= decided <= found.moved_blocks + cancelled:
        raise AssertionError(f"{decided} moves are decided, {found.moved_blocks} done, {cancelled} cancelled")
    manager.check()
    return found


def best_split(gib: int, seed: int) -> Run | None:
    """Return the run over the fixed split that needs the fewest steps, of those that can hold each request."""
    bytes_of = list(dict.fromkeys(group.block_bytes or 1 for group in MODEL.groups()))
    runs = []
    for full, window in SPLITS:
        shares = (full, window, 1 - full - window)
        blocks = [int(gib * GIB * share) // size for share, size in zip(shares, bytes_of, strict=True)]
        try:
            runs.append(run(Arena.split(device_blocks=blocks), seed))
        except OutOfBlocksError:
            continue
    return min(runs, key=lambda found: found.steps, default=None)


def main() -> None:
    """Print one row for each seed and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--gib", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    policy = DefragPolicy([("extents", 0)], max_moves=1 << 20, max_bytes=BUDGET)
    print(
        f"{'':16}{'steps':>7}{'short':>7}{'longest':>9}{'never':>7}{'moved':>8}{'MiB':>8}{'steps':>7}{'most MiB':>10}"
    )
    missed: list[str] = []
    for seed in options.seeds:
        arena = Arena(device_bytes=options.gib * GIB)
        ways = {"whole extents": run(arena, seed), "emptied": run(arena, seed, policy)}
        if (split := best_split(options.gib, seed)) is not None:
            ways["best split"] = split
        for name, found in ways.items():
            print(
                f"{name:16}{found.steps:7}{found.short:7}{found.longest:9}{found.never:7}{found.moved_blocks:8}"
                f"{found.moved_bytes / MIB:8.0f}{found.moving_steps:7}{found.most_bytes / MIB:10.1f}",
                flush=True,
            )
            record(
                {
                    f"extents_{options.gib}_{seed}_{name.replace(' ', '_')}_{key}": value
                    for key, value in vars(found).items()
                }
            )
        missed += goals(seed, ways)
    if options.check and missed:
        sys.exit("\n".join(missed))


def goals(seed: int, ways: dict[str, Run]) -> list[str]:
    """Return what falls short."""
    whole, emptied, split = ways["whole extents"], ways["emptied"], ways.get("best split")
    checks = {
        f"{emptied.never} prompts can never start": emptied.never == 0,
        f"a prompt waited {emptied.longest} steps": emptied.longest <= LONGEST_GOAL,
        f"{emptied.most_bytes} bytes moved in a step": emptied.most_bytes <= BUDGET,
        f"{emptied.short} short steps, {whole.short} without": emptied.short < whole.short,
        "a fixed split needs fewer steps": split is None or emptied.steps < split.steps,
    }
    return [f"seed {seed}: {text}" for text, is_met in checks.items() if not is_met]


if __name__ == "__main__":
    main()
