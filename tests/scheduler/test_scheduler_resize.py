"""A scheduler whose device shrinks and grows: who goes on, and who is refused."""

import pytest
from token_engine import Engine

from blockyard import BlockManager, CacheGroup
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, StepOrderError
from blockyard.scheduler import DefragPolicy, Request, Scheduler
from blockyard.testing.machines.scheduler import reference_tokens


def assert_refused(engine: Engine, request: Request, wanted: int, kept: int, total: int) -> None:
    """With its tokens so far, and the words and numbers of `add`."""
    found = engine.refused[request.request_id]
    assert found.request is request
    for tokens, whole in zip(found.outputs, reference_tokens(request), strict=True):
        assert tokens == whole[: len(tokens)]
    with pytest.raises(OutOfBlocksError) as caught:
        engine.scheduler.add(request)
    expected = (
        f"request {request.request_id!r} needs up to {wanted} device blocks and {kept} kept free, there are {total}"
    )
    for error in (found.error, caught.value):
        assert str(error) == expected
        assert isinstance(error, OutOfBlocksError)
        assert (error.tier, error.wanted, error.free, error.total) == ("device", wanted, total - kept, total)


def test_what_waits_and_is_larger_than_a_device_that_shrank_is_refused_and_others_go_on():
    engine = Engine(10)
    first, large, small = engine.add("a", 16, 8), engine.add("b", 28, 5), engine.add("c", 4, 8)
    assert engine.step() == ["a"]
    engine.manager.defrag.resize(8)
    assert engine.step() == ["a:0", "c"]
    assert_refused(engine, large, 9, 0, 8)
    assert engine.refused["b"].outputs == ((),)
    assert engine.scheduler.stats().refused == 1
    engine.run(first, small)


def test_what_runs_and_cannot_fit_any_more_ends_with_the_tokens_it_has():
    engine = Engine(10)
    large, small = engine.add("a", 12, 20), engine.add("b", 4, 4)
    for _ in range(3):
        engine.step()
    engine.manager.defrag.resize(7)
    assert engine.step() == ["b:0"]
    assert_refused(engine, large, 8, 0, 7)
    assert [len(tokens) for tokens in engine.refused["a"].outputs] == [3]
    engine.run(small)


def test_what_is_swapped_and_cannot_fit_any_more_leaves_the_host():
    engine = Engine(6, 8, preemption_mode="swap")
    stay = [engine.add(name, 8, 8, arrival=float(i)) for i, name in enumerate("ab")]
    large = engine.add("c", 8, 12, arrival=2.0)
    engine.step()
    engine.step()
    assert engine.scheduler.num_swapped == 1
    engine.manager.defrag.resize(4)
    engine.step()
    assert (engine.scheduler.num_swapped, engine.manager.pool("host").num_free) == (0, 8)
    assert_refused(engine, large, 5, 0, 4)
    engine.run(*stay)


def test_what_is_on_its_way_back_and_cannot_fit_any_more_leaves_its_blocks_to_the_ticket():
    engine = Engine(5, 0, 8, preemption_mode="swap", overlap_io=True)
    stays = engine.add("a", 8, 3)
    large = engine.add("b", 8, 12, arrival=1.0)
    step = engine.scheduler.schedule()
    while not any(kind == "swap_in" for kind, _ in step.decision.transfers()):
        engine.finish(step)
        step = engine.scheduler.schedule()
    engine.manager.defrag.resize(4)
    late = engine.scheduler.schedule()
    assert engine.manager.defrag.progress().held + 4 - engine.manager.pool().num_free > 0, (
        "the swap-in still writes there"
    )
    engine.finish(late)
    assert_refused(engine, large, 5, 0, 4)
    engine.finish(step)
    engine.run(stays)


def test_a_device_that_grew_again_before_the_next_step_keeps_everyone():
    engine = Engine(10)
    requests = [engine.add("a", 12, 20), engine.add("b", 24, 9)]
    engine.step()
    for blocks in (4, 9):
        engine.manager.defrag.resize(blocks)
    engine.run(*requests)
    assert not engine.refused


def test_what_was_refused_can_be_added_once_the_device_has_grown():
    engine = Engine(10)
    request = engine.add("a", 24, 9)
    engine.manager.defrag.resize(8)
    engine.step()
    engine.manager.defrag.resize(9)
    assert list(engine.refused) == ["a"]
    engine.scheduler.add(request)
    engine.run(request)


