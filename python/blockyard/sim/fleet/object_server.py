"""A model of an object store and of the network before it, with faults.

It has the functions of obstore that `ObjectStore` calls. An operation happens at the server in one instant, after the
request's delay; the answer has its own delay. Both can be lost: the caller then waits for its time limit, and the
operation may have happened all the same, also after the caller has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from blockyard.sim.loop import Event, Loop

__all__ = ["Link", "ObjectServer"]

T = TypeVar("T")
_USUAL_SECONDS: Final = 0.002
_TIME_LIMIT: Final = 1.0


class _ServerError(Exception):
    """The server refuses, or does not answer in time."""


class _AlreadyExistsError(_ServerError):
    """There is an object under this path."""


class _PreconditionError(_ServerError):
    """The object has changed."""


_exceptions: Final = SimpleNamespace(
    AlreadyExistsError=_AlreadyExistsError, PreconditionError=_PreconditionError, NotSupportedError=NotImplementedError
)


@dataclass
class _Object:
    value: bytes
    tag: str

    @property
    def meta(self) -> dict[str, Any]:
        return {"size": len(self.value), "e_tag": self.tag, "version": None}

    @property
    def range(self) -> tuple[int, int]:
        return 0, len(self.value)

    def bytes(self) -> bytes:
        return self.value


class ObjectServer:
    """The objects, and what goes wrong with them.

    Attributes:
        objects: by path.
        is_full: it refuses to store.
        slowness: factor of all delays.
        num_changes: of the objects.

    Args:
        loop: gives time and chance.
        watch: is called with each value that is about to be stored.
    """

    def __init__(self, loop: Loop, watch: Callable[[bytes], None]) -> None:
        self.loop = loop
        self._watch = watch
        self.objects: dict[str, _Object] = {}
        self.is_full = False
        self.slowness = 1.0
        self.num_changes = 0

    def put(self, path: str, value: bytes, mode: Any) -> None:
        """Store an object, if the mode's condition holds."""
        there = self.objects.get(path)
        if mode == "create" and there is not None:
            raise _AlreadyExistsError(path)
        if isinstance(mode, dict) and (there is None or there.tag != mode.get("e_tag")):
            raise _PreconditionError(path)
        if self.is_full:
            raise _ServerError("503 Slow Down")
        self._watch(value)
        self.num_changes += 1
        self.objects[path] = _Object(value, f"tag-{self.num_changes}")

    def get(self, path: str) -> _Object:
        """Return an object."""
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def delete(self, paths: list[str]) -> None:
        """Delete objects; those that are absent are deleted already."""
        for path in paths:
            self.objects.pop(path, None)

    def lose(self, share: float) -> None:
        """Lose objects, as with a node."""
        for path in [path for path in self.objects if self.loop.random.random() < share]:
            del self.objects[path]

    def damage(self) -> None:
        """Change a byte of an object."""
        if not self.objects:
            return
        paths = list(self.objects)
        path = (
            paths[0] if self.loop.random.random() < 0.25 else self.loop.random.choice(paths)
        )  # the record is the first
        value = bytearray(self.objects[path].value)
        value[self.loop.random.randrange(len(value))] ^= 1 << self.loop.random.randrange(8)
        self.objects[path] = _Object(bytes(value), self.objects[path].tag)


class Link:
    """The way from one engine to the server, in place of the module obstore.

    Attributes:
        is_cut: nothing arrives, either way.
        is_dead: the engine was killed: it sends no more, but what it has sent still arrives.
        slowness: factor of this link's delays.
        loss: share of requests and answers that are lost.
        repeats: share of requests that are sent twice.
    """

    exceptions = _exceptions

    def __init__(self, server: ObjectServer) -> None:
        self.server = server
        self.is_cut = self.is_dead = False
        self.slowness, self.loss, self.repeats = 1.0, 0.0, 0.0

    def get(self, _client: object, path: str) -> _Object:
        """Return an object."""
        return self._call(lambda: self.server.get(path))

    def head(self, _client: object, path: str) -> dict[str, Any]:
        """Return what is known of an object."""
        return self._call(lambda: self.server.get(path).meta)

    def put(self, _client: object, path: str, value: memoryview, *, mode: Any = "overwrite", **_: Any) -> None:
        """Store an object."""
        copied = bytes(value)
        self._call(lambda: self.server.put(path, copied, mode))

    def delete(self, _client: object, paths: str | list[str]) -> None:
        """Delete objects."""
        self._call(lambda: self.server.delete([paths] if isinstance(paths, str) else list(paths)))

    def _call(self, act: Callable[[], T]) -> T:
        loop = self.server.loop
        if self.is_dead:
            raise _ServerError("connection refused")
        ended, outcome = loop.event(), list[tuple[Any, Exception | None]]()
        arrivals = 1 + (loop.random.random() < self.repeats)
        for _ in range(arrivals):
            loop.call_later(self._delay(), lambda: self._arrive(act, ended, outcome))
        if not ended.wait(_TIME_LIMIT):
            raise _ServerError("the request timed out")
        result, error = outcome[0]
        if error is not None:
            raise error
        found: T = result
        return found

    def _arrive(self, act: Callable[[], Any], ended: Event, outcome: list[Any]) -> None:
        """Carry out a request, and send the answer."""
        if self._is_lost() or ended.is_set():  # nobody repeats a request that was answered
            return
        try:
            answer: tuple[Any, Exception | None] = (act(), None)
        except (FileNotFoundError, _ServerError) as error:
            answer = (None, error)

        def land() -> None:
            if not self._is_lost():
                outcome.append(answer)
                ended.set()

        self.server.loop.call_later(self._delay(), land)

    def _delay(self) -> float:
        return -log(1.0 - self.server.loop.draw()) * _USUAL_SECONDS * self.slowness * self.server.slowness

    def _is_lost(self) -> bool:
        return self.is_cut or (self.loss > 0 and self.server.loop.random.random() < self.loss)
