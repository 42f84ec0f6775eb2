"""`replay_times`: one engine in virtual time. Scheduler and block manager are real; compute and copies are modelled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count as counting
from itertools import islice, pairwise
from math import inf, isnan
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from blockyard import BlockManager, PrefixCaching, Request, Scheduler
from blockyard.errors import InvalidArgumentError, InvariantError, OutOfBlocksError
from blockyard.scheduler import Finished, PreemptionCosts, PreemptionMode, SchedulerStats
from blockyard.scheduler.step import PlainSteps, Step
from blockyard.stores.base import StoreStats
from blockyard.stores.threaded.runtime import use_runtime
from blockyard.tools.replay.hits import MAX_OPEN_TICKETS, ClassMemory, HybridMemory, class_memory
from blockyard.tools.replay.packed import ANSWER_TOKEN, OWN_TOKENS, PackedTrace
from blockyard.tools.replay.store_tier import StoreTier
from blockyard.tools.virtual_time import Agenda, CopyLink, VirtualTime
from blockyard.traces import TraceRequest

__all__ = ["EngineOptions", "ReplayWatch", "StepTime", "Times", "replay_times"]

_MAX_STEPS: Final = 1 << 12
"""Maximum number of plain decoding steps that the scheduler decides at once; the results are the same."""
_IDLE_SECONDS: Final = 0.01
"""Time between polls of loads while there is nothing to compute, as in engines."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine: its pools, its scheduler, and the speed of its copies.

    Attributes:
        device_blocks: blocks on the device.
        host_blocks: blocks on the host, for swaps and for cached blocks that the device evicts.
        block_size: tokens per block; each hash id of the trace must cover a multiple of it.
        max_num_seqs: maximum number of sequences in a step.
        max_num_batched_tokens: maximum number of tokens in a step.
        preemption_mode: as for `Scheduler`; `"auto"` compares the costs of a swap and a recompute in this replay.
        eviction: as for `PrefixCaching`.
        prefix_caching: whether prompts share blocks.
        watermark: share of the device blocks that admission keeps free, as for `BlockManager`.
        bytes_per_block: bytes of a block, all layers.
        host_bandwidth: bytes per second between device and host, in each direction.
        host_latency: seconds per batch of copies, in addition to the time for its bytes.
        store_blocks: blocks that the prefix store below device and host can hold; 0 for no store.
        store_writes: which blocks are written to the store, as for `PrefixStore`.
        store_read_bandwidth: bytes per second read from the store.
        store_write_bandwidth: bytes per second written to the store.
        store_latency: seconds per batch, in addition to the time for its bytes.
        async_scheduling: whether each step is decided while the previous one is computed, as vLLM does. Then a request
            waits for up to one more step, and a freed seat stays empty for one step.
        max_concurrent_sessions: maximum number of conversations at a time; when one ends, the next begins. None for no
            limit.
        hybrid: the cache groups of a model with windows or states, whose keys stand for `block_size` tokens; None for
            one that keeps all tokens. Sizes in blocks then stand for its `block_bytes`. There is no store.
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
    hybrid: HybridMemory | None = None


