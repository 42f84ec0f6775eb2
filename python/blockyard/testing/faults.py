"""Damage to stored blocks, on purpose: what a bad disk does, for tests and for `blockyard demo --corrupt`.

The file of a live store is changed behind its back. Whatever is changed, the store must report a miss. `UnrulyStore` is
a store that breaks the rules of `ExternalStore` itself, and `FailingStore` one that keeps them and yet brings nothing,
for tests of what uses one.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion, SlabStore, StoreStats
from blockyard.errors import InvalidArgumentError, StoreError, UnknownTicketError
from blockyard.stores.base import ExternalStore, Keys, Owners

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
"""Where the fields of a slot's header lie: offset and length in bytes (`docs/decisions/0002-slab-header.md`)."""


def corrupt_slots(
    store: object, slots: Sequence[int] | NDArray[np.int64], *, part: str = "payload", flips: int = 1, seed: int = 0
) -> None:
    """Flip bytes of chosen slots on disk, in the file of a live store.

    Wait for the writes to these slots first, or they will write over the damage.

    Args:
        store: a file store, as `blockyard.stores.open_store` returns it for `file://`.
        slots: which; each is damaged once, however often it is named.
        part: `"payload"` or a field of the header, see `PARTS`.
        flips: bytes to change in each slot, at most as many as the part has.
        seed: of the positions and of the changes.

    Raises:
        InvalidArgumentError: the store has no slab file, or there is no such part.
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
    """Change single bytes of a file on the disk.

    Args:
        path: the file; symbolic links are not followed.
        offsets: of the bytes to change.
        masks: what each is combined with by exclusive or, 1 to 255, so that it always changes.

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
    """Cannot be turned into text."""

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


