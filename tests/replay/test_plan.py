"""Plans: the front of cost against time, what is recommended, and the configuration to paste."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import KVCache, KVLayout, PrefixCaching
from blockyard.errors import InvalidArgumentError
from blockyard.tools.cli import main
from blockyard.tools.replay.engine import EngineOptions
from blockyard.tools.replay.plan import GIB, Plan, Prices, _marked, _recommend, make_plan
from blockyard.tools.replay.step_time import LinearStepTime
from blockyard.tools.replay.traffic import part_of, redraw_arrivals, spread_by_prefix
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
    assert "One other choice costs as much" in quick.sentence()  # recompute; what is cheaper is too slow
    nothing = plan(max_ttft=1e-6)
    assert nothing.recommended is None
    assert nothing.sentence().startswith("No choice gives 90 % of first tokens within 1e-06 s; the fastest gives them")
    with pytest.raises(InvalidArgumentError, match="max_ttft is 1e-06 seconds, and no choice is that fast"):
        nothing.configuration()


def test_a_mode_of_preemption_is_tried_once_without_a_host():
    modes = [(choice.host_gib > 0, choice.served.options.preemption_mode) for choice in plan().choices]
    assert sorted(modes) == [(False, "recompute"), (True, "recompute"), (True, "swap")]


def test_a_store_is_a_choice_and_the_configuration_has_it():
    found = plan(host_gib=(2,), store_gib=(4,), preemption_modes=("swap",))
    assert found.recommended is not None
    assert found.recommended.store_gib == pytest.approx(4, rel=0.01)
    paste = found.configuration()
    cache, vllm = paste.kv_cache, paste.kv_transfer_config
    assert vllm is not None
    assert 'prefix_store="file:///var/cache/blockyard?size=4GiB"' in cache
    assert vllm["kv_connector"] == "BlockyardKVConnector"
    assert vllm["kv_connector_extra_config"] == {
        "host_bytes": "2GiB",
        "prefix_store": "file:///var/cache/blockyard?size=4GiB",
    }


@pytest.mark.parametrize("writes", ["through", "second_use"])
def test_what_is_pasted_has_all_that_was_recommended(writes: str):
    engine, tried = replace(ENGINE, store_writes=writes), {"host_gib": (0, 2), "store_gib": (0, 4)}
    choices = make_plan(ROWS[:12], engine, STEP, PRICES, **tried, policies=("lru", "adaptive")).choices
    assert len({(one.host_gib > 0, one.store_gib > 0) for one in choices}) == 4
    for winner in choices:
        options = winner.options
        paste = Plan(choices, winner, float("inf"), longest_blocks=10).configuration()
        assert f"device_blocks={options.device_blocks}, host_blocks={options.host_blocks}," in paste.kv_cache
        assert f'eviction="{options.eviction}"' in paste.kv_cache
        assert ("size=4GiB" in paste.kv_cache) == (winner.store_gib > 0)
        assert f'preemption_mode="{options.preemption_mode}"' in paste.scheduler
        assert f"--num-gpu-blocks-override {options.device_blocks}" in paste.vllm
        if not options.host_blocks and not options.store_blocks:
            assert paste.kv_transfer_config is None
            continue
        assert paste.kv_transfer_config is not None
        extra = paste.kv_transfer_config["kv_connector_extra_config"]
        # Without a host tier, twice the longest request.
        assert extra.pop("host_bytes") == ("2GiB" if options.host_blocks else "1GiB")
        store = {"prefix_store": "file:///var/cache/blockyard?size=4GiB"} if options.store_blocks else {}
        assert extra == store | ({"prefix_writes": writes} if store and writes != "through" else {})


def test_host_memory_before_a_store_holds_the_longest_request_twice():
    found = plan(host_gib=(0,), store_gib=(4,))
    assert found.longest_blocks == max(-(-(row.input_tokens + row.output_tokens) // 4) for row in ROWS)
    assert found.recommended is not None
    config = replace(found, longest_blocks=3 * GIB // ENGINE.bytes_per_block).configuration().kv_transfer_config
    assert config is not None
    assert config["kv_connector_extra_config"]["host_bytes"] == "6GiB"


def test_the_arguments_of_the_cache_are_those_that_it_takes(tmp_path: Path):
    found = plan(host_gib=(0.1,), store_gib=(0.1,), preemption_modes=("swap",))
    cache = found.configuration().kv_cache
    layout = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    names = {"layout": layout, "KVCache": KVCache, "PrefixCaching": PrefixCaching}
    with eval(cache.replace("/var/cache", str(tmp_path)), names) as opened:
        assert opened.manager.pool().num_blocks == ENGINE.device_blocks


def test_waits_for_copies_cost_as_much_as_compute():
    rows = [TraceRequest(0.0, 320, 640) for _ in range(40)]
    crowded = EngineOptions(600, max_num_seqs=40, eviction="lru", host_bandwidth=1e9)
    modes: Any = ("swap", "recompute")
    found = make_plan(rows, crowded, STEP, PRICES, host_gib=[8], preemption_modes=modes)
    for choice in found.choices:  # no engine ever waits for a request
        assert choice.served.times.busy_seconds == pytest.approx(choice.served.times.seconds)
        assert choice.served.preemptions


def test_of_equal_costs_the_fastest_is_recommended_and_of_equals_the_first():
    found = plan(host_gib=(2,), policies=("lru", "adaptive"), preemption_modes=("swap", "recompute"))
    (first, *_), costs = found.choices, {choice.per_million_tokens for choice in found.choices}
    assert len(costs) == 1
    assert found.recommended is not None
    assert (found.recommended.options.eviction, found.recommended.options.preemption_mode) == ("lru", "swap")
    assert first.ttft == min(choice.ttft for choice in found.choices)
    assert "3 other choices cost as much" in found.sentence()


def test_engines_share_the_requests_by_prefix_and_cost_money_all_the_time():
    one, two = sorted(
        plan(host_gib=(2,), preemption_modes=("swap",), engines=(1, 2)).choices, key=lambda it: it.engines
    )
    assert (one.engines, two.engines, two.per_hour) == (1, 2, pytest.approx(2 * one.per_hour))
    assert one.per_million_tokens == pytest.approx(
        one.per_hour * one.served.times.seconds / 3600 / (2 * len(ROWS)) * 1e6
    )
    assert np.array_equal(two.served.times.output_tokens, one.served.times.output_tokens)
    assert not np.isnan(two.served.times.last_token).any()
    assert two.served.times.hit_rate >= one.served.times.hit_rate  # a prefix stays with its engine


def test_a_prefix_and_a_conversation_stay_with_their_engine():
    rows = [TraceRequest(0.0, 9, 1, (at % 5, 10 + at % 5), 4.0) for at in range(20)]
    rows += [TraceRequest(1.0, 9, 1, session=at % 3) for at in range(9)]
    rows += [TraceRequest(2.0, 9, 1, after=(3,))]
    places = spread_by_prefix(rows, 3)
    assert sorted(index for place in places for index in place) == list(range(30))
    engine_of = {index: number for number, place in enumerate(places) for index in place}
    assert all(engine_of[at] == engine_of[at % 5] for at in range(20))
    assert all(engine_of[20 + at] == engine_of[20 + at % 3] for at in range(9))
    assert engine_of[29] == engine_of[3]
    assert [part_of(rows, place)[-1].after for place in places if 29 in place] == [(place_of(places, 3),)]
    assert max(map(len, places)) - min(map(len, places)) < 8


def test_a_system_prompt_that_all_share_does_not_lead_them_to_one_engine():
    rows = [TraceRequest(float(at), 40, 2, (1, 2, 3 + at % 50), 16.0) for at in range(400)]
    places = spread_by_prefix(rows, 4)
    assert max(map(len, places)) <= 1.2 * 100 + 8
    engines = [{rows[index].hash_ids[2] for index in place} for place in places]
    assert sum(map(len, engines)) < 3 * 50, "most prompts stay where their own block is"


def test_a_request_cannot_wait_for_conversations_of_two_engines():
    rows = [TraceRequest(0.0, 9, 1, (at,), 9.0) for at in range(2)]
    rows.append(TraceRequest(1.0, 9, 1, after=(0, 1)))
    assert spread_by_prefix(rows, 1) == [[0, 1, 2]]
    with pytest.raises(InvalidArgumentError, match="request 2 waits for several conversations"):
        spread_by_prefix(rows, 2)


def place_of(places: list[list[int]], index: int) -> int:
    return next(place.index(index) for place in places if index in place)


def test_arrivals_are_drawn_again_with_the_same_gaps():
    rng = np.random.default_rng(0)
    rows = [TraceRequest(float(time), 9, 1) for time in np.sort(rng.uniform(0, 100, 200))]
    rows += [TraceRequest(0.0, 9, 1, after=(0,), delay=float(at)) for at in range(5)]
    again, other = redraw_arrivals(rows, 1), redraw_arrivals(rows, 2)
    assert redraw_arrivals(rows, 0) == rows
    assert again == redraw_arrivals(rows, 1) != other
    before, after = (np.diff([row.arrival for row in one[:200]]) for one in (rows, again))
    assert again[0].arrival == rows[0].arrival
    assert np.sort(after) == pytest.approx(np.sort(before))
    assert not np.array_equal(before, after)
    assert sorted(row.delay for row in again[200:]) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_equal_gaps_are_the_same_arrivals_in_every_draw():
    rows = [TraceRequest(100.0 * at, 9, 1) for at in range(20)]
    assert all(redraw_arrivals(rows, seed) == rows for seed in range(5))
    assert redraw_arrivals([], 1) == []


def test_a_policy_that_wins_only_by_chance_is_not_called_cheaper():
    found = plan(host_gib=(0,), policies=("lru", "adaptive"), preemption_modes=("swap",), arrival_seeds=3)
    assert all(len(choice.costs) == len(choice.ttfts) == 3 for choice in found.choices)
    assert "for 3 seeds of arrivals" in found.sentence()
    assert "one draw" not in found.sentence()


@pytest.mark.parametrize("limit", [float("inf"), 1e-6])
def test_a_plan_of_one_draw_says_so_where_another_would_differ(limit: float):
    options: Any = {"host_gib": (0,), "preemption_modes": ("swap",), "max_ttft": limit}
    draw = " This is one draw of the arrivals, and others may differ a lot: --arrival-seeds 5 serves five."
    uneven = [replace(row, arrival=row.arrival + 1e-3 * (at % 3)) for at, row in enumerate(ROWS)]
    assert draw in make_plan(uneven, ENGINE, STEP, PRICES, **options).sentence()
    assert "one draw" not in plan(**options).sentence()  # the arrivals have one order of gaps only


def test_a_trace_without_prefixes_says_so_and_compares_no_caches():
    rows = [replace(row, hash_ids=(), hash_tokens=0.0) for row in ROWS]
    found = make_plan(rows, ENGINE, STEP, PRICES, host_gib=(0,), store_gib=(0, 4), policies=("lru", "adaptive"))
    assert len(found.choices) == 1
    assert found.sentence().startswith("The trace does not say which prompts share a beginning")
    assert "eviction and" not in found.sentence()
    assert "PrefixCaching" not in found.configuration().kv_cache


def test_hits_that_a_trace_cannot_have_are_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 17, "output_length": 2}')
    options = [str(path), "--device-blocks", "60", "--step-time", "0.01,1e-3,0,0", "--jobs", "1"]
    assert main(["plan", *options, "--host-gib", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[5].split()[3:6] == ["-", "auto", "-"]
    assert main(["replay", *options, "--policies", "lru"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[-2:] == ["-", "0"]


MODEL = {"model_type": "gpt_oss", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "hidden_size": 64}
WINDOW = {"torch_dtype": "float16", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}


def test_ranks_share_the_bytes_of_the_cache_that_is_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | WINDOW))
    options = f"--device-blocks 60 --block-size 4 --model-config {tmp_path / 'config.json'} --host-gib 1/1024 --jobs 1"
    options = options.replace("1/1024", "0.0009765625") + " --step-time 0.01,1e-3,0,0 --memory-gib 1 --weights-gib 0.1"
    pasted = {}
    for ranks in ("1", "2"):
        command = ["plan", str(write(tmp_path)), *options.split(), "--tensor-parallel-size", ranks]
        assert main([*command, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert "No store was compared" in found["recommendation"]
        pasted[ranks] = found["recommended"]
    sizes = r"(?:device_bytes=|host_bytes=|--kv-cache-memory-bytes )(\d+)"
    one, two = (re.findall(sizes, pasted[ranks]["kv_cache"] + pasted[ranks]["vllm"]) for ranks in "12")
    assert [int(size) // 2 for size in one] == [int(size) for size in two]
    assert len(one) == 3
    assert "--tensor-parallel-size 2 --block-size 4 --kv-cache-memory-bytes" in pasted["2"]["vllm"]
    host = [pasted[ranks]["kv_transfer_config"]["kv_connector_extra_config"]["host_bytes"] for ranks in "12"]
    assert host[0] == host[1]  # of all workers
    assert main([*command, "--store-gib", "0,1024"]) == 2
    assert "--store-gib is 0,1024, must be 0 for a model with windows or states" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "ranks", "per_token"),
    [
        ({"model_type": "llama", "num_key_value_heads": 2}, 1, 2 * 2 * 2 * 16 * 2),
        ({"model_type": "llama", "num_key_value_heads": 2}, 2, 2 * 2 * 2 * 16 * 2),
        ({"model_type": "llama", "num_key_value_heads": 2}, 4, 2 * 2 * 4 * 16 * 2),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}, 4, 4 * 2 * (16 + 8) * 2),
    ],
)
def test_what_every_rank_holds_takes_memory_on_each(
    shape: dict[str, object], ranks: int, per_token: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"torch_dtype": "float16"} | shape))
    options = f"--block-size 4 --model-config {tmp_path / 'config.json'} --host-gib 0 --store-gib 0 --jobs 1"
    options += f" --step-time 0.01,1e-3,0,0 --device-blocks 60 --tensor-parallel-size {ranks}"
    assert main(["plan", str(write(tmp_path)), *options.split()]) == 0
    assert f"; {per_token} bytes a token\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "replay"])
@pytest.mark.parametrize(
    ("positions", "long"),
    [
        ({"max_position_embeddings": 26}, 3),
        ({"max_position_embeddings": 27}, 1),
        ({"max_position_embeddings": 32}, 0),
        ({"max_position_embeddings": 16, "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 16}}, 0),
        ({}, 0),
    ],
)
def test_requests_longer_than_the_models_positions_are_counted(
    command: str,
    positions: dict[str, Any],
    long: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    rows = [*ROWS[:2], replace(ROWS[2], input_tokens=30, hash_ids=tuple(range(8)))]  # of 27 and 32 tokens
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL | {"torch_dtype": "float16", "model_type": "llama"} | positions))
    options = f"--block-size 4 --model-config {config} --jobs 1 --step-time 0.01,1e-3,0,0 --device-blocks 60"
    tiers = ["--host-gib", "0", "--store-gib", "0"] if command == "plan" else []
    assert main([command, str(write(tmp_path, rows)), *options.split(), *tiers]) == 0
    capsys.readouterr()
    text = f"{long} of 3 requests of {tmp_path / 'rows.jsonl'} have more tokens than max_position_embeddings of"
    assert len(caplog.messages) == bool(long)
    assert all(message.startswith(text) for message in caplog.messages)


@pytest.mark.parametrize(
    ("heads", "ranks", "message"),
    [
        ((64, 8), 3, "--tensor-parallel-size is 3, must divide the 64 attention heads"),
        ((24, 8), 3, "--tensor-parallel-size is 3, must divide the 8 heads of keys"),
        ((24, 8), 24, ""),
        ((24, 8), 4, ""),
    ],
)
def test_accelerators_that_cannot_share_the_heads_are_refused(
    heads: tuple[int, int], ranks: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"model_type": "llama"} | shape))
    options = f"--block-size 4 --model-config {tmp_path / 'config.json'} --host-gib 0 --store-gib 0 --jobs 1"
    options += f" --step-time 0.01,1e-3,0,0 --device-blocks 60 --tensor-parallel-size {ranks}"
    assert main(["plan", str(write(tmp_path)), *options.split()]) == (2 if message else 0)
    assert message in capsys.readouterr().err


def test_the_timeline_is_that_of_the_recommended_engines(tmp_path: Path):
    options = "--device-blocks 60 --block-size 4 --bytes-per-token 2684354 --host-gib 0 --store-gib 0 --jobs 1"
    command = ["plan", str(write(tmp_path)), *options.split(), "--step-time", "0.01,1e-3,0,0"]
    page, events = tmp_path / "page.html", tmp_path / "events.json"
    shown = {}
    for engines in ("1", "3", "6"):
        files = ["--html", str(page), "--trace-events", str(events)]
        assert main([*command, "--engines", engines, *files]) == 0
        tracks = [event["args"].get("name", "") for event in json.loads(events.read_text())["traceEvents"]]
        shown[engines] = sorted(name for name in tracks if str(name).endswith("steps"))
    assert shown["1"] == ["steps"]
    assert shown["3"] == [f"engine {number}: steps" for number in (1, 2, 3)]
    assert shown["6"] == [f"engine {number}: steps" for number in (1, 2, 3, 4)]
    assert "the recommended choice: the only choice; engines 1 to 4 of 6" in page.read_text()


def test_the_scheduler_to_paste_is_the_one_that_was_replayed():
    found = plan(host_gib=(2,), preemption_modes=("recompute",), arguments=" --kv-cache-dtype fp8")
    paste = found.configuration()
    assert (
        paste.scheduler
        == 'Scheduler(cache, max_num_seqs=256, max_num_batched_tokens=8192, preemption_mode="recompute")'
    )
    flags = "--block-size 4 --num-gpu-blocks-override 60 --max-num-seqs 256 --max-num-batched-tokens 8192"
    assert paste.vllm == f"vllm serve MODEL --kv-cache-dtype fp8 {flags}"


def test_refused_requests_come_first_and_choices_that_refuse_more_are_not_recommended():
    long = [TraceRequest(0.0, 400, 2, tuple(range(1000 + at, 1100 + at)), 4.0) for at in range(0, 300, 100)]
    options: Any = {"host_gib": (0,), "preemption_modes": ("swap",)}
    found = make_plan([*ROWS, *long], ENGINE, STEP, PRICES, **options)
    assert found.sentence().startswith("3 of 363 requests need more blocks than the device has; ")
    assert "Take no host memory" in found.sentence()
    assert plan(**options).sentence().startswith("Take no host memory")
    slow = make_plan([*ROWS, *long], ENGINE, STEP, PRICES, max_ttft=1e-6, **options)
    assert slow.sentence().startswith("3 of 363 requests need more blocks")
    (most,), (all_served,) = found.choices, plan(host_gib=(8,), preemption_modes=("swap",)).choices
    assert _recommend([most, all_served], float("inf")) is all_served  # though it is dearer
    marked, chosen = _marked([most, all_served], all_served)
    assert most.per_million_tokens < all_served.per_million_tokens
    assert [choice.is_best for choice in marked] == [False, True]
    assert chosen is marked[1]


def test_host_memory_beyond_the_knee_is_called_superfluous():
    found = plan(host_gib=(0, 2, 2.01), preemption_modes=("swap",))
    assert found.sentence().endswith(
        " Host memory beyond 2 GiB saves less than 5 % of the engines' busy time."
        " Host memory beyond 2 GiB saves less than 5 % of the time to first token (90 %)."
    )


def test_first_tokens_may_need_more_host_memory_than_the_busy_time():
    choices = []
    for choice in plan(host_gib=(0, 1, 2), preemption_modes=("swap",)).choices:
        (run,) = choice.runs
        wait = {0: 3.0, 1: 2.0, 2: 1.0}[round(choice.host_gib)]
        choices.append(replace(choice, runs=(replace(run, busy_seconds=9.0, first_token=run.arrival + wait),)))
    found = Plan(choices, choices[0], float("inf"))
    assert found.sentence().endswith(
        " Host memory saves less than 5 % of the engines' busy time."
        " Host memory up to 2 GiB, the most tried, still saves 5 % of the time to first token (90 %)."
    )


def test_sizes_are_rounded_in_text_and_configuration():
    (choice,) = plan(host_gib=(1.999,), store_gib=(127.999,), preemption_modes=("swap",)).choices
    found = Plan([choice], choice, float("inf"))
    assert choice.host_gib != 2
    assert "Take 1.99 GiB of host memory, a store of 128 GiB" in found.sentence()
    vllm = found.configuration().kv_transfer_config
    assert vllm is not None
    assert vllm["kv_connector_extra_config"]["host_bytes"] == "1.99GiB"


def test_each_rank_gets_its_own_part_of_the_store():
    found = plan(host_gib=(2,), store_gib=(4,), preemption_modes=("swap",), tensor_parallel_size=2)
    paste = found.configuration()
    assert 'prefix_store="file:///var/cache/blockyard-RANK?size=2GiB"' in paste.kv_cache
    assert paste.kv_transfer_config is not None
    extra = paste.kv_transfer_config["kv_connector_extra_config"]
    assert extra["prefix_store"] == "file:///var/cache/blockyard?size=4GiB"  # of all workers


def test_engines_that_cannot_keep_up_are_named():
    quick = [replace(row, arrival=row.arrival / 1000) for row in ROWS]  # 36 ms of work each 10 ms
    options: Any = {"host_gib": (0,), "preemption_modes": ("swap",)}
    for limit in (float("inf"), 0.1):
        found = make_plan(quick, ENGINE, STEP, PRICES, max_ttft=limit, **options).sentence()
        assert "One engine cannot keep up: the requests arrive within 3.59 s and need" in found
        assert found.endswith(" s of its time; try more (--engines).")
    assert "keep up" not in plan(**options).sentence()
    two = make_plan(quick, ENGINE, STEP, PRICES, engines=(2,), **options).sentence()
    assert " 2 engines cannot keep up: " in two
    assert "keep up" not in make_plan(quick, ENGINE, STEP, PRICES, engines=(10,), **options).sentence()


def write(folder: Path, rows: list[TraceRequest] = ROWS) -> Path:
    path = folder / "rows.jsonl"
    lines = [
        {"timestamp": row.arrival * 1e3, "input_length": row.input_tokens, "output_length": 2}
        | {"hash_ids": list(row.hash_ids), "block_size": 4}
        for row in rows
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
    assert found["recommended"]["kv_transfer_config"]["kv_connector"] == "BlockyardKVConnector"
    assert main([*command, "--max-ttft", "1e-6", "-q"]) == 1
    assert "vLLM reaches a store through host memory" not in outputs[0]
    command[command.index("0,2")], command[command.index("--store-gib") + 1] = "0", "2"
    assert main(command) == 0
    text = capsys.readouterr().out
    assert '"prefix_store": "file:///var/cache/blockyard?size=2GiB"' in text
    assert "vLLM reaches a store through host memory, of which the plan has none: host_bytes." in text


def test_the_command_shows_refused_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [*ROWS, replace(ROWS[-1], input_tokens=400, hash_ids=tuple(range(100)))]
    options = "--device-blocks 60 --block-size 4 --host-gib 0 --store-gib 0 --jobs 1 --step-time 0.01,1e-3,0,0"
    page = tmp_path / "page.html"
    assert main(["plan", str(write(tmp_path, rows)), *options.split(), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[4].split()[-1] == "refused"
    assert text.splitlines()[5].split()[-2:] == ["1", "*"]
    assert "1 of 361 requests need more blocks than the device has" in text
    assert "1 of 361 requests need more blocks than the device has" in page.read_text()


def test_the_reports_say_how_many_sessions_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    trace = write(tmp_path)
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    trace.write_text("\n".join(json.dumps(row | {"session": at // 20 % 18}) for at, row in enumerate(rows)))
    options = [str(trace), "--first", "80", "--device-blocks", "60", "--block-size", "4", "--jobs", "1"]
    step_time = ["--step-time", "0.01,1e-3,0,0", "--sessions"]
    for command, count in (("plan", "9"), ("replay", "5")):
        more = ["--host-gib", "0", "--store-gib", "0"] if command == "plan" else []
        assert main([command, *options, *more, *step_time, count]) == 0
        assert capsys.readouterr().out.startswith("rows.jsonl: 80 requests of 4 sessions")
        assert caplog.messages == [f"--sessions is {count}, but {trace} has 4 sessions: all run at once"]
        caplog.clear()
        assert main([command, *options, *more, *step_time, "4"]) == 0
        assert not caplog.messages
        capsys.readouterr()
    assert main(["replay", *options]) == 0
    assert capsys.readouterr().out.startswith("rows.jsonl: 80 requests of 4 sessions, ")


@pytest.mark.parametrize("command", ["plan", "replay"])
def test_the_reports_say_that_all_sessions_start_together(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace, said = tmp_path / "sessions.jsonl", "; all 3 sessions start together, see --sessions"
    options = [command, str(trace), "--device-blocks", "60", "--jobs", "1", "--step-time", "0.01,1e-3,0,0"]
    options += ["--host-gib", "0", "--store-gib", "0"] if command == "plan" else []
    for later, more, is_said in ((0, [], True), (0, ["--sessions", "2"], False), (5, [], False)):
        first = [{"timestamp": later * at, "session": at} for at in range(3)]
        next_turn = [{"delay": 10, "session": at} for at in range(3)]
        lines = [json.dumps(row | {"input_length": 20, "output_length": 2}) for row in first + next_turn]
        trace.write_text("\n".join(lines))
        assert main([*options, *more]) == 0
        head = capsys.readouterr().out.splitlines()[0]
        assert head.startswith(f"sessions.jsonl: 6 requests of 3 sessions{said * is_said}; a step has at most ")


def test_weights_and_cache_must_fit_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = "--block-size 4 --bytes-per-token 2684354 --host-gib 0 --store-gib 0 --jobs 1 --weights-gib 1"
    command = ["plan", str(write(tmp_path)), *options.split(), "--step-time", "0.01,1e-3,0,0", "--memory-gib", "2"]
    assert main(command) == 0
    assert "device of an engine: 80 blocks of 4 tokens = 320 tokens = 0.8 GiB" in capsys.readouterr().out
    assert main([*command, "--tensor-parallel-size", "2", "--device-blocks", "90"]) == 0
    two = "= 0.9 GiB, 0.45 GiB on each of 2 accelerators; 2684354 bytes a token\n"
    assert two in capsys.readouterr().out
    for option in ("device", "memory", "host"):
        size = [f"--{option}-gib", "8e10"]
        more = ["--memory-gib", "1e11"] if option == "device" else []
        assert main([*command, *more, *size]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"blockyard: --{option}-gib is 8e+10: ")
        assert error.endswith(" blocks, must be at most 2147483647\n")
    assert main([*command, "--device-gib", "0.9"]) == 2
    assert "is 1.8 GiB; the weights take 1 GiB, and 90 blocks take 0.9 GiB" in capsys.readouterr().err
    assert main([*command[:-4], "--step-time", "0.01,1e-3,0,0", "--memory-gib", "2", "--weights-gib", "2"]) == 2
    error = capsys.readouterr().err
    assert (
        "--memory-gib is 2: 0.9 of it, on one accelerator, is 1.8 GiB; the weights take 2 GiB, and the cache" in error
    )


def test_a_model_whose_weights_are_not_known_needs_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "config.json"
    shape = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    config.write_text(json.dumps(shape | {"quantization_config": {"bits": 4}}), "utf-8")
    options = f"--step-time 0.01,1e-3,0,0 --host-gib 0 --memory-gib 2 --model-config {config}"
    assert main(["plan", str(write(tmp_path)), *options.split()]) == 2
    assert capsys.readouterr().err.startswith(
        "blockyard: --memory-gib needs --weights-gib with this model: config has quantization_config, whose weights"
    )


def test_memory_that_one_owns_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = "--device-blocks 60 --block-size 4 --bytes-per-token 2684354 --host-gib 2 --jobs 1 --host-price 0"
    command = ["plan", str(write(tmp_path)), *options.split(), "--step-time", "0.01,1e-3,0,0", "--format", "json"]
    assert main([*command, "--store-gib", "0", "--device-price", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["cost_per_hour"] == 2.0


def test_the_report_and_the_page_have_prices_sizes_and_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"torch_dtype": "float16", "model_type": "llama"}))
    page = tmp_path / "page.html"
    options = f"--block-size 4 --device-blocks 60 --model-config {tmp_path / 'config.json'} --host-gib 0 --store-gib 0"
    command = ["plan", str(write(tmp_path)), *options.split(), "--step-time", "0.01,1e-3,0,0", "--jobs", "1"]
    tiers = "0.005 for a GiB of host memory, 0.0002 for a GiB of the store"
    all_of_it = "all 2 accelerators of an engine"
    for more, engine in (
        ([], "2.5 for the accelerator of an engine (the default of --device-price), "),
        (["--tensor-parallel-size", "2"], f"2.5 for {all_of_it} (the default of --device-price), "),
        (["--tensor-parallel-size", "2", "--device-price", "6"], f"6 for {all_of_it}, "),
    ):
        assert main([*command, *more, "--html", str(page)]) == 0
        text, drawn = capsys.readouterr().out, page.read_text()
        assert f"prices per hour: {engine}{tiers}\n" in text
        assert engine + tiers in drawn
        assert "60 blocks of 4 tokens = 240 tokens = " in drawn
        assert f"; model: {tmp_path / 'config.json'}" in drawn


def test_the_command_needs_the_time_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(write(tmp_path))]) == 2
    assert "plan needs step times: give --step-time or --fit" in capsys.readouterr().err


def test_replay_serves_engines_where_a_step_has_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, events = tmp_path / "page.html", tmp_path / "events.json"
    options = "--device-blocks 60 --host-blocks 0,200 --block-size 4 --policies lru --jobs 1 --step-time"
    command = ["replay", str(write(tmp_path)), *options.split(), "0.01,1e-3,0,0"]
    assert main([*command, "--html", str(page), "--trace-events", str(events)]) == 0
    text = capsys.readouterr().out
    limits = "a step has at most 256 sequences and 8192 tokens"
    assert text.startswith(f"rows.jsonl: 360 requests; {limits}; times in milliseconds\n")
    assert len(text.splitlines()) == 4 + 3  # title, columns, two engines, and the legend
    for column in text.splitlines()[1].split():
        assert column in {"mean", "p99"} or column in "\n".join(text.splitlines()[4:])
    names = {event.get("name") for event in json.loads(events.read_text())["traceEvents"]}
    assert {"prefill", "decode"} <= names
    assert "TTFT of rows.jsonl" in page.read_text()
    assert main([*command, "--preemption-modes", "drop"]) == 2
    assert "--preemption-modes has 'drop', must be one of" in capsys.readouterr().err
