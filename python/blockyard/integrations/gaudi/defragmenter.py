"""Defragmentation for an engine with its own allocator: block ids stay, bytes move."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Literal, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from blockyard.allocators import BlockObserver, MovePlan
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.gaudi.mover import BlockMover, Move, cache_views
from blockyard.layout.sizes import as_int
from blockyard.scheduler import Goal
from blockyard.types import Fragmentation

RequestKey = str | tuple[str, int]
"""A request's id, or its id and generation if an id may be submitted again before its end is reported."""

Blocks = Sequence[int] | NDArray[np.int64] | NDArray[np.int32]
_Table = TypeVar("_Table", NDArray[np.int64], NDArray[np.int32])
_AnyTable = NDArray[np.int64] | NDArray[np.int32]

_MAX_BLOCKS = 2**32 - 1
_MAX_BYTES = 2**64 - 1
_MAX_ITEMS = 2**24
_THRESHOLD = "VLLM_DEFRAG_THRESHOLD"

_log = logging.getLogger("defrag")


class DefragStats(NamedTuple):
    """Counters of a defragmenter.

    Attributes:
        steps: calls of `defragment` that moved blocks.
        moves: blocks moved one way.
        exchanges: pairs of blocks that were swapped.
        num_bytes: bytes written over all layers.
        gap: current distance between the highest block in use and the highest in a dense layout.
        seconds: time spent in `defragment` until its copies were queued; on a GPU they may still be running.
    """

    steps: int
    moves: int
    exchanges: int
    num_bytes: int
    gap: int
    seconds: float


