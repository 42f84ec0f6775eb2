"""Ties in rounding are settled, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers.model import reference_generate
from blockyard.tools.demo.demo_model import demo_config, demo_model
from blockyard.tools.demo.report import Difference
from blockyard.tools.demo.ties import MAX_TIES, settle_ties
from blockyard.tools.demo.workload import WorkItem

MODEL = demo_model(demo_config(num_layers=2, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2))
ITEMS = [
    WorkItem("greedy", np.arange(40, 60), SamplingParams(max_tokens=12)),
    WorkItem("sampled", np.arange(60, 80), SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=2)),
]


@pytest.fixture
def twins() -> Iterator[list[int]]:
    """Make the model score two tokens alike: the fourth one it chooses, and the one before that in the vocabulary."""
    chosen = reference_generate(MODEL, ITEMS[0].prompt, ITEMS[0].sampling)[3]
    weight = MODEL.lm_head.weight.data
    kept = weight.clone()
    weight[chosen - 1] = weight[chosen]
    yield [chosen, chosen - 1]
    weight.copy_(kept)


def test_tokens_that_agree_stay_as_they_are() -> None:
    wanted = reference_generate(MODEL, ITEMS[0].prompt, ITEMS[0].sampling)
    assert settle_ties(MODEL, ITEMS[0], 0, wanted, wanted) == (wanted, [])


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.request_id)
def test_wrong_token_is_no_tie(item: WorkItem) -> None:
    index = item.sampling.n - 1
    wanted = reference_generate(MODEL, item.prompt, item.sampling, index)
    for place in (0, 5, 11):
        got = [*wanted[:place], (wanted[place] + 1) % 259, *wanted[place + 1 :]]
        assert settle_ties(MODEL, item, index, got, wanted) == (wanted, [])


def test_unpaged_run_takes_our_side_of_a_tie_and_goes_on_from_there(twins: list[int]) -> None:
    item = ITEMS[0]
    wanted = reference_generate(MODEL, item.prompt, item.sampling)
    place = next(i for i, token in enumerate(wanted) if token in twins)
    head = [*wanted[:place], next(token for token in twins if token != wanted[place])]
    longer = np.concatenate([item.prompt, head])
    rest = SamplingParams(max_tokens=item.sampling.max_tokens - len(head))
    got = head + reference_generate(MODEL, longer, rest)
    settled, ties = settle_ties(MODEL, item, 0, got, wanted)
    assert settled == got
    assert Difference("greedy", 0, place, got[place], wanted[place]) in ties


def test_what_follows_a_tie_must_still_be_right(twins: list[int]) -> None:
    item = ITEMS[0]
    wanted = reference_generate(MODEL, item.prompt, item.sampling)
    place = next(i for i, token in enumerate(wanted) if token in twins)
    got = [*wanted[:place], next(token for token in twins if token != wanted[place])]
    got += [(token + 1) % 259 for token in wanted[place + 1 :]]
    settled, ties = settle_ties(MODEL, item, 0, got, wanted)
    assert settled != got
    assert len(ties) >= 1


def test_draws_after_a_tie_keep_their_positions() -> None:
    item = ITEMS[1]
    wanted = reference_generate(MODEL, item.prompt, item.sampling, 1)
    other = (wanted[0] + 1) % 259
    rest = SamplingParams(max_tokens=11, temperature=0.8, seed=3, n=2)
    got = [other, *reference_generate(MODEL, np.append(item.prompt, other), rest, 1)]
    settled, ties = settle_ties(MODEL, item, 1, got, wanted, tolerance=1e3)
    assert settled == got
    assert [tie.position for tie in ties] == [0]


def test_sequence_that_needs_tie_after_tie_is_left_different() -> None:
    item = ITEMS[0]
    wanted = reference_generate(MODEL, item.prompt, item.sampling)
    got = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    settled, ties = settle_ties(MODEL, item, 0, got, wanted, tolerance=1e3)
    assert len(ties) == MAX_TIES
    assert settled != got
