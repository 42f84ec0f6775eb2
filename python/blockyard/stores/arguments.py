"""Checks of arguments that stores have in common. Each raises before anything is submitted."""

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, MappingError
from blockyard.stores.base import Keys, Owners

__all__ = ["check_read_rows", "check_rows", "check_slots", "checked_keys", "owners_of_each"]


def describe_array(value: object) -> str:
    """Describe an argument for a message."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def check_read_rows(rows: object, shape: tuple[int, int]) -> None:
    """Check the rows of a read; None requests new rows."""
    if rows is None or not shape[0]:
        return
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape or not rows.flags.carray:
        wanted = f"uint8 {list(shape)}, C-contiguous and writable"
        raise InvalidArgumentError(f"rows is {describe_array(rows)}, must be {wanted}")


def check_rows(rows: object, shape: tuple[int, int], name: str = "rows") -> None:
    """Check that there is one row for each slot or key of a batch."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape:
        raise InvalidArgumentError(f"{name} is {describe_array(rows)}, must be uint8 {list(shape)}")


def check_slots(slots: NDArray[np.int64], num_slots: int, *, is_write: bool = False) -> None:
    """Check that slots are in range, and distinct in a write."""
    if not isinstance(slots, np.ndarray) or slots.dtype != np.int64 or slots.ndim != 1:
        raise InvalidArgumentError(f"slots is {describe_array(slots)}, must be int64 [n]")
    if len(slots) and (slots.min() < 0 or slots.max() >= num_slots):
        raise MappingError(f"slots has {slots.min()} to {slots.max()}, must be 0 to {num_slots - 1}")
    if is_write and len(slots) > 1 and len(np.unique(slots)) < len(slots):
        raise MappingError(f"slots has {len(slots) - len(np.unique(slots))} repeats, must have none in a write")


def checked_keys(keys: Keys) -> NDArray[np.uint8] | list[bytes]:
    """Check keys, and return them unchanged or as a list."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != 32:
            raise InvalidArgumentError(f"keys is {describe_array(keys)}, must be uint8 [n, 32] or 32 bytes each")
        return keys
    names = list(keys)
    if not all(isinstance(name, bytes) and len(name) == 32 for name in names):
        raise InvalidArgumentError(f"keys is {keys!r:.100}, must be uint8 [n, 32] or 32 bytes each")
    return names


def owners_of_each(owners: Owners, names: list[bytes], single: dict[bytes, int]) -> Owners:
    """Return the owners of each distinct name."""
    for name, found in zip(("tenants", "parents"), owners, strict=True):
        check_rows(found, (len(names), 32), f"owners.{name}")
    if len(single) == len(names):
        return Owners(owners.tenants.copy(), owners.parents.copy())
    places = {name: index for index, name in reversed(list(enumerate(names)))}
    first = [places[name] for name in single]
    return Owners(owners.tenants[first], owners.parents[first])
