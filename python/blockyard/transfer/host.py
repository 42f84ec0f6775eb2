"""The copy ops on CPU tensors.

Rows are moved by numpy and torch, run by run where runs are long and through a buffer that stays in the processor's
cache where they are short; large plans are shared among threads, which numpy lets run while it copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockyard.plan import Ids, merge_runs
from blockyard.transfer import checks
from blockyard.transfer.order import MoveOrder, order_moves

# From this size on, torch's copy with all threads is faster; below it, waiting for the threads costs more.
_PARALLEL_BYTES = 1 << 20
# From this size on, one call per run costs less than passing its bytes through a buffer.
_CALL_BYTES = 8 << 10
# And so it does when there are few.
_FEW_RUNS = 4
# Scattered rows pass through a buffer that stays in the processor's cache.
_SCRATCH_BYTES = 256 << 10
# Plans of more bytes are shared among threads.
_SHARE_BYTES = 8 << 20
# In an exchange, three calls a run, both pay off later: by these factors.
_EXCHANGE_CALLS, _EXCHANGE_SHARES = 4, 8
Bytes = NDArray[np.uint8]
Move = Callable[[Bytes, Bytes, Ids], None]


def _copy(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: Ids) -> None:
    """Move rows; none is both read and written."""
    if not len(pairs):
        return
    runs = merge_runs(pairs)
    for source, target in zip(src, dst, strict=True):
        run_bytes = source.shape[1] * len(pairs) // len(runs)
        if run_bytes >= _PARALLEL_BYTES:
            _move_long_runs(source, target, runs)
        elif run_bytes >= _CALL_BYTES or len(runs) <= _FEW_RUNS:
            _share(_move_runs, source.numpy(), target.numpy(), runs, run_bytes * len(runs))
        elif run_bytes:
            _share(_move_scattered, source.numpy(), target.numpy(), pairs, run_bytes * len(runs))


def _move(caches: Sequence[Tensor], pairs: Ids) -> None:
    order = order_moves(pairs)
    if np.isin(order.steps[:, 0], order.steps[:, 1]).any() or len(order.closing):
        for view in caches:
            _move_in_order(view.numpy(), order)
    else:
        _copy(caches, caches, order.steps)


def _exchange(caches: Sequence[Tensor], pairs: Ids) -> None:
    if not len(pairs):
        return
    for view in caches:
        _exchange_rows(view.numpy(), pairs)


def _share(move_part: Move, source: Bytes, target: Bytes, parts: Ids, num_bytes: int) -> None:
    """Let threads move the parts, each its own: more than there are threads, as some run late."""
    threads = _num_threads()
    if threads == 1 or num_bytes < _SHARE_BYTES:
        move_part(source, target, parts)
        return
    shares = [share for share in np.array_split(parts, 4 * threads) if len(share)]
    for finished in [_threads().submit(move_part, source, target, share) for share in shares]:
        finished.result()


def _num_threads() -> int:
    return torch.get_num_threads()


@cache
def _pool_of(_process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="blockyard-copy")


def _threads() -> ThreadPoolExecutor:
    # A forked process has the object but none of its threads.
    return _pool_of(os.getpid(), _num_threads())


def _move_long_runs(source: Tensor, target: Tensor, runs: Ids) -> None:
    for first, to, length in runs.tolist():
        target.narrow(0, to, length).copy_(source.narrow(0, first, length))


def _move_runs(source: Bytes, target: Bytes, runs: Ids) -> None:
    for first, to, length in runs.tolist():
        target[to : to + length] = source[first : first + length]


def _move_scattered(source: Bytes, target: Bytes, pairs: Ids) -> None:
    sources, targets = _items(source), _items(target)
    step = max(1, _SCRATCH_BYTES // source.shape[1])
    for start in range(0, len(pairs), step):
        part = pairs[start : start + step]
        targets[part[:, 1]] = sources[part[:, 0]]


def _items(rows: Bytes) -> NDArray[np.void]:
    """See each row as one item: numpy then takes and puts whole rows."""
    items: NDArray[np.void] = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    return items


def _move_in_order(rows: Bytes, order: MoveOrder) -> None:
    """Make moves that depend on one another, in one cache; no step may overtake an earlier one."""
    width = rows.shape[1]
    if not width:
        return
    # Rings have two rows or more: what is set aside is at most half of what moves, of one cache at a time.
    aside = rows[order.closing[:, 0]]
    runs = merge_runs(order.steps)
    if len(runs) and width * len(order.steps) // len(runs) >= _CALL_BYTES:
        # numpy copies a run that overlaps itself as if all of it were read first.
        _move_runs(rows, rows, runs)
    else:
        _move_scattered(rows, rows, order.steps)
    rows[order.closing[:, 1]] = aside


def _exchange_rows(rows: Bytes, pairs: Ids) -> None:
    width = rows.shape[1]
    runs = merge_runs(pairs)
    num_bytes = 2 * width * len(pairs)
    if width * len(pairs) // len(runs) >= _EXCHANGE_CALLS * _CALL_BYTES:
        _share(_exchange_runs, rows, rows, runs, num_bytes // _EXCHANGE_SHARES)
    elif width:
        _share(_exchange_scattered, rows, rows, pairs, num_bytes // _EXCHANGE_SHARES)


def _exchange_runs(rows: Bytes, _same: Bytes, runs: Ids) -> None:
    step = max(1, _SCRATCH_BYTES // rows.shape[1])
    scratch = np.empty((min(step, int(runs[:, 2].max())), rows.shape[1]), dtype=np.uint8)
    for first, second, length in runs.tolist():
        for at in range(0, length, step):
            count = min(step, length - at)
            one, other, kept = rows[first + at :][:count], rows[second + at :][:count], scratch[:count]
            kept[:] = one
            one[:] = other
            other[:] = kept


def _exchange_scattered(rows: Bytes, _same: Bytes, pairs: Ids) -> None:
    items = _items(rows)
    step = max(1, _SCRATCH_BYTES // (2 * rows.shape[1]))
    for start in range(0, len(pairs), step):
        part = pairs[start : start + step]
        items[part] = items[part[:, ::-1]]


ON_CPU = checks.CopyOps(_copy, _move, _exchange)
"""The implementations on the CPU."""
