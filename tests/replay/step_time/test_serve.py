"""`serve`: the steps of an engine in virtual time."""

import numpy as np
import pytest

from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.tools.replay.step_time import EngineLimits, EngineRun, LinearStepTime, serve

SECOND = LinearStepTime(1.0, 0.0, 0.0, 0.0)


def requests(*rows: tuple[float, int, int]) -> EngineRun:
    arrival, inputs, outputs = np.array(rows).T
    nothing = np.zeros(len(rows))
    return EngineRun(inputs.astype(np.int64), outputs.astype(np.int64), arrival, nothing, nothing, nothing, nothing)


def limits(*, seqs: int = 8, tokens: int = 100, blocks: int = 100, async_scheduling: bool = False) -> EngineLimits:
    return EngineLimits(blocks, 16, seqs, tokens, async_scheduling)


def test_a_request_alone_takes_one_step_a_token_after_its_prompt():
    run = serve(requests((5.0, 250, 4)), SECOND, limits()).run
    assert (run.queued, run.scheduled, run.first_token, run.last_token) == (5.0, 5.0, 8.0, 11.0)
    assert (run.ttft, run.tpot, run.latency) == (3.0, 1.0, 6.0)


def test_a_request_waits_for_the_end_of_the_step_in_flight():
    run = serve(requests((0.0, 10, 9), (2.5, 10, 2)), SECOND, limits()).run
    assert (run.queued[1], run.scheduled[1], run.first_token[1]) == (3.0, 3.0, 4.0)


def test_with_async_scheduling_it_waits_one_step_more():
    run = serve(requests((0.0, 10, 9), (2.5, 10, 2)), SECOND, limits(async_scheduling=True)).run
    assert (run.queued[1], run.scheduled[1], run.first_token[1]) == (3.0, 3.0, 5.0)


@pytest.mark.parametrize(("async_scheduling", "first"), [(False, 4.0), (True, 5.0)])
def test_a_seat_is_free_when_the_end_of_its_request_is_known(async_scheduling: bool, first: float):
    rows = requests((0.0, 10, 3), (0.0, 10, 9), (0.0, 10, 2))
    run = serve(rows, SECOND, limits(seqs=2, async_scheduling=async_scheduling)).run
    assert run.last_token[0] == 3.0
    assert run.first_token[2] == first


def test_one_seat_serves_all_in_order_of_arrival():
    run = serve(requests((0.0, 10, 1), (0.0, 10, 1), (9.0, 10, 1)), SECOND, limits(seqs=1, async_scheduling=True)).run
    assert run.last_token.tolist() == [1.0, 2.0, 10.0]


def test_running_prompts_share_the_token_budget_with_decodes():
    served = serve(requests((0.0, 40, 5), (0.5, 250, 1)), SECOND, limits(tokens=100))
    assert served.work.tolist() == [[1, 40, 0, 0], [1, 99, 1, 41], [1, 99, 1, 141], [1, 52, 1, 241], [1, 0, 1, 44]]
    assert served.token_step.tolist() == [0, 3]
    assert served.last_step.tolist() == [4, 3]


def test_a_full_cache_preempts_and_all_requests_still_end():
    run = serve(requests(*[(0.0, 60, 60)] * 6), SECOND, limits(blocks=16)).run
    assert (run.last_token > run.first_token).all()
    assert run.last_token.max() > 60


def test_a_request_that_can_never_fit_raises():
    with pytest.raises(OutOfBlocksError):
        serve(requests((0.0, 5000, 1)), SECOND, limits())


def test_a_cache_without_blocks_raises():
    with pytest.raises(InvalidArgumentError, match="num_blocks is 0, block_size 16"):
        serve(requests((0.0, 1, 1)), SECOND, limits(blocks=0))
