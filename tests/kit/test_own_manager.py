"""A manager of somebody else under the test kit: the example, and bugs planted in it."""

import re
import runpy
import unittest
from pathlib import Path
from typing import Any

import noticing
import pytest
from hypothesis import settings

from blockyard.errors import InvalidArgumentError
from blockyard.testing import Config, SimulatedMemory
from blockyard.testing.machines import manager_machine, scheduler_machine

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_manager.py"
example = runpy.run_path(str(EXAMPLE))
NoBlocks: Any = example["NoBlocks"]


class Small(example["SmallManager"]):
    """The example's manager, with the constructor of the kit's factories."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.block_size, config.device_blocks)


def machine(made: type = Small, **calls: Any) -> type[Any]:
    return manager_machine(made, **(example["CALLS"] | {"full": NoBlocks} | calls))


def test_a_manager_of_60_lines_passes_and_the_run_says_what_it_covered(capsys: pytest.CaptureFixture[str]):
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 98  # 60 of them are the manager's
    outcome = unittest.TestResult()
    example["TestManager"]("runTest").run(outcome)
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors
    covered = dict(re.findall(r"(\w+) ([\d,]+)(?=[,\n])", capsys.readouterr().out))
    counts = {name: int(count.replace(",", "")) for name, count in covered.items()}
    assert min(counts[name] for name in ("steps", "allocate", "append", "fork", "free", "copies", "refusals")) > 50


def test_a_manager_that_only_opens_and_frees_passes():
    outcome = unittest.TestResult()
    machine(append=None, fork=None, copies=None).TestCase("runTest").run(outcome)
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors


class ForgetsTheCopy(Small):
    def copies(self) -> list[tuple[int, int]]:
        return []


class CopiesBackwards(Small):
    def copies(self) -> list[tuple[int, int]]:
        return [(dst, src) for src, dst in super().copies()]


class WritesToTheShared(Small):
    def append(self, name: str) -> int | None:
        self.users[self.tables[name][-1]] = 1
        return super().append(name)


class Leaks(Small):
    def free(self, name: str) -> None:
        kept = [block for block in self.tables[name] if self.users[block] > 1]
        super().free(name)
        self.users.update((block, self.users[block] + 1) for block in kept)


class FreesTheShared(Small):
    def free(self, name: str) -> None:
        for block in self.tables[name]:
            self.users[block] = 1
        super().free(name)


class GivesOutOneBlockTwice(Small):
    def take(self) -> int:
        block = super().take()
        if not self.unused:
            self.unused.append(block)
        return block


class NamesTheNextSlot(Small):
    def append(self, name: str) -> int | None:
        slot = super().append(name)
        return None if slot is None else slot + 1


class IsFullTooEarly(Small):
    def allocate(self, length: int) -> str:
        if length >= len(self.unused) * self.block_size:
            raise NoBlocks(length)
        return super().allocate(length)


class TakesBlocksAndThenRefuses(Small):
    def append(self, name: str) -> int | None:
        if len(self.unused) == 0 and self.lengths[name] % self.block_size == 0:
            self.tables[name].append(0)
            raise NoBlocks(1)
        return super().append(name)


class RaisesSomethingElse(Small):
    def allocate(self, length: int) -> str:
        try:
            return super().allocate(length)
        except NoBlocks:
            raise IndexError("pop from empty list") from None


class AllocatesTooLittle(Small):
    def allocate(self, length: int) -> str:
        name = super().allocate(length)
        if length > self.block_size:
            self.unused.append(self.tables[name].pop())
        return name


class LeavesTheDevice(Small):
    def take(self) -> int:
        block = super().take()
        return block + 100 if len(self.tables) == 3 else block


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (ForgetsTheCopy, r"sequence 's\d+': position \d+ \(block \d+ of"),
        (CopiesBackwards, r"sequence 's\d+': position \d+ \(block \d+ of"),
        (WritesToTheShared, r"is in the tables of sequences 's\d+', 's\d+'"),
        (Leaks, r"raised NoBlocks \(.*\); it needs \d+ blocks, \d+ are in no block table"),
        (FreesTheShared, r"is in the tables of sequences|KeyError|raised"),
        (GivesOutOneBlockTwice, r"reads token \d+, wanted \d+; block \d+ is in the tables"),
        (NamesTheNextSlot, r"append\(sequence='s\d+'\) returned slot \d+, its block table names \d+"),
        (IsFullTooEarly, r"allocate\(\d+\) raised NoBlocks \(\d+\); it needs \d+ blocks, \d+ are in no block table"),
        (TakesBlocksAndThenRefuses, "raised NoBlocks and changed block tables"),
        (RaisesSomethingElse, r"allocate\(\d+\) raised IndexError: pop from empty list; .* it must raise NoBlocks"),
        (AllocatesTooLittle, r"block_table\(sequence='s\d+'\) is .*, \d+ tokens need more blocks"),
        (LeavesTheDevice, r"slots .* the device has \d+|block ids|raised"),
    ],
)
def test_a_bug_is_found_and_named(bug: type, says: str):
    noticing.assert_noticed(machine(bug), step_count=50, match=says)


def test_a_crash_shows_the_lines_of_the_manager():
    with pytest.raises(AssertionError, match=r"Raised at:\n(?s:.*)test_own_manager\.py:\d+ in allocate"):
        machine(RaisesSomethingElse).TestCase().runTest()


def test_a_copy_engine_that_drops_copies_is_found():
    class Drops(SimulatedMemory):
        def store(self, kind: str, pairs: object, rows: object) -> None:
            """Copy nothing."""

    planted = machine()
    planted.make_memory = Drops
    noticing.assert_noticed(planted, step_count=50, match="reads token")


def test_a_machine_for_own_calls_names_what_is_missing():
    with pytest.raises(InvalidArgumentError, match=r"got allocate: .* also needs free, block_table, factory"):
        manager_machine(allocate=lambda mine, length: mine.allocate(length))


class Numbered(example["SmallManager"]):
    """The example's manager with the calls of a scheduler: sequences are numbers, a call takes several."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.block_size, config.device_blocks)

    def allocate(self, *, counts: list[int]) -> list[int]:
        return [int(super(Numbered, self).allocate(count)[1:]) for count in counts]

    def append(self, sequence: int) -> list[int]:
        return [super().append(f"s{sequence}")]

    def free(self, sequence: int) -> None:
        super().free(f"s{sequence}")

    def block_table(self, sequence: int) -> list[int]:
        return self.tables[f"s{sequence}"]

    def num_tokens(self, sequence: int) -> int:
        return self.lengths[f"s{sequence}"]


