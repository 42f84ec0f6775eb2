"""Stop tokens of all live requests, checked by one lookup for all tokens of a step."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

__all__ = ["StopTokens"]


class StopTokens:
    """Counts the requests that stop at each token.

    Most requests use one of a few token sets, so whole sets are counted, and tokens once per set.
    """

    def __init__(self) -> None:
        self._requests: Counter[frozenset[int]] = Counter()
        self._sets: Counter[int] = Counter()
        self._stops = np.zeros(1, np.bool_)  # the last entry covers all larger tokens

    def __bool__(self) -> bool:
        return bool(self._sets)

    def add(self, wanted: frozenset[int]) -> None:
        """Add a request's stop tokens."""
        if wanted in self._requests:
            self._requests[wanted] += 1
            return
        if not wanted:
            return
        missing = max(wanted) + 2 - len(self._stops)
        if missing > 0:
            self._stops = np.concatenate((self._stops, np.zeros(missing, np.bool_)))
        self._requests[wanted] = 1
        self._sets.update(wanted)
        self._stops[list(wanted)] = True

    def remove(self, gone: frozenset[int]) -> None:
        """Remove a request's stop tokens."""
        if not gone:
            return
        left = self._requests[gone] - 1
        if left:
            self._requests[gone] = left
            return
        del self._requests[gone]
        for token in gone:
            self._sets[token] -= 1
            if not self._sets[token]:
                del self._sets[token]
                self._stops[token] = False

    def among(self, tokens: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the indices of tokens that are a stop token of some request."""
        if len(self._sets) == 1:  # a comparison is cheaper than a lookup
            (token,) = self._sets
            stops = tokens == token
        else:
            stops = self._stops.take(tokens, mode="clip")
        places: NDArray[np.int64] = stops.nonzero()[0]
        return places
