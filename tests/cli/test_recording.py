"""`blockyard record`: runs a program, records its engines, and ends as it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from blockyard.tools import cli
from blockyard.traces import read_trace

ENGINE = """
import sys
from blockyard import BlockManager, Request, Scheduler
for engine in range(int(sys.argv[1])):
    scheduler = Scheduler(BlockManager(block_size=4, device_blocks=64, prefix_caching=True))
    for name in "ab":
        scheduler.add(Request(name, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=3))
        while scheduler.num_unfinished:
            step = scheduler.schedule()
            scheduler.complete(step.decision.ticket)
            scheduler.update(step, [9] * step.num_draws)
sys.exit(int(sys.argv[2]))
"""


def record(path: Path, *program: str, options: tuple[str, ...] = ()) -> int:
    return cli.main(["record", str(path), *options, "--", *program])


def test_it_adds_up_what_each_engine_recorded_and_ends_as_the_program_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = tmp_path / "traffic.jsonl.gz", tmp_path / "report.json"
    options = ("--format", "json", "--output", str(report))
    assert record(path, sys.executable, "-c", ENGINE, "2", "7", options=options) == 7
    found = json.loads(report.read_text())
    assert found["exit_code"] == 7
    assert [Path(one.pop("path")).name for one in found["recordings"]] == ["traffic.jsonl.gz", "traffic-2.jsonl.gz"]
    for one in found["recordings"]:
        assert one.pop("seconds") >= 0
        tokens = {"input_tokens": 16, "output_tokens": 6}
        assert one == {"requests": 2, **tokens, "blocks": 4, "repeated_blocks": 2}
    assert [list(row.hash_ids) for row in read_trace(path)] == [[0, 1]] * 2
    assert capsys.readouterr().err == ""


def test_the_text_says_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traffic.jsonl"
    assert record(path, sys.executable, "-c", ENGINE, "1", "0") == 0
    assert capsys.readouterr().out.startswith(f"{path}: 2 requests in 0.")
    assert cli.main(["record", str(path), "--", "true"]) == 2  # the file is kept
    assert "it exists" in capsys.readouterr().err
    assert len(read_trace(path)) == 2


@pytest.mark.parametrize(
    ("name", "program", "problem"),
    [
        ("missing/t.jsonl", "true", "missing is not a folder"),
        ("t.jsonl", "/no/such/program", "cannot run /no/such/program: No such file"),
    ],
)
def test_what_cannot_run_is_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, program: str, problem: str
) -> None:
    assert record(tmp_path / name, program) == 2
    assert problem in capsys.readouterr().err


def test_a_program_without_an_engine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    assert record(path, "true") == 0
    assert f"{path} has no requests: does true use Blockyard?" in capsys.readouterr().err


def test_options_of_the_program_are_the_programs(tmp_path: Path) -> None:
    found = tmp_path / "found"
    assert record(tmp_path / "t.jsonl", "sh", "-c", f'echo "$@" > {found}', "-", "--format", "x", "-q") == 0
    assert found.read_text() == "--format x -q\n"


@contextmanager
def recorded(tmp_path: Path, trap: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start to record a shell program in its own session, out of reach of `nohup`, and wait until its trap is set."""
    ready = tmp_path / "ready"
    program = f"{trap}; touch {ready}; while :; do sleep 0.05; done"
    command = [sys.executable, "-m", "blockyard", "record", str(tmp_path / "t.jsonl"), "--", "sh", "-c", program]
    command = ["env", "--default-signal=HUP", *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        until = time.monotonic() + 300
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.02)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    with recorded(tmp_path, "trap 'exit 9' TERM") as process:
        os.kill(process.pid, number)
        assert process.wait(300) == (9 if number == signal.SIGTERM else 129)


def test_a_signal_that_comes_before_the_program_runs_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)  # before the caller knows the process
        return process

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", interrupted)
        assert record(tmp_path / "t.jsonl", "sleep", "60") == 128 + signal.SIGTERM


