"""Loading ahead: waiting prompts are loaded from a prefix store, in order, as many as fit.

A prompt *leases* its blocks on device and host, those that it finds and those that land, until it starts. So prompts of
a queue do not evict each other's blocks. The leases hold at most half of the blocks that no sequence has; the first
prompt may take all of them, as it does when it starts. Leases never stop what runs: the last prompt's is ended before a
running sequence is preempted, or an earlier prompt waits. Such a prompt asks the store again before it starts.

`Retained` has the leases of requests that have ended: until a deadline, their blocks are evicted last. They yield to
all else, the lease whose time ends first before the others.

`RoomAhead` has device blocks emptied for prompts that start soon, while the steps before compute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Final, Literal

import numpy as np

from blockyard._core import BlockManager, HashedPrompt
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler.loop import Change
from blockyard.scheduler.ranked_queue import RankedQueue
from blockyard.scheduler.request import Fetch, IdleSequences, RequestState, SequenceStatus
from blockyard.scheduler.rows import LENGTH, LIMIT, SequenceRows
from blockyard.scheduler.step import SchedulerStats

__all__ = ["LOOKED_AT", "LoadingAhead", "Retained", "RoomAhead", "keeps_copies", "place_of"]

Share = Literal["half", "free", "any"]

LOOKED_AT: Final = 8
"""How many sequences behind those with a lease are looked at first, and may load ahead beyond those that can run."""
_SOON: Final = 1
"""A prompt starts soon if a sequence reaches its limit within as many tokens. Steps that only decode are short."""


class Retained:
    """The leases of ended requests.

    Args:
        manager: the scheduler's manager.
        stats: counts what became of them.
    """

    def __init__(self, manager: BlockManager, stats: SchedulerStats) -> None:
        self._prefix, self._jobs, self._stats = manager.prefix, manager.prefix.store_jobs, stats
        self._order: list[tuple[float, int]] = []  # deadlines and leases, a heap

    def __len__(self) -> int:
        return len(self._order)

    def add(self, state: RequestState, now: float) -> None:
        """Lease the blocks of a request's sequences, which were freed, as far as half of the unused blocks suffice.

        Those of a tenant with a quota are not leased: leased blocks would not count.
        """
        request = state.request
        if (held := self._prefix.quota(request.salt)) is not None and held[1] is not None:
            self._stats.retain_refused += request.n
            return
        for generated in map(state.generated, range(request.n)):
            tokens = np.concatenate([state.prompt, generated])
            hashed = self._prefix.hash(tokens, salt=request.salt, lora_id=request.lora_id, extras=state.extras)
            lease = self._jobs.lease(hashed, share="half")
            if lease is None:
                self._stats.retain_refused += 1
                continue
            self._jobs.settle_lease(lease, hashed)
            heapq.heappush(self._order, (now + request.retain, lease))
            self._stats.retained += 1

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        while self._order and self._order[0][0] <= now:
            self._end_first()

    def give_up(self) -> bool:
        """End the lease whose time ends first. Returns whether there was one."""
        if not self._order:
            return False
        self._end_first()
        self._stats.retain_given_up += 1
        return True

    def clear(self) -> None:
        """End all leases, after the manager has ended some."""
        self.expire(inf)

    def _end_first(self) -> None:
        self._jobs.end_lease(self._order[0][1])
        heapq.heappop(self._order)


class LoadingAhead:
    """The waiting sequences whose prompts are loaded before they start.

    Args:
        manager: the scheduler's manager.
        waiting: the queue.
        hashed: returns a prompt with its keys.
        prefetch: starts loading the beginning of a prompt from a prefix store; None without a store.
        change: of the scheduler.
        retained: what ended requests have left, which goes first.
        most: maximum number of sequences to load ahead.
        in_order: whether a sequence that does not fit stops those behind it.

    Attributes:
        loading: those whose prompts are loading, as of the last step.
    """

    def __init__(
        self,
        manager: BlockManager,
        waiting: RankedQueue,
        hashed: Callable[[IdleSequences], HashedPrompt],
        prefetch: Callable[[HashedPrompt], Fetch] | None,
        change: Change,
        retained: Retained,
        *,
        most: int,
        in_order: bool,
    ) -> None:
        self.loading: dict[IdleSequences, None] = {}
        self._jobs = manager.prefix.store_jobs
        self._pools = (manager.pool("device"), manager.pool("host"))
        self._waiting, self._hashed, self._prefetch, self._change = waiting, hashed, prefetch, change
        self._most, self._in_order, self._retained = most, in_order, retained
        self._leased: list[IdleSequences] = []  # those with a lease, in the order of the queue
        self._refused: tuple[IdleSequences, Share, list[int]] | None = None  # and the free blocks of each tier then

    def advance(self, *, is_idle: bool) -> None:
        """Load the next prompts that fit, and check which have loaded.

        All calls into user objects happen here, before a step changes anything, because they may raise.

        Args:
            is_idle: whether no sequence runs or is swapped out, so that nothing else can use the blocks.
        """
        if self._prefetch is None:
            return
        waiting = SequenceStatus.WAITING
        for idle in [idle for idle in self.loading if idle.status is not waiting or not idle.is_loading()]:
            self._settle(idle)
        self._leased = [idle for idle in self._leased if idle.lease is not None]
        if self._jobs.num_leases != len(self._leased) + len(self._retained):
            self._end_from(0)  # a reset or a smaller device has ended them
            self._retained.clear()
        count, at = len(self._leased) + LOOKED_AT, 0
        goes_on = True
        while goes_on and at < self._most:
            near = self._waiting.first(min(count, self._most))
            goes_on = len(near) == count
            for place, idle in enumerate(near[at:], at):
                if idle.lease is not None and idle.fetch is not None:
                    continue
                share: Share = "half" if place else "any" if is_idle else "free"
                if not self._load(idle, share) and self._in_order:
                    return
            at, count = len(near), 2 * count

    def _load(self, idle: IdleSequences, share: Share) -> bool:
        """Lease a prompt's blocks and start its load, unless both are done. Returns False if it does not fit."""
        if idle.lease is None and not self._lease(idle, share):
            return False
        if idle.fetch is None and self._prefetch is not None:
            idle.fetch = idle.state.context.run(self._prefetch, self._hashed(idle))
            self.loading[idle] = None
            if not idle.is_loading():
                self._settle(idle)
        return True

    def _lease(self, idle: IdleSequences, share: Share) -> bool:
        place, first = place_of(idle), len(self._leased)
        while first and place_of(self._leased[first - 1]) > place:
            first -= 1
        self._end_from(first)
        free = [pool.num_free for pool in self._pools]
        *last, then = self._refused or (None, share, free)
        if last == [idle, share] and free[0] <= then[0] and free[1] <= then[1]:
            return False
        hashed = self._hashed(idle)
        self._change.begun = True
        idle.lease = self._jobs.lease(hashed, share=share)
        while idle.lease is None and first == 0 and self._retained.give_up():
            idle.lease = self._jobs.lease(hashed, share=share)
        if idle.lease is not None:
            self._leased.append(idle)
        self._refused = (idle, share, free) if idle.lease is None else None
        self._change.begun = False
        return idle.lease is not None

    def _settle(self, idle: IdleSequences) -> None:
        """Promise a prompt nothing more, whose load has ended."""
        if idle.lease is not None:
            self._jobs.settle_lease(idle.lease, self._hashed(idle))
        self.loading.pop(idle, None)
        self._refused = None

    def _end_from(self, at: int) -> None:
        """End the leases of the sequences from a place on, the last first."""
        for idle in reversed(self._leased[at:]):
            self.end(idle)
            self._leased.pop()

    def end(self, idle: IdleSequences) -> None:
        """End the lease of sequences that start, are dropped, or give it up; if they wait, they will ask again."""
        if idle.lease is not None:
            self._jobs.end_lease(idle.lease)
            idle.lease = self._refused = None
        idle.fetch = None
        self.loading.pop(idle, None)

    @property
    def has_leases(self) -> bool:
        """Whether any sequences have a lease, or ended ones."""
        return bool(self._leased or self._retained)

    def give_up_last(self, place: tuple[float, ...] = (), lacking: int = 0) -> bool:
        """End the lease of an ended request; else of the last sequences, if they are behind a place in the queue.

        Without enough leased blocks, none ends.

        Args:
            place: of sequences, see `place_of`, or a beginning of it: of all that have it.
            lacking: number of device blocks that whoever is in that place lacks.

        Returns:
            Whether a lease has ended.
        """
        if lacking > self._jobs.num_leased:
            return False
        if self._retained.give_up():
            return True
        while self._leased and self._leased[-1].lease is None:
            self._leased.pop()
        if not self._leased or place_of(self._leased[-1]) <= place:
            return False
        self.end(self._leased.pop())
        return True

    def may_start(self, idle: IdleSequences) -> bool:
        """Whether sequences have asked the store, or lack nothing that it could have."""
        if self._prefetch is None or idle.lease is not None:
            return True
        keys, _, loading = self._jobs.missing(self._hashed(idle), 1)
        return not len(keys) and not len(loading)

    def promised_bytes(self, ahead: list[IdleSequences]) -> int:
        """Bytes of blocks that loads will take for any of these sequences."""
        return self._jobs.promised_bytes if self.loading and any(idle in self.loading for idle in ahead) else 0


