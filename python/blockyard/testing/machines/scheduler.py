"""`SchedulerMachine`: a scheduler over simulated memory must generate the same tokens as with unlimited memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from numpy.typing import NDArray

from blockyard._core import BlockManager, CacheGroup, Pairs, StepDecision
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.layout.sizes import as_int
from blockyard.scheduler import Finished, Request, Step
from blockyard.testing.interfaces import Config, SchedulerLike, TierName
from blockyard.testing.machines.record import RecordingMachine, show
from blockyard.testing.machines.side_by_side import refuse_open
from blockyard.testing.machines.strategies import VOCABULARY, FollowUp, configs, follow_up, follow_ups, requests
from blockyard.testing.machines.values import Key, draw_token, seen, show_key
from blockyard.testing.machines.watch import TicketWatch
from blockyard.testing.memory import LateMemory, SimulatedMemory

__all__ = [
    "ResizingSchedulerMachine",
    "SchedulerMachine",
    "draw_token",
    "draw_tokens",
    "min_blocks",
    "read_back",
    "reference_tokens",
    "seen",
]

TIERS: tuple[TierName, ...] = ("device", "host", "external")
DRAFTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4)
ONE_TABLE = ("full_attention", "sliding_window")
IDLE_STEPS = 3
"""Maximum number of consecutive steps that do nothing while requests wait."""


def reference_tokens(request: Request, window: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that each sequence of a request generates with unlimited memory, where no block is ever moved.

    Args:
        request: the request.
        window: number of last tokens that the model sees; None for all.
    """
    outputs, window = [], None if window is None else as_int("window", window)
    for index in range(request.n):
        kv, drawn = seen(request, list(request.prompt), window=window), list[int]()
        while len(drawn) < request.max_tokens:
            drawn.append(draw_token(kv[-window:] if window else kv, index))
            kv += seen(request, drawn[-1:], len(kv), kv[-1], window=window)
            if drawn[-1] in request.stop_token_ids:
                break
        outputs.append(tuple(drawn))
    return tuple(outputs)


def draw_tokens(
    step: Step, memory: SimulatedMemory, window: int | None = None, requests: Mapping[str, Request] | None = None
) -> list[int]:
    """Compute a step like a model: write its tokens, read each row through its block table, and draw.

    Args:
        step: returned by `schedule`.
        memory: the memory after the step's transfers.
        window: number of last tokens that the model sees; None for all.
        requests: the requests of the step by id; needed if some have a salt, an adapter or extras.

    Returns:
        The tokens for `update`, one per draw; 0 for void rows.

    Raises:
        AssertionError: a row does not read back the tokens that it has just written.
    """
    texts: dict[int, list[int]] = {}
    starts, ends, first = step.start.tolist(), (step.start + step.lengths).tolist(), step.query_start_loc.tolist()
    new = [step.token_ids[a:b].tolist() for a, b in pairwise(first)]
    live = [row for row in range(step.rows) if step.void is None or not step.void[row]]
    memory.write(step.slot_mapping, step.token_ids.tolist())
    for row in sorted(live, key=starts.__getitem__):  # a hit may lie in blocks that this step writes
        request = (requests or {}).get(step.owner(row)[0], Key())
        before = memory.read(step.block_tables[row], starts[row])[-1:]
        new[row] = seen(request, new[row], starts[row], *before, window=window)
        memory.write(step.slot_mapping[first[row] : first[row + 1]], new[row])
    for row in live:
        texts[row] = read_back(memory, row, step.block_tables[row], ends[row], new[row])
    drawn = []
    for draw in step.draws():
        first = max(0, draw.position - window) if window else 0
        drawn.append(draw_token(texts[draw.row][first : draw.position], draw.sequence) if draw.row in texts else 0)
    return drawn


def read_back(memory: SimulatedMemory, row: int, table: NDArray[np.int32], length: int, new: list[int]) -> list[int]:
    """Read a row's tokens through its block table, and check that they end with those just written."""
    text = memory.read(table, length)
    if len(new) > length or text[length - len(new) :] != new:
        raise AssertionError(f"row {row} reads {text[-len(new) :]} where it has just written {new}")
    return text


