"""A scheduler's recording replays to the same hits, request by request, and holds no token."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from interrupts import CountedInterrupt

from blockyard import Arena, BlockManager, CacheGroup, PrefixCaching, Request, Scheduler
from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.hits import HybridMemory, replay_hits
from blockyard.tools.replay.packed import PackedTrace
from blockyard.traces import TraceRecorder, TraceRequest, read_groups, read_trace

BLOCK, STEP_SECONDS = 4, 0.001
FIRST_TOKEN = 3_000_000_000
"""Token ids of the recorded run, which no length, time or number of a trace can look like."""


class Served:
    """A run of a scheduler in virtual time: a step lasts `STEP_SECONDS`.

    Attributes:
        hits: tokens that each request found cached when it was first admitted.
        outputs: what each request generated.
    """

    def __init__(
        self,
        arrivals: list[tuple[int, Request]],
        draw: Callable[[str, int], int],
        *,
        policy: str = "lru",
        recording: Path | None = None,
        groups: tuple[CacheGroup, ...] = (),
        **options: object,
    ) -> None:
        self.now = 0
        caching = PrefixCaching(eviction=policy)
        if not groups:
            manager = BlockManager(
                block_size=BLOCK, device_blocks=40, host_blocks=10, watermark=0.0, prefix_caching=caching
            )
        elif groups[0].block_bytes is None:
            manager = BlockManager(
                block_size=BLOCK, device_blocks=DEVICE, groups=groups, watermark=0.0, prefix_caching=caching
            )
        else:
            arena = Arena(device_bytes=DEVICE * BLOCK_BYTES)
            manager = BlockManager(block_size=BLOCK, groups=groups, arena=arena, watermark=0.0, prefix_caching=caching)
        recorder = None
        if recording is not None:
            recorder = TraceRecorder(recording, block_size=BLOCK, clock=lambda: self.now * STEP_SECONDS)
        self.scheduler = Scheduler(manager, recorder=recorder, **options)  # type: ignore[arg-type]
        self.hits: dict[str, int] = {}
        self.outputs: dict[str, tuple[int, ...]] = {}
        left = list(arrivals)
        while left or self.scheduler.num_unfinished:
            while left and left[0][0] <= self.now:
                self.scheduler.add(left.pop(0)[1])
            self.step(draw)
            self.now += 1
        if recorder is not None:
            recorder.close()

    def step(self, draw: Callable[[str, int], int]) -> None:
        step = self.scheduler.schedule()
        for row in range(step.rows):
            self.hits.setdefault(step.owner(row)[0], int(step.start[row]))
        self.scheduler.complete(step.decision.ticket)
        drawn = [draw(one.request_id, one.position) for one in step.draws()]
        for finished in self.scheduler.update(step, drawn):
            self.outputs[finished.request.request_id] = finished.outputs[0]


def conversations(seed: int) -> tuple[list[tuple[int, Request]], Callable[[str, int], int]]:
    """Random turns whose prompts repeat earlier prompts with their answers, some of other tenants and adapters."""
    rng = random.Random(seed)
    texts: list[tuple[list[int], bytes | None, int]] = [([], None, 0), ([], b"a", 0), ([], None, 1)]
    arrivals, answers, now = [], {}, 0
    for number in range(60):
        now += rng.choice((0, 0, 1, 5, 30)) if number else 0
        text, salt, lora_id = rng.choice(texts[-12:])
        prompt = [*text, *(FIRST_TOKEN + rng.randrange(10**9) for _ in range(rng.randint(1, 20)))][-100:]
        answer = [FIRST_TOKEN + rng.randrange(10**9) for _ in range(rng.randint(1, 12))]
        name = f"request {number}"
        answers[name] = (len(prompt), answer)
        texts.append(([*prompt, *answer], salt, lora_id))
        arrivals.append((now, Request(name, prompt, max_tokens=len(answer), salt=salt, lora_id=lora_id)))

    def draw(name: str, position: int) -> int:
        length, answer = answers[name]
        return answer[position - length]

    return arrivals, draw


def recreated(trace: list[TraceRequest]) -> tuple[list[tuple[int, Request]], Callable[[str, int], int]]:
    """Make requests from a trace: a block's tokens from its id, all others occurring once."""
    arrivals, texts, fresh = [], [], iter(range(1 << 31, 1 << 32))
    for number, request in enumerate(trace):
        ids = [*request.hash_ids, *request.output_hash_ids]
        text = [block * BLOCK + place for block in ids for place in range(BLOCK)]
        text += [next(fresh) for _ in range(len(text), request.input_tokens + request.output_tokens)]
        prompt = text[: request.input_tokens]
        arrivals.append((round(request.arrival / STEP_SECONDS), Request(str(number), prompt, request.output_tokens)))
        texts.append(text)
    return arrivals, lambda name, position: texts[int(name)][position]


