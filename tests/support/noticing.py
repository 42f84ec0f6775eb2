"""Asserts that a state machine finds a planted bug."""

from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from blockyard.errors import BlockyardError

EXAMPLES: Final = 10
"""Examples of a search. A tenth of them are small, the first ones: short searches find more in the same time."""


def assert_noticed(
    machine: type[RuleBasedStateMachine],
    *,
    step_count: int,
    max_examples: int = 1000,
    match: str | None = None,
    first: int = 0,
) -> None:
    """The machine must fail, in fixed searches that stop at the first failure and do not shrink it.

    Args:
        machine: a machine over the faulty code.
        step_count: steps per example.
        max_examples: maximum number of examples.
        match: pattern that the error must match; it must then be an `AssertionError`.
        first: seed of the first search: one that finds the bug today, if 0 does not.
    """
    search = settings(
        max_examples=EXAMPLES,
        stateful_step_count=step_count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )

    def run() -> None:
        for number in range(first, first + max_examples // EXAMPLES):
            run_state_machine_as_test(seed(number)(machine), settings=search)

    with pytest.raises(AssertionError if match else (AssertionError, BlockyardError), match=match):
        run()
