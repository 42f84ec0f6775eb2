"""`Storage`: what a store asks of its storage: the functions that a plug-in or a store on a server has."""

from abc import ABC, abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import StoreError
from blockyard.stores.base import Owners, no_keys_error
from blockyard.stores.value import HEADER, Bytes, answered, reasons_of

__all__ = ["EPOCH_BYTES", "Storage"]

EPOCH_BYTES: Final = 64


class Storage(ABC):
    """Blocks by name. Worker threads call the methods, which may block or raise."""

    num_slots: int = 0

    _value_bytes = 0  # maximum size of a block with its header

    @abstractmethod
    def put(self, keys: Bytes, rows: Bytes) -> NDArray[np.bool_]:
        """Store blocks under their keys, replacing existing ones. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`, no repeats. No other call uses these keys, unless it missed its deadline.
            rows: the rows to store, uint8 `[n, width]`; only this call uses them, and it may keep them. `width` is
                `bytes_per_block`, except in a prefix store or with a codec or a MAC key.

        Returns:
            Whether each block was stored, bool `[n]`; False is a miss, `"refused"`.
        """

    def put_blocks(self, keys: Bytes, rows: Bytes, owners: Owners | None, damaged: set[bytes]) -> NDArray[np.bool_]:  # noqa: ARG002
        """Store the blocks of a prefix store. The default calls `put`.

        Args:
            keys: as for `put`.
            rows: as for `put`.
            owners: the tenants, for a store that `keeps_quotas`, with the names of the parents.
            damaged: keys whose values must be replaced: the last read of each was damaged. Others may be kept.
        """
        return self.put(keys, rows)

    @abstractmethod
    def get(self, keys: Bytes, out: Bytes) -> NDArray[np.bool_] | list[str]:
        """Read blocks by their keys. Runs in a worker thread; may block or raise.

        Args:
            keys: uint8 `[n, 32]`, repeats allowed. Names of slots were put before; other names may be absent.
            out: receives the rows, uint8 `[n, width]`, with arbitrary content; do not write to it after returning. If a
                stored row has another width, return True and leave the row unchanged.

        Returns:
            Whether each block was found, bool `[n]`; False is a miss, `"absent"`. Or a list of the reasons, `""` for
            blocks that were found.
        """

    def delete(self, keys: Bytes) -> None:  # noqa: ARG002 (a store with keys has its own)
        """Delete blocks; ignore absent ones. A plug-in that overrides this method can be a prefix store.

        Args:
            keys: uint8 `[n, 32]`, no repeats.
        """
        raise no_keys_error()

    def has(self, keys: Bytes) -> NDArray[np.bool_]:
        """Return whether each key has a block, bool `[n]`. The default reads the blocks one by one.

        Args:
            keys: uint8 `[n, 32]`.
        """
        row = np.zeros((1, self._value_bytes), np.uint8)
        return np.array([not reasons_of(self.get(key[None], row), 1)[0] for key in keys], np.bool_)

    def read_epoch(self, key: Bytes) -> Bytes | None:
        """Return the row that identifies the valid blocks, uint8 `[192]`; None if it is absent.

        The default calls `get`, and treats `LookupError` and `FileNotFoundError` as absent. While it raises anything
        else, the store finds and stores nothing. Runs in a worker thread; may block or raise.

        Args:
            key: key of the row, uint8 `[32]`.
        """
        row = np.zeros((1, HEADER + EPOCH_BYTES), np.uint8)
        try:
            why = reasons_of(self.get(key[None], row), 1)[0]
        except (LookupError, FileNotFoundError):
            return None
        if why not in {"", "absent"}:
            raise StoreError(f"get answers {why!r} for the epoch's record")
        return None if why else row[0]

    def replace_epoch(self, key: Bytes, old: Bytes | None, new: Bytes) -> Bytes | None:
        """Replace that row if it equals `old`, atomically across processes. `forget` calls this.

        The default is safe only within one store object. Override it in a plug-in that several processes use at the
        same time. Runs in a worker thread; may block or raise.

        Args:
            key: key of the row, uint8 `[32]`.
            old: the expected row, uint8 `[192]`; None if it must be absent.
            new: the new row, uint8 `[192]`.

        Returns:
            The row that is stored afterwards.

        Raises:
            StoreError: the storage has no atomic replacement.
        """
        there = self.read_epoch(key)
        if (None if there is None else there.tobytes()) != (None if old is None else old.tobytes()):
            return there
        if not answered("put", self.put(key[None], new[None]), 1)[0]:
            raise StoreError("put refused the epoch's record")
        return new
