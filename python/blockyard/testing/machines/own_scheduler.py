"""`OwnSchedulerMachine`: a scheduler with calls of its own over simulated memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule
from numpy.typing import NDArray

from blockyard._core import BlockManager, Pairs, StepDecision
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Request, Scheduler
from blockyard.testing.interfaces import Config
from blockyard.testing.machines.scheduler import (
    IDLE_STEPS,
    ResizingSchedulerMachine,
    SchedulerMachine,
    draw_token,
    least_blocks,
    read_back,
    reference_tokens,
)
from blockyard.testing.machines.strategies import requests
from blockyard.testing.memory import SimulatedMemory

__all__ = ["OwnSchedulerMachine", "Simulation", "scheduler_machine"]

Ints = Sequence[int] | NDArray[np.integer[Any]]


class Simulation:
    """The device and the model in one step of a scheduler under test.

    Args:
        memory: holds tokens in place of keys and values.
        lose: carries out a decision and returns the pairs that it loses.
    """

    def __init__(self, memory: SimulatedMemory, lose: Callable[[StepDecision], list[Pairs]]) -> None:
        self.memory = memory
        self._lose = lose
        self.worked = False

    def execute(self, decision: StepDecision) -> list[Pairs]:
        """Carry out a decision's transfers; returns the pairs that did not land, as `BlockManager.fail` takes them."""
        lost = self._lose(decision)
        self.worked |= len(decision) > 0
        return lost

    def forward(
        self,
        token_ids: Ints,
        slot_mapping: Ints,
        block_tables: Sequence[Ints] | NDArray[np.integer[Any]],
        query_lens: Ints,
        seq_lens: Ints,
    ) -> list[int]:
        """Write the new tokens to their slots, read each sequence through its block table, and draw its next token.

        Args:
            token_ids: new tokens, sequence by sequence, `[tokens]`.
            slot_mapping: their slots, `[tokens]`.
            block_tables: blocks of each sequence, `[sequences, blocks]`.
            query_lens: new tokens of each sequence, `[sequences]`.
            seq_lens: tokens of each sequence, the new ones among them, `[sequences]`.

        Returns:
            The next token of each sequence; of no meaning where the prompt goes on.

        Raises:
            AssertionError: the lengths do not agree, two tokens share a slot, or a sequence does not read the tokens
                that it has just written.
        """
        tokens, slots = np.asarray(token_ids, np.int64), np.asarray(slot_mapping, np.int64)
        ends = list(accumulate((int(count) for count in query_lens), initial=0))
        if not (len(tokens) == len(slots) == ends[-1] and len(block_tables) == len(query_lens) == len(seq_lens)):
            raise AssertionError(
                f"{len(tokens)} tokens, {len(slots)} slots, query_lens sum to {ends[-1]}; {len(block_tables)} block "
                f"tables, {len(query_lens)} query_lens, {len(seq_lens)} seq_lens"
            )
        if len(set(slots.tolist())) < len(slots):
            raise AssertionError(f"two tokens of a step share a slot: {slots.tolist()}")
        self.memory.write(slots, tokens.tolist())
        self.worked |= len(tokens) > 0
        drawn = []
        for row, (table, length) in enumerate(zip(block_tables, seq_lens, strict=True)):
            new = tokens[ends[row] : ends[row + 1]].tolist()
            drawn.append(draw_token(read_back(self.memory, row, np.asarray(table, np.int32), int(length), new), 0))
        return drawn


