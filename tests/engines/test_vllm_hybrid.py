"""Hybrid models in vLLM on a CPU: blocks of each cache group come from host memory and, after a kill, from a store."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import PYTHON, SPEC, Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="ENGINES_PYTHON does not name a Python with vLLM; make test-engines does"),
]

WINDOWS = {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 64}
GEMMA = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "query_pre_attn_scalar": 32}
GPT_OSS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2}
STATES = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 256,  # so that a block of attention with the bytes of a state has few tokens
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"model": {"model_type": "gemma3_text", **WINDOWS, **GEMMA}, "engine": {}},
    "gpt-oss": {"model": {"model_type": "gpt_oss", **WINDOWS, **GPT_OSS}, "engine": {}},
    "qwen3.5": {
        "model": {"model_type": "qwen3_5_text", **STATES},
        "engine": {"dtype": "bfloat16", "mamba_cache_mode": "align"},
    },
}
GROUPS = {"gemma3": 4, "gpt-oss": 2, "qwen3.5": 4}
ASKED = {"requests": 3, "length": 320, "tokens": 12}


def engine(name: str, path: Path, extra: dict[str, Any], **more: Any) -> Engine:
    options = MODELS[name]
    blocks = {"num_gpu_blocks_override": 100, **options["engine"]}
    return Engine(path / "model", path / "log", extra=extra, model=options["model"], engine=blocks, **more)


def loads(round_: Any) -> list[int]:
    """The blocks loaded by each group."""
    return [count for _, count in sorted(round_["loads"].items())]


@pytest.mark.parametrize("name", MODELS)
def test_each_groups_blocks_come_from_the_host_and_after_a_kill_from_the_store(name: str, tmp_path: Path):
    url = f"file://{tmp_path}/store?size=64MiB"
    extra = {**SPEC, "prefix_store": url, "weights_fixed": True, "prefetch_timeout_base": 60}
    with closing(engine(name, tmp_path, extra)) as first:
        cold = first.serve(**ASKED, clear="device")
        from_host = first.serve(**ASKED, clear="device")
        broken = first.serve(**ASKED, sabotage="loads")
        first.process.kill()
    assert cold["found"] == {"device": 0, "host": 0, "store": 0}
    assert cold["external"]["written"] > 0
    assert from_host["tokens"] == cold["tokens"]
    assert broken["tokens"] != cold["tokens"]
    with closing(engine(name, tmp_path, extra)) as again:
        from_store = again.serve(**ASKED)
    assert from_store["tokens"] == cold["tokens"]
    assert from_store["external"]["loaded"] > 0
    for found in (from_host, from_store):
        assert len(loads(found)) == GROUPS[name]
        assert min(loads(found)) >= ASKED["requests"]
