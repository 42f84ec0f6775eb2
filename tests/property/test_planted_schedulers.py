"""Faults that embedders plant in their schedulers, found by the test kit with its default settings."""

import re

import planted_schedulers
import pytest
from hypothesis import Phase, settings
from planted_schedulers import FAULTS, CompletesLater, Embedder, Fault, Row, WaitsForNoReads, find, machine_of

QUICK = [
    planted_schedulers.CompletesFirst,
    planted_schedulers.CompletesAtOnce,
    planted_schedulers.WaitsForNoReads,
    planted_schedulers.NeverCompletes,
    planted_schedulers.NamesWrongTokens,
    planted_schedulers.ReadsAnOldTable,
    planted_schedulers.KeepsTheLost,
    planted_schedulers.FreesTwice,
    planted_schedulers.LoadsTheNextBlock,
]


def title(fault: Fault) -> str:
    return fault.planted.__name__


def assert_found(fault: Fault, seed: int) -> str:
    _, text = find(fault.machine(), seed)
    assert re.search(fault.names, text.partition("\n")[0]), f"{fault.title}, seed {seed}: {text or 'not found'}"
    return text


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.planted in QUICK], ids=title)
def test_a_planted_fault_is_found_and_named(fault: Fault):
    assert_found(fault, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=title)
def test_every_planted_fault_is_found_and_named_with_ten_seeds(fault: Fault):
    for seed in range(10):
        assert_found(fault, seed)


class CompletesBetween(CompletesLater):
    """A ticket ends after the next decision was taken, and before that is executed."""

    def transfer(self, decision, simulation):
        self.complete_late()
        return super().transfer(decision, simulation)


class NamesTokensLater(Embedder):
    """The slots are given before the tokens are named."""

    def append(self, jobs):
        last = [job.tokens[-1] for job in jobs]
        slots = self.manager.append([job.sequence for job in jobs]).tolist()
        self.manager.prefix.note_tokens([job.sequence for job in jobs], last)
        self.batch += [Row(job, [token], [slot]) for job, token, slot in zip(jobs, last, slots, strict=True)]


class FailsWhatItSkips(Embedder):
    """Every seventh decision is not carried out but failed."""

    def transfer(self, decision, simulation):
        if decision.ticket % 7 == 0:
            return self.manager.fail(decision.ticket).tolist()
        return super().transfer(decision, simulation)


@pytest.mark.parametrize("sound", [Embedder, CompletesLater, CompletesBetween, NamesTokensLater, FailsWhatItSkips])
def test_a_scheduler_without_a_fault_passes(sound: type[Embedder]):
    machine = machine_of(sound)
    machine.TestCase.settings = settings(machine.TestCase.settings, max_examples=15)
    assert find(machine, 0)[1] == ""


def test_only_late_memory_finds_a_copy_engine_that_ignores_after():
    class LandsAtOnce(WaitsForNoReads):
        def submit(self, decision, needed=(), lost=()):
            self.execute(decision)
            for pairs in lost:
                self.lose(pairs)

        def finish(self, ticket):
            pass

    machine = machine_of(CompletesLater, LandsAtOnce)
    machine.TestCase.settings = settings(machine.TestCase.settings, max_examples=15)
    assert find(machine, 0)[1] == ""


def test_a_failure_is_one_sentence_then_the_last_ten_steps_by_call_then_the_users_line():
    (fault,) = [fault for fault in FAULTS if fault.planted is planted_schedulers.DropsLosses]
    texts = (assert_found(fault, seed) for seed in range(100))
    # Some runs fail before their tenth step.
    sentence, blank, head, *rest = next(text for text in texts if "The last 10 of " in text).splitlines()
    assert re.fullmatch(r"step \d+: complete\(ticket=\d+\) leaves out what execute returned as lost: .*", sentence)
    assert (blank, head.startswith("The last 10 of ")) == ("", True)
    steps = [line for line in rest if re.fullmatch(r"  step \d+", line)]
    assert len(steps) == 10
    assert any(re.fullmatch(r"    take_decision\(\) -> ticket \d+: .*", line) for line in rest)
    assert any(line.startswith("    append(sequences=[") for line in rest)
    replay = next(at for at, line in enumerate(rest) if line.startswith("Replay: "))
    assert rest[replay - 2].endswith("in transfer: return self.manager.complete(decision.ticket).tolist()"), rest[
        replay - 5 :
    ]


@pytest.mark.parametrize("shrink", [False, True])
def test_the_rules_of_the_example_follow_only_if_it_is_shrunk(shrink: bool):
    (fault,) = [fault for fault in FAULTS if fault.planted is planted_schedulers.CompletesFirst]
    machine = fault.machine()
    machine.TestCase.shrink = shrink
    machine.TestCase.settings = settings(machine.TestCase.settings, phases=[Phase.generate])
    assert ("state.start(" in find(machine, 0)[1]) == shrink
