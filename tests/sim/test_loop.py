"""Tasks in virtual time: who waits for what, in which order, and that a seed decides all of it."""

from __future__ import annotations

import pytest

from blockyard.tools.sim.loop import Loop, StuckError


def test_time_jumps_to_the_first_that_waits_for_it():
    loop, seen = Loop(0), list[tuple[str, float]]()

    def sleep(name: str, seconds: float) -> None:
        loop.sleep(seconds)
        seen.append((name, loop.now))

    for name, seconds in (("c", 30.0), ("a", 1.0), ("b", 2.5)):
        loop.start(name, lambda name=name, seconds=seconds: sleep(name, seconds))
    loop.run()
    assert seen == [("a", 1.0), ("b", 2.5), ("c", 30.0)]


def order(seed: int) -> str:
    loop, seen = Loop(seed), list[str]()
    lock = loop.lock()

    def work(name: str) -> None:
        for _ in range(3):
            with lock:
                seen.append(name)
            loop.sleep(0.0)

    for name in "abcd":
        loop.start(name, lambda name=name: work(name))
    loop.run()
    return "".join(seen)


def test_a_seed_is_one_order_and_seeds_differ():
    assert order(5) == order(5)
    assert len({order(seed) for seed in range(20)}) > 10


def test_a_lock_has_one_holder_also_across_a_wait():
    loop, inside = Loop(1), list[int]()
    lock = loop.lock()

    def work() -> None:
        with lock, lock:
            inside.append(1)
            assert len(inside) == 1
            loop.sleep(1.0)
            inside.pop()

    for _ in range(5):
        loop.start("work", work)
    loop.run()
    assert loop.now == 5.0


def test_a_condition_gives_the_lock_back_while_it_waits():
    loop, seen = Loop(2), list[str]()
    lock = loop.lock()
    changed = loop.condition(lock)

    def wait() -> None:
        with lock, lock:
            assert changed.wait_for(lambda: "set" in seen, 10.0)
            seen.append("met")

    def set_it() -> None:
        loop.sleep(1.0)
        with lock:
            seen.append("set")
            changed.notify_all()

    def give_up() -> None:
        with lock:
            assert not changed.wait_for(lambda: False, 2.0)
            seen.append("given up")

    for run in (wait, set_it, give_up):
        loop.start("task", run)
    loop.run()
    assert seen == ["set", "met", "given up"]
    assert loop.now == 2.0


def test_an_event_that_comes_after_the_time_is_up_wakes_nobody():
    loop, seen = Loop(3), list[bool]()
    event = loop.event()

    def wait() -> None:
        seen.append(event.wait(1.0))
        loop.sleep(5.0)
        seen.append(event.wait(1.0))

    def set_late() -> None:
        loop.sleep(2.0)
        event.set()

    loop.start("wait", wait)
    loop.start("set", set_late)
    loop.run()
    assert seen == [False, True]
    assert loop.now == 6.0


def test_a_task_that_started_another_can_join_it():
    loop, seen = Loop(4), list[str]()

    def main() -> None:
        task = loop.start("child", lambda: loop.sleep(3.0))
        task.join(1.0)
        assert task.is_alive()
        task.join()
        seen.append("joined")

    loop.start("main", main)
    loop.run()
    assert (seen, loop.now, loop.tasks) == (["joined"], 3.0, {})


def test_what_a_task_raises_ends_the_run():
    loop = Loop(0)
    loop.start("broken", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.run()


def test_a_call_runs_at_its_time_and_ends_the_run_if_it_raises():
    loop, seen = Loop(0), list[float]()
    event = loop.event()
    loop.call_later(2.0, lambda: seen.append(loop.now))
    loop.call_later(1.0, event.set)
    loop.start("wait", lambda: seen.append(loop.now if event.wait(5.0) else -1.0))
    loop.run()
    assert seen == [1.0, 2.0]
    loop.call_later(1.0, lambda: 1 / 0)
    loop.start("sleep", lambda: loop.sleep(5.0))
    with pytest.raises(ZeroDivisionError):
        loop.run()


def test_thousands_of_tasks_run_at_once():
    loop, seen = Loop(0), list[int]()

    def work(number: int) -> None:
        loop.sleep(1.0)
        seen.append(number)

    for number in range(3000):
        loop.start("task", lambda number=number: work(number))
    loop.run()
    assert sorted(seen) == list(range(3000))
    assert loop.now == 1.0


def test_tasks_that_wait_for_each_other_are_named():
    loop = Loop(0)
    loop.start("one", lambda: loop.event().wait())
    with pytest.raises(StuckError, match="wait for each other: one"):
        loop.run()
