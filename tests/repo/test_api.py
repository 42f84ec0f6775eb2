"""The public API: docstrings at run time, how many names there are, and the page that lists them."""

import ast
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import blockyard
from blockyard import BlockManager, KVCache, KVLayout, Pairs, PrefixCaching, Request, Scheduler, StepDecision
from blockyard.engine import ops

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "buildsystem"))
public_names = import_module("public_names")

STUB = ROOT / "python" / "blockyard" / "_core.pyi"
MODULES = public_names.modules()
CLASSES = sorted(
    {
        value
        for name in MODULES
        for value in (getattr(import_module(name), public) for public in import_module(name).__all__)
        if inspect.isclass(value)
    },
    key=lambda value: (value.__module__, value.__name__),
)


def test_the_stub_has_the_docstrings_of_the_core():
    # The build reads them from the Rust sources; here they are those that `help` shows.
    core, stub, at_run_time = import_module("blockyard._core"), {}, {}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            stub[node.name] = ast.get_docstring(node)
            at_run_time[node.name] = public_names.docstring(target := getattr(core, node.name)) or None
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    stub.setdefault(f"{node.name}.{member.name}", ast.get_docstring(member))
                    doc = public_names.docstring(vars(target)[member.name]) or None
                    at_run_time[f"{node.name}.{member.name}"] = doc
    assert stub == at_run_time
    assert sum(doc is not None for doc in stub.values()) > 250


def test_the_page_lists_each_public_name_once_and_each_integration():
    page, first = public_names.PAGE.read_text(encoding="utf-8"), {}
    for module, names in public_names.listed().items():
        section = page.partition(f"## `{module}`")[2].partition("\n## ")[0]
        for name in public_names.public_names(module):
            target = getattr(import_module(module), name)
            is_first = first.setdefault((id(target), name), module) == module
            listed = is_first and (inspect.isclass(target) or inspect.isroutine(target))
            assert (name in names) == listed, f"{module}.{name}"
            assert listed or name == "__version__" or f"`{name}`" in section, f"{module}.{name}"
        assert set(names) <= set(public_names.public_names(module)), module
    assert set(ops.OPS) <= set(public_names.listed()["blockyard.engine.ops"])
    folder = Path(blockyard.__file__).parent / "integrations"
    modules = {path.stem for path in folder.iterdir() if path.stem[0] != "_"} - {
        "compat",
        "options",
        "sampling",
    }  # of the others
    assert not [module for module in modules if not re.search(rf"`blockyard\.integrations\.{module}[`.]", page)]


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
    fields = public_names.described_fields(cls)
    members = dict(public_names.members_of(cls))
    missing = [name for name, value in members.items() if not public_names.docstring(value) and name not in fields]
    assert not missing or getattr(cls, "_is_protocol", False)


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


def test_each_public_attribute_of_what_users_hold_is_documented(tmp_path: Path):
    missing = set()
    for value in held_by_users(tmp_path):
        described = {name for cls in type(value).__mro__ for name in public_names.described_fields(cls)}
        described |= {name for cls in type(value).__mro__ for name, _ in public_names.members_of(cls)}
        public = {member for member in dir(value) if not member.startswith("_")}
        public -= set(dir(tuple)) if isinstance(value, tuple) else set()
        missing |= {f"{type(value).__name__}.{member}" for member in public - described}
    assert not missing


def test_each_main_class_has_an_example():
    listed = reversed(public_names.listed().items())  # of two with one name the first counts
    classes = {name: getattr(import_module(module), name) for module, names in listed for name in names}
    main = [name for name in blockyard.__all__ if inspect.isclass(getattr(blockyard, name))]
    main += ["Defrag", "Pins", "Pool", "Prefix", "HashedPrompt", "PrefixStore", "OffloadManager", "EventBatch"]
    main += ["GroupedLayout", "BlockMover", "ElasticCache", "HostPool", "ParallelExecutor", "ThreadedStore", "Codec"]
    main += ["NaiveAllocator", "PrefixCachingAllocator", "BlockObserver", "DefragPolicy", "Generator", "PagedModel"]
    main += ["ReferenceManager", "ReferencePrefixCache", "EventReplay", "FailingStore"]
    docs = {name: public_names.docstring(classes[name]) for name in main if name != "BlockyardError"}
    assert [name for name, doc in docs.items() if ">>> " not in doc] == []


def documented(node: ast.FunctionDef) -> bool:
    doc = ast.get_docstring(node)
    arguments = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return doc is not None and all(f"{name}:" in doc or f"`{name}`" in doc for name in arguments if name != "self")


def test_each_method_of_a_manager_and_its_facets_explains_its_arguments():
    stub = ast.parse(STUB.read_text(encoding="utf-8"))
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
