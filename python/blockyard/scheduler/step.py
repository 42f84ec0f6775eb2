"""One step of a scheduler: its transfers, computation and sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockyard._core import BlockManager, Pool, StepDecision, plain_steps
from blockyard.errors import InvalidArgumentError, StepOrderError
from blockyard.scheduler.loop import CacheLoop
from blockyard.scheduler.request import NO_TOKEN, Owner
from blockyard.scheduler.rows import BASE, DONE, LENGTH, LIMIT, SEAT, SequenceRows

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "NO_ROWS",
    "Draw",
    "PlainSteps",
    "SchedulerStats",
    "Step",
    "StepBuilder",
    "as_token_ids",
    "count_step",
    "decide_plain",
    "ragged",
    "sampled_tokens",
]

NO_ROWS = np.zeros(0, np.int32)


class Draw(NamedTuple):
    """One token to sample.

    Attributes:
        row: the row that the token continues. It is drawn from the logits at `position - 1`: those of the row's last
            token, unless the row has draft tokens.
        request_id: the request.
        sequence: which of the request's sequences gets the token.
        position: position of the token in the sequence, prompt included.
    """

    row: int
    request_id: str
    sequence: int
    position: int


@dataclass(slots=True, eq=False)
class Step:
    """One step's transfers, computation and sampling: `t` tokens in `n` rows, one row per sequence.

    First come `decodes` rows of one token each, then prompts and chunks of prompts. The first `samples` rows yield one
    token each: decodes, and prompts that end in this step. `handles`, `seats` and `start` are copies; all other arrays
    belong to the scheduler and are valid until the next `schedule`.

    With `Scheduler(num_lookahead_tokens=k)` a decoding row computes up to `k` draft tokens after its own, limited by
    the request's `max_tokens` and the free blocks. There are two ways to fill them in. A drafter guesses them before
    the step is computed: `set_draft_token_ids`. Or the model runs once per token of a row and writes each drawn token
    into `token_ids` as the row's next one; then every draft token is accepted.

    A step of `Scheduler.step` is a context manager: its body computes, its exit completes landed transfers. If the body
    raises, the step is given up and its requests start again from their tokens.

    Attributes:
        decision: block transfers to carry out before the rows are computed.
        decodes: number of rows that compute the next token of a sequence past its prompt, and its draft tokens.
        samples: number of rows that yield tokens, at least `decodes`.
        handles: the manager's handles, uint64 `[n]`.
        seats: a number below the scheduler's `max_num_seqs`, constant for a sequence from its first step until it ends
            or is preempted, int64 `[n]`. A model runner can use it as an index for per-sequence state.
        start: position of each row's first token, int64 `[n]`; keys and values of all earlier tokens are in the cache.
        query_start_loc: start of each row's tokens in `token_ids`, and the end of the last, int32 `[n + 1]`.
        token_ids: tokens to compute, row by row, uint32 `[t]`. An unfilled draft token repeats the token before it.
        slot_mapping: slot for each token's keys and values, int64 `[t]`, without repeats. In a recurrent group the
            state after a token goes to the block of its slot: after each token of a decoding row, and after the last
            token of another. With several cache groups `[groups, t]`.
        block_tables: device blocks of each row, int32 `[n, max_blocks]`. Entries beyond a row's blocks are undefined.
            With several cache groups `[groups, n, max_blocks]`. Blocks that a window or a state has left are block 0.
        extra_rows: rows that yield one more token, int32 `[e]`: each row once per sequence that forks off its prompt.
        num_draft_tokens: number of draft tokens in the decoding rows.
        void: rows whose tokens `update` will drop because bytes were lost, bool `[n]`; None if there are none. Set by
            `complete`.
        owners: owner of each seat; internal to the scheduler, read by `draws`.
        all_token_ids: returns all tokens of a row's sequence, prompt first, uint32 `[tokens]`, for drafters; valid
            until `update`.
        loop: internal to the scheduler: carries out the decision after `Scheduler.step`.
    """

    decision: StepDecision
    decodes: int
    samples: int
    handles: NDArray[np.uint64]
    seats: NDArray[np.int64]
    start: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    token_ids: NDArray[np.uint32]
    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    extra_rows: NDArray[np.int32]
    owners: Sequence[Owner | None] = field(repr=False)
    all_token_ids: Callable[[int], NDArray[np.uint32]] = field(repr=False)
    num_draft_tokens: int = 0
    void: NDArray[np.bool_] | None = None
    loop: CacheLoop | None = field(default=None, repr=False)

    def wait_for_layer(self, layer: int) -> None:
        """Make compute queued from now on wait for a layer's loads; on a CPU, wait for them now.

        For a step of `Scheduler.step(by_layer=True)`; in other steps everything has already arrived.
        """
        if self.loop is not None:
            self.loop.steps.executor.wait_for_layer(self.decision.ticket, layer)

    def __enter__(self) -> Self:
        if self.loop is None or self.loop.open is not self:
            raise StepOrderError(
                f"the step of ticket {self.decision.ticket} is no context manager now: write `with scheduler.step() as "
                f"step:`, over a Scheduler of a KVCache"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.loop is not None:
            self.loop.end(self, failed=kind is not None)

    @property
    def rows(self) -> int:
        """Number of sequences in the step."""
        return len(self.handles)

    @property
    def num_draws(self) -> int:
        """Number of tokens that `update` expects."""
        return self.samples + self.num_draft_tokens + len(self.extra_rows)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens in each row, int32 `[n]`."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    def owner(self, row: int) -> tuple[str, int]:
        """Return the owner of a row, until `update`: request id, and index of the sequence in the request."""
        owner = self.owners[int(self.seats[row])]
        if owner is None:
            raise IndexError(f"row {row} no longer has an owner: its step has ended")
        return owner[0].request.request_id, owner[1]

    @property
    def logits_indices(self) -> NDArray[np.int64]:
        """For each token that `update` expects, the index in `token_ids` whose logits give it, `[num_draws]`."""
        drafted = np.arange(self.query_start_loc[self.decodes])
        ends = self.query_start_loc[1:] - np.int64(1)
        return np.concatenate((drafted, ends[self.decodes : self.samples], ends[self.extra_rows]))

    def set_draft_token_ids(self, draft_token_ids: Sequence[ArrayLike]) -> None:
        """Set the draft tokens of the decoding rows; unused slots are dropped. At most once per step.

        Args:
            draft_token_ids: for each of the `decodes` rows, the tokens that may follow its own, in order: at most
                `lengths[row] - 1` integers from 0 to 4294967294.

        Raises:
            InvalidArgumentError: there is not one list per row, a list is too long, or an entry is not a token id;
                nothing was changed.
        """
        drafts = [as_token_ids(np.asarray(tokens), "draft_token_ids") for tokens in draft_token_ids]
        counts, slots = np.array([len(tokens) for tokens in drafts], np.int64), self.lengths
        if len(drafts) != self.decodes:
            raise InvalidArgumentError(f"draft_token_ids has {len(drafts)} lists, the step has {self.decodes} decodes")
        if (counts >= slots[: self.decodes]).any():
            row = int(np.argmax(counts >= slots[: self.decodes]))
            raise InvalidArgumentError(
                f"draft_token_ids has {counts[row]} tokens for row {row}, which has slots for {slots[row] - 1}"
            )
        lengths = slots.astype(np.int64)
        lengths[: self.decodes] = counts + 1
        kept = ragged(self.query_start_loc[:-1].astype(np.int64), lengths)
        tokens = self.token_ids[kept]
        ends = np.cumsum(lengths)
        for end, count, draft in zip(ends[: self.decodes].tolist(), counts.tolist(), drafts, strict=True):
            tokens[end - count : end] = draft
        starts = np.zeros(self.rows + 1, np.int32)
        starts[1:] = ends
        self.query_start_loc, self.token_ids, self.slot_mapping = starts, tokens, self.slot_mapping[..., kept]
        self.num_draft_tokens = int(counts.sum())

    def draws(self) -> list[Draw]:
        """List the tokens to sample, in the order in which `update` takes them; valid until `update`.

        Makes one object per token, for engines and tests that sample row by row.
        """
        begins, ends = self.start + 1, self.start + self.lengths
        begins[self.decodes :] = ends[self.decodes :]
        draws = [
            Draw(row, *self.owner(row), position)
            for row in range(self.samples)
            for position in range(int(begins[row]), int(ends[row]) + 1)
        ]
        index = 0
        for row in self.extra_rows.tolist():
            name, first = self.owner(row)
            index = index + 1 if draws[-1].row == row and index else first + 1
            draws.append(Draw(row, name, index, int(ends[row])))
        return draws


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was created.

    Attributes:
        steps: steps scheduled.
        tokens: tokens scheduled.
        cached_tokens: tokens found in the prefix cache when requests were first admitted.
        preempted_swap_host: preemptions that swapped sequences out to the host.
        preempted_swap_external: preemptions that swapped sequences out to the external tier.
        preempted_recompute: preemptions that freed sequences for recompute.
        lost: sequences restarted because a transfer lost their bytes.
        refused: requests ended because the device became too small.
        resumed_swap_host: sequences that came back from the host.
        resumed_swap_external: sequences that came back from the external tier.
        spec_decode_num_drafts: rows that computed draft tokens.
        spec_decode_num_draft_tokens: draft tokens in those rows.
        spec_decode_num_accepted_tokens: draft tokens that were accepted.
        retained: sequences that ended and whose blocks were retained, see `Request.retain`.
        retain_refused: sequences whose blocks were not, because half of the unused blocks were leased.
        retain_given_up: retained sequences whose blocks were needed before their time was over.
        peak_device_blocks: peak number of device blocks in use.
        peak_host_blocks: peak number of host blocks in use.
        peak_external_blocks: peak number of external slots in use.
    """

    steps: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    preempted_swap_host: int = 0
    preempted_swap_external: int = 0
    preempted_recompute: int = 0
    lost: int = 0
    refused: int = 0
    resumed_swap_host: int = 0
    resumed_swap_external: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    retained: int = 0
    retain_refused: int = 0
    retain_given_up: int = 0
    peak_device_blocks: int = 0
    peak_host_blocks: int = 0
    peak_external_blocks: int = 0


