"""An exception at any place of what vLLM loads holds no chunk for ever, ends each job once, and gives no wrong byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_modules
import vllm_sides
from adapter_calls import ERRORS, Caller, every, settled, swept
from cache_program import own_threads
from interrupts import Interrupt

from blockyard.errors import InvalidArgumentError

TIER = ("vllm/tier.py", "stores/adapters/jobs.py")
MANAGER = ("vllm/manager.py", "vllm/hints.py", "vllm/external.py", "stores/adapters/jobs.py")
CHUNKS, WIDTH = 8, 4096
KEYS = [bytes([n]) * 32 + b"\0\0\0\0" for n in range(30)]
PATIENCE = 300.0


@pytest.fixture(params=[kind for kind in vllm_modules.KINDS if kind.startswith("stand-in")])
def vllm(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with vllm_modules.loaded(request.param) as modules:
        yield modules


def content(key: bytes) -> np.ndarray:
    return np.random.default_rng([*key[:4]]).integers(-128, 128, WIDTH, dtype=np.int8)


# ---- a secondary tier ----


class TierProgram(Caller):
    """Chunks that go to the store and come back into others; a job that was taken has one result."""

    def __init__(self, interrupt: Interrupt, vllm: SimpleNamespace, root: Path) -> None:
        super().__init__(interrupt)
        self.vllm = vllm
        self.memory = np.zeros((CHUNKS, WIDTH), np.int8)
        self.context = vllm.base.ReqContext(req_id="one")
        self.tier = vllm.ours.BlockyardTier(
            offloading_spec=SimpleNamespace(config=vllm_modules.config(vllm, {})),
            primary_kv_view=memoryview(self.memory),
            tier_type="BlockyardTier",
            root_dir=str(root),
            size="1MiB",
            revision="1",
        )
        self.taken: set[int] = set()
        self.refused: set[int] = set()
        self.results: dict[int, bool] = {}

    def run(self) -> None:
        good = []
        for _ in range(3):
            stored = self.job(self.tier.submit_store, KEYS[:3], [0, 1, 2])
            found = [self.call(self.tier.lookup, key, self.context).name for key in KEYS[:4]]
            assert "RETRY" not in found, "a key is being stored for ever"
            assert found[3] == "MISS"
            loaded = self.job(self.tier.submit_load, KEYS[:3], [4, 5, 6])
            good.append(stored and loaded and found == ["HIT", "HIT", "HIT", "MISS"])
            # A call that was interrupted and made again may have begun its job twice.
            settled(lambda: not self.tier._store.stats().pending_bytes, "a job is left")
        assert sum(good) >= 2
        self.call(self.tier.shutdown)
        self.tier.shutdown()

    def job(self, submit: Callable[[Any], None], keys: list[bytes], chunks: list[int]) -> bool:
        self.memory[:] = 7
        number, is_load = len(self.taken | self.refused) + 1, submit == self.tier.submit_load
        if not is_load:
            for key, chunk in zip(keys, chunks, strict=True):
                self.memory[chunk] = content(key)
        job = self.vllm.tiering.TransferJob(number, keys, np.array(chunks), is_load, self.context)
        ended, _ = self.attempt(submit, job)
        (self.taken if ended else self.refused).add(number)
        self.call(self.tier.drain_jobs)
        for result in self.call(self.tier.get_finished_jobs):
            assert result.job_id not in self.results, "a job has ended twice"
            self.results[result.job_id] = result.success
            if is_load and result.job_id == number:
                done = keys if result.success else result.successful_keys
                for key, chunk in zip(keys, chunks, strict=True):
                    assert key not in done or np.array_equal(self.memory[chunk], content(key)), "a wrong byte"
        assert self.taken <= self.results.keys() <= self.taken | self.refused
        return self.results.get(number, False)


@pytest.mark.parametrize("most", every(12))
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_of_a_tier_ends_every_job_once(
    vllm: SimpleNamespace, tmp_path: Path, error: type[BaseException], most: int
):
    numbers = iter(range(1 << 30))

    def run(interrupt: Interrupt) -> None:
        before = own_threads()
        with interrupt.installed():
            TierProgram(interrupt, vllm, tmp_path / str(next(numbers))).run()
        settled(lambda: not own_threads() - before, "a thread is left")

    assert swept(TIER, run, error, most) > 40


# ---- a worker ----


class WorkerProgram(Caller):
    """Blocks that go to host chunks and come back; a job that was refused is under way, or can be submitted again."""

    def __init__(self, interrupt: Interrupt, vllm: SimpleNamespace) -> None:
        super().__init__(interrupt)
        base = self.base = vllm.base
        self.blocks = torch.zeros((CHUNKS, WIDTH), dtype=torch.int8)
        caches = base.CanonicalKVCaches(
            [base.CanonicalKVCacheTensor(self.blocks, WIDTH)], [[base.CanonicalKVCacheRef(0, WIDTH)]]
        )
        spec = vllm.ours.BlockyardSpec(vllm_modules.config(vllm, {"host_bytes": CHUNKS * WIDTH}, block_bytes=WIDTH))
        self.worker = spec.get_worker(caches)
        self.chunks = vllm.common.CPULoadStoreSpec
        self.ended: dict[int, bool] = {}

    def run(self) -> None:
        for number in (1, 3):
            for block, key in enumerate(KEYS[:CHUNKS]):
                self.blocks[block] = torch.from_numpy(content(key))
            assert self.job(number, self.worker.submit_store, is_load=False) or self.interrupt.where
            self.blocks.zero_()
            if self.job(number + 1, self.worker.submit_load, is_load=True) and self.ended[number]:
                for block, key in enumerate(KEYS[:CHUNKS]):
                    assert np.array_equal(self.blocks[block].numpy(), content(key)), "a wrong byte"
        assert sum(self.ended.values()) >= 3
        self.call(self.worker.shutdown)
        self.worker.shutdown()

    def job(self, number: int, submit: Callable[..., bool], *, is_load: bool) -> bool:
        device = self.base.GPULoadStoreSpec(list(range(CHUNKS)), [CHUNKS], [0])
        both = (device, self.chunks(list(range(CHUNKS))))
        ended, _ = self.attempt(submit, number, *(both[::-1] if is_load else both))
        if not ended:
            try:
                submit(number, *(both[::-1] if is_load else both))
            except InvalidArgumentError as error:  # it was interrupted after it had begun
                assert "already in flight" in str(error)
        until = time.monotonic() + PATIENCE
        while number not in self.ended:
            self.call(self.worker.wait, {number})
            for result in self.call(self.worker.get_finished):
                assert result.job_id not in self.ended, "a job has ended twice"
                self.ended[result.job_id] = result.success
            assert time.monotonic() < until, "a job does not end"
        return self.ended[number]


@pytest.mark.parametrize("most", every(12))
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_of_a_worker_ends_every_job_once(
    vllm: SimpleNamespace, error: type[BaseException], most: int
):
    def run(interrupt: Interrupt) -> None:
        before = own_threads()
        with interrupt.installed():
            WorkerProgram(interrupt, vllm).run()
        settled(lambda: not own_threads() - before, "a thread is left")

    assert swept(("vllm/worker.py",), run, error, most) > 40


# ---- an eviction policy in vLLM's own manager ----


class PolicyProgram(Caller):
    """Chunks that are inserted, loaded, evicted and removed; what vLLM gets back is every chunk that it gave."""

    def __init__(self, interrupt: Interrupt, vllm: SimpleNamespace, name: str) -> None:
        super().__init__(interrupt)
        self.vllm = vllm
        self.policy = getattr(vllm.ours, name)(cache_capacity=CHUNKS)
        more = hasattr(vllm.base.OffloadingManager, "on_reset_flushed")
        self.context = [vllm.base.ReqContext(req_id="one")] if more else []

    def run(self) -> None:
        policy = self.policy
        for key in KEYS[:CHUNKS]:
            self.insert(key)
        self.call(policy.touch, KEYS[:2], *self.context)
        self.call(policy.mark_non_evictable, KEYS[2])
        assert {key for key, _ in self.call(policy.evict, 3, set(KEYS[:2]))} <= set(KEYS[3:CHUNKS])
        self.call(policy.mark_evictable, KEYS[2])
        self.call(policy.mark_non_evictable, KEYS[1])
        for key in KEYS[:2]:
            ended, _ = self.attempt(policy.remove, key)
            if not ended and policy.get(key) is not None:
                policy.remove(key)
            assert policy.get(key) is None
        for key in KEYS[10:15]:
            self.insert(key)
        everything = self.call(policy.evict, CHUNKS, set())
        assert everything is not None, "a chunk cannot be evicted"
        assert all(chunk.chunk_id == KEYS.index(key) for key, chunk in everything)
        assert len(everything) == CHUNKS
        self.insert(KEYS[0])
        self.call(policy.clear)
        for key in KEYS[:CHUNKS]:
            self.insert(key)
        assert len(self.call(policy.evict, CHUNKS, set())) == CHUNKS
        policy._order.check()

    def insert(self, key: bytes) -> None:
        chunk = self.vllm.policies.ChunkStatus(KEYS.index(key))
        ended, _ = self.attempt(self.policy.insert, key, chunk, *self.context)
        if not ended and self.policy.get(key) is None:
            self.policy.insert(key, chunk, *self.context)
        chunk.ref_cnt = 0
        self.call(self.policy.mark_evictable, key)


@pytest.mark.parametrize("name", ["LRUPolicy", "AdaptivePolicy"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_of_a_policy_loses_no_chunk(
    vllm: SimpleNamespace, name: str, error: type[BaseException]
):
    def run(interrupt: Interrupt) -> None:
        with interrupt.installed():
            PolicyProgram(interrupt, vllm, name).run()

    assert swept(("vllm/policy.py",), run, error, 1 << 30) > 20


# ---- manager, hints and external store ----


class ManagerProgram(Caller):
    """An engine's two sides over more keys than chunks; it goes on, resets, and then every chunk can be had."""

    def __init__(self, interrupt: Interrupt, vllm: SimpleNamespace, root: Path) -> None:
        super().__init__(interrupt)
        self.vllm = vllm
        self.engine = vllm_sides.Engine(vllm, root, chunks=CHUNKS)
        self.manager = self.engine.manager
        self.offload = self.manager._offload
        self.pinning = self.engine.context("pinning", vllm_sides.hint("blockyard.pin", {"seconds": 0.01}))

    def run(self) -> None:
        for first in (0, 6, 0):
            self.compute(KEYS[first : first + 6], self.engine.context())
            self.step()
            settled(lambda: not self.engine.tier.is_busy, "a job runs for ever")
        self.compute(KEYS[12:14], self.pinning)
        self.use(KEYS[:14])
        self.step()
        self.quiet()
        for _ in range(2):
            self.reset()
            self.step()
            self.fill()
        for name in ("get_stats", "take_events"):
            list(self.call(getattr(self.manager, name)) or ())
        self.call(self.manager.shutdown)
        self.engine.close()

    def compute(self, keys: list[bytes], context: Any) -> None:
        prepared = self.call(self.manager.prepare_store, keys, context)
        if prepared is None:
            assert self.interrupt.where
            return
        blocks = self.engine.blocks[0]
        for block, key in enumerate(prepared.keys_to_store):
            blocks[block] = vllm_sides.content(key, 0)
        self.copy("submit_store", len(prepared.keys_to_store), prepared.store_spec)
        self.call(self.manager.complete_store, prepared.keys_to_store, context)

    def use(self, keys: list[bytes]) -> None:
        """Ask for keys as vLLM does, and load what is found."""
        context = self.engine.context("using")
        self.call(self.manager.on_new_request, context)
        until = time.monotonic() + PATIENCE
        states: list[str] = ["RETRY"]
        while "RETRY" in states:
            assert time.monotonic() < until, "a lookup is retried for ever"
            states = [self.call(self.manager.lookup, key, context).name for key in keys]
            hits = [key for key, state in zip(keys, states, strict=True) if state == "HIT"][:8]
            self.call(self.manager.touch, hits, context)
            if "RETRY" not in states:  # until then, a request waits
                self.load(hits, context)
            self.step()
        self.call(self.manager.on_request_finished, context)

    def load(self, keys: list[bytes], context: Any) -> None:
        try:
            spec = self.call(self.manager.prepare_load, keys, context)
        except InvalidArgumentError:  # lookup let go of them
            assert self.interrupt.where
            return
        self.engine.blocks[0].zero_()
        self.copy("submit_load", len(keys), spec)
        for block, key in enumerate(keys):
            assert torch.equal(self.engine.blocks[0][block], vllm_sides.content(key, 0)), "a wrong byte"
        ended, _ = self.attempt(self.manager.complete_load, keys, context)
        if not ended:
            try:
                self.manager.complete_load(keys, context)
            except InvalidArgumentError as error:  # they have ended
                assert "not being loaded" in str(error)

    def copy(self, call: str, count: int, chunks: Any) -> None:
        self.engine.copy(call, list(range(count)), chunks)

    def step(self) -> None:
        self.call(self.manager.on_schedule_end, self.vllm.base.ScheduleEndContext([], ()))

    def quiet(self) -> None:
        """Without transfers and pins every chunk can be had."""
        settled(lambda: not self.engine.tier.is_busy, "a job runs for ever")
        time.sleep(0.02)
        self.step()  # an interrupted call may have left chunks to write
        settled(lambda: not self.engine.tier.is_busy, "a job runs for ever")
        self.step()
        self.offload.check()
        assert self.offload.num_free == CHUNKS, "a chunk is held for ever"
        assert self.engine.store.stats().pending_bytes == 0

    def reset(self) -> None:
        self.call(self.manager.reset_cache)
        if hasattr(self.vllm.base.OffloadingManager, "on_reset_flushed"):
            self.call(self.manager.on_reset_flushed)
        settled(lambda: not self.engine.tier.is_busy, "a job runs for ever")

    def fill(self) -> None:
        """Every chunk holds a key."""
        keys = KEYS[20 : 20 + CHUNKS]
        prepared = self.call(self.manager.prepare_store, keys, self.engine.context())
        assert prepared is not None
        assert len(prepared.keys_to_store) == CHUNKS or self.interrupt.where
        self.call(self.manager.complete_store, prepared.keys_to_store, self.engine.context())
        self.quiet()
        assert self.offload.num_stored == CHUNKS


@pytest.mark.parametrize("most", every(12))
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_at_any_place_of_the_manager_holds_no_chunk_for_ever(
    vllm: SimpleNamespace, tmp_path: Path, error: type[BaseException], most: int
):
    numbers = iter(range(1 << 30))

    def run(interrupt: Interrupt) -> None:
        before = own_threads()
        with interrupt.installed():
            program = ManagerProgram(interrupt, vllm, tmp_path / str(next(numbers)))
            try:
                program.run()
            finally:
                program.engine.close()
        settled(lambda: not own_threads() - before, "a thread is left")

    assert swept(MANAGER, run, error, most) > 100
