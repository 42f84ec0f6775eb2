"""Resume points at intervals: made once prompts part far from any point, and no longer when none did for long."""

from __future__ import annotations

import itertools

from blockyard import BlockManager, CacheGroup, PrefixCaching

SIZE, LENGTH, INTERVAL = 4, 120, 10
"""Tokens of a block and of a prompt, and blocks between two points: five times a window of two blocks."""
FRESH = itertools.count(1000)


def new_manager() -> BlockManager:
    groups = [CacheGroup.full_attention(), CacheGroup.sliding_window(2 * SIZE)]
    caching = PrefixCaching(eviction="lru")
    return BlockManager(block_size=SIZE, device_blocks=200, groups=groups, prefix_caching=caching, watermark=0)


def prompt(shared: list[int] | None = None) -> list[int]:
    """Return a prompt that goes on behind a shared start as no other does."""
    start = shared or []
    return [*start, *itertools.islice(FRESH, LENGTH - len(start))]


def serve(manager: BlockManager, tokens: list[int]) -> int:
    """Compute a prompt in chunks; return its cached tokens."""
    fit = manager.can_allocate(tokens, chunk_tokens=16)
    assert fit, fit
    sequence = manager.allocate(tokens, chunk_tokens=16)
    while True:
        manager.complete(manager.take_decision().ticket)
        manager.mark_computed(sequence)
        if not (chunk := manager.next_chunk(sequence, 16)):
            break
        manager.append([sequence], chunk)
    manager.free(sequence)
    manager.check()
    return sequence.cached_tokens


def has_point(manager: BlockManager, tokens: list[int], blocks: int) -> bool:
    return manager.prefix.lookup(tokens[: blocks * SIZE + 1]).tokens == blocks * SIZE


def test_prompts_that_never_part_keep_one_point_each() -> None:
    manager = new_manager()
    for _ in range(20):
        serve(manager, tokens := prompt())
        assert has_point(manager, tokens, LENGTH // SIZE - 1)
        assert not has_point(manager, tokens, INTERVAL)
    # A prompt and what only its end needs: six prompts of 30 blocks, and their windows.
    assert manager.stats().cached_blocks["device"] > 6 * LENGTH // SIZE


def test_a_prompt_that_parts_far_behind_its_point_and_those_after_it_have_points_at_intervals() -> None:
    manager = new_manager()
    serve(manager, first := prompt())
    parting = prompt(first[: 2 * INTERVAL * SIZE])
    assert serve(manager, parting) == 0
    assert has_point(manager, parting, 2 * INTERVAL), "where both part"
    serve(manager, later := prompt())
    assert has_point(manager, later, INTERVAL)
    # A prompt that resumes there needs them, too.
    for _ in range(3):
        assert serve(manager, prompt(later[: (INTERVAL + 5) * SIZE])) >= INTERVAL * SIZE
    for _ in range(64 * 200 // (LENGTH // SIZE) + 100):
        serve(manager, tokens := prompt())
    assert not has_point(manager, tokens, INTERVAL), "no prompt has parted for 64 turnovers"


def test_a_prompt_that_parts_close_to_its_point_makes_only_that_one() -> None:
    manager = new_manager()
    serve(manager, first := prompt())
    longer = [*first, *prompt()[: INTERVAL * SIZE]]
    assert serve(manager, longer) == LENGTH - SIZE
    serve(manager, later := prompt())
    assert not has_point(manager, later, INTERVAL)
