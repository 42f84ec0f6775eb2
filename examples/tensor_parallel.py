"""One scheduler process decides; tensor-parallel workers carry out its decisions on their own three tiers.

Run it with `python examples/tensor_parallel.py`. Block ids are the same on every worker, as each holds its share of
every block's heads; so one `StepDecision` drives them all. Each worker has its own swap store. A worker that loses
a block voids the sequence everywhere: here stored blocks are damaged now and then, on one worker. At the end every
token of every worker is compared with what it must be.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import struct
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blockyard import BlockManager, CacheEngine, KVLayout, StepDecision, StepExecutor, open_store
from blockyard.executor import ParallelExecutor, RemoteExecutor, serve_executor
from blockyard.stores import store_namespace
from blockyard.testing.faults import corrupt_slots

LAYERS, BLOCK_SIZE, HEAD_BYTES = 3, 4, 8
DEVICE_BLOCKS, HOST_BLOCKS = 24, 24
TOKEN_BYTES = 2 * LAYERS * HEAD_BYTES


def token_bytes(rank: int, tag: int) -> NDArray[np.uint8]:
    """What a worker's part of the model computes for a token: uint8 `[layers, 2, HEAD_BYTES]`."""
    digest = hashlib.blake2b(struct.pack("<QQ", rank, tag), digest_size=TOKEN_BYTES).digest()
    return np.frombuffer(digest, np.uint8).reshape(LAYERS, 2, HEAD_BYTES)


# ---- a worker ----


def work(connection: Connection, rank: int, num_workers: int, url: str) -> None:
    """Carry out decisions and write tokens until the driver closes its end of the connection."""
    layout = KVLayout("kv_first", LAYERS, BLOCK_SIZE, num_kv_heads=1, head_size=HEAD_BYTES, dtype="uint8")
    engine = CacheEngine(layout, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS)
    # The rank is part of the namespace, so workers that share a server never read each other's bytes.
    namespace = store_namespace(model="example", revision="1", layout=layout, rank=rank, world_size=num_workers)
    with open_store(
        url.replace("{rank}", str(rank)), bytes_per_block=layout.bytes_per_block, namespace=namespace
    ) as store:

        def run(message: tuple[str, Any], _ticket: int) -> object:
            kind, body = message
            if kind == "compute":  # the forward pass: it writes its tokens after the step's loads
                for slot, tag in body:
                    block, offset = divmod(slot, BLOCK_SIZE)
                    for cache, pair in zip(engine.tensors, token_bytes(rank, tag), strict=True):
                        cache[:, block, offset, 0] = torch.from_numpy(pair.copy())
            elif kind == "damage":
                corrupt_slots(store, body)
            elif kind == "read":
                tier, blocks = body
                if tier != "external":
                    return engine.read(tier, blocks), np.ones(len(blocks), np.bool_)
                read = store.wait(store.submit_read(blocks))
                return read.rows, read.ok
            return store.num_slots

        serve_executor(connection, StepExecutor(engine, store), run)


# ---- the scheduler ----


