"""`Surface`: bilinear interpolation."""

import pytest

from blockyard.tools.replay.step_time.surface import Surface


@pytest.mark.parametrize(("x", "y"), [(1, 2), (2.5, 3), (4, 16), (8, 20), (0, 1), (9, 9.5)])
def test_a_bilinear_function_is_met_within_the_grid_and_beyond(x: float, y: float):
    surface = Surface(lambda x, y: 3 + 2 * x + 5 * y + x * y, [1, 4, 8], [2, 10, 16])
    assert surface(x, y) == pytest.approx(3 + 2 * x + 5 * y + x * y)


def test_it_never_falls_below_zero():
    assert Surface(lambda x, y: x - 1, [1, 2], [1, 2])(0, 1) == 0.0
