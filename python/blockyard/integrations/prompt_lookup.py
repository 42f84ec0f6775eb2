"""Draft tokens without a second model: the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError

__all__ = ["prompt_lookup"]


def prompt_lookup(
    token_ids: NDArray[np.uint32], num_tokens: int, *, max_ngram: int = 3, min_ngram: int = 1
) -> NDArray[np.uint32]:
    """Guess the next tokens of a sequence from its own text.

    Args:
        token_ids: all tokens of the sequence so far, prompt first, uint32 `[tokens]`.
        num_tokens: maximum number of tokens to return.
        max_ngram: how many of the last tokens to search for first; then fewer, one by one.
        min_ngram: the fewest to search for, at least 1.

    Returns:
        The tokens after the first earlier occurrence, uint32 `[num_tokens or fewer]`; empty if there is none.

    Raises:
        InvalidArgumentError: `num_tokens` is negative, `min_ngram` is below 1, or `max_ngram` is below `min_ngram`.
    Source: prompt lookup decoding (Saxena, 2023); vLLM's n-gram proposer.

    Example:
        >>> import numpy as np
        >>> from blockyard.integrations.prompt_lookup import prompt_lookup
        >>> prompt_lookup(np.array([7, 1, 2, 3, 9, 1, 2], np.uint32), 2).tolist()
        [3, 9]
    """
    if num_tokens < 0 or not 1 <= min_ngram <= max_ngram:
        raise InvalidArgumentError(
            f"num_tokens is {num_tokens}, min_ngram {min_ngram}, max_ngram {max_ngram}; "
            f"must be at least 0, at least 1, and at least min_ngram"
        )
    length = len(token_ids)
    for size in range(min(max_ngram, length - 1), min_ngram - 1, -1):
        found = np.ones(length - size, np.bool_)
        for offset in range(size):
            found &= token_ids[offset : length - size + offset] == token_ids[length - size + offset]
        if found.any():
            behind = int(found.argmax()) + size
            return token_ids[behind : behind + num_tokens]
    return token_ids[:0]
