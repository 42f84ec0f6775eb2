"""A check of an offload manager: an engine's stores and loads over simulated memory, and every loaded byte compared."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blockyard.errors import InvariantError

__all__ = ["OffloadChecker", "OffloadManagerLike"]

Content = tuple[tuple[int, ...], bytes, int]
"""What decides a chunk's bytes: its prefix, the tenant's salt, the cache group."""
Name = Callable[[tuple[int, ...], bytes, int], bytes]


class OffloadManagerLike(Protocol):
    """What is checked: the calls of `blockyard.offload.OffloadManager`."""

    def lookup(self, keys: Sequence[bytes]) -> Sequence[str]:
        """Return `"hit"`, `"pending"` or `"miss"` for each key."""

    def prepare_store(self, keys: Sequence[bytes], *, deadline: int | None = None) -> Any:
        """Give chunks to keys that have none; None if it cannot."""

    def complete_store(self, keys: Sequence[bytes], success: bool = True) -> object:
        """End stores."""

    def prepare_load(self, keys: Sequence[bytes]) -> Any:
        """Hold the chunks of hits."""

    def complete_load(self, keys: Sequence[bytes]) -> object:
        """End loads."""

    def expire(self, now: int) -> object:
        """Forget the keys whose stores are overdue."""


@dataclass(eq=False)
class _Transfer:
    keys: list[bytes]
    chunks: list[int]
    contents: list[Content]
    until: int = 0


def exact_name(prefix: tuple[int, ...], salt: bytes, group: int) -> bytes:
    """A key that covers all that decides a chunk's bytes."""
    return repr((prefix, salt, group)).encode()


class OffloadChecker:
    """Stores, loads and fails at random, with transfers that end late and in any order.

    A prefix is a hit if all cache groups have it. A load reads its chunks when it ends, so that chunks which were given
    out too early have other bytes by then.

    Args:
        manager: what is checked, empty.
        num_chunks: its chunks.
        name: the key of a chunk; what a tier below makes of keys can be checked with one that forgets something.
        groups: cache groups of the model.
        seed: of all that is random.
    """

    DEADLINE = 20

    def __init__(
        self, manager: OffloadManagerLike, num_chunks: int, *, name: Name = exact_name, groups: int = 1, seed: int = 0
    ) -> None:
        self._manager, self._name, self._groups = manager, name, groups
        self._random = random.Random(seed)
        self._host: list[Content | None] = [None] * num_chunks
        self._stores: list[_Transfer] = []
        self._loads: list[_Transfer] = []
        self._pending_since: dict[bytes, int] = {}
        self._now = 0
        self.loaded = 0

    def run(self, steps: int) -> None:
        """Do so many things at random.

        Raises:
            InvariantError: bytes are wrong, a hit cannot be loaded, or a key is pending for ever.
        """
        actions = [self._store, self._load, self._load, self._end_store, self._end_store, self._end_load]
        for _ in range(steps):
            self._now += 1
            self._random.choice(actions)()
            self._manager.expire(self._now)
            self._check_pending()

    def _request(self) -> list[Content]:
        """The chunks of a prompt: few prompts and tenants, so that they meet."""
        salt = self._random.choice((b"one", b"two"))
        first, length = self._random.randrange(3), self._random.randrange(1, 3)
        return [
            (tuple(range(first, first + n + 1)), salt, group) for n in range(length) for group in range(self._groups)
        ]

    def _store(self) -> None:
        contents = {self._name(*content): content for content in self._request()}
        store = self._manager.prepare_store(list(contents), deadline=self._now + self.DEADLINE)
        if store is None:
            return
        chunks = [int(chunk) for chunk in store.chunks]
        for chunk in chunks:
            self._host[chunk] = None  # half-written
        self._stores.append(_Transfer(list(store.keys), chunks, [contents[key] for key in store.keys], self._end()))

    def _end(self) -> int:
        """The time before which a store does not end: one in eight hangs past its deadline."""
        return self._now + (4 * self.DEADLINE if self._random.random() < 0.125 else 0)

    def _end_store(self) -> None:
        ready = [transfer for transfer in self._stores if transfer.until <= self._now]
        if not ready:
            return
        transfer = self._random.choice(ready)
        self._stores.remove(transfer)
        success = self._random.random() < 0.8
        for chunk, content in zip(transfer.chunks, transfer.contents, strict=True):
            self._host[chunk] = content if success else None
        self._manager.complete_store(transfer.keys, success)

    def _load(self) -> None:
        contents = self._request()
        keys = [self._name(*content) for content in contents]
        found = list(self._manager.lookup(keys))
        whole = next((place for place, what in enumerate(found) if what != "hit"), len(found))
        whole -= whole % self._groups
        if not whole:
            return
        try:
            chunks = [int(chunk) for chunk in self._manager.prepare_load(keys[:whole])]
        except Exception as error:
            raise InvariantError(f"step {self._now}: {keys[:whole]} are hits and cannot be loaded: {error}") from error
        self._loads.append(_Transfer(keys[:whole], chunks, contents[:whole]))

    def _end_load(self) -> None:
        if not self._loads:
            return
        transfer = self._loads.pop(self._random.randrange(len(self._loads)))
        for chunk, content in zip(transfer.chunks, transfer.contents, strict=True):
            if self._host[chunk] != content:
                raise InvariantError(f"step {self._now}: chunk {chunk} holds {self._host[chunk]}, not {content}")
        self._manager.complete_load(transfer.keys)
        self.loaded += len(transfer.keys)

    def _check_pending(self) -> None:
        keys = [key for transfer in self._stores for key in transfer.keys]
        pending = {key for key, what in zip(keys, self._manager.lookup(keys), strict=True) if what == "pending"}
        self._pending_since = {key: self._pending_since.get(key, self._now) for key in pending}
        for key, since in self._pending_since.items():
            if self._now - since > self.DEADLINE:
                raise InvariantError(f"step {self._now}: {key!r} is pending since step {since}, past its deadline")
