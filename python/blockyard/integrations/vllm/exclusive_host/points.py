"""Where a later request may go on: what its cache groups need there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from blockyard.integrations.vllm.exclusive_host.order import Recent

__all__ = ["Points"]


class Points:
    """The points where a later request may go on, with the keys of windows and states that end there.

    Of a group of windows or states, a request needs only what ends where it goes on. All other blocks of such a group
    would take room on the host that nothing finds.

    Args:
        groups: of vLLM's scheduler side, with one block a chunk.
        most: number of keys that are remembered.

    Attributes:
        windows: places of the groups of windows or states.
    """

    def __init__(self, groups: Sequence[Any], most: int) -> None:
        self._groups = groups
        self.windows = [place for place, group in enumerate(groups) if group.sliding_window_size_in_chunks is not None]
        self._sparse = {groups[place].group_idx for place in self.windows}
        self._states = {group.group_idx for group in groups if group.requires_cow_source}
        self._align = math.lcm(*(group.tokens_per_block for group in groups))
        self._keys = Recent(most)

    def add(self, states: Sequence[Any], tokens: int) -> int:
        """Note that a request may go on after `tokens` of another's, rounded down to whole blocks; return that."""
        end = tokens // self._align * self._align
        for place in self.windows:
            self._keys.add(self._tail(place, states, 0, end))
        return end

    def tails(self, states: Sequence[Any], end: int) -> list[OffloadKey]:
        """Return the keys of windows and states that a request needs at a number of tokens."""
        return [key for place in self.windows for key in self._tail(place, states, 0, end)]

    def keep(self, keys: Sequence[OffloadKey]) -> None:
        """Note that a request needs keys."""
        self._keys.add([key for key in keys if get_offload_group_idx(key) in self._sparse])

    def sort(self, keys: Iterable[OffloadKey]) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Return the keys that a request may need at a point, and the others."""
        if not self._sparse:
            return list(keys), []
        useful: list[OffloadKey] = []
        others: list[OffloadKey] = []
        for key in keys:
            is_useful = get_offload_group_idx(key) not in self._sparse or key in self._keys
            (useful if is_useful else others).append(key)
        return useful, others

    def states(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys of states."""
        return [key for key in keys if get_offload_group_idx(key) in self._states]

    def needed(self, states: Sequence[Any], begin: int, end: int) -> list[OffloadKey]:
        """Return the keys of each group that a request needs to go from one number of tokens to another."""
        return [key for place in range(len(self._groups)) for key in self._tail(place, states, begin, end)]

    def _tail(self, place: int, states: Sequence[Any], begin: int, end: int) -> list[OffloadKey]:
        group, size = self._groups[place], self._groups[place].tokens_per_block
        more = int(group.is_eagle_group)  # vLLM looks one block further there
        keys: list[OffloadKey] = states[place].offload_keys[begin // size : -(-end // size) + more]
        window = group.load_window_size_in_chunks(end)
        return keys if window is None else keys[-window - more :]

    def clear(self) -> None:
        """Forget all points."""
        self._keys.clear()
