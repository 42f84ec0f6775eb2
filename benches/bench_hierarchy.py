"""Hits of a device and its host, compared with those of one pool that is as large as both.

    python benches/bench_hierarchy.py [--all] [--workload loop,zipf] [--device 2000] [--host 2] [--policy lru]
        [--tokens 8192] [--model gpt-oss,gemma-3,qwen3.5] [--store] [--manager] [--jobs 2]

The same prompts, in the same order and as many at a time, are served by a `KVCache` of small blocks with `--host` times
as many host blocks as device blocks, and by one pool. Each prompt fits the device, `--tokens` is the tokens of a step,
and more requests always wait. The bytes of each prompt are compared with its tokens. Columns, in blocks:

- hits: those found on the device, and those that only the host had.
- ratio: both over the hits of one pool.
- findable: share of the blocks held at the end that a prompt finds. The others fill the tiers for nothing.
- used: with `--store`, the share of the blocks loaded from a file store that a prompt then hits. The store holds all
  blocks of three times as much traffic, and the one pool is as large as all three.
- waits: how long steps wait until evicted blocks are copied to the host, over how long they compute, in a model of
  PCIe 5 (`policies/bus.py`): 25 GB/s each way, blocks of 2 MiB, 40 us a token.
- loads: the same for the blocks that steps load from the host. Each takes an eighth of the compute that it saves.

It prints all rows, then fails if one misses a goal. Without options it serves a selection in minutes. `--all` serves,
beside it, cases in which each pair of two values occurs; all 450 combinations would take a day. Other options replace
values of one case: 2,000 device blocks, twice as many on the host, 8,192 tokens, all workloads and policies.
`--manager` leaves out the bytes: transfers land at once. So does `--model` without `--store`, for models with windows
or states: each cache group has as many blocks, or their bytes in the first group's blocks, and hits of the host are not
told apart. A workload is left out if its trace is not in the folder that BLOCKYARD_TRACES names, or in
../shared/traces. With BENCH_JSON=FILE it also adds the worst figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from typing import Any

from policies import fitting
from policies.server import OUTPUT, SIZE, Server

from blockyard import CacheGroup
from blockyard.tools.replay.packed import PackedTrace
from blockyard.tools.replay.sweep import open_executor
from blockyard.traces import TraceRequest

SLOT = 8192
"""Bytes that a file store needs for a block."""
LARGEST_WITH_STORE = 100_000
"""Blocks of all tiers with a file store. It holds several times as many: gigabytes."""
GOALS = {"ratio": 0.97, "findable": 0.999, "used": 0.95}
MOST = {"waits": 0.05}
"""Most that a figure may be: 2,000 device blocks, a host of twice as many or more, 8,192 tokens, no store."""
FIGURES = (*GOALS, *MOST, "loads")
SMALL_HOST = 0.93
"""Goal of the ratio with a host of less than twice the device."""
WORKLOADS: dict[str, tuple[Callable[[int, int], fitting.Prompts], int]] = {
    "loop": (fitting.loop, 1),
    "zipf": (fitting.zipf, 4),
    "agents": (fitting.agents, 4),
    "chat": (fitting.chat, 8),
    "mooncake": (fitting.mooncake, 4),
}
"""How to make the prompts, and how many requests run at a time."""
FULL, sliding_window = CacheGroup.full_attention(), CacheGroup.sliding_window
MODELS = {
    "full": (FULL,),
    "gpt-oss": (FULL, sliding_window(128)),
    "gemma-3": (FULL, *[sliding_window(1024)] * 5),
    "qwen3.5": (FULL, *[CacheGroup.recurrent()] * 3),
    "gpt-oss-120b-eagle3": (FULL.with_blocks(bytes=608 << 10), sliding_window(128).with_blocks(bytes=576 << 10)),
    "gemma-3-27b": (FULL.with_blocks(bytes=1280 << 10), sliding_window(1024).with_blocks(bytes=6656 << 10)),
    "qwen3.5-35b": (FULL.with_blocks(bytes=320 << 10), CacheGroup.recurrent().with_blocks(bytes=62 << 20)),
}
"""Groups by model. Those with blocks of their own bytes share arenas, sized in blocks of the first."""
COLUMNS = ("workload", "model", "device", "host", "policy", "tokens", "store")
HITS = ("device hits", "host hits", "hits of one pool")
EVERY: dict[str, tuple[Any, ...]] = {
    "workload": tuple(WORKLOADS),
    "model": ("full",),
    "device": (200, 2000, 20_000),
    "host": (1.0, 2.0, 4.0, 16.0),
    "policy": ("lru", "adaptive"),
    "tokens": (512, 2048, 8192, 16_384),
    "store": (False, True),
}
MAIN = EVERY | {"device": (2000,), "host": (2.0,), "tokens": (8192,), "store": (False,)}
SELECTION: tuple[dict[str, tuple[Any, ...]], ...] = (
    {},
    {"device": (200,), "host": (1.0, 2.0), "tokens": (512,)},
    {"workload": ("loop", "zipf", "chat", "mooncake"), "host": (1.0, 16.0), "policy": ("lru",)},
    {"tokens": (512,), "policy": ("lru",)},
    {"device": (20_000,), "tokens": (16_384,), "policy": ("lru",)},
    {"workload": ("loop", "zipf", "chat"), "store": (True,)},
    {"workload": ("agents",), "model": ("gpt-oss", "qwen3.5"), "device": (200,), "host": (4.0,), "policy": ("lru",)}
    | {"tokens": (1024,), "store": (True,)},
)
"""What the cases of minutes have instead of the values of MAIN."""


@dataclass(frozen=True)
class Case:
    """What is served over which tiers; `host` is in devices."""

    workload: str = "loop"
    model: str = "full"
    device: int = 2000
    host: float = 2
    policy: str = "lru"
    tokens: int = 8192
    store: bool = False
    manager: bool = False

    @property
    def host_blocks(self) -> int:
        """Blocks on the host."""
        return round(self.device * self.host)

    @property
    def total(self) -> int:
        """Blocks of all tiers; the store has room for twice device and host."""
        return (self.device + self.host_blocks) * (3 if self.store else 1)

    @property
    def pairs(self) -> set[tuple[tuple[str, Any], ...]]:
        """Pairs of its values, with their names."""
        return set(combinations([(field.name, getattr(self, field.name)) for field in fields(self)], 2))

    @property
    def users(self) -> int:
        """Requests that run at a time."""
        return WORKLOADS[self.workload][1]

    def trace(self) -> PackedTrace:
        """Make its requests."""
        prompts = WORKLOADS[self.workload][0](self.total, self.device * 9 // 10 // self.users - 1)
        return PackedTrace.of([TraceRequest(0.0, len(ids) * SIZE + 1, OUTPUT, ids, SIZE) for ids in prompts])


@dataclass(frozen=True)
class Row:
    """A case's hits in blocks, and its figures by the names of their goals."""

    case: Case
    device_hits: int
    host_hits: int
    pool_hits: int
    figures: dict[str, float]
    seconds: float

    def missed(self) -> list[str]:
        """Return the goals that it misses."""
        least = GOALS if self.case.host >= 2 else GOALS | {"ratio": SMALL_HOST}
        is_claimed = self.case.host >= 2 and (self.case.device, self.case.tokens, self.case.store) == (
            2000,
            8192,
            False,
        )
        most, found = MOST if is_claimed else {}, self.figures
        low = [f"{name} {found[name]:.3f} is below {goal}" for name, goal in least.items() if found.get(name, 1) < goal]
        return low + [f"{name} {found[name]:.3f} are above {goal}" for name, goal in most.items() if found[name] > goal]

    def __str__(self) -> str:
        case = self.case
        cells: list[object] = [case.workload, case.model, case.device, f"{case.host:g} x", case.policy, case.tokens]
        cells += ["yes" if case.store else "", self.device_hits, self.host_hits, self.pool_hits]
        cells += [f"{self.figures[name]:.3f}" if name in self.figures else "" for name in FIGURES]
        return "| " + " | ".join(map(str, [*cells, f"{self.seconds:.1f}"])) + " |"


