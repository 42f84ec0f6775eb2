"""Simulated memory: it does what a decision says, no sooner than it must, and refuses bad mappings."""

import numpy as np
import pytest

from blockyard import Pairs, StepDecision
from blockyard.errors import MappingError
from blockyard.testing import EMPTY, LOST, Config, LateMemory, SimulatedMemory

CONFIG = Config(block_size=2, device_blocks=4, host_blocks=4, external_blocks=4)


def pairs(src: str, dst: str, *ids: tuple[int, int]) -> Pairs:
    return Pairs(src, dst, np.array(ids, dtype=np.int64).reshape(-1, 2))


def test_tokens_are_read_back_through_the_table_they_were_written_by():
    memory = SimulatedMemory(CONFIG)
    memory.write([7, 2, 3], [1, 2, 3])
    assert memory.read([1, 3], 4) == [2, 3, EMPTY, 1]
    assert memory.read([1], 0) == []


def test_a_decision_is_carried_out_in_its_order():
    memory = SimulatedMemory(CONFIG)
    memory.write([0, 1, 2, 3], [1, 2, 3, 4])
    memory.tiers["host"][0] = [5, 6]
    out, load, copy = (
        pairs("device", "host", (0, 1)),
        pairs("host", "device", (0, 0)),
        pairs("device", "device", (0, 2)),
    )
    decision = StepDecision(1, [("copy", copy), ("swap_in", load), ("swap_out", out)])
    assert memory.execute(decision) == []
    assert memory.read([1], 2, "host") == [1, 2]
    assert memory.read([0, 2], 4) == [5, 6, 5, 6]


def test_lost_bytes_are_overwritten():
    memory = SimulatedMemory(CONFIG)
    memory.write([0, 1], [1, 2])
    memory.lose(pairs("external", "device", (3, 0)))
    assert memory.read([0], 2) == [LOST, LOST]


@pytest.mark.parametrize("ids", [[(0, 4)], [(4, 0)], [(0, 1), (2, 1)]])
def test_a_mapping_that_no_engine_would_take_is_refused(ids: list[tuple[int, int]]):
    for memory in (SimulatedMemory(CONFIG), LateMemory(CONFIG)):
        with pytest.raises(MappingError):
            memory.transfer("swap_out", pairs("device", "host", *ids))


def test_slots_and_tables_out_of_range_are_refused():
    memory = SimulatedMemory(CONFIG)
    for slots, tokens in (([8], [1]), ([-1], [1]), ([0, 1], [1])):
        with pytest.raises(MappingError):
            memory.write(slots, tokens)
    for table, n in (([4], 2), ([-1], 1), ([0], 3)):
        with pytest.raises(MappingError):
            memory.read(table, n)


def test_a_late_transfer_lands_when_its_ticket_ends():
    memory = LateMemory(CONFIG)
    memory.write([0, 1], [1, 2])
    memory.submit(StepDecision(1, [("swap_out", pairs("device", "host", (0, 3)))]))
    assert memory.read([3], 2, "host") == [EMPTY, EMPTY]
    memory.finish(1)
    assert memory.read([3], 2, "host") == [1, 2]


def test_a_late_transfer_reads_what_has_been_overwritten_unless_the_step_waits_for_it():
    for after, expected in (([], 9), ([1], 1)):
        memory = LateMemory(CONFIG)
        memory.write([0], [1])
        memory.submit(StepDecision(1, [("swap_out", pairs("device", "host", (0, 3)))]))
        memory.submit(StepDecision(2, [], after=after))
        memory.write([0], [9])
        memory.finish(1)
        assert memory.read([3], 1, "host") == [expected]


def test_a_load_that_the_step_needs_or_copies_lands_at_once():
    for needed, copied in (({0}, []), (set(), [("copy", pairs("device", "device", (0, 1)))])):
        memory = LateMemory(CONFIG)
        memory.tiers["host"][2] = [7, 8]
        memory.submit(StepDecision(1, [("swap_in", pairs("host", "device", (2, 0))), *copied]), needed)
        assert memory.read([0], 2) == [7, 8]
        memory.write([0], [9])
        memory.finish(1)
        assert memory.read([0], 2) == [9, 8]


def test_a_load_that_is_lost_never_lands():
    memory = LateMemory(CONFIG)
    memory.tiers["external"][2] = [7, 8]
    load = pairs("external", "device", (2, 0))
    memory.submit(StepDecision(1, [("swap_in", load)]), {0}, [load])
    memory.finish(1)
    assert memory.read([0], 2) == [LOST, LOST]
