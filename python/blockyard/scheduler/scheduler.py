"""The reference continuous-batching scheduler: which sequences run in a step, and which are preempted.

Sequences *wait* (no blocks), *run* (blocks on the device, a row in the step) or are *swapped* (blocks on the host or in
the external tier). Each queue is ordered by priority, then arrival. A step appends one token to every sequence past its
prompt, and the next chunk to every prompt in prefill. If blocks run short, the lowest-ranked requests are preempted: to
the host, to the external tier if the host is full, or back to waiting (recompute) if both are. Within a priority,
swapped requests come back before new prompts are admitted. Idle requests preempt running ones of a lower priority.

When the device shrinks, `update` returns the requests that can no longer finish with their `error`. The cost of a plain
step does not grow with the number of waiting requests, and no Python code runs per sequence: state is in arrays
(`rows.py`), and objects are touched only when a sequence starts, ends, forks or moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from operator import gt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockyard._core import BlockManager, HashedPrompt, Pairs, StepDecision
from blockyard.errors import (
    BlockyardError,
    InvalidArgumentError,
    OutOfBlocksError,
    StepOrderError,
    UnknownTicketError,
)
from blockyard.layout.sizes import as_float
from blockyard.scheduler import options
from blockyard.scheduler.acceptance import Acceptance
from blockyard.scheduler.admission import Admission, Precedence
from blockyard.scheduler.loop import Cache, CacheLoop, Change
from blockyard.scheduler.options import BlockNeeds, DefragPolicy, PreemptionCosts, PreemptionMode
from blockyard.scheduler.ranked_queue import RankedQueue
from blockyard.scheduler.request import Fetch, Finished, IdleSequences, Request, RequestState, SequenceStatus
from blockyard.scheduler.rows import BASE, DONE, LENGTH, LIMIT, NUMBER, SEAT, SequenceRows
from blockyard.scheduler.step import (
    PlainSteps,
    SchedulerStats,
    Step,
    StepBuilder,
    as_token_ids,
    count_step,
    decide_plain,
    sampled_tokens,
)
from blockyard.scheduler.stop_tokens import StopTokens
from blockyard.scheduler.swapping import Swapping
from blockyard.stores.threaded.runtime import runtime
from blockyard.traces.formats import Hint
from blockyard.traces.recorder import TokenRecorder, TraceRecorder

if TYPE_CHECKING:
    from blockyard.executor.executor import Executor

__all__ = ["Scheduler"]


class Scheduler:
    """Decides which sequences run, over a `KVCache` or a `BlockManager`.

    One step is in flight at a time. Over a cache: `step`, whose `with` block computes, then `update`; call the
    scheduler's `poll` and `drain`, not the cache's. Over a manager, the caller carries out decisions: `schedule`,
    `complete`, `update`. Requests may be added and aborted in between.

    If an exception, such as `KeyboardInterrupt`, ends a call, the next one first gives up everything in flight, and all
    requests start again from their tokens. An `add` or `abort` that raised had no effect. A `complete` that raised must
    be retried; tokens given to an `update` that raised may be lost.

    Args:
        cache: a `KVCache` or `BlockManager`, with any cache groups but cross attention; nothing else may admit
            sequences to it. A second scheduler over it replaces an idle one, which then refuses requests.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of tokens in one step; prompts beyond it wait or are computed in chunks.
        preemption_mode: `"swap"` moves a victim's blocks out if there is room, `"recompute"` drops them, `"auto"` drops
            them if the request has one running sequence, `PreemptionCosts` if that is cheaper. A prefill is dropped.
        num_lookahead_tokens: maximum number of draft tokens per sequence and step, for speculative decoding or for
            several tokens per step; see `Step`. They count towards `max_num_batched_tokens`. They never cause a
            preemption: if blocks are short, the step has none.
        overlap_io: leave a sequence returning from the external tier out of steps until it has arrived. Other tickets
            that load what the step computes must have ended before the next `schedule`. None: on over a cache, else
            off.
        defragment: block moves on the device to decide in every step, after everything else has its blocks; none by
            default. The executor must support `move`.
        prefetch: starts loading the beginning of a prompt from a prefix store: `PrefixStore.prefetch`. It is called for
            waiting prompts in order, as many as fit, and again if a prompt's blocks are gone. While a prompt loads,
            others go first. None: the cache's, if it has a prefix store.
        executor: carries out decisions instead of the cache's `executor`; for example a `ParallelExecutor`.
        recorder: writes the requests to a trace. None: to the file that `BLOCKYARD_RECORD` names, if that is set.
        max_overtakes: how many requests may start before an earlier one of their priority that does not fit yet.

    Attributes:
        manager: the `BlockManager`.

    Raises:
        InvalidArgumentError: an option is out of its range, the manager has a group with cross attention or another
            scheduler with unfinished requests, an executor lacks its cache or is too small, or a recorder is closed or
            has another block size.
        BlockyardError: the cache is closed.

    Example:
        >>> from blockyard import KVCache, KVLayout, Request, Scheduler
        >>> layout = KVLayout("kv_first", num_layers=2, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
        >>> with KVCache(layout, device_blocks=8, host_blocks=8) as cache:
        ...     scheduler = Scheduler(cache)
        ...     scheduler.add(Request("a", [1, 2, 3], max_tokens=4))
        ...     while scheduler.num_unfinished:
        ...         with scheduler.step() as step:
        ...             sampled = [7] * step.num_draws  # the model computes step.token_ids
        ...         finished = scheduler.update(step, sampled)
        >>> finished[0].outputs
        ((7, 7, 7, 7),)

    Source: the policy of vLLM 0.7.3's V0 scheduler, with the chunked prefill and the prefix cache of vLLM V1.
    """

    def __init__(
        self,
        cache: BlockManager | Cache,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        preemption_mode: PreemptionMode | PreemptionCosts = "auto",
        num_lookahead_tokens: int = 0,
        overlap_io: bool | None = None,
        defragment: DefragPolicy | None = None,
        prefetch: Callable[[HashedPrompt], Fetch] | None = None,
        executor: Executor | None = None,
        recorder: TraceRecorder | None = None,
        max_overtakes: int = 0,
    ) -> None:
        manager = options.manager_of(cache, executor)
        limits = (max_num_seqs, max_num_batched_tokens, num_lookahead_tokens, max_overtakes)
        limits = options.check_options(manager, preemption_mode, *limits)
        options.check_defragment(manager, defragment)
        self._max_num_seqs, self._max_num_batched_tokens, self._num_lookahead_tokens, self._overtakes = limits
        self.manager = manager
        self._clock = runtime().monotonic
        self._change = Change()
        self._stats = SchedulerStats()
        self._prefix_caching = manager.prefix.enabled
        self._loop: CacheLoop | None = None
        if isinstance(cache, Cache):
            self._loop = CacheLoop(self, cache, executor, self._change, self._end_ticket, self._count_loading)
            overlap_io = True if overlap_io is None else overlap_io
            prefetch = cache.prefix_store.prefetch if prefetch is None and cache.prefix_store is not None else prefetch
        self._overlap_io = bool(overlap_io)
        self._defragment, self._prefetch, self._preemption_mode = defragment, prefetch, preemption_mode
        self._requests: dict[str, RequestState] = {}
        self._priority, self._mixed = 0, False  # of the last request; whether those in the scheduler may differ in it
        self._num_added = 0
        self._handed: set[int] = set()  # tickets that the caller ends, of a scheduler over a manager
        self._dropped: Step | None = None  # the step that an exception has dropped: its tokens have no effect
        self._pools = [manager.pool(tier) for tier in ("device", "host", "external")]
        self._needs = BlockNeeds(manager, self._max_num_batched_tokens)
        self._recording = TokenRecorder(recorder, manager.block_size, manager.groups)
        self._make_empty()
        options.take_over(self, manager)
        manager.prefix.store_jobs.end_lease(None)  # of a scheduler that was dropped

    def _make_empty(self) -> None:
        """Set up empty queues, rows and counts."""
        self._rows = SequenceRows(self._max_num_seqs, self.manager, self._num_lookahead_tokens)
        sizes = (self._max_num_batched_tokens, self._max_num_seqs, self._num_lookahead_tokens)
        self._builder = StepBuilder(*sizes, len(self._needs.groups))
        self._stop_tokens = StopTokens()
        self._waiting = RankedQueue(SequenceStatus.WAITING)
        parts = (self.manager, self._rows, self._builder, self._waiting, self._stats)
        self._admission = Admission(
            *parts,
            needs=self._needs,
            prefetch=self._prefetch,
            change=self._change,
            max_overtakes=self._overtakes,
        )
        self._swapping = Swapping(*parts, overlap_io=self._overlap_io, give_up_lease=self._admission.ahead.give_up_last)
        self._precedence = Precedence(self.manager, self._rows, self._admission, self._swapping, self._preempt)
        self._acceptance = Acceptance(self.manager, self._rows, self._builder, self._stop_tokens, self._stats)
        self._leaving: list[RequestState] = []  # their rows are freed once no step is in flight
        self._refused: list[RequestState] = []  # to be reported by `update`
        self._in_flight: Step | None = None
        self._capacity = self._needs.blocks()  # as of the last check which requests fit the device

    @property
    def num_unfinished(self) -> int:
        """Number of requests that are waiting, running, swapped, returning, or refused but not yet reported."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Number of requests with sequences whose blocks are on the device."""
        return len(np.unique(self._rows.fields[NUMBER, : self._rows.count]))

    @property
    def num_swapped(self) -> int:
        """Number of requests whose blocks are on the host or in the external tier and not returning yet."""
        return len(self._swapping.swapped)

    @property
    def num_loading(self) -> int:
        """Number of waiting requests whose prompts are loading from a prefix store, as of the last step."""
        return len(self._admission.ahead.loading)

    def _count_loading(self) -> int:
        return self._admission.count_loading()

    def stats(self) -> SchedulerStats:
        """Return a snapshot of the counters since the start."""
        return replace(self._stats)

    # ---- requests ----

    def add(self, request: Request) -> None:
        """Add a request.

        Raises:
            InvalidArgumentError: the request is malformed, or its id is in use.
            OutOfBlocksError: it could not finish even alone on the device.
            StepOrderError: another `Scheduler` was created over the same manager.
        """
        options.check_current(self)
        state = RequestState(request, self._num_added + 1, self._max_num_seqs)
        if request.request_id in self._requests:
            raise InvalidArgumentError(f"request {request.request_id!r} is already in the scheduler")
        if request.retain and not self._prefix_caching:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has retain {request.retain}, but there is no prefix caching"
            )
        if (lack := self._lack_of_room(state)) is not None:
            raise lack
        self._begin()
        try:
            self._stop_tokens.add(state.stops)
            # Else it would go unchecked if the device shrinks back to its size at the last step.
            self._capacity = list(map(max, self._capacity, self._needs.blocks()))
            self._num_added += 1
            mixed = bool(self._requests) and (self._mixed or state.rank[0] != self._priority)
            self._waiting.push(IdleSequences(state, [0], [state.prompt], forks=request.n - 1))
            self._recording.add(request.request_id, state.prompt, (request.salt, request.lora_id, state.extras))
        except BaseException:
            self._recording.drop(request.request_id)
            raise
        self._priority, self._mixed = state.rank[0], mixed
        self._requests[request.request_id] = state  # last: an interrupted call has no effect
        self._change.begun = False

    def abort(self, request_id: str) -> None:
        """Drop a request; its id can be reused at once, its blocks now or after the `update` of the step in flight.

        Raises:
            InvalidArgumentError: there is no such request.
        """
        if (state := self._requests.get(request_id)) is None:
            raise InvalidArgumentError(f"request {request_id!r} is not in the scheduler")
        self._begin()
        generated = self._rows.generated(state, 0)
        self._refused = [other for other in self._refused if other is not state]
        self._release(state)
        self._close(state, generated)
        del self._requests[request_id]  # last: an interrupted call has no effect
        self._change.begun = False

    # ---- a step ----

    def step(self, *, by_layer: bool = False, num_lookahead_tokens: int | None = None) -> Step:
        """Decide one step over a `KVCache` and start its transfers: `with scheduler.step() as step: ...`.

        The `with` block computes and samples; then `update` takes the tokens. Transfers overlap compute: the device
        waits for loads from the host, stores continue in the background, and sequences from the external tier join a
        later step. The end of the block completes landed transfers. If the step computes nothing, it waits until one
        lands. Requests that lost bytes start again from their tokens; the log `blockyard.scheduler` says why. An
        exception here or in the block gives up the step: its requests start again from their tokens.

        Args:
            by_layer: loads from the host arrive layer by layer; the model waits for each layer with
                `step.wait_for_layer`.
            num_lookahead_tokens: draft tokens per sequence in this step, at most the scheduler's; None means those.

        Raises:
            InvalidArgumentError: `num_lookahead_tokens` is out of range; nothing was changed.
            StepOrderError: the previous step has not ended, or was not given to `update`.
            InvariantError: nothing can run although requests wait.
        """
        loop = self._cache_loop("step")
        if self._change.begun:
            self._restart_all()
        if self._in_flight is not None:
            loop.refuse(self._in_flight)
        lookahead = options.lookahead_of_step(num_lookahead_tokens, self._num_lookahead_tokens)
        loop.prepare()
        step = self._schedule(lookahead, by_layer=by_layer)
        loop.open, step.loop = step, loop
        self._change.begun = False
        return step

    def poll(self) -> None:
        """Over a `KVCache`: complete landed transfers and advance the prefix store; never waits.

        `step` does this too. While there is nothing to compute, call it about every 10 ms.

        Raises:
            StepOrderError: there is no cache.
        """
        loop = self._cache_loop("poll")
        self._begin()
        loop.steps.poll()
        loop.end_tickets()
        self._change.begun = False

    def drain(self) -> None:
        """Over a `KVCache`: wait for all transfers in flight, so that no ticket is open.

        Raises:
            StepOrderError: there is no cache.
        """
        loop = self._cache_loop("drain")
        self._begin()
        loop.steps.drain()
        loop.end_tickets()
        self._change.begun = False

    def _cache_loop(self, call: str) -> CacheLoop:
        if self._loop is None:
            raise StepOrderError(f"{call} needs a Scheduler of a KVCache; of a manager: schedule, complete, update")
        return self._loop

    def schedule(self, *, num_lookahead_tokens: int | None = None) -> Step:
        """Decide one step. Carry out its decision before computing its rows.

        A previous step that was never given to `update` is given up: its sequences start again from their tokens.

        Args:
            num_lookahead_tokens: draft tokens per sequence in this step, at most the scheduler's; None means those.

        Raises:
            InvalidArgumentError: `num_lookahead_tokens` is out of range; nothing was changed.
            StepOrderError: this is a scheduler over a `KVCache`.
        """
        if self._loop is not None:
            raise StepOrderError("schedule is for a Scheduler of a BlockManager; of a KVCache: step")
        lookahead = options.lookahead_of_step(num_lookahead_tokens, self._num_lookahead_tokens)
        step = self._schedule(lookahead)
        self._handed.add(step.decision.ticket)
        self._change.begun = False
        return step

    def plain_steps(self) -> PlainSteps | None:
        """Return the next steps if they can only add one token to each running sequence, to `schedule_plain` them.

        None over a `KVCache`, with windows or states, with draft tokens, without `overlap_io`, while a step is in
        flight, without sequences, or if a request waits, loads, is swapped out, computes its prompt, has stop tokens or
        has retained blocks.
        """
        rows, is_still = self._rows, self._in_flight is None and not (self._change.begun or self._loop)
        others = (self._waiting, self._swapping, self._leaving, self._refused, self._stop_tokens, self._defragment)
        is_still &= not (any(others) or self._admission.retained or self._num_lookahead_tokens) and self._overlap_io
        is_plain = is_still and self._needs.is_full and 0 < rows.count == rows.decodes
        return PlainSteps(rows) if is_plain and not self._has_shrunk() else None

    def schedule_plain(self, token_ids: ArrayLike, times: Sequence[float]) -> tuple[int, Step | None, list[Finished]]:
        """Decide plain steps in one call, for a simulated engine: the state is that after `schedule` and `update`.

        Args:
            token_ids: the tokens that the steps sample, uint32 `[steps, rows]`.
            times: when each step is decided, and when the last of them ends, in seconds, `[steps + 1]`. At most the
                `limit` of `plain_steps`.

        Returns:
            How many steps have ended. If the next one has transfers, which end the call, that step: carry out its
            decision, and give it to `update`. Else, or if blocks run short, None: call `schedule`. The requests that
            finished in the last of all steps.

        Raises:
            StepOrderError: the steps may do more.
            InvalidArgumentError: there is not one token for each step and sequence, or a time is not a finite number
                from 0 on; nothing was changed.
        """
        steps = len(times) - 1
        if (plain := self.plain_steps()) is None or steps > plain.limit:
            raise StepOrderError("schedule_plain needs steps that only add a token to each sequence, see plain_steps")
        tokens, shape = np.asarray(token_ids), (steps, len(plain.context))
        if tokens.shape != shape:
            raise InvalidArgumentError(f"token_ids have shape {list(tokens.shape)}, must be {list(shape)}")
        tokens = as_token_ids(tokens.reshape(-1), "token_ids").reshape(shape)
        if not 0 <= as_float("times[-1]", times[-1]) < inf:
            raise InvalidArgumentError(f"times[-1] is {times[-1]}, must be a finite number of seconds from 0 on")
        self._begin()
        try:
            done, decision = decide_plain(self.manager, self._rows, self._builder, self._stats, tokens, times)
        except InvalidArgumentError:
            self._change.begun = False
            raise
        step = None
        if decision is not None:
            self._dropped = None
            step = self._in_flight = self._builder.build(decision, self._rows)
            self._handed |= {decision.ticket}
        ended = []
        if done == plain.limit:
            length, limit = self._rows.fields[[LENGTH, LIMIT], : len(plain.context)]
            ended = self._take_ended((length >= limit).nonzero()[0], times[done])
        finished = [state.finished() for state in ended]
        for state, end in zip(ended, finished, strict=True):
            self._close(state, end.token_ids[0])
            del self._requests[state.request.request_id]
        self._change.begun = False
        return done, step, finished

    def _schedule(self, lookahead: int, *, by_layer: bool = False) -> Step:
        """Decide a step; the caller ends the change."""
        self.give_up()
        if self._waiting:
            is_idle = not (self._rows.count or self._swapping)
            self._admission.ahead.advance(is_idle=is_idle)  # may raise, so before anything changes
        self._change.begun, self._dropped = True, None
        if self._admission.retained:
            self._admission.retained.expire(self._clock())
        return self._decide(lookahead, by_layer=by_layer)

    def _decide(self, lookahead: int, *, by_layer: bool) -> Step:
        self._rows.make_way()
        if self._mixed and self._precedence.make_way():
            lookahead = 0  # draft tokens would take blocks of the first idle sequences
        if not self._append_to_running(lookahead) and (self._waiting or self._swapping.swapped):
            self._precedence.start_idle()
        if self._defragment is not None:
            self._plan_moves(self._defragment)
        if self._admission.room is not None:
            self._admission.room.expect()
        is_away = bool(self._swapping)
        count_step(self._stats, self._pools, self._builder.tokens, is_away=is_away)
        if self._loop is not None:
            decision = self._loop.steps.begin(by_layer=by_layer, prefetch=self._overlap_io)
        else:
            decision = self.manager.take_decision(prefetch=self._overlap_io, now=self._clock())
        step = self._in_flight = self._builder.build(decision, self._rows)
        if is_away:
            self._swapping.begin(decision.ticket)
        return step

    def _plan_moves(self, policy: DefragPolicy) -> None:
        """Decide the step's moves."""
        if not policy.is_for_extents:
            policy.plan(self.manager)
        elif (fit := self._admission.fit_without_extents()) is not None or not self.manager.defrag.progress().done:
            policy.plan(self.manager, fit)

    def complete(self, ticket: int, lost: Sequence[Pairs] = ()) -> list[str]:
        """End a ticket whose transfers have finished; sequences that it swapped in run in the next step.

        Over a `KVCache`, `step`, `poll` and `drain` end tickets.

        Args:
            ticket: the ticket of a step's decision.
            lost: its pairs that did not land.

        Returns:
            Ids of the requests that lost bytes; they start again from their tokens. Their rows in the step in flight
            are `void`: computing them is allowed but has no effect.
        """
        self._begin()
        try:
            handles = self.manager.complete(ticket, lost)
        except BlockyardError as error:
            self._change.begun = False
            if isinstance(error, UnknownTicketError) and ticket in self._handed:
                self._handed.discard(ticket)  # an interrupted call has ended it
                return []
            raise
        names = self._end_ticket(ticket, handles)
        self._handed.discard(ticket)
        self._change.begun = False
        return names

    def _end_ticket(self, ticket: int, lost: NDArray[np.uint64]) -> list[str]:
        """End a ticket that the manager has ended. Returns the requests that lost bytes."""
        names = self._restart_lost(lost) if lost.size else []
        self._swapping.end(ticket)
        return names

    def update(self, step: Step, sampled: ArrayLike) -> list[Finished]:
        """Add a step's sampled tokens to its sequences.

        Args:
            step: returned by `step` or `schedule`. If its rows read blocks that it loads, its ticket must have ended.
            sampled: integers `[step.num_draws]`: one token for each of the first `samples` rows, then one for each of
                `extra_rows`. Tokens of `void` rows are dropped. A decoding row has one more for each of its draft
                tokens: the token that follows it. A draft token is accepted if it equals the token sampled before it;
                tokens sampled after a rejected draft token are dropped.

        Returns:
            The requests that finished in this step, and those refused by `schedule` since the last call, with their
            `error`.

        Raises:
            InvalidArgumentError: the tokens do not match the step; nothing was changed.
            StepOrderError: the step is not in flight, its `with` block has not ended, or `complete` was not called for
                the ticket of its loads; nothing was changed.
        """
        if self._loop is not None and self._loop.open is step:
            raise StepOrderError(f"the step of ticket {step.decision.ticket} is not over: call update after its block")
        if self._change.begun:
            self._restart_all()
        is_dropped, ticket = step is self._dropped, step.decision.ticket
        is_in_flight = self._in_flight is not None and self._in_flight.decision.ticket == ticket
        if step.rows and not is_dropped and not is_in_flight:
            raise StepOrderError(f"the step of ticket {ticket} is not in flight: give update the newest step, once")
        if step.rows and is_in_flight and self._awaits_loads(step.decision):
            raise StepOrderError(
                f"ticket {ticket} loads blocks that its step computes with: call complete before update"
            )
        tokens = sampled_tokens(step, sampled)
        self._change.begun = True
        self._dropped = step  # if an exception ends this call
        reported = [] if is_dropped or not step.rows else self._take_in(step, tokens)
        if is_in_flight:
            self._in_flight = None
        if self._leaving:
            self._drop_leaving()
        if self._refused:
            reported, self._refused = self._refused + reported, []
        # Not in a function: an interrupt as that returned would lose what it reports.
        finished = [state.finished() for state in reported] if reported else []
        try:
            for state, end in zip(reported, finished, strict=True):
                self._close(state, end.token_ids[0])
                del self._requests[state.request.request_id]
            self._dropped, self._change.begun = None, False
            return finished
        except BaseException:  # they start again, and are reported later
            self._requests |= {state.request.request_id: state for state in reported}
            raise

    def _awaits_loads(self, decision: StepDecision) -> bool:
        """Whether the caller has not ended a ticket whose step computes with what it loads: that may still be lost."""
        reads = decision.swap_in and not decision.prefetch and decision.ticket in self._handed
        return bool(reads) and decision.ticket in self.manager.stats().open_tickets

    def _take_in(self, step: Step, tokens: NDArray[np.uint32]) -> list[RequestState]:
        """Take a step's tokens. Returns the requests that they finish."""
        gone = self._acceptance.take_in(step, tokens).nonzero()[0]
        return self._take_ended(gone, self._clock()) if len(gone) else []

    def _take_ended(self, gone: NDArray[np.int64], now: float) -> list[RequestState]:
        """Free rows whose sequences have ended at a time. Returns the requests that they finish."""
        ended = self._end(gone) if len(gone) else []
        for state in ended:
            if state.request.retain:
                self._admission.retained.add(state, now)
        return ended

    # ---- putting a step together ----

    def _append_to_running(self, lookahead: int) -> bool:
        """Append the next token or chunk to all running sequences at once; preempt from the tail until they fit."""
        preempted = False
        while True:
            self._builder.begin()
            try:
                self._append(lookahead)
            except OutOfBlocksError:
                if self._admission.ahead.give_up_last():
                    continue
                if not lookahead:
                    gone = self._rows.worst()
                    if len(gone) == self._rows.count and self._needs.has_classes:
                        self._rows.alone = self._rows.owner(int(gone[0]))[0]
                    self._preempt(gone)
                    preempted = True
                lookahead = 0
            else:
                return preempted

    def _append(self, lookahead: int) -> None:
        builder, rows = self._builder, self._rows
        decodes, is_plain = rows.decodes, lookahead == 0
        if is_plain:
            builder.tokens = decodes
            builder.token_ids[:decodes] = rows.last[:decodes]
        else:
            # A sequence gets no slots beyond its end, so it still fits as `add` computed.
            room = rows.fields[LIMIT, :decodes] - rows.fields[LENGTH, :decodes] - 1
            builder.add_drafted(rows.last[:decodes], np.minimum(room, lookahead))
        if rows.count > decodes:
            self._next_chunks()
        used = builder.tokens
        if used:
            out = None if builder.single is None else builder.single[:used]
            # Draft tokens are not known yet; the ids of a prompt are known since its admission.
            slots = self.manager.append(
                rows.handles[: decodes + len(builder.counts)],
                None if is_plain and not builder.counts else builder.lengths(decodes),
                token_ids=builder.token_ids[:used] if is_plain and self._prefix_caching else None,
                draft_tokens=None if is_plain or not self._needs.has_states else builder.draft_tokens(decodes),
                block_tables=rows.flat_tables,
                out=out,
            )
            if out is None:
                builder.slots[:, :used] = slots

    def _next_chunks(self) -> None:
        """Add the next chunks of prompts in prefill, in order, within the token budget."""
        builder, rows = self._builder, self._rows
        for row in range(rows.decodes, rows.count):
            if builder.left < 1:
                break
            done = int(rows.fields[DONE, row])
            chunk = min(int(rows.fields[LENGTH, row]) - done, builder.left, rows.owner(row)[0].chunk)
            if self._needs.keeps_states:
                chunk = self.manager.next_chunk(int(rows.handles[row]), chunk)
            end = done + chunk
            builder.add_chunks([rows.tokens_of(row, done, end)], [done])
            if end < rows.fields[LENGTH, row]:
                break  # rows are ordered by which finishes first

    def _preempt(self, gone: NDArray[np.int64]) -> None:
        """Take the rows of one request off the device."""
        whole = int(gone[-1]) < self._rows.decodes
        swaps = options.swaps(self._preemption_mode, self._rows, gone, self._needs)
        if whole and swaps and self._swapping.move_out(gone):
            return
        self._stats.preempted_recompute += 1
        self._recompute(gone)

    def _recompute(self, gone: NDArray[np.int64]) -> None:
        """Drop rows with their blocks; sequences of live requests wait for recompute from their tokens."""
        rows = self._rows
        for row in gone.tolist():
            state, index = rows.owner(row)
            if state.alive:
                self._waiting.push(IdleSequences(state, [index], [rows.tokens_of(row)], forks=rows.fork_count(row)))
        self._remove(gone)

    def _remove(self, gone: NDArray[np.int64], hints: Sequence[Hint | None] = ()) -> None:
        """Free rows with the hints of their requests, if they ended."""
        handles = self._rows.handles[gone]
        if any(hints):
            for hint in dict.fromkeys(hints):
                self.manager.free(handles[[other == hint for other in hints]], hint=hint)
        else:
            self.manager.free(handles)
        self._rows.remove(gone)

    def _end(self, gone: NDArray[np.int64]) -> list[RequestState]:
        """Keep the generated tokens of some rows' sequences, and free these. Returns the finished requests."""
        rows, done = self._rows, []
        hints: list[Hint | None] = []
        fields = rows.fields.take(gone, axis=1).tolist()
        for seat, base, length in zip(fields[SEAT], fields[BASE], fields[LENGTH], strict=True):
            state, index = rows.owner_at(seat)
            hints.append(state.request.hint)
            state.outputs[index] = rows.generated_in(seat, base + len(state.prompt), base + length)
            if state.alive and (state.request.n == 1 or not state.left):
                done.append(state)
        self._remove(gone, hints)
        return done

    # ---- who leaves, and who starts again ----

    def give_up(self) -> None:
        """Drop the step in flight, if any, as when it failed: its sequences start again from their tokens."""
        self._begin()
        if self._loop is not None:
            self._loop.open = None
        step, self._in_flight = self._in_flight, None
        for row in range(step.rows) if step is not None else ():
            self._leaving.append(self._rows.owner(row)[0])
            self._leaving[-1].lost = True
        if self._leaving:
            self._drop_leaving()
        self._refuse_what_no_longer_fits()
        self._swapping.seat_landed()
        self._change.begun = False

    def _begin(self) -> None:
        """Begin a change. If an exception ended the last one, first start all requests again."""
        if self._change.begun:
            self._restart_all()
        self._change.begun = True

    def _restart_all(self) -> None:
        """Give up everything in flight, and free all sequences: requests start again from their tokens."""
        if self._loop is not None:
            self._loop.open = None
            self._loop.steps.give_up_all()
            self._loop.steps.report()  # all requests start again
        else:
            for ticket in set(self.manager.stats().open_tickets) - self._handed:
                self.manager.fail(ticket)
        if self._in_flight is not None:
            self._dropped = self._in_flight
        self.manager.free_all()
        self.manager.prefix.store_jobs.end_lease(None)
        for state in self._requests.values():
            self._rows.leave(state)
        self._make_empty()
        for state in self._requests.values():
            self._stop_tokens.add(state.stops)
            for idle in state.restart():
                self._waiting.push(idle)
            if not state.alive:
                self._refused.append(state)
        self._capacity = [sys.maxsize] * len(self._capacity)  # check again which requests fit the device
        self._change.begun = False

    def _drop_leaving(self) -> None:
        """Free the rows of dropped requests, and restart those that lost bytes. Not while a step is in flight."""
        if self._in_flight is not None and self._in_flight.rows:
            return
        leaving, self._leaving = self._leaving, []
        for state in leaving:
            state.lost = False
        self._recompute(self._rows.find({seat for state in leaving for seat in state.seats}))

    def _restart_lost(self, handles: NDArray[np.uint64]) -> list[str]:
        """Restart the requests of sequences that lost bytes; `update` frees their rows in flight, now void."""
        rows, step = self._rows, self._in_flight
        running = [rows.owner(row)[0] for row in rows.find_handles(handles).tolist()]
        states = dict.fromkeys(running + self._swapping.holders(handles))
        for state in states:  # aborted ones, too, whose rows stay until `update`
            if state.seats and step is not None:
                step.void = np.zeros(step.rows, np.bool_) if step.void is None else step.void
                found = rows.find(state.seats)
                step.void[found[found < step.rows]] = True
        lost = [state for state in states if state.alive]
        for state in lost:
            self._stats.lost += 1
            for idle in [idle for idle in state.idle if idle.status is not SequenceStatus.WAITING]:
                self._swapping.recompute(idle)
            if state.seats:
                state.lost = True
                self._leaving.append(state)
        if self._leaving:
            self._drop_leaving()
        return [state.request.request_id for state in lost]

    def _release(self, state: RequestState) -> None:
        """Remove a request from every queue and free its blocks; `update` frees its rows in flight."""
        for idle in tuple(state.idle):
            if idle.status is SequenceStatus.WAITING:
                self._waiting.discard(idle)
                self._admission.ahead.end(idle)
            else:
                self._swapping.drop(idle)
        state.alive = False
        if state.seats:
            self._leaving.append(state)
            self._drop_leaving()

    def _close(self, state: RequestState, generated: NDArray[np.uint32]) -> None:
        state.alive = False
        self._stop_tokens.remove(state.stops)
        self._recording.finish(state.request.request_id, generated)

    # ---- a device that shrinks ----

    def _lack_of_room(self, state: RequestState) -> OutOfBlocksError | None:
        return options.lack_of_room(self._needs, state)

    def _has_shrunk(self) -> bool:
        """Whether a page class has fewer blocks than at the last check which requests fit the device."""
        return any(map(gt, self._capacity, self._needs.blocks()))

    def _refuse_what_no_longer_fits(self) -> None:
        """After the device shrank, end the requests that `add` would now refuse. No step is in flight."""
        if not self._has_shrunk():
            return
        self._capacity = self._needs.blocks()
        for state in self._requests.values():
            if state.error is None and (lack := self._lack_of_room(state)) is not None:
                self._rows.leave(state)
                state.error, self._stats.refused = lack, self._stats.refused + 1
                self._release(state)
                self._refused.append(state)
