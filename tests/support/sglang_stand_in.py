"""The parts of SGLang 0.5.23 that `blockyard.integrations.sglang` is written for, where SGLang is not installed.

`make test-engines` runs the same tests over SGLang's own classes.
"""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class PoolName(str, Enum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"
    DRAFT_SWA = "draft_swa"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
    keys: Any = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: Any = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: Any = None


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: Any
    tp_lcm_size: Any = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: Any = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: Any = None


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name): ...

    def on_host_pools_registered(self): ...

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None): ...

    def batch_get_v2(self, transfers, extra_info=None): ...

    def batch_set_v2(self, transfers, extra_info=None): ...

    def batch_get_v1(self, keys, host_indices, extra_info=None): ...

    def batch_set_v1(self, keys, host_indices, extra_info=None): ...

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def exists(self, key): ...

    def batch_exists(self, keys, extra_info=None): ...

    def clear(self): ...


class StorageBackendFactory:
    @staticmethod
    def create_backend(backend_name, storage_config, mem_pool_host):
        options = storage_config.extra_config
        made = getattr(importlib.import_module(options["module_path"]), options["class_name"])
        assert backend_name == "dynamic"
        assert issubclass(made, HiCacheStorage)
        return made(storage_config, {})


LINKER = {
    "mem_cache.hybrid_cache.linker_pool_assembler": (
        "DevicePoolEntry",
        "DevicePoolGroup",
        "resolve_hybrid_device_pool_group",
    ),
    "mem_cache.memory_pool": ("MHATokenToKVPool",),
    "mem_cache.unified_cache.component_type": ("ComponentType",),
    "mem_cache.unified_cache.unified_cache_linker": ("LayerWiseLoadCounter", "UnifiedCacheLinker"),
    "utils": ("get_device_module",),
}
"""What the linker imports beside them: names alone, enough to look pages up."""


def modules() -> dict[str, ModuleType]:
    """Return the modules by name, for `sys.modules`."""
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.version"]
    names += ["sglang.srt.mem_cache.hicache_storage", "sglang.srt.mem_cache.storage"]
    names += ["sglang.srt.arg_groups", "sglang.srt.mem_cache.hybrid_cache", "sglang.srt.mem_cache.unified_cache"]
    made = {name: ModuleType(name) for name in names}
    for name, parts in LINKER.items():
        module = made[f"sglang.srt.{name}"] = ModuleType(f"sglang.srt.{name}")
        for part in parts:
            setattr(module, part, type(part, (), {}))
    for name, part, value in (
        ("runtime_context", "get_server_args", no_server_args),
        ("arg_groups.overrides", "model_config_of", lambda server_args: server_args._model_config),
    ):
        made[f"sglang.srt.{name}"] = ModuleType(f"sglang.srt.{name}")
        setattr(made[f"sglang.srt.{name}"], part, value)
    made["sglang.version"].__version__ = "0.5.23"  # type: ignore[attr-defined]
    for name in (
        *("HiCacheStorage", "HiCacheStorageConfig", "HiCacheStorageExtraInfo"),
        *("PoolHitPolicy", "PoolName", "PoolTransfer", "PoolTransferResult"),
    ):
        setattr(made["sglang.srt.mem_cache.hicache_storage"], name, globals()[name])
    made["sglang.srt.mem_cache.storage"].StorageBackendFactory = StorageBackendFactory  # type: ignore[attr-defined]
    return made


def no_server_args() -> Any:
    raise ValueError("Global server args is not set yet!")


class Group:
    """A linker's pool group that requests given transfers."""

    def resolve_transfers(self, transfers: list[PoolTransfer], **options: bool) -> list[PoolTransfer]:
        return transfers


class Objects:
    """An object store that immediately returns any object: a page of `page_bytes`."""

    def __init__(self, page_bytes: int) -> None:
        self.page = np.zeros(page_bytes, np.uint8)

    def contains(self, keys: list[str], sizes: list[int], until: float) -> list[bool]:
        return [True] * len(keys)

    def page_of(self, index: int) -> NDArray[np.uint8] | None:
        """Return the page that a get finds; None for a miss."""
        return self.page

    def get_steps(self, keys: list[str], sizes: list[int], take: Any) -> Any:
        yield from ()
        pages = [self.page_of(index) for index in range(len(keys))]
        return [page is not None and take(index, page) is None for index, page in enumerate(pages)]

    def jobs(self, name: str, lanes: dict[str, int]) -> Any:
        return importlib.import_module("blockyard.stores.adapters.jobs").StoreJobs(None, name, lanes)


def linker(page_bytes: int, staging_bytes: int, device: str = "cpu") -> Any:
    """Return a linker that can look up pages, over one pool and a store with all pages; without device pools."""
    made: Any = object.__new__(importlib.import_module("blockyard.integrations.sglang.linker").BlockyardLinker)
    made._group, made._objects, made._sizes = Group(), Objects(page_bytes), {"kv": page_bytes}
    made._spans = {"kv": {"kv": slice(0, page_bytes)}}
    made._start(torch.device(device))
    made._staging_bytes, made._lookup_seconds = staging_bytes, 3600.0
    made.close = lambda: [made._reads.close(), made._loads.shutdown(), made._stores.shutdown()]
    return made
