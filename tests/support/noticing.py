"""Asserts that a state machine finds a planted bug."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from blockyard.errors import BlockyardError


def assert_noticed(
    machine: type[RuleBasedStateMachine], *, step_count: int, max_examples: int = 1000, match: str | None = None
) -> None:
    """The machine must fail, in a fixed search that stops at the first failure and does not shrink it.

    Args:
        machine: a machine over the faulty code; without its own `seed`, the search uses hypothesis' fixed one.
        step_count: steps per example.
        max_examples: maximum number of examples.
        match: pattern that the error must match; it must then be an `AssertionError`.
    """
    search = settings(
        max_examples=max_examples,
        stateful_step_count=step_count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError if match else (AssertionError, BlockyardError), match=match):
        run_state_machine_as_test(machine, settings=search)
