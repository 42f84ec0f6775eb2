"""The same caches under the reference scheduler, which preempts, swaps and shares, and may be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
from cache_compute import cells_of
from cache_machine import GOALS, HINTS, Machine, Op, empty_extents
from cache_rig import LAYERS, MANY, NEVER, Cells, Config, Rig, Tracked, simulated
from cache_world import Interrupted
from numpy.typing import NDArray
from observed_cache import Scrapes

from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.scheduler import Finished, PreemptionCosts, Request, Scheduler, Step

VOCABULARY = 3
CALM = Op("step", a=1, b=1, c=1, d=5)
T = TypeVar("T")


def scheduled(config: Config) -> Config:
    """Reduce a configuration to what a scheduler can run: no other jobs."""
    host = min(config.host, 24) if config.host < MANY else 24
    return replace(config, jobs="", caches=1, host=host)


class ScheduledMachine(Machine):
    """A scheduler over one cache. Each request gets the tokens that follow from the bytes its steps read.

    Args:
        config: sizes and options of the cache.
        without: as for `Machine`.
    """

    def __init__(self, config: Config, without: Iterable[str] = ()) -> None:
        super().__init__(scheduled(config), without)
        (rig,) = self.rigs
        costs = PreemptionCosts(swap_block=max(config.swap_cost, 0.0), prefill_token=1.0)
        with simulated(self.clock):
            self.scheduler = Scheduler(
                rig.cache,
                max_num_seqs=6,
                max_num_batched_tokens=1 + config.device % 9,
                preemption_mode=config.mode if config.swap_cost < 0 else costs,  # type: ignore[arg-type]
                num_lookahead_tokens=self.config.lookahead,
                overlap_io=config.staging % 4 == 2,
                prefetch=None if rig.prefixes is None else rig.prefixes.prefetch,
                recorder=None if self.recording is None else self.recording.recorder,
            )
        if rig.scrapes is not None:
            rig.scrapes = Scrapes(rig.cache, self.scheduler)
        self.models: dict[tuple[str, int], Tracked] = {}
        self.begun: set[int] = set()  # handles of sequences that have computed something
        self.requests: dict[str, Request] = {}
        self.taken: dict[str, int] = {}  # tokens of first sequences that the scheduler certainly has
        self.number = self.tokens = self.drafts = self.refusals = 0

    def risky(self, rig: Rig, call: Callable[[], T]) -> T:
        """Make a call that may be interrupted; otherwise a later call of the operation may be."""
        interrupt = self.interrupt
        try:
            return super().risky(rig, call)
        finally:
            self.interrupt = None if interrupt is None or interrupt.where else interrupt

    # ---- operations; those that a scheduler does itself are omitted ----

    def do_allocate(self, rig: Rig, op: Op) -> None:
        """Add a request."""
        prompt, salt, extras = self.prompt(op)
        self.number += 1
        count = (1, 1, 2, 3)[op.d % 4]
        most = 1 + op.d // 8 % (3 * self.config.block_size + 3)
        hint = HINTS[op.d // 512 % len(HINTS)]
        retain = (0.0, 1.0, 20.0)[op.d // 4096 % 3] if hint != "over" and self.rigs[0].manager.prefix.enabled else 0.0
        extras = tuple(extra for extra in extras if extra[0] + extra[1] <= len(prompt) + most)
        options = {"salt": salt, "extras": extras, "hint": hint, "retain": retain}
        request = Request(f"{self.number}", prompt, most, count, op.d // 256 % 2, **options)  # type: ignore[arg-type]
        is_first = self.recording is not None and not self.recording.requests
        if len(self.requests) < 9:
            with suppress(OutOfBlocksError):
                if self.tried(rig, lambda: self.scheduler.add(request), again=is_first):
                    self.requests[request.request_id] = request
                    if self.recording is not None:
                        self.recording.add(request.request_id, self.model(prompt, salt, extras).values)

    def do_free(self, rig: Rig, op: Op) -> None:
        """Abort a request."""
        if self.requests and not op.b % 4:
            name = list(self.requests)[op.a % len(self.requests)]
            if self.tried(rig, lambda: self.scheduler.abort(name), again=False):
                self.leave(self.requests[name])
            elif self.recording is not None:
                self.recording.open[name].was_cut = True

    def do_step(self, rig: Rig, op: Op) -> None:
        self.schedule(rig, op)

    def do_append(self, rig: Rig, op: Op) -> None:
        self.schedule(rig, op)

    def do_drain(self, rig: Rig, op: Op) -> None:
        if op.b % 2:
            self.risky(rig, self.scheduler.drain)
        for number in range(op.a % 8):
            self.schedule(rig, CALM._replace(a=op.a + number))

    def do_poll(self, rig: Rig, op: Op) -> None:
        self.risky(rig, self.scheduler.poll)

    def do_defragment(self, rig: Rig, op: Op) -> None:
        empty_extents(rig, op)
        with suppress(InvalidArgumentError):
            goal = GOALS[op.a % len(GOALS)]
            rig.manager.defrag.run(goal, 1 + op.b % 4, max_moves=op.c % 8)  # type: ignore[arg-type]

    def _nothing(self, rig: Rig, op: Op) -> None:
        """Do nothing: the scheduler does this by itself, or it would need sequences outside the scheduler."""

    do_swap = do_mark = do_step
    do_fork = do_note = do_truncate = do_load = do_write = do_allocate
    do_allocate_count = do_fork_prefix = do_stale = do_pin = do_priority = do_reset = do_forget = do_restart = _nothing
    do_swarm = do_end_load = do_end_write = _nothing

    # ---- a step ----

    def schedule(self, rig: Rig, op: Op) -> None:
        """Run one step. If one of its calls is interrupted, repeat the call or continue with the next step."""
        try:
            self.run_step(rig, op)
        except Interrupted:
            self.scheduler.give_up()

    def run_step(self, rig: Rig, op: Op) -> None:
        interrupts = self.counts["interrupts"]
        step = self.begin_step(rig, op)
        self.counts["steps"] += 1
        self.tokens += len(step.token_ids)
        texts = self.fill_in(step, op)
        if op.d % 16 == 3:
            self.do_free(rig, op._replace(b=0))
        found = self.compute(rig, step, texts, by_layer=op.b % 2 == 0)
        if not self.end_step(rig, step, fails=op.c % 32 == 0):
            return
        self.check_read(step, texts, found)
        sampled, reached = self.sample(step, texts)
        try:
            finished = self.risky(rig, lambda: self.scheduler.update(step, sampled))
        except Interrupted:
            if op.d // 16 % 2:
                raise
            finished = self.scheduler.update(step, sampled)
        if self.counts["interrupts"] == interrupts:
            self.taken |= reached
        for each in finished:
            self.end(each)

    def begin_step(self, rig: Rig, op: Op) -> Step:
        """Decide a step, and start its transfers."""
        lookahead = op.a // 3 % (self.config.lookahead + 1) if op.a % 3 else None
        by_layer = op.b % 2 == 0
        return self.risky(rig, lambda: self.scheduler.step(by_layer=by_layer, num_lookahead_tokens=lookahead))

    def end_step(self, rig: Rig, step: Step, *, fails: bool) -> bool:
        """End a step's transfers as far as its tokens need them. Returns whether they can be taken."""
        kind = ZeroDivisionError if fails else None
        self.risky(rig, lambda: step.__exit__(kind, None, None))
        return not fails

    def fill_in(self, step: Step, op: Op) -> list[Tracked]:
        """Fill in draft tokens, some of them right; return the rows' tokens, including the step's."""
        known = [self.tracked(*step.owner(row)) for row in range(step.rows)]
        if step.num_draft_tokens and op.d % 3:
            drafts = []
            for row, most in enumerate((step.lengths[: step.decodes] - 1).tolist()):
                text = known[row].child(0, int(step.start[row]) + 1)
                for _ in range(most - (op.d % 3 == 1 and self.random.randrange(3) == 0) * most):
                    is_right = self.random.random() < 0.8
                    text.add([drawn(text, *step.owner(row)) if is_right else self.random.randrange(VOCABULARY)])
                drafts.append(text.tokens[int(step.start[row]) + 1 :])
            step.set_draft_token_ids(drafts)
        self.drafts += step.num_draft_tokens
        texts = []
        for row, (first, end) in enumerate(
            zip(step.query_start_loc[:-1].tolist(), step.query_start_loc[1:].tolist(), strict=True)
        ):
            start, tokens = int(step.start[row]), step.token_ids[first:end].tolist()
            is_decode = row < step.decodes
            texts.append(known[row].child(0, start + 1 if is_decode else start + len(tokens)))
            texts[-1].add(tokens[1:] if is_decode else [])
            assert texts[-1].tokens[start:] == tokens, f"row {row} has other tokens than request {step.owner(row)[0]}"
        return texts

    def compute(self, rig: Rig, step: Step, texts: list[Tracked], *, by_layer: bool) -> list[list[Cells]]:  # noqa: C901 (three kinds of group)
        """Write and read like a model; return what each layer has read for each row, group by group."""
        size = self.config.block_size
        found: list[list[Cells]] = [[] for _ in texts]
        starts, ends = step.start.tolist(), (step.start + step.lengths).tolist()
        written = [
            value for text, first, end in zip(texts, starts, ends, strict=True) for value in text.values[first:end]
        ]
        slots, tables = step.slot_mapping.copy(), step.block_tables.astype(np.int64)
        if len(rig.groups) == 1:
            slots, tables = slots[None], tables[None]

        def run(layer: int) -> None:
            cells = rig.cells[layer]
            early = {
                number: [self.state(rig, layer, number, tables[number, row], first) for row, first in enumerate(starts)]
                for number, kind, _ in rig.groups
                if kind == "recurrent"
            }
            for number, kind, _ in rig.groups:
                if kind != "recurrent" and not kind.endswith("drafter"):
                    cells[:, rig.slots(number, slots[number])] = cells_of(np.array(written, np.int64), layer)
            for row, (first, end) in enumerate(zip(starts, ends, strict=True)):
                for number, kind, window in rig.groups:
                    if kind == "recurrent":
                        found[row].append(early[number][row])
                        # The states after all tokens of a decoding row, and after the last token of another.
                        kept = np.arange(first if row < step.decodes else end - 1, end)
                        places = slots[number, step.query_start_loc[row] + kept - first] // size * size
                        assert places.all(), "a state would be written to the null block"
                        cells[:, rig.slots(number, places)] = cells_of(
                            np.array(texts[row].values, np.int64)[kept], layer
                        )
                        continue
                    tokens = self.config.tokens(number)
                    if kind.endswith("drafter"):
                        at = np.arange(self.first_entry(step, row, first), end)
                        entries = np.array(texts[row].entries(kind)[at[0] : end], np.int64)
                        places = tables[number, row, at // tokens] * tokens + at % tokens
                        cells[:, rig.slots(number, places)] = cells_of(entries, layer)
                    at = np.arange(begin_of(kind, window, first), end - kind.endswith("drafter"))
                    places = tables[number, row, at // tokens] * tokens + at % tokens
                    found[row].append(cells[:, rig.slots(number, places)])

        for layer in range(LAYERS):
            if by_layer:
                step.wait_for_layer(layer)
            rig.streams.compute(lambda layer=layer: run(layer))  # type: ignore[misc]
        rig.streams.fence().synchronize()
        self.begun |= set(step.handles.tolist())
        return found

    def first_entry(self, step: Step, row: int, first: int) -> int:
        """Return the first entry that a drafter writes: that before a row's tokens, unless it was found."""
        has_begun = row < step.decodes or int(step.handles[row]) in self.begun
        return first - (first > 0 and has_begun)

    def state(self, rig: Rig, layer: int, group: int, table: NDArray[np.int64], length: int) -> Cells:
        """Return the state after a row's first tokens."""
        size = self.config.block_size
        at = int(table[(length - 1) // size]) * size if length else 0
        found: Cells = rig.cells[layer][:, rig.slots(group, np.arange(at, at + (length > 0)))]
        return found

    def tracked(self, name: str, index: int) -> Tracked:
        """Return the expected contents of a request's sequence, from its tokens."""
        model = self.models.get((name, index))
        if model is None:
            request = self.requests[name]
            text = self.model([int(token) for token in request.prompt], request.salt, tuple(request.extras))
            model = self.models[name, index] = text
        return model

    def live_rows(self, step: Step) -> list[int]:
        """Rows whose tokens count: those of requests that were not aborted meanwhile and have lost no bytes."""
        return [
            row
            for row in range(step.rows)
            if (step.void is None or not step.void[row]) and step.owner(row)[0] in self.requests
        ]

    def check_read(self, step: Step, texts: list[Tracked], found: list[list[Cells]]) -> None:
        """Compare what was read with the values of these tokens."""
        groups = self.rigs[0].groups
        for row in self.live_rows(step):
            (name, _), first, values = step.owner(row), int(step.start[row]), texts[row].values
            for at, cells in enumerate(found[row]):
                layer, (number, kind, window) = at // len(groups), groups[at % len(groups)]
                begin, end = begin_of(kind, window, first), first if kind == "recurrent" else len(values)
                end -= kind.endswith("drafter")  # the next step writes its last entry
                self.counts["cells"] += end - begin
                wanted = cells_of(np.array(texts[row].entries(kind)[begin:end], np.int64), layer)
                assert np.array_equal(cells, wanted), (
                    f"request {name}, from token {first}: layer {layer} of group {number} is wrong"
                )

    def sample(self, step: Step, texts: list[Tracked]) -> tuple[list[int], dict[str, int]]:
        """Sample a token for each draw, and accept draft tokens.

        Returns:
            The tokens, and how many each request's first sequence has once they are taken.
        """
        sampled, reached = [], {}
        live = set(self.live_rows(step))
        for draw in step.draws():
            text = texts[draw.row]
            sampled.append(drawn(text, draw.request_id, draw.sequence, draw.position))
            if draw.row not in live:
                continue
            model, first = self.tracked(draw.request_id, draw.sequence), int(step.start[draw.row]) + 1
            assert draw.position <= len(model.tokens) or draw.position > first, (
                f"request {draw.request_id} skips tokens"
            )
            is_accepted = text.tokens[: draw.position] == model.tokens[: draw.position]
            if is_accepted and draw.position == len(model.tokens):
                model.add([sampled[-1]])
            if is_accepted and not draw.sequence:
                reached[draw.request_id] = draw.position + 1
            assert not is_accepted or model.tokens[draw.position] == sampled[-1]
        return sampled, reached

    def end(self, finished: Finished) -> None:
        """Check the tokens that a request has generated."""
        request, name = finished.request, finished.request.request_id
        self.refusals += finished.error is not None
        assert name in self.requests, f"request {name} ends twice"
        for index, tokens in enumerate(finished.outputs):
            generated = self.tracked(name, index).tokens[len(request.prompt) :]
            assert list(tokens) == generated[: len(tokens)], f"request {name} got other tokens"
            assert finished.error or len(tokens) == request.max_tokens
        self.taken[name] = len(request.prompt) + len(finished.outputs[0])
        self.tracked(name, 0).cut(self.taken[name])
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Forget a request, and note its expected recording."""
        name, prompt = request.request_id, len(request.prompt)
        if self.recording is not None:
            values = self.tracked(name, 0).values
            self.recording.finish(name, values, range(self.taken.get(name, prompt) - prompt, len(values) + 1 - prompt))
        del self.requests[name]

    def check_metrics(self, rig: Rig, sums: dict[str, float]) -> None:
        """Check that the counters match the steps that were run."""
        assert sums["num_requests_unfinished"] == sums["num_requests_running"] == sums["num_requests_swapped"] == 0
        assert sums["refused_requests_total"] >= self.refusals  # some requests are aborted before they are reported
        if not self.counts["interrupts"]:
            assert sums["scheduled_tokens_total"] == self.tokens
        stats = self.scheduler.stats()
        if self.config.swap_cost == NEVER:
            assert not stats.preempted_swap_host + stats.preempted_swap_external, f"a swap was too dear: {stats}"

    def finish(self) -> None:
        """Run all requests to their ends, and check that every block is free."""
        self.interrupt = None
        (rig,) = self.rigs
        self.unpin(rig)
        with simulated(self.clock):
            for store in rig.stores():
                store.release()
            for seconds in (0.01, 30.0):  # beyond the time of every retention
                self.clock.now += seconds
                self.schedule(rig, CALM)
                while self.requests or rig.open or rig.cache.executor.num_in_flight:
                    self.clock.now += 0.01
                    self.schedule(rig, CALM)
            self.scheduler.drain()
        # The scheduler takes the decisions; `KVCache` is not involved in these.
        super().finish()


def begin_of(kind: str, window: int | None, first: int) -> int:
    """The first token whose bytes a step needs that goes on after `first` tokens."""
    if kind == "recurrent":
        return max(0, first - 1)
    # A drafter writes the entry before them again, too.
    return 0 if window is None else max(0, first + (kind != "windowed_drafter") - window)


def drawn(text: Tracked, _name: str, sequence: int, position: int | None = None) -> int:
    """The token at a position of a sequence, by default the next one: it depends on all tokens before it."""
    return (text.values[-1 if position is None else position - 1] + 31 * sequence) % VOCABULARY