class UnrulyStore(ExternalStore):
    """Breaks the rules of `ExternalStore` now and then, at any call; what it does not break, it passes on.

    It raises exceptions of all kinds, before or after the call has had its effect, answers with other types and shapes,
    and repeats, invents and forgets tickets. A block that it says came back has the right bytes.

    Args:
        inner: a store that keeps the rules.
        seed: decides when it breaks which.
        share: of the calls that it breaks.

    Attributes:
        broken: calls that it has broken.
    """

    def __init__(self, inner: ExternalStore, *, seed: int, share: float = 0.2) -> None:
        self._inner = inner
        self._random = random.Random(seed)
        self._share = share
        self._last: Any = 1
        self.broken = 0

    @property
    def num_slots(self) -> int:
        """Slots, numbered from 0."""
        return self._inner.num_slots

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one slot holds."""
        return self._inner.bytes_per_block

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks, or not."""
        return self._ticket(lambda: self._inner.submit_write(slots, rows))

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks, or not."""
        return self._ticket(lambda: self._inner.submit_read(slots, rows))

    @property
    def keeps_quotas(self) -> bool:  # type: ignore[override]
        """Whether the store below keeps quotas."""
        return self._inner.keeps_quotas

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None = None) -> int:
        """Start to store blocks by key, or not."""
        return self._ticket(lambda: _put(self._inner, keys, rows, owners))

    def submit_get(self, keys: Keys, rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks by key, or not."""
        return self._ticket(lambda: self._inner.submit_get(keys, rows))

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys are there, or anything."""
        found = self._break(lambda: self._inner.contains(keys), lambda right: [None, ~right, right[1:], "yes", 1.5])
        return cast("NDArray[np.bool_]", found)

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys are lacked, or anything."""
        found = self._break(lambda: self._inner.lacks(keys), lambda right: [None, ~right, right[1:], "no", 1.5])
        return cast("NDArray[np.bool_]", found)

    def set_quota(self, tenant: bytes, num_blocks: int | None) -> None:
        """Limit the blocks of a tenant in the store below, or raise anything."""
        self._break(lambda: self._inner.set_quota(tenant, num_blocks), lambda done: [done])

    def quota(self, tenant: bytes) -> tuple[int, int] | None:
        """Return what the store below says of a tenant, or raise anything."""
        found = self._break(lambda: self._inner.quota(tenant), lambda right: [right])
        return cast("tuple[int, int] | None", found)

    def poll(self) -> list[int]:
        """Return tickets that finished, or anything."""
        answer = self._break(self._inner.poll, lambda found: [None, [*found, *found, 1 << 70, -1], ["x"], found[1:], 7])
        return cast("list[int]", answer)

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket, or not."""
        return cast("Completion", self._break(lambda: self._inner.wait(ticket, timeout), _misshapen))

    def stats(self) -> StoreStats:
        """Return the counters of the store below."""
        return self._inner.stats()

    def close(self, timeout: float = 5.0) -> bool:
        """Close the store below."""
        return self._inner.close(timeout)

    def _ticket(self, call: Callable[[], int]) -> int:
        self._last = self._break(call, lambda found: [None, str(found), 0.5, self._last, found + (1 << 40)])
        return cast("int", self._last)

    def _break(self, call: Callable[[], Any], others: Callable[[Any], Sequence[Any]]) -> Any:
        """Make a call; or raise before it, or after it, or answer with something else."""
        how = self._random.choice(("before", "after", "other")) if self._random.random() < self._share else ""
        self.broken += bool(how)
        if how == "before":
            raise self._random.choice(_ERRORS)
        found = call()
        if how == "after":
            raise self._random.choice(_ERRORS)
        return self._random.choice(others(found)) if how else found


class FailingStore(ExternalStore):
    """A prefix store that fails as storage does: what uses one must lose hits alone, never tokens, and never wait long.

    Args:
        inner: a store with keys that works.
        timeout: seconds after which what hangs is given up.

    Attributes:
        fault: what goes wrong from now on. `"lose"`: it says that it has a key, and then has not. `"refuse"`: every
            call that reads or writes raises StoreError. `"hang"`: reads and writes come back as misses, at the
            deadline. Empty: nothing.
        faults: calls that went wrong.

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
        self._inner, self._timeout = inner, timeout
        self._late: dict[int, float] = {}
        self._ended: list[int] = []  # tickets that the store below has reported, and that are not due
        self.fault: Literal["", "lose", "refuse", "hang"] = ""
        self.faults = 0

    @property
    def num_slots(self) -> int:
        """Blocks that the store can hold."""
        return self._inner.num_slots

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block."""
        return self._inner.bytes_per_block

    def submit_write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """Start to write blocks to slots."""
        return self._submit(lambda: self._inner.submit_write(slots, rows))

    def submit_read(self, slots: NDArray[np.int64], rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks of slots."""
        return self._submit(lambda: self._inner.submit_read(slots, rows))

    @property
    def keeps_quotas(self) -> bool:  # type: ignore[override]
        """Whether the store below keeps quotas."""
        return self._inner.keeps_quotas

    def submit_put(self, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None = None) -> int:
        """Start to store blocks under keys."""
        return self._submit(lambda: _put(self._inner, keys, rows, owners))

    def submit_get(self, keys: Keys, rows: NDArray[np.uint8] | None = None) -> int:
        """Start to read blocks by key."""
        if self.fault == "lose":
            # Names that nobody has stored.
            keys = [os.urandom(32) for _ in keys]
        return self._submit(lambda: self._inner.submit_get(keys, rows))

    def submit_delete(self, keys: Keys) -> int:
        """Start to delete keys."""
        return self._submit(lambda: self._inner.submit_delete(keys))

    def contains(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each key has a block, or claim it."""
        found = self._inner.contains(keys)
        return np.ones_like(found) if self.fault == "lose" else found

    def lacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether each key is known to be a miss, or deny it."""
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
        """Return what counts towards a tenant's quota, and the quota."""
        self._require_answer()
        return self._inner.quota(tenant)

    def event_fd(self) -> int:
        """Return the descriptor of the store below."""
        return self._inner.event_fd()

    def poll(self) -> list[int]:
        """Return tickets that finished; those that hang when their time is over."""
        now = time.monotonic()
        self._ended += self._inner.poll()
        found = [ticket for ticket in self._ended if self._late.get(ticket, 0.0) <= now]
        self._ended = [ticket for ticket in self._ended if ticket not in found]
        return found

    def wait(self, ticket: int, timeout: float | None = None) -> Completion:
        """Collect a ticket; one that hangs at its deadline, or at the timeout, as misses."""
        until = self._late.pop(ticket, None)
        if until is None:
            return self._inner.wait(ticket, timeout)
        left = until - time.monotonic()
        time.sleep(max(0.0, left if timeout is None else min(timeout, left)))
        answer = self._inner.wait(ticket, timeout)
        missed = np.zeros_like(answer.ok)
        return Completion(ticket, missed, np.zeros_like(answer.rows), ("timeout",) * len(missed))

    def stats(self) -> StoreStats:
        """Return the counters of the store below."""
        return self._inner.stats()

    def close(self, timeout: float = 5.0) -> bool:
        """Close the store below."""
        return self._inner.close(timeout)

    def _require_answer(self) -> None:
        if self.fault in {"refuse", "hang"}:
            self.faults += 1
            raise StoreError("the storage does not answer, on purpose")

    def _submit(self, call: Callable[[], int]) -> int:
        self.faults += bool(self.fault)
        if self.fault == "refuse":
            raise StoreError("the storage refuses, on purpose")
        ticket = call()
        if self.fault == "hang":
            self._late[ticket] = time.monotonic() + self._timeout
        return ticket


def _put(store: ExternalStore, keys: Keys, rows: NDArray[np.uint8], owners: Owners | None) -> int:
    """Put blocks; a store may take no owners where there are none."""
    return store.submit_put(keys, rows) if owners is None else store.submit_put(keys, rows, owners)


def _misshapen(answer: Completion) -> Sequence[object]:
    """Answers like this one, each with something wrong."""
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
