"""The defragmenter beside a foreign allocator: Gaudi's rules, written down plainly, fail where ours hold.

Every id that somebody may read has a tag in the cache; after each step the bytes behind the id are compared with it.
"""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockyard import BlockObserver, InvalidArgumentError, OnlineDefragmenter, merge_runs, plan_moves
from blockyard.errors import LayoutError

BLOCK_SIZE = 4


class GaudiModel:
    """The rules of vllm-gaudi's OnlineDefragmenter, told in our own words; one tensor of slots."""

    def __init__(self, cache: torch.Tensor, *, prefix_caching: bool = True) -> None:
        self.cache, self.prefix_caching = cache, prefix_caching
        self.refs: dict[int, int] = {}
        self.requests: dict[str, list[int]] = {}
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}

    def resolve(self, block: int) -> int:
        return self.forward.get(block, block)

    def update_state(self, new_blocks, finished_reqs):
        for request, blocks in new_blocks.items():
            self.requests.setdefault(request, []).extend(blocks)
            for block in map(self.resolve, blocks):
                self.refs[block] = self.refs.get(block, 0) + 1
        for request in finished_reqs:
            for block in map(self.resolve, self.requests.pop(request)):
                self.refs[block] -= 1
                if not self.refs[block]:
                    del self.refs[block]

    def defragment(self) -> list[tuple[int, int]]:
        if not self.refs or max(self.refs) - 32 <= len(self.refs):
            return []
        free = (b for b in itertools.count(1) if b not in self.refs)
        pairs = itertools.takewhile(lambda p: p[1] < p[0], zip(sorted(self.refs, reverse=True), free, strict=False))
        swaps = list(itertools.islice(pairs, 512))
        slots = self.cache.view(-1, BLOCK_SIZE, self.cache.shape[1])
        for used, hole in swaps:
            ids = self.backward.get(used, used), self.backward.get(hole, hole)
            for block_id, block in zip(ids, (hole, used), strict=True):
                self.forward[block_id], self.backward[block] = block, block_id
            self.refs[hole] = self.refs.pop(used)
            held = slots[hole].clone()
            slots[hole] = slots[used]
            if self.prefix_caching:
                slots[used] = held
        return swaps


def cache_of(blocks: int) -> torch.Tensor:
    return torch.full((blocks * BLOCK_SIZE, 2), -1, dtype=torch.int32)


def ours(cache: torch.Tensor, **options) -> OnlineDefragmenter:
    defragmenter = OnlineDefragmenter(**options)
    defragmenter.initialize([(cache, None)], BLOCK_SIZE)
    return defragmenter


