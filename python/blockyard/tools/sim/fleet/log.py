"""`FleetLog`: what happens in a fleet, as lines and on a timeline."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from blockyard.tools.sim.loop import Loop
from blockyard.tools.timeline import Counter, Mark, Span, Timeline

__all__ = ["BlockCounts", "FleetLog"]

_COUNTED: Final = {"get": ("reads (blocks)", "hits", "misses"), "put": ("writes (blocks)", "stored", "not stored")}


@dataclass
class BlockCounts:
    """What the engines of a fleet read from the store and wrote to it.

    Attributes:
        read: blocks read.
        found: those that were found.
        computed_again: those that were missed although an engine with the same weights had stored them before: they
            were evicted, forgotten, or lost to a fault.
        written: blocks written.
        stored: those whose write was confirmed.
    """

    read: int = 0
    found: int = 0
    computed_again: int = 0
    written: int = 0
    stored: int = 0


class FleetLog:
    """A fleet's log: one line for each event, and a timeline with a track for the faults and one for each engine.

    On the track of a serving engine, a span is a request, from its arrival to its last token. On the track of an engine
    that calls its store, a span is a batch, from its submission until it is collected. Batches and requests of a killed
    engine never end, and are left out.

    Args:
        loop: provides the time.
        engines: number of engines.

    Attributes:
        lines: the lines.
        timeline: the timeline.
        blocks: the counts of all engines.
    """

    def __init__(self, loop: Loop, engines: int) -> None:
        self.lines: list[str] = []
        self.timeline = Timeline("s", ["faults", *(f"engine {number}" for number in range(engines))])
        self._loop = loop
        self.blocks = BlockCounts()
        self._stored = set[Hashable]()
        self._counts: Counts[str] = Counts()
        self._faults: list[tuple[float, str, str]] = []  # those that have begun

    def say(self, who: str, text: str) -> None:
        """Add a line."""
        self.lines.append(f"{self._loop.now:9.4f} {who} {text}")

    def mark(self, track: str, name: str) -> None:
        """Mark an event without a duration."""
        self.timeline.add(Mark(track, name, self._loop.now))

    def begin_fault(self, kind: str, who: str) -> tuple[float, str, str]:
        """Begin a fault of an engine or the server."""
        self.say(who, f"{kind} begins")
        self._faults.append(fault := (self._loop.now, kind, who))
        return fault

    def end_fault(self, fault: tuple[float, str, str]) -> None:
        """End what `begin_fault` has returned."""
        self._faults.remove(fault)
        start, kind, who = fault
        if self._loop.now > start:
            self.timeline.add(Span("faults", kind, start, self._loop.now, {"on": who}))
        else:
            self.mark("faults", kind)

    def end_faults(self) -> None:
        """End the faults that last until the run ends."""
        for fault in tuple(self._faults):
            self.end_fault(fault)

    def add_batch(self, who: str, kind: str, start: float, reasons: Sequence[str]) -> None:
        """Add a store's answer to a batch, and count its blocks."""
        counts = Counts(reason or "ok" for reason in reasons)
        result = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
        self.timeline.add(Span(who, kind, start, self._loop.now, {"blocks": len(reasons), "result": result}))
        if kind in _COUNTED:
            track, good, bad = _COUNTED[kind]
            self._count(track, {good: counts["ok"], bad: len(reasons) - counts["ok"]})

    def count(self, kind: str, names: Sequence[Hashable], reasons: Sequence[str]) -> None:
        """Count a store's answer to a batch of blocks, whose names tell apart blocks of different weights."""
        found = [name for name, reason in zip(names, reasons, strict=True) if not reason]
        if kind == "get":
            self.blocks.read += len(names)
            self.blocks.found += len(found)
            self.blocks.computed_again += sum(
                bool(reason) and name in self._stored for name, reason in zip(names, reasons, strict=True)
            )
        elif kind == "put":
            self.blocks.written += len(names)
            self.blocks.stored += len(found)
            self._stored.update(found)
        else:
            self._stored.difference_update(found)

    def add_request(self, who: str, name: str, start: float, *, prompt: int, tokens: int) -> None:
        """Add a finished request with the number of its tokens."""
        args: dict[str, float | str] = {"request": name, "prompt": prompt, "tokens": tokens}
        self.timeline.add(Span(who, "request", start, self._loop.now, args))
        self._count("requests", {"finished": 1})

    def _count(self, track: str, counts: dict[str, int]) -> None:
        """Add to the counters of a panel; it exists from its first event on."""
        for name, count in counts.items():
            if name not in self._counts:
                self.timeline.add(Counter(track, name, 0.0, 0))
            self._counts[name] += count
            self.timeline.add(Counter(track, name, self._loop.now, self._counts[name]))
