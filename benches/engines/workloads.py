"""The requests that the benchmarks of vLLM's hits serve, and what a policy with knowledge of all of them would find."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from policies.sessions import at_a_time, coarser

from blockyard.tools.replay.optimal import optimal_hits
from blockyard.tools.replay.packed import PackedTrace
from blockyard.traces import TraceRequest, read_trace

SEATS = 8
"""Requests that run at a time."""
LOOKED_AHEAD = 64
"""Waiting requests among which one of a session without a running request is chosen."""
Ids = Sequence[int]


class Served(NamedTuple):
    """A request: its session and the numbers of its prompt's blocks, which are equal where the tokens before are."""

    session: int | None
    blocks: Ids
    arrival: float = 0.0
    hint: str | None = None
    """What its trace knows of the conversation when the answer ends."""


def agents(requests: int, part: int | None = None, ids_per_block: int = 4) -> list[Served]:
    """Return agent sessions, eight at a time."""
    trace = read_trace(traces() / "claude_code.jsonl.gz")
    return _sessions(coarser(at_a_time(trace, SEATS, part, apart=90.0), ids_per_block), requests)


def coding(requests: int, ids_per_block: int) -> list[Served]:
    """Return coding runs, eight at a time."""
    trace = read_trace(traces() / "lmcache_agent_miniswe.jsonl")
    return _sessions(coarser(at_a_time(trace, SEATS), ids_per_block), requests)


def documents(
    requests: int, part: int | None = None, count: int = 150, blocks: tuple[int, int] = (40, 160)
) -> list[Served]:
    """Return questions about documents, some of them asked about more than others."""
    chance = random.Random(part or 0)
    lengths = [chance.randint(*blocks) for _ in range(count)]
    weights = [1 / (rank + 1) for rank in range(len(lengths))]
    found = []
    for number in range(requests):
        (document,) = chance.choices(range(len(lengths)), weights)
        text = [document << 8 | place for place in range(lengths[document])]
        found.append(Served(None, [*text, *(1 << 24 | number << 2 | place for place in range(3))]))
    return found


def mooncake(requests: int, part: int | None = None) -> list[Served]:
    """Return the requests of Mooncake's trace in order."""
    found = read_trace(traces() / "synthetic_trace.jsonl")[part or 0 :: 1 if part is None else 2]
    return [Served(None, request.hash_ids) for request in found if request.hash_ids][:requests]


def traces() -> Path:
    """Return the folder of the recorded traces."""
    return Path(os.environ.get("BLOCKYARD_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces"))


def _sessions(found: list[TraceRequest], requests: int) -> list[Served]:
    served = [Served(it.session, it.hash_ids, it.arrival, it.hint) for it in found if it.hash_ids]
    return served[:requests]


def take_next(waiting: deque[Served], busy: set[int | None]) -> Served | None:
    """Take the first request whose session has none that runs."""
    for place in range(min(len(waiting), LOOKED_AHEAD)):
        if waiting[place].session is None or waiting[place].session not in busy:
            found = waiting[place]
            del waiting[place]
            return found
    return None


def optimum(requests: Sequence[Served], blocks: int, tokens: int) -> float:
    """Return the share that a policy with knowledge of all requests finds in one pool, one request at a time.

    Args:
        requests: in order.
        blocks: of the pool.
        tokens: of a block. Each prompt has one more, which is always computed.
    """
    counts = [len(request.blocks) * tokens + 1 for request in requests]
    packed = PackedTrace.of(
        [
            TraceRequest(
                arrival=0.0, input_tokens=count, output_tokens=1, hash_ids=tuple(request.blocks), hash_tokens=tokens
            )
            for count, request in zip(counts, requests, strict=True)
        ]
    )
    return float(optimal_hits(packed, blocks).sum()) * tokens / sum(counts)
