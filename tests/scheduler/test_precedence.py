"""Who goes first: preemption for a higher priority, and requests that overtake one that does not fit."""

import pytest
from token_engine import Engine

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Request, Scheduler

MODES = ("recompute", "swap")


def steps_until(engine: Engine, name: str, limit: int = 200) -> int:
    for steps in range(limit):
        if name in engine.done:
            return steps
        engine.step()
    raise AssertionError(f"{name} has not finished after {limit} steps")


@pytest.mark.parametrize("mode", MODES)
def test_a_request_preempts_one_of_a_lower_priority_for_its_blocks(mode: str):
    engine = Engine(16, 16, preemption_mode=mode)
    requests = [engine.add("batch", 40, 20, priority=9)]
    engine.step()
    requests.append(engine.add("urgent", 20, 3, priority=0))
    assert steps_until(engine, "urgent") <= 5
    assert "batch" not in engine.done
    engine.run(*requests)
    stats = engine.scheduler.stats()
    assert stats.preempted_recompute + stats.preempted_swap_host == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_request_preempts_one_of_a_lower_priority_for_its_seat(mode: str):
    engine = Engine(16, 16, preemption_mode=mode, max_num_seqs=2)
    requests = [engine.add("batch", 4, 20, n=2, priority=9)]
    engine.step()
    requests.append(engine.add("urgent", 4, 3, priority=0))
    assert steps_until(engine, "urgent") <= 5
    engine.run(*requests)


@pytest.mark.parametrize("mode", MODES)
def test_the_lowest_ranked_requests_are_preempted_and_no_more_than_are_needed(mode: str):
    engine = Engine(16, 16, preemption_mode=mode)
    requests = [engine.add(name, 12, 8, priority=priority) for name, priority in (("a", 3), ("b", 5), ("c", 4))]
    engine.step()
    requests.append(engine.add("urgent", 24, 2, priority=0))
    engine.step()
    running = {name.split(":")[0] for name in engine.step()}
    assert {"a", "c"} <= running
    assert "b" not in running
    engine.run(*requests)


def test_nobody_is_preempted_in_vain():
    engine = Engine(16)
    requests = [engine.add("same", 36, 8, priority=0), engine.add("low", 8, 12, priority=1)]
    engine.step()
    requests.append(engine.add("large", 44, 4, priority=0))  # it would not fit without "low" either
    while "same" not in engine.done:
        engine.step()
        assert engine.scheduler.stats().preempted_recompute == 0
    engine.run(*requests)


@pytest.mark.parametrize("mode", MODES)
def test_within_a_priority_nobody_is_preempted_for_another(mode: str):
    engine = Engine(12, 16, preemption_mode=mode)
    requests = [engine.add("first", 40, 4, priority=1), engine.add("early", 20, 4, priority=1, arrival=-1.0)]
    engine.scheduler.abort("early")
    engine.step()
    requests = [requests[0], engine.add("early", 20, 4, priority=1, arrival=-2.0)]
    while "first" not in engine.done:
        engine.step()
    assert engine.scheduler.stats().preempted_recompute + engine.scheduler.stats().preempted_swap_host == 0
    engine.run(*requests)


@pytest.mark.parametrize("mode", MODES)
def test_a_preempted_request_stays_out_until_those_of_a_higher_priority_have_their_blocks(mode: str):
    engine = Engine(16, 32, preemption_mode=mode)
    requests = [engine.add("low", 40, 10, priority=2)]
    engine.step()
    requests += [engine.add(f"high{i}", 36, 6, priority=1) for i in range(4)]
    while "high3" not in engine.done:
        assert "low" not in {name.split(":")[0] for name in engine.step()}
    engine.run(*requests)
    stats = engine.scheduler.stats()
    assert stats.preempted_recompute + stats.preempted_swap_host == 1


def test_a_request_of_a_higher_priority_goes_before_swapped_out_ones():
    engine = Engine(16, 32, preemption_mode="swap")
    requests = [engine.add("a", 40, 10, priority=5)]
    engine.step()
    requests.append(engine.add("b", 36, 12, priority=3))
    engine.step()
    requests.append(engine.add("c", 36, 4, priority=4))
    while len(engine.done) < 3:
        engine.step()
    assert list(engine.done) == ["b", "c", "a"]
    engine.run(*requests)


# ---- overtaking ----


def scheduler(max_overtakes: int) -> Scheduler:
    """One request holds 60 of 100 blocks for 40 steps, and a huge one waits."""
    made = Scheduler(BlockManager(block_size=4, device_blocks=100, watermark=0), max_overtakes=max_overtakes)
    made.add(Request("runs", [1] * 240, max_tokens=40))
    step(made)
    made.add(Request("huge", [2] * 280, max_tokens=4))
    return made


def step(made: Scheduler) -> set[str]:
    each = made.schedule()
    made.complete(each.decision.ticket)
    ran = {each.owner(row)[0] for row in range(each.rows)}
    made.update(each, [5] * each.num_draws)
    return ran


def test_by_default_nobody_overtakes():
    made = scheduler(0)
    made.add(Request("tiny", [3] * 4, max_tokens=2))
    assert all("tiny" not in step(made) for _ in range(39))


@pytest.mark.parametrize("max_overtakes", [1, 3, 16])
def test_at_most_max_overtakes_requests_start_before_one_that_does_not_fit(max_overtakes: int):
    made = scheduler(max_overtakes)
    started: set[str] = set()
    for number in range(40):
        made.add(Request(f"tiny{number}", [3] * 4, max_tokens=2))
        ran = step(made)
        if "huge" in ran:
            break
        started |= ran - {"runs"}
    assert "huge" in ran
    assert len(started) == max_overtakes
    assert started == {f"tiny{number}" for number in range(max_overtakes)}


def test_requests_overtake_only_within_their_priority():
    made = scheduler(8)
    made.add(Request("tiny", [3] * 4, max_tokens=2, priority=1))
    assert all("tiny" not in step(made) for _ in range(39))


def test_a_request_overtakes_a_swapped_out_one_that_does_not_fit():
    manager = BlockManager(block_size=4, device_blocks=100, host_blocks=100, watermark=0)
    made = Scheduler(manager, preemption_mode="swap", max_overtakes=2)
    made.add(Request("huge", [2] * 280, max_tokens=40, priority=1))
    step(made)
    made.add(Request("urgent", [1] * 240, max_tokens=40))
    while "urgent" not in step(made):
        pass
    assert made.num_swapped == 1
    for number in range(3):
        made.add(Request(f"tiny{number}", [3] * 4, max_tokens=2, priority=1))
    started = set.union(*(step(made) for _ in range(10)))
    assert started == {"urgent", "tiny0", "tiny1"}


def test_a_negative_max_overtakes_is_refused():
    with pytest.raises(InvalidArgumentError, match="max_overtakes is -1, must be at least 0"):
        scheduler(-1)