def write(defragmenter, cache: torch.Tensor, ids, tag: int = 0) -> None:
    for block_id in ids:
        block = defragmenter.resolve(block_id)
        cache[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 1000 * tag + block_id


def holds(defragmenter, cache: torch.Tensor, ids, tag: int = 0) -> bool:
    blocks = [defragmenter.resolve(block_id) for block_id in ids]
    rows = [cache[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] for block in blocks]
    return all(bool((row == 1000 * tag + block_id).all()) for row, block_id in zip(rows, ids, strict=True))


# ---- weaknesses of Gaudi's rules ----


def resubmitted(defragmenter, cache, seed: int) -> bool:
    """Abort and resubmit under one id in one step; whether the new request's bytes survive."""
    rng = random.Random(seed)
    ids = rng.sample(range(100, 190), 12)
    old, new, later = ids[:4], ids[4:8], ids[8:]
    defragmenter.update_state({"a": old, "anchor": [195]}, [])
    write(defragmenter, cache, [*old, 195])
    defragmenter.update_state({"a": new}, ["a"])
    write(defragmenter, cache, new, tag=1)
    defragmenter.defragment()
    defragmenter.update_state({"b": later}, [])
    write(defragmenter, cache, later, tag=2)
    defragmenter.defragment()
    lowest = [defragmenter.resolve(b) for b in new]
    return holds(defragmenter, cache, new, tag=1) and max(lowest) < 100


def test_a_request_resubmitted_under_its_id_keeps_its_new_blocks():
    for seed in range(20):
        cache = cache_of(200)
        assert not resubmitted(GaudiModel(cache, prefix_caching=False), cache, seed)
        for options in ({}, {"prefix_caching": False}, {"graphed": True}):
            cache = cache_of(200)
            assert resubmitted(ours(cache, **options), cache, seed)


def test_a_late_report_of_the_end_does_not_end_the_later_request():
    cache = cache_of(100)
    gaudi = GaudiModel(cache)
    gaudi.update_state({"a": [1, 2]}, [])
    gaudi.update_state({"a": [3, 4]}, [])
    gaudi.update_state({}, ["a"])
    assert not gaudi.refs
    defragmenter = ours(cache)
    defragmenter.update_state({("a", 1): [1, 2]}, [])
    defragmenter.update_state({("a", 2): [3, 4]}, [])
    assert defragmenter.generation("a") == 2
    defragmenter.update_state({}, ["a"])
    assert defragmenter.used_blocks == {3: 1, 4: 1}
    defragmenter.update_state({("a", 2): [5]}, [("a", 1)])
    assert defragmenter.req_blocks == {"a": [3, 4, 5]}
    with pytest.raises(InvalidArgumentError, match="'a' runs in generation 2, blocks are for 1"):
        defragmenter.update_state({("a", 1): [7]}, [("a", 7)])
    assert defragmenter.used_blocks == {3: 1, 4: 1, 5: 1}


def test_a_preempted_request_gives_its_blocks_back():
    def preempt(defragmenter, release) -> int:
        for turn in range(3):
            defragmenter.update_state({"a": list(range(1 + 20 * turn, 21 + 20 * turn))}, [])
            release("a")
        defragmenter.update_state({"a": [70]}, [])
        return len(defragmenter.refs if isinstance(defragmenter, GaudiModel) else defragmenter.used_blocks)

    cache = cache_of(100)
    assert preempt(GaudiModel(cache), lambda _: None) == 61
    defragmenter = ours(cache)
    assert preempt(defragmenter, defragmenter.release) == 1


def test_a_sliding_window_gives_blocks_back_one_by_one():
    defragmenter = ours(cache_of(100))
    defragmenter.update_state({"a": [4, 5, 6], "b": [5]}, [])
    defragmenter.release("a", [4, 5])
    assert defragmenter.used_blocks == {5: 1, 6: 1}
    with pytest.raises(InvalidArgumentError, match="'a' holds no block 5"):
        defragmenter.release("a", [6, 5])
    assert defragmenter.req_blocks == {"a": [6], "b": [5]}
    defragmenter.release("a", np.array([6]))
    with pytest.raises(InvalidArgumentError, match="'a' holds no blocks"):
        defragmenter.release("a")


def sent_late(defragmenter, cache, *, lease: bool) -> bool:
    """A connector sends blocks of a request that has ended: whether it finds their bytes where they were."""
    defragmenter.update_state({"a": [1, 2, 3], "b": list(range(150, 160))}, [])
    write(defragmenter, cache, [1, 2, 3, *range(150, 160)])
    sent = [defragmenter.resolve(b) for b in (1, 2, 3)]
    held = defragmenter.lease([1, 2, 3]) if lease else None
    defragmenter.update_state({}, ["a"])
    defragmenter.defragment()
    found = [int(cache[block * BLOCK_SIZE, 0]) for block in sent]
    if held is not None:
        defragmenter.end_lease(held)
        assert defragmenter.free_blocks().__next__() == 1
    return found == [1, 2, 3] and holds(defragmenter, cache, range(150, 160))


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_blocks_that_a_connector_still_holds_are_not_overwritten(prefix_caching: bool):
    cache = cache_of(200)
    assert not sent_late(GaudiModel(cache, prefix_caching=prefix_caching), cache, lease=False)
    cache = cache_of(200)
    assert sent_late(ours(cache, prefix_caching=prefix_caching), cache, lease=True)


def test_leased_blocks_do_not_move_and_leases_end_once():
    defragmenter = ours(cache_of(200))
    defragmenter.update_state({"a": [100, 150]}, [])
    lease = defragmenter.lease([150])
    assert defragmenter.defragment() == 1
    assert [defragmenter.resolve(b) for b in (100, 150)] == [1, 150]
    defragmenter.end_lease(lease)
    assert defragmenter.defragment() == 1
    assert defragmenter.resolve(150) == 2
    with pytest.raises(InvalidArgumentError, match="lease is 0"):
        defragmenter.end_lease(lease)


def test_rising_runs_stay_runs():
    cache = cache_of(400)
    gaudi = GaudiModel(cache)
    gaudi.update_state({"a": list(range(300, 364))}, [])
    gaudi.defragment()
    defragmenter = ours(cache)
    defragmenter.update_state({"a": list(range(300, 364))}, [])
    assert defragmenter.defragment() == 64
    tables = [[d.resolve(b) for b in range(300, 364)] for d in (gaudi, defragmenter)]
    runs = [1 + sum(b != a + 1 for a, b in itertools.pairwise(table)) for table in tables]
    assert runs == [64, 1]


def churn(defragmenter, cache, *, blocks: int, fresh: bool) -> int:
    """Allocates 700 ids a step, first in first out; the highest block in use at the end."""
    free, live, table = iter(range(1, blocks)), [], {}
    back: list[int] = []
    for step in range(12):
        new = [next(free, None) or back.pop(0) for _ in range(700)]
        ended = [live.pop(0)] if len(live) == 2 else []
        defragmenter.update_state({str(step): new}, ended)
        for request in ended:
            back += table.pop(request)
        live.append(str(step))
        table[str(step)] = new
        defragmenter.defragment()
        write(defragmenter, cache, new)
        assert all(holds(defragmenter, cache, table[request]) for request in live)
    used = defragmenter.refs if isinstance(defragmenter, GaudiModel) else defragmenter.used_blocks
    return max(used)


def test_more_than_512_new_blocks_a_step_converge():
    cache = cache_of(6000)
    assert churn(GaudiModel(cache), cache, blocks=6000, fresh=False) > 1400 + 512
    for prefix_caching in (False, True):
        for graphed in (False, True):
            cache = cache_of(6000)
            defragmenter = ours(cache, prefix_caching=prefix_caching, graphed=graphed)
            assert churn(defragmenter, cache, blocks=6000, fresh=not prefix_caching) <= 1400 + 32


def test_unknown_blocks_and_padding_are_refused_with_their_numbers():
    defragmenter = ours(cache_of(50))
    with pytest.raises(InvalidArgumentError, match="block 7 has 0 references, the call names 1"):
        defragmenter.free_block(7)
    for call in (defragmenter.resolve, lambda b: defragmenter.resolve_all([[1], [b]])):
        with pytest.raises(InvalidArgumentError, match="block is -1, must be 0 to 49"):
            call(-1)
        with pytest.raises(InvalidArgumentError, match="block is 50, must be 0 to 49"):
            call(50)
    with pytest.raises(InvalidArgumentError, match="block is 50"):
        defragmenter.update_state({"a": [3, 50]}, [])
    assert defragmenter.used_blocks == {}
    lenient = ours(cache_of(50), negative="pass")
    assert lenient.resolve(-1) == -1
    np.testing.assert_array_equal(lenient.resolve_all(np.array([[3, -1]], np.int32)), [[3, -1]])


def test_an_unknown_end_is_passed_over():
    defragmenter = ours(cache_of(50))
    defragmenter.update_state({"a": [3]}, ["never seen", ("a", 9)])
    assert defragmenter.req_blocks == {"a": [3]}


# ---- names and meanings that are Gaudi's ----


def test_references_are_counted_and_exchanged():
    defragmenter = OnlineDefragmenter()
    defragmenter.use_block(10)
    defragmenter.use_block(10)
    defragmenter.use_block(20)
    defragmenter.swap_refs(10, 20)
    assert (defragmenter.get_ref_count(10), defragmenter.get_ref_count(20)) == (1, 2)
    defragmenter.swap_refs(20, 30)
    assert defragmenter.used_blocks == {10: 1, 30: 2}
    defragmenter.set_ref_count(10, 0)
    defragmenter.free_block(30)
    assert defragmenter.used_blocks == {30: 1}
    assert defragmenter.get_ref_count(1_000_000) == 0
    defragmenter.check()


def test_mappings_are_permutations_at_all_times():
    defragmenter = OnlineDefragmenter()
    defragmenter.update_state({"a": [10]}, [])
    defragmenter.update_mapping(5, 3)
    defragmenter.update_mapping(7, 2)
    assert defragmenter.resolve_all([[5, 6, 7], [8, 9]]) == [[3, 6, 2], [8, 9]]
    assert defragmenter.unresolve(3) == 5
    assert sorted(defragmenter.fwd_mapping_table) == sorted(defragmenter.bwd_mapping_table) == list(range(11))
    defragmenter.check()
    with pytest.raises(InvalidArgumentError, match="null block"):
        defragmenter.update_mapping(0, 3)


def test_free_blocks_are_the_gaps_between_used_ones():
    defragmenter = OnlineDefragmenter()
    for block in (2, 4):
        defragmenter.use_block(block)
    assert list(itertools.islice(defragmenter.free_blocks(), 5)) == [1, 3, 5, 6, 7]
    defragmenter.initialize([(cache_of(8), None)], BLOCK_SIZE)
    assert list(defragmenter.free_blocks()) == [1, 3, 5, 6, 7]


def test_nothing_moves_below_the_threshold_or_when_switched_off():
    defragmenter = ours(cache_of(200))
    defragmenter.update_state({"a": list(range(32, 36))}, [])
    assert defragmenter.defragment() == 0
    defragmenter.update_state({"b": [38]}, [])
    assert defragmenter.defragment() == 5
    off = OnlineDefragmenter(enabled=False)
    off.update_state({"a": [150]}, ["b"])
    off.release("a")
    assert (off.defragment(), off.used_blocks, off.resolve(-7)) == (0, {}, -7)
    table = np.array([[3]])
    np.testing.assert_array_equal(off.resolve_all(table, out=np.zeros_like(table)), table)
    assert off.resolve_all([[1, 2]]) == [[1, 2]]


def test_moving_without_caches_is_refused_and_changes_nothing():
    defragmenter = OnlineDefragmenter()
    defragmenter.update_state({"a": [150]}, [])
    with pytest.raises(InvalidArgumentError, match="1 blocks should move: call initialize"):
        defragmenter.defragment()
    assert defragmenter.resolve(150) == 150
    with pytest.raises(InvalidArgumentError, match="num_blocks is 100, must be at least 151"):
        defragmenter.initialize([(cache_of(100), None)], BLOCK_SIZE)
    with pytest.raises(LayoutError):
        defragmenter.initialize([(cache_of(100), None)], 7)


def test_a_failed_execution_changes_nothing():
    def fail(views, pairs):
        raise RuntimeError("out of order")

    cache = cache_of(200)
    defragmenter = ours(cache, exchange=fail)
    defragmenter.update_state({"a": [150, 151]}, [])
    before = defragmenter.fwd_mapping_table, defragmenter.used_blocks, defragmenter.stats
    with pytest.raises(RuntimeError, match="out of order"):
        defragmenter.defragment()
    assert (defragmenter.fwd_mapping_table, defragmenter.used_blocks, defragmenter.stats) == before


def test_options_without_meaning_are_refused():
    with pytest.raises(InvalidArgumentError, match="threshold, margin and max_moves are -1"):
        OnlineDefragmenter(threshold=-1)
    with pytest.raises(InvalidArgumentError, match="negative is 'ignore'"):
        OnlineDefragmenter(negative="ignore")


# ---- content ----


def test_what_a_freed_id_is_cached_for_stays_with_it():
    cache = cache_of(200)
    defragmenter = ours(cache)
    defragmenter.update_state({"a": [1, 2], "b": [150, 151]}, [])
    write(defragmenter, cache, [1, 2, 150, 151])
    defragmenter.update_state({}, ["a"])
    assert defragmenter.defragment() == 2
    assert defragmenter.stats[:3] == (1, 0, 2)
    # A hit: the ids come back as new ones, and their bytes must be there.
    defragmenter.update_state({"c": [1, 2]}, [])
    assert holds(defragmenter, cache, [1, 2, 150, 151])


def test_ids_that_hold_nothing_are_bound_low_and_moved_into_one_way():
    cache = cache_of(200)
    defragmenter = ours(cache)
    defragmenter.forget([1, 2, 3])
    defragmenter.update_state({"a": [100, 101, 102]}, [], fresh={101, 102})
    assert [defragmenter.resolve(b) for b in (100, 101, 102)] == [100, 1, 2]
    write(defragmenter, cache, [100, 101, 102])
    assert defragmenter.defragment() == 1
    assert defragmenter.stats == (1, 1, 0, BLOCK_SIZE * 8, 0)
    assert holds(defragmenter, cache, [100, 101, 102])
    defragmenter.check()


@given(st.data())
def test_random_steps_keep_every_byte(data):
    cache = cache_of(64)
    prefix_caching = data.draw(st.booleans())
    options = {"graphed": data.draw(st.booleans()), "max_moves": data.draw(st.sampled_from([None, 3]))}
    defragmenter = ours(cache, threshold=2, prefix_caching=prefix_caching, **options)
    free, live, cached = list(range(1, 64)), {}, {}
    for step in range(data.draw(st.integers(1, 12))):
        ended = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True)) if live else []
        given_back = [b for request in ended for b in live.pop(request)[0]]
        free += given_back
        count = data.draw(st.integers(0, min(len(free), 12)))
        new, free = free[:count], free[count:]
        hits = [b for b in new if b in cached and prefix_caching and data.draw(st.booleans())]
        defragmenter.update_state({str(step): new}, ended, fresh=set(new) - set(hits))
        for block_id in set(new) - set(hits):
            write(defragmenter, cache, [block_id], tag=step)
            cached[block_id] = step
        if new:
            live[str(step)] = (new, hits)
        defragmenter.defragment()
        defragmenter.check()
        readable = cached if prefix_caching else {b: cached[b] for ids, _ in live.values() for b in ids}
        for block_id, tag in readable.items():
            assert holds(defragmenter, cache, [block_id], tag)
    assert defragmenter.stats.gap <= 2 or options["max_moves"]