def test_ctrl_c_is_left_to_the_program(tmp_path: Path) -> None:
    with recorded(tmp_path, "trap 'exit 5' INT") as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(300) == 5


HYBRID = """
from blockyard import Arena, BlockManager, CacheGroup, PrefixCaching, Request, Scheduler
groups = (
    CacheGroup.full_attention().with_blocks(bytes=32),
    CacheGroup.sliding_window(6).with_blocks(bytes=64),
    CacheGroup.recurrent().with_blocks(bytes=96),
)
manager = BlockManager(
    block_size=4,
    groups=groups,
    arena=Arena(device_bytes=8192),
    watermark=0.0,
    prefix_caching=PrefixCaching(eviction="lru"),
)
scheduler = Scheduler(manager, max_num_seqs=1)
for number in range(150):
    scheduler.add(Request(str(number), [number * number % 61] * 30 + [number], max_tokens=5))
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [9] * step.num_draws)
stats = manager.stats()
print(stats.hit_tokens / (stats.hit_tokens + stats.missed_tokens), stats.hit_rate)
"""


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["replay", *arguments, "--format", "json", "--jobs", "1", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["traces"][0]
    return found


def test_a_hybrid_models_recording_replays_with_its_groups(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "traffic.jsonl")
    assert record(Path(path), sys.executable, "-c", HYBRID) == 0
    rate, block_rate = map(float, capfd.readouterr().out.splitlines()[0].split())
    gib = str(8192 / (1 << 30))
    sizes = ("--block-size", "4", "--device-gib", gib, "--policies", "lru")
    found = replayed(capfd, path, *sizes, "--window", "0")
    assert found["cache_groups"][1] == "CacheGroup.sliding_window(6).with_blocks(bytes=64)"
    assert set(found["bytes_by_kind"]) == {"full_attention", "sliding_window", "recurrent"}
    (point,) = found["caches"]
    assert point["hit_rate"] == pytest.approx(rate, rel=0.1)  # GiB hold a whole number of blocks
    assert {name for one in point["classes"] for name in one["kinds"]} == set(found["bytes_by_kind"])
    assert 0.8 * 8192 < sum(one["device"] for one in point["classes"]) <= 8192
    engine = replayed(capfd, path, *sizes, "--step-time", "0.01,0,0,0", "--max-num-seqs", "1")["engines"][0]
    assert engine["hit_rate"] == pytest.approx(block_rate, rel=0.1)
    assert engine["engine"]["hybrid"]["groups"] == found["cache_groups"]
    assert len(engine["classes"]) == 3
    assert cli.main(["replay", path, "--device-blocks", "50", "--jobs", "1", "--step-time", "0.01,0,0,0"]) == 2
    assert "--block-size is 16, must be 4" in capfd.readouterr().err
    assert cli.main(["replay", path, *sizes, "--jobs", "1"]) == 0
    assert "of the bytes held at the end: full_attention " in capfd.readouterr().out


def test_a_plan_for_a_hybrid_model_has_bytes_and_no_store(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "traffic.jsonl")
    assert record(Path(path), sys.executable, "-c", HYBRID) == 0
    shared = [path, "--block-size", "4", "--device-gib", str(8192 / (1 << 30)), "--step-time", "0.01,0,0,0"]
    shared += ["--host-gib", "0", "--device-price", "1", "--host-price", "0", "--store-price", "0", "--jobs", "1"]
    assert cli.main(["plan", *shared]) == 0
    printed = capfd.readouterr().out
    assert "KVCache(layout, device_bytes=8" in printed
    assert "--kv-cache-memory-bytes 8" in printed
    assert cli.main(["plan", *shared, "--store-gib", "0,5"]) == 2
    assert "--store-gib is 0,5, must be 0 for a model with windows or states" in capfd.readouterr().err
