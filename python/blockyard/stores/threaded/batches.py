"""`Batches`: the batches of a store: tickets, order, deadlines, memory, and whether the storage answers.

No clock, no threads and no lock: the caller holds a lock, and passes the time. Batches of the same slot or key run in
the order of submission. So does a put of blocks behind that of the blocks before them.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, Literal, TypeAlias

from blockyard.errors import StoreError
from blockyard.stores.base import Owners
from blockyard.stores.value import Bytes

__all__ = ["Batch", "BatchKind", "Batches", "Name", "Recovery"]

BatchKind: TypeAlias = Literal["write", "read", "put", "get", "delete", "forget", "has"]
Name: TypeAlias = int | bytes  # a slot or a key

_PAUSES: Final = (0.5, 8.0)  # minimum and maximum seconds between probes of storage that does not answer
_OVERDUE_AT_ONCE: Final = 32  # thousands may be overdue when storage stops answering


@dataclass(slots=True, eq=False)
class Batch:
    """A submitted batch. Once it has `ended`, its answer is final, even if its call is still running."""

    ticket: int  # 0 for a lookup, which is never collected
    kind: BatchKind
    names: list[Name]  # slots or keys, except those refused for lack of room
    rows: Bytes | None  # the caller's rows: the source of a write, the destination of a read
    reasons: list[str]
    num_bytes: int
    deadline: float
    age: int  # the store's age at submission
    expected: list[dict[Name, bytes]] = field(default_factory=list)  # for a read: digests of each slot's last write
    spread: list[int] | None = None  # for a put with repeated keys: index of each of the caller's keys in `names`
    read: Bytes | None = None  # the blocks of a read: the caller's rows, or others
    owners: Owners | None = None  # for a put: one entry per name
    digests: dict[Name, bytes] = field(default_factory=dict)  # for a write: digests of the blocks that landed
    before: int = 0  # number of earlier batches with the same slots or keys that have not ended
    followers: list["Batch"] = field(default_factory=list)
    ended: bool = False
    is_asked: bool = True  # False for a read that was answered without the storage
    is_read: bool = field(init=False)  # whether it returns rows

    def __post_init__(self) -> None:
        self.is_read = self.kind in {"read", "get"}

    def source(self) -> Bytes:
        """Return the caller's rows to write.

        Raises:
            StoreError: the batch was given up.
        """
        if self.rows is None:
            raise StoreError("the batch has ended")
        return self.rows[: len(self.names)]


class Batches:
    """The batches of a store.

    While storage does not answer, no batch runs; from time to time a lookup does, as a probe.

    Attributes:
        open: uncollected batches, by ticket.
        ready: batches that a thread may run, in order. In a dict, any of them is removed at once.
        running: batches whose call runs, even if they were collected.
        news: uncollected batches that have ended since the last poll, by ticket.
        lookup: the lookup that is ready or running.
        pending: bytes in flight and in uncollected results.
        is_down: whether the storage has stopped answering.
    """

    def __init__(self) -> None:
        self.open: dict[int, Batch] = {}
        self.ready: OrderedDict[Batch, None] = OrderedDict()
        self.running: dict[Batch, None] = {}
        self.news: dict[int, Batch] = {}
        self.lookup: Batch | None = None
        self.pending = 0
        self.is_down = False
        self._last: dict[Name, Batch] = {}  # the latest batch of each slot or key, until it has ended
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, ticket); ended batches are removed later
        self._refused: deque[int] = deque()  # tickets open when storage stopped answering, until `overdue` ends them
        self._probe_at, self._pause = 0.0, _PAUSES[0]

    def add(self, batch: Batch) -> bool:
        """Add a batch behind the earlier ones of its slots and keys. Returns whether there are none."""
        self.pending += batch.num_bytes
        for _ in range(2):  # without calls of `overdue`, nothing else removes batches that have ended
            self._drop_ended_deadline()
        heappush(self._deadlines, (batch.deadline, batch.ticket))
        found = {id(last): last for name in batch.names if (last := self._last.get(name))}
        # A block whose parent is not stored yet would be the first that the store drops.
        for parent in () if batch.owners is None else batch.owners.parents:
            if (last := self._last.get(parent.tobytes())) is not None and last.kind == "put":
                found[id(last)] = last
        for earlier in found.values():
            earlier.followers.append(batch)
        batch.before = len(found)
        self._last.update(dict.fromkeys(batch.names, batch))
        return not found

    def first(self) -> Batch | None:
        """Return the batch to run next."""
        if self.is_down:
            return self.lookup if self.lookup in self.ready else None
        return next(iter(self.ready), None)

    def take(self, taken: list[Batch]) -> None:
        """Append the batch to run next, if there is one; it runs from now on."""
        batch = self.first()
        if batch is not None:
            taken.append(batch)
            self.running[batch] = None
            del self.ready[batch]

    def drop_lookup(self) -> None:
        """Remove a lookup that does not run; no caller waits for it."""
        if self.lookup is not None:
            self.ready.pop(self.lookup, None)

    def end(self, batch: Batch) -> list[Batch]:
        """End a batch, whose reasons are final. Returns the batches that no longer have to wait."""
        self.news[batch.ticket] = batch
        batch.ended = True
        self.ready.pop(batch, None)
        free: list[Batch] = []
        ending = [batch]
        while ending:
            ended = ending.pop()
            if ended.before:  # what waits for it waits for the earlier ones, too
                continue
            for name in ended.names:
                if self._last.get(name) is ended:
                    del self._last[name]
            followers, ended.followers = ended.followers, []
            for follower in followers:
                follower.before -= 1
                if not follower.before:
                    (ending if follower.ended else free).append(follower)
        return free

    def release(self, batch: Batch) -> None:
        """Return the memory of a batch, if no call uses it."""
        if batch not in self.running:
            self.pending -= batch.num_bytes
            batch.num_bytes = 0
            batch.read = None
            if not batch.is_read:
                batch.rows = None

    def collect(self, batch: Batch) -> None:
        """Remove an ended batch whose answer the caller has."""
        self.release(batch)
        self.news.pop(batch.ticket, None)
        del self.open[batch.ticket]

    def give_up_all(self) -> None:
        """End every batch as a miss, `"error"`: an exception has interrupted a change, so no order is sure."""
        self.ready.clear()
        self._last.clear()
        self._deadlines.clear()
        if self.lookup not in self.running:
            self.lookup = None
        for batch in (*self.open.values(), *self.running):
            batch.before, batch.followers = 0, []
            if not batch.ended and batch.ticket:
                batch.reasons = ["error"] * len(batch.reasons)
                batch.digests.clear()
                batch.ended = True
                self.news[batch.ticket] = batch
                self.release(batch)
        self.pending = sum(batch.num_bytes for batch in {*self.open.values(), *self.running})

    # ---- the order of one slot or key ----

    def is_last(self, name: Name, batch: Batch) -> bool:
        """Return whether this is the latest batch of a slot or key."""
        return self._last.get(name) is batch

    def is_busy(self, name: Name) -> bool:
        """Return whether a slot or key has a batch that has not ended."""
        return name in self._last

    def is_deleted_behind(self, name: Name, batch: Batch) -> bool:
        """Return whether a later batch of a key, which has not ended, deletes it."""
        while True:
            following = next((later for later in batch.followers if name in later.names), None)
            if following is None or following.kind == "delete":
                return following is not None
            batch = following

    def late_puts(self) -> set[Name]:
        """Return the keys that puts may still store although they were given up."""
        return {name for batch in self.running if batch.ended and batch.kind == "put" for name in batch.names}

    # ---- deadlines, and storage that does not answer ----

    def overdue(self, now: float) -> Iterator[tuple[Batch, str]]:
        """Yield batches to give up, each with the reason; the caller ends each before the next.

        There are at most `_OVERDUE_AT_ONCE` of each kind, since the caller may be an engine's thread.
        """
        for _ in range(_OVERDUE_AT_ONCE):
            if self._drop_ended_deadline():
                continue
            if not self._is_first_overdue(now):
                break
            yield self.open[self._deadlines[0][1]], "timeout"
        for _ in range(min(len(self._refused), _OVERDUE_AT_ONCE) if self.is_down else 0):
            batch = self.open.get(self._refused.popleft())
            if batch is not None and self.is_refused(batch):
                yield batch, "unavailable"

    def has_overdue(self, now: float) -> bool:
        """Return whether `overdue` may have more to yield."""
        return (self.is_down and bool(self._refused)) or self._is_first_overdue(now)

    def is_refused(self, batch: Batch) -> bool:
        """Return whether a batch waits for storage that does not answer."""
        return self.is_down and batch not in self.running and batch is not self.lookup

    def is_probe_due(self, now: float) -> bool:
        """Return whether it is time to probe storage that does not answer."""
        return self.is_down and self._probe_at <= now

    def trip(self, now: float) -> bool:
        """Record that a call hung. Returns whether the storage was up until now."""
        is_new = not self.is_down
        if is_new:
            self.is_down, self._pause = True, _PAUSES[0]
            self._refused = deque(self.open)
        self._probe_at = now + self._pause
        return is_new

    def end_lookup(self, now: float, *, answered: bool) -> bool:
        """Record how a lookup ended. Returns whether it shows that the storage works again."""
        self.lookup = None
        if self.is_down and not answered:
            self._pause = min(2 * self._pause, _PAUSES[1])
            self._probe_at = now + self._pause
        was_down, self.is_down = self.is_down, self.is_down and not answered
        return was_down and answered

    def _is_first_overdue(self, now: float) -> bool:
        return bool(self._deadlines) and self._deadlines[0][0] < now

    def _drop_ended_deadline(self) -> bool:
        """Remove the first deadline if its batch has ended. Returns whether it had."""
        if not self._deadlines:
            return False
        batch = self.open.get(self._deadlines[0][1])
        is_ended = batch is None or batch.ended
        if is_ended:
            heappop(self._deadlines)
        return is_ended


class Recovery:
    """A context of changes: if an exception interrupts them, all batches are given up."""

    def __init__(self, recover: Callable[[list[Batch], BaseException], None]) -> None:
        self._recover = recover

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._recover([], error)