# ---- tables ----


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_resolve_as_lists_do(dtype):
    defragmenter = OnlineDefragmenter()
    defragmenter.update_mapping(5, 3)
    table = np.array([[5, 6], [3, 0]], dtype)
    expected = defragmenter.resolve_all(table.tolist())
    found = defragmenter.resolve_all(table)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(defragmenter.resolve_all(table.T), np.array(expected).T)
    assert defragmenter.resolve_all(table, out=table) is table
    np.testing.assert_array_equal(table, expected)
    with pytest.raises(InvalidArgumentError, match="shape"):
        defragmenter.resolve_all(table, out=np.zeros(3, dtype))
    with pytest.raises(InvalidArgumentError, match="must be an int64 or int32 array"):
        defragmenter.resolve_all(np.zeros(3))


# ---- plans ----

STATES = st.lists(st.sampled_from("hhhllllf"), min_size=1, max_size=80)


@given(STATES, st.integers(1, 9))
def test_pages_are_emptied_down_to_the_fewest(states, page):
    live = [b for b, state in enumerate(states) if state == "l"]
    fixed = [b for b, state in enumerate(states) if state == "f"]
    plan = plan_moves("empty_pages", page, num_blocks=len(states), live=live, fixed=np.array(fixed, np.int64))
    assert len(set(plan.pairs.flat)) == 2 * len(plan)
    after = (set(live) - set(plan.pairs[:, 0].tolist())) | set(plan.pairs[:, 1].tolist())
    assert len(after) == len(live)
    assert not after & set(fixed)
    forced = {b // page for b in fixed}
    room = sum(min(page, len(states) - p * page) - sum(b // page == p for b in fixed) for p in forced)
    used = {b // page for b in after} - forced
    short = len(states) % page
    # A short last page may be one of those that are kept; then one more can be needed.
    assert len(used) <= max(0, -(-(len(live) - room) // page)) + (short > 0 and len(live) > room)
    if not short:
        assert len(used) == max(0, -(-(len(live) - room) // page)) or len(plan) == 0
        counts = sorted(sum(b // page == p for b in live) for p in range(len(states) // page) if p not in forced)[::-1]
        assert len(plan) == sum(counts[max(0, -(-(len(live) - room) // page)) :])


def test_a_budget_cuts_a_plan_and_slack_delays_it():
    plan = plan_moves("free_tail", 10, num_blocks=20, live=[12, 13, 14, 15], moves=3)
    assert (len(plan), plan.left, plan.stuck) == (3, 1, 0)
    assert len(merge_runs(plan.pairs)) == 1
    assert len(plan.move) == 3
    assert len(plan.exchange) == 0
    assert repr(plan) == "MovePlan(move=3, exchange=0, left=1, stuck=0)"
    full = plan_moves("max_id", 1, num_blocks=5, live=[1, 2, 3], fixed=[0])
    assert (len(full), full.stuck) == (0, 2)
    books = BlockObserver(20)
    books.use_ids([5])
    assert len(books.plan("dense", 0, slack=4)) == 0
    assert len(books.plan("dense", 0, slack=3)) == 1


def test_a_plan_that_no_longer_fits_is_refused():
    books = BlockObserver(20)
    books.use_ids([5, 6])
    plan = books.plan("dense", 0)
    books.use_ids([2])
    with pytest.raises(InvalidArgumentError, match="destination is 2, must be a hole"):
        books.commit(plan)
    assert books.forward.tolist() == list(range(20))


def test_goals_without_meaning_are_refused():
    with pytest.raises(InvalidArgumentError, match="tidy"):
        plan_moves("tidy", 1, num_blocks=3, live=[])
    with pytest.raises(InvalidArgumentError, match="page_blocks is 0"):
        plan_moves("empty_pages", 0, num_blocks=3, live=[])
    with pytest.raises(InvalidArgumentError, match="block is 3, must be below 3"):
        plan_moves("max_id", 0, num_blocks=3, live=[3])
    with pytest.raises(InvalidArgumentError, match="num_blocks is"):
        BlockObserver(0)
