"""`BlockyardKVConnector`: vLLM's offloading connector over Blockyard's host memory, exclusive where it can be."""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from blockyard._core import CacheGroup
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.vllm.exclusive_host.sides import ExclusiveScheduler, ExclusiveWorker, LenientScheduler
from blockyard.integrations.vllm.spec import BlockyardSpec
from blockyard.integrations.vllm.units import Units, pages_of, units_of

__all__ = ["BlockyardKVConnector"]

_REPLACED = ("_build_store_jobs", "_build_partial_tail_store_jobs", "_generate_job_id")
if not all(hasattr(OffloadingConnectorScheduler, name) for name in _REPLACED):
    raise ImportError(
        "BlockyardKVConnector needs vLLM 0.32 or 0.33: here the scheduler side of the offloading connector differs"
    )

_ATTENTION: Final = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec)
_SPEC: Final = {"spec_name": "BlockyardSpec", "spec_module_path": "blockyard.integrations.vllm"}


class BlockyardKVConnector(OffloadingConnector):
    """Keeps in host memory what the device drops, so that both together hold more.

    It takes the options of `BlockyardSpec`. With `policy` or `"prefix_writes": "second_use"`, without vLLM's prefix
    caching, with chunks of several blocks, and for models that `_can_be_exclusive` excludes, the host keeps all that is
    computed, as with `BlockyardSpec`.

    Args:
        vllm_config: from vLLM.
        role: of the scheduler, or of a worker.
        kv_cache_config: from vLLM.

    Raises:
        InvalidArgumentError: an option is wrong.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _name_spec(vllm_config)
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = config.canonical_layout
        spec = BlockyardSpec(config)
        if (units := _units(spec, kv_cache_config)) is not None:
            spec.use_units(units)
        spec.cache_groups = _cache_groups(kv_cache_config)
        is_cached = vllm_config.cache_config.enable_prefix_caching  # without, the pool has no keys to store
        spec.is_exclusive = is_exclusive = is_cached and _can_be_exclusive(spec, vllm_config, kv_cache_config)
        spec.can_key_chunks = not is_exclusive
        self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            scheduler = ExclusiveScheduler if is_exclusive else LenientScheduler
            self.connector_scheduler = scheduler(spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = ExclusiveWorker(spec, vllm_config, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        """Return the metrics of vLLM's connector and of `BlockyardSpec`."""
        _name_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Use vLLM's pool of device blocks."""
        if isinstance(self.connector_scheduler, ExclusiveScheduler):
            self.connector_scheduler.bind(gpu_block_pool)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads have ended; vLLM computes or fails those whose loads have failed."""
        results = super().get_transfer_results(finished_req_ids)
        if self.connector_worker is not None:
            results.failed_recving = self.connector_worker.take_failed_requests()
        return results


def _name_spec(vllm_config: Any) -> None:
    """Name the spec among the options, where vLLM's connector and its metrics look for it."""
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    for name, value in _SPEC.items():
        if options.setdefault(name, value) != value:
            raise InvalidArgumentError(f"{name} is {options[name]!r:.100}, but BlockyardKVConnector has {value!r}")


def _units(spec: BlockyardSpec, kv_cache_config: Any) -> Units | None:
    """Return how the host's memory is cut where groups have blocks of unequal bytes, and only this process uses it."""
    config = spec.config
    if config.extra_config.get("prefix_store") is not None or not spec.num_chunks:
        return None  # values of a store have one width
    if config.cache.blocks_per_chunk != 1 or config.parallel.pp_size != 1:
        return None
    groups = [group.group_id for group in config.groups]
    return units_of(kv_cache_config, groups, config.worker_kv_bytes_per_block)


def _cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Return the model's cache groups; empty if it has one that keeps all tokens, or one of another kind."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = [sum(pages_of(kv_cache_config, index)) for index in range(len(specs))]
    found = []
    for spec, size in zip(specs, sizes, strict=True):
        if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
            group = CacheGroup.full_attention()
        elif type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
            group = CacheGroup.sliding_window(spec.sliding_window)
        elif type(spec) is ChunkedLocalAttentionSpec:
            group = CacheGroup.chunked_attention(spec.attention_chunk_size)
        elif type(spec) is MambaSpec:
            group = CacheGroup.recurrent()
        else:
            return ()
        found.append(group.with_blocks(tokens=spec.block_size, bytes=size) if all(sizes) else group)
    return tuple(found) if len(found) > 1 or found[0].kind != "full_attention" else ()


def _can_be_exclusive(spec: BlockyardSpec, vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a host can hold what the device drops, block by block."""
    config, options = spec.config, spec.config.extra_config
    if options.get("policy") is not None or spec.writes_second_use or not spec.num_chunks:
        return False
    if config.parallel.dcp_size * config.parallel.pcp_size != 1 or config.cache.blocks_per_chunk != 1:
        return False
    # Model runner V2 clears new blocks before it tells a connector what the step needs of them.
    if kv_cache_config.needs_kv_cache_zeroing and vllm_config.use_v2_model_runner:
        return False
    tokens = config.cache.tokens_per_hash
    return all(_holds_whole_blocks(group.kv_cache_spec, tokens) for group in kv_cache_config.kv_cache_groups)


def _holds_whole_blocks(spec: Any, tokens_per_hash: int) -> bool:
    """Whether a block of a group that has a key holds what it says for good.

    A state's key may be finer than its block, and changes then; after drafts, vLLM's worker moves states on its own.
    """
    if type(spec) is MambaSpec:
        is_whole = spec.mamba_cache_mode == "align" and spec.block_size == tokens_per_hash
        return bool(is_whole and not spec.num_speculative_blocks)
    return type(spec) in _ATTENTION and bool(spec.prefix_cacheable)
