"""Swap stores of models whose groups have blocks of their own bytes: a block takes one slot or more of its extent."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from late_store import LateStore
from paged_cache import MODELS, blocks_of, layout_of

from blockyard import KVCache
from blockyard.errors import InvalidArgumentError

URLS = ["file://{}?size=32MiB", "memory://swapped{}?size=8MiB"]


class NarrowStore(LateStore):
    """A store that takes few slots at once."""

    limit = 2

    @property
    def max_blocks_in_flight(self) -> int:
        return self.limit


def late(slots: int, size: int, kind: type[LateStore] = LateStore) -> LateStore:
    return kind(slots, size, Random(0))


def swapping(model: str, store: object, **options: object) -> KVCache:
    cache = KVCache(layout_of(MODELS[model]), device_bytes=60_000, swap_store=store, watermark=0.0, **options)
    for tensor in cache.engine.tensors:  # what a model would have computed
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    return cache


def move(cache: KVCache, sequence: int, *, to: str) -> list[int]:
    """Move a sequence between tiers; return the sequences that are lost."""
    (cache.manager.swap_in if to == "device" else cache.manager.swap_out)(sequence, to)
    with cache.step() as step:
        pass
    return [int(lost) for end in step.ended + cache.drain() for lost in end.lost]


def free_slots(cache: KVCache) -> list[int]:
    return [cache.manager.pool("external", number).num_free for number in range(cache.manager.num_page_classes)]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("model", MODELS)
def test_sequences_come_back_with_the_bytes_of_all_groups(model: str, url: str, tmp_path: Path) -> None:
    with swapping(model, url.format(tmp_path), host_bytes=60_000) as cache:
        manager, free = cache.manager, free_slots(cache)
        sequences = [manager.allocate(10 + 3 * number) for number in range(6)]
        with cache.step():
            pass
        before = [blocks_of(cache, sequence) for sequence in sequences]
        for number, sequence in enumerate(sequences):
            if number % 2:
                assert move(cache, sequence, to="host") == []
            assert move(cache, sequence, to="external") == []
            manager.check()
        assert cache.swap_store is not None
        assert cache.swap_store.stats().written_blocks >= sum(map(len, before))
        for tensor in cache.engine.tensors:
            tensor.zero_()
        for sequence, wanted in zip(reversed(sequences), reversed(before), strict=True):
            assert move(cache, sequence, to="device") == []
            assert blocks_of(cache, sequence) == wanted
            manager.check()
        manager.free(sequences)
        assert free_slots(cache) == free


def test_a_sequence_is_lost_with_any_slot_of_its_blocks() -> None:
    layout = layout_of(MODELS["state"])
    slots = -(-1200 // layout.bytes_per_value)
    assert slots > 3
    for broken in (0, slots - 1):
        store = late(600, layout.bytes_per_value)
        with swapping("state", store) as cache:
            sequence, other = cache.manager.allocate(9), cache.manager.allocate(9)
            with cache.step():
                pass
            before = blocks_of(cache, other)
            assert move(cache, sequence, to="external") == []
            written = sorted(slot for slot in range(600) if store.slot(slot) is not None)
            assert move(cache, other, to="external") == []
            # The longest run of neighbours is the state.
            runs = np.split(written, np.flatnonzero(np.diff(written) > 1) + 1)
            state = max(runs, key=len)
            assert len(state) == slots
            del store._swap[int(state[broken])]
            assert move(cache, sequence, to="device") == [int(sequence)]
            assert move(cache, other, to="device") == []
            assert blocks_of(cache, other) == before
            cache.manager.free([sequence, other])
            cache.manager.check()


def test_a_store_without_room_for_two_extents_or_for_a_block_in_flight_is_refused() -> None:
    layout = layout_of(MODELS["state"])
    with pytest.raises(InvalidArgumentError, match=rf"swap_store has 1 slots of {layout.bytes_per_value} bytes, must"):
        swapping("state", late(1, layout.bytes_per_value))
    with pytest.raises(InvalidArgumentError, match=r"swap_store has blocks of 64 bytes, must have"):
        swapping("state", late(600, 64))
    narrow = late(600, layout.bytes_per_value, NarrowStore)
    with pytest.raises(InvalidArgumentError, match=r"store can have 2 values of \d+ bytes in flight, must be at least"):
        swapping("state", narrow)
    narrow.limit = 600  # type: ignore[attr-defined]
    with swapping("state", narrow):  # the failed cache has let go of it
        pass


def test_external_blocks_limits_the_slots_that_classes_use() -> None:
    layout = layout_of(MODELS["state"])
    with (
        swapping("state", late(6000, layout.bytes_per_value)) as whole,
        swapping("state", late(6000, layout.bytes_per_value), external_blocks=3000) as half,
    ):
        found = [cache.manager.pool("external", 1).num_blocks for cache in (whole, half)]
        assert 0 < found[1] <= found[0] / 2
