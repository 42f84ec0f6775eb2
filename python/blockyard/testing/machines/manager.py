"""`ManagerMachine`: a manager next to the reference model and simulated memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, Literal

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from blockyard._core import AllocStatus, BlockManager, Pairs
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.testing.interfaces import Config, ManagerLike, TierName
from blockyard.testing.machines.own_manager import OwnCacheMachine, OwnManagerMachine
from blockyard.testing.machines.partial import lacking
from blockyard.testing.machines.record import RecordingMachine
from blockyard.testing.machines.side_by_side import (
    MAX_OPEN,
    SideBySide,
    Tracked,
    answer,
    can_move,
    handles_of,
    move,
    refuse_open,
    same,
)
from blockyard.testing.machines.strategies import configs
from blockyard.testing.memory import LateMemory
from blockyard.testing.model import ReferenceManager

__all__ = ["ManagerMachine", "manager_machine"]

TIERS: tuple[TierName, ...] = ("device", "host", "external")

_WAYS: Final = [
    ("swap_out", "host"),
    ("swap_out", "external"),
    ("swap_in", "device"),
    ("swap_in", "host"),
    ("swap_out", "device"),
    ("swap_in", "external"),
]

# Each number picks a live sequence, or rarely a freed one. Repeated numbers give repeated handles.
_pick = st.integers(0, 63)
_picks = st.lists(_pick, min_size=1, max_size=4)
_lengths = st.lists(st.integers(1, 14) | st.just(0), min_size=1, max_size=3)
_losses = st.lists(_pick, min_size=1, max_size=2)
_lookahead = st.integers(0, 3)


class ManagerMachine(SideBySide, RecordingMachine):
    """Random engine steps on a manager and on the reference model.

    After each rule the state is checked and compared: free blocks of each tier, and tier, length and block table of
    each sequence. Calls must have equal results and errors, and decisions equal pairs. Transfers run as late as the
    decisions allow, and every token of every sequence is read back.

    Attributes:
        make_manager: makes the manager under test; `manager_machine` sets it.
        make_memory: makes the memory that decisions run on; override it to inject a fault.
        same_ids: whether the manager must choose the same blocks as the model. If not, tables, decisions and numbers in
            errors are not compared; tokens, free blocks and lengths still are.
    """

    make_manager: ClassVar[Callable[[Config], ManagerLike]]
    make_memory: ClassVar[Callable[[Config], LateMemory]] = LateMemory

    @initialize(config=configs(), lengths=_lengths)
    def start(self, config: Config, lengths: list[int]) -> None:
        """Create manager, model, memory and a few sequences."""
        self.record.config = config
        made = type(self).make_manager(config)
        if missing := lacking(made, vars(ManagerLike)):
            raise AssertionError(
                f"{type(made).__name__} lacks {missing}: name the calls that it has, as in "
                f"manager_machine(factory, allocate=..., free=..., block_table=...)"
            )
        self.manager = self.record.watch(made)
        self.model = ReferenceManager(**config.arguments())
        self.memory = type(self).make_memory(config)
        for length in lengths:
            self.allocate([length])
        self.step(everyone=True, lost=[])
        self.settle(keep=0)

    # ---- rules: admission, growth, end ----

    @rule(lengths=_lengths)
    def allocate(self, lengths: list[int]) -> None:
        """Open sequences, all or none."""
        longest = max(lengths, default=0)
        self.agree(lambda m: answer(m.can_allocate(longest)), lambda m: answer(m.can_allocate(longest)))
        real, model = self.both(lambda m: m.allocate(counts=lengths), lambda m: m.allocate(counts=lengths))
        if real is not None and model is not None:
            for handle, modelled, length in zip(real, model, lengths, strict=True):
                self.adopt(Tracked(int(handle), int(modelled)), 0, length)

    @precondition(lambda self: self.sequences)
    @rule(pick=_pick, count=st.integers(0, 3))
    def fork(self, pick: int, count: int) -> None:
        """Share all blocks of a sequence."""
        parent = self.one(pick)
        if parent is None:
            return
        real, model = self.both(lambda m: m.fork(parent.real, count), lambda m: m.fork(parent.model, count))
        if real is None or model is None:
            return
        for handle, modelled in zip(real, model, strict=True):
            self.sequences.append(Tracked(int(handle), int(modelled), list(parent.tokens)))
        if parent.real in self.written:
            self.written |= {int(handle) for handle in real}

    @precondition(lambda self: self.sequences)
    @rule(pick=_pick, blocks=st.integers(0, 4), extra=st.integers(-1, 8), off=st.sampled_from([0] * 7 + [1]))
    def fork_prefix(self, pick: int, blocks: int, extra: int, off: int) -> None:
        """Share the first full blocks of a sequence."""
        parent = self.one(pick)
        if parent is None:
            return
        full = len(parent.tokens) // self.manager.block_size
        shared = (full if blocks > full > 0 else blocks) * self.manager.block_size + off
        length = max(0, shared + extra)
        real, model = self.both(
            lambda m: m.fork(parent.real, shared_tokens=shared, num_tokens=length),
            lambda m: m.fork(parent.model, shared_tokens=shared, num_tokens=length),
        )
        if real is not None and model is not None:
            self.adopt(Tracked(int(real), int(model), parent.tokens[:shared]), shared, length)

    @precondition(lambda self: self.sequences)
    @rule(picks=_picks, count=st.integers(0, 6), lookahead=_lookahead, each=st.booleans())
    def append(self, picks: list[int], count: int, lookahead: int, each: bool) -> None:  # noqa: FBT001 (drawn)
        """Append tokens to a batch."""
        batch = self.chosen(picks)
        counts = [(count + i) % 7 for i in range(len(batch))] if each else [count] * len(batch)
        given: int | list[int] = counts if each else count
        real, model = handles_of(batch)
        self.agree(
            lambda m: answer(m.can_append(real, given, lookahead=lookahead)),
            lambda m: answer(m.can_append(model, given, lookahead=lookahead)),
        )
        slots, expected = self.both(
            lambda m: m.append(real, given, lookahead=lookahead), lambda m: m.append(model, given, lookahead=lookahead)
        )
        if slots is None or expected is None:
            return
        same("slots", slots.tolist(), expected.tolist(), when=self.same_ids)
        same("number of slots", len(slots), sum(counts))
        rest = slots.tolist()
        size = self.manager.block_size
        for sequence, n in zip(batch, counts, strict=True):
            tokens = self.fresh(n)
            self.pending += zip(rest[:n], tokens, strict=True)
            rest = rest[n:]
            sequence.tokens += tokens
            self.written.add(sequence.real)
            # Drafts, which must not be read.
            table, end = self.manager.block_table(sequence.real), len(sequence.tokens)
            drafts = [int(table[i // size]) * size + i % size for i in range(end, end + lookahead)]
            self.pending += zip(drafts, self.fresh(lookahead), strict=True)

    @precondition(lambda self: self.sequences)
    @rule(pick=_pick, counts=st.lists(st.integers(0, 6), min_size=2, max_size=3), lookahead=_lookahead)
    def append_in_parts(self, pick: int, counts: list[int], lookahead: int) -> None:
        """Append to one sequence several times within one step."""
        for count in counts:
            self.append([pick], count, lookahead, each=False)

    @precondition(lambda self: self.sequences)
    @rule(pick=_pick, dropped=st.integers(-1, 9))
    def truncate(self, pick: int, dropped: int) -> None:
        """Truncate sequences, or try to remove more tokens than they have."""
        (sequence,) = self.chosen([pick])
        length = max(0, len(sequence.tokens) - dropped)
        if self.do(lambda m: m.truncate(sequence.real, length), lambda m: m.truncate(sequence.model, length)):
            sequence.tokens = sequence.tokens[:length]

    @precondition(lambda self: self.sequences)
    @rule(picks=_picks)
    def free(self, picks: list[int]) -> None:
        """Free sequences; tokens that only they would have read are not computed."""
        batch = self.chosen(picks)
        real, model = handles_of(batch)
        if not self.do(lambda m: m.free(real), lambda m: m.free(model)):
            return
        self.sequences = [sequence for sequence in self.sequences if sequence not in batch]
        self.freed = (self.freed + batch)[-8:]
        on_device = [s for s in self.sequences if self.manager.tier(s.real) == "device"]
        held = {int(block) for sequence in on_device for block in self.manager.block_table(sequence.real)}
        self.pending = [(slot, token) for slot, token in self.pending if slot // self.manager.block_size in held]

    # ---- rules: moves ----

    @precondition(lambda self: self.sequences)
    @rule(
        picks=_picks,
        way=st.sampled_from(_WAYS),
        lookahead=_lookahead,
        before=st.sampled_from(["settle", "step", "nothing"]),
    )
    def move(self, picks: list[int], way: tuple[str, str], lookahead: int, before: str) -> None:
        """Move a batch between tiers: in the middle of a step, at the start of one, or with nothing in flight."""
        if before != "nothing":
            self.step(everyone=False, lost=[])
        if before == "settle":
            self.settle(keep=0)
        real, model = handles_of(self.chosen(picks))
        could = self.agree(lambda m: can_move(m, *way, real, lookahead), lambda m: can_move(m, *way, model, lookahead))
        done = self.do(lambda m: move(m, *way, real), lambda m: move(m, *way, model))
        if could is None:
            return
        if could[0] == AllocStatus.OK and not done:
            raise AssertionError(f"can_{way} promised what {way} refused")
        # On the device there must also be room for more tokens and the watermark.
        if could[0] != AllocStatus.OK and done and way[1] != "device":
            raise AssertionError(f"can_{way} refused what {way} did")

    @precondition(lambda self: self.sequences)
    @rule(
        pick=_pick,
        forks=st.integers(0, 2),
        to=st.sampled_from(["host", "external"]),
        lost=_pick,
        copies=st.booleans(),
    )
    def preempt_and_resume(
        self,
        pick: int,
        forks: int,
        to: Literal["host", "external"],
        lost: int,
        copies: bool,  # noqa: FBT001 (drawn)
    ) -> None:
        """A rare scenario: a group is swapped out, swapped in, and continues in that step, perhaps with a loss.

        Then a fork may copy blocks that are possibly lost, and the copy's ticket may end first.
        """
        parent = self.one(pick)
        if parent is None:
            return
        self.step(everyone=False, lost=[])
        self.settle(keep=0)
        before = len(self.sequences)
        self.fork(pick, forks)
        group = [parent, *self.sequences[before:]]
        real, model = handles_of(group)
        if not self.do(lambda m: m.swap_out(real, to), lambda m: m.swap_out(model, to)):
            return
        self.step(everyone=False, lost=[])
        self.settle(keep=0)
        if not self.do(lambda m: m.swap_in(real), lambda m: m.swap_in(model)):
            return
        places = [i for i, sequence in enumerate(self.sequences) if sequence in group]
        self.append(places[:2], 1, 0, each=False)
        self.step(everyone=False, lost=[lost] if lost % 2 else [])
        if copies:
            self.fork(pick, 1)
            self.append([len(self.sequences) - 1], 1, 0, each=False)
            self.step(everyone=False, lost=[])
            self.settle(keep=0)

    # ---- rules: steps and tickets ----

    @rule(everyone=st.booleans(), lost=st.builds(list) | st.builds(list) | _losses)
    def step(self, everyone: bool, lost: list[int]) -> None:  # noqa: FBT001 (drawn)
        """Take the decision, begin its transfers, write the step's tokens, and read them through the block tables."""
        self.record.next_step()
        for ticket in self.tickets[: 1 - MAX_OPEN]:
            self.end(ticket)
        decision, expected = self.manager.take_decision(), self.model.take_decision()
        same("ticket", decision.ticket, expected.ticket, when=self.same_ids)
        if self.same_ids:
            self.compare_decisions(decision, expected)
        readers = self.readable() if everyone else [s for s in self.readable() if s.real in self.written]
        needed = {int(block) for s in readers for block in self.manager.block_table(s.real)}
        needed |= {slot // self.manager.block_size for slot, _ in self.pending}
        losses = self.some_pairs(decision, lost) if self.same_ids else []
        self.tickets.append(decision.ticket)
        self.losses[decision.ticket] = losses
        self.memory.submit(decision, needed, losses)
        self.memory.write([slot for slot, _ in self.pending], [token for _, token in self.pending])
        self.pending, self.written = [], set()
        if not any(self.losses.values()):
            for sequence in readers:
                self.read_back(sequence)

    @rule(pick=_pick)
    def end_ticket(self, pick: int) -> None:
        """End a transfer: complete it, or fail it if part of it was lost."""
        if self.tickets:
            self.end(self.tickets[pick % len(self.tickets)])

    @rule(keep=st.integers(0, 2))
    def settle(self, keep: int) -> None:
        """End all but a few transfers, newest first."""
        for ticket in self.tickets[keep:][::-1]:
            self.end(ticket)

    @rule(ticket=st.integers(0, 400), pairs=st.booleans())
    def wrong_ticket(self, ticket: int, pairs: bool) -> None:  # noqa: FBT001 (drawn)
        """Completing an unknown ticket, or one with lost pairs that are not in it, must be refused."""
        if ticket not in self.tickets:
            self.do(lambda m: m.complete(ticket), lambda m: m.complete(ticket))
        elif pairs:
            strange = [Pairs("device", "host", np.array([[0, 1000]]))]
            self.both(lambda m: m.complete(ticket, strange), lambda m: m.complete(ticket, strange))

    # ---- what must hold ----

    @invariant()
    def books_agree(self) -> None:
        """The manager is consistent, and agrees with the model."""
        self.manager.check()
        self.model.check()
        same("sequences", self.manager.stats().sequences, self.model.stats().sequences)
        for tier in TIERS:
            same(f"free {tier} blocks", self.manager.pool(tier).num_free, self.model.pool(tier).num_free)
        for s in self.sequences:
            same(f"tokens of sequence {s.real}", self.manager.num_tokens(s.real), len(s.tokens))
            same("tokens in the model", self.model.num_tokens(s.model), len(s.tokens))
            same(f"tier of sequence {s.real}", self.manager.tier(s.real), self.model.tier(s.model))
            real, model = self.manager.block_table(s.real).tolist(), self.model.block_table(s.model).tolist()
            same(f"block table of sequence {s.real}", real, model, when=self.same_ids)
            same(f"blocks of sequence {s.real}", len(real), len(model))

    def teardown(self) -> None:
        """End all transfers, read every token of every sequence, and free everything."""
        if self.failed or not hasattr(self, "manager"):
            return
        self.step(everyone=True, lost=[])
        self.settle(keep=0)
        refuse_open(self.manager)
        self.books_agree()
        for sequence in self.sequences:
            if not sequence.lost:
                self.read_back(sequence)
        self.manager.free([sequence.real for sequence in self.sequences])
        for tier in TIERS:
            same(f"free {tier} blocks at the end", self.manager.pool(tier).num_free, self.manager.pool(tier).num_blocks)
        self.manager.check()


def manager_machine(
    factory: Callable[[Config], Any] | None = None,
    *,
    same_ids: bool = True,
    allocate: Callable[[Any, Any], object] | None = None,
    free: Callable[[Any, Any], object] | None = None,
    block_table: Callable[[Any, Any], Iterable[int]] | None = None,
    append: Callable[..., object] | None = None,
    fork: Callable[[Any, Any], object] | None = None,
    copies: Callable[[Any], Iterable[tuple[int, int]]] | None = None,
    cached: Callable[[Any, Any], int] | None = None,
    mark_computed: Callable[[Any, Any], object] | None = None,
    full: type[Exception] | tuple[type[Exception], ...] = OutOfBlocksError,
) -> type[ManagerMachine | OwnManagerMachine]:
    """Make a state machine for a manager with the calls of `BlockManager`, or with its own calls.

    Args:
        factory: makes the manager under test; defaults to Blockyard's.
        same_ids: whether it must choose the same block ids as the reference model, lowest first.
        allocate: for a manager with its own calls: opens a sequence of some tokens and returns it. The arguments below
            count only with this one.
        free: frees a sequence.
        block_table: returns the block ids of a sequence.
        append: appends one token to a sequence, and may return its slot; sequences never grow if None.
        fork: returns a new sequence that shares all blocks of another; never called if None.
        copies: returns the block copies `(from, to)` since it was last called, to run before the step's writes.
        cached: for a prefix cache: returns how many tokens of a new sequence were found in it. `allocate` then gets the
            token ids of the prompt instead of their number, and `append` also gets a token id.
        mark_computed: for a prefix cache: called for each sequence after each step.
        full: what the manager raises if too few blocks are free.

    Returns:
        A state machine; its `TestCase` runs under pytest and unittest.

    Raises:
        InvalidArgumentError: a manager with its own calls lacks `factory`, `allocate`, `free` or `block_table`.

    Example:
        >>> from hypothesis import settings
        >>> from blockyard import BlockManager
        >>> from blockyard.testing.machines import manager_machine, run_state_machine_as_test
        >>> machine = manager_machine(lambda config: BlockManager(**config.arguments()))
        >>> run_state_machine_as_test(machine, settings=settings(max_examples=2, deadline=None, database=None))
    """
    given: dict[str, Callable[..., Any] | None] = {"allocate": allocate, "free": free, "block_table": block_table}
    given |= {"append": append, "fork": fork, "copies": copies, "cached": cached, "mark_computed": mark_computed}
    calls = {name: call for name, call in given.items() if call is not None}
    if calls:
        missing = [name for name in ("allocate", "free", "block_table") if name not in calls]
        if factory is None or missing:
            missing += ["factory"] if factory is None else []
            raise InvalidArgumentError(
                f"got {', '.join(calls)}: a manager with its own calls also needs {', '.join(missing)}"
            )
        own = {"make_manager": staticmethod(factory), "calls": calls}
        own["full"] = full if isinstance(full, tuple) else (full,)
        return type("OwnManagerMachineOf", (OwnManagerMachine if cached is None else OwnCacheMachine,), own)
    made = factory or (lambda config: BlockManager(**config.arguments()))
    return type("ManagerMachineOf", (ManagerMachine,), {"make_manager": staticmethod(made), "same_ids": same_ids})
