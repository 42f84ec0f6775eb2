"""Each option of a command is read by it, or refused with its name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from blockyard.tools import cli
from blockyard.tools.cli import commands
from blockyard.tools.cli.options import make_parser

STEP = ("--step-time", "0.01,1e-3,0,0")
SMALL = ("--device-blocks", "8", "--jobs", "1", "-q")
CONFIG = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "torch_dtype": "float32"}
VALUES = {
    "block_size": "8",
    "device_bandwidth": "2",
    "fit_blocks": "2",
    "kv_cache_dtype": "fp8",
    "tensor_parallel_size": "2",
    "bytes_per_token": "4",
    "host_bandwidth": "2",
    "max_num_seqs": "2",
    "memory_utilization": "0.5",
    "weights_gib": "2",
    "model_config": "CONFIG",
    "preemption_modes": "swap",
    "prefix_caching": None,
    "seeds": "2",
    "sessions": "2",
    "trace_events": "EVENTS",
    "window": "0.5",
}
"""Values other than the defaults, for options that a command does not read."""
CASES = {
    "replay, hits": (["replay", "TRACE", *SMALL], 10),
    "replay, times": (["replay", "TRACE", *SMALL, *STEP], 5),
    "replay, times and bytes": (["replay", "TRACE", *SMALL, *STEP, "--bytes-per-token", "1048576"], 6),
    "plan": (["plan", "TRACE", *SMALL, *STEP], 4),
    "plan, bytes": (["plan", "TRACE", *SMALL, *STEP, "--bytes-per-token", "1048576"], 5),
    "simulate": (["simulate", "--seeds", "1", "--seconds", "0.01", "--work", "calls", "-q"], 0),
    "simulate, replay": (["simulate", "--replay", "none", "--seconds", "0.01", "--work", "calls", "-q"], 1),
    "record": (["record", "RECORDING", "--", "true"], 0),
}


class Watched(argparse.Namespace):
    """Notes which options are read."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(**vars(options))
        self.read: set[str] = set()

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_") and name != "read":
            self.read.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("case", CASES)
def test_an_option_that_a_command_does_not_read_is_refused_by_name(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if case.startswith("simulate"):
        pytest.importorskip("greenlet")
    files = {name: str(tmp_path / name) for name in ("TRACE", "CONFIG", "EVENTS", "RECORDING")}
    row = {"timestamp": 0, "input_length": 64, "output_length": 3, "hash_ids": [1, 2, 3, 4]}
    Path(files["TRACE"]).write_text(json.dumps(row), encoding="utf-8")
    Path(files["CONFIG"]).write_text(json.dumps(CONFIG), encoding="utf-8")
    (command, *given), num_unused = CASES[case]
    arguments = [command, *(files.get(word, word) for word in given)]
    run, watched = getattr(commands, command), list[Watched]()

    def watch(options: argparse.Namespace) -> object:
        watched.append(Watched(options))
        return run(watched[0])

    with monkeypatch.context() as patched:
        patched.setattr(commands, command, watch)
        assert cli.main(arguments) == 0, capsys.readouterr().err
    every = set(vars(make_parser().parse_args(arguments))) - {"command", "default_of", "format", "output", "quiet"}
    unused = sorted((every - watched[0].read) | ({"trace_events"} if case == "replay, hits" else set()))
    assert len(unused) == num_unused
    for name in unused:
        value, option = VALUES[name], name.replace("_", "-")
        more = [f"--no-{option}"] if value is None else [f"--{option}", *([files.get(value, value)] if value else [])]
        words = [word for word in arguments if word not in {"--", "true"}]
        assert cli.main([*words, *more]) == 2
        assert capsys.readouterr().err.startswith(f"blockyard: {more[0]} has no effect with")


def test_a_plan_without_prefix_caching_compares_no_stores_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"timestamp": 0, "input_length": 64, "output_length": 3, "hash_ids": [1, 2, 3, 4]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(row), encoding="utf-8")
    arguments = ["plan", str(trace), *SMALL, *STEP, "--no-prefix-caching"]
    assert cli.main([*arguments, "--store-gib", "0,1"]) == 2
    assert capsys.readouterr().err.startswith("blockyard: --store-gib has no effect with --no-prefix-caching")
    assert cli.main([word for word in arguments if word not in {"-q", "--quiet"}]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "Prefixes are not cached" in said
    assert "does not say which prompts" not in said
