"""CPU copies: a swap of 1 GiB in scattered pieces, and block exchanges, compared with torch's calls in the same run.

    python benches/bench_copy.py [--mib 1024] [--piece-kib 64] [--repeat 5]

With BENCH_JSON=FILE it also adds its figures to the flat JSON object in FILE. `copy_swap_ratio` is the swap's GB/s over
that of one `copy_` of the same bytes; `copy_exchange_ratio` is the time of index_select and index_copy_ per layer over
ours, for 512 pairs in 32 layers. The variants take turns, and the best of each counts. `copy_call_64_views_us` is the
thread-CPU time of one engine call that swaps out one block of 64 views of 8 KiB.

`copy_apart_1_view` and `copy_apart_64_views` are the shares of `ops.swap_blocks` of one block that find out whether
views share memory: of one view of 320 KiB, as a page class has, and of 64 views of 8 KiB. It stops with an error if one
is more than 2 %, or if calls of an engine look for that, which it does once when it is made.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from unittest import mock

import numpy as np
import torch
from figures import keep

from blockyard._core import BoundViews
from blockyard.engine import ops
from blockyard.engine.engine import CacheEngine
from blockyard.engine.ops import cpu
from blockyard.layout.kv import KVLayout

LAYERS = 32
PAIRS = 512
EXCHANGE_BLOCKS = 2048
EXCHANGE_BYTES = 8 << 10
CALLS = 500
APART = 0.02
"""The largest share of a call that may find out whether its views share memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="bytes to swap")
    parser.add_argument("--piece-kib", type=int, default=64, help="bytes of a block")
    parser.add_argument("--repeat", type=int, default=5, help="turns; the best counts")
    arguments = parser.parse_args()
    piece = arguments.piece_kib << 10
    figures = swap(max(1, (arguments.mib << 20) // piece), piece, arguments.repeat) | exchange(arguments.repeat)
    figures["copy_call_64_views_us"] = call(arguments.repeat)
    figures["copy_apart_1_view"] = apart(1, 320 << 10, arguments.repeat)
    figures["copy_apart_64_views"] = apart(64, 8 << 10, arguments.repeat)
    for name, value in figures.items():
        print(f"{name:32} {value:8.3f}")
    keep(figures)


def swap(blocks: int, piece: int, repeat: int) -> dict[str, float]:
    src, dst = numbered(blocks, piece), torch.zeros((blocks, piece), dtype=torch.uint8)
    random = np.random.default_rng(0)
    pairs = torch.from_numpy(np.column_stack((random.permutation(blocks), random.permutation(blocks))))
    best = best_of(
        repeat,
        large=lambda: dst.copy_(src),
        swap=lambda: ops.swap_blocks([src], [dst], pairs),
        gather=lambda: ops.gather_blocks([src], dst, pairs[:, 0]),
    )
    ops.gather_blocks([src], dst, pairs[:, 0])
    require(torch.equal(part, src[ids]) for part, ids in zip(dst.split(64), pairs[:, 0].split(64), strict=True))
    dst.zero_()
    ops.swap_blocks([src], [dst], pairs)
    require(torch.equal(dst[ids[:, 1]], src[ids[:, 0]]) for ids in pairs.split(64))
    gigabytes = blocks * piece / 1e9
    rates = {name: gigabytes / seconds for name, seconds in best.items()}
    return {
        "copy_large_gb_s": rates["large"],
        "copy_swap_gb_s": rates["swap"],
        "copy_gather_gb_s": rates["gather"],
        "copy_swap_ratio": rates["swap"] / rates["large"],
        "copy_gather_ratio": rates["gather"] / rates["large"],
    }


def exchange(repeat: int) -> dict[str, float]:
    caches = [numbered(EXCHANGE_BLOCKS, EXCHANGE_BYTES) for _ in range(LAYERS)]
    pairs = torch.from_numpy(np.random.default_rng(0).permutation(EXCHANGE_BLOCKS)[: 2 * PAIRS].reshape(-1, 2))

    def by_index() -> None:
        for cache in caches:
            one, other = cache.index_select(0, pairs[:, 0]), cache.index_select(0, pairs[:, 1])
            cache.index_copy_(0, pairs[:, 1], one)
            cache.index_copy_(0, pairs[:, 0], other)

    best = best_of(repeat, index=by_index, exchange=lambda: ops.exchange_blocks(caches, pairs))
    # Each turn exchanges the pairs twice.
    require(torch.equal(cache, numbered(EXCHANGE_BLOCKS, EXCHANGE_BYTES)) for cache in caches)
    ops.exchange_blocks(caches, pairs)
    require(torch.equal(cache[pairs.flip(1)], numbered(EXCHANGE_BLOCKS, EXCHANGE_BYTES)[pairs]) for cache in caches)
    return {"copy_exchange_ms": 1e3 * best["exchange"], "copy_exchange_ratio": best["index"] / best["exchange"]}


def call(repeat: int) -> float:
    layout = KVLayout("kv_first", LAYERS, block_size=16, num_kv_heads=2, head_size=128, dtype="float16")
    pairs = np.array([[3, 5]])
    rows = np.random.default_rng(0).integers(0, 256, (1, layout.bytes_per_block), dtype=np.uint8)
    with CacheEngine(layout, device_blocks=16, host_blocks=16) as engine:
        engine.write("device", pairs[:, 0], rows)
        engine.run("swap_out", pairs)
        with mock.patch.object(cpu, "BoundViews", None):  # its views are bound by now
            best = best_of(4 * repeat, clock=time.thread_time, calls=CALLS, run=lambda: engine.run("swap_out", pairs))
        require([np.array_equal(engine.read("host", pairs[:, 1]), rows)])
    return 1e6 * best["run"] / CALLS


def apart(views: int, width: int, repeat: int) -> float:
    src, dst = ([numbered(16, width) for _ in range(views)] for _ in range(2))
    pairs, arrays = torch.tensor([[3, 5]]), [[view.numpy() for view in side] for side in (src, dst)]
    empty = [[array[:0] for array in side] for side in arrays]  # which share no memory, whatever their addresses
    best = best_of(
        4 * repeat,
        clock=time.thread_time,
        calls=CALLS,
        call=lambda: ops.swap_blocks(src, dst, pairs),
        checked=lambda: BoundViews(*arrays),
        unchecked=lambda: BoundViews(*empty),
    )
    share = (best["checked"] - best["unchecked"]) / best["call"]
    if share > APART:
        raise SystemExit(f"{share:.3f} of a copy of {views} views finds out whether they share memory, goal {APART}")
    return share


def numbered(blocks: int, piece: int) -> torch.Tensor:
    """Return blocks of which neighbours differ, and none is zeros."""
    return (1 + torch.arange(blocks) % 251).to(torch.uint8)[:, None].repeat(1, piece)


def require(equal: Iterable[bool]) -> None:
    if not all(equal):
        raise SystemExit("a copy has other bytes")


def best_of(
    repeat: int, *, clock: Callable[[], float] = time.perf_counter, calls: int = 1, **ways: Callable[[], object]
) -> dict[str, float]:
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeat):
        for name, way in ways.items():
            start = clock()
            for _ in range(calls):
                way()
            best[name] = min(best[name], clock() - start)
    return best


if __name__ == "__main__":
    main()
