"""What a store is given wrongly is refused by name, with what it was; that nothing is submitted, `StoreSuite` shows."""

from collections.abc import Callable

import numpy as np
import pytest

from blockyard.errors import InvalidArgumentError, MappingError
from blockyard.stores import Owners
from blockyard.stores.arguments import check_read_rows, check_rows, check_slots, checked_keys, owners_of_each

SHAPE = (2, 64)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_rows(np.zeros((3, 64), np.uint8), SHAPE), r"^rows is uint8 \[3, 64\], must be uint8 \[2, 64\]$"),
        (lambda: check_rows(np.zeros(SHAPE, np.int8), SHAPE, "owners.parents"), r"^owners.parents is int8 \[2, 64\]"),
        (lambda: check_rows([b""], SHAPE), "^rows is a list, must be uint8"),
        (lambda: check_read_rows(np.zeros((2, 128), np.uint8)[:, ::2], SHAPE), r"C-contiguous and writable$"),
        (lambda: check_slots(np.zeros(2, np.int32), 4), r"^slots is int32 \[2\], must be int64 \[n\]$"),
        (lambda: checked_keys(np.zeros((2, 31), np.uint8)), r"^keys is uint8 \[2, 31\], must be uint8 \[n, 32\]"),
        (lambda: checked_keys([bytes(31)]), r"^keys is \[b.*, must be uint8 \[n, 32\] or 32 bytes each$"),
    ],
)
def test_an_array_of_another_kind_is_refused(call: Callable[[], object], message: str):
    with pytest.raises(InvalidArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (slots(0, 4), "^slots has 0 to 4, must be 0 to 3$"),
        (slots(-1), "^slots has -1 to -1, must be 0 to 3$"),
        (slots(1, 2, 1), "^slots has 1 repeats, must have none in a write$"),
    ],
)
def test_slots_that_cannot_be_written_are_refused(given: np.ndarray, message: str):
    with pytest.raises(MappingError, match=message):
        check_slots(given, 4, is_write=True)


def test_a_read_may_repeat_slots_and_have_no_rows():
    check_slots(slots(1, 2, 1), 4)
    check_read_rows(None, SHAPE)


def test_of_a_key_that_repeats_its_first_owner_counts():
    tenants, parents = (np.arange(3 * 32, dtype=np.uint8).reshape(3, 32) + add for add in (0, 100))
    single = {b"a": 0, b"b": 1}
    found = owners_of_each(Owners(tenants, parents), [b"a", b"b", b"a"], single)
    assert np.array_equal(found.tenants, tenants[:2])
    assert np.array_equal(found.parents, parents[:2])
