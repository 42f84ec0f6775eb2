"""What `rust/copy` refuses of arrays and rows. What it copies is tested through the ops: test_ops.py."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from blockyard._core import BoundViews, Mapping
from blockyard.errors import InvalidArgumentError, MappingError

Pairs = NDArray[np.int64]


def between(src: list[np.ndarray], dst: list[np.ndarray], pairs: object, threads: int = 1) -> None:
    bound = BoundViews(src, dst)
    bound.run(Mapping(pairs, src_blocks=len(src[0]), dst_blocks=len(dst[0]), rule="swap"), num_threads=threads)


def within(arrays: list[np.ndarray], pairs: object, rule: str) -> None:
    bound = BoundViews(arrays)
    bound.run(Mapping(pairs, src_blocks=len(arrays[0]), dst_blocks=len(arrays[0]), rule=rule), num_threads=1)


CALLS: dict[str, Callable[[list[np.ndarray], Pairs], None]] = {
    "copy from": lambda arrays, pairs: between(arrays, [np.zeros((5, 8), np.uint8)], pairs),
    "copy to": lambda arrays, pairs: between([np.zeros((5, 8), np.uint8)], arrays, pairs),
    "copy": lambda arrays, pairs: within(arrays, pairs, "copy"),
    "exchange": lambda arrays, pairs: within(arrays, pairs, "exchange"),
    "move": lambda arrays, pairs: within(arrays, pairs, "move"),
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


@pytest.mark.parametrize("rule", ["swap", "copy", "move", "exchange"])
def test_a_mapping_of_more_blocks_than_the_views_have_is_refused(rule: str):
    array, other = rows(), np.zeros((5, 8), np.uint8)
    bound = BoundViews([array], [other]) if rule == "swap" else BoundViews([array])
    for pairs, last in (([[1, 2], [0, 5]], 5), ([[7, 2]], 7)):
        mapping = Mapping(pairs, src_blocks=9, dst_blocks=9, rule=rule)
        with pytest.raises(MappingError, match=f"up to block {last} does not fit caches of 5 blocks"):
            bound.run(mapping, num_threads=1)
    np.testing.assert_array_equal(array, rows())
    assert not other.any()


def test_a_mapping_runs_where_its_rule_says():
    array, other = rows(), np.zeros((5, 8), np.uint8)
    places = {"between": BoundViews([array], [other]), "within": BoundViews([array])}
    for place, rule in (("between", "move"), ("between", "exchange"), ("within", "swap")):
        mapping = Mapping([[0, 1]], src_blocks=5, dst_blocks=5, rule=rule)
        with pytest.raises(MappingError, match=f"cannot be run {place} caches"):
            places[place].run(mapping, num_threads=1)
    np.testing.assert_array_equal(array, rows())
    with pytest.raises(InvalidArgumentError, match="rule is 'any', must be 'swap', 'copy', 'move' or 'exchange'"):
        Mapping([[0, 1]], src_blocks=5, dst_blocks=5, rule="any")


def test_lists_that_do_not_fit_one_another_are_refused():
    array, other = rows(), np.zeros((5, 7), np.uint8)
    with pytest.raises(InvalidArgumentError, match="cannot copy 1 caches to 2"):
        between([array], [other, other], np.array([[0, 1]]))
    with pytest.raises(InvalidArgumentError, match="cannot copy rows of 8 bytes to rows of 7 bytes, in cache 0"):
        between([array], [other], np.array([[0, 1]]))
    assert not other.any()


def test_rows_apart_from_one_another_and_single_ones_are_taken_as_they_lie():
    memory = np.arange(60, dtype=np.uint8).reshape(5, 12)
    target = np.zeros((1, 8), np.uint8)
    between([memory[:, 2:10]], [as_strided(target, (1, 8), (-3, 1))], np.array([[4, 0]]), 2)
    np.testing.assert_array_equal(target[0], memory[4, 2:10])
    between([np.zeros((0, 8), np.uint8)], [target], np.zeros((0, 2), np.int64), 0)


def refused(error: type[Exception], match: str, call: Callable[[], None], *arrays: np.ndarray) -> None:
    before = [array.copy() for array in arrays]
    with pytest.raises(error, match=match):
        call()
    for array, bytes_before in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, bytes_before)


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
    refused(InvalidArgumentError, shared, lambda: between(others, [low, high], pairs), low, high)
    refused(InvalidArgumentError, shared, lambda: within([low, high], pairs, "exchange"), low, high)
    refused(InvalidArgumentError, shared, lambda: within([low, high], pairs, "move"), low, high)
    read = "cache 0 to read and cache 0 to write share memory"
    refused(InvalidArgumentError, read, lambda: between([low], [high], pairs), low, high)


def test_arrays_that_cannot_be_written_are_read_alone():
    array, other = rows(), np.zeros((5, 8), np.uint8)
    array.flags.writeable = False
    between([array], [other], np.array([[4, 0]]))
    np.testing.assert_array_equal(other[0], array[4])
    for name, call in CALLS.items():
        if name != "copy from":
            refused(InvalidArgumentError, "read-only", lambda call=call: call([array], np.array([[0, 1]])), array)


def test_halves_of_one_array_and_woven_rows_are_copied():
    array = rows()
    between([array[:2]], [array[2:]], np.array([[0, 2], [1, 0]]))
    np.testing.assert_array_equal(array[[4, 2]], rows()[[0, 1]])
    within([array[:, 4:], array[:, :4]], np.array([[3, 1]]), "exchange")
    np.testing.assert_array_equal(array[[1, 3]], rows()[[3, 1]])
