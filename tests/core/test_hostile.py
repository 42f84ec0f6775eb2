"""Hostile lengths and numbers: no call aborts the process, panics, takes the memory of the machine or runs for ever."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest

from blockyard import AllocStatus, BlockManager, CacheGroup, PrefixCaching, StepDecision
from blockyard.errors import InvalidArgumentError, OutOfBlocksError, OutOfMemoryError
from blockyard.events import export_keys


def test_every_public_callable_survives_hostile_arguments(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    command = [sys.executable, hostile.__file__, str(progress)]
    # Each new thread would take 64 MiB of the addresses that are left.
    env = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=env)
    assert not run.stdout
    assert run.returncode == 0, f"died in {progress.read_text()}: {run.stderr[-500:]}"
    assert progress.read_text() == "the end"


def test_a_callable_without_a_case_is_found() -> None:
    def new(self: object, unheard_of: int) -> None: ...

    assert list(hostile.uncovered(hostile.Attack("Nobody", "new", new))) == ["Nobody", "unheard_of"]


class Endless(Sequence[int]):
    """Says that it has three items, and always has another."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return 1

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(1)


def test_a_sequence_without_an_end_is_given_up() -> None:
    with pytest.raises(InvalidArgumentError, match="tokens has more than 16777216 items"):
        export_keys(Endless(), block_size=4)


class Short(Sequence[int]):
    """Says that it has none of its three items."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        return [1, 2, 3][index]


def test_a_sequence_is_read_whatever_it_says_of_its_length() -> None:
    assert export_keys(Short(), block_size=1) == export_keys([1, 2, 3], block_size=1)


@pytest.mark.parametrize("count", [2**20, 2**31])
def test_slots_beyond_the_pool_are_refused_before_they_take_memory(count: int) -> None:
    manager = BlockManager(block_size=4, device_blocks=16)
    (handle,) = manager.allocate(counts=[3])
    manager.complete(manager.take_decision().ticket)
    with pytest.raises(OutOfBlocksError) as caught:
        manager.append([handle], count)
    assert (caught.value.wanted, caught.value.free) == (count // 4, 15)
    assert manager.num_tokens(handle) == 3
    manager.check()


@pytest.mark.parametrize("tokens", [2**24 + 2, 10**8, 2**32 - 1])
def test_a_recurrent_sequence_longer_than_any_is_refused_at_once(tokens: int) -> None:
    manager = BlockManager(block_size=1, device_blocks=64, groups=[CacheGroup.recurrent()], watermark=0)
    assert manager.can_allocate(tokens).status is AllocStatus.NEVER
    with pytest.raises(InvalidArgumentError, match="passed over"):
        manager.allocate(counts=[tokens])
    (handle,) = manager.allocate(counts=[1])
    manager.complete(manager.take_decision().ticket)
    with pytest.raises(InvalidArgumentError):
        manager.append([handle], tokens)
    assert manager.num_tokens(handle) == 1
    manager.check()


def test_a_recurrent_sequence_may_be_far_longer_than_its_pool() -> None:
    manager = BlockManager(block_size=1, device_blocks=64, groups=[CacheGroup.recurrent()], watermark=0)
    assert manager.can_allocate(10**6).status is AllocStatus.OK
    (handle,) = manager.allocate(counts=[10**6])
    assert (manager.num_tokens(handle), manager.pool().num_free) == (10**6, 62)
    manager.free([handle])
    manager.check()


def test_memory_that_is_not_there_is_named_in_bytes() -> None:
    view = np.broadcast_to(np.zeros(1, np.uint32), 2**50)
    with pytest.raises(OutOfMemoryError) as caught:
        export_keys(view, block_size=4)
    assert caught.value.wanted == 2**52
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, s: BlockManager(block_size=4, device_blocks=8, groups=["full"]), "groups[0] is 'full', must be a"),
        (lambda m, s: BlockManager(block_size=4, arena=5), "arena is 5, must be an Arena"),
        (
            lambda m, s: BlockManager(block_size=4, device_blocks=8, host_blocks=2**31),
            "host_blocks is 2147483648, must",
        ),
        (lambda m, s: StepDecision(1, [("copy", 3)]), "transfers[0][1] is 3, must be Pairs"),
        (lambda m, s: m.allocate([1, 2], chunk_tokens=0), "chunk_tokens is 0, must be at least 1"),
        (
            lambda m, s: m.allocate([1, 2**32 - 1]),
            "a token id of a prompt is 4294967295, must be at most 4294967294, at 1",
        ),
        (lambda m, s: m.append(s, [1, 2]), "length of num_tokens is 2, must be 1, the sequences"),
        (lambda m, s: m.append(s, token_ids=[1, 2]), "length of token_ids is 2, must be 1, the tokens"),
        (lambda m, s: m.truncate(s, 9), "num_tokens is 9, must be at most 3"),
        (lambda m, s: m.mark_computed(s, [4]), "num_computed is 4, must be at most 3"),
        (lambda m, s: m.block_table(s, 9), "group is 9, must be below 1"),
        (lambda m, s: m.prefix.set_quota(b"x", 100), "blocks is 100, must be at most the device's 16 blocks"),
    ],
)
def test_a_message_says_which_argument_is_wrong(call: Callable[[Any, int], object], message: str) -> None:
    manager = BlockManager(block_size=4, device_blocks=16, prefix_caching=True)
    sequence = manager.allocate([1, 2, 3])
    manager.complete(manager.take_decision().ticket)
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}"):
        call(manager, sequence)
    assert manager.stats().sequences == 1
    manager.check()


def test_fractions_without_meaning_are_named() -> None:
    for value in (float("nan"), float("inf"), -0.1, 1.0):
        with pytest.raises(InvalidArgumentError, match=r"watermark is .*, must be 0 or more and below 1"):
            BlockManager(block_size=4, device_blocks=16, watermark=value)
        with pytest.raises(InvalidArgumentError, match=r"max_pinned is .*, must be 0 or more and below 1"):
            PrefixCaching(max_pinned=value)
