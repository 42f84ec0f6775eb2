"""Events of the prefix cache, taken in bulk."""

import numpy as np
import pytest
from managers import step
from prompts import allocate_prompts

from blockyard import BlockManager, PrefixCaching
from blockyard.errors import InvalidArgumentError
from blockyard.events import EventBatch, export_keys

SIZE = 4


def new_manager(device: int = 8, *, host: int = 0, events: int = 100) -> BlockManager:
    return BlockManager(
        block_size=SIZE,
        device_blocks=device,
        host_blocks=host,
        watermark=0.0,
        prefix_caching=PrefixCaching(max_events=events),
    )


def run(manager: BlockManager, prompt: list[int], **key: object) -> int:
    handles, _ = allocate_prompts(manager, [prompt], **key)  # type: ignore[arg-type]
    step(manager)
    manager.mark_computed(handles)
    manager.check()
    return int(handles[0])


def names(batch: EventBatch) -> list[str]:
    return [batch.KINDS[kind] for kind in batch.kinds]


def keys(batch: EventBatch) -> list[bytes]:
    return [key.tobytes() for key in batch.keys]


def test_stored_blocks_have_the_keys_that_other_processes_compute() -> None:
    manager = new_manager()
    handle = run(manager, list(range(11)), salt=b"tenant", lora_id=7)
    batch = manager.prefix.take_events()
    wanted = export_keys(list(range(11)), block_size=SIZE, salt=b"tenant", lora_id=7)
    assert names(batch) == ["stored", "stored"]
    assert keys(batch) == wanted
    assert [parent.tobytes() for parent in batch.parents] == [bytes(32), wanted[0]]
    assert batch.blocks.tolist() == manager.block_table(handle)[:2].tolist()
    assert (batch.tokens.tolist(), batch.lora_ids.tolist()) == ([SIZE, SIZE], [7, 7])
    assert [batch.TIERS[tier] for tier in batch.tiers] == ["device", "device"]
    assert [batch.REASONS[reason] for reason in batch.reasons] == ["", ""]


@pytest.mark.parametrize("size", [3, 16, 20])
def test_keys_of_blocks_found_after_generated_and_beside_extras_are_exact(size: int) -> None:
    manager = BlockManager(
        block_size=size, device_blocks=32, watermark=0.0, prefix_caching=PrefixCaching(max_events=100)
    )
    prompt = list(range(2 * size + 1))
    first = run(manager, prompt)
    for token in range(size):
        manager.append(first, token_ids=[token])
        step(manager)
    manager.mark_computed(first)
    assert keys(manager.prefix.take_events()) == export_keys([*prompt, *range(size)], block_size=size)
    extras = [(size + 1, 1, b"x" * 100)]
    image = run(manager, [*prompt, *range(size)], extras=extras)
    batch = manager.prefix.take_events()
    assert len(batch) == 2
    plain = export_keys(prompt, block_size=size)
    assert batch.parents[0].tobytes() == plain[0]
    assert batch.parents[1].tobytes() == batch.keys[0].tobytes() != plain[1]
    assert keys(batch) == export_keys([*prompt, *range(size)], block_size=size, extras=extras)[1:]
    assert manager.block_table(image)[0] == manager.block_table(first)[0]


def test_evicted_blocks_are_removed_and_copies_in_other_tiers_are_counted() -> None:
    manager = new_manager(device=4, host=4)
    first = run(manager, list(range(8)))
    manager.prefix.take_events()
    manager.swap_out(first)
    step(manager)
    assert len(manager.prefix.take_events()) == 0, "what is swapped out can still be found on the device"
    other = run(manager, list(range(50, 66)))
    batch = manager.prefix.take_events()
    assert names(batch)[:2] == ["removed", "removed"]
    assert sorted(keys(batch)[:2]) == sorted(export_keys(list(range(8)), block_size=SIZE))
    assert [batch.REASONS[reason] for reason in batch.reasons[:2]] == ["evicted", "evicted"]
    assert batch.remaining[:2].tolist() == [1, 1]
    manager.free([first, other])
    run(manager, list(range(100, 108)))
    batch = manager.prefix.take_events()
    assert batch.remaining[batch.kinds == batch.KINDS.index("removed")].tolist() == [0, 0]


