"""A scheduler over random page classes, whose arena or split is resized while requests run."""

from __future__ import annotations

import hashlib
from collections import Counter
from random import Random

import numpy as np
from arena_memory import ArenaMemory

from blockyard import Arena, BlockManager, CacheGroup, PrefixCaching
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.scheduler import DefragPolicy, Request, Scheduler
from blockyard.stores.threaded.runtime import use_runtime
from blockyard.tools.virtual_time import VirtualTime

EXTENT = 960
ENOUGH = 6000
"""Steps in which a few short requests surely end."""


class ArenaProgram:
    """A random manager, its scheduler and memory, and random requests.

    Args:
        seed: of all choices.
        pins: whether prompts are pinned and unpinned meanwhile, if the manager caches; the end comes without pins.
        late: whether copies of up to four steps are on their way at once; some programs then have one page class.

    Attributes:
        counts: requests by how they ended, pins, steps in which a request runs alone or in which copies of an earlier
            one are on their way, and all operations.
        digest: of all steps and outputs.
    """

    def __init__(self, seed: int, *, pins: bool = False, late: bool = False) -> None:
        self.random = random = Random(seed)
        self._pinning = Random(seed)  # of its own: without pins a seed's program stays the same
        self._timing, self._is_late = Random(seed), late  # nor does what moves when change it
        self._open: list[int] = []
        self.counts: Counter[str] = Counter()
        self.digest = hashlib.sha256()
        self._time = VirtualTime()
        self.extents = random.choice([6, 8, 12, 16])
        self.split = [random.choice([8, 16, 40]) for _ in range(4)] if random.random() < 0.25 else []
        self.manager = self._make_manager(random.choice([1, 2, 3, 4]))
        options = {
            "max_num_seqs": random.choice([2, 6]),
            "max_num_batched_tokens": random.choice([2, 4, 16, 64]),
            "preemption_mode": random.choice(["auto", "swap", "recompute"]),
            "num_lookahead_tokens": random.choice([0, 0, 2]),
            "max_overtakes": random.choice([0, 2]),
        }
        if not self.split and random.random() < 0.3 and self.manager.num_page_classes > 1:
            options["defragment"] = DefragPolicy([("extents", 0)])
        self._pins: list[int] | None = [] if pins and self.manager.prefix is not None else None
        self._prompts: list[list[int]] = []
        with use_runtime(self._time):
            self.scheduler = Scheduler(self.manager, **options)
        self.memory = ArenaMemory(self.manager)
        self.counts["one class"] += self.manager.num_page_classes == 1

    def _make_manager(self, block_size: int) -> BlockManager:
        random = self.random
        others = [
            CacheGroup.sliding_window(random.choice([1, 2, 5, 9, 17])),
            CacheGroup.recurrent(),
            CacheGroup.chunked_attention(random.choice([4, 8]) * block_size),
            CacheGroup.full_attention(),
        ]
        groups = [CacheGroup.full_attention(), *random.sample(others, random.choice([1, 2, 2, 3]))]
        sizes = random.sample([64, 96, 160, 320, 480], len(groups))
        if self._is_late and not self.split and self._timing.random() < 0.2:
            sizes = sizes[:1] * len(groups)
        groups = [group.with_blocks(bytes=size) for group, size in zip(groups, sizes, strict=True)]
        if self._is_late and self._timing.random() < 0.5:  # states of several groups
            groups += [group for group in groups if group.kind == "recurrent"]
        caching, host = random.choice([False, "lru", "adaptive"]), random.choice([0, 4, 10])
        if caching:
            caching = PrefixCaching(eviction=caching, host=host > 0)
        self.split = self.split[: len(set(sizes))]
        if self.split:
            arena = Arena.split(device_blocks=self.split, host_blocks=[3 * host] * len(self.split))
        else:
            bytes_of = {"device_bytes": self.extents * EXTENT, "host_bytes": host * EXTENT}
            arena = Arena(**bytes_of, extent_bytes=EXTENT)
        options = {"watermark": random.choice([0, 0, 0.1]), "reuse_order": random.choice(["lowest", "fifo", "lru"])}
        return BlockManager(block_size=block_size, groups=groups, arena=arena, prefix_caching=caching, **options)

    def add(self) -> None:
        """Add a request, if it could finish."""
        random, scheduler = self.random, self.scheduler
        prompt = [7] * random.choice([0, 0, 4, 9]) + [
            random.randrange(5) for _ in range(random.choice([1, 2, 5, 9, 20]))
        ]
        self.counts["added"] += 1
        self.counts["operations"] += 1
        self._prompts.append(prompt)
        name, most, count = f"{self.counts['added']}", random.choice([1, 3, 9, 30]), random.choice([1, 1, 1, 2])
        try:
            scheduler.add(Request(name, prompt, most, count, priority=random.choice([0, 0, 1])))
        except OutOfBlocksError:
            self.counts["refused"] += 1

    def pin(self, pins: list[int]) -> None:
        """Pin what is cached of a prompt, or unpin."""
        random = self._pinning
        if pins and random.random() < 0.5:
            self.manager.pins.unpin(pins.pop(random.randrange(len(pins))))
        elif self._prompts:
            try:
                pin, tokens = self.manager.pins.pin_prompt(random.choice(self._prompts[-6:]))
            except OutOfBlocksError:  # more than may be pinned
                return
            pins.append(pin)
            self.counts["pinned"] += tokens > 0
            self.counts["pinned alone"] += tokens > 0 and self.scheduler._rows.alone is not None

    def resize(self) -> None:
        """Resize the device to a size that it can have."""
        random, defrag = self.random, self.manager.defrag
        try:
            if self.manager.num_page_classes == 1:
                defrag.resize(random.randint(5, self.manager.pool().max_blocks))
            elif self.split:
                defrag.resize([random.randint(2, most) for most in self.split])
            else:
                defrag.resize(device_bytes=random.randint(2, self.extents) * EXTENT)
            self.forget()
        except InvalidArgumentError:  # less than the watermark
            self.counts["resizes refused"] += 1

    def end(self, left: int) -> None:
        """End the copies of all steps but the last ones."""
        while len(self._open) > left:
            ticket = self._open.pop(0)
            self.memory.end(ticket)
            self.scheduler.complete(ticket)

    def forget(self) -> None:
        """Forget what lies behind the end of an arena, once it has shrunk."""
        progress = self.manager.defrag.progress()
        if progress.done and not self.split:
            self.memory.forget_behind(progress.blocks)

    def step(self) -> None:
        """Run a step. Its copies end before it computes or later."""
        self._time.now += 0.01
        self.counts["operations"] += 1
        step = self.scheduler.schedule()
        self.digest.update(repr([step.owner(row) for row in range(step.rows)]).encode())
        self.digest.update(np.ascontiguousarray(step.slot_mapping).tobytes())
        for kind, pairs in step.decision.transfers():
            self.digest.update(repr((kind, pairs.ids.tolist())).encode())
        self.memory.begin(step)
        self._open.append(step.decision.ticket)
        self.counts["late"] += len(self._open) > 1
        computes_first = self._timing.random() < 0.5
        if computes_first:
            self.memory.compute(step)
        left = self._timing.randrange(4) if self._is_late else 0
        self.end(0 if step.decision.swap_in else left)  # what it computes with may still be lost
        if not computes_first:
            self.memory.compute(step)
        for finished in self.scheduler.update(step, [self.random.randrange(5) for _ in range(step.num_draws)]):
            self.digest.update(repr((finished.request.request_id, finished.outputs)).encode())
            self.counts["shrunk away" if finished.error else "finished"] += 1
        alone = self.scheduler._rows.alone  # whether the case that this is about was met
        self.counts["alone"] += alone is not None and alone.alive
        self.forget()

    def run(self) -> None:
        """Add requests, run steps and resize; then run to the end."""
        for _ in range(self.random.choice([30, 80])):
            if self.scheduler.num_unfinished < 9 and self.random.random() < 0.4:
                self.add()
            if self.random.random() < 0.12:
                self.resize()
                self.counts["operations"] += 1
            if self._pins is not None and self._pinning.random() < 0.3:
                self.pin(self._pins)
                self.counts["operations"] += 1
                self.manager.check()
            self.step()
            self.manager.check()
        for pin in self._pins or []:
            self.manager.pins.unpin(pin)
        for _ in range(ENOUGH):
            if not self.scheduler.num_unfinished:
                break
            self.step()
        self.manager.check()
