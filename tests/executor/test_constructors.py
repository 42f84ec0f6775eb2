"""Each object that a public constructor takes is tried as nothing, closed, of the wrong use or size, and twice."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_stores import KeyedStore, MemoryStore

from blockyard import (
    BlockManager,
    CacheEngine,
    CacheGroup,
    KVCache,
    KVLayout,
    Request,
    Scheduler,
    StepExecutor,
    open_store,
)
from blockyard.engine import ElasticCache
from blockyard.errors import BlockyardError, StepOrderError
from blockyard.executor import ParallelExecutor
from blockyard.layout import ArenaLayout, GroupedLayout, LayerField
from blockyard.prefix_store import PrefixStore
from blockyard.scheduler import PreemptionCosts
from blockyard.stores import ExternalStore
from blockyard.stores.striped import StripedStore
from blockyard.traces import TraceRecorder
from public_names import modules

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
OTHER = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
ARENA = ArenaLayout(((CacheGroup.full_attention(), (LayerField(0, "keys", (8,), "float32"),)),), block_size=4)
SIZE = LAYOUT.bytes_per_block
CACHED: dict[str, Any] = {"device_blocks": 8, "prefix_caching": True, "namespace": b"n"}


class World:
    """Makes objects, and closes them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = ExitStack()
        self.made = 0

    def store(self, use: Any = "swap", size: int = SIZE, kind: str = "file") -> ExternalStore:
        self.made += 1
        place = f"file://{self.folder}/{self.made}" if kind == "file" else f"memory://world{self.made}"
        url = f"{place}?size=1MiB"
        return self.stack.enter_context(open_store(url, bytes_per_block=size, use=use))

    def closed(self, made: Any) -> Any:
        made.close()
        return made

    def tensors(self, blocks: int = 8) -> list[torch.Tensor]:
        return [torch.zeros(2, blocks, 4, 1, 8) for _ in range(2)]

    def engine(self, blocks: int = 8, host: int = 0) -> CacheEngine:
        return self.stack.enter_context(CacheEngine(LAYOUT, device_blocks=blocks, host_blocks=host))

    def cache(self, **options: Any) -> KVCache:
        return self.stack.enter_context(KVCache(LAYOUT, **{"device_blocks": 8} | options))

    def manager(self, **options: Any) -> BlockManager:
        return BlockManager(block_size=4, device_blocks=8, **options)

    def recorder(self, block_size: int = 4) -> TraceRecorder:
        self.made += 1
        return self.stack.enter_context(TraceRecorder(self.folder / f"{self.made}.jsonl", block_size=block_size))

    def busy(self) -> KVCache:
        """Return a cache whose scheduler, which lives as long, has a request."""
        cache = self.cache()
        scheduler = Scheduler(cache)
        scheduler.add(Request("a", [1, 2], 2))
        self.stack.callback(scheduler.abort, "a")
        return cache


def twice(make: Callable[[Any], object], thing: Any) -> object:
    """Use a thing, and use it again while the first user lives."""
    first = make(thing)
    with pytest.raises(BlockyardError) as refused:
        make(thing)
    getattr(first, "close", lambda: None)()
    raise refused.value


def swap(store: Any) -> KVCache:
    return KVCache(LAYOUT, device_blocks=8, swap_store=store)


def prefix(store: Any) -> KVCache:
    return KVCache(LAYOUT, prefix_store=store, **CACHED)


def over(world: World, store: Any, **options: Any) -> PrefixStore:
    return PrefixStore(world.manager(prefix_caching=True), world.engine(), store, **options)


def stores(name: str, use: str, make: Callable[[World, Any], object]) -> Iterator[tuple[str, Any, str]]:
    """The wrong stores for one parameter, of a native store and of one in Python."""
    other = {"swap": "prefix", "prefix": "swap"}[use]
    yield "nothing", lambda w: make(w, 5), f"{name} is 5, must be an ExternalStore"
    for kind in ("file", "memory"):
        yield f"of the wrong use, {kind}", lambda w, k=kind: make(w, w.store(other, kind=k)), f"opened with use='{use}'"
        yield f"closed, {kind}", lambda w, k=kind: make(w, w.closed(w.store(use, kind=k))), f"^{name} is .*is closed"
        wrong = f"^{name} has blocks of {2 * SIZE} bytes, must have {SIZE}"
        yield f"of another size, {kind}", lambda w, k=kind: make(w, w.store(use, 2 * SIZE, k)), wrong
        again = f"^{name} is .*which another cache, executor or prefix store uses"
        yield f"twice, {kind}", lambda w, k=kind: twice(lambda store: make(w, store), w.store(use, kind=k)), again


