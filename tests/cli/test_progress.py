"""Progress: a bar on a terminal, plain lines elsewhere, nothing with `quiet`; never on standard output."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time

import pytest

from blockyard import progress
from blockyard.progress import show_progress


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_quick_command_shows_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress("paged run", quiet=False) as view:
        view.step(1, 2)
    assert capfd.readouterr() == ("", "")


def test_a_line_says_what_runs_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.001)
    # `readouterr` may drop what another thread writes meanwhile.
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    until = time.monotonic() + 60
    with show_progress("loading the model", quiet=False):
        while not shown.getvalue().endswith("\n") and time.monotonic() < until:
            time.sleep(0.001)
    assert shown.getvalue() == "loading the model ...\n"


def test_further_lines_say_how_far_it_is_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    with show_progress("paged run", quiet=False) as view:
        for done in range(12):
            view.step(done, 48, "7 running" if done < 8 else "")
            clock.now += 2.5
    assert capfd.readouterr() == ("", "paged run: 4 of 48, 7 running\npaged run: 8 of 48\n")


def test_a_line_that_nobody_reads_stops_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        with show_progress("paged run", quiet=False) as view:
            view.step(1, 2)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), broken.fileno())


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("rich", [False, True])
def test_a_terminal_gets_a_bar_that_goes_away_if_rich_is_there(*, quiet: bool, rich: bool) -> None:
    program = (
        "import sys, time\n"
        + ("" if rich else "import importlib.util\nimportlib.util.find_spec = lambda name: None\n")
        + "from blockyard.progress import show_progress\n"
        f"with show_progress('paged run', quiet={quiet}) as view:\n"
        "    view.step(3, 4, 'steps 9')\n"
        "    print('{}')\n"
    )
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, stderr=inner, env=environment
    )
    os.close(inner)
    shown = os.read(outer, 1 << 16).decode() if rich and not quiet else ""
    if not shown:
        os.set_blocking(outer, False)
        with pytest.raises(OSError, match=r"temporarily unavailable|Input/output"):
            os.read(outer, 1)
    os.close(outer)
    assert ended.stdout == b"{}\n"
    assert ("3/4" in shown and "steps 9" in shown) == (rich and not quiet)
    assert shown.endswith("\x1b[2K") or not shown
