"""`timeline_figure`: counters, spans and marks of a run on one time axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Final

from blockyard.tools.pictures.style import COLORS, DASHES, SYMBOLS, Figure
from blockyard.tools.timeline import Mark, Span, Timeline

__all__ = ["timeline_figure"]

_TIME_TITLES: Final = {"s": "time (s)", "step": "time (scheduler steps)"}
_PANEL_PIXELS: Final = 130
_LANE_PIXELS: Final = 18
_MAX_LANE_PIXELS: Final = 900
_GAP_PIXELS: Final = 22
_AROUND_PIXELS: Final = 110
_MAX_POINTS: Final = 2000
"""Maximum number of points of a line; more would share pixels."""
_MAX_SHADES: Final = 300
_ENGINES_OWN: Final = ("decode", "prefill", "prefill and decode", "swap_out", "swap_in")
"""Spans of an engine, which have the same colours on every page, whichever of them a run has."""
_FILL: Final = "rgba(0, 114, 178, 0.2)"  # the first of `COLORS`


def timeline_figure(timeline: Timeline, *, shade: Collection[str] = ("faults",)) -> Figure:
    """Draw a timeline: a panel for each track of counters, and below them all spans and marks.

    Lines keep the lowest and the highest value of each pixel. Spans of the same name on the same pixel become one bar,
    which shows their number.

    Args:
        timeline: timeline to draw.
        shade: tracks whose spans are shaded in all panels.
    """
    start, end = _reach(timeline)
    panels = _panels(timeline, end)
    lanes = {track: max(1, len(lanes)) for track, lanes in timeline.lanes().items()}
    heights = [float(_PANEL_PIXELS)] * len(panels)
    if lanes:
        heights.append(min(_MAX_LANE_PIXELS, _LANE_PIXELS * sum(lanes.values()) + 10.0))
    total = sum(heights) + _GAP_PIXELS * max(0, len(heights) - 1)
    layout: dict[str, Any] = {
        "height": total + _AROUND_PIXELS,
        "barmode": "overlay",
        "showlegend": True,
        "hovermode": "closest",
        "xaxis": {"title": {"text": _TIME_TITLES[timeline.time_unit]}, "anchor": f"y{_suffix(len(heights))}"},
    }
    if start < end:
        around = (end - start) / 100
        layout["xaxis"]["range"] = [max(start - around, min(start, 0.0)), end + around]
    top, data = total, list[dict[str, Any]]()
    for number, height in enumerate(heights, 1):
        suffix = _suffix(number)
        domain = [max(0.0, (top - height) / total), top / total]
        layout[f"yaxis{suffix}"] = {"domain": domain, "anchor": "x"}
        layout[f"legend{suffix}"] = {"y": domain[1], "yanchor": "top"}
        place = {"xaxis": "x", "yaxis": f"y{suffix}", "legend": f"legend{suffix}"}
        if number <= len(panels):
            track = list(panels)[number - 1]
            layout[f"yaxis{suffix}"] |= {"title": {"text": track.replace(": ", "<br>")}, "rangemode": "tozero"}
            data += [trace | place for trace in _lines(panels[track])]
        else:
            layout[f"yaxis{suffix}"] |= _lane_axis(lanes)
            data += [trace | place for trace in _bars(timeline, (end - start) / _MAX_POINTS)]
        top -= height + _GAP_PIXELS
    layout["shapes"] = _shades([span for span in timeline.spans if span.track in shade])
    return {"data": data, "layout": layout}


def _suffix(number: int) -> str:
    """Return the suffix that plotly appends to the names of a panel's axis and legend."""
    return "" if number <= 1 else str(number)


def _reach(timeline: Timeline) -> tuple[float, float]:
    """Return the first and the last time."""
    times = [time for span in timeline.spans for time in (span.start, span.end)]
    times += [mark.time for mark in timeline.marks] + [counter.time for counter in timeline.counters]
    return min(times, default=0.0), max(times, default=0.0)


def _panels(timeline: Timeline, end: float) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the points of each counter of each track; each line extends to the end."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for counter in sorted(timeline.counters, key=lambda counter: counter.time):
        found.setdefault(counter.track, {}).setdefault(counter.name, []).append((counter.time, counter.value))
    for points in (points for lines in found.values() for points in lines.values()):
        if points[-1][0] < end:
            points.append((end, points[-1][1]))
    order = {counter.track: number for number, counter in reversed(list(enumerate(timeline.counters)))}
    return {track: found[track] for track in sorted(found, key=order.__getitem__)}


