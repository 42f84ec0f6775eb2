"""Figures of a pool against counting by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard import BlockObserver, InvalidArgumentError
from blockyard.fragmentation import Fragmentation, measure


@given(
    st.sets(st.integers(1, 99), max_size=60).flatmap(lambda used: st.permutations(sorted(used))),
    st.integers(1, 12),
    st.integers(0, 60),
    st.integers(0, 99),
)
def test_the_figures_are_those_of_counting(used: list[int], page: int, cut: int, leased: int) -> None:
    books = BlockObserver(100)
    books.use_ids(used)
    books.lease([leased])
    tables = [used[:cut], used[:cut] + used[cut:]]
    found = measure(books, tables, page_blocks=page)
    movable = set(used) - {leased}
    fixed = {0, leased}
    links = {(a, b) for table in tables for a, b in itertools.pairwise(table)}
    pages = {block // page for block in movable | fixed}
    densest = sorted(set(range(100)) - fixed)[len(movable) - 1] if movable else 0
    assert found == Fragmentation(
        blocks=len(used),
        highest=max(movable, default=0),
        gap=max(movable, default=0) - densest,
        sequences=2,
        runs=len(used) - sum(b == a + 1 for a, b in links),
        most_runs=len(used) - sum(b == a + 1 for a, b in itertools.pairwise(used)),
        used_pages=len(pages),
        empty_pages=-(-100 // page) - len(pages),
    )
    assert found.runs_per_sequence == found.runs / 2


def test_without_sequences_and_pages() -> None:
    books = BlockObserver(64)
    assert measure(books) == Fragmentation(0, 0, 0, 0, 0, 0, 1, 1)
    assert measure(books).runs_per_sequence == 0.0
    with pytest.raises(InvalidArgumentError, match="page_blocks is 0"):
        measure(books, page_blocks=0)
    with pytest.raises(InvalidArgumentError, match="block is 64"):
        measure(books, [[64]])
