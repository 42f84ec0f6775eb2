"""The order in which an exclusive host evicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

__all__ = ["HostOrder", "Recent"]

_AGAIN_SHARE: Final = 0.8
"""Share of the chunks up to which keys found again outlive the others."""


class Recent:
    """The keys that were added last.

    Args:
        most: number of keys.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: Sequence[bytes]) -> None:
        """Remember keys, the first one longest."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def clear(self) -> None:
        """Forget all keys."""
        self._keys.clear()


class HostOrder:
    """The order in which host chunks are evicted: segmented LRU, and before it what the device has as well.

    Args:
        num_chunks: chunks of host memory.
        num_keys: keys that were found last and are remembered.
        chunks_of: returns how many chunks a key takes.
    """

    def __init__(self, num_chunks: int, num_keys: int, chunks_of: Callable[[Any], int]) -> None:
        self._most_again, self._chunks_of = int(num_chunks * _AGAIN_SHARE), chunks_of
        self._num_again = 0  # chunks
        self._copies: OrderedDict[bytes, None] = OrderedDict()
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._found = Recent(num_keys)

    def find(self, keys: Sequence[bytes]) -> None:
        """Note that a request found keys, on the device or the host; the first is remembered longest."""
        self._found.add(keys)

    def hold(self, keys: Iterable[bytes]) -> None:
        """Put keys that only the host holds from now on last; the last key is evicted last."""
        for key in keys:
            self.drop(key)
            if key in self._found:
                self._again[key] = None
                self._num_again += self._chunks_of(key)
            else:
                self._once[key] = None

    def copy(self, keys: Iterable[bytes]) -> None:
        """Put keys that the device has as well first."""
        for key in keys:
            self.drop(key)
            self._copies[key] = None

    def drop(self, key: bytes) -> None:
        """Forget the place of a key."""
        self._copies.pop(key, None)
        self._once.pop(key, None)
        if key in self._again:
            del self._again[key]
            self._num_again -= self._chunks_of(key)

    def __iter__(self) -> Iterator[bytes]:
        """Return the keys, the first to be evicted first."""
        yield from self._copies
        over, count = self._num_again - self._most_again, 0
        for key in self._again:
            if over <= 0:
                break
            over, count = over - self._chunks_of(key), count + 1
            yield key
        yield from self._once
        yield from islice(self._again, count, None)

    def clear(self) -> None:
        """Forget all keys."""
        for keys in (self._copies, self._once, self._again, self._found):
            keys.clear()
        self._num_again = 0
