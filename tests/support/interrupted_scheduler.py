"""A scheduler whose calls raise at any call, sometimes twice in a row, and are made again, for its machine."""

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from interrupts import CountedInterrupt

import blockyard.scheduler
from blockyard import Pairs
from blockyard._core import HashedPrompt
from blockyard.errors import BlockyardError
from blockyard.scheduler import Finished, Request, Scheduler, Step
from blockyard.scheduler.request import Fetch
from blockyard.testing import Config

CALM_CALLS = 12
"""Calls without an interrupt after each. Else the requests could start again, and load their prompts, in every step."""
FILES = tuple(str(path) for path in Path(blockyard.scheduler.__file__).parent.glob("*.py"))
T = TypeVar("T")


class StoreClientError(Exception):
    """What a fetch raises."""


class Interrupted:
    """A scheduler whose calls raise now and then, at any place, and are made again.

    Its fetches raise, too, and a signal comes wherever the interpreter looks for one.
    """

    def __init__(self, config: Config, make: Callable[..., Scheduler], **options: object) -> None:
        self.random = random.Random(str(config))
        self.calls = self.calm_until = self.looks = 0
        self.scheduler = make(prefetch=self.prefetch, **options)

    def prefetch(self, _prompt: HashedPrompt) -> Fetch:
        self.fail()
        return Fetched(self)

    def fail(self) -> None:
        if self.random.random() < 0.1:
            raise StoreClientError

    def again(self, call: Callable[[], T]) -> T:
        self.calls += 1
        is_calm = self.calls < self.calm_until or self.random.random() < 0.9
        place = sys.maxsize if is_calm else self.random.randrange(500)
        interrupt = CountedInterrupt(place, FILES, again=self.random.choice((0, 1, 5, 25, 100)))
        while True:
            try:
                with nullcontext() if is_calm else interrupt.armed():
                    return call()
            except KeyboardInterrupt:  # noqa: PERF203 (twice at most)
                self.calm_until = self.calls + CALM_CALLS
            except StoreClientError:
                is_calm = True
            except BlockyardError:
                raise
            except (LookupError, TypeError, ValueError) as error:
                raise AssertionError(f"an exception has left a broken state: {error!r}") from error

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    def add(self, request: Request) -> None:
        self.again(lambda: self.scheduler.add(request))

    def abort(self, request_id: str) -> None:
        self.again(lambda: self.scheduler.abort(request_id))

    def schedule(self) -> Step:
        return self.again(self.scheduler.schedule)

    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> list[str]:
        return self.again(lambda: self.scheduler.complete(ticket, lost))

    def update(self, step: Step, sampled: Sequence[int]) -> list[Finished]:
        return self.again(lambda: self.scheduler.update(step, sampled))


class Fetched:
    """What loads a prompt. Any look may raise, and every third one finds that it is not done.

    So no step in which nothing is done follows another, even if each step brings a new request.
    """

    def __init__(self, owner: Interrupted) -> None:
        self.owner = owner

    @property
    def done(self) -> bool:
        self.owner.fail()
        self.owner.looks += 1
        return self.owner.looks % 3 != 0
