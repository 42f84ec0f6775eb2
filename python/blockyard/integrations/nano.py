"""Drop-in for the block manager of nano engines: small engines whose block manager is a class of about 100 lines.

The scheduler of such an engine makes one `BlockManager(num_blocks, block_size)` and asks it for blocks, sequence by
sequence; the model runner reads each sequence's `block_table`. One assignment puts this one in its place:

    nanovllm.engine.scheduler.BlockManager = blockyard.integrations.nano.BlockManager

Both kinds in use are served. *Older* engines take `can_allocate(seq)` as a bool and call `allocate(seq)`; what they
have computed shows by the token that they append to a sequence. *Newer* ones take it as the number of cached blocks,
pass that to `allocate(seq, n)`, and call `hash_blocks(seq)` after each step. Nothing of the engine is imported.
"""

from __future__ import annotations

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
from blockyard.workers import keep

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BlockManager", "CachedBlocks", "Goal", "NanoSequence", "ScheduledSequence"]


KIND: Final = "kv layers blocks tokens heads dim"
"""Dimensions of the KV tensor, outermost first."""

Goal: TypeAlias = Literal["max_id", "free_tail", "dense"]
"""A goal of `BlockManager.defragment`; see `manager.defrag.run`."""


class NanoSequence(Protocol):
    """What is read and written of an engine's sequence; its length is the number of its tokens."""

    token_ids: list[int]
    block_table: list[int]
    num_cached_tokens: int

    def __len__(self) -> int: ...


class Carrier(Protocol):
    """What carries decisions out: a `CacheEngine`, or something around one."""

    def execute(self, decision: _core.StepDecision) -> list[_core.Pairs]:
        """Carry out a decision before anything else is queued; returns the pairs that did not land."""


class ScheduledSequence(NanoSequence, Protocol):
    """A sequence of a newer engine."""

    num_scheduled_tokens: int


class CachedBlocks(int):
    """How many of a sequence's blocks are cached, or -1 if it does not fit; true whenever it fits.

    Older engines ask whether it is true, newer ones compare it with -1 and count with it.
    """

    def __bool__(self) -> bool:
        return self >= 0


@dataclass(slots=True)
class _Running:
    """A sequence that has blocks; a step looks at nothing else where it fills no block."""

    # Kept, so that its id() stays its own.
    sequence: NanoSequence
    handle: int
    # Tokens that have slots; the manager gets them when a block is full, or a new one is needed.
    tokens: int
    named: int
    computed: int
    # Slots in its blocks, and how many tokens are computed when the next block is full.
    slots: int
    full: int


