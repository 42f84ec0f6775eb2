"""The two runs that the demo compares: one over paged tiers, one unpaged; and the models for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from blockyard._core import Pairs, StepDecision, TierStats
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.demo_model import demo_model
from blockyard.integrations.generator import Generator
from blockyard.integrations.transformers import reference_generate
from blockyard.offload.executor import Executor, StepExecutor
from blockyard.scheduler import SchedulerStats
from blockyard.sim.executors import CorruptingExecutor, CountingExecutor, SabotagedExecutor
from blockyard.sim.report import Progress
from blockyard.sim.workload import Encode, WorkItem

Outputs = dict[str, list[list[int]]]

LARGEST_MODEL_FOR_ONE_THREAD = 10_000_000


@dataclass(frozen=True)
class Served:
    """What a paged run gave and counted.

    Attributes:
        outputs: generated tokens by request id, one list per sequence.
        seconds: wall time.
        stats: the scheduler's counters.
        tier: the external tier's counters.
        blocks: blocks by (kind, source, destination).
        bytes_per_block: all layers, keys and values.
        totals: blocks of each tier.
    """

    outputs: Outputs
    seconds: float
    stats: SchedulerStats
    tier: TierStats
    blocks: dict[tuple[str, str, str], int]
    bytes_per_block: int
    totals: dict[str, int]


class Faults:
    """Puts the counting and disturbing executors around the one that does the work.

    Args:
        corrupt: blocks to damage in the file; 0 for none.
        sabotage: kind of transfer to drop one of; nothing if None.
        seed: decides what is damaged.
    """

    def __init__(self, *, corrupt: int = 0, sabotage: str | None = None, seed: int = 0) -> None:
        self.corrupt = corrupt
        self.sabotage = sabotage
        self._seed = seed
        self.counting = CountingExecutor(_Nothing())
        self.corrupting: CorruptingExecutor | None = None
        self.sabotaged: SabotagedExecutor | None = None

    def wrap(self, executor: Executor) -> Executor:
        """Wrap the executor of a `Generator`.

        Args:
            executor: the `StepExecutor` that the generator has made.

        Returns:
            What the generator is to call instead.

        Raises:
            InvalidArgumentError: another kind of executor, or blocks are to be damaged and there is no external tier.
        """
        if not isinstance(executor, StepExecutor):
            raise InvalidArgumentError(f"the executor is a {type(executor).__name__}, faults need a StepExecutor")
        inner: Executor = executor
        if self.sabotage is not None:
            inner = self.sabotaged = SabotagedExecutor(executor, self.sabotage)
        if self.corrupt:
            if executor.store is None:
                raise InvalidArgumentError(f"{self.corrupt} blocks are to be damaged, and there is no external tier")
            inner = self.corrupting = CorruptingExecutor(inner, executor.store, self.corrupt, seed=self._seed)
        self.counting = CountingExecutor(inner)
        return self.counting


class _Nothing:
    def execute(self, decision: StepDecision) -> list[Pairs]:
        raise InvalidArgumentError(f"{len(decision)} pairs are to be moved before an executor was wrapped")


def choose_device(name: str) -> str:
    """Find the device to run on.

    Args:
        name: `cpu`, `cuda`, `cuda:1` and the like, or `auto`: cuda where there is one.

    Returns:
        torch's name of the device.

    Raises:
        InvalidArgumentError: torch knows no such device, or this machine has none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError(f"device is {name!r}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device is {name!r}, must be cpu, cuda or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError(f"device is {name!r}, this machine has {torch.cuda.device_count()} CUDA devices")
    return str(device)


def load_model(folder: Path | None, device: str) -> PreTrainedModel:
    """Load a local checkpoint, or build the demo's own model.

    Args:
        folder: a checkpoint as `save_pretrained` writes it; the small random Llama if None.
        device: where to put it.

    Returns:
        The model in fp32, in which paged and unpaged runs agree token by token.

    Raises:
        InvalidArgumentError: the folder holds no model that transformers can load.
    """
    if folder is None:
        return demo_model(device=device)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot load a model from {folder}: {str(error).splitlines()[0]}") from error
    model.eval()
    model.to(device)  # type: ignore[arg-type]  # the decorated method is typed without its first argument
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def fitting_threads(model: PreTrainedModel) -> Iterator[None]:
    """Run a small model on one CPU thread for as long as the context lasts.

    Its matrices are too small to be worth sharing out, and threads that wait for each other stand still as soon as
    anything else wants the cores.

    Args:
        model: what will run.
    """
    threads = torch.get_num_threads()
    small = sum(weight.numel() for weight in model.parameters()) <= LARGEST_MODEL_FOR_ONE_THREAD
    try:
        if small and model.device.type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def load_encode(folder: Path | None) -> Encode | None:
    """Load a checkpoint's tokenizer.

    Args:
        folder: the checkpoint.

    Returns:
        What turns text into its tokens; None, for one token a byte, where there is no tokenizer.
    """
    if folder is None or not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot load the tokenizer in {folder}: {str(error).splitlines()[0]}") from error

    def encode(text: NDArray[np.int64]) -> NDArray[np.int64]:
        words = text.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        return np.asarray(tokenizer.encode(words, add_special_tokens=False), dtype=np.int64)

    return encode


def serve(generator: Generator, items: Sequence[WorkItem], faults: Faults, view: Progress) -> Served:
    """Serve a workload to its end.

    Requests arrive on a clock that advances by one tick a step. The tick is such that all have arrived within the
    steps of the longest answer, so that they press on memory however long the trace lasted.

    Args:
        generator: made with `faults.wrap` as its `wrap_executor`.
        items: the requests.
        faults: what counts, and what disturbs.
        view: told about every step.

    Returns:
        Tokens and counters.

    Raises:
        OutOfBlocksError: a request would not fit on the device even alone.
    """
    waiting = deque(sorted(items, key=lambda item: item.arrival))
    tick = _tick(items)
    clock, started = 0.0, time.perf_counter()
    outputs: Outputs = {}
    while waiting or generator.num_unfinished:
        if waiting and not generator.num_unfinished:
            clock = max(clock, waiting[0].arrival)
        while waiting and waiting[0].arrival <= clock:
            item = waiting.popleft()
            generator.add(item.request_id, item.prompt, item.sampling, arrival=item.arrival)
        for done in generator.step():
            outputs[done.request.request_id] = [list(tokens) for tokens in done.outputs]
        clock += tick
        view.step(len(outputs), len(items), _note(generator))
    totals = {tier: generator.manager.num_blocks(tier) for tier in ("device", "host", "external")}
    return Served(
        outputs=outputs,
        seconds=time.perf_counter() - started,
        stats=generator.scheduler.stats,
        tier=generator.store.stats() if generator.store is not None else TierStats(),
        blocks=dict(faults.counting.blocks),
        bytes_per_block=generator.engine.layout.bytes_per_block,
        totals=totals,
    )


def reference(model: PreTrainedModel, items: Sequence[WorkItem], view: Progress) -> tuple[Outputs, float]:
    """Run the same requests through Hugging Face's `generate`, one sequence at a time.

    Args:
        model: the model that the generator was given.
        items: the requests.
        view: told about every request.

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
    """Seconds of the arrivals' clock that one step stands for."""
    longest = max(item.sampling.max_tokens for item in items)
    return max(item.arrival for item in items) / longest


def _note(generator: Generator) -> str:
    manager, scheduler = generator.manager, generator.scheduler
    use = ", ".join(
        f"{tier} {manager.num_blocks(tier) - manager.num_free(tier)}/{manager.num_blocks(tier)}"
        for tier in ("device", "host", "external")
    )
    return f"{scheduler.num_running} running, {scheduler.num_swapped} swapped; blocks {use}"
