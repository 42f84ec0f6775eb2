"""Workloads made to measure: their prompts fit a device, and their blocks take a share or a multiple of all tiers.

Each function takes the blocks of all tiers and those of the longest prompt, and returns the hash ids of the prompts in
order, one id for each block.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from blockyard.traces import TraceRequest, read_trace
from policies.sessions import at_a_time, coarser
from policies.traffic import traffic

Prompts = list[Sequence[int]]
TRACES = {"agents": "claude_code.jsonl.gz", "mooncake": "synthetic_trace.jsonl"}


def has_trace(workload: str) -> bool:
    """Whether the trace of a workload, if it has one, is there."""
    return workload not in TRACES or _path(workload).exists()


def loop(total: int, longest: int) -> Prompts:
    """Make four rounds of prompts that together take four fifths of all tiers."""
    length = max(1, longest * 2 // 5)
    return [range(at * length, (at + 1) * length) for at in range(total * 4 // 5 // length)] * 4


def zipf(total: int, longest: int) -> Prompts:
    """Make questions about documents that together take twice all tiers; some are asked about often."""
    rng, documents, begin = random.Random(0), list[range](), 0
    while begin < 2 * total:
        end = begin + rng.randint(1 + longest // 20, longest // 2)
        documents.append(range(begin, end))
        begin = end
    weights = [1 / rank**0.9 for rank in range(1, len(documents) + 1)]
    chosen = rng.choices(documents, weights, k=4 * len(documents))
    return [[*ids, begin + 2 * at, begin + 2 * at + 1] for at, ids in enumerate(chosen)]


def agents(total: int, longest: int) -> Prompts:
    """Make recorded agent sessions that together take 2.5 times all tiers, all of them at a time."""
    recorded = _scaled(coarser(_trace("agents", 2000), 16), longest)
    sessions = _several(recorded, max(1, round(2.5 * total / _distinct(recorded))))
    return _prompts(at_a_time(sessions, len({request.session for request in sessions})))


def chat(total: int, longest: int) -> Prompts:
    """Make chats that together take four times all tiers."""
    chats = _scaled(traffic("chat", requests=2000), longest)
    copies = max(1, round(4 * total / _distinct(chats)))
    return _prompts(_first(_several(chats, copies), 4 * total))


def mooncake(total: int, longest: int) -> Prompts:
    """Return the first requests of Mooncake's trace, up to ten times the blocks of all tiers."""
    return _prompts(_first(_scaled(_trace("mooncake", 4000), longest), 10 * total))


def _path(workload: str) -> Path:
    return Path(os.environ.get("BLOCKYARD_TRACES", "../shared/traces")) / TRACES[workload]


@cache
def _trace(workload: str, first: int) -> list[TraceRequest]:
    return read_trace(_path(workload), first=first)


def _prompts(requests: Sequence[TraceRequest]) -> Prompts:
    return [request.hash_ids for request in requests if request.hash_ids]


def _distinct(requests: Sequence[TraceRequest]) -> int:
    return len({block for request in requests for block in request.hash_ids})


def _scaled(requests: list[TraceRequest], longest: int) -> list[TraceRequest]:
    """Change the number of blocks of each hash id, so that the longest prompt has about `longest` of them."""
    most = max(len(request.hash_ids) for request in requests)
    if most > longest:
        return coarser(requests, -(-most // longest))
    times = longest // most
    return [
        replace(request, hash_ids=[block * times + part for block in request.hash_ids for part in range(times)])
        for request in requests
    ]


def _several(requests: list[TraceRequest], copies: int) -> list[TraceRequest]:
    """Repeat requests at the same times, under other hash ids and of other sessions."""
    ids = 1 + max(max(request.hash_ids, default=0) for request in requests)
    sessions = 1 + max(request.session or 0 for request in requests)
    repeated = [
        replace(
            request,
            hash_ids=[block + copy * ids for block in request.hash_ids],
            session=(request.session or 0) + copy * sessions,
        )
        for copy in range(copies)
        for request in requests
    ]
    return sorted(repeated, key=lambda request: request.arrival)


def _first(requests: list[TraceRequest], blocks: int) -> list[TraceRequest]:
    """Return the first requests, of `blocks` distinct blocks together."""
    seen: set[int] = set()
    for number, request in enumerate(requests):
        seen.update(request.hash_ids)
        if len(seen) > blocks:
            return requests[:number]
    return requests
