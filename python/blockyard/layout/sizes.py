"""Checks of sizes, for layouts and everything above them."""

from __future__ import annotations

from numbers import Real
from operator import index

from blockyard.errors import BlockyardError, InvalidArgumentError

__all__ = ["as_float", "as_int", "set_ints"]


def as_int(name: str, value: object, error: type[BlockyardError] = InvalidArgumentError) -> int:
    """Return an argument as an int. NumPy's integers are ints too; a float never is, not even `4096 / 32`.

    Args:
        name: name of the argument.
        value: what was given.
        error: what to raise.

    Raises:
        BlockyardError: the value is not an integer.
    """
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise error(f"{name} is {value!r:.100}, must be an int") from None


def as_float(name: str, value: object) -> float:
    """Return an argument as a float. Integers and NumPy's numbers are numbers too; text and bools are not.

    Args:
        name: name of the argument.
        value: what was given.

    Raises:
        InvalidArgumentError: the value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidArgumentError(f"{name} is {value!r:.100}, must be a number")
    return float(value)


def set_ints(fields: object, *names: str) -> None:
    """Turn fields of a frozen dataclass into ints, except those that are None; for its `__post_init__`.

    Raises:
        InvalidArgumentError: one is not an integer.
    """
    for name in names:
        if (value := getattr(fields, name)) is not None:
            object.__setattr__(fields, name, as_int(name, value))
