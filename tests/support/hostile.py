"""Calls every public callable of the compiled module with hostile arguments, one after the other, in this process.

`tests/core/test_hostile.py` runs it under a memory limit and reads its output: a line for each call that went
wrong. The last line of the progress file names the call in which a process died.

Each callable is called with exactly one invalid argument, and with each integer in each of NumPy's types, which must
change nothing. `VALID` has a valid value for each parameter
name, `WORLDS` or `FACETS` an object for each class. A callable without them is an error, so none is
forgotten. Where arguments exclude each other, `VARIANTS` has other valid sets.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hostile_managers import HANDLE, MANAGERS, new_manager, stepping
from hostile_values import HOSTILE, SIMPLE, as_numpy_ints, wrong_shapes

import blockyard
from blockyard import _core
from blockyard.errors import BlockyardError, InvalidArgumentError, UnknownTicketError
from blockyard.integrations.gaudi import OnlineDefragmenter

ROOM_BYTES = 1 << 30
LONGEST_SECONDS = 5.0
KEY = b"k" * 32


def allocator(kind: type) -> Callable[[], Any]:
    def make() -> Any:
        made = kind(8)
        made.allocate(2)
        return made

    return make


def observer() -> _core.BlockObserver:
    made = _core.BlockObserver(64)
    made.use_ids([1, 2, 9])
    return made


FOLDER = tempfile.mkdtemp()
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
PAIR = np.array([[0, 1]])


def decision() -> blockyard.StepDecision:
    return blockyard.StepDecision(1, [("copy", blockyard.Pairs("device", "device", PAIR))])


def store() -> Any:
    return _core.SlabStore(FOLDER, bytes_per_block=512, num_slots=2, threads=2)


def offload_manager() -> Any:
    manager = _core.OffloadManager(4)
    manager.complete_store(manager.prepare_store([b"a"]).keys)
    manager.prepare_load([b"a"])
    return manager


# The object that a method is called on. Objects that a call changes are created anew for each call.
WORLDS: dict[str, Callable[[], Any]] = {
    "BlockAllocator": allocator(_core.NaiveAllocator),
    "BlockManager": new_manager,
    "BlockObserver": observer,
    "CacheGroup": lambda: blockyard.CacheGroup.sliding_window(8),
    "BoundViews": lambda: _core.BoundViews([np.zeros((4, 8), np.uint8)], [np.zeros((4, 8), np.uint8)]),
    "Mapping": lambda: _core.Mapping(PAIR, src_blocks=4, dst_blocks=4, rule="swap"),
    "ManagerStats": lambda: new_manager().stats(),
    "NaiveAllocator": allocator(_core.NaiveAllocator),
    "OffloadManager": offload_manager,
    "OnlineDefragmenter": OnlineDefragmenter,
    "PrefixCachingAllocator": allocator(_core.PrefixCachingAllocator),
    "RedisClient": lambda: _core.RedisClient("127.0.0.1", port=1),
    "SlabStore": store,
    "StepDecision": decision,
    "StepOwner": lambda: _core.StepOwner(new_manager(), instead="a test"),
    "StoreJob": lambda: new_manager().prefix.store_jobs.begin_write(1),
    "StoreSearch": lambda: new_manager().prefix.store_jobs.search([1, 2, 3]),
}

# The facets of a manager, which holds the state that a call changes.
FACETS: dict[str, Callable[[blockyard.BlockManager], Any]] = {
    "Defrag": lambda manager: manager.defrag,
    "Pins": lambda manager: manager.pins,
    "Pool": lambda manager: manager.pool("host"),
    "Prefix": lambda manager: manager.prefix,
    "StoreJobs": lambda manager: manager.prefix.store_jobs,
}

CLIENT: dict[str, Any] = dict.fromkeys(("ca", "cert", "key", "password", "username"))
CLIENT |= {"cluster": False, "varies": False, "head_bytes": 1, "transport": "tcp", "host": "127.0.0.1", "port": 1}
CLIENT |= {"connect_timeout": 0.1, "ttl_ms": 10, "lengths": [512], "db": 0, "commands": [[b"PING"]]}
CLIENT |= {"names": [b"name"], "sizes": [1]}
# A valid value for each parameter name; exceptions are under `Class.method.parameter`.
# A function without parameters is called for each call; one with a parameter gets the object whose method is called.
VALID: dict[str, Any] = {
    "after": [],
    "arena": None,
    "Arena.split.device_blocks": [8, 4],
    "Arena.split.host_blocks": [2, 2],
    "Arena.split.external_blocks": [2, 2],
    "Arena.split.max_device_blocks": [8, 4],
    "max_device_bytes": 1 << 20,
    "block": 1,
    "block_bytes": 8,
    "block_id": 1,
    "block_size": 4,
    "block_table_list": [[1, 2]],
    "block_tables": lambda: np.zeros((4, 8), np.int32),
    "blocks": [0],
    "budget": 4,
    "bytes": 64,
    "bytes_per_block": 512,
    "cache_group": 0,
    "cached": "move",
    "cached_tokens": 4,
    "chunk_tokens": 8,
    "coming": [0],
    "count": 1,
    "counts": None,
    "data": lambda: decision().to_bytes(),
    "deadline": 10,
    "depth": 1,
    "depths": [4],
    "device_blocks": 16,
    "device_bytes": 1 << 20,
    "direct": "off",
    "drop": False,
    "directory": FOLDER,
    "dst": lambda: [np.zeros((4, 8), np.uint8)],
    "dst_blocks": 4,
    "enabled": True,
    "ended": 5.0,
    "encoder_tokens": 0,
    "eviction": "lru",
    "extent_bytes": 1 << 16,
    "exchange": None,
    "external_blocks": 4,
    "external_bytes": 1 << 20,
    "extra": None,
    "extras": [(0, 1, b"image")],
    "finished_reqs": [],
    "first": 0,
    "free": 8,
    "fresh": False,
    "goal": "max_id",
    "goals": [("max_id", 3)],
    "graphed": False,
    "group": 0,
    "groups": lambda: [blockyard.CacheGroup.full_attention()],
    "handle": HANDLE,
    "has": [],
    "heads": np.zeros((1, 16), np.uint8),
    "host": False,
    "host_blocks": 4,
    "host_bytes": 1 << 20,
    "host_copies_per_step": 2,
    "hot": [1],
    "ids": [1],
    "job": 1,
    "StoreJobs.end_load.job": 2,
    "StoreJobs.note_unwritten.job": lambda store_jobs: store_jobs.begin_write(1),
    "StoreJobs.note_unwritten.blocks": [True],
    "StoreJobs.note_unwritten.why": "chain",
    "StoreJobs.end_lease.lease": None,
    "StoreJobs.lease.share": "half",
    "StoreJobs.deepest.search": lambda store_jobs: store_jobs.search([1, 2, 3]),
    "StoreJobs.settle_lease.lease": lambda store_jobs: store_jobs.lease([1], share="any"),
    "key": KEY,
    "keys": [KEY],
    "landed": [True],
    "last": 2,
    "lease": lambda manager: manager.lease([1]),
    "limit": 3,
    "lookahead": 1,
    "lora_id": 1,
    "lost": [],
    "instead": "a test",
    "manager": new_manager,
    "margin": 0,
    "mapping": WORLDS["Mapping"],
    "max_blocks": 2,
    "max_tokens": 2,
    "max_bytes": 64,
    "max_events": 8,
    "max_moves": 4,
    "max_open_tickets": 10,
    "max_pinned": 0.5,
    "memory": 1 << 20,
    "most": 2,
    "move": None,
    "moves": 4,
    "namespace": bytes(32),
    "negative": "refuse",
    "new_blocks": {},
    "hint": "over",
    "now": 5,
    "num_blocks": 16,
    "num_bytes": 64,
    "num_chunks": 4,
    "num_computed": None,
    "num_slots": 2,
    "num_threads": 1,
    "num_tokens": 1,
    "number": 3,
    "ok": lambda: np.zeros(1, bool),
    "out": None,
    "page_class": 0,
    "owners": lambda: (np.zeros((1, 32), np.uint8), np.zeros((1, 32), np.uint8)),
    "pairs": PAIR,
    "parent": None,
    "pass_negative": False,
    "path": "/nowhere/at/all.slab",
    "per_block": 4,
    "pin": 1,
    "point": None,
    "plain": 1,
    "plan": lambda manager: manager.plan("max_id", 3),
    "prefetch": False,
    "preempted": False,
    "prefix_caching": False,
    "priority": 3,
    "prompt": list(range(10)),
    "prompts": [list(range(10))],
    "reasons": ["timeout"],
    "repair": False,
    "request": ("a", 0),
    "request_id": "a",
    "reuse": "lowest",
    "reuse_order": "lowest",
    "revision": "",
    "rows": [[1, 2]],
    "rule": "copy",
    "salt": b"salt",
    "sequence": HANDLE,
    "sequences": [HANDLE],
    "shared_tokens": 4,
    "size": None,
    "slack": 0,
    "slot": 1,
    "slots": lambda: np.zeros(8, np.int64),
    "src": lambda: [np.zeros((4, 8), np.uint8)],
    "src_blocks": 4,
    "status": _core.AllocStatus.OK,
    "tenant": bytes(32),
    "threads": 2,
    "threshold": 32,
    "ticket": 2,
    "tier": "device",
    "timeout": 0.1,
    "timeout_base": 10,
    "to": "host",
    "token_ids": [1, 2, 3, 4],
    "tokens": list(range(8)),
    "transfers": [],
    "wanted": None,
    "watermark": 0.0,
    "window": 4,
    "chunk": 4,
    "writes": "through",
    "wrap": None,
    "mark_step": None,
    "use": "prefix",
    "BlockManager.allocate.encoder_tokens": None,
    "BlockManager.allocate.prompts": list(range(10)),
    "BlockManager.append.token_ids": [7],
    "plain_steps.token_ids": [7, 7],
    "plain_steps.times": [1.0, 2.0],
    "draft_tokens": 0,
    "BlockManager.append.block_tables": lambda: np.zeros((1, 8), np.int32),
    "BlockManager.fork.num_tokens": None,
    "BlockManager.fork.shared_tokens": None,
    "BlockObserver.commit.plan": lambda manager: manager.plan("max_id", 3),
    "BlockObserver.fragmentation.sequences": [[1, 2]],
    "BlockObserver.plan_all.sequences": [[1, 2]],
    "Defrag.resize.blocks": 12,
    "Defrag.resize.device_bytes": None,
    "Defrag.run.sequences": None,
    "CacheGroup.with_blocks.tokens": 4,
    "Fit.blocks": 2,
    "Fit.free_bytes": 2,
    "read_slab.payloads": True,
    "Prefix.set_quota.blocks": 4,
    "Prefix.set_quota.num_bytes": None,
    "Prefix.sample_residency.sample_rate": 0.5,
    "Completion.rows": lambda: np.zeros((1, 8), np.uint8),
    "OffloadManager.complete_store.success": True,
    "OffloadManager.complete_load.keys": [b"a"],
    "OffloadManager.evict.protected": [b"a"],
    "OffloadManager.prepare_load.keys": [b"a"],
    "OffloadManager.touch.inserted": [b"a"],
    "OnlineDefragmenter.fresh": None,
    "OnlineDefragmenter.hot": [],
    "OnlineDefragmenter.goals": None,
    "OnlineDefragmenter.lease.blocks": [1],
    "Pairs.dst": "device",
    "Pairs.ids": PAIR,
    "Pairs.src": "device",
    "PrefixCachingAllocator.eviction": "released",
    **{
        f"RedisClient.{name}": value
        for name, value in (CLIENT | dict.fromkeys(("first", "last"), CLIENT["commands"])).items()
    },
    **dict.fromkeys(("RedisClient.out", "RedisClient.rows"), lambda: np.zeros((1, 512), np.uint8)),
    "SlabStore.submit_read.slots": lambda: np.array([1]),
    "SlabStore.submit_write.slots": lambda: np.array([1]),
    "SlabStore.rows": lambda: np.zeros((1, 512), np.uint8),
    "SlabStore.wait.ticket": lambda files: files.submit_read(np.array([1])),
    "expand_span.blocks": lambda: np.array([1]),
    "expand_span.out": lambda: np.zeros(2, np.int64),
}

# Strings that are a name or a text, not one of a set.
NAMES = {"directory", "host", "instead", "last_error", "path", "request_id", "revision"}
# Arguments that may have any shape.
ANY_SHAPE = {
    "BlockObserver.resolve.ids",
    "BlockManager.append.block_tables",  # wide tables are fine
    "Completion.rows",  # what a store reports
}

NOTHING = object()  # no positional argument
PLAIN: dict[str, Any] = dict.fromkeys(("salt", "lora_id", "extras", "chunk_tokens"))
# Other valid combinations, for arguments that exclude those in `VALID`.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "BlockManager.allocate": [{"prompts": 10, **PLAIN}, {"prompts": NOTHING, "counts": [3, 4], **PLAIN}],
    "BlockManager.can_allocate": [{"prompt": 10}],
    "BlockManager.fork": [{"count": None, "shared_tokens": 4, "num_tokens": 8}],
}

# Callables whose errors call an argument by another name, and why.
UNNAMED = {
    "BlockObserver": "its ids and hot ones are blocks",
    "BoundViews": "it compares two lists of caches",
    "Pairs": "its ids are pairs",
    "chain_keys": "its parent is a key",
}

# Callables that are skipped, and why.
LEFT_OUT = {
    "OnlineDefragmenter.initialize": "it takes tensors",
}


def public() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield each callable with the name of its class, if any, and its own name."""
    names = {name for name in dir(_core) if not name.startswith("_")} | {"OnlineDefragmenter"}
    for name in sorted(names):
        item = getattr(_core, name, OnlineDefragmenter)
        if inspect.isclass(item):
            if issubclass(item, BaseException):
                continue
            if "__new__" in vars(item) or "__init__" in vars(item):
                yield name, "", item
            for method in sorted(method for method in dir(item) if not method.startswith("_")):
                if callable(getattr(item, method)):
                    yield name, method, getattr(item, method)
        elif callable(item):
            yield "", name, item


