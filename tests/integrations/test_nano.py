"""The block manager of nano engines, call by call; `test_nano_engine` runs engines on it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard import Pairs, StepDecision
from blockyard.errors import (
    InvalidArgumentError,
    LayoutError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownSequenceError,
)
from blockyard.executor.executor import Executor
from blockyard.integrations.nano import BlockManager, CachedBlocks

SIZE, BLOCKS, HOST = 4, 16, 24


class Sequence:
    def __init__(self, prompt: list[int]) -> None:
        self.token_ids = list(prompt)
        self.block_table: list[int] = []
        self.num_cached_tokens = self.num_scheduled_tokens = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return math.ceil(len(self) / SIZE)


def kv_tensor() -> torch.Tensor:
    return torch.zeros(2, 1, BLOCKS, SIZE, 1, 2)


def test_what_fits_is_true_also_without_a_cached_block():
    assert CachedBlocks(0)
    assert CachedBlocks(3)
    assert CachedBlocks(3) * 2 == 6
    assert not CachedBlocks(-1)
    assert CachedBlocks(-1) == -1


def test_a_sequence_gets_blocks_and_gives_them_back():
    manager, seq = BlockManager(BLOCKS, SIZE), Sequence([1] * 9)
    table = seq.block_table
    manager.allocate(seq, 0)
    assert table == [0, 1, 2]
    assert manager.used_block_ids == {0, 1, 2}
    seq.num_cached_tokens = 9
    manager.deallocate(seq)
    assert seq.block_table is table
    assert (table, seq.num_cached_tokens) == ([], 0)
    manager.deallocate(seq)
    assert manager.free_block_ids == list(range(BLOCKS))
    empty = Sequence([])
    manager.allocate(empty)
    manager.deallocate(empty)
    assert manager.stats().sequences == 0


def test_a_sequence_that_has_become_shorter_is_refused():
    manager, seq = BlockManager(BLOCKS, SIZE), Sequence([1] * 6)
    manager.allocate(seq, 0)
    del seq.token_ids[-1]
    for call in (manager.can_append, manager.may_append):
        with pytest.raises(InvalidArgumentError, match="the sequence has 5 tokens, it had 6"):
            call(seq)


def test_sequences_with_other_images_share_no_block_that_an_image_touches():
    manager = BlockManager(BLOCKS, SIZE)

    def run(image: bytes, num_cached_blocks: int) -> Sequence:
        # The image lies in the prompt's last, partial block, which the answer fills.
        seq = Sequence([1, 2, 3, 4, 9, 9])
        seq.extras = [(4, 2, image)]  # type: ignore[attr-defined]
        assert manager.can_allocate(seq) == num_cached_blocks
        manager.allocate(seq, num_cached_blocks)
        for token in (5, 6, 7):
            seq.num_scheduled_tokens = len(seq) - seq.num_cached_tokens
            manager.hash_blocks(seq)
            seq.num_cached_tokens = len(seq)
            seq.token_ids.append(token)
            manager.may_append(seq)
        return seq

    first, second = run(b"cat", 0), run(b"dog", 1)
    assert manager.stats().merged_blocks == 0
    assert first.block_table[0] == second.block_table[0]
    assert first.block_table[1] != second.block_table[1]
    third = run(b"cat", 1)
    assert third.block_table[1] == first.block_table[1]


def test_blocks_in_use_that_are_shared_cost_nothing():
    manager, prompt = BlockManager(4, SIZE), list(range(13))
    first, second = Sequence(prompt), Sequence([*prompt[:12], 99])
    manager.allocate(first, 0)
    assert manager.can_allocate(second) == -1, "nothing is computed yet, and no block is free"
    manager.deallocate(first)
    manager = BlockManager(5, SIZE)
    manager.allocate(first, 0)
    first.num_scheduled_tokens = 13
    manager.hash_blocks(first)
    assert manager.can_allocate(second) == 3
    manager.allocate(second, 3)
    assert second.num_cached_tokens == 12
    assert second.block_table[:3] == first.block_table[:3]


def test_a_preempted_sequence_that_finds_its_own_blocks_is_no_hit():
    class Preempted(Sequence):
        num_completion_tokens = 1

    manager, seq = BlockManager(5, SIZE), Preempted(list(range(13)))
    seq.num_completion_tokens = 0
    manager.allocate(seq, 0)
    seq.num_scheduled_tokens = 13
    manager.hash_blocks(seq)
    manager.deallocate(seq)
    seq.num_completion_tokens = 1
    manager.allocate(seq, 3)
    stats = manager.manager.stats()
    assert (seq.num_cached_tokens, stats.prompts, stats.hit_tokens, stats.missed_tokens) == (12, 1, 0, 13)


def test_a_block_computed_twice_becomes_one():
    manager, prompt = BlockManager(BLOCKS, SIZE), list(range(6))
    pair = [Sequence(prompt), Sequence(prompt)]
    for seq in pair:
        manager.allocate(seq, 0)
        seq.num_scheduled_tokens = 6
    assert pair[0].block_table[0] != pair[1].block_table[0]
    for seq in pair:
        manager.hash_blocks(seq)
    assert pair[0].block_table[0] == pair[1].block_table[0]
    assert pair[0].block_table[1] != pair[1].block_table[1]
    assert manager.stats().merged_blocks == 1


def test_what_was_never_run_is_never_found():
    manager, prompt = BlockManager(BLOCKS, SIZE), list(range(9))
    aborted, seq = Sequence(prompt), Sequence(prompt)
    manager.allocate(aborted)
    manager.deallocate(aborted)
    assert manager.can_allocate(seq) == 0
    manager.allocate(seq)
    seq.token_ids.append(5)
    manager.deallocate(seq)
    assert manager.can_allocate(Sequence(prompt)) == 2, "a token was sampled behind the prompt"


def test_of_a_prompt_in_chunks_only_those_computed_are_found():
    manager, prompt = BlockManager(BLOCKS, SIZE), list(range(17))
    seq = Sequence(prompt)
    manager.allocate(seq, 0)
    seq.num_scheduled_tokens = 9
    manager.hash_blocks(seq)
    seq.num_cached_tokens += 9
    assert manager.can_allocate(Sequence(prompt)) == 2
    seq.num_scheduled_tokens = 8
    manager.hash_blocks(seq)
    assert manager.can_allocate(Sequence(prompt)) == 4


def test_a_block_that_a_token_evicts_is_on_the_host_first():
    manager = BlockManager(BLOCKS, SIZE, kv_cache=kv_tensor(), host_blocks=HOST)
    gone, seq = Sequence([0] * 9), Sequence([1] * (BLOCKS - 2) * SIZE)
    for one in (gone, seq):
        manager.allocate(one)
        one.token_ids.append(7)
        manager.may_append(one)
        if one is gone:
            manager.deallocate(gone)
    assert len(seq.block_table) == BLOCKS - 1
    assert manager.stats().swapped_out_blocks["host"] == 1
    assert manager.can_allocate(Sequence([0] * 4)) == 0
    manager.deallocate(seq)
    assert manager.can_allocate(gone) == 2


def test_blocks_move_down_between_steps_and_their_tables_follow():
    kv_cache = kv_tensor()
    manager = BlockManager(BLOCKS, SIZE, kv_cache=kv_cache, moves=0)
    low, high = Sequence([0] * 9), Sequence([1] * 10)
    for seq in (low, high):
        manager.allocate(seq, 0)
    table = high.block_table
    assert table == [3, 4, 5]
    kv_cache[:, :, table] = torch.arange(48.0).view(2, 1, 3, SIZE, 1, 2)
    before = kv_cache[:, :, table].clone()
    manager.deallocate(low)
    assert manager.defragment() == 3
    assert high.block_table is table
    assert sorted(table) == [0, 1, 2]
    assert torch.equal(kv_cache[:, :, table], before)
    assert manager.defragment() == 0
    assert manager.stats().moved_blocks == 3
    manager.manager.check()


def test_a_block_that_is_being_filled_moves_like_others():
    manager = BlockManager(BLOCKS, SIZE, kv_cache=kv_tensor(), moves=0)
    low, seq = Sequence([0] * 4), Sequence([1] * 8)
    for one in (low, seq):
        manager.allocate(one, 0)
    seq.num_scheduled_tokens = 8
    manager.hash_blocks(seq)
    seq.token_ids.append(1)
    manager.may_append(seq)
    assert seq.block_table == [1, 2, 3]
    manager.deallocate(low)
    assert manager.defragment() == 1
    assert seq.block_table == [1, 2, 0]


def test_blocks_move_by_themselves_when_a_sequence_leaves_as_many_as_allowed():
    manager = BlockManager(BLOCKS, SIZE, kv_cache=kv_tensor(), moves=2)
    sequences = [Sequence([i] * 12) for i in range(4)]
    for seq in sequences:
        manager.allocate(seq, 0)
    manager.deallocate(sequences[0])
    assert manager.stats().moved_blocks == 2
    assert max(manager.used_block_ids) == 9


def test_errors_change_nothing():
    manager, seq = BlockManager(4, SIZE), Sequence([1] * 9)
    with pytest.raises(OutOfBlocksError, match="5 device blocks, 4 of 4 are free"):
        manager.allocate(Sequence([1] * 17))
    with pytest.raises(InvalidArgumentError, match="num_cached_blocks is 1, 0 are cached"):
        manager.allocate(seq, 1)
    assert manager.free_block_ids == [0, 1, 2, 3]
    for call in (manager.can_append, manager.may_append, manager.hash_blocks):
        with pytest.raises(UnknownSequenceError, match="9 tokens has no blocks from here"):
            call(seq)
    manager.allocate(seq)
    with pytest.raises(InvalidArgumentError, match="has 3 blocks already"):
        manager.allocate(seq)
    seq.num_scheduled_tokens = 10
    with pytest.raises(InvalidArgumentError, match="10 tokens are computed, the sequence has blocks for 9"):
        manager.hash_blocks(seq)
    del seq.token_ids[8:]
    with pytest.raises(InvalidArgumentError, match="has 8 tokens, it had 9"):
        manager.may_append(seq)
    seq.token_ids += [1] * 9
    assert not manager.can_append(seq)
    with pytest.raises(OutOfBlocksError):
        manager.may_append(seq)
    assert seq.block_table == [0, 1, 2]
    stranger = Sequence([1] * 5)
    stranger.block_table = [2, 3]
    with pytest.raises(UnknownSequenceError):
        manager.deallocate(stranger)
    assert stranger.block_table == [2, 3]
    manager.manager.check()


def test_sequences_that_count_blocks_of_another_size_are_refused():
    with pytest.raises(InvalidArgumentError, match="counts 3 blocks for 9 tokens, of 8 it takes 2"):
        BlockManager(BLOCKS, 8).allocate(Sequence([1] * 9))


def test_a_kv_tensor_that_does_not_fit_is_refused():
    with pytest.raises(LayoutError, match="has 16 blocks of 4, the manager 15 of 4"):
        BlockManager(15, SIZE, kv_cache=kv_tensor())
    with pytest.raises(LayoutError, match="16 blocks of 4, the manager 16 of 8"):
        BlockManager(BLOCKS, 8).attach(kv_tensor())
    with pytest.raises(InvalidArgumentError, match="host_blocks is 3, but there is no KV tensor"):
        BlockManager(BLOCKS, SIZE, host_blocks=3)
    with pytest.raises(InvalidArgumentError, match="moves is -1"):
        BlockManager(BLOCKS, SIZE).attach(kv_tensor(), moves=-1)
    manager = BlockManager(BLOCKS, SIZE)
    with pytest.raises(SequenceStateError, match="no KV tensor is attached"):
        manager.defragment()
    manager.allocate(Sequence([1]))
    with pytest.raises(SequenceStateError, match="1 sequences have blocks"):
        manager.attach(kv_tensor())


class Failing:
    """Loses all that is to be loaded, or raises."""

    def __init__(self, inner: Executor | None, *, error: bool) -> None:
        assert inner is not None
        self.inner, self.error = inner, error

    def execute(self, decision: StepDecision) -> list[Pairs]:
        if not decision.swap_in:
            return self.inner.execute(decision)
        if self.error:
            raise RuntimeError("the device is gone")
        return list(decision.swap_in)


@pytest.mark.parametrize("error", [True, False])
def test_a_load_that_fails_leaves_the_sequence_without_blocks(error: bool):
    manager = BlockManager(BLOCKS, SIZE, kv_cache=kv_tensor(), host_blocks=HOST)
    for first in (0, 1):
        seq = Sequence([first] * (BLOCKS * SIZE - 1))
        manager.allocate(seq)
        seq.token_ids.append(7)
        manager.deallocate(seq)
    assert manager.stats().swapped_out_blocks["host"] == BLOCKS - 1
    inner, manager.executor = manager.executor, Failing(manager.executor, error=error)
    seq = Sequence([0] * 9)
    with pytest.raises(RuntimeError if error else SequenceStateError):
        manager.allocate(seq)
    assert (seq.block_table, manager.used_block_ids) == ([], set())
    assert (manager.stats().sequences, manager.stats().open_tickets) == (0, [])
    assert manager.can_allocate(seq) == 0, "what could not be brought back is not tried again"
    manager.manager.check()
    manager.executor = inner
    manager.allocate(seq)
    assert len(seq.block_table) == 3


class Plain(Sequence):
    """A sequence of blocks of any size."""

    num_blocks = None  # type: ignore[assignment]


# Prompts of two families: those of a family are prefixes of each other.
PROMPTS = st.builds(lambda first, count: list(range(first, first + count)), st.sampled_from([0, 10]), st.integers(1, 5))


@given(
    sizes=st.tuples(st.integers(2, 4), st.sampled_from([1, 1, 2]), st.integers(0, 3), st.integers(0, 1)),
    program=st.lists(
        st.tuples(
            PROMPTS, st.sampled_from([0, 0, 0, 1]), st.sampled_from([True, True, False]), st.sampled_from([9, 1])
        ),
        min_size=12,
        max_size=16,
    ),
)
def test_what_was_just_said_holds(sizes: tuple[int, int, int, int], program: list[tuple[list[int], int, bool, int]]):
    """`allocate` accepts what `can_allocate` has said, and `may_append` finds what `can_append` has."""
    blocks, size, host, moves = sizes
    manager = BlockManager(blocks, size, kv_cache=torch.zeros(2, 1, blocks, size, 1, 2), host_blocks=host, moves=moves)
    running: list[Plain] = []
    for prompt, appended, newer, leaves in program:
        seq = Plain(prompt)
        fit = manager.can_allocate(seq)
        if fit:
            manager.allocate(seq, int(fit) if newer else None)
            assert not newer or seq.num_cached_tokens == fit * size
            seq.num_scheduled_tokens = len(seq) - seq.num_cached_tokens
            manager.hash_blocks(seq)
            seq.num_cached_tokens = len(seq)
            running.append(seq)
        else:
            with pytest.raises(OutOfBlocksError):
                manager.allocate(seq, 0 if newer else None)
        for seq in running:
            seq.token_ids.extend([5] * appended)
            fits = manager.can_append(seq)
            if fits:
                manager.may_append(seq)
            else:
                with pytest.raises(OutOfBlocksError):
                    manager.may_append(seq)
                del seq.token_ids[len(seq) - appended :]
        for seq in running[:leaves]:
            manager.deallocate(seq)
        del running[:leaves]
        manager.manager.check()
