"""Serving under memory pressure: what a preempted sequence costs, by where its blocks go.

    python benches/bench_preemption.py [--num-prompts 8] [--input-len 128] [--output-len 128] [--device-blocks 33]
    python benches/bench_preemption.py --step-ms 1 --request-rate 100 --num-prompts 1000 --input-len 1024 \
        --output-len 1024 --device-blocks 270 --repeat 1
    python benches/bench_preemption.py --legs [--device cuda] [--store URL]

Victims are swapped to the host, to a file, to a Valkey server that the benchmark starts (`redis`), or to the store of
`--store`; or they are recomputed. With `none` the device has room for all, so nothing is preempted. `warm` starts with
the prompts in a prefix store that another run has filled; only it has prefix caching. Modes take turns, and the fastest
run of each counts. Requests arrive in real time.

The model is the demo's, run by torch. With `--step-ms` a stand-in replaces it: scheduler, cache, copies and store
are real, and a forward pass sleeps that long for up to 256 tokens, and proportionally longer beyond (roughly where a
GPU is no longer memory-bound).

`--legs` times each leg of a swap alone, from page-locked and pageable memory if there is a CUDA device. With
BENCH_JSON=FILE the figures are also added to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from bench_file_fio import aligned
from bench_redis import binary, serving
from figures import keep
from numpy.typing import NDArray

from blockyard import KVCache, Pairs, StepDecision
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers import Generator
from blockyard.integrations.transformers.model import PagedModel
from blockyard.scheduler import Step
from blockyard.stores import ExternalStore
from blockyard.tools.demo.demo_model import demo_model
from blockyard.tools.demo.models import fitting_threads

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
STEP_TOKENS = 256
"""Tokens up to which a forward pass of the stand-in takes no longer than that of one token."""
STORE_BYTES = 1 << 30
MODES = ("host", "file", "redis", "none", "recompute", "warm")
PAYLOADS = (1, 4, 16, 64, 256, 1024)
"""Blocks that one swap of `--legs` moves."""
LEGS = (
    ("swap_out", "device", "host"),
    ("swap_out", "host", "external"),
    ("swap_in", "external", "host"),
    ("swap_in", "host", "device"),
    ("swap_out", "device", "external"),
    ("swap_in", "external", "device"),
)


class Server(Generator):
    """A generator that records when each request gets its first token, and can skip the model's forward pass.

    Args:
        model: defines the layout; otherwise unused if `step_seconds` is given.
        step_seconds: the stand-in's step time; None runs the model.
        options: options of the generator.
    """

    def __init__(self, model: Any, step_seconds: float | None, **options: Any) -> None:
        super().__init__(model, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, **options)
        self.first: dict[str, float] = {}
        self._step_seconds = step_seconds

    def _compute(self, step: Step) -> list[int]:
        sampled = super()._compute(step) if self._step_seconds is None else self._stand_in(step, self._step_seconds)
        now = time.perf_counter()
        for row in range(step.decodes, step.samples):
            self.first.setdefault(step.owner(row)[0], now)
        return sampled

    def _stand_in(self, step: Step, seconds: float) -> list[int]:
        """Sleep as long as a forward pass takes; each layer begins when its loads have landed."""
        layers = self.model.layout.num_layers
        a_layer = seconds * max(1.0, len(step.token_ids) / STEP_TOKENS) / layers
        until = 0.0
        for layer in range(layers):
            self.executor.wait_for_layer(step.decision.ticket, layer)
            if self.model.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            until = max(until, time.perf_counter()) + a_layer
        time.sleep(max(0.0, until - time.perf_counter()))
        return [0] * step.num_draws


def arrivals(count: int, rate: float) -> NDArray[np.float64]:
    """Return arrival times in seconds: a Poisson process with the given rate per second, or all at once."""
    return np.random.default_rng(1).exponential(1 / rate, count).cumsum() if np.isfinite(rate) else np.zeros(count)


def serve(server: Server, prompts: list[list[int]], due: NDArray[np.float64], outputs: int) -> dict[str, float]:
    """Serve all prompts as they arrive.

    Returns:
        Figures by name; times of requests in seconds, from their arrival.
    """
    params, names = SamplingParams(max_tokens=outputs), list(map(str, range(len(prompts))))
    ended: dict[str, float] = {}
    added, began, cpu = 0, time.perf_counter(), time.process_time()
    while len(ended) < len(prompts):
        now = time.perf_counter() - began
        while added < len(prompts) and due[added] <= now:
            server.add(names[added], prompts[added], params, arrival=due[added])
            added += 1
        if not server.num_unfinished:
            time.sleep(max(0.0, due[added] - now))
            continue
        finished = server.step()
        now = time.perf_counter()
        ended |= {done.request.request_id: now for done in finished}
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    server.drain()
    if server.cache.prefix_store is not None:
        server.cache.prefix_store.wait(60)
    first = np.array([server.first[name] for name in names])
    last = np.array([ended[name] for name in names])
    waits, gaps = first - began - due, (last - first) / max(1, outputs - 1)
    stats, counted = server.scheduler.stats(), server.cache.stats()
    return {
        "tokens_s": len(prompts) * outputs / seconds,
        **percentiles("ttft", waits),
        **percentiles("tpot", gaps),
        "preemptions": stats.preempted_swap_host + stats.preempted_swap_external + stats.preempted_recompute,
        "swapped_out_blocks": sum(counted.swapped_out_blocks.values()),
        "lost": stats.lost,
        "cached_tokens": stats.cached_tokens,
        "steps": stats.steps,
        "seconds": seconds,
        "cpu_s": cpu,
    }


def percentiles(name: str, seconds: NDArray[np.float64]) -> dict[str, float]:
    """Return mean, median and 99th percentile of some times."""
    p50, p99 = np.percentile(seconds, (50, 99))
    return {f"{name}_mean_s": float(seconds.mean()), f"{name}_p50_s": float(p50), f"{name}_p99_s": float(p99)}


def options_of(mode: str, given: argparse.Namespace, urls: Mapping[str, str], folder: str) -> dict[str, Any]:
    """Options of the generator for a mode."""
    blocks = given.device_blocks
    per_sequence = -(-(given.input_len + given.output_len) // BLOCK_SIZE) + 1
    swap: dict[str, Any] = {"device_blocks": blocks, "preemption_mode": "swap", "prefix_caching": False}
    swap["host_blocks"] = 0
    if mode == "host":
        return swap | {"host_blocks": 4 * blocks, "pin_memory": given.pin_memory}
    if mode == "none":
        return swap | {"device_blocks": 16 + per_sequence * min(given.num_prompts, MAX_NUM_SEQS)}
    if mode == "recompute":
        return swap | {"preemption_mode": "recompute"}
    if mode == "warm":
        size = f"size={STORE_BYTES}"
        store = {"prefix_store": f"file://{folder}/prefixes?{size}", "prefetch_timeout_base": 10, "namespace": b"bench"}
        return swap | store | {"host_blocks": 4 * blocks, "pin_memory": given.pin_memory, "prefix_caching": True}
    return swap | {"swap_store": urls[mode], "pin_memory": given.pin_memory}


@contextmanager
def stores(given: argparse.Namespace, modes: tuple[str, ...], folder: str) -> Iterator[dict[str, str]]:
    """Yield the URL of each mode's external store, and run the server if one needs it."""
    with ExitStack() as stack:
        urls = {url.partition(":")[0]: url for url in given.store}
        if "file" in modes:
            urls.setdefault("file", f"file://{folder}/swap?size={STORE_BYTES}")
        if "redis" in modes and "redis" not in urls:
            urls["redis"] = f"redis://127.0.0.1:{stack.enter_context(serving(binary()))}?size={STORE_BYTES}"
        yield urls


def online(given: argparse.Namespace, modes: tuple[str, ...]) -> dict[str, float]:
    """Serve in every mode, and print one table."""
    model = demo_model(device=given.device)
    seconds = None if given.step_ms is None else given.step_ms / 1e3
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, given.input_len).tolist() for _ in range(given.num_prompts)]
    due = arrivals(given.num_prompts, given.request_rate)
    best: dict[str, dict[str, float]] = {}
    step = "the demo's model in torch" if seconds is None else f"a stand-in of {given.step_ms:g} ms a step"
    print(
        f"{given.num_prompts} requests of {given.input_len} + {given.output_len} tokens, {given.request_rate:g} a "
        f"second, {given.device_blocks} blocks of {BLOCK_SIZE} tokens, {given.device}, {step}",
        flush=True,
    )
    with fitting_threads(model), tempfile.TemporaryDirectory() as folder, stores(given, modes, folder) as urls:
        if "warm" in modes:
            with Server(model, seconds, **options_of("warm", given, urls, folder)) as server:
                serve(server, prompts, np.zeros(len(prompts)), 1)  # fills the prefix store
        for turn in range(given.repeat):
            for mode in modes:
                with Server(model, seconds, **options_of(mode, given, urls, folder)) as server:
                    if mode != "none":  # zeros would favour the stores; the tensors of "none" stay untouched
                        for tensor in server.cache.engine.tensors:
                            tensor.uniform_()
                    found = serve(server, prompts, due, given.output_len)
                if mode == "warm" and not found["cached_tokens"]:
                    raise SystemExit("no prompt was found in the warm prefix store")
                if mode not in {"none", "recompute", "warm"} and found["preemptions"] > found["swapped_out_blocks"]:
                    raise SystemExit(f"{found['preemptions']} preemptions swapped {found['swapped_out_blocks']} blocks")
                print(f"turn {turn + 1}, {mode}: {found['tokens_s']:.1f} tokens/s", flush=True)
                if mode not in best or found["tokens_s"] > best[mode]["tokens_s"]:
                    best[mode] = found
    return show(best)


