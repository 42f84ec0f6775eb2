"""Random requests through vLLM's scheduler and `BlockyardKVConnector`, both sides, over bytes that tell what they hold.

connector_machine.py SEED STEPS [FAULT]      FAULT is one of `FAULTS`

A token's bytes are a hash of all tokens up to it, and of the weights. Each step checks the bytes of all tokens that its
requests build on, as attention reads them. Copies take random times. With FAULT, one rule is broken, and the bytes must
show it. Prints counts as JSON.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from blockyard.integrations.vllm import worker
from blockyard.integrations.vllm.exclusive_host import sides

BLOCK, PAGE, MAX_LEN = 16, 128, 1 << 12
BLOCKS, CHUNKS, STEP_TOKENS, SEATS = 48, 40, 64, 4


class World:
    """An engine without a model."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.weights, self.counts = 0, Counter[str]()
        self.requests: dict[str, Any] = {}
        self.texts = [[self.chance.randrange(100) for _ in range(30 * BLOCK)] for _ in range(5)]
        self.memory = torch.zeros((BLOCKS, BLOCK), dtype=torch.int64)
        self._start(folder)

    def _start(self, folder: Path) -> None:
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
        more = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 1}
        more |= {"vocab_size": 128, "max_position_embeddings": MAX_LEN, "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps({**shape, **more}))
        limits = {"max_num_seqs": SEATS, "max_num_batched_tokens": STEP_TOKENS, "max_model_len": MAX_LEN}
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, max_model_len=MAX_LEN
            ),
            scheduler_config=SchedulerConfig(**limits, enable_chunked_prefill=True, is_encoder_decoder=False),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector="BlockyardKVConnector",
                kv_connector_module_path="blockyard.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"host_bytes": CHUNKS * PAGE},
            ),
            device_config=DeviceConfig("cpu"),
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        assert spec.page_size_bytes == PAGE
        tensor = KVCacheTensor(PAGE * BLOCKS, ["layer"], PAGE * BLOCKS, PAGE)
        caches = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(config, caches, StructuredOutputManager(config), block_size=BLOCK)
        self.order = self.scheduler.connector.connector_scheduler
        self.side = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        one = CanonicalKVCaches([CanonicalKVCacheTensor(self.memory, PAGE)], [[CanonicalKVCacheRef(0, PAGE)]])
        self.side.connector_worker._init_worker(one)
        copies = self.side.connector_worker.worker
        (group,) = copies._groups
        copies._groups = [worker._GroupCopies(self._late(group.store), self._late(group.load))]

    def _late(self, copy: Any) -> Any:
        chance = random.Random(self.chance.random())

        def run(mapping: Any) -> None:
            time.sleep(chance.choice([0, 0, 1e-4, 2e-3]))
            self.counts["copies"] += 1
            if self.counts["copies"] % 97 == 0:
                raise OSError("this copy fails")
            copy(mapping)

        return run

    def add(self) -> None:
        """Begin a request that shares a part of its prompt with others, or goes on where one ended."""
        text = self.chance.choice(self.texts)
        length = self.chance.randrange(1, len(text))
        tokens = text[:length] + [self.chance.randrange(100) for _ in range(self.chance.choice([0, 1, 5, 40]))]
        request = Request(
            request_id=str(self.counts["requests"]),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=self.chance.choice([1, 2, 30]), ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.counts["requests"] += 1
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)

    def run(self, steps: int) -> None:
        """Serve random requests."""
        must_reset = False
        for number in range(steps):
            while len(self.requests) < self.chance.choice([0, SEATS, 2 * SEATS]):
                self.add()
            if number % 90 == 89 and self.requests:
                self._abort(self.chance.choice(list(self.requests)))
            must_reset = (must_reset or number % 200 == 199) and not self._reset()
            self._step()
        while self.requests or self.scheduler.has_finished_requests() or self.side_is_busy():
            self._step()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == BLOCKS - 1, "a block is lost"
        self.order.manager._offload.check()

    def side_is_busy(self) -> bool:
        """Whether transfers run."""
        return bool(self.scheduler.connector.has_pending_push_work())

    def _abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.requests[name]
        self.counts["aborts"] += 1

    def _reset(self) -> bool:
        """Change the weights: what was computed before must not be found. False if vLLM refuses."""
        try:
            is_reset = self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except RuntimeError:  # a request waits for its load; nothing is forgotten
            return False
        self.weights += is_reset
        self.counts["resets"] += is_reset
        return bool(is_reset)

    def _step(self) -> None:
        step = self.scheduler.schedule()
        meta = step.kv_connector_metadata
        self.counts["flushed"] += len(meta.jobs_to_flush or ())
        self.counts["loads"] += len(meta.load_jobs)
        self.counts["stores"] += len(meta.store_jobs)
        self.side.handle_preemptions(meta)
        self.side.bind_connector_metadata(meta)
        loads_first = self.chance.random() < 0.5
        if loads_first:
            self.side.start_load_kv(None)
        names = [name for name in step.num_scheduled_tokens if name in self.requests]
        for name in names:
            self._compute(name, step.num_scheduled_tokens[name])
        if not loads_first:
            self.side.start_load_kv(None)
        self.side.wait_for_save()
        sent, loaded = self.side.get_finished(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=loaded,
            invalid_block_ids=self.side.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.side.build_connector_worker_meta(),
        )
        self.side.clear_connector_metadata()
        self.counts["bad blocks"] += len(output.invalid_block_ids)
        listed = list(step.num_scheduled_tokens)
        is_last = [self._is_computed(name) for name in listed]
        self.scheduler.update_from_output(
            step,
            ModelRunnerOutput(
                req_ids=listed,
                req_id_to_index={name: place for place, name in enumerate(listed)},
                sampled_token_ids=[[self.chance.randrange(100)] if last else [] for last in is_last],
                kv_connector_output=output,
            ),
        )
        self.requests = {name: request for name, request in self.requests.items() if not request.is_finished()}
        self.counts["steps"] += 1

    def _is_computed(self, name: str) -> bool:
        request = self.requests.get(name)
        return request is not None and request.num_computed_tokens >= request.num_tokens

    def _compute(self, name: str, count: int) -> None:
        """Check the bytes of all tokens before the step's, and write the step's."""
        request = self.requests[name]
        (ids,) = self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
        ends = request.num_computed_tokens
        held = self.memory[torch.tensor(ids)].flatten()
        right = self._bytes(request.all_token_ids[:ends])
        begins = ends - count
        if not np.array_equal(held[:begins].numpy(), right[:begins]):
            raise AssertionError(f"request {name} reads wrong bytes")
        for place in range(begins, ends):
            self.memory[ids[place // BLOCK], place % BLOCK] = int(right[place])
        self.counts["tokens read"] += begins

    def _bytes(self, tokens: Any) -> Any:
        found, value = np.empty(len(tokens), np.int64), 7 + self.weights
        for place, token in enumerate(tokens):
            value = (value * 1_000_003 + token + 1) % (1 << 61)
            found[place] = value
        return found


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


def failed_stores_count(patch: Any) -> None:
    end = sides.ExclusiveScheduler._end_store
    patch(
        sides.ExclusiveScheduler,
        "_end_store",
        lambda self, job, workers, is_good: end(self, job, workers, is_good=True),
    )


FAULTS = {
    "loads do not wait for stores": loads_do_not_wait,
    "computation does not wait for stores": nothing_is_flushed,
    "stores begin with the next step": lambda patch: patch(
        sides.ExclusiveWorker, "handle_preemptions", sides.OffloadingConnectorWorker.handle_preemptions
    ),
    "failed loads count": lambda patch: patch(sides.ExclusiveWorker, "take_bad_blocks", lambda self: set()),
    "failed stores count": failed_stores_count,
    "a reset forgets nothing": lambda patch: patch(sides.ExclusiveScheduler, "reset_cache", lambda self: None),
}
"""Broken rules by name."""


def main() -> None:
    seed, steps, fault = int(sys.argv[1]), int(sys.argv[2]), " ".join(sys.argv[3:])
    if fault:
        FAULTS[fault](setattr)
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder))
        world.run(steps)
        world.side.shutdown()
        world.scheduler.shutdown()
    print("RESULT", json.dumps(world.counts))


if __name__ == "__main__":
    main()
