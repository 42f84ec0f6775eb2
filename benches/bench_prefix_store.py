"""A prefix store under a cache: how long calls on the engine's thread take, and how fast prefixes load.

    python benches/bench_prefix_store.py [--calls 20000] [--device cpu]

Wall and CPU times of `prefetch` and `poll` in microseconds (other work on the machine disturbs CPU time least),
over a store that responds and over one whose every call hangs. Then the time of a hit: from `prefetch` of
a prompt whose 4 small blocks are in a file store until they are on the device, polled without a pause, the median of
500; and the threads of the process meanwhile. A prompt of 64 blocks of 256 KiB is written to a file store and loaded by
another cache, best of five.

Last, prompts of a model with 128 KiB per token are loaded from a file to the host and to the device, in turns with
reads of the same blocks from the bare store into warm rows: the medians, and the median of the ratios of the turns.
Each block must be read once. The benchmark fails below 0.85 of the bare store's rate from 256 MiB on, or 0.70 for less.
Objects follow, as SGLang's and LMCache's adapters load them into host memory. `--only load` measures nothing else. With
BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_file_fio import aligned
from figures import keep
from numpy.typing import NDArray

from blockyard import KVCache, KVLayout
from blockyard.stores import ExternalStore, ThreadedStore, open_store
from blockyard.stores.adapters.objects import PrefixObjects

BLOCK = 16
SMALL = KVLayout("kv_first", num_layers=2, block_size=BLOCK, num_kv_heads=1, head_size=16, dtype="float16")
LARGE = KVLayout("kv_first", num_layers=16, block_size=BLOCK, num_kv_heads=4, head_size=64, dtype="float16")
WIDE = KVLayout("kv_first", num_layers=32, block_size=BLOCK, num_kv_heads=8, head_size=128, dtype="float16")
SIZES_MIB = (16, 64, 256, 512)
OBJECTS = ((60, 512 << 10), (128, 2 << 20))
"""How many pages of how many bytes adapters load at once."""
Timed = Callable[[], float]


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


class FromFile:
    """A cache whose prompt is in a file store, from where it is loaded again and again.

    Args:
        folder: of the store.
        tier: `"host"` or `"device"`, where the loaded blocks go.
        device: where the cache is.
    """

    def __init__(self, folder: str, tier: str, device: str) -> None:
        self.most = max(SIZES_MIB) * (1 << 20) // WIDE.bytes_per_block
        self.tier, self.tokens = tier, np.arange(self.most * BLOCK + 1, dtype=np.uint32)
        url = f"file://{folder}?size={max(SIZES_MIB) + 64}MiB"
        self.store: ExternalStore = open_store(url, bytes_per_block=WIDE.bytes_per_block, use="prefix")
        self.cache = KVCache(
            WIDE,
            device_blocks=2 * self.most,
            host_blocks=3 * self.most if tier == "host" else 0,
            prefix_caching=True,
            prefix_store=self.store,
            namespace=b"bench",
            prefetch_timeout_base=60,
            device=device,
        )
        assert self.cache.prefix_store is not None
        self.prefixes = self.cache.prefix_store
        prompt = self.cache.manager.prefix.hash(self.tokens)
        self.keys, *_ = self.cache.manager.prefix.store_jobs.missing(prompt, self.most)
        assert len(self.keys) == self.most
        self.rows = aligned(self.most, WIDE.bytes_per_block)
        self.blocks = np.random.default_rng(0).integers(0, 256, (self.most, WIDE.bytes_per_block), dtype=np.uint8)
        sequence = self.cache.manager.allocate(self.tokens)
        self.cache.engine.write("device", self.table(sequence), self.blocks)
        with self.cache.step():
            self.cache.manager.mark_computed(sequence)
        self.cache.manager.free(sequence)
        self.prefixes.wait()

    def table(self, sequence: Any) -> NDArray[np.int64]:
        """Return the sequence's blocks of the prompt."""
        return np.array(self.cache.manager.block_table(sequence)[: self.most], np.int64)

    def bare(self, count: int) -> float:
        """Return the seconds in which the bare store reads blocks into warm rows."""
        began = time.perf_counter()
        done = self.store.wait(self.store.submit_get(self.keys[:count], self.rows[:count]))
        seconds = time.perf_counter() - began
        assert done.ok.all()
        return seconds

    def load(self, count: int, *, checked: bool) -> float:
        """Return the seconds in which a prompt of blocks is loaded. Each block is read once."""
        manager = self.cache.manager
        assert manager.prefix.reset()
        tokens, before = self.tokens[: count * BLOCK + 1], self.store.stats().read_blocks
        began = time.perf_counter()
        fetch = self.prefixes.prefetch(tokens)
        self.prefixes.wait(until=lambda: fetch.done)
        seconds = time.perf_counter() - began
        assert fetch.tokens == count * BLOCK
        assert self.store.stats().read_blocks - before == count
        assert manager.stats().cached_blocks[self.tier] == count
        if checked:
            sequence = manager.allocate(tokens)
            with self.cache.step():
                assert sequence.cached_tokens == count * BLOCK
            assert (self.cache.engine.read("device", self.table(sequence)[:count]) == self.blocks[:count]).all()
            manager.free(sequence)
        return seconds


