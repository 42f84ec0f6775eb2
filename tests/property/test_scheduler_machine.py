"""The reference scheduler over simulated memory at random, and the proof that the machine sees it go wrong."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import noticing
import numpy as np
import pytest
from hybrid_model import Hybrid
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from interrupted_scheduler import Interrupted
from numpy.typing import NDArray
from precedence_watch import PrecedenceWatch

import blockyard.scheduler.rows
from blockyard import BlockManager, CacheGroup, Pairs
from blockyard.errors import OutOfBlocksError, StepOrderError
from blockyard.scheduler import (
    PREEMPTION_MODES,
    DefragPolicy,
    Finished,
    PreemptionCosts,
    PreemptionMode,
    Request,
    Scheduler,
    Step,
)
from blockyard.scheduler.acceptance import Acceptance
from blockyard.scheduler.admission import Admission
from blockyard.scheduler.request import IdleSequences, RequestState
from blockyard.scheduler.rows import DONE
from blockyard.testing import Config, LateMemory
from blockyard.testing.machines import SchedulerMachine, run_state_machine_as_test, scheduler_machine

STEP_COUNT = 40

assert_noticed = partial(noticing.assert_noticed, step_count=STEP_COUNT, max_examples=500)


MODES = (*PREEMPTION_MODES, PreemptionCosts(swap_block=3.0, prefill_token=1.0))
"""With costs, short victims are computed again and others swapped, or the other way round, by the block size."""


class VariesLookahead(Scheduler):
    """Asks for another number of draft tokens in each step."""

    def schedule(self, *, num_lookahead_tokens: int | None = None) -> Step:
        most = self._num_lookahead_tokens
        wanted = self.stats().steps * 5 % (most + 1) if num_lookahead_tokens is None else num_lookahead_tokens
        return super().schedule(num_lookahead_tokens=wanted)


class Impatient(Scheduler):
    """Is given tokens too early as well: computed with loads that may still be lost."""

    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> list[str]:
        step = self._in_flight
        is_in_flight = step is not None and step.decision.ticket == ticket
        if is_in_flight and step.rows and step.decision.swap_in and not step.decision.prefetch:
            with pytest.raises(StepOrderError, match="call complete before update"):
                self.update(step, [0] * step.num_draws)
        return super().complete(ticket, lost)


def swapping(manager: BlockManager, config: Config) -> Scheduler:
    return Scheduler(manager, preemption_mode="swap", defragment=DefragPolicy([("dense", 0)]))


def caching(config: Config) -> BlockManager:
    return BlockManager(**config.arguments(), prefix_caching=True)


@pytest.mark.parametrize("tokens", [40, 7], ids=["whole", "chunks"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_every_token_is_that_of_endless_memory(mode: PreemptionMode, prefix_caching: bool, tokens: int, steps: int):
    machine = scheduler_machine(
        lambda manager, _: Impatient(
            manager,
            preemption_mode=mode,
            max_num_seqs=6,
            max_num_batched_tokens=tokens,
        ),
        manager=caching if prefix_caching else None,
    )
    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES) // 4)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine, settings=budget)


MOVES = [
    None,
    DefragPolicy([("free_tail", 0)], max_moves=2),
    DefragPolicy([("free_tail", 0), ("contiguous", 1), ("dense", 0)], cached="drop"),
]


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("moves", MOVES, ids=["still", "tail", "dense"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_device_that_shrinks_and_grows_ends_only_what_cannot_fit_it(
    mode: PreemptionMode | PreemptionCosts, moves: DefragPolicy | None, prefix_caching: bool, steps: int
):
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        return Scheduler(
            manager,
            preemption_mode=mode,
            max_num_seqs=6,
            max_num_batched_tokens=20,
            defragment=moves,
        )

    machine = scheduler_machine(factory, manager=caching if prefix_caching else None, resize=True)
    examples = max(1, steps // STEP_COUNT // len(MODES) // len(MOVES) // 2)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine, settings=budget)


def windowed(config: Config) -> BlockManager:
    """A window of 1 to 9 tokens, and no prefix cache: what a sibling may share depends on what its window has kept."""
    window = 1 + (5 * config.device_blocks + config.block_size) % 9
    return BlockManager(**config.arguments(), groups=[CacheGroup.sliding_window(window)])


@pytest.mark.parametrize("tokens", [40, 5], ids=["whole", "chunks"])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_every_token_is_right_in_a_window(mode: PreemptionMode, tokens: int, steps: int):
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        return Scheduler(manager, preemption_mode=mode, max_num_seqs=6, max_num_batched_tokens=tokens)

    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES) // 2)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(scheduler_machine(factory, manager=windowed), settings=budget)


def recurrent(config: Config) -> BlockManager:
    """One recurrent state for each sequence, cached or not."""
    is_caching = config.device_blocks % 2 == 0
    return BlockManager(**config.arguments(), prefix_caching=is_caching, groups=[CacheGroup.recurrent()])


def machine_of(factory: Callable[[BlockManager, Config], Any], kind: str, **options: bool) -> type[SchedulerMachine]:
    """The machine over a manager of one of the kinds in `MANAGERS`."""
    machine = scheduler_machine(factory, manager=MANAGERS[kind], **options)
    made = {"make_memory": lambda config: LateMemory(sized(config, kind))} if kind in HYBRIDS else {}
    return type(machine.__name__, (Hybrid, machine), made) if kind in ("recurrent", *HYBRIDS) else machine


@pytest.mark.parametrize("tokens", [40, 5], ids=["whole", "chunks"])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_every_token_is_right_with_recurrent_states(mode: PreemptionMode, tokens: int, steps: int):
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        return Scheduler(manager, preemption_mode=mode, max_num_seqs=6, max_num_batched_tokens=tokens)

    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES) // 2)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine_of(factory, "recurrent"), settings=budget)


@pytest.mark.parametrize("kind", ["plain", "cached", "window", "recurrent", "full + window", "full + recurrent"])
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_no_request_waits_for_lower_priorities_or_too_many_that_overtake_it(
    mode: PreemptionMode, kind: str, steps: int
):
    def factory(manager: BlockManager, config: Config) -> Scheduler:
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "max_overtakes": config.host_blocks % 3}
        return Scheduler(manager, preemption_mode=mode, **options)

    machine = machine_of(factory, kind)
    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES) // 2)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(type(machine.__name__, (PrecedenceWatch, machine), {}), settings=budget)


FULL, STATE = CacheGroup.full_attention(), CacheGroup.recurrent()


HYBRIDS = {
    "full + window": 2,
    "full + chunks": 2,
    "full + drafter": 2,
    "full + windowed drafter": 2,
    "full + recurrent": 2,
    "2 full + window": 3,
    "full + 2 windows + recurrent": 4,
}
"""Kinds of several groups, the first with full attention, and their number of groups."""


def sized(config: Config, kind: str) -> Config:
    """As many blocks for each group as with one."""
    groups = HYBRIDS[kind]
    return replace(config, device_blocks=config.device_blocks * groups, host_blocks=config.host_blocks * groups)


def hybrid(kind: str) -> Callable[[Config], BlockManager]:
    """A manager with several groups, cached or not."""

    def manager(config: Config) -> BlockManager:
        window = 1 + (5 * config.device_blocks + config.block_size) % 9
        near, far = CacheGroup.sliding_window(window), CacheGroup.sliding_window(window + 5)
        groups = {
            "full + window": [FULL, near],
            "full + chunks": [FULL, CacheGroup.chunked_attention(window)],
            "full + drafter": [FULL, CacheGroup.drafter()],
            "full + windowed drafter": [FULL, CacheGroup.windowed_drafter(window)],
            "full + recurrent": [FULL, STATE],
            "2 full + window": [FULL, near, FULL],
            "full + 2 windows + recurrent": [FULL, near, far, STATE],
        }[kind]
        is_caching = config.device_blocks % 2 == 0
        return BlockManager(**sized(config, kind).arguments(), prefix_caching=is_caching, groups=groups)

    return manager


MANAGERS = {
    "plain": None,
    "cached": caching,
    "window": windowed,
    "recurrent": recurrent,
    **{kind: hybrid(kind) for kind in HYBRIDS},
}


@pytest.mark.parametrize("tokens", [40, 5], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_every_token_is_right_in_every_cache_group(mode: PreemptionMode, kind: str, tokens: int, steps: int):
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        return Scheduler(manager, preemption_mode=mode, max_num_seqs=6, max_num_batched_tokens=tokens)

    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES) // len(HYBRIDS))
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine_of(factory, kind), settings=budget)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_device_of_several_cache_groups_that_shrinks_and_grows_ends_only_what_cannot_fit_it(kind: str, steps: int):
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        return Scheduler(manager, max_num_seqs=6, max_num_batched_tokens=9, defragment=MOVES[-1])

    examples = max(1, steps // STEP_COUNT // len(HYBRIDS))
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine_of(factory, kind, resize=True), settings=budget)


@pytest.fixture
def short_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seats of six tokens, or four steps with draft tokens: most sequences keep their earlier tokens apart."""
    for name, tokens in (("SEAT_LENGTH", 4), ("FIRST_LENGTH", 4), ("CACHE_LINE", 2)):
        monkeypatch.setattr(blockyard.scheduler.rows, name, tokens)


