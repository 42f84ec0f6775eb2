"""The demo's model: seeded, and dependent on everything it is given."""

import torch

from blockyard.tools.demo.demo_model import BYTE_VOCAB_SIZE, demo_config, demo_model

SMALL = demo_config(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)


def test_it_has_about_four_million_parameters():
    assert 3.5e6 < sum(weight.numel() for weight in demo_model().parameters()) < 4.5e6


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = demo_model(SMALL, seed=3), demo_model(SMALL, seed=3), demo_model(SMALL, seed=4)
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_embeddings_are_untied_and_weights_wide():
    model = demo_model(SMALL)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert 0.15 < model.lm_head.weight.std() < 0.25
    assert model.config.vocab_size == BYTE_VOCAB_SIZE


def test_every_earlier_token_changes_what_follows():
    model = demo_model(SMALL)
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        base = model(tokens).logits[0, -1]
        for position in range(40):
            changed = tokens.clone()
            changed[0, position] = 200
            assert (model(changed).logits[0, -1] - base).abs().max() > 1e-3
