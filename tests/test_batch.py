"""`append` with a block table: an array of the caller's, kept from step to step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError

BLOCK = 4


def manager(device: int = 32, host: int = 8, **options: bool) -> BlockManager:
    return BlockManager(block_size=BLOCK, device_blocks=device, host_blocks=host, watermark=0.0, **options)


def settle(books: BlockManager) -> None:
    books.complete(books.take_decision().ticket)


def started(books: BlockManager, *lengths: int) -> np.ndarray:
    handles = books.allocate(counts=list(lengths))
    settle(books)
    return handles


def assert_right(books: BlockManager, handles: np.ndarray, tables: np.ndarray) -> None:
    expected = np.zeros_like(tables[: len(handles)])
    books.block_tables(handles, expected)
    assert np.array_equal(tables[: len(handles)], expected)
    books.check()


def test_append_writes_slots_and_what_has_changed_of_the_tables():
    books = manager()
    handles, tables, slots = started(books, 3, 8), np.full((3, 6), -1, np.int32), np.full(2, -1)
    books.append(handles, block_tables=tables, out=slots)
    assert tables.tolist() == [[0] * 6, [1, 2, 3, 0, 0, 0], [-1] * 6]
    assert slots.tolist() == [3, 3 * BLOCK]
    books.append(handles, block_tables=tables, out=slots)
    assert slots.tolist() == [4 * BLOCK, 3 * BLOCK + 1]
    assert_right(books, handles, tables)


def test_append_with_a_table_gives_the_slots_of_append_alone():
    alone, together = manager(device=64), manager(device=64)
    handles, tables = started(alone, 3, 8, 13), np.zeros((3, 12), np.int32)
    started(together, 3, 8, 13)
    for counts, lookahead in ((1, 0), ([1, 3, 2], 0), (2, 1), ([0, 4, 1], 5), (1, 0), (1, 0)):
        slots = alone.append(handles, counts, lookahead=lookahead)
        assert together.append(handles, counts, lookahead=lookahead, block_tables=tables).tolist() == slots.tolist()
        assert_right(together, handles, tables)


def test_a_fork_and_the_copy_on_write_show():
    books = manager()
    handles, tables = started(books, 6), np.zeros((2, 4), np.int32)
    both = np.concatenate([handles, books.fork(int(handles[0]))])
    settle(books)
    assert books.append(handles, block_tables=tables).tolist() == [2 * BLOCK + 2]
    assert_right(books, handles, tables)
    books.append(both, block_tables=tables)
    assert_right(books, both, tables)


def test_a_merge_of_prefixes_shows_at_the_next_step():
    books = manager(prefix_caching=True)
    prompt = np.arange(9, dtype=np.uint32)
    handles, _ = allocate_prompts(books, [prompt, prompt])
    tables = np.zeros((2, 4), np.int32)
    books.append(handles, block_tables=tables)
    assert tables[0, 0] != tables[1, 0]
    settle(books)
    books.mark_computed(handles)
    books.append(handles, block_tables=tables)
    assert tables[0, :2].tolist() == tables[1, :2].tolist()
    assert_right(books, handles, tables)


def test_a_sequence_that_was_swapped_comes_back_right():
    books = manager()
    handles, tables = started(books, 6, 9), np.zeros((2, 6), np.int32)
    books.append(handles, block_tables=tables)
    settle(books)
    books.swap_out(handles[:1])
    settle(books)
    before = tables.tolist()
    with pytest.raises(SequenceStateError, match="is in the host tier"):
        books.append(handles, block_tables=tables)
    assert tables.tolist() == before
    books.allocate(counts=[2])
    books.swap_in(handles[:1])
    settle(books)
    books.append(handles, block_tables=tables)
    assert_right(books, handles, tables)


def test_a_shorter_sequence_may_move_to_a_narrower_table():
    books = manager()
    handles, wide, narrow = started(books, 30), np.zeros((1, 12), np.int32), np.zeros((1, 3), np.int32)
    books.append(handles, block_tables=wide)
    settle(books)
    books.truncate(int(handles[0]), 5)
    books.block_tables(handles, narrow)
    books.append(handles, block_tables=narrow)
    assert_right(books, handles, narrow)


def test_without_blocks_for_all_nothing_changes():
    books = manager(device=4)
    handles, tables = started(books, 3, 8), np.zeros((2, 4), np.int32)
    books.allocate(counts=[4])
    before = (tables.tolist(), [books.num_tokens(int(handle)) for handle in handles])
    with pytest.raises(OutOfBlocksError):
        books.append(handles, block_tables=tables)
    assert (tables.tolist(), [books.num_tokens(int(handle)) for handle in handles]) == before
    settle(books)
    books.swap_out(handles[:1])  # the tokens that it did not get do not hold it back
    books.check()


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
    books = manager()
    with pytest.raises(InvalidArgumentError):
        books.append(started(books, 3, 8), block_tables=tables)


def test_a_torch_tensor_is_written_through_its_numpy_view():
    books = manager()
    tables = torch.full((2, 4), -1, dtype=torch.int32)
    slots = books.append(books.allocate(counts=[3, 8]), block_tables=tables.numpy())
    assert tables.tolist() == [[0, 0, 0, 0], [1, 2, 3, 0]]
    assert slots.tolist() == [3, 3 * BLOCK]


def test_append_keeps_a_block_table_up_to_date():
    books = manager(device=64)
    handles = books.allocate(counts=[3, 8, 13])
    settle(books)
    tables = np.full((4, 12), -1, dtype=np.int32)
    for counts in (9, 1, 1, 2, [3, 0, 1]):
        books.append(handles, counts, block_tables=tables)
        shown = np.count_nonzero(tables[:3] >= 0, axis=1)
        assert all(shown == 12) or counts == 1
    expected = np.zeros((3, 12), dtype=np.int32)
    books.block_tables(handles, expected)
    assert np.array_equal(tables[:3], expected)
    assert (tables[3] == -1).all()


def test_append_with_a_table_that_is_too_small_changes_nothing():
    books = manager()
    handles = books.allocate(counts=[3, 8])
    settle(books)
    for bad in (np.zeros((1, 4), dtype=np.int32), np.zeros((2, 2), dtype=np.int32), np.zeros((2, 4))):
        with pytest.raises(InvalidArgumentError):
            books.append(handles, block_tables=bad)
    assert [books.num_tokens(int(handle)) for handle in handles] == [3, 8]
    books.check()
