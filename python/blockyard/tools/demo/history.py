"""`StepHistory`: a timeline of a demo run: tiers, transfers, preemptions and faults of each step."""

from __future__ import annotations

from collections import Counter as Counts
from typing import Final, Literal

from blockyard.integrations.transformers.generator import Generator
from blockyard.tools.demo.serve import Faults
from blockyard.tools.timeline import Counter, Span, Timeline

__all__ = ["StepHistory"]

_TIERS: Final[tuple[Literal["device", "host", "external"], ...]] = ("device", "host", "external")
_PREEMPTIONS: Final = {
    "swap to host": "preempted_swap_host",
    "swap to external": "preempted_swap_external",
    "recompute": "preempted_recompute",
}


class StepHistory:
    """Adds each step to a timeline whose unit is the step.

    Args:
        generator: the generator that serves the run.
        faults: the wrappers that count and disturb its transfers.
        timeline: the timeline to fill in.
    """

    def __init__(self, generator: Generator, faults: Faults, timeline: Timeline) -> None:
        self._generator, self._faults, self._timeline = generator, faults, timeline
        timeline.tracks = ("faults", "preemptions")
        self._step = 0
        self._before: Counts[tuple[str, str]] = Counts()
        self._shown: dict[tuple[str, str], int] = {}
        self._add_counters()

    def after_step(self, done: int, total: int) -> None:
        """Add a step.

        Args:
            done: number of finished requests.
            total: number of requests.
        """
        del done, total
        self._step += 1
        counts = self._counts()
        for (track, name), count in (counts - self._before).items():
            self._timeline.add(Span(track, name, self._step - 1, self._step, {"count": count}))
        self._before = counts
        self._add_counters()

    def _counts(self) -> Counts[tuple[str, str]]:
        """Return how often each event has happened so far, by track and name."""
        faults, stats, found = self._faults, self._generator.scheduler.stats(), Counts[tuple[str, str]]()
        if faults.counting is not None:
            for (kind, src, dst), blocks in faults.counting.blocks.items():
                found[f"{src} to {dst}", kind] = blocks
        for name, counter in _PREEMPTIONS.items():
            found["preemptions", name] = getattr(stats, counter)
        found["faults", "request lost bytes"] = stats.lost
        if faults.corrupting is not None:
            found["faults", "stored block damaged"] = faults.corrupting.stored
            found["faults", "damaged block read"] = faults.corrupting.read
        if faults.sabotaged is not None:
            found["faults", "transfer dropped"] = bool(faults.sabotaged.dropped)
        return found

    def _add_counters(self) -> None:
        scheduler = self._generator.scheduler
        panels: dict[str, dict[str, int]] = {}
        for tier in _TIERS:
            pool = self._generator.manager.pool(tier)
            panels[f"{tier} (blocks)"] = {"in use": pool.num_blocks - pool.num_free}
            if tier != "external":  # a store is so large that its use would be a flat line
                panels[f"{tier} (blocks)"]["size"] = pool.num_blocks
        running, swapped = scheduler.num_running, scheduler.num_swapped
        waiting = scheduler.num_unfinished - running - swapped
        panels["requests"] = {"running": running, "waiting": waiting, "swapped": swapped}
        panels["prefix cache (tokens)"] = {"hits": scheduler.stats().cached_tokens}
        for track, values in panels.items():
            for name, value in values.items():
                if self._shown.get((track, name)) != value:
                    self._shown[track, name] = value
                    self._timeline.add(Counter(track, name, self._step, value))
