"""A prefix store in virtual time: the real `PrefixStore`, with what its storage and its copies take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import check_against_steps_one_by_one

from blockyard.tools.replay.engine import EngineOptions, Times, replay_times
from blockyard.tools.replay.history import History
from blockyard.tools.replay.step_time import LinearStepTime
from blockyard.tools.timeline import Timeline
from blockyard.traces import TraceRequest

STEP = LinearStepTime(fixed=0.01, prefill_token=1e-3, decode_row=0.0, context_token=0.0)
OPTIONS = EngineOptions(
    device_blocks=1012,
    block_size=4,
    bytes_per_block=1 << 20,
    store_blocks=5000,
    host_bandwidth=1e12,
    store_read_bandwidth=1e9,
    store_write_bandwidth=1e9,
    store_latency=0.0,
)


def prompt(number: int, arrival: float, blocks: int = 1000) -> TraceRequest:
    ids = tuple(range(number * blocks, (number + 1) * blocks))
    return TraceRequest(arrival, 4 * blocks + 1, 1, ids, 4.0)


def run(requests: list[TraceRequest], **options: Any) -> Times:
    return replay_times(requests, replace(OPTIONS, **options), STEP)


# The second prompt evicts the first, which then comes from the store.
ROWS = [prompt(0, 0.0), prompt(1, 100.0), prompt(0, 200.0)]


def test_a_prompt_that_was_evicted_comes_from_the_store():
    times = run(ROWS)
    assert times.store is not None
    assert times.store["written_blocks"] == 2000
    assert times.store["read_blocks"] == pytest.approx(1000, rel=0.02)
    computed, loaded = times.ttft[0], times.ttft[2]
    assert loaded == pytest.approx(1000 * (1 << 20) / 1e9, rel=0.1)
    assert loaded < computed / 2
    assert run(ROWS, store_blocks=0).ttft[2] == pytest.approx(computed, rel=0.02)


def test_a_prompt_larger_than_the_staging_loads_whole_although_each_part_has_its_time():
    # 1,000 MiB in parts of 256 MiB at 250 MB/s: 4.2 seconds, and .25 + 256 MiB / 200 MB/s for each part.
    times = run(ROWS, store_read_bandwidth=250e6)
    assert times.store is not None
    assert times.store["read_blocks"] == pytest.approx(1000, rel=0.02)
    assert times.ttft[2] == pytest.approx(1000 * (1 << 20) / 250e6, rel=0.1)


def test_a_prompt_that_loads_holds_up_no_other():
    rows = [*(prompt(number, 50.0 * number) for number in range(4)), prompt(0, 200.0)]
    alone = run([*rows, TraceRequest(400.0, 20, 1)], device_blocks=3000)
    times = run([*rows, TraceRequest(200.2, 20, 1)], device_blocks=3000)
    assert times.ttft[4] > 1.0  # it loads from 200 to 201
    assert times.first_token[5] < times.first_token[4]
    assert times.ttft[5] == pytest.approx(alone.ttft[5], abs=0.02)


def test_storage_slower_than_the_deadline_is_given_up_and_the_prompt_computed():
    times = run(ROWS, store_read_bandwidth=20e6)
    computed, waited = times.ttft[0], times.ttft[2]
    assert waited == pytest.approx(computed + 0.25 + 256 * (1 << 20) / 200e6, rel=0.1)


def test_storage_keeps_what_was_used_last():
    rows = [*ROWS[:2], replace(ROWS[0], arrival=200.0), prompt(2, 300.0), replace(ROWS[0], arrival=400.0)]
    times = run(rows, store_blocks=2000)
    assert times.store is not None
    assert times.store["evicted_blocks"] == pytest.approx(1000, rel=0.02)
    assert times.store["cached_blocks"] == 2000
    assert times.store["read_blocks"] == pytest.approx(
        2000, rel=0.03
    )  # the first prompt, twice: the second one was evicted


def test_nothing_is_written_if_writes_are_off():
    times = run(ROWS, store_writes="never")
    assert times.store == {"read_blocks": 0, "written_blocks": 0, "evicted_blocks": 0, "cached_blocks": 0}


def test_the_history_has_what_each_tier_holds():
    timeline = Timeline()
    times = replay_times(ROWS, replace(OPTIONS, host_blocks=64), STEP, watch=History(timeline))
    assert times.store is not None
    last = {(counter.track, counter.name): counter.value for counter in timeline.counters}
    assert last["store (blocks)", "stored"] == times.store["cached_blocks"]
    assert last["host (blocks)", "size"] == 64
    assert last["device (blocks)", "size"] == OPTIONS.device_blocks
    assert {span.track for span in timeline.spans} >= {"steps", "device to host"}


prompts = st.builds(
    lambda at, first, blocks, outputs: TraceRequest(
        at, 64 * blocks + 1, outputs, tuple(range(first, first + blocks)), 64.0
    ),
    st.floats(0, 2),
    st.integers(0, 20),
    st.integers(1, 12),
    st.integers(1, 300),
)


@settings(max_examples=40)
@given(
    st.lists(prompts, min_size=1, max_size=6),
    st.sampled_from([5e7, 2e8, 1e9]),
    st.sampled_from([0, 100]),
    st.sampled_from([24, 64]),
)
def test_steps_decided_at_once_write_as_those_decided_one_by_one(
    requests: list[TraceRequest], bandwidth: float, host_blocks: int, device_blocks: int
):
    options: Any = {"block_size": 64, "bytes_per_block": 8 << 20, "host_blocks": host_blocks}
    options |= {"host_bandwidth": bandwidth, "store_write_bandwidth": bandwidth, "device_blocks": device_blocks}
    check_against_steps_one_by_one(requests, replace(OPTIONS, **options), STEP)
