"""`BatchOrder`: which batch may run. Batches of one slot or key run one after the other, in the order of submission."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard.stores.base import Owners

__all__ = ["Batch", "BatchKind", "BatchOrder", "Name"]

BatchKind: TypeAlias = Literal["write", "read", "put", "get", "delete", "forget", "has"]
Name: TypeAlias = int | bytes  # a slot or a key


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that was submitted. Its answer is known once it has `ended`, even if its call is still `running`."""

    ticket: int  # 0 for a lookup, which nobody collects
    kind: BatchKind
    names: list[Name]  # slots or keys, without those that had no room
    rows: NDArray[np.uint8] | None  # of the caller: what a write writes, or where the blocks of a read go
    reasons: list[str]
    num_bytes: int
    deadline: float
    age: int  # of the store when it was submitted
    expected: list[dict[Name, bytes]] = field(default_factory=list)  # of a read: what each slot's last write has left
    spread: list[int] | None = None  # of a put with repeats: entry of each key of the caller
    read: NDArray[np.uint8] | None = None  # what a read has read; the rows of the caller, or others
    owners: Owners | None = None  # of a put, an entry for each name
    digests: dict[Name, bytes] = field(default_factory=dict)  # of a write: blocks that landed
    before: int = 0  # earlier batches of its slots and keys that have not ended
    followers: list["Batch"] = field(default_factory=list)
    running: bool = False
    ended: bool = False

    @property
    def is_read(self) -> bool:
        """Whether it brings rows."""
        return self.kind in {"read", "get"}


class BatchOrder:
    """Batches that wait, and those that a thread may take. The caller holds a lock.

    Attributes:
        ready: batches that a thread may take, in order.
    """

    def __init__(self) -> None:
        self.ready: deque[Batch] = deque()
        self._last: dict[Name, Batch] = {}  # batch of each slot and key, until it has ended

    def add(self, batch: Batch) -> None:
        """Let a batch wait for the earlier ones of its slots and keys; the caller makes it ready if there are none."""
        for earlier in {id(last): last for name in batch.names if (last := self._last.get(name))}.values():
            earlier.followers.append(batch)
            batch.before += 1
        self._last.update(dict.fromkeys(batch.names, batch))

    def is_last(self, name: Name, batch: Batch) -> bool:
        """Return whether no later batch has this slot or key."""
        return self._last.get(name) is batch

    def is_busy(self, name: Name) -> bool:
        """Return whether a batch of this slot or key has not ended."""
        return name in self._last

    def withdraw(self, batch: Batch) -> None:
        """Keep threads from taking a batch."""
        if batch in self.ready:
            self.ready.remove(batch)

    def end(self, batch: Batch) -> list[Batch]:
        """Let go of a batch that has ended; return those that need not wait any more."""
        free, ending = list[Batch](), [batch]
        while ending:
            batch = ending.pop()
            if batch.before:
                continue
            for name in batch.names:
                if self._last.get(name) is batch:
                    del self._last[name]
            followers, batch.followers = batch.followers, []
            for follower in followers:
                follower.before -= 1
                if follower.ended:
                    ending.append(follower)
                elif not follower.before:
                    free.append(follower)
        return free

    def drop_lookups(self) -> None:
        """Keep threads from taking lookups, which nobody waits for."""
        self.ready = deque(batch for batch in self.ready if batch.ticket)

    def rebuild(self, batches: Iterable[Batch]) -> list[Batch]:
        """Order these batches anew, after an exception amid a change; return those that need not wait.

        Lookups stay as they are.
        """
        self._last = {}
        self.ready = deque(batch for batch in self.ready if not batch.ticket)
        waiting = list(batches)
        for batch in waiting:
            batch.before, batch.followers = 0, []
        free = []
        for batch in waiting:
            if not batch.ended:
                self.add(batch)
                if not batch.before and not batch.running:
                    free.append(batch)
        return free
