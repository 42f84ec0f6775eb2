"""The scheduler over a prefix cache: what is shared, and that every token stays right whatever happens on the way."""

import random

import numpy as np
import pytest
from token_engine import BLOCK, Engine, ran

from blockyard import Pairs
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Request, Step
from blockyard.testing.machines.scheduler import draw_token, reference_tokens
from blockyard.testing.machines.values import seen


def test_a_prompt_computes_only_what_earlier_ones_have_not():
    engine = Engine(32, prefix_caching=True)
    first = engine.add("a", 13, 3)
    engine.step()
    second = engine.add("a2", 13, 3)
    step = engine.scheduler.schedule()
    assert (ran(step), step.start.tolist(), step.lengths.tolist()) == (["a:0", "a2"], [13, 12], [1, 1])
    assert step.block_tables[0, :3].tolist() == step.block_tables[1, :3].tolist()
    engine.finish(step)
    assert engine.scheduler.stats().cached_tokens == 12
    engine.run(first, second)


def test_generated_tokens_are_found_by_a_prompt_that_goes_on_from_them():
    engine = Engine(32, prefix_caching=True)
    first = engine.add("a", 6, 6)
    engine.run(first)
    again = Request("b", [*first.prompt, *reference_tokens(first)[0], 5], 3)
    engine.scheduler.add(again)
    step = engine.scheduler.schedule()
    assert step.start.tolist() == [8], "11 tokens were computed: two whole blocks"
    engine.finish(step)
    engine.run(first, again)


def test_a_request_computed_again_finds_its_own_blocks_which_are_no_hits():
    engine = Engine(6, preemption_mode="recompute", prefix_caching=True)
    requests, found = [engine.add("a", 8, 8), engine.add("b", 8, 8)], []
    while engine.scheduler.num_unfinished:
        step = engine.scheduler.schedule()
        found += step.start[step.decodes :].tolist()
        engine.finish(step)
    engine.run(*requests)
    assert engine.scheduler.stats().preempted_recompute > 0
    assert max(found) > 0
    stats = engine.manager.stats()
    assert (engine.scheduler.stats().cached_tokens, stats.hit_tokens, stats.hit_rate) == (0, 0, 0)
    assert (stats.prompts, stats.missed_tokens) == (2, 16)


def test_sequences_of_one_request_computed_again_share_the_first_ones_blocks():
    engine = Engine(16, preemption_mode="recompute", prefix_caching=True)
    request = engine.add("a", 9, 6, n=3)
    for _ in range(3):
        engine.step()
    engine.scheduler._preempt(engine.scheduler._rows.worst())
    engine.manager.prefix.reset()
    starts = []
    for count in (1, 2, 3):
        step = engine.scheduler.schedule()
        assert step.rows == count, "one after the other, each once the last is computed"
        starts += step.start[step.decodes :].tolist()
        engine.finish(step)
    assert starts == [0, 2 * BLOCK, 2 * BLOCK]
    engine.run(request)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("extra", [(5, 2), (6, 3), (9, 2)], ids=["in the prompt", "after it", "in a later block"])
def test_an_image_in_a_block_that_the_answer_fills_keeps_it_from_other_images(extra: tuple[int, int], n: int):
    engine = Engine(64, prefix_caching=True)
    cat = engine.add("a", 6, 8, n=n, extras=[(*extra, b"cat")])
    engine.run(cat)
    prompt, apart = [*cat.prompt, *reference_tokens(cat)[0][:7], 5], extra[0] // BLOCK * BLOCK
    for name, extras, hit in (("b", [(*extra, b"dog")], apart), ("c", [], apart), ("d", cat.extras, 12)):
        engine.requests[name] = Request(name, prompt, 3, extras=extras)
        engine.scheduler.add(engine.requests[name])
        step = engine.scheduler.schedule()
        assert step.start.tolist()[-1] == hit
        engine.finish(step)
    engine.run(*engine.requests.values())


def test_requests_with_other_images_stay_apart_when_they_are_computed_again():
    engine = Engine(9, preemption_mode="recompute", prefix_caching=True)
    requests = [engine.add(f"a{i}", 6, 9, extras=[(5, 2, (b"cat", b"dog")[i % 2])]) for i in range(5)]
    engine.run(*requests)
    stats = engine.scheduler.stats()
    assert stats.preempted_recompute > 0
    assert stats.cached_tokens > 0


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ([(3, 6, b"x")], r"extras\[0\] covers 6 tokens from 3 on, must cover at least 1 and end at 8 or before"),
        ([(0, 1, b"x"), (7, 0, b"x")], r"extras\[1\] covers 0 tokens from 7 on"),
        ([(-1, 2, b"x")], r"extras\[0\] covers 2 tokens from -1 on"),
        ([(0, 1)], r"extras\[0\] is \(0, 1\), must be \(start, length, digest\)"),
        ([(0, 1, "x")], r"extras\[0\] is \(0, 1, 'x'\), must be \(start, length, digest\) with bytes"),
        ([(0.0, 1, b"x")], r"extras\[0\]\[0\] is 0.0, must be an int"),
        (b"image", r"extras b'image', must be a list of \(start, length, digest\)"),
        (None, "extras None, must be a list"),
    ],
)
def test_extras_that_no_token_of_the_request_can_have_are_refused(extras: object, message: str):
    engine = Engine(8, prefix_caching=True)
    with pytest.raises(InvalidArgumentError, match=f"request 'a'.*{message}"):
        engine.add("a", 5, 3, extras=extras)
    assert engine.scheduler.num_unfinished == 0


