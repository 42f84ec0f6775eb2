"""Batches of stores that block: event descriptors, rows of the caller, and storage that hangs."""

import gc
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
from memory_stores import PATIENCE, SIZE, KeyedStore, get, names, put, rows

from blockyard.errors import InvalidArgumentError, StoreError


def test_an_event_wakes_a_selector():
    with KeyedStore() as store:
        event = store.event_fd()
        assert not select.select([event], [], [], 0)[0]
        ticket = store.submit_put(names(1), rows(1))
        assert select.select([event], [], [], PATIENCE)[0] == [event]
        assert store.poll() == [ticket]
        assert not select.select([event], [], [], 0)[0]


def test_an_event_that_the_caller_has_read_costs_no_ticket():
    with KeyedStore() as store:
        event = store.event_fd()
        for _ in range(2):
            tickets = [store.submit_put(names(1), rows(1)), store.submit_put(names(2), rows(2))]
            assert select.select([event], [], [], PATIENCE)[0] == [event]
            os.eventfd_read(event)
            found: list[int] = []
            while len(found) < 2:
                found += store.poll()
                select.select([event], [], [], 0.01)
            assert found == tickets
            assert all(store.wait(ticket).ok.all() for ticket in tickets)


def test_an_event_descriptor_asked_for_late_is_readable_and_goes_with_the_store():
    store = KeyedStore()
    store.submit_put([], rows(0))
    event = store.event_fd()
    assert select.select([event], [], [], 0)[0] == [event]
    store.close()
    assert select.select([event], [], [], 0)[0] == [event], "tickets can be collected after closing"
    del store
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(event)


def test_storage_that_hangs_costs_one_deadline_and_not_one_for_each_batch():
    with KeyedStore() as store:
        put(store, 2)
        gate, hung = threading.Event(), []
        store.before, store.timeout_base = lambda name: hung.append(name) or gate.wait(PATIENCE), 0.1
        waiting = [store.submit_get(names(2)) for _ in range(12)]
        found = {reason for ticket in waiting for reason in store.wait(ticket).reasons}
        assert found <= {"timeout", "unavailable"}
        for _ in range(100):
            assert set(put(store, 2)) == {"unavailable"}
            assert not store.contains(names(2)).any()
        assert store.stats().is_down
        assert 1 <= len(hung) <= 4, "one deadline for each thread"
        with pytest.raises(StoreError, match="nothing is found or stored until it is called again: unavailable"):
            store.forget()
        gate.set()
        store.timeout_base = PATIENCE
        until = time.monotonic() + PATIENCE
        while "unavailable" in put(store, 2) and time.monotonic() < until:
            time.sleep(0.01)
        assert put(store, 2) == ("forgotten", "forgotten")
        store.forget()
        while "unavailable" in put(store, 2) and time.monotonic() < until:
            time.sleep(0.01)
        assert get(store, 2) == ("", "")
        assert not store.stats().is_down


@pytest.mark.parametrize("call", ["poll", "wait"])
def test_a_batch_that_no_thread_was_called_for_still_runs(call: str, monkeypatch: pytest.MonkeyPatch):
    with KeyedStore() as store:
        with monkeypatch.context() as patch:
            patch.setattr(store, "_call_thread", lambda: None)  # what an interrupt as it begins leaves
            ticket = store.submit_put(names(1), rows(1))
        until = time.monotonic() + PATIENCE
        while call == "poll" and ticket not in store.poll():
            assert time.monotonic() < until, "the batch never ends"
        assert store.wait(ticket).ok.all()


