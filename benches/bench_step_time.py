"""Predicted times of real vLLM runs, compared with the recorded ones: how accurate fitted step times are.

    python benches/bench_step_time.py [RUN ...] [--config config.json]

RUN is a folder of LLMServingSim's `bench`: `meta.json`, `requests.jsonl`, and its `config.json` if it is there. Without
one, all runs in `vllm_runs` of the folder that BLOCKYARD_TRACES names are taken. Four numbers are fitted to the first
half of the run's requests and tested on the second: the real scheduler serves the run's arrivals in virtual time. Times
count from when vLLM's scheduler received a request.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockyard.layout.model import ModelMemory
from blockyard.layout.weights import weight_bytes
from blockyard.tools.replay.step_time import EngineLimits, EngineRun, LinearStepTime, serve
from blockyard.tools.replay.step_time.fit import fit_run, lower_bounds

METRICS = {"TTFT": "ttft", "TPOT": "tpot", "Latency": "latency"}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
}
"""What the cache and the weights of the recorded models depend on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--config", type=Path, help="the model's Hugging Face config.json")
    args = parser.parse_args()
    traces = Path(os.environ.get("BLOCKYARD_TRACES", "../shared/traces"))
    for folder in args.runs or sorted(path.parent for path in (traces / "vllm_runs").glob("*/meta.json")):
        report(folder, args.config)


def report(folder: Path, config_path: Path | None) -> None:
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    engine = meta["engine_kwargs"]
    if engine.get("data_parallel_size", 1) != 1:
        sys.exit(f"{folder.name}: data_parallel_size is {engine['data_parallel_size']}, only 1 is modelled")
    instance: dict[str, Any] = {}
    if (folder / "config.json").exists():
        instance = json.loads((folder / "config.json").read_text("utf-8"))["nodes"][0]["instances"][0]
    config = known_config(meta["model"]) if config_path is None else json.loads(config_path.read_text("utf-8"))
    gpus = engine["tensor_parallel_size"]
    memory = instance.get("npu_mem", {})
    recorded = meta.get("kv_cache", {}).get("num_gpu_blocks")
    blocks = recorded or kv_blocks(config, gpus, memory)
    limits = EngineLimits.of_run(folder / "requests.jsonl", num_blocks=blocks)
    run = EngineRun.read(folder / "requests.jsonl")
    which = "as recorded" if recorded else "from the memory's size"
    print(
        f"{folder.name}: {len(run)} requests, {gpus} x {instance.get('hardware')}, {limits.num_blocks} blocks, {which}"
    )
    for bounds in ((0.0, 0.0, 0.0, 0.0), hardware_bounds(config, gpus, memory)):
        fit(run, limits, bounds)
    print()


def show(what: str, run: EngineRun, predicted: EngineRun) -> None:
    errors = [getattr(predicted, name).mean() / getattr(run, name).mean() - 1 for name in METRICS.values()]
    print(
        f"{what}: " + ", ".join(f"{metric} {100 * error:+.1f} %" for metric, error in zip(METRICS, errors, strict=True))
    )


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


def known_config(model: str) -> dict[str, Any]:
    found = next((config for name, config in CONFIGS.items() if model.endswith(name)), None)
    return found or sys.exit(f"the configuration of {model} is unknown, give --config")


def kv_blocks(config: Mapping[str, Any], gpus: int, memory: Mapping[str, float]) -> int:
    """Return the number of 16-token blocks that fit next to the weights; `mem_size` is in GiB."""
    room = memory.get("mem_size", 96) * 2**30 * memory.get("mem_util", 0.9) * gpus - weight_bytes(config)
    return int(room // ModelMemory.from_config(config).bytes(16))


if __name__ == "__main__":
    main()