def test_a_request_keeps_its_extras_as_they_were_added():
    engine = Engine(8, prefix_caching=True)
    extras, digest = [(np.int64(5), np.uint8(3), bytearray(b"cat"))], b"cat"
    request = engine.add("a", 6, 3, extras=extras)
    (state,) = engine.scheduler._requests.values()
    extras[0][2][:] = b"dog"
    assert state.extras == ((5, 3, digest),)
    assert [type(value) for value in state.extras[0]] == [int, int, bytes]
    assert request.extras is extras


@pytest.mark.parametrize("other", [{"salt": b"tenant"}, {"lora_id": 7}])
def test_tenants_and_adapters_share_nothing_but_a_step(other: dict[str, object]):
    engine = Engine(32, prefix_caching=True)
    requests = [engine.add("a", 13, 3)]
    engine.step()
    requests += [engine.add("a1", 13, 3, **other), engine.add("a2", 13, 3), engine.add("a3", 13, 3, **other)]
    step = engine.scheduler.schedule()
    assert (ran(step), step.start.tolist()) == (["a:0", "a1", "a2", "a3"], [13, 0, 12, 0])
    engine.finish(step)
    late = engine.add("a4", 13, 3, **other)
    step = engine.scheduler.schedule()
    assert step.start.tolist()[-1] == 12
    engine.finish(step)
    engine.run(*requests, late)


@pytest.mark.parametrize("other", [{"salt": b"tenant"}, {"lora_id": 7}])
def test_a_prompt_that_waits_for_room_is_still_its_tenants_and_its_adapters(other: dict[str, object]):
    engine = Engine(5, prefix_caching=True)
    requests = [engine.add("a", 12, 3)]
    engine.step()
    requests.append(engine.add("a1", 12, 3, **other))
    assert engine.step() == ["a:0"], "it would fit if it shared the other's blocks"
    engine.run(*requests)
    assert engine.scheduler.stats().cached_tokens == 0


def test_a_prompt_whose_blocks_are_cached_and_in_use_is_admitted_where_a_new_one_does_not_fit():
    engine = Engine(8, prefix_caching=True)
    first = engine.add("a", 21, 4)
    engine.step()
    engine.add("b", 21, 4, arrival=1.0)
    assert engine.step() == ["a:0"]
    engine.scheduler.abort("b")
    fits = engine.add("a2", 21, 2, arrival=2.0)
    assert engine.step() == ["a:0", "a2"]
    engine.run(first, fits)


def cached_and_being_written(name: str) -> tuple[Engine, int]:
    """Eight blocks: two of a finished request are cached, and a write to a prefix store reads them. Returns its job."""
    engine = Engine(8, prefix_caching=True)
    store_jobs = engine.manager.prefix.store_jobs
    store_jobs.start("through")
    engine.run(engine.add(name, 9, 1))
    job = store_jobs.begin_write(2)
    assert len(job) == 2
    return engine, job.job


def test_a_prompt_does_not_count_the_blocks_that_it_finds_as_room_for_its_others():
    engine, job = cached_and_being_written("a")
    other = engine.add("b", 23, 2)
    assert engine.step() == ["b"]
    found = engine.add("a2", 14, 1)
    assert engine.step() == ["b:0"], "two blocks are missing, and all but those that it finds are in use"
    assert engine.step() == ["a2"]
    assert engine.manager.prefix.store_jobs.end_write(job)
    engine.done.pop("a")
    engine.run(other, found)
    assert engine.scheduler.stats().cached_tokens == 2 * BLOCK


def test_a_prompt_takes_the_blocks_that_only_a_write_holds_if_free_ones_are_too_few():
    engine, job = cached_and_being_written("a")
    engine.add("b", 29, 1)
    assert engine.step() == ["b"]
    assert not engine.manager.prefix.store_jobs.end_write(job), "its blocks were taken"