def test_what_was_added_to_a_larger_device_between_two_steps_is_refused_by_the_smaller_one():
    engine = Engine(10)
    engine.manager.defrag.resize(4)
    small = engine.add("a", 4, 4)
    engine.step()
    engine.manager.defrag.resize(10)
    large = engine.add("b", 24, 9)
    engine.manager.defrag.resize(4)
    engine.step()
    assert_refused(engine, large, 9, 0, 4)
    engine.run(small)


def test_the_watermark_is_kept_as_by_add():
    engine = Engine(10, watermark=0.2)
    fits, large = engine.add("a", 12, 12), engine.add("b", 12, 13)
    engine.manager.defrag.resize(7)
    engine.step()
    assert_refused(engine, large, 7, 1, 7)
    engine.run(fits)


def test_sequences_that_have_ended_need_no_room_any_more():
    engine = Engine(10)
    prompt = [(ord("a") + i) % 97 for i in range(5)]
    one, other = reference_tokens(Request("a", prompt, 11, n=2))
    stop = next(token for token in one if token not in other)
    request = engine.add("a", 5, 11, n=2, stop_token_ids=frozenset({stop}))
    while not (engine.scheduler.num_unfinished and engine.manager.stats().sequences == 1 and len(engine.kinds) > 1):
        engine.step()
    engine.manager.defrag.resize(4)
    engine.run(request)
    assert not engine.refused


def test_a_request_is_in_the_scheduler_until_its_refusal_is_reported():
    engine = Engine(10)
    request = engine.add("a", 24, 9)
    engine.manager.defrag.resize(8)
    step = engine.scheduler.schedule()
    assert engine.scheduler.num_unfinished == 1
    with pytest.raises(InvalidArgumentError, match="already in the scheduler"):
        engine.scheduler.add(request)
    engine.scheduler.abort("a")
    engine.finish(step)
    assert (engine.scheduler.num_unfinished, engine.refused) == (0, {})


def test_tokens_of_what_was_refused_meanwhile_are_passed_over():
    engine = Engine(10)
    large, small = engine.add("a", 12, 20), engine.add("b", 4, 4)
    engine.step()
    step = engine.scheduler.schedule()
    engine.manager.defrag.resize(7)
    after = engine.scheduler.schedule()
    assert [after.owner(row) for row in range(after.rows)] == [("b", 0)], "which starts again: its step was given up"
    with pytest.raises(StepOrderError, match="is not in flight"):
        engine.scheduler.update(step, [1, 1])
    engine.scheduler.complete(step.decision.ticket)
    engine.finish(after)
    assert_refused(engine, large, 8, 0, 7)
    assert [len(tokens) for tokens in engine.refused["a"].outputs] == [1]
    engine.run(small)


def test_moves_are_decided_with_every_step_until_nothing_lies_beyond_the_end():
    engine = Engine(16, defragment=DefragPolicy([("free_tail", 0)], max_moves=2))
    first = engine.add("a", 16, 1)
    stays = engine.add("b", 20, 12, arrival=1.0)
    engine.step()
    assert engine.kinds == [[]], "nothing lies beyond the end"
    engine.manager.defrag.resize(8)
    assert engine.manager.defrag.progress().live == 1
    engine.step()
    engine.step()
    assert engine.kinds[1:] == [[], ["move"]], "a block that was just filled stays for a step"
    assert engine.manager.defrag.progress().done
    engine.step()
    assert engine.kinds[-1] == []
    engine.run(first, stays)


def test_moves_take_only_the_blocks_that_the_step_leaves():
    engine = Engine(8, defragment=DefragPolicy([("dense", 0)]))
    requests = [engine.add("a", 12, 1), engine.add("b", 12, 8, arrival=1.0)]
    engine.step()
    requests.append(engine.add("c", 16, 3, arrival=2.0))
    assert engine.step() == ["b:0", "c"], "which has room although b could move"
    engine.run(*requests)


def test_the_null_block_of_a_window_is_no_room():
    manager = BlockManager(block_size=4, device_blocks=4, groups=[CacheGroup.sliding_window(64)], watermark=0.0)
    scheduler = Scheduler(manager)
    with pytest.raises(OutOfBlocksError, match="needs up to 4 device blocks and 1 kept free, there are 4"):
        scheduler.add(Request("a", [1] * 12, 4))
    scheduler.add(Request("a", [1] * 8, 4))
    assert scheduler.schedule().rows == 1
