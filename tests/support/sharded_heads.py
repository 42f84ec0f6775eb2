"""Blocks whose heads the workers of a tensor-parallel engine share, in the orders of attention backends."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# What lies outside: K and V, tokens, heads. The elements of a head of one token are last, except those of K on a CPU.
ORDERS = {"packed NHD": "thk", "packed HND": "htk", "split NHD": "kth", "split HND": "kht", "CPU": "hkt"}
ELEMENT = 2  # bytes


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
        writes: how layers write tokens: `"well"`, `"nothing"`, `"backwards"`, or as a name in `_WRONG` says.
    """

    order: str = "packed HND"
    layers: int = 2
    heads: int = 4
    tokens: int = 4
    row_bytes: int = 16
    groups: int = 1
    unmapped: int | None = None
    writes: str = "well"

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
        shape = (self.layers, 2, blocks * self.tokens, self.heads, self.row_bytes)
        whole = random.integers(-128, 128, shape, dtype=np.int8)
        cut = whole.reshape(self.layers, 2, blocks, self.tokens, self.heads, self.row_bytes).transpose(2, 0, 1, 3, 4, 5)
        pages = [self._page(layer, rank, world) for block in cut for layer in block]
        return torch.from_numpy(np.concatenate(pages))

    def shown(self, blocks: torch.Tensor, world: int) -> dict[str, Any]:
        """Return the layers that vLLM shows a worker, which write to its blocks, int8 `[blocks, bytes]`."""
        size, heads = self.page_bytes(world), max(1, self.heads // world)
        found = {}
        for group in self.layer_names:
            for place, name in enumerate(group):
                found[name] = SimpleNamespace(
                    num_kv_heads=heads,
                    head_size=self.row_bytes // ELEMENT,
                    head_size_v=self.row_bytes // ELEMENT,
                    kv_cache=blocks[:, place * size : (place + 1) * size].view(torch.float16),
                    impl=SimpleNamespace(do_kv_cache_update=self._write),
                )
        return found

    def _write(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write the keys and values of tokens to blocks."""
        sizes = {"k": 2, "t": self.tokens, "h": layer.num_kv_heads}
        order = ORDERS[self.order]
        pages = cache.unflatten(1, (*(sizes[axis] for axis in order), layer.head_size))
        keys, values = pages.permute(0, *(1 + order.index(axis) for axis in "kth"), 4).unbind(1)
        if self.order == "CPU":
            turned = pages[:, :, 0].flatten(2).unflatten(2, (layer.head_size, self.tokens))
            keys = turned.permute(0, 3, 1, 2)
        blocks, tokens = slots // self.tokens, slots % self.tokens
        tokens, wrong = self.tokens - 1 - tokens if self.writes == "backwards" else tokens, _WRONG.get(self.writes)
        if self.writes != "nothing":
            _put(keys, blocks, tokens, key)
            _put(values, blocks, tokens, value)
        if wrong is not None:
            wrong(keys, blocks, tokens, key)

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
        page = whole[:, :, shard * each : (shard + 1) * each].transpose(*axes, 3)
        if self.order == "CPU":
            turned = page[:, 0].reshape(each, self.tokens, -1, ELEMENT).swapaxes(1, 2)
            page = np.stack((turned.reshape(each, -1), page[:, 1].reshape(each, -1)), axis=1)
        return page.reshape(-1)

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


def _put(to: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> None:
    to.numpy()[blocks.numpy(), tokens.numpy()] = values.numpy()  # torch would wait for threads of its own


def _fail(*_: torch.Tensor) -> None:
    raise RuntimeError("no")


def _turned(keys: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, key: torch.Tensor) -> None:
    keys[blocks, tokens] = key.flip(2)


def _one_byte(keys: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, key: torch.Tensor) -> None:
    keys[blocks, tokens * 0, 0, 0] = key[:, 0, 0]


def _two_blocks(keys: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, key: torch.Tensor) -> None:
    keys[blocks + 1, tokens] = key


def _neighbours(keys: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, key: torch.Tensor) -> None:
    other = keys[blocks, (tokens + 16) % keys.shape[1]]
    keys[blocks, tokens] = key + (torch.isfinite(other) & (other != 0))


def _places(keys: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, key: torch.Tensor) -> None:
    keys[blocks, tokens] = torch.where((tokens // 16 % 2 == 0)[:, None, None], key, key.flip(2))


def _heads(keys: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, key: torch.Tensor) -> None:
    keys[blocks, tokens] = key + torch.arange(key.shape[1])[:, None]


_WRONG: dict[str, Callable[..., None]] = {
    "elements turned": _turned,
    "one byte": _one_byte,
    "two blocks": _two_blocks,
    "neighbours": _neighbours,
    "places": _places,
    "heads": _heads,
    "an error": _fail,
}
