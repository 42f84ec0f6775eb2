"""`--fit`: the run's own limits, and bounds from the hardware."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.tools import cli
from blockyard.tools.replay.step_time import EngineLimits, LinearStepTime
from blockyard.tools.replay.step_time.fit import errors_text

STEP = {"arrival_time": 0.0, "queued_ts": 1.0, "scheduled_ts": 1.0, "first_token_ts": 1.1, "last_token_ts": 2.0}
CONFIG = {
    "hidden_size": 1000,
    "intermediate_size": 1000,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "vocab_size": 10000,
    "model_type": "llama",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    rows = [STEP | {"input_toks": 64 + at, "output_toks": 20, "arrival_time": float(at)} for at in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    return path


def fitted(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    command = ["replay", str(run), "--fit", str(run), "--jobs", "1", "--device-blocks", "40", "--policies", "lru"]
    return cli.main([*command, "--format", "json", *more]), capsys.readouterr().err


def test_a_fit_without_the_runs_number_of_blocks_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    code, error = fitted(run, capsys)
    assert (code, error.startswith("blockyard: --fit needs --fit-blocks: ")) == (2, True)
    assert fitted(run, capsys, "--fit-blocks", "40")[0] == 0


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_a_fit_is_printed(command: str, run: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [command, str(run), "--fit", str(run), "--fit-blocks", "40", "--device-blocks", "40", "--jobs", "1"]
    assert cli.main(arguments) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step time: "))
    assert cli.main([*arguments, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["step_time"]
    fitted = LinearStepTime.fit_requests(run, EngineLimits(40))
    condition, errors = found.pop("condition"), found.pop("errors")
    assert list(errors) == ["ttft", "tpot", "latency"]
    assert found == asdict(fitted)
    within = errors_text(errors)
    assert line == f"step time: {fitted}; fitted, condition {condition:.3g}; predicts this run's mean {within}"
    assert within.startswith(f"first token within {100 * abs(errors['ttft']):.1f} %, time per token within ")
    assert condition > 1


def test_a_fit_takes_the_number_of_blocks_from_the_file_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]):
    (run.parent / "meta.json").write_text(json.dumps({"kv_cache": {"num_gpu_blocks": 4}}), "utf-8")
    code, error = fitted(run, capsys)
    too_few = "is 4, too few for the run: request 0 needs 6 blocks, the cache has 4\n"
    assert (code, error) == (2, f"blockyard: num_gpu_blocks in the meta.json of --fit {too_few}")
    assert fitted(run, capsys, "--fit-blocks", "4") == (2, f"blockyard: --fit-blocks {too_few}")


@pytest.mark.parametrize("value", [True, 0, "many", 1.5])
def test_a_limit_of_the_run_that_is_no_number_is_refused(value: object, run: Path, capsys: pytest.CaptureFixture[str]):
    (run.parent / "meta.json").write_text(json.dumps({"engine_kwargs": {"max_num_seqs": value}}), "utf-8")
    code, error = fitted(run, capsys, "--fit-blocks", "40")
    assert (code, error) == (
        2,
        f"blockyard: --fit: max_num_seqs of {run} is {value!r}, must be a whole number of at least 1\n",
    )


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_replayed_engines_have_the_limits_of_the_run(command: str, run: Path, capsys: pytest.CaptureFixture[str]):
    meta = {
        "kv_cache": {"num_gpu_blocks": 40},
        "engine_kwargs": {"max_num_seqs": 2, "max_num_batched_tokens": 32},
        "resolved_config": {"scheduler_config": {"async_scheduling": False}},
    }
    (run.parent / "meta.json").write_text(json.dumps(meta), "utf-8")
    options = f"--fit {run} --device-blocks 40 --jobs 1".split()
    for given, tokens in ([], 32), (["--max-num-batched-tokens", "64"], 64):
        assert cli.main([command, str(run), *options, *given]) == 0
        assert f"a step has at most 2 sequences and {tokens} tokens" in capsys.readouterr().out
        assert cli.main([command, str(run), *options, *given, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        engine = (found["choices"] if command == "plan" else found["traces"][0]["engines"])[0]["engine"]
        limits = (engine["max_num_seqs"], engine["max_num_batched_tokens"], engine["async_scheduling"])
        assert limits == (2, tokens, False)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """The lower bounds of each fit, which ends there."""
    found = []

    def note(_run: object, _limits: object, _make: object, *, at_least: tuple[float, ...]) -> object:
        found.append(at_least)
        raise InvalidArgumentError("enough")

    monkeypatch.setattr("blockyard.tools.cli.replays.fit_run", note)
    return found


def test_the_accelerators_of_a_fit_are_those_of_its_run(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    bounds: list[tuple[float, ...]],
):
    config = ("--fit-blocks", "40", "--device-bandwidth", "9", "--model-config", str(run.parent / "config.json"))
    assert fitted(run, capsys, *config, "--tensor-parallel-size", "2")[1] == "blockyard: enough\n"
    assert caplog.messages == [
        f"--tensor-parallel-size is 2: no meta.json says that the run {run} is of 2 accelerators"
    ]
    caplog.clear()
    (run.parent / "meta.json").write_text(json.dumps({"engine_kwargs": {"tensor_parallel_size": 2}}), "utf-8")
    for more in ([], ["--tensor-parallel-size", "2"]):
        assert fitted(run, capsys, *config, *more)[1] == "blockyard: enough\n"
    assert not caplog.messages
    assert fitted(run, capsys, *config, "--tensor-parallel-size", "1")[1] == "blockyard: enough\n"
    text = f"--tensor-parallel-size is 1, but the step times are those of the 2 accelerators of the run {run}"
    assert caplog.messages == [text]
    assert bounds == [bounds[0]] * 4
    (run.parent / "meta.json").write_text(json.dumps({"engine_kwargs": {"tensor_parallel_size": "2"}}), "utf-8")
    error = f"blockyard: tensor_parallel_size of {run} is '2', must be a whole number of at least 1\n"
    assert fitted(run, capsys, *config) == (2, error)


def test_a_plan_has_the_accelerators_of_the_fit(run: Path, capsys: pytest.CaptureFixture[str]):
    (run.parent / "meta.json").write_text(json.dumps({"engine_kwargs": {"tensor_parallel_size": 2}}), "utf-8")
    command = ["plan", str(run), "--fit", str(run), "--fit-blocks", "40", "--device-blocks", "40", "--jobs", "1"]
    assert cli.main([*command, "--host-gib", "0"]) == 0
    text = capsys.readouterr().out
    assert "GiB on each of 2 accelerators" in text
    assert "vllm serve MODEL --tensor-parallel-size 2 " in text


def test_given_step_times_must_be_of_the_given_accelerators(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    command = ["plan", str(run), "--step-time", "0.01,0,0,0", "--device-blocks", "40", "--jobs", "1", "--host-gib", "0"]
    for ranks in ("1", "2"):
        assert cli.main([*command, "--tensor-parallel-size", ranks]) == 0
    assert caplog.messages == ["--tensor-parallel-size is 2: --step-time must be that of 2 accelerators"]
    capsys.readouterr()


def test_the_hardware_bounds_a_fit(run: Path, capsys: pytest.CaptureFixture[str], bounds: list[tuple[float, ...]]):
    config = ("--fit-blocks", "40", "--device-bandwidth", "1", "--model-config", str(run.parent / "config.json"))
    for gpus in (1, 2):
        assert fitted(run, capsys, *config, "--tensor-parallel-size", str(gpus)) == (2, "blockyard: enough\n")
        weights = 2 * (10 * 7 * 1000 * 1000 + 1000 * 10000)  # bytes: 10 layers, and the output embedding
        assert bounds[-1] == pytest.approx((weights / 1e9 / gpus, 0, 0, 2 * 2 * 10 * 1000 / 1e9 / gpus))
    (run.parent / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"bits": 4}}), "utf-8")
    code, error = fitted(run, capsys, *config)
    assert (code, "--device-bandwidth has no use with this model: config has quantization_config" in error) == (2, True)
    code, error = fitted(run, capsys, *config[:4])
    assert (code, "--device-bandwidth needs --model-config" in error) == (2, True)


def test_a_bandwidth_that_the_run_contradicts_is_doubted(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, bounds: list[tuple[float, ...]]
):
    config = ("--fit-blocks", "40", "--model-config", str(run.parent / "config.json"), "--device-bandwidth")
    assert fitted(run, capsys, *config, "4")[1] == "blockyard: enough\n"
    assert not caplog.messages  # .04 s to read, .047 s for a step
    assert fitted(run, capsys, *config, "0.004")[1] == "blockyard: enough\n"
    text = "--device-bandwidth is 0.004 GB/s: the weights are read in 40 s, but the run has steps of 0.0474 s"
    assert caplog.messages == [text]
    assert len(bounds) == 2


def test_step_times_that_are_not_in_seconds_are_doubted(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    command = ["replay", str(run), "--device-blocks", "40", "--policies", "lru", "--jobs", "1", "--step-time"]
    for given in ("1,0,0,0", "4.8,3.2e-2,0,0"):
        assert cli.main([*command, given]) == 0
    assert caplog.messages == ["--step-time: a step takes 4.8 s; are the numbers in seconds?"]
    capsys.readouterr()
