"""The stub of `blockyard._core`, as installed: `rust/binding/_core.pyi` with the binding's doc comments as docstrings.

Editors show docstrings of compiled modules from their stubs. They are read from the Rust sources, so that a wheel gets
its stub before anything is compiled; a test compares them with those at run time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Final

SOURCE: Final = Path("rust/binding/_core.pyi")
STUB: Final = Path("python/blockyard/_core.pyi")
_BINDING: Final = Path("rust/binding/src")
_HEAD: Final = f"# Generated from {SOURCE}, which has no docstrings, by each build.\n"

_NAME: Final = re.compile(r'\bname = "(\w+)"|getter\((\w+)\)')
_CLASS: Final = re.compile(r"(?:pub(?:\([^)]*\))? )?(?:struct|enum) (\w+)")
_IMPL: Final = re.compile(r"impl (\w+)(?:<.*>)? \{")
_MEMBER: Final = re.compile(r"    (?:pub(?:\([^)]*\))? )?(?:(?:const )?fn (?:r#)?(\w+)|(\w+): )")
_FUNCTION: Final = re.compile(r"(?:pub(?:\([^)]*\))? )?fn (\w+)")


def write_stub(root: Path) -> None:
    """Write the stub of a source tree, if it has changed."""
    text = documented_stub(root)
    if not (root / STUB).exists() or (root / STUB).read_text(encoding="utf-8") != text:
        (root / STUB).write_text(text, encoding="utf-8")


def documented_stub(root: Path) -> str:
    """Return the stub with docstrings."""
    plain = (root / SOURCE).read_text(encoding="utf-8")
    docs = read_docs([path.read_text(encoding="utf-8") for path in sorted((root / _BINDING).rglob("*.rs"))])
    lines = plain.splitlines(keepends=True)
    for node, doc in reversed(list(_documented(ast.parse(plain), docs))):
        _insert(lines, node, doc)
    return _HEAD + "".join(lines)


def _documented(stub: ast.Module, docs: dict[str, str]) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef, str]]:
    """Yield the classes, functions and first overloads of public methods that have a doc comment, in order."""
    for node in stub.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        if node.name in docs:
            yield node, docs[node.name]
        shown = set[str]()
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef) and member.name not in shown and member.name[0] != "_":
                shown.add(member.name)
                if doc := docs.get(f"{node.name}.{member.name}"):
                    yield member, doc


def _insert(lines: list[str], node: ast.ClassDef | ast.FunctionDef, doc: str) -> None:
    """Insert a docstring into the lines of a stub."""
    column = " " * (node.col_offset + 4)
    text = doc.replace("\\", "\\\\") + ("\n" if "\n" in doc else "")
    quoted = "".join(f"{column}{line}\n" if line else "\n" for line in f'"""{text}"""'.split("\n"))
    first = node.body[0]
    if not isinstance(first, ast.Expr):
        at = min([first.lineno, *(mark.lineno for mark in getattr(first, "decorator_list", ()))]) - 1
        lines.insert(at, quoted + "\n")
    else:
        # `def f(self) -> int: ...`, perhaps over several lines: its body is the last thing in it.
        end = first.lineno
        lines[end - 1] = re.sub(r" *\.\.\.\n$", "\n", lines[end - 1])
        lines.insert(end, quoted)


def read_docs(sources: list[str]) -> dict[str, str]:
    """Return the doc comments of what Rust sources export: by a class's or function's name, or `Class.member`.

    Args:
        sources: as rustfmt lays them out. A class may have methods in several.
    """
    names: dict[str, str] = {}  # of classes, by those of their structs
    docs: dict[str, str] = {}
    for text in [*sources, *sources]:  # the second time, all classes are known
        _read(text, names, docs)
    return docs


def _read(text: str, names: dict[str, str], docs: dict[str, str]) -> None:
    owner, comment, marks = "", list[str](), ""
    for line in text.splitlines():
        if line.lstrip().startswith("///"):
            comment.append(line.lstrip()[4:])
            continue
        if line.lstrip().startswith("#[") or marks.count("[") > marks.count("]"):
            marks += line
            continue
        renamed, doc, exported = _NAME.search(marks), cleandoc("\n".join(comment)), ""
        name = renamed and (renamed[1] or renamed[2])
        if (found := _CLASS.match(line)) and "#[pyclass" in marks:
            exported = owner = names[found[1]] = name or found[1]
        elif (found := _IMPL.match(line)) and "#[pymethods]" in marks:
            owner = names.get(found[1], "")
        elif (found := _MEMBER.match(line)) and owner:
            exported = f"{owner}.{name or found[1] or found[2]}"
        elif (found := _FUNCTION.match(line)) and "#[pyfunction]" in marks:
            exported = name or found[1]
        elif line == "}":
            owner = ""
        if exported and doc:
            docs[exported] = doc
        comment, marks = [], ""
