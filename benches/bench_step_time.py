"""Predicted times of real vLLM runs, compared with the recorded ones: how accurate step times are.

    python benches/bench_step_time.py [RUN ...] [--system rtx_pro_6000_server] [--config config.json] [--what-if]

RUN is a folder of LLMServingSim's `bench`: `meta.json`, `requests.jsonl`, and its `config.json`, `timeseries.csv` and
`summary.txt` if they are there. Without one, all runs in `vllm_runs` of the folder that BLOCKYARD_TRACES names are
taken. The real scheduler serves the run's arrivals in virtual time. Step times come from the tables alone, which use
only the run's arrivals, lengths and limits; then from four numbers fitted to the first half of the run's
requests and tested on the second. The model's config ships with aiconfigurator-core, or is `--config`.
`--what-if` shows the effect of each assumption.

Times count from when vLLM's scheduler received a request, as in `summary.txt`. It needs `pip install
"blockyard[tables]"`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from blockyard.layout.model import ModelMemory
from blockyard.layout.weights import weight_bytes
from blockyard.tools.replay.step_time import EngineLimits, EngineRun, LinearStepTime, serve
from blockyard.tools.replay.step_time.fit import fit_run, lower_bounds
from blockyard.tools.replay.step_time.tables import TableStepTime, read_config

SYSTEMS = {"RTXPRO6000": "rtx_pro_6000_server", "H100": "h100_sxm", "H200": "h200_sxm", "A100": "a100_sxm"}
METRICS = {"TTFT": "ttft", "TPOT": "tpot", "Latency": "latency"}
STATISTICS: dict[str, Callable[..., Any]] = {"Mean": np.mean, "Median": np.median}
STATISTICS |= {f"P{percent}": partial(np.percentile, q=percent) for percent in (90, 95, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--system", help="name of the GPU in aiconfigurator-core; from the run's config.json if absent")
    parser.add_argument("--config", type=Path, help="the model's Hugging Face config.json")
    parser.add_argument("--what-if", action="store_true", help="mean errors without each of the assumptions")
    args = parser.parse_args()
    traces = Path(os.environ.get("BLOCKYARD_TRACES", "../shared/traces"))
    for folder in args.runs or sorted(path.parent for path in (traces / "vllm_runs").glob("*/meta.json")):
        report(folder, args.system, args.config, what_if=args.what_if)


def report(folder: Path, system: str | None, config_path: Path | None, *, what_if: bool) -> None:
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    engine = meta["engine_kwargs"]
    if engine.get("data_parallel_size", 1) != 1:
        sys.exit(f"{folder.name}: data_parallel_size is {engine['data_parallel_size']}, only 1 is modelled")
    instance: dict[str, Any] = {}
    if (folder / "config.json").exists():
        instance = json.loads((folder / "config.json").read_text("utf-8"))["nodes"][0]["instances"][0]
    system = system or SYSTEMS.get(str(instance.get("hardware", "")).upper())
    config = read_config(config_path or shipped_config(meta["model"]))
    gpus = engine["tensor_parallel_size"]
    memory = instance.get("npu_mem", {})
    recorded = meta.get("kv_cache", {}).get("num_gpu_blocks")
    blocks = recorded or kv_blocks(config, gpus, memory)
    limits = EngineLimits.of_run(folder / "requests.jsonl", num_blocks=blocks)
    run = EngineRun.read(folder / "requests.jsonl")
    which = "as recorded" if recorded else "from the memory's size"
    print(f"{folder.name}: {len(run)} requests, {gpus} x {system}, {limits.num_blocks} blocks, {which}")
    for bounds in ((0.0, 0.0, 0.0, 0.0), hardware_bounds(config, gpus, memory)):
        fit(run, limits, bounds)
    if system is None:
        print(f"no tables of {instance.get('hardware')!r}: give --system to predict from those of another GPU\n")
        return
    options: dict[str, Any] = {
        "engine_version": meta["vllm_version"],
        "tensor_parallel_size": gpus,
        "enable_expert_parallel": engine.get("enable_expert_parallel", False),
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "greedy": True,  # LLMServingSim's bench samples at temperature 0
    }
    tables = TableStepTime(config, system, **options)
    predicted = serve(run, tables, limits).run
    table(folder, run, predicted)
    queue(folder, predicted)
    if what_if:
        show("as above", run, predicted)
        show(
            "steps scheduled one after the other", run, serve(run, tables, replace(limits, async_scheduling=False)).run
        )
        show(
            "random sampling", run, serve(run, TableStepTime(config, system, **options | {"greedy": False}), limits).run
        )
        newest = TableStepTime(config, system, **options | {"engine_version": None})
        show("newest all-reduce table", run, serve(run, newest, limits).run)
        tables._mixed_token = 0.0  # noqa: SLF001
        show("decodes cost the same beside prompts", run, serve(run, tables, limits).run)
    print()


def show(what: str, run: EngineRun, predicted: EngineRun) -> None:
    errors = [getattr(predicted, name).mean() / getattr(run, name).mean() - 1 for name in METRICS.values()]
    print(
        f"{what}: " + ", ".join(f"{metric} {100 * error:+.1f} %" for metric, error in zip(METRICS, errors, strict=True))
    )


def table(folder: Path, run: EngineRun, predicted: EngineRun) -> None:
    theirs = {}
    if (folder / "summary.txt").exists():
        lines = re.findall(r"^(\w+) (\w+) .*?([+-][\d.]+)%", (folder / "summary.txt").read_text("utf-8"), re.MULTILINE)
        theirs = {(metric, statistic): f"{error} %" for metric, statistic, error in lines}
    print(f"{'':16}{'vLLM':>10}{'tables':>10}{'error':>9}{'LLMServingSim':>15}   (ms)")
    for metric, attribute in METRICS.items():
        for statistic, function in STATISTICS.items():
            real, ours = (float(function(getattr(one, attribute))) * 1e3 for one in (run, predicted))
            other = theirs.get((metric, statistic), "")
            print(f"{metric + ' ' + statistic:16}{real:10.1f}{ours:10.1f}{100 * (ours / real - 1):+7.1f} %{other:>15}")


def queue(folder: Path, predicted: EngineRun) -> None:
    """Compare the running and waiting requests of each second."""
    path = folder / "timeseries.csv"
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    recorded = {name: np.array([float(row[name]) for row in rows]) for name in ("t", "running", "waiting")}
    counts = predicted.counts(recorded["t"] + predicted.queued[0])
    for name, found in zip(("running", "waiting"), counts, strict=True):
        off = np.abs(found - recorded[name])
        print(f"{name} requests, each second: off by {off.mean():.1f} on average, {off.max():.0f} at most")


def fit(run: EngineRun, limits: EngineLimits, bounds: tuple[float, float, float, float]) -> None:
    half = len(run) // 2
    found = fit_run(run, limits, LinearStepTime, first=half, at_least=bounds)
    step_time = LinearStepTime(*found.numbers)
    predicted = serve(run, step_time, limits).run
    print(
        f"fit of the first {half} requests, {'bounded by the hardware' if any(bounds) else 'without bounds'}: "
        f"{step_time.fixed * 1e3:.2f} ms a step, {step_time.prefill_token * 1e6:.1f} us a prompt token, "
        f"{step_time.decode_row * 1e6:.1f} us a row, {step_time.context_token * 1e9:.1f} ns a cached token; "
        f"condition {found.condition:.0f}"
    )
    for part, rows in (("  these", slice(half)), ("  the others", slice(half, None))):
        show(part, run.part(rows), predicted.part(rows))


def hardware_bounds(
    config: Mapping[str, Any], gpus: int, memory: Mapping[str, float]
) -> tuple[float, float, float, float]:
    """Return the least that each of the four numbers can be; the run's `config.json` has GB/s."""
    token_bytes = ModelMemory.from_config(config).bytes_per_token
    return lower_bounds(weight_bytes(config, active=True), token_bytes, memory["mem_bw"] * 1e9 * gpus)


def shipped_config(model: str) -> Path:
    """Find a model's config in aiconfigurator-core, also under an older name."""
    folder = Path(str(files("aiconfigurator_core"))) / "model_configs"
    wanted = model.replace("/", "--").replace("Meta-", "").lower()
    for path in sorted(folder.glob("*_config.json")):
        if path.name.removesuffix("_config.json").replace("Meta-", "").lower() == wanted:
            return path
    sys.exit(f"no config of {model} in aiconfigurator-core, give --config")


def kv_blocks(config: Mapping[str, Any], gpus: int, memory: Mapping[str, float]) -> int:
    """Return the number of 16-token blocks that fit next to the weights; `mem_size` is in GiB."""
    room = memory.get("mem_size", 96) * 2**30 * memory.get("mem_util", 0.9) * gpus - weight_bytes(config)
    return int(room // ModelMemory.from_config(config).bytes(16))


if __name__ == "__main__":
    main()
