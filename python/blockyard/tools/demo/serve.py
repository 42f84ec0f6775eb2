"""The demo's paged run, and the comparison of its tokens with the unpaged model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from blockyard.errors import InvalidArgumentError
from blockyard.executor import Executor, ParallelExecutor, StepExecutor
from blockyard.integrations.sampling import sample
from blockyard.integrations.transformers.generator import Generator
from blockyard.progress import Progress
from blockyard.scheduler import SchedulerStats
from blockyard.tools.demo.executors import CorruptingExecutor, CountingExecutor, SabotagedExecutor, SteadyExecutor
from blockyard.tools.demo.report import TIERS, Difference
from blockyard.tools.demo.workload import WorkItem
from blockyard.types import StoreStats

Outputs = dict[str, list[list[int]]]
TIE: Final = 1e-3
"""Largest difference of two tied tokens, in standard deviations of the logits.

Paged and unpaged runs add the same numbers in different orders. Over 3,000 tokens of each of the demo's models (fp32,
CPU), their logits differed by at most 5.5e-5 (llama), 2.7e-4 (gpt-oss) and 3.7e-4 (qwen3.5); two logits may differ by
twice that, and other machines round differently.
"""


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
        totals: number of blocks in each tier.
        prefix_store: counters of the prefix store; None if there is none.
    """

    outputs: Outputs
    seconds: float
    stats: SchedulerStats
    swap_store: StoreStats
    blocks: dict[tuple[str, str, str], int]
    bytes_per_block: int
    totals: dict[str, int]
    prefix_store: dict[str, Any] | None


class Faults:
    """Wraps an executor to count and disturb its transfers and to fix their timing.

    Args:
        corrupt: number of blocks to damage in the file.
        sabotage: kind of transfer of which one is dropped; none if None.
        seed: seed of the damage.
    """

    def __init__(self, *, corrupt: int = 0, sabotage: str | None = None, seed: int = 0) -> None:
        self.corrupt, self.sabotage, self._seed = corrupt, sabotage, seed
        self.blocks: dict[tuple[str, str, str], int] = {}
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
        counting = CountingExecutor(SteadyExecutor(inner))
        self.blocks = counting.blocks
        return counting


def serve(generator: Generator, items: Sequence[WorkItem], faults: Faults, view: Progress) -> PagedRun:
    """Serve requests that arrive at once.

    Args:
        generator: generator created with `faults.wrap` as its `wrap_executor`.
        items: the requests.
        faults: the wrappers that count and disturb its transfers.
        view: progress, updated after every step.

    Raises:
        OutOfBlocksError: a request does not fit on the device, even alone.
    """
    started = time.perf_counter()
    outputs: Outputs = {}
    for item in items:
        generator.add(item.request_id, item.prompt, item.sampling)
    while generator.num_unfinished:
        for done in generator.step():
            if done.error is not None:
                raise done.error
            outputs[done.request.request_id] = [list(tokens) for tokens in done.outputs]
        view.step(len(outputs), len(items), _note(generator))
    prefixes = generator.cache.prefix_store
    if prefixes is not None:
        prefixes.wait(10)
    return PagedRun(
        outputs=outputs,
        seconds=time.perf_counter() - started,
        stats=generator.scheduler.stats(),
        swap_store=generator.swap_store.stats() if generator.swap_store is not None else StoreStats(),
        blocks=dict(faults.blocks),
        bytes_per_block=generator.engine.layout.bytes_per_block,
        totals={tier: generator.manager.pool(tier).num_blocks for tier in TIERS},
        prefix_store=None if prefixes is None else asdict(prefixes.stats()),
    )


def compare(
    model: PreTrainedModel, items: Sequence[WorkItem], outputs: Outputs, view: Progress
) -> tuple[list[Difference], int]:
    """Compare each token with what the unpaged model chooses after the tokens before it.

    The model sees prompt and answer in one pass, without a cache. If every token is its own choice, the answer is what
    it generates alone.

    Args:
        model: the generator's model.
        items: the requests.
        outputs: tokens of the paged run.
        view: progress, updated after every request.

    Returns:
        The first difference of every sequence that differs, and the number of ties in rounding.
    """
    differences, ties = [], 0
    for done, item in enumerate(items, 1):
        for index, answer in enumerate(outputs[item.request_id]):
            tokens = answer + [-1] * (len(answer) < item.sampling.max_tokens)  # no token of a model is -1
            place, wanted, tied = _first_difference(_logits(model, item, tokens), item, index, tokens)
            ties += tied
            if wanted is not None:
                differences.append(Difference(item.request_id, index, place, tokens[place], wanted))
        view.step(done, len(items), "")
    return differences, ties


def _first_difference(
    logits: NDArray[np.float64], item: WorkItem, index: int, tokens: list[int]
) -> tuple[int, int | None, int]:
    """Return the place of the first wrong token and the right one, None if there is none; then the ties before it."""
    ties = 0
    for place, (scores, token) in enumerate(zip(logits, tokens, strict=True)):
        if place == item.sampling.max_tokens:
            return place, -1, ties
        position = len(item.prompt) + place
        wanted = sample(scores, item.sampling, index, position)
        if wanted == token:
            continue
        scores[token] += TIE * scores.std()
        if sample(scores, item.sampling, index, position) != token:
            return place, wanted, ties
        ties += 1
    return len(tokens), None, ties


def _logits(model: PreTrainedModel, item: WorkItem, tokens: list[int]) -> NDArray[np.float64]:
    """Return the unpaged model's logits of each token of an answer, `[tokens, vocab]`."""
    ids = torch.from_numpy(np.concatenate([item.prompt, tokens[:-1]]).astype(np.int64))[None].to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, -len(tokens) :]
    found: NDArray[np.float64] = logits.double().cpu().numpy()
    return found


def _note(generator: Generator) -> str:
    """Describe a step briefly for the progress bar."""
    manager, scheduler = generator.manager, generator.scheduler
    used = [str(manager.pool(tier).num_blocks - manager.pool(tier).num_free) for tier in TIERS]
    return f"{scheduler.num_running} running, {scheduler.num_swapped} swapped, blocks {'+'.join(used)}"
