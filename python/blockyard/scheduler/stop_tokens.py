"""Which tokens end some live request: one look-up for all tokens of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError

__all__ = ["StopTokens"]

LARGEST = 1 << 24


class StopTokens:
    """Counts the requests that stop at each token."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._stops = np.zeros(1, np.bool_)  # the last entry stands for all larger tokens

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, tokens: Iterable[int]) -> None:
        """Count a request's tokens.

        Raises:
            InvalidArgumentError: a token is out of range; nothing was changed.
        """
        wanted = tuple(tokens)
        if not wanted:
            return
        if min(wanted) < 0 or max(wanted) >= LARGEST:
            raise InvalidArgumentError(
                f"stop_token_ids go from {min(wanted)} to {max(wanted)}, must be from 0 to {LARGEST - 1}"
            )
        missing = max(wanted) + 2 - len(self._stops)
        if missing > 0:
            self._stops = np.concatenate((self._stops, np.zeros(missing, np.bool_)))
        self._counts.update(wanted)
        self._stops[list(wanted)] = True

    def remove(self, tokens: Iterable[int]) -> None:
        """Count them off."""
        for token in tokens:
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
                self._stops[token] = False

    def among(self, tokens: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Give the places of the tokens at which some request stops."""
        places: NDArray[np.int64] = self._stops.take(tokens, mode="clip").nonzero()[0]
        return places
