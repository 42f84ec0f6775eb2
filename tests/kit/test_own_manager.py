"""A manager of somebody else under the test kit: the example, and bugs planted in it."""

import re
import runpy
import unittest
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import noticing
import pytest
from hypothesis import seed, settings

from blockyard.errors import InvalidArgumentError
from blockyard.testing import Config, SimulatedMemory
from blockyard.testing.machines import manager_machine, prefix_machine, scheduler_machine
from blockyard.testing.machines.values import Key
from blockyard.testing.machines.watch import SequenceWatch

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


class LosesCopiesWhenOneIsFreed(Small):
    def free(self, name: str) -> None:
        super().free(name)
        self.copied.clear()


class LeavesTheDevice(Small):
    def take(self) -> int:
        block = super().take()
        return block + 100 if len(self.tables) == 3 else block


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (ForgetsTheCopy, r"put block (\d+) in place of block (\d+) in step \d+, .* returned \[\] without \(\2, \1\)"),
        (CopiesBackwards, r"put block (\d+) in place of block (\d+) .*\(\1, \2\).*\] without \(\2, \1\)"),
        (WritesToTheShared, r"is in the tables of sequences 's\d+', 's\d+'"),
        (Leaks, r"raised NoBlocks \(.*\); it needs \d+ blocks, \d+ are in no block table"),
        (FreesTheShared, r"is in the tables of sequences|KeyError|raised"),
        (GivesOutOneBlockTwice, r"reads token \d+, wanted \d+; block \d+ is in the tables"),
        (NamesTheNextSlot, r"append\(sequence='s\d+'\) returned slot \d+, its block table names \d+"),
        (IsFullTooEarly, r"allocate\(\d+\) raised NoBlocks \(\d+\); it needs \d+ blocks, \d+ are in no block table"),
        (TakesBlocksAndThenRefuses, "raised NoBlocks and changed block tables"),
        (RaisesSomethingElse, r"allocate\(\d+\) raised IndexError: pop from empty list; .* it must raise NoBlocks"),
        (AllocatesTooLittle, r"block_table\(sequence='s\d+'\) is .*, \d+ tokens need more blocks"),
        (LosesCopiesWhenOneIsFreed, r"put block (\d+) in place of block (\d+) in step .* returned \[\] without"),
        (LeavesTheDevice, r"slots .* the device has \d+|block ids|raised"),
    ],
)
def test_a_bug_is_found_and_named(bug: type, says: str):
    noticing.assert_noticed(machine(bug), step_count=50, match=says)


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (
            {"append": lambda mine, name, token: token},
            r"missing 1 .* argument: 'token'; `append=` gets the manager and",
        ),
        (
            {"allocate": lambda mine, prompt: len(prompt)},
            r"no len\(\); `allocate=` gets the manager and the number of t",
        ),
        (
            {"free": lambda name: name},
            r"free\('s\d+'\) raised TypeError: .*; `free=` gets the manager and the sequence\n",
        ),
    ],
)
def test_a_function_with_other_arguments_is_told_which_it_gets(calls: dict[str, Any], says: str):
    noticing.assert_noticed(machine(**calls), step_count=50, match=says)


def test_a_crash_while_blocks_are_free_is_not_taken_for_a_lack_of_blocks():
    with pytest.raises(AssertionError) as found:
        machine(allocate=lambda *_: {}["gone"]).TestCase().runTest()
    assert re.search(r"allocate\(\d+\) raised KeyError: 'gone' \[Config", str(found.value))


def test_a_crash_shows_the_lines_of_the_manager():
    with pytest.raises(AssertionError, match=r"Raised at:\n(?s:.*)test_own_manager\.py:\d+ in allocate"):
        machine(RaisesSomethingElse).TestCase().runTest()


def test_a_copy_engine_that_drops_copies_is_found():
    class Drops(SimulatedMemory):
        def store(self, kind: str, pairs: object, rows: object) -> None:
            """Copy nothing."""

    planted = machine()
    planted.make_memory = Drops
    says = r"reads token .*put block (\d+) in place of block (\d+) in step \d+, and copies\(\) returned .*\(\2, \1\)"
    noticing.assert_noticed(planted, step_count=50, match=says)


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