CASES: dict[tuple[str, str], list[tuple[str, Callable[[World], object], str]]] = {
    ("KVCache", "layout"): [
        ("nothing", lambda w: KVCache(None, device_blocks=8), "KVLayout, GroupedLayout or ArenaLayout")
    ],
    ("KVCache", "tensors"): [
        ("one tensor", lambda w: KVCache(LAYOUT, tensors=w.tensors()[0]), r"tensors is one tensor \[2, 8, 4, 1, 8\]"),
        ("none", lambda w: KVCache(LAYOUT, tensors=[]), "got 0 tensors"),
        ("of another size", lambda w: KVCache(OTHER, tensors=w.tensors()), "got 2 tensors"),
        (
            "twice",
            lambda w: twice(lambda t: KVCache(LAYOUT, tensors=t), w.tensors()),
            "tensors share blocks with anoth",
        ),
        ("another's", lambda w: KVCache(LAYOUT, tensors=w.cache().engine.tensors), "tensors share blocks with another"),
    ],
    ("KVCache", "swap_store"): [*stores("swap_store", "swap", lambda _, store: swap(store))],
    ("KVCache", "prefix_store"): [
        *stores("prefix_store", "prefix", lambda _, store: prefix(store)),
        (
            "as both",
            lambda w: twice(lambda s: w.cache(swap_store=s), KeyedStore(bytes_per_block=SIZE)),
            "swap_store is",
        ),
        ("swap only, plug-in", lambda w: prefix(MemoryStore(bytes_per_block=SIZE)), "is for use 'swap'"),
    ],
    ("StepExecutor", "engine"): [
        ("nothing", lambda w: StepExecutor(None), "engine is None, must be a CacheEngine"),
        ("closed", lambda w: StepExecutor(w.closed(w.engine())), "the cache engine is closed"),
    ],
    ("StepExecutor", "store"): [*stores("store", "swap", lambda w, store: StepExecutor(w.engine(), store))],
    ("PrefixStore", "manager"): [
        (
            "nothing",
            lambda w: PrefixStore(None, w.engine(), w.store("prefix")),
            "manager is None, must be a BlockManager",
        ),
        ("without a prefix cache", lambda w: PrefixStore(w.manager(), w.engine(), w.store("prefix")), "prefix"),
        (
            "twice",
            lambda w: twice(lambda m: PrefixStore(m, w.engine(), w.store("prefix")), w.manager(prefix_caching=True)),
            "manager is .*which has a prefix store",
        ),
    ],
    ("PrefixStore", "engine"): [
        (
            "closed",
            lambda w: PrefixStore(w.manager(prefix_caching=True), w.closed(w.engine()), w.store("prefix")),
            "the cache engine is closed",
        ),
        ("nothing", lambda w: PrefixStore(w.manager(prefix_caching=True), 3, w.store("prefix")), "engine is 3"),
    ],
    ("PrefixStore", "store"): [*stores("store", "prefix", over)],
    ("ParallelExecutor", "executors"): [
        ("nothing", lambda w: ParallelExecutor([None]), r"executors\[0\] is None, must be an Executor"),
        ("none", lambda w: ParallelExecutor([]), "executors is empty"),
        ("twice", lambda w: ParallelExecutor([StepExecutor(w.engine())] * 2), r"executors\[1\] is executors\[0\]"),
        (
            "of two sizes",
            lambda w: ParallelExecutor([StepExecutor(w.engine(n)) for n in (8, 9)]),
            "different numbers of",
        ),
        ("closed", lambda w: ParallelExecutor([w.cache().executor, w.closed(w.cache()).executor]), "engine is closed"),
    ],
    ("Scheduler", "cache"): [
        ("nothing", lambda w: Scheduler(None), "cache is None, must be a KVCache or a BlockManager"),
        ("closed", lambda w: Scheduler(w.closed(w.cache())), "the cache is closed"),
        ("twice", lambda w: Scheduler(w.busy()), "cache has a Scheduler with 1 unfinished requests"),
        (
            "twice, as a manager",
            lambda w: Scheduler(w.busy().manager),
            "cache has a Scheduler with 1 unfinished requests",
        ),
    ],
    ("Scheduler", "executor"): [
        ("nothing", lambda w: Scheduler(w.cache(), executor=5), "executor is 5, must be an Executor"),
        (
            "too small",
            lambda w: Scheduler(w.cache(), executor=StepExecutor(w.engine(7))),
            "has 7 device blocks, must hav",
        ),
        ("closed", lambda w: Scheduler(w.cache(), executor=w.closed(w.cache()).executor), "the cache engine is closed"),
        ("without a cache", lambda w: Scheduler(w.manager(), executor=w.cache().executor), "needs a KVCache"),
    ],
    ("Scheduler", "recorder"): [
        ("nothing", lambda w: Scheduler(w.manager(), recorder="trace"), "recorder is 'trace', must be a TraceRecorder"),
        ("closed", lambda w: Scheduler(w.manager(), recorder=w.closed(w.recorder())), "recorder is .*which has ended"),
        (
            "of another size",
            lambda w: Scheduler(w.manager(), recorder=w.recorder(8)),
            "recorder has block_size 8, must",
        ),
    ],
    ("CacheEngine", "layout"): [("nothing", lambda w: CacheEngine(None, device_blocks=8), "layout is None, must be a")],
    ("CacheEngine", "manager"): [
        ("nothing", lambda w: CacheEngine(ARENA), "layout is an ArenaLayout: give its manager"),
        ("something else", lambda w: CacheEngine(ARENA, manager=5), "manager is 5, must be the BlockManager of"),
        ("of other blocks", lambda w: CacheEngine(ARENA, manager=w.manager()), "the manager has page classes with"),
        ("for equal blocks", lambda w: CacheEngine(LAYOUT, manager=w.manager()), "manager is given, must be None"),
    ],
    ("CacheEngine", "tensors"): [
        ("one tensor", lambda w: CacheEngine(LAYOUT, tensors=w.tensors()[0]), "tensors is one tensor"),
        ("of another size", lambda w: CacheEngine(LAYOUT, tensors=w.tensors(7), device_blocks=8), "device_blocks is 8"),
    ],
    ("ElasticCache", "layout"): [
        ("nothing", lambda w: ElasticCache(None, num_blocks=1, max_blocks=2), "layout is None")
    ],
    ("GroupedLayout", "groups"): [("nothing", lambda w: GroupedLayout((("full", None),)), "layout is None")],
    ("StripedStore", "parts"): [
        ("none", lambda w: StripedStore([None], is_keyed=False), "parts is .* must have an open store"),
        ("twice", lambda w: StripedStore([w.store()] * 2, is_keyed=False), "parts is .*and each only once"),
        ("of the wrong use", lambda w: StripedStore([w.store("prefix")], is_keyed=False), "a part is .*use='swap'"),
        (
            "of two sizes",
            lambda w: StripedStore([w.store(), w.store(size=64)], is_keyed=False),
            "a part has blocks of 64",
        ),
        ("closed", lambda w: StripedStore([w.closed(w.store())], is_keyed=False), "a part is .*is closed"),
    ],
}
FREE = {
    ("CacheEngine", "streams"): "tests and simulations write their own",
    ("ElasticCache", "memory"): "tests write their own",
    ("CacheStep", "cache"): "made by KVCache.step",
    ("Generator", "swap_store"): "given to KVCache",
    ("Generator", "wrap_executor"): "a function",
    ("Prefetch", "load"): "made by PrefixStore.prefetch",
    ("Step", "loop"): "made by Scheduler.step",
    ("Transfer", "memory"): "made by CacheEngine.submit",
}
NUMBERS = [
    (lambda w: prefix_with(w, prefetch_timeout_base=None), "prefetch_timeout_base is None, must be a number"),
    (lambda w: prefix_with(w, prefetch_timeout_base="1"), "prefetch_timeout_base is '1', must be a number"),
    (
        lambda w: over(w, w.store("prefix"), prefetch_timeout_base=True),
        "prefetch_timeout_base is True, must be a number",
    ),
    (lambda w: PreemptionCosts("a", 1), "swap_block is 'a', must be a number"),
    (lambda w: PreemptionCosts(1, None), "prefill_token is None, must be a number"),
    (lambda w: StepExecutor(w.engine(), max_staging=1.5), "max_staging is 1.5, must be an int"),
]


