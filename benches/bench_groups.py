"""The cost of cache groups: decode steps and prompts with 1 to 9 groups; thread-CPU time, minimum of repeats.

    python benches/bench_groups.py [--check] [--repeats 9]

Decode: `append` with tables kept for 256 sequences of equal length, in nanoseconds per sequence and step. Every 16th
step takes blocks for all of them, so the mean step costs more than the median step. W-prefix: 300 prompts of 2,048
tokens, of which 1,024 are shared by 50 prompts, 16 live at a time, in microseconds per prompt. `--check` stops with an
error if a goal is missed. With BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.

`classes_2`: decode steps of a full and a window group whose blocks differ in bytes. `extent_us`: microseconds for a
page class to take an extent that another has left empty, in an arena of 18,000 extents, as Llama 4 has in 40 GiB.
`classes_16m_bytes_per_block`: resident bytes per block of a manager with 16M blocks, after most extents were in each of
three classes.

All group counts take turns within a repeat, so that they see the same load.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import deque
from statistics import median

import numpy as np
from bench_prefix import LIVE, LRU, resident_bytes
from figures import keep
from numpy.typing import NDArray
from peers.common import BLOCK_SIZE, GROUPED_POOL, GROUPED_SHAPES, PROMPT, SEQUENCES, grouped_prompts

from blockyard import Arena, BlockManager, CacheGroup
from blockyard.types import Sequence as Handle

STEPS, TIMED = 512, 112
GOALS_NS = {1: 2.9, 2: 6.0, 5: 15.0, 9: 27.0}
"""The median decode step, by number of groups."""
GOAL_RATIO = 1.2
"""W-prefix with 2 groups, over one group."""
GOAL_US = 20.0
"""W-prefix with 6 groups."""
EXTENTS, BLOCKS = 18_000, 1 << 24
GOALS_OF_CLASSES = {"classes_2_append_ns": 7.0, "extent_us": 5.0, "classes_16m_bytes_per_block": 96.0}


def groups_of(windows: tuple[int | None, ...]) -> list[CacheGroup]:
    """Return groups of sliding windows; None is full attention, 0 a recurrent group."""
    made = []
    for window in windows:
        if window is None:
            made.append(CacheGroup.full_attention())
        else:
            made.append(CacheGroup.sliding_window(window) if window else CacheGroup.recurrent())
    return made


DECODED = {
    1: groups_of((None,)),
    2: groups_of((None, 128)),
    5: groups_of((None, 128, 128, 0, 0)),
    9: groups_of((None, *[128] * 4, *[0] * 4)),
}


def decode(groups: list[CacheGroup], bytes_of: tuple[int, ...] = ()) -> tuple[float, float]:
    """Nanoseconds per sequence and step with tables: the mean, and the median step, which takes no blocks."""
    width = (PROMPT + STEPS + TIMED) // BLOCK_SIZE
    blocks = SEQUENCES * len(groups) * (width + 1)
    if bytes_of:
        groups = [group.with_blocks(bytes=size) for group, size in zip(groups, bytes_of, strict=True)]
        arena = Arena(device_bytes=blocks * max(bytes_of))
        manager = BlockManager(block_size=BLOCK_SIZE, arena=arena, groups=groups)
    else:
        manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=blocks, groups=groups)
    sequences = manager.allocate(counts=np.full(SEQUENCES, PROMPT, dtype=np.uint32))
    manager.complete(manager.take_decision().ticket)
    slots = np.zeros(len(groups) * SEQUENCES, dtype=np.int64)
    tables = np.zeros((len(groups) * SEQUENCES, width), dtype=np.int32)
    start = time.thread_time_ns()
    for _ in range(STEPS):
        manager.append(sequences, block_tables=tables, out=slots)
    mean = (time.thread_time_ns() - start) / STEPS
    steps = []
    for _ in range(TIMED):
        start = time.perf_counter_ns()
        manager.append(sequences, block_tables=tables, out=slots)
        steps.append(time.perf_counter_ns() - start)
    for group, table in enumerate(tables.reshape(len(groups), SEQUENCES, width)):
        if not np.array_equal(table, manager.block_tables(sequences, group=group)):
            raise AssertionError(f"the block table of group {group} is not what the manager says")
    return mean / SEQUENCES, median(steps) / SEQUENCES


def extent_change() -> float:
    """Microseconds for a class to take an extent that another has left empty, and the block in it."""
    full, state = CacheGroup.full_attention().with_blocks(bytes=1 << 14), CacheGroup.recurrent()
    arena = Arena(device_bytes=EXTENTS << 20, extent_bytes=1 << 20)
    groups = [full, state.with_blocks(bytes=1 << 20)]
    manager = BlockManager(block_size=BLOCK_SIZE, groups=groups, arena=arena, watermark=0)
    states = np.ones(512, np.uint32)
    manager.free([manager.allocate(BLOCK_SIZE * 64 * (EXTENTS - 10))])
    before = manager.pool(page_class=1).num_extents
    start = time.thread_time_ns()
    manager.allocate(counts=states)
    spent = time.thread_time_ns() - start
    if manager.pool(page_class=1).num_extents - before < len(states) - 1:
        raise AssertionError("the states have not taken the extents")
    return spent / len(states) / 1000


def bytes_of_classes() -> float:
    """Return resident bytes per block of 16M cached blocks, most of whose extents had been in each of three classes."""
    before = resident_bytes()
    sizes = {"full": 1 << 12, "window": 6 << 12, "state": 48 << 12}
    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(4096), CacheGroup.recurrent()]
    groups = [group.with_blocks(bytes=size) for group, size in zip(groups, sizes.values(), strict=True)]
    arena = Arena(device_bytes=BLOCKS * sizes["full"], extent_bytes=sizes["state"])
    manager = BlockManager(block_size=BLOCK_SIZE, groups=groups, arena=arena, watermark=0, prefix_caching=LRU)
    most = [0] * len(groups)
    # Short prompts are mostly states, those as long as the window mostly windows, and long ones full attention.
    for tokens in (BLOCK_SIZE + 1, 4096, 1 << 20):
        prompt = np.arange(tokens, dtype=np.uint32)
        for number in range(BLOCKS * sizes["full"] // prompt_bytes(tokens, sizes) + 1):
            prompt[0] = (tokens << 4) + number
            if not manager.can_allocate(prompt, chunk_tokens=4096):
                raise AssertionError(f"prompt {number} of {tokens} tokens does not fit")
            compute(manager, prompt)
        owned = [manager.pool(page_class=at).num_extents for at in range(len(groups))]
        most = [max(both) for both in zip(most, owned, strict=True)]
    extents = sum(owned)
    if min(most) < 0.8 * extents:
        raise AssertionError(f"of {extents} extents the classes had {most} at most")
    blocks = sum(manager.pool(page_class=at).num_extents * per for at, per in enumerate((48, 8, 1)))
    return (resident_bytes() - before) / blocks


def prompt_bytes(tokens: int, sizes: dict[str, int]) -> int:
    """Return the bytes of a cached prompt with one point."""
    blocks = tokens // BLOCK_SIZE
    return blocks * sizes["full"] + min(blocks, 256) * sizes["window"] + sizes["state"]


def compute(manager: BlockManager, prompt: NDArray[np.uint32]) -> None:
    """Compute a prompt in chunks, and free it."""
    sequence = manager.allocate(prompt, chunk_tokens=4096)
    while True:
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(sequence)
        if not (chunk := manager.next_chunk(sequence, 4096)):
            break
        manager.append([sequence], chunk)
    manager.free(sequence)


def w_prefix(groups: list[CacheGroup], requests: list[NDArray[np.uint32]]) -> tuple[float, float]:
    """Microseconds per prompt, and the share of tokens found."""
    manager = BlockManager(
        block_size=BLOCK_SIZE, device_blocks=GROUPED_POOL, watermark=0.0, groups=groups, prefix_caching=LRU
    )
    live: deque[Handle] = deque()
    found = 0
    start = time.thread_time_ns()
    for prompt in requests:
        if len(live) == LIVE:
            manager.free(live.popleft())
        sequence = manager.allocate(prompt)
        found += sequence.cached_tokens
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(sequence)
        live.append(sequence)
    spent = time.thread_time_ns() - start
    return spent / len(requests) / 1000, found / sum(map(len, requests))


def figures(repeats: int) -> dict[str, float]:
    """Return all figures by their names in BENCH_JSON."""
    requests = [np.array(prompt, np.uint32) for prompt in grouped_prompts()]
    shapes = {count: groups_of(windows) for count, windows in GROUPED_SHAPES.items()}
    found: dict[str, float] = {"classes_16m_bytes_per_block": bytes_of_classes()}  # first, while the heap is small

    def keep_least(name: str, value: float) -> None:
        found[name] = min(found.get(name, value), value)

    for _ in range(repeats):
        for count, groups in DECODED.items():
            mean, middle = decode(groups)
            keep_least(f"groups_{count}_append_ns", middle)
            keep_least(f"groups_{count}_append_mean_ns", mean)
        mean, middle = decode(DECODED[2], (1 << 14, 3 << 13))
        keep_least("classes_2_append_ns", middle)
        keep_least("classes_2_append_mean_ns", mean)
        keep_least("extent_us", extent_change())
        for count, groups in shapes.items():
            spent, hit = w_prefix(groups, requests)
            keep_least(f"groups_{count}_prefix_us", spent)
            found[f"groups_{count}_prefix_hit"] = hit
    return found


def missed(found: dict[str, float]) -> list[str]:
    """Return the goals that the figures miss, in words."""
    limits = {f"groups_{count}_append_ns": goal for count, goal in GOALS_NS.items()}
    limits |= GOALS_OF_CLASSES
    limits["groups_2_prefix_us"] = GOAL_RATIO * found["groups_1_prefix_us"]
    limits["groups_6_prefix_us"] = GOAL_US
    return [
        f"{name} is {found[name]:.2f}, must be at most {limit:.2f}"
        for name, limit in limits.items()
        if found[name] > limit
    ]


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="stop with an error if a goal is missed")
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args()
    gc.disable()  # its walks would count against the next allocation
    found = figures(chosen.repeats)
    for name, value in found.items():
        print(f"{name:26} {value:10.3f}")
    keep(found)
    if chosen.check and (over := missed(found)):
        sys.exit(f"bench_groups: {'; '.join(over)}")


if __name__ == "__main__":
    main()
