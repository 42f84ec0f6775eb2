"""Programs over engine adapters in which one call is interrupted: at every place, or at a sample of places."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest
from interrupts import Interrupt, sweep

ERRORS = [KeyboardInterrupt, MemoryError]
PATIENCE = 300.0
T = TypeVar("T")


def every(*many: object) -> list[object]:
    """Return the sampled number of places, or all of them in the slow run."""
    return [*many, pytest.param(1 << 30, marks=pytest.mark.slow)]


def swept(files: tuple[str, ...], run: Callable[[Interrupt], None], error: type[BaseException], most: int) -> int:
    """Sweep a program; return how many places it has."""
    places, raised = sweep(files, run, error, most=most, seed=len(files[0]))
    assert raised > min(places, most) // 2
    return places


class Caller:
    """Makes calls, one of which is interrupted, and repeats the interrupted call."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt

    def attempt(self, function: Callable[..., T], *arguments: object) -> tuple[bool, T | None]:
        """Make a call; return whether it ended, and its result."""
        try:
            with self.interrupt.armed():
                return True, function(*arguments)
        except (KeyboardInterrupt, MemoryError):
            if not self.interrupt.where:
                raise
        return False, None

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        ended, found = self.attempt(function, *arguments)
        return found if ended else function(*arguments)  # type: ignore[return-value]


def settled(check: Callable[[], object], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < until, what
        time.sleep(0.001)
