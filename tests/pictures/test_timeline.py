"""`Timeline` and its Trace Event JSON: each event once, on a track whose spans do not overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.errors import InvalidArgumentError
from blockyard.tools.timeline import Counter, Mark, Span, Timeline

# Values that the format allows for each phase that is used: name, and its type.
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"args": dict},
    "X": {"ts": (int, float), "dur": (int, float), "args": dict},
    "i": {"ts": (int, float), "s": str},
    "C": {"ts": (int, float), "args": dict},
}
TIMES = st.floats(0, 100)
SPANS = st.builds(
    lambda track, name, start, seconds: Span(track, name, start, start + seconds),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["put", "get"]),
    TIMES,
    TIMES,
)


def sample() -> Timeline:
    timeline = Timeline()
    timeline.add(Span("engine 0", "get", 0.5, 2.0, {"blocks": 3}))
    timeline.add(Span("engine 0", "put", 1.0, 1.5))
    timeline.add(Counter("device (blocks)", "in use", 1.0, 7))
    timeline.add(Counter("device (blocks)", "in use", 0.0, 4))
    timeline.add(Counter("device (blocks)", "size", 0.0, 9))
    timeline.add(Mark("faults", "damage", 1.25))
    return timeline


def written(timeline: Timeline, folder: Path) -> list[dict[str, Any]]:
    """Write it, check what the format asks for, and return the events."""
    path = folder / "trace.json"
    timeline.write_trace_events(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"displayTimeUnit", "traceEvents"}
    for event in found["traceEvents"]:
        fields = {"pid": int, "tid": int, "ph": str, "name": str, **FIELDS[event["ph"]]}
        assert set(event) == set(fields)
        assert all(isinstance(event[name], kind) for name, kind in fields.items())
        assert event.get("dur", 0) >= 0
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


def test_each_event_is_written_once_in_microseconds(tmp_path: Path) -> None:
    events = written(sample(), tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [(names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("engine 0", "get", 500_000.0, 1_500_000.0, {"blocks": 3}),
        ("engine 0 (2)", "put", 1_000_000.0, 500_000.0, {}),
    ]
    assert [(names[e["tid"]], e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [("faults", "damage", 1.25e6)]
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [
        ("device (blocks)", 0.0, {"in use": 4, "size": 9}),
        ("device (blocks)", 1e6, {"in use": 7, "size": 9}),
    ]


def test_a_step_is_written_as_a_millisecond(tmp_path: Path) -> None:
    timeline = Timeline("step")
    timeline.add(Span("device to host", "swap_out", 3, 5))
    (span,) = (event for event in written(timeline, tmp_path) if event["ph"] == "X")
    assert (span["ts"], span["dur"]) == (3000.0, 2000.0)


def test_an_empty_timeline_is_written_as_json(tmp_path: Path) -> None:
    assert [event["name"] for event in written(Timeline(), tmp_path)] == ["process_name"]


def test_numbers_of_numpy_are_written(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add(Counter("device (blocks)", "in use", np.float32(0.5), np.int64(3)))  # type: ignore[arg-type]
    timeline.add(Span("a", "get", np.float64(1), np.float64(2), {"blocks": np.int64(4)}))  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="not finite"):
        timeline.add(Counter("device (blocks)", "in use", np.float32("nan"), 3))  # type: ignore[arg-type]
    events = written(timeline, tmp_path)
    assert [(e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [(0.5e6, {"in use": 3})]
    assert [(e["ts"], e["args"]) for e in events if e["ph"] == "X"] == [(1e6, {"blocks": 4})]


def test_tracks_come_in_the_order_that_is_asked_for() -> None:
    timeline = sample()
    assert list(timeline.lanes()) == ["engine 0", "faults"]
    timeline.tracks = ["absent", "faults"]
    assert list(timeline.lanes()) == ["faults", "engine 0"]


@given(st.lists(SPANS, max_size=30))
def test_lanes_hold_each_span_once_in_as_few_lanes_as_overlap(spans: list[Span]) -> None:
    timeline = Timeline()
    for span in spans:
        timeline.add(span)
    for track, lanes in timeline.lanes().items():
        mine = [span for span in spans if span.track == track]
        assert sorted(map(id, (span for lane in lanes for span in lane))) == sorted(map(id, mine))
        for lane in lanes:
            assert all(before.end <= after.start for before, after in pairwise(lane))
        changes: dict[float, list[int]] = defaultdict(list)
        for span in mine:
            if span.start < span.end:
                changes[span.start].append(1)
                changes[span.end].append(-1)
        open_now = most = 0
        for time in sorted(changes):
            open_now += sum(changes[time])
            most = max(most, open_now)
        assert most <= len(lanes)
        if all(span.start < span.end for span in mine):
            assert len(lanes) == most


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Span("a", "b", 2.0, 1.0), "ends before it starts"),
        (Span("a", "b", 0.0, float("inf")), "not finite"),
        (Counter("a", "b", 0.0, float("nan")), "not finite"),
        (Mark("a", "b", float("-inf")), "not finite"),
    ],
)
def test_an_event_that_cannot_be_drawn_is_refused(event: Span | Counter | Mark, message: str) -> None:
    timeline = Timeline()
    with pytest.raises(InvalidArgumentError, match=message):
        timeline.add(event)
    assert timeline == Timeline()
