"""How a test asks that a state machine sees a planted bug."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from blockyard.errors import BlockyardError


def assert_noticed(
    machine: type[RuleBasedStateMachine], *, step_count: int, max_examples: int = 1000, match: str | None = None
) -> None:
    """The machine must fail, in a fixed search that stops at the first failure and does not shrink it.

    Args:
        machine: over what has the bug; with a `seed` of its own, or the search has hypothesis' fixed one.
        step_count: steps of an example.
        max_examples: examples to look for it in.
        match: what the error must say, an `AssertionError` then.
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
