"""Which tokens agent sessions find again in a cache with windows or states, modelled by whole prompts.

A chain is the blocks of a prompt. A request can resume only at a *point*: a position in a chain whose *tail* is cached,
that is the last window of each window group and the state of each recurrent group. The models below differ in the
points that they make and in what they evict first; all use LRU. Within a chain they evict the deepest blocks first, so
what is left of a chain is always its beginning. A prompt therefore owns one range of blocks, and a model needs only a
few operations for a prompt of thousands of blocks.

Blocks are the trace's. Answers without hash ids take room, and are never found again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from blockyard.traces import TraceRequest

Points = dict[int, bool]
"""Positions in blocks; whether two prompts part there."""


class Prompts:
    """Requests, and how many first blocks of one and its answer another shares."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self.requests = requests
        self.keys = [np.array(request.hash_ids, np.int64) for request in requests]
        self._answered = [np.array([*request.hash_ids, *request.output_hash_ids], np.int64) for request in requests]
        self._shared: dict[tuple[int, int], int] = {}

    def shared(self, earlier: int, later: int) -> int:
        """Return how many first blocks of an earlier prompt and its answer a later prompt shares."""
        found = self._shared.get((earlier, later))
        if found is None:
            length = min(len(self._answered[earlier]), len(self.keys[later]))
            differ = self._answered[earlier][:length] != self.keys[later][:length]
            found = int(differ.argmax()) if differ.any() else length
            self._shared[earlier, later] = found
        return found

    def end(self, number: int) -> int:
        """Return a prompt's last boundary before its last token, in blocks."""
        request = self.requests[number]
        return min(int((request.input_tokens - 1) // request.hash_tokens), len(self.keys[number]))

    def answered(self, number: int) -> int:
        """Return the full blocks of a prompt and its answer."""
        request = self.requests[number]
        full = int((request.input_tokens + request.output_tokens) // request.hash_tokens)
        return max(len(self.keys[number]), full)


@dataclass
class Owned:
    """The blocks `[low, high)` of a prompt's chain that no later prompt uses, and the points in them."""

    low: int
    high: int
    points: Points = field(default_factory=dict)


class Bound:
    """Every block boundary is a point, and tails take no room: no cache of this size finds more with LRU."""

    def __init__(self, prompts: Prompts, blocks: int, tail: int = 0) -> None:
        self.prompts, self.blocks, self.tail = prompts, blocks, tail
        self.used = 0
        self.owners: dict[int, Owned] = {}
        """By prompt, least recently used first."""
        self._by_session: dict[int | None, list[int]] = {}

    def hit_rate(self) -> float:
        """Replay all requests. Returns the share of prompt tokens found; prompts too long for the pool find nothing."""
        found = total = 0
        for number, request in enumerate(self.prompts.requests):
            total += request.input_tokens
            if self.prompts.answered(number) + self.tail <= self.blocks:
                found += self.serve(number) * request.hash_tokens
        return found / total

    def serve(self, number: int) -> int:
        """Run a prompt. Returns the blocks that it finds."""
        parts = self.parts(number)
        run, points = self.take(number)
        hit = self.hit(min(run, self.prompts.end(number)), points)
        high = self.prompts.answered(number)
        points = self.points(number, hit, parts, points)
        while high + self.tail * len(points) > self.blocks:
            del points[min(points)]
        self.make_room(high + self.tail * len(points))
        self.used += high + self.tail * len(points)
        self.owners[number] = Owned(0, high, points)
        self._by_session.setdefault(self.prompts.requests[number].session, []).append(number)
        return hit

    def take(self, number: int) -> tuple[int, Points]:
        """Take over what earlier prompts share with this one: a run of cached blocks, and points. Returns both."""
        run, points = 0, Points()
        earlier = self._by_session.get(self.prompts.requests[number].session, [])
        for other in list(earlier):
            owned = self.owners[other]
            end = min(self.prompts.shared(other, number), owned.high)
            run = max(run, end)
            if end <= owned.low:
                continue
            taken = {point: parts for point, parts in owned.points.items() if point <= end}
            points |= taken
            self.used -= end - owned.low + self.tail * len(taken)
            owned.points = {point: parts for point, parts in owned.points.items() if point > end}
            owned.low = end
            if owned.low == owned.high:
                self.forget(other)
        return run, dict(sorted(points.items()))

    def parts(self, number: int) -> int:
        """Return where a prompt's run of cached blocks ends, if the blocks of another prompt go on there; or 0."""
        ends = [
            (self.prompts.shared(other, number), self.owners[other].high)
            for other in self._by_session.get(self.prompts.requests[number].session, [])
        ]
        run = max((min(shared, high) for shared, high in ends), default=0)
        return run if any(shared == run < high for shared, high in ends) else 0

    def forget(self, number: int) -> None:
        """Drop a prompt of which nothing is left."""
        del self.owners[number]
        self._by_session[self.prompts.requests[number].session].remove(number)

    def hit(self, run: int, points: Points) -> int:
        """Return where a prompt resumes."""
        del points
        return run

    def points(self, number: int, hit: int, parts: int, points: Points) -> Points:
        """Return the points of a chain once its prompt is computed."""
        del number, hit, parts, points
        return {}

    def make_room(self, wanted: int) -> None:
        """Evict until so many blocks are free."""
        over = self.used + wanted - self.blocks
        while over > 0:
            over -= self.evict(next(iter(self.owners)), over)

    def evict(self, number: int, wanted: int) -> int:
        """Evict from the deep end of a prompt: its deepest point, or blocks behind it. Returns how many blocks."""
        owned = self.owners[number]
        deepest = max(owned.points, default=owned.low)
        if deepest == owned.high and owned.points:
            del owned.points[deepest]
            gone = self.tail
        else:
            gone = min(owned.high - deepest, wanted)
            owned.high -= gone
        self.used -= gone
        if owned.low == owned.high:
            self.forget(number)
        return gone


class ResumePoints(Bound):
    """Points at prompt ends, where two cached prompts part, and every `interval` blocks; `thin` drops old ones.

    Points where prompts part stay until they are evicted. The point where a prompt resumed stays until the next one of
    its chain if the prompt added a tail's blocks or more.

    Points at intervals are made while, within the last `turnovers` of the cache, one of them was of use or would have
    been: a prompt resumed there, or had an interval of cached blocks behind its point. None: always.
    """

    def __init__(
        self,
        prompts: Prompts,
        blocks: int,
        tail: int,
        interval: int,
        thin: str = "squares",
        turnovers: int | None = None,
    ) -> None:
        super().__init__(prompts, blocks, tail)
        self.interval, self.thin, self.turnovers = interval, thin, turnovers
        self._taken, self._parted = 0, -math.inf
        """Blocks taken so far, and when a point at an interval was last of use."""

    def hit(self, run: int, points: Points) -> int:
        """Return the deepest point within the run."""
        hit = max((point for point in points if point <= run), default=0)
        if self.interval and (run >= hit + self.interval or (hit and hit % self.interval == 0)):
            self._parted = self._taken
        return hit

    def points(self, number: int, hit: int, parts: int, points: Points) -> Points:
        """Add points to those of the chain, and drop some."""
        end = self.prompts.end(number)
        if hit < parts <= end:
            points.setdefault(parts, True)
        is_of_use = self.turnovers is None or self._taken <= self._parted + self.turnovers * self.blocks
        self._taken += self.prompts.answered(number) - hit
        if self.interval and is_of_use:
            for point in range((hit // self.interval + 1) * self.interval, end + 1, self.interval):
                points.setdefault(point, False)
        if end:
            points.setdefault(end, False)
        return dict(sorted(self.kept(end, hit, points))) if self.interval else dict(sorted(points.items()))

    def kept(self, end: int, hit: int, points: Points) -> Iterator[tuple[int, bool]]:
        """Yield the points that stay."""
        last = end
        for point in sorted(points, reverse=True):
            between, since = last - point, end - last
            index = point // self.interval
            wide = {
                "none": True,
                "doubling": point % self.interval != 0 or end // self.interval - index < 2 * (index & -index),
                "squares": between >= self.interval and between**2 >= 4 * self.interval * since,
                "halves": between >= max(self.interval, since / 2),
            }[self.thin]
            is_used = point == hit and since >= self.tail
            if point >= end or points[point] or is_used or wide:
                yield point, points[point]
                last = point


class VllmRule(Bound):
    """vLLM's `reachable_block_mask` with `retention_interval=0`: points at prompt ends and where two prompts part.

    A tail is cached blocks like any others: it becomes recently used only when a request resumes there, and blocks of
    it can be evicted one by one. A window leaves an answer's tail before the request ends, so the tail is older than
    the request's full blocks if `leaves`.
    """

    def __init__(self, prompts: Prompts, blocks: int, tail: int, *, leaves: bool) -> None:
        super().__init__(prompts, blocks)
        self.size, self.leaves = tail, leaves
        self.order: dict[tuple[str, int], int] = {}
        """Prompts, and tails by point id with the blocks left; least recently used first."""
        self._tails: dict[int, tuple[int, int]] = {}
        self._tails_of: dict[int | None, list[int]] = {}
        self._made = 0

    def serve(self, number: int) -> int:
        """Run a prompt. Returns the blocks that it finds."""
        session, end = self.prompts.requests[number].session, self.prompts.end(number)
        run, _ = self.take(number)
        run = min(run, end)
        whole = {}
        for tail in self._tails_of.get(session, []):
            prompt, position = self._tails[tail]
            found = position <= min(run, self.prompts.shared(prompt, number))
            if found and self.order["tail", tail] == self.size:
                whole[position] = tail
        hit = max(whole, default=0)
        used = {whole[position] for position in {hit, end} & set(whole)}
        new = [position for position in sorted({run, end} - set(whole)) if position > hit]
        high = self.prompts.answered(number)
        for tail in used:
            del self.order["tail", tail]
        while high + self.size * (len(new) + len(used)) > self.blocks:
            if used:
                self._drop(used.pop(), self.size)
            else:
                new.pop(0)
        self.make_room(high + self.size * len(new))
        self.used += high + self.size * len(new)
        self.owners[number] = Owned(0, high)
        self._by_session.setdefault(session, []).append(number)
        for position in new:
            self._made += 1
            self._tails[self._made] = (number, position)
            self._tails_of.setdefault(session, []).append(self._made)
            used.add(self._made)
        tails = {("tail", tail): self.size for tail in sorted(used)}
        self.order |= tails | {("prompt", number): 0} if self.leaves else {("prompt", number): 0} | tails
        return hit

    def forget(self, number: int) -> None:
        """Drop a prompt of which nothing is left."""
        super().forget(number)
        del self.order["prompt", number]

    def _drop(self, tail: int, left: int) -> None:
        prompt, _ = self._tails.pop(tail)
        self._tails_of[self.prompts.requests[prompt].session].remove(tail)
        self.used -= left

    def make_room(self, wanted: int) -> None:
        """Evict prompts and tails until so many blocks are free."""
        over = self.used + wanted - self.blocks
        while over > 0:
            kind, oldest = next(iter(self.order))
            if kind == "prompt":
                over -= self.evict(oldest, over)
                continue
            left = self.order["tail", oldest]
            gone = min(left, over)
            self.order["tail", oldest] -= gone
            over -= gone
            if gone == left:
                del self.order["tail", oldest]
                self._drop(oldest, left)
            else:
                self.used -= gone
