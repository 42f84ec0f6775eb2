"""Draft tokens beside recurrent groups: the state after each is kept until it is known which were accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from managers import step

from blockyard import BlockManager, CacheGroup
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError

FULL, STATE = CacheGroup.full_attention(), CacheGroup.recurrent()


def manager_of(block_size: int = 4, **options: Any) -> BlockManager:
    return BlockManager(
        block_size=block_size, device_blocks=64, host_blocks=16, watermark=0.0, **{"groups": [FULL, STATE], **options}
    )


def begun(manager: BlockManager, tokens: int) -> int:
    (sequence,) = manager.allocate(counts=[tokens])
    step(manager)
    return int(sequence)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("tokens", [1, 3, 4, 17])
def test_each_number_of_rejected_drafts_leaves_the_state_after_the_last_accepted_token(block_size: int, tokens: int):
    for accepted in range(6):
        manager = manager_of(block_size)
        sequence = begun(manager, tokens)
        _, slots = manager.append([sequence], 6, draft_tokens=5)
        states = slots // block_size
        assert len(set(states.tolist())) == 6
        assert slots.tolist() == manager.slot_mapping(sequence, tokens, tokens + 6, group=1).tolist()
        step(manager)
        manager.truncate(sequence, tokens + 1 + accepted)
        manager.check()
        assert manager.block_table(sequence, 1)[-1] == states[accepted]
        manager.append([sequence])
        assert not len(manager.take_decision().blocks_to_copy)
        assert manager.stats().used_blocks["device"] <= manager.num_tokens(sequence) // block_size + 1 + 2


def test_states_of_drafts_that_are_all_accepted_are_free_after_the_next_append():
    manager = manager_of(16)
    sequence = begun(manager, 3)
    before = manager.stats().used_blocks["device"]
    for _ in range(2):
        manager.append([sequence], 5, draft_tokens=4)
        step(manager)
        assert manager.stats().used_blocks["device"] == before + 4
    manager.append([sequence])
    assert manager.stats().used_blocks["device"] == before


def test_an_append_with_drafts_takes_what_its_query_counts():
    manager = manager_of(16, groups=[STATE])
    sequence = begun(manager, 3)
    free = manager.pool().num_free
    fit = manager.can_append([sequence], 6, draft_tokens=5)
    assert (fit.blocks, bool(fit)) == (5, True)
    manager.append([sequence], 6, draft_tokens=5)
    assert manager.pool().num_free == free - 5
    step(manager)
    many = manager.pool().num_free + 7
    assert not manager.can_append([sequence], many, draft_tokens=many - 1)
    with pytest.raises(OutOfBlocksError):
        manager.append([sequence], many, draft_tokens=many - 1)
    manager.truncate(sequence, 5)
    manager.check()


def test_a_state_that_forks_share_is_copied_before_drafts_overwrite_it():
    manager = manager_of(16, groups=[STATE])
    sequence = begun(manager, 3)
    (child,) = manager.fork(sequence, 1)
    shared = manager.block_table(sequence)[-1]
    manager.append([sequence, child], 3, draft_tokens=2)
    decision = manager.take_decision()
    assert [src for src, _ in decision.blocks_to_copy] == [shared]
    tables = [manager.block_table(handle)[-1] for handle in (sequence, child)]
    assert sorted([dst for _, dst in decision.blocks_to_copy] + [shared]) == sorted(tables)


def test_a_state_at_a_resume_point_is_read_where_it_lies_and_never_copied():
    manager = manager_of(prefix_caching=True)
    prompt = list(range(9))
    for cached in (0, 8):
        sequence = manager.allocate(prompt, chunk_tokens=8)
        assert sequence.cached_tokens == cached
        step(manager)
        manager.mark_computed(sequence)
        while chunk := manager.next_chunk(sequence, 8):
            manager.append(sequence, chunk)
            assert not len(manager.take_decision().blocks_to_copy)
            manager.complete(manager.stats().open_tickets[0])
            manager.mark_computed(sequence)
        table = manager.block_table(sequence, 1)
        assert table[1] != table[2]
        manager.free(sequence)


def test_a_fork_has_the_last_state_only():
    manager = manager_of()
    sequence = begun(manager, 3)
    manager.append([sequence], 4, draft_tokens=3)
    with pytest.raises(SequenceStateError):
        manager.fork(sequence, 1)
    step(manager)
    (child,) = manager.fork(sequence, 1)
    with pytest.raises(InvalidArgumentError, match="cache group 1"):
        manager.truncate(child, 5)
    manager.truncate(sequence, 5)
    manager.check()


def test_the_step_that_writes_states_of_drafts_takes_no_second_append():
    manager = manager_of()
    sequence = begun(manager, 3)
    manager.append([sequence], 4, draft_tokens=3)
    for call in (manager.can_append, manager.append):
        with pytest.raises(SequenceStateError):
            call([sequence])
    step(manager)
    manager.append([sequence])
    with pytest.raises(SequenceStateError):
        manager.truncate(sequence, 6)
    step(manager)
    with pytest.raises(InvalidArgumentError, match="cache group 1"):
        manager.truncate(sequence, 6)


def test_a_swap_takes_the_last_state_along_and_no_other():
    manager = manager_of()
    sequence = begun(manager, 3)
    manager.append([sequence], 4, draft_tokens=3)
    step(manager)
    manager.swap_out([sequence])
    assert len(manager.take_decision().blocks_to_swap_out) == 2 + 2
    manager.check()
    with pytest.raises(InvalidArgumentError, match="cache group 1"):
        manager.truncate(sequence, 5)


def test_kept_block_tables_do_not_show_the_states_behind_the_entries():
    manager = manager_of()
    sequence = begun(manager, 3)
    tables = np.zeros((2, 4), np.int32)
    for group in range(2):
        manager.block_tables(sequence, out=tables[group : group + 1], group=group)
    for accepted in (0, 2, 1, 0):
        manager.append([sequence], 4, draft_tokens=3, block_tables=tables)
        step(manager)
        for group in range(2):
            shown = manager.block_table(sequence, group)
            assert tables[group, : len(shown)].tolist() == shown.tolist()
            assert not tables[group, len(shown) :].any()
        manager.truncate(sequence, manager.num_tokens(sequence) - 3 + accepted)


@pytest.mark.parametrize(
    ("counts", "drafts", "message"),
    [
        (None, 1, "draft_tokens is 1, must be at most 0"),
        (3, 3, "draft_tokens is 3, must be at most 2"),
        (0, 1, "draft_tokens is 1, must be at most 0"),
        (3, [1], "length of draft_tokens is 1, must be 2"),
        ([3, 1], [2, 1], "draft_tokens is 1, must be at most 0"),
        (3, -1, "draft_tokens is -1, must be one int or one per sequence"),
        (3, np.int64(-1), "draft_tokens is -1, must be one int or one per sequence"),
        (3, np.float32(1), "draft_tokens is 1.0, must be one int or one per sequence"),
        (3, 2**32, "draft_tokens is 4294967296"),
        (3, "two", "draft_tokens is 'two'"),
    ],
)
@pytest.mark.parametrize("groups", [[FULL], [FULL, STATE]], ids=["full", "state"])
def test_drafts_that_cannot_be_are_refused(groups: Any, counts: Any, drafts: Any, message: str):
    manager = manager_of(groups=groups)
    sequences = manager.allocate(counts=[3, 5])
    step(manager)
    for call in (manager.can_append, manager.append):
        with pytest.raises(InvalidArgumentError, match=message):
            call(sequences, counts, draft_tokens=drafts)
    assert [manager.num_tokens(sequence) for sequence in sequences] == [3, 5]
    manager.check()


@pytest.mark.parametrize("count", [2**20, 2**32 - 4])
def test_more_drafts_than_blocks_are_refused_before_they_take_memory(count: int):
    manager = manager_of(groups=[STATE])
    sequence = begun(manager, 3)
    with pytest.raises(OutOfBlocksError):
        manager.append([sequence], count, draft_tokens=count - 1)
    assert manager.num_tokens(sequence) == 3
    manager.check()
