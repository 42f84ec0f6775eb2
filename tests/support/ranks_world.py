"""Tensor-parallel ranks in one process, each with its own engine, store and faults, and a model of their bytes."""

import functools
import random
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from blockyard import BlockManager, CacheEngine, KVLayout, Pairs, StepDecision, StepExecutor, open_store
from blockyard.executor import Executor, ParallelExecutor, StepDone
from blockyard.executor.parts import written
from blockyard.tools.demo.executors import Wrapper

BLOCK_SIZE, HEAD_BYTES, LAYERS = 4, 8, 2
DEVICE_BLOCKS, HOST_BLOCKS = 20, 16
LAYOUT = KVLayout("kv_first", LAYERS, BLOCK_SIZE, num_kv_heads=1, head_size=HEAD_BYTES, dtype="uint8")


class Faulty(Wrapper):
    """Reports decisions late; damages some of the blocks that they write, the first at once, and reports them lost."""

    def __init__(self, inner: StepExecutor, seed: int, *, share: float) -> None:
        super().__init__(inner)
        self._own = inner
        self._random = random.Random(seed)
        self._share = share
        self._decisions: dict[int, StepDecision] = {}
        self._late: list[StepDone] = []
        self.losses = 0

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        self._decisions[decision.ticket] = decision
        super().submit(decision, by_layer=by_layer)

    def poll(self) -> list[StepDone]:
        self._late += super().poll()
        ended = [done for done in self._late if self._random.random() < 0.4]
        self._late = [done for done in self._late if done not in ended]
        return [self._spoil(done) for done in ended]

    def is_awaited(self, ticket: int) -> bool:
        return super().is_awaited(ticket) or any(done.ticket == ticket for done in self._late)

    def wait(self, ticket: int) -> StepDone:
        for done in self._late:
            if done.ticket == ticket:
                self._late.remove(done)
                return self._spoil(done)
        return self._spoil(super().wait(ticket))

    def _spoil(self, done: StepDone) -> StepDone:
        lost = list(done.lost)
        for kind, moved in self._decisions.pop(done.ticket).transfers():
            pairs = written(kind, moved)
            if len(pairs) and (not self.losses or self._random.random() < self._share):
                ids = pairs.ids[self._random.randrange(len(pairs)) :][:1].copy()
                lost.append(Pairs(pairs.src, pairs.dst, ids))
                self._write_noise(pairs.dst, ids[:, 1].copy())
                self.losses += 1
        return done._replace(lost=tuple(lost))

    def _write_noise(self, tier: str, blocks: NDArray[np.int64]) -> None:
        rows = np.full((len(blocks), LAYOUT.bytes_per_block), 255, np.uint8)
        store = self._own.store
        if tier == "external":
            assert store is not None
            store.wait(store.submit_write(blocks, rows))
        else:
            self._own.engine.write(tier, blocks, rows)  # type: ignore[arg-type]


class Forgetful(ParallelExecutor):
    """Ignores losses of all ranks except the first: a wrong merge, to test the tests."""

    def _take_whole(self) -> list[StepDone]:
        for known in self._open.values():
            known.reports.update({rank: done._replace(lost=()) for rank, done in known.reports.items() if rank})
        return super()._take_whole()


