"""Executes the swaps of a V0 scheduler: to the host and to an external store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard.executor import StepExecutor


class CacheSwapper:
    """`swap_out` and `swap_in` of V0's `CacheEngine`, for a manager with external blocks.

    Both return when the bytes have arrived. They take the mappings that `SelfAttnBlockSpaceManager` returned to the
    scheduler, in which ids from the number of host blocks on are slots of the store.

    Args:
        executor: executor over the worker's GPU tensors, with `num_cpu_blocks` host blocks and a swap store of
            `num_external_blocks` slots. Nothing else may submit to it.

    Source: vLLM 0.7.3, `vllm/worker/cache_engine.py`, CacheEngine.
    """

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._num_cpu_blocks = executor.engine.num_blocks("host")
        self._tickets = count()

    def swap_out(self, src_to_dst: Tensor | Sequence[tuple[int, int]]) -> None:
        """Copy blocks off the GPU.

        Args:
            src_to_dst: the scheduler's `blocks_to_swap_out`, int64 `[n, 2]` on the CPU.

        Raises:
            InvalidArgumentError: the mapping has another shape.
            MappingError: an id is out of range.
            StoreError: the store did not keep some of the blocks, so their sequences cannot continue.
        """
        pairs = _last_writes(src_to_dst)
        near, far = self._split(pairs, 1)
        self._run([("swap_out", Pairs("device", "host", near)), ("swap_out", Pairs("device", "external", far))])

    def swap_in(self, src_to_dst: Tensor | Sequence[tuple[int, int]]) -> None:
        """Copy blocks back to the GPU, for compute queued from now on.

        Args:
            src_to_dst: the scheduler's `blocks_to_swap_in`, int64 `[n, 2]` on the CPU.

        Raises:
            InvalidArgumentError: the mapping has another shape.
            MappingError: an id is out of range.
            StoreError: some blocks did not come back intact; do not compute with them.
        """
        pairs = _last_writes(src_to_dst)
        near, far = self._split(pairs, 0)
        self._run([("swap_in", Pairs("host", "device", near)), ("swap_in", Pairs("external", "device", far))])

    def _split(self, pairs: NDArray[np.int64], column: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Split pairs into those with the host and those with the store, whose slots are numbered from 0."""
        is_near = pairs[:, column] < self._num_cpu_blocks
        far = pairs[~is_near]
        far[:, column] -= self._num_cpu_blocks
        return pairs[is_near], far

    def _run(self, transfers: list[tuple[str, Pairs]]) -> None:
        wanted = [(kind, pairs) for kind, pairs in transfers if len(pairs)]
        if not wanted:
            return
        decision = StepDecision(next(self._tickets), wanted)
        self._executor.poll()  # drop reports of calls that an error ended
        self._executor.submit(decision)
        done = self._executor.wait(decision.ticket)
        if done.lost:
            num_lost, total = sum(map(len, done.lost)), sum(len(pairs) for _, pairs in wanted)
            why = f": {done.errors[0]}" if done.errors else ""
            raise StoreError(f"{num_lost} of {total} blocks were not swapped{why}")


def _last_writes(src_to_dst: Any) -> NDArray[np.int64]:
    """Return the mapping as an array without repeated destinations.

    Two groups that share a cached block are swapped one after the other, and both copy it to the same place.
    """
    pairs = np.asarray(src_to_dst, np.int64)
    if not pairs.size:
        return np.empty((0, 2), np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise InvalidArgumentError(f"src_to_dst has shape {list(pairs.shape)}, must be [n, 2]")
    _, last = np.unique(pairs[::-1, 1], return_index=True)
    return pairs[::-1][last]