DEVICE, BLOCK_BYTES = 100, 64
"""The memory of hybrid models, in blocks, and the bytes of a block."""
FULL, WINDOW, STATE = CacheGroup.full_attention(), CacheGroup.sliding_window(6), CacheGroup.recurrent()
HYBRIDS = {
    "equal blocks": (FULL, WINDOW),
    "an arena": (FULL.with_blocks(bytes=32), WINDOW.with_blocks(bytes=64), STATE.with_blocks(bytes=96)),
    "short blocks": (FULL.with_blocks(bytes=48), WINDOW.with_blocks(tokens=2, bytes=16)),
}
OPTIONS = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 8, "preemption_mode": "recompute"},
    {"max_num_seqs": 8, "preemption_mode": "swap"},
    {"max_num_seqs": 4, "max_num_batched_tokens": 24},
    {"max_num_seqs": 8, "num_lookahead_tokens": 2},
]


@pytest.mark.parametrize("policy", ["lru", "priority"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_replay_has_the_same_hits_request_by_request(tmp_path: Path, policy: str, options: dict[str, object]):
    found = preempted = 0
    for seed in range(5):
        path = tmp_path / f"{seed}.jsonl.gz"
        served = Served(*conversations(seed), policy=policy, recording=path, **options)
        again = Served(*recreated(read_trace(path)), policy=policy, **options)
        assert {f"request {name}": hits for name, hits in again.hits.items()} == served.hits
        assert again.scheduler.stats() == served.scheduler.stats()
        found += sum(served.hits.values())
        preempted += served.scheduler.stats().preempted_recompute + served.scheduler.stats().preempted_swap_host
    assert found > 1000
    assert preempted > 0 or options["max_num_seqs"] == 1


@pytest.mark.parametrize("groups", HYBRIDS.values(), ids=list(HYBRIDS))
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], {**OPTIONS[3], "max_num_seqs": 1}], ids=str)
def test_a_hybrid_models_replay_with_the_recorded_groups_has_the_same_hits(
    tmp_path: Path, groups: tuple[CacheGroup, ...], options: dict[str, object]
):
    found = 0
    for seed in range(5):
        path = tmp_path / f"{seed}.jsonl.gz"
        served = Served(*conversations(seed), recording=path, groups=groups, **options)
        recorded = read_groups(path)
        assert recorded == groups
        again = Served(*recreated(read_trace(path)), groups=recorded, **options)
        assert {f"request {name}": hits for name, hits in again.hits.items()} == served.hits
        found += sum(served.hits.values())
        if options["max_num_seqs"] != 1:
            continue
        # Without step times the replay serves one request at a time, too.
        memory = HybridMemory(recorded, BLOCK_BYTES if recorded[0].block_bytes else 0)
        budget = int(options.get("max_num_batched_tokens", 8192))  # type: ignore[call-overload]
        packed = PackedTrace.of(read_trace(path))
        hits = replay_hits(packed, "lru", DEVICE, max_num_batched_tokens=budget, hybrid=memory)
        assert (hits.device * BLOCK).tolist() == [served.hits[f"request {number}"] for number in range(len(packed))]
    assert found > 1000


def test_with_a_policy_that_samples_keys_the_replay_has_about_the_same_hits(tmp_path: Path):
    found = again = 0
    for seed in range(8):
        path = tmp_path / f"{seed}.jsonl"
        found += sum(Served(*conversations(seed), policy="adaptive", recording=path).hits.values())
        again += sum(Served(*recreated(read_trace(path)), policy="adaptive").hits.values())
    assert again == pytest.approx(found, rel=0.02)


