"""The scheduler over managers of hybrid models: rows, slots and tables by cache group, and prompts that are found."""

from typing import Any

import numpy as np
import pytest

from blockyard import Arena, BlockManager, CacheGroup, PrefixCaching
from blockyard.errors import InvalidArgumentError, OutOfBlocksError
from blockyard.scheduler import DefragPolicy, PreemptionCosts, Request, Scheduler

SIZE = 16
FULL, WINDOW, STATE = CacheGroup.full_attention(), CacheGroup.sliding_window(40), CacheGroup.recurrent()


def manager_of(groups: list[CacheGroup], blocks: int, **options: object) -> BlockManager:
    caching = PrefixCaching(eviction="lru")
    given = {"watermark": 0.0, "prefix_caching": caching} | options
    return BlockManager(block_size=SIZE, device_blocks=blocks, groups=groups, **given)  # type: ignore[arg-type]


def run(scheduler: Scheduler) -> list[tuple[int, ...]]:
    """Run to the end; return the outputs."""
    outputs: list[tuple[int, ...]] = []
    for _ in range(1000):
        if not scheduler.num_unfinished:
            return outputs
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        sampled = [1000 + draw.position for draw in step.draws()]
        outputs += [tokens for finished in scheduler.update(step, sampled) for tokens in finished.outputs]
        scheduler.manager.check()
    raise AssertionError(f"{scheduler.num_unfinished} requests are left")


def test_a_step_has_slots_and_tables_of_each_group():
    manager = manager_of([FULL, WINDOW], 64)
    scheduler = Scheduler(manager)
    scheduler.add(Request("a", [*range(100)], 3))
    scheduler.add(Request("b", [*range(200, 220)], 3, n=2))
    for _ in range(2):
        step = scheduler.schedule()
        tokens, rows = len(step.token_ids), step.rows
        assert (step.slot_mapping.shape, step.block_tables.shape[:2]) == ((2, tokens), (2, rows))
        for group in range(2):
            first, last = step.start.tolist(), (step.start + step.lengths).tolist()
            slots = manager.slot_mapping(step.handles, first, last, group=group)
            assert np.array_equal(step.slot_mapping[group], slots)
            tables = manager.block_tables(step.handles, group=group)
            for row, handle in enumerate(step.handles.tolist()):
                blocks = len(manager.block_table(handle, group))
                assert np.array_equal(step.block_tables[group, row, :blocks], tables[row, :blocks])
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [7] * step.num_draws)
    scheduler.add(Request("c", [*range(300, 340)], 1))  # the tables of others stay where they are
    run(scheduler)


