"""Truncation: tokens given up again, and everything that must still be right afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, SequenceStateError, UnknownSequenceError
from blockyard.testing import ReferenceManager

BLOCK = 4


def manager(device: int = 16, host: int = 8, **options: bool) -> BlockManager:
    return BlockManager(block_size=BLOCK, device_blocks=device, host_blocks=host, watermark=0.0, **options)


def settle(books: BlockManager) -> list[list[int]]:
    decision = books.take_decision()
    books.complete(decision.ticket)
    return decision.blocks_to_copy.tolist()


def open_one(books: BlockManager, tokens: int) -> int:
    handle = int(books.allocate(counts=[tokens])[0])
    settle(books)
    return handle


def open_prompt(books: BlockManager, tokens: list[int]) -> tuple[int, int]:
    handles, cached = allocate_prompts(books, [tokens])
    settle(books)
    books.mark_computed(handles)
    return int(handles[0]), int(cached[0])


def test_rejected_tokens_go_with_their_blocks_and_those_of_lookahead():
    books = manager()
    handle = open_one(books, 6)
    books.append([handle], 5, lookahead=6)
    settle(books)
    books.truncate(handle, 7)
    assert (books.num_tokens(handle), books.block_table(handle).tolist()) == (7, [0, 1])
    assert books.pool().num_free == 14
    assert books.append([handle], 2).tolist() == [7, 8]
    books.check()


def test_truncation_to_the_same_length_only_frees_lookahead():
    books = manager()
    handle = open_one(books, 4)
    books.append([handle], 0, lookahead=8)
    settle(books)
    books.truncate(handle, 4)
    assert books.block_table(handle).tolist() == [0]
    books.truncate(handle, 0)
    assert (books.pool().num_free, books.append([handle]).tolist()) == (16, [0])


def test_tokens_that_this_step_writes_cannot_be_taken_back_in_it():
    books = manager()
    handle = open_one(books, 3)
    books.append([handle], 4)
    with pytest.raises(SequenceStateError, match="this step is yet to write"):
        books.truncate(handle, 3)
    settle(books)
    books.truncate(handle, 3)
    books.check()


def test_a_longer_or_an_unknown_sequence_is_refused():
    books = manager()
    handle = open_one(books, 3)
    with pytest.raises(InvalidArgumentError, match="number of tokens to keep is 4, must be at most 3"):
        books.truncate(handle, 4)
    books.free([handle])
    with pytest.raises(UnknownSequenceError):
        books.truncate(handle, 0)


def test_a_shared_block_that_became_partial_is_copied_before_it_is_written():
    books = manager()
    parent = open_one(books, 8)
    child = int(books.fork(parent, 1)[0])
    books.truncate(child, 6)
    assert books.can_append([child]).blocks == 1
    assert books.append([child]).tolist() == [2 * BLOCK + 2]
    assert settle(books) == [[1, 2]]
    assert books.block_table(parent).tolist() == [0, 1]
    books.check()


@pytest.mark.parametrize("make", [BlockManager, ReferenceManager])
def test_a_shared_block_of_which_one_holds_a_part_leaves_once_and_the_longer_one_first(make: type[BlockManager]):
    books = make(block_size=BLOCK, device_blocks=8, host_blocks=1, watermark=0.0)
    parent = open_one(books, 4)
    child = int(books.fork(parent, 1)[0])
    books.truncate(child, 3)
    for handle in (parent, child):
        books.swap_out([handle])
        settle(books)
    assert books.block_table(parent).tolist() == books.block_table(child).tolist() == [0]
    books.check()


def test_a_published_block_that_became_partial_is_copied_and_stays_cached():
    books = manager(prefix_caching=True)
    handle, _ = open_prompt(books, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    books.truncate(handle, 6)
    assert books.append([handle], 2, token_ids=[60, 70]).tolist() == [2 * BLOCK + 2, 2 * BLOCK + 3]
    assert settle(books) == [[1, 2]]
    books.mark_computed([handle])
    assert books.prefix.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9]).tokens == 8
    assert books.prefix.lookup([1, 2, 3, 4, 5, 6, 60, 70, 9]).tokens == 8
    books.check()


def test_keys_are_right_after_a_cut_into_the_last_full_block():
    books = manager(prefix_caching=True)
    handle, _ = open_prompt(books, [1, 2, 3])
    books.append([handle], 3, token_ids=[4, 5, 6])
    settle(books)
    books.truncate(handle, 3)
    books.append([handle], 5, token_ids=[40, 50, 60, 70, 80])
    settle(books)
    books.mark_computed([handle])
    assert books.prefix.lookup([1, 2, 3, 40, 50, 60, 70, 80, 0]).tokens == 8
    assert books.prefix.lookup([1, 2, 3, 4, 5]).tokens == 0


def test_a_cut_further_back_publishes_nothing_more_and_nothing_wrong():
    books = manager(prefix_caching=True)
    handle, _ = open_prompt(books, list(range(1, 14)))
    books.truncate(handle, 5)
    books.append([handle], 3, token_ids=[60, 70, 80])
    settle(books)
    books.mark_computed([handle])
    assert books.prefix.lookup([1, 2, 3, 4, 5, 60, 70, 80, 0]).tokens == 4
    assert books.prefix.lookup([*range(1, 14), 0]).tokens == 12
    books.check()


def test_a_truncated_block_is_parted_from_its_copy_in_the_host():
    books = manager()
    parent = open_one(books, 8)
    child = int(books.fork(parent, 1)[0])
    books.swap_out([parent])
    settle(books)
    books.truncate(child, 6)
    books.append([child], 2)
    settle(books)
    books.swap_in([parent])
    ids = books.take_decision().blocks_to_swap_in
    assert len(ids) == 1  # the first block is still shared, the second is another's now
    assert books.block_table(parent)[0] == books.block_table(child)[0]
    books.check()


def test_a_sequence_in_the_host_can_be_truncated():
    books = manager()
    handle = open_one(books, 9)
    books.swap_out([handle])
    settle(books)
    books.truncate(handle, 2)
    assert (books.pool("host").num_free, books.tier(handle)) == (7, "host")
    books.swap_in([handle])
    settle(books)
    assert books.append([handle]).tolist() == [2]
    books.check()


def test_speculative_decoding_in_step_leaves_the_manager_exact():
    books = manager(device=64, prefix_caching=True)
    rng = np.random.default_rng(0)
    handle, _ = open_prompt(books, list(range(1, 7)))
    tokens = list(range(1, 7))
    for _ in range(60):
        drafted = rng.integers(1, 50, size=4).tolist()
        books.append([handle], 4, token_ids=drafted)
        settle(books)
        accepted = int(rng.integers(0, 5))
        tokens += drafted[:accepted]
        books.truncate(handle, len(tokens))
        books.mark_computed([handle])
        books.check()
    assert books.prefix.lookup([*tokens, 0]).tokens == len(tokens) // BLOCK * BLOCK
