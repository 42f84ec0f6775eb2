from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from managers import step
from prompts import allocate_prompts

from blockyard import BlockManager
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError, UnknownSequenceError
from blockyard.events import export_keys

SIZE = 4


def new_manager(device: int = 32, host: int = 0) -> BlockManager:
    return BlockManager(block_size=SIZE, device_blocks=device, host_blocks=host, watermark=0.0, prefix_caching=True)


def run(manager: BlockManager, prompt: list[int], **key: object) -> tuple[int, int]:
    """Admit a prompt and compute it: its handle, and how many tokens were cached."""
    handles, cached = allocate_prompts(manager, [prompt], **key)  # type: ignore[arg-type]
    step(manager)
    manager.mark_computed(handles)
    manager.check()
    return int(handles[0]), int(cached[0])


def test_a_prompt_shares_the_computed_blocks_of_an_earlier_one() -> None:
    manager = new_manager()
    first, cached = run(manager, list(range(10)))
    assert cached == 0
    second, cached = run(manager, [*range(8), 99, 98, 97])
    assert cached == 8
    assert list(manager.block_table(first))[:2] == list(manager.block_table(second))[:2]
    assert list(manager.prefix.common_blocks([first, second])) == list(manager.block_table(first))[:2]


def test_blocks_stay_findable_after_their_sequence_has_gone_until_they_are_evicted() -> None:
    manager = new_manager(device=4)
    first, _ = run(manager, list(range(16)))
    manager.free(first)
    assert manager.pool().num_free == 4
    assert manager.prefix.lookup(list(range(16))).tokens == 12
    other, _ = run(manager, list(range(100, 108)))
    assert manager.prefix.lookup(list(range(16))).tokens == 8, "the chain is evicted from its end"
    manager.free(other)
    manager.check()


def test_a_prompt_takes_new_blocks_and_cached_ones_that_nothing_uses() -> None:
    manager = new_manager()
    first, _ = run(manager, list(range(8)))
    longer = [*range(8), 99, 98, 97, 96, 95]
    assert manager.can_allocate(longer).blocks == 2, "two of its four blocks are in use"
    manager.free(first)
    assert manager.can_allocate(longer).blocks == 4, "all four are free now"
    free = manager.pool().num_free
    run(manager, longer)
    assert free - manager.pool().num_free == 4


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    manager = new_manager()
    run(manager, list(range(8)))
    assert run(manager, list(range(8)))[1] == 4


def test_nothing_is_found_before_it_is_computed() -> None:
    manager = new_manager()
    handles, _ = allocate_prompts(manager, [list(range(8))])
    with pytest.raises(SequenceStateError, match="yet to write"):
        manager.mark_computed(handles)
    step(manager)
    assert manager.prefix.lookup(list(range(9))).tokens == 0
    manager.mark_computed(handles)
    assert manager.prefix.lookup(list(range(9))).tokens == 8


def test_blocks_computed_twice_are_merged() -> None:
    manager = new_manager()
    handles, cached = allocate_prompts(manager, [list(range(9)), list(range(9))])
    assert list(cached) == [0, 0]
    step(manager)
    manager.mark_computed(handles)
    manager.check()
    first, second = (list(manager.block_table(int(h))) for h in handles)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert manager.stats().merged_blocks == 2


def test_salt_and_adapter_keep_tenants_apart() -> None:
    manager = new_manager()
    run(manager, list(range(9)), salt=b"a")
    assert run(manager, list(range(9)), salt=b"b")[1] == 0
    assert run(manager, list(range(9)), lora_id=7, salt=b"a")[1] == 0
    assert run(manager, list(range(9)), salt=b"a")[1] == 8


def test_an_extra_decides_its_block_and_all_after_it() -> None:
    manager = new_manager()
    run(manager, list(range(13)), extras=[(5, 3, b"cat")])
    assert run(manager, list(range(13)), extras=[(5, 3, b"dog")])[1] == 4
    assert run(manager, list(range(13)), extras=[(5, 3, b"cat")])[1] == 12


def test_generated_tokens_are_published_too() -> None:
    manager = new_manager()
    handle, _ = run(manager, [1, 2, 3])
    for token in (4, 5, 6):
        manager.append(handle, token_ids=[token])
        step(manager)
    manager.mark_computed(handle)
    assert manager.prefix.lookup([1, 2, 3, 4, 5]).tokens == 4


def test_tokens_without_ids_end_the_publishing_of_a_sequence() -> None:
    manager = new_manager()
    handle, _ = run(manager, [1, 2, 3])
    manager.append(handle)
    step(manager)
    manager.append(handle, token_ids=[5])
    step(manager)
    manager.mark_computed(handle)
    manager.check()
    assert manager.stats().cached_blocks["device"] == 0


