"""Fixed eviction policies to compare `adaptive` with: LFU, ARC and S3-FIFO, over prompts.

As in the core, no block goes before one that needs it: each block of a prompt counts at least as many hits as those
behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from policies.evictor import Evictor


class _Counted(Evictor):
    """Evictable blocks in queues by their hits, each with the time when it came; the last queue takes all above.

    Args:
        queues: how many.
        most_hits: hits beyond these are not counted.
    """

    def __init__(self, queues: int, most_hits: int) -> None:
        self._queues = [OrderedDict[int, int]() for _ in range(queues)]
        self._hits: dict[int, int] = {}
        self._most_hits, self._time, self._floor = most_hits, 0, 0

    def begin_chain(self) -> None:
        """Begin again with the hits of the blocks behind."""
        self._floor = 0

    def publish(self, block: int, _depth: int, _key: int) -> None:
        """Count from 0."""
        self._hits[block] = 0

    def insert(self, block: int) -> None:
        """Put the block last in the queue of its hits."""
        self._floor = self._hits[block] = max(self._hits[block], self._floor)
        self._push(block)

    def remove(self, block: int) -> None:
        """Take the block out, and count the hit."""
        del self._queue_of(block)[block]
        self._hits[block] = min(self._hits[block] + 1, self._most_hits)

    def _push(self, block: int) -> None:
        self._time += 1
        self._queue_of(block)[block] = self._time

    def _queue_of(self, block: int) -> OrderedDict[int, int]:
        return self._queues[min(self._hits[block], len(self._queues) - 1)]

    def _oldest(self) -> int:
        """Return which of two queues has the oldest block."""
        first, second = (next(iter(queue.values()), self._time + 1) for queue in self._queues)
        return int(second < first)


class Lfu(_Counted):
    """The least frequently used block goes first, of those the least recently used."""

    def __init__(self) -> None:
        super().__init__(queues=16, most_hits=15)

    def pop(self) -> int:
        """Take the first block out of the first queue that has any."""
        return next(queue for queue in self._queues if queue).popitem(last=False)[0]


class _Ghosts:
    """Keys of evicted blocks. Each has one place, and goes when another key takes it."""

    def __init__(self, places: int) -> None:
        self._keys = [-1] * places

    def add(self, key: int) -> bool:
        """Remember a key; return whether its place was empty."""
        place = self._place(key)
        was, self._keys[place] = self._keys[place], key
        return was < 0

    def take(self, key: int) -> bool:
        """Forget a key; return whether it was there."""
        place = self._place(key)
        was_there = self._keys[place] == key
        if was_there:
            self._keys[place] = -1
        return was_there

    def _place(self, key: int) -> int:
        return hash((key,)) % len(self._keys)  # the hash of an int is itself


class Arc(_Counted):
    """ARC: blocks used once and blocks used again, in shares that follow what is missed.

    Source: Megiddo and Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003.

    Args:
        blocks: of the pool.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(queues=2, most_hits=1)
        self._blocks, self._target = blocks, 0
        self._ghosts, self._remembered = (_Ghosts(blocks), _Ghosts(blocks)), [0, 0]
        self._keys: dict[int, int] = {}

    def publish(self, block: int, _depth: int, key: int) -> None:
        """Move the target in favour of the queue that let the key go, if one of them did."""
        self._keys[block], self._hits[block] = key, 0
        for queue, ghosts in enumerate(self._ghosts):
            if ghosts.take(key):
                step = max(self._remembered[1 - queue] // self._remembered[queue], 1)
                self._remembered[queue] -= 1
                self._target = max(0, min(self._target + (-step if queue else step), self._blocks))
                self._hits[block] = 1
                return

    def pop(self) -> int:
        """Take out a block that was used once while there are more of these than the target, else the oldest."""
        queue = 0 if len(self._queues[0]) > self._target else self._oldest()
        block, _ = self._queues[queue].popitem(last=False)
        self._remembered[queue] += self._ghosts[queue].add(self._keys[block])
        return block


class S3Fifo(_Counted):
    """S3-FIFO: blocks without hits pass through a small queue, the others get second chances in the main one.

    Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.

    Args:
        blocks: of the pool.
        small: percent of the pool that the small queue keeps.
        ghosts: pools whose blocks are known again once they have gone.
    """

    def __init__(self, blocks: int, small: int, ghosts: int) -> None:
        super().__init__(queues=2, most_hits=3)
        self._small, self._ghosts = blocks * small // 100, _Ghosts(blocks * ghosts)
        self._keys: dict[int, int] = {}

    def publish(self, block: int, _depth: int, key: int) -> None:
        """Count a hit if the small queue has let the key go."""
        self._keys[block], self._hits[block] = key, int(self._ghosts.take(key))

    def pop(self) -> int:
        """Take out the first block of the small queue if it is too long or has the oldest, else one of the main."""
        small, main = self._queues
        while len(small) <= self._small and self._oldest():
            block, _ = main.popitem(last=False)
            self._hits[block] -= 1
            if not self._hits[block]:
                return block
            self._push(block)
        block, _ = small.popitem(last=False)
        self._ghosts.add(self._keys[block])
        return block


SETTINGS = {f"s3fifo:{small}:{ghosts}": (small, ghosts) for small in (5, 10, 20, 30, 50, 70, 90) for ghosts in (1, 4)}
"""By name, what `S3Fifo` takes besides the pool's blocks."""


def _s3fifo(small: int, ghosts: int) -> Callable[[int], Evictor]:
    return lambda blocks: S3Fifo(blocks, small, ghosts)


POLICIES: dict[str, Callable[[int], Evictor]] = {
    "arc": Arc,
    "lfu": lambda _: Lfu(),
    **{name: _s3fifo(*setting) for name, setting in SETTINGS.items()},
}
"""By name, what makes a policy for a pool of a number of blocks."""
