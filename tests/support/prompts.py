"""Prompts admitted as arrays, for tests of handles and hits together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def allocate_prompts(
    manager: Any, prompts: Sequence[ArrayLike], **options: Any
) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Admit prompts; return handles, uint64 `[n]`, and numbers of cached tokens, uint32 `[n]`."""
    found = manager.allocate(*prompts, **options)
    sequences = found if isinstance(found, tuple) else (found,)
    cached = [sequence.cached_tokens for sequence in sequences]
    return np.array([int(sequence) for sequence in sequences], np.uint64), np.array(cached, np.uint32)
