"""The values of a prefix store: blocks, or equal slices of blocks of several page classes.

All values of a store have the same size. With one page class, a block is a value. With several, a block is cut into
slices; zeros fill the last one. The first slice has the block's key, and slice `i` that key with `i` xored into its
last four bytes. The parent of a slice is the one before it, and that of the first is the last slice of the block's
parent. So a store that evicts what nothing follows takes a block from its end. A block is found if its first and last
slices are and none is known to be missing; only a read of all of them proves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.layout import ArenaLayout
from blockyard.stores.base import Owners
from blockyard.stores.checked_store import Batch, CheckedStore, SlicedBatch, Slices, all_of

if TYPE_CHECKING:
    from blockyard._core import StoreJob
    from blockyard.engine.engine import CacheEngine

__all__ = ["Values"]

Rows: TypeAlias = NDArray[np.uint8]
Ids: TypeAlias = NDArray[np.int64]

_KEEPING = frozenset(("full_attention", "drafter"))  # groups that keep every block, on the first of which others hang


class Values(Slices):
    """Reads and writes blocks as values.

    Args:
        engine: owner of the blocks, and of the rows between them and the store.
        store: the store; its blocks are the values.
        max_bytes: maximum bytes in flight in each direction.

    Attributes:
        most: maximum number of values in flight in each direction.

    Raises:
        InvalidArgumentError: a block's values cannot be in flight together.
    """

    def __init__(self, engine: CacheEngine, store: CheckedStore, max_bytes: int) -> None:
        super().__init__(engine, store)
        self.most = max_bytes // self.size
        if store.max_blocks_in_flight is not None:
            self.most = min(self.most, max(1, store.max_blocks_in_flight // 2))
        if self.most < (widest := int(self.num_slices.max())):
            raise InvalidArgumentError(
                f"max_staging is {max_bytes}, and the store takes {store.max_blocks_in_flight} values at once: "
                f"{self.most} values of {self.size} bytes can be in flight, must be at least {widest}, those of a block"
            )
        self._is_whole = not any(self._is_cut)
        self._last_of_parent = 0  # the number of a parent's last slice
        layout = engine.layout
        if isinstance(layout, ArenaLayout):
            keeping = (at for at, (group, _) in enumerate(layout.groups) if group.kind in _KEEPING)
            if (anchor := next(keeping, None)) is not None:
                self._last_of_parent = int(self.num_slices[layout.page_class(anchor)]) - 1

    def get(self, keys: Rows, rows: Rows, page_class: int) -> Batch:
        """Start to read blocks of a class, by key, uint8 `[n, 32]`; see `CheckedStore.get`."""
        if not self._is_cut[page_class]:
            return self._store.get(keys, rows)
        slices = int(self.num_slices[page_class])
        batch = self._store.get(_slices_of(keys, slices), self._whole(rows, page_class))
        return SlicedBatch(batch, slices, rows.shape[1])

    def put(self, job: StoreJob, rows: Rows) -> tuple[Batch | None, NDArray[np.bool_]]:
        """Start to store the blocks of a write that the store lacks. See `CheckedStore.put`.

        Returns:
            The batch, None if the store lacks no block; and which blocks are in it, bool `[n]`.
        """
        keys, owners, page_class = job.keys, Owners(job.tenants, job.parents), job.page_class
        slices = int(self.num_slices[page_class])
        is_new = ~self._has_all(keys, slices)
        num_new = np.count_nonzero(is_new)
        if not num_new:
            return None, is_new
        size, is_cut = rows.shape[1], self._is_cut[page_class]
        if is_cut:
            rows = self._whole(rows, page_class, fills=True).reshape(len(keys), -1)
        if num_new < len(keys):
            keys, rows, owners = keys[is_new], rows[is_new], Owners(*(of[is_new] for of in owners))
        owners = Owners(owners.tenants, self._last_slices(owners.parents))
        if not is_cut:
            return self._store.put(keys, rows, owners), is_new
        names = _slices_of(keys, slices)
        before = np.concatenate((owners.parents[:, None], names.reshape(-1, slices, 32)[:, :-1]), axis=1)
        owners = Owners(np.repeat(owners.tenants, slices, axis=0), before.reshape(-1, 32))
        return SlicedBatch(self._store.put(names, rows.reshape(-1, self.size), owners), slices, size), is_new

    def has(self, job: StoreJob) -> bool:
        """Return whether the store has all blocks of a write."""
        return bool(self._has_all(job.keys, int(self.num_slices[job.page_class])).all())

    def lacks_parents(self, parents: Rows) -> NDArray[np.bool_]:
        """Return before which blocks the store is known to lack the one, by its key or zeros, bool `[n]`."""
        return self._store.lacks(self._last_slices(parents)) & parents.any(axis=1)

    def _last_slices(self, parents: Rows) -> Rows:
        """Return the keys of the last slices of blocks before others; zeros stay."""
        if not self._last_of_parent:
            return parents
        has_parent = parents.any(axis=1)
        parents = np.array(parents, order="C")
        parents[has_parent] = _marked(parents[has_parent], np.full(has_parent.sum(), self._last_of_parent))
        return parents

    def contains(self, keys: Rows, page_classes: Ids) -> NDArray[np.bool_]:
        """Return which blocks the store seems to have, bool `[n]`."""
        if self._is_whole:
            return self._store.contains(keys)
        counts = self.num_slices[page_classes]
        found = self._store.contains(_marked(keys, counts - 1))
        several = np.flatnonzero(found & (counts > 1))
        if len(several):
            found[several] = self._store.contains(keys[several]) & ~self._lacks_some(keys[several], counts[several])
        return found

    def lacks(self, keys: Rows, page_classes: Ids) -> NDArray[np.bool_]:
        """Return which blocks the store is known to lack, bool `[n]`."""
        if self._is_whole:
            return self._store.lacks(keys)
        counts = self.num_slices[page_classes]
        lacking = self._store.lacks(_marked(keys, counts - 1))
        several = np.flatnonzero(~lacking & (counts > 1))
        if len(several):
            lacking[several] = self._store.lacks(keys[several])
            # Most places of a prompt have no state: do not look at all slices of these.
            there = several[self._store.contains(_marked(keys[several], counts[several] - 1))]
            if len(there):
                lacking[there] |= self._lacks_some(keys[there], counts[there])
        return lacking

    def _has_all(self, keys: Rows, slices: int) -> NDArray[np.bool_]:
        """Return which blocks of one class the store has all slices of."""
        if slices == 1:
            return self._store.contains(keys)
        return all_of(self._store.contains(_slices_of(keys, slices)), slices)

    def _lacks_some(self, keys: Rows, counts: Ids) -> NDArray[np.bool_]:
        """Return which blocks the store is known to lack a slice of."""
        ends = np.cumsum(counts)
        numbers = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        lacking = self._store.lacks(_marked(np.repeat(keys, counts, axis=0), numbers))
        some: NDArray[np.bool_] = np.logical_or.reduceat(lacking, ends - counts)
        return some


def _marked(keys: Rows, numbers: Ids) -> Rows:
    """Return the keys of slices."""
    marked = np.array(keys, order="C")
    marked.view("<u4")[:, -1] ^= numbers.astype(np.uint32)
    return marked


def _slices_of(keys: Rows, slices: int) -> Rows:
    """Return the keys of all slices of blocks that have as many."""
    return _marked(np.repeat(keys, slices, axis=0), np.tile(np.arange(slices), len(keys)))
