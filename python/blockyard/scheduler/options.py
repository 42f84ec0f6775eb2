"""Options of a scheduler, how many blocks its sequences need, and which requests fit its device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import le
from typing import Final, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import AllocStatus, BlockManager, Fit
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, StepOrderError
from blockyard.layout.sizes import as_float, as_int, set_ints
from blockyard.scheduler.loop import Cache, LoopedScheduler
from blockyard.scheduler.request import RequestState
from blockyard.scheduler.rows import LENGTH, SequenceRows
from blockyard.types import DefragReport
from blockyard.workers.ownership import Claims

__all__ = [
    "PREEMPTION_MODES",
    "BlockNeeds",
    "DefragPolicy",
    "Goal",
    "PreemptionCosts",
    "PreemptionMode",
    "check_options",
    "lack_of_room",
]

PreemptionMode: TypeAlias = Literal["auto", "swap", "recompute"]
"""What happens to the blocks of a preempted request; see `Scheduler`."""

PREEMPTION_MODES: Final = ("auto", "swap", "recompute")
"""All values of `PreemptionMode`."""

_log = logging.getLogger("blockyard.scheduler")
_schedulers = Claims()


@dataclass(frozen=True)
class PreemptionCosts:
    """The costs of bringing a preempted sequence back. Each victim is swapped or recomputed, whichever is cheaper.

    Args:
        swap_block: seconds to load a block from the host.
        prefill_token: seconds to compute a token of a prompt.

    Raises:
        InvalidArgumentError: a number is negative or not finite.

    Example:
        >>> from blockyard import BlockManager, Scheduler
        >>> from blockyard.scheduler import PreemptionCosts
        >>> costs = PreemptionCosts(swap_block=80e-6, prefill_token=40e-6)
        >>> manager = BlockManager(block_size=16, device_blocks=64, host_blocks=64)
        >>> scheduler = Scheduler(manager, preemption_mode=costs)
    """

    swap_block: float
    prefill_token: float

    def __post_init__(self) -> None:
        for name, value in (("swap_block", self.swap_block), ("prefill_token", self.prefill_token)):
            if not 0 <= as_float(name, value) < inf:
                raise InvalidArgumentError(f"{name} is {value}, must be at least 0 seconds")


GoalName = Literal["max_id", "free_tail", "dense", "contiguous"]
Goal = tuple[GoalName, int] | tuple[GoalName, int, int]
"""A goal's name and number, and optionally the tolerance before anything moves; see `manager.defrag.run`."""


@dataclass(frozen=True)
class DefragPolicy:
    """Defragmentation of the device pool: block moves that are decided together with each step.

    Args:
        goals: most important first. `("free_tail", 0)` keeps the tail that a shrinking pool gives back free of blocks,
            `("dense", n)` packs all blocks as low as possible; see `manager.defrag.run`. With several
            page classes, only `("extents", n)`: while the first waiting prompt lacks blocks of a class although there
            are enough bytes, extents of other classes are emptied for it, and `n` more; while the arena shrinks, blocks
            leave the extents beyond its end.
        max_moves: maximum number of blocks to move per step, at least one.
        max_bytes: maximum number of bytes to write per step; None for no limit.
        block_bytes: bytes of a block over all layers; required with `max_bytes`, but for `"extents"`.
        cached: whether cached blocks in the way are moved, dropped, or swapped with the moving blocks.

    Raises:
        InvalidArgumentError: there is no goal, a goal is unknown or malformed, or a number is out of range.

    Example:
        >>> from blockyard import BlockManager
        >>> from blockyard.scheduler import DefragPolicy, Scheduler
        >>> manager = BlockManager(block_size=16, device_blocks=64)
        >>> scheduler = Scheduler(manager, defragment=DefragPolicy([("free_tail", 0), ("dense", 8)], max_moves=32))
    """

    goals: Sequence[Goal | tuple[Literal["extents"], int]]
    max_moves: int = 64
    max_bytes: int | None = None
    block_bytes: int | None = None
    cached: Literal["move", "drop", "exchange"] = "move"

    def __post_init__(self) -> None:
        """Make the goals immutable, and raise now what the manager would raise in the middle of a step."""
        object.__setattr__(self, "goals", tuple(self.goals))
        if not self.goals:
            raise InvalidArgumentError("there are no goals, must be at least one")
        set_ints(self, "max_moves", "max_bytes", "block_bytes")
        for name in ("max_moves", "max_bytes", "block_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} is {value}, must be at least 1")
        if self.is_for_extents:
            self._check_extents()
        else:
            self.plan(BlockManager(block_size=1, device_blocks=1))

    @property
    def is_for_extents(self) -> bool:
        """Whether a goal is `"extents"`."""
        return any(goal[0] == "extents" for goal in self.goals)

    def _check_extents(self) -> None:
        ((_, *numbers),) = self.goals if len(self.goals) == 1 else [("", -1)]
        if len(numbers) != 1 or as_int("number", numbers[0]) < 0:
            raise InvalidArgumentError(f'goals are {self.goals}, must be [("extents", n)] alone, n at least 0')
        if self.block_bytes is not None or self.cached != "move":
            raise InvalidArgumentError('the goal is "extents", must be without block_bytes and cached')

    def plan(self, manager: BlockManager, fit: Fit | None = None) -> DefragReport:
        """Decide this step's moves, as part of the manager's next decision.

        Args:
            manager: the manager.
            fit: for `"extents"`, why a prompt does not fit yet.
        """
        if self.is_for_extents:
            number, wanted = as_int("number", self.goals[0][1]), None if fit is None else fit.wanted
            return manager.defrag.run(
                "extents", number, wanted=wanted, max_moves=self.max_moves, max_bytes=self.max_bytes
            )
        return manager.defrag.run(
            cast("Sequence[Goal]", self.goals),
            max_moves=self.max_moves,
            max_bytes=self.max_bytes,
            block_bytes=self.block_bytes,
            cached=self.cached,
        )


