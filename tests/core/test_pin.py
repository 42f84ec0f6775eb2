"""Pins: cached blocks that a reader outside keeps."""

from __future__ import annotations

import pytest
from managers import make_manager, step
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import (
    InvalidArgumentError,
    OutOfBlocksError,
    UnknownTicketError,
)

SIZE = 4
PROMPT = list(range(100, 113))


def new_manager(device: int = 8, **options: float) -> BlockManager:
    return make_manager(block_size=SIZE, device_blocks=device, host_blocks=8, watermark=0.0, **options)


def run(manager: BlockManager, tokens: list[int] = PROMPT) -> int:
    handles, _ = allocate_prompts(manager, [tokens])
    step(manager)
    manager.mark_computed(handles)
    return int(handles[0])


def test_pinned_blocks_are_not_evicted_until_they_are_unpinned() -> None:
    manager = new_manager(device=8)
    handle = run(manager)
    pin = manager.pins.pin(handle)
    assert manager.pins.blocks(pin).tolist() == manager.block_table(handle)[:3].tolist()
    manager.free([handle])
    assert manager.pool().num_free == 5
    assert manager.stats().pinned_blocks["device"] == 3
    with pytest.raises(OutOfBlocksError):
        manager.allocate(counts=[6 * SIZE])
    manager.free(manager.allocate(counts=[5 * SIZE]))
    step(manager)
    assert manager.prefix.lookup(PROMPT).tokens == 12
    manager.pins.unpin(pin)
    manager.check()
    assert manager.pool().num_free == 8
    with pytest.raises(UnknownTicketError, match=f"pin {pin} is not held"):
        manager.pins.unpin(pin)


def test_a_prompts_cached_blocks_can_be_pinned_without_a_sequence() -> None:
    manager = new_manager()
    manager.free([run(manager)])
    pin, cached = manager.pins.pin_prompt(PROMPT)
    assert cached == 12
    assert len(manager.pins.blocks(pin)) == 3
    assert manager.pins.pin_prompt([1, 2, 3, 4, 5])[1] == 0
    manager.check()


def test_pins_never_hold_more_than_their_fraction() -> None:
    manager = new_manager(device=8, max_pinned=0.4)
    one, other = run(manager), run(manager, list(range(200, 209)))
    manager.pins.pin(one)
    manager.pins.pin(one)
    with pytest.raises(OutOfBlocksError, match="asked to pin 2 more device blocks, 3 are pinned, pins may hold 3"):
        manager.pins.pin(other)
    with pytest.raises(InvalidArgumentError, match="max_pinned is 1, must be"):
        new_manager(max_pinned=1.0)


def test_a_block_that_two_readers_keep_is_kept_until_both_are_done() -> None:
    manager = new_manager()
    handle = run(manager)
    one, other = manager.pins.pin(handle), manager.pins.pin(handle)
    manager.free([handle])
    manager.pins.unpin(one)
    with pytest.raises(UnknownTicketError):
        manager.pins.blocks(one)
    assert manager.pool().num_free == 5
    manager.pins.unpin(other)
    assert manager.pool().num_free == 8
    manager.check()


def test_pins_are_numbered_on_and_none_fit_where_none_may_be() -> None:
    manager = new_manager()
    pin = manager.pins.pin(run(manager))
    manager.pins.unpin(pin)
    assert manager.pins.pin(run(manager)) == pin + 1
    manager = new_manager(max_pinned=0.0)
    handle = run(manager)
    with pytest.raises(OutOfBlocksError):
        manager.pins.pin(handle)
