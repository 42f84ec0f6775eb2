"""The same caches under the reference scheduler, which preempts, swaps and shares, and may be interrupted."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np
from cache_compute import cells_of
from cache_machine import GOALS, Machine, Op
from cache_rig import LAYERS, MANY, Cells, Config, Rig, Tracked, simulated
from cache_world import Interrupted

from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.executor.executor import StepDone
from blockyard.scheduler import Request, Scheduler, Step

PATIENCE = 300
"""Steps in a row that may do nothing."""


def scheduled(config: Config) -> Config:
    """What a scheduler can run of these sizes: one cache group, and nobody else's jobs."""
    groups = "full" if config.groups == "full" else "window"
    prefix = "" if config.groups == "full window" else config.prefix
    host = min(config.host, 24) if config.host < MANY else 24
    return replace(config, groups=groups, prefix=prefix, jobs="", caches=1, host=host)


class ScheduledMachine(Machine):
    """A scheduler over one cache. Each request gets the tokens that follow from the bytes its steps read.

    Args:
        config: of the cache.
        without: as for `Machine`.
    """

    def __init__(self, config: Config, without: Iterable[str] = ()) -> None:
        super().__init__(scheduled(config), without)
        (rig,) = self.rigs
        self.scheduler = Scheduler(
            rig.manager,
            max_num_seqs=6,
            max_num_batched_tokens=1 + config.device % 9,
            preemption_mode=("auto", "swap", "recompute")[config.most % 3],
            overlap_io=config.staging % 4 == 2,
            prefetch=None if rig.prefixes is None else rig.prefixes.prefetch,
        )
        self.models: dict[tuple[str, int], Tracked] = {}
        self.requests: dict[str, Request] = {}
        self.number = self.idle = 0

    # ---- operations; what a scheduler does by itself is not done ----

    def do_allocate(self, rig: Rig, op: Op) -> None:
        """Add a request."""
        prompt, salt = self.prompt(op)
        self.number += 1
        count = (1, 1, 2, 3)[op.d % 4]
        request = Request(f"{self.number}", prompt, 1 + op.d // 8 % 9, count, op.d // 128 % 2, salt=salt)
        if len(self.requests) < 6:
            with suppress(OutOfBlocksError):
                self.scheduler.add(request)
                self.requests[request.request_id] = request

    def do_free(self, rig: Rig, op: Op) -> None:
        """Abort a request."""
        if self.requests and not op.b % 4:
            name = list(self.requests)[op.a % len(self.requests)]
            self.scheduler.abort(name)
            del self.requests[name]

    def do_step(self, rig: Rig, op: Op) -> None:
        self.schedule(rig, by_layer=op.b % 2 == 0)

    def do_append(self, rig: Rig, op: Op) -> None:
        self.schedule(rig, by_layer=op.b % 2 == 0)

    def do_drain(self, rig: Rig, op: Op) -> None:
        for _ in range(op.a % 8):
            self.schedule(rig)

    def do_poll(self, rig: Rig, op: Op) -> None:
        self.finish_tickets(rig.cache.executor.poll())

    def do_defragment(self, rig: Rig, op: Op) -> None:
        with suppress(InvalidArgumentError):
            goal = GOALS[op.a % len(GOALS)]
            rig.manager.defrag.run(goal, 1 + op.b % 4, max_moves=op.c % 8)  # type: ignore[arg-type]

    def _nothing(self, rig: Rig, op: Op) -> None:
        """For what the scheduler does by itself, or what would need sequences of the machine's own."""

    do_allocate_count = do_mark = do_swap = do_fork = do_fork_prefix = do_truncate = do_note = do_stale = _nothing
    do_pin = do_priority = do_reset = do_forget = do_restart = do_swarm = do_load = do_end_load = do_write = (
        do_end_write
    ) = _nothing

    # ---- a step ----

    def schedule(self, rig: Rig, *, by_layer: bool = False) -> None:
        rig.cache.give_back()
        try:
            step = self.risky(rig, self.scheduler.schedule)
        except Interrupted:
            return
        self.counts["steps"] += 1
        executor = rig.cache.executor
        executor.submit(step.decision, by_layer=by_layer)
        rig.open.add(step.decision.ticket)
        found = self.compute(rig, step, by_layer=by_layer)
        self.finish_tickets(executor.collect(step.decision.ticket))
        self.idle = 0 if step.rows else self.idle + 1
        assert self.idle < PATIENCE or not self.requests, f"{len(self.requests)} requests wait, and nothing happens"
        self.update(step, found)
        if rig.prefixes is not None:
            rig.prefixes.poll()

    def finish_tickets(self, ended: list[StepDone]) -> None:
        (rig,) = self.rigs
        for done in ended:
            harmless = all(store.harmless for store in rig.stores())
            assert rig.disturbed or not harmless or not done.lost, f"{done.lost} is lost, and nothing has failed"
            rig.open.discard(done.ticket)
            self.scheduler.complete(done.ticket, done.lost)

    def compute(self, rig: Rig, step: Step, *, by_layer: bool) -> list[list[Cells]]:
        """Write and read as a model does; returns what each layer has read for each row."""
        texts = [self.model_of(step, row) for row in range(step.rows)]
        size = self.config.block_size
        window = rig.groups[0][2]
        found: list[list[Cells]] = [[] for _ in texts]
        starts, ends = step.start.tolist(), (step.start + step.lengths).tolist()
        written = [value for model, first, end in zip(texts, starts, ends, strict=True) for value in model[first:end]]
        slots, tables = step.slot_mapping.copy(), step.block_tables.astype(np.int64)

        def run(layer: int) -> None:
            cells = rig.cells[layer]
            cells[:, slots] = cells_of(np.array(written, np.int64), layer)
            for row, (first, end) in enumerate(zip(starts, ends, strict=True)):
                at = np.arange(0 if window is None else max(0, first + 1 - window), end)
                found[row].append(cells[:, tables[row, at // size] * size + at % size])

        for layer in range(LAYERS):
            if by_layer:
                rig.cache.executor.wait_for_layer(step.decision.ticket, layer)
            rig.streams.compute(lambda layer=layer: run(layer))  # type: ignore[misc]
        rig.streams.fence().synchronize()
        return found

    def model_of(self, step: Step, row: int) -> list[int]:
        """Values of a row's tokens, to its end in this step."""
        name, index = step.owner(row)
        return self.tracked(name, index).values

    def tracked(self, name: str, index: int) -> Tracked:
        """What a sequence of a request has, by the tokens that it was given."""
        model = self.models.get((name, index))
        if model is None:
            request = self.requests[name]
            model = self.models[name, index] = Tracked(0, request.salt, self.seed_of(request.salt))
            model.add([int(token) for token in request.prompt])
        return model

    def update(self, step: Step, found: list[list[Cells]]) -> None:
        """Compare what was read, sample a token from it for each draw, and tell the scheduler."""
        window = self.rigs[0].groups[0][2]
        void = np.zeros(step.rows, np.bool_) if step.void is None else step.void
        for row in range(step.rows):
            name, _ = step.owner(row)
            if void[row] or name not in self.requests:
                continue
            first, end = int(step.start[row]), int(step.start[row] + step.lengths[row])
            values = self.model_of(step, row)
            assert end <= len(values), f"request {name} is computed up to {end}, and has {len(values)} tokens"
            begin = 0 if window is None else max(0, first + 1 - window)
            for layer, cells in enumerate(found[row]):
                wanted = cells_of(np.array(values[begin:end], np.int64), layer)
                self.counts["cells"] += end - begin
                assert np.array_equal(cells, wanted), f"request {name}, tokens {first} to {end}: layer {layer} is wrong"
        sampled = []
        for draw in step.draws():
            model = self.tracked(draw.request_id, draw.sequence)
            value = model.values[draw.position - 1] if draw.position <= len(model.values) else 0
            sampled.append((value + 31 * draw.sequence) % 3)
            if not void[draw.row]:
                assert draw.position == len(model.tokens), f"request {draw.request_id} skips tokens"
                model.add([sampled[-1]])
        for finished in self.scheduler.update(step, sampled):
            self.end(finished.request, finished.outputs, early=finished.error is not None)

    def end(self, request: Request, outputs: tuple[tuple[int, ...], ...], *, early: bool) -> None:
        name = request.request_id
        del self.requests[name]
        for index, tokens in enumerate(outputs):
            if not early:
                assert len(tokens) == request.max_tokens
                assert list(tokens) == self.tracked_tokens(request, index), f"request {name} got other tokens"

    def tracked_tokens(self, request: Request, index: int) -> list[int]:
        return self.models[request.request_id, index].tokens[len(request.prompt) :]

    def finish(self) -> None:
        """Run all requests to their ends; every block is free then."""
        self.interrupt = None
        (rig,) = self.rigs
        self.unpin(rig)
        with simulated(self.clock):
            for store in rig.stores():
                store.release()
            while self.requests or rig.open or rig.cache.executor.num_in_flight:
                self.clock.seconds += 0.01
                self.schedule(rig)
        # The scheduler takes the decisions: KVCache has no part in these.
        super().finish()
