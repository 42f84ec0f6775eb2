"""A prefix store under a cache: how long calls on the engine's thread take, and how fast prefixes load.

    python benches/bench_prefix_store.py [--calls 20000] [--device cpu]

Wall and CPU times of `prefetch` and `poll` in microseconds (other work on the machine disturbs CPU time least),
over a store that responds and over one whose every call hangs. Then the time of a hit: from `prefetch` of
a prompt whose 4 small blocks are in a file store until they are on the device, polled without a pause, the median of
500; and the threads of the process meanwhile. Last, a prompt of 64 blocks of 256 KiB is written to a file store and
loaded by another cache, best of five. With BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from figures import keep
from numpy.typing import NDArray

from blockyard import KVCache, KVLayout
from blockyard.stores import ThreadedStore

BLOCK = 16
SMALL = KVLayout("kv_first", num_layers=2, block_size=BLOCK, num_kv_heads=1, head_size=16, dtype="float16")
LARGE = KVLayout("kv_first", num_layers=16, block_size=BLOCK, num_kv_heads=4, head_size=64, dtype="float16")


class HangingStore(ThreadedStore):
    """Every call waits until the program ends."""

    num_slots = 1000
    ends = threading.Event()

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:  # noqa: ARG002 (hangs)
        """Wait."""
        self.ends.wait()
        return np.zeros(len(keys), np.bool_)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Wait."""
        return self.put(keys, out)

    def delete(self, keys: NDArray[np.uint8]) -> None:
        """Wait."""
        self.put(keys, keys)


def open_cache(store: Any, layout: KVLayout, **options: Any) -> KVCache:
    return KVCache(
        layout,
        device_blocks=256,
        host_blocks=256,
        prefix_caching=True,
        prefix_store=store,
        namespace=b"bench",
        **options,
    )


def compute(cache: KVCache, prompt: list[int]) -> int:
    sequence = cache.manager.allocate(prompt)
    with cache.step():
        pass
    cache.manager.mark_computed(sequence)
    cache.manager.free(sequence)
    return sequence.cached_tokens


def call_times(store: Any, calls: int, device: str) -> NDArray[np.float64]:
    """Return the microseconds of each call, wall and CPU time, with prompts served in between; `[calls, 2]`."""
    times = []

    def timed(call: Callable[..., object], *arguments: object) -> None:
        began, worked = time.perf_counter(), time.thread_time()
        call(*arguments)
        cpu = time.thread_time() - worked
        times.append((time.perf_counter() - began, cpu))

    with open_cache(store, SMALL, device=device, prefetch_timeout_base=0.05) as cache:
        prefixes = cache.prefix_store
        assert prefixes is not None
        for number in range(calls // 4):
            prompt = [number * 1000 + at for at in range(65)]
            timed(prefixes.prefetch, prompt)
            compute(cache, prompt)
            for _ in range(3):
                timed(prefixes.poll)
        HangingStore.ends.set()
    return np.array(times) * 1e6


def hit_time(folder: str, device: str, hits: int = 500) -> tuple[float, int]:
    """Return the microseconds of a hit, and this process's number of threads meanwhile."""
    url, times, threads = f"file://{folder}/hits?size=64MiB", [], 0
    prompts = [[number * 1000 + at for at in range(4 * BLOCK + 1)] for number in range(hits)]
    with open_cache(url, SMALL, device=device) as cache:
        for prompt in prompts:
            compute(cache, prompt)
        assert cache.prefix_store is not None
        cache.prefix_store.wait()
    with open_cache(url, SMALL, device=device, prefetch_timeout_base=60) as cache:
        assert cache.prefix_store is not None
        for prompt in prompts:
            began = time.perf_counter()
            fetch = cache.prefix_store.prefetch(prompt)
            while not fetch.done:
                pass
            times.append(time.perf_counter() - began)
            assert fetch.tokens == 4 * BLOCK
            compute(cache, prompt)
            threads = max(threads, len(list(Path("/proc/self/task").iterdir())))
    return float(np.median(times)) * 1e6, threads


def load_rates(folder: str, device: str) -> tuple[float, float]:
    """Return MiB/s of writing a prefix, and of loading it in the next cache."""
    prompt = list(range(64 * BLOCK + 1))
    written, loaded = [], []
    for turn in range(5):
        url = f"file://{folder}/{turn}?size=64MiB"
        for times in (written, loaded):
            with open_cache(url, LARGE, device=device, prefetch_timeout_base=60) as cache:
                prefixes = cache.prefix_store
                assert prefixes is not None
                began = time.perf_counter()
                fetch = prefixes.prefetch(prompt)
                prefixes.wait(until=lambda fetch=fetch: fetch.done)  # type: ignore[misc]
                if times is loaded:
                    times.append(time.perf_counter() - began)
                    assert fetch.tokens == 64 * BLOCK
                compute(cache, prompt)
                if times is written:
                    began = time.perf_counter()
                    prefixes.wait()
                    times.append(time.perf_counter() - began)
    size = 64 * LARGE.bytes_per_block / (1 << 20)
    return size / min(written), size / min(loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="calls over each store")
    parser.add_argument("--device", default="cpu", help="where the caches are: cpu or cuda")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        stores = {
            "answering": f"file://{folder}/answering?size=64MiB",
            "hung": HangingStore("", bytes_per_block=SMALL.bytes_per_block, namespace=bytes(32)),
        }
        for name, store in stores.items():
            found = np.percentile(call_times(store, options.calls, options.device), [50, 99.9, 100], axis=0)
            for what, (half, most, worst) in zip(("call", "call_cpu"), found.T, strict=True):
                print(f"{name} store, {what}: {half:.1f} us, p99.9 {most:.0f} us, worst {worst:.0f} us")
                figures[f"prefix_store_{name}_{what}_p999_us"] = float(most)
        hit, threads = hit_time(folder, options.device)
        written, loaded = load_rates(folder, options.device)
    print(f"a hit of 4 blocks of {SMALL.bytes_per_block >> 10} KiB takes {hit:.0f} us; {threads} threads")
    print(f"64 blocks of {LARGE.bytes_per_block >> 10} KiB: {written:.0f} MiB/s written, {loaded:.0f} MiB/s loaded")
    figures |= {"prefix_store_hit_us": hit, "prefix_store_threads": threads}
    keep(figures | {"prefix_store_write_mibs": written, "prefix_store_load_mibs": loaded})


if __name__ == "__main__":
    main()
