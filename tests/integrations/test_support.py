"""Which models are refused, and why; and that those served are left as they were."""

import pytest
import torch
import transformers

from blockyard.errors import UnsupportedModelError
from blockyard.integrations.transformers.model import PagedModel
from blockyard.integrations.transformers.support import cache_shape, paged_copy, share_weights

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def tiny(family, **options):
    config = getattr(transformers, f"{family}Config")(**SHAPE | options)
    torch.manual_seed(0)
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("Gemma2", {"head_dim": 8}, "layers of kind full_attention, sliding_attention"),
        ("Gemma2", {"head_dim": 8, "layer_types": ["full_attention"] * 2}, "soft-capping"),
        ("Llama4Text", {"head_dim": 8, "intermediate_size_mlp": 48}, "layers of kind chunked_attention"),
        ("Falcon", {}, "does not use transformers' attention interface"),
        ("Mamba", {}, "MambaForCausalLM"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type dynamic"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(family, options, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        PagedModel(tiny(family, **options), block_size=4)


def test_encoder_decoders_are_refused():
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        paged_copy(transformers.T5ForConditionalGeneration(config))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no language-model head"):
        paged_copy(transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)))


def test_keys_and_values_of_different_size_are_refused():
    model = tiny("DeepseekV3", num_key_value_heads=4)
    with pytest.raises(UnsupportedModelError, match="keys of 192 and values of 128"):
        PagedModel(model, block_size=4)


def test_attention_in_both_directions_is_found_out():
    config = transformers.BertConfig(**SHAPE)
    with pytest.raises(UnsupportedModelError, match="gives other logits when paged"):
        PagedModel(transformers.BertLMHeadModel(config), block_size=4)


def test_the_copy_shares_every_tensor_and_nothing_else():
    model = tiny("Llama")
    shared = share_weights(model.train())
    assert model.training
    assert not shared.training
    assert all(a is b for a, b in zip(model.parameters(), shared.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), shared.buffers(), strict=True))
    assert shared.config is not model.config
    assert shared.model.layers[0].self_attn is not model.model.layers[0].self_attn


def test_the_cache_has_the_shape_that_the_layers_show():
    shape = cache_shape(paged_copy(tiny("Qwen3", head_dim=16)))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_size, shape.dtype) == (2, 2, 16, "float32")
