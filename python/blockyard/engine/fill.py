"""Which parts of the host's blocks hold bytes, where a block of the host holds several of the device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from blockyard._core import FillMap
from blockyard.engine.mapping import Ids, unequal_pairs

__all__ = ["HostFill"]


class HostFill:
    """A bit for each part: set once bytes have landed there, unset when others are on their way, or none are.

    A part's id is `host block * per_block + offset`; that is what the copy engine calls a host block.

    Args:
        num_blocks: blocks of the host.
        per_block: parts of each, at least 1.

    Raises:
        InvalidArgumentError: a number is too small, or there are 2^32 parts or more.
    """

    def __init__(self, num_blocks: int, per_block: int) -> None:
        self._map = FillMap(num_blocks, per_block)
        self._landing: dict[Hashable, Ids] = {}  # parts that a transfer writes

    @property
    def per_block(self) -> int:
        """Parts of a host block."""
        return self._map.per_block

    def pairs(self, small: Ids, large: Ids, *, first: int, last: int, to: Literal["device", "host"]) -> Ids:
        """Pair device blocks with the parts of host blocks, for a swap out or a swap in.

        Args:
            small: device blocks in the order of the sequence, int64 `[n]`.
            large: host blocks, int64 `[m]`.
            first: offset in the first host block where the transfer begins, 0 to `per_block - 1`.
            last: offset in the last host block before which it ends, 1 to `per_block`.
            to: which side is written.

        Returns:
            `(from, to)`, int64 `[n, 2]`.

        Raises:
            MappingError: the stretch holds another number of parts than there are device blocks, or an offset or id is
                out of range.
        """
        side: Literal["small", "large"] = "large" if to == "host" else "small"
        return unequal_pairs(small, large, per_block=self.per_block, first=first, last=last, to=side)

    def count(self, blocks: Ids) -> NDArray[np.int64]:
        """Parts of each host block that hold bytes, int64 `[n]`. Raises MappingError for one that there is not."""
        return self._map.count(blocks)

    def clear(self, blocks: Ids) -> None:
        """Note that host blocks hold nothing, as before they are given out again; no transfer may still write there.

        Raises:
            MappingError: there is no such block; nothing was noted.
        """
        self._map.clear(blocks)

    def require(self, parts: Ids, after: Sequence[Hashable] = ()) -> None:
        """Refuse to read what holds no bytes.

        Args:
            parts: to be read, int64 `[n]`.
            after: transfers that will have ended before: what they write will be there.

        Raises:
            MappingError: a part holds no bytes; the message names part and block.
        """
        coming = [self._landing[transfer] for transfer in after if transfer in self._landing]
        self._map.require(parts[~np.isin(parts, np.concatenate(coming))] if coming else parts)

    def begin(self, transfer: Hashable, parts: Ids) -> None:
        """Note that a transfer writes parts: until that has landed, they hold nothing that could be read."""
        self._map.unmark(parts)
        self._landing[transfer] = parts

    def end(self, transfer: Hashable, *, landed: bool) -> None:
        """Note that a transfer has ended, and whether its bytes are there."""
        parts = self._landing.pop(transfer, None)
        if parts is None:  # an interrupt came before `begin`
            return
        for others in self._landing.values():
            parts = parts[~np.isin(parts, others)]  # written again: there when that has landed
        if landed:
            self._map.mark(parts)

    def mark(self, parts: Ids) -> None:
        """Note that parts hold bytes."""
        self._map.mark(parts)
