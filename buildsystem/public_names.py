"""The public names, as `docs/reference/api.md` lists them by module, and the members of classes that are documented."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "api.md"
FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)


@cache
def listed() -> dict[str, list[str]]:
    """Return the names that have a page, by the module that users import them from."""
    found: dict[str, list[str]] = {}
    module = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith(".. currentmodule:: "):
            module = line.split()[-1]
            found[module] = []
        elif re.fullmatch(r"   \w+", line):
            found[module].append(line.strip())
    return found


def modules() -> list[str]:
    """Return the modules that users import; engines also call the others, by interfaces of their own."""
    return [name for name in listed() if "integrations" not in name or name.endswith(".transformers")]


def public_names(module: str) -> list[str]:
    """Return a module's `__all__` without importing it."""
    path = ROOT.joinpath("python", *module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise SystemExit(f"{module} has no __all__")


@cache
def listed_classes() -> frozenset[type]:
    """Return the classes that have a page."""
    found = (getattr(import_module(module), name) for module, names in listed().items() for name in names)
    return frozenset(value for value in found if inspect.isclass(value))


def members_of(target: type) -> Iterator[tuple[str, object]]:
    """Yield the public members that a class defines, or inherits from our classes that have no page."""
    seen: set[str] = set()
    for owner in target.__mro__:
        if owner.__module__.partition(".")[0] != "blockyard" or (owner is not target and owner in listed_classes()):
            continue
        for name, value in vars(owner).items():
            described = inspect.isroutine(value) or isinstance(value, property | staticmethod | classmethod)
            described |= type(value).__name__ in {"getset_descriptor", "member_descriptor", "cached_property"}
            is_hidden = name.startswith(("_", "test_"))  # the names of tests are sentences
            is_hidden |= any(mark.startswith("hypothesis_stateful_") for mark in getattr(value, "__dict__", ()))
            if is_hidden or name in seen or not (described or type(value) is target):
                continue
            seen.add(name)
            yield name, value


def described_fields(target: type) -> set[str]:
    """Return the attributes that a class's docstring describes."""
    is_record = hasattr(target, "__dataclass_fields__") or hasattr(target, "_fields")
    sections = "Attributes|Args" if is_record else "Attributes"
    parts = re.findall(rf"^(?:{sections}):\n((?:(?: .*)?\n?)*)", docstring(target), re.MULTILINE)
    return {name for part in parts for name in FIELD.findall(part)}


def docstring(target: object) -> str:
    """Return the docstring of a class, function or descriptor, without indentation."""
    described = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    return inspect.cleandoc(getattr(described, "__doc__", None) or "")
