"""Where the bytes of tokens lie in the blocks of vLLM's attention backends.

vLLM says neither in which order a backend keeps the tokens of a block, nor which bytes they have: a backend may view
its part of a block as it likes. So each layer writes known keys and values into blocks of its own, and what it changes
tells. A digest of what it writes keeps engines apart whose backends keep a token's bytes in another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.kv_offload.base import CanonicalKVCaches

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.vllm.region import MOST_PARTS
from blockyard.stores.adapters.chunks import TokenOrder

__all__ = ["FoundOrder", "find_order"]

_GROUP_TOKENS: Final = 16
"""Tokens of a group. The blocks of vLLM's backends for GPUs are multiples of it."""
_BLOCKS: Final = 3
"""Blocks to write to: the middle one; the others must not change."""


class FoundOrder(NamedTuple):
    """The order of the tokens in a worker's blocks.

    Attributes:
        order: where their bytes lie.
        piece_bytes: bytes of a piece of the heads in the order without block sizes.
        digest: of known keys and values, as the layers write them for one head, and of how heads lie; equal at all
            block sizes and tensor-parallel sizes.
    """

    order: TokenOrder
    piece_bytes: int
    digest: bytes


class _PageOrder(NamedTuple):
    """What one layer shows.

    Attributes:
        repeats: see `TokenOrder`.
        parts: see `TokenOrder`.
        pieces: in how many pieces of a group of tokens the heads lie, one after the other; 1 if there is one head.
        written: bytes of a group of tokens with known keys and values, for one head.
        owners: the group of tokens of each byte.
    """

    repeats: int
    parts: tuple[tuple[int, int], ...]
    pieces: int
    written: bytes
    owners: NDArray[np.int64]


