"""Moves of a manager's own blocks, as Python sees them."""

from __future__ import annotations

import numpy as np
import pytest

from blockyard import BlockManager, DefragReport, InvalidArgumentError, Pairs

SIZE = 4


def books(device: int = 16, **options: bool) -> BlockManager:
    return BlockManager(block_size=SIZE, device_blocks=device, watermark=0.0, **options)  # type: ignore[arg-type]


def end(manager: BlockManager) -> None:
    manager.complete(manager.take_decision().ticket)
    manager.check()


def holey(manager: BlockManager) -> int:
    """A sequence in blocks 4 to 7, and holes before them."""
    first, second = manager.allocate([4 * SIZE, 4 * SIZE])
    end(manager)
    manager.free([first])
    return int(second)


def test_blocks_move_once_their_ticket_is_completed() -> None:
    manager = books()
    sequence = holey(manager)
    report = manager.defragment("max_id", 3)
    assert (report.planned, report.left, report.stuck, report.held, len(report)) == (4, 0, 0, 0, 4)
    decision = manager.take_decision()
    assert [kind for kind, _ in decision.transfers()] == ["move"]
    assert decision.move[0].ids.tolist() == [[4, 0], [5, 1], [6, 2], [7, 3]]
    assert manager.block_table(sequence).tolist() == [4, 5, 6, 7]
    assert manager.num_free() == 8
    manager.complete(decision.ticket)
    assert manager.block_table(sequence).tolist() == [0, 1, 2, 3]
    assert manager.num_free() == 12
    assert manager.slot_mapping(sequence, 3, 5).tolist() == [3, 4]
    assert manager.stats().moved_blocks == 4
    manager.check()


def test_the_budget_takes_the_highest_blocks_first_and_says_what_is_left() -> None:
    manager = books()
    sequence = holey(manager)
    report = manager.defragment("free_tail", 12, max_moves=1)
    assert repr(report) == "DefragReport(planned=1, left=3, stuck=0, held=0)"
    end(manager)
    assert manager.block_table(sequence).tolist() == [4, 5, 6, 0]


def test_a_failed_move_leaves_its_block_where_it_was() -> None:
    manager = books()
    sequence = holey(manager)
    manager.defragment("max_id", 3)
    decision = manager.take_decision()
    lost = manager.fail(decision.ticket, [Pairs("device", "device", np.array([[5, 1]]))])
    assert lost.tolist() == []
    assert manager.block_table(sequence).tolist() == [0, 5, 2, 3]
    assert (manager.stats().moved_blocks, manager.stats().failed_moves) == (3, 1)
    assert manager.num_free() == 12
    manager.check()


def test_a_sequence_that_ends_meanwhile_gives_both_blocks_back() -> None:
    manager = books()
    sequence = holey(manager)
    manager.defragment("max_id", 3)
    decision = manager.take_decision()
    manager.free([sequence])
    manager.complete(decision.ticket)
    assert manager.num_free() == 16
    assert manager.stats().cancelled_moves == 4
    manager.check()


def test_cached_blocks_are_found_where_they_have_moved() -> None:
    manager = books(prefix_caching=True)
    tokens = list(range(3 * SIZE + 1))
    other, _ = manager.allocate_prompts([[99] * 5])
    handles, _ = manager.allocate_prompts([tokens])
    end(manager)
    manager.mark_computed(handles)
    manager.free(np.concatenate([handles, other]))
    assert manager.defragment("max_id", 2).planned == 2
    end(manager)
    handles, cached = manager.allocate_prompts([tokens])
    assert cached.tolist() == [3 * SIZE]
    assert sorted(manager.block_table(handles[0]).tolist()[:3]) == [0, 1, 2]


@pytest.mark.parametrize(("goal", "number"), [("tidy", 1), ("empty_pages", 0), ("max_id", -1)])
def test_goals_that_are_none_are_refused(goal: str, number: int) -> None:
    with pytest.raises(InvalidArgumentError):
        books().defragment(goal, number)  # type: ignore[arg-type]


def test_reports_compare_by_their_numbers() -> None:
    assert isinstance(books().defragment("dense", 0), DefragReport)
    assert books().defragment("dense", 0) == books().defragment("max_id", 3)
