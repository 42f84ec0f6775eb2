"""The reference continuous-batching scheduler: which sequences run in a step, and which make room.

Sequences *wait* (no blocks), *run* (blocks on the device, a row in the step) or are *swapped* (blocks on the host or in
the external tier). Each queue goes by priority, then arrival. A step appends one token to every sequence that is past
its prompt, and the next chunk to prompts that are not. If blocks run short, the requests that go last are preempted:
to the host, to the external tier when the host is full, back to waiting (recompute) when both are. Swapped requests
come back before new prompts are admitted, and never in a step that preempted.

When the device shrinks, requests that no longer fit to their ends are refused by the next `schedule`, as `add` would
refuse them, and `update` returns them with their `error`. The others go on.

What a plain step costs does not grow with what waits, and no Python code runs for each of its sequences: their state is
in arrays (`rows.py`), and objects are touched only when a sequence starts, ends, forks, moves or loses bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockyard._core import AllocStatus, BlockManager, Pairs
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.fragmentation import Defragmentation
from blockyard.scheduler.ranked_queue import RankedQueue
from blockyard.scheduler.request import NO_TOKEN, Finished, Parked, Request, RequestState
from blockyard.scheduler.rows import BASE, DONE, LENGTH, LIMIT, NUMBER, SEAT, Rows, Seated
from blockyard.scheduler.step import NO_ROWS, Draft, SchedulerStats, Step
from blockyard.scheduler.stop_tokens import StopTokens

__all__ = ["PREEMPTION_MODES", "PreemptionMode", "Scheduler"]

PreemptionMode: TypeAlias = Literal["auto", "swap", "recompute"]

PREEMPTION_MODES: Final = ("auto", "swap", "recompute")


class Scheduler:
    """Decides which sequences run, over one `BlockManager`.

    One step is in flight at a time: `schedule`, `settle` (or `finish`), `update`. Requests may be added and aborted in
    between.

    Args:
        manager: has one cache group; nothing else may admit sequences of this engine.
        prefix_caching: let prompts share the blocks of earlier ones; the manager must have been made with it.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: tokens of a step beyond which prompts wait, or are computed in chunks.
        preemption_mode: `"swap"` moves a victim's blocks out if there is room, `"recompute"` drops them, `"auto"` drops
            them where the request has at most one running sequence. A request that is still in its prompt is recomputed.
        overlap_io: a sequence that is fetched from the external tier is left out of steps until it has arrived. Other
            tickets must have ended before the next `schedule` if they load what the step computes.
        defragment: moves of device blocks to decide with every step, once all else has its blocks; none by default.
            The executor must carry `move` out.

    Raises:
        InvalidArgumentError: a limit is not positive, the mode is unknown, or the manager has several cache groups.
    Source: the policy of vLLM 0.7.3's V0 scheduler, with the chunked prefill and the prefix cache of vLLM V1.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        prefix_caching: bool = False,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        preemption_mode: PreemptionMode = "auto",
        overlap_io: bool = False,
        defragment: Defragmentation | None = None,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise InvalidArgumentError(
                f"max_num_seqs is {max_num_seqs}, max_num_batched_tokens {max_num_batched_tokens}, must be at least 1"
            )
        if preemption_mode not in PREEMPTION_MODES:
            raise InvalidArgumentError(f"preemption_mode is {preemption_mode!r}, must be one of {PREEMPTION_MODES}")
        if len(manager.groups) != 1:
            raise InvalidArgumentError(f"the manager has {len(manager.groups)} cache groups, must have 1")
        self.manager = manager
        self.stats = SchedulerStats()
        self._prefix_caching = prefix_caching
        self._max_num_seqs = max_num_seqs
        self._preemption_mode = preemption_mode
        self._overlap_io = overlap_io
        self._defragment = defragment
        self._requests: dict[str, RequestState] = {}
        self._number = 0
        self._rows = Rows(max_num_seqs, manager.block_size)
        self._draft = Draft(max_num_batched_tokens, max_num_seqs)
        self._stop_tokens = StopTokens()
        self._waiting = RankedQueue("waiting")
        self._swapped = RankedQueue("swapped")
        self._away: dict[Parked, None] = {}  # swapped, or on their way back; in order, for the same run each time
        self._fetching: list[Parked] = []  # by the step being put together
        self._loading: dict[int, list[Parked]] = {}  # by a ticket
        self._landed: list[Parked] = []  # to get their rows in the next step
        self._leaving: list[RequestState] = []  # whose rows go once no step is in flight
        self._refused: list[RequestState] = []  # to be reported by `update`
        self._seats = 0  # sequences that run, will land, or will fork off a prompt that runs
        self._in_flight: Step | None = None
        self._capacity = self._device_capacity()

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting, running, swapped, on their way back, or refused and not yet reported."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Requests with sequences whose blocks are on the device."""
        return len(np.unique(self._rows.fields[NUMBER, : self._rows.count]))

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are on the host or in the external tier, and not on their way back."""
        return len(self._swapped)

    # ---- requests ----

    def add(self, request: Request) -> None:
        """Take in a request.

        Raises:
            InvalidArgumentError: the request is malformed, or its id is in use.
            OutOfBlocksError: even alone on the device it would not fit to its end.
        """
        state = RequestState(request, self._number + 1)
        if request.request_id in self._requests:
            raise InvalidArgumentError(f"request {request.request_id!r} is already in the scheduler")
        if request.n > self._max_num_seqs:
            raise InvalidArgumentError(
                f"request {request.request_id!r} wants {request.n} sequences, max_num_seqs is {self._max_num_seqs}"
            )
        lack = self._lack_of_room(state)
        if lack is not None:
            raise lack
        self._stop_tokens.add(request.stop_token_ids)
        # What is taken in now may not fit a device that shrinks to what it was at the last step.
        self._capacity = max(self._capacity, self._device_capacity())
        self._number += 1
        self._requests[request.request_id] = state
        self._wait(Parked(state, [0], [state.prompt], forks=request.n - 1))

    def abort(self, request_id: str) -> None:
        """Forget a request; its id can be used again at once.

        Its blocks come free at once, or by the `update` of the step that is in flight.

        Raises:
            InvalidArgumentError: there is no such request.
        """
        state = self._requests.get(request_id)
        if state is None:
            raise InvalidArgumentError(f"request {request_id!r} is not in the scheduler")
        if state in self._refused:
            self._refused.remove(state)
        self._release(state)
        self._close(state)

    # ---- a step ----

    def schedule(self) -> Step:
        """Decide one step. Its decision is to be carried out before its rows are computed.

        A step that was never given to `update` is given up: its sequences start again from their tokens.
        """
        self.give_up()
        self._refuse_what_no_longer_fits()
        if self._landed:
            landed, self._landed = self._landed, []
            self._board([seated for parked in landed if parked in self._away for seated in self._unpark(parked)])
        preempted = self._append_to_running()
        if not preempted:
            if self._swapped:
                self._resume()
            if self._waiting and not self._swapped:
                self._admit()
        if self._defragment is not None:
            self._defragment.plan(self.manager)
        self._note_peaks()
        self.stats.steps += 1
        self.stats.tokens += self._draft.tokens
        step = self._in_flight = self._take_step()
        if self._fetching:
            self._loading[step.decision.ticket], self._fetching = self._fetching, []
        return step

    def settle(self, step: Step, lost: Sequence[Pairs] = ()) -> Step:
        """End the step's ticket once its transfers have run.

        Args:
            step: what `schedule` returned.
            lost: pairs of its decision that did not land.

        Returns:
            The step, with its `void` rows marked: those of requests that lost bytes, which start again from their
            tokens. Whether they are computed makes no difference.
        """
        self.finish(step.decision.ticket, lost)
        return step

    def finish(self, ticket: int, lost: Sequence[Pairs] = ()) -> list[str]:
        """End a ticket whose transfers have run; what it fetched runs in the next step.

        Args:
            ticket: of a step's decision.
            lost: pairs of it that did not land.

        Returns:
            Ids of the requests that lost bytes: they start again from their tokens.
        """
        names: list[str] = []
        if lost:
            names = self._start_again(self.manager.fail(ticket, lost))
        else:
            self.manager.complete(ticket)
        if self._loading:
            self._landed += self._loading.pop(ticket, ())
        return names

    def update(self, step: Step, sampled: ArrayLike) -> list[Finished]:
        """Take in a step's tokens.

        Args:
            step: what `settle` returned.
            sampled: integers `[step.num_draws]`: one token for each of the first `samples` rows, then one for each of
                `extra_rows`. Those of `void` rows are dropped.

        Returns:
            The requests that this step finished, and those that `schedule` has refused since, with their `error`.

        Raises:
            InvalidArgumentError: the tokens do not match the step, or it is not in flight; nothing was changed.
        """
        tokens = self._check_sampled(step, sampled)
        finished, self._refused = self._refused, []
        if step.rows:
            if self._prefix_caching:
                self._publish(step)
            ended = self._extend(step, tokens[: step.samples])
            if len(step.extra_rows):
                ended = self._fork(step, tokens[step.samples :], ended)
            if ended.any():
                finished += self._end(np.flatnonzero(ended))
            self._in_flight = None
        self._drop_leaving()
        for state in finished:
            self._close(state)
        return [state.finished() for state in finished]

    # ---- putting a step together ----

    def _append_to_running(self) -> bool:
        """Give every running sequence its next token or chunk, all at once; preempt from the tail until they fit."""
        preempted = False
        while True:
            self._draft.begin()
            try:
                self._append()
            except OutOfBlocksError:
                self._preempt(self._rows.worst())
                preempted = True
            else:
                return preempted

    def _append(self) -> None:
        draft, rows = self._draft, self._rows
        decodes = draft.tokens = rows.decodes
        draft.token_ids[:decodes] = rows.last[:decodes]
        counts: NDArray[np.uint32] | None = None
        if rows.count > decodes:
            self._next_chunks()
            counts = np.ones(decodes + len(draft.counts), np.uint32)
            counts[decodes:] = draft.counts
        used = draft.tokens
        if used:
            self.manager.append(
                rows.handles[: decodes + len(draft.counts)],
                counts,
                token_ids=draft.token_ids[:used] if self._prefix_caching else None,
                block_tables=rows.block_tables,
                out=draft.slots[:used],
            )

    def _next_chunks(self) -> None:
        """Take in the next chunks of prompts that are being computed, in order, as far as the tokens go."""
        draft, rows = self._draft, self._rows
        for row in range(rows.decodes, rows.count):
            if draft.left < 1:
                break
            seat, done = int(rows.fields[SEAT, row]), int(rows.fields[DONE, row])
            end = min(int(rows.fields[LENGTH, row]), done + draft.left)
            draft.add_chunk(rows.tokens[seat, done:end], done)

    def _preempt(self, gone: NDArray[np.int64]) -> None:
        """Take the rows of one request off the device."""
        rows = self._rows
        state = rows.owner(int(gone[0]))[0]
        handles = rows.handles[gone]
        moves = (
            ("preempted_swap", self.manager.can_swap_out, self.manager.swap_out),
            ("preempted_spill", self.manager.can_spill, self.manager.spill),
        )
        whole = int(gone[-1]) < rows.decodes
        for counter, can, move in moves if whole and self._swaps(len(gone)) else ():
            if can(handles):
                move(handles)
                setattr(self.stats, counter, getattr(self.stats, counter) + 1)
                indices = [rows.owner(row)[1] for row in gone.tolist()]
                parked = Parked(state, indices, [rows.text(row) for row in gone.tolist()], handles)
                state.parked.append(parked)
                self._away[parked] = None
                self._swapped.push(parked)
                self._seats -= rows.remove(gone)
                return
        self.stats.preempted_recompute += 1
        self._recompute(gone)

    def _swaps(self, sequences: int) -> bool:
        if self._preemption_mode == "auto":
            return sequences > 1
        return self._preemption_mode == "swap"

    def _recompute(self, gone: NDArray[np.int64]) -> None:
        """Drop rows with their blocks; their sequences wait to be computed again from their tokens."""
        rows = self._rows
        for row in gone.tolist():
            state, index = rows.owner(row)
            self._wait(Parked(state, [index], [rows.text(row)], forks=rows.fork_count(row)))
        self._remove(gone)

    def _remove(self, gone: NDArray[np.int64]) -> None:
        self.manager.free(self._rows.handles[gone])
        self._seats -= self._rows.remove(gone)

    def _resume(self) -> None:
        """Bring swapped requests back, in order, while they fit with a token more for each sequence."""
        computed = False
        while (parked := self._swapped.head()) is not None:
            apart = self._overlap_io and self.manager.tier(int(parked.handles[0])) == "external"
            # A ticket with a fetch ends late: nothing that this step computes may depend on it.
            mixed = computed if apart else bool(self._fetching)
            if mixed or self._seats + len(parked.indices) > self._max_num_seqs:
                break
            status = self._bring_back(parked.handles)
            if status == AllocStatus.LATER:
                break
            self._swapped.pop()
            if status == AllocStatus.NEVER:  # others took the room for good; from its tokens it can still run
                self._wait_again(parked)
                continue
            self._seats += len(parked.indices)
            if apart:
                parked.place = "fetching"
                self._fetching.append(parked)
                continue
            computed = True
            self._run_now(parked)

    def _run_now(self, parked: Parked) -> None:
        """Give sequences that have just come back their rows and their next tokens, in this step."""
        draft, rows = self._draft, self._rows
        at, count = rows.decodes, len(parked.indices)
        draft.insert(at, count)
        new = slice(at, at + count)
        draft.token_ids[new] = [tokens[-1] for tokens in parked.tokens]
        ids = draft.token_ids[new] if self._prefix_caching else None
        self.manager.append(parked.handles, token_ids=ids, out=draft.slots[new])
        self._board(self._unpark(parked))

    def _board(self, seated: list[Seated]) -> None:
        """Give sequences that are past their prompts rows behind the others that are."""
        rows = self._rows
        first = rows.decodes
        rows.insert(seated)
        self.manager.block_tables(rows.handles[first : rows.decodes], out=rows.block_tables[first : rows.decodes])

    def _bring_back(self, handles: NDArray[np.uint64]) -> AllocStatus:
        """Swap or fetch sequences in, if they fit now."""
        if self.manager.tier(int(handles[0])) == "external":
            status = self.manager.can_fetch(handles)
            if status == AllocStatus.OK:
                self.manager.fetch(handles)
                self.stats.resumed_fetch += 1
        else:
            status = self.manager.can_swap_in(handles)
            if status == AllocStatus.OK:
                self.manager.swap_in(handles)
                self.stats.resumed_swap += 1
        return status

    def _admit(self) -> None:
        """Start waiting sequences, in order, while blocks, seats and tokens allow."""
        draft, rows = self._draft, self._rows
        if rows.decodes + len(draft.counts) < rows.count:
            return  # a prompt that runs got nothing: no new ones
        while draft.left > 0:
            batch, siblings = self._pick()
            if not batch:
                return
            self._start(batch, siblings)

    def _pick(self) -> tuple[list[Parked], tuple[int, int] | None]:
        """Take the first waiting sequences that fit and can be admitted by one call to the manager.

        Returns:
            The sequences; and, for one that is to share blocks of a running sequence of its request, that one's handle
            and the tokens to share.
        """
        manager, left, size = self.manager, self._draft.left, self.manager.block_size
        batch: list[Parked] = []
        tokens, blocks = 0, self._blocks_owed()
        while (head := self._waiting.head()) is not None:
            state, length = head.state, len(head.tokens[0])
            if self._seats + 1 + head.forks > self._max_num_seqs:
                break
            if batch and (tokens + length > left or not state.shares_cache_with(batch[0].state)):
                break
            share: tuple[int, int] | None = None
            need = -(-length // size)
            if state.seats or (batch and batch[-1].state is state):
                # Computed again: it shares the blocks of the request's other sequences once these are computed.
                if batch or self._rows.find(state.seats)[-1] >= self._rows.decodes:
                    break
                share = None if self._prefix_caching else self._shared_with(state, head.tokens[0])
                need -= share[1] // size if share else 0
            if not self._fits(blocks + need):
                if not self._prefix_caching:
                    break
                need = self._blocks_with_hits(head)
                if not self._fits(blocks + need):
                    break
            self._waiting.pop()
            state.parked.remove(head)
            self._seats += 1 + head.forks
            batch.append(head)
            tokens += length
            blocks += need
            if share is not None or tokens >= left:
                return batch, share
        return batch, None

    def _fits(self, blocks: int) -> bool:
        return self.manager.can_allocate(blocks * self.manager.block_size) == AllocStatus.OK

    def _blocks_owed(self) -> int:
        """Blocks that prompts in prefill are yet to take."""
        draft, rows, size = self._draft, self._rows, self.manager.block_size
        if not draft.counts:
            return 0
        ends = np.add(draft.starts, draft.counts)
        lengths = rows.fields[LENGTH, rows.decodes : rows.count]
        return int((-(-lengths // size) - -(-ends // size)).sum())

    def _blocks_with_hits(self, parked: Parked) -> int:
        request = parked.state.request
        return self.manager.blocks_to_allocate(parked.tokens[0], salt=request.salt, lora_id=request.lora_id)

    def _shared_with(self, state: RequestState, tokens: NDArray[np.uint32]) -> tuple[int, int] | None:
        """Find the running sequence of a request whose first whole blocks another one can share: handle and tokens."""
        rows, best, handle = self._rows, 0, 0
        for row in rows.find(state.seats).tolist():
            text = rows.text(row)
            longest = min(len(text), len(tokens) - 1)  # the last token's logits are wanted
            differ = np.flatnonzero(text[:longest] != tokens[:longest])
            common = int(differ[0]) if len(differ) else longest
            common -= common % self.manager.block_size
            if common > best:
                best, handle = common, int(rows.handles[row])
        return (handle, best) if best else None

    def _start(self, batch: list[Parked], share: tuple[int, int] | None) -> None:
        """Admit sequences; all but the last get all of their tokens into this step."""
        manager, draft, rows = self.manager, self._draft, self._rows
        left, request = draft.left, batch[0].state.request
        prompts = [parked.tokens[0] for parked in batch]
        begun = [0] * len(batch)
        if share is not None:
            parent, begun[0] = share
            count = min(len(prompts[0]), begun[0] + left)
            handles = np.array([manager.fork_prefix(parent, begun[0], count)], np.uint64)
        elif self._prefix_caching:
            handles, cached = manager.allocate_prompts(
                prompts, salt=request.salt, lora_id=request.lora_id, chunk_tokens=left
            )
            begun = cached.tolist()
            self.stats.cached_tokens += sum(begun)
        else:
            handles = manager.allocate([min(len(tokens), left) for tokens in prompts])
        rows.make_room(max(parked.state.limit for parked in batch))
        each = zip(batch, handles.tolist(), begun, strict=True)
        first = rows.count
        rows.append([Seated(p.state, p.indices[0], p.tokens[0], handle, done, p.forks) for p, handle, done in each])
        manager.block_tables(handles, out=rows.block_tables[first : rows.count])
        for tokens, handle, start in zip(prompts, handles.tolist(), begun, strict=True):
            at, end = draft.tokens, min(len(tokens), start + draft.left)
            draft.add_chunk(tokens[start:end], start)
            manager.slot_mapping(handle, start, end, out=draft.slots[at : draft.tokens])

    def _take_step(self) -> Step:
        draft, rows = self._draft, self._rows
        decodes = samples = rows.decodes
        count, used = decodes + len(draft.counts), draft.tokens
        start: NDArray[np.int64] = rows.fields[LENGTH, :count] - 1
        extra = NO_ROWS
        if draft.counts:
            start[decodes:] = draft.starts
            ends = np.add(draft.starts, draft.counts)
            rows.fields[DONE, decodes:count] = ends
            samples += int((ends == rows.fields[LENGTH, decodes:count]).sum())
            if rows.forks:
                forks = [rows.fork_count(row) for row in range(decodes, samples)]
                extra = np.repeat(np.arange(decodes, samples, dtype=np.int32), forks)
        return Step(
            decision=self.manager.take_decision(),
            decodes=decodes,
            samples=samples,
            handles=rows.handles[:count].copy(),
            seats=rows.fields[SEAT, :count].copy(),
            start=start,
            query_start_loc=draft.query_start_loc(decodes),
            token_ids=draft.token_ids[:used],
            slot_mapping=draft.slots[:used],
            block_tables=rows.block_tables[:count],
            extra_rows=extra,
            owners=rows.owners,
        )

    # ---- taking its tokens in ----

    def _check_sampled(self, step: Step, sampled: ArrayLike) -> NDArray[np.uint32]:
        tokens = np.asarray(sampled)
        if step.rows and (self._in_flight is None or step.decision.ticket != self._in_flight.decision.ticket):
            raise InvalidArgumentError(f"the step of ticket {step.decision.ticket} is not in flight")
        if tokens.shape != (step.num_draws,):
            raise InvalidArgumentError(
                f"sampled tokens have shape {list(tokens.shape)}, do not match the step's {step.num_draws} draws"
            )
        if tokens.dtype == np.uint32 or not len(tokens):
            return tokens.astype(np.uint32, copy=False)
        if tokens.dtype.kind not in "iu":
            raise InvalidArgumentError(f"sampled tokens are {tokens.dtype}, must be integers")
        wide = tokens.astype(np.int64, copy=False)
        # Seen as unsigned, a negative id is the largest of all.
        if wide.view(np.uint64).max() >= NO_TOKEN:
            raise InvalidArgumentError(
                f"sampled tokens go from {wide.min()} to {wide.max()}, must be from 0 to {NO_TOKEN - 1}"
            )
        return wide.astype(np.uint32)

    def _publish(self, step: Step) -> None:
        """Let prompts find the blocks that the step has filled."""
        rows, size = self._rows, self.manager.block_size
        length = rows.fields[LENGTH, : step.decodes]
        full = np.flatnonzero(length % size == 0 if size & (size - 1) else (length & (size - 1)) == 0)
        if step.rows == step.decodes:
            if step.void is not None:
                full = full[~step.void[full]]
            if len(full):
                self.manager.mark_computed(rows.handles[full])
            return
        full = np.concatenate((full, np.arange(step.decodes, step.rows)))
        if step.void is not None:
            full = full[~step.void[full]]
        computed = np.where(full < step.decodes, rows.fields[LENGTH, full], rows.fields[DONE, full])
        self.manager.mark_computed(rows.handles[full], computed.astype(np.uint32))

    def _extend(self, step: Step, tokens: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Add a token to each sampled row; say which rows end with it, bool `[samples]`."""
        rows, samples = self._rows, step.samples
        length = rows.fields[LENGTH, :samples]
        rows.flat[rows.fields[BASE, :samples] + length] = tokens
        rows.last[:samples] = tokens
        length += 1
        rows.decodes = samples
        ended: NDArray[np.bool_] = length >= rows.fields[LIMIT, :samples]
        if self._stop_tokens:
            for row in self._stop_tokens.among(tokens).tolist():
                ended[row] |= int(tokens[row]) in rows.owner(row)[0].request.stop_token_ids
        if step.void is not None:
            void = step.void[:samples]
            ended &= ~void
            length -= void
        return ended

    def _fork(self, step: Step, tokens: NDArray[np.uint32], ended: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Open the other sequences of requests whose shared prompt is computed; say which rows end, bool `[decodes]`."""
        rows, at = self._rows, 0
        parents, counts = np.unique(step.extra_rows, return_counts=True)
        for row, count in zip(parents.tolist(), counts.tolist(), strict=True):
            drawn = tokens[at : at + count]
            at += count
            state, index = rows.owner(row)
            if not state.alive or state.lost:
                continue
            del rows.forks[int(rows.fields[SEAT, row])]
            prompt = rows.text(row)[:-1]
            children = self.manager.fork(int(rows.handles[row]), count).tolist()
            texts = [np.append(prompt, token) for token in drawn]
            each = enumerate(zip(children, texts, strict=True), index + 1)
            self._board([Seated(state, i, text, handle) for i, (handle, text) in each])
            ends = [len(prompt) + 1 >= state.limit or token in state.request.stop_token_ids for token in drawn.tolist()]
            ended = np.concatenate((ended, np.array(ends, np.bool_)))
        return ended

    def _end(self, gone: NDArray[np.int64]) -> list[RequestState]:
        """Keep what the sequences of some rows have generated, and free them; give the requests that are done."""
        rows, done = self._rows, []
        for row in gone.tolist():
            state, index = rows.owner(row)
            state.outputs[index] = rows.text(row)[len(state.prompt) :]
            state.left -= 1
            if state.alive and not state.left:
                done.append(state)
        self._remove(gone)
        return done

    # ---- who leaves, and who starts again ----

    def _wait(self, parked: Parked) -> None:
        parked.state.parked.append(parked)
        self._waiting.push(parked)

    def _wait_again(self, parked: Parked) -> None:
        """Drop the blocks of sequences that were away; they wait to be computed again."""
        self._unpark(parked)
        self.manager.free(parked.handles)
        for index, tokens in zip(parked.indices, parked.tokens, strict=True):
            self._wait(Parked(parked.state, [index], [tokens]))

    def _unpark(self, parked: Parked) -> list[Seated]:
        """Note that sequences are not away any more; give what their rows are made of."""
        del self._away[parked]
        parked.state.parked.remove(parked)
        each = zip(parked.indices, parked.tokens, parked.handles.tolist(), strict=True)
        return [Seated(parked.state, *sequence) for sequence in each]

    def give_up(self) -> None:
        """Drop the step in flight, such as one whose computation failed: its sequences start again from their tokens."""
        step, self._in_flight = self._in_flight, None
        for row in range(step.rows if step is not None else 0):
            state = self._rows.owner(row)[0]
            state.lost = True
            self._leaving.append(state)
        self._drop_leaving()

    def _drop_leaving(self) -> None:
        """Unless a step is in flight, free the rows of requests that were aborted, and start those again that lost bytes."""
        if not self._leaving or (self._in_flight is not None and self._in_flight.rows):
            return
        leaving, self._leaving = self._leaving, []
        gone = self._rows.find({seat for state in leaving for seat in state.seats})
        if len(gone):
            alive = np.array([self._rows.owner(row)[0].alive for row in gone.tolist()])
            for row in gone[alive].tolist():
                state, index = self._rows.owner(row)
                self._wait(Parked(state, [index], [self._rows.text(row)], forks=self._rows.fork_count(row)))
            self._remove(gone)
        for state in leaving:
            state.lost = False

    def _start_again(self, handles: NDArray[np.uint64]) -> list[str]:
        """Start the requests of sequences that lost bytes again; rows in flight are void, and go with `update`."""
        rows, step = self._rows, self._in_flight
        lost = {rows.owner(row)[0]: None for row in rows.find_handles(handles).tolist()}
        lost |= {parked.state: None for parked in self._away if np.isin(parked.handles, handles).any()}
        for state in lost:
            if not state.alive:
                continue
            self.stats.lost += 1
            for parked in [parked for parked in state.parked if parked.place != "waiting"]:
                self._leave_queue(parked)
                self._wait_again(parked)
            if state.seats:
                state.lost = True
                self._leaving.append(state)
                if step is not None:
                    step.void = np.zeros(step.rows, np.bool_) if step.void is None else step.void
                    found = rows.find(state.seats)
                    step.void[found[found < step.rows]] = True
        self._drop_leaving()
        return [state.request.request_id for state in lost if state.alive]

    def _leave_queue(self, parked: Parked) -> None:
        if parked.place == "waiting":
            self._waiting.discard(parked)
        elif parked.place == "swapped":
            self._swapped.discard(parked)
        else:
            self._seats -= len(parked.indices)

    def _release(self, state: RequestState) -> None:
        """Take a request out of every queue, with its blocks; rows in flight go with `update`."""
        for parked in tuple(state.parked):
            self._leave_queue(parked)
            if len(parked.handles):
                self._unpark(parked)
                self.manager.free(parked.handles)
            else:
                state.parked.remove(parked)
        state.alive = False
        if state.seats:
            self._leaving.append(state)
            self._drop_leaving()

    def _close(self, state: RequestState) -> None:
        state.alive = False
        self._stop_tokens.remove(state.request.stop_token_ids)
        del self._requests[state.request.request_id]

    # ---- a device that shrinks ----

    def _device_capacity(self) -> int:
        return self.manager.num_blocks("device") - self.manager.watermark_blocks

    def _lack_of_room(self, state: RequestState) -> OutOfBlocksError | None:
        """Why a request could never run to its end, if so: it would be preempted for ever."""
        size, total, kept = self.manager.block_size, self.manager.num_blocks("device"), self.manager.watermark_blocks
        wanted = state.blocks_to_end(size)
        if wanted + kept <= total and self.manager.can_allocate(wanted * size) != AllocStatus.NEVER:
            return None
        # What the manager wants beyond these two is the null block of a window.
        kept += wanted + kept <= total
        message = (
            f"request {state.request.request_id!r} needs up to {wanted} device blocks and {kept} kept free, "
            f"there are {total}"
        )
        return OutOfBlocksError(message, "device", wanted, total - kept, total)

    def _refuse_what_no_longer_fits(self) -> None:
        """After the device has shrunk, end the requests that `add` would not take now. No step is in flight."""
        before, self._capacity = self._capacity, self._device_capacity()
        if self._capacity >= before:
            return
        for state in self._requests.values():
            if state.error is None and (lack := self._lack_of_room(state)) is not None:
                self._keep_outputs(state)
                state.error = lack
                self._release(state)
                self._refused.append(state)
                self.stats.refused += 1

    def _keep_outputs(self, state: RequestState) -> None:
        """Note what the sequences of a request that have not ended have generated so far."""
        for parked in state.parked:
            for index, tokens in zip(parked.indices, parked.tokens, strict=True):
                state.outputs[index] = tokens[len(state.prompt) :]
        for row in self._rows.find(state.seats).tolist():
            state.outputs[self._rows.owner(row)[1]] = self._rows.text(row)[len(state.prompt) :]

    def _note_peaks(self) -> None:
        stats, manager = self.stats, self.manager
        device = manager.num_blocks("device") - manager.num_free("device")
        stats.peak_device_blocks = max(stats.peak_device_blocks, device)
        if self._away:
            host = manager.num_blocks("host") - manager.num_free("host")
            external = manager.num_blocks("external") - manager.num_free("external")
            stats.peak_host_blocks = max(stats.peak_host_blocks, host)
            stats.peak_external_blocks = max(stats.peak_external_blocks, external)
