"""`BlockyardSpec`: creates manager and worker for vLLM's `OffloadingConnector`."""

from __future__ import annotations

import hashlib
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from blockyard._core import CacheGroup
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.compat import engine_log
from blockyard.integrations.options.vllm import (
    POLICIES,
    ExternalOptions,
    check_connectors,
    read_external,
    read_host_bytes,
    unused_options,
)
from blockyard.integrations.vllm.identity import current_config, cut_by_heads, identify
from blockyard.integrations.vllm.manager import BlockyardManager
from blockyard.integrations.vllm.metrics import definitions
from blockyard.integrations.vllm.recording import ChunkRecorder
from blockyard.integrations.vllm.region import SharedRegion, WorkerPieces
from blockyard.integrations.vllm.sharing.token_order import find_order
from blockyard.integrations.vllm.tier import namespace
from blockyard.integrations.vllm.units import Units
from blockyard.integrations.vllm.worker import BlockyardWorker
from blockyard.stores import open_store
from blockyard.stores.adapters.checkpoint import require_revision
from blockyard.stores.adapters.chunks import HeadShards
from blockyard.stores.adapters.objects import about_store
from blockyard.stores.adapters.options import read_choice
from blockyard.traces.recorder import record_from_environment

__all__ = ["BlockyardSpec"]

