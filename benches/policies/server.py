"""Serves a trace over tiers of small blocks: compares their bytes, and follows which keys the tiers hold."""

from __future__ import annotations

from contextvars import ContextVar
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import Arena, BlockManager, CacheGroup, KVCache, KVLayout, PrefixCaching, Request, Scheduler
from blockyard.events import export_keys
from blockyard.prefix_store import Prefetch
from blockyard.scheduler import Step
from blockyard.tools.replay.packed import PackedTrace
from blockyard.types import HashedPrompt
from policies.bus import Bus

SIZE = 16
"""Tokens of a block."""
OUTPUT = 4
"""Tokens that a request generates: none fills a block."""
WAITING = 8
"""Requests that wait beside those that run."""
LAYOUT = KVLayout("kv_first", num_layers=1, block_size=SIZE, num_kv_heads=1, head_size=1, dtype="float32")
ADDED: ContextVar[int] = ContextVar("ADDED")
"""The request that is added, which its prefetches belong to."""


class Server:
    """A scheduler over tiers that serves one trace.

    Args:
        trace: the requests.
        device: device blocks; for groups with blocks of their own bytes, bytes in blocks of the first.
        host: host blocks, likewise.
        policy: eviction policy.
        tokens: maximum number of tokens in a step.
        users: how many requests run at a time; others wait beside them.
        groups: cache groups of the model.
        url: of a prefix store; None for no store.
        has_bytes: whether a `KVCache` moves bytes, which are compared; else transfers land at once.

    Attributes:
        manager: the manager.
        cache: the cache; None without bytes.
        loaded: number of blocks of tokens that were loaded from the store for a request.
        used: how many of them it then used.
        bus: what its steps wait for.
    """

    def __init__(
        self,
        trace: PackedTrace,
        device: int,
        host: int,
        *,
        policy: str,
        tokens: int,
        users: int,
        groups: tuple[CacheGroup, ...] = (CacheGroup.full_attention(),),
        url: str | None = None,
        has_bytes: bool = True,
    ) -> None:
        self._has_events = host > 0 and len(groups) == 1  # the groups of a block have one key
        caching = PrefixCaching(eviction=policy, host=host > 0, max_events=64 * device if self._has_events else 0)
        options: dict[str, Any] = {"device_blocks": device, "host_blocks": host}
        if unit := groups[0].block_bytes:
            options = {"arena": Arena(device_bytes=device * unit, host_bytes=host * unit)}
        options["prefix_caching"] = caching
        self._trace, self._most = trace, users + WAITING
        self._held: dict[bytes, int] = {}  # a bit for each tier that holds the key
        self._fetches: dict[int, list[tuple[int, Prefetch]]] = {}  # of waiting requests, each with the blocks before it
        self.loaded = self.used = 0
        self.bus = Bus(*(group.block_bytes for group in groups if group.block_bytes))
        self.cache: KVCache | None = None
        if has_bytes:
            if url is not None:
                options |= {"prefix_store": url, "namespace": b"hierarchy", "prefetch_timeout_base": 600}
            self.cache = KVCache(LAYOUT, groups=groups, **options)
            self.manager, (tensor,) = self.cache.manager, self.cache.engine.tensors
            self._memory = tensor.numpy().view(np.int32).reshape(2, -1)
        else:
            self.manager = BlockManager(block_size=SIZE, groups=list(groups), **options)
        self._groups = groups
        self._store = None if self.cache is None else self.cache.prefix_store
        self._scheduler = Scheduler(
            self.cache or self.manager,
            max_num_seqs=users,
            max_num_batched_tokens=tokens,
            prefetch=None if self._store is None else self._prefetch,
        )

    def serve(self) -> None:
        """Serve all requests."""
        scheduler, number = self._scheduler, 0
        while number < len(self._trace) or scheduler.num_unfinished:
            while number < len(self._trace) and scheduler.num_unfinished < self._most:
                ADDED.set(number)
                scheduler.add(Request(str(number), self._prompt(number), max_tokens=OUTPUT))
                number += 1
            if self.cache is None:
                step = scheduler.schedule()
                scheduler.complete(step.decision.ticket)
            else:
                with scheduler.step() as step:
                    self._compute(step)
            self.bus.take(step)
            ended = scheduler.update(step, np.zeros(step.num_draws, np.uint32))
            if ended and self._store is not None:  # a real step takes longer than its writes
                assert self._store.wait(60), "the store hangs"
            self._take_events()
        if self.cache is not None:
            scheduler.drain()
            self._take_events()

    def findable(self) -> float:
        """Return the share of the held blocks that the prompts find."""
        if not self._has_events:
            held_blocks = sum(self.manager.stats().cached_blocks.values())
            return 1 - self.manager.prefix.count_unfindable() / max(1, held_blocks)
        trace, found, held = self._trace, set[bytes](), set(self._held)
        ends = trace.starts[1:] - 1
        inner = np.delete(trace.blocks, ends)
        _, prompts = np.unique(trace.blocks[ends], return_index=True)
        for number in prompts[~np.isin(trace.blocks[ends][prompts], inner)].tolist():  # that begin no other prompt
            prompt = self._prompt(number)
            keys, count = export_keys(prompt, block_size=SIZE), self.manager.prefix.lookup(prompt).tokens // SIZE
            if self._store is not None:
                held |= set(compress(keys, self._store.store.contains(keys)))
                count = next((at for at, key in enumerate(keys) if key not in held), len(keys))
            found.update(keys[:count])
        return len(found & held) / max(1, len(held))

    def _prompt(self, number: int) -> NDArray[np.uint32]:
        """Return a request's tokens: each block's number, which no other chain has, and a zero."""
        blocks = self._trace.blocks[self._trace.starts[number] : self._trace.starts[number + 1]]
        return np.append(np.repeat(blocks, SIZE), 0).astype(np.uint32)

    def _prefetch(self, prompt: HashedPrompt) -> Prefetch:
        assert self._store is not None
        fetch = self._store.prefetch(prompt)
        before = self.manager.prefix.lookup(prompt).tokens // SIZE
        self._fetches.setdefault(ADDED.get(), []).append((before, fetch))
        return fetch

    def _compute(self, step: Step) -> None:
        """Write the tokens as bytes; compare those of whole prompts, hits included. Count the loads that are used.

        Bytes of states are written but not compared.
        """
        self._memory[:, step.slot_mapping] = step.token_ids
        tables = step.block_tables.reshape(len(self._groups), len(step.handles), -1)
        for row in range(step.decodes, step.samples):
            tokens = step.all_token_ids(row)[::SIZE]
            for group, blocks in zip(self._groups, tables[:, row, : len(tokens)], strict=True):
                if group.kind != "recurrent":
                    kept = np.arange(len(blocks)) if group.window is None else np.flatnonzero(blocks)
                    first = self._memory[0, blocks[kept].astype(np.int64) * SIZE]
                    assert np.array_equal(first, tokens[kept]), f"wrong bytes of {step.owner(row)}"
        for row in range(step.decodes, step.rows):
            if fetches := self._fetches.pop(int(step.owner(row)[0]), []):
                loaded = sum(fetch.tokens for _, fetch in fetches) // SIZE
                self.loaded += loaded
                self.used += min(loaded, max(0, int(step.start[row]) // SIZE - fetches[0][0]))

    def _take_events(self) -> None:
        if not self._has_events:
            return
        events = self.manager.prefix.take_events()
        assert not events.dropped, f"{events.dropped} events were lost"
        keys, held = events.keys.view("V32")[:, 0].tolist(), self._held
        for key, kind, tier in zip(keys, events.kinds.tolist(), events.tiers.tolist(), strict=True):
            if events.KINDS[kind] == "stored":
                held[key] = held.get(key, 0) | 1 << tier
            elif left := held[key] & ~(1 << tier):
                held[key] = left
            else:
                del held[key]
