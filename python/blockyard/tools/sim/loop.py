"""`Loop`: tasks in virtual time. One thread, one clock and one random generator, so a seed determines the whole run.

A task is a function that runs until it waits: for a lock, an event or a time. The loop draws the next task at random.
Time passes only when all tasks wait; then it jumps to the earliest timer.

Tasks are greenlets, so blocking code runs unchanged. A switch takes a fraction of a microsecond; threads that take
turns would need tens. A waiting task switches directly to the next one. Work that never waits, such as delivering a
message, goes through `call_later` and needs no task.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, Final

from blockyard.errors import BlockyardError
from blockyard.stores.threaded.runtime import Runtime
from blockyard.tools.virtual_time import VirtualTime
from blockyard.workers.extras import missing

try:
    from greenlet import getcurrent, greenlet
except ModuleNotFoundError as error:
    raise missing("blockyard.tools.sim", error) from None

__all__ = ["EngineRuntime", "Loop", "StuckError", "Task", "VirtualCondition", "VirtualEvent", "VirtualLock"]

_ASIDE: Final = 0.25  # probability that another ready task runs before a lock is taken
_OF_LOOP: Final = ["sleep", "wait_readable", "random_bytes", "lock", "rlock", "condition", "event", "start_worker"]


class StuckError(BlockyardError):
    """All tasks wait, and no timer can wake one."""


class Task:
    """A function that runs in a loop; its starter may treat it like a thread.

    Attributes:
        name: for messages.
        greenlet: runs the function. Only the loop uses this and the attributes below.
        waits: grows with each wait, so that the timer of an earlier wait is ignored.
        was_woken: whether the last wait ended by `wake`, not by a timer.
    """

    __slots__ = ("_ended", "_has_ended", "_run", "greenlet", "name", "waits", "was_woken")

    def __init__(self, loop: Loop, name: str, run: Callable[[], Any]) -> None:
        self.name = name
        self._run = run
        self.greenlet = greenlet(self._work, loop.home)
        self.waits = 0
        self.was_woken = False
        self._has_ended = False
        self._ended = VirtualEvent(loop)

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


class Loop(VirtualTime):
    """Runs tasks one at a time, each until it waits. It is the `Runtime` of the simulated code.

    Args:
        seed: seed of `random`.

    Attributes:
        now: seconds since the start.
        random: the only source of randomness.
        draw: `random.random`.
        tasks: the tasks that have not ended, in order.
        ready: the tasks that can run.
        current: the running task; None outside of tasks.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.draw = self.random.random
        self.tasks: dict[Task, None] = {}
        self.ready: list[Task] = []
        self.current: Task | None = None
        self.home = getcurrent()
        # A heap: time, number, function to call, or task to wake and its `waits` when it began to wait.
        self._timers: list[tuple[float, int, Callable[[], object] | None, Task | None, int]] = []
        self._num_timers = 0
        self._failure: BaseException | None = None
        self._starting: Task | None = None  # its greenlet has not started yet

    # ---- the runtime ----

    def random_bytes(self, count: int) -> bytes:
        """Return random bytes of the seed."""
        return self.random.randbytes(count)

    def lock(self) -> VirtualLock:
        """Return a lock, which its holder may take again."""
        return VirtualLock(self)

    rlock = lock

    def condition(self, lock: VirtualLock) -> VirtualCondition:
        """Return a condition."""
        return VirtualCondition(self, lock)

    def event(self) -> VirtualEvent:
        """Return a flag."""
        return VirtualEvent(self)

    def start_worker(self, name: str, run: Callable[[], None], *_: object) -> Task:
        """Start a task in place of a thread."""
        return self.start(name, run)

    # ---- tasks ----

    def start(self, name: str, run: Callable[[], Any]) -> Task:
        """Start a task. An exception in it ends the run."""

        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 (raised by `run`)
                self._failure = error
            del self.tasks[task]

        task = Task(self, name, guarded)
        self.tasks[task] = None
        self.ready.append(task)
        return task

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function after some seconds. It must not wait or take a lock; an exception in it ends the run."""
        self._num_timers = number = self._num_timers + 1
        heappush(self._timers, (self.now + seconds, number, call, None, 0))

    def run(self) -> None:
        """Run tasks until none is left.

        Raises:
            StuckError: all tasks wait for each other.
        """
        while (task := self._starting or self._next()) is not None:
            self.current, self._starting = task, None
            task.greenlet.switch()  # returns when a task ends or must be started, or when no task can run
            self.current = None
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
        if self.tasks:
            raise StuckError(f"all tasks wait for each other: {', '.join(task.name for task in self.tasks)}")

    def sleep(self, seconds: float) -> None:
        """Let the current task sleep."""
        self.park(seconds)

    def give_way(self, task: Task) -> None:
        """Let other ready tasks run before the current one continues."""
        self.ready.append(task)
        self._leave(task)

    def park(self, timeout: float | None = None) -> bool:
        """Let the current task wait until it is woken. Returns False on timeout."""
        task = self.current
        if task is None:
            raise StuckError("only a task can wait")
        task.waits = waits = task.waits + 1
        task.was_woken = False
        if timeout is not None and timeout < inf:
            self._num_timers = number = self._num_timers + 1
            at = self.now + timeout if timeout > 0.0 else self.now
            heappush(self._timers, (at, number, None, task, waits))
        self._leave(task)
        return task.was_woken

    def wake(self, task: Task) -> None:
        """Make a parked task ready."""
        task.waits += 1
        task.was_woken = True
        self.ready.append(task)

    def _leave(self, task: Task) -> None:
        """Run other tasks until it is this task's turn."""
        try:
            following = self._next()
        except BaseException as error:  # noqa: BLE001 (raised by `run`)
            self._failure, following = error, None
        self.current = following
        if following is task:
            return
        if following is not None and following.greenlet:
            following.greenlet.switch()
            return
        self._starting = following  # `run` starts it: started here, it would nest in this task's stack
        self.home.switch()

    def _next(self) -> Task | None:
        """Draw the next task, advancing time if none is ready. Returns None if all wait for each other."""
        ready, timers = self.ready, self._timers
        while not ready:
            if not timers:
                return None
            at, _, call, task, waits = heappop(timers)
            if call is not None:
                self.now, self.current = at, None
                call()
            elif task is not None and task.waits == waits:
                self.now = at
                task.waits += 1
                return task
        if (count := len(ready)) > 1:
            place = int(self.draw() * count)
            ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()


