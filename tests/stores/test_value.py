"""The value that shared stores keep under a key: damage anywhere is a miss, and the checksum is XXH3-128."""

import numpy as np
import pytest
from memory_stores import KeyedStore, get, names, put

from blockyard._core import checksum_rows
from blockyard.errors import InvalidArgumentError
from blockyard.stores.threaded import known_keys


@pytest.mark.parametrize("place", [0, 20, 24, 40, 70, 97, 120, 128, -1])
def test_a_damaged_value_is_a_miss_is_deleted_at_the_second_look_and_can_be_put_again(
    place: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(known_keys, "FAILED_SECONDS", -1.0)  # a key may be read again at once
    with KeyedStore() as store:
        put(store, 2)
        damaged = next(name for name, value in store.blocks.items() if value[64] == 1 and value.nbytes > 192)
        store.blocks[damaged][place] ^= 4
        for _ in range(2):
            assert damaged in store.blocks
            assert [bool(reason) for reason in get(store, 2)] == [True, False]
            assert store.contains(names(2)).tolist() == [False, True]
        if place in {20, 97}:  # without its magic bytes or length, it may be an answer that no storage gave
            assert damaged in store.blocks
        else:
            assert damaged not in store.blocks
            assert get(store, 2) == ("absent", "")
        put(store, 2)
        assert get(store, 2) == ("", "")


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (4, 1000)])
def test_checksums_are_xxh3_of_each_row(shape: tuple[int, int]):
    array = np.arange(shape[0] * shape[1], dtype=np.uint32).astype(np.uint8).reshape(shape)
    assert checksum_rows(array).shape == (shape[0], 16)
    assert np.array_equal(checksum_rows(array), checksum_rows(np.asfortranarray(array)))
    for bad in (array[0] if len(array) else array.ravel(), array.astype(np.int32), [[1]]):
        with pytest.raises(InvalidArgumentError, match="rows must be a uint8 array"):
            checksum_rows(bad)  # type: ignore[arg-type]


def test_the_checksum_is_that_of_the_specification():
    assert checksum_rows(np.zeros((1, 0), np.uint8)).tobytes()[::-1].hex() == "99aa06d3014798d86001c324468d497f"
