"""`replay_times`: one engine in virtual time. The real scheduler and block manager; compute and copies are models."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from blockyard import BlockManager, PrefixCaching, Request, Scheduler
from blockyard.errors import InvalidArgumentError, InvariantError, OutOfBlocksError
from blockyard.replay.link import Link
from blockyard.scheduler import PreemptionCosts, PreemptionMode, SchedulerStats
from blockyard.scheduler.step import Step
from blockyard.stores.base import StoreStats
from blockyard.traces import TraceRequest

if TYPE_CHECKING:
    from blockyard.replay.store_tier import StoreTier

__all__ = ["EngineOptions", "StepTime", "Times", "Watch", "replay_times"]

_MOST_STEPS: Final = 64
"""Steps of plain decoding that the scheduler decides at once, as for a model that computes several tokens a step.

What comes out is the same, but blocks that they fill are published once all are computed, and cached blocks may be
evicted in another order, as their stamps are those of steps.
"""
_IDLE_SECONDS: Final = 0.01
"""Between looks at loads while there is nothing to compute, as engines do."""
_OWN_TOKENS: Final = 2**31
"""Tokens from here on are a request's own: no other prompt has them."""


@dataclass(frozen=True)
class EngineOptions:
    """One engine: its pool, its scheduler, and what its copies take.

    Attributes:
        device_blocks: blocks on the device.
        host_blocks: blocks on the host, for swaps and for cached blocks that the device evicts.
        block_size: tokens of a block; the trace's hash ids must stand for a multiple of it.
        max_num_seqs: sequences in a step.
        max_num_batched_tokens: tokens in a step.
        preemption_mode: as of `Scheduler`; `"auto"` compares what a swap and a recompute cost here.
        eviction: as of `PrefixCaching`.
        prefix_caching: whether prompts share blocks.
        watermark: share of the device blocks that no prompt may take, as of `BlockManager`.
        bytes_per_block: bytes of a block, all layers.
        host_bandwidth: bytes a second between device and host, each way.
        host_latency: seconds that each batch of copies takes beside its bytes.
        store_blocks: blocks that a prefix store holds, below device and host; 0 for none.
        store_writes: which blocks go there, as of `PrefixStore`.
        store_read_bandwidth: bytes a second from it.
        store_write_bandwidth: bytes a second to it.
        store_latency: seconds that each batch takes beside its bytes.
        async_scheduling: whether a step is decided while the one before it is computed, as vLLM does. Then a request
            waits for up to one step more, and a seat stays empty for one step.
        max_concurrent_sessions: conversations at a time; the next begins when one ends. None: all as they come.
    """

    device_blocks: int
    host_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    preemption_mode: PreemptionMode = "auto"
    eviction: str = "adaptive"
    prefix_caching: bool = True
    watermark: float = 0.01
    bytes_per_block: int = 2 << 20
    host_bandwidth: float = 25e9
    host_latency: float = 20e-6
    store_blocks: int = 0
    store_writes: str = "through"
    store_read_bandwidth: float = 3e9
    store_write_bandwidth: float = 2e9
    store_latency: float = 200e-6
    async_scheduling: bool = True
    max_concurrent_sessions: int | None = None


@dataclass(eq=False)
class Times:
    """When things happened, in seconds from the start; NaN for requests that were refused.

    Attributes:
        arrival: of each request, float64 `[r]`.
        queued: when the engine saw it, float64 `[r]`.
        scheduled: when its first step was decided, float64 `[r]`.
        first_token: float64 `[r]`.
        last_token: float64 `[r]`.
        output_tokens: int64 `[r]`.
        refused: requests that can never fit.
        seconds: end of the last step.
        steps: steps with compute.
        busy_seconds: of compute.
        scheduler: counters of the scheduler.
        store: counters of the prefix store's storage; None without one.
        hit_rate: prompt tokens found cached for each that was looked up, recomputed prompts included.
        loaded_blocks: cached blocks that came from the host.
    """

    arrival: NDArray[np.float64]
    queued: NDArray[np.float64]
    scheduled: NDArray[np.float64]
    first_token: NDArray[np.float64]
    last_token: NDArray[np.float64]
    output_tokens: NDArray[np.int64]
    refused: int
    seconds: float
    steps: int
    busy_seconds: float
    scheduler: SchedulerStats
    hit_rate: float
    loaded_blocks: int
    store: dict[str, int] | None

    @property
    def ttft(self) -> NDArray[np.float64]:
        """Time to first token of each finished request, seconds."""
        return _known(self.first_token - self.arrival)

    @property
    def tpot(self) -> NDArray[np.float64]:
        """Time per output token after the first of each finished request with more than one, seconds."""
        more = self.output_tokens > 1
        return _known((self.last_token - self.first_token)[more] / (self.output_tokens[more] - 1))

    @property
    def latency(self) -> NDArray[np.float64]:
        """From arrival to last token of each finished request, seconds."""
        return _known(self.last_token - self.arrival)


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


