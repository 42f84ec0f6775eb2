"""The reference continuous-batching scheduler: who runs in this step, and who makes room.

Three queues, each first come, first served within a priority: *waiting* (no blocks), *running* (blocks on the device),
*swapped* (blocks on the host or in the external tier). A step appends one token to every running sequence; if blocks
run short, victims leave from the tail: to the host, to the external tier when the host is full, back to waiting
(recompute) when both are. Swapped requests come back before new prompts are admitted, and never in a step that
preempted.

A device that shrinks takes room from requests that were taken in. Those that it could not hold to their ends any more,
whether they wait or run, are refused by the next `schedule`, as `add` would refuse them: their blocks come free, and
`update` returns them with their `error`. The others go on.

A step of an engine:

    step = scheduler.schedule()
    lost = executor.execute(step.decision)              # move the blocks
    step = scheduler.settle(step, lost)                 # end the ticket; what lost bytes starts again
    sampled = model(step.batch, step.block_tables, step.slot_mapping)
    finished = scheduler.update(step, sampled)

With `overlap_io`, what is fetched is in no step until `finish` has ended its ticket, and other sequences go on
meanwhile; `blockyard.offload.executor` shows the loop.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np

from blockyard._core import AllocStatus, BlockManager, Pairs
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.fragmentation import Defragmentation
from blockyard.request import Finished, Request, RequestGroup, Share, TokenSequence
from blockyard.step import Batch, ScheduledSequence, SchedulerStats, Step

__all__ = [
    "PREEMPTION_MODES",
    "Defragmentation",
    "Finished",
    "PreemptionMode",
    "Request",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerStats",
    "Step",
]

PreemptionMode: TypeAlias = Literal["auto", "swap", "recompute"]

PREEMPTION_MODES: Final = ("auto", "swap", "recompute")


def _key(group: RequestGroup) -> tuple[int, float, int]:
    return group.key


class Scheduler:
    """Decides which sequences run, over one `BlockManager`.

    Args:
        manager: the books; nothing else may admit sequences of this engine.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; one longer prompt runs alone.
        preemption_mode: `"swap"` moves a victim's blocks out if there is room, `"recompute"` drops them, `"auto"` drops
            them where the request has at most one running sequence.
        overlap_io: a sequence that is fetched from the external tier is left out of steps until it has arrived. Other
            tickets must have ended before the next `schedule` if they load what the step computes.
        defragment: moves of device blocks to decide with every step, once all else has its blocks; none by default.
            The executor must carry `move` out.

    Raises:
        InvalidArgumentError: a limit is not positive or the mode is unknown.
    Source: the policy of vLLM 0.7.3's V0 scheduler.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
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
        self.manager = manager
        self.stats = SchedulerStats()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._preemption_mode = preemption_mode
        self._overlap_io = overlap_io
        self._defragment = defragment
        self._groups: dict[str, RequestGroup] = {}
        self._waiting: list[RequestGroup] = []
        self._running: list[RequestGroup] = []
        self._swapped: list[RequestGroup] = []
        self._fetching: list[RequestGroup] = []  # by the step being put together
        self._loading: dict[int, list[RequestGroup]] = {}  # by a ticket
        self._refused: list[RequestGroup] = []  # to be reported by `update`
        self._capacity = self._device_capacity()
        self._arrivals = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting, running, swapped, on their way back, or refused and not yet reported."""
        return len(self._groups)

    @property
    def num_running(self) -> int:
        """Requests whose blocks are on the device."""
        return len(self._running)

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are on the host or in the external tier."""
        return len(self._swapped)

    def add(self, request: Request) -> None:
        """Take in a request.

        Raises:
            InvalidArgumentError: the request is malformed, or its id is in use.
            OutOfBlocksError: even alone on the device it would not fit to its end.
        """
        if not request.prompt or request.max_tokens < 1 or request.n < 1:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has {len(request.prompt)} prompt tokens, max_tokens "
                f"{request.max_tokens}, n {request.n}; each must be at least 1"
            )
        if request.request_id in self._groups:
            raise InvalidArgumentError(f"request {request.request_id!r} is already in the scheduler")
        if request.n > self._max_num_seqs:
            raise InvalidArgumentError(
                f"request {request.request_id!r} wants {request.n} sequences, max_num_seqs is {self._max_num_seqs}"
            )
        first = TokenSequence(0, list(request.prompt), len(request.prompt))
        group = RequestGroup(request, (request.priority, request.arrival, self._arrivals + 1), [first])
        lack = self._lack_of_room(group)
        if lack is not None:
            raise lack
        # What is taken in now may not fit a device that shrinks to what it was at the last step.
        self._capacity = max(self._capacity, self._device_capacity())
        self._arrivals += 1
        self._groups[request.request_id] = group
        bisect.insort(self._waiting, group, key=_key)

    def abort(self, request_id: str) -> None:
        """Forget a request; its id can be used again at once.

        Raises:
            InvalidArgumentError: there is no such request.
        """
        group = self._groups.get(request_id)
        if group is None:
            raise InvalidArgumentError(f"request {request_id!r} is not in the scheduler")
        self._dequeue(group)
        self._release(group)
        self._close(group)

    def schedule(self) -> Step:
        """Decide one step. Its decision is to be carried out before its batch is computed."""
        batch = Batch()
        self._refuse_what_no_longer_fits()
        preempted = self._make_room()
        self._decode(self._running, batch)
        if not preempted:
            self._resume(batch)
            if not self._swapped:
                self._admit(batch)
        tables = self.manager.block_tables(np.array([item.handle for item in batch.items], dtype=np.uint64))
        self._note_peaks()
        self.stats.steps += 1
        self.stats.tokens += batch.tokens
        slots = np.concatenate(batch.slots) if batch.slots else np.zeros(0, dtype=np.int64)
        if self._defragment is not None:
            self._defragment.plan(self.manager)
        decision = self.manager.take_decision()
        if self._fetching:
            self._loading[decision.ticket], self._fetching = self._fetching, []
        return Step(decision, tuple(batch.items), slots, tables)

    def settle(self, step: Step, lost: Sequence[Pairs] = ()) -> Step:
        """End the step's ticket once its transfers have run.

        Args:
            step: what `schedule` returned.
            lost: pairs of its decision that did not land.

        Returns:
            The step without the requests that lost bytes: those start again from their tokens.
        """
        return step.without(self.finish(step.decision.ticket, lost))

    def finish(self, ticket: int, lost: Sequence[Pairs] = ()) -> list[RequestGroup]:
        """End a ticket whose transfers have run; what it fetched runs in the next step.

        Args:
            ticket: of a step's decision.
            lost: pairs of it that did not land.

        Returns:
            The requests that lost bytes: they start again from their tokens, and `update` passes them over.
        """
        hit = {int(handle) for handle in self.manager.fail(ticket, lost)} if lost else set()
        if not lost:
            self.manager.complete(ticket)
        groups = [group for group in self._groups.values() if not hit.isdisjoint(group.handles())]
        for group in groups:
            self._dequeue(group)
            self._restart(group)
            self.stats.lost += 1
        for group in self._loading.pop(ticket, ()):
            bisect.insort(self._running, group, key=_key)
        return groups

    def update(self, step: Step, sampled: Sequence[Sequence[int]]) -> list[Finished]:
        """Take in a step's tokens.

        Args:
            step: what `settle` returned.
            sampled: for each entry of its batch, one token for each of its `sample_indices`.

        Returns:
            The requests that this step finished, and those that `schedule` has refused since, with their `error`.

        Raises:
            InvalidArgumentError: the tokens do not match the batch; nothing was changed.
        """
        if [len(tokens) for tokens in sampled] != [len(item.sample_indices) for item in step.batch]:
            raise InvalidArgumentError(f"sampled tokens for {len(sampled)} entries do not match the {len(step.batch)}")
        touched: dict[int, RequestGroup] = {}
        for item, tokens in zip(step.batch, sampled, strict=True):
            group = item.group
            # Aborted meanwhile, or to start again.
            if not group.alive or group.sequences[item.index].handle != item.handle:
                continue
            touched[id(group)] = group
            group.sequences[item.index].computed = item.start + len(item.tokens)
            self._fork(group, group.sequences[item.index], item.sample_indices)
            for index, token in zip(item.sample_indices, tokens, strict=True):
                self._extend(group, group.sequences[index], int(token))
        finished = [group for group in touched.values() if not group.unfinished()]
        for group in finished:
            self._running.remove(group)
        finished, self._refused = self._refused + finished, []
        for group in finished:
            self._close(group)
        return [Finished(group.request, group.outputs(), group.error) for group in finished]

    def _device_capacity(self) -> int:
        return self.manager.num_blocks("device") - self.manager.watermark_blocks

    def _lack_of_room(self, group: RequestGroup) -> OutOfBlocksError | None:
        """Why a request could never run to its end, if so: it would be preempted for ever."""
        size, total, kept = self.manager.block_size, self.manager.num_blocks("device"), self.manager.watermark_blocks
        wanted = group.blocks_to_end(size)
        if wanted + kept <= total and self.manager.can_allocate(wanted * size) != AllocStatus.NEVER:
            return None
        # What the manager wants beyond these two is the null block of a window.
        kept += wanted + kept <= total
        message = (
            f"request {group.request.request_id!r} needs up to {wanted} device blocks and {kept} kept free, "
            f"there are {total}"
        )
        return OutOfBlocksError(message, "device", wanted, total - kept, total)

    def _refuse_what_no_longer_fits(self) -> None:
        """After the device has shrunk, end the requests that `add` would not take now."""
        before, self._capacity = self._capacity, self._device_capacity()
        if self._capacity >= before:
            return
        for group in self._groups.values():
            if group.error is None and (lack := self._lack_of_room(group)) is not None:
                self._dequeue(group)
                self._release(group)
                group.error = lack
                self._refused.append(group)
                self.stats.refused += 1

    def _make_room(self) -> bool:
        """Preempt from the tail until every running sequence can append a token."""
        preempted = False
        while self._running and not self._can_append(self._running):
            self._preempt(self._running.pop())
            preempted = True
        return preempted

    def _can_append(self, groups: Iterable[RequestGroup]) -> bool:
        return self.manager.can_append(np.array([h for group in groups for h in group.handles()], dtype=np.uint64))

    def _preempt(self, group: RequestGroup) -> None:
        handles = group.handles()
        moves: tuple[tuple[str, Callable[[list[int]], bool], Callable[[list[int]], None]], ...] = (
            ("preempted_swap", self.manager.can_swap_out, self.manager.swap_out),
            ("preempted_spill", self.manager.can_spill, self.manager.spill),
        )
        for counter, can, move in moves if self._swaps(handles) else ():
            if can(handles):
                move(handles)
                setattr(self.stats, counter, getattr(self.stats, counter) + 1)
                bisect.insort(self._swapped, group, key=_key)
                return
        self.stats.preempted_recompute += 1
        self._restart(group)

    def _swaps(self, handles: list[int]) -> bool:
        if self._preemption_mode == "auto":
            return len(handles) > 1
        return self._preemption_mode == "swap"

    def _restart(self, group: RequestGroup) -> None:
        """Drop a request's blocks; it waits to be computed again from its tokens."""
        self._release(group)
        for sequence in group.sequences:
            sequence.computed = 0
        bisect.insort(self._waiting, group, key=_key)

    def _decode(self, groups: Iterable[RequestGroup], batch: Batch) -> None:
        """Append the last token of every sequence; the blocks are there."""
        items = [
            ScheduledSequence(
                group.request.request_id,
                sequence.index,
                sequence.on_device(),
                sequence.computed,
                sequence.tokens[sequence.computed :],
                (sequence.index,),
                group,
            )
            for group in groups
            for sequence in group.unfinished()
        ]
        if not items:
            return
        batch.slots.append(self.manager.append(np.array([item.handle for item in items], dtype=np.uint64)))
        for item in items:
            batch.add(item)

    def _resume(self, batch: Batch) -> None:
        """Bring swapped requests back, in order, while they fit with a token more for each sequence."""
        computed = False
        while self._swapped:
            group = self._swapped[0]
            handles = group.handles()
            apart = self._overlap_io and self.manager.tier(handles[0]) == "external"
            # A ticket with a fetch ends late: nothing that this step computes may depend on it.
            mixed = computed if apart else bool(self._fetching)
            if mixed or self._seats() + group.seats > self._max_num_seqs:
                break
            status = self._bring_back(handles)
            if status == AllocStatus.LATER:
                break
            self._swapped.pop(0)
            if status == AllocStatus.NEVER:  # the books were changed under us; from its tokens it can still run
                self._restart(group)
                continue
            if apart:
                self._fetching.append(group)
                continue
            computed = True
            self._decode([group], batch)
            bisect.insort(self._running, group, key=_key)

    def _bring_back(self, handles: list[int]) -> AllocStatus:
        """Swap or fetch sequences in, if they fit now."""
        if self.manager.tier(handles[0]) == "external":
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

    def _seats(self) -> int:
        """Sequences that run, or will once their shared prompt is computed."""
        loading = (group for groups in (self._fetching, *self._loading.values()) for group in groups)
        return sum(group.seats for groups in (self._running, loading) for group in groups)

    def _admit(self, batch: Batch) -> None:
        """Start waiting requests, in order, while blocks, sequences and tokens allow."""
        while self._waiting:
            group = self._waiting[0]
            shares = group.shares(self.manager.block_size)
            size = self.manager.block_size
            tokens = sum(len(s.tokens) - shared for s, _, shared in shares)
            blocks = sum(-(-len(s.tokens) // size) - shared // size for s, _, shared in shares)
            if self._seats() + group.seats > self._max_num_seqs:
                break
            if batch.items and batch.tokens + tokens > self._max_num_batched_tokens:
                break
            if self.manager.can_allocate(blocks * size) != AllocStatus.OK:
                break
            self._waiting.pop(0)
            self._prefill(group, shares, batch)
            bisect.insort(self._running, group, key=_key)

    def _prefill(self, group: RequestGroup, shares: list[Share], batch: Batch) -> None:
        first = len(group.sequences) == 1 and group.request.n > 1
        for sequence, earlier, shared in shares:
            length = len(sequence.tokens)
            if earlier is None:
                sequence.handle = int(self.manager.allocate(length)[0])
            else:
                sequence.handle = self.manager.fork_prefix(earlier.on_device(), shared, length)
            batch.slots.append(self.manager.slot_mapping(sequence.handle, shared, length))
            indices = tuple(range(group.request.n)) if first else (sequence.index,)
            tokens = sequence.tokens[shared:]
            name = group.request.request_id
            batch.add(ScheduledSequence(name, sequence.index, sequence.handle, shared, tokens, indices, group))

    def _fork(self, group: RequestGroup, parent: TokenSequence, indices: tuple[int, ...]) -> None:
        """After a shared prompt, open the request's other sequences."""
        missing = [index for index in indices if index >= len(group.sequences)]
        if not missing:
            return
        children = self.manager.fork(parent.on_device(), len(missing))
        for index, child in zip(missing, children, strict=True):
            sequence = TokenSequence(index, list(parent.tokens), parent.prompt_len, int(child), parent.computed)
            group.sequences.append(sequence)

    def _extend(self, group: RequestGroup, sequence: TokenSequence, token: int) -> None:
        sequence.tokens.append(token)
        length = len(sequence.tokens) - sequence.prompt_len
        if length >= group.request.max_tokens or token in group.request.stop_token_ids:
            sequence.finished = True
            self.manager.free(sequence.on_device())
            sequence.handle = None

    def _dequeue(self, group: RequestGroup) -> None:
        for queue in (self._waiting, self._running, self._swapped, self._refused, *self._loading.values()):
            if group in queue:
                queue.remove(group)

    def _release(self, group: RequestGroup) -> None:
        self.manager.free(group.handles())
        for sequence in group.sequences:
            sequence.handle = None

    def _close(self, group: RequestGroup) -> None:
        group.alive = False
        del self._groups[group.request.request_id]

    def _note_peaks(self) -> None:
        for tier in ("device", "host", "external"):
            used = self.manager.num_blocks(tier) - self.manager.num_free(tier)
            name = f"peak_{tier}_blocks"
            setattr(self.stats, name, max(used, getattr(self.stats, name)))
