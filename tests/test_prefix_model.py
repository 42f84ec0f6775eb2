"""What must hold of any prefix cache, and what its events say."""

import pytest
from prompts import allocate_prompts

from blockyard import BlockManager, PrefixCaching
from blockyard.errors import InvariantError
from blockyard.testing import EventReplay, ReferencePrefixCache

PROMPT = [1, 2, 3, 4, 5]


def manager(events: int = 100) -> BlockManager:
    return BlockManager(block_size=2, device_blocks=4, watermark=0.0, prefix_caching=PrefixCaching(max_events=events))


def run(books: BlockManager, prompt: list[int]) -> int:
    handles, _ = allocate_prompts(books, [prompt])
    books.complete(books.take_decision().ticket)
    books.mark_computed(handles)
    return int(handles[0])


def test_only_whole_computed_blocks_may_be_found_and_the_last_token_is_always_computed():
    cache = ReferencePrefixCache(block_size=2)
    cache.publish(PROMPT, salt=b"a")
    assert [cache.most(PROMPT, salt=salt) for salt in (b"a", b"b", None)] == [4, 0, 0]
    assert cache.most([1, 2, 3, 9], salt=b"a") == 2
    assert [cache.usable(4, length) for length in (5, 4, 2, 1)] == [4, 2, 0, 0]


def test_counters_that_differ_are_refused():
    cache, books = ReferencePrefixCache(block_size=2), manager()
    run(books, PROMPT)
    with pytest.raises(InvariantError, match="expected"):
        cache.check(books.stats())
    cache.count(PROMPT, 0)
    cache.check(books.stats())


def test_the_replay_of_events_is_what_can_be_found():
    books, replay = manager(), EventReplay()
    books.free(run(books, PROMPT))
    replay.apply(books.prefix.take_events())
    assert len(replay.blocks) == 2
    books.free(run(books, [7, 7, 7, 7, 7, 7, 7]))
    replay.apply(books.prefix.take_events())
    assert (replay.complete, len(replay.blocks)) == (True, books.stats().cached_blocks["device"])
    assert books.prefix.reset()
    replay.apply(books.prefix.take_events())
    assert not replay.blocks


def test_a_loss_of_events_shows_until_the_cache_is_cleared():
    books, replay = manager(events=1), EventReplay()
    books.free(run(books, PROMPT))
    replay.apply(books.prefix.take_events())
    assert not replay.complete
    books.prefix.reset()
    replay.apply(books.prefix.take_events())
    assert replay.complete


def test_events_that_are_missing_or_repeated_are_refused():
    books, replay = manager(), EventReplay()
    books.free(run(books, PROMPT))
    batch = books.prefix.take_events()
    replay.apply(batch)
    with pytest.raises(InvariantError, match="events from 0 on"):
        replay.apply(batch)
