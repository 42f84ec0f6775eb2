"""The reference scheduler's policy, one rule at a time, over simulated memory."""

import re
import tracemalloc
from typing import Any

import pytest
from token_engine import BLOCK, Engine, draw_tokens

from blockyard import BlockManager, Pairs
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, StepOrderError
from blockyard.scheduler import PreemptionCosts, Request, Scheduler, Step
from blockyard.testing.machines.scheduler import reference_tokens

# ---- who runs ----


def test_requests_run_first_come_first_served_within_a_priority():
    engine = Engine(32)
    requests = [
        engine.add("late", 4, 2, arrival=2.0),
        engine.add("early", 4, 2, arrival=1.0),
        engine.add("urgent", 4, 2, priority=-1, arrival=3.0),
        engine.add("same", 4, 2, arrival=1.0),
    ]
    assert engine.step() == ["urgent", "early", "same", "late"]
    engine.run(*requests)


def test_a_prompt_that_does_not_fit_holds_up_those_behind_it():
    engine = Engine(6)
    requests = [engine.add("a", 12, 4), engine.add("b", 16, 4), engine.add("c", 2, 4)]
    assert engine.step() == ["a"]
    assert engine.step() == ["a:0"]
    engine.run(*requests)


def test_admission_keeps_the_watermark():
    engine = Engine(10, watermark=0.2)
    requests = [engine.add("a", 20, 2), engine.add("b", 13, 2)]
    assert engine.step() == ["a"]
    engine.run(*requests)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_prompts_are_computed_in_chunks_beside_decodes_within_the_tokens_of_a_step(prefix_caching: bool):
    engine = Engine(64, max_num_batched_tokens=10, prefix_caching=prefix_caching)
    requests = [engine.add("a", 30, 3), engine.add("b", 6, 2), engine.add("c", 4, 2), engine.add("d", 1, 2)]
    assert [engine.step() for _ in range(3)] == [["a"]] * 3
    assert engine.step() == ["a:0", "b", "c"]
    assert engine.step() == ["a:0", "b:0", "c", "d"]
    engine.run(*requests)


def test_what_decodes_is_never_held_up_by_the_tokens_of_a_step():
    engine = Engine(64, max_num_batched_tokens=4)
    requests = [engine.add(name, 1, 9) for name in "abcdef"]
    assert engine.step() == ["a", "b", "c", "d"]
    assert engine.step() == ["a:0", "b:0", "c:0", "d:0"], "which leave no token to a prompt"
    engine.run(*requests)


def test_a_prompt_that_is_not_through_keeps_new_ones_waiting_and_the_blocks_that_it_is_yet_to_take():
    engine = Engine(9, max_num_batched_tokens=8)
    requests = [engine.add("a", 24, 2), engine.add("b", 6, 2, arrival=1.0)]
    assert [engine.step() for _ in range(3)] == [["a"]] * 3
    assert engine.step() == ["a:0", "b"]
    engine.run(*requests)
    assert engine.scheduler.stats().preempted_recompute == 0


def test_a_step_never_has_more_sequences_than_there_are_seats():
    engine = Engine(64, max_num_seqs=4)
    requests = [engine.add(name, 5, 4, n=3) for name in "abc"] + [engine.add("d", 3, 9)]
    for _ in range(30):
        assert len(engine.step()) <= 4
    engine.run(*requests)


def test_parallel_samples_share_their_prompt_and_copy_on_write():
    engine = Engine(16)
    request = engine.add("a", 6, 4, n=3)
    assert engine.step() == ["a"]
    assert engine.manager.pool("device").num_free == 14
    assert engine.step() == ["a:0", "a:1", "a:2"]
    assert engine.kinds[-1] == ["copy"]
    assert engine.manager.pool("device").num_free == 12
    engine.run(request)


def test_a_stop_token_ends_a_sequence_and_frees_its_blocks():
    engine = Engine(16)
    stop = reference_tokens(Request("a", [(ord("a") + i) % 97 for i in range(5)], 9))[0][2]
    request = engine.add("a", 5, 9, stop_token_ids=frozenset({stop}))
    engine.run(request)
    assert engine.done["a"][0][-1] == stop


