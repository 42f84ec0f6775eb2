"""Benchmarks import what is there, and check what they claim: they need a release build, so no other test runs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"
SCRIPTS = sorted(path for path in BENCHES.rglob("*.py"))
ENDS = {"SystemExit", "sys.exit", "RuntimeError", "AssertionError"}
CHECKS_NOTHING = {
    "bench_defrag.py": "counts moves, gaps and runs",
    "bench_elastic.py": "times calls of a driver that does nothing",
    "bench_metrics.py": "times steps and scrapes",
    "bench_moves.py": "counts moves, runs and lost blocks; `BlockManager.check` raises",
    "bench_policies.py": "counts each policy's hits",
    "bench_replay.py": "times replays, and prints the hits that they count",
    "bench_retention.py": "prints the hits that a replay counts",
    "bench_scheduler.py": "times steps",
}
"""Benchmarks that move no bytes and claim no hit, and what they print instead."""


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


def is_check(node: ast.AST) -> bool:
    """Whether it is an assertion, or stops the script with a message."""
    ends = isinstance(node, ast.Call) and ast.unparse(node.func) in ENDS
    says = ends and node.args and isinstance(node.args[0], ast.JoinedStr | ast.Constant)
    return bool(says) or isinstance(node, ast.Assert)


def has_check(path: Path) -> bool:
    return any(map(is_check, ast.walk(ast.parse(path.read_text()))))


def test_a_benchmark_checks_what_it_claims_or_claims_only_what_it_counts():
    """A figure of a hit, a copy or bytes without its assertion is a rumour: a new benchmark has one, or is listed."""
    unchecked = {path.name for path in SCRIPTS if path.name.startswith("bench_") and not has_check(path)}
    assert unchecked == set(CHECKS_NOTHING)
