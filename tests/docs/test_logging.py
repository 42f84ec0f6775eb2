"""The page on logging lists every line of the code, with its level and logger."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "python" / "blockyard"
LEVELS = {"info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR"}
LOGGERS = {"_log", "_LOG"}
# The message of an error is the line.
OF_ERRORS = {("blockyard.executor", "*"): "* of * blocks with the external tier is lost: *"}


def lines_of(path: Path) -> Iterator[tuple[str, str, str]]:
    """Each line of a file: logger, level, and the text with a star for each value."""
    tree, logger = ast.parse(path.read_text(encoding="utf-8")), ""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="getLogger"), args=[ast.Constant(value=str(logger))]),
            ):
                assert name in LOGGERS, f"{path.name} calls its logger {name}"
            case ast.Assign(value=ast.Call(func=ast.Attribute(attr="getLogger"), args=[ast.Name(id="__name__")])):
                logger = "blockyard.integrations"
            case ast.Call(func=ast.Name(id="engine_log")):
                logger = "blockyard.integrations"  # below the engine's logger, and in the same table
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name(id="_log" | "_LOG") | ast.Call(func=ast.Name(id="engine_log")), attr=level
                ),
                args=[text, *_],
            ) if level in LEVELS:
                assert isinstance(text, ast.Constant), f"{path.name}:{node.lineno} logs what is no constant"
                yield logger, LEVELS[level], re.sub(r"%[sdr]", "*", text.value)


def found() -> set[tuple[str, str, str]]:
    lines = {line for path in SOURCE.rglob("*.py") for line in lines_of(path)}
    return {(logger, level, OF_ERRORS.get((logger, text), text)) for logger, level, text in lines}


def listed() -> set[tuple[str, str, str]]:
    page = (ROOT / "docs" / "operate" / "logging.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in page.splitlines() if line.startswith("|")]
    lines = set()
    for row in rows:
        logger, level, text, *_ = row if row[0].startswith("`") else ["blockyard.integrations", *row]
        if level in LEVELS.values():
            lines.add((logger.strip("`"), level, re.sub("<[a-z]+>", "*", text.strip("`"))))
    return lines


def test_the_page_lists_every_line():
    assert listed() == found()


def test_every_logger_is_below_ours():
    assert {logger.split(".")[0] for path in SOURCE.rglob("*.py") for logger, *_ in lines_of(path)} == {"blockyard"}
