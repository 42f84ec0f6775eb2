"""Fault injection: damages stored blocks like a bad disk, for tests and for `blockyard demo --corrupt`.

It changes the file of an open store. Whatever changed, the store must report a miss. To test code that uses a store,
`UnrulyStore` violates the `ExternalStore` contract, and `FailingStore` honors it but returns no blocks.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion, SlabStore
from blockyard.errors import InvalidArgumentError, StoreError, UnknownTicketError
from blockyard.stores.base import ExternalStore, Keys, Owners
from blockyard.testing.wrapped_store import WrappedStore

__all__ = ["PARTS", "FailingStore", "UnrulyStore", "corrupt_slots", "flip_bytes"]

HEADER_BYTES = 4096
PARTS: dict[str, tuple[int, int]] = {
    "magic": (0, 8),
    "version": (8, 4),
    "namespace": (16, 32),
    "key": (48, 32),
    "slot": (80, 8),
    "generation": (88, 8),
    "length": (96, 8),
    "payload_checksum": (104, 16),
    "header_padding": (120, 3960),
    "header_checksum": (4080, 16),
}
"""Fields of a slot's header: offset and length in bytes (`docs/decisions/0002-slab-header.md`)."""


def corrupt_slots(
    store: object, slots: Sequence[int] | NDArray[np.int64], *, part: str = "payload", flips: int = 1, seed: int = 0
) -> None:
    """Flip bytes of slots on disk, in the file of a live store.

    Wait for writes to these slots first, or they will overwrite the damage.

    Args:
        store: a file store, as returned by `blockyard.stores.open_store` for `file://`.
        slots: slots to damage; repeats are ignored.
        part: `"payload"` or a field of the header, see `PARTS`.
        flips: number of bytes to change in each slot, at most the size of the part.
        seed: seed for positions and changes.

    Raises:
        InvalidArgumentError: the store has no slab file, or `part` is not in `PARTS`.
        MappingError: a slot is out of range.
        OSError: the file is gone or cannot be written.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from blockyard.stores import open_store
        >>> from blockyard.testing.faults import corrupt_slots
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open_store(f"file://{folder}?size=1MiB", bytes_per_block=4096) as store:
        ...         slots = np.array([3, 5])
        ...         _ = store.wait(store.submit_write(slots, np.ones((2, 4096), np.uint8)))
        ...         corrupt_slots(store, [5])
        ...         read = store.wait(store.submit_read(slots))
        >>> read.ok.tolist(), read.reasons
        ([True, False], ('', 'payload_checksum'))
    """
    if not isinstance(store, SlabStore):
        raise InvalidArgumentError(f"store is a {type(store).__name__}, only a SlabStore has a file to damage")
    parts = {**PARTS, "payload": (HEADER_BYTES, store.bytes_per_block)}
    if part not in parts:
        raise InvalidArgumentError(f"part is {part!r}, must be one of {', '.join(parts)}")
    start, length = parts[part]
    random = np.random.default_rng(seed)
    offsets = [store.slot_offset(int(slot)) + start for slot in np.unique(np.asarray(slots, dtype=np.int64))]
    for offset in offsets:
        places = random.choice(length, size=min(flips, length), replace=False)
        flip_bytes(store.path, (offset + places).tolist(), masks=random.integers(1, 256, places.size).tolist())


