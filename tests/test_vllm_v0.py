"""The drop-in for V0 engines: V0's rules, and that V0's defects are not in it."""

import enum
import inspect
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from blockyard.integrations.vllm_v0 import (
    AllocStatus,
    BlockAllocator,
    BlockSpaceManager,
    BlockTable,
    ComputedBlocksTracker,
    CpuGpuBlockAllocator,
    Device,
    NaiveBlock,
    NaiveBlockAllocator,
    NullBlock,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
    SelfAttnBlockSpaceManager,
)

SIZE = 4
Status = enum.IntEnum("Status", ["WAITING", "RUNNING", "SWAPPED", "FINISHED"])


class Sequence:
    def __init__(self, seq_id: int, num_tokens: int, first: int = 0):
        self.seq_id, self.tokens, self.status = seq_id, list(range(first, first + num_tokens)), Status.WAITING
        self.data = SimpleNamespace(get_num_computed_tokens=lambda: len(self.tokens))

    def get_token_ids(self) -> list[int]:
        return self.tokens

    def extra_hash(self) -> int | None:
        return None

    def is_prefill(self) -> bool:
        return False


class Group:
    def __init__(self, *seqs: Sequence, encoder: Sequence | None = None):
        self.request_id, self.seqs, self.encoder = str(seqs[0].seq_id), list(seqs), encoder

    def get_seqs(self) -> list[Sequence]:
        return self.seqs

    def is_encoder_decoder(self) -> bool:
        return self.encoder is not None

    def get_encoder_seq(self) -> Sequence | None:
        return self.encoder

    def become(self, status: Status) -> "Group":
        for seq in self.seqs:
            seq.status = status
        return self


def manager(gpu: int = 16, cpu: int = 16, **options: Any) -> SelfAttnBlockSpaceManager:
    return SelfAttnBlockSpaceManager(SIZE, gpu, cpu, **{"watermark": 0.0, **options})


def running(books: SelfAttnBlockSpaceManager, *seqs: Sequence) -> Group:
    group = Group(*seqs)
    books.allocate(group)
    return group.become(Status.RUNNING)


def free(books: SelfAttnBlockSpaceManager) -> tuple[int, int]:
    return books.get_num_free_gpu_blocks(), books.get_num_free_cpu_blocks()


both = pytest.mark.parametrize("caching", [False, True])


# ---- V0's defects ----


@both
def test_a_table_of_any_length_is_forked(caching: bool):
    books = manager(gpu=20_001, enable_caching=caching)
    parent, child = Sequence(1, 20_000 * SIZE), Sequence(2, 0)
    running(books, parent)
    began = time.thread_time()
    books.fork(parent, child)
    assert time.thread_time() - began < 1.0
    assert books.get_block_table(child) == books.get_block_table(parent)
    assert len(books.get_block_table(child)) > sys.getrecursionlimit()
    books.free(parent)
    books.free(child)
    assert free(books)[0] == 20_001


@both
def test_an_allocation_that_fails_half_way_leaks_nothing(caching: bool):
    books = manager(gpu=4, enable_caching=caching)
    with pytest.raises(BlockAllocator.NoFreeBlocksError, match="asked for 5 device blocks, 4 of 4 are free"):
        books.allocate(Group(Sequence(1, 5 * SIZE)))
    assert (free(books)[0], books.block_tables) == (4, {})
    table = BlockTable(SIZE, books.block_allocator)
    table.allocate(list(range(3 * SIZE + 1)))
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        table.append_token_ids(list(range(2 * SIZE)))
    assert (table.num_full_slots, len(table.blocks), free(books)[0]) == (3 * SIZE + 1, 4, 0)


def test_an_encoder_that_does_not_fit_leaves_no_decoder_table():
    books = manager(gpu=4)
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        books.allocate(Group(Sequence(1, 2 * SIZE), encoder=Sequence(2, 3 * SIZE)))
    assert (free(books)[0], books.block_tables, books.cross_block_tables) == (4, {}, {})


