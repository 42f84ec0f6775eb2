"""A cache over a prefix store; every block is compared with the contents that its tokens determine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCache, KVLayout, PrefixCaching
from blockyard.events import export_keys
from blockyard.prefix_store import Prefetch, PrefixStore
from blockyard.stores import ExternalStore

BLOCK = 4
LAYOUT = KVLayout("kv_first", num_layers=2, block_size=BLOCK, num_kv_heads=1, head_size=8, dtype="float16")
WIDTH = LAYOUT.bytes_per_block


def tokens(stream: int, count: int) -> list[int]:
    return [1000 * stream + at for at in range(count)]


def row_of(key: bytes) -> NDArray[np.uint8]:
    """The bytes of the block under a key."""
    return np.random.default_rng(list(key)).integers(0, 256, WIDTH, dtype=np.uint8)


class CheckedCache:
    """A `KVCache` whose "model" writes rows determined by their keys."""

    def __init__(self, store: ExternalStore | str, *, device: int = 12, host: int = 12, **options: Any) -> None:
        self.cache = KVCache(
            LAYOUT,
            device_blocks=device,
            host_blocks=host,
            prefix_caching=PrefixCaching(host=host > 0, max_events=100_000),
            prefix_store=store,
            namespace=b"a model",
            watermark=0.0,
            **{"prefetch_timeout_base": 60.0} | options,
        )
        self.manager = self.cache.manager
        assert self.cache.prefix_store is not None
        self.prefixes: PrefixStore = self.cache.prefix_store
        self.cached: dict[tuple[str, int], bytes] = {}

    def fetch(self, prompt: list[int], salt: bytes | None = None) -> Prefetch:
        """Load the part of a prompt that the store has."""
        fetch = self.prefixes.prefetch(prompt, salt=salt)
        assert self.prefixes.wait(60, until=lambda: fetch.done)
        return fetch

    def serve(self, prompt: list[int], salt: bytes | None = None) -> int:
        """Compute a prompt and free it. Returns the number of its cached tokens."""
        sequence = self.manager.allocate(prompt, salt=salt)
        keys = export_keys(prompt, block_size=BLOCK, salt=salt)
        with self.cache.step() as step:
            pass
        assert not any(len(end.lost) for end in step.ended + self.cache.drain())
        table = np.asarray(self.manager.block_table(sequence), np.int64)[: len(keys)]
        found = sequence.cached_tokens // BLOCK
        if found:
            wanted = np.stack([row_of(key) for key in keys[:found]])
            assert np.array_equal(self.cache.engine.read("device", table[:found]), wanted), "a hit has other bytes"
        if found < len(keys):
            self.cache.engine.write("device", table[found:], np.stack([row_of(key) for key in keys[found:]]))
        self.manager.mark_computed(sequence)
        self.manager.free(sequence)
        return sequence.cached_tokens

    def check(self) -> None:
        """Compare the bytes of every findable block with the contents that its key determines."""
        self.manager.check()
        events = self.manager.prefix.take_events()
        assert not events.dropped
        for kind, tier, block, key in zip(events.kinds, events.tiers, events.blocks, events.keys, strict=True):
            place = (events.TIERS[tier], int(block))
            if events.KINDS[kind] == "stored":
                self.cached[place] = key.tobytes()
            elif events.KINDS[kind] == "removed":
                del self.cached[place]
            else:
                self.cached = {at: key for at, key in self.cached.items() if at[0] != place[0]}
        for tier in ("device", "host"):
            places = {block: key for (at, block), key in self.cached.items() if at == tier}
            if places:
                rows = self.cache.engine.read(tier, np.array(list(places)))
                wanted = np.stack([row_of(key) for key in places.values()])
                assert np.array_equal(rows, wanted), f"a {tier} block has other bytes than its key says"
        stats = self.cache.stats()
        assert stats.cached_blocks["device"] + stats.cached_blocks["host"] == len(self.cached)

    def close(self) -> None:
        self.cache.close()


@contextmanager
def checked(store: ExternalStore | str, **options: Any) -> Iterator[CheckedCache]:
    """A cache whose state is checked when a test is done with it."""
    cache = CheckedCache(store, **options)
    try:
        yield cache
        cache.check()
    finally:
        cache.close()
