"""Draft tokens: what a step computes of them, which are accepted, and what becomes of the others."""

import numpy as np
import pytest
from token_engine import BLOCK, Engine

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Request, Scheduler, Step
from blockyard.testing.machines.scheduler import draw_tokens, reference_tokens


def right_drafts(engine: Engine, requests: list[Request], step: Step, right: int) -> list[list[int]]:
    """For each decoding row its next tokens, all but the first `right` of them wrong."""
    by_name, drafts = {request.request_id: request for request in requests}, []
    for row, slots in enumerate((step.lengths[: step.decodes] - 1).tolist()):
        name, index = step.owner(row)
        done = int(step.start[row]) + 1 - len(by_name[name].prompt)
        tokens = reference_tokens(by_name[name])[index][done : done + slots]
        drafts.append([token if at < right else (token + 1) % 97 for at, token in enumerate(tokens)])
    return drafts


def run(engine: Engine, requests: list[Request], right: int) -> int:
    """Run requests to their ends, with so many right draft tokens a step; give the number of steps."""
    steps = 0
    while engine.scheduler.num_unfinished:
        step = engine.scheduler.schedule()
        step.set_draft_token_ids(right_drafts(engine, requests, step, right))
        engine.finish(step)
        steps += 1
    assert engine.done == {request.request_id: reference_tokens(request) for request in requests}
    return steps


def decoding(**options: object) -> tuple[Engine, Step]:
    """An engine whose one request is past its prompt of 6 tokens and has one token, and its next step."""
    engine = Engine(16, num_lookahead_tokens=3, **options)  # type: ignore[arg-type]
    engine.add("a", 6, 8)
    engine.step()
    return engine, engine.scheduler.schedule()


@pytest.mark.parametrize(("right", "steps"), [(0, 12), (1, 7), (2, 5), (3, 4)])
def test_each_accepted_draft_token_saves_a_pass(right: int, steps: int):
    engine = Engine(16, num_lookahead_tokens=3)
    request = engine.add("a", 6, 12)
    assert run(engine, [request], right) == steps
    stats = engine.scheduler.stats()
    assert stats.spec_decode_num_accepted_tokens == 12 - steps
    assert stats.spec_decode_num_drafts <= steps - 1
    assert stats.spec_decode_num_draft_tokens >= stats.spec_decode_num_accepted_tokens


def test_a_step_has_slots_for_draft_tokens_up_to_the_end_of_the_request():
    _, step = decoding()
    assert (step.lengths.tolist(), step.num_draws, step.start.tolist()) == ([4], 4, [6])
    assert step.slot_mapping.tolist() == [6, 7, 8, 9]
    assert [draw.position for draw in step.draws()] == [7, 8, 9, 10]
    assert step.logits_indices.tolist() == [0, 1, 2, 3]
    assert step.all_token_ids(0).tolist()[:6] == [97 % 97 + i for i in range(6)]
    last = Engine(16, num_lookahead_tokens=3)
    last.add("a", 6, 3)
    last.step()
    assert last.scheduler.schedule().lengths.tolist() == [2]


def test_slots_without_a_draft_token_are_dropped_from_the_step():
    engine, step = decoding()
    step.set_draft_token_ids([[5]])
    assert (step.token_ids.tolist()[1:], step.slot_mapping.tolist()) == ([5], [6, 7])
    assert (step.query_start_loc.tolist(), step.num_draws) == ([0, 2], 2)
    engine.finish(step)
    assert engine.manager.num_tokens(int(step.handles[0])) == 7