@pytest.mark.parametrize("name", ["pool", "slot_mapping", "stats", "tier", "check", "groups", "prefix"])
def test_what_a_manager_keeps_under_a_name_of_ours_is_left_alone(name: str):
    class Keeps(Numbered):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            setattr(self, name, {"kept": 1})

    outcome, case = unittest.TestResult(), scheduler_over(Keeps).TestCase
    case.settings = settings(case.settings, max_examples=3)
    case("runTest").run(outcome)
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors


def test_a_request_is_named_with_those_that_have_equal_tokens():
    record = SequenceWatch()
    record.texts = {("a1", 0): [1, 2], ("b2", 0): [1, 2], ("c3", 0): [1, 3], ("b2", 1): [1, 4]}
    record.keys = dict.fromkeys(("a1", "b2", "c3"), Key())
    assert record.last_of("a1") == "'a1' (equal tokens: 'b2'), for which forward has computed no sequence"
    assert record.last_of("c3") == "'c3', for which forward has computed no sequence"


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
        (
            lambda small: prefix_machine(lambda config, _: small(config)),
            r"Small lacks prefix, defrag, .*: a manager without them is tested under a scheduler, by scheduler_m",
        ),
    ],
)
def test_a_machine_says_what_a_manager_lacks(machine_of: Any, says: str):
    noticing.assert_noticed(machine_of(Small), step_count=2, match=says)


class Cached(int):
    """A sequence that knows how many of its tokens were found in the prefix cache."""

    cached_tokens = 0


