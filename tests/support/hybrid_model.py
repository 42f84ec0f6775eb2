"""A model with several kinds of layers, for the scheduler's machine: each reads and writes the blocks of its group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import CacheGroup
from blockyard.scheduler import Step
from blockyard.testing.machines.scheduler import draw_token, reference_tokens, seen


class Hybrid:
    """Mixed into a machine: the first group's layers have all tokens, and each other group's must have the same ones.

    A block of a recurrent group holds the number of a state: all tokens up to a step's last one, or to a draft.
    """

    states: list[list[int]]
    states_read: tuple[int, dict[int, dict[int, list[int]]]] = (-1, {})

    def check_groups(self: Any, groups: Sequence[CacheGroup]) -> None:
        """Take each manager: the model here has several tables, and states."""

    def compute(self: Any, step: Step) -> list[int]:
        groups, size = self.manager.groups, self.manager.block_size
        self.states = getattr(self, "states", [])
        slots, tables = step.slot_mapping, step.block_tables
        slots, tables = (slots, tables) if len(groups) > 1 else (slots[None], tables[None])
        starts, ends = step.start.tolist(), (step.start + step.lengths).tolist()
        new = [
            self.seen_by(step, row, step.token_ids[first:end].tolist())
            for row, (first, end) in enumerate(pairwise(step.query_start_loc.tolist()))
        ]
        live = [row for row in range(step.rows) if step.void is None or not step.void[row]]
        if (
            self.states_read[0] != step.decision.ticket
        ):  # a step may be computed several times, once for each draft token
            earlier = {number: self.read_states(step, tables[number], live) for number in self.recurrent}
            self.states_read = (step.decision.ticket, earlier)
        texts: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            if group.kind.endswith("drafter"):
                for row in live:
                    self.draft(step, row, tables[number, row], texts[row], group.window)
                continue
            if group.kind == "recurrent":
                found = {row: self.states_read[1][number][row] + new[row] for row in live}
                for row, (first, end) in enumerate(pairwise(step.query_start_loc.tolist())):
                    text = found.get(row, [])
                    for at in range(first if row < step.decodes else end - 1, end):
                        self.memory.tiers["device"][slots[number, at] // size] = len(self.states)
                        self.states.append(text[: len(text) + at + 1 - end])
            else:
                self.memory.write(slots[number], [value for values in new for value in values])
                found = {row: self.memory.read(tables[number, row], ends[row]) for row in live}
            for row, text in found.items():
                begin = 0 if group.window is None else max(0, starts[row] + 1 - group.window)
                begin = starts[row] - starts[row] % group.window if group.kind == "chunked_attention" else begin
                whole = texts.setdefault(row, text)
                assert len(text) == ends[row], f"row {row} of group {number} reads a state of {len(text)} tokens"
                assert text[begin:] == whole[begin:], f"row {row} of group {number} reads other tokens than the first"
        return [
            draw_token(texts[draw.row][: draw.position], draw.sequence) if draw.row in texts else 0
            for draw in step.draws()
        ]

    def draft(self: Any, step: Step, row: int, table: NDArray[np.int32], text: list[int], window: int | None) -> None:
        """Write and read as a drafter: each entry depends on the next token, and the last waits for it."""
        device, size = self.memory.tiers["device"], self.manager.block_size
        self.begun = getattr(self, "begun", set())
        first, handle, at = int(step.start[row]), int(step.handles[row]), np.arange(len(text))
        has_begun = row < step.decodes or handle in self.begun
        entries = np.array(text, np.int64) * 1_000_003 + [*text[1:], 0]
        # The entry before the tokens of this step is right if it was found, and else written with them.
        new = at[first - (first > 0 and has_begun) :]
        device[table[new // size], new % size] = entries[new]
        at = at[0 if window is None else max(0, first - window) :]
        found = device[table[at // size], at % size]
        assert (found == entries[at])[:-1].all(), f"row {row} reads a drafter's entry before another token"
        self.begun.add(handle)

    @property
    def recurrent(self: Any) -> list[int]:
        return [number for number, group in enumerate(self.manager.groups) if group.kind == "recurrent"]

    def seen_by(self: Any, step: Step, row: int, tokens: list[int]) -> list[int]:
        name, index = step.owner(row)
        request, start = self.scheduled.get(name), int(step.start[row])
        if request is None:
            return tokens
        before = [*request.prompt, *reference_tokens(request, self.window)[index]][:start]
        return seen(request, tokens, start, *seen(request, before)[-1:], window=self.window)

    def read_states(self: Any, step: Step, table: NDArray[np.int32], rows: list[int]) -> dict[int, list[int]]:
        """Read the states that a step goes on from, before any is written."""
        device, size, found = self.memory.tiers["device"], self.manager.block_size, {}
        for row in rows:
            start = int(step.start[row])
            state = int(device[table[row, (start - 1) // size], 0]) if start else None
            assert state is None or state >= 0, f"row {row} reads a block that holds no state: {state}"
            found[row] = [] if state is None else self.states[state]
        return found
