from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError, UnknownSequenceError
from blockyard.events import export_keys

SIZE = 4


def manager(device: int = 32, host: int = 0) -> BlockManager:
    return BlockManager(block_size=SIZE, device_blocks=device, host_blocks=host, watermark=0.0, prefix_caching=True)


def step(books: BlockManager) -> None:
    books.complete(books.take_decision().ticket)
    books.check()


def run(books: BlockManager, prompt: list[int], **key: object) -> tuple[int, int]:
    """Admit a prompt and compute it: its handle, and how many tokens were cached."""
    handles, cached = allocate_prompts(books, [prompt], **key)  # type: ignore[arg-type]
    step(books)
    books.mark_computed(handles)
    books.check()
    return int(handles[0]), int(cached[0])


def test_a_prompt_shares_the_computed_blocks_of_an_earlier_one() -> None:
    books = manager()
    first, cached = run(books, list(range(10)))
    assert cached == 0
    second, cached = run(books, [*range(8), 99, 98, 97])
    assert cached == 8
    assert list(books.block_table(first))[:2] == list(books.block_table(second))[:2]
    assert list(books.prefix.common_blocks([first, second])) == list(books.block_table(first))[:2]


def test_blocks_stay_findable_after_their_sequence_has_gone_until_they_are_evicted() -> None:
    books = manager(device=4)
    first, _ = run(books, list(range(16)))
    books.free(first)
    assert books.pool().num_free == 4
    assert books.prefix.lookup(list(range(16))).tokens == 12
    other, _ = run(books, list(range(100, 108)))
    assert books.prefix.lookup(list(range(16))).tokens == 8, "the chain is evicted from its end"
    books.free(other)
    books.check()


def test_a_prompt_takes_new_blocks_and_cached_ones_that_nothing_uses() -> None:
    books = manager()
    first, _ = run(books, list(range(8)))
    longer = [*range(8), 99, 98, 97, 96, 95]
    assert books.can_allocate(longer).blocks == 2, "two of its four blocks are in use"
    books.free(first)
    assert books.can_allocate(longer).blocks == 4, "all four are free now"
    free = books.pool().num_free
    run(books, longer)
    assert free - books.pool().num_free == 4


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    books = manager()
    run(books, list(range(8)))
    assert run(books, list(range(8)))[1] == 4


def test_nothing_is_found_before_it_is_computed() -> None:
    books = manager()
    handles, _ = allocate_prompts(books, [list(range(8))])
    with pytest.raises(SequenceStateError, match="yet to write"):
        books.mark_computed(handles)
    step(books)
    assert books.prefix.lookup(list(range(9))).tokens == 0
    books.mark_computed(handles)
    assert books.prefix.lookup(list(range(9))).tokens == 8


def test_blocks_computed_twice_are_merged() -> None:
    books = manager()
    handles, cached = allocate_prompts(books, [list(range(9)), list(range(9))])
    assert list(cached) == [0, 0]
    step(books)
    books.mark_computed(handles)
    books.check()
    first, second = (list(books.block_table(int(h))) for h in handles)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert books.stats().merged_blocks == 2


def test_salt_and_adapter_keep_tenants_apart() -> None:
    books = manager()
    run(books, list(range(9)), salt=b"a")
    assert run(books, list(range(9)), salt=b"b")[1] == 0
    assert run(books, list(range(9)), lora_id=7, salt=b"a")[1] == 0
    assert run(books, list(range(9)), salt=b"a")[1] == 8


def test_an_extra_decides_its_block_and_all_after_it() -> None:
    books = manager()
    run(books, list(range(13)), extras=[(0, 1, 3, b"cat")])
    assert run(books, list(range(13)), extras=[(0, 1, 3, b"dog")])[1] == 4
    assert run(books, list(range(13)), extras=[(0, 1, 3, b"cat")])[1] == 12


def test_generated_tokens_are_published_too() -> None:
    books = manager()
    handle, _ = run(books, [1, 2, 3])
    for token in (4, 5, 6):
        books.append(handle, token_ids=[token])
        step(books)
    books.mark_computed(handle)
    assert books.prefix.lookup([1, 2, 3, 4, 5]).tokens == 4


def test_tokens_without_ids_end_the_publishing_of_a_sequence() -> None:
    books = manager()
    handle, _ = run(books, [1, 2, 3])
    books.append(handle)
    step(books)
    books.append(handle, token_ids=[5])
    step(books)
    books.mark_computed(handle)
    books.check()
    assert books.stats().cached_blocks["device"] == 0


def test_what_comes_back_from_the_host_finds_its_cached_device_blocks() -> None:
    books = manager(device=8, host=8)
    handle, _ = run(books, list(range(10)))
    books.swap_out(handle)
    step(books)
    books.swap_in(handle)
    decision = books.take_decision()
    assert len(decision.blocks_to_swap_in) == 1, "two of three blocks are still on the device"
    books.complete(decision.ticket)
    books.check()


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    books = manager(device=4)
    first, _ = run(books, list(range(12)))
    books.free(first)
    before = books.stats()
    with pytest.raises(OutOfBlocksError, match="asked for 6 device blocks, 4 of 4 are free"):
        allocate_prompts(books, [list(range(12)), list(range(50, 62))])
    assert books.stats() == before
    assert books.prefix.lookup(list(range(13))).tokens == 12
    books.check()


