"""Puts moves within one cache into an order in which no block is overwritten before it has been read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blockyard.plan import Ids


@dataclass(frozen=True)
class MoveOrder:
    """Moves that can be made one after the other.

    Attributes:
        steps: (from, to), int64 `[n, 2]`: every block is read before it is written.
        closing: (from, to), int64 `[m, 2]`, one move of each ring (a->b->c->a): its sources are overwritten by the
            steps, so they are set aside before and put in their places afterwards.
    """

    steps: Ids
    closing: Ids


def order_moves(pairs: Ids) -> MoveOrder:
    """Order moves; pairs of no consequence for one another keep the order they have.

    Args:
        pairs: block ids (from, to), int64 `[n, 2]`, no repeats in the second column.

    Returns:
        Steps and closing moves; a block that moves onto itself is in neither.
    """
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    later = _must_follow(pairs)
    if (later == np.arange(len(pairs))).all():
        return MoveOrder(pairs, pairs[:0])
    heads = _ring_heads(later)
    later[heads] = heads
    rank = _distance_to_end(later)
    order = np.argsort(-rank, kind="stable")
    inside = np.ones(len(pairs), dtype=bool)
    inside[heads] = False
    return MoveOrder(pairs[order[inside[order]]], pairs[heads])


def _must_follow(pairs: Ids) -> Ids:
    """Give for each move the one that overwrites its source, or itself where none does."""
    by_target = np.argsort(pairs[:, 1], kind="stable")
    targets = pairs[by_target, 1]
    places = np.searchsorted(targets, pairs[:, 0]).clip(max=max(0, len(pairs) - 1))
    overwritten = targets[places] == pairs[:, 0]
    later: Ids = np.where(overwritten, by_target[places], np.arange(len(pairs)))
    return later


def _ring_heads(later: Ids) -> Ids:
    """Give one move of each ring: of those that never reach an end, the smallest of what they reach."""
    reached = later
    smallest = np.minimum(np.arange(len(later)), later)
    for _ in range(len(later).bit_length()):
        smallest = np.minimum(smallest, smallest[reached])
        reached = reached[reached]
    # After so many steps a move is at its end or in its ring, and all of a ring is reached by itself.
    on_ring = np.unique(reached[later[reached] != reached])
    heads: Ids = np.unique(smallest[on_ring])
    return heads


def _distance_to_end(later: Ids) -> Ids:
    """Count for each move the moves that follow from it."""
    distance: Ids = (later != np.arange(len(later))).astype(np.int64)
    reached = later
    for _ in range(len(later).bit_length()):
        distance = distance + distance[reached]
        reached = reached[reached]
    return distance
