"""What a real vLLM on a CPU finds, writes and takes, by what keeps its host memory and by what is below that.

    make bench-engines [BENCH_JSON=FILE]
    ENGINES_PYTHON=PYTHON python benches/engines/bench_vllm_systems.py [--workload agents] [--runs 3] [--check]

PYTHON has vLLM. A small model in float32 serves agent sessions, coding runs, and questions about documents with vLLM's
own engine and with real copies, reads and writes. Eight requests run at a time, those of a session one after the
other; answers have four tokens. A block has 32 tokens: it stands for 1,024 tokens of a session, or for 256 of a coding
run. The device holds a twentieth of all distinct blocks, or the longest prompt if that is more; the host holds one, two
or four times as many. Each leg is a new process, whose store is empty, forked from one that has imported vLLM.

vLLM's `CPUOffloadingSpec`, `TieringOffloadingSpec` and `SimpleCPUOffloadConnector` refuse a CPU: of each, only the
worker's copies are replaced (`tests/engines/cpu_specs.py`; here for the last). Managers, policies, tiers and schedulers
are vLLM's. `fs` is vLLM's tier of files, which has no bound; the stores of ours may take as many bytes on the disk as
it has taken in the same cell. LMCache, which copies through its server, is in `bench_vllm_hits.py`.

Figures are medians of the runs: the share of the prompts' tokens that was not computed, blocks written from the device
to the host and from there to the disk, the median, mean and longest time to a first token, and the process's CPU time
while it serves. Systems of the host alone run `--host-runs` times. Each leg asserts that what vLLM says is cached was
not computed, that something was loaded from the host or the disk, and that its tokens are those of a vLLM without any
cache. With `--check`, an exclusive host with a file below must find what `fs` finds where that finds all there is, and
1.03 times as much elsewhere; the best of ours must find .99 of what each of vLLM's finds in the same host memory, and
1.05 times as much as the best of vLLM's over all sizes of the host with agent sessions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("ENGINES_PYTHON", "")
if __name__ == "__main__" and PYTHON and sys.executable != PYTHON:
    os.environ["PYTHONPATH"] = str(ROOT / "python")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.execv(PYTHON, [PYTHON, "-W", "ignore", *sys.argv])
if not PYTHON:
    sys.exit("nothing measured: ENGINES_PYTHON does not name a Python with vLLM; make bench-engines does")
sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "benches" / "engines"), str(ROOT / "tests" / "engines")]

import serve_vllm  # noqa: E402 (sets what a CPU needs)
import torch  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401 (imported once for all legs)
from figures import keep  # noqa: E402
from systems import OURS_ON_THE_HOST, VLLM, System  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402
from vllm.v1.simple_kv_offload import worker as lazy  # noqa: E402
from workloads import SEATS, Served, agents, coding, documents, optimum, take_next  # noqa: E402

BLOCK, ANSWER, STEP_TOKENS, MAX_LEN = serve_vllm.BLOCK, 4, 2_048, 8_192
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}
BLOCK_BYTES = SHAPE["num_hidden_layers"] * 2 * SHAPE["hidden_size"] * 4 * BLOCK
DEVICE_SHARE = 0.05
GOAL, FILE_GOAL, AGENTS_GOAL = 0.99, 1.03, 1.05
NOISE = 0.005
"""Differences up to this share of the prompts' tokens are noise."""
ALL = 0.99
"""From this share of what a cache without bound finds, `fs` finds all there is."""
WORKLOADS = {
    "agents": partial(agents, 100, ids_per_block=16),
    "coding": partial(coding, 160, ids_per_block=16),
    "documents": partial(documents, 100, count=40, blocks=(10, 40)),
}
ON_CPU = {"CPUOffloadingSpec": "PolicyOnCpu", "TieringOffloadingSpec": "TieringOnCpu"}
ALONE, UNCACHED, FS = "alone", "uncached", "vllm_fs"
FILES = {
    FS: System("OffloadingConnector", {"spec_name": "TieringOffloadingSpec"}, "cpu_bytes_to_use"),
    **{f"{name}_file": system for name, system in OURS_ON_THE_HOST.items()},
}
SYSTEMS = {**VLLM, **OURS_ON_THE_HOST, **FILES}


class Leg(NamedTuple):
    """A system that serves a workload once.

    Attributes:
        host_blocks: on the host.
        disk: what the files below may take; of ours only.
    """

    system: str
    requests: Sequence[Served]
    blocks: int
    host_blocks: int
    disk: int