HELD: Final = 2
"""In `Pool.uses`: only transfers or pins hold the block."""


class BlockNeeds:
    """Device memory that sequences need: the one count of `add` and of admission.

    It is counted in bytes of blocks, as in `Fit.bytes`, since the blocks of page classes differ. Where blocks have no
    bytes, these are numbers of blocks.

    Args:
        manager: the manager.
        max_num_batched_tokens: maximum number of tokens that a step computes of a prompt.

    Attributes:
        groups: the cache groups.
        sizes: tokens and bytes of a block of each group.
        has_classes: whether there are several page classes: enough bytes may still lack blocks of one class.
        is_full: whether a sequence keeps all of its blocks in every group.
        has_states: whether a group is recurrent.
        keeps_states: whether chunks end where a recurrent state gets cached, see `BlockManager.next_chunk`.
        max_chunk: the maximum, as given.
    """

    def __init__(self, manager: BlockManager, max_num_batched_tokens: int) -> None:
        self._manager, self._size, self.max_chunk = manager, manager.block_size, max_num_batched_tokens
        self.groups = manager.groups
        self._pools = [manager.pool("device", number) for number in range(manager.num_page_classes)]
        self.has_classes = len(self._pools) > 1
        strides = {pool.block_bytes: pool.block_stride or pool.block_bytes for pool in self._pools}
        bytes_of = [pool.block_stride or pool.block_bytes for pool in self._pools]
        # The blocks of one class fill an arena; those of all classes a fixed split.
        self._shares = list(zip(self._pools, bytes_of, strict=True))[: None if self._pools[0].per_extent is None else 1]
        pages = [pool.block_bytes for pool in self._pools]
        self._classes = [pages.index(group.block_bytes or 1) for group in self.groups]
        self.sizes = [(group.block_tokens or self._size, strides[group.block_bytes or 1]) for group in self.groups]
        self._only = self.sizes[0] if len(self.sizes) == 1 else None  # as in most managers
        each = zip(self.groups, self.sizes, strict=True)
        self._kept = [size for group, size in each if group.kind == "full_attention"]
        kinds = {group.kind for group in self.groups}
        self.is_full = kinds == {"full_attention"}
        self._has_nulls = not kinds <= {"full_attention", "drafter"}
        self._nulls = self._has_nulls * (self._pools[0].per_extent or 1)
        self.has_states = "recurrent" in kinds
        self.keeps_states = self.has_states and manager.prefix.enabled

    def all(self, tokens: int) -> int:
        """Bytes of the first `tokens` tokens in all groups, if none gave any back."""
        if self._only is not None:
            size, num_bytes = self._only
            return -(-tokens // size) * num_bytes
        return sum(-(-tokens // size) * num_bytes for size, num_bytes in self.sizes)

    def shared(self, tokens: int) -> int:
        """Bytes of the blocks of the first `tokens` tokens that all sequences of a request use to their ends."""
        return sum(tokens // size * num_bytes for size, num_bytes in self._kept)

    def peak(self, tokens: int, chunk: int) -> int:
        """Maximum bytes that a sequence of `tokens` tokens holds at once, computed in chunks from its first token."""
        if self.is_full:
            return self.all(tokens)
        return self._manager.can_allocate(tokens, chunk_tokens=min(chunk, tokens)).bytes

    def lacks_blocks(self, state: RequestState) -> bool:
        """Whether a request lacks blocks of a page class at its end although there are enough bytes.

        Sequences that run at once may each leave the last extent of a class filled in part.
        """
        if not self.has_classes:
            return False
        if state.left > 1:
            return not self._has_blocks(self._to_end_by_class(state))
        # With their ids, prompts keep states at resume points.
        given = state.prompt if self._manager.prefix.enabled else len(state.prompt)
        fit = self._manager.can_allocate(given, chunk_tokens=1, max_tokens=state.limit - len(state.prompt))
        return fit.status == AllocStatus.NEVER

    def _to_end_by_class(self, state: RequestState) -> list[int]:
        """Blocks of each class that `to_end` counts."""
        wanted = self._manager.can_allocate(state.limit, chunk_tokens=1).wanted
        counts = [state.left * count for count in wanted[: len(self._pools)]]
        for group, (size, _), number in zip(self.groups, self.sizes, self._classes, strict=True):
            if group.kind == "full_attention":
                counts[number] -= (state.left - 1) * ((len(state.prompt) - 1) // size)
        return counts

    def _has_blocks(self, counts: list[int]) -> bool:
        """Whether an empty device has these blocks of each class for sequences."""
        most = [pool.num_blocks - pool.reserved - self._nulls for pool in self._pools]
        if (of_first := self._pools[0].per_extent) is None:
            return all(map(le, counts, most))
        extents = sum(-(-count // (pool.per_extent or 1)) for count, pool in zip(counts, self._pools, strict=True))
        return extents * of_first <= most[0]

    def rest(self, tokens: int, done: int) -> int:
        """Maximum bytes that it takes in addition to those of its first `done` tokens."""
        rest = self.all(tokens) - self.all(done)
        return rest if self.is_full or not rest else min(rest, self.peak(tokens, self.max_chunk))

    def to_end(self, state: RequestState) -> int:
        """Bytes without which the unfinished sequences of a request cannot run to their ends at once.

        They share the prompt's full blocks in groups with full attention; each keeps its own windows and states. A
        prompt that needs more because a step computes much of it is computed in smaller chunks.
        """
        peak, count = self.peak(state.limit, 1), state.left
        return peak if count == 1 else count * peak - (count - 1) * self.shared(len(state.prompt) - 1)

    def total(self) -> int:
        """Bytes of all device blocks."""
        return sum(pool.num_blocks * num_bytes for pool, num_bytes in self._shares)

    def blocks(self) -> list[int]:
        """Device blocks of each page class."""
        return [pool.num_blocks for pool in self._pools]

    def usable(self) -> int:
        """Bytes of device blocks that sequences may use: all but null blocks, or their extent, and the watermark."""
        each = self._shares
        return sum((pool.num_blocks - pool.reserved - self._nulls) * num_bytes for pool, num_bytes in each)

    def free(self, owed: int) -> int:
        """Bytes that are available to new sequences once others take those that they are owed.

        Blocks held only by writes to a store count if there are too few without them.
        """
        blocks = min(owed, self.total()) // self.sizes[0][1]
        return self._manager.can_allocate(blocks * self._size).free_bytes

    def held_by(self, handles: list[int]) -> dict[tuple[int, int], int]:
        """Return the blocks of sequences by page class and id, with their bytes."""
        found: dict[tuple[int, int], int] = {}
        for number, ((_, num_bytes), group) in enumerate(zip(self.sizes, self.groups, strict=True)):
            page = group.block_bytes or 1
            for handle in handles:
                found |= dict.fromkeys(((page, block) for block in self._blocks(handle, number)), num_bytes)
        return found

    def _blocks(self, handle: int, group: int) -> list[int]:
        blocks: list[int] = self._manager.block_table(handle, group).tolist()
        return [block for block in blocks if block or not self._has_nulls]

    def in_flight(self) -> int:
        """Bytes of blocks that only transfers or pins hold."""
        held = [int(np.count_nonzero(pool.uses() == HELD)) for pool in self._pools]
        if not any(held):
            return 0
        held[0] -= self._manager.stats().pinned_blocks["device"] + self._manager.prefix.store_jobs.num_leased
        each = [pool.block_stride or pool.block_bytes for pool in self._pools]
        return max(0, sum(count * num_bytes for count, num_bytes in zip(held, each, strict=True)))


def manager_of(cache: object, executor: object) -> BlockManager:
    """Return the manager of a scheduler's `cache`, a `KVCache` or a `BlockManager`.

    Raises:
        InvalidArgumentError: it is neither, or the executor does not fit it.
        BlockyardError: the cache is closed.
    """
    if isinstance(cache, BlockManager):
        if executor is not None:
            raise InvalidArgumentError("executor is given with a BlockManager, needs a KVCache as the first argument")
        return cache
    if not isinstance(cache, Cache):
        raise InvalidArgumentError(f"cache is {cache!r:.100}, must be a KVCache or a BlockManager")
    cache.give_back()  # raises if the cache is closed
    if executor is not None:
        _check_executor(executor, cache.manager)
    return cache.manager


def _check_executor(executor: object, manager: BlockManager) -> None:
    if not callable(getattr(executor, "collect", None)):
        raise InvalidArgumentError(f"executor is {executor!r:.100}, must be an Executor")
    # Other executors have no engine in this process.
    parts = getattr(executor, "executors", (executor,))
    for engine in [part.engine for part in parts if hasattr(part, "engine")]:
        for tier in ("device", "host"):
            found, wanted = engine.num_blocks(tier), manager.pool(tier).num_blocks
            if found < wanted:
                raise InvalidArgumentError(f"executor has {found} {tier} blocks, must have {wanted} as the cache")


def take_over(scheduler: LoopedScheduler, manager: BlockManager) -> None:
    """Make a scheduler its manager's only one.

    Raises:
        InvalidArgumentError: an earlier one has unfinished requests.
    """
    other = cast("LoopedScheduler | None", _schedulers.user(manager))
    if other is not None and other.num_unfinished:
        raise InvalidArgumentError(
            f"cache has a Scheduler with {other.num_unfinished} unfinished requests, must have one at a time"
        )
    _schedulers.hand_over(manager, scheduler)


def check_current(scheduler: LoopedScheduler) -> None:
    """Check that no other scheduler has taken over the manager.

    Raises:
        StepOrderError: one has.
    """
    if _schedulers.user(scheduler.manager) is not scheduler:
        raise StepOrderError("another Scheduler was created over this one's cache: add requests to that one")


def check_options(
    manager: BlockManager,
    preemption_mode: PreemptionMode | PreemptionCosts,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_lookahead_tokens: int,
    max_overtakes: int,
) -> tuple[int, int, int, int]:
    """Check the options of a `Scheduler` over a manager. Returns its four numbers as ints.

    Raises:
        InvalidArgumentError: a limit is not positive, a number is negative, the mode is unknown, or a cache group has
            cross attention.
    """
    max_num_seqs = as_int("max_num_seqs", max_num_seqs)
    max_num_batched_tokens = as_int("max_num_batched_tokens", max_num_batched_tokens)
    num_lookahead_tokens = as_int("num_lookahead_tokens", num_lookahead_tokens)
    max_overtakes = as_int("max_overtakes", max_overtakes)
    if max_overtakes < 0:
        raise InvalidArgumentError(f"max_overtakes is {max_overtakes}, must be at least 0")
    if max_num_seqs < 1 or max_num_batched_tokens < 1:
        raise InvalidArgumentError(
            f"max_num_seqs is {max_num_seqs}, max_num_batched_tokens {max_num_batched_tokens}, must be at least 1"
        )
    if not isinstance(preemption_mode, PreemptionCosts) and preemption_mode not in PREEMPTION_MODES:
        raise InvalidArgumentError(f"preemption_mode is {preemption_mode!r}, must be one of {PREEMPTION_MODES}")
    kinds = [group.kind for group in manager.groups]
    if "cross_attention" in kinds:
        raise InvalidArgumentError(f"the manager's cache groups are {kinds}, must be without cross_attention")
    if num_lookahead_tokens < 0:
        raise InvalidArgumentError(f"num_lookahead_tokens is {num_lookahead_tokens}, must be at least 0")
    _warn_of_unused(manager, preemption_mode)
    return max_num_seqs, max_num_batched_tokens, num_lookahead_tokens, max_overtakes


def check_defragment(manager: BlockManager, policy: DefragPolicy | None) -> None:
    """Check that a manager has what a policy's goals are about.

    Raises:
        InvalidArgumentError: it has not.
    """
    if policy is None:
        return
    number, has_extents = manager.num_page_classes, manager.pool().per_extent is not None
    if number == 1 if policy.is_for_extents else number > 1:
        must = '[("extents", n)] with several page classes, and only then'
        raise InvalidArgumentError(f"the goals of defragment are {policy.goals}, must be {must}")
    if policy.is_for_extents and not has_extents:
        raise InvalidArgumentError("the manager has a fixed split, defragment needs an Arena of extents")


def _warn_of_unused(manager: BlockManager, mode: PreemptionMode | PreemptionCosts) -> None:
    """Warn if victims cannot be swapped although the mode says so, or if a tier is there for nothing."""
    blocks = {tier: manager.pool(tier).num_blocks for tier in ("host", "external")}
    unused = []
    if mode not in {"auto", "recompute"} and not any(blocks.values()):
        unused = ["there is no tier to swap to, so victims are recomputed: give the cache host_blocks or a swap_store"]
    elif mode == "recompute":
        if manager.prefix.enabled:
            del blocks["host"]  # may hold copies of cached blocks
        unused = [
            f"the {count} {tier} blocks serve swaps only: give 'auto' or 'swap', or leave them out"
            for tier, count in blocks.items()
            if count
        ]
    for why in unused:
        _log.warning("preemption_mode is %r, but %s", mode, why)


def swaps(
    mode: PreemptionMode | PreemptionCosts, rows: SequenceRows, gone: NDArray[np.int64], needs: BlockNeeds
) -> bool:
    """Return whether the sequences of preempted rows are swapped if there is room; else they are recomputed."""
    if isinstance(mode, PreemptionCosts):
        tokens = rows.fields[LENGTH, gone].tolist()
        blocks = sum(needs.peak(count, 1) for count in tokens) / needs.sizes[0][1]
        return bool(blocks * mode.swap_block <= sum(tokens) * mode.prefill_token)
    return len(gone) > 1 if mode == "auto" else mode == "swap"


def lookahead_of_step(wanted: int | None, maximum: int) -> int:
    """Return the draft tokens per sequence of one step; `maximum` is the scheduler's maximum.

    Raises:
        InvalidArgumentError: `wanted` is out of range.
    """
    if wanted is None:
        return maximum
    number = as_int("num_lookahead_tokens", wanted)
    if not 0 <= number <= maximum:
        raise InvalidArgumentError(f"num_lookahead_tokens is {wanted}, must be from 0 to the scheduler's {maximum}")
    return number


def lack_of_room(needs: BlockNeeds, state: RequestState) -> OutOfBlocksError | None:
    """Return why a request could never finish, as an error to raise; None if it can."""
    wanted, room = needs.to_end(state), needs.usable()
    if wanted <= room and not needs.lacks_blocks(state):
        return None
    total, first, request = needs.total(), needs.sizes[0][1], state.request.request_id
    if needs.has_classes:
        message = f"request {request!r} needs up to {wanted} bytes of device blocks, there are {room} for it"
        if wanted <= room:
            message = f"request {request!r} needs more blocks of a page class than the {needs.blocks()} that there are"
        return OutOfBlocksError(message, "device", wanted, room, total)
    wanted, total, room = -(-wanted // first), total // first, room // first
    message = f"request {request!r} needs up to {wanted} device blocks and {total - room} kept free, there are {total}"
    return OutOfBlocksError(message, "device", wanted, room, total)
