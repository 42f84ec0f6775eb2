"""A program that uses all parts of a `KVCache`, catches interrupts, and knows the expected value of every byte."""

from __future__ import annotations

import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from interrupts import Interrupt
from numpy.typing import NDArray

from blockyard import KVCache, PrefixCaching
from blockyard.cache import StepEnd
from blockyard.errors import BlockyardError, OutOfBlocksError, StoreError
from blockyard.layout.kv import KVLayout
from blockyard.stores import ExternalStore

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=2, dtype="float32")
WIDTH = LAYOUT.bytes_per_block
BLOCKS = {"device": 16, "host": 8, "external": 8}
TENANT = b"tenant"
PATIENCE = 10.0

T = TypeVar("T")


class Program:
    """Two prompts that go through every tier and both stores, and are found again.

    Args:
        interrupt: exception that interrupts its calls of the cache.
        external: URL of the external store, or an open store.
        prefix: URL of the prefix store, or an open store.
    """

    def __init__(self, interrupt: Interrupt, external: str | ExternalStore, prefix: str | ExternalStore) -> None:
        self.interrupt = interrupt
        self.cache = KVCache(
            LAYOUT,
            device_blocks=BLOCKS["device"],
            max_device_blocks=BLOCKS["device"],
            host_blocks=BLOCKS["host"],
            swap_store=external,
            prefix_caching=PrefixCaching(host=True),
            prefix_store=prefix,
            prefetch_timeout_base=PATIENCE,
            namespace=b"interrupts",
            watermark=0.0,
        )
        self.manager = self.cache.manager
        self.prompts: dict[int, list[int]] = {}  # of each live sequence
        self.computed: set[int] = set()
        self.hits = 0

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Make a call. If it is interrupted, make it again, which may be interrupted too, and then take three steps."""
        for _ in range(2):
            try:
                with self.interrupt.armed():
                    return function(*arguments)
            except (KeyboardInterrupt, MemoryError):  # noqa: PERF203 (twice at most)
                if not self.interrupt.where:
                    raise
        for _ in range(3):
            with self.cache.step() as step:
                pass
            self.take_in(step.ended)
        return function(*arguments)

    def run(self) -> None:
        first, second = [*range(12)], [*range(100, 108)]
        prefixes = self.cache.prefix_store
        assert prefixes is not None
        if getattr(prefixes.store, "keeps_quotas", False):
            prefixes.set_quota(TENANT, 64 * WIDTH)
        self.admit(first)
        self.admit(second)
        for there in ("external", "host"), ("host", "external"):
            self.move_out(there)
            self.step()
            self.drain()
            self.move_in()
            self.step()
            self.drain()
        self.move_out(("host", "external"))
        self.free(*self.prompts)
        self.step()
        self.call(prefixes.wait, PATIENCE)
        self.call(self.cache.resize, 12)
        self.step()
        self.forget_tiers()
        self.call(self.cache.resize, BLOCKS["device"])
        for prompt in first, second:
            fetch = self.call(prefixes.prefetch, [*prompt, 7])
            until = time.monotonic() + PATIENCE
            while not self.call(lambda fetch=fetch: fetch.done):  # type: ignore[misc]
                assert time.monotonic() < until, f"{fetch} is not done"
                self.step()
            self.admit([*prompt, 7])
        self.step()
        self.drain()
        self.end()

    def admit(self, prompt: list[int]) -> None:
        """Compute a prompt, and check its cached blocks."""
        sequence = self.manager.allocate(prompt, salt=TENANT if prompt[0] else None)
        handle, cached = int(sequence), sequence.cached_tokens // LAYOUT.block_size
        self.hits += cached
        self.prompts[handle] = prompt
        self.step()
        self.drain()
        if handle in self.prompts:
            blocks = self.manager.block_table(handle).astype(np.int64)
            rows = contents(prompt, len(blocks))
            assert np.array_equal(self.cache.engine.read("device", blocks[:cached]), rows[:cached]), "wrong hits"
            self.cache.engine.write("device", blocks[cached:], rows[cached:])
            self.manager.mark_computed(handle)
            self.computed.add(handle)

    def move_out(self, tiers: tuple[str, ...]) -> None:
        for handle, tier in zip(tuple(self.prompts), tiers, strict=False):
            self.manager.swap_out(handle, to=tier)

    def move_in(self) -> None:
        for handle in tuple(self.prompts):
            self.manager.swap_in(handle)

    def free(self, *handles: int) -> None:
        for handle in handles:
            self.manager.free(handle)
            self.prompts.pop(handle, None)

    def forget_tiers(self) -> None:
        """Evict the cached blocks of device and host with other prompts."""
        number = 0
        for _ in range(8):
            with suppress(OutOfBlocksError):
                number += 1
                handle = self.manager.allocate([1 << 20 | number << 8 | token for token in range(40)])
                self.step()
                self.manager.free(handle)
        self.step()
        self.drain()

    def step(self) -> None:
        step = self.call(self.cache.step)
        self.call(step.__enter__)
        self.take_in(self.call(step.finish))
        self.take_in(self.call(self.cache.poll))

    def drain(self) -> None:
        """Wait for all transfers, and check the bytes of each sequence that was not reported lost."""
        self.take_in(self.call(self.cache.drain))
        assert self.manager.stats().open_tickets == [], "a ticket is open"
        self.manager.check()
        for handle, prompt in self.prompts.items():
            if self.manager.tier(handle) == "device" and handle in self.computed:
                blocks = self.manager.block_table(handle).astype(np.int64)
                assert np.array_equal(self.cache.engine.read("device", blocks), contents(prompt, len(blocks))), prompt

    def take_in(self, ended: list[StepEnd]) -> None:
        for end in ended:
            for handle in end.lost.tolist():
                if handle in self.prompts:
                    self.free(handle)

    def end(self) -> None:
        """Free everything, and check that no block, job, ticket or key is left."""
        self.free(*tuple(self.prompts))
        self.step()
        self.drain()
        prefixes = self.cache.prefix_store
        assert prefixes is not None
        assert self.call(prefixes.wait, PATIENCE)
        try:
            assert self.call(prefixes.forget), "something is on its way"
        except StoreError:  # a thread of the store was interrupted
            assert self.interrupt.where
            assert prefixes.forget()
        self.manager.check()
        for tier, blocks in BLOCKS.items():
            assert self.manager.pool(tier).num_free == blocks, tier
        handles = [int(handle) for handle in self.manager.allocate(counts=[32, 32])]
        self.step()
        self.manager.swap_out(handles[0], to="host")
        self.manager.swap_out(handles[1], to="external")
        self.step()
        self.drain()
        handles.append(int(self.manager.allocate(64)))
        self.step()
        self.drain()
        assert not any(self.manager.pool(tier).num_free for tier in BLOCKS)
        self.free(*handles)
        self.step()
        self.drain()
        store = self.cache.swap_store
        assert store is not None
        until = time.monotonic() + PATIENCE
        while store.stats().pending_bytes or prefixes.store.stats().pending_bytes:
            assert time.monotonic() < until, "a store keeps memory for a batch"
            self.step()

    def close(self) -> None:
        self.call(self.cache.close)
        self.cache.close()
        with pytest.raises(BlockyardError, match="the cache is closed"):
            self.cache.step()
        self.cache.manager.check()


def contents(prompt: list[int], count: int) -> NDArray[np.uint8]:
    """Return the bytes of a prompt's first blocks: each depends on all tokens up to its end."""
    rows = np.zeros((count, WIDTH), np.uint8)
    for index, row in enumerate(rows):
        row[:] = np.frombuffer(hashlib.shake_256(repr(prompt[: 4 * index + 4]).encode()).digest(WIDTH), np.uint8)
    return rows


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Check that the code inside leaves no descriptor open.

    It logs nothing: pytest keeps the records of a test, and these keep stores alive.
    """
    logging.disable()  # unlike `manager.disable = ...`, also reaches loggers that have logged before
    before = open_files()
    try:
        yield
        assert open_files() <= before, "a descriptor is left"
    finally:
        logging.disable(logging.NOTSET)


def open_files() -> int:
    gc.collect()  # stores close theirs with their last reference
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("blockyard")}