def cached_tokens(groups: list[CacheGroup], tail: int, turns: int = 4, sessions: int = 6) -> tuple[int, int]:
    """Serve sessions in turn, in a pool that holds them all and what a running one needs.

    Args:
        groups: cache groups, the first with full attention.
        tail: blocks beside the full ones that a cached session needs.
        turns: of each session, 96 tokens longer each time; answers are short, and the next point is near.
        sessions: how many there are.

    Returns:
        The prompts' tokens that were found in the prefix cache, and all of them.
    """
    longest, chunk = 520 + 96 * turns, 128
    running = manager_of(groups, 1000).can_allocate(longest, chunk_tokens=chunk).blocks
    blocks = 1 + sessions * (longest // SIZE + tail) + running + 2 * tail  # and points that it makes
    scheduler = Scheduler(manager_of(groups, blocks), max_num_batched_tokens=chunk)
    texts = [[10_000 * (session + 1) + at for at in range(520)] for session in range(sessions)]
    asked = 0
    for turn in range(turns):
        for session, text in enumerate(texts):
            asked += len(text)
            scheduler.add(Request(f"{session}", text, 7))
            (output,) = run(scheduler)
            text += [*output, *range(50_000 + 1000 * turn, 50_000 + 1000 * turn + 89)]
    return scheduler.stats().cached_tokens, asked


@pytest.mark.parametrize(
    ("groups", "tail"),
    [([FULL, WINDOW], 4), ([FULL, STATE], 1), ([FULL, WINDOW, CacheGroup.sliding_window(70), STATE], 4 + 6 + 1)],
    ids=["full + window", "full + recurrent", "full + 2 windows + recurrent"],
)
def test_sessions_that_fit_are_found_as_with_full_attention_alone(groups: list[CacheGroup], tail: int):
    found, asked = cached_tokens([FULL], 0)
    assert found > 0.6 * asked
    assert cached_tokens(groups, tail)[0] >= 0.98 * found


@pytest.mark.parametrize(
    ("groups", "blocks", "needed"),
    [([FULL, WINDOW], 90, 38 + 3), ([FULL, STATE], 70, 38 + 1)],
    ids=["full + window", "full + recurrent"],
)
def test_a_preempted_sequence_takes_only_the_blocks_that_its_groups_need_to_the_host(
    groups: list[CacheGroup], blocks: int, needed: int
):
    manager = manager_of(groups, blocks, host_blocks=70, prefix_caching=False)
    scheduler = Scheduler(manager, preemption_mode="swap")
    scheduler.add(Request("long", [*range(600)], 40, priority=1))
    step = scheduler.schedule()
    scheduler.complete(step.decision.ticket)
    scheduler.update(step, [7])
    scheduler.add(Request("urgent", [*range(600)], 2, priority=0))
    step = scheduler.schedule()
    assert sum(map(len, step.decision.swap_out)) == needed
    scheduler.complete(step.decision.ticket)
    scheduler.update(step, [7] * step.num_draws)
    assert len(run(scheduler)) == 2
    assert scheduler.stats().resumed_swap_host == 1


def test_a_victims_swap_costs_what_its_groups_hold():
    """A window's sequence of 600 tokens has 4 of its 38 blocks to load."""
    for groups, swapped in (([CacheGroup.full_attention()], 0), ([CacheGroup.sliding_window(40)], 1)):
        manager = manager_of(groups, 40, host_blocks=70, prefix_caching=False)
        costs = PreemptionCosts(swap_block=20.0, prefill_token=1.0)
        scheduler = Scheduler(manager, preemption_mode=costs)
        scheduler.add(Request("long", [*range(600)], 40, priority=1))
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [7])
        scheduler.add(Request("urgent", [*range(600)], 2, priority=0))
        run(scheduler)
        assert scheduler.stats().preempted_swap_host == swapped


@pytest.mark.parametrize(("group", "own"), [(WINDOW, 4), (STATE, 2)], ids=["window", "recurrent"])
@pytest.mark.parametrize("caching", [False, True])
def test_sequences_of_a_request_share_the_full_blocks_of_its_prompt(group: CacheGroup, own: int, caching: bool):
    """Each of three has 3 of 40 full blocks for itself, and a window, or the states before and after a step."""
    blocks, request = 37 + 3 * (3 + own), Request("a", [*range(600)], 40, n=3)
    scheduler = Scheduler(manager_of([FULL, group], 1 + blocks, prefix_caching=caching))  # one is the null block
    scheduler.add(request)
    assert len(run(scheduler)) == 3
    assert scheduler.stats().preempted_recompute == 0
    smaller = Scheduler(manager_of([FULL, group], blocks, prefix_caching=caching))
    with pytest.raises(OutOfBlocksError, match=f"needs up to {blocks} device blocks and 1 kept free"):
        smaller.add(request)


def test_sequences_of_a_preempted_request_share_blocks_again():
    manager = manager_of([FULL, CacheGroup.sliding_window(48)], 60, prefix_caching=False)
    scheduler = Scheduler(manager, preemption_mode="recompute")
    scheduler.add(Request("two", [*range(600)], 40, n=2, priority=1))
    step = scheduler.schedule()
    scheduler.complete(step.decision.ticket)
    scheduler.update(step, [7] * step.num_draws)
    scheduler.add(Request("urgent", [*range(600)], 2, priority=0))
    assert len(run(scheduler)) == 3
    assert scheduler.stats().preempted_recompute == 1
    # The blocks of two sequences that share nothing do not fit: one would wait until the other has ended.
    assert scheduler.stats().steps < 2 * 40