def test_what_comes_back_is_stored_again() -> None:
    manager = new_manager(device=4, host=4)
    first = run(manager, list(range(8)))
    manager.swap_out(first)
    step(manager)
    manager.free(run(manager, list(range(50, 66))))
    manager.prefix.take_events()
    manager.swap_in(first)
    step(manager)
    manager.mark_computed(first)
    batch = manager.prefix.take_events()
    stored = batch.kinds == batch.KINDS.index("stored")
    assert [key.tobytes() for key in batch.keys[stored]] == export_keys(list(range(8)), block_size=SIZE)


def test_a_reset_is_one_event() -> None:
    manager = new_manager()
    manager.free(run(manager, list(range(12))))
    manager.prefix.take_events()
    assert manager.prefix.reset()
    batch = manager.prefix.take_events()
    assert names(batch) == ["cleared"]
    assert (batch.blocks.tolist(), keys(batch)) == ([-1], [bytes(32)])


def test_blocks_that_are_merged_or_found_again_are_not_stored_again() -> None:
    manager = new_manager()
    handles, _ = allocate_prompts(manager, [list(range(5)), list(range(5))])
    step(manager)
    manager.mark_computed(handles)
    run(manager, list(range(5)))
    assert len(manager.prefix.take_events()) == 1


def test_numbers_go_on_from_batch_to_batch_and_show_what_was_dropped() -> None:
    manager = new_manager(device=32, events=3)
    run(manager, list(range(8)))
    batch = manager.prefix.take_events()
    assert (batch.first, batch.dropped, len(batch)) == (0, 0, 2)
    run(manager, list(range(100, 120)))
    batch = manager.prefix.take_events()
    assert (batch.first, batch.dropped, len(batch)) == (4, 2, 3)
    assert keys(batch) == export_keys(list(range(100, 120)), block_size=SIZE)[2:]
    batch = manager.prefix.take_events()
    assert (batch.first, batch.dropped, len(batch)) == (7, 0, 0)
    assert repr(batch) == "EventBatch(7 to 7, 0 dropped before)"


def test_replaying_the_events_gives_what_can_be_found() -> None:
    manager = new_manager(device=12)
    rng = np.random.default_rng(1)
    found: dict[bytes, int] = {}
    number = 0
    for _ in range(300):
        prompt = [int(rng.integers(4))] * int(rng.integers(1, 30))
        manager.free(run(manager, prompt))
        if rng.random() < 0.02:
            manager.prefix.reset()
        batch = manager.prefix.take_events()
        assert (batch.first, batch.dropped) == (number, 0)
        number += len(batch)
        for kind, key, block in zip(names(batch), keys(batch), batch.blocks.tolist(), strict=True):
            if kind == "stored":
                found[key] = block
            elif kind == "removed":
                assert found.pop(key) == block
            else:
                found.clear()
        assert len(found) == manager.stats().cached_blocks["device"]
        longest = export_keys(prompt, block_size=SIZE)[: manager.prefix.lookup(prompt).tokens // SIZE]
        assert set(longest) <= set(found)


def test_events_are_off_by_default_and_without_a_prefix_cache() -> None:
    manager = BlockManager(block_size=SIZE, device_blocks=8, prefix_caching=True)
    run(manager, list(range(8)))
    batch = manager.prefix.take_events()
    assert (len(batch), batch.first, batch.keys.shape) == (0, 0, (0, 32))
    off = BlockManager(block_size=SIZE, device_blocks=8)
    run(off, list(range(8)))
    assert len(off.prefix.take_events()) == 0
    with pytest.raises(InvalidArgumentError, match="max_events is 4294967295, must be 0 to 16777216"):
        PrefixCaching(max_events=2**32 - 1)
