"""Figures of a pool against counting by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard import BlockManager
from blockyard.allocators import BlockObserver
from blockyard.errors import InvalidArgumentError
from blockyard.scheduler import DefragPolicy, Goal


@given(
    st.sets(st.integers(1, 99), max_size=60).flatmap(lambda used: st.permutations(sorted(used))),
    st.integers(0, 60),
    st.integers(0, 99),
)
def test_the_figures_are_those_of_counting(used: list[int], cut: int, leased: int) -> None:
    observer = BlockObserver(100)
    observer.use_ids(used)
    observer.lease([leased])
    tables = [used[:cut], used[:cut] + used[cut:]]
    found = observer.fragmentation(tables)
    movable = set(used) - {leased}
    fixed = {0, leased}
    links = {(a, b) for table in tables for a, b in itertools.pairwise(table)}
    densest = sorted(set(range(100)) - fixed)[len(movable) - 1] if movable else 0
    assert found.max_id == max(movable | fixed)
    assert found.gap == max(movable, default=0) - densest
    assert found.holes == 100 - len(movable | fixed)
    assert (found.tables, found.runs) == (sum(map(bool, tables)), len(used) - sum(b == a + 1 for a, b in links))


def test_without_sequences() -> None:
    observer = BlockObserver(64)
    assert repr(observer.fragmentation()) == "Fragmentation(max_id=0, gap=0, holes=63, tables=0, runs=0)"
    with pytest.raises(InvalidArgumentError, match="block is 64"):
        observer.fragmentation([[64]])


def holey() -> BlockManager:
    """A pool of eight blocks of which the last four are in use."""
    manager = BlockManager(block_size=4, device_blocks=8, watermark=0.0)
    low, _ = manager.allocate(counts=[16, 16])
    manager.complete(manager.take_decision().ticket)
    manager.free([low])
    return manager


def test_what_is_wanted_becomes_moves_of_the_next_decision() -> None:
    manager = holey()
    report = DefragPolicy([("free_tail", 2), ("dense", 0)], max_moves=3).plan(manager)
    assert (len(report), report.left) == (3, 1)
    assert set(manager.take_decision().move[0].ids[:, 1].tolist()) == {0, 1, 2}


def test_bytes_bound_moves_too() -> None:
    report = DefragPolicy([("dense", 0)], max_bytes=250, block_bytes=100).plan(holey())
    assert (len(report), report.left) == (2, 2)


def test_goals_cannot_be_changed_afterwards() -> None:
    goals: list[Goal] = [("dense", 0)]
    wanted = DefragPolicy(goals)
    goals.append(("max_id", 3))
    assert wanted.goals == (("dense", 0),)
    with pytest.raises(AttributeError):
        wanted.max_moves = 3  # type: ignore[misc]
    assert hash(wanted) == hash(DefragPolicy((("dense", 0),)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"goals": []}, "there are no goals"),
        ({"goals": [("upwards", 1)]}, "upwards"),
        ({"goals": [("dense",)]}, r"a goal is tuple, must be"),
        ({"goals": [("contiguous", 0)]}, "runs is 0"),
        ({"max_moves": 0}, "max_moves is 0, must be at least 1"),
        ({"max_bytes": -1, "block_bytes": 1}, "max_bytes is -1, must be at least 1"),
        ({"max_bytes": 10}, "block_bytes"),
        ({"max_bytes": 10, "block_bytes": 0}, "block_bytes is 0, must be at least 1"),
        ({"cached": "keep"}, "keep"),
    ],
)
def test_what_cannot_be_wanted_is_refused_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        DefragPolicy(**{"goals": [("dense", 0)]} | arguments)  # type: ignore[arg-type]
