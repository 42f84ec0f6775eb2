"""Arguments of the public Python API: each integer in each of NumPy's types, each word of a set, each shape of ids.

`tests/core/test_hostile.py` does the same for the compiled module.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_values import as_numpy_ints, wrong_shapes
from public_calls import CALLS, uncovered

from blockyard.errors import BlockyardError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "buildsystem"))
MODULES = import_module("public_names").modules()
EACH = [(name, argument) for name, call in CALLS.items() for argument in call.arguments]


def outcome(name: str, argument: str, value: Any) -> tuple[str, str]:
    """What a call answers, or the kind of its error."""
    try:
        return "answer", repr(CALLS[name](argument, value))
    except Exception as error:  # noqa: BLE001 (compared)
        return type(error).__name__, str(error)


def only(kind: type) -> list[Any]:
    chosen = [each for each in EACH if isinstance(CALLS[each[0]].arguments[each[1]], kind)]
    return [pytest.param(*each, id=".".join(each)) for each in chosen]


@pytest.mark.parametrize(("name", "argument"), only(int))
def test_an_integer_of_numpy_is_the_int(name: str, argument: str):
    number = CALLS[name].arguments[argument]
    expected = outcome(name, argument, number)
    assert expected[0] == "answer", expected
    assert {repr(value): outcome(name, argument, value) for value in as_numpy_ints(number)} == {
        repr(value): expected for value in as_numpy_ints(number)
    }


@pytest.mark.parametrize(("name", "argument"), only(str))
def test_a_word_that_is_not_in_the_set_is_refused(name: str, argument: str):
    assert outcome(name, argument, CALLS[name].arguments[argument])[0] == "answer"
    with pytest.raises(BlockyardError, match="no such word"):
        CALLS[name](argument, "no such word")


@pytest.mark.parametrize(("name", "argument"), only(np.ndarray))
def test_ids_of_another_shape_are_refused(name: str, argument: str):
    array = CALLS[name].arguments[argument]
    assert outcome(name, argument, array)[0] == "answer"
    for wrong in wrong_shapes(array):
        with pytest.raises(BlockyardError):
            CALLS[name](argument, wrong)


def test_each_public_callable_has_a_call():
    assert sorted(set(uncovered(MODULES))) == []
