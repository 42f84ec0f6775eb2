"""Host memory in units: a key takes as many as a block of its cache group has bytes for.

vLLM gives all cache groups blocks of one width, that of the widest group. A group with fewer layers, or with pages of
fewer bytes, leaves the rest of its blocks unused. On the host such a block takes fewer units, which need not lie side
by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadKey, get_offload_group_idx

from blockyard.errors import InvalidArgumentError
from blockyard.offload import OffloadManager
from blockyard.workers.interrupts import keep

__all__ = ["BlockPieces", "PreparedUnits", "UnitOffload", "Units", "pages_of", "units_of"]

_MOST_UNITS: Final = 64
"""Maximum number of units in a block of the widest group: each is an entry of the manager and a piece of a copy."""
_UNIT_COST: Final = 1 / 2048
"""Bytes that a further unit of a block must save, over those of a block of the widest group."""
_ALIGNMENT: Final = 16
"""Bytes of which a unit is a multiple, so that copies move wide words."""


class Units(NamedTuple):
    """How many units a block of each cache group takes.

    Attributes:
        unit_bytes: bytes of a unit.
        counts: units of a block, by vLLM's number of the group.
    """

    unit_bytes: int
    counts: dict[int, int]

    @property
    def most(self) -> int:
        """Units of a block of the widest group."""
        return max(self.counts.values())


def units_of(kv_cache_config: Any, groups: Iterable[int], row_bytes: int) -> Units | None:
    """Return units in which a block of each group takes about its own bytes; None if all groups need whole rows.

    Args:
        kv_cache_config: from vLLM, on either side.
        groups: vLLM's numbers of the groups that are offloaded.
        row_bytes: bytes of a block of the widest group, with padding.
    """
    pages = {index: pages_of(kv_cache_config, index) for index in groups}
    if len(pages) < 2 or not row_bytes or not all(pages.values()):
        return None
    sizes = {index: sum(found) for index, found in pages.items()}
    # Layers whose pages lie apart are cut within each page, those side by side in a block anywhere.
    is_packed = any(_is_packed(tensor) for tensor in kv_cache_config.kv_cache_tensors)
    units = [row_bytes // count for count in range(1, _MOST_UNITS + 1) if row_bytes % count == 0]
    units = [unit for unit in units if unit % _ALIGNMENT == 0] or [row_bytes]
    if not is_packed:
        units = [unit for unit in units if all(page % unit == 0 for found in pages.values() for page in found)]

    def cost(unit: int) -> float:
        used = sum(-(-size // unit) * unit for size in sizes.values())
        return used / len(sizes) + row_bytes * _UNIT_COST * (row_bytes // unit - 1)

    best = min(units, key=cost, default=row_bytes)
    if best == row_bytes or cost(best) >= row_bytes:
        return None
    return Units(best, {index: -(-size // best) for index, size in sizes.items()})


def pages_of(kv_cache_config: Any, index: int) -> list[int]:
    """Return the bytes of a block of a group in each of its layers; empty if vLLM does not say where they lie."""
    layers = set(kv_cache_config.kv_cache_groups[index].layer_names)
    found = []
    for tensor in kv_cache_config.kv_cache_tensors:
        names = getattr(tensor, "layers", ())
        if getattr(tensor, "block_stride", None) is None or not layers.issuperset(names):
            continue
        found += [min(tensor.layer_stride, tensor.block_stride)] * len(names)
    return found if len(found) == len(layers) else []


def _is_packed(tensor: Any) -> bool:
    """Whether the pages of a block lie side by side."""
    return bool(tensor.layer_stride < tensor.block_stride)


class PreparedUnits(NamedTuple):
    """What a store was given, as `PreparedStore`, with all units of each key in a row.

    Attributes:
        keys: keys to store.
        chunks: their units.
        evicted: keys that were evicted.
    """

    keys: list[bytes]
    chunks: NDArray[np.int32]
    evicted: list[bytes]


class UnitOffload:
    """An `OffloadManager` whose keys have as many chunks as a block of their group has units.

    Further chunks have derived keys, one byte longer than vLLM's. All chunks of a key come, are held and go together.

    Args:
        offload: with a chunk for each unit.
        counts: units by group.
    """

    def __init__(self, offload: OffloadManager, counts: Mapping[int, int]) -> None:
        self._offload = offload
        self._more = {index: [bytes([part]) for part in range(1, count)] for index, count in counts.items()}
        self._length = 0  # of vLLM's keys

    def __getattr__(self, name: str) -> Any:
        """Return what is the same with units, such as `num_free`."""
        return getattr(self._offload, name)

    def prepare_store(self, keys: Sequence[bytes], *, deadline: int | None = None) -> PreparedUnits | None:
        """Take chunks for keys without; None, changing nothing, if that is impossible."""
        made: list[Any] = []
        try:
            store = keep(made, partial(self._offload.prepare_store, deadline=deadline), self._all(keys))
            if store is None:
                return None
            evicted = list(dict.fromkeys(key[: self._length] for key in store.evicted))
            if evicted:
                self._offload.forget(self._all(evicted))  # only some chunks of a key may have been evicted
            return PreparedUnits(self._whole(store.keys), store.chunks, evicted)
        except BaseException:
            for store in filter(None, made):
                self._offload.complete_store(store.keys, success=False)
            raise

    def complete_store(self, keys: Sequence[bytes], success: bool = True) -> list[bytes]:
        """End stores; return the keys that are hits now."""
        return self._whole(self._offload.complete_store(self._all(keys), success))

    def prepare_load(self, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """Hold the chunks of hits, and return them, key by key."""
        return self._offload.prepare_load(self._all(keys))

    def complete_load(self, keys: Sequence[bytes]) -> None:
        """End one load of each key."""
        self._offload.complete_load(self._all(keys))

    def touch(self, keys: Sequence[bytes], inserted: Sequence[bytes] | None = None, **options: Any) -> None:
        """Count keys as just used, the first one as the last."""
        self._offload.touch(self._all(keys), None if inserted is None else self._all(inserted), **options)

    def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Forget keys; return those that had chunks."""
        return self._whole(self._offload.forget(self._all(keys)))

    def _all(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return keys, each with those derived from it."""
        if keys:
            self._length = len(keys[0])
        more = self._more
        return [one for key in keys for one in (key, *(key + part for part in more[_group_of(key)]))]

    def _whole(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return vLLM's own keys."""
        return [key for key in keys if len(key) == self._length]


class BlockPieces:
    """A worker's KV caches as pieces of a unit each, and where those of a block lie.

    Args:
        kv_caches: from vLLM, all in one allocation.
        units: how the host's memory is cut.

    Attributes:
        rows: all pieces, uint8 `[n, unit_bytes]`.
        counts: pieces of a block of each group.

    Raises:
        InvalidArgumentError: the tensors cannot be cut so.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, units: Units) -> None:
        tensors, size = [cache.tensor for cache in kv_caches.tensors], units.unit_bytes
        storage, base = tensors[0].untyped_storage(), min(tensor.data_ptr() for tensor in tensors)
        end = storage.data_ptr() + storage.nbytes()
        self.rows = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        self.rows.set_(storage, base - storage.data_ptr(), ((end - base) // size, size), (size, 1))
        places = [(tensor.data_ptr() - base, _block_stride(tensor)) for tensor in tensors]
        if not all(base <= tensor.data_ptr() < end for tensor in tensors) or any(np.ravel(places) % size):
            raise InvalidArgumentError(f"kv_caches lie at (start, stride) {places}, must be multiples of {size} bytes")
        self.counts = list(units.counts.values())
        self._groups: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for refs, count in zip(kv_caches.group_data_refs, self.counts, strict=True):
            chosen = [places[index] for index in dict.fromkeys(ref.tensor_idx for ref in refs)]
            pieces = [(at + first, stride) for at, stride in chosen for first in range(0, stride, size)][:count]
            if len(pieces) < count:
                raise InvalidArgumentError(f"a block has {len(pieces)} pieces of {size} bytes, must have {count}")
            starts, strides = np.array(pieces, np.int64).T // size
            self._groups.append((starts, strides))

    def of(self, group: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pieces of blocks, block by block."""
        starts, strides = self._groups[group]
        return (starts + blocks[:, None] * strides).ravel()


def _block_stride(tensor: Tensor) -> int:
    return int(tensor.stride(0) * tensor.element_size())


def _group_of(key: bytes) -> int:
    return int(get_offload_group_idx(OffloadKey(key)))
