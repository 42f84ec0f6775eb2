"""A correct scheduler over a `BlockManager`, and typical mistakes to plant in it; the test kit finds each.

`python tests/support/planted_schedulers.py [SEEDS [WORD]]` prints the table of `docs/reference/test-kit.md`.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

from hypothesis import seed, settings

from blockyard import BlockManager, PrefixCaching, StepDecision
from blockyard.scheduler import Scheduler
from blockyard.testing import Config, LateMemory
from blockyard.testing.machines import manager_machine, prefix_machine, scheduler_machine

__all__ = ["FAULTS", "CompletesLater", "Embedder", "Fault", "WaitsForNoReads", "find", "machine_of"]


@dataclass(eq=False)
class Job:
    """A request and its tokens, the prompt first."""

    name: str
    tokens: list[int]
    prompt: int
    end: int
    salt: bytes | None = None
    sequence: int = -1


@dataclass
class Row:
    """The part of a job that a step computes."""

    job: Job
    new: list[int]
    slots: list[int]
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.job.tokens)


class Embedder:
    """First come, first served, with prefix caching, forks, swaps to host and external tier, and restarts."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.waiting, self.running, self.swapped = deque[Job](), list[Job](), list[Job]()
        self.batch: list[Row] = []

    def enqueue(self, name: str, prompt: list[int], max_tokens: int, salt: bytes | None = None) -> None:
        self.waiting.append(Job(name, list(prompt), len(prompt), len(prompt) + max_tokens, salt))

    def abort(self, name: str) -> None:
        for jobs in (self.waiting, self.running, self.swapped):
            for job in [job for job in jobs if job.name == name]:
                jobs.remove(job)
                if jobs is not self.waiting:
                    self.manager.free(job.sequence)

    def step(self, simulation: Any) -> dict[str, list[int]]:
        self.batch = []
        self.fork()
        self.grow()
        self.resume()
        self.admit()
        return self.finish(self.run(self.manager.take_decision(), simulation))

    # ---- decide ----

    def grow(self) -> None:
        while self.running and not self.manager.can_append([job.sequence for job in self.running]):
            self.preempt(self.running.pop())
        self.append(self.running)

    def append(self, jobs: list[Job]) -> None:
        last = [job.tokens[-1] for job in jobs]
        slots = self.manager.append([job.sequence for job in jobs], token_ids=self.ids(last)).tolist()
        self.batch += [Row(job, [token], [slot]) for job, token, slot in zip(jobs, last, slots, strict=True)]

    def ids(self, tokens: list[int]) -> list[int]:
        return tokens

    def preempt(self, job: Job) -> None:
        for tier in ("host", "external"):
            if self.manager.can_swap_out(job.sequence, tier):
                self.manager.swap_out(job.sequence, tier)
                self.swapped.append(job)
                return
        self.manager.free(job.sequence)
        self.waiting.appendleft(job)

    def fork(self) -> None:
        """Let the first waiting job share the common prefix of a running job."""
        if not self.waiting or self.swapped:
            return
        job = self.waiting[0]
        for parent in self.running:
            both = zip(parent.tokens[:-1], job.tokens[:-1], strict=False)  # the last token is not computed yet
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
            if shared and parent.salt == job.salt:
                child, new = self.manager.fork(parent.sequence), job.tokens[shared:]
                self.manager.truncate(child, shared)
                if not self.manager.can_append(child, len(new)):
                    self.manager.free(child)
                    return
                job.sequence = int(child)
                slots = self.manager.append(child, len(new), token_ids=new).tolist()
                self.batch.append(Row(self.waiting.popleft(), new, slots))
                return

    def resume(self) -> None:
        while self.swapped and self.manager.can_swap_in(self.swapped[0].sequence):
            job = self.swapped.pop(0)
            self.manager.swap_in(job.sequence)
            self.append([job])

    def admit(self) -> None:
        while self.waiting and not self.swapped and self.fits(self.waiting[0]):
            job = self.waiting.popleft()
            sequence = self.manager.allocate(job.tokens, salt=job.salt)
            job.sequence, cached = int(sequence), self.trusted(sequence.cached_tokens)
            slots = self.manager.slot_mapping(job.sequence, cached, len(job.tokens)).tolist()
            self.batch.append(Row(job, job.tokens[cached:], slots))

    def fits(self, job: Job) -> bool:
        return bool(self.manager.can_allocate(job.tokens, salt=job.salt))

    def trusted(self, cached: int) -> int:
        return cached

    # ---- run ----

    def run(self, decision: StepDecision, simulation: Any) -> list[int]:
        self.restart(self.transfer(decision, simulation))
        sampled = self.compute(simulation)
        self.manager.mark_computed([row.job.sequence for row in self.batch])
        return sampled

    def transfer(self, decision: StepDecision, simulation: Any) -> list[int]:
        return self.manager.complete(decision.ticket, simulation.execute(decision)).tolist()

    def restart(self, lost: list[int]) -> None:
        jobs = dict.fromkeys([*self.running, *self.swapped, *(row.job for row in self.batch)])
        gone = [job for job in jobs if job.sequence in lost]
        self.batch = [row for row in self.batch if row.job not in gone]
        self.running = [job for job in self.running if job not in gone]
        self.swapped = [job for job in self.swapped if job not in gone]
        for job in gone:
            self.manager.free(job.sequence)
            self.waiting.appendleft(job)

    def compute(self, simulation: Any) -> list[int]:
        return simulation.forward(
            token_ids=[token for row in self.batch for token in row.new],
            slot_mapping=[slot for row in self.batch for slot in row.slots],
            block_tables=[self.table(row) for row in self.batch],
            query_lens=[len(row.new) for row in self.batch],
            seq_lens=[row.length for row in self.batch],
        )

    def table(self, row: Row) -> list[int]:
        return self.manager.block_table(row.job.sequence).tolist()

    def finish(self, sampled: list[int]) -> dict[str, list[int]]:
        for row, token in zip(self.batch, sampled, strict=True):
            row.job.tokens = [*row.job.tokens, token]
        done = [row.job for row in self.batch if len(row.job.tokens) >= row.job.end]
        for job in done:
            self.manager.free(job.sequence)
        self.running = [row.job for row in self.batch if row.job not in done]
        return {job.name: job.tokens[job.prompt :] for job in done}


