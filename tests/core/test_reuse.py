from __future__ import annotations

import numpy as np
import pytest

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError


def new_manager(order: str, host: int = 0) -> BlockManager:
    return BlockManager(block_size=4, device_blocks=6, host_blocks=host, watermark=0.0, reuse_order=order)


def one_block_each(manager: BlockManager, count: int) -> list[int]:
    return [int(handle) for handle in manager.allocate(counts=np.full(count, 4, dtype=np.uint32))]


def ids(manager: BlockManager, limit: int | None = None) -> list[int]:
    return manager.pool("device").free_ids(limit).tolist()


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("lowest", [0, 2, 3, 4, 5]),
        ("fifo", [4, 5, 3, 0, 2]),
        ("lru", [4, 5, 3, 0, 2]),
    ],
)
def test_free_blocks_are_listed_in_the_order_in_which_they_are_taken(order: str, wanted: list[int]) -> None:
    manager = new_manager(order)
    handles = one_block_each(manager, 4)
    for i in (3, 0, 2):
        manager.free(handles[i])
    assert ids(manager) == list(iter(manager.pool())) == wanted
    assert ids(manager, 2) == wanted[:2]
    assert ids(manager, 0) == []
    assert [int(manager.block_table(handle)[0]) for handle in one_block_each(manager, 5)] == wanted
    assert ids(manager) == []
    manager.check()


@pytest.mark.parametrize("order", ["lowest", "fifo", "lru"])
def test_listing_takes_nothing(order: str) -> None:
    manager = new_manager(order)
    assert ids(manager) == ids(manager) == [0, 1, 2, 3, 4, 5]
    assert manager.pool().free_ids().dtype == np.int32
    assert manager.pool().num_free == 6
    assert len(manager.pool("host").free_ids()) == 0
    assert list(iter(manager.pool("host"))) == []
    assert next(iter(manager.pool())) == 0
    with pytest.raises(InvalidArgumentError):
        iter(manager.pool("tape"))  # type: ignore[arg-type]


def test_a_transfer_delays_a_block_in_fifo_order_and_not_in_lru_order() -> None:
    last = {}
    for order in ("fifo", "lru"):
        manager = new_manager(order, host=6)
        handles = one_block_each(manager, 6)
        manager.complete(manager.take_decision().ticket)
        manager.swap_out(handles[:1])
        ticket = manager.take_decision().ticket
        manager.free(handles[1:3])
        manager.complete(ticket)
        manager.check()
        last[order] = ids(manager)
    assert last == {"fifo": [1, 2, 0], "lru": [0, 1, 2]}
