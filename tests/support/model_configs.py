"""Configurations of published models, with the bytes that their caches take."""

from __future__ import annotations

from typing import Any

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
MIB = 1 << 20
LONG = 1 << 20  # tokens; longer than every window


def attention(layers: int, heads: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": size,
    } | more


def mixed(full: int, other: int, kind: str) -> dict[str, Any]:
    return {"layer_types": [kind] * other + [FULL] * full, "num_hidden_layers": full + other}


def gdn(full: int, states: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    fields = dict(zip(names, (16, value_heads, 128, 128), strict=True))
    return (
        attention(0, kv_heads, 256, model_type="qwen3_next")
        | mixed(full, states, LINEAR)
        | fields
        | {"linear_conv_kernel_dim": 4}
    )


def mamba(heads: int, size: int, state: int, groups: int) -> dict[str, Any]:
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_d_state": state,
        "mamba_n_groups": groups,
        "mamba_d_conv": 4,
    }


GPT_OSS = attention(0, 8, 64) | mixed(18, 18, SLIDING) | {"sliding_window": 128, "model_type": "gpt_oss"}
MIMO = attention(48, 4, 192, model_type="mimo_v2_flash") | {
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
}
MIMO |= {"swa_v_head_dim": 128, "sliding_window": 128, "hybrid_layer_pattern": [0] * 9 + [1] * 39}
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}
KIMI = LATENT | {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
}
KIMI["linear_attn_config"] |= {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
V32 = LATENT | {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_n_heads": 64,
}
GEMMA_3N = attention(35, 2, 256, model_type="gemma3n_text", sliding_window=512, num_kv_shared_layers=15)
GEMMA_3N["layer_types"] = ([SLIDING] * 4 + [FULL]) * 7
NEMOTRON = attention(
    52,
    8,
    128,
    model_type="nemotron_h",
    hybrid_override_pattern="M-" * 24 + "*" * 4,
    mamba_num_heads=128,
    mamba_head_dim=64,
)
NEMOTRON |= {"ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
JAMBA = attention(
    32, 8, 128, model_type="jamba", attn_layer_period=8, attn_layer_offset=4, hidden_size=4096, mamba_d_state=16
)
JAMBA |= {"mamba_d_conv": 4, "mamba_expand": 2}
WHISPER = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "decoder_layers": 32,
    "decoder_attention_heads": 20,
    "d_model": 1280,
}
LLAMA = attention(32, 8, 128, model_type="llama")
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
V4 = {"model_type": "deepseek_v4", "layer_types": [SLIDING] * 2 + [CSA, HCA] * 20 + [CSA], "head_dim": 512}
V4 |= {"compress_rates": {CSA: 4, HCA: 128}, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128}

TABLE = {
    # KiB per token that grow, MiB of full windows or chunks, MiB of states
    "gpt-oss-20b": (GPT_OSS | mixed(12, 12, SLIDING), 24.0, 3.0, 0.0),
    "gpt-oss-120b": (GPT_OSS, 36.0, 4.5, 0.0),
    "gpt-oss-120b with EAGLE3": (GPT_OSS | mixed(19, 18, SLIDING), 38.0, 4.5, 0.0),
    "Gemma-3-27B": (attention(62, 16, 128, sliding_window=1024, model_type="gemma3_text"), 80.0, 416.0, 0.0),
    "Gemma-3n-E4B": (GEMMA_3N, 8.0, 16.0, 0.0),
    "Llama-4-Scout": (
        attention(48, 8, 128, model_type="llama4_text", attention_chunk_size=8192) | mixed(12, 36, CHUNKED),
        48.0,
        1152.0,
        0.0,
    ),
    "Command-A": (
        attention(64, 8, 128, model_type="cohere2", sliding_window=4096, sliding_window_pattern=4),
        64.0,
        768.0,
        0.0,
    ),
    "MiMo-V2-Flash": (MIMO, 22.5, 24.4, 0.0),
    "MiMo-V2-Flash with MTP": (
        MIMO | {"num_hidden_layers": 53, "hybrid_layer_pattern": [0] * 9 + [1] * 44},
        22.5,
        27.5,
        0.0,
    ),
    "Qwen3-Next-80B": (gdn(12, 36, 2, 32), 24.0, 0.0, 73.7),
    "Qwen3.5-35B-A3B": (gdn(10, 30, 2, 32), 20.0, 0.0, 61.4),
    "Qwen3.5-9B": (gdn(8, 24, 4, 32), 32.0, 0.0, 49.1),
    "Qwen3.8-27B": (gdn(16, 48, 4, 48), 64.0, 0.0, 146.8),
    "Kimi-Linear-48B": (KIMI, 7.9, 0.0, 41.4),
    "MiniMax-Text-01": (
        attention(80, 8, 128, model_type="minimax_text_01")
        | {"num_attention_heads": 64, "attn_type_list": ([0] * 7 + [1]) * 10},
        40.0,
        0.0,
        280.0,
    ),
    "Jamba-1.5-mini": (JAMBA, 16.0, 0.0, 15.3),
    "Bamba-9B": (
        attention(32, 8, 128, model_type="bamba", attn_layer_indices=[9, 18, 27]) | mamba(128, 64, 128, 1),
        12.0,
        0.0,
        59.4,
    ),
    "Granite-4.0-H-small": (
        attention(0, 8, 128, model_type="granitemoehybrid") | mixed(4, 36, "mamba") | mamba(128, 64, 128, 1),
        16.0,
        0.0,
        73.7,
    ),
    "Nemotron-H-8B": (NEMOTRON, 16.0, 0.0, 49.4),
    "Falcon-H1-7B": (attention(44, 2, 128, model_type="falcon_h1") | mamba(24, 128, 256, 1), 44.0, 0.0, 66.9),
    "LFM2-1.2B": (
        attention(0, 8, 64, model_type="lfm2", conv_L_cache=3, hidden_size=2048) | mixed(6, 10, "conv"),
        12.0,
        0.0,
        0.1,
    ),
    "Whisper-large-v3": (WHISPER | {"max_source_positions": 1500}, 160.0, 0.0, 0.0),
    "DeepSeek-V3.2": (V32, 76.5, 0.0, 0.0),
    # Entries of 4 and of 128 tokens; windows, and what the compressors have not compressed yet.
    "DeepSeek-V4-Flash": (V4, 6.1, 5.4 + 11.6, 0.0),
}
