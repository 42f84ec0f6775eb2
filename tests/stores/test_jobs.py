"""`StoreJobs`: jobs over a store in one thread, in order, each of which ends."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from typing import Any

import numpy as np
import pytest
from forks import in_child
from memory_stores import PATIENCE, KeyedStore, names, put

from blockyard.errors import ForkedError, InvalidArgumentError, StoreError
from blockyard.stores.adapters.jobs import Steps, StoreJobs, run
from blockyard.testing.faults import UnrulyStore


@pytest.fixture
def store() -> Iterator[KeyedStore]:
    with KeyedStore() as one:
        assert put(one, 4) == ("",) * 4
        yield one


def get(store: KeyedStore, count: int) -> Steps[list[str]]:
    found = yield store.submit_get, names(count)
    return list(found.reasons)


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_job_is_the_same_in_this_thread_and_in_another(store: KeyedStore):
    def twice() -> Steps[list[list[str]]]:
        yield 0.001
        first = yield from get(store, 2)
        try:
            yield store.submit_get, ["no key"]
        except InvalidArgumentError as error:
            assert "must be uint8" in str(error)
        return [first, (yield from get(store, 5))]

    wanted = [["", ""], ["", "", "", "", "absent"]]
    assert run(store, twice()) == wanted
    jobs = StoreJobs(store, "blockyard-test", {"one": 1})
    assert jobs.submit("one", twice()).result(PATIENCE) == wanted
    jobs.close()
    jobs.close()
    with pytest.raises(StoreError, match="closed"):
        jobs.submit("one", twice())


def test_an_exception_of_a_job_is_raised_only_by_its_future(store: KeyedStore):
    def fails() -> Steps[None]:
        yield store.submit_get, names(1)
        raise ValueError("a job")

    jobs = StoreJobs(store, "blockyard-test", {"one": 1})
    failed, good = jobs.submit("one", fails()), jobs.submit("one", get(store, 1))
    with pytest.raises(ValueError, match="a job"):
        failed.result(PATIENCE)
    assert good.result(PATIENCE) == [""]
    assert not store._batches.open, "the store keeps an answer"
    jobs.close()


def test_a_lane_keeps_its_order_and_its_room_and_waits_for_no_other(store: KeyedStore):
    jobs, goes, order = StoreJobs(store, "blockyard-test", {"slow": 2, "fast": 1}), threading.Event(), list[int]()
    store.before = lambda name: goes.wait(PATIENCE)

    def note(number: int) -> Steps[None]:
        order.append(number)
        yield store.submit_get, names(1)

    def pause() -> Steps[str]:
        yield 0.001
        return "fast"

    slow = [jobs.submit("slow", note(number)) for number in range(5)]
    assert jobs.submit("fast", pause()).result(PATIENCE) == "fast"
    assert order == [0, 1], "two at once, and others meanwhile"
    goes.set()
    for job in slow:
        job.result(PATIENCE)
    assert order == [0, 1, 2, 3, 4]
    jobs.close()


def test_close_drops_jobs_that_have_not_begun_and_waits_for_the_rest(store: KeyedStore):
    jobs, goes = StoreJobs(store, "blockyard-test", {"one": 1}), threading.Event()
    store.before = lambda name: goes.wait(PATIENCE)
    begun, waiting = jobs.submit("one", get(store, 1)), jobs.submit("one", get(store, 1))
    wait_for(begun.running)
    jobs.close(cancel=True, timeout=0.0)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    assert not begun.done()
    goes.set()
    jobs.close()
    assert begun.result(0) == [""]


def test_close_returns_if_a_job_that_it_waits_for_is_cancelled(store: KeyedStore):
    jobs, goes = StoreJobs(store, "blockyard-test", {"one": 1}), threading.Event()
    store.before = lambda name: goes.wait(PATIENCE)
    begun, waiting = jobs.submit("one", get(store, 1)), jobs.submit("one", get(store, 1))
    wait_for(begun.running)
    closing = threading.Thread(target=jobs.close, daemon=True)
    closing.start()
    wait_for(lambda: waiting._waiters)  # type: ignore[attr-defined]
    assert waiting.cancel()
    goes.set()
    closing.join(300)
    assert not closing.is_alive()


def test_a_job_that_is_cancelled_as_it_begins_does_not_run(store: KeyedStore, monkeypatch: pytest.MonkeyPatch):
    jobs, ran = StoreJobs(store, "blockyard-test", {"one": 1}), list[bool]()
    begin = jobs._next

    def cancelled() -> Any:
        begun = begin()
        assert begun is None or begun.future.cancel()
        return begun

    def note() -> Steps[None]:
        ran.append(True)
        yield 0.0

    monkeypatch.setattr(jobs, "_next", cancelled)
    cancelled_job = jobs.submit("one", note())
    assert wait([cancelled_job], 10.0).done, "who waits for it waits forever"
    assert not ran
    monkeypatch.undo()
    assert jobs.submit("one", get(store, 1)).result(PATIENCE) == [""]
    jobs.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_close_does_not_wait_in_a_fork(store: KeyedStore):
    jobs, goes = StoreJobs(store, "blockyard-test", {"one": 1}), threading.Event()
    store.before = lambda name: goes.wait(PATIENCE)
    begun = jobs.submit("one", get(store, 1))
    wait_for(begun.running)

    def check() -> None:
        with pytest.raises(ForkedError, match="a thread for a store was created by"):
            jobs.submit("one", get(store, 1))
        jobs.close()

    with jobs._lock:
        in_child(check)
    goes.set()
    assert begun.result(PATIENCE) == [""]
    jobs.close()


def test_jobs_in_flight_do_not_disturb_the_end_of_the_interpreter():
    program = """
        import sys, threading
        import numpy as np
        import blockyard.workers.threads
        from blockyard.stores import ThreadedStore
        from blockyard.stores.adapters.jobs import StoreJobs

        blockyard.workers.threads._PARTING_SECONDS = 0.5
        begun = threading.Event()
        class Store(ThreadedStore):
            num_slots = 4
            def put(self, keys, rows):
                begun.set()
                threading.Event().wait()
            def get(self, keys, out): ...

        store = Store("", bytes_per_block=16, namespace=bytes(32))
        def write():
            yield store.submit_write, np.array([0]), np.zeros((1, 16), np.uint8)
        jobs = StoreJobs(store, "blockyard-test", {"one": 1})
        jobs.submit("one", write())
        begun.wait()
        sys.exit(3)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("kept", [False, True])
