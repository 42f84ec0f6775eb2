"""`Values`: writes the values of blocks to a storage, reads and checks them, and lends their memory."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockyard.stores.base import Owners
from blockyard.stores.threaded.value_format import ValueFormat
from blockyard.stores.value import HEADER, Bytes, answered, reasons_of
from blockyard.workers.buffers import Buffers

__all__ = ["Values"]


class ValueStorage(Protocol):
    """Storage for values; see `ThreadedStore`."""

    def put(self, keys: Bytes, rows: Bytes) -> NDArray[np.bool_]:
        """Store the rows of slots; return whether each was stored."""

    def put_blocks(self, keys: Bytes, rows: Bytes, owners: Owners | None, damaged: set[bytes]) -> NDArray[np.bool_]:
        """Store the rows of blocks; return whether each was stored."""

    def get(self, keys: Bytes, out: Bytes) -> NDArray[np.bool_] | list[str]:
        """Read rows; return whether each was found, or the reasons."""


class Values:
    """The values of a store. Thread-safe; calls to the storage may block.

    Args:
        storage: holds the values.
        form: their format.
        buffers: the memory for them.
        reuses_rows: whether rows are free for reuse once `put` has returned.

    Attributes:
        format: as given, `form`.
        reuses_rows: as given; a storage may learn it late.
    """

    def __init__(self, storage: ValueStorage, form: ValueFormat, buffers: Buffers, *, reuses_rows: bool) -> None:
        self._storage, self.format, self._buffers = storage, form, buffers
        self.reuses_rows = reuses_rows

    def seal(self, rows: Bytes, keys: list[bytes]) -> tuple[Bytes, list[str]]:
        """Copy blocks into values in our own memory. Returns the values, and each block's reason if it has none."""
        shape = len(keys), self.format.width
        # A buffer that is never given back is fresh pages each time, which takes longer than the rest of a put.
        values = self._buffers.take(*shape) if self.reuses_rows else np.empty(shape, np.uint8)
        return values, self.format.seal(rows, keys, values)

    def put(
        self,
        names: Bytes,
        rows: Bytes,
        reasons: list[str],
        owners: Owners | None = None,
        damaged: set[bytes] | None = None,
    ) -> None:
        """Put the rows without a reason, and set the reasons of refused ones. Rows of slots have no `damaged`."""
        good = [index for index, reason in enumerate(reasons) if not reason]
        if not good:
            return
        if len(good) < len(rows):
            names, rows = names[good], rows[good]
            owners = None if owners is None else Owners(owners.tenants[good], owners.parents[good])
        storage = self._storage
        found = storage.put(names, rows) if damaged is None else storage.put_blocks(names, rows, owners, damaged)
        for index, stored in zip(good, answered("put", found, len(good)), strict=True):
            reasons[index] = "" if stored else "refused"

    def give(self, values: Bytes, reasons: list[str]) -> None:
        """Return the memory of values to the pool, if nothing refers to it."""
        if self.reuses_rows and not any(reasons):
            self._buffers.give(values)

    def fetch(self, names: Bytes, keys: list[bytes]) -> tuple[Bytes, list[str], Bytes]:
        """Read values. Returns their blocks, a reason for each, and what was read, see `ValueFormat.check`."""
        values = self._buffers.take(len(keys), self.format.width)
        values[:, :HEADER] = 0
        missed = reasons_of(self._storage.get(names, values), len(names))
        checked, sums = self.format.check(values, keys)
        reasons = [why or reason for why, reason in zip(missed, checked, strict=True)]
        if self.format.codec is None:
            return values[:, HEADER:], reasons, sums
        rows = self._buffers.take(len(keys), self.format.bytes_per_block)
        self.format.decode(self.format.codec, values, reasons, rows)
        self._buffers.give(values)
        return rows, reasons, sums
