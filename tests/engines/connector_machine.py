"""Random requests through vLLM's scheduler and `BlockyardKVConnector`, both sides, over bytes that tell what they hold.

connector_machine.py LAYERS SEED STEPS IN_FLIGHT [FAULT]      FAULT is one of `FAULTS`

LAYERS is `full`, `kept` (the same, and the host keeps all that is computed), `window` (full attention, and a window of
40 tokens), `states` (full attention, and two groups of recurrent states), `uneven` (full attention of three layers, and
the window of two) or `packed` (full attention of three layers, side by side in a block, and a window with blocks of a
quarter of the tokens, in one layer of more bytes); a block belongs to one group at a time, and all groups use the same
memory. `kept uneven` is `uneven`, and the host keeps all that is computed. `stored` and one of the first, as in `stored
window`, has a file store below the host; a first engine fills it, and the second finds there what the first computed.

With IN_FLIGHT 2, vLLM's asynchronous scheduler plans a step before the last one has ended. The seed says how many
workers there are, how many tokens are drafted, how the workers see the cache, and whether all loads fail. A token's
bytes are a hash of all tokens up to it, of the weights, the group and the worker. Each step checks the bytes of all
tokens that its requests build on, as the layers of each group read them. Copies take random times. With FAULT, one rule
is broken, and the bytes must show it. Prints counts as JSON.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # with it, a host of a model with states is not exclusive

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from blockyard.integrations.vllm import external, manager, worker
from blockyard.integrations.vllm.exclusive_host import sides

BLOCK, PAGE, MAX_LEN = 16, 128, 1 << 12
CHUNKS, STEP_TOKENS, SEATS, WINDOW = 40, 64, 4, 40
BLOCKS = {"full": 48, "kept": 48, "window": 80, "states": 68, "uneven": 80, "kept uneven": 80, "packed": 200}
LAYERS = {"uneven": (3, 2), "kept uneven": (3, 2), "packed": (3, 1)}
"""Layers of each group, if not one."""
PIN = KvHintsEnvelope("0.1", "1", [KvHintAction("1", "blockyard.pin", "1", {"seconds": 0.05})])


@dataclass
class Row:
    """A request's part of a step, as it was when the step was planned.

    Attributes:
        tokens: the request's, shared by all its rows; grows as steps run.
        begins: tokens computed before, if all drafts are accepted.
        count: tokens to compute.
        ids: of its blocks, by group.
        drafts: tokens to verify.
    """

    name: str
    tokens: list[int]
    begins: int
    count: int
    ids: list[list[int]]
    drafts: list[int]


class Worker:
    """A worker without a model."""

    def __init__(self, world: "World", rank: int, side: Any) -> None:
        self.world, self.rank, self.side = world, rank, side
        blocks, rows = BLOCKS[world.layers], max(world.num_layers)
        # Of a block's layers, [blocks, rows, BLOCK]: each layer's blocks together, or each block's layers.
        if world.is_packed:
            self.memory = torch.zeros((blocks, rows, BLOCK), dtype=torch.int64)
            tensors, pages = [self.memory.flatten(1)], [rows * PAGE]
        else:
            self.memory = torch.zeros((rows, blocks, BLOCK), dtype=torch.int64).transpose(0, 1)
            tensors, pages = list(self.memory.unbind(1)), [PAGE] * rows
        caches = [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, pages, strict=True)]
        refs = [
            [CanonicalKVCacheRef(index, page) for index, page in enumerate(pages[:count])] for count in world.num_layers
        ]
        side.connector_worker._init_worker(CanonicalKVCaches(caches, refs))
        copies = side.connector_worker.worker
        copies._groups = [
            worker._GroupCopies(self._late(group.store), self._late(group.load, fails=world.no_load_ends_well))
            for group in copies._groups
        ]

    def _late(self, copy: Any, *, fails: bool = False) -> Any:
        """Let a copy end some steps later, however long those take, or once a step waits for it."""
        world, chance, counts = self.world, random.Random(self.world.chance.random()), self.world.counts

        def run(mapping: Any) -> None:
            until = counts["steps"] + chance.choice([0, 0, 1, 3])
            while counts["steps"] < until and not world.hurries:
                time.sleep(5e-5)
            counts["copies"] += 1
            if fails or counts["copies"] % 97 == 0:
                raise OSError("this copy fails")
            copy(mapping)

        return run

    def run(self, step: Any, meta: Any, rows: list[Row]) -> KVConnectorOutput:
        """Run a step, as vLLM's model runner does."""
        side, loads_first = self.side, self.world.chance.random() < 0.5
        self.world.hurries = bool(meta.jobs_to_flush)
        side.handle_preemptions(meta)
        self.world.hurries = False
        side.bind_connector_metadata(meta)
        for block in step.new_block_ids_to_zero or ():
            self.memory[block] = 0
        if loads_first:
            side.start_load_kv(None)
        for row in rows:
            self._compute(row)
        if not loads_first:
            side.start_load_kv(None)
        side.wait_for_save()
        ended = side.get_transfer_results(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=ended.finished_sending,
            finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving,
            kv_connector_worker_meta=side.build_connector_worker_meta(),
        )
        side.clear_connector_metadata()
        return output

    def _compute(self, row: Row) -> None:
        """Check the bytes that the step's tokens build on, and write theirs."""
        begins = min(row.begins, len(row.tokens) - 1)
        for group, (spec, ids) in enumerate(zip(self.world.specs, row.ids, strict=True)):
            for layer in range(self.world.num_layers[group]):
                self._compute_layer(row, begins, spec, ids, self.memory[:, layer], group + 8 * layer)
        self.world.counts["tokens read"] += begins

    def _compute_layer(self, row: Row, begins: int, spec: Any, ids: list[int], memory: Any, layer: int) -> None:
        size, right = spec.block_size, self._bytes(layer, (row.tokens + row.drafts)[: begins + row.count])
        if isinstance(spec, MambaSpec):
            self._check(row, [int(memory[ids[(begins - 1) // size], -1])][:begins], right[:begins][-1:])
            memory[ids[(begins + row.count - 1) // size]] = int(right[-1])
            return
        seen = max(0, begins - WINDOW + 1) if isinstance(spec, SlidingWindowSpec) else 0
        held = memory[torch.tensor(ids)][:, :size].flatten()
        self._check(row, held[seen:begins].numpy(), right[seen:begins])
        for place in range(begins, begins + row.count):
            memory[ids[place // size], place % size] = int(right[place])

    @staticmethod
    def _check(row: Row, held: Any, right: Any) -> None:
        if not np.array_equal(held, right):
            raise AssertionError(f"request {row.name} reads wrong bytes")

    def _bytes(self, group: int, tokens: list[int]) -> Any:
        found, value = np.empty(len(tokens), np.int64), 7 + self.world.weights + (self.rank << 20) + (group << 30)
        for place, token in enumerate(tokens):
            value = (value * 1_000_003 + token + 1) % (1 << 61)
            found[place] = value
        return found


class World:
    """An engine without a model."""

    def __init__(self, layers: str, seed: int, folder: Path, in_flight: int) -> None:
        self.chance = random.Random(seed)
        self.has_store, layers = layers.startswith("stored"), layers.removeprefix("stored ")
        self.layers, self.specs = layers, _specs(layers)
        self.num_layers, self.is_packed = LAYERS.get(layers, (1,) * len(self.specs)), layers == "packed"
        self.weights, self.counts = 0, Counter[str]()
        self.in_flight, num_workers, self.drafts = in_flight, 1 + seed // 2 % 2, 3 * (seed % 2)
        if self.has_store:
            num_workers = 1  # vLLM's configuration says one, and the store's values are those of all
        if layers == "states":
            self.drafts = 0  # states after drafts that are refused are vLLM's worker's business
        self.no_load_ends_well = seed % 8 == 7
        self.hurries = False  # whether someone waits for copies
        self.requests: dict[str, Any] = {}
        self.tokens: dict[str, list[int]] = {}
        self.planned: deque[tuple[Any, Any, list[Row]]] = deque()  # steps that have not run
        self.running: deque[tuple[Any, ModelRunnerOutput]] = deque()  # steps whose output the scheduler lacks
        self.texts = [[self.chance.randrange(100) for _ in range(30 * BLOCK)] for _ in range(5)]
        config, caches = self._config(folder), self._caches(is_wrapped=seed % 3 == 0)
        init_none_hash(sha256)
        tokens = min(spec.block_size for spec in self.specs)  # of a key
        self.hasher = get_request_block_hasher(tokens, sha256)
        scheduler = Scheduler if in_flight == 1 else AsyncScheduler
        planned = generate_scheduler_kv_cache_config([caches])
        self.scheduler = scheduler(
            config, planned, StructuredOutputManager(config), block_size=BLOCK, hash_block_size=tokens
        )
        self.order = self.scheduler.connector.connector_scheduler
        self.order.config = self.order.config._replace(num_workers=num_workers)
        self.counts["is exclusive"] = isinstance(self.order, sides.ExclusiveScheduler)
        self.together = KVOutputAggregator(num_workers)
        self.workers = [
            Worker(self, rank, KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches))
            for rank in range(num_workers)
        ]

    def _config(self, folder: Path) -> VllmConfig:
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
        more = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 1}
        more |= {"vocab_size": 128, "max_position_embeddings": MAX_LEN, "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps({**shape, **more}))
        limits = {"max_num_seqs": SEATS, "max_num_batched_tokens": STEP_TOKENS, "max_model_len": MAX_LEN}
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, max_model_len=MAX_LEN
            ),
            scheduler_config=SchedulerConfig(
                **limits, enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False
            ),
            cache_config=CacheConfig(
                block_size=BLOCK,
                enable_prefix_caching=True,
                mamba_cache_mode="align" if self.layers == "states" else "none",
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="BlockyardKVConnector",
                kv_connector_module_path="blockyard.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "host_bytes": CHUNKS * PAGE * max(self.num_layers),
                    **({"policy": "lru"} if self.layers.startswith("kept") else {}),
                    **(self._store(folder) if self.has_store else {}),
                },
            ),
            device_config=DeviceConfig("cpu"),
        )
        config.scheduler_config.async_scheduling = self.in_flight > 1
        if self.drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=self.drafts, prompt_lookup_max=3, prompt_lookup_min=2
            )
        config.cache_config.num_gpu_blocks = BLOCKS[self.layers]
        return config

    @staticmethod
    def _store(folder: Path) -> dict[str, Any]:
        return {"prefix_store": f"file://{folder}?size=4MiB", "revision": "1", "prefetch_timeout_base": 60}

    def _caches(self, *, is_wrapped: bool) -> KVCacheConfig:
        """Return the cache as workers see it: layers of different specs come as one wrapped spec."""
        specs, blocks = self.specs, BLOCKS[self.layers]
        assert {spec.page_size_bytes for spec in specs} == {PAGE}
        layers = [[f"layer.{group}.{layer}" for layer in range(count)] for group, count in enumerate(self.num_layers)]
        if is_wrapped and len(specs) == 1:
            specs = [UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={layers[0][0]: specs[0]})]
        row = PAGE * max(self.num_layers)
        strides = (PAGE, row) if self.is_packed else (PAGE * blocks, PAGE)
        return KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(row * blocks, names, *strides) for names in layers],
            kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in zip(layers, specs, strict=True)],
        )

    def add(self) -> None:
        """Begin a request that shares a part of its prompt with others, or goes on where one ended."""
        text = self.chance.choice(self.texts)
        length = self.chance.randrange(1, len(text))
        tokens = text[:length] + [self.chance.randrange(100) for _ in range(self.chance.choice([0, 1, 5, 40]))]
        request = Request(
            request_id=str(self.counts["requests"]),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(
                max_tokens=self.chance.choice([1, 2, 30]), ignore_eos=True, stop_token_ids=[17, 18, 19]
            ),
            pooling_params=None,
            block_hasher=self.hasher,
            kv_hints=PIN if self.chance.random() < 0.2 else None,
        )
        self.counts["requests"] += 1
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)

    def run(self, steps: int, *, resets: bool = True) -> None:
        """Serve random requests; `resets`: the weights change now and then."""
        must_reset = False
        for number in range(steps):
            while len(self.requests) < self.chance.choice([0, SEATS, 2 * SEATS]):
                self.add()
            if number % 90 == 89 and self.requests:
                self._abort(self.chance.choice(list(self.requests)))
            must_reset = resets and (must_reset or number % 200 == 199) and not self._reset()
            self._step()
        for _ in range(5000):
            self._step()
            time.sleep(1e-3 * self.has_store)  # requests may wait for it
            if not (self.requests or self.scheduler.has_requests() or self.running or self.planned):
                break
        else:
            raise AssertionError("the requests do not end")
        self.hurries = True
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS[self.layers] - 1, "a block is lost"
        self.order.manager._offload.check()
        if self.has_store:
            self._end_writes()

    def _end_writes(self) -> None:
        external, until = self.order.manager.external, time.monotonic() + 60
        while (external.is_busy or external.num_unwritten) and time.monotonic() < until:
            external.end_step()
            time.sleep(1e-3)
        for name in ("loaded", "written", "not_written"):
            self.counts[name] = getattr(external.counts, name)

    def close(self) -> None:
        """End the engine."""
        self.hurries = True
        for each in self.workers:
            each.side.shutdown()
        self.scheduler.shutdown()

    def _abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.requests[name]
        self.counts["aborts"] += 1

    def _reset(self) -> bool:
        """Change the weights: what was computed before must not be found. False if vLLM refuses."""
        is_reset = False
        try:
            for _ in range(self.chance.choice([1, 1, 2])):
                preempts, everything = self.chance.random() < 0.5, self.chance.random() < 0.7
                is_reset = self.scheduler.reset_prefix_cache(
                    reset_running_requests=preempts, reset_connector=everything
                )
                is_reset = is_reset and everything
        except RuntimeError:  # a request waits for its load; nothing is forgotten
            return False
        if is_reset:
            self._run_planned()
            self.weights += 1
        self.counts["resets"] += is_reset
        return bool(is_reset)

    def _step(self) -> None:
        """Plan a step, and end the oldest one if as many as can be are in flight, as vLLM's engine does."""
        if self.scheduler.has_requests():
            self._plan()
            if self.chance.random() < 0.5:
                self._run_planned()
            if len(self.planned) + len(self.running) < self.in_flight:
                return
        self._run_planned()
        if self.running:
            step, output = self.running.popleft()
            self.scheduler.update_from_output(step, output)
            if self.drafts and self.in_flight == 1:
                drafts = [[self.chance.randrange(100) for _ in range(self.drafts)] for _ in output.req_ids]
                self.scheduler.update_draft_token_ids(DraftTokenIds(output.req_ids, drafts))
            self.requests = {name: request for name, request in self.requests.items() if not request.is_finished()}
            self.tokens = {name: tokens for name, tokens in self.tokens.items() if name in self.requests}

    def _plan(self) -> None:
        step = self.scheduler.schedule()
        meta = step.kv_connector_metadata
        self.counts["steps"] += 1
        self.counts["flushed"] += len(meta.jobs_to_flush or ())
        for job in meta.store_jobs.values():
            blocks = job.src_spec.block_ids.tolist()
            assert len(set(blocks)) == len(blocks), f"a store reads a block as two: {blocks}"
        self.counts["loads"] += len(meta.load_jobs)
        self.counts["stores"] += len(meta.store_jobs)
        self.counts["preempted"] += len(step.preempted_req_ids or ())
        for name in {new.req_id for new in step.scheduled_new_reqs} | step.scheduled_cached_reqs.resumed_req_ids:
            self.tokens[name] = list(self.requests[name].all_token_ids)
        rows = []
        for name, count in step.num_scheduled_tokens.items():
            ids = self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
            begins = self.requests[name].num_computed_tokens - count
            drafts = [
                self.chance.randrange(100) if draft < 0 else draft
                for draft in step.scheduled_spec_decode_tokens.get(name, ())
            ]
            rows.append(Row(name, self.tokens[name], begins, count, [list(group) for group in ids], drafts))
        self.planned.append((step, meta, rows))

    def _run_planned(self) -> None:
        while self.planned:
            step, meta, rows = self.planned.popleft()
            parts = []
            for each in self.workers:
                stores = dict(meta.store_jobs)  # each worker has its own copy
                parts.append(each.run(step, meta, rows))
                meta.store_jobs = stores
            self.counts["failed loads"] += sum(len(part.failed_recving) for part in parts)
            names = [row.name for row in rows]
            sampled = [self._sample(row) for row in rows]
            places = {name: place for place, name in enumerate(names)}
            outputs = [
                ModelRunnerOutput(
                    req_ids=names, req_id_to_index=places, sampled_token_ids=sampled, kv_connector_output=part
                )
                for part in parts
            ]
            self.running.append((step, self.together.aggregate(outputs)))

    def _sample(self, row: Row) -> list[int]:
        """Accept some drafts, and sample one more token, if the row has computed all others."""
        if min(row.begins, len(row.tokens) - 1) + row.count < len(row.tokens) + len(row.drafts):
            return []
        found = [*row.drafts[: self.chance.randrange(len(row.drafts) + 1)], self.chance.randrange(100)]
        row.tokens += found
        return found


