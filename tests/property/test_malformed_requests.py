"""Malformed requests between the steps of the reference scheduler."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from blockyard import BlockManager, Scheduler
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import Request
from blockyard.testing.machines import run_state_machine_as_test, scheduler_machine
from blockyard.testing.machines.strategies import requests

STEP_COUNT = 40
MALFORMED = [
    {"salt": "tenant"},
    {"lora_id": -1},
    {"max_tokens": 2.0},
    {"n": 1.0},
    {"stop_token_ids": frozenset({"."})},
    {"extras": [(0, 999, b"image")]},
    {"extras": "image"},
    {"retain": -1},
    {"retain": "5"},
    *({"prompt": prompt} for prompt in (None, 5, "text", [1.5], ["a"], [True], [[1], [1, 2]], [1, None], [])),
]

Machine = scheduler_machine(
    lambda manager, _: Scheduler(manager),
    manager=lambda config: BlockManager(**config.arguments(), prefix_caching=True),
)


class Refusing(Machine):  # type: ignore[misc, valid-type]
    @rule(like=requests(), fields=st.sampled_from(MALFORMED))
    def refuse(self, like: Request, fields: dict[str, object]) -> None:
        before = self.scheduler.num_unfinished, self.scheduler.num_running
        with pytest.raises(InvalidArgumentError, match=next(iter(fields))):
            self.scheduler.add(replace(like, request_id="malformed", **fields))
        assert before == (self.scheduler.num_unfinished, self.scheduler.num_running)


def test_a_malformed_request_is_refused_at_any_time_and_disturbs_no_other(steps: int):
    examples = max(1, steps // STEP_COUNT // 10)
    budget = settings(max_examples=examples, stateful_step_count=STEP_COUNT, deadline=None)
    run_state_machine_as_test(Refusing, settings=budget)
