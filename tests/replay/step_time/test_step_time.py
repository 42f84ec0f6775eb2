"""`LinearStepTime`: its sum, and its fit to runs."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from blockyard.errors import InvalidArgumentError, TraceError
from blockyard.tools.replay.step_time import EngineLimits, EngineRun, LinearStepTime, serve
from blockyard.tools.replay.step_time.fit import fit_run, lower_bounds

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
    assert (found.fixed, found.prefill_token) == pytest.approx((TRUTH.fixed, TRUTH.prefill_token), rel=0.025)
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


# ---- where a run does not say what the numbers are ----


def crowded() -> tuple[EngineRun, EngineLimits]:
    """A run whose steps all have about the same rows and context."""
    nothing, lengths, answers = np.zeros(60), np.full(60, 400), np.full(60, 200)
    return EngineRun(lengths, answers, nothing, nothing, nothing, nothing, nothing), EngineLimits(300, 16, 4, 512)


BOUNDS = (TRUTH.fixed, 0.0, 0.0, TRUTH.context_token)


def test_a_run_with_a_full_cache_is_called_doubtful_and_one_with_a_changing_load_is_not():
    run, limits = crowded()
    doubtful = fit_run(serve(run, TRUTH, limits).run, limits, LinearStepTime)
    assert "lower bounds from the hardware (at_least, or --device-bandwidth with" in doubtful.doubts[-1]
    good = fit_run(serve(arrivals(), TRUTH, LIMITS).run, LIMITS, LinearStepTime)
    assert (good.doubts, max(map(abs, good.errors.values())) < 0.01) == ([], True)


def test_no_fitted_number_is_below_its_bound(caplog: pytest.LogCaptureFixture):
    run, limits = crowded()
    fit = fit_run(serve(run, TRUTH, limits).run, limits, LinearStepTime, at_least=BOUNDS)
    assert all(number >= least for number, least in zip(fit.numbers, BOUNDS, strict=True))
    assert "The lower bounds stand for what the run leaves open; a run whose batch sizes" in caplog.text


def fit_of(run: EngineRun, limits: EngineLimits = LIMITS) -> str:
    return "\n".join(fit_run(run, limits, LinearStepTime).doubts)


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_times_of_other_requests_are_not_explained(spread: float):
    few = arrivals()
    run = serve(replace(few, arrival=few.arrival * spread), TRUTH, LIMITS).run
    order = np.random.default_rng(3).permutation(len(run))
    to_first, to_last = (run.first_token - run.scheduled)[order], (run.last_token - run.first_token)[order]
    first = run.scheduled + to_first
    doubts = fit_of(replace(run, first_token=first, last_token=first + to_last))
    assert "the fit does not explain the run: it predicts first token within" in doubts
    assert "that each line has the times of its own request" in doubts


def test_times_swapped_between_some_requests_are_not_explained_though_the_means_are():
    run = serve(arrivals(), TRUTH, LIMITS).run
    order = np.arange(len(run))
    order[::6] = np.random.default_rng(9).permutation(order[::6])
    first = run.scheduled + (run.first_token - run.scheduled)[order]
    swapped = replace(run, first_token=first, last_token=first + (run.last_token - run.first_token)[order])
    fit = fit_run(swapped, LIMITS, LinearStepTime)
    assert max(map(abs, fit.errors.values())) < 0.04
    assert 0.1 < max(fit.single_errors.values()) < 0.15
    assert any(doubt.startswith("the fit does not explain the run") for doubt in fit.doubts)


@pytest.mark.parametrize("name", ["fixed", "prefill_token", "decode_row", "context_token"])
def test_a_number_that_no_step_shows_is_zero_and_doubted(name: str):
    fit = fit_run(serve(arrivals(), replace(TRUTH, **{name: 0.0}), LIMITS).run, LIMITS, LinearStepTime)
    zero = [number == 0 for number in fit.numbers]
    assert zero == [other == name for other in ("fixed", "prefill_token", "decode_row", "context_token")]
    doubted = any("would take no time, which no engine reaches" in doubt for doubt in fit.doubts)
    assert doubted == (name != "decode_row")  # the reads of the weights can hide it


def test_a_number_of_blocks_that_the_run_did_not_have_is_doubted():
    doubts = fit_of(serve(arrivals(), TRUTH, LIMITS).run, replace(LIMITS, num_blocks=100))
    assert "Check the run's number of blocks (--fit-blocks)" in doubts
    assert "a cached token would take no time, which no engine reaches" in doubts


def test_a_run_of_answers_of_one_token_is_fitted():
    few = arrivals()
    run = serve(replace(few, output_tokens=np.ones_like(few.output_tokens)), TRUTH, LIMITS).run
    fit = fit_run(run, LIMITS, LinearStepTime)
    assert fit.numbers[:2] == pytest.approx((TRUTH.fixed, TRUTH.prefill_token), rel=0.1)
    assert fit.errors["tpot"] == 0


def test_a_run_in_milliseconds_is_doubted(caplog: pytest.LogCaptureFixture):
    run = serve(arrivals(), TRUTH, LIMITS).run
    names = ("arrival", "queued", "scheduled", "first_token", "last_token")
    fit_of(replace(run, **{name: 1e3 * getattr(run, name) for name in names}))
    assert "the fit is doubtful: a step takes 10 s: are the times of the run in seconds?" in caplog.messages


def test_a_time_before_the_one_that_it_follows_names_file_and_line(tmp_path: Path):
    run = serve(arrivals(3), TRUTH, LIMITS).run
    path = write(replace(run, first_token=run.first_token - np.array([0, 9, 0])), tmp_path / "requests.jsonl")
    with pytest.raises(TraceError, match=r"requests\.jsonl, line 2: first_token_ts is .*, before scheduled_ts, 5"):
        EngineRun.read(path)


def test_the_bounds_are_the_reads_of_weights_and_cached_tokens():
    assert lower_bounds(16 * 10**9, 131072, 1e12) == pytest.approx((0.016, 0, 0, 1.31072e-7))


@pytest.mark.parametrize("bounds", [(1, 2, 3), (0, -1, 0, 0), (0, 0, 0, float("inf"))])
def test_a_bound_that_no_step_time_can_have_is_refused(bounds: tuple[float, ...]):
    with pytest.raises(InvalidArgumentError, match=r"at_least is \(0|at_least is \(1"):
        fit_run(serve(arrivals(), TRUTH, LIMITS).run, LIMITS, LinearStepTime, at_least=bounds)


def test_the_limits_of_a_run_come_from_the_file_beside_it(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    with pytest.raises(InvalidArgumentError, match=r"has no meta\.json beside it with num_gpu_blocks"):
        EngineLimits.of_run(path)
    assert EngineLimits.of_run(path, num_blocks=7, max_num_seqs=3) == EngineLimits(7, max_num_seqs=3)
    meta = {"engine_kwargs": {"max_num_seqs": 64, "max_model_len": None}, "kv_cache": {"num_gpu_blocks": 2588}}
    meta["resolved_config"] = {"scheduler_config": {"async_scheduling": False, "max_num_batched_tokens": 2048}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert EngineLimits.of_run(path, max_num_seqs=3) == EngineLimits(2588, 16, 64, 2048, async_scheduling=False)
    (tmp_path / "meta.json").write_text("[1]")
    with pytest.raises(TraceError, match=r"meta\.json: not the description of a run"):
        EngineLimits.of_run(path)


@pytest.mark.parametrize(("name", "blocks"), [("Llama-3.1-8B", 36_578), ("Qwen3-32B", 28_614)])
def test_the_fit_of_half_a_real_run_predicts_the_other_half(traces: Path, name: str, blocks: int):
    path = traces / "vllm_runs" / f"rtxpro6000-{name}" / "requests.jsonl"
    weights, token = {"Llama-3.1-8B": (15.01e9, 131072), "Qwen3-32B": (63.97e9, 262144)}[name]
    bounds = lower_bounds(int(weights), token, 1597e9 * (2 if name == "Qwen3-32B" else 1))
    limits, run = EngineLimits.of_run(path, num_blocks=blocks), EngineRun.read(path)
    found = LinearStepTime.fit_requests(path, limits, first=150, at_least=bounds)
    late = slice(150, None)
    predicted, recorded = serve(run, found, limits).run.part(late), run.part(late)
    for metric, most in (("ttft", 0.04), ("tpot", 0.02), ("latency", 0.02)):
        assert getattr(predicted, metric).mean() == pytest.approx(getattr(recorded, metric).mean(), rel=most)
