"""Colours, symbols and axes for all figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

__all__ = ["COLORS", "DASHES", "GREY", "SYMBOLS", "Axis", "Figure", "above", "axis_of", "title_of"]

Figure = dict[str, Any]
"""A plotly figure: `data` and `layout`."""
Axis = tuple[str, str]
"""What an axis shows, and its unit, "" if it has none: `("TTFT", "s")`."""

COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999933", "#AA4499")
"""Colours for every kind of colour vision, on both backgrounds: most are Okabe and Ito's, two are Tol's muted ones."""
GREY: Final = "#999999"
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS: Final = 8
"""Number of markers that are easy to distinguish; plotly numbers them from 0."""
_HEIGHT: Final = 400
_ROW: Final = 21
"""Pixels of a row of a legend."""
_LOG_FROM: Final = 20
"""Minimum ratio of the largest to the smallest value for a logarithmic axis."""


def title_of(axis: Axis) -> dict[str, str]:
    """Return the title of an axis, with the unit."""
    name, unit = axis
    return {"text": f"{name} ({unit})" if unit else name}


def axis_of(axis: Axis, values: Sequence[float]) -> dict[str, Any]:
    """Return an axis with its title: logarithmic if the values are far apart."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    is_log = low > 0 and high >= _LOG_FROM * low
    return {"title": title_of(axis), "type": "log" if is_log else "linear"} | ({"dtick": "D2"} if is_log else {})


def above(data: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the layout of a legend above a figure, whose height grows with the rows that it may take."""
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"}
    return {"showlegend": True, "legend": legend, "height": _HEIGHT + _ROW * len(data)}
