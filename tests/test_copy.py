"""What `rust/copy` refuses of arrays and rows. What it copies is tested through the ops: test_ops.py, test_host.py."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from blockyard._core import copy_rows, exchange_rows, move_rows
from blockyard.errors import InvalidArgumentError, MappingError

Pairs = NDArray[np.int64]
CALLS: dict[str, Callable[[list[np.ndarray], Pairs], None]] = {
    "copy from": lambda arrays, pairs: copy_rows(arrays, [np.zeros_like(arrays[0])], pairs, num_threads=1),
    "copy to": lambda arrays, pairs: copy_rows([np.zeros_like(arrays[0])], arrays, pairs, num_threads=1),
    "exchange": lambda arrays, pairs: exchange_rows(arrays, pairs, num_threads=1),
    "move": lambda arrays, pairs: move_rows(arrays, pairs, num_threads=1),
}


def rows() -> NDArray[np.uint8]:
    return np.arange(40, dtype=np.uint8).reshape(5, 8)


BAD = {
    "int8": rows().view(np.int8),
    "one dimension": rows()[0],
    "three dimensions": rows()[None],
    "columns apart": rows()[:, ::2],
    "columns backwards": rows()[:, ::-1],
    "rows backwards": rows()[::-1],
    "rows that overlap": as_strided(rows(), (5, 8), (4, 1)),
    "one row often": np.broadcast_to(rows()[0], (5, 8)),
    "no array": rows().tolist(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("array", BAD)
def test_an_array_of_another_form_is_refused(call: str, array: str):
    before = np.array(BAD[array])
    with pytest.raises(InvalidArgumentError, match=r"\[0\] is .*, must be uint8 \[rows, bytes\], rows contiguous"):
        CALLS[call]([BAD[array]], np.array([[0, 1]]))
    np.testing.assert_array_equal(BAD[array], before)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pair", [[5, 0], [0, 5], [-1, 0], [0, -1], [2**32, 0], [0, 2**40]])
def test_a_row_that_does_not_exist_is_refused(call: str, pair: list[int]):
    array = rows()
    with pytest.raises(MappingError, match=rf"pair 1 names (row|block) ({max(pair)}|-1)"):
        CALLS[call]([array], np.array([[1, 2], pair]))
    np.testing.assert_array_equal(array, rows())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pairs", [[0, 1], [[0, 1, 2]], [[0.0, 1.0]]])
def test_pairs_of_another_form_are_refused(call: str, pairs: list[object]):
    array = rows()
    with pytest.raises(MappingError, match=r"must be .*\[n, 2\]"):
        CALLS[call]([array], np.array(pairs))
    np.testing.assert_array_equal(array, rows())


def test_lists_that_do_not_fit_one_another_are_refused():
    array, other = rows(), np.zeros((5, 7), np.uint8)
    with pytest.raises(InvalidArgumentError, match="1 caches are to be copied to 2"):
        copy_rows([array], [other, other], np.array([[0, 1]]), num_threads=1)
    with pytest.raises(InvalidArgumentError, match="rows of 8 bytes are to be copied to rows of 7, in cache 0"):
        copy_rows([array], [other], np.array([[0, 1]]), num_threads=1)
    assert not other.any()


def test_rows_apart_from_one_another_and_single_ones_are_taken_as_they_lie():
    memory = np.arange(60, dtype=np.uint8).reshape(5, 12)
    target = np.zeros((1, 8), np.uint8)
    copy_rows([memory[:, 2:10]], [as_strided(target, (1, 8), (-3, 1))], np.array([[4, 0]]), num_threads=2)
    np.testing.assert_array_equal(target[0], memory[4, 2:10])
    copy_rows([np.zeros((0, 8), np.uint8)], [target], np.zeros((0, 2), np.int64), num_threads=0)


def refused(error: type[Exception], match: str, call: Callable[[], None], *arrays: np.ndarray) -> None:
    before = [array.copy() for array in arrays]
    with pytest.raises(error, match=match):
        call()
    for array, bytes_before in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, bytes_before)


def test_a_row_that_is_written_twice_or_read_and_written_is_refused():
    array, other = rows(), np.zeros((5, 8), np.uint8)
    pairs = np.array([[0, 1], [2, 1]])
    twice = "row 1 is written twice, by pairs 0 and 1"
    refused(MappingError, twice, lambda: copy_rows([array], [other], pairs, num_threads=1), other)
    refused(MappingError, twice, lambda: move_rows([array], pairs, num_threads=1), array)
    refused(MappingError, twice, lambda: exchange_rows([array], pairs, num_threads=1), array)
    chain = np.array([[0, 1], [1, 2]])
    both = "pair 1 reads row 1, which is written too"
    refused(MappingError, both, lambda: copy_rows([array], [array], chain, num_threads=1), array)


@pytest.mark.parametrize("owner", ["one", "two"])
def test_arrays_that_share_memory_are_refused(owner: str):
    memory = bytearray(range(48))
    views = [np.frombuffer(memory, np.uint8)] * 2
    if owner == "two":
        views[1] = np.frombuffer(memory, np.uint8)
    low, high = views[0][:40].reshape(5, 8), views[1][4:44].reshape(5, 8)
    pairs = np.array([[0, 1]])
    shared = "caches 0 and 1 share memory"
    others = [rows(), rows()]
    refused(InvalidArgumentError, shared, lambda: copy_rows(others, [low, high], pairs, num_threads=1), low, high)
    refused(InvalidArgumentError, shared, lambda: exchange_rows([low, high], pairs, num_threads=1), low, high)
    refused(InvalidArgumentError, shared, lambda: move_rows([low, high], pairs, num_threads=1), low, high)
    read = "cache 0 to read and cache 0 to write share memory"
    refused(InvalidArgumentError, read, lambda: copy_rows([low], [high], pairs, num_threads=1), low, high)


def test_arrays_that_cannot_be_written_are_read_alone():
    array, other = rows(), np.zeros((5, 8), np.uint8)
    array.flags.writeable = False
    copy_rows([array], [other], np.array([[4, 0]]), num_threads=1)
    np.testing.assert_array_equal(other[0], array[4])
    for name, call in CALLS.items():
        if name != "copy from":
            refused(InvalidArgumentError, "read-only", lambda call=call: call([array], np.array([[0, 1]])), array)


def test_halves_of_one_array_and_woven_rows_are_copied():
    array = rows()
    copy_rows([array[:2]], [array[2:]], np.array([[0, 2], [1, 0]]), num_threads=1)
    np.testing.assert_array_equal(array[[4, 2]], rows()[[0, 1]])
    exchange_rows([array[:, 4:], array[:, :4]], np.array([[3, 1]]), num_threads=1)
    np.testing.assert_array_equal(array[[1, 3]], rows()[[3, 1]])
