"""A manager of somebody else under the test kit: the example, and bugs planted in it."""

import re
import runpy
import unittest
from pathlib import Path
from typing import Any

import noticing
import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.testing import Config, SimulatedMemory
from blockyard.testing.machines import manager_machine

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
