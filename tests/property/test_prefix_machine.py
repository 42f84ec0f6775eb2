"""`BlockManager`'s prefix cache at random, and the proof that the machine sees one go wrong."""

from collections.abc import Callable, Sequence
from functools import partial

import noticing
import numpy as np
import pytest
from hypothesis import settings
from managers import make_manager
from numpy.typing import NDArray

from blockyard import BlockManager, Pairs, PrefixCaching
from blockyard.events import EventBatch
from blockyard.testing import Config, LateMemory
from blockyard.testing.interfaces import Handles, PrefixManagerLike
from blockyard.testing.machines import prefix_machine, run_state_machine_as_test
from blockyard.testing.prefix_model import Extra
from blockyard.types import PrefixHit
from blockyard.types import Sequence as Sequence_

STEP_COUNT = 50
EVICTIONS = ["lru", "adaptive", "priority"]

assert_noticed = partial(noticing.assert_noticed, step_count=STEP_COUNT)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_hit_is_what_was_computed(eviction: str, steps: int):
    def make(config: Config, events: int) -> PrefixManagerLike:
        return make_manager(**config.arguments(), max_events=events, eviction=eviction)

    budget = settings(
        max_examples=max(1, -(-steps // STEP_COUNT // len(EVICTIONS))), stateful_step_count=STEP_COUNT, deadline=None
    )
    run_state_machine_as_test(prefix_machine(make), settings=budget)


# ---- managers with a bug ----


class Around:
    """A manager that answers as the one inside, except where a subclass overrides it."""

    def __init__(self, config: Config, events: int) -> None:
        self.inner = BlockManager(**config.arguments(), prefix_caching=PrefixCaching(max_events=events))

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class AroundPrefix:
    """`manager.prefix` that answers as the one inside, except where a subclass overrides it."""

    def __init__(self, inner: BlockManager) -> None:
        self.inner = inner.prefix

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class FindsEveryTenant(Around):
    class Prefix(AroundPrefix):
        def lookup(self, prompt: Sequence[int], *, salt: bytes | None = None) -> PrefixHit:
            return self.inner.lookup(prompt)

    @property
    def prefix(self) -> AroundPrefix:
        return self.Prefix(self.inner)

    def allocate(self, *prompts: Sequence[int], salt: bytes | None = None, preempted: bool = False) -> object:
        return self.inner.allocate(*prompts, preempted=preempted)


class IgnoresExtrasAfterFullBlocks(Around):
    @property
    def prefix(self) -> AroundPrefix:
        size = self.inner.block_size

        class Prefix(AroundPrefix):
            def hash(self, prompt: list[int], *, salt: bytes | None, extras: Sequence[Extra]) -> object:
                full = len(prompt) // size * size
                return self.inner.hash(prompt, salt=salt, extras=[extra for extra in extras if extra[0] < full])

        return Prefix(self.inner)


class PublishesWhatIsNotComputed(Around):
    def take_decision(self) -> object:
        decision = self.inner.take_decision()
        for sequence in self.seen:
            if self.inner.tier(sequence) == "device":
                self.inner.mark_computed([sequence])
        return decision

    def __init__(self, config: Config, events: int) -> None:
        super().__init__(config, events)
        self.seen: set[int] = set()

    def allocate(self, *prompts: Sequence[int], salt: bytes | None = None, preempted: bool = False) -> object:
        found = self.inner.allocate(*prompts, salt=salt, preempted=preempted)
        self.seen |= set(map(int, found if isinstance(found, tuple) else (found,)))
        return found

    def free(self, sequences: Handles) -> None:
        self.inner.free(sequences)
        self.seen -= set(np.atleast_1d(np.asarray(sequences)).tolist())


class SaysThatMoreIsCached(Around):
    def allocate(self, *prompts: Sequence[int], salt: bytes | None = None, preempted: bool = False) -> object:
        found = self.inner.allocate(*prompts, salt=salt, preempted=preempted)
        more = self.inner.block_size
        return tuple(
            Sequence_(int(sequence), sequence.cached_tokens + more * (sequence.cached_tokens > 0))
            for sequence in (found if isinstance(found, tuple) else (found,))
        )


class LosesEvents(Around):
    taken = 0

    @property
    def prefix(self) -> AroundPrefix:
        outer = self

        class Prefix(AroundPrefix):
            def take_events(self) -> EventBatch:
                batch = self.inner.take_events()
                outer.taken += 1
                return self.inner.take_events() if outer.taken % 3 == 0 else batch

        return Prefix(self.inner)


class ForgetsLosses(Around):
    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> NDArray[np.uint64]:
        return self.inner.complete(ticket)


@pytest.mark.parametrize(
    ("buggy", "first"),
    [
        (FindsEveryTenant, 0),
        pytest.param(IgnoresExtrasAfterFullBlocks, 0, marks=pytest.mark.slow),
        (PublishesWhatIsNotComputed, 1),
        (SaysThatMoreIsCached, 0),
        (LosesEvents, 0),
        (ForgetsLosses, 2),
    ],
)
def test_a_prefix_cache_with_a_bug_is_noticed(buggy: Callable[[Config, int], PrefixManagerLike], first: int):
    assert_noticed(prefix_machine(buggy), first=first)


@pytest.mark.parametrize("to", ["device", "host", "external"])
def test_a_dropped_transfer_is_noticed(to: str):
    class Drops(LateMemory):
        def store(self, kind: str, pairs: Pairs, rows: NDArray[np.int64]) -> None:
            if kind == "swap_in" or pairs.dst != to:
                super().store(kind, pairs, rows)

    machine = prefix_machine()
    machine.make_memory = Drops
    assert_noticed(machine)