class Objects:
    """Objects of one length in a file store, as the adapters of SGLang and LMCache keep pages, and a bare store."""

    def __init__(self, folder: str, count: int, size: int) -> None:
        self.names, self.sizes = [f"page {number}" for number in range(count)], [size] * count
        self.data = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
        self.host = np.ones_like(self.data)
        room = 2 * count * size + (8 << 20)
        self.objects = PrefixObjects(f"file://{folder}-objects?size={room}", sizes=[size], fields={})
        assert all(self.objects.put(self.names, self.sizes, self.data.__getitem__))
        self.keys = np.random.default_rng(0).integers(0, 256, (count, 32), dtype=np.uint8)
        self.rows = aligned(count, size)
        self.store = open_store(f"file://{folder}-bare?size={room}", bytes_per_block=size, use="prefix")
        assert self.store.wait(self.store.submit_put(self.keys, self.rows)).ok.all()

    def bare(self) -> float:
        """Return the seconds in which the bare store reads as many bytes into warm rows."""
        began = time.perf_counter()
        assert self.store.wait(self.store.submit_get(self.keys, self.rows)).ok.all()
        return time.perf_counter() - began

    def load(self, *, checked: bool) -> float:
        """Return the seconds in which all objects are loaded."""

        def take(index: int, data: NDArray[np.uint8]) -> None:
            self.host[index] = data

        began = time.perf_counter()
        assert all(self.objects.get(self.names, self.sizes, take))
        seconds = time.perf_counter() - began
        assert not checked or (self.host == self.data).all()
        return seconds


def in_turns(label: str, num_bytes: int, rounds: int, bare: Timed, load: Timed) -> tuple[float, float]:
    """Call both in turns, and print a line of the table. Returns the GB/s of the loads, and their share of the bare."""
    times = np.array([(bare(), load()) if turn % 2 else (load(), bare())[::-1] for turn in range(rounds + 1)])
    first, second = np.median(times[1:], 0)  # the first turn warms up
    share = float(np.median(times[1:, 0] / times[1:, 1]))
    print(
        f"{label:32}{1e3 * first:10.1f}{num_bytes / 1e9 / first:8.2f}"
        f"{1e3 * second:12.1f}{num_bytes / 1e9 / second:8.2f}{share:9.2f}",
        flush=True,
    )
    return num_bytes / 1e9 / second, share


def from_file(folder: str, device: str, rounds: int) -> dict[str, float]:
    """Print how fast prompts and objects are loaded from a file, in turns with the bare store."""
    figures = {}
    print(f"{'':32}{'bare: ms':>10}{'GB/s':>8}{'loaded: ms':>12}{'GB/s':>8}{'of bare':>9}")
    for tier in ("host", "device"):
        place = FromFile(f"{folder}/{tier}", tier, device)
        with place.cache:
            for mib in SIZES_MIB:
                count = mib * (1 << 20) // WIDE.bytes_per_block
                bare, load = partial(place.bare, count), partial(place.load, count, checked=False)
                rate, share = in_turns(f"{mib} MiB, file to {tier}", mib << 20, rounds, bare, load)
                place.load(count, checked=True)
                least = 0.85 if mib >= 256 else 0.7
                assert share >= least, f"{mib} MiB to {tier}: {share:.2f} of the bare store's rate, goal {least}"
                figures |= {f"prefix_store_{tier}_{mib}mib_gb_s": rate, f"prefix_store_{tier}_{mib}mib_of_bare": share}
    for count, size in OBJECTS:
        pages = Objects(f"{folder}/{size}", count, size)
        label = f"{count} objects of {size >> 10} KiB"
        rate, share = in_turns(label, count * size, rounds, pages.bare, partial(pages.load, checked=False))
        pages.load(checked=True)
        pages.objects.close()
        pages.store.close()
        figures |= {f"objects_{size >> 10}k_gb_s": rate, f"objects_{size >> 10}k_of_bare": share}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="calls over each store")
    parser.add_argument("--device", default="cpu", help="where the caches are: cpu or cuda")
    parser.add_argument("--rounds", type=int, default=9, help="turns of loads and bare reads")
    parser.add_argument("--only", choices=("load",), help="measure nothing but loads beside bare reads")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        keep(from_file(folder, options.device, options.rounds))
        if options.only:
            return
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
