"""Faults for `python.py`: mistakes that people make, and the tests that should catch each.

A fault is an original text, which occurs exactly once in its file, and its replacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mutants.store_faults import STORE_FAULTS


class PlantedFault(NamedTuple):
    """A fault: its file below `python/blockyard`, the original and the faulty text, the test files that catch it."""

    file: str
    original: str
    faulty: str
    tests: tuple[str, ...]


SCHEDULER = (
    "scheduler/test_scheduler.py",
    "scheduler/test_precedence.py",
    "scheduler/test_add_and_admission.py",
    "scheduler/test_scheduler_prefix.py",
    "scheduler/test_scheduler_resize.py",
    "scheduler/test_scheduler_loop.py",
    "property/test_scheduler_machine.py",
    "property/test_scheduler_machine.py",
)
LOOP = (
    "scheduler/test_scheduler_loop.py",
    "integrations/test_generator.py",
    "integrations/test_generator_interrupts.py",
)
EXECUTOR = ("executor/test_executor.py", "demo/test_executors.py", "integrations/test_engine_stores.py")
PARTS = ("executor/test_parts.py", "stores/test_checked_store.py", *EXECUTOR)
SIDE = ("stores/test_checked_store.py", "executor/test_executor.py", "executor/test_interrupts.py")
PREFIXES = ("stores/test_prefix_store.py", "prefix_store/test_prefixes.py", "property/test_kept_prefixes_machine.py")
NANO = (
    "integrations/test_nano.py",
    "integrations/test_nano_cache.py",
    "integrations/test_nano_engine.py",
    "integrations/test_adapter_interrupts.py",
)
TRACED = ("tracing/test_tracing.py", "tracing/test_traced_programs.py")
LINES = ("tracing/test_log_lines.py",)

# File, tests, and pairs of original and faulty text.
_FAULTS: list[tuple[str, tuple[str, ...], list[tuple[str, str]]]] = [
    (
        "scheduler/scheduler.py",
        SCHEDULER,
        [
            (
                "self._waiting.push(IdleSequences(state, [0], [state.prompt], forks=request.n - 1))",
                "self._waiting.push(IdleSequences(state, [0], [state.prompt], forks=request.n))",
            ),
            ("            self.manager.free(handles)\n", "            pass\n"),
            ("        self._stop_tokens.add(state.stops)\n            # Else", "        # Else"),
            (
                "                    self._preempt(gone)\n                    preempted = True",
                "                    self._preempt(gone)\n                    preempted = False",
            ),
            ("forks=rows.fork_count(row)))", "forks=0))"),
            (
                "            if state.seats:\n                state.lost = True",
                "            if not state.seats:\n                state.lost = True",
            ),
            ("                self.manager.fail(ticket)\n", "                pass\n"),
            ("        self._capacity = [sys.maxsize] *", "        self._capacity = [0] *"),
            ("        if not self._has_shrunk():", "        if self._has_shrunk():"),
        ],
    ),
    (
        "scheduler/acceptance.py",
        ("scheduler/test_acceptance.py", *SCHEDULER),
        [
            ("            length -= void\n", ""),
            ("            at += count\n            state, index", "            state, index"),
            ("        due[step.decodes :] = True  # a chunk", "        due[: step.decodes] = True  # a chunk"),
            (
                "ended: NDArray[np.bool_] = length >= rows.fields[LIMIT, :samples]",
                "ended: NDArray[np.bool_] = length > rows.fields[LIMIT, :samples]",
            ),
            ("cut = (count <= slots) & (count > 0)", "cut = (count < slots) & (count > 0)"),
            ("if wanted <= count[row] and", "if wanted < count[row] and"),
            ("    agrees[step.query_start_loc[1 : step.decodes + 1] - 1] = False", "    pass"),
            ("due[: step.decodes] &= computed // size > (computed - count) // size", "due[: step.decodes] = False"),
            ("        length += count\n", "        length += 1\n"),
        ],
    ),
    (
        "scheduler/admission.py",
        SCHEDULER,
        [
            (
                "        if 1 + head.forks > self._rows.seats_left:",
                "        if head.forks > self._rows.seats_left:",
            ),
            ("            rows.seats_left -= 1 + head.forks\n", "            rows.seats_left -= 1\n"),
            ("        for idle in reversed(self._aside):\n            self._waiting.push(idle)\n", ""),
            (
                "            longest = min(len(others), len(tokens) - 1)",
                "            longest = min(len(others), len(tokens))",
            ),
            ("            common -= common % self._manager.block_size\n", ""),
            ("        rows.read_tables(slice(first, rows.count))\n", ""),
            ("salt, lora_id = state.request.salt,", "salt, lora_id = None,"),
            ("lora_id=lora_id, extras=state.extras)", "lora_id=lora_id)"),
            ('        "extras": [state.extras if state else () for state in states],\n', ""),
            ("need = fit.bytes + max(0, room - fit.free_bytes)", "need = fit.bytes"),
            ("        return sum(map(self.needs.rest, lengths, builder.ends))", "        return 0"),
            ("                idle.overtaken += 1\n", "                pass\n"),
            ("rows.lowest_priority() <= first.rank[0]:", "rows.lowest_priority() <= first.rank[0] + 1:"),
            ("self._is_enough(first, lacking, seats):", "True:"),
        ],
    ),
    (
        "scheduler/admission.py",
        ("scheduler/test_hybrid.py",),
        [
            ("needs.keeps_states or needs.has_classes", "needs.keeps_states"),
            ("return fit if fit.status == AllocStatus.LATER and", "return fit if fit.status == AllocStatus.NEVER and"),
        ],
    ),
    (
        "scheduler/scheduler.py",
        ("scheduler/test_hybrid.py",),
        [
            ("            policy.plan(self.manager, fit)\n", "            pass\n"),
            ("        options.check_defragment(manager, defragment)\n", ""),
        ],
    ),
    (
        "scheduler/swapping.py",
        SCHEDULER,
        [
            ("        rows.remove(gone)\n", ""),
            (
                "            self._landed += self._loading.pop(ticket, ())",
                "            self._landed = self._loading.pop(ticket, [])",
            ),
            (
                "            if mixed or len(idle.indices) > self._rows.seats_left:",
                "            if mixed and len(idle.indices) > self._rows.seats_left:",
            ),
            ("        builder.token_ids[new] = [tokens[-1] for", "        builder.token_ids[new] = [tokens[0] for"),
            ("            self._rows.seats_left -= len(idle.indices)\n", ""),
            ("        del self._away[idle]\n        self._manager", "        self._opened"),
        ],
    ),
    (
        "scheduler/rows.py",
        SCHEDULER,
        [
            ("            self.fields[BASE] += self.fields[SEAT] * (longest - had)\n", ""),
            (
                "            self.seats_left += sum(self.forks.pop(seat, 0) for seat in seats)",
                "            self.seats_left += sum(self.forks.get(seat, 0) for seat in seats)",
            ),
            ("            tables[to] = tables[rows]\n", "            pass\n"),
            ("            self.tokens[seat, :most] = NO_TOKEN\n", ""),
            ("self._steps_left, (most - 1) // self._step_tokens - 1)", "self._steps_left, most // self._step_tokens)"),
            ("            rows = rows[values == values.max()]", "            rows = rows[values == values.min()]"),
        ],
    ),
    (
        "scheduler/ranked_queue.py",
        SCHEDULER,
        [
            (
                "        self._take(idle)\n        return idle",
                "        idle.status = SequenceStatus.RUNNING\n        return idle",
            )
        ],
    ),
    (
        "scheduler/step.py",
        SCHEDULER,
        [
            (
                "            array[..., at + count : self.tokens + count] = array[..., at : self.tokens].copy()",
                "            array[..., at + count : self.tokens + count] = array[..., : self.tokens - at].copy()",
            ),
            ("            counts[-1] -= excess", "            counts[-1] -= self.left"),
            ("            rows.fields[DONE, decodes:count] = self.ends\n", ""),
        ],
    ),
    (
        "scheduler/options.py",
        SCHEDULER,
        [
            ("self._nulls = self._has_nulls * (self._pools[0].per_extent or 1)", "self._nulls = 0"),
            ("(tokens, chunk_tokens=min(chunk, tokens)).bytes", "(tokens).bytes"),
        ],
    ),
    (
        "scheduler/options.py",
        ("scheduler/test_hybrid.py",),
        [
            ('                "extents", number, wanted=wanted,', '                "extents", number,'),
            ("        if len(numbers) != 1 or as_int", "        if as_int"),
        ],
    ),
    (
        "scheduler/loop.py",
        LOOP,
        [
            ("            self._end_ticket(end.ticket, end.lost)\n", "            pass\n"),
            ("        while not (step.rows or ended) and self.steps:", "        while not (step.rows or ended):"),
            (
                "        self._idle = self._idle + (0.25 if was_loading else 1.0) if is_stuck else 0.0",
                "        self._idle = 0.0",
            ),
        ],
    ),
    (
        "scheduler/stop_tokens.py",
        ("scheduler/test_stop_tokens.py",),
        [("                self._stops[token] = False\n", "                self._stops[token] = True\n")],
    ),
    (
        "executor/loop.py",
        ("executor/test_cache.py", "executor/test_interrupts.py", "scheduler/test_scheduler_loop.py"),
        [
            ("            self._ended[ticket] = StepEnd(ticket, self._steps.lose(ticket), (error,))\n", ""),
            ("        self.executor.poll()  # these reports are among the tickets below\n", ""),
            ("            self.prefix_store.give_up_all()\n", "            pass\n"),
        ],
    ),
    (
        "executor/parts.py",
        EXECUTOR,
        [
            ('        return self.pairs.src == "device"', '        return self.pairs.dst == "device"'),
            (
                "    earlier_reads = tuple(part for part in (*named, *own) if part.reads_device)",
                "    earlier_reads = tuple(part for part in own if part.reads_device)",
            ),
            ("            if not awaited.isdisjoint(touched):", "            if awaited.isdisjoint(touched):"),
            (
                "    return earlier_reads, [*reads, *loads, *within, *store_reads]",
                "    return earlier_reads, [*loads, *reads, *within, *store_reads]",
            ),
            (
                '    if kind != "exchange":\n        return pairs\n',
                '    if kind == "exchange":\n        return pairs\n',
            ),
        ],
    ),
    (
        "engine/memory.py",
        PARTS,
        [
            (
                "1 << (-(-num_bytes // self.bytes_per_block) - 1).bit_length()",
                "1 << (-(-num_bytes // self.bytes_per_block)).bit_length() - 1",
            ),
        ],
    ),
    (
        "executor/parts.py",
        PARTS,
        [
            (
                "                self.batch = store.read(_column(pairs, 0), rows, page_class)",
                "                self.batch = store.read(_column(pairs, 1), rows, page_class)",
            ),
            (
                "self.end([_some(self.pairs, ~batch.answer.ok)], batch.answer.error)",
                "self.end([_some(self.pairs, batch.answer.ok)], batch.answer.error)",
            ),
            ("self.end([self.missed] if self.missed else [], None)", "self.end([], None)"),
            (
                "            if batch is not None and batch.answer is not None and batch.answer.are_rows_free:",
                "            if batch is not None:",
            ),
            ("            rows = rows[answer.ok]\n", ""),
            (
                "self.batch = self.tiers.store.write(_column(self.pairs, 1),",
                "self.batch = self.tiers.store.write(_column(self.pairs, 0),",
            ),
            (
                'if self.kind in {"copy", "exchange"} and self.writes_device',
                'if self.kind in {"move", "exchange"} and self.writes_device',
            ),
        ],
    ),
    (
        "executor/executor.py",
        (*EXECUTOR, "executor/test_interrupts.py", "executor/test_parts.py", "repo/test_messages.py"),
        [
            (
                "        if ticket in self._steps or ticket in self._done:\n            raise",
                "        if ticket in self._steps and ticket in self._done:\n            raise",
            ),
            (
                "                room = room and not self._lacks_room(part)",
                "                room = not self._lacks_room(part)",
            ),
            (
                "        is_full = staged and staged + part.num_bytes > self._max_staging",
                "        is_full = staged + part.num_bytes > self._max_staging",
            ),
            (
                "            if all(part.ended for part in step.parts):",
                "            if any(part.ended for part in step.parts):",
            ),
            ("        del self._done[ticket]\n", ""),
            (
                "len(ids) and ids.max() >= num_slots:",
                "len(ids) and ids.max() > num_slots:",
            ),
            ("        step.failed = error\n", ""),
        ],
    ),
    (
        "stores/checked_store.py",
        SIDE,
        [
            ("            self._repeated.add(batch.ticket)\n", ""),
            ("        self._open.pop(batch.ticket, None)\n", ""),
            ("                and answer.ok.shape == (batch.count,)\n", ""),
            ("                return Answer(answer.ok.copy(), rows,", "                return Answer(answer.ok, rows,"),
            (
                "        return found if found.dtype == _BOOL and found.shape",
                "        return found if found.dtype == _BOOL or found.shape",
            ),
        ],
    ),
    (
        "prefix_store/loads.py",
        PREFIXES,
        [
            ("        count = _leading(answer.ok)\n", "        count = int(answer.ok.sum())\n"),
            (
                "count or _leading(~self._values.lacks(load.keys[:PROBED], load.page_classes[:PROBED]))",
                "count or len(load.keys[:PROBED])",
            ),
            ("        load.tokens += found * self._manager.block_size", "        load.tokens += found"),
            (
                "        found = self._end_job(copy.job, copy.landed & has_landed)",
                "        found = self._end_job(copy.job, copy.landed)",
            ),
        ],
    ),
    (
        "prefix_store/writes.py",
        PREFIXES,
        [
            (
                "        self._count(write.job, write.num_blocks - unwritten)",
                "        self._count(write.job, write.num_blocks)",
            ),
            (
                "        if not unwritten or answer.are_rows_free:\n            self._give_back(write)\n",
                "        self._give_back(write)\n",
            ),
            ("if not is_whole or rows is None or", "if rows is None or"),
            ("            self._num_answers = answers\n", "            self._num_answers = answers + 1\n"),
        ],
    ),
    (
        "prefix_store/values.py",
        ("prefix_store/test_classes.py", "prefix_store/test_prefixes.py"),
        [
            ("        is_new = ~self._has_all(keys, slices)", "        is_new = self._has_all(keys, slices)"),
            ('    marked.view("<u4")[:, -1] ^= numbers', '    marked.view("<u4")[:, -1] ^= 1 & numbers'),
            (" & ~self._lacks_some(keys[several], counts[several])", ""),
            ("np.full(has_parent.sum(), self._last_of_parent)", "np.full(has_parent.sum(), 0)"),
        ],
    ),
    (
        "stores/checked_store.py",
        ("prefix_store/test_classes.py", "executor/test_swap_classes.py"),
        [
            ("        ok = all_of(found.ok, count)", "        ok = found.ok[::count]"),
            ("rows.reshape(len(ok), -1)[:, : self.size]", "rows.reshape(len(ok), -1)[:, -self.size :]"),
            ("        first = extents * self._extent + within * slices", "        first = blocks * slices"),
            ("store.num_slots // self._extent", "store.num_slots"),
        ],
    ),
    (
        "cache.py",
        ("executor/test_cache.py", "prefix_store/test_prefixes.py", "engine/test_elastic.py"),
        [
            ("            self.elastic.resize(blocks)\n", "            pass\n"),
            (
                "        return None if extent >= self.elastic.num_blocks else",
                "        return None if extent < self.elastic.num_blocks else",
            ),
            ("        if not 1 <= blocks <= max_blocks:", "        if not 1 <= blocks < max_blocks:"),
            (
                "    digest = sha256(bytes.fromhex(layout.fingerprint()) + name).digest()",
                "    digest = sha256(name).digest()",
            ),
            ("holds=size) // size", "holds=size) // size + 1"),
            (
                "        if self.elastic is not None and blocks > self.elastic.num_blocks:",
                "        if self.elastic is not None and blocks < self.elastic.num_blocks:",
            ),
        ],
    ),
    (
        "integrations/nano.py",
        NANO,
        [
            (
                "        if entry.tokens <= tokens <= entry.slots:\n",
                "        if tokens <= entry.slots:\n",
            ),
            ("        return entry.tokens if tokens > entry.tokens else entry.computed", "        return entry.tokens"),
            ("            if wanted <= self.manager.pool().num_free:\n                self._offload(wanted)\n", ""),
            ("            entry.named = tokens\n", ""),
            ("        seq.num_cached_tokens = hit\n", "        seq.num_cached_tokens = 0\n"),
            ("        self._running.pop(id(entry.sequence), None)\n", ""),
            ("        self._land(())  # pending decisions, before blocks are reused\n", ""),
            (
                "        for entry in self._running.values():\n            self._show(entry)\n        return",
                "        return",
            ),
            (
                "        computed = seq.num_cached_tokens\n        if computed == entry.computed:",
                "        computed = seq.num_cached_tokens\n        if computed != entry.computed:",
            ),
            (
                "                self.manager.pins.unpin(pin)\n                self._pins.clear()\n",
                "                pass\n",
            ),
        ],
    ),
    (
        "integrations/router_events.py",
        ("integrations/test_router_events.py",),
        [
            ("            self._number += 1\n", ""),
            (
                "        if not known.media:\n            del self._known[place]",
                "        if known.media:\n            del self._known[place]",
            ),
            ("salt and place == 0 else ()", "salt and place else ()"),
            ("if entry[0] >= first]", "if entry[0] > first]"),
            ("        if batch.dropped:\n            self._forget_all()\n", "        if batch.dropped:\n"),
        ],
    ),
    (
        "integrations/sampling.py",
        ("integrations/test_sampling.py",),
        [
            (
                "    key = np.array([seed, sequence_index], dtype=np.uint64)",
                "    key = np.array([seed, position], dtype=np.uint64)",
            ),
            (
                "        threshold = np.partition(scores, -top_k)[-top_k]",
                "        threshold = np.partition(scores, top_k)[top_k]",
            ),
            ("        before = np.cumsum(weights) - weights", "        before = np.cumsum(weights)"),
        ],
    ),
    (
        "integrations/transformers/generator.py",
        ("integrations/test_generator.py", "integrations/test_generator_interrupts.py"),
        [
            ("        self._finished = [left]\n        self._params.pop(request_id, None)\n", ""),
        ],
    ),
    (
        "cache.py",
        ("executor/test_cache.py",),
        [
            ("return Health(not failing, tuple(reasons))", "return Health(not reasons, tuple(reasons))"),
            ("    if stats.is_down:\n", "    if stats.errors_in_a_row and stats.is_down:\n"),
        ],
    ),
    (
        "executor/executor.py",
        ("executor/test_cache.py",),
        [
            ("return self._unfinished > 1", "return self._unfinished > 0"),
            ("        self._unfinished = 0\n\n    def", "\n    def"),
        ],
    ),
    (
        "tools/cli/__init__.py",
        ("cli/test_cli.py",),
        [
            ('and (options.format == "json" or not options.quiet)', "and not options.quiet"),
            ("(options.output is None or code == EXIT_OUTPUT)", "options.output is None"),
            (" and not isinstance(error, InvariantError)", ""),
        ],
    ),
    (
        "progress.py",
        ("cli/test_progress.py",),
        [
            ("    if quiet:\n", "    if quiet and not sys.stderr.isatty():\n"),
            (", redirect_stdout=False", ""),
            ("            self._next = now + LINE_SECONDS\n", ""),
        ],
    ),
    (
        "tools/doctor.py",
        ("cli/test_doctor.py",),
        [
            ('"ok" if runs else "fail"', '"ok" if runs else "warn"'),
            ("table is None or table.torch_cuda != torch.version.cuda", "table is None"),
        ],
    ),
    (
        "prefix_store/loads.py",
        TRACED,
        [
            ("            self._end_spans(load, why)\n", ""),
            ("        load.trace.end_leg(copy.transfer.error, leg=copy.leg)\n", ""),
            ("hit_blocks=count, miss_reason=load.miss)", "hit_blocks=len(answer.ok), miss_reason=load.miss)"),
        ],
    ),
    (
        "prefix_store/writes.py",
        TRACED,
        [
            ('            write.trace.end(written_blocks=0, miss_reason="closed")\n', "            pass\n"),
            ("            write.trace.end(written_blocks=0, miss_reason=why)\n", ""),
            ("            write.trace.end(written_blocks=write.num_blocks)\n", ""),
        ],
    ),
    (
        "executor/parts.py",
        TRACED,
        [
            ("        self.trace.end(error, lost_blocks=sum(map(len, gone)))\n", ""),
            ("        self.trace.end_leg()\n", ""),
            ("        self.trace.end_leg(answer.error)\n", ""),
        ],
    ),
    (
        "executor/executor.py",
        TRACED,
        [('            part.trace.end(miss_reason="closed")', "            pass")],
    ),
    (
        "scheduler/loading_ahead.py",
        TRACED,
        [("idle.state.context.run(self._prefetch, self._hashed(idle))", "self._prefetch(self._hashed(idle))")],
    ),
    (
        "engine/transfers.py",
        ("engine/test_ranges.py",),
        [
            ("        elif _NVTX:", "        elif not _NVTX:"),
            ("{self.src}->{self.dst} {len(self.mapping)} blocks", "{self.dst}->{self.src} {len(self.mapping)} blocks"),
        ],
    ),
    ("prefix_store/loads.py", LINES, [("            self._log.note(answer.reasons)\n", "")]),
    ("prefix_store/writes.py", LINES, [("            self._log.note(answer.reasons)\n", "            pass\n")]),
    ("executor/parts.py", LINES, [("            self.tiers.log.note(answer.reasons)\n", "            pass\n")]),
]


def all_faults() -> Iterator[PlantedFault]:
    """Yield every fault."""
    for file, tests, pairs in (*_FAULTS, *STORE_FAULTS):
        for original, faulty in pairs:
            yield PlantedFault(file, original, faulty, tests)
