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
    config = Config(block_size=2, device_blocks=8)
    watch = SequenceWatch()
    watch.manager, watch.memory = BlockManager(**config.arguments(), prefix_caching=True), LateMemory(config)
    watch.texts["a", 0] = watch.texts["b", 0] = [1, 2, 3, DRAWN]
    watch.keys = {"a": Key(), "b": Key()}
    return Simulation(watch, lambda decision: [])


def opened(simulation: Simulation, count: int, length: int = 3) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """Open sequences of the same prompt in one step. Returns the manager, and each with its slots and block table."""
    manager = simulation.watch.watch(simulation.watch.manager)
    sequences = [manager.allocate([1, 2, 3][:length]) for _ in range(count)]
    manager.complete(manager.take_decision().ticket)
    slots = [manager.slot_mapping(one, one.cached_tokens, length).tolist() for one in sequences]
    return manager, sequences, slots, [manager.block_table(one).tolist() for one in sequences]


def test_the_model_draws_from_what_it_reads(simulation: Simulation):
    _, _, (slots,), tables = opened(simulation, 1)
    assert simulation.forward([1, 2, 3], slots, tables, [3], [3]) == [DRAWN]


def test_blocks_are_copied_for_a_manager_without_decisions(simulation: Simulation):
    _, _, (slots,), tables = opened(simulation, 1)
    simulation.forward([1, 2, 3], slots, tables, [3], [3])
    (one, two), memory = tables[0], simulation.watch.memory
    simulation.copy([(one, 6), (two, 7)])
    assert memory.read([6, 7], 3) == memory.read([one, two], 3) == seen(Key(), [1, 2, 3])
    with pytest.raises(AssertionError, match="copy: block ids 9 to 9, the device tier has 8"):
        simulation.copy([(4, 9)])


@pytest.mark.parametrize("length", [2, 3])  # of two full blocks, one each: all are merged; or the last one stays
def test_a_table_or_slots_from_before_blocks_were_merged_are_refused(simulation: Simulation, length: int):
    manager, (one, two), slots, tables = opened(simulation, 2, length)
    simulation.forward([1, 2, 3][:length] * 2, slots[0] + slots[1], tables, [length] * 2, [length] * 2)
    manager.mark_computed([one, two])
    now = manager.block_table(two).tolist()
    assert tables[1][0] != now[0] == tables[0][0]
    with pytest.raises(AssertionError, match=r"of no sequence on the device; it was|writes slots") as found:
        simulation.forward([length], slots[1][-1:], [tables[1]], [1], [length])
    for named in (f"block_tables[0] is {tables[1]}", f"block_table(sequence={two}) is {now}"):
        assert named in str(found.value)
    with pytest.raises(AssertionError, match=rf"slot_mapping\[0\] is {slots[1][0]} .* 0 is slot {now[0] * 2}"):
        simulation.forward([1, 2, 3][:length], slots[1], [now], [length], [length])
    at = manager.slot_mapping(two, length - 1, length)
    assert len(simulation.forward([length], at, [now], [1], [length])) == 1


def test_rows_that_share_a_slot_are_named_by_their_own_sequences(simulation: Simulation):
    """Three sequences have the same blocks; the first, which does not run, is one token longer."""
    manager, (parent,), (slots,), (table,) = opened(simulation, 1)
    simulation.forward([1, 2, 3], slots, [table], [3], [3])
    manager.append(parent, token_ids=[DRAWN])
    manager.complete(manager.take_decision().ticket)
    one, two = manager.fork(parent), manager.fork(parent)
    manager.truncate(one, 3)
    manager.truncate(two, 3)
    with pytest.raises(
        AssertionError, match=rf"share slot {slots[2]} .*: row 0, sequence {one}.* and row 1, sequence {two}"
    ):
        simulation.forward([3, 3], slots[2:] * 2, [table, table], [1, 1], [3, 3])


def test_the_model_refuses_what_no_model_could_run(simulation: Simulation):
    with pytest.raises(AssertionError, match="2 token_ids and 3 slots in slot_mapping, query_lens sum to 3"):
        simulation.forward([1, 2], [2, 3, 4], [[1, 2]], [3], [3])
    with pytest.raises(AssertionError, match=r"share slot 2 \(block 1\): row 0"):
        simulation.forward([1, 2], [2, 2], [[1]], [2], [2])
    with pytest.raises(AssertionError, match=r"block_tables\[0\] is \[1\] and slot_mapping \[6\], of no sequence"):
        simulation.forward([7], [6], [[1]], [1], [1])
    with pytest.raises(AssertionError, match="slots \\[99\\] for 1 tokens, the device has 16"):
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