@both
def test_sharing_survives_a_swap(caching: bool):
    books = manager(enable_caching=caching)
    group = running(books, Sequence(1, 3 * SIZE - 1), Sequence(2, 3 * SIZE - 1))
    assert books.can_swap_out(group)
    assert len(books.swap_out(group)) == 3
    assert free(books) == (16, 13)
    group.become(Status.SWAPPED)
    assert books.can_swap_in(group, 0) is AllocStatus.OK
    assert len(books.swap_in(group)) == 3
    assert free(books) == (13, 16)
    first, second = (books.get_block_table(seq) for seq in group.seqs)
    assert first == second


@both
def test_a_sequence_freed_while_swapped_out_returns_its_blocks_to_the_host(caching: bool):
    books = manager(gpu=4, cpu=4, enable_caching=caching)
    group = running(books, Sequence(1, 3 * SIZE))
    books.access_all_blocks_in_seq(group.seqs[0], 1.0)
    books.swap_out(group)
    assert books.get_block_table(group.seqs[0]) == [4, 5, 6]
    books.free(group.seqs[0])
    assert free(books) == (4, 4)
    again = running(books, Sequence(2, 4 * SIZE, first=100))
    assert sorted(books.get_block_table(again.seqs[0])) == [0, 1, 2, 3]


def test_a_physical_id_costs_the_same_in_a_large_pool():
    times = []
    for blocks in (1_000, 1_000_000):
        allocator = NaiveBlockAllocator(NaiveBlock, blocks, SIZE, range(blocks, 2 * blocks))
        began = time.thread_time()
        for _ in range(2_000):
            assert allocator.get_physical_block_id(2 * blocks - 1) == blocks - 1
        times.append(time.thread_time() - began)
    assert times[1] < 20 * times[0]


def test_a_sequence_that_was_never_looked_up_is_freed_with_prefix_caching():
    books = manager(enable_caching=True)
    group = running(books, Sequence(1, 9))
    books.free(group.seqs[0])
    books.free(group.seqs[0])
    assert free(books)[0] == 16


def test_a_cached_block_whose_access_time_changed_is_still_evicted():
    allocator = PrefixCachingBlockAllocator(2, SIZE)
    blocks = allocator.allocate_immutable_blocks(None, [[1] * SIZE, [2] * SIZE])
    ids = [block.block_id for block in blocks]
    allocator.mark_blocks_as_computed([])
    for block in blocks:
        allocator.free(block)
    allocator.mark_blocks_as_accessed([ids[1]], 7.0)
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(2)] == ids


def test_a_table_with_null_blocks_is_forked_swapped_and_freed():
    books = manager(gpu=16, cpu=16, sliding_window=SIZE)
    parent, child = Sequence(1, SIZE), Sequence(2, 0)
    group = running(books, parent)
    for token in range(8 * SIZE):
        parent.tokens.append(token)
        assert books.append_slots(parent, 0) == []
    table = books.get_block_table(parent)
    null = books.block_allocator.allocate_or_get_null_block()
    assert isinstance(null, NullBlock)
    assert table[:6] == [null.block_id] * 6
    assert null.block_id not in table[6:]
    books.fork(parent, child)
    child.status = Status.RUNNING
    group.seqs.append(child)
    assert len(books.swap_out(group)) == 3
    books.free(parent)
    books.free(child)
    assert free(books) == (15, 16)


def test_a_block_freed_before_it_was_computed_is_no_hit():
    books = manager(enable_caching=True)
    group = running(books, Sequence(1, 9))
    books.free(group.seqs[0])
    books.mark_blocks_as_computed(group, 9)
    other = running(books, Sequence(2, 9))
    assert books.get_num_cached_tokens(other.seqs[0]) == 0


# ---- V0's rules ----


