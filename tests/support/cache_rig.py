"""A `KVCache` over simulated parts: streams, stores and a clock that one random generator drives, and no thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any
from unittest import mock
from zlib import crc32

import numpy as np
import torch
from late_store import LateStore
from memory_stores import Quotas
from moody_store import MoodyStore
from numpy.typing import NDArray
from observed_cache import Scrapes
from real_device import RealCells, RealStreams
from simulated_device import SimulatedStreams

from blockyard import CacheGroup, KVCache, KVLayout, PrefixCaching
from blockyard import cache as cache_module
from blockyard._core import StoreJob
from blockyard.engine.elastic.cache import ElasticCache
from blockyard.engine.engine import CacheEngine
from blockyard.executor.executor import StepExecutor
from blockyard.layout import ArenaLayout, LayerField
from blockyard.prefix_store import Prefetch
from blockyard.prefix_store.loads import Load, Loads
from blockyard.stores.threaded.runtime import MACHINE, use_runtime
from blockyard.testing.prefix_model import Extra
from blockyard.tools.virtual_time import VirtualTime

LAYERS = 2
MASK = (1 << 55) - 1
MANY = 40_000  # host blocks, more than a block can have leases
NEVER = 1e9  # so expensive that no swap pays off
GROUPS = {
    "full": (CacheGroup.full_attention(),),
    "window": (CacheGroup.sliding_window(5),),
    "state": (CacheGroup.recurrent(),),
    "full window": (CacheGroup.full_attention(), CacheGroup.sliding_window(6)),
    "full drafter": (CacheGroup.full_attention(), CacheGroup.drafter()),
    "windowed drafter": (CacheGroup.full_attention(), CacheGroup.sliding_window(3), CacheGroup.windowed_drafter(4)),
    "full state": (CacheGroup.full_attention(), CacheGroup.recurrent()),
    "all": (
        CacheGroup.sliding_window(3),
        CacheGroup.recurrent(),
        CacheGroup.drafter(),
        CacheGroup.full_attention(),
    ),
}

Cells = NDArray[np.int64]
PADS = (0, 48, 160, 48)
"""Bytes in a block of each group beside its tokens, where groups have blocks of their own size."""
PAGE = 1 << 40
"""Where each group's slots begin among those of all groups, where groups have blocks of their own size."""


@dataclass(frozen=True)
class Config:
    """Sizes and options of the caches of one program."""

    block_size: int = 2
    device: int = 16
    most: int = 16
    host: int = 8
    external: int = 8
    prefix: str = "host"  # "", "device" or "host"
    store: str = ""  # which blocks go to a prefix store; "" for none
    jobs: str = ""  # as `store`; the machine itself then acts as the prefix store
    groups: str = "full"
    caches: int = 1
    eviction: str = "lru"
    reuse: str = "lowest"
    staging: int = 64  # blocks
    chunk: int = 4  # blocks
    fail: float = 0.0  # share of the copies that fail
    faulty_stores: bool = False
    interrupts: float = 0.0
    signals: bool = False  # whether interrupts are real signals, which come some time after a call begins
    scheduler: bool = False
    max_pinned: float = 0.5
    mode: str = "auto"  # of preemption
    swap_cost: float = -1.0  # cost per block, relative to 1 per prompt token; negative: `mode` decides
    lookahead: int = 0
    max_recorded: int = 0  # blocks that a recorder remembers; 0 for no recorder
    scraped: bool = False
    outstanding: int = 1 << 16  # blocks in flight on one stream of the engine
    room: int = 1 << 30  # blocks in flight that a store takes; it refuses others as `queue_full`
    real: str = ""  # the device whose own streams run everything, "cpu" or "cuda"; "": simulated ones
    head_size: int = 1  # larger, with `real`: the device's own elastic memory, with blocks that may fill chunks
    classes: bool = False  # whether groups have blocks of their own size, in an arena
    threads: bool = False  # whether the stores are real, with threads; failures may then not be reproducible

    @property
    def slides(self) -> bool:
        """Whether blocks fall out of tables."""
        return self.groups != "full" or self.classes

    @property
    def in_arena(self) -> bool:
        """Whether groups have blocks of their own size, which the machine as a prefix store does not take."""
        return self.classes and not self.jobs

    def tokens(self, group: int) -> int:
        """Tokens of a group's blocks."""
        own = self.in_arena and GROUPS[self.groups][group].kind == "sliding_window"
        return 1 if own else self.block_size


