"""A model with a recurrent state, for the scheduler's machine: each block holds the state after a step's last token."""

from __future__ import annotations

from typing import Any

from blockyard.scheduler import Step
from blockyard.testing.machines.scheduler import draw_token, seen


class Recurrent:
    """Mixed into a machine: the model keeps a state of all its tokens in the block of a step's last token."""

    states: list[list[int]]

    def compute(self: Any, step: Step) -> list[int]:
        size, device = self.manager.block_size, self.memory.tiers["device"]
        self.states = getattr(self, "states", [])
        texts = []
        for row, (start, first, end) in enumerate(
            zip(step.start.tolist(), step.query_start_loc[:-1].tolist(), step.query_start_loc[1:].tolist(), strict=True)
        ):
            state = int(device[step.block_tables[row, (start - 1) // size], 0]) if start else None
            if step.void is None or not step.void[row]:
                assert state is None or state >= 0, f"row {row} reads a block that holds no state: {state}"
            known = self.states[state] if state is not None and state >= 0 else []
            request, new = self.scheduled.get(step.owner(row)[0]), step.token_ids[first:end].tolist()
            texts.append(known + (new if request is None else seen(request, new, start)))
        for row, (text, end) in enumerate(zip(texts, (step.start + step.lengths).tolist(), strict=True)):
            assert len(text) == end or (step.void is not None and step.void[row]), f"row {row} reads an older state"
            device[step.block_tables[row, (end - 1) // size]] = len(self.states)
            self.states.append(text)
        return [draw_token(texts[draw.row], draw.sequence) for draw in step.draws()]
