"""The defragmenter beside a foreign allocator: names, meanings and content.

Every id that somebody may read has a tag in the cache; after each step the bytes behind the id are compared with it.
"""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tagged_cache import BLOCK_SIZE, cache_of, holds, ours, write

from blockyard.errors import InvalidArgumentError, LayoutError
from blockyard.integrations.gaudi import OnlineDefragmenter


def moved_down() -> OnlineDefragmenter:
    """Ids 5 and 7 in blocks 1 and 2."""
    defragmenter = ours(cache_of(16), threshold=0)
    defragmenter.update_state({"a": [5, 7]}, [])
    assert defragmenter.defragment() == 2
    return defragmenter


def test_references_are_counted():
    defragmenter = OnlineDefragmenter()
    defragmenter.update_state({"a": [10, 20], "b": [10]}, [])
    assert defragmenter.used_blocks == {10: 2, 20: 1}
    defragmenter.update_state({"b": [30]}, ["a"])
    assert defragmenter.used_blocks == {10: 1, 30: 1}
    defragmenter.check()


def test_an_id_leads_to_its_block_and_back():
    defragmenter = moved_down()
    assert defragmenter.resolve_all([[5, 6, 7], [1, 2]]) == [[1, 6, 2], [5, 7]]
    assert [defragmenter.unresolve(block) for block in (1, 2, 5, 6, 7)] == [5, 7, 1, 6, 2]
    defragmenter.check()
    with pytest.raises(InvalidArgumentError, match="block is 16, must be 0 to 15"):
        defragmenter.unresolve(16)


def test_free_blocks_are_the_gaps_between_used_ones():
    defragmenter = OnlineDefragmenter()
    defragmenter.update_state({"a": [2, 4]}, [])
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
    before = defragmenter.used_blocks, defragmenter.stats()
    with pytest.raises(RuntimeError, match="out of order"):
        defragmenter.defragment()
    assert (defragmenter.used_blocks, defragmenter.stats()) == before
    assert defragmenter.resolve_all([list(range(200))]) == [list(range(200))]


def test_options_without_meaning_are_refused():
    with pytest.raises(InvalidArgumentError, match="threshold is -1, must be an int"):
        OnlineDefragmenter(threshold=-1)
    with pytest.raises(InvalidArgumentError, match="negative is 'ignore'"):
        OnlineDefragmenter(negative="ignore")


def test_the_threshold_is_that_of_the_environment_unless_one_is_given(monkeypatch: pytest.MonkeyPatch):
    assert OnlineDefragmenter().threshold == 32
    monkeypatch.setenv("VLLM_DEFRAG_THRESHOLD", "5")
    assert OnlineDefragmenter().threshold == 5
    assert OnlineDefragmenter(threshold=7).threshold == 7
    for wrong in ("few", "-1", ""):
        monkeypatch.setenv("VLLM_DEFRAG_THRESHOLD", wrong)
        with pytest.raises(InvalidArgumentError, match=f"VLLM_DEFRAG_THRESHOLD is '{wrong}'"):
            OnlineDefragmenter()


def test_the_log_has_a_line_for_the_start_for_a_steps_changes_and_for_its_moves(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("DEBUG", logger="defrag"):
        defragmenter = ours(cache_of(200))
        defragmenter.update_state({"a": [1, 2], "b": [150, 151]}, [])
        defragmenter.update_state({}, [])
        defragmenter.update_state({}, ["a"])
        defragmenter.defragment()
        defragmenter.defragment()
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("defrag", "initialized with 200 blocks of 32 bytes"),
        ("defrag", "4 new blocks, 0 requests finished"),
        ("defrag", "0 new blocks, 1 requests finished"),
        ("defrag", "highest block in use was 151, is 2: 0 moved, 2 exchanged"),
    ]


# ---- content ----


def test_what_a_freed_id_is_cached_for_stays_with_it():
    cache = cache_of(200)
    defragmenter = ours(cache)
    defragmenter.update_state({"a": [1, 2], "b": [150, 151]}, [])
    write(defragmenter, cache, [1, 2, 150, 151])
    defragmenter.update_state({}, ["a"])
    assert defragmenter.defragment() == 2
    assert defragmenter.stats()[:3] == (1, 0, 2)
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
    assert defragmenter.stats()[:5] == (1, 1, 0, BLOCK_SIZE * 8, 0)
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
        assert [defragmenter.unresolve(defragmenter.resolve(block_id)) for block_id in range(64)] == list(range(64))
        readable = cached if prefix_caching else {b: cached[b] for ids, _ in live.values() for b in ids}
        for block_id, tag in readable.items():
            assert holds(defragmenter, cache, [block_id], tag)
    assert defragmenter.stats().gap <= 2 or options["max_moves"]


# ---- requests, leases and long steps ----


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
        for options in ({}, {"prefix_caching": False}, {"graphed": True}):
            cache = cache_of(200)
            assert resubmitted(ours(cache, **options), cache, seed)


