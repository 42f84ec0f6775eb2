"""The examples that a newcomer reads first run, and stay short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "most_lines", "last"),
    [
        ("own_scheduler", 60, r"50 sequences, \d+ swap ins, 2000 tokens compared"),
        ("custom_store", 40, r"100 blocks came back from SQLite"),
    ],
)
def test_an_example_is_short_and_runs(name: str, most_lines: int, last: str):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most_lines
    command = [sys.executable, "-W", "error", str(path)]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert re.fullmatch(last, finished.stdout.strip())
