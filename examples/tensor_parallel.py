"""One scheduler process decides, the tensor-parallel workers carry out its decisions on tensors of their own.

Run it with `python examples/tensor_parallel.py`. Block ids are the same on every worker, since each holds its share of
every block's heads; so one `StepDecision` drives them all, as bytes that run no code in the process that reads them.
At the end every token of every worker is compared with what it must be.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from blockyard import BlockManager, StepDecision

LAYERS, BLOCK_SIZE, HEAD_BYTES = 3, 4, 8
DEVICE_BLOCKS, HOST_BLOCKS = 24, 48
HEADER = struct.Struct("<cI")
STEP, READ, DONE = b"S", b"R", b"D"
TIERS = ("device", "host")


def send(stream: BinaryIO, kind: bytes, *parts: bytes) -> None:
    """Write one message: its kind, its length, its bytes."""
    body = b"".join(parts)
    stream.write(HEADER.pack(kind, len(body)) + body)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[bytes, bytes]:
    """Read one message; its length is checked before memory is taken. An ended stream gives an empty kind."""
    head = stream.read(HEADER.size)
    if not head:
        return b"", b""
    kind, length = HEADER.unpack(head)
    if length > StepDecision.MAX_BYTES:
        raise ValueError(f"a message of {length} bytes, at most {StepDecision.MAX_BYTES} are read")
    return kind, stream.read(length)


def token_bytes(rank: int, tag: int) -> NDArray[np.uint8]:
    """What a worker's part of the model computes for a token: uint8 `[layers, 2, HEAD_BYTES]`."""
    digest = hashlib.blake2b(struct.pack("<QQ", rank, tag), digest_size=2 * LAYERS * HEAD_BYTES).digest()
    return np.frombuffer(digest, np.uint8).reshape(LAYERS, 2, HEAD_BYTES)


# ---- a worker ----


def work(rank: int) -> None:
    """Carry out decisions that come by stdin, until it ends."""
    # The scheduler's process does without torch.
    import torch  # noqa: PLC0415

    from blockyard.engine.engine import CacheEngine  # noqa: PLC0415
    from blockyard.executor.executor import StepExecutor  # noqa: PLC0415
    from blockyard.layout.kv import KVLayout  # noqa: PLC0415

    layout = KVLayout("kv_first", LAYERS, BLOCK_SIZE, num_kv_heads=1, head_size=HEAD_BYTES, dtype="uint8")
    engine = CacheEngine(layout, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS)
    executor = StepExecutor(engine)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (message := receive(source))[0]:
        kind, body = message
        if kind == STEP:
            (length,) = struct.unpack_from("<I", body)
            decision = StepDecision.from_bytes(body[4 : 4 + length])
            if executor.execute(decision):
                raise RuntimeError(f"worker {rank} lost blocks of ticket {decision.ticket}")
            # The forward pass: it writes its tokens after the step's transfers.
            for slot, tag in np.frombuffer(body[4 + length :], np.int64).reshape(-1, 2).tolist():
                block, offset = divmod(slot, BLOCK_SIZE)
                for cache, pair in zip(engine.tensors, token_bytes(rank, tag), strict=True):
                    cache[:, block, offset, 0] = torch.from_numpy(pair.copy())
            send(sink, DONE, struct.pack("<Q", decision.ticket))
        else:
            blocks = np.frombuffer(body[1:], np.int64)
            tier = "device" if TIERS[body[0]] == "device" else "host"
            send(sink, DONE, engine.read(tier, blocks).tobytes())


# ---- the scheduler ----


class Driver:
    """Decides for all workers, and knows which token each sequence has where."""

    def __init__(self, num_workers: int, seed: int) -> None:
        command = [sys.executable, __file__, "--rank"]
        self.workers = [
            subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for rank in range(num_workers)
        ]
        self.manager = BlockManager(
            block_size=BLOCK_SIZE, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, watermark=0.0
        )
        self.random = random.Random(seed)
        self.tags: dict[int, list[int]] = {}
        self.next_tag = 0
        self.pairs_sent = self.bytes_sent = 0

    def new_tags(self, count: int) -> list[int]:
        """Name tokens that were never there before."""
        self.next_tag += count
        return list(range(self.next_tag - count, self.next_tag))

    def step(self) -> None:
        """Decide one step and have it carried out: some sequences move, others get tokens."""
        writes: list[tuple[int, int]] = []
        manager, chosen = self.manager, list(self.tags)
        self.random.shuffle(chosen)
        moved = {handle for handle in chosen[:2] if self.move(handle)}
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
        decision = manager.take_decision()
        body = decision.to_bytes()
        packed = np.array(writes, np.int64).reshape(-1, 2).tobytes()
        self.ask(STEP, struct.pack("<I", len(body)), body, packed)
        manager.complete(decision.ticket)
        self.pairs_sent += len(decision)
        self.bytes_sent += len(body)

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
        elif on_device and manager.can_swap_out(handles):
            manager.swap_out(handles)
        elif not on_device and manager.can_swap_in(handles):
            manager.swap_in(handles)
        return True

    def ask(self, kind: bytes, *parts: bytes) -> list[bytes]:
        """Send all workers the same message, then wait for all of them."""
        for worker in self.workers:
            assert worker.stdin
            send(worker.stdin, kind, *parts)
        replies = []
        for rank, worker in enumerate(self.workers):
            assert worker.stdout
            answer, body = receive(worker.stdout)
            if answer != DONE:
                raise RuntimeError(f"worker {rank} has stopped")
            replies.append(body)
        return replies

    def compare(self) -> int:
        """Read every sequence back from every worker; returns how many tokens were compared."""
        compared = 0
        for handle, tags in self.tags.items():
            blocks = self.manager.block_table(handle).astype(np.int64)
            tier = TIERS.index(self.manager.tier(handle))
            for rank, reply in enumerate(self.ask(READ, bytes([tier]), blocks.tobytes())):
                rows = np.frombuffer(reply, np.uint8).reshape(len(blocks), LAYERS, 2, BLOCK_SIZE, HEAD_BYTES)
                found = rows.transpose(0, 3, 1, 2, 4).reshape(-1, LAYERS, 2, HEAD_BYTES)[: len(tags)]
                np.testing.assert_array_equal(found, [token_bytes(rank, tag) for tag in tags])
                compared += len(tags)
        return compared

    def close(self) -> None:
        """Let the workers end."""
        for worker in self.workers:
            assert worker.stdin
            worker.stdin.close()
        for worker in self.workers:
            worker.wait(timeout=60)


def drive(num_workers: int, steps: int, seed: int, report: Callable[[str], None] = print) -> None:
    """Run the scheduler with its workers."""
    driver = Driver(num_workers, seed)
    try:
        for _ in range(steps):
            driver.step()
        compared = driver.compare()
    finally:
        driver.close()
    report(
        f"{steps} steps, {driver.pairs_sent} pairs in {driver.bytes_sent} bytes to each of {num_workers} workers, "
        f"{compared} tokens compared"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, help="be a worker: its number")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.rank is None:
        drive(options.workers, options.steps, options.seed)
    else:
        work(options.rank)