def flip_bytes(path: Path, offsets: Sequence[int], *, masks: Sequence[int]) -> None:
    """Flip bits of single bytes in a file.

    Args:
        path: the file; symbolic links are not followed.
        offsets: offsets of the bytes to change.
        masks: values from 1 to 255 that are XORed with the bytes, so that each byte changes.

    Raises:
        OSError: the file cannot be opened, or ends before an offset.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for offset, mask in zip(offsets, masks, strict=True):
            before = os.pread(descriptor, 1, offset)
            if not before:
                raise OSError(f"{path} ends before byte {offset}")
            os.pwrite(descriptor, bytes([before[0] ^ mask]), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _NamelessError(Exception):
    """An error that cannot be converted to text."""

    def __str__(self) -> str:
        raise ValueError("no text")


_ERRORS: tuple[Exception, ...] = (
    ConnectionResetError("the peer is gone"),
    StoreError("refused"),
    UnknownTicketError("which ticket?"),
    InvalidArgumentError("what array?"),
    MemoryError(),
    KeyError(3),
    StopIteration(),
    _NamelessError(),
)


class UnrulyStore(WrappedStore):
    """Violates the `ExternalStore` contract in some calls, of any kind, and forwards the others.

    It raises exceptions of all kinds, before or after the call takes effect; returns wrong types and shapes; and
    repeats, invents and forgets tickets. Blocks that it reports as read always have the right bytes.

    Args:
        inner: a store that honors the contract.
        seed: determines which calls misbehave, and how.
        share: fraction of calls that misbehave.

    Attributes:
        broken: number of calls that misbehaved.
    """

    def __init__(self, inner: ExternalStore, *, seed: int, share: float = 0.2) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._share = share
        self._last: Any = 1
        self.broken = 0

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start writing blocks, or misbehave."""
        return self._ticket(lambda: self._inner.submit_write(slots, rows))

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start reading blocks, or misbehave."""
        return self._ticket(lambda: self._inner.submit_read(slots, rows))

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None = None) -> int:
        """Start storing blocks by key, or misbehave."""
        return self._ticket(lambda: _put(self._inner, keys, rows, owners))

    def submit_get(self, keys: Keys, rows: NDArray[np.uint8] | None = None) -> int:
        """Start reading blocks by key, or misbehave."""
        return self._ticket(lambda: self._inner.submit_get(keys, rows))

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys are present, or anything."""
        found = self._break(lambda: self._inner.contains(keys), lambda right: [None, ~right, right[1:], "yes", 1.5])
        return cast("NDArray[np.bool_]", found)

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys are known to be missing, or anything."""
        found = self._break(lambda: self._inner.lacks(keys), lambda right: [None, ~right, right[1:], "no", 1.5])
        return cast("NDArray[np.bool_]", found)

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Limit the blocks of a tenant in the inner store, or raise anything."""
        self._break(lambda: self._inner.set_quota(tenant, num_blocks), lambda done: [done])

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Return a tenant's quota from the inner store, or raise anything."""
        found = self._break(lambda: self._inner.quota(tenant), lambda right: [right])
        return cast("tuple[int, int] | None", found)

    def poll(self) -> list[int]:
        """Return finished tickets, or anything."""
        answer = self._break(self._inner.poll, lambda found: [None, [*found, *found, 1 << 70, -1], ["x"], found[1:], 7])
        return cast("list[int]", answer)

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket, or misbehave."""
        return cast("Completion", self._break(lambda: self._inner.wait(ticket, timeout), _misshapen))

    def _ticket(self, call: Callable[[], int]) -> int:
        self._last = self._break(call, lambda found: [None, str(found), 0.5, self._last, found + (1 << 40)])
        return cast("int", self._last)

    def _break(self, call: Callable[[], Any], others: Callable[[Any], Sequence[Any]]) -> Any:
        """Make a call; or raise before or after it, or return something else."""
        how = self._random.choice(("before", "after", "other")) if self._random.random() < self._share else ""
        self.broken += bool(how)
        if how == "before":
            raise self._random.choice(_ERRORS)
        found = call()
        if how == "after":
            raise self._random.choice(_ERRORS)
        return self._random.choice(others(found)) if how else found


_Fault: TypeAlias = Literal["", "lose", "refuse", "hang"]


class FailingStore(WrappedStore):
    """A prefix store that fails like real storage. Its users may lose hits, but never tokens, and never wait long.

    Args:
        inner: a working store with keys.
        timeout: deadline of hanging calls, in seconds.

    Attributes:
        fault: fault of all later calls. `"lose"`: it claims to have a key, then misses. `"refuse"`: every read and
            write raises StoreError. `"hang"`: reads and writes return misses at their deadline. Empty: none.
        faults: number of calls that failed.

    Example:
        >>> import tempfile
        >>> from blockyard.stores import open_store
        >>> from blockyard.testing.faults import FailingStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     inner = open_store(f"file://{folder}?size=1MiB", bytes_per_block=4096, use="prefix")
        ...     with FailingStore(inner) as store:
        ...         store.fault = "lose"
        ...         print(store.contains([bytes(32)]), store.wait(store.submit_get([bytes(32)])).reasons)
        [ True] ('absent',)
    """

    def __init__(self, inner: ExternalStore, *, timeout: float = 2.0) -> None:
        super().__init__(inner)
        self._timeout = timeout
        self._late: dict[int, float] = {}
        self._ended: list[int] = []  # reported by the inner store, not yet due here
        self._fault: _Fault = ""
        self.faults = 0

    @property
    def fault(self) -> _Fault:
        """What happens to calls now."""
        return self._fault

    @fault.setter
    def fault(self, fault: _Fault) -> None:
        if fault not in get_args(_Fault):
            raise InvalidArgumentError(f"fault is {fault!r}, must be one of {list(get_args(_Fault))}")
        self._fault = fault

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start writing blocks to slots."""
        return self._submit(lambda: self._inner.submit_write(slots, rows))

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start reading blocks from slots."""
        return self._submit(lambda: self._inner.submit_read(slots, rows))

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None = None) -> int:
        """Start storing blocks under keys."""
        return self._submit(lambda: _put(self._inner, keys, rows, owners))

    def submit_get(self, keys: Keys, rows: NDArray[np.uint8] | None = None) -> int:
        """Start reading blocks by key."""
        if self.fault == "lose":
            # Keys that were never stored.
            keys = [os.urandom(32) for _ in keys]
        return self._submit(lambda: self._inner.submit_get(keys, rows))

    def submit_delete(self, keys: Keys) -> int:
        """Start deleting keys."""
        return self._submit(lambda: self._inner.submit_delete(keys))

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each key has a block, or claim that all have."""
        found = self._inner.contains(keys)
        return np.ones_like(found) if self.fault == "lose" else found

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each key is known to be missing, or claim that none is."""
        found = self._inner.lacks(keys)
        return np.zeros_like(found) if self.fault == "lose" else found

    def forget(self, revision: str | None = None) -> None:
        """Forget every key."""
        self._inner.forget(revision)

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Limit the blocks of a tenant."""
        self._require_answer()
        self._inner.set_quota(tenant, num_blocks)

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Return the blocks that count towards a tenant's quota, and the quota."""
        self._require_answer()
        return self._inner.quota(tenant)

    def event_fd(self) -> int:
        """Return the file descriptor of the inner store."""
        return self._inner.event_fd()

    def poll(self) -> list[int]:
        """Return finished tickets, and hanging ones after their deadline."""
        now = time.monotonic()
        self._ended += self._inner.poll()
        found = [ticket for ticket in self._ended if self._late.get(ticket, 0.0) <= now]
        self._ended = [ticket for ticket in self._ended if ticket not in found]
        return found

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket; a hanging one returns misses at its deadline or the timeout."""
        until = self._late.pop(ticket, None)
        if until is None:
            return self._inner.wait(ticket, timeout)
        left = until - time.monotonic()
        time.sleep(max(0.0, left if timeout is None else min(timeout, left)))
        answer = self._inner.wait(ticket, timeout)
        missed = np.zeros_like(answer.ok)
        return Completion(ticket, missed, np.zeros_like(answer.rows), ("timeout",) * len(missed))

    def _require_answer(self) -> None:
        if self.fault in {"refuse", "hang"}:
            self.faults += 1
            raise StoreError("injected fault: the storage does not answer")

    def _submit(self, call: Callable[[], int]) -> int:
        self.faults += bool(self.fault)
        if self.fault == "refuse":
            raise StoreError("injected fault: the storage refuses")
        ticket = call()
        if self.fault == "hang":
            self._late[ticket] = time.monotonic() + self._timeout
        return ticket


def _put(store: ExternalStore, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None) -> int:
    """Put blocks; omit `owners` if there are none, because stores need not accept it."""
    return store.submit_put(keys, rows) if owners is None else store.submit_put(keys, rows, owners)


def _misshapen(answer: Completion) -> Sequence[object]:
    """Return variants of an answer, each with a different fault."""
    ticket, ok, rows, reasons = answer.ticket, answer.ok, answer.rows, answer.reasons
    more = np.concatenate((rows, np.zeros((1, rows.shape[1]), dtype=np.uint8)))
    return (
        None,
        (ok, rows),
        Completion(ticket + 1, ok, rows, reasons),
        Completion(ticket, ok[1:], rows, reasons),
        Completion(ticket, np.append(ok, True), rows, reasons),
        Completion(ticket, ok, rows[:, 1:], reasons),
        Completion(ticket, ok, rows[1:] if len(rows) else more, reasons),
        Completion(ticket, ok, more, reasons),
        Completion(ticket, ok, rows, (*reasons, "")),
    )