def test_admission_keeps_the_watermark():
    books = manager(gpu=100, watermark=0.1)
    assert books.watermark_blocks == 10
    assert books.can_allocate(Group(Sequence(1, 90 * SIZE))) is AllocStatus.OK
    assert books.can_allocate(Group(Sequence(1, 90 * SIZE)), 1) is AllocStatus.NEVER
    running(books, Sequence(2, SIZE))
    assert books.can_allocate(Group(Sequence(1, 90 * SIZE))) is AllocStatus.LATER


def test_a_second_table_for_a_sequence_is_refused():
    books = manager()
    group = running(books, Sequence(1, 5)).become(Status.WAITING)
    with pytest.raises(AssertionError, match=r"already exists for sequences \[1\]"):
        books.allocate(group)
    assert free(books)[0] == 14


@pytest.mark.parametrize("options", [{"sliding_window": 8}, {"enable_caching": True}])
def test_an_encoder_takes_neither_a_window_nor_a_cache(options: dict[str, Any]):
    group = Group(Sequence(1, 5), encoder=Sequence(2, 5))
    for call in (manager(**options).can_allocate, manager(**options).allocate):
        with pytest.raises(NotImplementedError):
            call(group)


def test_an_encoder_has_a_table_of_its_own():
    books = manager()
    group = Group(Sequence(1, 5), encoder=Sequence(2, 9))
    assert books.can_allocate(group) is AllocStatus.OK
    books.allocate(group)
    assert books.get_cross_block_table(group) == [2, 3, 4]
    books.free_cross(group)
    books.free_cross(group)
    assert free(books)[0] == 14


@both
def test_the_first_writer_of_a_shared_block_copies_it(caching: bool):
    books = manager(enable_caching=caching)
    group = running(books, Sequence(1, 6), Sequence(2, 6))
    for seq in group.seqs:
        seq.tokens.append(seq.seq_id)
    assert books.can_append_slots(group, 0)
    assert [books.append_slots(seq, 0) for seq in group.seqs] == [[(1, 2)], []]
    assert [books.get_block_table(seq) for seq in group.seqs] == [[0, 2], [0, 1]]


def test_freed_ids_are_reused_last_in_first_out():
    books = manager()
    first, second = running(books, Sequence(1, 9)), running(books, Sequence(2, 9, 50))
    books.free(first.seqs[0])
    books.free(second.seqs[0])
    assert books.get_block_table(running(books, Sequence(3, 4 * SIZE, 90)).seqs[0]) == [5, 4, 3, 2]


def test_hits_count_only_once_computed():
    books = manager(enable_caching=True)
    first = running(books, Sequence(1, 3 * SIZE + 1))
    second = running(books, Sequence(2, 3 * SIZE + 1))
    assert books.get_block_table(first.seqs[0])[:3] == books.get_block_table(second.seqs[0])[:3]
    assert books.get_num_cached_tokens(second.seqs[0]) == 0
    books.mark_blocks_as_computed(first, 13)
    assert books.get_num_cached_tokens(second.seqs[0]) == 3 * SIZE
    assert books.get_common_computed_block_ids([first.seqs[0], second.seqs[0]]) == [0, 1, 2]
    assert books.get_prefix_cache_hit_rate(Device.GPU) == 0.5
    assert not books.reset_prefix_cache()
    books.free(first.seqs[0])
    books.free(second.seqs[0])
    assert books.reset_prefix_cache()
    assert books.get_prefix_cache_hit_rate(Device.GPU) == 0.0
    assert manager().get_prefix_cache_hit_rate(Device.GPU) == -1


def test_a_block_that_gets_full_takes_the_id_of_its_like():
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 8, 0, SIZE)
    first = allocator.allocate_immutable_block(None, [1, 2, 3, 4], Device.GPU)
    block = allocator.allocate_mutable_block(None, Device.GPU)
    block.append_token_ids([1, 2, 3])
    assert block.block_id != first.block_id
    block.append_token_ids([4])
    assert (block.block_id, block.content_hash) == (first.block_id, first.content_hash)
    assert allocator.get_num_free_blocks(Device.GPU) == 7


