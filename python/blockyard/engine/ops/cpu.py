"""The copy ops on CPU tensors: `rust/copy` moves the rows of all views together, with as many threads as torch has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from blockyard._core import BoundViews, Mapping
from blockyard.engine.ops import checks


class Bound:
    """Views that were checked once, for any number of mappings.

    Args:
        src: views to read, uint8 `[blocks, bytes]`.
        dst: the same number of views to write; None changes `src` in place.
    """

    def __init__(self, src: Sequence[Tensor], dst: Sequence[Tensor] | None) -> None:
        self._src, self._dst = list(src), None if dst is None else list(dst)
        # Views of one tensor share one version.
        self._versions = _bases(self._src if self._dst is None else self._dst)
        # One tensor of each storage: torch may move it, for example to share it with another process.
        bases = _bases([*self._src, *(self._dst or ())])
        self._memories = list({base.untyped_storage().data_ptr(): base for base in bases}.values())
        self._bind()

    def _bind(self) -> None:
        self._addresses = list(map(Tensor.data_ptr, self._memories))
        self._views = BoundViews(_kept(self._src), None if self._dst is None else _kept(self._dst))

    def __call__(self, mapping: Mapping) -> None:
        """Carry out a mapping in each view."""
        if list(map(Tensor.data_ptr, self._memories)) != self._addresses:
            self._bind()
        self._views.run(mapping, num_threads=torch.get_num_threads())
        increment_version(self._versions)


def _bases(views: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of which these are views, each once."""
    bases = [view if view._base is None else view._base for view in views]  # noqa: SLF001 (torch documents it)
    return list({id(base): base for base in bases}.values())


def _between(src: Sequence[Tensor], dst: Sequence[Tensor], mapping: Mapping) -> None:
    BoundViews(_arrays(src), _arrays(dst)).run(mapping, num_threads=torch.get_num_threads())


def _within(caches: Sequence[Tensor], mapping: Mapping) -> None:
    BoundViews(_arrays(caches)).run(mapping, num_threads=torch.get_num_threads())


def _kept(views: Sequence[Tensor]) -> list[NDArray[np.uint8]]:
    # Private tensors keep the memory alive, even if the caller drops its own.
    return _arrays([view.detach() for view in views])


def _arrays(views: Sequence[Tensor]) -> list[NDArray[np.uint8]]:
    return [view.numpy() for view in views]


ON_CPU = checks.CopyOps(_between, _within, finds_shared=True)
"""The implementations on the CPU."""
