"""How long a request should wait for a prefix store: fixed times beside what computing would take, simulated.

    python benches/bench_store_wait.py [--requests 4000]

One engine prefills prompts one after the other; four threads read chunks of 64 tokens for all waiting requests, in
order. Once a request stops waiting, it computes what has not arrived; reads that have not begun are dropped.
For each store and each rule: mean and 99th percentile of the time to first token, and the share of stored tokens that
were not computed. Virtual time: the figures are the same everywhere. `5 s` and `.25 s` are the times of vLLM's adapter
and of `KVCache` alone. `today` is what a `KVCache` does: .25 s, and after a load that was late, one request at a time
tries the store. `compute` waits as long as the missing tokens would take to compute. `both` does so one at a time, too.
"""

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

CHUNK: Final = 64
THREADS: Final = 4
RULES: Final = ("5 s", ".25 s", "today", "compute", "both")
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
        seconds: mean time of a read; one in fifty takes ten times as long.
    """

    def __init__(self, rule: str, rate: float, seconds: float) -> None:
        self.rule, self.rate, self.random, self.seconds = rule, rate, random.Random(2), seconds
        self.events: list[tuple[float, int, str, object]] = []
        self.number = 0
        self.reads: deque[tuple[Request, int]] = deque()
        self.idle, self.busy_until, self.now = THREADS, 0.0, 0.0
        self.waiting: list[Request] = []
        self.is_late = False  # whether the last load was
        self.times: list[float] = []
        self.hit = self.stored = 0

    def _at(self, time: float, what: str, about: object) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, what, about))

    def run(self, requests: list[Request]) -> None:
        """Serve the requests."""
        for request in requests:
            self._at(request.arrived, "arrive", request)
        while self.events:
            self.now, _, what, about = heapq.heappop(self.events)
            getattr(self, f"_{what}")(about)
            self._start_reads()
            self._start_prefill()

    def _arrive(self, request: Request) -> None:
        missing = request.chunks * CHUNK
        request.landed = [False] * request.chunks
        size = missing * BYTES_PER_TOKEN
        fixed = 0.25 + size / 200e6
        seconds = {"5 s": 5 + size / 16e6, ".25 s": fixed, "today": fixed}
        wait = seconds.get(self.rule, missing / self.rate)
        if self.rule in {"today", "both"} and self.is_late and any(other.waits for other in self.waiting):
            wait = 0.0
        request.until = self.now + wait
        request.waits = wait > 0 and request.chunks > 0
        if request.waits:
            self.reads.extend((request, chunk) for chunk in range(request.chunks))
            self._at(request.until, "expire", request)
        self.waiting.append(request)

    def _expire(self, request: Request) -> None:
        if request.waits:
            request.waits, self.is_late = False, True
            self.reads = deque(entry for entry in self.reads if entry[0] is not request)

    def _land(self, about: tuple[Request, int]) -> None:
        request, chunk = about
        self.idle += 1
        if request.waits:
            request.landed[chunk] = True
            request.waits = not all(request.landed)
            self.is_late = self.is_late and request.waits

    def _start_reads(self) -> None:
        while self.idle and self.reads:
            request, chunk = self.reads.popleft()
            self.idle -= 1
            took = self.seconds * self.random.expovariate(1.0) * (10 if self.random.random() < 0.02 else 1)
            self._at(self.now + took, "land", (request, chunk))

    def _start_prefill(self) -> None:
        if self.now < self.busy_until:
            return
        request = next((request for request in self.waiting if not request.waits), None)
        if request is None:
            return
        self.waiting.remove(request)
        self.busy_until = self.now + (request.tokens - request.found()) / self.rate
        self.hit, self.stored = self.hit + request.found(), self.stored + request.chunks * CHUNK
        self.times.append(self.busy_until - request.arrived)
        self._at(self.busy_until, "end", None)

    def _end(self, _: None) -> None:
        """The engine is idle again."""


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
                    simulation = Simulation(rule, rate, seconds)
                    simulation.run(workload(count, rate, load))
                    assert len(simulation.times) == count, "a request was lost"
                    times = sorted(simulation.times)
                    mean, late = sum(times) / count, times[int(count * 0.99)]
                    cells.append(f"{mean:7.2f} {late:8.2f} {simulation.hit / simulation.stored:5.2f}")
                print(f"{seconds:8.3f} {rate:8.0f} {load:5.1f}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
