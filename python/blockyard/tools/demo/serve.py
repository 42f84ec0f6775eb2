"""The two runs that the demo compares: one over paged tiers, one unpaged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from transformers import PreTrainedModel

from blockyard.errors import InvalidArgumentError
from blockyard.executor import Executor, ParallelExecutor, StepExecutor
from blockyard.integrations.transformers.generator import Generator
from blockyard.integrations.transformers.model import reference_generate
from blockyard.progress import Progress
from blockyard.scheduler import SchedulerStats
from blockyard.tools.demo.executors import CorruptingExecutor, CountingExecutor, SabotagedExecutor, SteadyExecutor
from blockyard.tools.demo.workload import WorkItem
from blockyard.types import StoreStats

Outputs = dict[str, list[list[int]]]


@dataclass(frozen=True)
class PagedRun:
    """Results and counters of a paged run.

    Attributes:
        outputs: generated tokens by request id, one list per sequence.
        seconds: wall time of the run.
        stats: counters of the scheduler.
        swap_store: counters of the swap store.
        blocks: number of blocks by (kind, source, destination).
        bytes_per_block: size of a block: all layers, keys and values.
        totals: number of blocks in each tier at the start.
        prefix_store: counters of the prefix store; None if there is none.
    """

    outputs: Outputs
    seconds: float
    stats: SchedulerStats
    swap_store: StoreStats
    blocks: dict[tuple[str, str, str], int]
    bytes_per_block: int
    totals: dict[str, int]
    prefix_store: dict[str, Any] | None = None


class RunWatch(Protocol):
    """Observes the steps of a run."""

    def after_step(self, done: int, total: int) -> None:
        """Observe a step; `done` of `total` requests are finished."""


class Faults:
    """Wraps an executor to count and disturb its transfers and to fix their timing.

    Args:
        corrupt: number of blocks to damage in the file.
        sabotage: kind of transfer of which one is dropped; none if None.
        seed: seed of the damage.
    """

    def __init__(self, *, corrupt: int = 0, sabotage: str | None = None, seed: int = 0) -> None:
        self.corrupt = corrupt
        self.sabotage = sabotage
        self._seed = seed
        self.counting: CountingExecutor | None = None
        self.corrupting: CorruptingExecutor | None = None
        self.sabotaged: SabotagedExecutor | None = None

    def wrap(self, executor: Executor) -> Executor:
        """Wrap the executor of a `Generator`.

        Args:
            executor: the generator's `StepExecutor` or `ParallelExecutor`; of the latter, rank 0 is disturbed.

        Returns:
            The executor for the generator to call.

        Raises:
            InvalidArgumentError: the executor is of another kind, or blocks shall be damaged without an external tier.
        """
        own = executor.executors[0] if isinstance(executor, ParallelExecutor) else executor
        if not isinstance(own, StepExecutor):
            raise InvalidArgumentError(f"the executor is a {type(own).__name__}, faults need a StepExecutor")
        inner: Executor = executor
        if self.sabotage is not None:
            inner = self.sabotaged = SabotagedExecutor(executor, own, self.sabotage)
        if self.corrupt:
            if own.store is None:
                raise InvalidArgumentError(f"cannot damage {self.corrupt} blocks: there is no external tier")
            inner = self.corrupting = CorruptingExecutor(inner, own.store, self.corrupt, seed=self._seed)
        self.counting = CountingExecutor(SteadyExecutor(inner))
        return self.counting


def serve(
    generator: Generator,
    items: Sequence[WorkItem],
    faults: Faults,
    view: Progress,
    watches: Sequence[RunWatch] = (),
) -> PagedRun:
    """Serve a workload to its end.

    Time advances by one tick per step. All requests arrive within the steps of the longest answer, so memory is under
    pressure however long the trace lasted.

    Args:
        generator: generator created with `faults.wrap` as its `wrap_executor`.
        items: the requests.
        faults: the wrappers that count and disturb its transfers.
        view: progress, updated after every step.
        watches: observers, called after every step.

    Returns:
        The tokens and counters.

    Raises:
        OutOfBlocksError: a request does not fit on the device, even alone, or no longer does after a shrink.
    """
    waiting = deque(sorted(items, key=lambda item: item.arrival))
    tick = _tick(items)
    since, ticks, started = 0.0, 0, time.perf_counter()
    outputs: Outputs = {}
    totals = {tier: generator.manager.pool(tier).num_blocks for tier in ("device", "host", "external")}
    while waiting or generator.num_unfinished:
        if waiting and not generator.num_unfinished and waiting[0].arrival > since + ticks * tick:
            since, ticks = waiting[0].arrival, 0
        while waiting and waiting[0].arrival <= since + ticks * tick:
            item = waiting.popleft()
            generator.add(item.request_id, item.prompt, item.sampling, arrival=item.arrival)
        for done in generator.step():
            if done.error is not None:
                raise done.error
            outputs[done.request.request_id] = [list(tokens) for tokens in done.outputs]
        for watch in watches:
            watch.after_step(len(outputs), len(items))
        ticks += 1
        view.step(len(outputs), len(items), _note(generator))
    prefixes = generator.cache.prefix_store
    if prefixes is not None:
        prefixes.wait(10)
    return PagedRun(
        outputs=outputs,
        seconds=time.perf_counter() - started,
        stats=generator.scheduler.stats(),
        swap_store=generator.swap_store.stats() if generator.swap_store is not None else StoreStats(),
        blocks=dict(faults.counting.blocks) if faults.counting is not None else {},
        bytes_per_block=generator.engine.layout.bytes_per_block,
        totals=totals,
        prefix_store=None if prefixes is None else asdict(prefixes.stats()),
    )


def reference(model: PreTrainedModel, items: Sequence[WorkItem], view: Progress) -> tuple[Outputs, float]:
    """Run the same requests through Hugging Face's `generate`, one sequence at a time.

    Args:
        model: the generator's model.
        items: the requests.
        view: progress, updated after every request.

    Returns:
        Generated tokens by request id, and the wall time in seconds.
    """
    started = time.perf_counter()
    outputs: Outputs = {}
    for item in items:
        outputs[item.request_id] = [
            reference_generate(model, item.prompt, item.sampling, index) for index in range(item.sampling.n)
        ]
        view.step(len(outputs), len(items), "")
    return outputs, time.perf_counter() - started


def _tick(items: Sequence[WorkItem]) -> float:
    """Return the seconds of trace time that one step represents."""
    longest = max(item.sampling.max_tokens for item in items)
    return max(item.arrival for item in items) / longest


def _note(generator: Generator) -> str:
    """Describe a step briefly for the progress bar."""
    manager, scheduler = generator.manager, generator.scheduler
    used = [str(manager.pool(tier).num_blocks - manager.pool(tier).num_free) for tier in ("device", "host", "external")]
    return f"{scheduler.num_running} running, {scheduler.num_swapped} swapped, blocks {'+'.join(used)}"
