"""A cache with a few slots per block, in which every readable id has a tag."""

from collections.abc import Iterable
from typing import Protocol

import torch

from blockyard.integrations.gaudi import OnlineDefragmenter

BLOCK_SIZE = 4


class Resolving(Protocol):
    """A defragmenter, ours or a model of another."""

    def resolve(self, block: int) -> int: ...


def cache_of(blocks: int) -> torch.Tensor:
    """Slots of so many blocks, untagged."""
    return torch.full((blocks * BLOCK_SIZE, 2), -1, dtype=torch.int32)


def ours(cache: torch.Tensor, **options: object) -> OnlineDefragmenter:
    """Return our defragmenter over a cache."""
    defragmenter = OnlineDefragmenter(**options)  # type: ignore[arg-type]
    defragmenter.initialize([(cache, None)], BLOCK_SIZE)
    return defragmenter


def write(defragmenter: Resolving, cache: torch.Tensor, ids: Iterable[int], tag: int = 0) -> None:
    """Tag ids at their current places."""
    for block_id in ids:
        block = defragmenter.resolve(block_id)
        cache[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 1000 * tag + block_id


def holds(defragmenter: Resolving, cache: torch.Tensor, ids: Iterable[int], tag: int = 0) -> bool:
    """Return whether all ids lead to their own tags."""
    named = [(block_id, defragmenter.resolve(block_id)) for block_id in ids]
    rows = [(block_id, cache[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]) for block_id, block in named]
    return all(bool((row == 1000 * tag + block_id).all()) for block_id, row in rows)