def prefix_with(world: World, **options: Any) -> KVCache:
    return KVCache(LAYOUT, prefix_store=world.store("prefix"), **CACHED, **options)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    with made.stack:
        yield made


ROWS = [(owner, name, *row) for (owner, name), rows in CASES.items() for row in rows]


@pytest.mark.parametrize(("owner", "name", "way", "make", "message"), ROWS, ids=[" ".join(row[:3]) for row in ROWS])
def test_a_wrong_object_is_refused_by_name(
    owner: str, name: str, way: str, make: Callable[[World], object], message: str, world: World
):
    with pytest.raises(BlockyardError, match=message):
        make(world)


@pytest.mark.parametrize(("make", "message"), NUMBERS, ids=[row[1] for row in NUMBERS])
def test_a_wrong_number_is_refused_by_name(make: Callable[[World], object], message: str, world: World):
    with pytest.raises(BlockyardError, match=message):
        make(world)


def test_the_table_has_each_object_that_a_public_constructor_takes():
    kinds = {"ExternalStore", "Tensor", "KVLayout", "GroupedLayout", "BlockLayout", "BlockManager", "CacheEngine"}
    kinds |= {"Cache", "KVCache", "Executor", "TraceRecorder", "PrefixStore", "Scheduler", "Streams", "Memory"}
    checked = [name for name in modules() if not re.search(r"testing|integrations|metrics|tracing", name)]
    found = set()
    for name in checked:
        module = import_module(name)
        for public in [getattr(module, name) for name in module.__all__]:
            if inspect.isclass(public) and "__init__" in vars(public):
                for parameter in inspect.signature(public.__init__).parameters.values():
                    if kinds & set(re.findall(r"\w+", str(parameter.annotation))):
                        found.add((public.__name__, parameter.name))
    assert found <= CASES.keys() | FREE.keys()
    assert len(found) > 10