# ---- who leaves ----


def test_a_stop_token_holds_until_the_last_request_that_has_it_is_gone():
    engine = Engine(64)
    tokens = {name: reference_tokens(Request(name, [(ord(name) + i) % 97 for i in range(5)], 9))[0] for name in "abc"}
    stops = {"a": {tokens["a"][1]}, "b": {tokens["b"][4], tokens["a"][1]}, "c": {tokens["b"][4]}}
    stops |= {"d": stops["b"], "e": set()}
    requests = [engine.add(name, 5, 9, stop_token_ids=frozenset(stop)) for name, stop in stops.items()]
    engine.scheduler.abort("d")
    engine.run(*requests[:3], requests[4])
    assert {name: len(engine.done[name][0]) for name in "abe"} == {"a": 2, "b": 5, "e": 9}


def test_victims_leave_from_the_tail():
    engine = Engine(6, 8, preemption_mode="swap")
    requests = [engine.add(name, 8, 8, arrival=float(i)) for i, name in enumerate("abc")]
    assert engine.step() == ["a", "b", "c"]
    assert engine.step() == ["a:0", "b:0"]
    assert engine.scheduler.num_swapped == 1
    engine.run(*requests)


@pytest.mark.parametrize(
    ("mode", "n", "expected"),
    [
        ("swap", 1, "swap"),
        ("recompute", 1, "recompute"),
        ("auto", 1, "recompute"),
        ("auto", 2, "swap"),
        ("recompute", 2, "recompute"),
        (PreemptionCosts(swap_block=2.0, prefill_token=1.0), 1, "swap"),
        (PreemptionCosts(swap_block=4.1, prefill_token=1.0), 1, "recompute"),
        (PreemptionCosts(swap_block=4.1, prefill_token=1.0), 2, "recompute"),
    ],
)
def test_the_preemption_mode_decides_how_a_victim_leaves(mode: str | PreemptionCosts, n: int, expected: str):
    engine = Engine(6, 16, preemption_mode=mode)
    requests = [engine.add("a", 8, 8), engine.add("b", 6, 6, n=n)]
    engine.run(*requests)
    stats = engine.scheduler.stats()
    counts = {"swap": stats.preempted_swap_host, "recompute": stats.preempted_recompute}
    assert counts[expected] > 0
    assert sum(counts.values()) == counts[expected]
    assert stats.preempted_swap_external == 0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_seconds_are_refused(value: float):
    with pytest.raises(InvalidArgumentError, match=f"swap_block is {value}, must be at least 0 seconds"):
        PreemptionCosts(swap_block=value, prefill_token=1.0)


def test_a_full_host_swaps_out_to_the_external_tier_and_a_full_external_tier_recomputes():
    engine = Engine(14, 2, 2, preemption_mode="swap")
    requests = [engine.add(name, 8, 8) for name in "abcdefg"]
    engine.step()
    engine.step()
    stats = engine.scheduler.stats()
    assert engine.kinds[-1] == ["swap_out", "swap_out"]
    assert (stats.preempted_swap_host, stats.preempted_swap_external, stats.preempted_recompute) == (1, 1, 1)
    assert engine.manager.stats().swapped_out_blocks == {"host": 2, "external": 2}
    engine.run(*requests)
    stats = engine.scheduler.stats()
    assert stats.resumed_swap_host == stats.preempted_swap_host
    assert stats.resumed_swap_external == stats.preempted_swap_external


def test_without_a_host_victims_go_to_the_external_tier():
    engine = Engine(6, 0, 16, preemption_mode="swap")
    requests = [engine.add(name, 8, 8) for name in "abc"]
    engine.run(*requests)
    assert engine.scheduler.stats().preempted_swap_external > 0
    assert engine.scheduler.stats().preempted_recompute == 0


