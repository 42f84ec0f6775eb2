"""How long a request should wait for a prefix store: fixed times beside what computing would take, simulated.

    python benches/bench_store_wait.py [--requests 4000]

One engine prefills prompts one after the other; four threads read chunks of 64 tokens for all waiting requests, in
order. A request that waits no longer computes what has not arrived, and its reads that have not begun are dropped.
For each store and each rule: mean and 99th percentile of the time to first token, and the share of stored tokens that
were not computed. Virtual time: the figures are the same everywhere. `5 s` and `.25 s` are the defaults of vLLM's
adapter and of `KVCache`; `compute` waits as long as the missing tokens would take to compute; `queue` waits that long
after the requests ahead have been computed; `predict` does not begin loads that would end later than that.
"""

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

CHUNK: Final = 64
THREADS: Final = 4
RULES: Final = ("5 s", ".25 s", "compute", "queue", "predict")
BYTES_PER_TOKEN: Final = 1 << 17


@dataclass
class Request:
    """A prompt, with the part of it that is stored."""

    arrived: float
    tokens: int
    chunks: int
    landed: list[bool] = field(default_factory=list)
    until: float = 0.0
    waits: bool = True

    def found(self) -> int:
        """Tokens that have arrived from the beginning on."""
        return CHUNK * (self.landed.index(False) if False in self.landed else self.chunks)


class Simulation:
    """An engine and a store.

    Args:
        rule: one of `RULES`.
        rate: tokens that the engine prefills a second.
        read: returns the seconds of a read.
    """

    def __init__(self, rule: str, rate: float, read: "random.Random", seconds: float, slow: float) -> None:
        self.rule, self.rate, self.random, self.seconds, self.slow = rule, rate, read, seconds, slow
        self.events: list[tuple[float, int, str, object]] = []
        self.number = 0
        self.reads: deque[tuple[Request, int]] = deque()
        self.idle, self.busy_until, self.now = THREADS, 0.0, 0.0
        self.waiting: list[Request] = []
        self.average = seconds  # of a read
        self.times: list[float] = []
        self.hit = self.stored = 0

    def at(self, time: float, what: str, about: object) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, what, about))

    def run(self, requests: list[Request]) -> None:
        for request in requests:
            self.at(request.arrived, "arrive", request)
        while self.events:
            self.now, _, what, about = heapq.heappop(self.events)
            getattr(self, what)(about)
            self.start_reads()
            self.start_prefill()

    def arrive(self, request: Request) -> None:
        missing = request.chunks * CHUNK
        request.landed = [False] * request.chunks
        computing = missing / self.rate
        # What runs now, and what waits before it, as if all of it were computed.
        ahead = max(0.0, self.busy_until - self.now) + sum(other.tokens - other.found() for other in self.waiting) / self.rate
        size = missing * BYTES_PER_TOKEN
        wait = {
            "5 s": 5 + size / 16e6,
            ".25 s": 0.25 + size / 200e6,
            "compute": computing,
            "queue": ahead + computing,
            "predict": ahead + computing,
        }[self.rule]
        if self.rule == "predict" and (len(self.reads) + request.chunks) * self.average / THREADS > wait:
            request.landed, wait = [False] * request.chunks, 0.0
        request.until = self.now + wait
        request.waits = wait > 0 and request.chunks > 0
        if request.waits:
            self.reads.extend((request, chunk) for chunk in range(request.chunks))
            self.at(request.until, "expire", request)
        self.waiting.append(request)

    def expire(self, request: Request) -> None:
        if request.waits:
            request.waits = False
            self.reads = deque(entry for entry in self.reads if entry[0] is not request)

    def land(self, about: tuple[Request, int, float]) -> None:
        request, chunk, took = about
        self.idle += 1
        self.average += 0.1 * (took - self.average)
        if request.waits:
            request.landed[chunk] = True
            request.waits = not all(request.landed)

    def start_reads(self) -> None:
        while self.idle and self.reads:
            request, chunk = self.reads.popleft()
            self.idle -= 1
            took = self.seconds * self.random.expovariate(1.0) * (10 if self.random.random() < self.slow else 1)
            self.at(self.now + took, "land", (request, chunk, took))

    def start_prefill(self) -> None:
        if self.now < self.busy_until:
            return
        request = next((request for request in self.waiting if not request.waits), None)
        if request is None:
            return
        self.waiting.remove(request)
        self.busy_until = self.now + (request.tokens - request.found()) / self.rate
        self.hit, self.stored = self.hit + request.found(), self.stored + request.chunks * CHUNK
        self.times.append(self.busy_until - request.arrived)
        self.at(self.busy_until, "idle_again", None)

    def idle_again(self, _: None) -> None:
        pass


def workload(count: int, rate: float, load: float, seed: int = 1) -> list[Request]:
    """Prompts of 4,000 tokens on average, of which 70 % come back; computing all of them takes `load` of the time."""
    draw, now, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        tokens = max(256, int(draw.lognormvariate(8.0, 0.8)))
        now += draw.expovariate(load * rate / 4100)
        share = draw.uniform(0.5, 1.0) if draw.random() < 0.7 else 0.0
        requests.append(Request(now, tokens, int(tokens * share) // CHUNK))
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    count = parser.parse_args().requests
    print(f"{'read':>8} {'tokens/s':>8} {'load':>5}  " + "  ".join(f"{rule:^22}" for rule in RULES))
    for seconds in (0.001, 0.01, 0.05, 0.2):
        for rate in (2_000.0, 10_000.0):
            for load in (0.4, 0.8):
                cells = []
                for rule in RULES:
                    simulation = Simulation(rule, rate, random.Random(2), seconds, 0.02)
                    simulation.run(workload(count, rate, load))
                    assert len(simulation.times) == count, "a request was lost"
                    times = sorted(simulation.times)
                    mean, late = sum(times) / count, times[int(count * 0.99)]
                    cells.append(f"{mean:7.2f} {late:8.2f} {simulation.hit / simulation.stored:5.2f}")
                print(f"{seconds:8.3f} {rate:8.0f} {load:5.1f}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
