"""A thread of its own between the engine's thread and a prefix store: no call of the engine's thread enters the store.

A store that blocks where it should not, or copies large blocks when they are handed over, delays this thread alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from blockyard._core import StoreJob
from blockyard.engine.transfers import Transfer
from blockyard.executor.store_side import Answer, Batch, StoreSide
from blockyard.stores.base import Owners
from blockyard.workers import Process, start_worker

__all__ = ["StoreTask", "StoreWorker", "StoreWrite"]

_POLL_SECONDS: Final = 0.0005
PROBED: Final = 4
"""Blocks that are read on trial where the store does not know yet whether it has them."""


@dataclass(slots=True, eq=False)
class StoreTask:
    """A batch for the store. Its results are of no use before it has `ended`.

    Attributes:
        keys: uint8 `[n, 32]`.
        rows: of a put, the blocks; None for a get.
        owners: of a put, whose the blocks are.
        take: of a get, gives so many rows for the blocks, in the worker's thread.
        taken: what it gave. They are the store's until the task has ended.
        answer: of a get: entries for its first blocks, as many as were asked for. Of a put: an entry for each block,
            also for those that the store had.
        ended: the store has answered.
        begun: the worker's thread has it.
    """

    keys: NDArray[np.uint8]
    rows: NDArray[np.uint8] | None = None
    owners: Owners | None = None
    take: Callable[[int], Tensor] | None = None
    taken: Tensor | None = None
    answer: Answer | None = None
    ended: bool = False
    begun: bool = False
    batch: Batch | None = None
    is_new: NDArray[np.bool_] | None = None


@dataclass(slots=True, eq=False)
class StoreWrite:
    """Blocks on their way to the store: read by the engine as `job`, then given to the store as `task`."""

    job: StoreJob
    transfer: Transfer
    num_bytes: int
    task: StoreTask | None = None


class StoreWorker:
    """Hands tasks to a store, and notes what has become of them.

    Args:
        side: the store; only the worker's thread calls it.
        notify: called in that thread when tasks have ended.
    """

    def __init__(self, side: StoreSide, notify: Callable[[], None]) -> None:
        self._side = side
        self._notify = notify
        self._process = Process("a prefix store")
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tasks: deque[StoreTask] = deque()
        self._under_way: list[StoreTask] = []  # of the worker's thread
        self._is_closed = False
        self._is_torn = False  # an exception has ended a turn of the worker's thread
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        return start_worker("blockyard-prefix-store", self._run, self._stop)

    def submit(self, task: StoreTask) -> None:
        """Take a task in; never waits for the store. Does nothing for one that it has."""
        self._process.check()
        with self._lock:
            if task.begun or task.ended:
                return
            if self._is_closed:
                self._end(task, self._miss(task, "closed"))
                return
            self._tasks.append(task)
            self._changed.notify()
            if not self._thread.is_alive():  # want of memory ended it as it began
                self._thread = self._start()

    def close(self, timeout: float) -> bool:
        """End the thread. False if the store holds it up, and it was left behind."""
        self._stop()
        if self._process.is_current:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        with self._lock:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            try:
                if self._is_torn:
                    # How far these came is not known. Others have their batches, or have not begun.
                    self._give_up("error", [task for task in self._under_way if task.begun and task.batch is None])
                    self._is_torn = False
                elif not self._turn():
                    with self._lock:
                        left = [*self._under_way, *self._tasks]
                    self._give_up("closed", left)
                    return
            except Exception:  # noqa: BLE001, PERF203 (want of memory, say: it goes on)
                self._is_torn = True

    def _turn(self) -> bool:
        """Wait for tasks, begin them, and take in what has ended. Returns False once the worker is to end."""
        with self._lock:
            while not (self._tasks or self._under_way or self._side.is_busy or self._is_closed):
                self._changed.wait()
            if not self._tasks and not self._is_closed:
                self._changed.wait(_POLL_SECONDS)
            if self._is_closed:
                return False
            self._under_way += self._tasks
            self._tasks.clear()
        for task in self._under_way:
            self._begin(task)
        self._side.poll()
        for task in self._under_way:
            self._take_in(task)
        under_way = [task for task in self._under_way if not task.ended]
        if len(under_way) < len(self._under_way):
            self._notify()
        self._under_way = under_way
        return True

    def _give_up(self, why: str, tasks: list[StoreTask]) -> None:
        """End tasks as misses."""
        for task in tasks:
            if not task.ended:
                self._end(task, self._miss(task, why))
        self._notify()

    def _begin(self, task: StoreTask) -> None:
        if task.begun:  # it was handed over twice
            return
        task.begun = True
        try:
            found = self._side.contains(task.keys)
            if task.rows is not None:
                task.is_new = ~found
                if found.all():
                    self._end(task, Answer(found, task.rows[:0]))
                    return
                rows = task.rows if not found.any() else task.rows[task.is_new]
                owners = None if task.owners is None else Owners(*(of[task.is_new] for of in task.owners))
                task.batch = self._side.put(task.keys[task.is_new], rows, owners)
                return
            assert task.take is not None  # noqa: S101 (for the type checker)
            count = len(found) if found.all() else int(found.argmin())
            count = count or min(PROBED, len(found))
            task.taken = task.take(count)
            task.batch = self._side.get(np.ascontiguousarray(task.keys[:count]), task.taken[:count].numpy())
        except Exception:  # noqa: BLE001 (the store side has logged what the store did)
            self._end(task, self._miss(task, "error"))

    def _take_in(self, task: StoreTask) -> None:
        answer = task.batch.answer if task.batch is not None else None
        if answer is None or task.ended:
            return
        if task.is_new is not None:
            ok = ~task.is_new
            ok[task.is_new] = answer.ok
            answer = Answer(ok, answer.rows, answer.error, answer.reasons)
        self._end(task, answer)

    @staticmethod
    def _end(task: StoreTask, answer: Answer) -> None:
        task.rows = None
        task.answer = answer
        task.ended = True  # last: the other thread reads the rest once this is set

    @staticmethod
    def _miss(task: StoreTask, reason: str) -> Answer:
        count = len(task.keys)
        return Answer(np.zeros(count, np.bool_), np.zeros((0, 0), np.uint8), reasons=(reason,) * count)
