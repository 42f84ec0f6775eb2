"""File store against fio: both write and read blocks at random places of a file, with O_DIRECT and four threads.

    python benches/bench_file_fio.py [--rounds 7] [--sizes 64k,256k,2m]

The disk and the CPU may be shared, so the two take turns in windows of 256 MiB, and each figure is the median
over the rounds of one pair of windows. The store's rows are page-aligned and lent, so nothing is copied;
each block has a checksum that is verified when it is read.

- `file_write_256k_fio_ratio`: rate over fio's; swap space. `file_put_256k_fio_ratio` is that of a prefix store, whose
  gets come in the order of the puts, as those of a prompt do: blocks of neighbouring slots are one call.
- `file_get_shuffled_256k_fio_ratio`: gets in another order, so each block is a call, as by slot.
- `file_write_256k_cpu_over_fio`: CPU seconds per GB, minus fio's. `file_write_256k_cpu_s_per_gb` is the store's total.

With BENCH_JSON=FILE the figures go to the flat JSON object in FILE. Without fio it says so and does nothing.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time

import numpy as np
from figures import keep
from numpy.typing import NDArray

from blockyard.stores import ExternalStore, open_store

SIZES = {"64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20, "2m": 2 << 20, "4m": 4 << 20}
BYTES = 256 << 20
THREADS = 4
BATCH_BYTES = 8 << 20
AHEAD = 4
PAGE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of windows for each figure")
    parser.add_argument("--sizes", default="64k,256k,2m", help=f"of blocks, from {', '.join(SIZES)}")
    parser.add_argument("--folder", help="on the disk to measure; a temporary one if not given")
    arguments = parser.parse_args()
    if not shutil.which("fio"):
        print("fio is not installed: nothing to compare with")
        return
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name in arguments.sizes.split(","):
            for use, calls in (
                ("swap", ("write", "read")),
                ("prefix", ("put", "get")),
                ("prefix", ("put_shuffled", "get_shuffled")),
            ):
                figures |= compare(folder, name, use, calls, arguments.rounds)
    for name, value in figures.items():
        print(f"{name:32} {value:8.3f}")
    keep(figures)


def compare(folder: str, name: str, use: str, calls: tuple[str, str], rounds: int) -> dict[str, float]:
    """Return the medians over the rounds for one block size."""
    size = SIZES[name]
    blocks = BYTES // size
    ratios: dict[str, list[float]] = {}
    url = f"file://{folder}/{calls[0]}-{name}?threads={THREADS}"
    with open_store(url, bytes_per_block=size, num_slots=blocks, use=use) as store:  # type: ignore[arg-type]
        for number in range(rounds + 1):
            for call, what in zip(calls, ("write", "read"), strict=True):
                # Who goes first alternates.
                if number % 2:
                    theirs, ours = fio(f"{folder}/fio.dat", what, size), window(store, call, number)
                else:
                    ours, theirs = window(store, call, number), fio(f"{folder}/fio.dat", what, size)
                if number:  # the first pair warms up
                    for key, value in (
                        ("fio_ratio", ours[0] / theirs[0]),
                        ("cpu_over_fio", ours[1] - theirs[1]),
                        ("cpu_s_per_gb", ours[1]),
                        ("gb_s", ours[0]),
                    ):
                        ratios.setdefault(f"file_{call}_{name}_{key}", []).append(value)
    return {key: statistics.median(values) for key, values in ratios.items()}


def window(store: ExternalStore, call: str, seed: int) -> tuple[float, float]:
    """Return GB/s and CPU seconds per GB of one pass over all blocks in random order, with a few batches in flight."""
    blocks, random = store.num_slots, np.random.default_rng(seed)
    count = max(1, BATCH_BYTES // store.bytes_per_block)
    keys = random.integers(0, 256, (blocks, 32), dtype=np.uint8)
    order: NDArray[np.generic] = random.permutation(blocks) if call in {"write", "read"} else random.permutation(keys)
    if call == "get_shuffled":
        order = random.permutation(order)
    rows = [aligned(count, store.bytes_per_block) for _ in range(AHEAD)]
    submit = getattr(store, f"submit_{call.partition('_')[0]}")
    tickets: list[int] = []
    wall, cpu = time.perf_counter(), time.process_time()
    for number, batch in enumerate(np.array_split(order, max(1, blocks // count))):
        lent = rows[number % AHEAD]
        if len(tickets) == AHEAD:
            collect(store, tickets.pop(0))
        tickets.append(submit(batch, lent[: len(batch)]))
    for ticket in tickets:
        collect(store, ticket)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return BYTES / 1e9 / wall, cpu / (BYTES / 1e9)


def collect(store: ExternalStore, ticket: int) -> None:
    done = store.wait(ticket)
    if not done.ok.all():
        raise SystemExit(f"{store.stats()}")


def aligned(count: int, width: int) -> NDArray[np.uint8]:
    """Return page-aligned rows of bytes that no file system can compress."""
    whole = np.empty(count * width + PAGE, dtype=np.uint8)
    rows = whole[-whole.ctypes.data % PAGE :][: count * width].reshape(count, width)
    rows[:] = np.random.default_rng(0).integers(0, 256, (1, width), dtype=np.uint8)
    return rows


def fio(path: str, what: str, size: int) -> tuple[float, float]:
    """Return GB/s and CPU seconds per GB of fio, which moves the same bytes at random places with as many threads."""
    command = [
        *("fio", "--name=x", f"--filename={path}", f"--rw=rand{what}", f"--bs={size}", f"--size={BYTES}"),
        *("--direct=1", "--ioengine=psync", "--thread", f"--numjobs={THREADS}", f"--io_size={BYTES // THREADS}"),
        *("--group_reporting", "--norandommap", "--fallocate=posix", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    # The threads only: starting fio takes as long as moving the bytes.
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return job[what]["bw_bytes"] / 1e9, cpu / (BYTES / 1e9)


if __name__ == "__main__":
    main()
