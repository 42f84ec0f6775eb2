"""Runs a manager next to the reference model: every call goes to both, and they must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

from blockyard._core import AllocStatus, Pairs, StepDecision
from blockyard.errors import BlockyardError, OutOfBlocksError, SequenceStateError
from blockyard.testing.interfaces import FitLike, ManagerLike, TierName
from blockyard.testing.machines.record import show
from blockyard.testing.memory import LateMemory
from blockyard.testing.model import ReferenceManager

__all__ = ["MAX_OPEN", "SideBySide", "Tracked", "answer", "can_move", "handles_of", "move", "same"]

T = TypeVar("T")
MAX_OPEN: Final = 16
"""Maximum number of open tickets; with more, a manager warns."""


@dataclass(slots=True, eq=False)
class Tracked:
    """A sequence: its handles in the manager and in the model, and the tokens that must be read back."""

    real: int
    model: int
    tokens: list[int] = field(default_factory=list)
    lost: bool = False


class SideBySide:
    """A manager, the model and memory, and a state machine's record of their sequences and transfers.

    Attributes:
        same_ids: whether the manager must choose the same blocks as the model.
    """

    same_ids: ClassVar[bool] = True
    manager: ManagerLike
    model: ReferenceManager
    memory: LateMemory

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Tracked] = []
        self.freed: list[Tracked] = []
        self.tickets: list[int] = []
        self.losses: dict[int, list[Pairs]] = {}
        self.pending: list[tuple[int, int]] = []  # slots and tokens of this step
        self.written: set[int] = set()  # real handles with pending tokens
        self.waited: set[int] = set()  # tickets whose device reads some step has waited for
        self.next_token = 0

    def both(self, real: Callable[[ManagerLike], T], model: Callable[[ManagerLike], T]) -> tuple[T | None, T | None]:
        """Call manager and model; both must succeed, or fail with the same error."""
        found, error = _outcome(real, self.manager)
        expected, refusal = _outcome(model, self.model)
        if (error is None) != (refusal is None):
            raise AssertionError(f"the manager: {error or found!r}, the model: {refusal or expected!r}")
        if error is not None and refusal is not None:
            if not isinstance(refusal, type(error)):
                raise AssertionError(f"the manager: {error!r}, the model: {refusal!r}")
            if isinstance(error, OutOfBlocksError) and isinstance(refusal, OutOfBlocksError):
                numbers = [(e.tier, e.wanted, e.free, e.total) for e in (error, refusal)]
                same("tier, wanted, free, total", *numbers)
            return None, None
        return found, expected

    def do(self, real: Callable[[ManagerLike], object], model: Callable[[ManagerLike], object]) -> bool:
        """Make a mutating call on manager and model. Returns whether it succeeded."""

        def did(call: Callable[[ManagerLike], object], manager: ManagerLike) -> bool:
            call(manager)
            return True

        return self.both(lambda m: did(real, m), lambda m: did(model, m))[0] is not None

    def agree(self, real: Callable[[ManagerLike], T], model: Callable[[ManagerLike], T]) -> T | None:
        """Make a query on manager and model; the answers must be equal."""
        found, expected = self.both(real, model)
        same("answer", found, expected)
        return found

    def chosen(self, picks: Sequence[int]) -> list[Tracked]:
        """Pick sequences by number; high numbers pick a freed one, if any."""
        freed, live = self.freed, self.sequences
        stale = [freed[pick % len(freed)] if freed and (pick >= 62 or not live) else None for pick in picks]
        return [old or live[pick % len(live)] for pick, old in zip(picks, stale, strict=True) if old or live]

    def one(self, pick: int) -> Tracked | None:
        """Pick one sequence, if any."""
        return next(iter(self.chosen([pick])), None)

    def fresh(self, count: int) -> list[int]:
        """Return tokens that no sequence has used."""
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def adopt(self, sequence: Tracked, first: int, length: int) -> None:
        """Record a new sequence whose tokens from `first` on are written in this step."""
        tokens = self.fresh(length - first)
        sequence.tokens += tokens
        self.pending += zip(self.manager.slot_mapping(sequence.real, first, length).tolist(), tokens, strict=True)
        self.written.add(sequence.real)
        self.sequences.append(sequence)

    def readable(self) -> list[Tracked]:
        """Return the sequences whose tables the manager can return for this step."""

        def is_readable(sequence: Tracked) -> bool:
            try:
                self.manager.block_tables([sequence.real])
            except SequenceStateError:
                return False
            return not sequence.lost

        return [sequence for sequence in self.sequences if is_readable(sequence)]

    def compare_decisions(self, decision: StepDecision, expected: StepDecision) -> None:
        """Check that every pair is equal. A step may omit waits that an earlier step has already made."""
        if _plain(decision) != _plain(expected):
            raise AssertionError(f"take_decision returned {show(decision)}; the model: {show(expected)}")
        missing = set(expected.after) - set(decision.after) - self.waited
        if missing or not set(decision.after) <= {*self.tickets, decision.ticket}:
            raise AssertionError(f"the step runs after {decision.after}, must run after {expected.after}")
        self.waited |= set(decision.after)

    def some_pairs(self, decision: StepDecision, numbers: Sequence[int]) -> list[Pairs]:
        """Pick pairs of a decision that will be lost."""
        single = [Pairs(pairs.src, pairs.dst, ids[None]) for _, pairs in decision.transfers() for ids in pairs.ids]
        return [single[number % len(single)] for number in sorted(set(numbers))] if single else []

    def end(self, ticket: int) -> None:
        """Finish a ticket's transfers and end it in manager and model."""
        self.memory.finish(ticket)
        self.tickets.remove(ticket)
        lost = self.losses.pop(ticket)
        real, model = self.manager.complete(ticket, lost), self.model.complete(ticket, lost)
        hit = {int(handle) for handle in real}
        expected = {int(handle) for handle in model}
        same("lost sequences", hit, {s.real for s in self.sequences if s.model in expected}, when=self.same_ids)
        for sequence in self.sequences:
            sequence.lost = sequence.lost or sequence.real in hit

    def read_back(self, sequence: Tracked) -> None:
        """Check that every token of a sequence is where its table says."""
        table, tier = self.manager.block_table(sequence.real), self.manager.tier(sequence.real)
        found = self.memory.read(table, len(sequence.tokens), tier)
        same(f"sequence {sequence.real}: tokens read through {tier} blocks {table.tolist()}", found, sequence.tokens)


