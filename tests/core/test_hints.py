"""Hints of conversations, and the clock that ages them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from blockyard import BlockManager, PrefixCaching, Request, Scheduler
from blockyard.errors import InvalidArgumentError, UnknownSequenceError
from blockyard.offload import OffloadManager

ALLOWED = "must be (None or )?one of over, tool_call, turn"


def make(blocks: int = 32, eviction: str = "adaptive") -> BlockManager:
    return BlockManager(
        block_size=2, device_blocks=blocks, watermark=0.0, prefix_caching=PrefixCaching(eviction=eviction)
    )


def serve(manager: BlockManager, prompt: list[int], hint: str | None = None, now: float | None = None) -> int:
    """Serve a prompt; return how many of its tokens were cached."""
    sequence = manager.allocate(prompt)
    manager.complete(manager.take_decision(now=now).ticket)
    manager.mark_computed([sequence])
    manager.free([sequence], hint=hint)
    manager.check()
    return sequence.cached_tokens


def said(name: int, tokens: int) -> list[int]:
    return list(range(1000 * name, 1000 * name + tokens))


@pytest.mark.parametrize("hint", ["", "Over", "done", 1, True, b"over", ["over"]])
def test_an_unknown_hint_is_refused_with_the_allowed_ones_and_changes_nothing(hint):
    manager = make()
    sequence = manager.allocate(said(1, 9))
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed([sequence])
    before = manager.stats()
    with pytest.raises(InvalidArgumentError, match=ALLOWED):
        manager.free([sequence], hint=hint)
    with pytest.raises(InvalidArgumentError, match=ALLOWED):
        manager.prefix.hint(said(1, 9), hint)
    with pytest.raises(InvalidArgumentError, match=ALLOWED):
        OffloadManager(4).touch([], ended=1.0, hint=hint)
    with pytest.raises(InvalidArgumentError, match=ALLOWED):
        Scheduler(make()).add(Request("a", [1, 2, 3], max_tokens=1, hint=hint))
    assert manager.stats() == before


@pytest.mark.parametrize(
    "now", [-1, -math.inf, math.inf, math.nan, 10**400, True, np.True_, np.float32(-1), "1", [1.0], 1j]
)
def test_a_time_that_is_none_is_refused_and_ends_no_step(now):
    manager = make()
    with pytest.raises(InvalidArgumentError, match=r"^now is .*, must be a finite number of seconds, 0 or more"):
        manager.take_decision(now=now)
    assert manager.stats().steps == 0
    with pytest.raises(InvalidArgumentError, match=r"^ended is .*, must be a finite number of seconds, 0 or more"):
        OffloadManager(4).touch([], ended=now)


@pytest.mark.parametrize("now", [0, -0.0, 10**30, 1e308, np.float32(3), np.int64(3)])
def test_any_finite_number_of_seconds_is_a_time(now):
    manager = make()
    for time in (now, 5.0, now):
        serve(manager, said(1, 9), hint="turn", now=time)
        OffloadManager(4).touch([], ended=time)
    assert manager.stats().resumed_turns["turn"] == 2


def test_a_hint_for_a_freed_sequence_is_refused_and_not_counted():
    manager = make()
    sequence = manager.allocate(said(1, 9))
    manager.free([sequence])
    before = manager.stats()
    with pytest.raises(UnknownSequenceError, match="has been freed"):
        manager.free([sequence], hint="over")
    assert manager.stats() == before


def test_a_hint_for_the_host_says_when_the_request_ended():
    with pytest.raises(InvalidArgumentError, match="ended is None"):
        OffloadManager(4).touch([], hint="over")


def test_a_conversation_that_is_over_goes_first_but_not_what_others_share():
    manager = make(blocks=20)
    system = said(9, 8)
    serve(manager, system + said(1, 12))
    serve(manager, system + said(2, 12), hint="over")
    serve(manager, said(3, 20))  # evicts what it needs
    assert manager.prefix.lookup([*system, *said(2, 12), 0]).tokens == len(system)
    assert manager.prefix.lookup([*system, *said(1, 12), 0]).tokens == len(system) + 12


def test_a_hint_after_the_last_turn_counts_as_one_at_its_end():
    manager = make(blocks=24)
    for name in (1, 2):
        serve(manager, said(name, 20))
    assert manager.prefix.hint(said(2, 20), "over") == 20
    serve(manager, said(3, 20))
    assert [manager.prefix.lookup([*said(name, 20), 0]).tokens for name in (1, 2)] == [20, 8]


def test_hints_are_counted_and_so_are_the_conversations_that_went_on():
    manager = make(blocks=64)
    for turn in (1, 2, 3):
        serve(manager, said(1, 20 * turn), hint="tool_call")
    serve(manager, said(2, 20), hint="turn")
    serve(manager, said(1, 80), hint="over")
    stats = manager.stats()
    assert stats.hinted_turns == {"over": 1, "tool_call": 3, "turn": 1}
    assert stats.resumed_turns == {"over": 0, "tool_call": 3, "turn": 0}
    assert stats.as_dict()["resumed_turns_tool_call"] == 3


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_other_policies_ignore_hints_and_the_clock(eviction):
    with_hints, without = make(16, eviction), make(16, eviction)
    for at in range(60):
        prompt = said(at * 7 % 5, 4 + at % 9)
        assert serve(with_hints, prompt, hint=("over", "turn", None)[at % 3], now=at * 9.0) == serve(without, prompt)
    assert set(with_hints.stats().hinted_turns.values()) == {0}


def test_a_fast_conversation_outlives_a_slow_one_that_spoke_later():
    manager = make(blocks=64)
    now, slow = 0.0, 0
    for turn in range(60):
        now += 10
        serve(manager, said(1, 20), now=now)
        if turn % 12 == 0:
            slow += 1
            serve(manager, said(2, 20), now=now + 1)
    serve(manager, said(2, 20), now=now + 2)
    for name in range(3, 9):
        serve(manager, said(name, 20), now=now + 3)
    assert manager.prefix.lookup([*said(1, 20), 0]).tokens == 20


def test_time_goes_on_from_a_clock_that_starts_again():
    manager = make()
    for now in (1e9, 1e9 + 5, 3.0, 8.0, 8.0):
        serve(manager, said(1, 9), now=now)
    serve(manager, said(1, 9))
    assert manager.stats().steps == 6


def test_a_scheduler_hands_the_hint_of_each_request_to_the_cache():
    scheduler = Scheduler(make(blocks=64))
    hints = ["over", "turn", None, "turn"]
    for number, hint in enumerate(hints):
        scheduler.add(Request(str(number), said(number, 9), max_tokens=1, hint=hint))
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        scheduler.complete(step.decision.ticket)
        scheduler.update(step, [7] * step.num_draws)
    assert scheduler.manager.stats().hinted_turns == {"over": 1, "tool_call": 0, "turn": 2}
