"""Prompts that differ in anything given never share a block, at every position and every partial length."""

import hashlib
import struct
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from blockyard import BlockManager, PrefixCaching
from blockyard.events import export_keys

Extra = tuple[int, int, bytes]
Given = tuple[bytes | None, int, list[Extra]]

EXTRA = st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from([b"cat", b"dog", b""]))
EXTRAS = st.lists(EXTRA, max_size=3, unique=True)
GIVEN: st.SearchStrategy[Given] = st.tuples(st.sampled_from([None, None, b"", b"a"]), st.integers(0, 1), EXTRAS)
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=30)
# Tokens to append, drafts to append and cut again, and whether a fork goes on in place of the sequence.
PIECES = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3), st.booleans()), max_size=6)


def stream_keys(tokens: Sequence[int], size: int, salt: bytes | None, lora_id: int, extras: list[Extra]) -> list[bytes]:
    """Return what `export_keys` documents, from hashlib alone."""
    stream = b"BLKYKEYS" + struct.pack("<IIIIQ", 1, size, 0, 0, lora_id)
    stream += bytes(32) if salt is None else hashlib.sha256(salt).digest()
    keys = []
    for begin in range(0, len(tokens) - size + 1, size):
        data = b""
        for start, length, digest in sorted(extras):
            if start < begin + size and begin < start + length:
                data += struct.pack("<IIIII", 2**32 - 1, 1, 8 + len(digest), start, length) + digest
                data += b"\xff" * (-len(data) % 4)
        data += struct.pack(f"<{size}I", *tokens[begin : begin + size])
        stream += data + b"\xff" * (-len(data) % 64)
        keys.append(hashlib.sha256(stream).digest())
    return keys


def shared_blocks(size: int, one: Given, other: Given) -> int:
    """Return how many blocks two prompts of the same tokens may share, if they are long enough."""
    differing = set(one[2]) ^ set(other[2])
    return 0 if one[:2] != other[:2] else min((extra[0] // size for extra in differing), default=1 << 30)


def run(manager: BlockManager) -> None:
    manager.complete(manager.take_decision().ticket)


def grow(manager: BlockManager, tokens: list[int], head: int, own: Given, pieces: list[tuple[int, int, bool]]) -> int:
    """Compute a text whose first `head` tokens are the prompt and whose others are appended."""
    salt, lora_id, extras = own
    sequence = int(manager.allocate(tokens[:head], salt=salt, lora_id=lora_id, extras=extras[::-1]))
    run(manager)
    at = len(tokens[:head])
    for count, drafts, forks in [*pieces, (len(tokens), 0, False)]:
        new = tokens[at : at + count]
        at += len(new)
        new += [9] * min(drafts, manager.block_size)  # only the last full block can be reopened
        if new:
            manager.append(sequence, len(new), token_ids=new, lookahead=1)
            run(manager)
            manager.truncate(sequence, at)
        if forks:
            child = int(manager.fork(sequence))
            manager.free(sequence)
            sequence = child
    manager.mark_computed(sequence)
    manager.check()
    return sequence


@given(size=st.integers(1, 9), tokens=TEXTS, one=GIVEN, other=GIVEN)
def test_two_prompts_share_the_keys_before_the_first_difference_and_none_after(
    size: int, tokens: list[int], one: Given, other: Given
):
    keys, others = (
        export_keys(tokens, block_size=size, salt=salt, lora_id=lora_id, extras=extras)
        for salt, lora_id, extras in (one, other)
    )
    shared = min(shared_blocks(size, one, other), len(keys))
    assert keys[:shared] == others[:shared]
    assert not set(keys[shared:]) & set(others[shared:])
    assert keys == stream_keys(tokens, size, *one)


@given(size=st.integers(1, 9), tokens=TEXTS, head=st.integers(1, 30), own=GIVEN, other=GIVEN, pieces=PIECES)
def test_a_block_that_append_fills_has_the_extras_of_all_its_tokens(
    size: int, tokens: list[int], head: int, own: Given, other: Given, pieces: list[tuple[int, int, bool]]
):
    manager = BlockManager(
        block_size=size, device_blocks=160, watermark=0.0, prefix_caching=PrefixCaching(max_events=200)
    )
    salt, lora_id, extras = own
    grow(manager, tokens, head, own, pieces)
    keys = export_keys(tokens, block_size=size, salt=salt, lora_id=lora_id, extras=extras)
    events = manager.prefix.take_events()
    assert [key.tobytes() for key in events.keys] == keys
    assert [parent.tobytes() for parent in events.parents] == [bytes(32), *keys][: len(keys)]
    asked = [*tokens, 8]
    for key, most in ((own, len(keys)), (other, min(len(keys), shared_blocks(size, own, other)))):
        hashed = manager.prefix.hash(asked, salt=key[0], lora_id=key[1], extras=key[2])
        assert manager.prefix.lookup(hashed).tokens == most * size