def test_no_token_key_salt_or_name_is_in_the_file(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    arrivals, draw = conversations(7)
    Served(arrivals, draw, recording=path)
    lines = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    ids = [number for line in lines for number in (*line["hash_ids"], *line.get("output_hash_ids", ()))]
    assert sorted(set(ids)) == list(range(max(ids) + 1))
    numbers = [value for line in lines for value in line.values() if isinstance(value, int)]
    assert max(*ids, *numbers) < 10_000 < FIRST_TOKEN
    known = {"timestamp", "input_length", "output_length", "hash_ids", "output_hash_ids", "block_size"}
    assert {name for line in lines for name in line} == known


def test_lengths_are_those_of_prompt_and_answer(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    arrivals, draw = conversations(3)
    served = Served(arrivals, draw, recording=path)
    for (_, request), row in zip(arrivals, read_trace(path), strict=True):
        answer = served.outputs[request.request_id]
        assert (row.input_tokens, row.output_tokens) == (len(request.prompt), len(answer))
        assert len(row.hash_ids) == len(request.prompt) // BLOCK
        assert len(row.output_hash_ids) == (row.input_tokens + row.output_tokens - 1) // BLOCK - len(row.hash_ids)


def test_an_aborted_request_is_recorded_with_what_it_generated(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=BLOCK) as recorder:
        manager = BlockManager(block_size=BLOCK, device_blocks=16, prefix_caching=True)
        scheduler = Scheduler(manager, recorder=recorder)
        for name in ("runs", "waits"):
            scheduler.add(Request(name, [1, 2, 3, 4, 5, 6], max_tokens=30, arrival=float(name == "waits")))
            for _ in range(3 * (name == "runs")):
                step = scheduler.schedule()
                scheduler.complete(step.decision.ticket)
                scheduler.update(step, np.full(step.num_draws, 9))
        for name in ("runs", "waits"):
            scheduler.abort(name)
    runs, waits = read_trace(path)
    assert (runs.output_tokens, list(runs.output_hash_ids)) == (3, [1])
    assert (waits.output_tokens, list(waits.hash_ids), list(waits.output_hash_ids)) == (1, [0], [])


def run_step(scheduler: Scheduler) -> None:
    step = scheduler.schedule()
    scheduler.complete(step.decision.ticket)
    scheduler.update(step, np.full(step.num_draws, 9))


def test_an_interrupted_call_that_is_not_made_again_neither_adds_nor_holds_back_a_line(tmp_path: Path):
    for place in itertools.count():
        path = tmp_path / f"{place}.jsonl"
        interrupt = CountedInterrupt(place, ("scheduler/scheduler.py", "traces/recorder.py", "/threading.py"))
        with TraceRecorder(path, block_size=BLOCK) as recorder:
            manager = BlockManager(block_size=BLOCK, device_blocks=16, prefix_caching=True)
            scheduler = Scheduler(manager, recorder=recorder)
            scheduler.add(Request("first", [1, 2, 3, 4, 5, 6], max_tokens=5))
            run_step(scheduler)
            for call in (
                partial(scheduler.add, Request("second", [1, 2, 3, 4, 5], max_tokens=2)),
                partial(scheduler.abort, "first"),
            ):
                with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
                    call()
            left = set(scheduler._requests)
            while scheduler.num_unfinished:
                run_step(scheduler)
            assert not recorder._order, f"interrupted at {interrupt.where}: requests are held back"
        rows = [(row.input_tokens, row.output_tokens) for row in read_trace(path)]
        was_added = interrupt.where == "" or "second" in left
        assert [tokens for tokens, _ in rows] == [6, 5][: 1 + was_added], f"interrupted at {interrupt.where}"
        assert rows[0][1] in ({1, 5} if "first" in left else {1}), f"interrupted at {interrupt.where}"
        if not interrupt.where:
            break
    assert place > 100


def test_an_abort_after_an_interrupted_step_is_recorded_with_what_was_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise KeyboardInterrupt

    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=BLOCK) as recorder:
        scheduler = Scheduler(BlockManager(block_size=BLOCK, device_blocks=16), recorder=recorder)
        scheduler.add(Request("a", [1, 2, 3, 4, 5, 6], max_tokens=30))
        for _ in range(3):
            run_step(scheduler)
        with monkeypatch.context() as patched:
            patched.setattr(scheduler._builder, "begin", fail)
            with pytest.raises(KeyboardInterrupt):
                scheduler.schedule()
        scheduler.abort("a")
    assert [row.output_tokens for row in read_trace(path)] == [3]


def test_blocks_of_other_images_have_other_numbers(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, block_size=BLOCK) as recorder:
        scheduler = Scheduler(BlockManager(block_size=BLOCK, device_blocks=64), recorder=recorder)
        for name, image in ("a", b"cat"), ("b", b"dog"), ("c", b"cat"):
            scheduler.add(Request(name, [1, 2, 3, 4, 5, 6], max_tokens=8, extras=[(5, 1, image)]))
        while scheduler.num_unfinished:
            run_step(scheduler)
    rows = [(row.hash_ids, row.output_hash_ids) for row in read_trace(path)]
    assert rows[0] == rows[2]
    assert rows[0][0] == rows[1][0]
    assert (len(rows[0][1]), len({*rows[0][1], *rows[1][1]})) == (2, 4)


def test_the_environment_makes_schedulers_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOCKYARD_RECORD", str(tmp_path / "trace.jsonl"))
    for seed in range(2):
        served = Served(*conversations(seed))
        recorder = served.scheduler._recording._recorder
        assert recorder is not None
        recorder.close()
    assert len(read_trace(tmp_path / "trace.jsonl")) == len(read_trace(tmp_path / "trace-2.jsonl")) == 60


def test_a_recorder_of_another_block_size_is_refused(tmp_path: Path):
    with (
        TraceRecorder(tmp_path / "trace.jsonl", block_size=16) as recorder,
        pytest.raises(InvalidArgumentError, match="recorder has block_size 16, must have 4"),
    ):
        Scheduler(BlockManager(block_size=BLOCK, device_blocks=8), recorder=recorder)
