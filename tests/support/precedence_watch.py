"""Watches that no request waits while those of a lower priority hold what it lacks, nor while too many overtake it."""

from __future__ import annotations

from typing import Any

from blockyard.scheduler import Request, Scheduler, Step

PATIENCE = 2
"""Steps in a row: one preempts, and one lets the blocks of a swap-out become free."""


class PrecedenceWatch:
    """Mixed into the scheduler's machine."""

    scheduler: Scheduler
    waited = 0
    head: object = None  # the request that goes first, while it is kept waiting

    def __init__(self) -> None:
        super().__init__()
        self.started: dict[str, Request] = {}
        self.overtaken: dict[str, tuple[Request, int]] = {}  # requests that wait for their first step, and how often

    def check_shape(self: Any, step: Step) -> None:
        super().check_shape(step)  # type: ignore[misc]
        self.check_overtakes(step)
        # Only what is held at rest counts: not what transfers lease, and tokens that a prompt's chunk takes.
        others = [ticket for ticket in self.manager.stats().open_tickets if ticket != step.decision.ticket]
        is_quiet = not (len(step.decision) or others or step.samples < step.rows or len(step.token_ids) >= 20)
        head = self.kept_waiting(step) if is_quiet else None
        # Those behind it wait for seats and blocks of their own priority, too.
        self.waited = 0 if head is None else self.waited + 1 if head is self.head else 1
        self.head = head
        if self.waited > PATIENCE:
            raise AssertionError(f"a request has waited {self.waited} steps for what one of a lower priority holds")

    def check_overtakes(self: Any, step: Step) -> None:
        """Check that few requests have started before one ahead of them, and none of a lower priority."""
        runs = {step.owner(row)[0] for row in range(step.rows)}
        waiting = [each for each in self.scheduled.values() if self.started.get(each.request_id) is not each]
        waiting.sort(key=lambda each: (each.priority, each.arrival))  # the earliest added first
        overtaken = {}
        for place, ahead in enumerate(waiting):
            name = ahead.request_id
            if name in runs:
                self.started[name] = ahead
                continue
            request, count = self.overtaken.get(name, (None, 0))
            starts = [behind for behind in waiting[place + 1 :] if behind.request_id in runs]
            count = (count if request is ahead else 0) + len(starts)
            if count > self.scheduler._overtakes or any(behind.priority > ahead.priority for behind in starts):
                raise AssertionError(f"request {name!r} waits and {count} have overtaken it, at last {starts}")
            overtaken[name] = (ahead, count)
        self.overtaken = overtaken

    def kept_waiting(self: Any, step: Step) -> object:
        """Return the request that goes first if it would fit without all requests of a lower priority; else None."""
        heads = (self.scheduler._swapping.swapped.head(), self.scheduler._waiting.head())
        first = min((idle for idle in heads if idle is not None), key=lambda idle: idle.rank[0], default=None)
        owners: list[Request] = [self.live[step.owner(row)[0]] for row in range(step.rows)]
        if first is None or first.state.seats or all(owner.priority <= first.rank[0] for owner in owners):
            return None
        size, manager = self.manager.block_size, self.manager
        groups = len(manager.groups)
        kept, freed, to_come = set(), set(), 0
        for owner, handle in zip(owners, step.handles.tolist(), strict=True):
            table = {block for group in range(groups) for block in manager.block_table(handle, group).tolist()}
            if owner.priority > first.rank[0]:
                freed |= table
            else:
                kept |= table
                to_come += -(-(len(owner.prompt) + owner.max_tokens) // size) * groups - len(table)
        seats = 4 - sum(owner.n for owner in {id(o): o for o in owners if o.priority <= first.rank[0]}.values())
        wanted = sum(-(-(len(tokens) + 1) // size) for tokens in first.tokens) * groups + to_come
        pool = manager.pool()
        has_blocks = wanted + pool.reserved <= pool.num_free + len(freed - kept)
        return first.state if has_blocks and len(first.indices) + first.forks <= seats else None
