"""`append` with a block table: an array of the caller's, kept from step to step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError

BLOCK = 4


def new_manager(device: int = 32, host: int = 8, **options: bool) -> BlockManager:
    return BlockManager(block_size=BLOCK, device_blocks=device, host_blocks=host, watermark=0.0, **options)


def settle(manager: BlockManager) -> None:
    manager.complete(manager.take_decision().ticket)


def started(manager: BlockManager, *lengths: int) -> np.ndarray:
    handles = manager.allocate(counts=list(lengths))
    settle(manager)
    return handles


def assert_right(manager: BlockManager, handles: np.ndarray, tables: np.ndarray) -> None:
    expected = np.zeros_like(tables[: len(handles)])
    manager.block_tables(handles, expected)
    assert np.array_equal(tables[: len(handles)], expected)
    manager.check()


def test_append_writes_slots_and_what_has_changed_of_the_tables():
    manager = new_manager()
    handles, tables, slots = started(manager, 3, 8), np.full((3, 6), -1, np.int32), np.full(2, -1)
    manager.append(handles, block_tables=tables, out=slots)
    assert tables.tolist() == [[0] * 6, [1, 2, 3, 0, 0, 0], [-1] * 6]
    assert slots.tolist() == [3, 3 * BLOCK]
    manager.append(handles, block_tables=tables, out=slots)
    assert slots.tolist() == [4 * BLOCK, 3 * BLOCK + 1]
    assert_right(manager, handles, tables)


def test_append_with_a_table_gives_the_slots_of_append_alone():
    alone, together = new_manager(device=64), new_manager(device=64)
    handles, tables = started(alone, 3, 8, 13), np.zeros((3, 12), np.int32)
    others = started(together, 3, 8, 13)
    for counts, lookahead in ((1, 0), ([1, 3, 2], 0), (2, 1), ([0, 4, 1], 5), (1, 0), (1, 0)):
        slots = alone.append(handles, counts, lookahead=lookahead)
        assert together.append(others, counts, lookahead=lookahead, block_tables=tables).tolist() == slots.tolist()
        assert_right(together, others, tables)


def test_a_fork_and_the_copy_on_write_show():
    manager = new_manager()
    handles, tables = started(manager, 6), np.zeros((2, 4), np.int32)
    both = np.concatenate([handles, manager.fork(int(handles[0]), 1)])
    settle(manager)
    assert manager.append(handles, block_tables=tables).tolist() == [2 * BLOCK + 2]
    assert_right(manager, handles, tables)
    manager.append(both, block_tables=tables)
    assert_right(manager, both, tables)


def test_a_merge_of_prefixes_shows_at_the_next_step():
    manager = new_manager(prefix_caching=True)
    prompt = np.arange(9, dtype=np.uint32)
    handles, _ = allocate_prompts(manager, [prompt, prompt])
    tables = np.zeros((2, 4), np.int32)
    manager.append(handles, block_tables=tables)
    assert tables[0, 0] != tables[1, 0]
    settle(manager)
    manager.mark_computed(handles)
    manager.append(handles, block_tables=tables)
    assert tables[0, :2].tolist() == tables[1, :2].tolist()
    assert_right(manager, handles, tables)


def test_a_sequence_that_was_swapped_comes_back_right():
    manager = new_manager()
    handles, tables = started(manager, 6, 9), np.zeros((2, 6), np.int32)
    manager.append(handles, block_tables=tables)
    settle(manager)
    manager.swap_out(handles[:1])
    settle(manager)
    before = tables.tolist()
    with pytest.raises(SequenceStateError, match="is in the host tier"):
        manager.append(handles, block_tables=tables)
    assert tables.tolist() == before
    manager.allocate(counts=[2])
    manager.swap_in(handles[:1])
    settle(manager)
    manager.append(handles, block_tables=tables)
    assert_right(manager, handles, tables)


def test_a_shorter_sequence_may_move_to_a_narrower_table():
    manager = new_manager()
    handles, wide, narrow = started(manager, 30), np.zeros((1, 12), np.int32), np.zeros((1, 3), np.int32)
    manager.append(handles, block_tables=wide)
    settle(manager)
    manager.truncate(int(handles[0]), 5)
    manager.block_tables(handles, narrow)
    manager.append(handles, block_tables=narrow)
    assert_right(manager, handles, narrow)


def test_without_blocks_for_all_nothing_changes():
    manager = new_manager(device=4)
    handles, tables = started(manager, 3, 8), np.zeros((2, 4), np.int32)
    manager.allocate(counts=[4])
    before = (tables.tolist(), [manager.num_tokens(int(handle)) for handle in handles])
    with pytest.raises(OutOfBlocksError):
        manager.append(handles, block_tables=tables)
    assert (tables.tolist(), [manager.num_tokens(int(handle)) for handle in handles]) == before
    settle(manager)
    manager.swap_out(handles[:1])  # the tokens that it did not get do not hold it back
    manager.check()


@pytest.mark.parametrize(
    "tables",
    [
        np.zeros((2, 2), np.int64),
        np.zeros((2, 4), np.int32)[:, ::2],
        [[0, 0]],
        np.broadcast_to(np.int32(0), (2, 4)),
    ],
    ids=["int64", "with gaps", "a list", "read-only"],
)
def test_tables_of_a_wrong_kind_are_refused(tables: object):
    manager = new_manager()
    with pytest.raises(InvalidArgumentError):
        manager.append(started(manager, 3, 8), block_tables=tables)


def test_a_torch_tensor_is_written_through_its_numpy_view():
    manager = new_manager()
    tables = torch.full((2, 4), -1, dtype=torch.int32)
    slots = manager.append(manager.allocate(counts=[3, 8]), block_tables=tables.numpy())
    assert tables.tolist() == [[0, 0, 0, 0], [1, 2, 3, 0]]
    assert slots.tolist() == [3, 3 * BLOCK]


def test_append_keeps_a_block_table_up_to_date():
    manager = new_manager(device=64)
    handles = manager.allocate(counts=[3, 8, 13])
    settle(manager)
    tables = np.full((4, 12), -1, dtype=np.int32)
    for counts in (9, 1, 1, 2, [3, 0, 1]):
        manager.append(handles, counts, block_tables=tables)
        shown = np.count_nonzero(tables[:3] >= 0, axis=1)
        assert all(shown == 12) or counts == 1
    expected = np.zeros((3, 12), dtype=np.int32)
    manager.block_tables(handles, expected)
    assert np.array_equal(tables[:3], expected)
    assert (tables[3] == -1).all()


def test_append_with_a_table_that_is_too_small_changes_nothing():
    manager = new_manager()
    handles = manager.allocate(counts=[3, 8])
    settle(manager)
    for bad in (np.zeros((1, 4), dtype=np.int32), np.zeros((2, 2), dtype=np.int32), np.zeros((2, 4))):
        with pytest.raises(InvalidArgumentError):
            manager.append(handles, block_tables=bad)
    assert [manager.num_tokens(int(handle)) for handle in handles] == [3, 8]
    manager.check()
