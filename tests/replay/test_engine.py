"""An engine in virtual time: what it decides, what its copies take, who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from replayed import check_against_steps_one_by_one

from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.engine import EngineOptions, Times, replay_times
from blockyard.tools.replay.history import History
from blockyard.tools.timeline import Timeline
from blockyard.traces import TraceRequest


class Steps:
    """Each step takes a second, and a hundredth for each token of a prompt."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[tuple[int, int]], list[int]]] = []

    def seconds(self, prefill: Sequence[tuple[int, int]], decode_context: NDArray[np.int64]) -> float:
        self.calls.append((list(prefill), decode_context.tolist()))
        return 1.0 + sum(count for _, count in prefill) / 100


OPTIONS = EngineOptions(device_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


def run(requests: list[TraceRequest], **options: Any) -> tuple[Times, Steps]:
    steps = Steps()
    return replay_times(requests, replace(OPTIONS, **options), steps), steps


def test_a_request_alone_takes_its_prompt_and_a_step_a_token():
    times, steps = run([TraceRequest(2.0, 50, 3)])
    assert steps.calls == [([(0, 32)], []), ([(32, 18)], []), ([], [51]), ([], [52])]
    assert times.first_token[0] == pytest.approx(2.0 + 1.32 + 1.18)
    assert times.last_token[0] == pytest.approx(2.0 + 1.32 + 1.18 + 2)
    assert (times.ttft, times.tpot, times.latency) == (
        pytest.approx([2.5]),
        pytest.approx([1.0]),
        pytest.approx([4.5]),
    )
    assert (times.steps, times.busy_seconds, times.refused) == (4, pytest.approx(4.5), 0)


def test_a_request_comes_its_delay_after_the_answers_that_it_waits_for():
    rows = [
        TraceRequest(0.0, 4, 2, session=0),
        TraceRequest(0.0, 4, 5, session=0),
        TraceRequest(9.0, 4, 1, session=0, after=(0, 1), delay=3.0),
    ]
    times, _ = run(rows)
    assert times.arrival[2] == pytest.approx(max(times.last_token[:2]) + 3.0)


def test_a_conversation_begins_when_another_ends_if_so_many_run():
    rows = [TraceRequest(0.0, 4, 3, session=number) for number in range(5)]
    times, _ = run(rows, max_concurrent_sessions=2)
    begins = sorted(times.arrival.tolist())
    ends = sorted(times.last_token.tolist())
    assert begins == pytest.approx([0.0, 0.0, *ends[:3]])


def test_a_conversation_that_begins_later_keeps_the_times_between_its_requests():
    rows = [TraceRequest(float(at), 4, 3, session=session) for session in range(3) for at in (0, 20)]
    times, _ = run(rows, max_concurrent_sessions=1)
    assert len(times.latency) == 6
    assert times.arrival[2] == times.last_token[1]
    assert (times.arrival[1::2] - times.arrival[::2]).tolist() == pytest.approx([20.0] * 3)


def test_equal_hash_ids_are_found_cached_and_other_prompts_are_not():
    rows = [
        TraceRequest(0.0, 17, 1, (1, 2), 8.0),
        TraceRequest(50.0, 17, 1, (1, 2), 8.0),
        TraceRequest(100.0, 17, 1, (1, 3), 8.0),
        TraceRequest(150.0, 17, 1),
    ]
    _, steps = run(rows)
    assert [prefill for prefill, _ in steps.calls] == [[(0, 17)], [(16, 1)], [(8, 9)], [(0, 17)]]
    assert run(rows, prefix_caching=False)[1].calls[1][0] == [(0, 17)]


def test_an_answer_is_found_by_the_next_turn_where_the_trace_tells_it():
    first = TraceRequest(0.0, 17, 15, (1, 2), 8.0, output_hash_ids=(3, 4))
    turns = [first, TraceRequest(100.0, 41, 1, (1, 2, 3, 4, 5), 8.0)]
    times, steps = run(turns)
    assert [prefill for prefill, _ in steps.calls if prefill] == [
        [(0, 17)],
        [(28, 13)],
    ]  # its last token is not computed
    assert len(times.latency) == 2
    unknown = [replace(first, output_hash_ids=()), turns[1]]
    assert [prefill for prefill, _ in run(unknown)[1].calls if prefill] == [[(0, 17)], [(16, 25)]]


def test_an_answer_that_the_trace_does_not_tell_is_no_prompts_block():
    rows = [TraceRequest(0.0, 8, 9, (1,), 8.0), TraceRequest(100.0, 17, 1, (1, 0), 8.0)]
    _, steps = run(rows)
    assert [prefill for prefill, _ in steps.calls if prefill] == [[(0, 8)], [(8, 9)]]


def test_a_prompt_with_a_known_answer_is_computed_in_chunks():
    answered = TraceRequest(0.0, 64, 17, tuple(range(8)), 8.0, output_hash_ids=(8, 9))
    times, steps = run([answered])
    assert [prefill for prefill, _ in steps.calls if prefill] == [[(0, 32)], [(32, 32)]]
    assert len(times.latency) == 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=6))