def test_a_group_with_cross_attention_is_refused():
    manager = manager_of([FULL, CacheGroup.cross_attention()], 8, prefix_caching=False)
    with pytest.raises(InvalidArgumentError, match=r"'cross_attention'.*must be without cross_attention"):
        Scheduler(manager)


EXTENT = 960
OWN = [FULL.with_blocks(tokens=16, bytes=64), STATE.with_blocks(bytes=EXTENT)]


def own_manager(extents: int, **options: object) -> BlockManager:
    """Return a manager whose extents, besides the null extent, hold 15 full blocks of 16 tokens or a state each."""
    arena = Arena(device_bytes=(extents + 1) * EXTENT, extent_bytes=EXTENT)
    given = {"watermark": 0.0, "prefix_caching": False, "groups": OWN} | options
    return BlockManager(block_size=1024, arena=arena, **given)  # type: ignore[arg-type]


def test_prompts_whose_bytes_fit_at_once_start_as_their_blocks_of_each_class_are_there():
    # Five extents have bytes for four of them. Three start at once, as full blocks and windows take an extent each.
    window = WINDOW.with_blocks(tokens=16, bytes=48)
    scheduler = Scheduler(own_manager(5, groups=[*OWN, window]))
    for number in range(6):
        scheduler.add(Request(f"{number}", [*range(4)], 4))
    assert len(run(scheduler)) == 6


def steps_until_last_starts(policy: DefragPolicy | None) -> int:
    """Two extents hold 7 and 3 full blocks, of 15; the last prompt lacks an extent for its state.

    The 7 are of a prompt whose first block is in the other extent, behind those of a prompt that has left.
    """
    scheduler = Scheduler(own_manager(4), defragment=policy)
    arrivals = {
        0: [Request("leaves", [*range(222)], 2), Request("long", [*range(126)], 18)],
        3: [Request("short", [1, 2], 14)],
        4: [Request("last", [1, 2], 2)],
    }
    for number in range(40):
        for request in arrivals.get(number, ()):
            scheduler.add(request)
        step = scheduler.schedule()
        if "last" in [step.owner(row)[0] for row in range(step.rows)]:
            return number
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [7] * step.num_draws)
        scheduler.manager.check()
    raise AssertionError("the last prompt never starts")


def test_extents_are_emptied_for_the_first_waiting_prompt():
    assert steps_until_last_starts(None) > 15
    assert steps_until_last_starts(DefragPolicy([("extents", 0)])) == 6


