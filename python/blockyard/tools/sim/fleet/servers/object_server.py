"""A model of an object store, with the functions of obstore that `ObjectStore` calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from blockyard.stores.object_store import ObjectStore, read_url
from blockyard.tools.sim.fleet.servers.link import DEADLINE, Link, Server, key_in
from blockyard.tools.sim.loop import Loop

__all__ = ["CAPACITY", "ObjectLink", "ObjectServer"]

CAPACITY: Final = 32  # blocks
_TIME_LIMITS: Final = (1.0, DEADLINE)  # a put whose batch has ended runs on with the longer one, which obstore gets


class _ServerError(Exception):
    """The server refuses, or does not answer in time."""


class _AlreadyExistsError(_ServerError):
    """The path already has an object."""


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


_PAGE: Final = _Object(b"<html><body>The service is being maintained.</body></html>", "page")


class ObjectServer(Server):
    """The objects, and the server's faults.

    Attributes:
        objects: objects by path.
        num_changes: number of writes, to number the objects' tags.

    Args:
        loop: provides time and randomness.
        watch: called with each value that is about to be stored.
        watch_deletion: called with each intact value that is about to be deleted; see `Spoiled`.
    """

    def __init__(
        self, loop: Loop, watch: Callable[[bytes], None], watch_deletion: Callable[[bytes, float], None]
    ) -> None:
        super().__init__(loop, watch_deletion)
        self._watch = watch
        self.objects: dict[str, _Object] = {}
        self.is_full = False
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
        self._spoiled.send(path, self.objects[path].value)
        return self.objects[path]

    def delete(self, paths: list[str]) -> None:
        """Delete objects; ignore absent ones."""
        for path in paths:
            if there := self.objects.pop(path, None):
                self._spoiled.delete(path, there.value)

    def connect(self) -> ObjectLink:
        """Return a link for one engine."""
        return ObjectLink(self)

    def lose(self, share: float) -> None:
        """Lose a share of the objects, as with a lost node."""
        for path in [path for path in self.objects if self.loop.random.random() < share]:
            del self.objects[path]

    def _values(self) -> list[tuple[str, bytes]]:
        return [(path, there.value) for path, there in self.objects.items()]

    def _replace(self, place: str, value: bytes | None) -> None:
        if value is None:
            del self.objects[place]
        else:
            self.objects[place] = _Object(value, self.objects[place].tag)


class ObjectLink(Link):
    """The link from one engine to the server; it replaces the module obstore."""

    exceptions = _exceptions

    def __init__(self, server: ObjectServer) -> None:
        super().__init__(server, server.loop.random.choice(_TIME_LIMITS), _ServerError)
        self.server = server

    def open(self, revision: str, bytes_per_block: int) -> ObjectStore:
        """Open a store on the server."""
        return ObjectStore(
            read_url(f"s3://bucket?size=1MiB&connections=4&timeout_base={DEADLINE}"),
            bytes_per_block=bytes_per_block,
            num_slots=CAPACITY,
            namespace=bytes(32),
            use="prefix",
            revision=revision,
            connect=lambda *_: (self, None),
        )

    def get(self, _client: object, path: str) -> _Object:
        """Return an object, or a gateway's page."""
        found = self.call(lambda: self.server.get(path))[0]
        return _Object(self.carried(found.value), found.tag)

    def head(self, _client: object, path: str) -> dict[str, Any]:
        """Return an object's metadata."""
        return self.get(_client, path).meta

    def put(self, _client: object, path: str, value: memoryview, *, mode: Any = "overwrite", **_: Any) -> None:
        """Store an object."""
        copied = bytes(value)
        try:
            self._require_answer(self.call(lambda: self.server.put(path, copied, mode)))
        except _ServerError as error:
            if type(error) is _ServerError:
                self.given_up.add(key_in(copied))
            raise

    def delete(self, _client: object, paths: str | list[str]) -> None:
        """Delete objects."""
        chosen = [paths] if isinstance(paths, str) else list(paths)
        self._require_answer(self.call(lambda: self.server.delete(chosen)))

    def call(self, *steps: Callable[[], Any]) -> list[Any]:
        """Run steps on the server. A page may come without the request, or in place of the server's answer."""
        if not self.pages or self.is_dead or self.server.loop.draw() >= self.pages:
            return super().call(*steps)
        if self.server.loop.draw() < 0.5:
            with suppress(_ServerError, FileNotFoundError):
                super().call(*steps)
        return [_PAGE]

    def _require_answer(self, answers: list[Any]) -> None:
        if answers[0] is _PAGE:
            raise _ServerError("the answer is no answer of a storage")
