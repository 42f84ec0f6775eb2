"""`--html` and `--trace-events`: what is written, and what is refused before the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockyard.tools import cli

FLEET = ("simulate", "--seed", "5", "--seeds", "2", "--seconds", "1", "-q")


def test_a_simulation_writes_the_first_seed_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        files = ("--html", str(tmp_path / f"{name}.html"), "--trace-events", str(tmp_path / f"{name}.json"))
        assert cli.main([*FLEET, *files]) == 0
    for suffix in ("html", "json"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"engine 0", "engine 1", "engine 2"} <= names
    assert "<h1>Fleet of seed 5</h1>" in (tmp_path / "a.html").read_text()


def test_a_failure_is_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard.tools.sim.fleet.fleet._RECOVERY_SECONDS", -1e9)
    monkeypatch.setattr("blockyard.tools.sim.fleet.engine.SimulatedEngine.forget", lambda *_: False)
    page, trace = tmp_path / "a.html", tmp_path / "a.json"
    assert cli.main([*FLEET, "--html", str(page), "--trace-events", str(trace)]) == 1
    marks = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "i"]
    assert "broken promise" in marks
    assert "engine 0 cannot forget" in page.read_text()


@pytest.mark.parametrize("option", ["--html", "--trace-events"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("blockyard.tools.sim.run_campaign")
    assert cli.main([*FLEET, option, str(tmp_path / "absent" / "file")]) == 2
    assert "absent is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--trace-events"])
def test_a_full_disk_is_an_output_that_cannot_be_written(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FLEET, option, "/dev/full"]) == 3
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("command", [FLEET, ("demo",)])
def test_a_page_without_plotly_is_refused_before_the_run(command: tuple[str, ...], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['plotly'] = None; import blockyard.tools.cli; code = blockyard.tools.cli.main();"
        "assert 'blockyard.tools.sim' not in sys.modules and 'torch' not in sys.modules; sys.exit(code)"
    )
    run = [sys.executable, "-c", program, *command, "--html", str(tmp_path / "a.html")]
    ended = subprocess.run(run, check=False, capture_output=True, text=True)
    assert ended.stderr == 'blockyard: this command needs plotly: pip install "blockyard[html]"\n'
    assert ended.returncode == 2


def test_a_trace_needs_no_plotly(tmp_path: Path) -> None:
    program = "import sys; sys.modules['plotly'] = None; from blockyard.tools import cli; sys.exit(cli.main())"
    trace = tmp_path / "a.json"
    subprocess.run([sys.executable, "-c", program, *FLEET, "--trace-events", str(trace)], check=True)
    assert json.loads(trace.read_text())["traceEvents"]
