"""Models whose layers differ, or keep states or latents: one sequence a forward, through transformers' own `Cache`.

Before a sequence's tokens are computed, its blocks fill a `DynamicCache`; afterwards what is new in the cache goes to
its blocks. So every layer runs as in `generate`. The price: each forward copies what it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from blockyard._core import CacheGroup
from blockyard.errors import InvalidArgumentError, UnsupportedModelError
from blockyard.integrations.transformers.attention import StepInput
from blockyard.integrations.transformers.model import (
    SELF_CHECK_BLOCK_SIZE,
    SELF_CHECK_BLOCKS,
    SELF_CHECK_TOLERANCE,
    SELF_CHECK_TOLERANCE_16_BIT,
    PagedModel,
    ServedModel,
    apart,
    require_same,
    self_check_steps,
)
from blockyard.integrations.transformers.support import accepts, require_decoder, run_model, share_weights
from blockyard.layout.kv import KVLayout, LayoutKind

__all__ = ["HybridModel", "open_model"]

# Layers of a cache whose contents are known; a subclass may keep more.
_KNOWN = {
    "DummyLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionLayer",
}
_ALIGNMENT = 16  # of a field in a block, in bytes


class _Field(NamedTuple):
    """One tensor in the cache of a layer.

    Attributes:
        layer: number of the layer.
        name: attribute of transformers' cache layer: `keys`, `values`, `conv_states` or `recurrent_states`.
        state: number of the state in that attribute; None for keys and values.
        shape: `[heads, size]` of one token, or the shape of a state.
        dtype: torch's name of the dtype.
    """

    layer: int
    name: str
    state: int | None
    shape: tuple[int, ...]
    dtype: str

    def shape_in_block(self, block_size: int) -> tuple[int, ...]:
        """Return the shape of all tokens of a block, or of its state."""
        return (block_size, *self.shape) if self.state is None else self.shape

    def num_bytes(self, block_size: int) -> int:
        """Return its bytes in a block."""
        return prod(self.shape_in_block(block_size)) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class _LayerGroup:
    """What the layers of one cache group keep. A block holds one field after the other.

    Attributes:
        lifecycle: the cache group: which tokens the layers need.
        fields: their fields, layer by layer.
    """

    lifecycle: CacheGroup
    fields: tuple[_Field, ...]

    def offsets(self, block_size: int) -> list[int]:
        """Return where each field starts in a block, and where the last one ends."""
        sizes = [field.num_bytes(block_size) for field in self.fields]
        return list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))

    def first_in_cache(self, start: int) -> int:
        """Return the first token that transformers' cache holds when the token at `start` is computed."""
        window = self.lifecycle.window
        return 0 if window is None else max(0, start + 1 - window)

    def first_in_blocks(self, start: int) -> int:
        """Return the first of them that a block holds. Those before it, of an earlier chunk, are never seen."""
        window = self.lifecycle.window
        if window is None or self.lifecycle.kind != "chunked_attention":
            return self.first_in_cache(start)
        return start - start % window


