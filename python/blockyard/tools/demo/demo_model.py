"""The demo's own models, with seeded random weights and byte tokens. The default is a small Llama.

Their embeddings are untied and their weights ten times wider than usual, so their tokens depend on every block. A model
of that size with usual weights mostly repeats itself, and reading wrong blocks would go unnoticed.
"""

# Some methods of transformers have no annotations.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

BYTE_VOCAB_SIZE = 259
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 256, 257, 258
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": BYTE_VOCAB_SIZE,
    "max_position_embeddings": 32768,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
_SMALL: Final[dict[str, Any]] = _COMMON | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def demo_config(
    *, num_layers: int = 4, hidden_size: int = 256, num_heads: int = 8, num_kv_heads: int = 4, **others: Any
) -> LlamaConfig:
    """Describe the demo's Llama, of 4.1 million parameters with the defaults; `others` are `LlamaConfig`'s."""
    shape = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": 1024,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
    return LlamaConfig(**_COMMON | shape | others)


DEMO_CONFIGS: Final[dict[str, Callable[[], PreTrainedConfig]]] = {
    "llama": demo_config,
    "gpt-oss": lambda: GptOssConfig(
        **_SMALL | {"max_position_embeddings": 131072}, sliding_window=64, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(
        **_SMALL,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}
"""The models that `blockyard demo --model` knows by name: full attention, windows and sinks, gated delta rule."""


def demo_model(
    config: PreTrainedConfig | None = None, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build a model of the demo; torch's random state does not change.

    Args:
        config: the model's kind and shape; `demo_config()` if None.
        seed: seed of the weights.
        device: device of the model. The weights are drawn on the CPU, so they are the same on every device.
        dtype: dtype of weights, activations and KV. The weights are drawn as float32 and then converted.

    Returns:
        The model, in evaluation mode.

    Example:
        >>> model = demo_model()
        >>> sum(weight.numel() for weight in model.parameters())
        4067072
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config or demo_config())
    model.eval()
    model.to(device, dtype)  # type: ignore[arg-type]
    return model
