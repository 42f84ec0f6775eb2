"""A scheduler with calls of its own under the test kit, and bugs planted in it."""

import importlib.util
from pathlib import Path
from typing import Any

import noticing
import pytest

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError
from blockyard.testing import Config, LateMemory
from blockyard.testing.machines import run_state_machine_as_test, scheduler_machine
from blockyard.testing.machines.own_scheduler import Simulation
from blockyard.testing.machines.scheduler import SchedulerMachine, draw_token
from blockyard.testing.machines.values import Key, seen
from blockyard.testing.machines.watch import SequenceWatch

DRAWN = draw_token(seen(Key(), [1, 2, 3]), 0)
KIT = Path(__file__).parents[2] / "examples" / "test_kit.py"
spec = importlib.util.spec_from_file_location("test_kit", KIT)
kit: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kit)


def machine(scheduler: type) -> type[SchedulerMachine]:
    return scheduler_machine(
        lambda manager, _: scheduler(manager),
        add=lambda made, request: made.enqueue(request.request_id, request.prompt, request.max_tokens),
        step=lambda made, simulation: made.step(simulation.execute, simulation.forward),
        abort=getattr(scheduler, "abort", None),
    )


class Aborts(kit.MyScheduler):
    """Aborts by name."""

    def abort(self, name):
        for jobs in (self.waiting, self.running, self.swapped):
            for job in [job for job in jobs if job.name == name]:
                jobs.remove(job)
                if jobs is not self.waiting:
                    self.manager.free(job.sequence)


def test_every_token_of_the_example_is_that_of_endless_memory():
    run_state_machine_as_test(machine(Aborts))


class WritesToTheWrongSlots(kit.MyScheduler):
    """Two sequences change slots."""

    def step(self, execute, forward):
        def crossed(tokens, slots, *rest):
            return forward(tokens, slots[::-1], *rest)

        return super().step(execute, crossed)


class ReadsAnOldTable(kit.MyScheduler):
    """The block tables are those of the step before."""

    old: tuple = ()

    def step(self, execute, forward):
        def stale(tokens, slots, tables, *lengths):
            used, self.old = self.old, tables
            return forward(tokens, slots, used if len(used) == len(tables) else tables, *lengths)

        return super().step(execute, stale)


class MovesNothing(kit.MyScheduler):
    """Decisions are not carried out."""

    def step(self, execute, forward):
        return super().step(lambda decision: [], forward)


class ForgetsTheSwapped(kit.MyScheduler):
    """What is swapped out never comes back."""

    def preempt(self, job):
        super().preempt(job)
        self.swapped.clear()


class KeepsBlocks(Aborts):
    """What is aborted keeps its blocks."""

    def abort(self, name):
        for jobs in (self.waiting, self.running, self.swapped):
            for job in [job for job in jobs if job.name == name]:
                jobs.remove(job)


class EndsEarly(kit.MyScheduler):
    """The last token is missing."""

    def enqueue(self, name, prompt, max_tokens):
        super().enqueue(name, prompt, max(1, max_tokens - 1))


class NamesAnother(kit.MyScheduler):
    """What finished has another name."""

    def step(self, execute, forward):
        return {name + "x": tokens for name, tokens in super().step(execute, forward).items()}


class Waits(kit.MyScheduler):
    """Nothing runs beside what runs."""

    def step(self, execute, forward):
        return {}


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (WritesToTheWrongSlots, r"row 0 writes slots|slot_mapping\["),
        (ReadsAnOldTable, "block_table"),
        (MovesNothing, r"complete\(ticket=\d+, lost=\[\]\) came before execute"),
        (ForgetsTheSwapped, "steps did nothing|requests are left"),
        (KeepsBlocks, "blocks are free|steps did nothing"),
        (EndsEarly, "in endless memory"),
        (NamesAnother, "finished and is not live"),
        (Waits, "steps did nothing"),
    ],
)
def test_a_bug_is_noticed(bug: type, says: str | None):
    noticing.assert_noticed(machine(bug), step_count=30, match=says)


@pytest.fixture
def simulation() -> Simulation:
    config = Config(block_size=2, device_blocks=4)
    watch = SequenceWatch()
    watch.manager, watch.memory = BlockManager(**config.arguments()), LateMemory(config)
    watch.texts["a", 0] = [1, 2, 3, DRAWN]
    return Simulation(watch, lambda decision: [])


def test_the_model_draws_from_what_it_reads(simulation: Simulation):
    assert simulation.forward([1, 2, 3], [2, 3, 4], [[1, 2]], [3], [3]) == [DRAWN]


def test_blocks_are_copied_for_a_manager_without_decisions(simulation: Simulation):
    simulation.forward([1, 2, 3], [2, 3, 4], [[1, 2]], [3], [3])
    simulation.copy([(1, 3), (2, 0)])
    assert simulation.watch.memory.read([3, 0], 3) == simulation.watch.memory.read([1, 2], 3) == seen(Key(), [1, 2, 3])
    with pytest.raises(AssertionError, match="copy: block ids 4 to 4, the device tier has 4"):
        simulation.copy([(1, 4)])


def test_the_model_refuses_what_no_model_could_run(simulation: Simulation):
    with pytest.raises(AssertionError, match="2 token_ids and 3 slots in slot_mapping, query_lens sum to 3"):
        simulation.forward([1, 2], [2, 3, 4], [[1, 2]], [3], [3])
    with pytest.raises(AssertionError, match=r"share slot 2 \(block 1\): row 0"):
        simulation.forward([1, 2], [2, 2], [[1]], [2], [2])
    with pytest.raises(AssertionError, match=r"block_tables\[0\] is \[1\] and slot_mapping \[6\], of no sequence"):
        simulation.forward([7], [6], [[1]], [1], [1])
    with pytest.raises(AssertionError, match="slots \\[99\\] for 1 tokens, the device has 8"):
        simulation.forward([1], [99], [[1]], [1], [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"add": print}, "add, step and abort"),
        ({"abort": print}, "add, step and abort"),
        ({"add": print, "step": print}, "make is None"),
        ({"make": print, "add": print, "step": print, "resize": True}, "resize is True"),
    ],
)
def test_halves_of_a_scheduler_are_refused(arguments: dict, message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        scheduler_machine(**arguments)
