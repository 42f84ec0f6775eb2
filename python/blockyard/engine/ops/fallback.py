"""The copy ops on CUDA tensors in plain torch calls, used if the op library cannot be loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockyard._core import Mapping
from blockyard.engine.ops import checks
from blockyard.errors import CaptureError

# Device memory used at a time if the order of copies does not matter.
_PART_BYTES = 32 << 20


def _copy(src: Sequence[Tensor], dst: Sequence[Tensor], mapping: Mapping) -> None:
    _refuse_capture(src[0], dst[0])
    pairs = torch.from_numpy(mapping.pairs)
    sources, targets = pairs[:, 0].to(src[0].device), pairs[:, 1].to(dst[0].device)
    for source, target in zip(src, dst, strict=True):
        step = max(1, _PART_BYTES // max(1, source.shape[1]))
        for chosen, to in zip(sources.split(step), targets.split(step), strict=True):
            target.index_copy_(0, to, source.index_select(0, chosen).to(target.device))


def _change(caches: Sequence[Tensor], mapping: Mapping) -> None:
    if mapping.rule == "copy":
        _copy(caches, caches, mapping)
        return
    _refuse_capture(*caches[:1])
    pairs = torch.from_numpy(mapping.pairs).to(caches[0].device)
    for view in caches:
        # Moves depend on one another: read all rows before writing any. Exchanges do not.
        step = max(1, _PART_BYTES // max(1, 2 * view.shape[1])) if mapping.rule == "exchange" else max(1, len(pairs))
        for part in pairs.split(step):
            both = torch.cat((part, part.flip(1))) if mapping.rule == "exchange" else part
            view.index_copy_(0, both[:, 1], view.index_select(0, both[:, 0]))


def _refuse_capture(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            with torch.cuda.device(tensor.device):  # torch checks only the current device
                capturing = torch.cuda.is_current_stream_capturing()
            if capturing:
                raise CaptureError(
                    "without the op library, a graph cannot capture this copy: it sends ids to the device"
                )


BY_TORCH = checks.CopyOps(_copy, _change)
"""The implementations in torch calls."""
