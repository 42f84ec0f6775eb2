"""`KnownKeys`: what this process knows about keys: which have a block, which do not, and which to look up."""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final

from blockyard.stores.value import is_damage

__all__ = ["ABSENT_SECONDS", "FAILED_SECONDS", "KnownKeys"]

ABSENT_SECONDS: Final = 1.0  # how long an absent key is not looked up again
FAILED_SECONDS: Final = 2.0  # how long a key is not read after a transient failure
_THERE: Final = inf  # stored instead of a time for keys that have a block
_MAX_WANTED: Final = 1 << 16  # maximum number of keys waiting for a lookup
_MIN_KNOWN: Final = 1024  # remember at least this many keys, however few slots there are


class KnownKeys:
    """What this process knows about keys: which have a block, and which not to request now. The caller holds a lock.

    Nothing above a store remembers absent keys: callers ask the store's `lacks`.

    A failed read hides its key for two seconds, so that one key cannot keep a thread busy; then it is read again. An
    unconfirmed deletion hides its key until the key is put again.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # `_THERE`, or the time until which a key counts as absent; negative if the key must not even be read.
        self._until: dict[bytes, float] = {}
        self._wanted: dict[bytes, None] = {}  # keys to look up

    def clear(self) -> None:
        """Know nothing."""
        self._until.clear()

    def look_up(self, keys: Sequence[bytes]) -> tuple[list[bool], bool]:
        """Return whether each key is known to have a block, and whether some need a lookup; see `take_wanted`."""
        now, known = self._clock(), [self._until.get(key, 0.0) for key in keys]
        there = [until == _THERE for until in known]
        if not all(there):
            wanted = [key for key, until in zip(keys, known, strict=True) if abs(until) < now]
            self._wanted.update(dict.fromkeys(wanted[: max(0, _MAX_WANTED - len(self._wanted))]))
        return there, bool(self._wanted)

    def take_wanted(self) -> list[bytes]:
        """Return the keys to look up, and clear the list."""
        keys, self._wanted = list(self._wanted), {}
        return keys

    def is_hidden(self, key: bytes) -> bool:
        """Return whether a key must not be read now."""
        return self._until.get(key, 0.0) < -self._clock()

    def is_due(self, key: bytes) -> bool:
        """Return whether a key needs a lookup."""
        return abs(self._until.get(key, 0.0)) < self._clock()

    def is_lacked(self, key: bytes) -> bool:
        """Return whether a read of a key would be a miss now."""
        until = self._until.get(key, 0.0)
        return until != _THERE and abs(until) >= self._clock()

    def note(self, key: bytes, *, is_there: bool) -> None:
        """Record whether the storage has the key."""
        self._set(key, _THERE if is_there else self._clock() + ABSENT_SECONDS)

    def note_deleted(self, keys: Iterable[bytes]) -> None:
        """Record that keys are being deleted."""
        self._until.update(dict.fromkeys(keys, -_THERE))

    def note_ended(self, key: bytes, reason: str, *, is_delete: bool) -> None:
        """Record how a key's put, get or deletion ended."""
        if not reason:
            self.note(key, is_there=not is_delete)
        elif is_delete or reason in {"closed", "unavailable"}:
            return
        elif reason != "absent" and not is_damage(reason):
            self._set(key, -(self._clock() + FAILED_SECONDS))
        elif not self.is_hidden(key):  # a damaged block has been deleted
            self.note(key, is_there=False)

    def trim(self, num_slots: int) -> None:
        """Forget the oldest entries, down to one for each slot of the store."""
        most = max(num_slots, _MIN_KNOWN)
        while len(self._until) > most:
            del self._until[next(iter(self._until))]

    def count_there(self) -> int:
        """Return how many keys are known to have a block."""
        return list(self._until.values()).count(_THERE)

    def _set(self, key: bytes, until: float) -> None:
        self._until.pop(key, None)
        self._until[key] = until
