"""`BlockyardSpec`: what vLLM's `OffloadingConnector` makes manager and worker from."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.vllm.manager import BlockyardManager
from blockyard.integrations.vllm.metrics import definitions
from blockyard.integrations.vllm.worker import BlockyardWorker
from blockyard.stores.base import parse_size

__all__ = ["BlockyardSpec"]

_LOG = logging.getLogger(__name__)
_INFO = ("blockyard_num_chunks", "blockyard_blocks_per_chunk", "blockyard_bytes_per_chunk", "blockyard_policy")


class BlockyardSpec(OffloadingSpec):
    """KV cache of vLLM in host memory: on a CPU or CUDA, loads before stores, with Blockyard's eviction policies.

    It is named in the extra configuration of the `OffloadingConnector`, with these options beside vLLM's own:

    | option | meaning | default |
    |---|---|---|
    | `host_bytes` | host memory for all workers together: bytes, or text such as `"64GiB"` | required |
    | `cpu_bytes_to_use` | the same, by the name that vLLM's own spec has for it | |
    | `policy` | which chunk is evicted first, a name as for `blockyard.PrefixCaching` | `"lru"` |
    | `blocks_per_chunk` | device blocks that are stored under one key | 1 |

    Args:
        config: from vLLM.

    Raises:
        InvalidArgumentError: an option is missing, out of range or contradicts another.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        options = config.extra_config
        if "external" in options:
            raise InvalidArgumentError(
                f"external is {options['external']!r}: BlockyardSpec has host memory alone; for an external store, "
                "name BlockyardTier in secondary_tiers of vLLM's TieringOffloadingSpec"
            )
        self.bytes_per_chunk: int = (
            config.worker_kv_bytes_per_block * config.parallel.world_size * config.cache.blocks_per_chunk
        )
        host_bytes = _host_bytes(options)
        # Without blocks there is nothing to store, and nothing to size chunks by.
        self.num_chunks: int = host_bytes // self.bytes_per_chunk if self.bytes_per_chunk else 0
        if self.bytes_per_chunk and not self.num_chunks:
            raise InvalidArgumentError(
                f"host_bytes is {host_bytes}, must be at least the {self.bytes_per_chunk} bytes of one chunk"
            )
        self.policy = str(options.get("policy", "lru"))
        self._manager: BlockyardManager | None = None
        self._worker: BlockyardWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return what `BlockyardManager.get_stats` reports."""
        return definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels that `BlockyardManager.config_info` fills."""
        return _INFO

    def get_manager(self) -> BlockyardManager:
        """Return the scheduler's side, always the same one."""
        if self._manager is None:
            facts = (self.num_chunks, self.blocks_per_chunk, self.bytes_per_chunk, self.policy)
            self._manager = BlockyardManager(
                self.num_chunks,
                policy=self.policy,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                info=dict(zip(_INFO, facts, strict=True)),
            )
            _LOG.info("%d host chunks of %d bytes, policy %s", self.num_chunks, self.bytes_per_chunk, self.policy)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> BlockyardWorker:
        """Return what copies between these KV caches and host memory, always the same one."""
        if self._worker is None:
            self._worker = BlockyardWorker(
                kv_caches, blocks_per_chunk=self.blocks_per_chunk, num_chunks=self.num_chunks
            )
        return self._worker


def _host_bytes(options: Any) -> int:
    given = {name: options[name] for name in ("host_bytes", "cpu_bytes_to_use") if options.get(name) is not None}
    if len(given) != 1:
        raise InvalidArgumentError(f"{sorted(given) or 'nothing'} given, wanted one of host_bytes and cpu_bytes_to_use")
    ((name, value),) = given.items()
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError as error:
            raise InvalidArgumentError(f"{name}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**62:
        raise InvalidArgumentError(f"{name} is {value!r}, must be a number of bytes above 0 and below 2**62")
    return int(value)
