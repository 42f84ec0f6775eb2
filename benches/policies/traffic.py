"""Generated requests that share prefixes as real ones do: chats, agents, retrieval, batch jobs, loops, and shifts.

A request is a list of hash ids, as in Mooncake's traces: `blockyard.traces.TraceRequest`. The same name and seed
give the same requests. Eviction policies are compared over them (`benches/bench_policies.py`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count, islice

from blockyard.errors import InvalidArgumentError
from blockyard.traces import TraceRequest

HASH_TOKENS = 16

_Rows = Iterator[tuple[float, list[int]]]


class _Source:
    """Random numbers, and hash ids that nothing else has."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self._next = count()

    def text(self, blocks: float) -> list[int]:
        """Return new text of about `blocks` blocks, at least one."""
        return list(islice(self._next, max(1, round(self.rng.gauss(blocks, blocks / 3)))))

    def texts(self, number: int, blocks: float) -> list[list[int]]:
        return [self.text(blocks) for _ in range(number)]

    def popular(self, items: list[list[int]], skew: float) -> list[int]:
        """Return one of them; the first are asked for most (Zipf's law)."""
        weights = [1 / rank**skew for rank in range(1, len(items) + 1)]
        return self.rng.choices(items, weights)[0]


def _sessions(
    source: _Source,
    *,
    systems: list[list[int]],
    first: float,
    turn: float,
    turns: float,
    think: float,
    rate: float,
) -> _Rows:
    """Yield conversations: each turn asks with all that was said before, a while after the last one.

    `first` and `turn` are blocks, `turns` is how many a conversation has on average, `think` and `1 / rate` are
    seconds: between two turns, and between two conversations that begin.
    """
    rng, order = source.rng, count()
    waiting = [(0.0, next(order), list[int]())]
    while True:
        now, _, said = heapq.heappop(waiting)
        if not said:
            heapq.heappush(waiting, (now + rng.expovariate(rate), next(order), []))
            said = [*source.popular(systems, 1.0), *source.text(first)]
        yield now, said
        if rng.random() < 1 - 1 / turns:
            pause = think * rng.lognormvariate(-0.5, 1.0)
            heapq.heappush(waiting, (now + pause, next(order), said + source.text(turn)))


def chat(source: _Source) -> _Rows:
    """Yield multi-turn chats with time to think, under four system prompts."""
    systems = source.texts(4, 16)
    return _sessions(source, systems=systems, first=8, turn=12, turns=4, think=60, rate=1.0)


def busy(source: _Source) -> _Rows:
    """Yield chats of many more people, who come back after minutes: few of them are cached in a small pool."""
    systems = source.texts(8, 6)
    return _sessions(source, systems=systems, first=12, turn=10, turns=3, think=240, rate=6.0)


def agents(source: _Source) -> _Rows:
    """Yield agents with tools: long conversations with short pauses that come back to a growing prefix."""
    systems = source.texts(2, 60)
    return _sessions(source, systems=systems, first=20, turn=8, turns=25, think=8, rate=0.06)


def rag(source: _Source) -> _Rows:
    """Yield questions about one or two documents of a collection; some documents are asked about often."""
    system, documents = source.text(10), source.texts(500, 30)
    for number in count():
        parts = [source.popular(documents, 0.9) for _ in range(1 if source.rng.random() < 0.8 else 2)]
        yield float(number), [*system, *chain.from_iterable(parts), *source.text(3)]


def batch(source: _Source) -> _Rows:
    """Yield chats, and every 200 requests a batch job: 150 long prompts after one instruction, each read once."""
    rows = chat(source)
    for number in count():
        now, said = next(rows)
        yield now, said
        if number % 200 == 199:
            instruction = source.text(20)
            for _ in range(150):
                yield now, instruction + source.text(40)


def loop(source: _Source) -> _Rows:
    """Yield the same documents in the same order, again and again: a pool a little smaller sees no hit with `lru`."""
    documents = source.texts(250, 40)
    for number in count():
        yield float(number), documents[number % 250] + source.text(1)


def templates(source: _Source) -> _Rows:
    """Yield families of prompts that begin alike and never come again whole; one family in 100 requests is replaced."""
    families = source.texts(60, 30)
    for number in count():
        if number % 100 == 99:
            families[source.rng.randrange(60)] = source.text(30)
        yield float(number), source.popular(families, 0.6) + source.text(20)


def mixed(source: _Source) -> _Rows:
    """Yield all of the above at once, chats most often, as one pool serves many uses."""
    kinds = {chat: 5, busy: 5, rag: 3, templates: 3, agents: 1, batch: 2}
    rows = [kind(source) for kind in kinds]
    for number in count():
        yield float(number), next(source.rng.choices(rows, list(kinds.values()))[0])[1]


_SINGLE: dict[str, Callable[[_Source], _Rows]] = {
    "chat": chat,
    "busy": busy,
    "agents": agents,
    "rag": rag,
    "batch": batch,
    "loop": loop,
    "templates": templates,
    "mixed": mixed,
}
_SHIFTS = {"chat-rag": (chat, rag), "loop-chat": (loop, chat), "templates-agents": (templates, agents)}

WORKLOADS = (*_SINGLE, *_SHIFTS)
"""Names for `traffic`; `a-b` shifts from `a` to `b` in the middle."""


def traffic(name: str, *, requests: int = 3000, seed: int = 0) -> list[TraceRequest]:
    """Make requests that share prefixes.

        >>> traffic("chat", requests=2)[0].hash_tokens
        16.0

    Args:
        name: one of `WORKLOADS`.
        requests: how many, at least 2.
        seed: decides lengths, times and who asks for what.

    Returns:
        The requests, in order of arrival; their prompts are whole blocks and one token.

    Raises:
        InvalidArgumentError: `name` is unknown, or `requests` is less than 2.
    """
    if name not in WORKLOADS:
        raise InvalidArgumentError(f"name is {name!r}, must be one of {', '.join(WORKLOADS)}")
    if requests < 2:
        raise InvalidArgumentError(f"requests is {requests}, must be 2 or more")
    source = _Source(f"{name} {seed}")
    if name in _SINGLE:
        return list(map(_request, islice(_SINGLE[name](source), requests)))
    before, after = _SHIFTS[name]
    rows = [_request(row) for row in islice(before(source), requests // 2)]
    shift = rows[-1].arrival
    later = [_request(row) for row in islice(after(source), requests - len(rows))]
    return rows + [replace(row, arrival=row.arrival + shift) for row in later]


def _request(row: tuple[float, list[int]]) -> TraceRequest:
    arrival, ids = row
    return TraceRequest(arrival, len(ids) * HASH_TOKENS + 1, 1, tuple(ids), float(HASH_TOKENS))