class OnlineDefragmenter:
    """Keeps the blocks in use at low positions, whatever ids their allocator returns.

    `resolve` maps the allocator's ids to the blocks that attention must read and write. Initially each id maps to the
    block of that number. `defragment` swaps blocks, so cached content stays with its id. Ids without content are bound
    to the lowest free block instead, so most steps need no move. Not thread-safe.

    Args:
        threshold: start when the highest block in use exceeds the number of blocks in use by more than this. None: the
            environment variable `VLLM_DEFRAG_THRESHOLD`, or 32.
        margin: how far above the number in use blocks may stay, once started.
        enabled: if false, ids are blocks, and no state is kept.
        graphed: always pass the same tensors to `exchange`, padded to 8, 16, ... 512 pairs.
        prefix_caching: whether freed ids may keep cached content. If not, freed and new ids have no content; bytes that
            a connector loads into new ids must then arrive after `update_state`.
        max_moves: maximum number of moves per step; unlimited by default.
        max_bytes: maximum number of bytes written per step over all layers; an exchange writes both of its blocks.
        goals: goals that replace threshold and margin, most important first. `"contiguous"` applies to all running
            requests, oldest first.
        negative: what `resolve` does with negative ids, the padding of block tables: `"refuse"` or `"pass"` them on.
        exchange: see `BlockMover`, also for `move`, `wrap` and `mark_step`.

    Raises:
        InvalidArgumentError: a number is out of range, the environment variable is not a number, `negative` is neither
            `"refuse"` nor `"pass"`, or `goals` is empty.

    Source: vllm-gaudi `extension/defragmentation.py`, OnlineDefragmenter, whose names these are.
    """

    def __init__(
        self,
        *,
        threshold: int | None = None,
        margin: int = 0,
        enabled: bool = True,
        graphed: bool = False,
        prefix_caching: bool = True,
        max_moves: int | None = None,
        max_bytes: int | None = None,
        goals: Sequence[Goal] | None = None,
        negative: Literal["refuse", "pass"] = "refuse",
        exchange: Move | None = None,
        move: Move | None = None,
        wrap: Callable[[Move], Move] | None = None,
        mark_step: Callable[[], object] | None = None,
    ) -> None:
        threshold = _threshold() if threshold is None else threshold
        self.threshold, self.margin = _limit("threshold", threshold), _limit("margin", margin)
        self.max_moves = None if max_moves is None else _limit("max_moves", max_moves)
        self.max_bytes = None if max_bytes is None else _limit("max_bytes", max_bytes, _MAX_BYTES)
        if goals is not None and not goals:
            raise InvalidArgumentError("there are no goals, must be at least one: switch off with enabled=False")
        if negative not in {"refuse", "pass"}:
            raise InvalidArgumentError(f"negative is {negative!r}, must be 'refuse' or 'pass'")
        self.enabled = enabled
        self.graphed = graphed
        self.prefix_caching = prefix_caching
        self.goals = goals
        self.mover: BlockMover | None = None
        self._passes = negative == "pass"
        self._exchange, self._move, self._wrap, self._mark_step = exchange, move, wrap, mark_step
        self._observer = BlockObserver()
        # Generations assigned here never repeat, so that a late report cannot refer to a later request.
        self._generations = count()
        self._requests: dict[str, dict[int, list[int]]] = {}
        self._steps = self._moves = self._exchanges = 0
        self._seconds = 0.0

    def initialize(self, kv_caches: Sequence[Tensor | Sequence[Tensor | None]], block_size: int) -> None:
        """Set the caches whose blocks will be moved.

        Args:
            kv_caches: one entry per layer, `(keys, values)`, values None for MLA; the first dimension counts slots.
            block_size: slots in a block; 1 if the first dimension counts blocks.

        Raises:
            LayoutError: a block of a tensor is not contiguous, or the tensors have unequal numbers of blocks.
            InvalidArgumentError: ids beyond the tensors are already in use.
        """
        views = cache_views(kv_caches, block_size)
        mover = BlockMover(
            views,
            exchange=self._exchange,
            move=self._move,
            graphed=self.graphed,
            wrap=self._wrap,
            mark_step=self._mark_step,
        )
        self._observer.set_limit(mover.num_blocks)
        self.mover = mover
        _log.debug("initialized with %d blocks of %d bytes", mover.num_blocks, mover.bytes_per_block)

    # ---- what the engine reports ----

    def update_state(
        self,
        new_blocks: Mapping[RequestKey, Blocks],
        finished_reqs: Iterable[RequestKey],
        *,
        fresh: Collection[int] | None = None,
    ) -> None:
        """Report a step of the allocator: requests that ended before it, then the blocks that it allocated.

        Args:
            new_blocks: block ids by request. A key without generation means the running request of that id, or a new
                one.
            finished_reqs: a key without generation means the oldest running request of that id. Unknown ones are
                ignored: they ended before they got blocks, or were released.
            fresh: ids of `new_blocks` without content; all of them without prefix caching.

        Raises:
            InvalidArgumentError: an id is out of range, or a generation is older than a running one; nothing was
                changed.
        """
        if not self.enabled:
            return
        # Longest first, so that long runs of free blocks go to requests that fill them.
        longest = sorted(new_blocks.items(), key=lambda item: len(item[1]), reverse=True)
        given = {key: _listed(blocks) for key, blocks in longest if len(blocks)}
        ids = list(chain.from_iterable(given.values()))
        self._check_ids(ids)
        ended = self._named(finished_reqs)
        ended_set = set(ended)
        targets = {key: self._target(key, ended_set) for key in given}
        self._observer.release_ids(
            list(chain.from_iterable(self._requests[name][generation] for name, generation in ended)),
            fresh=not self.prefix_caching,
        )
        for name, generation in ended:
            self._forget(name, generation)
        without_content = (fresh or ()) if self.prefix_caching else ids
        if not isinstance(without_content, range):
            without_content = set(without_content)
        self._observer.use_ids([b for b in ids if b not in without_content])
        self._observer.use_ids([b for b in ids if b in without_content], fresh=True)
        for key, blocks in given.items():
            name, generation = targets[key]
            self._requests.setdefault(name, {}).setdefault(generation, []).extend(blocks)
        if ids or ended:
            _log.debug("%d new blocks, %d requests finished", len(ids), len(ended))

    def release(self, request: RequestKey, blocks: Blocks | None = None) -> None:
        """Take blocks from a running request: it was preempted, or they left its window.

        Args:
            request: as in `finished_reqs`.
            blocks: ids; None means all.

        Raises:
            InvalidArgumentError: the request is unknown, or does not have such a block; nothing was changed.
        """
        if not self.enabled:
            return
        found = self._named([request])
        if not found:
            raise InvalidArgumentError(f"request {request!r} holds no blocks")
        name, generation = found[0]
        held = self._requests[name][generation]
        given = held if blocks is None else _listed(blocks)
        kept = [] if blocks is None else _without(held, given, request)
        self._observer.release_ids(given, fresh=not self.prefix_caching)
        if kept:
            self._requests[name][generation] = kept
        else:
            self._forget(name, generation)

    def forget(self, blocks: Blocks) -> None:
        """Mark unused ids as empty: the allocator dropped their content.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """
        self._observer.forget_ids(blocks)

    def lease(self, blocks: Blocks) -> int:
        """Keep the bytes of ids in place for a reader such as a connector, even after their request has ended.

        Returns:
            A number for `end_lease`.

        Raises:
            InvalidArgumentError: an id is out of range; nothing was changed.
        """
        return self._observer.lease(blocks)

    def end_lease(self, lease: int) -> None:
        """End a lease.

        Raises:
            InvalidArgumentError: the lease is not held.
        """
        self._observer.end_lease(lease)

    def generation(self, request_id: str) -> int | None:
        """Return the newest generation of a running request; None if there is none."""
        return max(self._requests.get(request_id, ()), default=None)

    # ---- moving ----

    def defragment(self, *, hot: Iterable[RequestKey] = ()) -> int:
        """Move blocks towards the goals, if they are missed by more than the threshold.

        If moving the bytes fails, the state is unchanged.

        Args:
            hot: requests of the next step, as in `finished_reqs`: their blocks move last.

        Returns:
            The number of blocks moved.

        Raises:
            InvalidArgumentError: blocks must move but `initialize` was not called; or a goal is unknown or meaningless.
        """
        if not self.enabled:
            return 0
        begin = time.perf_counter()
        plan = self._plan(hot)
        if len(plan):
            if self.mover is None:
                raise InvalidArgumentError(f"{len(plan)} blocks should move: call initialize with the caches first")
            move, exchange, highest = plan.move, plan.exchange, self._highest_for_log()
            self.mover.exchange(exchange)
            self.mover.move(move)
            self._observer.commit(plan)
            self._steps += 1
            self._moves += len(move)
            self._exchanges += len(exchange)
            if highest is not None:
                _log.debug(
                    "highest block in use was %d, is %s: %d moved, %d exchanged",
                    highest,
                    self._highest_for_log(),
                    len(move),
                    len(exchange),
                )
        self._seconds += time.perf_counter() - begin
        return len(plan)

    def _highest_for_log(self) -> int | None:
        """Return the highest block in use; None if debug logging is off, since finding it scans all blocks."""
        if not _log.isEnabledFor(logging.DEBUG):
            return None
        return int(self._observer.used()[:, 0].max(initial=0))

    def _plan(self, hot: Iterable[RequestKey]) -> MovePlan:
        goals = self.goals or [("dense", self.margin, max(self.threshold - self.margin, 0))]
        wants_runs = any(goal[0] == "contiguous" for goal in goals)
        running = self._running() if wants_runs else None
        hot_ids = [b for name, generation in self._named(hot) for b in self._requests[name][generation]]
        return self._observer.plan_all(
            goals,
            sequences=running,
            hot=hot_ids or None,
            moves=self.max_moves,
            num_bytes=self.max_bytes,
            bytes_per_block=self.mover.bytes_per_block if self.mover is not None else 1,
        )

    def free_blocks(self) -> Iterator[int]:
        """Iterate over blocks without references or leases, ascending; unbounded before `initialize` is called."""
        yield from self._observer.holes().tolist()
        if self.mover is None:
            yield from count(len(self._observer))

    def stats(self) -> DefragStats:
        """Return the counters and the current gap."""
        num_bytes = (self._moves + 2 * self._exchanges) * (self.mover.bytes_per_block if self.mover else 0)
        return DefragStats(self._steps, self._moves, self._exchanges, num_bytes, self._observer.gap, self._seconds)

    def fragmentation(self) -> Fragmentation:
        """Measure how scattered the blocks in use are, and those of running requests; scans all blocks.

        The null block and leased blocks count as in use.
        """
        return self._observer.fragmentation(self._running())

    # ---- ids and blocks ----

    def resolve(self, block_id: int) -> int:
        """Return the block that holds an id's bytes.

        Raises:
            InvalidArgumentError: the id is out of range, or negative and refused.
        """
        return self.resolve_all([[block_id]])[0][0]

    @overload
    def resolve_all(self, block_table_list: list[list[int]]) -> list[list[int]]: ...
    @overload
    def resolve_all(self, block_table_list: _Table, *, out: _Table | None = None) -> _Table: ...

    def resolve_all(
        self,
        block_table_list: list[list[int]] | _AnyTable,
        *,
        out: _AnyTable | None = None,
    ) -> list[list[int]] | _AnyTable:
        """Return the blocks of whole block tables.

        Args:
            block_table_list: ids as rows of ints, or an int64 or int32 array of any shape.
            out: for arrays: output of the same shape and dtype; may be the input itself.

        Returns:
            The same structure with blocks instead of ids.

        Raises:
            InvalidArgumentError: an id is out of range, or negative and refused; `out` was not written.
        """
        if isinstance(block_table_list, np.ndarray):
            return self._resolve_array(block_table_list, out)
        if not self.enabled:
            return [list(row) for row in block_table_list]
        return self._observer.resolve_rows(block_table_list, pass_negative=self._passes)

    def unresolve(self, block_id: int) -> int:
        """Return the id whose bytes a block holds.

        Raises:
            InvalidArgumentError: the block is out of range.
        """
        return self._observer.unresolve(block_id)

    @property
    def used_blocks(self) -> dict[int, int]:
        """Return the blocks in use and their reference counts."""
        return {int(block): int(refs) for block, refs in self._observer.used()}

    def check(self) -> None:
        """Recount everything.

        Raises:
            InvariantError: the state contradicts itself, which is a bug in Blockyard.
        """
        self._observer.check()

    def _resolve_array(self, table: _AnyTable, out: _AnyTable | None) -> _AnyTable:
        if self.enabled:
            return self._observer.resolve(table, out=out, pass_negative=self._passes)
        found = np.empty_like(table) if out is None else out
        found[...] = table
        return found

    # ---- requests ----

    def _check_ids(self, ids: list[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._observer.limit):
            wrong = next(b for b in ids if not 0 <= b < self._observer.limit)
            raise InvalidArgumentError(f"block is {wrong}, must be 0 to {self._observer.limit - 1}")

    def _running(self) -> list[list[int]]:
        return [ids for generations in self._requests.values() for ids in generations.values()]

    def _named(self, requests: Iterable[RequestKey]) -> list[tuple[str, int]]:
        """Return the distinct running requests for these keys; the oldest for a key without generation."""
        named: dict[tuple[str, int], None] = {}
        for key in requests:
            if isinstance(key, tuple) and len(key) == 2:
                name, generation = key
                if generation in self._requests.get(name, ()):
                    named[name, generation] = None
            elif not isinstance(key, str):
                raise InvalidArgumentError(f"request is {key!r}, must be an id or (id, generation)")
            elif running := [g for g in self._requests.get(key, ()) if (key, g) not in named]:
                named[key, min(running)] = None
        return list(named)

    def _target(self, key: RequestKey, ended: Collection[tuple[str, int]]) -> tuple[str, int]:
        """Return the request that new blocks belong to once the ended ones are gone."""
        name, generation = key if isinstance(key, tuple) else (key, None)
        running = [g for g in self._requests.get(name, ()) if (name, g) not in ended]
        if generation is None:
            return name, max(running) if running else next(self._generations)
        if generation not in running and running and generation < max(running):
            raise InvalidArgumentError(
                f"request {name!r} runs in generation {max(running)}, blocks are for {generation}"
            )
        return name, generation

    def _forget(self, name: str, generation: int) -> None:
        found = self._requests[name]
        del found[generation]
        if not found:
            del self._requests[name]


def _threshold() -> int:
    text = os.environ.get(_THRESHOLD, "32")
    if not text.isdecimal():
        raise InvalidArgumentError(f"{_THRESHOLD} is {text!r}, must be an int, 0 to {_MAX_BLOCKS}")
    return int(text)


def _limit(name: str, limit: int, maximum: int = _MAX_BLOCKS) -> int:
    number = as_int(name, limit)
    if not 0 <= number <= maximum:
        raise InvalidArgumentError(f"{name} is {limit!r}, must be an int, 0 to {maximum}")
    return number


def _listed(blocks: Blocks) -> list[int]:
    if isinstance(blocks, range) and len(blocks[: _MAX_ITEMS + 1]) > _MAX_ITEMS:
        raise InvalidArgumentError(f"blocks is {blocks!r}, must have at most {_MAX_ITEMS} ids")
    return blocks.tolist() if isinstance(blocks, np.ndarray) else list(blocks)


def _without(held: list[int], given: list[int], request: RequestKey) -> list[int]:
    """Return a request's remaining blocks."""
    kept = list(held)
    for block in given:
        if block not in kept:
            raise InvalidArgumentError(f"request {request!r} holds no block {block}")
        kept.remove(block)
    return kept
