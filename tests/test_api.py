"""The public API: docstrings at run time, how many names there are, and the page that lists them."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import blockyard
from blockyard import BlockManager
from blockyard.engine import ops

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "buildsystem"))
write_api = import_module("write_api")

MODULES = list(write_api.MODULES)
CLASSES = sorted(
    {
        value
        for name in MODULES
        for value in (getattr(import_module(name), public) for public in import_module(name).__all__)
        if inspect.isclass(value)
    },
    key=lambda value: (value.__module__, value.__name__),
)


def test_the_page_and_the_stub_are_up_to_date():
    script = [sys.executable, str(ROOT / "buildsystem" / "write_api.py"), "--check"]
    finished = subprocess.run(script, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_the_page_lists_the_copy_ops_and_each_integration():
    page = write_api.PAGE.read_text(encoding="utf-8")
    for name in ops.OPS:
        assert f"### `{name}(" in page
    folder = Path(blockyard.__file__).parent / "integrations"
    modules = {path.stem for path in folder.iterdir() if path.stem[0] != "_"}
    helpers = {"fit", "objects", "sampling"}  # of the others
    listed = {name.split(".")[2] for name in (*MODULES, *write_api.ADAPTERS) if ".integrations." in name}
    assert listed == modules - helpers
    for module in write_api.ADAPTERS:
        for name in write_api.public_names(module):
            assert write_api.defined(module, name) is not None, f"{module}.{name}"
            assert f"### `{name}" in page


def test_a_manager_has_few_names():
    assert len([name for name in dir(BlockManager) if not name.startswith("_")]) <= 32


def test_the_package_offers_few_names():
    assert len(blockyard.__all__) <= 16
    for name in blockyard.__all__:
        assert getattr(blockyard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'NaiveAllocator'"):
        blockyard.NaiveAllocator  # noqa: B018


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_each_public_member_has_a_docstring_at_run_time(cls: type):
    assert inspect.getdoc(cls)
    # The fields of a dataclass are explained by the class.
    fields = write_api.docstring(cls)
    members = write_api.members_of(cls)
    missing = [name for name, value in members if not write_api.summary(value) and f"{name}:" not in fields]
    assert not missing


def documented(node: ast.FunctionDef) -> bool:
    doc = ast.get_docstring(node)
    arguments = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return doc is not None and all(f"{name}:" in doc or f"`{name}`" in doc for name in arguments if name != "self")


def test_each_method_of_a_manager_and_its_facets_explains_its_arguments():
    stub = ast.parse(write_api.STUB.read_text(encoding="utf-8"))
    owners = {"BlockManager", "Prefix", "Pins", "Defrag", "Pool"}
    methods = {
        f"{owner.name}.{method.name}": method
        for owner in stub.body
        if isinstance(owner, ast.ClassDef) and owner.name in owners
        for method in reversed(owner.body)
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    }
    assert len(methods) > 50
    assert not [name for name, method in methods.items() if not documented(method)]
