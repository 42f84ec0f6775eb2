"""Swapping: sequences that leave the device with their blocks, and come back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blockyard._core import AllocStatus, BlockManager, Fit
from blockyard.scheduler.ranked_queue import RankedQueue
from blockyard.scheduler.request import IdleSequences, RequestState, SequenceStatus
from blockyard.scheduler.rows import Seated, SequenceRows
from blockyard.scheduler.step import SchedulerStats, StepBuilder

__all__ = ["Swapping"]


class Swapping:
    """Sequences whose blocks are on the host or in the external tier, and those returning.

    Args:
        manager: the scheduler's manager.
        rows: rows of the running sequences.
        builder: builder of the step in which they come back.
        waiting: queue for sequences that lose their blocks.
        stats: counts swaps.
        overlap_io: whether sequences from the external tier are left out of steps until they have arrived.
        give_up_lease: ends a waiting prompt's lease, see `LoadingAhead.give_up_last`.

    Attributes:
        swapped: queue of swapped-out sequences.
    """

    def __init__(
        self,
        manager: BlockManager,
        rows: SequenceRows,
        builder: StepBuilder,
        waiting: RankedQueue,
        stats: SchedulerStats,
        *,
        overlap_io: bool,
        give_up_lease: Callable[[tuple[float, ...], int], bool],
    ) -> None:
        self.swapped = RankedQueue(SequenceStatus.SWAPPED)
        self._manager = manager
        self._rows = rows
        self._builder = builder
        self._waiting = waiting
        self._stats = stats
        self._overlap_io, self._give_up_lease = overlap_io, give_up_lease
        self._prefix_caching = manager.prefix.enabled
        self._away: dict[IdleSequences, None] = {}  # ordered, so runs are reproducible
        self._returning: list[IdleSequences] = []  # from the external tier, in the step being built
        self._loading: dict[int, list[IdleSequences]] = {}  # by ticket
        self._landed: list[IdleSequences] = []  # get their rows in the next step

    def __bool__(self) -> bool:
        return bool(self._away)

    def move_out(self, gone: NDArray[np.int64]) -> bool:
        """Swap one request's rows out, if host or external tier has room. Returns whether it did."""
        manager, rows = self._manager, self._rows
        handles = rows.handles[gone]
        if manager.can_swap_out(handles):
            manager.swap_out(handles)
            self._stats.preempted_swap_host += 1
        elif manager.can_swap_out(handles, to="external"):
            manager.swap_out(handles, to="external")
            self._stats.preempted_swap_external += 1
        else:
            return False
        owners = [rows.owner(row) for row in gone.tolist()]
        idle = IdleSequences(
            owners[0][0], [index for _, index in owners], [rows.tokens_of(row) for row in gone.tolist()], handles
        )
        self._away[idle] = None
        self.swapped.push(idle)
        rows.remove(gone)
        return True

    def begin(self, ticket: int) -> None:
        """Record the ticket that loads sequences from the external tier."""
        if self._returning:
            self._loading[ticket], self._returning = self._returning, []

    def end(self, ticket: int) -> None:
        """Schedule sequences that arrived with a ticket for the next step."""
        if self._loading:
            self._landed += self._loading.pop(ticket, ())

    def seat_landed(self) -> None:
        """Seat returned sequences. No step is in flight."""
        if self._landed:
            landed, self._landed = self._landed, []
            self._seat([seated for idle in landed if idle in self._away for seated in self._return(idle)])

    def holders(self, handles: NDArray[np.uint64]) -> list[RequestState]:
        """Return the swapped-out requests that own any of these handles."""
        return [idle.state for idle in self._away if np.isin(idle.handles, handles).any()]

    def drop(self, idle: IdleSequences) -> None:
        """Free the blocks of swapped-out sequences."""
        if idle.status is SequenceStatus.SWAPPED:
            self.swapped.discard(idle)
        else:
            self._rows.seats_left += len(idle.indices)
            idle.state.idle.remove(idle)
        del self._away[idle]
        self._manager.free(idle.handles)

    def resume(self, priority: float) -> None:
        """Bring swapped requests back, in order, while they fit with one more token per sequence.

        Those of a lower priority than `priority` stay.
        """
        computed = False
        while (idle := self.swapped.head()) is not None and idle.rank[0] <= priority and not self._rows.is_closed:
            apart = self._overlap_io and self._manager.tier(int(idle.handles[0])) == "external"
            # A ticket with store reads ends late: nothing in this step may depend on it.
            mixed = computed if apart else bool(self._returning)
            if mixed or len(idle.indices) > self._rows.seats_left:
                break
            fit = self._bring_back(idle.handles)
            status = fit.status
            if status == AllocStatus.LATER:
                if fit.blocks and self._give_up_lease(idle.rank[:1], fit.blocks - fit.free):
                    continue  # those that wait come after it
                if computed or self._is_busy():
                    break
            if status != AllocStatus.OK:  # nothing will make room for it, but it can be recomputed
                self.recompute(idle)
                continue
            self.swapped.pop()
            self._rows.seats_left -= len(idle.indices)
            if apart:
                idle.status = SequenceStatus.RETURNING
                idle.state.idle.append(idle)
                self._returning.append(idle)
                continue
            computed = True
            self._run_now(idle)

    def _is_busy(self) -> bool:
        """Whether anything runs, comes back or is copied, after which there may be more room."""
        return bool(self._rows.count or self._returning or self._landed or self._manager.num_open_tickets)

    def _run_now(self, idle: IdleSequences) -> None:
        """Seat sequences that have just come back, with their next tokens, in this step."""
        builder, rows = self._builder, self._rows
        new = builder.insert(rows.decodes, len(idle.indices))
        builder.token_ids[new] = [tokens[-1] for tokens in idle.tokens]
        ids = builder.token_ids[new] if self._prefix_caching and builder.drafts is None else None
        builder.slots[:, new] = self._manager.append(idle.handles, token_ids=ids)
        self._seat(self._return(idle))

    def _bring_back(self, handles: NDArray[np.uint64]) -> Fit:
        """Swap sequences in, if they fit now."""
        fit = self._manager.can_swap_in(handles)
        if fit:
            is_external = self._manager.tier(int(handles[0])) == "external"
            self._manager.swap_in(handles)
            self._stats.resumed_swap_external += is_external
            self._stats.resumed_swap_host += not is_external
        return fit

    def recompute(self, idle: IdleSequences) -> None:
        """Free the blocks of swapped-out sequences; they wait for recompute from their tokens."""
        self.drop(idle)
        for index, tokens in zip(idle.indices, idle.tokens, strict=True):
            self._waiting.push(IdleSequences(idle.state, [index], [tokens]))

    def _return(self, idle: IdleSequences) -> list[Seated]:
        """Record that sequences are back. Returns the data for their rows."""
        del self._away[idle]
        if idle.status is SequenceStatus.RETURNING:
            idle.state.idle.remove(idle)
        each = zip(idle.indices, idle.tokens, idle.handles.tolist(), strict=True)
        return [(idle.state, index, tokens, handle, 0, 0) for index, tokens, handle in each]

    def _seat(self, seated: list[Seated]) -> None:
        self._rows.read_tables(self._rows.insert(seated))