# ---- tickets ----


class CompletesFirst(Embedder):
    def transfer(self, decision, simulation):
        lost = self.manager.complete(decision.ticket).tolist()
        simulation.execute(decision)
        return lost


class NeverCompletes(Embedder):
    def transfer(self, decision, simulation):
        simulation.execute(decision)
        return []


class CompletesAnother(Embedder):
    first: int | None = None

    def transfer(self, decision, simulation):
        lost = simulation.execute(decision)
        self.first = decision.ticket if self.first is None else self.first
        return self.manager.complete(self.first, lost).tolist()


class NeverExecutes(Embedder):
    def transfer(self, decision, simulation):
        return self.manager.complete(decision.ticket).tolist()


class ExecutesTwice(Embedder):
    def transfer(self, decision, simulation):
        simulation.execute(decision)
        return super().transfer(decision, simulation)


class ComputesBeforeLoads(Embedder):
    def run(self, decision, simulation):
        sampled = self.compute(simulation)
        self.transfer(decision, simulation)
        return sampled


class SkipsCopies(Embedder):
    def transfer(self, decision, simulation):
        rest = [(kind, pairs) for kind, pairs in decision.transfers() if kind != "copy"]
        partial = StepDecision(decision.ticket, rest, after=decision.after, prefetch=decision.prefetch)
        return super().transfer(partial, simulation)


class DropsAfter(Embedder):
    def transfer(self, decision, simulation):
        return super().transfer(StepDecision(decision.ticket, decision.transfers()), simulation)


class DropsLosses(Embedder):
    def transfer(self, decision, simulation):
        simulation.execute(decision)
        return self.manager.complete(decision.ticket).tolist()


class DropsHostLosses(Embedder):
    def transfer(self, decision, simulation):
        lost = [pairs for pairs in simulation.execute(decision) if "external" in (pairs.src, pairs.dst)]
        return self.manager.complete(decision.ticket, lost).tolist()


class KeepsTheLost(Embedder):
    def restart(self, lost):
        pass


class CompletesAtOnce(Scheduler):
    """A scheduler with Blockyard's interface."""

    def schedule(self):
        step = super().schedule()
        self.manager.complete(step.decision.ticket)
        return step

    def complete(self, ticket, lost=()):
        return []


