"""Tiny checkpoints on disk, and configurations of vLLM over them."""

from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import LlamaConfig

COMMIT = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"


def tensors(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    shapes = {"embed": (64, 256), "layers.0.q_proj": (256, 256), "layers.0.norm": (64,), "lm_head": (64, 256)}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def checkpoint(folder: Path, seed: int = 0, **changed: NDArray[np.float32]) -> Path:
    """Write a checkpoint whose weights a seed draws."""
    folder.mkdir(parents=True, exist_ok=True)
    llama(max_position_embeddings=4096).save_pretrained(folder)
    save_file(tensors(seed) | changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def snapshot(cache: Path, seed: int = 0, commit: str = COMMIT) -> Path:
    """Put a checkpoint into a cache of the hub as the repository `an/llm`; returns its folder."""
    repository = cache / "models--an--llm"
    folder = repository / "snapshots" / commit
    checkpoint(folder, seed)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / f"{commit}-{number}"
        file.rename(blob)
        file.symlink_to(blob)
    return folder


def llama(**change: Any) -> Any:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    return LlamaConfig(**({"architectures": ["LlamaForCausalLM"]} | shape | change))


def vllm_config(folder: Path | str, change: dict[str, Any] | None = None) -> Any:
    """Return what vLLM shows its workers of a model in a folder.

    Args:
        folder: the model.
        change: fields to replace, by path: `"model_config.dtype"`, or `"hf.rope_parameters"` of the model's own
            configuration.
    """
    parts: dict[str, dict[str, Any]] = {
        "hf": {},
        "model_config": {
            "model": str(folder),
            "revision": None,
            "dtype": "torch.float16",
            "quantization": None,
            "seed": 0,
            "tokenizer": str(folder),
            "max_model_len": 2048,
            "disable_sliding_window": False,
            "model_weights": "",
            "served_model_name": "one",
            "quantization_config": None,
            "enforce_eager": False,
        },
        "load_config": {"load_format": "auto", "download_dir": None, "model_loader_extra_config": {}},
        "cache_config": {"cache_dtype": "auto", "gpu_memory_utilization": 0.9, "num_gpu_blocks": 7, "block_size": 16},
        "attention_config": {"use_prefill_query_quantization": False},
        "parallel_config": {"dcp_kv_cache_interleave_size": 1, "cp_kv_cache_interleave_size": 1},
        "device_config": {"device_type": "cuda"},
        "compilation_config": {"static_forward_context": {"a": _layer("FlashAttention")}},
        "": {"lora_config": None, "speculative_config": None, "additional_config": {}},
    }
    for path, value in (change or {}).items():
        part, _, name = path.rpartition(".")
        parts[part][name] = value
    parts["model_config"]["hf_config"] = llama(**parts.pop("hf"))
    rest = parts.pop("")
    return _record({name: _record(values) for name, values in parts.items()} | rest)


def _layer(backend: str) -> Any:
    return _record({"attn_backend": type(backend, (), {})})


def with_backend(backend: str) -> dict[str, Any]:
    """Return a change that gives the layer another attention backend."""
    return {"compilation_config.static_forward_context": {"a": _layer(backend)}}


def _record(values: dict[str, Any]) -> Any:
    return make_dataclass("Record", [(name, Any, field(default=None)) for name in values])(**values)
