"""`Timeline`: what happened when, as spans, counters and marks on named tracks.

A run fills it in. `write_trace_events` then writes it for Perfetto, and `timeline_figure` of `blockyard.tools.pictures`
draws it.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from numbers import Real
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from blockyard.errors import InvalidArgumentError

__all__ = ["Counter", "Mark", "Span", "Timeline"]

_MICROSECONDS: Final = {"s": 1e6, "step": 1e3}
"""Microseconds in Perfetto per unit of time: a step is shown as a millisecond."""


_PLAIN: Final = methodcaller("tolist")  # for numpy numbers


class Span(NamedTuple):
    """Work from one time to another. Viewers show `args` in the span's details."""

    track: str
    name: str
    start: float
    end: float
    args: Mapping[str, float | str] = MappingProxyType({})


class Counter(NamedTuple):
    """A value from this time on. Counters of one `track` share a panel; it names the unit, as in `device (blocks)`."""

    track: str
    name: str
    time: float
    value: float


class Mark(NamedTuple):
    """An event without a duration."""

    track: str
    name: str
    time: float


@dataclass
class Timeline:
    """The events of a run, in any order.

    Attributes:
        time_unit: unit of all times: seconds or scheduler steps.
        tracks: tracks of spans and marks to show first, in this order; others follow in the order of `add`.
        spans: the added spans.
        counters: the added counters.
        marks: the added marks.
    """

    time_unit: Literal["s", "step"] = "s"
    tracks: Sequence[str] = ()
    spans: list[Span] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def add(self, event: Span | Counter | Mark) -> None:
        """Add an event.

        Raises:
            InvalidArgumentError: a time or value is not finite, or a span ends before it starts.
        """
        if not all(isfinite(part) for part in event if isinstance(part, Real)):
            raise InvalidArgumentError(f"{event} has a number that is not finite")
        if isinstance(event, Span):
            if event.end < event.start:
                raise InvalidArgumentError(f"{event} ends before it starts")
            self.spans.append(event)
        elif isinstance(event, Counter):
            self.counters.append(event)
        else:
            self.marks.append(event)

    def lanes(self) -> dict[str, list[list[Span]]]:
        """Return the spans of each track in as few lanes without overlap as possible, each in order of time.

        The tracks in `tracks` come first, then the others in the order of `add`. A track with only marks has no lanes.
        """
        events: list[Span | Mark] = [*self.spans, *self.marks]
        names = {event.track: None for event in events}
        first = [track for track in self.tracks if track in names]
        found: dict[str, list[list[Span]]] = {track: [] for track in (*first, *names)}
        busy: dict[str, list[tuple[float, int]]] = {track: [] for track in found}
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            lanes, ends = found[span.track], busy[span.track]
            if ends and ends[0][0] <= span.start:
                _, lane = heapq.heappop(ends)
            else:
                lane = len(lanes)
                lanes.append([])
            lanes[lane].append(span)
            heapq.heappush(ends, (span.end, lane))
        return found

    def write_trace_events(self, path: Path) -> None:
        """Write a JSON file in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

        Args:
            path: path of the file. The same events give the same bytes.

        Raises:
            OSError: the file cannot be written.
        """
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for number, event in enumerate(self._trace_events()):
                file.write((",\n" if number else "\n") + json.dumps({"pid": 1, **event}, default=_PLAIN))
            file.write("\n]}\n")

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        scale, thread = _MICROSECONDS[self.time_unit], 1  # the main thread has the process's number
        yield {"ph": "M", "tid": thread, "name": "process_name", "args": {"name": "blockyard"}}
        for track, lanes in self.lanes().items():
            for lane, spans in enumerate(lanes or [[]]):
                thread += 1
                name = track if not lane else f"{track} ({lane + 1})"
                yield {"ph": "M", "tid": thread, "name": "thread_name", "args": {"name": name}}
                yield {"ph": "M", "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
                for span in spans:
                    times = {"ts": span.start * scale, "dur": (span.end - span.start) * scale}
                    yield {"ph": "X", "tid": thread, "name": span.name, **times, "args": dict(span.args)}
                for mark in self.marks if not lane else ():
                    if mark.track == track:
                        yield {"ph": "i", "s": "t", "tid": thread, "name": mark.name, "ts": mark.time * scale}
        # An event has all values of its track; viewers draw one line for each value.
        now: dict[str, dict[str, float]] = {}
        for time, group in groupby(sorted(self.counters, key=_time), key=_time):
            changed: dict[str, dict[str, float]] = {}
            for counter in group:
                changed[counter.track] = now.setdefault(counter.track, {})
                changed[counter.track][counter.name] = counter.value
            for track, values in changed.items():
                yield {"ph": "C", "tid": 0, "name": track, "ts": time * scale, "args": dict(values)}


def _time(counter: Counter) -> float:
    return counter.time
