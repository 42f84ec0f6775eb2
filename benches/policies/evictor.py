"""Eviction policies in Python, for experiments: an interface, a replay without a block manager, and the best policy.

A policy that proves itself here is written in Rust then (`blockyard_core::Evictor` has the same methods). Here a block
costs about a microsecond, in a `BlockManager` a hundredth of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from blockyard.errors import InvalidArgumentError
from blockyard.traces import TraceRequest


@dataclass(frozen=True)
class Chain:
    """The blocks of one request.

    Attributes:
        keys: of its full blocks; two are the same if their prompts are the same up to there.
        hittable: how many of them can be found cached: the last token is always computed.
        needed: blocks that it takes in all.
    """

    keys: tuple[int, ...]
    hittable: int
    needed: int


def chains(requests: Sequence[TraceRequest]) -> list[Chain]:
    """Return the blocks of requests with hash ids, one block a hash id; keys count from 0."""
    known: dict[tuple[int, int], int] = {}
    found = []
    for request in requests:
        size = int(request.hash_tokens)
        keys, key = [], -1
        for hash_id in request.hash_ids[: request.input_tokens // size if size else 0]:
            key = known.setdefault((key, hash_id), len(known))
            keys.append(key)
        tail = request.input_tokens > len(keys) * size
        found.append(Chain(tuple(keys), len(keys) if tail else max(len(keys) - 1, 0), len(keys) + tail))
    return found


class Evictor:
    """A policy: keeps the blocks that can be evicted, and says which goes first.

    A block is published, inserted when its last user goes, then hit and inserted again any number of times, or popped.
    `insert`, `remove` and `pop` must be written; the others need not.

        >>> class Mru(Evictor):
        ...     def __init__(self) -> None:
        ...         self.blocks: list[int] = []
        ...     def insert(self, block: int) -> None:
        ...         self.blocks.append(block)
        ...     def remove(self, block: int) -> None:
        ...         self.blocks.remove(block)
        ...     def pop(self) -> int:
        ...         return self.blocks.pop()
        >>> from policies.traffic import traffic
        >>> requests = traffic("loop", requests=500)
        >>> sum(replay(requests, 5000, Mru())) > sum(replay(requests, 5000, Lru()))
        True
    """

    def insert(self, block: int) -> None:
        """Make a block evictable. Those of a sequence come from its end, its first block last."""
        raise NotImplementedError

    def remove(self, block: int) -> None:
        """Take out an evictable block that is hit."""
        raise NotImplementedError

    def pop(self) -> int:
        """Take out the block that goes first."""
        raise NotImplementedError

    def publish(self, block: int, depth: int, key: int) -> None:
        """Note that a block can be found from now on: how many blocks are before it in its prompt, and its key."""

    def begin_chain(self) -> None:
        """Note that a sequence's blocks are released from now on."""


class Lru(Evictor):
    """The least recently used block goes first."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def insert(self, block: int) -> None:
        """Put the block last."""
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        """Take the block out."""
        del self._blocks[block]

    def pop(self) -> int:
        """Take the first block out."""
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block


class Optimal(Evictor):
    """Knows all requests: the block whose next use is furthest goes first, of a prompt's its last (Belady).

    The next use of a block is never after that of a block behind it, so that this is the best that one can do.

    Args:
        requests: those that `replay` is given.
        blocks: size of the pool.
    """

    def __init__(self, requests: Sequence[TraceRequest], blocks: int) -> None:
        self._now = -1
        fitting = [chain for chain in chains(requests) if chain.needed <= blocks]
        following: dict[int, int] = {}
        self._next = [dict[int, int]() for _ in fitting]
        for number in range(len(fitting) - 1, -1, -1):
            chain = fitting[number]
            self._next[number] = {key: following.get(key, len(fitting)) for key in chain.keys}
            following.update(dict.fromkeys(chain.keys[: chain.hittable], number))
        self._keys: dict[int, tuple[int, int]] = {}
        self._use: dict[int, int] = {}
        self._order: list[tuple[int, int, int]] = []

    def begin_chain(self) -> None:
        """Count the request."""
        self._now += 1

    def publish(self, block: int, depth: int, key: int) -> None:
        """Note the block's key."""
        self._keys[block] = depth, key

    def insert(self, block: int) -> None:
        """Put the block where its next use belongs."""
        depth, key = self._keys[block]
        self._use[block] = -self._next[self._now][key]
        heapq.heappush(self._order, (self._use[block], -depth, block))

    def remove(self, block: int) -> None:
        """Take the block out."""
        del self._use[block]

    def pop(self) -> int:
        """Take out the block that is used last."""
        while True:
            use, _, block = heapq.heappop(self._order)
            if self._use.get(block) == use:
                del self._use[block]
                return block


def replay(requests: Sequence[TraceRequest], blocks: int, evictor: Evictor) -> list[int]:
    """Let a policy decide over a pool that serves one request at a time, as a `BlockManager` does.

    Args:
        requests: with hash ids; those that need more than the pool are left out.
        blocks: size of the pool, at least 1.
        evictor: a new one.

    Returns:
        Blocks that each request that fits finds cached.

    Raises:
        InvalidArgumentError: `blocks` is less than 1, or the policy gives out a block that is not evictable.
    """
    if blocks < 1:
        raise InvalidArgumentError(f"blocks is {blocks}, must be 1 or more")
    pool = _Pool(blocks, evictor)
    return [pool.serve(chain) for chain in chains(requests) if chain.needed <= blocks]


class _Pool:
    """Which block holds what."""

    def __init__(self, blocks: int, evictor: Evictor) -> None:
        self._evictor = evictor
        self._free = list(range(blocks - 1, -1, -1))
        self._block_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._evictable: set[int] = set()

    def serve(self, chain: Chain) -> int:
        """Admit, compute and free a request; return how many of its blocks are cached."""
        table: list[int] = []
        for key in chain.keys[: chain.hittable]:
            if key not in self._block_of:
                break
            table.append(self._block_of[key])
            self._evictor.remove(table[-1])
        self._evictable.difference_update(table)
        hits = len(table)
        while len(table) < chain.needed:
            table.append(self._free.pop() if self._free else self._evict())
        for depth, key in enumerate(chain.keys):
            if key not in self._block_of:
                self._block_of[key], self._key_of[table[depth]] = table[depth], key
                self._evictor.publish(table[depth], depth, key)
        self._evictor.begin_chain()
        for block in reversed(table):
            if block in self._key_of:
                self._evictable.add(block)
                self._evictor.insert(block)
            else:
                self._free.append(block)
        return hits

    def _evict(self) -> int:
        block = self._evictor.pop()
        if block not in self._evictable:
            raise InvalidArgumentError(f"the policy pops {block}, must be an evictable block")
        self._evictable.remove(block)
        del self._block_of[self._key_of.pop(block)]
        return block
