"""What it costs that engines of all tensor-parallel sizes can read a chunk: time and bytes, beside chunks of one size.

python benches/bench_shared_heads.py [--jobs 60]

The host memory of vLLM's workers on the way to a file store and back, in jobs of 8 MiB as in the engine: Llama 3.1 8B,
bfloat16, blocks of 16 tokens. Both ways take turns. Prints the median of a job's processor time, of all threads, which
other processes disturb less, and the minimum of its time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from blockyard.stores import open_store
from blockyard.stores.adapters.chunks import ChunkRows, HeadShards

LAYERS, HEADS, TOKENS, ROW = 32, 8, 16, 2 * 128 * 2  # K and V of a head and token
CHUNK = LAYERS * HEADS * TOKENS * ROW
JOB = (8 << 20) // CHUNK


def now() -> np.ndarray:
    return np.array([time.process_time(), time.perf_counter()])


def job(rows: ChunkRows, parts: list[np.ndarray], store: Any, name: bytes) -> list[np.ndarray]:
    """Return the times that it took to write a job's chunks, and to read them; every byte comes back."""
    keys, chunks = [name + bytes([chunk]) * 24 for chunk in range(JOB)], np.arange(JOB)
    began = now()
    given = rows.read(chunks)
    entry = store.wait(store.submit_put(keys, given))
    written = now()
    assert entry.ok.all()
    rows.give(given, entry)
    for part in parts:
        part[JOB:] = 0
    cleared = now()
    taken = rows.take(JOB)
    entry = store.wait(store.submit_get(keys, taken))
    rows.write(chunks + JOB, entry.rows, chunks)
    ended = now()
    assert entry.ok.all()
    rows.give(taken, entry)
    assert all(np.array_equal(part[:JOB], part[JOB:]) for part in parts)
    return [written - began, ended - cleared]


def measure(ranks: int, piece: int, jobs: int) -> None:
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, (2 * JOB, CHUNK // ranks), dtype=np.uint8) for _ in range(ranks)]
    ways = [ChunkRows(parts), ChunkRows(parts, HeadShards(piece, tuple(range(ranks))))]
    found: list[list[list[np.ndarray]]] = [[], []]
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(f"file://{folder}?size=256MiB", bytes_per_block=CHUNK, use="prefix") as store,
    ):
        for turn in range(jobs + 5):
            for way, rows in enumerate(ways):
                took = job(rows, parts, store, (2 * turn + way).to_bytes(8, "little"))
                if turn >= 5:  # the first ones take fresh memory
                    found[way].append(took)
    order = "heads, tokens" if piece == CHUNK // LAYERS // ranks else "tokens, heads"
    for place, what in enumerate(["write", "read"]):
        shown = []
        for clock, pick in enumerate([statistics.median, min]):
            alone, shared = (pick([one[place][clock] for one in times]) for times in found)
            shown.append(f"{1e3 * alone:6.2f} ms  {1e3 * shared:6.2f} ms  {100 * (shared / alone - 1):+5.1f} %")
        print(f"ranks {ranks}  {order}  pieces of {piece:5} bytes  {what:5}  {'   '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    jobs = parser.parse_args().jobs
    print(
        f"{JOB} chunks of {CHUNK} bytes a job, as many bytes both ways; processor time, then time: one size, all sizes"
    )
    for ranks in (2, 4, 8):
        for piece in (CHUNK // LAYERS // ranks, CHUNK // LAYERS // TOKENS // ranks):
            measure(ranks, piece, jobs)


if __name__ == "__main__":
    main()
