"""Calls of several batches in one pool of threads."""

import threading
from functools import partial

import pytest

from blockyard.stores.threaded.call_pool import CallPool

PATIENCE = 60.0


def test_every_number_is_called_once_and_no_more_run_at_once_than_allowed():
    pool, lock = CallPool(4), threading.Lock()
    called: list[tuple[str, int]] = []
    running, most = 0, 0

    def call(name: str, number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            called.append((name, number))
        with lock:
            running -= 1

    def batch(name: str) -> None:
        for size in (0, 1, 40):
            pool.each(size, partial(call, f"{name}{size}"))

    threads = [threading.Thread(target=batch, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(called) == sorted((f"{name}{size}", at) for name in "abc" for size in (1, 40) for at in range(size))
    assert most <= 4 + 3, "each thread that waits for its batch makes calls too"
    pool.close()


def test_threads_that_are_done_with_a_batch_make_the_calls_of_the_next():
    pool, begun, together = CallPool(4), threading.Event(), threading.Barrier(4)

    def call(number: int) -> None:
        if not number:
            begun.set()
        together.wait(PATIENCE)

    first = threading.Thread(target=pool.each, args=(4, lambda number: begun.wait(PATIENCE)))
    first.start()
    pool.each(4, call)
    first.join(PATIENCE)
    assert not together.broken
    assert not first.is_alive()


def test_a_batch_goes_on_while_all_threads_of_the_pool_hang():
    pool, goes, hang = CallPool(2), threading.Event(), threading.Semaphore(0)

    def hanging(number: int) -> None:
        hang.release()
        goes.wait(PATIENCE)

    waiting = threading.Thread(target=pool.each, args=(8, hanging))
    waiting.start()
    for _ in range(2):
        assert hang.acquire(timeout=PATIENCE)
    done: list[int] = []
    pool.each(5, done.append)
    assert done == list(range(5))
    goes.set()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_the_first_error_is_raised_and_no_call_begins_after_it():
    called: list[int] = []

    def call(number: int) -> None:
        called.append(number)
        if number == 2:
            raise OSError("the object is broken")

    with pytest.raises(OSError, match="broken"):
        CallPool(1).each(100, call)
    assert called == [0, 1, 2]
