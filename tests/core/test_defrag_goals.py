"""Plans for one goal and for several, against closed forms and by the bytes that follow them."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard.allocators import BlockObserver
from blockyard.errors import InvalidArgumentError
from blockyard.integrations.gaudi import OnlineDefragmenter


class Memory:
    """Bytes behind a foreign allocator's ids: one number a block."""

    def __init__(self, blocks: int) -> None:
        self.manager = BlockObserver(blocks)
        self.blocks = np.full(blocks, -1, np.int64)

    def use(self, ids: list[int]) -> None:
        self.manager.use_ids(ids)
        self.blocks[self.manager.resolve(np.array(ids, np.int64))] = ids

    def run(self, goals, **options) -> int:
        plan = self.manager.plan_all(goals, **options)
        for source, hole in plan.move:
            self.blocks[hole] = self.blocks[source]
        for a, b in plan.exchange:
            self.blocks[[a, b]] = self.blocks[[b, a]]
        self.manager.commit(plan)
        self.manager.check()
        return len(plan)

    def holds(self, ids: list[int]) -> bool:
        return bool((self.blocks[self.manager.resolve(np.array(ids, np.int64))] == ids).all())


GOALS = st.one_of(
    st.tuples(st.sampled_from(["max_id", "free_tail", "dense"]), st.integers(0, 50)),
    st.tuples(st.just("contiguous"), st.integers(1, 8)),
)