def test_swapped_requests_come_back_before_new_prompts_start():
    engine = Engine(6, 16, preemption_mode="swap")
    requests = [engine.add("a", 8, 8, priority=0), engine.add("b", 8, 8, priority=0), engine.add("c", 8, 8, priority=0)]
    engine.step()
    engine.step()
    requests.append(engine.add("d", 2, 2, priority=0))
    while "c" not in engine.done:
        swapped = engine.scheduler.num_swapped
        ran = engine.step()
        assert not (swapped and engine.scheduler.num_swapped and "d" in ran)
    engine.run(*requests)


def test_nothing_is_swapped_in_in_a_step_that_preempts():
    engine = Engine(11, 40, 40, preemption_mode="swap")
    requests = [engine.add(name, 3 + i, 14, n=1 + i % 2) for i, name in enumerate("abcdef")]
    engine.run(*requests)
    assert any("swap_out" in kinds for kinds in engine.kinds)
    for kinds in engine.kinds:
        assert not {"swap_out", "swap_in"} <= set(kinds)


def test_a_recomputed_group_shares_only_its_common_full_blocks():
    engine = Engine(16, preemption_mode="recompute")
    request = engine.add("a", 6, 8, n=2)
    for _ in range(5):
        engine.step()
    engine.scheduler._preempt(engine.scheduler._rows.worst())
    assert engine.manager.pool("device").num_free == 16
    assert engine.step() == ["a"], "the first alone: the second shares its blocks once they are computed"
    step = engine.scheduler.schedule()
    assert [step.owner(row) for row in range(2)] == [("a", 0), ("a", 1)]
    assert (step.decodes, step.start.tolist(), step.lengths.tolist()) == (1, [11, BLOCK], [1, 11 - BLOCK])
    assert [draw.sequence for draw in step.draws()] == [0, 1]
    assert engine.manager.block_table(int(step.handles[0]))[0] == engine.manager.block_table(int(step.handles[1]))[0]
    tables = step.block_tables[:, :3].tolist()
    assert tables[0][0] == tables[1][0]
    assert not set(tables[0][1:]) & set(tables[1][1:])
    engine.finish(step)
    engine.run(request)


def test_a_swapped_group_whose_return_needs_every_block_comes_back():
    engine = Engine(3, 8)
    requests = [engine.add("b", 1, 3), engine.add("a", 6, 2, n=2, priority=1)]
    engine.run(*requests)
    assert engine.scheduler.stats().preempted_swap_host == 1


def test_a_request_that_comes_back_goes_before_the_chunk_of_a_prompt():
    engine = Engine(8, 12, preemption_mode="swap", max_num_batched_tokens=3)
    requests = [engine.add("b", 6, 11, priority=1)]
    engine.step()
    for request in (("a", 2, 8), ("c", 14, 2)):
        requests.append(engine.add(*request))
        engine.step()
        engine.step()
    while engine.scheduler.stats().resumed_swap_host == 0:
        ran = engine.step()
    assert ran == ["b:0", "c"]
    engine.run(*requests)


# ---- aborts ----


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_aborted_request_leaves_no_block_behind(steps: int):
    engine = Engine(4, 8, preemption_mode="swap")
    requests = [engine.add("a", 6, 6, n=1), engine.add("b", 6, 6)]
    for _ in range(steps):
        engine.step()
    engine.scheduler.abort("b")
    engine.run(requests[0])
    with pytest.raises(InvalidArgumentError, match="'b' is not in the scheduler"):
        engine.scheduler.abort("b")


@pytest.mark.parametrize("when", ["before the transfers", "after the transfers"])
def test_a_request_aborted_and_resubmitted_in_one_step_is_a_new_request(when: str):
    engine = Engine(8)
    engine.add("a", 6, 6, n=2)
    other = engine.add("b", 5, 6)
    engine.step()
    step = engine.scheduler.schedule()
    if when == "after the transfers":
        engine.memory.execute(step.decision)
    engine.scheduler.abort("a")
    again = Request("a", [7, 8, 9], 3)
    engine.scheduler.add(again)
    engine.finish(step)
    engine.run(again, other)