def test_a_job_that_begins_without_memory_is_not_lost(
    store: KeyedStore, monkeypatch: pytest.MonkeyPatch, *, kept: bool
):
    class Short(list[Any]):
        """A list that runs out of memory once, before or after it has grown."""

        left = 1

        def append(self, job: Any) -> None:
            if kept or not self.left:
                super().append(job)
            if self.left:
                self.left = 0
                raise MemoryError

    jobs = StoreJobs(store, "blockyard-test", {"one": 2})
    monkeypatch.setattr(jobs, "_running", Short())
    first = jobs.submit("one", get(store, 2))
    assert first.result(PATIENCE) == ["", ""]
    assert jobs.submit("one", get(store, 5)).result(PATIENCE) == ["", "", "", "", "absent"]
    assert not store._batches.open
    jobs.close()


def test_the_thread_ends_when_it_has_nothing_to_do_and_begins_again(store: KeyedStore):
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "blockyard-idle"]

    jobs = StoreJobs(store, "blockyard-idle", {"one": 1})
    for _ in range(2):
        assert jobs.submit("one", get(store, 1)).result(PATIENCE) == [""]
        assert len(threads()) == 1
        wait_for(lambda: not threads())


def test_a_store_that_breaks_every_rule_ends_every_job(store: KeyedStore):
    class Unruly(UnrulyStore):
        def poll(self) -> Any:
            """Report every ticket: one that is never reported is waited for."""
            return self._break(self._inner.poll, lambda found: [found, [*found, -1]])

    for seed in range(5):
        unruly = Unruly(store, seed=seed, share=0.3)
        jobs = StoreJobs(unruly, "blockyard-test", {"one": 4})

        def load(unruly: Unruly = unruly) -> Steps[bool]:
            found = yield unruly.submit_get, names(2)
            return bool(np.all(found.ok))

        ended = [jobs.submit("one", load()) for _ in range(40)]
        jobs.close(timeout=PATIENCE)
        assert all(job.done() for job in ended)
        assert unruly.broken
