"""The demo's default model: a small Llama with seeded random weights and byte tokens.

Its embeddings are untied and its weights ten times wider than usual, so its tokens depend on the keys and values of
every block. A model of that size with usual weights mostly repeats itself, and reading wrong blocks would go unnoticed.
"""

# Some methods of transformers have no annotations.
# mypy: allow-untyped-calls

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BYTE_VOCAB_SIZE = 259
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 256, 257, 258


def demo_config(
    *,
    num_layers: int = 4,
    hidden_size: int = 256,
    intermediate_size: int = 1024,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    max_position_embeddings: int = 32768,
) -> LlamaConfig:
    """Describe the demo's model.

    Args:
        num_layers: number of decoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated feed-forward part.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; fewer than `num_heads` means grouped-query attention.
        max_position_embeddings: maximum length of a sequence, in tokens.

    Returns:
        The configuration; 4.1 million parameters with the defaults.
    """
    return LlamaConfig(
        vocab_size=BYTE_VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=PAD_TOKEN_ID,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )


def demo_model(
    config: LlamaConfig | None = None, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Build the demo's model; torch's random state does not change.

    Args:
        config: the model's shape; `demo_config()` if None.
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
        model = LlamaForCausalLM(config or demo_config())
    model.eval()
    model.to(device, dtype)  # type: ignore[arg-type]
    return model
