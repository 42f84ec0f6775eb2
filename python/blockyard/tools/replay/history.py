"""`History`: the timeline of an engine in virtual time."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockyard import Scheduler
from blockyard.scheduler.step import Step
from blockyard.tools.timeline import Counter, Span, Timeline

__all__ = ["History"]

_COPIES: Final = {"swap_in": "host to device", "swap_out": "device to host"}


class History:
    """Records steps, copies and the use of each tier in a timeline.

    Args:
        timeline: a timeline in seconds; several engines can share one.
        engine: put before the names of the engine's tracks.
    """

    def __init__(self, timeline: Timeline, engine: str = "") -> None:
        timeline.tracks = [*timeline.tracks, *(f"{engine}{track}" for track in ("steps", *_COPIES.values()))]
        self._timeline, self._engine = timeline, engine
        self._values: dict[tuple[str, str], float] = {}

    def step(self, start: float, end: float, step: Step, scheduler: Scheduler, stored: int) -> None:
        """Record a step, and the contents of the pools and queues."""
        kind = "decode" if step.decodes == step.rows else "prefill" if not step.decodes else "prefill and decode"
        args = {"sequences": step.rows, "tokens": len(step.token_ids)}
        self._timeline.add(Span(f"{self._engine}steps", kind, start, end, args))
        if stored or ("store (blocks)", "stored") in self._values:
            self._count("store (blocks)", "stored", start, stored)
        self._state(start, scheduler)

    def plain_steps(self, start: float, end: float, contexts: NDArray[np.int64], scheduler: Scheduler) -> None:
        """Record steps of plain decoding as one span."""
        args = {"steps": len(contexts), "sequences": contexts.shape[1], "tokens": contexts.size}
        self._timeline.add(Span(f"{self._engine}steps", "decode", start, end, args))
        self._state(start, scheduler)

    def idle(self, time: float, scheduler: Scheduler) -> None:
        """Record that nothing runs, so that the last step's state does not last until the next step."""
        self._state(time, scheduler)

    def _state(self, time: float, scheduler: Scheduler) -> None:
        stats = scheduler.manager.stats()
        for tier in ("device", "host"):
            if size := stats.num_blocks[tier]:
                panel = f"{tier} (blocks)"
                self._count(panel, "in use", time, stats.used_blocks[tier])
                self._count(panel, "cached", time, stats.cached_blocks[tier])
                self._count(panel, "size", time, size)
        running, swapped = scheduler.num_running, scheduler.num_swapped
        self._count("requests", "running", time, running)
        self._count("requests", "waiting", time, scheduler.num_unfinished - running - swapped)
        self._count("requests", "swapped", time, swapped)

    def copies(self, start: float, end: float, way: str, blocks: int) -> None:
        """Record a batch of copies."""
        self._timeline.add(Span(f"{self._engine}{_COPIES[way]}", way, start, end, {"blocks": blocks}))

    def _count(self, panel: str, name: str, time: float, value: float) -> None:
        if self._values.get((panel, name)) != value:
            self._values[panel, name] = value
            self._timeline.add(Counter(f"{self._engine}{panel}", name, time, value))