@pytest.mark.parametrize("call", ["poll", "wait"])
def test_an_interrupt_as_a_batch_ends_makes_all_misses_and_the_next_run(call: str, monkeypatch: pytest.MonkeyPatch):
    with KeyedStore() as store:
        put(store, 2)
        store.threads, gate = 1, threading.Event()
        store.before = lambda name: gate.wait(PATIENCE)
        running = store.submit_get(names(2)[1:])
        first, second = store.submit_get(names(1)), store.submit_get(names(1))
        assert store._batches.open[second].before == 1

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        store._batches._deadlines[:] = [(0.0, first)]
        calls = {"poll": store.poll, "wait": lambda: store.wait(first, 0.0)}
        monkeypatch.setattr(store, "_count_misses", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls[call]()
        monkeypatch.undo()
        assert set(store.poll()) == {running, first, second}
        assert [store.wait(ticket).reasons for ticket in (running, first, second)] == [("error",)] * 3
        gate.set()
        assert get(store, 2) == ("", "")
    assert store.stats().pending_bytes == 0


@contextmanager
def hanging_store(num_waiting: int, timeout: float) -> Iterator[tuple[KeyedStore, threading.Event, list[int]]]:
    """A store with two threads that hang until the event is set, and the tickets of further gets, which wait."""
    with KeyedStore() as store:
        store.threads = 2
        put(store, 2)
        gate, begun = threading.Event(), threading.Semaphore(0)

        def hang(name: str) -> None:
            begun.release()
            gate.wait(PATIENCE)

        store.before, store.timeout_base = hang, 0.3
        hung = [store.submit_get(names(2)[index : index + 1]) for index in range(2)]
        assert all(begun.acquire(timeout=PATIENCE) for _ in hung)
        store.timeout_base = timeout
        waiting = [store.submit_get(names(1)) for _ in range(num_waiting)]
        assert {store.wait(ticket).reasons for ticket in hung} == {("timeout",)}
        yield store, gate, waiting
        gate.set()


def lines_of_a_poll(store: KeyedStore) -> tuple[int, list[int]]:
    """How many lines of Python a poll runs, and the tickets that it returns."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        tickets = store.poll()
    finally:
        sys.settrace(before)
    return count, tickets


@pytest.mark.parametrize(("timeout", "reason"), [(PATIENCE, "unavailable"), (0.0, "timeout")])
def test_the_work_of_a_poll_does_not_grow_with_the_batches_that_wait_for_hanging_storage(timeout: float, reason: str):
    most = []
    for num_waiting in (200, 2000):
        with hanging_store(num_waiting, timeout) as (store, _, waiting):
            left, lines = set(waiting), []
            while left:
                count, tickets = lines_of_a_poll(store)
                assert tickets, "each poll ends some"
                left.difference_update(tickets)
                lines.append(count)
            most.append(max(lines))
            assert (reason,) in {store.wait(ticket).reasons for ticket in waiting}
    assert most[1] < 1.2 * most[0]


def test_the_event_of_a_store_is_readable_until_every_batch_that_waits_for_hanging_storage_was_polled():
    with hanging_store(200, PATIENCE) as (store, _, waiting):
        event, left = store.event_fd(), set(waiting)
        while left:
            assert select.select([event], [], [], PATIENCE)[0]
            left.difference_update(store.poll())
        assert not select.select([event], [], [], 0)[0]


def test_batches_that_nobody_polled_while_storage_hung_go_on_when_it_answers():
    with hanging_store(5, PATIENCE) as (store, gate, waiting):
        assert store.wait(waiting[0]).reasons == ("unavailable",)
        gate.set()
        until = time.monotonic() + PATIENCE
        while store.stats().is_down and time.monotonic() < until:
            store.contains(names(1))
            time.sleep(0.01)
        assert [store.wait(ticket).reasons for ticket in waiting[1:]] == [("",)] * 4


def test_a_store_that_nothing_uses_says_that_its_storage_works_again():
    with hanging_store(1, PATIENCE) as (store, gate, waiting):
        assert store.wait(waiting[0]).reasons == ("unavailable",)
        assert store.stats().is_down
        gate.set()
        until = time.monotonic() + PATIENCE
        while store.stats().is_down:
            assert time.monotonic() < until, "an idle cache is said to have no store for ever"
            time.sleep(0.01)


def test_reads_that_do_not_ask_the_storage_do_not_say_that_it_works_again(caplog: pytest.LogCaptureFixture):
    def refuse(name: str) -> None:
        raise OSError("connection refused")

    with KeyedStore() as store:
        put(store, 1)
        store.before = refuse
        assert get(store, 1) == ("error",)
        assert get(store, 1) == ("absent",), "it is not read again for a while"
        until = time.monotonic() + PATIENCE
        while store.stats().errors < 3:
            assert time.monotonic() < until, "nothing tries the storage"
            time.sleep(0.001)
        assert store.stats().errors_in_a_row >= 3
        assert "works again" not in caplog.text
        store.before = lambda name: None
        while store.stats().errors_in_a_row:
            assert time.monotonic() < until, "an idle cache is said to have a failing store for ever"
            time.sleep(0.001)
        while "works again" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.001)


def test_a_probe_that_fails_at_once_ends_the_wait_and_not_the_failure(caplog: pytest.LogCaptureFixture):
    def refuse(name: str) -> None:
        raise OSError("connection refused")

    with hanging_store(1, PATIENCE) as (store, gate, waiting):
        assert store.wait(waiting[0]).reasons == ("unavailable",)
        store.before = refuse
        until = time.monotonic() + PATIENCE
        while store.stats().is_down:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert store.stats().errors_in_a_row
        assert "works again" not in caplog.text
        gate.set()


def test_storage_whose_errors_come_late_is_left_alone_until_a_probe_is_answered():
    with KeyedStore() as store:
        put(store, 2)

        def fail_late(name: str) -> None:
            time.sleep(0.3)
            raise OSError("connection timed out")

        def fail_at_once(name: str) -> None:
            raise OSError("connection refused")

        store.before = fail_at_once
        assert get(store, 1) == ("error",)
        assert put(store, 1) == ("error",), "what fails at once may be tried again at once"
        store.before = fail_late
        assert put(store, 1) == ("error",)
        store.before = lambda name: None
        assert put(store, 1) == ("unavailable",)
        until = time.monotonic() + PATIENCE
        while "unavailable" in put(store, 1) and time.monotonic() < until:
            time.sleep(0.01)
        assert put(store, 1) == ("",)


def test_rows_for_a_read_must_fit():
    with KeyedStore() as store:
        put(store, 2)
        for bad in (np.zeros((1, SIZE), np.uint8), np.zeros((2, SIZE), np.int8), np.zeros((SIZE, 2), np.uint8).T):
            with pytest.raises(InvalidArgumentError, match="rows is "):
                store.submit_get(names(2), bad)  # type: ignore[arg-type]
        out = np.zeros((2, SIZE), np.uint8)
        assert store.wait(store.submit_get(names(2), out)).rows is out
        assert np.array_equal(out, rows(2))


@pytest.mark.parametrize("call", ["_make_ready", "_call_thread"])
def test_keys_are_looked_up_although_the_first_lookup_was_interrupted(call: str, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with KeyedStore() as store, KeyedStore(store.blocks) as other:
        put(store, 1)
        with monkeypatch.context() as patched:
            patched.setattr(other, call, interrupted)
            with pytest.raises(KeyboardInterrupt):
                other.contains(names(1))
        until = time.monotonic() + PATIENCE
        while not other.contains(names(1))[0]:
            assert time.monotonic() < until
            time.sleep(0.001)
