"""Hugging Face models with a paged KV cache, and the unpaged run that they must agree with."""

# transformers leaves part of its methods without annotations.
# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from blockyard._core import CacheGroup
from blockyard.errors import InvalidArgumentError, UnsupportedModelError
from blockyard.integrations.transformers.attention import PagedStep, StepInput
from blockyard.integrations.transformers.sharding import AllReduce, connect
from blockyard.integrations.transformers.support import cache_shape, paged_copy, run_model
from blockyard.layout import ArenaLayout, KVLayout, LayoutKind

# Tolerance of the self-check in standard deviations of the logits: only rounding of the dtype.
SELF_CHECK_TOLERANCE = {"float64": 1e-6, "float32": 1e-2}
SELF_CHECK_TOLERANCE_16_BIT = 0.25
SELF_CHECK_BLOCK_SIZE = 4
SELF_CHECK_BLOCKS = 8


class ServedModel:
    """A model whose cache is in blocks, however its layers reach them.

    Args:
        model: the model as given.
        layout: layout of the device caches.
        groups: its cache groups.

    Attributes:
        layout: as given.
        groups: as given.
        name: name or path of the checkpoint; empty if it has none.
        device: device of the weights.
        vocab_size: number of tokens in the vocabulary.
        max_model_len: number of positions; None if there is no limit.
        eos_token_ids: end tokens of the model's `generation_config`.
        namespace: what a block's bytes mean beyond the layout; part of a store's namespace.
    """

    namespace = b""
    layout: KVLayout | ArenaLayout

    def __init__(self, model: PreTrainedModel, layout: KVLayout | ArenaLayout, groups: Sequence[CacheGroup]) -> None:
        self.layout, self.groups = layout, tuple(groups)
        self.name = str(getattr(model.config, "name_or_path", "") or "")
        self.device = model.device
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.max_model_len: int | None = getattr(config, "max_position_embeddings", None)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = [] if ends is None else np.atleast_1d(ends).tolist()
        self.eos_token_ids = tuple(token for token in ends if token >= 0)  # -1 means none
        self._caches: list[torch.Tensor] = []

    def bind(self, device_caches: Sequence[torch.Tensor]) -> None:
        """Set the caches to use.

        Args:
            device_caches: as `layout.tensor_shapes(blocks)`, contiguous, on the model's device; of an `ArenaLayout`
                the engine's `tensors`.

        Raises:
            LayoutError: the caches do not have the layout.
            InvalidArgumentError: they are on another device, or not contiguous.
        """
        if isinstance(self.layout, KVLayout):
            self.layout.check(device_caches)
        for layer, cache in enumerate(device_caches):
            is_in_place = isinstance(self.layout, ArenaLayout) or cache.is_contiguous()
            if cache.device != self.device or not is_in_place:
                raise InvalidArgumentError(
                    f"cache {layer} is on {cache.device} with strides {list(cache.stride())}, "
                    f"must be contiguous and on {self.device}"
                )
        self._caches = list(device_caches)

    def forward(
        self,
        token_ids: NDArray[np.integer],
        where: StepInput,
        *,
        logits_indices: NDArray[np.integer] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute the tokens of one step.

        Args:
            token_ids: tokens to compute, sequence by sequence, integers `[tokens]`.
            where: positions and blocks of the sequences; at least one.
            logits_indices: tokens whose logits are returned, integers `[n]`; None for the last of each sequence.
            before_layer: called with each layer's number before its cache is used, to wait for loads.

        Returns:
            Logits at these tokens, float32 `[n, vocab]` on the model's device.

        Raises:
            InvalidArgumentError: no caches are bound, shapes do not agree, or an id is out of range; no K, V or state
                was written.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the caches."""
        self._caches = []

    def _require_caches(self) -> list[torch.Tensor]:
        if not self._caches:
            raise InvalidArgumentError("no caches are bound: call bind() first")
        return self._caches

    def _step_tokens(
        self, token_ids: NDArray[np.integer], where: StepInput, logits_indices: NDArray[np.integer] | None
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Check a step; return its ids and positions, int64 `[2, tokens]`, and the tokens whose logits are wanted."""
        tokens, num_slots = token_ids.astype(np.int64), where.slot_mapping.shape[-1]
        if tokens.shape != (num_slots,):
            raise InvalidArgumentError(f"{list(tokens.shape)} token ids have {num_slots} slots")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise InvalidArgumentError(
                f"token ids go from {tokens.min()} to {tokens.max()}, the vocabulary has {self.vocab_size}"
            )
        ends = np.cumsum(where.lengths)
        positions = np.arange(len(tokens)) + np.repeat(where.starts - (ends - where.lengths), where.lengths)
        if self.max_model_len is not None and positions.max() >= self.max_model_len:
            raise InvalidArgumentError(f"position is {positions.max()}, the model has {self.max_model_len} positions")
        wanted = ends - 1 if logits_indices is None else logits_indices.astype(np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(tokens):
            raise InvalidArgumentError(
                f"logits_indices go from {wanted.min()} to {wanted.max()}, the step has {len(tokens)} tokens"
            )
        return torch.from_numpy(np.stack((tokens, positions))), wanted


class PagedModel(ServedModel):
    """A decoder-only model that reads and writes keys and values through block tables.

    The given model is unchanged: weights are shared, and the attention function is set on a copy of the modules. The
    constructor runs a few tokens with and without paging, and rejects a model whose results differ.

    Args:
        model: any Hugging Face model with a language-model head that uses transformers' attention interface.
        block_size: tokens in a block.
        kind: layout of the caches.
        all_reduce: sums a tensor over all ranks, in place, if `model` is one rank's share (`shard_model`). All ranks
            must then construct their `PagedModel` at the same time, as the constructor runs the model.
        whole: with `all_reduce`, the unsharded model, to compare with the ranks' result; None on ranks that do not
            compare.

    Raises:
        UnsupportedModelError: the model cannot be served; the message names it and says why.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from blockyard.integrations.transformers.model import PagedModel, StepInput
        >>> from blockyard.tools.demo.demo_model import demo_model
        >>> paged = PagedModel(demo_model(), block_size=16)
        >>> paged.bind([torch.zeros(paged.layout.tensor_shape(8)) for _ in range(paged.layout.num_layers)])
        >>> where = StepInput(np.array([0]), np.array([2]), np.array([[5]]), np.array([80, 81]))
        >>> paged.forward(np.array([72, 105]), where).shape
        torch.Size([1, 259])
    """

    layout: KVLayout

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_size: int,
        kind: LayoutKind = "kv_first",
        all_reduce: AllReduce | None = None,
        whole: PreTrainedModel | None = None,
    ) -> None:
        self._paged = paged_copy(model)
        if all_reduce is not None:
            connect(self._paged, all_reduce)
        shape = cache_shape(self._paged)
        layout = KVLayout(
            kind=kind,
            num_layers=shape.num_layers,
            block_size=block_size,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            dtype=shape.dtype,
        )
        super().__init__(model, layout, () if shape.window is None else [CacheGroup.sliding_window(shape.window)])
        self._window = shape.window
        self._check_against(whole if all_reduce is not None else model)

    def forward(
        self,
        token_ids: NDArray[np.integer],
        where: StepInput,
        *,
        logits_indices: NDArray[np.integer] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute the tokens of one step, with all sequences in one flat batch; see `ServedModel`."""
        caches = self._require_caches()
        step = PagedStep(self.layout, caches, where, self._window, before_layer=before_layer)
        return self._run(step, where, token_ids, logits_indices)

    def _run(
        self,
        step: PagedStep,
        where: StepInput,
        token_ids: NDArray[np.integer],
        logits_indices: NDArray[np.integer] | None,
    ) -> torch.Tensor:
        tokens, wanted = self._step_tokens(token_ids, where, logits_indices)
        return run_model(self._paged, tokens, torch.from_numpy(wanted), use_cache=False, blockyard_step=step)

    def _check_against(self, model: PreTrainedModel | None) -> None:
        layout = replace(self.layout, block_size=SELF_CHECK_BLOCK_SIZE)
        dtype = getattr(torch, layout.dtype)
        empty = torch.zeros(layout.tensor_shape(SELF_CHECK_BLOCKS), dtype=dtype, device=self.device)
        caches = [empty.clone() for _ in range(layout.num_layers)]
        for tokens, where in self_check_steps(self.vocab_size):
            got = self._run(PagedStep(layout, caches, where, self._window), where, tokens, None)[0]
        if model is None:
            return
        limit = SELF_CHECK_TOLERANCE.get(layout.dtype, SELF_CHECK_TOLERANCE_16_BIT)
        require_same(model, got, limit)


def self_check_steps(vocab_size: int, groups: int = 1) -> Iterator[tuple[NDArray[np.int64], StepInput]]:
    """Yield the steps of a self-check: a few tokens in chunks, batched with another sequence, the last one alone.

    It reveals masks, biases and positions that do not show in the model's calls.

    Args:
        vocab_size: tokens in the vocabulary.
        groups: number of cache groups, each with `SELF_CHECK_BLOCKS` blocks of `SELF_CHECK_BLOCK_SIZE` tokens.
    """
    size = SELF_CHECK_BLOCK_SIZE
    tokens = _check_tokens(vocab_size)
    tables = np.array([[6, 2, 4], [1, 7, 3]]) + SELF_CHECK_BLOCKS * np.arange(groups)[:, None, None]
    slots = (tables[..., None] * size + np.arange(size)).reshape(groups, 2, -1)
    if groups == 1:
        tables, slots = tables[0], slots[0]
    cuts = (0, size + 1, len(tokens) - 1, len(tokens))
    for first, last in itertools.pairwise(cuts):
        starts, lengths = np.array([first, first]), np.array([last - first, last - first])
        part = slots[..., first:last]
        decodes = 2 if last == first + 1 else 0
        where = StepInput(starts, lengths, tables, part.reshape(*part.shape[:-2], -1), decodes)
        yield np.concatenate((tokens[first:last], tokens[::-1][first:last])), where


def _check_tokens(vocab_size: int) -> NDArray[np.int64]:
    tokens: NDArray[np.int64] = (np.arange(3 * SELF_CHECK_BLOCK_SIZE - 1) * 7 + 3) % vocab_size
    return tokens


def apart(model: PreTrainedModel, got: torch.Tensor) -> float:
    """Return how far the logits after the self-check's steps are from the model's own, in their standard deviations."""
    with torch.inference_mode(), _evaluating(model):
        ids = torch.from_numpy(_check_tokens(got.shape[-1]))[None].to(got.device)
        wanted = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    return float((got - wanted).abs().max() / wanted.std())


def require_same(model: PreTrainedModel, got: torch.Tensor, limit: float) -> None:
    """Raise `UnsupportedModelError` if the logits after the self-check's steps are more than `limit` apart."""
    found = apart(model, got)
    if not found <= limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives other logits when paged: {found:.2g} standard deviations apart, "
            f"rounding explains {limit:.2g}; its layers use more than their cache and attention interface show"
        )


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Temporarily switch off dropout."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