class StepBuilder:
    """Builds a step; its buffers are reused by every step.

    Args:
        max_tokens: token budget of a step; prompts get no tokens beyond it.
        max_rows: maximum number of rows in a step.
        num_lookahead_tokens: maximum number of draft tokens in a row.
        groups: number of cache groups.

    Attributes:
        token_ids: uint32 `[max_tokens + max_rows * (1 + num_lookahead_tokens)]`.
        slots: int64 `[groups, as token_ids]`.
        single: the slots of the only group; None if there are several.
        tokens: number of entries in use in both.
        drafts: number of draft slots in each decoding row, int64 `[decodes]`; None without lookahead.
        counts: number of tokens of each row in prefill.
        starts: position of the first of those tokens.
        ends: position after the last.
    """

    def __init__(self, max_tokens: int, max_rows: int, num_lookahead_tokens: int, groups: int) -> None:
        capacity = max_tokens + max_rows * (1 + num_lookahead_tokens)
        self.token_ids = np.zeros(capacity, np.uint32)
        self.slots = np.zeros((groups, capacity), np.int64)
        self.single = self.slots[0] if groups == 1 else None
        self.tokens = 0
        self.drafts: NDArray[np.int64] | None = None
        self.counts: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self._max_tokens = max_tokens
        self._ramp = np.arange(max_rows + 1, dtype=np.int32)

    @property
    def left(self) -> int:
        """Remaining token budget for prompts."""
        return self._max_tokens - self.tokens

    def begin(self) -> None:
        """Start an empty step."""
        self.tokens, self.drafts = 0, None
        self.counts, self.starts, self.ends = [], [], []

    def add_drafted(self, last: NDArray[np.uint32], drafts: NDArray[np.int64]) -> None:
        """Add the next tokens of decoding rows, each followed by `drafts` slots for draft tokens."""
        self.drafts = drafts
        self.tokens = len(last) + int(drafts.sum())
        self.token_ids[: self.tokens] = np.repeat(last, drafts + 1)

    def add_chunks(self, parts: list[NDArray[np.uint32]], starts: list[int]) -> None:
        """Add chunks of prompts; the last is cut to the remaining budget. Their slots are written separately."""
        counts = list(map(len, parts))
        at, total = self.tokens, sum(counts)
        if (excess := total - self.left) > 0:
            counts[-1] -= excess
            parts[-1], total = parts[-1][: counts[-1]], total - excess
        self.tokens = at + total
        np.concatenate(parts, out=self.token_ids[at : self.tokens])
        self.counts += counts
        self.starts += starts
        self.ends += map(add, starts, counts)

    def insert(self, decodes: int, count: int) -> slice:
        """Make room for `count` rows of one token after the decoding rows; return the position of their tokens."""
        at = decodes
        if self.drafts is not None:
            at += int(self.drafts.sum())
            self.drafts = np.append(self.drafts, np.zeros(count, np.int64))
        for array in (self.token_ids, self.slots):
            array[..., at + count : self.tokens + count] = array[..., at : self.tokens].copy()
        self.tokens += count
        return slice(at, at + count)

    def lengths(self, decodes: int) -> NDArray[np.uint32]:
        """Return the number of tokens in each row."""
        lengths = np.ones(decodes + len(self.counts), np.uint32)
        if self.drafts is not None:
            lengths[:decodes] += self.drafts.astype(np.uint32)
        lengths[decodes:] = self.counts
        return lengths

    def draft_tokens(self, decodes: int) -> NDArray[np.uint32]:
        """Return the number of draft slots in each row."""
        drafts = np.zeros(decodes + len(self.counts), np.uint32)
        if self.drafts is not None:
            drafts[:decodes] = self.drafts
        return drafts

    def build(self, decision: StepDecision, rows: SequenceRows) -> Step:
        """Return the step, and record in `rows` how far its prompts are computed."""
        decodes = samples = rows.decodes
        count, used = decodes + len(self.counts), self.tokens
        start: NDArray[np.int64] = rows.fields[LENGTH, :count] - 1
        extra = NO_ROWS
        if self.counts:
            start[decodes:] = self.starts
            rows.fields[DONE, decodes:count] = self.ends
            samples += sum(map(int.__eq__, self.ends, rows.fields[LENGTH, decodes:count].tolist()))
            if rows.forks:
                forks = [rows.fork_count(row) for row in range(decodes, samples)]
                extra = np.repeat(np.arange(decodes, samples, dtype=np.int32), forks)
        return Step(
            decision,
            decodes,
            samples,
            rows.handles[:count].copy(),
            rows.fields[SEAT, :count].copy(),
            start,
            self._query_start_loc(decodes),
            self.token_ids[:used],
            self.slots[:, :used] if self.single is None else self.single[:used],
            rows.block_tables[:, :count] if self.single is None else rows.flat_tables[:count],
            extra,
            rows.owners,
            rows.tokens_of,
            0 if self.drafts is None else int(self.drafts.sum()),
        )

    def _query_start_loc(self, decodes: int) -> NDArray[np.int32]:
        """Return the start of each row's tokens, and the end of the last."""
        if self.drafts is not None:
            return np.append(np.int32(0), np.cumsum(self.lengths(decodes), dtype=np.int32))
        starts: NDArray[np.int32] = self._ramp[: decodes + len(self.counts) + 1]
        if self.counts:
            starts = starts.copy()
            starts[decodes:] = list(accumulate(self.counts, initial=decodes))
        return starts


