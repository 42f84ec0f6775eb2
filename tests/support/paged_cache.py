"""Caches of models whose groups have blocks of their own bytes, with a prefix store and random bytes in each block."""

from __future__ import annotations

import numpy as np
import torch

from blockyard import CacheGroup, KVCache
from blockyard.layout import ArenaLayout, LayerField
from blockyard.stores import ExternalStore

SIZE = 4
PROMPT = list(range(58))
FULL, WINDOW, STATE = CacheGroup.full_attention(), CacheGroup.sliding_window(10), CacheGroup.recurrent()
WIDTHS = {"full_attention": 64, "sliding_window": 12, "recurrent": 1200, "drafter": 8, "windowed_drafter": 8}  # bytes
WIDTHS |= {"chunked_attention": 40}
MODELS = {
    "window": [FULL, WINDOW],
    "state": [FULL, STATE],
    "window first": [WINDOW, FULL, STATE],
    "states alone": [WINDOW, STATE],
    "states of two groups": [FULL, STATE, STATE],
    "drafter": [FULL, STATE, CacheGroup.drafter()],
    "uneven": [FULL.with_blocks(tokens=2), WINDOW.with_blocks(tokens=1), STATE],
    "windowed drafter": [FULL, CacheGroup.windowed_drafter(10)],
    "uneven drafter": [FULL, STATE, CacheGroup.drafter().with_blocks(tokens=1)],
    "compressors": [
        FULL,
        WINDOW,
        CacheGroup.sliding_window(4).with_blocks(tokens=2),
        CacheGroup.chunked_attention(16).with_blocks(tokens=1),
    ],
}


def layout_of(groups: list[CacheGroup]) -> ArenaLayout:
    ratio = 2 if any(group.kind == "chunked_attention" for group in groups) else 1  # tokens of an entry
    fields = [
        LayerField(
            layer=0,
            name="entry",
            shape=(WIDTHS[group.kind],),
            dtype="uint8",
            is_state=group.kind == "recurrent",
            ratio=ratio if group == FULL else 1,
        )
        for group in groups
    ]
    return ArenaLayout(tuple((group, (field,)) for group, field in zip(groups, fields, strict=True)), SIZE)


def new_cache(store: str | ExternalStore, model: str = "state", **options: object) -> KVCache:
    given = {"device_bytes": 200_000, "host_bytes": 200_000, "prefix_caching": True, "namespace": b"m"}
    cache = KVCache(layout_of(MODELS[model]), prefix_store=store, **(given | {"prefetch_timeout_base": 60.0} | options))
    for tensor in cache.engine.tensors:  # what a model would have computed
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    return cache


Blocks = dict[tuple[int, int], bytes]


def blocks_of(cache: KVCache, sequence: int) -> Blocks:
    """Return the bytes of a sequence's blocks, by group and place."""
    layout, found = cache.layout, {}
    assert isinstance(layout, ArenaLayout)
    for group in range(len(layout.groups)):
        table = cache.manager.block_table(sequence, group)
        for place in np.flatnonzero(table).tolist():
            rows = cache.engine.read("device", [int(table[place])], page_class=layout.page_class(group))
            found[group, place] = rows.tobytes()
    return found


def serve(cache: KVCache, prompt: list[int], salt: bytes | None = None) -> tuple[int, Blocks, Blocks]:
    """Compute a prompt. Return its cached tokens, the blocks that it began with, and all that it had."""
    manager, prefixes = cache.manager, cache.prefix_store
    assert prefixes is not None
    fetch = prefixes.prefetch(prompt, salt=salt)
    assert prefixes.wait(60, until=lambda: fetch.done)
    sequence = manager.allocate(fetch.prompt, chunk_tokens=8)
    with cache.step():
        pass
    cache.drain()
    layout, cached = cache.layout, sequence.cached_tokens
    assert isinstance(layout, ArenaLayout)
    all_blocks = blocks_of(cache, sequence)
    began = {place: row for place, row in all_blocks.items() if place[1] < -(-cached // layout.tokens(place[0]))}
    manager.mark_computed(sequence)
    while chunk := manager.next_chunk(sequence, 8):
        manager.append([sequence], chunk)
        with cache.step():
            pass
        all_blocks |= blocks_of(cache, sequence)
        manager.mark_computed(sequence)
    manager.free(sequence)
    assert prefixes.wait(60)
    manager.check()
    return sequence.cached_tokens, began, all_blocks
