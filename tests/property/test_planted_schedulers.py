"""Faults that embedders plant in their schedulers, found by the test kit with its default settings."""

import re

import planted_schedulers
import pytest
from hypothesis import Phase, settings
from planted_schedulers import FAULTS, Embedder, Fault, Row, find, machine_of

QUICK = [
    planted_schedulers.CompletesFirst,
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


class CompletesLater(Embedder):
    """A ticket ends a step later; what it has lost is known at once."""

    late: tuple = ()

    def transfer(self, decision, simulation):
        pairs = simulation.execute(decision)
        lost = self.manager.lose(decision.ticket, pairs).tolist()
        self.complete_late()
        self.late = (decision.ticket, pairs)
        return lost

    def finish(self, sampled):
        finished = super().finish(sampled)
        if not self.running and not self.swapped:
            self.complete_late()
        return finished

    def complete_late(self):
        if self.late:
            self.manager.complete(*self.late)
            self.late = ()


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


@pytest.mark.parametrize("sound", [Embedder, CompletesLater, NamesTokensLater, FailsWhatItSkips])
def test_a_scheduler_without_a_fault_passes(sound: type[Embedder]):
    machine = machine_of(sound)
    machine.TestCase.settings = settings(machine.TestCase.settings, max_examples=15)
    assert find(machine, 0)[1] == ""


def test_a_failure_is_one_sentence_then_the_last_ten_steps_by_call_then_the_users_line():
    (fault,) = [fault for fault in FAULTS if fault.planted is planted_schedulers.DropsLosses]
    sentence, blank, head, *rest = assert_found(fault, seed=0).splitlines()
    assert re.fullmatch(r"step \d+: complete\(ticket=\d+\) leaves out what execute returned as lost: .*", sentence)
    assert (blank, head.startswith("The last 10 of ")) == ("", True)
    steps = [line for line in rest if re.fullmatch(r"  step \d+", line)]
    assert len(steps) == 10
    assert any(re.fullmatch(r"    take_decision\(\) -> ticket \d+: .*", line) for line in rest)
    assert any(line.startswith("    append(sequences=[") for line in rest)
    assert rest[-1].endswith("in transfer: return self.manager.complete(decision.ticket).tolist()")


@pytest.mark.parametrize("shrink", [False, True])
def test_the_rules_of_the_example_follow_only_if_it_is_shrunk(shrink: bool):
    (fault,) = [fault for fault in FAULTS if fault.planted is planted_schedulers.CompletesFirst]
    machine = fault.machine()
    machine.TestCase.shrink = shrink
    machine.TestCase.settings = settings(machine.TestCase.settings, phases=[Phase.generate])
    assert ("state.start(" in find(machine, 0)[1]) == shrink
