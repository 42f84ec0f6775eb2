"""The parts of SGLang 0.5.23 that `blockyard.integrations.sglang` is written for, where SGLang is not installed.

`make test-engines` runs the same tests over SGLang's own classes.
"""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any


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


def modules() -> dict[str, ModuleType]:
    """The modules by name, for `sys.modules`."""
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.version"]
    names += ["sglang.srt.mem_cache.hicache_storage", "sglang.srt.mem_cache.storage"]
    made = {name: ModuleType(name) for name in names}
    made["sglang.version"].__version__ = "0.5.23"  # type: ignore[attr-defined]
    for name in (
        *("HiCacheStorage", "HiCacheStorageConfig", "HiCacheStorageExtraInfo"),
        *("PoolHitPolicy", "PoolName", "PoolTransfer", "PoolTransferResult"),
    ):
        setattr(made["sglang.srt.mem_cache.hicache_storage"], name, globals()[name])
    made["sglang.srt.mem_cache.storage"].StorageBackendFactory = StorageBackendFactory  # type: ignore[attr-defined]
    return made
