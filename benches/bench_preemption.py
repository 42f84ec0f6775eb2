"""Serving under memory pressure: what a preempted sequence costs, by where its blocks go.

    python benches/bench_preemption.py [--device cuda] [--scale 0.125] [--requests 8] [--repeat 3]

A device of 270 blocks serves prompts and answers of 1024 tokens each, all times the scale: two sequences fit. Victims
are swapped to the host, swapped to a file, or recomputed. A last mode starts with the prompts in a prefix store that
another run has filled. Modes take turns, and the best of each counts. Only the last has prefix caching. With
BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import numpy as np
from figures import keep

from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers import Generator
from blockyard.sim.demo_model import demo_model

BLOCKS, TOKENS, BLOCK_SIZE = 270, 1024, 16


def serve(model: Any, prompts: list[list[int]], outputs: int, **options: Any) -> tuple[float, Generator]:
    """Serve all prompts; give the seconds, and the generator for its counters."""
    with Generator(model, block_size=BLOCK_SIZE, **options) as generator:
        for number, prompt in enumerate(prompts):
            generator.add(str(number), prompt, SamplingParams(max_tokens=outputs))
        began = time.perf_counter()
        while generator.num_unfinished:
            generator.step()
        seconds = time.perf_counter() - began
        if generator.cache.prefix_store is not None:
            generator.cache.prefix_store.wait(60)
        return seconds, generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--scale", type=float, default=1 / 8, help="factor on blocks and tokens")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3, help="turns; the best counts")
    given = parser.parse_args()
    blocks, length = int(BLOCKS * given.scale), int(TOKENS * given.scale)
    model = demo_model(device=given.device)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for _ in range(given.requests)]
    with tempfile.TemporaryDirectory() as folder:
        swap = {"device_blocks": blocks, "preemption_mode": "swap", "prefix_caching": False}
        size = "size=1GiB"
        modes: dict[str, dict[str, Any]] = {
            "host": {**swap, "host_blocks": 4 * blocks},
            "file": {**swap, "host_blocks": 0, "external": f"file://{folder}/swap?{size}"},
            "recompute": {**swap, "host_blocks": 0, "preemption_mode": "recompute"},
            "warm": {
                **swap,
                "host_blocks": 4 * blocks,
                "prefix_caching": True,
                "prefix_store": f"file://{folder}/prefixes?{size}",
                "prefix_deadline": 10,
                "namespace": b"bench",
            },
        }
        serve(model, prompts, 1, **modes["warm"])  # fills the prefix store
        best = dict.fromkeys(modes, float("inf"))
        preempted: dict[str, int] = {}
        for _ in range(given.repeat):
            for mode, options in modes.items():
                seconds, generator = serve(model, prompts, length, **options)
                best[mode] = min(best[mode], seconds)
                stats = generator.scheduler.stats
                preempted[mode] = stats.preempted_swap + stats.preempted_spill + stats.preempted_recompute
    print(f"{given.requests} requests of {length} + {length} tokens, {blocks} blocks of {BLOCK_SIZE}, {given.device}")
    print(f"{'victims go to':<16}{'tokens/s':>10}{'preemptions':>13}{'against host':>14}")
    for mode, seconds in best.items():
        rate = given.requests * length / seconds
        print(f"{mode:<16}{rate:>10.1f}{preempted[mode]:>13}{best['host'] / seconds:>14.3f}")
    keep({f"preemption_{mode}_over_host": best["host"] / seconds for mode, seconds in best.items() if mode != "host"})


if __name__ == "__main__":
    main()
