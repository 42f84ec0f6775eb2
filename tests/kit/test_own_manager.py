"""A manager of somebody else under the test kit: four calls, its own exception, and bugs planted in it."""

import unittest
from typing import Any

import noticing
import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.testing import Config, SimulatedMemory
from blockyard.testing.machines import manager_machine


class Full(Exception):  # noqa: N818 (somebody else's name)
    """The manager's own exception."""


class Small:
    """Block tables with copy-on-write; no prefix cache, no swaps."""

    def __init__(self, config: Config) -> None:
        self.size, self.unused = config.block_size, list(range(config.device_blocks))
        self.users: dict[int, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.copied: list[tuple[int, int]] = []
        self.opened = 0

    def take(self) -> int:
        block = self.unused.pop()
        self.users[block] = 1
        return block

    def open(self, table: list[int], length: int) -> str:
        self.opened += 1
        name = f"s{self.opened}"
        self.tables[name], self.lengths[name] = table, length
        return name

    def allocate(self, length: int) -> str:
        count = -(-length // self.size)
        if count > len(self.unused):
            raise Full(count)
        return self.open([self.take() for _ in range(count)], length)

    def append(self, name: str) -> int | None:
        table, length = self.tables[name], self.lengths[name]
        starts = length % self.size == 0
        if (starts or self.users[table[-1]] > 1) and not self.unused:
            raise Full(1)
        if starts:
            table.append(self.take())
        elif self.users[table[-1]] > 1:
            self.users[table[-1]] -= 1
            self.copied.append((table[-1], self.take()))
            table[-1] = self.copied[-1][1]
        self.lengths[name] += 1
        return table[-1] * self.size + length % self.size

    def fork(self, name: str) -> str:
        for block in self.tables[name]:
            self.users[block] += 1
        return self.open(list(self.tables[name]), self.lengths[name])

    def free(self, name: str) -> None:
        for block in self.tables.pop(name):
            self.users[block] -= 1
            if not self.users[block]:
                self.unused.append(block)

    def copies(self) -> list[tuple[int, int]]:
        now, self.copied = self.copied, []
        return now


def machine(made: type = Small, **calls: Any) -> type[Any]:
    given: dict[str, Any] = {
        "allocate": lambda mine, length: mine.allocate(length),
        "free": lambda mine, name: mine.free(name),
        "block_table": lambda mine, name: mine.tables[name],
        "append": lambda mine, name: mine.append(name),
        "fork": lambda mine, name: mine.fork(name),
        "copies": lambda mine: mine.copies(),
        "full": Full,
    }
    return manager_machine(made, **(given | calls))


def test_a_manager_of_four_calls_passes_and_the_run_says_what_it_covered(capsys: pytest.CaptureFixture[str]):
    case = machine().TestCase
    outcome = unittest.TestResult()
    case("runTest").run(outcome)
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors
    said = capsys.readouterr().out
    assert "covered examples " in said
    for name in ("steps", "allocate", "append", "fork", "free", "copies", "refusals"):
        assert f" {name} " in said


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
        if length >= len(self.unused) * self.size:
            raise Full(length)
        return super().allocate(length)


class TakesBlocksAndThenRefuses(Small):
    def append(self, name: str) -> int | None:
        if len(self.unused) == 0 and self.lengths[name] % self.size == 0:
            self.tables[name].append(0)
            raise Full(1)
        return super().append(name)


class RaisesSomethingElse(Small):
    def allocate(self, length: int) -> str:
        try:
            return super().allocate(length)
        except Full:
            raise IndexError("pop from empty list") from None


class AllocatesTooLittle(Small):
    def allocate(self, length: int) -> str:
        name = super().allocate(length)
        if length > self.size:
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
        (Leaks, r"raised Full \(\d+\); it needs \d+ blocks, \d+ are in no block table"),
        (FreesTheShared, r"is in the tables of sequences|KeyError|raised"),
        (GivesOutOneBlockTwice, r"reads token \d+, wanted \d+; block \d+ is in the tables"),
        (NamesTheNextSlot, r"append\(sequence='s\d+'\) returned slot \d+, its block table names \d+"),
        (IsFullTooEarly, r"allocate\(\d+\) raised Full \(\d+\); it needs \d+ blocks, \d+ are in no block table"),
        (TakesBlocksAndThenRefuses, "raised Full and changed block tables"),
        (RaisesSomethingElse, r"allocate\(\d+\) raised IndexError: pop from empty list; .* it must raise Full"),
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