def random_config(random: Random) -> Config:
    """Draw sizes that are rarely large enough for all sequences."""
    device = random.choice((8, 10, 12, 16, 24))
    groups = random.choice(("full", "full", "full", "full", *GROUPS))
    prefix = random.choice(("", "device", "device", "host", "host"))
    host = random.choice((0, random.randint(2, 8), random.randint(8, 24), 24)) if random.random() < 0.99 else MANY
    classes = groups != "full" and random.random() < 0.5
    by_host = prefix == "host" and host > 0
    stored = prefix and (groups == "full" or by_host) and random.random() < 0.6
    writes = random.choice(("through", "through", "back", "second_use", "never")) if stored else ""
    itself = groups == "full" and random.random() < 0.4
    return Config(
        block_size=random.randint(1, 4),
        device=device,
        most=device + random.choice((0, 0, 8)),
        host=host,
        external=random.choice((0, random.randint(2, 8), random.randint(8, 24), 24)),
        prefix=prefix,
        store="" if itself else writes,
        jobs=writes if itself else "",
        groups=groups,
        classes=classes,
        caches=random.choice((1, 1, 2)) if writes and not itself else 1,
        eviction=random.choice(("lru", "adaptive", "priority")),
        reuse=random.choice(("lowest", "lowest", "fifo", "lru")),
        staging=random.choice((2, 6, 64)),
        chunk=random.choice((1, 2, 64)),
        fail=random.choice((0.0, 0.0, 0.0, 0.02)),
        faulty_stores=random.random() < 0.5,
        interrupts=random.choice((0.0, 0.0, 0.1, 0.4)),
        max_pinned=random.choice((0.5, 0.9)),
        scheduler=random.random() < 0.3,
        mode=random.choice(("auto", "swap", "recompute")),
        swap_cost=random.choice((-1.0, 0.0, 3.0, NEVER)),
        lookahead=random.choice((0, 1, 3)),
        max_recorded=random.choice((0, 8, 25, 1 << 20, (1 << 20) + 1)),
        scraped=random.random() < 0.3,
        outstanding=random.choice((1, 4, 1 << 16, 1 << 16)),
        room=random.choice((2, 6, 1 << 30, 1 << 30)),
    )


class Clock(VirtualTime):
    """A clock that advances when the program says so, and slightly with each reading."""

    def __init__(self) -> None:
        super().__init__(1000.0)

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    def wait_readable(self, descriptor: int, seconds: float) -> None:
        MACHINE.wait_readable(descriptor, seconds)  # of a store with threads
        self.sleep(seconds)


class GarbageMemory:
    """Memory of an elastic cache with garbage in uncommitted chunks; see `blockyard.engine.elastic.cache`.

    Args:
        num_bytes: size of all tensors.
        chunk: number of bytes that are committed and released together.
        device: where it is.
    """

    def __init__(self, num_bytes: int, chunk: int, device: str) -> None:
        self.chunk = chunk
        self.tensor = torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device=device)

    def commit(self, first: int, last: int) -> None:
        """Fill with zeros."""
        self.tensor[first * self.chunk : last * self.chunk] = 0

    def release(self, first: int, last: int) -> None:
        """Fill with garbage."""
        self.tensor[first * self.chunk : last * self.chunk] = 0xA5

    def synchronize(self) -> None:
        """Wait for the device; on a CPU, engines' tickets have been waited for, and compute ends with its step."""
        if self.tensor.is_cuda:
            torch.cuda.synchronize()


