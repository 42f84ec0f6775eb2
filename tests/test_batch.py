"""`DecodeBatch`, and `append` with a block table: arrays of the caller's, kept from step to step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blockyard import (
    BlockManager,
    DecodeBatch,
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownSequenceError,
)

BLOCK = 4


def manager(device: int = 32, host: int = 8, **options: bool) -> BlockManager:
    return BlockManager(block_size=BLOCK, device_blocks=device, host_blocks=host, watermark=0.0, **options)


def settle(books: BlockManager) -> None:
    books.complete(books.take_decision().ticket)


def bound(books: BlockManager, *lengths: int, rows: int = 4, columns: int = 6) -> tuple[DecodeBatch, list[int]]:
    handles = [int(handle) for handle in books.allocate(list(lengths))]
    settle(books)
    batch = DecodeBatch(books, np.full((rows, columns), -1, dtype=np.int32), np.full(rows * 4, -1))
    assert batch.add(handles) == 0
    return batch, handles


def assert_right(books: BlockManager, batch: DecodeBatch) -> None:
    rows = len(batch)
    expected = np.zeros_like(batch.block_tables[:rows])
    books.block_tables(batch.sequences, expected)
    assert np.array_equal(batch.block_tables[:rows], expected)
    books.check()


# ---- the batch object ----


def test_a_batch_writes_tables_and_slots_step_by_step():
    books = manager()
    batch, (a, b) = bound(books, 3, 8)
    assert batch.block_tables[:3].tolist() == [[0] * 6, [1, 2, 0, 0, 0, 0], [0] * 6]
    assert batch.append() == 2
    assert batch.slots[:3].tolist() == [3, 3 * BLOCK, -1]
    assert batch.append() == 2
    assert batch.slots[:2].tolist() == [4 * BLOCK, 3 * BLOCK + 1]
    assert [books.num_tokens(handle) for handle in (a, b)] == [5, 10]
    assert_right(books, batch)


def test_a_batch_appends_as_the_books_alone_would():
    alone, together = manager(device=64), manager(device=64)
    handles = alone.allocate([3, 8, 13])
    settle(alone)
    batch, _ = bound(together, 3, 8, 13, columns=12)
    for counts, lookahead in ((1, 0), ([1, 3, 2], 0), (2, 1), ([0, 4, 1], 5), (1, 0), (1, 0)):
        slots = alone.append(handles, counts, lookahead=lookahead)
        assert batch.append(counts, lookahead=lookahead) == len(slots)
        assert batch.slots[: len(slots)].tolist() == slots.tolist()
        assert_right(together, batch)


def test_a_removed_row_is_taken_by_the_last():
    books = manager()
    batch, (a, b, c) = bound(books, 3, 8, 5)
    assert batch.remove(0) == 2
    assert batch.sequences.tolist() == [c, b]
    assert batch.block_tables[2].tolist() == [0] * 6
    assert batch.remove(1) is None
    assert batch.add([a]) == 1
    assert (batch.find(a), len(batch)) == (1, 2)
    batch.append()
    assert_right(books, batch)


def test_a_fork_and_the_copy_on_write_show():
    books = manager()
    batch, (a,) = bound(books, 6)
    child = int(books.fork(a)[0])
    settle(books)
    batch.append()
    assert batch.slots[0] == 2 * BLOCK + 2
    assert_right(books, batch)
    batch.add([child])
    batch.append()
    assert_right(books, batch)


def test_a_merge_of_prefixes_shows_at_the_next_step():
    books = manager(prefix_caching=True)
    prompt = np.arange(9, dtype=np.uint32)
    handles, _ = books.allocate_prompts([prompt, prompt])
    batch = DecodeBatch(books, np.zeros((2, 4), dtype=np.int32), np.zeros(2, dtype=np.int64))
    batch.add(handles)
    settle(books)
    books.mark_computed(handles)
    batch.append()
    assert batch.block_tables[0, :2].tolist() == batch.block_tables[1, :2].tolist()
    assert_right(books, batch)


def test_a_sequence_that_was_swapped_comes_back_right():
    books = manager()
    batch, (a, _) = bound(books, 6, 9)
    books.swap_out([a])
    settle(books)
    before = batch.slots.tolist()
    for call in (batch.append, batch.refresh):
        with pytest.raises(SequenceStateError, match="is in the host tier"):
            call()
    assert batch.slots.tolist() == before
    books.allocate([2])
    books.swap_in([a])
    settle(books)
    batch.refresh()
    assert_right(books, batch)
    batch.append()
    assert_right(books, batch)


def test_a_sequence_freed_behind_its_back_is_noticed():
    books = manager()
    batch, (a, b) = bound(books, 3, 7)
    batch.append()
    books.free([b])
    books.allocate([7])
    with pytest.raises(UnknownSequenceError):
        batch.append()
    assert books.num_tokens(a) == 4
    batch.remove(batch.find(b))
    assert batch.append() == 1
    assert_right(books, batch)


def test_a_batch_without_blocks_for_all_changes_nothing():
    books = manager(device=4)
    batch, (a, b) = bound(books, 3, 8)
    books.allocate([4])
    before = (batch.block_tables.tolist(), [books.num_tokens(handle) for handle in (a, b)])
    with pytest.raises(OutOfBlocksError):
        batch.append()
    assert (batch.block_tables.tolist(), [books.num_tokens(handle) for handle in (a, b)]) == before
    settle(books)
    books.swap_out([a])  # not held back by the tokens that it did not get
    books.check()


def test_rows_and_sequences_that_do_not_fit_are_refused():
    books = manager()
    batch, (a, _) = bound(books, 3, 8, rows=2, columns=3)
    other = int(books.allocate([1])[0])
    for bad, match in (([other], "number of rows"), ([a], "number of rows")):
        with pytest.raises(InvalidArgumentError, match=match):
            batch.add(bad)
    batch.remove(0)
    with pytest.raises(InvalidArgumentError, match="named twice"):
        batch.add(batch.sequences)
    with pytest.raises(InvalidArgumentError, match="width"):
        batch.add(books.allocate([13]))
    with pytest.raises(InvalidArgumentError, match="width"):
        batch.append(5)
    with pytest.raises(InvalidArgumentError, match="number of slots"):
        batch.append(9)
    with pytest.raises(InvalidArgumentError, match="row of the batch"):
        batch.remove(1)
    with pytest.raises(UnknownSequenceError):
        batch.find(a)
    assert_right(books, batch)


@pytest.mark.parametrize(
    ("tables", "slots"),
    [
        (np.zeros((2, 2), dtype=np.int64), np.zeros(2, dtype=np.int64)),
        (np.zeros((2, 4), dtype=np.int32)[:, ::2], np.zeros(2, dtype=np.int64)),
        (np.zeros((2, 2), dtype=np.int32), np.zeros(2, dtype=np.int32)),
        ([[0, 0]], np.zeros(2, dtype=np.int64)),
    ],
    ids=["tables of int64", "tables with gaps", "slots of int32", "a list"],
)
def test_arrays_of_a_wrong_kind_are_refused(tables: object, slots: object):
    with pytest.raises(InvalidArgumentError):
        DecodeBatch(manager(), tables, slots)


def test_arrays_that_cannot_be_written_or_overlap_are_refused():
    tables, slots = np.zeros((2, 2), dtype=np.int32), np.zeros(2, dtype=np.int64)
    slots.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        DecodeBatch(manager(), tables, slots)
    memory = np.zeros(4, dtype=np.int64)
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        DecodeBatch(manager(), memory.view(np.int32).reshape(2, 4), memory[:2])


def test_torch_tensors_are_written_through_their_numpy_view():
    books = manager()
    handles = books.allocate([3, 8])
    tables, slots = torch.full((2, 4), -1, dtype=torch.int32), torch.full((2,), -1)
    batch = DecodeBatch(books, tables.numpy(), slots.numpy())
    batch.add(handles)
    batch.append()
    assert tables.tolist() == [[0, 0, 0, 0], [1, 2, 3, 0]]
    assert slots.tolist() == [3, 3 * BLOCK]


# ---- append with a block table ----


def test_append_keeps_a_block_table_up_to_date():
    books = manager(device=64)
    handles = books.allocate([3, 8, 13])
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
    handles = books.allocate([3, 8])
    settle(books)
    for bad in (np.zeros((1, 4), dtype=np.int32), np.zeros((2, 2), dtype=np.int32), np.zeros((2, 4))):
        with pytest.raises(InvalidArgumentError):
            books.append(handles, block_tables=bad)
    assert [books.num_tokens(int(handle)) for handle in handles] == [3, 8]
    books.check()
