"""A scheduler with its own calls that knows n > 1, draft tokens, salts and stop tokens, and bugs planted in it."""

import re
import unittest
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import noticing
import pytest
from hypothesis import seed, settings

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Request
from blockyard.testing import Config
from blockyard.testing.machines import scheduler_machine


@dataclass(eq=False)
class Row:
    """A sequence of a request: its tokens, the prompt first, of which all but the last are computed."""

    index: int
    tokens: list[int]
    sequence: int
    new: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    request: Request
    rows: list[Row] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)


class Wide:
    """First come, first served. The newest request makes room and starts again."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.waiting, self.running = deque[Job](), list[Job]()

    def step(self, simulation: Any) -> dict[str, list[list[int]]]:
        batch = self.grow(simulation)
        decision = self.manager.take_decision()
        self.manager.complete(decision.ticket, simulation.execute(decision))
        draws = simulation.forward(
            [token for row in batch for token in row.new],
            [slot for row in batch for slot in row.slots],
            [self.manager.block_table(row.sequence) for row in batch],
            [len(row.new) for row in batch],
            [self.manager.num_tokens(row.sequence) for row in batch],
            draft_lens=[len(row.drafts) for row in batch],
            indices=self.indices(batch),
        )
        for row in batch:
            self.accept(row, [draws.pop(0) for _ in range(1 + len(row.drafts))])
        finished = {}
        for job in list(self.running):
            self.end(job)
            if len(job.outputs) == job.request.n:
                self.running.remove(job)
                finished[job.request.request_id] = [job.outputs[index] for index in range(job.request.n)]
        return finished

    def grow(self, simulation: Any) -> list[Row]:
        """Give every running sequence its next token with drafts, then admit."""
        for job in self.running:
            for row in job.rows:
                left = len(job.request.prompt) + job.request.max_tokens - len(row.tokens)
                row.drafts = simulation.draft(row.tokens)[: left - 1]
                row.new = [row.tokens[-1], *row.drafts]
        full = False
        while not self.manager.can_append(*self.counted()):
            self.restart(self.running.pop())
            full = True
        rows = [row for job in self.running for row in job.rows]
        ids = [token for row in rows for token in row.new]
        slots = self.manager.append(*self.counted(), token_ids=ids).tolist()
        for row in rows:
            row.slots = [slots.pop(0) for _ in row.new]
        while self.waiting and not full and self.fits(self.waiting[0].request):
            rows.append(self.admit(self.waiting.popleft()))
        return rows

    def fits(self, request: Request) -> bool:
        return bool(self.manager.can_allocate(self.hashed(request)))

    def hashed(self, request: Request) -> Any:
        return self.manager.prefix.hash(list(request.prompt), **self.key(request))

    def counted(self) -> tuple[list[int], list[int]]:
        rows = [row for job in self.running for row in job.rows]
        return [row.sequence for row in rows], [len(row.new) for row in rows]

    def admit(self, job: Job) -> Row:
        prompt = list(job.request.prompt)
        sequence = self.allocate(prompt, job.request)
        cached = sequence.cached_tokens
        slots = self.manager.slot_mapping(sequence, cached, len(prompt)).tolist()
        job.rows = [Row(0, prompt, int(sequence), prompt[cached:], slots=slots)]
        self.running.append(job)
        return job.rows[0]

    def restart(self, job: Job) -> None:
        self.manager.free([row.sequence for row in job.rows])
        self.waiting.appendleft(Job(job.request))

    def accept(self, row: Row, draws: list[int]) -> None:
        """Keep the draft tokens that the model draws, too."""
        for draft, token in zip([*row.drafts, -1], draws, strict=True):
            row.tokens.append(token)
            if draft != token:
                break
        self.truncate(row)
        self.mark(row)

    def end(self, job: Job) -> None:
        """Fork after the prompt; free what has ended."""
        size, request = len(job.request.prompt), job.request
        if len(job.rows) == 1 and not job.outputs and len(job.rows[0].tokens) == size + 1:
            for index in range(1, request.n):
                child = int(self.manager.fork(job.rows[0].sequence))
                self.manager.truncate(child, size - 1)
                job.rows.append(Row(index, list(request.prompt), child))
        for row in list(job.rows):
            output = row.tokens[size:]
            stop = next((i + 1 for i, token in enumerate(output) if token in self.stops(request)), request.max_tokens)
            if len(output) >= stop:
                job.outputs[row.index] = output[:stop]
                job.rows.remove(row)
                self.manager.free(row.sequence)

    def abort(self, name: str) -> None:
        for job in [job for job in self.running if job.request.request_id == name]:
            self.running.remove(job)
            self.manager.free([row.sequence for row in job.rows])
        self.waiting = deque(job for job in self.waiting if job.request.request_id != name)

    # ---- places for bugs ----

    def allocate(self, prompt: list[int], request: Request) -> Any:
        return self.manager.allocate(prompt, **self.key(request))

    def key(self, request: Request) -> dict[str, Any]:
        return {"salt": request.salt, "lora_id": request.lora_id, "extras": request.extras}

    def indices(self, rows: list[Row]) -> list[int]:
        return [row.index for row in rows]

    def stops(self, request: Request) -> frozenset[int]:
        return request.stop_token_ids

    def truncate(self, row: Row) -> None:
        self.manager.truncate(row.sequence, len(row.tokens) - 1)

    def mark(self, row: Row) -> None:
        self.manager.mark_computed(row.sequence)


def caching(config: Config) -> BlockManager:
    return BlockManager(
        block_size=config.block_size, device_blocks=config.device_blocks, watermark=0, prefix_caching=True
    )


FIELDS = ("n", "priority", "salt", "lora_id", "extras", "stop_token_ids")


def machine(scheduler: type = Wide, manager: Any = caching, fields: Sequence[str] = FIELDS) -> type[Any]:
    return scheduler_machine(
        lambda manager, _: scheduler(manager),
        add=lambda mine, request: mine.waiting.append(Job(request)),
        step=lambda mine, simulation: mine.step(simulation),
        abort=lambda mine, name: mine.abort(name),
        manager=manager,
        fields=fields,
    )


def run(machine: type[Any], max_examples: int = 60) -> str:
    case, outcome = seed(0)(machine).TestCase, unittest.TestResult()
    case.settings = settings(case.settings, database=None, max_examples=max_examples)
    case("runTest").run(outcome)
    return "".join(text for _, text in [*outcome.failures, *outcome.errors])


def test_a_scheduler_with_all_fields_passes_and_the_run_says_what_it_covered(capsys: pytest.CaptureFixture[str]):
    assert run(machine()) == ""
    said = capsys.readouterr().out
    for name in (
        "examples",
        "steps",
        "requests",
        "finished",
        "aborts",
        "tokens hit",
        "prefix caches",
        "hits due",
        "due hit",
        "tokens drafted",
        "fork",
    ):
        assert f" {name} " in said, said


class DrawsEverySequenceAlike(Wide):
    def indices(self, rows: list[Row]) -> list[int]:
        return [0 for _ in rows]


class IgnoresStops(Wide):
    def stops(self, request: Request) -> frozenset[int]:
        return frozenset()


class MixesTenants(Wide):
    def key(self, request: Request) -> dict[str, Any]:
        return super().key(request) | {"salt": None}


class MixesAdapters(Wide):
    def key(self, request: Request) -> dict[str, Any]:
        return super().key(request) | {"lora_id": 0}


class MixesImages(Wide):
    def key(self, request: Request) -> dict[str, Any]:
        return super().key(request) | {"extras": ()}


class HashesOnce(Wide):
    """No bug. Prompts are hashed before they are admitted."""

    def allocate(self, prompt: list[int], request: Request) -> Any:
        return self.manager.allocate(self.hashed(request))


class HashesWithoutTheSalt(HashesOnce):
    def key(self, request: Request) -> dict[str, Any]:
        return super().key(request) | {"salt": None}


class BelievesDrafts(Wide):
    def accept(self, row: Row, draws: list[int]) -> None:
        super().accept(row, [*row.drafts, draws[-1]])


class KeepsRejectedDrafts(Wide):
    def truncate(self, row: Row) -> None:
        pass


class ReturnsOneOutput(Wide):
    def step(self, simulation: Any) -> dict[str, list[list[int]]]:
        return {name: outputs[:1] for name, outputs in super().step(simulation).items()}


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (DrawsEverySequenceAlike, r"output \d+ of sequence [12] differs|position \d+"),
        (IgnoresStops, r"in endless memory .* differs"),
        (MixesTenants, r"sequence \d+.* was opened with salt None, its request '\w+' has salt b'"),
        (MixesAdapters, r"sequence \d+.* was opened with lora_id 0, its request '\w+' has lora_id 7"),
        (MixesImages, r"sequence \d+.* was opened with extras \(\), its request '\w+' has extras \(\("),
        (HashesWithoutTheSalt, r"sequence \d+.* was opened with salt None, its request '\w+' has salt b'"),
        (BelievesDrafts, r"sequence \d+|request '\w+'"),
        (KeepsRejectedDrafts, r"sequence \d+"),
        (ReturnsOneOutput, r"request '\w+' returned 1 outputs, n is [23]"),
    ],
)
def test_a_bug_is_noticed(bug: type, says: str):
    noticing.assert_noticed(machine(bug), step_count=30, match=says)


class Shares:
    """Wrong: a manager whose prompts share blocks whatever one of salt, adapter and extras is."""

    def __init__(self, inner: BlockManager, part: str) -> None:
        self.inner, self.part = inner, part

    def allocate(self, *prompts: Any, **options: Any) -> Any:
        options.pop(self.part, None)
        return self.inner.allocate(*prompts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def __class__(self) -> type:  # so that our scheduler takes it
        return BlockManager


@pytest.mark.parametrize("part", ["salt", "lora_id", "extras"])
def test_a_manager_whose_tenants_adapters_or_images_share_blocks_is_noticed(part: str):
    shares = machine(manager=lambda config: Shares(caching(config), part))
    says = (
        r"whose token \d+ was computed under another salt, adapter or extra; wanted .* was last written by forward of"
    )
    noticing.assert_noticed(shares, step_count=30, match=says)
    ours = scheduler_machine(manager=lambda config: Shares(caching(config), part))
    noticing.assert_noticed(ours, step_count=30, match="in endless memory")


def test_a_scheduler_may_hash_its_prompts(capsys: pytest.CaptureFixture[str]):
    assert run(machine(HashesOnce, fields=("n", "salt")), max_examples=30) == ""
    due, hit = (int(n) for n in re.findall(r"(?:hits due|due hit) (\d+)", capsys.readouterr().out))
    assert hit >= due // 2 > 0


class HashesElsewhere(HashesOnce):
    def hashed(self, request: Request) -> Any:
        return BlockManager(block_size=self.manager.block_size, device_blocks=8, prefix_caching=True).prefix.hash([1])


def test_a_prompt_that_was_hashed_elsewhere_is_named():
    assert "prompts[0], a HashedPrompt that prefix.hash of the manager under test" in run(machine(HashesElsewhere))


class NeverMarks(Wide):
    def mark(self, row: Row) -> None:
        pass


class NamesNoTokens(Wide):
    def allocate(self, prompt: list[int], request: Request) -> Any:
        return self.manager.allocate(len(prompt))


class SaltsByLastDigit(Wide):
    def key(self, request: Request) -> dict[str, Any]:
        return {"salt": request.request_id[-1:].encode()}


@pytest.mark.parametrize("bug", [NeverMarks, NamesNoTokens, SaltsByLastDigit])
def test_a_scheduler_that_hardly_hits_where_hits_were_due_fails(bug: type):
    said = run(machine(bug, fields=("n",)), max_examples=60)
    found = re.search(r"allocate has hit (\d+) of (\d+) prompts whose first block was in the prefix cache", said)
    assert found is not None
    assert int(found[1]) * 2 < int(found[2]) >= 20
    assert (int(found[1]) > 0) == (bug is SaltsByLastDigit)
    assert re.search(r"step \d+: allocate hit nothing for sequence \d+: its request '\w+' begins with", said)
    assert "allocate(prompts=" in said.partition("The last ")[2]
    assert "def judge" not in said


class Plain(Wide):
    def fits(self, request: Request) -> bool:
        return bool(self.manager.can_allocate(len(request.prompt)))


def test_a_run_says_when_hits_were_not_judged(capsys: pytest.CaptureFixture[str]):
    assert run(machine(NeverMarks), max_examples=3) == ""
    assert re.search(r"\nhits: not judged \(\d+ due, 20 needed\)", capsys.readouterr().out)
    plain = machine(Plain, manager=lambda config: BlockManager(**config.arguments()), fields=("n",))
    assert run(plain, max_examples=3) == ""
    assert "prefix caches 0, " in (said := capsys.readouterr().out)
    assert "\nhits: not tested, the manager's `prefix.enabled` is missing or false" in said


def test_fields_that_a_request_does_not_have_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"fields has \['beams'\], must be some of \['n', "):
        scheduler_machine(lambda manager, _: Wide(manager), add=print, step=print, fields=["beams"])
    with pytest.raises(InvalidArgumentError, match=r"fields has \['n'\], .* none without step"):
        scheduler_machine(fields=["n"])