def test_answers_change_no_time_where_nobody_finds_them(rows: list[tuple[int, int, int]]):
    plain = [TraceRequest(at / 7, inputs, outputs, (0, 1, 2), 8.0) for at, inputs, outputs in rows]
    told = [
        replace(row, hash_ids=row.hash_ids[: row.input_tokens // 8], output_hash_ids=(100 + number, 200 + number))
        for number, row in enumerate(plain)
    ]
    one, other = run(plain)[0], run(told)[0]
    assert one.last_token.tolist() == other.last_token.tolist()


def test_loads_from_the_host_hold_up_the_step_that_needs_them_and_stores_do_not():
    # Ten blocks on the device: the second prompt evicts the first, whose blocks are then loaded from the host.
    one, other = TraceRequest(0.0, 33, 1, (1, 2, 3, 4), 8.0), TraceRequest(10.0, 33, 1, (5, 6, 7, 8), 8.0)
    rows = [one, other, replace(one, arrival=200.0)]
    slow = {"device_blocks": 10, "host_blocks": 40, "bytes_per_block": 1000, "host_latency": 0.0}
    quick, _ = run(rows, **slow, host_bandwidth=1e12)
    waited, steps = run(rows, **slow, host_bandwidth=1000.0)
    loaded = waited.loaded_blocks
    assert loaded > 0
    assert steps.calls[-1][0] == [(loaded * 4 if loaded < 8 else 32, 33 - loaded * 4)]
    assert waited.ttft[2] - quick.ttft[2] == pytest.approx(loaded * 1.0, abs=1e-6)
    assert waited.ttft[1] == pytest.approx(quick.ttft[1])


def test_a_copy_to_the_host_is_found_once_it_has_landed_and_not_before():
    one, other = TraceRequest(0.0, 33, 1, (1, 2, 3, 4), 8.0), TraceRequest(10.0, 33, 1, (5, 6, 7, 8), 8.0)
    rows = [one, other, replace(one, arrival=20.0)]
    options = {"device_blocks": 10, "host_blocks": 40, "bytes_per_block": 1000, "host_latency": 0.0}
    landed, _ = run(rows, **options, host_bandwidth=1e6)
    under_way, _ = run(rows, **options, host_bandwidth=10.0)  # a block takes 100 seconds
    assert landed.loaded_blocks > 0
    assert under_way.loaded_blocks == 0


def test_a_batch_of_copies_takes_its_latency_and_its_bytes():
    one, other = TraceRequest(0.0, 33, 1, (1, 2, 3, 4), 8.0), TraceRequest(10.0, 33, 1, (5, 6, 7, 8), 8.0)
    rows = [one, other, replace(one, arrival=20.0)]
    options = {"device_blocks": 10, "host_blocks": 40, "bytes_per_block": 1000, "host_bandwidth": 1e6}
    quick, _ = run(rows, **options, host_latency=0.0)
    slow, _ = run(rows, **options, host_latency=0.5)
    assert slow.loaded_blocks == quick.loaded_blocks > 0
    assert slow.ttft[2] - quick.ttft[2] == pytest.approx(0.5)


def test_copies_behind_a_slow_link_are_no_missing_completes():
    rows = [TraceRequest(float(at), 33, 5, (10 * at, 10 * at + 1, 10 * at + 2, 10 * at + 3), 8.0) for at in range(60)]
    times, _ = run(rows, host_blocks=400, bytes_per_block=1000, host_latency=20.0)  # a warning would fail the test
    assert not np.isnan(times.last_token).any()


def test_a_request_that_never_fits_is_refused_and_its_conversation_goes_on():
    rows = [TraceRequest(0.0, 4000, 1, session=0), TraceRequest(0.0, 4, 1, session=0, after=(0,), delay=2.0)]
    times, _ = run(rows)
    assert (times.refused, np.isnan(times.first_token[0]), times.arrival[1]) == (1, True, 2.0)
    assert times.ttft == pytest.approx([1.04])


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_a_preempted_request_still_ends_with_all_of_its_tokens(mode: str):
    rows = [TraceRequest(0.0, 20, 40) for _ in range(4)]
    times, _ = run(rows, device_blocks=34, host_blocks=40, preemption_mode=mode, prefix_caching=False)
    stats = times.scheduler
    assert (stats.preempted_swap_host > 0) == (mode != "recompute")  # a swap takes less than a prompt here
    assert stats.preempted_swap_host + stats.preempted_recompute > 0
    assert len(times.latency) == 4


@pytest.mark.parametrize(("bandwidth", "swaps"), [(1e9, True), (1e5, False)])
def test_auto_preemption_does_what_is_cheaper(bandwidth: float, swaps: bool):
    rows = [TraceRequest(0.0, 20, 40) for _ in range(4)]
    options = {"device_blocks": 34, "host_blocks": 40, "prefix_caching": False, "host_bandwidth": bandwidth}
    modes: Any = ("auto", "swap", "recompute")
    auto, swap, recompute = (run(rows, preemption_mode=mode, **options)[0] for mode in modes)
    assert (auto.scheduler.preempted_swap_host > 0) == swaps
    assert auto.latency.mean() == min(swap.latency.mean(), recompute.latency.mean())


rows = st.lists(
    st.builds(
        lambda *row, answer: TraceRequest(*row, 8.0, output_hash_ids=answer),
        st.floats(0, 30),
        st.integers(1, 60),
        st.integers(1, 80),
        st.lists(st.integers(0, 3), max_size=6).map(tuple),
        answer=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100)
@given(
    rows,
    st.integers(24, 60),
    st.sampled_from([0, 30]),
    st.sampled_from(["swap", "recompute"]),
    st.sampled_from(["lru", "adaptive"]),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_steps_decided_at_once_are_those_decided_one_by_one(
    requests: list[TraceRequest],
    device_blocks: int,
    host_blocks: int,
    mode: str,
    policy: str,
    is_async: bool,
    sessions: int | None,
):
    options: Any = {"device_blocks": device_blocks, "host_blocks": host_blocks, "preemption_mode": mode}
    options |= {"eviction": policy, "async_scheduling": is_async, "max_concurrent_sessions": sessions}
    check_against_steps_one_by_one(requests, replace(OPTIONS, **options), Steps())


def test_a_block_that_is_no_part_of_a_hash_id_is_refused():
    with pytest.raises(InvalidArgumentError, match="block_size is 5, must divide 8: tokens of a hash id"):
        run([TraceRequest(0.0, 17, 1, (1, 2), 8.0)], block_size=5)


def test_an_engine_without_requests_is_recorded_as_idle_until_the_next_one():
    timeline = Timeline()
    rows = [TraceRequest(0.0, 9, 3), TraceRequest(1000.0, 9, 3)]
    times = replay_times(rows, EngineOptions(100, prefix_caching=False), Steps(), watch=History(timeline))
    ended, arrived = times.last_token[0], times.arrival[1]
    running = [one for one in timeline.counters if (one.track, one.name) == ("requests", "running")]
    assert [one.value for one in running if ended <= one.time < arrived] == [0]
    assert [one.time for one in running if one.value == 0] == [ended, times.last_token[1]]
