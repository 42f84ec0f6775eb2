"""A rank's share of a model: what is cut, what stays whole, and that the shares add up to the model."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from blockyard.errors import InvalidArgumentError, UnsupportedModelError
from blockyard.integrations.transformers.sharding import RowParallelLinear, require_divisible, shard_model
from blockyard.tools.demo.demo_model import demo_config, demo_model

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}


@pytest.fixture(scope="module")
def model():
    return demo_model(demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2))


def test_shares_have_part_of_each_cut_layer_and_the_model_stays_whole(model):
    share = shard_model(model, 1, 2)
    layer, whole = share.model.layers[1], model.model.layers[1]
    assert torch.equal(layer.self_attn.k_proj.weight, whole.self_attn.k_proj.weight[16:])
    assert torch.equal(layer.mlp.down_proj.weight, whole.mlp.down_proj.weight[:, 48:])
    assert isinstance(layer.self_attn.o_proj, RowParallelLinear)
    assert share.lm_head.weight is model.lm_head.weight
    assert type(whole.self_attn.o_proj) is torch.nn.Linear
    assert whole.self_attn.k_proj.weight.shape == (32, 64)


def test_outputs_of_row_parallel_shares_add_up_with_the_bias_once():
    torch.manual_seed(0)
    qwen = Qwen2ForCausalLM(Qwen2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2)).eval()
    whole = qwen.model.layers[0].mlp
    features = torch.randn(5, 32)
    parts = [shard_model(qwen, rank, 2).model.layers[0] for rank in range(2)]
    summed = sum(part.mlp(features) for part in parts)
    torch.testing.assert_close(summed, whole(features))
    biased = torch.nn.Linear(6, 4)
    shares = [
        RowParallelLinear(torch.nn.Parameter(biased.weight[:, part].detach().clone()), biased.bias)
        for part in (slice(0, 3), slice(3, 6))
    ]
    given = torch.randn(2, 6)
    shares[0].all_reduce = lambda out: out.add_(torch.nn.functional.linear(given[:, 3:], shares[1].weight))
    torch.testing.assert_close(shares[0](given[:, :3]), biased(given))
    assert torch.equal(parts[1].self_attn.q_proj.bias, qwen.model.layers[0].self_attn.q_proj.bias[16:])


@pytest.mark.parametrize("size", [0, 3, 4])
def test_ranks_that_cannot_share_the_heads_are_refused_with_the_numbers(model, size):
    with pytest.raises(InvalidArgumentError, match=f"tensor_parallel_size is {size}, must divide the 2 KV heads"):
        require_divisible(model, size)


def test_models_whose_layers_cannot_be_cut_are_refused():
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel declares no tp_plan"):
        shard_model(gpt, 0, 2)
    phi = Phi3ForCausalLM(Phi3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0))
    with pytest.raises(UnsupportedModelError, match="Phi3ForCausalLM"):
        shard_model(phi, 0, 2)
    odd = demo_model(demo_config(num_layers=1, hidden_size=64, intermediate_size=97, num_heads=4, num_kv_heads=2))
    with pytest.raises(UnsupportedModelError, match=r"mlp\.gate_proj with 97 features, 2 ranks cannot share them"):
        shard_model(odd, 0, 2)
