"""`Link`: the network between one engine and the server, with faults.

A request takes one or more steps at the server; other requests may run between two steps. It arrives after a delay, and
so does the answer. Either can be lost. The caller then waits for its time limit, but the server may still carry out the
request, even after the caller has given up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf, log
from typing import Any, Final, TypeVar

from blockyard.stores.threaded.epochs import EPOCH_BYTES
from blockyard.stores.threaded.remote import RemoteStore
from blockyard.stores.value import HEADER
from blockyard.tools.sim.loop import Loop, VirtualEvent

__all__ = ["DEADLINE", "Link", "SentRequest", "Server", "SilentError", "is_record", "key_in"]

DEADLINE: Final = 3.0  # the stores' timeout for a batch, in seconds

T = TypeVar("T")
_RECORD_BYTES: Final = HEADER + EPOCH_BYTES  # size of the epoch's record
_USUAL_SECONDS: Final = 0.002
_ASIDE: Final = 0.25  # probability that other requests may run between two steps


class Server(ABC):
    """A modelled server, and its faults.

    Args:
        loop: provides time and randomness.
        watch_deletion: called with each intact value that is about to be deleted; see `Spoiled`.

    Attributes:
        loop: as given.
        slowness: factor of all delays.
        is_full: whether it refuses writes.
        caller: the link whose request is being served, and when that request was sent.
    """

    is_full: bool

    def __init__(self, loop: Loop, watch_deletion: Callable[[bytes, float], None]) -> None:
        self.loop = loop
        self.slowness = 1.0
        self.caller: tuple[Link, float] | None = None
        self._spoiled = Spoiled(loop, watch_deletion)

    @abstractmethod
    def connect(self) -> Link:
        """Return a link for one engine."""

    @abstractmethod
    def lose(self, share: float) -> None:
        """Lose that share of the stored data."""

    @abstractmethod
    def _values(self) -> list[tuple[Any, bytes]]:
        """Return the places of all values, and the values."""

    @abstractmethod
    def _replace(self, place: Any, value: bytes | None) -> None:
        """Store another value at a place; None for none."""

    def record(self) -> bytes | None:
        """Return the epoch's record, even if it is damaged."""
        return next((value for _, value in self._values() if is_record(value)), None)

    def lose_record(self) -> None:
        """Lose the epoch's record."""
        for place, value in self._values():
            if is_record(value):
                self._replace(place, None)

    def damage(self) -> None:
        """Change a byte of a value."""
        if found := self._any():
            place, value = found[0], bytearray(found[1])
            value[self.loop.random.randrange(len(value))] ^= 1 << self.loop.random.randrange(8)
            self._replace(place, self._spoiled.add(bytes(value)))

    def tear(self) -> None:
        """Cut a value short."""
        if found := self._any():
            self._replace(found[0], self._spoiled.add(found[1][: self.loop.random.randrange(HEADER)]))

    def _any(self) -> tuple[Any, bytes] | None:
        """Draw a value that is not torn, with its place, often the record; None if there is none."""
        values = [(place, value) for place, value in self._values() if len(value) > HEADER]
        records = [(place, value) for place, value in values if is_record(value)]
        if not values:
            return None
        return self.loop.random.choice(records if records and self.loop.random.random() < 0.25 else values)


def is_record(value: object) -> bool:
    """Return whether a value is the epoch's record."""
    return isinstance(value, bytes) and len(value) == _RECORD_BYTES


def key_in(value: bytes | memoryview) -> bytes:
    """Return the key in a value's header; see `blockyard.stores.value`."""
    return bytes(value[64:96])


class Spoiled:
    """The values that a server holds damaged, and the deletions of others: only damage, or an engine, deletes.

    Args:
        loop: provides the time.
        watch: called with each intact value that a request deletes, and when its name last had a damaged one that the
            server has sent.
    """

    def __init__(self, loop: Loop, watch: Callable[[bytes, float], None]) -> None:
        self._loop, self._watch = loop, watch
        self._values: set[bytes] = set()
        self._sent_at: dict[str | bytes, float] = {}

    def add(self, value: bytes) -> bytes:
        """Record that a value is damaged where it lies. Returns it."""
        self._values.add(value)
        return value

    def send(self, name: str | bytes, value: bytes) -> None:
        """Record that the server sends the value of a name."""
        if value in self._values:
            self._sent_at[name] = self._loop.now

    def delete(self, name: str | bytes, value: bytes) -> None:
        """Record that a request deletes the value of a name."""
        if value not in self._values:
            self._watch(value, self._sent_at.get(name, -inf))


class SilentError(Exception):
    """A step's part of the server does not answer."""


