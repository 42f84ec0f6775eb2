"""The copy ops on CUDA tensors: the compiled library checks the views and runs what a checked mapping says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from blockyard._core import Mapping
from blockyard.engine.ops.checks import Rule, mapping_of, mapping_of_rows
from blockyard.engine.ops.strategy import use_cached
from blockyard.errors import BlockyardError, CaptureError, LayoutError, MappingError

_ERRORS: dict[str, type[BlockyardError]] = {"mapping": MappingError, "layout": LayoutError, "capture": CaptureError}


def swap(src: list[Tensor], dst: list[Tensor], pairs: Tensor) -> None:
    """Implement `swap_blocks`."""
    between(src, dst, mapping_of("swap", pairs, _blocks("src", src), _blocks("dst", dst)))


def copy(caches: list[Tensor], pairs: Tensor) -> None:
    """Implement `copy_blocks`."""
    _change("copy", caches, pairs)


def move(caches: list[Tensor], pairs: Tensor) -> None:
    """Implement `move_blocks`."""
    _change("move", caches, pairs)


def exchange(caches: list[Tensor], pairs: Tensor) -> None:
    """Implement `exchange_blocks`."""
    _change("exchange", caches, pairs)


def gather(caches: list[Tensor], rows: Tensor, blocks: Tensor) -> None:
    """Implement `gather_blocks`."""
    mapping = mapping_of_rows(blocks, _blocks("caches", caches), _blocks("rows", [rows]), written=False)
    _use_cached(caches)
    _run(torch.ops.blockyard.run_gather, caches, rows, torch.from_numpy(mapping.pairs))
    increment_version(rows)


def scatter(rows: Tensor, caches: list[Tensor], blocks: Tensor) -> None:
    """Implement `scatter_blocks`."""
    mapping = mapping_of_rows(blocks, _blocks("caches", caches), _blocks("rows", [rows]), written=True)
    _use_cached(caches)
    _run(torch.ops.blockyard.run_scatter, rows, caches, torch.from_numpy(mapping.pairs))
    increment_version(caches)


def between(src: Sequence[Tensor], dst: Sequence[Tensor], mapping: Mapping) -> None:
    """Carry a mapping out from some views to others."""
    _use_cached(dst)
    _run(torch.ops.blockyard.run_swap, src, dst, torch.from_numpy(mapping.pairs))
    increment_version(dst)


def within(caches: Sequence[Tensor], mapping: Mapping) -> None:
    """Carry a mapping out within views."""
    _use_cached(caches)
    steps, starts = mapping.steps()
    _run(torch.ops.blockyard.run_steps, caches, torch.from_numpy(steps), torch.from_numpy(starts))
    increment_version(caches)


def _change(rule: Rule, caches: list[Tensor], pairs: Tensor) -> None:
    blocks = _blocks("caches", caches)
    within(caches, mapping_of(rule, pairs, blocks, blocks))


def _blocks(name: str, views: Sequence[Tensor]) -> int:
    """Give the number of blocks that the first view seems to have; the library looks at it closely."""
    if not views:
        raise LayoutError(f"{name} holds no tensors")
    return views[0].shape[0] if views[0].dim() else 0


def _use_cached(views: Sequence[Tensor]) -> None:
    """Look for the calibrated table of a device that is met for the first time."""
    if views[0].is_cuda:
        use_cached(views[0].device.index)


def _run(op: Callable[..., object], *arguments: object) -> None:
    try:
        op(*arguments)
    except RuntimeError as error:
        raise named(error) from error


def named(error: RuntimeError) -> Exception:
    """Turn an error of the compiled library into the class that its message names."""
    kind, _, message = str(error).partition("blockyard ")[2].partition(": ")
    return _ERRORS[kind](message) if kind in _ERRORS else error
