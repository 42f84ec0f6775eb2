"""The real streams of a device under the cache machine: compute is queued and may still run when a step has ended."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Delay of compute in CUDA device cycles: usually none.
_DELAYS = (0, 0, 0, 20_000, 2_000_000)


class RealStreams:
    """The stream interface that the machine needs. The cache has its own streams; compute runs on the current one.

    Args:
        random: decides how late compute is.
        device: the cache's device.
    """

    failed = 0

    def __init__(self, random: Random, device: torch.device) -> None:
        self._random, self._device = random, device

    def compute(self, work: Callable[[], None]) -> None:
        """Queue compute: on a CUDA device it runs later."""
        if self._device.type == "cuda":
            torch.cuda._sleep(self._random.choice(_DELAYS))
        work()

    def fence(self) -> RealStreams:
        """Return no fence: a check waits for the data that it compares."""
        return self

    def synchronize(self) -> None:
        """Do not wait."""


class Queued:
    """Numbers that compute has read, or will read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __array__(self, *_: Any, **__: Any) -> NDArray[np.int64]:
        return self._tensor.cpu().numpy()

    def copy(self) -> Queued:
        return self


class RealCells:
    """Keys and values of one layer, int64 `[2, slots]`, read and written on the current stream.

    Args:
        tensor: the cache's tensor.
        head_size: int64 numbers per key; only the first is used.
    """

    def __init__(self, tensor: torch.Tensor, head_size: int) -> None:
        self._cells = tensor.view(torch.int64).view(2, -1, head_size)[:, :, 0]

    def _at(self, slots: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(slots, np.int64)).to(self._cells.device)

    def __getitem__(self, at: tuple[slice, Any]) -> Queued:
        return Queued(self._cells.index_select(1, self._at(at[1]).view(-1)))

    def __setitem__(self, at: tuple[slice, Any], values: NDArray[np.int64]) -> None:
        self._cells.index_copy_(1, self._at(at[1]), torch.from_numpy(values).to(self._cells.device))
