"""An exclusive host in vLLM: it holds what the device drops, not what the device has as well.

The scheduler side stores blocks shortly before vLLM's pool gives them away, in the pool's order; loads are planned by
vLLM's own scheduler side. Blocks that a step gives away unforeseen, to a long load for instance, are stored before they
are written to.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext

from blockyard.integrations.vllm.exclusive_host.order import HostOrder
from blockyard.integrations.vllm.manager import BlockyardManager

__all__ = ["ExclusiveScheduler", "ExclusiveWorker"]

_STEPS_AHEAD: Final = 2
"""Number of steps whose blocks are stored in advance: a store ends one or two steps later."""


@dataclass
class ExclusiveMetadata(OffloadingConnectorMetadata):
    """What an exclusive scheduler side wants of the workers: its stores begin with their step."""


@dataclass
class ExclusiveWorkerMetadata(OffloadingWorkerMetadata):
    """The transfers that have ended at a worker.

    Attributes:
        failed: those that have failed.
    """

    failed: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> ExclusiveWorkerMetadata:
        """Return what both workers report."""
        both = super().aggregate(other)
        failed = self.failed | getattr(other, "failed", set())
        return ExclusiveWorkerMetadata(both.completed_jobs, both.transfer_stats, failed)


@dataclass(slots=True)
class _RunningStore:
    """A store that no request has asked for.

    Attributes:
        keys: in the pool's order.
        blocks: ids of the device blocks that it reads.
        running: number of workers that have not ended it.
        context: stands for a request.
        is_good: whether no worker has failed.
        is_stale: whether the cache was reset since.
    """

    keys: list[OffloadKey]
    blocks: list[int]
    running: int
    context: ReqContext
    is_good: bool = True
    is_stale: bool = False


class ExclusiveScheduler(OffloadingConnectorScheduler):
    """The scheduler side: stores what the device is about to drop, instead of what is computed.

    Args:
        spec: a `BlockyardSpec` with one block a chunk.
        vllm_config: for the size of a step.
        kv_cache_config: of one group of full attention.
    """

    manager: BlockyardManager

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._block_tokens: int = self.config.kv_group_configs[0].tokens_per_block
        limits = vllm_config.scheduler_config
        self._step_blocks: int = -(-limits.max_num_batched_tokens // self._block_tokens) + limits.max_num_seqs
        self._order = HostOrder(self.manager.num_chunks, kv_cache_config.num_blocks)
        self._pool: Any = None
        self._running: dict[int, _RunningStore] = {}
        self._read_by: dict[int, int] = {}  # by block, the running store that reads it
        self._failed_loads: set[int] = set()  # that some worker has not ended
        self._new: dict[int, TransferJob] = {}
        # Blocks that the pool may give away next, with their keys, in its order; those looked at before.
        self._watched: dict[int, OffloadKey] = {}
        self._looked_at: dict[int, OffloadKey] = {}
        self._left, self._is_stored = 0, False  # watched blocks left, at least, and whether the host has their keys
        self._asked: tuple[str, int] | None = None  # the request last looked up, and its tokens on the device

    def bind(self, pool: Any) -> None:
        """Use vLLM's pool of device blocks."""
        self._pool = pool

    # ---- lookups and loads ----

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those on the device, and whether there are any."""
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        if found is not None:
            self._asked = request.request_id, num_computed_tokens
            # Blocks of tokens that are on the device may leave the pool's front, too.
            blocks = -(-(num_computed_tokens + found) // self._block_tokens)
            self._left -= blocks
            if self._left < self._step_blocks:
                self._watched.update(self._front(blocks + _STEPS_AHEAD * self._step_blocks))
                self._left, self._is_stored = self._reach(blocks), False
        return found, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a load into a request's blocks, and before it the stores of what they held."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._store_given([block.block_id for block in blocks.blocks[0]])
        asked, self._asked = self._asked, None
        if asked is not None and asked[0] == request.request_id and not request.num_preemptions:
            found = (asked[1] + num_external_tokens) // self._block_tokens
            self._order.find(self._req_status[request.request_id].group_states[0].offload_keys[:found])

    # ---- stores ----

    def _build_partial_tail_store_jobs(self, _scheduler_output: Any) -> dict[int, TransferJob]:
        return {}

    def _build_store_jobs(self, _scheduler_output: Any) -> dict[int, TransferJob]:
        """Store what this step has given away unforeseen, and what the next steps will give away."""
        given = self._current_batch_allocated_block_ids
        self._store_given(self._watched.keys() & given)
        loaded = [job.dst_spec.block_ids.tolist() for job in self._current_batch_load_jobs.values()]
        computed = (self._read_by.keys() & given).difference(*loaded)  # the worker orders loads itself
        self._current_batch_jobs_to_flush.update(self._read_by[at] for at in computed)
        self._left -= len(given)
        if self._left < self._step_blocks or not self._is_stored:
            front = dict(self._front(_STEPS_AHEAD * self._step_blocks))
            before, self._looked_at, self._watched = self._looked_at, front, dict(front)
            self._left, self._is_stored = self._reach(0), True
            self._store([(key, at) for at, key in front.items() if before.get(at) != key])
        jobs, self._new = self._new, {}
        return jobs

    def _reach(self, behind: int) -> int:
        """Return how many free blocks a look at the pool's front covers; what is freed later is not among them."""
        free: int = self._pool.free_block_queue.num_free_blocks
        return min(_STEPS_AHEAD * self._step_blocks, free - behind)

    def _front(self, count: int) -> list[tuple[int, OffloadKey]]:
        """Return those of the pool's next blocks that hold a key, and their keys."""
        blocks = islice(self._pool.free_block_queue.iter_blocks_after(None), count)
        return [(block.block_id, block.block_hash) for block in blocks if block.block_hash is not None]

    def _store_given(self, ids: Collection[int]) -> None:
        """Store what blocks held that the pool has just given away: nothing has been written to them yet."""
        blocks, watched = self._pool.blocks, self._watched
        given = {at for at in ids if at in watched and blocks[at].block_hash != watched[at]}
        if given:
            self._store([(watched.pop(at), at) for at in list(watched) if at in given])

    def _store(self, blocks: list[tuple[OffloadKey, int]]) -> None:
        """Store blocks whose keys the host lacks; if it has too little room, those that the pool gives away last."""
        found = self.manager.find_all([key for key, _ in blocks])
        self._order.hold(key for (key, _), what in zip(blocks, found, strict=True) if what == "hit")
        new = {key: at for (key, at), what in zip(blocks, found, strict=True) if what == "miss"}
        keys = list(new)[max(0, len(new) - self._make_room(len(new))) :]
        context = ReqContext(req_id="")
        output = self.manager.prepare_store(keys, context) if keys else None
        if output is None or not output.keys_to_store:
            return
        for key in output.evicted_keys:
            self._order.drop(key)
        keys, job = list(output.keys_to_store), self._generate_job_id()
        ids = [new[key] for key in keys]
        self._running[job] = _RunningStore(keys, ids, self.config.num_workers, context)
        self._read_by.update(dict.fromkeys(ids, job))
        source = GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[0])
        self._new[job] = TransferJob(req_id="", src_spec=source, dst_spec=output.store_spec)

    def _make_room(self, chunks: int) -> int:
        """Evict keys until `chunks` are empty, or no more can be; return how many a store can get."""
        short = chunks - self.manager.num_empty
        if short > 0:
            victims = list(islice(filter(self.manager.is_idle, self._order), short))
            for key in victims:
                self._order.drop(key)
            self.manager.evict(victims)
        return self.manager.num_free

    def build_connector_meta(self, scheduler_output: Any) -> ExclusiveMetadata:
        """Return the transfers of a step."""
        # vLLM would wait for the stores of preempted requests. They have none here, but loads, if they went on at once
        # after a reset, and vLLM asserts that there are none.
        if scheduler_output.preempted_req_ids:
            self._is_stored = False  # what one got and gave back in this step, no list of blocks says
        meta = super().build_connector_meta(replace(scheduler_output, preempted_req_ids=None))
        return ExclusiveMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush)

    # ---- the end of transfers ----

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping."""
        return bool(self._running) or super().has_pending_push_work()

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which transfers have ended."""
        meta = connector_output.kv_connector_worker_meta
        jobs = meta.completed_jobs if isinstance(meta, OffloadingWorkerMetadata) else {}
        failed: set[int] = getattr(meta, "failed", set())
        for job in [job for job in jobs if job in self._running]:
            self._end_store(job, jobs.pop(job), is_good=job not in failed)
        loads = {job: (self._jobs[job].keys, self._is_gone(job)) for job in jobs if job in self._jobs}
        self._failed_loads |= failed & loads.keys()
        super().update_connector_output(connector_output)
        for job, (keys, is_gone) in loads.items():
            if job not in self._jobs:
                self._end_load(job, keys, is_gone=is_gone)

    def _is_gone(self, job: int) -> bool:
        """Whether the request of a load has finished: the device drops what is loaded."""
        return bool(self._req_status[self._jobs[job].req_id].req.is_finished())

    def _end_load(self, job: int, keys: Collection[OffloadKey], *, is_gone: bool) -> None:
        if job in self._failed_loads:  # or the request would load, and fail, forever
            self._failed_loads.remove(job)
            for key in keys:
                self._order.drop(key)
            self.manager.evict(list(keys))
        elif not is_gone:
            self._order.copy(keys)

    def _end_store(self, job: int, workers: int, *, is_good: bool) -> None:
        store = self._running[job]
        store.running -= workers
        store.is_good &= is_good
        if store.running > 0:
            return
        del self._running[job]
        for at in store.blocks:
            if self._read_by.get(at) == job:
                del self._read_by[at]
        if not store.is_stale:
            self.manager.complete_store(store.keys, store.context, store.is_good)
            if store.is_good:
                self._order.hold(store.keys)

    def reset_cache(self) -> None:
        """Forget all keys."""
        flushed = set(self._current_batch_jobs_to_flush)  # by a reset before
        self._current_batch_jobs_to_flush.clear()
        super().reset_cache()
        self._current_batch_jobs_to_flush.update(flushed, self._running)
        for store in self._running.values():
            store.is_stale = True
        self._failed_loads.clear()
        self._order.clear()
        self._watched, self._looked_at, self._left = {}, {}, 0


