"""What a failing machine prints: the sizes, the last steps, and how to replay the example."""

import re
import unittest
from typing import Any

import pytest
from hypothesis import Phase, seed, settings

from blockyard import BlockManager, CacheGroup, Scheduler
from blockyard.testing import Config
from blockyard.testing.machines import manager_machine, scheduler_machine
from blockyard.testing.machines.record import CallRecord


def run(machine: type[Any], number: int | None = 0, **options: Any) -> str:
    """Run a machine and return its failure."""
    case, outcome = (machine if number is None else seed(number)(machine)).TestCase, unittest.TestResult()
    case.settings = settings(case.settings, **{"database": None, "max_examples": 60, **options})
    case("runTest").run(outcome)
    return "".join(text for _, text in [*outcome.failures, *outcome.errors]).partition("AssertionError: ")[2]


ALIKE = r"( \(equal tokens: [^)]*\))?"


class Tables:
    """A manager whose `open` gives the same block to two sequences once it has given out four."""

    def __init__(self, config: Config) -> None:
        self.size, self.free, self.tables = config.block_size, list(range(config.device_blocks)), {}
        self.opened = 0

    def open(self, tokens: int) -> int:
        count = -(-tokens // self.size)
        if count > len(self.free):
            raise MemoryError(count)
        self.opened += 1
        self.tables[self.opened] = [self.free.pop() for _ in range(count)]
        if self.opened > 3:
            self.tables[self.opened][0] = next(iter(self.tables.values()))[0]
        return self.opened

    def close(self, name: int) -> None:
        self.free += self.tables.pop(name)


def tables_machine(**calls: Any) -> type[Any]:
    own = {
        "allocate": Tables.open,
        "free": Tables.close,
        "block_table": lambda mine, name: mine.tables[name],
        "full": MemoryError,
    }
    return manager_machine(Tables, **(own | calls))


def test_the_first_line_has_the_sizes_of_the_manager():
    first = run(tables_machine()).partition("\n")[0]
    assert re.search(
        r"position \d+ .*; block \d+ is in the tables of .*\[Config\(block_size=\d, device_blocks=\d+", first
    )
    crossed = scheduler_machine(manager=lambda config: BlockManager(**config.arguments()), make=lambda *_: object())
    assert re.search(r"^AttributeError: .*\[Config\(block_size=", run(crossed).partition("\n")[0])


FULL, WINDOW = CacheGroup.full_attention(), CacheGroup.sliding_window(5)


@pytest.mark.parametrize(
    ("groups", "own"),
    [([FULL, WINDOW], False), ([CacheGroup.recurrent()], False), ([FULL, WINDOW], True), ([WINDOW], True)],
)
def test_a_manager_with_groups_that_the_machine_cannot_play_is_refused_by_name(groups: list[CacheGroup], own: bool):
    calls = {"add": lambda *_: None, "step": lambda *_: {}} if own else {}
    machine = scheduler_machine(
        lambda manager, _: Scheduler(manager),
        manager=lambda config: BlockManager(**config.arguments(), groups=groups),
        **calls,
    )
    assert re.search(r"^InvalidArgumentError: manager makes a manager of \[CacheGroup", run(machine).partition("\n")[0])


def test_a_failure_is_replayed_by_the_call_that_it_prints():
    said = run(tables_machine())
    line = re.findall(r"\nReplay: add this line below .* with its name in place of `TestX`:\n(import .*)", said)[0]
    exec(line, {"TestX": (machine := tables_machine()).TestCase})
    again = run(machine, None)
    assert again.partition("\nReplay")[0] == said.partition("\nReplay")[0]


def test_a_shrunk_failure_prints_its_rules_and_the_replay_once():
    machine = tables_machine()
    machine.TestCase.shrink = True
    said = run(machine, phases=[Phase.generate, Phase.shrink])
    assert "state.step(" in said
    assert said.count("reproduce_failure(") == 1


def test_steps_that_did_nothing_are_one_line():
    record = CallRecord()
    record.note("start")
    for ran in (False, True, False, False, False, False, True, *[False] * 20):
        record.next_step()
        record.note(f"ran {record.step}")
        if not ran:
            record.idle()
    assert record.timeline().splitlines()[1:] == [
        "  step 0",
        "    start",
        "  step 1",
        "    ran 1",
        "  step 2",
        "    ran 2",
        "  steps 3 to 6: nothing ran",
        "  step 7",
        "    ran 7",
        "  steps 8 to 26: nothing ran",
        "  step 27",
        "    ran 27",
    ]
    assert record.timeline().startswith("The last 28 of 28 steps (step 0 is the start):")


class Fails:
    """A manager under a scheduler whose `free` raises an exception of its own."""

    def __init__(self, inner: BlockManager) -> None:
        self.inner = inner

    def free(self, sequence: int) -> None:
        raise KeyError(sequence)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_call_that_raised_is_the_last_line_of_its_step():
    def step(mine: Any, _: Any) -> dict[str, list[int]]:
        mine.free(mine.allocate(1))
        return {}

    said = run(
        scheduler_machine(
            lambda manager, _: manager,
            add=lambda *_: None,
            step=step,
            manager=lambda config: Fails(BlockManager(**config.arguments())),
        )
    )
    assert re.match(r"step 1: free\(sequences=\d+\) raised KeyError: \d+", said)
    assert re.search(r"allocate\(prompts=\[1\]\) -> \d+\n +free\(sequences=\d+\) raised KeyError\n", said)


def test_a_call_that_the_machine_refuses_is_the_last_line_of_its_step():
    def step(mine: Any, _: Any) -> dict[str, list[int]]:
        sequence = mine.allocate([1, 2, 3])
        mine.mark_computed(sequence)
        return {}

    said = run(
        scheduler_machine(
            lambda manager, _: manager,
            add=lambda *_: None,
            step=step,
            manager=lambda config: BlockManager(**config.arguments(), prefix_caching=True),
        )
    )
    assert re.match(r"step 1: mark_computed\(sequences=\d+\): token 0 of sequence \d+ is not computed yet", said)
    assert re.search(r"allocate\(prompts=.* -> \d+\n +mark_computed\(sequences=\d+\)\n", said)


@pytest.mark.parametrize(
    ("calls", "says", "line"),
    [
        ({"copies": lambda _: [3]}, r"step 1: copies\(\) returned \[3\], must be pairs of block ids \(from, to\)", ""),
        (
            {"block_table": lambda *_: {}["gone"]},
            r"step \d+: block_table\(1\) raised KeyError: 'gone'",
            r"block_table\(1\) raised KeyError\n",
        ),
    ],
)
def test_what_a_manager_returns_wrongly_is_named(calls: dict[str, Any], says: str, line: str):
    said = run(tables_machine(**calls))
    assert re.match(says, said), said
    assert re.search(line, said)


def test_requests_that_wait_are_named_with_what_became_of_their_sequences():
    class Loses:
        """Computes the prompt of each request once, frees it and forgets the request."""

        def __init__(self, manager: Any) -> None:
            self.manager, self.waiting = manager, []

        def step(self, simulation: Any) -> dict[str, list[int]]:
            if self.waiting:
                prompt = list(self.waiting.pop().prompt)
                sequence = self.manager.allocate(len(prompt))
                slots = self.manager.slot_mapping(sequence, 0, len(prompt))
                simulation.forward(prompt, slots, [self.manager.block_table(sequence)], [len(prompt)], [len(prompt)])
                self.manager.free(sequence)
            return {}

    machine = scheduler_machine(
        lambda manager, _: Loses(manager),
        add=lambda mine, request: mine.waiting.append(request),
        step=lambda mine, simulation: mine.step(simulation),
    )
    said = run(machine)
    assert re.match(
        r"step \d+: \d+ requests wait and \d steps did nothing: .*'\w+'" + ALIKE + ", whose sequence "
        r"\d+ was opened in step \d+ and",
        said,
    ), said
    assert "steps" in said.partition("The last")[2]
    assert said.count("    free(sequences=") >= 2


def test_requests_that_never_finish_are_named():
    class Repeats:
        """Computes the prompt of the first request in each step."""

        def __init__(self, manager: Any) -> None:
            self.manager, self.waiting = manager, []

        def step(self, simulation: Any) -> dict[str, list[int]]:
            for request in self.waiting[:1]:
                prompt = list(request.prompt)
                sequence = self.manager.allocate(len(prompt))
                slots = self.manager.slot_mapping(sequence, 0, len(prompt))
                simulation.forward(prompt, slots, [self.manager.block_table(sequence)], [len(prompt)], [len(prompt)])
                self.manager.free(sequence)
            return {}

    machine = scheduler_machine(
        lambda manager, _: Repeats(manager),
        add=lambda mine, request: mine.waiting.append(request),
        step=lambda mine, simulation: mine.step(simulation),
    )
    said = run(machine, max_examples=1, stateful_step_count=1)
    assert re.match(
        r"after step \d+: \d+ requests are left, \d+ steps after the last one came: '\w+'" + ALIKE + ", ", said
    ), said