def test_keys_depend_on_what_is_before_and_on_the_extra_hash():
    key = PrefixCachingBlock.hash_block_tokens
    first = key(True, None, [1, 2, 3, 4])
    keys = {first, key(False, first, [1, 2, 3, 4]), key(True, None, [1, 2, 3, 5]), key(True, None, [1, 2, 3, 4], 7)}
    assert len(keys) == 4
    assert key(True, None, [1, 2, 3, 4]) == first


def test_a_token_that_is_not_known_yet_is_a_token_of_its_own():
    key = PrefixCachingBlock.hash_block_tokens
    assert len({key(True, None, [1, token]) for token in (-2, -1, 0, 1)}) == 4


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


def test_lookahead_slots_get_blocks():
    books = manager()
    group = running(books, Sequence(1, SIZE))
    group.seqs[0].tokens.append(1)
    assert books.can_append_slots(group, 2 * SIZE)
    books.append_slots(group.seqs[0], 2 * SIZE)
    assert len(books.get_block_table(group.seqs[0])) == 4


@pytest.mark.parametrize(("cpu", "fits"), [(2, False), (3, True)])
def test_a_swap_out_knows_no_watermark(cpu: int, fits: bool):
    books = manager(cpu=cpu, watermark=0.5)
    assert books.can_swap_out(running(books, Sequence(1, 3 * SIZE))) is fits


def test_a_swap_in_keeps_the_watermark():
    books = manager(gpu=6, watermark=0.5)
    group = running(books, Sequence(1, 3 * SIZE))
    books.swap_out(group)
    group.become(Status.SWAPPED)
    assert books.can_swap_in(group, 0) is AllocStatus.OK
    running(books, Sequence(2, 1))
    assert books.can_swap_in(group, 0) is AllocStatus.LATER
    assert books.can_swap_in(group, 4 * SIZE) is AllocStatus.NEVER


def test_a_swap_that_does_not_fit_changes_nothing():
    books = manager(cpu=2)
    group = running(books, Sequence(1, 3 * SIZE))
    before = list(books.get_block_table(group.seqs[0]))
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        books.swap_out(group)
    assert (books.get_block_table(group.seqs[0]), free(books)) == (before, (13, 2))


def test_unknown_sequences_are_neither_freed_nor_forked():
    books = manager()
    books.free(Sequence(1, 4))
    books.fork(Sequence(1, 4), Sequence(2, 4))
    assert not books.block_tables


def test_a_block_is_freed_once():
    allocator = CpuGpuBlockAllocator.create("naive", 4, 4, SIZE)
    block = allocator.allocate_mutable_block(None, Device.CPU)
    alias = NaiveBlock(None, [], SIZE, allocator.of(Device.CPU), block.block_id)
    assert block.block_id == 4
    allocator.free(block)
    for freed in (block, alias):
        with pytest.raises(AssertionError):
            allocator.free(freed)
    assert allocator.get_num_free_blocks(Device.CPU) == 4


def test_errors_are_v0s():
    allocator = PrefixCachingBlockAllocator(1, SIZE)
    with pytest.raises(ValueError, match="not belonged to GPU"):
        allocator.mark_blocks_as_accessed([0], 1.0)
    with pytest.raises(ValueError, match="'magic'"):
        CpuGpuBlockAllocator.create("magic", 1, 1, SIZE)
    with pytest.raises(ValueError, match="'v3'"):
        BlockSpaceManager.get_block_space_manager_class("v3")
    assert BlockSpaceManager.get_block_space_manager_class("SelfAttn") is SelfAttnBlockSpaceManager
    with pytest.raises(AssertionError):
        allocator.allocate_immutable_block(None, [1])
    null = CpuGpuBlockAllocator.create("naive", 1, 0, SIZE).allocate_or_get_null_block()
    with pytest.raises(ValueError, match="null block"):
        null.append_token_ids([1])
    with pytest.raises(TypeError):
        BlockAllocator()  # type: ignore[abstract]
