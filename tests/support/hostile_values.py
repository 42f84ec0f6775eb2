"""Values that no argument can have, or that claim to be longer than memory."""

from __future__ import annotations

import collections.abc
from typing import Any

import numpy as np

from blockyard import _core


class Liar(collections.abc.Sequence):
    """Three items that claim to be a trillion."""

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: Any) -> Any:
        if index > 2:
            raise IndexError
        return 1


def long_view(dtype: type, *shape: int) -> np.ndarray:
    """An array of one number that is longer than memory."""
    return np.broadcast_to(np.zeros(1, dtype), shape)


NUMPY_INTS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


def as_numpy_ints(number: int) -> list[Any]:
    """Return a number in each of NumPy's integer types that holds it."""
    return [kind(number) for kind in NUMPY_INTS if np.iinfo(kind).min <= number <= np.iinfo(kind).max]


def wrong_shapes(array: np.ndarray) -> list[np.ndarray]:
    """Return arrays of the same numbers with more dimensions, with fewer, or as triples instead of pairs."""
    found = [array[None], array[..., None]]
    if array.ndim == 2:
        found += [array.reshape(-1), np.concatenate((array, array[:, :1]), axis=1), array[:, :1]]
    return found


INTS = [-1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 10**12, 2**70, -(2**70), 10**5000]
SEQUENCES: list[Any] = [
    *(
        _core.Sequence(2**64 - 1),
        range(10**12),
        range(2**70),
        Liar(),
        [0] * 10**6,
        [2**70],
        [-1],
        [[2**70, 0]],
        [None],
        (),
        "text",
        b"bytes",
        {},
    ),
    *(long_view(dtype, 2**40) for dtype in (np.uint64, np.uint32, np.int64, np.int32)),
    *(long_view(np.int64, 2**40, 2), long_view(np.int64, 2**33, 2), long_view(np.uint64, 2**40, 8)),
]
FLOATS = [float("nan"), float("inf"), -float("inf"), 1e300]
# For callables written in Python, which read no arguments in advance: all except values that Python handles itself.
SIMPLE: list[Any] = [*INTS[:-1], *FLOATS, None, *(item for item in SEQUENCES if not isinstance(item, np.ndarray))]
HOSTILE: list[Any] = [*INTS, *FLOATS, None, *SEQUENCES]