def test_an_id_in_use_is_refused():
    engine = Engine(8)
    request = engine.add("a", 6, 6)
    with pytest.raises(InvalidArgumentError, match="'a' is already in the scheduler"):
        engine.add("a", 1, 1)
    engine.run(request)


# ---- what is refused ----


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = Engine(4, 8, watermark=0.25)
    for prompt, max_tokens, n, wanted in ((13, 1, 1, 4), (5, 9, 1, 4), (5, 4, 2, 5)):
        with pytest.raises(OutOfBlocksError, match=f"needs up to {wanted} device blocks and 1 kept free") as caught:
            engine.add("a", prompt, max_tokens, n=n)
        error = caught.value
        assert (error.tier, error.wanted, error.free, error.total) == ("device", wanted, 3, 4)
    engine.run(engine.add("a", 5, 3, n=2))


@pytest.mark.parametrize(("prompt", "max_tokens", "n"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 5)])
def test_a_malformed_request_is_refused(prompt: int, max_tokens: int, n: int):
    engine = Engine(64, max_num_seqs=4)
    with pytest.raises(InvalidArgumentError, match="request 'a'"):
        engine.add("a", prompt, max_tokens, n=n)
    assert engine.scheduler.num_unfinished == 0


MALFORMED: list[dict[str, object]] = [
    {"salt": "tenant"},
    {"salt": 7},
    {"lora_id": -1},
    {"lora_id": 1 << 64},
    {"lora_id": None},
    {"n": 1.0},
    {"n": 1 << 40},
    {"max_tokens": 4.0},
    {"stop_token_ids": frozenset({5.0})},
    {"stop_token_ids": 5},
]


@pytest.mark.parametrize("fields", MALFORMED, ids=str)
def test_a_malformed_field_is_refused_by_name_and_disturbs_no_other_request(fields: dict[str, object]):
    engine = Engine(64, max_num_seqs=4, prefix_caching=True)
    other = engine.add("b", 5, 3)
    engine.step()
    ((name, value),) = fields.items()
    with pytest.raises(
        InvalidArgumentError, match=rf"request 'a'.*( {name} .*{re.escape(repr(value))}|max_num_seqs is 4)"
    ):
        engine.scheduler.add(Request("a", [1, 2, 3], **{"max_tokens": 4, **fields}))  # type: ignore[arg-type]
    assert engine.step() == ["b:0"]  # it did not start again
    engine.run(other)


@pytest.mark.parametrize(
    "fields", [{"priority": 0.5}, {"priority": 1 << 63}, {"arrival": "now"}, {"arrival": float("nan")}]
)
def test_a_priority_or_arrival_that_is_no_number_is_refused(fields: dict[str, object]):
    engine = Engine(8)
    with pytest.raises(InvalidArgumentError, match=f"'a' has priority.*{next(iter(fields.values()))}"):
        engine.add("a", 4, 4, **fields)
    assert engine.scheduler.num_unfinished == 0


@pytest.mark.parametrize("wanted", [1.5, "1", -1, 3])
def test_a_malformed_lookahead_disturbs_no_request(wanted: Any):
    engine = Engine(8, num_lookahead_tokens=2)
    request = engine.add("a", 4, 8)
    engine.step()
    with pytest.raises(InvalidArgumentError, match=f"num_lookahead_tokens is {wanted!r}"):
        engine.scheduler.schedule(num_lookahead_tokens=wanted)
    assert engine.step() == ["a:0"]  # it did not start again
    engine.run(request)


