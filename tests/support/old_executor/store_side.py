"""An external tier as the executor needs it: whatever the store does, every batch ends, once.

A plug-in may raise anything, answer with arrays of another shape, repeat, invent or lose tickets. Each of these is a
batch of misses, with its error and one line in the log `blockyard.executor`.
"""

from __future__ import annotations

import logging
import operator
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard._core import Completion
from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.stores.base import ExternalStore

__all__ = ["Answer", "Batch", "StoreSide"]

OVERDUE_SECONDS: Final = 600.0
"""A batch that the store has not reported by then is given up."""

_log = logging.getLogger("blockyard.executor")


class Answer(NamedTuple):
    """What became of one batch.

    Attributes:
        ok: whether each block came back or went in, bool `[n]`.
        rows: the blocks that were read, uint8 `[n, bytes_per_block]`; of no use for writes.
        error: why all of them are misses, if it is not the storage that says so.
    """

    ok: NDArray[np.bool_]
    rows: NDArray[np.uint8]
    error: StoreError | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that the store has; `ended` is for the caller to call with its answer."""

    owner: object
    what: str
    count: int
    ended: Callable[[Answer], None]
    since: float = field(default_factory=time.monotonic)


class StoreSide:
    """Submits batches to a store and collects them.

    Args:
        store: the external tier.
        bytes_per_block: of the engine's blocks.

    Raises:
        InvalidArgumentError: the store's blocks have another size.
    """

    def __init__(self, store: ExternalStore, bytes_per_block: int) -> None:
        if store.bytes_per_block != bytes_per_block:
            raise InvalidArgumentError(
                f"the store's blocks have {store.bytes_per_block} bytes, those of the engine's layout {bytes_per_block}"
            )
        self.num_slots = store.num_slots
        self._store = store
        self._bytes_per_block = bytes_per_block
        self._open: dict[int, Batch] = {}
        self._answers: list[tuple[int, object]] = []
        self._given_up: set[int] = set()
        self._repeated: set[int] = set()

    def write(
        self, owner: object, slots: NDArray[np.int64], rows: NDArray[np.uint8], ended: Callable[[Answer], None]
    ) -> None:
        """Start to write blocks; the store copies the rows before this returns.

        Args:
            owner: whom `ticket_of` asks for.
            slots: where to, int64 `[n]`.
            rows: uint8 `[n, bytes_per_block]`.
            ended: `poll` gives it back with what became of the batch.

        Raises:
            StoreError: the store did not take it.
        """
        self._submit(Batch(owner, "write", len(slots), ended), partial(self._store.submit_write, slots, rows))

    def read(self, owner: object, slots: NDArray[np.int64], ended: Callable[[Answer], None]) -> None:
        """Start to read blocks; see `write`."""
        self._submit(Batch(owner, "read", len(slots), ended), partial(self._store.submit_read, slots))

    def poll(self) -> list[tuple[Batch, Answer]]:
        """Collect the batches that have ended; never waits."""
        if not self._open and not self._given_up:
            return []
        found, self._answers = self._answers, []
        for ticket in self._reported():
            if ticket in self._open or ticket in self._given_up:
                found.append((ticket, self._collect(ticket)))
                self._given_up.discard(ticket)
        ended = []
        for ticket, answer in found:
            batch = self._open.pop(ticket, None)
            if batch is not None:
                ended.append((batch, self._checked(batch, ticket, answer)))
        return ended

    def ticket_of(self, owner: object | None) -> int | None:
        """Give a ticket that the store has not answered: one of an owner, or any if None."""
        return next((ticket for ticket, batch in self._open.items() if owner in {None, batch.owner}), None)

    def wait(self, ticket: int) -> None:
        """Wait until a batch has ended, which `poll` gives then. After an interrupt it can be called again."""
        left = max(0.0, self._open[ticket].since + OVERDUE_SECONDS - time.monotonic())
        try:
            # Run by C code as a whole, so no interrupt can come between the store's answer and the list.
            self._answers.extend(zip((ticket,), map(self._store.wait, (ticket,), (left,)), strict=True))
        except Exception as error:  # noqa: BLE001 (whatever a store raises is a miss)
            self._answers.append((ticket, error))

    def give_up(self) -> None:
        """Forget all batches; what the store answers to them is collected and dropped."""
        self._given_up.update(self._open)
        self._open = {}
        self._answers = []

    def _submit(self, batch: Batch, call: Callable[[], object]) -> None:
        try:
            ticket = operator.index(call())  # type: ignore[arg-type]
        except Exception as error:
            raise self._refusal(batch, error) from error
        if ticket in self._open or ticket in self._given_up or ticket in self._repeated:
            # Whose blocks the store will hand over is not known, now and under this number for good.
            twice = StoreError(f"the store has issued ticket {ticket} twice")
            self._repeated.add(ticket)
            self._answers.append((ticket, twice))
            raise self._refusal(batch, twice)
        self._open[ticket] = batch

    def _reported(self) -> list[int]:
        """Tickets that the store calls ended, and those for which it has had its time."""
        try:
            found = [operator.index(ticket) for ticket in self._store.poll()]
        except Exception as error:  # noqa: BLE001 (whatever a store raises is a miss)
            _log.warning("the store cannot be polled, %d batches are given up: %s", len(self._open), _describe(error))
            return [*self._open, *self._given_up]
        until = time.monotonic() - OVERDUE_SECONDS
        found += [ticket for ticket, batch in self._open.items() if batch.since < until]
        return list(dict.fromkeys(found))

    def _collect(self, ticket: int) -> object:
        try:
            return self._store.wait(ticket, 0.0)
        except Exception as error:  # noqa: BLE001 (whatever a store raises is a miss)
            return error

    def _checked(self, batch: Batch, ticket: int, answer: object) -> Answer:
        """Take an answer whose arrays are those of the batch, and no other."""
        none = np.zeros((0, self._bytes_per_block), dtype=np.uint8)
        if isinstance(answer, Completion):
            rows = answer.rows if batch.what == "read" else none
            shape = (batch.count if batch.what == "read" else 0, self._bytes_per_block)
            if (
                answer.ticket == ticket
                and answer.ok.dtype == np.bool_
                and answer.ok.shape == (batch.count,)
                and rows.dtype == np.uint8
                and rows.shape == shape
                and len(answer.reasons) == batch.count
            ):
                # What the engine copies from while the caller goes on must be memory that torch takes.
                rows = rows if rows.flags.carray else np.require(rows, requirements=("C", "W"))
                return Answer(answer.ok.copy(), rows)
            found = f"ticket {answer.ticket}, ok {_of(answer.ok)}, rows {_of(rows)}, {len(answer.reasons)} reasons"
            wanted = f"ticket {ticket}, ok bool [{batch.count}], rows uint8 {list(shape)}, {batch.count} reasons"
            error: Exception = StoreError(f"the answer has {found}; {wanted} is needed")
        elif isinstance(answer, Exception):
            error = answer
        else:
            error = StoreError(f"the answer is a {type(answer).__name__}, a Completion is needed")
        return Answer(np.zeros(batch.count, dtype=np.bool_), none, self._refusal(batch, error))

    def _refusal(self, batch: Batch, why: Exception) -> StoreError:
        """Log that a batch is lost, once."""
        error = StoreError(f"{batch.what} of {batch.count} blocks with the external tier is lost: {_describe(why)}")
        error.__cause__ = why
        _log.warning("%s", error)
        return error


def _describe(error: Exception) -> str:
    """Its class and message on one line, even if it cannot be turned into text."""
    return " ".join("".join(traceback.format_exception_only(error)).split())


def _of(array: NDArray[np.generic]) -> str:
    return f"{array.dtype} {list(array.shape)}"
