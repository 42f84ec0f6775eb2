"""Every Python code block of README.md and docs/, and every example in a docstring, runs.

The blocks of a tutorial are one program.
"""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "rust").glob("*/README.md"))]
REGISTERED = "blockyard.stores.opening._registered"
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SOURCE = ROOT / "python"


def code_blocks() -> list[object]:
    programs = []
    for document in DOCUMENTS:
        blocks = list(BLOCK.finditer(document.read_text(encoding="utf-8")))
        in_one = document.parent.name == "tutorials" and bool(blocks)
        for program in [blocks] if in_one else [[block] for block in blocks]:
            name = f"{document.relative_to(ROOT)}:{line_of(program[0])}"
            programs.append(pytest.param(document, program, id=name))
    return programs


def line_of(match: re.Match[str]) -> int:
    return match.string.count("\n", 0, match.start()) + 2


def modules_with_examples() -> list[str]:
    paths = (path for path in (SOURCE / "blockyard").rglob("*.py") if ">>>" in path.read_text(encoding="utf-8"))
    names = (path.relative_to(SOURCE).with_suffix("").parts for path in sorted(paths))
    return ["blockyard._core", *(".".join(parts).removesuffix(".__init__") for parts in names)]


@pytest.mark.parametrize(("document", "blocks"), code_blocks())
def test_code_block_runs_and_prints_the_numbers_that_its_comments_show(
    document: Path,
    blocks: list[re.Match[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(REGISTERED, {})
    # Blank lines in front make tracebacks name the document's own lines.
    source = ""
    for block in blocks:
        source += "\n" * (line_of(block) - 1 - source.count("\n")) + block[1]
    exec(compile(source, str(document), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert document.name == "README.md" or [said for said in comments(source) if not is_printed(said, printed)] == []


def comments(source: str) -> list[str]:
    """The lines that comments behind calls of `print` show, without explanations."""
    found = re.findall(r"^ *print\(.*\) +# (.*)", source, re.MULTILINE)
    return [line for said in found for line in (said if said[0] == "{" else said.partition(": ")[0]).split(", then ")]


def is_printed(said: str, printed: str) -> bool:
    """Whether a printed line has the numbers of a comment, in its order."""
    lines = [iter(re.findall(r"\d+", line)) for line in printed.splitlines()]
    return any(all(number in line for number in re.findall(r"\d+", said)) for line in lines)


@pytest.mark.parametrize("module", modules_with_examples())
def test_docstring_examples_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(REGISTERED, {})
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    outcome = doctest.testmod(importlib.import_module(module), optionflags=options)
    assert outcome.attempted
    assert not outcome.failed
