"""Both sides of an engine over `BlockyardSpec` with an external store, driven as vLLM drives them."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm_modules
from sharded_heads import Heads

from blockyard.testing.faults import FailingStore

BLOCK, CHUNKS = 4096, 16
KEYS = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(24)]


def hint(name: str, payload: dict[str, Any], version: str = "1.0") -> SimpleNamespace:
    """An action of an orchestrator, as in vLLM's envelope."""
    return SimpleNamespace(action_id="7", action_type=name, action_version=version, payload=payload)


def hints(*actions: Any, version: str = "0.1") -> SimpleNamespace:
    """An envelope of actions."""
    return SimpleNamespace(protocol_version=version, message_id="9", actions=list(actions))


class Engine:
    """The scheduler and worker sides of one engine, and its workers' blocks.

    Args:
        vllm: modules from `vllm_modules`.
        root: folder of the external store.
        chunks: host chunks.
        world: workers.
        current: the configuration that vLLM shows its workers; if None, a revision names the weights. With `heads`, it
            shows their layers, too.
        keys_chunks: whether the scheduler side can make keys of chunks.
        fields: fields of the spec's configuration. With `replicated_layout` the workers have the same bytes.
        heads: what the blocks hold, if the workers share it by heads.
        options: of `BlockyardSpec`.
    """

    made = 0

    def __init__(
        self,
        vllm: SimpleNamespace,
        root: Path,
        *,
        chunks: int = CHUNKS,
        world: int = 1,
        current: Any = None,
        fields: dict[str, Any] | None = None,
        heads: Heads | None = None,
        keys_chunks: bool = False,
        **options: Any,
    ) -> None:
        Engine.made += 1
        self.vllm, self.heads, self.world = vllm, heads, world
        self.copies = 1 if (fields or {}).get("replicated_layout") else world
        self.per_chunk = options.get("blocks_per_chunk", 1)
        block_bytes = BLOCK if heads is None else heads.block_bytes(world)
        extra = {
            "host_bytes": self.copies * chunks * block_bytes * self.per_chunk,
            "prefix_store": f"file://{root}?size=1MiB&drop=on",
            **options,
        }
        if current is None:
            extra.setdefault("revision", "a")
        if extra["prefix_store"]:
            extra.setdefault("prefetch_timeout_base", 60.0)  # no test depends on how fast the machine is
        name = f"test-{os.getpid()}-{Engine.made}"
        fields = {"block_bytes": block_bytes, "world_size": world, "engine_id": name, **(fields or {})}
        if heads is not None:
            fields["groups"] = tuple(
                vllm.config.OffloadingGroupConfig(tokens_per_block=heads.tokens, layer_names=names, group_id=group)
                for group, names in enumerate(heads.layer_names)
            )
            cache = {"tokens_per_hash": heads.tokens, "blocks_per_chunk": self.per_chunk}
            fields["cache"] = vllm.config.OffloadingCacheConfig(**cache)
        config = vllm_modules.config(vllm, extra, **fields)
        if heads is not None:
            config.parallel.__dict__["tp_size"] = world
        self.num_groups = len(config.groups)
        self.blocks = [torch.zeros((16 * self.per_chunk, block_bytes), dtype=torch.int8) for _ in range(world)]
        self.workers = []
        for rank, blocks in enumerate(self.blocks):
            config.parallel.__dict__["rank"] = rank
            spec = vllm.ours.BlockyardSpec(config)
            base = vllm.base
            caches = (
                base.CanonicalKVCaches(
                    [base.CanonicalKVCacheTensor(blocks, BLOCK)], [[base.CanonicalKVCacheRef(0, BLOCK)]]
                )
                if heads is None
                else heads.caches(base, blocks, rank, world)
            )
            if current is not None and heads is not None:
                current.compilation_config.static_forward_context = heads.shown(blocks, world)
            vllm.current.current = current
            self.workers.append(spec.get_worker(caches))
            vllm.current.current = None
        config.parallel.__dict__["rank"] = 0
        spec = vllm.ours.BlockyardSpec(config)
        spec.can_key_chunks = keys_chunks
        self.manager = spec.get_manager()
        self.tier = self.manager.external
        if self.tier is not None:
            self.store = FailingStore(self.tier._store, timeout=0.2)
            self.tier._store = self.tier._work._store = self.store
        self.jobs = 0

    def context(self, name: str = "one", *actions: Any) -> Any:
        context = self.vllm.base.ReqContext(req_id=name)
        if actions:
            context.kv_hints = hints(*actions)
        return context

    def end_step(self, *preempted: str) -> None:
        self.manager.on_schedule_end(self.vllm.base.ScheduleEndContext([], preempted))

    def compute(self, keys: list[bytes], context: Any | None = None) -> None:
        """Compute blocks, and store them on the host, as vLLM does; wait until the external store has them."""
        self.compute_only(keys, context)
        self.settle()

    def compute_only(self, keys: list[bytes], context: Any | None = None) -> None:
        """Compute blocks, and store them on the host."""
        context = context or self.context()
        prepared = self.manager.prepare_store(keys, context)
        for block, key in enumerate(prepared.keys_to_store):
            for rank, blocks in enumerate(self.blocks):
                self._of(blocks, block)[:] = self.content(key, rank)
        group = _group_of(keys)
        self.copy("submit_store", list(range(len(prepared.keys_to_store))), prepared.store_spec, group)
        self.manager.complete_store(prepared.keys_to_store, context)

    def load(self, keys: list[bytes]) -> bool:
        """Load blocks; returns whether every worker has the right bytes."""
        chunks = self.manager.prepare_load(keys, self.context())
        for blocks in self.blocks:
            blocks.zero_()
        self.copy("submit_load", list(range(len(keys))), chunks, _group_of(keys))
        self.manager.complete_load(keys, self.context())
        return all(
            bool((self._of(blocks, place) == self.content(key, rank)).all())
            for rank, blocks in enumerate(self.blocks)
            for place, key in enumerate(keys)
        )

    def content(self, key: bytes, rank: int) -> torch.Tensor:
        """Return the bytes that a worker has under a key."""
        if self.heads is not None:
            return self.heads.part(key, rank, self.world, self.per_chunk)
        return content(key, rank % self.copies)

    def _of(self, blocks: torch.Tensor, place: int) -> torch.Tensor:
        """Return the bytes of a chunk's blocks."""
        return blocks.view(-1, self.per_chunk * blocks.shape[1])[place]

    def copy(self, call: str, chunks_of_keys: list[int], chunks: Any, group: int = 0) -> None:
        self.jobs += 1
        sizes = [0] * self.num_groups
        blocks = [self.per_chunk * chunk + part for chunk in chunks_of_keys for part in range(self.per_chunk)]
        sizes[group] = len(blocks)
        device = self.vllm.base.GPULoadStoreSpec(blocks, sizes, [0] * self.num_groups)
        for worker in self.workers:
            both = (device, chunks) if call == "submit_store" else (chunks, device)
            assert getattr(worker, call)(self.jobs, *both)
            worker.wait({self.jobs})
            assert [result.success for result in worker.get_finished()] == [True]

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        self.end_step()
        self.settle_store()

    def settle_store(self) -> None:
        """Wait until the external store has answered."""
        until = time.monotonic() + 300
        while self.tier is not None and self.tier.is_busy:
            assert time.monotonic() < until
            time.sleep(0.001)

    def lookups(self, keys: list[bytes], context: Any | None = None) -> list[str]:
        context = context or self.context()
        return [self.manager.lookup(key, context).name for key in keys]

    def found(self, keys: list[bytes], name: str = "one") -> int:
        """Return the leading keys that can eventually be loaded, requested as vLLM does."""
        until = time.monotonic() + 300
        context = self.context(name)
        while True:
            states = [self.manager.lookup(key, context).name for key in keys]
            self.end_step()
            if "RETRY" not in states and "HIT_PENDING" not in states:
                self.manager.on_request_finished(context)
                return next((place for place, state in enumerate(states) if state == "MISS"), len(keys))
            assert time.monotonic() < until, states
            time.sleep(0.001)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()


def content(key: bytes, rank: int) -> torch.Tensor:
    random = np.random.default_rng([*key[:4], rank])
    return torch.from_numpy(random.integers(-128, 128, BLOCK, dtype=np.int8))


def _group_of(keys: list[bytes]) -> int:
    return int.from_bytes(keys[0][-4:], "big") if keys else 0