@dataclass(eq=False)
class Tracked:
    """A sequence, as the program knows it.

    Attributes:
        extras: its extras, some of tokens to come.
        tokens: its token ids; negative ids are not passed to the manager.
        values: what a model writes for each token, which depends on all tokens and extras up to it, the salt and the
            weights.
        written: number of tokens whose keys and values have been computed.
        noted: number of leading tokens whose ids the manager knows.
        rest: prompt tokens that have no slots yet.
        drafts: lookahead slots of the last append.
        drafted: number of its last tokens, which may be rejected.
        found: number of its tokens when it began with cached ones: a drafter's entry before them is right.
    """

    handle: int
    salt: bytes | None
    seed: int
    extras: tuple[Extra, ...] = ()
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    written: int = 0
    noted: int = 0
    rest: list[int] = field(default_factory=list)
    drafts: int = 0
    drafted: int = 0
    lost: bool = False
    found: int = 0

    def add(self, tokens: list[int]) -> None:
        value = self.values[-1] if self.values else self.seed
        for token in tokens:
            begun = repr([extra for extra in self.extras if extra[0] == len(self.values)])
            value = (value * 1_000_003 + token * 7_919 + 12_345 + (begun != "[]") * crc32(begun.encode())) & MASK
            self.values.append(value)
        self.tokens += tokens

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.values[length:]
        self.written, self.noted = min(self.written, length), min(self.noted, length)

    def entries(self, kind: str) -> list[int]:
        """What the layers of a group have of each token; a drafter's also depend on the next one."""
        if not kind.endswith("drafter"):
            return self.values
        following = [*self.values[1:], 0]
        return [(value * 31 + after) & MASK for value, after in zip(self.values, following, strict=False)]

    def child(self, handle: int, length: int | None = None) -> Tracked:
        text = (self.extras, list(self.tokens), list(self.values))
        made = Tracked(handle, self.salt, self.seed, *text, self.written, self.noted, found=self.found)
        if length is not None:
            made.cut(length)
        return made


class ArenaCells:
    """Keys and values of one layer in the blocks of all groups, as cells `[2, slots]`; see `PAGE`.

    Args:
        groups: keys and values of each group, int64 `[blocks, tokens, 1]`.
    """

    def __init__(self, groups: list[list[torch.Tensor]]) -> None:
        self._groups = [[tensor.numpy()[..., 0] for tensor in both] for both in groups]

    def __getitem__(self, key: Any) -> Cells:
        slots = np.asarray(key[1], np.int64)
        found = np.empty((2, *slots.shape), np.int64)
        for chosen, tensor, at, side in self._places(slots):
            found[side, chosen] = tensor[at]
        return found

    def __setitem__(self, key: Any, values: Cells) -> None:
        for chosen, tensor, at, side in self._places(np.asarray(key[1], np.int64)):
            tensor[at] = values[side, chosen]

    def _places(self, slots: Cells) -> Iterator[tuple[Any, Cells, Any, int]]:
        for number, both in enumerate(self._groups):
            chosen = slots // PAGE == number
            for side, tensor in enumerate(both):
                yield chosen, tensor, np.divmod(slots[chosen] % PAGE, tensor.shape[1]), side