@pytest.mark.parametrize(
    ("goals", "options", "message"),
    [
        ([("extents", 0), ("dense", 0)], {}, r"must be \[\(\"extents\", n\)\] alone"),
        ([("extents", 0, 1)], {}, "alone"),
        ([("extents", -1)], {}, "n at least 0"),
        ([("extents", 0)], {"cached": "drop"}, "without block_bytes and cached"),
    ],
)
def test_a_policy_for_extents_has_no_other_goals(goals: list[Any], options: dict[str, Any], message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        DefragPolicy(goals, **options)


def test_a_policy_must_fit_the_page_classes():
    extents, dense = DefragPolicy([("extents", 0)]), DefragPolicy([("dense", 0)])
    split = BlockManager(block_size=64, groups=OWN, arena=Arena.split(device_blocks=[9, 9]), watermark=0.0)
    for manager, policy, message in (
        (own_manager(6), dense, "with several page classes, and only then"),
        (manager_of([FULL], 8), extents, "with several page classes, and only then"),
        (split, extents, "fixed split"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            Scheduler(manager, defragment=policy)


def left_once_shrunk(policy: DefragPolicy | None) -> int:
    """How many requests still run when nothing is left beyond the end of an arena that has shrunk.

    Both need a second extent for their full blocks; the first leaves, and the other's new blocks lie beyond the end.
    """
    manager = own_manager(6)
    scheduler = Scheduler(manager, defragment=policy)
    scheduler.add(Request("leaves", [*range(240)], 20))
    scheduler.add(Request("long", [*range(236)], 60))
    has_shrunk = False
    while not has_shrunk or not manager.defrag.progress().done:
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [7] * step.num_draws)
        manager.check()
        if scheduler.num_unfinished == 1 and not has_shrunk:
            assert manager.defrag.resize(device_bytes=5 * EXTENT).live
            has_shrunk = True
    return scheduler.num_unfinished


def test_blocks_leave_the_extents_beyond_the_end_while_their_request_runs():
    assert left_once_shrunk(None) == 0
    assert left_once_shrunk(DefragPolicy([("extents", 0)])) == 1


def test_a_request_that_lacks_blocks_of_one_class_once_a_split_has_shrunk_is_refused():
    full, window = CacheGroup.full_attention().with_blocks(bytes=1 << 14), CacheGroup.sliding_window(64)
    arena = Arena.split(device_blocks=[40, 40], max_device_blocks=[60, 60])
    manager = BlockManager(block_size=16, groups=[full, window.with_blocks(bytes=1 << 15)], arena=arena, watermark=0.0)
    scheduler = Scheduler(manager, max_num_batched_tokens=512)
    scheduler.add(Request("early", list(range(300)), max_tokens=100))
    manager.defrag.resize([40, 3])
    step = scheduler.schedule()
    scheduler.complete(step.decision.ticket)
    (finished,) = scheduler.update(step, [0] * step.num_draws)
    assert isinstance(finished.error, OutOfBlocksError)
    with pytest.raises(OutOfBlocksError, match=r"needs more blocks of a page class than the \[40, 3\] that there are"):
        scheduler.add(Request("late", list(range(300)), max_tokens=100))


def split_of(blocks: list[int]) -> Scheduler:
    """Return a scheduler over a split of full blocks of 64 bytes and states of 4,096."""
    groups = [FULL.with_blocks(bytes=64), STATE.with_blocks(bytes=1 << 12)]
    arena = Arena.split(device_blocks=blocks)
    return Scheduler(BlockManager(block_size=4, groups=groups, arena=arena, watermark=0.0, prefix_caching=False))


def test_a_request_fits_a_split_by_the_blocks_of_each_class_not_by_the_bytes_of_the_first():
    scheduler = split_of([20, 3])  # 1,280 bytes of full blocks; two states take 8,192
    scheduler.add(Request("fits", [*range(60)], 8))
    assert len(run(scheduler)) == 1
    with pytest.raises(OutOfBlocksError, match="needs up to 9600 bytes of device blocks, there are 9408") as caught:
        scheduler.add(Request("long", [*range(60)], 26))
    assert caught.value.total == 20 * 64 + 3 * 4096


def test_all_sequences_of_a_request_fit_a_split_or_it_is_refused():
    scheduler = split_of([400, 3])  # bytes for six states, and two of them
    with pytest.raises(OutOfBlocksError, match=r"more blocks of a page class than the \[400, 3\]"):
        scheduler.add(Request("two", [*range(60)], 8, n=2))
    scheduler = split_of([40, 5])
    scheduler.add(Request("two", [*range(60)], 8, n=2))
    assert len(run(scheduler)) == 2


@pytest.mark.parametrize("caching", [False, True])
def test_prompts_whose_bytes_fit_a_split_wait_for_the_blocks_of_each_class(caching: bool):
    full = CacheGroup.full_attention()
    groups = [full.with_blocks(bytes=64), full.with_blocks(bytes=32, tokens=2)]
    arena = Arena.split(device_blocks=[24, 24])
    manager = BlockManager(block_size=4, groups=groups, arena=arena, watermark=0.0, prefix_caching=caching)
    scheduler = Scheduler(manager)
    for number in range(2):  # each needs 20 of the 24 small blocks
        scheduler.add(Request(f"request {number}", [number * 50 + token for token in range(30)], max_tokens=10))
    assert len(run(scheduler)) == 2
