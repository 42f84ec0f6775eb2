"""Bytes written to a prefix store, and hits from it, for each `prefix_writes`.

    python benches/bench_prefix_writes.py [REQUESTS]

Mooncake's trace `synthetic_trace.jsonl`, in the folder that BLOCKYARD_TRACES names (../shared/traces), is served twice,
over one store: each time the cache begins empty, and is closed at the end. A block of the
trace is one block here.
"""

import json
import os
import sys
from itertools import islice
from pathlib import Path

from blockyard import KVCache, KVLayout, PrefixCaching, Request, Scheduler
from blockyard.cache import PREFIX_WRITES

SIZE = 4
DEVICE, HOST = 2_000, 4_000
LAYOUT = KVLayout("kv_first", num_layers=1, block_size=SIZE, num_kv_heads=1, head_size=4, dtype="float32")


def prompts(count: int) -> list[list[int]]:
    """Return the prompts of the trace's first requests, as tokens."""
    trace = Path(os.environ.get("BLOCKYARD_TRACES", "../shared/traces")) / "synthetic_trace.jsonl"
    with trace.open() as lines:
        ids = [json.loads(line)["hash_ids"] for line in islice(lines, count)]
    return [[block * SIZE + at for block in request for at in range(SIZE)] + [1] for request in ids]


def serve(url: str, served: list[list[int]], writes: str) -> tuple[int, int, int, int]:
    """Return the tokens found in the cache, and the blocks that came from the store, were written, or were not."""
    with KVCache(
        LAYOUT,
        device_blocks=DEVICE,
        host_blocks=HOST,
        prefix_store=url,
        namespace=b"bench",
        prefix_caching=PrefixCaching(host=True),
        prefetch_timeout_base=30,
        prefix_writes=writes,
    ) as cache:
        scheduler = Scheduler(cache, max_num_batched_tokens=512 * SIZE)
        for number, prompt in enumerate(served):
            scheduler.add(Request(f"{number}", prompt, max_tokens=1))
            while scheduler.num_unfinished:
                with scheduler.step() as step:
                    pass
                scheduler.update(step, [7] * step.num_draws)
        cached, store = scheduler.stats().cached_tokens, cache.prefix_store
        assert store is not None
    stats = store.stats()
    return cached, stats.hit_blocks, stats.written_blocks, stats.unwritten_blocks


def main() -> None:
    served = prompts(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
    total = sum(len(prompt) // SIZE for prompt in served)
    print(f"{len(served)} prompts, {total} blocks")
    for writes in PREFIX_WRITES:
        url = f"memory://{writes}?size=64MiB"
        first, again = serve(url, served, writes), serve(url, served, writes)
        hits = first[1] + again[1]
        assert writes != "never" or not hits
        per_hit = f"{(first[2] + again[2]) / hits:.2f}" if hits else "-"
        print(
            f"{writes}: found {first[0] / SIZE / total:.3f}, then {again[0] / SIZE / total:.3f};"
            f" {first[2]} and {again[2]} blocks written, {hits} read; {per_hit} bytes written per byte hit"
        )


if __name__ == "__main__":
    main()