def test_a_cached_block_that_is_hit_is_not_evicted_for_the_same_prompt() -> None:
    books = manager(device=4)
    first, _ = run(books, list(range(8)))
    books.free(first)
    handle, cached = run(books, [*range(8), *range(50, 58)])
    assert cached == 8
    assert len(set(books.block_table(handle))) == 4


def test_the_cache_is_reset_only_when_nothing_is_in_use() -> None:
    books = manager()
    handle, _ = run(books, list(range(8)))
    assert not books.prefix.reset()
    books.free(handle)
    assert books.prefix.reset()
    assert books.prefix.lookup(list(range(9))).tokens == 0
    books.check()


def test_the_reserved_token_is_refused_with_its_position() -> None:
    books = manager()
    for prompt in ([1, 2, 2**32 - 1], [2**32 - 1, 2, 3, 4, 5]):
        with pytest.raises(InvalidArgumentError, match="token id is 4294967295"):
            allocate_prompts(books, [prompt])
    with pytest.raises(InvalidArgumentError, match="must be uint32"):
        allocate_prompts(books, [[1, -1]])
    with pytest.raises(InvalidArgumentError, match="block of an extra key is 2"):
        allocate_prompts(books, [list(range(8))], extras=[(0, 2, 0, b"x")])
    with pytest.raises(InvalidArgumentError, match="prompt 5"):
        allocate_prompts(books, [list(range(8))], extras=[(5, 0, 0, b"x")])
    assert books.stats().sequences == 0
    books.check()


def test_exported_keys_are_plain_sha256_of_the_documented_stream() -> None:
    for size in (3, 16, 20):
        tokens = np.arange(5 * size + 1, dtype=np.uint32) * 7
        stream = b"BLKYKEYS" + struct.pack("<IIIIQ", 1, size, 2, 0, 9) + hashlib.sha256(b"tenant").digest()
        wanted = []
        for block in tokens[: 5 * size].reshape(5, size):
            data = block.astype("<u4").tobytes()
            stream += data + b"\xff" * (-len(data) % 64)
            wanted.append(hashlib.sha256(stream).digest())
        assert export_keys(tokens, block_size=size, salt=b"tenant", lora_id=9, cache_group=2) == wanted
    with pytest.raises(InvalidArgumentError):
        export_keys([1], block_size=0)


def test_the_hit_rate_counts_full_blocks() -> None:
    books = manager()
    assert books.stats().hit_rate == 0.0
    run(books, list(range(9)))
    run(books, list(range(9)))
    stats = books.stats()
    assert (stats.prompts, stats.hit_blocks, stats.missed_blocks, stats.hit_tokens) == (2, 2, 2, 8)
    assert stats.hit_rate == 0.5


# ---- ids that are known a step later ----


def test_ids_that_are_named_later_are_cached_as_those_named_at_once() -> None:
    prompt, output = list(range(10)), list(range(50, 62))
    hits = []
    for ahead in (False, True):
        books = manager()
        sequence = books.allocate(prompt)
        step(books)
        for token in output:
            if ahead:  # the step is decided before the token of the step before is known
                books.append(sequence)
                step(books)
                books.prefix.note_tokens(sequence, [token])
            else:
                books.append(sequence, token_ids=[token])
                step(books)
            books.mark_computed(sequence)
            books.check()
        hits.append([books.prefix.lookup([*prompt, *output[:n], 0]).tokens for n in range(13)])
    assert hits[0] == hits[1]
    assert hits[0][-1] == 20


def test_tokens_are_published_only_as_far_as_their_ids_are_known() -> None:
    books = manager()
    a, b = books.allocate([1, 2, 3], [5, 6, 7])
    books.append([a, b], 6)
    step(books)
    books.mark_computed([a, b])
    assert books.prefix.lookup([1, 2, 3, 4, 0]).tokens == 0
    books.prefix.note_tokens([b, a], [8, 4, 9, 9, 9, 9], np.array([1, 5], np.uint32))
    books.mark_computed([a, b])
    assert books.prefix.lookup([1, 2, 3, 4, 9, 9, 9, 9, 0]).tokens == 8
    assert books.prefix.lookup([5, 6, 7, 8, 9, 9, 9, 9, 0]).tokens == 4


def test_a_sequence_that_is_cut_behind_unknown_ids_keeps_those_that_are_known() -> None:
    books = manager()
    sequence = books.allocate(list(range(7)))
    books.append(sequence, 4)
    step(books)
    books.truncate(sequence, 9)
    books.prefix.note_tokens(sequence, [7, 8], 2)
    books.mark_computed(sequence)
    assert books.prefix.lookup([*range(8), 0]).tokens == 8
    books.check()


