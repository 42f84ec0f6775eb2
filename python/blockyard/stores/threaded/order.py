"""`BatchOrder`: decides which batch may run. Batches of the same slot or key run in the order of submission.

So does a put of blocks behind that of the blocks before them.
"""

from collections import OrderedDict
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
    """A submitted batch. Once it has `ended`, its answer is final, even if its call is still `running`."""

    ticket: int  # 0 for a lookup, which is never collected
    kind: BatchKind
    names: list[Name]  # slots or keys, except those refused for lack of room
    rows: NDArray[np.uint8] | None  # the caller's rows: the source of a write, the destination of a read
    reasons: list[str]
    num_bytes: int
    deadline: float
    age: int  # the store's age at submission
    expected: list[dict[Name, bytes]] = field(default_factory=list)  # for a read: digests of each slot's last write
    spread: list[int] | None = None  # for a put with repeated keys: index of each of the caller's keys in `names`
    read: NDArray[np.uint8] | None = None  # the blocks of a read: the caller's rows, or others
    owners: Owners | None = None  # for a put: one entry per name
    digests: dict[Name, bytes] = field(default_factory=dict)  # for a write: digests of the blocks that landed
    before: int = 0  # number of earlier batches with the same slots or keys that have not ended
    followers: list["Batch"] = field(default_factory=list)
    running: bool = False
    ended: bool = False

    @property
    def is_read(self) -> bool:
        """Whether the batch returns rows."""
        return self.kind in {"read", "get"}


class BatchOrder:
    """The waiting batches and the ready ones. The caller holds a lock.

    Attributes:
        ready: batches that a thread may run, in order. In a dict, any of them is removed at once.
    """

    def __init__(self) -> None:
        self.ready: OrderedDict[Batch, None] = OrderedDict()
        self._last: dict[Name, Batch] = {}  # the latest batch of each slot or key, until it has ended

    def add(self, batch: Batch) -> None:
        """Add a batch behind the earlier ones of its slots and keys. If there are none, the caller makes it ready."""
        found = {id(last): last for name in batch.names if (last := self._last.get(name))}
        # A block whose parent is not stored yet would be the first that the store drops.
        for parent in () if batch.owners is None else batch.owners.parents:
            if (last := self._last.get(parent.tobytes())) is not None and last.kind == "put":
                found[id(last)] = last
        for earlier in found.values():
            earlier.followers.append(batch)
            batch.before += 1
        self._last.update(dict.fromkeys(batch.names, batch))

    def is_last(self, name: Name, batch: Batch) -> bool:
        """Return whether this is the latest batch of a slot or key."""
        return self._last.get(name) is batch

    def is_deleted_behind(self, name: Name, batch: Batch) -> bool:
        """Return whether a later batch of a key, which has not ended, deletes it."""
        while True:
            following = next((later for later in batch.followers if name in later.names), None)
            if following is None or following.kind == "delete":
                return following is not None
            batch = following

    def is_busy(self, name: Name) -> bool:
        """Return whether a slot or key has a batch that has not ended."""
        return name in self._last

    def withdraw(self, batch: Batch) -> None:
        """Remove a batch from those that threads may run."""
        self.ready.pop(batch, None)

    def end(self, batch: Batch) -> list[Batch]:
        """Remove a batch that has ended; return the batches that no longer have to wait."""
        free: list[Batch] = []
        ending = [batch]
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
        """Remove lookups from the ready batches; no caller waits for them."""
        self.ready = OrderedDict.fromkeys(batch for batch in self.ready if batch.ticket)

    def rebuild(self, batches: Iterable[Batch]) -> list[Batch]:
        """Rebuild the order of these batches after an interrupted change; return those that do not have to wait.

        Lookups stay unchanged.
        """
        self._last = {}
        self.ready = OrderedDict.fromkeys(batch for batch in self.ready if not batch.ticket)
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