@given(st.permutations(range(1, 50)), st.integers(0, 45), st.lists(GOALS, min_size=1, max_size=3), st.data())
def test_bytes_follow_their_ids_through_several_goals(ids: list[int], used: int, goals, data):
    memory = Memory(50)
    memory.use(ids[:used])
    tables = [ids[: used // 2], ids[: used // 4] + ids[used // 2 : used]]
    memory.manager.forget_ids(data.draw(st.lists(st.sampled_from(ids[used:]))) if used < 49 else [])
    leased = data.draw(st.lists(st.integers(1, 49), max_size=3))
    memory.manager.lease(leased)
    before = memory.manager.resolve(np.array(leased, np.int64)).tolist()
    moves = data.draw(st.integers(1, 60))
    for _ in range(200):
        if not memory.run(goals, sequences=tables, hot=ids[: used // 4], moves=moves):
            break
        assert memory.holds(ids[:used])
        assert memory.manager.resolve(np.array(leased, np.int64)).tolist() == before
    else:
        pytest.fail(f"{goals} never end")


def test_scattered_sequences_become_one_run_each_and_the_prefix_counts_once():
    memory, rng = Memory(600), random.Random(4)
    ids = rng.sample(range(1, 300), 120)
    tables = [ids[:60], ids[:20] + ids[60:100], ids[100:]]
    memory.use(ids)
    before = memory.manager.fragmentation(tables).runs
    memory.run([("contiguous", 1)], sequences=tables)
    # The second goes on from the shared blocks elsewhere than the first.
    assert memory.manager.fragmentation(tables).runs == 3
    assert [memory.manager.fragmentation([table]).runs for table in tables] == [1, 2, 1]
    assert before > 100
    assert memory.holds(ids)
    assert memory.run([("contiguous", 2)], sequences=tables) == 0


def test_an_earlier_goal_is_not_undone():
    memory = Memory(200)
    ids = list(range(190, 150, -2))
    memory.use(ids)
    low = [("dense", 0), ("contiguous", 1)]
    while memory.run(low, sequences=[ids]):
        pass
    assert memory.manager.gap == 0
    assert memory.holds(ids)
    memory = Memory(200)
    memory.use([*ids, 150])
    while memory.run(low[::-1], sequences=[ids]):
        pass
    assert memory.manager.fragmentation([ids]).runs == 1
    assert memory.holds([*ids, 150])


def test_a_budget_of_bytes_counts_an_exchange_twice():
    memory = Memory(100)
    memory.use(list(range(90, 100)))
    memory.manager.forget_ids([1, 2, 3])
    plan = memory.manager.plan_all([("dense", 0)], num_bytes=8 * 4096 - 1, bytes_per_block=4096)
    assert (len(plan.move), len(plan.exchange), plan.left) == (3, 2, 5)
    with pytest.raises(InvalidArgumentError, match="bytes_per_block is 0"):
        memory.manager.plan_all([("dense", 0)], num_bytes=4096)


def test_running_sequences_move_last():
    memory = Memory(100)
    memory.use([90, 91, 92, 93])
    plan = memory.manager.plan_all([("dense", 0)], hot=[93, 92], moves=3)
    assert plan.pairs[:, 0].tolist() == [90, 91, 93]


def test_goals_are_named_with_their_numbers():
    manager = BlockObserver(10)
    for goals, message in [
        ([("tidy", 1)], "tidy"),
        ([("contiguous", 0)], "runs is 0"),
        ([("dense",)], r"a goal is .*tuple.*, must be \(name, number\) or \(name, number, slack\)"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            manager.plan_all(goals)
    with pytest.raises(InvalidArgumentError, match="block is 10"):
        manager.plan_all([("contiguous", 1)], sequences=[[10]])


def test_a_budget_cuts_a_plan_and_slack_delays_it():
    manager = BlockObserver(20)
    manager.use_ids([12, 13, 14, 15])
    manager.forget_ids(list(range(1, 12)))
    plan = manager.plan("free_tail", 10, moves=3)
    assert (len(plan), plan.left, plan.stuck) == (3, 1, 0)
    assert (np.diff(plan.pairs, axis=0) == 1).all()
    assert len(plan.move) == 3
    assert len(plan.exchange) == 0
    assert repr(plan) == "MovePlan(move=3, exchange=0, left=1, stuck=0)"
    manager = BlockObserver(5)
    manager.use_ids([1, 2, 3])
    full = manager.plan("max_id", 1)
    assert (len(full), full.stuck) == (0, 2)
    manager = BlockObserver(20)
    manager.use_ids([5])
    assert len(manager.plan("dense", 0, slack=4)) == 0
    assert len(manager.plan("dense", 0, slack=3)) == 1


def test_a_plan_that_no_longer_fits_is_refused():
    manager = BlockObserver(20)
    manager.use_ids([5, 6])
    plan = manager.plan("dense", 0)
    manager.use_ids([2])
    with pytest.raises(InvalidArgumentError, match="destination is 2, must be a hole"):
        manager.commit(plan)
    assert manager.resolve(np.arange(20)).tolist() == list(range(20))


def test_goals_without_meaning_are_refused():
    with pytest.raises(InvalidArgumentError, match="tidy"):
        BlockObserver(3).plan("tidy", 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="num_blocks is"):
        BlockObserver(0)


# ---- the defragmenter ----


def churned(**options) -> tuple[OnlineDefragmenter, torch.Tensor, dict[str, list[int]]]:
    """A cache of 400 blocks in which six requests hold scattered ids; slot i of a block holds 4 * id + i."""
    cache = torch.full((400 * 4, 2), -1, dtype=torch.int32)
    defragmenter = OnlineDefragmenter(**options)
    defragmenter.initialize([(cache, cache.clone())], 4)
    ids = random.Random(3).sample(range(1, 400), 120)
    tables = {f"request {i}": ids[20 * i : 20 * i + 20] for i in range(6)}
    defragmenter.update_state(tables, [])
    for block_id in ids:
        block = defragmenter.resolve(block_id)
        cache[4 * block : 4 * block + 4, :] = 4 * block_id + torch.arange(4, dtype=torch.int32)[:, None]
    return defragmenter, cache, tables


def whole(defragmenter: OnlineDefragmenter, cache: torch.Tensor, tables: dict[str, list[int]]) -> bool:
    ids = np.array(list(tables.values()))
    rows = cache.view(400, 4, 2)[torch.from_numpy(defragmenter.resolve_all(ids))]
    wanted = 4 * torch.from_numpy(ids)[:, :, None] + torch.arange(4)
    return bool((rows == wanted[..., None]).all())


def test_the_defragmenter_works_for_several_goals_by_priority():
    goals = [("dense", 0), ("contiguous", 1, 2)]
    defragmenter, cache, tables = churned(goals=goals, max_moves=30)
    before = defragmenter.fragmentation()
    while defragmenter.defragment(hot=["request 0"]):
        assert whole(defragmenter, cache, tables)
        defragmenter.check()
    after = defragmenter.fragmentation()
    assert (after.max_id, after.gap, after.holes) == (120, 0, 279)
    assert before.gap > 250
    assert after.runs < before.runs
    stats = defragmenter.stats()
    assert stats.gap == 0
    assert stats.seconds > 0
    assert stats.num_bytes == (stats.moves + 2 * stats.exchanges) * 2 * 4 * 8


def test_requests_become_one_run_each_where_that_is_the_goal():
    defragmenter, cache, tables = churned(goals=[("contiguous", 1)], max_bytes=50 * 64)
    steps = 0
    while moved := defragmenter.defragment():
        assert moved <= 25
        assert whole(defragmenter, cache, tables)
        steps += 1
    assert steps >= 5
    assert defragmenter.fragmentation().runs <= 6 * len(tables)


def test_a_captured_graph_is_replayed_for_all_steps():
    replays, captures = [], {}

    def capture(exchange):
        # As a CUDA graph does: what was captured reads the tensors that it was captured with.
        def call(views, pairs):
            graph = captures.setdefault(len(pairs), (views, pairs))
            replays.append(len(pairs))
            exchange(*graph)

        return call

    for prefix_caching in (False, True):
        replays.clear()
        captures.clear()
        defragmenter, cache, tables = churned(
            graphed=True, wrap=capture, max_moves=20, prefix_caching=prefix_caching, goals=[("max_id", 125)]
        )
        while defragmenter.defragment():
            assert whole(defragmenter, cache, tables)
        assert defragmenter.fragmentation().max_id <= 125
        assert set(replays) <= {8, 16, 32}
        assert len(replays) > len(captures) or not replays


def test_the_goals_of_a_defragmenter_must_have_a_meaning():
    with pytest.raises(InvalidArgumentError, match="there are no goals"):
        OnlineDefragmenter(goals=[])
    defragmenter, _, _ = churned(goals=[("tidy", 1)])
    with pytest.raises(InvalidArgumentError, match="tidy"):
        defragmenter.defragment()


@pytest.mark.parametrize("goals", [[("dense", 0)], [("free_tail", 3000)], [("dense", 64), ("free_tail", 3000)]])
def test_a_pool_with_more_than_512_new_blocks_a_step_converges(goals):
    manager, rng = BlockObserver(6000), random.Random(5)
    free, live = list(range(1, 6000)), []
    for _ in range(12):
        rng.shuffle(free)
        if len(live) == 3:
            ended = live.pop(0)
            manager.release_ids(ended)
            free += ended
        new, free = free[:700], free[700:]
        manager.use_ids(new)
        live.append(new)
        manager.commit(manager.plan_all(goals))
        if goals[0][0] == "dense":
            assert manager.gap <= goals[0][1]
        if goals[-1][0] == "free_tail":
            assert (manager.fragmentation().max_id or 0) < 3000
