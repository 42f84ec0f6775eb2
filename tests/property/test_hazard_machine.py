"""Scheduler, manager, copy engine and executor over a simulated device at random, and known bugs planted in each."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from blockyard import BlockManager, Pairs, StepDecision
from blockyard.layout import KVLayout
from blockyard.offload.async_executor import AsyncExecutor, StepDone
from blockyard.plan import Ids
from blockyard.testing import Config
from blockyard.testing.hazard_machine import HazardMachine, overlapping
from blockyard.testing.machines import run_state_machine_as_test
from blockyard.tiers import ExternalStore
from blockyard.transfer.engine import CacheEngine
from blockyard.transfer.tickets import Mapping, MappingBuffers

STEP_COUNT = 30


def machine(**members: object) -> type[HazardMachine]:
    made = {
        "make_scheduler": staticmethod(overlapping),
        "make_manager": staticmethod(lambda config: BlockManager(**config.arguments())),
    }
    made |= {name: staticmethod(value) for name, value in members.items()}
    return type("Machine", (HazardMachine,), made)


def test_every_byte_is_that_of_the_plain_model(steps: int):
    budget = settings(max_examples=max(1, steps // STEP_COUNT // 3), stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(machine(), settings=budget)


def assert_noticed(**members: object) -> None:
    """The machine must fail, in a fixed search that stops at the first failure and does not shrink it."""
    search = settings(
        max_examples=500,
        stateful_step_count=STEP_COUNT,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError, match="reads wrong keys or values"):
        run_state_machine_as_test(machine(**members), settings=search)


# ---- bugs that engines have had ----


class OneMappingBuffer(MappingBuffers):
    """Uses the buffer of a transfer for the next one, which may be there before the first has run."""

    def take(self, pairs: Ids) -> Mapping:
        mapping = super().take(pairs)
        self.give_back(mapping)
        return mapping


def test_a_mapping_buffer_that_is_overwritten_in_flight_is_noticed():
    def engine(layout: KVLayout, **arguments: object) -> CacheEngine:
        made = CacheEngine(layout, **arguments)
        made._transfers._mappings = OneMappingBuffer(pinned=False)
        return made

    assert_noticed(make_engine=engine)


class EndsWhenSubmitted(AsyncExecutor):
    """Says that bytes have landed as soon as they were sent."""

    def __init__(self, engine: CacheEngine, store: ExternalStore, **arguments: int) -> None:
        super().__init__(engine, store, **arguments)
        self.early: list[int] = []

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        super().submit(decision, by_layer=by_layer)
        self.early.append(decision.ticket)

    def poll(self) -> list[StepDone]:
        super().poll()
        early, self.early = self.early, []
        return [StepDone(ticket, (), ()) for ticket in early]

    def is_open(self, ticket: int) -> bool:
        return False


def test_publishing_before_the_bytes_have_landed_is_noticed():
    assert_noticed(make_executor=EndsWhenSubmitted)


class FreesUnderCopies:
    """A manager that gives the blocks of a freed sequence out again although a transfer still uses them."""

    def __init__(self, config: Config) -> None:
        self.books = BlockManager(**config.arguments())
        self.open: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.books, name)

    def take_decision(self) -> StepDecision:
        decision = self.books.take_decision()
        self.open.append(decision.ticket)
        return decision

    def free(self, sequences: object) -> None:
        for ticket in self.open:
            self.books.complete(ticket)
        self.open.clear()
        self.books.free(sequences)

    def complete(self, ticket: int) -> None:
        if ticket in self.open:
            self.open.remove(ticket)
            self.books.complete(ticket)

    def fail(self, ticket: int, lost: Sequence[Pairs]) -> object:
        if ticket not in self.open:
            return []
        self.open.remove(ticket)
        return self.books.fail(ticket, lost)


def test_freeing_blocks_under_a_copy_in_flight_is_noticed():
    assert_noticed(make_manager=FreesUnderCopies)


class LoadsDoNotWait(CacheEngine):
    """Loads into blocks that a store is still reading."""

    def submit_swap_in(self, ids: Ids, *, after: Sequence[int] = (), **arguments: object) -> int:
        return super().submit_swap_in(ids, **arguments)


def test_a_load_that_races_a_store_is_noticed():
    assert_noticed(make_engine=LoadsDoNotWait)


# ---- other ways to be wrong ----


class IgnoresAfter(AsyncExecutor):
    def _write_device(self, step: object, decision: StepDecision, *rest: object, **arguments: object) -> None:
        transfers = decision.transfers()
        super()._write_device(step, StepDecision(decision.ticket, transfers), transfers, **arguments)


class ComputeDoesNotWait(CacheEngine):
    def order_compute(self, ticket: int) -> None:
        return

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        return


class WaitsForTheLayerBefore(CacheEngine):
    def wait_for_layer(self, ticket: int, layer: int) -> None:
        super().wait_for_layer(ticket, max(0, layer - 1))


class OneStagingBuffer(CacheEngine):
    def _staging(self, num_rows: int) -> torch.Tensor:
        if not hasattr(self, "kept"):
            self.kept = super()._staging(1000)
        return self.kept[:num_rows]


class CopiesDoNotWait(CacheEngine):
    def submit_copy(self, ids: Ids, *, after: Sequence[int] = (), **arguments: object) -> int:
        return super().submit_copy(ids, **arguments)


@pytest.mark.parametrize("engine", [ComputeDoesNotWait, WaitsForTheLayerBefore, OneStagingBuffer, CopiesDoNotWait])
def test_an_engine_that_leaves_something_unordered_is_noticed(engine: type[CacheEngine]):
    assert_noticed(make_engine=engine)


def test_an_executor_that_ignores_the_order_between_tickets_is_noticed():
    assert_noticed(make_executor=IgnoresAfter)