def _lines(lines: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    found = []
    for number, (name, points) in enumerate(lines.items()):
        thinned = _thinned(points)
        trace = {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [time for time, _ in thinned],
            "y": [value for _, value in thinned],
            "line": {
                "color": COLORS[number % len(COLORS)],
                "dash": DASHES[number % len(DASHES)],
                "shape": "hv",
                "width": 1.5,
            },
        }
        found.append(trace | ({"fill": "tozeroy", "fillcolor": _FILL} if not number else {}))
    return found


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line with only the first, lowest, highest and last point of each of equally long intervals."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    start, width = points[0][0], (points[-1][0] - points[0][0]) * 4 / _MAX_POINTS
    parts: dict[int, list[int]] = defaultdict(list)
    for number, (time, _) in enumerate(points):
        parts[int((time - start) / width) if width else 0].append(number)
    kept = set[int]()
    for numbers in parts.values():
        by_value = sorted(numbers, key=lambda number: points[number][1])
        kept |= {numbers[0], by_value[0], by_value[-1], numbers[-1]}
    return [points[number] for number in sorted(kept)]


def _lane_axis(lanes: dict[str, int]) -> dict[str, Any]:
    """Return the axis for spans: a tick in the middle of each track's lanes."""
    ticks, borders, first = [], list[float](), 0
    for count in lanes.values():
        ticks.append(first + (count - 1) / 2)
        first += count
        borders.append(first - 0.5)
    return {
        "tickvals": ticks,
        "ticktext": list(lanes),
        "minor": {"tickvals": borders, "showgrid": True},
        "range": [first - 0.5, -0.5],
        "zeroline": False,
        "showgrid": False,
    }


def _bars(timeline: Timeline, pixel: float) -> list[dict[str, Any]]:
    bars: dict[str, list[tuple[int, Span, int]]] = defaultdict(list)
    marks: dict[str, list[tuple[int, Mark]]] = defaultdict(list)
    marks_of: dict[str, list[Mark]] = defaultdict(list)
    for mark in timeline.marks:
        marks_of[mark.track].append(mark)
    first = 0
    for track, lanes in timeline.lanes().items():
        for number, spans in enumerate(lanes):
            for span, count in _merged(spans, pixel):
                bars[span.name].append((first + number, span, count))
        for mark in marks_of[track]:
            marks[mark.name].append((first, mark))
        first += max(1, len(lanes))
    known = _ENGINES_OWN if any(name in bars for name in _ENGINES_OWN) else ()
    names = {name: number for number, name in enumerate(dict.fromkeys([*known, *bars, *marks]))}
    colors = {name: COLORS[number % len(COLORS)] for name, number in names.items()}
    found = [_bar(name, rows, colors[name], timeline.time_unit) for name, rows in bars.items()]
    return found + [_mark(name, rows, colors[name], names[name], timeline.time_unit) for name, rows in marks.items()]


def _merged(spans: Sequence[Span], pixel: float) -> list[tuple[Span, int]]:
    """Merge the spans of a lane that have one name and fall on one pixel; return each with its number of spans."""
    found, last = list[tuple[Span, int]](), dict[str, int]()
    for span in spans:
        place = last.get(span.name)
        if place is not None and span.end - found[place][0].start < pixel:
            before, count = found[place]
            found[place] = (before._replace(end=max(before.end, span.end), args={}), count + 1)
        else:
            last[span.name] = len(found)
            found.append((span, 1))
    return found


def _when(unit: str, *times: float) -> str:
    text = " to ".join(f"{time:.6g}" for time in times)
    return f"step {text}" if unit == "step" else f"{text} {unit}"


def _bar(name: str, rows: list[tuple[int, Span, int]], color: str, unit: str) -> dict[str, Any]:
    def text(span: Span, count: int) -> str:
        args = "".join(f"<br>{key} {value}" for key, value in span.args.items())
        many = f"<br>{count} spans" if count > 1 else ""
        return f"{span.track}: {name}<br>{_when(unit, span.start, span.end)}{args}{many}"

    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row for row, _, _ in rows],
        "base": [span.start for _, span, _ in rows],
        "x": [span.end - span.start for _, span, _ in rows],
        "width": 0.75,
        "marker": {"color": color, "line": {"color": color, "width": 1}},
        "hovertext": [text(span, count) for _, span, count in rows],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "opacity": 0.85,
    }


def _mark(name: str, rows: list[tuple[int, Mark]], color: str, number: int, unit: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [mark.time for _, mark in rows],
        "y": [row for row, _ in rows],
        "marker": {"color": color, "symbol": number % SYMBOLS, "size": 9},
        "hovertext": [f"{mark.track}: {name}<br>{_when(unit, mark.time)}" for _, mark in rows],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _shades(spans: Sequence[Span]) -> list[dict[str, Any]]:
    return [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": span.start,
            "x1": span.end,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"width": 0},
            "fillcolor": "rgba(213, 94, 0, 0.12)",
        }
        for span in spans[:_MAX_SHADES]
    ]