@pytest.mark.parametrize("prompt", [[-1], [2**32 - 1], [0.5], [[1, 2]]])
def test_prompts_that_are_no_token_ids_are_refused(prompt: list[object]):
    engine = Engine(8)
    with pytest.raises(InvalidArgumentError, match="the prompt of request 'a'"):
        engine.scheduler.add(Request("a", prompt, 1))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="stop_token_ids go from -1 to 3"):
        engine.scheduler.add(Request("a", [1], 1, stop_token_ids=frozenset({-1, 3})))
    assert engine.scheduler.num_unfinished == 0


class Crowd:
    """Requests of few families over three tiers, all too small, with aborts, losses and a device that shrinks."""

    def __init__(self, seed: int, *, prefix_caching: bool, mode: str) -> None:
        self.random = random.Random(seed)
        self.engine = Engine(
            40,
            self.random.choice([0, 6]),
            self.random.choice([0, 12]),
            prefix_caching=prefix_caching,
            preemption_mode=mode,
            overlap_io=self.random.random() < 0.5,
            max_num_seqs=8,
            max_num_batched_tokens=self.random.choice([5, 24, 200]),
        )
        prefixes = [[self.random.randrange(97) for _ in range(20)] for _ in range(3)]
        self.requests = [self.request(f"r{i}", self.random.choice(prefixes)) for i in range(30)]
        self.gone: set[str] = set()

    def request(self, name: str, prefix: list[int]) -> Request:
        draw = self.random
        prompt = prefix[: draw.randrange(21)] + [draw.randrange(97) for _ in range(draw.randint(1, 12))]
        stops = frozenset(draw.sample(range(97), draw.choice([0, 0, 3])))
        salt, n = draw.choice([None, None, b"x"]), draw.choice([1, 1, 3])
        return Request(name, prompt, draw.randint(1, 16), n, draw.randrange(2), 0.0, stops, salt)

    def step(self) -> None:
        engine, draw = self.engine, self.random
        if draw.random() < 0.05:
            engine.manager.defrag.resize(draw.randint(24, 40))
        step = engine.scheduler.schedule()
        if draw.random() < 0.05:
            self.abort()
        lost = [pairs for pairs in self.external(step) if draw.random() < 0.2]
        engine.finish(step, lost)

    def external(self, step: Step) -> list[Pairs]:
        return [pairs for _, pairs in step.decision.transfers() if "external" in (pairs.src, pairs.dst)]

    def abort(self) -> None:
        live = [r.request_id for r in self.requests if r.request_id in self.engine.scheduler._requests]
        if live:
            name = self.random.choice(live)
            self.engine.scheduler.abort(name)
            self.gone.add(name)

    def run(self) -> None:
        waiting = list(self.requests)
        for _ in range(3000):
            while waiting and self.random.random() < 0.5:
                request = waiting.pop()
                self.engine.scheduler.add(request)
                self.engine.requests[request.request_id] = request
            self.step()
            if not waiting and not self.engine.scheduler.num_unfinished:
                break
        expected = {r.request_id: reference_tokens(r) for r in self.requests if r.request_id not in self.gone}
        assert self.engine.done == expected
        stats = self.engine.manager.stats()
        assert stats.sequences == 0
        if self.engine.manager.prefix.enabled:
            # Each request counts once, whatever it lost: no prompt is cut, so each has all of its tokens looked up.
            assert stats.hit_tokens == self.engine.scheduler.stats().cached_tokens
            assert stats.prompts <= len(self.requests)
            assert stats.hit_tokens + stats.missed_tokens <= sum(len(request.prompt) for request in self.requests)
        assert self.engine.scheduler._rows.seats_left == 8


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_every_token_is_right_whatever_is_lost_aborted_moved_or_shared(prefix_caching: bool, mode: str):
    cached = away = 0
    for seed in range(8):
        crowd = Crowd(seed, prefix_caching=prefix_caching, mode=mode)
        crowd.run()
        stats = crowd.engine.scheduler.stats()
        cached += stats.cached_tokens
        away += stats.preempted_swap_host + stats.preempted_swap_external + stats.preempted_recompute
    assert (cached > 0) == prefix_caching
    assert away > 0


def test_draws_name_each_sequence_that_gets_a_token():
    engine = Engine(32)
    requests = [engine.add("a", 5, 3, n=3), engine.add("b", 3, 3), engine.add("c", 4, 2, n=2)]
    step = engine.scheduler.schedule()
    assert (step.samples, step.extra_rows.tolist(), step.num_draws) == (3, [0, 0, 2], 6)
    assert [tuple(draw) for draw in step.draws()] == [
        (0, "a", 0, 5),
        (1, "b", 0, 3),
        (2, "c", 0, 4),
        (0, "a", 1, 5),
        (0, "a", 2, 5),
        (2, "c", 1, 4),
    ]
    assert draw_token(seen(requests[0], list(requests[0].prompt)), 1) == reference_tokens(requests[0])[1][0]
    engine.finish(step)
    engine.run(*requests)
