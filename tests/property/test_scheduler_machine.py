"""The reference scheduler over simulated memory at random, and the proof that the machine sees it go wrong."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from numpy.typing import NDArray

from blockyard import BlockManager, Pairs
from blockyard.errors import BlockyardError
from blockyard.scheduler import PREEMPTION_MODES, PreemptionMode, Request, Scheduler, Step
from blockyard.testing import Config, SimulatedMemory
from blockyard.testing.machines import SchedulerMachine, run_state_machine_as_test, scheduler_machine

STEP_COUNT = 40


def swapping(manager: BlockManager, config: Config) -> Scheduler:
    return Scheduler(manager, preemption_mode="swap")


def assert_noticed(machine: type[SchedulerMachine]) -> None:
    """The machine must fail, in a fixed search that stops at the first failure and does not shrink it."""
    search = settings(
        max_examples=500,
        stateful_step_count=STEP_COUNT,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, BlockyardError)):
        run_state_machine_as_test(machine, settings=search)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_every_token_is_that_of_endless_memory(mode: PreemptionMode, steps: int):
    machine = scheduler_machine(
        lambda manager, _: Scheduler(manager, preemption_mode=mode, max_num_seqs=6, max_num_batched_tokens=40)
    )
    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES))
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


# ---- a sound scheduler over a copy engine with a bug ----


@pytest.mark.parametrize("dropped", ["copy", "swap_in", "swap_out", "spill", "fetch"])
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
