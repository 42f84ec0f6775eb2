"""Admission of waiting sequences, prompt by prompt or chunk by chunk, and preemption for those of a higher priority."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import AllocStatus, BlockManager, Fit, HashedPrompt
from blockyard.scheduler.loading_ahead import LOOKED_AT, LoadingAhead, Retained, RoomAhead, keeps_copies, place_of
from blockyard.scheduler.loop import Change
from blockyard.scheduler.options import BlockNeeds
from blockyard.scheduler.ranked_queue import RankedQueue
from blockyard.scheduler.request import Fetch, IdleSequences, RequestState, SequenceStatus
from blockyard.scheduler.rows import DONE, LENGTH, PRIORITY, Seated, SequenceRows
from blockyard.scheduler.step import SchedulerStats, StepBuilder
from blockyard.scheduler.swapping import Swapping

__all__ = ["Admission", "Precedence"]

PASSED: Final = 16
"""Maximum number of waiting sequences that one step passes over because they do not fit."""


class Admission:
    """Starts waiting sequences in order while blocks, seats and tokens last.

    Args:
        manager: the scheduler's manager.
        rows: rows of the running sequences.
        builder: builder of the step they start in.
        waiting: the queue.
        stats: counts the tokens found in the prefix cache.
        needs: counts the bytes that a sequence needs.
        prefetch: starts loading the beginning of a prompt from a prefix store; None without a store.
        change: of the scheduler.
        max_overtakes: maximum number of requests that may start before one ahead of them.

    Attributes:
        needs: as given.
        ahead: loads their prompts before they start.
        room: empties blocks for them before they start; None without copies on the host.
    """

    def __init__(
        self,
        manager: BlockManager,
        rows: SequenceRows,
        builder: StepBuilder,
        waiting: RankedQueue,
        stats: SchedulerStats,
        *,
        needs: BlockNeeds,
        prefetch: Callable[[HashedPrompt], Fetch] | None,
        change: Change,
        max_overtakes: int,
    ) -> None:
        self._manager = manager
        self._rows = rows
        self._builder = builder
        self._waiting = waiting
        self._stats = stats
        self.needs = needs
        self._prefix_caching = manager.prefix.enabled
        self._has_store = prefetch is not None
        # The bytes of several prompts may be there, but not their blocks of each class.
        self._one_by_one = needs.keeps_states or needs.has_classes
        self._block_bytes = needs.sizes[0][1]  # on the device, loads are for the only page class there is
        most, in_order = rows.seats_left + LOOKED_AT, not max_overtakes
        self.retained = Retained(manager, stats)
        parts = (manager, waiting, self._hashed, prefetch, change, self.retained)
        self.ahead = LoadingAhead(*parts, most=most, in_order=in_order)
        self.room = RoomAhead(manager, rows, waiting, self._hashed, builder.left) if keeps_copies(manager) else None
        self._aside: list[IdleSequences] = []  # those taken out of the queue until `admit` ends
        self._max_overtakes = max_overtakes
        self._behind: IdleSequences | None = None  # the first swapped-out sequences, in `admit`
        self._passed: list[IdleSequences] = []  # those set aside because they do not fit

    def count_loading(self) -> int:
        """Count the waiting sequences whose prompts are still loading; polls the prefix store."""
        return sum(idle.is_loading() for idle in self.ahead.loading)

    def first(self) -> IdleSequences | None:
        """Return the first whose prompt is not loading, without removing it."""
        head, loading = self._waiting.head(), self.ahead.loading
        if head is None or head not in loading:
            return head
        near = self._waiting.first(len(loading) + 1)
        return next((idle for idle in near if idle not in loading), None)

    def admit(self, *, behind: IdleSequences | None = None) -> None:
        """Start what fits into this step.

        Args:
            behind: the first swapped-out sequences, which come before others of their priority.
        """
        self._behind = behind
        builder, rows = self._builder, self._rows
        if rows.seats_left < 1 or rows.decodes + len(builder.counts) < rows.count:
            return  # no seat is free, or a running prompt got no tokens: admit no new one
        while self._waiting and (left := builder.left) > 0 and not rows.is_closed:
            if builder.ends and builder.ends[-1] < rows.fields[LENGTH, rows.count - 1]:
                break  # its chunk has ended early; rows are ordered by which finishes first
            batch, siblings = self._pick(left)
            if not batch:
                break
            self._start(batch, siblings, min(left, batch[-1].state.chunk))
        # Each becomes the head.
        for idle in reversed(self._aside):
            self._waiting.push(idle)
        self._aside.clear()
        self._passed.clear()

    def _pick(self, left: int) -> tuple[list[IdleSequences], tuple[int, int] | None]:
        """Take the first waiting sequences that fit and can be admitted by one manager call.

        Args:
            left: number of tokens that this step may still compute.

        Returns:
            The sequences; and, if one shares blocks with a running sequence of its request, that sequence's handle and
            the number of tokens to share.
        """
        rows, behind, has_store = self._rows, self._behind, self._has_store
        batch: list[IdleSequences] = []
        next_head = self._head if self.ahead.loading else self._waiting.head
        head, tokens, taken = next_head(), 0, self._bytes_owed()
        room = self._room(taken, head)
        last: RequestState | None = None
        share: tuple[int, int] | None = None
        while head is not None:
            ahead = self._passed if behind is None else self._ahead_of(head)
            if ahead and not self._may_start(head):
                break
            state, length = head.state, len(head.tokens[0])
            if last is not None and (tokens + length > left or state.admitted != last.admitted):
                break
            # A recompute: it shares blocks with the request's other sequences once they are computed.
            if (state.seats or state is last) and (batch or rows.find(state.seats)[-1] >= rows.decodes):
                break
            share = self._shared_with(state, head.tokens[0]) if state.seats and not self._prefix_caching else None
            has_asked = not has_store or self.ahead.may_start(head) or self._is_idle(batch)
            need = self._fit(head, share, taken, room) if has_asked else None
            if need is None:
                has_more = has_asked and self._end_lease_behind(head, taken, room)
                # What the batch has found may have been leased, and is now among what is free: it is taken first.
                if batch or not (has_more or self._pass_over(head)):
                    break
                head = head if has_more else next_head()
                room = self._room(taken, head)
                continue
            is_cut = state.chunk < length
            if batch and is_cut:
                break
            for idle in ahead:
                idle.overtaken += 1
            self._waiting.pop()
            rows.seats_left -= 1 + head.forks
            batch.append(head)
            tokens += length
            taken += need
            if share is not None or tokens >= left or is_cut or self._one_by_one:
                break
            last, head = state, next_head()
        return batch, share

    def _fit(self, head: IdleSequences, share: tuple[int, int] | None, taken: int, room: int) -> int | None:
        """Return the bytes that sequences take beside `taken` others, or None if they do not fit."""
        if 1 + head.forks > self._rows.seats_left:
            return None
        need = self._need(head, share, taken, room)
        return need if taken + need <= room and (self.needs.is_full or not self._lacks_in_step(head)) else None

    def _lacks_in_step(self, head: IdleSequences) -> int:
        """Return the bytes that a prompt that fits lacks because this step computes less of it, and so other points."""
        chunk = min(self._builder.left, len(head.tokens[0]))
        if chunk >= min(head.state.chunk, len(head.tokens[0])):
            return 0
        prompt = self._hashed(head) if self._prefix_caching else len(head.tokens[0])
        fit = self._manager.can_allocate(prompt, chunk_tokens=chunk)
        return 0 if fit else max(1, fit.bytes - fit.free_bytes)  # of a page class, or of all

    def _need(self, head: IdleSequences, share: tuple[int, int] | None, taken: int, room: int) -> int:
        """Return the bytes that a prompt takes. Sets its chunk: as long as the device could hold if it were empty.

        With full attention alone in blocks of one page class, chunks make no difference.
        """
        needs = self.needs
        shared = needs.shared(share[1]) if share else 0
        if needs.is_full and not needs.has_classes:
            need = needs.all(len(head.tokens[0])) - shared
            if taken + need <= room or not self._prefix_caching:
                return need
            return self._bytes_with_hits(head, room)
        state, length, most = head.state, len(head.tokens[0]), needs.usable()
        state.chunk = needs.max_chunk
        while (need := self._bytes_with_hits(head, room)) > most and state.chunk > 1:
            state.chunk = -(-min(state.chunk, length) // 2)
        return need if needs.has_classes else need - shared  # else a class may lack blocks although there are bytes

    def _is_idle(self, batch: list[IdleSequences]) -> bool:
        """Whether nothing runs or loads, nor starts in this step: then a prompt need not ask the prefix store first."""
        return not (batch or self._builder.tokens or self._rows.count or self.ahead.loading)

    def _end_lease_behind(self, head: IdleSequences, taken: int, room: int) -> bool:
        """End the lease of the last sequences behind `head`, if `head` lacks only blocks that leases hold."""
        if not self.ahead.has_leases or 1 + head.forks > self._rows.seats_left:
            return False
        lacking = taken + self._bytes_with_hits(head, room) - room
        if lacking <= 0:
            lacking = self._lacks_in_step(head)
        return self.ahead.give_up_last(place_of(head), -(-lacking // self._block_bytes))

    def _may_start(self, head: IdleSequences) -> bool:
        """Whether `head` may overtake those ahead of it that have not started."""
        most = self._max_overtakes
        return all(idle.rank[0] == head.rank[0] and idle.overtaken < most for idle in self._ahead_of(head))

    def _ahead_of(self, head: IdleSequences) -> list[IdleSequences]:
        """Return the sequences that `head` overtakes if it starts now."""
        if self._behind is None or self._behind.rank[0] > head.rank[0]:
            return self._passed
        return [self._behind, *self._passed]

    def _pass_over(self, head: IdleSequences) -> bool:
        """Set the head aside, which does not fit now. Returns False if those behind it may not overtake it."""
        if head.overtaken >= self._max_overtakes or len(self._passed) == PASSED:
            return False
        self._passed.append(self._waiting.pop())
        self._aside.append(self._passed[-1])
        return True

    def bytes_lacking(self, idle: IdleSequences, begun: int) -> int:
        """Bytes that waiting sequences lack to be admitted, while running ones take `begun`; at most 0 if none."""
        rows = self._rows
        prefill = slice(rows.decodes, rows.count)
        lengths, done = rows.fields[LENGTH, prefill].tolist(), rows.fields[DONE, prefill].tolist()
        if idle.state.seats and rows.find(idle.state.seats)[-1] >= rows.decodes:
            return 0  # it waits for another sequence of its request
        taken = begun + sum(map(self.needs.rest, lengths, done))
        is_sharing = idle.state.seats and not self._prefix_caching
        share = self._shared_with(idle.state, idle.tokens[0]) if is_sharing else None
        room = self._free(taken, idle)
        return taken + self._need(idle, share, taken, room) - room

    def fit_without_extents(self) -> Fit | None:
        """Why the first waiting sequences do not fit, if they lack blocks of a page class although there are bytes."""
        head = self.first()
        if head is None or 1 + head.forks > self._rows.seats_left:
            return None
        prompt = self._hashed(head) if self._prefix_caching else len(head.tokens[0])
        fit = self._manager.can_allocate(prompt, chunk_tokens=min(head.state.chunk, self.needs.max_chunk))
        return fit if fit.status == AllocStatus.LATER and fit.bytes <= fit.free_bytes else None

    def _head(self) -> IdleSequences | None:
        """Return the first whose prompt is not loading; set aside those before it."""
        while (head := self._waiting.head()) is not None and head in self.ahead.loading:
            self._aside.append(self._waiting.pop())
        return head

    def _bytes_owed(self) -> int:
        """Bytes that prompts in prefill still need."""
        builder, rows = self._builder, self._rows
        if not builder.ends:
            return 0
        lengths = rows.fields[LENGTH, rows.decodes : rows.count].tolist()
        return sum(map(self.needs.rest, lengths, builder.ends))

    def _room(self, owed: int, head: IdleSequences | None) -> int:
        """Bytes for new prompts, except those that loads will take for prompts ahead of the head.

        If the head needs more than are free, those held only by writes to a store count.
        """
        if head is None:
            return 0
        return self._free(owed, head) - self.ahead.promised_bytes(self._aside)

    def _free(self, taken: int, idle: IdleSequences) -> int:
        return self.needs.free(taken + self.needs.all(len(idle.tokens[0])))

    def _bytes_with_hits(self, idle: IdleSequences, room: int) -> int:
        """Bytes of `room` that a prompt takes. Hits held only by writes count: new blocks cannot take their place."""
        prompt = self._hashed(idle) if self._prefix_caching else len(idle.tokens[0])
        fit = self._manager.can_allocate(prompt, chunk_tokens=idle.state.chunk)
        need = fit.bytes + max(0, room - fit.free_bytes)
        if self.needs.has_classes and not fit:
            never = self.needs.total() if fit.status == AllocStatus.NEVER else 0
            return max(need, room, never) + 1  # enough bytes, but not enough blocks of a class
        return min(need, room) if self.needs.has_classes else need  # parts of extents are in no count of bytes

    def _hashed(self, idle: IdleSequences) -> HashedPrompt:
        if idle.hashed is None:  # kept: it may be looked up in every step until it fits
            state, prefix = idle.state, self._manager.prefix
            salt, lora_id = state.request.salt, state.request.lora_id
            idle.hashed = prefix.hash(idle.tokens[0], salt=salt, lora_id=lora_id, extras=state.extras)
        return idle.hashed

    def _shared_with(self, state: RequestState, tokens: NDArray[np.uint32]) -> tuple[int, int] | None:
        """Find a running sequence of a request to share leading full blocks with: its handle and the tokens."""
        rows, best, handle = self._rows, 0, 0
        for row in rows.find(state.seats).tolist():
            others = rows.tokens_of(row)
            longest = min(len(others), len(tokens) - 1)  # the last token must be computed for its logits
            differ = np.flatnonzero(others[:longest] != tokens[:longest])
            common = int(differ[0]) if len(differ) else longest
            common -= common % self._manager.block_size
            if common > best and self._still_has(int(rows.handles[row]), common):
                best, handle = common, int(rows.handles[row])
        return (handle, best) if best else None

    def _still_has(self, handle: int, tokens: int) -> bool:
        """Whether a running sequence still holds everything of its first `tokens` that the next token needs."""
        for number, (group, (size, _)) in enumerate(zip(self.needs.groups, self.needs.sizes, strict=True)):
            if group.kind in {"recurrent", "drafter", "windowed_drafter"}:
                return False  # its state has moved past that token; a drafter's entry depends on the next one
            if group.window is not None:
                first = max(0, tokens + 1 - group.window)
                first = tokens - tokens % group.window if group.kind == "chunked_attention" else first
                if not self._manager.block_table(handle, number)[first // size : tokens // size].all():
                    return False
        return True

    def _start(self, batch: list[IdleSequences], share: tuple[int, int] | None, left: int) -> None:
        """Admit sequences with `left` tokens; only the last may get fewer than all of its tokens in this step."""
        manager, builder, rows = self._manager, self._builder, self._rows
        if share is not None:
            parent, shared = share
            count = min(len(batch[0].tokens[0]), shared + left)
            handles, begun = [int(manager.fork(parent, shared_tokens=shared, num_tokens=count))], [shared]
        elif self._prefix_caching:
            handles, begun = self._allocate(batch, left)
        else:
            counts = [min(len(idle.tokens[0]), left) for idle in batch]
            handles, begun = manager.allocate(counts=counts).tolist(), [0] * len(batch)
        seated: list[Seated] = []
        chunks: list[NDArray[np.uint32]] = []
        for idle, handle, done in zip(batch, handles, begun, strict=True):
            state, tokens = idle.state, idle.tokens[0]
            if self._has_store:
                self.ahead.end(idle)  # the sequence has the blocks now
            if state.limit > rows.covered or state.request.max_tokens > rows.longest:
                rows.make_room(state.limit, len(tokens), state.request.max_tokens)
            seated.append((state, idle.indices[0], tokens, handle, done, idle.forks))
            chunks.append(tokens[done:] if done else tokens)
        first, at, before = rows.count, builder.tokens, len(builder.counts)
        rows.append(seated)
        rows.read_tables(slice(first, rows.count))
        if not self.needs.is_full:
            chunks[-1] = tokens[done : manager.num_tokens(handle)]
        builder.add_chunks(chunks, begun)
        opened = rows.handles[first : rows.count]
        for group, slots in enumerate(builder.slots[:, at : builder.tokens]):
            manager.slot_mapping(opened, builder.starts[before:], builder.ends[before:], out=slots, group=group)

    def _allocate(self, batch: list[IdleSequences], left: int) -> tuple[list[int], list[int]]:
        """Open sequences with the cached part of their prompts. Returns their handles and cached token counts."""
        prompts: list[NDArray[np.uint32] | HashedPrompt] = []
        keys: dict[str, Any] = {}
        for idle in batch:
            prompts.append(idle.hashed or idle.tokens[0])
            if idle.state.is_keyed and not keys:
                keys = _keys(batch)
        admitted = batch[0].state.admitted
        found = self._manager.allocate(*prompts, **keys, chunk_tokens=left, preempted=admitted)
        handles, begun = [], []
        for idle, sequence in zip(batch, found if isinstance(found, tuple) else (found,), strict=True):
            idle.state.admitted = True
            handles.append(int(sequence))
            begun.append(sequence.cached_tokens)
        if not admitted:
            self._stats.cached_tokens += sum(begun)
        return handles, begun


def _keys(batch: list[IdleSequences]) -> dict[str, Any]:
    """Return what sets the keys of prompts apart. A hashed prompt includes it."""
    states = [idle.state if idle.hashed is None else None for idle in batch]
    return {
        "salt": [state.request.salt if state else None for state in states],
        "lora_id": [state.request.lora_id if state else 0 for state in states],
        "extras": [state.extras if state else () for state in states],
    }


class Precedence:
    """Preempts running requests of a lower priority than the first idle sequences, for their blocks and seats.

    Requests are preempted only if that gives the first sequences what they lack. Within a priority nobody preempts, so
    those preempted do not preempt in turn.

    Args:
        manager: the scheduler's manager.
        rows: rows of the running sequences.
        admission: the waiting sequences.
        swapping: the swapped-out sequences.
        preempt: takes the rows of one request off the device.
    """

    def __init__(
        self,
        manager: BlockManager,
        rows: SequenceRows,
        admission: Admission,
        swapping: Swapping,
        preempt: Callable[[NDArray[np.int64]], None],
    ) -> None:
        self._manager = manager
        self._rows = rows
        self._admission = admission
        self._swapping = swapping
        self._preempt = preempt

    def first(self) -> IdleSequences | None:
        """Return the idle sequences that go first: those of the highest priority, swapped-out ones before others."""
        waiting, swapped = self._admission.first(), self._swapping.swapped.head()
        if waiting is None or (swapped is not None and swapped.rank[0] <= waiting.rank[0]):
            return swapped
        return waiting

    def make_way(self) -> bool:
        """Preempt for the first idle sequences. Returns whether any request of lower priority runs or has run.

        Call it before the running sequences get their tokens.
        """
        first, rows, needs = self.first(), self._rows, self._admission.needs
        if first is None or rows.lowest_priority() <= first.rank[0]:
            return False
        lacking, seats = self._lacking(first)
        place = place_of(first) if first.status is SequenceStatus.WAITING else first.rank[:1]
        while lacking > 0 and self._admission.ahead.give_up_last(place):
            lacking, seats = self._lacking(first)
        if (lacking > 0 or seats > 0) and self._is_enough(first, lacking, seats):
            while (lacking > needs.in_flight() or seats > 0) and rows.lowest_priority() > first.rank[0]:
                self._preempt(rows.worst())
                lacking, seats = self._lacking(first)
        return True

    def _lacking(self, first: IdleSequences) -> tuple[int, int]:
        """Bytes and seats that sequences lack to run in this step; not positive if they have enough."""
        rows = self._rows
        decodes = rows.fields[LENGTH, : rows.decodes]
        begun = int(np.count_nonzero((decodes - 1) % self._manager.block_size == 0))
        begun *= self._admission.needs.all(1)  # bytes that running sequences take
        seats = max(len(first.indices) + first.forks - rows.seats_left, rows.is_closed)
        if first.status is SequenceStatus.WAITING:
            return self._admission.bytes_lacking(first, begun), seats
        fit = self._manager.can_swap_in(first.handles)
        is_movable = fit.blocks > 0 and fit.status != AllocStatus.NEVER
        lacking = fit.bytes + begun - fit.free_bytes
        lacks_class = self._admission.needs.has_classes and not fit
        return max(lacking, lacks_class) if is_movable else 0, seats

    def _is_enough(self, first: IdleSequences, lacking: int, seats: int) -> bool:
        """Whether the running requests of lower priority hold what sequences lack."""
        rows = self._rows
        is_lower = rows.fields[PRIORITY, : rows.count] > first.rank[0]
        lower = is_lower.nonzero()[0]
        if seats > len(lower) + sum(map(rows.fork_count, lower.tolist())):
            return False
        needs, handles = self._admission.needs, rows.handles[: rows.count]
        kept, freed = needs.held_by(handles[~is_lower].tolist()), needs.held_by(handles[is_lower].tolist())
        return lacking <= needs.in_flight() + sum(freed[block] for block in freed.keys() - kept.keys())

    def start_idle(self) -> None:
        """Bring swapped sequences back and admit waiting ones, by priority; within one, swapped sequences go first."""
        swapped, behind = self._swapping.swapped, None
        if swapped:
            first = self._admission.first()
            self._swapping.resume(inf if first is None else first.rank[0])
            behind = swapped.head()
        self._admission.admit(behind=behind)
