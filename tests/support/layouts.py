"""Memory layouts of an array; each returns a new array with the same items."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def strided(array: Array) -> Array:
    return np.repeat(array, 2, axis=0)[::2]


def backwards(array: Array) -> Array:
    return np.ascontiguousarray(array[::-1])[::-1]


def fortran(array: Array) -> Array:
    return np.asfortranarray(array)


def unaligned(array: Array) -> Array:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def wide(array: Array) -> Array:
    return np.repeat(array, 3, axis=-1)[..., ::3]


def locked(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


def other_order(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder())


LAYOUTS = {form.__name__: form for form in (strided, backwards, fortran, unaligned, wide, locked, other_order)}
