"""The copy ops: their arguments, the ways to call them, and what they do to plain arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from blockyard.engine import ops
from blockyard.engine.ops import fallback
from blockyard.engine.ops.compiled import named
from blockyard.engine.ops.library import op_library

Op = Callable[..., None]
LISTS = {"swap": 2, "copy": 1, "move": 1, "exchange": 1, "gather": 2, "scatter": 2}
"""The ops, and how many of their arguments hold blocks."""


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8))


def caches_of(width: int = 24, blocks: int = 6, count: int = 3) -> list[torch.Tensor]:
    return list(random_bytes(count, blocks, width))


def ids(*values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def pairs_of(*pairs: object) -> torch.Tensor:
    return ids(*pairs).reshape(-1, 2)


def way(name: str, through: str) -> Op:
    """Return an op as users call it, made of torch calls, or as the compiled library implements it."""
    if through == "torch calls":
        return getattr(fallback.BY_TORCH, name)
    return compiled(name) if through == "compiled" else getattr(ops, f"{name}_blocks")


def compiled(name: str) -> Op:
    """Call the compiled library's implementation; it rejects bad arguments before it looks for a device."""
    op = getattr(torch.ops.blockyard, f"{name}_blocks").default

    def call(*arguments: object) -> None:
        if not op_library().loaded:
            pytest.skip(op_library().explain())
        try:
            op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments)
        except RuntimeError as error:
            raise named(error) from error

    return call


def model(name: str, read: list[np.ndarray], written: list[np.ndarray], pairs: list[tuple[int, int]]) -> None:
    """Do what an op does if it reads everything before it writes the first byte; -1 is padding."""
    before = [array.copy() for array in read]
    for source, target in zip(before, written, strict=True):
        for a, b in pairs:
            if a >= 0:
                target[b] = source[a]
                if name == "exchange":
                    target[a] = source[b]


def arranged(
    name: str, caches: list[torch.Tensor], more: list[torch.Tensor], pairs: list[tuple[int, int]]
) -> tuple[list[object], list[torch.Tensor], list[torch.Tensor], list[tuple[int, int]]]:
    """Return an op's arguments, the views that it reads and writes, and pairs; `more` is the other side, or rows."""
    mapping = pairs_of(*pairs)
    if name == "swap":
        return [caches, more, mapping], caches, more, pairs
    if name in {"copy", "move", "exchange"}:
        return [caches, mapping], caches, caches, pairs
    pieces = list(more[0].split([cache.shape[1] for cache in caches], dim=1))
    if name == "gather":
        chosen = [(a, row) for row, (a, _) in enumerate(pairs)]
        return [caches, more[0], mapping[:, 0].contiguous()], caches, pieces, chosen
    return [more[0], caches, mapping[:, 1].contiguous()], pieces, caches, [(row, b) for row, (_, b) in enumerate(pairs)]
