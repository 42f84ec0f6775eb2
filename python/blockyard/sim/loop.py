"""`Loop`: tasks in virtual time. One thread, one clock, one source of chance, so one seed is one run.

A task is a function that runs until it waits: for a lock, an event or a time. Which task goes on next is drawn. Time
passes only when all tasks wait, and then jumps to the first that waits for a time.

Tasks are greenlets, so code that blocks runs as it is: `greenlet` is a small, well-kept library, and switches in a
fraction of a microsecond, where threads that pass a baton need tens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any

from blockyard.errors import BlockyardError
from blockyard.stores.threaded.runtime import Runtime
from blockyard.workers import missing

try:
    from greenlet import getcurrent, greenlet
except ModuleNotFoundError as error:
    raise missing("blockyard.sim", error) from None

__all__ = ["Condition", "Event", "Lock", "Loop", "StuckError", "Task"]


class StuckError(BlockyardError):
    """All tasks wait, and none for a time."""


class Task:
    """A function that runs in a loop; as a thread, for who started it.

    Attributes:
        name: for messages.
        greenlet: runs it; this and the rest are the loop's.
        waits: grows with each wait, so that a late timer wakes nobody.
        was_woken: not by a timer.
    """

    def __init__(self, loop: Loop, name: str, run: Callable[[], Any]) -> None:
        self.name = name
        self._run = run
        self.greenlet = greenlet(self._work, loop.home)
        self.waits = 0
        self.was_woken = False
        self._has_ended = False
        self._ended = Event(loop)

    def is_alive(self) -> bool:
        """Return whether the function has not returned."""
        return not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until the function has returned."""
        self._ended.wait(timeout)

    def _work(self) -> None:
        try:
            self._run()
        finally:
            self._has_ended = True
            self._ended.set()


class Loop(Runtime):
    """Runs tasks one at a time, each until it waits; a `Runtime` for the code within.

    Args:
        seed: of all chance.

    Attributes:
        now: seconds since the start.
        random: the only source of chance.
        tasks: those that have not ended.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.tasks: list[Task] = []
        self.home = getcurrent()
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._numbers = count()
        self._current: Task | None = None
        self._failure: BaseException | None = None

    # ---- the runtime ----

    def monotonic(self) -> float:
        """Return virtual time."""
        return self.now

    def random_bytes(self, count: int) -> bytes:
        """Return drawn bytes."""
        return self.random.randbytes(count)

    def lock(self) -> Lock:
        """Return a lock."""
        return Lock(self)

    def rlock(self) -> Lock:
        """Return a lock that its holder may take again."""
        return Lock(self)

    def condition(self, lock: Lock) -> Condition:
        """Return a condition."""
        return Condition(self, lock)

    def event(self) -> Event:
        """Return a flag."""
        return Event(self)

    def start_worker(self, name: str, run: Callable[[], None], stop: Callable[[], None]) -> Task:  # noqa: ARG002
        """Start a task in place of a thread."""
        return self.start(name, run)

    # ---- tasks ----

    def start(self, name: str, run: Callable[[], Any]) -> Task:
        """Start a task. What it raises ends the run."""

        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 (raised by `run`)
                self._failure = error
            self.tasks.remove(task)

        task = Task(self, name, guarded)
        self.tasks.append(task)
        self._ready.append(task)
        return task

    def run(self) -> None:
        """Run tasks until none is left.

        Raises:
            StuckError: all tasks wait for each other.
        """
        while True:
            while self._ready:
                place = self.random.randrange(len(self._ready)) if len(self._ready) > 1 else 0
                self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
                self._switch(self._ready.pop())
            if not self.tasks:
                return
            if not self._pass_time():
                raise StuckError(f"all tasks wait for each other: {', '.join(task.name for task in self.tasks)}")

    def sleep(self, seconds: float) -> None:
        """Let a task wait for a time."""
        self.park(seconds)

    def step_aside(self) -> None:
        """Let other tasks go first, at times: code between two of these is not interrupted."""
        if self._ready and self._current is not None and self.random.random() < 0.25:
            self._ready.append(self._current)
            self._leave()

    def park(self, timeout: float | None = None) -> bool:
        """Let the current task wait until it is woken. Returns False if the time was up first."""
        task = self._current
        if task is None:
            raise StuckError("only a task can wait")
        task.waits += 1
        task.was_woken = False
        if timeout is not None and timeout < inf:
            heapq.heappush(self._timers, (self.now + max(0.0, timeout), next(self._numbers), task, task.waits))
        self._leave()
        return task.was_woken

    @property
    def current(self) -> Task | None:
        """The task that runs."""
        return self._current

    def wake(self, task: Task) -> None:
        """Let a parked task go on."""
        task.waits += 1
        task.was_woken = True
        self._ready.append(task)

    def _leave(self) -> None:
        self.home.switch()

    def _switch(self, task: Task) -> None:
        self._current = task
        task.greenlet.switch()
        self._current = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _pass_time(self) -> bool:
        while self._timers:
            at, _, task, waits = heapq.heappop(self._timers)
            if task.waits == waits:
                self.now = max(self.now, at)
                task.waits += 1
                self._ready.append(task)
                return True
        return False


class Lock:
    """A lock that its holder may take again. Others may go before each time it is taken."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._holder: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:  # noqa: FBT001, FBT002 (as `threading.Lock`)
        """Take the lock, waiting for it."""
        del timeout
        task = self._loop.current
        if task is None or self._holder is task:
            self._depth += 1  # outside of the loop nothing else runs
            self._holder = task
            return True
        self._loop.step_aside()
        while self._holder is not None:
            if not blocking:
                return False
            self._waiting.append(task)
            self._loop.park()
        self._holder, self._depth = task, 1
        return True

    def release(self) -> None:
        """Release the lock."""
        self._depth -= 1
        if not self._depth:
            self._holder = None
            if self._waiting:
                self._loop.wake(self._waiting.pop(self._loop.random.randrange(len(self._waiting))))

    def give_up(self) -> int:
        """Release the lock, however often it was taken. Returns how often."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        """Take the lock as often as before `give_up`."""
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition over a lock."""

    def __init__(self, loop: Loop, lock: Lock) -> None:
        self._loop, self._lock = loop, lock
        self._waiting: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait to be notified, and take it again. Returns False if the time is up first."""
        task = self._loop.current
        if task is None:
            raise StuckError("only a task can wait")
        self._waiting.append(task)
        depth = self._lock.give_up()
        was_notified = self._loop.park(timeout)
        if not was_notified:
            self._waiting.remove(task)
        self._lock.take_back(depth)
        return was_notified

    def wait_for(self, is_met: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until a condition is met, or the time is up. Returns what `is_met` returned last."""
        until = inf if timeout is None else self._loop.now + timeout
        found = is_met()
        while not found and self._loop.now < until:
            self.wait(until - self._loop.now)
            found = is_met()
        return found

    def notify(self, n: int = 1) -> None:
        """Wake up to `n` tasks."""
        for _ in range(min(n, len(self._waiting))):
            self._loop.wake(self._waiting.pop(0))

    def notify_all(self) -> None:
        """Wake all tasks that wait."""
        self.notify(len(self._waiting))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Event:
    """A flag to wait for."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake all tasks that wait."""
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._loop.wake(task)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set. Returns False if the time was up first."""
        task = self._loop.current
        if not self._is_set and task is not None:
            self._waiting.append(task)
            if not self._loop.park(timeout):
                self._waiting.remove(task)
        return self._is_set
