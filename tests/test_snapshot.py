"""The whole manager as bytes, and back."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from handles import first_handles
from prompts import allocate_prompts

from blockyard import BlockManager, BlockyardError, CacheGroup, PrefixCaching
from blockyard.errors import InvariantError, SnapshotError


def step(manager: BlockManager) -> None:
    manager.complete(manager.take_decision().ticket)


def used() -> tuple[BlockManager, list[int]]:
    """A manager with a shared prefix, a fork, a swapped sequence, cached blocks and events."""
    manager = BlockManager(
        block_size=4, device_blocks=16, host_blocks=8, watermark=0.1, prefix_caching=PrefixCaching(max_events=50)
    )
    prompts = [list(range(10)), [*range(8), 99, 98, 97], list(range(50, 59))]
    handles = [int(h) for h in allocate_prompts(manager, prompts)[0]]
    step(manager)
    manager.mark_computed(handles)
    manager.free(handles.pop(0))
    handles += [int(h) for h in manager.fork(handles[0], 1)]
    manager.swap_out(handles[1])
    step(manager)
    return manager, handles


def seen(manager: BlockManager, handles: list[int]) -> list[object]:
    tables = [manager.block_table(h).tolist() for h in handles]
    return [tables, [manager.tier(h) for h in handles], [manager.num_tokens(h) for h in handles], manager.stats()]


def test_a_restored_manager_goes_on_where_the_other_stopped() -> None:
    manager, handles = used()
    data = manager.snapshot()
    again = BlockManager.restore(data)
    again.check()
    assert again.snapshot() == data
    assert seen(again, handles) == seen(manager, handles)
    for one in (manager, again):
        one.append([handles[0], handles[2]], token_ids=[1, 2])
        one.swap_in(handles[1])
        step(one)
        one.mark_computed(handles)
    assert seen(again, handles) == seen(manager, handles)
    assert again.prefix.lookup(list(range(10))).tokens == manager.prefix.lookup(list(range(10))).tokens == 8
    theirs, ours = again.prefix.take_events(), manager.prefix.take_events()
    assert (theirs.first, len(theirs)) == (ours.first, len(ours))
    assert np.array_equal(theirs.keys, ours.keys)
    assert again.allocate(counts=[5]).tolist() == manager.allocate(counts=[5]).tolist()


def test_a_manager_with_open_tickets_is_not_written_and_the_error_says_why() -> None:
    manager, handles = used()
    manager.swap_in(handles[1])
    with pytest.raises(SnapshotError, match="0 tickets are in flight, 1 pairs of the open step"):
        manager.snapshot()
    ticket = manager.take_decision().ticket
    with pytest.raises(SnapshotError, match="1 tickets are in flight"):
        manager.snapshot()
    manager.complete(ticket)
    manager.snapshot()


def test_every_flipped_byte_and_every_other_length_is_refused() -> None:
    data = used()[0].snapshot()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        with pytest.raises(SnapshotError):
            BlockManager.restore(bytes(damaged))
        with pytest.raises(SnapshotError):
            BlockManager.restore(data[:at])
    with pytest.raises(SnapshotError, match="payload"):
        BlockManager.restore(data + b"\0")


def sealed(payload: bytes) -> bytes:
    version = BlockManager(block_size=1, device_blocks=1).snapshot()[8:12]
    head = b"BLKYSNAP" + version + len(payload).to_bytes(8, "little") + payload
    return head + hashlib.sha256(head).digest()


def hybrid() -> BlockManager:
    """A manager of two groups, with null blocks, a fork and a swapped sequence."""
    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(5)]
    manager = BlockManager(block_size=4, device_blocks=32, host_blocks=16, groups=groups, prefix_caching=True)
    handles = allocate_prompts(manager, [list(range(18)), list(range(30, 35))])[0]
    step(manager)
    manager.mark_computed(handles)
    manager.fork(handles[0], 1)
    manager.swap_out(handles[1])
    step(manager)
    return manager


@pytest.mark.parametrize("manager", [used()[0], hybrid()])
def test_a_forged_payload_is_refused_or_gives_a_sound_manager(manager: BlockManager) -> None:
    data = manager.snapshot()
    assert sealed(data[20:-32]) == data
    for at in range(20, len(data) - 32):
        payload = bytearray(data[20:-32])
        payload[at - 20] ^= 0x03
        try:
            BlockManager.restore(sealed(bytes(payload))).check()
        except SnapshotError:
            continue


def recurrent() -> BlockManager:
    """A manager of a recurrent group: null blocks stand before the state."""
    manager = BlockManager(block_size=1, device_blocks=8, groups=[CacheGroup.recurrent()], watermark=0)
    manager.allocate(counts=[2])
    step(manager)
    return manager


def two_caches() -> BlockManager:
    """A manager with a sequence on the host, its blocks findable in both tiers, quotas and events."""
    manager = BlockManager(
        block_size=1,
        device_blocks=4,
        host_blocks=4,
        watermark=0,
        prefix_caching=PrefixCaching(host=True, max_events=8, max_pinned=0.25),
    )
    manager.prefix.set_quota(b"one", 2)
    handles = allocate_prompts(manager, [[1, 2]], salt=b"one")[0]
    step(manager)
    manager.mark_computed(handles)
    manager.swap_out([int(handles[0])])
    step(manager)
    return manager


def use(manager: BlockManager, handle: int) -> None:
    """What a sequence goes through, and the manager checked after each call."""
    calls = [
        lambda: manager.append([handle], 1),
        lambda: manager.append([handle], 3),
        lambda: manager.mark_computed([handle]),
        lambda: manager.truncate(handle, 0),
        lambda: manager.append([handle], 1),
        lambda: manager.swap_in([handle]),
        lambda: allocate_prompts(manager, [[1, 2, 9]]),
        lambda: manager.free([handle]),
    ]
    for call in calls:
        try:
            call()
            step(manager)
        except InvariantError:
            raise
        except BlockyardError:
            continue
        manager.check()


@pytest.mark.parametrize("make", [recurrent, two_caches, hybrid])
def test_a_manager_of_a_forged_payload_holds_while_it_is_used(make: Callable[[], BlockManager]) -> None:
    data = make().snapshot()
    payload = data[20:-32]
    accepted = 0
    for at in range(len(payload)):
        for value in (b"\0", b"\1", bytes([payload[at] ^ 2]), b"\xff\xff\xff\xff\x0f"):
            try:
                manager = BlockManager.restore(sealed(payload[:at] + value + payload[at + 1 :]))
            except SnapshotError:
                continue
            accepted += 1
            for handle in first_handles(manager, 2):
                use(manager, handle)
    assert accepted > 0


@pytest.mark.parametrize("payload", [b"", b"\xff" * 64, b"\x04\x00" + b"\xff" * 9 + b"\x01", b"\x04" * 30])
def test_lengths_are_not_believed(payload: bytes) -> None:
    with pytest.raises(SnapshotError, match="refused"):
        BlockManager.restore(sealed(payload))


def test_what_is_no_snapshot_is_named() -> None:
    data = used()[0].snapshot()
    for damaged, why in [
        (b"", "0 bytes are too few"),
        (b"PK" + data[2:], "does not begin with BLKYSNAP"),
        (data[:8] + bytes([data[8] + 1]) + data[9:], f"its version is {data[8] + 1}"),
        (data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
    ]:
        with pytest.raises(SnapshotError, match=why):
            BlockManager.restore(damaged)
    with pytest.raises(TypeError):
        BlockManager.restore("text")  # type: ignore[arg-type]