class Rig:
    """One cache with its parts, and the sequences on it."""

    def __init__(self, config: Config, random: Random, clock: Clock, medium: Quotas, weights: int) -> None:
        self.config = config
        self.weights = weights  # of the model that it serves
        layout = KVLayout("kv_first", LAYERS, config.block_size, 1, config.head_size, "int64")
        self.layout, size, sizes = layout, layout.bytes_per_block, self._sizes(layout)
        arena = sizes["layout"] if config.in_arena else None
        self.streams: SimulatedStreams | RealStreams
        if config.real:
            self.streams, streams = RealStreams(random, torch.device(config.real)), None
        else:
            self.streams = streams = SimulatedStreams(0, fail=config.fail)
            streams._random = random
        make: Any = (
            partial(MoodyStore, revision=f"{weights}") if config.threads else partial(LateStore, room=config.room)
        )
        hastes = config.threads and config.faulty_stores
        value, slots = (arena.bytes_per_value, swap_slots(arena, config)) if arena else (size, config.external)
        self.store = make(slots, value, random) if config.external else None
        self.kept = make(32, value, random, medium) if config.store else None
        for store in self.stores() if hastes else ():
            store.timeout_base = 0.2  # type: ignore[union-attr]
        device = config.real or "cpu"
        garbage = sizes.get("max_device_bytes", 2 * LAYERS * config.most * 8 * config.block_size)
        memory = None if config.head_size > 1 else GarbageMemory(garbage, 8, device)
        with (
            mock.patch.object(
                cache_module,
                "CacheEngine",
                partial(CacheEngine, streams=streams, max_outstanding=config.outstanding * size),
            ),
            mock.patch.object(cache_module, "ElasticCache", partial(ElasticCache, memory=memory)),
            mock.patch.object(cache_module, "StepExecutor", partial(StepExecutor, chunk_bytes=config.chunk * size)),
        ):
            self.cache = KVCache(
                **sizes,
                device=device,
                swap_store=self.store,
                prefix_caching=self._caching(),
                prefix_store=self.kept,
                prefix_writes=config.store or "never",
                watermark=0.0,
                reuse_order=config.reuse,
                namespace=b"a model",
                max_staging=config.staging * (max(arena.block_bytes) if arena else size),
            )
        self.manager = self.cache.manager
        if config.jobs:
            self.manager.prefix.store_jobs.start(config.jobs)
        self.prefixes = self.cache.prefix_store
        if self.prefixes is not None:
            _watch(self.prefixes._loads)
        self.cells = self._all_cells()
        self.groups = [(number, group.kind, group.window) for number, group in enumerate(GROUPS[config.groups])]
        self.sequences: list[Tracked] = []
        self.freed: list[int] = []
        self.pins: list[tuple[int, NDArray[np.int64], Cells]] = []
        self.fetches: list[Prefetch] = []
        self.loads: list[StoreJob] = []
        self.writes: list[StoreJob] = []
        self.open: set[int] = set()
        self.ended: set[int] = set()
        self.named: set[int] = set()  # sequences that a step has reported lost, but no ended ticket yet
        self.cached: dict[tuple[str, int], bytes] = {}  # keys of all blocks that can be found
        self.disturbed = config.fail > 0 or config.staging < 64 or hastes  # whether sequences may be lost
        self.scrapes = Scrapes(self.cache) if config.scraped else None
        self.prompts = self.hits = 0  # sequences admitted with token ids, and their numbers of cached tokens

    def _sizes(self, layout: KVLayout) -> dict[str, Any]:
        config, groups = self.config, GROUPS[self.config.groups]
        if not config.in_arena:
            blocks = {"device_blocks": config.device, "max_device_blocks": config.most, "host_blocks": config.host}
            return {"layout": layout, "groups": groups, **blocks}
        fields = [LayerField(layer, name, (1,), "int64") for layer in range(LAYERS) for name in ("keys", "values")]
        own = [
            (
                group
                if config.tokens(number) == config.block_size
                else group.with_blocks(tokens=config.tokens(number)),
                (*fields, LayerField(LAYERS, "rest", (PADS[number],), "uint8", is_state=True))[: 4 + (number > 0)],
            )
            for number, group in enumerate(groups)
        ]
        arena = ArenaLayout(tuple(own), config.block_size)
        size = max(arena.block_bytes)
        # With few blocks all of them would be in extent 0.
        more = 8 if config.prefix == "host" else 2
        sizes = (config.device + 8, config.host and config.host + more, config.most + 8)
        device, host, most = (count * size for count in sizes)
        growth = {"max_device_bytes": most} if most > device else {}
        return {"layout": arena, "device_bytes": device, "host_bytes": host or None, **growth}

    def _all_cells(self) -> list[Any]:
        tensors, layout = self.cache.engine.tensors, self.cache.layout
        if not isinstance(layout, ArenaLayout):
            return [self._cells(tensor) for tensor in tensors]
        groups = layout.by_group(tensors)
        return [ArenaCells([group[2 * layer : 2 * layer + 2] for group in groups]) for layer in range(LAYERS)]

    def slots(self, group: int, slots: Any) -> Any:
        """Return a group's slots as those of its cells."""
        return np.asarray(slots, np.int64) + (group * PAGE if self.config.in_arena else 0)

    def _caching(self) -> bool | PrefixCaching:
        config = self.config
        on_host = config.prefix == "host" and config.host > 0
        options = {"eviction": config.eviction, "host": on_host, "max_pinned": config.max_pinned}
        events = {} if config.in_arena else {"max_events": 50_000}  # these want equal tokens in all blocks
        return PrefixCaching(**options, **events) if config.prefix else False

    def _cells(self, tensor: torch.Tensor) -> Any:
        if self.config.real:
            return RealCells(tensor, self.config.head_size)
        return tensor.view(torch.int64).numpy().reshape(2, -1)

    def stores(self) -> list[LateStore | MoodyStore]:
        return [store for store in (self.store, self.kept) if store is not None]

    def follow(self) -> None:
        """Apply the events of the prefix cache."""
        events = self.manager.prefix.take_events()
        assert not events.dropped
        for kind, tier, block, key in zip(events.kinds, events.tiers, events.blocks, events.keys, strict=True):
            place = (events.TIERS[tier], int(block))
            if events.KINDS[kind] == "stored":
                assert place not in self.cached, f"{place} is stored twice"
                self.cached[place] = key.tobytes()
            elif events.KINDS[kind] == "removed":
                assert self.cached.pop(place) == key.tobytes(), f"{place} is removed under another key"
            else:
                self.cached = {at: key for at, key in self.cached.items() if at[0] != place[0]}

    def rows(self, tier: str, blocks: NDArray[np.int64]) -> Cells:
        """Return keys and values of blocks, int64 `[blocks, layers, 2, block_size]`."""
        if tier != "external":
            rows = self.cache.engine.read(tier, blocks)  # type: ignore[arg-type]
        else:
            found = [self.store.slot(int(block)) for block in blocks] if self.store else []
            rows = np.stack([np.zeros(self.layout.bytes_per_block, np.uint8) if row is None else row for row in found])
        return rows.view(np.int64).reshape(len(blocks), LAYERS, 2, -1, self.config.head_size)[..., 0]

    def free_blocks(self, tier: str) -> int:
        return self.manager.pool(tier).num_free  # type: ignore[arg-type]


