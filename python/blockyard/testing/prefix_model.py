"""Rules that every prefix cache must obey, whatever it evicts: `ReferencePrefixCache` and `EventReplay`.

The policy decides which blocks are cached. But hits must be computed tokens, counters must be the sums of the results,
and the events must say exactly which blocks can be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from blockyard._core import EventBatch
from blockyard.errors import InvariantError
from blockyard.layout.sizes import as_int
from blockyard.types import ManagerStats

__all__ = ["EventReplay", "ReferencePrefixCache"]

Extra: TypeAlias = tuple[int, int, bytes]
"""Start, length and digest of an input besides tokens, see `BlockManager.allocate`."""


@dataclass
class ReferencePrefixCache:
    """Tracks, by tokens, which prefixes a cache may find.

    Args:
        block_size: number of token slots in a block.

    Attributes:
        computed: tokens of each computed prefix of whole blocks, with its salt and the extras that begin in it.
        prompts: number of admitted prompts, without preempted ones; `blocks` and `tokens` are their sizes,
            `hit_blocks` and `hit_tokens` the parts found in the cache.

    Example:
        >>> from blockyard.testing import ReferencePrefixCache
        >>> cache = ReferencePrefixCache(block_size=2)
        >>> cache.publish([1, 2, 3, 4, 5])
        >>> cache.most([1, 2, 3, 4, 9]), cache.most([1, 2, 9]), cache.most([1, 2, 3, 4], salt=b"other tenant")
        (4, 2, 0)
    """

    block_size: int
    computed: set[tuple[bytes | None, tuple[int, ...], tuple[Extra, ...]]] = field(default_factory=set)
    prompts: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def publish(self, tokens: Sequence[int], *, salt: bytes | None = None, extras: Iterable[Extra] = ()) -> None:
        """Record that all of these tokens have been computed."""
        self.computed.update(self._prefixes(tokens, salt, extras))

    def most(self, tokens: Sequence[int], *, salt: bytes | None = None, extras: Iterable[Extra] = ()) -> int:
        """Return how many tokens at the start of a prompt may be found: whole blocks that were all computed."""
        found = takewhile(self.computed.__contains__, self._prefixes(tokens, salt, extras))
        return self.block_size * sum(1 for _ in found)

    def _prefixes(
        self, tokens: Sequence[int], salt: bytes | None, extras: Iterable[Extra]
    ) -> Iterator[tuple[bytes | None, tuple[int, ...], tuple[Extra, ...]]]:
        extras = sorted(extras)
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            yield salt, tuple(tokens[:end]), tuple(extra for extra in extras if extra[0] < end)

    def usable(self, cached: int, length: int) -> int:
        """Return how many of `cached` tokens a prompt may skip: its last token is always computed."""
        longest = max(0, as_int("length", length) - 1) // self.block_size * self.block_size
        return min(as_int("cached", cached), longest)

    def count(self, tokens: Sequence[int], hit: int) -> None:
        """Count an admitted prompt whose first `hit` tokens were found."""
        hit = as_int("hit", hit)
        self.prompts += 1
        self.blocks += len(tokens) // self.block_size
        self.hit_blocks += hit // self.block_size
        self.tokens += len(tokens)
        self.hit_tokens += hit

    def check(self, stats: ManagerStats) -> None:
        """Compare counters.

        Raises:
            InvariantError: the manager's counters differ.
        """
        blocks, tokens = stats.hit_blocks + stats.missed_blocks, stats.hit_tokens + stats.missed_tokens
        found = (stats.prompts, blocks, stats.hit_blocks, tokens, stats.hit_tokens)
        expected = (self.prompts, self.blocks, self.hit_blocks, self.tokens, self.hit_tokens)
        if found != expected:
            message = f"prompts, blocks, hit blocks, tokens, hit tokens: found {found}, expected {expected}"
            raise InvariantError(message)


class EventReplay:
    """Tracks which blocks can be found from the events alone, as a router in another process would.

    Attributes:
        blocks: key of each findable block.
        complete: whether no event that might still matter was missed.

    Example:
        >>> from blockyard import BlockManager, PrefixCaching
        >>> from blockyard.testing import EventReplay
        >>> caching = PrefixCaching(max_events=100)
        >>> manager = BlockManager(block_size=2, device_blocks=4, prefix_caching=caching)
        >>> sequence = manager.allocate([1, 2, 3, 4, 5])
        >>> _ = manager.complete(manager.take_decision().ticket)
        >>> manager.mark_computed(sequence)
        >>> replay = EventReplay()
        >>> replay.apply(manager.prefix.take_events())
        >>> sorted(replay.blocks)
        [0, 1]
    """

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.complete = True
        self._next = 0

    def apply(self, batch: EventBatch) -> None:
        """Apply events in order.

        Raises:
            InvariantError: numbers are missing or repeated, or an event contradicts earlier ones.
        """
        if batch.first != self._next + batch.dropped:
            message = f"events from {batch.first} on, {batch.dropped} dropped, the last batch ended before {self._next}"
            raise InvariantError(message)
        self._next = batch.first + len(batch)
        if batch.dropped:
            self.complete = False
            self.blocks.clear()
        for kind, block, key in zip(batch.kinds, batch.blocks, batch.keys, strict=True):
            self._follow(batch.KINDS[kind], int(block), key.tobytes())

    def _follow(self, kind: str, block: int, key: bytes) -> None:
        if kind == "cleared":
            self.blocks.clear()
            self.complete = True
        elif kind == "stored":
            known = key in self.blocks.values() or block in self.blocks
            if self.complete and known:
                raise InvariantError(f"block {block} is stored under {key.hex()}, which is known, or the block is")
            self.blocks[block] = key
        elif self.blocks.pop(block, None) != key and self.complete:
            raise InvariantError(f"block {block} is removed under {key.hex()}, which it was not stored under")
