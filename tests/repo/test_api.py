"""The public API: docstrings at run time, how many names there are, and the page that lists them."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import blockyard
from blockyard import BlockManager, KVCache, KVLayout, Pairs, PrefixCaching, Request, Scheduler, StepDecision
from blockyard.engine import ops

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_page_is_up_to_date():
    script = [sys.executable, str(ROOT / "buildsystem" / "write_api.py"), "--check"]
    finished = subprocess.run(script, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_the_stub_has_the_docstrings_of_the_core():
    # The build reads them from the Rust sources; here they are those that `help` shows.
    core, stub, at_run_time = import_module("blockyard._core"), {}, {}
    for node in ast.parse(write_api.STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            stub[node.name] = ast.get_docstring(node)
            at_run_time[node.name] = write_api.docstring(target := getattr(core, node.name)) or None
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    stub.setdefault(f"{node.name}.{member.name}", ast.get_docstring(member))
                    doc = write_api.docstring(vars(target)[member.name]) or None
                    at_run_time[f"{node.name}.{member.name}"] = doc
    assert stub == at_run_time
    assert sum(doc is not None for doc in stub.values()) > 250


def test_the_page_lists_the_copy_ops_and_each_integration():
    page = write_api.PAGE.read_text(encoding="utf-8")
    for name in ops.OPS:
        assert f"### `{name}`\n\n```text\n{name}(" in page
    folder = Path(blockyard.__file__).parent / "integrations"
    modules = {path.stem for path in folder.iterdir() if path.stem[0] != "_"}
    helpers = {"compat", "sampling"}  # of the others
    listed = {name.split(".")[2] for name in (*MODULES, *write_api.ADAPTERS) if ".integrations." in name}
    assert listed == modules - helpers
    for module in write_api.ADAPTERS:
        for name in write_api.public_names(module):
            assert write_api.defined(module, name) is not None, f"{module}.{name}"
            assert f"### `{name}" in page


def test_a_manager_has_few_names():
    assert len([name for name in dir(BlockManager) if not name.startswith("_")]) <= 33


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
    fields = write_api.described_fields(cls)
    missing = [name for name, value in write_api.members_of(cls) if not write_api.summary(value) and name not in fields]
    assert not missing or getattr(cls, "_is_protocol", False)


def entries() -> dict[str, str]:
    """Give the page's entries by the names in their headings."""
    parts = re.split(r"^### `", write_api.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {re.match(r"[\w.]+", part)[0]: part.partition("\n## ")[0] for part in parts}


def held_by_users(folder: Path) -> list[object]:
    """Give what a program holds that serves one request and uses each tier, store and facet."""
    layout = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    cache = KVCache(
        layout,
        device_blocks=16,
        max_device_blocks=32,
        host_blocks=16,
        swap_store=f"file://{folder}/swap?size=1MiB",
        prefix_caching=PrefixCaching(max_events=100),
        prefix_store=f"file://{folder}/prefixes?size=1MiB",
        namespace=b"model",
    )
    with cache:
        manager, scheduler = cache.manager, Scheduler(cache)
        scheduler.add(request := Request("a", list(range(9)), max_tokens=1))
        draws, finished = [], []
        while not finished:
            with scheduler.step() as step:
                draws += step.draws()
            finished = scheduler.update(step, [1] * step.num_draws)
        scheduler.drain()
        sequence = manager.allocate(range(9))
        with cache.step() as cache_step:
            pass
        ended = cache_step.ended + cache.drain()
        decision = StepDecision(99, [("swap_out", Pairs("device", "host", [(0, 0)]))])
        cache.executor.submit(decision)
        done = cache.executor.wait(decision.ticket)
        read = cache.swap_store.wait(cache.swap_store.submit_read(np.array([0])))
        transfer = cache.engine.submit("swap_out", [(0, 0)])
        facets = [manager.prefix, manager.pins, manager.defrag, manager.pool()]
        answers = [manager.stats(), manager.can_allocate(4), manager.defrag.fragmentation()]
        answers += [manager.prefix.lookup([1, 2]), manager.prefix.hash([1, 2]), manager.prefix.take_events()]
        answers += [manager.defrag.run("dense", 0), cache.resize(8), cache.give_back(), iter(manager.pool())]
        prefixes = [cache.prefix_store, cache.prefix_store.stats(), cache.prefix_store.prefetch(list(range(50, 60)))]
        parts = [
            manager,
            cache.engine,
            cache.executor,
            cache.elastic,
            scheduler,
            scheduler.stats(),
            cache.swap_store.stats(),
        ]
        counters = [*cache.engine.counters.values(), *draws, *finished, *ended]
        steps = [sequence, request, step, cache_step, decision, done, read, transfer]
        return [cache, layout, Pairs("device", "host", []), *facets, *answers, *prefixes, *parts, *counters, *steps]


def test_the_page_lists_each_public_attribute_of_what_users_hold(tmp_path: Path):
    page, missing = entries(), set()
    for value in held_by_users(tmp_path):
        name = type(value).__name__
        listed = set(re.findall(r"^- `(\w+)", page[name], re.MULTILINE))
        if base := re.search(r"Has the members of `(\w+)`", page[name]):
            listed |= set(re.findall(r"^- `(\w+)", page[base[1]], re.MULTILINE))
        public = {member for member in dir(value) if not member.startswith("_")}
        public -= set(dir(tuple)) if isinstance(value, tuple) else set()
        missing |= {f"{name}.{member}" for member in public - listed}
    assert not missing


def test_the_page_has_each_name_once_and_says_what_each_is():
    page = write_api.PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^### `([\w.]+).*\n\n(?:```text\n(?:.*\n)+?```\n\n)?(.*)", page, re.MULTILINE)
    assert [name for name, count in Counter(name for name, _ in headings).items() if count > 1] == []
    assert [name for name, text in headings if not text or text.startswith(("-", "#", "Built-in"))] == []
    assert not re.findall(r"^- `[^`]*`$", page, re.MULTILINE)
    in_modules = {name for module in MODULES for name in import_module(module).__all__}
    assert in_modules - {"__version__"} <= {name for name, _ in headings}


def test_each_main_class_has_an_example_on_the_page():
    page = entries()
    main = [
        name for name in blockyard.__all__ if inspect.isclass(getattr(blockyard, name)) and name != "BlockyardError"
    ]
    main += ["Defrag", "Pins", "Pool", "Prefix", "HashedPrompt", "PrefixStore", "OffloadManager", "EventBatch"]
    main += ["GroupedLayout", "BlockMover", "ElasticCache", "HostPool", "ParallelExecutor", "ThreadedStore", "Codec"]
    main += ["NaiveAllocator", "PrefixCachingAllocator", "BlockObserver", "DefragPolicy", "Generator", "PagedModel"]
    main += ["ReferenceManager", "ReferencePrefixCache", "EventReplay", "FailingStore"]
    assert [name for name in main if "```python" not in page[name]] == []


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
