"""Truncation: tokens given up again, and everything that must still be right afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from prompts import allocate_prompts

from blockyard import BlockManager, CacheGroup
from blockyard.errors import InvalidArgumentError, SequenceStateError, UnknownSequenceError
from blockyard.testing import ReferenceManager

BLOCK = 4


def new_manager(device: int = 16, host: int = 8, **options: bool) -> BlockManager:
    return BlockManager(block_size=BLOCK, device_blocks=device, host_blocks=host, watermark=0.0, **options)


def settle(manager: BlockManager) -> list[list[int]]:
    decision = manager.take_decision()
    manager.complete(decision.ticket)
    return decision.blocks_to_copy.tolist()


def open_one(manager: BlockManager, tokens: int) -> int:
    handle = int(manager.allocate(counts=[tokens])[0])
    settle(manager)
    return handle


def open_prompt(manager: BlockManager, tokens: list[int]) -> tuple[int, int]:
    handles, cached = allocate_prompts(manager, [tokens])
    settle(manager)
    manager.mark_computed(handles)
    return int(handles[0]), int(cached[0])


def test_rejected_tokens_go_with_their_blocks_and_those_of_lookahead():
    manager = new_manager()
    handle = open_one(manager, 6)
    manager.append([handle], 5, lookahead=6)
    settle(manager)
    manager.truncate(handle, 7)
    assert (manager.num_tokens(handle), manager.block_table(handle).tolist()) == (7, [0, 1])
    assert manager.pool().num_free == 14
    assert manager.append([handle], 2).tolist() == [7, 8]
    manager.check()


def test_truncation_to_the_same_length_only_frees_lookahead():
    manager = new_manager()
    handle = open_one(manager, 4)
    manager.append([handle], 0, lookahead=8)
    settle(manager)
    manager.truncate(handle, 4)
    assert manager.block_table(handle).tolist() == [0]
    manager.truncate(handle, 0)
    assert (manager.pool().num_free, manager.append([handle]).tolist()) == (16, [0])


def test_tokens_that_this_step_writes_cannot_be_taken_back_in_it():
    manager = new_manager()
    handle = open_one(manager, 3)
    manager.append([handle], 4)
    with pytest.raises(SequenceStateError, match="this step is yet to write"):
        manager.truncate(handle, 3)
    settle(manager)
    manager.truncate(handle, 3)
    manager.check()


def test_a_longer_or_an_unknown_sequence_is_refused():
    manager = new_manager()
    handle = open_one(manager, 3)
    with pytest.raises(InvalidArgumentError, match="num_tokens is 4, must be at most 3"):
        manager.truncate(handle, 4)
    manager.free([handle])
    with pytest.raises(UnknownSequenceError):
        manager.truncate(handle, 0)


def test_a_shared_block_that_became_partial_is_copied_before_it_is_written():
    manager = new_manager()
    parent = open_one(manager, 8)
    child = int(manager.fork(parent, 1)[0])
    manager.truncate(child, 6)
    assert manager.can_append([child]).blocks == 1
    assert manager.append([child]).tolist() == [2 * BLOCK + 2]
    assert settle(manager) == [[1, 2]]
    assert manager.block_table(parent).tolist() == [0, 1]
    manager.check()


@pytest.mark.parametrize("make", [BlockManager, ReferenceManager])
def test_a_shared_block_of_which_one_holds_a_part_leaves_once_and_the_longer_one_first(make: type[BlockManager]):
    manager = make(block_size=BLOCK, device_blocks=8, host_blocks=1, watermark=0.0)
    parent = open_one(manager, 4)
    child = int(manager.fork(parent, 1)[0])
    manager.truncate(child, 3)
    for handle in (parent, child):
        manager.swap_out([handle])
        settle(manager)
    assert manager.block_table(parent).tolist() == manager.block_table(child).tolist() == [0]
    manager.check()


def test_a_published_block_that_became_partial_is_copied_and_stays_cached():
    manager = new_manager(prefix_caching=True)
    handle, _ = open_prompt(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.truncate(handle, 6)
    assert manager.append([handle], 2, token_ids=[60, 70]).tolist() == [2 * BLOCK + 2, 2 * BLOCK + 3]
    assert settle(manager) == [[1, 2]]
    manager.mark_computed([handle])
    assert manager.prefix.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9]).tokens == 8
    assert manager.prefix.lookup([1, 2, 3, 4, 5, 6, 60, 70, 9]).tokens == 8
    manager.check()


def test_keys_are_right_after_a_cut_into_the_last_full_block():
    manager = new_manager(prefix_caching=True)
    handle, _ = open_prompt(manager, [1, 2, 3])
    manager.append([handle], 3, token_ids=[4, 5, 6])
    settle(manager)
    manager.truncate(handle, 3)
    manager.append([handle], 5, token_ids=[40, 50, 60, 70, 80])
    settle(manager)
    manager.mark_computed([handle])
    assert manager.prefix.lookup([1, 2, 3, 40, 50, 60, 70, 80, 0]).tokens == 8
    assert manager.prefix.lookup([1, 2, 3, 4, 5]).tokens == 0


def test_a_cut_further_back_publishes_nothing_more_and_nothing_wrong():
    manager = new_manager(prefix_caching=True)
    handle, _ = open_prompt(manager, list(range(1, 14)))
    manager.truncate(handle, 5)
    manager.append([handle], 3, token_ids=[60, 70, 80])
    settle(manager)
    manager.mark_computed([handle])
    assert manager.prefix.lookup([1, 2, 3, 4, 5, 60, 70, 80, 0]).tokens == 4
    assert manager.prefix.lookup([*range(1, 14), 0]).tokens == 12
    manager.check()


def test_a_truncated_block_is_parted_from_its_copy_in_the_host():
    manager = new_manager()
    parent = open_one(manager, 8)
    child = int(manager.fork(parent, 1)[0])
    manager.swap_out([parent])
    settle(manager)
    manager.truncate(child, 6)
    manager.append([child], 2)
    settle(manager)
    manager.swap_in([parent])
    ids = manager.take_decision().blocks_to_swap_in
    assert len(ids) == 1  # the first block is still shared, the second is another's now
    assert manager.block_table(parent)[0] == manager.block_table(child)[0]
    manager.check()


def test_a_sequence_in_the_host_can_be_truncated():
    manager = new_manager()
    handle = open_one(manager, 9)
    manager.swap_out([handle])
    settle(manager)
    manager.truncate(handle, 2)
    assert (manager.pool("host").num_free, manager.tier(handle)) == (7, "host")
    manager.swap_in([handle])
    settle(manager)
    assert manager.append([handle]).tolist() == [2]
    manager.check()


def test_speculative_decoding_in_step_leaves_the_manager_exact():
    manager = new_manager(device=64, prefix_caching=True)
    rng = np.random.default_rng(0)
    handle, _ = open_prompt(manager, list(range(1, 7)))
    tokens = list(range(1, 7))
    for _ in range(60):
        drafted = rng.integers(1, 50, size=4).tolist()
        manager.append([handle], 4, token_ids=drafted)
        settle(manager)
        accepted = int(rng.integers(0, 5))
        tokens += drafted[:accepted]
        manager.truncate(handle, len(tokens))
        manager.mark_computed([handle])
        manager.check()
    assert manager.prefix.lookup([*tokens, 0]).tokens == len(tokens) // BLOCK * BLOCK


def test_the_lengths_that_a_window_still_allows_are_named():
    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(4)]
    manager = BlockManager(block_size=4, device_blocks=32, groups=groups)
    sequence = manager.allocate(list(range(14)))
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(sequence)
    manager.append(sequence)  # which frees the blocks that the window has left
    manager.complete(manager.take_decision().ticket)
    manager.truncate(sequence, 14)
    with pytest.raises(InvalidArgumentError, match=r"num_tokens is 10, must be 11 to 14: cache group 1 of sequence"):
        manager.truncate(sequence, 10)
    manager.truncate(sequence, 11)
    manager.check()


def test_the_lengths_that_chunks_still_allow_are_named_without_gaps():
    """A multiple of the chunk needs no block, also where the tokens after it need some that are gone."""
    groups = [CacheGroup.full_attention(), CacheGroup.chunked_attention(8)]
    manager = BlockManager(block_size=4, device_blocks=32, groups=groups)
    sequence = manager.allocate(list(range(30)))
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(sequence)
    with pytest.raises(InvalidArgumentError, match=r"num_tokens is 10, must be 24 to 30: cache group 1 of sequence"):
        manager.truncate(sequence, 10)
    manager.truncate(sequence, 24)
    manager.check()
