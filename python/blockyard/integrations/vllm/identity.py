"""What a worker of vLLM computes its KV cache with, as a digest for the namespace of a store, and which heads it has.

vLLM tells a spec the model's name and dtype, and its workers, while they start, the whole configuration and their KV
caches. So a worker makes the digest and finds its heads, and the scheduler reads both from the memory that they share.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, make_dataclass
from typing import Any, Final, NamedTuple

from vllm.v1.kv_offload.base import CanonicalKVCaches

from blockyard.errors import InvalidArgumentError
from blockyard.stores.adapters.checkpoint import canonical, describe_config, name_weights

__all__ = ["Identity", "current_config", "cut_by_heads", "identify"]

# Everything else in these configurations counts, also what later versions add.
_MODEL: Final = frozenset(
    {
        *("model", "model_weights", "hf_config", "hf_text_config", "hf_config_path", "hf_overrides", "hf_token"),
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "served_model_name", "revision"),
        *("seed", "max_model_len", "spec_target_max_model_len", "enforce_eager", "max_logprobs", "logprobs_mode"),
        *("return_sampling_mask", "use_fp64_gumbel", "enable_trace_replay", "disable_cascade_attn", "config_format"),
        *("generation_config", "override_generation_config", "logits_processors", "pooler_config", "trust_remote_code"),
        *("allowed_local_media_path", "allowed_media_domains", "io_processor_plugin", "renderer_num_workers"),
        *("enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph"),
        *("enable_nccl_comm_suspend", "enable_cumem_allocator", "allow_deprecated_quantization", "multimodal_config"),
        *("enable_prompt_embeds", "is_submodel_config", "code_revision"),
    }
)
_CACHE: Final = frozenset(
    {
        *("block_size", "user_specified_block_size", "_block_size_resolved", "prefix_match_unit", "hash_block_size"),
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "num_gpu_blocks"),
        *("num_cpu_blocks", "enable_prefix_caching", "prefix_caching_hash_algo", "prefix_cache_retention_interval"),
        *("effective_attention_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency", "is_attention_free"),
        *("cache_hit_alignment_tokens", "kv_offloading_size", "kv_offloading_backend", "swap_space", "cpu_offload_gb"),
    }
)
_ATTENTION: Final = frozenset(
    {
        *("flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph"),
        *("sparse_mla_prefill_workspace_factor", "flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size"),
        "flex_attn_kv_block_size",
    }
)
_MULTIMODAL: Final = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method")
_FROM_FILES: Final = {
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache", "sharded_state"),
    *("bitsandbytes", "gguf", "runai_streamer", "runai_streamer_sharded"),
}
_NONE: Final = make_dataclass("_None", ())()


class Identity(NamedTuple):
    """What a worker computes with.

    Args:
        digest: 32 bytes; zeros if vLLM does not show its configuration.
        problem: why it does not cover the weights, as a clause; empty if it does.
    """

    digest: bytes
    problem: str


def current_config() -> Any:
    """Return the configuration that vLLM shows its workers while they start; None elsewhere."""
    # A worker has imported this module; importing it costs seconds.
    read = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", None)
    return None if read is None else read()


def identify(config: Any, layers: Iterable[str]) -> Identity:
    """Return a digest of everything in vLLM's configuration that determines the bytes of a block.

    Args:
        config: vLLM's `VllmConfig`, or None.
        layers: names of the layers in the KV cache.
    """
    if config is None:
        return Identity(bytes(32), "vLLM does not show its model's configuration here")
    model, load = config.model_config, getattr(config, "load_config", None)
    cache, parallel = (getattr(config, f"{name}_config", None) for name in ("cache", "parallel"))
    weights, problem = _weights(model, load)
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    found = {
        "vllm": getattr(sys.modules["vllm"], "__version__", None),
        "model": _model(model),
        # Without a name for the weights, the model's name keeps most of them apart.
        "weights": weights or [model.model, getattr(model, "revision", None)],
        "load": [getattr(load, name, None) for name in ("load_format", "model_loader_extra_config")],
        "cache": _fields(cache, _CACHE),
        "attention": _fields(getattr(config, "attention_config", None), _ATTENTION),
        "backends": _backends(config, layers),
        "device": str(getattr(getattr(config, "device_config", None), "device_type", None)),
        "interleave": [getattr(parallel, f"{kind}_kv_cache_interleave_size", None) for kind in ("dcp", "cp")],
        "more": getattr(config, "additional_config", None),
    }
    if draft is not None:
        drafts, draft_problem = _weights(draft, load)
        found["draft"] = [config.speculative_config.method, _model(draft), drafts or draft.model]
        problem = problem or draft_problem
    if getattr(config, "lora_config", None) is not None:
        problem = problem or "vLLM names a LoRA adapter by its name and path, not by its weights"
    text = json.dumps(canonical(found), sort_keys=True).encode(errors="surrogatepass")
    return Identity(hashlib.sha256(text).digest(), problem)


def _model(model: Any) -> dict[str, Any]:
    described = describe_config(model.hf_config)
    found = _fields(model, _MODEL) | {"config": described}
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None:
        found["multimodal"] = {name: getattr(multimodal, name, None) for name in _MULTIMODAL}
    if "longrope" in json.dumps(described):
        found["max_model_len"] = model.max_model_len  # it decides which factors apply
    return found


def _fields(config: Any, skip: frozenset[str]) -> dict[str, Any]:
    """Return the fields of one of vLLM's configurations, except those of a set."""
    return {part.name: getattr(config, part.name) for part in fields(config or _NONE) if part.name not in skip}


