"""Variations of a trace: its requests spread over several engines, and its arrivals drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final

import numpy as np

from blockyard.errors import InvalidArgumentError
from blockyard.traces import TraceRequest

__all__ = ["has_prefixes", "redraw_arrivals", "spread_by_prefix"]

_UNEVEN: Final = 1.2
_AHEAD: Final = 8
"""An engine may be ahead of the mean by this factor and this many requests, and still get prompts for their prefix."""

_NEIGHBOURS: Final = 64
"""Requests among which gaps between arrivals are exchanged, so that busy and quiet times stay where they are."""


def has_prefixes(requests: Sequence[TraceRequest]) -> bool:
    """Whether a trace says which prompts share a beginning."""
    return any(len(request.hash_ids) for request in requests)


def spread_by_prefix(requests: Sequence[TraceRequest], engines: int) -> list[list[int]]:
    """Give each request to one of several engines, as a router does that knows prefixes.

    Requests of a conversation go to one engine. A new conversation goes to the engine that has seen the most of its
    prompt's blocks; but if that engine is far ahead of the others, or none has seen the first one, to the engine with
    the fewest tokens so far. So a system prompt that all share does not lead all requests to one engine.

    Args:
        requests: the trace.
        engines: number of engines.

    Returns:
        Indices of the requests of each engine, in order of arrival.

    Raises:
        InvalidArgumentError: `engines` is less than 1, or a request waits for conversations of several engines.
    """
    if engines < 1:
        raise InvalidArgumentError(f"engines is {engines}, must be at least 1")
    places: list[list[int]] = [[] for _ in range(engines)]
    tokens = [0] * engines
    engine_of_session: dict[int, int] = {}
    seen: dict[int, int] = {}  # for each block, the last engine that it went to
    engine_of: list[int] = []
    for index, request in enumerate(requests):
        if len({engine_of[other] for other in request.after}) > 1:
            raise InvalidArgumentError(f"request {index} waits for several conversations, must wait for those of one")
        engine = engine_of[request.after[0]] if request.after else None
        if engine is None and request.session is not None:
            engine = engine_of_session.get(request.session)
        if engine is None:
            most = sum(tokens) * (_UNEVEN / engines + _AHEAD / max(1, index))
            engine = _engine_of_prefix(request.hash_ids, seen, tokens, most)
        if request.session is not None:
            engine_of_session.setdefault(request.session, engine)
        seen.update(dict.fromkeys(request.hash_ids, engine))
        engine_of.append(engine)
        places[engine].append(index)
        tokens[engine] += request.input_tokens + request.output_tokens
    return places


def _engine_of_prefix(hash_ids: Sequence[int], seen: dict[int, int], tokens: Sequence[int], most: float) -> int:
    """Return the engine with the longest prefix and at most `most` tokens, or else the one with the fewest tokens."""
    known = [seen[block] for block in takewhile(seen.__contains__, hash_ids)]
    least = min(range(len(tokens)), key=tokens.__getitem__)
    return next((engine for engine in reversed(known) if tokens[engine] <= most), least)


def part_of(requests: Sequence[TraceRequest], indices: Sequence[int]) -> list[TraceRequest]:
    """Return some requests of a trace; those that they wait for must be among them."""
    place = {index: number for number, index in enumerate(indices)}
    return [replace(requests[one], after=tuple(place[other] for other in requests[one].after)) for one in indices]


def redraw_arrivals(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """Return a trace with other arrivals of the same kind: gaps and delays are exchanged among neighbours.

    Args:
        requests: the trace, in order of arrival.
        seed: 0 for the trace's own arrivals.
    """
    if not seed:
        return list(requests)
    rng = np.random.default_rng(seed)
    free = [index for index, request in enumerate(requests) if not request.after]
    waiting = [index for index, request in enumerate(requests) if request.after]
    arrivals = np.array([requests[index].arrival for index in free])
    gaps = _exchange(np.diff(arrivals), rng)
    delays = _exchange(np.array([requests[index].delay for index in waiting]), rng)
    found = list(requests)
    for index, arrival in zip(free, np.cumsum([*arrivals[:1], *gaps]).tolist(), strict=True):
        found[index] = replace(found[index], arrival=arrival)
    for index, delay in zip(waiting, delays.tolist(), strict=True):
        found[index] = replace(found[index], delay=delay)
    return found


def _exchange(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    parts = [rng.permutation(values[first : first + _NEIGHBOURS]) for first in range(0, len(values), _NEIGHBOURS)]
    return np.concatenate(parts) if parts else values
