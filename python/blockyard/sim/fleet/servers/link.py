"""`Link`: the network between one engine and the server, with faults.

A request happens at the server in one instant, after its delay; the answer has its own delay. Both can be
lost: the caller then waits for its time limit, and the request may have been carried out all the same, also after the
caller has given up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import log
from typing import Any, Final, Protocol, TypeVar

from blockyard.sim.loop import Event, Loop
from blockyard.stores.remote import RemoteStore

__all__ = ["DEADLINE", "Link", "Server"]

DEADLINE: Final = 3.0  # seconds that the stores give a batch

T = TypeVar("T")
_USUAL_SECONDS: Final = 0.002


class Server(Protocol):
    """A modelled server, and what goes wrong with it.

    Attributes:
        loop: gives time and chance.
        slowness: factor of all delays.
        is_full: it refuses to store.
        caller: whose request it serves, and when that was sent.
    """

    caller: tuple[Link, float] | None
    loop: Loop
    slowness: float
    is_full: bool

    def connect(self) -> Link:
        """Return the way there from one engine."""

    def record(self) -> bytes | None:
        """Return the epoch's record, damaged or not."""

    def lose(self, share: float) -> None:
        """Lose that share of what is stored."""

    def lose_record(self) -> None:
        """Lose the epoch's record."""

    def damage(self) -> None:
        """Change a byte of a stored value."""

    def tear(self) -> None:
        """Cut a stored value short."""


class Link(ABC):
    """Carries requests, and their answers back.

    Args:
        server: at the other end.
        time_limit: seconds after which a caller gives up.
        error: what is raised then.

    Attributes:
        is_cut: nothing arrives, either way.
        is_dead: the engine was killed: it sends no more, but what it has sent still arrives.
        slowness: factor of this link's delays.
        loss: share of requests and answers that are lost.
        repeats: share of requests that are sent twice.
    """

    def __init__(self, server: Server, time_limit: float, error: type[Exception]) -> None:
        self._server, self._time_limit, self._error = server, time_limit, error
        self.is_cut = self.is_dead = False
        self.slowness, self.loss, self.repeats = 1.0, 0.0, 0.0

    @abstractmethod
    def open(self, revision: str, bytes_per_block: int) -> RemoteStore:
        """Open a prefix store at the other end; `revision` as for `open_store`."""

    def call(self, act: Callable[[], T]) -> T:
        """Let the server act, and return its answer. What `act` raises of the error's class is an answer, too."""
        loop = self._server.loop
        if self.is_dead:
            raise self._error("connection refused")
        sent_at = loop.now

        def serve() -> T:
            self._server.caller = (self, sent_at)
            return act()

        ended = loop.event()
        outcome: list[tuple[Any, Exception | None]] = []  # not of a generic alias, which takes 2 us to call
        for _ in range(1 + (loop.draw() < self.repeats)):
            loop.call_later(self._delay(), lambda: self._arrive(serve, ended, outcome))
        if not ended.wait(self._time_limit):
            raise self._error("the request timed out")
        result, error = outcome[0]
        if error is not None:
            raise error
        found: T = result
        return found

    def heal(self) -> None:
        """End what is wrong with it."""
        self.is_cut, self.slowness, self.loss, self.repeats = False, 1.0, 0.0, 0.0

    def _arrive(self, act: Callable[[], Any], ended: Event, outcome: list[Any]) -> None:
        """Carry out a request, and send the answer."""
        if self._is_lost() or ended.is_set():  # nobody repeats a request that was answered
            return
        try:
            answer: tuple[Any, Exception | None] = (act(), None)
        except (FileNotFoundError, self._error) as error:
            answer = (None, error)

        def land() -> None:
            if not self._is_lost():
                outcome.append(answer)
                ended.set()

        self._server.loop.call_later(self._delay(), land)

    def _delay(self) -> float:
        return -log(1.0 - self._server.loop.draw()) * _USUAL_SECONDS * self.slowness * self._server.slowness

    def _is_lost(self) -> bool:
        return self.is_cut or (self.loss > 0 and self._server.loop.random.random() < self.loss)
