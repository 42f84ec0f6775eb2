"""What a store of one's own has without overriding it: swap space, and errors that say what is missing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulated_device import SimulatedStore

from blockyard.errors import StoreError

KEYS = np.zeros((2, 32), np.uint8)
ROWS = np.zeros((2, 64), np.uint8)
CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "submit_put": (lambda store: store.submit_put(KEYS, ROWS), "no keys"),
    "submit_get": (lambda store: store.submit_get(KEYS), "no keys"),
    "submit_delete": (lambda store: store.submit_delete(KEYS), "no keys"),
    "contains": (lambda store: store.contains(KEYS), "no keys"),
    "forget": (lambda store: store.forget(), "no keys"),
    "set_quota": (lambda store: store.set_quota(bytes(32), 1), "quotas"),
    "quota": (lambda store: store.quota(bytes(32)), "quotas"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_store_of_slots_says_what_it_lacks(name: str):
    call, message = CALLS[name]
    with SimulatedStore(4, 64, seed=0) as store, pytest.raises(StoreError, match=message):
        call(store)


def test_a_store_of_slots_is_swap_space_without_limits():
    with SimulatedStore(4, 64, seed=0) as store:
        assert (store.uses, store.is_closed, store.max_blocks_in_flight) == (("swap",), False, None)
        assert store.lacks(KEYS).tolist() == [False, False], "no read is known to be a miss"
