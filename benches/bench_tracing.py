"""The cost of spans in a decode step: 64 requests over a cache whose blocks go to a prefix store, one job per step.

    python benches/bench_tracing.py [--turns 20]

Turns of 100 steps alternate between no spans, a sampler that drops all, and all spans recorded and handed to a batch
processor. The figures are the CPU time of the engine's thread in a step, the minimum of all turns, and what the other
two add to the first. `call_off_ns` is the cost of a span without `instrument()`. With BENCH_JSON=FILE it also adds its
figures to the flat JSON object in FILE.
"""

import argparse
import time
from collections.abc import Callable

from figures import keep
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from blockyard import KVCache, KVLayout, Request, Scheduler, tracing

REQUESTS, STEPS, BLOCK = 64, 100, 16
LAYOUT = KVLayout("kv_first", num_layers=1, block_size=BLOCK, num_kv_heads=1, head_size=8, dtype="float32")


class Nowhere(SpanExporter):
    """Drops spans."""

    def export(self, spans: object) -> SpanExportResult:  # noqa: ARG002, D102
        return SpanExportResult.SUCCESS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="turns of each kind")
    turns = parser.parse_args().turns
    modes: dict[str, Callable[[], None]] = {
        "off": tracing.uninstrument,
        "dropped": instrumented(ALWAYS_OFF),
        "recorded": instrumented(ALWAYS_ON),
    }
    length = 3 * turns * STEPS + 3 * STEPS + 64
    options = {"prefix_caching": True, "prefix_store": "memory://bench?size=64MiB", "namespace": b"bench"}
    with KVCache(LAYOUT, device_blocks=REQUESTS * (length // BLOCK + 2), **options) as cache:
        scheduler = Scheduler(cache)
        for number in range(REQUESTS):  # each step fills a block of four of them
            scheduler.add(Request(str(number), [number] * (BLOCK + number % BLOCK + 1), length))
        run(scheduler, STEPS)
        taken: dict[str, list[float]] = {name: [] for name in modes}
        for _ in range(turns):
            for name, begin in modes.items():
                begin()
                taken[name].append(run(scheduler, STEPS))
        tracing.uninstrument()
        assert cache.prefix_store is not None
        written = cache.prefix_store.stats().written_blocks
        assert written > 0
    steps = {name: 1e6 * min(seconds) for name, seconds in taken.items()}
    figures = {f"step_{name}_us": value for name, value in steps.items()}
    figures |= {f"added_{name}_us": steps[name] - steps["off"] for name in ("dropped", "recorded")}
    figures["call_off_ns"] = 1e9 * call()
    figures["written_blocks"] = written
    for name, value in figures.items():
        print(f"{name:24} {value:10.1f}")
    keep(figures)


def instrumented(sampler: Sampler) -> Callable[[], None]:
    provider = TracerProvider(sampler)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    return lambda: tracing.instrument(provider)


def run(scheduler: Scheduler, steps: int) -> float:
    """Run decode steps. Returns the CPU seconds of one."""
    began = time.thread_time()
    for _ in range(steps):
        with scheduler.step() as step:
            pass
        scheduler.update(step, [7] * step.num_draws)
    return (time.thread_time() - began) / steps


def call() -> float:
    """Return the seconds of a call that begins and ends no span."""
    count, began = 100_000, time.thread_time()
    for _ in range(count):
        tracing.begin("store", tier="device", blocks=4, bytes=4096).end(written_blocks=4)
    return (time.thread_time() - began) / count


if __name__ == "__main__":
    main()
