"""Models whose layers differ, or keep states or latents: one sequence a forward, through transformers' own `Cache`.

Before a sequence's tokens are computed, its blocks fill a `DynamicCache`; afterwards what is new in the cache goes to
its blocks. So every layer runs as in `generate`. The price: each forward copies what it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from blockyard._core import CacheGroup
from blockyard.engine.pages import field_tensors
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
from blockyard.layout import ArenaLayout, KVLayout, LayerField, LayoutKind
from blockyard.layout.arena import ALIGNMENT
from blockyard.layout.kv import ITEM_SIZES

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


Groups = tuple[tuple[CacheGroup, tuple[LayerField, ...]], ...]
"""What the layers of each cache group keep. The name of a field is an attribute of transformers' cache layer: `keys`,
`values`, or `conv_states/n` and `recurrent_states/n` for its n-th state."""


class _Blocks:
    """The blocks of one cache group.

    Args:
        lifecycle: which tokens the layers need.
        fields: what they keep.
        views: each field in all blocks: `[blocks, tokens, heads, size]`, or `[blocks, ...]` of a state.
        block_size: tokens in a block.
    """

    def __init__(
        self, lifecycle: CacheGroup, fields: Sequence[LayerField], views: Sequence[torch.Tensor], block_size: int
    ) -> None:
        self._window, self._kind, self._size = lifecycle.window, lifecycle.kind, block_size
        self._fields = list(zip(fields, views, strict=True))

    def read(self, cache: DynamicCache, table: NDArray[np.integer], start: int) -> None:
        """Fill a cache with what the token at `start` needs.

        Args:
            cache: an empty cache.
            table: blocks of the sequence, integers `[max_blocks]`.
            start: number of tokens before it, at least 1.
        """
        for field, view in self._fields:
            layer = cache.layers[field.layer]
            if field.is_state:
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
        for field, view in self._fields:
            name, number = _attribute(field)
            found = getattr(cache.layers[field.layer], name)
            if not field.is_state:
                view[blocks, places] = found[0, :, -len(slots) :].transpose(0, 1)
            elif with_states:
                view[blocks[-1]] = found[number][0]

    def _tokens(self, view: torch.Tensor, table: NDArray[np.integer], start: int) -> torch.Tensor:
        """Return keys or values, `[1, heads, tokens, size]`; zeros where no block has them."""
        begin, first = self._first_in_cache(start), self._first_in_blocks(start)
        found = view.new_zeros(start - begin, *view.shape[2:])
        positions = np.arange(first, start)
        blocks = torch.from_numpy(table[positions // self._size].astype(np.int64))
        found[first - begin :] = view[blocks, torch.from_numpy(positions % self._size)]
        return found.transpose(0, 1)[None]

    def _first_in_cache(self, start: int) -> int:
        """Return the first token that transformers' cache holds when the token at `start` is computed."""
        return 0 if self._window is None else max(0, start + 1 - self._window)

    def _first_in_blocks(self, start: int) -> int:
        """Return the first of them that a block holds. Those before it, of an earlier chunk, are never seen."""
        if self._window is None or self._kind != "chunked_attention":
            return self._first_in_cache(start)
        return start - start % self._window


