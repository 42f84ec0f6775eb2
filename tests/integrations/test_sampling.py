"""Sampling: greedy choice, and draws keyed by seed, sequence and position alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.sampling import SamplingParams, sample, uniforms

LOGITS = np.random.default_rng(7).normal(size=259).astype(np.float32) * 3
SAMPLED = SamplingParams(temperature=0.8, seed=11)


def shares(params: SamplingParams, logits: np.ndarray, draws: int) -> np.ndarray:
    counts = np.zeros(len(logits))
    for position in range(draws):
        counts[sample(logits, params, 0, position)] += 1
    return counts / draws


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-50, 50, width=32)), st.integers(0, 2**31))
def test_greedy_takes_the_first_of_the_largest(logits, position):
    assert sample(logits, SamplingParams(), 0, position) == int(np.argmax(logits))


def test_a_draw_depends_on_seed_sequence_and_position_only():
    keys = [(seed, sequence, position) for seed in (0, 11) for sequence in range(4) for position in range(40)]
    draw = {key: sample(LOGITS, SamplingParams(temperature=2.0, seed=key[0]), key[1], key[2]) for key in keys}
    for key in reversed(keys):
        assert sample(LOGITS, SamplingParams(temperature=2.0, seed=key[0]), key[1], key[2]) == draw[key]
    for part in range(3):
        others = {key[part] for key in keys}
        varied = {tuple(draw[key] for key in keys if key[part] == other) for other in others}
        assert len(varied) == len(others), f"part {part} of the key has no effect"


def test_numbers_of_two_positions_do_not_overlap():
    numbers = np.concatenate([uniforms(5, sequence, position, 300) for sequence in (0, 1) for position in (0, 1, 2)])
    assert len(np.unique(numbers)) == len(numbers)
    assert numbers.min() > 0
    assert numbers.max() < 1


def test_numbers_are_these_on_every_machine():
    assert uniforms(1, 2, 3, 2).tolist() == [0.13732203113233543, 0.22522750207501308]


def test_extreme_keys_are_taken():
    assert uniforms(2**64 - 1, 2**31, 2**40, 3).shape == (3,)


def test_draws_follow_the_softmax():
    logits = np.array([0.0, 1.0, 2.0, -np.inf])
    wanted = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    got = shares(SamplingParams(temperature=0.7, seed=3), logits, 6000)
    assert got == pytest.approx(wanted, abs=0.02)
    assert got[3] == 0


def test_top_k_keeps_only_the_k_most_likely():
    logits = np.array([0.0, 0.1, 0.2, 0.3])
    got = shares(SamplingParams(temperature=5.0, top_k=2), logits, 300)
    assert got[:2].sum() == 0
    assert got[2:].min() > 0.3


def test_top_k_of_one_is_greedy():
    logits = np.array([0.0, 0.1, 0.2, 0.3, 0.05])
    assert shares(SamplingParams(temperature=5.0, top_k=1), logits, 50).tolist() == [0, 0, 0, 1, 0]


def test_top_p_keeps_the_fewest_that_hold_the_probability():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert np.count_nonzero(shares(SamplingParams(temperature=1.0, top_p=0.5), logits, 300)) == 1
    assert np.count_nonzero(shares(SamplingParams(temperature=1.0, top_p=0.6), logits, 300)) == 2
    assert np.count_nonzero(shares(SamplingParams(temperature=1.0, top_p=0.94), logits, 300)) == 3
    assert np.count_nonzero(shares(SamplingParams(temperature=1.0, top_p=1.0), logits, 300)) == 4


def test_top_k_and_top_p_work_on_what_the_other_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the two that top_k leaves, the first holds 4/7: enough for 0.5.
    assert np.count_nonzero(shares(SamplingParams(temperature=1.0, top_k=2, top_p=0.5), logits, 300)) == 1


def test_a_tiny_temperature_is_greedy():
    params = SamplingParams(temperature=1e-300, seed=1)
    assert all(sample(LOGITS, params, 0, position) == LOGITS.argmax() for position in range(50))


def test_rounding_hardly_ever_changes_a_draw():
    rng = np.random.default_rng(0)
    changed = 0
    for position in range(2000):
        logits = rng.normal(size=259) * 3
        nudged = logits * (1 + rng.normal(size=259) * 1e-7)
        changed += sample(logits, SAMPLED, 0, position) != sample(nudged, SAMPLED, 0, position)
    assert changed == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("n", 0),
        ("top_k", -1),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("eos_token_id", -1),
        ("stop_token_ids", (3, -2)),
    ],
)
def test_a_value_out_of_range_is_shown(field, value):
    shown = "-2" if field == "stop_token_ids" else str(value)
    with pytest.raises(InvalidArgumentError, match=shown):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "logits", [[], [[1.0, 2.0]], [1.0, float("nan")], [-np.inf, -np.inf], [float("inf"), 0.0]], ids=str
)
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_unusable_logits_raise(logits, params):
    with pytest.raises(InvalidArgumentError):
        sample(logits, params, 0, 0)


def test_all_tokens_that_end_a_sequence_are_stops():
    assert SamplingParams(eos_token_id=0, stop_token_ids=(5, 6)).stops == {0, 5, 6}
    assert SamplingParams().stops == frozenset()