class StepTime(Protocol):
    """Predicts the time of one step of an engine from its batch."""

    def seconds(self, prefill: Sequence[tuple[int, int]], decode_context: NDArray[np.int64]) -> float:
        """Return the seconds from the start of the step to its sampled tokens.

        Args:
            prefill: for each prompt chunk, its tokens already in the cache and the tokens computed in this step.
            decode_context: context length of each decoding row in tokens, the new token included, int64 `[rows]`.
        """


class Watch(Protocol):
    """Sees what a replay does."""

    def step(self, start: float, end: float, step: Step, scheduler: Scheduler, stored: int) -> None:
        """A step was computed, and `stored` blocks are in the prefix store; it may stand for many of plain decoding."""

    def copies(self, start: float, end: float, way: str, blocks: int) -> None:
        """Blocks went to or from the host; `way` is the transfer's kind."""


@dataclass
class _Clients:
    """Who asks what, and when: arrivals in order, and requests that wait for answers."""

    requests: Sequence[TraceRequest]
    limit: int | None
    due: list[tuple[float, int]] = field(default_factory=list)
    arrival: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        self.arrival = np.full(len(self.requests), np.nan)
        self._waits = [len(request.after) for request in self.requests]
        self._followers: list[list[int]] = [[] for _ in self.requests]
        self._left: dict[int, int] = {}
        self._held: dict[int, list[int]] = {}  # first requests of sessions that have not begun
        running: set[int] = set()
        for number, request in enumerate(self.requests):
            for other in request.after:
                self._followers[other].append(number)
            session = number if request.session is None else request.session
            self._left[session] = self._left.get(session, 0) + 1
            if self._waits[number]:
                continue
            if self.limit is None or len(running) < self.limit or session in running:
                running.add(session)
                self.due.append((request.arrival, number))
            else:
                self._held.setdefault(session, []).append(number)
        heapq.heapify(self.due)

    def take(self, now: float) -> list[int]:
        """Take out the requests that have come by now."""
        taken = []
        while self.due and self.due[0][0] <= now:
            when, number = heapq.heappop(self.due)
            self.arrival[number] = when
            taken.append(number)
        return taken

    def answer(self, number: int, now: float) -> None:
        """Note the answer to a request: what waited for it may follow."""
        for follower in self._followers[number]:
            self._waits[follower] -= 1
            if not self._waits[follower]:
                heapq.heappush(self.due, (now + self.requests[follower].delay, follower))
        request = self.requests[number]
        session = number if request.session is None else request.session
        self._left[session] -= 1
        if not self._left[session] and self._held:
            held = self._held.pop(next(iter(self._held)))
            begin = self.requests[held[0]].arrival
            for other in held:
                heapq.heappush(self.due, (now + self.requests[other].arrival - begin, other))


def replay_times(
    requests: Sequence[TraceRequest],
    options: EngineOptions,
    step_time: StepTime,
    *,
    watch: Watch | None = None,
) -> Times:
    """Serve a trace in virtual time.

    The scheduler decides every step as it does in an engine. A step begins when the loads that it needs have arrived;
    stores go on in the background, and hold their blocks until they have landed. A request that waits for answers
    comes its `delay` after the last of them.

    Args:
        requests: the trace.
        options: the engine.
        step_time: how long a step computes.
        watch: sees every step and copy.

    Raises:
        InvalidArgumentError: an option is out of range, or a block is no part of a hash id.
        InvariantError: nothing can run although requests wait.
    """
    return _Replay(requests, options, step_time, watch).run()


