"""Plans: the front of cost against time, what is recommended, and the configuration to paste."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import KVCache, KVLayout, PrefixCaching
from blockyard.cli import main
from blockyard.errors import InvalidArgumentError
from blockyard.replay.engine import EngineOptions
from blockyard.replay.plan import GIB, Plan, Prices, make_plan
from blockyard.replay.step_time import LinearStepTime
from blockyard.traces import TraceRequest

STEP = LinearStepTime(fixed=0.01, prefill_token=1e-3, decode_row=0.0, context_token=0.0)
ENGINE = EngineOptions(device_blocks=60, block_size=4, bytes_per_block=GIB // 100, host_bandwidth=1e12)
# Thirty prompts of 6 blocks in turn: a device of 60 finds few of them again, a host finds them.
ROWS = [
    TraceRequest(10.0 * number, 25, 2, tuple(range(6 * part, 6 * part + 6)), 4.0)
    for number, part in enumerate([*range(30)] * 12)
]
PRICES = Prices(device=2.0, host_gib=2.0, store_gib=0.01)


def plan(**options: Any) -> Plan:
    given: dict[str, Any] = {"host_gib": (0, 2), "preemption_modes": ("swap", "recompute")}
    return make_plan(ROWS, ENGINE, STEP, PRICES, **(given | options))


def test_a_choice_costs_its_hour_for_the_time_it_is_busy():
    (choice,) = plan(host_gib=(2,), preemption_modes=("swap",)).choices
    assert choice.served.options.host_blocks == 200
    assert choice.per_hour == pytest.approx(2.0 + 2 * 2.0, rel=0.01)
    tokens = 2 * len(ROWS)
    assert choice.per_million_tokens == pytest.approx(
        choice.per_hour * choice.served.times.busy_seconds / 3600 / tokens * 1e6
    )
    assert choice.ttft == pytest.approx(np.quantile(choice.served.times.ttft, 0.9))


def test_the_cheapest_is_recommended_that_keeps_the_limit():
    found = plan(host_gib=(2, 8))
    assert [choice.host_gib for choice in found.choices if choice.is_best] == pytest.approx([2.0], rel=0.01)
    assert found.recommended is found.choices[0]
    assert "2 GiB of host memory, adaptive eviction and swap preemption" in found.sentence()
    quick = plan(host_gib=(0, 2), max_ttft=0.03)
    assert [choice.host_gib > 1 for choice in quick.choices if choice.is_best] == [False, True]
    assert quick.recommended is not None
    assert quick.recommended.host_gib > 1
    nothing = plan(max_ttft=1e-6)
    assert nothing.recommended is None
    assert nothing.sentence().startswith("No choice gives 90 % of first tokens within 1e-06 s; the fastest gives them")
    with pytest.raises(InvalidArgumentError, match="max_ttft is 1e-06 seconds, and no choice is that fast"):
        nothing.configuration()


def test_a_mode_of_preemption_is_tried_once_without_a_host():
    modes = [(choice.host_gib > 0, choice.served.options.preemption_mode) for choice in plan().choices]
    assert sorted(modes) == [(False, "swap"), (True, "recompute"), (True, "swap")]


def test_a_store_is_a_choice_and_the_configuration_has_it():
    found = plan(host_gib=(2,), store_gib=(4,), preemption_modes=("swap",))
    assert found.recommended is not None
    assert found.recommended.store_gib == pytest.approx(4, rel=0.01)
    cache, vllm = found.configuration()
    assert vllm is not None
    assert 'prefix_store="file:///var/cache/blockyard?size=4GiB"' in cache
    assert vllm["kv_connector_extra_config"]["prefix_store"].startswith("file:///var/cache/blockyard?size=")


def test_the_arguments_of_the_cache_are_those_that_it_takes(tmp_path: Path):
    found = plan(host_gib=(0.1,), store_gib=(0.1,), preemption_modes=("swap",))
    cache, _ = found.configuration()
    layout = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    names = {"layout": layout, "KVCache": KVCache, "PrefixCaching": PrefixCaching}
    with eval(cache.replace("/var/cache", str(tmp_path)), names) as opened:
        assert opened.manager.pool().num_blocks == ENGINE.device_blocks


def write(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    lines = [
        {"timestamp": row.arrival * 1e3, "input_length": 25, "output_length": 2, "hash_ids": list(row.hash_ids)}
        | {"block_size": 4}
        for row in ROWS
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_command_prints_choices_recommendation_and_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = "--device-blocks 60 --block-size 4 --bytes-per-token 2684354 --host-gib 0,2 --store-gib 0 --jobs 1"
    command = ["plan", str(write(tmp_path)), *options.split(), "--step-time", "0.01,1e-3,0,0"]
    outputs = []
    for form in ("text", "json", "json"):
        assert main([*command, "--max-ttft", "0.03", "--format", form]) == 0
        outputs.append(capsys.readouterr().out)
    assert "Take 2 GiB of host memory, adaptive eviction" in outputs[0]
    assert "KVCache(layout, device_blocks=60, host_blocks=" in outputs[0]
    assert outputs[1] == outputs[2]
    found = json.loads(outputs[1])
    assert found["recommended"]["kv_transfer_config"]["kv_connector"] == "OffloadingConnector"
    assert main([*command, "--max-ttft", "1e-6", "-q"]) == 1


def test_the_command_needs_the_time_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(write(tmp_path))]) == 2
    assert "plan needs step times: give --step-time, --fit or --system" in capsys.readouterr().err


def test_replay_serves_engines_where_a_step_has_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, events = tmp_path / "page.html", tmp_path / "events.json"
    options = "--device-blocks 60 --host-blocks 0,200 --block-size 4 --policies lru --jobs 1 --step-time"
    command = ["replay", str(write(tmp_path)), *options.split(), "0.01,1e-3,0,0"]
    assert main([*command, "--html", str(page), "--trace-events", str(events)]) == 0
    text = capsys.readouterr().out
    assert "rows.jsonl: times in milliseconds" in text
    assert len(text.splitlines()) == 4
    names = {event.get("name") for event in json.loads(events.read_text())["traceEvents"]}
    assert {"prefill", "decode"} <= names
    assert "TTFT of rows.jsonl" in page.read_text()
    assert main([*command, "--preemption-modes", "drop"]) == 2
    assert "--preemption-modes has 'drop', must be one of" in capsys.readouterr().err