class Caching(Numbered):
    """A manager with a prefix cache, whose tables are lists; if blocks run out, the whole cache goes."""

    prefix = SimpleNamespace(enabled=True)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.found: dict[Any, int] = {}
        self.texts: dict[int, list[int]] = {}

    def key(self, tokens: list[int]) -> Any:
        return tuple(tokens)

    def hits(self, prompt: list[int]) -> list[int]:
        ends = range(self.block_size, len(prompt), self.block_size)
        return list(takewhile(lambda block: block >= 0, (self.found.get(self.key(prompt[:end]), -1) for end in ends)))

    def allocate(self, prompt: list[int]) -> int:
        hits, size = self.hits(prompt), self.block_size
        for block in hits:
            self.users[block] += 1
        fresh = -(-len(prompt) // size) - len(hits)
        if fresh > len(self.unused):
            self.forget()
        if fresh > len(self.unused):
            self.drop(hits)
            raise NoBlocks(fresh)
        table = [*hits, *(self.take() for _ in range(fresh))]
        sequence = Cached(self.open(table, len(prompt))[1:])
        sequence.cached_tokens, self.texts[sequence] = len(hits) * size, list(prompt)
        return sequence

    def append(self, sequence: int, token_ids: list[int]) -> list[int]:
        if not self.unused:
            self.forget()
        self.texts[sequence] += token_ids
        return super().append(sequence)

    def fork(self, sequence: int) -> int:
        child = Cached(super().fork(f"s{sequence}")[1:])
        self.texts[child] = list(self.texts[sequence])
        return child

    def mark_computed(self, sequence: int) -> None:
        for number, block in enumerate(self.block_table(sequence)[: self.num_tokens(sequence) // self.block_size], 1):
            self.publish(self.key(self.texts[sequence][: number * self.block_size]), block)

    def publish(self, key: Any, block: int) -> None:
        if key not in self.found and block not in self.found.values():
            self.found[key] = block
            self.users[block] += 1

    def forget(self) -> None:
        self.drop(self.found.values())
        self.found.clear()

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            self.unused += [block] if not self.users[block] else []


class Reuses(OneByOne):
    """Runs one request at a time over a prefix cache."""

    def step(self, simulation: Any) -> dict[str, list[int]]:
        if not self.requests:
            return {}
        manager, size = self.manager, self.manager.block_size
        name, (prompt, most) = next(iter(self.requests.items()))
        sequence = manager.allocate(prompt)
        cached, table = sequence.cached_tokens, manager.block_table(sequence)
        new, slots = prompt[cached:], [table[i // size] * size + i % size for i in range(cached, len(prompt))]
        tokens: list[int] = []
        while True:
            table, length = manager.block_table(sequence), manager.num_tokens(sequence)
            tokens += simulation.forward(new, slots, [table], [len(new)], [length])
            manager.mark_computed(sequence)
            if len(tokens) == most:
                break
            slots, new = manager.append(sequence, token_ids=tokens[-1:]), tokens[-1:]
        manager.free(sequence)
        del self.requests[name]
        return {name: tokens}


def reuse_over(manager: type) -> type[Any]:
    return scheduler_machine(Reuses, add=Reuses.add, step=Reuses.step, manager=manager)


def test_a_prefix_cache_of_somebody_else_is_tested_under_a_scheduler(capsys: pytest.CaptureFixture[str]):
    outcome, case = unittest.TestResult(), seed(0)(reuse_over(Caching)).TestCase
    case.settings = settings(case.settings, database=None, max_examples=40)
    case("runTest").run(outcome)
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors
    due, hit = (int(n) for n in re.findall(r"(?:hits due|due hit) (\d+)", capsys.readouterr().out))
    assert hit > due // 2 > 10


class KeysOneBlock(Caching):
    def key(self, tokens: list[int]) -> Any:
        return tuple(tokens[-self.block_size :])


class KeysOneBlockInItsPlace(Caching):
    def key(self, tokens: list[int]) -> Any:
        return len(tokens), tuple(tokens[-self.block_size :])


class HitsWholePrompts(Caching):
    def hits(self, prompt: list[int]) -> list[int]:
        return super().hits([*prompt, 0])


class DoesNotSayWhatItHit(Caching):
    def allocate(self, prompt: list[int]) -> int:
        return int(super().allocate(prompt))


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (KeysOneBlock, r"sequence \d+.*, whose token \d+ was computed after other tokens than .* by forward of"),
        (KeysOneBlockInItsPlace, r"whose token \d+ was computed after other tokens than \[.*\] before it; block"),
        (HitsWholePrompts, r"row 0, sequence \d+.*: query_lens\[0\] is 0, but a model draws from the last token"),
        (DoesNotSayWhatItHit, r"allocate returned \d+ without cached_tokens: as the manager's prefix.enabled is true"),
    ],
)
def test_a_wrong_hit_is_found_and_named(bug: type, says: str):
    noticing.assert_noticed(reuse_over(bug), step_count=30, match=says)


def cache_machine(manager: type) -> type[Any]:
    return manager_machine(
        manager,
        allocate=lambda mine, prompt: mine.allocate(prompt),
        append=lambda mine, sequence, token: mine.append(sequence, [token]),
        fork=lambda mine, sequence: mine.fork(sequence),
        free=lambda mine, sequence: mine.free(sequence),
        copies=lambda mine: mine.copies(),
        block_table=lambda mine, sequence: mine.block_table(sequence),
        cached=lambda _, sequence: sequence.cached_tokens,
        mark_computed=lambda mine, sequence: mine.mark_computed(sequence),
        full=NoBlocks,
    )


def test_a_prefix_cache_of_somebody_else_passes_alone(capsys: pytest.CaptureFixture[str]):
    outcome, case = unittest.TestResult(), seed(0)(cache_machine(Caching)).TestCase
    case.settings = settings(case.settings, database=None, max_examples=40)
    case("runTest").run(outcome)
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors
    said = capsys.readouterr().out.replace(",", "")
    due, hit = (int(re.findall(rf"{name} (\d+)", said)[0]) for name in ("tokens due", "due hit"))
    assert due >= hit > due * 0.7 > 500
    assert "not judged" not in said


def test_a_short_run_says_that_hits_were_not_judged(capsys: pytest.CaptureFixture[str]):
    case = seed(0)(cache_machine(Caching)).TestCase
    case.settings = settings(case.settings, database=None, max_examples=1, stateful_step_count=5)
    case("runTest").run(outcome := unittest.TestResult())
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors
    assert re.search(r"\nhits: not judged \(\d+ tokens due, 100 needed\)", capsys.readouterr().out)


class NeverPublishes(Caching):
    def publish(self, key: Any, block: int) -> None:
        """Publish nothing."""


class NeverHits(Caching):
    def hits(self, prompt: list[int]) -> list[int]:
        return super().hits(prompt[:0])


@pytest.mark.parametrize("bug", [NeverPublishes, NeverHits])
def test_a_prefix_cache_alone_that_hardly_hits_fails(bug: type):
    outcome, case = unittest.TestResult(), seed(0)(cache_machine(bug)).TestCase
    case.settings = settings(case.settings, database=None, max_examples=40)
    case("runTest").run(outcome)
    ((_, said),) = outcome.failures
    assert re.search(r"allocate has hit 0 of \d+ tokens of prompts that freed sequences had computed", said), said
    assert re.search(r"step \d+: allocate\(\[.*\]\) hit 0 tokens, blocks hold the first \d+ of a sequence that", said)


class WritesToTheSharedBlock(Caching):
    """Forks, and does not copy on write."""

    def append(self, sequence: int, token_ids: list[int]) -> list[int]:
        if self.num_tokens(sequence) % self.block_size == 0:
            return super().append(sequence, token_ids)
        block = self.block_table(sequence)[-1]
        users, self.users[block] = self.users[block], 1
        try:
            return super().append(sequence, token_ids)
        finally:
            self.users[block] = users


class SharesTheListOfKeys(Caching):
    """A fork and its parent add the keys of their blocks to one list."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.keys: dict[int, list[Any]] = {}

    def key(self, tokens: list[int]) -> Any:
        before = self.key(tokens[: -self.block_size]) if tokens else None
        return (before, *tokens[-self.block_size :])

    def fork(self, sequence: int) -> int:
        child = super().fork(sequence)
        self.keys[child] = self.keys.setdefault(sequence, [])
        return child

    def mark_computed(self, sequence: int) -> None:
        keys, text, size = self.keys.setdefault(sequence, []), self.texts[sequence], self.block_size
        while (at := len(keys) * size) + size <= len(text):
            keys.append((keys[-1] if keys else self.key([]), *text[at : at + size]))
        for key, block in zip(keys, self.block_table(sequence), strict=False):
            self.publish(key, block)


class SaysTooLittle(Caching):
    def allocate(self, prompt: list[int]) -> int:
        sequence: Any = super().allocate(prompt)
        sequence.cached_tokens = max(0, sequence.cached_tokens - self.block_size)
        return sequence


class HitsTooMuch(Caching):
    def allocate(self, prompt: list[int]) -> int:
        sequence: Any = super().allocate(prompt)
        sequence.cached_tokens += len(prompt)
        return sequence


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (KeysOneBlock, r"reads token (\d+), which was computed after other tokens than those before it here"),
        (KeysOneBlockInItsPlace, r"reads token (\d+), which was computed after other tokens than those before it here"),
        (WritesToTheSharedBlock, r"reads token \d+, wanted \d+; block (\d+) is in the tables of sequences \d+, \d+"),
        (SharesTheListOfKeys, r"reads token \d+, (wanted \d+|which was computed after other tokens)"),
        (SaysTooLittle, r"cached\(\d+\) returned \d+, so the step writes to block \d+ .* of sequence \d+, too"),
        (HitsTooMuch, r"cached\(\d+\) returned \d+, the prompt has \d+ tokens|reads token -1, wanted \d+"),
    ],
)
def test_a_wrong_hit_of_a_cache_alone_is_found_and_named(bug: type, says: str):
    noticing.assert_noticed(cache_machine(bug), step_count=50, max_examples=30, match=says)


class KeepsTheKeysOfFreedBlocks(Caching):
    def forget(self) -> None:
        self.drop(self.found.values())


def test_a_copy_on_write_of_an_earlier_step_is_not_blamed():
    says = [planted_report(KeepsTheKeysOfFreedBlocks, number) for number in range(12)]
    assert all(re.match(r"step \d+: ", said) for said in says), says
    assert not [said for said in says if "in place of block" in said]


def planted_report(bug: type, number: int) -> str:
    """Return the first line of the failure that a fault has with a seed."""
    outcome, case = unittest.TestResult(), seed(number)(cache_machine(bug)).TestCase
    case.settings = settings(case.settings, database=None, max_examples=40)
    case("runTest").run(outcome)
    return "".join(text for _, text in outcome.failures).partition("AssertionError: ")[2].partition("\n")[0]
