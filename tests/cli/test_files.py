"""Files that commands write, beside those that they read: nothing is lost, and nothing is half written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blockyard.tools import cli

LINE = {"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [0, 1], "block_size": 16}
STEP = ("--step-time", "0.01,0,0,0", "--device-blocks", "8")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(LINE | {"timestamp": 100 * number}) + "\n" for number in range(4)))
    return path


def replay(*arguments: object) -> int:
    return cli.main(["replay", "--jobs", "1", *map(str, arguments)])


@pytest.mark.parametrize("option", ["--output", "--html", "--trace-events"])
def test_a_trace_is_not_overwritten_by_what_is_found_in_it(
    trace: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    before = trace.read_bytes()
    monkeypatch.chdir(trace.parent)
    assert replay(trace, *STEP, option, trace.name) == 2
    assert "cannot write trace.jsonl: the command uses this file for something else" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_one_file_is_not_written_twice(trace: Path, capsys: pytest.CaptureFixture[str]):
    page = trace.parent / "page"
    assert replay(trace, *STEP, "--html", page, "--output", page) == 2
    assert f"cannot write {page}: the command uses this file" in capsys.readouterr().err
    assert not page.exists()


def test_what_was_there_stays_until_all_is_written(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fills_the_disk(_timeline: object, path: Path) -> None:
        path.write_text("half of it")
        raise OSError(28, "No space left on device")

    events = trace.parent / "events.json"
    events.write_text("before")
    events.chmod(0o640)
    with monkeypatch.context() as patched:
        patched.setattr("blockyard.tools.timeline.Timeline.write_trace_events", fills_the_disk)
        assert replay(trace, *STEP, "--trace-events", events) == 3
    assert f"cannot write {events}: No space left on device" in capsys.readouterr().err
    assert events.read_text() == "before"
    assert replay(trace, *STEP, "--trace-events", events) == 0
    assert json.loads(events.read_text())["traceEvents"]
    assert events.stat().st_mode & 0o777 == 0o640
    assert sorted(trace.parent.iterdir()) == [events, trace]


def errors(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """What a replay says on standard error apart from its progress, which a slow machine shows."""
    return [line for line in ended.stderr.splitlines() if not re.match(r"replay( \.\.\.|: )", line)]


def test_a_name_that_the_terminal_cannot_show_is_shown_with_escapes(trace: Path):
    name = trace.with_name("Spur-\u00e4\udcff.jsonl")
    trace.rename(name)
    report = trace.with_name("report")
    command = [sys.executable, "-m", "blockyard", "replay", name, "--device-blocks", "2", "--jobs", "1"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for options in ((), ("--html", trace.with_name("page"), *STEP), ("--format", "json"), ("--output", report)):
        ended = subprocess.run([*command, *options], env=environment, check=False, capture_output=True, text=True)
        assert (ended.returncode, errors(ended)) == (0, [])
        assert options[:1] == ("--output",) or "Spur-" in ended.stdout
    assert report.read_text(encoding="utf-8").startswith("Spur-\u00e4\\udcff.jsonl: 4 requests")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace-events", "events.json"), "--trace-events has no effect without --step-time or --fit\n"),
        (("--sessions", 2), "--sessions has no effect without --step-time or --fit\n"),
        (
            ("--policies", "lru,optimal", "--host-blocks", "9"),
            "--policies is 'lru,optimal', which has optimal: --host-blocks is 9, must include 0 with it",
        ),
        (
            ("--policies", "lru,optimal", *STEP),
            "--policies is 'lru,optimal', which has optimal: engines do not know the future, give lru, adaptive",
        ),
        (("--device-blocks", "1.5"), "--device-blocks: size '1.5' is neither a number nor a percentage"),
        (("--host-blocks", "-1"), "--host-blocks: size '-1' is not from 0"),
    ],
)
def test_options_that_make_no_replay_are_refused(
    trace: Path, arguments: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert replay(trace, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_cannot_be_replayed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert replay(path) == 2
    assert f"{path}: no request has hash ids, so shared prefixes are unknown" in capsys.readouterr().err


def test_a_plan_for_a_device_that_holds_no_request_recommends_nothing(trace: Path, capsys: pytest.CaptureFixture[str]):
    command = ["plan", str(trace), "--jobs", "1", "--step-time", "0.01,0,0,0", "--device-blocks", "2"]
    assert cli.main(command) == 2
    too_few = "device_blocks is 2, the shortest request needs 3\n"
    assert capsys.readouterr().err == f"blockyard: {too_few}"
    for size in ("--device-gib", "0.004"), ("--memory-gib", "1", "--weights-gib", "0.896"):
        assert cli.main([*command[:-2], *size]) == 2
        assert capsys.readouterr().err == f"blockyard: {size[0]} is {size[1]}: {too_few}"


def test_a_prompt_of_two_thousand_million_tokens_takes_no_memory_where_it_does_not_fit(trace: Path):
    trace.write_text(json.dumps(LINE | {"input_length": 2**31 - 1, "hash_ids": []}) + "\n" + json.dumps(LINE) + "\n")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30)); "
    program = limit + "from blockyard.tools import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", program, "replay", str(trace), "--jobs", "1", *STEP]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, errors(ended)) == (0, [])
    assert "1 requests need more blocks than the device has" in ended.stdout
