"""What must hold of any prefix cache, and what its events say."""

import pytest
from prompts import allocate_prompts

from blockyard import BlockManager, PrefixCaching
from blockyard.errors import InvariantError
from blockyard.testing import EventReplay, ReferencePrefixCache

PROMPT = [1, 2, 3, 4, 5]


def new_manager(events: int = 100) -> BlockManager:
    return BlockManager(block_size=2, device_blocks=4, watermark=0.0, prefix_caching=PrefixCaching(max_events=events))


def run(manager: BlockManager, prompt: list[int]) -> int:
    handles, _ = allocate_prompts(manager, [prompt])
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(handles)
    return int(handles[0])


def test_only_whole_computed_blocks_may_be_found_and_the_last_token_is_always_computed():
    cache = ReferencePrefixCache(block_size=2)
    cache.publish(PROMPT, salt=b"a")
    assert [cache.most(PROMPT, salt=salt) for salt in (b"a", b"b", None)] == [4, 0, 0]
    assert cache.most([1, 2, 3, 9], salt=b"a") == 2
    assert [cache.usable(4, length) for length in (5, 4, 2, 1)] == [4, 2, 0, 0]


def test_counters_that_differ_are_refused():
    cache, manager = ReferencePrefixCache(block_size=2), new_manager()
    run(manager, PROMPT)
    with pytest.raises(InvariantError, match="expected"):
        cache.check(manager.stats())
    cache.count(PROMPT, 0)
    cache.check(manager.stats())


def test_the_replay_of_events_is_what_can_be_found():
    manager, replay = new_manager(), EventReplay()
    manager.free(run(manager, PROMPT))
    replay.apply(manager.prefix.take_events())
    assert len(replay.blocks) == 2
    manager.free(run(manager, [7, 7, 7, 7, 7, 7, 7]))
    replay.apply(manager.prefix.take_events())
    assert (replay.complete, len(replay.blocks)) == (True, manager.stats().cached_blocks["device"])
    assert manager.prefix.reset()
    replay.apply(manager.prefix.take_events())
    assert not replay.blocks


def test_a_loss_of_events_shows_until_the_cache_is_cleared():
    manager, replay = new_manager(events=1), EventReplay()
    manager.free(run(manager, PROMPT))
    replay.apply(manager.prefix.take_events())
    assert not replay.complete
    manager.prefix.reset()
    replay.apply(manager.prefix.take_events())
    assert replay.complete


def test_events_that_are_missing_or_repeated_are_refused():
    manager, replay = new_manager(), EventReplay()
    manager.free(run(manager, PROMPT))
    batch = manager.prefix.take_events()
    replay.apply(batch)
    with pytest.raises(InvariantError, match="events from 0 on"):
        replay.apply(batch)