@pytest.mark.usefixtures("short_seats")
@pytest.mark.parametrize("kind", MANAGERS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_token_is_right_with_draft_tokens(mode: PreemptionMode | PreemptionCosts, kind: str, steps: int):
    def factory(manager: BlockManager, config: Config) -> Scheduler:
        return VariesLookahead(
            manager,
            preemption_mode=mode,
            num_lookahead_tokens=1 + config.device_blocks % 7,
            max_num_seqs=6,
            max_num_batched_tokens=20,
        )

    examples = max(1, steps // STEP_COUNT // len(MODES) // 3)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    machine = machine_of(factory, kind, resize=kind not in {"window", "recurrent"})
    run_state_machine_as_test(machine, settings=budget)


def writing(factory: Callable[[BlockManager, Config], Scheduler]) -> type[SchedulerMachine]:
    """The machine beside a prefix store: writes begin and end at any time, and hold blocks for many steps."""

    def manager(config: Config) -> BlockManager:
        made = caching(config)
        made.prefix.store_jobs.start("through")
        return made

    class Writing(scheduler_machine(factory, manager=manager)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.writes: list[int] = []

        @rule(blocks=st.integers(1, 4))
        def begin_write(self, blocks: int) -> None:
            job = self.manager.prefix.store_jobs.begin_write(blocks)
            self.writes += [job.job] if len(job) else []

        @rule(pick=st.integers(0, 7))
        def end_write(self, pick: int) -> None:
            if self.writes:
                self.manager.prefix.store_jobs.end_write(self.writes.pop(pick % len(self.writes)))

        def explain_end(self) -> str:
            while self.writes:
                self.end_write(0)
            return super().explain_end()

    return Writing


@pytest.mark.parametrize("tokens", [40, 7], ids=["whole", "chunks"])
def test_every_token_is_right_beside_writes_to_a_prefix_store(tokens: int, steps: int):
    machine = writing(lambda manager, _: Scheduler(manager, max_num_seqs=6, max_num_batched_tokens=tokens))
    examples = max(1, steps // STEP_COUNT // 10)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine, settings=budget)


@pytest.mark.usefixtures("short_seats")
@pytest.mark.parametrize("kind", MANAGERS)
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_every_token_is_right_whatever_raises(mode: PreemptionMode, kind: str, steps: int):
    def factory(manager: BlockManager, config: Config) -> Interrupted:
        options = {"max_num_batched_tokens": 20, "num_lookahead_tokens": config.host_blocks % 3}
        return Interrupted(config, partial(Scheduler, manager), preemption_mode=mode, **options)

    examples = max(1, steps // STEP_COUNT // len(PREEMPTION_MODES) // 3)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine_of(factory, kind), settings=budget)


# ---- schedulers with a bug ----


class SharesWhatTheWindowGaveBack(Scheduler):
    def _make_empty(self) -> None:
        super()._make_empty()
        self._admission._still_has = lambda handle, tokens: True  # type: ignore[method-assign]


def test_a_sequence_that_shares_what_a_window_gave_back_is_noticed():
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        return SharesWhatTheWindowGaveBack(manager, preemption_mode="recompute", max_num_batched_tokens=20)

    assert_noticed(scheduler_machine(factory, manager=windowed))


class ExchangesTheGroups(Scheduler):
    def schedule(self) -> Step:
        step = super().schedule()
        step.slot_mapping[:] = step.slot_mapping[::-1].copy()
        return step


class MovesRowsOfOneGroup(Scheduler):
    def _make_empty(self) -> None:
        super()._make_empty()
        rows = self._rows
        move = rows._move

        def moves(to: NDArray[np.int64] | slice, of: NDArray[np.int64]) -> None:
            other = rows.block_tables[1].copy()
            move(to, of)
            rows.block_tables[1] = other

        rows._move = moves  # type: ignore[method-assign]


@pytest.mark.parametrize("buggy", [ExchangesTheGroups, MovesRowsOfOneGroup])
def test_a_scheduler_that_confuses_cache_groups_is_noticed(buggy: type[Scheduler]):
    machine = machine_of(lambda manager, _: buggy(manager, max_num_batched_tokens=20), "full + window")
    assert_noticed(machine, match="reads other tokens|reads .* where it has just written|drew")


class ForgetsInterrupts(Scheduler):
    """Goes on with the state as it is after an exception in the middle of a call."""

    def _restart_all(self) -> None:
        self._change.begun = False


class AsksFetchesWithinTheStep(ForgetsInterrupts):
    """Asks whether a prompt is loaded once the running sequences have got their tokens."""

    def _make_empty(self) -> None:
        super()._make_empty()
        admission, waiting = self._admission, self._waiting

        def head() -> IdleSequences | None:
            while (first := waiting.head()) is not None and first.fetch is not None and not first.fetch.done:
                admission._aside.append(waiting.pop())
            return first

        admission._head = head  # type: ignore[method-assign]


class LosesWhatEnded(Scheduler):
    """Forgets what an interrupted `update` has ended and not reported."""

    def _restart_all(self) -> None:
        super()._restart_all()
        self._refused.clear()


@pytest.mark.parametrize("buggy", [ForgetsInterrupts, AsksFetchesWithinTheStep, LosesWhatEnded])
def test_a_scheduler_that_takes_an_exception_wrongly_is_noticed(buggy: type[Scheduler]):
    def factory(manager: BlockManager, config: Config) -> Interrupted:
        return Interrupted(config, partial(buggy, manager), preemption_mode="swap", max_num_batched_tokens=20)

    assert_noticed(scheduler_machine(factory, manager=caching))


class ForgetsLosses(Scheduler):
    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> list[str]:
        return super().complete(ticket)


class KeepsBlocksOfTheAborted(Scheduler):
    def _release(self, state: RequestState) -> None:
        free, self._remove = self._remove, self._rows.remove  # type: ignore[method-assign]
        super()._release(state)
        self._remove = free  # type: ignore[method-assign]


class MixesUpRequestsOfOneName(Scheduler):
    """Takes a step's tokens for whoever has the id by then."""

    def update(self, step: Step, sampled: Sequence[int]) -> list[Finished]:  # type: ignore[override]
        for row in range(step.rows):
            owner, index = self._rows.owner(row)
            state = self._requests.get(owner.request.request_id, owner)
            if index < state.request.n:
                state.seats |= owner.seats
                self._rows.owners[int(step.seats[row])] = (state, index)
        with self._ended_twice():
            return super().update(step, sampled)

    def schedule(self) -> Step:
        with self._ended_twice():
            return super().schedule()

    @contextmanager
    def _ended_twice(self) -> Iterator[None]:
        try:
            yield
        except LookupError as error:
            raise AssertionError(f"a request ended twice, or has too few sequences: {error!r}") from error


class NeverBringsBack(Scheduler):
    def __init__(self, manager: BlockManager, **options: object) -> None:
        super().__init__(manager, **options)  # type: ignore[arg-type]
        self._swapping.resume = lambda priority: None  # type: ignore[method-assign]


class ChangesTheSlots(Scheduler):
    def schedule(self) -> Step:
        step = super().schedule()
        step.slot_mapping[:] = step.slot_mapping[::-1].copy()
        return step


class WritesOverARow(Scheduler):
    """Leaves the block table of a row as it was when another takes its place."""

    def __init__(self, manager: BlockManager, **options: object) -> None:
        super().__init__(manager, **options)  # type: ignore[arg-type]
        rows = self._rows

        def move(to: NDArray[np.int64] | slice, of: NDArray[np.int64]) -> None:
            rows.fields[:, to] = rows.fields[:, of]
            rows.last[to] = rows.last[of]

        rows._move = move  # type: ignore[method-assign]


class SkipsAToken(Scheduler):
    """Counts a token of a chunk as computed that is not."""

    def _next_chunks(self) -> None:
        self._rows.fields[DONE, self._rows.decodes : self._rows.count] += 1
        super()._next_chunks()


class AdmitsAnything(Scheduler):
    def add(self, request: Request) -> None:
        if request.request_id in self._requests:
            self.abort(request.request_id)
        super().add(request)


@pytest.mark.parametrize(
    "buggy",
    [
        ForgetsLosses,
        KeepsBlocksOfTheAborted,
        MixesUpRequestsOfOneName,
        NeverBringsBack,
        ChangesTheSlots,
        WritesOverARow,
        SkipsAToken,
        AdmitsAnything,
    ],
)
def test_a_scheduler_with_a_bug_is_noticed(buggy: type[Scheduler]):
    options = {"preemption_mode": "swap", "max_num_batched_tokens": 16}
    assert_noticed(scheduler_machine(lambda manager, _: buggy(manager, **options)))


# ---- a scheduler with a bug that shows with priorities alone ----


class PreemptsNobody(Scheduler):
    def _make_empty(self) -> None:
        super()._make_empty()
        self._precedence.make_way = lambda: False  # type: ignore[method-assign]


class LetsAllOvertake(Scheduler):
    """Starts any number of requests before one that does not fit."""

    def _make_empty(self) -> None:
        super()._make_empty()
        self._admission._max_overtakes = 1000


class OvertakesHigherPriorities(Scheduler):
    def _make_empty(self) -> None:
        super()._make_empty()
        self._admission._may_start = lambda head: True  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("buggy", "first"), [(PreemptsNobody, 3), (LetsAllOvertake, 1), (OvertakesHigherPriorities, 0)]
)
def test_a_scheduler_that_breaks_the_precedence_of_requests_is_noticed(buggy: type[Scheduler], first: int):
    options: dict[str, Any] = {"preemption_mode": "swap", "max_num_seqs": 4, "max_overtakes": 1}
    machine = scheduler_machine(lambda manager, _: buggy(manager, **options))
    assert_noticed(type(machine.__name__, (PrecedenceWatch, machine), {}), first=first)


# ---- a scheduler with a bug that shows with a prefix cache alone ----


class TellsWrongTokens(Scheduler):
    """Names the tokens of its sequences to the prefix cache one row too far."""

    def _append(self, lookahead: int) -> None:
        rows = self._rows
        last = rows.last[: rows.decodes].copy()
        rows.last[: rows.decodes] = np.roll(last, 1)
        super()._append(lookahead)
        rows.last[: rows.decodes] = last
        self._builder.token_ids[: rows.decodes] = last


def test_a_scheduler_that_fills_the_prefix_cache_wrongly_is_noticed():
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        return TellsWrongTokens(manager, preemption_mode="recompute", max_num_batched_tokens=16)

    assert_noticed(scheduler_machine(factory, manager=caching))


# ---- schedulers with a bug that shows beside writes to a prefix store alone ----


class TakesWhatItFinds(Admission):
    """Counts blocks that a prompt shares as room for its other blocks if only writes hold them."""

    def _bytes_with_hits(self, idle: IdleSequences, room: int) -> int:
        return super()._bytes_with_hits(idle, 0)


def test_a_scheduler_that_counts_what_writes_hold_wrongly_is_noticed():
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        scheduler = Scheduler(manager, preemption_mode="recompute")
        scheduler._admission.__class__ = TakesWhatItFinds
        return scheduler

    assert_noticed(writing(factory), first=8)


# ---- schedulers with a bug that shows with draft tokens alone ----


class AcceptsRejectedDrafts(Acceptance):
    def _accept(self, step: Step, sampled: NDArray[np.uint32], slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        drafted = int(step.query_start_loc[step.decodes])
        believed = sampled.copy()
        believed[: max(drafted - 1, 0)] = step.token_ids[1:drafted]
        return super()._accept(step, believed, slots)


class KeepsRejectedSlots(Acceptance):
    def _take_back(self, step: Step, *places: NDArray[np.int64]) -> None:
        manager, self._manager = self._manager, KeptWhole(self._manager)  # type: ignore[assignment]
        super()._take_back(step, *places)
        self._manager = manager


class KeptWhole:
    """A manager that cuts no sequence."""

    def __init__(self, manager: BlockManager) -> None:
        self.prefix = manager.prefix

    def truncate(self, sequence: int, num_tokens: int) -> None:
        return


class GoesOnBehindAStop(Acceptance):
    def _cut_at_stops(self, sampled: NDArray[np.uint32], first: NDArray[np.int64], count: NDArray[np.int64]):  # type: ignore[no-untyped-def]
        return super()._cut_at_stops(sampled, first, count.copy())


@pytest.mark.parametrize("buggy", [AcceptsRejectedDrafts, KeepsRejectedSlots, GoesOnBehindAStop])
def test_a_scheduler_that_takes_draft_tokens_wrongly_is_noticed(buggy: type[Acceptance]):
    def factory(manager: BlockManager, _: Config) -> Scheduler:
        scheduler = Scheduler(manager, num_lookahead_tokens=3, preemption_mode="recompute")
        scheduler._acceptance.__class__ = buggy
        return scheduler

    assert_noticed(scheduler_machine(factory, manager=caching), match="drew|reads")


# ---- schedulers with a bug that a device of one size hides ----


class RefusesNobody(Scheduler):
    def _refuse_what_no_longer_fits(self) -> None:
        return


class ForgetsWhatWaits(Scheduler):
    """Looks for those that do not fit any more among the running alone."""

    def _refuse_what_no_longer_fits(self) -> None:
        every, self._requests = self._requests, {n: state for n, state in self._requests.items() if not state.idle}
        super()._refuse_what_no_longer_fits()
        self._requests = every


class RefusesWithoutFreeing(Scheduler):
    def _refuse_what_no_longer_fits(self) -> None:
        release, self._release = self._release, lambda state: None  # type: ignore[method-assign]
        super()._refuse_what_no_longer_fits()
        self._release = release  # type: ignore[method-assign]


class RefusesWhatFits(Scheduler):
    def _lack_of_room(self, state: RequestState) -> OutOfBlocksError | None:
        lack = super()._lack_of_room(state)
        wanted, room = self._needs.to_end(state), self._needs.usable()
        return lack or (OutOfBlocksError("a block too many", "device", wanted + 1, room) if wanted == room else None)


class RefusesSilently(Scheduler):
    def update(self, step: Step, sampled: Sequence[int]) -> list[Finished]:  # type: ignore[override]
        return [finished for finished in super().update(step, sampled) if finished.error is None]


@pytest.mark.parametrize(
    "buggy", [RefusesNobody, ForgetsWhatWaits, RefusesWithoutFreeing, RefusesWhatFits, RefusesSilently]
)
def test_a_scheduler_that_takes_a_resize_wrongly_is_noticed(buggy: type[Scheduler]):
    machine = scheduler_machine(lambda manager, _: buggy(manager, preemption_mode="swap"), resize=True)
    assert_noticed(machine, first=19 if buggy is RefusesWhatFits else 0)


# ---- a sound scheduler over a copy engine with a bug ----


SWAPS = [("swap_in", "host"), ("swap_out", "host"), ("swap_in", "external"), ("swap_out", "external")]


@pytest.mark.parametrize(("dropped", "tier"), [("copy", "device"), *SWAPS, ("move", "device")])
def test_a_dropped_transfer_is_noticed(dropped: str, tier: str):
    class Drops(LateMemory):
        def store(self, kind: str, pairs: Pairs, rows: NDArray[np.int64]) -> None:
            if kind != dropped or tier not in (pairs.src, pairs.dst):
                super().store(kind, pairs, rows)

    machine = scheduler_machine(swapping)
    machine.make_memory = Drops
    assert_noticed(machine)


def test_transfers_in_the_wrong_order_are_noticed():
    class Backwards(LateMemory):
        """Keeps what is read back until the copies have run."""

        def store(self, kind: str, pairs: Pairs, rows: NDArray[np.int64]) -> None:
            if kind == "copy":
                rows = np.roll(rows, 1, axis=0) if len(rows) > 1 else rows[:, ::-1]
            super().store(kind, pairs, rows)

    machine = scheduler_machine(swapping)
    machine.make_memory = Backwards
    assert_noticed(machine)