def find_order(
    config: Any, kv_caches: CanonicalKVCaches, layers: Sequence[Sequence[str]], block_tokens: int, piece_bytes: int
) -> FoundOrder:
    """Return the order of tokens in a worker's blocks.

    Args:
        config: vLLM's `VllmConfig`, or None.
        kv_caches: from vLLM, with mappings as `cut_by_heads` wants them.
        layers: names of the layers of each group.
        block_tokens: of all groups.
        piece_bytes: from `cut_by_heads`.

    Raises:
        InvalidArgumentError: the order is unknown or not plain; the message names a layer.
    """
    if block_tokens % _GROUP_TOKENS:
        raise InvalidArgumentError(f"blocks have {block_tokens} tokens, must be a multiple of {_GROUP_TOKENS}")
    known = getattr(getattr(config, "compilation_config", None), "static_forward_context", {})
    dtype = getattr(getattr(config, "model_config", None), "dtype", None)
    written = [
        _Layer(name, known.get(name), kv_caches.tensors[ref.tensor_idx].tensor, block_tokens, dtype)
        for names, refs in zip(layers, kv_caches.group_data_refs, strict=True)
        for name, ref in zip(names, refs, strict=True)
    ]
    pages = [layer.page() for layer in written]
    first = pages[0]
    for layer, page in zip(written, pages, strict=True):
        if page[:4] != first[:4]:
            raise InvalidArgumentError(f"{written[0].name} and {layer.name} keep their tokens in unequal orders")
    order = TokenOrder(block_tokens // _GROUP_TOKENS, len(kv_caches.tensors), first.repeats, first.parts)
    pieces = first.pieces
    mapping: Any = kv_caches.group_data_refs[0][0].mapping
    if mapping.canonical_page_size_bytes > mapping.local_page_size_bytes:  # other workers have other heads
        piece_bytes = _piece_of_group(first.owners, piece_bytes, written[0].name)
        pieces = first.owners.size // order.groups // piece_bytes
        if written[0].heads > 1 and pieces != first.pieces:
            raise InvalidArgumentError(f"the heads of {written[0].name} do not lie where vLLM expects them")
    digest = hashlib.sha256(pieces.to_bytes(8, "big") + first.written).digest()
    return FoundOrder(order, piece_bytes, digest)


class _Layer:
    """One layer, which writes known keys and values.

    Args:
        name: of the layer.
        layer: vLLM's; None if vLLM does not show it.
        pages: its blocks, int8 `[blocks, bytes]`.
        block_tokens: of a block.
        dtype: of keys and values.
    """

    def __init__(self, name: str, layer: Any, pages: Tensor, block_tokens: int, dtype: Any) -> None:
        self.name, self._layer, self._block_tokens, self._dtype = name, layer, block_tokens, dtype
        self._page_bytes, cache = int(pages.shape[1]), getattr(layer, "kv_cache", None)
        if not hasattr(getattr(layer, "impl", None), "do_kv_cache_update") or not isinstance(cache, Tensor):
            raise InvalidArgumentError(f"{name} does not show where it writes tokens")
        blocks = len(cache), cache.stride(0) * cache.element_size(), cache.data_ptr()
        if blocks != (len(pages), pages.stride(0) * pages.element_size(), pages.data_ptr()):
            raise InvalidArgumentError(f"{name} does not keep its tokens in whole blocks")
        self.heads = int(getattr(layer, "num_kv_heads", 1))
        self._cache, self._strides = cache, (self._page_bytes // cache.element_size(), *cache.stride()[1:])

    def page(self) -> _PageOrder:
        """Return what the layer shows when it writes group by group."""
        groups, tokens = self._block_tokens // _GROUP_TOKENS, _GROUP_TOKENS
        owners, contents = np.full(self._page_bytes, -1), []
        others = self._write(0, others=True)
        for group in range(groups):
            slots = group * tokens, (group + 1) * tokens
            low, high = self._write(0, *slots), self._write(255, *slots)
            is_own = low == high
            if (owners[is_own] >= 0).any() or low[~is_own].any() or (high[~is_own] != 255).any():
                raise InvalidArgumentError(f"{self.name} has bytes of several tokens")
            if not np.array_equal(self._write(0, *slots, others=True), np.where(is_own, low, others)):
                raise InvalidArgumentError(f"{self.name} writes tokens in a way that depends on others")
            owners[is_own] = group
            contents.append(low[is_own])
        if (owners < 0).any():
            raise InvalidArgumentError(f"{self.name} has bytes of no token")
        if any(not np.array_equal(content, contents[0]) for content in contents):
            raise InvalidArgumentError(f"{self.name} writes tokens in another order elsewhere in a block")
        return _PageOrder(*_parts(owners, groups, self.name), *self._one_head(contents[0]), owners)

    def _one_head(self, content: NDArray[np.uint8]) -> tuple[int, bytes]:
        """Return the pieces and the bytes that a group would have with one head: all heads hold the same."""
        for pieces in (1 << power for power in range(16)):
            if content.size % (pieces * self.heads) == 0:
                cut = content.reshape(pieces, self.heads, -1)
                if (cut == cut[:, :1]).all():
                    return pieces, cut[:, 0].tobytes()
        raise InvalidArgumentError(f"the heads of {self.name} do not lie side by side")

    def _write(self, fill: int, first: int = 0, last: int = 0, *, others: bool = False) -> NDArray[np.uint8]:
        """Return a block after these tokens were written to it.

        Args:
            fill: each byte before.
            first: number of the first token.
            last: number after the last one.
            others: whether all tokens were written with other contents before.
        """
        cache, size, start = self._cache, self._page_bytes, self._block_tokens
        raw = torch.from_numpy(np.full(_BLOCKS * size, fill, np.uint8)).to(cache.device)
        view = raw.view(cache.dtype).as_strided((_BLOCKS, *cache.shape[1:]), self._strides)
        try:
            if others:
                self._update(view, range(start, 2 * start), 1)
            if first < last:
                self._update(view, range(start + first, start + last), 0)
        except Exception as error:
            raise InvalidArgumentError(f"{self.name} cannot write to blocks of its own: {error}") from error
        found = raw.cpu().numpy().reshape(_BLOCKS, size)
        if (found[[0, 2]] != fill).any():
            raise InvalidArgumentError(f"{self.name} writes to blocks of other tokens")
        block: NDArray[np.uint8] = found[1]
        return block

    def _update(self, view: Tensor, slots: range, kind: int) -> None:
        """Write known keys and values of a kind, the same for each head, as the layer does in a step."""
        layer, device = self._layer, view.device
        places = torch.arange(slots.start, slots.stop, dtype=torch.int64, device=device)

        def known(what: int, size: int, heads: int) -> Tensor:
            places = np.arange(len(slots) * size, dtype=np.int64) + 7919 * what + 104729 * kind
            numbers = (places * 2654435761 % 4294967291 % 251 - 125).reshape(len(slots), 1, size)
            # They are exact in all types with at least 8 bits of mantissa.
            return torch.from_numpy(numbers / 64).to(self._dtype).expand(-1, heads, -1).contiguous().to(device)

        with torch.inference_mode():
            if hasattr(layer, "kv_lora_rank"):
                scale = getattr(layer, "_k_scale")  # noqa: B009 (vLLM's name is private)
                latent, rope = known(0, layer.kv_lora_rank, 1).squeeze(1), known(1, layer.qk_rope_head_dim, 1)
                layer.impl.do_kv_cache_update(latent, rope, view, places, layer.kv_cache_dtype, scale)
            else:
                key, value = (
                    known(0, layer.head_size, layer.num_kv_heads),
                    known(1, layer.head_size_v, layer.num_kv_heads),
                )
                layer.impl.do_kv_cache_update(layer, key, value, view, places)


def _parts(owners: NDArray[np.int64], groups: int, name: str) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return how often a page repeats its parts, and these, see `TokenOrder`."""
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    sizes = np.diff(starts, append=owners.size)
    if len(starts) % groups == 0:
        rounds = sizes.reshape(-1, groups)
        if (owners[starts].reshape(-1, groups) == np.arange(groups)).all() and (rounds == rounds[:, :1]).all():
            found = tuple((len(list(same)), int(size)) for size, same in groupby(rounds[:, 0].tolist()))
            repeats = next(n for n in range(len(found), 0, -1) if found[: len(found) // n] * n == found)
            if len(found) // repeats <= MOST_PARTS:
                return repeats, found[: len(found) // repeats]
    raise InvalidArgumentError(f"the tokens of {name} do not lie in a plain order")


def _piece_of_group(owners: NDArray[np.int64], piece_bytes: int, name: str) -> int:
    """Return how many bytes each piece of a page has of each group of tokens that it holds."""
    pieces = owners.reshape(-1, piece_bytes)
    sizes = {int(size) for piece in pieces for size in np.bincount(piece) if size}
    if len(sizes) != 1:
        raise InvalidArgumentError(f"the heads of {name} hold unequal numbers of tokens")
    return sizes.pop()
