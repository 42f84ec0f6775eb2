"""vLLM V0's block manager, 0.7.3, on W-decode, W-prefix, W-evict, W-swap and fork.

Called as V0's scheduler calls it; sequences are made, and tokens appended to them, outside the measured time. W-evict
takes blocks from the allocator alone: the manager would also hash what it takes them for.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from typing import Any

from common import (
    BLOCK_SIZE,
    EVICTABLE,
    GROUP,
    LIVE,
    POOLS,
    PROMPT,
    SEQUENCES,
    STEPS,
    TAKEN,
    Figures,
    chains,
    groups,
    laps,
    prompts,
    report,
    shuffled,
)
from stand_ins import bare, stand_in

bare("vllm")
stand_in(
    *("cloudpickle", "psutil", "yaml", "zmq", "vllm.config", "vllm.inputs.registry", "vllm.logger", "vllm.lora"),
    *("vllm.multimodal", "vllm.platforms", "vllm.pooling_params", "vllm.prompt_adapter", "vllm.sampling_params"),
)

from vllm.core.block_manager import SelfAttnBlockSpaceManager  # noqa: E402
from vllm.sequence import Logprob, Sequence, SequenceGroup, SequenceStatus  # noqa: E402
from vllm.utils import Device  # noqa: E402

NUMBERS = itertools.count()


def group_of(tokens: list[int]) -> Any:
    number = next(NUMBERS)
    inputs = {"type": "token", "prompt_token_ids": tokens}
    return SequenceGroup(str(number), [Sequence(number, inputs, BLOCK_SIZE)], arrival_time=0.0)


def begin(manager: Any, group: Any) -> None:
    manager.allocate(group)
    group.first_seq.status = SequenceStatus.RUNNING


def decode() -> Figures:
    manager = SelfAttnBlockSpaceManager(BLOCK_SIZE, 32768, 0)
    groups_ = [group_of([1] * PROMPT) for _ in range(SEQUENCES)]
    allocated = laps(groups_, lambda group: begin(manager, group), PROMPT // BLOCK_SIZE)
    logprobs = {1: Logprob(0.0)}

    def tokens() -> Iterator[None]:
        for _ in range(STEPS):
            for group in groups_:
                group.first_seq.append_token_id(1, logprobs)
            yield

    def step(_: None) -> None:
        for group in groups_:
            if not manager.can_append_slots(group, 0):
                raise RuntimeError("the pool has too few blocks")
            manager.append_slots(group.first_seq, 0)

    appended = laps(tokens(), step, SEQUENCES)
    freed = laps(groups_, lambda group: manager.free(group.first_seq), (PROMPT + STEPS) // BLOCK_SIZE)
    return {"decode_ns": appended, "allocate_ns": allocated, "free_ns": freed}


def prefix(requests: list[list[int]], blocks: int) -> tuple[list[float], list[float]]:
    manager = SelfAttnBlockSpaceManager(BLOCK_SIZE, blocks, 0, watermark=0.0, enable_caching=True)
    live: deque[Any] = deque()
    hits = 0

    def run(some: Sequence_[Any]) -> None:
        nonlocal hits
        for group in some:
            if len(live) == LIVE:
                manager.free(live.popleft().first_seq)
            sequence = group.first_seq
            hits += manager.get_num_cached_tokens(sequence)
            manager.can_allocate(group)
            begin(manager, group)
            manager.access_all_blocks_in_seq(sequence, time.time())
            manager.mark_blocks_as_computed(group, len(requests[0]))
            live.append(group)

    costs = laps(groups([group_of(tokens) for tokens in requests]), run, GROUP * 1000)
    return costs, [hits / sum(map(len, requests))]


def evict(evictable: int) -> list[float]:
    # One more: it keeps block 0 as its null block.
    manager = SelfAttnBlockSpaceManager(BLOCK_SIZE, evictable + 1, 0, watermark=0.0, enable_caching=True)
    cached = [group_of(tokens) for tokens in chains(evictable)]
    for group in cached:
        manager.get_num_cached_tokens(group.first_seq)
        manager.allocate(group)
        manager.mark_blocks_as_computed(group, 0)
    for number in shuffled(len(cached)):
        manager.access_all_blocks_in_seq(cached[number].first_seq, time.time())
        manager.free(cached[number].first_seq)
    kept = []

    def run(_: int) -> None:
        kept.extend(manager.block_allocator.allocate_mutable_block(None, Device.GPU) for _ in range(TAKEN))

    return laps(range(min(evictable, 50_000) // TAKEN), run, TAKEN)


def swap() -> list[float]:
    manager = SelfAttnBlockSpaceManager(BLOCK_SIZE, 8193, 8193, watermark=0.0)
    running = [group_of([1] * 2048) for _ in range(64)]
    for group in running:
        begin(manager, group)

    def out(group: Any) -> None:
        manager.can_swap_out(group)
        manager.swap_out(group)
        group.first_seq.status = SequenceStatus.SWAPPED

    def back(group: Any) -> None:
        manager.can_swap_in(group, 0)
        manager.swap_in(group)
        group.first_seq.status = SequenceStatus.RUNNING

    return laps(running, out, 128) + laps(running, back, 128)


def fork() -> list[float]:
    sys.setrecursionlimit(20_000)  # it calls itself once a block
    manager = SelfAttnBlockSpaceManager(BLOCK_SIZE, 32768, 0)
    parent = group_of([1] * (1000 * BLOCK_SIZE))
    begin(manager, parent)
    costs = []
    for child in [group_of([1]) for _ in range(20)]:
        costs += laps([child.first_seq], lambda sequence: manager.fork(parent.first_seq, sequence), 1000)
        manager.free(child.first_seq)
    return [min(costs)]


def measure(requests: list[list[int]]) -> Figures:
    figures = decode()
    for name, blocks in POOLS.items():
        figures[f"prefix_{name}_us"], figures[f"prefix_{name}_hit"] = prefix(requests, blocks)
    figures |= {f"evict_{name}_ns": evict(evictable) for name, evictable in EVICTABLE.items()}
    return figures | {"swap_ns": swap(), "fork_1000_us": fork()}


if __name__ == "__main__":
    REQUESTS = prompts()
    report(lambda: measure(REQUESTS))
