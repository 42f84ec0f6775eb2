"""LMCache's host memory in `bench_vllm_hits.py`: its connector, memory manager and eviction, without server and copies.

`LMCacheHost` is LMCache's connector for vLLM. What its server does for hits happens in this process: lookups lock and
touch the found beginning of a prompt, stores reserve memory or are dropped, the end of a request touches its chunks. A
chunk is one block. The server evicts in a thread that looks once a second: 20 % of the chunks once 80 % of the memory
is full, its defaults. Here it looks after each step, or with the option `early` before each eight chunks that are
stored, 2,048 tokens of LMCache's default chunks: then no store is dropped.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.integration.vllm import lmcache_mp_connector
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.storage_controllers.eviction_controller import L1EvictionController
from lmcache.v1.multiprocess.token_hasher import TokenHasher

TAG = "bench"
STORED_AT_ONCE = 8


class Host:
    """In place of the scheduler's messages to the server: the server's memory of one rank.

    Attributes:
        stored: number of chunks stored.
        loaded: number of chunks loaded.
    """

    def __init__(
        self, *, vllm_block_size: int, extra_config: dict[str, Any], model_name: str, **_connection: object
    ) -> None:
        self.lmcache_tokens_per_chunk = vllm_block_size
        page = int(extra_config["page_bytes"])
        memory = L1MemoryManagerConfig(int(extra_config["host_bytes"]), use_lazy=False, shm_name="")
        self._memory = L1Manager(L1ManagerConfig(memory))
        self._eviction, self._early = EvictionConfig(extra_config["policy"]), extra_config["early"]
        self._controller = L1EvictionController(self._memory, self._eviction)
        self._layout = MemoryLayoutDesc([torch.Size([page // 4])], [torch.float32])
        self._hasher = TokenHasher(vllm_block_size)
        self._model = model_name
        self._keys: dict[str, list[ObjectKey]] = {}
        self._found: dict[str, int] = {}
        self.stored = self.loaded = 0

    # ---- of the scheduler's side ----

    def maybe_submit_lookup_request(self, request: str, token_ids: list[int], **_options: object) -> None:
        """Find the beginning of a prompt, and lock it."""
        if request in self._found:
            return
        hashes = self._hasher.compute_chunk_hashes(token_ids)
        keys = [ObjectKey(self._hasher.hash_to_bytes(one), self._model, 0) for one in hashes]
        held = [error == L1Error.SUCCESS for error, _ in self._memory.reserve_read(keys).values()]
        found = (*held, False).index(False)
        self._memory.finish_read([key for key, is_held in zip(keys[found:], held[found:], strict=True) if is_held])
        self._memory.touch_keys(keys[:found])
        self._keys[request], self._found[request] = keys, found

    def check_lookup_result(self, request: str) -> int:
        """Return the number of tokens found."""
        return self._found[request] * self.lmcache_tokens_per_chunk

    def cleanup_lookup_result(self, _request: str) -> None:
        """Its locks are released by a load or by `free_lookup_locks`."""

    def free_lookup_locks(self, *, start: int, end: int, request_id: str, **_options: object) -> None:
        """Release what the device has already."""
        size = self.lmcache_tokens_per_chunk
        self._memory.finish_read(self._keys[request_id][start // size : min(end // size, self._found[request_id])])

    def end_session(self, request: str) -> None:
        """Touch all chunks of a request."""
        self._found.pop(request)
        self._memory.touch_keys(self._keys.pop(request))

    def report_block_allocations(self, _records: object) -> None:
        """Only the server's metrics use these."""

    # ---- of the worker's side ----

    def transfer(self, metadata: Any) -> set[str]:
        """Carry a step's stores and loads out, then evict. Returns the requests whose loads have ended."""
        size, loaded = self.lmcache_tokens_per_chunk, set()
        for one in metadata.requests:
            keys = self._keys[one.request_id][one.op.start // size : one.op.end // size]
            if one.direction == "RETRIEVE":
                self._memory.finish_read(keys)
                self.loaded += len(keys)
                loaded.add(one.request_id)
                continue
            at_once = STORED_AT_ONCE if self._early else len(keys)
            for first in range(0, len(keys), at_once):
                self._store(keys[first : first + at_once])
        self._evict()
        return loaded

    def _store(self, keys: list[ObjectKey]) -> None:
        if self._early:
            self._evict()
        reserved = self._memory.reserve_write(keys, [False] * len(keys), self._layout, TAG)
        written = [key for key, (error, _) in reserved.items() if error == L1Error.SUCCESS]
        self._memory.finish_write(written, TAG)
        self.stored += len(written)

    def _evict(self) -> None:
        used, size = self._memory.get_memory_usage()
        if used < self._eviction.trigger_watermark * size:
            return
        policy, is_free = self._controller._eviction_policy, self._memory.is_key_evictable  # noqa: SLF001
        for action in policy.get_eviction_actions(self._eviction.eviction_ratio, key_eligible_filter=is_free):
            self._controller.execute_eviction_action(action)


class LMCacheHost(lmcache_mp_connector.LMCacheMPConnector):  # type: ignore[misc]
    """LMCache's connector over a `Host` in this process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        lmcache_mp_connector.LMCacheMPSchedulerAdapter = Host
        super().__init__(*arguments, **options)


class LMCacheWorker:
    """The worker side of `LMCacheHost`."""

    def __init__(self, host: Host) -> None:
        self.worker = host
        self._loaded: set[str] = set()

    def handle_preemptions(self, _metadata: Any) -> None:
        """Nothing is under way."""

    def start_kv_transfers(self, metadata: Any) -> None:
        """End the step's loads and stores."""
        self._loaded |= self.worker.transfer(metadata)

    def prepare_store_kv(self, _metadata: Any) -> None:
        """The stores have ended with the loads."""

    def get_finished(self, ended: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose stores and whose loads have ended."""
        loaded, self._loaded = self._loaded, set()
        return set(ended), loaded

    def build_connector_worker_meta(self) -> None:
        """It reports nothing."""