_LOG = engine_log("vLLM")
_SIZES = {
    (False, False): "",
    (True, False): ", for all tensor-parallel sizes",
    (True, True): ", for all tensor-parallel and block sizes",
}
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
    | `revision` | a name for what the workers cannot see, such as LoRA adapters | empty |
    | `prefetch_timeout_base` | seconds that a request waits for the store, plus one for every 16 MB | 5 |
    | `prefix_writes` | what is written there: `"through"`, all, or `"second_use"`, chunks used twice | `"through"` |
    | `weights_fixed` | whether the weights stay the same while the engine runs, even across sleep and reset | false |
    | `canonical_layout` | whether engines of other tensor-parallel and block sizes share the store | false |

    Args:
        config: from vLLM.

    Raises:
        InvalidArgumentError: an option is missing, out of range or contradicts another.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        options = {name: value for name, value in config.extra_config.items() if value is not None}
        check_connectors(config.extra_config, config)
        # Workers that have the same bytes, as those of MLA models do, share one copy, which the first one writes.
        self.replicated_layout = config.parallel.world_size > 1 and getattr(config, "replicated_layout", False)
        copies = 1 if self.replicated_layout else config.parallel.world_size
        self.bytes_per_chunk: int = config.worker_kv_bytes_per_block * copies * config.cache.blocks_per_chunk
        self._unused = unused_options(options, config)
        self._host_bytes = read_host_bytes(options, self.bytes_per_chunk, self._unused)
        # Without blocks there is nothing to store, and nothing to size chunks by.
        self.num_chunks: int = self._host_bytes // self.bytes_per_chunk if self.bytes_per_chunk else 0
        self.units: Units | None = None
        self.cache_groups: tuple[CacheGroup, ...] = ()  # named in recordings; a spec is not told them
        self.policy = read_choice("policy", options.get("policy"), POLICIES, "lru")
        self.is_exclusive = False
        self.can_key_chunks = False  # whether the scheduler side can make keys from a request's tokens
        self.tokens_per_key: int = config.cache.tokens_per_hash  # of each link of the chain that ends in a key
        self._external = read_external(options)
        self._is_canonical = self._external is not None and bool(getattr(config, "canonical_layout", False))
        self._is_shared = bool(self.num_chunks) and (self._external is not None or self.replicated_layout)
        self._manager: BlockyardManager | None = None
        self._worker: BlockyardWorker | None = None

    @property
    def writes_second_use(self) -> bool:
        """Whether a store below gets only chunks that are used twice."""
        return self._external is not None and self._external.prefix_writes == "second_use"

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens of a chunk of the first cache group."""
        return int(self.config.groups[0].tokens_per_block * self.blocks_per_chunk)

    def use_units(self, units: Units) -> None:
        """Cut host memory into units: chunks are units from then on. Before manager and worker are made."""
        copies = 1 if self.replicated_layout else self.config.parallel.world_size
        self.units, self.bytes_per_chunk = units, units.unit_bytes * copies
        self.num_chunks = self._host_bytes // self.bytes_per_chunk

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
            policy = "exclusive" if self.is_exclusive else self.policy
            facts = (self.num_chunks, self.blocks_per_chunk, self.bytes_per_chunk, policy)
            self._manager = BlockyardManager(
                self.num_chunks,
                policy=self.policy,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                weights_fixed=self._external is not None and self._external.weights_fixed,
                info=dict(zip(_INFO, facts, strict=True)),
                recorder=self._recorder(),
                units=self.units,
            )
            about = "no prefix store"
            if self._external is not None and self.num_chunks:
                about = self._open_external(self._manager, self._external)
            elif self._is_shared:
                self._manager.region = self._region(self.config.parallel.world_size)
            if self._unused:
                _LOG.warning("kv_connector_extra_config has options without effect: %s", ", ".join(self._unused))
            chunks = self.num_chunks, self.bytes_per_chunk
            _LOG.info("Blockyard: %d host chunks of %d bytes, policy %s, %s", *chunks, policy, about)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> BlockyardWorker:
        """Return the worker that copies between these KV caches and host memory, always the same object."""
        if self._worker is None:
            rank = self.config.parallel.rank
            identity, pieces = self._describe(kv_caches) if self._is_shared else (bytes(32), None)
            self._worker = BlockyardWorker(
                kv_caches,
                blocks_per_chunk=self.blocks_per_chunk,
                num_chunks=self.num_chunks,
                region=self._region(rank, identity, pieces) if self._is_shared else None,
                block_bytes=self.config.worker_kv_bytes_per_block if self._is_shared else None,
                stores=rank == 0 or not self.replicated_layout,
                units=self.units,
            )
        return self._worker

    def _recorder(self) -> ChunkRecorder | None:
        groups = self.config.groups
        if not groups:
            return None
        recorder = record_from_environment(groups[0].tokens_per_block * self.blocks_per_chunk, self.cache_groups)
        return None if recorder is None else ChunkRecorder(recorder)

    def _open_external(self, manager: BlockyardManager, external: ExternalOptions) -> str:
        """Open the external store for a manager; return its description."""
        region = self._region(self.config.parallel.world_size)
        try:
            if bytes(32) in region.identities:
                require_revision(external.revision, external.url, "the workers do not say what they compute with")
            shards = self._shards(region)
            width = self.bytes_per_chunk if shards is None else self._part_bytes * shards.num_shards
            if shards is not None and shards.tokens is not None and self.can_key_chunks:
                self.tokens_per_key = self.tokens_per_chunk
            name = namespace(self, width, external.revision, region.identities, shards=shards)
            store = open_store(external.url, bytes_per_block=width, namespace=name, use="prefix")
        except BaseException:
            region.close()
            raise
        manager.use_external(store, region, external, shards)
        return about_store(store, external.url, name) + _SIZES[shards is not None, bool(shards and shards.tokens)]

    def _describe(self, kv_caches: CanonicalKVCaches) -> tuple[bytes, WorkerPieces | None]:
        """Return what this worker computes with, and how its blocks are cut by heads, None if they are not."""
        identity = self._identity()
        if not self._is_canonical:
            return identity, None
        layers = [group.layer_names for group in self.config.groups]
        try:
            piece, shard = cut_by_heads(kv_caches, layers, self.config.worker_kv_bytes_per_block)
        except InvalidArgumentError as error:
            _LOG.warning("canonical_layout: engines of other tensor-parallel sizes do not share the store: %s", error)
            return identity, None
        try:
            tokens = {group.tokens_per_block for group in self.config.groups}
            if len(tokens) > 1:
                raise InvalidArgumentError(f"blocks of the cache groups have {sorted(tokens)} tokens")
            found = find_order(current_config(), kv_caches, layers, tokens.pop(), piece)
        except InvalidArgumentError as error:
            _LOG.warning("canonical_layout: engines of other block sizes do not share the store: %s", error)
            return identity, WorkerPieces(piece, shard)
        digest = hashlib.sha256(identity + found.digest).digest()
        return digest, WorkerPieces(found.piece_bytes, shard, found.order)

    def _shards(self, region: SharedRegion) -> HeadShards | None:
        """Return how the workers share the heads; None if a block of the store is a chunk of these workers."""
        pieces = [one for one in region.pieces if one is not None]
        cuts = {(one.piece_bytes, one.tokens) for one in pieces}
        if len(pieces) != self.config.parallel.world_size or len(cuts) != 1:
            return None
        copies = 1 if self.replicated_layout else len(pieces)
        return HeadShards(pieces[0].piece_bytes, tuple(one.shard for one in pieces[:copies]), pieces[0].tokens)

    def _identity(self) -> bytes:
        """Return what this worker computes with.

        Raises:
            InvalidArgumentError: it cannot tell, and there is no `revision`.
        """
        external = self._external
        if external is None:
            return bytes(32)
        layers = [name for group in self.config.groups for name in group.layer_names]
        found = identify(current_config(), layers)
        require_revision(external.revision, external.url, found.problem)
        return found.digest

    @property
    def _part_bytes(self) -> int:
        """Bytes of one worker's part of a chunk."""
        block: int = self.config.worker_kv_bytes_per_block if self.units is None else self.units.unit_bytes
        return block * int(self.blocks_per_chunk)

    def _region(self, place: int, identity: bytes = bytes(32), pieces: WorkerPieces | None = None) -> SharedRegion:
        part, world = self.num_chunks * self._part_bytes, self.config.parallel.world_size
        is_one = self.replicated_layout
        return SharedRegion(self.config.engine_id, part, world, place, identity, pieces=pieces, is_one=is_one)
