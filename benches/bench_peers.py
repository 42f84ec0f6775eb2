"""Peers on our workloads, compared with ours in the same run: thread-CPU time, minimum of several rounds.

    python benches/bench_peers.py --install      # fetches the Python peers into .make/peers: 1.5 GB to download
    python benches/bench_peers.py [--rounds 3] [--only NAME ...]

prints a table; with BENCH_JSON=FILE it also adds the peers' figures and their ratios to ours to the flat JSON object in
FILE. Each round runs ours and then every peer, one at a time. A figure is the mean over laps (a step, 50 requests, a
call) of each lap's minimum time over all rounds, so other work on the machine counts for nobody.

Only installed peers are measured: without `--install`, only kvbm's crates are fetched, a few megabytes. A missing peer
is skipped with a line that says why. BLOCKYARD_PEER_<NAME>=PATH (VLLM_V0, VLLM_V1, SGLANG, GAUDI) takes
a peer from a folder that holds its package, such as a checkout. vllm-gaudi is not on PyPI: it needs a checkout.

Each peer's script in benches/peers says what it does and leaves out. Stand-ins replace the modules that its block
manager does not use, so only the engine's block manager runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import bench_groups
import numpy as np
from bench_defrag import MARGIN, MOVES, RUNNING, STARTS, THRESHOLD, AllocatorStep, Churn
from bench_manager import allocate_and_free, decode, fork, swap
from bench_prefix import evict, prompts, w_prefix
from figures import keep
from numpy.typing import NDArray
from peers.common import EVICTABLE, GROUPED_SHAPES, POOLS, grouped_prompts, laps

from blockyard.allocators import BlockObserver

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benches" / "peers"
BUILT = ROOT / ".make" / "peers"
REPEATS = 5

Figures = dict[str, list[float]]


class Peer(NamedTuple):
    """A peer, and where it comes from."""

    title: str
    script: str
    packages: tuple[str, ...]
    """Exact versions, fetched without what they depend on."""
    source: str = ""
    """Where a checkout is to be had, if no index has the package."""


PEERS = {
    "vllm_v0": Peer("vLLM V0 0.7.3", "vllm_v0.py", ("vllm==0.7.3", "msgspec==0.22.0")),
    "vllm_v1": Peer("vLLM V1 0.33.0", "vllm_v1.py", ("vllm==0.33.0", "msgspec==0.22.0", "cbor2==6.3.0")),
    # Its Rust tree is built for this torch, which needs this NCCL; the other CUDA libraries are in our environment.
    "sglang": Peer(
        "SGLang 0.5.23",
        "sglang_tree.py",
        ("sglang==0.5.23", "torch==2.14.1", "nvidia-nccl-cu13==2.30.7", "msgspec==0.22.0"),
    ),
    "gaudi": Peer("vllm-gaudi", "gaudi.py", (), source="github.com/vllm-project/vllm-gaudi"),
    "kvbm": Peer("kvbm-logical 1.6.1", "kvbm", ()),
}


def stamp(name: str) -> Path:
    """Return the file that lists what is installed for a peer."""
    return BUILT / name / "installed.txt"


def install(name: str) -> None:
    """Fetch a peer's packages, and delete their kernels, which nothing here calls."""
    peer, folder = PEERS[name], BUILT / name
    if not peer.packages:
        return
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--quiet", "--no-deps", "--no-cache"]
    command += ["--python", sys.executable, "--target", str(folder), *peer.packages]
    if subprocess.run(command, check=False).returncode:
        print(f"bench_peers: {peer.title} cannot be installed", file=sys.stderr)
        return
    for kernel in folder.glob("vllm/**/*.so"):
        kernel.unlink()
    stamp(name).write_text("\n".join(peer.packages))


def cargo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run cargo on kvbm's workspace, whose build folder is separate from ours."""
    command = ["cargo", *arguments, "--locked", "--manifest-path", str(SCRIPTS / "kvbm" / "Cargo.toml")]
    environment = os.environ | {"CARGO_TARGET_DIR": str(BUILT / "kvbm"), "CARGO_NET_RETRY": "1"}
    return subprocess.run(command, cwd=SCRIPTS / "kvbm", env=environment, capture_output=True, text=True, check=False)


def rust_is_missing() -> str | None:
    """Build kvbm. Returns, in one line, why it cannot be measured here."""
    if shutil.which("cargo") is None:
        return "cargo is not installed"
    for verb in (("fetch", "--quiet"), ("build", "--release", "--quiet")):
        done = cargo(*verb)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
            return f"cargo {verb[0]}: {(errors or [f'status {done.returncode}'])[0]}"
    return None


def folder_of(name: str) -> Path:
    """Return where a Python peer's package is, or would be."""
    given = os.environ.get(f"BLOCKYARD_PEER_{name.upper()}")
    return Path(given) if given else BUILT / name


def missing(name: str) -> str | None:
    """Return, in one line, why a peer cannot be measured here."""
    peer, variable = PEERS[name], f"BLOCKYARD_PEER_{name.upper()}"
    if name == "kvbm":
        return rust_is_missing()
    if given := os.environ.get(variable):
        return None if Path(given).is_dir() else f"{variable}={given} is no folder"
    if peer.source:
        return f"set {variable} to a checkout of {peer.source}"
    if not stamp(name).exists() or stamp(name).read_text() != "\n".join(peer.packages):
        return "not installed; `python benches/bench_peers.py --install` does that"
    return None


