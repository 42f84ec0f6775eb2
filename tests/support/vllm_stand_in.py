"""Stand-ins for vLLM's offloading interfaces, 0.32 and 0.33: names, arguments and abstract methods, nothing else."""

import ctypes
import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType
from typing import Any

import numpy as np

Namespace = dict[str, Any]
COPY_RUN = ("local_offset", "canonical_offset", "fragment_size", "num_fragments", "local_stride", "canonical_stride")
PAGE_MAPPING = (
    *("canonical_page_size_bytes", "local_page_size_bytes", "runs"),
    *("num_writers", "writer_index", "parallelism_agnostic"),
)


def modules(version: str) -> dict[str, ModuleType]:
    """Return the parts of vLLM's modules that `blockyard.integrations.vllm` imports."""
    made: dict[str, ModuleType] = {}
    packages = ("", ".v1", ".v1.kv_offload", ".v1.kv_offload.cpu", ".v1.kv_offload.cpu.policies")
    for package in (*packages, ".v1.kv_offload.tiering", ".v1.metrics"):
        made[f"vllm{package}"] = package_module = ModuleType(f"vllm{package}")
        package_module.__path__ = []
    made["vllm"].__version__ = f"{version}.0"  # type: ignore[attr-defined]
    newer = version == "0.33"
    base = records() | interfaces(newer=newer)
    sources = Enum("CacheHitSource", ["DEVICE", "HOST", "P2P", "DISK", "EXTERNAL_UNSPECIFIED"])
    fill(made, "v1.metrics.cache_hit_source", {"CacheHitSource": sources})
    fill(made, "v1.kv_offload.base", base)
    fill(made, "v1.kv_offload.config", configuration())
    fill(made, "v1.kv_offload.cpu.common", common(base))
    fill(made, "v1.kv_offload.cpu.policies.base", policies(newer=newer))
    fill(made, "v1.kv_offload.tiering.base", tiering(base))
    return made


def current_configuration() -> ModuleType:
    """Return vLLM's module that shows a worker its configuration while it starts: what `current` is then."""
    module: Any = ModuleType("vllm.config")
    module.current = None
    module.get_current_vllm_config_or_none = lambda: module.current
    module.KVTransferConfig = transfer_configuration()
    return module


def transfer_configuration() -> type:
    @dataclass
    class KVTransferConfig:
        kv_connector: str | None = None
        engine_id: str | None = None
        kv_buffer_device: str = "cpu"
        kv_role: str | None = None
        kv_port: int = 14579
        kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
        kv_connector_module_path: str | None = None
        enable_permute_local_kv: bool = False
        kv_load_failure_policy: str = "fail"

        def __post_init__(self) -> None:
            if self.kv_connector is not None and self.kv_role not in {"kv_producer", "kv_consumer", "kv_both"}:
                raise ValueError(f"Unsupported kv_role: {self.kv_role}")

    return KVTransferConfig