class BlockManager:
    """Gives sequences their blocks, and shares those of equal prefixes.

    A prompt's last block is never taken from the cache, so there is always a token to compute. Only blocks whose tokens
    are computed are shared; two that were computed twice become one, so block tables may change at any call here: the
    lists are written in place, and to be read when a step is run.

    Any call may raise, or be interrupted: make it again, or `deallocate` its sequence. Sequences that lost blocks then,
    and those whose moves fail, have no room for another token: engines preempt them, and compute them again.

    Args:
        num_blocks: blocks of the KV tensor.
        block_size: token slots in a block.
        kv_cache: see `attach`, which is called with it.
        host_blocks: as for `attach`.
        moves: as for `attach`.

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
        # What a call has taken from the manager; if it is torn, it raised before it gave all of that back.
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
        """Let blocks be copied, now that the engine has its KV tensor; what was cached before is forgotten.

        Blocks that are about to be evicted are copied to the host first. A prompt finds them there, and `allocate`
        brings them back. Whenever a sequence leaves, blocks move into the lowest holes (`defragment`). All copies are
        queued before the call that decides on them returns, on the current CUDA stream if the tensor is on a CUDA
        device.

        Args:
            kv_cache: the engine's own, `[2, layers, blocks, block_size, heads, dim]`, any dtype and device. One process
                holds all of it: with tensor parallelism leave it out.
            host_blocks: blocks that the host keeps; 0 for none.
            moves: most blocks that move when a sequence leaves; 0 for none.

        Raises:
            SequenceStateError: sequences have blocks already.
            InvalidArgumentError: `host_blocks` or `moves` is negative.
            LayoutError: the tensor has another shape, or other numbers of blocks or slots.
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
        """Blocks that no sequence uses, rising; those count that are cached."""
        used = set(self.used_block_ids)
        return [block for block in range(self.num_blocks) if block not in used]

    @property
    def used_block_ids(self) -> set[int]:
        """Blocks that sequences use."""
        return {block for entry in self._running.values() for block in entry.sequence.block_table}

    def stats(self) -> _core.ManagerStats:
        """Return the counters: hits, blocks swapped out, loaded, merged, evicted."""
        return self.manager.stats()

    # ---- prompts ----

    def can_allocate(self, seq: NanoSequence) -> CachedBlocks:
        """Say whether there are blocks for all tokens of a sequence, and how many of its blocks are cached.

        With host blocks, what the sequence is about to evict is copied to the host here.
        """
        self._begin()
        fit = CachedBlocks(self._fit(_tokens(seq)))
        self._in_critical_section = False
        return fit

    def allocate(self, seq: NanoSequence, num_cached_blocks: int | None = None) -> None:
        """Give a sequence blocks for all its tokens: writes its `block_table` and `num_cached_tokens`.

        Args:
            seq: a sequence without blocks.
            num_cached_blocks: what `can_allocate` has just said; older engines do not pass it.

        Raises:
            OutOfBlocksError: too few blocks are free.
            InvalidArgumentError: the sequence has blocks, counts them in another size, or has another number cached.
            SequenceStateError: a cached block could not be brought back from the host.
        """
        tokens = _tokens(seq)
        self._begin()
        self._check_new(seq, len(tokens))
        if num_cached_blocks is None:
            self._fit(tokens)
        elif (cached := self._cached(tokens)) != num_cached_blocks and self.manager.can_allocate(tokens):
            # Making room on the host a second time could evict what `can_allocate` has counted.
            raise InvalidArgumentError(f"num_cached_blocks is {num_cached_blocks}, {cached} are cached: ask again")
        sequence = keep(self._opened, self.manager.allocate, tokens)
        handle, hit = int(sequence), sequence.cached_tokens
        try:
            self._land([handle])
            entry = _Running(seq, handle, len(tokens), len(tokens), hit, 0, hit + self.block_size)
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
        """Take a sequence's blocks back: empties its `block_table`, and sets `num_cached_tokens` to 0.

        A sequence that has none is left as it is.

        Raises:
            UnknownSequenceError: its blocks are not from here.
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
        """Say whether there are blocks for the tokens that a sequence got since the last call.

        There are none for a sequence that has lost blocks: deallocate it, and compute it again.

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
        """Make room for the tokens that a sequence got since the last call: extends its `block_table` where needed.

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
            self._tell(entry, tokens)
            self._show(entry)
            self._in_critical_section = False
        entry.tokens = tokens
        if certain > entry.computed:
            self._publish(entry, certain)
            self._in_critical_section = False

    def hash_blocks(self, seq: ScheduledSequence) -> None:
        """Let others find the blocks that this step has filled.

        Newer engines call it after each step, before or after they add `num_scheduled_tokens` to `num_cached_tokens`.

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
        """Move blocks of the KV tensor towards a goal, and rewrite the block tables of the sequences that have them.

        Call it between steps: after the model was queued with one list of block tables, before the next is read.

        Args:
            goal: `"max_id"`: no block above `number`. `"free_tail"`: none among the last `number` blocks. `"dense"`: as
                low as can be, give or take `number` ids.
            number: see above, in blocks.
            max_moves: most blocks to move.

        Returns:
            Blocks that have moved, cached ones too; call again until there are none.

        Raises:
            SequenceStateError: no KV tensor is attached.
            InvalidArgumentError: there is no such goal.
        """
        if self.executor is None:
            raise SequenceStateError("blocks are to be moved, and no KV tensor is attached")
        self._begin()
        moved = self._defragment(goal, number, max_moves)
        self._in_critical_section = False
        return moved

    # ---- after an exception ----

    def _begin(self) -> None:
        """Begin a call that takes from the manager, after the last one has ended or is mended."""
        if self._in_critical_section:
            self._recover_from_interrupt()
        self._in_critical_section = True

    def _recover_from_interrupt(self) -> None:
        """Give back what a call that raised had taken, and have every sequence as the manager has it."""
        self._end_decisions(self.manager.fail)  # what landed is not known
        self._land(())  # what was decided before blocks change hands
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
        """Have a sequence as the manager has it."""
        try:
            self._show(entry)
            entry.named = self.manager.num_tokens(entry.handle)
            self.manager.block_tables([entry.handle])
        except UnknownSequenceError:  # it was being deallocated
            self._forget(entry)
        except SequenceStateError:
            self._lost.add(entry.handle)

    def _end_decisions(self, end: Callable[[int], NDArray[np.uint64]]) -> set[int]:
        """End the ticket of what was decided; give the sequences that have lost blocks."""
        gone: set[int] = set()
        for decision in self._decisions:
            with suppress(UnknownTicketError):
                gone.update(end(decision.ticket).tolist())
        self._lost |= gone
        self._decisions.clear()
        return gone

    def _forget(self, entry: _Running) -> None:
        """Forget a sequence that the manager has freed."""
        self._lost.discard(entry.handle)
        entry.sequence.block_table.clear()
        self._running.pop(id(entry.sequence), None)

    # ---- below the surface ----

    def _defragment(self, goal: Goal, number: int, max_moves: int) -> int:
        # What the step before wrote counts as being filled; here it is queued, and moves come after it.
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
        # Pins last for one call and hold a prompt's cached blocks: never all blocks.
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
        """Blocks that a sequence of `tokens` tokens lacks."""
        if tokens < entry.tokens:
            raise InvalidArgumentError(f"the sequence has {tokens} tokens, it had {entry.tokens}")
        return self._blocks(tokens - entry.slots)

    @staticmethod
    def _certain(entry: _Running, tokens: int) -> int:
        """Tokens that are computed for certain: all there were, once a token was sampled behind them."""
        return entry.tokens if tokens > entry.tokens else entry.computed

    def _fit(self, tokens: list[int]) -> int:
        """Cached blocks of a prompt, or -1 if it does not fit; what it will evict is on the host then."""
        if not self.manager.can_allocate(tokens):
            return -1
        blocks = self._blocks(len(tokens))
        if self._short(blocks):
            # Its own cached blocks stay where they are.
            pin, held = keep(self._pins, self.manager.pins.pin_prompt, tokens)
            try:
                self._offload(blocks - held // self.block_size)
            finally:
                self.manager.pins.unpin(pin)
                self._pins.clear()
        return self._cached(tokens)

    def _cached(self, tokens: list[int]) -> int:
        return self.manager.prefix.lookup(tokens).tokens // self.block_size

    def _short(self, blocks: int) -> int:
        """Cached blocks that taking `blocks` would evict; none count where there is no host to copy them to."""
        if not self.manager.pool("host").num_blocks:
            return 0
        return max(0, blocks - len(self.manager.pool().free_ids(blocks)))

    def _offload(self, blocks: int) -> None:
        """Copy to the host what taking `blocks` will evict."""
        if (short := self._short(blocks)) and self.manager.prefix.offload(short):
            self._land(())

    def _land(self, handles: Iterable[int]) -> None:
        """Carry out what was decided.

        Raises:
            SequenceStateError: one of these sequences has lost blocks; it can only be freed.
        """
        decision = keep(self._decisions, self.manager.take_decision)
        lost: list[_core.Pairs] | None = None
        try:
            if not len(decision):
                lost = []
            elif self.executor is None:
                raise SequenceStateError(f"{len(decision)} blocks are to be moved, and no KV tensor is attached")
            else:
                lost = self.executor.execute(decision)
        finally:
            end = self.manager.fail if lost is None else partial(self.manager.complete, lost=lost)
            gone = self._end_decisions(end).intersection(handles)
        if gone:
            raise SequenceStateError(f"{sum(map(len, lost))} of {len(decision)} blocks did not reach the device")

    def _publish(self, entry: _Running, computed: int) -> None:
        """Note that the first tokens of a sequence are computed."""
        entry.computed = max(entry.computed, computed)
        if entry.computed >= entry.full:
            self._in_critical_section = True
            self._tell(entry, entry.computed)
            self._land(())
            self.manager.mark_computed([entry.handle], [entry.computed])
            self._show(entry)
            entry.full = (entry.computed // self.block_size + 1) * self.block_size

    def _tell(self, entry: _Running, tokens: int) -> None:
        """Append the tokens up to these."""
        if (new := tokens - entry.named) > 0:
            self.manager.append([entry.handle], new, token_ids=entry.sequence.token_ids[entry.named : tokens])
            entry.named = tokens

    def _show(self, entry: _Running) -> None:
        """Write a sequence's block table, into the list that the engine has."""
        table = self.manager.block_table(entry.handle).tolist()
        entry.sequence.block_table[:] = table
        entry.slots = len(table) * self.block_size


def _tokens(seq: NanoSequence) -> list[int]:
    return seq.token_ids[: len(seq)]


def _unknown(seq: NanoSequence) -> UnknownSequenceError:
    return UnknownSequenceError(f"a sequence of {len(seq)} tokens has no blocks from here")
