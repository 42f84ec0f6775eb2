"""Scaling the lengths of a trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.errors import InvalidArgumentError
from blockyard.traces import TraceRequest, scale_lengths


def test_scaling_rounds_up_and_keeps_arrivals() -> None:
    rows = [TraceRequest(2.5, 700, 5, (0, 1), 512.0)]
    assert scale_lengths(rows, 1 / 16) == [TraceRequest(2.5, 44, 1, (0, 1), 32.0)]


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.floats(1e-9, 64))
def test_scaling_never_makes_a_request_vanish(prompt: int, output: int, scale: float) -> None:
    (row,) = scale_lengths([TraceRequest(0.0, prompt, output)], scale)
    assert 1 <= row.input_tokens <= prompt * scale + 1
    assert 1 <= row.output_tokens <= output * scale + 1


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scaling_by_nonsense_raises(scale: float) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a positive number"):
        scale_lengths([], scale)


def test_scaling_beyond_what_a_trace_may_hold_raises() -> None:
    with pytest.raises(InvalidArgumentError, match="is more than"):
        scale_lengths([TraceRequest(0.0, 10, 3)], 1e300)
