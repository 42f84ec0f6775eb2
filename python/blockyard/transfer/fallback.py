"""The copy ops on CUDA tensors in plain torch calls, for where the op library cannot be loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockyard.plan import Ids
from blockyard.transfer import checks

# How much device memory is taken at a time where the order of copies does not matter.
_PART_BYTES = 32 << 20


def swap(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    """Implement `swap_blocks`."""
    checks.check_swap(src, dst)
    _move(src, dst, checks.check_ids(pairs, src[0].shape[0], dst[0].shape[0], in_place=False))


def copy(caches: list[Tensor], pairs: Tensor) -> None:
    """Implement `copy_blocks`."""
    checks.check_caches(caches)
    blocks = caches[0].shape[0]
    _move(caches, caches, checks.check_ids(pairs, blocks, blocks, in_place=True))


def move(caches: list[Tensor], pairs: Tensor) -> None:
    """Implement `move_blocks`: all rows of a cache are read before the first is written."""
    checks.check_caches(caches)
    blocks = caches[0].shape[0]
    _replace(caches, checks.check_ids(pairs, blocks, blocks, in_place=False))


def exchange(caches: list[Tensor], pairs: Tensor) -> None:
    """Implement `exchange_blocks`."""
    checks.check_caches(caches)
    checked = checks.check_exchange(pairs, caches[0].shape[0])
    for view in caches:
        step = max(1, _PART_BYTES // max(1, 2 * view.shape[1]))
        for start in range(0, len(checked), step):
            part = checked[start : start + step]
            _replace([view], np.concatenate((part, part[:, ::-1])))


def gather(caches: list[Tensor], rows: Tensor, blocks: Tensor) -> None:
    """Implement `gather_blocks`."""
    pieces = checks.split_rows(rows, caches)
    checks.check_swap(caches, pieces, ("caches", "rows"))
    ids = checks.check_list_of_blocks(blocks, caches[0].shape[0], rows.shape[0], unique=False)
    _move(caches, pieces, np.column_stack((ids, np.arange(len(ids)))))


def scatter(rows: Tensor, caches: list[Tensor], blocks: Tensor) -> None:
    """Implement `scatter_blocks`."""
    pieces = checks.split_rows(rows, caches)
    checks.check_swap(pieces, caches, ("rows", "caches"))
    ids = checks.check_list_of_blocks(blocks, caches[0].shape[0], rows.shape[0], unique=True)
    _move(pieces, caches, np.column_stack((np.arange(len(ids)), ids)))


def _move(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Ids) -> None:
    sources = torch.tensor(pairs[:, 0], device=src[0].device)
    targets = torch.tensor(pairs[:, 1], device=dst[0].device)
    for source, target in zip(src, dst, strict=True):
        step = max(1, _PART_BYTES // max(1, source.shape[1]))
        for chosen, to in zip(sources.split(step), targets.split(step), strict=True):
            target.index_copy_(0, to, source.index_select(0, chosen).to(target.device))


def _replace(caches: Sequence[Tensor], pairs: Ids) -> None:
    sources, targets = (torch.tensor(column, device=caches[0].device) for column in pairs.T)
    for view in caches:
        view.index_copy_(0, targets, view.index_select(0, sources))
