"""Prompts in, tokens out: model, books, scheduler and executor put together."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from blockyard._core import BlockManager, CacheGroup, ResizeProgress
from blockyard.engine.elastic.cache import Resized
from blockyard.errors import InvalidArgumentError, InvariantError, UnknownTicketError
from blockyard.executor.executor import Executor, StepDone, StepExecutor
from blockyard.integrations.sampling import SamplingParams, sample
from blockyard.integrations.transformers.attention import StepInput
from blockyard.integrations.transformers.worker import Worker
from blockyard.layout.kv import LayoutKind
from blockyard.scheduler import (
    Defragmentation,
    Finished,
    PreemptionMode,
    Request,
    Scheduler,
    Step,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Prompt = Sequence[int] | NDArray[np.int64]
# A step that moves nothing and computes nothing, though requests wait, would repeat for ever.
IDLE_STEPS_ALLOWED = 2
# Between two looks at what is under way, where nothing else is left to do.
IDLE_SECONDS = 0.0002


class Generator:
    """Serves requests with one model whose KV is paged over device, host and an external tier.

    Numbers of blocks that are None are what there is room for. `manager`, `scheduler`, `engine` and `store` may be
    read for their counters.

    Args:
        model: a Hugging Face model on the device where it is to run.
        block_size: tokens in a block.
        kind: how the device's caches are laid out.
        num_device_blocks: blocks of the device.
        num_host_blocks: blocks of the host; 0 swaps from the device to the external tier.
        external_swapper: URL of the external tier, as `file:///dir?size=2GiB`; none if None.
        external_swapper_space: size of that tier, bytes or text as `2GiB`, where the URL names none.
        prefix_caching: let prompts share the blocks of earlier ones that began alike.
        preemption_mode: what becomes of a victim: `swap`, `recompute` or `auto`.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: tokens of a step beyond which prompts wait, or are computed in chunks.
        defragment: which moves of device blocks every step decides; none if None.
        elastic: lay the device's caches over memory that `resize_device` and `give_back` return to the system.
        wrap_executor: gives what is to carry out decisions in the executor's place, to watch or to disturb it.
        on_step: called after every step with what was scheduled and which requests finished.

    Raises:
        UnsupportedModelError: the model cannot be served.
        StoreError: the external tier cannot be opened.
        InvalidArgumentError: a number is out of range.

    Example:
        >>> from blockyard.sim.demo_model import demo_model
        >>> with Generator(demo_model(), num_device_blocks=8, num_host_blocks=8) as generator:
        ...     outputs = generator.generate([[72, 105], [33]], SamplingParams(max_tokens=4, temperature=0.8, n=2))
        >>> [[len(tokens) for tokens in sequences] for sequences in outputs]
        [[4, 4], [4, 4]]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_size: int = 16,
        kind: LayoutKind = "kv_first",
        num_device_blocks: int | None = None,
        num_host_blocks: int | None = None,
        external_swapper: str | None = None,
        external_swapper_space: int | str | None = None,
        prefix_caching: bool = True,
        preemption_mode: PreemptionMode = "auto",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        defragment: Defragmentation | None = None,
        elastic: bool = False,
        wrap_executor: Callable[[StepExecutor], Executor] | None = None,
        on_step: Callable[[Step, list[Finished]], None] | None = None,
    ) -> None:
        self.worker = Worker(
            model,
            block_size=block_size,
            kind=kind,
            external_swapper=external_swapper,
            external_swapper_space=external_swapper_space,
        )
        try:
            blocks = self._sizes(num_device_blocks, num_host_blocks, max_num_batched_tokens)
            self.engine = self.worker.initialize_cache(blocks[0], blocks[1], elastic=elastic)
            self.store = self.worker.initialize_external_cache(blocks[2])
            window = self.worker.model.sliding_window
            self.manager = BlockManager(
                block_size=block_size,
                device_blocks=blocks[0],
                host_blocks=blocks[1],
                external_blocks=blocks[2],
                groups=[CacheGroup.sliding_window(window)] if window is not None else None,
                prefix_caching=prefix_caching,
            )
            self.scheduler = Scheduler(
                self.manager,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                preemption_mode=preemption_mode,
                overlap_io=True,
                defragment=defragment,
            )
            executor = StepExecutor(self.engine, self.store)
            self.executor: Executor = wrap_executor(executor) if wrap_executor else executor
        except BaseException:
            self.worker.close()
            raise
        self._on_step = on_step
        self._params: dict[str, SamplingParams] = {}
        self._tickets: list[int] = []  # under way, the oldest first
        self._idle = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and are not done."""
        return self.scheduler.num_unfinished

    def add(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0, arrival: float = 0.0
    ) -> None:
        """Take in a request.

        Args:
            request_id: name, not in use.
            prompt: token ids, at least one.
            params: how its tokens are chosen, and how many.
            priority: lower goes first.
            arrival: seconds; earlier goes first within a priority.

        Raises:
            InvalidArgumentError: the request is malformed, its id is in use, a token is not in the vocabulary, or the
                model has too few positions.
            OutOfBlocksError: even alone on the device it would not fit to its end.
        """
        tokens = np.asarray(prompt, dtype=np.int64)
        model = self.worker.model
        if tokens.ndim != 1 or len(tokens) == 0:
            raise InvalidArgumentError(
                f"the prompt of {request_id!r} has shape {list(tokens.shape)}, [tokens] is needed"
            )
        if tokens.min() < 0 or tokens.max() >= model.vocab_size:
            raise InvalidArgumentError(
                f"the prompt of {request_id!r} has tokens from {tokens.min()} to {tokens.max()}, "
                f"the vocabulary has {model.vocab_size}"
            )
        longest = len(tokens) + params.max_tokens
        if model.max_model_len is not None and longest > model.max_model_len:
            raise InvalidArgumentError(
                f"request {request_id!r} has {len(tokens)} + {params.max_tokens} tokens, "
                f"the model has {model.max_model_len} positions"
            )
        request = Request(
            request_id,
            tokens.tolist(),
            params.max_tokens,
            n=params.n,
            priority=priority,
            arrival=arrival,
            stop_token_ids=params.stops,
        )
        self.scheduler.add(request)
        self._params[request_id] = params

    def abort(self, request_id: str) -> None:
        """Forget a request; its id can be used again at once.

        Raises:
            InvalidArgumentError: there is no such request.
        """
        self.scheduler.abort(request_id)
        del self._params[request_id]

    def step(self) -> list[Finished]:
        """Run one step: decide, start to move blocks, compute, sample, take in what has landed.

        Blocks move beside compute: a layer is computed when its loads are there, stores drain behind it, and what comes
        from the external tier joins a later step. If nothing can be computed meanwhile, the step waits for that.

        If executor or model raise, the error goes to the caller; the step's requests start again from their tokens.

        Returns:
            The requests that it finished; with their `error` those that a device that shrank has no room for any more.

        Raises:
            InvariantError: nothing can run although requests wait.
        """
        self.give_back()
        step = self.scheduler.schedule()
        ticket = step.decision.ticket
        try:
            self.executor.submit(step.decision, by_layer=True)
            self._tickets.append(ticket)
        except BaseException:
            # What landed is not known: nothing counts as landed, and the leases end.
            with contextlib.suppress(UnknownTicketError):
                self.executor.wait(ticket)
            self.scheduler.finish(ticket, [pairs for _, pairs in step.decision.transfers()])
            self.scheduler.give_up()
            raise
        try:
            sampled = self._compute(step) if step.rows else []
        except BaseException:
            self.scheduler.give_up()
            raise
        self._take_in_what_landed(step)
        finished = self.scheduler.update(step, sampled)
        for done in finished:
            del self._params[done.request.request_id]
        self._note_idle(step)
        if self._on_step is not None:
            self._on_step(step, finished)
        return finished

    def resize_device(self, num_device_blocks: int) -> ResizeProgress:
        """Give the device so many blocks from now on, while requests are under way.

        Args:
            num_device_blocks: at most as many as there were at first.

        Returns:
            What is in use beyond the end, now; its memory goes as it becomes unused, see `give_back`. Requests that do
            not fit any more, even alone, end with the next step.

        Raises:
            InvalidArgumentError: there are no tensors for so many, or the books need more; the pool is as it was.
            OutOfMemoryError: there is not enough memory to grow.
        """
        elastic, most = self.worker.elastic, self.engine.num_blocks("device")
        if num_device_blocks > most:
            raise InvalidArgumentError(f"{num_device_blocks} device blocks are wanted, the tensors have {most}")
        if elastic is not None and num_device_blocks > elastic.num_blocks:
            elastic.resize(num_device_blocks)
        return self.manager.defrag.resize(num_device_blocks)

    def give_back(self) -> Resized | None:
        """Return memory of device blocks that a smaller pool has no use for; every step does it, too.

        Returns:
            What went; None if nothing could, or the caches are not elastic.
        """
        elastic = self.worker.elastic
        extent = self.manager.defrag.progress().extent
        return None if elastic is None or extent >= elastic.num_blocks else elastic.resize(extent)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[list[int]]]:
        """Serve prompts to their ends, all present from the start.

        Args:
            prompts: token ids of each request.
            params: one for all, or one for each.

        Returns:
            For each prompt its `n` sequences of generated tokens, a token that ended one included.

        Raises:
            InvalidArgumentError: a request is malformed, the numbers differ, or other requests are under way; none of
                these was added.
            OutOfBlocksError: a request would not fit on the device even alone, or no longer does.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidArgumentError(f"{len(prompts)} prompts have {len(each)} sampling params")
        if self.num_unfinished:
            raise InvalidArgumentError(f"{self.num_unfinished} requests are under way")
        names = [f"generate-{index}" for index in range(len(prompts))]
        outputs: dict[str, list[list[int]]] = {}
        try:
            for name, prompt, chosen in zip(names, prompts, each, strict=True):
                self.add(name, prompt, chosen)
            while len(outputs) < len(names):
                for done in self.step():
                    if done.error is not None:
                        raise done.error
                    outputs[done.request.request_id] = [list(tokens) for tokens in done.outputs]
            self.drain()
        except BaseException:
            for name in tuple(self._params):
                self.abort(name)
            raise
        return [outputs[name] for name in names]

    def drain(self) -> None:
        """Wait for all transfers that are under way, so that the books are at rest."""
        while self._tickets:
            self._end(self.executor.wait(self._tickets[0]))

    def close(self) -> None:
        """Give back caches and tier; twice does nothing."""
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sizes(self, device: int | None, host: int | None, tokens: int) -> tuple[int, int, int]:
        if device is None or host is None:
            room = self.worker.determine_num_available_blocks(max_num_batched_tokens=tokens)
            device = room[0] if device is None else device
            host = room[1] if host is None else host
        return device, host, self.worker.determine_num_external_available_blocks()

    def _compute(self, step: Step) -> list[int]:
        """Run the model, and draw a token for each of the step's draws."""
        wait = partial(self.executor.wait_for_layer, step.decision.ticket)
        where = StepInput(step.start, step.lengths.astype(np.int64), step.block_tables, step.slot_mapping)
        logits = self.worker.model.forward(step.token_ids, where, samples=step.samples, before_layer=wait)
        rows = logits.cpu().numpy()
        return [
            sample(rows[draw.row], self._params[draw.request_id], draw.sequence, draw.position) for draw in step.draws()
        ]

    def _take_in_what_landed(self, step: Step) -> None:
        """End the tickets that are done, and wait for this step's if what it computed depends on it."""
        ended = self.executor.collect(step.decision.ticket)
        while not (step.rows or ended) and self._tickets:
            time.sleep(IDLE_SECONDS)
            ended = self.executor.poll()
        for done in ended:
            self._end(done)

    def _end(self, done: StepDone) -> None:
        """Tell the scheduler that a ticket has ended, and the user what went wrong."""
        self._tickets.remove(done.ticket)
        for error in done.errors:
            warnings.warn(f"{sum(len(pairs) for pairs in done.lost)} blocks did not land: {error}", stacklevel=4)
        self.scheduler.finish(done.ticket, done.lost)

    def _note_idle(self, planned: Step) -> None:
        """Stop where the scheduler has nothing to do for requests that wait."""
        idle = not planned.rows and not len(planned.decision) and not self._tickets and self.num_unfinished
        self._idle = self._idle + 1 if idle else 0
        if self._idle > IDLE_STEPS_ALLOWED:
            raise InvariantError(
                f"{self.num_unfinished} requests wait, {self.manager.pool('device').num_free} of "
                f"{self.manager.pool('device').num_blocks} device blocks are free, and nothing is scheduled"
            )