class SchedulerMachine(RecordingMachine):
    """Random requests, aborts and losses on a scheduler over memory with late transfers.

    Each step runs as in an engine: transfers, writes of the new tokens, reads through the block tables. Its ticket is
    completed before the writes or after the reads; swap-outs and moves land only then. A sequence must read its own
    tokens, and draw the same tokens as with unlimited memory. If a step has slots for draft tokens, some drafts are
    right, or the model runs once per draft. Requests are aborted between any two calls of a step, and their ids reused
    at once. At the end the scheduler must finish within bounds, with every block free.

    Attributes:
        make_scheduler: makes the scheduler under test over a manager; `scheduler_machine` sets it.
        make_memory: makes the memory; override it to inject a fault.
    """

    make_scheduler: ClassVar[Callable[[BlockManager, Config], SchedulerLike]]
    make_manager: ClassVar[Callable[[Config], BlockManager]]
    make_memory: ClassVar[Callable[[Config], LateMemory]] = LateMemory
    make_record: ClassVar[Callable[[], TicketWatch]] = TicketWatch
    record: TicketWatch

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Request] = {}
        self.scheduled: dict[str, Request] = {}  # when the current step was scheduled
        self.earlier: list[tuple[Request, list[int]]] = []  # requests, each with its prompt and outputs
        self.idle = 0

    @initialize(
        config=configs(device_blocks=st.integers(4, 16), host_blocks=st.integers(0, 8)),
        first=st.lists(requests(), min_size=2, max_size=8, unique_by=lambda request: request.request_id),
    )
    def start(self, config: Config, first: list[Request]) -> None:
        """Create manager, scheduler and memory, and submit a few requests."""
        self.record.config = config
        manager = type(self).make_manager(config)
        self.check_groups(list(manager.groups))
        self.manager = self.record.watch(manager)
        self.scheduler = type(self).make_scheduler(self.manager, config)
        self.memory = self.record.memory = type(self).make_memory(config)
        for request in first:
            self.add(request)

    def check_groups(self, groups: Sequence[CacheGroup]) -> None:
        """Refuse a manager for a model that the simulated memory cannot play.

        Args:
            groups: the manager's cache groups.

        Raises:
            InvalidArgumentError: there are several, or one without a block for each token.
        """
        if len(groups) > 1 or groups[0].kind not in ONE_TABLE:
            raise InvalidArgumentError(
                f"manager makes a manager of {groups}, must be one group, full attention or a sliding window: the "
                f"simulated model reads one table"
            )

    @property
    def window(self) -> int | None:
        """Sliding window of the manager's sequences, if any."""
        window: int | None = self.manager.groups[0].window
        return window

    @rule(request=requests(), like=follow_ups())
    def add(self, request: Request, like: FollowUp | None = None) -> None:
        """Submit a request; an id in use, or a request that can never fit, must be refused with the right numbers."""
        request = follow_up(request, self.earlier, like)
        try:
            self.scheduler.add(request)
        except InvalidArgumentError as error:
            if request.request_id not in self.live:
                raise AssertionError(f"{request} was refused: {error}") from error
        except OutOfBlocksError as error:
            most = request.n * min_blocks(request, self.manager.block_size) * len(self.manager.groups)
            if not most >= error.wanted > error.free or request.request_id in self.live:
                raise AssertionError(f"{request} was refused: wanted {error.wanted}, free {error.free}") from error
        else:
            if request.request_id in self.live:
                raise AssertionError(f"the id of {request} is in use, and was taken")
            self.accept(request)
        self.manager.check()

    def accept(self, request: Request) -> None:
        """Record a request that the scheduler accepted."""
        self.live[request.request_id] = request
        self.record.counts["requests"] += 1
        prompt = list(map(int, request.prompt))
        self.earlier = [*self.earlier[-7:], (request, [*prompt, *reference_tokens(request, self.window)[0]])]
        self.record.note(
            f"add(request_id={request.request_id!r}, prompt={show(prompt)}, n={request.n}, "
            f"max_tokens={request.max_tokens}" + (f", {key})" if (key := show_key(request)) else ")")
        )

    @rule(pick=st.integers(0, 23))
    def abort(self, pick: int) -> None:
        """Abort a request, or one that does not exist. Mostly a step runs instead, so that requests finish, too."""
        if pick >= 8:
            self.run_undisturbed()
        elif self.live:
            self.drop(pick)
        else:
            self.refuse_abort("nobody")

    @rule(
        lost=st.builds(list) | st.builds(list) | st.lists(st.integers(0, 63), min_size=1, max_size=2),
        when=st.sampled_from([*["never"] * 6, "scheduled", "settled"]),
        pick=st.integers(0, 7),
        again=st.none() | requests(),
        drafts=DRAFTS,
        late=st.booleans(),
    )
    def step(
        self,
        lost: list[int],
        when: str,
        pick: int,
        again: Request | None,
        drafts: Sequence[tuple[int, int]] = (),
        late: bool = False,  # noqa: FBT001, FBT002 (drawn)
    ) -> None:
        """Run one step, in which pairs may be lost, and a request aborted and its id reused.

        Args:
            lost: pairs of the decision that do not land.
            when: when a request is aborted.
            pick: which request is aborted.
            again: request submitted under its id.
            drafts: the number of draft tokens, and how many of them are right, for each decoding row. If empty, each
                token is computed in a separate pass.
            late: end the ticket after the model has run, unless it has losses.
        """
        self.record.next_step()
        step = self.scheduler.schedule()
        self.scheduled = dict(self.live)
        self.check_shape(step)
        if when == "scheduled":
            self.resubmit(pick, again)
        losses = self.execute(step.decision, lost)
        self.record.note(f"{step.rows} rows of {show(step.lengths)} tokens, lost: {show(losses)}")
        late = late and not losses
        if not late:
            self.scheduler.complete(step.decision.ticket, losses)
        if when == "settled":
            self.resubmit(pick, again)
        rows, drawn = step.rows, self.compute_drafts(step, drafts)
        if late:
            self.scheduler.complete(step.decision.ticket)
        for finished in self.scheduler.update(step, drawn):
            self.finish(finished)
        self.manager.check()
        busy = rows > 0 or len(step.decision) > 0 or bool(losses) or not self.live
        self.idle = 0 if busy else self.idle + 1
        if not busy:
            self.record.idle()
        if self.idle > IDLE_STEPS:
            raise AssertionError(f"{len(self.live)} requests wait and {self.idle} steps did nothing")

    @rule(count=st.integers(2, 8), lost=st.lists(st.integers(0, 63), max_size=1), drafts=DRAFTS, late=st.booleans())
    def run(self, count: int, lost: list[int], drafts: Sequence[tuple[int, int]], late: bool = False) -> None:  # noqa: FBT001, FBT002 (drawn)
        """Run some steps, undisturbed except for losses."""
        for _ in range(count):
            self.step(lost=lost, when="never", pick=0, again=None, drafts=drafts, late=late)

    def teardown(self) -> None:
        """Run to the end and check that every block is free."""
        if self.failed or not hasattr(self, "scheduler"):
            return
        ended, longest = self.record.step, max((len(r.prompt) + r.max_tokens for r in self.live.values()), default=0)
        for _ in range((longest + IDLE_STEPS + 2) * (len(self.live) + 1) * 4):
            if not self.live:
                break
            self.run_undisturbed()
        why = self.explain_end()
        if self.live or self.unfinished():
            raise AssertionError(f"{why}{self.explain_left(self.record.step - ended)}")
        refuse_open(self.manager, why)
        for tier in TIERS:
            free, blocks = self.manager.pool(tier).num_free, self.manager.pool(tier).num_blocks
            blocks -= self.nulls if blocks else 0
            if free != blocks or self.manager.stats().sequences:
                raise AssertionError(
                    f"{why}{free} of {blocks} {tier} blocks are free, {self.manager.stats().sequences} sequences"
                )

    # ---- helpers ----

    def run_undisturbed(self) -> None:
        """Run one step at the end."""
        self.step(lost=[], when="never", pick=0, again=None)

    def explain_end(self) -> str:
        """Return the beginning of the message for a bad end."""
        return ""

    def explain_left(self, steps: int) -> str:  # noqa: ARG002 (for subclasses)
        """Describe what is left after `steps` steps without new requests."""
        return f"{len(self.live)} requests are left, {self.unfinished()} in the scheduler"

    @property
    def nulls(self) -> int:
        """Number of blocks that no sequence can use: the null block of windows and recurrent states."""
        kinds = {group.kind for group in self.manager.groups}
        return int(not kinds <= {"full_attention", "drafter"})

    def unfinished(self) -> int:
        """Return the number of requests in the scheduler."""
        return self.scheduler.num_unfinished

    def check_shape(self, step: Step) -> None:
        """Check that all arrays agree on rows and tokens."""
        tokens, rows = len(step.token_ids), step.rows
        groups = self.manager.groups
        shape = (len(groups),) if len(groups) > 1 else ()
        by_row = (len(step.seats), len(step.start), step.block_tables.shape[-2], len(step.query_start_loc) - 1)
        by_group = (step.slot_mapping.shape[:-1], step.block_tables.shape[:-2])
        ends = int(step.query_start_loc[-1])
        if step.slot_mapping.shape[-1] != tokens or set(by_row) != {rows} or ends != tokens or set(by_group) != {shape}:
            raise AssertionError(
                f"{tokens} tokens end at {ends} and have slots {list(step.slot_mapping.shape)}, {rows} rows have "
                f"arrays of {by_row}, with block tables {list(step.block_tables.shape)} of {len(groups)} groups"
            )
        if not 0 <= step.decodes <= step.samples <= rows or (step.lengths < 1).any():
            raise AssertionError(
                f"{step.decodes} decodes and {step.samples} samples of {rows} rows of {step.lengths.tolist()} tokens"
            )
        slots = step.slot_mapping.reshape(-1).tolist()
        if any(group.kind == "recurrent" for group in groups):
            slots = [slot for slot in slots if slot >= self.manager.block_size]  # not those of states passed over
        if len(set(slots)) < len(slots):
            raise AssertionError(f"two tokens of a step share a slot: {step.slot_mapping.tolist()}")
        if len(set(step.seats.tolist())) < rows:
            raise AssertionError(f"two rows of a step share a seat: {step.seats.tolist()}")

    def execute(self, decision: StepDecision, numbers: Sequence[int]) -> list[Pairs]:
        """Begin a decision's transfers. Some between tiers are lost, before copies are made from them."""
        losses = self.losses(decision, numbers)
        self.record.execute(decision, losses)
        return losses

    def losses(self, decision: StepDecision, numbers: Sequence[int]) -> list[Pairs]:
        """Pick distinct pairs of a decision that will be lost, among those that move between tiers."""
        swaps = (*decision.swap_out, *decision.swap_in)
        single = [Pairs(pairs.src, pairs.dst, ids[None]) for pairs in swaps for ids in pairs.ids]
        return [single[at] for at in sorted({number % len(single) for number in numbers})] if single else []

    def compute_drafts(self, step: Step, drafts: Sequence[tuple[int, int]]) -> list[int]:
        """Fill in a step's draft tokens and compute it."""
        slots = (step.lengths[: step.decodes] - 1).tolist()
        if not any(slots):
            return self.compute(step)
        if drafts:
            turns = [drafts[row % len(drafts)] for row in range(step.decodes)]
            step.set_draft_token_ids(
                [
                    self.guess(step, row, min(count, most), right)
                    for row, (most, (count, right)) in enumerate(zip(slots, turns, strict=True))
                ]
            )
            return self.compute(step)
        first = step.query_start_loc[: step.decodes]
        for done in range(max(slots)):
            drawn = self.compute(step)
            for at in first[np.array(slots) > done].tolist():
                step.token_ids[at + done + 1] = drawn[at + done]
        return self.compute(step)

    def guess(self, step: Step, row: int, count: int, right: int) -> list[int]:
        """Return draft tokens for a row: the first `right` are correct, the next is wrong."""
        name, index = step.owner(row)
        request = self.live.get(name)
        if request is None or index >= request.n:  # it was aborted; its tokens are dropped
            return [0] * count
        drawn = reference_tokens(request, self.window)[index]
        first = int(step.start[row]) + 1 - len(request.prompt)
        wanted = [*drawn[first : first + count], *([0] * count)][:count]
        return [token if at < right else (token + 1) % VOCABULARY for at, token in enumerate(wanted)]

    def compute(self, step: Step) -> list[int]:
        """Write the step's tokens, read each sequence through its table, and draw."""
        return draw_tokens(step, self.memory, self.window, self.scheduled)

    def finish(self, finished: Finished) -> None:
        """A finished request must be live and have the same tokens as with unlimited memory."""
        name = finished.request.request_id
        if self.live.get(name) is not finished.request:
            raise AssertionError(f"{finished.request} finished and is not live")
        expected = reference_tokens(finished.request, self.window)
        found = tuple(tuple(int(token) for token in tokens) for tokens in finished.outputs)
        if found != expected:
            raise AssertionError(f"{finished.request}: drew {found}, in endless memory {expected}")
        self.record.counts["finished"] += 1
        del self.live[name]

    def drop(self, pick: int) -> str:
        """Abort one of the live requests."""
        name = sorted(self.live)[pick % len(self.live)]
        self.scheduler.abort(name)
        self.record.counts["aborts"] += 1
        del self.live[name]
        self.refuse_abort(name)
        self.manager.check()
        return name

    def refuse_abort(self, name: str) -> None:
        """Check that aborting a request that does not exist is refused."""
        try:
            self.scheduler.abort(name)
        except InvalidArgumentError:
            return
        raise AssertionError(f"request {name!r} is not there and was aborted")

    def resubmit(self, pick: int, again: Request | None) -> None:
        """In the middle of a step, abort a request and perhaps submit another under its id."""
        if not self.live:
            return
        name = self.drop(pick)
        if again is not None:
            self.add(replace(again, request_id=name))


