"""`ReferenceManager`: the behavior of `BlockManager`, written as simply as possible.

It stores only tables and leases, and recounts references and free blocks on every call. This is slow, but leaves little
room for bugs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import AllocStatus, Fit, Pairs, StepDecision
from blockyard.errors import (
    InvalidArgumentError,
    InvariantError,
    MappingError,
    SequenceStateError,
    UnknownSequenceError,
    UnknownTicketError,
)
from blockyard.layout.sizes import as_int
from blockyard.testing.interfaces import Config, Counts, Handles, TierName
from blockyard.testing.model_state import ModelBlock, ModelState, ModelStep, Row

__all__ = ["ReferenceManager"]

TIERS: Final[tuple[TierName, ...]] = ("device", "host", "external")
KINDS: Final = ("swap_out", "swap_in", "copy")


class _BusyError(SequenceStateError):
    """The call is refused now but would succeed in a later step."""


class ReferencePool(NamedTuple):
    """The blocks of one tier."""

    num_blocks: int
    num_free: int
    reserved: int


class ReferenceStats(NamedTuple):
    """The number of sequences, and the open tickets."""

    sequences: int
    open_tickets: list[int]


class ReferenceManager:
    """A model of `blockyard.BlockManager` with the same calls, errors and block ids; only its handles differ.

    It has no prefix cache.

    Args:
        block_size: number of token slots in a block.
        device_blocks: number of device blocks.
        host_blocks: number of host blocks.
        external_blocks: number of slots of the external tier.
        watermark: fraction of the device blocks that admission keeps free.

    Raises:
        InvalidArgumentError: a size or the watermark is out of range.

    Example:
        >>> from blockyard.testing import ReferenceManager
        >>> manager = ReferenceManager(block_size=4, device_blocks=3)
        >>> first, second = manager.allocate(counts=[5, 4])
        >>> manager.block_table(first).tolist(), manager.block_table(second).tolist(), manager.pool().num_free
        ([0, 1], [2], 0)
    """

    def __init__(
        self,
        *,
        block_size: int,
        device_blocks: int,
        host_blocks: int = 0,
        external_blocks: int = 0,
        watermark: float = 0.01,
    ) -> None:
        block_size, device_blocks = as_int("block_size", block_size), as_int("device_blocks", device_blocks)
        host_blocks, external_blocks = as_int("host_blocks", host_blocks), as_int("external_blocks", external_blocks)
        if block_size < 1 or device_blocks < 1 or min(host_blocks, external_blocks) < 0 or not 0 <= watermark < 1:
            raise InvalidArgumentError(
                f"block_size {block_size}, blocks {device_blocks}, {host_blocks}, {external_blocks}, "
                f"watermark {watermark}: a size is out of range"
            )
        self.block_size = block_size
        self._watermark = int(watermark * device_blocks)
        self._state = ModelState(Config(block_size, device_blocks, host_blocks, external_blocks))
        self._handles = 0

    # ---- questions ----

    def pool(self, tier: TierName = "device") -> ReferencePool:
        """Return the blocks of a tier."""
        if tier not in TIERS:
            raise InvalidArgumentError(f"tier is {tier!r}, must be one of {TIERS}")
        reserved = self._watermark if tier == "device" else 0
        return ReferencePool(self._state.blocks[tier], len(self._state.free_blocks(tier)), reserved)

    def stats(self) -> ReferenceStats:
        """Return the model's counters."""
        return ReferenceStats(len(self._state.sequences), list(self._state.running))

    def num_tokens(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""
        return self._get(sequence).length

    def tier(self, sequence: int) -> TierName:
        """Return the tier of a sequence's blocks."""
        return self._get(sequence).tier

    def block_table(self, sequence: int) -> NDArray[np.int32]:
        """Return the blocks of a sequence in its current tier, int32 `[blocks]`."""
        return np.array(self._get(sequence).table, dtype=np.int32)

    def block_tables(self, sequences: Handles) -> NDArray[np.int32]:
        """Return the tables of sequences on the device, int32 `[n, max_blocks]`, padded with 0."""
        lengths = [len(self._get(handle).table) for handle in _ints(sequences)]
        tables = [self._readable(handle).table for handle in _ints(sequences)]
        out = np.zeros((len(tables), max(lengths, default=0)), dtype=np.int32)
        for row, table in zip(out, tables, strict=True):
            row[: len(table)] = table
        return out

    def slot_mapping(self, sequence: int, first: int, last: int) -> NDArray[np.int64]:
        """Return the slots of tokens `[first, last)` of a sequence on the device, int64 `[last - first]`."""
        length, first, last = self._get(sequence).length, as_int("first", first), as_int("last", last)
        if not 0 <= first <= last <= length:
            raise InvalidArgumentError(f"tokens {first} to {last} of a sequence of {length}")
        return np.array(self._slots(self._readable(sequence), first, last), dtype=np.int64)

    def check(self) -> None:
        """Check that tables name existing blocks, and enough of them."""
        for handle, row in self._state.sequences.items():
            if len(row.table) * self.block_size < row.length or len(set(row.table)) < len(row.table):
                raise InvariantError(f"sequence {handle}: {row.length} tokens in blocks {row.table}")
            if not all(0 <= block < self._state.blocks[row.tier] for block in row.table):
                raise InvariantError(f"sequence {handle}: {row.tier} blocks {row.table}")

    # ---- admission, growth, end ----

    def can_allocate(self, prompt: int, *, lookahead: int = 0) -> Fit:
        """Return whether a sequence of `prompt` new tokens can be admitted above the watermark."""
        tokens = as_int("prompt", prompt) + as_int("lookahead", lookahead)
        return self._admit(self._state.count(tokens), self._state.available("device"))

    def allocate(self, *, counts: Counts) -> NDArray[np.uint64]:
        """Open one sequence per token count."""
        lengths = _ints(counts)
        self._state.require("device", sum(map(self._state.count, lengths)))
        handles = []
        for length in lengths:
            table = self._state.take("device", self._state.count(length))
            handles.append(self._open(Row("device", table, length, self._state.ticket)))
        return np.array(handles, dtype=np.uint64)

    def fork(
        self,
        sequence: int,
        count: int | None = None,
        *,
        shared_tokens: int | None = None,
        num_tokens: int | None = None,
    ) -> NDArray[np.uint64] | int:
        """Open sequences that share all blocks of another, or one that shares its first full blocks."""
        if shared_tokens is not None and num_tokens is not None:
            shared_tokens, num_tokens = as_int("shared_tokens", shared_tokens), as_int("num_tokens", num_tokens)
            return self._fork_prefix(sequence, shared_tokens, num_tokens)
        parent = self._intact(sequence)
        children = [
            Row(parent.tier, list(parent.table), parent.length, parent.written, parent.ticket, parent.moving)
            for _ in range(1 if count is None else count)
        ]
        handles = [self._open(child) for child in children]
        return handles[0] if count is None else np.array(handles, dtype=np.uint64)

    def _fork_prefix(self, sequence: int, shared_tokens: int, num_tokens: int) -> int:
        parent = self._readable(sequence)
        if shared_tokens % self.block_size or shared_tokens > min(parent.length, num_tokens):
            raise InvalidArgumentError(f"shared_tokens is {shared_tokens}, of {parent.length} and {num_tokens}")
        kept = shared_tokens // self.block_size
        wanted = self._state.count(num_tokens) - kept
        self._state.require("device", wanted)
        table = parent.table[:kept] + self._state.take("device", wanted)
        return self._open(Row("device", table, num_tokens, self._state.ticket, parent.ticket, parent.moving))

    def can_append(self, sequences: Handles, num_tokens: Counts | None = None, *, lookahead: int = 0) -> Fit:
        """Return whether `append` has enough blocks."""
        new, copies = self._blocks_to_append(sequences, num_tokens, lookahead)
        # New blocks come on top of the current ones.
        least = new + max((len(self._get(handle).table) for handle in _ints(sequences)), default=0)
        return _fit(new + copies, self._state.available("device"), self._state.blocks["device"], least)

    def _blocks_to_append(self, sequences: Handles, num_tokens: Counts | None, lookahead: int) -> tuple[int, int]:
        """Count new blocks, and copies of shared ones."""
        handles, lookahead = _ints(sequences), as_int("lookahead", lookahead)
        writers: Counter[int] = Counter()
        new = 0
        for (handle, row), count in zip(self._batch(handles), _counts(handles, num_tokens), strict=True):
            self._readable(handle)
            if row.length + count + lookahead > 0xFFFF_FFFF:
                raise InvalidArgumentError(f"length with lookahead is {row.length + count + lookahead}")
            written = [row.table[i] for i in self._written(row, count + lookahead)]
            shared = [block for block in written if self._state.refs(ModelBlock("device", block)) > 1]
            if shared and row.written == self._state.ticket:
                raise SequenceStateError(f"sequence {handle} has tokens that this step is yet to write")
            writers.update(shared)
            new += max(0, self._state.count(row.length + count + lookahead) - len(row.table))
        # The last owner of a block writes in place.
        return new, sum(min(n, self._state.refs(ModelBlock("device", block)) - 1) for block, n in writers.items())

    def append(self, sequences: Handles, num_tokens: Counts | None = None, *, lookahead: int = 0) -> NDArray[np.int64]:
        """Append tokens to a batch of sequences. Returns their slots."""
        self._state.require("device", sum(self._blocks_to_append(sequences, num_tokens, lookahead)))
        handles, lookahead = _ints(sequences), as_int("lookahead", lookahead)
        slots: list[int] = []
        for handle, count in zip(handles, _counts(handles, num_tokens), strict=True):
            row = self._state.sequences[handle]
            for i in self._written(row, count + lookahead):
                block = ModelBlock("device", row.table[i])
                if self._state.refs(block) > 1:
                    self._copy_on_write(row, i)
                    continue
                # Before a truncation the block may have been full and copied to another tier.
                self._state.unlink(block)
                if "drain" in self._state.uses("device")[block.id]:
                    self._state.step.reuses_drained = True
            end = row.length + count
            row.table += self._state.take("device", max(0, self._state.count(end + lookahead) - len(row.table)))
            slots += self._slots(row, row.length, end)
            row.length = end
            row.written = self._state.ticket
            # A step waits for the loads of the rows that it computes, and later steps run after it.
            row.moving = row.moving and count == 0
        return np.array(slots, dtype=np.int64)

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Truncate a sequence to its first tokens; free the blocks that hold none of them."""
        row, num_tokens = self._intact(sequence), as_int("num_tokens", num_tokens)
        if not 0 <= num_tokens <= row.length:
            raise InvalidArgumentError(f"number of tokens to keep is {num_tokens}, of {row.length}")
        if row.written == self._state.ticket:
            raise SequenceStateError(f"sequence {sequence} has tokens that this step is yet to write")
        row.length = num_tokens
        while len(row.table) > self._state.count(num_tokens):
            self._state.drop(row, len(row.table) - 1)

    def free(self, sequences: Handles) -> None:
        """Free sequences."""
        for handle, row in list(self._batch(_ints(sequences))):
            while row.table:
                self._state.drop(row, 0)
            del self._state.sequences[handle]

    # ---- moves between tiers ----

    def can_swap_out(self, sequences: Handles, to: TierName = "host") -> Fit:
        """Return whether the tier has room and nothing else is moving the sequences."""
        handles = _ints(sequences)
        return self._room(to, lambda: self._sources(handles, self._origin_out(handles, to), to))

    def swap_out(self, sequences: Handles, to: TierName = "host") -> None:
        """Move sequences away from the device: to the host, or from device or host to the external tier."""
        handles = _ints(sequences)
        self._move(handles, self._origin_out(handles, to), to)

    def can_swap_in(self, sequences: Handles, to: TierName = "device", *, lookahead: int = 0) -> Fit:
        """Return whether the sequences fit; on the device with one more token each, above the watermark."""
        handles, lookahead = _ints(sequences), as_int("lookahead", lookahead)
        if to != "device":
            return self._room(to, lambda: self._sources(handles, self._origin_in(handles, to), to))
        try:
            origin = self._origin_in(handles, to)
            wanted, held = self._sources(handles, origin, to)
        except SequenceStateError as error:
            return self._unmovable(to, error)
        return self._can_return(handles, origin, (wanted, held), lookahead)

    def swap_in(self, sequences: Handles, to: TierName = "device") -> None:
        """Move sequences towards the device: to it, or from the external tier to the host."""
        handles = _ints(sequences)
        self._move(handles, self._origin_in(handles, to), to)

    # ---- steps and tickets ----

    def take_decision(self) -> StepDecision:
        """End the step."""
        step, ticket = self._state.step, self._state.ticket
        self._state.step, self._state.ticket = ModelStep(), ticket + 1
        self._state.running[ticket] = step
        drains = [t for t, s in self._state.running.items() if any(lease.use == "drain" for lease in s.leases)]
        order = sorted(step.transfers, key=lambda k: (KINDS.index(k[0]), TIERS.index(k[1]), TIERS.index(k[2])))
        transfers = [(k[0], Pairs(k[1], k[2], np.array(step.transfers[k], dtype=np.int64))) for k in order]
        return StepDecision(ticket, transfers, after=drains if step.reuses_drained else [])

    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> NDArray[np.uint64]:
        """End a ticket, given its lost pairs. Returns the sequences that lost bytes."""
        if ticket not in self._state.running:
            raise UnknownTicketError(f"ticket {ticket} is not open")
        step = self._state.running[ticket]
        written = {lease.block for lease in step.leases if lease.use == "write"}
        gone = {ModelBlock(pairs.dst, int(to)) for pairs in lost for to in pairs.ids[:, 1]}
        if not gone <= written:
            raise MappingError(f"ticket {ticket} does not write all of {sorted(gone)}")
        # Copies of lost blocks are lost too.
        failed = {(ticket, block) for block in gone}
        gone |= {block for block, transfers in self._state.unlanded.items() if transfers & failed}
        for block in gone:
            self._state.unlink(block)
        hit = [h for h, row in self._state.sequences.items() if any(ModelBlock(row.tier, b) in gone for b in row.table)]
        for handle in hit:
            self._state.sequences[handle].lost = True
        del self._state.running[ticket]
        for block, transfers in self._state.unlanded.items():
            self._state.unlanded[block] = {(other, target) for other, target in transfers if other != ticket}
        return np.array(hit, dtype=np.uint64)

    # ---- sequences ----

    def _open(self, row: Row) -> int:
        self._handles += 1
        self._state.sequences[self._handles] = row
        return self._handles

    def _get(self, handle: int) -> Row:
        if int(handle) not in self._state.sequences:
            raise UnknownSequenceError(f"sequence {handle} is unknown")
        return self._state.sequences[int(handle)]

    def _batch(self, handles: list[int]) -> Iterator[tuple[int, Row]]:
        for i, handle in enumerate(handles):
            row = self._get(handle)
            if handle in handles[:i]:
                raise InvalidArgumentError(f"sequence {handle} is named twice in one call")
            yield handle, row

    def _intact(self, handle: int) -> Row:
        row = self._get(handle)
        if row.lost:
            raise SequenceStateError(f"sequence {handle} lost bytes and can only be freed")
        return row

    def _readable(self, handle: int) -> Row:
        """Return a sequence whose blocks are on the device, or will be after this step's loads."""
        row = self._intact(handle)
        if row.tier != "device":
            raise SequenceStateError(f"sequence {handle} is in the {row.tier} tier")
        if row.moving and row.ticket in self._state.running:
            raise SequenceStateError(f"sequence {handle} is still moving (ticket {row.ticket})")
        return row

    def _slots(self, row: Row, first: int, last: int) -> list[int]:
        size = self.block_size
        return [row.table[i // size] * size + i % size for i in range(first, last)]

    def _written(self, row: Row, count: int) -> range:
        """Return the existing table entries that the next `count` tokens and drafts are written to."""
        first = row.length // self.block_size
        return range(first, min(self._state.count(row.length + count), len(row.table)) if count else first)

    def _copy_on_write(self, row: Row, index: int) -> None:
        if index >= self._state.count(row.length):
            # Lookahead without tokens yet: nothing to copy.
            (own_id,) = self._state.take("device", 1)
            row.table[index] = own_id
            return
        shared, own = ModelBlock("device", row.table[index]), ModelBlock("device", self._state.take("device", 1)[0])
        self._state.transfer("copy", shared, own, "read")
        row.table[index] = own.id
        row.moving = row.moving and row.ticket == self._state.ticket
        row.ticket = self._state.ticket

    # ---- moves ----

    def _admit(self, wanted: int, free: int, least: int | None = None) -> Fit:
        total = max(0, self._state.blocks["device"] - self._watermark)
        fit = _fit(wanted, max(0, free - self._watermark), total, least)
        if fit and free < self._watermark:
            return Fit(AllocStatus.LATER, fit.blocks, fit.free)
        return fit

    def _origin_out(self, handles: list[int], to: TierName) -> TierName:
        """Return the tier that sequences leave for `to`, away from the device."""
        if to not in ("host", "external"):
            raise InvalidArgumentError(f"to is {to!r}, must be 'host' or 'external'")
        origin = self.tier(handles[0]) if handles else "device"
        if TIERS.index(origin) >= TIERS.index(to):
            raise SequenceStateError(f"sequence {handles[0]} is in the {origin} tier")
        return origin

    def _origin_in(self, handles: list[int], to: TierName) -> TierName:
        """Return the tier that sequences leave for `to`, towards the device."""
        if to not in ("device", "host"):
            raise InvalidArgumentError(f"to is {to!r}, must be 'device' or 'host'")
        origin = self.tier(handles[0]) if handles else "external"
        if TIERS.index(origin) <= TIERS.index(to):
            raise SequenceStateError(f"sequence {handles[0]} is in the {origin} tier")
        return origin

    def _sources(self, handles: list[int], origin: TierName, to: TierName) -> tuple[int, int]:
        """Check a batch. Returns the number of distinct blocks to move, and the number of all its distinct blocks."""
        all_held: set[int] = set()
        for handle, row in self._batch(handles):
            self._intact(handle)
            if row.tier != origin:
                raise SequenceStateError(f"sequence {handle} is in the {row.tier} tier, the call needs it in {origin}")
            if row.written == self._state.ticket:
                raise _BusyError(f"sequence {handle} has tokens that this step is yet to write")
            uses = self._state.uses(origin)
            held = row.table[: self._state.count(row.length)]
            # No source of its blocks may turn out to be lost.
            in_flight = any(ticket <= row.ticket for ticket in (self._state.ticket, *self._state.running))
            if in_flight or any("write" in uses[block] for block in held):
                raise _BusyError(f"sequence {handle} is still moving")
            all_held.update(held)
        return sum(self._state.tier_copy(ModelBlock(origin, block), to) is None for block in all_held), len(all_held)

    def _room(self, to: TierName, count: Callable[[], tuple[int, int]]) -> Fit:
        try:
            wanted, held = count()
        except SequenceStateError as error:
            return self._unmovable(to, error)
        return _fit(wanted, len(self._state.free_blocks(to)), self._state.blocks[to], held)

    def _unmovable(self, to: TierName, error: SequenceStateError) -> Fit:
        status = AllocStatus.LATER if isinstance(error, _BusyError) else AllocStatus.NEVER
        return Fit(status, 0, len(self._state.free_blocks(to)))

    def _can_return(self, handles: list[int], origin: TierName, moved: tuple[int, int], lookahead: int) -> Fit:
        writers: Counter[int] = Counter()
        users: Counter[int] = Counter()
        wanted, least = moved
        for handle in handles:
            row = self._state.sequences[handle]
            held = self._state.count(row.length)
            new = self._state.count(row.length + 1 + lookahead) - held
            wanted, least = wanted + new, least + new
            users.update(row.table[:held])
            if row.length % self.block_size:
                writers[row.table[held - 1]] += 1
        for block, count in writers.items():
            # The last owner of the block on the device then writes in place.
            copy = self._state.tier_copy(ModelBlock(origin, block), "device")
            others = users[block] + (0 if copy is None else self._state.refs(copy)) - 1
            wanted += min(count, others)
            least += min(count, users[block] - 1)
        fit = self._admit(wanted, self._state.available("device"), least)
        free = len(self._state.free_blocks("device"))
        if fit and origin == "external" and moved[0] > free:
            return Fit(AllocStatus.LATER, fit.blocks, free)
        return fit

    def _move(self, handles: list[int], origin: TierName, to: TierName) -> None:
        wanted, _ = self._sources(handles, origin, to)
        kind = "swap_out" if TIERS.index(origin) < TIERS.index(to) else "swap_in"
        self._state.require(to, wanted, draining_too=(origin, to) == ("host", "device"))
        targets = self._state.take(to, wanted)
        partial: list[ModelBlock] = []
        for handle in handles:
            row = self._state.sequences[handle]
            while len(row.table) > self._state.count(row.length):
                self._state.drop(row, -1)
            moved = []
            for i in range(len(row.table)):
                source, full = ModelBlock(origin, row.table[0]), i < row.length // self.block_size
                target = self._state.tier_copy(source, to)
                if target is None:
                    target = ModelBlock(to, targets.pop(0))
                    self._state.transfer(kind, source, target, "drain" if origin == "device" else "read")
                    if self._state.refs(source) > 1:
                        self._state.link(source, target)
                        self._state.step.fresh.add(target)
                        if not full:
                            partial.append(target)
                moved.append(target.id)
                self._state.drop(row, 0)
            row.tier, row.table = to, moved
        rows, uses = [self._state.sequences[handle] for handle in handles], self._state.uses(to)
        # Sequences whose blocks are all there already need not wait.
        comes = any("write" in uses[block] for row in rows for block in row.table)
        for row in rows:
            row.ticket, row.moving = self._state.ticket if comes else 0, comes
        # A partial block is shared only within this batch: its owners may append to it.
        for block in partial:
            self._state.unlink(block)
            self._state.step.fresh.discard(block)


def _fit(wanted: int, free: int, total: int, least: int | None = None) -> Fit:
    """Return whether blocks fit now; `least` blocks must fit an empty tier."""
    fits_later = (wanted if least is None else least) <= total
    status = AllocStatus.OK if wanted <= free else AllocStatus.LATER if fits_later else AllocStatus.NEVER
    return Fit(status, wanted, free)


def _ints(values: Handles | Counts) -> list[int]:
    return [int(value) for value in np.atleast_1d(np.asarray(values))]


def _counts(handles: list[int], num_tokens: Counts | None) -> list[int]:
    if num_tokens is None or isinstance(num_tokens, int | np.integer):
        return [1 if num_tokens is None else int(num_tokens)] * len(handles)
    counts = _ints(num_tokens)
    if len(counts) != len(handles):
        raise InvalidArgumentError(f"number of token counts is {len(counts)}, must be {len(handles)}, the sequences")
    return counts
