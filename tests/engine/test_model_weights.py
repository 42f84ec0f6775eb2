"""`weight_bytes`: published sizes of models, and the configurations that it does not know."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.layout.weights import weight_bytes

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
QWEN_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(("config", "parameters", "active"), [(LLAMA, 8.03e9, 7.50e9), (QWEN_30B_A3B, 30.5e9, 3.04e9)])
def test_the_weights_are_those_of_the_published_models(config: dict[str, Any], parameters: float, active: float):
    assert weight_bytes(config) == pytest.approx(2 * parameters, rel=0.01)
    assert weight_bytes(config, active=True) == pytest.approx(2 * active, rel=0.01)


def test_tied_embeddings_count_once_and_the_dtype_counts(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"tie_word_embeddings": True, "torch_dtype": "float32"}), "utf-8")
    assert weight_bytes(path) == 2 * (weight_bytes(LLAMA) - 2 * 4096 * 128256)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kv_lora_rank", 512, "kv_lora_rank, whose weights are not known"),
        ("quantization_config", {"bits": 4}, "quantization_config, whose weights"),
        ("layer_types", ["full_attention", "linear_attention"], "a layer of type 'linear_attention'"),
        ("vocab_size", None, "vocab_size = None, must be a count"),
        ("torch_dtype", "int4", "dtype is 'int4'"),
    ],
)
def test_other_weights_are_refused_by_name(field: str, value: object, said: str):
    with pytest.raises(InvalidArgumentError, match=said):
        weight_bytes(LLAMA | {field: value})