def test_what_comes_back_from_the_host_finds_its_cached_device_blocks() -> None:
    manager = new_manager(device=8, host=8)
    handle, _ = run(manager, list(range(10)))
    manager.swap_out(handle)
    step(manager)
    manager.swap_in(handle)
    decision = manager.take_decision()
    assert len(decision.blocks_to_swap_in) == 1, "two of three blocks are still on the device"
    manager.complete(decision.ticket)
    manager.check()


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    manager = new_manager(device=4)
    first, _ = run(manager, list(range(12)))
    manager.free(first)
    before = manager.stats()
    with pytest.raises(OutOfBlocksError, match="asked for 6 device blocks, 4 of 4 are free"):
        allocate_prompts(manager, [list(range(12)), list(range(50, 62))])
    assert manager.stats() == before
    assert manager.prefix.lookup(list(range(13))).tokens == 12
    manager.check()


def test_a_cached_block_that_is_hit_is_not_evicted_for_the_same_prompt() -> None:
    manager = new_manager(device=4)
    first, _ = run(manager, list(range(8)))
    manager.free(first)
    handle, cached = run(manager, [*range(8), *range(50, 58)])
    assert cached == 8
    assert len(set(manager.block_table(handle))) == 4


def test_the_cache_is_reset_only_when_nothing_is_in_use() -> None:
    manager = new_manager()
    handle, _ = run(manager, list(range(8)))
    assert not manager.prefix.reset()
    manager.free(handle)
    assert manager.prefix.reset()
    assert manager.prefix.lookup(list(range(9))).tokens == 0
    manager.check()


def test_the_reserved_token_is_refused_with_its_position() -> None:
    manager = new_manager()
    for prompt in ([1, 2, 2**32 - 1], [2**32 - 1, 2, 3, 4, 5]):
        message = f"token id of a prompt is 4294967295, must be at most 4294967294, at {prompt.index(2**32 - 1)}"
        with pytest.raises(InvalidArgumentError, match=message):
            allocate_prompts(manager, [prompt])
    with pytest.raises(InvalidArgumentError, match=r"prompts\[0\]\[1\] is -1"):
        allocate_prompts(manager, [[1, -1]])
    assert manager.stats().sequences == 0
    manager.check()


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
    manager = new_manager()
    assert manager.stats().hit_rate == 0.0
    run(manager, list(range(9)))
    run(manager, list(range(9)))
    stats = manager.stats()
    assert (stats.prompts, stats.hit_blocks, stats.missed_blocks, stats.hit_tokens) == (2, 2, 2, 8)
    assert stats.hit_rate == 0.5


# ---- ids that are known a step later ----


def test_ids_that_are_named_later_are_cached_as_those_named_at_once() -> None:
    prompt, output = list(range(10)), list(range(50, 62))
    hits = []
    for ahead in (False, True):
        manager = new_manager()
        sequence = manager.allocate(prompt)
        step(manager)
        for token in output:
            if ahead:  # the step is decided before the token of the step before is known
                manager.append(sequence)
                step(manager)
                manager.prefix.note_tokens(sequence, [token])
            else:
                manager.append(sequence, token_ids=[token])
                step(manager)
            manager.mark_computed(sequence)
            manager.check()
        hits.append([manager.prefix.lookup([*prompt, *output[:n], 0]).tokens for n in range(13)])
    assert hits[0] == hits[1]
    assert hits[0][-1] == 20


def test_tokens_are_published_only_as_far_as_their_ids_are_known() -> None:
    manager = new_manager()
    a, b = manager.allocate([1, 2, 3], [5, 6, 7])
    manager.append([a, b], 6)
    step(manager)
    manager.mark_computed([a, b])
    assert manager.prefix.lookup([1, 2, 3, 4, 0]).tokens == 0
    manager.prefix.note_tokens([b, a], [8, 4, 9, 9, 9, 9], np.array([1, 5], np.uint32))
    manager.mark_computed([a, b])
    assert manager.prefix.lookup([1, 2, 3, 4, 9, 9, 9, 9, 0]).tokens == 8
    assert manager.prefix.lookup([5, 6, 7, 8, 9, 9, 9, 9, 0]).tokens == 4


def test_a_sequence_that_is_cut_behind_unknown_ids_keeps_those_that_are_known() -> None:
    manager = new_manager()
    sequence = manager.allocate(list(range(7)))
    manager.append(sequence, 4)
    step(manager)
    manager.truncate(sequence, 9)
    manager.prefix.note_tokens(sequence, [7, 8], 2)
    manager.mark_computed(sequence)
    assert manager.prefix.lookup([*range(8), 0]).tokens == 8
    manager.check()


