"""`StepTime`: how long an engine takes for one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepTime"]


class StepTime(Protocol):
    """Predicts the time of one step of an engine from its batch."""

    def seconds(self, prefill: Sequence[tuple[int, int]], decode_context: NDArray[np.int64]) -> float:
        """Return the seconds from the start of the step to its sampled tokens.

        Args:
            prefill: for each prompt chunk, its tokens already in the cache and the tokens computed in this step.
            decode_context: context length of each decoding row in tokens, the new token included, int64 `[rows]`.
        """
        ...