class _Blocks:
    """The blocks of one cache group in a tensor, uint8 `[blocks, bytes]`."""

    def __init__(self, group: _LayerGroup, cache: torch.Tensor, block_size: int) -> None:
        self._group, self._size = group, block_size
        starts = group.offsets(block_size)
        self._views = [_view(cache, at, field, block_size) for field, at in zip(group.fields, starts, strict=False)]

    def read(self, cache: DynamicCache, table: NDArray[np.integer], start: int) -> None:
        """Fill a cache with what the token at `start` needs.

        Args:
            cache: an empty cache.
            table: blocks of the sequence, integers `[max_blocks]`.
            start: number of tokens before it, at least 1.
        """
        for field, view in zip(self._group.fields, self._views, strict=True):
            layer = cache.layers[field.layer]
            if field.state is not None:
                _set_state(layer, field, view[int(table[(start - 1) // self._size])])
            else:
                _set_tokens(layer, field, self._tokens(view, table, start), start)

    def write(self, cache: DynamicCache, slots: NDArray[np.integer], *, with_states: bool) -> None:
        """Write the last tokens of a cache, and the state after them, to their slots.

        Args:
            cache: after the forward.
            slots: slots of the tokens that the forward computed, integers `[tokens]`.
            with_states: whether a state after these tokens is kept.
        """
        blocks, places = (torch.from_numpy(part) for part in np.divmod(slots.astype(np.int64), self._size))
        for field, view in zip(self._group.fields, self._views, strict=True):
            found = getattr(cache.layers[field.layer], field.name)
            if field.state is None:
                view[blocks, places] = found[0, :, -len(slots) :].transpose(0, 1)
            elif with_states:
                view[blocks[-1]] = found[field.state][0]

    def _tokens(self, view: torch.Tensor, table: NDArray[np.integer], start: int) -> torch.Tensor:
        """Return keys or values, `[1, heads, tokens, size]`; zeros where no block has them."""
        begin, first = self._group.first_in_cache(start), self._group.first_in_blocks(start)
        found = view.new_zeros(start - begin, *view.shape[2:])
        positions = np.arange(first, start)
        blocks = torch.from_numpy(table[positions // self._size].astype(np.int64))
        found[first - begin :] = view[blocks, torch.from_numpy(positions % self._size)]
        return found.transpose(0, 1)[None]


class HybridModel(ServedModel):
    """A decoder-only model whose layers keep keys and values, windows of them, latents or states in blocks.

    Layers that need the same tokens before their own are one cache group. All groups have their blocks in one tensor; a
    block is as large as that of the widest group. Sequences are computed one after the other.

    The constructor runs a few tokens through blocks and without, and rejects a model whose results differ. Some layers
    ignore their state if they compute several tokens at once; such a model continues prompts token by token.

    Args:
        model: any Hugging Face model with a language-model head that keeps its cache in a `DynamicCache`.
        block_size: tokens in a block.

    Raises:
        UnsupportedModelError: the model cannot be served; the message names it and says why.

    Example:
        >>> from transformers import Lfm2Config, Lfm2ForCausalLM
        >>> from blockyard.integrations.transformers.hybrid import HybridModel
        >>> shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
        >>> model = HybridModel(Lfm2ForCausalLM(Lfm2Config(**shape, **heads)), block_size=16)
        >>> model.groups, model.layout.bytes_per_block
        ((CacheGroup.recurrent(), CacheGroup.full_attention()), 2048)
    """

    def __init__(self, model: PreTrainedModel, *, block_size: int) -> None:
        require_decoder(model)
        if not accepts(model, "past_key_values"):
            raise UnsupportedModelError(f"{type(model).__name__} takes no past_key_values, in which its cache would be")
        self._model = share_weights(model)
        self._layer_groups = _layer_groups(self._model)
        lifecycles = [group.lifecycle for group in self._layer_groups]
        super().__init__(model, _layout(self._layer_groups, block_size), lifecycles)
        self.namespace = repr(self._layer_groups).encode("ascii")
        self._has_states = any(group.kind == "recurrent" for group in self.groups)
        self._takes_chunks = True
        limit = _tolerance(self._layer_groups)
        got = self._self_check()
        if self._has_states and not apart(model, got) <= limit:
            self._takes_chunks = False
            got = self._self_check()
        require_same(model, got, limit)

    def bind(self, device_caches: Sequence[torch.Tensor]) -> None:
        """Set the cache to use; see `ServedModel`."""
        super().bind(device_caches)
        self._blocks = self._cut(device_caches[0], self.layout.block_size)

    def forward(
        self,
        token_ids: NDArray[np.integer],
        where: StepInput,
        *,
        logits_indices: NDArray[np.integer] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute the tokens of one step, one sequence after the other; see `ServedModel`."""
        (cache,) = self._require_caches()
        for group in range(len(self.groups)):
            where.of_group(group).check(self.layout.num_blocks(cache), self.layout.block_size)
        if before_layer is not None:
            before_layer(0)
        return self._run(self._blocks, where, token_ids, logits_indices)

    def close(self) -> None:
        """Release the cache."""
        super().close()
        self._blocks = []

    @torch.inference_mode()
    def _run(
        self,
        blocks: list[_Blocks],
        where: StepInput,
        token_ids: NDArray[np.integer],
        logits_indices: NDArray[np.integer] | None,
    ) -> torch.Tensor:
        tokens, wanted = self._step_tokens(token_ids, where, logits_indices)
        wanted, order = np.unique(wanted, return_inverse=True)
        per_group = [(each, where.of_group(group)) for group, each in enumerate(blocks)]
        logits = []
        for row, pieces in enumerate(self._pieces(where)):
            cache = DynamicCache(config=self._model.config)
            for layer in cache.layers:
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.activate_past_recording()  # else a chunk's tokens are gone before they are written
            if start := int(where.starts[row]):
                for each, part in per_group:
                    each.read(cache, part.block_tables[row], start)
            for first, last in pieces:
                here = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, last)] - first
                options = {"past_key_values": cache, "use_cache": True}
                logits.append(run_model(self._model, tokens[:, first:last], torch.from_numpy(here), **options))
                is_kept = row < where.decodes or last == pieces[-1][1]
                for each, part in per_group:
                    each.write(cache, part.slot_mapping[first:last], with_states=is_kept)
        return torch.cat(logits)[torch.from_numpy(order)]

    def _pieces(self, where: StepInput) -> Iterator[list[tuple[int, int]]]:
        """Yield, for each row, the ranges of tokens that one forward computes."""
        ends = np.cumsum(where.lengths)
        for row, (start, length, end) in enumerate(
            zip(where.starts, where.lengths.tolist(), ends.tolist(), strict=True)
        ):
            single = self._has_states and (row < where.decodes or (start > 0 and not self._takes_chunks))
            cuts = range(end - length, end + 1) if single else (end - length, end)
            yield list(itertools.pairwise(cuts))

    def _cut(self, cache: torch.Tensor, block_size: int) -> list[_Blocks]:
        rows = cache.view(cache.shape[0], -1)
        return [_Blocks(group, rows, block_size) for group in self._layer_groups]

    def _self_check(self) -> torch.Tensor:
        """Run the self-check's steps through blocks; return the logits of the first sequence after them."""
        size, blocks = SELF_CHECK_BLOCK_SIZE, SELF_CHECK_BLOCKS * len(self._layer_groups)
        shape = _layout(self._layer_groups, size).tensor_shape(blocks)
        cut = self._cut(torch.zeros(shape, dtype=torch.uint8, device=self.device), size)
        for tokens, where in self_check_steps(self.vocab_size, len(self._layer_groups)):
            got = self._run(cut, where, tokens, None)[0]
        return got


def open_model(model: PreTrainedModel, *, block_size: int, kind: LayoutKind = "kv_first") -> ServedModel:
    """Return a `PagedModel`, which computes all sequences in one batch, or else a `HybridModel`.

    Args:
        model: any Hugging Face model with a language-model head.
        block_size: tokens in a block.
        kind: layout of the device caches of a `PagedModel`.

    Raises:
        UnsupportedModelError: the model cannot be served; the message names it and says why.
        InvalidArgumentError: the model needs a `HybridModel`, and `kind` is not `kv_first`.
    """
    try:
        return PagedModel(model, block_size=block_size, kind=kind)
    except UnsupportedModelError:
        hybrid = HybridModel(model, block_size=block_size)
    if kind != "kv_first":
        raise InvalidArgumentError(
            f"kind is {kind!r}, must be 'kv_first' for {type(model).__name__}: its layers differ"
        )
    return hybrid


def _layer_groups(model: PreTrainedModel) -> list[_LayerGroup]:
    """Run a model over two tokens, and return what its layers keep, by cache group."""
    cache = DynamicCache(config=model.config)
    try:
        run_model(model, torch.tensor([[0, 0], [0, 1]]), torch.tensor([1]), past_key_values=cache, use_cache=True)
    except ValueError as error:  # transformers refuses a cache of states alone
        raise UnsupportedModelError(f"{type(model).__name__} does not run with a cache: {error}") from error
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""] * len(cache.layers)
    found: dict[CacheGroup, list[_Field]] = {}
    for number, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=True)):
        if (name := type(layer).__name__) not in _KNOWN:
            raise UnsupportedModelError(f"{type(model).__name__} has layers with a {name}, whose contents are unknown")
        for lifecycle, field in _kept(number, layer, kind):
            found.setdefault(lifecycle, []).append(field)
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} keeps nothing in its cache")
    return [_LayerGroup(lifecycle, tuple(fields)) for lifecycle, fields in found.items()]


def _kept(number: int, layer: Any, kind: str) -> Iterator[tuple[CacheGroup, _Field]]:
    """Yield the fields of one layer, each with its cache group."""
    for name in ("conv_states", "recurrent_states"):
        for index, state in getattr(layer, name, {}).items():
            if state is not None:
                yield CacheGroup.recurrent(), _Field(number, name, index, tuple(state.shape[1:]), _name(state))
    for name in ("keys", "values"):
        tokens = getattr(layer, name, None)
        if tokens is not None:
            yield _lifecycle(layer, kind), _Field(number, name, None, (tokens.shape[1], tokens.shape[3]), _name(tokens))


def _lifecycle(layer: Any, kind: str) -> CacheGroup:
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return CacheGroup.full_attention()
    make = CacheGroup.chunked_attention if kind == "chunked_attention" else CacheGroup.sliding_window
    return make(layer.sliding_window)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _layout(groups: list[_LayerGroup], block_size: int) -> KVLayout:
    """Return a layout whose block holds the bytes of the widest group."""
    bytes_per_token = -(-max(group.offsets(block_size)[-1] for group in groups) // block_size)
    return KVLayout(
        "blocks tokens dim",
        num_layers=1,
        block_size=block_size,
        num_kv_heads=1,
        head_size=-(-bytes_per_token // _ALIGNMENT) * _ALIGNMENT,
        dtype="uint8",
    )


def _view(cache: torch.Tensor, start: int, field: _Field, block_size: int) -> torch.Tensor:
    """Return one field of all blocks: `[blocks, tokens, heads, size]`, or `[blocks, ...]` of a state."""
    part = cache[:, start : start + field.num_bytes(block_size)].view(field.torch_dtype)
    view: torch.Tensor = part.unflatten(1, field.shape_in_block(block_size))
    return view


def _set_tokens(layer: Any, field: _Field, tokens: torch.Tensor, start: int) -> None:
    """Set the keys or values of an attention layer that has seen `start` tokens."""
    if not layer.is_initialized:
        layer.lazy_initialization(tokens, tokens)
    setattr(layer, field.name, tokens)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = start


def _set_state(layer: Any, field: _Field, state: torch.Tensor) -> None:
    """Set one state of a linear layer, which changes it in place: it gets a copy."""
    layer.lazy_initialization(**{field.name: state[None], "state_idx": field.state})
    getattr(layer, field.name)[field.state].copy_(state)
    layer.has_previous_state[field.state] = True


def _tolerance(groups: list[_LayerGroup]) -> float:
    """Return the self-check's limit. Norms and states are computed in float32, whatever the model's dtype."""
    is_narrow = any(field.torch_dtype.itemsize < torch.float32.itemsize for group in groups for field in group.fields)
    return SELF_CHECK_TOLERANCE_16_BIT if is_narrow else SELF_CHECK_TOLERANCE["float32"]
