"""Byte quotas of tenants in a prefix store: which keys of whom this process has put there or found there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from blockyard._core import StoreJob

__all__ = ["StoreQuotas", "entries_of"]


class StoreQuotas:
    """Keys of tenants with quotas, and which of them must go; of other tenants it knows nothing.

    Args:
        bytes_per_block: bytes that each key counts for.
    """

    def __init__(self, bytes_per_block: int) -> None:
        self._size = bytes_per_block
        self._most: dict[int, int | None] = {}  # blocks that each tenant may keep, by its number
        self._keys: dict[int, dict[bytes, None]] = {}  # least recently used first

    def set_quota(self, tenant: int, num_bytes: int | None) -> list[bytes]:
        """Limit a tenant; returns the keys that must go."""
        self._most[tenant] = None if num_bytes is None else num_bytes // self._size
        self._keys.setdefault(tenant, {})
        return self._shrink(tenant)

    def quota(self, tenant: int) -> tuple[int, int | None]:
        """Return the bytes that a tenant keeps, and the most that it may, in whole blocks."""
        most = self._most[tenant]
        return len(self._keys[tenant]) * self._size, None if most is None else most * self._size

    def takes(self, tenant: int) -> bool:
        """Return whether a block of a tenant may go to the store."""
        return self._most.get(tenant) != 0

    def use(self, entries: Iterable[tuple[int, bytes]]) -> list[bytes]:
        """Count keys, by tenant, as the last used ones. Returns those that must go."""
        gone: list[bytes] = []
        for tenant, key in entries:
            keys = self._keys.get(tenant)
            if keys is not None:
                keys.pop(key, None)
                keys[key] = None
                gone += self._shrink(tenant)
        return gone

    def drop(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Count keys no more, by tenant."""
        for tenant, key in entries:
            self._keys.get(tenant, {}).pop(key, None)

    def clear(self) -> None:
        """Count nothing; quotas stay."""
        for keys in self._keys.values():
            keys.clear()

    def _shrink(self, tenant: int) -> list[bytes]:
        keys, most = self._keys[tenant], self._most[tenant]
        gone = []
        while most is not None and len(keys) > most:
            gone.append(next(iter(keys)))
            del keys[gone[-1]]
        return gone


def entries_of(job: StoreJob, chosen: NDArray[np.bool_]) -> list[tuple[int, bytes]]:
    """The tenant and key of each chosen block that has a tenant, last to first: the end of a chain is to go first."""
    chosen = chosen & (job.tenants > 0)
    return [
        (tenant, key.tobytes()) for tenant, key in zip(job.tenants[chosen][::-1], job.keys[chosen][::-1], strict=True)
    ]
