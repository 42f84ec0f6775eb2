"""`HazardMachine`: scheduler, manager, copy engine and executor over a simulated device, compared byte by byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from numpy.typing import NDArray
from simulated_device import SimulatedStore, SimulatedStreams

from blockyard._core import BlockManager
from blockyard.engine.elastic.cache import ElasticCache
from blockyard.engine.engine import CacheEngine
from blockyard.executor.executor import StepExecutor
from blockyard.layout.kv import KVLayout
from blockyard.scheduler import Draw, Request, Scheduler, Step
from blockyard.stores.base import ExternalStore
from blockyard.testing.interfaces import Config
from blockyard.testing.machines.scheduler import TIERS, ResizingSchedulerMachine, SchedulerMachine, draw_token
from blockyard.testing.machines.side_by_side import refuse_open
from blockyard.testing.machines.strategies import VOCABULARY, configs, requests

__all__ = ["GarbageMemory", "HazardMachine", "ResizingHazardMachine", "RotatingScheduler", "overlapping"]

LAYERS = 2
PATIENCE = 2_000
"""Polls in a row that may end nothing."""

Cells = NDArray[np.int64]


class HazardMachine(SchedulerMachine):
    """Random requests, aborts and failing transfers, on caches whose transfers run in any order left open.

    Compute is queued on the simulated device, layer by layer: it writes keys and values of the new tokens, and reads
    those of all tokens of each sequence through its block table. Every byte that it reads must be that of the plain
    model: a token's cell holds the token, its position, the layer, and whether it is key or value. Tickets end when the
    executor says so, never earlier, and often many steps later.

    Attributes:
        make_streams: makes the simulated device from a seed and the share of transfers that fail.
        make_engine: makes the copy engine over it; override these to plant a fault.
        make_store: makes the external tier from its slots, bytes per block, a seed and the share of blocks it loses.
        make_executor: makes the executor.
    """

    make_scheduler: ClassVar[Callable[[BlockManager, Config], Scheduler]]
    make_streams: ClassVar[Callable[..., SimulatedStreams]] = SimulatedStreams
    make_engine: ClassVar[Callable[..., CacheEngine]] = CacheEngine
    make_store: ClassVar[Callable[..., ExternalStore]] = SimulatedStore
    make_executor: ClassVar[Callable[..., StepExecutor]] = StepExecutor

    @initialize(
        config=configs(
            block_sizes=st.integers(1, 3),
            device_blocks=st.integers(8, 20),
            host_blocks=st.integers(0, 16),
            watermarks=st.just(0.0),
        ),
        count=st.integers(3, 8),
        seed=st.integers(0, 1 << 30),
        fail=st.sampled_from([0.0, 0.0, 0.02]),
    )
    def start(self, config: Config, count: int, seed: int = 0, fail: float = 0.0) -> None:
        """Make the manager, the device and the store, and submit a few requests."""
        self.manager = type(self).make_manager(config)
        self.scheduler: Scheduler = type(self).make_scheduler(self.manager, config)
        self.streams = type(self).make_streams(seed, fail=fail)
        layout = KVLayout("kv_first", LAYERS, config.block_size, num_kv_heads=1, head_size=1, dtype="int64")
        self.engine = type(self).make_engine(
            layout,
            device_blocks=config.device_blocks,
            host_blocks=config.host_blocks,
            streams=self.streams,
            tensors=self.make_caches(layout, config),
        )
        size = self.engine.layout.bytes_per_block
        store = type(self).make_store(max(1, config.external_blocks), size, seed=seed, fail=fail)
        self.executor: StepExecutor = type(self).make_executor(self.engine, store, chunk_bytes=2 * size)
        for request in crowd(config, count, seed):
            self.add(request)

    @rule(
        when=st.sampled_from(["never", "never", "scheduled", "submitted", "computed"]),
        pick=st.integers(0, 7),
        again=st.none() | requests(),
        by_layer=st.booleans(),
    )
    def step(self, when: str, pick: int, again: Request | None, by_layer: bool = True) -> None:
        """Run one step, in which a request may be aborted and its id used again."""
        step = self.scheduler.schedule()
        self.check_shape(step)
        if when == "scheduled":
            self.resubmit(pick, again)
        self.executor.submit(step.decision, by_layer=by_layer)
        if when == "submitted":
            self.resubmit(pick, again)
        read = self.launch(step, by_layer=by_layer)
        self.streams.fence().synchronize()
        if when == "computed":
            self.resubmit(pick, again)
        progress = self.settle(step)
        rows = step.rows
        for finished in self.scheduler.update(step, self.compare(step, read)):
            self.finish(finished)
        self.manager.check()
        self.idle = 0 if progress or rows or not self.live else self.idle + 1
        if self.idle > PATIENCE:
            raise AssertionError(f"{len(self.live)} requests wait and {self.idle} steps did nothing")

    @rule(count=st.integers(2, 8))
    def run(self, count: int) -> None:
        """Run some steps, undisturbed."""
        for _ in range(count):
            self.step(when="never", pick=0, again=None)

    def teardown(self) -> None:
        """Run to the end; every block must be free then, and every ticket ended."""
        if self.failed or not hasattr(self, "executor"):
            return
        for _ in range(100 * PATIENCE):
            if not self.live and not self.executor.num_in_flight:
                break
            self.step(when="never", pick=0, again=None)
        self.end_tickets()
        refuse_open(self.manager)
        free = {tier: self.manager.pool(tier).num_free for tier in TIERS}
        blocks = {tier: self.manager.pool(tier).num_blocks for tier in TIERS}
        if self.live or free != blocks or self.manager.stats().sequences or self.executor.num_in_flight:
            raise AssertionError(f"{len(self.live)} requests are left, free blocks {free} of {blocks}, {self.executor}")

    # ---- helpers ----

    def make_caches(self, layout: KVLayout, config: Config) -> Sequence[torch.Tensor] | None:
        """Make the device's tensors; None leaves that to the engine."""
        return None

    def end_tickets(self) -> bool:
        """Tell the scheduler which tickets have ended."""
        ended = self.executor.poll()
        for done in ended:
            self.scheduler.complete(done.ticket, done.lost)
        return bool(ended)

    def settle(self, step: Step) -> bool:
        """End what has ended; what this step has computed from loads is known to be good, or lost, after that."""
        progress = self.end_tickets()
        for _ in range(PATIENCE):
            if not self.executor.is_awaited(step.decision.ticket):
                return progress
            progress |= self.end_tickets()
        raise AssertionError(f"ticket {step.decision.ticket} has not ended after {PATIENCE} polls")

    def launch(self, step: Step, *, by_layer: bool) -> list[list[Cells]]:
        """Queue the step's compute; returns, for each sequence, what each layer will have read."""
        read: list[list[Cells]] = [[] for _ in range(step.rows)]
        for layer in range(LAYERS):
            if by_layer:
                self.executor.wait_for_layer(step.decision.ticket, layer)
            self.streams.compute(partial(self.compute_layer, step, layer, read))
        return read

    def compute_layer(self, step: Step, layer: int, read: list[list[Cells]]) -> None:
        """Write the new tokens' cells of a layer, then read each sequence's through its block table."""
        cells = self.engine.tensors[layer].view(torch.int64).numpy().reshape(2, -1)
        ends = (step.start + step.lengths).tolist()
        positions = [i for first, end in zip(step.start.tolist(), ends, strict=True) for i in range(first, end)]
        cells[:, step.slot_mapping] = model_cells(step.token_ids.tolist(), positions, layer)
        size = self.manager.block_size
        for found, end, table in zip(read, ends, step.block_tables, strict=True):
            at = np.arange(end)
            found.append(cells[:, table[at // size].astype(np.int64) * size + at % size])

    def compare(self, step: Step, read: list[list[Cells]]) -> list[int]:
        """What the step's sequences have read must be the plain model's cells; then draw from it."""
        texts = [self.text(step, row) for row in range(step.rows)]
        for row, tokens in enumerate(texts):
            self.check_cells(row, tokens, read[row])
        return [self.draw(draw, texts[draw.row]) for draw in step.draws()]

    def text(self, step: Step, row: int) -> list[int]:
        """Tokens of a row up to this step's last; none if it is void, or its request is gone: its token is dropped."""
        state, _ = self.scheduler._rows.owner(row)
        if not state.alive or (step.void is not None and step.void[row]):
            return []
        tokens: list[int] = self.scheduler._rows.text(row)[: step.start[row] + step.lengths[row]].tolist()
        return tokens

    def check_cells(self, row: int, tokens: Sequence[int], found: Sequence[Cells]) -> None:
        """Each layer must have read the cells of these tokens."""
        for layer, cells in enumerate(found if tokens else ()):
            wanted = model_cells(tokens, range(len(tokens)), layer)
            if not np.array_equal(cells, wanted):
                wrong = np.flatnonzero((cells != wanted).any(axis=0)).tolist()
                raise AssertionError(f"row {row}: layer {layer} reads wrong keys or values at positions {wrong}")

    def draw(self, draw: Draw, tokens: Sequence[int]) -> int:
        """Draw from what a sequence has read."""
        return draw_token(tokens, draw.sequence) if tokens else 0


class ResizingHazardMachine(HazardMachine, ResizingSchedulerMachine):
    """The same while the device shrinks and grows between steps, with memory that is garbage as soon as it has gone.

    Attributes:
        needed: says up to which block the manager needs memory; override it to plant a fault.
    """

    needed: ClassVar[Callable[[BlockManager], int]] = lambda manager: manager.defrag.progress().extent

    def make_caches(self, layout: KVLayout, config: Config) -> Sequence[torch.Tensor] | None:
        """Lay the device's tensors over chunks of one token's keys or values."""
        self.most = config.device_blocks
        chunk = layout.itemsize
        size = layout.bytes_per_block // LAYERS * self.most
        memory = GarbageMemory(LAYERS * size, chunk)
        self.cache = ElasticCache(layout, num_blocks=self.most, max_blocks=self.most, memory=memory)
        return self.cache.tensors

    @rule(blocks=st.integers(1, 20))
    def resize(self, blocks: int) -> None:
        """Give the device another size; memory that blocks in use lie in goes when they are free."""
        self.manager.defrag.resize(min(blocks, self.most))
        self.manager.check()
        self.cache.resize(type(self).needed(self.manager))

    def end_tickets(self) -> bool:
        """Tell the scheduler which tickets have ended, and give back what that has freed."""
        progress = super().end_tickets()
        self.cache.resize(type(self).needed(self.manager))
        return progress


class GarbageMemory:
    """Memory of an elastic cache that holds garbage where none is committed; see `blockyard.engine.elastic.cache`.

    Args:
        num_bytes: of all tensors.
        chunk: bytes that come and go together.
    """

    def __init__(self, num_bytes: int, chunk: int) -> None:
        self.chunk = chunk
        self.tensor = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def commit(self, first: int, last: int) -> None:
        """Bring zeros."""
        self.tensor[first * self.chunk : last * self.chunk] = 0

    def release(self, first: int, last: int) -> None:
        """Leave garbage."""
        self.tensor[first * self.chunk : last * self.chunk] = 0xA5

    def synchronize(self) -> None:
        """Do nothing: engines' tickets have been waited for, and compute ends with its step."""


def model_cells(tokens: Sequence[int], positions: Sequence[int], layer: int) -> Cells:
    """What key and value of tokens are in the plain model, int64 `[2, tokens]`."""
    both = np.asarray(tokens, dtype=np.int64) * 1_000_003 + np.asarray(positions, dtype=np.int64) * 64 + layer * 2
    return np.stack((both + 1, both + 2))


def crowd(config: Config, count: int, seed: int) -> list[Request]:
    """Requests that fit alone, but not together: each grows to a third or more of the device."""
    draw = random.Random(seed)
    slots = config.device_blocks * config.block_size
    made = []
    for index in range(count):
        n = draw.choice((1, 1, 2))
        length = draw.randint(max(2, slots // (3 * n)), max(2, slots // n - config.block_size))
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, length - 1))]
        made.append(Request(f"crowd {index}", prompt, length - len(prompt), n, draw.randrange(2)))
    return made


class RotatingScheduler(Scheduler):
    """Lets swapped requests take turns with running ones: stores and loads meet on the same blocks in one step.

    Args:
        manager: decides the steps.
        period: steps of a turn; 0 for none.
    """

    def __init__(self, manager: BlockManager, period: int = 0) -> None:
        super().__init__(manager, preemption_mode="swap", max_num_seqs=6, max_num_batched_tokens=40, overlap_io=True)
        self._period = period

    def _append_to_running(self) -> bool:
        turn = self._period and self.stats().steps % self._period == 0
        if turn and self._swapping.swapped and self.num_running > 1:
            first = self._rows.owner(0)[0]
            self._preempt(self._rows.find(first.seats))
            for idle in first.idle:
                if idle.place == "swapped":  # behind those that it makes room for
                    self._swapping.swapped.discard(idle)
                    idle.rank = (1 << 30, 0.0, self.stats().steps)
                    self._swapping.swapped.push(idle)
        return super()._append_to_running()


def overlapping(manager: BlockManager, config: Config) -> Scheduler:
    """The reference scheduler as the machine drives it, with or without turns."""
    return RotatingScheduler(manager, config.device_blocks % 4)
