"""How long loads take beside writes to a store that is slow to write, with writes that take turns and without.

    python benches/bench_slow_writes.py [--seconds 20]

Each put of the store takes 1.5 s and each read .02 s, by its own threads. One prompt of 8 blocks is computed and
written after another, and every third one loads a stored prompt. `slow_writes_load_s` is the median
time of such a load, `slow_writes_load_max_s` the longest; `..._unpaced_...` the same if writes never take turns.
With BENCH_JSON=FILE the figures are added to FILE.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from figures import keep

from blockyard import KVCache, KVLayout
from blockyard.prefix_store import pressure, writes

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from memory_stores import KeyedStore

LAYOUT = KVLayout("kv_first", num_layers=8, block_size=16, num_kv_heads=8, head_size=64, dtype="float32")
PUT_SECONDS, GET_SECONDS = 1.5, 0.02
TOKENS, STORED, BLOCKS_AT_ONCE = 129, 12, 2


class SlowDisk(KeyedStore):
    """Blocks in a dictionary, slow to write."""

    num_slots = 100_000

    def __init__(self, medium: dict[bytes, Any], *, is_slow: bool) -> None:
        super().__init__(medium, bytes_per_block=LAYOUT.bytes_per_block)
        seconds = {"put": PUT_SECONDS, "get": GET_SECONDS} if is_slow else {}
        self.before = lambda name: time.sleep(seconds.get(name, 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long prompts are computed")
    seconds = parser.parse_args().seconds
    writes.WRITTEN_AT_ONCE = BLOCKS_AT_ONCE * LAYOUT.bytes_per_block
    figures: dict[str, float] = {}
    for name in ("", "_unpaced"):
        if name:
            pressure.HIGH_SECONDS = writes.HIGH_SECONDS = float("inf")
        took = loads(seconds)
        figures |= {f"slow_writes{name}_load_s": statistics.median(took), f"slow_writes{name}_load_max_s": max(took)}
    for name, value in figures.items():
        print(f"{name:32} {value:8.3f}")
    keep(figures)


def loads(seconds: float) -> list[float]:
    """Return how long each load took."""
    medium: dict[bytes, Any] = {}
    stored = [prompt(number) for number in range(STORED)]
    with opened(SlowDisk(medium, is_slow=False)) as cache:
        for tokens in stored:
            compute(cache, tokens)
        assert cache.prefix_store is not None
        assert cache.prefix_store.wait(60.0)
    took: list[float] = []
    with opened(SlowDisk(medium, is_slow=True)) as cache:
        assert cache.prefix_store is not None
        until, number = time.monotonic() + seconds, 0
        while time.monotonic() < until and stored:
            number += 1
            compute(cache, prompt(STORED + number))
            began = time.monotonic()
            fetch = cache.prefix_store.prefetch(stored.pop()) if number % 3 == 0 else None
            while not fetch.done if fetch else time.monotonic() < began + 0.2:
                cache.prefix_store.poll()
                time.sleep(0.001)
            if fetch:
                assert fetch.tokens == TOKENS - 1, "the stored prompt was not loaded"
                took.append(time.monotonic() - began)
        cache.prefix_store.close(0.1)
    return took


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + TOKENS))


def compute(cache: KVCache, tokens: list[int]) -> None:
    sequence = cache.manager.allocate(tokens)
    with cache.step():
        cache.manager.mark_computed([sequence])
    cache.manager.free(sequence)


def opened(store: SlowDisk) -> KVCache:
    options: Any = {"prefix_caching": True, "namespace": b"model", "prefetch_timeout_base": 60.0}
    return KVCache(LAYOUT, device_blocks=400, prefix_store=store, **options)


if __name__ == "__main__":
    main()