@pytest.mark.parametrize(
    ("tokens", "count", "message"),
    [
        ([1, 2, 3], 3, "number of token ids is 3, must be at most 2, the tokens of sequence"),
        ([1, 2], 1, "number of token ids is 2, must be 1, the tokens"),
        ([2**32 - 1], 1, "4294967295"),
        ([-1], 1, "token_ids"),
    ],
)
def test_ids_of_tokens_that_there_are_not_are_refused(tokens: list[int], count: int, message: str) -> None:
    books = manager()
    sequence = books.allocate([1, 2, 3])
    books.append(sequence, 2)
    with pytest.raises(InvalidArgumentError, match=message):
        books.prefix.note_tokens(sequence, tokens, count)
    with pytest.raises(InvalidArgumentError, match="twice"):
        books.prefix.note_tokens([sequence, sequence], [4, 5])
    with pytest.raises(UnknownSequenceError):
        books.prefix.note_tokens([sequence, 99], [4, 5])
    books.prefix.note_tokens(sequence, [4, 5], 2)
    step(books)
    books.mark_computed(sequence)
    assert books.prefix.lookup([1, 2, 3, 4, 0]).tokens == 4


def test_ids_of_a_sequence_that_was_admitted_without_are_passed_over() -> None:
    books = manager()
    sequence = books.allocate(3)
    books.append(sequence)
    books.prefix.note_tokens(sequence, [4])
    step(books)
    books.mark_computed(sequence)
    books.check()
    assert books.stats().cached_blocks["device"] == 0


def test_a_block_that_a_fork_shares_gets_no_second_name() -> None:
    books = manager()
    parent = books.allocate([1, 2, 3])
    books.append(parent)
    step(books)
    child = books.fork(parent)
    books.prefix.note_tokens([parent, child], [4, 5])
    books.mark_computed([child, parent])
    books.check()
    assert books.stats().cached_blocks["device"] == 0
    books.append([parent, child], 4)
    books.prefix.note_tokens([parent, child], [6, 6, 6, 6, 7, 7, 7, 7], 4)
    step(books)
    books.mark_computed([child, parent])
    books.check()


# ---- prompts that are hashed once ----


def test_a_hashed_prompt_is_admitted_as_its_tokens_are() -> None:
    books = manager(host=8)
    tokens = list(range(10))
    options: dict[str, object] = {"salt": b"a", "lora_id": 3, "extras": [(0, 1, 7, b"image")]}
    hashed = books.prefix.hash(tokens, **options)  # type: ignore[arg-type]
    assert (len(hashed), repr(hashed)) == (10, "HashedPrompt(10 tokens)")
    first = books.allocate(tokens, **options)  # type: ignore[call-overload]
    step(books)
    books.append(first, token_ids=[10])
    step(books)
    books.mark_computed(first)
    assert books.prefix.lookup(hashed).tokens == 8
    assert books.can_allocate(hashed).blocks == 1
    second = books.allocate(hashed)
    assert second.cached_tokens == 8
    assert books.block_table(second)[:2].tolist() == books.block_table(first)[:2].tolist()
    books.append(second, 2, token_ids=[10, 11])
    step(books)
    books.mark_computed(second)
    assert books.allocate([*tokens, 10, 11, 12], **options).cached_tokens == 12  # type: ignore[call-overload]
    plain, mixed = books.allocate(tokens, hashed)
    assert (plain.cached_tokens, mixed.cached_tokens) == (0, 8)
    pin, cached = books.pins.pin_prompt(hashed, 10)
    assert cached == 8
    books.pins.unpin(pin)
    books.check()


def test_a_hashed_prompt_serves_other_managers_of_its_block_size() -> None:
    hashed = manager().prefix.hash(list(range(9)))
    other, larger = manager(), BlockManager(block_size=8, device_blocks=4, prefix_caching=True)
    assert other.allocate(hashed).cached_tokens == 0
    step(other)
    with pytest.raises(InvalidArgumentError, match="block_size of a hashed prompt is 4, must be 8, the manager's"):
        larger.allocate(hashed)
    larger.check()


@pytest.mark.parametrize("options", [{"salt": b"a"}, {"lora_id": 1}, {"extras": [(0, 0, 1, b"x")]}])
def test_what_a_hashed_prompt_depends_on_is_not_given_again(options: dict[str, object]) -> None:
    books = manager()
    hashed = books.prefix.hash(list(range(9)))
    with pytest.raises(InvalidArgumentError, match=r"prompts\[0\] is a HashedPrompt: its salt, lora_id and extras"):
        books.allocate(hashed, **options)  # type: ignore[call-overload]
    assert books.stats().sequences == 0


def test_what_cannot_be_hashed_is_refused() -> None:
    books = manager()
    with pytest.raises(InvalidArgumentError, match="4294967295"):
        books.prefix.hash([2**32 - 1])
    with pytest.raises(InvalidArgumentError, match="block of an extra key is 2, must be rising, and below 2"):
        books.prefix.hash(list(range(9)), extras=[(0, 2, 1, b"x")])
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        books.prefix.hash("text")  # type: ignore[arg-type]
