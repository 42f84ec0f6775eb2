"""What the README says: its loop finds its prompts again, its commands exist, its figures were measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def readme(repo: Path) -> str:
    return (repo / "README.md").read_text(encoding="utf-8")


def test_the_second_run_of_the_loop_finds_what_the_first_one_stored(readme: str, tmp_path: Path):
    program = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[1]
    assert "/tmp/blockyard-prefixes" in program
    program = program.replace("/tmp/blockyard-prefixes", str(tmp_path / "store"))
    said = [subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True) for _ in "12"]
    expected = [int(count) for count in re.search(r"# (\d+), and (\d+) when you run it again", program).groups()]
    assert [int(run.stdout.split()[0]) for run in said] == expected
    assert expected[1] > expected[0] == 0


def test_each_command_and_extra_exists(readme: str, repo: Path):
    makefile = (repo / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^    make (\S+)", readme, re.MULTILINE)
    assert commands
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
    project = (repo / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"(?<=\.whl\)\[)\w+|(?<=`)\w+(?=` adds )", readme)
    assert extras == ["torch", "torch", "all"]
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of the first table behind a title, its head first."""
    lines = text[text.index(title) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = lines[first : first + next(i for i, line in enumerate(lines[first:]) if not line.startswith("|"))]
    return [[cell.strip("* ") for cell in line.strip("|").split("|")] for line in table if not line.startswith("|--")]


def test_each_share_is_the_best_of_its_row_in_the_table_that_its_benchmark_asserts(readme: str, repo: Path):
    measured = (repo / "docs" / "benchmarks" / "engines.md").read_text(encoding="utf-8")
    head, *rows = cells(measured, "## What vLLM finds in its host memory")
    best = {
        system: {(row[0], row[1]): max(row[at] for at, name in enumerate(head) if begin in name) for row in rows}
        for system, begin in (("vLLM", "vLLM"), ("LMCache", "LMCache"), ("[Blockyard]", "BlockyardKVConnector"))
    }
    _, *shares = cells(readme, "## What you get instead")
    assert len(shares) == 3
    for name, *found in shares:
        of = next(best[system] for system in best if name.startswith(system))
        hosts = [(workload, host) for workload in ("agent sessions", "documents") for host in ("1 x", "2 x", "4 x")]
        assert [f"0{share}" for share in found] == [of[host] for host in hosts]


def test_each_time_is_in_the_table_of_its_benchmark(readme: str, repo: Path):
    measured = (repo / "docs" / "benchmarks" / "engines.md").read_text(encoding="utf-8")
    times = re.findall(r"\b([\d,]+) ms", readme)
    assert len(times) == 3
    assert [time for time in times if not re.search(rf"^\| [a-zA-Z, ]+ \| {time} \|", measured, re.MULTILINE)] == []
