"""The page on errors has every class, messages that the code has, and every reason of a miss."""

import re
from pathlib import Path

from blockyard import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")


def sources() -> str:
    files = [*(ROOT / "python").rglob("*.py"), *(ROOT / "rust").glob("*/src/**/*.rs")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    # A message that is written in two strings is one.
    return re.sub(r"\"\s*(?:f?\")", "", text)


def rows(section: str) -> list[list[str]]:
    lines = (line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| message"))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_has_each_error_class_once():
    listed = re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(errors.__all__)


def test_the_messages_of_the_page_are_those_of_the_code():
    code, quoted = sources(), 0
    for name, section in re.findall(r"^### `(\w+)`$(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL):
        messages = [cells[0].strip("`") for cells in rows(section) if cells[0].startswith("`")]
        messages += re.findall(r"^`([^`]*\.\.\.[^`]*)`:", section, re.MULTILINE)
        for message in messages:
            missing = [part for part in message.split("...") if part.strip() and part not in code]
            assert not missing, f"{name}: {message!r}"
            quoted += 1
    assert quoted > 20


def test_the_page_has_the_reasons_of_a_miss():
    section = PAGE.split("## Why a block was a miss")[1].split("\n## ")[0]
    listed = {reason for cells in rows(section) for reason in re.findall(r"`(\w+)`", cells[0])}
    miss = (ROOT / "rust" / "store" / "src" / "miss.rs").read_text(encoding="utf-8")
    assert set(re.findall(r'=> "(\w+)"', miss)) <= listed
    code = sources()
    assert not [reason for reason in listed if f'"{reason}"' not in code]
