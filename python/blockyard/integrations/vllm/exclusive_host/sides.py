"""An exclusive host in vLLM: it holds what the device drops, not what the device has as well.

The scheduler side stores blocks shortly before vLLM's pool gives them away, in the pool's order; loads are planned by
vLLM's own scheduler side. Blocks that a step gives away unforeseen, to a long load for instance, are stored before they
are written to.

With several cache groups, of windows and states only those are stored where a later request may go on: `Points`. What a
load needs and only the device has goes to the host first.

With a prefix store below, what is computed passes through the host to the store at once, so that it outlives the
engine. Once written, these copies are the first that the host evicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, takewhile
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext, get_offload_group_idx

from blockyard.integrations.vllm.exclusive_host.order import HostOrder
from blockyard.integrations.vllm.exclusive_host.points import Points
from blockyard.integrations.vllm.manager import BlockyardManager
from blockyard.integrations.vllm.sharing.chunk_keys import KeyedByChunk, chunk_hasher

__all__ = ["ExclusiveScheduler", "ExclusiveWorker", "LenientScheduler"]

_STEPS_AHEAD: Final = 2
"""Number of steps whose blocks are stored in advance: a store ends one or two steps later."""
_COPY_SHARE: Final = 0.125
"""Share of the host up to which blocks that the device has as well are copied to it for the store."""
_MOST_BROUGHT: Final = 2
"""How often a request waits while blocks of the device go to the host for it."""


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
        copies: keys that the device will have as well when it ends.
        is_good: whether no worker has failed.
        is_stale: whether the cache was reset since.
    """

    keys: list[OffloadKey]
    blocks: list[int]
    running: int
    context: ReqContext
    copies: set[OffloadKey]
    is_good: bool = True
    is_stale: bool = False


class LenientScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler side, but for transfers that may fail: what they were to copy is missing from then on."""

    manager: BlockyardManager
    config: Any

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        if getattr(self.config, "sync_load_budget_bytes", 0):  # 0.33: a load that fails within its step has no report
            self.config = self.config._replace(sync_load_budget_bytes=0)
        self._hasher: Any = None  # of whole chunks, if keys are not made of vLLM's hashes of blocks
        if spec.tokens_per_key != spec.config.cache.tokens_per_hash:
            self._hasher = chunk_hasher(vllm_config, spec.tokens_per_key)
        self._failed_loads: set[int] = set()  # that some worker has not ended
        self._is_offered = self._is_stuck = False  # a load to vLLM in this step, which in the last one did nothing

    def on_new_request(self, request: Any) -> None:
        """Begin to follow a request."""
        super().on_new_request(request)
        if self._hasher is not None:
            state = self._req_status[request.request_id]
            self._req_status[request.request_id] = KeyedByChunk(
                state.config, request, state.req_context, state.offloading_context, hasher=self._hasher
            )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those on the device, and whether there are any.

        vLLM keeps blocks for a request whose load has failed. If another request waits for them before that one, none
        goes on: then this one computes what it could load.
        """
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        if found and self._is_stuck:
            self._req_status[request.request_id].update_num_hit_chunks(num_computed_tokens)
            return 0, False
        self._is_offered |= bool(found)
        return found, is_async

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the transfers of a step; vLLM 0.32 asserts that a request it has preempted does not load at once."""
        is_idle = not (scheduler_output.total_num_scheduled_tokens or self._has_transfers())
        self._is_offered, self._is_stuck = False, self._is_offered and is_idle
        loading = {self._jobs[job].req_id for job in self._current_batch_load_jobs}
        preempted = set(scheduler_output.preempted_req_ids or ())
        for name in preempted & loading:  # the blocks that its stores read are given away, as those of the others
            jobs = self._req_status[name].transfer_jobs
            self._current_batch_jobs_to_flush.update(job for job in jobs if self._jobs[job].is_store)
        return super().build_connector_meta(replace(scheduler_output, preempted_req_ids=preempted - loading))

    def _has_transfers(self) -> bool:
        return bool(self._jobs)

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which transfers have ended, and which of them have failed."""
        meta = connector_output.kv_connector_worker_meta
        jobs = meta.completed_jobs if isinstance(meta, OffloadingWorkerMetadata) else {}
        failed = [job for job in getattr(meta, "failed", ()) if job in self._jobs]
        for job in failed:
            if self._jobs[job].is_store:
                self.manager.spoil(self._jobs[job].keys)
        loads = {job: self._jobs[job] for job in jobs if job in self._jobs and not self._jobs[job].is_store}
        is_gone = {job: self._req_status[load.req_id].req.is_finished() for job, load in loads.items()}
        self._failed_loads |= loads.keys() & failed
        super().update_connector_output(connector_output)
        for job, load in loads.items():
            if job not in self._jobs:
                self._end_load(job, load.keys, is_gone=is_gone[job])

    def _end_load(self, job: int, keys: Collection[OffloadKey], *, is_gone: bool) -> None:
        """End a load; what could not be loaded is missing, or its request would load, and fail, forever."""
        if job in self._failed_loads:
            self._failed_loads.remove(job)
            self.manager.evict(list(keys))

    def reset_cache(self) -> None:
        """Forget all keys. vLLM's own asserts that there was a step since the last reset.

        It also goes back to the first chunk of each request. But blocks that have left a window may be others' by now:
        what was stored before is not stored again.
        """
        flushed = set(self._current_batch_jobs_to_flush)
        self._current_batch_jobs_to_flush.clear()
        states = [status.group_states[at] for status in self._req_status.values() for at in self._sliding_window_groups]
        stored = [(state.block_ids, state.next_stored_chunk_idx * self.config.blocks_per_chunk) for state in states]
        super().reset_cache()
        for blocks, count in stored:
            blocks[:count] = [0] * len(blocks[:count])
        self._current_batch_jobs_to_flush.update(flushed)
        self._failed_loads.clear()