def show(best: dict[str, dict[str, float]]) -> dict[str, float]:
    """Print the table. Returns the figures under flat names."""
    columns = ("tokens/s", "of host", "TTFT mean", "P50", "P99 s", "TPOT mean", "P50", "P99 ms")
    columns += ("preempted", "blocks out", "lost", "steps", "CPU s")
    print(f"{'victims go to':<14}" + "".join(f"{column:>11}" for column in columns))
    figures: dict[str, float] = {}
    for mode, found in best.items():
        share = found["tokens_s"] / best["host"]["tokens_s"] if "host" in best else float("nan")
        first = [found[f"ttft_{part}_s"] for part in ("mean", "p50", "p99")]
        each = [1e3 * found[f"tpot_{part}_s"] for part in ("mean", "p50", "p99")]
        counts = [found[name] for name in ("preemptions", "swapped_out_blocks", "lost", "steps")]
        row = [f"{found['tokens_s']:.1f}", f"{share:.3f}", *(f"{value:.2f}" for value in first + each)]
        row += [*(f"{value:.0f}" for value in counts), f"{found['cpu_s']:.1f}"]
        print(f"{mode:<14}" + "".join(f"{cell:>11}" for cell in row))
        figures |= {f"preemption_{mode}_{name}": value for name, value in found.items()}
        if mode != "host" and "host" in best:
            figures[f"preemption_{mode}_over_host"] = share
    return figures


def legs(given: argparse.Namespace, modes: tuple[str, ...]) -> dict[str, float]:
    """Time each leg of a swap alone, by its number of blocks, and print a table for each store."""
    layout = PagedModel(demo_model(), block_size=BLOCK_SIZE).layout
    pins = [given.pin_memory] if given.pin_memory is not None or given.device == "cpu" else [True, False]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, stores(given, modes, folder) as urls:
        for name, url in urls.items():
            for pin in pins:
                most, memory = max(PAYLOADS), {True: "page-locked", False: "pageable", None: "ordinary"}[pin]
                print(f"{name}, {memory} host memory, blocks of {layout.bytes_per_block >> 10} KiB, {given.device}")
                print(f"{'leg':<20}" + "".join(f"{f'{n} blocks: ms':>16}{'GB/s':>8}" for n in PAYLOADS))
                sizes = {"device_blocks": most, "host_blocks": most, "device": given.device}
                with KVCache(layout, swap_store=url, pin_memory=pin, max_staging="1GiB", **sizes) as cache:
                    times = time_legs(cache, given.repeat)
                for (_, src, dst), by_blocks in times.items():
                    cells = ""
                    for blocks, seconds in by_blocks.items():
                        rate = blocks * layout.bytes_per_block / 1e9 / seconds
                        cells += f"{1e3 * seconds:>16.3f}{rate:>8.2f}"
                        leg = f"legs_{name}_{memory.replace('-', '_')}_{src}_{dst}_{blocks}"
                        figures |= {f"{leg}_ms": 1e3 * seconds, f"{leg}_gb_s": rate}
                    label = f"{src} -> {dst}".replace("external", name)
                    print(f"{label:<20}{cells}", flush=True)
    return figures