def _weights(model: Any, load: Any) -> tuple[str, str]:
    """Return the name of a model's weights, or an empty one and why."""
    load_format = str(getattr(load, "load_format", "auto"))
    if load_format not in _FROM_FILES:
        return "", f"load_format is {load_format!r}, so the weights are not those of the model's files"
    if not getattr(model, "model_weights", ""):
        found = name_weights(model.model, revision=model.revision, cache_dir=getattr(load, "download_dir", None))
        if found:
            return found, ""
    return "", f"the weights of {model.model!r} are in no folder and not in the hub's cache"


def _backends(config: Any, layers: Iterable[str]) -> list[str]:
    """Return the attention backends of the layers, which decide how a block's bytes lie."""
    found = getattr(getattr(config, "compilation_config", None), "static_forward_context", {})
    parts = (found.get(name) for name in layers)
    return sorted({f"{type(part).__name__} {canonical(getattr(part, 'attn_backend', None))}" for part in parts})


def cut_by_heads(kv_caches: CanonicalKVCaches, layers: Sequence[Sequence[str]], block_bytes: int) -> tuple[int, int]:
    """Return the bytes of a piece of a worker's blocks, and its shard of the heads, see `HeadShards`.

    vLLM derives, for each layer, which bytes of a worker's page belong where in a page of all heads, and whether such a
    page is the same at every tensor-parallel size.

    Args:
        kv_caches: from vLLM.
        layers: names of the layers of each group.
        block_bytes: bytes per block of all layers.

    Raises:
        InvalidArgumentError: blocks have bytes of this worker alone; the message names the first layer that has them.
    """
    widths = [cache.page_size_bytes for cache in kv_caches.tensors]
    if sum(widths) != block_bytes:
        raise InvalidArgumentError(f"blocks have {block_bytes} bytes, their layers {sum(widths)}")
    found: dict[tuple[int, int, int], str] = {}
    for names, refs in zip(layers, kv_caches.group_data_refs, strict=True):
        for name, ref in zip(names, refs, strict=False):
            mapping = getattr(ref, "mapping", None)
            if mapping is None or not mapping.parallelism_agnostic:
                raise InvalidArgumentError(f"vLLM cannot tell which bytes of {name} belong to which heads")
            if ref.page_size_bytes != widths[ref.tensor_idx]:
                raise InvalidArgumentError(f"{name} uses {ref.page_size_bytes} bytes of {widths[ref.tensor_idx]}")
            found.setdefault(_pieces(mapping, name), name)
    if all(count == 1 for _, _, count in found):
        return block_bytes, 0
    if len(found) > 1:
        raise InvalidArgumentError(f"these layers share their heads in unequal ways: {', '.join(found.values())}")
    ((piece, shard, _),) = found
    return piece, shard


def _pieces(mapping: Any, name: str) -> tuple[int, int, int]:
    """Return the bytes of a page's pieces, this worker's shard, and the number of shards."""
    pieces: list[list[int]] = []
    for run in mapping.runs:
        for index in range(run.num_fragments):
            local = run.local_offset + index * run.local_stride
            place = run.canonical_offset + index * run.canonical_stride
            if pieces and [sum(pieces[-1][::2]), pieces[-1][1] + pieces[-1][2]] == [local, place]:
                pieces[-1][2] += run.fragment_size
            else:
                pieces.append([local, place, run.fragment_size])
    size = pieces[0][2]
    count = mapping.canonical_page_size_bytes // mapping.local_page_size_bytes
    shard = pieces[0][1] // size
    if pieces != [[index * size, (index * count + shard) * size, size] for index in range(len(pieces))] or (
        len(pieces) * size != mapping.local_page_size_bytes
    ):
        raise InvalidArgumentError(f"the heads of {name} do not lie side by side")
    return size, shard, count