class OwnSchedulerMachine(SchedulerMachine):
    """Random requests and losses on a scheduler that has one call for a step; `scheduler_machine` makes it.

    Attributes:
        add_request: gives a request to the scheduler.
        run_step: runs one step and returns the outputs of the requests that it finished, by request id.
        abort_request: aborts a request by its id; None where the scheduler cannot.
    """

    add_request: ClassVar[Callable[[Any, Request], object]]
    run_step: ClassVar[Callable[[Any, Simulation], Mapping[str, Sequence[int]]]]
    abort_request: ClassVar[Callable[[Any, str], object] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.added = 0

    @rule(request=requests(max_n=1, priorities=1))
    def add(self, request: Request) -> None:
        """Give a request to the scheduler, if the device can hold it to its end."""
        device = self.manager.pool("device")
        if least_blocks(request, self.manager.block_size) > device.num_blocks - device.reserved:
            return
        self.added += 1
        request = Request(f"{request.request_id}{self.added}", request.prompt, request.max_tokens)
        type(self).add_request(self.scheduler, request)
        self.live[request.request_id] = request
        self.manager.check()

    @rule(pick=st.integers(0, 7))
    def abort(self, pick: int) -> None:
        """Abort a request, if the scheduler can."""
        abort_request = type(self).abort_request
        if self.live and abort_request is not None:
            name = sorted(self.live)[pick % len(self.live)]
            abort_request(self.scheduler, name)
            del self.live[name]
            self.manager.check()

    @rule(lost=st.builds(list) | st.lists(st.integers(0, 63), min_size=1, max_size=2))
    def step(self, lost: list[int]) -> None:
        """Run one step, in which pairs may be lost."""
        self.broken = True
        simulation = Simulation(self.memory, lambda decision: self.execute(decision, lost))
        finished = type(self).run_step(self.scheduler, simulation)
        for name, tokens in finished.items():
            request = self.live.pop(name, None)
            if request is None:
                raise AssertionError(f"request {name!r} finished and is not live")
            (expected,) = reference_tokens(request)
            if tuple(map(int, tokens)) != expected:
                raise AssertionError(f"{request}: drew {list(tokens)}, in endless memory {list(expected)}")
        self.manager.check()
        self.idle = 0 if simulation.worked or finished or not self.live else self.idle + 1
        if self.idle > IDLE_STEPS:
            raise AssertionError(f"{len(self.live)} requests wait and {self.idle} steps did nothing")
        self.broken = False

    @rule(count=st.integers(2, 8))
    def run(self, count: int) -> None:
        """Run some steps without a loss."""
        for _ in range(count):
            self.step(lost=[])

    def run_undisturbed(self) -> None:
        """Run one step at the end."""
        self.step(lost=[])

    def unfinished(self) -> int:
        """What is left in the scheduler: it has no call to say so."""
        return 0


def scheduler_machine(
    make: Callable[[BlockManager, Config], Any] | None = None,
    *,
    add: Callable[[Any, Request], object] | None = None,
    step: Callable[[Any, Simulation], Mapping[str, Sequence[int]]] | None = None,
    abort: Callable[[Any, str], object] | None = None,
    manager: Callable[[Config], BlockManager] | None = None,
    resize: bool = False,
) -> type[SchedulerMachine]:
    """Make a machine for a scheduler: one with calls of its own, or with those of `SchedulerLike`.

    Args:
        make: makes the scheduler under test over a manager; Blockyard's own if not given.
        add: gives it a request: `request_id`, `prompt` (token ids) and `max_tokens` count, the rest has its default.
        step: runs one step: it calls `execute` and `forward` of a `Simulation`, and returns the outputs of the requests
            that have finished, by request id. Without `add` and `step`, the scheduler has the calls of `SchedulerLike`.
        abort: aborts a request by its id; never called if not given.
        manager: makes the manager; Blockyard's own if not given.
        resize: shrink and grow the device meanwhile, as `ResizingSchedulerMachine` does; not with `step`.

    Returns:
        A state machine; its `TestCase` runs under pytest and unittest.

    Raises:
        InvalidArgumentError: one of `add` and `step` is given without the other, or `resize` or no `make` with them.

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
    base: type[SchedulerMachine] = ResizingSchedulerMachine if resize else SchedulerMachine
    if add is not None and step is not None:
        if resize or make is None:
            raise InvalidArgumentError(f"resize is {resize}, make is {make}: with step, wanted a make and no resize")
        base = OwnSchedulerMachine
        members |= {"add_request": staticmethod(add), "run_step": staticmethod(step)}
        if abort is not None:
            members["abort_request"] = staticmethod(abort)
    elif (add, step, abort) != (None, None, None):
        raise InvalidArgumentError("add, step and abort: give add and step, or none of the three")
    return type("SchedulerMachineOf", (base,), members)
