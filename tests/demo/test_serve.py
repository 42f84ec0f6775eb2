"""The demo's two runs: arrivals on a clock of steps, and faults wrapped around the executor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.integrations.sampling import SamplingParams
from blockyard.integrations.transformers.generator import Generator
from blockyard.progress import show_progress
from blockyard.scheduler import Step
from blockyard.tools.demo.demo_model import demo_config, demo_model
from blockyard.tools.demo.serve import Faults, reference, serve
from blockyard.tools.demo.workload import WorkItem

MODEL = demo_model(demo_config(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2))
ITEMS = [
    WorkItem(f"request-{index}", np.arange(5 + index), SamplingParams(max_tokens=10), arrival=float(index))
    for index in range(3)
]


def run(items: list[WorkItem], faults: Faults) -> list[set[str]]:
    """Serve, and return which requests each step computed."""
    steps: list[set[str]] = []

    with (
        Generator(MODEL, device_blocks=16, host_blocks=4, wrap_executor=faults.wrap) as generator,
        show_progress("run", quiet=True) as view,
    ):
        compute = generator._compute

        def watched(step: Step) -> list[int]:
            steps.append({step.owner(row)[0] for row in range(step.rows)})
            return compute(step)

        generator._compute = watched  # type: ignore[method-assign]
        served = serve(generator, items, faults, view)
    with show_progress("reference", quiet=True) as view:
        assert served.outputs == reference(MODEL, items, view)[0]
    assert served.totals == {"device": 16, "host": 4, "external": 0}
    return steps


def test_requests_arrive_on_the_clock_and_all_within_the_longest_answer() -> None:
    steps = run(ITEMS, Faults())
    first_seen = [next(i for i, step in enumerate(steps) if item.request_id in step) for item in ITEMS]
    assert first_seen == [0, 5, 10]


def test_clock_jumps_over_time_in_which_nothing_is_left_to_do() -> None:
    late = [ITEMS[0], replace(ITEMS[1], arrival=1000.0)]
    assert len(run(late, Faults())) <= 21


def test_requests_that_arrive_together_start_together() -> None:
    together = [replace(item, arrival=0.0) for item in ITEMS]
    assert run(together, Faults())[0] == {item.request_id for item in together}


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