def swap_slots(arena: ArenaLayout, config: Config) -> int:
    """Return the slots of a store for about `external` blocks of each group, and for the extent that stays empty."""
    return (config.external + 8) * sum(-(-size // arena.bytes_per_value) for size in arena.block_bytes)


@contextmanager
def simulated(clock: Clock) -> Iterator[None]:
    """Give this clock to everything with deadlines that is created within the context."""
    with use_runtime(clock):
        yield


def _watch(loads: Loads) -> None:
    """Let each load that has all it can have be checked: no other may still bring blocks that its prompt could use."""
    finish, prefix, size = loads._finish, loads._manager.prefix, loads._manager.block_size

    def checked(load: Load, miss: str = "") -> bool:
        if miss in {"", "absent"}:
            points: Iterable[int | None] = [None]
            if loads._has_points:
                points = range(1 + prefix.lookup(load.prompt).tokens // size, 1 + (len(load.prompt) - 1) // size)
            for point in points:
                keys, _, loading = prefix.store_jobs.missing(load.prompt, 1 << 20, point=point)
                is_usable = point is None or not len(keys)
                assert not (is_usable and len(loading)), f"a load is done ({miss!r}), others bring point {point}"
        return finish(load, miss)

    loads._finish = checked  # type: ignore[method-assign]
