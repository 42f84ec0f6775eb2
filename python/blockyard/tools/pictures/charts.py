"""Figures from plain data: hit rate over capacity, distributions, Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from blockyard.errors import InvalidArgumentError
from blockyard.tools.pictures.style import COLORS, DASHES, GREY, SYMBOLS, Axis, Figure, above, axis_of, title_of

__all__ = ["cdf_figure", "hit_rate_figure", "pareto_figure"]

_MAX_POINTS: Final = 1000
"""Maximum number of points of a distribution; more samples are reduced to quantiles."""
_CORNERS: Final = ("top right", "bottom left", "top left", "bottom right")
"""Where the numbers of choices are, so that those of neighbours that are close do not lie on each other."""
_MAX_TICKS: Final = 10
"""Maximum number of capacities that each get a tick on the axis."""


def hit_rate_figure(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    optimum: Sequence[tuple[float, float]] = (),
    capacity: Axis = ("cache capacity", "blocks"),
) -> Figure:
    """Draw hit rate over capacity.

    Args:
        curves: points of capacity and hit rate, 0 to 1, by policy.
        optimum: points of the upper bound of all policies; empty if unknown.
        capacity: what the capacity counts, and its unit.
    """
    data = [
        _line(name, sorted(points), number, dash=DASHES[number % len(DASHES)])
        for number, (name, points) in enumerate(curves.items())
    ]
    if optimum:
        data.append(_line("optimum", sorted(optimum), len(curves), dash="dot", color=GREY))
    for trace in data:
        trace["y"] = [100 * rate for rate in trace["y"]]
        trace["hovertemplate"] = f"%{{x:,}} {capacity[1]}: %{{y:.2f}} %<extra>%{{fullData.name}}</extra>"
    capacities = sorted({size for points in (*curves.values(), optimum) for size, _ in points})
    ticks = {"tickvals": capacities, "tickformat": ",.12~r"} if len(capacities) <= _MAX_TICKS else {}
    layout = {
        "xaxis": axis_of(capacity, capacities) | ticks,
        "yaxis": {"title": title_of(("hit rate", "% of prompt tokens")), "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout | above(data)}


def cdf_figure(samples: Mapping[str, ArrayLike], quantity: Axis) -> Figure:
    """Draw the distribution of a quantity, such as a latency, for several runs.

    Args:
        samples: one number per request, by the name of the run; a run without samples is omitted.
        quantity: what the numbers measure, and the unit, such as `("TTFT", "s")`.
    """
    data, values = [], list[float]()
    for number, (name, sample) in enumerate(samples.items()):
        ordered = np.sort(np.asarray(sample, dtype=np.float64))
        if not len(ordered):
            continue
        # The k-th smallest of n samples is the k/n quantile, so every point is a real sample.
        ranks = np.unique(np.linspace(1, len(ordered), min(len(ordered), _MAX_POINTS)).round().astype(np.int64))
        points = list(zip(ordered[ranks - 1].tolist(), (100 * ranks / len(ordered)).tolist(), strict=True))
        p50, p99 = (ordered[max(0, int(np.ceil(part * len(ordered))) - 1)] for part in (0.5, 0.99))
        label = f"{name}: p50 {p50:.3g}, p99 {p99:.3g} {quantity[1]}".rstrip()
        trace = _line(label, points, number, dash=DASHES[number % len(DASHES)], mode="lines")
        trace["line"]["shape"] = "hv"
        trace["hovertemplate"] = f"%{{y:.1f}} %: at most %{{x:.4g}} {quantity[1]}<extra>{name}</extra>"
        data.append(trace)
        values += (points[0][0], points[-1][0])
    layout = {
        "xaxis": axis_of(quantity, values),
        "yaxis": {"title": title_of(("requests", "%")), "range": [0, 100]},
    }
    return {"data": data, "layout": layout | above(data)}


def pareto_figure(
    choices: Mapping[str, tuple[float, float]],
    x: Axis,
    y: Axis,
    *,
    better: Literal["lower", "higher"] = "lower",
    recommended: str | None = None,
) -> Figure:
    """Draw choices, and the front: those that no other choice beats on one axis without being worse on the other.

    The choices on the front are numbered; the legend has their names.

    Args:
        choices: positions by name.
        x: quantity on the horizontal axis, such as `("cost", "$/h")`; lower is better.
        y: quantity on the vertical axis.
        better: whether lower or higher values of `y` are better.
        recommended: name of the choice to highlight.

    Raises:
        InvalidArgumentError: `recommended` is not among the choices.
    """
    if recommended is not None and recommended not in choices:
        raise InvalidArgumentError(f"recommended is {recommended!r}, must be one of {', '.join(choices)}")
    sign, front, best = (1 if better == "lower" else -1), list[str](), float("inf")
    for name in sorted(
        choices, key=lambda name: (choices[name][0], sign * choices[name][1], name != recommended, name)
    ):
        if sign * choices[name][1] < best:
            front.append(name)
            best = sign * choices[name][1]
    others = [name for name in choices if name not in front]
    data = [_points("Pareto front", front, choices, color=COLORS[0], mode="lines")]
    data[0]["line"]["shape"] = "hv"
    if others:
        data.append(_points("dominated", others, choices, color=GREY, symbol="x"))
    if recommended is not None:
        data.append(_points(f"recommended: {recommended}", [recommended], choices, color=COLORS[1], symbol="star"))
        data[-1]["marker"]["size"] = 18
    for number, name in enumerate(front, 1):
        data.append(_points(f"{number}: {name}", [name], choices, color=COLORS[0], mode="markers+text"))
        data[-1] |= {"text": [str(number)], "textposition": _CORNERS[number % len(_CORNERS)], "customdata": [name]}
    for trace in data:
        trace.setdefault("customdata", trace["text"])
        trace["hovertemplate"] = f"%{{customdata}}<br>%{{x:.4g}} {x[1]}, %{{y:.4g}} {y[1]}<extra></extra>"
    layout = {
        "xaxis": axis_of(x, [position[0] for position in choices.values()]),
        "yaxis": axis_of(y, [position[1] for position in choices.values()]) | {"rangemode": "tozero"},
    }
    return {"data": data, "layout": layout | above(data)}


def _line(
    name: str,
    points: Sequence[tuple[float, float]],
    number: int,
    *,
    dash: str,
    mode: str = "lines+markers",
    color: str = "",
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": color or COLORS[number % len(COLORS)], "dash": dash},
        "marker": {"symbol": number % SYMBOLS},
    }


def _points(
    name: str,
    names: Sequence[str],
    choices: Mapping[str, tuple[float, float]],
    *,
    color: str,
    symbol: str = "circle",
    mode: str = "markers",
) -> dict[str, Any]:
    trace = _line(name, [choices[one] for one in names], 0, dash="solid", mode=mode, color=color)
    trace["marker"] = {"size": 9, "color": color, "symbol": symbol}
    return trace | {"text": list(names)}
