"""A storage backend of SGLang's HiCache: keeps host pool pages in a bounded, verified, persistent prefix store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.version import __version__ as sglang_version

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.compat import engine_log
from blockyard.integrations.options.sglang import read_hicache
from blockyard.integrations.sglang.identity import current_server_args, identify
from blockyard.integrations.sglang.pages import (
    as_bytes,
    is_page_by_page,
    leading,
    refuse_own_folders,
    restorable_pages,
    sizes_of_store,
)
from blockyard.integrations.sglang.recording import QueryRecorder, record_queries
from blockyard.stores.adapters.checkpoint import require_revision
from blockyard.stores.adapters.objects import PrefixObjects, bytes_taken, folder_of, share_of, store_url

__all__ = ["BlockyardHiCache"]

_LOG = engine_log("SGLang")
_SHARDED: Final = {"mamba", "draft", "draft_swa"}
"""Pools that are sharded by rank even if the main pool is the same on all ranks."""
_APART: Final = 0.95
"""Share of the bytes in a common store that pools in stores of their own may take at most."""


class _HostPages(NamedTuple):
    host: Any
    pool: str
    name: str
    blank: torch.Tensor

    @property
    def page_bytes(self) -> int:
        return _nbytes(self.blank)

    def key(self, key: str) -> str:
        return f"{self.name} {key}"

    def read(self, index: int) -> NDArray[np.uint8]:
        return as_bytes(self.host.get_data_page(index, flat=True))

    def write(self, index: int, data: NDArray[np.uint8]) -> None:
        page = torch.empty_like(self.blank)
        as_bytes(page)[:] = data
        self.host.set_from_flat_data_page(index, page)


class BlockyardHiCache(HiCacheStorage):
    """Pages of SGLang's host pools in a Blockyard store. SGLang loads it as storage backend `dynamic`.

    Pages are verified when read; a damaged, lost or late page is a miss, and SGLang recomputes it. No call raises or
    waits beyond the store's deadline. A page is found only by engines with the same SGLang version, configuration of
    the model, weights, `revision`, dtype, page size, layout and rank.

    Args:
        storage_config: from SGLang. Its `extra_config` has the options: `root_dir` (folder of file stores, one for each
            rank) or `url` (any store with keys, see `blockyard.open_store`); `size`, the size limit of a file store;
            `revision`, a name for what SGLang does not show, such as LoRA adapters; `kv_dtype`, of the KV cache,
            required for float8.
        kwargs: from SGLang, unused.

    Raises:
        InvalidArgumentError: an option is missing, unknown or wrong.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        self._config = storage_config
        self._root, self._url, self._size, self._revision, self._kv_dtype = read_hicache(
            storage_config.extra_config or {}
        )
        refuse_own_folders(self._root, storage_config.tp_size, share_pages=storage_config.is_mla_model)
        self._identity, problem = identify(current_server_args())
        require_revision(self._revision, self._url or "", problem)
        self._objects: dict[str, PrefixObjects] = {}  # by pool; several may share one
        self._recorder: QueryRecorder | None = None
        self._main: _HostPages | None = None
        self._pools: dict[str, _HostPages] = {}

    # ---- pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the main pool.

        Raises:
            InvalidArgumentError: the pool has no flat pages.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._main = self._pool(mem_pool_host, PoolName.KV)
        self._pools[str(PoolName.KV)] = self._main

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a pool of a hybrid model.

        Raises:
            InvalidArgumentError: the pool has no flat pages.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools[str(host_pool_name)] = self._pool(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Open the store, with blocks for the pages of all pools.

        Raises:
            StoreError: the store cannot be opened.
        """
        if self._objects or self._main is None:
            return
        config = self._config
        folder = f"tp{config.tp_rank}-pp{config.pp_rank}-cp{config.attn_cp_rank}-dp{config.dp_rank}"
        url = store_url(self._root, self._url, self._size, folder)
        stores = self._stores(url)
        taken = [self._taken(url, names) for names in stores]
        try:
            for names, share in zip(stores, taken, strict=True):
                if str(PoolName.KV) not in names:
                    own = None if self._url is None else folder_of(self._url, names[0])
                    url = store_url(self._root, own, self._size, f"{folder}-{names[0]}")
                self._open(share_of(url, share / sum(taken)), names)
        except BaseException:
            self.close()
            self._objects.clear()
            raise
        ranks = [config.tp_rank, config.pp_rank, config.attn_cp_rank, config.dcp_rank]
        self._recorder = record_queries(ranks, getattr(self._main.host, "page_size", 1) or 1)

    def _open(self, url: str, names: Sequence[str]) -> None:
        """Open the store of some pools."""
        fields: dict[str, Any] = {"engine": "sglang", "main": self._pools[names[0]].name}
        fields |= {"rank": self._rank(PoolName.KV), "revision": self._revision}
        objects = PrefixObjects(url, sizes=self._sizes(names), fields=fields)
        self._objects |= dict.fromkeys(names, objects)
        sizes = ", ".join(str(self._pools[name].page_bytes) for name in names)
        _LOG.info("Blockyard: pages of %s bytes, %s", sizes, objects.about)

    def _stores(self, url: str) -> list[list[str]]:
        """Return which pools share a store, the main pool first.

        A store has blocks of one length, which wastes a part of pages of other lengths. Pools whose share of the bytes
        is known get stores of their own, if they take less then.
        """
        together = list(self._pools)
        own = [name for name in together if name != PoolName.KV and is_page_by_page(name)]
        apart = [[name for name in together if name not in own], *([name] for name in own)]
        is_less = sum(self._taken(url, names) for names in apart) <= _APART * self._taken(url, together)
        return apart if own and is_less else [together]

    def _taken(self, url: str, names: Sequence[str]) -> int:
        """Return the bytes of a store that a page of each pool takes."""
        return bytes_taken(url, self._sizes(names))

    def _sizes(self, names: Sequence[str]) -> list[int]:
        return sizes_of_store({name: self._pools[name].page_bytes for name in names})

    # ---- pages of the main pool ----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Load a page into a tensor and return that, or None."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors, which are written only if the page is intact; return these, None for misses.

        Without tensors, returns new ones.
        """
        found: list[torch.Tensor | None] = [None] * len(keys)
        main = self._main
        if main is None:
            return found
        targets = target_locations or [main.host.get_dummy_flat_data_page() for _ in keys]

        def take(index: int, data: NDArray[np.uint8]) -> None:
            as_bytes(targets[index].view(-1))[:] = data
            found[index] = targets[index]

        self._get(main, keys, take, sizes=[_nbytes(target) for target in targets])
        return found

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page; return whether it is stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages; return whether all are stored."""
        if self._main is None or values is None or any(value is None for value in values):
            return False
        sizes = [_nbytes(value) for value in values]
        return all(self._put(self._main, keys, lambda index: as_bytes(values[index]), sizes=sizes))

    def exists(self, key: str) -> bool:
        """Return whether a page can probably be loaded."""
        return self._contains(self._main, [key]) == [True]

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages can probably be loaded."""
        if self._recorder is not None:
            self._recorder.add(keys, extra_info)
        return leading(self._contains(self._main, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the main pool, each at the first of its indices; return which were loaded."""
        return self._move(self._main, keys, host_indices, is_load=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the main pool; return which are stored."""
        return self._move(self._main, keys, host_indices, is_load=False)

    # ---- pages of several pools ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return which prefixes all pools together can restore, by the policy of each."""
        if self._recorder is not None:
            self._recorder.add(keys, extra_info)
        return restorable_pages(pool_transfers or [], lambda name: self._contains(self._pools.get(str(name)), keys))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages into their pools; return which were loaded, by pool."""
        return self._move_all(transfers, is_load=True)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of pools; return which are stored, by pool."""
        return self._move_all(transfers, is_load=False)

    # ---- the rest ----

    def clear(self) -> bool:
        """Delete all pages of this rank; return whether this also holds for later processes."""
        cleared = [objects.clear() for objects in set(self._objects.values())]  # all, also after a failure
        return all(cleared)

    def close(self) -> None:
        """Close the store; afterwards everything is a miss."""
        if self._recorder is not None:
            self._recorder.close()
        for objects in set(self._objects.values()):
            objects.close()

    def _move_all(self, transfers: list[PoolTransfer], *, is_load: bool) -> dict[str, list[bool]]:
        return {
            transfer.name: self._move(
                self._pools.get(str(transfer.name)), transfer.keys or [], transfer.host_indices, is_load=is_load
            )
            for transfer in transfers
        }

    def _move(
        self, pool: _HostPages | None, keys: Sequence[str], host_indices: torch.Tensor | None, *, is_load: bool
    ) -> list[bool]:
        page = 1 if pool is None else getattr(pool.host, "page_size", 1) or 1
        count = 0 if host_indices is None else host_indices.numel()
        if pool is None or host_indices is None or count != len(keys) * page:
            _LOG.error("%d keys and %d indices of pages of %d for pool %s", len(keys), count, page, pool and pool.name)
            return [False] * len(keys)
        places = [int(index) for index in host_indices.flatten()[::page].tolist()]
        if is_load:
            return self._get(pool, keys, lambda index, data: pool.write(places[index], data))
        return self._put(pool, keys, lambda index: pool.read(places[index]))

    def _get(
        self,
        pool: _HostPages,
        keys: Sequence[str],
        take: Callable[[int, NDArray[np.uint8]], None],
        sizes: Sequence[int] | None = None,
    ) -> list[bool]:
        objects = self._objects.get(pool.pool)
        if objects is None:
            return [False] * len(keys)
        return objects.get([pool.key(key) for key in keys], sizes or [pool.page_bytes] * len(keys), take)

    def _put(
        self,
        pool: _HostPages,
        keys: Sequence[str],
        read: Callable[[int], NDArray[np.uint8]],
        sizes: Sequence[int] | None = None,
    ) -> list[bool]:
        objects = self._objects.get(pool.pool)
        if objects is None:
            return [False] * len(keys)
        return objects.put([pool.key(key) for key in keys], sizes or [pool.page_bytes] * len(keys), read)

    def _contains(self, pool: _HostPages | None, keys: Sequence[str]) -> list[bool]:
        if pool is None or pool.pool not in self._objects or not keys:
            return [False] * len(keys)
        return self._objects[pool.pool].contains([pool.key(key) for key in keys], [pool.page_bytes] * len(keys))

    def _pool(self, host: Any, name: Any) -> _HostPages:
        """Describe a pool: its page size, and everything that determines a page's bytes besides its key."""
        try:
            blank = torch.empty_like(host.get_dummy_flat_data_page())
        except NotImplementedError as error:
            raise InvalidArgumentError(f"pool {name} has no flat pages, which Blockyard needs: {error}") from error
        config = self._config
        if host.dtype == torch.uint8 and not self._kv_dtype:
            raise InvalidArgumentError(
                f"pool {name} is uint8, as every float8 is: kv_dtype must name the KV cache's type, such as fp8_e4m3"
            )
        fields = [
            *(sglang_version, self._identity or config.model_name, getattr(host, "storage_format_tag", None)),
            *(host.dtype, self._kv_dtype, type(host).__name__, _nbytes(blank)),
            *(getattr(host, field, None) for field in _GEOMETRY),
            *(config.tp_lcm_size, config.should_split_heads, config.logical_page_size),
            *self._rank(name),
        ]
        return _HostPages(host, str(name), f"{name} {fields}", blank)

    def _rank(self, name: Any) -> list[int]:
        config = self._config
        ranks = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
        ranks += [config.dcp_rank, config.dcp_size]
        return ranks if config.is_mla_model and str(name) not in _SHARDED else [*ranks, config.tp_rank, config.tp_size]


_GEOMETRY: Final = ("layout", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim")


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
