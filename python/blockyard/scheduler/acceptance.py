"""Adds a step's sampled tokens to its sequences: one per row, plus its accepted draft tokens."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from blockyard._core import BlockManager
from blockyard.scheduler.request import NO_TOKEN
from blockyard.scheduler.rows import BASE, LENGTH, LIMIT, SEAT, SequenceRows
from blockyard.scheduler.step import SchedulerStats, Step, StepBuilder, ragged
from blockyard.scheduler.stop_tokens import StopTokens

__all__ = ["Acceptance"]


class Acceptance:
    """Adds sampled tokens to rows, and publishes full blocks to the prefix cache.

    A row with draft tokens has one sampled token for its own token and one for each draft token. A draft token is
    accepted if it equals the token sampled before it and all draft tokens before it were accepted. The row gets the
    accepted tokens and the token sampled after the last of them. The manager takes back the slots of the rejected ones,
    so their keys and values are never read. It learns the token ids only now, so no prefix-cache key is ever made from
    a rejected draft token.

    Args:
        manager: the scheduler's manager.
        rows: rows of the sequences.
        builder: the step's builder, which knows the slots of each row.
        stop_tokens: the stop tokens of all requests.
        stats: counts draft tokens.
    """

    def __init__(
        self,
        manager: BlockManager,
        rows: SequenceRows,
        builder: StepBuilder,
        stop_tokens: StopTokens,
        stats: SchedulerStats,
    ) -> None:
        self._manager = manager
        self._prefix_caching = manager.prefix.enabled
        # A window frees its blocks here, before the next step needs others.
        self._marks = self._prefix_caching or any(group.kind != "full_attention" for group in manager.groups)
        self._rows = rows
        self._builder = builder
        self._stop_tokens = stop_tokens
        self._stats = stats

    def take_in(self, step: Step, sampled: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Add a step's tokens and forked sequences. Returns which rows end, bool `[decodes]`, new rows included."""
        extra = len(step.extra_rows)
        if not extra:
            return self._take_in(step, sampled)
        return self._fork(step, sampled[-extra:], self._take_in(step, sampled[:-extra]))

    def _take_in(self, step: Step, sampled: NDArray[np.uint32]) -> NDArray[np.bool_]:
        if self._builder.drafts is not None:
            return self._accept(step, sampled, self._builder.drafts)
        if self._marks:
            self._publish(step)
        return self._extend(step, sampled)

    # ---- one token per row ----

    def _publish(self, step: Step) -> None:
        """Publish the blocks that the step filled, and free those that a window has left."""
        size = self._manager.block_size
        length = self._rows.fields[LENGTH, : step.rows]
        within = length % size if size & (size - 1) else length & (size - 1)
        due: NDArray[np.bool_] = within == 0
        due[step.decodes :] = True  # a chunk may fill blocks without ending on a block boundary
        if step.void is not None:
            due &= ~step.void
        computed = step.handles[due]
        if len(computed):
            self._manager.mark_computed(computed)

    def _extend(self, step: Step, tokens: NDArray[np.uint32]) -> NDArray[np.bool_]:
        rows, samples = self._rows, step.samples
        length = rows.fields[LENGTH, :samples]
        if step.void is not None:
            tokens = np.where(step.void[:samples], np.uint32(NO_TOKEN), tokens)
        rows.flat[rows.fields[BASE, :samples] + length] = tokens
        rows.last[:samples] = tokens
        length += 1
        rows.decodes = samples
        ended: NDArray[np.bool_] = length >= rows.fields[LIMIT, :samples]
        if self._stop_tokens:
            for row in self._stop_tokens.among(tokens).tolist():
                ended[row] |= int(tokens[row]) in rows.owner(row)[0].stops
        if step.void is not None:
            void = step.void[:samples]
            ended &= ~void
            length -= void
        return ended

    def _fork(self, step: Step, tokens: NDArray[np.uint32], ended: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Fork sequences off computed prompts. Returns which rows end, bool `[decodes]`."""
        rows, manager, at = self._rows, self._manager, 0
        parents, counts = np.unique(step.extra_rows, return_counts=True)
        for row, count in zip(parents.tolist(), counts.tolist(), strict=True):
            drawn = tokens[at : at + count]
            at += count
            state, index = rows.owner(row)
            if not state.alive or state.lost:
                continue
            del rows.forks[int(rows.fields[SEAT, row])]
            prompt = rows.tokens_of(row)[:-1]
            children = manager.fork(int(rows.handles[row]), count).tolist()
            texts = [np.append(prompt, token) for token in drawn]
            each = enumerate(zip(children, texts, strict=True), index + 1)
            new = rows.insert([(state, i, tokens, handle, 0, 0) for i, (handle, tokens) in each])
            rows.read_tables(new)
            ends = [len(prompt) + 1 >= state.limit or token in state.stops for token in drawn.tolist()]
            ended = np.concatenate((ended, np.array(ends, np.bool_)))
        return ended

    # ---- draft tokens ----

    def _accept(self, step: Step, sampled: NDArray[np.uint32], slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        rows, samples, decodes = self._rows, step.samples, step.decodes
        first = step.query_start_loc[: decodes + 1].astype(np.int64)
        first = np.append(first[:-1], first[-1] + np.arange(samples - decodes))
        count = np.ones(samples, np.int64)
        count[:decodes] = _count_accepted(step, sampled)
        ended = self._cut_at_stops(sampled, first, count)
        self._count_drafts(step, count[:decodes])
        if step.void is not None:
            ended &= ~step.void[:samples]
            count[step.void[:samples]] = 0
        length = rows.fields[LENGTH, :samples]
        at = ragged(rows.fields[BASE, :samples] + length, count)
        tokens = sampled[ragged(first, count)]
        rows.flat[at] = tokens
        rows.last[:samples] = sampled[first + np.maximum(count, 1) - 1]
        length += count
        rows.decodes = samples
        ended |= (length >= rows.fields[LIMIT, :samples]) & (count > 0)
        self._take_back(step, first[:decodes], count[:decodes], slots)
        if self._marks:
            self._publish_accepted(step, count[:decodes])
        return ended

    def _cut_at_stops(
        self, sampled: NDArray[np.uint32], first: NDArray[np.int64], count: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Drop accepted tokens after a stop token. Returns which rows have one."""
        ended = np.zeros(len(first), np.bool_)
        if self._stop_tokens:
            drawn = int(first[-1] + count[-1]) if len(first) else 0
            places = self._stop_tokens.among(sampled[:drawn])
            for at, row in zip(places.tolist(), (np.searchsorted(first, places, "right") - 1).tolist(), strict=True):
                wanted = at - int(first[row]) + 1
                if wanted <= count[row] and int(sampled[at]) in self._rows.owner(row)[0].stops:
                    count[row], ended[row] = wanted, True
        return ended

    def _count_drafts(self, step: Step, count: NDArray[np.int64]) -> None:
        stats, drafted = self._stats, step.lengths[: step.decodes] - 1
        stats.spec_decode_num_drafts += int(np.count_nonzero(drafted))
        stats.spec_decode_num_draft_tokens += int(drafted.sum())
        stats.spec_decode_num_accepted_tokens += int(count.sum()) - len(count)

    def _take_back(
        self, step: Step, first: NDArray[np.int64], count: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> None:
        """Truncate sequences to their accepted tokens, and give the token ids to the manager."""
        manager = self._manager
        handles = step.handles[: step.decodes]
        computed = step.token_ids[: step.query_start_loc[step.decodes]]
        if len(computed) != count.sum() or (count <= slots).any():  # else all are accepted
            kept = self._rows.fields[LENGTH, : step.decodes] - 1
            cut = (count <= slots) & (count > 0)
            deque(map(manager.truncate, handles[cut].tolist(), kept[cut].tolist()), maxlen=0)
            computed, named = step.token_ids[ragged(first, count)], count > 0
            handles, count = handles[named], count[named]
        if self._prefix_caching and len(handles):
            manager.prefix.note_tokens(handles, computed, count.astype(np.uint32))

    def _publish_accepted(self, step: Step, count: NDArray[np.int64]) -> None:
        """Publish the blocks that the step filled with accepted tokens."""
        size = self._manager.block_size
        computed = self._rows.fields[LENGTH, : step.decodes] - 1
        due = np.ones(step.rows, np.bool_) if step.void is None else ~step.void
        due[: step.decodes] &= computed // size > (computed - count) // size
        if due.any():
            self._manager.mark_computed(step.handles[due])


def _count_accepted(step: Step, sampled: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Count each decoding row's new tokens: its accepted draft tokens plus one, int64 `[decodes]`."""
    first = step.query_start_loc[: step.decodes].astype(np.int64)
    total = int(step.query_start_loc[step.decodes])
    agrees = np.zeros(total, np.bool_)
    agrees[:-1] = sampled[:total][:-1] == step.token_ids[:total][1:]
    agrees[step.query_start_loc[1 : step.decodes + 1] - 1] = False  # no draft token follows a row's last token
    ends = np.flatnonzero(~agrees)
    found: NDArray[np.int64] = ends[np.searchsorted(ends, first)] - first + 1
    return found
