"""`Simulation`: simulates device and model in a step, and names the sequence, block or ticket that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Pairs, StepDecision
from blockyard.errors import BlockyardError, MappingError
from blockyard.testing.machines.record import show
from blockyard.testing.machines.strategies import VOCABULARY
from blockyard.testing.machines.values import Key, draw_token, seen, show_key, token_of
from blockyard.testing.machines.watch import SequenceWatch, common, holds

__all__ = ["Simulation"]

Ints = Sequence[int] | NDArray[np.integer[Any]]


class Simulation:
    """Simulates device and model in one step of a scheduler under test.

    Args:
        watch: follows the manager's calls; its memory holds tokens in place of keys and values.
        lose: picks the pairs of a decision to lose.
        drafts: number of draft tokens, and how many of them are right, for each call of `draft` in turn.
    """

    def __init__(
        self,
        watch: SequenceWatch,
        lose: Callable[[StepDecision], list[Pairs]],
        drafts: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.watch = watch
        self._lose, self._drafts, self._drafted = lose, drafts, 0
        self.worked = False

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Execute a decision's transfers. Returns the lost pairs, for `BlockManager.complete`.

        Raises:
            AssertionError: the decision was executed before, its ticket has ended, or the manager did not return it.
        """
        lost = self._lose(decision)
        self.watch.note(f"execute(ticket {decision.ticket}) -> {show(lost)}")
        self.watch.execute(decision, lost)
        self.worked |= len(decision) > 0
        return lost

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks, such as copies on write of a manager without decisions.

        Args:
            pairs: block ids `(from, to)`.

        Raises:
            AssertionError: an id is out of range.
        """
        self.watch.note(f"copy({show(list(pairs))})")
        for src, dst in pairs:
            try:
                self.watch.memory.transfer("copy", Pairs("device", "device", np.array([[src, dst]])))
            except MappingError as error:
                raise AssertionError(f"step {self.watch.step}: copy: {error}") from error
            self.watch.writers[int(dst)] = f"copy({src}, {dst}) of step {self.watch.step}"

    def draft(self, tokens: Ints) -> list[int]:
        """Guess the tokens after those of a sequence, as a drafter does: up to 4, the first ones right.

        Args:
            tokens: all tokens of the sequence so far, prompt first, `[tokens]`.
        """
        if not self._drafts:
            return []
        count, right = self._drafts[self._drafted % len(self._drafts)]
        self._drafted += 1
        text = _ints(tokens)
        whole = next((whole for whole in self.watch.texts.values() if whole[: len(text)] == text), text)
        following = [*whole[len(text) : len(text) + count], *([0] * count)][:count]
        self.watch.counts["tokens drafted"] += count
        return [token if at < right else (token + 1) % VOCABULARY for at, token in enumerate(following)]

    def forward(
        self,
        token_ids: Ints,
        slot_mapping: Ints,
        block_tables: Sequence[Ints] | NDArray[np.integer[Any]],
        query_lens: Ints,
        seq_lens: Ints,
        *,
        draft_lens: Ints | None = None,
        indices: Ints | None = None,
    ) -> list[int]:
        """Write the new tokens to their slots, read each sequence through its block table, and draw its next token.

        Args:
            token_ids: new tokens, sequence by sequence, `[tokens]`.
            slot_mapping: their slots, `[tokens]`.
            block_tables: blocks of each sequence as the manager has them now, `[sequences, blocks]`.
            query_lens: number of new tokens of each sequence, `[sequences]`.
            seq_lens: length of each sequence including new tokens, `[sequences]`.
            draft_lens: how many of its new tokens, the last ones, are draft tokens, `[sequences]`; none by default.
            indices: index of each sequence in its request, from 0 to `n - 1`, `[sequences]`; 0 by default.

        Returns:
            The next token of each sequence; meaningless while its prompt is incomplete. A sequence with draft tokens
            has `1 + draft_lens[i]` of them: before the drafts, and after each.

        Raises:
            AssertionError: the lengths disagree, a sequence has no new token, two tokens share a slot, a block table or
                slot is not that of an open sequence, or a sequence reads tokens that are not its request's.
        """
        tokens, slots = _ints(token_ids), _ints(slot_mapping)
        lengths, ends = _ints(seq_lens), list(accumulate(_ints(query_lens), initial=0))
        drafts = [0] * len(lengths) if draft_lens is None else _ints(draft_lens)
        turns = [0] * len(lengths) if indices is None else _ints(indices)
        if not (len(tokens) == len(slots) == ends[-1] and len(block_tables) == len(query_lens) == len(lengths)):
            raise AssertionError(
                f"step {self.watch.step}: forward got {len(tokens)} token_ids and {len(slots)} slots in slot_mapping, "
                f"query_lens sum to {ends[-1]}; {len(block_tables)} block_tables, {len(query_lens)} query_lens, "
                f"{len(lengths)} seq_lens"
            )
        self._refuse_lengths(_ints(query_lens), drafts, turns)
        self.watch.note(
            f"forward(token_ids={show(tokens)}, slot_mapping={show(slots)}, block_tables={show(list(block_tables))}, "
            f"query_lens={show(_ints(query_lens))}, seq_lens={show(lengths)})"
        )
        self.worked |= bool(tokens)
        rows = [
            _ForwardRow(
                self.watch, i, first, tokens[first:end], slots[first:end], _ints(block_tables[i]), lengths[i], drafts[i]
            )
            for i, (first, end) in enumerate(pairwise(ends))
        ]
        self._find_owners(rows)
        self._refuse_empty_rows(rows)
        self._refuse_shared_slots(rows, slots)
        for row in sorted(rows, key=lambda row: row.start):  # a hit may lie in blocks that this step writes
            try:
                self.watch.memory.write(row.slots, row.values)
            except MappingError as error:
                raise AssertionError(f"step {self.watch.step}: forward: {error}") from error
            for slot in row.slots:
                self.watch.writers[slot // self.watch.memory.block_size] = row.written()
        texts = [row.read() for row in rows]
        drawn = [
            draw_token(text[: len(text) - left], turn)
            for text, count, turn in zip(texts, drafts, turns, strict=True)
            for left in range(count, -1, -1)
        ]
        self.watch.note(f"forward -> {show(drawn)}")
        return drawn

    def _refuse_lengths(self, news: list[int], drafts: list[int], turns: list[int]) -> None:
        """Check the number of draft tokens of each sequence."""
        if not len(news) == len(drafts) == len(turns) or any(
            not 0 <= drafted < max(new, 1) for drafted, new in zip(drafts, news, strict=True)
        ):
            raise AssertionError(
                f"step {self.watch.step}: forward got draft_lens {show(drafts)} and indices {show(turns)} for "
                f"query_lens {show(news)}: one for each sequence, with fewer draft tokens than new tokens"
            )

    def _find_owners(self, rows: Sequence[_ForwardRow]) -> None:
        """Find the sequence of each row; of sequences that share all blocks, each gets one row."""
        for row in rows:
            row.owner = row.find_owner([earlier.owner for earlier in rows[: row.row]])

    def _refuse_empty_rows(self, rows: Sequence[_ForwardRow]) -> None:
        """Check that each sequence has a new token."""
        for row in rows:
            if not row.tokens:
                raise AssertionError(
                    f"step {self.watch.step}: {row.title()}: query_lens[{row.row}] is 0, but a model draws from the "
                    f"last token that it computes: let a hit cover at most len(prompt) - 1 tokens, in full blocks, "
                    f"even if the prefix cache has all of them"
                )

    def _refuse_shared_slots(self, rows: Sequence[_ForwardRow], slots: Sequence[int]) -> None:
        """Check that no two tokens of a step share a slot."""
        if len(set(slots)) == len(slots):
            return
        twice = next(slot for slot in slots if slots.count(slot) > 1)
        names = " and ".join(dict.fromkeys(row.title() for row in rows if twice in row.slots))
        raise AssertionError(
            f"step {self.watch.step}: two tokens of slot_mapping share slot {twice} "
            f"(block {twice // self.watch.memory.block_size}): {names}"
        )


@dataclass
class _ForwardRow:
    """One sequence of a step, as given to `forward`."""

    watch: SequenceWatch
    row: int
    first: int  # index of its first token in the arrays
    tokens: list[int]
    slots: list[int]
    table: list[int]
    length: int
    drafts: int = 0
    owner: int | None = None  # the sequence with this block table

    def __post_init__(self) -> None:
        self.size = self.watch.memory.block_size
        self.table = self.table[: -(-self.length // self.size)]

    @property
    def key(self) -> Key:
        """Key of its sequence."""
        return Key() if self.owner is None else self.watch.sequences[self.owner].key

    @property
    def start(self) -> int:
        """Position of its first new token."""
        return self.length - len(self.tokens)

    @cached_property
    def values(self) -> list[int]:
        """What the model stores for its new tokens, after what it reads before them."""
        try:
            before = self.watch.memory.read(self.table, max(0, self.start))[-1:]
        except MappingError:
            before = []  # `read` says what is wrong with the table
        return seen(self.key, self.tokens, self.start, *before)

    def written(self) -> str:
        """Describe its writes."""
        key = show_key(self.key)
        owner = "" if self.owner is None else f" for sequence {self.owner}"
        return f"forward of step {self.watch.step}{owner}" + (f" with {key}" if key else "")

    def read(self) -> list[int]:
        """Read the row's values, and check that they are a request's."""
        try:
            values = self.watch.memory.read(self.table, self.length)
        except MappingError:
            raise AssertionError(f"step {self.watch.step}: {self.explain([])}") from None
        text, sure = list(map(token_of, values)), self.length - self.drafts
        names = [name for (name, _), whole in self.watch.texts.items() if whole[:sure] == text[:sure]]
        owner, places = self.owner, [self.slot(at) for at in range(max(0, self.start), self.length)]
        if owner is None or self.slots != places or not names or text[self.start :] != self.tokens:
            raise AssertionError(f"step {self.watch.step}: {self.explain(text)}")
        self.claim(owner, names)
        self.compare_told(owner, text)
        self.compare_values(owner, text, values)
        return values

    def claim(self, handle: int, names: Sequence[str]) -> None:
        """Record which request the sequence belongs to."""
        followed = self.watch.sequences[handle]
        taken = {self.watch.sequences[other].request for other in self.watch.live() if other != handle}
        followed.table = tuple(self.table)
        if self.watch.keyed:
            keys = {name: self.watch.keys[name] for name in names}
            if followed.key not in keys.values():
                own, wanted = followed.key._asdict(), keys[names[-1]]._asdict()
                part = next(part for part, value in own.items() if value != wanted[part])
                raise AssertionError(
                    f"step {self.watch.step}: {self.watch.name(handle)} was opened with {part} {own[part]!r}, its "
                    f"request {names[-1]!r} has {part} {wanted[part]!r}"
                )
            names = [name for name in names if keys[name] == followed.key]
        if followed.request not in names:
            followed.request = next((name for name in reversed(names) if name not in taken), names[-1])

    def compare_told(self, handle: int, text: Sequence[int]) -> None:
        """Check that the token ids given to the manager are those that the model computed."""
        followed = self.watch.sequences[handle]
        if not self.watch.manager.prefix.enabled:
            return
        for at, (told, token) in enumerate(zip(followed.tokens, text, strict=False)):
            if told is not None and told != token:
                raise AssertionError(
                    f"step {self.watch.step}: {followed.told[at]} named token {told}, the model has token {token} "
                    f"at position {at} of {self.watch.name(handle)}, slot {self.slot(at)} (block {self.table_at(at)})"
                )

    def compare_values(self, handle: int, text: Sequence[int], values: Sequence[int]) -> None:
        """Check that all values were computed after the sequence's tokens, under its key."""
        wanted = seen(self.key, text)
        if (at := common(values, wanted)) < len(wanted):
            block = self.table_at(at)
            last = f"block {block} was last written by {self.watch.writers.get(block)}"
            if any(seen(key, text)[at] == values[at] for key in self.watch.keys.values()):
                how = f"under another salt, adapter or extra; wanted {show_key(self.key) or 'none'}"
            else:
                how = "after other tokens than " + (
                    f"{show(list(text[:at]))} before it" if at else "here, as the first"
                )
            raise AssertionError(
                f"step {self.watch.step}: row {self.row}, {self.watch.name(handle)}: position {at} is slot "
                f"{self.slot(at)} (block {block}), whose token {text[at]} was computed {how}; {last}"
            )

    def find_owner(self, taken: Collection[int | None]) -> int | None:
        """Return the sequence with this block table, best one of this length that is not in `taken`."""
        found = []
        for handle in self.watch.live():
            blocks = self.watch.blocks(handle) if self.watch.manager.tier(handle) == "device" else []
            if blocks and blocks[: len(self.table)] == self.table:
                found.append((handle in taken, self.watch.manager.num_tokens(handle) != self.length, handle))
        return min(found, key=lambda one: one[:2])[2] if found else None

    def writer(self) -> int | None:
        """Return the sequence that owns the new tokens' slots."""
        blocks = {slot // self.size for slot in self.slots}
        found = None
        for handle in self.watch.live():
            if blocks and self.watch.manager.tier(handle) == "device" and blocks <= set(self.watch.blocks(handle)):
                end = self.watch.manager.num_tokens(handle)
                if self.slots == self.slots_of(handle, end - len(self.slots), end):
                    return handle
                found = handle if found is None else found
        return found

    def slots_of(self, handle: int, first: int, end: int) -> list[int]:
        """Return the slots of a sequence's tokens."""
        try:
            return [int(slot) for slot in self.watch.manager.slot_mapping(handle, max(0, first), end)]
        except BlockyardError:
            return []

    def title(self) -> str:
        """Name the row and its sequence."""
        handle = self.owner
        handle = self.writer() if handle is None else handle
        return f"row {self.row}" + ("" if handle is None else f", {self.watch.name(handle)}")

    def table_at(self, position: int) -> int:
        """Return the block of a position."""
        return self.table[position // self.size]

    def slot(self, position: int) -> int:
        """Return the slot of a position."""
        return self.table_at(position) * self.size + position % self.size

    def explain(self, text: Sequence[int]) -> str:
        """Explain why a row reads tokens that are not its request's."""
        owner, writer = self.owner, self.writer()
        if writer is not None and owner != writer:
            return self.explain_table(owner, writer)
        if owner is None:
            return self.explain_stranger()
        here = f"row {self.row}, {self.watch.name(owner)}"
        if self.watch.sequences[owner].lost:
            return f"{here}: it {self.watch.state(owner)}"
        if not text:
            return (
                f"{here}: block_tables[{self.row}] has {len(self.table)} blocks of {self.size}, seq_lens[{self.row}] "
                f"is {self.length}; block_table(sequence={owner}) is {show(self.watch.blocks(owner))}"
            )
        return self.explain_slots(owner, here) or self.explain_tokens(owner, here, text)

    def explain_slots(self, owner: int, here: str) -> str:
        """Explain slots of wrong positions, if that is the fault."""
        length = self.watch.manager.num_tokens(owner)
        wanted = self.slots_of(owner, self.length - len(self.slots), self.length) if self.length <= length else []
        if self.slots == wanted:
            return ""
        if not wanted or self.slots == self.slots_of(owner, length - len(self.slots), length):
            return f"{here}: seq_lens[{self.row}] is {self.length}, num_tokens(sequence={owner}) is {length}"
        at = next(i for i, (a, b) in enumerate(zip(self.slots, wanted, strict=False)) if a != b)
        return (
            f"{here}: slot_mapping[{self.first + at}] is {self.slots[at]} (block {self.slots[at] // self.size}), "
            f"position {self.length - len(self.slots) + at} is slot {wanted[at]} (block {wanted[at] // self.size})"
        )

    def explain_table(self, owner: int | None, writer: int) -> str:
        """Explain a block table that is not that of the sequence being written."""
        blocks = self.watch.blocks(writer)
        theirs = f", the table of {self.watch.name(owner)}" if owner is not None else ""
        at = common(self.table, blocks)
        if at >= len(blocks):
            block = f"block {self.table[at]} is not its own"
        elif at >= len(self.table):
            block = f"block {blocks[at]} is missing"
        else:
            block = f"block {self.table[at]} stands for block {blocks[at]}"
        return (
            f"row {self.row} writes slots {show(self.slots)} of {self.watch.name(writer)}: block_tables[{self.row}] is "
            f"{show(self.table)}{theirs}; block_table(sequence={writer}) is {show(blocks)}: {block}"
        )

    def explain_stranger(self) -> str:
        """Explain a block table and slots that belong to no sequence."""
        was = [h for h, f in self.watch.sequences.items() if list(f.table[: len(self.table)]) == self.table]
        before = ""
        if was:
            now = (
                f"; block_table(sequence={was[-1]}) is {show(blocks)}" if (blocks := self.watch.blocks(was[-1])) else ""
            )
            before = f"; it was that of sequence {was[-1]}, which {self.watch.state(was[-1])}{now}"
        return (
            f"row {self.row}: block_tables[{self.row}] is {show(self.table)} and slot_mapping {show(self.slots)}, "
            f"of no sequence on the device{before}"
        )

    def explain_tokens(self, owner: int, here: str, text: Sequence[int]) -> str:
        """Explain wrong tokens with correct table, slots and length."""
        request = self.watch.sequences[owner].request
        own = [whole for (name, _), whole in self.watch.texts.items() if name == request]
        whole = max(own or self.watch.texts.values(), key=lambda tokens: common(text, tokens), default=[])
        at = min(common(text, whole), self.length - 1)
        expected = f"wanted token {whole[at]}" if at < len(whole) else f"its request ends after {len(whole)} tokens"
        first = self.length - len(self.tokens)
        if at >= first and text[at] == self.tokens[at - first]:
            return (
                f"{here}: token_ids[{self.first + at - first}] is {text[at]} for position {at} "
                f"(block {self.table_at(at)}), {expected}" + (f" for request {request!r}" if request else "")
            )
        block = self.table_at(at)
        late = [
            f"; {kind} {pairs.src} {a} -> device {b} of ticket {number} was not executed before forward"
            for number, ticket in self.watch.tickets.items()
            if ticket.executed is None and not ticket.ended
            for kind, pairs in ticket.decision.transfers()
            for a, b in pairs.ids.tolist()
            if pairs.dst == "device" and b == block
        ]
        written = self.watch.writers.get(block)
        last = f"; block {block} was last written by {written}" if written else ""
        return (
            f"{here}: position {at} is slot {self.slot(at)} (block {block}), which {holds(text[at])}, "
            f"{expected}{late[0] if late else last}"
        )


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]