# ---- arrays of a step ----


class ReadsAnOldTable(Embedder):
    old: ClassVar[dict[int | str, list[int]]] = {}

    def table(self, row):
        new = super().table(row)
        used = self.old.get(row.job.sequence) or new
        self.old = {**self.old, row.job.sequence: new}
        return used


class KeepsTheTableOverASwap(Embedder):
    kept: ClassVar[dict[str, list[int]]] = {}

    def table(self, row):
        new, old = super().table(row), self.kept.get(row.job.name, [])
        self.kept = {**self.kept, row.job.name: [*old, *new[len(old) :]]}
        return self.kept[row.job.name]


class WritesOldSlots(Embedder):
    old: ClassVar[dict[int | str, list[int]]] = {}

    def compute(self, simulation):
        new = {row.job.name: row.slots[-1:] for row in self.batch}
        for row in self.batch:
            if len(row.new) == 1:
                row.slots = self.old.get(row.job.name, row.slots)
        self.old = new
        return super().compute(simulation)


class CountsOneShort(Embedder):
    def compute(self, simulation):
        for row in self.batch:
            row.length -= len(row.new) == 1 and row.length > 1
        return super().compute(simulation)


class CrossesTables(Embedder):
    def compute(self, simulation):
        tables = [self.table(row) for row in self.batch]
        tables[:2] = tables[1::-1] if len(tables) > 1 else tables
        given = iter(tables)
        self.table = lambda row: next(given)  # for this step
        sampled = super().compute(simulation)
        del self.table
        return sampled


class CrossesOutputs(Embedder):
    def compute(self, simulation):
        sampled = super().compute(simulation)
        return [*sampled[1::-1], *sampled[2:]] if len(sampled) > 1 else sampled


# ---- calls of the manager ----


class NamesWrongTokens(Embedder):
    def ids(self, tokens):
        return [0] * len(tokens)


class MarksTooEarly(Embedder):
    def run(self, decision, simulation):
        self.manager.mark_computed([row.job.sequence for row in self.batch])
        self.restart(self.transfer(decision, simulation))
        return self.compute(simulation)


class TrustsOneMore(Embedder):
    def trusted(self, cached):
        return cached + 1 if cached else 0


class ForgetsToFree(Embedder):
    def finish(self, sampled):
        freeing, self.manager = self.manager, Without(self.manager, "free")
        finished = super().finish(sampled)
        self.manager = freeing
        return finished


class FreesTwice(Embedder):
    def finish(self, sampled):
        done = [row.job for row in self.batch if len(row.job.tokens) + 1 >= row.job.end]
        finished = super().finish(sampled)
        for job in done:
            self.manager.free(job.sequence)
        return finished


class KeepsTheAborted(Embedder):
    def abort(self, name):
        freeing, self.manager = self.manager, Without(self.manager, "free")
        super().abort(name)
        self.manager = freeing


class RunsTheFreed(Embedder):
    def preempt(self, job):
        super().preempt(job)
        if job in self.waiting:
            self.waiting.remove(job)
            self.running.insert(0, job)


class AppendsBlindly(Embedder):
    def grow(self):
        self.append(self.running)


class SwapsOutBlindly(Embedder):
    def preempt(self, job):
        self.manager.swap_out(job.sequence)
        self.swapped.append(job)


class RestartsWithThePrompt(Embedder):
    def admit(self):
        whole = {job: job.tokens for job in self.waiting}
        for job in self.waiting:
            job.tokens = job.tokens[: job.prompt]
        super().admit()
        for job, tokens in whole.items():
            job.tokens = tokens


class Without:
    """A manager that leaves out a call."""

    def __init__(self, manager: Any, call: str) -> None:
        self._manager, self._call = manager, call

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: None) if name == self._call else getattr(self._manager, name)


# ---- copy engines and managers ----


class CompletesLater(Embedder):
    """No fault. A ticket ends a step later; its losses are known at once."""

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

    def abort(self, name):
        super().abort(name)
        if not self.running and not self.swapped:
            self.complete_late()

    def complete_late(self):
        if self.late:
            self.manager.complete(*self.late)
            self.late = ()


