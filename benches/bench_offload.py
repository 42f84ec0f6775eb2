"""The offload manager's cost per chunk and call: thread-CPU time, batches of 128 keys, best of several rounds.

    python benches/bench_offload.py [--chunks 10000] [--batches 78] [--vllm FOLDER]

In each round all batches are stored, then looked up, loaded and touched. Each round has new keys of 36 bytes, like
vLLM's offloading connector, so stores evict. Prints a table; with BENCH_JSON=FILE it also adds its figures to the flat
JSON object in FILE.

With `--vllm`, or VLLM_SOURCE, a folder that holds `vllm/v1/kv_offload` as unpacked from a wheel of vLLM 0.33, it takes
turns with vLLM's own CPU manager in the same rounds, and with ours behind vLLM's interface: one lookup a key.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import keep
from peers import vllm_offload

from blockyard.offload import OffloadManager

BATCH, KEY_BYTES = 128, 36
SOURCE = os.environ.get("VLLM_SOURCE", "").split(":")[-1]
Calls = list[tuple[str, Callable[[list[bytes]], Any]]]


def measure(subjects: dict[str, Calls], batches: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the microseconds per chunk of each call of each manager: the best round."""
    best: dict[str, dict[str, float]] = {subject: {} for subject in subjects}
    for _ in range(rounds):
        keys = [[os.urandom(KEY_BYTES) for _ in range(BATCH)] for _ in range(batches)]
        for subject, calls in subjects.items():
            for name, call in calls:
                start = time.thread_time()
                for batch in keys:
                    call(batch)
                taken = (time.thread_time() - start) * 1e6 / (batches * BATCH)
                best[subject][name] = min(taken, best[subject].get(name, taken))
                if name == "lookup":
                    states = {str(state).rpartition(".")[2].lower() for batch in keys for state in call(batch)}
                    assert states == {"hit"}, f"{subject}: lookups are {states}"
    return best


def own(chunks: int) -> Calls:
    """The calls of our manager."""
    manager = OffloadManager(chunks)
    names = ("prepare_store", "complete_store", "lookup", "prepare_load", "complete_load", "touch")
    return [(name, getattr(manager, name)) for name in names]


def others(source: str, chunks: int) -> dict[str, Calls]:
    """Return vLLM's managers, or the reason why its sources are missing."""
    if not (Path(source) / "vllm" / "v1" / "kv_offload").is_dir():
        print(f"vLLM is left out: {source or 'neither --vllm nor VLLM_SOURCE'} names no folder with its sources")
        return {}
    vllm_offload.load(Path(source))
    return {name: vllm_offload.calls(make()) for name, make in vllm_offload.managers(chunks).items()}


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=10_000, help="of the host cache")
    parser.add_argument("--batches", type=int, default=78, help="of 128 keys, fewer than the chunks")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--vllm", default=SOURCE, help="folder of its sources")
    options = parser.parse_args()
    subjects = {"ours": own(options.chunks), **others(options.vllm, options.chunks)}
    found = measure(subjects, options.batches, options.rounds)
    print(f"{'us a chunk':16}" + "".join(f"{subject:>24}" for subject in found))
    for name in found["ours"]:
        print(f"{name:16}" + "".join(f"{figures[name]:24.3f}" for figures in found.values()))
    keep({f"offload_{name}_us": value for name, value in found["ours"].items()})


if __name__ == "__main__":
    main()
