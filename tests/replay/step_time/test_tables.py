"""`TableStepTime`: measured operators, judged by real runs."""

import json
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.tools.replay.step_time import EngineLimits, EngineRun, serve

pytest.importorskip("aiconfigurator_core", reason='needs pip install "blockyard[tables]"')

from blockyard.tools.replay.step_time.tables import TableStepTime, read_config

SYSTEM = "rtx_pro_6000_server"
NOTHING = np.zeros(0, np.int64)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def tables(config: dict[str, object], gpus: int) -> TableStepTime:
    return TableStepTime(
        config,
        SYSTEM,
        engine_version="0.19.0",
        tensor_parallel_size=gpus,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        greedy=True,
    )


@pytest.fixture(scope="module")
def llama() -> TableStepTime:
    return tables(LLAMA, 1)


@pytest.fixture(scope="module")
def qwen() -> TableStepTime:
    return tables(QWEN, 2)


@pytest.mark.parametrize(("model", "folder"), [("llama", "Llama-3.1-8B"), ("qwen", "Qwen3-32B")])
def test_the_tables_alone_predict_a_real_run(
    request: pytest.FixtureRequest, traces: Path, model: str, folder: str
) -> None:
    run = EngineRun.read(traces / "vllm_runs" / f"rtxpro6000-{folder}" / "requests.jsonl")
    limits = EngineLimits(num_blocks=25_000, max_num_seqs=128, max_num_batched_tokens=2048)
    predicted = serve(run, request.getfixturevalue(model), limits).run
    assert predicted.ttft.mean() == pytest.approx(run.ttft.mean(), rel=0.04)
    assert predicted.tpot.mean() == pytest.approx(run.tpot.mean(), rel=0.02)
    assert predicted.latency.mean() == pytest.approx(run.latency.mean(), rel=0.02)


def test_more_work_takes_longer(llama: TableStepTime):
    steps = [
        llama.seconds([], np.full(1, 100)),
        llama.seconds([], np.full(64, 100)),
        llama.seconds([], np.full(64, 4000)),
        llama.seconds([(0, 64)], np.full(64, 4000)),
        llama.seconds([(0, 1024)], np.full(64, 4000)),
        llama.seconds([(30_000, 1024)], np.full(64, 4000)),
    ]
    assert steps == sorted(steps)
    assert steps[0] > 16e9 / 1.8e12  # the weights are read once, at most at the memory's full rate


def test_steps_of_plain_decoding_take_what_each_takes_alone(llama: TableStepTime):
    context = np.array([500, 700, 80_000])
    seconds = list(islice(llama.decode_seconds(context), 100))
    assert seconds == [llama.seconds([], context + more) for more in range(100)]


def test_a_step_beyond_the_limits_takes_its_share(llama: TableStepTime):
    assert llama.seconds([(0, 4096)], NOTHING) > 1.9 * llama.seconds([(0, 2048)], NOTHING)


def test_two_gpus_share_the_work_but_not_for_nothing(llama: TableStepTime):
    context = np.full(64, 1000)
    assert 0.5 < tables(LLAMA, 2).seconds([], context) / llama.seconds([], context) < 1


def test_a_copy_says_the_same(llama: TableStepTime):
    copy, context = pickle.loads(pickle.dumps(llama)), np.full(128, 1000)
    assert copy.seconds([(0, 512)], context) == llama.seconds([(0, 512)], context)
    assert repr(copy) == "TableStepTime(LlamaForCausalLM, 'rtx_pro_6000_server', tensor_parallel_size=1)"


def test_a_config_is_read_from_its_folder_or_file(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == read_config(LLAMA) == LLAMA


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": 8}'])
def test_a_config_that_is_none_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match="model config"):
        read_config(tmp_path)


def test_an_unknown_system_is_named_with_the_known_ones():
    with pytest.raises(InvalidArgumentError, match=r"system is 'abacus', must be one of a100_pcie, .*h100_sxm"):
        TableStepTime(LLAMA, "abacus")


def test_a_model_that_the_tables_do_not_know_is_named():
    with pytest.raises(InvalidArgumentError, match="do not cover SomeForCausalLM"):
        TableStepTime(LLAMA | {"architectures": ["SomeForCausalLM"]}, SYSTEM)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens"])
def test_a_limit_below_one_is_named(name: str):
    with pytest.raises(InvalidArgumentError, match=f"{name} is 0"):
        TableStepTime(LLAMA, SYSTEM, **{name: 0})
