"""After an exception at any call of a scheduler all requests start again: no token, slot or block is wrong or lost."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from interrupts import CountedInterrupt

import blockyard.scheduler
from blockyard import BlockManager, CacheGroup, Pairs
from blockyard.scheduler import DefragPolicy, Finished, Request, Scheduler, Step
from blockyard.testing import Config, SimulatedMemory
from blockyard.testing.machines.scheduler import draw_tokens, reference_tokens

FOLDER = str(Path(blockyard.scheduler.__file__).parent)
FILES = tuple(str(path) for path in Path(FOLDER).glob("*.py"))
T = TypeVar("T")


class Loaded:
    """A prompt that is loaded from the third look on."""

    def __init__(self) -> None:
        self.looks = 0

    @property
    def done(self) -> bool:
        self.looks += 1
        return self.looks > 2


class Rig:
    """A scheduler whose calls may be interrupted once, and an engine that goes on as its docstring says.

    Attributes:
        ends: places that were passed by the end of each call.
        only: the call that may be interrupted, from 0: watching slows the others down. None: each.
    """

    def __init__(
        self,
        *,
        device: int = 14,
        host: int = 0,
        external: int = 0,
        prefix_caching: bool = False,
        window: int | None = None,
        **options: Any,
    ) -> None:
        config = Config(4, device, host, external, 0.0)
        groups = None if window is None else [CacheGroup.sliding_window(window)]
        self.manager = BlockManager(**config.arguments(), prefix_caching=prefix_caching, groups=groups)
        self.memory = SimulatedMemory(config)
        self.window = window
        self.scheduler = Scheduler(self.manager, **options)
        self.overlap = bool(options.get("overlap_io"))
        self.interrupt = CountedInterrupt(sys.maxsize, FILES)
        self.ends: list[int] = []
        self.only: int | None = None
        self.live: dict[str, Request] = {}
        self.late: list[tuple[int, list[Pairs]]] = []
        self.steps = 0

    def call(self, call: Callable[[], T]) -> T | None:
        """None if it was interrupted."""
        watched = self.only in {None, len(self.ends)}
        try:
            with self.interrupt.armed() if watched else nullcontext():
                return call()
        except KeyboardInterrupt:
            return None
        finally:
            self.ends.append(self.interrupt.passed)

    def again(self, call: Callable[[], T]) -> T:
        """Make a call, and make it again if it was interrupted, which may be interrupted too."""
        before = self.interrupt.where
        found = self.call(call)
        if self.interrupt.where == before:
            return found  # type: ignore[return-value]
        with suppress(KeyboardInterrupt), self.interrupt.armed():
            return call()
        return call()

    def add(self, request: Request) -> None:
        self.again(lambda: self.scheduler.add(request))
        self.live[request.request_id] = request

    def abort(self, name: str) -> None:
        self.again(lambda: self.scheduler.abort(name))
        del self.live[name]

    def step(self, *, abort: str | None = None, resize: int | None = None) -> None:
        self.steps += 1
        if resize is not None:
            self.manager.defrag.resize(resize)
        step = self.again(self.scheduler.schedule)
        self.check_slots(step)
        if abort is not None:
            self.abort(abort)
        lost = self.memory.execute(step.decision)
        stored = [pairs for pairs in step.decision.swap_out if pairs.dst == "external" and self.steps % 2]
        lost += [Pairs(p.src, p.dst, p.ids[:1]) for p in stored]
        for pairs in lost:
            self.memory.lose(pairs)
        self.settle(step, lost)
        sampled = draw_tokens(step, self.memory, self.window)
        for finished in self.again(lambda: self.scheduler.update(step, sampled)):
            self.finish(finished)
        self.manager.check()

    def settle(self, step: Step, lost: list[Pairs]) -> None:
        """End the ticket, or that of the step before, in time for what it computes."""
        self.late.append((step.decision.ticket, lost))
        if self.overlap and any(p.src == "external" for p in step.decision.swap_in) and not step.rows:
            return
        for ticket, pairs in self.late:
            self.again(lambda ticket=ticket, pairs=pairs: self.scheduler.complete(ticket, pairs))
        self.late.clear()

    def check_slots(self, step: Step) -> None:
        """Each token's slot is that of its position, in the blocks of its sequence, and its sequence has no more."""
        for row, (first, end) in enumerate(pairwise(step.query_start_loc.tolist())):
            table, start = self.manager.block_table(int(step.handles[row])), int(step.start[row])
            positions = range(start, start + end - first)
            assert step.slot_mapping[first:end].tolist() == [int(table[p // 4]) * 4 + p % 4 for p in positions]
            assert self.manager.num_tokens(int(step.handles[row])) == positions[-1] + 1

    def finish(self, finished: Finished) -> None:
        request = self.live.pop(finished.request.request_id)
        outputs, whole = (
            [tuple(map(int, tokens)) for tokens in finished.outputs],
            reference_tokens(request, self.window),
        )
        if finished.error is None:
            assert outputs == list(whole)
        else:
            assert all(tokens == right[: len(tokens)] for tokens, right in zip(outputs, whole, strict=True))

    def run(self) -> None:
        """All kinds of events, and on to the end."""
        for number, (prompt, most, n) in enumerate([(6, 7, 2), (9, 6, 1), (3, 9, 3), (11, 5, 1), (5, 6, 2)]):
            stops = frozenset({3, 5}) if number % 2 else frozenset[int]()
            tokens = [(7 * number + i) % 97 for i in range(prompt)]
            self.add(Request(f"r{number}", tokens, most, n, number % 2, 0.0, stops))
        for _ in range(3):
            self.step()
        self.step(abort="r1" if "r1" in self.live else None)
        self.add(Request("late", [1, 2, 3, 4, 5, 6, 7], 4, priority=-1))
        self.step(abort="r3" if "r3" in self.live else None)
        dropped = self.again(self.scheduler.schedule)
        self.settle(dropped, [pairs for _, pairs in dropped.decision.transfers()])
        self.again(self.scheduler.give_up)
        self.add(Request("large", list(range(20)), 18))
        self.step()
        self.step(resize=self.manager.pool().num_blocks - 4)
        while self.live:
            assert self.steps < 150, self.interrupt.where
            self.step()
        self.check_end()

    def check_end(self) -> None:
        assert self.scheduler.num_unfinished == 0
        self.settle(self.scheduler.schedule(), [])
        assert not self.manager.stats().open_tickets
        assert self.manager.stats().sequences == 0
        for tier in ("device", "host", "external"):
            blocks = self.manager.pool(tier).num_blocks
            null_blocks = blocks > 0 and self.window is not None
            assert self.manager.pool(tier).num_free == blocks - null_blocks


RIGS: dict[str, Callable[[], Rig]] = {
    "swap": lambda: Rig(host=6, external=8, preemption_mode="swap", max_num_batched_tokens=9),
    "recompute": lambda: Rig(preemption_mode="recompute", defragment=DefragPolicy([("dense", 0)])),
    "overlap": lambda: Rig(external=30, preemption_mode="swap", overlap_io=True, prefix_caching=True),
    "prefetch": lambda: Rig(prefix_caching=True, prefetch=lambda _prompt: Loaded(), max_num_batched_tokens=10),
    "window": lambda: Rig(device=13, window=3, preemption_mode="recompute", max_num_batched_tokens=5),
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("name", RIGS)
def test_after_an_interrupt_at_any_call_every_request_gets_its_tokens(name: str, twice: bool):
    whole = RIGS[name]()
    whole.run()
    places = whole.interrupt.passed
    assert places > 4000
    for place in range(twice, places, 1 if settings().max_examples >= 1000 else 197):
        rig = RIGS[name]()
        rig.only = bisect_right(whole.ends, place)
        first = place - (whole.ends[rig.only - 1] if rig.only else 0)
        rig.interrupt = CountedInterrupt(first, FILES, again=1 + place % 40 if twice else 0)
        try:
            rig.run()
        except BaseException as error:
            raise AssertionError(f"interrupted at {rig.interrupt.where}, place {place}: {error!r}") from error
        assert rig.interrupt.where


class Raises:
    """A fetch whose first looks raise."""

    def __init__(self, times: int) -> None:
        self.times = times

    @property
    def done(self) -> bool:
        self.times -= 1
        if self.times >= 0:
            raise ConnectionError
        return True


def test_a_fetch_that_raises_changes_nothing():
    rig = Rig(prefix_caching=True, prefetch=lambda _prompt: Raises(0))
    rig.add(Request("a", [1, 2, 3], 9))
    rig.step()
    rig.scheduler._prefetch = rig.scheduler._admission._prefetch = lambda _prompt: Raises(2)
    rig.add(Request("b", [4, 5, 6], 4))
    steps = rig.scheduler.stats().steps
    for _ in range(2):
        with pytest.raises(ConnectionError):
            rig.scheduler.schedule()
        assert (rig.scheduler.stats().steps, rig.manager.stats().sequences) == (steps, 1)
    step = rig.scheduler.schedule()
    assert [step.owner(row) for row in range(step.rows)] == [("a", 0), ("b", 0)]
    assert (step.decodes, step.start.tolist()) == (1, [3, 0]), "a goes on"
    rig.check_slots(step)


def test_a_recomputed_sequence_shares_nothing_that_a_window_gave_back():
    rig = Rig(device=8, window=3, max_num_seqs=8, max_num_batched_tokens=4)
    rig.add(Request("a", [1], 5))
    rig.add(Request("b", [1] * 6, 5, n=3))
    while rig.live:
        assert rig.steps < 50
        rig.step()
    assert rig.scheduler.stats().preempted_recompute > 0
    rig.check_end()


def interrupted(_state: object) -> None:
    raise KeyboardInterrupt


def test_a_request_is_refused_although_the_refusal_was_interrupted(monkeypatch: pytest.MonkeyPatch):
    rig = Rig(device=12)
    rig.add(Request("large", list(range(20)), 18))
    rig.manager.defrag.resize(8)
    with monkeypatch.context() as patch:
        patch.setattr(rig.scheduler, "_release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.scheduler.schedule()
    assert rig.live
    rig.add(Request("huge", list(range(20)), 10))
    rig.step()
    assert list(rig.live) == ["huge"]
    assert rig.scheduler.stats().refused == 1
    with monkeypatch.context() as patch:
        patch.setattr(rig.scheduler, "_lack_of_room", interrupted)
        rig.manager.defrag.resize(6)
        with pytest.raises(KeyboardInterrupt):
            rig.scheduler.schedule()
    rig.step()
    assert not rig.live
    assert rig.scheduler.stats().refused == 2
    rig.check_end()