@dataclass(eq=False)
class Times:
    """The times of a replay in seconds from its start, and its counters. Refused requests have NaN.

    Attributes:
        arrival: when each request arrived, float64 `[r]`.
        queued: when the engine saw it, float64 `[r]`.
        scheduled: when its first step was decided, float64 `[r]`.
        first_token: when its first token was sampled, float64 `[r]`.
        last_token: when its last token was sampled, float64 `[r]`.
        output_tokens: number of tokens it generates, int64 `[r]`.
        refused: number of requests that can never fit.
        seconds: end of the last step.
        steps: number of steps with compute.
        busy_seconds: total time with unfinished requests: compute, and waits for copies.
        scheduler: counters of the scheduler.
        store: counters of the prefix store's storage; None without a store.
        classes: memory of each page class at the end.
        hit_rate: share of the prompts' tokens that were cached when requests were first admitted.
        loaded_blocks: number of cached blocks loaded from the host.
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
    classes: tuple[ClassMemory, ...] = ()

    @property
    def ttft(self) -> NDArray[np.float64]:
        """Time to first token of each finished request, in seconds."""
        return _known(self.first_token - self.arrival)

    @property
    def tpot(self) -> NDArray[np.float64]:
        """Time per output token after the first, in seconds, of each finished request with more than one."""
        more = self.output_tokens > 1
        return _known((self.last_token - self.first_token)[more] / (self.output_tokens[more] - 1))

    @property
    def latency(self) -> NDArray[np.float64]:
        """Time from arrival to last token of each finished request, in seconds."""
        return _known(self.last_token - self.arrival)


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


class StepTime(Protocol):
    """Predicts the time of one step of an engine from its batch.

    Optional: `decode_seconds(decode_context)` returns an iterator over the seconds of consecutive steps of plain
    decoding, each with one more token in every row. It saves a call per step.
    """

    def seconds(self, prefill: Sequence[tuple[int, int]], decode_context: NDArray[np.int64]) -> float:
        """Return the seconds from the start of the step to its sampled tokens.

        Args:
            prefill: for each prompt chunk, its tokens already in the cache and the tokens computed in this step.
            decode_context: context length of each decoding row in tokens, the new token included, int64 `[rows]`.
        """


class ReplayWatch(Protocol):
    """Observes a replay."""

    def step(self, start: float, end: float, step: Step, scheduler: Scheduler, stored: int) -> None:
        """A step was computed. The prefix store has `stored` blocks."""

    def plain_steps(self, start: float, end: float, contexts: NDArray[np.int64], scheduler: Scheduler) -> None:
        """Steps of plain decoding were computed, from the context of each row in each: int64 `[steps, rows]`."""

    def idle(self, time: float, scheduler: Scheduler) -> None:
        """All requests have ended at this time; none has arrived yet."""

    def copies(self, start: float, end: float, way: str, blocks: int) -> None:
        """Blocks were copied to or from the host; `way` is the kind of transfer."""


@dataclass
class _Clients:
    """The clients: which requests arrive when, and which wait for the answers to others."""

    requests: Sequence[TraceRequest]
    limit: int | None
    due: Agenda[int] = field(default_factory=Agenda)
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
                self.due.add(request.arrival, number)
            else:
                self._held.setdefault(session, []).append(number)

    def take(self, now: float) -> list[int]:
        """Remove and return the requests that have arrived by now."""
        taken = self.due.take(now)
        for when, number in taken:
            self.arrival[number] = when
        return [number for _, number in taken]

    def answer(self, number: int, now: float) -> None:
        """Record the answer to a request; requests that waited for it become due."""
        for follower in self._followers[number]:
            self._waits[follower] -= 1
            if not self._waits[follower]:
                self.due.add(now + self.requests[follower].delay, follower)
        request = self.requests[number]
        session = number if request.session is None else request.session
        self._left[session] -= 1
        if not self._left[session] and self._held:
            held = self._held.pop(next(iter(self._held)))
            begin = self.requests[held[0]].arrival
            for other in held:
                self.due.add(now + self.requests[other].arrival - begin, other)


def replay_times(
    requests: Sequence[TraceRequest],
    options: EngineOptions,
    step_time: StepTime,
    *,
    watch: ReplayWatch | None = None,
) -> Times:
    """Serve a trace in virtual time.

    The scheduler decides every step as in a real engine. A step begins when its loads have arrived. Stores continue in
    the background, and hold their blocks until they have landed. A request that waits for answers arrives its `delay`
    after the last of them.

    Args:
        requests: the trace.
        options: options of the engine.
        step_time: predicts how long a step computes.
        watch: observes every step and copy.

    Raises:
        InvalidArgumentError: an option is out of range, or does not fit the trace's hash ids.
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
        watch: ReplayWatch | None,
    ) -> None:
        sizes = {request.hash_tokens for request in requests if request.hash_tokens}
        if options.prefix_caching and any(size % options.block_size for size in sizes):
            tokens = ", ".join(f"{size:g}" for size in sorted(sizes))
            raise InvalidArgumentError(f"block_size is {options.block_size}, must divide {tokens}: tokens of a hash id")
        if options.hybrid is not None and options.store_blocks:
            raise InvalidArgumentError(f"store_blocks is {options.store_blocks}, must be 0 with hybrid")
        self._requests, self._options, self._step_time, self._watch = requests, options, step_time, watch
        has_ids = any(len(request.hash_ids) for request in requests)
        self._trace = PackedTrace.of(requests) if has_ids and options.prefix_caching else None
        self._decode_seconds: Callable[[NDArray[np.int64]], Iterator[float]]
        self._decode_seconds = getattr(step_time, "decode_seconds", partial(_one_by_one, step_time))
        caching = PrefixCaching(eviction=options.eviction, host=options.host_blocks > 0)
        manager = _manager(options, caching if options.prefix_caching else None)
        self._holds_none = manager is None
        if manager is None:
            manager = BlockManager(block_size=options.block_size, device_blocks=1)  # it serves nobody
        self._manager = manager
        sizes_of = [
            self._manager.pool("device", number).block_bytes for number in range(self._manager.num_page_classes)
        ]
        has_bytes = options.hybrid is not None and options.hybrid.block_bytes > 0
        self._block_bytes = sizes_of if has_bytes else [options.bytes_per_block]  # by page class
        self._time = VirtualTime()
        self._to_device = CopyLink(options.host_bandwidth, options.host_latency)
        self._to_host = CopyLink(options.host_bandwidth, options.host_latency)
        self._tier = self._open_store() if options.store_blocks else None
        with use_runtime(self._time):
            self._scheduler = Scheduler(
                self._manager,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                preemption_mode=self._preemption(),
                overlap_io=True,
                prefetch=None if self._tier is None else self._tier.prefixes.prefetch,
            )
        self._open: Agenda[int] = Agenda()  # tickets, by the time at which their copies have landed
        self._clients = _Clients(requests, options.max_concurrent_sessions)
        self._queued = np.full(len(requests), np.nan)
        self._scheduled = np.full(len(requests), np.nan)
        self._first = np.full(len(requests), np.nan)
        self._last = np.full(len(requests), np.nan)
        self._unknown = np.full(options.max_num_seqs, ANSWER_TOKEN, np.uint32)  # tokens of answers that no trace has
        self._answers: dict[int, NDArray[np.uint32]] = {}  # texts of open requests whose answers the trace has
        self._decided_at = 0.0  # when the next step is decided
        self._arrived: deque[int] = deque()  # requests that wait for a seat, as far as the engine knows
        self._seats = self._ended = 0  # seats in use as far as the engine knows, and those freed by the step in flight
        self._steps = self._refused = 0
        self._busy = 0.0
        self._ahead = _MAX_STEPS  # number of plain steps worth computing the times of: runs of them may end before

    def _preemption(self) -> PreemptionMode | PreemptionCosts:
        """Return the scheduler's preemption mode: for `"auto"` with a host, the costs to compare."""
        if self._options.preemption_mode != "auto" or not self._options.host_blocks:
            return self._options.preemption_mode
        none, few, many = np.zeros(0, np.int64), 1, min(1024, self._options.max_num_batched_tokens)
        computed = self._step_time.seconds([(0, many)], none) - self._step_time.seconds([(0, few)], none)
        block = self._options.bytes_per_block / self._options.host_bandwidth
        return PreemptionCosts(swap_block=block, prefill_token=max(0.0, computed) / max(1, many - few))

    def _open_store(self) -> StoreTier:
        options = self._options
        return StoreTier(
            self._manager,
            options.store_blocks,
            options.bytes_per_block,
            options.store_writes,
            storage=(
                CopyLink(options.store_read_bandwidth, options.store_latency),
                CopyLink(options.store_write_bandwidth, options.store_latency),
            ),
            copies=(self._to_device, self._to_host),
            time=self._time,
        )

    def run(self) -> Times:
        scheduler = self._scheduler
        while True:
            self._take_in()
            self._land()
            if not scheduler.num_unfinished:
                if self._decided_at < self._time.now or self._arrived:
                    self._decided_at, self._seats, self._ended = self._time.now, 0, 0
                    continue
                if self._watch is not None:
                    self._watch.idle(self._time.now, scheduler)
                later = self._next_event()
                if later == inf:
                    break
                self._time.now = self._decided_at = max(self._time.now, later)
                continue
            done, step = self._plain_steps()
            if done and step is None:
                continue  # the store may have blocks to write
            step = step or scheduler.schedule()
            copied = self._copy(step)
            if step.rows:
                self._compute(step, *copied)
            else:
                scheduler.update(step, ())
                self._skip()
        for _, ticket in self._open.take(inf):
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
            seconds=self._time.now,
            steps=self._steps,
            busy_seconds=self._busy,
            scheduler=scheduler.stats(),
            hit_rate=stats.hit_rate,
            loaded_blocks=stats.loaded_blocks,
            store=None if self._tier is None else _counts(self._tier.stats),
            classes=tuple(one.of_blocks(self._options.bytes_per_block) for one in class_memory(self._manager)),
        )

    def _take_in(self) -> None:
        """Give arrived requests to the scheduler, as long as the engine knows of free seats."""
        if self._clients.due.next_at <= self._decided_at:
            taken = self._clients.take(self._decided_at)
            self._queued[taken] = self._decided_at
            self._arrived.extend(taken)
        while self._arrived and (not self._options.async_scheduling or self._seats < self._options.max_num_seqs):
            self._add(self._arrived.popleft())

    def _add(self, number: int) -> None:
        row, options = self._requests[number], self._options
        most = options.device_blocks * options.block_size
        if self._holds_none or (options.hybrid is None and row.input_tokens + row.output_tokens > most):
            self._refuse(number)  # before its text takes memory
            return
        try:
            text = self._text(number)
            prompt = text[: row.input_tokens]
            self._scheduler.add(
                Request(str(number), prompt, max_tokens=row.output_tokens, arrival=self._time.now, hint=row.hint)
            )
            self._seats += 1
            if row.output_hash_ids:
                self._answers[number] = text
        except OutOfBlocksError:
            self._refuse(number)

    def _text(self, number: int) -> NDArray[np.uint32]:
        """Return the token ids of a prompt and its answer: the trace's blocks by their numbers."""
        row, trace = self._requests[number], self._trace
        text = np.full(row.input_tokens + row.output_tokens, OWN_TOKENS + number, np.uint32)
        text[row.input_tokens :] = ANSWER_TOKEN
        if trace is not None:
            blocks = trace.blocks[trace.starts[number] : trace.starts[number + 1]]
            named = np.repeat(blocks, trace.block_tokens)[: len(text)]
            text[: len(named)] = named
        return text

    def _refuse(self, number: int) -> None:
        self._refused += 1
        self._clients.answer(number, self._time.now)

    def _next_event(self) -> float:
        """Return the time of the next event that no step decides; infinite if nothing is in flight."""
        until = min(self._open.next_at, self._clients.due.next_at)
        return until if self._tier is None else min(until, self._tier.next_load, self._tier.next_write)

    def _land(self) -> None:
        if self._tier is not None:
            self._tier.poll()
        self._land_copies()

    def _land_copies(self) -> None:
        for _, ticket in self._open.take(self._time.now):
            self._scheduler.complete(ticket)

    def _copy(self, step: Step) -> tuple[float, float]:
        """Queue a step's copies; return when its loads have arrived, and when the last copy that it awaits has."""
        loads = stores = load_bytes = store_bytes = 0
        for kind, pairs in step.decision.transfers():
            count, size = len(pairs), self._block_bytes[pairs.page_class]
            if pairs.dst != "device":
                stores, store_bytes = stores + count, store_bytes + count * size
            elif kind == "swap_in":
                loads, load_bytes = loads + count, load_bytes + count * size
        landed = loaded = self._time.now
        if stores:
            landed = self._send(self._to_host, "swap_out", stores, store_bytes)
        if loads:
            loaded = self._send(self._to_device, "swap_in", loads, load_bytes)
        if loads or stores:
            self._open.add(max(landed, loaded), step.decision.ticket)
        else:
            self._scheduler.complete(step.decision.ticket)
        return loaded, max(landed, loaded) if loads and not step.decision.prefetch else loaded

    def _plain_steps(self) -> tuple[int, Step | None]:
        """Decide and compute at once the steps before the next event, if they only add one token to each sequence.

        Returns:
            The number of steps; and the step after them, if its copies are such an event.
        """
        if self._arrived and (self._seats < self._options.max_num_seqs or self._ended):
            return 0, None
        plain = self._scheduler.plain_steps()
        if plain is None:
            return 0, None
        times = self._plain_times(plain)
        if len(times) < 2:
            return 0, None
        done, step, ended = self._scheduler.schedule_plain(self._plain_tokens(plain, len(times) - 1), times)
        self._ahead = max(16, 2 * done) if done < len(times) - 1 else max(self._ahead, 4 * done)
        if done:
            for begin, end in pairwise(times[: done + 1]):
                self._busy += end - begin
            self._steps += done
            self._time.now = times[done]
            self._decided_at = times[done - 1] if self._options.async_scheduling else self._time.now
            if self._watch is not None:
                contexts = plain.context + np.arange(done)[:, None]
                self._watch.plain_steps(times[0], times[done], contexts, self._scheduler)
            self._note_ended(ended)
        return done, step

    def _plain_times(self, plain: PlainSteps) -> list[float]:
        """Return when the first plain step begins, and when each one ends, up to the next event."""
        # Who watches sees the step in which sequences end by itself, before they have.
        most = min(plain.limit - (self._watch is not None), self._ahead, _MAX_STEPS)
        if self._tier is not None:  # each full block is written at the end of its step
            most = min(most, int(np.minimum.reduce(-plain.context % self._options.block_size)) + 1)
        copied, until, now = self._open.next_at, self._next_event(), self._time.now
        times = [now]
        for seconds in islice(self._decode_seconds(plain.context), max(0, most)):
            now += seconds
            if now >= copied:
                break  # copies land before the step's tokens are known, all else comes after
            times.append(now)
            if now >= until:
                break
        return times

    def _plain_tokens(self, plain: PlainSteps, steps: int) -> NDArray[np.uint32]:
        """Return the tokens that plain steps sample, `[steps, rows]`: the trace's answers where it has them."""
        tokens = np.full((steps, len(plain.context)), ANSWER_TOKEN, np.uint32)
        if self._answers:
            for row, (name, context) in enumerate(zip(plain.request_ids(), plain.context.tolist(), strict=True)):
                if (text := self._answers.get(int(name))) is not None:
                    tokens[:, row] = text[context : context + steps]
        return tokens

    def _send(self, link: CopyLink, way: str, blocks: int, size: int) -> float:
        start = max(self._time.now, link.free_at)
        end = link.send(self._time.now, size)
        if self._watch is not None:
            self._watch.copies(start, end, way, blocks)
        return end

    def _compute(self, step: Step, loaded: float, awaited: float) -> None:
        decodes, rows = step.decodes, step.rows
        decided_at, waits_from = self._decided_at, self._time.now
        begin = max(self._time.now, loaded)
        prefill: list[tuple[int, int]] = []
        if rows > decodes:
            prefill += zip(step.start[decodes:].tolist(), step.lengths[decodes:].tolist(), strict=True)
        self._time.now = max(awaited, begin + self._step_time.seconds(prefill, step.start[:decodes] + 1))
        self._decided_at = begin if self._options.async_scheduling else self._time.now
        if self._watch is not None:
            stored = 0 if self._tier is None else self._tier.stats.cached_blocks
            self._watch.step(begin, self._time.now, step, self._scheduler, stored)
        self._steps += 1
        self._busy += self._time.now - waits_from
        for row in range(decodes, rows):
            number = int(step.owner(row)[0])
            if isnan(self._scheduled[number]):
                self._scheduled[number] = decided_at
            if row < step.samples and isnan(self._first[number]):
                self._first[number] = self._time.now
        sampled = self._sample(step)
        self._land_copies()
        self._note_ended(self._scheduler.update(step, sampled))

    def _note_ended(self, ended: list[Finished]) -> None:
        """Record the requests that have ended in the last step."""
        for finished in ended:
            number = int(finished.request.request_id)
            self._last[number] = self._time.now
            self._answers.pop(number, None)
            self._clients.answer(number, self._time.now)
        if self._options.async_scheduling:  # the next step is decided before this one's ends are known
            self._seats, self._ended = self._seats - self._ended, len(ended)

    def _sample(self, step: Step) -> NDArray[np.uint32]:
        """Return the tokens that a step samples: the trace's answers where it has them."""
        tokens = self._unknown[: step.samples]
        if self._answers:
            tokens = tokens.copy()
            for row, end in enumerate((step.start + step.lengths)[: step.samples].tolist()):
                if (text := self._answers.get(int(step.owner(row)[0]))) is not None:
                    tokens[row] = text[end]
        return tokens

    def _skip(self) -> None:
        """Advance the clock to the next event, since there is nothing to compute."""
        later = self._next_event()
        if self._tier is not None and self._tier.prefixes.num_open:
            later = min(later, self._time.now + _IDLE_SECONDS)  # a load may pass its deadline
        if later == inf:
            raise InvariantError(f"{self._scheduler.num_unfinished} requests wait, but nothing is in flight")
        self._busy += max(0.0, later - self._time.now)
        self._time.now = self._decided_at = max(self._time.now, later)


def _manager(options: EngineOptions, caching: PrefixCaching | None) -> BlockManager | None:
    blocks = options.device_blocks, options.host_blocks
    if options.hybrid is not None:
        return options.hybrid.manager(options.block_size, *blocks, options.watermark, caching)
    return BlockManager(
        block_size=options.block_size,
        device_blocks=blocks[0],
        host_blocks=blocks[1],
        watermark=options.watermark,
        prefix_caching=caching or False,
        max_open_tickets=MAX_OPEN_TICKETS,
    )


def _one_by_one(step_time: StepTime, decode_context: NDArray[np.int64]) -> Iterator[float]:
    for more in counting():
        yield step_time.seconds([], decode_context + more)


def _counts(stats: StoreStats) -> dict[str, int]:
    names = ("read_blocks", "written_blocks", "evicted_blocks", "cached_blocks")
    return {name: getattr(stats, name) for name in names}
