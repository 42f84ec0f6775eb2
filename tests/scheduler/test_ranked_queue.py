"""The queue of idle sequences against a sorted list."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from blockyard.scheduler.ranked_queue import RankedQueue
from blockyard.scheduler.request import SequenceStatus


def sequences(random: Random, number: int) -> Any:
    rank = (random.randrange(2), float(random.randrange(40)), number)
    return SimpleNamespace(rank=rank, indices=[0], state=SimpleNamespace(idle=[]), status=SequenceStatus.RUNNING)


@pytest.mark.parametrize("seed", range(20))
def test_it_has_the_sequences_that_a_sorted_list_has(seed: int):
    random, queue = Random(seed), RankedQueue(SequenceStatus.WAITING)
    model, aside = list[Any](), list[Any]()
    for number in range(600):
        act = random.random()
        if act < 0.45:
            model.append(sequences(random, number))
            queue.push(model[-1])
        elif act < 0.6 and model:  # as a step that passes over the first ones
            aside.append(queue.pop())
            assert aside[-1] is model.pop(0)
        elif act < 0.7:
            for idle in reversed(aside):
                queue.push(idle)
            model, aside = model + aside, []
        elif act < 0.9 and model:
            gone = model.pop(random.randrange(len(model)))
            queue.discard(gone)
            assert not gone.state.idle
        model.sort(key=lambda idle: idle.rank)
        assert len(queue) == len(model)
        assert queue.head() is (model[0] if model else None)
        count = random.randrange(20)
        assert [id(idle) for idle in queue.first(count)] == [id(idle) for idle in model[:count]]