@dataclass(eq=False)
class SentRequest:
    """A request under way."""

    steps: tuple[Callable[[], Any], ...]
    sent_at: float
    ended: VirtualEvent
    answers: list[Any] = field(default_factory=list)
    error: Exception | None = None


class Link(ABC):
    """Carries requests and their answers.

    Args:
        server: the server.
        time_limit: seconds after which a caller gives up.
        error: exception to raise then.

    Attributes:
        is_cut: whether everything is lost, in both directions.
        is_dead: the engine was killed: it sends nothing more, but requests already sent still arrive.
        slowness: factor of this link's delays.
        loss: share of requests and answers that are lost.
        repeats: share of requests that are sent twice.
        straggling: share of requests and answers that take seconds.
        is_mute: whether all answers are lost.
        garbling: share of values that change on their way to the engine.
        pages: share of requests that a gateway answers in the server's place; only between an engine and objects.
        given_up: keys of blocks whose put the caller has given up: the request may still arrive.
    """

    def __init__(self, server: Server, time_limit: float, error: type[Exception]) -> None:
        self._server, self._time_limit, self._error = server, time_limit, error
        self.is_cut = self.is_dead = False
        self.is_mute = False
        self.slowness, self.loss, self.repeats = 1.0, 0.0, 0.0
        self.straggling, self.garbling, self.pages = 0.0, 0.0, 0.0
        self.given_up: set[bytes] = set()

    @abstractmethod
    def open(self, revision: str, bytes_per_block: int) -> RemoteStore:
        """Open a prefix store on the server; `revision` as for `open_store`."""

    def call(self, *steps: Callable[[], T]) -> list[T]:
        """Run steps on the server, and return their answers. Errors of the link's class are raised here."""
        return self.receive(self.send(steps), self._time_limit)

    def send(self, steps: tuple[Callable[[], T], ...]) -> SentRequest:
        """Send a request."""
        loop = self._server.loop
        if self.is_dead:
            raise self._error("connection refused")
        request = SentRequest(steps, loop.now, loop.event())
        for _ in range(1 + (loop.draw() < self.repeats)):
            loop.call_later(self._delay(), partial(self._arrive, request))
        return request

    def receive(self, request: SentRequest, seconds: float) -> list[Any]:
        """Wait for a request's answers."""
        if not request.ended.wait(seconds):
            raise self._error("the request timed out")
        if request.error is not None:
            raise request.error
        return request.answers

    def heal(self) -> None:
        """End all faults of this link."""
        self.is_cut = self.is_mute = False
        self.slowness, self.loss, self.repeats = 1.0, 0.0, 0.0
        self.straggling, self.garbling, self.pages = 0.0, 0.0, 0.0

    def carried(self, value: bytes) -> bytes:
        """Return a value as it arrives at the engine: perhaps with another byte."""
        if not self.garbling or len(value) <= HEADER:
            return value
        chance = self._server.loop.random
        if chance.random() >= self.garbling:
            return value
        changed = bytearray(value)
        changed[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        return bytes(changed)

    def _arrive(self, request: SentRequest) -> None:
        if not self._is_lost() and not request.ended.is_set():  # clients do not repeat an answered request
            self._serve(request, [])

    def _serve(self, request: SentRequest, answers: list[Any]) -> None:
        """Run the remaining steps, and send the answer."""
        server, steps, error = self._server, request.steps, None
        server.caller = (self, request.sent_at)
        try:
            answers.append(steps[len(answers)]())
            while len(answers) < len(steps):
                if self.is_dead and server.loop.random.random() < 0.5:
                    return  # the rest was not sent
                if server.loop.draw() < _ASIDE:
                    server.loop.call_later(self._delay(), partial(self._serve, request, answers))
                    return
                answers.append(steps[len(answers)]())
        except SilentError:
            return
        except (FileNotFoundError, self._error) as raised:
            error = raised
        server.loop.call_later(self._delay(), partial(self._answer, request, answers, error))

    def _answer(self, request: SentRequest, answers: list[Any], error: Exception | None) -> None:
        if not self.is_mute and not self._is_lost() and not request.ended.is_set():
            request.answers, request.error = answers, error
            request.ended.set()

    def _delay(self) -> float:
        server, late = self._server, 0.0
        if self.straggling and server.loop.draw() < self.straggling:
            late = server.loop.random.uniform(0.0, DEADLINE)
        return late - log(1.0 - server.loop.draw()) * _USUAL_SECONDS * self.slowness * server.slowness

    def _is_lost(self) -> bool:
        return self.is_cut or (self.loss > 0 and self._server.loop.random.random() < self.loss)