@pytest.mark.parametrize(
    ("tokens", "count", "message"),
    [
        ([1, 2, 3], 3, "length of token_ids is 3, must be at most 2, the tokens of sequence"),
        ([1, 2], 1, "length of token_ids is 2, must be 1, the tokens"),
        ([2**32 - 1], 1, "4294967295"),
        ([-1], 1, "token_ids"),
    ],
)
def test_ids_of_tokens_that_there_are_not_are_refused(tokens: list[int], count: int, message: str) -> None:
    manager = new_manager()
    sequence = manager.allocate([1, 2, 3])
    manager.append(sequence, 2)
    with pytest.raises(InvalidArgumentError, match=message):
        manager.prefix.note_tokens(sequence, tokens, count)
    with pytest.raises(InvalidArgumentError, match="twice"):
        manager.prefix.note_tokens([sequence, sequence], [4, 5])
    with pytest.raises(UnknownSequenceError):
        manager.prefix.note_tokens([sequence, 99], [4, 5])
    manager.prefix.note_tokens(sequence, [4, 5], 2)
    step(manager)
    manager.mark_computed(sequence)
    assert manager.prefix.lookup([1, 2, 3, 4, 0]).tokens == 4


def test_ids_of_a_sequence_that_was_admitted_without_are_passed_over() -> None:
    manager = new_manager()
    sequence = manager.allocate(3)
    manager.append(sequence)
    manager.prefix.note_tokens(sequence, [4])
    step(manager)
    manager.mark_computed(sequence)
    manager.check()
    assert manager.stats().cached_blocks["device"] == 0


def test_a_block_that_a_fork_shares_gets_no_second_name() -> None:
    manager = new_manager()
    parent = manager.allocate([1, 2, 3])
    manager.append(parent)
    step(manager)
    child = manager.fork(parent)
    manager.prefix.note_tokens([parent, child], [4, 5])
    manager.mark_computed([child, parent])
    manager.check()
    assert manager.stats().cached_blocks["device"] == 0
    manager.append([parent, child], 4)
    manager.prefix.note_tokens([parent, child], [6, 6, 6, 6, 7, 7, 7, 7], 4)
    step(manager)
    manager.mark_computed([child, parent])
    manager.check()


# ---- prompts that are hashed once ----


def test_a_hashed_prompt_is_admitted_as_its_tokens_are() -> None:
    manager = new_manager(host=8)
    tokens = list(range(10))
    options: dict[str, object] = {"salt": b"a", "lora_id": 3, "extras": [(4, 4, b"image")]}
    hashed = manager.prefix.hash(tokens, **options)  # type: ignore[arg-type]
    assert (len(hashed), repr(hashed)) == (10, "HashedPrompt(10 tokens)")
    first = manager.allocate(tokens, **options)  # type: ignore[call-overload]
    step(manager)
    manager.append(first, token_ids=[10])
    step(manager)
    manager.mark_computed(first)
    assert manager.prefix.lookup(hashed).tokens == 8
    assert manager.can_allocate(hashed).blocks == 1
    second = manager.allocate(hashed)
    assert second.cached_tokens == 8
    assert manager.block_table(second)[:2].tolist() == manager.block_table(first)[:2].tolist()
    manager.append(second, 2, token_ids=[10, 11])
    step(manager)
    manager.mark_computed(second)
    assert manager.allocate([*tokens, 10, 11, 12], **options).cached_tokens == 12  # type: ignore[call-overload]
    plain, mixed = manager.allocate(tokens, hashed)
    assert (plain.cached_tokens, mixed.cached_tokens) == (0, 8)
    pin, cached = manager.pins.pin_prompt(hashed)
    assert cached == 8
    manager.pins.unpin(pin)
    manager.check()


def test_a_hashed_prompt_serves_other_managers_of_its_block_size() -> None:
    hashed = new_manager().prefix.hash(list(range(9)))
    other, larger = new_manager(), BlockManager(block_size=8, device_blocks=4, prefix_caching=True)
    assert other.allocate(hashed).cached_tokens == 0
    step(other)
    with pytest.raises(InvalidArgumentError, match="block_size of a hashed prompt is 4, must be 8, the manager's"):
        larger.allocate(hashed)
    larger.check()


@pytest.mark.parametrize("options", [{"salt": b"a"}, {"lora_id": 1}, {"extras": [(0, 1, b"x")]}])
def test_what_a_hashed_prompt_depends_on_is_not_given_again(options: dict[str, object]) -> None:
    manager = new_manager()
    hashed = manager.prefix.hash(list(range(9)))
    with pytest.raises(InvalidArgumentError, match=r"prompts\[0\] is a HashedPrompt: its salt, lora_id and extras"):
        manager.allocate(hashed, **options)  # type: ignore[call-overload]
    assert manager.stats().sequences == 0


def test_what_cannot_be_hashed_is_refused() -> None:
    manager = new_manager()
    with pytest.raises(InvalidArgumentError, match="4294967295"):
        manager.prefix.hash([2**32 - 1])
    with pytest.raises(
        InvalidArgumentError, match="length of an extra is 0, must be 1 to 4294967288, of an extra that starts at"
    ):
        manager.prefix.hash(list(range(9)), extras=[(7, 0, b"x")])
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        manager.prefix.hash("text")  # type: ignore[arg-type]
