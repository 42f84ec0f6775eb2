"""Moves of a manager's own blocks, as Python sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from prompts import allocate_prompts

from blockyard import BlockManager, BlockyardError, CacheGroup, Pairs
from blockyard.errors import InvalidArgumentError
from blockyard.types import DefragReport

SIZE = 4


def new_manager(device: int = 16, **options: bool) -> BlockManager:
    return BlockManager(block_size=SIZE, device_blocks=device, watermark=0.0, **options)  # type: ignore[arg-type]


def end(manager: BlockManager) -> None:
    manager.complete(manager.take_decision().ticket)
    manager.check()


def holey(manager: BlockManager) -> int:
    """A sequence in blocks 4 to 7, and holes before them."""
    first, second = manager.allocate(counts=[4 * SIZE, 4 * SIZE])
    end(manager)
    manager.free([first])
    return int(second)


def test_blocks_move_once_their_ticket_is_completed() -> None:
    manager = new_manager()
    sequence = holey(manager)
    report = manager.defrag.run("max_id", 3)
    assert (report.planned, report.left, report.stuck, report.held, report.dropped) == (4, 0, 0, 0, 0)
    assert len(report) == 4
    decision = manager.take_decision()
    assert [kind for kind, _ in decision.transfers()] == ["move"]
    assert decision.move[0].ids.tolist() == [[4, 0], [5, 1], [6, 2], [7, 3]]
    assert manager.block_table(sequence).tolist() == [4, 5, 6, 7]
    assert manager.pool().num_free == 8
    manager.complete(decision.ticket)
    assert manager.block_table(sequence).tolist() == [0, 1, 2, 3]
    assert manager.pool().num_free == 12
    assert manager.slot_mapping(sequence, 3, 5).tolist() == [3, 4]
    assert manager.stats().moved_blocks == 4
    manager.check()


def test_the_budget_takes_the_highest_blocks_first_and_says_what_is_left() -> None:
    manager = new_manager()
    sequence = holey(manager)
    report = manager.defrag.run("free_tail", 12, max_moves=1)
    assert repr(report) == "DefragReport(planned=1, left=3, stuck=0, held=0, dropped=0)"
    end(manager)
    assert manager.block_table(sequence).tolist() == [4, 5, 6, 0]


def test_a_failed_move_leaves_its_block_where_it_was() -> None:
    manager = new_manager()
    sequence = holey(manager)
    manager.defrag.run("max_id", 3)
    decision = manager.take_decision()
    lost = manager.complete(decision.ticket, [Pairs("device", "device", np.array([[5, 1]]))])
    assert lost.tolist() == []
    assert manager.block_table(sequence).tolist() == [0, 5, 2, 3]
    assert (manager.stats().moved_blocks, manager.stats().failed_moves) == (3, 1)
    assert manager.pool().num_free == 12
    manager.check()


def test_a_sequence_that_ends_meanwhile_gives_both_blocks_back() -> None:
    manager = new_manager()
    sequence = holey(manager)
    manager.defrag.run("max_id", 3)
    decision = manager.take_decision()
    manager.free([sequence])
    manager.complete(decision.ticket)
    assert manager.pool().num_free == 16
    assert manager.stats().cancelled_moves == 4
    manager.check()


def test_cached_blocks_are_found_where_they_have_moved() -> None:
    manager = new_manager(prefix_caching=True)
    tokens = list(range(3 * SIZE + 1))
    other, _ = allocate_prompts(manager, [[99] * 5])
    handles, _ = allocate_prompts(manager, [tokens])
    end(manager)
    manager.mark_computed(handles)
    manager.free(np.concatenate([handles, other]))
    assert manager.defrag.run("max_id", 2).planned == 2
    end(manager)
    handles, cached = allocate_prompts(manager, [tokens])
    assert cached.tolist() == [3 * SIZE]
    assert sorted(manager.block_table(handles[0]).tolist()[:3]) == [0, 1, 2]


def cached_below(manager: BlockManager) -> int:
    """Three cached blocks that nothing uses, and a sequence in the two blocks after them."""
    prompts, _ = allocate_prompts(manager, [list(range(3 * SIZE)), [99] * 2 * SIZE])
    end(manager)
    manager.mark_computed(prompts)
    manager.free(prompts[:1])
    return int(prompts[1])


def test_cached_blocks_in_the_way_are_dropped_where_they_may_be() -> None:
    manager = new_manager(5, prefix_caching=True)
    sequence = cached_below(manager)
    assert manager.defrag.run("max_id", 1).stuck == 3
    report = manager.defrag.run("max_id", 1, cached="drop")
    assert (report.planned, report.stuck, report.dropped) == (2, 0, 3)
    end(manager)
    assert manager.block_table(sequence).tolist() == [0, 1]
    assert manager.prefix.lookup(list(range(3 * SIZE + 1))).tokens == 0


def between_cached(manager: BlockManager) -> int:
    """A sequence in blocks 0, 3, 4 and 7; 1 and 2, 5 and 6 are two cached prompts."""
    sequence, _ = manager.allocate(counts=[SIZE, 0])
    prompts = []
    for n in (1, 2):
        prompts += allocate_prompts(manager, [[n] * 2 * SIZE])[0].tolist()
        manager.append([sequence], SIZE * (3 - n))
        end(manager)
    end(manager)
    manager.mark_computed(prompts)
    manager.free(prompts)
    return int(sequence)


def hits(manager: BlockManager) -> list[int]:
    return [manager.prefix.lookup([n] * (2 * SIZE + 1)).tokens // SIZE for n in (1, 2)]


def test_a_table_becomes_contiguous_in_a_pool_that_is_full_of_cached_blocks() -> None:
    manager = new_manager(8, prefix_caching=True)
    sequence = between_cached(manager)
    assert (manager.block_table(sequence).tolist(), hits(manager)) == ([0, 3, 4, 7], [2, 2])
    assert len(manager.defrag.run("contiguous", 1)) == 0
    report = manager.defrag.run("contiguous", 1, cached="drop")
    assert (report.planned, report.dropped) == (2, 2)
    end(manager)
    assert manager.defrag.fragmentation().runs == 1
    assert hits(manager) == [1, 0]


def test_a_cached_block_that_is_exchanged_is_found_again_once_it_has_landed() -> None:
    manager = new_manager(10, prefix_caching=True)
    sequence = between_cached(manager)
    report = manager.defrag.run("contiguous", 1, cached="exchange")
    assert (report.planned, report.dropped) == (4, 0)
    assert hits(manager) == [1, 0]
    decision = manager.take_decision()
    pairs = dict(decision.move[0].ids.tolist())
    chains = [block for block in pairs if block in pairs.values()]
    assert len(chains) == 2
    assert {pairs[block] for block in chains} == {8, 9}
    manager.complete(decision.ticket)
    assert manager.defrag.fragmentation().runs == 1
    assert hits(manager) == [2, 2]
    assert manager.stats().moved_blocks == 4
    assert len(manager.block_table(sequence)) == 4


def test_what_a_failed_exchange_was_to_keep_is_lost_and_the_table_stays() -> None:
    manager = new_manager(10, prefix_caching=True)
    sequence = between_cached(manager)
    before = manager.block_table(sequence).tolist()
    manager.defrag.run("contiguous", 1, cached="exchange")
    decision = manager.take_decision()
    assert manager.complete(decision.ticket, decision.move).size == 0
    assert manager.block_table(sequence).tolist() == before
    assert hits(manager) == [1, 0]
    manager.check()


def test_an_exchange_that_is_not_needed_any_more_leaves_the_cached_block_where_it_is() -> None:
    manager = new_manager(10, prefix_caching=True)
    sequence = between_cached(manager)
    manager.defrag.run("contiguous", 1, cached="exchange")
    manager.free([sequence])
    assert hits(manager) == [1, 0]
    assert not manager.take_decision().move
    assert hits(manager) == [2, 2]


def test_a_cached_block_that_moves_keeps_its_turn_to_be_evicted() -> None:
    manager = new_manager(8, prefix_caching=True)
    first, _ = manager.allocate(counts=[3 * SIZE, 0])
    old, _ = allocate_prompts(manager, [[1] * (SIZE + 1)])
    young, _ = allocate_prompts(manager, [[2] * (SIZE + 1)])
    end(manager)
    for handles in (old, young):
        manager.mark_computed(handles)
        manager.free(handles)
    manager.free([first])
    manager.defrag.run("max_id", 1)
    end(manager)
    manager.free(manager.allocate(counts=[7 * SIZE]))
    assert [manager.prefix.lookup([n] * (SIZE + 1)).tokens for n in (1, 2)] == [0, SIZE]


def test_fragmentation_says_how_blocks_lie() -> None:
    manager = new_manager()
    assert repr(manager.defrag.fragmentation()) == ("Fragmentation(max_id=None, gap=0, holes=16, tables=0, runs=0)")
    holey(manager)
    found = manager.defrag.fragmentation()
    assert (found.max_id, found.gap, found.holes) == (7, 4, 12)
    assert (found.tables, found.runs) == (1, 1)
    manager.defrag.run("free_tail", 9, max_moves=2)
    end(manager)
    assert manager.defrag.fragmentation().runs == 2


def test_what_becomes_of_cached_blocks_has_a_name() -> None:
    with pytest.raises(InvalidArgumentError, match='cached is "burn", must be "move", "drop" or "exchange"'):
        new_manager().defrag.run("dense", 0, cached="burn")  # type: ignore[arg-type]


@pytest.mark.parametrize(("goal", "number"), [("tidy", 1), ("contiguous", 0), ("max_id", -1)])
def test_goals_that_are_none_are_refused(goal: str, number: int) -> None:
    with pytest.raises(InvalidArgumentError):
        new_manager().defrag.run(goal, number)  # type: ignore[arg-type]


def test_reports_compare_by_their_numbers() -> None:
    assert isinstance(new_manager().defrag.run("dense", 0), DefragReport)
    assert new_manager().defrag.run("dense", 0) == new_manager().defrag.run("max_id", 3)


def scattered(manager: BlockManager) -> list[int]:
    """Two sequences, each in two runs of two blocks, and one in two neighbours; blocks 0 and 1 are free."""
    handles = manager.allocate(counts=[2 * SIZE] * 4)
    manager.append(handles[1:3], 2 * SIZE)
    end(manager)
    manager.free(handles[:1])
    assert tables(manager, handles[1:]) == [[2, 3, 8, 9], [4, 5, 10, 11], [6, 7]]
    return [int(handle) for handle in handles[1:]]


def tables(manager: BlockManager, handles: Iterable[int]) -> list[list[int]]:
    return [manager.block_table(handle).tolist() for handle in handles]


def test_a_scattered_sequence_becomes_one_run_once_its_ticket_is_completed() -> None:
    manager = new_manager()
    handles = scattered(manager)
    report = manager.defrag.run("contiguous", 1, sequences=handles[1:2])
    assert (report.planned, report.left, report.held) == (4, 0, 0)
    decision = manager.take_decision()
    assert decision.move[0].ids.tolist() == [[4, 12], [5, 13], [10, 14], [11, 15]]
    assert tables(manager, handles) == [[2, 3, 8, 9], [4, 5, 10, 11], [6, 7]]
    manager.complete(decision.ticket)
    manager.check()
    assert tables(manager, handles) == [[2, 3, 8, 9], [12, 13, 14, 15], [6, 7]]


def test_all_sequences_on_the_device_are_put_in_order_where_none_are_named() -> None:
    manager = new_manager()
    scattered(manager)
    assert manager.defrag.fragmentation().runs == 5
    while manager.defrag.run("contiguous", 1):
        end(manager)
    assert (manager.defrag.fragmentation().runs, manager.defrag.fragmentation().tables) == (3, 3)


def test_tables_of_all_groups_are_put_in_order_without_their_null_blocks() -> None:
    manager = BlockManager(
        block_size=SIZE,
        device_blocks=32,
        watermark=0.0,
        groups=[CacheGroup.full_attention(), CacheGroup.sliding_window(2 * SIZE)],
    )
    handles = manager.allocate(counts=[SIZE, SIZE])
    for _ in range(3):
        manager.append(handles, SIZE)
        end(manager)
    end(manager)
    assert manager.defrag.fragmentation().runs > 4
    while manager.defrag.run([("contiguous", 1)], sequences=handles):
        end(manager)
    assert (manager.defrag.fragmentation().runs, manager.defrag.fragmentation().tables) == (4, 4)


def test_of_two_goals_that_contradict_each_other_the_first_is_met() -> None:
    manager = new_manager()
    scattered(manager)
    # Four neighbours are free from block 12 on only.
    assert manager.defrag.run([("max_id", 11), ("contiguous", 1)]).planned == 0
    while manager.defrag.run([("contiguous", 1), ("max_id", 11)]):
        end(manager)
    found = manager.defrag.fragmentation()
    assert (found.runs, found.tables, found.max_id) == (3, 3, 15)
    while manager.defrag.run([("max_id", 11), ("contiguous", 1)]):
        end(manager)
    assert manager.defrag.fragmentation().max_id == 11


def test_the_budget_counts_bytes_too() -> None:
    manager = new_manager()
    sequence = holey(manager)
    report = manager.defrag.run("max_id", 3, max_bytes=2 * 4096 + 4095, block_bytes=4096)
    assert (report.planned, report.left) == (2, 2)
    end(manager)
    assert manager.block_table(sequence).tolist() == [4, 5, 0, 1]
    assert manager.defrag.run("max_id", 3, max_moves=1, max_bytes=1 << 40, block_bytes=4096).planned == 1
    assert manager.defrag.run("max_id", 3, max_bytes=0, block_bytes=1).planned == 0


def test_sequences_that_run_now_move_last() -> None:
    manager = new_manager()
    old, resting, running = manager.allocate(counts=[4 * SIZE, 2 * SIZE, SIZE])
    for _ in range(3):
        end(manager)
    manager.append([running], SIZE)
    end(manager)
    manager.free([old])
    assert tables(manager, [resting, running]) == [[4, 5], [6, 7]]
    manager.defrag.run("max_id", 3, max_moves=2)
    end(manager)
    assert tables(manager, [resting, running]) == [[0, 1], [6, 7]]
    manager.defrag.run("max_id", 3, max_moves=2)
    end(manager)
    assert tables(manager, [resting, running]) == [[0, 1], [2, 3]]


def test_a_slack_lets_a_goal_be_missed_by_so_much_until_it_is_missed_by_more() -> None:
    manager = new_manager()
    holey(manager)
    assert manager.defrag.run([("max_id", 3, 4)]).planned == 0
    goals = [("max_id", 3, 3)]
    for left in (3, 2, 1, 0):
        report = manager.defrag.run(goals, max_moves=1)
        assert (report.planned, report.left) == (1, left)
        end(manager)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, away: m.defrag.run("max_id"), 'number is None, must be an int for the goal "max_id"'),
        (lambda m, away: m.defrag.run([("max_id", 3)], 4), "number is 4, must be None with a list of goals"),
        (lambda m, away: m.defrag.run([("max_id",)]), r"a goal is tuple, must be \(name, number\)"),
        (lambda m, away: m.defrag.run([("max_id", 3), ("contiguous", 0)]), "runs is 0, must be at least 1"),
        (
            lambda m, away: m.defrag.run("max_id", 3, max_bytes=64),
            "block_bytes is 0, must be at least 1 for max_bytes of 64",
        ),
        (
            lambda m, away: m.defrag.run("contiguous", 1, sequences=[away + 7]),
            "is unknown: this manager never returned that handle",
        ),
        (
            lambda m, away: m.defrag.run("max_id", 3, sequences=[away]),
            "is in the host tier, the call needs it in device",
        ),
    ],
)
def test_a_call_that_is_refused_changes_nothing(call: Callable[[BlockManager, int], object], message: str) -> None:
    manager = BlockManager(block_size=SIZE, device_blocks=16, host_blocks=4, watermark=0.0)
    holey(manager)
    away = int(manager.allocate(counts=[SIZE])[0])
    end(manager)
    manager.swap_out([away])
    end(manager)

    def seen() -> list[object]:
        free = [manager.pool(tier).free_ids().tolist() for tier in ("device", "host", "external")]
        return [free, manager.defrag.fragmentation(), manager.stats(), manager.block_table(away).tolist()]

    before = seen()
    with pytest.raises(BlockyardError, match=message):
        call(manager, away)
    assert seen() == before
    assert not manager.take_decision().move