def measure(case: Case) -> Row:
    """Serve a case's requests with all its tiers, and with one pool."""
    trace, begin = case.trace(), time.perf_counter()
    blocks = case.device + case.host_blocks
    slots = trace.num_distinct * 5 // 4 if case.store else 0
    groups = MODELS[case.model]
    limits: dict[str, Any] = {"policy": case.policy, "tokens": case.tokens, "users": case.users, "groups": groups}
    pool = Server(trace, (blocks + slots) * len(groups), 0, has_bytes=False, **limits)
    pool.serve()
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/kv?size={slots * len(groups) * SLOT}" if case.store else None
        sizes = case.device * len(groups), case.host_blocks * len(groups)
        tiers = Server(trace, *sizes, url=url, has_bytes=not case.manager, **limits)
        with nullcontext() if tiers.cache is None else tiers.cache:
            tiers.serve()
            stats, best = tiers.manager.stats(), pool.manager.stats().hit_blocks
            assert best, f"{case} has no hits at all: it measures nothing"
            bus = tiers.bus
            figures = {"ratio": stats.hit_blocks / best, "findable": tiers.findable()}
            figures |= {"waits": bus.waited / bus.computed, "loads": bus.loaded / bus.computed}
            if tiers.cache is not None and tiers.cache.prefix_store is not None:
                # The store also counts the blocks of windows and states.
                loaded = tiers.cache.prefix_store.stats().hit_blocks if len(groups) == 1 else tiers.loaded
                figures["used"] = tiers.used / max(1, loaded)
    on_host = stats.loaded_blocks if len(groups) == 1 else 0
    hits = (stats.hit_blocks - on_host, on_host, best)
    return Row(case, *hits, figures, time.perf_counter() - begin)