def run(name: str, prompts_file: str) -> Figures:
    """One round of a peer.

    Raises:
        RuntimeError: it failed.
    """
    if name == "kvbm":
        command = [str(BUILT / "kvbm" / "release" / "kvbm-bench"), prompts_file]
    else:
        command = [sys.executable, str(SCRIPTS / PEERS[name].script), prompts_file]
    path = os.pathsep.join((str(folder_of(name)), str(ROOT / "benches")))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{PEERS[name].title} does not run:\n{ran.stderr}")
    figures: Figures = json.loads(ran.stdout)
    return figures


def defrag(*, fresh: bool, moves: int) -> tuple[list[float], float]:
    """W-defrag as vllm-gaudi is measured: each step resolves all block tables. Microseconds of each step, and moves."""
    blocks = 262_144
    churn, observer = Churn(blocks), BlockObserver(blocks)
    moved = 0

    def step(made: tuple[AllocatorStep, NDArray[np.int64]]) -> None:
        nonlocal moved
        observer.release_ids(made[0].freed, fresh=fresh)
        observer.use_ids(made[0].new, fresh=fresh)
        plan = observer.plan("dense", MARGIN, slack=THRESHOLD - MARGIN, moves=moves)
        if len(plan):
            observer.commit(plan)
        observer.resolve(made[1])
        moved += len(plan)

    def made() -> tuple[AllocatorStep, NDArray[np.int64]]:
        new = churn.step(tables=True)
        return new, np.concatenate([np.array(table, np.int64) for table in new.tables or ()])

    for _ in range(2 * RUNNING // STARTS):
        step(made())
    moved = 0
    costs = laps((made() for _ in range(100)), step, 1000)
    return costs, moved / len(costs)


def ours(requests: list[NDArray[np.uint32]]) -> Figures:
    """One round of ours."""
    found: Figures = {}

    def least(name: str, measure: Callable[[], float]) -> None:
        found[name] = [min(measure() for _ in range(REPEATS))]

    least("decode_ns", lambda: decode(tables=True))
    least("allocate_ns", lambda: allocate_and_free()[0])
    least("free_ns", lambda: allocate_and_free()[1])
    least("swap_ns", swap)
    least("fork_1000_us", fork)
    for name, blocks in POOLS.items():
        least(f"prefix_{name}_us", lambda: w_prefix(requests, blocks)[0])  # noqa: B023
        found[f"prefix_{name}_hit"] = [w_prefix(requests, blocks)[1]]
    for name, evictable in (EVICTABLE | {"1m": 1_000_000}).items():
        found[f"evict_{name}_ns"] = [evict(evictable, REPEATS if evictable < 1_000_000 else 1)]
    for name, fresh, moves in (("defrag_256k", True, MOVES), ("defrag_256k_kept", False, 512)):
        found[f"{name}_us"], moved = defrag(fresh=fresh, moves=moves)
        found[f"{name}_moves"] = [moved]
    grouped = [np.array(prompt, np.uint32) for prompt in grouped_prompts()]
    for count, windows in GROUPED_SHAPES.items():
        shape = bench_groups.groups_of(windows)
        least(f"groups_{count}_append_mean_ns", lambda: bench_groups.decode(shape)[0])  # noqa: B023
        least(f"groups_{count}_prefix_us", lambda: bench_groups.w_prefix(shape, grouped)[0])  # noqa: B023
        found[f"groups_{count}_prefix_hit"] = [bench_groups.w_prefix(shape, grouped)[1]]
    return found


def merge(least: Figures, found: Figures) -> None:
    """Keep the minimum of each lap."""
    for name, costs in found.items():
        least[name] = [min(pair) for pair in zip(costs, least.get(name, costs), strict=True)]


def compare(ours_: dict[str, float], theirs: dict[str, dict[str, float]]) -> dict[str, float]:
    """Print one line per figure. Returns the peers' figures and ratios by their names in BENCH_JSON."""
    kept: dict[str, float] = {}
    print(f"{'':22} {'Blockyard':>12} " + " ".join(f"{PEERS[name].title:>20}" for name in theirs))
    for figure, own in ours_.items():
        cells = []
        for name, figures in theirs.items():
            if figure not in figures:
                cells.append(f"{'-':>20}")
                continue
            kept[f"{name}_{figure}"] = value = figures[figure]
            if figure.endswith(("_ns", "_us")):
                kept[f"{name}_{figure}_ratio"] = value / own
                cells.append(f"{value:12,.1f} {value / own:6.1f}x")
            else:
                cells.append(f"{value:20.4f}")
        print(f"{figure:22} {own:12,.4f} " + " ".join(cells))
    return kept


def measure(names: list[str], rounds: int) -> None:
    """Measure, print, and add to BENCH_JSON."""
    requests = prompts()
    least: dict[str, Figures] = {"": {}}
    gc.disable()  # its walks would count against the next allocation
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(np.concatenate(requests).astype("<u4").tobytes())
        file.flush()
        for _ in range(rounds):
            merge(least[""], ours(requests))
            for name in names:
                merge(least.setdefault(name, {}), run(name, file.name))
    means = {name: {figure: sum(of) / len(of) for figure, of in figures.items()} for name, figures in least.items()}
    keep(compare(means.pop(""), means))
    print(f"load of the machine, mean of 15 minutes: {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    """Install the peers, or measure the installed ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="fetch the Python peers into .make/peers, and stop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    arguments = parser.parse_args()
    if arguments.install:
        for name in arguments.only:
            install(name)
        return
    here = []
    for name in arguments.only:
        if reason := missing(name):
            print(f"bench_peers: {PEERS[name].title} is skipped: {reason}", file=sys.stderr)
        else:
            here.append(name)
    if here:
        measure(here, arguments.rounds)


if __name__ == "__main__":
    main()
