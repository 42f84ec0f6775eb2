"""`fleet_timeline`: the faults, calls and answers of a fleet's log as a timeline."""

from __future__ import annotations

import re
from collections import Counter as Counts
from typing import Final

from blockyard.sim.fleet.fleet import FleetReport
from blockyard.timeline import Counter, Mark, Span, Timeline

__all__ = ["fleet_timeline"]

_LINE: Final = re.compile(r" *(?P<time>\d+\.\d+) (?P<who>server|engine \d+) (?P<text>.*)")
_ENGINE: Final = re.compile(r"^ *[\d.]+ (engine \d+) ")
_CALL: Final = re.compile(r"(?P<kind>put|get|delete) \[(?P<keys>.*)\] is (?P<ticket>\d+)")
_ANSWER: Final = re.compile(r"(?P<ticket>\d+): (?P<reasons>.*)")
_FAULT: Final = re.compile(r"(?P<kind>\w+) (?P<what>begins|ends)")
_CHANGE: Final = re.compile(r"(?P<kind>forget|quota)(?:s of)? .*")
_REQUEST: Final = re.compile(r"request (?P<name>[\d-]+): \[(?P<prompt>.*)\], (?P<tokens>\d+) tokens")
_TOOK: Final = re.compile(r"request (?P<name>[\d-]+) took .*")
_NO_END: Final = {"crash", "clock"}
"""Faults with a duration whose end is not in the log."""
_COUNTED: Final = {"get": ("reads (blocks)", "hits", "misses"), "put": ("writes (blocks)", "stored", "not stored")}


def fleet_timeline(report: FleetReport) -> Timeline:
    """Return what a fleet did: one track for the faults, and one for each engine.

    On the track of a serving engine, a span is a request, from its arrival to its last token. On the track of an engine
    that calls its store, a span is a batch, from its submission until it is collected. Batches and requests of a killed
    engine never end, and are left out.
    """
    reader = _Reader(report)
    for line in report.log:
        if found := _LINE.fullmatch(line):
            reader.read(float(found["time"]), found["who"], found["text"])
    return reader.end()


class _Reader:
    """Reads the lines of a log in order."""

    def __init__(self, report: FleetReport) -> None:
        self._report = report
        engines = {engine for line in report.log for engine in _ENGINE.findall(line)}
        self._timeline = Timeline("s", ["faults", *sorted(engines, key=lambda name: (len(name), name))])
        self._now = 0.0
        self._open_faults: list[tuple[float, str, str]] = []
        self._open_calls: dict[tuple[str, str], tuple[float, str, int]] = {}
        self._open_requests: dict[str, tuple[float, dict[str, float | str]]] = {}
        self._counts: Counts[str] = Counts()
        for track, *names in _COUNTED.values():
            for name in names:
                self._timeline.add(Counter(track, name, 0.0, 0))

    def read(self, time: float, who: str, text: str) -> None:
        """Read a line."""
        self._now = time
        if found := _FAULT.fullmatch(text):
            self._read_fault(time, who, found["kind"], found["what"])
        elif found := _CALL.fullmatch(text):
            keys = found["keys"].count(",") + 1
            self._open_calls[who, found["ticket"]] = (time, found["kind"], keys)
        elif found := _ANSWER.fullmatch(text):
            self._read_answer(time, who, found["ticket"], found["reasons"].split(","))
        elif found := _REQUEST.fullmatch(text):
            lengths: dict[str, float | str] = {"prompt": found["prompt"].count(",") + 1, "tokens": int(found["tokens"])}
            self._open_requests[found["name"]] = (time, lengths)
        elif (found := _TOOK.fullmatch(text)) and found["name"] in self._open_requests:
            start, lengths = self._open_requests.pop(found["name"])
            self._timeline.add(Span(who, f"request {found['name']}", start, time, lengths))
        elif found := _CHANGE.fullmatch(text):
            self._timeline.add(Mark(who, found["kind"], time))

    def end(self) -> Timeline:
        """Return the timeline."""
        for start, kind, who in self._open_faults:
            same = (f for f in self._report.faults if f.kind == kind and abs(f.at - start) < 1e-3)
            self._add_fault(start, start + max((f.seconds for f in same if kind in _NO_END), default=0.0), kind, who)
        if self._report.broken:
            self._timeline.add(Mark("faults", "broken promise", self._now))
        return self._timeline

    def _read_fault(self, time: float, who: str, kind: str, what: str) -> None:
        begun = next((fault for fault in self._open_faults if fault[1:] == (kind, who)), None)
        if what == "begins":
            self._open_faults.append((time, kind, who))
        elif begun is not None:
            self._open_faults.remove(begun)
            self._add_fault(begun[0], time, kind, who)

    def _add_fault(self, start: float, end: float, kind: str, who: str) -> None:
        self._timeline.add(
            Span("faults", kind, start, end, {"on": who}) if end > start else Mark("faults", kind, start)
        )

    def _read_answer(self, time: float, who: str, ticket: str, reasons: list[str]) -> None:
        if (who, ticket) not in self._open_calls:
            return
        start, kind, keys = self._open_calls.pop((who, ticket))
        said = ", ".join(f"{reason} {count}" for reason, count in sorted(Counts(reasons).items()))
        self._timeline.add(Span(who, kind, start, time, {"blocks": keys, "result": said}))
        if kind in _COUNTED:
            track, good, bad = _COUNTED[kind]
            for name, count in ((good, reasons.count("ok")), (bad, len(reasons) - reasons.count("ok"))):
                self._counts[name] += count
                self._timeline.add(Counter(track, name, time, self._counts[name]))
