"""The running sequences as a struct of arrays, so that a plain step touches no per-sequence object.

Rows `[0, decodes)` are past their prompts. Rows `[decodes, count)` are in prefill, ordered by which finishes first, so
a finished prompt becomes a decoding row by `decodes += 1`. A removed row is replaced by one from the end of its part.
Rows move only between steps, never while one is in flight.

A sequence's generated tokens are stored under its *seat*, which stays the same while its row moves. Its prompt is
stored in the request. A seat holds a limited number of tokens. A longer sequence uses its halves in turn and
copies its earlier tokens to separate arrays, so memory grows with the tokens generated, not with `max_tokens`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf
from struct import Struct
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager
from blockyard.errors import InvariantError
from blockyard.scheduler.request import NO_TOKEN, Owner, RequestState

__all__ = ["BASE", "DONE", "HANDLE", "LENGTH", "LIMIT", "PRIORITY", "SEAT", "Seated", "SequenceRows"]

HANDLE, LENGTH, LIMIT, SEAT, BASE, DONE, PRIORITY, ARRIVAL, NUMBER = range(9)
"""Rows of `SequenceRows.fields`. `LENGTH`: tokens of the sequence, counting the next one; `LIMIT`: its maximum;
`BASE`: index that its first token would have in the flat token array; `DONE`: prompt tokens that have blocks."""

COLUMN: Final = Struct("=QqqqqqqdQ")
"""A sequence's fields in order; ARRIVAL is a float."""
FIRST_LENGTH = 256
SEAT_LENGTH = 4096
"""Maximum number of generated tokens in a seat."""
NO_END: Final = 1 << 62
CACHE_LINE = 16
"""Tokens per CPU cache line."""


