"""Admission of waiting sequences, prompt by prompt or chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard._core import HashedPrompt
from blockyard.scheduler.opened import Opened, handles_of
from blockyard.scheduler.ranked_queue import RankedQueue
from blockyard.scheduler.request import Fetch, IdleSequences, RequestState, SequenceStatus
from blockyard.scheduler.rows import LENGTH, SequenceRows
from blockyard.scheduler.step import SchedulerStats, StepBuilder

__all__ = ["Admission"]

LOADED_AHEAD: Final = 8
"""How many waiting sequences, from the head, load their prompts from a prefix store."""


class Admission:
    """Starts waiting sequences in order while blocks, seats and tokens last.

    Args:
        opened: opens the sequences in the manager, above the watermark.
        rows: rows of the running sequences.
        builder: builder of the step they start in.
        waiting: the queue.
        stats: counts the tokens found in the prefix cache.
        prefetch: starts loading the beginning of a prompt from a prefix store; None without a store.
    """

    def __init__(
        self,
        opened: Opened,
        rows: SequenceRows,
        builder: StepBuilder,
        waiting: RankedQueue,
        stats: SchedulerStats,
        prefetch: Callable[[HashedPrompt], Fetch] | None,
    ) -> None:
        self._opened = opened
        self._manager = opened.manager
        self._rows = rows
        self._builder = builder
        self._waiting = waiting
        self._stats = stats
        self._prefix_caching = opened.manager.prefix.enabled
        (self._group,) = opened.manager.pool().groups
        self._prefetch = prefetch
        self._loading: list[IdleSequences] = []  # prompts still loading, found by `load_ahead`
        self._aside: list[IdleSequences] = []  # those taken out of the queue until `admit` ends

    @property
    def num_loading(self) -> int:
        """Number of waiting sequences whose prompts are loading, as of the last step. Thread-safe."""
        return len(self._loading)

    def count_loading(self) -> int:
        """Count those of them that are still loading; polls the prefix store."""
        return sum(idle.is_loading() for idle in self._loading)

    def load_ahead(self) -> None:
        """Start loading the prompts near the head of the queue, and check which have loaded.

        All calls into user objects happen here, before a step changes anything, because they may raise.
        """
        if self._prefetch is None:
            return
        for idle in self._waiting.first(LOADED_AHEAD):
            if idle.fetch is None:
                idle.fetch = idle.state.context.run(self._prefetch, self._hashed(idle))
                self._loading.append(idle)
        self._loading = [p for p in self._loading if p.status is SequenceStatus.WAITING and p.is_loading()]

    def admit(self) -> None:
        """Start what fits into this step."""
        builder, rows = self._builder, self._rows
        if rows.decodes + len(builder.counts) < rows.count:
            return  # a running prompt got no tokens: admit no new one
        while self._waiting and builder.left > 0:
            batch, siblings = self._pick()
            if not batch:
                break
            self._start(batch, siblings)
        for idle in self._aside:
            self._waiting.push(idle)
        self._aside.clear()

    def _pick(self) -> tuple[list[IdleSequences], tuple[int, int] | None]:
        """Take the first waiting sequences that fit and can be admitted by one manager call.

        Returns:
            The sequences; and, if one shares blocks with a running sequence of its request, that sequence's handle and
            the number of tokens to share.
        """
        left, size = self._builder.left, self._manager.block_size
        batch: list[IdleSequences] = []
        tokens, blocks = 0, self._blocks_owed()
        room = self._room(blocks)
        while (head := self._head()) is not None:
            state, length = head.state, len(head.tokens[0])
            if 1 + head.forks > self._rows.seats_left:
                break
            if batch and tokens + length > left:
                break
            share: tuple[int, int] | None = None
            need = -(-length // size)
            if state.seats or (batch and batch[-1].state is state):
                # A recompute: it shares blocks with the request's other sequences once they are computed.
                if batch or self._rows.find(state.seats)[-1] >= self._rows.decodes:
                    break
                share = None if self._prefix_caching else self._shared_with(state, head.tokens[0])
                need -= share[1] // size if share else 0
            if blocks + need > room:
                if not self._prefix_caching:
                    break
                need = self._blocks_with_hits(head, room)
                if blocks + need > room:
                    break
            self._waiting.pop()
            self._rows.seats_left -= 1 + head.forks
            batch.append(head)
            tokens += length
            blocks += need
            if share is not None or tokens >= left:
                return batch, share
        return batch, None

    def _head(self) -> IdleSequences | None:
        """Return the first whose prompt is not loading; set aside those before it."""
        while (head := self._waiting.head()) is not None and head in self._loading:
            self._aside.append(self._waiting.pop())
        return head

    def _blocks_owed(self) -> int:
        """Blocks that prompts in prefill still need."""
        builder, rows, size = self._builder, self._rows, self._manager.block_size
        if not builder.ends:
            return 0
        lengths = rows.fields[LENGTH, rows.decodes : rows.count].tolist()
        return sum(-(-length // size) + -end // size for length, end in zip(lengths, builder.ends, strict=True))

    def _room(self, owed: int) -> int:
        """Blocks for new prompts. If the head needs more than are free, those held only by writes to a store count."""
        head = self._head()
        if head is None:
            return 0
        tokens = owed * self._manager.block_size + len(head.tokens[0])
        return self._manager.can_allocate(tokens).free

    def _blocks_with_hits(self, idle: IdleSequences, room: int) -> int:
        """Blocks of `room` that a prompt takes. Hits held only by writes count: new blocks cannot take their place."""
        fit = self._manager.can_allocate(self._hashed(idle))
        return fit.blocks + max(0, room - fit.free)

    def _hashed(self, idle: IdleSequences) -> HashedPrompt:
        if idle.hashed is None:  # kept: it may be looked up in every step until it fits
            request, prefix = idle.state.request, self._manager.prefix
            idle.hashed = prefix.hash(idle.tokens[0], salt=request.salt, lora_id=request.lora_id)
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
        if self._group.kind == "full_attention":
            return True
        if self._group.window is None:
            return False  # its recurrent state has moved past that token
        size = self._manager.block_size
        first = max(0, tokens + 1 - self._group.window) // size
        return bool(self._manager.block_table(handle)[first : tokens // size].all())

    def _start(self, batch: list[IdleSequences], share: tuple[int, int] | None) -> None:
        """Admit sequences; only the last may get fewer than all of its tokens in this step."""
        manager, builder, rows = self._manager, self._builder, self._rows
        left = builder.left
        prompts = [idle.tokens[0] for idle in batch]
        begun = [0] * len(batch)
        if share is not None:
            parent, begun[0] = share
            count = min(len(prompts[0]), begun[0] + left)
            call = partial(manager.fork, parent, shared_tokens=begun[0], num_tokens=count)
            handles = np.array(handles_of(self._opened.open(call)), np.uint64)
        elif self._prefix_caching:
            handles, begun = self._allocate(batch)
        else:
            counts = [min(len(tokens), left) for tokens in prompts]
            handles = self._opened.open(partial(manager.allocate, counts=counts))
        states = [idle.state for idle in batch]
        most = max([state.request.max_tokens for state in states])
        rows.make_room(max([state.limit for state in states]), max(map(len, prompts)), most)
        each = zip(batch, prompts, handles.tolist(), begun, strict=True)
        first = rows.count
        rows.append([(p.state, p.indices[0], tokens, handle, done, p.forks) for p, tokens, handle, done in each])
        manager.block_tables(handles, out=rows.block_tables[first : rows.count])
        at, chunks = builder.tokens, len(builder.counts)
        builder.add_chunks([ids[start:] if start else ids for ids, start in zip(prompts, begun, strict=True)], begun)
        slots = builder.slots[at : builder.tokens]
        manager.slot_mapping(handles, builder.starts[chunks:], builder.ends[chunks:], out=slots)

    def _allocate(self, batch: list[IdleSequences]) -> tuple[NDArray[np.uint64], list[int]]:
        """Open sequences with the cached part of their prompts. Returns their handles and cached token counts."""
        # A hashed prompt includes its salt and adapter.
        requests = [idle.state.request if idle.hashed is None else None for idle in batch]
        call = partial(
            self._manager.allocate,
            *[idle.tokens[0] if idle.hashed is None else idle.hashed for idle in batch],
            salt=[request.salt if request else None for request in requests],
            lora_id=[request.lora_id if request else 0 for request in requests],
            chunk_tokens=self._builder.left,
        )
        found = self._opened.open(call)
        sequences = found if isinstance(found, tuple) else (found,)
        begun = [sequence.cached_tokens for sequence in sequences]
        self._stats.cached_tokens += sum(begun)
        return np.array(handles_of(found), np.uint64), begun
