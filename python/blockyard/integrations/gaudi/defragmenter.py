"""Defragmentation for an engine that keeps its own allocator: block ids stay, bytes move."""

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
from blockyard.scheduler import Goal
from blockyard.types import Fragmentation

RequestKey = str | tuple[str, int]
"""A request's id, or its id and generation, where one id may be submitted again before its end is reported."""

Blocks = Sequence[int] | NDArray[np.int64] | NDArray[np.int32]
_Table = TypeVar("_Table", NDArray[np.int64], NDArray[np.int32])
_AnyTable = NDArray[np.int64] | NDArray[np.int32]

_MOST_BLOCKS = 2**32 - 1
_MOST_BYTES = 2**64 - 1
_MOST_ITEMS = 2**24
_THRESHOLD = "VLLM_DEFRAG_THRESHOLD"

_log = logging.getLogger("defrag")


class DefragStats(NamedTuple):
    """What a defragmenter has done.

    Attributes:
        steps: calls of `defragment` that moved something.
        moves: blocks that were moved one way.
        exchanges: pairs of blocks that changed places.
        num_bytes: bytes written, all layers.
        gap: ids between the highest block in use and the highest there need be, now.
        seconds: spent in `defragment`, until its copies were handed over: on a GPU they may still run then.
    """

    steps: int
    moves: int
    exchanges: int
    num_bytes: int
    gap: int
    seconds: float