class World:
    """A scheduler over ranks. `check` compares all bytes of all living sequences on all ranks."""

    def __init__(
        self, num_ranks: int, seed: int, folder: Path, *, share: float, merge: type[ParallelExecutor] = ParallelExecutor
    ) -> None:
        size = LAYOUT.bytes_per_block
        self.engines = [
            CacheEngine(LAYOUT, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS) for _ in range(num_ranks)
        ]
        # Stores of different sizes: the smallest limits all.
        self.stores = [
            open_store(f"file://{folder}/{rank}?size={200 + 40 * rank}kB", bytes_per_block=size)
            for rank in range(num_ranks)
        ]
        own = [StepExecutor(*parts) for parts in zip(self.engines, self.stores, strict=True)]
        self.faulty = [Faulty(executor, seed * 100 + rank, share=share) for rank, executor in enumerate(own)]
        self.executor: Executor = merge(self.faulty)
        self.manager = BlockManager(
            block_size=BLOCK_SIZE,
            device_blocks=DEVICE_BLOCKS,
            host_blocks=HOST_BLOCKS,
            external_blocks=min(store.num_slots for store in self.stores),
            watermark=0.0,
        )
        self.random = random.Random(seed)
        self.tags: dict[int, list[int]] = {}
        self.open: list[int] = []
        self.next_tag = self.voided = 0

    def step(self) -> None:
        """Move some sequences, give others tokens, and process finished transfers."""
        manager, writes = self.manager, []
        chosen = list(self.tags)
        self.random.shuffle(chosen)
        for handle in chosen[:3]:
            self._move(handle)
        if manager.pool("device").num_free >= 4:
            handle = int(manager.allocate(count := self.random.randint(1, 9)))
            self.tags[handle] = self._new_tags(count)
            writes += zip(manager.slot_mapping(handle, 0, count).tolist(), self.tags[handle], strict=True)
        for handle in chosen[3:]:
            if manager.tier(handle) == "device" and manager.can_append([handle], 1):
                new = self._new_tags(1)
                writes += zip(manager.append(np.array([handle], np.uint64), 1).tolist(), new, strict=True)
                self.tags[handle] += new
        decision = manager.take_decision()
        self.executor.submit(decision)
        self.open.append(decision.ticket)
        for slot, tag in writes:
            block, offset = divmod(slot, BLOCK_SIZE)
            for rank, engine in enumerate(self.engines):
                for layer, held in enumerate(engine.tensors):
                    held[:, block, offset, 0] = torch.from_numpy(token(rank, layer, tag))
        for done in self.executor.collect(decision.ticket):
            self._end(done)

    def drain(self) -> None:
        """Finish everything in flight."""
        for ticket in list(self.open):
            self._end(self.executor.wait(ticket))

    def check(self) -> int:
        """Compare all bytes; return the number of tokens compared."""
        compared = 0
        for handle, tags in self.tags.items():
            tier, blocks = self.manager.tier(handle), self.manager.block_table(handle).astype(np.int64)
            for rank, (engine, store) in enumerate(zip(self.engines, self.stores, strict=True)):
                if tier == "external":
                    read = store.wait(store.submit_read(blocks))
                    assert read.ok.all()
                    rows = read.rows
                else:
                    rows = engine.read(tier, blocks)
                found = rows.reshape(len(rows), LAYERS, 2, BLOCK_SIZE, HEAD_BYTES).transpose(0, 3, 1, 2, 4)
                wanted = [[token(rank, layer, tag) for layer in range(LAYERS)] for tag in tags]
                np.testing.assert_array_equal(found.reshape(-1, LAYERS, 2, HEAD_BYTES)[: len(tags)], wanted)
                compared += len(tags)
        self.manager.check()
        return compared

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def _end(self, done: StepDone) -> None:
        self.open.remove(done.ticket)
        void = self.manager.complete(done.ticket, done.lost)
        self.manager.free(void)
        for handle in void.tolist():
            self.tags.pop(handle)
        self.voided += len(void)

    def _move(self, handle: int) -> None:
        manager, handles, draw = self.manager, np.array([handle], np.uint64), self.random.random()
        if manager.tier(handle) != "device":
            if manager.can_swap_in(handles):
                manager.swap_in(handles)
        elif draw < 0.2:
            self.tags[int(manager.fork(handle))] = list(self.tags[handle])
        elif draw < 0.6 and manager.can_swap_out(handles):
            manager.swap_out(handles)
        elif draw < 0.9 and manager.can_swap_out(handles, "external"):
            manager.swap_out(handles, "external")

    def _new_tags(self, count: int) -> list[int]:
        self.next_tag += count
        return list(range(self.next_tag - count, self.next_tag))


@functools.cache
def token(rank: int, layer: int, tag: int) -> NDArray[np.uint8]:
    """A token's K and V on one rank and layer, uint8 `[2, HEAD_BYTES]`."""
    return np.random.default_rng([rank, layer, tag]).integers(0, 255, (2, HEAD_BYTES), dtype=np.uint8)
