"""Prompts in, tokens out: serves a model from a `KVCache` with the reference scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from blockyard._core import PrefixCaching
from blockyard.cache import KVCache
from blockyard.errors import InvalidArgumentError
from blockyard.executor.executor import Executor
from blockyard.integrations.prompt_lookup import prompt_lookup
from blockyard.integrations.sampling import SamplingParams, sample
from blockyard.integrations.transformers.attention import StepInput
from blockyard.integrations.transformers.hybrid import open_model
from blockyard.integrations.transformers.model import ServedModel
from blockyard.integrations.transformers.ranks import CacheOptions, CacheSizes, RankGroup
from blockyard.integrations.transformers.sizing import MEMORY_UTILIZATION, available_blocks
from blockyard.layout import ArenaLayout, LayoutKind
from blockyard.scheduler import (
    DefragPolicy,
    Finished,
    PreemptionMode,
    Request,
    Scheduler,
    Step,
)
from blockyard.scheduler.step import as_token_ids
from blockyard.stores import ExternalStore
from blockyard.stores.url import public_url
from blockyard.types import ResizeProgress
from blockyard.workers.interrupts import keep

if TYPE_CHECKING:
    from typing_extensions import Self

Prompt = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True)
class Output:
    """The result of one prompt.

    Attributes:
        index: index of the prompt.
        sequences: token ids generated for each of its `n` sequences, including a final stop token.
        texts: the same as text, if any prompt of the call was text; else None.
    """

    index: int
    sequences: tuple[list[int], ...]
    texts: tuple[str, ...] | None

    @property
    def tokens(self) -> list[int]:
        """Token ids of the first sequence."""
        return self.sequences[0]

    @property
    def text(self) -> str:
        """Text of the first sequence.

        Raises:
            InvalidArgumentError: the prompts were token ids.
        """
        if self.texts is None:
            raise InvalidArgumentError("the prompts were token ids: read `tokens`, or pass text prompts")
        return self.texts[0]


class Generator:
    """Serves requests with one model whose KV cache is paged over device, host and an external tier.

    Read counters from `manager`, `scheduler`, `engine` and `store`; with several ranks they are rank 0's.

    Args:
        model: a Hugging Face model, already on its device.
        tokenizer: converts text prompts to token ids and back; None means the model's own, loaded by name.
        block_size: tokens in a block.
        kind: layout of the device caches; `kv_first` for a model whose layers differ.
        device_blocks: number of device blocks; None means as many as fit.
        device_bytes: size of the device cache in bytes, instead of `device_blocks`: an int or text such as `"2GiB"`. If
            a model's layers differ, each cache group then has blocks of its own size, see `ArenaLayout`; such a cache
            cannot have a swap store.
        host_blocks: number of host blocks, 0 for none; None means as many as fit, or none with `device_bytes`.
        host_bytes: size of the host cache in bytes, instead of `host_blocks`.
        pin_memory: whether host memory is page-locked, see `CacheEngine`.
        swap_store: URL of an external store, such as `file:///dir?size=2GiB`; `{rank}` is replaced by the rank's
            number. With one rank, may be an open store, see `KVCache`; `close` closes it.
        prefix_caching: whether prompts share the blocks of earlier prompts with the same prefix; or a `PrefixCaching`,
            to keep those blocks on the host, too.
        prefix_store: URL of a persistent store for cached blocks, see `KVCache`.
        prefix_writes: which blocks are written to it, see `KVCache`.
        prefetch_timeout_base: minimum timeout in seconds for loading a prompt from the store, see `KVCache`.
        namespace: identifies the model and weight revision in the stores, see `KVCache`.
        tensor_parallel_size: number of processes that share the model, each with its part of the heads, on one CPU
            machine. This process is rank 0 and starts the others. Block counts and the size in the URL are per rank.
        preemption_mode: what happens to a victim: `swap`, `recompute` or `auto`.
        num_lookahead_tokens: maximum number of draft tokens verified per sequence and step, for speculative decoding.
            The output is the same as with plain decoding, even when sampling.
        draft: returns draft tokens for a sequence's token ids so far, uint32 `[tokens]`; extra ones are dropped. None
            means `prompt_lookup`.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of tokens in one step; prompts beyond it wait or are computed in chunks.
        defragment: block moves on the device to decide in every step; None for none.
        elastic: allocate the device caches in memory that `resize_device` can return to the system.
        wrap_executor: wraps the executor of decisions, to observe or disturb it. The executor is a `StepExecutor`, or
            the `ParallelExecutor` of all ranks.
        on_step: called after every step with the step and the finished requests.

    Raises:
        UnsupportedModelError: the model cannot be served, or not sharded.
        StoreError: the external tier cannot be opened.
        InvalidArgumentError: a number is out of range, or an option is not supported with several ranks.
        WorkerError: another rank's process failed. Later calls may raise it, too; then close the generator.

    Example:
        >>> from blockyard.integrations.transformers import Generator
        >>> from blockyard.tools.demo.demo_model import demo_model
        >>> with Generator(demo_model(), device_blocks=8, host_blocks=8) as generator:
        ...     outputs = list(generator.generate([[72, 105], [33]], max_new_tokens=4))
        >>> sorted((output.index, len(output.tokens)) for output in outputs)
        [(0, 4), (1, 4)]
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        block_size: int = 16,
        kind: LayoutKind = "kv_first",
        device_blocks: int | None = None,
        device_bytes: int | str | None = None,
        host_blocks: int | None = None,
        host_bytes: int | str | None = None,
        pin_memory: bool | None = None,
        swap_store: str | ExternalStore | None = None,
        prefix_caching: bool | PrefixCaching = True,
        prefix_store: str | None = None,
        prefix_writes: str = "through",
        prefetch_timeout_base: float = 0.25,
        namespace: bytes = b"",
        tensor_parallel_size: int = 1,
        preemption_mode: PreemptionMode = "auto",
        num_lookahead_tokens: int = 0,
        draft: Callable[[NDArray[np.uint32]], Sequence[int]] | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        defragment: DefragPolicy | None = None,
        elastic: bool = False,
        wrap_executor: Callable[[Executor], Executor] | None = None,
        on_step: Callable[[Step, list[Finished]], None] | None = None,
    ) -> None:
        self._tokenizer, self._draft, size = tokenizer, draft, tensor_parallel_size
        self._on_step, self._num_lookahead_tokens = on_step, num_lookahead_tokens
        with contextlib.ExitStack() as undo:
            _check_options(size, swap_store=swap_store, prefix_store=prefix_store, elastic=elastic)
            sizes = _check_sizes(size, CacheSizes(device_blocks, device_bytes, host_blocks, host_bytes))
            ranks = None if size == 1 else undo.enter_context(RankGroup(model, size, block_size=block_size, kind=kind))
            self.ranks = ranks
            open_ = partial(open_model, block_size=block_size, kind=kind, equal_blocks=device_bytes is None)
            self.model = undo.enter_context(contextlib.closing(ranks.model if ranks else open_(model)))
            sizes = _sizes(self.model, sizes, size, max_num_batched_tokens)
            options = CacheOptions(sizes, pin_memory, swap_store, namespace and namespace + self.model.namespace)
            self.cache = KVCache(
                self.model.layout,
                **options.of_rank(0, size),
                device=self.model.device,
                max_device_blocks=sizes.device_blocks if elastic else None,
                external_blocks=ranks.open_caches(options) if ranks else None,
                prefix_caching=prefix_caching,
                prefix_store=prefix_store,
                prefix_writes=prefix_writes,
                prefetch_timeout_base=prefetch_timeout_base,
                groups=None if isinstance(self.model.layout, ArenaLayout) else self.model.groups or None,
            )
            undo.callback(self.cache.close)
            self.model.bind(self.cache.engine.tensors)
            self.manager, self.engine, self.swap_store = self.cache.manager, self.cache.engine, self.cache.swap_store
            executor = ranks.executor(self.cache.executor) if ranks else self.cache.executor
            self.executor: Executor = wrap_executor(executor) if wrap_executor else executor
            self.scheduler = Scheduler(
                self.cache,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                preemption_mode=preemption_mode,
                num_lookahead_tokens=num_lookahead_tokens,
                defragment=defragment,
                executor=self.executor,
            )
            self._closing = undo.pop_all()
        self._params: dict[str, SamplingParams] = {}
        self._finished: list[list[Finished]] = []  # of calls; after an exception the next step processes them
        self._to_abort: list[str] = []

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return self.scheduler.num_unfinished

    def add(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0, arrival: float = 0.0
    ) -> None:
        """Add a request.

        Args:
            request_id: unique name.
            prompt: token ids, at least one.
            params: sampling options.
            priority: lower goes first.
            arrival: seconds; earlier goes first within a priority.

        Raises:
            InvalidArgumentError: the request is malformed, its id is in use, a token is not in the vocabulary, or the
                model has too few positions.
            OutOfBlocksError: it could not finish even alone on the device.
        """
        given = np.asarray(prompt)
        model = self.model
        if given.ndim != 1 or len(given) == 0:
            raise InvalidArgumentError(
                f"the prompt of {request_id!r} has shape {list(given.shape)}, must be [tokens], not empty"
            )
        tokens = as_token_ids(given, f"token ids of the prompt of {request_id!r}")
        if tokens.max() >= model.vocab_size:
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
        added: list[object] = []
        try:
            keep(added, self.scheduler.add, request)
            self._params[request_id] = params
        except BaseException:
            if added:
                self.scheduler.abort(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Drop a request; its id can be reused at once.

        Raises:
            InvalidArgumentError: there is no such request.
        """
        finished = [done for some in self._finished for done in some]
        left = [done for done in finished if done.request.request_id != request_id]
        if len(left) == len(finished):
            try:
                self.scheduler.abort(request_id)
            except InvalidArgumentError:  # already dropped, if an earlier call was interrupted
                self._params.pop(request_id, None)
                raise
        self._finished = [left]
        self._params.pop(request_id, None)

    def step(self) -> list[Finished]:
        """Run one step: decide, start block transfers, compute, sample, and complete landed transfers.

        Transfers overlap compute: a layer is computed once its loads have arrived, stores continue in the background,
        and sequences from the external tier join a later step. If nothing can be computed, the step waits for them.

        If the executor or model raises, or the step is interrupted, the error propagates to the caller, and the step's
        requests start again from their tokens. The next step returns the requests that had already finished.

        Returns:
            The finished requests, including, with their `error`, those that no longer fit a device that shrank.

        Raises:
            InvariantError: nothing can run although requests wait.
        """
        self.scheduler.give_up()  # in case an interrupt prevented it in the previous call
        try:
            return self._step()
        except BaseException:
            self.scheduler.give_up()
            raise

    def _step(self) -> list[Finished]:
        with self.scheduler.step(by_layer=True) as step:
            sampled = self._compute(step) if step.rows else []
        keep(self._finished, self.scheduler.update, step, sampled)
        finished = [done for some in self._finished for done in some]
        for done in finished:
            self._params.pop(done.request.request_id, None)
        if self._on_step is not None:
            self._on_step(step, finished)
        self._finished = []
        return finished

    def resize_device(self, device_blocks: int) -> ResizeProgress:
        """Resize the device to `device_blocks` blocks, while requests are running.

        Args:
            device_blocks: at most the initial number.

        Returns:
            What is still in use beyond the end. Its memory is freed as it becomes unused. Requests that no longer fit,
            even alone, end with the next step.

        Raises:
            InvalidArgumentError: the tensors are too small, or the manager needs more; nothing was changed.
            OutOfMemoryError: there is not enough memory to grow.
        """
        return self.cache.resize(device_blocks)

    def generate(
        self,
        prompts: Sequence[str | Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int | None = None,
    ) -> Iterator[Output]:
        """Serve prompts to completion.

        Requests start when the first output is requested. If the caller stops early, the rest are aborted.

        Args:
            prompts: text or token ids of each request.
            params: sampling options, one for all or one per request; None means greedy, up to an end token of the
                model's `generation_config`.
            max_new_tokens: maximum number of tokens per sequence, if `params` is None.

        Yields:
            An `Output` per prompt, in the order in which they finish.

        Raises:
            InvalidArgumentError: a request is malformed, the numbers differ, or other requests are running; no request
                was added.
            OutOfBlocksError: a request does not fit on the device even alone, or no longer does.
        """
        if isinstance(prompts, str):
            raise InvalidArgumentError(f"prompts is {prompts!r:.60}, must be a list of prompts")
        if params is None:
            params = SamplingParams(stop_token_ids=self.model.eos_token_ids)
            params = params if max_new_tokens is None else replace(params, max_tokens=max_new_tokens)
        elif max_new_tokens is not None:
            raise InvalidArgumentError(f"max_new_tokens is {max_new_tokens}, but params have max_tokens: give only one")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidArgumentError(
                f"params has {len(each)} entries, must have one for each of {len(prompts)} prompts"
            )
        self._abort_left()
        if self.num_unfinished:
            raise InvalidArgumentError(f"{self.num_unfinished} other requests are running, must be 0 for generate")
        is_text = any(isinstance(prompt, str) for prompt in prompts)
        names = {f"generate-{index}": index for index in range(len(prompts))}
        try:
            for name, prompt, chosen in zip(names, prompts, each, strict=True):
                self.add(name, self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, chosen)
            while self.scheduler.num_unfinished:
                for done in self.step():
                    if done.error is not None:
                        raise done.error
                    sequences = tuple(list(tokens) for tokens in done.outputs)
                    texts = tuple(str(self.tokenizer.decode(tokens)) for tokens in sequences) if is_text else None
                    yield Output(names[done.request.request_id], sequences, texts)
            self.drain()
        finally:
            self._to_abort = list(names)
            self._abort_left()

    def _abort_left(self) -> None:
        """Abort the requests that `generate` left over; after an exception the next call does it."""
        while self._to_abort:
            with contextlib.suppress(InvalidArgumentError):  # already ended
                self.abort(self._to_abort[-1])
            self._params.pop(self._to_abort.pop(), None)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer for text prompts.

        Raises:
            InvalidArgumentError: none was given, and none was found by the model's name.
        """
        if self._tokenizer is None:
            name = self.model.name
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(name)
            except (OSError, ValueError) as error:
                message = f"tokenizer is None, and there is none for the model {name!r}: {error}"
                raise InvalidArgumentError(message) from None
        return self._tokenizer

    def drain(self) -> None:
        """Wait for all transfers in flight, so that no ticket is open."""
        self.scheduler.drain()

    def close(self) -> None:
        """Release caches and store. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _compute(self, step: Step) -> list[int]:
        """Run the model, and sample a token for each of the step's draws."""
        if self._num_lookahead_tokens:
            draft = self._draft or partial(prompt_lookup, num_tokens=self._num_lookahead_tokens)
            slots = (step.lengths[: step.decodes] - 1).tolist()
            step.set_draft_token_ids(
                [draft(step.all_token_ids(row))[:count] if count else () for row, count in enumerate(slots)]
            )
        lengths = step.lengths.astype(np.int64)
        where = StepInput(step.start, lengths, step.block_tables, step.slot_mapping, step.decodes)
        model = self.ranks or self.model
        logits = model.forward(
            step.token_ids, where, logits_indices=step.logits_indices, before_layer=step.wait_for_layer
        )
        return [
            sample(scores, self._params[draw.request_id], draw.sequence, draw.position)
            for scores, draw in zip(logits.cpu().numpy(), step.draws(), strict=True)
        ]


def _check_options(
    size: int, *, swap_store: str | ExternalStore | None, prefix_store: str | None, elastic: bool
) -> None:
    """Check for options that are not supported with several ranks."""
    if size != 1 and isinstance(swap_store, ExternalStore):
        raise InvalidArgumentError(
            f"swap_store is an open store and tensor_parallel_size {size}: each rank opens a URL"
        )
    for name, value in (("prefix_store", prefix_store), ("elastic", elastic)):
        if value and size != 1:
            shown = public_url(value) if isinstance(value, str) else value
            raise InvalidArgumentError(f"{name} is {shown!r} and tensor_parallel_size {size}: it needs a single rank")


def _check_sizes(size: int, sizes: CacheSizes) -> CacheSizes:
    """Check that sizes are given in blocks, or in bytes; these for a single rank."""
    if sizes.device_bytes is None and sizes.host_bytes is not None:
        raise InvalidArgumentError(f"host_bytes is {sizes.host_bytes!r}, must be None without device_bytes")
    if sizes.device_bytes is not None and (sizes.device_blocks is not None or size != 1):
        raise InvalidArgumentError(
            f"device_bytes is {sizes.device_bytes!r}, must be None with device_blocks {sizes.device_blocks} and "
            f"tensor_parallel_size {size}"
        )
    return sizes


def _sizes(model: ServedModel, sizes: CacheSizes, size: int, tokens: int) -> CacheSizes:
    """Return the sizes per rank; None becomes as many blocks as fit. The ranks share a machine's memory."""
    device, _, host, _ = sizes
    if sizes.device_bytes is not None or (device is not None and host is not None):
        return sizes
    share = MEMORY_UTILIZATION / size
    room = available_blocks(model, memory_utilization=share, max_num_batched_tokens=tokens)
    return CacheSizes(room[0] if device is None else device, None, room[1] if host is None else host, None)
