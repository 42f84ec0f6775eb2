"""Attention over a paged KV cache, as a function that transformers calls in every layer.

The current step is passed as a keyword argument of the model's forward down to the attention function, so that two
models, two threads or a nested call never see each other's step, as they would with a global.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from blockyard.errors import InvalidArgumentError, LayoutError, UnsupportedModelError
from blockyard.layout.kv import KVLayout

ATTENTION_NAME = "blockyard_paged"
# Single-token reads pad the shorter sequences of a group, by at most this factor.
MAX_PADDING = 2.0


class LayerCall(NamedTuple):
    """One layer's attention call.

    Attributes:
        layer: number of the layer, from 0.
        query: `[1, heads, tokens, head_size]`.
        key: `[1, kv_heads, tokens, head_size]`, position embedding applied.
        value: as `key`.
        scaling: factor on the scores.
        window: number of tokens that a query sees, itself included; None for all before it.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None


class AttentionStep(Protocol):
    """The interface of a step for the attention function; passed as keyword `blockyard_step`."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Compute one layer's attention. Returns `[1, tokens, heads, head_size]`."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - part of the interface; the step knows what is visible
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    blockyard_step: AttentionStep | None = None,
    **_other: object,
) -> tuple[torch.Tensor, None]:
    """Pass one layer's query, key and value to the step.

    Args:
        module: the attention layer; its `layer_idx` names the cache.
        query: `[1, heads, tokens, head_size]`.
        key: `[1, kv_heads, tokens, head_size]`.
        value: as `key`.
        attention_mask: not used.
        scaling: factor on the scores; one over the root of the head size if None.
        sliding_window: number of tokens that a query sees, itself included; None for all before it.
        softcap: not supported; must be None.
        s_aux: attention sinks; not supported; must be None.
        blockyard_step: the step, given by the caller of the model.
        _other: further arguments of transformers, not needed without dropout.

    Returns:
        The layer's output, `[1, tokens, heads, head_size]`, and no weights.

    Raises:
        UnsupportedModelError: the layer needs an unsupported feature, or the model did not pass the step on.
    """
    name = type(module).__name__
    if blockyard_step is None:
        raise UnsupportedModelError(f"{name} was called without the step: the model does not pass on keyword arguments")
    for what, asked in (("soft-capping", softcap), ("attention sinks", s_aux)):
        if asked is not None:
            raise UnsupportedModelError(f"{name} uses {what}, which paged attention does not support yet")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"{name} has no layer_idx, so its cache is unknown")
    factor = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return blockyard_step.attend(LayerCall(layer, query, key, value, factor, sliding_window)), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True)
class _Decodes:
    """Sequences that compute one token each, batched and padded to the longest.

    Attributes:
        tokens: indices of their tokens in the batch, int64 `[n]`.
        rows: cache rows of their keys, int64 `[n * length]`; padded with the sequence's last row, which is always
            finite.
        mask: which tokens each may see, bool `[n, 1, 1, length]`; None if all have the same length.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Chunk:
    """Several tokens of one sequence: tokens `first` to `last` of the batch, which see `rows` through `mask`.

    Without a mask, the chunk starts the sequence and uses plain causal attention.
    """

    first: int
    last: int
    rows: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class StepInput:
    """Positions and blocks of a step's sequences.

    Attributes:
        starts: position of the first token of each sequence, int64 `[n]`.
        lengths: number of tokens of each sequence, at least 1, int64 `[n]`.
        block_tables: device blocks of each sequence, integers `[n, max_blocks]`; with several cache groups
            `[groups, n, max_blocks]`.
        slot_mapping: slot for each token's K and V, integers `[tokens]`, or `[groups, tokens]`.
        decodes: number of sequences, the first ones, that keep a state after each of their tokens. Others keep only
            the last.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    block_tables: NDArray[np.integer]
    slot_mapping: NDArray[np.integer]
    decodes: int = 0

    def of_group(self, group: int) -> StepInput:
        """Return the tables and slots of one cache group."""
        if self.slot_mapping.ndim == 1:
            return self
        return replace(self, block_tables=self.block_tables[group], slot_mapping=self.slot_mapping[group])

    def check(self, blocks: int, block_size: int) -> None:
        """Check that shapes agree and that all ids are within the cache.

        Args:
            blocks: blocks in the cache.
            block_size: tokens in a block.

        Raises:
            InvalidArgumentError: a check failed; the message has the numbers.
        """
        n, tables = len(self.lengths), self.block_tables
        if n == 0 or self.lengths.min() < 1 or self.starts.min() < 0:
            raise InvalidArgumentError(
                f"a step of {n} sequences: each must have at least 1 token and a start of at least 0"
            )
        if tables.ndim != 2 or len(tables) != n:
            raise InvalidArgumentError(f"block tables have shape {list(tables.shape)} for {n} sequences")
        tokens = int(self.lengths.sum())
        if self.slot_mapping.shape != (tokens,):
            raise InvalidArgumentError(f"slot mapping has shape {list(self.slot_mapping.shape)} for {tokens} tokens")
        needed = -(-(self.starts + self.lengths) // block_size)
        longest = int(np.argmax(needed))
        if needed[longest] > tables.shape[1]:
            raise InvalidArgumentError(
                f"sequence {longest} of the step sees {needed[longest]} blocks, its block table has {tables.shape[1]}"
            )
        used = tables[np.arange(tables.shape[1]) < needed[:, None]]
        for name, ids, limit in (("block", used, blocks), ("slot", self.slot_mapping, blocks * block_size)):
            if ids.min() < 0 or ids.max() >= limit:
                raise InvalidArgumentError(f"{name} ids go from {ids.min()} to {ids.max()}, the cache has {limit}")


class PagedStep:
    """One step's tokens in the paged cache: where each is written and what it reads.

    All indices are computed once and used by every layer. A cache is viewed as rows, each the K or the V of one token;
    a token's V row is at a fixed distance after its K row.

    Args:
        layout: layout of the caches; `kv_first` or `blocks_first`.
        caches: one per layer, `layout.tensor_shape(blocks)`, contiguous.
        where: positions and blocks of the step's sequences.
        window: number of tokens that a query sees in every layer, itself included; None for all before it.
        before_layer: called with the layer's number before its cache is read or written, to wait for loads.

    Raises:
        InvalidArgumentError: shapes do not agree, or a block or slot is out of range.
        LayoutError: the caches' layout has no rows of one token.
    """

    def __init__(
        self,
        layout: KVLayout,
        caches: Sequence[torch.Tensor],
        where: StepInput,
        window: int | None = None,
        *,
        before_layer: Callable[[int], None] | None = None,
    ) -> None:
        size, blocks = layout.block_size, layout.num_blocks(caches[0])
        where.check(blocks, size)
        self._rows = [cache.view(-1, layout.num_kv_heads, layout.head_size) for cache in caches]
        self._device = caches[0].device
        self._block_rows, self._value_offset = _geometry(layout.kind, blocks, size)
        self._size, self._window = size, window
        self._before_layer = before_layer
        self._written = self._upload(self._rows_of(where.slot_mapping.astype(np.int64)))
        first = np.cumsum(where.lengths) - where.lengths
        seen = where.starts + where.lengths
        tables = where.block_tables.astype(np.int64)
        single = np.flatnonzero(where.lengths == 1)
        self._decodes = [self._decode(group, first, seen, tables) for group in _groups(single, seen)]
        self._chunks = [
            self._chunk(int(first[i]), int(where.lengths[i]), int(seen[i]), tables[i])
            for i in np.flatnonzero(where.lengths > 1)
        ]

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Write the tokens' K and V, then read each sequence back and attend; see `AttentionStep`."""
        layer, query, key, value, scaling, window = call
        if window != self._window:
            raise UnsupportedModelError(f"layer {layer} has a window of {window}, the step was made for {self._window}")
        if self._before_layer is not None:
            self._before_layer(layer)
        keys = self._rows[layer]
        values = keys[self._value_offset :]
        keys.index_copy_(0, self._written, key[0].transpose(0, 1))
        values.index_copy_(0, self._written, value[0].transpose(0, 1))
        _, heads, tokens, width = query.shape
        out = query.new_empty(tokens, heads, width)
        by_token = query[0].transpose(0, 1)
        kv_heads = keys.shape[1]
        for group in self._decodes:
            n = group.tokens.numel()
            # Query heads that share K and V are treated as extra queries, so K and V need not be repeated.
            packed = by_token.index_select(0, group.tokens).view(n, kv_heads, heads // kv_heads, width)
            k, v = (_gather(cache, group.rows, n) for cache in (keys, values))
            got = scaled_dot_product_attention(packed, k, v, attn_mask=group.mask, scale=scaling)
            out.index_copy_(0, group.tokens, got.reshape(n, heads, width))
        for chunk in self._chunks:
            k, v = (_gather(cache, chunk.rows, 1) for cache in (keys, values))
            got = scaled_dot_product_attention(
                query[:, :, chunk.first : chunk.last],
                k,
                v,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=scaling,
                enable_gqa=heads != kv_heads,
            )
            out[chunk.first : chunk.last] = got[0].transpose(0, 1)
        return out.unsqueeze(0)

    def _decode(
        self, group: NDArray[np.int64], first: NDArray[np.int64], seen: NDArray[np.int64], tables: NDArray[np.int64]
    ) -> _Decodes:
        ends = seen[group, None]
        begins = ends - np.minimum(ends, self._window) if self._window else np.zeros_like(ends)
        positions = begins + np.arange((ends - begins).max())
        visible = positions < ends
        positions = np.minimum(positions, ends - 1)
        blocks = np.take_along_axis(tables[group], positions // self._size, axis=1)
        rows = self._rows_of(blocks * self._size + positions % self._size)
        mask = None if visible.all() else self._upload(visible[:, None, None, :])
        return _Decodes(self._upload(first[group]), self._upload(rows.reshape(-1)), mask)

    def _chunk(self, first: int, length: int, seen: int, table: NDArray[np.int64]) -> _Chunk:
        begin = max(0, seen - length + 1 - self._window) if self._window else 0
        positions = np.arange(begin, seen)
        rows = self._rows_of(table[positions // self._size] * self._size + positions % self._size)
        mask = None
        if length < seen or (self._window and self._window < seen):
            queries = positions[-length:, None]
            visible = positions <= queries
            if self._window:
                visible &= positions > queries - self._window
            mask = self._upload(visible)
        return _Chunk(first, first + length, self._upload(rows), mask)

    def _rows_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = slots // self._size * self._block_rows + slots % self._size
        return rows

    def _upload(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _gather(cache: torch.Tensor, rows: torch.Tensor, sequences: int) -> torch.Tensor:
    """Read rows `[sequences * length]` as `[sequences, kv_heads, length, head_size]`."""
    return cache.index_select(0, rows).view(sequences, -1, *cache.shape[1:]).transpose(1, 2)


def _geometry(kind: str, blocks: int, block_size: int) -> tuple[int, int]:
    """Return the distance in rows between the keys of two blocks, and from a token's key to its value."""
    if kind == "kv_first":
        return block_size, blocks * block_size
    if kind == "blocks_first":
        return 2 * block_size, block_size
    raise LayoutError(f"paged attention reads layouts kv_first and blocks_first, not {kind}")


def _groups(members: NDArray[np.int64], seen: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Group sequences by length, to limit padding.

    Args:
        members: sequences, int64 `[m]`.
        seen: number of tokens that each sequence of the step sees, int64 `[n]`.

    Returns:
        The members in groups whose longest is at most `MAX_PADDING` times the shortest.
    """
    ordered = members[np.argsort(seen[members], kind="stable")]
    groups = []
    while len(ordered):
        count = int(np.searchsorted(seen[ordered], seen[ordered[0]] * MAX_PADDING, side="right"))
        groups.append(ordered[:count])
        ordered = ordered[count:]
    return groups
