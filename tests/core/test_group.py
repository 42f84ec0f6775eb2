"""Cache groups: sliding windows, recurrent states, cross attention, and models that have several."""

from __future__ import annotations

import numpy as np
import pytest
from managers import step
from prompts import allocate_prompts

from blockyard import AllocStatus, BlockManager, CacheGroup
from blockyard.errors import InvalidArgumentError, UnknownSequenceError

FULL = CacheGroup.full_attention()
STATE = CacheGroup.recurrent()


def test_a_window_holds_no_more_blocks_than_it_needs_however_long_it_decodes() -> None:
    manager = BlockManager(block_size=16, device_blocks=64, watermark=0.0, groups=[CacheGroup.sliding_window(40)])
    (sequence,) = manager.allocate(counts=[1])
    cap = 40 // 16 + 2
    for _ in range(3000):
        step(manager)
        manager.append([sequence])
        assert manager.pool().num_blocks - 1 - manager.pool().num_free <= cap
    table = manager.block_table(sequence)
    assert len(table) == -(-3001 // 16)
    assert np.count_nonzero(table) <= cap
    assert not table[:-cap].any()


def test_what_a_window_gave_back_is_used_by_others() -> None:
    manager = BlockManager(block_size=4, device_blocks=9, watermark=0.0, groups=[CacheGroup.sliding_window(8)])
    (first,) = manager.allocate(counts=[32])
    step(manager)
    assert manager.can_allocate(4).status == AllocStatus.LATER
    manager.mark_computed([first])
    step(manager)
    (second,) = manager.allocate(counts=[20])
    assert not set(manager.block_table(second)) & (set(manager.block_table(first)) - {0})


def test_a_prompt_longer_than_the_device_fits_through_a_window_by_chunks() -> None:
    manager = BlockManager(
        block_size=4, device_blocks=12, watermark=0.0, groups=[CacheGroup.sliding_window(10)], prefix_caching=True
    )
    assert manager.can_allocate(400).status == AllocStatus.NEVER
    assert manager.can_allocate(400, chunk_tokens=16).status == AllocStatus.OK
    (sequence,), _ = allocate_prompts(manager, [np.arange(400, dtype=np.uint32)], chunk_tokens=16)
    while (chunk := manager.next_chunk(sequence, 16)) > 0:
        step(manager)
        manager.mark_computed([sequence])
        slots = manager.append([sequence], chunk)
        assert len(np.unique(slots)) == chunk
        assert slots.min() >= 4, "a token was written to the null block"
    assert manager.num_tokens(sequence) == 400


def test_hits_are_what_all_groups_can_serve() -> None:
    manager = BlockManager(
        block_size=4, device_blocks=64, watermark=0.0, groups=[FULL, CacheGroup.sliding_window(6)], prefix_caching=True
    )
    prompt = np.arange(41, dtype=np.uint32)
    (first,), cached = allocate_prompts(manager, [prompt])
    assert cached[0] == 0
    step(manager)
    manager.mark_computed([first])
    assert np.count_nonzero(manager.block_table(first, 1)) < len(manager.block_table(first, 0))
    (second,), cached = allocate_prompts(manager, [prompt])
    assert cached[0] == 40
    full, window = manager.block_table(second, 0), manager.block_table(second, 1)
    assert np.count_nonzero(full[:10]) == 10
    assert np.count_nonzero(window[:10]) == 2, "six tokens before the 41st, two blocks"
    assert set(full[:10]) == set(manager.block_table(first, 0)[:10])
    slots = manager.slot_mapping(second, 40, 41), manager.slot_mapping(second, 40, 41, group=1)
    assert slots[0][0] != slots[1][0]
    # All full blocks were cached before the window gave its own back.
    manager.free([first, second])
    assert (manager.prefix.lookup(prompt).tokens, manager.prefix.lookup(prompt[:20]).tokens) == (40, 0)


@pytest.mark.parametrize("question", [4, 8, 30, 100])
def test_each_question_behind_a_system_prompt_that_was_sent_alone_finds_it(question: int) -> None:
    manager = BlockManager(
        block_size=4,
        device_blocks=2_000,
        watermark=0.0,
        groups=[FULL, CacheGroup.sliding_window(16)],
        prefix_caching=True,
    )
    system = np.arange(161, dtype=np.uint32)
    for number, expected in enumerate([0, 160, 160, 160, 160]):
        added = np.full(4 * question if number else 0, 1_000 + number, np.uint32)
        (sequence,), cached = allocate_prompts(manager, [np.concatenate((system[:160], added, system[160:]))])
        assert cached[0] == expected, number
        step(manager)
        manager.mark_computed([sequence])
        manager.free([sequence])
        manager.check()


@pytest.mark.parametrize("group", [CacheGroup.chunked_attention(16), CacheGroup.sliding_window(1)], ids=str)
def test_a_prompt_continues_where_the_next_token_needs_no_earlier_block(group: CacheGroup) -> None:
    manager = BlockManager(block_size=4, device_blocks=20, watermark=0.0, groups=[group], prefix_caching=True)
    prompt = np.arange(17, dtype=np.uint32)
    for expected in (0, 16):
        fit = manager.can_allocate(prompt)
        used = manager.stats().used_blocks["device"]
        (sequence,), cached = allocate_prompts(manager, [prompt])
        assert cached[0] == expected
        assert manager.stats().used_blocks["device"] - used == fit.blocks
        step(manager)
        manager.mark_computed([sequence])
        manager.free([sequence])
        manager.check()


@pytest.mark.parametrize(("blocks", "found"), [(16, 36), (15, 0)])
def test_a_point_that_is_marked_one_append_late_is_made_if_there_is_room_for_its_tail(blocks: int, found: int) -> None:
    groups = [FULL, CacheGroup.sliding_window(9)]
    manager = BlockManager(block_size=4, device_blocks=blocks, watermark=0.0, groups=groups, prefix_caching=True)
    prompt = list(range(40))
    sequence = manager.allocate(prompt, chunk_tokens=4)
    for tokens in [4] * 7 + [8]:
        step(manager)
        manager.mark_computed(sequence)
        manager.append(sequence, tokens)
    step(manager)
    manager.append(sequence)  # decided before it is known that the prompt is computed
    step(manager)
    manager.mark_computed(sequence, num_computed=40)
    manager.check()
    assert manager.prefix.lookup(prompt).tokens == found


def test_a_window_keeps_no_tail_for_a_scheduler_that_marks_nothing() -> None:
    groups = [FULL, CacheGroup.sliding_window(9)]
    manager = BlockManager(block_size=4, device_blocks=200, watermark=0.0, groups=groups, prefix_caching=True)
    sequence = manager.allocate(list(range(40)))
    for _ in range(40):
        step(manager)
        manager.append(sequence)
        assert np.count_nonzero(manager.block_table(sequence, group=1)) <= 10 + 1
    assert np.count_nonzero(manager.block_table(sequence, group=1)) <= 9 // 4 + 2


def test_append_gives_each_group_its_slots() -> None:
    manager = BlockManager(block_size=4, device_blocks=64, groups=[FULL, CacheGroup.sliding_window(6), STATE])
    sequences = manager.allocate(counts=[5, 9])
    step(manager)
    slots = manager.append(sequences, [2, 1])
    assert slots.shape == (3, 3)
    for group in range(3):
        rows = [
            manager.slot_mapping(sequences[0], 5, 7, group=group),
            manager.slot_mapping(sequences[1], 9, 10, group=group),
        ]
        assert np.array_equal(slots[group], np.concatenate(rows))
    assert manager.stats().sequences == 2
    tables = np.full((6, 4), -1, dtype=np.int32)
    step(manager)
    manager.append(sequences, block_tables=tables)
    for group in range(3):
        assert np.array_equal(tables[2 * group : 2 * group + 2, :3], manager.block_tables(sequences, group=group))


@pytest.mark.parametrize("rows", [2, 5])
def test_kept_tables_and_slots_have_one_part_for_each_group_while_a_window_slides(rows: int) -> None:
    manager = BlockManager(block_size=4, device_blocks=64, groups=[FULL, CacheGroup.sliding_window(6)])
    tables, slots = np.zeros((2, rows, 8), dtype=np.int32), np.full((2, 2), -1, dtype=np.int64)
    sequences = manager.allocate(counts=[5, 9])
    for _ in range(12):
        step(manager)
        manager.append(sequences, block_tables=tables.reshape(2 * rows, 8), out=slots.reshape(4))
        assert not tables[:, 2:].any(), "rows of no sequence are left alone"
        for group in range(2):
            shown = manager.block_tables(sequences, group=group)
            assert np.array_equal(tables[group, :2, : shown.shape[1]], shown)
            for row, sequence in enumerate(sequences):
                last = manager.num_tokens(sequence)
                assert slots[group, row] == manager.slot_mapping(sequence, last - 1, last, group=group)[0]
    assert (tables[1, 1] == 0).sum() > (tables[0, 1] == 0).sum(), "the window gave blocks back"


@pytest.mark.parametrize("prompt", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("caching", [False, True])
def test_states_whose_next_tokens_have_no_ids_are_marked(prompt: int, count: int, caching: bool) -> None:
    manager = BlockManager(block_size=2, device_blocks=9, watermark=0.0, groups=[STATE], prefix_caching=caching)
    sequence = manager.allocate(list(range(prompt)), chunk_tokens=2)
    for rest in ([manager.next_chunk(sequence, 2)] if prompt > 2 else [], [count]):
        for tokens in rest:
            step(manager)
            manager.mark_computed(sequence)
            manager.append(sequence, tokens)
    step(manager)
    manager.mark_computed(sequence)
    assert manager.num_tokens(sequence) == prompt + count
    step(manager)


def test_a_recurrent_group_holds_two_states_at_most_and_a_fork_copies_the_one_it_writes() -> None:
    manager = BlockManager(block_size=4, device_blocks=16, groups=[STATE])
    (sequence,) = manager.allocate(counts=[30])
    assert np.count_nonzero(manager.block_table(sequence)) == 1
    step(manager)
    child = manager.fork(sequence)
    manager.append([sequence, child])
    assert len(manager.take_decision().blocks_to_copy) == 1
    manager.check()
    with pytest.raises(InvalidArgumentError, match="cache group 0"):
        manager.truncate(sequence, 30)


def test_an_encoders_blocks_are_shared_by_forks_and_move_with_the_sequence() -> None:
    manager = BlockManager(
        block_size=4, device_blocks=32, host_blocks=32, watermark=0.0, groups=[FULL, CacheGroup.cross_attention()]
    )
    (sequence,) = manager.allocate(counts=[3], encoder_tokens=[10])
    assert (manager.num_tokens(sequence), manager.num_tokens(sequence, 1)) == (3, 10)
    step(manager)
    children = manager.fork(sequence, 3)
    everyone = [sequence, *children]
    assert manager.append(everyone).shape == (4,)
    step(manager)
    assert all(np.array_equal(manager.block_table(s, 1), manager.block_table(sequence, 1)) for s in children)
    assert len(manager.block_table(sequence, 1)) == 3
    manager.swap_out(everyone)
    assert len(manager.take_decision().blocks_to_swap_out) == 4 + 3
    assert manager.tier(sequence) == "host"
    manager.free(everyone)
    with pytest.raises(UnknownSequenceError):
        manager.block_table(sequence, 1)


def test_groups_and_lengths_that_cannot_be_are_refused_with_the_numbers() -> None:
    cross = CacheGroup.cross_attention()
    with pytest.raises(InvalidArgumentError, match="window"):
        BlockManager(block_size=4, device_blocks=8, groups=[CacheGroup.sliding_window(0)])
    with pytest.raises(InvalidArgumentError, match="at most one of them cross attention"):
        BlockManager(block_size=4, device_blocks=8, groups=[cross])
    with pytest.raises(InvalidArgumentError, match="cross attention"):
        BlockManager(block_size=4, device_blocks=8, groups=[FULL, cross], prefix_caching=True)
    manager = BlockManager(block_size=4, device_blocks=8, watermark=0.0, groups=[FULL, cross])
    with pytest.raises(InvalidArgumentError, match="encoder"):
        manager.allocate(counts=[3])
    with pytest.raises(InvalidArgumentError, match="encoder"):
        manager.allocate(counts=[3, 4], encoder_tokens=[5])
    with pytest.raises(InvalidArgumentError, match="encoder"):
        BlockManager(block_size=4, device_blocks=8).allocate(counts=[3], encoder_tokens=[5])
    with pytest.raises(InvalidArgumentError, match="encoder_tokens are given with token ids"):
        manager.allocate([3], encoder_tokens=[5])
    (sequence,) = manager.allocate(counts=[3], encoder_tokens=[5])
    with pytest.raises(InvalidArgumentError, match="group is 2, must be below 2"):
        manager.block_table(sequence, 2)
    with pytest.raises(UnknownSequenceError):
        manager.free([int(sequence) + 1])
    assert manager.can_allocate(16, encoder_tokens=17).status == AllocStatus.NEVER
    manager.check()


def test_a_group_says_what_it_is() -> None:
    window = CacheGroup.sliding_window(9)
    assert (window.kind, window.window, repr(window)) == ("sliding_window", 9, "CacheGroup.sliding_window(9)")
    assert window == CacheGroup.sliding_window(9)
    assert len({window, CacheGroup.sliding_window(9), FULL}) == 2
    assert BlockManager(block_size=4, device_blocks=8, groups=[FULL, window]).groups == (FULL, window)
    assert window.peak_blocks(1000, block_size=4, chunk_tokens=1) == 9 // 4 + 2


DRAFTER = CacheGroup.drafter()


def drafting(**more: object) -> BlockManager:
    sizes = {"block_size": 4, "device_blocks": 64, "watermark": 0.0, "groups": [FULL, DRAFTER], "prefix_caching": True}
    return BlockManager(**(sizes | more))


def computed(manager: BlockManager, prompt: list[int], **more: object) -> int:
    sequence = manager.allocate(prompt, **more)
    step(manager)
    manager.mark_computed(sequence)
    return int(sequence)


def test_a_drafters_block_is_found_only_before_the_same_token() -> None:
    manager, prompt = drafting(), list(range(13))
    computed(manager, prompt)
    found = {next_token: manager.prefix.lookup([*prompt[:8], next_token]).tokens for next_token in (8, 9)}
    assert found == {8: 8, 9: 4}
    assert manager.prefix.lookup(prompt).tokens == 12
    computed(manager, [*prompt[:8], 9])
    assert manager.prefix.lookup([*prompt[:8], 9]).tokens == 8
    manager.check()


def test_an_image_after_a_drafters_block_is_not_another_one() -> None:
    manager, prompt = drafting(), [*range(8), 99, 99]
    cat, dog = [(8, 2, b"cat")], [(8, 2, b"dog")]
    computed(manager, prompt, extras=cat)
    found = [manager.prefix.lookup(manager.prefix.hash(prompt, extras=extras)).tokens for extras in (cat, dog, ())]
    assert found == [8, 4, 4]
    manager = drafting(block_size=1)
    sequence = computed(manager, [9, 0, 0, 0], extras=[(1, 1, b"cat")])
    assert len(set(manager.block_table(sequence).tolist())) == 4, "two blocks have the same key"


def test_a_drafters_block_is_published_once_the_token_after_it_is_computed() -> None:
    manager, prompt = drafting(), list(range(8))
    sequence = computed(manager, prompt)
    assert manager.prefix.lookup([*prompt, 8]).tokens == 4
    manager.append([sequence], token_ids=[8])
    step(manager)
    manager.mark_computed(sequence)
    assert manager.prefix.lookup([*prompt, 8]).tokens == 8


def test_forks_and_rejected_drafts_write_a_drafters_entry_before_their_tokens_in_blocks_of_their_own() -> None:
    manager = drafting()
    first = computed(manager, list(range(8)))
    child = manager.fork(first)
    manager.append([first, child], token_ids=[8, 9])
    assert len(manager.take_decision().blocks_to_copy) == 2  # the last writes in place
    for group in range(2):
        tables = [manager.block_table(sequence, group) for sequence in (first, child)]
        assert tables[0][0] == tables[1][0]
        assert tables[0][1] != tables[1][1]
    manager.check()
    manager = drafting()
    sequence = computed(manager, list(range(9)))
    manager.truncate(sequence, 8)
    manager.append([sequence], token_ids=[9])
    step(manager)
    manager.mark_computed(sequence)
    assert [manager.prefix.lookup([*range(8), token]).tokens for token in (8, 9)] == [8, 8]


def test_a_prefix_is_not_forked_before_another_token() -> None:
    manager = drafting()
    sequence = computed(manager, list(range(9)))
    with pytest.raises(InvalidArgumentError, match="shared_tokens is 8, must be 0 with a drafter's group"):
        manager.fork(sequence, shared_tokens=8, num_tokens=9)
    assert (DRAFTER.kind, DRAFTER.window, repr(DRAFTER)) == ("drafter", None, "CacheGroup.drafter()")
    assert DRAFTER != FULL


@pytest.mark.parametrize("chunks", [[1, 1, 1], [3]])
def test_a_move_of_the_block_that_a_drafter_writes_again_is_cancelled(chunks: list[int]) -> None:
    manager = BlockManager(block_size=4, device_blocks=16, watermark=0.0, groups=[CacheGroup.drafter()])
    first, sequence = manager.allocate(20), manager.allocate(5)
    step(manager)
    for count in chunks:
        manager.append(sequence, count)
        step(manager)
    step(manager)
    step(manager)
    manager.free(first)
    manager.defrag.run("dense", 0)
    manager.append(sequence, 1)  # the step also writes the entry of the token before
    written = int(manager.block_table(sequence)[1])
    decision = manager.take_decision()
    assert written not in {int(pair[0]) for pair in decision.move[0].ids}
    manager.complete(decision.ticket)
    assert manager.block_table(sequence)[1] == written
    manager.check()