def test_a_scheduler_replaces_an_idle_one_which_then_refuses_requests(world: World):
    cache = world.cache()
    first = Scheduler(cache)
    second = Scheduler(cache)
    with pytest.raises(StepOrderError, match="another Scheduler was created over this one's cache"):
        first.add(Request("a", [1, 2], 2))
    second.add(Request("a", [1, 2], 2))
    with second.step() as step:
        sampled = [7] * step.num_draws
    second.update(step, sampled)
    second.abort("a")
    del second
    Scheduler(cache)


def test_a_store_and_tensors_are_free_again_once_their_user_is_gone(world: World):
    store, tensors = world.store(), world.tensors()
    executor = StepExecutor(world.engine(), store)
    executor.close()
    executor = StepExecutor(world.engine(), store)
    del executor
    StepExecutor(world.engine(), store).close()
    for _ in range(2):
        with KVCache(LAYOUT, tensors=tensors):
            pass
    with KVCache(LAYOUT, tensors=tensors), KVCache(LAYOUT, tensors=world.tensors()):
        pass


def test_caches_may_share_tensors_whose_blocks_lie_apart(world: World):
    whole = world.tensors(16)
    parts = [[tensor[:, :8] for tensor in whole], [tensor[:, 8:] for tensor in whole]]
    with KVCache(LAYOUT, tensors=parts[0]):
        with KVCache(LAYOUT, tensors=parts[1]):
            pass
        with pytest.raises(BlockyardError, match="tensors share blocks"):
            KVCache(LAYOUT, tensors=[tensor[:, 7:] for tensor in whole])
