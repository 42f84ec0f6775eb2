"""Calls of the public Python API with valid arguments, one for each callable that takes an integer, a word or ids.

`tests/repo/test_arguments.py` replaces one argument at a time: an integer by NumPy's integers, a word by another word.
A callable without a call here, or without a reason in `LEFT_OUT`, is an error.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from blockyard import (
    BlockManager,
    CacheEngine,
    CacheGroup,
    KVCache,
    KVLayout,
    Pairs,
    Request,
    Scheduler,
    StepDecision,
    StepExecutor,
)
from blockyard.engine import ElasticCache, HostPool, unequal_pairs
from blockyard.engine.ops import copy_blocks, exchange_blocks, move_blocks, swap_blocks
from blockyard.integrations.sampling import SamplingParams
from blockyard.layout import ArenaLayout, GroupedLayout, LayerField, probe_kind
from blockyard.scheduler import DefragPolicy
from blockyard.stores import Codec, open_store, store_namespace
from blockyard.testing import Config, ReferenceManager, ReferencePrefixCache, SimulatedMemory
from blockyard.testing.machines import reference_tokens
from blockyard.traces import TraceRecorder

SIZES: dict[str, Any] = {"num_layers": 2, "block_size": 4, "num_kv_heads": 1, "head_size": 8}
LAYOUT = KVLayout("kv_first", dtype="float32", **SIZES)
PAIRS = np.array([[0, 1]])
FOLDER = tempfile.TemporaryDirectory()
_numbers = count()


class Call(NamedTuple):
    """A call that returns what can be compared, and arguments to replace one at a time.

    `alone`: each is given without the others, which exclude it.
    """

    call: Callable[..., Any]
    arguments: dict[str, Any]
    alone: bool = False

    def __call__(self, name: str, value: object) -> Any:
        return self.call(**({} if self.alone else self.arguments) | {name: value})


def folder() -> Path:
    path = Path(FOLDER.name) / str(next(_numbers))
    path.mkdir()
    return path


def engine(**options: Any) -> Any:
    made = CacheEngine(LAYOUT, **{"device_blocks": 8, "host_blocks": 8} | options)
    try:
        made.submit("swap_out", [(0, 1)]).wait()
        made.submit("swap_in", [(1, 2)], prefetch=True).wait()
        return made.num_blocks("device"), made.num_blocks("host"), made.read("host", [1]).shape
    finally:
        made.close()


def of_engine(name: str) -> Callable[..., Any]:
    """Call a method of an engine with keyword arguments."""

    def call(**options: Any) -> Any:
        with CacheEngine(LAYOUT, device_blocks=8, host_blocks=8) as made:
            found = getattr(made, name)(**options)
            ended = found.wait() if name.startswith("submit") else found
            return repr(ended)

    return call


def cache(**options: Any) -> Any:
    if "host_bytes" in options:
        options["host_blocks"] = None
    store = None
    if "swap_store_bytes" in options or "external_blocks" in options:
        store = f"file://{folder()}" + ("" if "swap_store_bytes" in options else "?size=1MiB")
    kept: dict[str, Any] = {}
    if "prefix_store_bytes" in options:
        kept = {"prefix_store": f"file://{folder()}", "prefix_caching": True, "namespace": b"model"}
    with KVCache(LAYOUT, **{"device_blocks": 8, "host_blocks": 4, "swap_store": store} | kept | options) as made:
        return [made.manager.pool(tier).num_blocks for tier in ("device", "host", "external")], made.layout


def resized(**options: Any) -> Any:
    with KVCache(LAYOUT, device_blocks=4, max_device_blocks=8) as made:
        return repr(made.resize(**options)), made.manager.pool().num_blocks


def layout(**options: Any) -> Any:
    made = KVLayout("kv_first", dtype="float32", **SIZES | options)
    return made, made.fingerprint(), made.bytes_per_block, made.tensor_shape(3)


def served(options: dict[str, Any], **fields: Any) -> Any:
    """Serve a request, and one that shares its prompt; returns their tokens and all counters."""
    manager = BlockManager(block_size=4, device_blocks=24, watermark=0, prefix_caching=True)
    scheduler = Scheduler(manager, **options)
    draft = {} if "num_lookahead_tokens" not in options else {"num_lookahead_tokens": options["num_lookahead_tokens"]}
    for name in "ab":
        scheduler.add(Request(name, **{"prompt": range(9), "max_tokens": 5, **fields}))
    done = []
    while scheduler.num_unfinished:
        step = scheduler.schedule(**draft)
        scheduler.complete(step.decision.ticket)
        done += scheduler.update(step, [7] * step.num_draws)
    return (
        [(each.outputs, repr(each.request.max_tokens), each.request.n) for each in done],
        scheduler.stats(),
        manager.stats(),
    )


def executed(name: str) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        made = CacheEngine(LAYOUT, device_blocks=8, host_blocks=8)
        try:
            executor = StepExecutor(made, **{key: value for key, value in options.items() if not name})
            executor.submit(StepDecision(3, [("swap_out", Pairs("device", "host", PAIRS))]))
            found = getattr(executor, name)(**options) if name else None
            return repr(found), [] if name in {"wait", "collect"} else repr(executor.wait(3))
        finally:
            made.close()

    return call


def elastic(**options: Any) -> Any:
    with ElasticCache(LAYOUT, **{"num_blocks": 4, "max_blocks": 8} | options) as made:
        return made.resize(6), made.num_blocks, made.committed_bytes


def host_pool(**options: Any) -> Any:
    waited = options.pop("wait", 3)
    pool = HostPool(**{"num_blocks": 4, "bytes_per_block": 100} | options)
    try:
        pool.wait(waited)
        return pool.rows.shape
    finally:
        pool.close()


def opened(**options: Any) -> Any:
    with open_store(f"file://{folder()}?size=1MiB", **{"bytes_per_block": 512} | options) as store:
        rows = np.ones((1, 512), np.uint8)
        return (
            store.bytes_per_block,
            store.num_slots,
            store.wait(store.submit_write(np.zeros(1, np.int64), rows)).ok.tolist(),
        )


def recorded(**options: Any) -> Any:
    made = TraceRecorder(folder() / "trace.jsonl", **{"block_size": 4} | options)
    made.close()
    return made.block_size


def reference(name: str, *, tokens: int = 9) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        model = ReferenceManager(block_size=4, device_blocks=8, host_blocks=8, watermark=0)
        (sequence,) = model.allocate(counts=[tokens])
        model.complete(model.take_decision().ticket)
        given = {"sequence": sequence, **options} if name in {"fork", "slot_mapping", "truncate"} else options
        if name in {"append", "can_append", "can_swap_in", "swap_out", "can_swap_out"}:
            given = {"sequences": [sequence], **options}
        if name in {"can_swap_in", "swap_in"}:
            model.swap_out([sequence], "host")
            model.complete(model.take_decision().ticket)
            given = {"sequences": [sequence], **options}
        return repr(getattr(model, name)(**given)), model.num_tokens(sequence)

    return call


def op(function: Callable[..., Any], *, sides: int) -> Callable[..., Any]:
    def call(pairs: Any) -> Any:
        views = [[torch.arange(32, dtype=torch.uint8).view(8, 4).clone()] for _ in range(sides)]
        function(*views, pairs)
        return [view[0].tolist() for view in views]

    return call


def scheduled(**options: Any) -> Any:
    return served(options)


def step_of_cache(**options: Any) -> Any:
    with KVCache(LAYOUT, device_blocks=8) as made:
        scheduler = Scheduler(made, num_lookahead_tokens=2)
        scheduler.add(Request("a", [1, 2, 3], max_tokens=4))
        with scheduler.step(**options) as step:
            pass
        return step.rows


def plain(token_ids: Any) -> Any:
    scheduler = Scheduler(BlockManager(block_size=4, device_blocks=8), overlap_io=True)
    for name in "ab":
        scheduler.add(Request(name, [1, 2, 3], max_tokens=4))
    step = scheduler.schedule()
    scheduler.complete(step.decision.ticket)
    scheduler.update(step, [7, 7])
    return scheduler.schedule_plain(token_ids, [1.0, 2.0, 3.0]), repr(scheduler.stats())


def with_lookahead(num_lookahead_tokens: Any) -> Any:
    scheduler = Scheduler(BlockManager(block_size=4, device_blocks=8), num_lookahead_tokens=4)
    scheduler.add(Request("a", [1, 2, 3], max_tokens=4))
    return scheduler.schedule(num_lookahead_tokens=num_lookahead_tokens).rows


def memory(name: str, **fixed: Any) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        made = SimulatedMemory(Config(4, 8, 8))
        made.write(np.arange(4), np.arange(4))
        return repr(getattr(made, name)(**fixed, **options)), repr(made.read([0], 4))

    return call


def prefix_cache(name: str, *before: Any) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        made = ReferencePrefixCache(2)
        made.publish([1, 2, 3, 4])
        return getattr(made, name)(*before, **options), repr(made)

    return call


CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
FIELD = LayerField(0, "keys", (2, 8), "float16")
STATE = LayerField(1, "state", (3,), "float32", is_state=True)
ARENA = ArenaLayout(((CacheGroup.full_attention(), (FIELD,)), (CacheGroup.recurrent(), (STATE,))), 4)


def with_field(**options: Any) -> Any:
    field = LayerField(name="keys", shape=(1,), **options)
    return ArenaLayout(((CacheGroup.full_attention(), (field,)),), 4).fields


TAGS = {"kind": "swap_out", "tier": "device", "on_full": "wait"}
CALLS: dict[str, Call] = {
    "CacheEngine": Call(
        engine,
        {
            "device_blocks": 100,
            "host_blocks": 100,
            "max_outstanding": 1 << 20,
            "max_ahead": 1 << 20,
            "on_host_failure": "raise",
        },
    ),
    "CacheEngine.num_blocks": Call(of_engine("num_blocks"), {"tier": "device", "page_class": 0}),
    "CacheEngine.of_class": Call(lambda **options: of_engine("of_class")(**options)[:40], {"page_class": 0}),
    "CacheEngine.read": Call(of_engine("read"), {"tier": "device", "blocks": np.array([1, 2])}),
    "CacheEngine.run": Call(of_engine("run"), {"kind": "copy", "tier": "device", "pairs": PAIRS}),
    "CacheEngine.submit": Call(of_engine("submit"), {**TAGS, "pairs": PAIRS}),
    "CacheEngine.submit_read": Call(
        of_engine("submit_read"), {"tier": "device", "on_full": "wait", "blocks": np.array([1, 2])}
    ),
    "CacheEngine.submit_write": Call(
        lambda **options: of_engine("submit_write")(rows=np.ones((2, LAYOUT.bytes_per_block), np.uint8), **options),
        {"tier": "device", "on_full": "wait", "blocks": np.array([1, 2])},
    ),
    "CacheEngine.write": Call(
        lambda **options: of_engine("write")(rows=np.ones((2, LAYOUT.bytes_per_block), np.uint8), **options),
        {"tier": "device", "blocks": np.array([1, 2])},
    ),
    "KVCache": Call(
        cache,
        {
            "device_blocks": 100,
            "host_blocks": 100,
            "host_bytes": 1 << 16,
            "external_blocks": 5,
            "swap_store_bytes": 1 << 20,
            "prefix_store_bytes": 1 << 20,
            "max_staging": 1 << 20,
            "max_device_blocks": 120,
            "max_device_bytes": 1 << 20,
            "prefix_writes": "through",
            "reuse_order": "lowest",
        },
        alone=True,
    ),
    "KVCache.resize": Call(resized, {"blocks": 8, "device_bytes": 8 * LAYOUT.bytes_per_block}, alone=True),
    "KVLayout": Call(layout, {**SIZES, "itemsize": 4, "tensors_per_layer": 1, "split": 0, "x": 0}),
    "KVLayout.from_config": Call(
        partial(KVLayout.from_config, CONFIG),
        {"block_size": 16},
    ),
    "KVLayout.from_tensors": Call(
        lambda **options: KVLayout.from_tensors([torch.zeros(100, 3)], kind="slots dim", **options),
        {"block_size": 4, "num_kv_heads": 1, "tensors_per_layer": 1},
    ),
    "KVLayout.planes": Call(LAYOUT.planes, {"index": 1}),
    "KVLayout.tensor_shape": Call(LAYOUT.tensor_shape, {"num_blocks": 100}),
    "KVLayout.tensor_shapes": Call(LAYOUT.tensor_shapes, {"num_blocks": 100}),
    "ArenaLayout": Call(lambda **options: ArenaLayout(ARENA.groups, **options), {"block_size": 4}),
    "ArenaLayout.from_config": Call(
        lambda **options: ArenaLayout.from_config(CONFIG, **options), {"block_size": 16, "dtype": "float16"}
    ),
    "ArenaLayout.offsets": Call(ARENA.offsets, {"group": 1}),
    "ArenaLayout.page_class": Call(ARENA.page_class, {"group": 1}),
    "ArenaLayout.tokens": Call(ARENA.tokens, {"group": 1}),
    "LayerField": Call(with_field, {"layer": 1, "dtype": "float16"}),
    "LayerField.num_bytes": Call(FIELD.num_bytes, {"block_tokens": 4}),
    "LayerField.shape_in_block": Call(FIELD.shape_in_block, {"block_tokens": 4}),
    "GroupedLayout.tensor_shapes": Call(GroupedLayout((("a", LAYOUT),)).tensor_shapes, {"num_blocks": 100}),
    "probe_kind": Call(
        lambda **options: probe_kind(lambda n, b, h, d: (2, n, b, h, d), **options),
        {"block_size": 4, "num_kv_heads": 3, "head_size": 8},
    ),
    "Request": Call(
        lambda **fields: served({"max_num_seqs": 8}, **fields),
        {"max_tokens": 12, "n": 2, "priority": 3, "lora_id": 3, "prompt": np.arange(9)},
    ),
    "Scheduler": Call(
        scheduled,
        {"max_num_seqs": 100, "max_num_batched_tokens": 100, "num_lookahead_tokens": 3, "preemption_mode": "auto"},
    ),
    "Scheduler.schedule_plain": Call(plain, {"token_ids": np.full((2, 2), 7, np.uint32)}),
    "Scheduler.schedule": Call(with_lookahead, {"num_lookahead_tokens": 2}),
    "Scheduler.step": Call(step_of_cache, {"num_lookahead_tokens": 2}),
    "StepExecutor": Call(executed(""), {"max_staging": 1 << 20, "chunk_bytes": 1 << 20}),
    **{f"StepExecutor.{name}": Call(executed(name), {"ticket": 3}) for name in ("is_open", "lost", "wait")},
    "StepExecutor.is_awaited": Call(executed("is_awaited"), {"ticket": 3}),
    "StepExecutor.wait_for_layer": Call(executed("wait_for_layer"), {"ticket": 3, "layer": 1}),
    "open_store": Call(opened, {"bytes_per_block": 512, "num_slots": 5, "use": "swap"}),
    "ElasticCache": Call(elastic, {"num_blocks": 4, "max_blocks": 100, "chunk_bytes": 8192, "extent_bytes": None}),
    "ElasticCache.resize": Call(
        lambda num_blocks: ElasticCache(LAYOUT, num_blocks=4, max_blocks=100).resize(num_blocks), {"num_blocks": 50}
    ),
    "HostPool": Call(
        host_pool, {"num_blocks": 100, "bytes_per_block": 100, "chunk_bytes": 120, "node": 0, "on_failure": "raise"}
    ),
    "HostPool.wait": Call(lambda num_blocks: host_pool(wait=num_blocks), {"num_blocks": 3}),
    "unequal_pairs": Call(
        lambda **options: unequal_pairs(**options).tolist(),
        {"per_block": 4, "first": 1, "last": 3, "to": "large", "small": np.array([5, 6]), "large": np.array([7])},
    ),
    "copy_blocks": Call(op(copy_blocks, sides=1), {"pairs": PAIRS}),
    "exchange_blocks": Call(op(exchange_blocks, sides=1), {"pairs": PAIRS}),
    "move_blocks": Call(op(move_blocks, sides=1), {"pairs": PAIRS}),
    "swap_blocks": Call(op(swap_blocks, sides=2), {"pairs": PAIRS}),
    "Codec": Call(lambda **options: Codec("name", bytes, bytes, **options).bound(100), {"max_bytes": 100}),
    "Codec.bound": Call(lambda **options: Codec("name", bytes, bytes).bound(**options), {"bytes_per_block": 100}),
    "store_namespace": Call(
        lambda **options: store_namespace(model="a", revision="b", layout=LAYOUT, **{"world_size": 3} | options),
        {"rank": 1, "world_size": 3, "epoch": 2},
    ),
    "DefragPolicy": Call(
        lambda **options: DefragPolicy([("dense", 1)], **{"block_bytes": 8} | options),
        {"max_moves": 100, "max_bytes": 100, "block_bytes": 100, "cached": "move"},
    ),
    "TraceRecorder": Call(recorded, {"block_size": 4, "max_blocks": 100}),
    "SamplingParams": Call(SamplingParams, {"max_tokens": 100, "top_k": 100, "seed": 100, "n": 2, "eos_token_id": 100}),
    "Config": Call(Config, {"block_size": 4, "device_blocks": 100, "host_blocks": 100, "external_blocks": 100}),
    "ReferenceManager": Call(
        lambda **options: repr(ReferenceManager(**{"block_size": 4, "device_blocks": 8} | options).pool()),
        {"block_size": 4, "device_blocks": 100, "host_blocks": 100, "external_blocks": 100},
    ),
    "ReferenceManager.append": Call(reference("append"), {"lookahead": 3}),
    "ReferenceManager.can_allocate": Call(reference("can_allocate"), {"prompt": 20, "lookahead": 100}),
    "ReferenceManager.can_append": Call(reference("can_append"), {"lookahead": 3}),
    "ReferenceManager.can_swap_in": Call(reference("can_swap_in"), {"lookahead": 3, "to": "device"}),
    "ReferenceManager.can_swap_out": Call(reference("can_swap_out"), {"to": "host"}),
    "ReferenceManager.swap_out": Call(reference("swap_out"), {"to": "host"}),
    "ReferenceManager.swap_in": Call(reference("swap_in"), {"to": "device"}),
    "ReferenceManager.pool": Call(reference("pool"), {"tier": "host"}),
    "ReferenceManager.slot_mapping": Call(reference("slot_mapping"), {"first": 1, "last": 8}),
    "ReferenceManager.truncate": Call(reference("truncate"), {"num_tokens": 3}),
    "ReferenceManager.fork": Call(reference("fork"), {"count": 2}),
    "ReferenceManager.fork of a prefix": Call(reference("fork"), {"shared_tokens": 4, "num_tokens": 6}),
    "ReferencePrefixCache.count": Call(prefix_cache("count", [1, 2, 3]), {"hit": 2}),
    "ReferencePrefixCache.usable": Call(prefix_cache("usable"), {"cached": 4, "length": 100}),
    "SimulatedMemory.read": Call(memory("read"), {"n": 3, "block_table": np.array([0, 1]), "tier": "device"}),
    "SimulatedMemory.write": Call(memory("write"), {"slots": np.array([5]), "tokens": np.array([7])}),
    "reference_tokens": Call(lambda **options: reference_tokens(Request("a", [1, 2, 3], 4), **options), {"window": 3}),
}

# Callables that are left out, and why.
LEFT_OUT = {
    r"BlockLayout\..*|(Parallel|Remote|)Executor\..*|\w+Like\..*": "an interface, or one that passes on",
    r"\w*Machine\..*|configs|follow_up|prompts|requests|\w*StoreSuite\..*|\w+_machine|run_\w+": "hypothesis draws",
    r"Simulation(\..*)?": "of a machine that hypothesis runs",
    r"\w*Stats|Histogram|Resized|Traffic|Draw|Finished|Step|\w*Step|Step(Done|End)|Output|TraceRequest": "results",
    r"DefragReport|Fragmentation|Residency|ResizeProgress|SlabContents": "results",
    r"(External|Threaded|Failing|Unruly)Store(\..*)?|PrefixStore(\..*)?": "in tests/stores/",
    r"(Cache)?Step\..*|Scheduler\.(complete|update)|LateMemory\..*|Transfer(\..*)?": "of a step in flight",
    r"StepExecutor\.collect": "its answer depends on time",
    r"Generator(\..*)?|PagedModel(\..*)?": "they take a model, and pass numbers on",
    r"ReferenceManager\.(block_table|num_tokens|tier|complete)|SimulatedMemory\.store": "handles and rows",
    r"ReferencePrefixCache(\.(most|publish))?|read_trace|TraceRecorder\..*|serve_executor": "lists",
    r"HostPool\.for_device": "as HostPool",
    r"corrupt_slots|flip_bytes": "in tests/kit/test_faults.py",
}
KINDS = re.compile(r"\bint\b|Literal|Mode\b|Tier\b|TierName|\bKind\b|OnFull|OnFailure|NDArray|IdPairs|IdList|ArrayLike")


def uncovered(modules: list[str]) -> Iterator[str]:
    """Yield each public callable with an integer, a word or ids that has no call here."""
    for module in modules:
        found = import_module(module)
        for name in found.__all__:
            value = getattr(found, name)
            if value.__class__.__module__ == "typing" or getattr(value, "__module__", "").startswith("blockyard._core"):
                continue
            members = {name: value}
            if inspect.isclass(value):
                public = [member for member in dir(value) if member[0] != "_"]
                members |= {f"{name}.{member}": getattr(value, member) for member in public}
            for path, member in members.items():
                is_tried = path in CALLS or any(re.fullmatch(pattern, path) for pattern in LEFT_OUT)
                if callable(member) and not is_exception(member) and takes(member) and not is_tried:
                    yield path


def is_exception(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def takes(call: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(KINDS.search(str(parameter.annotation)) for parameter in parameters)
