"""`blockyard replay`: sweeps in processes, and what the command prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.tools.cli import main
from blockyard.tools.replay.packed import PackedTrace
from blockyard.tools.replay.sweep import open_executor, read_blocks, sweep
from blockyard.traces import TraceRequest

# A loop over 12 blocks in prompts of 4: LRU finds nothing in a pool of 8, and the best policy finds some.
LOOP = [TraceRequest(0.0, 17, 1, tuple(range(4 * part, 4 * part + 4)), 4.0) for _ in range(6) for part in range(3)]
CACHES = [("lru", 8, 0), ("optimal", 8, 0), ("lru", 8, 8), ("lru", 16, 0), ("adaptive", 3, 0)]


def write(folder: Path) -> Path:
    path = folder / "loop.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 17, "output_length": 1, "hash_ids": list(row.hash_ids), "block_size": 4}
        for row in LOOP
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_sweep_counts_tokens_of_the_window_by_tier():
    shown: list[int] = []
    lru, best, tiered, large, small = sweep(PackedTrace.of(LOOP), CACHES, first=9, show=shown.append)
    assert (lru.hit_tokens, lru.total_tokens, lru.too_long) == (0, 9 * 17, 0)
    assert 0 < best.hit_tokens < large.hit_tokens == 9 * 16
    assert tiered.hit_tokens >= tiered.host_hit_tokens > 0
    assert (small.too_long, small.hit_tokens, small.hit_rate) == (18, 0, 0.0)
    assert shown == [1, 2, 3, 4, 5]


def test_processes_find_what_this_one_finds():
    trace = PackedTrace.of(LOOP)
    expected = sweep(trace, CACHES)
    with open_executor(2) as executor:
        assert executor is not None
        assert sweep(trace, CACHES, executor=executor) == expected
    with open_executor(1) as executor:
        assert executor is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5,many", "size 'many' is neither a number nor a percentage"),
        ("1.5", "size '1.5' is neither"),
        ("-1", "size '-1' is not from 0"),
        ("nan%", "size 'nan%' is not from 0"),
    ],
)
def test_sizes_that_are_none_are_named(text: str, message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        read_blocks(text, 100)


def test_the_command_prints_a_table_and_the_same_bytes_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = str(write(tmp_path))
    command = ["replay", trace, "--device-blocks", "8,100%", "--host-blocks", "0,8", "--jobs", "1", "--window", "0.5"]
    command += ["--block-size", "4", "--bytes-per-token", "1048576"]
    outputs = []
    for form in ("text", "text", "json", "json"):
        assert main([*command, "--format", form]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert outputs[2] == outputs[3]
    assert outputs[0].startswith("loop.jsonl: 18 requests, 72 blocks of 4 tokens, 12 distinct; a block of the cache")
    assert "lru finds 94.1% with 0.0781 GiB on device and host together" in outputs[0]
    assert "LRU to best: how far from lru" in outputs[0]
    (found,) = json.loads(outputs[2])["traces"]
    assert len(found["caches"]) == 10  # `optimal` has no host tier
    assert {cache["total_tokens"] for cache in found["caches"]} == {9 * 17}


def test_sizes_are_those_of_the_engines_blocks_with_and_without_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace, found = str(write(tmp_path)), {}
    for sizes in ("--device-blocks 8 --block-size 2", "--device-blocks 4", "--device-gib 1"):  # of blocks of 4 tokens
        options = f"{sizes} --policies lru --bytes-per-token 16777216 --jobs 1 --format json"
        options += "" if "--block-size" in sizes else " --block-size 4"
        assert main(["replay", trace, *options.split()]) == 0
        (cache,) = json.loads(capsys.readouterr().out)["traces"][0]["caches"]
        found[sizes] = (cache["device_blocks"], cache["hit_tokens"], cache["too_long"])
    small, same, large = found.values()
    assert (small[0], same[0], large[0]) == (8, 4, 16)
    assert small[1:] == same[1:] == (0, 18)  # 4 blocks of 4 tokens, and each prompt has 17
    assert large[1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device-blocks", "0"], "--device-blocks: size '0' is not from 1 to"),
        (["--device-blocks", "0", "--step-time", "1,0,0,0"], "--device-blocks: size '0' is not from 1 to"),
        (["--device-gib", "0"], "--device-gib: 0 GiB hold no block of 524288 bytes"),
        (["--device-gib", "8e10"], "--device-gib: 8e+10 GiB hold 163840000000000 blocks of 524288 bytes, must be at"),
        (["--block-size", "8"], "--block-size is 8, must be at most 4, the tokens of a hash id of"),
        (
            ["--block-size", "8", "--step-time", "1,0,0,0"],
            "block_size is 8, must divide 4: tokens of a hash id",
        ),
        (["--window", "1"], "argument --window: '1' is not a number of at least 0 and below 1"),
        (["--policies", "lru,clock"], "--policies has 'clock', must be one of lru, adaptive, optimal"),
        (["--policies", "priority", "--step-time", "1,0,0,0"], "--policies has 'priority', must be one of lru"),
        (["--device-blocks", "x"], "size 'x' is neither a number nor a percentage"),
    ],
)
def test_bad_usage_is_refused_with_its_reason(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    try:
        code = main(["replay", str(write(tmp_path)), "--jobs", "1", "--block-size", "4", *options])
    except SystemExit as error:  # argparse
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_trace_without_hash_ids_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 17, "output_length": 1}')
    assert main(["replay", str(path), "--jobs", "1"]) == 2
    assert (
        "no request has hash ids, so shared prefixes are unknown: give --step-time, or use" in capsys.readouterr().err
    )


def test_the_smallest_size_that_finds_the_most_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["replay", str(write(tmp_path)), "--jobs", "1", "--block-size", "4", "--bytes-per-token", "268435456"]
    assert main([*command, "--device-gib", "8,14,40,200", "--policies", "lru"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "lru finds 78.4% with 14 GiB, and larger sizes find no more."


@pytest.mark.parametrize(
    ("sizes", "capacity", "curves"),
    [
        ("--device-gib 8 --host-gib 0,6,60", ("host memory", "GiB"), {"lru": [0, 6, 60]}),
        ("--device-gib 8,14", ("device memory", "GiB"), {"lru": [8, 14]}),
        ("--device-gib 8,256 --bytes-per-token 700000", ("device memory", "GiB"), {"lru": [8, 256]}),
        (
            "--device-gib 8,14 --host-blocks 0,6",
            ("device and host memory", "GiB"),
            {"lru": [8, 14], "lru, 6 GiB of it host": [14, 20]},
        ),
        ("--device-blocks 8,1284736,8", ("device memory", "blocks"), {"lru": [8, 1284736]}),
        ("--device-blocks 8 --host-blocks 0,6", ("host memory", "blocks"), {"lru": [0, 6]}),
    ],
)
def test_hits_are_drawn_over_the_size_that_varies_in_the_unit_that_was_given(
    sizes: str,
    capacity: tuple[str, str],
    curves: dict[str, list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    drawn = {}

    def note(given: dict[str, list[tuple[float, float]]], **options: object) -> dict[str, object]:
        drawn.update(options, curves={name: [x for x, _ in points] for name, points in given.items()})
        return {"data": [], "layout": {}}

    monkeypatch.setattr("blockyard.tools.pictures.hit_rate_figure", note)
    command = ["replay", str(write(tmp_path)), "--jobs", "1", "--block-size", "4", "--bytes-per-token", "268435456"]
    assert main([*command, *sizes.split(), "--policies", "lru", "--html", str(tmp_path / "page.html")]) == 0
    assert (drawn["capacity"], drawn["curves"]) == (capacity, curves)


def test_on_ctrl_c_the_processes_of_a_replay_end_at_once_and_say_nothing(tmp_path: Path):
    sizes = ",".join(map(str, range(8, 1000)))
    options = ["--jobs", "2", "--block-size", "4", "--device-blocks", sizes, "-q", "--step-time", "1e-3,0,0,0"]
    command = [sys.executable, "-m", "blockyard", "replay", str(write(tmp_path)), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 3:  # two that replay, and one that Python has beside them
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.communicate(timeout=300) == (None, "")
    assert process.returncode == 130


def test_the_models_configuration_says_which_groups_share_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shape: dict[str, object] = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "hidden_size": 64}
    shape |= {"model_type": "gpt_oss", "torch_dtype": "float16"}
    kinds: dict[str, dict[str, object]] = {
        "full": {"layer_types": ["full_attention"] * 2},
        "window": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
    }
    found = {}
    for name, layers in kinds.items():
        config = {**shape, **layers}
        (tmp_path / "config.json").write_text(json.dumps(config))
        command = ["replay", str(write(tmp_path)), "--jobs", "1", "--block-size", "4", "--device-blocks", "40"]
        command += ["--model-config", str(tmp_path / "config.json")]
        assert main([*command, "--format", "json"]) == 0
        (found[name],) = json.loads(capsys.readouterr().out)["traces"]
        assert main(command) == 0
        kinds_of = "hits end at resume points; a request of the mean length caches in MiB: full 0.00"
        assert (kinds_of in capsys.readouterr().out) == (name == "window")
    assert (found["full"]["cache_groups"], found["full"]["bytes_by_kind"]) == ([], {})
    assert found["window"]["bytes_by_kind"] == {"full": 18 * 256, "window": 6 * 256}
    assert [cache["policy"] for cache in found["full"]["caches"]] == ["lru", "adaptive", "optimal"]
    full, window = (f"CacheGroup.{kind}.with_blocks(bytes=1024)" for kind in ("full_attention()", "sliding_window(6)"))
    assert found["window"]["cache_groups"] == [full, window]
    assert [cache["policy"] for cache in found["window"]["caches"]] == ["lru", "adaptive"]
    # Prompts of 16 tokens and one more, whose last block ends at a point: 15 of 18 are found again.
    assert [cache["hit_tokens"] for cache in found["window"]["caches"]] == [15 * 16] * 2
    assert main([*command, "--policies", "optimal"]) == 2
    assert "the best order to evict windows and states in is not known" in capsys.readouterr().err


def test_a_model_with_compressed_entries_needs_blocks_of_whole_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    csa, hca = "compressed_sparse_attention", "heavily_compressed_attention"
    config: dict[str, object] = {"model_type": "deepseek_v4", "layer_types": ["sliding_attention", csa, hca]}
    config |= {"head_dim": 16, "qk_rope_head_dim": 8, "index_head_dim": 16, "sliding_window": 8}
    command = ["replay", str(write(tmp_path)), "--jobs", "1", "--block-size", "4", "--device-blocks", "60"]
    command += ["--model-config", str(tmp_path / "config.json"), "--policies", "lru", "--format", "json"]
    for ratio, groups in ((4, 4), (8, 0)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"compress_rates": {csa: 2, hca: ratio}}))
        assert main(command) == 0
        (found,) = json.loads(capsys.readouterr().out)["traces"]
        assert [len(found["cache_groups"]), found["caches"][0]["hit_tokens"]] == [groups, 15 * 16]
        said = "blocks have 4 tokens, no multiple of the 8 of a compressed entry: all tokens count as kept"
        assert (said in caplog.messages) == (ratio == 8)


@pytest.mark.parametrize("times", [[], ["--step-time", "1,0,0,0"]])
def test_a_device_that_holds_no_state_of_the_model_holds_no_request(
    tmp_path: Path, times: list[str], capsys: pytest.CaptureFixture[str]
):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "hidden_size": 64, "dtype": "float16"}
    config |= {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
    config |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    config |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["replay", str(write(tmp_path)), "--jobs", "1", "--block-size", "4", "--device-blocks", "1,400"]
    command += ["--model-config", str(tmp_path / "config.json"), "--policies", "lru", *times]
    assert main([*command, "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    rows = [row["refused"] for row in found["engines"]] if times else [row["too_long"] for row in found["caches"]]
    assert rows == [len(LOOP), 0]
    if times:
        command = ["1" if word == "1,400" else word for word in command]
        assert main(["plan", *command[1:], "--host-gib", "0"]) == 2
        assert "device_blocks is 1, too few for any request" in capsys.readouterr().err


def test_what_a_plain_model_holds_at_the_end_is_in_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = "--jobs 1 --block-size 4 --device-blocks 16 --policies lru --bytes-per-token 100 --format json"
    held = []
    for times in ([], ["--step-time", "1,0,0,0"]):
        assert main(["replay", str(write(tmp_path)), *options.split(), *times]) == 0
        (found,) = json.loads(capsys.readouterr().out)["traces"]
        held += found["engines" if times else "caches"][0]["classes"]
    assert [(one["block_bytes"], one["device"], one["host"]) for one in held] == [(400, 12 * 400, 0)] * 2


def test_a_mode_of_preemption_is_tried_once_without_a_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = "--jobs 1 --block-size 4 --device-blocks 16 --host-blocks 0,8 --policies lru --step-time 1,0,0,0"
    command = ["replay", str(write(tmp_path)), *options.split(), "--preemption-modes", "swap,recompute"]
    assert main([*command, "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    rows = [(row["engine"]["host_blocks"], row["engine"]["preemption_mode"]) for row in found["engines"]]
    assert rows == [(0, "recompute"), (8, "swap"), (8, "recompute")]