class ExclusiveWorker(OffloadingConnectorWorker):
    """The worker side: submits stores as their step begins, and reports failures.

    The scheduler side decides whether the host is exclusive, since a worker may see other specs of the layers: with
    another scheduler side this is vLLM's worker.
    """

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._connector_worker_meta = ExclusiveWorkerMetadata()
        self._written: dict[int, list[int]] = {}  # device blocks by load
        self._bad_blocks: set[int] = set()
        self._is_exclusive = False

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Submit the stores before the step's computation and loads write to their blocks, and wait for some."""
        self._is_exclusive = isinstance(kv_connector_metadata, ExclusiveMetadata)
        stores = kv_connector_metadata.store_jobs
        if self._is_exclusive and kv_connector_metadata.jobs_to_flush:
            # After a reset, a store may write to a chunk that a load from before it still reads.
            self.worker.wait(kv_connector_metadata.jobs_to_flush)
        for job in list(stores) if self._is_exclusive else ():
            entry = stores.pop(job)
            if self._is_store_writer:
                self.worker.submit_store(job, entry.src_spec, entry.dst_spec)
            else:
                self._connector_worker_meta.mark_completed(job)
        super().handle_preemptions(kv_connector_metadata)

    def start_kv_transfers(self, metadata: Any) -> None:
        """Submit the step's loads."""
        if self._is_exclusive:
            self._written.update({job: list(entry.dst_spec.block_ids) for job, entry in metadata.load_jobs.items()})
        super().start_kv_transfers(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return no request whose stores, and the requests whose loads have ended."""
        if not self._is_exclusive:
            sent, loaded = super().get_finished(finished_req_ids)
            return sent, loaded
        meta, loaded = self._connector_worker_meta, set()
        for result in self.worker.get_finished():
            job, request = result.job_id, self._load_jobs.pop(result.job_id, None)
            written = self._written.pop(job, [])
            if result.success:
                stats = meta.transfer_stats.store if request is None else meta.transfer_stats.load
                stats.record(result.transfer_size, result.transfer_time)
            else:
                meta.failed.add(job)
                self._bad_blocks.update(written)
            meta.mark_completed(job)
            if request is not None:
                loaded.add(request)
        return set(), loaded

    def build_connector_worker_meta(self) -> Any:
        """Return the transfers that have ended since the last call."""
        meta = super().build_connector_worker_meta()
        if meta is not None:
            self._connector_worker_meta = ExclusiveWorkerMetadata()
        return meta

    def take_bad_blocks(self) -> set[int]:
        """Return the device blocks whose loads have failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad
