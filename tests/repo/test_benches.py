"""Benchmarks import what is there: they need a release build, so no other test runs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"
SCRIPTS = sorted(path for path in BENCHES.rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each module and name that a script imports by `from`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def defined(path: Path) -> set[str]:
    """The names at the top of a script."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        else:
            found.update(name.id for name in ast.walk(node) if isinstance(name, ast.Name))
            found.update(alias.asname or alias.name for alias in getattr(node, "names", ()))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(BENCHES)))
def test_what_a_benchmark_imports_is_there(script: Path):
    for module, name in imported(script):
        folders = (script.parent, BENCHES)
        sibling = next((path for folder in folders if (path := folder / f"{module}.py").exists()), None)
        if sibling is not None:
            assert name in defined(sibling), f"{module}.{name}"
        elif module.split(".")[0] == "blockyard":
            found = import_module(module)
            assert hasattr(found, name) or import_module(f"{module}.{name}"), f"{module}.{name}"
