"""The copy ops on CUDA tensors in plain torch calls, for where the op library cannot be loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockyard.engine.mapping import Ids
from blockyard.engine.ops import checks
from blockyard.errors import CaptureError

# How much device memory is taken at a time where the order of copies does not matter.
_PART_BYTES = 32 << 20


def _exchange(caches: Sequence[Tensor], pairs: Ids) -> None:
    for view in caches:
        step = max(1, _PART_BYTES // max(1, 2 * view.shape[1]))
        for start in range(0, len(pairs), step):
            part = pairs[start : start + step]
            _move([view], np.concatenate((part, part[:, ::-1])))


def _copy(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Ids) -> None:
    _refuse_capture(src[0], dst[0])
    sources = torch.tensor(pairs[:, 0], device=src[0].device)
    targets = torch.tensor(pairs[:, 1], device=dst[0].device)
    for source, target in zip(src, dst, strict=True):
        step = max(1, _PART_BYTES // max(1, source.shape[1]))
        for chosen, to in zip(sources.split(step), targets.split(step), strict=True):
            target.index_copy_(0, to, source.index_select(0, chosen).to(target.device))


def _move(caches: Sequence[Tensor], pairs: Ids) -> None:
    """Read all rows of a cache before the first is written."""
    _refuse_capture(*caches[:1])
    sources, targets = (torch.tensor(column, device=caches[0].device) for column in pairs.T)
    for view in caches:
        view.index_copy_(0, targets, view.index_select(0, sources))


def _refuse_capture(*tensors: Tensor) -> None:
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        raise CaptureError("without the op library a mapping is copied to the device: no graph can hold that")


BY_TORCH = checks.CopyOps(_copy, _move, _exchange)
"""The implementations in torch calls."""