def _until_no_token(tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    ends = np.flatnonzero(tokens == NO_TOKEN)
    known: NDArray[np.uint32] = tokens[: ends[0] if len(ends) else len(tokens)].copy()
    return known


def staying(first: int, end: int, leaving: Sequence[int]) -> NDArray[np.int64]:
    """List the rows in `[first, end)` that stay."""
    gone = set(leaving)
    return np.array([row for row in range(first, end) if row not in gone], np.int64)


Seated: TypeAlias = tuple[RequestState, int, NDArray[np.uint32], int, int, int]
"""A sequence that gets a row: its request, its index in the request, its tokens, its handle, how many of its
tokens have blocks, and how many sequences will fork off it."""


class SequenceRows:
    """Rows and seats.

    Args:
        capacity: maximum number of rows.
        manager: the scheduler's manager.
        num_lookahead_tokens: maximum number of draft tokens of a row in a step.

    Attributes:
        fields: int64 `[9, capacity]`, one row per field.
        handles: field `HANDLE` viewed as uint64 `[capacity]`.
        last: last token of each row, uint32 `[capacity]`.
        block_tables: int32 `[groups, capacity, max_blocks]`, C-contiguous; kept from step to step.
        flat_tables: the same as `[groups * capacity, max_blocks]`.
        tokens: generated tokens by seat, uint32 `[capacity, seat_length]`, padded with `NO_TOKEN`; of a sequence that
            may get more, only its last ones.
        flat: `tokens` as `[capacity * seat_length]`.
        longest: seat length so far.
        covered: maximum length of a sequence that fits the block tables.
        owners: owner of each seat.
        forks: for each seat, the number of sequences that will fork off its prompt.
        seats_left: seats neither in use nor reserved for forks of a prompt or for returning sequences.
        count: rows in use.
        decodes: rows past their prompts.
        alone: a request that lacked blocks of a page class although nothing else ran: until it has ended, sequences run
            one at a time, so that its blocks lie in as few extents as they fill.
    """

    def __init__(self, capacity: int, manager: BlockManager, num_lookahead_tokens: int = 0) -> None:
        self._manager, groups = manager, manager.groups
        self._entry_tokens = min(group.block_tokens or manager.block_size for group in groups)
        self._step_tokens = 1 + num_lookahead_tokens
        self._seat_length = max(SEAT_LENGTH, 4 * self._step_tokens)
        self._steps_left = NO_END  # for which every row has room
        self._earlier: dict[int, tuple[tuple[NDArray[np.uint32], ...], int]] = {}  # by seat; and its half in use
        self._ends = np.full(capacity, NO_END)  # by seat, where in `flat` that half ends
        self.fields = np.zeros((NUMBER + 1, capacity), np.int64)
        self.handles = self.fields[HANDLE].view(np.uint64)
        self._arrivals = self.fields[ARRIVAL].view(np.float64)
        self.last = np.zeros(capacity, np.uint32)
        self._use_tables(np.zeros((len(groups), capacity, 0), np.int32))
        self._use_tokens(np.zeros((capacity, 0), np.uint32))
        self.owners: list[Owner | None] = [None] * capacity
        self.forks: dict[int, int] = {}
        self.seats_left = capacity
        self.count = 0
        self.decodes = 0
        self.alone: RequestState | None = None
        self._free_seats = list(range(capacity))[::-1]

    def _use_tables(self, tables: NDArray[np.int32]) -> None:
        groups, capacity, width = tables.shape
        self.block_tables, self.flat_tables = tables, tables.reshape(groups * capacity, width)
        self._tables = list(tables)
        self.covered = width * self._entry_tokens

    def _use_tokens(self, tokens: NDArray[np.uint32]) -> None:
        self.tokens, self.flat, self.longest = tokens, tokens.reshape(-1), tokens.shape[1]

    def make_room(self, limit: int, length: int, generated: int) -> None:
        """Grow the arrays for sequences of `length` tokens that may reach `limit`, at most `generated` of them new."""
        capacity, had = self.tokens.shape
        generated = min(generated, self._seat_length)
        if generated > had:
            longest = max(generated, 2 * had, FIRST_LENGTH)
            # An odd number of cache lines, so that the rows do not map to only a few cache sets.
            longest = (-(-longest // CACHE_LINE) | 1) * CACHE_LINE
            tokens = np.full((capacity, longest), NO_TOKEN, np.uint32)
            tokens[:, :had] = self.tokens
            self._use_tokens(tokens)
            self.fields[BASE] += self.fields[SEAT] * (longest - had)
        self._widen(min(limit, length + self._seat_length))

    def _widen(self, length: int) -> None:
        """Widen the block tables to sequences of `length` tokens."""
        blocks, (groups, capacity, width) = -(-length // self._entry_tokens), self.block_tables.shape
        if blocks > width:
            wider = max(blocks, 2 * width, FIRST_LENGTH // self._entry_tokens)
            tables = np.zeros((groups, capacity, wider), np.int32)
            tables[..., :width] = self.block_tables
            self._use_tables(tables)

    @property
    def is_closed(self) -> bool:
        """Whether no sequences may start beside those that run or return, see `alone`."""
        return self.alone is not None and self.alone.alive and self.seats_left < len(self.owners)

    def read_tables(self, rows: slice) -> None:
        """Take the block tables of rows from the manager."""
        handles = self.handles[rows]
        for group, tables in enumerate(self._tables):
            self._manager.block_tables(handles, out=tables[rows], group=group)

    def make_way(self, steps: int = 1) -> int:
        """Make room for the tokens of more steps, one or more; return how many of them have it."""
        if self._steps_left < 1:
            self._make_way()
        steps = min(steps, self._steps_left)
        self._steps_left -= steps
        return steps

    def _make_way(self) -> None:
        rows, most = slice(self.count), self._step_tokens
        length, limit, base = self.fields[LENGTH, rows], self.fields[LIMIT, rows], self.fields[BASE, rows]
        self._widen(int(np.minimum(length + most, limit).max(initial=0)))
        ends = self._ends[self.fields[SEAT, rows]]
        for row in np.flatnonzero(ends - base - length < most).tolist():
            self._change_halves(row)
        self._steps_left = int((self._ends[self.fields[SEAT, rows]] - base - length).min(initial=NO_END)) // most
        covered = self.covered
        self._steps_left = min(self._steps_left, int((covered - length)[limit > covered].min(initial=NO_END)) // most)

    def _change_halves(self, row: int) -> None:
        """Copy the tokens of a row to a separate array, and use the other half of its seat."""
        seat, width = int(self.fields[SEAT, row]), self.tokens.shape[1]
        base, length = int(self.fields[BASE, row]), int(self.fields[LENGTH, row])
        earlier, at = self._earlier[seat]
        other = 0 if at else width // 2
        self.tokens[seat, other : other + width // 2] = NO_TOKEN
        # In one assignment, so that an exception at any line loses no token.
        self._earlier[seat] = ((*earlier, self.flat[seat * width + at : base + length].copy()), other)
        self.fields[BASE, row] = seat * width + other - length
        self._ends[seat] = seat * width + other + width // 2

    def owner(self, row: int) -> Owner:
        """Return the owner of a row."""
        return self.owner_at(int(self.fields[SEAT, row]))

    def owner_at(self, seat: int) -> Owner:
        """Return the owner of a seat."""
        owner = self.owners[seat]
        if owner is None:
            raise InvariantError(f"seat {seat} has no owner")
        return owner

    def fork_count(self, row: int) -> int:
        """Number of sequences that will fork off a row's prompt."""
        return self.forks.get(int(self.fields[SEAT, row]), 0)

    def tokens_of(self, row: int, first: int = 0, end: int | None = None) -> NDArray[np.uint32]:
        """Copy tokens `[first, end)` of a row, prompt included."""
        prompt = self.owner(row)[0].prompt
        end = int(self.fields[LENGTH, row]) if end is None else end
        if end <= len(prompt):
            tokens: NDArray[np.uint32] = prompt[first:end].copy()
            return tokens
        seat, base = int(self.fields[SEAT, row]), int(self.fields[BASE, row])
        if seat not in self._earlier:
            return np.concatenate((prompt[first:], self.flat[base + max(first, len(prompt)) : base + end]))
        generated = self.generated_in(seat, base + len(prompt), base + int(self.fields[LENGTH, row]))
        return np.concatenate((prompt, generated))[first:end]

    def generated_in(self, seat: int, first: int, end: int) -> NDArray[np.uint32]:
        """Copy the generated tokens in a seat: `[first, end)` of `flat`, except for those kept apart."""
        if seat not in self._earlier:
            generated: NDArray[np.uint32] = self.flat[first:end].copy()
            return generated
        earlier, at = self._earlier[seat]
        return np.concatenate((*earlier, self.flat[seat * self.tokens.shape[1] + at : end]))

    def leave(self, state: RequestState) -> None:
        """Replace the seats of a request's sequences by their tokens. Correct even while rows move."""
        for index, seat in enumerate(state.places):
            if isinstance(seat, int):
                state.places[index] = np.concatenate((state.prompt, self.generated(state, index)))

    def generated(self, state: RequestState, index: int) -> NDArray[np.uint32]:
        """Copy the tokens that a sequence of a request has generated so far. Correct even while rows move."""
        seat = state.places[index]
        if state.outputs[index] is not None or not isinstance(seat, int):
            return state.generated(index)
        width = self.tokens.shape[1]
        if state.request.max_tokens <= width:
            return _until_no_token(self.tokens[seat, : state.request.max_tokens])
        earlier, at = self._earlier[seat]
        return np.concatenate((*earlier, _until_no_token(self.tokens[seat, at : at + width // 2])))

    def find(self, seats: Iterable[int]) -> NDArray[np.int64]:
        """Return the rows of seats, in ascending order."""
        wanted = np.fromiter(seats, np.int64)
        rows: NDArray[np.int64] = np.flatnonzero(np.isin(self.fields[SEAT, : self.count], wanted))
        return rows

    def find_handles(self, handles: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the rows of handles, in ascending order."""
        rows: NDArray[np.int64] = np.flatnonzero(np.isin(self.handles[: self.count], handles))
        return rows

    def lowest_priority(self) -> float:
        """Return the largest priority number of a row; -inf without rows."""
        return float(self.fields[PRIORITY, : self.count].max()) if self.count else -inf

    def worst(self) -> NDArray[np.int64]:
        """Return all rows of the lowest-ranked request."""
        rows = np.arange(self.count)
        for key in (self.fields[PRIORITY], self._arrivals, self.fields[NUMBER]):
            values = key[rows]
            rows = rows[values == values.max()]
        return rows

    def append(self, seated: Sequence[Seated]) -> None:
        """Seat sequences in new rows at the end, in prefill."""
        self._fill(self.count, seated)
        self.count += len(seated)

    def insert(self, seated: Sequence[Seated]) -> slice:
        """Seat sequences in new rows after the decoding rows, and return those; rows in prefill move."""
        at, end, count = self.decodes, self.count, len(seated)
        if end > at:
            self._move(slice(at + count, end + count), np.arange(at, end))
        self._fill(at, seated)
        new = slice(at, at + count)
        self.last[new] = self.flat[self.fields[BASE, new] + self.fields[LENGTH, new] - 1]
        self.decodes += count
        self.count += count
        return new

    def remove(self, gone: NDArray[np.int64]) -> None:
        """Drop rows (ascending) and their seats, including those reserved for forks; other rows move into the gaps."""
        seats, leaving = self.fields[SEAT].take(gone).tolist(), gone.tolist()
        for seat in seats:
            self.owner_at(seat)[0].seats.discard(seat)
            self.owners[seat] = None
        self._free_seats += seats
        self.seats_left += len(seats)
        if self.forks:
            self.seats_left += sum(self.forks.pop(seat, 0) for seat in seats)
        first_prefill = bisect_left(leaving, self.decodes)
        left = self.decodes - first_prefill
        # Rows that stay but lie beyond the new end fill the holes below it.
        holes = leaving[: bisect_left(leaving, left, 0, first_prefill)]
        if holes:
            self._move(np.array(holes), staying(left, self.decodes, leaving[len(holes) : first_prefill]))
        self.count -= len(leaving)
        if self.count > left:
            kept = staying(self.decodes, self.count + len(leaving), leaving[first_prefill:])
            self._move(slice(left, self.count), kept)
        self.decodes = left

    def _move(self, to: NDArray[np.int64] | slice, rows: NDArray[np.int64]) -> None:
        self.fields[:, to] = self.fields.take(rows, axis=1)
        self.last[to] = self.last[rows]
        for tables in self._tables:
            tables[to] = tables[rows]

    def _fill(self, at: int, seated: Sequence[Seated]) -> None:
        longest, covered, columns = self.longest, self.covered, []
        for state, sequence, tokens, handle, done, forks in seated:
            seat, length, limit = self._free_seats.pop(), len(tokens), state.limit
            self.owners[seat] = (state, sequence)
            state.seats.add(seat)
            if forks:
                self.forks[seat] = forks
            most = state.request.max_tokens
            start = limit - most
            if self._earlier and self._earlier.pop(seat, None) is not None:
                self._ends[seat] = NO_END
            if most > longest:  # the last token is in the seat
                earlier, start = tokens[start : length - 1].copy(), max(start, length - 1)
                self._earlier[seat] = ((earlier,) if len(earlier) else (), 0)
                most = longest // 2
                self._ends[seat] = seat * longest + most
                self._steps_left = min(self._steps_left, (most - 1) // self._step_tokens - 1)  # after this one
            base = seat * longest - start
            self.tokens[seat, :most] = NO_TOKEN
            if length > start:
                self.flat[base + start : base + length] = tokens[start:]
            if limit > covered:
                self._steps_left = min(self._steps_left, (covered - length) // self._step_tokens - 1)
            state.places[sequence] = seat
            columns.append(COLUMN.pack(handle, length, limit, seat, base, done, *state.rank))
        found = np.frombuffer(b"".join(columns), np.int64).reshape(len(columns), NUMBER + 1)
        self.fields[:, at : at + len(seated)] = found.T
