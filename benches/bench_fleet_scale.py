"""From 1 to 1,000 engines that share one object store, in virtual time: what a lookup costs, and what it finds.

    python benches/bench_fleet_scale.py [--most 1000] [--requests 12] [--lookups 400]

Every engine is a real `ObjectStore`: batches, threads, known keys, epochs. Server, network and time are models
(`blockyard.tools.sim`), so the requests that arrive at the server can be counted. Nothing fails.

An engine gets `--requests` prompts, one per second on average. A prompt is one of 300 shared documents of 6 blocks,
drawn from a Zipf distribution, and a unique question of 2 blocks. The engine has no cache: it looks up all 8 blocks in
one batch, and puts the missing ones. The engines start within a minute. Small fleets run with several seeds, until they
have made `--lookups`.

- Reads per lookup: all reads that arrive at the server, divided by the lookups. Each lookup reads its 8 keys, and the
  epoch record, which says that the blocks are valid. A put reads the record if the last read is a second old.
- Keys: different objects requested from the server, in one fleet.
- CPU: time of a lookup and the put that follows, simulation included; the fastest seed.

With BENCH_JSON=FILE the figures are added to FILE.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count
from typing import Any

import numpy as np
from figures import keep

from blockyard.stores.object_store import ObjectStore, read_url
from blockyard.stores.threaded.epochs import EPOCH_BYTES
from blockyard.stores.threaded.runtime import use_runtime
from blockyard.stores.value import HEADER
from blockyard.tools.sim.fleet.servers.object_server import ObjectServer
from blockyard.tools.sim.loop import EngineRuntime, Loop

BLOCK_BYTES = 256
DOCUMENTS, DOCUMENT_BLOCKS, QUESTION_BLOCKS = 300, 6, 2
START_SECONDS = 60.0
WEIGHTS = list(accumulate(1 / rank for rank in range(1, DOCUMENTS + 1)))


class CountingServer(ObjectServer):
    """Counts the requests that arrive."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop, bytes, lambda *_: None)  # not observed
        self.reads: Counter[str] = Counter()
        self.num_writes = 0

    def get(self, path: str) -> Any:
        """Count and return an object."""
        self.reads[path] += 1
        return super().get(path)

    def put(self, path: str, value: bytes, mode: Any) -> None:
        """Count and store an object."""
        self.num_writes += 1
        super().put(path, value, mode)

    def reads_of_record(self) -> int:
        """Return how often the epoch's record was read."""
        records = [path for path, found in self.objects.items() if len(found.value) == HEADER + EPOCH_BYTES]
        return sum(self.reads[path] for path in records)


@dataclass
class Figures:
    """Results of the fleets of one size."""

    lookups: int = 0
    asked: int = 0
    found: int = 0
    reads: int = 0
    reads_of_record: int = 0
    writes: int = 0
    keys: int = 0
    cpu: list[float] = field(default_factory=list)

    def line(self) -> dict[str, float]:
        """Return the figures as a line of the table."""
        return {
            "reads_a_lookup": self.reads / self.lookups,
            "reads_a_block": self.reads / max(1, self.found),
            "record_a_lookup": self.reads_of_record / self.lookups,
            "writes_a_lookup": self.writes / self.lookups,
            "keys": self.keys / len(self.cpu),
            "cpu_us": min(self.cpu) * 1e6,
            "hit_rate": self.found / self.asked,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1000, help="engines of the largest fleet")
    parser.add_argument("--requests", type=int, default=12, help="prompts of each engine")
    parser.add_argument("--lookups", type=int, default=400, help="least lookups for a size")
    arguments = parser.parse_args()
    print("engines  lookups  reads/lookup  reads/block found  of the record  writes/lookup   keys  CPU us  hit rate")
    figures: dict[str, float] = {}
    for engines in (number for number in (1, 10, 100, 1000, 10_000) if number <= arguments.most):
        found = Figures()
        for seed in count():
            run(seed, engines, arguments.requests, found)
            if found.lookups >= arguments.lookups:
                break
        line = found.line()
        print(
            f"{engines:7} {found.lookups:8} {line['reads_a_lookup']:13.2f} {line['reads_a_block']:18.2f} "
            f"{line['record_a_lookup']:14.2f} {line['writes_a_lookup']:14.2f} {line['keys']:6.0f} "
            f"{line['cpu_us']:7.0f} {line['hit_rate']:9.3f}",
            flush=True,
        )
        figures |= {f"fleet_{engines}_{name}": value for name, value in line.items()}
    keep(figures)


def run(seed: int, engines: int, requests: int, found: Figures) -> None:
    """Run one fleet to its end."""
    loop = Loop(seed)
    server = CountingServer(loop)
    gc.collect()
    gc.disable()  # it would scan the objects of all engines, which really are in separate processes
    began, before = time.process_time(), found.lookups
    for number in range(engines):
        loop.start("engine", partial(engine, loop, server, number, requests, found))
    loop.run()
    found.cpu.append((time.process_time() - began) / (found.lookups - before))
    gc.enable()
    found.reads += sum(server.reads.values())
    found.reads_of_record += server.reads_of_record()
    found.keys += len(server.reads)
    found.writes += server.num_writes


def engine(loop: Loop, server: CountingServer, number: int, requests: int, found: Figures) -> None:
    """Look up and put the blocks of prompts."""
    chance = random.Random(f"{loop.random.random()} {number}")
    loop.sleep(chance.uniform(0.0, START_SECONDS))
    link = server.connect()
    with use_runtime(EngineRuntime(loop)):
        store = ObjectStore(
            read_url("s3://bucket?size=1GiB"),
            bytes_per_block=BLOCK_BYTES,
            num_slots=1 << 20,
            namespace=bytes(32),
            use="prefix",
            connect=lambda *_: (link, None),
        )
    for request in range(requests):
        loop.sleep(chance.expovariate(1.0))
        document = chance.choices(range(DOCUMENTS), cum_weights=WEIGHTS)[0]
        keys = [key_of(document, block) for block in range(DOCUMENT_BLOCKS)]
        own = DOCUMENTS + number * requests + request
        keys += [key_of(own, block) for block in range(QUESTION_BLOCKS)]
        done = store.wait(store.submit_get(keys))
        found.lookups += 1
        found.asked += len(keys)
        found.found += int(done.ok.sum())
        lacked = [key for key, ok in zip(keys, done.ok.tolist(), strict=True) if not ok]
        rows = np.zeros((len(lacked), BLOCK_BYTES), np.uint8)
        if not store.wait(store.submit_put(lacked, rows)).ok.all():
            raise SystemExit(f"engine {number}: a put failed, though nothing fails")
    store.close()


def key_of(prompt: int, block: int) -> bytes:
    """Return the key of a prompt's block."""
    return (prompt << 8 | block).to_bytes(32, "little")


if __name__ == "__main__":
    main()