class OnlineDefragmenter:
    """Keeps the blocks in use at low places, whatever ids their allocator gives out.

    `resolve` maps the allocator's ids to the blocks that attention must read and write. At first an id is its own
    block. `defragment` exchanges blocks, so cached content stays with its id. Ids without content are bound to the
    lowest free block instead, and most steps need no move.
    One thread at a time.

    Args:
        threshold: starts when the highest block in use is more than this above the number in use. None: what the
            environment variable `VLLM_DEFRAG_THRESHOLD` says, or 32.
        margin: ids above the number in use that may stay, once started.
        enabled: if not, ids are blocks, and nothing is kept.
        graphed: pass the same tensors to `exchange`, padded to 8, 16, ... 512 pairs.
        prefix_caching: the allocator may find what is cached in freed ids. If it does not, all freed and new ids have
            no content; bytes that a connector loads into new ids must then come after `update_state`.
        max_moves: most moves a step; all that are needed by default.
        max_bytes: most bytes written a step, all layers; an exchange writes both of its blocks.
        goals: what to work for instead of what threshold and margin say, the most important first. `"contiguous"` is
            about all requests that run, the oldest first.
        negative: what `resolve` does with negative ids, the padding of block tables: refuse them or pass them on.
        exchange: see `BlockMover`; so for `move`, `wrap` and `mark_step`.

    Raises:
        InvalidArgumentError: a number is out of range, the environment variable is no number, `negative` is neither
            `"refuse"` nor `"pass"`, or there is no goal.

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
        limits = {"threshold": threshold, "margin": margin, "max_moves": max_moves or 0, "max_bytes": max_bytes or 0}
        for name, limit in limits.items():
            most = _MOST_BYTES if name == "max_bytes" else _MOST_BLOCKS
            if not isinstance(limit, int) or not 0 <= limit <= most:
                raise InvalidArgumentError(f"{name} is {limit!r}, must be an int, 0 to {most}")
        if goals is not None and not goals:
            raise InvalidArgumentError("there are no goals, wanted at least one: switch off with enabled=False")
        if negative not in {"refuse", "pass"}:
            raise InvalidArgumentError(f"negative is {negative!r}, must be 'refuse' or 'pass'")
        self.threshold = threshold
        self.margin = margin
        self.enabled = enabled
        self.graphed = graphed
        self.prefix_caching = prefix_caching
        self.max_moves, self.max_bytes = max_moves, max_bytes
        self.goals = goals
        self.mover: BlockMover | None = None
        self._passes = negative == "pass"
        self._exchange, self._move, self._wrap, self._mark_step = exchange, move, wrap, mark_step
        self._observer = BlockObserver()
        # Generations that are given here never repeat, so that a late report can name no later request.
        self._generations = count()
        self._requests: dict[str, dict[int, list[int]]] = {}
        self._steps = self._moves = self._exchanges = 0
        self._seconds = 0.0

    def initialize(self, kv_caches: Sequence[Tensor | Sequence[Tensor | None]], block_size: int) -> None:
        """Set the caches whose blocks are moved.

        Args:
            kv_caches: one entry a layer, `(keys, values)`, values None for MLA; the first dimension counts slots.
            block_size: slots of a block; 1 if the first dimension counts blocks.

        Raises:
            LayoutError: a block of a tensor is not contiguous, or the tensors have unequal numbers of blocks.
            InvalidArgumentError: ids beyond the tensors have been used already.
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
        """Report a step of the allocator: requests that ended before it, then the blocks that it gave out.

        Args:
            new_blocks: ids by request. An id and no generation means the request of that id that runs, or a new one.
            finished_reqs: without a generation, the oldest request of that id that runs. Unknown ones are ignored: they
                ended before they got blocks, or were released.
            fresh: ids of `new_blocks` without content; all, if there is no prefix caching.

        Raises:
            InvalidArgumentError: an id is out of range, or a generation is older than one that runs; nothing was
                changed.
        """
        if not self.enabled:
            return
        # The longest first, so that long runs of free blocks go to requests that fill them.
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
        """Take blocks from a request that has not ended: it was preempted, or they fell out of its window.

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
        """Mark ids that are not in use as empty: the allocator dropped their content.

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
            InvalidArgumentError: it is not held.
        """
        self._observer.end_lease(lease)

    def generation(self, request_id: str) -> int | None:
        """Give the newest generation of a request that runs, None if there is none."""
        return max(self._requests.get(request_id, ()), default=None)

    # ---- moving ----

    def defragment(self, *, hot: Iterable[RequestKey] = ()) -> int:
        """Move blocks towards the goals, if they are missed by enough.

        If moving the bytes fails, the state stays as it was.

        Args:
            hot: requests that run in the next step, as in `finished_reqs`: their blocks move last.

        Returns:
            Blocks that were moved.

        Raises:
            InvalidArgumentError: there is something to move, and no caches were given to `initialize`; or a goal is
                unknown or without meaning.
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
        """The highest block in use; None if the log does not show it, since finding it looks at all blocks."""
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
        """Blocks without references or leases, rising; without end before `initialize` is called."""
        yield from self._observer.holes().tolist()
        if self.mover is None:
            yield from count(len(self._observer))

    def stats(self) -> DefragStats:
        """Return the counters, and the present gap."""
        num_bytes = (self._moves + 2 * self._exchanges) * (self.mover.bytes_per_block if self.mover else 0)
        return DefragStats(self._steps, self._moves, self._exchanges, num_bytes, self._observer.gap, self._seconds)

    def fragmentation(self) -> Fragmentation:
        """Measure how scattered the blocks in use are, and those of the requests that run; looks at all blocks.

        The null block and blocks that are held in place are in use, too.
        """
        return self._observer.fragmentation(self._running())

    # ---- ids and blocks ----

    def resolve(self, block_id: int) -> int:
        """Give the block in which an id's bytes lie.

        Raises:
            InvalidArgumentError: the id is negative and those are refused, or out of range.
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
        """Give the blocks of whole block tables.

        Args:
            block_table_list: ids as rows of ints, or an int64 or int32 array of any shape.
            out: for arrays: of the same shape and dtype; may be the input itself.

        Returns:
            The same of blocks.

        Raises:
            InvalidArgumentError: an id is negative and those are refused, or out of range; `out` was not written.
        """
        if isinstance(block_table_list, np.ndarray):
            return self._resolve_array(block_table_list, out)
        if not self.enabled:
            return [list(row) for row in block_table_list]
        return self._observer.resolve_rows(block_table_list, pass_negative=self._passes)

    def unresolve(self, block_id: int) -> int:
        """Give the id whose bytes lie in a block.

        Raises:
            InvalidArgumentError: the block is out of range.
        """
        return self._observer.unresolve(block_id)

    @property
    def used_blocks(self) -> dict[int, int]:
        """Blocks in use and their references."""
        return {int(block): int(refs) for block, refs in self._observer.used()}

    def check(self) -> None:
        """Count everything again.

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
        """Running requests that these keys name, each once; the oldest where no generation is given."""
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
        """The request that new blocks belong to once the ended ones are gone."""
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
        raise InvalidArgumentError(f"{_THRESHOLD} is {text!r}, must be an int, 0 to {_MOST_BLOCKS}")
    return int(text)


def _listed(blocks: Blocks) -> list[int]:
    if isinstance(blocks, range) and len(blocks[: _MOST_ITEMS + 1]) > _MOST_ITEMS:
        raise InvalidArgumentError(f"blocks are {blocks!r}, must be at most {_MOST_ITEMS}")
    return blocks.tolist() if isinstance(blocks, np.ndarray) else list(blocks)


def _without(held: list[int], given: list[int], request: RequestKey) -> list[int]:
    """What a request has left."""
    kept = list(held)
    for block in given:
        if block not in kept:
            raise InvalidArgumentError(f"request {request!r} holds no block {block}")
        kept.remove(block)
    return kept
