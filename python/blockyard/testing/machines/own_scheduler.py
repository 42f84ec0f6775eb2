"""`OwnSchedulerMachine`: a scheduler with its own interface, over simulated memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from blockyard._core import BlockManager, CacheGroup
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Request, Scheduler
from blockyard.testing.interfaces import Config
from blockyard.testing.machines.partial import completed
from blockyard.testing.machines.record import show
from blockyard.testing.machines.scheduler import (
    DRAFTS,
    IDLE_STEPS,
    ResizingSchedulerMachine,
    SchedulerMachine,
    reference_tokens,
)
from blockyard.testing.machines.simulation import Simulation
from blockyard.testing.machines.strategies import (
    FollowUp,
    configs,
    follow_up,
    follow_ups,
    requests,
    with_extras_inside,
)
from blockyard.testing.machines.values import Key
from blockyard.testing.machines.watch import SequenceWatch, common

__all__ = ["OwnSchedulerMachine", "Simulation", "scheduler_machine"]

REQUESTS = st.tuples(requests(), follow_ups())
ARRIVALS = st.lists(REQUESTS, max_size=2)
LOSSES: st.SearchStrategy[list[int]] = st.just([]) | st.lists(st.integers(0, 63), min_size=1, max_size=2)

FIELDS = {"n": 1, "priority": 0, "salt": None, "lora_id": 0, "extras": (), "stop_token_ids": frozenset[int]()}
"""Fields of a request that a scheduler may have no use for, and what they are then."""
JUDGED = 20
"""Number of due hits from which a run is judged by how many of them hit: at least half."""
BEYOND = 4
"""Number of tokens that a scheduler may compute beyond the end of a request."""


class OwnSchedulerMachine(SchedulerMachine):
    """Random requests and losses on a scheduler that runs a step in one call; made by `scheduler_machine`.

    Requests fit alone but not together, so most steps have a batch and many preempt. Half of the prompts share a
    prefix with an earlier one. Every read must return a request's tokens; the first wrong one fails and names the
    sequence, block, ticket or call.

    Attributes:
        add_request: adds a request to the scheduler.
        run_step: runs one step and returns the outputs of finished requests, by request id.
        abort_request: aborts a request by id; None if the scheduler cannot.
        fields: what is drawn of a request beside its id, prompt and `max_tokens`.
        missed: the last prompt that should have hit the prefix cache, and the steps up to it.
    """

    fields: ClassVar[frozenset[str]] = frozenset()
    missed: ClassVar[tuple[str, str] | None] = None

    add_request: ClassVar[Callable[[Any, Request], object]]
    run_step: ClassVar[Callable[[Any, Simulation], Mapping[str, Any]]]
    abort_request: ClassVar[Callable[[Any, str], object] | None] = None
    make_record: ClassVar[Callable[[], SequenceWatch]] = SequenceWatch
    step_count = 30
    record: SequenceWatch

    def __init__(self) -> None:
        super().__init__()
        self.added = 0
        self.record.keyed = self.fields & frozenset(Key._fields)

    @initialize(
        config=configs(
            block_sizes=st.integers(1, 4),
            device_blocks=st.integers(4, 16),
            host_blocks=st.integers(0, 12),
            watermarks=st.sampled_from([0.0, 0.0, 0.1]),
        ),
        first=st.lists(requests(), min_size=2, max_size=8),
    )
    def start(self, config: Config, first: list[Request]) -> None:
        """Create manager, scheduler and memory, and submit a few requests."""
        self.record.config = config
        real = completed(type(self).make_manager(config), config, self.record.live)
        self.check_groups(list(real.groups))
        self.memory = type(self).make_memory(config)
        self.record.manager, self.record.memory = real, self.memory
        self.record.counts["prefix caches"] += real.prefix.enabled
        self.manager = self.record.watch(real)
        self.scheduler = type(self).make_scheduler(self.manager, config)
        for request in first:
            self.add(request)

    def check_groups(self, groups: Sequence[CacheGroup]) -> None:
        """Refuse a manager with groups other than full attention: `forward` reads all tokens, by one table."""
        if [group.kind for group in groups] != ["full_attention"]:
            raise InvalidArgumentError(
                f"manager makes a manager of {groups}, must have full attention alone: forward reads all tokens of a "
                f"sequence, by one table"
            )

    @rule(request=requests(), like=follow_ups())
    def add(self, request: Request, like: FollowUp | None = None) -> None:
        """Add a request, truncated so that the device can hold it to its end."""
        device = self.manager.pool("device")
        blocks, size = device.num_blocks - device.reserved, self.manager.block_size
        request = follow_up(request, self.earlier, like)
        n = min(request.n, blocks) if "n" in self.fields else 1
        slots = blocks // n * size
        prompt = list(request.prompt)[: max(1, slots // 2)]
        most = min(request.max_tokens, slots - len(prompt))
        if most < 1:
            return
        self.added += 1
        name = f"{request.request_id[0]}{self.added}"
        own: dict[str, Any] = {field: plain for field, plain in FIELDS.items() if field not in self.fields}
        own = {"n": n} | own | {"request_id": name, "prompt": prompt, "max_tokens": most}
        request = with_extras_inside(replace(request, **own))
        self.record.keys[name] = self.record.key_of(request)
        self.accept(request)
        # A scheduler that runs a step ahead continues beyond the end and drops those tokens.
        beyond = replace(request, max_tokens=most + BEYOND, stop_token_ids=frozenset())
        for index, drawn in enumerate(reference_tokens(beyond)):
            self.record.texts[name, index] = [*prompt, *drawn]
        self.record.hits.add(request)
        type(self).add_request(self.scheduler, request)
        self.manager.check()

    @classmethod
    def begin(cls) -> None:
        """Begin a run."""
        super().begin()
        cls.missed = None

    @classmethod
    def covered(cls) -> str:
        """Return how often the run did what, and whether its hits can be judged."""
        due, said = cls.totals["hits due"], super().covered()
        if not cls.totals["prefix caches"]:
            return f"{said}\nhits: not tested, the manager's `prefix.enabled` is missing or false"
        return said if due >= JUDGED else f"{said}\nhits: not judged ({due} due, {JUDGED} needed)"

    @classmethod
    def judge(cls) -> AssertionError | None:
        """A scheduler over a prefix cache must have hits."""
        due, hit = cls.totals["hits due"], cls.totals["due hit"]
        if due < JUDGED or hit * 2 >= due or cls.missed is None:
            return None
        sentence, steps = cls.missed
        return AssertionError(
            f"allocate has hit {hit} of {due} prompts whose first block was in the prefix cache: pass token ids to "
            f"allocate and append, and call mark_computed after each step\n{sentence}\n\n{steps}"
        )

    @rule(pick=st.integers(0, 7))
    def abort(self, pick: int) -> None:
        """Abort a request, if the scheduler can."""
        abort_request = type(self).abort_request
        if self.live and abort_request is not None:
            name = sorted(self.live)[pick % len(self.live)]
            self.record.note(f"abort(request_id={name!r})")
            self.record.counts["aborts"] += 1
            abort_request(self.scheduler, name)
            self.record.hits.end(self.live.pop(name), finished=False)
            self.manager.check()

    @rule(lost=LOSSES, arrivals=ARRIVALS, drafts=DRAFTS)
    def step(
        self,
        lost: list[int],
        arrivals: Sequence[tuple[Request, FollowUp | None]] = (),
        drafts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Run one step. Requests may arrive before it, and pairs may be lost in it."""
        for request, like in arrivals:
            self.add(request, like)
        self.record.next_step()
        simulation = Simulation(self.record, lambda decision: self.losses(decision, lost), drafts)
        finished = type(self).run_step(self.scheduler, simulation)
        for name, tokens in finished.items():
            self.end(name, tokens)
        self.manager.check()
        self.idle = 0 if simulation.worked or finished or not self.live else self.idle + 1
        if not (simulation.worked or finished):
            self.record.idle()
        if self.idle > IDLE_STEPS:
            raise AssertionError(
                f"step {self.record.step}: {self.record.culprit(self.live)}{len(self.live)} requests wait and "
                f"{self.idle} steps did nothing: {self.waiting()}"
            )

    @rule(count=st.integers(2, 8), arrivals=ARRIVALS, drafts=DRAFTS)
    def run(
        self,
        count: int,
        arrivals: Sequence[tuple[Request, FollowUp | None]],
        drafts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Run some steps without losses."""
        for request, like in arrivals:
            self.add(request, like)
        for _ in range(count if self.live else 1):
            self.step(lost=[], drafts=drafts)

    def end(self, name: str, tokens: Any) -> None:
        """A finished request must be live and have the same tokens as with unlimited memory."""
        self.record.note(f"finished {name!r}")
        request = self.live.pop(name, None)
        if request is None:
            raise AssertionError(f"step {self.record.step}: request {name!r} finished and is not live")
        self.record.hits.end(request)
        self.record.counts["finished"] += 1
        outputs = [list(map(int, one)) for one in (tokens if "n" in self.fields else [tokens])]
        if len(outputs) != request.n:
            raise AssertionError(
                f"step {self.record.step}: request {name!r} returned {len(outputs)} outputs, n is {request.n}"
            )
        for index, (output, expected) in enumerate(zip(outputs, reference_tokens(request), strict=True)):
            if tuple(output) != expected:
                at = common(output, expected)
                owners = [handle for handle, followed in self.record.sequences.items() if followed.request == name]
                of = f" (sequence {owners[-1]})" if owners else ""
                which = f" of sequence {index}" if request.n > 1 else ""
                raise AssertionError(
                    f"step {self.record.step}: request {name!r}{of} drew {show(output)}, in endless memory "
                    f"{show(expected)}: output {at}{which} differs"
                )

    def teardown(self) -> None:
        """Run to the end, check that every block is free, and keep the prompt that should have hit."""
        super().teardown()
        type(self).missed = self.record.hits.missed or type(self).missed

    def run_undisturbed(self) -> None:
        """Run one step at the end."""
        self.step(lost=[])

    def explain_end(self) -> str:
        """Name the sequence or ticket left over."""
        return f"after step {self.record.step}: {self.record.culprit(self.live)}"

    def explain_left(self, steps: int) -> str:
        """Describe the requests that have not finished."""
        return f"{len(self.live)} requests are left, {steps} steps after the last one came: {self.waiting()}"

    def waiting(self) -> str:
        """Describe the first live requests."""
        return "; ".join(self.record.last_of(name) for name in sorted(self.live)[:8])

    def unfinished(self) -> int:
        """Return 0, because the scheduler has no call that counts its requests."""
        return 0


def scheduler_machine(
    make: Callable[[BlockManager, Config], Any] | None = None,
    *,
    add: Callable[[Any, Request], object] | None = None,
    step: Callable[[Any, Simulation], Mapping[str, Any]] | None = None,
    abort: Callable[[Any, str], object] | None = None,
    manager: Callable[[Config], Any] | None = None,
    resize: bool = False,
    fields: Collection[str] = (),
) -> type[SchedulerMachine]:
    """Make a state machine for a scheduler with its own interface, or with the interface `SchedulerLike`.

    Args:
        make: makes the scheduler under test over a manager; defaults to Blockyard's.
        add: adds a request; only `request_id`, `prompt` (token ids), `max_tokens` and the `fields` are set.
        step: runs one step: calls `execute` and `forward` of a `Simulation`, and returns the outputs of finished
            requests, by request id. Without `add` and `step`, the scheduler must implement `SchedulerLike`.
        abort: aborts a request by id; requests are never aborted if None.
        manager: makes the manager; defaults to Blockyard's. With `step` it can be another one whose sequences are ints,
            with `block_size`, `allocate`, `append`, `free`, `block_table` and `num_tokens` as those of `BlockManager`.
            Its only cache group is full attention; without `step`, it can be a sliding window.
        fields: what else to draw of a request, for a scheduler with `step`: any of "n", "priority", "salt", "lora_id",
            "extras" and "stop_token_ids". With "n", `step` returns a list of `n` outputs for each finished request.
        resize: whether to also shrink and grow the device, see `ResizingSchedulerMachine`; not with `step`.

    Returns:
        A state machine; its `TestCase` runs under pytest and unittest.

    Raises:
        InvalidArgumentError: only one of `add` and `step` is given, or they are given with `resize` or without `make`,
            or `fields` without them, or it has another name.

    Example:
        >>> from hypothesis import settings
        >>> from blockyard.scheduler import Scheduler
        >>> from blockyard.testing.machines import run_state_machine_as_test, scheduler_machine
        >>> machine = scheduler_machine(lambda manager, config: Scheduler(manager, preemption_mode="swap"))
        >>> run_state_machine_as_test(machine, settings=settings(max_examples=2, deadline=None, database=None))
    """
    members: dict[str, object] = {
        "make_scheduler": staticmethod(make or (lambda manager, _: Scheduler(manager))),
        "make_manager": staticmethod(manager or (lambda config: BlockManager(**config.arguments()))),
    }
    if unknown := sorted(set(fields) - (set(FIELDS) if step is not None else set())):
        raise InvalidArgumentError(f"fields has {unknown}, must be some of {list(FIELDS)}, and none without step")
    base: type[SchedulerMachine] = ResizingSchedulerMachine if resize else SchedulerMachine
    if add is not None and step is not None:
        if resize or make is None:
            raise InvalidArgumentError(
                f"resize is {resize}, make is {make}: with step, make is required and resize is not allowed"
            )
        base = OwnSchedulerMachine
        members |= {"add_request": staticmethod(add), "run_step": staticmethod(step), "fields": frozenset(fields)}
        if abort is not None:
            members["abort_request"] = staticmethod(abort)
    elif (add, step, abort) != (None, None, None):
        raise InvalidArgumentError("pass both add and step, or none of add, step and abort")
    return type("SchedulerMachineOf", (base,), members)