def valid(owner: str, method: str, name: str, this: Any) -> Any:
    keys = [".".join(part for part in parts if part) for parts in ((owner, method, name), (owner, name))]
    key = next(key for key in (*keys, name) if key in VALID)
    value = VALID[key]
    if not inspect.isfunction(value):
        return value
    return value(this) if inspect.signature(value).parameters else value()


def state(this: Any) -> Any:
    """Return the state that a failed call must not change."""
    match this:
        case blockyard.BlockManager():
            pools = [this.pool(tier) for tier in ("device", "host", "external")]
            return this.stats().as_dict(), [(pool.num_free, pool.num_blocks) for pool in pools]
        case _core.BlockAllocator():
            return this.num_free, [this.refs(block) for block in range(this.num_blocks)]
        case _core.OffloadManager():
            return repr(this), this.num_storing
        case _core.BlockObserver():
            return this.used().tolist(), this.resolve(np.arange(len(this))).tolist(), this.limit
        case _:
            return None


class Attack:
    """The calls of one callable, and what went wrong."""

    def __init__(self, owner: str, method: str, call: Callable[..., Any]) -> None:
        self.owner, self.method, self.call = owner, method, call
        parameters = inspect.signature(call).parameters.values()
        self.parameters = [p for p in parameters if p.name != "self"]
        self.is_bound = bool(method and owner) and next(iter(inspect.signature(call).parameters), "") == "self"
        self.name = ".".join(part for part in (owner, method) if part)

        is_managers = self.is_bound and owner in {"BlockManager", *FACETS}
        self.managers = MANAGERS if is_managers else (new_manager,)

    def world(self, make: Callable[[], Any]) -> tuple[Any, Any]:
        """Return the object that is called, and the object that holds its state; `make` makes managers."""
        if not self.is_bound:
            return None, None
        if self.owner in FACETS:
            manager = make()
            return FACETS[self.owner](manager), manager
        if self.owner == "BlockManager":
            is_end = self.method in ("complete", "fail", "submit")
            manager = stepping() if is_end and make is new_manager else make()
            return manager, manager
        made = WORLDS[self.owner]()
        return made, made

    def run(
        self, make: Callable[[], Any], variant: dict[str, Any], changed: str = "", value: Any = None
    ) -> tuple[BaseException | None, Any, Any, Any]:
        """Calls it; with what it raised, the object, its state before, and the value that was valid."""
        this, whole = self.world(make)
        given = {p.name: valid(self.owner, self.method, p.name, this) for p in self.parameters} | variant
        was = given.get(changed)
        if changed:
            given[changed] = value
        plain = [given[p.name] for p in self.parameters if p.kind is not p.KEYWORD_ONLY]
        plain = [argument for argument in plain if argument is not NOTHING]
        named = {p.name: given[p.name] for p in self.parameters if p.kind is p.KEYWORD_ONLY}
        before = state(whole)
        try:
            self.call(*([this] if self.is_bound else []), *plain, **named)
        except BaseException as error:  # noqa: BLE001 - a panic is one
            return error, whole, before, was
        return None, whole, before, was

    def wrongs(self, tell: Callable[[str], None]) -> Iterator[str]:
        for make, variant in itertools.product(self.managers, ({}, *VARIANTS.get(self.name, []))):
            yield from self.wrongs_of(make, variant, tell)

    def wrongs_of(self, make: Callable[[], Any], variant: dict[str, Any], tell: Callable[[str], None]) -> Iterator[str]:
        tell(self.name)
        error, whole, *_ = self.run(make, variant)
        # A valid call may fail because it has nothing to do, but a wrong type means that the test case is wrong.
        if error is not None and not isinstance(error, (BlockyardError, AssertionError, ValueError)):
            yield f"valid arguments: {error!r}"
        if hasattr(whole, "check"):
            whole.check()
        for parameter in self.parameters:
            yield from self.wrongs_of_forms(make, variant, parameter.name, tell)
            for value in HOSTILE if self.owner != "OnlineDefragmenter" else SIMPLE:
                shown = f"{type(value).__name__} {str(value)[:40] if abs_fits(value) else ''}"
                tell(f"{self.name}({parameter.name}={shown})")
                began = time.process_time()  # the cores may be busy
                error, this, before, was = self.run(make, variant, parameter.name, value)
                seconds = time.process_time() - began
                for wrong in (*judge(self.owner or self.name, parameter.name, value, was, error), *self.unnamed(error)):
                    yield f"{parameter.name}={shown}: {wrong}"
                if seconds > LONGEST_SECONDS:
                    yield f"{parameter.name}={shown}: took {seconds:.1f} s"
                if error is not None and state(this) != before:
                    yield f"{parameter.name}={shown}: the state changed with {error!r}"
                if hasattr(this, "check"):
                    this.check()
                close(this)

    def unnamed(self, error: BaseException | None) -> Iterator[str]:
        """Return whether an error about an argument names none of them."""
        is_about_one = isinstance(error, TypeError) or type(error) is InvalidArgumentError
        if not is_about_one or {self.name, self.owner} & {*UNNAMED} or self.owner == "OnlineDefragmenter":
            return  # a class in Python passes its arguments on under other names
        # PyO3 names an argument that it converts itself in a note.
        said = " ".join((str(error), *getattr(error, "__notes__", ())))
        if not any(parameter.name.removesuffix("s") in said for parameter in self.parameters):
            yield f"no argument is named in {said!r}"

    def wrongs_of_forms(
        self, make: Callable[[], Any], variant: dict[str, Any], name: str, tell: Callable[[str], None]
    ) -> Iterator[str]:
        """Give an integer in NumPy's types, an array in other shapes, and a word that is none of a set's."""
        expected, whole, _, was = self.run(make, variant, *self.given(make, variant, name))
        if isinstance(was, int) and not isinstance(was, bool):
            for value in as_numpy_ints(was):
                tell(f"{self.name}({name}={type(value).__name__})")
                error, this, *_ = self.run(make, variant, name, value)
                if type(error) is not type(expected) or state(this) != state(whole):
                    yield f"{name}={value!r}: {error!r}, of an int {expected!r}"
                close(this)
        close(whole)
        shapes = wrong_shapes(np.asarray(was)) if is_array_of_ints(was) else []
        words = ["no such word"] if isinstance(was, str) and name not in NAMES else []
        for value in (*shapes, *words):
            tell(f"{self.name}({name}={value!r:.100})")
            error, this, *_ = self.run(make, variant, name, value)
            if error is None and f"{self.name}.{name}" not in ANY_SHAPE:
                yield f"{name}={value!r:.100} was accepted"
            close(this)

    def given(self, make: Callable[[], Any], variant: dict[str, Any], name: str) -> tuple[str, Any]:
        """Return a parameter's name and its valid value."""
        this, _ = self.world(make)
        return name, variant.get(name, valid(self.owner, self.method, name, this))


