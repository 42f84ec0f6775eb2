"""The whole books as bytes, and back."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from prompts import allocate_prompts

from blockyard import BlockManager, BlockyardError, CacheGroup, PrefixCaching
from blockyard.errors import InvariantError, SnapshotError


def step(books: BlockManager) -> None:
    books.complete(books.take_decision().ticket)


def used() -> tuple[BlockManager, list[int]]:
    """Books with a shared prefix, a fork, a swapped sequence, cached blocks and events."""
    books = BlockManager(
        block_size=4, device_blocks=16, host_blocks=8, watermark=0.1, prefix_caching=PrefixCaching(max_events=50)
    )
    prompts = [list(range(10)), [*range(8), 99, 98, 97], list(range(50, 59))]
    handles = [int(h) for h in allocate_prompts(books, prompts)[0]]
    step(books)
    books.mark_computed(handles)
    books.free(handles.pop(0))
    handles += [int(h) for h in books.fork(handles[0], 1)]
    books.swap_out(handles[1])
    step(books)
    return books, handles


def seen(books: BlockManager, handles: list[int]) -> list[object]:
    tables = [books.block_table(h).tolist() for h in handles]
    return [tables, [books.tier(h) for h in handles], [books.num_tokens(h) for h in handles], books.stats()]


def test_a_restored_manager_goes_on_where_the_other_stopped() -> None:
    books, handles = used()
    data = books.snapshot()
    again = BlockManager.restore(data)
    again.check()
    assert again.snapshot() == data
    assert seen(again, handles) == seen(books, handles)
    for one in (books, again):
        one.append([handles[0], handles[2]], token_ids=[1, 2])
        one.swap_in(handles[1])
        step(one)
        one.mark_computed(handles)
    assert seen(again, handles) == seen(books, handles)
    assert again.prefix.lookup(list(range(10))).tokens == books.prefix.lookup(list(range(10))).tokens == 8
    theirs, ours = again.prefix.take_events(), books.prefix.take_events()
    assert (theirs.first, len(theirs)) == (ours.first, len(ours))
    assert np.array_equal(theirs.keys, ours.keys)
    assert again.allocate(counts=[5]).tolist() == books.allocate(counts=[5]).tolist()


def test_a_manager_with_open_tickets_is_not_written_and_the_error_says_why() -> None:
    books, handles = used()
    books.swap_in(handles[1])
    with pytest.raises(SnapshotError, match="0 tickets are in flight, 1 pairs of the open step"):
        books.snapshot()
    ticket = books.take_decision().ticket
    with pytest.raises(SnapshotError, match="1 tickets are in flight"):
        books.snapshot()
    books.complete(ticket)
    books.snapshot()


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
    """Books of two groups, with null blocks, a fork and a swapped sequence."""
    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(5)]
    books = BlockManager(block_size=4, device_blocks=32, host_blocks=16, groups=groups, prefix_caching=True)
    handles = allocate_prompts(books, [list(range(18)), list(range(30, 35))])[0]
    step(books)
    books.mark_computed(handles)
    books.fork(handles[0], 1)
    books.swap_out(handles[1])
    step(books)
    return books


@pytest.mark.parametrize("books", [used()[0], hybrid()])
def test_a_forged_payload_is_refused_or_gives_a_sound_manager(books: BlockManager) -> None:
    data = books.snapshot()
    assert sealed(data[20:-32]) == data
    for at in range(20, len(data) - 32):
        payload = bytearray(data[20:-32])
        payload[at - 20] ^= 0x03
        try:
            BlockManager.restore(sealed(bytes(payload))).check()
        except SnapshotError:
            continue


def recurrent() -> BlockManager:
    """Books of a recurrent group: null blocks stand before the state."""
    books = BlockManager(block_size=1, device_blocks=8, groups=[CacheGroup.recurrent()], watermark=0)
    books.allocate(counts=[2])
    step(books)
    return books


def two_caches() -> BlockManager:
    """Books with a sequence on the host, its blocks findable in both tiers, quotas and events."""
    books = BlockManager(
        block_size=1,
        device_blocks=4,
        host_blocks=4,
        watermark=0,
        prefix_caching=PrefixCaching(host=True, max_events=8, max_pinned=0.25),
    )
    books.prefix.set_quota(b"one", 2)
    handles = allocate_prompts(books, [[1, 2]], salt=b"one")[0]
    step(books)
    books.mark_computed(handles)
    books.swap_out([int(handles[0])])
    step(books)
    return books


def use(books: BlockManager, handle: int) -> None:
    """What a sequence goes through, and the books checked after each call."""
    calls = [
        lambda: books.append([handle], 1),
        lambda: books.append([handle], 3),
        lambda: books.mark_computed([handle]),
        lambda: books.truncate(handle, 0),
        lambda: books.append([handle], 1),
        lambda: books.swap_in([handle]),
        lambda: allocate_prompts(books, [[1, 2, 9]]),
        lambda: books.free([handle]),
    ]
    for call in calls:
        try:
            call()
            step(books)
        except InvariantError:
            raise
        except BlockyardError:
            continue
        books.check()


@pytest.mark.parametrize("make", [recurrent, two_caches, hybrid])
def test_a_manager_of_a_forged_payload_holds_while_it_is_used(make: Callable[[], BlockManager]) -> None:
    data = make().snapshot()
    payload = data[20:-32]
    accepted = 0
    for at in range(len(payload)):
        for value in (b"\0", b"\1", bytes([payload[at] ^ 2]), b"\xff\xff\xff\xff\x0f"):
            try:
                books = BlockManager.restore(sealed(payload[:at] + value + payload[at + 1 :]))
            except SnapshotError:
                continue
            accepted += 1
            for handle in (1 << 32, 1 << 32 | 1):
                use(books, handle)
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
        (data[:8] + b"\x09" + data[9:], "its version is 9"),
        (data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
    ]:
        with pytest.raises(SnapshotError, match=why):
            BlockManager.restore(damaged)
    with pytest.raises(TypeError):
        BlockManager.restore("text")  # type: ignore[arg-type]
