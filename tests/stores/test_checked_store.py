"""Stores that raise anything, answer anything and lose tickets: every step ends, and what came back is right."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from simulated_device import SimulatedStore

from blockyard import BlockManager, Pairs, StepDecision
from blockyard.engine.engine import CacheEngine
from blockyard.errors import InvalidArgumentError, MappingError, StoreError, UnknownTicketError
from blockyard.executor.executor import StepDone, StepExecutor
from blockyard.layout.kv import KVLayout
from blockyard.stores import Completion, StoreStats, checked_store
from blockyard.stores.threaded.runtime import MACHINE, use_runtime
from blockyard.testing.faults import UnrulyStore
from blockyard.tools.virtual_time import VirtualTime

LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=1, dtype="int64")
SIZE = LAYOUT.bytes_per_block
BLOCKS = 8
TIERS = ("device", "host", "external")


class SecondsByCall(VirtualTime):
    """Time that passes by being asked for, so that a batch that the store forgets is soon overdue."""

    def monotonic(self) -> float:
        self.now += 20.0
        return self.now


@pytest.fixture(autouse=True)
def _clock() -> Iterator[None]:
    with use_runtime(SecondsByCall()):
        yield


class Odd(SimulatedStore):
    """Does one thing in a way of its own."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        super().__init__(BLOCKS, SIZE, seed=0)
        self._eagerness = 1.0
        for name, call in calls.items():
            setattr(self, name, call)


def store(ticket: int = 1) -> StepDecision:
    return StepDecision(ticket, [("swap_out", Pairs("device", "external", np.array([[0, 1], [1, 0]])))])


def load(ticket: int = 2) -> StepDecision:
    return StepDecision(ticket, [("swap_in", Pairs("external", "device", np.array([[1, 4], [0, 5]])))])


def test_a_batch_that_has_its_answer_is_no_longer_under_way():
    side = checked_store.CheckedStore(Odd(), SIZE)
    for collect in (side.wait, lambda batch: side.poll()):
        batch = side.write(np.array([0]), np.ones((1, SIZE), np.uint8))
        assert side.is_busy
        while batch.answer is None:
            collect(batch)
        assert not side.is_busy


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_given_up_has_an_answer_and_a_ticket_that_nobody_knows_is_let_go(waits: bool):
    store = Odd()
    side = checked_store.CheckedStore(store, SIZE)
    batch = side.write(np.array([0]), np.ones((1, SIZE), np.uint8))
    lost = store.submit_write(np.array([1]), np.ones((1, SIZE), np.uint8))  # as if an interrupt had come at the return
    side.give_up_all(waits=waits)
    assert batch.answer is not None
    assert batch.answer.ok.tolist() == [waits]
    while store._batches:
        side.poll()
    with pytest.raises(UnknownTicketError):
        store.wait(lost)
    again = side.read(np.array([1]), np.zeros((1, SIZE), np.uint8))
    side.wait(again)
    assert again.answer is not None
    assert again.answer.ok.all()


@pytest.mark.parametrize(
    ("reason", "in_a_row", "logged"), [("timeout", 0, "timeout"), ("timeout", 1, "the disk"), ("io", 0, "the disk")]
)
def test_a_failure_is_logged_with_the_stores_last_error_unless_that_is_old(
    reason: str, in_a_row: int, logged: str, caplog: pytest.LogCaptureFixture
):
    done = lambda ticket, *_: Completion(ticket, np.zeros(1, np.bool_), np.zeros((0, SIZE), np.uint8), [reason])  # noqa: E731
    stats = StoreStats(errors=1, errors_in_a_row=in_a_row, last_error="the disk")
    side = checked_store.CheckedStore(Odd(wait=done, stats=lambda: stats), SIZE)
    side.wait(side.write(np.array([0]), np.ones((1, SIZE), np.uint8)))
    assert [message.partition("misses: ")[2] for message in caplog.messages] == [logged]


def test_a_failure_is_logged_though_the_store_has_no_statistics(caplog: pytest.LogCaptureFixture):
    done = lambda ticket, *_: Completion(ticket, np.zeros(1, np.bool_), np.zeros((0, SIZE), np.uint8), ["io"])  # noqa: E731
    side = checked_store.CheckedStore(Odd(wait=done, stats=lambda: 1 / 0), SIZE)
    batch = side.write(np.array([0]), np.ones((1, SIZE), np.uint8))
    side.wait(batch)
    assert batch.answer is not None
    assert [message.partition("misses: ")[2] for message in caplog.messages] == ["io"]


