"""vLLM's own CPU and tiering specs with our worker, for theirs refuses to run on a CPU; and ours with a fault.

The managers of the first two are vLLM's.
"""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from blockyard.engine.ops import bind
from blockyard.integrations.vllm import BlockyardSpec
from blockyard.integrations.vllm.worker import BlockyardWorker, _GroupCopies, _rows


class PolicyOnCpu(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if self._worker is None:
            self._worker = BlockyardWorker(
                kv_caches, blocks_per_chunk=self.blocks_per_chunk, num_chunks=self.num_chunks
            )
        return self._worker


class TieringOnCpu(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            self._region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = BlockyardWorker(kv_caches, blocks_per_chunk=1, num_chunks=self.num_chunks)
            device = [_rows(cache.tensor, cache.page_size_bytes) for cache in kv_caches.tensors]
            host = [self._region.create_next_worker_view(rows.shape[1]).view(torch.uint8) for rows in device]
            worker._groups = [_GroupCopies(bind(device, host), bind(host, device)) for _ in kv_caches.group_data_refs]
            self._worker = worker
        return self._worker


class UnevenRanks(BlockyardSpec):
    """Ours, with the last rank's stores late, or its loads left out: as `last_rank` of the options says."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> BlockyardWorker:
        is_new = self._worker is None
        worker = super().get_worker(kv_caches)
        parallel, what = self.config.parallel, self.config.extra_config["last_rank"]
        if is_new and parallel.rank == parallel.world_size - 1:
            worker._groups = [_hindered(group, what) for group in worker._groups]
        return worker


class SwappedHeads(BlockyardSpec):
    """Ours, with the heads of the ranks in the wrong order."""

    def _shards(self, region: Any) -> Any:
        found = super()._shards(region)
        assert found is not None
        return found._replace(of_workers=found.of_workers[::-1])


def _hindered(group: _GroupCopies, what: str) -> _GroupCopies:
    def late(mapping: Any) -> None:
        time.sleep(0.1)
        if group.store is not None:
            group.store(mapping)

    return {"late": group._replace(store=late), "loads nothing": group._replace(load=lambda mapping: None)}[what]