class Figures(NamedTuple):
    """What a leg has shown; times in seconds."""

    found: float
    to_host: float
    to_disk: float
    disk: float
    first: float
    mean: float
    longest: float
    cpu: float
    seconds: float


class LazyCopies:
    """Copies at once; in place of `SimpleCPUOffloadConnector`'s copies, which need CUDA."""

    stored = loaded = 0

    def init(self, device: dict[str, Any], host: dict[str, Any], *_streams: Any) -> None:
        """Use the blocks of device and host."""
        self._pairs = [(device[name], host[name]) for name in device]

    def launch_copy(
        self, source: list[int], target: list[int], *, is_store: bool, event_idx: int, events_list: list[Any], **_: Any
    ) -> None:
        """Copy blocks."""
        for device, host in self._pairs:
            to, of = (host, device) if is_store else (device, host)
            to[target] = of[source]
        LazyCopies.stored += len(source) * is_store
        LazyCopies.loaded += len(source) * (not is_store)
        events_list.append((event_idx, SimpleNamespace(query=lambda: True, synchronize=lambda: None)))

    def shutdown(self) -> None:
        """Nothing is open."""


def replace_lazy_copies() -> None:
    """Let vLLM's lazy worker run without CUDA."""
    nothing = SimpleNamespace(record=lambda *_: None)
    stream: Any = lambda **_: None  # noqa: E731
    stream.priority_range = lambda: (0, 0)
    torch.cuda.Stream, torch.cuda.current_stream, torch.Event = stream, lambda: None, lambda: nothing  # type: ignore[misc]
    lazy.DmaCopyBackend = LazyCopies


def transfer(leg: Leg, folder: Path) -> dict[str, Any]:
    """Return vLLM's argument that names the connector."""
    if leg.system not in SYSTEMS:
        return {}
    system = SYSTEMS[leg.system]
    options = {**system.options, system.size: leg.host_blocks * BLOCK_BYTES}
    if options.get("spec_name") in ON_CPU:
        options |= {"spec_name": ON_CPU[options["spec_name"]], "spec_module_path": "cpu_specs"}
    if leg.system == FS:
        options["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder)}]
    elif leg.system in FILES:
        options |= {"prefix_store": f"file://{folder}?size={leg.disk}", "weights_fixed": True}
    config = KVTransferConfig(
        kv_connector=system.connector,
        kv_connector_module_path=system.module,
        kv_role="kv_both",
        kv_connector_extra_config=options,
    )
    return {"kv_transfer_config": config}


def start(model: Path, leg: Leg, folder: Path) -> Any:
    """Return vLLM's engine, in this process."""
    if leg.system == "vllm_lazy":
        replace_lazy_copies()
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=(max(len(request.blocks) for request in leg.requests) + 1) * BLOCK,
        block_size=BLOCK,
        num_gpu_blocks_override=leg.blocks,
        enable_prefix_caching=leg.system != UNCACHED,
        max_num_seqs=SEATS,
        max_num_batched_tokens=STEP_TOKENS,
        disable_log_stats=True,
        async_scheduling=False,
        scheduler_cls="counting_scheduler.CountingScheduler",
        **transfer(leg, folder),
    )
    return llm.llm_engine


class Counted:
    """Counts the blocks that a worker copies."""

    def __init__(self, worker: Any) -> None:
        self.stored = self.loaded = 0
        store, load = worker.submit_store, worker.submit_load

        def submit_store(job: int, device: Any, host: Any, **more: Any) -> Any:
            self.stored += len(device.block_ids)
            return store(job, device, host, **more)

        def submit_load(job: int, host: Any, device: Any, **more: Any) -> Any:
            self.loaded += len(device.block_ids)
            return load(job, host, device, **more)

        worker.submit_store, worker.submit_load = submit_store, submit_load


def tokens(request: Served) -> list[int]:
    """Return the tokens that stand for a prompt's blocks, and one more, which is always computed."""
    return [token for block in request.blocks for token in random.Random(block).choices(range(500), k=BLOCK)] + [1]