class EngineRuntime(Runtime):
    """The loop's runtime with one engine's own clock, which starts at a random time and can jump.

    Args:
        loop: does everything else.

    Attributes:
        ahead: seconds by which the clock has jumped ahead.
    """

    def __init__(self, loop: Loop) -> None:
        self.ahead = 0.0
        self._loop = loop
        self._start = loop.random.uniform(1e3, 1e6)
        for name in _OF_LOOP:
            setattr(self, name, getattr(loop, name))

    def monotonic(self) -> float:
        """Return the engine's time."""
        return self._start + self._loop.now + self.ahead


class VirtualLock:
    """A reentrant lock. Another task may run before each acquisition."""

    __slots__ = ("_depth", "_holder", "_loop", "_waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._holder: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:  # noqa: FBT001, FBT002, ARG002 (as `threading.Lock`)
        """Take the lock; wait for it if `blocking`."""
        loop = self._loop
        task = loop.current
        if task is None or self._holder is task:
            self._depth += 1  # outside of the loop nothing else runs
            self._holder = task
            return True
        if loop.ready and loop.draw() < _ASIDE:
            loop.give_way(task)
        while self._holder is not None:
            if not blocking:
                return False
            self._waiting.append(task)
            loop.park()
        self._holder, self._depth = task, 1
        return True

    def release(self, *_: object) -> None:
        """Release the lock."""
        self._depth -= 1
        if not self._depth:
            self._holder = None
            if self._waiting:
                self._loop.wake(self._waiting.pop(int(self._loop.draw() * len(self._waiting))))

    def give_up(self) -> int:
        """Release the lock completely. Returns how often it was taken."""
        depth, self._depth, self._holder = self._depth, 0, None
        if self._waiting:
            self._loop.wake(self._waiting.pop(int(self._loop.draw() * len(self._waiting))))
        return depth

    def take_back(self, depth: int) -> None:
        """Take the lock as often as before `give_up`."""
        self.acquire()
        self._depth = depth

    __enter__, __exit__ = acquire, release


class VirtualCondition:
    """A condition over a lock."""

    __slots__ = ("_lock", "_loop", "_waiting")

    def __init__(self, loop: Loop, lock: VirtualLock) -> None:
        self._loop, self._lock = loop, lock
        self._waiting: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait to be notified, and take the lock again. Returns False on timeout."""
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
        """Wait until a condition is met, or until the timeout. Returns the last result of `is_met`."""
        until = inf if timeout is None else self._loop.now + timeout
        found = is_met()
        while not found and self._loop.now < until:
            self.wait(until - self._loop.now)
            found = is_met()
        return found

    def notify(self, n: int = 1) -> None:
        """Wake up to `n` tasks."""
        waiting = self._waiting
        while n > 0 and waiting:
            self._loop.wake(waiting.pop(0))
            n -= 1

    def notify_all(self) -> None:
        """Wake all waiting tasks."""
        while self._waiting:
            self._loop.wake(self._waiting.pop(0))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class VirtualEvent:
    """A flag to wait for."""

    __slots__ = ("_is_set", "_loop", "_waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake all waiting tasks."""
        self._is_set = True
        while self._waiting:
            self._loop.wake(self._waiting.pop(0))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set. Returns False on timeout."""
        task = self._loop.current
        if not self._is_set and task is not None:
            self._waiting.append(task)
            if not self._loop.park(timeout):
                self._waiting.remove(task)
        return self._is_set
