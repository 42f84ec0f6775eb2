"""`Surface`: bilinear interpolation of a function of two numbers on a grid; a call takes about a microsecond."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

__all__ = ["Surface"]


class Surface:
    """Interpolates `function` between the points of a grid, and beyond it along the outermost cells.

    Args:
        function: called once for each point of the grid.
        xs: coordinates of the grid, increasing, at least two.
        ys: the same for the second number.
    """

    def __init__(self, function: Callable[[int, int], float], xs: Sequence[int], ys: Sequence[int]) -> None:
        self._xs, self._ys = list(xs), list(ys)
        self._values = [[function(x, y) for y in ys] for x in xs]

    def __call__(self, x: float, y: float) -> float:
        """Return the value at a point; never below 0."""
        xs, ys = self._xs, self._ys
        i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        j = min(max(bisect_right(ys, y) - 1, 0), len(ys) - 2)
        low, high = self._values[i], self._values[i + 1]
        u, v = (x - xs[i]) / (xs[i + 1] - xs[i]), (y - ys[j]) / (ys[j + 1] - ys[j])
        near, far = low[j] + (low[j + 1] - low[j]) * v, high[j] + (high[j + 1] - high[j]) * v
        return max(0.0, near + (far - near) * u)