def test_a_late_report_of_the_end_does_not_end_the_later_request():
    defragmenter = ours(cache_of(100))
    defragmenter.update_state({("a", 1): [1, 2]}, [])
    defragmenter.update_state({("a", 2): [3, 4]}, [])
    assert defragmenter.generation("a") == 2
    defragmenter.update_state({}, ["a"])
    assert defragmenter.used_blocks == {3: 1, 4: 1}
    defragmenter.update_state({("a", 2): [5]}, [("a", 1)])
    assert defragmenter.used_blocks == {3: 1, 4: 1, 5: 1}
    with pytest.raises(InvalidArgumentError, match="'a' runs in generation 2, blocks are for 1"):
        defragmenter.update_state({("a", 1): [7]}, [("a", 7)])
    assert defragmenter.used_blocks == {3: 1, 4: 1, 5: 1}
    defragmenter.update_state({}, [("a", 2)])
    assert defragmenter.used_blocks == {}


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_request_that_is_preempted_twice_gives_its_blocks_back(prefix_caching: bool):
    cache = cache_of(200)
    defragmenter = ours(cache, prefix_caching=prefix_caching)
    for turn in range(3):
        ids = list(range(1 + 30 * turn, 31 + 30 * turn))
        defragmenter.update_state({"a": ids}, [])
        write(defragmenter, cache, ids, tag=turn)
        if turn < 2:
            defragmenter.release("a")
    defragmenter.update_state({"b": [190]}, [])
    write(defragmenter, cache, [190])
    defragmenter.defragment()
    assert holds(defragmenter, cache, range(61, 91), tag=2)
    assert holds(defragmenter, cache, [190])
    assert (len(defragmenter.used_blocks), max(defragmenter.used_blocks)) == (31, 31)


def test_a_sliding_window_gives_blocks_back_one_by_one():
    defragmenter = ours(cache_of(100))
    defragmenter.update_state({"a": [4, 5, 6], "b": [5]}, [])
    defragmenter.release("a", [4, 5])
    assert defragmenter.used_blocks == {5: 1, 6: 1}
    with pytest.raises(InvalidArgumentError, match="'a' holds no block 5"):
        defragmenter.release("a", [6, 5])
    assert defragmenter.used_blocks == {5: 1, 6: 1}
    defragmenter.release("a", np.array([6]))
    with pytest.raises(InvalidArgumentError, match="'a' holds no blocks"):
        defragmenter.release("a")
    defragmenter.release("b", [5])
    assert defragmenter.used_blocks == {}


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_blocks_that_a_connector_still_sends_are_not_overwritten(prefix_caching: bool):
    cache = cache_of(200)
    defragmenter = ours(cache, prefix_caching=prefix_caching)
    defragmenter.update_state({"a": [1, 2, 3], "b": list(range(150, 160))}, [])
    write(defragmenter, cache, [1, 2, 3, *range(150, 160)])
    sent = [defragmenter.resolve(b) for b in (1, 2, 3)]
    lease = defragmenter.lease([1, 2, 3])
    defragmenter.update_state({}, ["a"])
    defragmenter.defragment()
    assert [int(cache[block * BLOCK_SIZE, 0]) for block in sent] == [1, 2, 3]
    defragmenter.end_lease(lease)
    assert next(defragmenter.free_blocks()) == 1
    assert holds(defragmenter, cache, range(150, 160))


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
    defragmenter = ours(cache)
    defragmenter.update_state({"a": list(range(300, 364))}, [])
    write(defragmenter, cache, range(300, 364))
    assert defragmenter.defragment()
    assert holds(defragmenter, cache, range(300, 364))
    first = defragmenter.resolve(300)
    assert [defragmenter.resolve(b) for b in range(300, 364)] == list(range(first, first + 64))


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_more_than_512_new_blocks_a_step_converge(prefix_caching: bool, graphed: bool):
    cache = cache_of(6000)
    defragmenter = ours(cache, prefix_caching=prefix_caching, graphed=graphed)
    free, table = list(range(1, 6000)), {}  # first in, first out
    for step in range(12):
        new, free = free[:700], free[700:]
        ended = list(table)[:1] if len(table) == 2 else []
        defragmenter.update_state({str(step): new}, ended)
        free += [block for request in ended for block in table.pop(request)]
        table[str(step)] = new
        defragmenter.defragment()
        write(defragmenter, cache, new)
        assert all(holds(defragmenter, cache, blocks) for blocks in table.values())
    assert max(defragmenter.used_blocks) <= 1400 + 32


def test_a_block_that_is_freed_twice_is_refused_and_nothing_changes():
    cache = cache_of(200)
    defragmenter = ours(cache)
    defragmenter.update_state({"a": [7, 8, 9], "b": [150]}, [])
    write(defragmenter, cache, [7, 8, 9, 150])
    defragmenter.release("a", [8])
    with pytest.raises(InvalidArgumentError, match="'a' holds no block 8"):
        defragmenter.release("a", [7, 8])
    assert defragmenter.used_blocks == {7: 1, 9: 1, 150: 1}
    assert defragmenter.defragment() == 3
    assert holds(defragmenter, cache, [7, 8, 9, 150])
    defragmenter.update_state({}, ["a", "b"])
    assert defragmenter.used_blocks == {}


def test_padding_reads_no_real_block():
    defragmenter = ours(cache_of(50))
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
    assert defragmenter.used_blocks == {3: 1}


# ---- tables ----


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_resolve_as_lists_do(dtype):
    defragmenter = moved_down()
    table = np.array([[5, 6], [1, 0]], dtype)
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
