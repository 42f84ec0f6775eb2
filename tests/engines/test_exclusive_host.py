"""`BlockyardKVConnector` in vLLM on a CPU: equal tokens, right bytes over random requests, and rules that are needed.

`make test-engines` makes the environment and names its Python in `ENGINES_PYTHON`.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import CONNECTOR, HERE, PYTHON, SPEC, environment, serve

from blockyard.traces import read_groups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="ENGINES_PYTHON does not name a Python with vLLM; make test-engines does"),
]

LOADED, STORED = "vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"
FAULTS = [
    ("full", "loads do not wait for stores"),
    ("full", "computation does not wait for stores"),
    ("full", "stores begin with the next step"),
    ("full", "failed loads count"),
    ("full", "failed stores count"),
    ("full", "a reset forgets nothing"),
    ("stored full", "the store forgets nothing"),
    ("stored window", "failed loads count"),
    ("stored states", "failed stores count"),
    ("kept", "stores of preempted requests go on"),
    ("kept", "failed loads count"),
    ("kept", "failed stores count"),
    ("window", "computation does not wait for stores"),
    ("window", "failed loads count"),
    ("window", "failed stores count"),
    ("uneven", "failed loads count"),
    ("packed", "computation does not wait for stores"),
    ("states", "stores begin with the next step"),
    ("states", "failed loads count"),
    ("states", "failed stores count"),
]


@pytest.mark.parametrize("host_bytes", ["16MiB", 10 * 32768])
@pytest.mark.parametrize("processes", [False, True])
def test_tokens_are_those_of_vllm_alone(folder: Path, alone: Any, host_bytes: Any, processes: bool):
    found = serve(folder, extra={"host_bytes": host_bytes}, connector=CONNECTOR, processes=processes)
    assert found["tokens"] == alone["tokens"]
    assert found["counters"][STORED] > 0
    assert found["counters"][LOADED] > 0
    assert found["cached"] > alone["cached"]
    if host_bytes == "16MiB":
        assert found["cached"] == 6 * 96  # all whole blocks of the second round's prompts


@pytest.mark.parametrize("sabotage", ["loads", "wrong chunks"])
def test_a_broken_load_changes_tokens(folder: Path, alone: Any, sabotage: str):
    found = serve(folder, extra={"host_bytes": "16MiB"}, connector=CONNECTOR, sabotage=sabotage)
    assert found["tokens"] != alone["tokens"]


def test_with_a_policy_the_host_keeps_what_is_computed(folder: Path, alone: Any):
    options = {"host_bytes": "16MiB", "policy": "adaptive"}
    found = serve(folder, extra=options, connector=CONNECTOR)
    assert found["tokens"] == alone["tokens"]
    assert found["counters"][STORED] == serve(folder, extra={**SPEC, **options})["counters"][STORED]


def test_without_prefix_caching_the_host_keeps_what_is_computed(folder: Path, alone: Any):
    off = {"enable_prefix_caching": False}
    found = serve(folder, extra={"host_bytes": "16MiB"}, connector=CONNECTOR, engine=off)
    assert found["tokens"] == alone["tokens"]
    assert found["counters"][LOADED] > 0


WINDOWS = {
    "equal groups": ["sliding_attention", "full_attention"],
    # vLLM makes groups of two, two and one layers of it, whose blocks take two units, two and one.
    "unequal groups": ["sliding_attention"] * 3 + ["full_attention"] * 2,
}

GROUPS = {
    2: [("full_attention", None), ("sliding_window", 64)],
    5: [("full_attention", None), ("sliding_window", 64), ("sliding_window", 64)],
}
"""Kinds and windows of the groups that a recording names, by the number of layers."""


@pytest.mark.parametrize("layers", WINDOWS.values(), ids=list(WINDOWS))
def test_tokens_of_a_model_with_windows_are_those_of_vllm_alone(
    tmp_path: Path, layers: list[str], monkeypatch: pytest.MonkeyPatch
):
    shape = {"model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
    shape |= {"layer_types": layers, "num_hidden_layers": len(layers)}
    blocks = 40 if len(layers) == 2 else 60
    options: dict[str, Any] = {"model": shape, "engine": {"num_gpu_blocks_override": blocks}}
    alone = serve(tmp_path, **options)
    monkeypatch.setenv("BLOCKYARD_RECORD", str(tmp_path / "trace.jsonl"))
    found = serve(tmp_path, extra={"host_bytes": "16MiB"}, connector=CONNECTOR, **options)
    monkeypatch.delenv("BLOCKYARD_RECORD")
    assert found["tokens"] == alone["tokens"]
    assert found["counters"][LOADED] > 0
    assert found["cached"] > alone["cached"]
    groups = read_groups(tmp_path / "trace.jsonl")
    assert sorted((group.kind, group.window) for group in groups) == GROUPS[len(layers)]
    assert len({group.block_bytes for group in groups}) == (1 if len(layers) == 2 else 2)
    broken = serve(tmp_path, extra={"host_bytes": "16MiB"}, connector=CONNECTOR, sabotage="loads", **options)
    assert broken["tokens"] != alone["tokens"]


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [PYTHON, str(HERE / "connector_machine.py"), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800, env=environment())


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 7])
@pytest.mark.parametrize(
    "layers",
    [
        "full",
        "kept",
        "window",
        "states",
        "uneven",
        "kept uneven",
        "packed",
        "stored full",
        "stored kept",
        "stored window",
        "stored states",
    ],
)
def test_no_request_reads_wrong_bytes(layers: str, seed: int, in_flight: int):
    finished = run(layers, seed, 1500, in_flight)
    assert finished.returncode == 0, finished.stderr[-4000:]
    counts = json.loads(finished.stdout.rpartition("RESULT ")[2])
    assert counts["is exclusive"] == ("kept" not in layers)
    assert min(counts[what] for what in ("loads", "stores", "flushed", "aborts")) > 0
    if layers.startswith("stored"):
        assert min(counts[what] for what in ("written before", "written", "loaded")) > 0
    if layers == "full" or in_flight == 1:  # else some request may wait for its load whenever vLLM is to reset
        assert counts["resets"] > 0
    assert counts["copies"] >= 97  # so some have failed


@pytest.mark.parametrize(("layers", "fault"), FAULTS)
def test_without_one_of_the_rules_bytes_are_wrong(layers: str, fault: str):
    first = 7 if fault == "failed loads count" else 2  # with 7 all loads fail
    for seed in range(first, first + 80, 8):  # threads decide how a run ends, and some end well
        finished = run(layers, seed, 6000, 1, fault)
        if finished.returncode != 0:
            break
    assert finished.returncode != 0
    assert "reads wrong bytes" in finished.stderr
