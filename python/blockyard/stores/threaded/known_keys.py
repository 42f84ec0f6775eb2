"""`KnownKeys`: what this process knows about keys: which have a block, which do not, and which to look up."""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final

from blockyard.stores.threaded.batches import Batch, Batches
from blockyard.stores.value import Bytes, is_damage, is_whole

__all__ = ["ABSENT_SECONDS", "FAILED_SECONDS", "KnownKeys"]

ABSENT_SECONDS: Final = 1.0  # how long an absent key is not looked up again
FAILED_SECONDS: Final = 2.0  # how long a key is not read after a failed read
_MAX_WANTED: Final = 1 << 16  # maximum number of keys waiting for a lookup
_MAX_DOUBTED: Final = 1 << 16  # maximum number of keys whose last read was damaged
_MIN_KNOWN: Final = 1024  # remember at least this many keys, however few slots there are


class KnownKeys:
    """What this process knows about keys: which have a block, and which not to request now. The caller holds a lock.

    Nothing above a store remembers absent keys: callers ask the store's `lacks`.

    All of it expires, since other processes and the storage itself change what is stored. A key that is asked for is
    looked up again before that.

    A failed read or lookup hides its key for two seconds, so that one key cannot keep a thread busy; then it is read
    again. If a read was damaged, the key has no block until a read or put proves it. An unconfirmed deletion hides its
    key until the key is put again.

    Args:
        clock: returns the time in seconds.
        there_seconds: how long a key that has a block is known to have it.
    """

    def __init__(self, clock: Callable[[], float], there_seconds: float = inf) -> None:
        self._clock = clock
        self._there_seconds = there_seconds
        self._there: dict[bytes, float] = {}  # when it was known that a key has a block, the oldest first
        # The time until which a key counts as absent; negative if the key must not even be read.
        self._until: dict[bytes, float] = {}
        self._doubted: dict[bytes, bytes] = {}  # digest of each damaged value as it was read; empty if unknown
        self._wanted: dict[bytes, None] = {}  # keys to look up

    def clear(self) -> None:
        """Know nothing."""
        self._until.clear()
        self._there.clear()
        self._doubted.clear()

    def expire(self) -> None:
        """Know of no key that it has a block: the storage may have lost it."""
        self._there.clear()

    def look_up(self, keys: Sequence[bytes]) -> tuple[list[bool], bool]:
        """Return whether each key is known to have a block, and whether some need a lookup; see `take_wanted`."""
        now = self._clock()
        since, renewed = now - self._there_seconds, now - self._there_seconds / 2
        times = [self._there.get(key, -inf) for key in keys]
        there = [time > since for time in times]
        if not all(time > renewed for time in times):
            wanted = [
                key
                for key, time in zip(keys, times, strict=True)
                if time <= renewed and abs(self._until.get(key, 0.0)) < now and key not in self._doubted
            ]
            self._wanted.update(dict.fromkeys(wanted[: max(0, _MAX_WANTED - len(self._wanted))]))
        return there, bool(self._wanted)

    def take_wanted(self) -> list[bytes]:
        """Return the keys to look up, and clear the list."""
        keys, self._wanted = list(self._wanted), {}
        return keys

    def is_hidden(self, key: bytes) -> bool:
        """Return whether a key must not be read now."""
        until = self._until.get(key, 0.0)
        return until < 0.0 and until < -self._clock()

    def is_due(self, key: bytes) -> bool:
        """Return whether a key needs a lookup."""
        now = self._clock()
        is_known = self._there.get(key, -inf) > now - self._there_seconds / 2 or key in self._doubted
        return not is_known and abs(self._until.get(key, 0.0)) < now

    def is_lacked(self, key: bytes) -> bool:
        """Return whether a read of a key would be a miss now."""
        return abs(self._until.get(key, 0.0)) >= self._clock()

    def note(self, key: bytes, *, is_there: bool) -> None:
        """Record whether the storage has the key."""
        self._there.pop(key, None)
        self._until.pop(key, None)
        if is_there:
            self._there[key] = self._clock()
        else:
            self._until[key] = self._clock() + ABSENT_SECONDS

    def note_deleted(self, keys: Iterable[bytes]) -> None:
        """Record that keys are being deleted."""
        for key in keys:
            self._there.pop(key, None)
            self._until[key] = -inf

    def note_batch(self, batch: Batch, batches: Batches) -> None:
        """Record how a batch of keys ended, except for keys with a later batch."""
        is_delete = batch.kind == "delete"
        for key, reason in zip(batch.names, batch.reasons, strict=False):
            if not isinstance(key, bytes):
                continue
            if batches.is_last(key, batch) or self._ends_hiding(key, batch, reason, batches):
                self.note_ended(key, reason, is_delete=is_delete)

    def _ends_hiding(self, key: bytes, batch: Batch, reason: str, batches: Batches) -> bool:
        """Return whether a confirmed put or deletion ends the hiding of its key by an earlier deletion.

        Later reads of the key may already wait for this batch, and would stay misses.
        """
        is_confirmed = batch.kind != "get" and not reason
        return is_confirmed and self.is_hidden(key) and not batches.is_deleted_behind(key, batch)

    def note_ended(self, key: bytes, reason: str, *, is_delete: bool) -> None:
        """Record how a key's put, get or deletion ended."""
        if self._doubted and (not reason or reason == "absent"):
            self._doubted.pop(key, None)
        if not reason:
            self.note(key, is_there=not is_delete)
        elif is_delete or reason in {"closed", "unavailable"}:
            return
        elif reason != "absent" and not is_damage(reason):
            self.hide([key])
        elif not self.is_hidden(key):  # absent, or a damaged block that has been deleted
            self.note(key, is_there=False)

    def doubt_damaged(self, keys: Sequence[bytes], reasons: Sequence[str], seen: Bytes) -> list[bytes]:
        """Doubt the values of a read that are damaged; see `doubt`. Returns the keys of those to delete.

        A value that the codec refuses is only replaced by the next put: perhaps this process's codec is at fault.
        """
        damaged = {
            key: digest.tobytes() if is_damage(reason) and is_whole(reason) else b""
            for key, reason, digest in zip(keys, reasons, seen, strict=True)
            if is_damage(reason) or reason == "codec"
        }
        return [key for key, digest in damaged.items() if self.doubt(key, digest)]

    def doubt(self, key: bytes, seen: bytes) -> bool:
        """Record that a value was damaged when it was read; its key is hidden until it may be read again.

        Args:
            key: the value's key.
            seen: digest of the bytes that were read; empty if they may not even be the value's.

        Returns:
            Whether an earlier read has found the same bytes: then the value is damaged where it lies.
        """
        if seen and self._doubted.get(key) == seen:
            return True
        self._doubted.pop(key, None)
        self._doubted[key] = seen
        if len(self._doubted) > _MAX_DOUBTED:
            del self._doubted[next(iter(self._doubted))]
        self.hide([key])
        return False

    def is_doubted(self, key: bytes) -> bool:
        """Return whether the last read of a key was damaged."""
        return key in self._doubted

    def trim(self, num_slots: int) -> None:
        """Forget the oldest entries, down to one for each slot of the store."""
        most = max(num_slots, _MIN_KNOWN)
        for known in (self._there, self._until):
            while len(known) > most:
                del known[next(iter(known))]

    def count_there(self) -> int:
        """Return how many keys are known to have a block, or were a moment ago."""
        return len(self._there)

    def hide(self, keys: Iterable[bytes]) -> None:
        """Record that keys could not be read or looked up."""
        for key in keys:
            self._there.pop(key, None)
            self._until.pop(key, None)
            self._until[key] = -(self._clock() + FAILED_SECONDS)