def serve(engine: Any, requests: Sequence[Served]) -> tuple[list[list[int]], int, list[float]]:
    """Serve requests, eight at a time; return answers, tokens that vLLM says were cached, and times to first tokens."""
    scheduler = engine.engine_core.engine_core.scheduler
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, detokenize=False, ignore_eos=True)
    numbers = {id(request): number for number, request in enumerate(requests)}
    waiting, running = deque(requests), dict[str, tuple[Served, float]]()
    answers, first, cached = dict[int, list[int]](), dict[str, float](), 0
    while waiting or running:
        while len(running) < SEATS and (chosen := take_next(waiting, {one.session for one, _ in running.values()})):
            name = str(numbers[id(chosen)])
            prompt = {"prompt_token_ids": tokens(chosen)}
            running[name] = chosen, time.perf_counter()
            engine.add_request(name, prompt, sampling)
        before = scheduler.computed
        for output in engine.step():
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, time.perf_counter() - running[output.request_id][1])
            if output.finished:
                del running[output.request_id]
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
                cached += output.num_cached_tokens
        if scheduler.computed == before:
            time.sleep(0.001)  # as vLLM's engine process does
    return [answers[number] for number in range(len(requests))], cached, list(first.values())


def settle(engine: Any) -> Any:
    """Step until nothing is copied or written any more; return the manager of the host."""
    connector = engine.engine_core.engine_core.scheduler.connector
    manager = connector and getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    external = getattr(manager, "external", None)
    while connector and (connector.has_pending_push_work() or (external is not None and external.is_busy)):
        engine.step()
        time.sleep(0.001)
    return manager


def run(model: Path, leg: Leg, folder: Path) -> tuple[Figures, list[list[int]]]:
    """Serve the leg's requests; return its figures and answers."""
    engine = start(model, leg, folder)
    copies: Any = LazyCopies
    if leg.system in SYSTEMS and leg.system != "vllm_lazy":
        copies = Counted(get_kv_transfer_group().connector_worker.worker)
    began, cpu = time.perf_counter(), time.process_time()
    answers, cached, first = serve(engine, leg.requests)
    seconds = time.perf_counter() - began
    scheduler = engine.engine_core.engine_core.scheduler
    computed = scheduler.computed - (ANSWER - 1) * len(leg.requests)
    total = sum(len(request.blocks) * BLOCK + 1 for request in leg.requests)
    manager = settle(engine)
    cpu = time.process_time() - cpu
    assert computed + cached == total, f"{leg.system}: {cached} of {total} cached, but {computed} computed"
    assert copies.loaded or leg.system not in SYSTEMS, f"{leg.system} has loaded nothing"
    files = [path for path in folder.rglob("*") if path.is_file()]
    written = len([path for path in files if path.suffix == ".bin"])
    if leg.system in FILES and leg.system != FS:
        written = manager.external.counts.written
    disk = sum(path.stat().st_blocks * 512 for path in files)
    return (
        Figures(
            *(1 - computed / total, copies.stored, written, disk),
            *(statistics.median(first), statistics.mean(first), max(first), cpu, seconds),
        ),
        answers,
    )


def forked(model: Path, leg: Leg) -> tuple[Figures, list[list[int]]]:
    """Run a leg in its own process, with an empty folder."""
    fork = multiprocessing.get_context("fork")
    ours, its = fork.Pipe()
    with tempfile.TemporaryDirectory() as folder:

        def work() -> None:
            its.send(run(model, leg, Path(folder)))

        process = fork.Process(target=work)
        process.start()
        its.close()
        try:
            found: tuple[Figures, list[list[int]]] = ours.recv()
        except EOFError:
            sys.exit(f"{leg.system} has failed")
        process.join()
    return found


def median(runs: list[Figures]) -> Figures:
    """Return the median of each figure."""
    return Figures(*map(statistics.median, zip(*runs, strict=True)))


def show(title: str, runs: list[Figures]) -> None:
    """Print what a system has shown."""
    it, shares = median(runs), [one.found for one in runs]
    spread = f"{min(shares):.3f} to {max(shares):.3f}" if len(runs) > 1 else ""
    print(
        f"{title:32}{it.found:7.3f}{spread:>16}{it.to_host:9.0f}{it.to_disk:8.0f}{it.disk / 2**20:8.1f}"
        f"{1e3 * it.first:8.1f}{1e3 * it.mean:8.1f}{1e3 * it.longest:8.0f}{it.cpu:7.2f}{it.seconds:7.2f}",
        flush=True,
    )


