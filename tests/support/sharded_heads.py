"""Blocks whose heads the workers of a tensor-parallel engine share, in the orders of attention backends."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# What lies outside: K and V, tokens, heads. The bytes of a head of one token are last.
ORDERS = {"packed NHD": "thk", "packed HND": "htk", "split NHD": "kth", "split HND": "kht"}


@dataclass(frozen=True)
class Heads:
    """Blocks of some layers; each cache group has as many layers, which share their tensors with the other groups'.

    Args:
        order: of `ORDERS`.
        layers: of a group.
        heads: of K and V; with more workers than heads, several workers have the same ones.
        tokens: of a block.
        row_bytes: bytes of K or V of one head and token.
        groups: cache groups.
        unmapped: a layer whose bytes vLLM cannot map; None for none.
    """

    order: str = "packed HND"
    layers: int = 2
    heads: int = 4
    tokens: int = 4
    row_bytes: int = 16
    groups: int = 1
    unmapped: int | None = None

    @property
    def layer_names(self) -> list[tuple[str, ...]]:
        """Names of each group's layers."""
        return [tuple(f"layers.{group}.{layer}" for layer in range(self.layers)) for group in range(self.groups)]

    def page_bytes(self, world: int) -> int:
        """Bytes of a worker's block in one layer."""
        return 2 * self.tokens * max(1, self.heads // world) * self.row_bytes

    def block_bytes(self, world: int) -> int:
        """Bytes of a worker's block."""
        return self.layers * self.page_bytes(world)

    def part(self, key: bytes, rank: int, world: int, blocks: int = 1) -> torch.Tensor:
        """Return what a worker has under a key, int8."""
        random = np.random.default_rng(list(key))
        shape = (blocks, self.layers, 2, self.tokens, self.heads, self.row_bytes)
        whole = random.integers(-128, 128, shape, dtype=np.int8)
        pages = [self._page(layer, rank, world) for block in whole for layer in block]
        return torch.from_numpy(np.concatenate(pages))

    def caches(self, base: Any, blocks: torch.Tensor, rank: int, world: int) -> Any:
        """Return what vLLM tells a worker of its blocks, int8 `[blocks, bytes]`."""
        size = self.page_bytes(world)
        tensors = [
            base.CanonicalKVCacheTensor(blocks[:, layer * size : (layer + 1) * size], size)
            for layer in range(self.layers)
        ]
        refs = [base.CanonicalKVCacheRef(layer, size, self._mapping(base, rank, world)) for layer in range(self.layers)]
        if self.unmapped is not None:
            refs[self.unmapped] = base.CanonicalKVCacheRef(self.unmapped, size)
        return base.CanonicalKVCaches(tensors, [list(refs) for _ in range(self.groups)])

    def _page(self, whole: np.ndarray, rank: int, world: int) -> np.ndarray:
        """Return a worker's page of K and V, `[2, tokens, heads, bytes]`."""
        shards = min(self.heads, world)
        each, shard = self.heads // shards, rank // (world // shards)
        axes = ["kth".index(axis) for axis in ORDERS[self.order]]
        return whole[:, :, shard * each : (shard + 1) * each].transpose(*axes, 3).reshape(-1)

    def _mapping(self, base: Any, rank: int, world: int) -> Any:
        """Return where each byte of a worker's page belongs in the page of all heads, as vLLM does."""
        shape = (2, self.tokens, self.heads, self.row_bytes)
        numbers = np.arange(np.prod(shape)).reshape(shape)
        places = np.empty(numbers.size, np.int64)
        places[self._page(numbers, 0, 1)] = np.arange(numbers.size)
        here = places[self._page(numbers, rank, world)]
        starts = np.flatnonzero(np.diff(here, prepend=here[0] - 2) != 1)
        sizes = np.diff(starts, append=here.size).tolist()
        runs = [
            base.CopyRun(int(start), int(here[start]), size, 1, size, size)
            for start, size in zip(starts, sizes, strict=True)
        ]
        strides = set(np.diff(here[starts]).tolist())
        if len(runs) > 1 and len(set(sizes)) == len(strides) == 1:
            runs = [base.CopyRun(0, int(here[0]), sizes[0], len(runs), sizes[0], strides.pop())]
        return base.CanonicalPageMapping(numbers.size, here.size, tuple(runs), 1, 0, True)