def combined(values: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Return all cases of these values with traces, steps of at most half of the device, and no huge store."""
    found = [Case(**dict(zip(values, each, strict=True))) for each in product(*values.values())]
    found = [case for case in found if not case.store or case.total <= LARGEST_WITH_STORE]
    return [case for case in found if case.tokens <= case.device * SIZE // 2 and fitting.has_trace(case.workload)]


def add_pairs(found: list[Case], cases: list[Case]) -> None:
    """Add cases until each pair of values occurs that occurs in `cases`; one of few blocks may add fewer pairs."""
    left = set[Any]().union(*(case.pairs for case in cases)).difference(*(case.pairs for case in found))
    added = list[Case]()
    while left:
        added.append(max(cases, key=lambda case: len(case.pairs & left) ** 5 / case.total))
        left -= added[-1].pairs
    found += sorted(added, key=lambda case: case.total)


def chosen_cases() -> tuple[list[Case], int | None]:
    """Read the options. Returns the cases, and how many to measure at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="each pair of values, too")
    for name, values in EVERY.items():
        if name == "store":
            parser.add_argument("--store", action="store_true", help="with a file store")
        else:
            parser.add_argument(f"--{name}", help=f"some of, or others than, {','.join(map(str, values))}")
    parser.add_argument("--manager", action="store_true", help="without bytes: transfers land at once")
    parser.add_argument("--jobs", type=int, help="cases at a time; as many as cores by default")
    chosen = parser.parse_args()
    given: dict[str, tuple[Any, ...]] = {"store": (True,)} if chosen.store else {}
    for name in ("workload", "model", "device", "host", "policy", "tokens"):
        if text := getattr(chosen, name):
            given[name] = tuple(map(type(EVERY[name][0]), text.split(",")))
    parts = [MAIN | given] if given else [MAIN | part for part in SELECTION]
    found = [case for part in parts for case in combined(part)]
    if chosen.all:
        add_pairs(found, combined(EVERY | given))
    if chosen.manager:
        found = [replace(case, manager=True) for case in found if not case.store]
    elif chosen.model:
        found = [replace(case, manager=not case.store) for case in found]
    return found, chosen.jobs


def main() -> None:
    """Print the table; fail if a goal is missed."""
    todo, jobs = chosen_cases()
    names = [*COLUMNS, *HITS, *FIGURES, "seconds"]
    print("|", " | ".join(names), "|")
    print("|" + "---|" * len(names), flush=True)
    worst, missed = dict.fromkeys(GOALS, 1.0), []
    with open_executor(jobs) as executor:
        for row in map(measure, todo) if executor is None else executor.map(measure, todo):
            print(row, flush=True)
            worst |= {name: min(worst[name], row.figures.get(name, 1.0)) for name in GOALS}
            missed += [f"{row.case}: {why}" for why in row.missed()]
    if "BENCH_JSON" in os.environ:
        from figures import keep  # noqa: PLC0415 (it refuses debug builds, whose hits are the same)

        keep({f"hierarchy_{name}_worst": figure for name, figure in worst.items()})
    if missed:
        sys.exit("\n".join([f"{len(missed)} goals are missed:", *missed]))


if __name__ == "__main__":
    main()
