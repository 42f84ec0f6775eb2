from __future__ import annotations

from pathlib import Path

import pytest

import prose


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("comment.py", "x = 1\n# {}\ny = 2\n"),
        ("docstring.py", '"""A module.\n\n{}\n"""\n'),
        ("message.py", 'raise ValueError("{}")\n'),
        ("comment.rs", "/// {}\nfn f() {{}}\n"),
        ("document.md", "# Title\n\n{}\n"),
        ("Makefile", "# {}\nall:\n"),
    ],
)
def test_each_habit_is_found_with_what_is_better(name: str, template: str, tmp_path: Path):
    path = tmp_path / name
    for habit in prose.HABITS:
        path.write_text(template.format(habit.example))
        assert habit.better in [better for _, _, better in prose.find(path)]


def test_a_habit_that_spans_lines_is_found_at_its_first_line(tmp_path: Path):
    path = tmp_path / "a.rs"
    path.write_text('fn f() {\n    // Waits for\n    // ever.\n    g("wait for \\\n        ever", \'"\');\n}\n')
    assert [(line, found) for line, found, _ in prose.find(path)] == [(4, "for ever"), (2, "for ever")]


def test_code_and_plain_sentences_pass(tmp_path: Path):
    path = tmp_path / "a.md"
    path.write_text(
        "A queue that waits.\n\n```\nlest = 1  # for ever\n```\n\nThere is not enough room for\n\never more.\n"
    )
    assert not list(prose.find(path))
    path = tmp_path / "a.py"
    path.write_text("lest = so_many = 1\n# The next free block.\n")
    assert not list(prose.find(path))


def test_the_command_prints_places_and_fails(capsys: pytest.CaptureFixture[str]):
    # This file quotes a habit: it waits for ever.
    assert prose.main([__file__]) == 1
    assert "tests/repo/test_prose.py:" in capsys.readouterr().out
    assert prose.main([str(prose.ROOT / "LICENSE")]) == 0
