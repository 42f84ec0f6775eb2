"""The copy ops on CUDA tensors: the compiled library checks the views and executes checked mappings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from blockyard._core import Mapping
from blockyard.engine.ops.checks import CopyOps, count_blocks, mapping_of_rows
from blockyard.engine.ops.strategy import use_cached
from blockyard.errors import BlockyardError, CaptureError, LayoutError, MappingError

_ERRORS: dict[str, type[BlockyardError]] = {"mapping": MappingError, "layout": LayoutError, "capture": CaptureError}


class _Compiled(CopyOps):
    """Views are checked by the library."""

    def between(self, src: Sequence[Tensor], dst: Sequence[Tensor], mapping: Mapping) -> None:
        self.copy_between(src, dst, mapping)
        increment_version(dst)

    def within(self, caches: Sequence[Tensor], mapping: Mapping) -> None:
        self.copy_within(caches, mapping)
        increment_version(caches)

    def gather(self, caches: list[Tensor], rows: Tensor, blocks: Tensor) -> None:
        num_blocks, num_rows = count_blocks("caches", caches), count_blocks("rows", [rows])
        mapping = mapping_of_rows(blocks, num_blocks, num_rows, written=False)
        _use_cached(caches, [rows])
        _run(torch.ops.blockyard.run_gather, caches, rows, torch.from_numpy(mapping.pairs))
        increment_version(rows)

    def scatter(self, rows: Tensor, caches: list[Tensor], blocks: Tensor) -> None:
        num_blocks, num_rows = count_blocks("caches", caches), count_blocks("rows", [rows])
        mapping = mapping_of_rows(blocks, num_blocks, num_rows, written=True)
        _use_cached([rows], caches)
        _run(torch.ops.blockyard.run_scatter, rows, caches, torch.from_numpy(mapping.pairs))
        increment_version(caches)


def _between(src: Sequence[Tensor], dst: Sequence[Tensor], mapping: Mapping) -> None:
    _use_cached(src, dst)
    _run(torch.ops.blockyard.run_swap, src, dst, torch.from_numpy(mapping.pairs))


def _within(caches: Sequence[Tensor], mapping: Mapping) -> None:
    steps, starts = mapping.steps()
    _run(torch.ops.blockyard.run_steps, caches, torch.from_numpy(steps), torch.from_numpy(starts))


def _use_cached(*sides: Sequence[Tensor]) -> None:
    """Load the calibrated table of a device on its first use."""
    for views in sides:
        if views and views[0].is_cuda:
            use_cached(views[0].device.index)


def _run(op: Callable[..., object], *arguments: object) -> None:
    try:
        op(*arguments)
    except RuntimeError as error:
        raise named(error) from error


def named(error: RuntimeError) -> Exception:
    """Convert an error of the compiled library to the class that its message names."""
    kind, _, message = str(error).partition("blockyard ")[2].partition(": ")
    return _ERRORS[kind](message) if kind in _ERRORS else error


BY_LIBRARY = _Compiled(_between, _within)
"""The implementations of the compiled library."""
