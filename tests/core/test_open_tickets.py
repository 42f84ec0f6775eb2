"""Tickets that nobody ends are named: by a warning, by `open_tickets`, by errors and by the test kit."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, SequenceStateError
from blockyard.testing.machines.side_by_side import refuse_open


def test_too_many_open_tickets_are_warned_of_once_with_their_ages() -> None:
    manager = BlockManager(block_size=2, device_blocks=8, max_open_tickets=3)
    tickets = [manager.take_decision().ticket for _ in range(4)]
    manager.complete(tickets[1])
    tickets.append(manager.take_decision().ticket)
    assert manager.stats().open_tickets == [1, 3, 4, 5]
    with pytest.warns(RuntimeWarning, match="4 tickets are open, max_open_tickets is 3") as caught:
        manager.take_decision()
    assert "1 (5 steps ago), 3 (3 steps ago), 4 (2 steps ago), 5 (1 steps ago)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.take_decision().ticket == 7


FORGETS = """
from blockyard import BlockManager
manager = BlockManager(block_size=2, device_blocks=8)
def forgets():
    return manager.take_decision()
for _ in range(17):
    forgets()
    manager.complete(manager.take_decision().ticket)
forgets()
"""


@pytest.mark.parametrize("mode", [[], ["-X", "dev"]])
def test_seventeen_open_tickets_are_warned_of_with_their_lines_in_development_mode(
    tmp_path: Path, mode: list[str]
) -> None:
    script = tmp_path / "engine.py"
    script.write_text(FORGETS, encoding="utf-8")
    ended = subprocess.run([sys.executable, *mode, script], check=True, capture_output=True, text=True)
    assert ended.stderr.count("RuntimeWarning") == 1
    assert "17 tickets are open, max_open_tickets is 16: complete or fail each ticket" in ended.stderr
    assert (f"1 (33 steps ago, {script}:5)" in ended.stderr) == bool(mode)
    assert ("python -X dev names the lines that took them" in ended.stderr) != bool(mode)


def test_development_mode_forgets_the_lines_of_ended_tickets(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "from blockyard import BlockManager\n"
        "manager = BlockManager(block_size=2, device_blocks=8, max_open_tickets=1)\n"
        "for _ in range(100):\n"
        "    manager.complete(manager.take_decision().ticket)\n"
        "[manager.take_decision() for _ in range(3)]\n",
        encoding="utf-8",
    )
    ended = subprocess.run([sys.executable, "-X", "dev", script], check=True, capture_output=True, text=True)
    assert f"101 (2 steps ago, {script}:5)" in ended.stderr


def test_a_warning_that_is_an_error_loses_no_decision() -> None:
    manager = BlockManager(block_size=2, device_blocks=8, max_open_tickets=0)
    sequence = manager.allocate(3)
    first = manager.take_decision()
    manager.append(manager.fork(sequence, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            manager.take_decision()
    assert manager.stats().open_tickets == [first.ticket]
    assert [kind for kind, _ in manager.take_decision().transfers()] == ["copy"]


def test_the_test_kit_names_open_tickets() -> None:
    manager = BlockManager(block_size=2, device_blocks=8)
    for _ in range(3):
        manager.take_decision()
    manager.complete(2)
    with pytest.raises(AssertionError, match="tickets 1, 3 were neither completed nor failed"):
        refuse_open(manager)
    for ticket in manager.stats().open_tickets:
        manager.complete(ticket)
    refuse_open(manager)


@pytest.mark.parametrize("number", [-1, 2**32, "3"])
def test_a_number_of_open_tickets_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(InvalidArgumentError, match="max_open_tickets"):
        BlockManager(block_size=2, device_blocks=8, max_open_tickets=number)


def test_blocks_of_a_transfer_that_hangs_stay_leased_and_its_sequences_start_again() -> None:
    manager = BlockManager(block_size=2, device_blocks=4, host_blocks=4, watermark=0.0)
    sequence = manager.allocate(4)
    manager.complete(manager.take_decision().ticket)
    manager.swap_out(sequence)
    decision = manager.take_decision()
    lost = [pairs for _, pairs in decision.transfers()]
    assert manager.lose(decision.ticket, lost).tolist() == [sequence]
    with pytest.raises(SequenceStateError, match="lost bytes"):
        manager.swap_in(sequence)
    manager.free(sequence)
    again = manager.allocate(4)
    assert manager.stats().leased_blocks == {"device": 2, "host": 2, "external": 0}
    assert manager.pool("host").num_free == 2, "nobody gets blocks that may still be written"
    manager.complete(decision.ticket, lost)
    manager.free(again)
    manager.check()
    assert (manager.pool().num_free, manager.pool("host").num_free) == (4, 4)