class OneByOne:
    """Runs one request at a time."""

    def __init__(self, manager: Any, _: Config) -> None:
        self.manager, self.requests = manager, dict[str, Any]()

    def add(self, request: Any) -> None:
        self.requests[request.request_id] = (request.prompt, request.max_tokens)

    def step(self, simulation: Any) -> dict[str, list[int]]:
        if not self.requests:
            return {}
        manager, size = self.manager, self.manager.block_size
        name, (new, most) = next(iter(self.requests.items()))
        (sequence,) = manager.allocate(counts=[len(new)])
        slots = [manager.block_table(sequence)[i // size] * size + i % size for i in range(len(new))]
        tokens: list[int] = []
        while True:
            table, length = manager.block_table(sequence), manager.num_tokens(sequence)
            tokens += simulation.forward(new, slots, [table], [len(new)], [length])
            if len(tokens) == most:
                break
            slots, new = manager.append(sequence), tokens[-1:]
        manager.free(sequence)
        del self.requests[name]
        return {name: tokens}


def scheduler_over(manager: type) -> type[Any]:
    return scheduler_machine(OneByOne, add=OneByOne.add, step=OneByOne.step, manager=manager)


def test_a_scheduler_runs_over_a_manager_of_somebody_else():
    outcome, case = unittest.TestResult(), scheduler_over(Numbered).TestCase
    case.settings = settings(case.settings, max_examples=25)
    case("runTest").run(outcome)
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors


class NumbersTheNextSlot(Numbered):
    def append(self, sequence: int) -> list[int]:
        return [slot + 1 for slot in super().append(sequence)]


class KeepsBlocks(Numbered):
    def free(self, sequence: int) -> None:
        self.users.update((block, 2) for block in self.block_table(sequence))
        super().free(sequence)


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (NumbersTheNextSlot, r"step \d+: (two tokens of slot_mapping share|row \d+|sequence \d+)"),
        (KeepsBlocks, r"step \d+: allocate\(counts=\[\d+\]\) raised NoBlocks: \d+ blocks? wanted"),
    ],
)
def test_a_scheduler_over_it_finds_its_bugs(bug: type, says: str):
    outcome = unittest.TestResult()
    scheduler_over(bug).TestCase("runTest").run(outcome)
    ((_, said),) = outcome.failures
    assert re.search(f"AssertionError: {says}", said), said


@pytest.mark.parametrize(
    ("machine_of", "says"),
    [
        (
            manager_machine,
            r"Small lacks pool, stats, can_allocate, .*: name the calls .* manager_machine\(factory, alloc",
        ),
        (scheduler_over, "Small lacks block_table, num_tokens: a scheduler needs block_size, allocate, append, free"),
    ],
)
def test_a_machine_says_what_a_manager_lacks(machine_of: Any, says: str):
    noticing.assert_noticed(machine_of(Small), step_count=2, match=says)