class HybridModel(ServedModel):
    """A decoder-only model whose layers keep keys and values, windows of them, latents or states in blocks.

    Layers that need the same tokens before their own are one cache group. With equal blocks, those of all groups are in
    one tensor, each as large as that of the widest group; else the layout is an `ArenaLayout`. Sequences are computed
    one after the other.

    The constructor runs a few tokens through blocks and without, and rejects a model whose results differ. Some layers
    ignore their state if they compute several tokens at once; such a model continues prompts token by token.

    Args:
        model: any Hugging Face model with a language-model head that keeps its cache in a `DynamicCache`.
        block_size: tokens in a block.
        equal_blocks: whether the blocks of all groups have equal bytes.

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

    def __init__(self, model: PreTrainedModel, *, block_size: int, equal_blocks: bool = True) -> None:
        require_decoder(model)
        self._model = share_weights(model)
        self._cache_name = _cache_name(model)
        kept = _layer_groups(self._model)
        self._fields = ArenaLayout(kept, block_size, equal_blocks)
        layout = _in_one_tensor(self._fields) if equal_blocks else self._fields
        super().__init__(model, layout, [lifecycle for lifecycle, _ in kept])
        self.namespace = repr(kept).encode("ascii")
        self._has_states = any(group.kind == "recurrent" for group in self.groups)
        self._takes_chunks = True
        limit = _tolerance(self._fields)
        got = self._self_check()
        if self._has_states and not apart(model, got) <= limit:
            self._takes_chunks = False
            got = self._self_check()
        require_same(model, got, limit)

    def bind(self, device_caches: Sequence[torch.Tensor]) -> None:
        """Set the cache to use; see `ServedModel`."""
        super().bind(device_caches)
        if isinstance(self.layout, KVLayout):
            device_caches = field_tensors(self._fields, [_rows(device_caches[0], self._fields)])
        self._blocks = _blocks_of(self._fields, device_caches)

    def forward(
        self,
        token_ids: NDArray[np.integer],
        where: StepInput,
        *,
        logits_indices: NDArray[np.integer] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute the tokens of one step, one sequence after the other; see `ServedModel`."""
        caches = self._require_caches()
        for group in range(len(self.groups)):
            where.of_group(group).check(self._num_blocks(caches, group), self.layout.block_size)
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
                options = {self._cache_name: cache, "use_cache": True}
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

    def _num_blocks(self, caches: Sequence[torch.Tensor], group: int) -> int:
        first = self._fields.by_group(caches)[group][0] if isinstance(self.layout, ArenaLayout) else caches[0]
        return first.shape[0]

    def _self_check(self) -> torch.Tensor:
        """Run the self-check's steps through blocks; return the logits of the first sequence after them."""
        layout = ArenaLayout(self._fields.groups, SELF_CHECK_BLOCK_SIZE, equal_blocks=True)
        shape = SELF_CHECK_BLOCKS * len(layout.groups), layout.bytes_per_block
        cut = _blocks_of(layout, field_tensors(layout, [torch.zeros(shape, dtype=torch.uint8, device=self.device)]))
        for tokens, where in self_check_steps(self.vocab_size, len(layout.groups)):
            got = self._run(cut, where, tokens, None)[0]
        return got


def open_model(
    model: PreTrainedModel, *, block_size: int, kind: LayoutKind = "kv_first", equal_blocks: bool = True
) -> ServedModel:
    """Return a `PagedModel`, which computes all sequences in one batch, or else a `HybridModel`.

    Args:
        model: any Hugging Face model with a language-model head.
        block_size: tokens in a block.
        kind: layout of the device caches of a `PagedModel`.
        equal_blocks: whether the blocks of all groups of a `HybridModel` have equal bytes.

    Raises:
        UnsupportedModelError: the model cannot be served; the message names it and says why.
        InvalidArgumentError: the model needs a `HybridModel`, and `kind` is not `kv_first`.
    """
    try:
        return PagedModel(model, block_size=block_size, kind=kind)
    except UnsupportedModelError:
        hybrid = HybridModel(model, block_size=block_size, equal_blocks=equal_blocks)
    if kind != "kv_first":
        raise InvalidArgumentError(
            f"kind is {kind!r}, must be 'kv_first' for {type(model).__name__}: its layers differ"
        )
    return hybrid


def _cache_name(model: PreTrainedModel) -> str:
    """Return which argument of a model's `forward` takes its cache: transformers 5.24 has renamed it."""
    found = next((name for name in ("cache", "past_key_values") if accepts(model, name)), None)
    if found is None:
        raise UnsupportedModelError(f"{type(model).__name__} takes no cache")
    return found