def close(this: Any) -> None:
    """End the threads of a store."""
    if isinstance(this, _core.SlabStore):
        this.close()


def is_array_of_ints(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu" and value.ndim > 0
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, (int, type(HANDLE))) for item in value)


def abs_fits(value: Any) -> bool:
    return isinstance(value, (float, str)) or (isinstance(value, int) and abs(value) < 2**80)


def judge(owner: str, name: str, value: Any, was: Any, error: BaseException | None) -> Iterator[str]:
    """Return what is wrong with an error, if anything."""
    if error is None:
        return
    allowed: tuple[type[BaseException], ...] = (BlockyardError,)
    if owner == "OnlineDefragmenter":
        allowed += (AttributeError,)
    is_number = isinstance(was, (int, float)) and not isinstance(was, bool)
    if not (is_number and isinstance(value, int)):
        allowed += (TypeError,)
    if not isinstance(error, allowed):
        yield f"{type(error).__module__}.{type(error).__qualname__}: {str(error)[:200]}"
    elif is_number and isinstance(value, int) and abs(value) == 2**70 and not isinstance(error, UnknownTicketError):
        # A class in Python passes its numbers on under other names.
        is_named = name in str(error) or owner == "OnlineDefragmenter"
        if not isinstance(error, InvalidArgumentError) or not is_named:
            yield f"the name is not in {error!r}"


def main(progress: Path, first: str = "") -> int:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
    with progress.open("w") as file:

        def tell(what: str) -> None:
            file.seek(0)
            file.truncate()
            file.write(what)
            file.flush()

        for owner, method, call in public():
            attack = Attack(owner, method, call)
            if attack.name in LEFT_OUT or attack.name < first:
                continue
            if missing := sorted(uncovered(attack)):
                print(f"{attack.name}: no case for {missing}")
                continue
            for wrong in attack.wrongs(tell):
                print(f"{attack.name}: {wrong}", flush=True)
        tell("the end")
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB", file=sys.stderr)
    return 0


def uncovered(attack: Attack) -> Iterator[str]:
    if attack.is_bound and attack.owner not in {*WORLDS, *FACETS}:
        yield attack.owner
    for parameter in attack.parameters:
        names = (f"{attack.name}.{parameter.name}", f"{attack.owner}.{parameter.name}", parameter.name)
        if not any(name in VALID for name in names):
            yield parameter.name


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