def test_bad_limits_are_refused():
    manager = BlockManager(block_size=4, device_blocks=4)
    wrong: list[dict[str, Any]] = [{"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"preemption_mode": "drop"}]
    wrong += [{name: 2.0} for name in ("max_num_seqs", "max_num_batched_tokens", "num_lookahead_tokens")]
    for options in wrong:
        with pytest.raises(InvalidArgumentError):
            Scheduler(manager, **options)


def test_tokens_that_do_not_match_the_batch_are_refused_and_change_nothing():
    engine = Engine(8)
    request = engine.add("a", 4, 2, n=2)
    step = engine.scheduler.schedule()
    engine.memory.execute(step.decision)
    for wrong, shown in (
        ([], "do not match the step's 2 draws"),
        ([1], "do not match"),
        ([[1, 2]], "do not match"),
        ([1, -1], "go from -1 to 1"),
        ([1, 2**32 - 1], "must be from 0 to 4294967294"),
        ([1.0, 2.0], "float64, must be integers"),
    ):
        with pytest.raises(InvalidArgumentError, match=shown):
            engine.scheduler.update(step, wrong)
    engine.finish(step)
    engine.run(request)


# ---- losses and counters ----


def test_a_request_that_lost_pairs_starts_again_from_its_tokens():
    engine = Engine(6, 0, 16, preemption_mode="swap")
    requests = [engine.add(name, 8, 8) for name in "abc"]
    while engine.scheduler.stats().lost < 2:
        step = engine.scheduler.schedule()
        lost = [Pairs(p.src, p.dst, p.ids[:1]) for p in (*step.decision.swap_in, *step.decision.swap_out)]
        engine.finish(step, lost if engine.scheduler.stats().steps < 40 else [])
    engine.run(*requests)


def test_tokens_are_refused_until_the_loads_that_they_were_computed_with_have_ended():
    engine = Engine(8, 8, preemption_mode="swap")
    requests = [engine.add(name, 12, 12) for name in "ab"]
    while not (step := engine.scheduler.schedule()).decision.swap_in:
        engine.finish(step)
    lost = list(step.decision.swap_in)
    for _ in range(2):
        with pytest.raises(StepOrderError, match=r"ticket \d+ loads blocks .*: call complete before update"):
            engine.scheduler.update(step, [99] * step.num_draws)
        engine.manager.check()
    engine.finish(step, lost)
    assert engine.scheduler.stats().lost == 1
    engine.run(*requests)


def test_tokens_are_taken_while_blocks_still_leave_the_device():
    engine = Engine(8, 8, preemption_mode="swap")
    requests = [engine.add(name, 12, 12) for name in "ab"]
    while not (step := engine.scheduler.schedule()).decision.swap_out:
        engine.finish(step)
    engine.memory.execute(step.decision)
    tokens = draw_tokens(step, engine.memory, requests=engine.requests)
    assert step.rows
    assert engine.scheduler.update(step, tokens) == []
    engine.scheduler.complete(step.decision.ticket)
    engine.run(*requests)


def test_counters_say_what_happened():
    engine = Engine(8, 4, preemption_mode="swap")
    requests = [engine.add("a", 8, 12), engine.add("b", 8, 12)]
    engine.run(*requests)
    stats = engine.scheduler.stats()
    assert stats.steps == len(engine.kinds)
    assert stats.tokens == sum(len(request.prompt) + request.max_tokens - 1 for request in requests)
    assert (stats.preempted_swap_host, stats.resumed_swap_host, stats.lost) == (1, 1, 0)
    assert (stats.peak_device_blocks, stats.peak_external_blocks) == (8, 0)
    assert 2 <= stats.peak_host_blocks <= 4


# ---- what comes from the external tier joins when it is back ----


def overlapped(**options: object) -> Engine:
    """An engine in which request `b` is in the external tier, and `a` is about to end."""
    engine = Engine(4, external=8, preemption_mode="swap", overlap_io=True, **options)
    engine.add("a", 6, 6)
    engine.add("b", 6, 6)
    while not engine.scheduler.num_swapped:
        engine.step()
    while "a" not in engine.done:
        engine.step()
    return engine


def test_a_returning_request_is_in_no_step_before_its_ticket_has_ended():
    engine = overlapped()
    step = engine.scheduler.schedule()
    assert [kind for kind, _ in step.decision.transfers()] == ["swap_in"]
    assert step.rows == 0
    assert engine.scheduler.num_unfinished == 1
    other = engine.scheduler.schedule()
    assert other.rows == 0
    assert len(other.decision) == 0
    engine.scheduler.complete(other.decision.ticket)
    engine.memory.execute(step.decision)
    assert engine.scheduler.complete(step.decision.ticket) == []
    assert engine.step() == ["b:0"]


def test_others_run_while_a_request_returns():
    engine = overlapped()
    swap_in = engine.scheduler.schedule()
    new = engine.add("c", 3, 2)
    assert engine.step() == ["c"]
    engine.memory.execute(swap_in.decision)
    engine.scheduler.complete(swap_in.decision.ticket)
    assert sorted(engine.step()) == ["b:0", "c:0"]
    while engine.scheduler.num_unfinished:
        engine.step()
    assert engine.done["c"] == reference_tokens(new)
    assert engine.done["b"] == reference_tokens(Request("b", [(ord("b") + i) % 97 for i in range(6)], 6))


def test_a_sequence_computed_again_computes_a_token_even_if_another_has_all_of_its_tokens():
    manager = BlockManager(block_size=4, device_blocks=6, watermark=0.0)
    scheduler = Scheduler(manager, preemption_mode="recompute")
    for name, (prompt, tokens, n) in enumerate([(5, 9, 1), (5, 3, 2), (7, 5, 2)]):
        scheduler.add(Request(str(name), [name + 1] * prompt, tokens, n=n))
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        assert (step.lengths > 0).all()
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [7] * step.num_draws)  # sequences of a request draw the same
    assert scheduler.stats().preempted_recompute > 0
    assert scheduler.stats().cached_tokens == 0
    manager.check()


def test_a_step_that_preempts_brings_nobody_back():
    engine = Engine(11, 8, preemption_mode="swap")
    requests = [engine.add(*sizes) for sizes in (("a", 12, 16), ("b", 11, 12), ("c", 4, 7), ("d", 5, 14))]
    preempted = 0
    while engine.scheduler.num_unfinished:
        engine.step()
        stats, before = engine.scheduler.stats(), preempted
        preempted = stats.preempted_swap_host + stats.preempted_recompute
        assert preempted == before or "swap_in" not in engine.kinds[-1]
    assert preempted > 1
    assert engine.done == {request.request_id: reference_tokens(request) for request in requests}


def test_tokens_stay_with_their_requests_when_longer_ones_join():
    engine = Engine(400)
    requests = [engine.add("a", 6, 30), engine.add("b", 6, 20)]
    for name, length in (("c", 300), ("d", 700)):
        engine.step()
        requests.append(engine.add(name, 6, length))
    while engine.scheduler.num_unfinished:
        engine.step()
    assert engine.done == {request.request_id: reference_tokens(request) for request in requests}


def test_no_step_brings_requests_back_from_the_host_and_from_the_external_tier():
    """The one is computed in that step, the other's ticket ends late."""
    engine = Engine(8, 3, 60, preemption_mode="swap", overlap_io=True)
    requests = [engine.add("a", 5, 9), engine.add("b", 11, 17), engine.add("c", 10, 16)]
    tiers = set()
    while engine.scheduler.num_unfinished:
        step = engine.scheduler.schedule()
        sources = {pairs.src for kind, pairs in step.decision.transfers() if kind == "swap_in"}
        assert len(sources) < 2
        tiers |= sources
        engine.finish(step)
    assert tiers == {"host", "external"}
    assert engine.done == {request.request_id: reference_tokens(request) for request in requests}


def test_requests_whose_tickets_end_between_the_same_two_steps_all_return():
    engine = Engine(14, external=60, preemption_mode="swap", overlap_io=True)
    requests = [engine.add(*sizes) for sizes in (("a", 7, 19), ("b", 2, 24), ("c", 8, 21), ("d", 8, 15))]
    held: list[Step] = []
    while len(held) < 2:
        step = engine.scheduler.schedule()
        if "swap_in" in [kind for kind, _ in step.decision.transfers()]:
            held.append(step)
            engine.scheduler.update(step, draw_tokens(step, engine.memory))
        else:
            engine.finish(step)
    for step in held:
        engine.memory.execute(step.decision)
        engine.scheduler.complete(step.decision.ticket)
    engine.run(*requests)


def test_a_request_whose_swap_in_is_lost_starts_again():
    engine = overlapped()
    swap_in = engine.scheduler.schedule()
    ((_, pairs),) = swap_in.decision.transfers()
    assert engine.scheduler.complete(swap_in.decision.ticket, [pairs]) == ["b"]
    assert engine.scheduler.stats().lost == 1
    assert engine.step() == ["b"]


def test_a_request_can_be_aborted_while_it_returns_and_its_blocks_come_free_with_the_ticket():
    engine = overlapped()
    swap_in = engine.scheduler.schedule()
    engine.scheduler.abort("b")
    assert engine.scheduler.num_unfinished == 0
    assert engine.manager.pool("device").num_free < 4
    engine.scheduler.complete(swap_in.decision.ticket)
    assert engine.manager.pool("device").num_free == 4
    assert engine.manager.pool("external").num_free == 8


def test_tokens_of_a_request_that_lost_bytes_meanwhile_are_passed_over():
    engine = Engine(8, preemption_mode="swap")
    engine.add("a", 5, 4, n=2)
    engine.step()
    step = engine.scheduler.schedule()
    ((kind, pairs),) = step.decision.transfers()
    assert kind == "copy"
    assert engine.scheduler.complete(step.decision.ticket, [pairs]) == ["a"]
    assert step.void is not None
    assert step.void.all()
    assert engine.scheduler.update(step, [1] * step.num_draws) == []
    engine.manager.check()
    assert engine.step()[0] == "a"


@pytest.mark.parametrize("lookahead", [0, 3])
def test_rows_of_a_request_aborted_before_its_loss_is_reported_are_void_too(lookahead: int):
    engine = Engine(12, preemption_mode="swap", num_lookahead_tokens=lookahead)
    engine.add("a", 5, 6, n=2)
    engine.step()
    step = engine.scheduler.schedule()
    ((kind, pairs),) = step.decision.transfers()
    assert kind == "copy"
    engine.scheduler.abort("a")
    assert engine.scheduler.complete(step.decision.ticket, [pairs]) == []
    assert step.void is not None
    assert step.void.all()
    assert engine.scheduler.update(step, [1] * step.num_draws) == []
    engine.manager.check()
    assert engine.manager.pool().num_free == 12


def test_the_memory_of_a_request_grows_with_its_tokens_and_not_with_max_tokens():
    def peak(max_tokens: int) -> int:
        manager = BlockManager(block_size=16, device_blocks=70_000, watermark=0)
        tracemalloc.start()
        scheduler = Scheduler(manager)
        scheduler.add(Request("a", [1, 2, 3], max_tokens, stop_token_ids=frozenset({7})))
        for token in (5, 7):
            step = scheduler.schedule()
            scheduler.complete(step.decision.ticket)
            finished = scheduler.update(step, [token])
        assert finished[0].outputs == ((5, 7),)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak(1_000_000) < 1.01 * peak(10_000)


def test_a_sequence_longer_than_its_seat_keeps_all_its_tokens():
    manager = BlockManager(block_size=16, device_blocks=1300, watermark=0)
    scheduler = Scheduler(manager, max_num_seqs=4, preemption_mode="recompute")
    scheduler.add(Request("a", [1, 2, 3], 9_000, n=2))
    expected: tuple[list[int], list[int]] = ([], [])
    finished = []
    while not finished:
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        sampled = [(7 * draw.position + draw.sequence) % 97 for draw in step.draws()]
        for draw, token in zip(step.draws(), sampled, strict=True):
            expected[draw.sequence].append(token)
        if scheduler.stats().steps == 7_000:
            scheduler.give_up()  # both start again from their tokens
            assert all(len(tokens) > 6_000 for tokens in expected)
            del expected[0][-1:], expected[1][-1:]
            continue
        finished = scheduler.update(step, sampled)
    assert finished[0].outputs == tuple(map(tuple, expected))
    manager.check()
