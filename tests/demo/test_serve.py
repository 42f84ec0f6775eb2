"""The demo's paged run, its faults, and the comparison with the unpaged model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from huggingface import reference_generate

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers.generator import Generator
from blockyard.progress import show_progress
from blockyard.tools.demo.demo_model import demo_config, demo_model
from blockyard.tools.demo.report import Difference
from blockyard.tools.demo.serve import Faults, Outputs, compare, serve
from blockyard.tools.demo.workload import WorkItem

MODEL = demo_model(demo_config(num_layers=2, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2))
GREEDY = WorkItem("greedy", np.arange(40, 60), SamplingParams(max_tokens=12))
SAMPLED = WorkItem("sampled", np.arange(60, 80), SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=2))
ITEMS = [GREEDY, SAMPLED]


def alone(item: WorkItem, index: int = 0) -> list[int]:
    return reference_generate(MODEL, item.prompt, item.sampling, index)


def compared(items: list[WorkItem], outputs: Outputs) -> tuple[list[Difference], int]:
    with show_progress("comparison", quiet=True) as view:
        return compare(MODEL, items, outputs, view)


def test_a_paged_run_has_the_tokens_that_hugging_face_generates_alone() -> None:
    faults = Faults()
    with (
        Generator(MODEL, device_blocks=16, host_blocks=4, wrap_executor=faults.wrap) as generator,
        show_progress("run", quiet=True) as view,
    ):
        served = serve(generator, ITEMS, faults, view)
    assert served.outputs == {"greedy": [alone(GREEDY)], "sampled": [alone(SAMPLED), alone(SAMPLED, 1)]}
    assert compared(ITEMS, served.outputs) == ([], 0)
    assert served.totals == {"device": 16, "host": 4, "external": 0}


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.request_id)
def test_the_first_wrong_token_of_a_sequence_is_named(item: WorkItem) -> None:
    index = item.sampling.n - 1
    right = [alone(item, number) for number in range(item.sampling.n)]
    for place in (0, 5, 11):
        wrong = (right[index][place] + 1) % 259
        got = [*right[:index], [*right[index][:place], wrong, *right[index][place + 1 :]]]
        expected = Difference(item.request_id, index, place, wrong, right[index][place])
        assert compared([item], {item.request_id: got}) == ([expected], 0)


def test_answers_that_end_early_or_late_differ() -> None:
    right = alone(GREEDY)
    assert compared([GREEDY], {"greedy": [right[:7]]}) == ([Difference("greedy", 0, 7, -1, right[7])], 0)
    assert compared([GREEDY], {"greedy": [[*right, 5]]}) == ([Difference("greedy", 0, 12, 5, -1)], 0)


@pytest.fixture
def twins() -> Iterator[list[int]]:
    """Make the model score two tokens alike: the fourth one it chooses, and the one before that in the vocabulary."""
    chosen = alone(GREEDY)[3]
    weight = MODEL.lm_head.weight.data
    kept = weight.clone()
    weight[chosen - 1] = weight[chosen]
    yield [chosen, chosen - 1]
    weight.copy_(kept)


def test_a_tie_is_no_difference_and_what_follows_it_must_be_right(twins: list[int]) -> None:
    right = alone(GREEDY)
    place = next(i for i, token in enumerate(right) if token in twins)
    head = [*right[:place], next(token for token in twins if token != right[place])]
    left = SamplingParams(max_tokens=12 - len(head))
    got = head + reference_generate(MODEL, np.concatenate([GREEDY.prompt, head]), left)
    differences, ties = compared([GREEDY], {"greedy": [got]})
    assert differences == []
    assert ties >= 1
    got[-1] = (got[-1] + 1) % 259
    differences, _ = compared([GREEDY], {"greedy": [got]})
    assert [difference.position for difference in differences] == [11]


def test_damage_without_an_external_tier_raises() -> None:
    with pytest.raises(InvalidArgumentError, match="2 blocks: there is no external tier"):
        Generator(MODEL, device_blocks=16, host_blocks=4, wrap_executor=Faults(corrupt=2).wrap)


def test_faults_need_the_step_executor_itself() -> None:
    faults = Faults()
    with (
        Generator(MODEL, device_blocks=16, host_blocks=4, wrap_executor=faults.wrap) as generator,
        pytest.raises(InvalidArgumentError, match="the executor is a CountingExecutor"),
    ):
        faults.wrap(generator.executor)