def place_of(idle: IdleSequences) -> tuple[float, ...]:
    """Return the place of sequences in their queue: priority, arrival, number, index."""
    return (*idle.rank, idle.indices[0])


class RoomAhead:
    """Announces the blocks of waiting prompts that start once sequences reach their limit.

    Args:
        manager: the scheduler's manager.
        rows: rows of the running sequences.
        waiting: the queue.
        hashed: returns a prompt with its keys.
        max_tokens: maximum number of tokens in a step.
    """

    def __init__(
        self,
        manager: BlockManager,
        rows: SequenceRows,
        waiting: RankedQueue,
        hashed: Callable[[IdleSequences], HashedPrompt],
        max_tokens: int,
    ) -> None:
        self._manager, self._rows, self._waiting, self._hashed = manager, rows, waiting, hashed
        self._max_tokens = max_tokens

    def expect(self) -> None:
        """Announce the blocks that prompts will take in the next steps."""
        rows = self._rows
        if not self._waiting:
            return
        left = rows.fields[LIMIT, : rows.count] - rows.fields[LENGTH, : rows.count]
        seats = rows.seats_left + int(np.count_nonzero(left <= _SOON))
        blocks, tokens = 0, self._max_tokens
        for idle in self._waiting.first(seats) if seats else ():
            tokens -= len(idle.tokens[0])
            if blocks and tokens < 0:
                break
            blocks += self._blocks_of(idle)
        if blocks:
            self._manager.prefix.expect(blocks)

    def _blocks_of(self, idle: IdleSequences) -> int:
        """Return how many blocks a prompt takes, as of when it was first looked at: a lookup takes time."""
        if idle.blocks is None:
            fit = self._manager.can_allocate(self._hashed(idle), chunk_tokens=self._max_tokens)
            # Of another page class than the keys' the prompt lacks more, but has no number of blocks of theirs.
            idle.blocks = -(-len(idle.tokens[0]) // self._manager.block_size) if fit.page_class else fit.blocks
        return idle.blocks


def keeps_copies(manager: BlockManager) -> bool:
    """Whether prompts find copies on the host."""
    try:
        manager.prefix.expect(0)
    except InvalidArgumentError:
        return False
    return True
