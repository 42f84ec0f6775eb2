"""Servers that hang: how late a load becomes a miss, and how long calls on the engine's thread take meanwhile.

    python benches/bench_hung.py [--calls 5000]

It stops a Valkey server and a SeaweedFS server (SIGSTOP) under a prefix store with a deadline of half a second.
`redis_hung_late_ms` is how much later than its deadline the first load is a miss, `redis_hung_second_ms` how long the
next one takes, `redis_hung_call_p999_ms` the 99.9th percentile of `submit_get`, `submit_put`, `contains`, `poll` and
`wait` while the server hangs, `redis_hung_call_own_p999_ms` that of the calls during which the kernel gave the core to
no other thread, `redis_hung_call_cpu_p999_ms` that of their CPU time, which other work on the machine disturbs least;
`redis_hung_back_s` is the time from the server's return until a load hits, with the same store. `s3_hung_*` likewise.
With BENCH_JSON=FILE the figures are added to FILE.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from figures import keep

from blockyard.events import export_keys
from blockyard.stores import ExternalStore, open_store

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from servers import Server, serving, serving_objects

WIDTH = 65_536
DEADLINE = 0.5
PATIENCE = 60.0
KEYS = export_keys(list(range(16 * 12)), block_size=16)
ROWS = np.random.default_rng(0).integers(0, 256, (12, WIDTH), dtype=np.uint8)
SECRET = "only-for-this-run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5000, help="of each kind, while the server hangs")
    calls = parser.parse_args().calls
    os.environ |= {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": SECRET}
    options: Any = {"bytes_per_block": WIDTH, "num_slots": 64, "use": "prefix"}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with (
            serving("valkey-server", Path(folder)) as server,
            open_store(f"redis://127.0.0.1:{server.port}?timeout_base={DEADLINE}", **options) as store,
        ):
            figures |= hang(store, server, "redis", calls)
        with (
            serving_objects(Path(folder), SECRET) as objects,
            open_store(f"{objects.url('bucket')}timeout_base={DEADLINE}", **options) as store,
        ):
            figures |= hang(store, objects, "s3", calls)
    for name, value in figures.items():
        print(f"{name:32} {value:8.3f}")
    keep(figures)


def hang(store: ExternalStore, server: Server, name: str, calls: int) -> dict[str, float]:
    until = time.monotonic() + PATIENCE
    while not store.wait(store.submit_put(KEYS, ROWS)).ok.all():  # a server may start slowly on a busy machine
        if time.monotonic() > until:
            raise SystemExit(str(store.stats()))
        time.sleep(DEADLINE)
    times: list[float] = []
    own: list[float] = []
    cpu: list[float] = []

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        preempted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        began, worked = time.perf_counter(), time.thread_time()
        result = call(*arguments)
        cpu.append(time.thread_time() - worked)
        times.append(time.perf_counter() - began)
        if resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw == preempted:
            own.append(times[-1])
        return result

    figures: dict[str, float] = {}
    with server.stopped():
        for figure in ("late", "second"):
            began = time.perf_counter()
            found = store.wait(store.submit_get(KEYS[:2]))
            took = time.perf_counter() - began
            if found.ok.any():
                raise SystemExit("a server that is stopped has answered")
            allowed = DEADLINE + 2 * WIDTH / 16e6 if figure == "late" else 0.0
            figures[f"{name}_hung_{figure}_ms"] = 1e3 * (took - allowed)
        for _ in range(calls):
            ticket = timed(store.submit_get, KEYS[2:4])
            timed(store.wait, ticket)
            timed(store.wait, timed(store.submit_put, KEYS[2:4], ROWS[2:4]))
            timed(store.contains, KEYS)
            timed(store.poll)
    began = time.perf_counter()
    while not store.wait(store.submit_get(KEYS[8:])).ok.all():
        time.sleep(0.01)
    figures[f"{name}_hung_back_s"] = time.perf_counter() - began
    for figure, taken in (("call", times), ("call_own", own), ("call_cpu", cpu)):
        figures[f"{name}_hung_{figure}_p999_ms"] = 1e3 * sorted(taken)[int(0.999 * len(taken))]
    return figures


if __name__ == "__main__":
    main()
