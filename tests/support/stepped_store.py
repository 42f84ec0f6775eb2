"""Processes that share a prefix store, one block operation at a time, in random order. Each may crash anywhere."""

import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Crash(BaseException):
    """The process ends here."""


class Actor:
    """A process: its thread runs only when `Processes` lets it, from one block operation to the next."""

    def __init__(self, work: Callable[["Actor"], None]) -> None:
        self.turn, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = self.crashes = False
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[["Actor"], None]) -> None:
        self.turn.acquire()
        try:
            work(self)
        finally:
            self.ended = True
            self.done.release()

    def step(self) -> None:
        """Let others run before the next block operation."""
        self.done.release()
        self.turn.acquire()
        if self.crashes:
            self.crashes = False
            raise Crash

    def go(self) -> None:
        self.turn.release()
        self.done.acquire()


class SteppedStore:
    """One process's view of the blocks in `medium`: a put keeps the block that is there, or replaces it."""

    def __init__(self, medium: dict[bytes, NDArray[np.uint8]], rng: random.Random, *, replaces: bool) -> None:
        self.medium, self.rng, self.replaces = medium, rng, replaces
        self.step: Callable[[], None] = lambda: None

    def _each(self, count: int) -> list[int]:
        """Return a batch's blocks in the order in which they are processed."""
        return self.rng.sample(range(count), count)

    def submit_put(self, names: Sequence[bytes], rows: NDArray[np.uint8]) -> Any:
        for place in self._each(len(names)):
            self.step()
            if self.replaces or names[place] not in self.medium:
                self.medium[names[place]] = rows[place].copy()
        return SimpleNamespace(ok=np.ones(len(names), np.bool_), rows=None, reasons=("",) * len(names))

    def submit_delete(self, names: Sequence[bytes]) -> Any:
        for place in self._each(len(names)):
            self.step()
            self.medium.pop(names[place], None)
        return SimpleNamespace(ok=np.ones(len(names), np.bool_), rows=None, reasons=("",) * len(names))

    def submit_get(self, names: Sequence[bytes], rows: NDArray[np.uint8]) -> Any:
        found: dict[int, Any] = {}
        for place in self._each(len(names)):
            self.step()
            found[place] = self.medium.get(names[place])
        for place, row in found.items():
            rows[place] = 0 if row is None else row
        ok = np.array([found[place] is not None for place in range(len(names))])
        return SimpleNamespace(ok=ok, rows=rows, reasons=tuple("" if good else "absent" for good in ok))

    def contains(self, names: Sequence[bytes]) -> NDArray[np.bool_]:
        self.step()
        return np.array([name in self.medium for name in names])

    def wait(self, ticket: Any) -> Any:
        return ticket
