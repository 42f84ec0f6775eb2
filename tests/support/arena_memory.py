"""The bytes of an arena's or a split's tiers under a scheduler: each group writes and reads those of its page class."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from blockyard import BlockManager
from blockyard.scheduler import Step
from blockyard.testing import EMPTY
from blockyard.testing.interfaces import TierName

WORD = 8
Words = NDArray[np.int64]


@dataclass(eq=False)
class Copy:
    """A block on its way."""

    src: Words
    dst: Words
    reads_device: bool
    row: Words | None = None
    has_landed: bool = False

    def read(self) -> None:
        if self.row is None:
            self.row = self.src.copy()

    def land(self) -> None:
        self.read()
        if not self.has_landed:
            self.dst[:] = self.row
        self.has_landed = True


class ArenaMemory:
    """The words of all tiers. Those of a token have one value, which depends on its group and all tokens up to it.

    Args:
        manager: of blocks whose tokens have words of their own.

    Attributes:
        blocks: the blocks of each page class in each tier, as rows of words.
        counts: words compared, blocks copied by kind, and how often a class has taken an extent.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.counts: Counter[str] = Counter()
        self._groups = [(group.kind, group.window) for group in manager.groups]
        sizes = [group.block_bytes for group in manager.groups]
        self._class_of = [list(dict.fromkeys(sizes)).index(size) for size in sizes]
        self._words: dict[TierName, Words] = {}
        self.blocks = {tier: self._views(tier) for tier in ("device", "host")}
        self._running: dict[int, list[Copy]] = {}
        self._extents = self._owned()

    def _views(self, tier: TierName) -> list[Words]:
        """Return the blocks of each class in a tier: over the same words in an arena, side by side in a split."""
        pools = [self._manager.pool(tier, number) for number in range(self._manager.num_page_classes)]
        widths = [(pool.block_bytes or 0) // WORD for pool in pools]
        strides = [(pool.block_stride or pool.block_bytes or 0) // WORD for pool in pools]
        ends = [*accumulate(pool.max_blocks * stride for pool, stride in zip(pools, strides, strict=True))]
        in_arena = pools[0].block_stride is not None
        words = self._words[tier] = np.full(ends[0] if in_arena else ends[-1], EMPTY, np.int64)
        starts = [0] * len(pools) if in_arena else [0, *ends[:-1]]
        return [
            as_strided(words[start:], (pool.max_blocks, width), (stride * WORD, WORD))
            for pool, start, width, stride in zip(pools, starts, widths, strides, strict=True)
        ]

    def _owned(self) -> list[int]:
        return [self._manager.pool(page_class=number).num_extents for number in range(self._manager.num_page_classes)]

    def begin(self, step: Step) -> None:
        """Begin a step's copies: those that it needs land now, the others when its ticket ends."""
        owned, self._extents = self._extents, self._owned()
        self.counts["extents"] += sum(max(0, now - was) for was, now in zip(owned, self._extents, strict=True))
        decision, needed, copies = step.decision, self._needed(step), []
        at_once: list[Copy] = []
        needed |= {(pairs.page_class, src) for pairs in decision.copy for src in pairs.ids[:, 0].tolist()}
        running = self._running[decision.ticket] = []
        for kind, pairs in decision.transfers():
            self.counts[kind] += len(pairs)
            src, dst = (self.blocks[tier][pairs.page_class] for tier in (pairs.src, pairs.dst))
            for source, target in pairs.ids.tolist():
                copy = Copy(src[source], dst[target], pairs.src == "device")
                (copies if kind == "copy" else running).append(copy)
                if kind != "copy" and pairs.dst == "device" and (pairs.page_class, target) in needed:
                    at_once.append(copy)
        for ticket in decision.after:  # its own, too
            for copy in self._running.get(ticket, ()):
                if copy.reads_device:
                    copy.read()
        for copy in [*at_once, *copies]:
            copy.land()

    def end(self, ticket: int) -> None:
        """Run the rest of a ticket's copies."""
        running = self._running.pop(ticket)
        for copy in running:
            copy.read()
        for copy in running:
            copy.land()

    def forget_behind(self, extents: int) -> None:
        """Forget what lies behind the first extents of the device, or behind the first blocks of an only class."""
        pool = self._manager.pool()
        stride = pool.block_stride or pool.block_bytes or 0
        self._words["device"][extents * (pool.per_extent or 1) * stride // WORD :] = EMPTY

    def compute(self, step: Step) -> None:
        """Write what a model computes, and compare every word that it reads."""
        rows, tokens = [], pairwise(step.query_start_loc.tolist())
        for row, (start, (first, end)) in enumerate(zip(step.start.tolist(), tokens, strict=True)):
            text = [*step.all_token_ids(row)[:start].tolist(), *step.token_ids[first:end].tolist()]
            rows.append((row, start, values_of(text)))
        for group, (kind, _) in enumerate(self._groups):
            for row, start, values in rows if kind == "recurrent" else ():  # before any state is written
                self._compare(step, group, row, np.arange(max(0, start - 1), start), values)
        for group, (kind, _) in enumerate(self._groups):
            slots = step.slot_mapping if len(self._groups) == 1 else step.slot_mapping[group]
            for row, start, values in rows:
                at = np.arange(len(values) - 1 if kind == "recurrent" and row >= step.decodes else start, len(values))
                self._write(group, slots[int(step.query_start_loc[row]) + at - start], values[at])
        for group, (kind, window) in enumerate(self._groups):
            for row, start, values in rows if kind != "recurrent" else ():
                begin = 0 if window is None else max(0, start + 1 - window)
                begin = start - start % (window or 1) if kind == "chunked_attention" else begin
                self._compare(step, group, row, np.arange(begin, len(values)), values)

    def _needed(self, step: Step) -> set[tuple[int, int]]:
        """Return class and id of the blocks that a step reads and writes."""
        size = self._manager.block_size
        return {
            (page_class, block)
            for group, page_class in enumerate(self._class_of)
            for row, end in enumerate((step.start + step.lengths).tolist())
            for block in self._table(step, group, row)[: -(-end // size)].tolist()
        }

    def _table(self, step: Step, group: int, row: int) -> NDArray[np.int32]:
        return step.block_tables[row] if len(self._groups) == 1 else step.block_tables[group, row]

    def _cells(self, group: int) -> Words:
        """Return a group's blocks as tokens, `[blocks, tokens, words]`."""
        blocks, tokens = self.blocks["device"][self._class_of[group]], self._manager.block_size
        width = blocks.shape[1] // tokens
        return as_strided(blocks, (len(blocks), tokens, width), (blocks.strides[0], width * WORD, WORD))

    def _write(self, group: int, slots: Words, values: Words) -> None:
        block, offset = np.divmod(slots, self._manager.block_size)
        is_state = self._groups[group][0] == "recurrent"
        assert block.all() or self._groups[group][0] == "full_attention", f"group {group} writes to the null block"
        new = (values * len(self._groups) + group)[:, None]
        if is_state:  # it fills its block
            self._cells(group)[block] = new[:, None]
        else:
            self._cells(group)[block, offset] = new

    def _compare(self, step: Step, group: int, row: int, at: Words, values: Words) -> None:
        cells, size = self._cells(group), self._manager.block_size
        block = self._table(step, group, row)[at // size]
        is_state = self._groups[group][0] == "recurrent"
        found = cells[block].reshape(len(at), cells[0].size) if is_state else cells[block, at % size]
        self.counts["words"] += found.size
        wrong = (found != (values[at] * len(self._groups) + group)[:, None]).any(axis=1)
        assert not wrong.any(), (
            f"request {step.owner(row)} reads wrong bytes of group {group} at positions {at[wrong].tolist()}, "
            f"in blocks {block[wrong].tolist()}"
        )


def values_of(tokens: list[int]) -> Words:
    """Return what a model computes for each token, which depends on all tokens up to it."""
    found = accumulate(tokens, lambda value, token: (value * 1_000_003 + token + 1) & ((1 << 58) - 1), initial=7)
    return np.array([*found][1:], np.int64)
