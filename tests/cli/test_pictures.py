"""`--html` and `--trace-events`: what is written, and what is refused before the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockyard.tools import cli

FLEET = ("simulate", "--seed", "5", "--seeds", "2", "--seconds", "1", "-q")
STEP = ("--step-time", "0.01,1e-3,0,0", "--device-blocks", "8", "--jobs", "1", "-q")


@pytest.fixture
def replay(tmp_path: Path) -> tuple[str, ...]:
    row = {"timestamp": 0, "input_length": 64, "output_length": 3, "hash_ids": [1, 2, 3, 4], "block_size": 16}
    (tmp_path / "trace.jsonl").write_text(json.dumps(row), encoding="utf-8")
    return ("replay", str(tmp_path / "trace.jsonl"), *STEP)


def test_a_simulation_writes_the_first_seed_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert cli.main([*FLEET, "--trace-events", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"engine 0", "engine 1", "engine 2"} <= names


def test_a_failure_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard.tools.sim.fleet.fleet._RECOVERY_SECONDS", -1e9)
    monkeypatch.setattr("blockyard.tools.sim.fleet.engine.SimulatedEngine.forget", lambda *_: False)
    trace = tmp_path / "a.json"
    assert cli.main([*FLEET, "--trace-events", str(trace)]) == 1
    marks = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "i"]
    assert "broken promise" in marks


@pytest.mark.parametrize("option", ["--html", "--trace-events"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    option: str,
    replay: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("blockyard.tools.cli.replays.serve_all")
    assert cli.main([*replay, option, str(tmp_path / "absent" / "file")]) == 2
    assert "absent is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--trace-events"])
def test_a_full_disk_is_an_output_that_cannot_be_written(
    option: str, replay: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*replay, option, "/dev/full"]) == 3
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err


def test_a_page_without_plotly_is_refused_before_the_run(replay: tuple[str, ...], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['plotly'] = None; from blockyard.tools.cli import main, replays;"
        "del replays.read_trace; sys.exit(main())"
    )
    run = [sys.executable, "-c", program, *replay, "--html", str(tmp_path / "a.html")]
    ended = subprocess.run(run, check=False, capture_output=True, text=True)
    assert ended.stderr == 'blockyard: this command needs plotly: pip install "blockyard[html]"\n'
    assert ended.returncode == 2


def test_a_trace_needs_no_plotly(replay: tuple[str, ...], tmp_path: Path) -> None:
    program = "import sys; sys.modules['plotly'] = None; from blockyard.tools import cli; sys.exit(cli.main())"
    trace = tmp_path / "a.json"
    subprocess.run([sys.executable, "-c", program, *replay, "--trace-events", str(trace)], check=True)
    assert json.loads(trace.read_text())["traceEvents"]