class ResizingSchedulerMachine(SchedulerMachine):
    """`SchedulerMachine` with a device that shrinks and grows between steps, up to its initial size.

    A request must end early, with an `OutOfBlocksError`, if and only if that step's device cannot hold it to its end;
    its tokens so far must be correct, too.
    """

    room = 0  # blocks that the current step can give to one request

    @rule(blocks=st.integers(1, 16))
    def resize(self, blocks: int) -> None:
        """Resize the device."""
        blocks = min(max(blocks, 1 + self.nulls), len(self.memory.tiers["device"]))
        self.manager.defrag.resize(blocks)
        self.manager.check()

    def check_shape(self, step: Step) -> None:
        """Check that everything scheduled can run to its end."""
        super().check_shape(step)
        self.room = self.manager.pool("device").num_blocks - self.manager.pool().reserved - self.nulls
        for name in {step.owner(row)[0] for row in range(step.rows)}:
            if name not in self.live:
                raise AssertionError(f"request {name!r} runs and is not live")
            needed = min_blocks(self.live[name], self.manager.block_size)
            if needed > self.room:
                raise AssertionError(f"request {name!r} runs and needs {needed} blocks, there is room for {self.room}")

    def finish(self, finished: Finished) -> None:
        """A request that ends early must have been too large, and its tokens so far correct."""
        if finished.error is None:
            super().finish(finished)
            return
        request = finished.request
        if self.live.pop(request.request_id, None) is not request:
            raise AssertionError(f"{request} was refused and is not live")
        most = request.n * min_blocks(request, self.manager.block_size) * len(self.manager.groups)
        if not finished.error.wanted > finished.error.free or most <= self.room:
            raise AssertionError(f"{request} was refused: {finished.error}; there was room for {self.room} blocks")
        whole = reference_tokens(request, self.window)
        if not all(tokens == right[: len(tokens)] for tokens, right in zip(finished.outputs, whole, strict=True)):
            raise AssertionError(f"{request}: drew {finished.outputs}, in endless memory {whole}")


def min_blocks(request: Request, block_size: int) -> int:
    """Return the device blocks that one sequence of a request needs at its end."""
    return -(-(len(request.prompt) + request.max_tokens) // block_size)
