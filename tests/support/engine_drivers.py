"""Engines that keep pages in a prefix store, each driven through its own factory: SGLang's HiCache and LMCache.

Where an engine is installed, the driver uses its own classes; else stand-ins of them. `make test-engines` installs it.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import sglang_stand_in
import torch
from memory_stores import KeyedStore
from numpy.typing import NDArray

PAGE_TOKENS = 4
SECONDS = 30.0


class FaultyStore(KeyedStore):
    """A prefix store in this process, `faulty://NAME`, that fails according to `fault`."""

    media: ClassVar[dict[str, dict[bytes, NDArray[np.uint8]]]] = {}
    fault: ClassVar[str] = ""
    released: ClassVar[threading.Event] = threading.Event()

    @property
    def timeout_base(self) -> float:  # type: ignore[override]
        """Short only where the timeout must expire."""
        return 0.2 if self.fault == "hangs" else 10 * SECONDS

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(self.media.setdefault(url, {}), url=url, **options)
        self.before = self._fail

    def _fail(self, name: str) -> None:
        if self.fault == "hangs":
            self.released.wait(10 * SECONDS)
        elif self.fault == "raises":
            raise ConnectionResetError("the peer is gone")

    def get(self, keys: NDArray[np.uint8], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        found = super().get(keys, out)
        if self.fault == "damages":
            out[:, out.shape[1] // 2] ^= 1
        elif self.fault == "swaps" and len(out) > 1:
            out[:] = out[::-1].copy()
        elif self.fault == "loses":
            return np.zeros(len(keys), np.bool_)
        return found


@contextlib.contextmanager
def sglang() -> Iterator[None]:
    """Install stand-ins where SGLang is missing, and unload them and our modules afterwards."""
    if importlib.util.find_spec("sglang") is not None:
        yield
        return
    sys.modules.update(sglang_stand_in.modules())
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(("sglang", "blockyard.integrations.sglang"))]:
            if name != "sglang_stand_in":
                del sys.modules[name]


@contextlib.contextmanager
def lmcache() -> Iterator[Any]:
    """Import our module, with stand-ins where LMCache is missing, and unload it afterwards."""
    name = "blockyard.integrations.lmcache"
    if importlib.util.find_spec("lmcache") is not None:
        yield importlib.import_module(name)
        return
    known = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.5.6" if name == "lmcache" else known(name)
    try:
        yield importlib.import_module(name)
    finally:
        importlib.metadata.version = known
        sys.modules.pop(name)
        sys.modules.pop(f"{name}.connector")


class HostPool:
    """Host pages of one SGLang pool."""

    layout = "layer_first"
    page_size = PAGE_TOKENS

    def __init__(self, pages: int = 16, width: int = 96, dtype: torch.dtype = torch.float16) -> None:
        self.dtype = dtype
        self.data = torch.zeros(pages, width, dtype=dtype)

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        return self.data[int(index) // self.page_size]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.data[0])

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        self.data[int(index) // self.page_size] = data_page

    def rows(self) -> NDArray[np.uint8]:
        rows: NDArray[np.uint8] = self.data.view(torch.uint8).numpy()
        return rows


def indices(pages: Sequence[int]) -> torch.Tensor:
    """All slots of pages, as SGLang's controller passes them."""
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


class SGLang:
    """HiCache's storage backend, created by SGLang's factory.

    Args:
        options: of the backend.
        v1: whether it is called with places in the pool.
        revision: an option, too.
        model_name: of SGLang.
        main_width: float16 elements of a page of the main pool.
        pools: the pools besides the main one.
    """

    page_bytes = 192

    def __init__(
        self,
        options: dict[str, Any],
        *,
        v1: bool = True,
        revision: str = "one",
        model_name: str = "model",
        main_width: int = 96,
        pools: dict[str, HostPool] | None = None,
    ) -> None:
        self.v1, self.pool = v1, HostPool(width=main_width)
        storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        factory = importlib.import_module("sglang.srt.mem_cache.storage").StorageBackendFactory
        names = {
            "backend_name": "blockyard",
            "module_path": "blockyard.integrations.sglang",
            "class_name": "BlockyardHiCache",
        }
        self.config = storage.HiCacheStorageConfig(
            **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
            **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
            **dict.fromkeys(("is_mla_model", "enable_storage_metrics", "is_page_first_layout"), False),
            model_name=model_name,
            extra_config={**names, "interface_v1": int(v1), "revision": revision, **options},
        )
        self.backend = factory.create_backend("dynamic", self.config, self.pool)
        self.backend.register_mem_pool_host(self.pool)
        for name, pool in (pools or {}).items():
            self.backend.register_mem_host_pool_v2(pool, name)
        self.backend.on_host_pools_registered()

    def store(self, keys: list[str], pages: NDArray[np.uint8]) -> bool:
        if self.v1:
            self.pool.rows()[: len(pages)] = pages
            return all(self.backend.batch_set_v1(keys, indices(range(len(keys)))))
        return bool(self.backend.batch_set(keys, [torch.from_numpy(page.copy()).view(torch.float16) for page in pages]))

    def load(self, keys: list[str]) -> list[bytes | None]:
        if not self.v1:
            places = [self.pool.get_dummy_flat_data_page() for _ in keys]
            found = self.backend.batch_get(keys, places)
            # As SGLang's controller does: it reads what the call returned.
            return [None if page is None else page.view(torch.uint8).numpy().tobytes() for page in found]
        self.pool.rows()[:] = 7
        good = self.backend.batch_get_v1(keys, indices(range(len(keys))))
        rows = self.pool.rows()
        assert all(ok or (row == 7).all() for ok, row in zip(good, rows, strict=False)), "a miss wrote to its page"
        return [row.tobytes() if ok else None for ok, row in zip(good, rows, strict=False)]

    def leading(self, keys: list[str]) -> int:
        return int(self.backend.batch_exists(keys))

    def close(self) -> None:
        self.backend.close()


