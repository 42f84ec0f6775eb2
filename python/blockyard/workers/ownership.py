"""Which process may use an object, and which object may use a shared thing."""

from __future__ import annotations

import os
import threading
import weakref

from blockyard.errors import ForkedError

__all__ = ["Claims", "Process"]


class Process:
    """The process that created an object. Only it can use the object's threads.

    Args:
        what: name of the object for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this is still the current process, not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise in a fork, where waiting for a thread, or for a lock that one of them held, would hang.

        Raises:
            ForkedError: this is a fork.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self._what} was created by process {self._pid}, this is its fork {os.getpid()}: create one here"
            )


class Claims:
    """Which object uses each shared thing: at most one uses it. A user that is collected no longer does."""

    def __init__(self) -> None:
        # By the thing's id: its user refers to it, so the id stays its own for as long as the entry.
        self._users: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # reentrant: collecting garbage may run other objects' code

    def user(self, thing: object) -> object | None:
        """Return the object that uses a thing, or None."""
        return self._users.get(id(thing))

    def take(self, thing: object, user: object) -> bool:
        """Return whether nothing else used the thing; from now on `user` does, which must refer to it."""
        with self._lock:
            return self._users.setdefault(id(thing), user) is user

    def hand_over(self, thing: object, user: object) -> None:
        """Let `user` use the thing instead of its present user."""
        with self._lock:
            self._users[id(thing)] = user

    def drop(self, thing: object, user: object) -> None:
        """End `user`'s use of the thing. Idempotent."""
        with self._lock:
            if self._users.get(id(thing)) is user:
                del self._users[id(thing)]