def ragged(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the runs of `counts[i]` consecutive numbers from each `starts[i]`."""
    found: NDArray[np.int64] = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return found


def sampled_tokens(step: Step, sampled: ArrayLike) -> NDArray[np.uint32]:
    """Convert the tokens given to `update` to uint32.

    Raises:
        InvalidArgumentError: they are not one token id for each draw.
    """
    tokens = np.asarray(sampled)
    if tokens.shape != (step.num_draws,):
        raise InvalidArgumentError(
            f"sampled tokens have shape {list(tokens.shape)}, do not match the step's {step.num_draws} draws"
        )
    return as_token_ids(tokens, "sampled tokens")


def as_token_ids(tokens: NDArray[Any], name: str) -> NDArray[np.uint32]:
    """Convert token ids `[tokens]` to uint32.

    Raises:
        InvalidArgumentError: they are not integers from 0 to 4294967294, or not one-dimensional.
    """
    if tokens.ndim != 1:
        raise InvalidArgumentError(f"{name} have shape {list(tokens.shape)}, must be [tokens]")
    if tokens.dtype == np.uint32 or not len(tokens):
        return tokens.astype(np.uint32, copy=False)
    if tokens.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{name} are {tokens.dtype}, must be integers")
    wide = tokens.astype(np.int64, copy=False)
    # Viewed as unsigned, a negative id exceeds every valid one.
    if np.maximum.reduce(wide.view(np.uint64)) >= NO_TOKEN:
        raise InvalidArgumentError(f"{name} go from {wide.min()} to {wide.max()}, must be from 0 to {NO_TOKEN - 1}")
    return wide.astype(np.uint32)


def count_step(stats: SchedulerStats, pools: Sequence[Pool], tokens: int, *, is_away: bool) -> None:
    """Count a step that computes `tokens`.

    Args:
        stats: the counters.
        pools: of the device, the host and the external tier.
        tokens: number of tokens.
        is_away: whether a sequence is on the host or in the external tier.
    """
    device, host, external = pools
    stats.steps += 1
    stats.tokens += tokens
    stats.peak_device_blocks = max(stats.peak_device_blocks, device.num_blocks - device.num_free)
    if is_away:
        stats.peak_host_blocks = max(stats.peak_host_blocks, host.num_blocks - host.num_free)
        stats.peak_external_blocks = max(stats.peak_external_blocks, external.num_blocks - external.num_free)


class PlainSteps:
    """The next steps of a scheduler, while they can only add one token to each running sequence.

    Valid until the scheduler's next call.

    Args:
        rows: rows that are all past their prompts.

    Attributes:
        context: context of each row in the first step, its new token included, int64 `[n]`.
        limit: number of steps until the first sequence reaches its limit, in the last of them.
    """

    def __init__(self, rows: SequenceRows) -> None:
        self._rows = rows
        self.context: NDArray[np.int64] = rows.fields[LENGTH, : rows.decodes].copy()
        self.limit = int(np.minimum.reduce(rows.fields[LIMIT, : rows.decodes] - self.context))

    def request_ids(self) -> list[str]:
        """Return the request of each row."""
        return [self._rows.owner(row)[0].request.request_id for row in range(len(self.context))]


def decide_plain(
    manager: BlockManager,
    rows: SequenceRows,
    builder: StepBuilder,
    stats: SchedulerStats,
    token_ids: NDArray[np.uint32],
    times: Sequence[float],
) -> tuple[int, StepDecision | None]:
    """Decide plain steps; see `Scheduler.schedule_plain`.

    Returns:
        The number of steps that have ended; and the decision of the next one, which is in `builder`, or None.
    """
    count = rows.decodes
    handles, length, last = rows.handles[:count], rows.fields[LENGTH, :count], rows.last[:count]
    times = times[: rows.make_way(len(token_ids))]
    ids = np.concatenate((last, token_ids.reshape(-1)))[: count * len(times)] if manager.prefix.enabled else None
    done, peak, decision = plain_steps(manager, handles, times, token_ids=ids)
    if done:
        rows.flat[(rows.fields[BASE, :count] + length)[:, None] + np.arange(done)] = token_ids[:done].T
        last[:] = token_ids[done - 1]
        length += done
    num_steps = done + (decision is not None)
    stats.steps += num_steps
    stats.tokens += num_steps * count
    stats.peak_device_blocks = max(stats.peak_device_blocks, peak)
    builder.begin()
    if decision is not None:
        builder.tokens = count
        builder.token_ids[:count] = last
        rows.read_tables(slice(count))
        end = length.astype(np.uint32)
        for group, slots in enumerate(builder.slots):
            manager.slot_mapping(handles, end - 1, end, slots[:count], group=group)
    return done, decision