def test_an_answer_stays_though_the_store_writes_to_its_arrays_again():
    ok = np.ones(1, np.bool_)
    rows = np.zeros((0, SIZE), np.uint8)
    side = checked_store.CheckedStore(Odd(wait=lambda ticket, *_: Completion(ticket, ok, rows, [""])), SIZE)
    batch = side.write(np.array([0]), np.ones((1, SIZE), np.uint8))
    side.wait(batch)
    ok[:] = False
    assert batch.answer is not None
    assert batch.answer.ok.tolist() == [True]


@pytest.mark.parametrize("found", [np.ones(2, np.int64), np.ones(3, np.bool_), np.ones((2, 1), np.bool_), None])
def test_a_store_that_does_not_say_of_each_key_whether_it_has_it_has_none(found: object):
    side = checked_store.CheckedStore(Odd(contains=lambda keys: found), SIZE)
    assert side.contains(np.zeros((2, 32), np.uint8)).tolist() == [False, False]


def finish(executor: StepExecutor, ticket: int, *, polls: bool) -> StepDone:
    if not polls:
        return executor.wait(ticket)
    deadline = time.monotonic() + 300.0
    while time.monotonic() < deadline:
        for done in executor.poll():
            assert done.ticket == ticket
            return done
        time.sleep(0.0002)
    raise AssertionError(f"{executor} has not ended decision {ticket}")


@pytest.mark.parametrize("seed", range(60))
def test_every_step_ends_once_and_no_byte_is_wrong_whatever_the_store_does(seed: int):
    random = np.random.default_rng(seed)
    store = UnrulyStore(SimulatedStore(BLOCKS, SIZE, seed=seed), seed=seed, share=0.3)
    manager = BlockManager(block_size=4, device_blocks=BLOCKS, external_blocks=BLOCKS, watermark=0.0)
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        executor = StepExecutor(engine, store, chunk_bytes=2 * SIZE)
        rows: dict[int, NDArray[np.uint8]] = {}
        for _ in range(40):
            for handle in tuple(rows):
                if manager.tier(handle) == "device":
                    table = manager.block_table(handle).astype(np.int64)
                    assert np.array_equal(engine.read("device", table), rows[handle])
            while len(rows) < 2:
                (handle,) = manager.allocate(counts=[4 * int(random.integers(1, 4))]).tolist()
                manager.complete(manager.take_decision().ticket)
                table = manager.block_table(handle).astype(np.int64)
                rows[handle] = random.integers(0, 256, (len(table), SIZE), dtype=np.uint8)
                engine.write("device", table, rows[handle])
            handle = list(rows)[random.integers(2)]
            if manager.tier(handle) == "device":
                manager.swap_out([handle], to="external")
            else:
                manager.swap_in([handle])
            decision = manager.take_decision()
            executor.submit(decision)
            done = finish(executor, decision.ticket, polls=bool(random.integers(2)))
            for gone in manager.complete(done.ticket, done.lost).tolist():
                del rows[gone]
                manager.free([gone])
            manager.check()
            assert (executor.num_in_flight, executor.staged_bytes, executor.poll()) == (0, 0, [])
        manager.free(list(rows))
    assert all(manager.pool(tier).num_free == manager.pool(tier).num_blocks for tier in TIERS)
    assert store.broken > 5


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_arguments: object) -> object:
        raise error

    return call


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize(
    ("call", "broken", "why"),
    [
        ("submit_write", raising(ConnectionResetError("gone")), "ConnectionResetError: gone"),
        ("submit_write", lambda *_: "7", "'str' object cannot be interpreted as an integer"),
        ("wait", raising(OSError("cut")), "OSError: cut"),
        ("wait", lambda *_: None, "the answer is a NoneType, must be a Completion"),
        (
            "wait",
            lambda ticket, *_: Completion(ticket, np.ones(1, bool), np.zeros((0, SIZE), np.uint8), []),
            "0 reasons",
        ),
    ],
)
def test_a_swap_out_that_the_store_breaks_is_lost_with_one_line_in_the_log(
    call: str, broken: Callable[..., Any], why: str, polls: bool, caplog: pytest.LogCaptureFixture
):
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        executor = StepExecutor(engine, Odd(**{call: broken}))
        executor.submit(store())
        done = finish(executor, 1, polls=polls)
        assert [pairs.ids.tolist() for pairs in done.lost] == [[[1, 0], [0, 1]]]  # by slot
        (error,) = done.errors
        assert isinstance(error, StoreError)
        assert why in str(error)
        assert [(record.name, record.levelno) for record in caplog.records] == [("blockyard.executor", logging.WARNING)]
        assert why in caplog.text
        assert (executor.num_in_flight, executor.staged_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("ok", "shape", "found"),
    [
        ([True], (2, SIZE), "ok bool [1]"),
        ([True, True, True], (2, SIZE), "ok bool [3]"),
        ([True, True], (1, SIZE), f"rows uint8 [1, {SIZE}]"),
        ([True, True], (0, SIZE), f"rows uint8 [0, {SIZE}]"),
        ([True, True], (2, SIZE - 1), f"rows uint8 [2, {SIZE - 1}]"),
    ],
)
def test_arrays_of_another_shape_are_misses_and_write_nothing(ok: list[bool], shape: tuple[int, int], found: str):
    def answer(ticket: int, *_: object) -> Completion:
        return Completion(ticket, np.array(ok), np.full(shape, 255, np.uint8), [""] * 2)

    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        executor = StepExecutor(engine, Odd(wait=answer))
        executor.submit(load())
        done = executor.wait(2)
        assert [pairs.ids.tolist() for pairs in done.lost] == [[[0, 5], [1, 4]]]  # by slot
        assert found in str(done.errors[0])
        assert not engine.read("device", np.arange(BLOCKS)).any()


