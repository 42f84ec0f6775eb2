"""Random programs over whole caches: every span ends once, and all of them together say what the counters say."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from cache_rig import Config, random_config
from opentelemetry.trace import StatusCode
from random_cache_programs import random_program, run
from spans import Spans, attributes, recorded

from blockyard import KVCache
from blockyard.prefix_store import PrefixStoreStats

LENGTH = 200
PROGRAMS = int(os.environ.get("BLOCKYARD_OPERATIONS") or 4_000) // LENGTH
MOVED = ("swap_in", "swap_out", "copy", "move", "exchange")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """Caches that were closed."""
    caches: list[KVCache] = []
    close = KVCache.close

    def keep(self: KVCache) -> None:
        close(self)
        if self not in caches:
            caches.append(self)

    monkeypatch.setattr(KVCache, "close", keep)
    return caches


def config_of(seed: int, interrupts: float) -> Config:
    """Any caches, half of them with a scheduler, all with a prefix store."""
    random = Random(seed)
    config = random_config(random)
    writes = random.choice(("through", "through", "back", "second_use"))
    scheduler = random.random() < 0.5
    prefix, caches = random.choice(("device", "host")), random.choice((1, 2))
    stored = {"prefix": prefix, "groups": "full", "store": writes, "jobs": "", "caches": caches}
    return replace(config, host=min(config.host, 24), scheduler=scheduler, interrupts=interrupts, **stored)


def missed(spans: Spans) -> Counter[str]:
    """Why blocks did not come: of each prefetch, and of its last read if that says something else."""
    reads = {
        read.parent.span_id: attributes(read).get("miss_reason") for read in spans.named("store_read") if read.parent
    }
    reasons: Counter[str] = Counter()
    for span in spans.named("prefetch"):
        reasons.update({attributes(span).get("miss_reason"), reads.get(span.context.span_id)} - {None})
    return reasons


def check_counters(spans: Spans, caches: list[KVCache]) -> None:
    """Compare what the spans say with what the caches have counted."""
    stats = [cache.prefix_store.stats() if cache.prefix_store else PrefixStoreStats() for cache in caches]
    assert len(spans.named("prefetch")) == sum(each.prefetches for each in stats)
    assert spans.sum("hit_blocks", "prefetch") == sum(each.hit_blocks for each in stats)
    assert spans.sum("hit_bytes", "prefetch") == sum(each.hit_bytes for each in stats)
    assert missed(spans) == sum((each.misses for each in stats), Counter())
    written = sum(each.written_blocks for each in stats)
    assert spans.sum("written_blocks", "store") == written
    cut_off = [attributes(span) for span in spans.named("store") if attributes(span).get("miss_reason") == "closed"]
    unwritten = spans.sum("blocks", "store") - written - sum(span["blocks"] for span in cut_off)
    assert unwritten <= sum(each.unwritten_blocks for each in stats)
    moved: Counter[tuple[str, str]] = Counter()
    for span in spans.named(*MOVED):
        found = attributes(span)
        if span.status.status_code is not StatusCode.ERROR and "external" not in {found["source"], found["target"]}:
            moved[found["source"], found["target"]] += found["blocks"]
    counted: Counter[tuple[str, str]] = Counter()
    for cache in caches:
        counted.update({way: traffic.blocks for way, traffic in cache.engine.counters.items()})
    assert moved == counted


@pytest.mark.parametrize("interrupts", [0.0, 0.4])
@pytest.mark.parametrize("part", range(2))
def test_every_span_ends_once_and_they_agree_with_the_counters(part: int, interrupts: float, closed: list[KVCache]):
    begun: Counter[str] = Counter()
    for seed in range(part, PROGRAMS, 2):
        with recorded() as spans:
            run(random_program(seed, LENGTH, config_of(seed, interrupts)))
        try:
            spans.check()
            if not interrupts:  # else what is counted and what a span says can differ
                check_counters(spans, closed)
        except AssertionError as error:
            raise AssertionError(f"the program of seed {seed}: {error}") from error
        begun.update(span.name for span in spans.ended)
        closed.clear()
    assert all(begun[f"blockyard.{name}"] for name in ("prefetch", "store", "swap_out", "transfer", "store_read"))
