"""What SGLang computes its KV cache with, as a digest for the namespace of a store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from blockyard.stores.adapters.checkpoint import canonical, describe_config, name_weights

__all__ = ["current_server_args", "identify"]

# Of several hundred arguments, those that change what a block holds. The model's configuration has `--context-length`
# and `--json-model-override-args`.
_SETTINGS: Final = (
    *("dtype", "quantization", "kv_cache_dtype", "qsa_indexer_dtype", "mamba_ssm_dtype", "load_format", "device"),
    *("model_loader_extra_config", "model_impl", "modelopt_quant", "modelopt_checkpoint_restore_path"),
    *("quantize_and_serve", "rl_quant_profile", "rl_on_policy_target", "custom_weight_loader", "kt_method"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "dsa_prefill_backend"),
    *("dsa_decode_backend", "mamba_backend", "linear_attn_backend", "moe_runner_backend", "is_embedding"),
    *("language_only", "language_model_only", "encoder_only", "mm_process_config", "image_processor_backend"),
    *("disable_fast_image_processor", "enable_precise_embedding_interpolation", "dllm_algorithm"),
    *("dllm_algorithm_config", "enable_int8_mamba_checkpoint", "enable_mamba_cache_stochastic_rounding"),
    *("enable_page_major_kv_layout", "enable_linear_replayssm", "speculative_algorithm"),
    *("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype", "prefill_kv_cache_dequant_dtype"),
)
_FROM_FILES: Final = {
    *("auto", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "sharded_state", "presharded"),
    *("gguf", "expert_pack", "bitsandbytes", "mistral", "layered", "runai_streamer"),
}


def current_server_args() -> Any:
    """Return the arguments of the server that runs in this process; None if there is none."""
    try:
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 (imports much)

        return get_server_args()
    except (ImportError, ValueError):
        return None


def identify(server_args: Any) -> tuple[str, str]:
    """Return a digest of everything in a server's arguments that determines the bytes of a page.

    Args:
        server_args: SGLang's, or None.

    Returns:
        The digest, empty if SGLang does not show its model's configuration; and why the digest does not cover the
        weights, as a clause, empty if it does.
    """
    if server_args is None:
        return "", "SGLang does not show its arguments here"
    try:
        from sglang.srt.arg_groups.overrides import model_config_of  # noqa: PLC0415 (imports much)

        config = model_config_of(server_args)
    except (ImportError, AttributeError, ValueError, TypeError, OSError) as error:
        return "", f"SGLang does not show its model's configuration: {error}"
    weights, problem = _weights(server_args)
    scales = server_args.quantization_param_path
    found = {
        "settings": {name: getattr(server_args, name, None) for name in _SETTINGS},
        "config": describe_config(config.hf_config),
        "dtype": config.dtype,
        "weights": weights,
        "scales": hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales else "",
    }
    text = json.dumps(canonical(found), sort_keys=True).encode(errors="surrogatepass")
    return hashlib.sha256(text).hexdigest(), problem


def _weights(server_args: Any) -> tuple[list[str], str]:
    """Return the names of the weights, of the model and of one that drafts; and what they do not cover, as a clause."""
    problem = ""
    names = []
    for part in ("", "speculative_draft_"):
        path = getattr(server_args, f"{part}model_path", None)
        if path is None:
            continue
        revision = getattr(server_args, f"{part}model_revision" if part else "revision", None)
        load_format = getattr(server_args, f"{part}load_format", None) or server_args.load_format
        found = name_weights(path, revision=revision, cache_dir=server_args.download_dir)
        if load_format not in _FROM_FILES:
            problem = problem or f"load_format is {load_format!r}, so the weights are not those of the model's files"
        elif not found:
            problem = problem or f"the weights of {path!r} are in no folder and not in the hub's cache"
        # Without a name for the weights, the model's name keeps most of them apart.
        names.append(found or str(path))
    if getattr(server_args, "kt_weight_path", None) or getattr(server_args, "uno_lora_path", None):
        problem = problem or "kt_weight_path or uno_lora_path names more weights"
    if getattr(server_args, "checkpoint_engine_wait_weights_before_ready", False):
        problem = problem or "checkpoint_engine_wait_weights_before_ready takes the weights from another process"
    if getattr(server_args, "enable_lora", None) or getattr(server_args, "lora_paths", None):
        problem = problem or "SGLang names a LoRA adapter by its name and path, not by its weights"
    return names, problem