def time_legs(cache: KVCache, repeat: int) -> dict[tuple[str, str, str], dict[int, float]]:
    """Return the median seconds of each leg by number of blocks; checks that the device gets its bytes back.

    In turns with the legs, the store alone writes and reads as many blocks, in the order of their slots.
    """
    random, ticket = np.random.default_rng(0), 0
    most = max(PAYLOADS)
    times: dict[tuple[str, str, str], dict[int, float]] = {leg: {} for leg in LEGS}
    rows = random.integers(0, 256, (most, cache.layout.bytes_per_block), dtype=np.uint8)
    zeros = np.zeros_like(rows)
    cache.engine.write("device", np.arange(most), rows)
    alone = [("", "rows", "external"), ("", "external", "rows")]
    lent, store = aligned(most, cache.layout.bytes_per_block), cache.swap_store
    assert store is not None
    for blocks in PAYLOADS:
        taken = np.zeros((len(LEGS) + len(alone), repeat + 1))
        for turn in range(repeat + 1):
            ids = np.column_stack((np.arange(most), random.permutation(most)))[:blocks]
            for index, (kind, src, dst) in enumerate(LEGS):
                pairs = np.ascontiguousarray(ids if kind == "swap_out" else ids[:, ::-1])
                if (src, dst) in {("host", "external"), ("external", "host")}:
                    pairs = np.column_stack((ids[:, 1], ids[:, 1]))
                ticket += 1
                began = time.perf_counter()
                lost = cache.executor.execute(StepDecision(ticket, [(kind, Pairs(src, dst, pairs))]))
                if cache.engine.device.type == "cuda":
                    torch.cuda.synchronize()
                taken[index, turn] = time.perf_counter() - began
                if lost:
                    raise SystemExit(f"{src} to {dst}: {sum(map(len, lost))} of {blocks} blocks were lost")
                if kind == "swap_out":
                    cache.engine.write("device" if src == "device" else "host", pairs[:, 0].copy(), zeros[:blocks])
            taken[len(LEGS) :, turn] = time_alone(store, np.sort(ids[:, 1]), lent[:blocks])
        # The first turn warms up.
        for leg, seconds in zip((*LEGS, *alone), np.median(taken[:, 1:], axis=1).tolist(), strict=True):
            times.setdefault(leg, {})[blocks] = seconds
    if not np.array_equal(cache.engine.read("device", np.arange(most)), rows):
        raise SystemExit("the device got other bytes back than it gave away")
    return times


def time_alone(store: ExternalStore, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> list[float]:
    """Return the seconds in which the store alone writes and then reads slots."""
    taken = []
    for submit in (store.submit_write, store.submit_read):
        began = time.perf_counter()
        done = store.wait(submit(slots, rows))
        taken.append(time.perf_counter() - began)
        assert done.ok.all()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--num-prompts", type=int, default=8, help="requests")
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="requests a second; inf: all at once")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--device-blocks", type=int, default=33, help="blocks of the device")
    parser.add_argument(
        "--step-ms", type=float, help="of a stand-in for the forward pass; the demo's model if not given"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="which, separated by commas")
    parser.add_argument("--store", action="append", default=[], help="URL of an external store; may be repeated")
    parser.add_argument("--pin-memory", action=argparse.BooleanOptionalAction, help="page-lock host memory, or not")
    parser.add_argument("--legs", action="store_true", help="time each way of a swap instead")
    parser.add_argument("--repeat", type=int, default=3, help="turns; the fastest counts, with --legs the average")
    given = parser.parse_args()
    schemes = [url.partition(":")[0] for url in given.store]
    modes = tuple(dict.fromkeys((*given.modes.split(","), *schemes)))
    if unknown := set(modes) - set(MODES) - set(schemes):
        parser.error(f"--modes has {', '.join(sorted(unknown))}, must be of {', '.join(MODES)}")
    if not given.request_rate > 0:
        parser.error(f"--request-rate is {given.request_rate}, must be above 0")
    keep(legs(given, modes) if given.legs else online(given, modes))


if __name__ == "__main__":
    main()
