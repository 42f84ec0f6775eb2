"""What it costs that engines of all tensor-parallel and block sizes can read a chunk, beside chunks of one size.

python benches/bench_shared_heads.py [--jobs 60] [--blocks]

The host memory of vLLM's workers on the way to a file store and back, in jobs of 8 MiB as in the engine: Llama 3.1 8B,
bfloat16, chunks of 16 tokens, or of 64 for other block sizes. Both ways take turns.
Prints the median of a job's processor time, of all threads, which other processes disturb less, and the minimum of its
time. Where blocks have one size, numpy's strided copies of the same pieces are a third way, for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import product
from typing import Any

import numpy as np

from blockyard.stores import open_store
from blockyard.stores.adapters.chunks import ChunkRows, HeadShards, TokenOrder

LAYERS, HEADS, TOKENS, ROW = 32, 8, 16, 2 * 128 * 2  # K and V of a head and token
CHUNK = LAYERS * HEADS * TOKENS * ROW
JOB = 8 << 20


class PlainRows(ChunkRows):
    """Copies the same pieces with one strided copy of numpy for each chunk and worker."""

    def __init__(self, parts: list[np.ndarray], shards: HeadShards) -> None:
        super().__init__(parts)
        self.shape = (-1, shards.num_shards, shards.piece_bytes)

    def read(self, chunks: np.ndarray) -> np.ndarray:
        """Copy chunks into rows."""
        rows = self.take(len(chunks))
        for row, chunk in zip(rows, chunks, strict=True):
            for worker, part in enumerate(self._parts):
                row.reshape(self.shape)[:, worker] = part[chunk].reshape(-1, self.shape[2])
        return rows

    def write(self, chunks: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
        """Copy rows into chunks."""
        for place, chunk in zip(places, chunks, strict=True):
            for worker, part in enumerate(self._parts):
                part[chunk].reshape(-1, self.shape[2])[:] = rows[place].reshape(self.shape)[:, worker]


def now() -> np.ndarray:
    return np.array([time.process_time(), time.perf_counter()])


def job(rows: ChunkRows, parts: list[np.ndarray], store: Any, name: bytes) -> list[np.ndarray]:
    """Return the times that it took to write a job's chunks, and to read them; every byte comes back."""
    count = len(parts[0]) // 2
    keys, chunks = [name + bytes([chunk]) * 24 for chunk in range(count)], np.arange(count)
    began = now()
    given = rows.read(chunks)
    entry = store.wait(store.submit_put(keys, given))
    written = now()
    assert entry.ok.all()
    rows.give(given, entry)
    for part in parts:
        part[count:] = 0
    cleared = now()
    taken = rows.take(count)
    entry = store.wait(store.submit_get(keys, taken))
    rows.write(chunks + count, entry.rows, chunks)
    ended = now()
    assert entry.ok.all()
    rows.give(taken, entry)
    assert all(np.array_equal(part[:count], part[count:]) for part in parts)
    return [written - began, ended - cleared]


def measure(what: str, ranks: int, chunk: int, shards: HeadShards, jobs: int) -> None:
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, (2 * JOB // chunk, chunk // ranks), dtype=np.uint8) for _ in range(ranks)]
    ways = [ChunkRows(parts), ChunkRows(parts, shards)]
    if shards.tokens is None:
        ways.append(PlainRows(parts, shards))
    found: list[list[list[np.ndarray]]] = [[] for _ in ways]
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(f"file://{folder}?size=256MiB", bytes_per_block=chunk, use="prefix") as store,
    ):
        for turn in range(jobs + 5):
            for way, rows in enumerate(ways):
                took = job(rows, parts, store, (3 * turn + way).to_bytes(8, "little"))
                if turn >= 5:  # the first ones take fresh memory
                    found[way].append(took)
    for place, way in enumerate(["write", "read"]):
        shown = []
        for clock, pick in enumerate([statistics.median, min]):
            alone, *others = (pick([one[place][clock] for one in times]) for times in found)
            costs = "  ".join(f"{1e3 * other:6.2f} ms {100 * (other / alone - 1):+5.1f} %" for other in others)
            shown.append(f"{1e3 * alone:6.2f} ms  {costs}")
        print(f"ranks {ranks}  {what}  {way:5}  {'   '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--blocks", action="store_true", help="measure other block sizes only")
    options = parser.parse_args()
    print(f"jobs of {JOB} bytes, as many both ways; processor time, then time: one size, all sizes, by numpy")
    for ranks in () if options.blocks else (2, 4, 8):
        heads = HEADS // ranks
        for order, piece in (("heads, tokens", heads * TOKENS * ROW), ("tokens, heads", heads * ROW)):
            shards = HeadShards(piece, tuple(range(ranks)))
            measure(f"{order}  pieces of {piece:5} bytes", ranks, CHUNK, shards, options.jobs)
    for ranks, blocks in product((1, 4), (1, 2, 4)):  # in a chunk of 64 tokens
        groups, heads = 4 // blocks, HEADS // ranks
        for order, piece, part in (
            ("heads, tokens", heads * TOKENS * ROW, (heads, TOKENS * ROW)),
            ("tokens, heads", heads * ROW, (1, TOKENS * heads * ROW)),
        ):
            tokens = TokenOrder(groups, LAYERS, 1, (part,))
            shards = HeadShards(piece if ranks > 1 else tokens.block_bytes, tuple(range(ranks)), tokens)
            measure(f"{order}  blocks of {TOKENS * groups:2} tokens", ranks, 4 * CHUNK, shards, options.jobs)


if __name__ == "__main__":
    main()