def test_rows_that_cannot_be_written_to_or_lie_backwards_are_taken():
    rows = np.arange(2 * SIZE, dtype=np.uint8).reshape(2, SIZE)
    rows.flags.writeable = False
    for given in (rows, rows[::-1]):
        store = Odd(wait=lambda ticket, *_, given=given: Completion(ticket, np.ones(2, bool), given, ["", ""]))
        with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
            assert StepExecutor(engine, store).execute(load()) == []
            assert np.array_equal(engine.read("device", np.array([5, 4])), given)


@pytest.mark.parametrize("found", [None, 3, ["x"], [None]])
def test_a_poll_that_answers_nonsense_gives_up_what_is_under_way(found: object):
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        executor = StepExecutor(engine, Odd(poll=lambda: found, wait=raising(KeyError(1))))
        executor.submit(store())
        assert len(finish(executor, 1, polls=True).lost) == 1


def test_a_ticket_that_the_store_forgets_is_given_up_in_time():
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        executor = StepExecutor(engine, Odd(poll=list, wait=raising(KeyError(1))))
        executor.submit(store())
        assert len(finish(executor, 1, polls=True).lost) == 1


def test_of_two_batches_with_one_ticket_neither_is_believed():
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        store = Odd(submit_read=lambda *_: 9, poll=list)
        executor = StepExecutor(engine, store, chunk_bytes=SIZE)
        executor.submit(load())
        done = executor.wait(2)
        assert sorted(pair for pairs in done.lost for pair in pairs.ids.tolist()) == [[0, 5], [1, 4]]
        assert all("ticket 9 twice" in str(error) for error in done.errors)


def test_sizes_are_compared_when_engine_and_store_meet():
    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        with pytest.raises(InvalidArgumentError, match=f"store has blocks of {2 * SIZE} bytes, must have {SIZE}"):
            StepExecutor(engine, SimulatedStore(BLOCKS, 2 * SIZE, seed=0))
        executor = StepExecutor(engine, SimulatedStore(1, SIZE, seed=0))
        swap = ("swap_out", Pairs("device", "host", np.zeros((0, 2), np.int64)))
        for decision in (store(), load(), StepDecision(3, [swap, *store().transfers()])):
            with pytest.raises(MappingError, match="name external block 1, the store has external_blocks=1"):
                executor.submit(decision)
            assert executor.num_in_flight == 0


