"""The reference scheduler over simulated memory at random, and the proof that the machine sees it go wrong."""

from collections.abc import Sequence
from functools import partial

import noticing
import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray

from blockyard import BlockManager, OutOfBlocksError, Pairs
from blockyard.request import RequestGroup
from blockyard.scheduler import PREEMPTION_MODES, Defragmentation, Finished, PreemptionMode, Request, Scheduler, Step
from blockyard.testing import Config, SimulatedMemory
from blockyard.testing.machines import run_state_machine_as_test, scheduler_machine

STEP_COUNT = 40

assert_noticed = partial(noticing.assert_noticed, step_count=STEP_COUNT, max_examples=500)


def swapping(manager: BlockManager, config: Config) -> Scheduler:
    return Scheduler(manager, preemption_mode="swap", defragment=Defragmentation([("dense", 0)]))


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_every_token_is_that_of_endless_memory(mode: PreemptionMode, steps: int):
    machine = scheduler_machine(
        lambda manager, _: Scheduler(manager, preemption_mode=mode, max_num_seqs=6, max_num_batched_tokens=40)
    )
    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES))
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine, settings=budget)


MOVES = [
    None,
    Defragmentation([("free_tail", 0)], max_moves=2),
    Defragmentation([("free_tail", 0), ("contiguous", 1), ("dense", 0)], cached="drop"),
]


@pytest.mark.parametrize("moves", MOVES, ids=["still", "tail", "dense"])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_a_device_that_shrinks_and_grows_ends_only_what_cannot_fit_it(
    mode: PreemptionMode, moves: Defragmentation | None, steps: int
):
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        return Scheduler(manager, preemption_mode=mode, max_num_seqs=6, max_num_batched_tokens=40, defragment=moves)

    machine = scheduler_machine(factory, resize=True)
    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES) // len(MOVES))
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine, settings=budget)


# ---- schedulers with a bug ----


class ForgetsLosses(Scheduler):
    def settle(self, step: Step, lost: Sequence[Pairs] = ()) -> Step:
        return super().settle(step)


class KeepsBlocksOfTheAborted(Scheduler):
    def abort(self, request_id: str) -> None:
        group = self._groups.get(request_id)
        if group is not None:
            for sequence in group.sequences:
                sequence.handle = None
        super().abort(request_id)


class MixesUpRequestsOfOneName(Scheduler):
    """Takes a step's tokens for whoever has the id by then."""

    def update(self, step: Step, sampled: Sequence[Sequence[int]]) -> list[object]:  # type: ignore[override]
        for item in step.batch:
            item.group.alive = item.request_id in self._groups
            item.group.sequences[item.index].handle = item.handle
        return list(super().update(step, sampled))


class NeverBringsBack(Scheduler):
    def _resume(self, batch: object) -> None:  # type: ignore[override]
        return


class ChangesTheSlots(Scheduler):
    def schedule(self) -> Step:
        step = super().schedule()
        return Step(step.decision, step.batch, step.slot_mapping[::-1].copy(), step.block_tables)


class AdmitsAnything(Scheduler):
    def add(self, request: Request) -> None:
        if request.request_id in self._groups:
            self.abort(request.request_id)
        super().add(request)


@pytest.mark.parametrize(
    "buggy",
    [
        ForgetsLosses,
        KeepsBlocksOfTheAborted,
        MixesUpRequestsOfOneName,
        NeverBringsBack,
        ChangesTheSlots,
        AdmitsAnything,
    ],
)
def test_a_scheduler_with_a_bug_is_noticed(buggy: type[Scheduler]):
    assert_noticed(scheduler_machine(lambda manager, _: buggy(manager, preemption_mode="swap")))


# ---- schedulers with a bug that a device of one size hides ----


class RefusesNobody(Scheduler):
    def _refuse_what_no_longer_fits(self) -> None:
        return


class ForgetsWhatWaits(Scheduler):
    """Looks for those that do not fit any more among the running alone."""

    def _refuse_what_no_longer_fits(self) -> None:
        waiting, swapped = self._waiting, self._swapped
        groups = {id(group) for group in (*waiting, *swapped)}
        every, self._groups = self._groups, {n: g for n, g in self._groups.items() if id(g) not in groups}
        super()._refuse_what_no_longer_fits()
        self._groups = every


class RefusesWithoutFreeing(Scheduler):
    def _refuse_what_no_longer_fits(self) -> None:
        release, self._release = self._release, lambda group: None  # type: ignore[method-assign]
        super()._refuse_what_no_longer_fits()
        self._release = release  # type: ignore[method-assign]


class RefusesWhatFits(Scheduler):
    def _lack_of_room(self, group: RequestGroup) -> OutOfBlocksError | None:
        lack = super()._lack_of_room(group)
        wanted, room = group.blocks_to_end(self.manager.block_size), self._device_capacity()
        return lack or (OutOfBlocksError("a block too many", "device", wanted + 1, room) if wanted == room else None)


class RefusesSilently(Scheduler):
    def update(self, step: Step, sampled: Sequence[Sequence[int]]) -> list[Finished]:
        return [finished for finished in super().update(step, sampled) if finished.error is None]


@pytest.mark.parametrize(
    "buggy", [RefusesNobody, ForgetsWhatWaits, RefusesWithoutFreeing, RefusesWhatFits, RefusesSilently]
)
def test_a_scheduler_that_takes_a_resize_wrongly_is_noticed(buggy: type[Scheduler]):
    assert_noticed(scheduler_machine(lambda manager, _: buggy(manager, preemption_mode="swap"), resize=True))


# ---- a sound scheduler over a copy engine with a bug ----


@pytest.mark.parametrize("dropped", ["copy", "swap_in", "swap_out", "spill", "fetch", "move"])
def test_a_dropped_transfer_is_noticed(dropped: str):
    class Drops(SimulatedMemory):
        def store(self, kind: str, pairs: Pairs, rows: NDArray[np.int64]) -> None:
            if kind != dropped:
                super().store(kind, pairs, rows)

    machine = scheduler_machine(swapping)
    machine.make_memory = Drops
    assert_noticed(machine)


def test_transfers_in_the_wrong_order_are_noticed():
    class Backwards(SimulatedMemory):
        """Keeps what is read back until the copies have run."""

        def store(self, kind: str, pairs: Pairs, rows: NDArray[np.int64]) -> None:
            if kind == "copy":
                rows = np.roll(rows, 1, axis=0) if len(rows) > 1 else rows[:, ::-1]
            super().store(kind, pairs, rows)

    machine = scheduler_machine(swapping)
    machine.make_memory = Backwards
    assert_noticed(machine)
