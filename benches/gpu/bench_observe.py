"""What metrics and spans add to a decode step on a GPU.

    python benches/gpu/bench_observe.py [--turns 8] [--steps 100] [--require] [--json FILE]

A model of Llama-3.1-8B's shape in bf16, with random weights and without rotary embedding, decodes 64 sequences from a
`KVCache`; each step writes about four blocks to a prefix store in memory. The forward pass is a CUDA graph.
Turns alternate between nothing, metrics (one block in a hundred sampled, a scrape each second in another thread),
metrics with spans of one step in ten, and spans of every step for a batch processor. A step lasts from `Scheduler.step`
to the end of `Scheduler.update`, with its tokens back on the host; `host` is what it takes besides the forward pass.
Figures are medians over all steps of a kind; ratios are to nothing.
Without a CUDA device it says so; that is an error with --require. `--device cpu --layers 1 --hidden 512` runs a small
one anywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from prometheus_client import CollectorRegistry, generate_latest

from blockyard import KVCache, KVLayout, tracing
from blockyard.metrics import Collector
from blockyard.scheduler import Request, Scheduler, Step

BLOCK, HEAD, GROUP, VOCABULARY, OUTPUT = 16, 128, 4, 128256, 256
DTYPE = torch.bfloat16
# Metrics, and the part of the traces that is recorded.
KINDS = {"nothing": (False, 0.0), "metrics": (True, 0.0), "sampled": (True, 0.1), "spans": (False, 1.0)}


class Nowhere(SpanExporter):
    """Drops spans."""

    def export(self, spans: object) -> SpanExportResult:  # noqa: ARG002, D102
        return SpanExportResult.SUCCESS


class Weights:
    """A Llama's matrices; four heads share one of keys and values."""

    def __init__(self, layers: int, hidden: int, device: str) -> None:
        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=DTYPE) * columns**-0.5

        inner = hidden * 7 // 2
        self.hidden = hidden
        shapes = ((hidden + 2 * hidden // GROUP, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        self.layers = [[weights(*shape) for shape in shapes] for _ in range(layers)]
        self.embedding, self.head = weights(VOCABULARY, hidden), weights(VOCABULARY, hidden)


class Server:
    """Sequences that decode from a cache; a new one takes the place of one that ends.

    Args:
        weights: the model's.
        sequences: rows of each step.
        device: torch's name of it.
        measured: whether metrics are on.
        stack: closes all.
    """

    def __init__(self, weights: Weights, sequences: int, device: str, *, measured: bool, stack: ExitStack) -> None:
        heads = weights.hidden // HEAD // GROUP
        layout = KVLayout("kv_first", len(weights.layers), BLOCK, heads, HEAD, "bfloat16")
        blocks = (OUTPUT + BLOCK) // BLOCK + 1
        store = {"prefix_caching": True, "prefix_store": "memory://observed?size=512MiB", "namespace": b"observed"}
        options = {"device": device, "device_blocks": 2 * sequences * blocks, **store}
        self.cache = stack.enter_context(KVCache(layout, **options))
        self.scheduler = Scheduler(self.cache)
        self.weights, self.number, self.graph = weights, 0, None
        where = {"dtype": torch.int64, "device": device}
        self.tokens, self.slots, self.sampled = (torch.zeros(sequences, **where) for _ in range(3))
        self.starts, self.tables = torch.zeros(sequences, 1, **where), torch.zeros(sequences, blocks, **where)
        for _ in range(sequences):
            self.add()
        if measured:
            registry, done = CollectorRegistry(), threading.Event()
            registry.register(Collector(self.cache, self.scheduler, sample_rate=0.01))

            def scrape() -> None:
                while not done.wait(1.0):
                    generate_latest(registry)

            thread = threading.Thread(target=scrape)
            thread.start()
            stack.callback(thread.join)
            stack.callback(done.set)

    def add(self) -> None:
        """Add a request of one token, so that each row of each step has one; blocks fill at different steps."""
        self.number += 1
        self.scheduler.add(Request(str(self.number), [self.number % VOCABULARY], OUTPUT - self.number % BLOCK))

    def forward(self) -> None:
        """Compute `sampled` from the inputs."""
        hidden, scale = self.weights.hidden, HEAD**-0.5
        x = self.weights.embedding[self.tokens]
        later = torch.arange(self.tables.shape[1] * BLOCK, device=x.device) > self.starts
        for kv, (qkv, out, up, down) in zip(self.cache.engine.tensors, self.weights.layers, strict=True):
            sizes = [hidden, hidden // GROUP, hidden // GROUP]
            q, k, v = (torch.rms_norm(x, (hidden,)) @ qkv.T).split(sizes, 1)
            by_slot = kv.view(2, -1, *kv.shape[-2:])
            by_slot[:, self.slots] = torch.stack([k, v]).view(2, -1, *kv.shape[-2:])
            # To [sequences, heads, tokens, HEAD].
            blocks = kv.flatten(2).index_select(1, self.tables.flatten())
            keys, values = blocks.view(2, len(x), -1, *kv.shape[-2:]).transpose(2, 3)
            scores = q.view(len(x), -1, GROUP, HEAD) @ keys.transpose(2, 3) * scale
            weights = scores.masked_fill(later[:, None, None], -torch.inf).softmax(-1)
            x = x + (weights @ values).reshape(-1, hidden) @ out.T
            gate, value = (torch.rms_norm(x, (hidden,)) @ up.T).chunk(2, 1)
            x = x + (torch.nn.functional.silu(gate) * value) @ down.T
        self.sampled.copy_((torch.rms_norm(x, (hidden,)) @ self.weights.head.T).argmax(-1))

    def load(self, step: Step) -> None:
        """Copy a step's inputs to the device."""
        tables = step.block_tables[:, : self.tables.shape[1]].clip(0, self.cache.engine.tensors[0].shape[1] - 1)
        inputs: tuple[Any, ...] = (step.token_ids, step.slot_mapping, step.start[:, None], tables)
        for target, source in zip((self.tokens, self.slots, self.starts, self.tables), inputs, strict=True):
            (target[:, : source.shape[1]] if source.ndim == 2 else target).copy_(torch.from_numpy(source.astype("i8")))

    def launch(self) -> None:
        """Start the forward pass."""
        if self.graph is None and self.tokens.is_cuda:
            self.forward()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.forward()
        if self.graph is None:
            self.forward()
        else:
            self.graph.replay()

    def run(self, steps: int) -> list[tuple[float, float]]:
        """Take steps; gives the seconds of each, and of them those besides the forward pass."""
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            with self.scheduler.step() as step:
                self.load(step)
                launched = time.perf_counter()
                self.launch()
                sampled = self.sampled.tolist()
                arrived = time.perf_counter()
            ended = self.scheduler.update(step, sampled)
            seconds = time.perf_counter() - began
            taken.append((seconds, seconds - (arrived - launched)))
            for _ in ended:
                self.add()
        return taken


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8, help="turns of each kind")
    parser.add_argument("--steps", type=int, default=100, help="steps of a turn")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model")
    parser.add_argument("--hidden", type=int, default=4096, help="its width, a multiple of 512")
    parser.add_argument("--sequences", type=int, default=64, help="rows of a step")
    parser.add_argument("--device", default="cuda", help="where to run")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--require", action="store_true", help="fail without a CUDA device")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        raise SystemExit(options.require)
    providers = {rate: TracerProvider(TraceIdRatioBased(rate)) for _, rate in KINDS.values() if rate}
    for provider in providers.values():
        provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    weights = Weights(options.layers, options.hidden, options.device)
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with torch.inference_mode(), ExitStack() as stack:
        servers = {
            measured: Server(weights, options.sequences, options.device, measured=measured, stack=stack)
            for measured in (False, True)
        }
        for server in servers.values():
            server.run(OUTPUT)  # until blocks fill at different steps
        for turn in range(options.turns):
            for kind in list(KINDS)[turn % 4 :] + list(KINDS)[: turn % 4]:
                measured, spans = KINDS[kind]
                if spans:
                    tracing.instrument(providers[spans])
                taken[kind] += servers[measured].run(options.steps)
                tracing.uninstrument()
        written = sum(server.cache.prefix_store.stats().written_blocks for server in servers.values())
    assert written > 0
    found = {}
    for kind, times in taken.items():
        found[f"{kind}_step_ms"], found[f"{kind}_host_ms"] = (
            1e3 * statistics.median(column) for column in zip(*times, strict=True)
        )
        found[f"{kind}_ratio"] = found[f"{kind}_step_ms"] / found["nothing_step_ms"]
    found["written_blocks"] = written
    for name, value in found.items():
        print(f"{name:20} {value:10.4f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
