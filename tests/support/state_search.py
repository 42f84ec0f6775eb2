"""Breadth-first search of all reachable states, so that a failure comes with the fewest steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

State = TypeVar("State")


def explore(
    start: State, steps: Callable[[State], Iterable[tuple[str, State]]], most: int, error: type[AssertionError]
) -> int:
    """Search all states, at most `most`.

    Args:
        start: the first state; all states are hashable.
        steps: yields the named successors of a state.
        most: maximum number of states.
        error: the exception that `steps` raises for a wrong state.

    Returns:
        The number of states.

    Raises:
        AssertionError: of the class `error`, with the steps that lead there.
    """
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        try:
            for what, after in steps(state):
                if after not in came_from:
                    came_from[after] = (state, what)
                    todo.append(after)
        except error as raised:
            raise error(f"{raised}, after: {'; '.join(_steps_to(state, came_from))}") from None
        assert len(came_from) <= most, f"more than {most} states"
    return len(came_from)


def _steps_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    steps = []
    while (before := came_from[state]) is not None:
        state, what = before
        steps.append(what)
    return steps[::-1]
