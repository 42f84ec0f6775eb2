"""Checks comments, docstrings, messages and documents for wordings that make a reader stop.

python buildsystem/prose.py [FILE...]    default: every file of the repository in the areas below
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
# CONTRIBUTING.md quotes bad wordings as examples.
AREAS: Final = ("python/", "rust/", "cuda/", "buildsystem/", "docs/", "README.md", "CHANGELOG.md", "Makefile")
# Generated, or the list itself.
EXEMPT: Final = ("buildsystem/prose.py",)


class Habit(NamedTuple):
    """A wording to avoid.

    Attributes:
        pattern: a regular expression, matched without regard to case.
        example: a text it matches.
        better: what to write instead.
    """

    pattern: str
    example: str
    better: str


HABITS: Final = (
    Habit(r"\A(?:Give|Say) (?:the|whether|how|which|what|all|where)\b", "Give the first block.", "Return ..."),
    Habit(r"(?:that|what) there (?:is|are) not\b", "a block that there is not", "that does not exist"),
    Habit(r"(?:what|that) (?:is|are) no (?!longer|more\b|less\b|later\b)", "what is no text", "that is not a"),
    Habit(r"what there is\b", "in what there is", "name the thing"),
    Habit(r"what is there\b", "replaces what is there", "name the thing"),
    Habit(r"is no (?:ints?|text|list|array|slab|hit|size|multiple|block)\b", "the value is no int", "is not a"),
    Habit(r"(?:none|no \w+) twice\b", "handles, none twice", "without repeats, distinct"),
    Habit(
        r"(?:one|number|thread|call|array|row) a (?:block|sequence|prompt|key|tier|command|piece)\b",
        "one a key",
        "one per",
    ),
    Habit(r"(?:does|did|do) not come\b(?! (?:from|to|with|back|again))", "blocks that did not come", "did not arrive"),
    Habit(r"(?:goes|went|going) on without\b", "the engine goes on without it", "continues without"),
    Habit(r"(?:is|are|was|were|being) given back\b", "memory is given back", "released, freed, returned"),
    Habit(
        r"(?:which|that|it|block|row|memory) (?:is|are) to (?:have|hold|keep)\b", "which block is to hold it", "must"
    ),
    Habit(r"of (?:the caller|numpy|ours|Python)'s[.,;:]", "an array of the caller's.", "the caller's array"),
    Habit(r"(?:has|have|had|is|are|was|does) (?:it|they) not\b", "has it not", "if it does not"),
    Habit(r"(?:none|one|some) of (?:its|their|our|your) own\b", "blocks that are none of its own", "not its"),
    Habit(r"an? \w+ of (?:its|their|our) own\b", "a thread of its own", "its own thread"),
    Habit(r"so many\b", "have so many blocks", "the number: `n` blocks"),
    Habit(r"the ones that\b", "the ones that wait", "name them: the waiting requests"),
    Habit(r"lest\b", "lest it be lost", "so that it is not"),
    Habit(r"save (?:for|that|where|what)\b", "all save for the last", "except"),
    Habit(r"for want of\b", "for want of room", "for lack of"),
    Habit(r"for ever\b", "wait for ever", "forever"),
    Habit(r"any more(?=[.,;:)]|$)", "nobody waits any more.", "no longer"),
    Habit(r"of worth\b", "nothing of worth", "useful, valid"),
    Habit(r"see to it\b", "see to it that", "make sure"),
    Habit(r"asks? nobody", "it asks nobody", "makes no call"),
    Habit(r"(?:is|are|was|were) told\b", "the manager is told", "is notified, learns"),
    Habit(r"told with\b", "told with its numbers", "reported with"),
    Habit(r"(?:is|are) to be (?!\w+ing)", "blocks that are to be loaded", "must be, will be"),
    Habit(r"(?:what|whatever|that) becomes? of\b", "whatever becomes of it", "name the outcome"),
    Habit(r"lets? go of\b", "let go of all memory", "release, free"),
    Habit(r"less (?:those|that of|what|the (?!than))", "the dimensions, less that of the blocks", "without, minus"),
    Habit(r"(?:be|whether) it \w+ or (?:not|no)\b", "be it cached or not", "whether or not it is"),
    Habit(r"(?:is|are|was|were|be|been) parted\b|parted from\b", "keys are parted from values", "split, separate"),
    Habit(r"beside (?:compute|computing|computation)\b", "moves beside compute", "overlapping compute"),
    Habit(r"with an? \w+ more\b", "with a token more", "with one more token"),
    Habit(r"(?:bear|bears|borne) out\b", "as many as the drafts bear out", "accept, confirm"),
    Habit(r"(?:where|there|here)(?:of|upon|in|with)\b", "the block whereof", "of which"),
    Habit(r"(?:anew|afresh|nought|hitherto|heretofore)\b", "computed anew", "again, zero, so far"),
    Habit(r"(?:keep|keeps|kept) the books\b", "keeps the books", "tracks"),
    Habit(r"within what\b", "within what is allowed it", "within its limit"),
    Habit(r"some time, whatever\b", "True some time, whatever happens", "eventually"),
    Habit(
        r"most (?:sequences|bytes|blocks|tokens|rows|moves|slots|requests|threads) (?:in|of|to|at|that|for) (?!all)"
        r"(?<!at most \w)",
        "max_rows: most rows of a step",
        "maximum number of",
    ),
    Habit(
        r"least (?:seconds|bytes|blocks)\b(?<!at least seconds)(?<!at least bytes)(?<!at least blocks)",
        "least seconds to wait",
        "minimum",
    ),
)
_HABIT: Final = "|".join(f"(?P<h{n}>{habit.pattern})" for n, habit in enumerate(HABITS))
_PATTERN: Final = re.compile(rf"\b(?:{_HABIT})", re.IGNORECASE)
_C_TOKEN: Final = re.compile(r"'(?:\\.|[^'\\\n])'|//[^\n]*|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_COMMENT: Final = re.compile(r"^\s*(?://[/!]?|#)\s?")

Piece = list[tuple[int, str]]
"""One text that may span lines: line numbers and their parts."""


def _joined(lines: Iterable[tuple[int, str]]) -> Iterator[Piece]:
    """Join comments on successive lines into one piece; an empty one ends it."""
    piece: Piece = []
    for number, text in lines:
        body = _COMMENT.sub("", text).strip()
        if piece and (number != piece[-1][0] + 1 or not body):
            yield piece
            piece = []
        if body:
            piece.append((number, body))
    if piece:
        yield piece


def _paragraphs(text: str, first: int) -> Iterator[Piece]:
    yield from _joined((first + at, f"# {line.strip()}") for at, line in enumerate(text.splitlines()))


def _python(text: str) -> Iterator[Piece]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from _joined((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)
    parts: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            words = [value.value if isinstance(value, ast.Constant) else "X" for value in node.values]
            yield from _paragraphs("".join(map(str, words)), node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield from _paragraphs(node.value, node.lineno)


def _c_like(text: str) -> Iterator[Piece]:
    comments: Piece = []
    for token in _C_TOKEN.finditer(text):
        number = text.count("\n", 0, token.start()) + 1
        if token[0].startswith("//"):
            comments.append((number, token[0]))
        elif token[0].startswith('"'):
            yield from _paragraphs(token[0].strip('"').replace("\\\n", "\n"), number)
    yield from _joined(comments)


def _hashed(text: str) -> Iterator[Piece]:
    found = ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#"))
    yield from _joined(found)


def _markdown(text: str) -> Iterator[Piece]:
    outside = True
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        outside ^= line.lstrip().startswith("```")
        lines.append((number, f"# {line}" if outside else "#"))
    yield from _joined(lines)


READERS: Final = {".py": _python, ".rs": _c_like, ".cu": _c_like, ".cpp": _c_like, ".h": _c_like, ".md": _markdown}


def find(path: Path) -> Iterator[tuple[int, str, str]]:
    """Find the habits in a file: line, what it says, what is better."""
    text = path.read_text(encoding="utf-8")
    for piece in READERS.get(path.suffix, _hashed)(text):
        joined = " ".join(part for _, part in piece)
        for match in _PATTERN.finditer(joined):
            end = 0
            for number, part in piece:
                end += len(part) + 1
                if match.start() < end:
                    yield number, match[0], HABITS[int((match.lastgroup or "h0")[1:])].better
                    break


def files() -> list[Path]:
    """List the tracked files to check."""
    listed = subprocess.run(["git", "ls-files", *AREAS], cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S607
    known = {".toml", ".sh", "", *READERS}
    names = [name for name in listed.splitlines() if not name.startswith(EXEMPT)]
    return [ROOT / name for name in names if Path(name).suffix in known and (ROOT / name).is_file()]


def main(arguments: list[str]) -> int:
    """Print each place as `file:line: "wording": write "better"`; 1 if there is any."""
    paths = [Path(name).resolve() for name in arguments] or files()
    places = [
        f'{path.relative_to(ROOT)}:{line}: "{found}": write "{better}"'
        for path in paths
        for line, found, better in find(path)
    ]
    if places:
        print("\n".join(places))
    return int(bool(places))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
