"""Tiny models of Hugging Face with random weights, one for each kind of cache. All compute in float64.

Their norms, routers and states are computed in float32 nevertheless, whatever the dtype of the weights.
"""

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 128
WINDOW, CHUNK = 9, 12
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
GDN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTER = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
SHARED = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4}


def tiny_model(name: str) -> PreTrainedModel:
    """Return the model of that name, always with the same weights."""
    torch.manual_seed(0)
    model = TINY_MODELS[name]()
    model.double().eval()
    model.set_experts_implementation("eager")  # torch's grouped products take no float64
    return model


def _make(family: str, head_dim: int | None = 8, **options: object) -> PreTrainedModel:
    heads = {} if head_dim is None else {"head_dim": head_dim}
    config = getattr(transformers, f"{family}Config")(**SHAPE | heads | options)
    model: PreTrainedModel = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    return model


TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Mistral": lambda: _make("Mistral", sliding_window=WINDOW),
    "gpt-oss": lambda: _make("GptOss", sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "Gemma 3": lambda: _make(
        "Gemma3Text",
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
    ),
    "Llama 4": lambda: _make(
        "Llama4Text",
        attention_chunk_size=CHUNK,
        no_rope_layer_interval=2,
        intermediate_size_mlp=48,
        num_local_experts=2,
    ),
    "Qwen3.5": lambda: _make("Qwen3_5Text", 16, layer_types=["linear_attention", "full_attention"], **GDN),
    "Jamba": lambda: _make(
        "Jamba", None, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4, mamba_dt_rank=4
    ),
    "LFM2": lambda: _make("Lfm2", None, layer_types=["conv", "full_attention"]),
    "DeepSeek-V3": lambda: _make(
        "DeepseekV3", None, num_key_value_heads=4, first_k_dense_replace=1, **LATENT, **ROUTER
    ),
    "Gemma 3n": lambda: _make(
        "Gemma3nText",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        **SHARED,
    ),
    "Falcon-H1": lambda: _make(
        "FalconH1",
        num_hidden_layers=1,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
}
