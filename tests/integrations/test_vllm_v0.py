"""The drop-in for V0 engines: V0's rules, and that V0's defects are not in it."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from v0_sequences import SIZE, Group, Sequence, Status, free, new_manager, running

from blockyard.integrations.vllm_v0 import (
    AllocStatus,
    BlockAllocator,
    BlockTable,
    ComputedBlocksTracker,
    CpuGpuBlockAllocator,
    Device,
    NullBlock,
    SelfAttnBlockSpaceManager,
)

both = pytest.mark.parametrize("caching", [False, True])


# ---- V0's defects ----


@both
def test_a_table_of_any_length_is_forked(caching: bool):
    manager = new_manager(gpu=20_001, enable_caching=caching)
    parent, child = Sequence(1, 20_000 * SIZE), Sequence(2, 0)
    running(manager, parent)
    manager.fork(parent, child)
    assert manager.get_block_table(child) == manager.get_block_table(parent)
    assert len(manager.get_block_table(child)) > sys.getrecursionlimit()
    manager.free(parent)
    manager.free(child)
    assert free(manager)[0] == 20_001


@both
def test_an_allocation_that_fails_half_way_leaks_nothing(caching: bool):
    manager = new_manager(gpu=4, enable_caching=caching)
    with pytest.raises(BlockAllocator.NoFreeBlocksError, match="asked for 5 device blocks, 4 of 4 are free"):
        manager.allocate(Group(Sequence(1, 5 * SIZE)))
    assert (free(manager)[0], manager.block_tables) == (4, {})
    table = BlockTable(SIZE, manager.block_allocator)
    table.allocate(list(range(3 * SIZE + 1)))
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        table.append_token_ids(list(range(2 * SIZE)))
    assert (table.num_full_slots, len(table.blocks), free(manager)[0]) == (3 * SIZE + 1, 4, 0)


def test_an_encoder_that_does_not_fit_leaves_no_decoder_table():
    manager = new_manager(gpu=4)
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        manager.allocate(Group(Sequence(1, 2 * SIZE), encoder=Sequence(2, 3 * SIZE)))
    assert (free(manager)[0], manager.block_tables, manager.cross_block_tables) == (4, {}, {})


@both
def test_sharing_survives_a_swap(caching: bool):
    manager = new_manager(enable_caching=caching)
    group = running(manager, Sequence(1, 3 * SIZE - 1), Sequence(2, 3 * SIZE - 1))
    assert manager.can_swap_out(group)
    assert len(manager.swap_out(group)) == 3
    assert free(manager) == (16, 13)
    group.become(Status.SWAPPED)
    assert manager.can_swap_in(group, 0) is AllocStatus.OK
    assert len(manager.swap_in(group)) == 3
    assert free(manager) == (13, 16)
    first, second = (manager.get_block_table(seq) for seq in group.seqs)
    assert first == second


@both
def test_a_sequence_freed_while_swapped_out_returns_its_blocks_to_the_host(caching: bool):
    manager = new_manager(gpu=4, cpu=4, enable_caching=caching)
    group = running(manager, Sequence(1, 3 * SIZE))
    manager.access_all_blocks_in_seq(group.seqs[0], 1.0)
    manager.swap_out(group)
    assert manager.get_block_table(group.seqs[0]) == [4, 5, 6]
    manager.free(group.seqs[0])
    assert free(manager) == (4, 4)
    again = running(manager, Sequence(2, 4 * SIZE, first=100))
    assert sorted(manager.get_block_table(again.seqs[0])) == [0, 1, 2, 3]


def test_a_sequence_that_was_never_looked_up_is_freed_with_prefix_caching():
    manager = new_manager(enable_caching=True)
    group = running(manager, Sequence(1, 9))
    manager.free(group.seqs[0])
    manager.free(group.seqs[0])
    assert free(manager)[0] == 16


def test_a_table_with_null_blocks_is_forked_swapped_and_freed():
    manager = new_manager(gpu=16, cpu=16, sliding_window=SIZE)
    parent, child = Sequence(1, SIZE), Sequence(2, 0)
    group = running(manager, parent)
    for token in range(8 * SIZE):
        parent.tokens.append(token)
        assert manager.append_slots(parent, 0) == []
    table = manager.get_block_table(parent)
    null = manager.block_allocator.allocate_or_get_null_block()
    assert isinstance(null, NullBlock)
    assert table[:6] == [null.block_id] * 6
    assert null.block_id not in table[6:]
    manager.fork(parent, child)
    child.status = Status.RUNNING
    group.seqs.append(child)
    assert len(manager.swap_out(group)) == 3
    manager.free(parent)
    manager.free(child)
    assert free(manager) == (15, 16)


def test_a_block_freed_before_it_was_computed_is_no_hit():
    manager = new_manager(enable_caching=True)
    group = running(manager, Sequence(1, 9))
    manager.free(group.seqs[0])
    manager.mark_blocks_as_computed(group, 9)
    other = running(manager, Sequence(2, 9))
    assert manager.get_num_cached_tokens(other.seqs[0]) == 0


def test_a_chunk_of_a_prefill_that_is_yet_to_be_computed_is_no_hit():
    manager = new_manager(enable_caching=True)
    first, second = running(manager, Sequence(1, 3 * SIZE + 1)), Sequence(2, 3 * SIZE + 1)
    for computed, chunk, hits in [(0, SIZE + 1, 1), (SIZE + 1, SIZE, 2), (2 * SIZE + 1, SIZE, 3)]:
        first.seqs[0].computed = computed
        manager.mark_blocks_as_computed(first, chunk)
        assert manager.get_num_cached_tokens(second) == hits * SIZE


def half_prefilled(manager: SelfAttnBlockSpaceManager) -> tuple[Group, list[int], Group]:
    """A group whose two blocks are complete on the host, their ids there, and one that has half of the same."""
    whole = running(manager, Sequence(1, 2 * SIZE))
    manager.mark_blocks_as_computed(whole, 0)
    copies = [target for _, target in manager.swap_out(whole)]
    manager.free(running(manager, Sequence(9, 4 * SIZE, first=100)).seqs[0])
    half = running(manager, Sequence(2, 2 * SIZE))
    half.seqs[0].computed = 0
    manager.mark_blocks_as_computed(half, SIZE)
    return whole.become(Status.SWAPPED), copies, half


def test_a_half_prefilled_block_overwrites_no_complete_one_on_the_host():
    manager = new_manager(gpu=4, cpu=3, enable_caching=True)
    _, copies, half = half_prefilled(manager)
    assert manager.can_swap_out(half)
    targets = [target for _, target in manager.swap_out(half)]
    assert targets[0] == copies[0]
    assert targets[1] not in copies


def test_a_half_prefilled_block_needs_a_host_block_of_its_own():
    manager = new_manager(gpu=4, cpu=2, enable_caching=True)
    _, _, half = half_prefilled(manager)
    assert not manager.can_swap_out(half)
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        manager.swap_out(half)


def test_a_half_prefilled_block_overwrites_no_complete_one_on_the_device():
    manager = new_manager(gpu=4, cpu=4, enable_caching=True)
    whole, _, half = half_prefilled(manager)
    manager.swap_out(half)
    manager.swap_in(whole)
    manager.mark_blocks_as_computed(whole, 0)
    half.become(Status.SWAPPED)
    assert manager.can_swap_in(half, 0) is AllocStatus.OK
    targets, complete = [target for _, target in manager.swap_in(half)], manager.get_block_table(whole.seqs[0])
    assert targets[0] == complete[0]
    assert targets[1] not in complete


# ---- V0's rules ----


def test_admission_keeps_the_watermark():
    manager = new_manager(gpu=100, watermark=0.1)
    assert manager.watermark_blocks == 10
    assert manager.can_allocate(Group(Sequence(1, 90 * SIZE))) is AllocStatus.OK
    assert manager.can_allocate(Group(Sequence(1, 90 * SIZE)), 1) is AllocStatus.NEVER
    running(manager, Sequence(2, SIZE))
    assert manager.can_allocate(Group(Sequence(1, 90 * SIZE))) is AllocStatus.LATER


def test_admission_asks_for_the_first_waiting_sequence_and_the_encoder():
    manager = new_manager(gpu=5)
    assert manager.can_allocate(Group(Sequence(1, 5 * SIZE), Sequence(2, 9 * SIZE))) is AllocStatus.OK
    assert manager.can_allocate(Group(Sequence(1, 3 * SIZE), encoder=Sequence(2, 2 * SIZE))) is AllocStatus.OK
    assert manager.can_allocate(Group(Sequence(1, 3 * SIZE), encoder=Sequence(2, 3 * SIZE))) is AllocStatus.NEVER


def test_admission_asks_for_no_more_than_the_window_holds():
    manager = new_manager(gpu=3, sliding_window=SIZE)
    assert manager.max_block_sliding_window == 3
    assert manager.can_allocate(Group(Sequence(1, 20 * SIZE))) is AllocStatus.OK


def test_admission_leaves_hits_out_of_account():
    manager = new_manager(gpu=4, enable_caching=True)
    running(manager, Sequence(1, 3 * SIZE))
    assert manager.can_allocate(Group(Sequence(2, 3 * SIZE))) is AllocStatus.LATER


def test_appending_knows_no_watermark():
    manager = new_manager(gpu=4, watermark=0.5)
    group = running(manager, Sequence(1, SIZE + 1))
    for new, fits in [(3, True), (4, False)]:
        group.seqs[0].tokens = list(range(SIZE + 1 + new))
        assert manager.can_append_slots(group, SIZE) is fits


def test_a_second_table_for_a_sequence_is_refused():
    manager = new_manager()
    group = running(manager, Sequence(1, 5)).become(Status.WAITING)
    with pytest.raises(AssertionError, match=r"already exists for sequences \[1\]"):
        manager.allocate(group)
    assert free(manager)[0] == 14


@pytest.mark.parametrize("options", [{"sliding_window": 8}, {"enable_caching": True}])
def test_an_encoder_takes_neither_a_window_nor_a_cache(options: dict[str, Any]):
    group = Group(Sequence(1, 5), encoder=Sequence(2, 5))
    for call in (new_manager(**options).can_allocate, new_manager(**options).allocate):
        with pytest.raises(NotImplementedError):
            call(group)


def test_a_request_with_images_is_refused_by_name_if_blocks_are_cached():
    seq = Sequence(1, 5)
    seq.multi_modal_data = {"image": object()}  # type: ignore[attr-defined]
    group, manager = Group(seq), new_manager(enable_caching=True)
    for call in (manager.can_allocate, manager.allocate):
        with pytest.raises(NotImplementedError, match="not supported for the multi_modal_data of request 1"):
            call(group)
    assert free(manager) == (16, 16)
    plain = new_manager()
    assert plain.can_allocate(group) is AllocStatus.OK
    plain.allocate(group)
    seq.multi_modal_data = {}  # type: ignore[attr-defined]
    assert manager.can_allocate(group) is AllocStatus.OK


def test_an_encoder_has_a_table_of_its_own():
    manager = new_manager()
    group = Group(Sequence(1, 5), encoder=Sequence(2, 9))
    assert manager.can_allocate(group) is AllocStatus.OK
    manager.allocate(group)
    assert manager.get_cross_block_table(group) == [2, 3, 4]
    manager.free_cross(group)
    manager.free_cross(group)
    assert free(manager)[0] == 14


@both
def test_the_first_writer_of_a_shared_block_copies_it(caching: bool):
    manager = new_manager(enable_caching=caching)
    group = running(manager, Sequence(1, 6), Sequence(2, 6))
    for seq in group.seqs:
        seq.tokens.append(seq.seq_id)
    assert manager.can_append_slots(group, 0)
    assert [manager.append_slots(seq, 0) for seq in group.seqs] == [[(1, 2)], []]
    assert [manager.get_block_table(seq) for seq in group.seqs] == [[0, 2], [0, 1]]


@both
def test_a_lookahead_block_is_copied_on_its_first_write(caching: bool):
    manager = new_manager(enable_caching=caching)
    parent, child = Sequence(1, SIZE), Sequence(2, SIZE)
    running(manager, parent)
    manager.append_slots(parent, 1)
    manager.fork(parent, child)
    child.tokens.append(7)
    assert manager.append_slots(child, 0) == [(1, 2)]


def test_the_null_block_is_taken_when_a_windowed_table_first_grows():
    manager = new_manager(gpu=16, sliding_window=SIZE)
    seq = Sequence(1, 3 * SIZE)
    running(manager, seq)
    assert free(manager)[0] == 13
    seq.tokens += range(SIZE)
    seq.computed = 3 * SIZE
    manager.append_slots(seq, 0)
    assert (free(manager)[0], manager.get_block_table(seq)) == (11, [0, 1, 2, 4])
    seq.computed = 4 * SIZE
    manager.append_slots(seq, 0)
    assert (free(manager)[0], manager.get_block_table(seq)) == (12, [3, 1, 2, 4])


def test_freed_ids_are_reused_last_in_first_out():
    manager = new_manager()
    first, second = running(manager, Sequence(1, 9)), running(manager, Sequence(2, 9, 50))
    manager.free(first.seqs[0])
    manager.free(second.seqs[0])
    assert manager.get_block_table(running(manager, Sequence(3, 4 * SIZE, 90)).seqs[0]) == [5, 4, 3, 2]


def test_hits_count_only_once_computed():
    manager = new_manager(enable_caching=True)
    first = running(manager, Sequence(1, 3 * SIZE + 1))
    second = running(manager, Sequence(2, 3 * SIZE + 1))
    assert manager.get_block_table(first.seqs[0])[:3] == manager.get_block_table(second.seqs[0])[:3]
    assert manager.get_num_cached_tokens(second.seqs[0]) == 0
    manager.mark_blocks_as_computed(first, 13)
    assert manager.get_num_cached_tokens(second.seqs[0]) == 3 * SIZE
    assert manager.get_common_computed_block_ids([first.seqs[0], second.seqs[0]]) == [0, 1, 2]
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 0.5
    assert not manager.reset_prefix_cache()
    manager.free(first.seqs[0])
    manager.free(second.seqs[0])
    assert manager.reset_prefix_cache()
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 0.0
    assert new_manager().get_prefix_cache_hit_rate(Device.GPU) == -1


def test_the_time_of_access_counts_from_the_moment_of_freeing():
    manager = new_manager(gpu=4, enable_caching=True)
    groups = [running(manager, Sequence(i, 2 * SIZE, first=100 * i)) for i in (1, 2)]
    for group, now in zip(groups, (2.0, 1.0), strict=True):
        manager.mark_blocks_as_computed(group, 0)
        manager.access_all_blocks_in_seq(group.seqs[0], now)
        manager.free(group.seqs[0])
    # The one accessed first goes first, and of it the end of the longest prefix.
    assert manager.get_block_table(running(manager, Sequence(3, 3 * SIZE, first=900)).seqs[0]) == [3, 2, 1]


def test_every_token_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    hashed: list[int] = []
    module = inspect.getmodule(ComputedBlocksTracker)
    assert module is not None
    original = module.hash_blocks
    monkeypatch.setattr(module, "hash_blocks", lambda *args: hashed.append(len(args[1])) or original(*args))
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 64, 0, SIZE)
    tracker, seq = ComputedBlocksTracker(allocator, SIZE, True), Sequence(1, 8 * SIZE)
    for token in range(2 * SIZE):
        tracker.get_num_cached_tokens(seq)
        seq.tokens.append(token)
    assert hashed == [8 * SIZE, SIZE]


class OlderSequence:
    """A sequence of a version that has no `extra_hash` and no `is_prefill`."""

    probed = 0

    def __init__(self, seq_id: int, num_tokens: int):
        self.seq_id, self.tokens, self.status, self.computed = seq_id, list(range(num_tokens)), Status.WAITING, 0
        self.data = SimpleNamespace(get_num_computed_tokens=lambda: self.computed)

    def get_token_ids(self) -> list[int]:
        return self.tokens

    def __getattr__(self, name: str) -> Any:
        type(self).probed += name in {"extra_hash", "is_prefill"}
        raise AttributeError(name)


@both
def test_sequences_without_an_extra_hash_and_a_stage_are_run_and_probed_once(caching: bool):
    class Probed(OlderSequence):
        pass

    manager = new_manager(gpu=32, enable_caching=caching)
    for number in range(3):
        seq = Probed(number, 2 * SIZE + 1)
        group = Group(seq)
        assert manager.can_allocate(group) is AllocStatus.OK
        assert manager.get_num_cached_tokens(seq) == (2 * SIZE if caching and number else 0)
        manager.allocate(group)
        group.become(Status.RUNNING)
        for chunk in (SIZE, SIZE + 1):
            manager.mark_blocks_as_computed(group, chunk)
            seq.computed += chunk
        for token in range(SIZE):
            seq.tokens.append(token)
            manager.append_slots(seq, 0)
            seq.computed += 1
        swapped = manager.swap_out(group)
        assert len(swapped) == 4
        group.become(Status.SWAPPED)
        assert len(manager.swap_in(group)) == 4
    assert Probed.probed == 2


def test_the_stage_of_a_sequence_that_does_not_know_it_follows_from_what_is_computed():
    manager = new_manager(enable_caching=True)
    seq = OlderSequence(1, 4 * SIZE)
    assert manager.get_num_cached_tokens(seq) == 0
    other = running(manager, Sequence(2, 4 * SIZE))
    manager.mark_blocks_as_computed(other, 0)
    seq.computed = 1
    assert manager.get_num_cached_tokens(seq) == 1  # in prefill: no more than at first, and no less than computed
    seq.computed = 4 * SIZE
    assert manager.get_num_cached_tokens(seq) == 4 * SIZE


def test_lookahead_slots_get_blocks():
    manager = new_manager()
    group = running(manager, Sequence(1, SIZE))
    group.seqs[0].tokens.append(1)
    assert manager.can_append_slots(group, 2 * SIZE)
    manager.append_slots(group.seqs[0], 2 * SIZE)
    assert len(manager.get_block_table(group.seqs[0])) == 4


@pytest.mark.parametrize(("cpu", "fits"), [(2, False), (3, True)])
def test_a_swap_out_knows_no_watermark(cpu: int, fits: bool):
    manager = new_manager(cpu=cpu, watermark=0.5)
    assert manager.can_swap_out(running(manager, Sequence(1, 3 * SIZE))) is fits


def test_a_hit_on_the_target_costs_a_swap_nothing_only_while_it_is_used():
    manager = new_manager(gpu=4, cpu=8, enable_caching=True)
    group = running(manager, Sequence(1, 2 * SIZE))
    manager.mark_blocks_as_computed(group, 0)
    manager.swap_out(group)
    blocks = manager.block_tables[1].blocks
    assert manager.block_allocator.get_num_full_blocks_touched(blocks, Device.GPU) == 2
    running(manager, Sequence(2, 2 * SIZE))
    assert manager.block_allocator.get_num_full_blocks_touched(blocks, Device.GPU) == 0


def test_swapped_pairs_are_in_table_order_and_counted_from_0_on_each_device():
    manager = new_manager(gpu=8, cpu=8)
    manager.free(running(manager, Sequence(9, 2 * SIZE)).seqs[0])
    group = running(manager, Sequence(1, 3 * SIZE), Sequence(2, 3 * SIZE))
    assert manager.swap_out(group) == [(1, 0), (0, 1), (2, 2)]
    assert manager.get_block_table(group.seqs[1]) == [8, 9, 10]
    assert manager.swap_in(group.become(Status.SWAPPED)) == [(0, 2), (1, 0), (2, 1)]


def test_a_swap_in_keeps_the_watermark():
    manager = new_manager(gpu=6, watermark=0.5)
    group = running(manager, Sequence(1, 3 * SIZE))
    manager.swap_out(group)
    group.become(Status.SWAPPED)
    assert manager.can_swap_in(group, 0) is AllocStatus.OK
    running(manager, Sequence(2, 1))
    assert manager.can_swap_in(group, 0) is AllocStatus.LATER
    assert manager.can_swap_in(group, 4 * SIZE) is AllocStatus.NEVER


def test_a_swap_that_does_not_fit_changes_nothing():
    manager = new_manager(cpu=2)
    group = running(manager, Sequence(1, 3 * SIZE))
    before = list(manager.get_block_table(group.seqs[0]))
    with pytest.raises(BlockAllocator.NoFreeBlocksError, match="asked for 3 host blocks, 2 of 2 are free"):
        manager.swap_out(group)
    assert (manager.get_block_table(group.seqs[0]), free(manager)) == (before, (13, 2))


def test_unknown_sequences_are_neither_freed_nor_forked():
    manager = new_manager()
    manager.free(Sequence(1, 4))
    manager.fork(Sequence(1, 4), Sequence(2, 4))
    assert not manager.block_tables
