"""Recorded sessions, made ready for a comparison of policies: how many run at a time, and blocks of more tokens."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from blockyard.traces import TraceRequest


def at_a_time(
    requests: Sequence[TraceRequest], users: int, part: int | None = None, apart: float | None = None
) -> list[TraceRequest]:
    """Let `users` users work through sessions that all begin at 0, each of them one session after the other.

    Sessions come in random order, and keep their recorded times. The first ones begin one after the other, spread over
    the median length of a session.

    Args:
        requests: of an agent trace.
        users: sessions at a time.
        part: 0 or 1 for one half of the sessions, chosen at random; None for all.
        apart: seconds between the beginnings of the first sessions, if not spread.

    Returns:
        The requests in order of arrival, without the answers that they wait for.
    """
    sessions: dict[int | None, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    order = list(sessions.values())
    random.Random(0).shuffle(order)
    if part is not None:
        order = order[part::2]
    if apart is None:
        apart = median(session[-1].arrival for session in order) / users
    free = [user * apart for user in range(users)]
    found = []
    for session in order:
        start = heapq.heappop(free)
        found += [
            replace(request, arrival=start + request.arrival - session[0].arrival, after=()) for request in session
        ]
        heapq.heappush(free, found[-1].arrival)
    return sorted(found, key=lambda request: request.arrival)


def coarser(requests: Sequence[TraceRequest], blocks: int) -> list[TraceRequest]:
    """Let one hash id stand for `blocks` blocks, so that long prompts are replayed in less time.

    Args:
        requests: with hash ids.
        blocks: how many become one; those left at the end of a prompt go.

    Returns:
        The requests, with new hash ids.
    """
    known: dict[tuple[int, ...], int] = {}
    found = []
    for request in requests:
        groups = zip(*[iter(request.hash_ids)] * blocks, strict=False)
        ids = [known.setdefault(group, len(known)) for group in groups]
        found.append(replace(request, hash_ids=ids, hash_tokens=request.hash_tokens * blocks))
    return found