def test_draft_tokens_that_do_not_match_the_step_are_refused_and_change_nothing():
    engine, step = decoding()
    before = (step.token_ids.tolist(), step.slot_mapping.tolist())
    for drafts, message in (
        ([], "draft_token_ids has 0 lists, the step has 1 decodes"),
        ([[1, 2, 3, 4]], "draft_token_ids has 4 tokens for row 0, which has slots for 3"),
        ([[-1]], "draft_token_ids go from -1 to -1, must be from 0"),
        ([[0.5]], "draft_token_ids are float64, must be integers"),
        ([[[1]]], r"draft_token_ids have shape \[1, 1\], must be \[tokens\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            step.set_draft_token_ids(drafts)
    assert before == (step.token_ids.tolist(), step.slot_mapping.tolist())
    with pytest.raises(InvalidArgumentError, match=r"shape \[1\], do not match the step's 4 draws"):
        engine.scheduler.update(step, [1])


def test_a_model_that_runs_once_for_each_token_has_all_of_them_accepted():
    engine = Engine(16, num_lookahead_tokens=3)
    request, steps = engine.add("a", 6, 12), 0
    while engine.scheduler.num_unfinished:
        step = engine.scheduler.schedule()
        for done in range(int(step.lengths[0]) - 1 if step.decodes else 0):
            step.token_ids[done + 1] = draw_tokens(step, engine.memory)[done]
        engine.finish(step)
        steps += 1
    assert (steps, engine.done["a"]) == (4, reference_tokens(request))


def test_a_row_does_not_accept_the_tokens_of_the_next_row():
    scheduler = Scheduler(BlockManager(block_size=4, device_blocks=16), num_lookahead_tokens=1)
    for name in "ab":
        scheduler.add(Request(name, [1, 2, 3], 4))
    step = scheduler.schedule()
    scheduler.complete(step.decision.ticket)
    scheduler.update(step, [5, 6])
    step = scheduler.schedule()
    scheduler.complete(step.decision.ticket)
    step.set_draft_token_ids([[7], [8]])
    scheduler.update(step, [7, 6, 9, 4])  # what follows the first row's draft token is the second row's own token
    step = scheduler.schedule()
    assert [step.all_token_ids(row).tolist()[3:] for row in range(2)] == [[5, 7, 6], [6, 9]]


def test_what_follows_a_stop_token_is_dropped():
    engine = Engine(16, num_lookahead_tokens=3)
    drawn = reference_tokens(Request("a", list(range(5)), 12))[0]
    assert len(set(drawn[:4])) == 4
    request = engine.add("a", 5, 12, stop_token_ids=frozenset([drawn[2]]))
    run(engine, [request], right=3)
    assert engine.done["a"] == (drawn[:3],)


def test_rejected_slots_are_given_again_and_their_blocks_freed():
    engine, step = decoding()
    step.set_draft_token_ids([[(step.token_ids[0] + 1) % 97] * 3])
    assert engine.manager.pool().num_free == 13
    engine.finish(step)
    assert engine.manager.pool().num_free == 14
    assert engine.scheduler.schedule().slot_mapping.tolist()[0] == 7


@pytest.mark.parametrize("right", [0, 1, 3])
def test_the_prefix_cache_has_every_full_block_of_accepted_tokens(right: int):
    engine = Engine(32, num_lookahead_tokens=3, prefix_caching=True)
    requests = [engine.add("a", 6, 17), engine.add("b", 9, 11, n=2)]
    run(engine, requests, right)
    for request in requests:
        for tokens in reference_tokens(request):
            text = [*request.prompt, *tokens[:-1]]
            assert engine.manager.prefix.lookup([*text, 0]).tokens == len(text) // BLOCK * BLOCK


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("tiers", [(12, 0), (4, 12)])
def test_tokens_survive_preemption_between_draft_tokens(mode: str, tiers: tuple[int, int]):
    engine = Engine(10, *tiers, num_lookahead_tokens=3, preemption_mode=mode)
    requests = [engine.add(name, 7, 14) for name in "abcd"]
    run(engine, requests, right=1)
    stats = engine.scheduler.stats()
    assert (
        stats.preempted_swap_host + stats.preempted_swap_external if mode == "swap" else stats.preempted_recompute
    ) > 0
    assert stats.spec_decode_num_accepted_tokens > 0


def test_slots_for_draft_tokens_preempt_nobody():
    engine = Engine(4, num_lookahead_tokens=2)
    requests = [engine.add(name, 6, 5) for name in "ab"]
    engine.step()
    step = engine.scheduler.schedule()  # each could have slots for 2 draft tokens, in a third block
    assert (step.lengths.tolist(), engine.scheduler.stats().preempted_recompute) == ([1, 1], 0)
    engine.finish(step)
    engine.run(*requests)


def test_lookahead_that_cannot_be_is_refused():
    with pytest.raises(InvalidArgumentError, match="num_lookahead_tokens is -1, must be at least 0"):
        Scheduler(BlockManager(block_size=4, device_blocks=8), num_lookahead_tokens=-1)


def test_a_plain_step_says_where_the_logits_are():
    engine = Engine(16)
    engine.add("a", 6, 3, n=2)
    step = engine.scheduler.schedule()
    assert step.logits_indices.tolist() == [5, 5]
    assert np.array_equal(step.token_ids[step.logits_indices], [step.token_ids[5]] * 2)
    step.set_draft_token_ids([])
    engine.finish(step)
    assert engine.scheduler.schedule().logits_indices.tolist() == [0, 1]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_each_step_may_have_another_number_of_draft_tokens(prefix_caching: bool) -> None:
    """Tokens and blocks are those of a scheduler without draft tokens, which takes more steps."""
    outputs = []
    for lookahead in (0, 7):
        rng = np.random.default_rng(5)
        manager = BlockManager(block_size=4, device_blocks=24, watermark=0.0, prefix_caching=prefix_caching)
        scheduler = Scheduler(manager, num_lookahead_tokens=lookahead)
        for name in "abcd":
            prompt = rng.integers(0, 3, int(rng.integers(1, 20)))
            scheduler.add(Request(name, prompt, max_tokens=int(rng.integers(1, 16))))
        done = {}
        while scheduler.num_unfinished:
            step = scheduler.schedule(num_lookahead_tokens=int(rng.integers(0, lookahead + 1)))
            scheduler.complete(step.decision.ticket)
            assert lookahead or not step.num_draft_tokens
            for finished in scheduler.update(step, np.ones(step.num_draws, np.uint32)):
                done[finished.request.request_id] = finished.outputs
            manager.check()
        outputs.append(done)
        assert manager.stats().used_blocks["device"] == 0
        assert bool(lookahead) == (scheduler.stats().spec_decode_num_draft_tokens > 0)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("wanted", [-1, 4])
def test_draft_tokens_of_a_step_beyond_those_of_the_scheduler_are_refused(wanted: int) -> None:
    scheduler = Scheduler(BlockManager(block_size=4, device_blocks=8), num_lookahead_tokens=3)
    with pytest.raises(InvalidArgumentError, match=f"num_lookahead_tokens is {wanted}, must be from 0"):
        scheduler.schedule(num_lookahead_tokens=wanted)
