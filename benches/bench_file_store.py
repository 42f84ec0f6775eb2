"""File store: GB/s of writing and reading 1 MiB blocks at random slots, of swapping them in, and CPU seconds a GB.

    python benches/bench_file_store.py [--url "file:///dir?threads=8"] [--blocks 512]

With BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE. In both directions the bytes are copied
once between numpy and the store's buffers; checksums are computed and verified. `file_swap_in_gb_s` is the rate from
the file to a cache engine's tensors on the CPU, by `StepExecutor`. A prefix store puts and gets the same blocks by key,
and is opened from the headers of its slots and from its checkpoint. `file_single_get_*`: eight threads get one block of
64 KiB after the other; MiB/s, CPU seconds per GB, and thread waits per get. `bench_file_fio.py` compares the store with
fio.
"""

import argparse
import hashlib
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from bench_file_fio import aligned
from figures import keep

from blockyard import Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.executor.executor import StepExecutor
from blockyard.layout.kv import KVLayout
from blockyard.stores import ExternalStore, open_store

BYTES_PER_BLOCK = 1 << 20
BATCH = 32
AHEAD = 4
THREADS = 4
OPEN_SLOTS = 4096
SINGLE_BYTES, CALLERS = 64 << 10, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of the store; a temporary directory if not given")
    parser.add_argument("--blocks", type=int, default=512, help="slots of 1 MiB")
    parser.add_argument("--open-slots", type=int, default=OPEN_SLOTS, help="slots of the store that is opened")
    parser.add_argument("--repeat", type=int, default=3, help="passes; the best counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.url or f"file://{folder}/swap"
        with open_store(url, bytes_per_block=BYTES_PER_BLOCK, num_slots=arguments.blocks) as store:
            figures = measure(store, arguments.blocks, arguments.repeat)
            figures |= swap_in(store, arguments.blocks, arguments.repeat)
            print(store)
        figures |= by_key(folder, arguments.blocks, arguments.repeat)
        figures |= single_gets(folder, arguments.blocks, arguments.repeat)
        figures |= opening(folder, arguments.open_slots)
    for name, value in figures.items():
        print(f"{name:32} {value:8.3f}")
    keep(figures)


def measure(store: ExternalStore, blocks: int, repeat: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (BATCH, BYTES_PER_BLOCK), dtype=np.uint8)
    best: dict[str, float] = {}
    for _ in range(repeat):
        batches = np.array_split(random.permutation(blocks), max(1, blocks // BATCH))
        for name, write in (("write", True), ("read", False)):
            wall, cpu = time.perf_counter(), time.process_time()
            run(store, batches, rows, write=write)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            gigabytes = blocks * BYTES_PER_BLOCK / 1e9
            if gigabytes / wall > best.get(f"file_{name}_gb_s", 0.0):
                best[f"file_{name}_gb_s"] = gigabytes / wall
                best[f"file_{name}_cpu_s_per_gb"] = cpu / gigabytes
    return best


def swap_in(store: ExternalStore, blocks: int, repeat: int) -> dict[str, float]:
    """Swap all blocks in to a cache engine, one batch per step, with a few steps in flight."""
    layout = KVLayout("kv_first", num_layers=8, block_size=16, num_kv_heads=8, head_size=128, dtype="float32")
    random = np.random.default_rng(0)
    best: dict[str, float] = {}
    with CacheEngine(layout, device_blocks=blocks, host_blocks=0) as engine:
        executor = StepExecutor(engine, store)
        for _ in range(repeat + 1):  # the first one warms up
            pairs = np.column_stack((random.permutation(blocks), random.permutation(blocks)))
            order = np.array_split(pairs, max(1, blocks // BATCH))
            wall, cpu = time.perf_counter(), time.process_time()
            for ticket, ids in enumerate(order):
                executor.submit(StepDecision(ticket, [("swap_in", Pairs("external", "device", ids))]))
                if ticket >= AHEAD:
                    assert not executor.wait(ticket - AHEAD).lost
            for ticket in range(max(0, len(order) - AHEAD), len(order)):
                assert not executor.wait(ticket).lost
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            gigabytes = blocks * BYTES_PER_BLOCK / 1e9
            if gigabytes / wall > best.get("file_swap_in_gb_s", 0.0):
                best = {"file_swap_in_gb_s": gigabytes / wall, "file_swap_in_cpu_s_per_gb": cpu / gigabytes}
    return best


def by_key(folder: str, blocks: int, repeat: int) -> dict[str, float]:
    """Put blocks under new keys, which evicts those of the previous pass, and get them in another order."""
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (BATCH, BYTES_PER_BLOCK), dtype=np.uint8)
    best: dict[str, float] = {}
    with open_store(f"file://{folder}/keys", bytes_per_block=BYTES_PER_BLOCK, num_slots=blocks, use="prefix") as store:
        for number in range(repeat):
            keys = random.integers(0, 256, (blocks, 32), dtype=np.uint8)
            for name, order in (("put", keys), ("get", random.permutation(keys))):
                wall, tickets = time.perf_counter(), []
                for batch in np.array_split(order, max(1, blocks // BATCH)):
                    if len(tickets) == AHEAD:
                        collect(store, tickets.pop(0))
                    puts = name == "put"
                    tickets.append(store.submit_put(batch, rows[: len(batch)]) if puts else store.submit_get(batch))
                for ticket in tickets:
                    collect(store, ticket)
                rate = blocks * BYTES_PER_BLOCK / 1e9 / (time.perf_counter() - wall)
                best[f"file_{name}_gb_s"] = max(rate, best.get(f"file_{name}_gb_s", 0.0))
            wall = time.perf_counter()
            store.contains(keys)
            best["file_contains_us"] = (time.perf_counter() - wall) / blocks * 1e6
            assert number + 1 < repeat or store.stats().cached_blocks == blocks
    return best


def single_gets(folder: str, blocks: int, repeat: int) -> dict[str, float]:
    """Get blocks one by one from several threads, into lent rows; return the medians of the passes."""
    random, passes = np.random.default_rng(0), []
    keys = random.integers(0, 256, (blocks * CALLERS, 32), dtype=np.uint8)
    rows = aligned(BATCH, SINGLE_BYTES)
    url = f"file://{folder}/single?threads={THREADS}"

    def get(number: int) -> None:
        for key in random.permutation(keys[number::CALLERS]):
            collect(store, store.submit_get(key[None], rows[number : number + 1]))

    with (
        open_store(url, bytes_per_block=SINGLE_BYTES, num_slots=len(keys), use="prefix") as store,
        ThreadPoolExecutor(CALLERS) as pool,
    ):
        for part in np.array_split(keys, len(keys) // BATCH):
            collect(store, store.submit_put(part, rows[: len(part)]))
        for _ in range(repeat):
            wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            list(pool.map(get, range(CALLERS)))
            wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            size, switches = len(keys) * SINGLE_BYTES, after.ru_nvcsw - before.ru_nvcsw
            passes.append((size / (1 << 20) / wall, cpu / (size / 1e9), switches / len(keys)))
    names = ("mib_s", "cpu_s_per_gb", "waits")
    return {f"file_single_get_{name}": float(value) for name, value in zip(names, np.median(passes, 0), strict=True)}


def opening(folder: str, slots: int) -> dict[str, float]:
    """Return the microseconds per slot for opening a full prefix store with one-page blocks."""
    width, figures = 4096, {}
    url = f"file://{folder}/open?threads={THREADS}"
    with open_store(url, bytes_per_block=width, num_slots=slots, use="prefix") as store:
        for first in range(0, slots, 4096):
            keys = [hashlib.sha256(n.to_bytes(8, "little")).digest() for n in range(first, min(slots, first + 4096))]
            collect(store, store.submit_put(keys, np.ones((len(keys), width), np.uint8)))
    for name in ("checkpoint", "headers"):
        if name == "headers":
            (Path(folder) / "open" / "blockyard-prefix.checkpoint").unlink()
        wall = time.perf_counter()
        with open_store(url, bytes_per_block=width, num_slots=slots, use="prefix") as store:
            figures[f"file_open_{name}_us_per_slot"] = (time.perf_counter() - wall) / slots * 1e6
            assert store.stats().cached_blocks == slots
    return figures


def run(store: ExternalStore, batches: list[np.ndarray], rows: np.ndarray, *, write: bool) -> None:
    """Keep a few batches in flight, as an engine does."""
    tickets: list[int] = []
    for slots in batches:
        if len(tickets) == AHEAD:
            collect(store, tickets.pop(0))
        tickets.append(store.submit_write(slots, rows[: len(slots)]) if write else store.submit_read(slots))
    for ticket in tickets:
        collect(store, ticket)


def collect(store: ExternalStore, ticket: int) -> None:
    done = store.wait(ticket)
    if not done.ok.all():
        raise SystemExit(f"{store.stats()}")


if __name__ == "__main__":
    main()
