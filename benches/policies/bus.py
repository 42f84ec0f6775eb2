"""A model of the bus between device and host: how long steps wait for their copies, and how long they compute."""

from __future__ import annotations

from collections.abc import Sequence

from blockyard import Pairs
from blockyard.scheduler import Step

TOKEN = 40e-6
"""Seconds that a token computes."""
BLOCK = 2 << 20
"""Bytes of a block."""
BYTE = 1 / 25e9
"""Seconds that a byte takes over PCIe 5, each way."""


class Bus:
    """Copies of one step after the other, both ways at a time, as `StepExecutor` orders them.

    A step computes once the device has read what the step writes over, and then its loads have landed. The copies of an
    earlier step go on meanwhile.

    Args:
        sizes: bytes of a block of each page class, if not `BLOCK`.

    Attributes:
        computed: seconds that all steps compute.
        waited: seconds that they wait for device blocks to be read.
        loaded: seconds that they wait for their loads after that.
    """

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes or (BLOCK,)
        self.computed = self.waited = self.loaded = 0.0
        self._now = self._read = 0.0  # the time, and when all device blocks are read
        self._read_by: dict[int, float] = {}  # when those of a ticket are

    def take(self, step: Step) -> None:
        """Carry out a step."""
        decision, now = step.decision, self._now
        self._read_by = {ticket: at for ticket, at in self._read_by.items() if at > now}
        if copied := self._seconds(decision.swap_out):
            self._read_by[decision.ticket] = self._read = max(self._read, now) + copied
        begin = max([now, *(self._read_by.get(ticket, now) for ticket in decision.after)])
        loaded = self._seconds(decision.swap_in)
        computed = len(step.token_ids) * TOKEN
        self.waited += begin - now
        self.loaded += loaded
        self.computed += computed
        self._now = begin + loaded + computed

    def _seconds(self, copies: Sequence[Pairs]) -> float:
        return sum(len(pairs) * self._sizes[pairs.page_class] for pairs in copies) * BYTE
