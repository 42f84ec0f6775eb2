"""`BlockyardSpec`: creates manager and worker for vLLM's `OffloadingConnector`."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.integrations.vllm.external import TIMEOUT_BASE_SECONDS
from blockyard.integrations.vllm.manager import BlockyardManager
from blockyard.integrations.vllm.metrics import definitions
from blockyard.integrations.vllm.recording import ChunkRecorder
from blockyard.integrations.vllm.region import SharedRegion
from blockyard.integrations.vllm.tier import namespace
from blockyard.integrations.vllm.worker import BlockyardWorker
from blockyard.stores import open_store
from blockyard.stores.url import read_bytes
from blockyard.traces.recorder import record_from_environment

__all__ = ["BlockyardSpec"]

_LOG = logging.getLogger(__name__)
_OPTIONS = (
    "host_bytes",
    "cpu_bytes_to_use",
    "policy",
    "blocks_per_chunk",
    "prefix_store",
    "revision",
    "prefetch_timeout_base",
    "weights_fixed",
)
_INFO = ("blockyard_num_chunks", "blockyard_blocks_per_chunk", "blockyard_bytes_per_chunk", "blockyard_policy")


class BlockyardSpec(OffloadingSpec):
    """KV cache of vLLM in host memory: on a CPU or CUDA, loads before stores, with Blockyard's eviction policies.

    Named in the extra configuration of the `OffloadingConnector`, with these options besides vLLM's own:

    | option | meaning | default |
    |---|---|---|
    | `host_bytes` | host memory for all workers together: bytes, or text such as `"64GiB"` | required |
    | `cpu_bytes_to_use` | the same, under the name used by vLLM's own spec | |
    | `policy` | which chunk is evicted first, a policy name of `blockyard.PrefixCaching` | `"lru"` |
    | `blocks_per_chunk` | device blocks stored under one key | 1 |
    | `prefix_store` | URL of a prefix store below the host, see `blockyard.open_store` | none |
    | `revision` | revision of the weights; chunks of other revisions are not found | empty |
    | `prefetch_timeout_base` | seconds that a request waits for the store, plus one for every 16 MB | 5 |
    | `weights_fixed` | whether the weights stay the same while the engine runs, even across sleep and reset | false |

    Args:
        config: from vLLM.

    Raises:
        InvalidArgumentError: an option is missing, out of range or contradicts another.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        options = config.extra_config
        _warn_of_typos(options)
        self.bytes_per_chunk: int = (
            config.worker_kv_bytes_per_block * config.parallel.world_size * config.cache.blocks_per_chunk
        )
        host_bytes = _host_bytes(options, self.bytes_per_chunk)
        # Without blocks there is nothing to store, and nothing to size chunks by.
        self.num_chunks: int = host_bytes // self.bytes_per_chunk if self.bytes_per_chunk else 0
        self.policy = str(options.get("policy", "lru"))
        self._external = _external(options)
        self._manager: BlockyardManager | None = None
        self._worker: BlockyardWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics reported by `BlockyardManager.get_stats`."""
        return definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels filled by `BlockyardManager.config_info`."""
        return _INFO

    def get_manager(self) -> BlockyardManager:
        """Return the scheduler side, always the same object."""
        if self._manager is None:
            facts = (self.num_chunks, self.blocks_per_chunk, self.bytes_per_chunk, self.policy)
            self._manager = BlockyardManager(
                self.num_chunks,
                policy=self.policy,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                weights_fixed=self._external is not None and self._external.weights_fixed,
                info=dict(zip(_INFO, facts, strict=True)),
                recorder=self._recorder(),
            )
            if self._external is not None and self.num_chunks:
                self._open_external(self._external)
            _LOG.info("%d host chunks of %d bytes, policy %s", self.num_chunks, self.bytes_per_chunk, self.policy)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> BlockyardWorker:
        """Return the worker that copies between these KV caches and host memory, always the same object."""
        if self._worker is None:
            shared = self._external is not None and self.num_chunks
            self._worker = BlockyardWorker(
                kv_caches,
                blocks_per_chunk=self.blocks_per_chunk,
                num_chunks=self.num_chunks,
                region=self._region(self.config.parallel.rank) if shared else None,
                block_bytes=self.config.worker_kv_bytes_per_block if shared else None,
            )
        return self._worker

    def _recorder(self) -> ChunkRecorder | None:
        groups = self.config.groups
        recorder = record_from_environment(groups[0].tokens_per_block * self.blocks_per_chunk) if groups else None
        return None if recorder is None else ChunkRecorder(recorder)

    def _open_external(self, external: _External) -> None:
        manager = self._manager
        if manager is None:
            return
        store = open_store(
            external.url,
            bytes_per_block=self.bytes_per_chunk,
            namespace=namespace(self, self.bytes_per_chunk, external.revision),
            use="prefix",
        )
        try:
            region = self._region(self.config.parallel.world_size)
        except BlockyardError:
            store.close()
            raise
        manager.use_external(store, region, external.timeout_base, external.url)

    def _region(self, place: int) -> SharedRegion:
        world = self.config.parallel.world_size
        part = self.num_chunks * self.blocks_per_chunk * self.config.worker_kv_bytes_per_block
        return SharedRegion(self.config.engine_id, part, world, place)


class _External(NamedTuple):
    url: str
    revision: str
    timeout_base: float
    weights_fixed: bool


def _warn_of_typos(options: Any) -> None:
    """Warn about options that look like ours but misspelt. None of vLLM's own options resemble ours."""
    for name in options:
        near = [] if name in _OPTIONS else get_close_matches(str(name), _OPTIONS, n=1, cutoff=0.7)
        if near:
            _LOG.warning("kv_connector_extra_config has %r, which is ignored: is it %r?", name, near[0])


def _external(options: Any) -> _External | None:
    """Read the options of the external store; None if there is none."""
    url = options.get("prefix_store")
    if url is None:
        return None
    if not isinstance(url, str):
        raise InvalidArgumentError(f"prefix_store is {url!r}, must be a URL: file:///dir?size=500GiB")
    base = options.get("prefetch_timeout_base", TIMEOUT_BASE_SECONDS)
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base <= 3600:
        raise InvalidArgumentError(f"prefetch_timeout_base is {base!r}, must be seconds above 0, at most 3600")
    fixed = options.get("weights_fixed", False)
    if not isinstance(fixed, bool):
        raise InvalidArgumentError(f"weights_fixed is {fixed!r}, must be true or false")
    return _External(url, str(options.get("revision", "")), float(base), fixed)


def _host_bytes(options: Any, bytes_per_chunk: int) -> int:
    given = {name: options[name] for name in ("host_bytes", "cpu_bytes_to_use") if options.get(name) is not None}
    if len(given) != 1:
        found = " and ".join(given) or "neither"
        raise InvalidArgumentError(f"{found} is given, must be exactly one of host_bytes and cpu_bytes_to_use")
    ((name, value),) = given.items()
    if isinstance(value, float) and value.is_integer():  # as JSON may write it
        value = int(value)
    return read_bytes(name, value, holds=max(1, bytes_per_chunk), what="chunk")