def test_rows_for_blocks_that_the_store_reads_are_used_again_when_the_engine_has_written_them():
    seen: list[int] = []

    class Watched(SimulatedStore):
        def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
            if rows is not None:
                seen.append(rows.ctypes.data)
            return super().submit_read(slots, rows)

    with CacheEngine(LAYOUT, device_blocks=BLOCKS, host_blocks=0) as engine:
        engine.write("device", np.arange(2), np.arange(2 * SIZE, dtype=np.uint8).reshape(2, SIZE))
        executor = StepExecutor(engine, Watched(BLOCKS, SIZE, seed=0), chunk_bytes=SIZE)
        assert executor.execute(store()) == []
        assert seen == []
        for ticket in (2, 3):
            assert executor.execute(load(ticket)) == []
            assert np.array_equal(engine.read("device", np.array([4, 5])), engine.read("device", np.array([0, 1])))
        assert len(seen) == 4
        assert set(seen[2:]) == set(seen[:2]), "two buffers, one for each part, and no more"


def test_a_ticket_that_was_issued_twice_is_refused_for_good():
    side = checked_store.CheckedStore(Odd(submit_write=lambda slots, rows: 9), SIZE)
    slots, rows = np.zeros(1, np.int64), np.zeros((1, SIZE), np.uint8)
    first = side.write(slots, rows)
    with pytest.raises(StoreError, match="ticket 9 twice"):
        side.write(slots, rows)
    side.poll()
    assert first.answer is not None
    assert not first.answer.ok.any()
    with pytest.raises(StoreError, match="ticket 9 twice"):
        side.write(slots, rows)


def test_a_poll_collects_a_bounded_number_of_the_batches_that_ended_at_once():
    reported = list(range(1, 201))
    tickets, completion = iter(tuple(reported)), (np.zeros(1, np.bool_), np.zeros((0, SIZE), np.uint8))
    store = Odd(
        submit_write=lambda *_: next(tickets),
        poll=lambda: [reported.pop(0) for _ in range(len(reported))],
        wait=lambda ticket, *_: Completion(ticket, *completion, ["unavailable"]),
    )
    side = checked_store.CheckedStore(store, SIZE)
    batches = [side.write(np.zeros(1, np.int64), np.ones((1, SIZE), np.uint8)) for _ in tuple(reported)]
    counts = []
    while side.is_busy:
        before = side.num_answers
        side.poll()
        counts.append(side.num_answers - before)
    assert counts == [64, 64, 64, 8]
    assert all(batch.answer is not None and batch.answer.reasons == ("unavailable",) for batch in batches)


def test_a_batch_that_is_waited_for_is_not_collected_again_by_a_poll():
    waited: list[int] = []

    def answer(ticket: int, *_: object) -> Completion:
        waited.append(ticket)
        return Completion(ticket, np.zeros(1, np.bool_), np.zeros((0, SIZE), np.uint8), ["unavailable"])

    count = 70
    tickets = iter(range(count))
    store = Odd(submit_write=lambda *_: next(tickets), poll=lambda: list(range(count)), wait=answer)
    side = checked_store.CheckedStore(store, SIZE)
    batches = [side.write(np.zeros(1, np.int64), np.ones((1, SIZE), np.uint8)) for _ in range(count)]
    side.poll()
    side.wait(batches[-1])
    side.poll()
    assert sorted(waited) == list(range(count))


def test_a_plug_in_that_breaks_each_call_has_one_line_a_minute_for_a_call_and_class(caplog: pytest.LogCaptureFixture):
    broken = raising(OSError("gone"))
    with use_runtime(MACHINE):
        side = checked_store.CheckedStore(Odd(submit_write=broken, contains=broken, poll=broken), SIZE)
    slots, rows, keys = np.zeros(1, np.int64), np.ones((1, SIZE), np.uint8), np.zeros((1, 32), np.uint8)
    for _ in range(3):
        with pytest.raises(StoreError, match="gone"):
            side.write(slots, rows)
        assert not side.contains(keys).any()
        side.read(slots, rows)
        side.poll()
    found = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert found == [
        "write of 1 blocks with the external tier is lost",
        "the store cannot say which of 1 keys it has",
        "the store cannot be polled, 1 batches are given up",
    ]
