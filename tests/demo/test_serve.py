"""The demo's paged run, and the comparison with the unpaged model, which notices a block that arrives as zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from huggingface import reference_generate

from blockyard import StepDecision
from blockyard.executor import Executor, StepDone, StepExecutor
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers.generator import Generator
from blockyard.progress import show_progress
from blockyard.tools.demo.compare import Outputs, compare
from blockyard.tools.demo.demo_model import demo_config, demo_model
from blockyard.tools.demo.executors import SteadyExecutor
from blockyard.tools.demo.report import Difference
from blockyard.tools.demo.serve import serve
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
    with Generator(MODEL, device_blocks=16, host_blocks=4) as generator, show_progress("run", quiet=True) as view:
        outputs = serve(generator, ITEMS, view)
    assert outputs == {"greedy": [alone(GREEDY)], "sampled": [alone(SAMPLED), alone(SAMPLED, 1)]}
    assert compared(ITEMS, outputs) == ([], 0)


class SpoilingExecutor(SteadyExecutor):
    """Lets one block of each transfer of a kind arrive as zeros; no store can notice, whose checksum is theirs."""

    def __init__(self, inner: Executor, kind: str) -> None:
        super().__init__(inner)
        assert isinstance(inner, StepExecutor)
        self.disturbed, self.kind, self.spoilt = inner, kind, set[str]()
        self.ended: dict[int, StepDone] = {}

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        super().submit(decision, by_layer=by_layer)
        engine, store = self.disturbed.engine, self.disturbed.store
        zeros = np.zeros((1, engine.layout.bytes_per_block), np.uint8)
        for kind, pairs in decision.transfers():
            if kind != self.kind:
                continue
            self.ended[decision.ticket] = self.disturbed.wait(decision.ticket)
            if pairs.dst == "external" and store is not None:
                store.wait(store.submit_write(pairs.ids[:1, 1], zeros))
            else:
                engine.write("host" if pairs.dst == "host" else "device", pairs.ids[:1, 1], zeros)
            self.spoilt.add(f"{pairs.src} to {pairs.dst}")

    def _end(self, ticket: int) -> StepDone:
        return self.ended.pop(ticket) if ticket in self.ended else super()._end(ticket)


@pytest.mark.parametrize(
    ("kind", "host", "way"),
    [
        ("copy", 4, "device to device"),
        ("swap_out", 4, "device to host"),
        ("swap_in", 4, "host to device"),
        ("swap_out", 0, "device to external"),
        ("swap_in", 0, "external to device"),
    ],
)
def test_a_block_that_arrives_as_zeros_shows_in_the_tokens(kind: str, host: int, way: str, tmp_path: Path) -> None:
    items = [replace(item, request_id=f"{item.request_id} {number}") for number in range(3) for item in ITEMS]
    options = {"device_blocks": 7, "host_blocks": host, "preemption_mode": "swap", "prefix_caching": False}
    options |= {"swap_store": f"file://{tmp_path}?size=4MiB", "wrap_executor": partial(SpoilingExecutor, kind=kind)}
    with Generator(MODEL, **options) as generator, show_progress("run", quiet=True) as view:
        outputs = serve(generator, items, view)
        assert isinstance(generator.executor, SpoilingExecutor)
        assert way in generator.executor.spoilt
    assert compared(items, outputs)[0]


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