class WaitsForNoReads(LateMemory):
    """Does not wait for the tickets in a decision's `after`. Needs a scheduler that completes later."""

    def submit(self, decision, needed=(), lost=()):
        super().submit(StepDecision(decision.ticket, decision.transfers()), needed, lost)


class ForgetsTheLastPair(LateMemory):
    def store(self, kind, pairs, rows):
        if kind != "swap_out" or pairs.ids[0, 1] % 4 != 1:
            super().store(kind, pairs, rows)


class LoadsTheNextBlock(LateMemory):
    def store(self, kind, pairs, rows):
        if kind == "swap_in":
            rows = self.tiers[pairs.src][(pairs.ids[:, 0] + 1) % len(self.tiers[pairs.src])]
        super().store(kind, pairs, rows)


class LosesCopiesOfAppend:
    """A manager whose decisions have no copies on write."""

    def __init__(self, inner: BlockManager) -> None:
        self.inner = inner

    def take_decision(self) -> StepDecision:
        taken = self.inner.take_decision()
        rest = [(kind, pairs) for kind, pairs in taken.transfers() if kind != "copy"]
        return StepDecision(taken.ticket, rest, after=taken.after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ForgetsTheSalt(LosesCopiesOfAppend):
    """A manager with a prefix cache that all tenants share."""

    def take_decision(self) -> StepDecision:
        return self.inner.take_decision()

    def allocate(self, *prompts: Any, salt: Any = None, **options: Any) -> Any:
        return self.inner.allocate(*prompts, **options)


class SharesUnderAScheduler(ForgetsTheSalt):
    """The same, found with a scheduler that knows salts."""

    def can_allocate(self, *prompts: Any, salt: Any = None, **options: Any) -> Any:
        return self.inner.can_allocate(*prompts, **options)


def caching(config: Config, events: int = 0) -> BlockManager:
    return BlockManager(**config.arguments(), prefix_caching=PrefixCaching(max_events=events))


def machine_of(
    scheduler: type[Embedder],
    memory: type[LateMemory] | None = None,
    manager: Callable[[Config], Any] = caching,
    fields: Sequence[str] = (),
) -> type[Any]:
    """The machine as a user writes it."""
    machine = scheduler_machine(
        lambda manager, _: scheduler(manager),
        add=lambda mine, request: mine.enqueue(request.request_id, request.prompt, request.max_tokens, request.salt),
        step=lambda mine, simulation: mine.step(simulation),
        abort=lambda mine, name: mine.abort(name),
        manager=manager,
        fields=fields,
    )
    if memory is not None:
        machine.make_memory = memory
    return machine


@dataclass(frozen=True)
class Fault:
    """A planted fault, and the names that the message must contain."""

    title: str
    planted: Any
    names: str

    @property
    def kind(self) -> str:
        """Which machine finds it."""
        found: str = self.machine().__name__.removesuffix("MachineOf").lower()
        return found

    def machine(self) -> type[Any]:
        if issubclass(self.planted, Embedder):
            return machine_of(self.planted)
        if issubclass(self.planted, Scheduler):
            return scheduler_machine(lambda manager, _: self.planted(manager, preemption_mode="swap"))
        if issubclass(self.planted, LateMemory):
            return machine_of(CompletesLater if self.planted is WaitsForNoReads else Embedder, self.planted)
        if self.planted is SharesUnderAScheduler:
            return machine_of(Embedder, None, lambda config: SharesUnderAScheduler(caching(config)), ("salt",))
        if self.planted is ForgetsTheSalt:
            return prefix_machine(lambda config, events: ForgetsTheSalt(caching(config, events)))
        return manager_machine(lambda config: self.planted(BlockManager(**config.arguments())))


FAULTS = [
    Fault("`complete` before `execute`", CompletesFirst, r"complete\(ticket=\d+"),
    Fault("the same in a scheduler with our calls", CompletesAtOnce, r"complete\(ticket=\d+"),
    Fault("`complete` left out", NeverCompletes, r"ticket \d+"),
    Fault("`complete` of an old ticket", CompletesAnother, r"complete\(ticket=\d+.*ticket \d+"),
    Fault("a decision never executed", NeverExecutes, r"complete\(ticket=\d+"),
    Fault("a decision executed twice", ExecutesTwice, r"ticket \d+"),
    Fault("a step computed before its swap-ins", ComputesBeforeLoads, r"sequence \d+.*block \d+"),
    Fault("copies on write left out", SkipsCopies, r"ticket \d+"),
    Fault("a decision executed without its `after`", DropsAfter, r"ticket \d+ after tickets"),
    Fault("lost pairs not passed to `complete`", DropsLosses, r"complete\(ticket=\d+"),
    Fault("the same of the host's pairs alone", DropsHostLosses, r"complete\(ticket=\d+.*host \d+"),
    Fault("a lost sequence not restarted", KeepsTheLost, r"sequence \d+"),
    Fault("the block table of the step before", ReadsAnOldTable, r"sequence \d+.*block"),
    Fault("the block table of before a swap", KeepsTheTableOverASwap, r"sequence \d+.*block"),
    Fault("the slots of the step before", WritesOldSlots, r"sequence \d+.*slot"),
    Fault("a length one too short", CountsOneShort, r"sequence \d+.*seq_lens\[\d+\]"),
    Fault("the block tables of two sequences swapped", CrossesTables, r"sequence \d+.*block"),
    Fault("the outputs of two sequences swapped", CrossesOutputs, r"sequence \d+.*(token_ids\[\d+\]|drew)"),
    Fault("wrong token ids in `append`", NamesWrongTokens, r"append\(.*sequence \d+"),
    Fault("`mark_computed` before the step", MarksTooEarly, r"mark_computed\(.*sequence \d+"),
    Fault("one more token taken for cached", TrustsOneMore, r"sequence \d+.*block"),
    Fault("a finished sequence not freed", ForgetsToFree, r"sequence \d+"),
    Fault("a sequence freed twice", FreesTwice, r"free\(.*sequence \d+"),
    Fault("an aborted sequence not freed", KeepsTheAborted, r"sequence \d+"),
    Fault("a freed sequence still run", RunsTheFreed, r"sequence \d+"),
    Fault("`append` without `can_append`", AppendsBlindly, r"append\("),
    Fault("`swap_out` without `can_swap_out`", SwapsOutBlindly, r"swap_out\("),
    Fault("a preempted request restarted without its outputs", RestartsWithThePrompt, r"sequence \d+|request '\w+'"),
    Fault("a copy engine that ignores `after`", WaitsForNoReads, r"sequence \d+.*block \d+"),
    Fault("a copy engine that drops a block of a swap-out", ForgetsTheLastPair, r"block \d+"),
    Fault("a copy engine that loads the next block", LoadsTheNextBlock, r"block \d+"),
    Fault("a manager that forgets copies on write", LosesCopiesOfAppend, r"ticket \d+.*copy device"),
    Fault("a manager whose tenants share blocks", ForgetsTheSalt, r"sequence \d+|ticket \d+|salt"),
    Fault("the same manager", SharesUnderAScheduler, r"sequence \d+.*block \d+\), whose token .* salt"),
]


def find(machine: type[Any], number: int) -> tuple[float, str]:
    """Run a machine with its default settings. Returns the seconds until it fails, and its message."""
    case = seed(number)(machine).TestCase
    case.settings = settings(case.settings, database=None)
    start = time.perf_counter()
    try:
        case("runTest").debug()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the outcome)
        return time.perf_counter() - start, f"{error}"
    return time.perf_counter() - start, ""


def main(seeds: int = 10, word: str = "") -> None:
    """Print the table."""
    print("| fault | machine | found and named | median, s | longest, s | the message |\n|---|---|---|---|---|---|")
    for fault in (fault for fault in FAULTS if word in fault.title):
        outcomes = [find(fault.machine(), number) for number in range(seeds)]
        sentences = [text.partition("\n")[0] for _, text in outcomes]
        named = [sentence for sentence in sentences if re.search(fault.names, sentence)]
        seconds = [seconds for seconds, _ in outcomes]
        middle, longest = statistics.median(seconds), max(seconds)
        message = min(named, key=len, default="")
        found = f"{fault.title} | {fault.kind} | {len(named)} of {seeds} | {middle:.1f} | {longest:.1f}"
        print(f"| {found} | {message} |", flush=True)


if __name__ == "__main__":
    main(*(int(word) if word.isdigit() else word for word in sys.argv[1:3]))
