"""`LinearStepTime`: its sum, and its fit to runs."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from blockyard.errors import TraceError
from blockyard.replay.step_time import EngineLimits, EngineRun, LinearStepTime, serve

LIMITS = EngineLimits(num_blocks=4000, max_num_seqs=16, max_num_batched_tokens=256)
TRUTH = LinearStepTime(fixed=0.01, prefill_token=4e-5, decode_row=1e-4, context_token=1e-7)
NOTHING = np.zeros(0, np.int64)


def arrivals(count: int = 60) -> EngineRun:
    rng = np.random.default_rng(1)
    nothing = np.zeros(count)
    inputs, outputs = rng.integers(20, 900, count), rng.integers(1, 80, count)
    return EngineRun(inputs, outputs, np.sort(rng.uniform(0, 6, count)), nothing, nothing, nothing, nothing)


def write(run: EngineRun, path: Path) -> Path:
    rows = [
        {
            "input_toks": int(run.input_tokens[i]),
            "output_toks": int(run.output_tokens[i]),
            "arrival_time": 1.7e9 + run.arrival[i],
            "queued_ts": 500 + run.queued[i],
            "scheduled_ts": 500 + run.scheduled[i],
            "first_token_ts": 500 + run.first_token[i],
            "last_token_ts": 500 + run.last_token[i],
        }
        for i in range(len(run))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_each_number_counts_what_its_name_says():
    assert TRUTH.seconds([], NOTHING) == pytest.approx(0.01)
    assert TRUTH.seconds([(300, 100), (0, 20)], NOTHING) == pytest.approx(0.01 + 120 * 4e-5 + 300 * 1e-7)
    assert TRUTH.seconds([], np.array([500, 700])) == pytest.approx(0.01 + 2e-4 + 1200 * 1e-7)


def test_steps_of_plain_decoding_take_what_each_takes_alone():
    context = np.array([500, 700, 80_000])
    seconds = list(islice(TRUTH.decode_seconds(context), 100))
    assert seconds == [TRUTH.seconds([], context + more) for more in range(100)]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_fit_finds_the_step_times_behind_a_run(tmp_path: Path, async_scheduling: bool):
    limits = EngineLimits(4000, 16, 16, 256, async_scheduling)
    path = write(serve(arrivals(), TRUTH, limits).run, tmp_path / "requests.jsonl")
    found = LinearStepTime.fit_requests(path, limits)
    assert (found.fixed, found.prefill_token) == pytest.approx((TRUTH.fixed, TRUTH.prefill_token), rel=0.02)
    for rows in (1, 8, 16):  # the context grows with the rows: a run hardly tells the two apart
        context = np.full(rows, 450)
        assert found.seconds([], context) == pytest.approx(TRUTH.seconds([], context), rel=0.01)


def test_the_fit_of_the_first_requests_predicts_the_others(tmp_path: Path):
    recorded = serve(arrivals(), TRUTH, LIMITS).run
    path = write(recorded, tmp_path / "requests.jsonl")
    found = LinearStepTime.fit_requests(path, LIMITS, first=30)
    late = slice(30, None)
    predicted = serve(EngineRun.read(path), found, LIMITS).run.part(late)
    assert predicted.latency.mean() == pytest.approx(recorded.part(late).latency.mean(), rel=0.02)


@pytest.mark.parametrize(("name", "ttft", "tpot"), [("Llama-3.1-8B", 0.01, 0.01), ("Qwen3-32B", 0.02, 0.01)])
def test_the_fit_explains_a_real_run(traces: Path, name: str, ttft: float, tpot: float):
    path = traces / "vllm_runs" / f"rtxpro6000-{name}" / "requests.jsonl"
    limits = EngineLimits(num_blocks=25_000, max_num_seqs=128, max_num_batched_tokens=2048)
    run = EngineRun.read(path)
    predicted = serve(run, LinearStepTime.fit_requests(path, limits), limits).run
    assert predicted.ttft.mean() == pytest.approx(run.ttft.mean(), rel=ttft)
    assert predicted.tpot.mean() == pytest.approx(run.tpot.mean(), rel=tpot)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the run holds no requests"),
        ("[1]\n", "line 1: without input_toks"),
        ("{\n", "line 1: not a JSON object"),
        ('{"input_toks": 1}\n', "line 1: without output_toks, arrival_time"),
        ("7\n", "line 1: not a JSON object"),
    ],
)
def test_a_malformed_run_names_file_line_and_problem(tmp_path: Path, text: str, message: str):
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        EngineRun.read(path)


@pytest.mark.parametrize(("field", "value"), [("input_toks", 0), ("output_toks", 1.5), ("queued_ts", None)])
def test_a_malformed_field_is_named_with_its_value(tmp_path: Path, field: str, value: object):
    path = write(serve(arrivals(2), TRUTH, LIMITS).run, tmp_path / "requests.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1][field] = value
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(TraceError, match=f"line 2: {field} is {value}"):
        EngineRun.read(path)


def test_a_run_that_cannot_be_read_says_why(tmp_path: Path):
    with pytest.raises(TraceError, match=r"cannot read run .*: No such file"):
        EngineRun.read(tmp_path / "none.jsonl")