def _specs(layers: str) -> list[Any]:
    heads: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    state: Any = MambaSpec(block_size=BLOCK, shapes=((PAGE // 4,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    window = SlidingWindowSpec(**heads, sliding_window=WINDOW)
    few: Any = SlidingWindowSpec(**{**heads, "block_size": BLOCK // 4, "head_size": 4}, sliding_window=WINDOW)
    more: dict[str, list[Any]] = {"window": [window], "states": [state, state], "packed": [few]}
    more |= {"uneven": [window], "kept uneven": [window]}
    return [FullAttentionSpec(**heads), *more.get(layers, [])]


def loads_do_not_wait(patch: Any) -> None:
    submit = worker.BlockyardWorker._submit

    def submit_at_once(self: Any, *arguments: Any, **options: Any) -> bool:
        for job in self._jobs.values():
            job.reads = frozenset()
        return submit(self, *arguments, **options)

    patch(worker.BlockyardWorker, "_submit", submit_at_once)


def nothing_is_flushed(patch: Any) -> None:
    build = sides.ExclusiveScheduler.build_connector_meta

    def unflushed(self: Any, output: Any) -> Any:
        meta = build(self, output)
        meta.jobs_to_flush = set()
        return meta

    patch(sides.ExclusiveScheduler, "build_connector_meta", unflushed)


def stores_begin_late(patch: Any) -> None:
    def deferred(self: Any, metadata: Any) -> None:
        sides.OffloadingConnectorWorker.handle_preemptions(self, metadata)

    patch(sides.ExclusiveWorker, "handle_preemptions", deferred)


def stores_outlive_preemption(patch: Any) -> None:
    build = sides.OffloadingConnectorScheduler.build_connector_meta

    def forgetful(self: Any, output: Any) -> Any:
        return build(self, replace(output, preempted_req_ids=set()))

    patch(sides.LenientScheduler, "build_connector_meta", forgetful)


def failed_stores_count(patch: Any) -> None:
    patch(manager.BlockyardManager, "spoil", lambda self, keys: None)
    end = sides.ExclusiveScheduler._end_store
    patch(
        sides.ExclusiveScheduler,
        "_end_store",
        lambda self, job, workers, is_good: end(self, job, workers, is_good=True),
    )


def the_store_forgets_nothing(patch: Any) -> None:
    reset = external.ExternalTier.reset
    patch(external.ExternalTier, "reset", lambda self, keep: reset(self, keep=True))


FAULTS = {
    "loads do not wait for stores": loads_do_not_wait,
    "computation does not wait for stores": nothing_is_flushed,
    "stores begin with the next step": stores_begin_late,
    "failed loads count": lambda patch: patch(sides.ExclusiveWorker, "take_failed_requests", lambda self: set()),
    "stores of preempted requests go on": stores_outlive_preemption,
    "failed stores count": failed_stores_count,
    "the store forgets nothing": the_store_forgets_nothing,
    "a reset forgets nothing": lambda patch: patch(sides.ExclusiveScheduler, "reset_cache", lambda self: None),
}
"""Broken rules by name."""


def main() -> None:
    layers, (seed, steps, in_flight), fault = sys.argv[1], map(int, sys.argv[2:5]), " ".join(sys.argv[5:])
    if fault:
        FAULTS[fault](setattr)
    with tempfile.TemporaryDirectory() as folder:
        counts = Counter[str]()
        if layers.startswith("stored"):
            before = World(layers, seed, Path(folder), in_flight)
            before.run(steps // 2, resets=False)
            before.close()
            counts["written before"] = before.counts["written"]
        world = World(layers, seed, Path(folder), in_flight)
        world.run(steps)
        world.close()
    print("RESULT", json.dumps(dict(counts) | dict(world.counts)))


if __name__ == "__main__":
    main()