class LMCache:
    """A `native_plugin` L2 adapter, created by LMCache's factory; without LMCache, the connector itself."""

    page_bytes = 9000  # three parts

    def __init__(self, options: dict[str, Any], *, revision: str = "one") -> None:
        params = {"kv_dtype": "float16", "part": "4KiB", "revision": revision, **options}
        if importlib.util.find_spec("lmcache") is None:
            with lmcache() as module:
                self.adapter: Any = _Adapter(module.BlockyardConnector(**params))
            return
        adapters = importlib.import_module("lmcache.v1.distributed.l2_adapters")
        config = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
        self.adapter = adapters.create_l2_adapter(
            config.get_l2_adapter_config_class("native_plugin").from_dict(
                {
                    "type": "native_plugin",
                    "module_path": "blockyard.integrations.lmcache",
                    "class_name": "BlockyardConnector",
                    "adapter_params": params,
                }
            )
        )

    def _keys(self, keys: list[str]) -> list[Any]:
        if isinstance(self.adapter, _Adapter):
            return keys
        made = importlib.import_module("lmcache.v1.distributed.api").ObjectKey
        return [made(key.encode(), "model", 0) for key in keys]

    def _object(self, data: NDArray[np.uint8]) -> Any:
        if isinstance(self.adapter, _Adapter):
            return memoryview((ctypes.c_ubyte * len(data)).from_buffer(data))
        memory = importlib.import_module("lmcache.v1.memory_management")
        shape = torch.Size([len(data)])
        about = memory.MemoryObjMetadata(
            shape, torch.uint8, 0, len(data), 1, fmt=memory.MemoryFormat.BINARY, shapes=[shape], dtypes=[torch.uint8]
        )
        return memory.TensorMemoryObj(torch.from_numpy(data), about, None)

    def store(self, keys: list[str], pages: NDArray[np.uint8]) -> bool:
        pages = pages.copy()
        ticket = self.adapter.submit_store_task(self._keys(keys), [self._object(page) for page in pages])
        _await(self.adapter.get_store_event_fd())
        result = self.adapter.pop_completed_store_tasks()[ticket]
        return bool(result if isinstance(result, bool) else result.is_successful())

    def load(self, keys: list[str]) -> list[bytes | None]:
        pages = np.full((len(keys), self.page_bytes), 7, np.uint8)
        ticket = self.adapter.submit_load_task(self._keys(keys), [self._object(page) for page in pages])
        _await(self.adapter.get_load_event_fd())
        found = _bits(self.adapter.query_load_result(ticket), len(keys))
        assert all(ok or (page == 7).all() for ok, page in zip(found, pages, strict=True)), "a miss wrote to its memory"
        return [page.tobytes() if ok else None for ok, page in zip(found, pages, strict=True)]

    def leading(self, keys: list[str]) -> int:
        ticket = self.adapter.submit_lookup_and_lock_task(self._keys(keys), {})
        _await(self.adapter.get_lookup_and_lock_event_fd())
        found = _bits(self.adapter.query_lookup_and_lock_result(ticket), len(keys))
        return [*found, False].index(False)

    def close(self) -> None:
        # LMCache's own adapter would close its descriptors a second time.
        adapter, self.adapter = self.adapter, None
        if adapter is not None:
            adapter.close()


class _Adapter:
    """Uses a connector like LMCache's adapter, one operation at a time."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.submit_store_task = connector.submit_batch_set
        self.submit_load_task = connector.submit_batch_get
        self.get_store_event_fd = self.get_load_event_fd = self.get_lookup_and_lock_event_fd = connector.event_fd
        self.close = connector.close

    def submit_lookup_and_lock_task(self, keys: list[str], layouts: object) -> int:
        return int(self.connector.submit_batch_exists(keys))

    def pop_completed_store_tasks(self) -> dict[int, bool]:
        return {ticket: ok for ticket, ok, _, _ in self.connector.drain_completions()}

    def query_load_result(self, ticket: int) -> list[bool]:
        ((done, _, _, found),) = self.connector.drain_completions()
        assert done == ticket
        return list(found)

    def query_lookup_and_lock_result(self, ticket: int) -> list[bool]:
        """Return the hits of a lookup; LMCache ignores a lookup that is not ok."""
        ((done, ok, _, found),) = self.connector.drain_completions()
        assert done == ticket
        return [ok and hit for hit in found]


def _await(descriptor: int) -> None:
    assert select.select([descriptor], [], [], SECONDS)[0], "nothing ended"
    os.eventfd_read(descriptor)


def _bits(found: Any, count: int) -> list[bool]:
    return found if isinstance(found, list) else [found.test(index) for index in range(count)]
