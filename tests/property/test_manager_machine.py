"""`BlockManager` beside the reference model at random, and the proof that the machine sees it go wrong."""

from collections.abc import Sequence
from functools import partial

import noticing
import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray

from blockyard import Pairs, StepDecision
from blockyard.testing import Config, LateMemory, ReferenceManager
from blockyard.testing.interfaces import Counts, Handles, TierName
from blockyard.testing.machines import manager_machine, run_state_machine_as_test
from blockyard.testing.model import ReferencePool
from blockyard.testing.model_state import Row

STEP_COUNT = 50

assert_noticed = partial(noticing.assert_noticed, step_count=STEP_COUNT)


def budget(steps: int) -> settings:
    return settings(max_examples=max(1, steps // STEP_COUNT), stateful_step_count=STEP_COUNT, deadline=None)


def test_the_manager_does_what_the_model_does(steps: int):
    run_state_machine_as_test(manager_machine(), settings=budget(steps))


class HighestFirst(ReferenceManager):
    """A manager that gives out the highest free blocks, as somebody's own may."""

    def __init__(self, config: Config) -> None:
        super().__init__(**config.arguments())
        lowest_first = self._state.free_blocks
        self._state.free_blocks = lambda tier: lowest_first(tier)[::-1]


def test_a_manager_that_chooses_other_blocks_passes_where_ids_are_free(steps: int):
    run_state_machine_as_test(manager_machine(HighestFirst, same_ids=False), settings=budget(steps // 4))


def test_a_manager_that_chooses_other_blocks_is_noticed_where_ids_are_not_free():
    assert_noticed(manager_machine(HighestFirst))


# ---- managers with a bug, all but invisible in their tables: only counts and tokens are compared ----


class Buggy(ReferenceManager):
    def __init__(self, config: Config) -> None:
        super().__init__(**config.arguments())


class WritesNextToTheSlot(Buggy):
    def append(self, sequences: Handles, num_tokens: Counts | None = None, *, lookahead: int = 0) -> NDArray[np.int64]:
        slots = super().append(sequences, num_tokens, lookahead=lookahead)
        return np.roll(slots, 1)


class ForgetsCopyOnWrite(Buggy):
    def _copy_on_write(self, row: Row, index: int) -> None:
        self._state.take("device", 1)


class CopiesTheWrongWay(Buggy):
    def take_decision(self) -> StepDecision:
        decision = super().take_decision()
        turned = [
            (kind, Pairs(p.src, p.dst, p.ids[:, ::-1].copy()) if kind == "copy" else p)
            for kind, p in decision.transfers()
        ]
        return StepDecision(decision.ticket, turned, after=decision.after)


class GivesOutLeasedBlocks(Buggy):
    """Blocks go free while a transfer still reads or writes them."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._state.free_blocks = self._state._unreferenced
        self._state.overlappable_blocks = lambda tier: []

    def pool(self, tier: TierName = "device") -> ReferencePool:
        uses = self._state.uses(tier)
        free = sum(not uses[block] for block in self._state._unreferenced(tier))
        return super().pool(tier)._replace(num_free=free)


class ForgetsWhatToWaitFor(Buggy):
    def take_decision(self) -> StepDecision:
        decision = super().take_decision()
        return StepDecision(decision.ticket, decision.transfers())


class SharesWhatHasNotLanded(Buggy):
    """A sequence is handed out for reading before its load has run."""

    def _readable(self, handle: int) -> Row:
        return self._intact(handle)


class DropsAPair(Buggy):
    def take_decision(self) -> StepDecision:
        decision = super().take_decision()
        return StepDecision(decision.ticket, decision.transfers()[1:], after=decision.after)


class LeaksWhenFreed(Buggy):
    def free(self, sequences: Handles) -> None:
        if len(np.atleast_1d(np.asarray(sequences))) < 2:
            super().free(sequences)


@pytest.mark.parametrize(
    "buggy",
    [
        WritesNextToTheSlot,
        ForgetsCopyOnWrite,
        CopiesTheWrongWay,
        GivesOutLeasedBlocks,
        ForgetsWhatToWaitFor,
        SharesWhatHasNotLanded,
        DropsAPair,
        LeaksWhenFreed,
    ],
)
def test_a_manager_with_a_bug_is_noticed(buggy: type[Buggy]):
    assert_noticed(manager_machine(buggy, same_ids=False))


class ForgetsCopiesOfLostBlocks(Buggy):
    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> NDArray[np.uint64]:
        self._state.unlanded.clear()
        return super().complete(ticket, lost)


class ForgetsLosses(Buggy):
    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> NDArray[np.uint64]:
        return super().complete(ticket)


@pytest.mark.parametrize("buggy", [ForgetsCopiesOfLostBlocks, ForgetsLosses])
def test_a_loss_that_is_not_followed_is_noticed(buggy: type[Buggy]):
    assert_noticed(manager_machine(buggy))


# ---- a sound manager over a copy engine with a bug ----


def faulty(dropped: str, tier: str) -> type[LateMemory]:
    class Drops(LateMemory):
        def store(self, kind: str, pairs: Pairs, rows: NDArray[np.int64]) -> None:
            if kind != dropped or tier not in (pairs.src, pairs.dst):
                super().store(kind, pairs, rows)

    return Drops


class PublishesBeforeLanding(LateMemory):
    """Reports a transfer as done and runs it when the next one is done."""

    late: int | None = None

    def finish(self, ticket: int) -> None:
        if self.late is not None:
            super().finish(self.late)
        self.late = ticket


class ShiftsWrites(LateMemory):
    def write(self, slots: NDArray[np.int64] | Sequence[int], tokens: NDArray[np.int64] | Sequence[int]) -> None:
        super().write(np.roll(np.asarray(slots, dtype=np.int64), 1), tokens)


@pytest.mark.parametrize("tier", ["host", "external"])
@pytest.mark.parametrize("kind", ["swap_in", "swap_out"])
def test_a_dropped_swap_is_noticed(kind: str, tier: str):
    machine = manager_machine()
    machine.make_memory = faulty(kind, tier)
    assert_noticed(machine)


def test_a_dropped_copy_is_noticed():
    machine = manager_machine()
    machine.make_memory = faulty("copy", "device")
    assert_noticed(machine)


@pytest.mark.parametrize("memory", [PublishesBeforeLanding, ShiftsWrites])
def test_a_faulty_copy_engine_is_noticed(memory: type[LateMemory]):
    machine = manager_machine()
    machine.make_memory = memory
    assert_noticed(machine)
