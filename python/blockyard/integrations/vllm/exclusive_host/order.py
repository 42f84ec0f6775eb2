"""The order in which an exclusive host evicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

__all__ = ["HostOrder"]

_AGAIN_SHARE: Final = 0.8
"""Share of the chunks up to which keys found again outlive the others."""


class HostOrder:
    """The order in which host chunks are evicted: segmented LRU, and before it what the device has as well.

    Args:
        num_chunks: chunks of host memory.
        num_blocks: blocks of device memory.
    """

    def __init__(self, num_chunks: int, num_blocks: int) -> None:
        self._most_again = int(num_chunks * _AGAIN_SHARE)
        self._most_found = num_chunks + num_blocks
        self._copies: OrderedDict[bytes, None] = OrderedDict()
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._found: OrderedDict[bytes, None] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> None:
        """Note that a request found keys, on the device or the host; the first is remembered longest."""
        for key in reversed(keys):
            self._found[key] = None
            self._found.move_to_end(key)
        while len(self._found) > self._most_found:
            self._found.popitem(last=False)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Put keys that only the host holds from now on last; the last key is evicted last."""
        for key in keys:
            self.drop(key)
            (self._again if key in self._found else self._once)[key] = None

    def copy(self, keys: Iterable[bytes]) -> None:
        """Put keys that the device has as well first."""
        for key in keys:
            self.drop(key)
            self._copies[key] = None

    def drop(self, key: bytes) -> None:
        """Forget the place of a key."""
        for keys in (self._copies, self._once, self._again):
            keys.pop(key, None)

    def __iter__(self) -> Iterator[bytes]:
        """Return the keys, the first to be evicted first."""
        over = max(0, len(self._again) - self._most_again)
        return chain(self._copies, islice(self._again, over), self._once, islice(self._again, over, None))

    def clear(self) -> None:
        """Forget all keys."""
        for keys in (self._copies, self._once, self._again, self._found):
            keys.clear()
