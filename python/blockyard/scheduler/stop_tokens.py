"""Which tokens end some live request: one look-up for all tokens of a step."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

__all__ = ["StopTokens"]


class StopTokens:
    """Counts the requests that stop at each token.

    Most requests have one of a few sets of tokens, so sets are counted, and tokens only by set.
    """

    def __init__(self) -> None:
        self._requests: Counter[frozenset[int]] = Counter()
        self._sets: Counter[int] = Counter()
        self._stops = np.zeros(1, np.bool_)  # the last entry stands for all larger tokens

    def __bool__(self) -> bool:
        return bool(self._sets)

    def add(self, wanted: frozenset[int]) -> None:
        """Count a request's tokens."""
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
        """Count them off."""
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
        """Give the places of the tokens at which some request stops."""
        if len(self._sets) == 1:  # one comparison costs less than a look-up
            (token,) = self._sets
            stops = tokens == token
        else:
            stops = self._stops.take(tokens, mode="clip")
        places: NDArray[np.int64] = stops.nonzero()[0]
        return places