def _outcome(call: Callable[[ManagerLike], T], manager: ManagerLike) -> tuple[T | None, BlockyardError | None]:
    try:
        return call(manager), None
    except BlockyardError as error:
        return None, error


def handles_of(batch: Sequence[Tracked]) -> tuple[list[int], list[int]]:
    """Return the handles of a batch in the manager and in the model."""
    return [sequence.real for sequence in batch], [sequence.model for sequence in batch]


def answer(fit: FitLike) -> tuple[AllocStatus, int]:
    """Return the parts that manager and model must agree on: the status and the blocks needed."""
    if bool(fit) != (fit.status is AllocStatus.OK or fit.status == AllocStatus.OK):
        raise AssertionError(f"{fit!r} is true, its status is {fit.status}")
    return fit.status, fit.blocks


def can_move(manager: ManagerLike, verb: str, to: Any, handles: list[int], lookahead: int) -> tuple[AllocStatus, int]:
    """Return whether a batch can move by `"swap_out"` or `"swap_in"`."""
    if verb == "swap_out":
        return answer(manager.can_swap_out(handles, to))
    return answer(manager.can_swap_in(handles, to, lookahead=lookahead))


def move(manager: ManagerLike, verb: str, to: Any, handles: list[int]) -> None:
    """Move a batch by `"swap_out"` or `"swap_in"`."""
    (manager.swap_out if verb == "swap_out" else manager.swap_in)(handles, to)


def _plain(decision: StepDecision) -> list[tuple[str, TierName, TierName, list[list[int]]]]:
    return [(kind, pairs.src, pairs.dst, pairs.ids.tolist()) for kind, pairs in decision.transfers()]


def same(what: str, found: object, expected: object, *, when: bool = True) -> None:
    """Fail unless two values are equal."""
    if when and found != expected:
        raise AssertionError(f"{what}: found {found}, expected {expected}")


def refuse_open(manager: object, why: str = "") -> None:
    """Fail if a manager has open tickets at the end. Managers that do not list their tickets are skipped."""
    stats = getattr(manager, "stats", None)
    if left := list(stats().open_tickets if stats else ()):
        raise AssertionError(f"{why}tickets {', '.join(map(str, left[:20]))} were neither completed nor failed")
