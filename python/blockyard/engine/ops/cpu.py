"""The copy ops on CPU tensors: `rust/copy` moves the rows of all views together, with as many threads as torch has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard._core import copy_rows, exchange_rows, move_rows
from blockyard.engine.mapping import Ids
from blockyard.engine.ops import checks


def _copy(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Ids) -> None:
    copy_rows(_arrays(src), _arrays(dst), pairs, num_threads=torch.get_num_threads())


def _move(caches: Sequence[Tensor], pairs: Ids) -> None:
    move_rows(_arrays(caches), pairs, num_threads=torch.get_num_threads())


def _exchange(caches: Sequence[Tensor], pairs: Ids) -> None:
    exchange_rows(_arrays(caches), pairs, num_threads=torch.get_num_threads())


def _arrays(views: Sequence[Tensor]) -> list[NDArray[np.uint8]]:
    return [view.numpy() for view in views]


ON_CPU = checks.CopyOps(_copy, _move, _exchange)
"""The implementations on the CPU."""
