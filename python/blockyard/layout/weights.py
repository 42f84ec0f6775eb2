"""`weight_bytes`: the bytes of a transformer's weights, from its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from blockyard.errors import InvalidArgumentError
from blockyard.layout.model import read_config, size_of_dtype

__all__ = ["weight_bytes"]

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_OTHER_SHAPES: Final = ("kv_lora_rank", "quantization_config", "layers_block_type", "mamba_d_state", "encoder_layers")
_PLAIN: Final = ("full_attention", "sliding_attention", "chunked_attention")


def weight_bytes(config: Mapping[str, Any] | str | Path, *, active: bool = False) -> int:
    """Return the bytes of a model's weights, norms and biases aside.

        >>> shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
        >>> weight_bytes(shape | {"num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"})
        16059990016

    Args:
        config: a Hugging Face configuration: a dictionary, or the path of a `config.json` or its folder.
        active: count only the weights that a step with one token reads: of its experts those that a token takes, and
            of the input embedding nothing.

    Raises:
        InvalidArgumentError: the configuration cannot be read, or is not of a plain transformer in one dtype.
    """
    fields = read_config(config)
    other = [name for name in _OTHER_SHAPES if fields.get(name)]
    other += [f"a layer of type {kind!r}" for kind in fields.get("layer_types") or () if kind not in _PLAIN][:1]
    if other:
        raise InvalidArgumentError(f"config has {other[0]}, whose weights are not known")
    hidden, layers, heads = (
        _count(fields, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    head = fields.get("head_dim") or hidden // heads
    kv_heads = fields.get("num_key_value_heads") or heads
    attention = 2 * hidden * head * (heads + kv_heads)
    experts = next((fields[name] for name in _EXPERTS if fields.get(name)), 0)
    if experts:
        taken = fields.get("num_experts_per_tok") or experts
        inner = fields.get("moe_intermediate_size") or _count(fields, "intermediate_size")
        feed = 3 * hidden * inner * (taken if active else experts) + hidden * experts
        shared = fields.get("n_shared_experts") or 0
        feed += 3 * hidden * (fields.get("shared_expert_intermediate_size") or shared * inner)
    else:
        feed = 3 * hidden * _count(fields, "intermediate_size")
    embeddings = 1 if active or fields.get("tie_word_embeddings") else 2
    elements = layers * (attention + feed) + embeddings * hidden * _count(fields, "vocab_size")
    return int(elements) * size_of_dtype(str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"))


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise InvalidArgumentError(f"config has {name} = {value!r:.40}, must be a count of at least 1")
    return value