class Driver:
    """Decides for all workers, and knows which token each sequence has where."""

    def __init__(self, num_workers: int, url: str, seed: int) -> None:
        context = get_context("spawn")
        self.workers, self.processes, self.connections = [], [], []
        for rank in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, rank, num_workers, url), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
            self.workers.append(RemoteExecutor(ours, name=f"rank {rank}"))
        self.executor = ParallelExecutor(self.workers)
        self.manager = BlockManager(
            block_size=BLOCK_SIZE,
            device_blocks=DEVICE_BLOCKS,
            host_blocks=HOST_BLOCKS,
            external_blocks=min(worker.ask(("slots", None)) for worker in self.workers),
            watermark=0.0,
        )
        self.random = random.Random(seed)
        self.tags: dict[int, list[int]] = {}
        self.next_tag = self.pairs_sent = self.voided = 0

    def new_tags(self, count: int) -> list[int]:
        """Name tokens that were never there before."""
        self.next_tag += count
        return list(range(self.next_tag - count, self.next_tag))

    def step(self) -> None:
        """Decide one step and have it carried out: some sequences move, others get tokens."""
        writes: list[tuple[int, int]] = []
        manager, chosen = self.manager, list(self.tags)
        self.random.shuffle(chosen)
        moved = {handle for handle in chosen[:3] if self.move(handle)}
        if manager.pool("device").num_free >= 4:
            handle = int(manager.allocate(count := self.random.randint(1, 9)))
            self.tags[handle] = self.new_tags(count)
            writes += zip(manager.slot_mapping(handle, 0, count).tolist(), self.tags[handle], strict=True)
            moved.add(handle)
        for handle in chosen:
            if handle in moved or manager.tier(handle) != "device" or not manager.can_append([handle], 2):
                continue
            new = self.new_tags(2)
            writes += zip(manager.append(np.array([handle], np.uint64), 2).tolist(), new, strict=True)
            self.tags[handle] += new
        self.carry_out(manager.take_decision(), writes)

    def carry_out(self, decision: StepDecision, writes: list[tuple[int, int]]) -> None:
        """Have all workers carry out a decision and compute; free what any of them has lost."""
        self.executor.submit(decision)
        for worker in self.workers:
            worker.tell(("compute", writes))
        done = self.executor.wait(decision.ticket)  # with the losses of all workers
        void = self.manager.complete(done.ticket, done.lost)
        self.manager.free(void)
        for handle in void.tolist():
            del self.tags[handle]  # an engine computes it again from its tokens
        self.voided += len(void)
        self.pairs_sent += len(decision)
        for pairs in decision.swap_out:
            if pairs.dst == "external" and self.random.random() < 0.2:
                self.random.choice(self.workers).tell(("damage", pairs.ids[:1, 1].copy()))

    def move(self, handle: int) -> bool:
        """Free, fork or swap a sequence, where there is room; says whether its tokens must be left alone now."""
        manager, handles, draw = self.manager, np.array([handle], np.uint64), self.random.random()
        on_device = manager.tier(handle) == "device"
        if draw < 0.1:
            manager.free(handles)
            del self.tags[handle]
        elif draw < 0.4 and on_device:
            child = int(manager.fork(handle))
            self.tags[child] = list(self.tags[handle])
            return False
        elif on_device and draw < 0.7 and manager.can_swap_out(handles):
            manager.swap_out(handles)
        elif on_device and manager.can_swap_out(handles, "external"):
            manager.swap_out(handles, "external")
        elif not on_device and manager.can_swap_in(handles):
            manager.swap_in(handles)
        return True

    def compare(self) -> int:
        """Read every sequence back from every worker; returns how many tokens were compared."""
        compared = 0
        for handle, tags in self.tags.items():
            where = (self.manager.tier(handle), self.manager.block_table(handle).astype(np.int64))
            for rank, worker in enumerate(self.workers):
                rows, ok = worker.ask(("read", where))
                tokens = rows.reshape(len(rows), LAYERS, 2, BLOCK_SIZE, HEAD_BYTES).transpose(0, 3, 1, 2, 4)
                landed = np.repeat(ok, BLOCK_SIZE)[: len(tags)]  # a damaged block says so
                wanted = np.array([token_bytes(rank, tag) for tag in tags])
                found = tokens.reshape(-1, LAYERS, 2, HEAD_BYTES)[: len(tags)]
                np.testing.assert_array_equal(found[landed], wanted[landed])
                compared += int(landed.sum())
        return compared

    def close(self) -> None:
        """Let the workers end."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(timeout=60)


def drive(num_workers: int, steps: int, seed: int, url: str, report: Callable[[str], None] = print) -> None:
    """Run the scheduler with its workers."""
    driver = Driver(num_workers, url, seed)
    try:
        for _ in range(steps):
            driver.step()
        compared = driver.compare()
    finally:
        driver.close()
    report(
        f"{steps} steps, {driver.pairs_sent} pairs to each of {num_workers} workers, "
        f"{driver.voided} sequences voided, {compared} tokens compared"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        drive(options.workers, options.steps, options.seed, f"file://{folder}/{{rank}}?size=1MiB")