class _Replay:
    """One engine and its clock; see `replay_times`."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        options: EngineOptions,
        step_time: StepTime,
        watch: Watch | None,
    ) -> None:
        sizes = {request.hash_tokens for request in requests if request.hash_tokens}
        if options.prefix_caching and any(size % options.block_size for size in sizes):
            raise InvalidArgumentError(
                f"block_size is {options.block_size}, must divide the tokens of a hash id, {sorted(sizes)}"
            )
        self._requests, self._options, self._step_time, self._watch = requests, options, step_time, watch
        caching = PrefixCaching(eviction=options.eviction, host=options.host_blocks > 0)
        self._manager = BlockManager(
            block_size=options.block_size,
            device_blocks=options.device_blocks,
            host_blocks=options.host_blocks,
            watermark=options.watermark,
            prefix_caching=caching if options.prefix_caching else False,
        )
        self._now = 0.0
        self._to_device = Link(options.host_bandwidth, options.host_latency)
        self._to_host = Link(options.host_bandwidth, options.host_latency)
        self._tier = self._open_store() if options.store_blocks else None
        self._scheduler = Scheduler(
            self._manager,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            preemption_mode=self._preemption(),
            num_lookahead_tokens=_MOST_STEPS - 1,
            overlap_io=True,
            prefetch=None if self._tier is None else self._tier.prefixes.prefetch,
        )
        self._open: list[tuple[float, int]] = []  # when each ticket's copies have landed
        self._clients = _Clients(requests, options.max_concurrent_sessions)
        self._queued = np.full(len(requests), np.nan)
        self._scheduled = np.full(len(requests), np.nan)
        self._first = np.full(len(requests), np.nan)
        self._last = np.full(len(requests), np.nan)
        self._answers: dict[int, NDArray[np.uint32]] = {}  # texts of open requests whose answers the trace knows
        self._decided_at = 0.0  # when the next step is decided
        self._arrived: deque[int] = deque()  # requests for which there is no seat, as the engine sees it
        self._seats = self._ended = 0  # in use, as the engine sees it; freed by the step in flight
        self._steps = self._refused = 0
        self._busy = self._last_took = 0.0
        self._is_plain = False  # the last step computed only decodes, and nothing has happened since
        self._last_rows = 0
        self._decoded = 0  # steps with decodes
        self._ends: list[int] = []  # values of `_decoded` at which requests end, if none is preempted

    def _preemption(self) -> PreemptionMode | PreemptionCosts:
        """Return what a preemption does: for `"auto"`, the costs to compare, if anything can be swapped."""
        if self._options.preemption_mode != "auto" or not self._options.host_blocks:
            return self._options.preemption_mode
        none, few, many = np.zeros(0, np.int64), 1, min(1024, self._options.max_num_batched_tokens)
        computed = self._step_time.seconds([(0, many)], none) - self._step_time.seconds([(0, few)], none)
        block = self._options.bytes_per_block / self._options.host_bandwidth
        return PreemptionCosts(swap_block=block, prefill_token=max(0.0, computed) / max(1, many - few))

    def _open_store(self) -> StoreTier:
        from blockyard.replay.store_tier import StoreTier  # noqa: PLC0415 (it needs torch)

        options = self._options
        return StoreTier(
            self._manager,
            options.store_blocks,
            options.bytes_per_block,
            options.store_writes,
            storage=(
                Link(options.store_read_bandwidth, options.store_latency),
                Link(options.store_write_bandwidth, options.store_latency),
            ),
            copies=(self._to_device, self._to_host),
            clock=lambda: self._now,
        )

    def run(self) -> Times:
        scheduler = self._scheduler
        while True:
            self._take_in()
            self._land()
            if not scheduler.num_unfinished:
                if self._decided_at < self._now or self._arrived:
                    self._decided_at, self._seats, self._ended = self._now, 0, 0
                    continue
                later = self._next_event()
                if later == inf:
                    break
                self._now = self._decided_at = max(self._now, later)
                continue
            step = scheduler.schedule(num_lookahead_tokens=self._plain_steps() - 1)
            loaded = self._copy(step)
            if step.rows:
                self._compute(step, loaded)
            else:
                scheduler.update(step, ())
                self._skip()
        for _, ticket in sorted(self._open):
            scheduler.complete(ticket)
        stats = self._manager.stats()
        return Times(
            arrival=self._clients.arrival,
            queued=self._queued,
            scheduled=self._scheduled,
            first_token=self._first,
            last_token=self._last,
            output_tokens=np.array([request.output_tokens for request in self._requests], np.int64),
            refused=self._refused,
            seconds=self._now,
            steps=self._steps,
            busy_seconds=self._busy,
            scheduler=scheduler.stats(),
            hit_rate=stats.hit_rate,
            loaded_blocks=stats.loaded_blocks,
            store=None if self._tier is None else _counts(self._tier.stats),
        )

    def _take_in(self) -> None:
        """Hand over the requests that the engine knows, while it sees seats for them."""
        taken = self._clients.take(self._decided_at)
        self._queued[taken] = self._decided_at
        self._arrived.extend(taken)
        while self._arrived and (not self._options.async_scheduling or self._seats < self._options.max_num_seqs):
            self._add(self._arrived.popleft())

    def _add(self, number: int) -> None:
        self._is_plain = False
        row, options = self._requests[number], self._options
        if row.input_tokens + row.output_tokens > options.device_blocks * options.block_size:
            self._refuse(number)  # before its text takes memory
            return
        try:
            text = _text(row, number)
            prompt = text[: row.input_tokens]
            self._scheduler.add(Request(str(number), prompt, max_tokens=row.output_tokens, arrival=self._now))
            self._seats += 1
            if row.output_hash_ids:
                self._answers[number] = text
        except OutOfBlocksError:
            self._refuse(number)

    def _refuse(self, number: int) -> None:
        self._refused += 1
        self._clients.answer(number, self._now)

    def _next_event(self) -> float:
        """When something happens that no step decides; infinite if nothing is under way."""
        return min(self._next_change(), inf if self._tier is None else self._tier.next_write)

    def _next_change(self) -> float:
        """When something happens that a step's decision may depend on."""
        copies = self._open[0][0] if self._open else inf
        requests = self._clients.due[0][0] if self._clients.due else inf
        if self._tier is None:
            return min(copies, requests)
        if self._tier.prefixes.num_open:  # a prompt that loads waits for room, answers, or its deadline
            return min(copies, requests, self._tier.next_load, self._tier.next_write)
        return min(copies, requests, self._tier.next_load)

    def _land(self) -> None:
        if self._tier is not None:
            self._tier.prefixes.poll()
        while self._open and self._open[0][0] <= self._now:
            self._is_plain = False
            self._scheduler.complete(heapq.heappop(self._open)[1])

    def _copy(self, step: Step) -> float:
        """Queue a step's copies; return when what it computes with has arrived."""
        loads = stores = 0
        for kind, pairs in step.decision.transfers():
            if pairs.dst == "device":
                loads += len(pairs) if kind == "swap_in" else 0
            else:
                stores += len(pairs)
        landed = loaded = self._now
        size = self._options.bytes_per_block
        if stores:
            landed = self._send(self._to_host, "swap_out", stores, stores * size)
        if loads:
            loaded = self._send(self._to_device, "swap_in", loads, loads * size)
        if loads or stores:
            heapq.heappush(self._open, (max(landed, loaded), step.decision.ticket))
        else:
            self._scheduler.complete(step.decision.ticket)
        return loaded

    def _plain_steps(self) -> int:
        """How many steps to decide at once: as long as nothing can happen but one more token for each sequence."""
        if not self._is_plain:
            return 1
        until = self._next_change()
        while self._ends and self._ends[0] <= self._decoded:
            heapq.heappop(self._ends)
        fit = (until - self._now) / self._last_took + 1 if self._last_took else 1
        return int(max(1, min(_MOST_STEPS, fit, self._ends[0] - self._decoded if self._ends else 1)))

    def _send(self, link: Link, way: str, blocks: int, size: int) -> float:
        start = max(self._now, link.free_at)
        end = link.send(self._now, size)
        if self._watch is not None:
            self._watch.copies(start, end, way, blocks)
        return end

    def _compute(self, step: Step, loaded: float) -> None:
        decodes, decided_at = step.decodes, self._decided_at
        begin = max(self._now, loaded)
        count, start, self._now = self._model_steps(step, begin)
        self._decided_at = start if self._options.async_scheduling else self._now
        sampled = self._sample(step, count)
        if self._watch is not None:
            stored = 0 if self._tier is None else self._tier.stats.cached_blocks
            self._watch.step(begin, self._now, step, self._scheduler, stored)
        self._steps += count
        self._busy += self._now - begin
        self._last_took = (self._now - begin) / count
        self._decoded += count
        for row in range(decodes, step.rows):
            number = int(step.owner(row)[0])
            if np.isnan(self._scheduled[number]):
                self._scheduled[number] = decided_at
            if row >= step.samples:
                continue
            heapq.heappush(self._ends, self._decoded + self._requests[number].output_tokens - 1)
            if np.isnan(self._first[number]):
                self._first[number] = self._now
        self._land()
        ended = self._scheduler.update(step, sampled)
        for finished in ended:
            number = int(finished.request.request_id)
            self._last[number] = self._now
            self._answers.pop(number, None)
            self._clients.answer(number, self._now)
        if self._options.async_scheduling:  # the next step is decided before this one's ends are known
            self._seats, self._ended = self._seats - self._ended, len(ended)
        # A step that preempts admits nothing, so that the one after it may.
        self._is_plain = decodes == step.rows == self._last_rows and not ended
        self._last_rows = step.rows

    def _sample(self, step: Step, count: int) -> NDArray[np.uint32]:
        """Return what `count` steps generate: the answers that the trace knows, else zeros."""
        decodes = step.decodes
        if not self._answers:
            if step.num_draft_tokens != decodes * (count - 1):
                step.set_draft_token_ids([np.zeros(count - 1, np.uint32)] * decodes)
            return np.zeros(step.num_draws, np.uint32)
        zeros = np.zeros(count, np.uint32)
        parts = []
        for row, (start, length) in enumerate(zip(step.start.tolist(), step.lengths.tolist(), strict=True)):
            text = self._answers.get(int(step.owner(row)[0]))
            first = start + 1 if row < decodes else start + length
            more = count if row < decodes else 1
            parts.append(zeros[:more] if text is None else text[first : first + more])
        if step.num_draft_tokens:
            step.set_draft_token_ids([part[:-1] for part in parts[:decodes]])
        return np.concatenate(parts[: step.samples])

    def _model_steps(self, step: Step, begin: float) -> tuple[int, float, float]:
        """How many steps of the model a decided step stands for, and when the last one begins and ends."""
        decodes, start, lengths = step.decodes, step.start, step.lengths
        prefill = list(zip(start[decodes:].tolist(), lengths[decodes:].tolist(), strict=True))
        most = int(lengths[:decodes].min()) if decodes and not prefill else 1
        until, written = self._next_change(), inf if self._tier is None else self._tier.next_write
        now, context = begin, start[:decodes] + 1
        count, last = 0, begin
        while count < 1 or (count < most and now < until):
            if count and now >= written and self._tier is not None:
                self._now = now
                self._tier.prefixes.poll()
                written = self._tier.next_write
            last = now
            now += self._step_time.seconds(prefill, context + count)
            count += 1
        return count, last, now

    def _skip(self) -> None:
        """Nothing to compute: go on when something happens."""
        later = self._next_event()
        if self._tier is not None and self._tier.prefixes.num_open:
            later = min(later, self._now + _IDLE_SECONDS)  # a load may pass its deadline
        if later == inf:
            raise InvariantError(f"{self._scheduler.num_unfinished} requests wait, and nothing is under way")
        self._now = self._decided_at = max(self._now, later)


def _counts(stats: StoreStats) -> dict[str, int]:
    names = ("read_blocks", "written_blocks", "evicted_blocks", "cached_blocks")
    return {name: getattr(stats, name) for name in names}


def _text(row: TraceRequest, number: int) -> NDArray[np.uint32]:
    """Token ids of a prompt and its answer, which are equal where the hash ids are.

    Answers are a request's own where the trace does not tell which they are.
    """
    text = np.full(row.input_tokens + row.output_tokens, _OWN_TOKENS + number, np.uint32)
    if size := int(row.hash_tokens):
        whole = row.input_tokens // size
        ids: Any = np.asarray(row.hash_ids[:whole], np.int64)
        if len(ids) == whole:
            ids = np.append(ids, np.asarray(row.output_hash_ids, np.int64))
        named = np.repeat(ids, size)[: len(text)]
        text[: len(named)] = named
    return text
