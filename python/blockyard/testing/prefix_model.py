"""What must hold of any prefix cache, whatever it evicts: `ReferencePrefixCache` and `EventReplay`.

Which blocks are cached is a policy's choice. But a hit must be of tokens that were computed, the counters must be the
sums of the answers, and who follows the events must know exactly what can be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockyard._core import EventBatch, ManagerStats
from blockyard.errors import InvariantError

__all__ = ["EventReplay", "ReferencePrefixCache"]


@dataclass
class ReferencePrefixCache:
    """Which prefixes a cache may find, by their tokens.

    Args:
        block_size: token slots in a block.

    Attributes:
        computed: tokens of each prefix of whole blocks that some sequence has computed, with the salt it ran under.
        prompts: prompts that were admitted; `blocks` and `tokens` of them, `hit_blocks` and `hit_tokens` were found.

    Example:
        >>> from blockyard.testing import ReferencePrefixCache
        >>> cache = ReferencePrefixCache(block_size=2)
        >>> cache.publish([1, 2, 3, 4, 5])
        >>> cache.most([1, 2, 3, 4, 9]), cache.most([1, 2, 9]), cache.most([1, 2, 3, 4], salt=b"other tenant")
        (4, 2, 0)
    """

    block_size: int
    computed: set[tuple[bytes | None, tuple[int, ...]]] = field(default_factory=set)
    prompts: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def publish(self, tokens: Sequence[int], *, salt: bytes | None = None) -> None:
        """Note that all of these tokens are computed."""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            self.computed.add((salt, tuple(tokens[:end])))

    def most(self, tokens: Sequence[int], *, salt: bytes | None = None) -> int:
        """Tokens at the start of a prompt that may be found: whole blocks, all of which were computed."""
        found = 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            if (salt, tuple(tokens[:end])) not in self.computed:
                break
            found = end
        return found

    def usable(self, cached: int, length: int) -> int:
        """Tokens of `cached` ones that a prompt of some length may skip: its last token is always computed."""
        return min(cached, max(0, length - 1) // self.block_size * self.block_size)

    def count(self, tokens: Sequence[int], hit: int) -> None:
        """Count an admitted prompt, of which the first `hit` tokens were found."""
        self.prompts += 1
        self.blocks += len(tokens) // self.block_size
        self.hit_blocks += hit // self.block_size
        self.tokens += len(tokens)
        self.hit_tokens += hit

    def check(self, stats: ManagerStats) -> None:
        """Compare counters.

        Raises:
            InvariantError: the manager counts otherwise.
        """
        blocks, tokens = stats.hit_blocks + stats.missed_blocks, stats.hit_tokens + stats.missed_tokens
        found = (stats.prompts, blocks, stats.hit_blocks, tokens, stats.hit_tokens)
        expected = (self.prompts, self.blocks, self.hit_blocks, self.tokens, self.hit_tokens)
        if found != expected:
            message = f"prompts, blocks, hit blocks, tokens, hit tokens: found {found}, expected {expected}"
            raise InvariantError(message)


class EventReplay:
    """What can be found, by the events alone, as a router of another process would know it.

    Attributes:
        blocks: key of each block that can be found.
        complete: whether no event was missed that might still matter.

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
        """Follow events, in their order.

        Raises:
            InvariantError: numbers are missing or used twice, or an event contradicts those before it.
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