def _layer_groups(model: PreTrainedModel) -> Groups:
    """Run a model over two tokens, and return what its layers keep, by cache group."""
    cache = DynamicCache(config=model.config)
    try:
        options = {_cache_name(model): cache, "use_cache": True}
        run_model(model, torch.tensor([[0, 0], [0, 1]]), torch.tensor([1]), **options)
    except ValueError as error:  # transformers refuses a cache of states alone
        raise UnsupportedModelError(f"{type(model).__name__} does not run with a cache: {error}") from error
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""] * len(cache.layers)
    found: dict[CacheGroup, list[LayerField]] = {}
    for number, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=True)):
        if (name := type(layer).__name__) not in _KNOWN:
            raise UnsupportedModelError(f"{type(model).__name__} has layers with a {name}, whose contents are unknown")
        for lifecycle, field in _kept(number, layer, kind):
            found.setdefault(lifecycle, []).append(field)
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} keeps nothing in its cache")
    return tuple((lifecycle, tuple(fields)) for lifecycle, fields in found.items())


def _kept(number: int, layer: Any, kind: str) -> Iterator[tuple[CacheGroup, LayerField]]:
    """Yield the fields of one layer, each with its cache group."""
    for name in ("conv_states", "recurrent_states"):
        for index, state in getattr(layer, name, {}).items():
            if state is not None:
                shape = tuple(state.shape[1:])
                yield CacheGroup.recurrent(), LayerField(number, f"{name}/{index}", shape, _name(state), is_state=True)
    for name in ("keys", "values"):
        tokens = getattr(layer, name, None)
        if tokens is not None:
            yield _lifecycle(layer, kind), LayerField(number, name, (tokens.shape[1], tokens.shape[3]), _name(tokens))


def _lifecycle(layer: Any, kind: str) -> CacheGroup:
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return CacheGroup.full_attention()
    make = CacheGroup.chunked_attention if kind == "chunked_attention" else CacheGroup.sliding_window
    return make(layer.sliding_window)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _in_one_tensor(layout: ArenaLayout) -> KVLayout:
    """Return a layout of one tensor, with blocks of at least these bytes."""
    bytes_per_token = -(-layout.bytes_per_block // layout.block_size)
    return KVLayout(
        "blocks tokens dim",
        num_layers=1,
        block_size=layout.block_size,
        num_kv_heads=1,
        head_size=-(-bytes_per_token // ALIGNMENT) * ALIGNMENT,
        dtype="uint8",
    )


def _rows(cache: torch.Tensor, layout: ArenaLayout) -> torch.Tensor:
    """View the tensor as blocks, uint8 `[blocks, bytes]`."""
    return cache.view(cache.shape[0], -1)[:, : layout.bytes_per_block]


def _blocks_of(layout: ArenaLayout, tensors: Sequence[torch.Tensor]) -> list[_Blocks]:
    """Return the blocks of each group, from the tensors of all fields."""
    groups = zip(layout.groups, layout.by_group(tensors), strict=True)
    return [_Blocks(*group, views, layout.block_size) for group, views in groups]


def _attribute(field: LayerField) -> tuple[str, int]:
    """Return the attribute of a cache layer that holds a field, and the number of the state in it."""
    name, _, number = field.name.partition("/")
    return name, int(number or 0)


def _set_tokens(layer: Any, field: LayerField, tokens: torch.Tensor, start: int) -> None:
    """Set the keys or values of an attention layer that has seen `start` tokens."""
    if not layer.is_initialized:
        layer.lazy_initialization(tokens, tokens)
    setattr(layer, field.name, tokens)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = start


def _set_state(layer: Any, field: LayerField, state: torch.Tensor) -> None:
    """Set one state of a linear layer, which changes it in place: it gets a copy."""
    name, number = _attribute(field)
    layer.lazy_initialization(**{name: state[None], "state_idx": number})
    getattr(layer, name)[number].copy_(state)
    layer.has_previous_state[number] = True


def _tolerance(layout: ArenaLayout) -> float:
    """Return the self-check's limit. Norms and states are computed in float32, whatever the model's dtype."""
    is_narrow = any(ITEM_SIZES[field.dtype] < torch.float32.itemsize for field in layout.fields)
    return SELF_CHECK_TOLERANCE_16_BIT if is_narrow else SELF_CHECK_TOLERANCE["float32"]
