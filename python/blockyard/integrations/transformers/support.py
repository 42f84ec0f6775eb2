"""Determines whether a Hugging Face model can be served from a paged cache, by probing the model itself.

The configuration rules out models known not to work. Then the model runs once over a few tokens, and every attention
layer reports the shapes of its keys and values, which define the cache.
"""

# transformers leaves part of its methods without annotations.
# mypy: allow-untyped-calls

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from blockyard.errors import UnsupportedModelError
from blockyard.integrations.transformers.attention import ATTENTION_NAME, LayerCall

# Their frequencies depend on the longest sequence of the batch, so batching would change results.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class CacheShape:
    """What the layers of a model store in a cache.

    Attributes:
        num_layers: attention layers.
        num_kv_heads: heads of keys and values.
        head_size: elements of one head.
        dtype: torch's name of the dtype, as `float32`.
        window: tokens that one query sees, itself included; None for all before it.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    window: int | None


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and configuration, but not its tensors.

    The copy can get another attention function while the original stays usable.

    Args:
        model: any model.

    Returns:
        A copy in evaluation mode whose parameters and buffers are the original's.
    """
    tensors = [*model.parameters(), *model.buffers()]
    shared = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    shared.eval()
    return shared


def paged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Check a model's class and configuration, and return a copy that calls the paged attention function.

    Args:
        model: a decoder-only model with a language-model head.

    Returns:
        A copy that shares the weights.

    Raises:
        UnsupportedModelError: the model cannot be served; the message says why.
    """
    require_decoder(model)
    reason = _layers_reason(model)
    if reason:
        raise UnsupportedModelError(f"{type(model).__name__} {reason}")
    shared = share_weights(model)
    shared.set_attn_implementation(ATTENTION_NAME)
    for module in shared.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != ATTENTION_NAME:  # noqa: SLF001
            raise UnsupportedModelError(f"{type(module).__name__} does not take its attention from the interface")
    return shared


def cache_shape(paged: PreTrainedModel) -> CacheShape:
    """Run a model over a few tokens and record what its layers would cache.

    Args:
        paged: from `paged_copy`.

    Returns:
        The shape that all its layers share.

    Raises:
        UnsupportedModelError: layers differ, keep no keys and values, or need features that paged attention does not
            support.
    """
    recorder = _Recorder()
    run_model(paged, torch.tensor([[0, 0], [0, 1]]), torch.tensor([1]), use_cache=False, blockyard_step=recorder)
    name = type(paged).__name__
    layers = paged.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(recorder.seen) != list(range(layers)):
        raise UnsupportedModelError(
            f"{name} has {layers} layers, {len(recorder.seen)} of them called the attention interface: "
            "layers with other state are not supported yet"
        )
    shapes = set(recorder.seen.values())
    if len(shapes) != 1:
        raise UnsupportedModelError(f"{name} has layers with {len(shapes)} different shapes or windows")
    heads, key_size, value_size, dtype, window = shapes.pop()
    if key_size != value_size:
        raise UnsupportedModelError(f"{name} has keys of {key_size} and values of {value_size} elements per head")
    return CacheShape(layers, heads, key_size, dtype, window)


def run_model(
    model: PreTrainedModel, tokens: torch.Tensor, logits_indices: torch.Tensor, **options: object
) -> torch.Tensor:
    """Call a model for one step.

    Args:
        model: from `paged_copy` or `share_weights`.
        tokens: ids and their positions, int64 `[2, tokens]`, any device.
        logits_indices: tokens whose logits are returned, int64 `[n]`, any device.
        options: further arguments of the model: the step for its attention layers, or its cache.

    Returns:
        float32 `[n, vocab]` on the model's device.
    """
    tokens, logits_indices = tokens.to(model.device), logits_indices.to(model.device)
    # Logits of all tokens can be larger than the cache, so request only a few if the model supports it.
    wanted = {"logits_to_keep": logits_indices} if accepts(model, "logits_to_keep") else {}
    with torch.inference_mode():
        output = model(input_ids=tokens[:1], position_ids=tokens[1:], **options, **wanted)
        logits: torch.Tensor = output.logits[0] if wanted else output.logits[0, logits_indices]
        return logits.float()


def accepts(model: PreTrainedModel, argument: str) -> bool:
    """Return whether a model's `forward` names an argument."""
    return argument in _parameters(type(model).forward)


@functools.cache
def _parameters(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class _Recorder:
    """A stand-in for a step: records shapes, and computes plain causal attention."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int, str, int | None]] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `AttentionStep`."""
        layer, query, key, value, scaling, window = call
        dtype = str(key.dtype).removeprefix("torch.")
        self.seen[layer] = (key.shape[1], key.shape[3], value.shape[3], dtype, window)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)


def require_decoder(model: PreTrainedModel) -> None:
    """Check that a model is decoder-only, and that its tokens depend on nothing but the tokens before.

    Raises:
        UnsupportedModelError: it is not; the message says why.
    """
    if isinstance(model, str):
        load = f"AutoModelForCausalLM.from_pretrained({model!r})"
        raise UnsupportedModelError(f"model is {model!r}, must be a loaded model: {load}")
    reason = _decoder_reason(model)
    if reason:
        raise UnsupportedModelError(f"{type(model).__name__} {reason}")


def _decoder_reason(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder model, must be decoder-only"
    if not getattr(config, "is_causal", True):
        return "attends in both directions"
    rope = getattr(config, "rope_parameters", None) or {}
    types = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    for kind in BATCH_DEPENDENT_ROPE:
        if kind in types:
            return f"has rotary embeddings of type {kind}, which depend on the longest sequence of a batch"
    if model.get_output_embeddings() is None:
        return "has no language-model head"
    return None


def _layers_reason(model: PreTrainedModel) -> str | None:
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if kinds - {"full_attention"} and kinds != {"sliding_attention"}:
        return f"has layers of kind {', '.join(sorted(kinds))}, a flat batch supports only one kind of attention"
    if getattr(model, "_is_stateful", False):
        return "keeps recurrent state, which a flat batch does not support"
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):  # noqa: SLF001
        return "does not use transformers' attention interface, which paged attention plugs into"
    return None
