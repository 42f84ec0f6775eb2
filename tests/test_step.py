"""One step of a scheduler: entries are left out with their slots and rows."""

import numpy as np
import pytest

from blockyard import BlockManager
from blockyard.request import Request, RequestGroup
from blockyard.step import Batch, ScheduledSequence, Step


def step_of(*lengths: int) -> Step:
    """A step whose entry `i` has `lengths[i]` tokens, slots that tell entry and token, and a row of its own."""
    batch, slots = Batch(), []
    for i, length in enumerate(lengths):
        group = RequestGroup(Request(str(i), [1], 1), (0, 0.0, i), [])
        batch.add(ScheduledSequence(str(i), 0, i, 0, list(range(length)), (0,), group))
        slots.append(np.arange(length) + 100 * i)
    tables = np.arange(2 * len(lengths), dtype=np.int32).reshape(-1, 2)
    decision = BlockManager(block_size=4, device_blocks=1).take_decision()
    assert batch.tokens == sum(lengths)
    return Step(decision, tuple(batch.items), np.concatenate(slots), tables)


@pytest.mark.parametrize("gone", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_entries_leave_with_their_slots_and_rows(gone: tuple[int, ...]):
    step = step_of(3, 1, 2)
    left = step.without([step.batch[i].group for i in gone])
    kept = [i for i in range(3) if i not in gone]
    assert [item.handle for item in left.batch] == kept
    assert left.slot_mapping.tolist() == [100 * i + t for i in kept for t in range([3, 1, 2][i])]
    assert left.block_tables.tolist() == [[2 * i, 2 * i + 1] for i in kept]
    assert left.decision is step.decision


def test_a_request_that_only_looks_the_same_takes_nothing_with_it():
    step, other = step_of(2, 2), step_of(2, 2)
    assert step.without([other.batch[0].group]).batch == step.batch
