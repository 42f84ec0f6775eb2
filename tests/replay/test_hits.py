"""Hits without time: the real manager beside plain models, the best policy beside Belady's, and a peer live."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from policies.evictor import Optimal, chains, replay

from blockyard import AllocStatus, Arena, BlockManager, CacheGroup, PrefixCaching, Scheduler
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Step
from blockyard.tools.replay.engine import EngineOptions, replay_times
from blockyard.tools.replay.hits import HybridMemory, class_memory, replay_hits
from blockyard.tools.replay.optimal import optimal_hits
from blockyard.tools.replay.packed import NEVER, PackedTrace
from blockyard.traces import TraceRequest, read_trace

SIZE = 4

prompts = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, SIZE)), min_size=1, max_size=24)


def requests_of(rows: list[tuple[list[int], int]]) -> list[TraceRequest]:
    """One request a row: its hash ids, and the tokens after them. One request in front has ids."""
    rows = [([9], 1), *rows]
    return [TraceRequest(0.0, max(len(ids) * SIZE + tail, 1), 1, tuple(ids), float(SIZE)) for ids, tail in rows]


@given(prompts)
def test_blocks_have_one_number_if_they_and_all_before_them_are_equal(rows: list[tuple[list[int], int]]):
    requests = requests_of(rows)
    packed, plain = PackedTrace.of(requests), chains(requests)
    numbers: dict[int, int] = {}
    for number, chain in enumerate(plain):
        blocks = packed.blocks[packed.starts[number] : packed.starts[number + 1]].tolist()
        assert [numbers.setdefault(key, block) for key, block in zip(chain.keys, blocks, strict=True)] == blocks
        assert (packed.needed[number], packed.hittable[number]) == (chain.needed, chain.hittable)
    assert sorted(numbers.values()) == list(range(packed.num_distinct))


@given(prompts, st.integers(1, 7))
def test_next_uses_are_those_of_a_search_forward(rows: list[tuple[list[int], int]], longest: int):
    packed = PackedTrace.of(requests_of(rows))
    prompts = [packed.blocks[start:end].tolist() for start, end in zip(packed.starts, packed.starts[1:], strict=False)]
    served = packed.needed <= longest
    found = [prompt[:count] for prompt, count in zip(prompts, (packed.hittable * served).tolist(), strict=True)]
    expected = [
        next((later for later in range(number + 1, len(prompts)) if block in found[later]), NEVER)
        for number, prompt in enumerate(prompts)
        for block in prompt
    ]
    assert packed.next_uses(served).tolist() == expected


@given(prompts, st.integers(1, 14))
def test_the_optimum_evicts_the_furthest_next_use(rows: list[tuple[list[int], int]], blocks: int):
    requests = requests_of(rows)
    packed = PackedTrace.of(requests)
    fitting = packed.needed <= blocks
    served = [request for request, fits in zip(requests, fitting, strict=True) if fits]
    assert optimal_hits(packed, blocks)[fitting].tolist() == replay(served, blocks, Optimal(served, blocks))


@given(prompts, st.integers(1, 14), st.sampled_from(["lru", "adaptive"]))
def test_no_policy_is_better_than_the_optimum(rows: list[tuple[list[int], int]], blocks: int, policy: str):
    packed = PackedTrace.of(requests_of(rows))
    hits = replay_hits(packed, policy, blocks)
    assert (hits.device <= packed.hittable).all()
    assert not hits.device[packed.needed > blocks].any()
    assert hits.too_long == (packed.needed > blocks).sum()
    if not hits.too_long:
        assert hits.device.sum() <= optimal_hits(packed, blocks).sum()


def test_the_cost_of_a_request_does_not_grow_with_the_trace(monkeypatch: pytest.MonkeyPatch):
    asked = []
    needed = PackedTrace.needed.fget
    assert needed is not None
    monkeypatch.setattr(PackedTrace, "needed", property(lambda trace: asked.append(None) or needed(trace)))
    counts = []
    for requests in (3, 30):
        asked.clear()
        assert replay_hits(PackedTrace.of(requests_of([([number], 1) for number in range(requests)])), "lru", 9)
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


answered = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=4), st.integers(0, SIZE - 1), st.lists(st.integers(0, 2), max_size=3)
    ),
    min_size=1,
    max_size=20,
)


def with_answers(rows: list[tuple[list[int], int, list[int]]]) -> list[TraceRequest]:
    """One request a row: ids of its prompt, tokens after them, and ids of its answer."""
    rows = [([9], 1, []), *rows]
    return [
        TraceRequest(0.0, max(len(ids) * SIZE + tail, 1), 1, tuple(ids), float(SIZE), output_hash_ids=tuple(answer))
        for ids, tail, answer in rows
    ]


def best_of(packed: PackedTrace, blocks: int) -> list[int]:
    """Belady, block by block: what is cached is a set, and the furthest next use goes first, the deepest of equals."""
    served = packed.needed <= blocks
    chains = [packed.blocks[start:end].tolist() for start, end in zip(packed.starts, packed.starts[1:], strict=False)]
    findable = packed.hittable.tolist()
    cached: dict[int, int] = {}  # block to depth
    found = []
    for number, chain in enumerate(chains):
        if not served[number]:
            continue
        hits = next((depth for depth in range(findable[number]) if chain[depth] not in cached), findable[number])
        found.append(hits)

        def next_use(block: int, number: int = number) -> int:
            later = (n for n in range(number, len(chains)) if served[n] and block in chains[n][: findable[n]])
            return next(later, NEVER)

        while len(cached.keys() - chain[:hits]) + packed.needed[number] > blocks:
            free = cached.keys() - chain[:hits]
            del cached[max(free, key=lambda block: (next_use(block), cached[block]))]
        cached |= {block: depth for depth, block in enumerate(chain)}
    return found


@given(answered, st.integers(1, 14))
def test_the_optimum_knows_answers(rows: list[tuple[list[int], int, list[int]]], blocks: int):
    packed = PackedTrace.of(with_answers(rows))
    found = optimal_hits(packed, blocks)[packed.needed <= blocks].tolist()
    assert sum(found) == sum(best_of(packed, blocks))


@given(answered, st.integers(1, 14))
def test_an_answer_is_found_by_the_next_turn(rows: list[tuple[list[int], int, list[int]]], blocks: int):
    packed = PackedTrace.of(with_answers(rows))
    hits = replay_hits(packed, "lru", blocks).device
    assert (hits <= packed.hittable).all()
    everything = replay_hits(packed, "lru", int(packed.needed.sum()) + 1).device.tolist()
    known: set[int] = set()
    for number, start in enumerate(packed.starts[:-1].tolist()):
        chain = packed.blocks[start : packed.starts[number + 1]].tolist()
        findable = packed.hittable[number]
        assert everything[number] == next((d for d in range(findable) if chain[d] not in known), findable)
        known.update(chain)


def test_a_host_tier_finds_what_the_device_evicted(traces: Path):
    packed = PackedTrace.of(read_trace(traces / "synthetic_trace.jsonl", first=400))
    alone = replay_hits(packed, "lru", 2000)
    both = replay_hits(packed, "lru", 2000, host_blocks=4000)
    larger = replay_hits(packed, "lru", 6000)
    assert both.host.sum() > 0
    assert alone.device.sum() < (both.device + both.host).sum() <= larger.device.sum()


class Watched:
    """A step takes a millisecond. Notes how many blocks each request finds, and how many the host had."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.found: dict[int, int] = {}
        self.loaded = 0

    def seconds(self, prefill: Sequence[tuple[int, int]], decode_context: NDArray[np.int64]) -> float:
        return 0.001

    def step(self, start: float, end: float, step: Step, scheduler: Scheduler, stored: int) -> None:
        for row in range(step.decodes, step.rows):
            self.found.setdefault(int(step.owner(row)[0]), int(step.start[row]) // self._block_size)

    def plain_steps(self, start: float, end: float, contexts: NDArray[np.int64], scheduler: Scheduler) -> None:
        """No request finds anything."""

    def idle(self, time: float, scheduler: Scheduler) -> None:
        """Nothing happens."""

    def copies(self, start: float, end: float, way: str, blocks: int) -> None:
        pass


def hits_of_an_engine(
    requests: list[TraceRequest], policy: str, device: int, host: int, budget: int, hybrid: HybridMemory | None = None
) -> Watched:
    """Serve one request at a time, with copies that take no time."""
    options = EngineOptions(
        device,
        host,
        block_size=int(requests[0].hash_tokens),
        max_num_batched_tokens=budget,
        eviction=policy,
        watermark=0.0,
        host_bandwidth=1e30,
        host_latency=0.0,
        hybrid=hybrid,
    )
    watched = Watched(options.block_size)
    watched.loaded = replay_times(requests, options, watched, watch=watched).loaded_blocks
    return watched


def conversations(rng: random.Random, turns: int, size: int) -> list[TraceRequest]:
    """Turns whose prompts repeat others, far apart; the trace tells the blocks of some answers."""
    texts = [[rng.randrange(1000) for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(3, 30))]
    requests = []
    for number in range(turns):
        ids = (rng.choice(texts) + rng.choice(texts))[: rng.randint(1, 20)]
        more, output = rng.randrange(3 * size), rng.choice((1, 1, 5, 100))
        answer = []
        if more < size and rng.random() < 0.5:
            answer = [rng.randrange(1000) for _ in range((more + output - 1) // size)]
        texts[rng.randrange(len(texts))] = ids + answer  # it goes on from there
        prompt = (len(ids) * size + more, output, ids, float(size))
        requests.append(TraceRequest(1e5 * number, *prompt, output_hash_ids=answer))
    return requests


# With blocks of more than 16 tokens, `adaptive` samples other blocks, and a step must end with a block.
@pytest.mark.parametrize(("policy", "size"), [("lru", 4), ("lru", 32), ("adaptive", 4), ("adaptive", 16)])
@pytest.mark.parametrize("host", [0, 0.3, 1, 4])
def test_an_engine_with_one_request_at_a_time_finds_the_same_blocks(policy: str, size: int, host: float):
    for seed in range(2):
        rng = random.Random(seed)
        requests = conversations(rng, 100, size)
        packed = PackedTrace.of(requests)
        # One block more than the longest request: the engine refuses one that fills the device to the last token.
        device, budget = int(packed.needed.max()) + rng.randint(1, 60), rng.choice((size, 6 * size, 8192))
        budget += (size <= 16) * rng.randrange(3)
        hits = replay_hits(packed, policy, device, host_blocks=round(host * device), max_num_batched_tokens=budget)
        watched = hits_of_an_engine(requests, policy, device, round(host * device), budget)
        assert [watched.found[number] for number in range(len(requests))] == (hits.device + hits.host).tolist()
        assert watched.loaded == hits.host.sum()
        assert host or hits.device.sum() <= optimal_hits(packed, device).sum()
        assert hits.device.any()


@pytest.mark.parametrize(
    ("policy", "device", "host", "message"),
    [
        ("clock", 5, 0, "policy is 'clock', must be one of lru, adaptive, optimal"),
        ("lru", 0, 0, "device_blocks is 0, host_blocks 0, must be"),
        ("lru", 5, -1, "device_blocks is 5, host_blocks -1, must be"),
        ("optimal", 5, 1, "host_blocks is 1, must be 0 with policy 'optimal'"),
    ],
)
def test_bad_arguments_are_named(policy: str, device: int, host: int, message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        replay_hits(PackedTrace.of(requests_of([])), policy, device, host_blocks=host)
    with pytest.raises(InvalidArgumentError, match="max_num_batched_tokens is 0, must be at least 1"):
        replay_hits(PackedTrace.of(requests_of([])), "lru", 5, max_num_batched_tokens=0)


def test_a_trace_without_blocks_of_one_size_is_refused():
    with pytest.raises(InvalidArgumentError, match="no request has hash ids"):
        PackedTrace.of([TraceRequest(0.0, 5, 1)])
    with pytest.raises(InvalidArgumentError, match=r"hash ids of \[4.0, 8.0\] tokens"):
        PackedTrace.of([TraceRequest(0.0, 9, 1, (1,), 4.0), TraceRequest(0.0, 9, 1, (1,), 8.0)])


@pytest.mark.parametrize("gib", [100, 200, 400])
def test_hit_tokens_are_those_of_a_peer(traces: Path, gib: int):
    """kvcache-simulator counts a last partial block as one more block, and finds whole prompts; so does this trace.

    Its `optimal` keeps only a part of a prompt where that is better, which a pool that computes it cannot.
    """
    pytest.importorskip("kvcache_sim", reason="kvcache-simulator is not installed")
    path = traces / "synthetic_trace.jsonl"
    options = f"--trace {path} --model llama-3.1-8b --budgets-gib {gib} --policies lru --block-size 512"
    command = [sys.executable, "-m", "kvcache_sim", "run", *options.split(), "--format", "json", "--backend", "python"]
    answer = json.loads(subprocess.check_output([*command, "--no-progress"], text=True))
    (point,) = answer["points"]
    requests = read_trace(path)
    whole = [TraceRequest(row.arrival, len(row.hash_ids) * 512 + 1, 1, row.hash_ids, 512.0) for row in requests]
    # One block more: the tail of one token that lets a whole prompt be found, and is never kept.
    hits = replay_hits(PackedTrace.of(whole), "lru", point["cacheBlocks"] + 1)
    tokens = np.minimum(hits.device * 512, [row.input_tokens for row in requests])
    assert int(tokens[len(requests) // 2 :].sum()) == point["results"]["lru"]["hitTokens"]


# ---- hybrid models ----

FULL, STATE = CacheGroup.full_attention().with_blocks(bytes=64), CacheGroup.recurrent().with_blocks(bytes=192)
HYBRIDS = {
    "window": (FULL, CacheGroup.sliding_window(6).with_blocks(bytes=64)),
    "window of other bytes": (FULL, CacheGroup.sliding_window(3).with_blocks(bytes=32)),
    "states": (FULL, STATE),
    "both": (FULL, CacheGroup.sliding_window(6).with_blocks(bytes=64), STATE),
}


def found_by_the_manager(packed: PackedTrace, groups: tuple[CacheGroup, ...], policy: str, size: int) -> list[int]:
    """The blocks that each request finds, served by a manager token by token; -1 if it does not fit."""
    manager = BlockManager(
        block_size=SIZE,
        groups=groups,
        arena=Arena(device_bytes=size),
        watermark=0.0,
        prefix_caching=PrefixCaching(eviction=policy),
    )

    def step(sequence: Any) -> None:
        manager.complete(manager.take_decision(now=0.0).ticket)
        manager.mark_computed(sequence)

    found = []
    for number in range(len(packed)):
        blocks = packed.blocks[packed.starts[number] : packed.starts[number + 1]]
        length, answer = int(packed.input_tokens[number]), int(packed.output_tokens[number])
        end = max(length + answer - 1, len(blocks) * SIZE)
        text = np.full(end, 2**31 + number, np.uint32)
        text[: len(blocks) * SIZE] = np.repeat(blocks, SIZE)
        fit = manager.can_allocate(text[:length], chunk_tokens=8, max_tokens=end - length)
        if fit.status == AllocStatus.NEVER:
            found.append(-1)
            continue
        sequence = manager.allocate(text[:length], chunk_tokens=8)
        found.append(sequence.cached_tokens // SIZE)
        step(sequence)
        while count := manager.next_chunk(sequence, 8):
            manager.append(sequence, count)
            step(sequence)
        for token in text[length:]:
            manager.append(sequence, 1, token_ids=[token])
            step(sequence)
        manager.free(sequence)
    return found


@pytest.mark.parametrize("kind", HYBRIDS)
@given(answered, st.integers(6, 40), st.sampled_from(["lru", "adaptive"]))
def test_hits_of_a_hybrid_model_are_those_of_its_manager(
    kind: str, rows: list[tuple[list[int], int, list[int]]], blocks: int, policy: str
):
    packed, memory = PackedTrace.of(with_answers(rows)), HybridMemory(HYBRIDS[kind], 128)
    hits = replay_hits(packed, policy, blocks, max_num_batched_tokens=8, hybrid=memory)
    expected = found_by_the_manager(packed, memory.groups, policy, blocks * memory.block_bytes)
    assert hits.device.tolist() == [max(0, count) for count in expected]
    assert hits.too_long == expected.count(-1)


def test_a_hybrid_model_finds_a_prompt_up_to_a_resume_point():
    ids = tuple(range(10))
    rows = [TraceRequest(0.0, 10 * SIZE, 1, ids, float(SIZE)), TraceRequest(0.0, 10 * SIZE, 1, ids, float(SIZE))]
    parted = TraceRequest(0.0, 10 * SIZE, 1, (*ids[:7], 20, 21, 22), float(SIZE))
    packed = PackedTrace.of([*rows, parted, parted])
    for groups, found in ((HYBRIDS["window"], [0, 9, 0, 9]), ((FULL,), [0, 9, 7, 9])):
        memory = HybridMemory(groups, 128)
        assert replay_hits(packed, "lru", 1000, hybrid=memory).device.tolist() == found
    with pytest.raises(InvalidArgumentError, match="hybrid is given, must be None with policy 'optimal'"):
        replay_hits(packed, "optimal", 1000, hybrid=memory)


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_an_engine_of_a_hybrid_model_with_one_request_at_a_time_finds_the_same_blocks(kind: str, host: float):
    from_host = 0
    for seed in range(2):
        rng = random.Random(seed)
        requests = conversations(rng, 60, SIZE)
        packed, memory = PackedTrace.of(requests), HybridMemory(HYBRIDS[kind], 256)
        device, budget = int(packed.needed.max()) + rng.randint(8, 40), rng.choice((SIZE, 6 * SIZE, 8192))
        blocks = round(host * device)
        hits = replay_hits(packed, "lru", device, host_blocks=blocks, max_num_batched_tokens=budget, hybrid=memory)
        watched = hits_of_an_engine(requests, "lru", device, blocks, budget, hybrid=memory)
        assert [watched.found[number] for number in range(len(requests))] == (hits.device + hits.host).tolist()
        assert hits.device.any()
        assert watched.loaded == hits.host.sum()
        from_host += int(hits.host.sum())
        kept = sum(one.device for one in hits.classes)
        assert 0 < kept <= device * memory.block_bytes
        assert [one.block_bytes for one in hits.classes] == list(dict.fromkeys(g.block_bytes for g in memory.groups))
    assert (from_host > 0) == (host > 0)


def test_copies_of_a_hybrid_model_take_the_time_of_their_own_bytes():
    class Copies(Watched):
        def copies(self, start: float, end: float, way: str, blocks: int) -> None:
            sizes.append(((end - start) * 1e6, blocks))

    sizes: list[tuple[float, int]] = []
    requests = conversations(random.Random(0), 60, SIZE)
    options = replace(OPTIONS_OF_HYBRIDS, hybrid=HybridMemory(HYBRIDS["states"], 256))
    replay_times(requests, options, Watched(SIZE), watch=Copies(SIZE))
    for size, blocks in sizes:  # of 64 and 192 bytes
        states = (size - 64 * blocks) / 128
        assert states == pytest.approx(round(states), abs=1e-3)
        assert 0 <= round(states) <= blocks
    assert {round(size / blocks) for size, blocks in sizes} > {64}


OPTIONS_OF_HYBRIDS = EngineOptions(
    device_blocks=58, host_blocks=58, block_size=SIZE, eviction="lru", watermark=0.0, host_bandwidth=1e6, host_latency=0
)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_null_block_counts_as_no_memory(kind: str):
    manager = HybridMemory(HYBRIDS[kind], 128).manager(SIZE, 40, 0, 0.0, None)
    assert manager is not None
    assert [(one.device, one.host) for one in class_memory(manager)] == [(0, 0)] * manager.num_page_classes


def test_a_store_below_a_hybrid_model_is_refused():
    options = EngineOptions(device_blocks=9, store_blocks=3, hybrid=HybridMemory(HYBRIDS["window"], 128))
    with pytest.raises(InvalidArgumentError, match="store_blocks is 3, must be 0 with hybrid"):
        replay_times([TraceRequest(0.0, 5, 1)], options, Watched(SIZE))


@pytest.mark.parametrize(("groups", "size"), [((), 0), (HYBRIDS["window"], 0), ((CacheGroup.recurrent(),), 64)])
def test_groups_with_bytes_need_the_bytes_of_a_block(groups: tuple[CacheGroup, ...], size: int):
    with pytest.raises(InvalidArgumentError, match=f"block_bytes is {size} with groups"):
        HybridMemory(groups, size)


def test_copies_of_a_hybrid_model_behind_a_slow_link_are_no_missing_completes():
    requests = conversations(random.Random(0), 200, SIZE)
    options = replace(OPTIONS_OF_HYBRIDS, hybrid=HybridMemory(HYBRIDS["states"], 256), host_latency=1e3)
    times = replay_times(requests, options, Watched(SIZE))  # a warning would fail the test
    assert times.seconds > 17 * 1e3