def measure(model: Path, workload: str, options: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """Serve a workload with each system; return what they find, and the goals that are missed."""
    requests = WORKLOADS[workload]()
    distinct, longest = len({b for r in requests for b in r.blocks}), max(len(r.blocks) for r in requests)
    blocks = max(round(distinct * DEVICE_SHARE), longest + 2 * SEATS)
    print(f"\n{workload}: {len(requests)} requests, {distinct} blocks, {blocks} on the device", end="")
    print(f", load {os.getloadavg()[0]:.1f}")
    print(f"{'':32}{'found':>7}{'':16}{'to host':>9}{'to disk':>8}{'MiB':>8}", end="")
    print(f"{'first':>8}{'mean':>8}{'longest':>8}{'CPU':>7}{'s':>7}")
    figures, answers = forked(model, Leg(UNCACHED, requests, blocks, 0, 0))
    show(UNCACHED, [figures])
    figures, said = forked(model, Leg(ALONE, requests, blocks, 0, 0))
    show(ALONE, [figures])
    assert said == answers, "vLLM alone says other tokens than without a cache"
    shares, missed = {f"systems_{workload}_{ALONE}": figures.found}, []
    sums = dict.fromkeys([*VLLM, *OURS_ON_THE_HOST], 0.0)
    everything = optimum(requests, distinct, BLOCK)
    for ratio in options.ratios:
        best = optimum(requests, blocks + round(blocks * ratio), BLOCK)
        print(f"host {ratio:g} x: optimum {best:.3f} without a disk, {everything:.3f} with one")
        found, disk = {}, 0
        for system in [FS, *(name for name in SYSTEMS if name != FS)]:
            runs = []
            for _ in range(options.runs if system in FILES else options.host_runs):
                figures, said = forked(model, Leg(system, requests, blocks, round(blocks * ratio), disk))
                assert said == answers, f"{system} says other tokens than without a cache"
                runs.append(figures)
            show(f"host {ratio:g} x, {system}", runs)
            found[system] = median(runs)
            disk = int(found[FS].disk)
        shares |= {f"systems_{workload}_{ratio:g}x_{name}": it.found for name, it in found.items()}
        missed += [f"{workload}, {ratio:g} x: {goal}" for goal in behind(found, everything)]
        sums = {name: total + found[name].found for name, total in sums.items()}
    peer, ours = max(sums[name] for name in VLLM), max(sums[name] for name in OURS_ON_THE_HOST)
    print(f"sum over the hosts: {ours:.3f}, the best of vLLM's {peer:.3f}: {ours / peer:.3f}")
    if workload == "agents" and ours < AGENTS_GOAL * peer:
        missed.append(f"agents: {ours / peer:.3f} of the best of vLLM's in the sum over the hosts")
    return shares, missed


def behind(found: dict[str, Figures], everything: float) -> list[str]:
    """Return the goals that are missed with a host of one size."""
    fs, file = found[FS], found["ours_exclusive_file"]
    factor = 1.0 if fs.found >= ALL * everything else min(FILE_GOAL, everything / fs.found)
    is_met = file.found >= factor * fs.found - NOISE
    missed = [] if is_met else [f"{file.found:.3f} with a file, {fs.found:.3f} with fs"]
    missed += [f"{name}: more on the disk than fs" for name in FILES if found[name].disk > fs.disk]
    ours = max(found[name].found for name in OURS_ON_THE_HOST)
    return missed + [f"less than {name}" for name in VLLM if ours < GOAL * found[name].found - NOISE]


def main() -> None:
    """Serve each workload with each system, print, and add to BENCH_JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="may be repeated; default: all")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1, 2, 4], help="host blocks over the device's")
    parser.add_argument("--runs", type=int, default=3, help="of systems with a file")
    parser.add_argument("--host-runs", type=int, default=1, help="of systems without one")
    parser.add_argument("--check", action="store_true", help="stop with an error if a goal is missed")
    options = parser.parse_args()
    shares: dict[str, float] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        writer = multiprocessing.get_context("fork").Process(target=serve_vllm.model, args=(str(model), SHAPE))
        writer.start()
        writer.join()
        for workload in options.workload or WORKLOADS:
            found, behind_here = measure(model, workload, options)
            shares |= found
            missed += behind_here
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    keep(shares)
    if options.check and missed:
        sys.exit("bench_vllm_systems: " + "; ".join(missed))


if __name__ == "__main__":
    main()