def fill(made: dict[str, ModuleType], name: str, namespace: Namespace) -> None:
    module = made[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    for key, value in namespace.items():
        if isinstance(value, type) and value is not bytes:
            value.__module__ = f"vllm.{name}"
        setattr(module, key, value)


def request_context() -> type:
    @dataclass
    class ReqContext:
        req_id: str
        kv_transfer_params: dict[str, Any] | None = None
        kv_hints: Any = None
        _state: dict[type, Any] = field(default_factory=dict)
        _offload_key_positions: dict[bytes, int] = field(default_factory=dict)

        def set_state(self, val: Any) -> None:
            self._state[type(val)] = val

        def get_state(self, cls: type) -> Any:
            return self._state.get(cls)

        def set_offload_key_position(self, key: bytes, end_token: int) -> None:
            self._offload_key_positions[key] = end_token

        def get_offload_key_position(self, key: bytes) -> int | None:
            return self._offload_key_positions.get(key)

    return ReqContext


def records() -> Namespace:
    class LookupResult(Enum):
        MISS = auto()
        HIT = auto()
        HIT_PENDING = auto()
        RETRY = auto()

    class OffloadPolicy(Enum):
        CHUNK_LEVEL = "chunk_level"
        REQUEST_LEVEL = "request_level"

    class Medium(Enum):
        CPU = "CPU"
        STORAGE = "STORAGE"

    class LoadStoreSpec:
        pass

    class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
        def __init__(self, block_ids: list[int]):
            self.block_ids = np.array(block_ids, dtype=np.int32)

    class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
        def __init__(self, block_ids: list[int], group_sizes: list[int], block_indices: list[int]):
            super().__init__(block_ids)
            self.group_sizes, self.block_indices = group_sizes, block_indices

    record = dataclasses.make_dataclass
    return {
        "OffloadKey": bytes,
        "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
        "LookupResult": LookupResult,
        "OffloadPolicy": OffloadPolicy,
        "Medium": Medium,
        "ReqContext": request_context(),
        "RequestOffloadingContext": record(
            "RequestOffloadingContext", [("policy", OffloadPolicy, OffloadPolicy.CHUNK_LEVEL)]
        ),
        "ScheduleEndContext": record("ScheduleEndContext", ["new_req_ids", "preempted_req_ids"]),
        "LoadStoreSpec": LoadStoreSpec,
        "BlockIDsLoadStoreSpec": BlockIDsLoadStoreSpec,
        "GPULoadStoreSpec": GPULoadStoreSpec,
        "PrepareStoreOutput": record("PrepareStoreOutput", ["keys_to_store", "store_spec", "evicted_keys"]),
        "CanonicalKVCacheTensor": record("CanonicalKVCacheTensor", ["tensor", "page_size_bytes"]),
        "CopyRun": record("CopyRun", COPY_RUN),
        "CanonicalPageMapping": record("CanonicalPageMapping", PAGE_MAPPING),
        "CanonicalKVCacheRef": record("CanonicalKVCacheRef", ["tensor_idx", "page_size_bytes", ("mapping", Any, None)]),
        "CanonicalKVCaches": record("CanonicalKVCaches", ["tensors", "group_data_refs"]),
        "TransferResult": record(
            "TransferResult", ["job_id", "success", ("transfer_size", int, None), ("transfer_time", float, None)]
        ),
        "OffloadingMetricMetadata": record("OffloadingMetricMetadata", ["documentation"]),
        "OffloadingCounterMetadata": record("OffloadingCounterMetadata", ["documentation"]),
        "OffloadingGaugeMetadata": record("OffloadingGaugeMetadata", ["documentation"]),
    }


def interfaces(*, newer: bool) -> Namespace:
    class OffloadingManager(ABC):
        @abstractmethod
        def lookup(self, key, req_context): ...
        @abstractmethod
        def prepare_load(self, keys, req_context): ...
        def touch(self, keys, req_context): ...
        def complete_load(self, keys, req_context): ...
        @abstractmethod
        def prepare_store(self, keys, req_context): ...
        def complete_store(self, keys, req_context, success=True): ...
        @abstractmethod
        def on_new_request(self, req_context): ...

    if newer:
        OffloadingManager.on_reset_flushed = lambda self: None

    class OffloadingWorker(ABC):
        @abstractmethod
        def submit_store(self, job_id, src_spec, dst_spec): ...
        @abstractmethod
        def submit_load(self, job_id, src_spec, dst_spec): ...
        @abstractmethod
        def get_finished(self): ...
        @abstractmethod
        def wait(self, job_ids): ...

    class OffloadingSpec(ABC):
        def __init__(self, config):
            self.config, self.extra_config = config, config.extra_config
            self.kv_events_config = dataclasses.make_dataclass("Events", ["enable_kv_cache_events"])(
                config.enable_kv_cache_events
            )
            self.blocks_per_chunk = config.cache.blocks_per_chunk

        @abstractmethod
        def get_manager(self): ...
        @abstractmethod
        def get_worker(self, kv_caches): ...

    fields: list[Any] = ["keys", "medium", "removed"]
    if newer:

        def submit_load(self, job_id, src_spec, dst_spec, expedited=False): ...

        OffloadingWorker.submit_load = abstractmethod(submit_load)
        fields.append(("metadata_only", bool, False))
    event = dataclasses.make_dataclass("OffloadingEvent", fields)
    return {
        "OffloadingManager": OffloadingManager,
        "OffloadingWorker": OffloadingWorker,
        "OffloadingSpec": OffloadingSpec,
        "OffloadingEvent": event,
    }


def configuration() -> Namespace:
    names = {
        "OffloadingGroupConfig": "tokens_per_block layer_names group_id",
        "OffloadingModelConfig": "name dtype",
        "OffloadingCacheConfig": "tokens_per_hash blocks_per_chunk",
        "OffloadingParallelConfig": "rank world_size tp_size pp_size pcp_size dcp_size data_parallel_index "
        "data_parallel_size data_parallel_rank_local is_parallelism_agnostic",
        "OffloadingConfig": "groups worker_kv_bytes_per_block enable_kv_cache_events extra_config engine_id model "
        "cache parallel",
    }
    flags: list[Any] = [(name, bool, False) for name in ("replicated_layout", "canonical_layout")]
    flags.append(("kv_cache_layout", str, None))
    more: Namespace = {"OffloadingConfig": flags}
    return {
        name: dataclasses.make_dataclass(name, [*fields.split(), *more.get(name, ())]) for name, fields in names.items()
    }


def common(base: Namespace) -> Namespace:
    class CPULoadStoreSpec(base["BlockIDsLoadStoreSpec"]):  # type: ignore[misc]
        @property
        def chunk_ids(self):
            return self.block_ids

    names = ("CPU_CACHE_USAGE_PERC", "CPU_CACHE_WRITE_USAGE_PERC", "CPU_CACHE_READ_USAGE_PERC")
    return {
        "CPULoadStoreSpec": CPULoadStoreSpec,
        "CPUOffloadingMetrics": type("CPUOffloadingMetrics", (), {name: name.lower() for name in names}),
    }


def policies(*, newer: bool) -> Namespace:
    class ChunkStatus(ctypes.Structure):
        _fields_ = [("ref_cnt", ctypes.c_int32), ("chunk_id", ctypes.c_int64)]

        def __init__(self, chunk_id: int):
            super().__init__(-1, chunk_id)

    def insert_two(self, key, chunk): ...

    def insert_three(self, key, chunk, req_context): ...

    class CachePolicy(ABC):
        def __init__(self, cache_capacity: int):
            self.cache_capacity = cache_capacity

        @abstractmethod
        def get(self, key): ...

        insert = abstractmethod(insert_three if newer else insert_two)

        @abstractmethod
        def remove(self, key): ...
        @abstractmethod
        def touch(self, keys, req_context): ...
        @abstractmethod
        def evict(self, n, protected): ...
        @abstractmethod
        def clear(self): ...
        def on_request_finished(self, key_groups, insertion_only_keys, reused_keys, req_context): ...
        def mark_evictable(self, key): ...
        def mark_non_evictable(self, key): ...

    def order_request_keys(key_groups, req_context):
        keys = [key for group in key_groups for key in group]
        ends = [req_context.get_offload_key_position(key) for key in keys]
        return keys if None in ends else [key for _, key in sorted(zip(ends, keys, strict=True))]

    return {"CachePolicy": CachePolicy, "ChunkStatus": ChunkStatus, "order_request_keys": order_request_keys}


def tiering(base: Namespace) -> Namespace:
    class SecondaryTierManager(ABC):
        def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
            self.primary_kv_view, self.tier_type = primary_kv_view, tier_type
            self.block_size_bytes = primary_kv_view.strides[0]

        @abstractmethod
        def lookup(self, key, req_context): ...
        @abstractmethod
        def submit_store(self, job_metadata): ...
        @abstractmethod
        def submit_load(self, job_metadata): ...
        @abstractmethod
        def get_finished_jobs(self): ...
        @abstractmethod
        def on_new_request(self, req_context): ...
        @abstractmethod
        def drain_jobs(self): ...
        def shutdown(self): ...

    @dataclass
    class TransferJob:
        job_id: int
        keys: Any
        chunk_ids: Any
        is_promotion: bool
        req_context: Any

    @dataclass
    class JobResult:
        job_id: int
        success: bool
        successful_keys: Any = None
        transfer_time: float | None = None
        transfer_bytes: int | None = field(default=None)

    return {"SecondaryTierManager": SecondaryTierManager, "TransferJob": TransferJob, "JobResult": JobResult}
