"""Moves put into order: made one after the other, they do what making all at once would."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.transfer.order import order_moves


@st.composite
def moves(draw: st.DrawFn, most: int = 12) -> tuple[int, np.ndarray]:
    """Chains, rings, trees and what hangs on rings: any sources, destinations without repeats."""
    blocks = draw(st.integers(1, most))
    targets = draw(st.lists(st.integers(0, blocks - 1), unique=True, max_size=blocks))
    sources = draw(st.permutations(targets)) if draw(st.booleans()) else None
    if sources is None:
        sources = [draw(st.integers(0, blocks - 1)) for _ in targets]
    return blocks, np.array(list(zip(sources, targets, strict=True)), np.int64).reshape(-1, 2)


def at_once(blocks: int, pairs: np.ndarray) -> list[int]:
    content = list(range(blocks))
    for source, target in pairs.tolist():
        content[target] = source
    return content


def one_by_one(blocks: int, pairs: np.ndarray) -> list[int]:
    order = order_moves(pairs)
    content = list(range(blocks))
    aside = [content[source] for source, _ in order.closing.tolist()]
    for source, target in order.steps.tolist():
        content[target] = content[source]
    for (_, target), value in zip(order.closing.tolist(), aside, strict=True):
        content[target] = value
    return content


@given(moves())
def test_steps_in_order_do_what_all_moves_at_once_do(drawn: tuple[int, np.ndarray]):
    assert one_by_one(*drawn) == at_once(*drawn)


@given(moves())
def test_only_rings_are_closed_and_each_once(drawn: tuple[int, np.ndarray]):
    blocks, pairs = drawn
    order = order_moves(pairs)
    successor = dict(pairs[:, ::-1].tolist())
    rings = set()
    for start in range(blocks):
        path = [start]
        while path[-1] in successor and successor[path[-1]] not in path:
            path.append(successor[path[-1]])
        if len(path) > 1 and successor.get(path[-1]) == start:
            rings.add(frozenset(path))
    assert len(order.closing) == len(rings)
    assert len(order.steps) + len(order.closing) == int((pairs[:, 0] != pairs[:, 1]).sum())


@pytest.mark.parametrize("shift", [1, 3, -1, -3])
def test_long_shifts_are_ordered(shift: int):
    blocks = np.arange(3000) + 10
    pairs = np.column_stack((blocks + shift, blocks))
    assert one_by_one(3100, pairs) == at_once(3100, pairs)
    if shift > 0:
        assert (order_moves(pairs[::-1]).steps[:, 1] == np.sort(pairs[:, 1])).all() or shift > 1


def test_a_ring_of_thousands_is_ordered():
    ring = np.random.default_rng(0).permutation(5000)
    pairs = np.column_stack((ring, np.roll(ring, -1)))
    assert one_by_one(5000, pairs) == at_once(5000, pairs)
    assert len(order_moves(pairs).closing) == 1


def test_independent_moves_keep_their_order():
    pairs = np.array([[9, 1], [3, 0], [9, 4]])
    assert order_moves(pairs).steps.tolist() == pairs.tolist()
    assert len(order_moves(pairs[:0]).steps) == 0
