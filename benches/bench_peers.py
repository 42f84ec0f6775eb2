"""Peers on our workloads, beside ours in the same run: thread-CPU time, minimum of repeats.

    python benches/bench_peers.py

builds benches/peers/kvbm (kvbm-logical, Rust) into .make/, which needs crates.io the first time, and prints a table;
with BENCH_JSON=FILE it also adds the peers' figures to the flat JSON object in FILE. Where the crates cannot be had, it
says so in one line and stops.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from bench_prefix import prompts, w_prefix
from figures import keep
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
KVBM = ROOT / "benches" / "peers" / "kvbm"
TARGET = ROOT / ".make" / "peers" / "kvbm"
REPEATS = 9
POOLS = {"20k": 20_000, "4k": 4_000}


def cargo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run cargo on the peer's own workspace; it keeps what it builds apart from ours."""
    command = ["cargo", *arguments, "--locked", "--manifest-path", str(KVBM / "Cargo.toml")]
    environment = os.environ | {"CARGO_TARGET_DIR": str(TARGET), "CARGO_NET_RETRY": "1"}
    return subprocess.run(command, cwd=KVBM, env=environment, capture_output=True, text=True, check=False)


def skipped() -> str | None:
    """Why the peer cannot be measured here, in one line."""
    if shutil.which("cargo") is None:
        return "cargo is not installed"
    fetched = cargo("fetch", "--quiet")
    if fetched.returncode:
        errors = [line for line in fetched.stderr.splitlines() if line.startswith("error")] or [
            f"status {fetched.returncode}"
        ]
        return f"cargo cannot fetch it: {errors[0]}"
    return None


def kvbm(requests: list[NDArray[np.uint32]]) -> dict[str, float]:
    """Figures of kvbm-logical on the same prompts.

    Raises:
        RuntimeError: it does not build or does not run.
    """
    built = cargo("build", "--release", "--quiet")
    if built.returncode:
        raise RuntimeError(f"kvbm-bench does not build:\n{built.stderr}")
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(np.concatenate(requests).astype("<u4").tobytes())
        file.flush()
        program = TARGET / "release" / "kvbm-bench"
        ran = subprocess.run([str(program), file.name], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"kvbm-bench does not run:\n{ran.stderr}")
    figures: dict[str, float] = json.loads(ran.stdout)
    return figures


def compare(requests: list[NDArray[np.uint32]], peer: dict[str, float]) -> None:
    """Print the peer's cost and hit rate beside ours, measured now."""
    print(f"{'W-prefix':10} {'kvbm us':>9} {'ours us':>9} {'ratio':>7} {'kvbm hit':>9} {'ours hit':>9}")
    for name, blocks in POOLS.items():
        runs = [w_prefix(requests, blocks) for _ in range(REPEATS)]
        ours, hit = min(us for us, _ in runs), runs[0][1]
        theirs = peer[f"kvbm_prefix_{name}_us"]
        theirs_hit = peer[f"kvbm_prefix_{name}_hit"]
        print(f"{name:10} {theirs:9.2f} {ours:9.2f} {theirs / ours:7.2f} {theirs_hit:9.4f} {hit:9.4f}")


def main() -> None:
    """Measure, print, and add to BENCH_JSON."""
    if reason := skipped():
        print(f"bench_peers: kvbm-logical is skipped: {reason}", file=sys.stderr)
        return
    requests = prompts()
    figures = kvbm(requests)
    compare(requests, figures)
    for name, value in figures.items():
        print(f"{name:24} {value:10.2f}")
    keep(figures)


if __name__ == "__main__":
    main()
