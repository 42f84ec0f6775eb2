"""A drop-in block manager for nano engines: small engines whose block manager is a class of about 100 lines.

The scheduler of such an engine creates one `BlockManager(num_blocks, block_size)` and requests blocks from it sequence
by sequence; the model runner reads each sequence's `block_table`. One assignment replaces it:

    nanovllm.engine.scheduler.BlockManager = blockyard.integrations.nano.BlockManager

Both existing kinds are supported. *Older* engines treat `can_allocate(seq)` as a bool and call `allocate(seq)`; an
appended token shows that the tokens before it are computed. *Newer* ones treat it as the number of cached blocks, pass
that to `allocate(seq, n)`, and call `hash_blocks(seq)` after each step. Nothing is imported from the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard import _core
from blockyard.engine.engine import CacheEngine
from blockyard.errors import (
    InvalidArgumentError,
    LayoutError,
    SequenceStateError,
    UnknownSequenceError,
    UnknownTicketError,
)
from blockyard.layout.kv import KVLayout
from blockyard.types import ManagerStats
from blockyard.workers.interrupts import keep

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BlockManager", "CachedBlocks", "Goal", "NanoSequence", "ScheduledSequence"]


KIND: Final = "kv layers blocks tokens heads dim"
"""Dimensions of the KV tensor, outermost first."""

Goal: TypeAlias = Literal["max_id", "free_tail", "dense"]
"""A goal of `BlockManager.defragment`; see `manager.defrag.run`."""


class NanoSequence(Protocol):
    """The fields of an engine's sequence that are read and written; its length is its number of tokens.

    A sequence with images also has `extras`: `(start, length, digest)` of each, see `blockyard.BlockManager.allocate`.
    """

    token_ids: list[int]
    block_table: list[int]
    num_cached_tokens: int

    def __len__(self) -> int: ...


class Carrier(Protocol):
    """Executes decisions: a `CacheEngine`, or a wrapper around one."""

    def execute(self, decision: _core.StepDecision) -> list[_core.Pairs]:
        """Carry out a decision before anything else is queued. Returns the pairs that did not land."""


class ScheduledSequence(NanoSequence, Protocol):
    """A sequence of a newer engine."""

    num_scheduled_tokens: int


class CachedBlocks(int):
    """Number of a sequence's cached blocks, or -1 if it does not fit; truthy whenever it fits.

    Older engines test it for truth; newer ones compare it with -1 and use the number.
    """

    def __bool__(self) -> bool:
        return self >= 0


@dataclass(slots=True)
class _Running:
    """A sequence with blocks; a step that fills no block reads nothing else."""

    # Kept alive, so that its id() stays unique.
    sequence: NanoSequence
    handle: int
    # Tokens with slots; they are passed to the manager when a block is full or a new one is needed.
    tokens: int
    named: int
    computed: int
    # Slots in its blocks, and the number of tokens computed when the next block is full.
    slots: int
    full: int


class BlockManager:
    """Allocates blocks to sequences, and shares those of equal prefixes.

    A prompt's last block is never taken from the cache, so there is always a token to compute. Only computed blocks are
    shared, and duplicates are merged, so any call may change block tables: the lists are updated in place; read them
    when a step runs.

    If a call raises or is interrupted, retry it or `deallocate` its sequence. Sequences that lost blocks in this way,
    or through failed moves, have no room for another token: engines preempt and recompute them.

    Args:
        num_blocks: number of blocks in the KV tensor.
        block_size: token slots in a block.
        kv_cache: passed to `attach`.
        host_blocks: see `attach`.
        moves: see `attach`.

    Raises:
        InvalidArgumentError: a size is out of range, or there are host blocks without a KV tensor.
        LayoutError: the KV tensor does not fit.

    Source: nano-vllm `engine/block_manager.py`, the classes of June 2025 and of April 2026.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, kv_cache: Tensor | None = None, host_blocks: int = 0, moves: int = 16
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.executor: Carrier | None = None
        self.moves = 0
        self._running: dict[int, _Running] = {}
        self._lost: set[int] = set()  # sequences that can only be deallocated
        # What a call has taken from the manager. If the flag is set when a call begins, the last call was interrupted.
        self._in_critical_section = False
        self._decisions: list[_core.StepDecision] = []
        self._opened: list[_core.Sequence] = []
        self._pins: list[tuple[int, int]] = []
        self.manager = self._make_manager(0)
        if kv_cache is not None:
            self.attach(kv_cache, host_blocks=host_blocks, moves=moves)
        elif host_blocks:
            raise InvalidArgumentError(f"host_blocks is {host_blocks}, but there is no KV tensor to copy from")

    def attach(self, kv_cache: Tensor, *, host_blocks: int = 0, moves: int = 16) -> None:
        """Enable copies of blocks, now that the engine has its KV tensor; clears the cache.

        Blocks are copied to the host before they are evicted. A prompt can find them there, and `allocate` loads them
        back. Whenever a sequence leaves, blocks move into the lowest holes (`defragment`). All copies are queued before
        the call that decides them returns, on the current CUDA stream if the tensor is on a CUDA device.

        Args:
            kv_cache: the engine's tensor, `[2, layers, blocks, block_size, heads, dim]`, any dtype and device. One
                process must hold all of it: do not call this with tensor parallelism.
            host_blocks: number of blocks in host memory; 0 for none.
            moves: maximum number of blocks to move when a sequence leaves; 0 for none.

        Raises:
            SequenceStateError: sequences already have blocks.
            InvalidArgumentError: `host_blocks` or `moves` is negative.
            LayoutError: the tensor has the wrong shape or number of blocks or slots.
        """
        if self._running:
            raise SequenceStateError(f"{len(self._running)} sequences have blocks: attach before the first one")
        if moves < 0:
            raise InvalidArgumentError(f"moves is {moves}, must be at least 0")
        if host_blocks < 0:
            raise InvalidArgumentError(f"host_blocks is {host_blocks}, must be at least 0")
        layout = KVLayout.from_tensors([kv_cache], kind=KIND)
        found = layout.num_blocks(kv_cache)
        if (found, layout.block_size) != (self.num_blocks, self.block_size):
            raise LayoutError(
                f"the KV tensor has {found} blocks of {layout.block_size}, "
                f"the manager {self.num_blocks} of {self.block_size}"
            )
        engine = CacheEngine(layout, tensors=[kv_cache], host_blocks=host_blocks)
        self.manager, self.executor, self.moves = self._make_manager(host_blocks), engine, moves

    @property
    def free_block_ids(self) -> list[int]:
        """Blocks that no sequence uses, cached ones included, in ascending order."""
        used = set(self.used_block_ids)
        return [block for block in range(self.num_blocks) if block not in used]

    @property
    def used_block_ids(self) -> set[int]:
        """Blocks that sequences use."""
        return {block for entry in self._running.values() for block in entry.sequence.block_table}

    def stats(self) -> ManagerStats:
        """Return the counters: hits, blocks swapped out, loaded, merged, evicted."""
        return self.manager.stats()

    # ---- prompts ----

    def can_allocate(self, seq: NanoSequence) -> CachedBlocks:
        """Return whether there are blocks for all tokens of a sequence, and how many of its blocks are cached.

        With host blocks, this copies the blocks that the sequence will evict to the host.
        """
        self._begin()
        fit = CachedBlocks(self._fit(self._prompt(seq)))
        self._in_critical_section = False
        return fit

    def allocate(self, seq: NanoSequence, num_cached_blocks: int | None = None) -> None:
        """Allocate blocks for all tokens of a sequence: sets its `block_table` and `num_cached_tokens`.

        Args:
            seq: a sequence without blocks.
            num_cached_blocks: the number that `can_allocate` just returned; older engines do not pass it.

        Raises:
            OutOfBlocksError: too few blocks are free.
            InvalidArgumentError: the sequence has blocks, uses another block size, or has another number of cached
                blocks.
            SequenceStateError: a cached block could not be brought back from the host.
        """
        prompt = self._prompt(seq)
        self._begin()
        self._check_new(seq, len(prompt))
        if num_cached_blocks is None:
            self._fit(prompt)
        elif (cached := self._cached(prompt)) != num_cached_blocks and self.manager.can_allocate(prompt):
            # Making room on the host again could evict blocks that `can_allocate` counted.
            raise InvalidArgumentError(f"num_cached_blocks is {num_cached_blocks}, {cached} are cached: ask again")
        # A preempted sequence finds blocks that it computed itself, which are not hits.
        is_again = getattr(seq, "num_completion_tokens", 0) > 0
        sequence = keep(self._opened, partial(self.manager.allocate, preempted=is_again), prompt)
        handle, hit = int(sequence), sequence.cached_tokens
        try:
            self._land([handle])
            entry = _Running(seq, handle, len(prompt), len(prompt), hit, 0, hit + self.block_size)
            self._show(entry)
            seq.num_cached_tokens = hit
            self._running[id(seq)] = entry
            del self._opened[:]
        except BaseException:
            self._running.pop(id(seq), None)
            seq.block_table.clear()
            self._recover_from_interrupt()
            raise
        self._in_critical_section = False

    def deallocate(self, seq: NanoSequence) -> None:
        """Free a sequence's blocks: empties its `block_table`, and sets `num_cached_tokens` to 0.

        A sequence without blocks is left unchanged.

        Raises:
            UnknownSequenceError: its blocks are not from this manager.
        """
        self._begin()
        entry = self._running.get(id(seq))
        if entry is None and seq.block_table:
            raise _unknown(seq)
        if entry is not None:
            if entry.handle not in self._lost:
                self._publish(entry, self._certain(entry, len(seq)))
            self.manager.free([entry.handle])
            self._forget(entry)
        seq.num_cached_tokens = 0
        if entry is not None and self.moves:
            self._defragment("dense", 0, self.moves)
        self._in_critical_section = False

    # ---- tokens ----

    def can_append(self, seq: NanoSequence) -> bool:
        """Return whether there are blocks for the tokens appended to a sequence since the last call.

        False for a sequence that has lost blocks: deallocate and recompute it.

        Raises:
            UnknownSequenceError: it has no blocks from here.
            InvalidArgumentError: it has fewer tokens than it had.
        """
        if self._in_critical_section:
            self._recover_from_interrupt()
        entry, tokens = self._entry(seq), len(seq)
        if entry.handle in self._lost:
            return False
        if entry.tokens <= tokens <= entry.slots:
            return True
        return self._wanted(entry, tokens) <= self.manager.pool().num_free

    def may_append(self, seq: NanoSequence) -> None:
        """Make room for the tokens appended to a sequence since the last call: extends its `block_table` if needed.

        Raises:
            OutOfBlocksError: too few blocks are free.
            UnknownSequenceError: it has no blocks from here.
            SequenceStateError: it has lost blocks: deallocate it, and compute it again.
            InvalidArgumentError: it has fewer tokens than it had.
        """
        if self._in_critical_section:
            self._recover_from_interrupt()
        entry, tokens = self._whole(seq), len(seq)
        certain = self._certain(entry, tokens)
        if not entry.tokens <= tokens <= entry.slots:
            self._in_critical_section = True
            wanted = self._wanted(entry, tokens)
            if wanted <= self.manager.pool().num_free:
                self._offload(wanted)
            self._append(entry, tokens)
            self._show(entry)
            self._in_critical_section = False
        entry.tokens = tokens
        if certain > entry.computed:
            self._publish(entry, certain)
            self._in_critical_section = False

    def hash_blocks(self, seq: ScheduledSequence) -> None:
        """Publish the blocks that this step filled.

        Newer engines call this after each step, before or after adding `num_scheduled_tokens` to `num_cached_tokens`.

        Raises:
            UnknownSequenceError: it has no blocks from here.
            SequenceStateError: it has lost blocks: deallocate it, and compute it again.
            InvalidArgumentError: more tokens would be computed than the sequence has.
        """
        if self._in_critical_section:
            self._recover_from_interrupt()
        entry = self._whole(seq)
        computed = seq.num_cached_tokens
        if computed == entry.computed:
            computed += seq.num_scheduled_tokens
        if computed > entry.tokens:
            raise InvalidArgumentError(f"{computed} tokens are computed, the sequence has blocks for {entry.tokens}")
        if computed > entry.computed:
            self._publish(entry, computed)
            self._in_critical_section = False

    def defragment(self, goal: Goal = "dense", number: int = 0, *, max_moves: int = 512) -> int:
        """Move blocks of the KV tensor towards a goal, and update the block tables of their sequences.

        Call it between steps: after the model was queued with one list of block tables, before the next list is read.

        Args:
            goal: `"max_id"`: no block above `number`. `"free_tail"`: none among the last `number` blocks. `"dense"`: as
                low as possible, with up to `number` ids of slack.
            number: see above, in blocks.
            max_moves: maximum number of blocks to move.

        Returns:
            The number of blocks moved, cached ones included; call again until it is 0.

        Raises:
            SequenceStateError: no KV tensor is attached.
            InvalidArgumentError: there is no such goal.
        """
        if self.executor is None:
            raise SequenceStateError("blocks must move, but no KV tensor is attached")
        self._begin()
        moved = self._defragment(goal, number, max_moves)
        self._in_critical_section = False
        return moved

    # ---- after an exception ----

    def _begin(self) -> None:
        """Begin a call that takes from the manager, after recovering from an interrupted one."""
        if self._in_critical_section:
            self._recover_from_interrupt()
        self._in_critical_section = True

    def _recover_from_interrupt(self) -> None:
        """Return what an interrupted call had taken, and sync every sequence with the manager."""
        self._end_decisions(self.manager.fail)  # it is unknown what landed
        self._land(())  # pending decisions, before blocks are reused
        for pin, _ in self._pins:
            with suppress(UnknownTicketError):
                self.manager.pins.unpin(pin)
        self._pins.clear()
        handles = {entry.handle for entry in self._running.values()}
        for sequence in self._opened:
            if int(sequence) not in handles:
                with suppress(UnknownSequenceError):
                    self.manager.free([int(sequence)])
        self._opened.clear()
        for entry in list(self._running.values()):
            self._restore(entry)
        self._in_critical_section = False

    def _restore(self, entry: _Running) -> None:
        """Sync a sequence with the manager."""
        try:
            self._show(entry)
            entry.named = self.manager.num_tokens(entry.handle)
            self.manager.block_tables([entry.handle])
        except UnknownSequenceError:  # it was being deallocated
            self._forget(entry)
        except SequenceStateError:
            self._lost.add(entry.handle)

    def _end_decisions(self, end: Callable[[int], NDArray[np.uint64]]) -> set[int]:
        """End the tickets of pending decisions. Returns the sequences that lost blocks."""
        gone: set[int] = set()
        for decision in self._decisions:
            with suppress(UnknownTicketError):
                gone.update(end(decision.ticket).tolist())
        self._lost |= gone
        self._decisions.clear()
        return gone

    def _forget(self, entry: _Running) -> None:
        """Drop a sequence that the manager has freed."""
        self._lost.discard(entry.handle)
        entry.sequence.block_table.clear()
        self._running.pop(id(entry.sequence), None)

    # ---- internals ----

    def _defragment(self, goal: Goal, number: int, max_moves: int) -> int:
        # The previous step's blocks count as being filled, but its writes are queued, and moves run after them.
        self._land(())
        self._land(())
        before = self.stats().moved_blocks
        if not self.manager.defrag.run(goal, number, max_moves=max_moves).planned:
            return 0
        self._land(())
        for entry in self._running.values():
            self._show(entry)
        return self.stats().moved_blocks - before

    def _make_manager(self, host_blocks: int) -> _core.BlockManager:
        # Pins last for one call and hold only a prompt's cached blocks, never all blocks.
        max_pinned = (self.num_blocks - 0.5) / self.num_blocks if self.num_blocks > 0 else 0.0
        return _core.BlockManager(
            block_size=self.block_size,
            device_blocks=self.num_blocks,
            host_blocks=host_blocks,
            watermark=0.0,
            prefix_caching=_core.PrefixCaching(host=host_blocks > 0, host_copies_per_step=0, max_pinned=max_pinned),
        )

    def _check_new(self, seq: NanoSequence, tokens: int) -> None:
        if seq.block_table or id(seq) in self._running:
            raise InvalidArgumentError(f"the sequence has {len(seq.block_table)} blocks already")
        wanted, counted = self._blocks(tokens), getattr(seq, "num_blocks", None)
        if counted not in {None, wanted}:
            raise InvalidArgumentError(
                f"the sequence counts {counted} blocks for {tokens} tokens, of {self.block_size} it takes {wanted}"
            )

    def _entry(self, seq: NanoSequence) -> _Running:
        entry = self._running.get(id(seq))
        if entry is None:
            raise _unknown(seq)
        return entry

    def _whole(self, seq: NanoSequence) -> _Running:
        entry = self._entry(seq)
        if entry.handle in self._lost:
            raise SequenceStateError(f"a sequence of {len(seq)} tokens has lost blocks: it can only be deallocated")
        return entry

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _wanted(self, entry: _Running, tokens: int) -> int:
        """Return how many blocks a sequence of `tokens` tokens lacks."""
        if tokens < entry.tokens:
            raise InvalidArgumentError(f"the sequence has {tokens} tokens, it had {entry.tokens}")
        return self._blocks(tokens - entry.slots)

    @staticmethod
    def _certain(entry: _Running, tokens: int) -> int:
        """Return how many tokens are certainly computed: all earlier ones, once a token was sampled after them."""
        return entry.tokens if tokens > entry.tokens else entry.computed

    def _prompt(self, seq: NanoSequence) -> list[int] | _core.HashedPrompt:
        """Return a sequence's tokens as a prompt."""
        tokens, extras = seq.token_ids[: len(seq)], getattr(seq, "extras", None)
        return self.manager.prefix.hash(tokens, extras=extras) if extras else tokens

    def _fit(self, prompt: list[int] | _core.HashedPrompt) -> int:
        """Return a prompt's cached blocks, or -1 if it does not fit. Offloads the blocks that it will evict."""
        if not self.manager.can_allocate(prompt):
            return -1
        blocks = self._blocks(len(prompt))
        if self._short(blocks):
            # Its own cached blocks stay in place.
            pin, held = keep(self._pins, self.manager.pins.pin_prompt, prompt)
            try:
                self._offload(blocks - held // self.block_size)
            finally:
                self.manager.pins.unpin(pin)
                self._pins.clear()
        return self._cached(prompt)

    def _cached(self, prompt: list[int] | _core.HashedPrompt) -> int:
        return self.manager.prefix.lookup(prompt).tokens // self.block_size

    def _short(self, blocks: int) -> int:
        """Return how many cached blocks taking `blocks` would evict; 0 without host blocks to copy them to."""
        if not self.manager.pool("host").num_blocks:
            return 0
        return max(0, blocks - len(self.manager.pool().free_ids(blocks)))

    def _offload(self, blocks: int) -> None:
        """Copy the blocks that taking `blocks` will evict to the host."""
        if (short := self._short(blocks)) and self.manager.prefix.offload(short):
            self._land(())

    def _land(self, handles: Iterable[int]) -> None:
        """Carry out pending decisions.

        Raises:
            SequenceStateError: one of these sequences has lost blocks; it can only be freed.
        """
        decision = keep(self._decisions, partial(self.manager.take_decision, now=time.monotonic()))
        lost: list[_core.Pairs] | None = None
        try:
            if not len(decision):
                lost = []
            elif self.executor is None:
                raise SequenceStateError(f"{len(decision)} blocks must move, but no KV tensor is attached")
            else:
                lost = self.executor.execute(decision)
        finally:
            end = self.manager.fail if lost is None else partial(self.manager.complete, lost=lost)
            gone = self._end_decisions(end).intersection(handles)
        if gone:
            raise SequenceStateError(f"{sum(map(len, lost))} of {len(decision)} blocks did not reach the device")

    def _publish(self, entry: _Running, computed: int) -> None:
        """Record that the first tokens of a sequence are computed."""
        entry.computed = max(entry.computed, computed)
        if entry.computed >= entry.full:
            self._in_critical_section = True
            self._append(entry, entry.computed)
            self._land(())
            self.manager.mark_computed([entry.handle], [entry.computed])
            self._show(entry)
            entry.full = (entry.computed // self.block_size + 1) * self.block_size

    def _append(self, entry: _Running, tokens: int) -> None:
        """Append tokens up to this number in the manager."""
        if (new := tokens - entry.named) > 0:
            self.manager.append([entry.handle], new, token_ids=entry.sequence.token_ids[entry.named : tokens])
            entry.named = tokens

    def _show(self, entry: _Running) -> None:
        """Write a sequence's block table into the engine's list."""
        table = self.manager.block_table(entry.handle).tolist()
        entry.sequence.block_table[:] = table
        entry.slots = len(table) * self.block_size


def _unknown(seq: NanoSequence) -> UnknownSequenceError:
    return UnknownSequenceError(f"a sequence of {len(seq)} tokens has no blocks from here")
