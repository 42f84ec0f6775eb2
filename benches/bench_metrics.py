"""What metrics cost: a step of the reference scheduler with and without a sample of blocks, and a scrape.

    python benches/bench_metrics.py [--steps N]
    valgrind --tool=callgrind python benches/bench_metrics.py --count RATE --steps N

256 sequences over the prefix cache, of which 1 % end in each step, see `bench_scheduler.py`. The loads take turns;
each figure is the minimum over windows of the mean step, thread-CPU time. `--count` only runs steps with one rate, 0
for none: the difference in instructions between rates, and between numbers of steps, is the cost.
Prints a table; with BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import gc
import time

from bench_scheduler import WINDOW, Load
from figures import keep
from prometheus_client import CollectorRegistry, generate_latest

from blockyard import BlockManager
from blockyard.metrics import Collector
from blockyard.scheduler import Scheduler

RATES = (0.0, 0.01, 1.0)
TURNS = 20
SCRAPES = 200


def loaded(rate: float) -> Load:
    """Return a scheduler that samples this fraction of the blocks."""
    load = Load(256, turnover=True)
    if rate:
        load.manager.prefix.sample_residency(rate)
    return load


def scrape_seconds() -> tuple[float, int]:
    """Return the minimum time of a scrape of a manager and a scheduler, and its number of series."""
    registry = CollectorRegistry()
    registry.register(Collector(Scheduler(BlockManager(block_size=16, device_blocks=64, prefix_caching=True))))
    times = []
    for _ in range(SCRAPES):
        start = time.thread_time()
        text = generate_latest(registry)
        times.append(time.thread_time() - start)
    return min(times), sum(not line.startswith(b"#") for line in text.splitlines())


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    gc.disable()  # its walks would count against the next allocation
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8000, help="steps to measure of each load, at least 1000")
    parser.add_argument("--count", type=float, metavar="RATE", help="run steps with this rate, and measure nothing")
    options = parser.parse_args()
    if options.count is not None:
        loaded(options.count).measure(options.steps)
        return
    loads = [loaded(rate) for rate in RATES]
    turns = [[load.measure(max(WINDOW, options.steps // TURNS)).total for load in loads] for _ in range(TURNS)]
    none, *sampled = (min(times) for times in zip(*turns, strict=True))
    found = {"metrics_step_us": none}
    print(f"a step without a sample     {none:8.1f} us")
    for rate, total in zip(RATES[1:], sampled, strict=True):
        print(f"a step with {rate:4.0%} of the blocks {total:6.1f} us, {total / none - 1:+.1%}")
        found[f"metrics_step_{rate:g}_ratio"] = total / none
    seconds, series = scrape_seconds()
    print(f"a scrape of {series} series     {seconds * 1e3:8.2f} ms")
    found["metrics_scrape_ms"] = seconds * 1e3
    keep(found)


if __name__ == "__main__":
    main()
