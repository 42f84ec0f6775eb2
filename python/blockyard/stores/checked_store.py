"""`CheckedStore`: wraps an external store so that every batch gets exactly one answer, whatever the store does.

A plug-in may raise any exception, answer with arrays of the wrong shape, or repeat, invent or lose tickets. Each of
these turns a batch into misses, with an error. The log `blockyard.executor` gets at most one line per minute for each
call and class of error.

All values of a store have the same size. With one page class, a block is a value. With several, a block is cut into
equal slices; zeros fill the last one.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion
from blockyard.errors import BlockyardError, InvalidArgumentError, StoreError
from blockyard.layout import ArenaLayout
from blockyard.stores.base import ExternalStore, Owners, Use
from blockyard.stores.log_lines import FailureLog
from blockyard.stores.threaded import ThreadedStore
from blockyard.stores.threaded.runtime import runtime
from blockyard.stores.url import public_repr
from blockyard.types import Histogram
from blockyard.workers.logs import RateLimit, describe
from blockyard.workers.ownership import Claims, Process

if TYPE_CHECKING:
    from blockyard.engine.engine import CacheEngine

__all__ = [
    "Answer",
    "Batch",
    "CheckedStore",
    "PendingBatch",
    "SlicedBatch",
    "Slices",
    "StoreSlots",
    "all_of",
    "bytes_per_value",
    "check_store",
    "slots_per_extent",
]

Rows: TypeAlias = NDArray[np.uint8]
Ids: TypeAlias = NDArray[np.int64]

NOTHING_READ: Final = {"absent", "empty"}
"""Reasons of misses for which the store read no bytes."""
_FAILURES: Final = {"io", "timeout", "unavailable"}
OVERDUE_SECONDS: Final = 600.0
"""A batch that the store does not report within this time is given up."""
_COLLECTED_AT_ONCE: Final = 64
"""Maximum number of batches that one `poll` collects: a store that goes down may report thousands at once."""
_BOOL: Final = np.dtype(np.bool_)
_BYTE: Final = np.dtype(np.uint8)

_log = logging.getLogger("blockyard.executor")
_users = Claims()


class Answer(NamedTuple):
    """The outcome of one batch.

    Attributes:
        ok: whether each block was read or written, bool `[n]`.
        rows: the blocks that were read, uint8 `[n, bytes_per_block]`; empty for writes.
        error: why all blocks are misses, if the store failed instead of answering.
        reasons: the store's reason for each block, if it answered.
    """

    ok: NDArray[np.bool_]
    rows: NDArray[np.uint8]
    error: StoreError | None = None
    reasons: tuple[str, ...] = ()

    @property
    def are_rows_free(self) -> bool:
        """Whether the store has finished with the batch's rows. After a miss, one of its threads may still use them."""
        return self.error is None and are_rows_free(self.ok, self.reasons)


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch submitted to the store; `answer` is set when it ends."""

    what: str
    count: int
    out: NDArray[np.uint8] | None = None
    ticket: int = -1
    since: float = 0.0
    answer: Answer | None = None


def are_rows_free(ok: NDArray[np.bool_], reasons: Sequence[str]) -> bool:
    """Return whether a store has finished with the rows of a batch that it has answered, see `Answer.are_rows_free`."""
    return bool(
        np.count_nonzero(ok) == len(ok)
        or all(good or reason in NOTHING_READ for good, reason in zip(ok, reasons, strict=True))
    )


class CheckedStore:
    """Submits batches to a store and collects them.

    Args:
        store: the external store.
        bytes_per_block: bytes of the engine's blocks.
        use: what the store is used for.

    Attributes:
        num_slots: number of slots of the store.
        max_blocks_in_flight: the store refuses further blocks; None for no limit.
        looks_up_later: whether `contains` may return False for a key that the store has; one without a `lacks` of its
            own cannot say so.
        num_answers: number of answers so far; while it does not change, no waiting batch has ended.
        seconds: how long batches took from submission until their end was noticed, by `"read"` and `"write"`.

    Raises:
        InvalidArgumentError: the store's blocks have another size, it is closed, it is for another use, or it has
            another `CheckedStore` already.
    """

    def __init__(self, store: ExternalStore, bytes_per_block: int, use: Use = "swap") -> None:
        check_store("store", store, bytes_per_block, use)
        limit = store.max_blocks_in_flight
        self.num_slots, self.max_blocks_in_flight = store.num_slots, None if limit is None else max(1, limit)
        self.looks_up_later = type(store).lacks is not ExternalStore.lacks
        self._store = store
        self._runtime = runtime()
        self._process = Process("a connection to a store")
        self._bytes_per_block = bytes_per_block
        self._no_rows = np.zeros((0, bytes_per_block), np.uint8)
        self._open: dict[int, PendingBatch] = {}
        self._ended: dict[int, None] = {}  # open batches that the store has reported as ended
        self._failures = None if isinstance(store, ThreadedStore) else FailureLog()  # which logs its own failures
        self._limit = RateLimit(self._runtime.monotonic)
        self._repeated: set[int] = set()
        self._has_strays = False  # whether the store may have tickets that nobody knows, of interrupted submissions
        self.num_answers = 0
        if not _users.take(store, self):
            raise _used_elsewhere("store", store)
        self.seconds = {"read": Histogram(), "write": Histogram()}

    def disconnect(self) -> None:
        """Let another `CheckedStore` use the store. Idempotent."""
        _users.drop(self._store, self)

    def write(self, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> PendingBatch:
        """Start to write blocks. From now on the store owns the rows: nothing else may write to them.

        Args:
            slots: slots to write, int64 `[n]`.
            rows: the blocks, uint8 `[n, bytes_per_block]`.

        Raises:
            StoreError: the store refused the batch.
        """
        return self._submit(PendingBatch("write", len(slots)), self._store.submit_write, slots, rows)

    def read(self, slots: NDArray[np.int64], out: NDArray[np.uint8]) -> PendingBatch:
        """Start to read blocks into rows; see `write`.

        The store owns the rows until the batch has an answer whose `are_rows_free` is true.
        """
        return self._submit(PendingBatch("read", len(slots), out), self._store.submit_read, slots, out)

    def put(self, keys: NDArray[np.uint8], rows: NDArray[np.uint8], owners: Owners | None = None) -> PendingBatch:
        """Start to store blocks under their keys, uint8 `[n, 32]`; see `write`.

        A store without quotas does not get the owners.
        """
        batch = PendingBatch("put", len(keys))
        if owners is None or not self._store.keeps_quotas:
            return self._submit(batch, self._store.submit_put, keys, rows)
        return self._submit(batch, self._store.submit_put, keys, rows, owners)

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> PendingBatch:
        """Start to read blocks by key, uint8 `[n, 32]`; see `read`."""
        return self._submit(PendingBatch("get", len(keys), out), self._store.submit_get, keys, out)

    def contains(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which keys the store reports to have, bool `[n]`; all False if its answer is invalid."""
        return self._ask(self._store.contains, keys)

    def lacks(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which keys the store reports to lack, bool `[n]`; all False if its answer is invalid."""
        return self._ask(self._store.lacks, keys)

    def _ask(self, call: Callable[[NDArray[np.uint8]], object], keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        self._process.check()
        try:
            found = np.asarray(call(keys))
        except Exception as error:  # noqa: BLE001 (whatever a store raises is a miss)
            if self._may_log("keys", error):
                _log.warning("the store cannot say which of %d keys it has: %s", len(keys), describe(error))
            return np.zeros(len(keys), np.bool_)
        return found if found.dtype == _BOOL and found.shape == (len(keys),) else np.zeros(len(keys), np.bool_)

    @property
    def is_busy(self) -> bool:
        """Whether any batch is open."""
        return bool(self._open) or self._has_strays

    def poll(self) -> None:
        """Collect the answers of ended batches, at most `_COLLECTED_AT_ONCE` per call; never waits."""
        if not self.is_busy:
            return
        self._process.check()
        for ticket in self._reported():
            if ticket in self._open:
                self._ended[ticket] = None
            elif self._has_strays:
                self._let_go(ticket)
        for ticket in list(islice(self._ended, _COLLECTED_AT_ONCE)):
            self._collect(self._open[ticket], 0.0)

    def wait(self, batch: PendingBatch) -> None:
        """Wait until a batch has an answer."""
        if batch.answer is None:
            self._collect(batch, max(0.0, batch.since + OVERDUE_SECONDS - self._runtime.monotonic()))

    def give_up_all(self, *, waits: bool) -> None:
        """After an exception has ended a call: end all open batches.

        The store may have collected a batch for that call, which then counts as lost, or have one whose ticket nobody
        knows: that is let go when it ends. May be called again.

        Args:
            waits: wait for each batch, at most until its deadline; otherwise all count as lost.
        """
        self._has_strays = True
        for batch in list(self._open.values()):
            if waits:
                self.wait(batch)
            else:
                self._let_go(batch.ticket)
                self._take_in(batch, StoreError("a call was interrupted"))
        self._open.clear()
        self._ended.clear()

    def _submit(self, batch: PendingBatch, call: Callable[..., object], *arguments: object) -> PendingBatch:
        self._process.check()
        batch.since = self._runtime.monotonic()
        try:
            batch.ticket = operator.index(call(*arguments))  # type: ignore[arg-type]
        except Exception as error:
            # A store that raises a BlockyardError has issued no ticket. After a MemoryError it may have.
            self._has_strays = self._has_strays or not isinstance(error, BlockyardError)
            raise self._refusal(batch, error) from error
        other = self._open.get(batch.ticket)
        if other is not None or batch.ticket in self._repeated:
            # It is unknown whose blocks this ticket stands for, so it is never used again.
            twice = StoreError(f"the store has issued ticket {batch.ticket} twice")
            self._repeated.add(batch.ticket)
            if other is not None:
                self._take_in(other, twice)
            raise self._refusal(batch, twice)
        self._open[batch.ticket] = batch
        return batch

    def _reported(self) -> list[int]:
        """Return the tickets that the store reports as ended, and the overdue ones."""
        try:
            found = [operator.index(ticket) for ticket in self._store.poll()]
        except Exception as error:  # noqa: BLE001 (whatever a store raises is a miss)
            if self._may_log("poll", error):
                given_up, why = len(self._open), describe(error)
                _log.warning("the store cannot be polled, %d batches are given up: %s", given_up, why)
            return list(self._open)
        until = self._runtime.monotonic() - OVERDUE_SECONDS
        overdue = takewhile(lambda ticket: self._open[ticket].since < until, self._open)  # the oldest are first
        return [*found, *overdue]

    def _collect(self, batch: PendingBatch, timeout: float) -> None:
        try:
            answer: object = self._store.wait(batch.ticket, timeout)
        except Exception as error:  # noqa: BLE001 (whatever a store raises is a miss)
            answer = error
            self._let_go(batch.ticket)
        self._take_in(batch, answer)

    def _let_go(self, ticket: int) -> None:
        """Make the store release an answer that is no longer needed."""
        with suppress(Exception):
            self._store.wait(ticket, 0.0)

    def _take_in(self, batch: PendingBatch, answer: object) -> None:
        """Check an answer, and pass it to its batch."""
        checked = self._checked(batch, batch.ticket, answer)
        self.num_answers += 1  # first, so that a caller who polls in between looks again
        batch.answer = checked
        self.seconds["write" if batch.out is None else "read"].observe(self._runtime.monotonic() - batch.since)
        self._ended.pop(batch.ticket, None)
        self._open.pop(batch.ticket, None)

    def _checked(self, batch: PendingBatch, ticket: int, answer: object) -> Answer:
        """Convert the store's answer. If it does not fit the batch, return misses."""
        none = self._no_rows
        if isinstance(answer, Completion):
            rows = none if batch.out is None else answer.rows
            shape = (0 if batch.out is None else batch.count, self._bytes_per_block)
            if (
                answer.ticket == ticket
                and answer.ok.dtype == _BOOL
                and answer.ok.shape == (batch.count,)
                and rows.dtype == _BYTE
                and rows.shape == shape
                and len(answer.reasons) == batch.count
            ):
                # The engine copies from these rows asynchronously, so they must be memory that torch accepts.
                if rows is not none and not rows.flags.carray:
                    rows = np.require(rows, requirements=("C", "W"))
                if self._failures is not None:
                    self._log_failure(self._failures, answer)
                return Answer(answer.ok.copy(), rows, reasons=answer.reasons)
            found = f"ticket {answer.ticket}, ok {_of(answer.ok)}, rows {_of(rows)}, {len(answer.reasons)} reasons"
            wanted = f"ticket {ticket}, ok bool [{batch.count}], rows uint8 {list(shape)}, {batch.count} reasons"
            error: Exception = StoreError(f"the answer has {found}; must have {wanted}")
        elif isinstance(answer, Exception):
            error = answer
        else:
            error = StoreError(f"the answer is a {type(answer).__name__}, must be a Completion")
        return Answer(np.zeros(batch.count, dtype=np.bool_), none, self._refusal(batch, error))

    def _log_failure(self, log: FailureLog, answer: Completion) -> None:
        if np.count_nonzero(answer.ok) == len(answer.ok):
            log.worked()
        elif reasons := _FAILURES.intersection(answer.reasons):
            log.failed(self._cause(reasons))
        log.flush(self._store)

    def _cause(self, reasons: set[str]) -> str:
        """Return why blocks are misses: the store's last error, unless it is older than this failure."""
        with suppress(Exception):  # whatever a store raises
            stats = self._store.stats()
            if stats.last_error and ("io" in reasons or stats.errors_in_a_row):
                return stats.last_error
        return ", ".join(sorted(reasons))

    def _refusal(self, batch: PendingBatch, why: Exception) -> StoreError:
        """Return the error of a lost batch, and log it."""
        error = StoreError(f"{batch.what} of {batch.count} blocks with the external tier is lost: {describe(why)}")
        error.__cause__ = why
        if self._may_log(batch.what, why):
            _log.warning("%s", error)
        return error

    def _may_log(self, call: str, error: Exception) -> bool:
        """Return whether to log a line: at most one per minute for each call and class of error."""
        return self._limit.passes(f"{call} {type(error).__name__}")


def check_store(name: str, store: object, bytes_per_block: int, use: Use) -> None:
    """Check that a store fits an engine, and that nothing else uses it.

    Args:
        name: name of the argument.
        store: what was given.
        bytes_per_block: bytes of the engine's blocks.
        use: what the store is used for.

    Raises:
        InvalidArgumentError: something is wrong; nothing was changed.
    """
    if not isinstance(store, ExternalStore):
        shown = public_repr(store)
        raise InvalidArgumentError(f"{name} is {shown}, must be an ExternalStore, as open_store returns it")
    if store.bytes_per_block != bytes_per_block:
        raise InvalidArgumentError(f"{name} has blocks of {store.bytes_per_block} bytes, must have {bytes_per_block}")
    if store.num_slots < 1:
        raise InvalidArgumentError(f"{name} has {store.num_slots} slots, must have at least 1")
    if use not in store.uses:
        found = f"{store!r:.100}, which is for use {' and '.join(map(repr, store.uses))}"
        raise InvalidArgumentError(f"{name} is {found}, must be opened with use={use!r}")
    if store.is_closed:
        raise InvalidArgumentError(f"{name} is {store!r:.100}, which is closed, must be open")
    if _users.user(store) is not None:
        raise _used_elsewhere(name, store)


def _used_elsewhere(name: str, store: ExternalStore) -> InvalidArgumentError:
    # Each user polls the store, and would take the other's tickets.
    return InvalidArgumentError(
        f"{name} is {store!r:.100}, which another cache, executor or prefix store uses, must be this one's alone"
    )


def _of(array: NDArray[np.generic]) -> str:
    return f"{array.dtype} {list(array.shape)}"


# ---- blocks as values, or as equal slices of blocks of several page classes ----


def bytes_per_value(engine: CacheEngine) -> int:
    """Return the size of the values in which an engine's blocks are stored."""
    layout = engine.layout
    return layout.bytes_per_value if isinstance(layout, ArenaLayout) else layout.bytes_per_block


def slots_per_extent(layout: ArenaLayout, per_extent: list[int]) -> int:
    """Return how many values an extent takes, whichever class has it; `per_extent` are each class's blocks in it."""
    sizes = (page.bytes_per_block for page in layout.pages)
    return max(blocks * -(-size // layout.bytes_per_value) for blocks, size in zip(per_extent, sizes, strict=True))


@dataclass(slots=True, eq=False)
class SlicedBatch:
    """A batch of blocks whose slices are those of another batch; see `PendingBatch`."""

    slices: PendingBatch
    num_slices: int
    size: int
    _answer: Answer | None = None

    @property
    def since(self) -> float:
        """When it was submitted."""
        return self.slices.since

    @property
    def answer(self) -> Answer | None:
        """The outcome for whole blocks, once it has ended."""
        if self._answer is None and (found := self.slices.answer) is not None:
            self._answer = self._joined(found)
        return self._answer

    def _joined(self, found: Answer) -> Answer:
        count = self.num_slices
        ok = all_of(found.ok, count)
        rows = found.rows
        if len(rows):
            rows = rows.reshape(len(ok), -1)[:, : self.size]
        elif self.slices.out is not None:
            rows = np.empty((0, self.size), np.uint8)
        reasons = found.reasons
        if reasons:
            parts = (found.reasons[at : at + count] for at in range(0, len(reasons), count))
            reasons = tuple(map(_worst, parts))
        return Answer(ok, rows, found.error, reasons)


Batch: TypeAlias = PendingBatch | SlicedBatch


class Slices:
    """How an engine's blocks are cut into the values of a store, and the rows between both.

    Args:
        engine: owner of the blocks, and of the rows.
        store: the store; its blocks are the values.

    Attributes:
        size: bytes of a value.
        block_bytes: bytes of a block of each page class.
        num_slices: number of values that a block of each page class takes.
    """

    def __init__(self, engine: CacheEngine, store: CheckedStore) -> None:
        self.size = bytes_per_value(engine)
        self.block_bytes = np.array([memory.bytes_per_block for memory in engine.memories], np.int64)
        self.num_slices = -(-self.block_bytes // self.size)
        self._store = store
        self._buffers = [memory.buffers for memory in engine.memories]
        self._is_cut = [
            count > 1 or size != self.size for count, size in zip(self.num_slices, self.block_bytes, strict=True)
        ]

    def blocks_in(self, num_bytes: int, page_class: int) -> int:
        """Return how many blocks of a class have at most these bytes, at least 1."""
        return max(1, num_bytes // int(self.block_bytes[page_class]))

    def bytes_of(self, count: int, page_class: int) -> int:
        """Return the bytes of the rows for blocks of a class."""
        return count * int(self.num_slices[page_class]) * self.size

    def take(self, count: int, page_class: int) -> Rows:
        """Return rows for blocks of a class, uint8 `[count, bytes]`, with arbitrary contents; for the other methods."""
        slices, size = int(self.num_slices[page_class]), int(self.block_bytes[page_class])
        rows = self._buffers[page_class].take(count * slices, self.size)
        return rows.reshape(count, -1)[:, :size]

    def give(self, rows: Rows | None, page_class: int) -> None:
        """Return rows, which nobody uses any longer."""
        self._buffers[page_class].give(rows)

    def _whole(self, rows: Rows, page_class: int, *, fills: bool = False) -> Rows:
        """Return the values, uint8 `[n, size]`, whose memory `take` has returned as rows; `fills` writes the zeros."""
        slices = int(self.num_slices[page_class])
        values = np.lib.stride_tricks.as_strided(rows, (len(rows) * slices, self.size), (self.size, 1))
        if fills:
            values.reshape(len(rows), -1)[:, rows.shape[1] :] = 0
        return values


class StoreSlots(Slices):
    """Reads and writes blocks in the slots of a swap store.

    With one page class, a block's id is its slot. With several, the slots are cut into extents as the manager's
    external tier is, and a block has `num_slices` slots of its extent.

    Raises:
        InvalidArgumentError: a block's slots cannot be in flight together.
    """

    def __init__(self, engine: CacheEngine, store: CheckedStore) -> None:
        super().__init__(engine, store)
        limit, widest = store.max_blocks_in_flight, int(self.num_slices.max())
        if limit is not None and limit < widest:
            raise InvalidArgumentError(
                f"store can have {limit} values of {self.size} bytes in flight, must be at least {widest}: those of a "
                "block"
            )
        self._per_extent = [memory.per_extent for memory in engine.memories]
        self._extent = 1
        if isinstance(layout := engine.layout, ArenaLayout) and len(layout.pages) > 1:
            self._extent = slots_per_extent(layout, self._per_extent)
        self._num_extents = store.num_slots // self._extent

    def num_blocks(self, page_class: int) -> int:
        """Return how many blocks of a class the store has if that class has all extents."""
        return self._num_extents * self._per_extent[page_class]

    def read(self, blocks: Ids, rows: Rows, page_class: int) -> Batch:
        """Start to read blocks of a class; see `CheckedStore.read`."""
        if not self._is_cut[page_class]:
            return self._store.read(self._slots_of(blocks, page_class), rows)
        batch = self._store.read(self._slots_of(blocks, page_class), self._whole(rows, page_class))
        return SlicedBatch(batch, int(self.num_slices[page_class]), rows.shape[1])

    def write(self, blocks: Ids, rows: Rows, page_class: int) -> Batch:
        """Start to write blocks of a class; see `CheckedStore.write`."""
        if not self._is_cut[page_class]:
            return self._store.write(self._slots_of(blocks, page_class), rows)
        batch = self._store.write(self._slots_of(blocks, page_class), self._whole(rows, page_class, fills=True))
        return SlicedBatch(batch, int(self.num_slices[page_class]), rows.shape[1])

    def wait(self, batch: Batch) -> None:
        """Wait until a batch has an answer."""
        self._store.wait(batch.slices if isinstance(batch, SlicedBatch) else batch)

    def _slots_of(self, blocks: Ids, page_class: int) -> Ids:
        if self._extent == 1:
            return blocks
        extents, within = np.divmod(blocks, self._per_extent[page_class])
        slices = int(self.num_slices[page_class])
        first = extents * self._extent + within * slices
        slots: Ids = (first[:, None] + np.arange(slices)).reshape(-1)
        return slots


def all_of(found: NDArray[np.bool_], slices: int) -> NDArray[np.bool_]:
    """Return whether all slices of each block are found."""
    return np.asarray(found.reshape(-1, slices).all(axis=1), np.bool_)


def _worst(reasons: tuple[str, ...]) -> str:
    """Return why a block is a miss: of several reasons, one for which the store may still use its rows."""
    found = [reason for reason in reasons if reason]
    return next((reason for reason in found if reason not in NOTHING_READ), found[0] if found else "")
