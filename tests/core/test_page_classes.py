"""Page classes: groups with blocks of their own bytes and tokens, over one arena or a fixed split."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from blockyard import Arena, BlockManager, CacheGroup, Pairs, PrefixCaching
from blockyard.errors import InvalidArgumentError, OutOfBlocksError

FULL = CacheGroup.full_attention().with_blocks(tokens=4, bytes=64)
WINDOW = CacheGroup.sliding_window(6).with_blocks(tokens=2, bytes=48)
STATE = CacheGroup.recurrent().with_blocks(bytes=960)
GROUPS = [FULL, WINDOW, STATE]
TOKENS = (4, 2, 4)
EXTENT = 960


def manager(device: int = 8, host: int = 4, *, caching: bool = True) -> BlockManager:
    arena = Arena(device_bytes=device * EXTENT, host_bytes=host * EXTENT, extent_bytes=EXTENT)
    return BlockManager(block_size=4, groups=GROUPS, arena=arena, prefix_caching=caching, watermark=0)


class Memory:
    """The bytes of device and host, and the views of each class of them."""

    def __init__(self, owner: BlockManager, extents: dict[str, int]) -> None:
        self.views = {}
        for tier, count in extents.items():
            arena = np.zeros(count * EXTENT, np.uint8)
            for at in range(owner.num_page_classes):
                pool = owner.pool(tier, at)
                assert pool.per_extent is not None
                assert pool.block_stride == EXTENT // pool.per_extent
                shape, strides = (pool.num_blocks, pool.block_bytes), (pool.block_stride, 1)
                self.views[tier, at] = np.lib.stride_tricks.as_strided(arena, shape, strides)

    def run(self, owner: BlockManager) -> set[int]:
        """Carry a step out and end it; return the page classes that it moved."""
        decision = owner.take_decision()
        for _, pairs in decision.transfers():
            src, dst = self.views[pairs.src, pairs.page_class], self.views[pairs.dst, pairs.page_class]
            dst[pairs.ids[:, 1]] = src[pairs.ids[:, 0]]
        owner.complete(decision.ticket)
        return {pairs.page_class for _, pairs in decision.transfers()}


def test_every_class_finds_its_bytes_in_one_arena_after_a_swap() -> None:
    owner = manager(host=8)
    memory, sequences = Memory(owner, {"device": 8, "host": 8}), owner.allocate(counts=[5, 6])
    memory.run(owner)
    for sequence in sequences.tolist():
        for group, tokens in enumerate(TOKENS):
            slots = owner.slot_mapping([sequence], 4, 5, group=group)
            # A token takes an equal part of its block.
            memory.views["device", group][slots // tokens, slots % tokens] = 10 * group + sequence % 7 + 1
    owner.swap_out(sequences)
    assert memory.run(owner) == {0, 1, 2}
    owner.swap_in(sequences)
    for view in (memory.views["device", 0],):
        view[:] = 0  # nothing of the old bytes is left
    memory.run(owner)
    for sequence in sequences.tolist():
        for group, tokens in enumerate(TOKENS):
            slots = owner.slot_mapping([sequence], 4, 5, group=group)
            assert memory.views["device", group][slots // tokens, slots % tokens] == 10 * group + sequence % 7 + 1
    owner.check()


def test_a_class_takes_the_extents_that_another_no_longer_uses() -> None:
    owner = manager(caching=False)
    states = owner.allocate(counts=[1] * 2)
    assert [owner.pool(page_class=at).num_extents for at in range(3)] == [1, 1, 2]
    owner.free(states)
    long = owner.allocate(20 * 4)
    assert owner.pool(page_class=0).num_extents == 2
    assert owner.pool(page_class=2).num_extents < 2 or owner.pool(page_class=1).num_extents > 1
    owner.free([long])
    owner.check()


def test_admission_is_exact_by_class_and_names_the_class_that_is_short() -> None:
    owner = manager(device=4, caching=False)
    # Three extents: one of full blocks, one of the window's, one state.
    first = owner.allocate(4)
    fit = owner.can_allocate(4)
    assert (fit.status.name, fit.blocks, fit.free, fit.page_class) == ("LATER", 1, 0, 2)
    with pytest.raises(OutOfBlocksError, match="asked for 1 device blocks of page class 2, 0 of 3 are free"):
        owner.allocate(4)
    assert owner.can_allocate(4 * 40).status.name == "NEVER"
    owner.free([first])
    assert owner.can_allocate(4).status.name == "OK"


def test_a_prompt_continues_in_blocks_of_every_size() -> None:
    owner, prompt = manager(), list(range(1, 14))
    for cached in (0, 12):
        sequence = owner.allocate(prompt, chunk_tokens=8)
        assert sequence.cached_tokens == cached
        while True:
            owner.complete(owner.take_decision().ticket)
            owner.mark_computed([sequence])
            if not (chunk := owner.next_chunk(sequence, 8)):
                break
            owner.append([sequence], chunk)
        owner.free([sequence])
    owner.check()


def test_a_fixed_split_gives_each_class_its_own_blocks() -> None:
    arena = Arena.split(device_blocks=[9, 13, 3], host_blocks=[1, 1, 1])
    owner = BlockManager(block_size=4, groups=GROUPS, arena=arena, watermark=0)
    assert [owner.pool(page_class=at).num_blocks for at in range(3)] == [9, 13, 3]
    assert owner.pool(page_class=1).per_extent is None
    sequence = owner.allocate(4)
    assert [owner.block_table(sequence, group).tolist() for group in range(3)] == [[1], [1, 2], [1]]
    assert owner.pool(page_class=1).uses().tolist()[:4] == [0, 3, 3, 0]
    assert owner.append([sequence]).tolist() == [[8], [6], [4]]  # the state moves on within the step


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        (GROUPS, {"device_blocks": 9}, "numbers of blocks is 1, must be 3, one for each page class"),
        (GROUPS, {}, "give either device_blocks or arena"),
        ([FULL.with_blocks(tokens=3)], {"device_blocks": 9}, "block_tokens is 3, must be a divisor of 4"),
        ([FULL, STATE.with_blocks(tokens=2)], {"device_blocks": 9}, "block_tokens of a recurrent group is 2"),
        (GROUPS, {"arena": Arena(device_bytes=9000, extent_bytes=950)}, "extent_bytes is 950, must be at least 960"),
        (
            GROUPS,
            {"arena": Arena(device_bytes=9000, extent_bytes=961)},
            "extent_bytes is 961, must be a multiple of 15",
        ),
        ([FULL.with_blocks(bytes=at) for at in range(1, 6)], {"device_blocks": 9}, "number of page classes is 5"),
        (GROUPS, {"arena": Arena.split(device_blocks=[9, 9, 1])}, "device_blocks is 1, must be at least 2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(groups: list[CacheGroup], options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InvalidArgumentError, match=message):
        BlockManager(block_size=4, groups=groups, **options)


def test_what_works_with_one_class_only_is_refused_by_name() -> None:
    owner = manager()
    with pytest.raises(InvalidArgumentError, match="block_tokens is 2, must be 4 in all groups for events"):
        BlockManager(
            block_size=4,
            groups=GROUPS,
            arena=Arena.split(device_blocks=[9] * 3),
            prefix_caching=PrefixCaching(max_events=9),
        )
    for call in (lambda: owner.defrag.run("dense", 1), owner.defrag.fragmentation):
        with pytest.raises(InvalidArgumentError, match="number of page classes is 3, must be 1 for"):
            call()


def sparse() -> tuple[BlockManager, Memory, list[int]]:
    """A manager of six extents: two have full blocks, and two the states of the two sequences."""
    arena = Arena(device_bytes=7 * EXTENT, extent_bytes=EXTENT)
    owner = BlockManager(block_size=4, groups=[FULL, STATE], arena=arena, prefix_caching=False, watermark=0)
    memory = Memory(owner, {"device": 7})
    first, between, last = owner.allocate(counts=[40, 48, 8]).tolist()
    memory.run(owner)
    owner.free([between])
    return owner, memory, [first, last]


def test_an_extent_is_emptied_for_a_class_that_lacks_one() -> None:
    owner, memory, sequences = sparse()
    assert [owner.pool(page_class=at).num_extents for at in range(2)] == [2, 3]
    view, tables = memory.views["device", 0], [owner.block_table(sequence).tolist() for sequence in sequences]
    for table in tables:
        view[table] = np.array(table)[:, None]
    assert owner.can_allocate(1).wanted == [1, 1]
    with pytest.raises(OutOfBlocksError, match="asked for 3 device blocks of page class 1, 2 of"):
        owner.allocate(counts=[1] * 3)
    report = owner.defrag.run("extents", wanted=[3, 3], max_moves=1)
    assert (report.planned, report.left, report.stuck) == (1, 1, 0)
    assert [owner.block_table(sequence).tolist() for sequence in sequences] == tables
    assert memory.run(owner) == {0}
    assert owner.defrag.run("extents", wanted=[3, 3]).planned == 1
    assert owner.defrag.run("extents", wanted=[3, 3]).planned == 0, "these are on their way"
    memory.run(owner)
    for sequence, table in zip(sequences, tables, strict=True):
        assert view[owner.block_table(sequence), 0].tolist() == table
    assert len({block // 15 for sequence in sequences for block in owner.block_table(sequence).tolist()}) == 1
    owner.allocate(counts=[1] * 3)
    owner.check()


def test_nothing_moves_if_the_extents_that_are_lacking_cannot_all_be_emptied() -> None:
    owner, _, sequences = sparse()
    assert len(owner.defrag.run("extents", wanted=[3, 4])) == 0
    assert owner.defrag.run("extents", 3, max_bytes=127).planned == 1, "two are empty, and a third one can be"
    assert owner.defrag.run("extents", 2).planned == 0
    owner.append(sequences)
    assert owner.defrag.run("extents", 4, wanted=[60, 0]).planned == 0, "a class that lacks blocks gives none"


def test_what_the_goal_extents_cannot_be_used_with_is_refused_by_name() -> None:
    owner, _, _ = sparse()
    split = BlockManager(block_size=4, groups=GROUPS, arena=Arena.split(device_blocks=[9] * 3))
    for call, message in (
        (lambda: split.defrag.run("extents", 1), "number of page classes is 3, must be at least 2, over an arena"),
        (lambda: owner.defrag.run("extents", wanted=[1, 2, 3]), "numbers of blocks is 3, must be at most 2"),
        (lambda: owner.defrag.run("extents", wanted=[-1]), r"wanted\[0\]|wanted is"),
        (lambda: owner.defrag.run("extents", cached="drop"), "without sequences, block_bytes and cached"),
        (lambda: owner.defrag.run("dense", 1, wanted=[1]), 'with the goal "extents" only'),
        (lambda: owner.defrag.run([("extents", 1)]), 'goal is "extents", must be "max_id"'),  # type: ignore[list-item]
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            call()


def test_stats_count_the_bytes_of_each_class() -> None:
    owner = manager(host=2)
    sequence = owner.allocate(list(range(9)), chunk_tokens=9)
    owner.complete(owner.take_decision().ticket)
    owner.mark_computed([sequence])
    stats = owner.stats()
    assert (stats.num_bytes, stats.class_bytes["host"]) == ({"device": 7 * 960, "host": 960, "external": 0}, [0] * 3)
    used = [(owner.block_table(sequence, group) > 0).sum() * size for group, size in enumerate((64, 48, 960))]
    assert stats.used_bytes["device"] == used
    assert stats.class_bytes["device"] == [owner.pool(page_class=at).num_extents * 960 for at in range(3)]
    assert stats.cached_bytes["device"] == [2 * 64, 3 * 48, 960]
    assert stats.usage("device") == sum(used) / (7 * 960)
    assert stats.as_dict()["used_bytes_device_2"] == 960
    plain = BlockManager(block_size=4, device_blocks=8).stats()
    assert (plain.num_bytes["device"], plain.used_bytes["device"]) == (0, [0])


def test_a_prompt_gives_up_its_resume_points_if_there_is_no_room_for_their_states() -> None:
    for arena in (Arena(device_bytes=3 * EXTENT, extent_bytes=EXTENT), None):
        groups = [FULL, STATE] if arena else [CacheGroup.full_attention(), CacheGroup.recurrent()]
        blocks = None if arena else 1 + 4 + 1
        owner = BlockManager(
            block_size=4, groups=groups, arena=arena, device_blocks=blocks, prefix_caching=True, watermark=0
        )
        prompt = list(range(13))
        assert owner.can_allocate(13, chunk_tokens=16).status.name == "OK"
        assert owner.can_allocate(prompt, chunk_tokens=16).status.name == "OK", "one state is enough without a point"
        assert owner.can_allocate(prompt, chunk_tokens=12).status.name == "NEVER"
        sequence = owner.allocate(prompt, chunk_tokens=16)
        assert owner.num_tokens(sequence) == 13
        owner.complete(owner.take_decision().ticket)
        owner.mark_computed([sequence])
        owner.free([sequence])
        owner.check()


def test_groups_pairs_and_arenas_show_and_pickle_their_classes() -> None:
    pairs = Pairs("device", "host", [(1, 2)], 3)
    arena = Arena(device_bytes=10, extent_bytes=5)
    for value in (WINDOW, STATE, FULL.with_blocks(), pairs):
        assert pickle.loads(pickle.dumps(value)) == value
    assert repr(WINDOW) == "CacheGroup.sliding_window(6).with_blocks(tokens=2, bytes=48)"
    assert (WINDOW.block_tokens, WINDOW.block_bytes, pairs.page_class) == (2, 48, 3)
    assert pairs != Pairs("device", "host", [(1, 2)])
    assert "page_class=3" in repr(pairs)
    assert repr(arena) == "Arena(device_bytes=10, host_bytes=0, external_bytes=0, extent_bytes=5)"
    with pytest.raises(InvalidArgumentError, match="page_class is 4, must be below 4"):
        Pairs("device", "host", [(1, 2)], 4)


def test_a_tier_without_blocks_refuses_rows_whose_tables_are_all_null() -> None:
    chunk = CacheGroup.chunked_attention(6).with_blocks(bytes=16)
    window = CacheGroup.sliding_window(1).with_blocks(bytes=160)
    arena = Arena(device_bytes=5000, external_bytes=20000)
    manager = BlockManager(block_size=4, groups=[chunk, window], arena=arena, prefix_caching=True, watermark=0)
    sequence = manager.allocate(list(range(12)), chunk_tokens=16)
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed([sequence])
    manager.complete(manager.take_decision().ticket)
    assert not any(manager.block_table(sequence, group).any() for group in range(2))
    with pytest.raises(OutOfBlocksError, match="host blocks"):
        manager.swap_out([sequence])
    manager.check()


def test_prompts_stay_cached_while_others_have_left_enough_empty_extents() -> None:
    """Each class keeps the empty extents that it was given: it does not evict for what another took from it."""
    groups = [
        CacheGroup.full_attention().with_blocks(bytes=64),
        CacheGroup.sliding_window(64).with_blocks(bytes=384),
        CacheGroup.recurrent().with_blocks(bytes=3072),
    ]
    arena = Arena(device_bytes=200 * 3072, extent_bytes=3072)
    manager = BlockManager(
        block_size=4, groups=groups, arena=arena, watermark=0, prefix_caching=PrefixCaching(eviction="lru")
    )

    def serve(tokens: int, first: int) -> list[int]:
        prompt = [first, *range(1, tokens)]
        sequence = manager.allocate(prompt, chunk_tokens=64)
        while True:
            manager.complete(manager.take_decision().ticket)
            manager.mark_computed(sequence)
            if not (chunk := manager.next_chunk(sequence, 64)):
                break
            manager.append([sequence], chunk)
        manager.free(sequence)
        manager.check()
        return prompt

    def found(prompts: list[list[int]]) -> int:
        return sum(manager.prefix.lookup(prompt).tokens > 0 for prompt in prompts)

    short = [serve(5, 1000 + number) for number in range(160)]
    assert found(short) == 160
    long = []
    for number in range(40):
        long.append(serve(64, 2000 + number))
        assert found(long) == len(long), f"{found(short)} short prompts are cached, and long ones are evicted"
    assert 40 < found(short) < 160


def growing(device: int = 4, most: int = 8, **options: int) -> BlockManager:
    """A manager of full blocks and states over an arena that can grow."""
    sizes = {"device_bytes": device * EXTENT, "max_device_bytes": most * EXTENT, **options}
    arena = Arena(extent_bytes=EXTENT, **sizes)
    return BlockManager(block_size=4, groups=[FULL, STATE], arena=arena, prefix_caching=True, watermark=0)


def test_an_arena_grows_up_to_its_maximum_and_keeps_what_it_has() -> None:
    owner = growing(device=4)
    sequence = owner.allocate(list(range(60)), chunk_tokens=64)
    tables = [owner.block_table(sequence, group).tolist() for group in range(2)]
    assert owner.can_allocate(60).status.name == "LATER"
    progress = owner.defrag.resize(device_bytes=8 * EXTENT + 7)
    assert (progress.blocks, progress.extent, progress.done) == (8, 8, True)
    assert [(owner.pool(page_class=at).num_blocks, owner.pool(page_class=at).max_blocks) for at in range(2)] == [
        (8 * 15, 8 * 15),
        (8, 8),
    ]
    assert owner.can_allocate(60)
    assert [owner.block_table(sequence, group).tolist() for group in range(2)] == tables
    owner.check()


def test_a_shrinking_arena_keeps_blocks_in_use_and_gives_no_others_out_beyond_its_end() -> None:
    owner = growing(device=8)
    first, last = owner.allocate(counts=[4 * 15 * 2, 4]).tolist()
    owner.complete(owner.take_decision().ticket)
    state = owner.block_table(last, 1).tolist()
    progress = owner.defrag.resize(device_bytes=3 * EXTENT)
    assert (progress.blocks, progress.live, progress.held) == (3, 3, 0)
    assert progress.extent == 1 + max(state[-1], owner.block_table(first, 1)[-1])
    assert not owner.can_allocate(4), "each block beyond the end takes the place of one before it"
    assert owner.block_table(last, 1).tolist() == state
    owner.free([first, last])
    assert owner.defrag.progress().done
    sequence = owner.allocate(4)
    assert max(owner.block_table(sequence, 1)) < 3
    with pytest.raises(OutOfBlocksError, match="page class 1"):
        owner.allocate(4)
    owner.check()


def test_moves_empty_the_extents_beyond_the_end() -> None:
    owner = growing(device=8)
    memory = Memory(owner, {"device": 8})
    other, sequence = owner.allocate(counts=[4, 1]).tolist()
    owner.append([sequence], 4 * 30 - 1)
    memory.run(owner)
    table, view = owner.block_table(sequence).tolist(), memory.views["device", 0]
    view[table] = np.array(table)[:, None]
    owner.free([other])
    assert owner.defrag.resize(device_bytes=5 * EXTENT).live == 1  # the last full block
    assert owner.defrag.run("extents", 0).planned == 1
    assert memory.run(owner) == {0}
    assert owner.defrag.progress().done
    moved = owner.block_table(sequence).tolist()
    assert moved[:-1] == table[:-1]
    assert moved[-1] < 5 * 15 <= table[-1]
    assert (view[moved] == np.array(table)[:, None]).all()
    owner.check()


def test_cached_blocks_beyond_the_end_are_dropped() -> None:
    owner = growing(device=8)
    prompt = list(range(4 * 15 * 3 + 1))
    sequence = owner.allocate(prompt, chunk_tokens=256)
    owner.complete(owner.take_decision().ticket)
    owner.mark_computed([sequence])
    owner.free([sequence])
    assert owner.prefix.lookup(prompt).tokens
    owner.defrag.resize(device_bytes=2 * EXTENT)
    assert owner.prefix.lookup(prompt).tokens == 0
    assert owner.defrag.progress().done
    owner.check()


def test_each_class_of_a_split_is_resized_on_its_own() -> None:
    arena = Arena.split(device_blocks=[9, 4], max_device_blocks=[12, 4])
    owner = BlockManager(block_size=4, groups=[FULL, STATE], arena=arena, prefix_caching=False, watermark=0)
    first, last = owner.allocate(counts=[12, 12]).tolist()
    assert owner.defrag.resize([12, 4]).done
    progress = owner.defrag.resize([5, 4])
    assert (progress.blocks, progress.live, progress.extent) == (9, 2, 11)
    owner.free([first, last])
    assert owner.defrag.progress().done
    assert [owner.pool(page_class=at).num_free for at in range(2)] == [4, 3]
    owner.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_bytes": 9 * EXTENT}, "device extents is 9, must be 2 to 8: 1 for null blocks, 0 pinned"),
        ({"device_bytes": EXTENT}, "device extents is 1, must be 2 to 8"),
        ({"blocks": 9}, "number of page classes is 2, must be 1 to resize one number of blocks; give device_bytes"),
        ({"blocks": [9, 9]}, "number of sizes in blocks is 2, must be 0 over an arena, .*; give device_bytes"),
        ({"blocks": 9, "device_bytes": 9}, "give either blocks or device_bytes"),
        ({}, "give either blocks or device_bytes"),
    ],
)
def test_a_resize_that_cannot_be_changes_nothing(arguments: dict, message: str) -> None:  # type: ignore[type-arg]
    owner = growing()
    with pytest.raises(InvalidArgumentError, match=message):
        owner.defrag.resize(**arguments)
    assert owner.defrag.progress().blocks == 4
    split = BlockManager(block_size=4, groups=[FULL, STATE], arena=Arena.split(device_blocks=[9, 4]))
    one = BlockManager(block_size=4, device_blocks=9)
    for other, size, text in (
        (split, {"blocks": [10, 4]}, "device_blocks is 10, must be 2 to 9 of page class 0"),
        (split, {"blocks": [9]}, "numbers of device blocks is 1, must be 2, one for each page class"),
        (split, {"blocks": 9}, "must be 1 to resize one number of blocks; give a list, one number for each class"),
        (split, {"device_bytes": 9}, "extents that page classes share is 0, must be at least 1 .*; give a list"),
        (one, {"blocks": [9]}, "number of page classes is 1, must be at least 2 to resize a list .*; give one number"),
        (one, {"device_bytes": 9}, "extents that page classes share is 0, must be at least 1 .*; give a number"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            other.defrag.resize(**size)
    for make, text in (
        (lambda: Arena(device_bytes=9, max_device_bytes=8), "max_device_bytes is 8, must be at least device_bytes, 9"),
        (lambda: Arena.split(device_blocks=[9], max_device_blocks=[8]), r"max_device_blocks is \[8\], must have"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            make()


def test_a_quota_is_in_bytes_and_counts_each_block_with_its_own() -> None:
    owner = growing(device=8)
    owner.prefix.set_quota(b"a", num_bytes=3 * 960)
    for number in range(6):
        prompt = [number, *range(1, 9)]
        sequence = owner.allocate(prompt, salt=b"a", chunk_tokens=16)
        owner.complete(owner.take_decision().ticket)
        owner.mark_computed([sequence])
        owner.free([sequence])
        held, quota = owner.prefix.quota(b"a")
        assert (held <= quota, quota) == (True, 3 * 960)
    # Two full blocks and a state for each prompt that is left.
    assert held == 2 * (2 * 64 + 960)
    owner.check()
    with pytest.raises(
        InvalidArgumentError, match="blocks is 9, must be None with 2 page classes, whose quotas are num"
    ):
        owner.prefix.set_quota(b"a", 9)
    with pytest.raises(InvalidArgumentError, match="num_bytes is 99999, must be at most the device's 6720 bytes"):
        owner.prefix.set_quota(b"a", num_bytes=99_999)


def test_with_one_class_a_quota_in_bytes_is_one_in_blocks() -> None:
    owner = BlockManager(block_size=4, groups=[FULL], device_blocks=9, prefix_caching=True)
    owner.prefix.set_quota(b"a", num_bytes=64 * 5 + 9)
    assert owner.prefix.quota(b"a") == (0, 5)
    with pytest.raises(InvalidArgumentError, match="give either blocks, 5, or num_bytes, 6"):
        owner.prefix.set_quota(b"a", 5, num_bytes=6)
    plain = BlockManager(block_size=4, device_blocks=9, prefix_caching=True)
    with pytest.raises(InvalidArgumentError, match="num_bytes is 6, must be None if blocks have no bytes"):
        plain.prefix.set_quota(b"a", num_bytes=6)