class ExclusiveScheduler(LenientScheduler):
    """The scheduler side: stores what the device is about to drop, instead of what is computed.

    Args:
        spec: a `BlockyardSpec` with one block a chunk.
        vllm_config: for the size of a step.
        kv_cache_config: of groups of full or windowed attention, and of states.
    """

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        groups, limits = self.config.kv_group_configs, vllm_config.scheduler_config
        self._step_blocks: int = self._blocks(limits.max_num_batched_tokens) + limits.max_num_seqs * len(groups)
        units = spec.units
        self._chunks_of = {group.group_idx: 1 if units is None else units.counts[group.group_idx] for group in groups}
        keys = self.manager.num_chunks // min(self._chunks_of.values())  # on the host, at most
        self._order = HostOrder(self.manager.num_chunks, keys + kv_cache_config.num_blocks, self._num_chunks)
        self._points = Points(groups, keys + kv_cache_config.num_blocks)
        self._places = {group.group_idx: place for place, group in enumerate(groups)}
        self._wanted: dict[OffloadKey, None] = {}  # of the device, by requests that wait
        self._brought: Counter[str] = Counter()  # by request, how often it has waited so
        self._pool: Any = None
        self._running: dict[int, _RunningStore] = {}
        self._read_by: dict[int, int] = {}  # by block, the running store that reads it
        self._new: dict[int, TransferJob] = {}
        # Blocks that the pool may give away next, with their keys, in its order; those looked at before.
        self._watched: dict[int, OffloadKey] = {}
        self._looked_at: dict[int, OffloadKey] = {}
        self._left, self._is_stored = 0, False  # watched blocks left, at least, and whether the host has their keys
        self._asked: tuple[str, int] | None = None  # the request last looked up, and its tokens on the device
        self._computed: dict[OffloadKey, None] = {}  # that the store below has not been given yet
        if self.manager.external is not None:
            self.manager.changes = []

    def bind(self, pool: Any) -> None:
        """Use vLLM's pool of device blocks."""
        self._pool = pool

    # ---- lookups and loads ----

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those on the device, and whether there are any."""
        self._note_changes()
        found, is_async = self._match(request, num_computed_tokens, max_num_new_tokens)
        if found is not None:
            self._asked = request.request_id, num_computed_tokens
            # Blocks of tokens that are on the device may leave the pool's front, too.
            blocks = self._blocks(num_computed_tokens + found)
            self._left -= blocks
            if self._left < self._step_blocks:
                self._watched.update(self._front(blocks + _STEPS_AHEAD * self._step_blocks))
                self._left, self._is_stored = self._reach(blocks), False
        return found, is_async

    def _match(self, request: Any, computed: int, limit: int | None) -> tuple[int | None, bool]:
        """Look up a request; with several groups, what it needs of the device's goes to the host while it waits."""
        name = request.request_id
        if not self._points.windows or self._brought[name] >= _MOST_BROUGHT:
            found, is_async = super().get_num_new_matched_tokens(request, computed, limit)
            return found, is_async
        self.manager.is_elsewhere, was_offered = self._is_on_device, self._is_offered
        try:
            found, is_async = super().get_num_new_matched_tokens(request, computed, limit)
        finally:
            self.manager.is_elsewhere = None
        if found is None:
            return None, False
        status = self._req_status[name]
        self._note_points(status, computed + found)
        needed = self._points.needed(status.group_states, computed, computed + found) if found else []
        missing = [key for key, what in zip(needed, self.manager.find_all(needed), strict=True) if what == "miss"]
        if not missing:
            return found, is_async
        self._brought[name] += 1
        self._points.keep(needed)
        self._order.hold(self._held(needed))
        self._wanted.update(dict.fromkeys(missing))
        self._is_offered = was_offered
        return None, False

    def _note_points(self, status: Any, found: int) -> None:
        """Note where later requests may go on: at a prompt's end, and where what others computed ends."""
        request = status.req
        self._points.add(status.group_states, request.num_prompt_tokens - 1)
        full = self._full_attention_groups
        if not full:
            return
        keys, tokens = status.group_states[full[0]].offload_keys, self.config.kv_group_configs[full[0]].tokens_per_block
        known = zip(keys, self.manager.find_all(keys), strict=True)
        junction = tokens * sum(1 for _ in takewhile(lambda it: it[1] != "miss" or self._is_on_device(it[0]), known))
        junction = min(junction, request.num_tokens - 1)
        if junction > found:
            end = self._points.add(status.group_states, junction)
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, end)  # vLLM then makes a state there

    def _is_on_device(self, key: OffloadKey) -> bool:
        return self._pool.cached_block_hash_to_block.get_one_block(key) is not None

    def _held(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return those of some keys that the host holds; the last is evicted first."""
        return [key for key, what in zip(keys, self.manager.find_all(keys), strict=True) if what == "hit"][::-1]

    def _num_chunks(self, key: OffloadKey) -> int:
        """Return how many chunks of the host a key takes."""
        return self._chunks_of[get_offload_group_idx(key)]

    def _blocks(self, tokens: int) -> int:
        """Return how many blocks tokens take, at most."""
        return sum(-(-tokens // group.tokens_per_block) for group in self.config.kv_group_configs)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a load into a request's blocks, and before it the stores of what they held."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._store_given([block.block_id for group in blocks.blocks for block in group if not block.is_null])
        asked, self._asked = self._asked, None
        if asked is not None and asked[0] == request.request_id and not request.num_preemptions:
            states = self._req_status[request.request_id].group_states
            self._order.find(self._points.needed(states, 0, asked[1] + num_external_tokens))

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Note that a later request may go on where this one ends."""
        found: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        self._brought.pop(request.request_id, None)
        if (status := self._req_status.get(request.request_id)) is not None:
            end = self._points.add(status.group_states, request.num_tokens - 1)
            if self.manager.external is not None:
                self._computed.update(dict.fromkeys(self._points.tails(status.group_states, end)))
        return found

    # ---- stores ----

    def _build_partial_tail_store_jobs(self, _scheduler_output: Any) -> dict[int, TransferJob]:
        return {}

    def _build_store_jobs(self, scheduler_output: Any) -> dict[int, TransferJob]:
        """Store what this step has given away unforeseen, and what the next steps will give away."""
        given = self._current_batch_allocated_block_ids
        self._store_given(self._watched.keys() & given)
        self._bring(scheduler_output)
        if self.manager.external is not None:
            self._copy_computed(scheduler_output)
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

    def _bring(self, scheduler_output: Any) -> None:
        """Store what requests wait for, but not what this step is only going to compute: they ask again."""
        wanted, self._wanted = self._wanted, {}
        self._store(self._computed_blocks(list(wanted), scheduler_output)[::-1])

    def _computed_blocks(self, keys: list[OffloadKey], scheduler_output: Any) -> list[tuple[OffloadKey, int]]:
        """Return the device blocks that hold some keys, but not those that this step is only going to compute."""
        computed = self._computed_by(scheduler_output) if keys else set()
        blocks = [
            (key, self._pool.cached_block_hash_to_block.get_one_block(key)) for key in keys if key not in computed
        ]
        return [(key, block.block_id) for key, block in blocks if block is not None]

    def _copy_computed(self, scheduler_output: Any) -> None:
        """Store copies of what earlier steps have computed, for the store below; what finds no room does so later."""
        for name in chain(scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids or ()):
            if (status := self._req_status.get(name)) is not None:
                self._computed.update(dict.fromkeys(self._computed_before(status)))
        waiting = dict.fromkeys(islice(self._computed, self._num_copies()))
        later = islice(self._computed, len(waiting), self._pool.num_gpu_blocks + len(waiting))
        held = self.manager.find_all(list(waiting))
        new = [key for key, what in zip(waiting, held, strict=True) if what == "miss"]
        blocks = self._computed_blocks(new, scheduler_output)[::-1]
        stored = self._store(blocks, are_copies=True)
        left = [key for key, _ in reversed(blocks) if key not in stored] if self._has_transfers() else []
        self._computed = dict.fromkeys(chain(left, later))

    def _num_copies(self) -> int:
        """Return how many blocks may be copied to the host for the store below."""
        external = self.manager.external
        if external is None or not external.can_write:
            return 0
        under_way = external.num_unwritten + sum(len(store.copies) for store in self._running.values())
        return max(0, max(1, int(self.manager.num_chunks * _COPY_SHARE)) - under_way)

    def _has_transfers(self) -> bool:
        return bool(self._running) or super()._has_transfers()

    def _computed_before(self, status: Any) -> list[OffloadKey]:
        """Return the keys that a request has computed since the last call, before this step, and can be needed."""
        request = status.req
        # A request's last token has no bytes; its drafts, which vLLM refuses, may have.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        tokens, keys = self._calc_num_offloadable_tokens(status, tokens), []
        for group, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            begin = max(state.next_stored_chunk_idx, state.num_hit_chunks)
            keys += state.offload_keys[begin : status.storable_chunks(group, state, tokens)]
        status.advance_stored_idx(tokens)
        return self._points.sort(keys)[0]

    def _computed_by(self, scheduler_output: Any) -> set[OffloadKey]:
        """Return the keys of the blocks that a step computes: vLLM's pool names them before."""
        computed: set[OffloadKey] = set()
        for name, count in scheduler_output.num_scheduled_tokens.items():
            status = self._req_status[name]
            begin = status.req.num_computed_tokens
            for group, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
                tokens = group.tokens_per_block
                computed.update(state.offload_keys[begin // tokens : -(-(begin + count) // tokens)])
        return computed

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

    def _store(self, blocks: list[tuple[OffloadKey, int]], *, are_copies: bool = False) -> set[OffloadKey]:
        """Store blocks whose keys the host lacks; if it has too little room, those that the pool gives away last.

        Of what is not at a point, states get chunks that would be empty; a window's block serves nobody alone.

        Args:
            blocks: keys, and the ids of their blocks on the device.
            are_copies: whether the device goes on having them.

        Returns:
            The keys that are being stored.
        """
        if not blocks:
            return set()
        found = self.manager.find_all([key for key, _ in blocks])
        if not are_copies:  # what is being copied, too, will be on the host alone
            for store in self._running.values():
                store.copies.difference_update(key for key, _ in blocks)
        self._hold([key for (key, _), what in zip(blocks, found, strict=True) if what == "hit"])
        new = {key: at for (key, at), what in zip(blocks, found, strict=True) if what == "miss"}
        useful, others = self._points.sort(new)
        useful = self._that_fit(useful[::-1], self._make_room(sum(map(self._num_chunks, useful))))[::-1]
        left = self.manager.num_empty - sum(map(self._num_chunks, useful))
        others = self._that_fit(self._points.states(others), left)
        keys = sorted(useful + others, key=self._place)
        context = ReqContext(req_id="")
        output = self.manager.prepare_store(keys, context) if keys else None
        if output is None or not output.keys_to_store:
            return set()
        for key in output.evicted_keys:
            self._order.drop(key)
        stored, job = list(output.keys_to_store), self._generate_job_id()
        ids = [new[key] for key in stored]
        kept = set(stored)
        in_order = [key for key in new if key in kept]
        copies = set(kept) if are_copies else set()
        self._running[job] = _RunningStore(in_order, ids, self.config.num_workers, context, copies)
        self._read_by.update(dict.fromkeys(ids, job))
        sizes = Counter(map(self._place, stored))
        group_sizes = [sizes[place] for place in range(len(self._places))]
        source = GPULoadStoreSpec(ids, group_sizes=group_sizes, block_indices=[0] * len(group_sizes))
        self._new[job] = TransferJob(req_id="", src_spec=source, dst_spec=output.store_spec)
        return kept

    def _place(self, key: OffloadKey) -> int:
        """Return which of the groups a key is of."""
        return self._places[get_offload_group_idx(key)]

    def _that_fit(self, keys: list[OffloadKey], chunks: int) -> list[OffloadKey]:
        """Return the first keys, as many as `chunks` have room for."""
        taken = accumulate(map(self._num_chunks, keys))
        return [key for key, _ in takewhile(lambda it: it[1] <= chunks, zip(keys, taken, strict=True))]

    def _make_room(self, chunks: int) -> int:
        """Evict keys until `chunks` are empty, or no more can be; return how many a store can get."""
        with self.manager.lock:
            short = chunks - self.manager.num_empty
            if short > 0:
                victims = self._victims(short)
                while (missing := short - sum(map(self._num_chunks, victims))) > 0:
                    if not self.manager.release_retained(-(-missing // max(self._chunks_of.values()))):
                        break
                    victims = self._victims(short)
                for key in victims:
                    self._order.drop(key)
                self.manager.evict(victims)
            return self.manager.num_free

    def _victims(self, chunks: int) -> list[OffloadKey]:
        """Return the first keys to be evicted that have `chunks` together."""
        victims: list[OffloadKey] = []
        for key in self.manager.idle(self._order):
            if chunks <= 0:
                break
            victims.append(key)
            chunks -= self._num_chunks(key)
        return victims

    def _note_changes(self) -> None:
        """Follow what the threads of the store below have read to the host, and evicted for it."""
        if not self.manager.changes:
            return
        with self.manager.lock:
            changes, self.manager.changes = self.manager.changes, []
        for stored, evicted in changes:
            self._points.keep(stored)  # a request has asked for them
            for key, what in zip(evicted, self.manager.find_all(evicted), strict=True):
                if what == "miss":
                    self._order.drop(key)
            self._hold(self._held(stored))

    def build_connector_meta(self, scheduler_output: Any) -> ExclusiveMetadata:
        """Return the transfers of a step."""
        self._note_changes()
        self._make_room(0)  # for what is about to be read from the store below
        # vLLM would wait for the stores of preempted requests. They have none here, but loads, if they went on at once
        # after a reset, and vLLM asserts that there are none.
        if scheduler_output.preempted_req_ids:
            self._is_stored = False  # what one got and gave back in this step, no list of blocks says
        meta = super().build_connector_meta(replace(scheduler_output, preempted_req_ids=None))
        return ExclusiveMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush)

    # ---- the end of transfers ----

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping."""
        external = self.manager.external
        has_copies = bool(self._computed) and external is not None and external.can_write
        return has_copies or self._has_transfers() or super().has_pending_push_work()

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which transfers have ended."""
        self._note_changes()
        meta = connector_output.kv_connector_worker_meta
        jobs = meta.completed_jobs if isinstance(meta, OffloadingWorkerMetadata) else {}
        failed: set[int] = getattr(meta, "failed", set())
        for job in [job for job in jobs if job in self._running]:
            self._end_store(job, jobs.pop(job), is_good=job not in failed)
        super().update_connector_output(connector_output)

    def _end_load(self, job: int, keys: Collection[OffloadKey], *, is_gone: bool) -> None:
        if job in self._failed_loads:
            for key in keys:
                self._order.drop(key)
        elif not is_gone:  # else the device drops what is loaded
            self._order.copy(keys)
        super()._end_load(job, keys, is_gone=is_gone)

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
                self._order.copy(key for key in store.keys if key in store.copies)
                self._hold([key for key in store.keys if key not in store.copies])

    def _hold(self, keys: Collection[OffloadKey]) -> None:
        """Note that only the host holds keys; what is not at a point is evicted first."""
        useful, others = self._points.sort(keys)
        self._order.copy(others)
        self._order.hold(useful)

    def reset_cache(self) -> None:
        """Forget all keys."""
        super().reset_cache()
        self._current_batch_jobs_to_flush.update(self._running)
        for store in self._running.values():
            store.is_stale = True
        self._order.clear()
        self._points.clear()
        self._wanted.clear()
        self._brought.clear()
        self._computed.clear()
        self._watched, self._looked_at, self._left = {}, {}, 0


class ExclusiveWorker(OffloadingConnectorWorker):
    """The worker side: reports failures, and submits an exclusive host's stores as their step begins.

    The scheduler side decides whether the host is exclusive, since a worker may see other specs of the layers.
    """

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._connector_worker_meta = ExclusiveWorkerMetadata()
        self._failed_requests: set[str] = set()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Submit the stores before the step's computation and loads write to their blocks, and wait for some."""
        is_exclusive = isinstance(kv_connector_metadata, ExclusiveMetadata)
        stores = kv_connector_metadata.store_jobs
        if is_exclusive and kv_connector_metadata.jobs_to_flush:
            # After a reset, a store may write to a chunk that a load from before it still reads.
            self.worker.wait(kv_connector_metadata.jobs_to_flush)
        for job in list(stores) if is_exclusive else ():
            entry = stores.pop(job)
            if self._is_store_writer:
                self.worker.submit_store(job, entry.src_spec, entry.dst_spec)
            else:
                self._connector_worker_meta.mark_completed(job)
        super().handle_preemptions(kv_connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return no request whose stores, and the requests whose loads have ended."""
        meta, loaded = self._connector_worker_meta, set()
        for result in self.worker.get_finished():
            job, request = result.job_id, self._load_jobs.pop(result.job_id, None)
            if result.success:
                stats = meta.transfer_stats.store if request is None else meta.transfer_stats.load
                stats.record(result.transfer_size, result.transfer_time)
            else:
                meta.failed.add(job)
            meta.mark_completed(job)
            if request is not None:
                loaded.add(request)
                self._failed_requests |= set() if result.success else {request}
        return set(), loaded

    def build_connector_worker_meta(self) -> Any:
        """Return the transfers that have ended since the last call."""
        meta = super().build_connector_worker_meta()
        if meta is not None:
            self._connector_worker_meta = ExclusiveWorkerMetadata()
        return meta

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose loads have failed since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed
